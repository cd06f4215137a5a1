"""Measured rows of the shipped profile, as the benchmarks beside this file read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise.data.records import config_of, shape_of
from tilewise.data.store import load_profile
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, flops

FIRST_PASS = 0


@dataclass(frozen=True)
class Row:
    """One timing that was believed."""

    shape: Shape
    config: Config
    contexts: str
    pass_index: int
    latency_us: float

    @property
    def requested_bytes(self) -> int:
        """Cache bytes that the programs ask for: each group of query tokens reads every cached token once."""
        groups = self.config.groups(self.shape.next_n)
        return groups * self.shape.context_tokens * (self.shape.head_dim + 4)

    @property
    def requested_tbps(self) -> float:
        return self.requested_bytes / self.latency_us / 1e6

    @property
    def tflops(self) -> float:
        return flops(self.shape) / self.latency_us / 1e6


def load(arch: str, op: str = "paged_mqa_logits") -> list[Row]:
    """Correct rows of the shipped and imported profile of `arch`."""
    columns = load_profile(op, arch).columns
    names = list(columns)
    rows = []
    for values in zip(*(columns[name] for name in names), strict=True):
        row: dict[str, Any] = dict(zip(names, (v.item() if hasattr(v, "item") else v for v in values), strict=True))
        if row["status"] == "correct":
            rows.append(Row(shape_of(row), config_of(row), row["contexts"], row["pass_index"], row["latency_us"]))
    return rows
