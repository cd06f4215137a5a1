"""Names of Gluon that differ between the releases 3.6 to 3.9, in one place."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.8 renamed the copy and kept the old name; 3.9 dropped it.
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

if hasattr(gluon, "aggregate"):  # from 3.9 on
    aggregate: Any = gluon.aggregate
else:
    from triton.language import core

    aggregate = core._aggregate

constexpr_function: Any = gluon.constexpr_function
# A shared memory descriptor seen with another type, shape and layout; public from 3.9 on.
reinterpret: Any = getattr(gl.shared_memory_descriptor, "_reinterpret", None) or gl.shared_memory_descriptor.reinterpret

PROPAGATE_NAN: Any = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def prefetch(pointers, asks):  # type: ignore[no-untyped-def]
    """Ask for the lines of two addresses, of threads 0 and 1, in the L2 cache, where `asks` is 1. Returns at once.

    Hundreds of threads that ask for one line would keep the cache busy for 1 us.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred asks; .reg .b32 thread, most; mov.u32 thread, %tid.x; shl.b32 most, $2, 1; "
        "setp.lt.u32 asks, thread, most; @asks prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [pointers, asks], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def zero_from_here():  # type: ignore[no-untyped-def]
    """0, as the top bit of a clock: what it is added to is used after this line.

    ptxas would begin with what needs a load right after the load, and all that stands between would wait with it.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b64 clock; .reg .b32 low, high; mov.u64 clock, %clock64; mov.b64 {low, high}, clock; "
        "shr.u32 $0, high, 31; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


_DTYPES = {"fp8e4nv": gl.float8e4nv, "fp32": gl.float32}


def box_layout(dtype: str, box: list[int]) -> Any:
    """Shared memory layout of a TMA box: swizzled where its rows are wide enough."""
    return gl.NVMMASharedLayout.get_default_for(box, _DTYPES[dtype])


def descriptor_type(dtype: str, box: list[int]) -> str:
    """Triton's name for the type of a descriptor argument."""
    return f"tensordesc<{dtype}[{', '.join(map(str, box))}],{box_layout(dtype, box)!r}>"


def compile_kernel(
    fn: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any], target: Any = None
) -> Any:
    """Compile a Gluon function whose arguments have these types, everything else being constant."""
    signature = {name: types.get(name, "constexpr") for name in fn.arg_names}
    source = GluonASTSource(fn=fn, signature=signature, constexprs=constants, attrs={})
    return triton.compile(source, target=target, options=options)
