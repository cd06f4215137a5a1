"""From predicted or measured times to one config: the rule that selector, training and evaluation share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tilewise.kernels.paged_mqa_logits.spec import Config

TIE = 1e-6  # times closer than this ratio are equal, on every machine


def first_best(configs: Sequence[Config], times: npt.NDArray[np.float64], skip: int | None = None) -> int | None:
    """Index of the least time, the first config in order among equals; None where nothing is left. NaN never wins."""
    logs = np.round(np.log(times) / TIE)
    logs[np.isnan(logs)] = np.inf
    if skip is not None:
        logs[skip] = np.inf
    least = logs.min(initial=np.inf)
    if least == np.inf:
        return None
    tied: list[int] = np.flatnonzero(logs == least).tolist()
    return tied[0] if len(tied) == 1 else min(tied, key=lambda at: configs[at])


def choose(
    configs: Sequence[Config], times: npt.NDArray[np.float64], default: int | None, margin: float
) -> tuple[int, int | None]:
    """The chosen index and the runner-up's: the default keeps its place unless something beats it by the margin.

    Raises ValueError where no config has a time.
    """
    best = first_best(configs, times)
    if best is None:
        raise ValueError("no config has a time")
    if default is not None and times[default] <= times[best] * (1.0 + margin):
        best = default
    return best, first_best(configs, times, skip=best)
