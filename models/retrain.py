"""One turn of the loop: train on all rows there are, judge, hold the result against the gate, and put it in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.data.traffic import Traffic
from tilewise.errors import InvalidBundleError
from tilewise.models import registry
from tilewise.models.bundle import Bundle
from tilewise.models.evaluate import DEFAULT_FOLDS
from tilewise.models.gate import Gate, gate
from tilewise.models.holdout import Progress
from tilewise.models.latency import train


@dataclass(frozen=True)
class Retrained:
    """What a turn gave."""

    candidate: Bundle
    replaces: Bundle | None  # what was in force
    gate: Gate
    path: Path  # where the candidate is stored
    promoted: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model_id": self.candidate.model_id,
            "digest": self.candidate.digest,
            "replaces": None if self.replaces is None else self.replaces.model_id,
            "rows": self.candidate.manifest["data"]["rows"],
            "dropped": self.candidate.manifest["data"]["dropped"],
            "gate": self.gate.to_dict(),
            "path": str(self.path),
            "promoted": self.promoted,
        }


def retrain(
    columns: Mapping[str, Sequence[Any]],
    *,
    op: str,
    arch: str,
    home: registry.Home = None,
    seed: int = 0,
    folds: int = DEFAULT_FOLDS,
    traffic: Sequence[Traffic] | None = None,
    promote: bool = True,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Retrained:
    """Train on the columns of a profile, hold the result against the model in force, and promote it if it passes.

    The candidate is stored in any case, so that it can be promoted by hand. `promote=False` leaves it at that.
    Raises InvalidProfileError where no row is usable, UnsupportedError without scikit-learn.
    """
    candidate = train(columns, op=op, arch=arch, seed=seed, folds=folds, traffic=traffic, jobs=jobs, progress=progress)
    replaces: Bundle | None
    try:
        replaces = registry.load_version(registry.current(op, arch, home), op, arch)
    except InvalidBundleError:  # none, or one that cannot be used: anything whole is better
        replaces = None
    verdict = gate(candidate, replaces)
    same = replaces is not None and replaces.digest == candidate.digest
    if verdict.passed and promote and not same:
        return Retrained(candidate, replaces, verdict, registry.publish(candidate, home), True)
    return Retrained(candidate, replaces, verdict, registry.store(candidate, home), False)
