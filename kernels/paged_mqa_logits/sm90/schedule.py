"""Which tiles a workgroup scores. Gluon device functions, and nothing else."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.paged_mqa_logits.sm90.compat import prefetch
from tilewise.kernels.paged_mqa_logits.sm90.state import Share


@gluon.jit
def _lengths(p, request, mask):
    # What a request's tiles are counted from: its length, or the largest of its tokens' lengths.
    at = p.lens + request * p.lens_stride
    length = gl.load(at, mask=mask, other=0)
    if p.LENS_2D:
        for t in gl.static_range(1, p.NEXT_N):
            length = gl.maximum(length, gl.load(at + t, mask=mask, other=0))
    return length


@gluon.jit
def _ask_for_page_ids(p, part, request, asks, portion):
    # Page ids that this workgroup will read if every request is as long as its table go to the L2 cache while the
    # lengths arrive. A wrong guess costs a few of its lines.
    # In floating point, by the grid's reciprocal from the host: divisions would take until the lengths are there, and a
    # page more or less does not matter.
    pages = (p.max_columns + p.BLOCK_KV - 1) // p.BLOCK_KV
    part = part.to(gl.float32) * portion
    if p.BALANCED:
        at = part * p.batch_size.to(gl.float32)
        request = gl.minimum(at.to(gl.int32), p.batch_size - 1)
        at = (at - request.to(gl.float32)) * p.GROUPS
        part = at - at.to(gl.int32).to(gl.float32)
    line = gl.arange(0, 2, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * 32  # 128 bytes of page ids
    entry = gl.minimum((part * pages.to(gl.float32)).to(gl.int32) + line, gl.maximum(pages - 1, 0))
    request = request.to(gl.int64)
    prefetch(p.block_tables + request * p.table_stride + entry, asks)


@gluon.jit
def _extent(p, length):
    return gl.minimum(gl.maximum(length, 0), p.max_columns)


@gluon.jit
def _tiles(p, length):
    return (_extent(p, length) + 63) // 64


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _divided(x, y, portion):
    # x // y and x % y of numbers that are not negative, in a third of the time of an integer division, with 1 / y, a
    # little less. Neither product exceeds its quotient; what is left after both is less than one.
    quotient = (x.to(gl.float32) * portion).to(gl.int32)
    quotient += ((x - quotient * y).to(gl.float32) * portion).to(gl.int32)
    rest = x - quotient * y
    more = (rest >= y).to(gl.int32)
    return quotient + more, rest - more * y


@gluon.jit
def _balanced_share(p, lane, length, portion, CHUNK: gl.constexpr, CHUNKS: gl.constexpr):
    # Every warp holds a whole chunk of requests, so that scan and sums stay in registers and shuffles. CHUNKS is False
    # where one chunk covers the batch; otherwise a first loop adds up the tiles, a second one finds the chunk.
    tiles = _tiles(p, length) * p.GROUPS
    added = tiles
    if CHUNKS:
        for first in range(CHUNK, p.batch_size, CHUNK):
            other = _lengths(p, first + lane, first + lane < p.batch_size)
            added += _tiles(p, other) * p.GROUPS
    total = gl.sum(added, 0)
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    each, extra = _divided(total, programs, portion)
    start = pid * each + gl.minimum(pid, extra)
    count = each + (pid < extra).to(gl.int32)
    request = 0
    if CHUNKS:
        here = gl.sum(tiles, 0)
        while (here <= start) & (request + CHUNK < p.batch_size):
            start -= here
            request += CHUNK
            length = _lengths(p, request + lane, request + lane < p.batch_size)
            tiles = _tiles(p, length) * p.GROUPS
            here = gl.sum(tiles, 0)
    passed = gl.associative_scan(tiles, 0, _plus) <= start
    skipped = gl.sum(passed.to(gl.int32), 0)
    tile = start - gl.sum(gl.where(passed, tiles, 0), 0)
    own_length = gl.sum(gl.where(lane == skipped, length, 0), 0)
    group = 0
    if p.GROUPS > 1:
        own_tiles = gl.maximum(_tiles(p, own_length), 1)
        group, tile = _divided(tile, own_tiles, (1.0 - 2.0**-22) / own_tiles.to(gl.float32))
    return Share(request + skipped, gl.to_tensor(group), tile, count, own_length)


@gluon.jit
def _even_share(p, request, group, split, split_kv, length, portion):
    tiles = _tiles(p, length)
    each, extra = _divided(tiles, split_kv, portion)
    first = split * each + gl.minimum(split, extra)
    return Share(request, group, first, each + (split < extra).to(gl.int32), length)


@gluon.jit
def _following_length(p, request):
    # Loaded a segment ahead: its latency hides behind the segment's tiles.
    return _lengths(p, gl.minimum(request + 1, p.batch_size - 1), True)
