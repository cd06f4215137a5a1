"""How large a predicted gain over the default has to be before the pick replaces the default.

A model that has not seen a shape predicts that some config is faster than the default by so much; measured, it is
faster by another amount, or slower. From many such trials follows the least predicted gain above which hardly any pick
was slower than the default by more than noise: that is the gain that is asked for. Trials are held out as the shapes
to come will be: in folds, for shapes like the measured ones; and a size at a time (`AXES`), for shapes beyond them.
The bound is that of conformal risk control (Angelopoulos et al., 2022) for the risk "slower than the default by more
than noise".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewise.errors import InvalidBundleError

INSIDE = "inside"
# Sizes that were held out at training. Beyond others, nothing is known of predicted gains.
AXES = ("batch_size", "next_n", "max_context_len", "heads")
# Of all shapes, at most the rest may get a pick that is slower than the default by more than noise. Predicted gains are
# small where they are uncertain, and mostly right in sign: more confidence costs more than it saves (docs/log.md).
CONFIDENCE = 0.97
# Beyond what was measured errors have no bound, and one size held out stands for all ways of being beyond it.
BEYOND_CONFIDENCE = 0.997
# Of next_n the features say more, so that a few losses among the trials may be allowed (docs/log.md).
CONFIDENCE_BEYOND = {"next_n": 0.995}
FEWEST_TRIALS = 20
STEP = 1e-4  # gains are rounded up to this, so that they are the same on every machine


@dataclass(frozen=True, slots=True)
class Trial:
    """One shape that the model had not seen."""

    shape_id: int
    predicted: float  # log of the default's predicted time over the pick's
    real: float  # the same, measured
    reach: float = 0.0  # doublings from its held-out size to the nearest that was left


@dataclass(frozen=True, slots=True)
class Needed:
    """The gain that is asked for, and the trials that say so."""

    gain: float | None  # ratio less 1; None where there were too few trials to tell
    shapes: int
    losses: int  # of them, picks slower than the default by more than noise at this gain
    reach: float  # farthest that was tried, doublings


@dataclass(frozen=True)
class Guard:
    """The gain asked for inside of what was measured, and beyond it by the size that is beyond."""

    confidence: float
    needed: Mapping[str, Needed]

    def margin(self, beyond: Mapping[str, float], noise: float) -> tuple[float | None, str]:
        """The gain over the default that is asked for, a ratio less 1, and the clause that says why.

        `beyond` has, for each size that leaves what was measured, by how many doublings. None: no gain is sure there.
        """
        inside = self.needed.get(INSIDE)
        gain = noise if inside is None or inside.gain is None else inside.gain
        if not beyond:
            return gain, f"a predicted gain of {100 * gain:.1f} % is asked for, which {self._share()} of picks keep"
        if len(beyond) > 1:
            return None, f"predictions beyond {' and '.join(sorted(beyond))} together were not tried"
        ((axis, reach),) = beyond.items()
        known = self.needed.get(axis)
        if known is None or known.gain is None:
            return None, f"too little was measured to try predictions beyond {axis}"
        if reach > known.reach + 1e-9:
            return None, f"predictions that far beyond {axis} were not tried"
        gain = max(gain, known.gain)
        return gain, f"a predicted gain of {100 * gain:.1f} % is asked for beyond {axis}"

    def _share(self) -> str:
        return f"{100 * self.confidence:.0f} in 100"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {"confidence": self.confidence, "needed": {name: asdict(one) for name, one in self.needed.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Guard:
        """What `to_dict` wrote; InvalidBundleError otherwise."""
        confidence = values["confidence"]
        if type(confidence) is not float or not 0.0 < confidence < 1.0:
            raise InvalidBundleError(f"guard confidence must be a float between 0 and 1, got {confidence!r}")
        needed = {}
        for name, one in values["needed"].items():
            gain, reach, counts = one["gain"], one["reach"], (one["shapes"], one["losses"])
            if gain is not None and (type(gain) is not float or not 0.0 <= gain < math.inf):
                raise InvalidBundleError(f"guard gain of {name} must be null or a float of at least 0, got {gain!r}")
            if type(reach) is not float or not 0.0 <= reach < math.inf or any(type(n) is not int for n in counts):
                raise InvalidBundleError(f"guard trials of {name} must be numbers, got {one!r}")
            needed[str(name)] = Needed(gain, *counts, reach)
        return cls(confidence, needed)


def beyond_confidence(axis: str) -> float:
    """The confidence of the gain asked for beyond a size."""
    return CONFIDENCE_BEYOND.get(axis, BEYOND_CONFIDENCE)


def needed_gain(trials: Sequence[Trial], noise: float, least: float, confidence: float = CONFIDENCE) -> Needed:
    """The least gain at which the picks of these trials are slower than the default, by more than noise, rarely enough.

    Rarely enough: were a new shape one of n + 1 like these, in any order, at most 1 - confidence of them, counting the
    new one as a loss. With fewer shapes than that can be told of, none may be a loss. It is at least `least`.
    """
    reach = round(max((trial.reach for trial in trials), default=0.0), 6)
    if len(trials) < FEWEST_TRIALS:
        return Needed(None, len(trials), 0, reach)
    tolerance = math.log1p(noise)
    allowed = max(0, math.floor((1.0 - confidence) * (len(trials) + 1)) - 1)
    lost = sorted((trial.predicted for trial in trials if trial.real < -tolerance), reverse=True)
    gain = math.ceil(math.expm1(lost[allowed]) / STEP + 1e-6) * STEP if len(lost) > allowed else 0.0
    gain = max(least, gain)
    losses = sum(at > math.log1p(gain) for at in lost)
    return Needed(round(gain, 6), len(trials), losses, reach)
