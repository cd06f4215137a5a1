"""Synthetic profile rows: made up by a formula, for tests of structure. No GPU took these times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.data.records import COLUMN_NAMES, SCHEMA_VERSION
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, cdiv, floor_us
from tilewise.kernels.registry import kernel_source_hash

if TYPE_CHECKING:
    from tilewise.models.bundle import Bundle

OP = "paged_mqa_logits"
SHAPES = [
    Shape(batch, next_n, heads, 128, 64, context)
    for batch in (1, 3, 16, 64)
    for next_n in (1, 2, 6)
    for heads in (32, 64)
    for context in (2048, 32768)
]


def synthetic_us(shape: Shape, config: Config, arch: str) -> float:
    """A made-up time in microseconds: work, plus a cost for idle units and for short splits."""
    units = get_arch(arch).compute_units
    programs = max(1, shape.batch_size) * config.groups(shape.next_n) * config.split_kv
    tail = cdiv(programs, units) * units / programs
    fill = 1.0 + 0.3 / (config.dot_n * shape.heads / 32)
    return float(3.0 + floor_us(shape, get_arch(arch)) * fill * (1.0 + 0.2 * (tail - 1.0)) + 0.002 * config.split_kv)


def synthetic_row(
    shape: Shape, config: Config, *, arch: str = "h200", pass_index: int = 0, run_id: str = "synthetic", **changes: Any
) -> dict[str, Any]:
    """One good row; `changes` replaces or adds columns."""
    time = round(synthetic_us(shape, config, arch) * (1.0 + 0.001 * pass_index), 4)
    row = {
        "schema_version": SCHEMA_VERSION,
        "op": OP,
        "arch": arch,
        **shape.to_dict(),
        "contexts": "uniform",
        "logits_width": shape.max_context_len,
        **config.to_dict(),
        "status": "correct",
        "reason": "",
        "latency_us": time,
        "latency_p20_us": time * 0.99,
        "latency_p80_us": time * 1.01,
        "rounds": 20,
        "launches_per_replay": 8,
        "timing_method": "graph",
        "cache_state": "cold",
        "footprint_bytes": 1 << 30,
        "max_error": 1e-5,
        "pass_index": pass_index,
        "kernel_hash": kernel_source_hash(config.kernel),
        "device_name": "synthetic",
        "compute_units": get_arch(arch).compute_units,
        "clock_before_mhz": 1980,
        "clock_after_mhz": None,
        "driver": "synthetic",
        "runtime": "synthetic",
        "torch_version": "synthetic",
        "triton_version": "synthetic",
        "git_commit": "",
        "run_id": run_id,
        "measured_at": "2026-01-01T00:00:00Z",
    }
    return {**row, **changes}


def synthetic_rows(
    shapes: Iterable[Shape] = tuple(SHAPES), *, arch: str = "h200", passes: int = 2
) -> list[dict[str, Any]]:
    """Every candidate of every shape, `passes` times."""
    return [
        synthetic_row(shape, config, arch=arch, pass_index=index)
        for shape in shapes
        for config in candidates(shape, get_arch(arch))
        for index in range(passes)
    ]


def publish_synthetic(
    home: Path, *, shapes: Sequence[Shape] = SHAPES[::5], arch: str = "h200", seed: int = 0
) -> Bundle:
    """Train on synthetic rows and put the bundle in force under `home`."""
    from threadpoolctl import threadpool_limits

    from tilewise.models import latency, registry

    rows = synthetic_rows(shapes, arch=arch)
    columns = {name: [row[name] for row in rows] for name in COLUMN_NAMES}
    with threadpool_limits(1):  # threads that wait for each other are slow on a busy machine
        bundle = latency.train(columns, op=OP, arch=arch, seed=seed, folds=0)
    registry.publish(bundle, home)
    return bundle
