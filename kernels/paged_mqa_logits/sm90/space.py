"""What the Hopper kernel accepts and offers, and the resources that a config comes to. No torch, no triton."""

from __future__ import annotations

from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.sm90.pieces import STORE_N, TILE_KV, first_token, piece_count
from tilewise.kernels.paged_mqa_logits.spec import SCALE_BYTES, Config, Shape, cdiv

READS = frozenset(
    ("kernel", "fuse_n", "dot_n", "split_kv", "num_stages", "schedule", "epilogue", "consumers", "token_split",
     "ctas_per_sm")
)  # fmt: skip

EPILOGUES = ("add", "mix", "bf16", "tf32")
SECOND_PRODUCTS = ("bf16", "tf32")  # sum over heads as another matrix product, at less than fp32 precision
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
    if config.token_split > smallest_group(shape, config):
        return f"token_split must be at most {smallest_group(shape, config)}, the smallest group, got {config.token_split}"
    sets = config.consumers // config.token_split
    if config.num_stages < 2 or config.num_stages % sets:
        return f"num_stages must be a multiple of consumers / token_split ({sets}) from 2, got {config.num_stages}"
    if config.dot_n > STORE_N:
        return f"dot_n must be at most {STORE_N}, got {config.dot_n}"
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


def smallest_group(shape: Shape, config: Config) -> int:
    """Query tokens of the last group of a request."""
    return shape.next_n % config.fuse_n or config.fuse_n


def own_tokens(config: Config) -> int:
    """Query tokens of the consumer that has most."""
    split = config.token_split
    return max(first_token(config.fuse_n, split, i + 1) - first_token(config.fuse_n, split, i) for i in range(split))


def most_pieces(config: Config) -> int:
    """Products a tile takes in the consumer that needs most."""
    starts = [first_token(config.fuse_n, config.token_split, i) for i in range(config.token_split + 1)]
    return max(piece_count(b - a, config.dot_n) for a, b in zip(starts, starts[1:], strict=False))


def in_flight(shape: Shape, config: Config) -> int:
    """Products of one tile that are issued ahead: two where the registers hold both accumulators."""
    return 2 if most_pieces(config) > 1 and _registers(shape, config, 2) <= registers_per_thread(config) else 1


def keeps_weights(shape: Shape, config: Config) -> bool:
    """Whether the weights stay in registers from tile to tile."""
    if config.epilogue in SECOND_PRODUCTS:
        return False
    columns = own_tokens(config) * shape.heads
    return _base_registers(shape, config, in_flight(shape, config)) + columns // 4 <= registers_per_thread(config)


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


def _base_registers(shape: Shape, config: Config, ahead: int) -> int:
    # Accumulators, and what addresses, sums and loop state were seen to take.
    return ahead * config.dot_n * shape.heads // 2 + 32


def _registers(shape: Shape, config: Config, ahead: int) -> int:
    return _base_registers(shape, config, ahead)


def estimated_registers(shape: Shape, config: Config) -> int:
    """Registers that a consumer's thread needs at least, about."""
    return _base_registers(shape, config, in_flight(shape, config))


def second_slots(config: Config) -> int:
    """Weight tiles of the second product that a consumer keeps; one idle one for the other epilogues."""
    return most_pieces(config) if config.epilogue in SECOND_PRODUCTS else 1


def shared_memory_bytes(shape: Shape, config: Config) -> int:
    """Shared memory of a workgroup: two sets of query tokens, the ring of K tiles, weight tiles, barriers."""
    tokens = 2 * config.fuse_n * shape.heads * (shape.head_dim + SCALE_BYTES)
    ring = config.num_stages * TILE_KV * (shape.head_dim + SCALE_BYTES)
    element = 4 if config.epilogue == "tf32" else 2
    second = config.consumers * second_slots(config) * 8 * config.dot_n * shape.heads * element
    return tokens + ring + second + 16 * config.num_stages + 1024
