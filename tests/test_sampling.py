"""Which launches are suggested next."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

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


def test_an_empty_pool_is_a_typed_error() -> None:
    with pytest.raises(InvalidProfileError, match="pool"):
        next_launches(None, [], trained.ARCH, 5)


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
