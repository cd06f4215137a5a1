"""From predicted or measured times to one config: the rule that selector, training and evaluation share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.kernels.paged_mqa_logits.spec import Config

TIE = 1e-6  # times closer than this ratio are equal, on every machine
# Predicted times closer than this ratio, less 1, are a tie: a model trained on the next profile may say the opposite,
# and the ratio is less than half of the noise (docs/log.md).
PREDICTED_TIE = 0.004


def first_best(configs: Sequence[Config], times: npt.NDArray[np.float64], skip: int | None = None) -> int | None:
    """Index of the least time, the first config in order among equals; None where nothing is left. NaN never wins."""
    ticks = _ticks(times)
    if skip is not None:
        ticks[skip] = np.inf
    return _first(configs, ticks)


def _ticks(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Times on a logarithmic scale of steps of TIE; +inf where there is none."""
    ticks = np.log(times)
    ticks /= TIE
    np.rint(ticks, out=ticks)
    ticks[ticks != ticks] = np.inf
    return ticks


def _first(configs: Sequence[Config], ticks: npt.NDArray[np.float64]) -> int | None:
    least = ticks.min(initial=np.inf)
    if least == np.inf:
        return None
    tied: list[int] = (ticks == least).nonzero()[0].tolist()
    return tied[0] if len(tied) == 1 else min(tied, key=lambda at: configs[at])


def choose(
    configs: Sequence[Config], times: npt.NDArray[np.float64], default: int | None, margin: float, tie: float = 0.0
) -> tuple[int, int | None]:
    """The chosen index and the runner-up's: the default keeps its place unless something beats it by the margin.

    Of those within `tie` of the best, a ratio less 1, the first by `_order` is chosen; none is slower than the default.
    Raises ValueError where no config has a time.
    """
    ticks = _ticks(times)
    best = _first(configs, ticks)
    if best is None:
        raise ValueError("no config has a time")
    if default is not None and times[default] <= times[best] * (1.0 + margin):
        best = default
    elif tie:
        tied = times <= times[best] * (1.0 + tie)
        if default is not None and not np.isnan(times[default]):
            tied &= times < times[default]
        near: list[int] = np.flatnonzero(tied).tolist()
        if len(near) > 1:
            best = min(near, key=lambda at: _order(configs[at]))
    ticks[best] = np.inf
    return best, _first(configs, ticks)


def _order(config: Config) -> tuple[Any, ...]:
    """Of equals, the one that holds up best where contexts differ from those it was timed for: K is read least often,
    and the work is balanced."""
    return (
        -config.fuse_n, config.schedule != "balanced", config.kernel == "portable", -config.dot_n, -config.consumers,
        config.token_split, config.split_kv, config,
    )  # fmt: skip
