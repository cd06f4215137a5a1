"""Paged MQA logits in plain Triton: any GPU with an fp8 dot, and the CPU interpreter.

One program scores `FUSE_N` query tokens of one request against one part of its context: 1 is per-next_n, more is
fused-M. The tokens go through the matrix unit in pieces of `DOT_N` (a power of two; what is left over is cut into
smaller powers of two, so that 5 tokens are 4 + 1 or 2 + 2 + 1 and nothing idles).
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _piece_tokens(fuse_n, dot_n):
    # Tokens in each piece, in order.
    sizes = [dot_n] * (fuse_n // dot_n)
    rest = fuse_n % dot_n
    return tuple(sizes + [size for size in (4, 2, 1) if rest & size])


@triton.constexpr_function
def _num_pieces(fuse_n, dot_n):
    return len(_piece_tokens(fuse_n, dot_n))


@triton.constexpr_function
def _tokens(fuse_n, dot_n, i):
    return _piece_tokens(fuse_n, dot_n)[i]


@triton.constexpr_function
def _first_token(fuse_n, dot_n, i):
    return sum(_piece_tokens(fuse_n, dot_n)[:i])


@triton.jit
def _load_queries(
    q_ptr,
    w_ptr,
    token,
    next_n,
    stride_w,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WEIGHTS_DENSE: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Values [TOKENS * HEADS, HEAD_DIM] and weights [TOKENS * HEADS] of one piece; tokens past the last read as zero.
    row = tl.arange(0, TOKENS * HEADS)
    t = token + row // HEADS
    d = tl.arange(0, HEAD_DIM)
    q_off = (token * HEADS + row) * HEAD_DIM
    if WEIGHTS_DENSE:
        w_off = token * HEADS + row
    else:
        w_off = t.to(tl.int64) * stride_w + row % HEADS
    if MASKED:
        q = tl.load(q_ptr + q_off[:, None] + d[None, :], mask=(t < next_n)[:, None], other=0.0)
        w = tl.load(w_ptr + w_off, mask=t < next_n, other=0.0)
    else:
        q = tl.load(q_ptr + q_off[:, None] + d[None, :])
        w = tl.load(w_ptr + w_off)
    return q, w


@triton.jit
def _score_piece(
    k,
    k_scale,
    pos,
    q,
    w,
    bounds,
    out_ptr,
    token,
    next_n,
    extent,
    stride_out,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_KV: tl.constexpr,
    KV_IS_M: tl.constexpr,
    MASKED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    # `bounds`: how many columns each token of the piece scores; later ones below the extent become -inf.
    # The scale of a cached token is positive and common to all heads, so it is applied once, after the sum.
    t = token + tl.arange(0, TOKENS)
    if not PER_TOKEN:
        bounds = bounds + t
    rows = out_ptr + t.to(tl.int64) * stride_out
    if KV_IS_M:
        x = tl.maximum(tl.dot(k, tl.trans(q)), 0.0) * w[None, :]
        y = tl.sum(tl.reshape(x, (TILE_KV, TOKENS, HEADS)), 2) * k_scale[:, None]
        y = tl.where(pos[:, None] < bounds[None, :], y, float("-inf"))
        mask = (pos < extent)[:, None]
        if MASKED:
            mask = mask & (t < next_n)[None, :]
        tl.store(rows[None, :] + pos[:, None], y, mask=mask)
    else:
        x = tl.maximum(tl.dot(q, tl.trans(k)), 0.0) * w[:, None]
        y = tl.sum(tl.reshape(x, (TOKENS, HEADS, TILE_KV)), 1) * k_scale[None, :]
        y = tl.where(pos[None, :] < bounds[:, None], y, float("-inf"))
        mask = (pos < extent)[None, :]
        if MASKED:
            mask = mask & (t < next_n)[:, None]
        tl.store(rows[:, None] + pos[None, :], y, mask=mask)


# Nothing but the constexprs decides what is compiled: a kernel that was warmed for a config is the one that runs.
# What a deployment never changes is among them: a page stride known to the compiler is worth 1.5 %, and weights that it
# can load 16 bytes at a time save 14 registers, worth 20 % where they cost a workgroup per multiprocessor.
@triton.jit(
    do_not_specialize=[
        "next_n",
        "split_kv",
        "max_columns",
        "stride_q_16",
        "stride_lens",
        "stride_table",
        "stride_w",
        "stride_out",
    ],
    do_not_specialize_on_alignment=["lens_ptr", "table_ptr", "out_ptr"],
)
def _paged_mqa_logits_kernel(
    q_ptr,  # fp8 [batch, next_n, HEADS, HEAD_DIM]
    kv_ptr,  # fp8, pages of BLOCK_KV x HEAD_DIM values, then BLOCK_KV fp32 scales
    scale_ptr,  # the same bytes as fp32
    table_ptr,  # int32 [batch, pages]
    lens_ptr,  # int32 [batch], or [batch, next_n]
    w_ptr,  # fp32 [batch * next_n, HEADS]
    out_ptr,  # fp32 [batch * next_n, max_columns or wider]
    next_n,
    split_kv,
    split_portion,  # 1 / split_kv, a little less
    group_portion,  # 1 / token groups, a little less
    max_columns,  # no column at or past this exists, in the output or in the table
    stride_q_16,  # bytes between requests, divided by 16: the compiler then knows that rows are aligned
    stride_lens,
    stride_table,
    stride_w,
    stride_out,
    FUSE_N: tl.constexpr,
    DOT_N: tl.constexpr,
    KV_IS_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    STRIDE_PAGE: tl.constexpr,  # bytes between pages, a multiple of 16
    WEIGHTS_DENSE: tl.constexpr,  # contiguous, and aligned to 16 bytes; else rows stride_w apart
    LENS_2D: tl.constexpr,
    MASKED: tl.constexpr,  # next_n is no multiple of FUSE_N: the last group has fewer tokens
    PREFETCH: tl.constexpr,  # on NVIDIA GPUs
):
    # Token groups run fastest: programs that read the same K are neighbours, and meet in the cache.
    # Products with reciprocals take a third of the time of integer divisions, and all that follows waits for these.
    pid = tl.program_id(0)
    part = ((pid.to(tl.float32) + 0.5) * group_portion).to(tl.int32)
    group = pid - part * tl.cdiv(next_n, FUSE_N)
    token0 = group * FUSE_N
    batch = ((part.to(tl.float32) + 0.5) * split_portion).to(tl.int32)
    part -= batch * split_kv

    lens_ptr += batch.to(tl.int64) * stride_lens
    if LENS_2D:
        each = tl.arange(0, 8)
        context_len = tl.max(tl.load(lens_ptr + each, mask=each < next_n, other=0), 0)
    else:
        context_len = tl.load(lens_ptr)
    table_ptr += batch.to(tl.int64) * stride_table
    if PREFETCH:
        # Where this part begins if the request is as long as the table, about: those page ids go to the cache while the
        # length arrives. One thread of one group asks: hundreds that ask for one line keep the cache busy for 1 us.
        entry = (part.to(tl.float32) * split_portion * (max_columns // BLOCK_KV).to(tl.float32)).to(tl.int32)
        entry = tl.minimum(entry, tl.maximum(max_columns - 1, 0) // BLOCK_KV)
        tl.inline_asm_elementwise(
            "{ .reg .pred asks; .reg .b32 other; mov.u32 other, %tid.x; or.b32 other, other, $2; "
            "setp.eq.u32 asks, other, 0; @asks prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [table_ptr + entry, group],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    extent = tl.minimum(tl.maximum(context_len, 0), max_columns)
    tiles = tl.cdiv(extent, TILE_KV)
    # tiles // split_kv and its rest. Neither product exceeds its quotient; what is left after both is less than one.
    share = (tiles.to(tl.float32) * split_portion).to(tl.int32)
    share += ((tiles - share * split_kv).to(tl.float32) * split_portion).to(tl.int32)
    extra = tiles - share * split_kv
    more = (extra >= split_kv).to(tl.int32)
    share += more
    extra -= more * split_kv
    first = part * share + tl.minimum(part, extra)
    last = first + share + (part < extra).to(tl.int32)
    # No early return for an empty part: the queries would then wait for the lengths, and small launches would feel it.

    row0 = batch.to(tl.int64) * next_n
    q_ptr += batch.to(tl.int64) * stride_q_16 * 16
    w_ptr += row0 * stride_w
    out_ptr += row0 * stride_out

    PIECES: tl.constexpr = _num_pieces(FUSE_N, DOT_N)
    queries = ()
    weights = ()
    bounds = ()
    for i in tl.static_range(PIECES):
        q, w = _load_queries(
            q_ptr,
            w_ptr,
            token0 + _first_token(FUSE_N, DOT_N, i),
            next_n,
            stride_w,
            _tokens(FUSE_N, DOT_N, i),
            HEADS,
            HEAD_DIM,
            WEIGHTS_DENSE,
            MASKED,
        )
        queries = queries + (q,)
        weights = weights + (w,)
        if LENS_2D:
            t = token0 + _first_token(FUSE_N, DOT_N, i) + tl.arange(0, _tokens(FUSE_N, DOT_N, i))
            bounds = bounds + (tl.load(lens_ptr + t, mask=t < next_n, other=0),)
        else:
            bounds = bounds + (context_len - next_n + 1,)

    n = tl.arange(0, TILE_KV)
    d = tl.arange(0, HEAD_DIM)
    last_page = (extent - 1) // BLOCK_KV
    for tile in tl.range(first, last, num_stages=NUM_STAGES):
        pos = tile * TILE_KV + n
        if TILE_KV <= BLOCK_KV:
            # One page holds the whole tile.
            page = tl.load(table_ptr + tile // (BLOCK_KV // TILE_KV)).to(tl.int64)
            slot = (tile % (BLOCK_KV // TILE_KV)) * TILE_KV + n
            k = tl.load(kv_ptr + page * STRIDE_PAGE + slot[:, None] * HEAD_DIM + d[None, :])
            k_scale = tl.load(scale_ptr + page * (STRIDE_PAGE // 4) + BLOCK_KV * HEAD_DIM // 4 + slot)
        else:
            # The tile spans pages. Table entries past the context may hold anything: the last page stands in.
            index = tl.minimum(pos // BLOCK_KV, last_page)
            pages = tl.load(table_ptr + index).to(tl.int64)
            slot = pos % BLOCK_KV
            k = tl.load(kv_ptr + (pages * STRIDE_PAGE + slot * HEAD_DIM)[:, None] + d[None, :])
            k_scale = tl.load(scale_ptr + pages * (STRIDE_PAGE // 4) + BLOCK_KV * HEAD_DIM // 4 + slot)
        for i in tl.static_range(PIECES):
            _score_piece(
                k,
                k_scale,
                pos,
                queries[i],
                weights[i],
                bounds[i],
                out_ptr,
                token0 + _first_token(FUSE_N, DOT_N, i),
                next_n,
                extent,
                stride_out,
                _tokens(FUSE_N, DOT_N, i),
                HEADS,
                TILE_KV,
                KV_IS_M,
                MASKED,
                LENS_2D,
            )
