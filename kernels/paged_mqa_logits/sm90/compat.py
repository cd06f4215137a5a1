"""Names of Gluon and of Triton's driver that differ between the releases 3.6 to 3.9, in one place."""

from __future__ import annotations

import importlib
from typing import Any

import triton
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
# Renamed in 3.7.
workgroup_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier

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


class Launch:
    """A compiled kernel, ready to be called with addresses.

    Triton's own launcher encodes every TMA descriptor anew in each call. Here an encoded descriptor is kept for each
    address and geometry seen, so that only tensors that moved cost an encoding, about a microsecond each.
    """

    KEPT = 512  # descriptors; the caches of a serving process are a few, its activations recur

    def __init__(self, kernel: Any, absent: int) -> None:
        """`absent` arguments in front of the kernel's constants are None."""
        kernel._init_handles()
        self._function = kernel.function
        self._metadata = kernel.packed_metadata
        runner = kernel.run
        utils = triton.runtime.driver.active.utils
        self._encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        to_host = importlib.import_module("triton.backends.nvidia.driver").TMA_DTYPE_DEVICE_TO_HOST
        self._boxes = [
            (box["swizzle"], box["elem_size"], to_host[box["elem_type"]], box["block_size"])
            for box in kernel.metadata.tensordesc_meta
        ]
        self._kept: dict[tuple[Any, ...], list[Any]] = {}
        self._flags = (runner.launch_cooperative_grid, runner.launch_pdl)
        constants = sum(type_ == "constexpr" for type_ in kernel.src.signature.values())
        self._constants = [None] * (constants - absent)
        if hasattr(runner, "kernel_signature"):  # from 3.7 on, one launcher serves all signatures
            self._launch = utils.launch
            self._shared = (runner.arg_annotations, runner.kernel_signature)
        else:  # 3.6 compiles a launcher for each signature and wraps it
            wrapper = runner.launch
            self._launch = wrapper.__closure__[wrapper.__code__.co_freevars.index("launcher")].cell_contents
            self._shared = ()

    def descriptor(self, index: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[Any]:
        """The kernel's arguments for one descriptor; strides in elements, the last one 1."""
        key = (index, address, shape, strides)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= self.KEPT:
                self._kept.clear()
            encoded = self._encode(address, *self._boxes[index], list(shape), list(strides), 0)
            found = self._kept[key] = [encoded, *shape, *strides]
        return found

    def __call__(self, grid: int, stream: int, arguments: list[Any]) -> None:
        """Launch `grid` workgroups; `arguments` are descriptors' parts, addresses and numbers in the kernel's order."""
        arguments = arguments + self._constants
        if self._shared:
            self._launch(
                grid, 1, 1, stream, self._function, *self._flags, self._metadata, None, None, None, None, None,
                *self._shared, arguments,
            )  # fmt: skip
        else:
            self._launch(
                grid, 1, 1, stream, self._function, *self._flags, None, None, self._metadata, None, None, None,
                *arguments,
            )  # fmt: skip


def current_stream(device_index: int) -> int:
    """Handle of the stream that torch is using on a device."""
    return int(triton.runtime.driver.active.get_current_stream(device_index))
