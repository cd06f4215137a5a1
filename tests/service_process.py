"""A real service in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TILEWISE = [sys.executable, "-c", "import sys; from tilewise.cli import main; sys.exit(main())"]


def tilewise(*arguments: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run([*TILEWISE, *arguments], env=environment(home), capture_output=True, text=True, check=False)


def environment(home: Path) -> dict[str, str]:
    # One thread: on a busy machine, OpenMP threads that wait for each other take many times as long.
    return {**os.environ, "TILEWISE_HOME": str(home), "OMP_NUM_THREADS": "1"}


class ServiceProcess:
    """`tilewise serve` on a free port of the loopback address."""

    def __init__(self, home: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [*TILEWISE, "serve", "--port", str(port), "--log-level", "warning", *arguments]
        self.process = subprocess.Popen(command, env=environment(home), cwd=home)

    def get(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON of an answer; a POST where there is a body. Each has its own connection: any worker may answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def wait_until_ready(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/readyz")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def workers(self) -> list[int]:
        """Process ids of the processes that answer."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # pid (name) state parent ...; the name may hold anything
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_text()
                if parent == self.process.pid and "spawn_main" in command:
                    found.append(int(folder.name))
        return found


@contextlib.contextmanager
def serving(home: Path, *arguments: str) -> Iterator[ServiceProcess]:
    """A service that is ready; stopped at the end, however that comes."""
    service = ServiceProcess(home, *arguments)
    try:
        service.wait_until_ready()
        yield service
    finally:
        service.process.send_signal(signal.SIGTERM)
        try:
            service.process.wait(20)
        except subprocess.TimeoutExpired:
            service.process.kill()
            service.process.wait()
