"""Measured rows as the benchmarks beside this file read them: of the shipped profile, and of plain Triton's whole grid.

The profile times what is on offer. On Hopper that is little of the portable kernel, so what its whole grid measured
there, before the Hopper kernel, is kept in results/plain_triton_h200.parquet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.data.records import config_of, shape_of
from tilewise.data.store import load_profile
from tilewise.data.table import read_table
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, flops

FIRST_PASS = 0
PLAIN_TRITON = Path(__file__).parent / "results" / "plain_triton_h200.parquet"


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
    return _rows(load_profile(op, arch).columns)


def load_plain_triton(arch: str) -> list[Row]:
    """Correct rows of the portable kernel's whole grid, where it was measured apart from the profile, else of that."""
    return _rows(read_table(PLAIN_TRITON).to_pydict()) if arch == "h200" else load(arch)


def _rows(columns: Mapping[str, Any]) -> list[Row]:
    names = list(columns)
    rows = []
    for values in zip(*(columns[name] for name in names), strict=True):
        row: dict[str, Any] = dict(zip(names, (v.item() if hasattr(v, "item") else v for v in values), strict=True))
        if row["status"] == "correct":
            rows.append(Row(shape_of(row), config_of(row), row["contexts"], row["pass_index"], row["latency_us"]))
    return rows
