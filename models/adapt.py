"""A model for a GPU that nobody has profiled: from other GPUs' timings, or from an analytic estimate and a few timings.

The features are counted in each GPU's own facts (features.py), so that what was learnt on one says something about
another. Where there is no other GPU either, `Estimate` starts from bytes, products and steps alone, and `adapt` fits
its constants to about thirty timings, each pulled towards what it was taken to be before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidProfileError, UnsupportedError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.models.bundle import unsquash
from tilewise.models.choice import choose
from tilewise.models.features import FEATURES, features_of
from tilewise.models.fit import Examples, examples, fit_rank
from tilewise.models.judging import Judged, figures, judging_set, noise_margin
from tilewise.models.measurements import Measurements

Floats = npt.NDArray[np.float64]

# The prior of the estimate: what each constant is taken to be before any timing, as a natural logarithm, and how far
# off that may be. Rough by intent: the rates are the GPU's own, and a few timings set the rest.
PRIOR: dict[str, tuple[float, float]] = {
    "launch_us": (math.log(2.5), 0.4),  # of the smallest launch
    "bandwidth_share": (math.log(0.85), 0.2),
    "product_share": (math.log(0.5), 0.4),  # of the product rate, where a program has WIDE columns to work on
    "product_share_roles": (0.0, 0.4),  # added for kernels whose warps have roles
    "narrow": (-0.4, 0.3),  # added for each halving of the columns below WIDE
    "heads_as_rows": (-0.5, 0.5),  # added where the rows of the products are heads
    "step_us": (math.log(0.15), 0.5),  # of one product after another
    "step_us_roles": (0.0, 0.5),
    "wave_us": (math.log(0.5), 0.7),  # of a wave of programs that follows another
}
WIDE = 7.0  # log2 of columns
SPREAD = 0.1  # of log times about the estimate with the right constants
_NAMES = (
    "log2_read_us", "log2_product_us", "log2_unit_tiles", "idle_columns", "log2_own_columns", "log2_columns", "mma_m",
    "log2_steps", "log2_waves", "consumers",
)  # fmt: skip
_AT = {name: FEATURES.index(name) for name in _NAMES}


@dataclass(frozen=True)
class Estimate:
    """An analytic estimate of launch times on one GPU: predicted, not measured, until constants are fitted."""

    arch: Arch
    constants: Floats  # [PRIOR], natural logarithms

    @classmethod
    def prior(cls, arch: Arch) -> Estimate:
        """With the constants of PRIOR."""
        return cls(arch, np.array([mean for mean, _ in PRIOR.values()]))

    def predict_us(self, shape: Shape, configs: Sequence[Config]) -> Floats:
        """[configs] microseconds."""
        return _estimate_us(features_of(shape, configs, self.arch), self.constants)


def _estimate_us(rows: Floats, constants: Floats) -> Floats:
    of = dict(zip(PRIOR, constants, strict=True))
    column = {name: rows[:, at] for name, at in _AT.items()}
    roles = column["consumers"] > 0
    own = np.where(roles, column["log2_own_columns"], column["log2_columns"])
    share = of["product_share"] + roles * of["product_share_roles"] + of["narrow"] * np.maximum(WIDE - own, 0.0)
    share = share + of["heads_as_rows"] * (column["mma_m"] == 1.0)
    read = np.exp2(column["log2_read_us"]) / np.exp(of["bandwidth_share"])
    work = np.exp2(column["log2_product_us"] + column["log2_unit_tiles"]) * (1.0 + column["idle_columns"])
    busy = (read**4 + (work / np.exp(share)) ** 4) ** 0.25  # the larger of the two, rounded off
    serial = np.exp2(column["log2_steps"]) * np.exp(of["step_us"] + roles * of["step_us_roles"])
    waves = np.maximum(np.exp2(column["log2_waves"]) - 1.0, 0.0) * np.exp(of["wave_us"])
    return np.asarray(np.exp(of["launch_us"]) + np.maximum(busy, serial) + waves)


def adapt(timings: Sequence[tuple[Shape, Config, float]], arch: Arch) -> Estimate:
    """The estimate whose constants are the most probable ones given timings (microseconds) and PRIOR.

    Raises UnsupportedError without SciPy, which comes with scikit-learn.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise UnsupportedError("adapting needs SciPy: pip install -e '.[train]'") from error
    rows = np.vstack([features_of(shape, [config], arch) for shape, config, _ in timings])
    logs = np.log([us for _, _, us in timings])
    mean, deviation = np.array(list(PRIOR.values())).T

    def residual(constants: Floats) -> Floats:
        off = (np.log(_estimate_us(rows, constants)) - logs) / SPREAD
        return np.concatenate([off, (constants - mean) / deviation])

    return Estimate(arch, np.asarray(least_squares(residual, mean, loss="soft_l1").x))


def leave_one_gpu_out(tables: Mapping[Arch, Measurements], seed: int = 0) -> dict[str, Any]:
    """Regret on each GPU of a model that was trained on the others, by the GPU's name.

    Raises InvalidProfileError where there are fewer than two GPUs.
    """
    if len(tables) < 2:
        names = ", ".join(arch.name for arch in tables) or "none"
        raise InvalidProfileError(f"leaving one GPU out needs timings of at least two, got {names}")
    data = {arch: examples(measured, arch) for arch, measured in tables.items()}
    found = {}
    for left, measured in tables.items():
        others = [one for arch, one in data.items() if arch is not left]
        rank = fit_rank(joined(others), slice(None), seed)
        judged = judging_set(measured, left)
        margin = noise_margin(measured)
        picks: dict[int, int | None] = {}
        for one in judged:
            ratio = np.exp(unsquash(rank.predict(features_of(one.shape, one.configs, left))))
            picks[one.shape_id] = choose(one.configs, ratio, one.default, margin)[0]
        found[left.name] = {"judged_shapes": len(judged), **(figures(judged, picks) if judged else {})}
    return found


def joined(parts: Sequence[Examples]) -> Examples:
    """The rows of several GPUs in one table. Cells and shapes are then those of the parts, one after the other."""
    table = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Examples.__annotations__}
    before = np.cumsum([0, *(len(part.shape_rows) for part in parts)])
    table["shape"] = np.concatenate([part.shape + first for part, first in zip(parts, before, strict=False)])
    return Examples(**table)


def picks_by(judged: Sequence[Judged], times: Mapping[int, Floats], margin: float) -> dict[int, int | None]:
    """The choice for each judged shape by some predicted times."""
    return {one.shape_id: choose(one.configs, times[one.shape_id], one.default, margin)[0] for one in judged}
