"""What share of the GPU's ceilings the best measured launch of each shape reaches, from measured rows.

    python benchmarks/floor_share.py [--arch h200]

The floor of a launch is the larger of its fewest bytes over the read bandwidth and its operations over the fp8 rate
(benchmarks/ceilings.py measures both). Shapes whose floor is under 50 us are left out: a launch costs microseconds
by itself.
"""

from __future__ import annotations

import argparse
import itertools
import math

from measured_rows import Row, load

from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Shape, bytes_moved, floor_us, flops

LEAST_FLOOR_US = 50.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="h200")
    args = parser.parse_args()
    print(table(load(args.arch), args.arch, "the best kernel"))


def table(rows: list[Row], arch_name: str, what: str) -> str:
    """Markdown by heads and next_n."""
    arch = get_arch(arch_name)
    best: dict[Shape, float] = {}
    for row in rows:
        if row.contexts == "uniform" and floor_us(row.shape, arch) >= LEAST_FLOOR_US:
            best[row.shape] = min(row.latency_us, best.get(row.shape, math.inf))
    lines = [
        f"Measured on {arch_name}, {what}, uniform shapes with a floor of at least {LEAST_FLOOR_US:.0f} us; "
        f"ceilings {arch.bandwidth_tbps} TB/s and {arch.fp8_tflops:.0f} TFLOP/s.",
        "",
        "| heads | next_n | shapes | share of floor, geomean | lowest | bandwidth share, best | fp8 share, best |",
        "|---|---|---|---|---|---|---|",
    ]

    def key(shape: Shape) -> tuple[int, int]:
        return shape.heads, shape.next_n

    def line(heads: object, next_n: object, shapes: list[Shape]) -> str:
        shares = [floor_us(shape, arch) / best[shape] for shape in shapes]
        geomean = math.exp(sum(map(math.log, shares)) / len(shares))
        memory = max(bytes_moved(shape) / best[shape] / arch.bandwidth_tbps / 1e6 for shape in shapes)
        compute = max(flops(shape) / best[shape] / arch.fp8_tflops / 1e6 for shape in shapes)
        return (
            f"| {heads} | {next_n} | {len(shapes)} | {geomean:.0%} | {min(shares):.0%} | {memory:.0%} | {compute:.0%} |"
        )

    for (heads, next_n), group in itertools.groupby(sorted(best, key=key), key=key):
        lines.append(line(heads, next_n, list(group)))
    lines.append(line("all", "all", list(best)))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
