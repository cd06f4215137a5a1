"""From tensors to a launch: check, choose, allocate, run. Holds no kernel code; needs torch and triton."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.errors import CaptureError, InvalidConfigError, InvalidTensorError
from tilewise.kernels.arch import Arch, current_arch
from tilewise.kernels.paged_mqa_logits.spec import (
    HEAD_DIMS,
    MAX_NEXT_N,
    SCALE_BYTES,
    SPACES,
    CacheLayout,
    Config,
    Shape,
    default_config,
    is_valid,
    space,
)
from tilewise.kernels.paged_mqa_logits.traits import Traits, rows_aligned, traits_of, usual_traits

# Context that a launch is chosen for when the caller gives no bound: the host never sees the lengths, and the width of
# the logits says nothing about them.
USUAL_CONTEXT_LEN = 32768
ROW_ALIGNMENT = 256  # elements; top-k kernels want aligned rows, and take a stride, even for a single row


class PreparedLaunch(Protocol):
    """What `prepare` returns."""

    def __call__(
        self, q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_tables: Tensor, out: Tensor,
        max_columns: int,
    ) -> None: ...  # fmt: skip


class Launcher(Protocol):
    """What a kernel's launch module offers; see `LAUNCHERS`."""

    def launch_key(self, shape: Shape, config: Config, traits: Traits) -> tuple[object, ...]:
        """Everything that decides which binary runs: equal keys need no further compilation."""
        ...

    def refuses(self, traits: Traits) -> str | None:
        """Why the kernel can't read tensors that are good otherwise, or None."""
        ...

    def prepare(self, shape: Shape, config: Config, *, per_token_lens: bool = False, device: int = 0) -> PreparedLaunch:
        """A launch of a valid config, bound to everything that can be bound before its tensors are known."""
        ...

    def launch(
        self, q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_tables: Tensor, out: Tensor,
        max_columns: int, shape: Shape, config: Config, traits: Traits,
    ) -> None:  # fmt: skip
        """Launch on checked tensors; `max_columns` bounds the columns of the output and of the table."""
        ...


# Kernel name to the module that launches it.
LAUNCHERS: dict[str, str] = {
    "gfx950": "tilewise.kernels.paged_mqa_logits.gfx950.launch",
    "portable": "tilewise.kernels.paged_mqa_logits.portable_launch",
    "sm90": "tilewise.kernels.paged_mqa_logits.sm90.launch",
}

_warmed: set[tuple[object, ...]] = set()


class _Checked(NamedTuple):
    """What follows from tensors that passed the checks."""

    shape: Shape
    max_columns: int  # of the output and of the table
    traits: Traits  # where the weights start at a multiple of 16 bytes


# By all that the checks look at, addresses apart: a serving process launches few geometries, over and over.
_known: dict[tuple[object, ...], _Checked] = {}
MOST_KNOWN = 4096


@functools.cache
def launcher(kernel: str) -> Launcher:
    """The launch module of a kernel named in LAUNCHERS."""
    return importlib.import_module(LAUNCHERS[kernel])


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_model_len: int,
    *,
    max_context_len: int | None = None,
    mean_context_len: int | None = None,
    cache_layout: CacheLayout = "flat",
    config: Config | None = None,
    out: Tensor | None = None,
    clean_logits: bool = False,
) -> Tensor:
    """ReLU-weighted MQA scores of every query token against a paged KV cache.

    q             [batch_size, next_n, heads, head_dim]        float8_e4m3fn
    kv_cache      [num_blocks, block_kv, 1, head_dim + 4]      uint8: page values, then fp32 scales
    weights       [batch_size * next_n, heads]                 float32
    context_lens  [batch_size] or [batch_size, next_n]         int32
    block_tables  [batch_size, max_blocks]                     int32
    returns       [batch_size * next_n, max_model_len]         float32 (`out` itself when given)

    Row b * next_n + t scores columns below context_lens[b] - next_n + t + 1 (below context_lens[b, t] where lengths
    are per token); later columns below context_lens[b] (the largest of the row) become -inf; columns from there on are
    left as they were, or become -inf with `clean_logits`. A length of 0 is a padding row.

    max_context_len, mean_context_len: what the host knows about the lengths, to choose by; nothing reads the device.
    config: how to launch; chosen by `tilewise.select` when None.

    Raises InvalidTensorError, InvalidShapeError or InvalidConfigError, before anything is launched; CaptureError under
    graph capture for a missing `out` or a kernel that `warm_up` has not prepared.
    """
    if q.dim() == 4 and 0 in q.shape[:2]:
        return _output(q.shape[0] * q.shape[1], max_model_len, q.device, out, clean_logits)
    checked = _check(
        q, kv_cache, weights, context_lens, block_tables, max_model_len, max_context_len, mean_context_len,
        cache_layout, out,
    )  # fmt: skip
    shape, max_columns = checked.shape, checked.max_columns
    arch = _arch(q)
    traits = checked.traits
    if weights.data_ptr() % 16:
        traits = traits._replace(dense_weights=False, tma=False)
    if config is None:
        config = _choose(shape, arch)
        own = launcher(config.kernel)
        if own.refuses(traits) is not None:
            config = _default_for(shape, traits, arch)
            own = launcher(config.kernel)
    else:
        _refuse_invalid(shape, config, arch)
        own = launcher(config.kernel)
        reason = own.refuses(traits)
        if reason is not None:
            raise InvalidTensorError(f"{config}: {reason}")
    key = own.launch_key(shape, config, traits)
    if key not in _warmed:
        if _capturing(q):
            raise CaptureError(f"the kernel for {config} was not warmed: call tilewise.warm_up before the capture")
        _warmed.add(key)
    if out is None:
        out = _output(q.shape[0] * q.shape[1], max_model_len, q.device, None, clean_logits)
    elif clean_logits:
        out.fill_(float("-inf"))
    own.launch(q, kv_cache, weights, context_lens, block_tables, out, max_columns, shape, config, traits)
    return out


def _default_for(shape: Shape, traits: Traits, arch: Arch) -> Config:
    """The default of the first kernel that can read such tensors."""
    for kernel in SPACES:
        if space(kernel).runs_on(arch) and launcher(kernel).refuses(traits) is None:
            config = space(kernel).default_config(shape, arch)
            if config is not None and is_valid(shape, config, arch) is None:
                return config
    raise InvalidTensorError(f"no kernel on {arch.name} reads weights that are not aligned to 16 bytes, for {shape}")


def prepare(
    shape: Shape, config: Config | None = None, *, per_token_lens: bool = False, device: str = "cuda"
) -> PreparedLaunch:
    """One launch bound to its kernel, compiled and loaded, for calls that repeat: no choice and no checks any more.

    The result is called with the tensors of `paged_mqa_logits`, which must be as it wants them and on `device` (for the
    Hopper kernel with weights whose rows start at multiples of 16 bytes), `out`, and the number of columns that both
    `out` and the table have. Their batch may be smaller than the shape's, and their addresses may change; a cache has
    no gaps between its pages unless the kernel is Hopper's. `per_token_lens`: context_lens will be
    [batch_size, next_n]. Nothing in a call allocates, compiles or reads the device.

    Raises InvalidConfigError where the config may not launch.
    """
    index = torch.device(device).index or 0
    arch = current_arch(index)
    chosen = _choose(shape, arch) if config is None else config
    _refuse_invalid(shape, chosen, arch)
    compile_config(shape, chosen, usual_traits(shape, per_token_lens=per_token_lens), device=device)
    return launcher(chosen.kernel).prepare(shape, chosen, per_token_lens=per_token_lens, device=index)


class Plan(Protocol):
    """What `tilewise.capture_plan` returns: launches to prepare."""

    def launches(self) -> Iterable[tuple[Shape, Config]]: ...


def warm_up(
    shapes: Iterable[Shape] | Plan,
    configs: Iterable[Config] = (),
    *,
    per_token_lens: bool = False,
    page_stride: int | None = None,
    device: str = "cuda",
) -> int:
    """Compile and load what these shapes launch, so that a later graph capture neither compiles nor loads.

    Runs each shape's chosen config, its default and the valid ones among `configs` once, on empty requests; for a plan
    of `tilewise.capture_plan`, what it says and the defaults. Returns the number of kernels that were new.
    `per_token_lens` prepares for context_lens of [batch_size, next_n], `page_stride` (bytes) for a cache whose pages
    have gaps.
    """
    given = tuple(configs)
    before = len(_warmed)
    arch = current_arch(torch.device(device).index or 0)
    planned: dict[tuple[Shape, Config], None] = {}
    if isinstance(shapes, Iterable):
        for shape in shapes:
            planned |= {(shape, config): None for config in (_choose(shape, arch), default_config(shape, arch))}
            planned |= {(shape, config): None for config in given if is_valid(shape, config, arch) is None}
    else:
        planned |= dict.fromkeys(shapes.launches())
    for shape, config in planned:
        traits = usual_traits(shape, per_token_lens=per_token_lens, page_stride=page_stride)
        compile_config(shape, config, traits, device=device)
    return len(_warmed) - before


def compile_config(shape: Shape, config: Config, traits: Traits, *, device: str = "cuda") -> None:
    """Compile and load the kernel that `config` needs for `shape`, by launching it on requests without context."""
    batch_size = max(1, shape.batch_size)
    rows = batch_size * shape.next_n
    pages = torch.zeros(2, traits.page_stride, dtype=torch.uint8, device=device)
    width = shape.head_dim + SCALE_BYTES
    q = torch.zeros(batch_size, shape.next_n, shape.heads, shape.head_dim, dtype=torch.uint8, device=device)
    paged_mqa_logits(
        q.view(torch.float8_e4m3fn),
        torch.as_strided(pages, (2, shape.block_kv, 1, width), (traits.page_stride, width, width, 1)),
        torch.zeros(rows, shape.heads, device=device),
        torch.zeros((batch_size, shape.next_n)[: 1 + traits.per_token_lens], dtype=torch.int32, device=device),
        torch.zeros(batch_size, 1, dtype=torch.int32, device=device),
        shape.block_kv,
        cache_layout=shape.cache_layout,
        config=config,
    )


def _check(
    q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_tables: Tensor, max_model_len: int,
    max_context_len: int | None, mean_context_len: int | None, cache_layout: CacheLayout, out: Tensor | None,
) -> _Checked:  # fmt: skip
    """What these tensors ask for; InvalidTensorError or InvalidShapeError says what is wrong with which."""
    key = (
        q.shape, q.stride(), q.dtype, q.device,
        kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.device,
        weights.shape, weights.stride(), weights.dtype, weights.device,
        context_lens.shape, context_lens.stride(), context_lens.dtype, context_lens.device,
        block_tables.shape, block_tables.stride(), block_tables.dtype, block_tables.device,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        # True is 1 and 1.0 is 1 to a dictionary, but not to the checks.
        max_model_len, max_context_len, mean_context_len, type(max_model_len), type(max_context_len),
        type(mean_context_len), cache_layout,
    )  # fmt: skip
    try:
        known = _known.get(key)
    except TypeError:  # something unhashable, which the checks below refuse
        known = None
    _want(q.data_ptr() % 16 == 0, "q", "start at a multiple of 16 bytes", q)
    _want(kv_cache.data_ptr() % 16 == 0, "kv_cache", "start at a multiple of 16 bytes", kv_cache)
    if known is not None:
        return known
    shape = _check_tensors(q, kv_cache, weights, context_lens, block_tables, max_model_len, cache_layout)
    max_columns = min(max_model_len, block_tables.shape[1] * shape.block_kv)
    longest = min(USUAL_CONTEXT_LEN if max_context_len is None else max_context_len, max_columns)
    mean = None if mean_context_len is None else min(mean_context_len, longest)
    shape = Shape(
        shape.batch_size, shape.next_n, shape.heads, shape.head_dim, shape.block_kv, longest, mean, cache_layout
    )
    if out is not None:
        _output(shape.batch_size * shape.next_n, max_model_len, q.device, out, False)
    traits = traits_of(kv_cache, weights, context_lens)._replace(
        dense_weights=weights.is_contiguous(), tma=rows_aligned(weights, context_lens)
    )
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    checked = _known[key] = _Checked(shape, max_columns, traits)
    return checked


def _check_tensors(
    q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_tables: Tensor, max_model_len: int,
    cache_layout: CacheLayout,
) -> Shape:  # fmt: skip
    """The launch shape of these tensors, its context left at 0."""
    _want(q.dim() == 4, "q", "have 4 dimensions [batch_size, next_n, heads, head_dim]", q)
    batch_size, next_n, heads, head_dim = q.shape
    rows = batch_size * next_n
    _want(q.dtype == torch.float8_e4m3fn, "q", "be float8_e4m3fn", q)
    _want(
        q.stride()[1:] == (heads * head_dim, head_dim, 1) or (next_n == 1 and q.stride()[2:] == (head_dim, 1)),
        "q", "be contiguous within a request", q,
    )  # fmt: skip
    _want(batch_size == 1 or q.stride(0) % 16 == 0, "q", "have a batch stride of a multiple of 16 bytes", q)
    _want(head_dim in HEAD_DIMS, "q", f"have a head_dim of {' or '.join(map(str, HEAD_DIMS))}", q)
    _want(1 <= next_n <= MAX_NEXT_N, "q", f"have a next_n of 1 to {MAX_NEXT_N}", q)

    _want(
        kv_cache.dim() in (3, 4) and kv_cache.shape[-1] == head_dim + SCALE_BYTES and kv_cache.shape[-2:-1] != (0,)
        and (kv_cache.dim() == 3 or kv_cache.shape[2] == 1),
        "kv_cache", f"be [num_blocks, block_kv, 1, {head_dim + SCALE_BYTES}]", kv_cache,
    )  # fmt: skip
    _want(kv_cache.dtype in (torch.uint8, torch.float8_e4m3fn), "kv_cache", "be uint8 or float8_e4m3fn", kv_cache)
    _want(
        kv_cache.stride(-1) == 1 and kv_cache.stride(1) == head_dim + SCALE_BYTES,
        "kv_cache", "have contiguous pages", kv_cache,
    )  # fmt: skip
    page_bytes = kv_cache.shape[1] * (head_dim + SCALE_BYTES)
    unit = 16 if kv_cache.shape[1] % 4 == 0 else 4  # a page of one token is 132 bytes: no kernel loads 16 at once there
    _want(
        kv_cache.stride(0) % unit == 0 and (kv_cache.stride(0) >= page_bytes or kv_cache.shape[0] <= 1),
        "kv_cache", f"have a page stride of at least {page_bytes} bytes and a multiple of {unit}", kv_cache,
    )  # fmt: skip

    rule = f"be [{rows}, {heads}] (batch_size * next_n, heads)"
    _want(tuple(weights.shape) == (rows, heads), "weights", rule, weights)
    rule = "be float32 with contiguous rows"
    _want(weights.dtype == torch.float32 and weights.stride(1) == 1, "weights", rule, weights)
    _want(
        tuple(context_lens.shape) in ((batch_size,), (batch_size, next_n)),
        "context_lens", f"be [{batch_size}] or [{batch_size}, {next_n}]", context_lens,
    )  # fmt: skip
    _want(
        context_lens.dtype == torch.int32 and (context_lens.dim() == 1 or context_lens.stride(1) == 1 or next_n == 1),
        "context_lens", "be int32 with contiguous rows", context_lens,
    )  # fmt: skip
    _want(
        block_tables.dim() == 2 and block_tables.shape[0] == batch_size,
        "block_tables", f"be [{batch_size}, max_blocks]", block_tables,
    )  # fmt: skip
    _want(
        block_tables.dtype == torch.int32 and (block_tables.shape[1] <= 1 or block_tables.stride(1) == 1),
        "block_tables", "be int32 with contiguous rows", block_tables,
    )  # fmt: skip
    for name, tensor in (
        ("kv_cache", kv_cache), ("weights", weights), ("context_lens", context_lens), ("block_tables", block_tables),
    ):  # fmt: skip
        _want(tensor.device == q.device, name, f"be on q's device, {q.device}", tensor)
    if type(max_model_len) is not int or max_model_len < 0:
        raise InvalidTensorError(f"max_model_len must be an int of at least 0, got {max_model_len!r}")
    return Shape(batch_size, next_n, heads, head_dim, kv_cache.shape[1], 0, None, cache_layout)


def _want(good: bool, name: str, rule: str, tensor: Tensor) -> None:
    if not good:
        raise InvalidTensorError(
            f"{name} must {rule}, got {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} "
            f"with strides {tensor.stride()} on {tensor.device}"
        )


def _output(rows: int, width: int, device: torch.device, out: Tensor | None, clean: bool) -> Tensor:
    """The caller's buffer after a check, or a new one whose rows are aligned."""
    if out is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError("out must be given under graph capture: nothing may be allocated there")
        aligned = -(-max(width, 1) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        out = torch.empty((rows, aligned), dtype=torch.float32, device=device)
        if aligned != width:
            out = out[:, :width]
        return out.fill_(float("-inf")) if clean else out
    _want(tuple(out.shape) == (rows, width), "out", f"be [{rows}, {width}] (batch_size * next_n, max_model_len)", out)
    _want(
        out.dtype == torch.float32 and (width <= 1 or out.stride(1) == 1) and (rows <= 1 or out.stride(0) >= width),
        "out", "be float32 with contiguous rows that do not overlap", out,
    )  # fmt: skip
    _want(out.device == device, "out", f"be on q's device, {device}", out)
    return out.fill_(float("-inf")) if clean else out


def _arch(q: Tensor) -> Arch:
    return current_arch(q.device.index or 0) if q.device.type == "cuda" else current_arch()


def _capturing(q: Tensor) -> bool:
    return q.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _choose(shape: Shape, arch: Arch) -> Config:
    from tilewise.dispatch.selector import select  # the launcher's one upward call, kept out of import time

    return select(shape, arch=arch).config


@functools.lru_cache(maxsize=4096)
def _refuse_invalid(shape: Shape, config: Config, arch: Arch) -> None:
    reason = is_valid(shape, config, arch)
    if reason is not None:
        raise InvalidConfigError(f"{config} cannot launch {shape}: {reason}")
