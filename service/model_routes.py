"""Routes for models: list, manifest, artifact, promote, roll back, and what another model would change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Header, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from tilewise.data.traffic import Traffic
from tilewise.dispatch.artifact import MEDIA_TYPE, pack
from tilewise.dispatch.comparing import compare
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidBundleError
from tilewise.models import registry
from tilewise.models.bundle import Bundle
from tilewise.service.asking import model_header
from tilewise.service.catalogue import rows_of
from tilewise.service.compare import CompareAnswer
from tilewise.service.files import DIGEST, reconcile, stored_models
from tilewise.service.messages import CompareRequest, unserved
from tilewise.service.models import events_of, record_event
from tilewise.service.parts import Service, caller_of
from tilewise.service.problems import FieldProblem, StrictRoute
from tilewise.service.shape_routes import counted_shapes
from tilewise.service.tables import models
from tilewise.service.times import shown
from tilewise.service.traffic import traffic_of

Arch = Annotated[str | None, Query(max_length=64, description="GPU; the service's first when left out")]
IfNoneMatch = Annotated[str | None, Header()]
MAX_DIFF_SHAPES = 2000
_MISSING: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such model"}}
_SAME: dict[int | str, dict[str, Any]] = {304: {"description": "Still the same"}, **_MISSING}


class StoredModel(BaseModel):
    """One stored version."""

    digest: str
    model_id: str
    op: str
    arch: str
    current: bool = Field(description="whether it is in force")
    stored_at: str
    job_id: str | None = Field(description="of the job that made it")
    metrics: dict[str, Any]
    data: dict[str, Any]


class ModelList(BaseModel):
    """Stored versions of an op on a GPU, the newest first, and how the one in force came and went."""

    op: str
    arch: str
    current: str | None = Field(description="model id of the one that answers")
    history: list[str] = Field(description="digests that were in force, the present one first")
    models: list[StoredModel]
    events: list[dict[str, Any]]


class InForce(BaseModel):
    """Which model is in force now."""

    op: str
    arch: str
    model_id: str | None
    digest: str | None


def model_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=StrictRoute, tags=["models"])
    selectors, home = service.selectors, service.settings.home

    @router.get("/v1/models", summary="Stored models", response_model=ModelList)
    async def listed(arch: Arch = None) -> Response:
        """Every stored version of a GPU with its figures, and which one is in force."""
        selector = selectors.selector(arch)
        content = await asyncio.to_thread(_listed, service, selector)
        return JSONResponse(content, headers=model_header(selector.model_id))

    @router.get("/v1/models/current", summary="The model that answers", responses=_SAME)
    async def current_model(arch: Arch = None, if_none_match: IfNoneMatch = None) -> Response:
        """The manifest of the bundle: what it was trained on, its metrics and hashes. Its digest is the ETag."""
        bundle = _answering(selectors.selector(arch))
        return _manifest(bundle, if_none_match)

    @router.get(
        "/v1/models/current/artifact", summary="The bundle that answers, as a zip", response_class=Response,
        responses={200: {"content": {MEDIA_TYPE: {}}}, **_SAME},
    )  # fmt: skip
    async def current_artifact(arch: Arch = None, if_none_match: IfNoneMatch = None) -> Response:
        """The files of the bundle, not compressed. Ask with `If-None-Match`: a 304 says that nothing changed."""
        selector = selectors.selector(arch)
        bundle = _answering(selector)
        if _known(bundle.digest, if_none_match):
            return Response(status_code=304, headers=_tag(bundle.digest, bundle.model_id))
        stored = stored_models(home).get(bundle.digest) or registry.shipped(selector.op, selector.arch.name)
        return await _artifact(stored, bundle.digest, bundle.model_id)

    @router.get("/v1/models/{digest}", summary="One stored model", responses=_SAME)
    async def model(digest: str, if_none_match: IfNoneMatch = None) -> Response:
        """Its manifest."""
        return _manifest(await asyncio.to_thread(_load, home, digest), if_none_match)

    @router.get(
        "/v1/models/{digest}/artifact", summary="One stored bundle, as a zip", response_class=Response,
        responses={200: {"content": {MEDIA_TYPE: {}}}, **_SAME},
    )  # fmt: skip
    async def artifact(digest: str, if_none_match: IfNoneMatch = None) -> Response:
        """The files of the bundle, not compressed."""
        bundle = await asyncio.to_thread(_load, home, digest)
        if _known(digest, if_none_match):
            return Response(status_code=304, headers=_tag(digest, bundle.model_id))
        return await _artifact(stored_models(home)[digest], digest, bundle.model_id)

    @router.post(
        "/v1/models/{digest}/promote", summary="Put a model in force", response_model=InForce, responses=_MISSING
    )
    async def promote(request: Request, digest: str) -> Response:
        """Every worker answers from it within a second, and engines that follow the service a little later."""
        by = caller_of(request).name

        def put() -> dict[str, Any]:
            bundle = _load(home, digest)
            registry.promote(bundle.op, bundle.arch.name, digest, home)
            _reload(service, bundle.arch.name)
            record_event(service.catalogue, "promote", bundle.op, bundle.arch.name, bundle.model_id, by)
            return {"op": bundle.op, "arch": bundle.arch.name, "model_id": bundle.model_id, "digest": bundle.digest}

        content = await asyncio.to_thread(put)
        return JSONResponse(content, headers=model_header(content["model_id"]))

    @router.post(
        "/v1/models/rollback", summary="Go back to the model before", response_model=InForce,
        responses={409: {"description": "There is nothing to go back to"}},
    )  # fmt: skip
    async def rollback(request: Request, arch: Arch = None) -> Response:
        """Put the version that was in force before the present one in force again; after the first, the shipped one."""
        selector = selectors.selector(arch)
        by = caller_of(request).name

        def back() -> dict[str, Any]:
            op, name = selector.op, selector.arch.name
            try:
                folder = registry.rollback(op, name, home)
            except InvalidBundleError as error:
                raise HTTPException(409, _public(error, home)) from error
            bundle = Bundle.load(folder) if folder.is_dir() else None
            model_id = None if bundle is None else bundle.model_id
            _reload(service, name)
            record_event(service.catalogue, "rollback", op, name, model_id, by)
            return {"op": op, "arch": name, "model_id": model_id, "digest": bundle and bundle.digest}

        content = await asyncio.to_thread(back)
        return JSONResponse(content, headers=model_header(content["model_id"]))

    @router.get(
        "/v1/models/{digest}/diff",
        summary="What a model would change",
        response_model=CompareAnswer,
        responses=_MISSING,
    )
    async def diff(
        digest: str,
        against: Annotated[str, Query(max_length=64, description="a digest, `current` or `shipped`")] = "current",
        limit: Annotated[int, Query(ge=1, le=MAX_DIFF_SHAPES)] = 500,
    ) -> Response:
        """Its picks beside those of another model, over the shapes that engines launch and those it has timings of.

        Only shapes whose pick changes are listed, those with the largest expected effect first.
        """

        def answer() -> dict[str, Any]:
            new = _selector(service, digest, None)
            old = _selector(service, against, new.arch.name)
            with service.catalogue.read() as connection:
                live = traffic_of(connection, new.op, new.arch.name, limit)
            counts = {one.shape: one.count for one in live if not unserved(one.shape, new.arch)}
            if new.bundle is not None:
                for at in range(len(new.bundle.exact)):
                    counts.setdefault(new.bundle.exact.shape(at), 1.0)
            traffic = [Traffic(shape, count) for shape, count in counts.items()]
            return compare(old, new, traffic[:limit]).to_dict()

        return JSONResponse(await asyncio.to_thread(answer))

    @router.post("/v1/compare", summary="Two models, shape by shape", response_model=CompareAnswer, responses=_MISSING)
    async def compare_models(request: CompareRequest) -> Response:
        """The picks of two models for the same shapes, with what each expects, and what was measured."""
        selector = selectors.selector(request.arch)

        def answer() -> dict[str, Any]:
            traffic = counted_shapes(request.shapes, selector)
            name = selector.arch.name
            old = _selector(service, request.old, name, "old")
            return compare(old, _selector(service, request.new, name, "new"), traffic).to_dict()

        return JSONResponse(await asyncio.to_thread(answer))

    return router


def _reload(service: Service, arch: str) -> None:
    """Let this worker answer from the new model at once; the others see it at their next look."""
    if (selector := service.selectors.by_arch.get(arch)) is not None and selector.reload():
        service.selectors.loads += 1


def _answering(selector: Selector) -> Bundle:
    if selector.bundle is None:
        raise HTTPException(404, selector.problem)
    return selector.bundle


def _known(digest: str, if_none_match: str | None) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return f'"{digest}"' in tags or "*" in tags


def _tag(digest: str, model_id: str) -> dict[str, str]:
    return {**model_header(model_id), "ETag": f'"{digest}"', "Cache-Control": "no-cache"}


def _manifest(bundle: Bundle, if_none_match: str | None) -> Response:
    headers = _tag(bundle.digest, bundle.model_id)
    if _known(bundle.digest, if_none_match):
        return Response(status_code=304, headers=headers)
    return JSONResponse({"model_id": bundle.model_id, **bundle.manifest}, headers=headers)


async def _artifact(folder: Path, digest: str, model_id: str) -> Response:
    try:
        content = await asyncio.to_thread(pack, folder)
    except OSError as error:
        raise HTTPException(404, "The stored model is damaged") from error
    return Response(content, media_type=MEDIA_TYPE, headers=_tag(digest, model_id))


def _load(home: Path, digest: str) -> Bundle:
    """A stored version, whole. Raises a 404 for none, InvalidBundleError for a damaged one."""
    folder = stored_models(home).get(digest) if DIGEST.fullmatch(digest) else None
    if folder is None:
        raise HTTPException(404, "There is no stored model of this digest")
    try:
        return registry.load_version(folder, folder.parents[2].name, folder.parents[1].name)
    except InvalidBundleError as error:
        raise InvalidBundleError(_public(error, home)) from error


def _selector(service: Service, name: str, arch: str | None, field: str = "against") -> Selector:
    """Who picks as the model named does: a digest, `current` or `shipped`."""
    if name in ("current", "shipped"):
        current = service.selectors.selector(arch)
        if name == "current":
            return current
        if not (folder := registry.shipped(current.op, current.arch.name)).is_dir():
            raise HTTPException(404, f"No model of {current.arch.name} is shipped")
        return service.selectors.of_bundle(folder, current.arch.name)
    bundle = _load(service.settings.home, name)
    if arch is not None and bundle.arch.name != arch:
        raise FieldProblem([(field, f"must be a model of {arch}, got one of {bundle.arch.name}")])
    return service.selectors.of_bundle(stored_models(service.settings.home)[name], bundle.arch.name)


def _public(error: InvalidBundleError, home: Path) -> str:
    return str(error).replace(f"{home}/", "")


def _listed(service: Service, selector: Selector) -> Mapping[str, Any]:
    op, arch, home = selector.op, selector.arch.name, service.settings.home
    reconcile(service.catalogue, home)
    query = sa.select(models).where((models.c.op == op) & (models.c.arch == arch)).order_by(models.c.stored_at.desc())
    with service.catalogue.read() as connection:
        rows = rows_of(connection.execute(query.limit(200)))
        changes = events_of(connection, op, arch)
    return {
        "op": op,
        "arch": arch,
        "current": selector.model_id,
        "history": registry.history(op, arch, home),
        "models": [
            {
                **{name: row[name] for name in ("digest", "op", "arch", "job_id")},
                **{name: row["summary"].get(name) for name in ("model_id", "metrics", "data")},
                "current": selector.bundle is not None and selector.bundle.digest == row["digest"],
                "stored_at": shown(row["stored_at"]),
            }
            for row in rows
        ],
        "events": [{**one, "at": shown(one["at"])} for one in changes],
    }
