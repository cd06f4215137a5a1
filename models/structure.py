"""What follows from a config and the kind of its shape (heads, next_n, head_dim), whatever batch and contexts are.

The products and registers of the Hopper kernel are what kernels/paged_mqa_logits/sm90/resources.py says one config at a
time, for arrays of configs; of another kernel, what comes nearest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.sm90.pieces import first_token, product_count
from tilewise.kernels.paged_mqa_logits.sm90.resources import CONSUMER_REGISTERS, REGISTERS_PER_SM
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, MAX_NEXT_N, SCALE_BYTES, Config
from tilewise.models.columns import CODES, Columns, Floats, Log2, on_grid

STRUCTURE_FEATURES = (
    *CONFIG_FIELDS,
    "groups",  # programs that the query tokens of a request are dealt to
    "idle_tokens",  # share of query slots that hold no token
    "idle_columns",  # columns of the products that stand for no token, over those that do
    "dots",  # matrix products per tile and program
    "own_dots",  # of them, those of one consumer
    "log2_columns",  # dot_n x heads
    "log2_own_columns",  # query tokens of one consumer x heads
    "resident",  # programs that fit one compute unit, by shared memory, registers and warps
    "log2_registers",  # accumulator registers per thread
    "log2_weight_registers",  # registers per thread that would hold the weights of all its tokens
    "log2_shared_memory",
    # What the pieces and registers of the Hopper kernel come to.
    "products",  # products per tile of the consumer that has most
    "all_products",  # of all consumers of a set
    "log2_most_columns",  # query tokens of the consumer that has most, x heads
    "products_ahead",  # of a tile, in flight together; 0 of another kernel
    "keeps_weights",  # whether the weights stay in registers; -1 of another kernel
    "max_even",  # whether half of the relu is a maximum; -1 of another kernel
    "spare_registers",  # share of a consumer's registers that nothing needs
    "token_imbalance",  # query tokens of the consumer that has most, over an even share
)

# What follows from the config alone.
DERIVED = ("hopper", "most_tokens", "products", "all_products", "registers", "token_imbalance")
# Registers of a consumer's thread beside accumulators and weights, as sm90/resources.py has them.
PLAIN_REGISTERS, REGISTERS_PER_PRODUCT = 26.0, 6.0


def derived(config: Config) -> tuple[float, ...]:
    """The numbers of DERIVED: whether it is of the Hopper kernel; query tokens and products of the consumer that has
    most; products of all consumers of a set; registers of a consumer's thread; those tokens over an even share."""
    # A config from a damaged file may say anything; what no launch has is taken for the most that one has.
    fuse_n, dot_n = min(max(config.fuse_n, 1), MAX_NEXT_N), min(max(config.dot_n, 1), MAX_NEXT_N)
    if config.kernel != "sm90":
        count = float(-(-fuse_n // dot_n))
        return 0.0, float(fuse_n), count, count, 1.0, 1.0
    split, consumers, per_sm = (
        min(max(value, 1), MAX_NEXT_N) for value in (config.token_split, config.consumers, config.ctas_per_sm)
    )
    starts = [first_token(fuse_n, dot_n, split, part) for part in range(split + 1)]
    tokens = [end - start for start, end in itertools.pairwise(starts)]
    products = [product_count(own, dot_n) for own in tokens]
    registers = REGISTERS_PER_SM // (128 * (consumers + 1) * per_sm) // 8 * 8
    if per_sm == 1:
        registers = CONSUMER_REGISTERS.get(consumers, registers)
    most = float(max(tokens))
    return 1.0, most, float(max(products)), float(sum(products)), max(registers, 1.0), most * split / fuse_n


_config_values = attrgetter(*CONFIG_FIELDS)
_COLUMNS = (*CONFIG_FIELDS, *DERIVED)


@functools.lru_cache(maxsize=8192)
def _config_row(config: Config) -> bytes:
    """The fields of one config, and what follows from them, as the bytes of float64 numbers."""
    row = [
        CODES[name].get(value, -1.0) if name in CODES else float(value)
        for name, value in zip(CONFIG_FIELDS, _config_values(config), strict=True)
    ]
    return np.array([*row, *derived(config)]).tobytes()


def config_columns(configs: Sequence[Config]) -> dict[str, Any]:
    """The fields of some configs, and DERIVED, as arrays of numbers [len(configs)]."""
    return _columns_of(b"".join(map(_config_row, configs)))


def _columns_of(rows: bytes) -> dict[str, Any]:
    table = np.frombuffer(rows).reshape(-1, len(_COLUMNS))
    return dict(zip(_COLUMNS, np.ascontiguousarray(table.T), strict=True))


def register_columns(heads: Any, config: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Products of a tile in flight (0 of another kernel); whether the weights stay in registers, and whether the relu
    of even columns is a maximum (-1 of another kernel); share of the registers that nothing needs."""
    hopper, products, limit = config["hopper"], config["products"], config["registers"]
    each = config["dot_n"] * (heads / 2.0)
    needed = each + config["most_tokens"] * heads / 4.0 + REGISTERS_PER_PRODUCT * products + PLAIN_REGISTERS
    two = (products > 1.0) & (needed + each <= limit)
    needed = needed + two * each
    keeps = needed <= limit
    other = hopper - 1.0
    return (
        (two + 1.0) * hopper,
        keeps * hopper + other,
        (keeps & (products == 1.0)) * hopper + other,
        (limit - needed) / limit * hopper,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What the features of a launch need to know of some configs; arrays over them, or over rows."""

    features: Floats  # [n, STRUCTURE_FEATURES]
    balanced: Any  # whether the schedule is
    per_sm: Any  # programs of a compute unit, of a balanced schedule
    fuse_n: Any
    tile_kv: Any
    split_kv: Any
    groups: Any
    dots: Any
    own_dots: Any
    sets: Any  # of consumers, that take tiles in turn
    resident: Any  # programs that fit one compute unit
    stage_tokens: Any  # columns of K that the pipeline of one program holds
    tile_columns: Any  # of the products of a tile, x columns of the tile


def structure_of(heads: Any, next_n: Any, head_dim: Any, config: Columns, arch: Arch) -> Structure:
    """The structure of n configs for one kind of shape, or row by row."""
    fuse_n, dot_n, tile_kv, split_kv = config["fuse_n"], config["dot_n"], config["tile_kv"], config["split_kv"]
    # Where warps have roles (consumers > 0), each consumer is a warpgroup of its own, and one more loads. The consumers
    # of a set share a tile and split its tokens; sets take tiles in turn.
    roles = config["consumers"] > 0
    consumers = np.maximum(config["consumers"], 1.0)
    token_split = np.maximum(config["token_split"], 1.0)
    own_threads = config["num_warps"] * arch.warp_size
    threads = np.where(roles, own_threads * (consumers + 1.0), own_threads)
    balanced = config["schedule"] == CODES["schedule"]["balanced"]
    per_sm = np.maximum(config["ctas_per_sm"], 1.0)

    groups = np.ceil(next_n / fuse_n)
    dots = np.ceil(fuse_n / dot_n)
    own_dots = np.ceil(dots / token_split)
    own_tokens = np.minimum(own_dots * dot_n, fuse_n)
    columns = dot_n * heads
    stage_tokens = config["num_stages"] * tile_kv
    held = np.where(roles, 2.0 * dots * dot_n, fuse_n)  # tokens whose queries lie in shared memory
    shared = held * heads * head_dim + stage_tokens * (head_dim + SCALE_BYTES)
    registers = tile_kv * columns / own_threads
    # Two thousand threads and 64K registers per unit hold for every GPU in the table; 40 registers go to addresses.
    resident = np.minimum(arch.shared_memory_bytes / shared, 65536.0 / ((registers + 40.0) * threads))
    resident = np.where(balanced, per_sm, np.clip(np.floor(resident), 1.0, 2048.0 / threads))
    features = on_grid(
        (
            *(config[name] if name != "split_kv" else Log2(split_kv) for name in CONFIG_FIELDS),
            groups,
            groups * fuse_n / next_n - 1.0,
            groups * dots * dot_n / next_n - 1.0,
            dots,
            own_dots,
            Log2(columns),
            Log2(own_tokens * heads),
            resident,
            Log2(registers),
            Log2(own_tokens * heads / 4.0),
            Log2(shared),
            config["products"],
            config["all_products"],
            Log2(config["most_tokens"] * heads),
            *register_columns(heads, config),
            config["token_imbalance"],
        )
    )
    return Structure(
        features=features,
        balanced=balanced,
        per_sm=per_sm,
        fuse_n=fuse_n,
        tile_kv=tile_kv,
        split_kv=split_kv,
        groups=groups,
        dots=dots,
        own_dots=own_dots,
        sets=np.maximum(consumers / token_split, 1.0),
        resident=resident,
        stage_tokens=stage_tokens,
        tile_columns=tile_kv * columns,
    )


def structure_of_configs(
    heads: float, next_n: float, head_dim: float, configs: Sequence[Config], arch: Arch
) -> Structure:
    """The same, remembered: the configs on offer for launches of one kind are few lists."""
    return _remembered(heads, next_n, head_dim, b"".join(map(_config_row, configs)), arch)


@functools.lru_cache(maxsize=256)  # of some 20 KB each
def _remembered(heads: float, next_n: float, head_dim: float, rows: bytes, arch: Arch) -> Structure:
    return structure_of(heads, next_n, head_dim, _columns_of(rows), arch)
