"""The first working Gluon kernel for Hopper, kept as the yardstick of today's: pages of 64 tokens, head_dim 128.

Only benchmarks/prototypes.py runs it. A persistent grid; every workgroup walks an equal share of all pages, found by a
scan of the context lengths. One producer warp, NC consumer warpgroups; cached tokens are rows of the product. Of the
original only what its best configs with the fp32 epilogue use is here.

N tokens a request, H heads, G tokens a product, TP products in flight, NC consumers, TS consumers that share a page and
split the tokens, STAGES slots of the ring, QB buffers of the queries, PF page ids fetched at a time, BP a power of two
of at least B and 64, CREG registers of a consumer, RELU 1: x + |x| with halved weights, 2: that for odd columns only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KV_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
FP32_LAYOUT = gl.NVMMASharedLayout(0, 32, 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _producer(kv_desc, ks_desc, q_desc, w_desc, BT, CTX, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty,
              b0, p0, cnt, ctx0, bts,
              STAGES: gl.constexpr, QB: gl.constexpr, NPC: gl.constexpr, NP: gl.constexpr, PF: gl.constexpr):
    it = 0
    b = b0
    p = p0
    rem = cnt
    qi = 0
    ctx = ctx0
    while rem > 0:
        npg = (ctx + 63) // 64
        c = gl.minimum(npg - p, rem)
        if c > 0:
            qs = qi % QB
            mbarrier.wait(qempty.index(qs), ((qi // QB) & 1) ^ 1)
            mbarrier.expect(qfull.index(qs), NPC * NP * 132)
            for j in gl.static_range(NPC):
                at = (b * NPC + j) * NP
                tma.async_copy_global_to_shared(q_desc, [at, 0], qfull.index(qs), qbuf.index(qs * NPC + j))
                tma.async_copy_global_to_shared(w_desc, [at], qfull.index(qs), wbuf.index(qs * NPC + j))
            bt = BT + b * bts + p
            # Page ids are fetched PF at a time, so that the latency of a load is paid once for PF pages.
            for i0 in range(0, c, PF):
                pages = ()
                for u in gl.static_range(PF):
                    pages = pages + (gl.load(bt + gl.minimum(i0 + u, c - 1)),)
                for u in gl.static_range(PF):
                    if i0 + u < c:
                        s = it % STAGES
                        mbarrier.wait(kempty.index(s), ((it // STAGES) & 1) ^ 1)
                        mbarrier.expect(kfull.index(s), 8448)
                        page = pages[u]
                        tma.async_copy_global_to_shared(kv_desc, [page * 66, 0], kfull.index(s), kbuf.index(s))
                        tma.async_copy_global_to_shared(ks_desc, [page * 2112 + 2048], kfull.index(s), sbuf.index(s))
                        it += 1
            qi += 1
        rem -= c
        p = 0
        b += 1
        if rem > 0:
            ctx = gl.load(CTX + b)


@gluon.jit
def _part(acc, w, H: gl.constexpr, G: gl.constexpr, RELU: gl.constexpr):
    # Sums of one thread, [64, G, 4]: the last dimension is the lane in the quad, and nothing crosses lanes here.
    if RELU == 2:
        x = gl.inline_asm_elementwise(
            "{ .reg .f32 t; max.f32 $0, $2, 0f00000000; abs.f32 t, $3; add.f32 $1, $3, t; }", "=r,=r,r,r", [acc],
            dtype=gl.float32, is_pure=True, pack=2,
        ) * gl.expand_dims(w, 0)  # fmt: skip
    else:
        x = (acc + gl.abs(acc)) * gl.expand_dims(w, 0)
    x = gl.reshape(x, [64, G, H // 8, 4, 2])
    return gl.sum(gl.sum(x, 2), 3)


@gluon.jit
def _quad(p0, p1, p2, p3, G: gl.constexpr, T: gl.constexpr):
    # Sums of T tokens over the four lanes of a quad, by a transpose.
    if T == 4:
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4])  # fmt: skip
        if G == 4:
            x = p0
        elif G == 2:
            x = gl.reshape(gl.permute(gl.join(p0, p1), (0, 3, 1, 2)), [64, 4, 4])
        else:
            a = gl.join(gl.reshape(p0, [64, 4]), gl.reshape(p2, [64, 4]))
            b = gl.join(gl.reshape(p1, [64, 4]), gl.reshape(p3, [64, 4]))
            x = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 3, 1)), [64, 4, 4])
        return gl.sum(gl.convert_layout(x, L), 2)
    elif T == 2:
        L2: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2]], [[0, 1, 0], [8, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 2, 4])  # fmt: skip
        if G == 2:
            x2 = p0
        else:
            x2 = gl.permute(gl.join(gl.reshape(p0, [64, 4]), gl.reshape(p1, [64, 4])), (0, 2, 1))
        return gl.sum(gl.convert_layout(x2, L2), 2)
    else:
        L1: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1]], [[8, 0, 0], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [],
            [64, 1, 4])  # fmt: skip
        return gl.sum(gl.convert_layout(p0, L1), 2)


@gluon.jit
def _store(y, ks, OUT, row, pos0, base, OUTS, tail, T: gl.constexpr, V: gl.constexpr):
    # y [64, T], of whose tokens the first V exist.
    rl: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    tl_: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    pos = pos0 + gl.arange(0, 64, layout=rl)
    t = gl.arange(0, T, layout=tl_)
    y = y * gl.expand_dims(gl.convert_layout(ks, rl), 1)
    if tail:
        y = gl.where(gl.expand_dims(pos, 1) <= gl.expand_dims(base + t, 0), y, float("-inf"))
    o = OUT + row.to(gl.int64) * OUTS
    ptr = o + (gl.expand_dims(t * OUTS, 0) + gl.expand_dims(pos, 1))
    if V == T:
        gl.store(ptr, y)
    else:
        gl.store(ptr, y, mask=gl.expand_dims(t < V, 0) & (gl.expand_dims(pos, 1) >= 0))


@gluon.jit
def _consumer(cid: gl.constexpr, CTX, OUT, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty, b0, p0, cnt, ctx0,
              outs, N: gl.constexpr, H: gl.constexpr, G: gl.constexpr, NP: gl.constexpr, NPC: gl.constexpr,
              STAGES: gl.constexpr, QB: gl.constexpr, NC: gl.constexpr, TP: gl.constexpr, RELU: gl.constexpr,
              TS: gl.constexpr):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NP, 32])
    rowl: gl.constexpr = gl.SliceLayout(1, mma)
    coll: gl.constexpr = gl.SliceLayout(0, mma)
    zero = gl.zeros([64, NP], gl.float32, mma)
    PPC: gl.constexpr = NPC // TS  # pieces of this consumer
    JO: gl.constexpr = (cid % TS) * PPC
    PGR: gl.constexpr = NC // TS  # page groups
    pgi: gl.constexpr = cid // TS
    NT: gl.constexpr = PPC // TP
    PG: gl.constexpr = 4 // G  # pieces in four tokens
    halves = gl.where(gl.arange(0, NP, layout=coll) % 2 == 0, 1.0 if RELU == 2 else 0.5, 0.5)
    it = 0
    b = b0
    p = p0
    rem = cnt
    qi = 0
    ctx = ctx0
    while rem > 0:
        npg = (ctx + 63) // 64
        c = gl.minimum(npg - p, rem)
        if c > 0:
            qs = qi % QB
            mbarrier.wait(qfull.index(qs), (qi // QB) & 1)
            q0 = qs * NPC + JO
            ws = ()
            for j in gl.static_range(PPC):
                ws = ws + (wbuf.index(q0 + j).load(coll) * halves,)
            base = ctx - N + JO * G
            row = b * N + JO * G
            i = (pgi + PGR - it % PGR) % PGR
            while i < c:
                g = it + i
                s = g % STAGES
                mbarrier.wait(kfull.index(s), (g // STAGES) & 1)
                ks = sbuf.index(s).load(rowl)
                pos0 = (p + i) * 64
                tail = pos0 + 63 > base
                k = kbuf.index(s)
                prev = ()
                for t in gl.static_range(NT):
                    accs = ()
                    for u in gl.static_range(TP):
                        b_op = qbuf.index(q0 + t * TP + u).permute((1, 0))
                        accs = accs + (warpgroup_mma(k, b_op, zero, use_acc=False, is_async=True),)
                    for u in gl.static_range(TP):
                        acc = warpgroup_mma_wait(TP - 1 - u, deps=(accs[u],))
                        if t == NT - 1 and u == TP - 1:
                            mbarrier.arrive(kempty.index(s), count=1)
                        prev = prev + (_part(acc, ws[t * TP + u], H, G, RELU),)
                        if (t * TP + u) % PG == PG - 1 or t * TP + u == PPC - 1:
                            y = _quad(prev[0], prev[1 if len(prev) > 1 else 0], prev[2 if len(prev) > 2 else 0],
                                      prev[3 if len(prev) > 3 else 0], G, 4 if len(prev) * G > 2 else len(prev) * G)
                            _store(y, ks, OUT, row + (t * TP + u) // PG * 4, pos0, base + (t * TP + u) // PG * 4, outs,
                                   tail, 4 if len(prev) * G > 2 else len(prev) * G, len(prev) * G)  # fmt: skip
                            prev = ()
                i += PGR
            it += c
            mbarrier.arrive(qempty.index(qs), count=1)
            qi += 1
        rem -= c
        p = 0
        b += 1
        if rem > 0:
            ctx = gl.load(CTX + b)


@gluon.jit(do_not_specialize=["B", "bts", "outs"])
def prototype(kv_desc, ks_desc, q_desc, w_desc, BT, CTX, OUT, B, bts, outs,
              N: gl.constexpr, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, QB: gl.constexpr,
              NC: gl.constexpr, PF: gl.constexpr, BP: gl.constexpr, CREG: gl.constexpr, TP: gl.constexpr,
              RELU: gl.constexpr, TS: gl.constexpr):  # fmt: skip
    NP: gl.constexpr = G * H
    NPC: gl.constexpr = N // G
    gl.static_assert(STAGES % (NC // TS) == 0, "a slot of the ring must always belong to the same consumers")
    # Every warp holds the whole batch, so scan and sums stay in registers and shuffles.
    bl: gl.constexpr = gl.BlockedLayout([BP // 32], [32], [gl.num_warps()], [0])
    ib = gl.arange(0, BP, layout=bl)
    cv = gl.load(CTX + ib, mask=ib < B, other=0)
    pg = (cv + 63) // 64
    cum = gl.associative_scan(pg, 0, _add)
    total = gl.sum(pg, 0)
    pid = gl.program_id(0)
    np_ = gl.num_programs(0)
    per = total // np_
    extra = total % np_
    start = pid * per + gl.minimum(pid, extra)
    cnt = per + (pid < extra).to(gl.int32)
    before = cum <= start
    b0 = gl.sum(before.to(gl.int32), 0)
    p0 = start - gl.sum(gl.where(before, pg, 0), 0)
    ctx0 = gl.sum(gl.where(ib == b0, cv, 0), 0)

    kbuf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], kv_desc.layout)
    qbuf = gl.allocate_shared_memory(gl.float8e4nv, [QB * NPC, NP, 128], q_desc.layout)
    sbuf = gl.allocate_shared_memory(gl.float32, [STAGES, 64], ks_desc.layout)
    wbuf = gl.allocate_shared_memory(gl.float32, [QB * NPC, NP], w_desc.layout)
    kfull = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kempty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    qfull = gl.allocate_shared_memory(gl.int64, [QB, 1], mbarrier.MBarrierLayout())
    qempty = gl.allocate_shared_memory(gl.int64, [QB, 1], mbarrier.MBarrierLayout())
    # Triton puts a barrier between two inits of one array, so the arrays take turns.
    for i in gl.static_range(STAGES):
        mbarrier.init(kfull.index(i), count=1)
        mbarrier.init(kempty.index(i), count=TS)
        if i < QB:
            mbarrier.init(qfull.index(i), count=1)
            mbarrier.init(qempty.index(i), count=NC)
    fence_async_shared()

    # A tuple that is put together from two would lose its constants.
    if NC == 1:
        gl.warp_specialize([
            (_consumer, (0, CTX, OUT, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty, b0, p0, cnt, ctx0, outs,
                         N, H, G, NP, NPC, STAGES, QB, NC, TP, RELU, TS)),
            (_producer, (kv_desc, ks_desc, q_desc, w_desc, BT, CTX, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull,
                         qempty, b0, p0, cnt, ctx0, bts, STAGES, QB, NPC, NP, PF)),
        ], [1], [24])  # fmt: skip
    elif NC == 2:
        gl.warp_specialize([
            (_consumer, (0, CTX, OUT, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty, b0, p0, cnt, ctx0, outs,
                         N, H, G, NP, NPC, STAGES, QB, NC, TP, RELU, TS)),
            (_consumer, (1, CTX, OUT, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty, b0, p0, cnt, ctx0, outs,
                         N, H, G, NP, NPC, STAGES, QB, NC, TP, RELU, TS)),
            (_producer, (kv_desc, ks_desc, q_desc, w_desc, BT, CTX, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull,
                         qempty, b0, p0, cnt, ctx0, bts, STAGES, QB, NPC, NP, PF)),
        ], [4, 1], [CREG, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (0, CTX, OUT, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty, b0, p0, cnt, ctx0, outs,
                         N, H, G, NP, NPC, STAGES, QB, NC, TP, RELU, TS)),
            (_consumer, (1, CTX, OUT, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty, b0, p0, cnt, ctx0, outs,
                         N, H, G, NP, NPC, STAGES, QB, NC, TP, RELU, TS)),
            (_consumer, (2, CTX, OUT, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull, qempty, b0, p0, cnt, ctx0, outs,
                         N, H, G, NP, NPC, STAGES, QB, NC, TP, RELU, TS)),
            (_producer, (kv_desc, ks_desc, q_desc, w_desc, BT, CTX, kbuf, sbuf, qbuf, wbuf, kfull, kempty, qfull,
                         qempty, b0, p0, cnt, ctx0, bts, STAGES, QB, NPC, NP, PF)),
        ], [4, 4, 1], [CREG, CREG, 24])  # fmt: skip
