"""The service as it runs: real processes, jobs that are killed, clients that send half a request, the whole story."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")
pytest.importorskip("httpx")

import httpx
import postgres_server
import synthetic
from service_process import TILEWISE, ServiceProcess, serving, tilewise

from tilewise.data.store import load_profile
from tilewise.dispatch.selector import Selector
from tilewise.kernels.arch import get_arch
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates
from tilewise.models import registry

OP, ARCH = synthetic.OP, "h100"  # nothing is shipped for it
NEW = Shape(4, 2, 32, 128, 64, 8192)
QUESTION = {"arch": ARCH, **NEW.to_dict()}
SWITCH_S = 1.0
ENDED = ("promoted", "stopped", "failed", "cancelled")
QUICK = {"TILEWISE_JOB_NICE": "0", "TILEWISE_JOB_LEASE_S": "2", "TILEWISE_HEADER_TIMEOUT_S": "1"}

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)


def until(done: Callable[[], Any], what: str, wait_s: float = 60) -> Any:
    deadline = time.monotonic() + wait_s
    while not (found := done()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def upload(service: ServiceProcess, rows: list[dict[str, Any]], **headers: str) -> dict[str, Any]:
    response = httpx.post(f"{service.url}/v1/profiles", content=json_lines(rows), headers=headers, timeout=60)
    assert response.status_code in (200, 201), response.text
    answer: dict[str, Any] = response.json()
    return answer


def post(service: ServiceProcess, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    response = httpx.post(f"{service.url}{path}", json=body, timeout=60)
    assert response.status_code < 300, response.text
    answer: dict[str, Any] = response.json()
    return answer


def job_at(service: ServiceProcess, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = service.get(f"/v1/jobs/{job_id}")
    return job


def ended(service: ServiceProcess, job_id: str) -> dict[str, Any]:
    return until(lambda: (job := job_at(service, job_id))["state"] in ENDED and job, f"job {job_id} did not end")  # type: ignore[no-any-return]


def starts(service: ServiceProcess, job_id: str) -> int:
    """How often a job was started, also by those that handed it back."""
    return sum(line["text"].startswith("start ") for line in service.get(f"/v1/jobs/{job_id}/log")["lines"])


def processes(*words: str) -> list[int]:
    """Ids of living processes whose command line has all of these words."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if int(folder.name) != os.getpid() and all(word in command for word in words):
                found.append(int(folder.name))
    return found


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def database(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if kind == "postgresql":
        monkeypatch.setenv("TILEWISE_DATABASE_URL", postgres_server.fresh_database())
    yield


# --- the story


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_shapes_come_in_and_a_better_choice_goes_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's shapes arrive, a profile for them is uploaded, a retraining runs, the pick for one shape changes,
    compare shows it, it is promoted, the follower has the new pick, and after a rollback the old one."""
    home = tmp_path / "home"
    first = synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[::5], arch=ARCH)
    with database(kind, monkeypatch), serving(home, "--arch", ARCH, "--workers", "2") as service:
        upload(service, synthetic.synthetic_rows(synthetic.SHAPES[::5], arch=ARCH))
        before = service.get("/v1/select", QUESTION)
        assert before["model_id"] == first.model_id
        assert before["source"] != "exact"
        selector = Selector.from_url(service.url, ARCH, interval_s=0.1, cache=tmp_path / "cache")
        until(lambda: selector.model_id == first.model_id, "the follower has no model")
        assert selector.select(NEW).config == Config.from_dict(before["config"])

        # The engine says what it launches.
        post(service, "/v1/shapes", {"arch": ARCH, "shapes": [{**NEW.to_dict(), "count": 900}]})
        (seen,) = service.get(f"/v1/shapes?arch={ARCH}")["shapes"]
        assert (Shape(**seen["shape"]), seen["count"]) == (NEW, 900)

        # Somebody measures that shape: a config that was not picked is by far the fastest. One row is bad.
        fastest = next(c for c in candidates(NEW, get_arch(ARCH)) if c != Config.from_dict(before["config"]))
        rows = [
            synthetic.synthetic_row(NEW, config, arch=ARCH, pass_index=index, run_id="second", latency_us=us)
            | {"latency_p20_us": us, "latency_p80_us": us}
            for config in candidates(NEW, get_arch(ARCH))
            for index in (0, 1)
            for us in [5.0 if config == fastest else 50.0]
        ]
        report = upload(service, [*rows, {**rows[0], "latency_us": -1.0}])
        assert (report["accepted"], report["rejected"]) == (len(rows), 1)

        # A retraining that stops short of the promotion, so that somebody can look.
        wanted = {"arch": ARCH, "folds": 0, "shadow_requests": 20, "promote": False}
        job_id = post(service, "/v1/jobs", wanted)["id"]
        until(lambda: job_at(service, job_id)["stage"] == "shadow", "the candidate was not put in the shadow")
        until(
            lambda: service.get("/v1/select", QUESTION) and job_at(service, job_id)["state"] != "running",
            "the candidate saw too few requests",
        )
        job = job_at(service, job_id)
        assert job["state"] == "stopped", job
        assert job["result"]["shadow"]["passed"], job
        assert job["result"]["shadow"]["figures"]["changed_requests"] >= 20
        digest = job["result"]["digest"]
        assert service.get("/v1/select", QUESTION) == before

        diff = service.get(f"/v1/models/{digest}/diff")
        shown = diff["changes"][0]
        assert (Shape(**shown["shape"]), shown["count"]) == (NEW, 900)
        assert Config.from_dict(shown["new"]) == fastest
        assert shown["measured_ratio"] == pytest.approx(0.1)

        post(service, f"/v1/models/{digest}/promote")
        time.sleep(SWITCH_S)
        answers = [service.get("/v1/select", QUESTION) for _ in range(50)]
        assert {answer["model_id"] for answer in answers} == {job["result"]["model_id"]}
        assert Config.from_dict(answers[0]["config"]) == fastest
        until(lambda: selector.model_id == job["result"]["model_id"], "the follower did not follow")
        assert selector.select(NEW).config == fastest

        post(service, f"/v1/models/rollback?arch={ARCH}")
        time.sleep(SWITCH_S)
        assert [service.get("/v1/select", QUESTION) for _ in range(20)] == [before] * 20
        until(lambda: selector.model_id == first.model_id, "the follower did not go back")
        assert selector.select(NEW).config == Config.from_dict(before["config"])
        assert selector.follower is not None
        selector.follower.stop()


def test_a_candidate_is_held_against_the_model_that_is_in_force_by_then(tmp_path: Path) -> None:
    """Somebody puts another model in force while the candidate is watched: the gate is asked again."""
    with serving(tmp_path, "--arch", ARCH) as service:
        upload(service, synthetic.synthetic_rows(synthetic.SHAPES[::3], arch=ARCH))
        job_id = post(service, "/v1/jobs", {"folds": 0, "shadow_requests": 5})["id"]
        until(lambda: job_at(service, job_id)["stage"] == "shadow", "it did not come to the shadow")
        digest = job_at(service, job_id)["result"]["digest"]
        post(service, f"/v1/models/{digest}/promote")
        until(
            lambda: service.get("/v1/select", QUESTION) and job_at(service, job_id)["state"] in ENDED, "it did not end"
        )
        job = job_at(service, job_id)
        assert (job["state"], job["stage"]) == ("stopped", "promote")
        assert "is the model in force" in job["reason"]
        assert registry.history(OP, ARCH, tmp_path) == [digest]


def test_a_retraining_that_passes_is_promoted_by_itself_and_one_without_news_stops(tmp_path: Path) -> None:
    with serving(tmp_path, "--arch", ARCH) as service:
        stopped = ended(service, post(service, "/v1/jobs", {"folds": 0, "shadow_requests": 0})["id"])
        assert (stopped["state"], stopped["stage"]) == ("stopped", "import")
        assert "no timings" in stopped["reason"]
        upload(service, synthetic.synthetic_rows(synthetic.SHAPES[::5], arch=ARCH))
        job = ended(service, post(service, "/v1/jobs", {"folds": 2, "shadow_requests": 0})["id"])
        assert job["state"] == "promoted", job
        assert job["result"]["metrics"]["judged_shapes"] > 0
        time.sleep(SWITCH_S)
        assert service.get("/v1/select", QUESTION)["model_id"] == job["result"]["model_id"]
        again = ended(service, post(service, "/v1/jobs", {"folds": 2, "shadow_requests": 0})["id"])
        assert (again["state"], again["stage"]) == ("stopped", "gate")
        assert "is the model in force" in again["reason"]
        late = ended(
            service, post(service, "/v1/jobs", {"folds": 0, "shadow_requests": 5, "shadow_timeout_s": 0.0})["id"]
        )
        assert late["state"] == "stopped"
        assert "0 of 5 requests" in late["reason"]
        until(lambda: not list((tmp_path / "jobs").iterdir()), "jobs that ended left their parts")


def test_no_worker_of_four_answers_from_the_old_model_a_second_after_a_promotion(tmp_path: Path) -> None:
    """F5, through the API, which only one of them hears."""
    old = synthetic.publish_synthetic(tmp_path, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=0)
    new = synthetic.publish_synthetic(tmp_path, shapes=synthetic.SHAPES[:4], arch=ARCH, seed=1)
    registry.rollback(OP, ARCH, tmp_path)
    with serving(tmp_path, "--arch", ARCH, "--workers", "4") as service:
        assert {service.get("/v1/select", QUESTION)["model_id"] for _ in range(50)} == {old.model_id}
        post(service, f"/v1/models/{new.digest}/promote")
        time.sleep(SWITCH_S)
        assert {service.get("/v1/select", QUESTION)["model_id"] for _ in range(1000)} == {new.model_id}


# --- kills


@linux
@pytest.mark.parametrize("stage", ["train", "shadow"])
def test_a_job_whose_process_is_killed_goes_on_where_it_was(stage: str, tmp_path: Path) -> None:
    with serving(tmp_path, "--arch", ARCH) as service:
        upload(service, synthetic.synthetic_rows(synthetic.SHAPES[::3], arch=ARCH))
        job_id = post(service, "/v1/jobs", {"folds": 0, "shadow_requests": 5})["id"]
        until(lambda: job_at(service, job_id)["stage"] == stage, f"it did not come to the stage {stage}")
        (worker,) = until(lambda: processes("tilewise.service.work", job_id), "the job has no process")
        os.kill(worker, signal.SIGKILL)
        until(lambda: job_at(service, job_id)["attempt"] == 2, "it was not taken up again")
        until(
            lambda: service.get("/v1/select", QUESTION) and job_at(service, job_id)["state"] in ENDED, "it did not end"
        )
        assert job_at(service, job_id)["state"] == "promoted"
        texts = [line["text"] for line in service.get(f"/v1/jobs/{job_id}/log")["lines"]]
        assert "its process ended with signal 9" in texts
        assert f"taken up again in the stage {stage}: its process was gone" in texts


@linux
def test_jobs_outlive_their_runner_and_the_service(tmp_path: Path) -> None:
    with serving(tmp_path, "--arch", ARCH) as service:
        upload(service, synthetic.synthetic_rows(synthetic.SHAPES[::3], arch=ARCH))
        job_id = post(service, "/v1/jobs", {"folds": 0, "shadow_requests": 5})["id"]
        until(lambda: job_at(service, job_id)["stage"] == "shadow", "it did not come to the shadow")
        (runner,) = processes("tilewise.service.runner", str(service.process.pid))
        children = processes("tilewise.service.work", job_id)
        os.kill(runner, signal.SIGKILL)
        until(lambda: gone(children), "the job's process outlived its runner")
        until(lambda: job_at(service, job_id)["attempt"] == 2, "another runner did not take it up")
        (runner,) = until(lambda: processes("tilewise.service.runner", str(service.process.pid)), "there is no runner")
        before = starts(service, job_id)
        left = [runner, *processes("tilewise.service.work", job_id)]
        service.process.kill()
        service.process.wait()
        until(lambda: gone(left), "processes outlived the service")
    with serving(tmp_path, "--arch", ARCH) as service:
        until(lambda: starts(service, job_id) > before, "the next service did not take it up")
        until(
            lambda: service.get("/v1/select", QUESTION) and job_at(service, job_id)["state"] in ENDED, "it did not end"
        )
        assert job_at(service, job_id)["state"] == "promoted"


@linux
def test_a_stopped_service_hands_its_job_back_and_a_running_job_can_be_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path, "--arch", ARCH) as service:
        upload(service, synthetic.synthetic_rows(synthetic.SHAPES[::3], arch=ARCH))
        job_id = post(service, "/v1/jobs", {"folds": 0, "shadow_requests": 5})["id"]
        until(lambda: job_at(service, job_id)["stage"] == "shadow", "it did not come to the shadow")
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        assert not processes("tilewise.service.work", job_id)
    with serving(tmp_path, "--arch", ARCH) as service:
        until(lambda: processes("tilewise.service.work", job_id), "it was not taken up", wait_s=20)
        assert job_at(service, job_id)["attempt"] == 1  # that start did not count
        post(service, f"/v1/jobs/{job_id}/cancel")
        job = ended(service, job_id)
        assert (job["state"], job["stage"]) == ("cancelled", "shadow")
        until(lambda: not processes("tilewise.service.work", job_id), "it goes on")
        until(lambda: not (tmp_path / "jobs" / job_id).exists(), "its folder is left")
        assert registry.history(OP, ARCH, tmp_path) == []


@linux
def test_no_worker_outlives_a_killed_supervisor_and_the_port_is_free(tmp_path: Path) -> None:
    with serving(tmp_path, "--arch", ARCH, "--workers", "2") as service:
        workers = service.workers()
        assert len(workers) == 2
        figures = Path(tempfile.gettempdir())
        assert list(figures.glob(f"tilewise-metrics-{service.process.pid}-*"))
        service.process.kill()
        service.process.wait()
        until(lambda: gone(workers), "workers outlived their supervisor", wait_s=10)
        with socket.create_server(("127.0.0.1", int(service.url.rpartition(":")[2]))):
            pass
    with serving(tmp_path, "--arch", ARCH):
        assert not list(figures.glob(f"tilewise-metrics-{service.process.pid}-*"))


@linux
def test_a_folder_of_figures_that_is_cleaned_away_costs_no_answer(tmp_path: Path) -> None:
    with serving(tmp_path, "--arch", ARCH, "--workers", "2") as service:
        for _ in range(20):
            service.get("/v1/select", QUESTION)
        (folder,) = Path(tempfile.gettempdir()).glob(f"tilewise-metrics-{service.process.pid}-*")
        shutil.rmtree(folder)
        for _ in range(10):
            response = httpx.get(f"{service.url}/metrics")
            assert response.status_code == 200, response.text
            assert "tilewise_requests_total" in response.text
        before = service.workers()
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(set(service.workers()) - {before[0]}) == 2, "the worker was not started again")
        for _ in range(30):
            assert service.get("/v1/select", QUESTION)["arch"] == ARCH
            assert httpx.get(f"{service.url}/metrics").status_code == 200


@linux
def test_an_upload_whose_worker_is_killed_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    rows = synthetic.synthetic_rows(synthetic.SHAPES, arch=ARCH)
    body = json_lines(rows)
    with serving(tmp_path, "--arch", ARCH, "--workers", "2") as service:

        def send() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{service.url}/v1/profiles", content=body, headers={"Idempotency-Key": "k"}, timeout=60)

        for wait_s in (0.02, 0.3, 0.8):
            thread = threading.Thread(target=send)
            thread.start()
            time.sleep(wait_s)
            for pid in service.workers():
                os.kill(pid, signal.SIGKILL)
            thread.join()
            assert len(load_profile(OP, ARCH, home=tmp_path)) in (0, len(rows))
            until(lambda: len(service.workers()) == 2, "the workers were not started again")
            service.wait_until_ready()
        response = httpx.post(f"{service.url}/v1/profiles", content=body, headers={"Idempotency-Key": "k"}, timeout=60)
        assert response.json()["accepted"] == len(rows)
        assert len(load_profile(OP, ARCH, home=tmp_path)) == len(rows)
        assert len(service.get("/v1/profiles")["profiles"]) == 1


def test_a_database_that_is_killed_and_comes_back_costs_no_selection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("TILEWISE_TEST_DATABASE_URL"):
        pytest.skip("kills a server of its own")
    server = postgres_server.own_server()
    monkeypatch.setenv("TILEWISE_DATABASE_URL", server.url)
    try:
        with serving(tmp_path, "--arch", ARCH) as service:
            upload(service, synthetic.synthetic_rows(synthetic.SHAPES[:2], arch=ARCH))
            post(service, "/v1/shapes", {"arch": ARCH, "shapes": [NEW.to_dict()]})
            server.kill()
            assert service.get("/v1/select", QUESTION)["arch"] == ARCH
            assert httpx.get(f"{service.url}/v1/jobs", timeout=30).status_code == 503
            assert service.get("/readyz")["catalogue"]
            server.start()
            until(lambda: not service.get("/readyz")["catalogue"], "the catalogue did not come back")
            assert len(service.get(f"/v1/shapes?arch={ARCH}")["shapes"]) == 1
            job = ended(service, post(service, "/v1/jobs", {"folds": 0, "shadow_requests": 0})["id"])
            assert job["state"] == "promoted", job
    finally:
        server.stop()


# --- clients that do not behave


def test_half_requests_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be connections, and more: others are answered, the half ones are closed, the log is calm."""
    monkeypatch.setenv("TILEWISE_MAX_CONNECTIONS", "40")
    monkeypatch.setenv("TILEWISE_BODY_TIMEOUT_S", "1")
    with serving(tmp_path, "--arch", ARCH) as service:
        port = int(service.url.rpartition(":")[2])
        half = []
        for number in range(120):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall((b"", b"POST /v1/select HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET / HTTP")[number % 3])
            half.append(one)
            if number % 20 == 0:
                assert service.get("/v1/select", QUESTION)["arch"] == ARCH
        began = time.monotonic()
        for one in half:
            one.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
            one.close()
        assert time.monotonic() - began < 8
        # A body that stops in the middle, and one byte at a time of headers.
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"POST /v1/select HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            slow.sendall(b"Content-Length: 100\r\n\r\n{")
            slow.settimeout(10)
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", port)) as drip:
            drip.settimeout(10)
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - began < 10:
                    drip.sendall(b"G")
                    time.sleep(0.1)
            assert time.monotonic() - began < 5
        assert service.get("/v1/select", QUESTION)["arch"] == ARCH


def test_an_upgrade_that_is_not_honoured_is_ignored(tmp_path: Path) -> None:
    """As clients of HTTP/2 ask for it (Java's, curl --http2), however the packets are cut; the connection goes on."""
    body = json.dumps(QUESTION).encode()
    start = b"POST /v1/select HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    sized = b"Content-Length: %d\r\n\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    whole = start + upgrade + sized + body
    cases = {
        "one packet": [whole],
        "the body in another": [start + upgrade + sized, body],
        "cut within the header": [start + upgrade[:40], upgrade[40:] + sized + body],
        "byte by byte": [whole[at : at + 1] for at in range(len(whole))],
        "chunked": [start + upgrade + chunked],
        "websocket": [whole.replace(b"h2c", b"websocket")],
        "two at once": [whole + whole],
        "asked for by none": [start + sized + body],
    }
    with serving(tmp_path, "--arch", ARCH) as service:
        wanted = service.get("/v1/select", QUESTION)
        for case, packets in cases.items():
            with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as connection:
                connection.settimeout(10)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for packet in packets:
                    connection.sendall(packet)
                    time.sleep(0.001 if len(packets) > 2 else 0.05)
                received = connection.recv(1 << 16)
                connection.sendall(start + b"Connection: close\r\n" + sized + body)  # once more
                while more := connection.recv(1 << 16):
                    received += more
            answers = [one.partition(b"\r\n\r\n") for one in received.split(b"HTTP/1.1 ")[1:]]
            assert [head.partition(b"\r\n")[0] for head, _, _ in answers] == [b"200 OK"] * len(answers), case
            assert [json.loads(content) for _, _, content in answers] == [wanted] * len(answers), case
            assert len(answers) == b"".join(packets).count(b"POST ") + 1, case
        with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as connection:
            connection.settimeout(10)
            connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 4")


def test_selections_go_on_while_a_large_file_is_uploaded(tmp_path: Path) -> None:
    """F2: the body goes to disk in a thread, its rows to a process of their own."""
    line = json_lines(synthetic.synthetic_rows(synthetic.SHAPES[:1], arch=ARCH)[:1]) + b"\n"
    total = 20_000

    def body() -> Iterator[bytes]:
        for _ in range(total // 100):
            yield line * 100

    with serving(tmp_path, "--arch", ARCH) as service:
        answer: list[Any] = []
        thread = threading.Thread(
            target=lambda: answer.append(httpx.post(f"{service.url}/v1/profiles", content=body(), timeout=90))
        )
        service.get("/v1/select", QUESTION)
        thread.start()
        times = []
        with httpx.Client(base_url=service.url) as client:
            while thread.is_alive():
                began = time.perf_counter()
                client.post("/v1/select", json=QUESTION).raise_for_status()
                times.append(time.perf_counter() - began)
                time.sleep(0.005)
        thread.join()
        assert answer[0].json()["duplicates"] == total - 1
        assert sorted(times)[len(times) // 2] < 0.1


# --- access from outside


def test_an_address_that_others_reach_wants_tokens(tmp_path: Path) -> None:
    token = tilewise("token", "add", "ci", "--scope", "admin", home=tmp_path).stdout.strip()
    with serving(tmp_path, "--arch", ARCH, "--host", "0.0.0.0") as service:
        assert httpx.post(f"{service.url}/v1/select", json=QUESTION).status_code == 401
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.post(f"{service.url}/v1/select", json=QUESTION, headers=headers).status_code == 200
        listed = json.loads(tilewise("token", "list", "--json", home=tmp_path).stdout)
        assert [(one["name"], one["scope"]) for one in listed] == [("ci", "admin")]
        assert tilewise("token", "revoke", "ci", home=tmp_path).returncode == 0
        time.sleep(SWITCH_S)
        assert httpx.post(f"{service.url}/v1/select", json=QUESTION, headers=headers).status_code == 401
    again = tilewise("token", "revoke", "ci", home=tmp_path)
    assert (again.returncode, again.stderr) == (2, "tilewise: there is no token named 'ci'\n")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_is_served_with_a_certificate(tmp_path: Path) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]  # fmt: skip
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as own:
        command = [*TILEWISE, "serve", "--fd", str(own.fileno()), "--arch", ARCH]
        command += ["--tls-certificate", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
        env = {**os.environ, "TILEWISE_HOME": str(tmp_path / "home")}
        process = subprocess.Popen(command, env=env, pass_fds=[own.fileno()], stderr=subprocess.DEVNULL)
        url = f"https://127.0.0.1:{own.getsockname()[1]}"
    try:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        assert httpx.get(f"{url}/healthz", verify=trusted, timeout=60).json() == {"status": "ok"}
    finally:
        process.terminate()
        process.wait(30)


def test_a_backup_of_a_running_service_goes_back(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:4], arch=ARCH)
    with serving(home, "--arch", ARCH) as service:
        upload(service, synthetic.synthetic_rows(synthetic.SHAPES[:2], arch=ARCH))
        before = service.get("/v1/select", QUESTION), service.get("/v1/profiles")
        done = tilewise("db", "backup", tmp_path / "backup.tar", home=home)
        assert done.returncode == 0, done.stderr
    assert tilewise("db", "restore", tmp_path / "backup.tar", home=other).returncode == 0
    assert tilewise("db", "upgrade", home=other).stdout == "the catalogue is up to date\n"
    with serving(other, "--arch", ARCH) as service:
        assert (service.get("/v1/select", QUESTION), service.get("/v1/profiles")) == before


def test_logs_are_one_object_a_line_where_that_is_asked_for(tmp_path: Path) -> None:
    env = {**os.environ, "TILEWISE_HOME": str(tmp_path), "TILEWISE_LOG_FORMAT": "json"}
    with socket.create_server(("127.0.0.1", 0)) as own:
        process = subprocess.Popen(
            [*TILEWISE, "serve", "--fd", str(own.fileno()), "--arch", ARCH],
            env=env, pass_fds=[own.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
    try:
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
        upload_url = f"{url}/v1/profiles"
        httpx.post(
            upload_url, content=json_lines(synthetic.synthetic_rows(synthetic.SHAPES[:1], arch=ARCH)), timeout=60
        )
    finally:
        process.terminate()
        lines = [json.loads(line) for line in process.communicate(timeout=30)[1].splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    (noted,) = [line for line in lines if line.get("route") == "/v1/profiles"]
    assert (noted["method"], noted["status"], noted["level"]) == ("POST", 201, "info")
