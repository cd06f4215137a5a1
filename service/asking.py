"""Routes that answer for shapes: select, one and many, rank, explain."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidShapeError
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.service.messages import (
    BatchAnswer,
    BatchRequest,
    ExplainAnswer,
    LaunchRequest,
    RankAnswer,
    RankRequest,
    SelectAnswer,
    ShapeFields,
    unserved,
)
from tilewise.service.problems import MAX_NAMED, FieldProblem, StrictRoute, field_error
from tilewise.service.remembered import Memory
from tilewise.service.selectors import Selectors

MODEL_HEADER = "Tilewise-Model"  # id of the model behind an answer, also on errors; "none" without one


def ask_routes(selectors: Selectors, memory: Memory) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=StrictRoute, tags=["shapes"])
    one_batch = asyncio.Semaphore(1)  # a batch has a thread; two of them would only share the processor

    @router.post("/v1/select", summary="The config to launch", response_model=SelectAnswer)
    async def select(raw: Request, request: LaunchRequest) -> Response:
        """One decision: config, predicted time, margin to the runner-up, source, regime and reason."""
        loads = selectors.loads
        selector, shape = selectors.question(request)
        decision = selector.select(shape)
        selectors.note(selector.arch.name, shape, decision)
        content = {**asked(selector, shape), **decision.to_dict()}
        response = JSONResponse(content, headers=model_header(decision.model_id))
        memory.keep(await raw.body(), selector, loads, shape, decision, response)
        return response

    @router.post("/v1/select/batch", summary="The configs to launch, for many shapes", response_model=BatchAnswer)
    async def select_batch(request: BatchRequest) -> Response:
        """Decisions for up to 10,000 shapes, all from one model.

        `index` says, for each shape in the order asked, which of `decisions` is its own: shapes that are asked for
        more than once have one decision. If any shape is at fault, all are refused.
        """
        selector = selectors.selector(request.arch)
        async with one_batch:
            model_id, text = await asyncio.to_thread(_batch, selectors, selector, request.shapes)
        return Response(text, media_type="application/json", headers=model_header(model_id))

    @router.post("/v1/rank", summary="Every candidate, best first", response_model=RankAnswer)
    async def rank(request: RankRequest) -> Response:
        """Configs on offer with their times: the chosen one, then the others from the fastest to the slowest."""
        selector, shape = selectors.question(request)
        model_id, ranked = None, None
        while ranked is None or selector.model_id != model_id:  # once more where a new model came in between
            model_id = selector.model_id
            ranked = selector.rank(shape)[: request.limit]
        content = {**asked(selector, shape), "ranked": [one.to_dict() for one in ranked], "model_id": model_id}
        return JSONResponse(content, headers=model_header(model_id))

    @router.post("/v1/explain", summary="Why this config and no other", response_model=ExplainAnswer)
    async def explain(request: LaunchRequest) -> Response:
        """The decision, each rejected candidate with its reason, and the nearest measured shapes."""
        selector, shape = selectors.question(request)
        explained = selector.explain(shape)
        content = {"op": selector.op, **explained.to_dict()}
        return JSONResponse(content, headers=model_header(explained.decision.model_id))

    return router


def asked(selector: Selector, shape: spec.Shape) -> dict[str, Any]:
    """The part of an answer that says what it is for."""
    return {"op": selector.op, "arch": selector.arch.name, "shape": shape.to_dict()}


def model_header(model_id: str | None) -> dict[str, str]:
    """The header that names the model behind an answer."""
    return {MODEL_HEADER: model_id or "none"}


def _batch(selectors: Selectors, selector: Selector, asked_for: list[dict[str, Any]]) -> tuple[str | None, str]:
    """(model id, JSON) of the decisions for shapes as they came in. FieldProblem where one is at fault."""
    places: dict[str, int] = {}
    # Equal texts are equal values of equal types; True and 1.0, which equal 1, have texts of their own.
    index = [places.setdefault(repr(one), len(places)) for one in asked_for]
    first: dict[int, int] = {}
    for at, place in enumerate(index):
        first.setdefault(place, at)
    shapes = shapes_of([(at, asked_for[at]) for at in first.values()], selector)
    model_id, decisions = None, None
    while decisions is None or selector.model_id != model_id:  # once more where a new model came in between
        model_id = selector.model_id
        decisions = [selector.select(shape) for shape in shapes]
    if selectors.shadows:
        for place in index:
            selectors.note(selector.arch.name, shapes[place], decisions[place])
    content = {
        "op": selector.op,
        "arch": selector.arch.name,
        "model_id": model_id,
        "decisions": [one.to_dict() for one in decisions],
        "index": index,
    }
    return model_id, json.dumps(content, allow_nan=False, separators=(",", ":"))


def shapes_of(numbered: list[tuple[int, Any]], selector: Selector, field: str = "shapes") -> list[spec.Shape]:
    """Shapes out of JSON objects, each with its place in the request. FieldProblem names every field at fault."""
    shapes: list[spec.Shape] = []
    wrong: list[tuple[str, str]] = []
    for at, one in numbered:
        if len(wrong) >= MAX_NAMED:
            break
        try:
            shape = ShapeFields.model_validate(one).shape()
            found = unserved(shape, selector.arch)
            shapes.append(shape)
        except ValidationError as error:
            found = [field_error({**e, "loc": ("body", *e["loc"])}) for e in error.errors()]
        except InvalidShapeError as error:
            name, _, message = str(error).partition(" ")
            found = [(name, message)]
        wrong += [(f"{field}.{at}.{name}", message) for name, message in found]
    if wrong:
        raise FieldProblem(wrong)
    return shapes
