"""One config for many contexts: what is accepted, what is weighed, and which config comes out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("hypothesis")

import trained
from hypothesis import given
from hypothesis import strategies as st

from tilewise.dispatch.context import MOST_LENGTHS, Context
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidContextError
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, at_context_len, default_config, is_valid
from tilewise.models.expected import as_run, choose_expected

KNOWN = Shape(16, 6, 32, 128, 64, 32768)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.bundle().save(tmp_path_factory.mktemp("model") / "bundle")


@pytest.fixture
def chooser(folder: Path) -> Selector:
    return Selector("h200", bundle_dir=folder)


# -- the value


def test_forms_of_a_context() -> None:
    assert Context.of(512) == Context.of(np.int32(512)) == Context.exact(512) == Context((512,), (1.0,))
    assert Context.of({512: 3, 1024: 1}) == Context((512, 1024), (0.75, 0.25))
    assert Context.of((512, 2048)) == Context.of([512, 2048]) == Context.range(512, 2048)
    assert Context.range(512, 2048).lengths == (512, 724, 1024, 1448, 2048)
    assert Context.range(7, 7).lengths == (7,)
    assert Context.histogram({9: 0, 5: 2}) == Context.exact(5)
    made = Context.histogram({1: 1, 100: 2})
    assert Context.of(made) is made
    assert Context.from_dict(made.to_dict()) == made


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "int from 0"),
        (-1, "int from 0"),
        (1 << 25, "int from 0"),
        ("long", "int from 0"),
        (1.5, "int from 0"),
        ((1, 2, 3), "(low, high)"),
        ((9, 2), "low <= high"),
        ((0, 2), "low <= high"),
        ({}, "above 0"),
        ({5: 0}, "above 0"),
        ({5: -1}, "0 or more"),
        ({5: math.nan}, "0 or more"),
        ({5: math.inf}, "0 or more"),
        ({5: True}, "0 or more"),
        ({5: "x"}, "0 or more"),
        ({"a": 1}, "int from 0"),
        (None, "int from 0"),
    ],
)
def test_what_is_no_context_is_refused(value: Any, said: str) -> None:
    with pytest.raises(InvalidContextError) as refused:
        Context.of(value)
    assert said in str(refused.value)


@given(st.dictionaries(st.integers(0, 1 << 24), st.floats(1e-6, 1e9), min_size=1, max_size=300))
def test_a_histogram_is_bounded_and_keeps_its_longest_and_its_weight(counts: dict[int, float]) -> None:
    context = Context.of(counts)
    assert len(context.lengths) <= MOST_LENGTHS
    assert list(context.lengths) == sorted(set(context.lengths))
    assert context.longest == max(counts)
    assert set(context.lengths) <= set(counts)
    assert sum(context.weights) == pytest.approx(1.0)


# -- the rule

A, B, C = (Config(split_kv=split) for split in (1, 2, 3))


def test_the_least_expected_time_wins_within_the_bound() -> None:
    times = np.array([[10.0, 9.0, 12.0], [100.0, 99.0, 80.0]])
    open_ = choose_expected([A, B, C], times, [0.5, 0.5], 0, 0.01, worst_case=2.0)
    assert (open_.chosen, open_.bounded) == (2, True)
    assert open_.expected_us.tolist() == [55.0, 54.0, 46.0]
    bound = choose_expected([A, B, C], times, [0.5, 0.5], 0, 0.01, worst_case=1.3)
    assert bound.chosen == 1, "C takes 4/3 of the best at the first context"
    assert choose_expected([A, B, C], times, [0.99, 0.01], 0, 0.2, worst_case=2.0).chosen == 0, "default within noise"
    none = choose_expected([A, B, C], times, [0.5, 0.5], 0, 0.01, worst_case=1.0)
    assert (none.chosen, none.bounded) == (1, False), "the least worst case, 99/80"


def test_a_default_beyond_the_bound_gives_way() -> None:
    times = np.array([[10.0, 10.0], [20.0, 15.0]])
    assert choose_expected([A, B], times, [1.0, 0.0], 0, 0.03, worst_case=1.1).chosen == 1
    assert choose_expected([A, B], times, [1.0, 0.0], 0, 0.03, worst_case=2.0).chosen == 0


def test_ties_and_unknown_times() -> None:
    tied = np.array([[5.0, 5.0, 5.0]] * 2)
    assert choose_expected([C, B, A], tied, [0.5, 0.5], None, 0.0).chosen == 2, "the fixed order of configs"
    assert choose_expected([C, B, A], tied, [0.5, 0.5], 1, 0.0).chosen == 1, "the default in a tie"
    holes = np.array([[1.0, 5.0], [np.nan, 5.0]])
    assert choose_expected([A, B], holes, [0.5, 0.5], 0, 0.0).chosen == 1
    with pytest.raises(ValueError, match="every context"):
        choose_expected([A, B], np.array([[1.0, np.nan], [np.nan, 1.0]]), [0.5, 0.5], 0, 0.0)


def test_splits_beyond_the_tiles_run_as_fewer() -> None:
    shape = Shape(1, 1, 32, max_context_len=1000)
    assert as_run(Config(split_kv=40, tile_kv=64), shape) == Config(split_kv=16, tile_kv=64)
    assert as_run(Config(split_kv=16, tile_kv=64), shape) == Config(split_kv=16, tile_kv=64)


# -- the selector


def test_a_single_length_is_the_plain_selection(chooser: Selector) -> None:
    for length in (32768, 20000):
        assert chooser.select(KNOWN, context=length) == chooser.select(at_context_len(KNOWN, length))
    assert chooser.select(batch_size=16, next_n=6, heads=32, context=20000).config == (
        chooser.select(at_context_len(KNOWN, 20000)).config
    )


@pytest.mark.parametrize("context", [(2048, 32768), {2048: 5, 5000: 1, 32768: 2}, {2048: 1, 32768: 1}])
def test_the_pick_is_the_best_by_the_bundles_own_times(chooser: Selector, context: Any) -> None:
    shape = Shape(3, 6, 64)
    decision = chooser.select(shape, context=context)
    weighed = Context.of(context)
    assert (decision.source, decision.regime) in (("model", "inside"), ("exact", "inside"))
    shapes = [at_context_len(shape, length) for length in weighed.lengths]
    assert all(is_valid(one, decision.config, trained.ARCH) is None for one in shapes)
    assert "contexts from 2048 to 32768" in decision.reason
    default = default_config(shapes[-1], trained.ARCH)
    best = chooser.bundle.predict_us  # for a model's answer, by hand
    if decision.source == "model" and len(weighed.lengths) > 3:
        own, kept = (
            sum(w * best(s, [as_run(c, s)])[0] for w, s in zip(weighed.weights, shapes, strict=True))
            for c in (decision.config, default)
        )
        assert own <= kept * 1.000001 or decision.config == default


def test_it_is_remembered_and_counted(chooser: Selector) -> None:
    one = chooser.select(KNOWN, context=(2048, 32768))
    assert chooser.select(KNOWN, context=Context.range(2048, 32768)) is one
    assert chooser.select(KNOWN, context=(2048, 32768), worst_case=1.5) is not one
    (row,) = chooser.shapes_seen()
    assert row["count"] == 3
    assert row["context"] == Context.range(2048, 32768).to_dict()


def test_beyond_what_was_measured_the_default_stays(chooser: Selector) -> None:
    decision = chooser.select(KNOWN, context=(16, 32768))
    assert (decision.source, decision.regime) == ("default", "extrapolated")
    assert decision.config == default_config(KNOWN, trained.ARCH)
    assert "max_context_len 16 is outside the measured 2048 to 32768" in decision.reason
    assert decision.reason.count("outside") == 1, "one clause for each kind of distance"
    assert chooser.counters == {"extrapolated": 1}


@pytest.mark.parametrize("arch", ["h200", "mi355x", "h100"])
def test_without_a_usable_bundle_it_still_answers(arch: str) -> None:
    chooser = Selector(arch, bundle_dir="nowhere")
    decision = chooser.select(Shape(16, 6, 32, 128, 128), context=(1024, 65536))
    assert decision.source in ("default", "prior")
    assert chooser.counters["no_bundle"] == 1
    assert chooser.select(Shape(0, 6, 32, 128, 128), context=(1024, 65536)).config
    assert chooser.select(Shape(2, 6, 32, 128, 128), context={0: 1, 9: 1}).config


def test_a_failure_inside_is_a_counted_default(chooser: Selector, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a damaged table")

    monkeypatch.setattr(type(chooser.bundle), "predict_us", broken)
    decision = chooser.select(KNOWN, context=(3000, 30000))
    assert decision.config == default_config(at_context_len(KNOWN, 30000), trained.ARCH)
    assert "a damaged table" in decision.reason
    assert chooser.counters["error"] == 1


@pytest.mark.parametrize("bound", [0.9, math.inf, math.nan, True, "2"])
def test_a_bound_that_is_none_is_refused(chooser: Selector, bound: Any) -> None:
    with pytest.raises(InvalidContextError, match="worst_case"):
        chooser.select(KNOWN, context=(2048, 4096), worst_case=bound)


def test_the_memory_of_contexts_is_bounded(chooser: Selector, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.dispatch import selector as selecting

    monkeypatch.setattr(selecting, "CONTEXT_MEMO_LIMIT", 4)
    for high in range(3000, 3012):
        chooser.select(KNOWN, context={2500: 1, high: 1})
        assert len(chooser._state.by_context) <= 4
