"""Which rows count where several speak of one launch, and what a turn of retraining does with the result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

import synthetic
import trained

from tilewise.data.traffic import Traffic
from tilewise.kernels.paged_mqa_logits.spec import Shape, candidates
from tilewise.models import registry
from tilewise.models.measurements import Measurements, measurements
from tilewise.models.retrain import retrain
from tilewise.models.weights import MOST, traffic_weights

SHAPE = trained.SHAPES[0]
ONE, TWO = candidates(SHAPE, trained.ARCH)[:2]


def row(us: float, config=ONE, **changes):
    times = {"latency_us": us, "latency_p20_us": us, "latency_p80_us": us}
    return synthetic.synthetic_row(SHAPE, config, **{**times, **changes})


def times(*rows) -> tuple[Measurements, dict]:
    table = measurements(trained.columns(rows), op=trained.OP, arch="h200")
    found = {table.configs[at]: us for at, us in zip(table.config_id.tolist(), table.latency_us.tolist(), strict=True)}
    return table, found


def test_runs_that_agree_are_averaged() -> None:
    table, found = times(row(10.0, run_id="a"), row(10.8, run_id="b"), row(20.0, TWO))
    assert found[ONE] == pytest.approx((10.0 * 10.8) ** 0.5)
    assert table.dropped == {}


@pytest.mark.parametrize("late", ["a", "b"])
def test_of_runs_that_contradict_each_other_the_last_counts(late: str) -> None:
    moments = {run: f"2026-02-0{2 if run == late else 1}T00:00:00Z" for run in "ab"}
    table, found = times(
        row(10.0, run_id="a", measured_at=moments["a"]), row(12.0, run_id="b", measured_at=moments["b"]), row(20.0, TWO)
    )
    assert found[ONE] == pytest.approx(10.0 if late == "a" else 12.0)
    assert table.dropped == {"contradicted by a later run": 1}


def test_repeats_within_one_run_do_not_contradict_each_other() -> None:
    table, found = times(row(10.0), row(12.0, measured_at="2026-02-01T00:00:00Z"), row(20.0, TWO))
    assert found[ONE] == pytest.approx((10.0 * 12.0) ** 0.5)
    assert table.dropped == {}


def test_another_compiler_counts_only_where_the_newest_has_no_time() -> None:
    old, new = {"triton_version": "3.5.0"}, {"triton_version": "3.6.0", "measured_at": "2026-02-01T00:00:00Z"}
    table, found = times(row(10.0, **old), row(30.0, **new), row(20.0, TWO, **old))
    assert found == {ONE: pytest.approx(30.0), TWO: pytest.approx(20.0)}
    assert table.dropped == {"of another compiler than later rows of the launch": 1}
    assert table.toolchain["triton_version"] == ["3.5.0", "3.6.0"]


def test_the_order_of_rows_decides_nothing() -> None:
    rows = [
        row(10.0, run_id="a", measured_at="2026-02-01T00:00:00Z"),
        row(14.0, run_id="b", measured_at="2026-02-03T00:00:00Z"),
        row(11.0, run_id="c", measured_at="2026-02-02T00:00:00Z"),
        row(20.0, TWO, triton_version="3.5.0"),
    ]
    assert times(*rows)[1] == times(*rows[::-1])[1]


def test_traffic_weighs_the_shapes_near_it() -> None:
    shapes = trained.SHAPES
    asked = shapes[5]
    weight = traffic_weights(shapes, [Traffic(asked, 90.0), Traffic(Shape(60, 6, 64, 128, 64, 30000), 10.0)])
    assert len(weight) == len(shapes)
    assert weight.argmax() == 5
    assert weight.min() == 0.5  # what is not asked for is not forgotten
    assert weight.max() <= MOST
    even = traffic_weights(shapes, [Traffic(shape, 1.0) for shape in shapes])
    assert np.allclose(even.mean(), 1.0)


def test_retraining_promotes_what_is_no_worse_and_stores_what_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = trained.columns(trained.rows())
    made = retrain(columns, op=trained.OP, arch="h200", home=tmp_path, folds=0, promote=False)
    assert not made.promoted
    assert registry.published(trained.OP, "h200", tmp_path) is None
    assert registry.promote(trained.OP, "h200", made.candidate.digest, tmp_path) == made.path
    again = retrain(columns, op=trained.OP, arch="h200", home=tmp_path, folds=0)
    assert again.gate.passed
    assert not again.promoted  # it is the one in force
    assert again.replaces is not None
    assert again.replaces.digest == again.candidate.digest

    # Rows that turn the times around teach the model worse picks, were the old rows the truth.
    half = trained.columns(trained.rows()[: len(trained.rows()) // 2])
    other = retrain(half, op=trained.OP, arch="h200", home=tmp_path, folds=0)
    assert other.promoted == other.gate.passed
    assert registry.history(trained.OP, "h200", tmp_path)[0] == (
        other.candidate.digest if other.promoted else again.candidate.digest
    )
    registry.load_version(other.path, trained.OP, "h200")
    assert other.to_dict()["gate"]["reason"]
