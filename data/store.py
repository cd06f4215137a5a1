"""Profile files: what is shipped, what was imported, and how rows become immutable files.

An imported file is named by the hash of its rows and never changes. It is written beside its final place, synced and
renamed, so that a kill leaves the old state or the new one, never a torn file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.data.convert import read_rows, require_pyarrow
from tilewise.data.home import home_dir
from tilewise.data.records import COLUMN_NAMES, check_row, shorten
from tilewise.data.table import IncomingFile, clear_left, digest_of, read_table, row_hashes, schema, to_numpy
from tilewise.errors import InvalidProfileError

MAX_REASONS = 1000  # reasons that an ImportReport holds; on_reject sees them all
MAX_ARCHS = 64  # archs in one file
_STORED = re.compile(r"[0-9a-f]{64}\.parquet")


@dataclass(frozen=True, slots=True)
class Profile:
    """The rows of one op on one arch, each once, in an order that depends on the rows alone."""

    # int64, float64 (also ints that may be null: null is nan), or objects of str (null is "").
    columns: dict[str, npt.NDArray[Any]]
    digest: str  # over the rows: the same for the same rows, however they are filed

    def __len__(self) -> int:
        return len(self.columns["schema_version"])


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of imported rows, or the shipped one that has all of them already."""

    op: str
    arch: str
    path: str
    digest: str
    rows: int
    new: bool  # False: the store had it already


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What became of the rows of one imported file."""

    accepted: int = 0  # good rows, each counted once
    duplicates: int = 0  # good rows that the file holds again
    rejected: int = 0
    shipped: int = 0  # good rows that tilewise comes with; a file of these alone is not stored again
    reasons: list[tuple[int, str]] = field(default_factory=list)  # (row number, why), at most MAX_REASONS of them
    files: list[StoredFile] = field(default_factory=list)
    left_out: int = 0  # timings that training passes over: of no graph replay, or of a warm cache

    @property
    def new(self) -> bool:
        """Whether the store holds more than before."""
        return any(file.new for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def load_profile(op: str, arch: str, *, home: str | os.PathLike[str] | None = None) -> Profile:
    """Shipped and imported rows of `op` on `arch`; an empty profile where there are none.

    Raises InvalidProfileError for a file that is damaged or of another schema, UnsupportedError without pyarrow.
    """
    pa, _ = require_pyarrow()
    tables = [schema().empty_table()]
    hashes: list[bytes] = []
    for path in profile_files(op, arch, home=home):
        table = read_table(path)
        own = row_hashes(table)
        if _STORED.fullmatch(path.name) and digest_of(own) != path.stem:
            raise InvalidProfileError(f"{path} is damaged: its rows do not hash to its name")
        tables.append(table)
        hashes += own
    table = pa.concat_tables(tables)
    # S16 compares whole: both sides are 16 bytes, so padding decides nothing.
    _, first = np.unique(np.array(hashes, dtype="S16"), return_index=True)
    table = table.take(pa.array(first))
    return Profile({name: to_numpy(table.column(name)) for name in COLUMN_NAMES}, digest_of(hashes))


def profile_files(op: str, arch: str, *, home: str | os.PathLike[str] | None = None) -> list[Path]:
    """The files that hold the rows of `op` on `arch`: the shipped one first, where there is one."""
    shipped = _shipped(op, arch)
    folder = _folder(op, arch, home)
    imported = sorted(p for p in folder.iterdir() if _STORED.fullmatch(p.name)) if folder.is_dir() else []
    return [shipped, *imported] if shipped.is_file() else imported


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> str:
    """Write rows to one Parquet file at `path`, atomically, and return the digest of its rows.

    Raises InvalidProfileError, naming the row, at the first that `check_row` refuses; nothing is written then.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with IncomingFile(path.parent) as incoming:
        for number, row in enumerate(rows, start=1):
            if reason := check_row(row):
                raise InvalidProfileError(f"row {number}: {reason}")
            incoming.add(row)
        return incoming.publish(path, mode=0o644)


def import_file(
    path: str | os.PathLike[str],
    home: str | os.PathLike[str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    on_reject: Callable[[int, str], None] | None = None,
) -> ImportReport:
    """Check every row of a Parquet, JSON lines or CSV file and add the good ones to the imported profiles.

    T4 results and aiter's tuned tables are taken, too; `defaults` are columns that those lack.

    `on_reject` is called with the number and the reason of each bad row as it is met. Importing the same rows again
    changes nothing. Raises InvalidProfileError, and adds nothing, where the file as a whole cannot be read or has no
    rows, UnsupportedError without pyarrow.
    """
    require_pyarrow()
    path = Path(path)
    clear_left(home_dir(home) / "profiles")
    accepted = duplicates = rejected = shipped = left_out = 0
    reasons: list[tuple[int, str]] = []
    with contextlib.ExitStack() as stack:
        incoming: dict[tuple[str, str], IncomingFile] = {}
        for number, row in read_rows(path, defaults):
            reason = row if isinstance(row, str) else check_row(row)
            if reason is None and not isinstance(row, str):
                key = (row["op"], row["arch"])
                if key not in incoming and len(incoming) == MAX_ARCHS:
                    reason = f"a file must hold at most {MAX_ARCHS} archs, got {shorten(key[1])} beyond them"
                else:
                    if key not in incoming:
                        incoming[key] = stack.enter_context(IncomingFile(_folder(*key, home)))
                    incoming[key].add(row)
                    cold_graph = row["timing_method"] == "graph" and row["cache_state"] == "cold"
                    left_out += row["status"] == "correct" and not cold_graph
            if reason is not None:
                rejected += 1
                if len(reasons) < MAX_REASONS:
                    reasons.append((number, reason))
                if on_reject is not None:
                    on_reject(number, reason)
        if not incoming and not rejected:
            raise InvalidProfileError(f"{path} has no rows")
        files = []
        for (op, arch), batch in incoming.items():
            batch.flush()
            digest = digest_of(batch.hashes)
            known = _shipped_among(batch.hashes, op, arch)
            whole = known == len(batch.hashes)
            final = _shipped(op, arch) if whole else _folder(op, arch, home) / f"{digest}.parquet"
            new = not whole and not _holds(final, digest)
            if new:
                batch.publish(final, mode=0o444)
            accepted += len(batch.hashes)
            duplicates += batch.duplicates
            shipped += known
            files.append(StoredFile(op, arch, str(final), digest, len(batch.hashes), new))
    return ImportReport(accepted, duplicates, rejected, shipped, reasons, files, left_out)


def _shipped(op: str, arch: str) -> Path:
    """Where the rows of `op` on `arch` are that come with tilewise, whether or not there are any."""
    return Path(str(resources.files("tilewise"))) / "data" / "profiles" / op / f"{arch}.parquet"


def _shipped_among(hashes: Iterable[bytes], op: str, arch: str) -> int:
    """How many of these rows tilewise comes with."""
    path = _shipped(op, arch)
    return len(set(row_hashes(read_table(path))).intersection(hashes)) if path.is_file() else 0


def _folder(op: str, arch: str, home: str | os.PathLike[str] | None) -> Path:
    return home_dir(home) / "profiles" / op / arch


def _holds(path: Path, digest: str) -> bool:
    """Whether the file is there and its rows are those that its name promises."""
    try:
        return path.is_file() and digest_of(row_hashes(read_table(path))) == digest
    except InvalidProfileError:
        return False
