"""`tilewise retrain`: train on what there is, and put the result in force if it is no worse."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from tilewise.cli_commands import arch_name
from tilewise.cli_output import note, print_fields, print_json, print_metrics, progress_bar
from tilewise.data.home import home_dir, require_writable
from tilewise.errors import InvalidProfileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from tilewise.cli import _SEED, _arch, _folds, _home, _jobs, _json, _traffic

    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="profiles to import first")
    _arch(parser)
    _home(parser)
    _json(parser)
    parser.add_argument("--seed", type=_SEED, default=0, help="seed of training (default: 0)")
    parser.add_argument("--folds", type=_folds, default=10, metavar="N", help="held-out folds, or 0 (default: 10)")
    parser.add_argument("--no-promote", action="store_true", help="store the model, and leave in force what is")
    _traffic(parser)
    _jobs(parser)


def run(args: argparse.Namespace) -> int:
    """Import, train, judge, gate, promote. Returns 0 where the model passed the gate, 1 where it was held back."""
    from tilewise.data.store import import_file, load_profile
    from tilewise.data.traffic import read_traffic
    from tilewise.models.retrain import retrain

    arch = arch_name(args)
    require_writable(home_dir(args.home) / "models" / args.op / arch)
    for path in args.files:
        report = import_file(path, args.home, on_reject=functools.partial(_note_row, path))
        note(f"{path}: {report.accepted} rows accepted, {report.duplicates} repeated, {report.rejected} rejected")
    columns: Any = load_profile(args.op, arch, home=args.home).columns
    if not len(columns["op"]):
        raise InvalidProfileError(f"there are no timings of {args.op} on {arch}: add some with `tilewise import`")
    with progress_bar() as progress:
        made = retrain(
            columns,
            op=args.op,
            arch=arch,
            home=args.home,
            seed=args.seed,
            folds=args.folds,
            traffic=None if args.traffic is None else read_traffic(args.traffic),
            promote=not args.no_promote,
            jobs=args.jobs,
            progress=progress,
        )
    result = made.to_dict()
    if args.json:
        print_json({**result, "metrics": made.candidate.manifest["metrics"]})
    else:
        dropped = "; ".join(f"{count} ({reason})" for reason, count in result["dropped"].items()) or "none"
        print_fields({**result, "dropped": dropped, "gate": made.gate.reason, "replaces": result["replaces"] or "none"})
        print_metrics(made.candidate.manifest["metrics"])
    return 0 if made.gate.passed else 1


def _note_row(path: Path, number: int, reason: str) -> None:
    note(f"{path} row {number}: {reason}")
