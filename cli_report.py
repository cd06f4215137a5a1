"""`tilewise report`: one HTML page about the model in force."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import Any

from tilewise.cli_commands import arch_name
from tilewise.cli_output import note, progress_bar
from tilewise.errors import InvalidProfileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from tilewise.cli import _arch, _home, _jobs

    _arch(parser)
    _home(parser)
    _jobs(parser)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the HTML file to write")
    parser.add_argument(
        "--evaluation", type=Path, metavar="FILE", help="what `tilewise evaluate --json` printed (default: judge now)"
    )
    parser.add_argument("--learning-curve", type=Path, metavar="FILE", help="a result of benchmarks/learning_curve.py")


def run(args: argparse.Namespace) -> int:
    """Judge the rows, unless that was done, and write the page."""
    from tilewise.data.store import load_profile
    from tilewise.models.bundle import Bundle
    from tilewise.models.evaluate import evaluate
    from tilewise.models.registry import current
    from tilewise.models.report import read_curve, report, write_report

    arch = arch_name(args)
    place = current(args.op, arch, args.home)
    if not place.is_dir():
        raise InvalidProfileError(f"there is no model of {args.op} for {arch} to report on: `tilewise train` makes one")
    bundle = Bundle.load(place)
    if args.evaluation is not None:
        try:
            evaluation = json.loads(args.evaluation.read_text(encoding="utf-8"))
            missing = [name for name in ("by_shape", "trials", "baselines") if name not in evaluation]
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidProfileError(f"{args.evaluation} is no output of `evaluate --json`: {error}") from error
        if missing:
            raise InvalidProfileError(f"{args.evaluation} is no output of `evaluate --json`: it lacks {missing[0]}")
    else:
        columns: Any = load_profile(args.op, arch, home=args.home).columns
        with progress_bar() as progress:
            evaluation = evaluate(columns, op=args.op, arch=arch, jobs=args.jobs, progress=progress)
    curve = args.learning_curve
    if curve is None:  # the one that comes with a checkout
        shipped = Path(str(resources.files("tilewise"))) / "benchmarks" / "results" / f"learning_curve_{arch}.json"
        curve = shipped if shipped.is_file() else None
    try:
        page = report(bundle, evaluation, None if curve is None else read_curve(curve))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        given = [str(file) for file in (args.evaluation, args.learning_curve) if file is not None]
        if not given:
            raise
        said = f"{type(error).__name__}: {error}"
        raise InvalidProfileError(f"{' or '.join(given)} has another form than the report needs: {said}") from error
    write_report(args.out, page)
    note(f"wrote {args.out}")
    return 0
