"""Checks every address that an interpreted kernel touches: a GPU may fault on it, an interpreter reads on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from paged_cache import Problem
from torch import Tensor


@contextlib.contextmanager
def only_own_memory(problem: Problem, out: Tensor) -> Iterator[None]:
    """Within, a load or store outside of what the launch is about raises AssertionError.

    That is: queries, weights and lengths; of the block table, the entries of each context and none after them; of the
    cache, the pages that those entries name; of `out`, the columns below each context.
    """
    from triton.runtime import interpreter

    real = interpreter._interpreter
    interpreter._interpreter = _Checked(real, _ranges(problem), _written(problem, out))
    try:
        yield
    finally:
        interpreter._interpreter = real


Ranges = npt.NDArray[np.uint64]  # [ranges, 2]: first address, and the one after the last


class _Checked:
    def __init__(self, real: Any, loads: Ranges, stores: Ranges) -> None:
        self._real, self._loads, self._stores = real, loads, stores

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        _check("loaded", pointers, mask, np.dtype(dtype).itemsize, self._loads)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        _check("stored", pointers, mask, values.dtype.itemsize, self._stores)
        return self._real.store(pointers, values, mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _check(verb: str, pointers: Any, mask: Any, size: int, allowed: Ranges) -> None:
    first = np.asarray(pointers, dtype=np.uint64)[np.broadcast_to(np.asarray(mask, dtype=bool), np.shape(pointers))]
    if not first.size:
        return
    at = np.searchsorted(allowed[:, 0], first, side="right").astype(np.int64) - 1
    good = (at >= 0) & (first + np.uint64(size) <= allowed[at, 1])
    assert good.all(), f"{(~good).sum()} elements of {size} bytes {verb} outside of what belongs to the launch"


def _ranges(problem: Problem) -> Ranges:
    found = [
        _span(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        for tensor in (problem.q, problem.weights, problem.context_lens)
    ]
    table, cache = problem.block_tables, problem.kv_cache
    _, block_kv, _, width = cache.shape
    for b, extent in enumerate(_extents(problem)):
        count = -(-extent // block_kv)
        found.append(_span(table.data_ptr() + 4 * b * table.stride(0), 4 * count))
        for page in table[b, :count].tolist():
            found.append(_span(cache.data_ptr() + page * cache.stride(0), block_kv * width))
    return _sorted(found)


def _written(problem: Problem, out: Tensor) -> Ranges:
    next_n = problem.q.shape[1]
    return _sorted(
        [
            _span(out.data_ptr() + 4 * (b * next_n + t) * out.stride(0), 4 * min(extent, out.shape[1]))
            for b, extent in enumerate(_extents(problem))
            for t in range(next_n)
        ]
    )


def _extents(problem: Problem) -> list[int]:
    lens = problem.context_lens
    found: list[int] = (lens.amax(1) if lens.dim() == 2 else lens).clamp_min(0).tolist()
    return found


def _span(start: int, size: int) -> tuple[int, int]:
    return start, start + size


def _sorted(found: list[tuple[int, int]]) -> Ranges:
    return np.array(sorted({span for span in found if span[1] > span[0]}), dtype=np.uint64).reshape(-1, 2)
