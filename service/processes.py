"""Processes of one service hang together: none outlives the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.25


def die_with_parent(parent: int, sent: int = signal.SIGTERM) -> None:
    """Send this process `sent` when the process `parent`, which started it, is gone, however it went."""
    with contextlib.suppress(OSError, AttributeError):  # Linux: the kernel does it at once
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sent, 0, 0, 0)

    def watch() -> None:  # elsewhere, and where the parent was gone before
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), sent)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def be_nice(niceness: int) -> None:
    """Give way to everybody else: processor time as far as others leave it."""
    if niceness > 0:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        with contextlib.suppress(OSError, AttributeError):  # does not interrupt others when it wakes up
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def module_command(module: str, *arguments: str) -> list[str]:
    """A command that runs one of our modules, without the working folder on the path."""
    code = f"import sys; sys.path[:] = [p for p in sys.path if p]; from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]


def stop(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Ask a process to end, make it end after `grace_s`, and return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


class Kept:
    """A process that is started again whenever it ends, until `stop`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], note: Callable[[str], None]) -> None:
        self._command, self._env, self._note = list(command), dict(env), note
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        pause = 0.5
        while not self._stopping.is_set():
            began = time.monotonic()
            self._process = subprocess.Popen(self._command, env=self._env, stdin=subprocess.DEVNULL)
            code = self._process.wait()
            if self._stopping.is_set():
                return
            pause = 0.5 if time.monotonic() - began > 30 else min(30.0, pause * 2)
            self._note(f"a process ended with code {code}, and is started again in {pause:.0f} s")
            self._stopping.wait(pause)

    def stop(self, grace_s: float) -> None:
        """End the process, and start no other."""
        self._stopping.set()
        if self._process is not None:
            stop(self._process, grace_s)
        self._thread.join(grace_s)
