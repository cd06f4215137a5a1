"""A drop-in for DeepGEMM's paged MQA logits, with its signatures, at any next_n.

    from tilewise.dispatch.integrations import deep_gemm
    deep_gemm.install()      # over DeepGEMM's functions and, where vLLM is loaded, over vLLM's names for them
    ...
    deep_gemm.uninstall()

Or call the functions below in place of DeepGEMM's. Launches that tilewise has no kernel for, or at which DeepGEMM's own
was measured to be faster, go to DeepGEMM where it is installed. Code that has already bound a function by
`from ... import` keeps what it has, but for vLLM's modules, which are known: install before such imports.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilewise.dispatch.integrations import deep_gemm_install as _installed
from tilewise.dispatch.integrations.deep_gemm_times import own_kernel_is_faster, own_kernel_may_be_faster
from tilewise.errors import CaptureError, InvalidConfigError, InvalidShapeError, InvalidTensorError, UnsupportedError
from tilewise.kernels.arch import Arch, current_arch
from tilewise.kernels.paged_mqa_logits import launch, peers
from tilewise.kernels.paged_mqa_logits.launch import USUAL_CONTEXT_LEN, paged_mqa_logits
from tilewise.kernels.paged_mqa_logits.spec import MAX_NEXT_N, Shape

Query = Tensor | tuple[Tensor, Tensor | None]

MOST_SCHEDULES = 256  # kept, one for each batch size

_max_context_len: int | None = None
_schedules: dict[tuple[int, int, torch.device], Tensor] = {}


def available() -> bool:
    """Whether there is something to replace: DeepGEMM, or vLLM's copy of it."""
    return peers.installed()


def install(max_context_len: int | None = None) -> None:
    """Put the drop-in in place of DeepGEMM's functions and of vLLM's names for them; twice is once.

    max_context_len: the longest context to choose launches for, where the caller knows one; DeepGEMM's signature has
    no place for it, and the width of the logits says nothing about it.
    Raises UnsupportedError where neither DeepGEMM nor a loaded vLLM is there.
    """
    global _max_context_len
    _max_context_len = max_context_len
    _is_deep_gemms.cache_clear()
    _installed.install(
        {
            peers.FUNCTION: fp8_fp4_paged_mqa_logits,
            "fp8_paged_mqa_logits": fp8_paged_mqa_logits,
            peers.METADATA: get_paged_mqa_logits_metadata,
        },
        {
            peers.FUNCTION: vllm_fp8_fp4_paged_mqa_logits,
            peers.METADATA: vllm_get_paged_mqa_logits_metadata,
            "native_next_n_supported": vllm_native_next_n_supported,
        },
    )


def uninstall() -> None:
    """Put everything back; without an install before, do nothing."""
    _installed.uninstall()


def warm_up(shapes: list[Shape], *, page_stride: int | None = None, device: str = "cuda") -> int:
    """Compile and load what these shapes launch through the drop-in, whose lengths are a token's each.

    Returns the number of kernels that were new; see `tilewise.warm_up`.
    """
    return launch.warm_up(shapes, per_token_lens=True, page_stride=page_stride, device=device)


# -- DeepGEMM's functions


def fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool | Tensor | None = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of every query token against a paged KV cache, by the launch measured or predicted to be the quickest.

    q              [batch_size, next_n, heads, head_dim]     float8_e4m3fn, alone or with None as (values, None)
    kv_cache       [num_blocks, block_kv, 1, head_dim + 4]   uint8: page values, then fp32 scales; pages may have gaps
    weights        [batch_size * next_n, heads]              float32
    context_lens   [batch_size, next_n]                      int32: how many columns each token sees
    block_table    [batch_size, max_blocks]                  int32
    schedule_meta  of get_paged_mqa_logits_metadata: read by DeepGEMM's kernel alone
    returns        [batch_size * next_n, max_context_len]    float32, in rows that start at multiples of 1024 bytes

    Columns at or past the longest length of a request hold what the memory held, unless `clean_logits`; those before
    it that a token does not see are -inf, where DeepGEMM leaves scores: both mean nothing to a reader who goes by
    the lengths. context_lens of [batch_size] are taken as the request's length: its last token sees all of it, the one
    before one column less. The eighth positional argument is `indices` in DeepGEMM 2.8 and was `clean_logits` before:
    a tensor is taken for the one, a bool for the other.

    Scales of q, `indices`, packed fp4 values, bfloat16 weights or logits go to DeepGEMM. Raises UnsupportedError where
    that is not installed, and what `tilewise.paged_mqa_logits` raises where neither takes the launch.
    """
    if clean_logits is not True and clean_logits is not False:
        indices, clean_logits = (clean_logits if indices is None else indices), False
    values, scales = (q, None) if isinstance(q, Tensor) else q
    foreign = _foreign(values, scales, weights, logits_dtype, indices)
    if foreign:
        more = {"logits_dtype": logits_dtype} if logits_dtype != torch.float32 else {}
        return _hand_over(
            foreign, (values, scales), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
            **more, **({} if indices is None else {"indices": indices}),
        )  # fmt: skip
    return _serve(
        values, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, bool(clean_logits)
    )


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """DeepGEMM's older name; see fp8_fp4_paged_mqa_logits."""
    return fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, indices=indices
    )


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """A schedule [num_sms + 1, 2], int32, that DeepGEMM's kernel can run by; tilewise's kernels need none.

    Where DeepGEMM's own kernel may be what runs, it is DeepGEMM's. Elsewhere it deals whole requests to multiprocessors
    without reading a length: right for any lengths, only unbalanced, and cheap.
    """
    own = _installed.original(peers.METADATA)
    next_n = context_lens.shape[1] if context_lens.dim() == 2 else 1
    if own is not None and (indices is not None or not _schedule_is_spare(context_lens, next_n)):
        made: Tensor = own(context_lens, block_kv, num_sms, **({} if indices is None else {"indices": indices}))
        return made
    return _even_schedule(context_lens.shape[0], num_sms, context_lens.device)


# -- vLLM's names for them


def vllm_fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor | None,
    max_model_len: int,
    indices: Tensor | None = None,
) -> Tensor:
    """fp8_fp4_paged_mqa_logits with vLLM's names of arguments."""
    return fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=indices
    )


def vllm_get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_size: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """get_paged_mqa_logits_metadata with vLLM's meaning of num_sms: all of them, whatever next_n."""
    next_n = context_lens.shape[1] if context_lens.dim() == 2 else 1
    own = _installed.vllm_original(peers.METADATA)
    if own is not None and (indices is not None or not _schedule_is_spare(context_lens, next_n)):
        made: Tensor = own(context_lens, block_size, num_sms, **({} if indices is None else {"indices": indices}))
        return made
    slots = peers.schedule_slots(num_sms, next_n) if _arch(context_lens).isa == "sm90" else num_sms
    return _even_schedule(context_lens.shape[0], slots, context_lens.device)


def vllm_native_next_n_supported(next_n: int) -> bool:
    """Whether a request's query tokens may come in one row, so that vLLM need not flatten them."""
    own = _installed.vllm_original("native_next_n_supported")
    return 1 <= next_n <= MAX_NEXT_N or (own is not None and bool(own(next_n)))


# -- who serves


def _foreign(
    values: Tensor, scales: Tensor | None, weights: Tensor, logits_dtype: torch.dtype, indices: Tensor | None
) -> str:
    """What only DeepGEMM may take, or nothing."""
    if scales is not None or values.dtype != torch.float8_e4m3fn:
        return f"q must be float8_e4m3fn without scales, got {values.dtype}{'' if scales is None else ' with scales'}"
    if indices is not None:
        return "indices must be None"
    if logits_dtype != torch.float32:
        return f"logits_dtype must be float32, got {logits_dtype}"
    if weights.dtype != torch.float32:
        return f"weights must be float32, got {weights.dtype}"
    return ""


def _serve(
    q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor,
    schedule_meta: Tensor | None, width: int, clean: bool,
) -> Tensor:  # fmt: skip
    own = _installed.original(peers.FUNCTION)
    try:
        for name, tensor, dimensions in (("q", q, 4), ("kv_cache", kv_cache, 4), ("block_table", block_table, 2)):
            if tensor.dim() != dimensions:
                raise InvalidTensorError(f"{name} must have {dimensions} dimensions, got {tuple(tensor.shape)}")
        batch_size, next_n, heads, head_dim = q.shape
        block_kv = kv_cache.shape[1]
        if next_n > MAX_NEXT_N:
            q, context_lens, block_table = _shorter_rows(q, context_lens, block_table)
            batch_size, next_n = q.shape[:2]
            schedule_meta = None  # it was for other rows
        if block_table.stride(1) != 1:
            block_table = block_table.contiguous()
        longest = min(_max_context_len or USUAL_CONTEXT_LEN, width, block_table.shape[1] * block_kv)
        sizes = batch_size, next_n, heads, head_dim, block_kv, longest
        if own is not None and not clean and _is_deep_gemms(sizes, _arch(q)):
            return _own_kernel(own, q, kv_cache, weights, context_lens, block_table, schedule_meta, width)
        aligned = -(-max(width, 1) // peers.ROW_ALIGNMENT) * peers.ROW_ALIGNMENT
        out = torch.empty((batch_size * next_n, aligned), dtype=torch.float32, device=q.device)
        if aligned != width:
            out = out[:, :width]
        return paged_mqa_logits(
            q, kv_cache, weights, context_lens, block_table, width, max_context_len=longest, out=out,
            clean_logits=clean,
        )  # fmt: skip
    except (CaptureError, InvalidConfigError, InvalidShapeError, InvalidTensorError):
        # Not warmed, or nothing of ours takes it. DeepGEMM's kernel may, and may have run before the capture.
        if own is None or clean:
            raise
        return _own_kernel(own, q, kv_cache, weights, context_lens, block_table, schedule_meta, width)


@functools.lru_cache(maxsize=4096)
def _is_deep_gemms(sizes: tuple[int, int, int, int, int, int], arch: Arch) -> bool:
    """Whether a launch is left to DeepGEMM's own kernel."""
    batch_size, next_n, heads, head_dim, block_kv, longest = sizes
    try:
        shape = Shape(batch_size, next_n, heads, head_dim, block_kv, longest)
    except InvalidShapeError:  # for tilewise's checks to say
        return False
    return peers.why_not(shape, next_n, arch) is None and own_kernel_is_faster(shape, arch)


def _own_kernel(
    own: Any, q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor,
    schedule_meta: Tensor | None, width: int,
) -> Tensor:  # fmt: skip
    """DeepGEMM's kernel on the caller's schedule, or on its own where the query tokens have to be dealt to rows."""
    next_n = q.shape[1] if q.dim() == 4 else 1
    native = next_n in peers.TOKENS or _arch(q).isa != "sm90"
    if native and schedule_meta is not None and context_lens.dim() == 2:
        found: Tensor = own((q, None), kv_cache, weights, context_lens, block_table, schedule_meta, width)
        return found
    tokens = peers.tokens_per_row(next_n)[0]
    lens = peers.row_lens(context_lens, next_n, tokens)
    functions = _installed.originals()
    made = peers.schedule(functions, lens, kv_cache.shape[1])
    tables = peers.row_tables(block_table, next_n, tokens)
    return peers.call(functions, q.contiguous(), kv_cache, weights, lens, tables, made, width)


def _hand_over(why: str, *arguments: Any, **more: Any) -> Tensor:
    own = _installed.original(peers.FUNCTION)
    if own is None:
        raise UnsupportedError(f"tilewise takes no such launch, and DeepGEMM is not installed: {why}")
    found: Tensor = own(*arguments, **more)
    return found


def _shorter_rows(q: Tensor, context_lens: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same query tokens in rows of at most MAX_NEXT_N, each row with the whole table of its request."""
    next_n = q.shape[1]
    tokens = max(count for count in range(1, MAX_NEXT_N + 1) if next_n % count == 0)
    return (
        q.reshape(-1, tokens, *q.shape[2:]),
        peers.row_lens(context_lens, next_n, tokens),
        peers.row_tables(block_table, next_n, tokens),
    )


# -- schedules


def _schedule_is_spare(context_lens: Tensor, next_n: int) -> bool:
    """Whether tilewise serves every launch of these sizes, so that no one reads a schedule."""
    arch = _arch(context_lens)
    batch_size = context_lens.shape[0]
    return arch.isa == "sm90" and next_n <= MAX_NEXT_N and not own_kernel_may_be_faster(batch_size, next_n, arch)


def _even_schedule(batch_size: int, slots: int, device: torch.device) -> Tensor:
    """[slots + 1, 2], the caller's own: multiprocessor i starts with request i * batch_size / slots."""
    key = (batch_size, slots, device)
    kept = _schedules.get(key)
    if kept is None:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        starts = torch.arange(slots + 1, device=device) * batch_size // max(1, slots)
        kept = torch.stack([starts, torch.zeros_like(starts)], 1).int()
        if capturing:  # the graph's memory, not ours to keep
            return kept
        if len(_schedules) >= MOST_SCHEDULES:
            _schedules.clear()
        _schedules[key] = kept
    # A copy: callers keep a schedule and write the next one over it.
    return kept.clone()


def _arch(tensor: Tensor) -> Arch:
    return current_arch(tensor.device.index or 0) if tensor.device.type == "cuda" else current_arch()
