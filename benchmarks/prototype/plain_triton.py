"""The first working kernel, kept as the yardstick of the portable one: KV pages of 64 tokens, head_dim 128, block tables
and rows of the output of a constant stride. Only benchmarks/prototypes.py and benchmarks/portable_vs_prototype.py run
it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["next_n", "ng", "split"])
def prototype(Q, KV, KS, BT, CTX, W, OUT, next_n, ng, split,
              F: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
              TMA: tl.constexpr, STAGES: tl.constexpr, BTS: tl.constexpr, OUTS: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    g = pid % ng
    r = pid // ng
    s = r % split
    b = r // split
    t0 = g * F
    ctx = tl.load(CTX + b)
    nblk = tl.cdiv(ctx, BN)
    lo = (s * nblk) // split
    hi = ((s + 1) * nblk) // split
    NG: tl.constexpr = F // G
    offs_m = tl.arange(0, G * H)
    offs_d = tl.arange(0, D)
    offs_n = tl.arange(0, BN)
    offs_g = tl.arange(0, G)
    row0 = b * next_n + t0
    qs = ()
    ws = ()
    for f in tl.static_range(NG):
        q = tl.load(Q + ((row0 + f * G) * H + offs_m)[:, None] * D + offs_d[None, :])
        w = tl.load(W + (row0 + f * G) * H + offs_m)
        qs = qs + (q,)
        ws = ws + (w,)
    base = ctx - next_n + t0
    for i in tl.range(lo, hi, num_stages=STAGES):
        pos = i * BN + offs_n
        if TMA:
            page = tl.load(BT + b * BTS + i)
            k = KV.load([page * 66, 0])
            ks = tl.load(KS + page.to(tl.int64) * 2112 + 2048 + offs_n)
        elif BN == 64:
            page = tl.load(BT + b * BTS + i).to(tl.int64)
            k = tl.load(KV + page * 8448 + offs_n[:, None] * D + offs_d[None, :])
            ks = tl.load(KS + page * 2112 + 2048 + offs_n)
        else:
            page = tl.load(BT + b * BTS + i * (BN // 64) + offs_n // 64).to(tl.int64)
            k = tl.load(KV + (page * 8448 + (offs_n % 64) * D)[:, None] + offs_d[None, :])
            ks = tl.load(KS + page * 2112 + 2048 + offs_n % 64)
        for f in tl.static_range(NG):
            acc = tl.dot(k, qs[f].T)
            x = tl.maximum(acc, 0.0) * ws[f][None, :]
            if G == 1:
                y = tl.sum(x, 1) * ks
                y = tl.where(pos <= base + f, y, float("-inf"))
                tl.store(OUT + (row0 + f) * OUTS + pos, y)
            else:
                y = tl.sum(tl.reshape(x, (BN, G, H)), 2) * ks[:, None]
                y = tl.where(pos[:, None] <= (base + f * G + offs_g)[None, :], y, float("-inf"))
                tl.store(OUT + (row0 + f * G + offs_g)[None, :] * OUTS + pos[:, None], y)
