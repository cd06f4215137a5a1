"""What the model is held against: a rule that fits in a line, and the best config of the nearest measured shape."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, cdiv, is_valid
from tilewise.models.judging import Judged
from tilewise.models.measurements import Measurements
from tilewise.models.transfer import transfer

SIZES = ("batch_size", "next_n", "heads", "head_dim", "block_kv", "max_context_len", "mean_context_len")


def single_rule(shape: Shape, arch: Arch) -> Config:
    """The best rule that fits in a line, for an H200: K rows are M, 64-token tiles, 5 stages, 4 warps, about 4 programs
    per compute unit; two tokens fused from 64 heads on, all of them below."""
    fuse_n = min(2, shape.next_n) if shape.heads >= 64 else shape.next_n
    programs = shape.batch_size * shape.next_n / fuse_n
    split_kv = max(1, int(4 * arch.compute_units // max(programs, 1e-9)))
    return Config(
        fuse_n=fuse_n,
        dot_n=min(2, fuse_n),
        split_kv=min(split_kv, max(1, cdiv(shape.max_context_len, 64))),
        num_stages=5,
    )


def rule_pick(one: Judged, arch: Arch) -> int:
    """The rule's config where it is on offer, else the one most like it."""
    config = single_rule(one.shape, arch)
    if config in one.configs and is_valid(one.shape, config, arch) is None:
        return one.configs.index(config)
    return transfer(config, one.shape, one.shape, one.configs)


def nearest_pick(one: Judged, measured: Measurements, best: Mapping[int, Config]) -> int:
    """What is most like the best config of the nearest shape among `best`."""
    near = min(best, key=lambda at: (shape_distance(measured.shapes[at], one.shape), at))
    return transfer(best[near], measured.shapes[near], one.shape, one.configs)


def best_configs(measured: Measurements) -> dict[int, Config]:
    """The fastest config of each shape with a time."""
    best = {}
    for shape_id in np.unique(measured.shape_id).tolist():
        cells = measured.cells(shape_id)
        times = measured.latency_us[cells]
        if not np.isnan(times).all():
            best[shape_id] = measured.configs[measured.config_id[cells][int(np.nanargmin(times))]]
    return best


def shape_distance(a: Shape, b: Shape) -> float:
    """How far apart two shapes are, in doublings summed over the sizes."""
    return float(sum(abs(np.log2(max(1, getattr(a, s)) / max(1, getattr(b, s)))) for s in SIZES))
