"""benchmarks/occasions.py counts picks that agree, and says of the others how far apart they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import trained

from tilewise.data.store import write_rows

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "occasions.py"


def occasions(*words: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--folds", "0", *map(str, words)], capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stdout, done.stderr


def test_what_one_change_of_the_timings_does_is_found_and_measured(tmp_path: Path) -> None:
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    rows = trained.rows()
    write_rows(rows, first)
    # On the second occasion, fusing takes half as long again.
    times = ("latency_us", "latency_p20_us", "latency_p80_us")
    changed: list[dict[str, Any]] = [
        {**row, **{name: row[name] * 1.5 for name in times}} if row["fuse_n"] > 1 else dict(row) for row in rows
    ]
    write_rows(changed, second)
    code, out, err = occasions("--first", first, "--second", second, "--json", "--band", "0.01")
    assert code == 0, err
    result = json.loads(out)
    shared, judged = result["shared_shapes"], result["judging_shapes"]
    assert shared["shapes"] == judged["shapes"] == len(trained.SHAPES)
    assert 0 < shared["differ"] == len(shared["apart"])
    assert shared["agree"] == pytest.approx(1 - shared["differ"] / shared["shapes"])
    moved = [entry for entry in shared["apart"] if max(entry["predicted_gap"]) > 0.1]
    assert moved
    assert {entry["shape"]["next_n"] for entry in moved} <= {2, 6}, "at next_n 1 nothing changed"
    assert shared["differ_within_band"] == sum(entry["measured_gap"] <= 0.01 for entry in shared["apart"])
    assert shared["differ_within_band"] < shared["differ"]
    assert result["grid"]["shapes"] > 300

    code, out, err = occasions("--first", first, "--first-only", "pass_index=0", "--second-only", "pass_index=1")
    assert code == 0, err
    within = [float(line.split()[1]) for line in out.splitlines() if "agree_or_within_band" in line]
    of_shared, of_grid = within
    assert of_shared > 0.95, "the passes differ by a factor alone: what is left are ties"
    assert of_grid > 0.9, "of other shapes, the few that were timed say less"
    assert "judging_shapes: none" in out


def test_the_same_rows_twice_are_refused() -> None:
    code, _, err = occasions("--first", "a.parquet")
    assert code == 1
    assert "the same rows" in err
    code, _, err = occasions("--first-only", "run_id=nobody*")
    assert code == 1
    assert "no row left" in err
