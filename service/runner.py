"""The process that runs jobs: it takes one, gives it a process of its own, and watches that.

It holds no model and no rows, so that it lives on whatever a job does. Several of them, on several hosts, may share a
catalogue. Told to stop, it hands its job back, and the next one goes on with it.
"""

from __future__ import annotations

import logging
import logging.config
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import sqlalchemy as sa

from tilewise.service.catalogue import Catalogue, CatalogueError
from tilewise.service.jobs import Lease, LostJobError, claim, end, get, hand_back, job_folder, renew, report
from tilewise.service.logs import log_config
from tilewise.service.processes import be_nice, die_with_parent, module_command, stop
from tilewise.service.settings import Settings

LOOK_S = 0.5
GRACE_S = 3.0
_log = logging.getLogger("tilewise.service")


class Runner:
    """Takes jobs, one at a time, until `stopping` is set."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.catalogue = Catalogue(settings.url)
        self.owner = f"{socket.gethostname()[:60]}-{uuid.uuid4().hex[:12]}"
        self.stopping = threading.Event()

    def run(self) -> None:
        """Until told to stop."""
        while not self.stopping.is_set():
            try:
                job = self._claim()
                if job is None:
                    self.stopping.wait(LOOK_S)
                else:
                    self._run_job(job)
            except CatalogueError as error:
                _log.warning("%s", error)
                self.stopping.wait(2.0)
            except LostJobError as error:
                _log.warning("%s", error)

    def _claim(self) -> dict[str, Any] | None:
        try:
            return claim(
                self.catalogue, self.owner, lease_s=self.settings.job_lease_s, attempts=self.settings.job_attempts
            )
        except sa.exc.IntegrityError:  # another runner was faster
            return None

    def _run_job(self, job: dict[str, Any]) -> None:
        lease = Lease(job["id"], self.owner)
        report(self.catalogue, lease, f"start {job['attempt']}, on {self.owner}")
        command = module_command("tilewise.service.work", lease.job_id, self.owner, str(os.getpid()))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
        try:
            code = self._watch(process, lease)
        finally:
            if process.poll() is None:
                stop(process, GRACE_S)
        if code is not None:
            self._after(lease, code)

    def _watch(self, process: subprocess.Popen[bytes], lease: Lease) -> int | None:
        """The exit code of the job's process; None where it was stopped, and its end is written down."""
        renewed = time.monotonic()
        while True:
            try:
                return process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                pass
            if self.stopping.is_set():
                stop(process, GRACE_S)
                hand_back(self.catalogue, lease)
                return None
            try:
                cancelled = renew(self.catalogue, lease, self.settings.job_lease_s)
                renewed = time.monotonic()
            except LostJobError as lost:
                try:
                    return process.wait(GRACE_S)  # it wrote down its own end, and is about to go
                except subprocess.TimeoutExpired:
                    raise lost from None
            except CatalogueError:
                if time.monotonic() - renewed > 0.8 * self.settings.job_lease_s:
                    raise  # another may take the job soon: its process must be gone by then
                continue
            if cancelled:
                stop(process, GRACE_S)
                end(self.catalogue, lease, "cancelled", "cancelled while it ran")
                shutil.rmtree(job_folder(self.settings.home, lease.job_id), ignore_errors=True)
                return None

    def _after(self, lease: Lease, code: int) -> None:
        """Where a job's process ended without a word, the job is taken up again, or given up."""
        with self.catalogue.read() as connection:
            job = get(connection, lease.job_id)
        if job is None or job["state"] != "running" or job["owner"] != self.owner:
            return
        how = f"signal {-code}" if code < 0 else f"code {code}"
        report(self.catalogue, lease, f"its process ended with {how}", lease_until=0.0)


def main() -> int:
    """Run jobs until SIGTERM; the argument names the process to end with."""
    if len(sys.argv) > 1:
        die_with_parent(int(sys.argv[1]))
    settings = Settings.from_env()
    be_nice(settings.job_nice)
    logging.config.dictConfig(log_config(settings.log_format, "info"))
    runner = Runner(settings)
    signal.signal(signal.SIGTERM, lambda *_: runner.stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent tells us in its turn
    runner.run()
    return 0
