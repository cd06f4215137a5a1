"""A model for a GPU that nobody has profiled: from other GPUs' timings, or from an analytic estimate and a few timings.

The features are counted in each GPU's own facts (features.py), so that what was learnt on one says something about
another. Where there is no other GPU either, `estimate_us` starts from bytes, products and steps alone, and `adapt`
corrects it by about thirty timings: a ridge regression of what the estimate leaves over, on a few features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.models.bundle import unsquash
from tilewise.models.choice import choose
from tilewise.models.features import (
    FEATURES,
    config_columns,
    config_features,
    floors_us,
    shape_columns,
    shape_features,
)
from tilewise.models.fit import Examples, examples, fit_rank
from tilewise.models.judging import Judged, figures, judging_set, noise_margin
from tilewise.models.measurements import Measurements

Floats = npt.NDArray[np.float64]

RIDGE = 1.0  # weight of the prior against one timing, on standardised features
# What a wrong estimate hangs on: how full the GPU is, how wide products are, what is idle, what is held.
CORRECTED = (
    "log2_read_us", "log2_product_us", "log2_programs_per_unit", "log2_waves", "log2_tiles_per_program", "log2_columns",
    "log2_own_columns", "idle_columns", "log2_unit_tiles", "log2_registers", "log2_requested_us", "log2_steps", "mma_m",
)  # fmt: skip
_AT = [FEATURES.index(name) for name in CORRECTED]
_ESTIMATE = FEATURES.index("log2_estimate")


def rows_of(shape: Shape, configs: Sequence[Config], arch: Arch) -> Floats:
    """[configs, FEATURES]"""
    numbers = shape_columns(shape)
    own = config_features(numbers, config_columns(configs), arch)
    return np.hstack([np.tile(shape_features(numbers, arch), (len(configs), 1)), own])


def estimate_us(shape: Shape, configs: Sequence[Config], arch: Arch) -> Floats:
    """[configs] microseconds by the analytic estimate: predicted from the GPU's published or measured rates alone."""
    floor = float(floors_us(shape_columns(shape), arch))
    return np.asarray(floor * np.exp2(rows_of(shape, configs, arch)[:, _ESTIMATE]))


@dataclass(frozen=True)
class Adapted:
    """The estimate with its correction."""

    arch: Arch
    center: Floats  # [CORRECTED]
    scale: Floats
    weights: Floats
    offset: float

    def predict_us(self, shape: Shape, configs: Sequence[Config]) -> Floats:
        """[configs] microseconds."""
        x = (rows_of(shape, configs, self.arch)[:, _AT] - self.center) / self.scale
        return np.asarray(estimate_us(shape, configs, self.arch) * np.exp(x @ self.weights + self.offset))


def adapt(timings: Sequence[tuple[Shape, Config, float]], pool: Sequence[Shape], arch: Arch, offer: Any) -> Adapted:
    """The estimate corrected by timings (microseconds). `pool` and `offer`, the configs of a shape, say how features
    spread; no time of theirs is needed."""
    spread = np.vstack([rows_of(shape, offer(shape), arch)[:, _AT] for shape in pool])
    center, scale = spread.mean(axis=0), np.maximum(spread.std(axis=0), 1e-6)
    x = np.vstack([rows_of(shape, [config], arch)[:, _AT] for shape, config, _ in timings])
    x = (x - center) / scale
    over = np.array([np.log(us / estimate_us(shape, [config], arch)[0]) for shape, config, us in timings])
    offset = float(over.mean())
    inner = x - x.mean(axis=0)
    weights = np.linalg.solve(inner.T @ inner + RIDGE * np.eye(len(_AT)), inner.T @ (over - offset))
    return Adapted(arch, center, scale, weights, offset - float(x.mean(axis=0) @ weights))


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
            ratio = np.exp(unsquash(rank.predict(rows_of(one.shape, one.configs, left))))
            picks[one.shape_id] = choose(one.configs, ratio, one.default, margin)[0]
        found[left.name] = {"judged_shapes": len(judged), **(figures(judged, picks) if judged else {})}
    return found


def joined(parts: Sequence[Examples]) -> Examples:
    """The rows of several GPUs in one table. Cells and shapes are then those of the parts, one after the other."""
    return Examples(*(np.concatenate([getattr(part, name) for part in parts]) for name in Examples.__annotations__))


def picks_by(judged: Sequence[Judged], times: Mapping[int, Floats], margin: float) -> dict[int, int | None]:
    """The choice for each judged shape by some predicted times."""
    return {one.shape_id: choose(one.configs, times[one.shape_id], one.default, margin)[0] for one in judged}
