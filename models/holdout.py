"""Predictions for shapes by models that have not seen them, and what the picks by them would have gained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Shape, default_config
from tilewise.models.bundle import unsquash
from tilewise.models.choice import first_best
from tilewise.models.columns import shape_columns
from tilewise.models.features import floors_us
from tilewise.models.fit import Examples, fit
from tilewise.models.guard import AXES, CONFIDENCE, INSIDE, Guard, Needed, Trial, beyond_confidence, needed_gain
from tilewise.models.judging import assign_folds, typical_noise
from tilewise.models.measurements import Measurements

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # what, done, of how many

EDGE_SHARE = 0.1  # of the shapes, at each end of a range, that are held out to see how far predictions carry
RANGED = ("batch_size", "max_context_len")  # of these the ends are held out; of the others, each value


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one shape."""

    ratio: Floats  # [cells of the shape] log of the time over that of the shape's best; NaN where a cell has no time
    best_us: float


@dataclass(frozen=True)
class Split:
    """Shapes that are held out together, and those that are left to train on."""

    held: Ids
    train: Ids


def hold_out(
    measured: Measurements,
    arch: Arch,
    data: Examples,
    splits: Sequence[Split],
    *,
    seed: int,
    jobs: int = 1,
    what: str = "hold out",
    progress: Progress | None = None,
) -> list[dict[int, Prediction]]:
    """For each split, what a model of the shapes that are left predicts for those held out.

    The same whatever `jobs`, the number of processes, is.
    """
    if progress:
        progress(what, 0, len(splits))
    if jobs == 1:
        found = []
        for at, split in enumerate(splits):
            found.append(_predict(measured, arch, data, split, seed))
            if progress:
                progress(what, at + 1, len(splits))
        return found
    from joblib import Parallel, delayed

    made = Parallel(n_jobs=jobs, return_as="generator")(
        delayed(_predict)(measured, arch, data, split, seed) for split in splits
    )
    found = []
    for at, one in enumerate(made):
        found.append(one)
        if progress:
            progress(what, at + 1, len(splits))
    return found


def _predict(measured: Measurements, arch: Arch, data: Examples, split: Split, seed: int) -> dict[int, Prediction]:
    rows = np.flatnonzero(np.isin(measured.shape_id[data.cell], split.train))
    rank, level = fit(data, rows, split.train, seed)
    found = {}
    for shape_id in split.held.tolist():
        cells = measured.cells(shape_id)
        low, high = np.searchsorted(data.cell, [cells.start, cells.stop])
        ratio = np.full(cells.stop - cells.start, np.nan)
        ratio[data.cell[low:high] - cells.start] = unsquash(rank.predict(data.rank_rows[low:high]))
        lift = float(level.predict(data.shape_rows[shape_id][None])[0])
        floor = float(floors_us(shape_columns(measured.shapes[shape_id]), arch))
        found[shape_id] = Prediction(ratio, floor * float(np.exp(lift)))
    return found


def fold_splits(shapes: Sequence[Shape], folds: int, seed: int) -> list[Split]:
    """Every shape held out once; near-duplicates together. Folds without a shape are left out."""
    fold = assign_folds(shapes, folds, seed)
    return [Split(np.flatnonzero(fold == n), np.flatnonzero(fold != n)) for n in sorted(set(fold.tolist()))]


def value_splits(shapes: Sequence[Shape], field: str, among: Iterable[int] | None = None) -> list[Split]:
    """Every value of a field held out in turn, among some of the shapes.

    Of a ranged size, values within the same quarter of a doubling count as one: a model that was trained on 31,000
    tokens has as good as seen 32,000. (Near the ends of such a quarter there are still neighbours that are left.)
    """
    ids = np.arange(len(shapes)) if among is None else np.array(sorted(among), dtype=np.int64)
    values = np.array([getattr(shapes[at], field) for at in ids.tolist()])
    if field in RANGED:
        values = np.round(4.0 * np.log2(np.maximum(values, 1)))
    return [Split(ids[values == value], ids[values != value]) for value in sorted(set(values.tolist()))]


def edge_splits(shapes: Sequence[Shape], field: str, among: Iterable[int] | None = None) -> list[Split]:
    """The lowest and the highest values of a field held out: one each, and more up to EDGE_SHARE of the shapes."""
    ids = np.arange(len(shapes)) if among is None else np.array(sorted(among), dtype=np.int64)
    values = np.array([getattr(shapes[at], field) for at in ids.tolist()])
    found = []
    for ascending in (sorted(set(values.tolist())), sorted(set(values.tolist()), reverse=True)):
        taken = [ascending[0]]
        for value in ascending[1:]:
            if np.isin(values, [*taken, value]).sum() > EDGE_SHARE * len(ids):
                break
            taken.append(value)
        held = np.isin(values, taken)
        if not held.all():
            found.append(Split(ids[held], ids[~held]))
    return found


def axis_splits(shapes: Sequence[Shape], axis: str, among: Iterable[int] | None = None) -> list[Split]:
    """The splits by which the gain that is asked for beyond a size is found; none where it has one value."""
    splits = (edge_splits if axis in RANGED else value_splits)(shapes, axis, among)
    return [split for split in splits if len(split.train)]


def trials(
    measured: Measurements,
    arch: Arch,
    splits: Sequence[Split],
    predictions: Sequence[Mapping[int, Prediction]],
    axis: str | None = None,
) -> list[Trial]:
    """What the picks gained over the default, of each held-out shape whose default was timed."""
    found = []
    place = {config: at for at, config in enumerate(measured.configs)}
    for split, predicted in zip(splits, predictions, strict=True):
        left = sorted({getattr(measured.shapes[at], axis) for at in split.train.tolist()}) if axis else []
        for shape_id, one in predicted.items():
            cells = measured.cells(shape_id)
            ids = measured.config_id[cells]
            default = np.flatnonzero(ids == place.get(default_config(measured.shapes[shape_id], arch), -1))
            configs = [measured.configs[at] for at in ids.tolist()]
            best = first_best(configs, np.exp(one.ratio))
            times = measured.latency_us[cells]
            if best is None or not len(default) or np.isnan(times[default[0]]) or np.isnan(times[best]):
                continue
            at = int(default[0])
            found.append(
                Trial(
                    shape_id,
                    float(one.ratio[at] - one.ratio[best]),
                    float(np.log(times[at] / times[best])),
                    reach_of(getattr(measured.shapes[shape_id], axis), left) if axis else 0.0,
                )
            )
    return found


def default_timed(measured: Measurements, arch: Arch, shape_id: int) -> bool:
    """Whether the default of a shape has a time."""
    cells = measured.cells(shape_id)
    default = default_config(measured.shapes[shape_id], arch)
    return any(
        measured.configs[config] == default and not np.isnan(us)
        for config, us in zip(measured.config_id[cells].tolist(), measured.latency_us[cells].tolist(), strict=True)
    )


def reach_of(value: float, known: Sequence[float]) -> float:
    """Doublings from a value to the nearest known one."""
    return float(min(abs(np.log2(max(value, 1e-9) / max(other, 1e-9))) for other in known))


def calibrate(
    measured: Measurements,
    arch: Arch,
    data: Examples,
    inside: Sequence[Trial],
    *,
    noise: float,
    seed: int,
    axes: Sequence[str] = AXES,
    among: Iterable[int] | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Guard:
    """The gains that are asked for, from the trials of folds and from new ones beyond each size."""
    needed: dict[str, Needed] = {INSIDE: needed_gain(inside, noise, typical_noise(measured))}
    ids = None if among is None else list(among)
    for axis in axes:
        splits = axis_splits(measured.shapes, axis, ids)
        made = hold_out(measured, arch, data, splits, seed=seed, jobs=jobs, what=f"beyond {axis}", progress=progress)
        tried = trials(measured, arch, splits, made, axis)
        needed[axis] = needed_gain(tried, noise, noise, beyond_confidence(axis))
    return Guard(CONFIDENCE, needed)
