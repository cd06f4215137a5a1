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

from tilewise.data.records import shorten
from tilewise.data.traffic import Traffic, row_shapes
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidShapeError
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS
from tilewise.service.catalogue import rows_of
from tilewise.service.messages import MAX_BATCH, MAX_COUNT, ShapesRequest, unserved
from tilewise.service.parts import Service
from tilewise.service.problems import MAX_NAMED, FieldProblem, StrictRoute
from tilewise.service.tables import shape_counts
from tilewise.service.times import shown

MAX_SHAPES = 100_000  # different ones of an op and GPU; beyond, new ones are not taken


class ShapesAnswer(BaseModel):
    """What became of the counts."""

    counted: int = Field(description="shapes whose launches were added")
    left_out: int = Field(description="shapes beyond the number that is kept")


class SeenShape(BaseModel):
    """A shape that engines launch."""

    shape: spec.Shape
    count: float
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
        """Add launches, by shape, to those known. Send what was launched since the last time.

        A line is one of those that `tilewise.write_shapes` writes.
        """
        selector = service.selectors.selector(request.arch)
        traffic = counted_shapes(request.shapes, selector)
        answer = await asyncio.to_thread(_add, service, selector.op, selector.arch.name, traffic)
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
    query = query.order_by(shape_counts.c.count.desc(), shape_counts.c.shape).limit(limit)
    with service.catalogue.read() as connection:
        rows = rows_of(connection.execute(query))
    return [
        {
            "shape": json.loads(row["shape"]),
            "count": row["count"],
            "first_seen": shown(row["first_seen"]),
            "last_seen": shown(row["last_seen"]),
        }
        for row in rows
    ]


_KNOWN = {*SHAPE_FIELDS, "op", "arch", "count", "context", "source", "fallbacks", "overflow"}


def counted_shapes(rows: list[Any], selector: Selector) -> list[Traffic]:
    """Shapes with their counts, each once, out of lines as `tilewise.write_shapes` has them.

    FieldProblem names every field at fault, by the place of its line.
    """
    counts: dict[spec.Shape, float] = {}
    wrong: list[tuple[str, str]] = []
    for at, row in enumerate(rows):
        found = [(name, "is no field of this request") for name in row if name not in _KNOWN]
        found += [(name, "must be given") for name in ("batch_size", "next_n", "heads") if row.get(name) is None]
        for name, wanted in (("op", selector.op), ("arch", selector.arch.name)):
            if row.get(name) not in (None, wanted):
                found.append((name, f"must be {wanted!r}, got {shorten(row[name])}"))
        try:
            for shape, count in row_shapes(row) if not found else ():
                found = unserved(shape, selector.arch)
                counts[shape] = min(MAX_COUNT, counts.get(shape, 0.0) + count)
        except KeyError as error:
            found = [(str(error.args[0]), "must be given")]
        except (InvalidShapeError, TypeError, ValueError, OverflowError) as error:
            name, _, message = str(error).partition(" ")
            found = [(name, message) if name in _KNOWN else ("context", str(error))]
        wrong += [(f"shapes.{at}.{name}", message) for name, message in found]
        if len(wrong) >= MAX_NAMED:
            break
    if not wrong and len(counts) > MAX_BATCH:
        wrong = [("shapes", f"must stand for at most {MAX_BATCH} different shapes, got {len(counts)}")]
    if wrong:
        raise FieldProblem(wrong)
    return [Traffic(shape, count) for shape, count in counts.items()]


def _add(service: Service, op: str, arch: str, traffic: list[Traffic]) -> dict[str, int]:
    totals = sorted((json.dumps(one.shape.to_dict()), one.count) for one in traffic)
    now, left_out = time.time(), 0
    own = (shape_counts.c.op == op) & (shape_counts.c.arch == arch)
    with service.catalogue.write() as connection:
        room = MAX_SHAPES - (connection.execute(sa.select(sa.func.count()).where(own)).scalar() or 0)
        for key, count in totals:  # in one order, so that two writers wait and never deadlock
            old = own & (shape_counts.c.shape == key)
            changes = {"count": shape_counts.c.count + count, "last_seen": now}
            if connection.execute(sa.update(shape_counts).where(old).values(changes)).rowcount:
                continue
            if room <= 0:
                left_out += 1
                continue
            values = {"op": op, "arch": arch, "shape": key, "count": count, "first_seen": now, "last_seen": now}
            insert = service.catalogue.insert(shape_counts).values(values)
            connection.execute(insert.on_conflict_do_update(index_elements=["op", "arch", "shape"], set_=changes))
            room -= 1
    return {"counted": len(totals) - left_out, "left_out": left_out}
