"""How query tokens are cut up. Plain Python: the space reads it, and the kernel evaluates it while compiling.

The functions don't call each other, because Gluon follows every function that a compile-time one refers to.
"""

from __future__ import annotations

# A warpgroup product has 64 rows: cached tokens. Its columns are heads x query tokens.
TILE_KV = 64
# Query tokens that are stored at a time: the four lanes of a quad keep one each.
STORE_N = 4


def first_token(tokens: int, dot_n: int, token_split: int, part: int) -> int:
    """First query token of one of `token_split` nearly equal parts of `tokens`, at a multiple of dot_n."""
    return min(tokens, part * -(-tokens // dot_n) // token_split * dot_n)


def piece_count(tokens: int, dot_n: int) -> int:
    """Products that `tokens` query tokens take: full ones of dot_n, and the rest in powers of two."""
    return tokens // dot_n + bin(tokens % dot_n).count("1")


def piece_start(tokens: int, dot_n: int, index: int) -> int:
    """Query tokens before a product: 7 tokens with dot_n 4 are products of 4, 2 and 1."""
    full = tokens // dot_n
    if index <= full:
        return index * dot_n
    start = full * dot_n
    for _ in range(index - full):
        start += 1 << ((tokens - start).bit_length() - 1)
    return start


def piece_tokens(tokens: int, dot_n: int, index: int) -> int:
    """Query tokens of one product."""
    full = tokens // dot_n
    if index < full:
        return dot_n
    rest = tokens % dot_n
    for _ in range(index - full):
        rest -= 1 << (rest.bit_length() - 1)
    return 1 << (rest.bit_length() - 1)


def weights_pitch(heads: int) -> int:
    """Weights from one query token to the next in shared memory: TMA writes to multiples of 128 bytes only."""
    return max(heads, 32)
