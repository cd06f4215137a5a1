"""Boosted trees as plain arrays, evaluated with numpy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidBundleError

MAX_NODES = 4_000_000
MAX_DEPTH = 64
LANES = 8192  # looked at together: few enough to stay in the cache, and to be allocated without new pages
MASKED_ROWS = 256  # likewise


# Leaves of a tree that `Masks` can tell apart: type of a mask, a De Bruijn number that times a power of two tells in
# its top bits which power it is, and by how much those are shifted down.
MASKS: dict[int, tuple[Any, int, int]] = {16: (np.uint16, 0x09AF, 12), 32: (np.uint32, 0x077CB531, 27)}
MAX_MASK_BYTES = 64 << 20
MERGED_ROWS = 512  # features with few thresholds share a table of at most this many rows


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
        """The same forest in the form that is evaluated five times as fast; None where it does not fit that form.

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


@dataclass(frozen=True, slots=True)
class Masks:
    """A forest as bit masks of leaves: which leaf a row reaches is found without walking.

    A row that goes right at a node cannot reach the leaves on its left. So each node has a mask of the leaves that are
    left when it is passed on the right, and the leaf reached is the lowest one in the conjunction of all nodes passed
    so. For one feature these are the nodes with thresholds below the row's value: a prefix in the order of thresholds,
    whose conjunctions are made beforehand. This is QuickScorer (Lucchese et al., SIGIR 2015), with prefixes.
    """

    baseline: float
    bits: int  # of a mask, one of MASKS
    # Features, and thresholds of each, ascending; with a table [product of (thresholds + 1), trees] that has the
    # conjunction for each combination of how many thresholds are passed, the last feature's varying fastest.
    tables: list[tuple[list[int], list[npt.NDArray[np.float64]], npt.NDArray[Any]]]
    value: npt.NDArray[np.float64]  # [trees * bits], of each tree's leaves, placed by the De Bruijn number

    @classmethod
    def of(cls, forest: Forest) -> Masks | None:
        """None where a tree has more leaves than any of MASKS, nodes are shared or deeper than the forest says, or the
        tables were too large."""
        left, roots = forest.left.astype(np.intp), forest.roots.astype(np.intp)
        leaf = left == np.arange(len(left))
        tree = np.full(len(left), -1, np.intp)
        tree[roots] = np.arange(len(roots))
        levels = [roots]
        while len(inner := levels[-1][~leaf[levels[-1]]]):
            if len(levels) > forest.depth:
                return None
            tree[left[inner]] = tree[left[inner] + 1] = tree[inner]
            levels.append(np.concatenate([left[inner], left[inner] + 1]))
        nodes = np.concatenate(levels)
        if len(np.unique(nodes)) != len(nodes):
            return None
        leaves = leaf.astype(np.int64)  # below each node
        for level in reversed(levels):
            inner = level[~leaf[level]]
            leaves[inner] = leaves[left[inner]] + leaves[left[inner] + 1]
        bits = next((bits for bits in MASKS if leaves[roots].max() <= bits), None)
        if bits is None:
            return None
        word, de_bruijn, shift = MASKS[bits]
        full = (1 << bits) - 1
        first = np.zeros(len(left), np.int64)  # number of the leftmost leaf below each node, within its tree
        for level in levels:
            inner = level[~leaf[level]]
            first[left[inner]] = first[inner]
            first[left[inner] + 1] = first[inner] + leaves[left[inner]]
        inner = nodes[~leaf[nodes]]
        kept = ~(((1 << leaves[left[inner]]) - 1) << first[left[inner]]) & full
        tables: list[tuple[list[int], list[npt.NDArray[np.float64]], npt.NDArray[Any]]] = []
        size = 0
        for feature in np.unique(forest.feature[inner]).tolist():
            own = forest.feature[inner] == feature
            cuts, at = np.unique(forest.threshold[inner][own], return_inverse=True)
            table = np.full((len(cuts) + 1, len(roots)), full, word)
            np.bitwise_and.at(table, (at + 1, tree[inner][own]), kept[own].astype(word))
            np.bitwise_and.accumulate(table, axis=0, out=table)
            if tables and len(tables[-1][2]) * len(table) <= MERGED_ROWS:
                features, cuts_of, before = tables.pop()
                size -= before.nbytes
                table = (before[:, None] & table[None]).reshape(-1, len(roots))
                tables.append(([*features, feature], [*cuts_of, cuts], table))
            else:
                tables.append(([feature], [cuts], table))
            size += table.nbytes
            if size > MAX_MASK_BYTES:
                return None
        value = np.zeros((len(roots), bits))
        ends = nodes[leaf[nodes]]
        value[tree[ends], ((1 << first[ends]) * de_bruijn & full) >> shift] = forest.value[ends]
        return cls(forest.baseline, bits, tables, value.ravel())

    def predict(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[n] sums for [n, features] rows without NaN, to the last bit those of `Forest.walk`."""
        total = np.empty(len(rows))
        for start in range(0, len(rows), MASKED_ROWS):
            total[start : start + MASKED_ROWS] = self._sums(rows[start : start + MASKED_ROWS])
        return total

    def _sums(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        leaf = self._leaves(rows)
        n, trees = leaf.shape
        total = np.full(n, self.baseline)
        step = max(1, 2 * LANES // n)
        for first in range(0, trees, step):
            at = leaf[:, first : first + step].T  # [step, n]
            leaves = np.empty((len(at) + 1, n))
            leaves[0] = total
            self.value.take(at, out=leaves[1:], mode="clip")
            # One after the other, as scikit-learn adds them, so that sums agree to the last bit. numpy's `sum` does
            # that along the first axis, unless a row is a single number.
            total = leaves.sum(axis=0) if n > 1 else np.add.accumulate(leaves)[-1]
        return total

    def _leaves(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        """[n, trees] where in `value` the leaves are that are reached."""
        word, de_bruijn, shift = MASKS[self.bits]
        trees = len(self.value) // self.bits
        columns = np.ascontiguousarray(rows.T)
        same = (columns == columns[:, :1]).all(axis=1).tolist()  # most are: those of the shape
        shared = np.full(trees, (1 << self.bits) - 1, word)
        masks = np.full((len(rows), trees), (1 << self.bits) - 1, word)
        prefix = np.empty_like(masks)
        for features, cuts_of, table in self.tables:
            passed: Any = 0
            for feature, cuts in zip(features, cuts_of, strict=True):
                values = columns[feature]
                passed = passed * (len(cuts) + 1) + cuts.searchsorted(values[0] if same[feature] else values)
            if np.ndim(passed):
                table.take(passed, axis=0, out=prefix, mode="clip")
                masks &= prefix
            else:
                shared &= table[passed]
        masks &= shared
        lowest = np.negative(masks, out=prefix)
        lowest &= masks
        lowest *= word(de_bruijn)
        lowest >>= shift
        first = (np.arange(trees) * self.bits).astype(word if len(self.value) <= 1 << self.bits else np.uint32)
        return np.asarray(lowest + first)


def _within(values: npt.NDArray[Any], low: int, high: int) -> bool:
    return bool(((values >= low) & (values < high)).all())


def export(regressor: Any) -> Forest:
    """A fitted HistGradientBoostingRegressor (squared error, no categories) as a Forest."""
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
                feature.append(int(node["feature_idx"]))
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
