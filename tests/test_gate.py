"""The gate before promotion: what holds a candidate back, and what does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("sklearn")

import trained

from tilewise.models.bundle import Bundle
from tilewise.models.gate import gate
from tilewise.models.golden import golden_picks


def with_metrics(bundle: Bundle, **metrics: float) -> Bundle:
    return dataclasses.replace(bundle, manifest={**bundle.manifest, "metrics": metrics})


def mistaught() -> Bundle:
    """The same rows, and a rank forest that holds the worst configs for the best."""
    good = trained.bundle()
    rank = dataclasses.replace(good.rank, value=-good.rank.value, baseline=-good.rank.baseline)
    made = Bundle.create(good.manifest, rank, good.level, good.exact, good.arch)
    return Bundle.create({**good.manifest, "golden": golden_picks(made)}, rank, good.level, good.exact, good.arch)


def test_the_first_model_passes() -> None:
    verdict = gate(trained.bundle(), None)
    assert verdict.passed
    assert verdict.to_dict()["reason"] == "there is no model to compare with"


def test_the_same_model_is_no_worse_than_itself() -> None:
    verdict = gate(trained.bundle(), trained.bundle())
    assert verdict.passed
    assert verdict.figures["golden_shapes"] >= 20
    assert verdict.figures["golden_geomean"] == 1.0


def test_worse_picks_on_golden_shapes_are_held_back_and_better_ones_pass() -> None:
    held = gate(mistaught(), trained.bundle())
    assert not held.passed
    assert "on the golden shapes" in held.reason
    assert held.figures["golden_geomean"] > 1.01
    assert gate(trained.bundle(), mistaught()).passed


@pytest.mark.parametrize("name", ["geomean_regret", "p90_regret", "worst_regret", "worst_against_default"])
def test_a_held_out_figure_may_rise_by_noise_and_no_more(name: str) -> None:
    bundle = trained.bundle()
    old = with_metrics(bundle, **{name: 1.01})
    noise = bundle.noise_margin
    assert gate(with_metrics(bundle, **{name: 1.01 * (1 + 0.9 * noise)}), old).passed
    held = gate(with_metrics(bundle, **{name: 1.01 * (1 + 1.1 * noise)}), old)
    assert not held.passed
    assert name in held.reason


def test_a_candidate_that_fails_its_own_check_is_held_back() -> None:
    bundle = trained.bundle()
    broken = dataclasses.replace(bundle, rank=dataclasses.replace(bundle.rank, value=bundle.rank.value + 0.1))
    verdict = gate(broken, bundle)
    assert not verdict.passed
    assert "fails its own check" in verdict.reason
    assert np.isfinite(verdict.figures.get("golden_geomean", 1.0))
