"""Routes for live shapes: engines say how often they launch which."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from tilewise.kernels.paged_mqa_logits import spec
from tilewise.service.asking import shapes_of
from tilewise.service.catalogue import rows_of
from tilewise.service.messages import ShapesRequest
from tilewise.service.parts import Service
from tilewise.service.problems import FieldProblem, StrictRoute
from tilewise.service.tables import shape_counts
from tilewise.service.times import shown

MAX_SHAPES = 100_000  # different ones of an op and GPU; beyond, new ones are not taken
MAX_LAUNCHES = 1 << 40


class ShapesAnswer(BaseModel):
    """What became of the counts."""

    counted: int = Field(description="shapes whose launches were added")
    left_out: int = Field(description="shapes beyond the number that is kept")


class SeenShape(BaseModel):
    """A shape that engines launch."""

    shape: spec.Shape
    launches: int
    first_seen: str
    last_seen: str


class SeenShapes(BaseModel):
    """Shapes, the most launched first."""

    op: str
    arch: str
    shapes: list[SeenShape]


def shape_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/v1/shapes", route_class=StrictRoute, tags=["shapes"])

    @router.post("", summary="Count launches of an engine", response_model=ShapesAnswer)
    async def count(request: ShapesRequest) -> Response:
        """Add launches, by shape, to those known. Send what was launched since the last time."""
        selector = service.selectors.selector(request.arch)
        counts = _counts(request.shapes)
        bare = [(at, {k: v for k, v in one.items() if k != "launches"}) for at, one in enumerate(request.shapes)]
        shapes = shapes_of(bare, selector)
        answer = await asyncio.to_thread(_add, service, selector.op, selector.arch.name, shapes, counts)
        return JSONResponse(answer)

    @router.get("", summary="Shapes that engines launch", response_model=SeenShapes)
    async def seen(
        arch: Annotated[str | None, Query(max_length=64, description="GPU; the service's first when left out")] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> Response:
        """Shapes with their launches, the most launched first."""
        selector = service.selectors.selector(arch)
        op, name = selector.op, selector.arch.name
        shapes = await asyncio.to_thread(seen_shapes, service, op, name, limit)
        return JSONResponse({"op": op, "arch": name, "shapes": shapes})

    return router


def seen_shapes(service: Service, op: str, arch: str, limit: int) -> list[dict[str, Any]]:
    """The shapes that engines launch most."""
    query = sa.select(shape_counts).where((shape_counts.c.op == op) & (shape_counts.c.arch == arch))
    query = query.order_by(shape_counts.c.launches.desc(), shape_counts.c.shape).limit(limit)
    with service.catalogue.read() as connection:
        rows = rows_of(connection.execute(query))
    return [
        {
            "shape": json.loads(row["shape"]),
            "launches": row["launches"],
            "first_seen": shown(row["first_seen"]),
            "last_seen": shown(row["last_seen"]),
        }
        for row in rows
    ]


def _counts(shapes: list[dict[str, Any]]) -> list[int]:
    wrong = []
    counts = []
    for at, one in enumerate(shapes):
        launches = one.get("launches", 1)
        if type(launches) is not int or not 1 <= launches <= MAX_LAUNCHES:
            wrong.append((f"shapes.{at}.launches", f"must be an integer, 1 to {MAX_LAUNCHES}"))
        counts.append(launches)
    if wrong:
        raise FieldProblem(wrong)
    return counts


def _add(service: Service, op: str, arch: str, shapes: list[spec.Shape], counts: list[int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for shape, launches in zip(shapes, counts, strict=True):
        key = json.dumps(shape.to_dict())
        totals[key] = totals.get(key, 0) + launches
    now, left_out = time.time(), 0
    own = (shape_counts.c.op == op) & (shape_counts.c.arch == arch)
    with service.catalogue.write() as connection:
        room = MAX_SHAPES - (connection.execute(sa.select(sa.func.count()).where(own)).scalar() or 0)
        for key, launches in sorted(totals.items()):  # in one order, so that two writers wait and never deadlock
            old = own & (shape_counts.c.shape == key)
            added = sa.case(
                (shape_counts.c.launches > MAX_LAUNCHES, shape_counts.c.launches),
                else_=shape_counts.c.launches + launches,
            )
            changed = connection.execute(sa.update(shape_counts).where(old).values(launches=added, last_seen=now))
            if changed.rowcount:
                continue
            if room <= 0:
                left_out += 1
                continue
            values = {"op": op, "arch": arch, "shape": key, "launches": launches, "first_seen": now, "last_seen": now}
            insert = service.catalogue.insert(shape_counts).values(values)
            changes = {"launches": shape_counts.c.launches + launches, "last_seen": now}
            connection.execute(insert.on_conflict_do_update(index_elements=["op", "arch", "shape"], set_=changes))
            room -= 1
    return {"counted": len(totals) - left_out, "left_out": left_out}
