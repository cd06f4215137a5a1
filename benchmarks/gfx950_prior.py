"""The gfx950 prior against published figures: calibration, held-out error, and what it says of fusing tokens.

    python benchmarks/gfx950_prior.py [--fit]

Everything printed is published or predicted; nothing here is measured. --fit prints the constants that the calibration
rows give, as they stand in kernels/paged_mqa_logits/gfx950/prior.py.
"""

from __future__ import annotations

import argparse
import math
import statistics

import numpy as np

from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.gfx950 import aiter_model, prior, space
from tilewise.kernels.paged_mqa_logits.gfx950.aiter_model import published
from tilewise.kernels.paged_mqa_logits.gfx950.prior import Constants, Work, predict_us
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, is_valid

ARCH = get_arch("mi355x")
REPORTED = Shape(16, 6, 32, 128, 128, 131072, None, "preshuffled")  # ROCm/aiter#5477


def aiter_work(shape: Shape, flattened: bool = False) -> Work:
    """A launch of aiter's kernel on an MI355X."""
    return aiter_model.work(shape, ARCH, flattened)


def shape_of(row: dict[str, str]) -> Shape | None:
    """The launch of a published row, or None where it does not say enough."""
    fields = [row[name] for name in ("batch_size", "next_n", "heads", "context_len")]
    if not all(fields) or row["ragged"] not in ("", "uniform"):
        return None
    batch_size, next_n, heads, context = (int(float(value)) for value in fields)
    block_kv = int(float(row["block_kv"] or 64))
    return Shape(batch_size, next_n, heads, 128, block_kv, context, None, "preshuffled")


def calibration() -> list[tuple[str, Work, float]]:
    """(what, work, published us) of the rows that the constants are fitted to."""
    found = []
    for row in published("gfx950_paged_mqa_logits.csv"):
        shape = shape_of(row) if row["kernel"] == "aiter-gluon-preshuffle" else None
        if shape and row["source"] == "ROCm/aiter#5477" and row["latency_us"] in ("139.1", "219.2", "362.8"):
            found.append(
                (f"{row['source']} {shape.heads} heads, next_n 6", aiter_work(shape), float(row["latency_us"]))
            )
        elif shape and row["source"] == "ROCm/aiter#5434" and (shape.batch_size, shape.max_context_len) == (1, 4096):
            found.append((f"{row['source']} smallest launch", aiter_work(shape), float(row["latency_us"])))
        elif row["source"] == "ROCm/aiter#5477" and row["tb_per_s"] in ("5.4", "5.40"):
            # A rate at next_n 1 without its shape: taken as the report's batch and context.
            shape = Shape(16, 1, 32, 128, 128, 131072, None, "preshuffled")
            us = shape.context_tokens * 132 / (float(row["tb_per_s"]) * 1e6)
            found.append((f"{row['source']} 5.4 TB/s of K at next_n 1", aiter_work(shape), us))
    return found


def held_out() -> list[tuple[str, str, Work, float]]:
    """(timing method, what, work, published us) of aiter rows that were not calibrated on."""
    used = {round(us, 3) for _, _, us in calibration()}
    found = []
    for row in published("gfx950_paged_mqa_logits.csv"):
        shape = shape_of(row) if row["kernel"] == "aiter-gluon-preshuffle" else None
        if shape is None or not row["latency_us"] or row["timing_method"] in ("host", "profiler"):
            continue  # host rows carry the wrapper, the profiler's are sums over a model's layers
        us = float(row["latency_us"])
        if round(us, 3) in used or shape.heads not in (32, 64, 128):
            continue
        flattened = "flattened" in row["notes"]
        method = row["timing_method"] or "kernel, method not stated"
        what = f"{row['source']} B {shape.batch_size} next_n {shape.next_n} ctx {shape.max_context_len}"
        found.append((method, what + " flattened" * flattened, aiter_work(shape, flattened), us))
    return found


def fit() -> Constants:
    """Least squares of the relative errors over the calibration rows.

    The smallest launch gives the latency; the others give the share of the published bandwidth and the issue scale. A
    share above 1 is not to be had: where the free fit asks for one, the scale is fitted at a share of 1.
    """
    points = calibration()
    smallest = min(us for _, _, us in points)
    large = [(work, us) for _, work, us in points if us > smallest]
    ideal = Constants(issue_scale=1.0, bandwidth_share=1.0, latency_us=0.0)
    times = np.array([us for _, us in large])
    memory = np.array([work.bytes_moved / (ARCH.bandwidth_tbps * 1e6) for work, _ in large]) / times
    issue = np.array([predict_us(work, ARCH, ideal) for work, _ in large]) / times - memory
    scale, inverse = np.linalg.lstsq(np.column_stack([issue, memory]), np.ones(len(large)), rcond=None)[0]
    if inverse < 1:
        scale, inverse = float(issue @ (1 - memory) / (issue @ issue)), 1.0
    return Constants(round(float(scale), 3), round(1 / float(inverse), 3), smallest)


def best_of(shape: Shape, fuse_n: int) -> tuple[Config, float]:
    """Our config of that fusion with the least predicted time."""
    timed = [
        (prior.prior_us(shape, config, ARCH), config)
        for config in candidates(shape, ARCH)
        if config.kernel == "gfx950" and config.fuse_n == fuse_n and is_valid(shape, config, ARCH) is None
    ]
    us, config = min((pair for pair in timed if not math.isnan(pair[0])), key=lambda pair: pair[0])
    return config, us


def gains() -> dict[str, float]:
    """Predicted times of the reported shape, and the gains of fusing."""
    ours_1, ours_6 = best_of(REPORTED, 1)[1], best_of(REPORTED, 6)[1]
    aiter = predict_us(aiter_work(REPORTED), ARCH)
    return {
        "aiter_us": aiter,
        "per_next_n_us": ours_1,
        "fused_us": ours_6,
        "fused_over_per_next_n": ours_1 / ours_6,
        "fused_over_aiter": aiter / ours_6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the constants of the calibration and stop")
    if parser.parse_args().fit:
        print(fit())
        return
    print(f"constants {prior.FITTED}\n\ncalibrated on (published, predicted us, error):")
    for what, work, us in calibration():
        guess = predict_us(work, ARCH)
        print(f"  {what:66s} {us:7.1f} {guess:7.1f} {guess / us - 1:+6.1%}")
    rows = held_out()
    for method in sorted({row[0] for row in rows}):
        errors = []
        print(f"\nnot calibrated on, timed by {method}:")
        for _, what, work, us in (row for row in rows if row[0] == method):
            guess = predict_us(work, ARCH)
            errors.append(abs(guess / us - 1))
            print(f"  {what:66s} {us:7.1f} {guess:7.1f} {guess / us - 1:+6.1%}")
        print(f"  median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {len(errors)} rows")
    found = gains()
    print(f"\n{REPORTED}, predicted:")
    print(f"  aiter's kernel, one program a token      {found['aiter_us']:6.1f} us (published: 139.1)")
    for fuse_n in space.fuse_choices(REPORTED)[::-1]:
        config, us = best_of(REPORTED, fuse_n)
        print(f"  ours, fuse_n {fuse_n}                          {us:6.1f} us  {config}")
    print(f"  fused over our own per-next_n            {found['fused_over_per_next_n']:6.2f}x")
    print(f"  fused over aiter's per-next_n            {found['fused_over_aiter']:6.2f}x")
    print("  the report expects of fusing aiter's kernel: below 1.53x, at least toward 1.27x")


if __name__ == "__main__":
    main()
