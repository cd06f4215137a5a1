"""The one place where a job asks the models what a candidate is worth. Nothing is decided here that they decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilewise.errors import InvalidProfileError
from tilewise.kernels.arch import get_arch
from tilewise.models import latency
from tilewise.models.bundle import Bundle
from tilewise.models.evaluate import evaluate

Progress = Callable[[str, int, int], None]  # what, done, of how many
FIGURES = ("geomean_regret", "p90_regret", "worst_regret")


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate may go on, and why."""

    passed: bool
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def train(columns: Any, *, op: str, arch: str, seed: int, progress: Progress) -> Bundle:
    """A candidate without figures."""
    return latency.train(columns, op=op, arch=arch, seed=seed, folds=0, progress=progress)


def with_figures(candidate: Bundle, columns: Any, *, seed: int, folds: int, progress: Progress) -> Bundle:
    """The candidate with its held-out figures, the same bundle as training with that many folds gives."""
    try:
        metrics = evaluate(
            columns, op=candidate.op, arch=candidate.arch.name, seed=seed, folds=folds, progress=progress
        )
    except InvalidProfileError as error:  # too little was timed twice to judge: that is said, not hidden
        metrics = {"none": str(error)}
    manifest = {**candidate.manifest, "metrics": metrics}
    return Bundle.create(manifest, candidate.rank, candidate.level, candidate.exact, get_arch(candidate.arch.name))


def gate(candidate: Bundle, current: Bundle | None) -> Verdict:
    """Whether the candidate's held-out figures are no worse than those of the model in force, noise apart."""
    new = {name: candidate.manifest["metrics"].get(name) for name in FIGURES}
    if current is None:
        return Verdict(True, "there is no model to compare with", {"candidate": new})
    old = {name: current.manifest["metrics"].get(name) for name in FIGURES}
    figures = {"candidate": new, "current": old}
    if None in new.values() or None in old.values():
        return Verdict(True, "one of the two has no held-out figures: nothing speaks against the candidate", figures)
    margin = max(candidate.noise_margin, current.noise_margin)
    for name in FIGURES:
        if new[name] > old[name] * (1.0 + margin):
            why = f"{name} is {new[name]:.4f}, that of the model in force {old[name]:.4f}: more than noise above it"
            return Verdict(False, why, figures)
    return Verdict(True, "no held-out figure is more than noise above that of the model in force", figures)


def judge_shadow(picks: list[dict[str, Any]], noise_margin: float) -> Verdict:
    """Whether the candidate's picks on live requests speak against it.

    `picks` has one entry a shape: how many requests asked for it, and the two decisions. A pick is slower where both
    times are measured or predicted by the same model, the candidate, which has seen all rows.
    """
    requests = sum(one["requests"] for one in picks)
    changed = [one for one in picks if one["current"]["config"] != one["candidate"]["config"]]
    failed = [one for one in picks if one["candidate"].get("error")]
    weighted = [(one["requests"], one["candidate"]["of_current_us"], one["candidate"]["predicted_us"]) for one in picks]
    known = [(count, old, new) for count, old, new in weighted if old and new]
    figures = {
        "requests": requests,
        "shapes": len(picks),
        "changed_shapes": len(changed),
        "changed_requests": sum(one["requests"] for one in changed),
        "expected_time_ratio": (
            round(sum(n * new for n, _, new in known) / sum(n * old for n, old, _ in known), 6) if known else None
        ),
    }
    if failed:
        return Verdict(
            False, f"the candidate failed on {len(failed)} shapes: {failed[0]['candidate']['error']}", figures
        )
    ratio = figures["expected_time_ratio"]
    if ratio is not None and ratio > 1.0 + noise_margin:
        return Verdict(False, f"its picks take {ratio:.4f} of the time of the present ones on this traffic", figures)
    return Verdict(True, f"{figures['changed_requests']} of {requests} requests get another config", figures)
