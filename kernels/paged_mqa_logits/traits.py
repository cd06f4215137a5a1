"""What the tensors of a deployment have in common, launch after launch, beyond the shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Shape

if TYPE_CHECKING:
    from torch import Tensor


class Traits(NamedTuple):
    """Properties that a kernel may be compiled for. A different value is a different binary, never a wrong result."""

    per_token_lens: bool  # context_lens is [batch_size, next_n]
    page_stride: int  # bytes between the starts of two pages
    dense_weights: bool  # contiguous, and aligned to 16 bytes
    tma: bool = True  # Hopper's copy engine can read the weights: rows start at multiples of 16 bytes


def usual_traits(shape: Shape, *, per_token_lens: bool = False, page_stride: int | None = None) -> Traits:
    """Traits of a cache without gaps and of contiguous weights."""
    return Traits(per_token_lens, page_stride or shape.block_kv * (shape.head_dim + SCALE_BYTES), True)


def rows_aligned(weights: Tensor, context_lens: Tensor) -> bool:
    """Whether TMA can read the weights, their address apart; offsets in elements must fit 32 bits, too."""
    rows, stride = weights.shape[0], weights.stride(0)
    lens = context_lens.shape[0] * context_lens.stride(0)
    return rows <= 1 or (stride % 4 == 0 and rows * stride < 1 << 31 and lens < 1 << 31)


def traits_of(kv_cache: Tensor, weights: Tensor, context_lens: Tensor) -> Traits:
    """Traits of these tensors; a cache of one page has the usual stride, whatever it says."""
    _, block_kv, *_, width = kv_cache.shape
    return Traits(
        context_lens.dim() == 2,
        kv_cache.stride(0) if kv_cache.shape[0] > 1 else block_kv * width,
        weights.is_contiguous() and weights.data_ptr() % 16 == 0,
        weights.data_ptr() % 16 == 0 and rows_aligned(weights, context_lens),
    )
