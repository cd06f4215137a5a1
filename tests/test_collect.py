"""Planning, resuming and writing of the collector. What needs a GPU was run on one; see docs/measured-h200.md."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from tilewise.data.records import check_row, config_of, shape_of
from tilewise.data.table import read_table
from tilewise.errors import InvalidProfileError, InvalidShapeError, UnsupportedError
from tilewise.kernels import collect
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates
from tilewise.kernels.shape_sets import DISTRIBUTIONS, SETS, draw_contexts, named_set, read_targets, target, target_line

H200 = get_arch("h200")
PROFILE = Path(__file__).parent.parent / "data" / "profiles" / "paged_mqa_logits" / "h200.parquet"


def arguments(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    collect.add_arguments(parser)
    return parser.parse_args(["--run-dir", "unused", *more])


@pytest.mark.parametrize("name", SETS)
def test_named_sets_are_the_same_each_time_and_without_repeats(name: str) -> None:
    first, second = named_set(name, H200), named_set(name, H200)
    assert first == second
    assert len({(t.shape, t.contexts) for t in first}) == len(first)
    for one in first:
        assert max(one.context_lens) == one.shape.max_context_len
        assert sum(one.context_lens) // len(one.context_lens) == one.shape.mean_context_len


def test_profile_set_covers_what_is_promised() -> None:
    targets = named_set("profile", H200)
    assert len(targets) >= 200
    assert sum(t.judged for t in targets) >= 60
    assert {t.shape.next_n for t in targets} == set(range(1, 9))
    assert {1, 3, 7, 16, 24, 48, 64, 100, 128, 256} <= {t.shape.batch_size for t in targets}
    assert {16, 32, 64, 128} == {t.shape.heads for t in targets}
    contexts = {t.shape.max_context_len for t in targets}
    assert min(contexts) <= 512
    assert max(contexts) >= 262144
    assert {t.contexts for t in targets} == set(DISTRIBUTIONS)


def test_unknown_names_are_typed_errors() -> None:
    with pytest.raises(InvalidShapeError, match="shape set must be one of"):
        named_set("everything", H200)
    with pytest.raises(InvalidShapeError, match="contexts must be one of"):
        draw_contexts("gaussian", 4, 100, 0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("top", [1, 512, 131072])
def test_drawn_contexts_stay_in_range(distribution: str, top: int) -> None:
    lens = draw_contexts(distribution, 33, top, 1)
    assert len(lens) == 33
    assert all(0 <= length <= top for length in lens)
    assert lens == draw_contexts(distribution, 33, top, 1)


def test_shapes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    good = {"batch_size": 4, "next_n": 2, "heads": 32, "max_context_len": 1000, "contexts": "half_empty"}
    path.write_text(json.dumps(good) + "\n\n")
    (one,) = read_targets(path)
    assert one.context_lens == (1000, 0, 1000, 0)
    assert one.shape.mean_context_len == 500
    for bad in ('{"batch_size": 4}', "[]", "nonsense", '{"batch_size": -1, "next_n": 1, "heads": 32}', '{"x": 1}'):
        path.write_text(json.dumps(good) + "\n" + bad + "\n")
        with pytest.raises(InvalidProfileError, match="line 2"):
            read_targets(path)


def test_steps_run_second_passes_last_and_keys_tell_them_apart() -> None:
    targets = named_set("smoke", H200)
    steps = collect._steps(targets)
    assert [step.pass_index for step in steps] == [0, 0, 0, 1]
    assert len({step.key for step in steps}) == len(steps)


def test_a_duel_is_one_step_of_its_own_pass_after_all_others(tmp_path: Path) -> None:
    """Its times are compared with each other alone: they must not say which config of a shape is best."""
    judged = target(16, 6, 32, 4096, judged=True, contexts="half_empty")
    few = candidates(judged.shape, H200)[:3]
    lines = [target_line(judged), target_line(judged, few, duel=True), target_line(target(7, 5, 64, 3000))]
    path = tmp_path / "shapes.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    targets = read_targets(path)
    assert [(one.judged, one.duel) for one in targets] == [(True, False), (False, True), (False, False)]
    assert {one.context_lens for one in targets[:2]} == {judged.context_lens}
    steps = collect._steps(targets)
    assert [step.pass_index for step in steps] == [0, 0, 1, collect.DUEL_PASS]
    assert collect._candidates(steps[-1], H200, arguments("--budget", "2")) == few
    assert len({step.key for step in steps}) == len(steps)
    path.write_text(json.dumps({**target_line(judged), "duel": True}))
    with pytest.raises(InvalidProfileError, match="line 1: a duel must name its configs"):
        read_targets(path)


def test_budget_keeps_the_default_and_spares_judged_shapes() -> None:
    judged = collect.Step(target(16, 6, 32, 4096, judged=True), 0)
    other = collect.Step(target(16, 6, 32, 8192), 0)
    args = arguments("--budget", "10")
    assert collect._candidates(judged, H200, args) == candidates(judged.target.shape, H200)
    drawn = collect._candidates(other, H200, args)
    assert len(drawn) == 10
    assert drawn[0] == candidates(other.target.shape, H200)[0]
    assert drawn == collect._candidates(other, H200, args)


def test_parts_are_whole_files_and_merge(tmp_path: Path) -> None:
    rows = read_table(PROFILE).slice(0, 40).to_pylist()
    step = collect.Step(target(16, 6, 32, 8192), 0)
    collect._write(tmp_path, step, rows)
    assert [path.name for path in tmp_path.iterdir()] == [f"{step.key}.parquet"]
    out = tmp_path / "out.parquet"
    parts = tmp_path / "parts"
    parts.mkdir()
    assert collect._merge(parts, out) == 0
    collect._write(parts, step, rows)
    assert collect._merge(parts, out) == 40
    assert {check_row(row) for row in read_table(out).to_pylist()} == {None}


def test_done_elsewhere_needs_the_same_shape_and_todays_kernel(tmp_path: Path) -> None:
    targets = named_set("profile", H200)
    done = collect._done_elsewhere([PROFILE], targets)
    steps = {step.key for step in collect._steps(targets)}
    assert done == steps, "the shipped profile is the named set, whole"


def test_noted_failures_are_read_back(tmp_path: Path) -> None:
    from types import SimpleNamespace

    step, other = (collect.Step(target(16, 6, heads, 8192), 0) for heads in (32, 64))
    assert collect._failures(tmp_path, step) == {}
    collect._note_failure(tmp_path, step, SimpleNamespace(config=Config(), reason="illegal address"))
    assert collect._failures(tmp_path, step) == {Config(): "illegal address"}
    assert collect._failures(tmp_path, other) == {}


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    args = arguments()
    args.run_dir = tmp_path
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        collect.run(args)


def test_shipped_rows_obey_the_measuring_rules() -> None:
    """Graph replay, cold cache with a footprint above it, checked outputs, everything recorded."""
    table = read_table(PROFILE)
    columns = {name: np.array(table.column(name).to_pylist()) for name in table.column_names}
    assert len(table) >= 9_000
    assert set(columns["status"]) == {"correct"}
    assert set(columns["timing_method"]) == {"graph"}
    assert set(columns["cache_state"]) == {"cold"}
    flushed = columns["footprint_bytes"] >= 2 * H200.last_level_cache_bytes
    # Where the batch is nearly empty even 256 page sets stay small.
    small = columns["mean_context_len"].astype(int) * columns["batch_size"].astype(int) < 16384
    assert (flushed | small).all()
    assert (columns["max_error"] <= 2e-3).all()
    for name in ("driver", "runtime", "torch_version", "triton_version", "kernel_hash", "run_id", "git_commit"):
        assert all(columns[name])
    assert (columns["clock_before_mhz"].astype(int) > 0).all()


def test_judged_shapes_have_every_candidate_twice() -> None:
    table = read_table(PROFILE)
    by_pass: dict[int, dict[Shape, set[Config]]] = {0: {}, 1: {}}
    for row in table.to_pylist():
        if row["pass_index"] in by_pass:
            by_pass[row["pass_index"]].setdefault((shape_of(row), row["contexts"]), set()).add(config_of(row))
    assert len(by_pass[1]) >= 60
    for (shape, contexts), configs in by_pass[1].items():
        every = set(candidates(shape, H200))
        assert configs == every
        assert by_pass[0][shape, contexts] == every
