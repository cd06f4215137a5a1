"""Shapes as numbers, and columns of numbers as rows of features on a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS, Shape

Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = Mapping[str, Any]  # field name to a number or an array of numbers

GRID = 1024.0  # features are rounded to 1/GRID

# The words of the text fields, by code. New words go at the end; one that is not listed is coded -1.
WORDS: dict[str, tuple[str, ...]] = {
    "cache_layout": ("flat", "preshuffled"),
    "kernel": ("portable", "sm90", "gfx950", "aiter", "deep_gemm"),
    "mma_m": ("kv", "heads"),
    "schedule": ("even", "balanced"),
    "mfma": ("", "16x16x128", "32x32x64", "16x16x32", "32x32x16"),
    "epilogue": ("", "max", "packed", "add", "mix"),
    "program_order": ("", "launched", "xcd"),
}
CODES = {field: {word: float(code) for code, word in enumerate(words)} for field, words in WORDS.items()}


def shape_columns(shape: Shape) -> dict[str, Any]:
    """The fields of one shape as numbers."""
    values: dict[str, Any] = {name: float(getattr(shape, name)) for name in SHAPE_FIELDS if name != "cache_layout"}
    values["cache_layout"] = CODES["cache_layout"].get(shape.cache_layout, -1.0)
    return values


class Log2:
    """A column of which the logarithm to the base 2 is wanted, of at least `least`; `on_grid` takes all in one go."""

    __slots__ = ("least", "value")

    def __init__(self, value: Any, least: float = 1.0) -> None:
        self.value = value
        self.least = least


def on_grid(columns: Sequence[Any]) -> Floats:
    """[n, len(columns)]: columns, arrays of one length or numbers, as rows, rounded; one row of numbers alone.

    Columns stay whole in memory, which is fast.
    """
    at = [at for at, column in enumerate(columns) if type(column) is Log2]
    values = [column.value if type(column) is Log2 else column for column in columns]
    shape = next((value.shape for value in values if type(value) is np.ndarray and value.ndim), ())
    table = np.empty((len(values), *shape))
    for n, value in enumerate(values):
        table[n] = value
    logs = table[at]
    np.maximum(logs.T, [columns[n].least for n in at], out=logs.T)
    table[at] = np.log2(logs, out=logs)
    table *= GRID
    np.rint(table, out=table)
    table /= GRID
    return table.T
