"""From a shape and a config to a compiled kernel. Needs triton, but no GPU."""

from __future__ import annotations

from typing import Any

from tilewise.kernels.paged_mqa_logits.sm90 import compat, resources
from tilewise.kernels.paged_mqa_logits.sm90.kernels import _paged_mqa_logits_kernel
from tilewise.kernels.paged_mqa_logits.sm90.pieces import group_sizes, weights_pitch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape

# Requests that one step of the device-side schedule counts; the smallest that covers the batch, or the largest.
CHUNKS = (64, 256, 1024)
# Sizes of pieces of query tokens that have a descriptor each, in the kernel's order; None where none has this size.
Q_DESCRIPTORS = (4, 2, 1)

ARGUMENTS = {
    "block_tables": "*i32",
    "lens": "*i32",
    "out": "*fp32",
    "batch_size": "i32",
    "max_columns": "i32",
    "split_kv": "i32",
    "portion": "fp32",
    "table_stride": "i64",
    "lens_stride": "i32",
    "weights_stride": "i32",
    "out_stride": "i64",
}


def chunk(batch_size: int) -> int:
    """A batch size that stands for all that share a binary with this one."""
    return next((size for size in CHUNKS if size >= batch_size), CHUNKS[-1] + 1)


def constants(shape: Shape, config: Config, lens_2d: bool) -> dict[str, Any]:
    """The kernel's constexprs: equal constants (and options) are one binary."""
    balanced = config.schedule == "balanced"
    covered = chunk(shape.batch_size)
    return {
        "NEXT_N": shape.next_n,
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_KV": shape.block_kv,
        "FUSE_N": config.fuse_n,
        "DOT_N": config.dot_n,
        "IN_FLIGHT": resources.in_flight(shape, config),
        "STAGES": config.num_stages,
        "CONSUMERS": config.consumers,
        "TOKEN_SPLIT": config.token_split,
        "KEEP_WEIGHTS": resources.keeps_weights(shape, config),
        "MAX_EVEN": resources.max_even(shape, config),
        "BALANCED": balanced,
        "LENS_2D": lens_2d and shape.next_n > 1,
        "CHUNK": min(covered, CHUNKS[-1]) if balanced else 32,
        "CHUNKS": balanced and covered > CHUNKS[-1],
        "Q_TOKENS": resources.q_tokens(shape, config),
        "CONSUMER_REGISTERS": resources.CONSUMER_REGISTERS[config.consumers],
    }


def options(config: Config) -> dict[str, Any]:
    """Options of the compiler."""
    registers = resources.kernel_registers(config)
    return {"num_warps": 4} if registers is None else {"num_warps": 4, "maxnreg": registers}


def boxes(shape: Shape, config: Config) -> dict[str, tuple[str, list[int]]]:
    """Element type and box of each TMA descriptor, in the order of the kernel's arguments.

    One for query tokens in pieces of each size that occurs: of every 8 rows of a box, 8 / size heads of each token.
    """
    rows = min(64, shape.block_kv)
    found: dict[str, tuple[str, list[int]]] = {
        "k_desc": ("fp8e4nv", [1, rows, shape.head_dim]),
        "scale_desc": ("fp32", [1, rows]),
    }
    for size in group_sizes(shape.next_n, config.fuse_n, config.dot_n, config.token_split):
        box = [1, shape.heads * size // 8, size, 8 // size, shape.head_dim]
        found[f"q{size}_desc"] = ("fp8e4nv", box)
    found["weights_desc"] = ("fp32", [weights_pitch(shape.heads)])
    return found


def compile_kernel(shape: Shape, config: Config, lens_2d: bool, target: Any = None) -> Any:
    """The kernel for this shape, config and kind of lengths, compiled for `target` or else for the current GPU."""
    types = {name: compat.descriptor_type(*box) for name, box in boxes(shape, config).items()} | ARGUMENTS
    absent = {f"q{size}_desc": None for size in Q_DESCRIPTORS if f"q{size}_desc" not in types}
    return compat.compile_kernel(
        _paged_mqa_logits_kernel, types, constants(shape, config, lens_2d) | absent, options(config), target
    )
