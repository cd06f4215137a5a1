"""What the model is told about a shape and a config. numpy only, since the serving process computes these.

Every feature is counted in units of the GPU's own facts (programs per compute unit, microseconds at its bandwidth and
its product rate), so that a model trained on one GPU says something about another. All are rounded to a grid, which
makes them, and so every pick, the same on machines whose log2 differs in the last bit.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, SCALE_BYTES, SHAPE_FIELDS, Config, Shape
from tilewise.models.structure import DERIVED, derived, register_columns

Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = Mapping[str, Any]  # field name to a number or an array of numbers

GRID = 1024.0  # features are rounded to 1/GRID

# Raise this whenever a feature changes its meaning without changing its name: bundles of another version are refused.
FEATURE_VERSION = 3

# The words of the text fields, by code. New words go at the end; one that is not listed is coded -1.
WORDS: dict[str, tuple[str, ...]] = {
    "cache_layout": ("flat", "preshuffled"),
    "kernel": ("portable", "sm90", "gfx950", "aiter", "deep_gemm"),
    "mma_m": ("kv", "heads"),
    "schedule": ("even", "balanced"),
    "mfma": ("", "16x16x128", "32x32x64", "16x16x32", "32x32x16"),
    "epilogue": ("", "max", "packed", "add", "mix"),
    "program_order": ("", "launched", "xcd"),
}
_CODES = {field: {word: float(code) for code, word in enumerate(words)} for field, words in WORDS.items()}

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
CONFIG_FEATURES = (
    *CONFIG_FIELDS,
    "groups",  # programs that the query tokens of a request are dealt to
    "idle_tokens",  # share of query slots that hold no token
    "idle_columns",  # columns of the products that stand for no token, over those that do
    "dots",  # matrix products per tile and program
    "own_dots",  # of them, those of one consumer
    "log2_columns",  # dot_n x heads
    "log2_own_columns",  # query tokens of one consumer x heads
    "log2_programs_per_unit",
    "resident",  # programs that fit one compute unit, by shared memory, registers and warps
    "log2_waves",
    "tail_fill",  # share of the last wave that is busy, over all waves
    "log2_tiles_per_program",
    "tile_fill",  # share of the tiles' columns that hold context
    "idle_splits",  # share of split_kv without any tile
    "log2_program_tokens",  # context tokens x query tokens of one program
    "log2_segments",  # requests and token groups that one program of a balanced schedule crosses; 1 of another
    "log2_most_segments",  # of them, those of the program that crosses most
    "log2_unit_tiles",  # matrix products that the busiest compute unit runs, over an even share
    "log2_registers",  # accumulator registers per thread
    "log2_weight_registers",  # registers per thread that would hold the weights of all its tokens
    "log2_shared_memory",
    "log2_requested_us",  # K bytes asked for by all programs, at the GPU's bandwidth
    "log2_bytes_in_flight",  # K bytes that the pipeline of a full wave keeps in flight, over those of the context
    "log2_steps",  # products that one consumer runs one after another
    "log2_estimate",  # estimate_us over the floor
    # What the pieces and registers of the Hopper kernel come to (structure.py).
    "products",  # products per tile of the consumer that has most
    "all_products",  # of all consumers of a set
    "log2_most_columns",  # query tokens of the consumer that has most, x heads
    "products_ahead",  # of a tile, in flight together; 0 of another kernel
    "keeps_weights",  # whether the weights stay in registers; -1 of another kernel
    "max_even",  # whether half of the relu is a maximum; -1 of another kernel
    "spare_registers",  # share of a consumer's registers that nothing needs
    "token_imbalance",  # query tokens of the consumer that has most, over an even share
    # What reading the query tokens costs.
    "log2_q_share",  # bytes of q that all programs read, over those of K
    "log2_runs",  # requests that one program reads q of
    "log2_q_bytes",  # of q, that one program reads
)
FEATURES = SHAPE_FEATURES + CONFIG_FEATURES


def feature_spec_hash() -> str:
    """Sixteen hex digits over the names, the words and the version: a bundle of another value is refused."""
    text = json.dumps([FEATURE_VERSION, FEATURES, WORDS, GRID], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_words(field: str, words: Sequence[str]) -> Floats:
    """Codes of a text column."""
    codes = _CODES[field]
    return np.array([codes.get(word, -1.0) for word in words])


def shape_columns(shape: Shape) -> dict[str, Any]:
    """The fields of one shape as numbers."""
    values: dict[str, Any] = {name: float(getattr(shape, name)) for name in SHAPE_FIELDS if name != "cache_layout"}
    values["cache_layout"] = _CODES["cache_layout"].get(shape.cache_layout, -1.0)
    return values


_config_values = attrgetter(*CONFIG_FIELDS)
_COLUMNS = (*CONFIG_FIELDS, *DERIVED)


@functools.lru_cache(maxsize=8192)
def _config_row(config: Config) -> bytes:
    """The fields of one config, and what follows from them, as the bytes of float64 numbers."""
    row = [
        _CODES[name].get(value, -1.0) if name in _CODES else float(value)
        for name, value in zip(CONFIG_FIELDS, _config_values(config), strict=True)
    ]
    return np.array([*row, *derived(config)]).tobytes()


def config_columns(configs: Sequence[Config]) -> dict[str, Any]:
    """The fields of some configs, and DERIVED, as arrays of numbers [len(configs)]."""
    table = np.frombuffer(b"".join(map(_config_row, configs))).reshape(len(configs), len(_COLUMNS))
    return dict(zip(_COLUMNS, np.ascontiguousarray(table.T), strict=True))


def shape_features(shape: Columns, arch: Arch) -> Floats:
    """[n, len(SHAPE_FEATURES)], or one row from plain numbers. Sizes of 0 count as 1."""
    batch, mean, longest = shape["batch_size"], shape["mean_context_len"], shape["max_context_len"]
    read_us, product_us = _limits_us(shape, arch)
    columns = (
        _log2(batch),
        shape["next_n"],
        _log2(shape["heads"]),
        _log2(shape["head_dim"]),
        _log2(shape["block_kv"]),
        shape["cache_layout"],
        _log2(longest),
        _log2(mean),
        _log2(longest) - _log2(mean),
        _log2(batch * shape["next_n"] / arch.compute_units, 1e-6),
        _log2(read_us, 1e-6),
        _log2(product_us, 1e-6),
        _log2(product_us / read_us, 1e-6),
        _log2(batch * mean * (shape["head_dim"] + SCALE_BYTES) / arch.last_level_cache_bytes, 1e-6),
    )
    return _on_grid(columns)


def config_features(shape: Columns, config: Columns, arch: Arch) -> Floats:
    """[n, len(CONFIG_FEATURES)] for n configs and one shape, or row by row."""
    heads, row_bytes = shape["heads"], shape["head_dim"] + SCALE_BYTES
    longest = np.maximum(shape["max_context_len"], 1.0)
    mean = np.maximum(shape["mean_context_len"], 1.0)
    batch = np.maximum(shape["batch_size"], 1.0)
    fuse_n, dot_n, tile_kv, split_kv = config["fuse_n"], config["dot_n"], config["tile_kv"], config["split_kv"]
    units = arch.compute_units
    # Where warps have roles (consumers > 0), each consumer is a warpgroup of its own, and one more loads. The consumers
    # of a set share a tile and split its tokens; sets take tiles in turn.
    roles = config["consumers"] > 0
    consumers = np.maximum(config["consumers"], 1.0)
    token_split = np.maximum(config["token_split"], 1.0)
    sets = np.maximum(consumers / token_split, 1.0)
    own_threads = config["num_warps"] * arch.warp_size
    threads = np.where(roles, own_threads * (consumers + 1.0), own_threads)
    balanced = config["schedule"] == _CODES["schedule"]["balanced"]
    per_sm = np.maximum(config["ctas_per_sm"], 1.0)

    groups = np.ceil(shape["next_n"] / fuse_n)
    dots = np.ceil(fuse_n / dot_n)
    own_dots = np.ceil(dots / token_split)
    own_tokens = np.minimum(own_dots * dot_n, fuse_n)
    columns_ = dot_n * heads
    # A balanced schedule has as many programs as fit, and deals all tiles to them evenly.
    programs = np.where(balanced, per_sm * units, batch * groups * split_kv)
    per_unit = programs / units

    tiles = np.ceil(longest / tile_kv)
    mean_tiles = np.ceil(mean / tile_kv)
    all_tiles = batch * groups * mean_tiles
    dealt = np.ceil(all_tiles / programs)
    tiles_per_program = np.where(balanced, dealt, np.ceil(tiles / split_kv))
    busy_splits = np.where(balanced, 1.0, np.ceil(tiles / tiles_per_program))
    segments = np.where(balanced, np.maximum(batch * groups / programs, 1.0), 1.0)
    # Even shares of equal requests may end where requests end; others cross one request more. About: as if every
    # program had the largest share, while the last ones have a tile less.
    even = (shape["max_context_len"] == shape["mean_context_len"]) & (
        (np.mod(mean_tiles, dealt) == 0) | (np.mod(dealt, mean_tiles) == 0)
    )
    crossed = np.where(even, np.ceil(dealt / mean_tiles), np.floor((dealt - 2.0) / mean_tiles) + 2.0)
    most_segments = np.where(balanced, np.maximum(crossed, 1.0), 1.0)
    held = np.where(roles, 2.0 * dots * dot_n, fuse_n)  # tokens whose queries lie in shared memory
    shared = held * heads * shape["head_dim"] + config["num_stages"] * tile_kv * row_bytes
    registers = tile_kv * columns_ / own_threads
    # Two thousand threads and 64K registers per unit hold for every GPU in the table; 40 registers go to addresses.
    resident = np.minimum(arch.shared_memory_bytes / shared, 65536.0 / ((registers + 40.0) * threads))
    resident = np.where(balanced, per_sm, np.clip(np.floor(resident), 1.0, 2048.0 / threads))
    waves = per_unit / resident
    mean_steps = np.where(balanced, dealt, np.maximum(mean_tiles / split_kv, 1.0))
    working = np.where(balanced, np.minimum(programs, all_tiles), batch * groups * np.minimum(split_kv, mean_tiles))
    steps = np.ceil(tiles_per_program / sets) * own_dots
    even_share = all_tiles * dots / units
    busiest = np.ceil(working / units) * mean_steps * dots
    requested_us = batch * groups * mean * row_bytes / (arch.bandwidth_tbps * 1e6)
    in_flight = np.minimum(per_unit, resident) * config["num_stages"] * tile_kv * row_bytes * units

    # A program reads the query tokens anew for each request that it works on.
    runs = np.where(
        balanced,
        np.minimum(batch * groups + programs, all_tiles),
        batch * groups * np.minimum(split_kv, mean_tiles),
    )
    q_bytes = runs * fuse_n * heads * shape["head_dim"]

    read_us, product_us = _limits_us(shape, arch)
    unit_rate = arch.fp8_tflops * 1e6 / units  # flops per microsecond of one compute unit
    step_us = 2.0 * tile_kv * columns_ * shape["head_dim"] / unit_rate
    estimate = np.maximum(read_us, busiest * step_us / 0.5) + steps * 0.15
    columns = (
        *(config[name] if name != "split_kv" else _log2(split_kv) for name in CONFIG_FIELDS),
        groups,
        groups * fuse_n / shape["next_n"] - 1.0,
        groups * dots * dot_n / shape["next_n"] - 1.0,
        dots,
        own_dots,
        _log2(columns_),
        _log2(own_tokens * heads),
        _log2(per_unit, 1e-6),
        resident,
        _log2(waves, 1e-6),
        waves / np.ceil(waves),
        _log2(tiles_per_program),
        np.where(balanced, mean / (mean_tiles * tile_kv), longest / (tiles_per_program * busy_splits * tile_kv)),
        1.0 - busy_splits / split_kv,
        _log2(tiles_per_program * tile_kv * fuse_n),
        _log2(segments),
        _log2(most_segments),
        _log2(busiest / even_share, 1e-6),
        _log2(registers),
        _log2(own_tokens * heads / 4.0),
        _log2(shared),
        _log2(requested_us, 1e-6),
        _log2(in_flight / (batch * mean * row_bytes), 1e-6),
        _log2(steps),
        _log2(estimate / np.maximum(read_us, product_us), 1e-6),
        config["products"],
        config["all_products"],
        _log2(config["most_tokens"] * heads),
        *register_columns(heads, config),
        config["token_imbalance"],
        _log2(q_bytes / (batch * groups * mean * row_bytes), 1e-6),
        _log2(runs / working),
        _log2(q_bytes / working),
    )
    return _on_grid(columns)


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
    read_us = np.maximum(moved, 1.0) / (arch.bandwidth_tbps * 1e6)
    return read_us, np.maximum(flops, 1.0) / (arch.fp8_tflops * 1e6)


def _log2(value: Any, least: float = 1.0) -> Any:
    return np.log2(np.maximum(value, least))


def _on_grid(columns: Sequence[Any]) -> Floats:
    """Columns, arrays of one length or numbers, to rows, rounded. Columns stay whole in memory, which is fast."""
    length = next((column.shape for column in columns if np.ndim(column)), ())
    table = np.empty((len(columns), *length))
    for at, column in enumerate(columns):
        table[at] = column
    table *= GRID
    np.rint(table, out=table)
    table /= GRID
    return table.T
