"""Training: from profile rows to a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.data.traffic import Traffic
from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import Arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, default_config
from tilewise.models.baselines import shape_distance
from tilewise.models.bucket_transfer import bucket_transfers
from tilewise.models.bundle import Bundle
from tilewise.models.evaluate import DEFAULT_FOLDS, evaluate_measurements
from tilewise.models.exact import Exact
from tilewise.models.fit import LEVEL_PARAMETERS, RANK_PARAMETERS, examples, fit
from tilewise.models.golden import golden_picks
from tilewise.models.guard import CONFIDENCE, Guard, Trial
from tilewise.models.holdout import Progress, calibrate, default_timed, fold_splits, hold_out, trials
from tilewise.models.judging import noise_margin, noise_of
from tilewise.models.measurements import Measurements, measurements
from tilewise.models.regime import GROUP, RANGES, Regime, range_value
from tilewise.models.transfer import transfer
from tilewise.models.weights import traffic_weights

LONG = ("by_seed", "by_shape", "trials", "beyond")  # of an evaluation, what the bundle does not keep


def train(
    columns: Mapping[str, Sequence[Any]],
    *,
    op: str,
    arch: str,
    seed: int = 0,
    folds: int = DEFAULT_FOLDS,
    traffic: Sequence[Traffic] | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Bundle:
    """A bundle from the columns of a profile (data/records.py), the same for the same rows whatever their order.

    `traffic` makes shapes like those that are asked for weigh more (weights.py).
    Its metrics come from `folds` held-out folds (0: none are taken); the bundle itself is fitted to everything.
    Raises InvalidProfileError where no row is usable, UnsupportedError without scikit-learn or for an unknown arch.
    """
    facts = get_arch(arch)
    measured = measurements(columns, op=op, arch=facts.name)
    weight = None if traffic is None else traffic_weights(measured.shapes, traffic)
    data = examples(measured, facts, weight)
    if progress:
        progress("fit", 0, 1)
    rank, level = fit(data, slice(None), np.arange(len(measured.shapes)), seed)
    if progress:
        progress("fit", 1, 1)
    exact = exact_table(measured)
    manifest = {
        "op": measured.op,
        "arch": measured.arch,
        "arch_facts": dataclasses.asdict(facts),
        "kernel_hashes": dict(measured.kernel_hashes),
        "toolchain": dict(measured.toolchain),
        "noise_margin": noise_margin(measured),
        "noise": noise_of(measured),
        "guard": Guard(CONFIDENCE, {}).to_dict(),
        "bucket_transfers": bucket_transfers(measured),
        "data": {
            "digest": data_digest(measured),
            "rows": measured.rows,
            "shapes": len(measured.shapes),
            "timings": len(data.cell),
            "dropped": dict(measured.dropped),
        },
        "training": {
            "seed": seed,
            "scikit_learn": _scikit_learn_version(),
            "rank": RANK_PARAMETERS,
            "level": LEVEL_PARAMETERS,
            "traffic": None if weight is None else hashlib.sha256(weight.tobytes()).hexdigest()[:16],
        },
        "regime": Regime.of(_timed(measured), measured_transfers(measured, facts)).to_dict(),
        "metrics": {},
        "golden": [],
    }
    bundle = Bundle.create(manifest, rank, level, exact, facts)
    bundle = Bundle.create({**manifest, "golden": golden_picks(bundle)}, rank, level, exact, facts)
    return judged(bundle, measured, seed=seed, folds=folds, jobs=jobs, progress=progress) if folds else bundle


def judged(
    bundle: Bundle,
    measured: Measurements,
    *,
    seed: int = 0,
    folds: int = DEFAULT_FOLDS,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Bundle:
    """The bundle with the figures of held-out folds, and with the gain that its picks are asked for (guard.py).

    `measured` is what it was trained on; `train(folds=0)`, then this, is `train(folds=folds)`.
    """
    metrics: dict[str, Any]
    inside: list[Trial] = []
    try:
        metrics, inside = evaluate_measurements(
            measured, bundle.arch, seed=seed, folds=folds, jobs=jobs, progress=progress
        )
        metrics = _rounded({name: value for name, value in metrics.items() if name not in LONG})
    except InvalidProfileError as error:  # too little was timed twice to judge: that is said, not hidden
        metrics = {"none": str(error)}
    guard = _guard(measured, bundle.arch, inside, seed, folds, jobs, progress)
    manifest = {**bundle.manifest, "metrics": metrics, "guard": guard.to_dict()}
    return Bundle.create(manifest, bundle.rank, bundle.level, bundle.exact, bundle.arch)


def _guard(
    measured: Measurements,
    arch: Arch,
    inside: list[Trial],
    seed: int,
    folds: int,
    jobs: int,
    progress: Progress | None,
) -> Guard:
    """The gain that picks are asked for; `inside` are the trials of folds, where they were made already."""
    noise = noise_margin(measured)
    if not any(default_timed(measured, arch, at) for at in range(len(measured.shapes))):
        return Guard(CONFIDENCE, {})
    data = examples(measured, arch)
    if not inside:
        splits = [split for split in fold_splits(measured.shapes, folds, seed) if len(split.train)]
        made = hold_out(measured, arch, data, splits, seed=seed, jobs=jobs, progress=progress)
        inside = trials(measured, arch, splits, made)
    return calibrate(measured, arch, data, inside, noise=noise, seed=seed, jobs=jobs, progress=progress)


def _rounded(value: Any) -> Any:
    """Figures to six digits after the point, so that they are the same on every machine."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def exact_table(measured: Measurements) -> Exact:
    """The timings that the bundle carries: every shape with at least one time."""
    shapes, cells = [], []
    for shape_id, shape in enumerate(measured.shapes):
        own = measured.cells(shape_id)
        times = measured.latency_us[own]
        if not np.isnan(times).all():
            shapes.append(shape)
            cells.append(dict(zip(measured.config_id[own].tolist(), times.tolist(), strict=True)))
    return Exact.build(shapes, measured.configs, cells)


def data_digest(measured: Measurements) -> str:
    """64 hex digits over the cells: the same for the same rows in any order."""
    text = json.dumps(
        [
            [list(shape.to_dict().values()) for shape in measured.shapes],
            [list(config.to_dict().values()) for config in measured.configs],
            measured.shape_id.tolist(),
            measured.config_id.tolist(),
            [[repr(round(us, 9)) for us in times.tolist()] for times in (measured.first_us, measured.second_us)],
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def measured_transfers(measured: Measurements, arch: Arch) -> dict[str, dict[str, Any]]:
    """What it cost to carry the nearest shape's best config beyond the range of what was measured.

    For each range, and each end of it, the outermost value is hidden, and its shapes get the config of the nearest
    shape that is left. The same for the outermost head counts.
    """
    shapes = _timed(measured)
    ids = [at for at, shape in enumerate(measured.shapes) if shape in set(shapes)]
    found = {}
    for name in (*RANGES, "heads"):
        values = sorted({_value(shape, name) for shape in shapes})
        if len(values) < 2:
            continue
        for side, edge, inner in (("low", values[0], values[1]), ("high", values[-1], values[-2])):
            known = [at for at in ids if _value(measured.shapes[at], name) != edge]
            hidden = [at for at in ids if _value(measured.shapes[at], name) == edge]
            losses = [loss for at in hidden if (loss := _transfer_loss(measured, arch, at, known)) is not None]
            if losses:
                moved, kept = np.array(losses).T
                found[f"{name} {side}"] = {
                    "shapes": len(losses),
                    "reach": round(abs(float(np.log2(edge / inner))), 6),
                    "worst": round(float(moved.max()), 6),
                    "geomean": round(float(np.exp(np.log(moved).mean())), 6),
                    "default_worst": round(float(kept.max()), 6),
                    "default_geomean": round(float(np.exp(np.log(kept).mean())), 6),
                }
    return found


def _transfer_loss(measured: Measurements, arch: Arch, target: int, known: list[int]) -> tuple[float, float] | None:
    """Loss of the carried config, and of the default, against the target's best; None where it can't be told."""
    shape = measured.shapes[target]
    cells = measured.cells(target)
    times = measured.latency_us[cells]
    configs: list[Config] = [measured.configs[at] for at in measured.config_id[cells]]
    default = default_config(shape, arch)
    fixed = [getattr(shape, name) for name in GROUP if name != "heads"]
    near = [at for at in known if [getattr(measured.shapes[at], name) for name in GROUP if name != "heads"] == fixed]
    if default not in configs or not near:
        return None
    source = min(near, key=lambda at: (shape_distance(measured.shapes[at], shape), at))
    own = measured.cells(source)
    best = measured.configs[measured.config_id[own][int(np.nanargmin(measured.latency_us[own]))]]
    least = float(np.nanmin(times))
    moved = float(times[transfer(best, measured.shapes[source], shape, configs)])
    kept = float(times[configs.index(default)])
    return None if np.isnan(moved) or np.isnan(kept) else (moved / least, kept / least)


def _timed(measured: Measurements) -> list[Shape]:
    timed = set(measured.shape_id[~np.isnan(measured.latency_us)].tolist())
    return [shape for at, shape in enumerate(measured.shapes) if at in timed]


def _value(shape: Shape, name: str) -> float:
    return float(shape.heads) if name == "heads" else range_value(shape, name)


def _scikit_learn_version() -> str:
    import sklearn

    return str(sklearn.__version__)
