"""DeepGEMM's kernel of this op, where it is installed: what it takes, and how it is called. Never imported unasked.

DeepGEMM takes one, two or four query tokens a row on Hopper; any other next_n is served by giving it more rows, each
with a part of a request's query tokens and the whole of its block table. It scores every column of a tile it touches:
columns past a token's bound hold scores, not -inf, and up to 255 columns past the extent hold anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import Shape

FUNCTION, METADATA = "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"
# The package itself, and the copy that vLLM brings along.
PACKAGES = ("deep_gemm", "vllm.third_party.deep_gemm")
TOKENS = (4, 2, 1)  # query tokens of a row that its Hopper kernel takes
ROW_ALIGNMENT = 256  # fp32 columns: rows start at multiples of 1024 bytes


def packages() -> list[str]:
    """Where DeepGEMM may be, the copy that is loaded first: two cannot be loaded, since both register its operators.

    vLLM's copy counts only where vLLM is loaded: looking for it would load all of vLLM.
    """
    usable = [name for name in PACKAGES if name == PACKAGES[0] or "vllm" in sys.modules]
    return sorted(usable, key=lambda name: name not in sys.modules)


def installed() -> bool:
    """Whether DeepGEMM is there to be imported; imports nothing."""
    for name in packages():
        try:
            if name in sys.modules or importlib.util.find_spec(name) is not None:
                return True
        except (ImportError, ValueError):
            continue
    return False


def deep_gemm() -> ModuleType:
    """DeepGEMM's module. Raises UnsupportedError where there is none, or one without this op."""
    reasons = []
    for name in packages():
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a missing library or another torch: not there, as far as this op goes
            reasons.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if hasattr(module, FUNCTION) and hasattr(module, METADATA):
            return module
        reasons.append(f"{name}: has no {FUNCTION}")
    raise UnsupportedError(f"DeepGEMM with {FUNCTION} is not installed ({'; '.join(reasons)})")


def tokens_per_row(next_n: int) -> list[int]:
    """The ways to call it: query tokens of a row, most first. The first is native where it is next_n itself."""
    return [tokens for tokens in TOKENS if next_n % tokens == 0]


def why_not(shape: Shape, tokens: int, arch: Arch) -> str | None:
    """Why DeepGEMM 2.8.1 cannot serve this with so many query tokens a row, or None."""
    if arch.isa != "sm90":
        return f"DeepGEMM is called on sm90 only here, got {arch.isa}"
    if tokens not in TOKENS or shape.next_n % tokens:
        return f"query tokens of a row must be one of {TOKENS} and divide next_n ({shape.next_n}), got {tokens}"
    if shape.heads not in (32, 64):
        return f"DeepGEMM's heads must be 32 or 64, got {shape.heads}"
    if shape.block_kv not in (32, 64):
        return f"DeepGEMM's block_kv must be 32 or 64, got {shape.block_kv}"
    if shape.cache_layout != "flat":
        return f"DeepGEMM reads flat pages only, got cache_layout {shape.cache_layout!r}"
    return None


def schedule_slots(num_sms: int, tokens: int) -> int:
    """Entries of the schedule less one: four tokens a row run on pairs of multiprocessors."""
    return num_sms // 2 if tokens == 4 else num_sms


def row_lens(context_lens: Tensor, next_n: int, tokens: int) -> Tensor:
    """Lengths as DeepGEMM wants them: [batch_size * next_n / tokens, tokens], int32, each token's own bound.

    context_lens  [batch_size] or [batch_size, next_n]  int32
    """
    if context_lens.dim() == 1:
        ahead = torch.arange(1 - next_n, 1, device=context_lens.device, dtype=torch.int32)
        context_lens = (context_lens.unsqueeze(1) + ahead).clamp_min_(0)
    return context_lens.reshape(-1, tokens).contiguous()


def row_tables(block_tables: Tensor, next_n: int, tokens: int) -> Tensor:
    """A block table for each row: that of its request."""
    rows = next_n // tokens
    return block_tables if rows == 1 else block_tables.repeat_interleave(rows, 0)


def schedule(module: Any, lens: Tensor, block_kv: int) -> Tensor:
    """What `get_paged_mqa_logits_metadata` makes of rows' lengths [rows, tokens]: the work of each multiprocessor."""
    slots = schedule_slots(module.get_num_sms(), lens.shape[1])
    made: Tensor = getattr(module, METADATA)(lens, block_kv, slots)
    return made


def call(
    module: Any, q: Tensor, kv_cache: Tensor, weights: Tensor, lens: Tensor, tables: Tensor, made: Tensor, width: int
) -> Tensor:
    """Logits [batch_size * next_n, width], in memory that DeepGEMM allocates.

    q is [batch_size, next_n, heads, head_dim]; `lens`, `tables` and `made` come from the functions above and say how
    many of its query tokens share a row.
    """
    rows = q.view(lens.shape[0], lens.shape[1], *q.shape[2:])
    out: Tensor = getattr(module, FUNCTION)((rows, None), kv_cache, weights, lens, tables, made, width)
    return out
