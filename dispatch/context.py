"""Context lengths that one launch has to serve, as under a captured graph: an exact one, a range, or a histogram."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilewise.errors import InvalidContextError
from tilewise.kernels.paged_mqa_logits.spec import MAX_CONTEXT_LEN

MOST_LENGTHS = 64  # of a histogram; more are merged into this many, each by its longest
PER_DOUBLING = 2  # lengths that stand for a doubling of a range


@dataclass(frozen=True, slots=True)
class Context:
    """Longest context of a launch, in tokens, as a distribution over launches.

    `lengths` ascend and are distinct, `weights` are shares that sum to 1. Make one with `exact`, `range`, `histogram`
    or `of`, which check what they are given and raise InvalidContextError.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def exact(cls, length: int) -> Context:
        """One length."""
        return cls((_length(length),), (1.0,))

    @classmethod
    def range(cls, low: int, high: int) -> Context:
        """Low to high, each doubling as likely as the next: two lengths stand for each, and both ends."""
        low, high = _length(low), _length(high)
        if not 1 <= low <= high:
            raise InvalidContextError(
                f"a range of contexts must be (low, high) with 1 <= low <= high, got {low}, {high}"
            )
        steps = max(1, math.ceil(PER_DOUBLING * math.log2(high / low) - 1e-9))
        lengths = sorted({round(low * (high / low) ** (step / steps)) for step in range(steps + 1)})
        return cls(tuple(lengths), (1.0 / len(lengths),) * len(lengths))

    @classmethod
    def histogram(cls, counts: Mapping[int, float]) -> Context:
        """Lengths, each with the share or count of launches. Those of no weight are left out."""
        if not isinstance(counts, Mapping):
            raise InvalidContextError(f"a histogram of contexts must map lengths to weights, got {counts!r:.200}")
        weights: dict[int, float] = {}
        for length, weight in counts.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e18:
                raise InvalidContextError(f"the weight of context {length!r:.50} must be 0 or more, got {weight!r:.50}")
            if weight > 0:
                weights[_length(length)] = weights.get(_length(length), 0.0) + float(weight)
        if not weights:
            raise InvalidContextError("a histogram of contexts needs a length with a weight above 0, got none")
        lengths = sorted(weights)
        if len(lengths) > MOST_LENGTHS:
            weights, lengths = _merged(weights, lengths)
        total = math.fsum(weights.values())
        return cls(tuple(lengths), tuple(weights[length] / total for length in lengths))

    @classmethod
    def of(cls, value: ContextLike) -> Context:
        """From a length, a pair (low, high), a mapping of lengths to weights, or a Context."""
        if isinstance(value, Context):
            return value
        if isinstance(value, Mapping):
            return cls.histogram(value)
        if isinstance(value, list | tuple):
            if len(value) != 2:
                raise InvalidContextError(f"a range of contexts must be (low, high), got {value!r:.200}")
            return cls.range(*value)
        return cls.exact(value)

    @property
    def longest(self) -> int:
        """The longest length."""
        return self.lengths[-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them."""
        return {"lengths": list(self.lengths), "weights": list(self.weights)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Context:
        """What `to_dict` wrote."""
        try:
            return cls.histogram(dict(zip(values["lengths"], values["weights"], strict=True)))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidContextError(f"a context must have lengths and as many weights: {error}") from error

    def __str__(self) -> str:
        if len(self.lengths) == 1:
            return f"context {self.lengths[0]}"
        return f"{len(self.lengths)} contexts from {self.lengths[0]} to {self.lengths[-1]}"


ContextLike: TypeAlias = Context | int | tuple[int, int] | list[int] | Mapping[int, float]


def check_worst_case(value: Any) -> None:
    """InvalidContextError for a bound that is none: time at a context, over that of the best config there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1.0 <= value < math.inf:
        raise InvalidContextError(f"worst_case must be a number of at least 1, got {value!r:.50}")


def _length(value: Any) -> int:
    try:
        length = operator.index(value)
    except TypeError:
        length = -1
    if isinstance(value, bool) or not 0 <= length <= MAX_CONTEXT_LEN:
        raise InvalidContextError(f"a context length must be an int from 0 to {MAX_CONTEXT_LEN}, got {value!r:.50}")
    return length


def _merged(weights: dict[int, float], lengths: list[int]) -> tuple[dict[int, float], list[int]]:
    """At most MOST_LENGTHS lengths: each stands for those of about the same logarithm, and is the longest of them."""
    low, high = math.log2(lengths[0] + 1), math.log2(lengths[-1] + 1)
    merged: dict[int, float] = {}
    longest: dict[int, int] = {}
    for length in lengths:  # ascending, so that the last of a bin is its longest
        place = min(MOST_LENGTHS - 1, int((math.log2(length + 1) - low) / (high - low) * MOST_LENGTHS))
        merged[place] = merged.get(place, 0.0) + weights[length]
        longest[place] = length
    found = {longest[place]: weight for place, weight in merged.items()}
    return found, sorted(found)
