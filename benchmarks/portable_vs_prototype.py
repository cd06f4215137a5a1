"""The portable kernel beside the prototype that it grew from, over 72 shapes, interleaved in one run. Needs a GPU.

    python benchmarks/portable_vs_prototype.py --out FILE.csv      measure
    python benchmarks/portable_vs_prototype.py --summary           read the committed rows

The prototype runs with the config that was found best for it by its own sweep (prototype/plain_triton_configs.csv); the
portable kernel with the best three of its candidates, found right before. A ratio is prototype / portable.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.kernels.arch import Arch
    from tilewise.kernels.shape_sets import Target
    from tilewise.kernels.timing import PagePool

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "portable_vs_prototype_h200.csv"
WIDTH, TABLE = 131072, 2048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="measure, and write the rows here")
    parser.add_argument("--summary", action="store_true", help="summarise the committed rows")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.out:
        measure(args.out, args.rounds)
    return summarise(args.out or RESULTS)


def summarise(path: Path) -> int:
    """Print the ratios; 0 when the portable kernel is within 5 % on at least 60 shapes."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    ratios = [float(row["prototype_us"]) / float(row["portable_us"]) for row in rows]
    geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    within = sum(ratio >= 1 / 1.05 for ratio in ratios)
    print(f"prototype / portable over {len(rows)} shapes: geomean {geomean:.3f}, lowest {min(ratios):.3f}, ", end="")
    print(f"highest {max(ratios):.3f}; within 5 % or faster on {within}")
    return 0 if within >= 60 else 1


def measure(out: Path, rounds: int) -> None:
    from tilewise.kernels.arch import current_arch
    from tilewise.kernels.collect import FIRST_PASS, Step, _compile_ahead
    from tilewise.kernels.shape_sets import grid_72
    from tilewise.kernels.timing import PagePool

    arch = current_arch()
    with (HERE / "prototype" / "plain_triton_configs.csv").open() as file:
        swept = [row for row in csv.DictReader(file) if row["found"] == "sweep"]
    best = {row["entry"]: {name: int(row[name]) for name in list(row)[2:]} for row in swept}
    targets = list(grid_72())
    _compile_ahead([Step(t, FIRST_PASS) for t in targets], arch, argparse.Namespace(jobs=16, budget=None, seed=0))
    pool = PagePool(131072, 64, 128)
    results = []
    for target in targets:
        shape = target.shape
        old = best[f"{shape.heads}/{shape.max_context_len // 1024}k/{shape.batch_size}/{shape.next_n}"]
        results.append(duel(target, pool, arch, old, rounds))
        print(*list(results[-1].values())[:7], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)


def duel(target: Target, pool: PagePool, arch: Arch, old: dict[str, int], rounds: int) -> dict[str, Any]:
    """Find our best three candidates for the target, then time them and the prototype in turn; one result row."""
    import torch
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tilewise.kernels.paged_mqa_logits.spec import Config, candidates
    from tilewise.kernels.registry import kernel_source_hash
    from tilewise.kernels.timing import Timing, make_problem, time_candidates, time_interleaved

    sys.path.insert(0, str(HERE / "prototype"))
    from plain_triton import prototype

    shape = target.shape
    problem = make_problem(shape, target.context_lens, pool, arch, logits_width=WIDTH)
    timings = time_candidates(problem, candidates(shape, arch), arch, rounds=5)
    good = sorted((t for t in timings if t.status == "correct"), key=lambda t: t.median_us)[:3]
    tables = torch.zeros(len(problem.block_tables), shape.batch_size, TABLE, dtype=torch.int32, device="cuda")
    tables[:, :, : problem.block_tables[0].shape[1]] = torch.stack(problem.block_tables)
    groups = shape.next_n // old["fuse_n"]
    kv8, ks = pool.kv_cache.view(torch.float8_e4m3fn), pool.kv_cache.view(torch.float32)
    descriptor = TensorDescriptor(kv8, [pool.num_blocks * 66, 128], [128, 1], [64, 128])

    def run_prototype(turn: int) -> None:
        prototype[(groups * old["split_kv"] * shape.batch_size,)](
            problem.q, descriptor if old["tma"] else kv8, ks, tables[turn % len(tables)], problem.context_lens,
            problem.weights, problem.out, shape.next_n, groups, old["split_kv"], F=old["fuse_n"], G=old["dot_n"],
            H=shape.heads, D=128, BN=old["tile_kv"], TMA=old["tma"], STAGES=old["num_stages"], BTS=TABLE, OUTS=WIDTH,
            num_warps=old["num_warps"],
        )  # fmt: skip

    def ours(config: Config) -> Callable[[int], None]:
        return lambda turn: problem.launch(config, turn)

    run_prototype(0)
    theirs = Timing(good[0].config)
    for timing in good:
        timing.samples_us = []
    runs = [(theirs, run_prototype), *((timing, ours(timing.config)) for timing in good)]
    time_interleaved(runs, problem.launches, rounds, flush=problem.needs_flush(arch))
    best = min(good, key=lambda t: t.median_us)
    return {
        "heads": shape.heads,
        "context_len": shape.max_context_len,
        "batch_size": shape.batch_size,
        "next_n": shape.next_n,
        "prototype_us": round(theirs.median_us, 3),
        "portable_us": round(best.median_us, 3),
        "portable_config": str(best.config),
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "kernel_hash": kernel_source_hash("portable"),
        "measured_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    sys.exit(main())
