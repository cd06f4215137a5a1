"""The REST service as it runs: real processes, real sockets, models published and processes killed under it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("sklearn")

import httpx
import synthetic
from service_process import TILEWISE, environment, serving, tilewise

from tilewise.dispatch.selector import Selector
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models import registry

ARCH = "h200"
SIZES = {"batch_size": 16, "next_n": 6, "heads": 32, "max_context_len": 32768}
QUESTION = {"arch": ARCH, **SIZES}
SWITCH_S = 1.0  # time that all workers may take to answer from a new model


def publish(home: Path, seed: int) -> str:
    return synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:4], seed=seed).model_id


def median_ms(service: Any) -> float:
    """Of warm answers over one connection that is kept open, as clients keep it."""
    times = []
    with httpx.Client(base_url=service.url) as client:
        for _ in range(40):
            start = time.perf_counter()
            client.post("/v1/select", json=QUESTION).raise_for_status()
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def ask_many(service: Any, number: int) -> list[str]:
    return [service.get("/v1/select", QUESTION)["model_id"] for _ in range(number)]


def test_the_service_answers_as_an_import_does_and_stops_when_told(tmp_path: Path) -> None:
    model = publish(tmp_path, 0)
    with serving(tmp_path) as service:
        assert service.get("/healthz") == {"status": "ok"}
        assert service.get("/readyz")["archs"][ARCH]["model_id"] == model
        answer = service.get("/v1/select", QUESTION)
        decision = Selector(ARCH, home=tmp_path).select(Shape(**SIZES))
        assert {name: answer[name] for name in decision.to_dict()} == decision.to_dict()
        service.process.send_signal(signal.SIGINT)
        service.process.wait(20)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_two_workers_switch_within_a_second_and_survive_being_killed(tmp_path: Path) -> None:
    """F5: after a publication, no worker answers from the old model; a worker that dies comes back with the new one."""
    models = [publish(tmp_path, 0)]
    with serving(tmp_path, "--workers", "2", "--arch", ARCH) as service:
        assert len(service.workers()) == 2
        assert set(ask_many(service, 50)) == {models[0]}
        models.append(publish(tmp_path, 1))
        assert models[0] != models[1]
        time.sleep(SWITCH_S)
        assert set(ask_many(service, 200)) == {models[1]}
        registry.rollback(synthetic.OP, ARCH, tmp_path)
        time.sleep(SWITCH_S)
        assert set(ask_many(service, 100)) == {models[0]}

        # Nagle's algorithm and delayed acknowledgements together make it 40 ms.
        assert median_ms(service) < 30

        before = service.workers()
        os.kill(before[0], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while len(set(service.workers()) - {before[0]}) < 2:
            assert time.monotonic() < deadline, "the worker was not started again"
            time.sleep(0.1)
        service.wait_until_ready()
        assert set(ask_many(service, 100)) == {models[0]}


def test_a_bad_publication_is_refused_and_the_last_good_model_goes_on(tmp_path: Path) -> None:
    """M2: a bundle that cannot be loaded takes nothing down; the next good one is taken up."""
    model = publish(tmp_path, 0)
    with serving(tmp_path, "--arch", ARCH) as service:
        folder = registry.current(synthetic.OP, ARCH, tmp_path).parent
        bad = folder / ("0" * 64)
        bad.mkdir()
        (bad / "manifest.json").write_text('{"format": "tilewise-bundle"')
        pointer = folder.parent / "current"
        pointer.write_text(f"{bad.name}\n{pointer.read_text()}")
        time.sleep(SWITCH_S)
        assert set(ask_many(service, 20)) == {model}
        good = publish(tmp_path, 1)
        time.sleep(SWITCH_S)
        assert set(ask_many(service, 20)) == {good}


def test_a_service_that_was_killed_starts_again_with_its_model(tmp_path: Path) -> None:
    model = publish(tmp_path, 0)
    with serving(tmp_path, "--arch", ARCH) as service:
        service.process.kill()
        service.process.wait()
    with serving(tmp_path, "--arch", ARCH) as service:
        assert service.get("/v1/select", QUESTION)["model_id"] == model


def test_a_taken_port_or_a_bad_address_is_one_plain_line_and_exit_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (["--port", port], ["--host", "192.0.2.1"], ["--host", "no.such.host.invalid"], ["--fd", "99"]):
            for workers in ("1", "2"):
                refused = tilewise("serve", "--workers", workers, *words, home=tmp_path)
                assert refused.returncode == 1, refused.stderr
                assert refused.stderr.startswith("tilewise: cannot serve on ")
                assert refused.stderr.count("\n") == 1


def test_a_certificate_that_cannot_be_used_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    missing, bad = str(tmp_path / "missing.pem"), str(tmp_path / "bad.pem")
    for words, why in (
        (["--tls-certificate", missing], f"--tls-certificate {missing} cannot be read: No such file or directory"),
        (["--tls-certificate", bad, "--tls-key", missing], f"--tls-key {missing} cannot be read: "),
        (["--tls-certificate", bad], f"--tls-certificate {bad} cannot be used: "),
        (["--tls-certificate", bad, "--tls-key", bad], f"--tls-certificate {bad} with --tls-key {bad} cannot be used"),
        (["--tls-key", bad], f"--tls-key {bad} needs --tls-certificate"),
    ):
        refused = tilewise("serve", "--port", "0", *words, home=tmp_path)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.startswith(f"tilewise: {why}")
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_service_takes_over_an_open_socket(workers: str, tmp_path: Path) -> None:
    """What `make run` does, so that nobody can take its port in between."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        command = [*TILEWISE, "serve", "--fd", str(own.fileno()), "--workers", workers]
        process = subprocess.Popen(
            command, env=environment(tmp_path), pass_fds=[own.fileno()], stderr=subprocess.PIPE, text=True
        )
        port = own.getsockname()[1]
    try:
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60).json() == {"status": "ok"}
    finally:
        process.terminate()
        log = process.communicate(timeout=30)[1]
    assert f"Serving on http://127.0.0.1:{port} " in log


def test_a_wrong_gpu_is_refused_before_anything_starts(tmp_path: Path) -> None:
    refused = tilewise("serve", "--arch", "h900", home=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("tilewise: arch must be one of")
    assert refused.stderr.count("\n") == 1


RUN = Path(__file__).parent.parent / "scripts" / "run.py"


def run_script(port: str, home: Path) -> subprocess.CompletedProcess[str]:
    variables = {**environment(home), "PORT": port, "RUN_ONCE": "1"}
    return subprocess.run([sys.executable, RUN], env=variables, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("port", ["abc", "-1", "65536", "8000 ", "0x10", "123456", "1.5"])
def test_make_run_refuses_a_port_that_is_none_before_it_trains(port: str, tmp_path: Path) -> None:
    refused = run_script(port, tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"PORT must be 0 to 65535, got {port!r}\n"


def test_make_run_refuses_a_taken_port_before_it_trains(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_script(str(port), tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"127.0.0.1:{port} cannot be listened on: ")
    assert refused.stderr.count("\n") == 1


def test_two_runs_at_once_hold_two_ports() -> None:
    """From the moment that each has chosen its own, long before its service answers."""
    open_port = runpy.run_path(str(RUN))["open_port"]
    with open_port("") as first, open_port("") as second:
        ports = [one.getsockname()[1] for one in (first, second)]
        assert len(set(ports)) == 2
        for port in ports:
            with pytest.raises(SystemExit, match="cannot be listened on"):
                open_port(str(port))


def test_an_environment_that_is_ready_waits_for_no_other_set_up(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    setup = shutil.copy(RUN.with_name("setup_env.py"), tmp_path / "scripts")
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "env").mkdir()
    parts = [str(tmp_path), sys.version, "something", "", ""]
    (tmp_path / "env" / "stamp").write_text(hashlib.sha256("\n".join(parts).encode()).hexdigest())
    with (tmp_path / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as while another environment is made
        done = subprocess.run(
            [sys.executable, setup, tmp_path / "env", "something"], capture_output=True, timeout=30, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
