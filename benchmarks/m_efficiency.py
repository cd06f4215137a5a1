"""The M-efficiency curve: time per unit of work at 32, 64 and 128 heads and equal K traffic, from measured rows.

    python benchmarks/m_efficiency.py [--arch h200] [--markdown FILE]
    tilewise collect --shapes m-curve --run-dir RUN      measures the rows anew on the GPU at hand

One launch reads the same K whatever the number of heads, and does work in proportion to it. If the matrix unit is
better filled by more rows, the time per head falls. Rows are per-next_n launches (fuse_n 1), the best tile, split and
stages for each; "heads" has heads x tokens as the rows (M) of the product, "kv" has cached tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measured_rows import FIRST_PASS, Row, load_plain_triton

HEADS = (32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="h200")
    parser.add_argument("--markdown", type=Path, help="write the table here, too")
    args = parser.parse_args()
    text = table(load_plain_triton(args.arch), args.arch)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")


def table(rows: list[Row], arch: str) -> str:
    """Markdown of the curve for next_n 1 and 6 at batch 16 and 131,072 tokens of context."""
    lines = [
        f"Measured on {arch}: batch 16, context 131072, head_dim 128, pages of 64, fuse_n 1, cold cache, graph replay.",
        "",
        "| next_n | product rows | heads | time us | us per 32 heads | efficiency | K requested TB/s | TFLOP/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for next_n in (1, 6):
        for mma_m in ("heads", "kv"):
            found = {heads: best(rows, next_n, heads, mma_m) for heads in HEADS}
            unit = found[32].latency_us
            for heads in HEADS:
                row = found[heads]
                per_unit = row.latency_us * 32 / heads
                lines.append(
                    f"| {next_n} | {mma_m} | {heads} | {row.latency_us:.1f} | {per_unit:.1f} | {unit / per_unit:.2f} "
                    f"| {row.requested_tbps:.2f} | {row.tflops:.0f} |"
                )
    return "\n".join(lines)


def best(rows: list[Row], next_n: int, heads: int, mma_m: str) -> Row:
    return min(
        (
            row
            for row in rows
            if row.pass_index == FIRST_PASS and row.contexts == "uniform" and row.config.fuse_n == 1
            if row.config.mma_m == mma_m and row.shape.next_n == next_n and row.shape.heads == heads
            if (row.shape.batch_size, row.shape.max_context_len, row.shape.block_kv) == (16, 131072, 64)
        ),
        key=lambda row: row.latency_us,
    )


if __name__ == "__main__":
    main()
