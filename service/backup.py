"""Backup and restore: one tar file with the profiles, the models and, as JSON, the tables of the catalogue.

The tables are read first, in one transaction. Files never change once they have their name, so that whatever is added
meanwhile is either in the file or not, and the catalogue is brought in line when it is restored.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

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


def _inside(home: Path, name: str) -> bool:
    return (home / name).resolve().is_relative_to(home.resolve())


def _put_back(archive: tarfile.TarFile, member: tarfile.TarInfo, home: Path) -> None:
    # Not `extractall(filter="data")`, which Python before 3.10.12 and 3.11.4 does not know.
    content = archive.extractfile(member)
    if content is None:  # a folder
        return
    path = home / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as target:
        shutil.copyfileobj(content, target)
    os.utime(path, (member.mtime, member.mtime))


def restore(catalogue: Catalogue, home: Path, source: Path) -> int:
    """Put a backup back; how many files it had. Raises BackupError where there is anything already."""
    if any(_files(home)):
        raise BackupError(f"{home} must have no profiles and no models")
    with catalogue.read() as connection:
        for table in metadata.sorted_tables:
            if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar():
                raise BackupError(f"the catalogue must be empty, got rows in {table.name}")
    try:
        with tarfile.open(source) as archive:
            members = archive.getmembers()
            found = archive.extractfile(TABLES)
            content = json.load(found) if found is not None else {}
            if content.get("revision") != REVISION:
                raise BackupError(f"{source} must be of revision {REVISION}, got {content.get('revision')!r}")
            files = [one for one in members if one.name.partition("/")[0] in FOLDERS]
            for member in files:
                if not (member.isfile() or member.isdir()) or not _inside(home, member.name):
                    raise BackupError(f"{source} is no backup: it has {member.name!r}, which is no file of a home")
            for member in files:
                _put_back(archive, member, home)
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise BackupError(f"{source} is no backup: {error}") from error
    with catalogue.write() as connection:
        for table in metadata.sorted_tables:
            rows = [_restored(table, row) for row in content["tables"].get(table.name, [])]
            for start in range(0, len(rows), BATCH):
                connection.execute(sa.insert(table), rows[start : start + BATCH])
            _continue_numbers(catalogue, connection, table)
    reconcile(catalogue, home)
    return len([one for one in files if one.isfile()])


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
