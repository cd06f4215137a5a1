"""Profile files: what the home holds, brought in line with what the catalogue says of it, and what killed processes
left behind."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tilewise.data.convert import require_pyarrow
from tilewise.errors import InvalidBundleError
from tilewise.models.bundle import Bundle
from tilewise.service.catalogue import Catalogue, rows_of
from tilewise.service.jobs import ENDED
from tilewise.service.models import summary_of
from tilewise.service.tables import files, jobs, models

DIGEST = re.compile(r"[0-9a-f]{64}")
LEFT_S = 3600  # what nobody has touched for so long was left by a killed process


def stored_files(home: Path) -> dict[str, Path]:
    """Imported profile files by digest."""
    return {path.stem: path for path in (home / "profiles").glob("*/*/*.parquet") if DIGEST.fullmatch(path.stem)}


def stored_models(home: Path) -> dict[str, Path]:
    """Stored bundles by digest."""
    found = (home / "models").glob("*/*/versions/*/manifest.json")
    return {path.parent.name: path.parent for path in found if DIGEST.fullmatch(path.parent.name)}


def reconcile(catalogue: Catalogue, home: Path) -> None:
    """Make the catalogue say what the home holds: the files are the truth."""
    _, pq = require_pyarrow()
    on_disk, bundles = stored_files(home), stored_models(home)
    with catalogue.read() as connection:
        known = set(connection.execute(sa.select(files.c.digest)).scalars())
        known_models = set(connection.execute(sa.select(models.c.digest)).scalars())
    new: list[tuple[sa.Table, dict[str, Any]]] = []
    for digest in on_disk.keys() - known:
        path = on_disk[digest]
        with contextlib.suppress(Exception):  # a damaged file is no profile; loading one says so
            rows, found = pq.read_metadata(path).num_rows, path.stat()
            new.append((files, {
                "digest": digest, "op": path.parent.parent.name, "arch": path.parent.name, "rows": rows,
                "bytes": found.st_size, "added_at": found.st_mtime,
            }))  # fmt: skip
    for digest in bundles.keys() - known_models:
        with contextlib.suppress(InvalidBundleError, OSError):
            bundle, found = Bundle.load(bundles[digest]), bundles[digest].stat()
            new.append((models, {
                "digest": digest, "op": bundle.op, "arch": bundle.arch.name, "stored_at": found.st_mtime,
                "summary": summary_of(bundle),
            }))  # fmt: skip
    gone, gone_models = known - on_disk.keys(), known_models - bundles.keys()
    if not (new or gone or gone_models):
        return
    with catalogue.write() as connection:
        for table, values in new:
            connection.execute(catalogue.insert(table).values(values).on_conflict_do_nothing())
        for digest in gone:
            connection.execute(sa.delete(files).where(files.c.digest == digest))
        for digest in gone_models:
            connection.execute(sa.delete(models).where(models.c.digest == digest))


def clear_left(catalogue: Catalogue, home: Path) -> list[Path]:
    """Remove what killed processes left: uploads, halves of models and pointers, folders of jobs that ended."""
    old = [
        *(home / "incoming").glob("*"),
        *(home / "models").glob("*/*/.current.*"),
        *(home / "models").glob("*/*/versions/.*"),
    ]
    removed = [path for path in old if _untouched(path)]
    with catalogue.read() as connection:
        query = sa.select(jobs.c.id).where(~jobs.c.state.in_(ENDED))
        living = {row["id"] for row in rows_of(connection.execute(query))}
    removed += [path for path in (home / "jobs").glob("*") if path.name not in living and _untouched(path)]
    for path in removed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return removed


def _untouched(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > LEFT_S
    except OSError:
        return False
