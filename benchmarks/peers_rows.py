"""Rows of benchmarks/peers.py: a CSV file that grows entry by entry, and the file of fixed choices."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.kernels.paged_mqa_logits.spec import Config, Shape

if TYPE_CHECKING:
    from tilewise.kernels.timing import Timing

HERE = Path(__file__).parent
ROWS = HERE / "results" / "peers_h200.csv"
CHOICES = HERE / "results" / "peers_choice_h200.json"
HOST = HERE / "results" / "peers_host_h200.json"

# `roles` says what a row stands for, joined by "+": ours (the choice fixed beforehand), sm90 and portable (the best of
# that kernel, fixed beforehand), select (what tilewise.select picks), deep_gemm.
COLUMNS = (
    "name", "group", "attempt", "heads", "next_n", "batch_size", "contexts", "max_context_len", "mean_context_len",
    "roles", "kernel", "tokens_per_row", "config", "status", "reason", "max_error", "latency_us", "latency_p20_us",
    "latency_p80_us", "rounds", "launches_per_replay", "footprint_bytes", "read_tbps", "fp8_tflops",
    "clock_before_mhz", "clock_after_mhz", "measured_at", "device_name", "driver", "torch_version", "triton_version",
    "deep_gemm_version", "deep_gemm_pdl", "kernel_hash", "git_commit", "run_id",
)  # fmt: skip
_INTS = ("attempt", "heads", "next_n", "batch_size", "max_context_len", "mean_context_len", "tokens_per_row", "rounds")
_FLOATS = ("latency_us", "read_tbps", "fp8_tflops", "max_error")


def timing_columns(timing: Timing) -> dict[str, Any]:
    """What became of a launch, and how long it took, as rows have it."""
    timed = bool(timing.samples_us)
    return {
        "status": timing.status,
        "reason": timing.reason,
        "max_error": None if timing.max_error is None else f"{timing.max_error:.3g}",
        "latency_us": f"{timing.median_us:.4f}" if timed else None,
        "latency_p20_us": f"{timing.percentile(0.2):.4f}" if timed else None,
        "latency_p80_us": f"{timing.percentile(0.8):.4f}" if timed else None,
        "rounds": len(timing.samples_us),
    }


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows, all or none of which a reader sees as far as the file system allows, and see them written."""
    new = not path.exists() or path.stat().st_size == 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)
        file.flush()
        os.fsync(file.fileno())


def write_table(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """A CSV file of these rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows with numbers as numbers and empty fields as None; none where the file is missing.

    A last line that a killed run left half written is no row.
    """
    if not path.exists():
        return []
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = {name: row.get(name) or None for name in COLUMNS}
            if values["name"] is None or values["run_id"] is None:
                continue
            for names, kind in ((_INTS, int), (_FLOATS, float)):
                for name in names:
                    if values[name] is not None:
                        values[name] = kind(values[name])
            found.append(values)
    return found


def shape_of(row: dict[str, Any]) -> Shape:
    """The shape of a row."""
    return Shape(
        row["batch_size"], row["next_n"], row["heads"], 128, 64, row["max_context_len"], row["mean_context_len"]
    )  # fmt: skip


def read_choices(path: Path) -> dict[str, dict[str, Any]]:
    """Entry name to its choice; none where the file is missing."""
    if not path.exists():
        return {}
    choices: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"]
    return choices


def read_about(path: Path) -> dict[str, Any] | None:
    """Where the choices are from; None where the file is missing."""
    if not path.exists():
        return None
    about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["about"]
    return about


def write_choices(path: Path, about: dict[str, Any], choices: dict[str, dict[str, Any]]) -> None:
    """Replace the file of choices, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(choice)}" for name, choice in choices.items())
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        f'{{\n "about": {json.dumps(about)},\n "entries": {{\n{lines}\n }}\n}}\n', encoding="utf-8"
    )  # fmt: skip
    temporary.replace(path)


def chosen(choice: dict[str, Any], role: str) -> Config | None:
    """The config of a role in a choice, None where there is none."""
    values = choice.get(role)
    return None if values is None else Config.from_dict(values)
