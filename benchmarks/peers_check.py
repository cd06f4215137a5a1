"""The drop-in over the real DeepGEMM, on the GPU: answers, schedules, capture, taking it out again.

Runs in a process of its own, started by benchmarks/peers.py --check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peers_variants import compile_ahead, deep_gemm_jobs, triton_jobs
from torch import Tensor

from tilewise.dispatch.integrations import deep_gemm as dropin
from tilewise.dispatch.selector import select
from tilewise.kernels.arch import current_arch
from tilewise.kernels.paged_mqa_logits import peers
from tilewise.kernels.paged_mqa_logits.reference import reference_logits
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.kernels.timing import MAX_ELEMENT_ERROR, PagePool

WIDTH = 5000  # no multiple of a row's alignment
HEADS, NEXT_NS = (64, 32), (1, 2, 3, 4, 5, 6, 7, 8, 12)
LENS = (4999, 0, 1, 64, 65, 130, 4096, 3, 2000, 777)


class Problem:
    """Tensors of one call, in DeepGEMM's terms."""

    def __init__(self, pool: PagePool, next_n: int, heads: int, seed: int = 0) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        batch_size = len(LENS)
        lens = torch.tensor(LENS, dtype=torch.int32, device="cuda")
        self.lens = peers.row_lens(lens, next_n, next_n)
        pages = -(-WIDTH // 64)
        order = torch.randperm(pool.num_blocks, device="cuda", generator=g).int()
        self.table = order[: batch_size * pages].view(batch_size, pages)
        q = torch.randn(batch_size, next_n, heads, 128, device="cuda", generator=g)
        self.q = q.to(torch.float8_e4m3fn)
        self.weights = torch.randn(batch_size * next_n, heads, device="cuda", generator=g)
        self.cache = pool.kv_cache
        self.expected, self.work = reference_logits(
            self.q, self.cache, self.weights, self.lens, self.table, WIDTH, dtype=torch.float32
        )

    def arguments(self, schedule: Tensor | None) -> tuple[Any, ...]:
        return (self.q, None), self.cache, self.weights, self.lens, self.table, schedule, WIDTH

    def error(self, logits: Tensor) -> float:
        """Largest error of a scored column relative to its work; infinite where one is no number."""
        scored = self.expected.isfinite()
        error = torch.where(scored, (logits - self.expected).abs() / self.work, 0.0)
        return float("inf") if bool(error.isnan().any()) else float(error.max())


def checks(module: Any) -> Iterator[tuple[str, str]]:
    """What is checked, and what is wrong with it, or nothing."""
    pool = PagePool(4096, 64, 128)
    own, own_schedule = getattr(module, peers.FUNCTION), getattr(module, peers.METADATA)

    def close(problem: Problem, call: Callable[[], Tensor]) -> str:
        poison = torch.full((problem.expected.shape[0], -(-WIDTH // 256) * 256), float("nan"), device="cuda")
        del poison
        logits = call()
        torch.cuda.synchronize()
        if logits.shape != problem.expected.shape or logits.stride(0) % 256:
            return f"shape {tuple(logits.shape)}, strides {logits.stride()}"
        error = problem.error(logits)
        return "" if error <= MAX_ELEMENT_ERROR else f"error {error:.3g}"

    for heads in (64, 32):
        for next_n in peers.TOKENS:
            problem = Problem(pool, next_n, heads)
            slots = peers.schedule_slots(module.get_num_sms(), next_n)
            even = dropin._even_schedule(len(LENS), slots, torch.device("cuda", 0))
            real = own_schedule(problem.lens, 64, slots)
            name = f"DeepGEMM's kernel, heads {heads}, next_n {next_n}"
            yield f"{name}, its schedule", close(problem, functools.partial(own, *problem.arguments(real)))
            yield f"{name}, the drop-in's schedule", close(problem, functools.partial(own, *problem.arguments(even)))
    dropin.install()
    try:
        for heads in HEADS:
            for next_n in NEXT_NS:
                problem = Problem(pool, next_n, heads)
                schedule = module.get_paged_mqa_logits_metadata(problem.lens, 64, 132)
                arguments = problem.arguments(schedule)
                found = close(problem, functools.partial(module.fp8_fp4_paged_mqa_logits, *arguments))
                yield f"drop-in, heads {heads}, next_n {next_n}", found
        yield "drop-in, captured and replayed", captured(module, pool)
        problem = Problem(pool, 6, 64)
        flattened = dropin._own_kernel(own, problem.q, *problem.arguments(None)[1:])
        error = problem.error(flattened)
        yield "DeepGEMM's kernel at next_n 6, through the drop-in", "" if error <= MAX_ELEMENT_ERROR else f"{error:.3g}"
    finally:
        dropin.uninstall()
    yield "taken out again", "" if getattr(module, peers.FUNCTION) is own else "not DeepGEMM's function"


def captured(module: Any, pool: PagePool) -> str:
    """Capture the drop-in at next_n 6, free and churn memory, change the inputs in place, and replay."""
    problem = Problem(pool, 6, 64)
    other = Problem(pool, 6, 64, seed=1)
    dropin.warm_up([Shape(len(LENS), 6, 64, 128, 64, WIDTH)])
    schedule = module.get_paged_mqa_logits_metadata(problem.lens, 64, 132)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        module.fp8_fp4_paged_mqa_logits(*problem.arguments(schedule))
        stream.synchronize()
        graph.capture_begin()
        logits = module.fp8_fp4_paged_mqa_logits(*problem.arguments(schedule))
        graph.capture_end()
        for turn in range(100):
            churn = torch.full((1 << 22,), float("nan"), device="cuda")
            del churn
            if turn == 50:
                problem.q.copy_(other.q)
            graph.replay()
    stream.synchronize()
    problem.expected, problem.work = reference_logits(
        problem.q, problem.cache, problem.weights, problem.lens, problem.table, WIDTH, dtype=torch.float32
    )
    error = problem.error(logits)
    return "" if error <= MAX_ELEMENT_ERROR else f"error {error:.3g}"


def compile_all(workers: int) -> None:
    """Everything that the checks launch, ahead and in parallel."""
    arch = current_arch()
    shapes = [Shape(len(LENS), n, heads, 128, 64, WIDTH) for heads in HEADS for n in NEXT_NS if n <= 8]
    shapes += [Shape(2 * len(LENS), 6, heads, 128, 64, WIDTH) for heads in HEADS]  # 12 as two rows of 6
    jobs = deep_gemm_jobs([shape for shape in shapes if shape.next_n in (1, 2, 4, 6)], arch)
    jobs += triton_jobs([(shape, select(shape, arch=arch).config) for shape in shapes], per_token_lens=True)
    compile_ahead(jobs, workers)


def run(workers: int) -> int:
    """Print each check; 0 when all hold."""
    compile_all(workers)
    bad = 0
    for name, wrong in checks(peers.deep_gemm()):
        bad += bool(wrong)
        print(f"{'BAD ' if wrong else 'ok  '} {name}{': ' + wrong if wrong else ''}", flush=True)
    print("all hold" if not bad else f"{bad} do not hold", flush=True)
    return int(bool(bad))
