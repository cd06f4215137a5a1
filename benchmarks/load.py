"""Load on the REST service, from a process of its own, while it retrains and takes an upload.

    python benchmarks/load.py [--seconds 60] [--json]

Steady load is open: each request has its time, and is late from that time on, whether or not the one before it has been
answered. Targets are at the top; the exit code is 1 where one is missed. Everything runs on this machine, so that the
figures are of what shares its processors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RATE = 500.0  # requests a second
P99_MS = 20.0
TIMES_BARE = 3.0
BATCH_SHAPES_PER_S = 50_000.0
UPLOAD_BYTES = 200 << 20
BATCH = 10_000
REPEATS = 0.9  # of the shapes of a batch
CONNECTIONS = 32
ENGINE_SHAPES = 1000  # different ones that a fleet launches
ARCH = "h200"

BARE = """
from fastapi import FastAPI
app = FastAPI()

@app.post("/v1/select")
async def constant() -> dict[str, str]:
    return {"config": "constant"}
"""


class Client(asyncio.Protocol):
    """One kept connection, one request at a time. Written by hand, because the usual clients take longer than the
    service to be measured."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[int] | None = None
        self._left = -1
        self._status = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[int]:
        """The status of the answer, once all of it is there."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._left < 0:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            self._status = int(head[9:12])
            lines = head.lower().split(b"\r\n")
            self._left = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            self._buffer = rest
        if len(self._buffer) >= self._left and self._answer is not None:
            self._buffer, self._left = b"", -1
            answer, self._answer = self._answer, None
            answer.set_result(self._status)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(0)


def request(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def shapes(number: int, seed: int) -> list[dict[str, int]]:
    """Different shapes, as an engine's traffic has them."""
    rng = random.Random(seed)
    found: dict[tuple[int, ...], dict[str, int]] = {}
    while len(found) < number:
        shape = {
            "batch_size": rng.randint(1, 512),
            "next_n": rng.randint(1, 8),
            "heads": rng.choice((32, 64)),
            "max_context_len": 1024 * rng.randint(1, 256),
        }
        found.setdefault(tuple(shape.values()), shape)
    return list(found.values())


async def steady(port: int, seconds: float) -> dict[str, Any]:
    """Latency of `/v1/select` at RATE, milliseconds."""
    loop = asyncio.get_running_loop()
    asked = [request("/v1/select", {"arch": ARCH, **shape}) for shape in shapes(ENGINE_SHAPES, seed=1)]
    idle: asyncio.Queue[Client] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        idle.put_nowait(client)
    for body in asked:  # shapes that an engine launches were launched before
        client = await idle.get()
        await client.ask(body)
        idle.put_nowait(client)
    late: list[float] = []
    wrong: list[int] = []

    async def one(due: float, body: bytes) -> None:
        client = await idle.get()
        status = await client.ask(body)
        late.append(time.perf_counter() - due)
        if status == 200:
            idle.put_nowait(client)
            return
        wrong.append(status)
        if status == 0:
            _, client = await loop.create_connection(Client, "127.0.0.1", port)
        idle.put_nowait(client)

    tasks = set()
    began = time.perf_counter()
    for number in range(int(RATE * seconds)):
        due = began + number / RATE
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = loop.create_task(one(due, asked[number % len(asked)]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    late.sort()
    return {
        "requests": len(late),
        "per_s": round(len(late) / took, 1),
        "errors": len(wrong),
        **{f"p{name}_ms": round(1e3 * late[min(len(late) - 1, int(share * len(late)))], 3) for name, share in
           (("50", 0.5), ("90", 0.9), ("99", 0.99), ("99_9", 0.999))},
        "worst_ms": round(1e3 * late[-1], 3),
    }  # fmt: skip


async def batches(port: int) -> dict[str, Any]:
    """Shapes a second through `/v1/select/batch`: never seen before, and with 90 % repeats of shapes seen before."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(Client, "127.0.0.1", port)
    known = shapes(int(BATCH * (1 - REPEATS)), seed=2)
    new = [shape for shape in shapes(3 * BATCH, seed=3) if shape not in known][: 2 * BATCH]

    async def rate(bodies: list[bytes]) -> float:
        began = time.perf_counter()
        for body in bodies:
            if (status := await client.ask(body)) != 200:
                raise SystemExit(f"a batch was answered with {status}")
        return len(bodies) * BATCH / (time.perf_counter() - began)

    rng = random.Random(4)
    cold = await rate([request("/v1/select/batch", {"arch": ARCH, "shapes": new[:BATCH]})])
    warm_bodies = []
    for _ in range(10):
        mixed = known + rng.choices(known, k=BATCH - len(known))
        rng.shuffle(mixed)
        warm_bodies.append(request("/v1/select/batch", {"arch": ARCH, "shapes": mixed}))
    await rate(warm_bodies[:1])
    warm = await rate(warm_bodies)
    mixed = known + new[BATCH : BATCH + len(known)]
    mixed += rng.choices(mixed, k=BATCH - len(mixed))
    part_cold = await rate([request("/v1/select/batch", {"arch": ARCH, "shapes": mixed})])
    return {
        "shapes_per_s_90pct_repeats": round(warm),
        "shapes_per_s_90pct_repeats_half_of_the_others_new": round(part_cold),
        "shapes_per_s_all_new": round(cold),
    }


def profile(path: Path) -> None:
    """A file of 200 MB: the shipped rows as JSON lines, again and again under other run ids."""
    from tilewise.data.store import load_profile

    columns = load_profile("paged_mqa_logits", ARCH, home=path.parent / "none").columns
    names = list(columns)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*(columns[n].tolist() for n in names), strict=True)]
    with path.open("w") as out:
        number = 0
        while out.tell() < UPLOAD_BYTES:
            for row in rows:
                clean: dict[str, Any] = {name: None if value != value else value for name, value in row.items()}
                for name in ("clock_before_mhz", "clock_after_mhz"):
                    clean[name] = None if clean[name] is None else int(clean[name])
                out.write(json.dumps({**clean, "run_id": f"load-{number}"}) + "\n")
                if out.tell() >= UPLOAD_BYTES:
                    break
            number += 1


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=env)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the service did not start")
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def call(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)


UPLOAD = """
import sys, time, urllib.request
with open(sys.argv[2], "rb") as file:
    asked = urllib.request.Request(sys.argv[1] + "/v1/profiles", file, {"Content-Length": sys.argv[3]})
    began = time.monotonic()
    with urllib.request.urlopen(asked, timeout=900) as answer:
        answer.read()
    print(round(time.monotonic() - began, 1), answer.status)
"""


def measure(seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"cpus": os.cpu_count() or 0, "rate_per_s": RATE, "seconds": seconds}
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        (Path(folder) / "bare.py").write_text(BARE)
        command = [sys.executable, "-m", "uvicorn", "--app-dir", folder, "--port", str(port), "--no-access-log",
                   "--log-level", "warning", "bare:app"]  # fmt: skip
        with running(command, dict(os.environ), port):
            found["bare_route_alone"] = asyncio.run(steady(port, seconds))

        home, file = Path(folder) / "home", Path(folder) / "profile.jsonl"
        env = {**os.environ, "TILEWISE_HOME": str(home), "TILEWISE_DATABASE_URL": ""}
        profile(file)
        code = "import sys; from tilewise.cli import main; sys.exit(main())"
        port = free_port()
        command = [sys.executable, "-c", code, "serve", "--port", str(port), "--log-level", "warning"]
        with running(command, env, port):
            found["select_alone"] = asyncio.run(steady(port, min(seconds, 10.0)))
            found["batch"] = asyncio.run(batches(port))
            job = call(port, "/v1/jobs", {"arch": ARCH, "shadow_requests": 0})
            while call(port, f"/v1/jobs/{job['id']}")["stage"] == "import":
                time.sleep(0.1)
            command = [sys.executable, "-c", UPLOAD, f"http://127.0.0.1:{port}", str(file), str(file.stat().st_size)]
            sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            found["select_while_retraining_and_uploading"] = asyncio.run(steady(port, seconds))
            state = call(port, f"/v1/jobs/{job['id']}")
            found["retraining_then"] = f"{state['state']} {state['stage']} {state['done']}/{state['total']}"
            found["upload_was_over_then"] = sender.poll() is not None
            if sender.poll() is None:
                sender.terminate()
            found["upload"] = sender.communicate()[0].strip() or "still checked"
    return found


def judge(found: dict[str, Any]) -> list[str]:
    """The targets that were missed."""
    under, bare = found["select_while_retraining_and_uploading"], found["bare_route_alone"]
    missed = []
    if under["errors"]:
        missed.append(f"{under['errors']} errors")
    if under["per_s"] < 0.99 * RATE:
        missed.append(f"{under['per_s']} requests a second of {RATE:.0f}")
    if under["p99_ms"] > P99_MS:
        missed.append(f"p99 is {under['p99_ms']} ms, at most {P99_MS:.0f} are wanted")
    if under["p99_ms"] > TIMES_BARE * bare["p99_ms"]:
        missed.append(
            f"p99 is {under['p99_ms'] / bare['p99_ms']:.1f} times the bare route's, {TIMES_BARE:.0f} are wanted"
        )
    if (rate := found["batch"]["shapes_per_s_90pct_repeats"]) < BATCH_SHAPES_PER_S:
        missed.append(f"{rate} shapes a second in batches, {BATCH_SHAPES_PER_S:.0f} are wanted")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of steady load (default: 60)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = measure(args.seconds)
    found["missed"] = judge(found)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:<40}{value}")
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
