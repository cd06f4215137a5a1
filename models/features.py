"""What the model is told about a shape and a config. numpy only, since the serving process computes these.

Every feature is counted in units of the GPU's own facts (programs per compute unit, microseconds at its bandwidth and
its product rate), so that a model trained on one GPU says something about another. All are rounded to a grid, which
makes them, and so every pick, the same on machines whose log2 differs in the last bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Config, Shape
from tilewise.models.columns import GRID, WORDS, Columns, Floats, Log2, on_grid, shape_columns
from tilewise.models.structure import STRUCTURE_FEATURES, Structure, structure_of, structure_of_configs

# Raise this whenever a feature changes its meaning without changing its name: bundles of another version are refused.
FEATURE_VERSION = 4

SHAPE_FEATURES = (
    "log2_batch_size",
    "next_n",
    "log2_heads",
    "log2_head_dim",
    "log2_block_kv",
    "cache_layout",
    "log2_max_context_len",
    "log2_mean_context_len",
    "log2_raggedness",  # longest over mean context
    "log2_rows_per_unit",  # batch x next_n over compute units
    "log2_read_us",  # fewest bytes at the GPU's bandwidth
    "log2_product_us",  # flops at the GPU's product rate
    "log2_intensity",  # product time over read time
    "log2_cache_fill",  # K bytes over the last-level cache
)
# Of a config at a shape, beside those of its structure.
LAUNCH_FEATURES = (
    "log2_programs_per_unit",
    "log2_waves",
    "tail_fill",  # share of the last wave that is busy, over all waves
    "log2_tiles_per_program",
    "tile_fill",  # share of the tiles' columns that hold context
    "idle_splits",  # share of split_kv without any tile
    "log2_program_tokens",  # context tokens x query tokens of one program
    "log2_segments",  # requests and token groups that one program of a balanced schedule crosses; 1 of another
    "log2_most_segments",  # of them, those of the program that crosses most
    "log2_unit_tiles",  # matrix products that the busiest compute unit runs, over an even share
    "log2_requested_us",  # K bytes asked for by all programs, at the GPU's bandwidth
    "log2_bytes_in_flight",  # K bytes that the pipeline of a full wave keeps in flight, over those of the context
    "log2_steps",  # products that one consumer runs one after another
    "log2_estimate",  # estimate_us over the floor
    # What reading the query tokens costs.
    "log2_q_share",  # bytes of q that all programs read, over those of K
    "log2_runs",  # requests that one program reads q of
    "log2_q_bytes",  # of q, that one program reads
)
FEATURES = SHAPE_FEATURES + STRUCTURE_FEATURES + LAUNCH_FEATURES
# Where a new kind begins.
BOUNDS = (len(SHAPE_FEATURES), len(SHAPE_FEATURES) + len(STRUCTURE_FEATURES))


def feature_spec_hash() -> str:
    """Sixteen hex digits over the names, the words and the version: a bundle of another value is refused."""
    text = json.dumps([FEATURE_VERSION, FEATURES, WORDS, GRID], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def structure_at(shape: Shape, configs: Sequence[Config], arch: Arch) -> Structure:
    """What of the configs does not depend on batch and contexts; one object for the same configs and kind of shape."""
    return structure_of_configs(float(shape.heads), float(shape.next_n), float(shape.head_dim), configs, arch)


def features_of(shape: Shape, configs: Sequence[Config], arch: Arch, own: Structure | None = None) -> Floats:
    """[len(configs), len(FEATURES)] of one launch shape; `own` is their `structure_at`, where it is at hand."""
    numbers = shape_columns(shape)
    own = structure_at(shape, configs, arch) if own is None else own
    rows = np.empty((len(FEATURES), len(configs))).T
    rows[:, : len(SHAPE_FEATURES)] = shape_features(numbers, arch)
    rows[:, len(SHAPE_FEATURES) : -len(LAUNCH_FEATURES)] = own.features
    rows[:, -len(LAUNCH_FEATURES) :] = _launch_features(numbers, own, arch)
    return rows


def shape_features(shape: Columns, arch: Arch) -> Floats:
    """[n, len(SHAPE_FEATURES)], or one row from plain numbers. Sizes of 0 count as 1."""
    batch, mean, longest = shape["batch_size"], shape["mean_context_len"], shape["max_context_len"]
    read_us, product_us = _limits_us(shape, arch)
    columns = (
        Log2(batch),
        shape["next_n"],
        Log2(shape["heads"]),
        Log2(shape["head_dim"]),
        Log2(shape["block_kv"]),
        shape["cache_layout"],
        Log2(longest),
        Log2(mean),
        np.log2(np.maximum(longest, 1.0)) - np.log2(np.maximum(mean, 1.0)),
        Log2(batch * shape["next_n"] / arch.compute_units, 1e-6),
        Log2(read_us, 1e-6),
        Log2(product_us, 1e-6),
        Log2(product_us / read_us, 1e-6),
        Log2(batch * mean * (shape["head_dim"] + SCALE_BYTES) / arch.last_level_cache_bytes, 1e-6),
    )
    return on_grid(columns)


def config_features(shape: Columns, config: Columns, arch: Arch) -> Floats:
    """[n, structure's and launch's features] for n configs and one shape, or row by row."""
    own = structure_of(shape["heads"], shape["next_n"], shape["head_dim"], config, arch)
    return np.hstack([own.features, _launch_features(shape, own, arch)])


def _launch_features(shape: Columns, own: Structure, arch: Arch) -> Floats:
    heads, head_dim, row_bytes = shape["heads"], shape["head_dim"], shape["head_dim"] + SCALE_BYTES
    longest = np.maximum(shape["max_context_len"], 1.0)
    mean = np.maximum(shape["mean_context_len"], 1.0)
    batch = np.maximum(shape["batch_size"], 1.0)
    balanced, tile_kv, split_kv = own.balanced, own.tile_kv, own.split_kv
    units = arch.compute_units

    parts = batch * own.groups
    # A balanced schedule has as many programs as fit, and deals all tiles to them evenly.
    programs = np.where(balanced, own.per_sm * units, parts * split_kv)
    per_unit = programs / units
    tiles = np.ceil(longest / tile_kv)
    mean_tiles = np.ceil(mean / tile_kv)
    all_tiles = parts * mean_tiles
    dealt = np.ceil(all_tiles / programs)
    tiles_per_program = np.where(balanced, dealt, np.ceil(tiles / split_kv))
    busy_splits = np.where(balanced, 1.0, np.ceil(tiles / tiles_per_program))
    segments = np.where(balanced, np.maximum(parts / programs, 1.0), 1.0)
    # Even shares of equal requests may end where requests end; others cross one request more. About: as if every
    # program had the largest share, while the last ones have a tile less.
    even = (shape["max_context_len"] == shape["mean_context_len"]) & (
        (np.mod(mean_tiles, dealt) == 0) | (np.mod(dealt, mean_tiles) == 0)
    )
    crossed = np.where(even, np.ceil(dealt / mean_tiles), np.floor((dealt - 2.0) / mean_tiles) + 2.0)
    most_segments = np.where(balanced, np.maximum(crossed, 1.0), 1.0)
    waves = per_unit / own.resident
    mean_steps = np.where(balanced, dealt, np.maximum(mean_tiles / split_kv, 1.0))
    split_parts = parts * np.minimum(split_kv, mean_tiles)
    working = np.where(balanced, np.minimum(programs, all_tiles), split_parts)
    steps = np.ceil(tiles_per_program / own.sets) * own.own_dots
    even_share = all_tiles * own.dots / units
    busiest = np.ceil(working / units) * mean_steps * own.dots
    requested_us = parts * mean * row_bytes / (arch.bandwidth_tbps * 1e6)
    in_flight = np.minimum(per_unit, own.resident) * own.stage_tokens * row_bytes * units

    # A program reads the query tokens anew for each request that it works on.
    runs = np.where(balanced, np.minimum(parts + programs, all_tiles), split_parts)
    q_bytes = runs * own.fuse_n * heads * head_dim

    read_us, product_us = _limits_us(shape, arch)
    unit_rate = arch.fp8_tflops * 1e6 / units  # flops per microsecond of one compute unit
    step_us = 2.0 * own.tile_columns * head_dim / unit_rate
    estimate = np.maximum(read_us, busiest * step_us / 0.5) + steps * 0.15
    return on_grid(
        (
            Log2(per_unit, 1e-6),
            Log2(waves, 1e-6),
            waves / np.ceil(waves),
            Log2(tiles_per_program),
            np.where(balanced, mean / (mean_tiles * tile_kv), longest / (tiles_per_program * busy_splits * tile_kv)),
            1.0 - busy_splits / split_kv,
            Log2(tiles_per_program * tile_kv * own.fuse_n),
            Log2(segments),
            Log2(most_segments),
            Log2(busiest / even_share, 1e-6),
            Log2(requested_us, 1e-6),
            Log2(in_flight / (batch * mean * row_bytes), 1e-6),
            Log2(steps),
            Log2(estimate / np.maximum(read_us, product_us), 1e-6),
            Log2(q_bytes / (parts * mean * row_bytes), 1e-6),
            Log2(runs / working),
            Log2(q_bytes / working),
        )
    )


def floors_us(shape: Columns, arch: Arch) -> Floats:
    """spec.floor_us, for arrays of shapes."""
    return np.asarray(np.maximum(*_limits_us(shape, arch)), dtype=np.float64)


def _limits_us(shape: Columns, arch: Arch) -> tuple[Any, Any]:
    """Microseconds of the fewest bytes at full bandwidth, and of the flops at the full product rate; both above 0."""
    heads, head_dim, next_n = shape["heads"], shape["head_dim"], shape["next_n"]
    rows = shape["batch_size"] * next_n
    tokens = shape["batch_size"] * shape["mean_context_len"]
    moved = rows * heads * (head_dim + 4.0) + tokens * (head_dim + SCALE_BYTES + 4.0 * next_n + 4.0 / shape["block_kv"])
    flops = 2.0 * next_n * heads * head_dim * tokens
    least: Any = max if isinstance(flops, float) else np.maximum  # of one shape, numpy takes ten times as long
    return least(moved, 1.0) / (arch.bandwidth_tbps * 1e6), least(flops, 1.0) / (arch.fp8_tflops * 1e6)
