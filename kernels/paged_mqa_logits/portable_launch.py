"""Launches the portable Triton kernel on checked tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton import knobs

from tilewise.errors import UnsupportedError
from tilewise.kernels.paged_mqa_logits.prepared import bind
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, low_reciprocal
from tilewise.kernels.paged_mqa_logits.traits import Traits
from tilewise.kernels.paged_mqa_logits.triton_portable import _paged_mqa_logits_kernel

MOST_PROGRAMS = 1 << 20  # of one launch; up to here the kernel finds its part by fp32 products
_PREFETCH = torch.version.cuda is not None and not knobs.runtime.interpret


def launch_key(shape: Shape, config: Config, traits: Traits) -> tuple[object, ...]:
    """Everything that decides which binary runs."""
    return ("portable", *_constexprs(shape, config, traits).values(), config.num_warps, config.waves_per_eu)


def refuses(traits: Traits) -> str | None:
    """Why the kernel can't read tensors with these traits: it reads all that the checks let through."""
    return None


def launch(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
    max_columns: int,
    shape: Shape,
    config: Config,
    traits: Traits,
) -> None:
    """batch_size x token groups x split_kv programs, in as many launches as these take."""
    if q.device.type == "cpu" and not knobs.runtime.interpret:
        raise UnsupportedError("tensors on the CPU need Triton's interpreter: set TRITON_INTERPRET=1 before importing")
    options = {"waves_per_eu": config.waves_per_eu} if config.waves_per_eu else {}
    next_n = shape.next_n
    groups = config.groups(next_n)
    most = max(1, MOST_PROGRAMS // (groups * config.split_kv))
    values, scales = kv_cache.view(torch.float8_e4m3fn), kv_cache.view(torch.float32)
    for first in range(0, shape.batch_size, most):
        last = min(first + most, shape.batch_size)
        _paged_mqa_logits_kernel[((last - first) * groups * config.split_kv,)](
            q[first:] if first else q,
            values,
            scales,
            block_tables[first:] if first else block_tables,
            context_lens[first:] if first else context_lens,
            weights[first * next_n :] if first else weights,
            out[first * next_n :] if first else out,
            next_n,
            config.split_kv,
            low_reciprocal(config.split_kv),
            low_reciprocal(groups),
            max_columns,
            q.stride(0) // 16,
            context_lens.stride(0),
            block_tables.stride(0),
            weights.stride(0),
            out.stride(0),
            **_constexprs(shape, config, traits),
            num_warps=config.num_warps,
            **options,
        )


def _constexprs(shape: Shape, config: Config, traits: Traits) -> dict[str, int | bool]:
    return {
        "FUSE_N": config.fuse_n,
        "DOT_N": config.dot_n,
        "KV_IS_M": config.mma_m == "kv",
        "TILE_KV": config.tile_kv,
        "NUM_STAGES": config.num_stages,
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_KV": shape.block_kv,
        "STRIDE_PAGE": traits.page_stride,
        "WEIGHTS_DENSE": traits.dense_weights,
        "LENS_2D": traits.per_token_lens,
        "MASKED": shape.next_n % config.fuse_n != 0,
        "PREFETCH": _PREFETCH,
    }


def prepare(
    shape: Shape, config: Config, *, per_token_lens: bool = False, device: int = 0
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]:
    """The launch of one config, as `launch` makes it, for any batch up to the shape's."""
    return bind(launch, shape, config, per_token_lens)
