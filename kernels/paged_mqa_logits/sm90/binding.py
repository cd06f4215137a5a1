"""A compiled kernel bound to Triton's driver: launches from plain numbers, on the releases 3.6 to 3.9."""

from __future__ import annotations

import importlib
from typing import Any

import triton


class Launch:
    """A compiled kernel, ready to be called with addresses.

    Triton's own launcher encodes every TMA descriptor anew in each call; here `encode` is apart, for the caller to keep
    what it returns.
    """

    def __init__(self, kernel: Any, absent: int) -> None:
        """`absent` arguments in front of the kernel's constants are None."""
        kernel._init_handles()
        runner = kernel.run
        utils = triton.runtime.driver.active.utils
        self._encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        to_host = importlib.import_module("triton.backends.nvidia.driver").TMA_DTYPE_DEVICE_TO_HOST
        self._boxes = [
            (box["swizzle"], box["elem_size"], to_host[box["elem_type"]], box["block_size"])
            for box in kernel.metadata.tensordesc_meta
        ]
        constants = sum(type_ == "constexpr" for type_ in kernel.src.signature.values())
        self._constants = [None] * (constants - absent)
        front = (kernel.function, runner.launch_cooperative_grid, runner.launch_pdl)
        if hasattr(runner, "kernel_signature"):  # from 3.7 on, one launcher serves all signatures
            self._launch = utils.launch
            self._front = (*front, kernel.packed_metadata, None, None, None, None, None)
            self._shared: tuple[Any, ...] = (runner.arg_annotations, runner.kernel_signature)
        else:  # 3.6 compiles a launcher for each signature and wraps it
            wrapper = runner.launch
            self._launch = wrapper.__closure__[wrapper.__code__.co_freevars.index("launcher")].cell_contents
            self._front = (*front, None, None, kernel.packed_metadata, None, None, None)
            self._shared = ()

    def encode(self, index: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[Any]:
        """The kernel's arguments for one descriptor; strides in elements, the last one 1. About a microsecond."""
        encoded = self._encode(address, *self._boxes[index], list(shape), list(strides), 0)
        return [encoded, *shape, *strides]

    def __call__(self, grid: int, stream: int, arguments: list[Any]) -> None:
        """Launch `grid` workgroups; `arguments` are descriptors' parts, addresses and numbers in the kernel's order."""
        arguments += self._constants
        if self._shared:
            self._launch(grid, 1, 1, stream, *self._front, *self._shared, arguments)
        else:
            self._launch(grid, 1, 1, stream, *self._front, *arguments)


def stream_reader() -> Any:
    """A function from a device's index to the handle of the stream that torch is using there."""
    return triton.runtime.driver.active.get_current_stream
