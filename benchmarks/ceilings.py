"""What this GPU can do at most: read bandwidth, and dense fp8 products. Prints JSON; needs a GPU.

    python benchmarks/ceilings.py [--out FILE]

The floor of a launch (tilewise.kernels.paged_mqa_logits.spec.floor_us) divides by these two rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # Every program sums its own stripe; nothing but the reads costs anything.
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK, num_stages=4):
        acc += tl.load(x_ptr + start.to(tl.int64) + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc))


def median_us(launch: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a launch, microseconds, each by its own events."""
    launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def measure() -> dict[str, Any]:
    """Read bandwidth (TB/s) and dense fp8 rate (TFLOP/s) of the current GPU, with its name and the versions."""
    x = torch.randn(1 << 30, device="cuda")  # 4 GiB
    out = torch.empty(4096, device="cuda")
    read = median_us(lambda: _sum_kernel[(4096,)](x, out, x.numel(), BLOCK=8192, num_warps=8))
    size = 8192
    a = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    product = median_us(
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    )  # fmt: skip
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_tbps": round(x.nbytes / read / 1e6, 3),
        "fp8_tflops": round(2 * size**3 / product / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    result = measure()
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
