"""Routes for jobs: queue a retraining, follow it, cancel it."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tilewise.kernels.arch import get_arch
from tilewise.service import jobs as queue
from tilewise.service.catalogue import Catalogue, rows_of, save_answer, saved_answer
from tilewise.service.parts import IDEMPOTENCY_HEADER, Service, answer_key, caller_of
from tilewise.service.problems import FieldProblem, StrictRoute, problem_response
from tilewise.service.settings import Settings
from tilewise.service.tables import jobs
from tilewise.service.times import shown

MAX_SHADOW_REQUESTS = 10_000_000
State = Literal["queued", "running", "promoted", "stopped", "failed", "cancelled"]


class JobRequest(BaseModel):
    """What to train."""

    model_config = ConfigDict(
        strict=True, extra="forbid", json_schema_extra={"examples": [{"arch": "h200", "shadow_requests": 1000}]}
    )

    kind: Literal["retrain"] = "retrain"
    op: Literal["paged_mqa_logits"] = "paged_mqa_logits"
    arch: str | None = Field(None, max_length=64, description="GPU; the service's first when left out")
    seed: int = Field(0, ge=0, le=2**32 - 1)
    folds: int = Field(10, ge=0, le=1000, description="held-out folds behind the figures, 2 or more; 0: none are taken")
    shadow_requests: int | None = Field(
        None,
        ge=0,
        le=MAX_SHADOW_REQUESTS,
        description="live requests that the candidate must see; TILEWISE_SHADOW_REQUESTS",
    )
    shadow_timeout_s: float | None = Field(
        None, ge=0, le=30 * 86400, description="how long to wait for them; TILEWISE_SHADOW_TIMEOUT_S"
    )
    promote: bool = Field(True, description="false: the job stops before the promotion, and the candidate is kept")

    @field_validator("folds")
    @classmethod
    def _folds(cls, folds: int) -> int:
        if folds == 1:  # nothing would be left to train on
            raise ValueError("must be 0, or 2 to 1000")
        return folds

    def parameters(self, settings: Settings) -> dict[str, Any]:
        """What the job is told."""
        requests, timeout = self.shadow_requests, self.shadow_timeout_s
        return {
            "seed": self.seed,
            "folds": self.folds,
            "shadow_requests": settings.shadow_requests if requests is None else requests,
            "shadow_timeout_s": settings.shadow_timeout_s if timeout is None else timeout,
            "promote": self.promote,
        }


class Job(BaseModel):
    """A retraining."""

    id: str
    op: str
    arch: str
    state: State
    stage: str = Field(description="import, train, evaluate, gate, shadow or promote: where it is, or ended")
    done: int = Field(description="of `total`, within the stage")
    total: int
    reason: str = Field(description="why it ended as it did")
    parameters: dict[str, Any]
    result: dict[str, Any] = Field(description="rows, candidate, held-out figures, verdicts, as far as known")
    attempt: int = Field(description="starts; more than one where its process died")
    created_at: str
    created_by: str | None
    started_at: str | None
    ended_at: str | None


class JobList(BaseModel):
    """Jobs, the newest first."""

    jobs: list[Job]


class LogLine(BaseModel):
    """One line of a job's log."""

    id: int
    at: str
    text: str


class JobLog(BaseModel):
    """Lines of a job's log; ask again with `after` the last id for what comes later."""

    lines: list[LogLine]


def job_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/v1/jobs", route_class=StrictRoute, tags=["jobs"])
    missing: dict[int | str, dict[str, Any]] = {404: {"description": "There is none of this id"}}
    header = {
        "name": IDEMPOTENCY_HEADER, "in": "header", "schema": {"type": "string", "maxLength": 128},
        "description": "sent again within a day, it gives the first answer again",
    }  # fmt: skip

    @router.post(
        "", summary="Retrain", status_code=202, response_model=Job,
        responses={409: {"description": "One of this op and GPU waits already"}},
        openapi_extra={"parameters": [header]},
    )  # fmt: skip
    async def create(request: Request, wanted: JobRequest) -> Response:
        """Queue a retraining on all rows that there are when it begins.

        One of an op and GPU runs at a time, and one may wait. The candidate is trained, judged on held-out shapes, held
        against the model in force by the gate, watched on live requests, and put in force; or the job stops, and
        says why.
        """
        if message := service.selectors.refusal(wanted.arch):
            raise FieldProblem([("arch", message)])
        key = answer_key(request)
        return await asyncio.to_thread(_create, service, wanted, key, caller_of(request).name)

    @router.get("", summary="Jobs", response_model=JobList)
    async def listed(
        state: State | None = None,
        arch: Annotated[str | None, Query(max_length=64)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """Jobs, the newest first."""
        return JSONResponse({"jobs": await asyncio.to_thread(_listed, service.catalogue, state, arch, limit)})

    @router.get("/{job_id}", summary="One job", response_model=Job, responses=missing)
    async def job(job_id: str) -> Response:
        """State, stage and progress."""
        return JSONResponse(_shown(await asyncio.to_thread(_get, service.catalogue, job_id)))

    @router.get("/{job_id}/log", summary="What a job says", response_model=JobLog, responses=missing)
    async def log(
        job_id: str,
        after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> Response:
        """The lines of its log, from the first."""

        def lines() -> list[dict[str, Any]]:
            _get(service.catalogue, job_id)
            with service.catalogue.read() as connection:
                found = queue.log_of(connection, job_id, after, limit)
            return [{**line, "at": shown(line["at"])} for line in found]

        return JSONResponse({"lines": await asyncio.to_thread(lines)})

    @router.post("/{job_id}/cancel", summary="Cancel a job", status_code=202, response_model=Job, responses=missing)
    async def cancel(job_id: str) -> Response:
        """A job that waits ends at once; one that runs, within seconds. One that has ended stays as it is."""

        def cancelled() -> dict[str, Any]:
            _get(service.catalogue, job_id)
            return queue.cancel(service.catalogue, job_id) or {}

        return JSONResponse(_shown(await asyncio.to_thread(cancelled)), 202)

    return router


def jobs_by_state(catalogue: Catalogue) -> dict[str, int]:
    """How many jobs there are in each state. Raises CatalogueError."""
    query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
    with catalogue.read() as connection:
        found = {str(state): int(number) for state, number in connection.execute(query)}
    return {state: found.get(state, 0) for state in queue.STATES}


def _create(service: Service, wanted: JobRequest, key: str | None, by: str | None) -> Response:
    selectors, catalogue = service.selectors, service.catalogue
    arch = selectors.default if wanted.arch is None else get_arch(wanted.arch).name
    parameters = wanted.parameters(service.settings)
    fingerprint = hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()
    try:
        with catalogue.write() as connection:  # job and answer are kept together, or neither
            if key and (saved := saved_answer(key, connection)) is not None:
                if saved["fingerprint"] != fingerprint:
                    raise FieldProblem([(IDEMPOTENCY_HEADER, "was sent with another request")])
                headers = {"Location": f"/v1/jobs/{saved['body']['id']}", "Idempotent-Replay": "true"}
                return JSONResponse(saved["body"], saved["status"], headers)
            job_id = queue.create(catalogue, connection, op=wanted.op, arch=arch, parameters=parameters, by=by)
            content = _shown(queue.get(connection, job_id) or {})
            if key:
                save_answer(catalogue, key, fingerprint, 202, content, connection)
    except queue.JobQueuedError as error:
        headers = {**service.common_headers(), "Location": f"/v1/jobs/{error.job_id}"}
        return problem_response(409, str(error), headers=headers)
    return JSONResponse(content, 202, {"Location": f"/v1/jobs/{job_id}"})


def _get(catalogue: Catalogue, job_id: str) -> dict[str, Any]:
    if len(job_id) == 32 and job_id.isalnum() and job_id.isascii():
        with catalogue.read() as connection:
            if (found := queue.get(connection, job_id)) is not None:
                return found
    raise HTTPException(404, "There is no job of this id")


def _listed(catalogue: Catalogue, state: str | None, arch: str | None, limit: int) -> list[dict[str, Any]]:
    query = sa.select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id).limit(limit)
    for column, value in ((jobs.c.state, state), (jobs.c.arch, arch)):
        if value is not None:
            query = query.where(column == value)
    with catalogue.read() as connection:
        return [_shown(row) for row in rows_of(connection.execute(query))]


_HIDDEN = ("owner", "lease_until", "cancel")


def _shown(job: dict[str, Any]) -> dict[str, Any]:
    moments = {name: shown(job[name]) for name in ("created_at", "started_at", "ended_at")}
    return {name: value for name, value in {**job, **moments}.items() if name not in _HIDDEN}
