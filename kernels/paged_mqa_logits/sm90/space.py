"""What the Hopper kernel accepts and offers, and the resources that a config comes to. No torch, no triton."""

from __future__ import annotations

import dataclasses
import functools

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.sm90.pieces import (
    QUAD,
    TILE_KV,
)
from tilewise.kernels.paged_mqa_logits.sm90.resources import (
    estimated_registers,
    registers_per_thread,
    shared_memory_bytes,
)
from tilewise.kernels.paged_mqa_logits.spec import CacheLayout, Config, Shape, cdiv

READS = frozenset(
    (
        "kernel", "fuse_n", "dot_n", "tile_kv", "split_kv", "num_stages", "schedule", "consumers",
        "token_split", "ctas_per_sm",
    )
)  # fmt: skip

MAX_COLUMNS = 256  # of one product
MOST_GROUP_COLUMNS = 512  # query tokens x heads of a group that is offered
MAX_EVEN_GRID = 1 << 20  # workgroups; up to here the kernel finds its part by fp32 products


def runs_on(arch: Arch) -> bool:
    """Hopper only: later GPUs have no warpgroup products."""
    return arch.isa == "sm90"


def why_invalid(shape: Shape, config: Config, arch: Arch) -> str | None:
    """Why the Hopper kernel cannot launch this, or None."""
    if shape.cache_layout != "flat":
        return f"the Hopper kernel reads flat pages only, got cache_layout {shape.cache_layout!r}"
    if shape.block_kv < 32:
        return (
            "the Hopper kernel needs pages of at least 32 tokens, got block_kv "
            f"{shape.block_kv}: the scales of fewer are less than the 128 bytes that a TMA box must start at"
        )
    if shape.heads < 16:
        return f"the Hopper kernel needs at least 16 heads, got {shape.heads}"
    if config.tile_kv != TILE_KV:
        return f"tile_kv must be {TILE_KV}, got {config.tile_kv}"
    if config.num_warps != 4:
        return f"num_warps must be 4, a warpgroup, got {config.num_warps}"
    if not 1 <= config.consumers <= 4:
        return f"consumers must be 1 to 4, got {config.consumers}"
    if config.token_split < 1 or config.consumers % config.token_split:
        return f"token_split must divide consumers ({config.consumers}), got {config.token_split}"
    products = cdiv(shape.next_n % config.fuse_n or config.fuse_n, config.dot_n)
    if config.token_split > products:
        return f"token_split must be at most {products}, the products of the smallest group, got {config.token_split}"
    sets = config.consumers // config.token_split
    if config.num_stages < 2 or config.num_stages % sets:
        return (
            f"num_stages must be a multiple of consumers / token_split ({sets}), and at least 2, got "
            f"{config.num_stages}"
        )
    if config.dot_n > QUAD:
        return f"dot_n must be at most {QUAD}, got {config.dot_n}"
    if config.dot_n * shape.heads > MAX_COLUMNS:
        return f"dot_n x heads must be at most {MAX_COLUMNS}, got {config.dot_n * shape.heads}"
    if config.schedule == "balanced" and config.split_kv != 1:
        return f"split_kv must be 1 where the schedule is balanced, got {config.split_kv}"
    grid = shape.batch_size * config.groups(shape.next_n) * config.split_kv
    if config.schedule == "even" and grid > MAX_EVEN_GRID:
        return f"an even schedule takes at most {MAX_EVEN_GRID} workgroups, got {grid}"
    if not 1 <= config.ctas_per_sm <= 4:
        return f"ctas_per_sm must be 1 to 4, got {config.ctas_per_sm}"
    needed = estimated_registers(shape, config)
    limit = registers_per_thread(config)
    if needed > limit:
        return f"needs about {needed} registers a thread, {limit} are left with these consumers and ctas_per_sm"
    used = shared_memory_bytes(shape, config) * config.ctas_per_sm
    if used > arch.shared_memory_bytes:
        return f"needs about {used} bytes of shared memory, {arch.name} has {arch.shared_memory_bytes}"
    return None


# Context tokens in all below which the plain kernel's shorter start wins: about what a multiprocessor reads meanwhile.
SMALL_TOKENS = 65536
# And up to which a ring of few stages wins: setting up the barriers of one takes about 0.05 us.
MEDIUM_TOKENS = 4 * SMALL_TOKENS


def _stages(shape: Shape) -> tuple[int, int]:
    # Of one or two sets of consumers, and of three.
    if shape.context_tokens <= SMALL_TOKENS:
        return 4, 6
    return (6, 6) if shape.context_tokens <= MEDIUM_TOKENS else (8, 9)


def candidates(shape: Shape, arch: Arch) -> list[Config]:
    """The grid that is measured and chosen from, before `is_valid`."""
    found = []
    small = shape.context_tokens <= SMALL_TOKENS
    two, three = _stages(shape)
    widest = _widest(shape)
    halves = dict.fromkeys((shape.next_n, cdiv(shape.next_n, 2), cdiv(widest, 2), 1))
    for fuse_n in halves:
        whole = fuse_n == widest
        dots = [dot for dot in (4, 2, 1) if dot <= fuse_n and dot * shape.heads <= 128] or [1]
        for dot_n in dots[:2] if whole else dots[:1]:
            # (consumers, token_split, num_stages)
            structures = [(2, 1, two), (3, 1, three)]
            if whole:
                structures += [(2, 2, two), (3, 3, two)]
            for structure in structures if whole or fuse_n > 1 or small else []:
                found.append(_config(fuse_n, dot_n, *structure))
        if whole and fuse_n >= 4 and shape.heads == 64:  # a whole piece of four in one product
            found += [_config(fuse_n, 4, 2, split, two) for split in (1, 2)]
        if fuse_n == 1:
            found.append(_config(1, 1, 1, 1, 4, ctas_per_sm=3))
        if small:  # no count over the batch: a shorter start
            for per_sm in (1, 2):
                parts = max(1, shape.batch_size) * cdiv(shape.next_n, fuse_n)
                tiles = cdiv(shape.max_context_len, TILE_KV)
                split_kv = max(1, min(per_sm * arch.compute_units // parts, tiles))
                found.append(_config(fuse_n, dots[0], 2, 1, two, split_kv=split_kv))
                found.append(_config(fuse_n, dots[0], 1, 1, 4, split_kv=split_kv))
    return found


def _widest(shape: Shape) -> int:
    """Query tokens of a group: all, or half where shared memory and two consumers' registers have no room for all."""
    return shape.next_n if shape.next_n * shape.heads <= MOST_GROUP_COLUMNS else cdiv(shape.next_n, 2)


def default_config(shape: Shape, arch: Arch) -> Config | None:
    """The best structure by the columns of a tile, measured on an H200; None for short launches."""
    if shape.context_tokens <= SMALL_TOKENS:
        return None  # the portable kernel's default is the better one there
    return _default_of(
        shape.next_n, shape.heads, shape.head_dim, shape.block_kv, shape.cache_layout, _stages(shape), arch
    )


@functools.lru_cache(maxsize=4096)  # of balanced schedules, so that batch and contexts make no other difference
def _default_of(
    next_n: int,
    heads: int,
    head_dim: int,
    block_kv: int,
    cache_layout: CacheLayout,
    stages: tuple[int, int],
    arch: Arch,
) -> Config | None:
    shape = Shape(1, next_n, heads, head_dim, block_kv, cache_layout=cache_layout)
    two, three = stages
    columns = shape.next_n * shape.heads
    dot_n = next(dot for dot in (4, 2, 1) if dot == 1 or (dot <= shape.next_n and dot * shape.heads <= 128))
    if columns <= 64:
        ordered = [(1, 1, 1, 1, 4, 3)] if shape.next_n == 1 else []
        ordered += [(shape.next_n, dot_n, 3, 1, three, 1)]
    elif columns <= 192:
        ordered = [(shape.next_n, dot_n, 3, 1, three, 1)]
    elif columns <= 256:
        ordered = [(shape.next_n, dot_n, 2, 1, two, 1)]
    elif columns <= 384:
        ordered = [(shape.next_n, dot_n, 3, 3, two, 1)]
    else:
        ordered = [(shape.next_n, dot_n, 2, 2, two, 1)]
    ordered.append((shape.next_n, dot_n, 2, 1, two, 1))
    half = cdiv(shape.next_n, 2)
    if _widest(shape) < shape.next_n:
        # Half of them, if that is enough for two consumers to split, or a quarter.
        fuse_n, token_split = (half, 2) if half * shape.heads > 384 else (cdiv(half, 2), 1)
        ordered = [(fuse_n, min(fuse_n, dot_n), 2, token_split, two, 1)]
    ordered.append((half, min(half, dot_n), 2, 1, two, 1))
    ordered += [(1, 1, 2, 1, 4, 1)]
    for fuse_n, dot, consumers, token_split, num_stages, ctas_per_sm in ordered:
        config = _config(fuse_n, dot, consumers, token_split, num_stages, ctas_per_sm=ctas_per_sm)
        if why_invalid(shape, config, arch) is None:
            return config
    return None


def as_offered(shape: Shape, config: Config) -> Config:
    """The same with the ring of a launch this short, if that is a shorter one; it takes at most 0.25 us less."""
    if config.ctas_per_sm > 1 or config.consumers == 1:
        return config
    stages = _stages(shape)[config.consumers // config.token_split == 3]
    return config if config.num_stages <= stages else _with_stages(config, stages)


@functools.lru_cache(maxsize=4096)
def _with_stages(config: Config, num_stages: int) -> Config:
    return dataclasses.replace(config, num_stages=num_stages)


@functools.lru_cache(maxsize=16384)  # making one anew takes longer than all else that is done with it
def _config(
    fuse_n: int, dot_n: int, consumers: int, token_split: int, num_stages: int, *,
    split_kv: int = 0, ctas_per_sm: int = 1,
) -> Config:  # fmt: skip
    return Config(
        kernel="sm90", fuse_n=fuse_n, dot_n=dot_n, tile_kv=TILE_KV, num_warps=4, num_stages=num_stages,
        consumers=consumers, token_split=token_split, ctas_per_sm=ctas_per_sm,
        schedule="even" if split_kv else "balanced", split_kv=split_kv or 1,
    )  # fmt: skip
