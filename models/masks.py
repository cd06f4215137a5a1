"""A forest in the form that is evaluated fast for the few rows of one launch shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tilewise.models.forest import Forest

# Leaves of a tree that `Masks` can tell apart: type of a mask, a De Bruijn number that times a power of two tells in
# its top bits which power it is, and by how much those are shifted down.
MASKS: dict[int, tuple[Any, int, int]] = {16: (np.uint16, 0x09AF, 12), 32: (np.uint32, 0x077CB531, 27)}
MAX_MASK_BYTES = 64 << 20
MERGED_ROWS = 512  # features with few thresholds share a table of at most this many rows
MAX_TREES = 2048  # more are walked, so that masks of some rows stay small
MASKED_ROWS = 32  # looked at together: few enough to stay in the cache

Table: TypeAlias = tuple[list[int], list[npt.NDArray[np.float64]], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """The conjunctions of some of the features: all are looked up in one search, and taken in one go."""

    features: npt.NDArray[np.intp]  # [features that are looked at]
    cuts: npt.NDArray[np.complex128]  # ascending: the place in `features`, and as imaginary part a threshold
    # A table has the conjunctions for each combination of how many thresholds of its features are passed.
    strides: npt.NDArray[np.intp]  # [features that are looked at], rows of its table that one more threshold is away
    starts: npt.NDArray[np.intp]  # [tables], the first of each table's features
    offsets: npt.NDArray[np.intp]  # [tables], what leads from the sum of places by strides to the row
    masks: npt.NDArray[Any]  # [rows of all tables, trees]

    @classmethod
    def of(cls, tables: Sequence[Table], trees: int, word: Any) -> Part:
        """Features, thresholds of each, and the conjunctions, the last feature's places varying fastest."""
        cuts_of = [cuts for _, own, _ in tables for cuts in own]
        cuts = np.empty(sum(map(len, cuts_of)), np.complex128)
        cuts.real = np.repeat(np.arange(len(cuts_of)), [len(own) for own in cuts_of])
        cuts.imag = np.concatenate([*cuts_of, np.empty(0)])
        strides: list[int] = []
        starts, offsets = [], []
        searched = begin = 0  # cuts of the features before, rows of the tables before
        for _, own, table in tables:
            starts.append(len(strides))
            sizes = [len(one) + 1 for one in own]
            steps = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
            offsets.append(begin)
            for size, step in zip(sizes, steps, strict=True):
                offsets[-1] -= searched * step
                searched += size - 1
            strides += steps
            begin += len(table)
        masks = np.concatenate([np.empty((0, trees), word), *(table for _, _, table in tables)])
        features = [feature for own, _, _ in tables for feature in own]
        return cls(
            np.array(features, np.intp),
            cuts,
            np.array(strides, np.intp),
            np.array(starts, np.intp),
            np.array(offsets, np.intp),
            masks,
        )

    def conjunction(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        """[n, trees] masks of the leaves that these features leave."""
        n, trees = len(rows), self.masks.shape[1]
        if not len(self.starts):
            return np.full((n, trees), np.iinfo(self.masks.dtype).max, self.masks.dtype)
        wanted = np.empty((n, len(self.features)), np.complex128)
        wanted.real = np.arange(len(self.features))
        wanted.imag = rows[:, self.features]
        # Complex numbers are ordered by their real parts, then by the imaginary ones.
        places = self.cuts.searchsorted(wanted.ravel()).reshape(wanted.shape)
        places *= self.strides
        at = np.add.reduceat(places, self.starts, axis=1)
        at += self.offsets
        taken = self.masks.take(at.ravel(), axis=0, mode="clip").reshape(n, -1, trees)
        return np.asarray(np.bitwise_and.reduce(taken, axis=1))


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
    parts: tuple[Part, ...]
    value: npt.NDArray[np.float64]  # [trees * bits], of each tree's leaves, placed by the De Bruijn number
    roots: npt.NDArray[Any]  # [trees], where in `value` each tree's begin

    @classmethod
    def of(cls, forest: Forest, bounds: Sequence[int] = ()) -> Masks | None:
        """There is a part for the features below the first of `bounds`, and so on. None where there are more than
        MAX_TREES, a tree has more leaves than any of MASKS, nodes are shared or deeper than the forest says, or the
        tables were too large."""
        if len(forest.roots) > MAX_TREES:
            return None
        left, roots = forest.left.astype(np.intp), forest.roots.astype(np.intp)
        leaf = left == np.arange(len(left))
        tree = np.full(len(left), -1, np.intp)
        tree[roots] = np.arange(len(roots))
        levels = [roots]
        while len(inner := levels[-1][~leaf[levels[-1]]]):
            if len(levels) > forest.depth or sum(map(len, levels)) > len(left):
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
        parts: list[list[Table]] = [[] for _ in range(len(bounds) + 1)]
        size = 0
        for feature in np.unique(forest.feature[inner]).tolist():
            own = forest.feature[inner] == feature
            tables = parts[sum(feature >= bound for bound in bounds)]
            cuts, at = np.unique(forest.threshold[inner][own], return_inverse=True)
            if size + (len(cuts) + 1) * len(roots) * np.dtype(word).itemsize > MAX_MASK_BYTES:
                return None
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
        at_roots = (np.arange(len(roots)) * bits).astype(word if value.size <= 1 << bits else np.uint32)
        joined = tuple(Part.of(tables, len(roots), word) for tables in parts)
        return cls(forest.baseline, bits, joined, value.ravel(), at_roots)

    def predict(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[n] sums for [n, features] rows without NaN, to the last bit those of `Forest.walk`."""
        total = np.empty(len(rows))
        for start in range(0, len(rows), MASKED_ROWS):
            some = rows[start : start + MASKED_ROWS]
            total[start : start + MASKED_ROWS] = self.sums([part.conjunction(some) for part in self.parts])
        return total

    def sums(self, masks: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        """[n] sums from the masks of each part, [n, trees] or [1, trees] where they are the same for all rows."""
        word, de_bruijn, shift = MASKS[self.bits]
        left = functools.reduce(np.bitwise_and, masks)
        lowest = np.negative(left)
        lowest &= left
        lowest *= word(de_bruijn)
        lowest >>= shift
        n, trees = left.shape
        leaves = np.empty((trees + 1, n))
        leaves[0] = self.baseline
        self.value.take((lowest + self.roots).T, out=leaves[1:], mode="clip")
        # One after the other, as scikit-learn adds them, so that sums agree to the last bit. numpy's `sum` does that
        # along the first axis, unless a row is a single number.
        total: npt.NDArray[np.float64] = leaves.sum(axis=0) if n > 1 else np.add.accumulate(leaves)[-1]
        return total
