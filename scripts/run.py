"""What `make run` shows: train on the shipped profile, print two decisions, start the service and ask it the same.

    make run                     serves on port 8000, or where that is taken on another free one
    make run PORT=8123           serves there, or says that it cannot; 0 is any free port
    make run RUN_ONCE=1          stops the service after its first answer (also with CI set)
    TILEWISE_HOME=DIR make run   keeps models in DIR, not in .tilewise of this checkout

The port is taken first and kept, so that two runs at once, or whatever else starts meanwhile, cannot meet on it.
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
ARCH = "h200"
# Decode of DeepSeek-V4.1-Flash: 5 draft tokens and the next one, at a context of 128 Ki tokens.
SHAPE = {"batch_size": 16, "next_n": 6, "heads": 32, "head_dim": 128, "block_kv": 64, "max_context_len": 131072}
UNMEASURED = {"batch_size": 20, "next_n": 5, "heads": 64, "max_context_len": 40000}  # what the model itself answers
START_TIMEOUT_S = 60


def main() -> int:
    once = any(os.environ.get(name, "") not in ("", "0", "false") for name in ("RUN_ONCE", "CI"))
    os.environ.setdefault("TILEWISE_HOME", str(ROOT / ".tilewise"))
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    listener = open_port(os.environ.get("PORT", ""))
    port = listener.getsockname()[1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is stopped too
    show("train", "--arch", ARCH)
    for shape in (UNMEASURED, SHAPE):
        flags = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        show("select", *flags, "--arch", ARCH)
    print(f"\n$ tilewise serve --host 127.0.0.1 --port {port} &", flush=True)
    number = listener.fileno()
    command = [str(TILEWISE), "serve", "--fd", str(number)]  # that port, already held
    service = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number])
    listener.close()  # so that nobody is kept waiting on it when the service has ended
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


def open_port(text: str) -> socket.socket:
    """A socket that listens on the port named, else on 8000 unless that is taken, else on any free one."""
    if text and not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 1 << 16):
        sys.exit(f"PORT must be 0 to 65535, got {text!r}")
    failure = ""
    for wanted in [int(text)] if text else [8000, 0]:
        try:
            return socket.create_server(("127.0.0.1", wanted))
        except OSError as error:
            failure = f"127.0.0.1:{wanted} cannot be listened on: {error.strerror or error}"
    sys.exit(failure)


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
