"""Paged MQA logits for CDNA4 (gfx950) in Gluon: per-next_n (FUSE_N = 1) and fused-M (more) are one source.

Q is the A operand and K the B operand of the matrix product, so a lane holds four (or sixteen) heads of one key in
registers. Which row of A is which (token, head) is free, since Q is gathered row by row: the lane groups of one
instruction hold different *tokens*, and all heads of a (token, key) pair stay in one lane. A token's heads are then
summed with no exchange between lanes, and every lane ends with a logit of its own.

Terms: LANE_GROUPS = 64 / MN groups of lanes hold different rows; a SPAN is the tokens that share one set of matrix
products: LANE_GROUPS tokens where FUSE_N allows, else half or a quarter. In a smaller span each token's heads are dealt
to PARTS = LANE_GROUPS / SPAN lane groups, whose sums meet in v_permlane swaps: a swap of the sums of two sub-tiles and
one add finish both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _spans(fuse_n, lane_groups):
    # First token and size of each span: as many whole ones as fit, then halves.
    spans = []
    first, size = 0, lane_groups
    while first < fuse_n:
        while size > fuse_n - first:
            size //= 2
        spans.append((first, size))
        first += size
    return spans


@gluon.constexpr_function
def _span_count(fuse_n, lane_groups):
    return len(_spans(fuse_n, lane_groups))


@gluon.constexpr_function
def _span_first(i, fuse_n, lane_groups):
    return _spans(fuse_n, lane_groups)[i][0]


@gluon.constexpr_function
def _span_size(i, fuse_n, lane_groups):
    return _spans(fuse_n, lane_groups)[i][1]


@gluon.constexpr_function
def _outputs_of(span, lane_groups, subs):
    # Output vectors of one span: a sub-tile's worth for each sub-tile, less what the swaps pack together.
    return max(1, subs * span // lane_groups)


@gluon.jit
def _as_pair(low, high):
    # Two fp32 as one 64-bit register pair, the operand of packed fp32 instructions. No instruction: only names.
    low = low.to(gl.uint32, bitcast=True).to(gl.uint64)
    high = high.to(gl.uint32, bitcast=True).to(gl.uint64)
    return low | (high << 32)


@gluon.jit
def _sum_of_pair(pair):
    low = pair.to(gl.uint32).to(gl.float32, bitcast=True)
    high = (pair >> 32).to(gl.uint32).to(gl.float32, bitcast=True)
    return low + high


@gluon.jit
def _relu_pair(low, high):
    # As integers, negative floats are negative: one instruction a value, where a float maximum takes two.
    low = gl.maximum(low.to(gl.int32, bitcast=True), 0).to(gl.float32, bitcast=True)
    high = gl.maximum(high.to(gl.int32, bitcast=True), 0).to(gl.float32, bitcast=True)
    return _as_pair(low, high)


@gluon.jit
def _relu_pair_packed(low, high, after):
    # |q.k| <= 128 * 448**2 < 2**25, so x * 2**-25 clamped to [0, 1] is an exact relu of two values in one instruction.
    # The compiler inserts the wait between a matrix product and its first reader, but not where that is inline
    # assembly: `after` is a value made from the same product by an instruction that the compiler knows.
    pair = _as_pair(low, high)
    scale = gl.full(pair.shape, 0x3300000033000000, gl.uint64, pair.type.layout)
    return gl.inline_asm_elementwise(
        "v_pk_mul_f32 $0, $1, $2 clamp", "=v,v,s,v", [pair, scale, after], dtype=gl.uint64, is_pure=True, pack=1
    )


@gluon.jit
def _weigh(total, relu, weight, FIRST: gl.constexpr):
    # Written out, because the compiler forms packed instructions only now and then.
    if FIRST:
        return gl.inline_asm_elementwise(
            "v_pk_mul_f32 $0, $1, $2", "=v,v,v", [relu, weight], dtype=gl.uint64, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "v_pk_fma_f32 $0, $1, $2, $0", "=v,v,v,0", [relu, weight, total], dtype=gl.uint64, is_pure=True, pack=1
        )


@gluon.jit
def _add_pairs(a, b):
    return gl.inline_asm_elementwise("v_pk_add_f32 $0, $1, $2", "=v,v,v", [a, b], dtype=gl.uint64, is_pure=True, pack=1)


@gluon.jit
def _add_across_half(a, b):
    # Lanes 0-31: a's two halves summed; lanes 32-63: b's. The s_nop is the wait that a swap wants after a VALU write.
    a, b = gl.inline_asm_elementwise(
        "s_nop 1\nv_permlane32_swap_b32 $0, $1",
        "=v,=v,0,1",
        [a, b],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    return a + b


@gluon.jit
def _add_across_quarter(a, b):
    # Even rows of 16 lanes: a's row pairs summed; odd rows: b's.
    a, b = gl.inline_asm_elementwise(
        "s_nop 1\nv_permlane16_swap_b32 $0, $1",
        "=v,=v,0,1",
        [a, b],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    return a + b


@gluon.jit
def _uniform(x):
    # A block id comes from a vector load; in a scalar register it makes a buffer's 64-bit base, with no waterfall loop.
    return gl.inline_asm_elementwise("v_readfirstlane_b32 $0, $1", "=s,v", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _keep_nan(x):
    # MODE.DX10_CLAMP off: a clamp lets NaN through, as relu must. x passes through so that all that follows is after.
    return gl.inline_asm_elementwise(
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 8, 1), 0", "=s,0", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _halve(tensors, COUNT: gl.constexpr):
    # Each of COUNT tensors to two, split along its last axis (of 2).
    halves = ()
    for i in gl.static_range(COUNT):
        low, high = gl.split(tensors[i])
        halves = halves + (low, high)
    return halves


@gluon.jit
def _registers(x, MN: gl.constexpr):
    # [MN, N] in the accumulator's layout -> one [LANE_GROUPS, N] tensor for each register of a lane, in their order.
    # Row = 4 * lane group + r where MN is 16, 8 * block + 4 * lane group + r where it is 32. Only names again.
    N: gl.constexpr = x.shape[1]
    if MN == 16:
        x = gl.permute(gl.reshape(x, [4, 2, 2, N]), (0, 3, 2, 1))
        return _halve(_halve((x,), 1), 2)
    else:
        x = gl.permute(gl.reshape(x, [2, 2, 2, 2, 2, N]), (2, 5, 4, 3, 1, 0))
        return _halve(_halve(_halve(_halve((x,), 1), 2), 4), 8)


@gluon.jit
def _dot(a, b, accumulator, SCALED: gl.constexpr):
    if SCALED:
        return gl.amd.cdna4.mfma_scaled(a, None, "e4m3", b, None, "e4m3", accumulator)
    else:
        return gl.amd.cdna4.mfma(a, b, accumulator)


@gluon.jit
def _wait_for_queries(
    qs, ws, COUNT: gl.constexpr, PAIRS: gl.constexpr, SCALED: gl.constexpr, HEAD_DIM: gl.constexpr, N: gl.constexpr,
    mma: gl.constexpr, b_layout: gl.constexpr,
):  # fmt: skip
    # Uses queries and weights once, before the loop; returns the weights. A wait inside the loop serves every turn:
    # were these still on their way into the first one, it would have to be for all loads, always. The products with
    # zero run while the first K is on its way; the empty assembly keeps them.
    MN: gl.constexpr = mma.instr_shape[0]
    zero = gl.full([HEAD_DIM, N], 0, gl.uint8, b_layout).to(gl.float8e4nv, bitcast=True)
    total = gl.zeros([MN, N], gl.float32, mma)
    for i in gl.static_range(COUNT):
        total = _dot(qs[i], zero, total, SCALED)
    gl.inline_asm_elementwise("", "=v,0", [total], dtype=gl.float32, is_pure=False, pack=1)
    held = ()
    for i in gl.static_range(COUNT * PAIRS):
        held = held + (gl.inline_asm_elementwise("", "=v,0", [ws[i]], dtype=gl.uint64, is_pure=False, pack=1),)
    return held


@gluon.jit
def _span_head(row, SPAN: gl.constexpr, HEADS: gl.constexpr, MN: gl.constexpr):
    # Head of a row of a span's first tile (tile i adds i * (MN // LANE_GROUPS)), and token within the span.
    LANE_GROUPS: gl.constexpr = 64 // MN
    group = row // 4 % LANE_GROUPS
    head = group // SPAN * (HEADS * SPAN // LANE_GROUPS) + row // (4 * LANE_GROUPS) * 4 + row % 4
    return head, group % SPAN


@gluon.jit
def _load_span(
    q_ptr, weights_ptr, q_token_stride, weights_stride, first, last, FIRST: gl.constexpr, SPAN: gl.constexpr,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, EPILOGUE: gl.constexpr, N: gl.constexpr,
    mma: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    # Queries and weights of the tokens first + FIRST .. + SPAN - 1, none past `last`: a short group repeats its last.
    MN: gl.constexpr = mma.instr_shape[0]
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, a_layout))[None, :]
    head, token = _span_head(gl.arange(0, MN, layout=gl.SliceLayout(1, a_layout))[:, None], SPAN, HEADS, MN)
    q_offset = gl.minimum(first + FIRST + token, last) * q_token_stride + head * HEAD_DIM + d
    head, token = _span_head(gl.arange(0, MN, layout=gl.SliceLayout(1, mma)), SPAN, HEADS, MN)
    w_offset = gl.minimum(first + FIRST + token, last) * weights_stride + head
    qs = ()
    ws = ()
    for tile in gl.static_range(HEADS * SPAN // MN):
        qs = qs + (gl.amd.cdna4.buffer_load(ptr=q_ptr + tile * (MN * MN // 64) * HEAD_DIM, offsets=q_offset),)
        weight = gl.load(weights_ptr + tile * (MN * MN // 64) + w_offset)
        rows = _registers(gl.expand_dims(weight, 1) + gl.zeros([MN, N], gl.float32, mma), MN)
        for i in gl.static_range(MN * MN // 128):
            low, high = rows[2 * i], rows[2 * i + 1]
            if (EPILOGUE == "packed") and (i > 0):
                low, high = low * 33554432.0, high * 33554432.0  # what _relu_pair_packed takes off
            ws = ws + (_as_pair(low, high),)
    return qs, ws


@gluon.jit
def _span_sum(
    qs, ws, k, FIRST: gl.constexpr, SPAN: gl.constexpr, HEADS: gl.constexpr, SCALED: gl.constexpr,
    EPILOGUE: gl.constexpr, N: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    # [LANE_GROUPS, N]: weighted relu of the heads that a lane holds of its token, over one sub-tile of K.
    MN: gl.constexpr = mma.instr_shape[0]
    PAIRS: gl.constexpr = MN * MN // 128  # register pairs of one tile
    TILE0: gl.constexpr = FIRST * HEADS // MN
    for tile in gl.static_range(HEADS * SPAN // MN):
        rows = _registers(_dot(qs[TILE0 + tile], k, gl.zeros([MN, N], gl.float32, mma), SCALED), MN)
        known = _relu_pair(rows[0], rows[1])
        for i in gl.static_range(PAIRS):
            if i == 0:
                relu = known
            elif EPILOGUE == "packed":
                relu = _relu_pair_packed(rows[2 * i], rows[2 * i + 1], known)
            else:
                relu = _relu_pair(rows[2 * i], rows[2 * i + 1])
            weight = ws[(TILE0 + tile) * PAIRS + i]
            # Two sums, so that a packed multiply-add need not wait for the one before.
            if i % 2 == 0:
                if (tile == 0) and (i == 0):
                    even = _weigh(weight, relu, weight, True)
                else:
                    even = _weigh(even, relu, weight, False)
            else:
                if (tile == 0) and (i == 1):
                    odd = _weigh(weight, relu, weight, True)
                else:
                    odd = _weigh(odd, relu, weight, False)
    return _sum_of_pair(_add_pairs(even, odd))


@gluon.jit
def _combine(sums, SPAN: gl.constexpr, LANE_GROUPS: gl.constexpr, SUBS: gl.constexpr):
    # A span's [LANE_GROUPS, N] sums of each sub-tile -> finished output vectors; see _output_lane for what is where.
    PARTS: gl.constexpr = LANE_GROUPS // SPAN
    HALVES: gl.constexpr = (SUBS + 1) // 2
    if PARTS >= 2:
        halves = ()
        for s in gl.static_range(HALVES):
            # With a lone sub-tile, both halves of the lanes end with the same sum.
            halves = halves + (_add_across_half(sums[2 * s], sums[min(2 * s + 1, SUBS - 1)]),)
    else:
        halves = sums
    if PARTS == 4:
        quarters = ()
        for s in gl.static_range((HALVES + 1) // 2):
            quarters = quarters + (_add_across_quarter(halves[2 * s], halves[min(2 * s + 1, HALVES - 1)]),)
    else:
        quarters = halves
    return quarters


@gluon.jit
def _output_lane(
    output: gl.constexpr, group, column, FIRST: gl.constexpr, SPAN: gl.constexpr, LANE_GROUPS: gl.constexpr,
    SUBS: gl.constexpr, MN: gl.constexpr,
):  # fmt: skip
    # What a lane of a span's output vector holds after _combine: token, column of the tile, and whether it is a copy.
    PARTS: gl.constexpr = LANE_GROUPS // SPAN
    half = group // (LANE_GROUPS // 2)
    quarter = group % 2
    if PARTS == 1:
        sub, copy = output, 0
    elif PARTS == 2:
        if SUBS == 1:
            sub, copy = 0, half
        else:
            sub, copy = 2 * output + half, 0
    else:
        if SUBS == 1:
            sub, copy = 0, group
        elif SUBS == 2:
            sub, copy = half, quarter
        else:
            sub, copy = 4 * output + 2 * quarter + half, 0
    column = column + sub * MN + 0 * group
    return FIRST + group % SPAN + 0 * column, column, copy + 0 * column


@gluon.jit
def _page_ids(table_ptr, tile, columns, COUNT: gl.constexpr, extent, TILE_KV: gl.constexpr, BLOCK_KV: gl.constexpr):
    # Cache page of each column of a tile (columns: tuple of offsets into it), or of the whole tile where that is one.
    # Never reads the table past the last page that holds context.
    if BLOCK_KV >= TILE_KV:
        return (gl.load(table_ptr + tile // (BLOCK_KV // TILE_KV)),)
    else:
        ids = ()
        for i in gl.static_range(COUNT):
            token = gl.minimum(tile * TILE_KV + columns[i], extent - 1)
            ids = ids + (gl.load(table_ptr + token // BLOCK_KV),)
        return ids


@gluon.jit
def _arrived(x):
    # A value used once, so that its load is waited for here; see _wait_for_queries.
    return gl.inline_asm_elementwise("", "=v,0", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _all_arrived(values, COUNT: gl.constexpr):
    held = ()
    for i in gl.static_range(COUNT):
        held = held + (_arrived(values[i]),)
    return held


@gluon.jit
def _tile_ids(
    table_ptr, tile, k_columns, SUBS: gl.constexpr, out_columns, OUTPUTS: gl.constexpr, extent, TILE_KV: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):  # fmt: skip
    # _page_ids of the columns of K's sub-tiles and of the output vectors.
    k_ids = _page_ids(table_ptr, tile, k_columns, SUBS, extent, TILE_KV, BLOCK_KV)
    if BLOCK_KV >= TILE_KV:
        return k_ids, k_ids
    else:
        return k_ids, _page_ids(table_ptr, tile, out_columns, OUTPUTS, extent, TILE_KV, BLOCK_KV)


@gluon.jit
def _load_k(
    kv_ptr, page_units, ids, tile, sub: gl.constexpr, offsets, TILE_KV: gl.constexpr, BLOCK_KV: gl.constexpr,
    UNIT: gl.constexpr, MN: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    # [HEAD_DIM, N] of one sub-tile. Page offsets are 64 bits wide: in a buffer's base, or in pointers.
    if BLOCK_KV >= TILE_KV:
        token = tile % (BLOCK_KV // TILE_KV) * TILE_KV + sub * MN
        base = kv_ptr + (_uniform(ids[0]).to(gl.int64) * page_units * UNIT + token * HEAD_DIM)
        return gl.amd.cdna4.buffer_load(ptr=base, offsets=offsets[0])
    else:
        pages = gl.expand_dims(ids[sub].to(gl.int64) * page_units * UNIT, 0)
        return gl.load(kv_ptr + (pages + offsets[sub]))


@gluon.jit
def _load_scale(
    scale_ptr, page_units, ids, tile, index: gl.constexpr, column, TILE_KV: gl.constexpr, BLOCK_KV: gl.constexpr,
    UNIT: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    # fp32 scale of each column of an output vector: a page's scales follow its values.
    if BLOCK_KV >= TILE_KV:
        token = tile % (BLOCK_KV // TILE_KV) * TILE_KV
        skip = _uniform(ids[0]).to(gl.int64) * page_units * (UNIT // 4) + (BLOCK_KV * HEAD_DIM // 4 + token)
        return gl.amd.cdna4.buffer_load(ptr=scale_ptr + skip, offsets=column)
    else:
        pages = ids[index].to(gl.int64) * page_units * (UNIT // 4)
        return gl.load(scale_ptr + (pages + (BLOCK_KV * HEAD_DIM // 4 + column % BLOCK_KV)))


@gluon.jit
def _program(programs, next_n, split_kv, FUSE_N: gl.constexpr, XCD_ORDER: gl.constexpr):
    # Which request, split and token group this program is. Groups are neighbours, for they read the same K.
    program = gl.program_id(0)
    if XCD_ORDER:
        # Workgroups are dealt to the dies in turn, each die with an L2 of its own: give each die a run of neighbours.
        XCDS: gl.constexpr = 8
        share = programs // XCDS
        extra = programs % XCDS
        xcd = program % XCDS
        program = xcd * share + gl.minimum(xcd, extra) + program // XCDS
    groups = (next_n + FUSE_N - 1) // FUSE_N
    return program // groups // split_kv, program // groups % split_kv, program % groups


_UNSPECIALIZED = (
    "programs", "next_n", "split_kv", "columns", "q_batch_units", "q_token_units", "page_units", "table_stride",
    "lens_stride", "weights_stride", "out_stride",
)  # fmt: skip


# Strides and counts are not specialised: one binary serves every launch, and the audit is of that binary.
@gluon.jit(
    do_not_specialize=_UNSPECIALIZED,
    do_not_specialize_on_alignment=("table_ptr", "lens_ptr", "weights_ptr", "out_ptr", "scale_ptr"),
)
def _paged_mqa_logits_kernel(
    q_ptr, kv_ptr, scale_ptr, table_ptr, lens_ptr, weights_ptr, out_ptr,
    programs, next_n, split_kv, columns, q_batch_units, q_token_units, page_units, table_stride, lens_stride,
    weights_stride, out_stride,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_KV: gl.constexpr, PRESHUFFLED: gl.constexpr,
    LENS_2D: gl.constexpr, FUSE_N: gl.constexpr, TILE_KV: gl.constexpr, NUM_WARPS: gl.constexpr, MN: gl.constexpr,
    MFMA_K: gl.constexpr, EPILOGUE: gl.constexpr, XCD_ORDER: gl.constexpr,
):  # fmt: skip
    # q [B, next_n, HEADS, HEAD_DIM] fp8, strides of 16 bytes; kv, scale: two views of the pages, page_units of UNIT
    # bytes apart; table [B, pages] i32; lens [B] or [B, next_n] i32; weights [B * next_n, HEADS] f32;
    # out [B * next_n, columns] f32. Offsets of pages, requests and rows are 64 bits wide, those within one 32.
    SCALED: gl.constexpr = MN * MFMA_K >= 2048
    LANE_GROUPS: gl.constexpr = 64 // MN
    N: gl.constexpr = MN * NUM_WARPS
    SUBS: gl.constexpr = TILE_KV // N
    SPANS: gl.constexpr = _span_count(FUSE_N, LANE_GROUPS)
    UNIT: gl.constexpr = 16 if BLOCK_KV % 4 == 0 else 4
    mma: gl.constexpr = gl.amd.AMDMFMALayout(
        version=4, instr_shape=[MN, MN, MFMA_K], transposed=False, warps_per_cta=[1, NUM_WARPS]
    )
    # 16 consecutive bytes of a row per load: any order along head_dim serves, if both operands have it.
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 16)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 1], [LANE_GROUPS, MN], [1, NUM_WARPS], [1, 0])

    batch, split, group = _program(programs, next_n, split_kv, FUSE_N, XCD_ORDER)
    lens_ptr += batch.to(gl.int64) * lens_stride
    length = gl.load(lens_ptr)
    if LENS_2D:
        for t in range(1, next_n):
            length = gl.maximum(length, gl.load(lens_ptr + t))
    extent = gl.minimum(length, columns)
    tiles = (extent + TILE_KV - 1) // TILE_KV
    per_split = (tiles + split_kv - 1) // split_kv
    start = split * per_split
    stop = gl.minimum(start + per_split, tiles)
    if start >= stop:
        return
    if EPILOGUE == "packed":
        start = _keep_nan(start)

    first = group * FUSE_N
    row = batch.to(gl.int64) * next_n
    qs = ()
    ws = ()
    for i in gl.static_range(SPANS):
        q, w = _load_span(
            q_ptr + batch.to(gl.int64) * q_batch_units * 16, weights_ptr + row * weights_stride, q_token_units * 16,
            weights_stride, first, next_n - 1, _span_first(i, FUSE_N, LANE_GROUPS), _span_size(i, FUSE_N, LANE_GROUPS),
            HEADS, HEAD_DIM, EPILOGUE, N, mma, a_layout,
        )  # fmt: skip
        qs = qs + q
        ws = ws + w

    # Where each column of K's sub-tiles is in its page. A wave's sub-tiles are neighbours.
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, b_layout))[:, None]
    column = gl.arange(0, N, layout=gl.SliceLayout(0, b_layout))
    column = column // MN * (MN * SUBS) + column % MN
    k_columns = ()
    k_offsets = ()
    for s in gl.static_range(SUBS):
        k_columns = k_columns + (column + s * MN,)
        token = (column + s * MN)[None, :] % BLOCK_KV
        if PRESHUFFLED:
            k_offsets = k_offsets + (token // 16 * (16 * HEAD_DIM) + token % 16 * 16 + d // 16 * 256 + d % 16,)
        else:
            k_offsets = k_offsets + (token * HEAD_DIM + d,)

    # What each lane of each output vector stands for: column of the tile, offset in the output, first column of a tile
    # for which it is past its token's bound, and first for which it is not to be written.
    lane_group = gl.arange(0, LANE_GROUPS, layout=gl.SliceLayout(1, out_layout))[:, None]
    lane_column = gl.arange(0, N, layout=gl.SliceLayout(0, out_layout))[None, :]
    lane_column = lane_column // MN * (MN * SUBS) + lane_column % MN
    out_columns = ()
    out_offsets = ()
    bounds = ()
    ends = ()
    for i in gl.static_range(SPANS):
        for o in gl.static_range(_outputs_of(_span_size(i, FUSE_N, LANE_GROUPS), LANE_GROUPS, SUBS)):
            token, col, copy = _output_lane(
                o, lane_group, lane_column, _span_first(i, FUSE_N, LANE_GROUPS), _span_size(i, FUSE_N, LANE_GROUPS),
                LANE_GROUPS, SUBS, MN,
            )  # fmt: skip
            token = first + token
            out_columns = out_columns + (col,)
            out_offsets = out_offsets + (gl.minimum(token, next_n - 1) * out_stride.to(gl.int32) + col,)
            if LENS_2D:
                bound = gl.load(lens_ptr + gl.minimum(token, next_n - 1))
            else:
                bound = length - next_n + token + 1
            bounds = bounds + (bound - col,)
            ends = ends + (gl.where((token < next_n) & (copy == 0), extent, 0) - col,)
    OUTPUTS: gl.constexpr = len(out_columns)

    table_ptr += batch.to(gl.int64) * table_stride
    out_ptr += row * out_stride
    ahead = gl.minimum(start + 1, stop - 1)
    first_k_ids, first_s_ids = _tile_ids(
        table_ptr, start, k_columns, SUBS, out_columns, OUTPUTS, extent, TILE_KV, BLOCK_KV
    )
    k_ids, s_ids = _tile_ids(table_ptr, ahead, k_columns, SUBS, out_columns, OUTPUTS, extent, TILE_KV, BLOCK_KV)
    ks = ()
    for s in gl.static_range(SUBS):
        ks = ks + (
            _load_k(kv_ptr, page_units, first_k_ids, start, s, k_offsets, TILE_KV, BLOCK_KV, UNIT, MN, HEAD_DIM),
        )
    scales = ()
    for o in gl.static_range(OUTPUTS):
        scales = scales + (
            _load_scale(
                scale_ptr, page_units, first_s_ids, start, o, out_columns[o], TILE_KV, BLOCK_KV, UNIT, HEAD_DIM
            ),
        )
    if BLOCK_KV >= TILE_KV:
        k_ids = (_arrived(k_ids[0]),)
        s_ids = k_ids
    else:
        k_ids = _all_arrived(k_ids, SUBS)
        s_ids = _all_arrived(s_ids, OUTPUTS)
    ws = _wait_for_queries(qs, ws, HEADS * FUSE_N // MN, MN * MN // 128, SCALED, HEAD_DIM, N, mma, b_layout)
    for i in range(start, stop):
        # Loads return in order, and waiting for one is waiting for all before it: so page ids are read two tiles ahead,
        # first thing, and each sub-tile's registers are loaded anew, for the next tile, as soon as it has been used.
        ahead = gl.minimum(i + 1, stop - 1)
        next_k_ids, next_s_ids = _tile_ids(
            table_ptr, gl.minimum(i + 2, stop - 1), k_columns, SUBS, out_columns, OUTPUTS, extent, TILE_KV, BLOCK_KV
        )
        sums = ()
        next_ks = ()
        for s in gl.static_range(SUBS):
            for j in gl.static_range(SPANS):
                total = _span_sum(
                    qs, ws, ks[s], _span_first(j, FUSE_N, LANE_GROUPS), _span_size(j, FUSE_N, LANE_GROUPS), HEADS,
                    SCALED, EPILOGUE, N, mma,
                )  # fmt: skip
                sums = sums + (gl.convert_layout(total, out_layout, assert_trivial=True),)
            next_ks = next_ks + (
                _load_k(kv_ptr, page_units, k_ids, ahead, s, k_offsets, TILE_KV, BLOCK_KV, UNIT, MN, HEAD_DIM),
            )
        outputs = ()
        for j in gl.static_range(SPANS):
            own = ()
            for s in gl.static_range(SUBS):
                own = own + (sums[s * SPANS + j],)
            outputs = outputs + _combine(own, _span_size(j, FUSE_N, LANE_GROUPS), LANE_GROUPS, SUBS)
        begin = i * TILE_KV
        next_scales = ()
        for o in gl.static_range(OUTPUTS):
            # The scale of a key is common to its heads: applied once, after the sum.
            logits = gl.where(begin < bounds[o], outputs[o] * scales[o], float("-inf"))
            gl.amd.cdna4.buffer_store(logits, ptr=out_ptr + begin, offsets=out_offsets[o], mask=begin < ends[o])
            next_scales = next_scales + (
                _load_scale(scale_ptr, page_units, s_ids, ahead, o, out_columns[o], TILE_KV, BLOCK_KV, UNIT, HEAD_DIM),
            )
        ks = next_ks
        scales = next_scales
        k_ids = next_k_ids
        s_ids = next_s_ids
