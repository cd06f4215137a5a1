"""An analytic estimate of launch times on gfx950, calibrated on published figures of another kernel. Never measured.

A launch takes   max(latency, scale * (VALU + MFMA) + memory):

- VALU and MFMA: issue cycles of the audited main loop over the device's SIMDs, at the published clock. They add up: in
  aiter's published times at 32, 64 and 128 heads, each head costs as much as its MFMA and VALU issue together.
- memory: K, scales and logits over the published bandwidth, or what the calibration leaves of it. Each die has an L2 of
  its own: programs that share K read it once where the order puts them on one die; on other dies it comes again, from
  the last-level cache.
- latency: of the smallest launch, which no larger one goes below. Each wave that follows another on a SIMD is taken to
  begin with as much, hidden by those beside it: many short programs cost more than few long ones.

`benchmarks/gfx950_prior.py` fits the constants to the rows marked CALIBRATION and shows the error on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.gfx950.resources import key_of, row_of
from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Config, Shape, cdiv

# What the estimate rests on; decisions of source "prior" name it.
BASIS = (
    "published figures for aiter's kernel on MI355X: 139.1, 219.2 and 362.8 us at 32, 64 and 128 heads and 5.4 TB/s at "
    "next_n 1 (ROCm/aiter#5477), 3.83 us for the smallest launch (ROCm/aiter#5434); instruction counts by audit"
)
SIMDS = 4  # of a compute unit
VALU_CYCLES = 4  # a vector instruction occupies a SIMD of 16 lanes for four cycles
# Read bandwidth of the last-level cache over that of device memory: 17.2 and 5.3 TB/s in AMD's CDNA 3 white paper.
LAST_LEVEL_CACHE_SPEEDUP = 17.2 / 5.3


@dataclass(frozen=True, slots=True)
class Constants:
    """What the calibration determines."""

    issue_scale: float  # time per issued cycle, in cycles of the published clock
    bandwidth_share: float  # of the published bandwidth that is reached
    latency_us: float  # of the smallest launch


# From `python benchmarks/gfx950_prior.py --fit`; a test holds it to that.
FITTED = Constants(issue_scale=0.998, bandwidth_share=1.0, latency_us=3.83215)


@dataclass(frozen=True, slots=True)
class Work:
    """A launch in the model's terms, of our kernel or of another."""

    programs: int  # that have keys to work on
    num_warps: int
    waves_per_simd: int
    wave_cycles_total: float  # VALU and MFMA issue of all waves of all programs
    wave_cycles_longest: float  # of the longest wave
    bytes_moved: float  # in bytes of device memory, reads of the last-level cache at their lower price


def predict_us(work: Work, arch: Arch, constants: Constants = FITTED) -> float:
    """Microseconds of a launch."""
    clock = arch.clock_mhz  # cycles a microsecond
    simds = arch.compute_units * SIMDS
    waves = work.programs * work.num_warps
    # Waves are dealt out whole, and those of a SIMD share its issue: the busiest has the mean number, rounded up.
    deepest = -(-waves // simds)
    busiest = max(work.wave_cycles_total * deepest / max(1, waves), work.wave_cycles_longest)
    issue_us = constants.issue_scale * busiest / clock
    memory_us = work.bytes_moved / (arch.bandwidth_tbps * 1e6 * constants.bandwidth_share)
    busy_us = issue_us + memory_us
    # A wave that follows another starts with loads that depend on each other; only the waves beside it can hide that.
    started_us = (deepest * constants.latency_us + busy_us) / work.waves_per_simd - constants.latency_us
    return max(constants.latency_us, busy_us, started_us)


def prior_us(shape: Shape, config: Config, arch: Arch) -> float:
    """Predicted microseconds of a launch of the gfx950 kernel; NaN where the binary was not audited."""
    row = row_of(key_of(shape, config))
    if row is None:
        return float("nan")
    if not shape.batch_size or not shape.max_context_len:
        return FITTED.latency_us
    groups = config.groups(shape.next_n)
    mean = shape.mean_context_len or 0
    longest = cdiv(cdiv(shape.max_context_len, config.tile_kv), config.split_kv)  # tiles of the longest program
    tiles = max(1.0, mean / config.tile_kv)  # of the mean request
    per_program = max(1, -(-tiles // config.split_kv))
    programs = shape.batch_size * groups * min(config.split_kv, cdiv(int(-(-tiles // 1)), int(per_program)))
    cycles = row.valu * VALU_CYCLES + row.mfma_cycles
    return predict_us(
        Work(
            programs=programs,
            num_warps=config.num_warps,
            waves_per_simd=row.waves_per_simd,
            wave_cycles_total=shape.batch_size * groups * config.num_warps * tiles * cycles,
            wave_cycles_longest=longest * cycles,
            bytes_moved=bytes_moved(shape, groups, _dies_of_groups(groups, config.program_order, arch)),
        ),
        arch,
    )


def bytes_moved(shape: Shape, groups: int, dies: int) -> float:
    """Bytes of device memory that a launch is charged: K, scales, logits, and queries of each split left out.

    dies: on how many dies the groups of one request and split run; K comes from memory for the first of them, and from
    the last-level cache for the others.
    """
    k = shape.context_tokens * (shape.head_dim + SCALE_BYTES)
    logits = 4 * shape.next_n * shape.context_tokens
    again = min(dies, groups) - 1
    return k * (1 + again / LAST_LEVEL_CACHE_SPEEDUP) + logits


def _dies_of_groups(groups: int, program_order: str, arch: Arch) -> int:
    # Groups are neighbours in program order, and workgroups are dealt to the dies in turn.
    return 1 if program_order == "xcd" else min(groups, arch.xcds)
