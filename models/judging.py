"""What a pick is held against: the shapes that can be judged, the noise of their times, and the figures of regret.

Judged are the shapes of which every config on offer was tried in two passes. The first pass names each shape's best
config; all times that are compared come from the second, which is independent of that choice. So the least of many
noisy timings neither flatters nor blames (and no pick is credited for beating the named best). Where two configs were
duelled, replayed in turn in one pass of one run, the ratio of their times is that of their duels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, default_config
from tilewise.models.choice import first_best
from tilewise.models.measurements import Measurements

Floats = npt.NDArray[np.float64]
Offer = Callable[[Shape], Sequence[Config]]

FEWEST_PAIRS = 20  # cells timed twice, below which there is no estimate of the noise
NOISE_WITHOUT_PAIRS = 0.01


@dataclass(frozen=True)
class Judged:
    """One shape of the judging set."""

    shape_id: int
    shape: Shape
    cells: npt.NDArray[np.int64]  # the measured cell of each config on offer
    configs: list[Config]
    second_us: Floats  # NaN where a config failed
    reference_us: float  # second-pass time of the config that the first pass calls best
    default: int  # index of the default config
    best: int  # index of the config that the first pass calls best
    duels: tuple[Mapping[int, float], ...] = ()  # microseconds of each index, one mapping a run

    def ratio(self, at: int, other: int, duels: bool = True) -> tuple[float, bool]:
        """How many times as long one config takes as another, and whether duels say so; NaN where one has no time.

        Of several duels it is the geometric mean. Without one, or without `duels`, it is that of the second pass.
        """
        found = [math.log(run[at] / run[other]) for run in self.duels if at in run and other in run] if duels else []
        if found and at != other:
            return math.exp(sum(found) / len(found)), True
        return float(self.second_us[at] / self.second_us[other]), False


def judging_set(measured: Measurements, arch: Arch, offer: Offer | None = None) -> list[Judged]:
    """The shapes of which every config on offer was tried in both passes."""
    place = {config: at for at, config in enumerate(measured.configs)}
    found = []
    for shape_id, shape in enumerate(measured.shapes):
        cells = measured.cells(shape_id)
        tried = {int(config): cells.start + at for at, config in enumerate(measured.config_id[cells])}
        configs = list(offer(shape) if offer else candidates(shape, arch))
        default = default_config(shape, arch)
        at = [tried.get(place.get(config, -1)) for config in configs]
        if not at or None in at or default not in configs:
            continue
        own = np.array(at, dtype=np.int64)
        first, second = measured.first_us[own], measured.second_us[own]
        failed = np.isnan(measured.latency_us[own])
        if failed.all() or (np.isnan(first) | np.isnan(second))[~failed].any():
            continue
        best = first_best(configs, first)
        assert best is not None  # not all failed
        index = {place[config]: n for n, config in enumerate(configs)}
        duels = tuple(
            {index[config]: us for config, us in run.items() if config in index}
            for run in measured.duels.get(shape_id, ())
        )
        reference_us = float(second[best])
        found.append(Judged(shape_id, shape, own, configs, second, reference_us, configs.index(default), best, duels))
    return found


def assign_folds(shapes: Sequence[Shape], folds: int, seed: int) -> npt.NDArray[np.int64]:
    """[shapes] fold numbers. Shapes that differ by less than about a half in their contexts only share one."""
    groups: dict[tuple[Any, ...], int] = {}
    group = [
        groups.setdefault(
            (
                *(getattr(shape, name) for name in ("heads", "next_n", "batch_size", "head_dim", "cache_layout")),
                round(np.log2(max(1, shape.max_context_len))),
            ),
            len(groups),
        )
        for shape in shapes
    ]
    order = np.random.default_rng(seed).permutation(len(groups)) % folds
    return np.asarray(order[group], dtype=np.int64)


def noise_of(measured: Measurements) -> dict[str, Any]:
    """The A/A noise: how far two passes over the same launch, each the median of its replays, lie apart.

    `pairs` cells were timed in both passes; the rest are quantiles of their ratio less 1, and `drift`, by how much the
    typical pair of a shape moved together (clocks), which no choice within a shape depends on.
    """
    gap = np.log(measured.second_us / measured.first_us)
    known = ~np.isnan(gap)
    gap, shape_id = gap[known], measured.shape_id[known]
    if not len(gap):
        return {"pairs": 0}
    moved = np.array([np.median(gap[shape_id == at]) for at in np.unique(shape_id)])
    size = np.expm1(np.abs(gap))
    return {
        "pairs": len(gap),
        **{f"p{at}": round(float(np.quantile(size, at / 100)), 6) for at in (50, 90, 99)},
        "drift": round(float(np.expm1(np.median(np.abs(moved)))), 6),
    }


def noise_margin(measured: Measurements) -> float:
    """The ratio less 1 within which two passes of one cell agree nine times in ten; 0.01 where too few were timed
    twice to tell."""
    noise = noise_of(measured)
    if noise["pairs"] < FEWEST_PAIRS:
        return NOISE_WITHOUT_PAIRS
    return float(np.clip(noise["p90"], 0.001, 0.03))


def typical_noise(measured: Measurements) -> float:
    """The ratio less 1 within which two passes of one cell agree half of the time; the noise margin where too few were
    timed twice to tell."""
    noise = noise_of(measured)
    margin = noise_margin(measured)
    return margin if noise["pairs"] < FEWEST_PAIRS else float(np.clip(noise["p50"], 0.001, margin))


def figures(judged: Sequence[Judged], picks: Mapping[int, int | None], *, duels: bool = True) -> dict[str, Any]:
    """Regret of some picks. One without a time counts as a failure, at the time of the shape's slowest config.

    Without `duels`, all of it by the second pass.
    """
    regret, failures, strict, against = [], 0, [], []
    for one in judged:
        at = picks[one.shape_id]
        if at is None or np.isnan(one.second_us[at]):
            failures += 1
            at = int(np.nanargmax(one.second_us))
        regret.append(max(1.0, one.ratio(at, one.best, duels)[0]))
        strict.append(one.second_us[at] / np.nanmin(one.second_us))
        against.append(one.ratio(at, one.default, duels)[0])
    ratio = np.array(regret)
    return {
        "geomean_regret": geomean(ratio),
        "p90_regret": float(np.quantile(ratio, 0.9)),
        "worst_regret": float(ratio.max()),
        "within_2pct": float((ratio <= 1.02).mean()),
        "within_5pct": float((ratio <= 1.05).mean()),
        "failures": failures,
        # Time of the pick over the default's: below 1 is a gain. A default that failed is beaten by any time.
        "geomean_against_default": geomean(np.nan_to_num(np.array(against), nan=1.0)),
        "worst_against_default": float(np.nan_to_num(np.array(against), nan=1.0).max()),
        # Against the least time of the second pass itself, which blames noise on the pick.
        "geomean_against_minimum": geomean(np.array(strict)),
    }


def geomean(ratio: Floats) -> float:
    """The geometric mean."""
    return float(np.exp(np.log(ratio).mean()))
