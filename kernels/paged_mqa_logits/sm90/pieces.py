"""How query tokens are cut up. Plain Python: the space reads it, and the kernel evaluates it while compiling.

A consumer's query tokens are scored in pieces of 4, 2 or 1, and a piece in one or more products. The functions don't
call each other, because Gluon follows every function that a compile-time one refers to.
"""

from __future__ import annotations

# A warpgroup product has 64 rows: cached tokens. Its columns are heads x query tokens.
TILE_KV = 64
# Query tokens of the largest piece: the four lanes of a quad sum one each.
QUAD = 4


def first_token(tokens: int, dot_n: int, token_split: int, part: int) -> int:
    """First query token of one of `token_split` nearly equal parts of `tokens`, at a multiple of dot_n."""
    return min(tokens, part * -(-tokens // dot_n) // token_split * dot_n)


def piece_count(tokens: int) -> int:
    """Pieces of `tokens` query tokens: 7 tokens are pieces of 4, 2 and 1."""
    return tokens // 4 + bin(tokens % 4).count("1")


def piece_tokens(tokens: int, index: int) -> int:
    """Query tokens of a piece."""
    return ([4] * (tokens // 4) + [size for size in (2, 1) if tokens % 4 & size])[index]


def piece_start(tokens: int, index: int) -> int:
    """Query tokens before a piece."""
    return sum(([4] * (tokens // 4) + [size for size in (2, 1) if tokens % 4 & size])[:index])


def product_count(tokens: int, dot_n: int) -> int:
    """Products of `tokens` query tokens, each dot_n x heads columns wide, or narrower where its piece is."""
    sizes = [4] * (tokens // 4) + [size for size in (2, 1) if tokens % 4 & size]
    return sum(max(1, size // dot_n) for size in sizes)


def product_piece(tokens: int, dot_n: int, index: int) -> int:
    """The piece that a product belongs to."""
    sizes = [4] * (tokens // 4) + [size for size in (2, 1) if tokens % 4 & size]
    return [piece for piece, size in enumerate(sizes) for _ in range(max(1, size // dot_n))][index]


def product_part(tokens: int, dot_n: int, index: int) -> int:
    """Which of its piece's products a product is: each takes a run of heads, of all the piece's tokens."""
    sizes = [4] * (tokens // 4) + [size for size in (2, 1) if tokens % 4 & size]
    return [part for size in sizes for part in range(max(1, size // dot_n))][index]


def part_pieces(tokens: int, dot_n: int, token_split: int, part: int) -> int:
    """Pieces of one part of `tokens` query tokens."""
    first, last = (min(tokens, p * -(-tokens // dot_n) // token_split * dot_n) for p in (part, part + 1))
    return (last - first) // 4 + bin((last - first) % 4).count("1")


def q_position(tokens: int, dot_n: int, token_split: int, part: int, index: int) -> int:
    """Where a piece lies in the shared buffer, in query tokens: large pieces first, so that all are aligned."""
    found = []
    for other in range(token_split):
        first, last = (
            min(tokens, p * -(-tokens // dot_n) // token_split * dot_n) for p in (other, other + 1)
        )  # fmt: skip
        own = last - first
        sizes = [4] * (own // 4) + [size for size in (2, 1) if own % 4 & size]
        found += [(-size, other, piece) for piece, size in enumerate(sizes)]
    found.sort()
    at = 0
    for negated, other, piece in found:
        if (other, piece) == (part, index):
            return at
        at -= negated
    raise IndexError(f"piece {index} of part {part} of {token_split} of {tokens} query tokens")


def group_sizes(next_n: int, fuse_n: int, dot_n: int, token_split: int) -> tuple[int, ...]:
    """Sizes of the pieces that a launch has, largest first."""
    found = set()
    for tokens in {fuse_n, next_n % fuse_n or fuse_n}:
        for part in range(token_split):
            first, last = (
                min(tokens, p * -(-tokens // dot_n) // token_split * dot_n) for p in (part, part + 1)
            )  # fmt: skip
            own = last - first
            found |= {4} if own >= 4 else set()
            found |= {size for size in (2, 1) if own % 4 & size}
    return tuple(sorted(found, reverse=True))


def weights_pitch(heads: int) -> int:
    """Weights from one query token to the next in shared memory: TMA writes to multiples of 128 bytes only."""
    return max(heads, 32)


def weight_registers(tokens: int, heads: int, pitch: int) -> list[list[int]]:
    """Bases of the registers of a thread that holds the weights [tokens x pitch] of its columns of a piece."""
    lanes = {1: (2, 4), 2: (2,), 4: ()}[tokens]
    found = [1 << bit for bit in range(heads.bit_length() - 1) if 1 << bit not in lanes]
    return [[base] for base in found + ([heads] if pitch > heads else [])]


def weight_lanes(tokens: int, pitch: int) -> list[list[int]]:
    """Bases of the lanes, the four of a quad first: each lane has one token of four, or a share of heads of fewer."""
    quad = {1: [2, 4], 2: [2, pitch], 4: [pitch, 2 * pitch]}[tokens]
    return [[base] for base in [*quad, 0, 0, 0]]
