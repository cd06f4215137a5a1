"""Kinds of fault that artifacts, stores and small services of this field have had; docs/faults.md lists them by id."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import numpy as np
import synthetic
import trained

from tilewise.data import store
from tilewise.data.records import COLUMNS, check_row
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidBundleError, InvalidProfileError
from tilewise.kernels.arch import ARCHS
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models import registry
from tilewise.models.bundle import MANIFEST, Bundle
from tilewise.models.golden import verify

KNOWN = Shape(16, 6, 32, 128, 64, 32768)
GOOD = synthetic.synthetic_rows(synthetic.SHAPES[:1])[0]


def renamed(**changes: Any) -> Bundle:
    """The trained bundle with other manifest entries, and so another digest."""
    bundle = trained.bundle()
    return Bundle.create({**bundle.manifest, **changes}, bundle.rank, bundle.level, bundle.exact, bundle.arch)


# -- files that are none

NOTHING: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "truncated": b'{"op": "paged_mqa_lo',
    "null": b"null",
    "list": b"[]",
    "number": b"1",
    "not UTF-8": b"\xff\xfe\x00{",
    "zeros": b"\0" * 4096,
    "pickle": pickle.dumps({"op": "paged_mqa_logits"}),
    "parquet's first bytes": b"PAR1",
    "deep": b"[" * 100_000,
}


def import_it(path: Path) -> None:
    report = store.import_file(path, path.parent / "home")
    assert report.accepted == 0
    raise InvalidProfileError(str(report.reasons))  # JSON lines, of which none is a row: each with its reason


def load_it(path: Path) -> None:
    folder = path.parent / "bundle"
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(path.read_bytes())
    Bundle.load(folder)


@pytest.mark.parametrize("read", [import_it, load_it])
@pytest.mark.parametrize("name", NOTHING)
def test_what_is_no_artifact_is_the_same_typed_error_each_time(
    name: str, read: Callable[[Path], None], tmp_path: Path
) -> None:
    """A1, C11: the second look must not find a half-made state, nor another exception."""
    path = tmp_path / "file"
    path.write_bytes(NOTHING[name])
    found = []
    for _ in range(3):
        try:
            read(path)
        except (InvalidProfileError, InvalidBundleError) as error:
            found.append((type(error), str(error)))
    assert len(found) == 3
    assert len(set(found)) == 1
    home = tmp_path / "home"
    assert not home.exists() or [p for p in home.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("name", NOTHING)
def test_a_selector_on_a_broken_home_answers_alike_until_it_is_mended(name: str, tmp_path: Path) -> None:
    """A1, A2, C11, M2: whatever stands for the pointer or the model, the answer is the shipped model's or the default;
    the next publication puts it right."""
    without = Selector("mi355x", home=tmp_path / "empty").select(KNOWN).config
    whole = registry.publish(trained.bundle(), tmp_path)
    for broken in (tmp_path / "models" / trained.OP / "h200" / registry.POINTER, whole / MANIFEST):
        kept = broken.read_bytes()
        broken.write_bytes(NOTHING[name])
        answers = [Selector("h200", home=tmp_path).select(KNOWN) for _ in range(2)]
        assert answers[0] == answers[1]
        assert answers[0].model_id != trained.bundle().model_id
        broken.write_bytes(kept)
    assert Selector("h200", home=tmp_path).model_id == trained.bundle().model_id
    assert Selector("mi355x", home=tmp_path).select(KNOWN).config == without
    (tmp_path / "models" / trained.OP / "h200" / registry.POINTER).write_bytes(NOTHING[name])
    registry.publish(renamed(metrics={"mended": 1}), tmp_path)
    assert Selector("h200", home=tmp_path).bundle.manifest["metrics"] == {"mended": 1}


# -- artifacts run nothing


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.csv", "rows.pkl", "rows.npy", "rows.joblib"])
@pytest.mark.parametrize("form", ["pickle", "numpy", "text"])
def test_no_profile_is_unpickled(name: str, form: str, tmp_path: Path) -> None:
    """M3: whatever a file is called, what it holds is read as data; an object in it is refused, not made."""
    trap, path = tmp_path / "ran", tmp_path / name
    payload = pickle.dumps(Trap(trap))
    if form == "pickle":
        path.write_bytes(payload)
    elif form == "numpy":
        with path.open("wb") as file:
            np.save(file, np.array([Trap(trap)], dtype=object), allow_pickle=True)
    else:
        path.write_text(json.dumps({**GOOD, "reason": payload.decode("latin-1"), "latency_us": {"__reduce__": 1}}))
    if form == "text":
        assert store.import_file(path, tmp_path / "home").rejected == 1
    else:
        with pytest.raises(InvalidProfileError):
            store.import_file(path, tmp_path / "home")
    assert not trap.exists()


@pytest.mark.parametrize("version", ["0.18.0", "99.0", "not a version"])
def test_a_model_trained_by_another_scikit_learn_answers_the_same(version: str, tmp_path: Path) -> None:
    """M1, M2: nothing of scikit-learn is in the artifact, so its version can change nothing, and warns of nothing."""
    made = trained.bundle()
    training = {**made.manifest["training"], "scikit_learn": version}
    loaded = Bundle.load(renamed(training=training).save(tmp_path / "b"))
    verify(loaded)
    configs = list(made.exact.times(0))
    assert np.array_equal(loaded.predict_us(trained.UNSEEN, configs), made.predict_us(trained.UNSEEN, configs))
    names = [path.name for path in (tmp_path / "b").iterdir()]
    assert all(name == MANIFEST or name.endswith(".npy") for name in names)


# -- rows


def test_rows_of_another_count_of_compute_units_are_not_filed_under_a_card() -> None:
    """C2, C3: a part of a card, or its 80-unit sister, is another arch, whatever the row calls itself."""
    assert check_row(GOOD) is None
    for units in (0, 80, 131, 264):
        reason = check_row({**GOOD, "compute_units": units})
        assert reason is not None
        assert "compute_units" in reason
        assert str(units) in reason
    for name, arch in ARCHS.items():
        assert check_row({**GOOD, "arch": name, "compute_units": arch.compute_units}) is None
    assert check_row({**GOOD, "arch": "sm90-80cu", "compute_units": 80}) is None


TIMES = ("latency_us", "latency_p20_us", "latency_p80_us")
NO_TIMES: list[Any] = [
    math.nan, math.inf, -math.inf, 0.0, -0.0, -1.5, None, "12.5", "NaN", (1.0, 2.0), [1.0], True, {}, b"1", 1 << 2000,
    np.float32(3.0),
]  # fmt: skip


@pytest.mark.parametrize("column", TIMES)
@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: repr(value)[:12])
def test_no_time_but_a_finite_positive_number_gets_in(column: str, value: Any) -> None:
    """A5, A11, F1: for each of the three times, in memory as in files; a value that is no number does not raise."""
    reason = check_row({**GOOD, column: value})
    assert reason is not None
    assert column in reason
    assert len(reason) < 300


@pytest.mark.parametrize(
    "column", [column for column in COLUMNS if not column.nullable], ids=lambda column: column.name
)
def test_a_row_lacks_nothing_that_says_how_it_was_measured(column: Any) -> None:
    """A12, A18, A19, C13: footprint, cache state, method, toolchain and kernel source stand in every row."""
    for row in ({**GOOD, column.name: None}, {name: value for name, value in GOOD.items() if name != column.name}):
        reason = check_row(row)
        assert reason is not None
        assert column.name in reason


def test_the_columns_that_tell_measurements_apart_are_there() -> None:
    """A12, A19, C13: what those rows are checked for."""
    required = {column.name for column in COLUMNS if not column.nullable}
    assert required >= {
        "footprint_bytes", "cache_state", "timing_method", "kernel_hash", "triton_version", "torch_version",
        "compute_units", "device_name", "rounds",
    }  # fmt: skip
    assert {column.name for column in COLUMNS} >= {"driver", "runtime", "clock_before_mhz", "clock_after_mhz"}


# -- kills and writers at once

DYING = """
import os, sys
from tilewise.models import bundle, registry
home, folder, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
made = bundle.Bundle.load(folder)
calls = 0
def deadly(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            os._exit(9)
        return real(*arguments, **options)
    return call
os.replace, os.fsync = deadly(os.replace), deadly(os.fsync)
registry.publish(made, home)
os._exit(calls)
"""


def test_a_publication_killed_at_any_step_leaves_the_old_model_or_the_new(tmp_path: Path) -> None:
    """A1, A2: at the first write, at each rename and sync of bundle and pointer; then the same publication succeeds."""
    new = renamed(metrics={"new": 1})
    folder = new.save(tmp_path / "made")
    steps = subprocess.run([sys.executable, "-c", DYING, tmp_path / "count", folder, "0"], timeout=60).returncode
    assert steps > 10
    for at in (1, steps - 3, steps - 2, steps - 1, steps):
        home = tmp_path / str(at)
        registry.publish(trained.bundle(), home)
        killed = subprocess.run([sys.executable, "-c", DYING, home, folder, str(at)], timeout=60)
        assert killed.returncode == 9
        assert Selector("h200", home=home).model_id in (trained.bundle().model_id, new.model_id)
        registry.publish(new, home)
        assert Selector("h200", home=home).model_id == new.model_id
        assert registry.rollback(trained.OP, "h200", home).name == trained.bundle().digest


PUBLISHING = """
import sys
from tilewise.models import bundle, registry
home, folder, name = sys.argv[1:]
one = bundle.Bundle.load(folder)
for number in range(8):
    manifest = {**one.manifest, "metrics": {name: number}}
    registry.publish(bundle.Bundle.create(manifest, one.rank, one.level, one.exact, one.arch), home)
"""


def test_processes_that_publish_at_once_lose_no_update(tmp_path: Path) -> None:
    """F6: each of two processes puts eight models in force; the history has all of them, and a reader sees no tear."""
    folder = trained.bundle().save(tmp_path / "made")
    home = tmp_path / "home"
    command = [sys.executable, "-c", PUBLISHING, str(home), str(folder)]
    processes = [subprocess.Popen([*command, name]) for name in ("one", "two")]
    while any(process.poll() is None for process in processes):
        found = registry.current(trained.OP, "h200", home)
        if found.parent.name == "versions":
            assert Bundle.load(found).digest == found.name
        time.sleep(0.02)
    assert [process.returncode for process in processes] == [0, 0]
    expected = {renamed(metrics={name: number}).digest for name in ("one", "two") for number in range(8)}
    history = registry.history(trained.OP, "h200", home)
    assert len(history) == 16
    assert set(history) == expected


# -- the service

BODIES = ("/v1/select", "/v1/select/batch", "/v1/rank", "/v1/explain", "/v1/compare", "/v1/shapes", "/v1/jobs")
ODD = ["NaN", "Infinity", "-1", "1e400", "", "%00", "../h200", "h200%0d%0aX: y", "9" * 3000, "%ff", "[]", "null"]


def test_no_question_makes_the_service_fail(tmp_path: Path) -> None:
    """F1: every GET route with odd values, and every POST route with odd numbers anywhere, also nested."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from tilewise.server import create_app

    app = create_app(home=tmp_path, arch_names=["h200"])
    routes = {path: {method.upper() for method in of} for path, of in app.openapi()["paths"].items()}
    body = '{"batch_size": %s, "next_n": 6, "heads": 32, "max_context_len": 1000, "%s": %s}'
    requests: list[tuple[str, str, bytes | None]] = []
    for path, methods in routes.items():
        if "{" in path:
            requests += [(how, re.sub(r"\{\w+\}", odd or "x", path), None) for how in methods for odd in ODD]
            continue
        if "GET" in methods:
            requests += [("GET", f"{path}?{name}={odd}", None) for odd in ODD for name in ("arch", "time_us", odd[:40])]
        if "POST" in methods and path != "/v1/profiles":
            for odd in ("NaN", "Infinity", "-Infinity", "1e400", "-1", "null", '{"a": NaN}', "[1e999]", '"NaN"'):
                requests.append(("POST", path, (body % (odd, "mean_context_len", "5")).encode()))
                requests.append(("POST", path, (body % ("16", "time_us", odd)).encode()))
    assert len(requests) > 100

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tilewise") as client:
            kind = {"Content-Type": "application/json"}
            return [await client.request(how, url, content=data, headers=kind) for how, url, data in requests]

    for (how, url, _), response in zip(requests, asyncio.run(ask()), strict=True):
        assert response.status_code < 500, url
        if how == "POST":
            allowed = (422,) if url in BODIES else (404, 405, 409, 422)
            assert response.status_code in allowed, (url, response.text)
        if "json" in response.headers.get("content-type", ""):
            json.loads(response.content, parse_constant=pytest.fail)  # called for NaN and the like


def test_each_worker_of_a_service_reads_one_registry(tmp_path: Path) -> None:
    """F5: two selectors of different age, as in two workers, agree once both have looked, and name their model."""
    models = [trained.bundle(), renamed(metrics={"second": 1})]
    registry.publish(models[0], tmp_path)
    old = Selector("h200", home=tmp_path)
    for bundle in (models[1], models[0], models[1]):
        registry.publish(bundle, tmp_path)
        young = Selector("h200", home=tmp_path)
        assert young.select(KNOWN).model_id == bundle.model_id
        assert old.reload()
        assert old.select(KNOWN) == young.select(KNOWN)
    assert os.environ.get("TILEWISE_HOME") != str(tmp_path)
