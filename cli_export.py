"""`tilewise export`: the timings there are, in another tuner's format."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

from tilewise.cli_commands import arch_name
from tilewise.data.output import write_output
from tilewise.errors import InvalidProfileError

FORMATS = ("jsonl", "t4", "aiter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from tilewise.cli import _arch, _home

    _arch(parser)
    _home(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="jsonl",
        help="jsonl (profile rows), t4 (Kernel Tuner's results) or aiter (the best config of each shape, as its tuned "
        "tables) (default: jsonl)",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write here (default: print)")


def run(args: argparse.Namespace) -> int:
    """Write the rows of one op on one GPU."""
    from tilewise.data.exchange import AITER_COLUMNS, aiter_rows, t4_document
    from tilewise.data.records import COLUMNS
    from tilewise.data.store import load_profile

    arch = arch_name(args)
    profile = load_profile(args.op, arch, home=args.home)
    if not len(profile):
        raise InvalidProfileError(f"there are no timings of {args.op} on {arch}: add some with `tilewise import`")
    kinds = {column.name: column.type for column in COLUMNS}
    names = list(profile.columns)
    lists = [[_plain(kinds[name], value) for value in profile.columns[name].tolist()] for name in names]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
    if args.format == "jsonl":
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    elif args.format == "t4":
        text = json.dumps(t4_document(rows), indent=1, allow_nan=False) + "\n"
    else:
        out = io.StringIO()
        writer = csv.DictWriter(out, AITER_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(aiter_rows(rows))
        text = out.getvalue()
    if args.out is None:
        sys.stdout.write(text)
    else:
        write_output(args.out, [text])
    return 0


def _plain(kind: type, value: Any) -> Any:
    """A value as rows have it: null where a number is not there."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return kind(value) if kind is not str else value
