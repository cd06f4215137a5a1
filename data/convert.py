"""Profile rows out of files that somebody hands in: Parquet, JSON lines or CSV, told apart by content.

Nothing here judges a row; `records.check_row` does. Memory stays bounded whatever the file says: Parquet is read in
batches, text by the line, and one row may not be longer than MAX_ROW_BYTES.
"""

from __future__ import annotations

import csv
import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tilewise.data import exchange
from tilewise.data.records import COLUMNS, MAX_TEXT, shorten
from tilewise.errors import InvalidProfileError, UnsupportedError

MAX_ROW_BYTES = 1 << 20
MAX_ROW_GROUP_BYTES = 1 << 29  # what a Parquet row group may unpack to
MAX_ROWS = 10_000_000  # in a Parquet file, where a few bytes can stand for any number of rows
BATCH_ROWS = 4096

_TYPES = {column.name: column.type for column in COLUMNS}
_FLOATS = [column.name for column in COLUMNS if column.type is float]
_NULLABLE = {column.name for column in COLUMNS if column.nullable}
_INT = re.compile(r"-?[0-9]{1,19}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE)

Item = tuple[int, "dict[str, Any] | str"]  # row number from 1, and the row or why it cannot be read


def read_rows(path: Path, defaults: Mapping[str, Any] | None = None) -> Iterator[Item]:
    """Every row of a profile file with its number: of the line in JSON lines, else of the record after the header.

    Kernel Tuner's T4 results and aiter's tuned tables are read, too (exchange.py); `defaults` are columns that such a
    file lacks. Raises InvalidProfileError where the file as a whole cannot be read: not one of the formats, damaged,
    with other columns than the schema's, or a pipe, which cannot be read from its start twice.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidProfileError(f"{path} must be a regular file, got a pipe, a folder or a device")
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise InvalidProfileError(f"{path} cannot be read: {error.strerror or error}") from error
    if head.startswith(b"PAR1"):
        return _parquet(path)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise InvalidProfileError(f"{path} is empty")
    if start.startswith(b"["):
        raise InvalidProfileError(f"{path} must be JSON lines, one object a line, got a JSON array")
    if b"\0" in head:
        raise InvalidProfileError(f"{path} must be Parquet, JSON lines or CSV, got binary data of another kind")
    if start.startswith(b"{"):
        return exchange.read_t4(path, defaults or {}) if exchange.is_t4(head) else _json_lines(path)
    header = start.split(b"\n", 1)[0].decode("utf-8", "replace").strip().split(",")
    return exchange.read_aiter(_records(path), defaults or {}) if exchange.is_aiter(header) else _csv(path)


def require_pyarrow() -> tuple[Any, Any]:
    """(pyarrow, pyarrow.parquet), imported on first use; UnsupportedError with the way to get them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError("profiles need pyarrow: pip install -e '.[train]'") from error
    return pyarrow, pyarrow.parquet


def _check_header(names: list[str], path: Path) -> None:
    repeated = [name for name in names if names.count(name) > 1]
    unknown = [name for name in names if name not in _TYPES]
    missing = [name for name in _TYPES if name not in names and name not in _NULLABLE]
    for problem, found in (("repeats", repeated), ("has an unknown", unknown), ("lacks the", missing)):
        if found:
            raise InvalidProfileError(f"{path} {problem} column {shorten(found[0])}: see `tilewise schema`")


def _parquet(path: Path) -> Iterator[Item]:
    pa, pq = require_pyarrow()
    # Arrow reports damage in many ways; none of them is a fault of ours.
    damage = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError)
    try:
        with pq.ParquetFile(path) as file:
            _check_header(file.schema_arrow.names, path)
            text = [field.name for field in file.schema_arrow if _is_text(pa, field.type)]
            for field in file.schema_arrow:
                # A list, a struct or bytes of a fixed size: what it unpacks to, no row count bounds.
                if field.name not in text and not _is_number(pa, field.type):
                    raise InvalidProfileError(f"{path}: column {field.name} must hold plain values, got {field.type}")
            if file.metadata.num_rows > MAX_ROWS:
                raise InvalidProfileError(f"{path} must have at most {MAX_ROWS} rows, got {file.metadata.num_rows}")
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).total_byte_size
                if size > MAX_ROW_GROUP_BYTES:
                    raise InvalidProfileError(
                        f"{path}: a row group must unpack to at most {MAX_ROW_GROUP_BYTES} bytes, got {size}"
                    )
        # Text stays dictionary-encoded, so that one long string repeated a million times costs its length once.
        number = 0
        with pq.ParquetFile(path, read_dictionary=text) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                _check_text(pa, batch, path)
                for row in batch.to_pylist():
                    number += 1
                    yield number, _whole_floats(row)
    except InvalidProfileError:
        raise
    except damage as error:
        raise InvalidProfileError(f"{path} is not a Parquet file that can be read: {shorten(str(error))}") from error


def _is_text(pa: Any, kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")


def _is_number(pa: Any, kind: Any) -> bool:
    """Whether a column of this type holds numbers, true and false, or nothing but nulls."""
    types = pa.types
    return any(test(kind) for test in (types.is_integer, types.is_floating, types.is_boolean, types.is_null))


def _check_text(pa: Any, batch: Any, path: Path) -> None:
    """Refuse the file before a text too long for a row is copied into every row that holds it."""
    from pyarrow import compute as pc

    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        texts = column.dictionary if pa.types.is_dictionary(column.type) else column
        if pa.types.is_string(texts.type) or pa.types.is_binary(texts.type) or pa.types.is_large_string(texts.type):
            longest = pc.max(pc.binary_length(texts)).as_py() or 0
            if longest > 4 * MAX_TEXT:
                raise InvalidProfileError(f"{path}: {name} must be at most {MAX_TEXT} characters, got {longest} bytes")


def _whole_floats(row: dict[str, Any]) -> dict[str, Any]:
    """The row with whole numbers made floats where those belong: JSON and Parquet writers alike drop the point."""
    for name in _FLOATS:
        value = row.get(name)
        if type(value) is int and abs(value) <= 1 << 53:
            row[name] = float(value)
    return row


def _json_lines(path: Path) -> Iterator[Item]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > MAX_ROW_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                yield number, f"a row must have at most {MAX_ROW_BYTES} bytes"
            elif line.strip():
                yield number, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(line.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, huge ints, repeated names
        return f"not a JSON object: {shorten(str(error))}"
    if not isinstance(row, dict):
        return f"not a JSON object: {shorten(row)}"
    return _whole_floats(row)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a name is given twice")
    return row


class _Lines:
    """Lines of a text file; raises where a row, which may span lines, grows past MAX_ROW_BYTES."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file, self._path, self.used = file, path, 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(MAX_ROW_BYTES + 1):
            self.used += len(line)
            if self.used > MAX_ROW_BYTES:
                raise InvalidProfileError(f"{self._path}: a row must have at most {MAX_ROW_BYTES} characters")
            yield line


def _records(path: Path) -> Iterator[list[str]]:
    """The fields of each record of a CSV file, the header first; InvalidProfileError where it is none."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _Lines(file, path)
            for fields in csv.reader(lines, strict=True):
                lines.used = 0
                if fields:
                    yield fields
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidProfileError(f"{path} is not CSV that can be read: {shorten(str(error))}") from error


def _csv(path: Path) -> Iterator[Item]:
    records = _records(path)
    header = next(records, [])
    _check_header(header, path)
    for number, fields in enumerate(records, start=1):
        yield number, _csv_row(header, fields)


def _csv_row(header: list[str], fields: list[str]) -> dict[str, Any] | str:
    if len(fields) != len(header):
        return f"a row must have {len(header)} fields, got {len(fields)}"
    return {name: _parse(name, text) for name, text in zip(header, fields, strict=True)}


def _parse(name: str, text: str) -> Any:
    """The typed value that a CSV field stands for; text that stands for none stays text, for `check_row` to refuse."""
    if not text and name in _NULLABLE:
        return None
    kind = _TYPES[name]
    if kind is int and _INT.fullmatch(text):
        return int(text)
    if kind is float and _FLOAT.fullmatch(text):
        return float(text)
    return text
