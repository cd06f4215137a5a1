"""Which launches to time next, so that few timings teach the model most.

The first ones fill the space: shapes far from each other, each with its default and a few configs drawn at random.
From then on an ensemble of small models, each fitted to other shapes, says where timings are worth most: at shapes for
which the members would pick different configs, by how much their predictions say that matters. Of such a shape its
default, the members' picks and the best of what they rank next are timed, since times of hopeless configs teach little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, default_config
from tilewise.models.bundle import unsquash
from tilewise.models.features import config_columns, config_features, shape_columns, shape_features
from tilewise.models.fit import Examples, examples, fit_rank
from tilewise.models.measurements import Measurements

Floats = npt.NDArray[np.float64]
Offer = Callable[[Shape], Sequence[Config]]

MEMBERS = 4
MEMBER_PARAMETERS: dict[str, Any] = {"max_iter": 80, "learning_rate": 0.2}
CONFIGS_PER_SHAPE = 8
DRAWN = 2  # of them drawn at random
FEWEST_SHAPES = 8  # timed ones, below which the space is filled


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch worth timing."""

    shape: Shape
    config: Config
    reason: str  # default, spread, disagreement, ranked or drawn
    value: float  # expected loss of the present pick by the members' disagreement, a ratio less 1; 0 where unknown


def next_launches(
    measured: Measurements | None,
    pool: Sequence[Shape],
    arch: Arch,
    budget: int,
    *,
    seed: int = 0,
    offer: Offer | None = None,
) -> list[Launch]:
    """At most `budget` launches that are not among the timed ones, the most valuable first; the same for the same
    arguments. `offer` gives the configs on offer for a shape; left out, it is the op's own `candidates`."""
    rng = np.random.default_rng(seed)
    offered = {shape: list(offer(shape) if offer else candidates(shape, arch)) for shape in dict.fromkeys(pool)}
    if not offered:
        raise InvalidProfileError("the pool of shapes to time must not be empty")
    tried = _tried(measured)
    shapes = [shape for shape in offered if any(c not in tried.get(shape, ()) for c in offered[shape])]
    if measured is None or len(tried) < FEWEST_SHAPES:
        return _fill(shapes, offered, tried, arch, budget, rng)
    ensemble = _ensemble(measured, arch, rng)
    found: list[list[Launch]] = []
    for shape in shapes:
        found.append(_of_shape(shape, offered[shape], tried.get(shape, set()), arch, ensemble, rng))
    # A shape's value falls with every timing that it has already: the rest of its configs can gain less.
    worth = [
        one[0].value / (1.0 + len(tried.get(shape, ()))) if one else 0.0
        for shape, one in zip(shapes, found, strict=True)
    ]
    order = sorted(range(len(shapes)), key=lambda at: (-worth[at], at))
    return [launch for at in order for launch in found[at]][:budget]


def _tried(measured: Measurements | None) -> dict[Shape, set[Config]]:
    tried: dict[Shape, set[Config]] = {}
    if measured is not None:
        for shape_id, config_id in zip(measured.shape_id.tolist(), measured.config_id.tolist(), strict=True):
            tried.setdefault(measured.shapes[shape_id], set()).add(measured.configs[config_id])
    return tried


def _fill(
    shapes: Sequence[Shape],
    offered: Mapping[Shape, list[Config]],
    tried: Mapping[Shape, set[Config]],
    arch: Arch,
    budget: int,
    rng: np.random.Generator,
) -> list[Launch]:
    """Shapes in the order of farthest point first, each with its default and configs drawn at random."""
    rows = np.stack([shape_features(shape_columns(shape), arch) for shape in offered])
    place = (rows - rows.mean(axis=0)) / np.maximum(rows.std(axis=0), 1e-9)
    at_of = {shape: at for at, shape in enumerate(offered)}
    distance = np.full(len(rows), np.inf)
    for shape in offered:
        if shape in tried:
            distance = np.minimum(distance, ((place - place[at_of[shape]]) ** 2).sum(axis=1))
    found: list[Launch] = []
    left = {at_of[shape] for shape in shapes}
    names = list(offered)
    while left and len(found) < budget:
        at = max(sorted(left), key=lambda one: distance[one])
        left.discard(at)
        distance = np.minimum(distance, ((place - place[at]) ** 2).sum(axis=1))
        shape = names[at]
        fresh = [config for config in offered[shape] if config not in tried.get(shape, ())]
        default = default_config(shape, arch)
        drawn = [fresh[i] for i in rng.permutation(len(fresh)).tolist() if fresh[i] != default]
        found += [Launch(shape, default, "default", 0.0)] if default in fresh else []
        found += [Launch(shape, config, "spread", 0.0) for config in drawn[: CONFIGS_PER_SHAPE - 1]]
    return found[:budget]


def _ensemble(measured: Measurements, arch: Arch, rng: np.random.Generator) -> list[Any]:
    """Small rank models, each without another share of the shapes."""
    data: Examples = examples(measured, arch)
    timed = np.unique(measured.shape_id[data.cell])
    part = rng.permutation(len(timed)) % MEMBERS
    members = []
    for number in range(MEMBERS):
        rows = np.flatnonzero(np.isin(measured.shape_id[data.cell], timed[part != number]))
        members.append(fit_rank(data, rows, number, MEMBER_PARAMETERS))
    return members


def _of_shape(
    shape: Shape,
    configs: list[Config],
    tried: set[Config],
    arch: Arch,
    ensemble: Sequence[Any],
    rng: np.random.Generator,
) -> list[Launch]:
    """The launches of one shape worth timing, each with the shape's value."""
    numbers = shape_columns(shape)
    own = config_features(numbers, config_columns(configs), arch)
    rows = np.hstack([np.tile(shape_features(numbers, arch), (len(configs), 1)), own])
    ratio = np.stack([unsquash(member.predict(rows)) for member in ensemble])  # [members, configs]
    ratio -= ratio.min(axis=1, keepdims=True)
    mean = ratio.mean(axis=0)
    pick = int(mean.argmin())
    value = float(np.expm1(ratio[:, pick].mean()))  # what the members think that their joint pick loses
    default = default_config(shape, arch)
    fresh = [at for at, config in enumerate(configs) if config not in tried]
    wanted: dict[int, str] = {}

    def want(reason: str, order: Sequence[int], most: int) -> None:
        for at in order:
            if len(wanted) < most and configs[at] not in tried:
                wanted.setdefault(at, reason)

    want("default", [configs.index(default)] if default in configs else [], CONFIGS_PER_SHAPE)
    want("disagreement", ratio.argmin(axis=1).tolist(), CONFIGS_PER_SHAPE)
    want("ranked", np.argsort(mean, kind="stable").tolist(), CONFIGS_PER_SHAPE - DRAWN)
    want("drawn", [fresh[at] for at in rng.permutation(len(fresh)).tolist()], CONFIGS_PER_SHAPE)
    return [Launch(shape, configs[at], why, value) for at, why in wanted.items()]


def with_cells(measured: Measurements, keep: npt.NDArray[np.bool_]) -> Measurements:
    """The same with some of the cells."""
    cells = ("shape_id", "config_id", "latency_us", "first_us", "second_us")
    return dataclasses.replace(measured, **{name: getattr(measured, name)[keep] for name in cells})
