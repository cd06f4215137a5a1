"""Explanations, comparisons of two models, and dumps of all decisions."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

import trained

from tilewise.cli import main
from tilewise.data.traffic import Traffic
from tilewise.dispatch.attribution import GROUPS, grouped_features
from tilewise.dispatch.comparing import compare
from tilewise.dispatch.dumping import decisions, dump, shape_grid
from tilewise.dispatch.selector import Selector
from tilewise.errors import UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, default_config
from tilewise.models.bundle import Bundle
from tilewise.models.features import FEATURES, SHAPE_FEATURES
from tilewise.models.latency import train

KNOWN = Shape(16, 6, 32, 128, 64, 32768)
GRID = list(shape_grid(batch_sizes=(1, 5, 64, 900), next_n=(1, 6), heads=(32, 128), contexts=(2048, 9000)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.bundle().save(tmp_path_factory.mktemp("model") / "bundle")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of rows where the defaults are twice as slow."""
    rows = []
    for row in trained.rows():
        shape = Shape(**{field.name: row[field.name] for field in dataclasses.fields(Shape)})
        config = Config(**{field.name: row[field.name] for field in dataclasses.fields(Config)})
        slow = 2.0 if config == default_config(shape, trained.ARCH) else 1.0
        rows.append({**row, **{name: row[name] * slow for name in ("latency_us", "latency_p20_us", "latency_p80_us")}})
    bundle = train(trained.columns(rows), op=trained.OP, arch="h200", folds=0)
    return bundle.save(tmp_path_factory.mktemp("model") / "other")


# -- explain


def test_every_feature_of_a_config_is_in_one_group() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    assert set(names) <= set(FEATURES[len(SHAPE_FEATURES) :])
    columns = [at for group in grouped_features().values() for at in group]
    assert sorted(FEATURES[at] for at in columns) == sorted(FEATURES[len(SHAPE_FEATURES) :])


@pytest.mark.parametrize("shape", [trained.UNSEEN, KNOWN, Shape(1, 1, 64, 128, 64, 3000)])
def test_what_moved_multiplies_to_the_ratio_of_predicted_times(folder: Path, shape: Shape) -> None:
    chooser = Selector("h200", bundle_dir=folder, use_exact=False)
    explained = chooser.explain(shape)
    chosen, against = explained.decision.config, explained.moved_against
    default = default_config(shape, trained.ARCH)
    assert against == (explained.decision.runner_up if chosen == default else default)
    own, theirs = chooser.bundle.predict_us(shape, [chosen, against])
    assert math.prod(one.factor for one in explained.moved) == pytest.approx(own / theirs, rel=1e-9)
    rows = chooser.bundle.features(shape, [chosen, against])
    differing = {name for name, a, b in zip(FEATURES, *rows, strict=True) if a != b}
    assert {name for one in explained.moved for name in one.features} == differing
    sizes = [abs(math.log(one.factor)) for one in explained.moved]
    assert sizes == sorted(sizes, reverse=True)


def test_nearest_shapes_say_what_the_chosen_config_took_there(folder: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder)
    near = chooser.explain(KNOWN).nearest[0]
    assert (near.shape, near.distance) == (KNOWN, 0.0)
    assert near.chosen_us == chooser.select(KNOWN).predicted_us
    times = chooser.bundle.exact.times(chooser.bundle.exact.find(KNOWN))
    assert near.default_us == times[default_config(KNOWN, trained.ARCH)]
    far = chooser.explain(Shape(16, 5, 32, 128, 64, 32768)).nearest[0]
    assert far.chosen_us is None or far.chosen_us >= far.latency_us


def test_without_a_model_nothing_moved() -> None:
    explained = Selector("mi355x").explain(Shape(16, 6, 32, 128, 128))
    assert (explained.moved, explained.moved_against, explained.nearest) == ((), None, ())


# -- compare


def test_a_model_against_itself_changes_nothing(folder: Path) -> None:
    found = compare(*(Selector("h200", bundle_dir=folder) for _ in range(2)), [Traffic(shape, 2.0) for shape in GRID])
    assert (found.shapes, found.launches, found.changes) == (len(GRID), 2.0 * len(GRID), ())
    assert (found.changed_launches, found.expected_time_ratio) == (0.0, 1.0)


def test_changes_carry_expected_and_measured_effects(folder: Path, other: Path) -> None:
    old, new = Selector("h200", bundle_dir=folder), Selector("h200", bundle_dir=other)
    traffic = [Traffic(shape, 1.0 + at) for at, shape in enumerate(trained.SHAPES)]
    found = compare(old, new, traffic)
    by_shape = {change.shape: change for change in found.changes}
    changed = 0.0
    for one in traffic:
        picks = old.select(one.shape).config, new.select(one.shape).config
        assert (picks[0] != picks[1]) == (one.shape in by_shape)
        if picks[0] != picks[1]:
            change = by_shape[one.shape]
            times = new.bundle.exact.times(new.bundle.exact.find(one.shape))
            assert (change.old, change.new) == picks
            assert change.measured_ratio == pytest.approx(times[picks[1]] / times[picks[0]], abs=1e-6)
            assert change.expected_ratio == change.measured_ratio, "these shapes were measured"
            changed += one.count
    assert len(found.changes) > 2
    assert found.changed_launches == pytest.approx(changed / sum(one.count for one in traffic))
    assert found.measured_launches == 1.0
    assert found.measured_time_ratio is not None
    assert found.measured_time_ratio < 1.0
    assert json.loads(json.dumps(found.to_dict()))["changed_shapes"] == len(found.changes)
    assert old.counters == {}


def test_models_of_two_gpus_are_not_compared(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="mi355x"):
        compare(Selector("h200", bundle_dir=folder), Selector("mi355x"), [])


def test_the_compare_command(folder: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traffic = tmp_path / "traffic.csv"
    traffic.write_text("batch_size,next_n,heads,max_context_len,count\n" + "16,6,32,32768,5\n12,5,64,20000,1\n")
    words = ["compare", str(folder), str(other), "--arch", "h200", "--home", str(tmp_path)]
    assert main([*words, "--traffic", str(traffic), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["shapes"], printed["launches"]) == (2, 6.0)
    assert main([*words, "--traffic", str(traffic), "--no-exact", "--top", "1"]) == 0
    assert "of the launches" in capsys.readouterr().out
    assert main(["compare", "0123456", str(other), "--arch", "h200", "--home", str(tmp_path)]) == 2
    assert "0 published models" in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    assert main(["compare", str(tmp_path / "broken"), str(other), "--arch", "h200"]) == 2
    assert "manifest.json is missing" in capsys.readouterr().err


# -- dump


def test_a_dump_is_what_select_answers(folder: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder)
    for row, shape in zip(decisions(chooser, GRID), GRID, strict=True):
        decision = chooser.select(shape)
        assert Config.from_dict(row["config"]) == decision.config
        assert (row["source"], row["regime"]) == (decision.source, decision.regime)
        assert row["predicted_us"] == pytest.approx(decision.predicted_us, rel=1e-5)


def test_the_digest_is_that_of_the_decisions_alone(folder: Path, other: Path, tmp_path: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder)
    first = dump(chooser, GRID, tmp_path / "a.jsonl")
    assert dump(Selector("h200", bundle_dir=folder), [*reversed(GRID), GRID[3]], tmp_path / "b.jsonl") == first
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert dump(chooser, GRID) == first
    assert sum(first.sources.values()) == first.shapes == len(GRID)
    assert dump(chooser, GRID[:-1]).digest != first.digest
    assert dump(Selector("h200", bundle_dir=other), GRID).digest != first.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    reloaded = Bundle.load(folder).save(tmp_path / "copy")
    assert dump(Selector("h200", bundle_dir=reloaded), GRID).digest == first.digest


def test_two_processes_with_other_settings_get_one_digest(folder: Path) -> None:
    code = f"""
from tilewise.dispatch.dumping import dump, shape_grid
from tilewise.dispatch.selector import Selector
shapes = shape_grid(batch_sizes=(1, 5, 64, 900), next_n=(1, 6), heads=(32, 128), contexts=(2048, 9000))
print(dump(Selector("h200", bundle_dir={str(folder)!r}), shapes).digest)
"""
    settings: list[dict[str, str]] = [
        {"PYTHONHASHSEED": "1", "OPENBLAS_NUM_THREADS": "1"},
        {"PYTHONHASHSEED": "77", "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX2 FMA3", "OPENBLAS_CORETYPE": "Prescott"},
    ]
    digests = set()
    for extra in settings:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, **extra}, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        digests.add(done.stdout.strip())
    assert digests == {dump(Selector("h200", bundle_dir=folder), GRID).digest}


def test_shapes_that_no_kernel_serves_are_in_the_dump() -> None:
    found = dump(Selector("mi355x"), [Shape(1, 1, 8, 128, 1), Shape(1, 1, 32, 128, 128)])
    assert (found.shapes, found.unserved) == (2, 1)


def test_the_default_grid_has_tens_of_thousands() -> None:
    grid = list(shape_grid())
    assert len(grid) == len(set(grid)) == 20160


def test_the_dump_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = tmp_path / "shapes.jsonl"
    shapes.write_text("".join(json.dumps(shape.to_dict()) + "\n" for shape in GRID))
    words: list[Any] = ["dump", "--arch", "h200", "--bundle", str(folder), "--shapes", str(shapes)]
    assert main([*words, "--out", str(tmp_path / "out.jsonl"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == dump(Selector("h200", bundle_dir=folder), GRID).to_dict()
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(GRID)
    assert main(words) == 0
    assert printed["digest"] in capsys.readouterr().out


def test_candidates_of_a_shape_are_all_explained(folder: Path) -> None:
    explained = Selector("h200", bundle_dir=folder).explain(trained.UNSEEN)
    named = {explained.decision.config, *(one.config for one in explained.rejected)}
    assert set(candidates(trained.UNSEEN, trained.ARCH)) <= named
    assert all(one.reason for one in explained.rejected)
