"""The ladder and its memory: never an exception for a valid shape, never a silent fallback."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("hypothesis")

import synthetic
import trained
from forked import held_by_another_thread, status_of_child
from hypothesis import given
from hypothesis import strategies as st

from tilewise.dispatch import ladder
from tilewise.dispatch import selector as selecting
from tilewise.dispatch.decision import Decision
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidConfigError, InvalidShapeError, UnsupportedError
from tilewise.kernels.arch import ARCHS, get_arch, match_arch
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, default_config, is_valid
from tilewise.models import registry
from tilewise.models.bundle import FILES, MANIFEST, Bundle
from tilewise.models.bundle import _digest as digest_of
from tilewise.models.choice import PREDICTED_TIE, choose
from tilewise.models.forest import Forest
from tilewise.models.latency import train
from tilewise.models.smooth import Smooth

KNOWN = Shape(16, 6, 32, 128, 64, 32768)
TIMES = ("latency_us", "latency_p20_us", "latency_p80_us")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.bundle().save(tmp_path_factory.mktemp("model") / "bundle")


@pytest.fixture
def chooser(folder: Path) -> Selector:
    return Selector("h200", bundle_dir=folder)


def retrained(change: Any, folder: Path) -> Selector:
    """A selector on a bundle trained from changed rows."""
    rows = [changed for row in trained.rows() if (changed := change(dict(row))) is not None]
    train(trained.columns(rows), op=trained.OP, arch="h200", folds=0).save(folder)
    return Selector("h200", bundle_dir=folder)


# -- the rungs


def test_a_measured_shape_gets_its_measured_best(chooser: Selector) -> None:
    # The second pass of the synthetic rows is 0.1 % slower throughout, which is scaled away.
    mean = {
        Config(**{name: row[name] for name in spec.CONFIG_FIELDS}): row["latency_us"]
        for row in trained.rows()
        if Shape(**{name: row[name] for name in spec.SHAPE_FIELDS}) == KNOWN and row["pass_index"] == 0
    }
    decision = chooser.select(KNOWN)
    assert (decision.source, decision.regime) == ("exact", "inside")
    assert decision.predicted_us == pytest.approx(mean[decision.config], rel=1e-4)
    assert mean[decision.config] <= min(mean.values()) * (1 + chooser.bundle.noise_margin)
    assert decision.margin == pytest.approx(mean[decision.runner_up] / mean[decision.config] - 1, abs=1e-4)
    assert decision.model_id == chooser.bundle.model_id
    assert "measured" in decision.reason
    assert chooser.counters == {}


def test_an_unseen_shape_inside_gets_the_models_pick(chooser: Selector) -> None:
    decision = chooser.select(trained.UNSEEN)
    configs = spec.candidates(trained.UNSEEN, trained.ARCH)
    times = chooser.bundle.predict_us(trained.UNSEEN, configs)
    margin, _ = chooser.bundle.margin(trained.UNSEEN)
    chosen, runner_up = choose(configs, times, 0, margin, PREDICTED_TIE)
    assert (decision.source, decision.regime) == ("model", "inside")
    assert (decision.config, decision.runner_up) == (configs[chosen], configs[runner_up])
    assert decision.predicted_us == pytest.approx(times[chosen])
    assert "predicted" in decision.reason
    assert chooser.counters == {}


def test_a_next_n_between_measured_ones_gets_no_claim_that_was_not_tried(chooser: Selector) -> None:
    shape = Shape(12, 5, 64, 128, 64, 20000)  # of next_n, 1, 2 and 6 were measured
    decision = chooser.select(shape)
    assert (decision.source, decision.regime) == ("default", "extrapolated")
    assert decision.config == default_config(shape, trained.ARCH)
    assert "next_n" in decision.reason
    assert "()" not in decision.reason
    assert chooser.counters == {"extrapolated": 1}


def test_without_the_exact_rung_a_measured_shape_is_predicted(folder: Path) -> None:
    assert Selector("h200", bundle_dir=folder, use_exact=False).select(KNOWN).source == "model"


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(4096, 6, 32, 128, 64, 4096), "batch_size 4096 is outside the measured 1 to 64"),
        (Shape(3, 6, 128, 128, 64, 4096), "heads 128 was not measured"),
        (Shape(3, 6, 64, 128, 128, 4096), "block_kv 128 was not measured"),
        (Shape(3, 6, 64, 64, 64, 4096), "head_dim 64 was not measured"),
    ],
)
def test_beyond_what_was_measured_the_decision_says_so(chooser: Selector, shape: Shape, said: str) -> None:
    decision = chooser.select(shape)
    assert (decision.source, decision.regime) == ("default", "extrapolated")
    assert decision.config == default_config(shape, trained.ARCH)
    assert said in decision.reason
    assert chooser.counters == {"extrapolated": 1}


def test_a_transfer_whose_loss_was_measured_and_small_is_taken(folder: Path, tmp_path: Path) -> None:
    bundle = trained.bundle()
    shape = Shape(100, 6, 32, 128, 64, 32768)
    nearest = Shape(64, 6, 32, 128, 64, 32768)
    bound = {"shapes": 9, "reach": 2.0, "worst": 1.04, "geomean": 1.01, "default_worst": 1.2, "default_geomean": 1.02}
    manifest = {**bundle.manifest, "regime": {**bundle.manifest["regime"], "transfers": {"batch_size high": bound}}}
    Bundle.create(manifest, bundle.rank, bundle.level, bundle.exact, bundle.arch).save(tmp_path / "b")
    decision = Selector("h200", bundle_dir=tmp_path / "b").select(shape)
    assert (decision.source, decision.regime) == ("nearest", "extrapolated")
    best, _ = bundle.exact.best(bundle.exact.find(nearest))
    assert (decision.config.fuse_n, decision.config.tile_kv) == (best.fuse_n, best.tile_kv)
    assert "at most 1.04x" in decision.reason


def test_a_kernels_prior_answers_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(4, 2, 32)
    configs = spec.candidates(shape, ARCHS["h100"])
    wanted = configs[3]
    spaces = [spec.space(kernel) for kernel in {config.kernel for config in configs}]
    prior = lambda shape, config, arch: 5.0 if config == wanted else 9.0  # noqa: E731
    for own in spaces:
        monkeypatch.setattr(own, "prior_us", prior, raising=False)
    decision = Selector("h100", bundle_dir="nowhere").select(shape)
    assert (decision.source, decision.config, decision.predicted_us) == ("prior", wanted, 5.0)
    assert "not measured" in decision.reason
    for own in spaces:
        monkeypatch.setattr(own, "prior_us", lambda *_: 9.0, raising=False)
    assert Selector("h100", bundle_dir="nowhere").select(shape).config == configs[0]


@pytest.mark.parametrize(("shape", "said"), [(Shape(0, 6, 32), "empty batch"), (Shape(5, 6, 32, 128, 64, 0), "empty")])
def test_an_empty_launch_gets_the_default(chooser: Selector, shape: Shape, said: str) -> None:
    decision = chooser.select(shape)
    assert (decision.config, decision.source) == (default_config(shape, trained.ARCH), "default")
    assert said in decision.reason


def test_a_gain_within_noise_leaves_the_default(folder: Path, tmp_path: Path) -> None:
    default = default_config(KNOWN, trained.ARCH)

    def near_tie(row: dict[str, Any]) -> dict[str, Any]:
        noise = 1.01 if row["pass_index"] else 1.0  # so the margin is about 1 %
        us = 100.5 if all(row[name] == getattr(default, name) for name in spec.CONFIG_FIELDS) else 100.0
        return {**row, "latency_us": us * noise, "latency_p20_us": us * noise, "latency_p80_us": us * noise}

    decision = retrained(near_tie, tmp_path / "b").select(KNOWN)
    assert (decision.config, decision.source) == (default, "exact")
    assert -0.01 < decision.margin < 0
    assert "noise margin" in decision.reason


def test_two_profiles_that_differ_by_noise_differ_in_ties_only(tmp_path: Path) -> None:
    choosers = []
    for seed in (1, 2):
        random = np.random.default_rng(seed)

        def noisy(row: dict[str, Any], random: np.random.Generator = random) -> dict[str, Any]:
            factor = float(np.exp(random.normal(0.0, 0.003)))
            return {**row, **{name: row[name] * factor for name in TIMES}}

        choosers.append(retrained(noisy, tmp_path / str(seed)))
    for shape in trained.SHAPES:
        one, two = (chooser.select(shape) for chooser in choosers)
        times = {each.config: each.predicted_us for each in choosers[0].rank(shape)}
        # The other's pick is in the first one's tie band: both margins, since both sides are noisy.
        assert times[two.config] <= times[one.config] * (1 + 2 * choosers[0].bundle.noise_margin)


def test_a_config_that_failed_is_not_chosen(tmp_path: Path) -> None:
    default = default_config(KNOWN, trained.ARCH)

    def failing(row: dict[str, Any]) -> dict[str, Any]:
        if all(row[name] == getattr(default, name) for name in spec.CONFIG_FIELDS):
            return {**row, "status": "runtime", "reason": "made to fail", "latency_us": None}
        return row

    chooser = retrained(failing, tmp_path / "b")
    for use_exact in (True, False):
        chooser.use_exact = use_exact
        chooser.reload(force=True)
        decision = chooser.select(KNOWN)
        assert decision.config != default
        assert "failed when this shape was measured" in decision.reason


def test_a_shape_measured_in_part_is_predicted_and_counted(tmp_path: Path) -> None:
    default = default_config(KNOWN, trained.ARCH)

    def partly(row: dict[str, Any]) -> dict[str, Any] | None:
        kept = row["num_stages"] == default.num_stages or row["max_context_len"] != KNOWN.max_context_len
        return row if kept else None

    chooser = retrained(partly, tmp_path / "b")
    decision = chooser.select(KNOWN)
    offered = spec.candidates(KNOWN, trained.ARCH)
    timed = sum(config.num_stages == default.num_stages for config in offered)
    assert 0 < timed < len(offered)
    assert decision.source == "model"
    assert f"Only {timed} of its {len(offered)} candidates were measured at this shape" in decision.reason
    assert "tilewise collect" in decision.reason
    assert chooser.counters == {"partly_measured": 1}
    assert chooser.explain(KNOWN).nearest[0].shape == KNOWN


def test_a_shape_measured_with_configs_that_are_not_on_offer_says_so(tmp_path: Path) -> None:
    """An imported shape is listed as measured, while none of what may be launched was."""
    own = synthetic.synthetic_row(KNOWN, Config(split_kv=3, num_warps=8))
    rows = [own, *(row for row in trained.rows() if row["max_context_len"] != KNOWN.max_context_len)]
    train(trained.columns(rows), op=trained.OP, arch="h200", folds=0).save(tmp_path / "b")
    chooser = Selector("h200", bundle_dir=tmp_path / "b")
    decision = chooser.select(KNOWN)
    assert chooser.explain(KNOWN).nearest[0].shape == KNOWN
    assert decision.source == "model"
    offered = len(spec.candidates(KNOWN, trained.ARCH))
    assert f"None of its {offered} candidates were measured at this shape" in decision.reason


# -- whatever the state of the bundle


def damage(kind: str, folder: Path) -> None:
    manifest = folder / MANIFEST
    if kind == "missing":
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    elif kind == "truncated":
        manifest.write_bytes(manifest.read_bytes()[:500])
    elif kind == "empty":
        manifest.write_text("")
    elif kind == "null":
        manifest.write_text("null")
    elif kind == "version":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99}))
    elif kind == "array":
        (folder / f"{next(iter(FILES))}.npy").write_bytes(b"\x80\x04.")


@pytest.mark.parametrize("kind", ["missing", "truncated", "empty", "null", "version", "array"])
def test_a_bundle_that_cannot_be_used_leaves_the_default_counted_and_warned_of_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained.bundle().save(tmp_path / "b")
    damage(kind, folder)
    with caplog.at_level(logging.WARNING, "tilewise"):
        chooser = Selector("h200", bundle_dir=folder)
        for shape in (KNOWN, trained.UNSEEN):
            for _ in range(2):  # the second call must not find a half-made state
                decision = chooser.select(shape)
                assert (decision.source, decision.model_id) == ("default", None)
                assert decision.config == default_config(shape, trained.ARCH)
                assert str(folder) in decision.reason
            chooser.explain(shape)
            assert chooser.rank(shape)[0].config == decision.config
    assert chooser.counters == {"bundle_refused": 1, "no_bundle": 2}
    assert len(caplog.records) == 1


def test_a_bundle_of_another_arch_is_not_served(tmp_path: Path, folder: Path) -> None:
    chooser = Selector("h100", bundle_dir=folder)
    assert chooser.select(KNOWN).source == "default"
    assert "is for paged_mqa_logits on h200" in chooser.problem


def test_a_part_with_other_compute_units_matches_no_bundle(tmp_path: Path) -> None:
    registry.publish(trained.bundle(), tmp_path)
    assert Selector("h200", home=tmp_path).select(KNOWN).source == "exact"
    other = match_arch("sm90", 114, "NVIDIA H200")
    chooser = Selector(other, home=tmp_path)
    decision = chooser.select(KNOWN)
    assert (decision.source, decision.config) == ("default", default_config(KNOWN, other))
    few = Shape(1, 1, 32, max_context_len=32768)  # the portable kernel's default counts compute units
    assert chooser.select(few).config.split_kv == 4 * 114
    assert "sm90-114cu" in decision.reason


@pytest.mark.parametrize(("hashes", "said"), [({}, "source"), (None, "not installed")])
def test_a_stale_or_unknown_kernel_is_a_miss_that_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hashes: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ladder, "installed_hash", lambda kernel: None if hashes is None else "feedfacefeedface")
    chooser = Selector("h200", bundle_dir=folder)
    decision = chooser.select(KNOWN)
    assert (decision.source, decision.config) == ("default", default_config(KNOWN, trained.ARCH))
    assert said in decision.reason
    assert chooser.counters["stale_kernel"] >= 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(chooser.bundle.kernel_hashes)


def test_an_unforeseen_error_leaves_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Selector("h200", bundle_dir=folder)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(Bundle, "predict_us", broken)
    decision = chooser.select(trained.UNSEEN)
    assert (decision.source, decision.config) == ("default", default_config(trained.UNSEEN, trained.ARCH))
    assert "made to fail" in decision.reason
    assert chooser.counters["error"] == 1


SHAPES = st.builds(
    lambda batch, next_n, heads, head_dim, block_kv, longest, share: Shape(
        batch, next_n, heads, head_dim, block_kv, longest, int(longest * share)
    ),
    st.integers(0, spec.MAX_BATCH_SIZE) | st.integers(0, 300),
    st.integers(1, spec.MAX_NEXT_N),
    st.sampled_from(spec.HEADS),
    st.sampled_from(spec.HEAD_DIMS),
    st.sampled_from([b for b in spec.BLOCK_KVS if b > 1]),  # no kernel reads pages of 1 token yet
    st.integers(0, spec.MAX_CONTEXT_LEN) | st.integers(0, 4096),
    st.floats(0, 1),
)


@pytest.fixture(scope="module")
def every_state(folder: Path) -> list[Selector]:
    return [
        Selector("h200", bundle_dir=folder),
        Selector("h200", bundle_dir=folder, use_exact=False),
        Selector("h200", bundle_dir="nowhere"),
        Selector("mi355x", bundle_dir=folder),
        Selector("cpu"),
    ]


@given(shape=SHAPES)
def test_any_shape_gets_a_valid_config_and_the_server_can_write_it(every_state: list[Selector], shape: Shape) -> None:
    for chooser in every_state:
        decision = chooser.select(shape)
        assert isinstance(decision, Decision)
        assert is_valid(shape, decision.config, chooser.arch) is None
        text = json.dumps(chooser.explain(shape).to_dict(), allow_nan=False)
        assert json.loads(text)["decision"] == json.loads(json.dumps(decision.to_dict()))
        ranked = chooser.rank(shape)
        assert ranked[0].config == decision.config
        assert len({one.config for one in ranked}) == len(ranked)


@pytest.mark.parametrize("batch_size", [4096, 8192, 16384, 32768])
def test_large_batches_are_answered(chooser: Selector, batch_size: int) -> None:
    shape = Shape(batch_size, 8, 64, 128, 64, 4096)
    assert is_valid(shape, chooser.select(shape).config, trained.ARCH) is None


def test_a_shape_that_no_kernel_serves_is_a_typed_error(chooser: Selector) -> None:
    for shape in (Shape(1, 1, 32, 128, 1), Shape(1, 1, 32, 128, 64, 100, None, "preshuffled")):
        for ask in (chooser.select, chooser.rank, chooser.explain):
            with pytest.raises(InvalidConfigError, match="no kernel serves"):
                ask(shape)


# -- what may be asked


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"batch_size": 1, "next_n": 1},
        {"batch_size": 1.0, "next_n": 1, "heads": 32},
        {"batch_size": True, "next_n": 1, "heads": 32},
        {"batch_size": "1", "next_n": 1, "heads": 32},
        {"batch_size": [1], "next_n": 1, "heads": 32},
        {"batch_size": -1, "next_n": 1, "heads": 32},
        {"batch_size": 1, "next_n": 9, "heads": 32},
        {"batch_size": 1, "next_n": 1, "heads": 33},
        {"batch_size": 1, "next_n": 1, "heads": 32, "max_context_len": 8, "mean_context_len": 9},
        {"batch_size": 1, "next_n": 1, "heads": 32, "cache_layout": "other"},
        {"shape": (1, 1, 32)},
        {"shape": [1]},
        {"shape": KNOWN, "head_dim": 64},
        {"shape": KNOWN, "mean_context_len": 64},
        {"shape": KNOWN, "cache_layout": "flat"},
    ],
    ids=str,
)
def test_an_invalid_question_is_a_typed_error_also_once_its_like_is_remembered(
    chooser: Selector, sizes: dict[str, Any]
) -> None:
    chooser.select(KNOWN)
    chooser.select(batch_size=1, next_n=1, heads=32)
    for ask in (chooser.select, chooser.rank, chooser.explain):
        with pytest.raises(InvalidShapeError):
            ask(**sizes)


def test_a_name_that_is_no_size_is_refused(chooser: Selector) -> None:
    for ask in (chooser.rank, chooser.explain):
        with pytest.raises(InvalidShapeError, match="batch"):
            ask(batch=1)
    with pytest.raises(UnsupportedError, match="op must be one of"):
        Selector("h200", op="other")
    with pytest.raises(UnsupportedError, match="arch must be one of"):
        Selector("nonsense")


def test_a_wrong_keyword_names_the_function_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"^tilewise\.select\(\) got .*'batch_sizee'; it takes .*batch_size, next_n"):
        selecting.select(arch="h200", batch_sizee=1, next_n=1, heads=32)
    with pytest.raises(InvalidShapeError, match="got 'batch_sizee'"):
        selecting.rank(arch="h200", batch_sizee=1, next_n=1, heads=32)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.uint16])
def test_numpys_integers_are_sizes(chooser: Selector, kind: Any) -> None:
    plain = {"batch_size": 16, "next_n": 6, "heads": 32, "head_dim": 128, "block_kv": 64}
    sizes = {name: kind(value) for name, value in plain.items()}
    for _ in range(2):  # new, then remembered
        decision = chooser.select(**sizes)
        assert decision is chooser.select(**plain)
        explained = chooser.explain(**sizes)
        assert explained.decision == decision
        assert all(type(value) in (int, str) for value in explained.shape.to_dict().values())
        json.dumps(explained.to_dict())
        assert chooser.rank(**sizes) == chooser.rank(**plain)


@pytest.mark.parametrize("value", [np.bool_(True), np.float32(1), np.array(1), np.array([1]), True, 1.0, "1"], ids=repr)
def test_what_only_looks_like_an_integer_is_no_size(chooser: Selector, value: Any) -> None:
    chooser.select(batch_size=1, next_n=1, heads=32)
    for ask in (chooser.select, chooser.rank, chooser.explain):
        with pytest.raises(InvalidShapeError, match="batch_size must be an int"):
            ask(batch_size=value, next_n=1, heads=32)


def test_sizes_and_shape_ask_the_same(chooser: Selector) -> None:
    decision = chooser.select(batch_size=16, next_n=6, heads=32, head_dim=128, block_kv=64, max_context_len=32768)
    assert decision == chooser.select(KNOWN)
    assert chooser.select(batch_size=16, next_n=6, heads=32) == decision  # Shape's own defaults
    assert chooser.explain(batch_size=16, next_n=6, heads=32).decision == decision
    assert chooser.rank(batch_size=16, next_n=6, heads=32, limit=2) == chooser.rank(KNOWN)[:2]


def test_shapes_that_differ_in_one_field_are_not_mixed_up(chooser: Selector) -> None:
    for other in (
        Shape(16, 6, 32, 128, 128, 32768),
        Shape(16, 6, 32, 64, 64, 32768),
        Shape(16, 6, 32, 128, 64, 32768, 20000),
    ):
        assert chooser.select(KNOWN).source == "exact"
        assert chooser.select(other).source != "exact"


# -- memory and threads


def test_a_known_shape_is_answered_from_memory(chooser: Selector) -> None:
    assert chooser.select(KNOWN) is chooser.select(Shape(16, 6, 32, 128, 64, 32768))
    own = Shape(16, 6, 32, 128, 64, 4097)
    assert chooser.select(own) is chooser.select(own) is chooser.select(Shape(16, 6, 32, 128, 64, 4097))
    with pytest.raises(InvalidShapeError, match="not both"):
        chooser.select(own, max_context_len=4098)
    assert chooser.select(batch_size=16, next_n=6, heads=32) is chooser.select(KNOWN)


def test_memory_is_bounded(chooser: Selector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "MEMO_LIMIT", 20)
    monkeypatch.setattr(selecting, "OBJECT_MEMO_LIMIT", 10)
    first = chooser.select(batch_size=1, next_n=1, heads=32)
    for batch in range(1, 100):
        chooser.select(batch_size=batch, next_n=1, heads=32)
        assert len(chooser._state.by_shape) <= 20
        assert len(chooser._state.by_object) <= 10
        assert len(chooser._state.by_sizes) <= 20
    assert chooser.select(batch_size=1, next_n=1, heads=32) == first


def test_many_threads_get_one_answer_while_bundles_change(tmp_path: Path) -> None:
    registry.publish(trained.bundle(), tmp_path)
    chooser = Selector("h200", home=tmp_path)
    shapes = [Shape(b, 6, 32, 128, 64, 5000) for b in range(1, 40)]
    expected = {shape: chooser.select(shape) for shape in shapes}
    chooser.reload(force=True)
    failures: list[Any] = []
    stop = threading.Event()

    def ask() -> None:
        try:
            while not stop.is_set():
                for shape in shapes:
                    if chooser.select(shape) != expected[shape]:
                        failures.append(shape)
                stop.wait(0.001)  # four threads that never rest leave the interpreter to nobody else
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            chooser.reload(force=True)
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_child_that_was_forked_while_every_lock_was_held_answers(chooser: Selector, folder: Path) -> None:
    properties = [value for kind in (Bundle, Forest, Smooth) for value in vars(kind).values() if hasattr(value, "lock")]
    assert len(properties) == (6 if sys.version_info < (3, 12) else 0)

    def ask() -> None:
        assert chooser.select(trained.UNSEEN) == Selector("h200", bundle_dir=folder).select(trained.UNSEEN)
        assert chooser.counters is not None
        assert len(chooser.shapes_seen()) == 1
        assert selecting.selector("h200").select(KNOWN).model_id

    locks = [chooser._lock, chooser._live._lock, selecting._selectors_lock, *(one.lock for one in properties)]
    with held_by_another_thread(*locks):
        assert status_of_child(ask) == 0


def test_a_known_arch_is_weighed_without_an_import() -> None:
    """The lock of a module that another thread is importing cannot be renewed in a forked child."""
    script = (
        "import sys; from tilewise.dispatch.selector import Selector; from tilewise.kernels.arch import ARCHS\n"
        "choosers = [Selector(arch) for arch in ARCHS]; before = set(sys.modules)\n"
        "for one in choosers: one.select(batch_size=17, next_n=2, heads=32, max_context_len=5000)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_a_published_bundle_is_taken_up_without_a_restart(tmp_path: Path) -> None:
    chooser = Selector("mi355x", home=tmp_path)
    assert chooser.select(KNOWN).model_id is None
    assert chooser.reload() is False
    rows = synthetic.synthetic_rows([Shape(b, 2, 32, 128, 64, 4096) for b in (1, 8, 64)], arch="mi355x")
    bundle = train(trained.columns(rows), op=trained.OP, arch="mi355x", folds=0)
    registry.publish(bundle, tmp_path)
    assert chooser.select(KNOWN).model_id is None  # nobody looked yet
    assert chooser.reload() is True
    assert chooser.reload() is False
    assert chooser.model_id == bundle.model_id
    assert chooser.select(Shape(8, 2, 32, 128, 64, 4096)).source == "exact"
    registry.rollback(trained.OP, "mi355x", tmp_path)
    assert chooser.reload() is True
    assert chooser.model_id is None


def test_a_bundle_that_is_refused_does_not_replace_a_good_one(tmp_path: Path) -> None:
    path = registry.publish(trained.bundle(), tmp_path)
    chooser = Selector("h200", home=tmp_path)
    good = chooser.select(KNOWN)
    (path / MANIFEST).write_text("{}")
    registry._point(path.parent.parent, [path.name, path.name, "0" * 64])
    assert chooser.reload() is False
    now = chooser.select(KNOWN)
    assert (now.config, now.predicted_us, now.model_id) == (good.config, good.predicted_us, good.model_id)
    assert f"The published bundle {good.model_id} cannot be used (manifest" in now.reason
    assert chooser.problem.endswith(f"{good.model_id} goes on answering.")
    assert chooser.counters["bundle_refused"] == 1
    assert chooser.reload() is False
    assert chooser.counters["bundle_refused"] == 1


def spoil(kind: str, path: Path) -> None:
    """Damage a published bundle or what points to it."""
    pointer = path.parent.parent / registry.POINTER
    if kind == "folder gone":
        shutil.rmtree(path)
    elif kind == "pointer garbage":
        pointer.write_text("not a digest\n")
    elif kind == "pointer binary":
        pointer.write_bytes(b"\xff\x00\xfe")
    elif kind == "pointer to nothing":
        pointer.write_text("0" * 64 + "\n")
    elif kind == "pointer a folder":
        pointer.unlink()
        pointer.mkdir()
    elif kind == "pointer a pipe":
        pointer.unlink()
        os.mkfifo(pointer)
    elif kind == "pointer without an end":
        pointer.unlink()
        pointer.symlink_to("/dev/zero")
    elif kind == "pointer of a megabyte":
        pointer.write_text("0" * (1 << 20))
    elif kind == "another bundle in the folder":
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["noise_margin"] = 0.5
        manifest["digest"] = digest_of(manifest)
        (path / MANIFEST).write_text(json.dumps(manifest))
    else:
        data = (path / kind).read_bytes()
        (path / kind).write_bytes(data[: len(data) // 2])


SPOILT = ("rank_value.npy", MANIFEST, "folder gone", "pointer garbage", "pointer binary", "pointer to nothing",
          "pointer a folder", "pointer a pipe", "pointer without an end", "pointer of a megabyte",
          "another bundle in the folder")  # fmt: skip


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("arch", ["h200", "mi355x"])
def test_a_published_bundle_that_cannot_be_used_is_said_counted_and_logged_once(
    kind: str, arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a shipped bundle (h200), that one answers; without one, the ladder goes on. No answer hides it."""
    bundle = trained.bundle()
    if arch != "h200":
        bundle = train(trained.columns(synthetic.synthetic_rows([KNOWN], arch=arch)), op=trained.OP, arch=arch, folds=0)
    path = registry.publish(bundle, tmp_path)
    spoil(kind, path)
    with caplog.at_level(logging.WARNING, "tilewise"):
        chooser = Selector(arch, home=tmp_path)
        chooser.reload(force=True)
        for shape in (KNOWN, trained.UNSEEN, Shape(4096, 6, 32, 128, 64, 4096)):
            said = chooser.select(shape).reason
            assert "ublished bundle" in said
            assert "cannot be used (" in said
            assert chooser.explain(shape).decision.reason == said
    assert "cannot be used (" in chooser.problem
    assert chooser.model_id != bundle.model_id
    if arch == "h200":
        assert chooser.bundle is not None
        assert chooser.problem.endswith(": the shipped one answers.")
        assert chooser.select(Shape(0, 1, 32)).reason.endswith(": the shipped one answers.")
    assert chooser.counters["bundle_refused"] == 2  # once per load
    assert len([record for record in caplog.records if "cannot be used (" in record.getMessage()]) == 1
    if kind == "pointer a folder":
        return
    registry.publish(bundle, tmp_path)
    assert chooser.reload() is True
    assert chooser.problem == ""
    assert chooser.select(KNOWN).model_id == bundle.model_id
    assert "cannot be used" not in chooser.select(KNOWN).reason


@pytest.fixture
def shut_home() -> Iterator[Path]:
    """A home whose published bundles may not be looked at by the user who runs the test."""
    with tempfile.TemporaryDirectory() as folder:  # not under tmp_path, which only its owner may enter
        Path(folder).chmod(0o755)
        versions = registry.publish(trained.bundle(), folder).parent
        versions.chmod(0)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        yield Path(folder)
        if root:
            os.seteuid(0)
        versions.chmod(0o755)


def test_a_published_bundle_that_may_not_be_read_leaves_the_shipped_one(
    shut_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert registry.current(trained.OP, "h200", shut_home) == registry.shipped(trained.OP, "h200")
    assert "Permission denied" in caplog.text
    chooser = Selector("h200", home=shut_home)
    chooser.reload(force=True)
    assert chooser.bundle is not None
    assert chooser.model_id == Bundle.load(registry.shipped(trained.OP, "h200")).model_id
    assert "Permission denied" in chooser.problem
    assert chooser.problem.endswith(": the shipped one answers.")


# -- explain and rank


def test_explain_lists_every_rejected_config_and_why(chooser: Selector) -> None:
    for shape in (KNOWN, trained.UNSEEN, Shape(4096, 6, 32, 128, 64, 4096)):
        explained = chooser.explain(shape)
        offered = set(spec.candidates(shape, trained.ARCH))
        rejected = [one.config for one in explained.rejected]
        assert {explained.decision.config, *rejected} >= offered
        assert explained.decision.config not in rejected
        assert len(set(rejected)) == len(rejected)
        for one in explained.rejected:
            assert one.reason
            assert (one.config in offered) == (is_valid(shape, one.config, trained.ARCH) is None)
        assert len(explained.nearest) == 5
        assert [one.distance for one in explained.nearest] == sorted(one.distance for one in explained.nearest)
        assert explained.floor_us > 0
        assert explained.features["next_n"] == shape.next_n
    assert chooser.explain(KNOWN).nearest[0].shape == KNOWN


def test_explain_gives_the_spaces_own_reason_for_what_may_not_launch(chooser: Selector) -> None:
    shape = Shape(16, 1, 8, 128, 64, 32768)
    space = spec.space("portable")
    invalid = {c for c in space.candidates(shape, trained.ARCH) if is_valid(shape, c, trained.ARCH)}
    assert invalid  # eight heads are too few rows for a product
    said = {one.config: one.reason for one in chooser.explain(shape).rejected}
    assert {config: said.get(config) for config in invalid} == {
        config: is_valid(shape, config, trained.ARCH) for config in invalid
    }


def test_rank_is_by_time_after_the_chosen_one(chooser: Selector) -> None:
    ranked = chooser.rank(trained.UNSEEN)
    assert [one.config for one in ranked[:1]] == [chooser.select(trained.UNSEEN).config]
    times = [one.predicted_us for one in ranked[1:]]
    assert times == sorted(times)
    assert {one.source for one in ranked} == {"model"}
    assert len(ranked) == len(spec.candidates(trained.UNSEEN, trained.ARCH))


def test_the_counters_are_those_of_the_page() -> None:
    root = Path(ladder.__file__).parent
    source = "".join(
        (root / name).read_text(encoding="utf-8")
        for name in ("ladder.py", "loading.py", "modes.py", "over_contexts.py", "selector.py")
    )
    patterns = (r"warn\(", r"misses\.append\(", r"_prior\(found, arch, ", r"update\(\[", r"misses, found.reason = \[")
    counted = set(re.findall(rf'(?:{"|".join(patterns)})"(\w+)"', source))
    counted |= set(re.findall(r'found\.misses, "(\w+)"', source))
    page = (root.parent / "docs" / "selection.md").read_text(encoding="utf-8")
    table = page.split("| counter |")[1].split("## ")[0]
    assert counted == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert len(counted) == 14


# -- process-wide


def test_module_functions_share_one_selector_per_arch(tmp_path: Path) -> None:
    code = """
import sys
from tilewise.dispatch import selector
heavy = {"torch", "triton", "sklearn", "pyarrow", "pandas", "fastapi", "scipy"} & set(sys.modules)
assert not heavy, heavy
shape = selector.Shape(16, 6, 32, 128, 64, 131072)
one = selector.select(shape, arch="h200")
assert one is selector.select(batch_size=16, next_n=6, heads=32, max_context_len=131072, arch="sm90")
assert selector.rank(shape, arch="h200", limit=1)[0].config == one.config
assert selector.explain(shape, arch="h200").decision == one
heavy = {"torch", "triton", "sklearn", "pyarrow", "pandas", "fastapi", "scipy"} & set(sys.modules)
assert not heavy, heavy
sys.modules["torch"] = None
try:
    selector.select(shape)
except selector.UnsupportedError as error:
    assert "name an arch" in str(error)
else:
    raise AssertionError("no error without torch")
"""
    env = {**os.environ, "TILEWISE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_current_gpu_is_asked_only_where_no_arch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "_selectors", {})
    monkeypatch.setattr(selecting, "current_arch", lambda: get_arch("mi350x"))
    assert selecting.selector().arch.name == "mi350x"
    assert selecting.selector("gfx950").arch.name == "mi355x"
    assert selecting.selector(get_arch("mi350x")) is selecting.selector()
