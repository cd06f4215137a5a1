"""The app: its parts put together. What each does is in the module of its name."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from tilewise import __version__
from tilewise.service.access import Guard
from tilewise.service.asking import ask_routes, model_header
from tilewise.service.catalogue import CatalogueError
from tilewise.service.job_routes import job_routes, jobs_by_state
from tilewise.service.metrics import Count
from tilewise.service.model_routes import model_routes
from tilewise.service.page import page_routes
from tilewise.service.parts import Service
from tilewise.service.problems import ERRORS, Problem, add_problems
from tilewise.service.profile_routes import profile_routes
from tilewise.service.remembered import Memory, Remember
from tilewise.service.settings import Settings
from tilewise.service.shape_routes import shape_routes

_DESCRIPTION = """
Picks how to launch GPU attention-indexer kernels, from measured timings.

Every answer names the model behind it, in the header `Tilewise-Model` and as `model_id` in decisions. Errors are
problem details (RFC 9457); where a value is at fault, `errors` names its field.
"""


def create_app(
    *,
    home: str | os.PathLike[str] | None = None,
    arch_names: Iterable[str] | None = None,
    settings: Settings | None = None,
    tokens_needed: bool = False,
    hosts: frozenset[str] | None = None,
) -> FastAPI:
    """The app, answering for `arch_names` from models in `home`. None is every known GPU; the first is the default.

    `settings` are those of the environment when left out. `tokens_needed` and `hosts` are what `serve` makes of the
    address that it listens on: whether callers need a token, and the names that the service may be called by.
    """
    service = Service(settings or Settings.from_env(home=home), arch_names, tokens_needed, hosts)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.watcher.start()
        yield
        await asyncio.to_thread(service.watcher.stop)
        service.catalogue.dispose()

    app = FastAPI(
        title="tilewise",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        # Their pages load scripts from an outside host.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={status: {"model": Problem, "description": text} for status, text in ERRORS.items()},
    )
    app.state.service = service
    memory = Memory(service.selectors)
    app.add_middleware(Remember, memory=memory)
    app.add_middleware(Guard, access=service.access, common=service.common_headers)
    app.add_middleware(Count, metrics=service.metrics)
    add_problems(app, service.common_headers, service.selectors.also_wrong)
    app.include_router(ask_routes(service.selectors, memory))
    app.include_router(profile_routes(service))
    app.include_router(shape_routes(service))
    app.include_router(job_routes(service))
    app.include_router(model_routes(service))
    app.include_router(page_routes(service))
    _add_state(app, service)
    return app


def _add_state(app: FastAPI, service: Service) -> None:
    selectors = service.selectors

    @app.get("/healthz", summary="Whether the process answers", tags=["state"])
    async def healthz() -> Response:
        """Always the same, as long as there is an answer at all."""
        return JSONResponse({"status": "ok"}, headers=model_header(selectors.model_id()))

    @app.get("/readyz", summary="Whether shapes are answered, and by which models", tags=["state"])
    async def readyz() -> Response:
        """The model of each GPU served, and what is wrong with it; without a model, answers are the default config.

        `catalogue` is empty, or says why uploads and jobs are refused; selections are answered all the same.
        """
        archs = {
            name: {"model_id": selector.model_id, "problem": selector.problem}
            for name, selector in selectors.by_arch.items()
        }
        try:
            await asyncio.to_thread(jobs_by_state, service.catalogue)
            problem = ""
        except CatalogueError as error:
            problem = str(error)
        content = {"status": "ok", "default_arch": selectors.default, "archs": archs, "catalogue": problem}
        return JSONResponse(content, headers=model_header(selectors.model_id()))

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response, tags=["state"])
    async def metrics() -> Response:
        """Requests, latency, fallbacks by reason, the model of each GPU and jobs by state, over all workers."""
        content, media_type = await asyncio.to_thread(_figures, service)
        return Response(content, media_type=media_type, headers=model_header(selectors.model_id()))


def _figures(service: Service) -> tuple[bytes, str]:
    served = [
        ({"arch": name, "model_id": selector.model_id or "none"}, 1.0)
        for name, selector in service.selectors.by_arch.items()
    ]
    live: list[tuple[str, str, list[Any]]] = [("tilewise_model", "The model that answers for a GPU", served)]
    try:
        states = [({"state": state}, float(number)) for state, number in jobs_by_state(service.catalogue).items()]
        live.append(("tilewise_jobs", "Jobs by state", states))
        live.append(("tilewise_catalogue_up", "Whether the catalogue answers", [({}, 1.0)]))
    except CatalogueError:
        live.append(("tilewise_catalogue_up", "Whether the catalogue answers", [({}, 0.0)]))
    return service.metrics.text(live)
