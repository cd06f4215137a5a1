"""Plans for graph capture: which binaries, for which launches, and whether fewer would do."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("hypothesis")

import trained
from hypothesis import given
from hypothesis import strategies as st

from tilewise.cli import main
from tilewise.dispatch import capture_plan as planning
from tilewise.dispatch.capture_plan import CapturePlan, capture_plan
from tilewise.dispatch.context import Context
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidContextError, InvalidPlanError, InvalidShapeError
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, at_context_len, default_config, is_valid
from tilewise.models.expected import as_run

BATCHES = [1, 2, 3, 8, 16, 40, 64]


@pytest.fixture(scope="module")
def chooser(tmp_path_factory: pytest.TempPathFactory) -> Selector:
    folder = trained.bundle().save(tmp_path_factory.mktemp("model") / "bundle")
    return Selector("h200", bundle_dir=folder, use_exact=False)


def plan_of(chooser: Selector, **changes: object) -> CapturePlan:
    setup = {"next_n": [1, 6], "heads": 64, "max_model_len": 32768, "context": (2048, 32768), **changes}
    return capture_plan(BATCHES, chooser=chooser, **setup)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_loss", [0.0, 0.02, 0.2])
def test_every_launch_is_valid_and_within_the_loss(chooser: Selector, max_loss: float) -> None:
    plan = plan_of(chooser, max_loss=max_loss)
    assert [(one.shape.batch_size, one.shape.next_n) for one in plan.planned] == [
        (b, n) for n in (1, 6) for b in BATCHES
    ]
    assert plan.optimal
    defaults = {planning._binary(one.default) for one in plan.planned}
    for one in plan.planned:
        assert is_valid(one.shape, one.config, trained.ARCH) is None
        assert one.default == default_config(one.shape, trained.ARCH)
        assert one.loss is not None
        assert 0.0 <= one.loss <= max_loss + chooser.bundle.noise_margin
        shapes = [at_context_len(one.shape, length) for length in plan.context.lengths]
        times = [chooser.bundle.predict_us(shape, [as_run(one.config, shape)])[0] for shape in shapes]
        assert one.expected_us == pytest.approx(float(np.dot(plan.context.weights, times)), rel=0.02)
        assert planning._binary(one.config) in {planning._binary(c) for c in plan.binaries} | defaults


def test_a_larger_loss_never_takes_more_binaries(chooser: Selector) -> None:
    counts = [len(plan_of(chooser, max_loss=loss).binaries) for loss in (0.0, 0.01, 0.05, 0.5)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_binaries_are_those_that_are_used_beside_the_defaults(chooser: Selector) -> None:
    plan = plan_of(chooser, max_loss=0.0)
    used = {planning._binary(one.config) for one in plan.planned} - {planning._binary(o.default) for o in plan.planned}
    assert {planning._binary(config) for config in plan.binaries} == used
    assert set(plan.launches()) >= {(one.shape, one.config) for one in plan.planned}
    assert set(plan.launches()) >= {(one.shape, one.default) for one in plan.planned}


SETS = st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=8)


@given(SETS, st.sets(st.integers(0, 6), max_size=2))
def test_a_cover_that_is_called_optimal_is_the_smallest(numbers: list[set[int]], free: set[int]) -> None:
    options = [{Config(fuse_n=1 + at) for at in own} for own in numbers]
    given_free = {Config(fuse_n=1 + at) for at in free}
    chosen, optimal = planning._cover(options, given_free)
    every = sorted({config for own in options for config in own})
    least = next(
        size
        for size in range(len(every) + 1)
        for some in itertools.combinations(every, size)
        if all(own & (set(some) | given_free) for own in options)
    )
    assert all(own & (chosen | given_free) for own in options)
    assert optimal
    assert len(chosen) == least


def test_a_cover_that_was_not_proven_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_COMBINATIONS", 1)
    options = [{Config(fuse_n=a), Config(fuse_n=b)} for a, b in ((1, 2), (2, 3), (3, 1))]
    assert planning._cover(options, set())[1] is False


def test_beyond_what_was_measured_the_default_is_planned(chooser: Selector) -> None:
    plan = capture_plan([4000], next_n=6, heads=64, max_model_len=32768, context=(2048, 32768), chooser=chooser)
    assert plan.planned[0].config == plan.planned[0].default
    nothing = capture_plan([4], next_n=6, heads=64, max_model_len=9000, chooser=Selector("h200", bundle_dir="nowhere"))
    assert (nothing.planned[0].config, nothing.planned[0].expected_us) == (nothing.planned[0].default, None)
    assert nothing.context == Context.range(1024, 9000)


def test_a_plan_survives_a_file(chooser: Selector, tmp_path: Path) -> None:
    plan = plan_of(chooser)
    plan.save(tmp_path / "plan.json")
    assert CapturePlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"format": "tilewise-capture-plan", "format_version": 2}', '{"format": 1'],
)
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InvalidPlanError):
        CapturePlan.load(tmp_path / "plan.json")
    with pytest.raises(InvalidPlanError):
        CapturePlan.load(tmp_path / "none")


def test_a_damaged_part_of_a_plan_is_refused(chooser: Selector) -> None:
    values = plan_of(chooser).to_dict()
    for change in (
        {"planned": [{**values["planned"][0], "shape": {"batch_size": -1, "next_n": 1, "heads": 32}}]},
        {"planned": [{**values["planned"][0], "config": {"fuse_n": "6"}}]},
        {"planned": 5},
        {"context": {"lengths": [1]}},
        {"max_loss": None},
    ):
        with pytest.raises(InvalidPlanError):
            CapturePlan.from_dict({**values, **change})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_model_len": 0}, InvalidContextError),
        ({"max_model_len": 4096}, InvalidContextError),
        ({"max_loss": -0.1}, InvalidContextError),
        ({"max_loss": float("nan")}, InvalidContextError),
        *(({"worst_case": bound}, InvalidContextError) for bound in (float("nan"), float("inf"), 0.9, -5, True)),
        ({"next_n": 9}, InvalidShapeError),
        ({"next_n": []}, InvalidShapeError),
        ({"heads": 7}, InvalidShapeError),
    ],
)
def test_a_setup_that_cannot_be_is_refused(chooser: Selector, changes: dict[str, object], error: type) -> None:
    with pytest.raises(error):
        plan_of(chooser, **changes)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["capture-plan", "--arch", "h200", "--home", str(tmp_path), "--batch-sizes", "1,16", "--next-n", "6"]
    words += ["--heads", "32", "--max-model-len", "65536", "--out", str(tmp_path / "plan.json")]
    assert main([*words, "--context", "1024:3,8192:1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "plan.json").read_text())
    assert printed["context"] == {"lengths": [1024, 8192], "weights": [0.75, 0.25]}
    assert main([*words, "--context", "1024-65536"]) == 0
    assert "binaries beside the defaults" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--context", "9-x"])
    assert "LOW-HIGH" in capsys.readouterr().err


def test_warm_up_of_a_plan_loads_every_launch_of_it(chooser: Selector, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("tilewise.kernels.paged_mqa_logits.launch")
    compiled: list[tuple[Shape, Config]] = []
    monkeypatch.setattr(
        launch, "compile_config", lambda shape, config, traits, device: compiled.append((shape, config))
    )
    plan = plan_of(chooser, max_loss=0.0)
    launch.warm_up(plan, device="cpu")
    assert set(compiled) == set(plan.launches())
    assert len(compiled) == len(set(compiled))
