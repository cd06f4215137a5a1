"""Times launches so that the numbers can be believed: graph replay, cold cache, interleaved, checked before timed.

Every candidate of a shape is captured in its own graph, whose launches walk disjoint sets of cache pages that together
exceed the last-level cache. The graphs are then replayed in turn, in a new random order each round, so that drifting
clocks and a throttling card hit all of them alike.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.launch import launcher
from tilewise.kernels.paged_mqa_logits.reference import reference_logits, worst_error
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, cdiv, floor_us, is_valid
from tilewise.kernels.paged_mqa_logits.traits import traits_of

# Errors of a kernel with fp8 products and fp32 sums. The matrix unit's own accumulation is the larger part: on an H200
# the worst of 10^8 elements came to 1.1e-3, at 16 heads.
MAX_ELEMENT_ERROR = 2e-3
MAX_NORM_ERROR = 2.5e-4
_DISTINCT_PAGES = 7919  # pages of random data that fill the pool in turn; prime, so that no stride repeats them
_OUTPUT_SENTINEL = float("nan")


@dataclass
class Timing:
    """What one candidate took, or why it was not timed. `status` in the words of data.records.STATUSES."""

    config: Config
    status: str = "correct"
    reason: str | None = None
    max_error: float | None = None
    samples_us: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """Time that `share` of the rounds stayed under, microseconds."""
        ordered = sorted(self.samples_us)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


class PagePool:
    """Device memory full of cache pages: values, then fp32 scales. Random values serve either layout."""

    def __init__(self, num_blocks: int, block_kv: int, head_dim: int, seed: int = 0) -> None:
        self.block_kv, self.head_dim, self.num_blocks = block_kv, head_dim, num_blocks
        page_bytes = block_kv * (head_dim + 4)
        g = torch.Generator("cuda").manual_seed(seed)
        count = min(num_blocks, _DISTINCT_PAGES)
        values = torch.randn(count, block_kv * head_dim, device="cuda", generator=g) * 60
        scales = (torch.rand(count, block_kv, device="cuda", generator=g) + 0.5) / 60
        pages = torch.empty(count, page_bytes, dtype=torch.uint8, device="cuda")
        pages[:, : block_kv * head_dim] = values.clamp_(-440, 440).to(torch.float8_e4m3fn).view(torch.uint8)
        pages[:, block_kv * head_dim :] = scales.view(torch.uint8)
        pool = torch.empty(num_blocks, page_bytes, dtype=torch.uint8, device="cuda")
        for start in range(0, num_blocks, count):
            part = pool[start : start + count]
            part.copy_(pages[: part.shape[0]])
        self.kv_cache = pool.view(num_blocks, block_kv, 1, head_dim + 4)


@dataclass
class Problem:
    """Tensors of one shape, with several disjoint block tables to walk in turn."""

    shape: Shape
    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_tables: list[Tensor]
    out: Tensor
    expected: Tensor
    work: Tensor
    footprint_bytes: int
    launches: int  # per captured graph

    def needs_flush(self, arch: Arch) -> bool:
        """Whether one launch's pages fit in the cache, so that another candidate's could still be there."""
        return self.footprint_bytes / len(self.block_tables) < arch.last_level_cache_bytes

    def launch(self, config: Config, turn: int = 0) -> None:
        """One launch with the block table of this turn."""
        table = self.block_tables[turn % len(self.block_tables)]
        columns = min(self.out.shape[1], table.shape[1] * self.shape.block_kv)
        launcher(config.kernel).launch(
            self.q, self.kv_cache, self.weights, self.context_lens, table, self.out, columns, self.shape, config,
            traits_of(self.kv_cache, self.weights, self.context_lens),
        )  # fmt: skip


def make_problem(
    shape: Shape, context_lens: Sequence[int], pool: PagePool, arch: Arch, *, logits_width: int, seed: int = 0
) -> Problem:
    """Draw a problem on the current GPU. Every launch of a graph reads its own pages, as long as the pool has them."""
    g = torch.Generator("cuda").manual_seed(seed)
    pages_each = [cdiv(length, shape.block_kv) for length in context_lens]
    pages = sum(pages_each)
    page_bytes = shape.block_kv * (shape.head_dim + 4)
    if pages > pool.num_blocks:
        raise ValueError(f"the shape needs {pages} distinct pages, the pool has {pool.num_blocks}")
    # Twice the last-level cache between two reads of one page; a large launch is its own flush.
    wanted = cdiv(2 * arch.last_level_cache_bytes, max(1, pages * page_bytes))
    tables = max(1, min(max(wanted, 2), 256, pool.num_blocks // max(1, pages)))
    order = torch.randperm(pool.num_blocks, device="cuda", generator=g).int()
    width = max(1, max(pages_each, default=1))
    block_tables = torch.full((tables, shape.batch_size, width), -1, dtype=torch.int32, device="cuda")
    if len(set(pages_each)) == 1:
        block_tables.copy_(order[: tables * pages].view(tables, shape.batch_size, width))
    else:
        start = 0
        for t in range(tables):
            for b, count in enumerate(pages_each):
                block_tables[t, b, :count] = order[start : start + count]
                start += count
    q = torch.randn(
        shape.batch_size, shape.next_n, shape.heads, shape.head_dim, device="cuda", generator=g
    )  # fmt: skip
    rows = shape.batch_size * shape.next_n
    lens = torch.tensor(list(context_lens), dtype=torch.int32, device="cuda")
    problem = Problem(
        shape=shape,
        q=q.to(torch.float8_e4m3fn),
        kv_cache=pool.kv_cache,
        weights=torch.randn(rows, shape.heads, device="cuda", generator=g),
        context_lens=lens,
        block_tables=list(block_tables),
        out=torch.empty(rows, cdiv(logits_width, 256) * 256, device="cuda")[:, :logits_width],
        expected=torch.empty(0),
        work=torch.empty(0),
        footprint_bytes=tables * pages * page_bytes,
        launches=_launches(shape, arch, tables),
    )
    problem.expected, problem.work = reference_logits(
        problem.q, problem.kv_cache, problem.weights, lens, block_tables[0], logits_width, dtype=torch.float32,
        cache_layout=shape.cache_layout,
    )  # fmt: skip
    return problem


def _launches(shape: Shape, arch: Arch, tables: int) -> int:
    # Enough launches that a replay is long against the clock's resolution (about half a microsecond), and every block
    # table the same number of times.
    about = 1.5 * floor_us(shape, arch) + 3
    return tables * max(1, math.ceil(min(24, max(2, 1500 / about)) / tables))


def check(problem: Problem, config: Config, arch: Arch) -> Timing:
    """Run a candidate once on a poisoned output and compare every element with the reference."""
    timing = Timing(config)
    reason = is_valid(problem.shape, config, arch)
    if reason is not None:
        timing.status, timing.reason = "constraints", reason
        return timing
    problem.out.fill_(_OUTPUT_SENTINEL)
    try:
        problem.launch(config)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler or driver raises is a row, not the end of the run
        timing.status = "runtime" if _is_device_error(error) else "compile"
        timing.reason = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        return timing
    element, norm = worst_error(problem.out, problem.expected, problem.work)
    timing.max_error = element if math.isfinite(element) else None
    if not (element <= MAX_ELEMENT_ERROR and norm <= MAX_NORM_ERROR):
        timing.status = "correctness"
        timing.reason = f"error per element {element:.3g} (allowed {MAX_ELEMENT_ERROR}), norm-wise {norm:.3g}"
    return timing


def _is_device_error(error: Exception) -> bool:
    text = str(error).lower()
    return "cuda error" in text or "hip error" in text or "illegal" in text or "misaligned" in text


def time_interleaved(
    runs: Sequence[tuple[Timing, Callable[[int], None]]], launches: int, rounds: int, *, flush: bool, seed: int = 0
) -> None:
    """Capture each run's `launches` launches and replay all graphs in turn, `rounds` times, adding to `samples_us`.

    `flush`: replay a graph once, untimed, right before its timed replay, so that the cache holds its own late pages
    and none of another candidate's.
    """
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    order: list[tuple[Timing, Any]] = []
    shuffle = random.Random(seed)
    with torch.cuda.stream(stream):
        for timing, go in runs:
            graph = torch.cuda.CUDAGraph()
            try:
                graph.capture_begin()
                for turn in range(launches):
                    go(turn)
                graph.capture_end()
            except Exception as error:  # see check
                timing.status, timing.reason = "runtime", f"capture: {type(error).__name__}: {str(error)[-300:]}"
                continue
            order.append((timing, graph))
        for _ in range(rounds):
            shuffle.shuffle(order)
            for timing, graph in order:
                if flush:
                    graph.replay()
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                elapsed_us = start.elapsed_time(end) * 1e3 / launches
                if elapsed_us > 0:  # a clock that went backwards is no sample
                    timing.samples_us.append(elapsed_us)
    for _, graph in order:
        graph.reset()


def time_again(problem: Problem, timings: Sequence[Timing], arch: Arch, *, rounds: int, seed: int = 0) -> None:
    """Time candidates that were checked before, interleaved, adding to their samples."""

    def runner(config: Config) -> Callable[[int], None]:
        return lambda turn: problem.launch(config, turn)

    runs = [(timing, runner(timing.config)) for timing in timings]
    time_interleaved(runs, problem.launches, rounds, flush=problem.needs_flush(arch), seed=seed)


def time_candidates(
    problem: Problem, configs: Sequence[Config], arch: Arch, *, rounds: int, seed: int = 0
) -> list[Timing]:
    """Check every candidate, then time the correct ones interleaved. One Timing per config, in order."""
    timings = [check(problem, config, arch) for config in configs]
    time_again(problem, [timing for timing in timings if timing.status == "correct"], arch, rounds=rounds, seed=seed)
    for timing in timings:
        if timing.status == "correct" and not timing.samples_us:
            timing.status, timing.reason = "runtime", "every sample had an elapsed time of zero or less"
    return timings
