"""Selectors that follow a service, against real services, and against servers that lie."""

from __future__ import annotations

import http.server
import io
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("sqlalchemy")
pytest.importorskip("sklearn")

import synthetic
from forked import held_by_another_thread, status_of_child
from service_process import serving

from tilewise.dispatch.artifact import NAMES, pack, unpack
from tilewise.dispatch.follow import Follower, FollowError, follow_home
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidBundleError
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models import registry
from tilewise.models.bundle import Bundle

ARCH = "h100"  # nothing is shipped for it
SHAPE = synthetic.SHAPES[0]
WAIT_S = 20.0


def until(done: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two bundles, by digest."""
    found = {}
    for seed in (0, 1):
        home = tmp_path_factory.mktemp("bundle")
        bundle = synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=seed)
        found[bundle.digest] = registry.current(synthetic.OP, ARCH, home)
    assert len(found) == 2
    return found


class Answers(http.server.ThreadingHTTPServer):
    """A service that gives one artifact, or whatever `answer` says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answer: tuple[int, dict[str, str], bytes] = (404, {}, b"")
        self.asked: list[Any] = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Answers)
        self.server.asked.append(self.headers)
        status, headers, body = self.server.answer
        if status == 200 and headers.get("ETag", "none") in (self.headers.get("If-None-Match") or ""):
            status, body = 304, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Answers]:
    server = Answers()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def follower_of(selector: Selector) -> Follower:
    assert selector.follower is not None
    return selector.follower


def artifact(folder: Path) -> tuple[int, dict[str, str], bytes]:
    return 200, {"ETag": f'"{Bundle.load(folder).digest}"'}, pack(folder)


def test_an_artifact_is_the_same_bytes_each_time_and_unpacks_to_the_bundle(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    for digest, folder in bundles.items():
        assert pack(folder) == pack(folder)
        target = tmp_path / digest
        target.mkdir()
        unpack(io.BytesIO(pack(folder)), target)
        assert Bundle.load(target).digest == digest


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return out.getvalue()


WHOLE = dict.fromkeys(NAMES, b"x" * 100)
LAST = NAMES[-1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 no zip",
        zipped({}),
        zipped({name: data for name, data in WHOLE.items() if name != LAST}),
        zipped({**WHOLE, "extra": b""}),
        zipped({**{name: data for name, data in WHOLE.items() if name != LAST}, "../escaped": b""}),
        zipped({**{name: data for name, data in WHOLE.items() if name != LAST}, "/tmp/escaped": b""}),
        zipped(WHOLE, zipfile.ZIP_DEFLATED),
        zipped(WHOLE)[:-200],
        zipped(WHOLE).replace(b"xxxx", b"yyyy", 1),
    ],
)
def test_what_is_no_artifact_is_refused_and_writes_nothing_elsewhere(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidBundleError):
        unpack(io.BytesIO(data), tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_follower_takes_each_model_up_and_asks_for_no_model_twice(
    service: Answers, bundles: dict[str, Path], tmp_path: Path
) -> None:
    (first, one), (second, other) = bundles.items()
    service.answer = artifact(one)
    selector = Selector.from_url(service.url, ARCH, token="tw_secret", interval_s=0.05, cache=tmp_path)
    until(lambda: selector.bundle is not None, "the first model did not come")
    assert selector.bundle is not None
    assert selector.bundle.digest == first
    asked = len(service.asked)
    until(lambda: len(service.asked) > asked + 2, "it does not ask")
    assert f'"{first}"' in service.asked[-1]["If-None-Match"]
    assert service.asked[-1]["Authorization"] == "Bearer tw_secret"
    before = selector.select(SHAPE)
    service.answer = artifact(other)
    until(lambda: selector.model_id != before.model_id, "the second model did not come")
    assert selector.bundle.digest == second
    service.answer = artifact(one)  # the service rolled back
    until(lambda: selector.model_id == before.model_id, "the first model did not come back")
    assert selector.select(SHAPE) == before
    follower_of(selector).stop()


@pytest.mark.parametrize(
    "kind", ["error", "no etag", "wrong digest", "torn", "altered", "another gpu", "redirect", "nothing", "away"]
)
def test_whatever_the_service_says_the_last_good_model_goes_on(
    kind: str, service: Answers, bundles: dict[str, Path], tmp_path: Path
) -> None:
    (_, one), (second, other) = bundles.items()
    service.answer = artifact(one)
    selector = Selector.from_url(service.url, ARCH, interval_s=0.02, cache=tmp_path)
    until(lambda: selector.bundle is not None, "the first model did not come")
    before = selector.select(SHAPE)
    good = pack(other)
    if kind == "another gpu":
        foreign = synthetic.publish_synthetic(tmp_path / "foreign", shapes=synthetic.SHAPES[:2], arch="mi355x")
        folder = registry.current(synthetic.OP, "mi355x", tmp_path / "foreign")
        answers = (200, {"ETag": f'"{foreign.digest}"'}, pack(folder))
    else:
        altered = bytearray(good)
        altered[len(good) // 2] ^= 1
        answers = {
            "error": (500, {}, b"no"),
            "no etag": (200, {}, good),
            "wrong digest": (200, {"ETag": f'"{"0" * 64}"'}, good),
            "torn": (200, {"ETag": f'"{second}"'}, good[: len(good) // 2]),
            "altered": (200, {"ETag": f'"{second}"'}, bytes(altered)),
            "redirect": (302, {"Location": service.url}, b""),
            "nothing": (200, {"ETag": f'"{second}"'}, b""),
            "away": (404, {}, b""),
        }[kind]
    service.answer = answers
    asked = len(service.asked)
    until(lambda: len(service.asked) > asked + 1, "it does not ask")
    until(lambda: follower_of(selector).problem, "nothing is wrong")
    assert selector.select(SHAPE) == before
    follower_of(selector)._failures = 0  # as after a while
    service.answer = artifact(other)
    until(
        lambda: follower_of(selector).refresh() or selector.model_id != before.model_id, "the good model did not come"
    )
    assert selector.bundle is not None
    assert selector.bundle.digest == second
    follower_of(selector).stop()
    until(lambda: not list(tmp_path.glob("*/.fetched-*")), "what was fetched lies about")


def test_a_model_that_came_is_there_after_a_restart_without_the_service(
    service: Answers, bundles: dict[str, Path], tmp_path: Path
) -> None:
    (first, one), _ = bundles.items()
    service.answer = artifact(one)
    selector = Selector.from_url(service.url, ARCH, interval_s=0.05, cache=tmp_path)
    until(lambda: selector.bundle is not None, "the model did not come")
    follower_of(selector).stop()
    service.answer = (503, {}, b"")
    again = Selector.from_url(service.url, ARCH, interval_s=0.05, cache=tmp_path)
    assert again.bundle is not None  # at once
    assert again.bundle.digest == first
    assert again.select(SHAPE) == selector.select(SHAPE)
    follower_of(selector).stop()


def test_a_child_that_was_forked_while_a_model_was_asked_for_follows_on(
    service: Answers, bundles: dict[str, Path], tmp_path: Path
) -> None:
    (first, one), (second, other) = bundles.items()
    service.answer = artifact(one)
    selector = Selector.from_url(service.url, ARCH, interval_s=60.0, cache=tmp_path)
    until(lambda: selector.bundle is not None, "the model did not come")
    service.answer = artifact(other)

    def follow() -> None:
        assert follower_of(selector).tried.wait(WAIT_S)
        assert follower_of(selector).problem == ""
        assert selector.bundle is not None
        assert selector.bundle.digest == second
        assert not follower_of(selector).refresh()  # it was the thread

    follower = follower_of(selector)
    with held_by_another_thread(follower._one_at_a_time, follower._stopping._cond, follower.tried._cond):
        assert status_of_child(follow) == 0
    assert selector.bundle is not None
    assert selector.bundle.digest == first
    follower.stop()


def test_a_service_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.perf_counter()
        selector = Selector.from_url(url, ARCH, cache=tmp_path)
        decision = selector.select(SHAPE)
        assert time.perf_counter() - began < 2.0
        assert decision.model_id is None
        assert follower_of(selector).problem
        follower_of(selector).stop()


@pytest.mark.parametrize("url", ["", "host:8000", "file:///etc/passwd", "ftp://host", "http://", "http://host/?a=b"])
def test_a_url_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(FollowError, match="url must be such as"):
        follow_home(url, tmp_path)
    with pytest.raises(FollowError):
        Selector.from_url(url, ARCH, cache=tmp_path)


def test_a_real_service_is_followed_through_promotion_and_rollback(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=0)
    with serving(home, "--arch", ARCH) as running:
        selector = Selector.from_url(running.url, ARCH, interval_s=0.1, cache=tmp_path / "cache")
        until(lambda: selector.model_id == first.model_id, "the model did not come")
        second = synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=1)
        until(lambda: selector.model_id == second.model_id, "the second model did not come")
        registry.rollback(synthetic.OP, ARCH, home)
        until(lambda: selector.model_id == first.model_id, "the first model did not come back")
        question = {"arch": ARCH, **SHAPE.to_dict()}
        answer = running.get("/v1/select", question)
        assert {name: answer[name] for name in selector.select(Shape(**SHAPE.to_dict())).to_dict()} == selector.select(
            SHAPE
        ).to_dict()
        follower_of(selector).stop()
