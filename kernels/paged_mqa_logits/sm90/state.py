"""What the kernel's partitions share, as compile-time records.

Passing a tuple to a partition would lose which of its members are constants; these records keep that.
"""

# No `from __future__ import annotations`: Gluon compares the fields with the annotations themselves.
from triton.experimental.gluon import language as gl

from tilewise.kernels.paged_mqa_logits.sm90 import pieces
from tilewise.kernels.paged_mqa_logits.sm90.compat import aggregate, constexpr_function

weights_pitch = constexpr_function(pieces.weights_pitch)


@aggregate
class Problem:
    """The launch: tensors, strides in elements, and what is fixed while compiling."""

    block_tables: gl.tensor
    lens: gl.tensor
    out: gl.tensor
    batch_size: gl.tensor
    max_columns: gl.tensor  # no column from here on exists, in the output or in the table
    table_stride: gl.tensor
    lens_stride: gl.tensor
    weights_stride: gl.tensor
    out_stride: gl.tensor
    NEXT_N: gl.constexpr
    HEADS: gl.constexpr
    HEAD_DIM: gl.constexpr
    BLOCK_KV: gl.constexpr
    FUSE_N: gl.constexpr
    DOT_N: gl.constexpr
    IN_FLIGHT: gl.constexpr  # products of one tile that are issued ahead of the epilogue
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    TOKEN_SPLIT: gl.constexpr
    KEEP_WEIGHTS: gl.constexpr  # weights stay in registers from tile to tile
    MAX_EVEN: gl.constexpr  # relu is a maximum in even columns
    BALANCED: gl.constexpr
    LENS_2D: gl.constexpr
    GROUPS: gl.constexpr  # of query tokens of a request
    Q_TOKENS: gl.constexpr  # that a q buffer has room for
    WEIGHTS_PITCH: gl.constexpr  # weights between one query token's and the next one's in shared memory

    @constexpr_function
    def __init__(
        self, block_tables, lens, out, batch_size, max_columns, table_stride, lens_stride, weights_stride,
        out_stride,
        NEXT_N, HEADS, HEAD_DIM, BLOCK_KV, FUSE_N, DOT_N, IN_FLIGHT, STAGES, CONSUMERS, TOKEN_SPLIT,
        KEEP_WEIGHTS, MAX_EVEN, BALANCED, LENS_2D, Q_TOKENS,
    ):  # fmt: skip
        self.block_tables = block_tables
        self.lens = lens
        self.out = out
        self.batch_size = batch_size
        self.max_columns = max_columns
        self.table_stride = table_stride
        self.lens_stride = lens_stride
        self.weights_stride = weights_stride
        self.out_stride = out_stride
        self.NEXT_N = gl.constexpr(NEXT_N)
        self.HEADS = gl.constexpr(HEADS)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.FUSE_N = gl.constexpr(FUSE_N)
        self.DOT_N = gl.constexpr(DOT_N)
        self.IN_FLIGHT = gl.constexpr(IN_FLIGHT)
        self.STAGES = gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.TOKEN_SPLIT = gl.constexpr(TOKEN_SPLIT)
        self.KEEP_WEIGHTS = gl.constexpr(KEEP_WEIGHTS)
        self.MAX_EVEN = gl.constexpr(MAX_EVEN)
        self.BALANCED = gl.constexpr(BALANCED)
        self.LENS_2D = gl.constexpr(LENS_2D)
        self.GROUPS = gl.constexpr(-(-NEXT_N // FUSE_N))
        self.Q_TOKENS = gl.constexpr(Q_TOKENS)
        self.WEIGHTS_PITCH = gl.constexpr(weights_pitch(HEADS))


@aggregate
class Buffers:
    """Shared memory, and the barriers that pass it between the producer and the consumers."""

    k: gl.shared_memory_descriptor  # [stages x pages per tile, 1, rows, head_dim], as the copies write it
    # [2 x stages x pages per tile, 1, rows]: a load of scales may still be on its way when K's slot is released, so the
    # scales' slot is filled again a whole round later.
    k_scale: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [2 x q_tokens, heads, head_dim], each piece's heads and tokens interleaved
    weights: gl.shared_memory_descriptor  # [2 x q_tokens, weights_pitch]
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(self, k, k_scale, q, weights, k_full, k_empty, q_full, q_empty):
        self.k = k
        self.k_scale = k_scale
        self.q = q
        self.weights = weights
        self.k_full = k_full
        self.k_empty = k_empty
        self.q_full = q_full
        self.q_empty = q_empty


@aggregate
class Share:
    """What one workgroup scores: `count` tiles in a row, from one tile of one token group of one request on."""

    request: gl.tensor
    group: gl.tensor
    tile: gl.tensor
    count: gl.tensor
    length: gl.tensor  # of the first request; unclamped

    @constexpr_function
    def __init__(self, request, group, tile, count, length):
        self.request = request
        self.group = group
        self.tile = tile
        self.count = count
        self.length = length


@aggregate
class Part:
    """What one consumer scores: its query tokens of one token group, against a run of tiles of one request."""

    request: gl.tensor
    token: gl.tensor  # first query token
    length: gl.tensor  # unclamped
    extent: gl.tensor  # no column is written from here on
    low: gl.tensor  # from this column on, tiles need masks
    tile: gl.tensor  # where the run begins
    done: gl.tensor  # tiles of the workgroup before the run
    slot: gl.tensor  # of the two q buffers

    @constexpr_function
    def __init__(self, request, token, length, extent, low, tile, done, slot):
        self.request = request
        self.token = token
        self.length = length
        self.extent = extent
        self.low = low
        self.tile = tile
        self.done = done
        self.slot = slot
