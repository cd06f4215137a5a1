"""The producer warp: copies of query tokens, weights, K tiles and scales. Gluon device functions, and nothing else."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.paged_mqa_logits.sm90.compat import tma_load
from tilewise.kernels.paged_mqa_logits.sm90.schedule import _extent, _following_length, _tiles


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
def _producer(p, buf, share, k_desc, scale_desc, q_desc, weights_desc):
    ROWS: gl.constexpr = 64 if p.BLOCK_KV >= 64 else p.BLOCK_KV  # of one copy
    COPIES: gl.constexpr = 64 // ROWS
    REST: gl.constexpr = p.NEXT_N % p.FUSE_N
    TOKEN_BYTES: gl.constexpr = p.HEADS * p.HEAD_DIM + 4 * p.WEIGHTS_PITCH
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
            full = buf.q_full.index(slot)
            mbarrier.wait(buf.q_empty.index(slot), ((turn // 2) & 1) ^ 1)
            if REST == 0:
                mbarrier.expect(full, p.FUSE_N * TOKEN_BYTES)
            else:
                mbarrier.expect(full, p.FUSE_N * TOKEN_BYTES, pred=group < p.GROUPS - 1)
                mbarrier.expect(full, REST * TOKEN_BYTES, pred=group == p.GROUPS - 1)
            for t in gl.static_range(p.FUSE_N):
                token = group * p.FUSE_N + t
                live = True if REST == 0 else token < p.NEXT_N
                tma_load(q_desc, [request, token, 0, 0], full, buf.q.index(slot * p.Q_TOKENS + t), pred=live)
                at = p.weights_first + (request * p.NEXT_N + token) * p.weights_stride
                tma_load(weights_desc, [at], full, buf.weights.index(slot * p.Q_TOKENS + t), pred=live)
            for i in range(0, here, 4):
                now = ids
                ids = _page_ids(p, row, tile + i + 4, last_page)
                for u in gl.static_range(4):
                    if i + u < here:
                        stage = copied % p.STAGES
                        mbarrier.wait(buf.k_empty.index(stage), ((copied // p.STAGES) & 1) ^ 1)
                        full_k = buf.k_full.index(stage)
                        mbarrier.expect(full_k, 64 * (p.HEAD_DIM + 4))
                        first = ((tile + i + u) * 64) % p.BLOCK_KV if p.BLOCK_KV > 64 else 0
                        for v in gl.static_range(COPIES):
                            page = now[u * COPIES + v]
                            into = stage * COPIES + v
                            tma_load(k_desc, [page, first, 0], full_k, buf.k.index(into))
                            scale_at = p.BLOCK_KV * p.HEAD_DIM // 4 + first
                            tma_load(scale_desc, [page, scale_at], full_k, buf.k_scale.index(into))
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
