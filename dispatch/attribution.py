"""What moved a prediction: why one config is predicted faster or slower than another.

The two differ in their features, which fall into a few groups. Each share is a Shapley value in the logarithm of
the predicted time: the change when the group's features go from the other config's to this one's, averaged over all
orders in which the groups can be changed. The shares add up to the whole difference. They say what the model looked at;
most of the mixtures that they are taken over could not be launched.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from tilewise.dispatch.decision import Moved
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.models.bundle import Bundle, unsquash
from tilewise.models.features import FEATURES, SHAPE_FEATURES

# Every feature of a config is in one group; those that are in none make a group of their own.
GROUPS: dict[str, tuple[str, ...]] = {
    "kernel": ("kernel", "mma_m", "mfma", "epilogue", "program_order", "schedule"),
    "fusion": ("fuse_n", "dot_n", "groups", "idle_tokens", "dots", "log2_columns", "idle_columns", "log2_requested_us"),
    "tile": (
        "tile_kv", "num_warps", "num_stages", "waves_per_eu", "consumers", "token_split", "ctas_per_sm", "resident",
        "log2_registers", "log2_weight_registers", "log2_shared_memory", "tile_fill", "own_dots", "log2_own_columns",
    ),
    "splits": (
        "split_kv", "log2_programs_per_unit", "log2_waves", "tail_fill", "log2_tiles_per_program", "idle_splits",
        "log2_program_tokens", "log2_unit_tiles", "log2_bytes_in_flight", "log2_steps",
        "log2_segments",
    ),
    "estimate": ("log2_estimate",),
}  # fmt: skip
OTHER = "other"


def grouped_features() -> dict[str, list[int]]:
    """Columns of a config's features, by group."""
    of = {name: group for group, names in GROUPS.items() for name in names}
    columns: dict[str, list[int]] = {}
    for at, name in enumerate(FEATURES):
        if name not in SHAPE_FEATURES:
            columns.setdefault(of.get(name, OTHER), []).append(at)
    return columns


def what_moved(bundle: Bundle, shape: Shape, config: Config, other: Config) -> tuple[Moved, ...]:
    """How much each group makes `config` slower (above 1) or faster than `other`, the largest first.

    The product of the factors is the ratio of the predicted times.
    """
    own, theirs = bundle.features(shape, [config, other])
    groups = {
        name: columns
        for name, columns in grouped_features().items()
        if not np.array_equal(own[columns], theirs[columns])
    }
    names = list(groups)
    subsets = [some for size in range(len(names) + 1) for some in itertools.combinations(names, size)]
    rows = np.tile(theirs, (len(subsets), 1))
    for row, some in zip(rows, subsets, strict=True):
        for name in some:
            row[groups[name]] = own[groups[name]]
    logs = unsquash(bundle.rank.predict(rows), bundle.manifest["rank"]["squash"])
    log_of = {frozenset(some): float(value) for some, value in zip(subsets, logs, strict=True)}
    moved = []
    for name in names:
        share = 0.0
        for some in subsets:
            if name not in some:
                weight = math.factorial(len(some)) * math.factorial(len(names) - len(some) - 1)
                share += weight * (log_of[frozenset((*some, name))] - log_of[frozenset(some)])
        changed = tuple(FEATURES[at] for at in groups[name] if own[at] != theirs[at])
        moved.append(Moved(name, math.exp(share / math.factorial(len(names))), changed))
    return tuple(sorted(moved, key=lambda one: (-abs(math.log(one.factor)), one.group)))
