"""From what a caller gives, a Shape or its sizes, to a Shape."""

from __future__ import annotations

import numbers
import operator
from typing import Any

from tilewise.errors import InvalidShapeError
from tilewise.kernels.paged_mqa_logits.spec import Shape

SIZES = (
    "batch_size", "next_n", "heads", "head_dim", "block_kv", "max_context_len", "mean_context_len", "cache_layout",
)  # fmt: skip


def given_sizes(*values: Any) -> dict[str, Any]:
    """The sizes that are not None, of values in the order of SIZES."""
    return {name: value for name, value in zip(SIZES, values, strict=True) if value is not None}


def as_shape(shape: Any, sizes: dict[str, Any]) -> Shape:
    """The shape asked for. Raises InvalidShapeError for neither, both, or a size that Shape does not have."""
    if shape is not None:
        if type(shape) is not Shape:
            raise InvalidShapeError(f"shape must be a Shape, got {shape!r:.200}")
        if sizes:
            raise InvalidShapeError(f"give a shape or sizes, not both: got a shape and {', '.join(sizes)}")
        return shape
    for name in sizes:
        if name not in SIZES:
            raise InvalidShapeError(f"sizes must be among {', '.join(SIZES)}, got {name!r}")
    for name in ("batch_size", "next_n", "heads"):
        if sizes.get(name) is None:
            raise InvalidShapeError(f"{name} must be given, as must batch_size, next_n and heads, or a Shape")
    return Shape(**{name: _plain_int(value) for name, value in sizes.items()})


def _plain_int(value: Any) -> Any:
    """numpy's integers and their like as int; anything else as it is, for Shape to judge. No tensor is read."""
    return value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else operator.index(value)
