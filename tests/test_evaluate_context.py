"""One config for every context, judged against the best in hindsight."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

import synthetic
import trained

from tilewise.errors import InvalidProfileError
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates, default_config
from tilewise.models.evaluate_context import Kind, context_figures, evaluate_context, judged_kinds
from tilewise.models.expected import as_run
from tilewise.models.measurements import measurements

CONTEXTS = (2048, 8192, 32768)
SHAPES = [
    Shape(batch, next_n, heads, 128, 64, context)
    for batch in (1, 16)
    for next_n in (1, 6)
    for heads in (32, 64)
    for context in CONTEXTS
]


def cells(rows: list[dict[str, object]]) -> object:
    return measurements(trained.columns(rows), op=synthetic.OP, arch="h200")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return synthetic.synthetic_rows(SHAPES)


def test_kinds_hold_the_times_of_what_each_config_runs(rows: list[dict[str, object]]) -> None:
    measured = cells(rows)
    kinds = judged_kinds(measured, trained.ARCH)
    assert len(kinds) == 8
    for kind in kinds:
        assert [shape.max_context_len for shape in kind.shapes] == list(CONTEXTS)
        assert kind.configs[0] == default_config(kind.shapes[-1], trained.ARCH)
        offered = [set(candidates(shape, trained.ARCH)) for shape in kind.shapes]
        everywhere = {
            config
            for config in set.union(*offered)
            if all(as_run(config, shape) in own for shape, own in zip(kind.shapes, offered, strict=True))
        }
        assert set(kind.configs) == everywhere | {kind.configs[0]}
        assert len(kind.configs) > 5
        assert kind.independent
        for row, shape in zip(kind.first_us, kind.shapes, strict=True):
            for time, config in zip(row, kind.configs, strict=True):
                run = as_run(config, shape)
                if run in candidates(shape, trained.ARCH):
                    assert time == pytest.approx(synthetic.synthetic_us(shape, run, "h200"), abs=1e-3)
                else:
                    assert math.isnan(time)


def test_a_context_with_an_untried_candidate_does_not_count(rows: list[dict[str, object]]) -> None:
    left = [
        row for row in rows if not (row["batch_size"] == 1 and row["max_context_len"] == 8192 and row["heads"] == 32)
    ]
    gone = next(row for row in left if row["batch_size"] == 16 and row["max_context_len"] == 2048)
    key = ("batch_size", "next_n", "heads", "max_context_len", *(f.name for f in dataclasses.fields(Config)))
    left = [row for row in left if [row[name] for name in key] != [gone[name] for name in key]]
    assert len(judged_kinds(cells(left), trained.ARCH)) == 8 - 2 - 1


A, B, C = (Config(split_kv=split) for split in (1, 2, 3))


def kind_of(times: list[list[float]]) -> Kind:
    table = np.array(times)
    shapes = [Shape(1, 1, 32, max_context_len=length) for length in CONTEXTS[: len(times)]]
    return Kind(list(range(len(times))), shapes, [A, B, C], table, table, True, np.zeros_like(table))


def test_figures_by_hand() -> None:
    kind = kind_of([[10.0, 12.0, 10.5], [20.0, 18.0, 20.0]])
    figures = context_figures([kind], {0: 2}, worst_case=1.15)
    assert figures["context_geomean_regret"] == pytest.approx(30.5 / 30.0), "A, since B takes 1.2x at the first"
    assert figures["unbounded_worst_regret"] == pytest.approx(30.5 / 30.0)
    assert figures["hindsight_geomean_loss"] == pytest.approx(30.0 / 28.0)
    assert figures["hindsight_worst_at_a_context"] == pytest.approx(20.0 / 18.0)
    assert figures["default_worst_regret"] == 1.0
    assert figures["context_failures"] == 0
    free = context_figures([kind_of([[10.0, 12.0, 10.5], [20.0, 17.0, 20.0]])], {0: 0}, worst_case=1.19)
    assert free["unbounded_worst_regret"] == pytest.approx(30.0 / 29.0)
    assert free["context_worst_regret"] == 1.0


def test_an_untimed_pick_is_a_failure_at_the_worst_config() -> None:
    figures = context_figures([kind_of([[10.0, 12.0, math.nan], [20.0, 18.5, 1.0]])], {0: 2}, worst_case=1.5)
    assert figures["context_failures"] == 1
    assert figures["context_worst_regret"] == pytest.approx(30.5 / 30.0), "B is the slowest that was timed"


def test_the_model_finds_nearly_the_best_single_config(rows: list[dict[str, object]]) -> None:
    result = evaluate_context(trained.columns(rows), op=synthetic.OP, arch="h200", folds=3)
    assert result["context_kinds"] == result["context_kinds_timed_twice"] == 8
    assert result == evaluate_context(trained.columns(rows[::-1]), op=synthetic.OP, arch="h200", folds=3)
    assert 1.0 <= result["context_geomean_regret"] <= result["context_worst_regret"]
    assert result["context_geomean_regret"] <= result["default_geomean_regret"]
    assert 0.0 < result["assumed"] < 1.0
    json.dumps(result, allow_nan=False)


def test_without_three_contexts_nothing_can_be_judged(rows: list[dict[str, object]]) -> None:
    two = [row for row in rows if row["max_context_len"] != 8192]
    with pytest.raises(InvalidProfileError, match="at least 3 contexts"):
        evaluate_context(trained.columns(two), op=synthetic.OP, arch="h200")


def test_the_command_prints_the_figures(
    rows: list[dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilewise import cli_commands
    from tilewise.cli import main

    class Profile:
        columns = trained.columns(rows)

    monkeypatch.setattr(cli_commands, "_profile", lambda args: ("h200", Profile))
    assert main(["evaluate", "--context", "--json", "--arch", "h200", "--home", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["context_kinds"] == 8
    assert main(["evaluate", "--context", "--arch", "h200", "--home", str(tmp_path)]) == 0
    assert "hindsight" in capsys.readouterr().out
