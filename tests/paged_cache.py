"""Builds problems for the kernel tests: paged caches with distinct, shuffled pages, and sentinel-filled outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SENTINEL = -12345.0


@dataclass
class Problem:
    """Tensors of one launch; `logits_width` columns of the output belong to it, the guard columns after them do not."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_tables: Tensor
    logits_width: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        return self.q, self.kv_cache, self.weights, self.context_lens, self.block_tables, self.logits_width

    def guarded_output(self, guard_columns: int = 64) -> tuple[Tensor, Tensor]:
        """A NaN-filled output view with guard columns and one guard row around it, and the whole buffer."""
        rows = self.q.shape[0] * self.q.shape[1]
        whole = torch.full((rows + 1, self.logits_width + guard_columns), float("nan"), device=self.q.device)
        return whole[:rows, : self.logits_width], whole


def make_problem(
    lens: Sequence[int] | Sequence[Sequence[int]],
    *,
    next_n: int,
    heads: int,
    head_dim: int = 128,
    block_kv: int = 64,
    logits_width: int | None = None,
    page_stride: int | None = None,
    table_tail: int = 2,
    seed: int = 0,
    device: str = "cpu",
) -> Problem:
    """A random problem whose pages are all distinct; table entries past a context are -1."""
    g = torch.Generator().manual_seed(seed)
    context_lens = torch.tensor(lens, dtype=torch.int32)
    extents = (context_lens.amax(1) if context_lens.dim() == 2 else context_lens).clamp_min(0).tolist()
    pages_each = [-(-extent // block_kv) for extent in extents]
    num_blocks = sum(pages_each) + 3
    page_bytes = block_kv * (head_dim + 4)
    pool = torch.zeros(num_blocks, page_stride or page_bytes, dtype=torch.uint8)
    values = (torch.randn(num_blocks, block_kv * head_dim, generator=g) * 60).clamp(-440, 440).to(torch.float8_e4m3fn)
    scales = (torch.rand(num_blocks, block_kv, generator=g) + 0.5) / 60
    pool[:, : block_kv * head_dim] = values.view(torch.uint8)
    pool[:, block_kv * head_dim : page_bytes] = scales.view(torch.uint8)
    kv_cache = torch.as_strided(
        pool, (num_blocks, block_kv, 1, head_dim + 4), (pool.stride(0), head_dim + 4, head_dim + 4, 1)
    )
    order = torch.randperm(num_blocks, generator=g).int()
    width = max(pages_each, default=0) + table_tail
    block_tables = torch.full((len(extents), width), -1, dtype=torch.int32)
    start = 0
    for b, count in enumerate(pages_each):
        block_tables[b, :count] = order[start : start + count]
        start += count
    q = torch.randn(len(extents), next_n, heads, head_dim, generator=g).to(torch.float8_e4m3fn)
    weights = torch.randn(len(extents) * next_n, heads, generator=g)
    return Problem(
        q.to(device),
        # The storage moves whole: a copy of the strided view would lose the page stride.
        torch.as_strided(pool.to(device), kv_cache.shape, kv_cache.stride()),
        weights.to(device),
        context_lens.to(device),
        block_tables.to(device),
        logits_width if logits_width is not None else max(max(extents, default=0), 1),
    )
