"""Which launches are suggested next."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learning_curve
import synthetic
import trained

from tilewise import cli
from tilewise.errors import InvalidProfileError
from tilewise.kernels.paged_mqa_logits.spec import candidates, default_config
from tilewise.kernels.shape_sets import read_targets
from tilewise.models.measurements import measurements
from tilewise.models.sampling import CONFIGS_PER_SHAPE, next_launches, with_cells

POOL = trained.SHAPES


def measured():
    return measurements(trained.columns(trained.rows()), op=trained.OP, arch="h200")


def test_the_first_launches_spread_over_the_shapes_and_have_their_defaults() -> None:
    found = next_launches(None, POOL, trained.ARCH, 60)
    assert len(found) == len({(one.shape, one.config) for one in found}) == 60
    shapes = list(dict.fromkeys(one.shape for one in found))
    assert len({shape.heads for shape in shapes[:4]}) == 2
    assert {shape.batch_size for shape in shapes[:8]} >= {1, 64}
    for shape in shapes[:-1]:
        own = [one for one in found if one.shape == shape]
        assert own[0].config == default_config(shape, trained.ARCH)
        assert len(own) <= CONFIGS_PER_SHAPE
    assert next_launches(None, POOL, trained.ARCH, 60) == found
    assert next_launches(None, POOL, trained.ARCH, 60, seed=1) != found


def test_what_was_timed_is_not_suggested_again_and_all_is_suggested_in_the_end() -> None:
    table = measured()
    pool = POOL[:10]
    ids = {table.shapes.index(shape) for shape in pool}
    known = np.isin(table.shape_id, sorted(ids - {table.shapes.index(pool[0])})) & (
        np.arange(len(table.shape_id)) % 3 > 0
    )
    total = sum(len(candidates(shape, trained.ARCH)) for shape in pool)
    while True:
        so_far = with_cells(table, known)
        tried = {(so_far.shapes[s], so_far.configs[c]) for s, c in zip(so_far.shape_id, so_far.config_id, strict=True)}
        found = next_launches(so_far, pool, trained.ARCH, 400)
        if not found:
            break
        for one in found:
            assert (one.shape, one.config) not in tried
            assert one.shape in pool
            assert one.value >= 0.0
            at = table.cells(table.shapes.index(one.shape))
            known[at.start + table.config_id[at].tolist().index(table.configs.index(one.config))] = True
    assert len(tried) == total


def test_later_launches_are_near_the_best_and_a_share_is_drawn() -> None:
    table = measured()
    known = np.zeros(len(table.shape_id), bool)
    cell = {pair: at for at, pair in enumerate(zip(table.shape_id.tolist(), table.config_id.tolist(), strict=True))}

    def at_of(one) -> int:
        return cell[table.shapes.index(one.shape), table.configs.index(one.config)]

    for one in next_launches(None, POOL, trained.ARCH, 120):
        known[at_of(one)] = True
    found = next_launches(with_cells(table, known), POOL, trained.ARCH, 100)
    assert [one.reason == "drawn" for one in found] == [False] * 75 + [True] * 25
    assert {one.reason for one in found} == {"default", "near", "drawn"}
    best = np.full(len(table.shapes), np.inf)
    np.minimum.at(best, table.shape_id, table.first_us)
    loss = np.log(table.first_us / best[table.shape_id])
    near = [loss[at_of(one)] for one in found if one.reason == "near"]
    drawn = [loss[at_of(one)] for one in found if one.reason == "drawn"]
    assert np.median(near) < 0.5 * np.median(drawn)
    # A shape's default precedes its other launches, unless it was timed before.
    seen = {table.shapes[s] for s in np.unique(table.shape_id[known])}
    first = {}
    for one in found[:75]:
        first.setdefault(one.shape, one.reason)
    assert all(reason == "default" for shape, reason in first.items() if shape not in seen)
    assert len(set(first) - seen) > 5


def test_the_curve_says_when_the_final_regret_is_reached_and_how_sure_that_is() -> None:
    found = learning_curve.summary(
        {
            "active": [[(10, 1.20), (50, 1.010), (100, 1.02)], [(10, 1.10), (50, 1.030), (100, 1.02)]],
            "random": [[(10, 1.30), (50, 1.060), (100, 1.02)], [(10, 1.20), (50, 1.058), (100, 1.02)]],
        }
    )
    assert found["pool_timings"] == 100
    assert found["final_regret"] == pytest.approx(1.02)
    assert found["timings_to_final_regret"] == {"active": 50, "random": 100}
    assert found["share_of_random"] == 0.5
    assert found["timings_to_stay_within_a_standard_error"] == {"active": 50, "random": 100}
    assert found["timings_to_regret"]["1.020"] == {"active": 50, "random": 100}
    half = found["active"][1]
    assert half["over_final"] == pytest.approx(np.sqrt(1.01 * 1.03) / 1.02 - 1)
    assert half["standard_error"] == pytest.approx(np.log(1.03 / 1.01) / 2)
    assert found["random"][1]["over_final"] > 2 * found["random"][1]["standard_error"] > 0


def test_an_empty_pool_is_a_typed_error() -> None:
    with pytest.raises(InvalidProfileError, match="pool"):
        next_launches(None, [], trained.ARCH, 5)


@pytest.mark.parametrize(
    ("data", "said"), [(b"\x80abc", "is not UTF-8"), (b"[" * 100_000, "line 1: "), (b'{"a": ' * 100_000, "line 1: ")]
)
def test_a_file_that_has_no_shapes_is_a_typed_error(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "shapes").write_bytes(data)
    with pytest.raises(InvalidProfileError, match=said):
        read_targets(tmp_path / "shapes")


def test_the_command_writes_lines_that_collect_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = tmp_path / "pool.jsonl"
    pool.write_text("".join(json.dumps(shape.to_dict()) + "\n" for shape in synthetic.SHAPES[:6]))
    words = ["suggest", "--arch", "h100", "--budget", "20", "--shapes", str(pool), "--home", str(tmp_path)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines()]
    assert sum(len(line["configs"]) for line in lines) == 20
    assert all(len(line["configs"]) == len(line["reasons"]) for line in lines)
    out = tmp_path / "next.jsonl"
    assert cli.main([*words, "--out", str(out)]) == 0
    assert out.read_text() == printed
    targets = read_targets(out)
    assert [[config.to_dict() for config in target.configs or ()] for target in targets] == [
        line["configs"] for line in lines
    ]
