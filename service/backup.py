"""Backup and restore: one tar file with the profiles, the models and, as JSON, the tables of the catalogue.

The tables are read first, in one transaction. Files never change once they have their name, so that whatever is added
meanwhile is either in the file or not, and the catalogue is brought in line when it is restored.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
import time
import zlib
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tilewise.data.records import shorten
from tilewise.errors import TilewiseError
from tilewise.service.catalogue import Catalogue, rows_of
from tilewise.service.files import reconcile
from tilewise.service.tables import REVISION, metadata

TABLES = "catalogue.json"
FOLDERS = ("profiles", "models")
BATCH = 1000


class BackupError(TilewiseError, RuntimeError):
    """A backup cannot be written, or put back where it was to go."""


def backup(catalogue: Catalogue, home: Path, target: Path) -> int:
    """Write a backup, whole or not at all; how many files it has."""
    tables = _tables(catalogue)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    number = 0
    try:
        with tarfile.open(scratch, "w") as archive:
            _add(archive, TABLES, json.dumps({"revision": REVISION, "tables": tables}).encode())
            for path in _files(home):
                try:
                    data = path.read_bytes()
                except FileNotFoundError:  # deleted since it was listed
                    continue
                _add(archive, str(path.relative_to(home)), data)
                number += 1
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return number


def _belongs(home: Path, member: tarfile.TarInfo) -> bool:
    """Whether this is a folder, or a file within one of a home's."""
    folder = (home / member.name.partition("/")[0]).resolve()
    return member.isdir() or (member.isfile() and folder in (home / member.name).resolve().parents)


def _put_back(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    # Not `extractall(filter="data")`, which Python before 3.10.12 and 3.11.4 does not know.
    content = archive.extractfile(member)
    assert content is not None, "it is a file"
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as target:
        shutil.copyfileobj(content, target)
    os.utime(path, (member.mtime, member.mtime))


def restore(catalogue: Catalogue, home: Path, source: Path) -> int:
    """Put a backup back, whole or not at all; how many files it had. BackupError where there is anything already."""
    if any(_files(home)):
        raise BackupError(f"{home} must have no profiles and no models")
    with catalogue.read() as connection:
        for table in metadata.sorted_tables:
            if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar():
                raise BackupError(f"the catalogue must be empty, got rows in {table.name}")
    written: list[Path] = []
    try:
        with tarfile.open(source) as archive:
            tables = _tables_of(archive)
            members = [one for one in archive.getmembers() if one.name.partition("/")[0] in FOLDERS]
            for member in members:
                if not _belongs(home, member):
                    raise ValueError(f"it has {member.name!r}, which is no file of a home")
            with catalogue.write() as connection:  # rows before files, as they may not fit
                for table in metadata.sorted_tables:
                    _insert(connection, table, tables.get(table.name, []))
                    _continue_numbers(catalogue, connection, table)
                for member in (one for one in members if one.isfile()):
                    written.append(home / member.name)
                    _put_back(archive, member, home / member.name)
    except BaseException as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, _NO_BACKUP):
            raise BackupError(f"{source} is no backup: {error}") from error
        raise
    reconcile(catalogue, home)
    return len(written)


# What reading a file raises that is none of ours, or damaged.
_NO_BACKUP = (tarfile.TarError, zlib.error, EOFError, KeyError, ValueError, OverflowError, RecursionError)


def _tables_of(archive: tarfile.TarFile) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table in a backup. Raises ValueError or KeyError where there are none."""
    found = archive.extractfile(TABLES)
    content = json.load(found) if found is not None else None
    if not isinstance(content, dict) or content.get("revision") != REVISION:
        got = content.get("revision") if isinstance(content, dict) else None
        raise ValueError(f"it must be of revision {REVISION}, got {shorten(got)}")
    tables = content.get("tables")
    if not isinstance(tables, dict) or not all(isinstance(rows, list) for rows in tables.values()):
        raise ValueError(f"{TABLES} must have the rows of each table")
    return tables


def _insert(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Put rows of a backup into a table. Raises ValueError where they do not fit."""
    for row in rows:
        if not isinstance(row, dict) or row.keys() != set(table.c.keys()):
            raise ValueError(f"a row of {table.name} must have {', '.join(table.c.keys())}, got {shorten(row)}")
        if wrong := [column.name for column in table.c if not _may_be(column, row[column.name])]:
            raise ValueError(f"a row does not fit into {table.name}: {wrong[0]} is {shorten(row[wrong[0]])}")
    try:
        for start in range(0, len(rows), BATCH):
            connection.execute(sa.insert(table), [_restored(table, row) for row in rows[start : start + BATCH]])
    except sa.exc.OperationalError:  # of the database
        raise
    except sa.exc.StatementError as error:
        raise ValueError(f"a row does not fit into {table.name}: {error.orig}") from error


def _may_be(column: sa.Column[Any], value: Any) -> bool:
    if isinstance(column.type, sa.JSON):
        return True
    if value is None:
        return bool(column.nullable)
    return isinstance(value, (int, float) if isinstance(column.type, sa.Float) else column.type.python_type)


def _tables(catalogue: Catalogue) -> dict[str, list[dict[str, Any]]]:
    with catalogue.read() as connection:
        if catalogue.dialect == "postgresql":
            connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        return {table.name: rows_of(connection.execute(sa.select(table))) for table in metadata.sorted_tables}


def _restored(table: sa.Table, row: dict[str, Any]) -> dict[str, Any]:
    if table.name == "jobs" and row["state"] in ("running", "queued"):  # what they had done is not in the backup
        why = "was under way at the time of the backup"
        return {**row, "state": "failed", "reason": why, "owner": None, "lease_until": 0.0, "ended_at": time.time()}
    return row


def _continue_numbers(catalogue: Catalogue, connection: sa.Connection, table: sa.Table) -> None:
    """PostgreSQL counts ids apart from the rows: from the last one on."""
    if catalogue.dialect != "postgresql" or "id" not in table.c or not isinstance(table.c.id.type, sa.Integer):
        return
    last = connection.execute(sa.select(sa.func.max(table.c.id))).scalar() or 0
    sequence = sa.func.pg_get_serial_sequence(table.name, "id")
    connection.execute(sa.select(sa.func.setval(sequence, last + 1, False)))


def _files(home: Path) -> list[Path]:
    """Everything but halves and locks, whose names begin with a dot."""
    found = [path for folder in FOLDERS for path in sorted((home / folder).rglob("*")) if path.is_file()]
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(home).parts)]


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o644
    archive.addfile(entry, io.BytesIO(data))
