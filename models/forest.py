"""Boosted trees as plain arrays, evaluated with numpy."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidBundleError
from tilewise.models.masks import Masks

MAX_NODES = 4_000_000
MAX_DEPTH = 64
LANES = 8192  # looked at together: few enough to stay in the cache, and to be allocated without new pages


@dataclass(frozen=True)
class Forest:
    """A sum of regression trees over rows of features.

    Nodes of all trees lie in one table. A leaf points to itself, so that every row can take `depth` steps.
    The right child is always the one after the left, so only the left is kept.
    """

    baseline: float
    feature: npt.NDArray[np.int32]  # [nodes], column that a node looks at; 0 for a leaf
    threshold: npt.NDArray[np.float64]  # [nodes]; a row goes right where its feature is above it. +inf for a leaf
    left: npt.NDArray[np.int32]  # [nodes], the left child; the node itself for a leaf
    value: npt.NDArray[np.float64]  # [nodes], what a leaf adds
    roots: npt.NDArray[np.int32]  # [trees]
    depth: int  # most steps from a root to a leaf

    def predict(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[n] sums for [n, features] rows without NaN."""
        return self.walk(rows) if self.masks is None else self.masks.predict(rows)

    @functools.cached_property
    def masks(self) -> Masks | None:
        """The same forest in the form that is evaluated ten times as fast; None where it does not fit that form.

        Made when it is first asked for, in milliseconds.
        """
        return Masks.of(self)

    def walk(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """`predict` for any forest, by taking every row down every tree."""
        n, width = rows.shape
        flat = np.ascontiguousarray(rows).ravel()
        leaves = np.empty((len(self.roots) + 1, n))
        leaves[0] = self.baseline
        # numpy indexes by intp alone; converted once here, and not at every step.
        feature, left = self.feature.astype(np.intp), self.left.astype(np.intp)
        trees = max(1, LANES // max(1, n))
        base = np.tile(np.arange(n) * width, trees)
        for first in range(0, len(self.roots), trees):
            roots = self.roots[first : first + trees]
            # One lane per tree and row, tree by tree.
            node = np.repeat(roots.astype(np.intp), n)
            own = base[: len(node)]
            for _ in range(self.depth):
                at = feature.take(node)
                at += own
                above = flat.take(at) > self.threshold.take(node)
                node = left.take(node)
                node += above
            leaves[first + 1 : first + 1 + len(roots)] = self.value.take(node).reshape(len(roots), n)
        # One after the other, as scikit-learn adds them, so that sums agree to the last bit.
        total: npt.NDArray[np.float64] = np.add.accumulate(leaves, axis=0)[-1]
        return total

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name, as stored."""
        return {name: getattr(self, name) for name in ("feature", "threshold", "left", "value", "roots")}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], baseline: float, depth: int, features: int) -> Forest:
        """A forest from stored arrays; InvalidBundleError where a step could leave the table or never end."""
        feature, threshold, left, value, roots = (
            arrays[name] for name in ("feature", "threshold", "left", "value", "roots")
        )
        nodes = len(feature)
        if not 1 <= nodes <= MAX_NODES or any(len(a) != nodes for a in (threshold, left, value)):
            raise InvalidBundleError(f"a forest needs 1 to {MAX_NODES} nodes in all its arrays, got {nodes}")
        if type(depth) is not int or not 0 <= depth <= MAX_DEPTH:
            raise InvalidBundleError(f"forest depth must be 0 to {MAX_DEPTH}, got {depth!r}")
        at = np.arange(nodes)
        leaf = left == at
        inner = left[~leaf]
        if not (
            len(roots) >= 1
            and _within(roots, 0, nodes)
            and _within(feature, 0, features)
            # Children after their parent: no cycles. The right child has to exist, too.
            and bool((inner > at[~leaf]).all())
            and _within(inner, 0, nodes - 1)
            and bool(np.isposinf(threshold[leaf]).all())
            and bool(np.isfinite(threshold[~leaf]).all())
            and bool(np.isfinite(value).all())
            and np.isfinite(baseline)
        ):
            raise InvalidBundleError("a forest's nodes must point forward, to nodes and features that exist")
        return cls(float(baseline), feature, threshold, left, value, roots, depth)


def _within(values: npt.NDArray[Any], low: int, high: int) -> bool:
    return bool(((values >= low) & (values < high)).all())


def export(regressor: Any, columns: Sequence[int] | npt.NDArray[np.int64] | None = None) -> Forest:
    """A fitted HistGradientBoostingRegressor (squared error, no categories) as a Forest.

    `columns` says which columns of the rows to come are those that it was fitted to; left out, the same.
    """
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    value: list[float] = []
    roots: list[int] = []
    deepest = 0
    for (predictor,) in regressor._predictors:
        nodes = predictor.nodes
        if nodes["is_categorical"].any():
            raise ValueError("categorical splits cannot be exported")
        roots.append(len(feature))
        # Breadth first, siblings side by side.
        order, at = [(0, 0)], 0
        first = len(feature)
        while at < len(order):
            index, depth = order[at]
            node = nodes[index]
            deepest = max(deepest, depth)
            if node["is_leaf"]:
                feature.append(0)
                threshold.append(np.inf)
                left.append(first + at)
            else:
                own = int(node["feature_idx"])
                feature.append(own if columns is None else int(columns[own]))
                threshold.append(float(node["num_threshold"]))
                left.append(first + len(order))
                order += [(int(node["left"]), depth + 1), (int(node["right"]), depth + 1)]
            value.append(float(node["value"]) if node["is_leaf"] else 0.0)
            at += 1
    return Forest(
        float(np.ravel(regressor._baseline_prediction)[0]),
        np.array(feature, np.int32),
        np.array(threshold),
        np.array(left, np.int32),
        np.array(value),
        np.array(roots, np.int32),
        deepest,
    )
