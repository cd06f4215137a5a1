"""What the REST service is asked and answers, and which of a shape's values no kernel serves."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from tilewise.data.records import COLUMNS
from tilewise.dispatch.decision import Decision, Neighbour, Ranked, RegimeName, Rejected, Source
from tilewise.errors import InvalidConfigError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits import spec

_DOC = {column.name: column.doc for column in COLUMNS}

# Decode of DeepSeek-V4.1-Flash with 5 draft tokens.
_EXAMPLE: JsonDict = {"arch": "h200", "batch_size": 16, "next_n": 6, "heads": 32, "max_context_len": 131072}

_BATCH_EXAMPLE: JsonDict = {
    "arch": "h200",
    "shapes": [{name: value for name, value in _EXAMPLE.items() if name != "arch"}] * 2,
}
_SHAPES_EXAMPLE: JsonDict = {
    "arch": "h200",
    "shapes": [{"count": 1200, **{name: value for name, value in _EXAMPLE.items() if name != "arch"}}],
}
MAX_BATCH = 10_000
MAX_COMPARED = 1000
MAX_COUNT = float(1 << 40)


def _one_of(*allowed: int) -> Any:
    def check(value: int) -> int:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(map(str, allowed))}")
        return value

    # Not Literal: it lets true and 1.0 pass for 1.
    return AfterValidator(check)


class ShapeFields(BaseModel):
    """A launch shape."""

    model_config = ConfigDict(strict=True, extra="forbid")

    batch_size: int = Field(ge=0, le=spec.MAX_BATCH_SIZE, description=_DOC["batch_size"])
    next_n: int = Field(ge=1, le=spec.MAX_NEXT_N, description=_DOC["next_n"])
    heads: Annotated[int, _one_of(*spec.HEADS)] = Field(
        description=_DOC["heads"], json_schema_extra={"enum": list(spec.HEADS)}
    )
    head_dim: Annotated[int, _one_of(*spec.HEAD_DIMS)] = Field(
        128, description=_DOC["head_dim"], json_schema_extra={"enum": list(spec.HEAD_DIMS)}
    )
    block_kv: Annotated[int, _one_of(*spec.BLOCK_KVS)] = Field(
        64, description=_DOC["block_kv"], json_schema_extra={"enum": list(spec.BLOCK_KVS)}
    )
    max_context_len: int = Field(32768, ge=0, le=spec.MAX_CONTEXT_LEN, description=_DOC["max_context_len"])
    mean_context_len: int | None = Field(
        None, ge=0, le=spec.MAX_CONTEXT_LEN, description=f"{_DOC['mean_context_len']}; max_context_len when left out"
    )
    cache_layout: Literal["flat", "preshuffled"] = Field("flat", description=_DOC["cache_layout"])

    def shape(self) -> spec.Shape:
        """The shape asked about; InvalidShapeError where two values do not go together."""
        return spec.Shape(**{name: getattr(self, name) for name in spec.SHAPE_FIELDS})


class _Target(BaseModel):
    """What a request is about."""

    model_config = ConfigDict(strict=True, extra="forbid")

    op: Literal["paged_mqa_logits"] = Field("paged_mqa_logits", description=_DOC["op"])
    arch: str | None = Field(None, max_length=64, description="GPU, as in /readyz; the service's first when left out")


class LaunchRequest(ShapeFields, _Target):
    """A launch shape, and the GPU that it is for."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})


def _listed(model: type[BaseModel]) -> Any:
    """A list of objects that the handler judges, described by a model. One by one, pydantic would take too long."""
    schema = model.model_json_schema()
    item: JsonDict = {name: schema[name] for name in ("type", "properties", "required", "additionalProperties")}
    return lambda described: described.update(items=item)


class BatchRequest(_Target):
    """Launch shapes, and the GPU that they are for."""

    model_config = ConfigDict(json_schema_extra={"examples": [_BATCH_EXAMPLE]})

    shapes: list[dict[str, Any]] = Field(
        min_length=1, max_length=MAX_BATCH, description="launch shapes", json_schema_extra=_listed(ShapeFields)
    )


class CountedShape(ShapeFields):
    """A launch shape, and how often it was launched; a line of what `tilewise.write_shapes` writes."""

    count: float = Field(1.0, gt=0, le=MAX_COUNT, description="launches since the last time")
    context: dict[str, Any] | None = Field(None, description="`lengths` and `weights`, where one launch serves several")
    source: Any = Field(None, description="not read")
    fallbacks: Any = Field(None, description="not read")


class ShapesRequest(_Target):
    """Launches of an engine, by shape, and the GPU that it runs on."""

    model_config = ConfigDict(json_schema_extra={"examples": [_SHAPES_EXAMPLE]})

    shapes: list[dict[str, Any]] = Field(
        min_length=1, max_length=MAX_BATCH, description="shapes and counts", json_schema_extra=_listed(CountedShape)
    )


class CompareRequest(_Target):
    """Two models, and shapes to ask them about."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"old": "current", "new": "current", **_BATCH_EXAMPLE}]})

    old: str = Field("current", max_length=64, description="digest of a stored model, `current` or `shipped`")
    new: str = Field("current", max_length=64, description="digest of a stored model, `current` or `shipped`")
    shapes: list[dict[str, Any]] = Field(
        min_length=1,
        max_length=MAX_COMPARED,
        description="shapes, with counts where some weigh more than others",
        json_schema_extra=_listed(CountedShape),
    )


class RankRequest(LaunchRequest):
    """A launch shape, the GPU that it is for, and how many configs are wanted."""

    limit: int | None = Field(None, ge=1, le=1 << 20, description="give the best so many only; all when left out")


class SelectAnswer(BaseModel):
    """A decision, and what it is for."""

    op: str
    arch: str
    shape: spec.Shape
    config: spec.Config
    predicted_us: float | None = Field(description="of the config, microseconds; null where nothing is known")
    margin: float | None = Field(
        description="the runner-up's time over the config's, less 1; negative where the runner-up is predicted "
        "faster, but not surely enough to replace the default"
    )
    runner_up: spec.Config | None
    source: Source = Field(description="the rung of the ladder that answered")
    regime: RegimeName = Field(description="inside what was measured, or beyond it")
    reason: str
    model_id: str | None = Field(description="null where there is no model")


class BatchAnswer(BaseModel):
    """Decisions, and which shape has which."""

    op: str
    arch: str
    model_id: str | None = Field(description="of all decisions; null where there is no model")
    decisions: list[Decision]
    index: list[int] = Field(description="for each shape asked for, its place in `decisions`")


class RankAnswer(BaseModel):
    """Every config on offer, the chosen one first."""

    op: str
    arch: str
    shape: spec.Shape
    ranked: list[Ranked]
    model_id: str | None


class ExplainAnswer(BaseModel):
    """A decision with everything that it was weighed against."""

    op: str
    arch: str
    shape: spec.Shape
    decision: Decision
    rejected: list[Rejected]
    nearest: list[Neighbour] = Field(description="measured shapes near this one")
    features: dict[str, float] = Field(description="what the model sees of the chosen config")
    floor_us: float = Field(description="no launch is much faster than this, microseconds")


# Fields that a kernel may refuse though the op allows them: what every kernel takes, and what the op allows.
_REFUSABLE: dict[str, tuple[object, tuple[object, ...]]] = {
    "cache_layout": ("flat", ("flat", "preshuffled")),
    "block_kv": (64, spec.BLOCK_KVS),
    "heads": (32, spec.HEADS),
}


def unserved(shape: spec.Shape, arch: Arch) -> list[tuple[str, str]]:
    """(field, message) for each field that keeps the kernels of a GPU from serving a shape; none where one serves it.

    Raises InvalidConfigError where no value of these fields would do.
    """

    def served(base: spec.Shape, **changes: Any) -> bool:
        try:
            spec.default_config(dataclasses.replace(base, **changes), arch)
        except InvalidConfigError:
            return False
        return True

    if served(shape):
        return []
    base = dataclasses.replace(shape, **{field: usual for field, (usual, _) in _REFUSABLE.items()})  # type: ignore[arg-type]
    at_fault = [field for field in _REFUSABLE if not served(base, **{field: getattr(shape, field)})]
    if not at_fault:  # each would do alone
        base = shape
        at_fault = [field for field, (usual, _) in _REFUSABLE.items() if served(shape, **{field: usual})]
    found = []
    for field in at_fault:
        if allowed := [value for value in _REFUSABLE[field][1] if served(base, **{field: value})]:
            values = ", ".join(map(repr, allowed))
            found.append((field, f"must be one of {values} on {arch.name}, got {getattr(shape, field)!r}"))
    if not found:
        spec.default_config(shape, arch)  # raises, with the reason of each kernel
    return found
