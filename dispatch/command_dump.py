"""`tilewise dump`: all decisions over a grid, and their digest."""

from __future__ import annotations

import argparse

from tilewise.cli_commands import arch_name
from tilewise.cli_output import print_fields, print_json
from tilewise.data.traffic import read_traffic
from tilewise.dispatch.dumping import dump, shape_grid
from tilewise.dispatch.selector import Selector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--out", metavar="FILE", help="write the decisions as JSON lines (default: the digest alone)")
    parser.add_argument("--shapes", metavar="FILE", help="shapes, JSON lines or CSV (default: a grid of 20,160 shapes)")
    parser.add_argument(
        "--block-kv", type=int, default=64, metavar="N", help="tokens per page of the grid (default: 64)"
    )
    parser.add_argument("--bundle", metavar="DIR", help="folder of a bundle (default: the one in force)")
    parser.add_argument("--arch", help="GPU (default: this machine's, or h200)")
    parser.add_argument("--op", default="paged_mqa_logits", help="op (default: paged_mqa_logits)")
    parser.add_argument("--home", metavar="DIR", help="folder of published models (default: $TILEWISE_HOME)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Dump and print the digest."""
    shapes = shape_grid(block_kv=args.block_kv)
    chosen = shapes if args.shapes is None else [one.shape for one in read_traffic(args.shapes)]
    found = dump(Selector(arch_name(args), op=args.op, home=args.home, bundle_dir=args.bundle), chosen, args.out)
    print_json(found.to_dict()) if args.json else print_fields(found.to_dict())
    return 0
