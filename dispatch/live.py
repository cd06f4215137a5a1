"""Which shapes a process asks for, how often, and which of them fell back.

A launch whose shape is known takes one step of an `itertools.count`, which is atomic and takes no lock. Everything else
happens when a shape is first weighed, or when the counts are written.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilewise.dispatch.context import Context
from tilewise.kernels.paged_mqa_logits.spec import Shape

SEEN_LIMIT = 65536  # shapes counted apart; the calls of all further ones are counted together

Tick = Callable[[], int]
Asked = Shape | tuple[Shape, Context]


@dataclass(slots=True)
class Seen:
    """One shape that was asked for. `source` and `fallbacks` are of the latest time it was weighed."""

    source: str
    fallbacks: tuple[str, ...]
    counter: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def count(self) -> int:
        """Times that it was asked for."""
        digits = re.search(r"\d+", repr(self.counter))  # the only way to read one that takes no step
        return int(digits.group()) if digits else 0


class LiveShapes:
    """Counts of one selector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Asked, Seen] = {}
        self._others = Seen("", ())

    def renew_lock(self) -> None:
        """For a forked child, where the thread that held the lock is not."""
        self._lock = threading.Lock()

    def add(self, asked: Asked, source: str, fallbacks: tuple[str, ...]) -> Tick:
        """What a call for this shape has to do to be counted. For a shape that was just weighed; takes a lock."""
        with self._lock:
            seen = self._seen.get(asked)
            if seen is None:
                if len(self._seen) >= SEEN_LIMIT:
                    return self._others.counter.__next__
                seen = self._seen[asked] = Seen(source, fallbacks)
            seen.source, seen.fallbacks = source, fallbacks
            return seen.counter.__next__

    @property
    def overflow(self) -> int:
        """Calls for shapes beyond SEEN_LIMIT."""
        return self._others.count

    def rows(self) -> list[dict[str, Any]]:
        """One row a shape, the most asked for first; plain values."""
        with self._lock:
            seen = list(self._seen.items())
        rows = []
        for asked, one in seen:
            shape, context = asked if isinstance(asked, tuple) else (asked, None)
            row: dict[str, Any] = {**shape.to_dict(), "count": one.count, "source": one.source}
            row["fallbacks"] = list(one.fallbacks)
            if context is not None:
                row["context"] = context.to_dict()
            rows.append(row)
        return sorted(rows, key=lambda row: -int(row["count"]))
