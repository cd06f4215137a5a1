"""The records that a selection is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tilewise.kernels.paged_mqa_logits.spec import Config, Shape

Source = Literal["exact", "model", "nearest", "prior", "default"]
RegimeName = Literal["inside", "extrapolated"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to launch for one shape, and why."""

    config: Config
    predicted_us: float | None  # of the chosen config; None where nothing is known
    margin: float | None  # runner-up's time over the chosen one's, less 1; below 0 where a default was kept in a tie
    runner_up: Config | None
    source: Source  # the rung of the ladder that answered
    regime: RegimeName  # inside what was measured, or beyond it
    reason: str  # one plain sentence
    model_id: str | None  # of the bundle in force; None where there is none

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "config": self.config.to_dict(),
            "predicted_us": self.predicted_us,
            "margin": self.margin,
            "runner_up": None if self.runner_up is None else self.runner_up.to_dict(),
            "source": self.source,
            "regime": self.regime,
            "reason": self.reason,
            "model_id": self.model_id,
        }


@dataclass(frozen=True, slots=True)
class Ranked:
    """One config on offer and its time; source says where the time is from, None where there is none."""

    config: Config
    predicted_us: float | None
    source: Source | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"config": self.config.to_dict(), "predicted_us": self.predicted_us, "source": self.source}


@dataclass(frozen=True, slots=True)
class Rejected:
    """One config that was not chosen, and why."""

    config: Config
    reason: str
    predicted_us: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"config": self.config.to_dict(), "reason": self.reason, "predicted_us": self.predicted_us}


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A measured shape near the one asked for: its best config and that one's measured time."""

    shape: Shape
    distance: float  # doublings, summed over the sizes
    config: Config
    latency_us: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "shape": self.shape.to_dict(),
            "distance": self.distance,
            "config": self.config.to_dict(),
            "latency_us": self.latency_us,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with everything that it was weighed against."""

    arch: str
    shape: Shape
    decision: Decision
    rejected: tuple[Rejected, ...]  # valid ones by time, then those that may not launch
    nearest: tuple[Neighbour, ...]
    features: dict[str, float]  # of the chosen config; empty without a bundle
    floor_us: float  # no launch is much faster than this

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "arch": self.arch,
            "shape": self.shape.to_dict(),
            "decision": self.decision.to_dict(),
            "rejected": [one.to_dict() for one in self.rejected],
            "nearest": [one.to_dict() for one in self.nearest],
            "features": dict(self.features),
            "floor_us": self.floor_us,
        }
