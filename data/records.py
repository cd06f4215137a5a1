"""The profile record: one row says how long one config took for one shape, or why it has no time.

A row is a flat dict with the columns below, in files and in memory alike. `check_row` is the only statement of what a
good row is; import, training and the collector call it. No torch, no triton, no pyarrow.
"""

from __future__ import annotations

import datetime
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewise.errors import InvalidConfigError, InvalidShapeError
from tilewise.kernels.arch import ARCHS, Arch, match_arch
from tilewise.kernels.paged_mqa_logits.spec import (
    CONFIG_FIELDS,
    SHAPE_FIELDS,
    SPACES,
    Config,
    Shape,
    floor_us,
    flops,
    is_valid,
)
from tilewise.kernels.registry import OPS

SCHEMA_VERSION = 1
MAX_TEXT = 1 << 16  # characters of a string value

# What a believable time is. The least ratio of time to floor among the shipped rows is 1.12; the floor of another card
# rests on published rates, and a mean context is rounded down, so that a row may lie a little below it.
LEAST_OF_FLOOR = 0.8
LEAST_US = 0.5  # no launch of a GPU takes less
MOST_US = 60e6
MAX_ERROR = 1e-2  # the worst of the shipped rows is 1.1e-3; one wrong page or token gives 0.1 and more
# A clock that is behind the day of this rule is wrong, and decides nothing.
_RULE_DAY = datetime.datetime(2026, 11, 30, tzinfo=datetime.timezone.utc)

# What became of a launch, in the words of Kernel Tuner's T4 format. Only "correct" rows carry a latency.
STATUSES = ("correct", "compile", "runtime", "correctness", "constraints", "timeout")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a profile: its Python type, whether it may be null, and what it means."""

    name: str
    type: type  # int, float or str
    doc: str
    nullable: bool = False


_SHAPE_DOC = {
    "batch_size": "requests in the launch",
    "next_n": "query tokens per request",
    "heads": "query heads",
    "head_dim": "values per head and per cached token",
    "block_kv": "tokens per cache page",
    "max_context_len": "longest context of the batch, tokens",
    "mean_context_len": "mean context of the batch, tokens, rounded down",
    "cache_layout": "flat or preshuffled",
}

COLUMNS: tuple[Column, ...] = (
    Column("schema_version", int, f"version of this table: {SCHEMA_VERSION}"),
    Column("op", str, "name of the op, paged_mqa_logits"),
    Column("arch", str, f"GPU product: {', '.join(ARCHS)}, or <isa>-<n>cu for another GPU with n compute units"),
    *(Column(name, str if name == "cache_layout" else int, _SHAPE_DOC[name]) for name in SHAPE_FIELDS),
    Column("contexts", str, "how the contexts of the batch were drawn: uniform, or the name of a ragged distribution"),
    Column("logits_width", int, "columns of the output, max_model_len: at least max_context_len"),
    *(Column(name, type(getattr(Config(), name)), f"field {name} of the config that ran") for name in CONFIG_FIELDS),
    Column("status", str, f"one of {', '.join(STATUSES)}"),
    Column("reason", str, "why there is no time, empty where there is", nullable=True),
    Column("latency_us", float, "median time of one launch, microseconds", nullable=True),
    Column("latency_p20_us", float, "20th percentile, microseconds", nullable=True),
    Column("latency_p80_us", float, "80th percentile, microseconds", nullable=True),
    Column("rounds", int, "timed replays behind the median, one per interleaved round"),
    Column("launches_per_replay", int, "launches in the captured graph"),
    Column("timing_method", str, "graph (replay of a captured graph) or eager"),
    Column("cache_state", str, "cold or warm"),
    Column("footprint_bytes", int, "distinct cache pages walked before any is read again, bytes"),
    Column("max_error", float, "worst |error| / (k_scale * sum |w| relu(q.k)) against the reference", nullable=True),
    Column(
        "pass_index",
        int,
        "0 first timing of a shape, 1 an independent second one, 2 a duel of the best against the default",
    ),
    Column("kernel_hash", str, "source hash of the kernel that ran"),
    Column("device_name", str, "as the driver gives it"),
    Column("compute_units", int, "multiprocessors or compute units of the live device"),
    Column("clock_before_mhz", int, "engine clock before the shape was timed", nullable=True),
    Column("clock_after_mhz", int, "engine clock after the shape was timed", nullable=True),
    Column("driver", str, "driver version", nullable=True),
    Column("runtime", str, "CUDA or ROCm version that torch was built for", nullable=True),
    Column("torch_version", str, "torch"),
    Column("triton_version", str, "triton"),
    Column("git_commit", str, "commit of the source tree, empty where unknown", nullable=True),
    Column("run_id", str, "one per run of the collector"),
    Column("measured_at", str, "UTC, ISO 8601, seconds"),
)
COLUMN_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)
_BY_NAME = {column.name: column for column in COLUMNS}


def check_row(row: Mapping[str, Any]) -> str | None:
    """Why this row cannot be used, naming the column, what was given and what is allowed; None for a good row."""
    missing = [name for name in COLUMN_NAMES if name not in row and not _BY_NAME[name].nullable]
    if missing:
        return f"column {missing[0]} is missing"
    unknown = [name for name in row if name not in _BY_NAME]
    if unknown:
        return f"column {unknown[0]!r} is not part of schema version {SCHEMA_VERSION}"
    for column in COLUMNS:
        value = row.get(column.name)
        if value is None:
            if not column.nullable:
                return f"{column.name} must not be null"
        elif reason := _check_value(column, value):
            return reason
    if row["schema_version"] != SCHEMA_VERSION:
        return f"schema_version must be {SCHEMA_VERSION}, got {row['schema_version']}"
    if row["op"] not in OPS:
        return f"op must be one of {', '.join(OPS)}, got {row['op']!r}"
    if row["status"] not in STATUSES:
        return f"status must be one of {', '.join(STATUSES)}, got {row['status']!r}"
    arch = _arch_named(row["arch"])
    if arch is None:
        return (
            f"arch must be one of {', '.join(ARCHS)}, or for another GPU its ISA and compute units, such as "
            f"sm90-78cu, got {shorten(row['arch'])}"
        )
    if row["compute_units"] != arch.compute_units:  # a part of such a card is another arch
        return f"compute_units must be {arch.compute_units} on {arch.name}, got {row['compute_units']}"
    try:
        # By now every value has its column's type, so that equal tuples are equal shapes and configs.
        shape = _shape(tuple(row[name] for name in SHAPE_FIELDS))
        config = _config(tuple(row[name] for name in CONFIG_FIELDS))
    except (InvalidShapeError, InvalidConfigError) as error:
        return str(error)
    if not _WORD.fullmatch(row["contexts"]):
        return f"contexts must be a word of small letters, digits and '_', got {shorten(row['contexts'])}"
    if row["logits_width"] < shape.max_context_len:
        return f"logits_width must be at least max_context_len ({shape.max_context_len}), got {row['logits_width']}"
    if row["pass_index"] not in (0, 1, 2):
        return f"pass_index must be 0, 1 or 2, got {row['pass_index']}"
    if reason := _check_moment(row["measured_at"]):
        return reason
    return _check_measurement(row) or (_check_result(row, shape, config, arch) if row["status"] == "correct" else None)


_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DERIVED_ARCH = re.compile(r"(sm[0-9]{2,3}|gfx[0-9a-f]{3,4})-([0-9]{1,4})cu")
_MOMENT = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]{1,9})?(Z|\+00:00)")


@functools.lru_cache(maxsize=1024)
def _arch_named(name: str) -> Arch | None:
    """The arch whose timings are filed under this name, or None where no device would ever look there."""
    if name in ARCHS:
        return ARCHS[name]
    if (found := _DERIVED_ARCH.fullmatch(name)) is None:
        return None
    arch = match_arch(found[1], int(found[2]), "another")
    return arch if arch.name == name and arch.compute_units else None


@functools.lru_cache(maxsize=1 << 12)
def _shape(values: tuple[Any, ...]) -> Shape:
    return Shape(*values)


@functools.lru_cache(maxsize=1 << 12)
def _config(values: tuple[Any, ...]) -> Config:
    return Config.from_dict(dict(zip(CONFIG_FIELDS, values, strict=True)))


@functools.lru_cache(maxsize=1 << 12)
def _moment(text: str) -> datetime.datetime | None:
    found = _MOMENT.fullmatch(text)
    try:
        return None if found is None else datetime.datetime.fromisoformat(f"{found[1]}+00:00")
    except ValueError:  # the 31st of February
        return None


def _check_moment(text: str) -> str | None:
    moment = _moment(text)
    if moment is None:
        return f"measured_at must be a time in UTC such as 2026-01-31T12:00:00Z, got {shorten(text)}"
    now = max(datetime.datetime.now(datetime.timezone.utc), _RULE_DAY)
    if moment > now + datetime.timedelta(days=1):
        return f"measured_at must not lie in the future, got {text}"
    return None


def _check_value(column: Column, value: object) -> str | None:
    """Why this value does not fit its column whatever the rest of the row says, or None."""
    if type(value) is not column.type:
        return f"{column.name} must be {column.type.__name__}, got {shorten(value)}"
    if isinstance(value, int) and not 0 <= value < 1 << 63:
        return f"{column.name} must be 0 to 2^63 - 1, got {shorten(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{column.name} must be finite, got {value!r}"
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            return f"{column.name} must have at most {MAX_TEXT} characters, got {len(value)}"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{column.name} must be text that UTF-8 can hold, got {shorten(value)}"
    return None


def shorten(value: object) -> str:
    """A value as a message shows it: on one line, printable, and not much longer than a line."""
    try:
        text = ascii(value)
    except ValueError:  # an int with more digits than Python turns into text
        text = "a number of too many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_measurement(row: Mapping[str, Any]) -> str | None:
    times: list[Any] = [row.get(name) for name in ("latency_p20_us", "latency_us", "latency_p80_us")]
    if row["status"] != "correct":
        if times[1] is not None:
            return f"latency_us must be null where status is {row['status']!r}, got {times[1]!r}"
        return None if row.get("reason") else f"reason must say why status is {row['status']!r}"
    for name, time in zip(("latency_p20_us", "latency_us", "latency_p80_us"), times, strict=True):
        if time is None or not math.isfinite(time) or time <= 0:
            return f"{name} must be a positive number of microseconds, got {time!r}"
    if not times[0] <= times[1] <= times[2]:
        return f"latency percentiles must rise, got {times[0]}, {times[1]}, {times[2]}"
    if times[2] > MOST_US:
        return f"latency_us and its percentiles must be at most {MOST_US:.0f}, a minute, got {times[1]} and {times[2]}"
    if row["rounds"] < 1 or row["launches_per_replay"] < 1:
        return f"rounds and launches_per_replay must be at least 1, got {row['rounds']}, {row['launches_per_replay']}"
    if row["timing_method"] not in ("graph", "eager"):
        return f"timing_method must be 'graph' or 'eager', got {row['timing_method']!r}"
    if row["cache_state"] not in ("cold", "warm"):
        return f"cache_state must be 'cold' or 'warm', got {row['cache_state']!r}"
    if row["footprint_bytes"] < 0:
        return f"footprint_bytes must not be negative, got {row['footprint_bytes']}"
    return None


def _check_result(row: Mapping[str, Any], shape: Shape, config: Config, arch: Arch) -> str | None:
    """Why a row cannot be the outcome of a launch that worked: its config, its time or its error is impossible."""
    reason, cold_us, warm_us = _limits(shape, config, arch)
    if reason is not None:
        return f"config cannot launch this shape on {arch.name}: {reason}"
    floor = cold_us if row["cache_state"] == "cold" else warm_us
    if row["latency_us"] < max(LEAST_US, LEAST_OF_FLOOR * floor):
        return (
            f"latency_us must be at least {LEAST_US} and {LEAST_OF_FLOOR} of the floor of this shape on {arch.name} "
            f"({floor:.3f} us), got {row['latency_us']!r}"
        )
    error = row.get("max_error")
    if error is not None and not 0 <= error <= MAX_ERROR:
        return f"max_error must be 0 to {MAX_ERROR} where status is 'correct', got {error!r}"
    return None


@functools.lru_cache(maxsize=1 << 14)
def _limits(shape: Shape, config: Config, arch: Arch) -> tuple[str | None, float, float]:
    """(why the config cannot launch, least microseconds with a cold cache, and with a warm one).

    A kernel that is not registered is nobody's to judge; training drops it. Floors are of the GPUs whose rates are
    known: those of a derived arch, and of the interpreter, are guesses.
    """
    reason = is_valid(shape, config, arch) if config.kernel in SPACES else None
    if arch.name not in ARCHS or arch.vendor == "cpu":
        return reason, 0.0, 0.0
    return reason, floor_us(shape, arch), flops(shape) / (arch.fp8_tflops * 1e6)


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The launch shape of a row; InvalidShapeError where a value is out of range."""
    return Shape(**{name: row[name] for name in SHAPE_FIELDS})


def config_of(row: Mapping[str, Any]) -> Config:
    """The config of a row; InvalidConfigError where a value has the wrong type."""
    return Config.from_dict({name: row[name] for name in CONFIG_FIELDS})


def schema_table() -> Iterable[tuple[str, str, str]]:
    """Rows (column, type, meaning) for the documentation."""
    for column in COLUMNS:
        yield column.name, column.type.__name__ + (" or null" if column.nullable else ""), column.doc
