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
    workgroup_barrier,
)
from tilewise.kernels.paged_mqa_logits.sm90.epilogue import (
    _column_weights,
    _linear_columns,
    _linear_sums,
    _q_tile,
    _quad_sums,
    _second_operand,
    _second_product,
    _second_weights,
    _second_zero,
    _store_tokens,
    _token_sums,
    _with_linear,
)
from tilewise.kernels.paged_mqa_logits.sm90.producer import _producer
from tilewise.kernels.paged_mqa_logits.sm90.schedule import (
    _balanced_share,
    _even_share,
    _extent,
    _following_length,
    _lengths,
    _tiles,
)
from tilewise.kernels.paged_mqa_logits.sm90.state import Buffers, Part, Problem

_first_token = constexpr_function(pieces.first_token)
_piece_count = constexpr_function(pieces.piece_count)
_piece_start = constexpr_function(pieces.piece_start)
_piece_tokens = constexpr_function(pieces.piece_tokens)


@gluon.jit
def _product(p, buf, k, token, TOKENS: gl.constexpr):
    COLUMNS: gl.constexpr = TOKENS * p.HEADS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(k, _q_tile(p, buf, token, TOKENS).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _linear_product(p, buf, k, slot):
    COLUMNS: gl.constexpr = buf.second.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(k, buf.second.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _tile_stage(p, part, i, TILE: gl.constexpr):
    # Ring slot of this consumer's TILE-th tile from tile i of the segment on.
    return (part.done + i + TILE * (p.CONSUMERS // p.TOKEN_SPLIT)) % p.STAGES


@gluon.jit
def _wait_for_tile(p, buf, part, i, TILE: gl.constexpr):
    # Returns the tile's scales, which come with it.
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.HEADS, 32]))
    stage = _tile_stage(p, part, i, TILE)
    turn = (part.done + i + TILE * (p.CONSUMERS // p.TOKEN_SPLIT)) // p.STAGES
    mbarrier.wait(buf.k_full.index(stage), turn & 1)
    scales = reinterpret(buf.k_scale, gl.float32, [p.STAGES, 64], gl.NVMMASharedLayout(0, 32, 1))
    return scales.index(stage).load(ROW)


@gluon.jit
def _score_tiles(p, buf, part, weights, factors, i, OWN: gl.constexpr, INDEX: gl.constexpr, TILES: gl.constexpr):
    # TILES tiles of this consumer, from tile i of the segment on, as one row of products: up to IN_FLIGHT of them run
    # while an epilogue does, across the border of two tiles too. None is left when this ends: ptxas would drain them.
    PIECES: gl.constexpr = _piece_count(OWN, p.DOT_N)  # products a tile
    PRODUCTS: gl.constexpr = TILES * PIECES
    AHEAD: gl.constexpr = PRODUCTS if PRODUCTS < p.IN_FLIGHT else p.IN_FLIGHT
    SECOND: gl.constexpr = p.RELU == "bf16" or p.RELU == "tf32"
    LINEAR: gl.constexpr = p.RELU == "abs"
    SLOTS: gl.constexpr = buf.second.shape[0] // p.CONSUMERS
    SETS: gl.constexpr = p.CONSUMERS // p.TOKEN_SPLIT
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, p.HEAD_DIM], gl.float8e4nv)
    tiles = reinterpret(buf.k, gl.float8e4nv, [p.STAGES, 64, p.HEAD_DIM], K_LAYOUT)
    accs = ()
    extras = ()
    scales = ()
    for n in gl.static_range(AHEAD):
        if n % PIECES == 0:
            scales = scales + (_wait_for_tile(p, buf, part, i, n // PIECES),)
        k = tiles.index(_tile_stage(p, part, i, n // PIECES))
        if LINEAR and n % PIECES == 0:
            extras = extras + (_linear_product(p, buf, k, INDEX),)
        at = part.base + _piece_start(OWN, p.DOT_N, n % PIECES)
        accs = accs + (_product(p, buf, k, at, _piece_tokens(OWN, p.DOT_N, n % PIECES)),)
    sums = ()
    second = _second_zero(p)
    for u in gl.static_range(TILES):
        stage = _tile_stage(p, part, i, u)
        column = (part.tile + i + u * SETS) * 64
        masked = column + 64 > part.low
        for j in gl.static_range(PIECES):
            acc = warpgroup_mma_wait(
                (AHEAD if PRODUCTS - u * PIECES - j > AHEAD else PRODUCTS - u * PIECES - j) - 1,
                deps=(accs[u * PIECES + j],),
            )
            if LINEAR and j == 0:
                extra = warpgroup_mma_wait(
                    (AHEAD if PRODUCTS - u * PIECES > AHEAD else PRODUCTS - u * PIECES) - 1, deps=(extras[u],)
                )
                linear = _linear_sums(p, extra, factors)
            if j == PIECES - 1:
                mbarrier.arrive(buf.k_empty.index(stage), count=1)
            if SECOND:
                second = _second_product(
                    p, buf, _second_operand(p, acc), second, INDEX * SLOTS + j,
                    _piece_start(OWN, p.DOT_N, j) % 4 != 0, _piece_tokens(OWN, p.DOT_N, j),
                )  # fmt: skip
            else:
                if p.KEEP_WEIGHTS:
                    w = weights[j]
                else:
                    at = part.base + _piece_start(OWN, p.DOT_N, j)
                    w = _column_weights(p, buf, at, _piece_tokens(OWN, p.DOT_N, j))
                sums = sums + _token_sums(p, acc, w, _piece_tokens(OWN, p.DOT_N, j))
            if j == PIECES - 1 or _piece_start(OWN, p.DOT_N, j + 1) % 4 == 0:
                if SECOND:
                    y8 = warpgroup_mma_wait(0, deps=(second,))
                    y = gl.sum(gl.reshape(y8, [64, 4, 2]), 2)
                    second = _second_zero(p)
                else:
                    if LINEAR:
                        sums = _with_linear(
                            sums, linear, (_piece_start(OWN, p.DOT_N, j + 1) - 1) // 4 * 4,
                            (_piece_start(OWN, p.DOT_N, j + 1) - 1) % 4 + 1,
                        )  # fmt: skip
                    y = _quad_sums(p, sums, (_piece_start(OWN, p.DOT_N, j + 1) - 1) % 4 + 1)
                    sums = ()
                _store_tokens(
                    p, y, scales[u], part, column, masked,
                    (_piece_start(OWN, p.DOT_N, j + 1) - 1) // 4 * 4, (_piece_start(OWN, p.DOT_N, j + 1) - 1) % 4 + 1,
                )  # fmt: skip
            if u * PIECES + j + AHEAD < PRODUCTS:
                if (j + AHEAD) % PIECES == 0:
                    scales = scales + (_wait_for_tile(p, buf, part, i, (u * PIECES + j + AHEAD) // PIECES),)
                k = tiles.index(_tile_stage(p, part, i, (u * PIECES + j + AHEAD) // PIECES))
                if LINEAR and (j + AHEAD) % PIECES == 0:
                    extras = extras + (_linear_product(p, buf, k, INDEX),)
                at = part.base + _piece_start(OWN, p.DOT_N, (j + AHEAD) % PIECES)
                accs = accs + (_product(p, buf, k, at, _piece_tokens(OWN, p.DOT_N, (j + AHEAD) % PIECES)),)


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
    PIECES: gl.constexpr = _piece_count(OWN, p.DOT_N)
    SECOND: gl.constexpr = p.RELU == "bf16" or p.RELU == "tf32"
    LINEAR: gl.constexpr = p.RELU == "abs"
    SLOTS: gl.constexpr = buf.second.shape[0] // p.CONSUMERS
    base = slot * p.Q_TOKENS + FIRST
    weights = ()
    factors = ()
    if SECOND:
        for j in gl.static_range(PIECES):
            _second_weights(
                p, buf, base + _piece_start(OWN, p.DOT_N, j), INDEX * SLOTS + j,
                _piece_start(OWN, p.DOT_N, j) % 4, _piece_tokens(OWN, p.DOT_N, j),
            )  # fmt: skip
        fence_async_shared()
        workgroup_barrier()  # here rather than in the loop, where the compiler would put one before each product
    if LINEAR:
        factors = _linear_columns(p, buf, base, INDEX, OWN)
        fence_async_shared()
        workgroup_barrier()
    if p.KEEP_WEIGHTS:
        for j in gl.static_range(PIECES):
            at = base + _piece_start(OWN, p.DOT_N, j)
            weights = weights + (_column_weights(p, buf, at, _piece_tokens(OWN, p.DOT_N, j)),)

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
    part = Part(request, token, length, extent, low, tile, done, base)

    i = (SET + SETS - done % SETS) % SETS
    if p.TILES == 2:
        while i + SETS < here:
            _score_tiles(p, buf, part, weights, factors, i, OWN, INDEX, 2)
            i += 2 * SETS
    while i < here:
        _score_tiles(p, buf, part, weights, factors, i, OWN, INDEX, 1)
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
    k_desc, scale_desc, q_desc, weights_desc, block_tables, lens, out, batch_size, max_columns, split_kv,
    table_stride, lens_stride, weights_first, weights_stride, out_stride,
    NEXT_N: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_KV: gl.constexpr,
    FUSE_N: gl.constexpr, DOT_N: gl.constexpr, IN_FLIGHT: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, TOKEN_SPLIT: gl.constexpr, EPILOGUE: gl.constexpr, KEEP_WEIGHTS: gl.constexpr,
    BALANCED: gl.constexpr, LENS_2D: gl.constexpr, TILES: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    SECOND_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(STAGES % (CONSUMERS // TOKEN_SPLIT) == 0, "a ring slot must always belong to the same consumers")
    p = Problem(
        block_tables, lens, out, batch_size, max_columns, table_stride, lens_stride, weights_first,
        weights_stride, out_stride,
        NEXT_N, HEADS, HEAD_DIM, BLOCK_KV, FUSE_N, DOT_N, IN_FLIGHT, STAGES, CONSUMERS, TOKEN_SPLIT, EPILOGUE,
        KEEP_WEIGHTS, BALANCED, LENS_2D, TILES,
    )  # fmt: skip
    # The lengths are asked for before anything else: the barriers are set up while they arrive.
    if BALANCED:
        lane = gl.arange(0, CHUNK, layout=gl.BlockedLayout([CHUNK // 32], [32], [gl.num_warps()], [0]))
        length = _lengths(p, lane, lane < batch_size)
    else:
        split = gl.program_id(0) % split_kv
        group = gl.program_id(0) // split_kv % p.GROUPS
        request = gl.program_id(0) // split_kv // p.GROUPS
        length = _lengths(p, request, True)

    COPIES: gl.constexpr = 1 if BLOCK_KV >= 64 else 64 // BLOCK_KV
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    F8: gl.constexpr = gl.float8e4nv
    SECOND: gl.constexpr = gl.float32 if p.RELU == "tf32" else (F8 if p.RELU == "abs" else gl.bfloat16)
    SECOND_SHAPE: gl.constexpr = (
        [CONSUMERS, SECOND_SLOTS, HEAD_DIM] if p.RELU == "abs" else [CONSUMERS * SECOND_SLOTS, 8, DOT_N * HEADS]
    )
    buf = Buffers(
        gl.allocate_shared_memory(F8, [STAGES * COPIES, 1, 64 // COPIES, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * COPIES, 1, 64 // COPIES], scale_desc.layout),
        gl.allocate_shared_memory(F8, [2 * p.Q_TOKENS, 1, 1, HEADS, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2 * p.Q_TOKENS, p.WEIGHTS_PITCH], weights_desc.layout),
        gl.allocate_shared_memory(
            SECOND, SECOND_SHAPE, gl.NVMMASharedLayout.get_default_for([SECOND_SHAPE[1], SECOND_SHAPE[2]], SECOND)
        ),
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

    if BALANCED:
        share = _balanced_share(p, lane, length, CHUNK, CHUNKS)
    else:
        share = _even_share(p, request, group, split, split_kv, length)

    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consumer, (p, buf, share, 0)),
                (_producer, (p, buf, share, k_desc, scale_desc, q_desc, weights_desc)),
            ],
            [1], [24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (p, buf, share, 0)),
                (_consumer, (p, buf, share, 1)),
                (_producer, (p, buf, share, k_desc, scale_desc, q_desc, weights_desc)),
            ],
            [4, 1], [CONSUMER_REGISTERS, 24],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (p, buf, share, 0)),
                (_consumer, (p, buf, share, 1)),
                (_consumer, (p, buf, share, 2)),
                (_producer, (p, buf, share, k_desc, scale_desc, q_desc, weights_desc)),
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
                (_producer, (p, buf, share, k_desc, scale_desc, q_desc, weights_desc)),
            ],
            [4, 4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24],
        )  # fmt: skip
