"""Do two profiles that were taken on separate occasions lead to the same picks?

    python benchmarks/occasions.py --first PROFILE --second PROFILE
    python benchmarks/occasions.py --first-only run_id=abc --second-only run_id=def   # of the shipped profile

Trains one bundle on each, as `tilewise train` does, and compares their picks with the exact rung off: over the judging
shapes that both have, over all shapes that both have, and over a fixed grid inside of what both were trained on. Of the
picks that differ it says how far apart the two configs are: by each model, and where both occasions timed both, as
measured. Two configs within the noise of the timings are a tie (docs/selection.md), and either is right.

`--first-only` and `--second-only` keep the rows with that value of a column, or where it ends in `*`, that beginning;
they may be repeated. `pass_index=0` against `pass_index=1` of one profile compares two passes in place of occasions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.table import read_table
from tilewise.dispatch.selector import Selector
from tilewise.kernels.arch import Arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, Config, Shape, default_config, floor_us
from tilewise.models.bundle import Bundle
from tilewise.models.judging import judging_set
from tilewise.models.latency import train
from tilewise.models.measurements import Measurements, measurements

OP = "paged_mqa_logits"
SHIPPED = Path(__file__).resolve().parent.parent / "data" / "profiles" / OP / "h200.parquet"
BATCH_SIZES = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
HEADS = (16, 32, 64, 128)
CONTEXTS = tuple(round(512 * 2 ** (step / 2)) for step in range(19))  # 512 to 262,144
MOST_US = 320.0  # floor, as of the profile's shapes
SHOWN = 12  # of the picks that differ


@dataclass(frozen=True)
class Occasion:
    """One profile, and what was trained on it."""

    measured: Measurements
    bundle: Bundle
    chooser: Selector

    @classmethod
    def of(cls, columns: dict[str, list[Any]], arch: Arch, folder: Path, seed: int, folds: int) -> Occasion:
        """Train; the bundle goes to a new folder."""
        bundle = train(columns, op=OP, arch=arch.name, seed=seed, folds=folds)
        saved = bundle.save(folder)
        chooser = Selector(arch, bundle_dir=saved, use_exact=False, mode="on")
        return cls(measurements(columns, op=OP, arch=arch.name), bundle, chooser)

    def times(self) -> dict[tuple[Shape, Config], float]:
        """Microseconds of everything that was timed, the mean over its passes."""
        own = self.measured
        cells = zip(own.shape_id.tolist(), own.config_id.tolist(), own.latency_us.tolist(), strict=True)
        return {(own.shapes[at], own.configs[config]): us for at, config, us in cells if us == us}

    def predicted_gap(self, shape: Shape, one: Config, other: Config) -> float:
        """Ratio less 1 by which this model has two configs apart."""
        first, second = self.bundle.predict_us(shape, [one, other])
        return gap(float(first / second))


def gap(ratio: float) -> float:
    """How far a ratio is from 1, whichever is the larger of the two times."""
    return max(ratio, 1.0 / ratio) - 1.0


def rows_of(path: Path, only: Iterable[str]) -> dict[str, list[Any]]:
    """The columns of a profile, of the rows that `only` keeps."""
    columns: dict[str, list[Any]] = read_table(path).to_pydict()
    keep = list(range(len(columns["op"])))
    for condition in only:
        name, _, value = condition.partition("=")
        if name not in columns:
            raise SystemExit(f"a condition must be COLUMN=VALUE, got {condition!r}")
        texts = [str(columns[name][at]) for at in keep]
        begins = value.removesuffix("*") if value.endswith("*") else None
        keep = [
            at
            for at, text in zip(keep, texts, strict=True)
            if (text == value if begins is None else text.startswith(begins))
        ]
    if not keep:
        raise SystemExit(f"{path}: no row left with {', '.join(only)}")
    return {name: [values[at] for at in keep] for name, values in columns.items()}


def grid(first: Occasion, second: Occasion) -> list[Shape]:
    """Some thousand fixed shapes, of which both bundles were trained on the surroundings."""
    shapes = (
        Shape(batch, next_n, heads, 128, 64, length)
        for batch in BATCH_SIZES
        for next_n in range(1, 9)
        for heads in HEADS
        for length in CONTEXTS
    )
    return [
        shape
        for shape in shapes
        if floor_us(shape, first.bundle.arch) <= MOST_US
        and not first.bundle.regime.beyond(shape)
        and not second.bundle.regime.beyond(shape)
    ]


def compare(first: Occasion, second: Occasion, shapes: Sequence[Shape], band: float) -> dict[str, Any]:
    """How often the picks agree over some shapes, and how far apart those are that do not."""
    times = [occasion.times() for occasion in (first, second)]
    fields: Counter[str] = Counter()
    apart: list[dict[str, Any]] = []
    for shape in shapes:
        one, other = (occasion.chooser.select(shape).config for occasion in (first, second))
        if one == other:
            continue
        predicted = [occasion.predicted_gap(shape, one, other) for occasion in (first, second)]
        known = [
            math.log(table[shape, one] / table[shape, other])
            for table in times
            if {(shape, one), (shape, other)} <= table.keys()
        ]
        differing = [name for name in CONFIG_FIELDS if getattr(one, name) != getattr(other, name)]
        default = default_config(shape, first.bundle.arch)
        fields["kernel" if "kernel" in differing else ", ".join(differing)] += 1
        apart.append(
            {
                "shape": shape.to_dict(),
                "first": str(one),
                "second": str(other),
                "default": "first" if one == default else "second" if other == default else None,
                "predicted_gap": predicted,
                "measured_gap": gap(math.exp(sum(known) / len(known))) if len(known) == 2 else None,
            }
        )
    measured = [entry["measured_gap"] for entry in apart if entry["measured_gap"] is not None]
    predicted_most = [max(entry["predicted_gap"]) for entry in apart]
    in_band = [
        (most if entry["measured_gap"] is None else entry["measured_gap"]) <= band
        for entry, most in zip(apart, predicted_most, strict=True)
    ]
    share = 1.0 - len(apart) / len(shapes)
    return {
        "shapes": len(shapes),
        "agree": share,
        "differ": len(apart),
        "differ_where_one_is_the_default": sum(entry["default"] is not None for entry in apart),
        # A measured gap decides; where both occasions did not time both configs, the larger predicted one.
        "differ_within_band": sum(in_band),
        "agree_or_within_band": share + sum(in_band) / len(shapes),
        "predicted_gap_median": float(np.median(predicted_most)) if apart else 0.0,
        "predicted_gap_worst": max(predicted_most, default=0.0),
        "measured_gaps": len(measured),
        "measured_gap_median": float(np.median(measured)) if measured else None,
        "measured_gap_worst": max(measured, default=None),
        "differing_fields": dict(fields.most_common(8)),
        "apart": sorted(apart, key=lambda entry: -max(entry["predicted_gap"])),
    }


def main() -> int:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=Path, default=SHIPPED, help="a profile (default: the shipped one of the H200)")
    parser.add_argument("--second", type=Path, help="another (default: the same file)")
    parser.add_argument("--first-only", action="append", default=[], metavar="COLUMN=VALUE", help="rows of the first")
    parser.add_argument("--second-only", action="append", default=[], metavar="COLUMN=VALUE", help="rows of the second")
    parser.add_argument("--arch", default="h200", help="GPU (default: h200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both trainings (default: 0)")
    parser.add_argument("--folds", type=int, default=10, help="held-out parts, as for `tilewise train` (default: 10)")
    parser.add_argument("--band", type=float, help="ratio less 1 of a tie (default: the larger noise_margin)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    second_path = args.second or args.first
    if second_path == args.first and args.first_only == args.second_only:
        raise SystemExit("the two profiles are the same rows: give --second, or --first-only and --second-only")
    arch = get_arch(args.arch)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (
            Occasion.of(rows_of(path, only), arch, Path(folder) / name, args.seed, args.folds)
            for path, only, name in ((args.first, args.first_only, "a"), (second_path, args.second_only, "b"))
        )
        band = args.band
        if band is None:
            band = max(first.bundle.noise_margin, second.bundle.noise_margin)
        shared = set(first.measured.shapes) & set(second.measured.shapes)
        judged = {one.shape for occasion in (first, second) for one in judging_set(occasion.measured, arch)} & shared
        groups = {"judging_shapes": judged, "shared_shapes": shared, "grid": grid(first, second)}
        result = {
            "band": band,
            "seed": args.seed,
            "occasions": [
                {
                    "rows": one.measured.rows,
                    "shapes": len(one.measured.shapes),
                    "noise_margin": one.bundle.noise_margin,
                    "gain_asked_for": one.bundle.margin(next(iter(groups["grid"])))[0] if groups["grid"] else None,
                }
                for one in (first, second)
            ],
            **{
                name: compare(first, second, sorted(shapes, key=lambda shape: tuple(shape.to_dict().values())), band)
                for name, shapes in groups.items()
                if shapes
            },
        }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    for at, one in enumerate(result["occasions"], 1):
        print(f"occasion {at}: {', '.join(f'{name} {value}' for name, value in one.items())}")
    for group in ("judging_shapes", "shared_shapes", "grid"):
        if group not in result:
            print(f"\n{group}: none")
            continue
        found = result[group]
        print(f"\n{group}")
        for name, value in found.items():
            if name != "apart":
                print(f"  {name:32} {value:.4f}" if isinstance(value, float) else f"  {name:32} {value}")
        for entry in found["apart"][:SHOWN] if group != "grid" else ():
            gaps = " ".join(f"{100 * value:.1f} %" for value in entry["predicted_gap"])
            own = "" if entry["measured_gap"] is None else f", measured {100 * entry['measured_gap']:.1f} %"
            sizes = " ".join(f"{value}" for value in entry["shape"].values())
            print(f"    {sizes}: {entry['first']} | {entry['second']}: predicted {gaps}{own}")


if __name__ == "__main__":
    sys.exit(main())
