"""`tilewise capture-plan`: what to compile before graphs are captured."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tilewise.cli_commands import arch_name
from tilewise.cli_output import print_json, us
from tilewise.dispatch.capture_plan import MAX_LOSS, SHORTEST_CONTEXT, CapturePlan, capture_plan
from tilewise.dispatch.context import Context
from tilewise.dispatch.selector import Selector
from tilewise.models.expected import WORST_CASE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--batch-sizes", required=True, type=_ints, metavar="N,...", help="batch sizes to capture")
    parser.add_argument("--next-n", required=True, type=_ints, metavar="N,...", help="query tokens per request")
    parser.add_argument("--heads", required=True, type=int, metavar="N")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="(default: 128)")
    parser.add_argument("--block-kv", type=int, default=64, metavar="N", help="tokens per cache page (default: 64)")
    parser.add_argument("--cache-layout", default="flat", help="flat or preshuffled (default: flat)")
    parser.add_argument("--max-model-len", required=True, type=int, metavar="N", help="longest context that may come")
    parser.add_argument(
        "--context",
        type=context_of,
        metavar="CONTEXT",
        help="a length, LOW-HIGH, or LENGTH:WEIGHT,... "
        f"(default: from {SHORTEST_CONTEXT} to the longest, each doubling as likely)",
    )
    parser.add_argument(
        "--max-loss", type=float, default=MAX_LOSS, help=f"of expected time, for fewer binaries (default: {MAX_LOSS})"
    )
    parser.add_argument(
        "--worst-case", type=float, default=WORST_CASE, help=f"bound at each context (default: {WORST_CASE})"
    )
    parser.add_argument("--arch", help="GPU (default: this machine's, or h200)")
    parser.add_argument("--home", metavar="DIR", help="folder of published models (default: $TILEWISE_HOME)")
    parser.add_argument("--out", metavar="FILE", help="write the plan as JSON, for CapturePlan.load and warm_up")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    plan = capture_plan(
        args.batch_sizes,
        next_n=args.next_n,
        heads=args.heads,
        head_dim=args.head_dim,
        block_kv=args.block_kv,
        cache_layout=args.cache_layout,
        max_model_len=args.max_model_len,
        context=args.context,
        max_loss=args.max_loss,
        worst_case=args.worst_case,
        chooser=Selector(arch_name(args), home=args.home),
    )
    if args.out is not None:
        plan.save(args.out)
    print_json(plan.to_dict()) if args.json else _print(plan)
    return 0


def _print(plan: CapturePlan) -> None:
    proof = "no fewer are within the loss" if plan.optimal else "found greedily, fewer might do"
    print(f"{plan.arch}, {plan.model_id or 'no model'}, {plan.context}, at most {100 * plan.max_loss:g} % loss")
    print(f"{len(plan.binaries)} binaries beside the defaults ({proof})")
    for config in plan.binaries:
        print(f"  {config}")
    print(f"\n{'batch':>7}{'next_n':>8}{'expected':>14}{'loss':>8}{'worst':>8}  config")
    for one in plan.planned:
        figures = f"{us(one.expected_us):>14}"
        figures += f"{'':>16}" if one.loss is None else f"{100 * one.loss:>7.2f}%{one.worst_case:>8.3f}"
        print(f"{one.shape.batch_size:>7}{one.shape.next_n:>8}{figures}  {one.config}")


def context_of(text: str) -> Context:
    """A context from a word of the command line."""
    try:
        if ":" in text:
            pairs = (pair.split(":") for pair in text.split(","))
            return Context.histogram({int(length): float(weight) for length, weight in pairs})
        low, dash, high = text.partition("-")
        return Context.range(int(low), int(high)) if dash else Context.exact(int(low))
    except ValueError as error:  # InvalidContextError is one
        raise argparse.ArgumentTypeError(
            f"must be a length, LOW-HIGH or LENGTH:WEIGHT,..., got {json.dumps(text[:80])}: {error}"
        ) from error


def _ints(text: str) -> list[int]:
    try:
        values: list[Any] = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas, got {json.dumps(text[:80])}") from None
    return values
