"""The one place where a job asks the models what a candidate is worth. Nothing is decided here that they decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewise.data.traffic import Traffic
from tilewise.models import latency
from tilewise.models.bundle import Bundle
from tilewise.models.gate import Gate, gate
from tilewise.models.measurements import measurements

__all__ = ["Gate", "gate", "judge_shadow", "train", "with_figures"]

Progress = Callable[[str, int, int], None]  # what, done, of how many


def train(columns: Any, *, op: str, arch: str, seed: int, traffic: Sequence[Traffic], progress: Progress) -> Bundle:
    """A candidate without figures. Shapes count by the traffic, where any is known."""
    return latency.train(columns, op=op, arch=arch, seed=seed, folds=0, traffic=traffic or None, progress=progress)


def with_figures(candidate: Bundle, columns: Any, *, seed: int, folds: int, progress: Progress) -> Bundle:
    """The candidate with its held-out figures and the gain that its picks are asked for."""
    measured = measurements(columns, op=candidate.op, arch=candidate.arch.name)
    return latency.judged(candidate, measured, seed=seed, folds=folds, progress=progress)


def judge_shadow(picks: list[dict[str, Any]], noise_margin: float) -> Gate:
    """Whether the candidate's picks on live requests speak against it.

    `picks` has one entry a shape: how many requests asked for it, and the two decisions. Both picks' times are taken
    as the candidate has them: it has seen all rows.
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
        why = f"the candidate failed on {len(failed)} shapes: {failed[0]['candidate']['error']}"
        return Gate(False, why, figures)
    ratio = figures["expected_time_ratio"]
    if ratio is not None and ratio > 1.0 + noise_margin:
        return Gate(False, f"its picks take {ratio:.4f} of the time of the present ones on this traffic", figures)
    return Gate(True, f"{figures['changed_requests']} of {requests} requests get another config", figures)
