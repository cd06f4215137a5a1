"""A drop-in for aiter's paged MQA logits on AMD GPUs, with aiter's signature.

    from tilewise.dispatch.integrations import aiter
    aiter.install()      # over aiter's function and its alias
    ...
    aiter.uninstall()

aiter is AMD's package with `aiter.ops.triton`; the project called aiter on PyPI is another one and is never touched.
Code that has already bound the function by `from ... import` keeps what it has: install before such imports.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import CaptureError, InvalidConfigError, InvalidTensorError, UnsupportedError
from tilewise.kernels.arch import Arch, current_arch
from tilewise.kernels.paged_mqa_logits.launch import USUAL_CONTEXT_LEN, paged_mqa_logits
from tilewise.kernels.paged_mqa_logits.spec import CacheLayout, Config, Shape

FUNCTION = "deepgemm_fp8_paged_mqa_logits"
# Where callers find it: its home, and the alias that SGLang and aiter's own tests import.
MODULES = ("aiter.ops.triton.attention.pa_mqa_logits", "aiter.ops.triton.pa_mqa_logits")

_originals: dict[str, Callable[..., Any]] = {}
_max_context_len: int | None = None


def available() -> bool:
    """Whether AMD's aiter is installed."""
    try:
        return importlib.util.find_spec("aiter.ops.triton") is not None
    except (ImportError, ValueError, AttributeError):
        return False


def install(max_context_len: int | None = None) -> None:
    """Put the drop-in in place of aiter's function; doing it twice is doing it once.

    max_context_len: the longest context to choose launches for, where the caller knows one; aiter's signature has no
    place for it, and the width of the logits says nothing about it.
    Raises UnsupportedError where aiter is not installed.
    """
    global _max_context_len
    if not available():
        raise UnsupportedError("AMD's aiter (with aiter.ops.triton) is not installed: there is nothing to replace")
    _max_context_len = max_context_len
    modules = {
        name: module for name in MODULES if (module := _module(name))
    }  # all first: an alias copies what is there
    for name, module in modules.items():
        found = getattr(module, FUNCTION, None)
        if found is not None and found is not deepgemm_fp8_paged_mqa_logits:
            _originals[name] = found
            setattr(module, FUNCTION, deepgemm_fp8_paged_mqa_logits)
    if not _originals:
        raise UnsupportedError(f"this aiter has no {FUNCTION} in {' or '.join(MODULES)}")


def uninstall() -> None:
    """Put aiter's own function back; without an install before, do nothing."""
    for name in MODULES if _originals else ():
        module = _module(name)
        if module is not None and getattr(module, FUNCTION, None) is deepgemm_fp8_paged_mqa_logits:
            # An alias that was imported after the install has no original of its own.
            setattr(module, FUNCTION, _originals.get(name, next(iter(_originals.values()))))
    _originals.clear()


def deepgemm_fp8_paged_mqa_logits(
    q_fp8: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    out_logits: Tensor,
    context_lens: Tensor,
    kv_indices: Tensor,
    max_model_len: int,
    Preshuffle: bool = False,
    KVBlockSize: int = 1,
    ChunkK: int = 256,
    TotalCuCount: int | None = None,
    WavePerEU: int = 2,
    VarCtxSchedule: Tensor | None = None,
) -> str:
    """Scores into `out_logits`, in place, by the launch that is predicted or measured to be the quickest.

    q_fp8         [batch_size, next_n, heads, head_dim]        float8_e4m3fn
    kv_cache      [num_blocks, KVBlockSize, 1, head_dim + 4]   uint8 or float8: page values, then fp32 scales
    weights       [batch_size * next_n, heads]                 float32
    out_logits    [batch_size * next_n, >= max_model_len]      float32
    context_lens  [batch_size]                                 int32; [batch_size, next_n] is honoured, too
    kv_indices    [batch_size, max_blocks]                     int32

    Columns at or past a request's length are left alone, and those before it that a token may not see become -inf, as
    in aiter. ChunkK, TotalCuCount, WavePerEU and VarCtxSchedule tune aiter's own kernel: they reach it where it is
    chosen, and change nothing otherwise. Returns a name of what ran; aiter returns its kernel's cache key.

    Raises InvalidTensorError where KVBlockSize and the cache disagree, or where Preshuffle wants pages of 16, and what
    `tilewise.paged_mqa_logits` raises where neither kernel takes the launch.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[1] != KVBlockSize:
        raise InvalidTensorError(
            f"kv_cache must be [num_blocks, KVBlockSize, 1, head_dim + 4] with KVBlockSize {KVBlockSize}, got "
            f"{tuple(kv_cache.shape)}"
        )
    if Preshuffle and KVBlockSize % 16:
        raise InvalidTensorError(f"KVBlockSize must be a multiple of 16 with Preshuffle, got {KVBlockSize}")
    layout: CacheLayout = "preshuffled" if Preshuffle else "flat"
    batch_size, next_n, heads, head_dim = q_fp8.shape
    width = min(max_model_len, out_logits.shape[1])

    def own_kernel() -> str:
        key = _original()(
            q_fp8, kv_cache, weights, out_logits, context_lens, kv_indices, max_model_len, Preshuffle, KVBlockSize,
            ChunkK, TotalCuCount, WavePerEU, VarCtxSchedule,
        )  # fmt: skip
        return str(key)

    config: Config | None = None
    if batch_size * next_n:
        arch = current_arch(q_fp8.device.index or 0) if q_fp8.device.type == "cuda" else current_arch()
        longest = min(_max_context_len or USUAL_CONTEXT_LEN, width, kv_indices.shape[1] * KVBlockSize)
        config = _choose((batch_size, next_n, heads, head_dim, KVBlockSize, longest, layout), arch, bool(_originals))
        if config is None or q_fp8.dtype != torch.float8_e4m3fn:
            return own_kernel()
    try:
        paged_mqa_logits(
            q_fp8, kv_cache, weights, context_lens, kv_indices, width, cache_layout=layout, config=config,
            out=out_logits[:, :width],
        )  # fmt: skip
    except CaptureError:
        # Not warmed, and nothing may compile here. aiter's kernel may have run before the capture.
        if not _originals:
            raise
        return own_kernel()
    return f"tilewise {config}"


@functools.lru_cache(maxsize=4096)
def _choose(sizes: tuple[Any, ...], arch: Arch, aiter_installed: bool) -> Config | None:
    """The config to launch, or None for aiter's own kernel."""
    from tilewise.dispatch.selector import select

    batch_size, next_n, heads, head_dim, block_kv, longest, layout = sizes
    try:
        shape = Shape(batch_size, next_n, heads, head_dim, block_kv, longest, None, layout)
        decision = select(shape, arch=arch)
    except (InvalidConfigError, ValueError):
        if aiter_installed:
            return None
        raise
    if aiter_installed and arch.isa == "gfx950" and decision.source == "prior":
        from tilewise.kernels.paged_mqa_logits.gfx950 import aiter_model

        # Both are predicted, by one model; where timings exist, aiter's kernel is among what was timed.
        if decision.predicted_us is not None and aiter_model.predicted_us(shape, arch) < decision.predicted_us:
            return None
    return decision.config


def _original() -> Callable[..., Any]:
    if _originals:
        return next(iter(_originals.values()))
    for name in MODULES if available() else ():
        found = getattr(_module(name), FUNCTION, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    raise UnsupportedError("no kernel of tilewise takes this launch, and AMD's aiter is not installed")


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
