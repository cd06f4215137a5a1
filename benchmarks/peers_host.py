"""Host time of a call, with q, weights and out at new addresses each time: ours beside DeepGEMM's. Needs a GPU.

Runs in a process of its own, started by benchmarks/peers.py --host.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.dispatch.selector import select
from tilewise.kernels.arch import current_arch
from tilewise.kernels.collect import _environment
from tilewise.kernels.paged_mqa_logits import peers, portable_space
from tilewise.kernels.paged_mqa_logits.launch import paged_mqa_logits
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates

SIZES = ((16, 4, 64), (64, 1, 64), (16, 2, 32))  # (batch_size, next_n, heads)
CONTEXT = 256  # real lengths: short, so that the GPU never is what a burst waits for
WIDTH = 32768  # columns of the logits and of the table, and the context that launches are chosen for
BURST = 25
SETS = 700  # of q, weights and out: more than any cache of addresses holds

Call = Callable[[Tensor, Tensor, Tensor], object]


def calls(batch_size: int, next_n: int, heads: int, module: Any) -> tuple[dict[str, Call], dict[str, str]]:
    """Name to what is timed, called with q, weights and out; and why others are not."""
    shape = Shape(batch_size, next_n, heads, 128, 64, WIDTH)
    arch = current_arch()
    pages = CONTEXT // 64
    cache = torch.zeros(batch_size * pages, 64, 1, 132, dtype=torch.uint8, device="cuda")
    table = torch.zeros(batch_size, WIDTH // 64, dtype=torch.int32, device="cuda")
    table[:, :pages] = torch.arange(batch_size * pages, dtype=torch.int32, device="cuda").view(batch_size, pages)
    lens = torch.full((batch_size,), CONTEXT, dtype=torch.int32, device="cuda")
    found: dict[str, Call] = {}
    missing: dict[str, str] = {}

    def ours(config: Config | None = None, allocate: bool = False) -> Call:
        def call(q: Tensor, weights: Tensor, out: Tensor) -> object:
            return paged_mqa_logits(
                q, cache, weights, lens, table, WIDTH, max_context_len=WIDTH, config=config,
                out=None if allocate else out,
            )  # fmt: skip

        return call

    found["tilewise.paged_mqa_logits, warm choice, out given"] = ours()
    found["tilewise.paged_mqa_logits, warm choice, allocates"] = ours(allocate=True)
    portable = portable_space.default_config(shape, arch)
    found["tilewise.paged_mqa_logits, portable config given, out given"] = ours(portable)
    config = hopper_config(shape)
    if config is None:
        missing["prepared"] = "no Hopper config is on offer for this shape"
    else:
        from tilewise.kernels.paged_mqa_logits.sm90.launch import prepare

        prepared = prepare(shape, config)
        found["prepared"] = lambda q, weights, out: prepared(q, cache, weights, lens, table, out, WIDTH)
        found["tilewise.paged_mqa_logits, Hopper config given, out given"] = ours(config)
        missing["Hopper config"] = str(config)
    if module is None:
        missing["deep_gemm"] = "not asked for"
    else:
        tokens = peers.tokens_per_row(next_n)[0]
        rows_lens = peers.row_lens(lens, next_n, tokens)
        rows_table = peers.row_tables(table, next_n, tokens)
        made = peers.schedule(module, rows_lens, 64)
        slots = peers.schedule_slots(module.get_num_sms(), tokens)
        api, metadata = getattr(module, peers.FUNCTION), getattr(module, peers.METADATA)

        def alone(q: Tensor, weights: Tensor, out: Tensor) -> object:
            return api((q, None), cache, weights, rows_lens, rows_table, made, WIDTH)

        def with_metadata(q: Tensor, weights: Tensor, out: Tensor) -> object:
            return api((q, None), cache, weights, rows_lens, rows_table, metadata(rows_lens, 64, slots), WIDTH)

        if tokens == next_n:
            found["DeepGEMM API, schedule made before"] = alone
            found["DeepGEMM API and schedule"] = with_metadata
        else:
            missing["deep_gemm"] = f"next_n {next_n} is not native"
        drop_in(found, cache, table, lens, next_n)
    chosen = select(shape, arch=arch)
    missing["choice"] = f"{chosen.config} ({chosen.source})"
    return found, missing


def drop_in(found: dict[str, Call], cache: Tensor, table: Tensor, lens: Tensor, n: int) -> None:
    """The same calls through the drop-in."""
    from tilewise.dispatch.integrations import deep_gemm as ours

    lens_2d = peers.row_lens(lens, n, n)
    made = ours.get_paged_mqa_logits_metadata(lens_2d, 64, 132)

    def alone(q: Tensor, weights: Tensor, out: Tensor) -> object:
        return ours.fp8_fp4_paged_mqa_logits((q, None), cache, weights, lens_2d, table, made, WIDTH)

    def with_metadata(q: Tensor, weights: Tensor, out: Tensor) -> object:
        schedule = ours.get_paged_mqa_logits_metadata(lens_2d, 64, 132)
        return ours.fp8_fp4_paged_mqa_logits((q, None), cache, weights, lens_2d, table, schedule, WIDTH)

    found["drop-in for DeepGEMM's API, schedule made before"] = alone
    found["drop-in for DeepGEMM's API and schedule"] = with_metadata


def hopper_config(shape: Shape) -> Config | None:
    """The choice for this shape where it is the Hopper kernel's, or else its first candidate."""
    arch = current_arch()
    chosen = select(shape, arch=arch).config
    if chosen.kernel == "sm90":
        return chosen
    return next((config for config in candidates(shape, arch) if config.kernel == "sm90"), None)


def measure(found: dict[str, Call], batch_size: int, next_n: int, heads: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Median time of a call over bursts, the calls in turn and in random order; microseconds."""
    rows = batch_size * next_n
    sets = [
        (
            torch.zeros(batch_size, next_n, heads, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
            torch.zeros(rows, heads, device="cuda"),
            torch.empty(rows, WIDTH, device="cuda"),
        )
        for _ in range(SETS)
    ]
    samples: dict[str, list[float]] = {name: [] for name in found}
    failed: dict[str, str] = {}
    for name, call in found.items():
        try:
            for arguments in sets[:BURST]:
                call(*arguments)
            torch.cuda.synchronize()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
    order = [name for name in found if name not in failed]
    shuffle = random.Random(0)
    at = dict.fromkeys(order, 0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle.shuffle(order)
            for name in order:
                call = found[name]
                first = at[name] = (at[name] + BURST) % (SETS - BURST)
                burst = sets[first : first + BURST]
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for q, weights, out in burst:
                    call(q, weights, out)
                samples[name].append((time.perf_counter() - begun) / BURST * 1e6)
    finally:
        gc.enable()
    torch.cuda.synchronize()
    result: dict[str, dict[str, Any]] = {
        name: {"median_us": round(statistics.median(taken), 2), "least_us": round(min(taken), 2)}
        for name, taken in samples.items()
        if taken
    }
    return result | {name: {"failed": reason} for name, reason in failed.items()}


def run(out: Path, with_deep_gemm: bool, rounds: int, commit: str | None) -> int:
    """Measure and write; 0."""
    module = peers.deep_gemm() if with_deep_gemm else None
    environment = _environment(current_arch(), commit)
    names = ("device_name", "driver", "torch_version", "triton_version", "git_commit")
    report: dict[str, Any] = {name: environment.get(name) for name in names}
    report["deep_gemm_version"] = getattr(module, "__version__", None)
    report["measured"] = []
    for batch_size, next_n, heads in SIZES:
        found, missing = calls(batch_size, next_n, heads, module)
        taken = measure(found, batch_size, next_n, heads, rounds)
        sizes = {"batch_size": batch_size, "next_n": next_n, "heads": heads}
        report["measured"].append({**sizes, "calls": taken, "notes": missing})
        for name, values in sorted(taken.items(), key=lambda pair: pair[1].get("median_us", 1e9)):
            print(f"{sizes}: {name}: {values}", flush=True)
        for name, reason in missing.items():
            print(f"{sizes}: {name}: {reason}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0
