"""Fitting the two forests of a bundle with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import UnsupportedError
from tilewise.kernels.arch import Arch
from tilewise.models.bundle import squash
from tilewise.models.features import config_columns, config_features, floors_us, shape_columns, shape_features
from tilewise.models.forest import Forest, export
from tilewise.models.measurements import Measurements

Floats = npt.NDArray[np.float64]

RANK_PARAMETERS: dict[str, Any] = {
    "max_iter": 200,
    "learning_rate": 0.08,
    "max_leaf_nodes": 31,
    "max_depth": 7,
    "min_samples_leaf": 10,
    "max_features": 0.5,
    "l2_regularization": 0.0,
    "early_stopping": False,
}
LEVEL_PARAMETERS: dict[str, Any] = {
    "max_iter": 200,
    "learning_rate": 0.08,
    "max_leaf_nodes": 8,
    "max_depth": 4,
    "min_samples_leaf": 3,
    "max_features": 0.5,
    "early_stopping": False,
}
# A config this far from its shape's best, in log time, weighs half.
HALF_WEIGHT = 0.1


@dataclass(frozen=True)
class Examples:
    """What the forests learn from: one row per timed cell, and one per shape."""

    cell: npt.NDArray[np.int64]  # [rows], index into the measurements' cells
    rank_rows: Floats  # [rows, FEATURES]
    rank_target: Floats  # [rows], squashed log ratio to the shape's best
    rank_weight: Floats
    shape_rows: Floats  # [shapes, SHAPE_FEATURES]
    level_target: Floats  # [shapes], log of best over floor; NaN for a shape without a time


def examples(measured: Measurements, arch: Arch) -> Examples:
    """Features and targets of all timed cells."""
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
    return Examples(
        cell,
        np.hstack([shape_rows[shape_id], own]),
        squash(ratio),
        1.0 / (1.0 + (ratio / HALF_WEIGHT) ** 2),
        shape_rows,
        best - np.log(floors_us(shapes, arch)),
    )


def fit_regressors(data: Examples, rows: Any, shapes: Any, seed: int) -> tuple[Any, Any]:
    """scikit-learn's rank and level regressors, fitted to some rows and some shapes.

    Raises UnsupportedError without scikit-learn.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedError("training needs scikit-learn: pip install 'tilewise[train]'") from error
    rank = HistGradientBoostingRegressor(random_state=seed, **RANK_PARAMETERS)
    level = HistGradientBoostingRegressor(random_state=seed, **LEVEL_PARAMETERS)
    known = np.asarray(shapes)[~np.isnan(data.level_target[shapes])]
    # One thread: tables this small gain nothing from more, and on a busy machine threads that wait for each other at
    # every node of every tree take ten times as long.
    with threadpool_limits(limits=1, user_api="openmp"):
        rank.fit(data.rank_rows[rows], data.rank_target[rows], sample_weight=data.rank_weight[rows])
        level.fit(data.shape_rows[known], data.level_target[known])
    return rank, level


def fit(data: Examples, rows: Any, shapes: Any, seed: int) -> tuple[Forest, Forest]:
    """The same as plain arrays."""
    rank, level = fit_regressors(data, rows, shapes, seed)
    return export(rank), export(level)
