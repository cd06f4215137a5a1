"""Forked children, and locks that are held while they are made."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside threads
        return os.fork()


def status_of_child(call: Callable[[], object], seconds: int = 10) -> int:
    """0 where the call comes back in a forked child; another number where it raises or hangs there."""
    child = fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            call()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@contextlib.contextmanager
def held_by_another_thread(*locks: Any) -> Iterator[None]:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
