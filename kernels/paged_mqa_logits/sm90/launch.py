"""Launches the Hopper kernel on checked tensors, and prepares launches that repeat."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidConfigError, UnsupportedError
from tilewise.kernels.arch import current_arch
from tilewise.kernels.paged_mqa_logits.sm90 import binding, build
from tilewise.kernels.paged_mqa_logits.sm90.pieces import group_sizes
from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Config, Shape, is_valid, low_reciprocal
from tilewise.kernels.paged_mqa_logits.traits import Traits

Dims = tuple[int, ...]


class PreparedLaunch:
    """One config bound to one device: kernel, grid rule and descriptors. A call allocates, compiles and reads nothing.

    A call takes the tensors of `paged_mqa_logits`, unchecked, and `max_columns`, which bounds the columns of the
    output and of the table. Any batch size up to `shape.batch_size` may follow, and tensors at any address. Encoded TMA
    descriptors are kept, so that only tensors that are seen for the first time cost an encoding.
    """

    KEPT = 512  # of each kind; the caches of a serving process are a few, its activations recur

    def __init__(self, shape: Shape, config: Config, *, per_token_lens: bool = False, device: int = 0) -> None:
        arch = current_arch(device)
        reason = is_valid(shape, config, arch)
        if reason is not None:
            raise InvalidConfigError(f"{config} cannot launch {shape}: {reason}")
        self.shape = shape
        self.config = config
        self.per_token_lens = per_token_lens
        self._device = device
        self._next_n = shape.next_n
        self._sizes = group_sizes(shape.next_n, config.fuse_n, config.dot_n, config.token_split)
        self._groups = config.groups(shape.next_n)
        self._split_kv = config.split_kv
        self._balanced = config.schedule == "balanced"
        self._workgroups = arch.compute_units * config.ctas_per_sm
        self._k: dict[Dims, list[Any]] = {}
        self._q: dict[Dims, list[Any]] = {}
        self._weights: dict[Dims, list[Any]] = {}
        with torch.cuda.device(device):
            kernel = build.compile_kernel(shape, config, per_token_lens)
            self._launch = binding.Launch(kernel, len(build.Q_DESCRIPTORS) - len(self._sizes))
            self._stream = binding.stream_reader()

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
        batch_size = q.size(0)
        weights_stride = weights.stride(0)
        parts = batch_size * self._groups
        grid = min(self._workgroups, parts * -(-max_columns // 64)) if self._balanced else parts * self._split_kv
        of_k = (kv_cache.data_ptr(), kv_cache.size(0), kv_cache.stride(0))
        of_q = (q.data_ptr(), batch_size, q.stride(0), q.stride(1))
        of_weights = (weights.data_ptr(), batch_size, weights_stride)
        arguments = [
            *(self._k.get(of_k) or self._encode_k(of_k)),
            *(self._q.get(of_q) or self._encode_q(of_q)),
            *(self._weights.get(of_weights) or self._encode_weights(of_weights)),
            block_tables.data_ptr(),
            context_lens.data_ptr(),
            out.data_ptr(),
            batch_size,
            max_columns,
            self._split_kv,
            low_reciprocal(grid if self._balanced else self._split_kv),
            block_tables.stride(0),
            context_lens.stride(0),
            weights_stride,
            out.stride(0),
        ]
        if grid > 0:
            self._launch(grid, self._stream(self._device), arguments)

    def _encode_k(self, key: Dims) -> list[Any]:
        found = [self._launch.encode(i, *geometry) for i, geometry in enumerate(k_geometry(self.shape, *key))]
        return _keep(self._k, key, [part for parts in found for part in parts])

    def _encode_q(self, key: Dims) -> list[Any]:
        found: list[Any] = []
        for size in build.Q_DESCRIPTORS:
            if size in self._sizes:
                index = 2 + self._sizes.index(size)
                found += self._launch.encode(index, *q_geometry(self.shape, size, *key))
            else:
                found.append(None)
        return _keep(self._q, key, found)

    def _encode_weights(self, key: Dims) -> list[Any]:
        index = 2 + len(self._sizes)
        return _keep(self._weights, key, self._launch.encode(index, *weights_geometry(self.shape, *key)))


def _keep(kept: dict[Dims, list[Any]], key: Dims, found: list[Any]) -> list[Any]:
    if len(kept) >= PreparedLaunch.KEPT:
        kept.clear()
    kept[key] = found
    return found


# Address, sizes and strides in elements of what descriptors describe. Strides of dimensions of size 1 may be anything
# in a tensor, but not in a descriptor.


def k_geometry(shape: Shape, address: int, num_blocks: int, page_stride: int) -> list[tuple[int, Dims, Dims]]:
    """Of the values of K, [pages, tokens, head_dim], and of its scales, which lie behind them in each page."""
    page_bytes = shape.block_kv * (shape.head_dim + SCALE_BYTES)
    if num_blocks <= 1:
        page_stride = page_bytes
    return [
        (address, (num_blocks, shape.block_kv, shape.head_dim), (page_stride, shape.head_dim, 1)),
        (address, (num_blocks, page_bytes // 4), (page_stride // 4, 1)),
    ]


def q_geometry(
    shape: Shape, size: int, address: int, batch_size: int, request_stride: int, token_stride: int
) -> tuple[int, Dims, Dims]:
    """Of query tokens in pieces of `size`: of every 8 columns of a product, 8 / size heads of each token."""
    if shape.next_n == 1:
        token_stride = shape.heads * shape.head_dim
    if batch_size == 1:
        request_stride = shape.next_n * token_stride
    return (
        address,
        (batch_size, shape.heads * size // 8, shape.next_n, 8 // size, shape.head_dim),
        (request_stride, 8 // size * shape.head_dim, token_stride, shape.head_dim, 1),
    )


def weights_geometry(shape: Shape, address: int, batch_size: int, row_stride: int) -> tuple[int, Dims, Dims]:
    """Of the weights, as one row: boxes of 16 heads reach into the next row's, or past the last one's end."""
    return address, ((batch_size * shape.next_n - 1) * row_stride + shape.heads,), (1,)


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
    """One launch, on tensors with these traits, which `refuses` must allow."""
    if q.device.type != "cuda":
        raise UnsupportedError(f"the Hopper kernel needs tensors on a GPU, got q on {q.device}")
    device = q.device.index
    key = (device, config.split_kv, launch_key(shape, config, traits))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = PreparedLaunch(shape, config, per_token_lens=traits.per_token_lens, device=device)
    prepared(q, kv_cache, weights, context_lens, block_tables, out, max_columns)


def refuses(traits: Traits) -> str | None:
    """Why the kernel can't read such tensors, or None."""
    if traits.tma:
        return None
    return (
        "the Hopper kernel copies weights with TMA: they must start at a multiple of 16 bytes, and their rows be "
        "multiples of 16 bytes apart"
    )
