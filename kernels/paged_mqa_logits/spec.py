"""What paged MQA logits is asked to do and how it may be launched. No torch, no triton.

`Shape` is the request, `Config` one way to launch it, `is_valid` the only statement of which launch which. What each
kernel accepts and offers lives in its own space module (see `SPACES`); everything else asks the functions here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tilewise.errors import InvalidConfigError, InvalidShapeError
from tilewise.kernels.arch import Arch

CacheLayout = Literal["flat", "preshuffled"]
MmaM = Literal["kv", "heads"]
Schedule = Literal["even", "balanced"]

MAX_NEXT_N = 8
HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (64, 128)
BLOCK_KVS = (1, 16, 32, 64, 128, 256)
MAX_BATCH_SIZE = 1 << 20
MAX_CONTEXT_LEN = 1 << 24
SCALE_BYTES = 4  # one fp32 scale per cached token


@dataclass(frozen=True, slots=True)
class Shape:
    """One launch as the host knows it. The width of the logits is no part of it: no choice depends on that alone.

    Raises InvalidShapeError, naming the field, for a value outside what the op accepts.
    """

    batch_size: int  # requests; 0 is an empty launch
    next_n: int  # query tokens per request: 1 + speculative tokens
    heads: int
    head_dim: int = 128
    block_kv: int = 64  # tokens per cache page
    max_context_len: int = 32768  # longest context of the batch, in tokens
    mean_context_len: int | None = None  # None: uniform, the same as the longest
    cache_layout: CacheLayout = "flat"

    def __post_init__(self) -> None:
        _check_int("batch_size", self.batch_size, 0, MAX_BATCH_SIZE)
        _check_int("next_n", self.next_n, 1, MAX_NEXT_N)
        _check_choice("heads", self.heads, HEADS)
        _check_choice("head_dim", self.head_dim, HEAD_DIMS)
        _check_choice("block_kv", self.block_kv, BLOCK_KVS)
        _check_int("max_context_len", self.max_context_len, 0, MAX_CONTEXT_LEN)
        if self.mean_context_len is None:
            object.__setattr__(self, "mean_context_len", self.max_context_len)
        _check_int("mean_context_len", self.mean_context_len, 0, self.max_context_len)
        if not isinstance(self.cache_layout, str) or self.cache_layout not in ("flat", "preshuffled"):
            raise InvalidShapeError(f"cache_layout must be 'flat' or 'preshuffled', got {self.cache_layout!r}")

    @property
    def context_tokens(self) -> int:
        """Cached tokens over the whole batch."""
        return self.batch_size * (self.mean_context_len or 0)

    def to_dict(self) -> dict[str, Any]:
        """Field names to plain values, in order."""
        return {field: getattr(self, field) for field in SHAPE_FIELDS}


@dataclass(frozen=True, slots=True, order=True)
class Config:
    """One way to launch the op. Fields that a kernel does not read keep their default, so one launch has one name.

    The order of the fields is the fixed order in which ties are broken.
    """

    kernel: str = "portable"  # which implementation: a key of SPACES
    fuse_n: int = 1  # query tokens per program; 1 is per-next_n, more is fused-M
    dot_n: int = 1  # query tokens per matrix product; a power of two, at most fuse_n
    mma_m: MmaM = "kv"  # what the rows (M) of the matrix product are: cached tokens, or heads x query tokens
    tile_kv: int = 64  # cached tokens per step of a program
    split_kv: int = 1  # programs that share one request's context
    num_warps: int = 4
    num_stages: int = 3
    waves_per_eu: int = 0  # AMD occupancy hint; 0 leaves it to the compiler
    schedule: Schedule = "even"  # even: split_kv equal parts per request; balanced: equal pages per workgroup
    mfma: str = ""  # AMD matrix instruction shape, such as "16x16x128"
    epilogue: str = ""  # form of relu, weighting and sum over heads, where a kernel has several
    program_order: str = ""  # AMD: order of programs over the dies
    consumers: int = 0  # Hopper: consumer warpgroups per workgroup
    token_split: int = 0  # Hopper: consumers that share one page and split its query tokens
    ctas_per_sm: int = 0  # Hopper: persistent workgroups per multiprocessor

    @property
    def variant(self) -> str:
        """ "per_next_n" or "fused_m"."""
        return "per_next_n" if self.fuse_n == 1 else "fused_m"

    def groups(self, next_n: int) -> int:
        """Programs that the query tokens of one request are dealt to."""
        return cdiv(next_n, self.fuse_n)

    def to_dict(self) -> dict[str, Any]:
        """Field names to plain values, in order."""
        return {field: getattr(self, field) for field in CONFIG_FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The config that `to_dict` wrote. Missing fields take their default; InvalidConfigError for anything else."""
        unknown = [name for name in values if name not in _CONFIG_TYPES]
        if unknown:
            raise InvalidConfigError(f"config fields must be among {', '.join(CONFIG_FIELDS)}, got {unknown[0]!r}")
        for name, value in values.items():
            if type(value) is not _CONFIG_TYPES[name]:
                raise InvalidConfigError(f"config {name} must be {_CONFIG_TYPES[name].__name__}, got {value!r}")
        return cls(**values)

    def __str__(self) -> str:
        parts = [self.kernel]
        default = _NEUTRAL
        for name in CONFIG_FIELDS[1:]:
            value = getattr(self, name)
            if name in _ALWAYS_SHOWN or value != getattr(default, name):
                parts.append(f"{name}={value}")
        return " ".join(parts)


SHAPE_FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Shape))
CONFIG_FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Config))
_NEUTRAL = Config()
_ALWAYS_SHOWN = ("fuse_n", "mma_m", "tile_kv", "split_kv", "num_warps", "num_stages")
_CONFIG_TYPES: dict[str, type] = {name: type(getattr(_NEUTRAL, name)) for name in CONFIG_FIELDS}


class Space(Protocol):
    """What one kernel accepts and offers; a module of this form stands behind every entry of SPACES."""

    READS: frozenset[str]  # the Config fields that the kernel reads

    def runs_on(self, arch: Arch) -> bool: ...

    def why_invalid(self, shape: Shape, config: Config, arch: Arch) -> str | None: ...

    def candidates(self, shape: Shape, arch: Arch) -> list[Config]: ...

    def default_config(self, shape: Shape, arch: Arch) -> Config | None: ...

    def as_offered(self, shape: Shape, config: Config) -> Config:
        """What is on offer for this shape in place of a config that was chosen for a longer context."""
        ...


# Kernel name to the module with its space. The first one that runs on an arch gives that arch's default config.
SPACES: dict[str, str] = {
    "gfx950": "tilewise.kernels.paged_mqa_logits.gfx950.space",
    "sm90": "tilewise.kernels.paged_mqa_logits.sm90.space",
    "portable": "tilewise.kernels.paged_mqa_logits.portable_space",
}


@functools.cache
def space(kernel: str) -> Space:
    """The space module of a kernel named in SPACES."""
    return importlib.import_module(SPACES[kernel])


@functools.cache
def _unread(kernel: str) -> tuple[tuple[str, ...], Callable[[Config], Any], Any]:
    """Config fields that a kernel does not read, how they are read all at once, and what they must be."""
    names = tuple(name for name in CONFIG_FIELDS if name not in space(kernel).READS)
    values: Callable[[Config], Any] = operator.attrgetter("kernel", *names)  # two at least, for a tuple
    return names, values, (kernel, *(getattr(_NEUTRAL, name) for name in names))


def is_valid(shape: Shape, config: Config, arch: Arch) -> str | None:
    """Why this config cannot launch, or None. The only statement of it: sweep, selector, launcher and tests call it."""
    if config.kernel not in SPACES:
        return f"kernel must be one of {', '.join(SPACES)}, got {config.kernel!r}"
    own = space(config.kernel)
    if not own.runs_on(arch):
        return f"kernel {config.kernel} does not run on {arch.name} ({arch.isa})"
    names, values, neutral = _unread(config.kernel)
    if names and (given := values(config)) != neutral:
        at = next(at for at, value in enumerate(given) if value != neutral[at])
        return f"kernel {config.kernel} does not read {names[at - 1]}: it must be {neutral[at]!r}"
    if not 1 <= config.fuse_n <= shape.next_n:
        return f"fuse_n must be 1 to next_n ({shape.next_n}), got {config.fuse_n}"
    if not _is_power_of_two(config.dot_n) or config.dot_n > config.fuse_n:
        return f"dot_n must be a power of two of at most fuse_n ({config.fuse_n}), got {config.dot_n}"
    if not _is_power_of_two(config.tile_kv) or not 16 <= config.tile_kv <= 512:
        return f"tile_kv must be a power of two from 16 to 512, got {config.tile_kv}"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps must be 1, 2, 4, 8 or 16, got {config.num_warps}"
    if config.split_kv < 1:
        return f"split_kv must be at least 1, got {config.split_kv}"
    if shape.batch_size * config.groups(shape.next_n) * config.split_kv >= 1 << 31:
        return f"batch_size x token groups x split_kv must stay under 2^31 programs, got split_kv {config.split_kv}"
    return own.why_invalid(shape, config, arch)


# What `candidates` remembers for a caller: by the fields of a shape that kernels are compiled for, the valid configs,
# each the one object that stands for its equals, and None for the others. Beside these, limits on programs read a
# shape: where the least of them could be met, nothing is remembered.
Verdicts = dict[tuple[Any, ...], dict[Config, Config | None]]
LEAST_PROGRAM_LIMIT = 1 << 20  # the Hopper kernel's, of an even schedule
MOST_VERDICTS = (32, 2048)  # kinds of shape, and configs of each: some 20 MB at most


def candidates(shape: Shape, arch: Arch, verdicts: Verdicts | None = None) -> list[Config]:
    """Every config worth measuring or choosing for this shape, valid and without repeats, the default first.

    `verdicts`, if given, is kept between calls with the same arch, and makes them fast.
    """
    spaces = [space(kernel) for kernel in SPACES if space(kernel).runs_on(arch)]
    grid = [config for own in spaces for config in own.candidates(shape, arch)]
    known: dict[Config, Config | None] = {} if verdicts is None else _verdicts_of(shape, verdicts)
    most_splits = max((config.split_kv for config in grid), default=1)
    if shape.batch_size * shape.next_n * most_splits >= LEAST_PROGRAM_LIMIT:
        known = {}
    defaults = (own.default_config(shape, arch) for own in spaces)
    first = next((config for config in defaults if config is not None), None)
    default = None if first is None else known.get(first)
    if default is None:  # not known to be valid
        default = default_config(shape, arch)
        default = known.setdefault(default, default) or default
    found = {id(default): default}
    for config in grid:
        try:
            valid = known[config]
        except KeyError:
            valid = known[config] = config if is_valid(shape, config, arch) is None else None
        if valid is not None:
            found[id(valid)] = valid
    return list(found.values())


def _verdicts_of(shape: Shape, verdicts: Verdicts) -> dict[Config, Config | None]:
    """Those for the kind of this shape. Both levels are emptied when they are full."""
    kind = (shape.next_n, shape.heads, shape.head_dim, shape.block_kv, shape.cache_layout)
    known = verdicts.get(kind)
    if known is None or len(known) > MOST_VERDICTS[1]:
        if len(verdicts) >= MOST_VERDICTS[0]:
            verdicts.clear()
        known = verdicts[kind] = {}
    return known


def default_config(shape: Shape, arch: Arch) -> Config:
    """The config that is used when nothing is known better: always valid, always a candidate.

    Raises InvalidConfigError where no kernel serves the shape on this arch.
    """
    reasons = []
    for kernel in SPACES:
        if space(kernel).runs_on(arch):
            config = space(kernel).default_config(shape, arch)
            reason = "no default" if config is None else is_valid(shape, config, arch)
            if config is not None and reason is None:
                return config
            reasons.append(f"{kernel}: {reason}")
    raise InvalidConfigError(f"no kernel serves {shape} on {arch.name}: {'; '.join(reasons) or 'none runs there'}")


def at_context_len(shape: Shape, length: int) -> Shape:
    """The shape with another longest context; the ratio of mean to longest stays."""
    ratio = 1.0 if not shape.max_context_len else (shape.mean_context_len or 0) / shape.max_context_len
    mean = min(length, round(ratio * length)) if type(length) is int else None
    return dataclasses.replace(shape, max_context_len=length, mean_context_len=mean)


def bytes_moved(shape: Shape) -> int:
    """Fewest bytes through device memory: queries, weights, K pages and table read once, logits written once."""
    rows = shape.batch_size * shape.next_n
    queries = rows * shape.heads * (shape.head_dim + 4)  # fp8 values and one fp32 weight per head
    keys = shape.context_tokens * (shape.head_dim + SCALE_BYTES)
    table = 4 * cdiv(shape.context_tokens, shape.block_kv)
    logits = 4 * shape.next_n * shape.context_tokens
    return queries + keys + table + logits


def flops(shape: Shape) -> int:
    """Floating-point operations of the matrix products (the epilogue's are not counted)."""
    return 2 * shape.next_n * shape.heads * shape.head_dim * shape.context_tokens


def floor_us(shape: Shape, arch: Arch) -> float:
    """No launch is much faster than this, in microseconds: the larger of bytes over bandwidth and flops over rate."""
    return max(bytes_moved(shape) / (arch.bandwidth_tbps * 1e6), flops(shape) / (arch.fp8_tflops * 1e6))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def low_reciprocal(n: int) -> float:
    """1 / n, less 2^-22 of it: in fp32 no product with it exceeds the quotient that it stands for. 1 for n below 1.

    With it floor((x + 0.5) / n) is right for x below 2^20, whatever n.
    """
    return (1.0 - 2.0**-22) / max(n, 1)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int:  # bool is an int to isinstance
        raise InvalidShapeError(f"{name} must be an int, got {value!r}")
    if not low <= value <= high:
        # Python refuses to print an int of thousands of digits.
        raise InvalidShapeError(f"{name} must be {low} to {high}, got {value if abs(value) < 10**30 else 'far more'}")


def _check_choice(name: str, value: object, allowed: tuple[int, ...]) -> None:
    if type(value) is int and abs(value) >= 10**30:
        raise InvalidShapeError(f"{name} must be one of {', '.join(map(str, allowed))}, got far more")
    if type(value) is not int or value not in allowed:
        raise InvalidShapeError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
