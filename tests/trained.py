"""A bundle trained once per test process on synthetic rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import synthetic

from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models.bundle import Bundle
from tilewise.models.latency import train

OP, ARCH = synthetic.OP, get_arch("h200")
SHAPES = tuple(synthetic.SHAPES)
UNSEEN = Shape(12, 6, 64, 128, 64, 20000)


def columns(rows: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as the columns that training takes."""
    listed = list(rows)
    return {name: [row[name] for row in listed] for name in listed[0]}


@functools.cache
def rows() -> tuple[dict[str, Any], ...]:
    """Every candidate of every synthetic shape, twice."""
    return tuple(synthetic.synthetic_rows(SHAPES))


@functools.cache
def bundle() -> Bundle:
    """The bundle of those rows, without metrics."""
    return train(columns(rows()), op=OP, arch=ARCH.name, folds=0)
