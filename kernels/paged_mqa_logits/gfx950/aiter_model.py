"""aiter's preshuffled kernel in the terms of the gfx950 prior: what that is calibrated on, and a peer to weigh."""

from __future__ import annotations

import csv
import functools
from importlib import resources

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.gfx950 import prior
from tilewise.kernels.paged_mqa_logits.gfx950.assembly import CYCLES_PER_PASS, MFMA_PASSES
from tilewise.kernels.paged_mqa_logits.spec import Shape, cdiv

_PASSES = MFMA_PASSES["v_mfma_f32_16x16x32_fp8_fp8"]


def published(name: str) -> list[dict[str, str]]:
    """The rows of a file of published figures."""
    text = resources.files("tilewise").joinpath("data", "published", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@functools.cache
def counts() -> dict[int, dict[str, str]]:
    """Instruction counts of the kernel by its number of heads."""
    return {int(row["heads"]): row for row in published("aiter_kernel_counts.csv")}


def split_kv(rows: int, compute_units: int, waves_per_eu: int = 2) -> int:
    """aiter's SplitKV for a grid of `rows` query rows."""
    return (max(1, compute_units // rows) + 4) // 5 * 5 * waves_per_eu


def work(shape: Shape, arch: Arch, flattened: bool = False) -> prior.Work:
    """A launch of the kernel: one program a query row and split.

    Its grid counts requests fastest: with a multiple of eight requests all rows of a request run on one die. Flattened,
    rows are requests of their own, and those that share K are neighbours, on different dies.
    Raises KeyError for a number of heads whose instructions were not counted.
    """
    row = counts()[shape.heads]
    tile_kv, num_warps = int(row["tile_kv"]), int(row["num_warps"])
    cycles = int(row["valu"]) * prior.VALU_CYCLES + int(row["mfma"]) * _PASSES * CYCLES_PER_PASS
    rows = shape.batch_size * shape.next_n
    tiles = cdiv(shape.max_context_len, tile_kv)
    split = max(1, min(split_kv(rows, arch.compute_units), tiles))
    dies = shape.next_n if flattened or shape.batch_size % arch.xcds else 1
    return prior.Work(
        programs=rows * split,
        num_warps=num_warps,
        waves_per_simd=int(row["waves_per_simd"]),
        wave_cycles_total=rows * num_warps * tiles * cycles,
        wave_cycles_longest=cdiv(tiles, split) * cycles,
        bytes_moved=prior.bytes_moved(shape, shape.next_n, dies),
    )


def predicted_us(shape: Shape, arch: Arch) -> float:
    """Predicted microseconds of the kernel; infinite where its instructions were not counted."""
    if shape.heads not in counts() or shape.head_dim != 128 or shape.cache_layout != "preshuffled":
        return float("inf")
    if not shape.batch_size:
        return prior.FITTED.latency_us
    return prior.predict_us(work(shape, arch), arch)
