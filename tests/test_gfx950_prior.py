"""The gfx950 prior: its constants are what the calibration gives, its errors are stated, and selections name it."""

from __future__ import annotations

import importlib.util
import math
import statistics
from pathlib import Path

import pytest

from tilewise.dispatch.selector import Selector
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.gfx950 import aiter_model, prior, space
from tilewise.kernels.paged_mqa_logits.spec import Shape, candidates, default_config, floor_us

MI355X = get_arch("mi355x")
REPORTED = Shape(16, 6, 32, 128, 128, 131072, None, "preshuffled")


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parent.parent / "benchmarks" / "gfx950_prior.py"
    spec = importlib.util.spec_from_file_location("gfx950_prior", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constants_are_what_the_calibration_gives(benchmark):
    assert benchmark.fit() == prior.FITTED


def test_calibration_rows_are_the_ones_that_are_named(benchmark):
    points = {round(us, 2): work for _, work, us in benchmark.calibration()}
    assert sorted(points) == [3.83, 51.26, 139.1, 219.2, 362.8]
    for us, work in points.items():
        assert prior.predict_us(work, MI355X) == pytest.approx(us, rel=0.06)


@pytest.mark.parametrize(("method", "rows"), [("graph", 2), ("kernel, method not stated", 12)])
def test_error_on_published_rows_that_were_not_calibrated_on(benchmark, method, rows):
    errors = [
        abs(prior.predict_us(work, MI355X) / us - 1) for found, _, work, us in benchmark.held_out() if found == method
    ]
    assert len(errors) == rows
    assert statistics.median(errors) <= 0.20
    assert max(errors) <= 0.25


def test_fusing_the_reported_shape_is_predicted_to_pay(benchmark):
    found = benchmark.gains()
    assert found["aiter_us"] == pytest.approx(139.1, rel=0.02)
    assert found["fused_over_per_next_n"] > 1
    assert found["fused_over_aiter"] > 1.27


@pytest.mark.parametrize("batch_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("context", [1, 512, 8192, 131072])
@pytest.mark.parametrize("next_n", [1, 2, 5, 6])
def test_every_candidate_gets_a_time_that_the_card_could_reach(batch_size, context, next_n):
    shape = Shape(batch_size, next_n, 32, 128, 64, context, None, "preshuffled")
    for config in candidates(shape, MI355X):
        us = space.prior_us(shape, config, MI355X)
        assert math.isfinite(us)
        assert us >= prior.FITTED.latency_us
        assert us >= 0.9 * floor_us(shape, MI355X)


def test_an_empty_batch_takes_no_less_than_a_launch():
    shape = Shape(0, 6, 32, 128, 64, 131072, None, "preshuffled")
    assert space.prior_us(shape, default_config(shape, MI355X), MI355X) == prior.FITTED.latency_us
    assert aiter_model.predicted_us(shape, MI355X) == prior.FITTED.latency_us


def test_keys_that_groups_share_cost_less_where_the_order_keeps_them_on_one_die():
    shape = Shape(16, 6, 32, 128, 128, 131072, None, "preshuffled")
    one = space.config_of(1, space.offered(shape, 1)[0], 10, "xcd")
    other = space.config_of(1, space.offered(shape, 1)[0], 10, "launched")
    assert space.prior_us(shape, one, MI355X) < space.prior_us(shape, other, MI355X)


def test_aiters_kernel_without_counts_is_no_peer():
    assert aiter_model.predicted_us(Shape(16, 6, 16, 128, 64, 131072, None, "preshuffled"), MI355X) == math.inf
    assert aiter_model.predicted_us(Shape(16, 6, 32, 128, 64, 131072, None, "flat"), MI355X) == math.inf


def test_a_selection_says_prior_and_names_what_it_rests_on():
    decision = Selector("gfx950").select(REPORTED)
    assert decision.source == "prior"
    assert decision.config.kernel == "gfx950"
    assert decision.predicted_us > 0
    for words in ("published", "ROCm/aiter#5477", "139.1", "not measured"):
        assert words in decision.reason
