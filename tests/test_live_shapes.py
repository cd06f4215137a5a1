"""Modes, and the count of shapes that were asked for."""

from __future__ import annotations

import gc
import json
import logging
import threading
import tracemalloc
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import trained

import tilewise
from tilewise.data.traffic import MAX_LAUNCHES, Traffic, read_traffic
from tilewise.dispatch import live
from tilewise.dispatch import selector as selecting
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidProfileError, SelectionMissError, UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import Shape, default_config
from tilewise.models import bundle

KNOWN = Shape(16, 6, 32, 128, 64, 32768)
BEYOND = Shape(4096, 6, 32, 128, 64, 4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.bundle().save(tmp_path_factory.mktemp("model") / "bundle")


# -- modes


def test_the_variable_sets_the_mode_and_an_argument_overrides_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWISE_MODE", raising=False)
    assert Selector("h200", bundle_dir=folder).mode == "on"
    for word in ("off", "shadow", "on", "strict"):
        monkeypatch.setenv("TILEWISE_MODE", word)
        assert Selector("h200", bundle_dir=folder).mode == word
    assert Selector("h200", bundle_dir=folder, mode="on").mode == "on"
    monkeypatch.setenv("TILEWISE_MODE", "")
    assert Selector("h200", bundle_dir=folder).mode == "on"
    monkeypatch.setenv("TILEWISE_MODE", "of")
    with pytest.raises(UnsupportedError, match="TILEWISE_MODE must be one of off, shadow, on, strict, got 'of'"):
        Selector("h200", bundle_dir=folder)


def test_off_answers_with_the_default_and_loads_nothing(folder: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder, mode="off")
    for shape in (KNOWN, trained.UNSEEN):
        decision = chooser.select(shape)
        assert (decision.config, decision.source) == (default_config(shape, trained.ARCH), "default")
    assert chooser.select(KNOWN, context=(2048, 9000)).source == "default"
    assert chooser.bundle is None
    assert chooser.counters == {"off": 3}


def test_shadow_answers_with_the_default_and_says_what_it_would_pick(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, chooser = Selector("h200", bundle_dir=folder, mode="on"), Selector("h200", bundle_dir=folder, mode="shadow")
    differing = 0
    with caplog.at_level(logging.INFO, "tilewise"):
        for shape in trained.SHAPES:
            kept, picked = chooser.select(shape), plain.select(shape)
            assert kept.config == default_config(shape, trained.ARCH)
            if picked.config != kept.config:
                differing += 1
                assert (kept.runner_up, kept.source) == (picked.config, "default")
                assert kept.margin is not None
                assert kept.margin < 0
                assert picked.reason in kept.reason
    assert differing > 3
    assert chooser.counters == {"shadow": len(trained.SHAPES), "shadow_differs": differing}
    assert len([r for r in caplog.records if "shadow mode" in r.getMessage()]) == differing


def test_strict_refuses_a_miss_every_time_and_answers_the_rest(folder: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder, mode="strict")
    assert chooser.select(KNOWN).source == "exact"
    assert chooser.select(trained.UNSEEN).source == "model"
    assert chooser.select(Shape(0, 6, 32)).source == "default"
    for _ in range(2):
        with pytest.raises(SelectionMissError, match="batch_size 4096 is outside"):
            chooser.select(BEYOND)
    with pytest.raises(SelectionMissError):
        chooser.select(KNOWN, context=(16, 32768))
    assert chooser.counters == {"extrapolated": 3, "strict_miss": 3}
    assert chooser.rank(BEYOND)
    assert chooser.explain(BEYOND)
    with pytest.raises(SelectionMissError):
        Selector("h200", bundle_dir="nowhere", mode="strict").select(KNOWN)


# -- counts


def test_calls_are_counted_by_shape_whichever_way_they_come(folder: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder)
    for _ in range(5):
        chooser.select(KNOWN)
        chooser.select(batch_size=16, next_n=6, heads=32)
    chooser.select(BEYOND)
    chooser.rank(trained.UNSEEN)  # asks for no launch
    first, second = chooser.shapes_seen()
    assert {**KNOWN.to_dict(), "count": 10, "source": "exact", "fallbacks": []}.items() <= first.items()
    assert {
        **BEYOND.to_dict(),
        "count": 1,
        "source": "default",
        "fallbacks": ["extrapolated"],
    }.items() <= second.items()
    assert chooser.shapes_seen() == [first, second], "reading takes no step"


def test_counts_outlive_the_memory_of_decisions_and_a_reload(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "MEMO_LIMIT", 4)
    chooser = Selector("h200", bundle_dir=folder)
    for _ in range(3):
        for batch in range(1, 12):
            chooser.select(Shape(batch, 1, 32))
        chooser.reload(force=True)
    assert [row["count"] for row in chooser.shapes_seen()] == [3] * 11


def test_shapes_beyond_the_limit_are_counted_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SEEN_LIMIT", 5)
    chooser = Selector("h200", bundle_dir=folder)
    for batch in range(1, 13):
        for _ in range(batch):
            chooser.select(Shape(batch, 1, 32))
    rows = chooser.shapes_seen()
    assert [row["count"] for row in rows[:-1]] == [5, 4, 3, 2, 1]
    assert (rows[-1]["overflow"], rows[-1]["count"]) == (True, sum(range(6, 13)))


def test_no_count_is_lost_between_threads(folder: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder)
    chooser.select(KNOWN)

    def ask() -> None:
        for _ in range(20000):
            chooser.select(KNOWN)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chooser.shapes_seen()[0]["count"] == 80001


def test_a_known_shape_is_answered_while_every_lock_is_held(folder: Path) -> None:
    chooser = Selector("h200", bundle_dir=folder)
    expected = chooser.select(KNOWN)
    answers = []
    with chooser._lock, chooser._live._lock:
        asking = threading.Thread(target=lambda: answers.append(chooser.select(KNOWN)))
        asking.start()
        asking.join(10)
        assert answers == [expected]


# -- files


def test_what_a_process_asked_for_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "_selectors", {})
    for _ in range(3):
        tilewise.select(KNOWN, arch="h200")
    tilewise.select(KNOWN, arch="h200", context={1000: 3, 2000: 1})
    tilewise.select(Shape(2, 1, 32, 128, 128), arch="sm90")
    path = tmp_path / "new" / "shapes.jsonl"
    assert tilewise.write_shapes(path) == 3
    for folder_given in (tmp_path, "."):
        with pytest.raises(IsADirectoryError):
            tilewise.write_shapes(folder_given)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["count"] for row in rows] == [3, 1, 1]
    assert {row["arch"] for row in rows} == {"h200"}
    assert read_traffic(path) == [
        Traffic(KNOWN, 3.0),
        Traffic(Shape(16, 6, 32, 128, 64, 1000), 0.75),
        Traffic(Shape(16, 6, 32, 128, 64, 2000), 0.25),
        Traffic(Shape(2, 1, 32, 128, 128), 1.0),
    ]
    assert list(path.parent.iterdir()) == [path]


def test_traffic_is_read_from_csv_too(tmp_path: Path) -> None:
    path = tmp_path / "traffic.csv"
    path.write_text(
        "batch_size,next_n,heads,max_context_len,count,note\n4,2,64,8192,2.5,x\n4,2,64,8192,1,\n1,1,32,,,\n"
    )
    assert read_traffic(path) == [Traffic(Shape(4, 2, 64, max_context_len=8192), 3.5), Traffic(Shape(1, 1, 32), 1.0)]


CONTEXT = '{"batch_size": 1, "next_n": 1, "heads": 32, "context": {"lengths": %s, "weights": %s}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no shape"),
        ('{"overflow": true, "count": 9}', "no shape"),
        ('{"batch_size": 1, "next_n": 1}', "line 1"),
        (
            '{"batch_size": 1, "next_n": 1, "heads": 32}\n{"batch_size": 1, "next_n": 9, "heads": 32}',
            "line 2: next_n must",
        ),
        ('{"batch_size": 1, "next_n": 1, "heads": 32, "count": 0}', "count must be"),
        ('{"batch_size": 1, "next_n": 1, "heads": 32, "count": NaN}', "count must be"),
        ('{"batch_size": 1, "next_n": 1, "heads": 32, "context": {"lengths": [1]}}', "weights"),
        (CONTEXT % ("[1, 2]", "[1, -1]"), "weights must be numbers of 0 to"),
        (CONTEXT % ("[1, 2]", "[-1, 1]"), "weights must be numbers of 0 to"),
        (CONTEXT % ("[1, 2]", "[1e308, 1e308]"), "weights must be numbers of 0 to"),
        (CONTEXT % ("[1, 2]", "[0, 0]"), "weights must not all be 0"),
        (CONTEXT % ("[]", "[]"), "weights must not all be 0"),
        ('{"batch_size": 1, "next_n": 1, "heads": 32, "count": 1e308}', "count must be"),
        ('{"batch_size": 1', "not JSON"),
        ("batch_size,next_n,heads\n1,1,x\n", "line 2: heads must"),
        ("[1, 2]", "no shape"),
    ],
)
def test_a_file_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "traffic"
    path.write_text(text)
    with pytest.raises(InvalidProfileError) as refused:
        read_traffic(path)
    assert said in str(refused.value)
    with pytest.raises(InvalidProfileError, match="cannot be read"):
        read_traffic(tmp_path / "none")


def test_the_greatest_counts_add_up_to_a_number(tmp_path: Path) -> None:
    """As do the least: what there is no float for is left out."""
    most = f'{{"batch_size": 1, "next_n": 1, "heads": 32, "count": {MAX_LAUNCHES}}}\n'
    least = (CONTEXT % ("[1, 2]", "[1, 1]")).replace('"context"', '"count": 5e-324, "context"')
    (tmp_path / "traffic").write_text(most * 3 + least)
    assert read_traffic(tmp_path / "traffic") == [Traffic(Shape(1, 1, 32), 3 * MAX_LAUNCHES)]


def test_memory_does_not_grow_with_the_shapes_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a fraction of the limits that bound all that grows; benchmarks/selection_memory.py has the real ones."""
    for name in ("MEMO_LIMIT", "OBJECT_MEMO_LIMIT", "CONTEXT_MEMO_LIMIT"):
        monkeypatch.setattr(selecting, name, 200)
    monkeypatch.setattr(live, "SEEN_LIMIT", 200)
    monkeypatch.setattr(bundle, "MOST_STRUCTURES", 8)
    chooser = Selector("h200", bundle_dir=folder)

    def ask(first: int, last: int) -> int:
        for at in range(first, last):
            chooser.select(Shape(1 + at % 60, 1 + at % 2, 32, max_context_len=2048 + at))
            chooser.select(batch_size=1 + at % 60, next_n=1 + at % 2, heads=32, max_context_len=2048 + at)
            chooser.select(Shape(1 + at % 60, 1 + at % 2, 32, max_context_len=2048), context=1 + at)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        filled = ask(0, 500)
        # More than 700 bytes for each of 1500 shapes, were they kept; tables of configs still grow to their own limits.
        assert ask(500, 2000) < filled + 500_000
    finally:
        tracemalloc.stop()
    assert len(chooser.shapes_seen()) == 201
