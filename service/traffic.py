"""Live shapes as training and comparing weigh them."""

from __future__ import annotations

import json

import sqlalchemy as sa

from tilewise.data.traffic import Traffic
from tilewise.errors import InvalidShapeError
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.service.tables import shape_counts

MAX_WEIGHED = 10_000  # shapes that training weighs by; the most launched ones


def traffic_of(connection: sa.Connection, op: str, arch: str, limit: int = MAX_WEIGHED) -> list[Traffic]:
    """The shapes that engines launch most, with their counts."""
    query = sa.select(shape_counts.c.shape, shape_counts.c.count)
    query = query.where((shape_counts.c.op == op) & (shape_counts.c.arch == arch))
    found = []
    for text, count in connection.execute(
        query.order_by(shape_counts.c.count.desc(), shape_counts.c.shape).limit(limit)
    ):
        try:
            found.append(Traffic(Shape(**json.loads(text)), count))
        except (InvalidShapeError, TypeError, ValueError):  # of a version that allowed more
            continue
    return found
