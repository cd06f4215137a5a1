"""What the portable Triton kernel accepts and offers."""

from __future__ import annotations

import functools

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, cdiv

READS = frozenset(
    ("kernel", "fuse_n", "dot_n", "mma_m", "tile_kv", "split_kv", "num_warps", "num_stages", "waves_per_eu")
)

# Programs aimed at, per compute unit. Measured on an H200: 4 is the best single rule; short and very long contexts
# want fewer and more.
SPLIT_TARGETS = (4, 1, 2, 8, 16)
# And where heads are the rows.
FEW_TARGETS = (4, 8)
# (tile_kv, target) of the grid's splits.
GRID_SPLITS = tuple((tile_kv, per_unit) for tile_kv in (64, 128) for per_unit in SPLIT_TARGETS)
MAX_SPLIT = 1 << 16
MAX_DOT_COLUMNS = 256  # one wgmma covers at most 256 columns; more spills accumulators


def runs_on(arch: Arch) -> bool:
    """Any GPU with an fp8 dot in Triton, and Triton's interpreter."""
    # Not gfx942: its fp8 has another zero point and range (fnuz), and would read these bytes as other numbers.
    return arch.isa in ("cpu", "sm89", "gfx950") or (arch.isa[:2] == "sm" and int(arch.isa[2:]) >= 90)


def why_invalid(shape: Shape, config: Config, arch: Arch) -> str | None:
    """Why the portable kernel cannot launch this, or None."""
    if shape.cache_layout != "flat":
        return f"the portable kernel reads flat pages only, got cache_layout {shape.cache_layout!r}"
    if shape.block_kv < 16:
        return f"the portable kernel needs pages of at least 16 tokens, got block_kv {shape.block_kv}"
    if config.mma_m not in ("kv", "heads"):
        return f"mma_m must be 'kv' or 'heads', got {config.mma_m!r}"
    columns = config.dot_n * shape.heads
    if columns > MAX_DOT_COLUMNS:
        return f"dot_n x heads must be at most {MAX_DOT_COLUMNS}, got {columns}"
    if config.mma_m == "heads" and columns < 16:
        return f"dot_n x heads must be at least 16 where heads are the rows, got {columns}"
    if config.tile_kv > 256:
        return f"tile_kv must be at most 256, got {config.tile_kv}"
    if config.split_kv > MAX_SPLIT:
        return f"split_kv must be at most {MAX_SPLIT}, got {config.split_kv}"
    if not 1 <= config.num_stages <= 8:
        return f"num_stages must be 1 to 8, got {config.num_stages}"
    if config.waves_per_eu and arch.vendor != "amd":
        return f"waves_per_eu is for AMD GPUs and must be 0 on {arch.name}, got {config.waves_per_eu}"
    if not 0 <= config.waves_per_eu <= 8:
        return f"waves_per_eu must be 0 to 8, got {config.waves_per_eu}"
    used = shared_memory_bytes(shape, config)
    if used > arch.shared_memory_bytes:
        return f"needs about {used} bytes of shared memory, {arch.name} has {arch.shared_memory_bytes}"
    return None


def shared_memory_bytes(shape: Shape, config: Config) -> int:
    """Shared memory that a program needs at least: its queries, and `num_stages` tiles of K with their scales."""
    queries = config.fuse_n * shape.heads * shape.head_dim
    return queries + config.num_stages * config.tile_kv * (shape.head_dim + 4)


def fuse_choices(next_n: int) -> list[int]:
    """For each number of groups, the smallest fuse_n that makes it: anything between only adds idle tokens."""
    return sorted({cdiv(next_n, groups) for groups in range(1, next_n + 1)})


def split_for(shape: Shape, fuse_n: int, tile_kv: int, arch: Arch, per_unit: int) -> int:
    """split_kv that makes about `per_unit` programs per compute unit, at most one tile each."""
    others = max(1, shape.batch_size) * cdiv(shape.next_n, fuse_n)
    return max(1, min(per_unit * arch.compute_units // others, cdiv(shape.max_context_len, tile_kv)))


def candidates(shape: Shape, arch: Arch) -> list[Config]:
    """What is measured and chosen from, before `is_valid`."""
    return _beside_hopper(shape, arch) if _hopper_serves(shape, arch) else grid(shape, arch)


def grid(shape: Shape, arch: Arch) -> list[Config]:
    """Every config that was the best of some launch of this kernel."""
    splits = tuple(
        (fuse_n, *(split_for(shape, fuse_n, tile_kv, arch, per_unit) for tile_kv, per_unit in GRID_SPLITS))
        for fuse_n in fuse_choices(shape.next_n)
    )
    return list(_grid(splits, shape.heads, arch.vendor))


@functools.lru_cache(maxsize=1024)  # contexts that differ often have the same splits
def _grid(splits: tuple[tuple[int, ...], ...], heads: int, vendor: str) -> list[Config]:
    found = []
    for fuse_n, *of_grid in splits:
        split_kv = dict(zip(GRID_SPLITS, of_grid, strict=True))
        # One token per product inside a fused program was never the best where two fit; see docs/log.md.
        dots = [d for d in (2, 4) if d <= fuse_n and d * heads <= MAX_DOT_COLUMNS] or [1]
        for dot_n in dots:
            # (mma_m, tile_kv, num_warps, num_stages)
            for mma_m, tile_kv, num_warps, num_stages in (
                ("kv", 64, 4, 5),
                ("kv", 64, 4, 3),
                ("kv", 128, 4, 3),
                ("kv", 128, 8, 3),
            ):
                for per_unit in SPLIT_TARGETS:
                    split = split_kv[tile_kv, per_unit]
                    found.append(_config(fuse_n, dot_n, mma_m, tile_kv, split, num_warps, num_stages, vendor))
            for per_unit in FEW_TARGETS:
                found.append(_config(fuse_n, dot_n, "heads", 64, split_kv[64, per_unit], 4, 3, vendor))
    return found


# Where the Hopper kernel serves a shape, this one wins only short launches and those of one query token.
SHORT_TOKENS = 131072


def _hopper_serves(shape: Shape, arch: Arch) -> bool:
    return arch.isa == "sm90" and shape.cache_layout == "flat" and shape.block_kv >= 32 and shape.heads >= 16


def _beside_hopper(shape: Shape, arch: Arch) -> list[Config]:
    # On an H200 these come within 1 % of the best of the whole grid, where they are offered; see docs/log.md.
    if shape.context_tokens > SHORT_TOKENS and shape.next_n > 1:
        return []
    found = []
    for fuse_n in dict.fromkeys((shape.next_n, cdiv(shape.next_n, 2), cdiv(shape.next_n, 3), 1)):
        dots = [d for d in (2, 4) if d <= fuse_n and d * shape.heads <= MAX_DOT_COLUMNS] or [1]
        for dot_n in dots:
            for num_stages, per_unit in ((5, 2), (5, 4), (3, 8), (3, 16)):
                split_kv = split_for(shape, fuse_n, 64, arch, per_unit)
                found.append(_config(fuse_n, dot_n, "kv", 64, split_kv, 4, num_stages, arch.vendor))
    return found


def default_config(shape: Shape, arch: Arch) -> Config | None:
    """The best single rule measured on an H200, counted in the arch's own compute units."""
    if shape.heads >= 128:
        fuse_n = 1
    elif shape.heads == 64:
        fuse_n = min(2, shape.next_n)
    else:
        fuse_n = shape.next_n
    split_kv = split_for(shape, fuse_n, 64, arch, SPLIT_TARGETS[0])
    return _config(fuse_n, min(2, fuse_n), "kv", 64, split_kv, 4, 5, arch.vendor)


def as_offered(shape: Shape, config: Config) -> Config:
    """Itself: nothing but the split depends on the context here."""
    return config


@functools.lru_cache(maxsize=16384)  # making one anew takes longer than all else that is done with it
def _config(
    fuse_n: int, dot_n: int, mma_m: str, tile_kv: int, split_kv: int, num_warps: int, num_stages: int, vendor: str
) -> Config:
    return Config(
        kernel="portable",
        fuse_n=fuse_n,
        dot_n=dot_n,
        mma_m="kv" if mma_m == "kv" else "heads",
        tile_kv=tile_kv,
        split_kv=split_kv,
        num_warps=num_warps,
        # AMD's pipeliner takes two stages well and more badly; LDS is smaller, too.
        num_stages=2 if vendor == "amd" else num_stages,
        waves_per_eu=2 if vendor == "amd" else 0,
    )
