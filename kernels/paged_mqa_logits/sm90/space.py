"""What the Hopper kernel accepts and offers, and the resources that a config comes to. No torch, no triton."""

from __future__ import annotations

import itertools

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.sm90.pieces import (
    QUAD,
    TILE_KV,
    first_token,
    group_sizes,
    product_count,
    weights_pitch,
)
from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Config, Shape, cdiv

READS = frozenset(
    (
        "kernel", "fuse_n", "dot_n", "tile_kv", "split_kv", "num_stages", "schedule", "epilogue", "consumers",
        "token_split", "ctas_per_sm",
    )
)  # fmt: skip

# relu(x) as x + |x|, or half of the columns so and half as max(x, 0), on another pipe.
EPILOGUES = ("add", "mix")
# A consumer's registers by their number; the compiler gives the producer 24 and counts it as four warps.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
REGISTERS_PER_SM = 1 << 16
MAX_COLUMNS = 256  # of one product


def runs_on(arch: Arch) -> bool:
    """Hopper only: later GPUs have no warpgroup products."""
    return arch.isa == "sm90"


def why_invalid(shape: Shape, config: Config, arch: Arch) -> str | None:
    """Why the Hopper kernel cannot launch this, or None."""
    if shape.cache_layout != "flat":
        return f"the Hopper kernel reads flat pages only, got cache_layout {shape.cache_layout!r}"
    if shape.block_kv < 32:
        return (
            "the Hopper kernel needs pages of at least 32 tokens, got block_kv "
            f"{shape.block_kv}: the scales of fewer are less than the 128 bytes that a TMA box must start at"
        )
    if shape.heads < 16:
        return f"the Hopper kernel needs at least 16 heads, got {shape.heads}"
    if config.tile_kv != TILE_KV:
        return f"tile_kv must be {TILE_KV}, got {config.tile_kv}"
    if config.num_warps != 4:
        return f"num_warps must be 4, a warpgroup, got {config.num_warps}"
    if config.epilogue not in EPILOGUES:
        return f"epilogue must be one of {', '.join(EPILOGUES)}, got {config.epilogue!r}"
    if not 1 <= config.consumers <= 4:
        return f"consumers must be 1 to 4, got {config.consumers}"
    if config.token_split < 1 or config.consumers % config.token_split:
        return f"token_split must divide consumers ({config.consumers}), got {config.token_split}"
    products = cdiv(shape.next_n % config.fuse_n or config.fuse_n, config.dot_n)
    if config.token_split > products:
        return f"token_split must be at most {products}, the products of the smallest group, got {config.token_split}"
    sets = config.consumers // config.token_split
    if config.num_stages < 2 or config.num_stages % sets:
        return (
            f"num_stages must be a multiple of consumers / token_split ({sets}), and at least 2, got "
            f"{config.num_stages}"
        )
    if config.dot_n > QUAD:
        return f"dot_n must be at most {QUAD}, got {config.dot_n}"
    if config.dot_n * shape.heads > MAX_COLUMNS:
        return f"dot_n x heads must be at most {MAX_COLUMNS}, got {config.dot_n * shape.heads}"
    if config.schedule == "balanced" and config.split_kv != 1:
        return f"split_kv must be 1 where the schedule is balanced, got {config.split_kv}"
    if not 1 <= config.ctas_per_sm <= 4:
        return f"ctas_per_sm must be 1 to 4, got {config.ctas_per_sm}"
    needed = estimated_registers(shape, config)
    limit = registers_per_thread(config)
    if needed > limit:
        return f"needs about {needed} registers a thread, {limit} are left with these consumers and ctas_per_sm"
    used = shared_memory_bytes(shape, config) * config.ctas_per_sm
    if used > arch.shared_memory_bytes:
        return f"needs about {used} bytes of shared memory, {arch.name} has {arch.shared_memory_bytes}"
    return None


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
    ring = config.num_stages * (TILE_KV * (shape.head_dim + SCALE_BYTES) + 16)
    return 2 * q_tokens(shape, config) * each + ring + config.consumers * 2176


def candidates(shape: Shape, arch: Arch) -> list[Config]:
    """The grid that is measured and chosen from, before `is_valid`."""
    found = []
    small = shape.context_tokens <= 65536  # about what one workgroup a multiprocessor has read when it has started
    for fuse_n in dict.fromkeys((shape.next_n, cdiv(shape.next_n, 2), 1)):
        whole = fuse_n == shape.next_n
        dots = [dot for dot in (4, 2, 1) if dot <= fuse_n and dot * shape.heads <= 128][:2]
        for dot_n in dots:
            # (consumers, token_split, num_stages)
            structures = [(2, 1, 6 if small else 8), (3, 1, 9)]
            if whole:
                structures += [(2, 2, 8), (3, 3, 8)]
            for consumers, token_split, num_stages in structures:
                if token_split > 1 and token_split > cdiv(fuse_n, dot_n):
                    continue  # a consumer would have no product of its own
                for epilogue in EPILOGUES:
                    found.append(_config(fuse_n, dot_n, consumers, token_split, num_stages, epilogue))
        if fuse_n == 1:
            found += [_config(1, 1, 1, 1, 4, epilogue, ctas_per_sm=3) for epilogue in EPILOGUES]
        if small:  # no count over the batch: a shorter start
            for per_sm in (1, 2):
                parts = max(1, shape.batch_size) * cdiv(shape.next_n, fuse_n)
                tiles = cdiv(shape.max_context_len, TILE_KV)
                split_kv = max(1, min(per_sm * arch.compute_units // parts, tiles))
                found.append(_config(fuse_n, dots[0], 2, 1, 6, "add", split_kv=split_kv))
                found.append(_config(fuse_n, dots[0], 1, 1, 4, "add", split_kv=split_kv))
    return found


def default_config(shape: Shape, arch: Arch) -> Config | None:
    """The first that fits of a few structures, the ones best for large batches first."""
    dot_n = max(dot for dot in (2, 1) if dot == 1 or (dot <= shape.next_n and dot * shape.heads <= 128))
    if shape.next_n == 1 and shape.heads <= 64:
        return _config(1, 1, 1, 1, 4, "add", ctas_per_sm=3)
    whole = shape.next_n * shape.heads % (3 * dot_n * shape.heads) == 0  # three equal parts
    structures = [(3, 3, 8)] if whole and shape.next_n >= 3 and shape.heads >= 64 else []
    structures += [(3, 1, 9)] if shape.next_n * shape.heads <= 192 else []
    structures += [(2, 2, 8)] if shape.next_n * shape.heads > 384 else []
    for consumers, token_split, num_stages in (*structures, (2, 1, 8), (2, 1, 4)):
        config = _config(shape.next_n, dot_n, consumers, token_split, num_stages, "mix")
        if why_invalid(shape, config, arch) is None:
            return config
    return _config(1, 1, 2, 1, 4, "add")


def _config(
    fuse_n: int, dot_n: int, consumers: int, token_split: int, num_stages: int, epilogue: str, *,
    split_kv: int = 0, ctas_per_sm: int = 1,
) -> Config:  # fmt: skip
    return Config(
        kernel="sm90", fuse_n=fuse_n, dot_n=dot_n, tile_kv=TILE_KV, num_warps=4, num_stages=num_stages,
        epilogue=epilogue, consumers=consumers, token_split=token_split, ctas_per_sm=ctas_per_sm,
        schedule="even" if split_kv else "balanced", split_kv=split_kv or 1,
    )  # fmt: skip
