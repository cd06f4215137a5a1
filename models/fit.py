"""Fitting the two functions of a bundle, rank and level, with scikit-learn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import UnsupportedError
from tilewise.kernels.arch import Arch
from tilewise.models.bundle import squash
from tilewise.models.columns import shape_columns
from tilewise.models.features import config_features, floors_us, shape_features
from tilewise.models.forest import Forest, export
from tilewise.models.measurements import Measurements
from tilewise.models.smooth import Smooth
from tilewise.models.smooth import export as export_smooth
from tilewise.models.structure import config_columns

Floats = npt.NDArray[np.float64]

RANK_PARAMETERS: dict[str, Any] = {
    "max_iter": 600,
    "learning_rate": 0.16,
    "max_leaf_nodes": 31,
    "max_depth": 8,
    "min_samples_leaf": 20,
    "max_features": 0.5,
    "max_bins": 63,
    "l2_regularization": 0.0,
    "early_stopping": False,
}
# The process of the level: the pair of highest likelihood is taken. A grid rather than an optimiser, so that the choice
# does not hang on the last bit of a sum.
LEVEL_PARAMETERS: dict[str, Any] = {
    "length_scale": [2.0, 4.0, 8.0, 16.0, 32.0],
    "noise_level": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
    "shapes": 400,  # that the pair is judged by, at most: the work grows with their cube
}
# A config this far from its shape's best, in log time, weighs half.
HALF_WEIGHT = 0.1
# Of those farther than this every third is learnt from, at three times the weight, which takes half of the time and
# loses nothing; of so few rows, all.
FAR, FAR_STEP = 0.25, 3
FEW_ROWS = 20000
# Trees that find out by how much a shape's best time itself is off, over those of the rank; see `rank_regressor`.
OFFSET_SHARE = 0.2


@dataclass(frozen=True)
class Examples:
    """What the two functions learn from: one row per timed cell, and one per shape."""

    cell: npt.NDArray[np.int64]  # [rows], index into the measurements' cells
    shape: npt.NDArray[np.int64]  # [rows], which shape each is of
    rank_rows: Floats  # [rows, FEATURES]
    rank_target: Floats  # [rows], squashed log ratio to the shape's best
    rank_weight: Floats
    shape_rows: Floats  # [shapes, SHAPE_FEATURES]
    level_target: Floats  # [shapes], log of best over floor; NaN for a shape without a time


def examples(measured: Measurements, arch: Arch, shape_weight: Floats | None = None) -> Examples:
    """Features and targets of all timed cells. `shape_weight` [shapes] says how much each shape counts."""
    listed = [shape_columns(shape) for shape in measured.shapes]
    shapes = {name: np.array([values[name] for values in listed]) for name in listed[0]}
    configs = config_columns(measured.configs)
    cell = np.flatnonzero(~np.isnan(measured.latency_us))
    shape_id, config_id = measured.shape_id[cell], measured.config_id[cell]
    logs = np.log(measured.latency_us[cell])
    best = np.full(len(measured.shapes), np.inf)
    np.minimum.at(best, shape_id, logs)
    best[np.isinf(best)] = np.nan
    shape_rows = shape_features(shapes, arch)
    own = config_features(
        {name: values[shape_id] for name, values in shapes.items()},
        {name: values[config_id] for name, values in configs.items()},
        arch,
    )
    ratio = logs - best[shape_id]
    weight = 1.0 / (1.0 + (ratio / HALF_WEIGHT) ** 2)
    if shape_weight is not None:
        weight = weight * shape_weight[shape_id]
    # Rounded, because logarithms differ in the last bit from machine to machine.
    return Examples(
        cell,
        shape_id,
        np.hstack([shape_rows[shape_id], own]),
        np.round(squash(ratio), 9),
        np.round(weight, 9),
        shape_rows,
        np.round(best - np.log(floors_us(shapes, arch)), 9),
    )


def fit_rank(data: Examples, rows: Any, seed: int, parameters: Mapping[str, Any] | None = None) -> Forest:
    """The rank, fitted to some rows; see `rank_regressor`."""
    return export(*rank_regressor(data, rows, seed, parameters))


def rank_regressor(
    data: Examples, rows: Any, seed: int, parameters: Mapping[str, Any] | None = None
) -> tuple[Any, npt.NDArray[np.int64]]:
    """scikit-learn's regressor of the rank, fitted to some rows, and the columns of the features that it looks at.

    `parameters` replace some of RANK_PARAMETERS.

    What counts is the order of a shape's configs, but the targets are ratios to the best of them, which is the least of
    many times: what luck or an odd config has given to it moves all targets of the shape together. So a small forest is
    fitted first, and what it is off by on average, shape by shape, is taken off the targets of the real one.

    Raises UnsupportedError without scikit-learn.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedError("training needs scikit-learn: pip install -e '.[train]'") from error
    full = {**RANK_PARAMETERS, **(parameters or {})}
    small = {**full, "max_iter": max(1, round(OFFSET_SHARE * full["max_iter"]))}
    at, weight = thinned(data, np.arange(len(data.cell))[rows])
    features, target, shape = data.rank_rows[at], data.rank_target[at], data.shape[at]
    # Columns of one value say nothing, and take as long as others; a tree never asks for them.
    varies = np.flatnonzero((features != features[0]).any(axis=0))
    varies = varies if len(varies) else np.arange(1)
    features = np.ascontiguousarray(features[:, varies])
    # One thread: tables this small gain nothing from more, and on a busy machine threads that wait for each other at
    # every node of every tree take ten times as long.
    with threadpool_limits(limits=1):
        first = HistGradientBoostingRegressor(random_state=seed, **small).fit(features, target, sample_weight=weight)
        off = target - first.predict(features)
        offset = np.bincount(shape, weight * off) / np.maximum(np.bincount(shape, weight), 1e-9)
        target = np.round(target - offset[shape], 9)
        rank = HistGradientBoostingRegressor(random_state=seed, **full).fit(features, target, sample_weight=weight)
    return rank, varies


def thinned(data: Examples, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Floats]:
    """The rows to learn from, and their weights."""
    if len(rows) <= FEW_ROWS:
        return rows, data.rank_weight[rows]
    far = data.rank_target[rows] > float(squash(np.array(FAR)))
    kept = rows[far][::FAR_STEP]
    at = np.concatenate([rows[~far], kept])
    return at, np.concatenate([data.rank_weight[rows[~far]], FAR_STEP * data.rank_weight[kept]])


def fit_level(data: Examples, shapes: Any) -> tuple[Any, Any]:
    """scikit-learn's scaler and process of the level, fitted to some shapes.

    Raises UnsupportedError without scikit-learn.
    """
    try:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
        from sklearn.preprocessing import StandardScaler
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise UnsupportedError("training needs scikit-learn: pip install -e '.[train]'") from error
    known = np.asarray(shapes)[~np.isnan(data.level_target[shapes])]
    scaler = StandardScaler().fit(data.shape_rows[known])
    standard, target = scaler.transform(data.shape_rows[known]), data.level_target[known]

    def process(length: float, noise: float) -> Any:
        kernel = ConstantKernel(1.0) * Matern(length, nu=1.5) + WhiteKernel(noise)
        return GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True)

    def likelihood(pair: tuple[float, float]) -> float:
        fitted = process(*pair).fit(standard[some], target[some])
        return round(float(fitted.log_marginal_likelihood_value_), 6)

    some = slice(None, None, max(1, -(-len(known) // LEVEL_PARAMETERS["shapes"])))
    pairs = itertools.product(LEVEL_PARAMETERS["length_scale"], LEVEL_PARAMETERS["noise_level"])
    with threadpool_limits(limits=1):
        return scaler, process(*max(pairs, key=likelihood)).fit(standard, target)


def fit(data: Examples, rows: Any, shapes: Any, seed: int) -> tuple[Forest, Smooth]:
    """The same as plain arrays."""
    return fit_rank(data, rows, seed), export_smooth(*fit_level(data, shapes))
