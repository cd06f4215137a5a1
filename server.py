"""The REST service: `POST /v1/select`, `/v1/rank`, `/v1/explain`, and which model answers.

Handlers only translate: dispatch.selector decides, so that a service and an import give the same answer. A background
task looks at the registry twice a second and swaps a newly published model in; every worker does so by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Query, Response
from fastapi.responses import JSONResponse

from tilewise import __version__
from tilewise.data.records import shorten
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidShapeError, TilewiseError
from tilewise.kernels.arch import ARCHS, get_arch
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.server_listen import adopt, is_loopback, listen
from tilewise.server_messages import ExplainAnswer, LaunchRequest, RankAnswer, RankRequest, SelectAnswer, unserved
from tilewise.server_problems import ERRORS, FieldProblem, Problem, add_problems

POLL_S = 0.5
MODEL_HEADER = "Tilewise-Model"  # id of the model behind an answer, also on errors; "none" without one
OP = "paged_mqa_logits"
SETTINGS = "TILEWISE_SERVICE"  # variable that hands the settings to worker processes

_log = logging.getLogger("tilewise.server")
_DESCRIPTION = """
Picks how to launch GPU attention-indexer kernels, from measured timings.

Every answer names the model behind it, in the header `Tilewise-Model` and as `model_id` in decisions. Errors are
problem details (RFC 9457); where a value is at fault, `errors` names its field.
"""


class Service:
    """The selectors behind one app: one for each GPU served."""

    def __init__(self, home: str | os.PathLike[str] | None, arch_names: Iterable[str] | None) -> None:
        names = [name for name in ARCHS if name != "cpu"] if arch_names is None else list(arch_names)
        if not names:
            raise ValueError("arch_names must name at least one GPU, got none")
        self.selectors = {get_arch(name).name: Selector(get_arch(name), op=OP, home=home) for name in names}
        self.default = next(iter(self.selectors))

    def selector(self, arch: str | None) -> Selector:
        """The selector of a GPU, also under the name of its ISA; a 422 that names the field where it is not served."""
        if message := self.refusal(arch):
            raise FieldProblem([("arch", message)])
        return self.selectors[self.default if arch is None else get_arch(arch).name]

    def refusal(self, arch: object) -> str | None:
        """Why this service does not answer for `arch`, or None."""
        with contextlib.suppress(TilewiseError):
            if arch is None or (isinstance(arch, str) and get_arch(arch).name in self.selectors):
                return None
        return f"must be one of {', '.join(self.selectors)}, got {shorten(arch)}"

    def also_wrong(self, body: object) -> list[tuple[str, str]]:
        """(field, message) of a body's values that the request model does not judge."""
        message = self.refusal(body.get("arch")) if isinstance(body, dict) else None
        return [("arch", message)] if message else []

    def question(self, request: LaunchRequest) -> tuple[Selector, spec.Shape]:
        """Who answers, and the shape; a 422 that names every field at fault."""
        found = self.also_wrong({"arch": request.arch})
        try:
            shape = request.shape()
        except InvalidShapeError as error:
            field, _, message = str(error).partition(" ")
            raise FieldProblem([*found, (field, message)]) from error
        selector = self.selector(request.arch)
        if fields := unserved(shape, selector.arch):
            raise FieldProblem(fields)
        return selector, shape

    def model_id(self) -> str:
        """The model of the default GPU, for answers that concern no GPU in particular."""
        return self.selectors[self.default].model_id or "none"

    async def follow(self) -> None:
        """Swap in every model that is published from now on. What cannot be loaded is logged, and the last one kept."""
        while True:
            await asyncio.sleep(POLL_S)
            for name, selector in self.selectors.items():
                try:
                    # In a thread: reading a bundle takes longer than an answer may wait.
                    await asyncio.to_thread(selector.reload)
                except Exception:
                    _log.exception("the model of %s stays as it is", name)


def create_app(*, home: str | os.PathLike[str] | None = None, arch_names: Iterable[str] | None = None) -> FastAPI:
    """The app, answering for `arch_names` from models in `home`. None is every known GPU; the first is the default."""
    service = Service(home, arch_names)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        follower = asyncio.create_task(service.follow())
        yield
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower

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
    add_problems(app, lambda: {MODEL_HEADER: service.model_id()}, service.also_wrong)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/select", summary="The config to launch", response_model=SelectAnswer)
    async def select(request: LaunchRequest) -> Response:
        """One decision: config, predicted time, margin to the runner-up, source, regime and reason."""
        selector, shape = service.question(request)
        decision = selector.select(shape)
        content = {**_question(selector, shape), **decision.to_dict()}
        return JSONResponse(content, headers=_model(decision.model_id))

    @app.post("/v1/rank", summary="Every candidate, best first", response_model=RankAnswer)
    async def rank(request: RankRequest) -> Response:
        """Configs on offer with their times: the chosen one, then the others from the fastest to the slowest."""
        selector, shape = service.question(request)
        model_id, ranked = None, None
        while ranked is None or selector.model_id != model_id:  # once more where a new model came in between
            model_id = selector.model_id
            ranked = selector.rank(shape)[: request.limit]
        content = {**_question(selector, shape), "ranked": [one.to_dict() for one in ranked], "model_id": model_id}
        return JSONResponse(content, headers=_model(model_id))

    @app.post("/v1/explain", summary="Why this config and no other", response_model=ExplainAnswer)
    async def explain(request: LaunchRequest) -> Response:
        """The decision, each rejected candidate with its reason, and the nearest measured shapes."""
        selector, shape = service.question(request)
        explained = selector.explain(shape)
        content = {"op": selector.op, **explained.to_dict()}
        return JSONResponse(content, headers=_model(explained.decision.model_id))

    @app.get("/v1/models/current", summary="The model that answers", responses={304: {"description": "Still the same"}})
    async def current_model(
        arch: Annotated[str | None, Query(max_length=64, description="GPU; the service's first when left out")] = None,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        """The manifest of the bundle: what it was trained on, its metrics and hashes. Its digest is the ETag."""
        selector = service.selector(arch)
        bundle = selector.bundle
        if bundle is None:
            raise HTTPException(404, selector.problem)
        etag = f'"{bundle.digest}"'
        headers = {**_model(bundle.model_id), "ETag": etag, "Cache-Control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
        if etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return JSONResponse({"model_id": bundle.model_id, **bundle.manifest}, headers=headers)

    @app.get("/healthz", summary="Whether the process answers")
    async def healthz() -> Response:
        """Always the same, as long as there is an answer at all."""
        return JSONResponse({"status": "ok"}, headers=_model(service.model_id()))

    @app.get("/readyz", summary="Whether shapes are answered, and by which models")
    async def readyz() -> Response:
        """The model of each GPU served, and what is wrong with it; without a model, answers are the default config."""
        archs = {
            name: {"model_id": selector.model_id, "problem": selector.problem}
            for name, selector in service.selectors.items()
        }
        content = {"status": "ok", "default_arch": service.default, "archs": archs}
        return JSONResponse(content, headers=_model(service.model_id()))


def _question(selector: Selector, shape: spec.Shape) -> dict[str, Any]:
    return {"op": selector.op, "arch": selector.arch.name, "shape": shape.to_dict()}


def _model(model_id: str | None) -> dict[str, str]:
    return {MODEL_HEADER: model_id or "none"}


def app_from_environment() -> FastAPI:
    """The app as `serve` describes it to the processes that it starts."""
    settings = json.loads(os.environ[SETTINGS])
    return create_app(home=settings["home"], arch_names=settings["arch_names"] or None)


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    arch_names: Iterable[str] = (),
    workers: int = 1,
    home: str | os.PathLike[str] | None = None,
    log_level: str = "info",
    fd: int | None = None,
) -> None:
    """Run the service until it is stopped. `arch_names` empty is every known GPU; `fd` is an open socket to serve on.

    Raises OSError where the address or the socket cannot be listened on.
    """
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    names = [get_arch(name).name for name in arch_names]  # a wrong one is refused here, not in each worker
    os.environ[SETTINGS] = json.dumps({"home": None if home is None else os.fspath(home), "arch_names": names})
    listeners = listen(host, port) if fd is None else [adopt(fd)]
    host, port = host if fd is None else listeners[0].getsockname()[0], listeners[0].getsockname()[1]
    if not is_loopback(host):
        _log.warning("%s is no loopback address: whoever reaches it may ask, there is no authentication", host)
    config = uvicorn.Config(
        "tilewise.server:app_from_environment",
        factory=True,
        host=host,
        port=port,
        workers=workers,
        log_level=log_level,
        server_header=False,
        timeout_graceful_shutdown=10,
    )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    logging.getLogger("uvicorn.error").info("Serving on http://%s (Press CTRL+C to quit)", address)
    server = uvicorn.Server(config)
    if workers == 1:
        config.load_app()
        server.run(sockets=listeners)
        if not server.started:
            sys.exit(1)
        return
    wanted = inspect.signature(Multiprocess).parameters  # older versions of uvicorn are given the target
    Multiprocess(config, sockets=listeners, **({"target": server.run} if "target" in wanted else {})).run()


def main() -> None:
    """`python -m tilewise.server` is `tilewise serve`."""
    from tilewise.cli import main as run

    sys.exit(run(["serve", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
