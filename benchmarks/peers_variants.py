"""What benchmarks/peers.py times: our candidates and fixed configs, DeepGEMM's modes, and compiling them ahead."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import peers_rows as rows_file
import torch
from peers_entries import Entry

from tilewise.dispatch.selector import select
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits import peers
from tilewise.kernels.paged_mqa_logits.launch import compile_config, launcher
from tilewise.kernels.paged_mqa_logits.portable_space import split_for
from tilewise.kernels.paged_mqa_logits.reference import worst_error
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, cdiv, is_valid
from tilewise.kernels.paged_mqa_logits.traits import usual_traits
from tilewise.kernels.timing import MAX_ELEMENT_ERROR, MAX_NORM_ERROR, Problem, Timing, _is_device_error


@dataclass
class Variant:
    """One thing to time on one problem."""

    label: str
    roles: str
    timing: Timing
    go: Callable[[int], Any]
    tokens_per_row: int | None = None

    @property
    def config_text(self) -> str | None:
        """The config as a row has it; DeepGEMM has none."""
        return json.dumps(self.timing.config.to_dict()) if self.tokens_per_row is None else None


# -- what to time


def shortlist(path: Path | None) -> list[tuple[dict[str, int], Config]]:
    """Configs from JSON lines {"config": {...}, "heads": 64, "next_n": 6}, the sizes optional: only for these then."""
    if path is None:
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            values = json.loads(line)
            found.append((values, Config.from_dict(values.pop("config"))))
    return found


def choice_candidates(shape: Shape, arch: Arch, listed: Sequence[tuple[dict[str, int], Config]]) -> list[Config]:
    """Configs that a choice is made among: the shortlist's or every candidate, and plain Triton's in any case."""
    if listed:
        sizes = shape.to_dict()
        own = [config for wanted, config in listed if all(sizes[name] == value for name, value in wanted.items())]
        own = [config for config in own if is_valid(shape, config, arch) is None]
    else:
        own = candidates(shape, arch)
    return list(dict.fromkeys([*own, *plain_candidates(shape, arch)]))


def plain_candidates(shape: Shape, arch: Arch) -> list[Config]:
    """Configs of the portable kernel, also for shapes at which it is not on offer: it is a peer here.

    Those around the best single rule for this GPU: cached tokens as rows, tiles of 64, 4 warps, about 4 or 8 programs
    for each multiprocessor.
    """
    found = []
    for fuse_n in dict.fromkeys((shape.next_n, cdiv(shape.next_n, 2), cdiv(shape.next_n, 3), 1)):
        dots = [dot for dot in (2, 4) if dot <= fuse_n and dot * shape.heads <= 256] or [1]
        for dot_n in dots:
            for num_stages, per_unit in ((5, 4), (3, 8)):
                split_kv = split_for(shape, fuse_n, 64, arch, per_unit)
                found.append(Config(fuse_n=fuse_n, dot_n=dot_n, split_kv=split_kv, num_stages=num_stages))
    return [config for config in dict.fromkeys(found) if is_valid(shape, config, arch) is None]


def fixed_configs(entry: Entry, choices: dict[str, dict[str, Any]], selecting: bool, arch: Arch) -> dict[Config, str]:
    """The configs to time for an entry, each with the roles it has."""
    roles: dict[Config, list[str]] = {}
    choice = choices.get(entry.name, {})
    for role in ("ours", "sm90", "portable"):
        config = rows_file.chosen(choice, role)
        if config is not None:
            roles.setdefault(config, []).append(role)
    if selecting:
        roles.setdefault(select(entry.shape, arch=arch).config, []).append("select")
    return {config: "+".join(names) for config, names in roles.items()}


# -- DeepGEMM


def peer_variant(module: Any, problem: Problem, tokens: int) -> Variant:
    """DeepGEMM with so many query tokens a row, its schedule made beforehand: a step's layers share one."""
    shape = problem.shape
    lens = peers.row_lens(problem.context_lens, shape.next_n, tokens)
    tables = [peers.row_tables(table, shape.next_n, tokens) for table in problem.block_tables]
    made = peers.schedule(module, lens, shape.block_kv)
    width = problem.out.shape[1]

    def go(turn: int) -> Any:
        return peers.call(
            module, problem.q, problem.kv_cache, problem.weights, lens, tables[turn % len(tables)], made, width
        )

    timing = Timing(Config(kernel="deep_gemm", fuse_n=tokens))
    return Variant(f"deep_gemm {tokens}", "deep_gemm", timing, go, tokens)


def check_peer(problem: Problem, variant: Variant) -> None:
    """Run it once into memory that was poisoned, as far as the allocator gives that back, and compare what it scores.

    It writes scores where a token may not look, and leaves other columns to chance; neither is looked at.
    """
    timing = variant.timing
    rows, width = problem.out.shape
    poison = torch.full((rows, cdiv(width, peers.ROW_ALIGNMENT) * peers.ROW_ALIGNMENT), float("nan"), device="cuda")
    del poison
    try:
        logits = variant.go(0)
        torch.cuda.synchronize()
    except Exception as error:
        timing.status = "runtime" if _is_device_error(error) else "compile"
        timing.reason = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        return
    scored = torch.where(problem.expected.isfinite(), logits, problem.expected)
    element, norm = worst_error(scored, problem.expected, problem.work)
    timing.max_error = element if element < float("inf") else None
    if not (element <= MAX_ELEMENT_ERROR and norm <= MAX_NORM_ERROR):
        timing.status, timing.reason = "correctness", f"error per element {element:.3g}, norm-wise {norm:.3g}"


def peer_tokens(shape: Shape, arch: Arch) -> list[int]:
    return [tokens for tokens in peers.tokens_per_row(shape.next_n) if peers.why_not(shape, tokens, arch) is None]


# -- compiling ahead


def compile_ahead(jobs: Iterable[tuple[Any, ...]], workers: int) -> None:
    """Fill the disk caches of Triton and DeepGEMM in parallel; what fails is left for the run to report."""
    begun = time.time()
    todo = list(jobs)
    if not todo:
        return
    failed = []
    with ProcessPoolExecutor(max(1, min(workers, len(todo))), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_compile_one, *job): job for job in todo}
        for count, future in enumerate(as_completed(futures), 1):
            reason = future.result()
            if reason:
                failed.append(f"{futures[future]}: {reason}")
            if count % 25 == 0:
                print(f"  compiled {count} of {len(todo)} ({time.time() - begun:.0f} s)", flush=True)
    print(f"{len(todo)} kernels compiled in {time.time() - begun:.0f} s, {len(failed)} failed", flush=True)
    for line in failed[:10]:
        print("  " + line, flush=True)


def triton_jobs(wanted: Iterable[tuple[Shape, Config]], per_token_lens: bool = False) -> list[tuple[Any, ...]]:
    """One job for each binary."""
    found: dict[Any, tuple[Any, ...]] = {}
    for shape, config in wanted:
        traits = usual_traits(shape, per_token_lens=per_token_lens)
        key = launcher(config.kernel).launch_key(shape, config, traits)
        found.setdefault(key, ("triton", shape, config, per_token_lens))
    return list(found.values())


def deep_gemm_jobs(shapes: Iterable[Shape], arch: Arch) -> list[tuple[Any, ...]]:
    """Jobs for each (heads, tokens) and for each schedule kernel: one for every 32 rows."""
    found: dict[Any, tuple[Any, ...]] = {}
    for shape in shapes:
        for tokens in peer_tokens(shape, arch):
            rows = cdiv(shape.batch_size * shape.next_n // tokens, 32) * 32
            job = ("deep_gemm", shape.heads, tokens, rows)
            found.setdefault(("kernel", shape.heads, tokens), job)
            found.setdefault(("schedule", rows, tokens == 4), job)
    return list(dict.fromkeys(found.values()))


def _compile_one(kind: str, *job: Any) -> str:
    """In a worker: why it failed, or nothing."""
    try:
        if kind == "triton":
            shape, config, per_token_lens = job
            compile_config(shape, config, usual_traits(shape, per_token_lens=per_token_lens))
        else:
            heads, tokens, rows = job
            module = peers.deep_gemm()
            lens = torch.full((rows, tokens), 64, dtype=torch.int32, device="cuda")
            made = peers.schedule(module, lens, 64)
            peers.call(
                module, torch.zeros(rows, tokens, heads, 128, dtype=torch.uint8, device="cuda").view(
                    torch.float8_e4m3fn),
                torch.zeros(2, 64, 1, 132, dtype=torch.uint8, device="cuda"),
                torch.zeros(rows * tokens, heads, device="cuda"), lens,
                torch.zeros(rows, 1, dtype=torch.int32, device="cuda"), made, 64,
            )  # fmt: skip
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[-300:]}"
    return ""
