"""Profile rows as Arrow tables and Parquet files: schema, row hashes, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.data.convert import require_pyarrow
from tilewise.data.records import COLUMN_NAMES, COLUMNS, shorten
from tilewise.errors import InvalidProfileError

ROW_GROUP_ROWS = 1 << 16
CHUNK_ROWS = 1 << 12  # rows held as Python objects, which are large, before they become Arrow's
_INCOMING = ".incoming-"
_HOUR_S = 3600  # a living import writes far more often


def schema() -> Any:
    """The Arrow schema of a profile."""
    pa, _ = require_pyarrow()
    kinds = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    return pa.schema([pa.field(c.name, kinds[c.type], nullable=c.nullable) for c in COLUMNS])


def read_table(path: Path) -> Any:
    """All rows of a file in our schema; InvalidProfileError where it is damaged or has others."""
    pa, pq = require_pyarrow()
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
        missing = [name for name in COLUMN_NAMES if name not in table.column_names]
        if missing:
            raise InvalidProfileError(f"{path} lacks the column {missing[0]!r}")
        return table.select(list(COLUMN_NAMES)).cast(schema())
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InvalidProfileError):
            raise
        raise InvalidProfileError(f"{path} cannot be read: {shorten(str(error))}") from error


def row_hashes(table: Any) -> list[bytes]:
    """Sixteen bytes for each row of an Arrow table with the schema's columns: equal rows, and only they, are equal.

    Text that is null counts as empty, and -0.0 as 0.0; the files' encoding plays no part.
    """
    hashes: list[bytes] = []
    for start in range(0, table.num_rows, CHUNK_ROWS):
        cells = _cells(table.slice(start, CHUNK_ROWS))
        hashes += [hashlib.blake2b(row, digest_size=16).digest() for row in cells]
    return hashes


def _cells(table: Any) -> npt.NDArray[np.uint8]:
    """[rows, bytes]: a text as the hash of it, a number as its eight bytes and whether it is there."""
    parts = []
    for column in COLUMNS:
        array = _one_array(table.column(column.name))
        if column.type is str:
            values, index = _dictionary(array)
            keys = [hashlib.blake2b(value.encode(), digest_size=16).digest() for value in values]
            parts.append(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)[index])
        else:
            numbers = array.fill_null(0).to_numpy(zero_copy_only=False)
            numbers = numbers.astype("<i8") if column.type is int else numbers.astype("<f8") + 0.0
            parts.append(np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 8))
            parts.append(array.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8).reshape(-1, 1))
    return np.concatenate(parts, axis=1)


def digest_of(hashes: Iterable[bytes]) -> str:
    """The digest of a set of rows from their hashes, in any order and however often each occurs."""
    return hashlib.sha256(b"tilewise rows 1\n" + b"".join(sorted(set(hashes)))).hexdigest()


def clear_left(folder: Path) -> None:
    """Remove what killed processes left under this folder: unfinished files that nobody has written to for an hour."""
    for left in folder.rglob(f"{_INCOMING}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _HOUR_S:
                left.unlink()


class IncomingFile:
    """A Parquet file under way: rows go in, and it appears under its name when it is complete, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[Mapping[str, Any]] = []
        self._tables: list[Any] = []
        self.hashes: dict[bytes, None] = {}
        self.duplicates = 0

    def __enter__(self) -> IncomingFile:
        _, pq = require_pyarrow()
        self._folder.mkdir(parents=True, exist_ok=True)
        clear_left(self._folder)
        handle, name = tempfile.mkstemp(prefix=_INCOMING, dir=self._folder)
        self._temporary = Path(name)
        self._file = os.fdopen(handle, "wb")
        self._writer = pq.ParquetWriter(self._file, schema(), compression="zstd", compression_level=9)
        return self

    def __exit__(self, *exc: object) -> None:
        # What was published is synced by now; the rest goes, also where closing it fails for a full disk.
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one good row."""
        self._rows.append(row)
        if len(self._rows) >= CHUNK_ROWS:
            self._convert()
        if sum(table.num_rows for table in self._tables) >= ROW_GROUP_ROWS:
            self.flush()

    def _convert(self) -> None:
        """Move the rows held into Arrow, without those that the file has already."""
        pa, _ = require_pyarrow()
        table = pa.Table.from_pylist(self._rows, schema=schema())
        self._rows = []
        kept = []
        for at, key in enumerate(row_hashes(table)):
            if key in self.hashes:
                self.duplicates += 1
            else:
                self.hashes[key] = None
                kept.append(at)
        self._tables.append(table.take(pa.array(kept, pa.int64())))

    def flush(self) -> None:
        """Write what is held; `hashes` and `duplicates` then count every row added."""
        pa, _ = require_pyarrow()
        self._convert()
        table = pa.concat_tables(self._tables)
        self._tables = []
        if table.num_rows:
            self._writer.write_table(table)

    def publish(self, final: Path, *, mode: int) -> str:
        """Put the file in its final place, durably, and return the digest of its rows."""
        self.flush()
        self._writer.close()
        self._file.flush()
        os.fchmod(self._file.fileno(), mode)
        os.fsync(self._file.fileno())
        self._temporary.rename(final)
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, must survive a power cut
        finally:
            os.close(folder)
        return digest_of(self.hashes)


def _one_array(column: Any) -> Any:
    pa, _ = require_pyarrow()
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _dictionary(array: Any) -> tuple[list[str], npt.NDArray[Any]]:
    """(different texts, index of each row's among them)"""
    coded = array.fill_null("").dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False)


def to_numpy(column: Any) -> npt.NDArray[Any]:
    """A column as int64, float64 (also ints with nulls, which become nan) or an object array of str."""
    pa, _ = require_pyarrow()
    array = _one_array(column)
    if pa.types.is_string(array.type):
        values, index = _dictionary(array)
        texts: npt.NDArray[Any] = np.array(values, dtype=object)[index]
        return texts
    return np.asarray(array.to_numpy(zero_copy_only=False))
