"""Paged MQA logits in plain PyTorch, one request at a time: the meaning of the op, and what kernels are checked by."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.paged_mqa_logits.spec import CacheLayout


def reference_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_model_len: int,
    *,
    dtype: torch.dtype = torch.float64,
    untouched: float = float("nan"),
    cache_layout: CacheLayout = "flat",
) -> tuple[Tensor, Tensor]:
    """Logits and the work behind each, for judging errors relative to it.

    q             [batch_size, next_n, heads, head_dim]        float8_e4m3fn
    kv_cache      [num_blocks, block_kv, 1, head_dim + 4]      uint8: the page's values, then its fp32 scales
    weights       [batch_size * next_n, heads]                 float32
    context_lens  [batch_size] or [batch_size, next_n]         int32
    block_tables  [batch_size, max_blocks]                     int32

    logits[b * n + t, p] = k_scale[p] * sum_h weights[b * n + t, h] * relu(q[b, t, h] . k[p])

    for p below the token's bound: context_lens[b] - n + t + 1, or context_lens[b, t]. Later columns below the request's
    extent (context_lens[b], or the largest of its row) are -inf; columns from there on hold `untouched`. The second
    result has |weights| in place of weights, and 0 where nothing is scored. Where relu clips nearly all heads it is
    held at a quarter of what products of these lengths come to on average: there, the rounding of the products that
    were clipped is all that is left of an element, and no measure of the kernel. Both results are
    [batch_size * next_n, max_model_len], of `dtype`, in which everything is computed.
    """
    batch_size, next_n, heads, head_dim = q.shape
    block_kv = kv_cache.shape[1]
    logits = torch.full((batch_size * next_n, max_model_len), untouched, dtype=dtype, device=q.device)
    work = torch.zeros_like(logits)
    token = torch.arange(next_n, device=q.device)
    for b in range(batch_size):
        row = context_lens[b].long()
        bounds = row if row.dim() else row - next_n + token + 1  # [next_n]
        extent = min(max(int(row.max()), 0), max_model_len, block_tables.shape[1] * block_kv)
        if extent == 0:
            continue
        pages = kv_cache[block_tables[b, : -(-extent // block_kv)].long()].flatten(1)  # [pages, block_kv * (d + 4)]
        k = pages[:, : block_kv * head_dim].contiguous()
        if cache_layout == "preshuffled":  # tiles of 16 tokens x 16 bytes
            k = k.view(-1, block_kv // 16, head_dim // 16, 16, 16).transpose(2, 3).reshape(k.shape)
        k = k.view(torch.float8_e4m3fn)
        k = k.to(dtype).view(-1, head_dim)[:extent]  # [extent, head_dim]
        k_scale = pages[:, block_kv * head_dim :].contiguous().view(torch.float32)
        k_scale = k_scale.to(dtype).flatten()[:extent]  # [extent]
        scores = (q[b].to(dtype).view(next_n * heads, head_dim) @ k.T).view(next_n, heads, extent).relu_()
        w = weights[b * next_n : (b + 1) * next_n].to(dtype).unsqueeze(1)  # [next_n, 1, heads]
        summed = torch.bmm(w, scores).squeeze(1) * k_scale  # [next_n, extent]
        lengths = q[b].to(dtype).norm(dim=-1, keepdim=True)  # [next_n, heads, 1]
        usual = torch.bmm(w.abs(), lengths).view(next_n, 1) * (k.norm(dim=1) * k_scale) * head_dim**-0.5
        magnitude = torch.maximum(torch.bmm(w.abs(), scores).squeeze(1) * k_scale, usual / 4)
        hidden = torch.arange(extent, device=q.device) >= bounds.unsqueeze(1)  # [next_n, extent]
        rows = slice(b * next_n, (b + 1) * next_n)
        logits[rows, :extent] = summed.masked_fill_(hidden, float("-inf"))
        work[rows, :extent] = magnitude.masked_fill_(hidden, 0.0)
    return logits, work


def worst_error(logits: Tensor, expected: Tensor, work: Tensor) -> tuple[float, float]:
    """Largest error of an element relative to its own work, and the norm of all errors over the norm of all logits.

    Takes a kernel's logits with `reference_logits`' two results, all of one shape. Infinite where the -inf pattern
    differs, where a scored column is NaN, or where a column that must stay untouched (NaN in both) was written.
    """
    untouched = expected.isnan()
    hidden = expected == float("-inf")
    scored = ~(untouched | hidden)
    if not bool((logits.isnan() == untouched).all()) or not bool(((logits == float("-inf")) == hidden).all()):
        return float("inf"), float("inf")
    error = torch.where(scored, (logits.to(expected.dtype) - expected).abs(), 0.0)
    element = torch.where(error > 0, error / work, 0.0).max() if error.numel() else torch.zeros(())
    norm = torch.where(scored, expected, 0.0).norm()
    return float(element), float(error.norm() / norm) if norm > 0 else float(error.norm())
