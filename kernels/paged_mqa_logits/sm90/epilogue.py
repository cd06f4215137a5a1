"""From accumulators to logits: relu, weighting, sum over heads, store. Gluon device functions, and nothing else.

A thread of a product's accumulator holds rows r and r + 8 and, of every 8 columns, two neighbours; the four lanes of a
quad hold the rest. Query tokens are laid out so that of a piece of four each lane has one, with all its heads: its sum
needs no other lane. Of a piece of two a token has two lanes, of one all four.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.paged_mqa_logits.sm90 import pieces
from tilewise.kernels.paged_mqa_logits.sm90.compat import PROPAGATE_NAN, constexpr_function, reinterpret

_weight_registers = constexpr_function(pieces.weight_registers)
_weight_lanes = constexpr_function(pieces.weight_lanes)


@gluon.jit
def _piece_weights(p, buf, slot, POSITION: gl.constexpr, TOKENS: gl.constexpr):
    # Weights of a piece, [tokens x heads], in the lanes that hold these columns of a product.
    PITCH: gl.constexpr = p.WEIGHTS_PITCH
    SHAPE: gl.constexpr = [2 * p.Q_TOKENS // TOKENS, TOKENS * PITCH]
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        _weight_registers(TOKENS, p.HEADS, PITCH), _weight_lanes(TOKENS, PITCH), [[0], [0]], [], [TOKENS * PITCH]
    )
    rows = reinterpret(buf.weights, gl.float32, SHAPE, gl.NVMMASharedLayout(0, 32, 1))
    w = rows.index(slot * (p.Q_TOKENS // TOKENS) + POSITION // TOKENS).load(LAYOUT)
    if PITCH > p.HEADS:
        # The second half of each row holds something else.
        w, _ = gl.split(gl.permute(gl.reshape(w, [TOKENS, 2, p.HEADS]), (0, 2, 1)))
    return gl.reshape(w, [TOKENS * p.HEADS])


@gluon.jit
def _product_weights(p, w, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr):
    # Those of one product, in its order of columns: of every 8, 8 / TOKENS heads of each token.
    PARTS: gl.constexpr = TOKENS * p.HEADS // COLUMNS
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32]))
    w = gl.permute(gl.reshape(w, [TOKENS, PARTS, COLUMNS // 8, 8 // TOKENS]), (2, 0, 3, 1))
    if PARTS == 2:
        low, high = gl.split(gl.reshape(w, [COLUMNS, 2]))
        w = high if PART == 1 else low
    elif PARTS == 4:
        even, odd = gl.split(gl.reshape(w, [COLUMNS, 2, 2]))
        low, high = gl.split(odd if PART % 2 == 1 else even)
        w = high if PART >= 2 else low
    w = gl.convert_layout(gl.reshape(w, [COLUMNS]), LAYOUT)
    if p.MAX_EVEN:
        w = w * gl.where(gl.arange(0, COLUMNS, layout=LAYOUT) % 2 == 0, 1.0, 0.5)
    return w


@gluon.jit
def _add_product(p, acc, w, chains):
    # Adds a product's weighted relu to the sums of its piece: a tuple of [64, 4, 2], or of nothing yet.
    COUNT: gl.constexpr = acc.shape[1] // 8
    # The relu as x + |x|, whose |.| is free, is twice the relu: the weights or the scale of K are halved instead. As a
    # maximum it goes to another pipe.
    if p.MAX_EVEN:
        even, odd = gl.split(gl.reshape(acc, [64, acc.shape[1] // 2, 2]))
        even = gl.maximum(even, 0.0, propagate_nan=PROPAGATE_NAN)
        x = gl.convert_layout(gl.reshape(gl.join(even, odd + gl.abs(odd)), [64, acc.shape[1]]), acc.type.layout)
    else:
        x = acc + gl.abs(acc)
    w, x = gl.broadcast(gl.expand_dims(w, 0), x)
    # Multiply-adds spelled out, eight columns at a time: a reduction's order is the compiler's, and not every release
    # contracts it. Four independent chains: two rows, two neighbouring columns.
    xs = _columns_apart(gl.reshape(x, [64, COUNT, 4, 2]), COUNT)
    ws = _columns_apart(gl.reshape(w, [64, COUNT, 4, 2]), COUNT)
    if len(chains) == 0:
        sums = xs[0] * ws[0]
    else:
        sums = gl.fma(xs[0], ws[0], chains[0])
    for i in gl.static_range(1, COUNT):
        sums = gl.fma(xs[i], ws[i], sums)
    return (sums,)


@gluon.jit
def _columns_apart(x, COUNT: gl.constexpr):
    # [64, COUNT, 4, 2] to COUNT tensors [64, 4, 2]; registers change names, nothing moves.
    found = (x,)
    for level in gl.static_range(5):
        if 2**level < COUNT:
            finer = ()
            for i in gl.static_range(2**level):
                y = gl.reshape(found[i], [64, COUNT // 2**level // 2, 2, 4, 2])
                a, b = gl.split(gl.permute(y, (0, 1, 3, 4, 2)))
                finer = finer + (a, b)
            found = finer
    flat = ()
    for i in gl.static_range(COUNT):
        flat = flat + (gl.reshape(found[i], [64, 4, 2]),)
    return flat


@gluon.jit
def _token_sums(chains, TOKENS: gl.constexpr):
    # [64, TOKENS], from what the lanes of each quad hold.
    a, b = gl.split(chains[0])
    x = a + b
    if TOKENS == 4:
        LAYOUT4: gl.constexpr = gl.DistributedLinearLayout(
            [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
        )
        return gl.convert_layout(x, LAYOUT4)
    elif TOKENS == 2:
        # Two lanes exchange: each keeps one of the two rows.
        LAYOUT2: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1]], [[8, 0, 0], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 2, 2],
        )  # fmt: skip
        return gl.sum(gl.convert_layout(gl.reshape(x, [64, 2, 2]), LAYOUT2), 2)
    else:
        # The same, and one exchange more.
        LAYOUT1: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1]], [[8, 0, 0], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]], [], [64, 1, 4],
        )  # fmt: skip
        return gl.sum(gl.convert_layout(gl.reshape(x, [64, 1, 4]), LAYOUT1), 2)


@gluon.jit
def _store_tokens(p, y, scale, part, column, masked, FIRST: gl.constexpr):
    # y [64, tokens]: sums of query tokens, the consumer's token FIRST and those after it.
    ROWS: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    TOKENS: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    pos = gl.expand_dims(column + gl.arange(0, 64, layout=ROWS), 1)
    t = FIRST + gl.arange(0, y.shape[1], layout=TOKENS)
    if not p.MAX_EVEN:
        scale = scale * 0.5  # the sums are of twice the relu
    y = y * gl.expand_dims(gl.convert_layout(scale, ROWS), 1)
    out = p.out + (part.request * p.NEXT_N + part.token + t).to(gl.int64) * p.out_stride
    at = gl.expand_dims(out, 0) + pos
    if masked:
        if p.LENS_2D:
            bound = gl.load(p.lens + part.request * p.lens_stride + part.token + t)
        else:
            bound = part.length - p.NEXT_N + 1 + part.token + t
        y = gl.where(pos < gl.expand_dims(bound, 0), y, float("-inf"))
        gl.store(at, y, mask=pos < part.extent)
    else:
        gl.store(at, y)
