"""Paged MQA logits on Hopper: Gluon device functions, and nothing else.

One producer warp copies query tokens, K tiles and their scales with TMA into rings guarded by barriers; one to four
consumer warpgroups turn each tile of 64 cached tokens (the rows of the product) and a few query tokens times heads
(its columns) into logits. A workgroup scores a run of tiles that may cross requests (schedule "balanced": all
workgroups the same number, counted on the device) or one part of one request (schedule "even").
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.paged_mqa_logits.sm90 import pieces
from tilewise.kernels.paged_mqa_logits.sm90.compat import (
    constexpr_function,
    reinterpret,
    zero_from_here,
)
from tilewise.kernels.paged_mqa_logits.sm90.epilogue import (
    _add_product,
    _piece_weights,
    _product_weights,
    _store_tokens,
    _token_sums,
)
from tilewise.kernels.paged_mqa_logits.sm90.producer import _producer
from tilewise.kernels.paged_mqa_logits.sm90.schedule import (
    _ask_for_page_ids,
    _balanced_share,
    _even_share,
    _extent,
    _following_length,
    _lengths,
    _tiles,
)
from tilewise.kernels.paged_mqa_logits.sm90.state import Buffers, Part, Problem

_first_token = constexpr_function(pieces.first_token)
_piece_start = constexpr_function(pieces.piece_start)
_piece_tokens = constexpr_function(pieces.piece_tokens)
_product_count = constexpr_function(pieces.product_count)
_product_part = constexpr_function(pieces.product_part)
_product_piece = constexpr_function(pieces.product_piece)
_q_position = constexpr_function(pieces.q_position)


@gluon.jit
def _product(p, buf, k, slot, POSITION: gl.constexpr, TOKENS: gl.constexpr, PART: gl.constexpr):
    # A tile of K times one product's columns: heads of a piece of TOKENS query tokens.
    COLUMNS: gl.constexpr = (TOKENS if TOKENS < p.DOT_N else p.DOT_N) * p.HEADS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    TILES: gl.constexpr = p.Q_TOKENS * p.HEADS // COLUMNS  # of a q buffer
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, p.HEAD_DIM], gl.float8e4nv)
    tiles = reinterpret(buf.q, gl.float8e4nv, [2 * TILES, COLUMNS, p.HEAD_DIM], Q_LAYOUT)
    q = tiles.index(slot * TILES + POSITION * p.HEADS // COLUMNS + PART)
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weights_of(p, buf, slot, j: gl.constexpr, TOKENS: gl.constexpr, OWN: gl.constexpr, INDEX: gl.constexpr):
    # Weights of the columns of a consumer's product j.
    PIECE: gl.constexpr = _product_piece(OWN, p.DOT_N, j)
    SIZE: gl.constexpr = _piece_tokens(OWN, PIECE)
    COLUMNS: gl.constexpr = (SIZE if SIZE < p.DOT_N else p.DOT_N) * p.HEADS
    POSITION: gl.constexpr = _q_position(TOKENS, p.DOT_N, p.TOKEN_SPLIT, INDEX % p.TOKEN_SPLIT, PIECE)
    return _product_weights(
        p, _piece_weights(p, buf, slot, POSITION, SIZE), SIZE, COLUMNS, _product_part(OWN, p.DOT_N, j)
    )


@gluon.jit
def _issue(p, buf, k, slot, j: gl.constexpr, TOKENS: gl.constexpr, OWN: gl.constexpr, INDEX: gl.constexpr):
    # Starts a consumer's product j.
    PIECE: gl.constexpr = _product_piece(OWN, p.DOT_N, j)
    return _product(
        p, buf, k, slot, _q_position(TOKENS, p.DOT_N, p.TOKEN_SPLIT, INDEX % p.TOKEN_SPLIT, PIECE),
        _piece_tokens(OWN, PIECE), _product_part(OWN, p.DOT_N, j),
    )  # fmt: skip


@gluon.jit
def _score_tile(
    p, buf, part, weights, i, TOKENS: gl.constexpr, OWN: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    # Tile i of the segment, as a row of products: up to IN_FLIGHT of them run while an epilogue does. None is left
    # when this ends: ptxas would drain them.
    PRODUCTS: gl.constexpr = _product_count(OWN, p.DOT_N)
    AHEAD: gl.constexpr = PRODUCTS if PRODUCTS < p.IN_FLIGHT else p.IN_FLIGHT
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, p.HEAD_DIM], gl.float8e4nv)
    SCALES: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.HEADS, 32]))
    stage = (part.done + i) % p.STAGES
    mbarrier.wait(buf.k_full.index(stage), ((part.done + i) // p.STAGES) & 1)
    k = reinterpret(buf.k, gl.float8e4nv, [p.STAGES, 64, p.HEAD_DIM], K_LAYOUT).index(stage)
    accs = ()
    for j in gl.static_range(AHEAD):
        accs = accs + (_issue(p, buf, k, part.slot, j, TOKENS, OWN, INDEX),)
    scales = reinterpret(buf.k_scale, gl.float32, [2 * p.STAGES, 64], gl.NVMMASharedLayout(0, 32, 1))
    scale = scales.index((part.done + i) % (2 * p.STAGES)).load(SCALES)
    column = (part.tile + i) * 64
    masked = column + 64 > part.low
    chains = ()
    for j in gl.static_range(PRODUCTS):
        acc = warpgroup_mma_wait((AHEAD if PRODUCTS - j > AHEAD else PRODUCTS - j) - 1, deps=(accs[j],))
        if j == PRODUCTS - 1:
            mbarrier.arrive(buf.k_empty.index(stage), count=1)
        if p.KEEP_WEIGHTS:
            w = weights[j]
        else:
            w = _weights_of(p, buf, part.slot, j, TOKENS, OWN, INDEX)
        chains = _add_product(p, acc, w, chains)
        if j == PRODUCTS - 1 or _product_part(OWN, p.DOT_N, j + 1) == 0:
            y = _token_sums(chains, _piece_tokens(OWN, _product_piece(OWN, p.DOT_N, j)))
            _store_tokens(
                p, y, scale, part, column, masked, _piece_start(OWN, _product_piece(OWN, p.DOT_N, j))
            )  # fmt: skip
            chains = ()
        if j + AHEAD < PRODUCTS:
            accs = accs + (_issue(p, buf, k, part.slot, j + AHEAD, TOKENS, OWN, INDEX),)


@gluon.jit
def _score(
    p, buf, slot, request, group, length, tile, here, done, TOKENS: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    # `here` tiles of one token group of one request, from `tile` on; `done` tiles of this workgroup came before.
    PART: gl.constexpr = INDEX % p.TOKEN_SPLIT
    SETS: gl.constexpr = p.CONSUMERS // p.TOKEN_SPLIT  # of consumers that work on different tiles
    SET: gl.constexpr = INDEX // p.TOKEN_SPLIT
    FIRST: gl.constexpr = _first_token(TOKENS, p.DOT_N, p.TOKEN_SPLIT, PART)
    OWN: gl.constexpr = _first_token(TOKENS, p.DOT_N, p.TOKEN_SPLIT, PART + 1) - FIRST
    weights = ()
    if p.KEEP_WEIGHTS:
        for j in gl.static_range(_product_count(OWN, p.DOT_N)):
            weights = weights + (_weights_of(p, buf, slot, j, TOKENS, OWN, INDEX),)

    token = group * p.FUSE_N + FIRST
    extent = _extent(p, length)
    if p.LENS_2D:
        bounds = p.lens + request * p.lens_stride + token
        low = gl.load(bounds)
        for t in gl.static_range(1, OWN):
            low = gl.minimum(low, gl.load(bounds + t))
    else:
        low = length - p.NEXT_N + 1 + token
    low = gl.minimum(low, extent)  # from this column on, a tile needs masks
    part = Part(request, token, length, extent, low, tile, done, slot)

    i = (SET + SETS - done % SETS) % SETS
    while i < here:
        _score_tile(p, buf, part, weights, i, TOKENS, OWN, INDEX)
        i += SETS


@gluon.jit
def _consumer(p, buf, share, INDEX: gl.constexpr):
    request = share.request
    group = share.group
    tile = share.tile
    left = share.count
    length = share.length
    done = 0
    turn = 0
    while left > 0:
        here = gl.minimum(_tiles(p, length) - tile, left)
        following = length
        if p.BALANCED:
            following = _following_length(p, request)
        if here > 0:
            slot = turn % 2
            mbarrier.wait(buf.q_full.index(slot), (turn // 2) & 1)
            if p.NEXT_N % p.FUSE_N == 0:
                _score(p, buf, slot, request, group, length, tile, here, done, p.FUSE_N, INDEX)
            else:
                if group < p.GROUPS - 1:
                    _score(p, buf, slot, request, group, length, tile, here, done, p.FUSE_N, INDEX)
                else:
                    _score(p, buf, slot, request, group, length, tile, here, done, p.NEXT_N % p.FUSE_N, INDEX)
            mbarrier.arrive(buf.q_empty.index(slot), count=1)
            done += here
            turn += 1
        left -= here
        tile = 0
        if p.GROUPS == 1:
            request += 1
            length = following
        else:
            group += 1
            if group == p.GROUPS:
                group = 0
                request += 1
                length = following


@gluon.jit
def _paged_mqa_logits_kernel(
    k_desc, scale_desc, q4_desc, q2_desc, q1_desc, weights_desc, block_tables, lens, out, batch_size, max_columns,
    split_kv, portion, table_stride, lens_stride, weights_stride, out_stride,
    NEXT_N: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_KV: gl.constexpr,
    FUSE_N: gl.constexpr, DOT_N: gl.constexpr, IN_FLIGHT: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, TOKEN_SPLIT: gl.constexpr, KEEP_WEIGHTS: gl.constexpr,
    MAX_EVEN: gl.constexpr,
    BALANCED: gl.constexpr, LENS_2D: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    Q_TOKENS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(STAGES % (CONSUMERS // TOKEN_SPLIT) == 0, "a ring slot must always belong to the same consumers")
    p = Problem(
        block_tables, lens, out, batch_size, max_columns, table_stride, lens_stride, weights_stride, out_stride,
        NEXT_N, HEADS, HEAD_DIM, BLOCK_KV, FUSE_N, DOT_N, IN_FLIGHT, STAGES, CONSUMERS, TOKEN_SPLIT,
        KEEP_WEIGHTS, MAX_EVEN, BALANCED, LENS_2D, Q_TOKENS,
    )  # fmt: skip
    # The lengths are asked for before anything else: the barriers are set up while they arrive.
    if BALANCED:
        lane = gl.arange(0, CHUNK, layout=gl.BlockedLayout([CHUNK // 32], [32], [gl.num_warps()], [0]))
        length = _lengths(p, lane, lane < batch_size)
        _ask_for_page_ids(p, gl.program_id(0), 0, 1, portion)
    else:
        part = ((gl.program_id(0).to(gl.float32) + 0.5) * portion).to(gl.int32)
        split = gl.program_id(0) - part * split_kv
        group = part % p.GROUPS
        request = part // p.GROUPS
        length = _lengths(p, request, True)
        _ask_for_page_ids(p, split, request, (group == 0).to(gl.int32), portion)

    COPIES: gl.constexpr = 1 if BLOCK_KV >= 64 else 64 // BLOCK_KV
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    F8: gl.constexpr = gl.float8e4nv
    buf = Buffers(
        gl.allocate_shared_memory(F8, [STAGES * COPIES, 1, 64 // COPIES, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES * COPIES, 1, 64 // COPIES], scale_desc.layout),
        gl.allocate_shared_memory(
            F8, [2 * Q_TOKENS, HEADS, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([HEADS, HEAD_DIM], F8)
        ),
        gl.allocate_shared_memory(gl.float32, [2 * Q_TOKENS, p.WEIGHTS_PITCH], weights_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
    )  # fmt: skip
    # Triton puts a workgroup barrier between two inits of one array, so the arrays take turns.
    for i in gl.static_range(STAGES):
        mbarrier.init(buf.k_full.index(i), count=1)
        mbarrier.init(buf.k_empty.index(i), count=TOKEN_SPLIT)
        if i < 2:
            mbarrier.init(buf.q_full.index(i), count=1)
            mbarrier.init(buf.q_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    length += zero_from_here()
    if BALANCED:
        share = _balanced_share(p, lane, length, portion, CHUNK, CHUNKS)
    else:
        share = _even_share(p, request, group, split, split_kv, length, portion)

    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consumer, (p, buf, share, 0)),
                (_producer, (p, buf, share, k_desc, scale_desc, q4_desc, q2_desc, q1_desc, weights_desc)),
            ],
            [1], [24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (p, buf, share, 0)),
                (_consumer, (p, buf, share, 1)),
                (_producer, (p, buf, share, k_desc, scale_desc, q4_desc, q2_desc, q1_desc, weights_desc)),
            ],
            [4, 1], [CONSUMER_REGISTERS, 24],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (p, buf, share, 0)),
                (_consumer, (p, buf, share, 1)),
                (_consumer, (p, buf, share, 2)),
                (_producer, (p, buf, share, k_desc, scale_desc, q4_desc, q2_desc, q1_desc, weights_desc)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (p, buf, share, 0)),
                (_consumer, (p, buf, share, 1)),
                (_consumer, (p, buf, share, 2)),
                (_consumer, (p, buf, share, 3)),
                (_producer, (p, buf, share, k_desc, scale_desc, q4_desc, q2_desc, q1_desc, weights_desc)),
            ],
            [4, 4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24],
        )  # fmt: skip
