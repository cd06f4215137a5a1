"""Where the model was trained, and how much was lost where a measured config was carried beyond that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.errors import InvalidBundleError
from tilewise.kernels.paged_mqa_logits.spec import Shape

# A group is the sizes that a kernel is compiled for; between groups nothing is interpolated.
GROUP = ("heads", "head_dim", "block_kv", "cache_layout")
RANGES = ("batch_size", "next_n", "max_context_len", "raggedness")
# A size that kernels are compiled for, too, but which a model may interpolate: its values are kept beside its range.
VALUES = "next_n"

# A transfer may replace the default only if the worst one measured lost no more than this.
WORST_TRANSFER = 1.10
FEWEST_TRANSFERS = 5


@dataclass(frozen=True, slots=True)
class Outside:
    """One way in which a shape lies outside of what was trained on."""

    dimension: str
    side: str  # "low", "high", or "unmeasured" where nothing in between was measured either
    reach: float  # how far beyond, in doublings
    text: str


@dataclass(frozen=True)
class Regime:
    """The measured groups with their ranges, and the measured losses of transfers beyond a range."""

    groups: Mapping[tuple[Any, ...], Mapping[str, tuple[float, float]]]
    transfers: Mapping[str, Mapping[str, Any]]  # "batch_size high" and so on
    values: Mapping[tuple[Any, ...], tuple[int, ...]]  # of next_n, that were measured in each group

    def outside(self, shape: Shape) -> list[Outside]:
        """How the shape leaves the trained regime; empty where it is inside."""
        group = tuple(getattr(shape, name) for name in GROUP)
        ranges = self.groups.get(group)
        if ranges is None:
            return [self._unmeasured(group)]
        found = []
        for name in RANGES:
            low, high = ranges[name]
            value = range_value(shape, name)
            if value < low or value > high:
                edge = low if value < low else high
                side = "low" if value < low else "high"
                reach = abs(math.log2(max(value, 1e-9) / max(edge, 1e-9)))
                found.append(Outside(name, side, reach, _outside_text(name, value, low, high)))
        return found

    def beyond(self, shape: Shape, outside: Sequence[Outside] | None = None) -> dict[str, float]:
        """The sizes by which the shape leaves what was measured, and how far, in doublings; empty where it is inside.

        Beside `outside`, a next_n within the range that was not measured counts.
        """
        found = {one.dimension: one.reach for one in (self.outside(shape) if outside is None else outside)}
        group = tuple(getattr(shape, name) for name in GROUP)
        if group in self.groups:
            known = self.values[group]
            if shape.next_n not in known:
                found[VALUES] = min(abs(math.log2(shape.next_n / value)) for value in known)
        else:  # nothing was measured in its group: its other sizes are held against those of all groups
            for name in RANGES:
                low = min(ranges[name][0] for ranges in self.groups.values())
                high = max(ranges[name][1] for ranges in self.groups.values())
                value = range_value(shape, name)
                if not low <= value <= high:
                    edge = low if value < low else high
                    found[name] = abs(math.log2(max(value, 1e-9) / max(edge, 1e-9)))
        return found

    def _unmeasured(self, group: tuple[Any, ...]) -> Outside:
        for at, name in enumerate(GROUP):
            measured = sorted({known[at] for known in self.groups})
            if group[at] not in measured:
                words = ", ".join(map(str, measured))
                reach = math.inf
                if name != "cache_layout":
                    reach = min(abs(math.log2(group[at] / value)) for value in measured)
                return Outside(name, "unmeasured", reach, f"{name} {group[at]} was not measured, only {words}")
        sizes = ", ".join(f"{name} {value}" for name, value in zip(GROUP, group, strict=True))
        return Outside("group", "unmeasured", math.inf, f"no shape with {sizes} was measured")

    def transfer_allowed(self, outside: Sequence[Outside]) -> tuple[bool, str]:
        """Whether the loss of a transfer this far is bounded by measurement, and the clause that says so."""
        worst = 1.0
        for one in outside:
            known = self.transfers.get(f"{one.dimension} {one.side}")
            if known is None or known["shapes"] < FEWEST_TRANSFERS or one.reach > known["reach"] + 1e-9:
                return False, "it was not tried how the measured configs do"
            if known["worst"] > WORST_TRANSFER:
                return False, f"a measured config took up to {known['worst']:.2f}x the best time when that was tried"
            if known["geomean"] > known["default_geomean"]:
                return False, (
                    f"a measured config took {known['geomean']:.3f}x the best time on average when that "
                    f"was tried, the default {known['default_geomean']:.3f}x"
                )
            worst = max(worst, known["worst"])
        return True, f"a measured config took at most {worst:.2f}x the best time when that was tried"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        groups = [
            {
                **dict(zip(GROUP, group, strict=True)),
                **{name: list(ranges[name]) for name in RANGES},
                f"{VALUES}_values": list(self.values[group]),
            }
            for group, ranges in sorted(self.groups.items())
        ]
        return {"groups": groups, "transfers": {key: dict(value) for key, value in sorted(self.transfers.items())}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Regime:
        """What `to_dict` wrote; InvalidBundleError otherwise."""
        groups, known_values = {}, {}
        for group in values["groups"]:
            ranges = {}
            for name in RANGES:
                low, high = group[name]
                if not all(type(edge) in (int, float) and math.isfinite(edge) for edge in (low, high)):
                    raise InvalidBundleError(f"regime {name} must be two finite numbers, got {group[name]!r}")
                ranges[name] = (low, high)
            key = tuple(group[name] for name in GROUP)
            groups[key] = ranges
            known = group[f"{VALUES}_values"]
            if not known or not all(type(value) is int and value > 0 for value in known):
                raise InvalidBundleError(f"regime {VALUES}_values must be whole numbers above 0, got {known!r}")
            known_values[key] = tuple(known)
        transfers: dict[str, dict[str, Any]] = {}
        for key, known in values["transfers"].items():
            for name in ("shapes", "reach", "worst", "geomean", "default_geomean"):
                if type(known[name]) not in (int, float) or not math.isfinite(known[name]):
                    raise InvalidBundleError(f"transfer {key} needs a finite {name}, got {known[name]!r}")
            transfers[str(key)] = dict(known)
        return cls(groups, transfers, known_values)

    @classmethod
    def of(cls, shapes: Sequence[Shape], transfers: Mapping[str, Mapping[str, Any]]) -> Regime:
        """The regime that some measured shapes span."""
        groups: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
        values: dict[tuple[Any, ...], set[int]] = {}
        for shape in shapes:
            key = tuple(getattr(shape, name) for name in GROUP)
            values.setdefault(key, set()).add(shape.next_n)
            ranges = groups.setdefault(key, {})
            for name in RANGES:
                value = range_value(shape, name)
                low, high = ranges.get(name, (value, value))
                ranges[name] = (min(low, value), max(high, value))
        return cls(groups, transfers, {key: tuple(sorted(found)) for key, found in values.items()})


def range_value(shape: Shape, name: str) -> float:
    """A size that a range is kept of; raggedness is the longest over the mean context."""
    if name == "raggedness":
        return round(shape.max_context_len / max(1, shape.mean_context_len or 0), 6)
    return float(getattr(shape, name))


def _outside_text(name: str, value: float, low: float, high: float) -> str:
    label = "longest over mean context" if name == "raggedness" else name
    for digits in (1, 6):  # the few digits that tell the value from the range
        given, least, most = (_plain(number, digits) for number in (value, low, high))
        if given not in (least, most):
            break
    if least == most:
        return f"{label} {given} was not measured, only {least}"
    return f"{label} {given} is outside the measured {least} to {most}"


def _plain(number: float, digits: int) -> str:
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".")
