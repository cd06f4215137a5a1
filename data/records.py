"""The profile record: one row says how long one config took for one shape, or why it has no time.

A row is a flat dict with the columns below, in files and in memory alike. `check_row` is the only statement of what a
good row is; import, training and the collector call it. No torch, no triton, no pyarrow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewise.errors import InvalidConfigError, InvalidShapeError
from tilewise.kernels.arch import ARCHS
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, SHAPE_FIELDS, Config, Shape
from tilewise.kernels.registry import OPS

SCHEMA_VERSION = 1
MAX_TEXT = 1 << 16  # characters of a string value

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
    Column("arch", str, "GPU product, a key of ARCHS or <isa>-<n>cu"),
    *(Column(name, str if name == "cache_layout" else int, _SHAPE_DOC[name]) for name in SHAPE_FIELDS),
    Column("contexts", str, "how the contexts of the batch were drawn: uniform, or the name of a ragged distribution"),
    Column("logits_width", int, "columns of the output, max_model_len"),
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
    if not _ARCH_NAME.fullmatch(row["arch"]):
        return f"arch must be lower case letters, digits, '-' and '_', got {row['arch']!r}"
    known = ARCHS.get(row["arch"])
    if known is not None and row["compute_units"] != known.compute_units:  # a part of such a card is another arch
        return f"compute_units must be {known.compute_units} on {known.name}, got {row['compute_units']}"
    if row["status"] not in STATUSES:
        return f"status must be one of {', '.join(STATUSES)}, got {row['status']!r}"
    try:
        shape_of(row)
        config_of(row)
    except (InvalidShapeError, InvalidConfigError) as error:
        return str(error)
    return _check_measurement(row)


# Names a folder, so it can hold no path.
_ARCH_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


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
    if row["rounds"] < 1 or row["launches_per_replay"] < 1:
        return f"rounds and launches_per_replay must be at least 1, got {row['rounds']}, {row['launches_per_replay']}"
    if row["timing_method"] not in ("graph", "eager"):
        return f"timing_method must be 'graph' or 'eager', got {row['timing_method']!r}"
    if row["cache_state"] not in ("cold", "warm"):
        return f"cache_state must be 'cold' or 'warm', got {row['cache_state']!r}"
    if row["footprint_bytes"] < 0:
        return f"footprint_bytes must not be negative, got {row['footprint_bytes']}"
    return None


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
