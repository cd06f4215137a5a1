"""Routes for profiles: upload, list, fetch, delete."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, Field

from tilewise.data.exchange import parse_defaults
from tilewise.errors import InvalidProfileError
from tilewise.service.catalogue import rows_of, save_answer, saved_answer
from tilewise.service.files import DIGEST, reconcile, stored_files
from tilewise.service.importing import NO_ROOM, Importer, ImportStoppedError
from tilewise.service.parts import IDEMPOTENCY_HEADER, Service, answer_key, caller_of
from tilewise.service.problems import FieldProblem, Problem, StrictRoute
from tilewise.service.tables import answers, files
from tilewise.service.times import shown

WRITE_BYTES = 1 << 20
PARQUET = "application/vnd.apache.parquet"
MEDIA_TYPES = (PARQUET, "application/x-ndjson", "text/csv", "application/json", "application/octet-stream")
MAX_NAMED_ROWS = 100
UNDER_WAY = 0  # status of an answer that there is not yet


class RejectedRow(BaseModel):
    """One row that was not taken."""

    row: int = Field(description="from 1: of the line in JSON lines, else after the header")
    reason: str


class StoredProfile(BaseModel):
    """One file of the store."""

    digest: str = Field(description="over its rows; the name under which it is fetched")
    op: str
    arch: str
    rows: int


class UploadAnswer(BaseModel):
    """What became of the rows of an upload."""

    accepted: int = Field(description="good rows, each counted once")
    duplicates: int = Field(description="good rows that the upload holds again")
    shipped: int = Field(description="good rows that tilewise comes with")
    rejected: int
    left_out: int = Field(description="timings that training passes over: of no graph replay, or of a warm cache")
    reasons: list[RejectedRow] = Field(description="the first thousand of them")
    files: list[StoredProfile] = Field(description="where the good rows are now; one file for each op and GPU")


class ProfileFile(StoredProfile):
    """One file, as the list has it."""

    bytes: int
    added_at: str
    added_by: str | None


class ProfileList(BaseModel):
    """Files, the newest first."""

    profiles: list[ProfileFile]


def profile_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/v1/profiles", route_class=StrictRoute, tags=["profiles"])
    importer = Importer(service.settings)
    home, catalogue = service.settings.home, service.catalogue
    body = {
        "required": True,
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA_TYPES},
    }
    header = {
        "name": IDEMPOTENCY_HEADER, "in": "header", "schema": {"type": "string", "maxLength": 128},
        "description": "sent again within a day, it gives the first answer again",
    }  # fmt: skip

    @router.post(
        "", summary="Upload a profile", status_code=201, response_model=UploadAnswer,
        responses={
            200: {"description": "All of it was there already", "model": UploadAnswer},
            507: {"description": "The disk of the service is full", "model": Problem},
        },
        openapi_extra={"requestBody": body, "parameters": [header]},
    )  # fmt: skip
    async def upload(
        request: Request,
        default: Annotated[
            list[str] | None,
            Query(max_length=64, description="COLUMN=VALUE for what a T4 or aiter file lacks, such as arch=mi355x"),
        ] = None,
    ) -> Response:
        """Check every row and keep the good ones, durably by the time of the answer.

        The body is a profile file: Parquet, JSON lines or CSV, Kernel Tuner's T4 results or one of aiter's tuned
        tables, told apart by content, whatever the media type says.
        Rows that were there already are taken again without change.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "Content-Encoding must be identity")
        try:
            defaults = parse_defaults(default or ())
        except InvalidProfileError as error:
            raise FieldProblem([("default", str(error))]) from error
        key = answer_key(request)
        with _incoming(home) as path:
            fingerprint = await _to_disk(request.stream(), path, str(sorted(defaults.items())))
            if key and (answer := await asyncio.to_thread(_claim, service, key, fingerprint)) is not None:
                return answer
            try:
                report = await importer.run(path, {"defaults": defaults})
            except InvalidProfileError as error:
                raise FieldProblem([("body", str(error))]) from error
            except ImportStoppedError as error:
                raise HTTPException(503, str(error), {"Retry-After": "5"}) from error
        for outcome in ("accepted", "duplicates", "rejected"):
            service.metrics.rows.labels(outcome).inc(report[outcome])
        if not report["accepted"]:
            raise FieldProblem([(f"row {number}", reason) for number, reason in report["reasons"][:MAX_NAMED_ROWS]])
        return await asyncio.to_thread(_keep, service, report, caller_of(request).name, key)

    @router.get("", summary="Uploaded profiles", response_model=ProfileList)
    async def profiles(
        op: Annotated[str | None, Query(max_length=64)] = None,
        arch: Annotated[str | None, Query(max_length=64)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> Response:
        """The files of the store, the newest first. What tilewise comes with is not among them."""
        return JSONResponse({"profiles": await asyncio.to_thread(_listed, service, op, arch, limit)})

    @router.get(
        "/{digest}", summary="The rows of one file", response_class=FileResponse,
        responses={200: {"content": {PARQUET: {}}}, 404: {"description": "There is none of this digest"}},
    )  # fmt: skip
    async def profile(digest: str) -> Response:
        """The Parquet file."""
        found = await asyncio.to_thread(_find, home, digest)
        headers = {"ETag": f'"{digest}"', "Cache-Control": "max-age=31536000, immutable"}
        return FileResponse(found, media_type=PARQUET, filename=found.name, headers=headers)

    @router.delete(
        "/{digest}", summary="Take rows back", status_code=204, response_class=Response,
        responses={404: {"description": "There is none of this digest"}},
    )  # fmt: skip
    async def delete(digest: str) -> Response:
        """Remove a file. Models that were trained on it stay; the next one goes without."""
        found = await asyncio.to_thread(_find, home, digest)

        def remove() -> None:
            found.unlink(missing_ok=True)
            with catalogue.write() as connection:
                connection.execute(sa.delete(files).where(files.c.digest == digest))

        await asyncio.to_thread(remove)
        return Response(status_code=204)

    return router


@contextlib.contextmanager
def _incoming(home: Path) -> Iterator[Path]:
    """A place for an upload, until it is dealt with. Raises a 507 where the disk is full."""
    folder = home / "incoming"
    path = folder / uuid.uuid4().hex
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise HTTPException(507, f"The file cannot be stored: {error.strerror}") from error
    finally:
        path.unlink(missing_ok=True)


async def _to_disk(chunks: AsyncIterator[bytes], path: Path, beside: str) -> str:
    """Write a body to disk as it comes, and return the sha256 of what is asked `beside` it, and of it.

    Threads write, so that the others are answered.
    """
    digest = hashlib.sha256(beside.encode())
    held = bytearray()

    def write(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    with path.open("wb") as file:
        async for chunk in chunks:
            held += chunk
            if len(held) >= WRITE_BYTES:
                data, held = bytes(held), bytearray()
                await asyncio.to_thread(write, data)
        await asyncio.to_thread(write, bytes(held))
        await asyncio.to_thread(file.flush)
    return digest.hexdigest()


def _claim(service: Service, key: str, fingerprint: str) -> Response | None:
    """Keep the key for this upload, before its rows are stored. The answer where it was sent and answered before.

    Raises FieldProblem where another was sent under this key, also where that is under way.
    """
    with service.catalogue.write() as connection:
        save_answer(service.catalogue, key, fingerprint, UNDER_WAY, {}, connection)  # the first one stays
        saved = saved_answer(key, connection)
    if saved is None or saved["fingerprint"] != fingerprint:
        raise FieldProblem([(IDEMPOTENCY_HEADER, "was sent with another request")])
    if saved["status"] == UNDER_WAY:
        return None
    return JSONResponse(saved["body"], saved["status"], {"Idempotent-Replay": "true"})


def _keep(service: Service, report: dict[str, Any], by: str | None, key: str | None) -> Response:
    """Note what was stored, and make the answer."""
    content = {
        "accepted": report["accepted"],
        "duplicates": report["duplicates"],
        "shipped": report["shipped"],
        "rejected": report["rejected"],
        "left_out": report["left_out"],
        "reasons": [{"row": number, "reason": reason} for number, reason in report["reasons"]],
        "files": [{name: one[name] for name in ("digest", "op", "arch", "rows")} for one in report["files"]],
    }
    status = 201 if any(one["new"] for one in report["files"]) else 200
    catalogue, now = service.catalogue, time.time()
    with catalogue.write() as connection:
        for one in report["files"]:
            path = Path(one["path"])
            if DIGEST.fullmatch(path.stem):  # else they are rows that tilewise comes with
                values = {name: one[name] for name in ("digest", "op", "arch", "rows")}
                values |= {"bytes": path.stat().st_size, "added_at": now, "added_by": by}
                connection.execute(catalogue.insert(files).values(values).on_conflict_do_nothing())
        if key:
            claimed = (answers.c.key == key) & (answers.c.status == UNDER_WAY)
            connection.execute(sa.update(answers).where(claimed).values(status=status, body=content))
    return JSONResponse(content, status)


def _listed(service: Service, op: str | None, arch: str | None, limit: int) -> list[dict[str, Any]]:
    reconcile(service.catalogue, service.settings.home)
    query = sa.select(files).order_by(files.c.added_at.desc(), files.c.digest).limit(limit)
    for column, value in ((files.c.op, op), (files.c.arch, arch)):
        if value is not None:
            query = query.where(column == value)
    with service.catalogue.read() as connection:
        return [{**row, "added_at": shown(row["added_at"])} for row in rows_of(connection.execute(query))]


def _find(home: Path, digest: str) -> Path:
    """The stored file of a digest, looked up among those that there are. Raises a 404."""
    found = stored_files(home).get(digest) if DIGEST.fullmatch(digest) else None
    if found is None:
        raise HTTPException(404, "There is no uploaded profile of this digest")
    return found
