"""Profiles in other tuners' formats: Kernel Tuner's T4 results (JSON) and aiter's tuned tables (CSV).

What such a file lacks, a row gets from `defaults`, and else conservatively: a time that does not say how it was taken
counts as eager and warm, which training leaves out. `records.check_row` judges the rows, as any.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewise.data.records import COLUMNS, SCHEMA_VERSION, STATUSES, shorten
from tilewise.errors import InvalidProfileError, UnsupportedError
from tilewise.kernels.arch import ARCHS, get_arch
from tilewise.kernels.paged_mqa_logits.spec import CONFIG_FIELDS, SHAPE_FIELDS, Config, Shape, bytes_moved, flops

T4_VERSION = "1.0.0"
MAX_T4_BYTES = 256 << 20
# The key and the answer of aiter's tables, around the sizes of this op.
AITER_HEAD, AITER_TAIL = ("gfx", "cu_num"), (
    "libtype", "kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio",
)  # fmt: skip
AITER_COLUMNS = (*AITER_HEAD, *SHAPE_FIELDS, *AITER_TAIL)

_TYPES = {column.name: column.type for column in COLUMNS}
_T4 = re.compile(rb'"results"\s*:\s*\[')
_CONSERVATIVE: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION, "op": "paged_mqa_logits", "status": "correct", "reason": "", "rounds": 1,
    "launches_per_replay": 1, "timing_method": "eager", "cache_state": "warm", "footprint_bytes": 0, "pass_index": 0,
    "kernel_hash": "unknown", "device_name": "unknown", "measured_at": "1970-01-01T00:00:00Z", "run_id": "imported",
    "torch_version": "unknown", "triton_version": "unknown",
}  # fmt: skip

# What a row of another form can raise; ValueError is also a config or a shape that is none.
_FAULTS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, UnsupportedError)

Item = tuple[int, "dict[str, Any] | str"]
Defaults = Mapping[str, Any]


def is_t4(head: bytes) -> bool:
    """Whether a file that begins so is a T4 document: one object with `results`, and no line of a profile."""
    return bool(_T4.search(head)) and b'"latency_us"' not in head.split(b"\n", 1)[0][:65536].split(b'"results"')[0]


def is_aiter(header: Iterable[str]) -> bool:
    """Whether a CSV header is that of a tuned table of this op."""
    return {"cu_num", "us", "kernelName", "batch_size", "max_context_len"} <= set(header)


def parse_defaults(words: Iterable[str]) -> dict[str, Any]:
    """Columns from `name=value` words; InvalidProfileError for an unknown column or a value of another type."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in _TYPES or not _:
            raise InvalidProfileError(
                f"a default must be COLUMN=VALUE with a column of the schema, got {shorten(word)}"
            )
        try:
            found[name] = _TYPES[name](text)
        except ValueError as error:
            raise InvalidProfileError(f"{name} must be {_TYPES[name].__name__}, got {shorten(text)}") from error
    return found


def read_t4(path: Path, defaults: Defaults) -> Iterator[Item]:
    """The results of a T4 document, numbered from 1."""
    if path.stat().st_size > MAX_T4_BYTES:
        raise InvalidProfileError(f"{path} must have at most {MAX_T4_BYTES} bytes")
    try:
        document = json.loads(path.read_bytes().decode())
        results, version = document["results"], document["schema_version"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidProfileError(f"{path} is no T4 document: {shorten(str(error))}") from error
    if version != T4_VERSION or not isinstance(results, list):
        raise InvalidProfileError(f"{path} must be T4 results of version {T4_VERSION}, got {shorten(version)}")
    shared = document.get("tilewise", {})
    if not isinstance(shared, dict):
        raise InvalidProfileError(f"{path}: tilewise must be an object, got {shorten(shared)}")
    for number, result in enumerate(results, start=1):
        try:
            yield number, _of_t4(result, defaults, shared)
        except _FAULTS as error:
            yield number, f"not a T4 result of this op: {shorten(str(error))}"


def _of_t4(result: Mapping[str, Any], defaults: Defaults, shared: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in result["configuration"].items() if name in _TYPES}
    row = {**_CONSERVATIVE, **Config().to_dict(), **defaults, **given}
    if "timestamp" in result:
        row["measured_at"] = _moment(str(result["timestamp"]))
    status = str(result.get("invalidity", "correct"))
    row["status"] = status if status in STATUSES else "runtime"
    if row["status"] == "correct":
        runtimes = sorted(float(ms) for ms in result.get("times", {}).get("runtimes", []))
        named = {one["name"]: one for one in result.get("measurements", [])}
        if "time" in named:
            row["latency_us"] = float(named["time"]["value"]) * _per_us(named["time"].get("unit") or "ms")
        elif runtimes:
            row["latency_us"] = statistics.median(runtimes) * 1e3
        for name, share in (("latency_p20_us", 0.2), ("latency_p80_us", 0.8)):
            at = runtimes[round(share * (len(runtimes) - 1))] * 1e3 if len(runtimes) > 2 else row["latency_us"]
            row[name] = min(at, row["latency_us"]) if share < 0.5 else max(at, row["latency_us"])
        row["rounds"] = max(1, len(runtimes))
    else:
        row["reason"] = f"{status}, by the file that was imported"
    for ours in (shared, result.get("tilewise", {})):
        row |= {name: value for name, value in ours.items() if name in _TYPES}
    return _complete(row)


def read_aiter(records: Iterator[list[str]], defaults: Defaults) -> Iterator[Item]:
    """The rows of a tuned table of this op, numbered from 1, out of its header and what follows.

    `kernelName` holds the config as `Config` prints it.
    """
    header = next(records, [])
    for number, fields in enumerate(records, start=1):
        try:
            yield number, _of_aiter(dict(zip(header, fields, strict=False)), defaults)
        except _FAULTS as error:
            yield number, f"not a tuned row of this op: {shorten(str(error))}"


def _of_aiter(fields: Mapping[str, str], defaults: Defaults) -> dict[str, Any]:
    row = {**_CONSERVATIVE, **parse_config(fields["kernelName"]).to_dict(), **defaults}
    row |= {name: _TYPES[name](fields[name]) for name in SHAPE_FIELDS if fields.get(name)}
    units = int(fields["cu_num"])
    if "arch" not in row:
        same = [a.name for a in ARCHS.values() if a.isa == fields.get("gfx") and a.compute_units == units]
        if not same:
            raise ValueError(f"no GPU is known by gfx {fields.get('gfx')!r} and cu_num {units}: give arch")
        row["arch"] = same[0]
    row["compute_units"] = units
    for name in ("latency_us", "latency_p20_us", "latency_p80_us"):
        row[name] = float(fields["us"])
    return _complete(row)


def _complete(row: dict[str, Any]) -> dict[str, Any]:
    row.setdefault("mean_context_len", row.get("max_context_len"))
    row.setdefault("cache_layout", "flat")
    row.setdefault("head_dim", 128)
    row.setdefault("logits_width", row.get("max_context_len"))
    row.setdefault("contexts", "uniform" if row["mean_context_len"] == row.get("max_context_len") else "unknown")
    if "compute_units" not in row and "arch" in row:
        row["compute_units"] = get_arch(row["arch"]).compute_units
    return row


def parse_config(text: str) -> Config:
    """The config that `str(config)` wrote. Raises ValueError or InvalidConfigError for anything else."""
    kernel, *words = text.split()
    values: dict[str, Any] = {"kernel": kernel}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or name not in CONFIG_FIELDS:
            raise ValueError(f"a config must be a kernel and fields such as split_kv=4, got {word!r}")
        values[name] = type(getattr(Config(), name))(value)
    return Config.from_dict(values)


def t4_document(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """T4 results of some profile rows. What T4 has no word for goes to `tilewise`: of all rows, or of one."""
    listed = [dict(row) for row in rows]
    own = [name for name in _TYPES if name not in (*SHAPE_FIELDS, *CONFIG_FIELDS, "status", "measured_at")]
    shared = {name: listed[0][name] for name in own if listed and all(row[name] == listed[0][name] for row in listed)}
    results = []
    for row in listed:
        timed = row["status"] == "correct"
        results.append(
            {
                "timestamp": row["measured_at"],
                "configuration": {name: row[name] for name in (*SHAPE_FIELDS, *CONFIG_FIELDS)},
                "times": {
                    "runtimes": [row[name] / 1e3 for name in ("latency_p20_us", "latency_us", "latency_p80_us")]
                    if timed
                    else []
                },
                "invalidity": row["status"],
                "correctness": int(timed),
                "measurements": [{"name": "time", "value": row["latency_us"] / 1e3, "unit": "ms"}] if timed else [],
                "objectives": ["time"],
                "tilewise": {name: row[name] for name in own if name not in shared and row[name] is not None},
            }
        )
    return {"schema_version": T4_VERSION, "tilewise": shared, "results": results}


def aiter_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fastest config of each shape, in the form of aiter's tuned tables (us, TFLOP/s, GB/s)."""
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        if row["status"] == "correct":
            key = tuple(row[name] for name in ("arch", *SHAPE_FIELDS))
            if key not in best or row["latency_us"] < best[key]["latency_us"]:
                best[key] = row
    configs = sorted({Config(**{name: row[name] for name in CONFIG_FIELDS}) for row in best.values()})
    place = {config: at for at, config in enumerate(configs)}
    found = []
    for key in sorted(best, key=str):
        row = best[key]
        shape = Shape(**{name: row[name] for name in SHAPE_FIELDS})
        config = Config(**{name: row[name] for name in CONFIG_FIELDS})
        us = row["latency_us"]
        found.append(
            {
                "gfx": get_arch(row["arch"]).isa,
                "cu_num": row["compute_units"],
                **shape.to_dict(),
                "libtype": config.kernel,
                "kernelId": place[config],
                "splitK": config.split_kv,
                "us": round(us, 4),
                "kernelName": str(config),
                "tflops": round(flops(shape) / us / 1e6, 2),
                "bw": round(bytes_moved(shape) / us / 1e3, 2),
                "errRatio": row.get("max_error") or 0.0,
            }
        )
    return found


def _moment(text: str) -> str:
    """A timestamp as profiles have it; Kernel Tuner writes local time with an offset or none, taken as UTC."""
    found = re.match(r"(\d{4}-\d{2}-\d{2})[T ](\d{2}:\d{2}:\d{2})", text)
    if not found:
        raise ValueError(f"timestamp must be an ISO time, got {text!r}")
    return f"{found[1]}T{found[2]}Z"


def _per_us(unit: str) -> float:
    try:
        return {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}[unit]
    except KeyError as error:
        raise ValueError(f"unit of time must be s, ms, us or ns, got {unit!r}") from error
