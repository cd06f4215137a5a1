"""What a config loses at another context than it was chosen for, from measured rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import synthetic

from tilewise.errors import InvalidBundleError
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates
from tilewise.models.bucket_transfer import bucket_transfers, check_bucket_transfers, same_but_context
from tilewise.models.measurements import Measurements, measurements

H200 = get_arch("h200")


def measured(times: dict[tuple[int, int], float], shape: Any = None) -> Measurements:
    """Cells by context length and index of a config on offer at the shortest context, all with one split."""
    rows = []
    for (length, at), time in times.items():
        own = Shape(16, 1, 32, 128, 64, length)
        config = [c for c in candidates(Shape(16, 1, 32, 128, 64, 512), H200) if c.kernel == "portable"][at]
        names = ("latency_us", "latency_p20_us", "latency_p80_us")
        rows.append(synthetic.synthetic_row(own, config, **dict.fromkeys(names, time)))
    return measurements({name: [row[name] for row in rows] for name in rows[0]}, op=synthetic.OP, arch="h200")


def test_losses_by_direction_and_distance() -> None:
    # The best at 4096 is config 0, at 16384 config 1, two doublings longer, at 65536 config 0 again.
    table = bucket_transfers(
        measured({
            (4096, 0): 10.0, (4096, 1): 11.0,
            (16384, 0): 30.0, (16384, 1): 25.0,
            (65536, 0): 80.0, (65536, 1): 88.0,
        })
    )  # fmt: skip
    assert table["longer 2"] == {
        "pairs": 2, "untimed": 0, "geomean": round(math.sqrt(30 / 25 * 88 / 80), 6), "p90": 1.19, "worst": 1.2,
    }  # fmt: skip
    assert table["longer 4"]["worst"] == 1.0
    assert table["shorter 2"] == {
        "pairs": 2, "untimed": 0, "geomean": round(math.sqrt(11 / 10 * 30 / 25), 6), "p90": 1.19, "worst": 1.2,
    }  # fmt: skip
    assert table["nearest"]["pairs"] == 3


def test_a_pick_that_was_not_timed_there_is_counted_and_not_guessed() -> None:
    table = bucket_transfers(measured({(4096, 0): 10.0, (16384, 1): 25.0}))
    assert table == {
        "longer 2": {"pairs": 0, "untimed": 1},
        "nearest": {"pairs": 0, "untimed": 2},
        "shorter 2": {"pairs": 0, "untimed": 1},
    }
    check_bucket_transfers(table)


def test_shapes_are_held_together_by_everything_but_the_context() -> None:
    shapes = [Shape(1, 1, 32, 128, 64, length) for length in (4096, 512)]
    shapes += [Shape(1, 1, 64, 128, 64, 4096), Shape(2, 1, 32, 128, 64, 4096), Shape(1, 1, 32, 128, 64, 4096, 1000)]
    assert list(same_but_context(shapes).values()) == [[1, 0]]


@pytest.mark.parametrize(
    "table",
    [None, [], {"longer 1": 5}, {"longer 1": {"pairs": "2"}}, {"longer 1": {"other": 1}}, {"longer 1": {"worst": -1.0}},
     {"longer 1": {"worst": float("inf")}}, {5: {}}, {"longer 1": {"pairs": True}}],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(table: Any) -> None:
    with pytest.raises(InvalidBundleError, match="bucket_transfers"):
        check_bucket_transfers(table)


def test_a_config_with_more_splits_than_tiles_is_the_one_with_fewer() -> None:
    rows = []
    for length, split_kv in ((1024, 16), (131072, 64)):
        config = Config(split_kv=split_kv, num_stages=5)
        rows.append(synthetic.synthetic_row(Shape(8, 1, 32, 128, 64, length), config))
    cells = measurements({name: [row[name] for row in rows] for name in rows[0]}, op=synthetic.OP, arch="h200")
    table = bucket_transfers(cells)
    assert table["shorter 7"] == {"pairs": 1, "untimed": 0, "geomean": 1.0, "p90": 1.0, "worst": 1.0}
    assert table["longer 7"] == {"pairs": 0, "untimed": 1}
