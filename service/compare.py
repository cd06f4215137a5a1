"""Two models side by side: the picks of each, what each expects, and what was measured."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from tilewise.dispatch.selector import Selector
from tilewise.kernels.paged_mqa_logits import spec


class Pick(BaseModel):
    """One model's answer."""

    config: spec.Config
    predicted_us: float | None
    measured_us: float | None = Field(description="of this config, where the newer rows have it")
    source: str
    reason: str


class ComparedShape(BaseModel):
    """One shape, asked of both."""

    shape: spec.Shape
    changed: bool
    old: Pick
    new: Pick
    expected_ratio: float | None = Field(
        description="time of the new pick over that of the old, as the new model has it"
    )
    measured_ratio: float | None = Field(description="the same as measured, where both configs were")


class CompareAnswer(BaseModel):
    """Two models over the same shapes."""

    op: str
    arch: str
    old_model_id: str | None
    new_model_id: str | None
    shapes: int
    changed: int
    compared: list[ComparedShape] = Field(description="changed picks first, by the size of the expected effect")


def compared(old: Selector, new: Selector, shapes: list[spec.Shape]) -> dict[str, Any]:
    """What `new` would change about the answers of `old`, as a CompareAnswer."""
    found = [_one(old, new, shape) for shape in shapes]
    found.sort(key=lambda one: (not one["changed"], one["expected_ratio"] or 1.0))
    return {
        "op": new.op,
        "arch": new.arch.name,
        "old_model_id": old.model_id,
        "new_model_id": new.model_id,
        "shapes": len(found),
        "changed": sum(one["changed"] for one in found),
        "compared": found,
    }


def _one(old: Selector, new: Selector, shape: spec.Shape) -> dict[str, Any]:
    before, after = old.select(shape), new.select(shape)
    measured = _measured(new, shape) or _measured(old, shape)
    expected = {one.config: one.predicted_us for one in new.rank(shape)}
    picks = {
        name: {
            "config": decision.config.to_dict(),
            "predicted_us": decision.predicted_us,
            "measured_us": measured.get(decision.config),
            "source": decision.source,
            "reason": decision.reason,
        }
        for name, decision in (("old", before), ("new", after))
    }
    return {
        "shape": shape.to_dict(),
        "changed": before.config != after.config,
        **picks,
        "expected_ratio": _ratio(expected.get(after.config), expected.get(before.config)),
        "measured_ratio": _ratio(measured.get(after.config), measured.get(before.config)),
    }


def _measured(selector: Selector, shape: spec.Shape) -> dict[spec.Config, float]:
    """Measured times of a shape's configs; empty where it was not measured."""
    bundle = selector.bundle
    at = None if bundle is None else bundle.exact.find(shape)
    if bundle is None or at is None:
        return {}
    return {config: us for config, us in bundle.exact.times(at).items() if us == us}


def _ratio(new: float | None, old: float | None) -> float | None:
    return None if new is None or not old else round(new / old, 6)
