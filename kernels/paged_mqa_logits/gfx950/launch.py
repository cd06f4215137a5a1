"""Launches the gfx950 kernel on checked tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.errors import InvalidTensorError
from tilewise.kernels.paged_mqa_logits.gfx950 import build
from tilewise.kernels.paged_mqa_logits.gfx950.kernels import _paged_mqa_logits_kernel
from tilewise.kernels.paged_mqa_logits.prepared import bind
from tilewise.kernels.paged_mqa_logits.spec import MAX_NEXT_N, Config, Shape
from tilewise.kernels.paged_mqa_logits.traits import Traits

MAX_BYTES_32 = 1 << 31  # what a 32-bit offset within a request may reach
MAX_INT32 = MAX_BYTES_32 - 1


def launch_key(shape: Shape, config: Config, traits: Traits) -> tuple[object, ...]:
    """Everything that decides which binary runs."""
    constants = build.constexprs(shape, config, traits.per_token_lens)
    return ("gfx950", *constants.values(), config.num_warps, config.waves_per_eu)


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
    """One launch of batch_size x token groups x split_kv programs.

    Raises InvalidTensorError for strides that the kernel's 16-byte loads or 32-bit offsets within a request can't take.
    """
    numbers = launch_numbers(q, kv_cache, weights, context_lens, block_tables, out, max_columns, shape, config)
    _paged_mqa_logits_kernel[(numbers["programs"],)](
        q,
        kv_cache.view(torch.float8_e4m3fn),
        kv_cache.view(torch.float32),
        block_tables,
        context_lens,
        weights,
        out,
        *numbers.values(),
        **build.constexprs(shape, config, traits.per_token_lens),
        num_warps=config.num_warps,
        waves_per_eu=config.waves_per_eu,
    )


def launch_numbers(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
    max_columns: int,
    shape: Shape,
    config: Config,
) -> dict[str, int]:
    """The kernel's integer arguments by name, in its order; see `build.SIGNATURE`."""
    unit = build.page_unit_bytes(shape.block_kv)
    # Strides of a dimension of one mean nothing, and may be anything.
    q_token = q.stride(1) if q.shape[1] > 1 else 0
    q_batch = q.stride(0) if q.shape[0] > 1 else 0
    page = kv_cache.stride(0) if kv_cache.shape[0] > 1 else 0
    out_stride = out.stride(0) if out.shape[0] > 1 else 0
    if q_token % 16 or q_batch % 16:
        raise InvalidTensorError(f"q must have request and token strides of a multiple of 16, got {q.stride()}")
    if page % unit:
        raise InvalidTensorError(f"kv_cache must have a page stride of a multiple of {unit} bytes, got {page}")
    if MAX_NEXT_N * max(q_token, 4 * weights.stride(0), 4 * out_stride) >= MAX_BYTES_32:
        raise InvalidTensorError(
            f"q, weights and out must have token rows of less than {MAX_BYTES_32 // MAX_NEXT_N} bytes, got "
            f"{q_token}, {4 * weights.stride(0)} and {4 * out_stride}"
        )
    numbers = {
        "programs": shape.batch_size * config.groups(shape.next_n) * config.split_kv,
        "next_n": shape.next_n,
        "split_kv": config.split_kv,
        "columns": max_columns,
        "q_batch_units": q_batch // 16,
        "q_token_units": q_token // 16,
        "page_units": page // unit,
        "table_stride": block_tables.stride(0),
        "lens_stride": context_lens.stride(0),
        "weights_stride": weights.stride(0),
        "out_stride": out_stride,
    }
    for name, value in numbers.items():
        if value > MAX_INT32:
            raise InvalidTensorError(f"{name} must be at most {MAX_INT32}, got {value}")
    return numbers


def prepare(
    shape: Shape, config: Config, *, per_token_lens: bool = False, device: int = 0
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]:
    """The launch of one config, as `launch` makes it, for any batch up to the shape's."""
    return bind(launch, shape, config, per_token_lens)
