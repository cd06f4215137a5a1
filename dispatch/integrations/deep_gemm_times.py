"""Where DeepGEMM's own kernel was measured to be faster than tilewise's pick: the drop-in leaves those launches to it.

The rows are data/peers/deep_gemm_<arch>.csv, written by `python benchmarks/peers.py --summary --peer-times FILE` from
interleaved timings of both on that GPU; without such a file, DeepGEMM's kernel is never preferred. Only next_n 1, 2 and
4 are looked at: at others DeepGEMM's rows are not the caller's, nor is its schedule.
"""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass
from importlib import resources

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Shape

COLUMNS = ("heads", "next_n", "batch_size", "max_context_len", "mean_context_len", "deep_gemm_us", "tilewise_us")
NOISE = 1.02  # a smaller difference is a tie, and a tie is ours
MOST_DOUBLINGS = 1.5  # in batch size and context together, to the nearest launch that was measured


@dataclass(frozen=True)
class _Row:
    heads: int
    next_n: int
    batch_size: int
    context_len: int
    faster: bool

    def doublings(self, batch_size: int, context_len: int) -> float:
        return abs(math.log2(batch_size / self.batch_size)) + abs(math.log2(context_len / self.context_len))


@functools.cache
def _rows(arch_name: str) -> tuple[_Row, ...]:
    file = resources.files("tilewise").joinpath("data", "peers", f"deep_gemm_{arch_name}.csv")
    if not file.is_file():
        return ()
    found = []
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        if row["max_context_len"] == row["mean_context_len"]:
            faster = float(row["deep_gemm_us"]) * NOISE < float(row["tilewise_us"])
            heads, next_n, batch_size, context_len = (int(row[name]) for name in COLUMNS[:4])
            found.append(_Row(heads, next_n, batch_size, context_len, faster))
    return tuple(found)


def own_kernel_is_faster(shape: Shape, arch: Arch) -> bool:
    """Whether DeepGEMM's kernel beat tilewise's pick at the nearest launch that was measured, if that is near."""
    if shape.head_dim != 128 or shape.block_kv != 64 or not shape.batch_size or not shape.max_context_len:
        return False
    same = [row for row in _rows(arch.name) if (row.heads, row.next_n) == (shape.heads, shape.next_n)]
    if not same:
        return False
    sizes = shape.batch_size, shape.max_context_len
    nearest = min(same, key=lambda row: row.doublings(*sizes))
    return nearest.faster and nearest.doublings(*sizes) <= MOST_DOUBLINGS


@functools.cache
def own_kernel_may_be_faster(batch_size: int, next_n: int, arch: Arch) -> bool:
    """Whether any launch of these sizes, at some number of heads and some context, is DeepGEMM's."""
    if not batch_size:
        return False
    rows = [row for row in _rows(arch.name) if row.faster and row.next_n == next_n]
    return any(row.doublings(batch_size, row.context_len) <= MOST_DOUBLINGS for row in rows)
