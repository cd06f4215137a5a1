"""Per-next_n against fused-M at equal everything else, from measured rows.

    python benchmarks/fused_vs_per_next_n.py [--arch h200] [--markdown FILE]
    tilewise collect --shapes profile --run-dir RUN      measures the rows anew on the GPU at hand

For each uniform shape with next_n above 1: the best launch with one token per program over the best with more, at the
same orientation, tile, warps and stages (the split is free: it is what keeps the GPU equally full). Above 1, fusing
wins. K requested is what the programs ask for; per-next_n asks next_n times, and the caches absorb most of it.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import defaultdict
from pathlib import Path

from measured_rows import FIRST_PASS, Row, load_plain_triton


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="h200")
    parser.add_argument("--markdown", type=Path, help="write the tables here, too")
    args = parser.parse_args()
    rows = [row for row in load_plain_triton(args.arch) if row.pass_index == FIRST_PASS and row.contexts == "uniform"]
    text = summary(rows, args.arch) + "\n\n" + detail(rows)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")


def pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """(best per-next_n, best fused) for each shape, orientation, tile, warps and stages that has both."""
    best: dict[tuple[object, ...], dict[bool, Row]] = defaultdict(dict)
    for row in rows:
        config = row.config
        key = (row.shape, config.kernel, config.mma_m, config.tile_kv, config.num_warps, config.num_stages)
        fused = config.fuse_n > 1
        if fused not in best[key] or row.latency_us < best[key][fused].latency_us:
            best[key][fused] = row
    return [(found[False], found[True]) for found in best.values() if len(found) == 2]


def summary(rows: list[Row], arch: str) -> str:
    """Markdown: per-next_n / fused by heads, next_n and orientation."""
    lines = [
        f"Measured on {arch}, uniform batches: time of per-next_n / time of fused-M, all else equal.",
        "",
        "| product rows | heads | next_n | shapes | geomean | lowest | highest | fused wins |",
        "|---|---|---|---|---|---|---|---|",
    ]
    key = lambda pair: (pair[0].config.mma_m, pair[0].shape.heads, pair[0].shape.next_n)  # noqa: E731
    for (mma_m, heads, next_n), group in itertools.groupby(sorted(pairs(rows), key=key), key=key):
        # The usual tile stands for a shape; others would count it several times.
        ratios = [
            one.latency_us / fused.latency_us
            for one, fused in group
            if fused.config.tile_kv == 64 and fused.config.num_stages == (5 if mma_m == "kv" else 3)
        ]
        if ratios:
            geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            won = sum(ratio > 1.005 for ratio in ratios)
            lines.append(
                f"| {mma_m} | {heads} | {next_n} | {len(ratios)} | {geomean:.2f} | {min(ratios):.2f} "
                f"| {max(ratios):.2f} | {won} |"
            )
    return "\n".join(lines)


def detail(rows: list[Row]) -> str:
    """Markdown: the reported shape and its neighbours, with traffic."""
    lines = [
        "Batch 16, context 131072, cached tokens as the rows of the product, tile 64, 4 warps, 5 stages:",
        "",
        "| heads | next_n | fuse_n | split_kv | time us | K requested GB | requested TB/s | per-next_n / fused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one, fused in sorted(pairs(rows), key=lambda pair: (pair[0].shape.heads, pair[0].shape.next_n)):
        shape, config = one.shape, one.config
        if (shape.batch_size, shape.max_context_len, shape.block_kv) != (16, 131072, 64):
            continue
        if (config.mma_m, config.tile_kv, config.num_warps, config.num_stages) != ("kv", 64, 4, 5):
            continue
        for row in (one, fused):
            ratio = f"{one.latency_us / fused.latency_us:.2f}" if row is fused else ""
            lines.append(
                f"| {shape.heads} | {shape.next_n} | {row.config.fuse_n} | {row.config.split_kv} "
                f"| {row.latency_us:.1f} | {row.requested_bytes / 1e9:.2f} | {row.requested_tbps:.2f} | {ratio} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
