"""`tilewise compare`: which picks another model changes."""

from __future__ import annotations

import argparse
from pathlib import Path

from tilewise.cli_commands import arch_name
from tilewise.cli_output import print_fields, print_json
from tilewise.data.traffic import Traffic, read_traffic
from tilewise.dispatch.comparing import Comparison, compare
from tilewise.dispatch.dumping import shape_grid
from tilewise.dispatch.selector import Selector
from tilewise.errors import UnsupportedError
from tilewise.models import registry
from tilewise.models.bundle import Bundle

CURRENT, SHIPPED = "current", "shipped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    what = f"a bundle's folder, the first digits of a published digest, {CURRENT!r} or {SHIPPED!r}"
    parser.add_argument("old", help=what)
    parser.add_argument("new", help=what)
    parser.add_argument(
        "--traffic", metavar="FILE", help="shapes with counts, JSON lines or CSV (default: a grid of 20,160 shapes)"
    )
    parser.add_argument(
        "--top", type=int, default=20, metavar="N", help="changes to print (default: 20); --json has all"
    )
    parser.add_argument("--arch", help="GPU (default: this machine's, or h200)")
    parser.add_argument("--op", default="paged_mqa_logits", help="op (default: paged_mqa_logits)")
    parser.add_argument("--home", metavar="DIR", help="folder of published models (default: $TILEWISE_HOME)")
    parser.add_argument(
        "--no-exact", action="store_true", help="let the models answer even where this very shape was measured"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    arch = arch_name(args)
    traffic = [Traffic(shape, 1.0) for shape in shape_grid()] if args.traffic is None else read_traffic(args.traffic)
    old, new = (
        Selector(
            arch, op=args.op, bundle_dir=bundle_folder(word, args.op, arch, args.home), use_exact=not args.no_exact
        )
        for word in (args.old, args.new)
    )
    found = compare(old, new, traffic)
    print_json(found.to_dict()) if args.json else _print(found, args.top)
    return 0


def bundle_folder(word: str, op: str, arch: str, home: str | None) -> Path:
    """The folder of a bundle that was named on the command line. Raises UnsupportedError or InvalidBundleError."""
    if word == CURRENT:
        folder = registry.current(op, arch, home)
    elif word == SHIPPED:
        folder = registry.shipped(op, arch)
    elif Path(word).is_dir():
        folder = Path(word)
    else:
        matching = sorted({digest for digest in registry.history(op, arch, home) if digest.startswith(word)})
        if len(matching) != 1:
            raise UnsupportedError(
                f"{word!r:.80} is no folder, and {len(matching)} published models of {op} on {arch} begin so"
            )
        folder = registry.current(op, arch, home).parent / matching[0]
    Bundle.load(folder)  # a bundle that cannot be used is refused here, and not answered for by the default
    return folder


def _print(found: Comparison, top: int) -> None:
    print_fields(
        {
            "op": f"{found.op} on {found.arch}",
            "old": found.old_model_id,
            "new": found.new_model_id,
            "shapes": f"{found.shapes}, {found.launches:g} launches",
            "changed": f"{len(found.changes)} shapes, {100 * found.changed_launches:.1f} % of the launches",
            "expected time": _percent(found.expected_time_ratio),
            "measured time": None
            if found.measured_time_ratio is None
            else f"{_percent(found.measured_time_ratio)} over {100 * found.measured_launches:.1f} % of the launches",
        }
    )
    for one in found.changes[:top]:
        print(f"\n{one.shape}, {one.count:g} launches")
        print(f"  old {one.old} ({one.old_source})\n  new {one.new} ({one.new_source})")
        print(f"  expected {_percent(one.expected_ratio)}, measured {_percent(one.measured_ratio)}")


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * (ratio - 1):+.2f} %"
