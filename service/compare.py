"""Two models side by side, as an answer. What is compared, and how, is in dispatch.comparing."""

from __future__ import annotations

from pydantic import BaseModel, Field

from tilewise.kernels.paged_mqa_logits import spec


class ChangedShape(BaseModel):
    """A shape whose pick changes. Ratios are time of the new pick over that of the old one: below 1 is a gain."""

    shape: spec.Shape
    count: float = Field(description="launches that it stands for")
    old: spec.Config
    new: spec.Config
    old_source: str
    new_source: str
    expected_ratio: float | None = Field(description="as the new model has it")
    measured_ratio: float | None = Field(description="where both configs were measured at this shape")
    reason: str = Field(description="of the new pick")


class CompareAnswer(BaseModel):
    """Two models over the same shapes. Totals are sums over launches."""

    op: str
    arch: str
    old_model_id: str | None
    new_model_id: str | None
    shapes: int
    launches: float
    changed_shapes: int
    changed_launches: float = Field(description="share of all launches whose pick changes")
    expected_time_ratio: float | None = Field(description="new over old, over all launches with a time for both")
    measured_time_ratio: float | None = Field(description="over the launches for which both picks were measured")
    measured_launches: float = Field(description="share of all launches that this covers")
    changes: list[ChangedShape] = Field(description="the largest expected effect on the total first")
