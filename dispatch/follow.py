"""Following a service: a thread that fetches each model that the service puts in force, and hands it to a selector.

A launch never waits for it: the selector answers from the model that it has, and takes up the next one between two
launches. A model is believed when it is whole, has the digest that the service named, is for this op and GPU, and gives
its own golden picks. It is then published in a folder of the follower's own, so that the last good one is there again
after a restart, whether or not the service is.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import re
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tilewise.data.home import home_dir
from tilewise.dispatch.artifact import unpack
from tilewise.errors import InvalidBundleError, TilewiseError
from tilewise.models import registry
from tilewise.models.bundle import Bundle

if TYPE_CHECKING:
    from tilewise.dispatch.selector import Selector

INTERVAL_S = 2.0
TIMEOUT_S = 10.0
MOST_WAIT_S = 30.0  # between two tries while the service is away, or its model no good
MAX_ARTIFACT_BYTES = 1 << 30
KEPT_VERSIONS = 4
_ETAG = re.compile(r'(?:W/)?"([0-9a-f]{64})"')
_log = logging.getLogger("tilewise")


class FollowError(TilewiseError, ValueError):
    """A service cannot be followed as asked."""


def follow_home(url: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the models fetched from a service. FollowError for a URL that is none of http or https."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise FollowError(f"url must be such as http://host:8000, got {url!r:.200}")
    folder = home_dir() / "followed" if cache is None else Path(cache)
    return folder / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


class Follower:
    """Keeps one selector on the model that a service has in force. It ends with the selector, or by `stop`."""

    def __init__(
        self, selector: Selector, url: str, *, token: str | None = None, interval_s: float = INTERVAL_S
    ) -> None:
        if not interval_s > 0:
            raise FollowError(f"interval_s must be above 0, got {interval_s!r}")
        self.url = url.rstrip("/")
        self.interval_s = interval_s
        self.problem = "the service has not answered yet"  # empty where the last try went well
        self._op, self._arch, self._home = selector.op, selector.arch.name, Path(str(selector.home))
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._selector = weakref.ref(selector, lambda _: self.stop())
        self._failures = 0
        self._renew_locks()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._start()
        if hasattr(os, "register_at_fork"):
            own = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _start_again(own()))

    def _renew_locks(self) -> None:
        self.tried = threading.Event()  # set once the first try is over
        self._stopping = threading.Event()
        self._one_at_a_time = threading.Lock()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tilewise-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Follow no more. The selector stays with the model that it has."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.refresh()
            self.tried.set()
            wait = min(MOST_WAIT_S, self.interval_s * 2 ** min(self._failures, 10))
            # Not all engines of a fleet at once.
            self._stopping.wait(wait * random.uniform(0.9, 1.1))

    def refresh(self) -> bool:
        """Ask once, and take up a new model if there is one; whether that was so. Nothing is raised."""
        try:
            with self._one_at_a_time:
                changed = self._fetch()
            problem = ""
        except Exception as error:  # whatever it is, launches go on
            changed = False
            problem = f"{self.url}: {error}"
        if problem and problem != self.problem:
            _log.warning("following %s: the last good model goes on", problem)
        self._failures = self._failures + 1 if problem else 0
        self.problem = problem
        return changed

    def _fetch(self) -> bool:
        selector = self._selector()
        if selector is None:
            self.stop()
            return False
        held = selector.bundle.digest if selector.bundle is not None else ""
        headers = {**self._headers, **({"If-None-Match": f'"{held}"'} if held else {})}
        query = urllib.parse.urlencode({"arch": self._arch})
        request = urllib.request.Request(f"{self.url}/v1/models/current/artifact?{query}", headers=headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                digest = _digest(answer.headers.get("ETag", ""))
                with tempfile.TemporaryFile() as file:
                    _copy(answer, file)
                    self._take(file, digest)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 304:
                return False
            raise FollowError(f"answered {error.code} {error.reason}") from None
        return selector.reload()

    def _take(self, file: IO[bytes], digest: str) -> None:
        """Check what was fetched, and publish it for the selector to take up."""
        self._home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=self._home) as folder:
            file.seek(0)
            unpack(file, Path(folder))
            bundle = Bundle.load(folder)
            if bundle.digest != digest:
                raise InvalidBundleError(f"model must have the digest {digest[:12]}, got {bundle.digest[:12]}")
            if (bundle.op, bundle.arch.name) != (self._op, self._arch):
                raise InvalidBundleError(f"model is for {bundle.op} on {bundle.arch.name}")
            stored = registry.publish(bundle, self._home)
        _forget_old(stored.parent, keep=registry.history(self._op, self._arch, self._home)[:KEPT_VERSIONS])


def _start_again(follower: Follower | None) -> None:
    """In a forked child, which has the selector but neither the thread nor who holds its locks."""
    if follower is not None and not follower._stopping.is_set():
        follower._renew_locks()
        follower._start()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token is for the service that was named, not for whom it points to."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _digest(etag: str) -> str:
    found = _ETAG.fullmatch(etag.strip())
    if found is None:
        raise FollowError(f"ETag must be a digest, got {etag!r:.100}")
    return found[1]


def _copy(source: Any, target: IO[bytes]) -> None:
    left, deadline = MAX_ARTIFACT_BYTES, time.monotonic() + 30 * TIMEOUT_S
    while chunk := source.read(1 << 16):
        left -= len(chunk)
        if left < 0:
            raise FollowError(f"model must have at most {MAX_ARTIFACT_BYTES} bytes")
        if time.monotonic() > deadline:
            raise FollowError("model did not come in time")
        target.write(chunk)


def _forget_old(versions: Path, keep: list[str]) -> None:
    """Remove versions that are not among the latest; they can be fetched again."""
    for path in versions.iterdir():
        if path.name not in keep and not path.name.startswith("."):
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
