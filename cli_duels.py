"""`tilewise evaluate --duels-out`: the picks that lose too much, as JSON lines for `tilewise collect`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tilewise.cli_output import note
from tilewise.data.output import write_output
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.kernels.shape_sets import SETS, named_set, read_targets, target_line
from tilewise.models.duels import LIMIT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `tilewise evaluate` that are about duels."""
    parser.add_argument(
        "--duels-out",
        type=Path,
        metavar="FILE",
        help="write the picks that lose too much, with the best and the default, for `tilewise collect` to duel",
    )
    parser.add_argument(
        "--duels-limit",
        type=_share,
        default=LIMIT,
        metavar="X",
        help=f"what is too much, a ratio less 1 (default: {LIMIT})",
    )
    parser.add_argument(
        "--shapes",
        default="profile",
        metavar="SET",
        help=f"where --duels-out finds the context lengths: a set ({', '.join(SETS)}) or a file (default: profile)",
    )


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 10.0:
        raise argparse.ArgumentTypeError(f"must be 0 to 10, got {text[:40]!r}")
    return value


def write(beyond: Iterable[Mapping[str, Any]], arch: str, args: argparse.Namespace) -> None:
    """One line a shape. A profile has no context lengths, only their longest and mean: those are of --shapes."""
    known = named_set(args.shapes, get_arch(arch)) if args.shapes in SETS else read_targets(Path(args.shapes))
    by_shape = {target.shape: target for target in known}
    lines, unknown = [], 0
    for entry in beyond:
        target = by_shape.get(Shape(**entry["shape"]))
        if target is None:
            unknown += 1
            continue
        lines.append(target_line(target, [Config.from_dict(config) for config in entry["configs"]], duel=True))
    write_output(args.duels_out, (json.dumps(line) + "\n" for line in lines))
    note(f"{len(lines)} shapes to duel in {args.duels_out}")
    if unknown:
        note(f"{unknown} more are not in {args.shapes}: name the file that they were collected by as --shapes")
