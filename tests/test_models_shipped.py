"""The bundles that come with the package: whole, of the profiles and kernels that come with it, and as good as told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from tilewise.data.store import load_profile
from tilewise.dispatch.selector import Selector
from tilewise.kernels.paged_mqa_logits.spec import Shape, candidates, floor_us
from tilewise.models import registry
from tilewise.models.bundle import Bundle, unsquash
from tilewise.models.golden import verify
from tilewise.models.latency import data_digest
from tilewise.models.measurements import installed_hash, measurements

FITTED = registry.shipped("paged_mqa_logits", "h200").parent.parent
SHIPPED = sorted(path.parent for path in FITTED.glob("*/*/manifest.json"))


def test_there_is_a_bundle_for_the_measured_gpu() -> None:
    assert registry.shipped("paged_mqa_logits", "h200") in SHIPPED


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_shipped_bundle_loads_and_keeps_its_golden_picks(folder: Path) -> None:
    bundle = Bundle.load(folder)
    assert (bundle.op, bundle.arch.name) == (folder.parent.name, folder.name)
    verify(bundle)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_shipped_bundle_was_trained_on_the_shipped_profile_of_the_kernels_as_they_are(
    folder: Path, tmp_path: Path
) -> None:
    bundle = Bundle.load(folder)
    profile = load_profile(bundle.op, bundle.arch.name, home=tmp_path)
    measured = measurements(profile.columns, op=bundle.op, arch=bundle.arch.name)
    assert bundle.manifest["data"]["digest"] == data_digest(measured), "train the shipped bundle again"
    for kernel, source in bundle.kernel_hashes.items():
        assert installed_hash(kernel) == source, f"kernel {kernel} changed: measure and train again"


def test_the_h200_bundle_is_as_good_as_was_asked_and_better_than_every_baseline() -> None:
    metrics = Bundle.load(registry.shipped("paged_mqa_logits", "h200")).manifest["metrics"]
    assert metrics["judged_shapes"] >= 60
    assert metrics["failures"] == 0
    assert metrics["geomean_regret"] <= 1.015
    assert metrics["worst_regret"] <= 1.10
    for name in ("default", "rule", "nearest"):
        baseline = metrics["baselines"][name]
        assert metrics["geomean_regret"] < baseline["geomean_regret"]
        assert metrics["worst_regret"] < baseline["worst_regret"]


def test_the_usual_decode_shape_is_answered_from_measurement(tmp_path: Path) -> None:
    decision = Selector("h200", home=tmp_path).select(Shape(16, 6, 32, 128, 64, 131072))
    assert (decision.source, decision.regime) == ("exact", "inside")
    assert decision.config.fuse_n == 6
    assert 100 < decision.predicted_us < 200


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize("sizes", [
    (1, 1, 32, 128, 64, 1), (1, 1, 16, 64, 64, 1), (3, 8, 128, 128, 16, 7), (1, 6, 32, 128, 64, 65),
    (2, 1, 8, 128, 64, 512), (1 << 20, 8, 64, 128, 64, 1), (14, 4, 8, 128, 64, 500247),
    (1 << 20, 8, 128, 128, 256, 1 << 24), (64, 6, 32, 128, 64, 32768, 1),
])  # fmt: skip
def test_no_predicted_time_is_below_what_any_launch_takes(folder: Path, sizes: tuple[int, ...]) -> None:
    """Far from what was measured, too: not below the fastest measured launch, nor below the shape's own floor."""
    bundle, shape = Bundle.load(folder), Shape(*sizes)
    chooser = Selector(bundle.arch, bundle_dir=folder, use_exact=False)
    least = float(np.nanmin(bundle.exact.latency_us))
    times = [one.predicted_us for one in chooser.rank(shape) if one.predicted_us is not None]
    assert min(times) >= max(least, 0.98 * floor_us(shape, bundle.arch))
    assert bundle.masks is not None, "walked, a cold selection takes five times as long"
    # The order and the ratios are the model's own.
    configs = candidates(shape, bundle.arch)
    ratio = np.exp(np.minimum(unsquash(bundle.scores(shape, configs), bundle.manifest["rank"]["squash"]), 50.0))
    predicted = bundle.predict_us(shape, configs)
    assert np.allclose(predicted / predicted.min(), ratio / ratio.min(), rtol=1e-12)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_scores_of_a_selection_are_those_of_the_walked_forest(folder: Path) -> None:
    """To the last bit, with masks that are remembered by the structure of the configs, and without."""
    bundle = Bundle.load(folder)
    for _ in range(2):
        for sizes in ((1, 1, 32), (16, 6, 32), (16, 6, 64), (3, 8, 128)):
            for length in (300, 4097, 30000):
                shape = Shape(*sizes, max_context_len=length)
                configs = candidates(shape, bundle.arch)
                expected = bundle.rank.walk(bundle.features(shape, configs))
                assert np.array_equal(bundle.scores(shape, configs), expected)
                assert np.array_equal(bundle.scores(shape, configs[:1]), expected[:1])
