"""How much time the picks lose, on shapes that the model has not seen.

Judged are the shapes of which every config on offer was tried in two passes. The model, the baselines and the name of
each shape's best config come from the first pass; all times that are compared come from the second, which is
independent of that choice. So the least of many noisy timings neither flatters nor blames (and no pick is credited for
beating the named best). The exact rung is off. Shapes that are nearly the same share a fold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import Arch, get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, cdiv, default_config, is_valid
from tilewise.models.bundle import unsquash
from tilewise.models.choice import choose, first_best
from tilewise.models.features import floors_us, shape_columns
from tilewise.models.fit import Examples, examples, fit
from tilewise.models.measurements import Measurements, measurements
from tilewise.models.regime import Regime
from tilewise.models.transfer import transfer

Floats = npt.NDArray[np.float64]
Progress = Callable[[str, int, int], None]  # what, done, of how many
Offer = Callable[[Shape], Sequence[Config]]

DEFAULT_FOLDS = 10
LEAVE_OUT = ("batch_size", "next_n", "max_context_len", "heads")


@dataclasses.dataclass(frozen=True)
class Judged:
    """One shape of the judging set."""

    shape_id: int
    shape: Shape
    cells: npt.NDArray[np.int64]  # the measured cell of each config on offer
    configs: list[Config]
    second_us: Floats  # NaN where a config failed
    reference_us: float  # second-pass time of the config that the first pass calls best
    default: int  # index of the default config


def evaluate(
    columns: Mapping[str, Sequence[Any]],
    *,
    op: str,
    arch: str,
    seed: int = 0,
    folds: int = DEFAULT_FOLDS,
    leave_out: Sequence[str] = (),
    offer: Offer | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Regret figures of the model and three baselines, by name.

    `leave_out` names shape fields of which each value is held out in turn (LEAVE_OUT has the usual ones). `offer` gives
    the configs on offer for a shape; left out, it is the op's own `candidates`.
    Raises InvalidProfileError where no shape can be judged.
    """
    measured = measurements(columns, op=op, arch=arch)
    return evaluate_measurements(
        measured, get_arch(arch), seed=seed, folds=folds, leave_out=leave_out, offer=offer, progress=progress
    )


def evaluate_measurements(
    measured: Measurements,
    arch: Arch,
    *,
    seed: int = 0,
    folds: int = DEFAULT_FOLDS,
    leave_out: Sequence[str] = (),
    offer: Offer | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`evaluate`, from cells."""
    judged = judging_set(measured, arch, offer)
    if len(judged) < 2:
        raise InvalidProfileError(
            f"evaluation needs at least 2 shapes with every config on offer timed twice, got {len(judged)} "
            f"of {len(measured.shapes)}"
        )
    margin = noise_margin(measured)
    # Held-out times never reach the fit; for the other shapes, too, only the first pass does.
    first = dataclasses.replace(measured, latency_us=measured.first_us)
    data = examples(first, arch)
    fold = assign_folds(measured.shapes, folds, seed)
    if len(set(fold.tolist())) < 2:
        raise InvalidProfileError(
            f"evaluation needs shapes that differ in more than nearly the same context, got {len(judged)} that do not"
        )
    picks: dict[str, dict[int, int | None]] = {name: {} for name in ("model", "default", "rule", "nearest")}
    predicted: dict[int, float] = {}
    for number in range(folds):
        held = [one for one in judged if fold[one.shape_id] == number]
        if progress:
            progress("evaluate", number, folds)
        if not held:
            continue
        train = np.flatnonzero(fold != number)
        _pick_fold(first, arch, data, train, held, margin, seed, picks, predicted)
    if progress:
        progress("evaluate", folds, folds)
    result: dict[str, Any] = {
        "op": measured.op,
        "arch": measured.arch,
        "seed": seed,
        "folds": folds,
        "rows": measured.rows,
        "measured_shapes": len(measured.shapes),
        "judged_shapes": len(judged),
        "noise_margin": margin,
        **figures(judged, picks["model"]),
        "baselines": {name: figures(judged, picks[name]) for name in ("default", "rule", "nearest")},
        "against_default": _against_default(judged, picks["model"]),
        "prediction_error": _prediction_error(judged, picks["model"], predicted),
    }
    if leave_out:
        result["leave_one_out"] = {
            field: _leave_one_out(first, arch, data, judged, field, margin, seed, progress) for field in leave_out
        }
    return result


def judging_set(measured: Measurements, arch: Arch, offer: Offer | None = None) -> list[Judged]:
    """The shapes of which every config on offer was tried in both passes."""
    place = {config: at for at, config in enumerate(measured.configs)}
    found = []
    for shape_id, shape in enumerate(measured.shapes):
        cells = measured.cells(shape_id)
        tried = {int(config): cells.start + at for at, config in enumerate(measured.config_id[cells])}
        configs = list(offer(shape) if offer else candidates(shape, arch))
        default = default_config(shape, arch)
        at = [tried.get(place.get(config, -1)) for config in configs]
        if not at or None in at or default not in configs:
            continue
        own = np.array(at, dtype=np.int64)
        first, second = measured.first_us[own], measured.second_us[own]
        failed = np.isnan(measured.latency_us[own])
        if failed.all() or (np.isnan(first) | np.isnan(second))[~failed].any():
            continue
        best = first_best(configs, first)
        assert best is not None  # not all failed
        found.append(Judged(shape_id, shape, own, configs, second, float(second[best]), configs.index(default)))
    return found


def assign_folds(shapes: Sequence[Shape], folds: int, seed: int) -> npt.NDArray[np.int64]:
    """[shapes] fold numbers. Shapes that differ by less than about a half in their contexts only share one."""
    groups: dict[tuple[Any, ...], int] = {}
    group = [
        groups.setdefault(
            (
                *(getattr(shape, name) for name in ("heads", "next_n", "batch_size", "head_dim", "cache_layout")),
                round(np.log2(max(1, shape.max_context_len))),
            ),
            len(groups),
        )
        for shape in shapes
    ]
    order = np.random.default_rng(seed).permutation(len(groups)) % folds
    return np.asarray(order[group], dtype=np.int64)


def noise_margin(measured: Measurements) -> float:
    """The ratio less 1 within which two passes of one cell agree nine times in ten; 0.01 where none was timed twice."""
    gap = np.abs(np.log(measured.second_us / measured.first_us))
    gap = gap[~np.isnan(gap)]
    if len(gap) < 20:
        return 0.01
    return round(float(np.clip(np.expm1(np.quantile(gap, 0.9)), 0.001, 0.03)), 6)


def figures(judged: Sequence[Judged], picks: Mapping[int, int | None]) -> dict[str, Any]:
    """Regret of some picks. One without a time counts as a failure, at the time of the shape's slowest config."""
    regret, failures, strict = [], 0, []
    for one in judged:
        at = picks[one.shape_id]
        time = np.nan if at is None else one.second_us[at]
        if np.isnan(time):
            failures += 1
            time = np.nanmax(one.second_us)
        regret.append(max(1.0, time / one.reference_us))
        strict.append(time / np.nanmin(one.second_us))
    ratio = np.array(regret)
    return {
        "geomean_regret": _geomean(ratio),
        "p90_regret": float(np.quantile(ratio, 0.9)),
        "worst_regret": float(ratio.max()),
        "within_2pct": float((ratio <= 1.02).mean()),
        "within_5pct": float((ratio <= 1.05).mean()),
        "failures": failures,
        # Against the least time of the second pass itself, which blames noise on the pick.
        "geomean_against_minimum": _geomean(np.array(strict)),
    }


def single_rule(shape: Shape, arch: Arch) -> Config:
    """The best rule that fits in a line, for an H200: K rows are M, 64-token tiles, 5 stages, 4 warps, about 4 programs
    per compute unit; two tokens fused from 64 heads on, all of them below."""
    fuse_n = min(2, shape.next_n) if shape.heads >= 64 else shape.next_n
    programs = shape.batch_size * shape.next_n / fuse_n
    split_kv = max(1, int(4 * arch.compute_units // max(programs, 1e-9)))
    return Config(
        fuse_n=fuse_n,
        dot_n=min(2, fuse_n),
        split_kv=min(split_kv, max(1, cdiv(shape.max_context_len, 64))),
        num_stages=5,
    )


def _pick_fold(
    measured: Measurements,
    arch: Arch,
    data: Examples,
    train: npt.NDArray[np.int64],
    held: Sequence[Judged],
    margin: float,
    seed: int,
    picks: dict[str, dict[int, int | None]],
    predicted: dict[int, float],
) -> None:
    rows = np.flatnonzero(np.isin(measured.shape_id[data.cell], train))
    rank, level = fit(data, rows, train, seed)
    row_of = {int(cell): at for at, cell in enumerate(data.cell)}
    known = measured.subset(train)
    best = _best_configs(known)
    for one in held:
        score = np.full(len(one.configs), np.nan)
        timed = [at for at, cell in enumerate(one.cells) if int(cell) in row_of]
        score[timed] = rank.predict(data.rank_rows[[row_of[int(one.cells[at])] for at in timed]])
        ratio = np.exp(unsquash(score))
        chosen, _ = choose(one.configs, ratio, one.default, margin)
        picks["model"][one.shape_id] = chosen
        lift = level.predict(data.shape_rows[one.shape_id][None])[0]
        predicted[one.shape_id] = float(floors_us(shape_columns(one.shape), arch) * np.exp(lift) * ratio[chosen])
        picks["default"][one.shape_id] = one.default
        picks["rule"][one.shape_id] = _closest(single_rule(one.shape, arch), one, arch)
        near = min(best, key=lambda at: (shape_distance(measured.shapes[at], one.shape), at))
        picks["nearest"][one.shape_id] = transfer(best[near], measured.shapes[near], one.shape, one.configs)


def _closest(config: Config, one: Judged, arch: Arch) -> int:
    """The rule's config where it is on offer, else the one most like it."""
    if config in one.configs and is_valid(one.shape, config, arch) is None:
        return one.configs.index(config)
    return transfer(config, one.shape, one.shape, one.configs)


def _best_configs(measured: Measurements) -> dict[int, Config]:
    best = {}
    for shape_id in np.unique(measured.shape_id).tolist():
        cells = measured.cells(shape_id)
        times = measured.latency_us[cells]
        if not np.isnan(times).all():
            best[shape_id] = measured.configs[measured.config_id[cells][int(np.nanargmin(times))]]
    return best


def shape_distance(a: Shape, b: Shape) -> float:
    """How far apart two shapes are, in doublings summed over the sizes."""
    sizes = ("batch_size", "next_n", "heads", "head_dim", "block_kv", "max_context_len", "mean_context_len")
    return float(sum(abs(np.log2(max(1, getattr(a, s)) / max(1, getattr(b, s)))) for s in sizes))


def _leave_one_out(
    measured: Measurements,
    arch: Arch,
    data: Examples,
    judged: Sequence[Judged],
    field: str,
    margin: float,
    seed: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Each value of one field held out in turn, and picked for as the selector would: by the model inside the range of
    what is left, by the default beyond it."""
    values = sorted({getattr(one.shape, field) for one in judged})
    picks: dict[str, dict[int, int | None]] = {name: {} for name in ("model", "default", "rule", "nearest")}
    chosen: dict[int, int | None] = {}
    extrapolated = 0
    for number, value in enumerate(values):
        if progress:
            progress(f"leave one {field} out", number, len(values))
        held = [one for one in judged if getattr(one.shape, field) == value]
        train = np.array([at for at, s in enumerate(measured.shapes) if getattr(s, field) != value], dtype=np.int64)
        if not len(train):
            return {"values": len(values)}
        _pick_fold(measured, arch, data, train, held, margin, seed, picks, {})
        regime = Regime.of([measured.shapes[at] for at in train], {})
        for one in held:
            outside = bool(regime.outside(one.shape))
            extrapolated += outside
            chosen[one.shape_id] = one.default if outside else picks["model"][one.shape_id]
    return {
        "values": len(values),
        "extrapolated": extrapolated / len(judged),
        **figures(judged, chosen),
        "model_alone": figures(judged, picks["model"]),
    }


def _against_default(judged: Sequence[Judged], picks: Mapping[int, int | None]) -> dict[str, float]:
    """Time of the pick over the default's: below 1 is a gain."""
    ratio = np.array(
        [one.second_us[at] / one.second_us[one.default] for one in judged if (at := picks[one.shape_id]) is not None]
    )
    return {"geomean": _geomean(ratio), "worst": float(ratio.max()), "changed": float((ratio != 1.0).mean())}


def _prediction_error(
    judged: Sequence[Judged], picks: Mapping[int, int | None], predicted: Mapping[int, float]
) -> dict[str, float]:
    """|predicted / measured - 1| of the picks' times."""
    error = np.array(
        [abs(predicted[o.shape_id] / o.second_us[at] - 1) for o in judged if (at := picks[o.shape_id]) is not None]
    )
    return {"median": float(np.median(error)), "p90": float(np.quantile(error, 0.9)), "worst": float(error.max())}


def _geomean(ratio: Floats) -> float:
    return float(np.exp(np.log(ratio).mean()))
