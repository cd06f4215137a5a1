"""benchmarks/fresh_shapes.py draws the same shapes for a seed, and judges only rows that were taken for the draw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import synthetic
import trained

from tilewise.data.store import write_rows
from tilewise.kernels.paged_mqa_logits.spec import candidates
from tilewise.kernels.shape_sets import Target, read_targets

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "fresh_shapes.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.bundle().save(tmp_path_factory.mktemp("bundle") / "b")


def script(*words: object) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def drawn(folder: Path, record: Path, seed: int = 5) -> list[Target]:
    code, out, err = script("--draw", "--count", 3, "--seed", seed, "--bundle", folder, "--record", record)
    assert code == 0, err
    assert f"seed {seed}" in out
    return read_targets(record.with_suffix(".jsonl"))


def rows_of(targets: list[Target], when: str) -> list[dict[str, Any]]:
    return [
        synthetic.synthetic_row(one.shape, config, pass_index=index, measured_at=when, contexts=one.contexts)
        for one in targets
        for config in candidates(one.shape, trained.ARCH)
        for index in (0, 1)
    ]


def test_a_seed_draws_the_same_new_shapes_inside_of_what_was_trained_on(folder: Path, tmp_path: Path) -> None:
    first, again = drawn(folder, tmp_path / "a.json"), drawn(folder, tmp_path / "b.json")
    assert first == again
    assert first != drawn(folder, tmp_path / "c.json", seed=6)
    assert len({one.shape for one in first}) == 3
    for one in first:
        assert one.judged
        assert trained.bundle().regime.beyond(one.shape) == {}
        assert one.shape not in trained.SHAPES


def test_a_seed_that_nobody_chose_differs_from_draw_to_draw(folder: Path, tmp_path: Path) -> None:
    seeds = set()
    for name in ("a", "b"):
        record = tmp_path / f"{name}.json"
        code, _, err = script("--draw", "--count", 1, "--bundle", folder, "--record", record)
        assert code == 0, err
        note = json.loads(record.read_text())
        assert note["bundle_digest"] == trained.bundle().digest
        seeds.add(note["seed"])
    assert len(seeds) == 2


def test_rows_are_judged_only_where_they_were_taken_for_the_draw(folder: Path, tmp_path: Path) -> None:
    record, rows, plan = tmp_path / "a.json", tmp_path / "rows.parquet", tmp_path / "plan.jsonl"
    targets = drawn(folder, record)
    after = json.loads(record.read_text())["drawn_at"]
    good = rows_of(targets, after)
    common = ("--bundle", folder, "--record", record, "--json")

    write_rows(good, rows)
    code, out, err = script("--judge", rows, "--duels-out", plan, "--limit", 0, *common)
    assert code == 0, err
    result = json.loads(out)
    assert (result["shapes"], result["failures"], result["duelled"]) == (3, 0, 0)
    assert result["picks_from"] == {"model": 3}
    assert result["with_duels"]["worst_regret"] == result["worst_regret"] < 1.2
    beyond = read_targets(plan) if plan.read_text() else []
    assert all(one.duel and one.configs and one.shape in {t.shape for t in targets} for one in beyond)
    assert bool(beyond) == (result["worst_regret"] > 1.0)

    write_rows(rows_of(targets, "2026-01-01T00:00:00Z"), rows)
    code, out, _ = script("--judge", rows, *common)
    assert (code, json.loads(out)["measured_after_the_draw"]) == (1, False)

    others = drawn(folder, tmp_path / "other.json", seed=6)
    write_rows(rows_of(others, after), rows)
    code, out, _ = script("--judge", rows, *common)
    assert (code, json.loads(out)["shapes_are_those_drawn"]) == (1, False)

    record.write_text(json.dumps({**json.loads(record.read_text()), "bundle_digest": "another"}))
    write_rows(good, rows)
    code, out, _ = script("--judge", rows, *common)
    assert (code, json.loads(out)["bundle_is_the_one_drawn_for"]) == (1, False)

    write_rows(good[:-1], rows)  # a candidate less: that shape cannot be judged
    code, out, _ = script("--judge", rows, *common)
    assert json.loads(out)["not_judged"] == 1
