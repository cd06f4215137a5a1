"""The forms of the kernel that are offered: what the audit compiles and the space chooses among. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How a tile lies in cache pages: within one ("whole"), across several ("gather"), or a page a token ("single").
Paging = Literal["whole", "gather", "single"]
PAGINGS: tuple[Paging, ...] = ("whole", "gather", "single")


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """What decides the resources of a binary, besides heads, head_dim, fuse_n and paging."""

    tile_kv: int
    num_warps: int
    waves_per_eu: int
    mfma: str
    epilogue: str


def paging(block_kv: int, tile_kv: int) -> Paging:
    """How tiles of this size lie in pages of that size."""
    if block_kv >= tile_kv:
        return "whole"
    return "single" if block_kv == 1 else "gather"


# Rows of queries that a wave can hold in registers beside everything else: more has always spilled.
MAX_QUERY_BYTES = 256 * 128

_WIDE = "16x16x128"
_TALL = "32x32x64"
_NARROW = "16x16x32"

# Keys per wave are tile_kv / num_warps: 64 or 32. More of them put more time between a load and its use. The first form
# whose tile lies within a page is the default.
_COMMON_128 = (
    Form(256, 4, 2, _WIDE, "packed"),
    Form(128, 2, 2, _WIDE, "packed"),
    Form(64, 1, 2, _WIDE, "packed"),
    Form(128, 4, 2, _WIDE, "packed"),
    Form(64, 2, 2, _WIDE, "packed"),
    Form(32, 1, 2, _WIDE, "packed"),
)
# Tried at the head count that is served most: workgroups of eight waves, more waves a SIMD, and the simpler variants.
_MORE_128 = (
    Form(256, 8, 2, _WIDE, "packed"),
    Form(128, 4, 3, _WIDE, "packed"),
    Form(128, 4, 4, _WIDE, "packed"),
    Form(128, 4, 2, _TALL, "packed"),
    Form(64, 2, 2, _TALL, "packed"),
    Form(128, 4, 2, _WIDE, "max"),
    Form(128, 4, 2, _NARROW, "packed"),
)
_ACROSS_128 = (Form(128, 4, 2, _WIDE, "packed"), Form(64, 2, 2, _WIDE, "packed"))
_SERVED_HEADS = (32, 64)
_COMMON_64 = (Form(128, 4, 2, _NARROW, "packed"), Form(64, 2, 2, _NARROW, "packed"))


def forms(heads: int, head_dim: int, kind: Paging) -> tuple[Form, ...]:
    """The forms offered, the default first. Pages smaller than a tile cost addresses of their own: few pay there."""
    served = heads in _SERVED_HEADS
    if head_dim == 64:
        return _COMMON_64[: (2 if kind == "whole" else 1) if served else 0]
    if kind == "whole":
        return _COMMON_128 + (_MORE_128 if heads == _SERVED_HEADS[0] else ())
    return _ACROSS_128 if kind == "gather" and served else _ACROSS_128[:1]
