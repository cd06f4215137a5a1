"""How many timings the model needs, chosen by `tilewise suggest` or drawn at random: a replay of measured launches.

    python benchmarks/learning_curve.py [--arch h200] [--repeats 24] [--keep FOLDER]
        [--out benchmarks/results/learning_curve_h200.json]

The pool is the first pass of the profile less a held-out half of the judging shapes; timing a launch means looking it
up. Both ways are refitted after each batch, as the shipped model is, and judged on the held-out shapes by the second
pass. Regret is the geometric mean of the pick's time over the best's; no guard, so that the model alone shows. Each
repeat holds out another half. The final regret is that of all timings of the pool; it is reached by the first batch
from which the mean over the repeats is not above it. How sure that is, the difference within each repeat says: its
mean over the repeats and the standard error of that.

A repeat takes a quarter of an hour of one processor. With --keep each curve that is done is written to a folder, and
taken from there the next time; the folder is of one profile and one state of the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from tilewise.data.store import load_profile
from tilewise.kernels.arch import Arch, get_arch
from tilewise.models.bundle import unsquash
from tilewise.models.choice import first_best
from tilewise.models.features import features_of
from tilewise.models.fit import examples, fit_rank
from tilewise.models.judging import Judged, geomean, judging_set
from tilewise.models.measurements import Measurements, measurements
from tilewise.models.sampling import next_launches, with_cells

OP = "paged_mqa_logits"
START, STEPS = 0.03, (0.05, 0.08, 0.12, 0.17, 0.23, 0.3, 0.4, 0.45, 0.5, 0.65, 0.8, 1.0)  # shares of the pool
Curve = list[tuple[int, float]]  # timings, regret

LEVELS = (1.05, 1.02, 1.01, 1.008)  # of regret, on the way there


def judge(measured: Measurements, arch: Arch, held: list[Judged], seed: int) -> float:
    """Geometric mean regret of a model of these timings on the held-out shapes."""
    data = examples(measured, arch)
    rank = fit_rank(data, slice(None), seed)
    regret = []
    for one in held:
        rows = features_of(one.shape, one.configs, arch)
        pick = first_best(one.configs, np.exp(unsquash(rank.predict(rows))))
        assert pick is not None
        time_us = one.second_us[pick]
        regret.append(max(1.0, (np.nanmax(one.second_us) if np.isnan(time_us) else time_us) / one.reference_us))
    return geomean(np.array(regret))


def replay(
    pool: Measurements, arch: Arch, held: list[Judged], seed: int, choose: Callable[[np.ndarray, int], np.ndarray],
    what: str,
) -> Curve:  # fmt: skip
    """(timings, regret) as the pool is timed in the order that `choose` says."""
    total = len(pool.shape_id)
    known = np.zeros(total, bool)
    curve = []
    for share in (START, *STEPS):
        want = round(share * total)
        while known.sum() < want:
            fresh = choose(known, want - int(known.sum()))
            known[fresh] = True
        curve.append((int(known.sum()), judge(with_cells(pool, known), arch, held, seed)))
        print(f"{what}: {curve[-1][0]:6} timings  regret {curve[-1][1]:.4f}", flush=True)
    return curve


def active(pool: Measurements, arch: Arch, seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """The next cells by `next_launches`."""
    ids = {shape: at for at, shape in enumerate(pool.shapes)}
    configs = {config: at for at, config in enumerate(pool.configs)}
    cell = {pair: at for at, pair in enumerate(zip(pool.shape_id.tolist(), pool.config_id.tolist(), strict=True))}
    present = [pool.shapes[at] for at in np.unique(pool.shape_id).tolist()]

    def offer(shape: Any) -> list[Any]:
        return [pool.configs[at] for at in pool.config_id[pool.cells(ids[shape])].tolist()]

    def choose(known: np.ndarray, count: int) -> np.ndarray:
        so_far = with_cells(pool, known) if known.any() else None
        found = next_launches(so_far, present, arch, count, seed=seed, offer=offer)
        return np.array([cell[ids[one.shape], configs[one.config]] for one in found])

    return choose


def drawn(pool: Measurements, seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """The next cells at random."""
    order = np.random.default_rng(seed).permutation(len(pool.shape_id))

    def choose(known: np.ndarray, count: int) -> np.ndarray:
        return np.asarray(order[~known[order]][:count])

    return choose


def repeat(
    measured: Measurements, first: Measurements, judged: Sequence[Judged], arch: Arch, seed: int, keep: Path | None
) -> dict[str, Curve]:
    """The curves of both ways with one half of the judging shapes held out; `first` has the first pass alone."""
    order = np.random.default_rng(seed).permutation(len(judged))
    held = [judged[at] for at in order[: len(judged) // 2].tolist()]
    known = ~np.isin(measured.shape_id, [one.shape_id for one in held]) & ~np.isnan(first.latency_us)
    pool = with_cells(first, known)
    curves = {}
    for name, choose in (("active", active(pool, arch, seed)), ("random", drawn(pool, seed))):
        kept = keep / f"{name}_{seed}_{len(pool.shape_id)}.json" if keep else None
        if kept and kept.exists():
            curves[name] = [(timings, regret) for timings, regret in json.loads(kept.read_text())]
            continue
        print(f"seed {seed}, {name}, pool of {len(pool.shape_id)} timings", flush=True)
        curves[name] = replay(pool, arch, held, seed, choose, f"seed {seed}, {name}")
        if kept:
            kept.with_suffix(".part").write_text(json.dumps(curves[name]))
            kept.with_suffix(".part").replace(kept)
    return curves


def summary(curves: Mapping[str, Sequence[Curve]]) -> dict[str, Any]:
    """The curves of all repeats as means, and how many timings each way takes to the levels and to the final regret.

    Both ways end with the whole pool. `over_final` is the geometric mean of regret over the same repeat's final regret,
    less 1, and `standard_error` that of this mean over the repeats.
    """
    ends = np.log([curve[-1][1] for curve in curves["random"]])  # [repeats]
    final = float(np.exp(ends.mean()))
    points: dict[str, list[dict[str, float]]] = {}
    for name, runs in curves.items():
        logs = np.log([[regret for _, regret in curve] for curve in runs])  # [repeats, steps]
        over = logs - ends[:, None]
        error = over.std(axis=0, ddof=1) / np.sqrt(len(runs))
        points[name] = [
            {
                "timings": round(float(np.mean([curve[at][0] for curve in runs]))),
                "geomean_regret": float(np.exp(logs[:, at].mean())),
                "over_final": float(np.expm1(over[:, at].mean())),
                "standard_error": float(error[at]),
            }
            for at in range(logs.shape[1])
        ]
    pool = points["random"][-1]["timings"]

    def first(name: str, figure: str, limit: float) -> int | None:
        return next((round(point["timings"]) for point in points[name] if point[figure] <= limit), None)

    def within(name: str) -> int:
        """Timings from which on the mean is never above the final regret by more than a standard error."""
        above = [at for at, point in enumerate(points[name]) if point["over_final"] > point["standard_error"]]
        return round(points[name][max(above, default=-1) + 1]["timings"])

    # The last batch completes the pool, so both are always there.
    reached: dict[str, Any] = {name: first(name, "over_final", 0.0) for name in points}
    steady = {name: within(name) for name in points}
    return {
        "pool_timings": pool,
        "final_regret": final,
        "final_regret_of_repeats": np.exp(ends).tolist(),
        "timings_to_final_regret": reached,
        "share_of_random": reached["active"] / reached["random"],
        "timings_to_stay_within_a_standard_error": steady,
        "timings_to_regret": {
            f"{level:.3f}": {name: first(name, "geomean_regret", level) for name in points} for level in LEVELS
        },
        **points,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="h200")
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for finished curves; a run that was ended goes on from them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error(f"--repeats must be at least 2, to tell how far they scatter, got {args.repeats}")
    arch = get_arch(args.arch)
    columns: Any = load_profile(OP, arch.name).columns
    measured = measurements(columns, op=OP, arch=arch.name)
    first = dataclasses.replace(measured, latency_us=measured.first_us)
    judged = judging_set(measured, arch)
    started = time.time()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    tasks = (joblib.delayed(repeat)(measured, first, judged, arch, seed, args.keep) for seed in range(args.repeats))
    found = joblib.Parallel(n_jobs=args.jobs)(tasks)
    curves = {name: [one[name] for one in found] for name in found[0]}
    result = {
        "what": "replay of measured launches, geometric mean over the repeats",
        "op": OP,
        "arch": arch.name,
        "repeats": args.repeats,
        "held_out_shapes": len(judged) // 2,
        **summary(curves),
    }
    print(json.dumps(result, indent=1))
    print(f"{time.time() - started:.0f} s")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
