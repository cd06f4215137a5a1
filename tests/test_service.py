"""The routes for profiles, shapes, jobs and models, asked in-process; who may ask what; limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import resource
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("sqlalchemy")
pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import synthetic  # noqa: E402

from tilewise.data.store import load_profile, write_rows  # noqa: E402
from tilewise.dispatch.selector import Selector  # noqa: E402
from tilewise.kernels.paged_mqa_logits import spec  # noqa: E402
from tilewise.models import registry  # noqa: E402
from tilewise.server import MODEL_HEADER, create_app  # noqa: E402
from tilewise.service import importing, jobs  # noqa: E402
from tilewise.service.access import MAX_BATCH_BYTES, MAX_BODY_BYTES, SCOPES, add_token, revoke_token, scope_needed  # noqa: E402
from tilewise.service.catalogue import CatalogueError  # noqa: E402
from tilewise.service.models import store_model  # noqa: E402
from tilewise.service.run import tidy  # noqa: E402
from tilewise.service.settings import SettingError, Settings, settings_table  # noqa: E402

OP, ARCH = synthetic.OP, "h100"
SHAPE = {"batch_size": 16, "next_n": 6, "heads": 32, "max_context_len": 32768}
ROWS = synthetic.synthetic_rows(synthetic.SHAPES[:4], arch=ARCH)[:20]
BYTES = {"Content-Type": "application/octet-stream"}
JSON = {"Content-Type": "application/json"}


class Service:
    """One app and the folder that it reads."""

    def __init__(
        self, home: Path, *, needed: bool = False, hosts: frozenset[str] | None = None, **changes: Any
    ) -> None:
        self.home = home
        self.settings = dataclasses.replace(Settings.from_env({}, home=home), job_nice=0, **changes)
        self.app = create_app(settings=self.settings, arch_names=[ARCH, "h200"], tokens_needed=needed, hosts=hosts)
        self.parts = self.app.state.service

    def ask(self, method: str, url: str, **request: Any) -> Any:
        return self.ask_all([(method, url, request)])[0]

    def ask_all(self, requests: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
        async def run() -> list[Any]:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://tilewise", timeout=60) as client:
                return list(await asyncio.gather(*[client.request(m, url, **r) for m, url, r in requests]))

        return asyncio.run(run())

    def close(self) -> None:
        self.parts.catalogue.dispose()


@pytest.fixture
def service(tmp_path: Path) -> Any:
    made = Service(tmp_path / "home")
    yield made
    made.close()


def check_problem(response: Any, status: int, field: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["detail"]
    if field is not None:
        assert field in [error["field"] for error in problem["errors"]], problem
    return problem


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def parquet(rows: list[dict[str, Any]], folder: Path) -> bytes:
    write_rows(rows, folder / "rows.parquet")
    return (folder / "rows.parquet").read_bytes()


def csv_text(rows: list[dict[str, Any]]) -> bytes:
    import csv

    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


# --- profiles


def test_a_profile_in_each_format_is_the_same_rows(service: Service, tmp_path: Path) -> None:
    digests = set()
    for number, body in enumerate((parquet(ROWS, tmp_path), json_lines(ROWS), csv_text(ROWS))):
        response = service.ask("POST", "/v1/profiles", content=body, headers=BYTES)
        assert response.status_code == (200 if number else 201), response.text
        answer = response.json()
        assert (answer["accepted"], answer["rejected"], answer["reasons"]) == (len(ROWS), 0, [])
        digests |= {one["digest"] for one in answer["files"]}
    (digest,) = digests
    assert len(load_profile(OP, ARCH, home=service.home)) == len(ROWS)
    (listed,) = service.ask("GET", "/v1/profiles").json()["profiles"]
    assert (listed["digest"], listed["op"], listed["arch"], listed["rows"]) == (digest, OP, ARCH, len(ROWS))
    assert service.ask("GET", "/v1/profiles?arch=h200").json() == {"profiles": []}

    fetched = service.ask("GET", f"/v1/profiles/{digest}")
    assert fetched.headers["ETag"] == f'"{digest}"'
    again = service.ask("POST", "/v1/profiles", content=fetched.content, headers=BYTES)
    assert again.json()["files"][0]["digest"] == digest

    assert service.ask("DELETE", f"/v1/profiles/{digest}").status_code == 204
    assert service.ask("GET", "/v1/profiles").json() == {"profiles": []}
    assert len(load_profile(OP, ARCH, home=service.home)) == 0
    check_problem(service.ask("GET", f"/v1/profiles/{digest}"), 404)
    check_problem(service.ask("DELETE", f"/v1/profiles/{digest}"), 404)
    assert list((service.home / "incoming").iterdir()) == []


def test_bad_rows_are_named_and_good_ones_kept(service: Service) -> None:
    rows = [ROWS[0], {**ROWS[1], "latency_us": -1.0}, ROWS[2], {**ROWS[3], "heads": 33}, ROWS[2]]
    answer = service.ask("POST", "/v1/profiles", content=json_lines(rows), headers=BYTES).json()
    assert (answer["accepted"], answer["duplicates"], answer["rejected"]) == (2, 1, 2)
    assert [one["row"] for one in answer["reasons"]] == [2, 4]
    assert "latency_us" in answer["reasons"][0]["reason"]
    assert "heads" in answer["reasons"][1]["reason"]


def test_a_file_without_a_good_row_is_a_422_with_each_reason(service: Service) -> None:
    rows = [{**ROWS[0], "latency_us": float("nan")}, {**ROWS[1], "arch": "h900"}]
    problem = check_problem(service.ask("POST", "/v1/profiles", content=json_lines(rows), headers=BYTES), 422, "row 1")
    assert [error["field"] for error in problem["errors"]] == ["row 1", "row 2"]
    assert not (service.home / "profiles").exists() or not list((service.home / "profiles").rglob("*.parquet"))


@pytest.mark.parametrize(
    "body",
    [b"", b"\0\1\2", b"PAR1 and no more", b"[1, 2]", b"a,b\n1,2\n", b"\xff\xfe" * 10, b"PAR1" + b"\0" * 5000 + b"PAR1"],
)
def test_what_is_no_profile_is_a_422_that_names_no_path(service: Service, body: bytes) -> None:
    problem = check_problem(service.ask("POST", "/v1/profiles", content=body, headers=BYTES), 422)
    assert str(service.home) not in json.dumps(problem)
    assert list((service.home / "incoming").iterdir()) == []


def test_an_upload_has_limits_of_bytes_and_rows(tmp_path: Path) -> None:
    body = json_lines(ROWS)
    service = Service(tmp_path / "bytes", max_upload_bytes=len(body) - 1)
    check_problem(service.ask("POST", "/v1/profiles", content=body, headers=BYTES), 413)

    async def chunked() -> Any:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    check_problem(service.ask("POST", "/v1/profiles", content=chunked(), headers=BYTES), 413)
    assert list((service.home / "incoming").iterdir()) == []
    service.close()
    service = Service(tmp_path / "rows", max_upload_rows=len(ROWS) - 2)
    for content in (body, csv_text(ROWS), parquet(ROWS, tmp_path)):
        problem = check_problem(service.ask("POST", "/v1/profiles", content=content, headers=BYTES), 422, "body")
        assert f"at most {len(ROWS) - 2} rows" in problem["detail"]
    check_problem(service.ask("POST", "/v1/profiles", content=body, headers={"Content-Encoding": "gzip"}), 415)
    service.close()


def test_an_upload_sent_again_with_its_key_has_the_first_answer(service: Service) -> None:
    headers = {**BYTES, "Idempotency-Key": "run 17"}
    first = service.ask("POST", "/v1/profiles", content=json_lines(ROWS), headers=headers)
    assert first.status_code == 201
    second = service.ask("POST", "/v1/profiles", content=json_lines(ROWS), headers=headers)
    assert (second.status_code, second.json()) == (201, first.json())
    assert second.headers["Idempotent-Replay"] == "true"
    check_problem(
        service.ask("POST", "/v1/profiles", content=json_lines(ROWS[:3]), headers=headers), 422, "Idempotency-Key"
    )
    for bad in ("", "x" * 129):
        headers = {**BYTES, "Idempotency-Key": bad}
        check_problem(service.ask("POST", "/v1/profiles", content=b"x", headers=headers), 422, "Idempotency-Key")


def test_of_uploads_at_once_under_one_key_one_is_taken(service: Service) -> None:
    headers = {**BYTES, "Idempotency-Key": "run 18"}
    bodies = [json_lines(ROWS[:3]), json_lines(ROWS[3:8]), json_lines(ROWS[8:])]
    requests = [("POST", "/v1/profiles", {"content": body, "headers": headers}) for body in bodies]
    answers = service.ask_all(requests)
    assert sorted(answer.status_code for answer in answers) == [201, 422, 422]
    for body, first in zip(bodies, answers, strict=True):
        again = service.ask("POST", "/v1/profiles", content=body, headers=headers)
        assert again.status_code == first.status_code
        if again.status_code == 201:
            assert (again.json(), again.headers["Idempotent-Replay"]) == (first.json(), "true")
            assert len(load_profile(OP, ARCH, home=service.home)) == again.json()["accepted"]
        else:
            check_problem(again, 422, "Idempotency-Key")


def test_an_upload_that_came_to_no_answer_can_be_sent_again_under_its_key(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"content": json_lines(ROWS), "headers": {**BYTES, "Idempotency-Key": "run 19"}}
    with monkeypatch.context() as patched:
        patched.setattr(importing, "module_command", lambda *words: ["/bin/sh", "-c", "kill -9 $$"])
        check_problem(service.ask("POST", "/v1/profiles", **request), 503)
    first = service.ask("POST", "/v1/profiles", **request)
    assert (first.status_code, first.headers.get("Idempotent-Replay")) == (201, None)
    assert service.ask("POST", "/v1/profiles", **request).headers["Idempotent-Replay"] == "true"


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full once a file has this many bytes, for this process and those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("left_out", [1, 5000, 2_000_000])
def test_an_upload_that_the_disk_has_no_room_for_is_a_507(service: Service, left_out: int) -> None:
    body = json_lines(ROWS * 150)
    assert len(body) > 2_000_000
    with files_of_at_most(len(body) - left_out):
        check_problem(service.ask("POST", "/v1/profiles", content=body, headers=BYTES), 507)
    assert list((service.home / "incoming").iterdir()) == []
    assert service.ask("POST", "/v1/profiles", content=body, headers=BYTES).json()["accepted"] == len(ROWS)


def test_rows_that_the_disk_has_no_room_for_are_a_507_and_leave_nothing(service: Service) -> None:
    body = json_lines(ROWS[:1])  # a tenth of what it is in Parquet
    with files_of_at_most(len(body) + 1000):
        check_problem(service.ask("POST", "/v1/profiles", content=body, headers=BYTES), 507)
    assert [path for path in service.home.rglob("*incoming*") if path.is_file()] == []
    assert service.ask("POST", "/v1/profiles", content=body, headers=BYTES).status_code == 201


def test_a_check_that_fails_is_a_500_and_one_that_is_killed_a_503(
    service: Service, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one fails again when the file is sent again, the other does not."""
    service.home.mkdir()
    (service.home / "profiles").touch()
    check_problem(service.ask("POST", "/v1/profiles", content=json_lines(ROWS), headers=BYTES), 500)
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.setattr(importing, "module_command", lambda *words: ["/bin/sh", "-c", "kill -9 $$"])
    answer = service.ask("POST", "/v1/profiles", content=json_lines(ROWS), headers=BYTES)
    assert "send it again" in check_problem(answer, 503)["detail"]
    assert list((service.home / "incoming").iterdir()) == []


def test_a_client_that_hangs_up_during_an_upload_is_no_fault_of_the_service(service: Service) -> None:
    said: list[Any] = [
        {"type": "http.request", "body": json_lines(ROWS)[:5000], "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return said.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/profiles", "query_string": b"", "headers": []}
    asyncio.run(service.app(scope, receive, send))  # raises what the server would log with its traceback
    assert sent[0]["status"] == 400
    assert list((service.home / "incoming").iterdir()) == []


def test_uploads_at_once_lose_no_row(service: Service) -> None:
    """F6: several uploads together, some of them the same rows."""
    parts = [ROWS[:8], ROWS[4:12], ROWS[12:], ROWS[:8]]
    requests = [("POST", "/v1/profiles", {"content": json_lines(part), "headers": BYTES}) for part in parts]
    assert {response.status_code for response in service.ask_all(requests)} <= {200, 201}
    assert len(load_profile(OP, ARCH, home=service.home)) == len(ROWS)
    assert len(service.ask("GET", "/v1/profiles").json()["profiles"]) == 3


@pytest.mark.parametrize("digest", ["..", "%2e%2e%2fcatalogue.db", "0" * 64, "A" * 64, "0" * 63, "x" * 5000])
def test_no_name_of_a_client_is_taken_for_a_path(service: Service, digest: str) -> None:
    for method, path in (("GET", "/v1/profiles/{}"), ("DELETE", "/v1/profiles/{}"), ("GET", "/v1/models/{}/artifact")):
        check_problem(
            service.ask(method, path.format(digest)), 404 if digest != ".." else service.ask(method, "/v1").status_code
        )


# --- many shapes


def test_a_batch_gives_each_shape_the_decision_that_it_gets_alone(service: Service) -> None:
    synthetic.publish_synthetic(service.home, shapes=synthetic.SHAPES[:4], arch=ARCH)
    service.parts.selectors.by_arch[ARCH].reload()
    shapes = [
        {"batch_size": b, "next_n": n, "heads": 32, "max_context_len": c}
        for b in (0, 1, 5, 64)
        for n in (1, 6)
        for c in (0, 4096)
    ]
    asked = shapes + shapes[::-1] + [{**shapes[0], "head_dim": 128}]
    response = service.ask("POST", "/v1/select/batch", json={"arch": ARCH, "shapes": asked})
    answer = response.json()
    selector = Selector(ARCH, home=service.home)
    assert (answer["model_id"], response.headers[MODEL_HEADER]) == (selector.model_id, selector.model_id)
    assert len(answer["index"]) == len(asked)
    for shape, place in zip(asked, answer["index"], strict=True):
        assert answer["decisions"][place] == selector.select(spec.Shape(**shape)).to_dict()


def test_a_batch_names_every_value_at_fault_by_its_place(service: Service) -> None:
    good = {"batch_size": 1, "next_n": 1, "heads": 32}
    shapes = [
        good,
        {**good, "batch_size": True},
        good,
        {**good, "batch_size": 1.0},
        {**good, "block_kv": 1},
        {"next_n": 1, "heads": 32},
    ]
    problem = check_problem(service.ask("POST", "/v1/select/batch", json={"shapes": shapes}), 422)
    assert [error["field"] for error in problem["errors"]] == [
        "shapes.1.batch_size", "shapes.3.batch_size", "shapes.4.block_kv", "shapes.5.batch_size",
    ]  # fmt: skip
    for bad in ([], [good] * 10_001, "x", [1], [[]], [None]):
        check_problem(service.ask("POST", "/v1/select/batch", json={"shapes": bad}), 422)
    large = b'{"shapes": [' + b" " * MAX_BATCH_BYTES
    check_problem(
        service.ask("POST", "/v1/select/batch", content=large, headers={"Content-Type": "application/json"}), 413
    )
    whole = service.ask("POST", "/v1/select/batch", json={"shapes": [good] * 10_000})
    assert (whole.status_code, len(whole.json()["index"]), len(whole.json()["decisions"])) == (200, 10_000, 1)


def test_live_shapes_are_counted(service: Service) -> None:
    lines = [
        {**SHAPE, "count": 5},
        {**SHAPE, "batch_size": 2},
        {**SHAPE, "count": 7, "source": "exact", "fallbacks": []},
    ]
    lines.append({**SHAPE, "batch_size": 3, "count": 4, "context": {"lengths": [100, 300], "weights": [0.75, 0.25]}})
    body = {"arch": ARCH, "shapes": lines}
    assert service.ask("POST", "/v1/shapes", json=body).json() == {"counted": 4, "left_out": 0}
    service.ask("POST", "/v1/shapes", json=body)
    seen = service.ask("GET", f"/v1/shapes?arch={ARCH}").json()["shapes"]
    assert [(one["shape"]["batch_size"], one["count"]) for one in seen] == [(16, 24), (3, 6), (2, 2), (3, 2)]
    assert [one["shape"]["max_context_len"] for one in seen] == [32768, 100, 32768, 300]
    assert service.ask("GET", "/v1/shapes?arch=h200").json()["shapes"] == []
    for change, field in (
        ({"count": 0}, "count"), ({"count": -1}, "count"), ({"count": True}, "count"), ({"count": "1"}, "count"),
        ({"heads": 33}, "heads"), ({"batch_size": None}, "batch_size"), ({"batch_size": 1.5}, "batch_size"),
        ({"surprise": 1}, "surprise"), ({"context": 5}, "context"), ({"block_kv": 1}, "block_kv"),
        ({"context": {"lengths": [1], "weights": [1, 2]}}, "context"), ({"context": {"lengths": [1]}}, "weights"),
        ({"context": {"lengths": [1, 2], "weights": [1, -1]}}, "context"), ({"count": 1e308}, "count"),
    ):  # fmt: skip
        for path in ("/v1/shapes", "/v1/compare"):
            answer = service.ask("POST", path, json={"shapes": [{**SHAPE, **change}]})
            check_problem(answer, 422, f"shapes.0.{field}")


@pytest.mark.parametrize(
    "body", [r'{"\ud800": 1}', r'{"shapes": [{"\udfffx": 1}]}', r'["\ud800"]', r'{"arch": "\ud83d"}']
)
def test_text_that_no_answer_could_repeat_is_bad_json_on_every_route(service: Service, body: str) -> None:
    paths = service.app.openapi()["paths"]
    kinds = {path: of["post"].get("requestBody", {}).get("content", {}) for path, of in paths.items() if "post" in of}
    routes = [path for path, kind in kinds.items() if "$ref" in kind.get("application/json", {}).get("schema", {})]
    assert {"/v1/select", "/v1/shapes", "/v1/compare", "/v1/jobs"} <= set(routes)
    for path in routes:
        answer = service.ask("POST", path, content=body, headers=JSON)
        assert "UTF-8" in check_problem(answer, 422, "body")["detail"]
    # A whole character may be written so.
    check_problem(service.ask("POST", "/v1/shapes", content=r'{"\ud83d\ude00": 1}', headers=JSON), 422, "\U0001f600")


def test_what_an_engine_writes_can_be_sent_as_it_is(service: Service) -> None:
    selector = Selector(ARCH, home=service.home)
    for _ in range(3):
        selector.select(**SHAPE)
    selector.select(**SHAPE, context=(1024, 4096))
    answer = service.ask("POST", "/v1/shapes", json={"arch": ARCH, "shapes": selector.shapes_seen()})
    assert answer.status_code == 200, answer.text
    seen = service.ask("GET", f"/v1/shapes?arch={ARCH}").json()["shapes"]
    assert (seen[0]["shape"]["max_context_len"], seen[0]["count"]) == (32768, 3)
    assert sum(one["count"] for one in seen) == pytest.approx(4)


# --- jobs


def test_jobs_are_queued_listed_and_cancelled(service: Service) -> None:
    response = service.ask("POST", "/v1/jobs", json={"arch": "h100", "folds": 0, "shadow_requests": 3})
    job = response.json()
    assert (response.status_code, job["state"], job["stage"]) == (202, "queued", "import")
    assert response.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert job["parameters"] == {
        "seed": 0,
        "folds": 0,
        "shadow_requests": 3,
        "shadow_timeout_s": 3600.0,
        "promote": True,
    }
    second = service.ask("POST", "/v1/jobs", json={"arch": "h100"})
    check_problem(second, 409)
    assert second.headers["Location"] == f"/v1/jobs/{job['id']}"
    other = service.ask("POST", "/v1/jobs", json={"arch": "h200"}).json()
    assert [one["id"] for one in service.ask("GET", "/v1/jobs").json()["jobs"]] == [other["id"], job["id"]]
    assert [one["id"] for one in service.ask("GET", "/v1/jobs?arch=h100").json()["jobs"]] == [job["id"]]
    assert service.ask("POST", f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    assert service.ask("GET", f"/v1/jobs/{job['id']}").json()["reason"] == "cancelled before it began"
    lines = service.ask("GET", f"/v1/jobs/{job['id']}/log").json()["lines"]
    assert [line["text"] for line in lines] == ["cancelled: cancelled before it began"]
    assert service.ask("GET", "/v1/jobs?state=queued").json()["jobs"] == [other]
    check_problem(service.ask("GET", "/v1/jobs?state=lost"), 422, "state")
    for missing in ("0" * 32, "x", "x" * 32):
        for method, path in (("GET", ""), ("GET", "/log"), ("POST", "/cancel")):
            check_problem(service.ask(method, f"/v1/jobs/{missing}{path}"), 404)
    for body, field in (
        ({"arch": "h900"}, "arch"), ({"folds": -1}, "folds"), ({"seed": 1 << 40}, "seed"), ({"kind": "shell"}, "kind"),
        ({"shadow_timeout_s": "1"}, "shadow_timeout_s"), ({"promote": 1}, "promote"), ({"surprise": 1}, "surprise"),
        ({"folds": 1}, "folds"), ({"folds": 1001}, "folds"),
    ):  # fmt: skip
        check_problem(service.ask("POST", "/v1/jobs", json=body), 422, field)


def test_a_job_sent_again_with_its_key_is_the_same_job(service: Service) -> None:
    headers = {"Idempotency-Key": "nightly"}
    requests = [("POST", "/v1/jobs", {"json": {"arch": "h100"}, "headers": headers})] * 4
    answers = service.ask_all(requests)
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    check_problem(service.ask("POST", "/v1/jobs", json={"arch": "h200"}, headers=headers), 422, "Idempotency-Key")
    with service.parts.catalogue.read() as connection:
        assert len(service.ask("GET", "/v1/jobs").json()["jobs"]) == 1
        assert jobs.get(connection, answers[0].json()["id"]) is not None


# --- models


def test_the_shipped_model_can_be_compared(service: Service) -> None:
    body = {"arch": "h200", "new": "shipped", "shapes": [SHAPE]}
    answer = service.ask("POST", "/v1/compare", json=body).json()
    assert answer["new_model_id"] == answer["old_model_id"] == Selector("h200", home=service.home).model_id
    assert "shipped" in check_problem(service.ask("POST", "/v1/compare", json={**body, "arch": ARCH}), 404)["detail"]


def test_models_are_listed_compared_promoted_and_rolled_back(service: Service) -> None:
    one = synthetic.publish_synthetic(service.home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=0)
    selector = service.parts.selectors.by_arch[ARCH]
    selector.reload()
    other = synthetic.publish_synthetic(service.home / "elsewhere", shapes=synthetic.SHAPES[4:9], arch=ARCH, seed=1)
    store_model(service.parts.catalogue, other, service.home, "a" * 32)
    listed = service.ask("GET", f"/v1/models?arch={ARCH}").json()
    assert listed["current"] == one.model_id
    assert {m["digest"]: m["current"] for m in listed["models"]} == {one.digest: True, other.digest: False}

    diff = service.ask("GET", f"/v1/models/{other.digest}/diff").json()
    assert (diff["old_model_id"], diff["new_model_id"]) == (one.model_id, other.model_id)
    assert diff["changed_shapes"] == len(diff["changes"]) > 0
    new = Selector(ARCH, home=service.home / "elsewhere")
    for change in diff["changes"]:
        shape = spec.Shape(**change["shape"])
        assert change["old"] == selector.select(shape).config.to_dict() != change["new"]
        assert change["new"] == new.select(shape).config.to_dict()
    shape = diff["changes"][0]["shape"]
    body = {"arch": ARCH, "old": "current", "new": other.digest, "shapes": [{**shape, "count": 3}, SHAPE]}
    compared = service.ask("POST", "/v1/compare", json=body).json()
    assert (compared["shapes"], compared["launches"]) == (2, 4)
    assert compared["changes"][0]["new"] == diff["changes"][0]["new"]
    check_problem(service.ask("POST", "/v1/compare", json={**body, "arch": "h200"}), 422, "new")
    check_problem(service.ask("POST", "/v1/compare", json={**body, "new": "0" * 64}), 404)

    artifact = service.ask("GET", f"/v1/models/{other.digest}/artifact")
    assert json.loads(zipfile.ZipFile(io.BytesIO(artifact.content)).read("manifest.json"))["digest"] == other.digest
    for path in (f"/v1/models/{other.digest}/artifact", f"/v1/models/{other.digest}"):
        same = service.ask("GET", path, headers={"If-None-Match": f'"{other.digest}"'})
        assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", f'"{other.digest}"')

    promoted = service.ask("POST", f"/v1/models/{other.digest}/promote")
    assert promoted.json()["model_id"] == promoted.headers[MODEL_HEADER] == other.model_id
    current = service.ask("GET", f"/v1/models/current/artifact?arch={ARCH}")
    assert (current.headers["ETag"], current.content) == (f'"{other.digest}"', artifact.content)
    back = service.ask("POST", f"/v1/models/rollback?arch={ARCH}").json()
    assert back["model_id"] == one.model_id
    assert registry.history(OP, ARCH, service.home) == [one.digest]
    events = service.ask("GET", f"/v1/models?arch={ARCH}").json()["events"]
    assert [(event["action"], event["model_id"]) for event in events] == [
        ("rollback", one.model_id),
        ("promote", other.model_id),
    ]
    check_problem(service.ask("POST", "/v1/models/rollback?arch=h200"), 409)
    check_problem(service.ask("POST", f"/v1/models/{'0' * 64}/promote"), 404)


def test_a_damaged_version_is_refused_and_the_model_in_force_stays(service: Service) -> None:
    one = synthetic.publish_synthetic(service.home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=0)
    two = synthetic.publish_synthetic(service.home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=1)
    registry.rollback(OP, ARCH, service.home)
    manifest = service.home / "models" / OP / ARCH / "versions" / two.digest / "manifest.json"
    manifest.write_text(manifest.read_text().replace(ARCH, "h200"))
    problem = check_problem(service.ask("POST", f"/v1/models/{two.digest}/promote"), 422)
    assert str(service.home) not in problem["detail"]
    assert registry.history(OP, ARCH, service.home)[0] == one.digest


# --- access


@pytest.fixture
def closed(tmp_path: Path) -> Any:
    made = Service(tmp_path / "closed", needed=True, rate_limit=0)
    yield made
    made.close()


def test_each_scope_may_do_its_own_and_no_more(closed: Service) -> None:
    tokens = {scope: add_token(closed.parts.catalogue, scope, scope) for scope in SCOPES}
    asked = [
        ("read", "POST", "/v1/select", {"json": SHAPE}),
        ("read", "GET", "/v1/jobs", {}),
        ("read", "GET", "/metrics", {}),
        ("upload", "POST", "/v1/profiles", {"content": json_lines(ROWS[:2])}),
        ("upload", "POST", "/v1/shapes", {"json": {"shapes": [SHAPE]}}),
        ("admin", "POST", "/v1/jobs", {"json": {}}),
        ("admin", "POST", "/v1/models/rollback", {}),
        ("admin", "DELETE", f"/v1/profiles/{'0' * 64}", {}),
    ]
    for needed, method, url, request in asked:
        refused = closed.ask(method, url, **request)
        check_problem(refused, 401)
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        for wrong in ("Bearer", "Bearer ", "Bearer tw_wrong", f"Basic {tokens['admin']}", tokens["admin"]):
            check_problem(closed.ask(method, url, **request, headers={"Authorization": wrong}), 401)
        for scope, token in tokens.items():
            response = closed.ask(method, url, **request, headers={"Authorization": f"Bearer {token}"})
            allowed = SCOPES.index(scope) >= SCOPES.index(needed)
            assert (response.status_code not in (401, 403)) == allowed, (scope, method, url, response.text)
    for url in ("/healthz", "/readyz"):
        assert closed.ask("GET", url).status_code == 200
    by = closed.ask("GET", "/v1/jobs", headers={"Authorization": f"Bearer {tokens['read']}"}).json()["jobs"][0][
        "created_by"
    ]
    assert by == "admin"


def test_every_route_has_a_scope(closed: Service) -> None:
    described = closed.app.openapi()["paths"]
    found = {
        (method.upper(), path): scope_needed(method.upper(), path) for path, of in described.items() for method in of
    }
    assert {key for key, scope in found.items() if scope is None} == {("GET", "/healthz"), ("GET", "/readyz")}
    for method, path in found:
        concrete = path.replace("{digest}", "0" * 64).replace("{job_id}", "0" * 32)
        if found[method, path]:
            check_problem(closed.ask(method, concrete), 401)


def test_a_revoked_token_is_refused_at_the_next_look(closed: Service) -> None:
    token = {"Authorization": f"Bearer {add_token(closed.parts.catalogue, 'ci', 'read')}"}
    assert closed.ask("GET", "/v1/jobs", headers=token).status_code == 200
    revoke_token(closed.parts.catalogue, "ci")
    closed.parts.watcher.look()
    check_problem(closed.ask("GET", "/v1/jobs", headers=token), 401)


def test_a_catalogue_that_is_slow_to_give_the_tokens_keeps_nobody_else_waiting(
    closed: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def slow() -> Any:
        reads.append(time.sleep(0.2))
        raise CatalogueError("it does not answer")

    monkeypatch.setattr(closed.parts.catalogue, "read", slow)
    answers = []

    async def run() -> None:
        transport = httpx.ASGITransport(app=closed.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://tilewise") as client:

            async def ask(url: str) -> None:
                answers.append((url, (await client.get(url)).status_code))

            await asyncio.gather(*map(ask, ("/v1/jobs", "/v1/jobs", "/v1/jobs", "/healthz")))

    asyncio.run(run())
    assert answers == [("/healthz", 200)] + 3 * [("/v1/jobs", 503)]
    assert len(reads) == 1, "they wait for the same reading"


def test_pages_of_other_hosts_are_kept_out(tmp_path: Path) -> None:
    service = Service(tmp_path / "home", hosts=frozenset({"localhost", "127.0.0.1", "::1"}))
    for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "[::1]"):
        assert service.ask("GET", "/healthz", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.evil"):
        check_problem(service.ask("GET", "/healthz", headers={"Host": host}), 403)
    here = {"Host": "localhost:8000"}
    assert service.ask("GET", "/healthz", headers={**here, "Origin": "http://localhost:8000"}).status_code == 200
    for origin in ("http://evil.example", "null", "http://localhost:9000"):
        check_problem(service.ask("POST", "/v1/profiles", content=b"x", headers={**here, "Origin": origin}), 403)
    service.close()


def test_a_client_that_asks_too_fast_is_told_when_to_come_again(tmp_path: Path) -> None:
    service = Service(tmp_path / "home", rate_limit=5.0)
    answers = service.ask_all([("GET", "/v1/jobs", {})] * 12)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 5 <= len(refused) <= 7
    check_problem(refused[0], 429)
    assert int(refused[0].headers["Retry-After"]) >= 1
    time.sleep(0.5)
    assert service.ask("GET", "/v1/jobs").status_code == 200
    service.close()


@pytest.mark.parametrize("url", ["/v1/select", "/v1/rank"])
def test_a_body_of_which_nothing_comes_is_a_408_and_one_that_comes_too_large_at_once_a_413(
    url: str, tmp_path: Path
) -> None:
    service = Service(tmp_path, body_timeout_s=0.05)

    async def late() -> Any:
        await asyncio.sleep(0.5)
        yield b"{}"

    async def large() -> Any:
        yield b" " * (MAX_BODY_BYTES + 1)

    for body, status in ((late, 408), (large, 413)):
        response = service.ask("POST", url, content=body(), headers=JSON)
        check_problem(response, status)
        assert response.headers["Connection"] == "close"
        assert response.headers[MODEL_HEADER]


# --- a catalogue that is away


AWAY = {"database_url": "postgresql://nobody@127.0.0.1:1/none"}


@pytest.mark.parametrize("why", ["away", "damaged", "damaged while it runs"])
def test_selections_go_on_without_a_catalogue_and_the_rest_is_a_503(why: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:2], arch=ARCH)
    service = Service(home, **(AWAY if why == "away" else {}))
    if why == "damaged while it runs":
        assert service.ask("GET", "/readyz").json()["catalogue"] == ""
        service.parts.catalogue.engine().dispose()  # the next connection reads the file, not what this one remembers
    if why != "away":
        (home / "catalogue.db").write_text("junk" * 1000)
        tidy(service.settings)  # as a service that starts: no more than a warning
    assert service.ask("POST", "/v1/select", json=SHAPE).json()["model_id"]
    assert "does not answer" in service.ask("GET", "/readyz").json()["catalogue"]
    assert "tilewise_catalogue_up 0.0" in service.ask("GET", "/metrics").text
    for method, url, request in (
        ("GET", "/v1/jobs", {}), ("POST", "/v1/jobs", {"json": {}}), ("GET", "/v1/profiles", {}),
        ("GET", "/v1/models", {}),
        ("POST", "/v1/profiles", {"content": json_lines(ROWS)}), ("POST", "/v1/shapes", {"json": {"shapes": [SHAPE]}}),
    ):  # fmt: skip
        response = service.ask(method, url, **request)
        check_problem(response, 503)
        assert response.headers["Retry-After"]
    service.parts.watcher.look()
    service.close()


# --- figures and settings


def test_metrics_count_requests_fallbacks_rows_and_jobs(service: Service) -> None:
    service.ask_all([("POST", "/v1/select", {"json": SHAPE})] * 3)
    service.ask("POST", "/v1/select", json={})
    service.ask("GET", "/nowhere/at/all")
    service.ask("POST", "/v1/profiles", content=json_lines([*ROWS, {"a": 1}]), headers=BYTES)
    service.ask("POST", "/v1/jobs", json={})
    service.parts.watcher.look()
    text = service.ask("GET", "/metrics").text
    for line in (
        'tilewise_requests_total{method="POST",route="/v1/select",status="200"} 3.0',
        'tilewise_requests_total{method="POST",route="/v1/select",status="422"} 1.0',
        'tilewise_requests_total{method="GET",route="none",status="404"} 1.0',
        'tilewise_request_seconds_count{route="/v1/select"} 4.0',
        f'tilewise_profile_rows_total{{outcome="accepted"}} {len(ROWS)}.0',
        'tilewise_profile_rows_total{outcome="rejected"} 1.0',
        'tilewise_jobs{state="queued"} 1.0',
        'tilewise_model{arch="h100",model_id="none"} 1.0',
        "tilewise_catalogue_up 1.0",
    ):
        assert line in text, text
    assert 'tilewise_fallbacks_total{arch="h100"' in text


@pytest.mark.parametrize("name", ["what?", "a?mode=memory", "50%25", "100%", "a#b", "a b", "file:x", "ü&=;@"])
def test_the_catalogue_is_in_the_home_whatever_the_home_is_called(name: str, tmp_path: Path) -> None:
    service = Service(tmp_path / name)
    service.ask("POST", "/v1/jobs", json={})
    assert service.ask("GET", "/readyz").json()["catalogue"] == ""
    assert (tmp_path / name / "catalogue.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    service.close()


def test_settings_are_read_from_the_environment_and_each_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "service.md").read_text()
    for name, default, meaning in settings_table():
        assert f"| `{name}` | {default} | {meaning} |" in page
        assert name.startswith("TILEWISE_")
    settings = Settings.from_env(
        {"TILEWISE_RATE_LIMIT": "12.5", "TILEWISE_MAX_UPLOADS": " 3 ", "TILEWISE_JOB_NICE": ""}
    )
    assert (settings.rate_limit, settings.max_uploads, settings.job_nice) == (12.5, 3, 19)
    for name, value in (
        ("MAX_UPLOADS", "0"), ("MAX_UPLOADS", "many"), ("MAX_UPLOADS", "1.5"), ("RATE_LIMIT", "nan"),
        ("RATE_LIMIT", "inf"), ("AUTH", "maybe"), ("LOG_FORMAT", "xml"), ("JOB_NICE", "20"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=f"TILEWISE_{name} must be"):
            Settings.from_env({f"TILEWISE_{name}": value})


def test_a_question_asked_before_is_answered_from_memory_until_another_model_answers(service: Service) -> None:
    synthetic.publish_synthetic(service.home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=0)
    service.parts.watcher.look()
    first = service.ask("POST", "/v1/select", json=SHAPE)
    second = service.ask("POST", "/v1/select", json=SHAPE)
    assert (second.content, dict(second.headers)) == (first.content, dict(first.headers))
    other = synthetic.publish_synthetic(service.home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=1)
    service.parts.watcher.look()
    third = service.ask("POST", "/v1/select", json=SHAPE)
    assert third.json()["model_id"] == third.headers[MODEL_HEADER] == other.model_id != first.json()["model_id"]
    registry.rollback(OP, ARCH, service.home)
    service.parts.watcher.look()
    assert service.ask("POST", "/v1/select", json=SHAPE).content == first.content
    # What is refused is refused every time, and memory knows nothing of a body under another media type.
    for _ in range(2):
        check_problem(service.ask("POST", "/v1/select", json={**SHAPE, "heads": 33}), 422, "heads")
        text = {"content": json.dumps(SHAPE), "headers": {"Content-Type": "text/plain"}}
        check_problem(service.ask("POST", "/v1/select", **text), 415)
    assert 'route="/v1/select",status="200"} 4.0' in service.ask("GET", "/metrics").text


def test_other_tuners_files_are_taken_with_what_they_lack(service: Service) -> None:
    from tilewise.data import exchange

    t4 = json.dumps(exchange.t4_document(ROWS)).encode()
    answer = service.ask("POST", "/v1/profiles", content=t4, headers=BYTES).json()
    assert (answer["accepted"], answer["rejected"]) == (len(ROWS), 0)
    out = io.StringIO()
    import csv

    table = exchange.aiter_rows(ROWS)
    writer = csv.DictWriter(out, exchange.AITER_COLUMNS)
    writer.writeheader()
    writer.writerows(table)
    tuned = out.getvalue().encode()
    answer = service.ask("POST", "/v1/profiles?default=arch=h100&default=driver=some", content=tuned, headers=BYTES)
    assert answer.json()["accepted"] == len(table) > 0, answer.text
    loaded = load_profile(OP, ARCH, home=service.home)
    assert len(loaded) == len(ROWS) + len(table)
    assert "some" in loaded.columns["driver"].tolist()
    for bad in ("arch", "nothing=1", "heads=x"):
        response = service.ask("POST", f"/v1/profiles?default={bad}", content=tuned, headers=BYTES)
        check_problem(response, 422, "default")


@pytest.mark.parametrize(
    ("pick", "passed", "says"),
    [
        ({"of_current_us": 10.0, "predicted_us": 9.0}, True, "3 of 4 requests get another config"),
        ({"of_current_us": 10.0, "predicted_us": 10.1}, True, "3 of 4"),
        ({"of_current_us": 10.0, "predicted_us": 12.0}, False, "take 1.1935 of the time"),
        ({"of_current_us": None, "predicted_us": 12.0}, True, "3 of 4"),
        ({"of_current_us": 10.0, "predicted_us": 9.0, "error": "why"}, False, "failed on 1 shapes: why"),
    ],
)
def test_a_candidate_that_loses_on_live_requests_is_held_back(pick: dict[str, Any], passed: bool, says: str) -> None:
    from tilewise.service.policy import judge_shadow

    same = {"config": "a", "of_current_us": 1.0, "predicted_us": 1.0}
    picks = [
        {"requests": 3, "current": {"config": "a"}, "candidate": {"config": "b", **pick}},
        {"requests": 1, "current": {"config": "a"}, "candidate": same},
    ]
    verdict = judge_shadow(picks, noise_margin=0.02)
    assert (verdict.passed, says in verdict.reason) == (passed, True), verdict
