"""The REST service: `POST /v1/select`, `/v1/rank`, `/v1/explain`, and which model answers.

Handlers only translate: dispatch.selector decides, so that a service and an import give the same answer. A background
task looks at the registry twice a second and swaps a newly published model in; every worker does so by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, HTTPException, Query, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from tilewise import __version__
from tilewise.data.records import COLUMNS, shorten
from tilewise.dispatch.decision import Decision, Neighbour, Ranked, RegimeName, Rejected, Source
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidConfigError, InvalidShapeError, TilewiseError
from tilewise.kernels.arch import ARCHS, Arch, get_arch
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.server_listen import adopt, is_loopback, listen
from tilewise.server_problems import ERRORS, FieldProblem, Problem, add_problems

POLL_S = 0.5
MODEL_HEADER = "Tilewise-Model"  # id of the model behind an answer, also on errors; "none" without one
OP = "paged_mqa_logits"
SETTINGS = "TILEWISE_SERVICE"  # variable that hands the settings to worker processes

_log = logging.getLogger("tilewise.server")
_DOC = {column.name: column.doc for column in COLUMNS}
_DESCRIPTION = """
Picks how to launch GPU attention-indexer kernels, from measured timings.

Every answer names the model behind it, in the header `Tilewise-Model` and as `model_id` in decisions. Errors are
problem details (RFC 9457); where a value is at fault, `errors` names its field.
"""


# Decode of DeepSeek-V4.1-Flash with 5 draft tokens.
_EXAMPLE: JsonDict = {"arch": "h200", "batch_size": 16, "next_n": 6, "heads": 32, "max_context_len": 131072}


def _one_of(*allowed: int) -> Any:
    def check(value: int) -> int:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(map(str, allowed))}")
        return value

    # Not Literal: it lets true and 1.0 pass for 1.
    return AfterValidator(check)


class LaunchRequest(BaseModel):
    """A launch shape, and the GPU that it is for."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [_EXAMPLE]},
    )

    op: Literal["paged_mqa_logits"] = Field("paged_mqa_logits", description=_DOC["op"])
    arch: str | None = Field(None, max_length=64, description="GPU, as in /readyz; the service's first when left out")
    batch_size: int = Field(ge=0, le=spec.MAX_BATCH_SIZE, description=_DOC["batch_size"])
    next_n: int = Field(ge=1, le=spec.MAX_NEXT_N, description=_DOC["next_n"])
    heads: Annotated[int, _one_of(*spec.HEADS)] = Field(
        description=_DOC["heads"], json_schema_extra={"enum": list(spec.HEADS)}
    )
    head_dim: Annotated[int, _one_of(*spec.HEAD_DIMS)] = Field(
        128, description=_DOC["head_dim"], json_schema_extra={"enum": list(spec.HEAD_DIMS)}
    )
    block_kv: Annotated[int, _one_of(*spec.BLOCK_KVS)] = Field(
        64, description=_DOC["block_kv"], json_schema_extra={"enum": list(spec.BLOCK_KVS)}
    )
    max_context_len: int = Field(32768, ge=0, le=spec.MAX_CONTEXT_LEN, description=_DOC["max_context_len"])
    mean_context_len: int | None = Field(
        None, ge=0, le=spec.MAX_CONTEXT_LEN, description=f"{_DOC['mean_context_len']}; max_context_len when left out"
    )
    cache_layout: Literal["flat", "preshuffled"] = Field("flat", description=_DOC["cache_layout"])

    def shape(self) -> spec.Shape:
        """The shape asked about; InvalidShapeError where two values do not go together."""
        return spec.Shape(**{name: getattr(self, name) for name in spec.SHAPE_FIELDS})


class RankRequest(LaunchRequest):
    """A launch shape, the GPU that it is for, and how many configs are wanted."""

    limit: int | None = Field(None, ge=1, le=1 << 20, description="give the best so many only; all when left out")


class SelectAnswer(BaseModel):
    """A decision, and what it is for."""

    op: str
    arch: str
    shape: spec.Shape
    config: spec.Config
    predicted_us: float | None = Field(description="of the config, microseconds; null where nothing is known")
    margin: float | None = Field(
        description="the runner-up's time over the config's, less 1; negative where the runner-up is predicted "
        "faster, but not surely enough to replace the default"
    )
    runner_up: spec.Config | None
    source: Source = Field(description="the rung of the ladder that answered")
    regime: RegimeName = Field(description="inside what was measured, or beyond it")
    reason: str
    model_id: str | None = Field(description="null where there is no model")


class RankAnswer(BaseModel):
    """Every config on offer, the chosen one first."""

    op: str
    arch: str
    shape: spec.Shape
    ranked: list[Ranked]
    model_id: str | None


class ExplainAnswer(BaseModel):
    """A decision with everything that it was weighed against."""

    op: str
    arch: str
    shape: spec.Shape
    decision: Decision
    rejected: list[Rejected]
    nearest: list[Neighbour] = Field(description="measured shapes near this one")
    features: dict[str, float] = Field(description="what the model sees of the chosen config")
    floor_us: float = Field(description="no launch is much faster than this, microseconds")


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
        if fields := _unserved(shape, selector.arch):
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


# Fields that a kernel may refuse though the op allows them: what every kernel takes, and what the op allows.
_REFUSABLE: dict[str, tuple[object, tuple[object, ...]]] = {
    "cache_layout": ("flat", ("flat", "preshuffled")),
    "block_kv": (64, spec.BLOCK_KVS),
    "heads": (32, spec.HEADS),
}


def _unserved(shape: spec.Shape, arch: Arch) -> list[tuple[str, str]]:
    """(field, message) for each field that keeps the kernels of a GPU from serving a shape; none where one serves it.

    Raises InvalidConfigError where no value of these fields would do.
    """

    def served(base: spec.Shape, **changes: Any) -> bool:
        try:
            spec.default_config(dataclasses.replace(base, **changes), arch)
        except InvalidConfigError:
            return False
        return True

    if served(shape):
        return []
    base = dataclasses.replace(shape, **{field: usual for field, (usual, _) in _REFUSABLE.items()})  # type: ignore[arg-type]
    at_fault = [field for field in _REFUSABLE if not served(base, **{field: getattr(shape, field)})]
    if not at_fault:  # each would do alone
        base = shape
        at_fault = [field for field, (usual, _) in _REFUSABLE.items() if served(shape, **{field: usual})]
    found = []
    for field in at_fault:
        if allowed := [value for value in _REFUSABLE[field][1] if served(base, **{field: value})]:
            values = ", ".join(map(repr, allowed))
            found.append((field, f"must be one of {values} on {arch.name}, got {getattr(shape, field)!r}"))
    if not found:
        spec.default_config(shape, arch)  # raises, with the reason of each kernel
    return found


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
    """Run the service on the loopback address, for `python -m tilewise.server`."""
    serve()


if __name__ == "__main__":
    main()
