"""The fast form of a forest gives what walking it gives, to the last bit, or is not used."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tilewise.models import masks
from tilewise.models.forest import Forest, export
from tilewise.models.masks import Masks

sklearn_ensemble = pytest.importorskip("sklearn.ensemble")
threadpoolctl = pytest.importorskip("threadpoolctl")


def fitted(leaves: int, trees: int, seed: int = 0) -> tuple[Forest, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 40, (600, 7)) / 8.0  # many rows fall on a threshold
    target = rows[:, 0] * np.sin(rows[:, 1]) + rows[:, 2] * rows[:, 3]
    regressor = sklearn_ensemble.HistGradientBoostingRegressor(
        max_iter=trees, max_leaf_nodes=leaves, min_samples_leaf=3, random_state=seed, early_stopping=False
    )
    with threadpoolctl.threadpool_limits(limits=1):  # threads that wait for each other take minutes on a busy machine
        return export(regressor.fit(rows, target)), rows


@pytest.mark.parametrize("leaves", [2, 3, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("count", [1, 2, 3, 127, 128, 129, 600])
def test_masks_and_walking_agree_to_the_last_bit(leaves: int, count: int) -> None:
    trees, rows = fitted(leaves, 40)
    edges = np.unique(trees.threshold[np.isfinite(trees.threshold)])
    rows = np.vstack([rows[: count - 1], edges[:7][None]])  # a row that sits on thresholds
    assert trees.masks is not None
    assert np.array_equal(trees.masks.predict(rows), trees.walk(rows))
    assert np.array_equal(trees.predict(rows), trees.walk(rows))


@pytest.mark.parametrize("bounds", [(3,), (2, 5), (0, 7), (2, 2)])
def test_parts_together_give_the_whole(bounds: tuple[int, ...]) -> None:
    trees, rows = fitted(31, 40)
    parted = Masks.of(trees, bounds)
    assert parted is not None
    assert len(parted.parts) == len(bounds) + 1
    assert np.array_equal(parted.predict(rows), trees.walk(rows))
    for part, low, high in zip(parted.parts, (0, *bounds), (*bounds, 7), strict=True):
        assert all(low <= feature < high for feature in part.features)
    same = rows[:9].copy()
    same[:, : bounds[0]] = same[0, : bounds[0]]  # of which one row is enough
    first, *others = parted.parts
    sums = parted.sums([*(part.conjunction(same) for part in others), first.conjunction(same[:1])])
    assert np.array_equal(sums, trees.walk(same))


def test_rows_that_agree_in_all_or_no_features() -> None:
    trees, rows = fitted(15, 30)
    for some in (np.repeat(rows[:1], 50, axis=0), rows[:50], np.full((3, 7), -1e9), np.full((3, 7), 1e9)):
        assert np.array_equal(trees.predict(some), trees.walk(some))


def test_trees_with_more_leaves_are_walked() -> None:
    trees, rows = fitted(33, 20)
    assert trees.masks is None
    assert np.array_equal(trees.predict(rows), trees.walk(rows))


def test_a_single_leaf_and_no_row() -> None:
    lone = Forest(
        1.5, np.zeros(1, np.int32), np.array([np.inf]), np.zeros(1, np.int32), np.array([2.0]), np.zeros(1, np.int32), 0
    )
    assert lone.masks is not None
    assert lone.predict(np.ones((4, 3))).tolist() == [3.5] * 4
    assert lone.predict(np.ones((0, 3))).tolist() == []


def two_levels(depth: int, left: list[int]) -> Forest:
    inner = np.array([at != child for at, child in enumerate(left)])
    return Forest.from_arrays(
        {
            "feature": np.zeros(len(left), np.int32),
            "threshold": np.where(inner, 0.5, np.inf),
            "left": np.array(left, np.int32),
            "value": np.arange(len(left), dtype=np.float64),
            "roots": np.array([0], np.int32),
        },
        0.0,
        depth,
        1,
    )


@pytest.mark.parametrize(
    ("depth", "left", "reason"),
    [(1, [1, 3, 2, 3, 4], "deeper than it says"), (3, [1, 3, 3, 3, 4], "two nodes share their children")],
)
def test_a_forest_of_another_form_is_walked(depth: int, left: list[int], reason: str) -> None:
    trees = two_levels(depth, left)
    assert trees.masks is None, reason
    rows = np.array([[0.0], [1.0]])
    assert np.array_equal(trees.predict(rows), trees.walk(rows))


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MAX_MASK_BYTES", 1000)
    trees, rows = fitted(15, 40)
    assert trees.masks is None
    assert np.array_equal(trees.predict(rows), trees.walk(rows))


def chained(depth: int) -> Forest:
    """Both children of each node are the next two, so that every level has twice as many ways to it."""
    nodes = depth + 2
    left = np.minimum(np.arange(nodes) + 1, nodes - 2)
    left[-2:] = np.arange(nodes)[-2:]
    leaf = left == np.arange(nodes)
    return Forest.from_arrays(
        {
            "feature": np.zeros(nodes, np.int32),
            "threshold": np.where(leaf, np.inf, 0.5),
            "left": left.astype(np.int32),
            "value": np.arange(nodes, dtype=np.float64),
            "roots": np.array([0], np.int32),
        },
        0.0,
        depth,
        1,
    )


def stumps(count: int, leaves_only: bool = False) -> Forest:
    nodes = np.arange(3 * count)
    leaf = nodes % 3 > 0 if not leaves_only else np.ones(3 * count, bool)
    return Forest.from_arrays(
        {
            "feature": np.zeros(3 * count, np.int32),
            "threshold": np.where(leaf, np.inf, nodes.astype(np.float64)),
            "left": np.where(leaf, nodes, nodes + 1).astype(np.int32),
            "value": np.ones(3 * count),
            "roots": nodes[::3].astype(np.int32),
        },
        0.0,
        1,
        1,
    )


@pytest.mark.parametrize("hostile", [chained(60), stumps(8000), stumps(60000), stumps(500000, leaves_only=True)])
def test_a_forest_made_to_fill_the_memory_is_walked(hostile: Forest) -> None:
    """Each of these would take gigabytes as masks."""
    tracemalloc.start()
    try:
        assert hostile.masks is None
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
