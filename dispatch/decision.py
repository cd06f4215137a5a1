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
    chosen_us: float | None  # what was measured there for the chosen config (with no more splits than tiles)
    default_us: float | None  # and for the default config of that shape

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "shape": self.shape.to_dict(),
            "distance": self.distance,
            "config": self.config.to_dict(),
            "latency_us": self.latency_us,
            "chosen_us": self.chosen_us,
            "default_us": self.default_us,
        }


@dataclass(frozen=True, slots=True)
class Moved:
    """A group of features, and by how much it makes the chosen config's predicted time differ from another's."""

    group: str
    factor: float  # above 1, it makes the chosen one slower
    features: tuple[str, ...]  # those that differ

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"group": self.group, "factor": self.factor, "features": list(self.features)}


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
    moved: tuple[Moved, ...]  # what makes the chosen config's predicted time differ, see dispatch/attribution.py
    moved_against: Config | None  # from that of this one: the default, or the runner-up where the default was chosen

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
            "moved": [one.to_dict() for one in self.moved],
            "moved_against": None if self.moved_against is None else self.moved_against.to_dict(),
        }
