"""From accumulators to logits: relu, weighting, sum over heads, store. Gluon device functions, and nothing else.

A thread of a product's accumulator holds rows r and r + 8 and, of every 8 columns, two neighbours; the four lanes of a
quad hold the rest. Heads are columns, so a token's sum runs over registers first and over the quad last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.kernels.paged_mqa_logits.sm90.compat import reinterpret

# Truncation to tf32 loses 2^-11 / 1.44 of a positive number on average, as mantissas are log-uniform.
_TF32_BIAS = gl.constexpr(1.0 + 0.69 * 2.0**-11)


@gluon.jit
def _q_tile(p, buf, token, TOKENS: gl.constexpr):
    # TOKENS query tokens as [tokens x heads, head_dim]. `token` is a multiple of TOKENS.
    SHAPE: gl.constexpr = [2 * p.Q_TOKENS // TOKENS, TOKENS * p.HEADS, p.HEAD_DIM]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS * p.HEADS, p.HEAD_DIM], gl.float8e4nv)
    return reinterpret(buf.q, gl.float8e4nv, SHAPE, LAYOUT).index(token // TOKENS)


@gluon.jit
def _weights(p, buf, token, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    # Their weights, [tokens x heads].
    SHAPE: gl.constexpr = [2 * p.Q_TOKENS // TOKENS, TOKENS * p.WEIGHTS_PITCH]
    rows = reinterpret(buf.weights, gl.float32, SHAPE, gl.NVMMASharedLayout(0, 32, 1)).index(token // TOKENS)
    if p.WEIGHTS_PITCH == p.HEADS:
        return rows.load(LAYOUT)
    else:
        # Drop the second half of each row, which holds something else; both halves are registers of one thread.
        WIDE: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * TOKENS * p.HEADS, 32]))
        w = gl.permute(gl.reshape(rows.load(WIDE), [TOKENS, 2, p.HEADS]), (0, 2, 1))
        w, _ = gl.split(w)
        return gl.convert_layout(gl.reshape(w, [TOKENS * p.HEADS]), LAYOUT)


@gluon.jit
def _second_tile(p, buf, slot, TOKENS: gl.constexpr):
    # A slot of the second product's operand as [8, tokens x heads]; fewer tokens than dot_n use its beginning.
    DTYPE: gl.constexpr = gl.float32 if p.RELU == "tf32" else gl.bfloat16
    SHAPE: gl.constexpr = [buf.second.shape[0] * (p.DOT_N // TOKENS), 8, TOKENS * p.HEADS]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, TOKENS * p.HEADS], DTYPE)
    return reinterpret(buf.second, DTYPE, SHAPE, LAYOUT).index(slot * (p.DOT_N // TOKENS))


@gluon.jit
def _column_weights(p, buf, token, TOKENS: gl.constexpr):
    # Weights of the columns of a product, halved where relu(x) is taken as x + |x|.
    COLUMNS: gl.constexpr = TOKENS * p.HEADS
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32]))
    w = _weights(p, buf, token, TOKENS, LAYOUT)
    if p.RELU == "mix":
        w = w * gl.where(gl.arange(0, COLUMNS, layout=LAYOUT) % 2 == 0, 1.0, 0.5)
    return w


@gluon.jit
def _token_sums(p, acc, w, TOKENS: gl.constexpr):
    # Sums over the heads that a thread holds: a tuple of TOKENS tensors [64, 4], whose columns are the lanes of a quad.
    if p.RELU == "mix":
        # Two pipes at once: max for even columns, x + |x| (whose |.| is free) for odd ones.
        x = gl.inline_asm_elementwise(
            "{ .reg .f32 t; max.f32 $0, $2, 0f00000000; abs.f32 t, $3; add.f32 $1, $3, t; }",
            "=r,=r,r,r", [acc], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    elif p.RELU == "abs":
        # Free in a multiply-add, if spelled so (gl.abs is a mask); the linear half comes from _linear_sums.
        x = gl.inline_asm_elementwise("abs.f32 $0, $1;", "=r,r", [acc], dtype=gl.float32, is_pure=True, pack=1)
    else:
        x = acc + gl.abs(acc)  # twice the relu; the scale of K is halved instead
    w, x = gl.broadcast(gl.expand_dims(w, 0), x)
    # Multiply-adds spelled out, eight columns at a time: a reduction's order is the compiler's, and not every release
    # contracts it. Four independent chains: two rows, two neighbouring columns.
    xs = _split_heads(gl.reshape(x, [64, TOKENS, p.HEADS // 8, 4, 2]), p.HEADS // 8)
    ws = _split_heads(gl.reshape(w, [64, TOKENS, p.HEADS // 8, 4, 2]), p.HEADS // 8)
    chains = xs[0] * ws[0]
    for i in gl.static_range(1, p.HEADS // 8):
        chains = gl.fma(xs[i], ws[i], chains)
    a, b = gl.split(chains)
    return _columns(a + b, TOKENS)


@gluon.jit
def _split_heads(x, COUNT: gl.constexpr):
    # [64, tokens, COUNT, 4, 2] to COUNT tensors [64, tokens, 4, 2]; registers change names, nothing moves.
    found = (x,)
    for level in gl.static_range(4):
        if 2**level < COUNT:
            finer = ()
            for i in gl.static_range(2**level):
                y = gl.reshape(found[i], [64, x.shape[1], COUNT // 2**level // 2, 2, 4, 2])
                a, b = gl.split(gl.permute(y, (0, 1, 2, 4, 5, 3)))
                finer = finer + (a, b)
            found = finer
    flat = ()
    for i in gl.static_range(COUNT):
        flat = flat + (gl.reshape(found[i], [64, x.shape[1], 4, 2]),)
    return flat


@gluon.jit
def _columns(x, COUNT: gl.constexpr):
    # [64, COUNT, 4] to COUNT tensors [64, 4]; registers change names, nothing moves.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    if COUNT == 1:
        return (gl.convert_layout(gl.reshape(x, [64, 4]), LAYOUT),)
    elif COUNT == 2:
        a, b = gl.split(gl.permute(x, (0, 2, 1)))
        return (gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT))
    else:
        even, odd = gl.split(gl.reshape(gl.permute(x, (0, 2, 1)), [64, 4, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        return (
            gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT),
            gl.convert_layout(c, LAYOUT), gl.convert_layout(d, LAYOUT),
        )  # fmt: skip


@gluon.jit
def _joined(x, SLOTS: gl.constexpr, COUNT: gl.constexpr):
    # A tuple of COUNT tensors [m, n], one per token, to one tensor [m, n, SLOTS]; the last one stands in beyond COUNT.
    if SLOTS == 2:
        return gl.join(x[0], x[COUNT - 1])
    else:
        even = gl.join(x[0], x[2 if COUNT > 2 else COUNT - 1])
        odd = gl.join(x[1 if COUNT > 1 else COUNT - 1], x[COUNT - 1])
        return gl.reshape(gl.join(even, odd), [x[0].shape[0], x[0].shape[1], 4])


@gluon.jit
def _linear_columns(p, buf, token, slot, TOKENS: gl.constexpr):
    # sum w * relu(x) = (sum w * |x| + sum w * x) / 2, and sum_h w_h * (q_h . k) = (sum_h w_h * q_h) . k: a few more
    # columns of the product, four for each query token. fp8 holds 4 bits, so column i has what columns before it left,
    # times 16^i: together about 16 bits. Writes the columns [columns, head_dim]; returns their factors [columns].
    COLUMNS: gl.constexpr = buf.second.shape[1]
    SLOTS: gl.constexpr = COLUMNS // 4  # tokens, and spare ones up to a power of two
    Q: gl.constexpr = gl.BlockedLayout([1, 4], [128 // p.HEAD_DIM, p.HEAD_DIM // 4], [4, 1], [1, 0])
    STEP: gl.constexpr = 4 * 128 // p.HEAD_DIM  # heads that the warpgroup holds side by side
    parts = ()
    for t in gl.static_range(TOKENS):
        q = _q_tile(p, buf, token + t, 1).load(Q).to(gl.float32)
        q = q * gl.expand_dims(_weights(p, buf, token + t, 1, gl.SliceLayout(1, Q)), 1)
        # A thread's own heads; the warps are summed for all tokens at once, in one exchange.
        parts = parts + (gl.sum(gl.reshape(q, [p.HEADS // STEP, STEP, p.HEAD_DIM]), 0),)
    summed = gl.sum(_joined(parts, SLOTS, TOKENS), 0)
    # Scaled by a power of two to at most 256; fp8 ends at 448.
    exponent = gl.max(gl.abs(summed), 0).to(gl.int32, bitcast=True) & 0x7F800000
    exponent = gl.minimum(gl.maximum(exponent, 40 << 23), 246 << 23)
    rest = summed * gl.expand_dims(((254 << 23) - exponent).to(gl.float32, bitcast=True), 0) * 128
    a = rest.to(gl.float8e4nv)
    rest = (rest - a.to(gl.float32)) * 16
    b = rest.to(gl.float8e4nv)
    rest = (rest - b.to(gl.float32)) * 16
    c = rest.to(gl.float8e4nv)
    rest = (rest - c.to(gl.float32)) * 16
    d = rest.to(gl.float8e4nv)
    columns = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [p.HEAD_DIM, COLUMNS])
    buf.second.index(slot).store(gl.permute(columns, (1, 0)))

    FACTORS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32]))
    i = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, FACTORS)), 0)
    factor = gl.convert_layout(exponent, gl.SliceLayout(1, FACTORS))
    factor = (gl.expand_dims(factor, 1) - ((i * 4 + 7) << 23)).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(factor, [COLUMNS]), ACC)


@gluon.jit
def _linear_sums(p, acc, factors):
    # Thread sums of the linear columns: tensor j has token 2 j in lanes 0 and 1 of a quad, token 2 j + 1 in 2 and 3.
    COLUMNS: gl.constexpr = acc.shape[1]
    x = gl.sum(gl.reshape(acc * gl.expand_dims(factors, 0), [64, COLUMNS // 8, 4, 2]), 3)
    return _columns(x, COLUMNS // 8)


@gluon.jit
def _with_linear(sums, linear, FIRST: gl.constexpr, COUNT: gl.constexpr):
    # Adds the linear halves of tokens FIRST to FIRST + COUNT - 1 to their sums.
    LAYOUT: gl.constexpr = sums[0].type.layout
    upper = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT)) >= 2, 0)
    added = ()
    for t in gl.static_range(COUNT):
        x = linear[(FIRST + t) // 2]
        if (FIRST + t) % 2 == 0:
            added = added + (sums[t] + gl.where(upper, 0.0, x),)
        else:
            added = added + (sums[t] + gl.where(upper, x, 0.0),)
    return added


@gluon.jit
def _quad_sums(p, sums, COUNT: gl.constexpr):
    # The sums over a quad, of up to four tokens. It is a transpose: for four tokens, lane t keeps token t of two rows;
    # for two, a lane keeps one token of one row; for one, a row, with one exchange left.
    if COUNT > 2 and p.SHUFFLE:
        # The same by exchange between lanes: no shared memory, so no barrier of the warpgroup in the loop over tiles.
        LAYOUT: gl.constexpr = sums[0].type.layout
        lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT)), 0)
        lane = lane + gl.zeros([64, 4], gl.int32, LAYOUT)
        return gl.inline_asm_elementwise(
            """{ .reg .pred hi, lo; .reg .b32 bit, s, v; .reg .f32 a, b, k, r;
            setp.ge.s32 hi, $5, 2; and.b32 bit, $5, 1; setp.ne.s32 lo, bit, 0;
            selp.f32 k, $1, $3, hi; mov.b32 s, k; shfl.sync.bfly.b32 v, s, 2, 31, 0xffffffff; mov.b32 r, v;
            selp.f32 k, $3, $1, hi; add.f32 a, k, r;
            selp.f32 k, $2, $4, hi; mov.b32 s, k; shfl.sync.bfly.b32 v, s, 2, 31, 0xffffffff; mov.b32 r, v;
            selp.f32 k, $4, $2, hi; add.f32 b, k, r;
            selp.f32 k, a, b, lo; mov.b32 s, k; shfl.sync.bfly.b32 v, s, 1, 31, 0xffffffff; mov.b32 r, v;
            selp.f32 k, b, a, lo; add.f32 $0, k, r; }""",
            "=f,f,f,f,f,r", [sums[0], sums[1], sums[2], sums[COUNT - 1], lane],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif COUNT > 2:
        LAYOUT4: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4],
        )  # fmt: skip
        x = gl.join(gl.join(sums[0], sums[2]), gl.join(sums[1], sums[COUNT - 1]))
        x = gl.reshape(gl.permute(x, (0, 2, 3, 1)), [64, 4, 4])
        return gl.sum(gl.convert_layout(x, LAYOUT4), 2)
    elif COUNT == 2:
        LAYOUT2: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2]], [[0, 1, 0], [8, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 2, 4],
        )  # fmt: skip
        return gl.sum(gl.convert_layout(gl.permute(gl.join(sums[0], sums[1]), (0, 2, 1)), LAYOUT2), 2)
    else:
        LAYOUT1: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1]], [[8, 0, 0], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 1, 4],
        )  # fmt: skip
        return gl.sum(gl.convert_layout(gl.reshape(sums[0], [64, 1, 4]), LAYOUT1), 2)


@gluon.jit
def _store_tokens(p, y, scale, part, column, masked, FIRST: gl.constexpr, COUNT: gl.constexpr):
    # y [64, slots]: sums of COUNT query tokens, the consumer's token FIRST and those after it; further slots are spare.
    ROWS: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    SLOTS: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    pos = gl.expand_dims(column + gl.arange(0, 64, layout=ROWS), 1)
    t = FIRST + gl.arange(0, y.shape[1], layout=SLOTS)
    if p.RELU == "add" or p.RELU == "abs":
        scale = scale * 0.5
    y = y * gl.expand_dims(gl.convert_layout(scale, ROWS), 1)
    out = p.out + (part.request * p.NEXT_N + part.token + t).to(gl.int64) * p.out_stride
    at = gl.expand_dims(out, 0) + pos
    spare = gl.expand_dims(t < FIRST + COUNT, 0)
    if masked:
        if p.LENS_2D:
            bound = gl.load(p.lens + part.request * p.lens_stride + part.token + t, mask=t < FIRST + COUNT, other=0)
        else:
            bound = part.length - p.NEXT_N + 1 + part.token + t
        y = gl.where(pos < gl.expand_dims(bound, 0), y, float("-inf"))
        gl.store(at, y, mask=(pos < part.extent) & spare)
    else:
        if y.shape[1] == COUNT:
            gl.store(at, y)
        else:
            gl.store(at, y, mask=spare & (pos >= 0))


@gluon.jit
def _second_weights(p, buf, token, slot, LANE: gl.constexpr, TOKENS: gl.constexpr):
    # The second product's B operand [8, columns]: row 2 t + e holds, in the columns of token t of the four that are
    # stored together, the weights' high (e = 0) or low part, so that the weights are exact to about 2^-17 (bf16) or
    # 2^-22 (tf32) in spite of the operand's few bits.
    COLUMNS: gl.constexpr = TOKENS * p.HEADS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    DTYPE: gl.constexpr = gl.float32 if p.RELU == "tf32" else gl.bfloat16
    r = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.arange(0, COLUMNS, layout=COLUMN)
    w = _weights(p, buf, token, TOKENS, COLUMN)
    if p.RELU == "tf32":
        # Odd columns come as x + |x|, truncated; even ones as relu(x), rounded. See _second_operand.
        w = w * gl.where(column % 2 == 0, 1.0, 0.5 * _TF32_BIAS)
        w = gl.reshape(gl.permute(gl.reshape(w, [COLUMNS // 8, 4, 2]), (0, 2, 1)), [COLUMNS])
        w = gl.convert_layout(w, COLUMN)
        high = (w.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
        low = w - high
    else:
        high = w.to(gl.bfloat16).to(gl.float32)
        low = w - high
    value = gl.where(r % 2 == 0, gl.expand_dims(high, 0), gl.expand_dims(low, 0))
    value = gl.where(r // 2 == gl.expand_dims(LANE + column // p.HEADS, 0), value, 0.0)
    _second_tile(p, buf, slot, TOKENS).store(value.to(DTYPE))


@gluon.jit
def _second_operand(p, acc):
    # relu(acc) as the A operand of the second product, in registers and without moving anything between lanes.
    if p.RELU == "bf16":
        x = gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [acc], dtype=gl.bfloat16, is_pure=True, pack=2
        )
        A16: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]), 2)
        return gl.convert_layout(x, A16)
    else:
        # tf32 ignores the low 13 bits: even columns are rounded by an integer add that also does the relu (negative
        # floats are negative integers); odd columns are x + |x| on the other pipe, truncated.
        x = gl.inline_asm_elementwise(
            "{ .reg .s32 t; .reg .f32 u; add.s32 t, $2, 4096; max.s32 $0, t, 0; abs.f32 u, $3; add.f32 $1, $3, u; }",
            "=r,=r,r,r", [acc], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
        # A thread's two neighbouring columns become columns 4 apart, which is what it holds of this operand. Heads may
        # come in any order, as long as _second_weights orders them alike.
        COLUMNS: gl.constexpr = acc.shape[1]
        x = gl.permute(gl.reshape(x, [64, COLUMNS // 8, 4, 2]), (0, 1, 3, 2))
        A32: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 8]), 1)
        return gl.convert_layout(gl.reshape(x, [64, COLUMNS]), A32)


@gluon.jit
def _second_zero(p):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 8 if p.RELU == "tf32" else 16])
    return gl.zeros([64, 8], gl.float32, LAYOUT)


@gluon.jit
def _second_product(p, buf, x, sums, slot, ADD: gl.constexpr, TOKENS: gl.constexpr):
    w = _second_tile(p, buf, slot, TOKENS).permute((1, 0))
    return warpgroup_mma(x, w, sums, use_acc=ADD, is_async=True)
