"""What `make run` shows: train on the shipped profile, print a decision, start the service and ask it the same.

The service goes on until Ctrl-C; with RUN_ONCE=1 or CI set, it is stopped after its first answer. PORT chooses the
port. Models go to TILEWISE_HOME, or to .tilewise in this checkout.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TILEWISE = Path(sys.executable).with_name("tilewise")
ARCH = "sm90"
# Decode of DeepSeek-V4.1-Flash: 5 draft tokens and the next one, at a context of 128 Ki tokens.
SHAPE = {"batch_size": 16, "next_n": 6, "heads": 32, "head_dim": 128, "block_kv": 64, "max_context_len": 131072}
START_TIMEOUT_S = 60


def main() -> int:
    once = any(os.environ.get(name, "") not in ("", "0", "false") for name in ("RUN_ONCE", "CI"))
    os.environ.setdefault("TILEWISE_HOME", str(ROOT / ".tilewise"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is stopped too
    flags = [word for name, value in SHAPE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    show("train", "--arch", ARCH)
    show("select", *flags, "--arch", ARCH)
    port = free_port()
    serve = ["serve", "--host", "127.0.0.1", "--port", str(port)]
    print(f"\n$ tilewise {shlex.join(serve)} &", flush=True)
    service = subprocess.Popen([TILEWISE, *serve], stdin=subprocess.DEVNULL)
    try:
        wait_until_ready(service, f"http://127.0.0.1:{port}/readyz")
        ask(f"http://127.0.0.1:{port}/v1/select", {"arch": ARCH, **SHAPE})
        if not once:
            print(f"\nServing on http://127.0.0.1:{port} (/openapi.json says what); Ctrl-C ends it.", flush=True)
            return service.wait()
    except KeyboardInterrupt:  # the service got it too
        return 0
    finally:
        stop(service)
    return 0


def show(*arguments: str) -> None:
    """Run one tilewise command as a reader would, and end here when it fails."""
    print(f"\n$ tilewise {shlex.join(arguments)}", flush=True)
    if code := subprocess.call([TILEWISE, *arguments], stdin=subprocess.DEVNULL):
        sys.exit(code)


def free_port() -> int:
    """PORT if set, else 8000 unless it is taken, else any free one."""
    if port := os.environ.get("PORT"):
        return int(port)
    for wanted in (8000, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            port_number: int = probe.getsockname()[1]
            return port_number
    sys.exit("no free port on 127.0.0.1")


def wait_until_ready(service: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if service.poll() is not None:
            sys.exit(f"the service ended with exit code {service.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    sys.exit(f"the service was not ready after {START_TIMEOUT_S} s")


def ask(url: str, body: dict[str, object]) -> None:
    """Print the curl call and its answer; where there is no curl, the same request is sent from here."""
    data = json.dumps(body)
    command = ["curl", "-sS", "--fail-with-body", url, "-H", "Content-Type: application/json", "-d", data]
    print(f"\n$ {shlex.join(command)}", flush=True)
    if shutil.which("curl"):
        answer = subprocess.run(command, check=True, capture_output=True).stdout
    else:
        request = urllib.request.Request(url, data.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = response.read()
    print(json.dumps(json.loads(answer), indent=2), flush=True)


def stop(service: subprocess.Popen[bytes]) -> None:
    if service.poll() is None:
        service.terminate()
        try:
            service.wait(timeout=20)
        except subprocess.TimeoutExpired:
            service.kill()


if __name__ == "__main__":
    sys.exit(main())
