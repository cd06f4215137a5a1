"""What the gfx950 kernel accepts and offers. No torch, no triton."""

from __future__ import annotations

import functools

from tilewise.errors import InvalidConfigError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.gfx950.forms import MAX_QUERY_BYTES, PAGINGS, Form, forms, paging
from tilewise.kernels.paged_mqa_logits.gfx950.prior import BASIS as PRIOR_BASIS
from tilewise.kernels.paged_mqa_logits.gfx950.prior import prior_us
from tilewise.kernels.paged_mqa_logits.gfx950.resources import key_of, why_refused
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, cdiv

__all__ = ["PRIOR_BASIS", "READS", "candidates", "default_config", "prior_us", "runs_on", "why_invalid"]

READS = frozenset(
    (
        "kernel", "fuse_n", "mma_m", "tile_kv", "split_kv", "num_warps", "waves_per_eu", "mfma", "epilogue",
        "program_order",
    )
)  # fmt: skip

MFMAS = ("16x16x32", "16x16x128", "32x32x64")
# max: relu as an integer maximum. packed: that for one register pair of each product, a packed multiply with clamp for
# the others.
EPILOGUES = ("max", "packed")
# launched: as the hardware deals programs out. xcd: runs of neighbours, which read the same K, on one die.
PROGRAM_ORDERS = ("launched", "xcd")
LANES = 64
MAX_ROWS_AT_64_KEYS = 6 * 32  # heads x tokens
# Waves aimed at, per wave slot of the device: whole rounds of what is resident at once. One round is the default:
# published times of equal splits are least at 2 to 2.5 waves a SIMD (ROCm/aiter#4221).
ROUNDS = (1, 2, 4, 8)


def runs_on(arch: Arch) -> bool:
    """CDNA4 only: the wide fp8 matrix products are its own."""
    return arch.isa == "gfx950"


def why_invalid(shape: Shape, config: Config, arch: Arch) -> str | None:
    """Why the gfx950 kernel cannot launch this, or None."""
    if shape.heads < 16:
        return f"the gfx950 kernel needs at least 16 heads, got {shape.heads}"
    if shape.cache_layout == "preshuffled" and shape.block_kv % 16:
        return f"preshuffled pages hold a multiple of 16 tokens, got block_kv {shape.block_kv}"
    if config.mma_m != "heads":
        return f"mma_m must be 'heads', got {config.mma_m!r}"
    if config.mfma not in MFMAS:
        return f"mfma must be one of {', '.join(MFMAS)}, got {config.mfma!r}"
    rows, _, depth = (int(x) for x in config.mfma.split("x"))
    if depth > shape.head_dim:
        return f"mfma {config.mfma} multiplies {depth} at a time, more than head_dim {shape.head_dim}"
    if config.epilogue not in EPILOGUES:
        return f"epilogue must be one of {', '.join(EPILOGUES)}, got {config.epilogue!r}"
    if config.program_order not in PROGRAM_ORDERS:
        return f"program_order must be one of {', '.join(PROGRAM_ORDERS)}, got {config.program_order!r}"
    if config.num_warps > 8:
        return f"num_warps must be 1 to 8, got {config.num_warps}"
    if config.tile_kv % (rows * config.num_warps):
        return f"tile_kv must be a multiple of {rows} x num_warps ({rows * config.num_warps}), got {config.tile_kv}"
    if not 1 <= config.waves_per_eu <= 8:
        return f"waves_per_eu must be 1 to 8, got {config.waves_per_eu}"
    if not holds_whole_tiles(shape.heads, config.fuse_n, config.mfma):
        return f"mfma {config.mfma} needs an even fuse_n at {shape.heads} heads, got {config.fuse_n}"
    if config.fuse_n * shape.heads * shape.head_dim > MAX_QUERY_BYTES:
        return (
            f"fuse_n x heads x head_dim must be at most {MAX_QUERY_BYTES}, what a wave's registers hold, got "
            f"{config.fuse_n * shape.heads * shape.head_dim}"
        )
    return why_refused(key_of(shape, config))


def holds_whole_tiles(heads: int, fuse_n: int, mfma: str) -> bool:
    """Whether each token, or the pair that it shares products with, has heads for whole products."""
    rows = int(mfma.split("x")[0])
    lone = fuse_n % (LANES // rows) != 0 and fuse_n % 2 == 1
    return heads * (1 if lone else 2) >= rows


@functools.lru_cache(maxsize=16384)  # making one anew takes longer than all else that is done with it
def config_of(fuse_n: int, form: Form, split_kv: int, program_order: str) -> Config:
    """The config of a form."""
    return Config(
        kernel="gfx950",
        fuse_n=fuse_n,
        mma_m="heads",
        tile_kv=form.tile_kv,
        split_kv=split_kv,
        num_warps=form.num_warps,
        waves_per_eu=form.waves_per_eu,
        mfma=form.mfma,
        epilogue=form.epilogue,
        program_order=program_order,
    )


def split_for(shape: Shape, fuse_n: int, form: Form, arch: Arch, rounds: int) -> int:
    """split_kv that fills the device's wave slots at most `rounds` times, and has a tile for each program."""
    slots = arch.compute_units * 4 * form.waves_per_eu // form.num_warps
    others = max(1, shape.batch_size) * cdiv(shape.next_n, fuse_n)
    return max(1, min(rounds * slots // others, cdiv(shape.max_context_len, form.tile_kv)))


def fuse_choices(shape: Shape) -> list[int]:
    """For each number of groups, the smallest fuse_n that makes it, fewest groups first, as far as registers go."""
    most = MAX_QUERY_BYTES // (shape.heads * shape.head_dim)
    choices = {cdiv(shape.next_n, groups) for groups in range(1, shape.next_n + 1)}
    return sorted((fuse_n for fuse_n in choices if fuse_n <= most), reverse=True)


def offered(shape: Shape, fuse_n: int) -> list[Form]:
    """The forms for these pages, those whose tile lies within one page first, the default first of all."""
    found: dict[Form, None] = {}
    for kind in PAGINGS:
        found |= {
            form: None
            for form in forms(shape.heads, shape.head_dim, kind)
            if paging(shape.block_kv, form.tile_kv) == kind
            # K of 64 keys a wave leaves room for fewer queries.
            and (form.tile_kv // form.num_warps < 64 or fuse_n * shape.heads <= MAX_ROWS_AT_64_KEYS)
        }
    return list(found)


def candidates(shape: Shape, arch: Arch) -> list[Config]:
    """The grid that is predicted, measured and chosen from, before `is_valid`."""
    grid = []
    for fuse_n in fuse_choices(shape):
        for i, form in enumerate(offered(shape, fuse_n)):
            for rounds in ROUNDS:
                split_kv = split_for(shape, fuse_n, form, arch, rounds)
                grid.append(config_of(fuse_n, form, split_kv, "xcd"))
                # Order matters only where programs share K: then it is tried with the first form.
                if i == 0 and fuse_n < shape.next_n:
                    grid.append(config_of(fuse_n, form, split_kv, "launched"))
    return grid


def preferred(shape: Shape, arch: Arch) -> Config:
    """The widest fusion of the first form, whether or not the installed Triton compiles it well.

    Raises InvalidConfigError where no form is offered.
    """
    fuse_n = fuse_choices(shape)[0]
    on_offer = offered(shape, fuse_n)
    if not on_offer:
        raise InvalidConfigError(f"no form of the gfx950 kernel is offered for {shape}")
    return config_of(fuse_n, on_offer[0], split_for(shape, fuse_n, on_offer[0], arch, ROUNDS[0]), "xcd")


def default_config(shape: Shape, arch: Arch) -> Config | None:
    """The widest fusion and the first form that the audit passes; None where there is none."""
    for fuse_n in fuse_choices(shape):
        for form in offered(shape, fuse_n):
            config = config_of(fuse_n, form, split_for(shape, fuse_n, form, arch, ROUNDS[0]), "xcd")
            if why_invalid(shape, config, arch) is None:
                return config
    return None


def as_offered(shape: Shape, config: Config) -> Config:
    """Itself: nothing but the split depends on the context here."""
    return config
