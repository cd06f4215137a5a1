"""`tilewise suggest`: the launches that are worth timing next, as JSON lines for `tilewise collect`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tilewise.cli_commands import arch_name
from tilewise.cli_output import note
from tilewise.data.output import write_output
from tilewise.kernels.arch import get_arch
from tilewise.kernels.shape_sets import SETS, named_set, read_targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from tilewise.cli import _SEED, _arch, _between, _home

    _arch(parser)
    _home(parser)
    parser.add_argument("--budget", type=_between(1, 1 << 24), required=True, metavar="N", help="at most N launches")
    parser.add_argument(
        "--shapes", default="profile", help=f"shapes to choose from: a set ({', '.join(SETS)}) or a file of JSON lines"
    )
    parser.add_argument("--seed", type=_SEED, default=0, help="seed of what is drawn (default: 0)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the lines here (default: print them)")


def run(args: argparse.Namespace) -> int:
    """Print one line a shape: its fields, the configs to time, why, and what the present pick may lose there.

    1 where there is nothing to time, and then no file is written.
    """
    from tilewise.data.store import load_profile
    from tilewise.models.measurements import measurements
    from tilewise.models.sampling import next_launches

    arch = get_arch(arch_name(args))
    targets = named_set(args.shapes, arch) if args.shapes in SETS else read_targets(Path(args.shapes))
    by_shape = {target.shape: target for target in targets}
    columns: Any = load_profile(args.op, arch.name, home=args.home).columns
    measured = measurements(columns, op=args.op, arch=arch.name) if len(columns["op"]) else None
    note(f"looking for launches of {len(by_shape)} shapes that are worth timing, which takes a minute or so")
    found = next_launches(measured, list(by_shape), arch, args.budget, seed=args.seed)
    lines: dict[object, dict[str, object]] = {}
    for launch in found:
        line = lines.setdefault(
            launch.shape,
            {
                **launch.shape.to_dict(),
                "contexts": by_shape[launch.shape].contexts,
                "context_lens": by_shape[launch.shape].context_lens,
                "expected_loss": round(launch.value, 6),
                "configs": [],
                "reasons": [],
            },
        )
        for name, value in (("configs", launch.config.to_dict()), ("reasons", launch.reason)):
            items = line[name]
            assert isinstance(items, list)
            items.append(value)
    if not lines:
        note(f"every launch of these {len(by_shape)} shapes has a timing already: name others with --shapes")
        return 1
    text = "".join(json.dumps(line) + "\n" for line in lines.values())
    if args.out is None:
        sys.stdout.write(text)
    else:
        write_output(args.out, [text])
    return 0
