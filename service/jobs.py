"""Jobs as the catalogue has them: who may run one, how far it is, how it ended.

One job of an op and arch runs at a time, and one more may wait; the database itself sees to both. Whoever runs a job
holds a lease on it, and every word about a job is written only as long as that lease is held.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tilewise.errors import TilewiseError
from tilewise.service.catalogue import Catalogue, rows_of
from tilewise.service.tables import job_log, jobs, shadow_picks

# In this order. Each leaves what the next needs in the job's folder, so that a job goes on where it was cut off.
STAGES = ("import", "train", "evaluate", "gate", "shadow", "promote")
ENDED = ("promoted", "stopped", "failed", "cancelled")
STATES = ("queued", "running", *ENDED)
MAX_LOG_LINES = 10_000


class JobQueuedError(TilewiseError, RuntimeError):
    """A job of this op and arch waits already; `job_id` names it."""

    def __init__(self, job_id: str, op: str, arch: str) -> None:
        super().__init__(f"job {job_id} of {op} on {arch} waits already, and will see all rows that there are by then")
        self.job_id = job_id


class LostJobError(TilewiseError, RuntimeError):
    """This process no longer holds the job: it was taken over, cancelled or ended."""


@dataclass(frozen=True)
class Lease:
    """The right to run one job, for as long as it is renewed."""

    job_id: str
    owner: str


def job_folder(home: Path, job_id: str) -> Path:
    """Where a job keeps its parts."""
    return home / "jobs" / job_id


def create(
    catalogue: Catalogue,
    connection: sa.Connection,
    *,
    op: str,
    arch: str,
    parameters: Mapping[str, Any],
    by: str | None = None,
) -> str:
    """Queue a retraining; its id. Raises JobQueuedError where one waits already."""
    job_id = uuid.uuid4().hex
    values = {
        "id": job_id, "op": op, "arch": arch, "parameters": dict(parameters), "state": "queued", "stage": STAGES[0],
        "done": 0, "total": 0, "reason": "", "result": {}, "attempt": 0, "cancel": False, "lease_until": 0.0,
        "created_at": time.time(), "created_by": by,
    }  # fmt: skip
    insert = catalogue.insert(jobs).values(values).on_conflict_do_nothing()
    if connection.execute(insert.returning(jobs.c.id)).first() is None:
        where = (jobs.c.op == op) & (jobs.c.arch == arch) & (jobs.c.state == "queued")
        raise JobQueuedError(connection.execute(sa.select(jobs.c.id).where(where)).scalar() or "", op, arch)
    return job_id


def get(connection: sa.Connection, job_id: str) -> dict[str, Any] | None:
    """One job, or None."""
    found = rows_of(connection.execute(sa.select(jobs).where(jobs.c.id == job_id)))
    return found[0] if found else None


def claim(catalogue: Catalogue, owner: str, *, lease_s: float, attempts: int) -> dict[str, Any] | None:
    """Take a job: one whose runner fell silent, else the one that waited longest and may run. None where there is none.

    A job that was started `attempts` times, and lost its process each time, ends as failed.
    """
    now = time.time()
    with catalogue.write() as connection:
        silent = (jobs.c.state == "running") & (jobs.c.lease_until < now)
        query = sa.select(jobs).where(silent).order_by(jobs.c.created_at)
        for job in rows_of(connection.execute(query.with_for_update(skip_locked=True))):
            if job["cancel"]:
                _end(connection, job, "cancelled", "cancelled while nobody ran it")
            elif job["attempt"] >= attempts:
                why = f"its process died {job['attempt']} times, the last time in the stage {job['stage']}"
                _end(connection, job, "failed", why)
            else:
                say(connection, job["id"], f"taken up again in the stage {job['stage']}: its process was gone")
                return _take(connection, job, owner, now + lease_s)
        busy = jobs.alias()
        runs = sa.exists().where((busy.c.op == jobs.c.op) & (busy.c.arch == jobs.c.arch) & (busy.c.state == "running"))
        query = sa.select(jobs).where((jobs.c.state == "queued") & ~runs).order_by(jobs.c.created_at).limit(1)
        for job in rows_of(connection.execute(query.with_for_update(skip_locked=True))):
            return _take(connection, job, owner, now + lease_s)
    return None


def _take(connection: sa.Connection, job: dict[str, Any], owner: str, until: float) -> dict[str, Any]:
    changes = {
        "state": "running", "owner": owner, "lease_until": until, "attempt": job["attempt"] + 1,
        "started_at": job["started_at"] or time.time(),
    }  # fmt: skip
    connection.execute(sa.update(jobs).where(jobs.c.id == job["id"]).values(changes))
    return {**job, **changes}


def renew(catalogue: Catalogue, lease: Lease, lease_s: float) -> bool:
    """Hold the lease for longer, and say whether the job is to be cancelled. Raises LostJobError where it is lost."""
    with catalogue.write() as connection:
        _update(connection, lease, lease_until=time.time() + lease_s)
        return bool(connection.execute(sa.select(jobs.c.cancel).where(jobs.c.id == lease.job_id)).scalar())


def hand_back(catalogue: Catalogue, lease: Lease) -> None:
    """Let another take the job up at once; this start of it does not count."""
    with catalogue.write() as connection:
        _update(connection, lease, lease_until=0.0, attempt=jobs.c.attempt - 1)


def report(catalogue: Catalogue, lease: Lease, text: str = "", **changes: Any) -> None:
    """Write down progress: a line for the log, and new values of the job. Raises LostJobError where it is lost."""
    with catalogue.write() as connection:
        _update(connection, lease, **changes)
        if text:
            say(connection, lease.job_id, text)


def end(catalogue: Catalogue, lease: Lease, state: str, reason: str, **changes: Any) -> None:
    """The end of a job that this process holds. Raises LostJobError where it is lost."""
    with catalogue.write() as connection:
        _update(connection, lease, **changes)
        job = get(connection, lease.job_id)
        if job is not None:
            _end(connection, job, state, reason)


def cancel(catalogue: Catalogue, job_id: str) -> dict[str, Any] | None:
    """Cancel a job: at once where it waits; its runner stops it where it runs. None where there is none such."""
    with catalogue.write() as connection:
        job = get(connection, job_id)
        if job is None or job["state"] in ENDED:
            return job
        waits = (jobs.c.id == job_id) & (jobs.c.state == "queued")
        if connection.execute(sa.update(jobs).where(waits).values(cancel=True)).rowcount:
            _end(connection, job, "cancelled", "cancelled before it began")
        else:
            connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(cancel=True))
            say(connection, job_id, "is to be cancelled")
        return get(connection, job_id)


def say(connection: sa.Connection, job_id: str, text: str) -> None:
    """One line for a job's log."""
    lines = connection.execute(sa.select(sa.func.count()).where(job_log.c.job_id == job_id)).scalar() or 0
    if lines < MAX_LOG_LINES:
        connection.execute(sa.insert(job_log).values(job_id=job_id, at=time.time(), text=text[:4000]))


def log_of(connection: sa.Connection, job_id: str, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
    """Lines of a job's log, those after line number `after`."""
    query = sa.select(job_log.c.id, job_log.c.at, job_log.c.text).where(job_log.c.job_id == job_id)
    return rows_of(connection.execute(query.where(job_log.c.id > after).order_by(job_log.c.id).limit(limit)))


def shadow_of(connection: sa.Connection, job_id: str) -> list[dict[str, Any]]:
    """What the candidate of a job picked beside the picks that were answered, the most asked first."""
    query = sa.select(shadow_picks).where(shadow_picks.c.job_id == job_id).order_by(shadow_picks.c.requests.desc())
    return rows_of(connection.execute(query))


def _end(connection: sa.Connection, job: Mapping[str, Any], state: str, reason: str) -> None:
    changes = {"state": state, "reason": reason, "owner": None, "lease_until": 0.0, "ended_at": time.time()}
    connection.execute(sa.update(jobs).where(jobs.c.id == job["id"]).values(changes))
    say(connection, job["id"], f"{state}: {reason}")


def _update(connection: sa.Connection, lease: Lease, **changes: Any) -> None:
    held = (jobs.c.id == lease.job_id) & (jobs.c.owner == lease.owner) & (jobs.c.state == "running")
    if not changes:
        found = connection.execute(sa.select(jobs.c.id).where(held)).first() is not None
    else:
        found = bool(connection.execute(sa.update(jobs).where(held).values(changes)).rowcount)
    if not found:
        raise LostJobError(f"job {lease.job_id} is no longer ours")
