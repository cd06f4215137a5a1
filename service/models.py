"""What the catalogue notes about models. Which one is in force, the registry says, and nobody else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tilewise.models import registry
from tilewise.models.bundle import Bundle
from tilewise.service.catalogue import Catalogue, rows_of
from tilewise.service.tables import events, models


def summary_of(bundle: Bundle) -> dict[str, Any]:
    """The parts of a manifest that a list of models shows."""
    manifest = bundle.manifest
    kept = {name: manifest[name] for name in ("metrics", "data", "training", "noise_margin", "kernel_hashes")}
    return {"model_id": bundle.model_id, **kept}


def store_model(catalogue: Catalogue, bundle: Bundle, home: Path, job_id: str | None = None) -> Path:
    """Keep a bundle beside those that were in force, without putting it there: it can be compared, and promoted."""
    folder = registry.store(bundle, home)
    record_model(catalogue, bundle, job_id)
    return folder


def record_model(catalogue: Catalogue, bundle: Bundle, job_id: str | None = None) -> None:
    """Note a stored bundle, once."""
    values = {
        "digest": bundle.digest, "op": bundle.op, "arch": bundle.arch.name, "stored_at": time.time(), "job_id": job_id,
        "summary": summary_of(bundle),
    }  # fmt: skip
    with catalogue.write() as connection:
        connection.execute(catalogue.insert(models).values(values).on_conflict_do_nothing())


def record_event(catalogue: Catalogue, action: str, op: str, arch: str, model_id: str | None, by: str | None) -> None:
    """Note that another model came into force."""
    values = {"at": time.time(), "op": op, "arch": arch, "action": action, "model_id": model_id, "by": by}
    with catalogue.write() as connection:
        connection.execute(sa.insert(events).values(values))


def events_of(connection: sa.Connection, op: str, arch: str, limit: int = 100) -> list[dict[str, Any]]:
    """The latest changes of the model in force, the newest first."""
    query = sa.select(events).where((events.c.op == op) & (events.c.arch == arch))
    return rows_of(connection.execute(query.order_by(events.c.id.desc()).limit(limit)))
