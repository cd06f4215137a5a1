"""Launches the Hopper kernel on checked tensors, and prepares launches that repeat."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidConfigError, InvalidTensorError, UnsupportedError
from tilewise.kernels.arch import current_arch
from tilewise.kernels.paged_mqa_logits.sm90 import build, compat
from tilewise.kernels.paged_mqa_logits.sm90.pieces import group_sizes
from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Config, Shape, cdiv, is_valid
from tilewise.kernels.paged_mqa_logits.traits import Traits

MAX_INT32 = (1 << 31) - 1

Dims = tuple[int, ...]


class PreparedLaunch:
    """One config bound to one device: kernel, grid rule and descriptors. A call allocates, compiles and reads nothing.

    A call takes the tensors of `paged_mqa_logits`, unchecked, and `max_columns`, which bounds the columns of the
    output and of the table. Any batch size up to `shape.batch_size` may follow, and tensors at any address.
    """

    def __init__(self, shape: Shape, config: Config, *, per_token_lens: bool = False, device: int = 0) -> None:
        arch = current_arch(device)
        reason = is_valid(shape, config, arch)
        if reason is not None:
            raise InvalidConfigError(f"{config} cannot launch {shape}: {reason}")
        self.shape = shape
        self.config = config
        self.per_token_lens = per_token_lens
        self._device = device
        self._sizes = group_sizes(shape.next_n, config.fuse_n, config.dot_n, config.token_split)
        self._present = build.descriptors_present(shape, config)
        self._groups = config.groups(shape.next_n)
        self._split_kv = config.split_kv
        self._balanced = config.schedule == "balanced"
        self._workgroups = arch.compute_units * config.ctas_per_sm
        with torch.cuda.device(device):
            kernel = build.compile_kernel(shape, config, per_token_lens)
            self._launch = compat.Launch(kernel, len(self._present) - sum(self._present))

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        out: Tensor,
        max_columns: int,
    ) -> None:
        weights_first, geometry = descriptors(q, kv_cache, weights, self._sizes)
        arguments: list[Any] = []
        index = 0
        for present in self._present:
            if present:
                arguments += self._launch.descriptor(index, *geometry[index])
                index += 1
            else:
                arguments.append(None)
        batch_size = q.shape[0]
        arguments += (
            block_tables.data_ptr(),
            context_lens.data_ptr(),
            out.data_ptr(),
            batch_size,
            max_columns,
            self._split_kv,
            block_tables.stride(0),
            context_lens.stride(0),
            weights_first,
            weights.stride(0),
            out.stride(0),
        )
        parts = batch_size * self._groups
        grid = min(self._workgroups, parts * cdiv(max_columns, 64)) if self._balanced else parts * self._split_kv
        if grid > 0:
            self._launch(grid, compat.current_stream(self._device), arguments)


def descriptors(
    q: Tensor, kv_cache: Tensor, weights: Tensor, sizes: tuple[int, ...]
) -> tuple[int, list[tuple[int, Dims, Dims]]]:
    """How far the first weight is from the address its descriptor starts at, in elements; and address, sizes and
    strides in elements of the descriptors of K values, K scales, query tokens (a piece of each of `sizes`) and weights.

    Strides of dimensions of size 1 may be anything in a tensor, but not in a descriptor.
    """
    batch_size, next_n, heads, head_dim = q.shape
    num_blocks, block_kv = kv_cache.shape[:2]
    page_bytes = block_kv * (head_dim + SCALE_BYTES)
    page_stride = kv_cache.stride(0) if num_blocks > 1 else page_bytes
    token_stride = q.stride(1) if next_n > 1 else heads * head_dim
    request_stride = q.stride(0) if batch_size > 1 else next_n * token_stride
    k_at = kv_cache.data_ptr()
    weights_at = weights.data_ptr()
    unaligned = weights_at % 16  # TMA starts at multiples of 16 bytes
    weights_first = unaligned // 4
    weights_span = weights_first + (batch_size * next_n - 1) * weights.stride(0) + heads
    return weights_first, [
        (k_at, (num_blocks, block_kv, head_dim), (page_stride, head_dim, 1)),
        (k_at, (num_blocks, page_bytes // 4), (page_stride // 4, 1)),
        *(
            (
                q.data_ptr(),
                (batch_size, heads * size // 8, next_n, 8 // size, head_dim),
                (request_stride, 8 // size * head_dim, token_stride, head_dim, 1),
            )
            for size in sizes
        ),
        (weights_at - unaligned, (weights_span,), (1,)),
    ]


def prepare(shape: Shape, config: Config, *, per_token_lens: bool = False, device: int = 0) -> PreparedLaunch:
    """Compile and load the kernel of this shape and config; InvalidConfigError where the config may not launch."""
    return PreparedLaunch(shape, config, per_token_lens=per_token_lens, device=device)


def launch_key(shape: Shape, config: Config, traits: Traits) -> tuple[object, ...]:
    """Everything that decides which binary runs."""
    rows = build.chunk(shape.batch_size)
    key = (shape.next_n, shape.heads, shape.head_dim, shape.block_kv, rows)
    return _launch_key(*key, config, traits.per_token_lens)


@functools.lru_cache(maxsize=4096)
def _launch_key(
    next_n: int, heads: int, head_dim: int, block_kv: int, rows: int, config: Config, lens_2d: bool
) -> tuple[object, ...]:
    # Contexts are no part of it, so that a context that grows from call to call finds its key.
    shape = Shape(rows, next_n, heads, head_dim, block_kv)
    return ("sm90", *build.constants(shape, config, lens_2d).values(), *build.options(config).values())


# Prepared launches by everything that they depend on; the split is no part of the binary, but of the call.
_prepared: dict[tuple[object, ...], PreparedLaunch] = {}


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
    """One launch. Raises InvalidTensorError for strides and addresses that TMA can't take."""
    if q.device.type != "cuda":
        raise UnsupportedError(f"the Hopper kernel needs tensors on a GPU, got q on {q.device}")
    why = unreadable(q, kv_cache, weights, context_lens)
    if why is not None:
        raise InvalidTensorError(why)
    device = q.device.index
    key = (device, config.split_kv, launch_key(shape, config, traits))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = PreparedLaunch(shape, config, per_token_lens=traits.per_token_lens, device=device)
    prepared(q, kv_cache, weights, context_lens, block_tables, out, max_columns)


def unreadable(q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor) -> str | None:
    """Why TMA can't read tensors that are otherwise good, or None."""
    batch_size, next_n = q.shape[:2]
    for name, stride, size in (("token", q.stride(1), next_n), ("request", q.stride(0), batch_size)):
        if size > 1 and (stride % 16 or stride <= 0):
            return f"q's {name} stride must be a positive multiple of 16 bytes for the Hopper kernel, got {stride}"
    if weights.shape[0] * weights.stride(0) > MAX_INT32:
        return f"weights must span at most {MAX_INT32} elements, got {weights.shape[0]} rows of {weights.stride(0)}"
    if batch_size * context_lens.stride(0) > MAX_INT32:
        return f"context_lens must span at most {MAX_INT32} elements, got {batch_size} rows of {context_lens.stride(0)}"
    return None
