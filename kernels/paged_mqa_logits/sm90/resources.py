"""Registers and shared memory of the Hopper kernel, and what is compiled because of them. No torch, no triton."""

from __future__ import annotations

import itertools

from tilewise.kernels.paged_mqa_logits.sm90.pieces import (
    TILE_KV,
    first_token,
    group_sizes,
    product_count,
    weights_pitch,
)
from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Config, Shape, cdiv

# A consumer's registers by their number; the compiler gives the producer 24 and counts it as four warps.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
REGISTERS_PER_SM = 1 << 16


def own_tokens(config: Config) -> int:
    """Query tokens of the consumer that has most."""
    return max(_parts(config))


def most_products(config: Config) -> int:
    """Products a tile takes in the consumer that needs most."""
    return max(product_count(tokens, config.dot_n) for tokens in _parts(config))


def q_tokens(shape: Shape, config: Config) -> int:
    """Query tokens that a q buffer has room for: those of a group, rounded up to the largest piece."""
    largest = max(group_sizes(shape.next_n, config.fuse_n, config.dot_n, config.token_split))
    return cdiv(config.fuse_n, largest) * largest


def _parts(config: Config) -> list[int]:
    split = config.token_split
    starts = [first_token(config.fuse_n, config.dot_n, split, part) for part in range(split + 1)]
    return [end - start for start, end in itertools.pairwise(starts)]


def in_flight(shape: Shape, config: Config) -> int:
    """Products of one tile that are issued ahead: two where the registers hold them and the weights, else one."""
    if most_products(config) == 1:
        return 1
    return 2 if _registers(shape, config, 2) + _weight_registers(shape, config) <= registers_per_thread(config) else 1


def keeps_weights(shape: Shape, config: Config) -> bool:
    """Whether the weights stay in registers from tile to tile."""
    needed = _registers(shape, config, in_flight(shape, config)) + _weight_registers(shape, config)
    return needed <= registers_per_thread(config)


def max_even(shape: Shape, config: Config) -> bool:
    """Whether the relu of even columns is a maximum: faster where no second product of a tile runs beside it."""
    return most_products(config) == 1 and keeps_weights(shape, config)


def registers_per_thread(config: Config) -> int:
    """What a consumer's thread may use."""
    if config.ctas_per_sm == 1:
        return CONSUMER_REGISTERS[config.consumers]
    return kernel_registers(config) or 0


def kernel_registers(config: Config) -> int | None:
    """Registers a thread that the whole kernel is compiled for, so that ctas_per_sm workgroups fit; None leaves it."""
    if config.ctas_per_sm == 1:
        return None
    threads = 128 * (config.consumers + 1) * config.ctas_per_sm
    return REGISTERS_PER_SM // threads // 8 * 8


def estimated_registers(shape: Shape, config: Config) -> int:
    """Registers that a consumer's thread needs at least, about."""
    return _registers(shape, config, in_flight(shape, config))


def _registers(shape: Shape, config: Config, ahead: int) -> int:
    # Fitted to compiled kernels: the accumulators in flight, and what addresses, shared memory descriptors (a few for
    # each product) and loop state take.
    return ahead * config.dot_n * shape.heads // 2 + 26 + 6 * most_products(config)


def _weight_registers(shape: Shape, config: Config) -> int:
    return own_tokens(config) * shape.heads // 4


def shared_memory_bytes(shape: Shape, config: Config) -> int:
    """Shared memory of a workgroup, or a little more: query tokens, the ring of K tiles, scratch."""
    each = shape.heads * shape.head_dim + weights_pitch(shape.heads) * SCALE_BYTES
    ring = config.num_stages * (TILE_KV * (shape.head_dim + 2 * SCALE_BYTES) + 16)
    return 2 * q_tokens(shape, config) * each + ring + config.consumers * 2176
