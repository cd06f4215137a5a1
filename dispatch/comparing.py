"""Two selectors side by side: which picks change, what that is expected to bring, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewise.data.traffic import Traffic
from tilewise.dispatch.ladder import Assessment
from tilewise.dispatch.selector import Selector
from tilewise.errors import UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape
from tilewise.models.bundle import Bundle


@dataclass(frozen=True, slots=True)
class Change:
    """A shape whose pick changes. Ratios are time of the new pick over that of the old one: below 1 is a gain."""

    shape: Shape
    count: float  # launches that it stands for
    old: Config
    new: Config
    old_source: str
    new_source: str
    expected_ratio: float | None  # as the new model has it; None where it has no time for one of the two
    measured_ratio: float | None  # where one of the two tables has both configs at this shape
    reason: str  # of the new pick

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "shape": self.shape.to_dict(),
            "count": self.count,
            "old": self.old.to_dict(),
            "new": self.new.to_dict(),
            "old_source": self.old_source,
            "new_source": self.new_source,
            "expected_ratio": self.expected_ratio,
            "measured_ratio": self.measured_ratio,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the new selector changes. Totals are sums over launches, so that traffic weighs them."""

    op: str
    arch: str
    old_model_id: str | None
    new_model_id: str | None
    shapes: int
    launches: float
    changes: tuple[Change, ...]  # the largest expected effect on the total first
    changed_launches: float  # share of all launches whose pick changes
    expected_time_ratio: float | None  # new over old, over all launches for which both have a time
    measured_time_ratio: float | None  # over the launches for which both picks were measured
    measured_launches: float  # share of all launches that the last figure covers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "op": self.op,
            "arch": self.arch,
            "old_model_id": self.old_model_id,
            "new_model_id": self.new_model_id,
            "shapes": self.shapes,
            "launches": self.launches,
            "changed_shapes": len(self.changes),
            "changed_launches": self.changed_launches,
            "expected_time_ratio": self.expected_time_ratio,
            "measured_time_ratio": self.measured_time_ratio,
            "measured_launches": self.measured_launches,
            "changes": [change.to_dict() for change in self.changes],
        }


def compare(old: Selector, new: Selector, traffic: Iterable[Traffic]) -> Comparison:
    """Weigh every shape with both. Neither selector remembers or counts it.

    Raises UnsupportedError where they are not for the same op and GPU, InvalidConfigError for a shape that no kernel
    serves.
    """
    if (old.op, old.arch.name) != (new.op, new.arch.name):
        raise UnsupportedError(
            f"two models must be for the same op and GPU, got {old.op} on {old.arch.name}, {new.op} on {new.arch.name}"
        )
    changes: list[tuple[float, Change]] = []
    shapes, launches, changed, measured_launches = 0, 0.0, 0.0, 0.0
    expected, measured = [0.0, 0.0], [0.0, 0.0]  # old, new
    for one in traffic:
        shapes += 1
        launches += one.count
        before, after = old.weigh(one.shape), new.weigh(one.shape)
        picks = before.configs[before.chosen], after.configs[after.chosen]
        predicted = _times(after, picks)
        known = _measured(new.bundle, old.bundle, one.shape, picks)
        for total, times in ((expected, predicted), (measured, known)):
            if times is not None:
                total[0] += one.count * times[0]
                total[1] += one.count * times[1]
        measured_launches += one.count if known is not None else 0.0
        if picks[0] == picks[1]:
            continue
        changed += one.count
        effect = 0.0 if predicted is None else one.count * (predicted[1] - predicted[0])
        change = Change(
            one.shape, one.count, *picks, before.source, after.source, _ratio(predicted), _ratio(known),
            after.decision().reason,
        )  # fmt: skip
        changes.append((effect, change))
    changes.sort(key=lambda item: (-abs(item[0]), item[1].shape.batch_size, str(item[1].shape)))
    return Comparison(
        new.op,
        new.arch.name,
        old.model_id,
        new.model_id,
        shapes,
        launches,
        tuple(change for _, change in changes),
        changed / launches if launches else 0.0,
        _ratio((expected[0], expected[1]) if expected[0] else None),
        _ratio((measured[0], measured[1]) if measured[0] else None),
        measured_launches / launches if launches else 0.0,
    )


def _times(found: Assessment, picks: tuple[Config, Config]) -> tuple[float, float] | None:
    """Times of both picks as one assessment has them."""
    place = {config: at for at, config in enumerate(found.configs)}
    times = [found.time_of(place[config]) if config in place else None for config in picks]
    return None if times[0] is None or times[1] is None else (times[0], times[1])


def _measured(
    new: Bundle | None, old: Bundle | None, shape: Shape, picks: tuple[Config, Config]
) -> tuple[float, float] | None:
    """Measured times of both picks at this shape, out of one table: the new one's if it has them."""
    for bundle in (new, old):
        index = None if bundle is None else bundle.exact.find(shape)
        if bundle is not None and index is not None:
            times: Mapping[Config, float] = bundle.exact.times(index)
            both = [times.get(config, float("nan")) for config in picks]
            if both[0] == both[0] and both[1] == both[1]:
                return both[0], both[1]
    return None


def _ratio(times: tuple[float, float] | None) -> float | None:
    return None if times is None else round(times[1] / times[0], 6)
