"""Which binary a launch needs, and compiling it on a machine without the GPU. Needs triton, not torch."""

from __future__ import annotations

import functools
import re
from typing import Any

from tilewise.kernels.paged_mqa_logits.spec import Config, Shape

# Kernel arguments and their types, in order: the types that Triton gives to the launcher's numbers, which all stay
# under 2**31. The kernel widens them before it multiplies.
SIGNATURE = {
    "q_ptr": "*fp8e4nv",
    "kv_ptr": "*fp8e4nv",
    "scale_ptr": "*fp32",
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "weights_ptr": "*fp32",
    "out_ptr": "*fp32",
    "programs": "i32",
    "next_n": "i32",
    "split_kv": "i32",
    "columns": "i32",
    "q_batch_units": "i32",
    "q_token_units": "i32",
    "page_units": "i32",
    "table_stride": "i32",
    "lens_stride": "i32",
    "weights_stride": "i32",
    "out_stride": "i32",
}
# The launcher refuses queries and pages that do not start at a multiple of 16 bytes; the compiler counts on it.
_ALIGNED = ("q_ptr", "kv_ptr")


def page_unit_bytes(block_kv: int) -> int:
    """The unit of the kernel's page stride: what every page stride is a multiple of."""
    return 16 if block_kv % 4 == 0 else 4


def constexprs(shape: Shape, config: Config, lens_2d: bool) -> dict[str, int | bool | str]:
    """The kernel's compile-time arguments; with warps and waves_per_eu, all that decides which binary runs."""
    rows, _, depth = config.mfma.split("x")
    return {
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_KV": shape.block_kv,
        "PRESHUFFLED": shape.cache_layout == "preshuffled",
        "LENS_2D": lens_2d,
        "FUSE_N": config.fuse_n,
        "TILE_KV": config.tile_kv,
        "NUM_WARPS": config.num_warps,
        "MN": int(rows),
        "MFMA_K": int(depth),
        "EPILOGUE": config.epilogue,
        "XCD_ORDER": config.program_order == "xcd",
    }


def options(config: Config) -> dict[str, int]:
    """Compiler options of a config."""
    return {"num_warps": config.num_warps, "waves_per_eu": config.waves_per_eu}


def compile_for(shape: Shape, config: Config, lens_2d: bool = False) -> Any:
    """The compiled kernel (`.asm["amdgcn"]`, `.asm["hsaco"]`), made by the installed Triton without a GPU.

    Raises whatever Triton raises where it cannot compile it.
    """
    return _compile(tuple(constexprs(shape, config, lens_2d).items()), tuple(options(config).items()))


@functools.lru_cache(maxsize=512)
def _compile(constants: tuple[tuple[str, Any], ...], compiler_options: tuple[tuple[str, int], ...]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewise.kernels.paged_mqa_logits.gfx950.kernels import _paged_mqa_logits_kernel

    aligned = {(list(SIGNATURE).index(name),): [["tt.divisibility", 16]] for name in _ALIGNED}
    source = GluonASTSource(
        fn=_paged_mqa_logits_kernel,
        signature={**SIGNATURE, **{name: "constexpr" for name, _ in constants}},
        constexprs=dict(constants),
        attrs=aligned,
    )
    return triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options=dict(compiler_options))


def triton_version() -> str | None:
    """The installed Triton's version without build suffix, or None where there is none."""
    try:
        import triton
    except ImportError:
        return None
    match = re.match(r"\d+\.\d+\.\d+", triton.__version__)
    return match.group() if match else str(triton.__version__)
