"""Kill the service again and again while it works, and feed its readers with made-up inputs.

    python scripts/soak.py [--kills 50] [--inputs 100000] [--examples 100]

Kills: a worker, the process of a job, the one that runs jobs, the database (where PostgreSQL is installed), and all of
the service, during uploads, training and promotions. After each: no accepted row is lost, no file is torn, one model is
in force, and every job ends. Inputs: tests/fuzzing.py. Examples: of each route, by schemathesis, where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

PART = 5000
ENDED = ("promoted", "stopped", "failed", "cancelled")
OP, ARCH = "paged_mqa_logits", "h100"  # nothing is shipped for it
VICTIMS = ("worker", "work", "runner", "service")


class Soak:
    """One home, and a service on it that is killed and comes back."""

    def __init__(self, folder: Path, seed: int, database: Any) -> None:
        import synthetic

        self.home, self.rng, self.database = folder, random.Random(seed), database
        self.rows = synthetic.synthetic_rows(synthetic.SHAPES[::3], arch=ARCH)
        self.run = 0
        self.accepted: set[tuple[str, int]] = set()  # (run id, rows) of answered uploads
        self.kills: dict[str, int] = {}
        self.jobs: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        from service_process import ServiceProcess

        self.service = ServiceProcess(self.home, "--arch", ARCH, "--workers", "2")
        self.service.wait_until_ready()

    def ask(self, path: str, data: bytes | None = None, kind: str = "application/json") -> Any:
        """The JSON of an answer, None where there was none."""
        asked = urllib.request.Request(self.service.url + path, data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (409, 503):
                raise AssertionError(f"{path}: {error.code} {error.read()[:300]!r}") from error
        except (OSError, ValueError):
            pass
        return None

    def upload(self) -> None:
        self.run += 1
        name = f"soak-{self.run}"
        rows = [{**row, "run_id": name} for row in self.rng.sample(self.rows, 200)]
        body = "\n".join(map(json.dumps, rows)).encode()
        answer = self.ask("/v1/profiles", body, "application/octet-stream")
        if answer is not None:
            assert answer["accepted"] == len(rows), answer
            self.accepted.add((name, len(rows)))

    def retrain(self) -> None:
        self.ask("/v1/jobs", json.dumps({"folds": 0, "seed": self.run, "shadow_requests": 0}).encode())

    def promote(self) -> None:
        found = self.ask("/v1/models")
        stored = [model["digest"] for model in (found or {"models": []})["models"]]
        if stored:
            self.ask(f"/v1/models/{self.rng.choice(stored)}/promote", b"")

    def kill(self, victim: str) -> None:
        """Kill -9 one process of the kind, or all of the service."""
        pids = [] if victim in ("database", "service") else self.victims(victim)
        if not pids and victim not in ("database", "service"):  # no job runs now
            victim, pids = "worker", self.victims("worker")
        self.kills[victim] = self.kills.get(victim, 0) + 1
        if victim == "database":
            self.database.kill()
            time.sleep(self.rng.uniform(0, 1))
            self.database.start()
        elif victim == "service":
            self.service.process.kill()
            self.service.process.wait()
            time.sleep(0.5)  # what is left of it goes
            self.start()
        else:
            for pid in pids[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def victims(self, kind: str) -> list[int]:
        """Processes of a kind that live now."""
        return self.service.workers() if kind == "worker" else _processes(f"tilewise.service.{kind} ", self.home)

    def round(self) -> None:
        """Something under way, a kill in the middle of it, and a look at what is left."""
        work = self.rng.choice((self.upload, self.upload, self.retrain, self.retrain, self.promote))
        threads = [threading.Thread(target=work), threading.Thread(target=self.upload)]
        for thread in threads:
            thread.start()
        time.sleep(self.rng.choice((0.01, 0.1, 0.5, 1.5, 3.0)) * self.rng.random())
        self.kill(self.rng.choice((*VICTIMS, *(["database"] if self.database else []))))
        for thread in threads:
            thread.join()
        self.service.wait_until_ready()
        self.check()

    def check(self) -> None:
        """Raise AssertionError for anything lost, torn or double."""
        from tilewise.data.store import load_profile
        from tilewise.models import registry
        from tilewise.models.bundle import Bundle

        columns = load_profile(OP, ARCH, home=self.home).columns
        runs = columns["run_id"].tolist()
        for name, rows in self.accepted:
            assert runs.count(name) == rows, f"{name}: {runs.count(name)} of {rows} accepted rows are there"
        history = registry.history(OP, ARCH, self.home)
        if history:
            current = registry.load_version(registry.current(OP, ARCH, self.home), OP, ARCH)
            assert current.digest == history[0]
        for folder in (self.home / "models" / OP / ARCH / "versions").glob("[0-9a-f]*"):
            Bundle.load(folder)

    def settle(self) -> None:
        """Every job ends, and every worker answers from the one model in force."""
        from tilewise.models import registry

        deadline = time.monotonic() + 180
        while True:
            found = self.ask("/v1/jobs?limit=1000")
            states = [job["state"] for job in found["jobs"]] if found else ["running"]
            if all(state in ENDED for state in states):
                break
            assert time.monotonic() < deadline, f"jobs did not end: {states}"
            time.sleep(0.5)
        self.jobs = {state: states.count(state) for state in ENDED}
        time.sleep(1.0)
        question = json.dumps({"arch": ARCH, "batch_size": 4, "next_n": 2, "heads": 32}).encode()
        answers = {self.ask("/v1/select", question)["model_id"] for _ in range(100)}
        assert len(answers) == 1, answers
        history = registry.history(OP, ARCH, self.home)
        assert answers == {f"{ARCH}-{history[0][:12]}" if history else None}, (answers, history[:1])
        self.check()


def _processes(words: str, home: Path) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if words in command and f"TILEWISE_HOME={home}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def kill_loop(kills: int, seed: int) -> dict[str, Any]:
    """So many kills, on PostgreSQL for the second half where it is installed."""
    import postgres_server
    import pytest

    os.environ |= {"TILEWISE_JOB_NICE": "0", "TILEWISE_JOB_LEASE_S": "2", "TILEWISE_RATE_LIMIT": "0"}
    found: dict[str, Any] = {}
    for kind in ("sqlite", "postgresql"):
        server = None
        os.environ.pop("TILEWISE_DATABASE_URL", None)
        if kind == "postgresql":
            try:
                server = postgres_server.own_server()
            except pytest.skip.Exception as error:
                found[kind] = str(error)
                continue
            os.environ["TILEWISE_DATABASE_URL"] = server.url
        with tempfile.TemporaryDirectory(prefix="tilewise-soak-") as name:
            soak = Soak(Path(name), seed, server)
            try:
                for number in range((kills + 1) // 2):
                    soak.round()
                    print(f"{kind}: {number + 1} kills, {len(soak.accepted)} uploads accepted", flush=True)
                soak.settle()
            finally:
                soak.service.process.terminate()
                soak.service.process.wait(30)
                if server is not None:
                    server.stop()
            found[kind] = {"kills": soak.kills, "uploads": len(soak.accepted), "jobs": soak.jobs}
    return found


def explore(examples: int) -> str:
    """The last line of schemathesis."""
    import subprocess

    from service_process import serving

    if importlib.util.find_spec("schemathesis") is None:
        return "not done: schemathesis is not installed"
    os.environ |= {"TILEWISE_RATE_LIMIT": "0", "TILEWISE_JOBS": "0"}
    os.environ.pop("TILEWISE_DATABASE_URL", None)
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    with tempfile.TemporaryDirectory() as name, serving(Path(name), "--arch", "h200") as service:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json", "--checks", checks,
            "--max-examples", str(examples), "--request-timeout", "60", "--suppress-health-check", "all",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
        assert service.get("/healthz") == {"status": "ok"}
    if done.returncode:
        raise AssertionError(done.stdout[-6000:])
    return done.stdout.strip().splitlines()[-1].strip("= ")


def feed(inputs: int, seed: int) -> None:
    """Made-up profiles and bundles, a few thousand at a time, each part with a seed of its own."""
    import logging
    import warnings
    from collections import Counter

    import fuzzing

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # of numpy, over absurd numbers
    total: Counter[str] = Counter()
    for start in range(0, inputs, PART):
        total += fuzzing.fuzz(min(PART, inputs - start), seed + start)
        print(f"{sum(total.values())} inputs: {dict(total)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    if args.kills:
        print(json.dumps(kill_loop(args.kills, args.seed), indent=1), flush=True)
    if args.examples:
        print(explore(args.examples), flush=True)
    if args.inputs:
        feed(args.inputs, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
