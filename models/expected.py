"""One config for several contexts: the least expected time, under a bound on the worst case."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import (
    SPACES,
    Config,
    Shape,
    Verdicts,
    candidates,
    cdiv,
    default_config,
    space,
)
from tilewise.models.choice import choose, first_best

Floats = npt.NDArray[np.float64]

WORST_CASE = 1.3  # at no context may the pick take longer than this many times the best config there


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    """The choice over several contexts."""

    chosen: int
    runner_up: int | None
    bounded: bool  # whether the chosen one stays within the bound at every context
    expected_us: Floats  # [configs], NaN where a time is not known at some context
    worst_case: Floats  # [configs], the largest ratio to the best config of a context


def choose_expected(
    configs: Sequence[Config],
    times: Floats,
    weights: Sequence[float],
    default: int | None,
    margin: float,
    worst_case: float = WORST_CASE,
) -> ExpectedChoice:
    """Choose by `times` [contexts, configs], microseconds, and the weights of the contexts.

    Among the configs within the bound, the least expected time wins, unless the default is among them and as good
    within the margin; equals keep their fixed order. Where no config is within the bound, the one with the smallest
    worst case is taken. Raises ValueError where no config has a time at every context.
    """
    expected = (np.asarray(weights)[:, None] * times).sum(axis=0)
    known = ~np.isnan(expected)
    if not known.any():
        raise ValueError("no config has a time at every context")
    worst = (times / np.nanmin(times, axis=1, keepdims=True)).max(axis=0)
    within = known & (worst <= worst_case * (1.0 + 1e-9))
    if within.any():
        kept = default if default is not None and within[default] else None
        chosen, runner_up = choose(configs, np.where(within, expected, np.nan), kept, margin)
        return ExpectedChoice(chosen, runner_up, True, expected, worst)
    least = first_best(configs, worst)
    assert least is not None  # some config is known
    return ExpectedChoice(least, first_best(configs, worst, skip=least), False, expected, worst)


def configs_over(shapes: Sequence[Shape], arch: Arch, verdicts: Verdicts | None = None) -> list[Config]:
    """The configs on offer at every one of these shapes (as they run there), the default of the last one first.

    Only those: how a config does at a context where it is not on offer is neither measured nor learnt, and what is not
    worth offering at some context seldom keeps a bound on the worst case.
    """
    offered = [dict.fromkeys(candidates(shape, arch, verdicts)) for shape in shapes]
    found = {default_config(shapes[-1], arch): None}
    for config in dict.fromkeys(config for own in reversed(offered) for config in own):
        if all(as_run(config, shape) in own for shape, own in zip(shapes, offered, strict=True)):
            found[config] = None
    return list(found)


def as_run(config: Config, shape: Shape) -> Config:
    """The config that does the same work at this shape: no more splits than there are tiles of context.

    One config serves every context of a graph. Where a context has fewer tiles than splits, the other programs end at
    once; what is offered and measured for such a shape is the config without them. And what its kernel offers there in
    place of a config for longer contexts stands for it (`Space.as_offered`).
    """
    if config.kernel in SPACES:  # a bundle may name kernels that are not installed
        config = space(config.kernel).as_offered(shape, config)
    tiles = max(1, cdiv(shape.max_context_len, config.tile_kv))
    if config.split_kv <= tiles:
        return config
    return _with_split(config, tiles)


@functools.lru_cache(maxsize=16384)
def _with_split(config: Config, split_kv: int) -> Config:
    return dataclasses.replace(config, split_kv=split_kv)
