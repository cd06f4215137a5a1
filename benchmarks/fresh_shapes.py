"""Picks on fresh shapes: drawn by a seed that was chosen after training, each with every candidate timed.

    python benchmarks/fresh_shapes.py --draw [--count 80] [--seed N] [--record FILE.json]
    tilewise collect --shapes FILE.jsonl --run-dir fresh --out ROWS.parquet
    python benchmarks/fresh_shapes.py --judge ROWS.parquet [--json] [--record FILE.json] [--duels-out PLAN.jsonl]

`--draw` notes which bundle is shipped, draws a seed, and writes the shapes beside the note, as `tilewise collect`
reads them. Batches and contexts are drawn log-uniformly from all whole numbers, not from those of the profile; the
shapes lie inside of what the bundle was trained on, and none was measured. `--judge` exits with 1 where the rows are
not those of the note: another bundle, other shapes, or taken before the draw.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.records import check_row
from tilewise.data.table import read_table
from tilewise.dispatch.selector import Selector
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Shape, floor_us
from tilewise.kernels.shape_sets import DISTRIBUTIONS, Target, target, target_line
from tilewise.models.bundle import Bundle
from tilewise.models.judging import Judged, figures, judging_set
from tilewise.models.measurements import measurements
from tilewise.models.registry import shipped

OP = "paged_mqa_logits"
RECORD = Path(__file__).parent / "results" / "fresh_shapes_h200.json"
# What the profile's shapes keep to, too (kernels/shape_sets.py).
MOST_US, MOST_TOKENS = 320.0, 40_000_000
MOST_SEED = 1 << 32
FIGURES = (
    "within_2pct", "within_5pct", "geomean_regret", "p90_regret", "worst_regret", "worst_against_default", "failures",
)  # fmt: skip


def draw(bundle: Bundle, seed: int, count: int) -> list[Target]:
    """Shapes inside of what the bundle was trained on, of which it holds no timing.

    The same for the same seed and bundle in every Python: of its generator only `random()` is used, whose numbers are
    promised to stay.
    """
    source = random.Random(seed)
    pages = 64  # the page size that was measured over ranges; of others, single shapes were
    spans = [bundle.regime.groups[key] for key in bundle.regime.groups if key[1:] == (128, pages, "flat")]
    batches, contexts = (
        (min(span[name][0] for span in spans), max(span[name][1] for span in spans))
        for name in ("batch_size", "max_context_len")
    )

    def whole(low: float, high: float) -> int:
        return round(low * math.pow(high / low, source.random()))

    def one_of(values: Sequence[Any], weights: Sequence[int]) -> Any:
        at = source.random() * sum(weights)
        return next(value for n, value in enumerate(values) if at < sum(weights[: n + 1]))

    found: dict[Shape, Target] = {}
    for turn in range(1000 * count):
        if len(found) == count:
            break
        heads, next_n = one_of((32, 64, 16, 128), (40, 40, 10, 10)), one_of(range(1, 9), (1,) * 8)
        batch_size, top = whole(*batches), whole(*contexts)
        kind = one_of(DISTRIBUTIONS, (70, 12, 12, 6)) if batch_size >= 4 else "uniform"
        one = target(batch_size, next_n, heads, top, contexts=kind, judged=True, block_kv=pages, seed=turn)
        if (
            not bundle.regime.beyond(one.shape)
            and bundle.exact.find(one.shape) is None
            and floor_us(one.shape, bundle.arch) <= MOST_US
            and one.shape.context_tokens <= MOST_TOKENS
        ):
            found.setdefault(one.shape, one)
    if len(found) < count:
        raise SystemExit(f"only {len(found)} of {count} shapes lie inside of what {bundle.model_id} was trained on")
    return list(found.values())


def write_draw(bundle: Bundle, seed: int, count: int, record: Path) -> dict[str, Any]:
    """The note, and the shapes beside it."""
    targets = draw(bundle, seed, count)
    note = {
        "what": "shapes to judge picks on, drawn after the bundle was trained; see benchmarks/fresh_shapes.py",
        "op": OP,
        "arch": bundle.arch.name,
        "seed": seed,
        "count": count,
        "model_id": bundle.model_id,
        "bundle_digest": bundle.digest,
        "drawn_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(note, indent=1) + "\n")
    lines = [json.dumps(target_line(one)) + "\n" for one in targets]
    record.with_suffix(".jsonl").write_text("".join(lines))
    return note


def judge(bundle: Bundle, folder: Path, note: Mapping[str, Any], rows: Path) -> tuple[dict[str, Any], list[Any]]:
    """All figures by name, and each judged shape with the index of its pick (None: it was not timed)."""
    columns = read_table(rows).to_pydict()
    names = list(columns)
    bad = [
        reason
        for row in zip(*columns.values(), strict=True)
        if (reason := check_row(dict(zip(names, row, strict=True))))
    ]
    if bad:
        raise SystemExit(f"{rows}: {len(bad)} bad rows, the first: {bad[0]}")
    measured = measurements(columns, op=OP, arch=bundle.arch.name)
    judged = judging_set(measured, bundle.arch)
    if not judged:
        raise SystemExit(f"{rows}: no shape with every candidate timed twice, of {len(measured.shapes)}")
    selector = Selector(bundle.arch, bundle_dir=folder, use_exact=False, mode="on")
    picks: dict[int, int | None] = {}
    sources: dict[str, int] = {}
    for one in judged:
        decision = selector.select(one.shape)
        sources[decision.source] = sources.get(decision.source, 0) + 1
        picks[one.shape_id] = one.configs.index(decision.config) if decision.config in one.configs else None
    right_bundle = bundle.digest == note["bundle_digest"]
    drawn = {one.shape for one in draw(bundle, note["seed"], note["count"])} if right_bundle else set()
    first, last = min(columns["measured_at"]), max(columns["measured_at"])
    second = figures(judged, picks, duels=False)
    both = [one for one in judged if (at := picks[one.shape_id]) is not None and one.ratio(at, one.best)[1]]
    result = {
        "shapes": len(judged),
        "drawn": note["count"],
        "not_judged": note["count"] - len(judged),
        "seed": note["seed"],
        "drawn_at": note["drawn_at"],
        "measured_from": first,
        "measured_to": last,
        "model_id": bundle.model_id,
        "picks_from": sources,
        "rows": measured.rows,
        "kernels_as_measured": dict(measured.kernel_hashes) == dict(bundle.kernel_hashes),
        "bundle_is_the_one_drawn_for": right_bundle,
        "shapes_are_those_drawn": {one.shape for one in judged} <= drawn,
        "measured_after_the_draw": _moment(first) >= _moment(note["drawn_at"]),
        "none_was_trained_on": all(bundle.exact.find(one.shape) is None for one in judged),
        **{name: second[name] for name in FIGURES},
        "by_size": {
            name: {
                str(value): round(figures(some, picks, duels=False)["within_2pct"], 4)
                for value in sorted({getattr(one.shape, name) for one in judged})
                if (some := [one for one in judged if getattr(one.shape, name) == value])
            }
            for name in ("heads", "next_n")
        },
        # The pick against the best, replayed in turn in one run; where there is no such run, the second pass.
        "duelled": len(both),
        "with_duels": {name: value for name, value in figures(judged, picks).items() if name in FIGURES},
    }
    return result, [(one, picks[one.shape_id]) for one in judged]


def _moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def duel_plan(
    found: Sequence[tuple[Judged, int | None]], targets: Sequence[Target], limit: float
) -> list[dict[str, object]]:
    """Lines for `tilewise collect`: the pick, the best and the default of each shape whose pick is beyond a limit."""
    by_shape = {one.shape: one for one in targets}
    lines = []
    for one, at in found:
        if at is None or np.isnan(one.second_us[at]) or one.second_us[at] <= (1.0 + limit) * one.reference_us:
            continue
        configs = [one.configs[n] for n in dict.fromkeys((at, one.best, one.default))]
        lines.append(target_line(by_shape[one.shape], configs, duel=True))
    return lines


def main() -> int:
    """Draw, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--draw", action="store_true", help="draw shapes, and note for which bundle")
    what.add_argument("--judge", type=Path, metavar="ROWS", help="judge the picks by these rows (Parquet)")
    parser.add_argument("--arch", default="h200", help="GPU (default: h200)")
    parser.add_argument("--bundle", type=Path, help="folder of the bundle (default: the shipped one)")
    parser.add_argument("--record", type=Path, default=RECORD, help=f"the note (default: results/{RECORD.name})")
    parser.add_argument("--count", type=int, default=80, help="shapes to draw (default: 80)")
    parser.add_argument("--seed", type=int, help="seed of the draw (default: one that nobody chose)")
    parser.add_argument("--duels-out", type=Path, help="write the picks beyond --limit here, to be duelled by collect")
    parser.add_argument("--limit", type=float, default=0.02, help="of --duels-out, a ratio less 1 (default: 0.02)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    folder = args.bundle or shipped(OP, get_arch(args.arch).name)
    bundle = Bundle.load(folder)
    if args.draw:
        seed = secrets.randbelow(MOST_SEED) if args.seed is None else args.seed
        note = write_draw(bundle, seed, args.count, args.record)
        print(f"seed {note['seed']}, {args.count} shapes for {note['model_id']}: {args.record.with_suffix('.jsonl')}")
        return 0
    note = json.loads(args.record.read_text())
    result, found = judge(bundle, folder, note, args.judge)
    if args.duels_out:
        lines = duel_plan(found, draw(bundle, note["seed"], note["count"]), args.limit)
        args.duels_out.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{len(lines)} shapes to duel in {args.duels_out}", file=sys.stderr)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:28} {value:.4f}" if isinstance(value, float) else f"{name:28} {value}")
    checks = (
        "kernels_as_measured", "bundle_is_the_one_drawn_for", "shapes_are_those_drawn", "measured_after_the_draw",
        "none_was_trained_on",
    )  # fmt: skip
    return 0 if all(result[name] for name in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
