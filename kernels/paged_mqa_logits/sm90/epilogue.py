"""From accumulators to logits: relu, weighting, sum over heads, store. Gluon device functions, and nothing else.

A thread of a product's accumulator holds rows r and r + 8 and, of every 8 columns, two neighbours; the four lanes of a
quad hold the rest. Heads are columns, so a token's sum runs over registers first and over the quad last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

# Truncation to tf32 loses 2^-11 / 1.44 of a positive number on average (mantissas are log-uniform); see _second_weights.
_TF32_BIAS = gl.constexpr(1.0 + 0.69 * 2.0**-11)


@gluon.jit
def _column_weights(p, buf, token, TOKENS: gl.constexpr):
    # Weights of the columns of a product, halved where relu(x) is taken as x + |x|.
    COLUMNS: gl.constexpr = TOKENS * p.HEADS
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32]))
    w = buf.weights.index(token)._reinterpret(gl.float32, [COLUMNS], gl.NVMMASharedLayout(0, 32, 1)).load(LAYOUT)
    if p.RELU == "mix":
        w = w * gl.where(gl.arange(0, COLUMNS, layout=LAYOUT) % 2 == 0, 1.0, 0.5)
    return w


@gluon.jit
def _token_sums(p, acc, w, TOKENS: gl.constexpr):
    # Sums over the heads that a thread holds: a tuple of TOKENS tensors [64, 4], whose columns are the lanes of a quad.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    if p.RELU == "mix":
        # Two pipes at once: max for even columns, x + |x| (whose |.| is free) for odd ones.
        x = gl.inline_asm_elementwise(
            "{ .reg .f32 t; max.f32 $0, $2, 0f00000000; abs.f32 t, $3; add.f32 $1, $3, t; }",
            "=r,=r,r,r", [acc], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = acc + gl.abs(acc)  # twice the relu; the scale of K is halved instead
    x = x * gl.expand_dims(w, 0)
    # Four independent chains of multiply-adds: two rows, two columns.
    part = gl.sum(gl.sum(gl.reshape(x, [64, TOKENS, p.HEADS // 8, 4, 2]), 2), 3)
    if TOKENS == 1:
        return (gl.convert_layout(gl.reshape(part, [64, 4]), LAYOUT),)
    elif TOKENS == 2:
        a, b = gl.split(gl.permute(part, (0, 2, 1)))
        return (gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT))
    else:
        even, odd = gl.split(gl.reshape(gl.permute(part, (0, 2, 1)), [64, 4, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        return (
            gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT),
            gl.convert_layout(c, LAYOUT), gl.convert_layout(d, LAYOUT),
        )  # fmt: skip


@gluon.jit
def _quad_sums(p, sums, COUNT: gl.constexpr):
    # The sum over a quad of up to four tokens' partial sums. It is a transpose: for four tokens, lane t keeps token t of
    # two rows; for two, a lane keeps one token of one row; for one, a row, with one exchange left.
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
def _store_tokens(
    p, y, scale, row, request, token, length, extent, column, masked, FIRST: gl.constexpr, COUNT: gl.constexpr
):
    # y [64, slots]: sums of COUNT query tokens, the consumer's token FIRST and those after it; further slots are spare.
    ROWS: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    SLOTS: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    pos = gl.expand_dims(column + gl.arange(0, 64, layout=ROWS), 1)
    t = FIRST + gl.arange(0, y.shape[1], layout=SLOTS)
    if p.RELU == "add":
        scale = scale * 0.5
    y = y * gl.expand_dims(gl.convert_layout(scale, ROWS), 1)
    out = p.out + (row + t).to(gl.int64) * p.out_stride
    at = gl.expand_dims(out, 0) + pos
    spare = gl.expand_dims(t < FIRST + COUNT, 0)
    if masked:
        if p.LENS_2D:
            bound = gl.load(p.lens + request * p.lens_stride + token + t, mask=t < FIRST + COUNT, other=0)
        else:
            bound = length - p.NEXT_N + 1 + token + t
        y = gl.where(pos < gl.expand_dims(bound, 0), y, float("-inf"))
        gl.store(at, y, mask=(pos < extent) & spare)
    else:
        if COUNT == y.shape[1]:
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
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, COLUMNS], DTYPE)
    r = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.arange(0, COLUMNS, layout=COLUMN)
    w = buf.weights.index(token)._reinterpret(gl.float32, [COLUMNS], gl.NVMMASharedLayout(0, 32, 1)).load(COLUMN)
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
    buf.second.index(slot)._reinterpret(DTYPE, [8, COLUMNS], TILE).store(value.to(DTYPE))


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
    COLUMNS: gl.constexpr = TOKENS * p.HEADS
    DTYPE: gl.constexpr = gl.float32 if p.RELU == "tf32" else gl.bfloat16
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, COLUMNS], DTYPE)
    w = buf.second.index(slot)._reinterpret(DTYPE, [8, COLUMNS], TILE).permute((1, 0))
    return warpgroup_mma(x, w, sums, use_acc=ADD, is_async=True)
