"""Which launches to time next, so that few timings teach the model most.

The first ones fill the space: shapes far from each other, each with its default and a few configs drawn at random.
From then on an ensemble of small models, each fitted to other shapes, ranks all launches that are left, of all shapes
together: those whose predicted time is nearest to the best of their shape come first, since only configs near the best
can change a pick. The default of a shape comes with its first launch. A share is drawn at random, so that what the
model wrongly takes for slow is found out.
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
from tilewise.models.columns import shape_columns
from tilewise.models.features import features_of, shape_features
from tilewise.models.fit import Examples, examples, fit_rank
from tilewise.models.forest import Forest
from tilewise.models.measurements import Measurements

Floats = npt.NDArray[np.float64]
Offer = Callable[[Shape], Sequence[Config]]

MEMBERS = 4
# A leaf of few examples, since there are few timings at first.
MEMBER_PARAMETERS: dict[str, Any] = {"max_iter": 80, "learning_rate": 0.2, "min_samples_leaf": 10}
CONFIGS_PER_SHAPE = 4  # at first, while the space is filled
DRAWN = 0.25  # share of later launches that is drawn at random
FEWEST_SHAPES = 8  # timed ones, below which the space is filled


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch worth timing."""

    shape: Shape
    config: Config
    reason: str  # default, spread, near or drawn
    value: float  # what the members think that their joint pick loses at this shape, a ratio less 1; 0 where unknown


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
    if not shapes:
        return []
    if measured is None or len(tried) < FEWEST_SHAPES:
        return _fill(shapes, offered, tried, arch, budget, rng)
    ensemble = _ensemble(measured, arch, rng)
    scored: list[tuple[float, Launch]] = []
    for shape in shapes:
        scored += _of_shape(shape, offered[shape], tried.get(shape, set()), arch, ensemble)
    # Every shape has one with nothing ahead of it: among such, where the members disagree most.
    ranked = [launch for _, launch in sorted(scored, key=lambda pair: (pair[0], -pair[1].value))]
    near = budget - round(DRAWN * budget)
    rest = ranked[near:]
    drawn = [rest[at] for at in rng.permutation(len(rest))[: budget - near].tolist()]
    return ranked[:near] + [dataclasses.replace(launch, reason="drawn") for launch in drawn]


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


def _ensemble(measured: Measurements, arch: Arch, rng: np.random.Generator) -> list[Forest]:
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
    shape: Shape, configs: list[Config], tried: set[Config], arch: Arch, ensemble: Sequence[Forest]
) -> list[tuple[float, Launch]]:
    """The launches of one shape that were not timed, each with its predicted log time over the best of the shape."""
    rows = features_of(shape, configs, arch)
    ratio = np.stack([unsquash(member.predict(rows)) for member in ensemble])  # [members, configs]
    ratio -= ratio.min(axis=1, keepdims=True)
    mean = ratio.mean(axis=0)
    value = float(np.expm1(ratio[:, int(mean.argmin())].mean()))
    score = mean - mean.min()
    fresh = [at for at, config in enumerate(configs) if config not in tried]
    default = default_config(shape, arch)
    found = []
    # Gains are counted against the default: it goes with the first launch of the shape, before it.
    if default in configs and default not in tried:
        at = configs.index(default)
        fresh.remove(at)
        found.append((float(score[[at, *fresh]].min()), Launch(shape, default, "default", value)))
    return found + [(float(score[at]), Launch(shape, configs[at], "near", value)) for at in fresh]


def with_cells(measured: Measurements, keep: npt.NDArray[np.bool_]) -> Measurements:
    """The same with some of the cells."""
    cells = ("shape_id", "config_id", "latency_us", "first_us", "second_us")
    return dataclasses.replace(measured, **{name: getattr(measured, name)[keep] for name in cells})
