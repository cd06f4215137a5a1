"""The portable kernel beside the prototype that it grew from, over 72 shapes, interleaved in one run. Needs a GPU.

    python benchmarks/portable_vs_prototype.py --out FILE.csv      measure
    python benchmarks/portable_vs_prototype.py --summary           read the committed rows

The prototype runs with the config that was found best for it by its own sweep (prototype/best_configs.csv); the
portable kernel with the best three of its candidates, found right before. A ratio is prototype / portable.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    import torch
    from tilewise.kernels.arch import current_arch
    from tilewise.kernels.collect import FIRST_PASS, Step, _compile_ahead
    from tilewise.kernels.paged_mqa_logits.spec import candidates
    from tilewise.kernels.shape_sets import grid_72
    from tilewise.kernels.timing import PagePool, Timing, make_problem, time_candidates, time_interleaved
    from triton.tools.tensor_descriptor import TensorDescriptor

    sys.path.insert(0, str(HERE / "prototype"))
    from kernel import prototype

    arch = current_arch()
    with (HERE / "prototype" / "best_configs.csv").open() as file:
        best = {
            tuple(int(r[k]) for k in ("heads", "context_len", "batch_size", "next_n")): {k: int(v) for k, v in r.items()}
            for r in csv.DictReader(file)
        }
    targets = list(grid_72())
    _compile_ahead([Step(t, FIRST_PASS) for t in targets], arch, argparse.Namespace(jobs=16, budget=None, seed=0))
    pool = PagePool(131072, 64, 128)
    kv8, ks = pool.kv_cache.view(torch.float8_e4m3fn), pool.kv_cache.view(torch.float32)
    descriptor = TensorDescriptor(kv8, [pool.num_blocks * 66, 128], [128, 1], [64, 128])
    rows: list[dict[str, Any]] = []
    for target in targets:
        shape = target.shape
        problem = make_problem(shape, target.context_lens, pool, arch, logits_width=WIDTH)
        timings = time_candidates(problem, candidates(shape, arch), arch, rounds=5)
        good = sorted((t for t in timings if t.status == "correct"), key=lambda t: t.median_us)[:3]
        old = best[shape.heads, shape.max_context_len, shape.batch_size, shape.next_n]
        tables = torch.zeros(len(problem.block_tables), shape.batch_size, TABLE, dtype=torch.int32, device="cuda")
        tables[:, :, : problem.block_tables[0].shape[1]] = torch.stack(problem.block_tables)
        groups = shape.next_n // old["fuse_n"]
        launch = prototype[(groups * old["split_kv"] * shape.batch_size,)]
        kv = descriptor if old["tma"] else kv8

        def go_prototype(turn: int) -> None:
            launch(
                problem.q, kv, ks, tables[turn % len(tables)], problem.context_lens, problem.weights, problem.out,
                shape.next_n, groups, old["split_kv"], F=old["fuse_n"], G=old["dot_n"], H=shape.heads, D=128,
                BN=old["tile_kv"], TMA=old["tma"], STAGES=old["num_stages"], BTS=TABLE, OUTS=WIDTH,
                num_warps=old["num_warps"],
            )  # fmt: skip

        go_prototype(0)
        proto = Timing(good[0].config)
        runs: list[tuple[Timing, Callable[[int], None]]] = [(proto, go_prototype)]
        for timing in good:
            timing.samples_us = []
            runs.append((timing, lambda turn, config=timing.config: problem.launch(config, turn)))  # type: ignore[misc]
        small = problem.footprint_bytes / len(problem.block_tables) < arch.last_level_cache_bytes
        time_interleaved(runs, problem.launches, rounds, flush=small)
        ours = min(good, key=lambda t: t.median_us)
        rows.append(
            {
                "heads": shape.heads,
                "context_len": shape.max_context_len,
                "batch_size": shape.batch_size,
                "next_n": shape.next_n,
                "prototype_us": round(proto.median_us, 3),
                "portable_us": round(ours.median_us, 3),
                "portable_config": str(ours.config),
                "device": torch.cuda.get_device_name(),
                "triton": __import__("triton").__version__,
            }
        )
        print(*list(rows[-1].values())[:7], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
