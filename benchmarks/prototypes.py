"""Ours beside the two prototypes that it grew from, plain Triton and Gluon, interleaved in one run. Needs an H200.

    python benchmarks/prototypes.py --out FILE.csv      measure
    python benchmarks/prototypes.py --summary [--json]  read the committed rows

The 80 launches of benchmarks/peers.py and next_n 3, 5, 7, 8 of the large ones. Ours run with the configs fixed by
earlier runs (results/peers_choice_h200.json), and as `select` picks; the prototypes with the configs that their own
sweeps found best, or where those measured none ("tried"), with several, of which the fastest counts. Everything is
checked against the reference before it is timed. A ratio is prototype / ours.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent / "tests"))
import checkout  # type: ignore[import-not-found]  # noqa: E402, F401

RESULTS = HERE / "results" / "prototypes_h200.csv"
GROUPS = ("main", "odd")
PROTOTYPES = ("gluon_hopper", "plain_triton")  # modules in prototype/
LIMIT = 1.02  # how much slower than the faster prototype a launch of ours may be
# `role`: a prototype, or of ours "+" joined: ours (the fixed choice), portable (the best of that kernel), select.
COLUMNS = (
    "entry", "group", "heads", "next_n", "batch_size", "contexts", "max_context_len", "attempt", "role", "config",
    "status", "reason", "max_error", "latency_us", "latency_p20_us", "latency_p80_us", "rounds", "measured_at",
    "device_name", "driver", "torch_version", "triton_version", "kernel_hash", "git_commit", "run_id",
)  # fmt: skip


def read_configs(prototype: str) -> dict[str, list[dict[str, Any]]]:
    """Of each entry the configs of a prototype."""
    found: dict[str, list[dict[str, Any]]] = {}
    with (HERE / "prototype" / f"{prototype}_configs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            values = {name: int(text) for name, text in row.items() if text and name not in ("entry", "found")}
            found.setdefault(row["entry"], []).append({**values, "found": row["found"]})
    return found


# -- launching the prototypes


def padded(batch_size: int) -> int:
    """Requests that the Gluon prototype's scan has room for."""
    return max(64, 1 << (batch_size - 1).bit_length())


def gluon_launch(config: dict[str, Any], problem: Any) -> Callable[[int], Any]:
    """A launch of the Gluon prototype."""
    import torch
    from gluon_hopper import FP32_LAYOUT, KV_LAYOUT, prototype
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, next_n, heads, dim = problem.q.shape
    pages = problem.kv_cache.shape[0]
    columns = config["dot_n"] * heads
    cache = problem.kv_cache
    k_desc = TensorDescriptor(cache.view(torch.float8_e4m3fn), [pages * 66, 128], [128, 1], [64, 128], KV_LAYOUT)
    scale_desc = TensorDescriptor(cache.view(torch.float32).view(-1), [pages * 2112], [1], [64], FP32_LAYOUT)
    q = problem.q.view(batch * next_n * heads, dim)
    q_desc = TensorDescriptor(q, list(q.shape), [dim, 1], [columns, dim], KV_LAYOUT)
    weights = problem.weights.view(-1)
    w_desc = TensorDescriptor(weights, [weights.numel()], [1], [columns], FP32_LAYOUT)
    units = torch.cuda.get_device_properties(0).multi_processor_count
    options = {"maxnreg": config["maxnreg"]} if "maxnreg" in config else {}
    consumers = config["consumers"]
    tables = problem.block_tables

    def go(turn: int) -> Any:
        return prototype[(units * config["workgroups_per_sm"],)](
            k_desc, scale_desc, q_desc, w_desc, tables[turn % len(tables)], problem.context_lens, problem.out, batch,
            tables[0].stride(0), problem.out.stride(0), N=next_n, H=heads, G=config["dot_n"], STAGES=config["stages"],
            QB=2, NC=consumers, PF=config["page_ids"], BP=padded(batch), CREG=240 if consumers < 3 else 160,
            TP=config["in_flight"], RELU=config["relu"], TS=config["token_split"], num_warps=4, **options,
        )  # fmt: skip

    return go


def plain_launch(config: dict[str, Any], problem: Any) -> Callable[[int], Any]:
    """A launch of the plain-Triton prototype."""
    import torch
    from plain_triton import prototype
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, next_n, heads, dim = problem.q.shape
    pages = problem.kv_cache.shape[0]
    k, scales = problem.kv_cache.view(torch.float8_e4m3fn), problem.kv_cache.view(torch.float32)
    if config["tma"]:
        k = TensorDescriptor(k, [pages * 66, 128], [128, 1], [64, 128])
    groups = next_n // config["fuse_n"]
    tables = problem.block_tables

    def go(turn: int) -> Any:
        return prototype[(groups * config["split_kv"] * batch,)](
            problem.q, k, scales, tables[turn % len(tables)], problem.context_lens, problem.weights, problem.out,
            next_n, groups, config["split_kv"], F=config["fuse_n"], G=config["dot_n"], H=heads, D=dim,
            BN=config["tile_kv"], TMA=config["tma"], STAGES=config["num_stages"], BTS=tables[0].stride(0),
            OUTS=problem.out.stride(0), num_warps=config["num_warps"],
        )  # fmt: skip

    return go


LAUNCH = {"gluon_hopper": gluon_launch, "plain_triton": plain_launch}


# -- compiling ahead


def compile_jobs(todo: Sequence[Any], ours: Any, theirs: Any) -> list[tuple[Any, ...]]:
    """One job for each binary."""
    from peers_variants import triton_jobs

    pairs = [(entry.shape, config) for entry in todo for config in ours[entry.name]]
    found: dict[Any, tuple[Any, ...]] = {job: ("ours", *job[1:3]) for job in triton_jobs(pairs)}
    for prototype, configs in theirs.items():
        for entry in todo:
            for config in configs[entry.name]:
                constants = tuple(value for name, value in config.items() if name not in ("found", "split_kv"))
                sizes = (width(entry),) if prototype == "plain_triton" else (padded(entry.shape.batch_size),)
                key = (prototype, entry.shape.heads, entry.shape.next_n, constants, *sizes)
                found.setdefault(key, (prototype, entry, config))
    return list(found.values())


def compile_one(job: tuple[Any, ...]) -> str:
    """In a worker, fill the disk cache by a launch over nothing cached: why it failed, or nothing."""
    import torch

    sys.path.insert(0, str(HERE / "prototype"))
    role, what, config = job
    try:
        if role == "ours":
            from tilewise.kernels.paged_mqa_logits.launch import compile_config
            from tilewise.kernels.paged_mqa_logits.traits import usual_traits

            compile_config(what, config, usual_traits(what))
        else:
            LAUNCH[role](config, empty_problem(what))(0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{role} {what} {config}: {type(error).__name__}: {str(error).strip()[-300:]}"
    return ""


def width(entry: Any) -> int:
    """Columns of the output: whole pages, since the prototypes write those."""
    longest: int = max(entry.target.context_lens)
    return max(256, 64 * math.ceil(longest / 64))


def empty_problem(entry: Any) -> Any:
    """Tensors of the entry's strides whose contexts are empty."""
    import torch

    from tilewise.kernels.timing import Problem

    shape = entry.shape
    rows, stride = shape.batch_size * shape.next_n, 256 * math.ceil(width(entry) / 256)
    return Problem(
        shape=shape,
        q=torch.zeros(shape.batch_size, shape.next_n, shape.heads, 128, device="cuda").to(torch.float8_e4m3fn),
        kv_cache=torch.zeros(8, 64, 1, 132, dtype=torch.uint8, device="cuda"),
        weights=torch.zeros(rows, shape.heads, device="cuda"),
        context_lens=torch.zeros(shape.batch_size, dtype=torch.int32, device="cuda"),
        block_tables=[torch.zeros(shape.batch_size, width(entry) // 64, dtype=torch.int32, device="cuda")],
        out=torch.zeros(16, device="cuda").as_strided((1, 1), (stride, 1)),
        expected=torch.empty(0),
        work=torch.empty(0),
        footprint_bytes=0,
        launches=1,
    )


# -- measuring


def measure(args: argparse.Namespace) -> int:
    """Time the entries that the file of rows does not have yet; 0 when none is left."""
    import peers_rows
    from peers_entries import entries
    from peers_measure import POOL_PAGES
    from peers_variants import fixed_configs

    from tilewise.kernels.arch import current_arch
    from tilewise.kernels.collect import _environment
    from tilewise.kernels.timing import PagePool

    sys.path.insert(0, str(HERE / "prototype"))
    deadline = time.time() + args.time_limit
    arch = current_arch()
    done = {row["entry"] for row in read(args.out)}
    todo = [entry for entry in entries() if entry.group in GROUPS and entry.name not in done]
    if args.names:
        todo = [entry for entry in todo if entry.name in args.names]
    theirs = {prototype: read_configs(prototype) for prototype in PROTOTYPES}
    choices = peers_rows.read_choices(args.choices)
    ours = {entry.name: fixed_configs(entry, choices, True, arch) for entry in todo}
    jobs = compile_jobs(todo, ours, theirs)
    begun = time.time()
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        failed = [reason for reason in pool.map(compile_one, jobs, chunksize=2) if reason]
    print(f"{len(jobs)} launches compiled in {time.time() - begun:.0f} s, {len(failed)} failed", flush=True)
    for line in failed[:10]:
        print("  " + line, flush=True)
    environment = _environment(arch, args.commit)
    pages = PagePool(POOL_PAGES, 64, 128)
    for index, entry in enumerate(todo):
        if time.time() > deadline:
            print(f"{len(todo) - index} entries left", flush=True)
            return 3
        configs = {prototype: theirs[prototype][entry.name] for prototype in PROTOTYPES}
        rows = list(duel(entry, pages, arch, configs, ours[entry.name], 1, args.rounds))
        # A launch beyond the limit is timed once more, twice as long, before it counts.
        if beyond([{**row, "latency_us": _number(row["latency_us"])} for row in rows]):
            rows += duel(entry, pages, arch, configs, ours[entry.name], 2, 2 * args.rounds)
        append(args.out, [{**environment, **row} for row in rows])
        times = ", ".join(f"{row['role']} {row['latency_us'] or row['status']}" for row in rows)
        print(f"{entry.name}: {times}", flush=True)
    return 0


def duel(
    entry: Any, pages: Any, arch: Any, theirs: dict[str, list[dict[str, Any]]], ours: dict[Any, str], attempt: int,
    rounds: int,
) -> Iterable[dict[str, Any]]:  # fmt: skip
    """Check and time all of one entry in turn; its rows."""
    import peers_rows

    from tilewise.kernels.registry import kernel_source_hash
    from tilewise.kernels.timing import Timing, check, make_problem, time_interleaved

    problem = make_problem(
        entry.shape, entry.target.context_lens, pages, arch, logits_width=width(entry), seed=attempt
    )  # fmt: skip
    runs: list[tuple[str, str, Timing, Callable[[int], Any]]] = []
    for config, roles in ours.items():
        timing = check(problem, config, arch)
        runs.append((roles, json.dumps(config.to_dict()), timing, functools.partial(problem.launch, config)))
    some = next(iter(ours))
    for prototype, configs in theirs.items():
        for config in configs:
            timing = Timing(some)
            go = check_prototype(problem, timing, prototype, config)
            runs.append((prototype, json.dumps(config), timing, go))
    good = [(timing, go) for _, _, timing, go in runs if timing.status == "correct"]
    time_interleaved(good, problem.launches, rounds, flush=problem.needs_flush(arch), seed=attempt)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for role, config_text, timing, _ in runs:
        yield {
            "entry": entry.name,
            "group": entry.group,
            "heads": entry.shape.heads,
            "next_n": entry.shape.next_n,
            "batch_size": entry.shape.batch_size,
            "contexts": entry.target.contexts,
            "max_context_len": entry.shape.max_context_len,
            "attempt": attempt,
            "role": role,
            "config": config_text,
            **peers_rows.timing_columns(timing),
            "measured_at": now,
            "kernel_hash": None if role in PROTOTYPES else kernel_source_hash(timing.config.kernel),
        }


def check_prototype(problem: Any, timing: Any, prototype: str, config: dict[str, Any]) -> Callable[[int], Any]:
    """A prototype's launch, run once on poisoned memory and compared with the reference; says so in `timing`."""
    import torch

    from tilewise.kernels.paged_mqa_logits.reference import worst_error
    from tilewise.kernels.timing import MAX_ELEMENT_ERROR, MAX_NORM_ERROR

    problem.out.fill_(float("nan"))
    try:
        go = LAUNCH[prototype](config, problem)
        go(0)
        torch.cuda.synchronize()
    except Exception as error:
        timing.status, timing.reason = "compile", f"{type(error).__name__}: {str(error).strip()[-300:]}"
        return lambda turn: None
    # It leaves columns behind the last page of a context as they are.
    scored = torch.where(problem.expected.isfinite(), problem.out, problem.expected)
    element, norm = worst_error(scored, problem.expected, problem.work)
    timing.max_error = element if math.isfinite(element) else None
    if not (element <= MAX_ELEMENT_ERROR and norm <= MAX_NORM_ERROR):
        timing.status, timing.reason = "correctness", f"error per element {element:.3g}, norm-wise {norm:.3g}"
    return go


# -- rows and what they say


LABELS = {
    "ours": "fixed configs, against the faster prototype",
    "select": "what `select` picks, against the faster prototype",
}


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def read(path: Path) -> list[dict[str, Any]]:
    """The rows; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{**row, "latency_us": _number(row["latency_us"])} for row in csv.DictReader(file)]


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows, of which `COLUMNS` are written."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())


def ratios(rows: Sequence[dict[str, Any]], role: str) -> dict[str, float]:
    """Of each entry the faster prototype's time over ours, by the last attempt that timed both."""
    found: dict[str, float] = {}
    for attempt in sorted({int(row["attempt"]) for row in rows}):
        for entry in dict.fromkeys(row["entry"] for row in rows):
            own = [row for row in rows if row["entry"] == entry and int(row["attempt"]) == attempt]
            own = [row for row in own if row["latency_us"]]
            theirs = [row["latency_us"] for row in own if row["role"] in PROTOTYPES]
            mine = [row["latency_us"] for row in own if role in row["role"].split("+")]
            if theirs and mine:
                found[entry] = min(theirs) / mine[0]
    return found


def beyond(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a launch of ours is slower than the limit allows."""
    return any(ratio < 1 / LIMIT for role in ("ours", "select") for ratio in ratios(rows, role).values())


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything by name."""
    result: dict[str, Any] = {
        "entries": len({row["entry"] for row in rows}),
        "failed_launches": sum(row["status"] != "correct" for row in rows),
    }
    for name in LABELS:
        found = ratios(rows, name)
        if not found:
            continue
        lowest = min(found, key=lambda entry: found[entry])
        result[name] = {
            "launches": len(found),
            "geomean": math.exp(sum(map(math.log, found.values())) / len(found)),
            "min": found[lowest],
            "min_entry": lowest,
            "beyond_2pct": sorted(entry for entry, ratio in found.items() if ratio < 1 / LIMIT),
        }
    return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as a table for the documentation."""
    found = figures(rows)
    lines = ["| prototype / ours | launches | geomean | lowest | at | beyond 2 % |", "|---|---|---|---|---|---|"]
    for name, label in LABELS.items():
        if name in found:
            one = found[name]
            lines.append(
                f"| {label} | {one['launches']} | {one['geomean']:.3f} | {one['min']:.3f} | {one['min_entry']} "
                f"| {len(one['beyond_2pct'])} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Measure, or summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="measure, and add the rows to this file")
    parser.add_argument("--summary", action="store_true", help="summarise the committed rows")
    parser.add_argument("--json", action="store_true", help="summary: print JSON")
    parser.add_argument("--rounds", type=int, default=11, help="timed replays (default 11)")
    parser.add_argument("--names", nargs="*", help="only these entries")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds after which no further entry is begun")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that compile")
    parser.add_argument("--choices", type=Path, default=HERE / "results" / "peers_choice_h200.json")
    parser.add_argument("--commit", help="commit to record, where the source tree has no git")
    args = parser.parse_args()
    if not args.out and not args.summary:
        parser.error("give --out FILE to measure, or --summary")
    code = measure(args) if args.out else 0
    rows = read(args.out or RESULTS)
    found = figures(rows)
    print(json.dumps(found, indent=1) if args.json else table(rows))
    whole = all(found.get(name, {}).get("launches") == found["entries"] for name in LABELS)
    return code or int(not whole or any(found[name]["beyond_2pct"] for name in LABELS))


if __name__ == "__main__":
    sys.exit(main())
