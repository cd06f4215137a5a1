"""The producer warp: copies of query tokens, weights, K tiles and scales. Gluon device functions, and nothing else."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.paged_mqa_logits.sm90 import pieces
from tilewise.kernels.paged_mqa_logits.sm90.compat import constexpr_function, reinterpret, tma_load
from tilewise.kernels.paged_mqa_logits.sm90.schedule import _extent, _following_length, _tiles

_first_token = constexpr_function(pieces.first_token)
_part_pieces = constexpr_function(pieces.part_pieces)
_piece_start = constexpr_function(pieces.piece_start)
_piece_tokens = constexpr_function(pieces.piece_tokens)
_q_position = constexpr_function(pieces.q_position)


@gluon.jit
def _page_ids(p, row, tile, last_page):
    # Page ids of the next four tiles. Never past the last page that the request fills: later entries may be anything.
    ids = ()
    for u in gl.static_range(4):
        if p.BLOCK_KV >= 64:
            ids = ids + (gl.load(row + gl.minimum((tile + u) // (p.BLOCK_KV // 64), last_page)),)
        else:
            for v in gl.static_range(64 // p.BLOCK_KV):
                ids = ids + (gl.load(row + gl.minimum((tile + u) * (64 // p.BLOCK_KV) + v, last_page)),)
    return ids


@gluon.jit
def _copy_piece(p, buf, q_desc, weights_desc, full, slot, request, token, POSITION: gl.constexpr, SIZE: gl.constexpr):
    # Of every 8 columns of a product, 8 / SIZE heads of each of the SIZE query tokens: the box says so.
    SHAPE: gl.constexpr = [2 * p.Q_TOKENS // SIZE, 1, p.HEADS * SIZE // 8, SIZE, 8 // SIZE, p.HEAD_DIM]
    tiles = reinterpret(buf.q, gl.float8e4nv, SHAPE, q_desc.layout)
    tma_load(q_desc, [request, 0, token, 0, 0], full, tiles.index(slot * (p.Q_TOKENS // SIZE) + POSITION // SIZE))
    for t in gl.static_range(SIZE):
        at = (request * p.NEXT_N + token + t) * p.weights_stride
        tma_load(weights_desc, [at], full, buf.weights.index(slot * p.Q_TOKENS + POSITION + t))


@gluon.jit
def _copy_part(
    p, buf, q4_desc, q2_desc, q1_desc, weights_desc, full, slot, request, token, TOKENS: gl.constexpr,
    PART: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    # Piece INDEX of a consumer's part of a group of TOKENS query tokens, the first of which is `token`.
    FIRST: gl.constexpr = _first_token(TOKENS, p.DOT_N, p.TOKEN_SPLIT, PART)
    OWN: gl.constexpr = _first_token(TOKENS, p.DOT_N, p.TOKEN_SPLIT, PART + 1) - FIRST
    SIZE: gl.constexpr = _piece_tokens(OWN, INDEX)
    POSITION: gl.constexpr = _q_position(TOKENS, p.DOT_N, p.TOKEN_SPLIT, PART, INDEX)
    at = token + FIRST + _piece_start(OWN, INDEX)
    if SIZE == 4:
        _copy_piece(p, buf, q4_desc, weights_desc, full, slot, request, at, POSITION, 4)
    elif SIZE == 2:
        _copy_piece(p, buf, q2_desc, weights_desc, full, slot, request, at, POSITION, 2)
    else:
        _copy_piece(p, buf, q1_desc, weights_desc, full, slot, request, at, POSITION, 1)


@gluon.jit
def _copy_tokens(p, buf, q4_desc, q2_desc, q1_desc, weights_desc, slot, request, token, TOKENS: gl.constexpr):
    # A group of query tokens and their weights.
    full = buf.q_full.index(slot)
    mbarrier.expect(full, TOKENS * (p.HEADS * p.HEAD_DIM + 4 * p.WEIGHTS_PITCH))
    for part in gl.static_range(p.TOKEN_SPLIT):
        for index in gl.static_range(_part_pieces(TOKENS, p.DOT_N, p.TOKEN_SPLIT, part)):
            _copy_part(p, buf, q4_desc, q2_desc, q1_desc, weights_desc, full, slot, request, token, TOKENS, part, index)


@gluon.jit
def _producer(p, buf, share, k_desc, scale_desc, q4_desc, q2_desc, q1_desc, weights_desc):
    ROWS: gl.constexpr = 64 if p.BLOCK_KV >= 64 else p.BLOCK_KV  # of one copy
    COPIES: gl.constexpr = 64 // ROWS
    REST: gl.constexpr = p.NEXT_N % p.FUSE_N
    request = share.request
    group = share.group
    tile = share.tile
    left = share.count
    length = share.length
    copied = 0
    turn = 0
    while left > 0:
        here = gl.minimum(_tiles(p, length) - tile, left)
        following = length
        if p.BALANCED:
            following = _following_length(p, request)
        if here > 0:
            row = p.block_tables + request.to(gl.int64) * p.table_stride
            last_page = (_extent(p, length) - 1) // p.BLOCK_KV
            ids = _page_ids(p, row, tile, last_page)
            slot = turn % 2
            mbarrier.wait(buf.q_empty.index(slot), ((turn // 2) & 1) ^ 1)
            first = group * p.FUSE_N
            if REST == 0:
                _copy_tokens(p, buf, q4_desc, q2_desc, q1_desc, weights_desc, slot, request, first, p.FUSE_N)
            else:
                if group < p.GROUPS - 1:
                    _copy_tokens(p, buf, q4_desc, q2_desc, q1_desc, weights_desc, slot, request, first, p.FUSE_N)
                else:
                    _copy_tokens(p, buf, q4_desc, q2_desc, q1_desc, weights_desc, slot, request, first, REST)
            for i in range(0, here, 4):
                now = ids
                ids = _page_ids(p, row, tile + i + 4, last_page)
                for u in gl.static_range(4):
                    if i + u < here:
                        stage = copied % p.STAGES
                        mbarrier.wait(buf.k_empty.index(stage), ((copied // p.STAGES) & 1) ^ 1)
                        full_k = buf.k_full.index(stage)
                        mbarrier.expect(full_k, 64 * (p.HEAD_DIM + 4))
                        row_at = ((tile + i + u) * 64) % p.BLOCK_KV if p.BLOCK_KV > 64 else 0
                        for v in gl.static_range(COPIES):
                            page = now[u * COPIES + v]
                            into = stage * COPIES + v
                            tma_load(k_desc, [page, row_at, 0], full_k, buf.k.index(into))
                            scale_at = p.BLOCK_KV * p.HEAD_DIM // 4 + row_at
                            scale_into = copied % (2 * p.STAGES) * COPIES + v
                            tma_load(scale_desc, [page, scale_at], full_k, buf.k_scale.index(scale_into))
                        copied += 1
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
