"""Runs the source of the Hopper kernel on the CPU: Gluon's operations in PyTorch, partitions as threads.

It tells whether the kernel's arithmetic, indices, masks and barriers are right: barriers have real phases and byte
counts, a wait that nobody ends is an error, and so is any access outside a tensor. A load from shared memory reads when
its value is first used, as late as a device may. It tells nothing about layouts or register allocation; shared memory
is linear, whatever its swizzle.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PATIENCE_S = 20.0
_program = threading.local()


class Value:
    """A tensor, or a scalar as a tensor without dimensions."""

    def __init__(self, data: Any) -> None:
        if isinstance(data, Value):
            data = data.data
        if not isinstance(data, torch.Tensor):
            kind = torch.bool if isinstance(data, bool) else torch.int32 if isinstance(data, int) else torch.float32
            data = torch.tensor(data, dtype=kind)
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout="a layout")

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    __int__ = __index__


class Loaded(Value):
    """What a load from shared memory returns: nothing waits for it before its first use, no arrival does."""

    def __init__(self, source: Shared) -> None:
        self.source = source
        self.read: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        if self.read is None:
            self.read = self.source.tensor.clone()
        return self.read


def _binary(name: str, function: Callable[[Any, Any], Any]) -> None:
    def forward(self: Value, other: Any) -> Any:
        return other.__radd__(self) if isinstance(other, Pointer) else Value(function(self.data, _plain(self, other)))

    def backward(self: Value, other: Any) -> Any:
        return Value(function(_plain(self, other), self.data))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)


def _plain(like: Value, other: Any) -> torch.Tensor:
    if isinstance(other, Value):
        return other.data
    kind = like.data.dtype
    if isinstance(other, float) or kind == torch.bool:
        return Value(other).data
    return torch.tensor(other, dtype=kind)


for _name, _function in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.div,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.fmod,
    "and": torch.bitwise_and,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
}.items():
    _binary(_name, _function)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _binary(_name, getattr(torch, _name))


class Pointer:
    """Addresses within one tensor, in its elements."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory = memory
        self.offset = torch.as_tensor(offset, dtype=torch.int64)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + Value(other).data.to(torch.int64))

    __radd__ = __add__

    def checked(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and mask of one shape; an access outside the tensor is an error."""
        mask = torch.tensor(True) if mask is None else Value(mask).data
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        used = offset[mask]
        if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < self.memory.numel()):
            raise IndexError(f"access to {int(used.min())}..{int(used.max())} of {self.memory.numel()} elements")
        return offset, mask


class Shared:
    """A view of shared memory, dense in row-major order; barriers live at their first byte."""

    def __init__(
        self, memory: torch.Tensor, dtype: torch.dtype, shape: list[int], start: int = 0, barriers: Any = None
    ):
        self.memory, self.dtype, self.shape, self.start = memory, dtype, list(shape), start
        self.barriers: dict[int, Barrier] = {} if barriers is None else barriers
        self.transposed = False

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def tensor(self) -> torch.Tensor:
        raw = self.memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)
        return raw.T if self.transposed else raw

    def index(self, at: Any) -> Shared:
        at = int(at)
        if not 0 <= at < self.shape[0]:
            raise IndexError(f"index {at} of {self.shape}")
        part = Shared(self.memory, self.dtype, self.shape[1:], self.start, self.barriers)
        part.start += at * part.nbytes
        return part

    def permute(self, order: Any) -> Shared:
        turned = Shared(self.memory, self.dtype, self.shape, self.start, self.barriers)
        turned.transposed = True
        return turned

    def load(self, layout: Any) -> Value:
        return Loaded(self)

    def store(self, value: Value) -> None:
        if value.shape != self.shape or value.data.dtype != self.dtype:
            raise TypeError(f"store of {value.shape} {value.data.dtype} to {self.shape} {self.dtype}")
        self.memory[self.start : self.start + self.nbytes] = value.data.contiguous().view(torch.uint8).flatten()


def _reinterpret(view: Shared, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    other = Shared(view.memory, dtype, shape, view.start, view.barriers)
    if other.nbytes != view.nbytes:
        raise TypeError(f"a view of {other.nbytes} bytes onto {view.nbytes}")
    return other


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all promised bytes have come."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.changed = threading.Condition()

    def update(self, arrivals: int, promised: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += promised
            if self.pending < 0:
                raise RuntimeError("more arrivals than the barrier counts")
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != parity, PATIENCE_S):
                raise TimeoutError("a wait that nothing ended")


class Barriers:
    """Gluon's operations on barriers. `pause_s`: how long a partition stops after it has arrived at one."""

    MBarrierLayout = staticmethod(lambda: None)

    def init(self, at: Shared, count: int) -> None:
        at.barriers[at.start] = Barrier(count)

    def expect(self, at: Shared, size: int, pred: Any = True) -> None:
        if pred:
            at.barriers[at.start].update(1, int(size))

    pause_s = 0.0

    def arrive(self, at: Shared, count: int = 1) -> None:
        at.barriers[at.start].update(count, 0)
        time.sleep(self.pause_s)

    def wait(self, at: Shared, parity: Any) -> None:
        at.barriers[at.start].wait(int(parity))


class Descriptor:
    """A TMA descriptor: a strided view of some tensor's storage, and the box that a copy takes."""

    layout = None

    def __init__(self, owner: torch.Tensor, address: int, dtype: torch.dtype, dims: Any, strides: Any, box: list[int]):
        whole = torch.empty(0, dtype=torch.uint8).set_(owner.untyped_storage())
        start = address - whole.data_ptr()
        if address % 16 or start < 0:
            raise ValueError(f"a descriptor may not start {start} bytes into its tensor, at address {address}")
        if any(stride * dtype.itemsize % 16 for stride in strides[:-1]):
            raise ValueError(f"strides must be multiples of 16 bytes, got {strides} of {dtype}")
        size = (sum((n - 1) * s for n, s in zip(dims, strides, strict=True)) + 1) * dtype.itemsize
        self.view = whole[start : start + size].view(dtype).as_strided(tuple(dims), tuple(strides))
        self.box = box


def _tma_load(desc: Descriptor, at: Any, barrier: Shared, into: Shared, pred: Any = True) -> None:
    if not pred:
        return
    if into.shape != desc.box:
        raise TypeError(f"a box of {desc.box} into {into.shape}")
    if into.start % 128:
        raise ValueError(f"TMA writes to multiples of 128 bytes of shared memory, not to {into.start}")
    first = [int(x) for x in at]
    box = torch.zeros(desc.box, dtype=desc.view.dtype)  # zero outside the tensor
    inside = tuple(slice(max(f, 0), min(f + n, d)) for f, n, d in zip(first, desc.box, desc.view.shape, strict=True))
    if any(s.start >= s.stop for s in inside):
        raise IndexError(f"a box at {first} lies outside {list(desc.view.shape)}")
    box[tuple(slice(s.start - f, s.stop - f) for s, f in zip(inside, first, strict=True))] = desc.view[inside]
    into.store(Value(box))
    barrier.barriers[barrier.start].update(0, -into.nbytes)


def _mma(a: Any, b: Shared, acc: Value, use_acc: Any = True, is_async: bool = False) -> Value:
    left = a.tensor if isinstance(a, Shared) else a.data
    right = b.tensor
    product = left.double() @ right.double()
    return Value((product + acc.data if use_acc else product).float())


def _warp_specialize(parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    failures: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _load(at: Pointer, mask: Any = None, other: Any = 0) -> Value:
    offset, mask = at.checked(mask)
    found = at.memory[torch.where(mask, offset, 0)] if at.memory.numel() else torch.zeros_like(offset)
    return Value(torch.where(mask, found, torch.tensor(other, dtype=at.memory.dtype)))


def _store(at: Pointer, value: Value, mask: Any = None) -> None:
    offset, mask = at.checked(mask)
    at.memory[offset[mask]] = value.data.expand(offset.shape)[mask]


def _expand_dims(x: Any, axis: int) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.memory, x.offset.unsqueeze(axis))
    return Value(Value(x).data.unsqueeze(axis))


def _sum(x: Value, axis: int) -> Value:
    return Value(x.data.sum(axis, dtype=x.data.dtype))


class _NVMMASharedLayout:
    def __init__(self, *given: Any) -> None:
        pass

    @staticmethod
    def get_default_for(shape: Any, dtype: Any) -> None:
        return None


def _language() -> types.ModuleType:
    gl: Any = types.ModuleType("language")
    both = lambda f: lambda a, b: Value(f(*torch.broadcast_tensors(Value(a).data, Value(b).data)))  # noqa: E731
    functions = {
        "constexpr": lambda x: x,
        "static_range": range,
        "static_assert": lambda good, words: None if good else (_ for _ in ()).throw(AssertionError(words)),
        "program_id": lambda axis: Value(_program.id),
        "num_programs": lambda axis: Value(_program.count),
        "num_warps": lambda: 4,
        "to_tensor": Value,
        "arange": lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
        "zeros": lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype)),
        "minimum": both(torch.minimum),
        "maximum": lambda a, b, propagate_nan=None: both(torch.maximum)(a, b),
        "where": lambda c, a, b: Value(torch.where(c.data, Value(a).data, Value(b).data)),
        "abs": lambda x: Value(x.data.abs()),
        "fma": lambda a, b, c: Value((a.data.double() * b.data.double() + c.data.double()).float()),
        "sum": _sum,
        "associative_scan": lambda x, axis, function: Value(x.data.cumsum(axis, dtype=x.data.dtype)),
        "expand_dims": _expand_dims,
        "reshape": lambda x, shape: Value(x.data.reshape(shape)),
        "permute": lambda x, order: Value(x.data.permute(order)),
        "join": lambda a, b: Value(torch.stack((a.data, b.data), -1)),
        "split": lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])),
        "broadcast": lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.data, b.data))),
        "convert_layout": lambda x, layout: x,
        "load": _load,
        "store": _store,
        "warp_specialize": _warp_specialize,
        # Unwritten shared memory is not zero: bytes 0xff are NaN in every type used here.
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(
            torch.full((torch.Size(shape).numel() * dtype.itemsize,), 255, dtype=torch.uint8), dtype, shape
        ),
        "NVMMASharedLayout": _NVMMASharedLayout,
        "tensor": Value,
        "shared_memory_descriptor": Shared,
        "float8e4nv": torch.float8_e4m3fn,
        "float32": torch.float32,
        "int32": torch.int32,
        "int64": torch.int64,
    }
    for name in (
        "BlockedLayout",
        "SliceLayout",
        "NVMMADistributedLayout",
        "DistributedLinearLayout",
    ):
        functions[name] = lambda *given: None
    for name, function in functions.items():
        setattr(gl, name, function)
    return gl


@contextmanager
def _replaced(modules: dict[str, Any], dropped: list[str]) -> Iterator[None]:
    kept = {name: sys.modules.get(name) for name in [*modules, *dropped]}
    try:
        for name in dropped:
            sys.modules.pop(name, None)
        sys.modules.update(modules)
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def load_kernel() -> Callable[..., None]:
    """The kernel's source, with this module's operations in place of Gluon's."""
    package = "tilewise.kernels.paged_mqa_logits.sm90"
    as_is = lambda function: function  # noqa: E731
    gluon: Any = types.ModuleType("gluon")
    gluon.jit = as_is
    gluon.language = _language()
    hopper: Any = types.ModuleType("hopper")
    hopper.fence_async_shared = lambda: None
    hopper.mbarrier = Barriers()
    hopper.warpgroup_mma = _mma
    hopper.warpgroup_mma_wait = lambda count, deps: deps[0]
    compat: Any = types.ModuleType("compat")
    compat.aggregate = compat.constexpr_function = as_is
    compat.reinterpret = _reinterpret
    compat.tma_load = _tma_load
    compat.PROPAGATE_NAN = True
    compat.prefetch = lambda at, asks: at.checked(None)
    compat.zero_from_here = lambda: 0
    experimental: Any = types.ModuleType("experimental")
    experimental.gluon = gluon
    fakes = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language,
        "triton.experimental.gluon.language.nvidia": types.ModuleType("nvidia"),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        f"{package}.compat": compat,
    }
    own = [f"{package}.{name}" for name in ("state", "schedule", "producer", "epilogue", "kernels")]
    parent = importlib.import_module(package)
    attributes = dict(vars(parent))
    with _replaced(fakes, own):
        kernel = importlib.import_module(f"{package}.kernels")._paged_mqa_logits_kernel
    vars(parent).update(attributes)
    return kernel  # type: ignore[no-any-return]


def run(kernel: Callable[..., None], grid: int, arguments: list[Any], constants: dict[str, Any]) -> None:
    """Every workgroup after the other."""
    for program in range(grid):
        _program.id, _program.count = program, grid
        kernel(*arguments, **constants)
