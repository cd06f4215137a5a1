"""Traffic: which shapes a deployment asks for, and how often. Written by `tilewise.write_shapes`, read here.

A file is JSON lines or CSV, one shape a line: the fields of a Shape, those with a default left out or not, and `count`,
the number of launches (1 where left out; any number above 0, at most MAX_LAUNCHES). A line of JSON may have `context`,
an object of `lengths` and `weights`, where one launch serves several contexts: it stands for the shape at each length,
with its share of the count. A line with `overflow` counts shapes that were not told apart, and is passed over. Other
fields are not read.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewise.data.output import write_output
from tilewise.errors import InvalidProfileError, InvalidShapeError
from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS, Shape, at_context_len

MAX_FILE_BYTES = 256 << 20
MAX_LAUNCHES = float(1 << 63)  # of one line; times and sums of as many lines as a file can have stay finite


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """One shape and how many launches it stands for."""

    shape: Shape
    count: float


def read_traffic(path: str | os.PathLike[str]) -> list[Traffic]:
    """The shapes of a file with their counts, each once, in the order in which they first come.

    Raises InvalidProfileError, naming the line, for a file or a line that is none.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidProfileError(f"{file}: a traffic file has at most {MAX_FILE_BYTES} bytes")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InvalidProfileError(f"{file} cannot be read: {error}") from error
    counts: dict[Shape, float] = {}
    for number, row in _rows(file, text):
        try:
            for shape, count in row_shapes(row):
                counts[shape] = counts.get(shape, 0.0) + count
        except (InvalidShapeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidProfileError(f"{file} line {number}: {error}") from error
    if not counts:
        raise InvalidProfileError(f"{file} has no shape: it needs a line for each, with the fields of a shape")
    return [Traffic(shape, count) for shape, count in counts.items()]


def _rows(file: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if text.lstrip()[:1] in ("", "{"):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise InvalidProfileError(f"{file} line {number} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise InvalidProfileError(f"{file} line {number} must be an object, got {line[:80]!r}")
                yield number, row
        return
    try:
        table = csv.DictReader(io.StringIO(text), strict=True)
        for row in table:
            yield (
                table.line_num,
                {name: _plain(value) for name, value in row.items() if name and value not in (None, "")},
            )
    except csv.Error as error:
        raise InvalidProfileError(f"{file} is not CSV: {error}") from error


def _plain(text: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            pass
    return text


def row_shapes(row: Mapping[str, Any]) -> Iterator[tuple[Shape, float]]:
    """The shapes that one line stands for, with their counts.

    Raises InvalidShapeError, KeyError, TypeError, ValueError or OverflowError for a line that is none.
    """
    if row.get("overflow"):
        return
    count = row.get("count", 1)
    if not _is_amount(count) or not count:
        raise ValueError(f"count must be a number above 0, at most {MAX_LAUNCHES:.0f}, got {count!r:.80}")
    shape = Shape(**{name: row[name] for name in SHAPE_FIELDS if row.get(name) is not None})
    context = row.get("context")
    if context is None:
        yield shape, float(count)
        return
    lengths, weights = context["lengths"], context["weights"]
    for weight in weights:
        if not _is_amount(weight):
            raise ValueError(f"context weights must be numbers of 0 to {MAX_LAUNCHES:.0f}, got {weight!r:.80}")
    total = math.fsum(weights)
    if not total:
        raise ValueError("context weights must not all be 0")
    for length, weight in zip(lengths, weights, strict=True):
        if share := count * weight / total:
            yield at_context_len(shape, length), share


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_LAUNCHES


def write_rows(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON lines, whole or not at all; the number of lines."""
    lines = [json.dumps(row) + "\n" for row in rows]
    write_output(path, lines)
    return len(lines)
