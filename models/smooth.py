"""A smooth function of a shape's features, as plain arrays: the mean of a Gaussian process, evaluated with numpy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidBundleError

Floats = npt.NDArray[np.float64]
# Array name: dtype and dimensions, as stored.
ARRAYS: dict[str, tuple[str, int]] = {
    "points": ("<f8", 2),  # [points, features], standardised
    "weights": ("<f8", 1),  # [points]
    "center": ("<f8", 1),  # [features], what is taken off a feature
    "scale": ("<f8", 1),  # [features], what it is then divided by
}


@dataclass(frozen=True)
class Smooth:
    """offset + sum over points of weight * (1 + r) * exp(-r), r = sqrt(3) |x - point| / length, x standardised.

    The kernel is the Matern one of order 3/2, for a function with one derivative: times have kinks where a wave of
    programs fills up.
    """

    points: Floats
    weights: Floats
    center: Floats
    scale: Floats
    offset: float
    length: float

    def predict(self, rows: Floats) -> Floats:
        """[n] values for [n, features] rows."""
        x = (rows - self.center) / self.scale
        # |x - p|^2 as |x|^2 - 2 x p + |p|^2: one product of matrices in place of three passes over all points.
        square = np.maximum((x * x).sum(axis=1)[:, None] - 2.0 * (x @ self._columns) + self._squares, 0.0)
        r = np.sqrt(square, out=square)
        r *= -np.sqrt(3.0) / self.length
        decay = np.exp(r)
        np.subtract(1.0, r, out=r)
        r *= decay
        values: Floats = self.offset + r @ self.weights
        return values

    @functools.cached_property
    def _columns(self) -> Floats:
        """[features, points]"""
        return np.ascontiguousarray(self.points.T)

    @functools.cached_property
    def _squares(self) -> Floats:
        """[points], of their distances from the origin."""
        return np.asarray((self.points**2).sum(axis=1))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name, as stored."""
        return {name: getattr(self, name) for name in ARRAYS}

    def header(self) -> dict[str, float]:
        """What the manifest says beside the arrays."""
        return {"offset": self.offset, "length": self.length}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], header: Mapping[str, Any], features: int) -> Smooth:
        """A function from stored arrays; InvalidBundleError where they don't fit each other or aren't finite."""
        points, weights, center, scale = (arrays[name] for name in ARRAYS)
        offset, length = header["offset"], header["length"]
        fits = (
            points.shape == (len(weights), features)
            and len(center) == len(scale) == features
            and all(bool(np.isfinite(array).all()) for array in (points, weights, center, scale))
            and bool((scale > 0).all())
            and type(offset) is type(length) is float
            and bool(np.isfinite(offset))
            and 0.0 < length < np.inf
        )
        if not fits:
            raise InvalidBundleError("the level's arrays do not fit each other")
        return cls(points, weights, center, scale, offset, length)


def export(scaler: Any, process: Any) -> Smooth:
    """A fitted StandardScaler and the GaussianProcessRegressor behind it (constant times Matern 3/2, plus white noise).

    Weights are rounded to six digits, which moves no prediction by a thousandth: a linear solver's last bits differ
    from machine to machine.
    """
    signal, _ = process.kernel_.k1, process.kernel_.k2  # the noise is part of the weights
    deviation = float(np.ravel(process._y_train_std)[0])
    weights = np.ravel(process.alpha_) * (deviation * signal.k1.constant_value)
    return Smooth(
        np.round(process.X_train_, 9),
        np.array([float(f"{weight:.6g}") for weight in weights]),
        np.round(scaler.mean_, 9),
        np.round(scaler.scale_, 9),
        round(float(np.ravel(process._y_train_mean)[0]), 9),
        float(signal.k2.length_scale),
    )
