"""What Prometheus is told: requests, their latency, fallbacks, models, jobs. Workers add theirs up through files.

`prepare` sets the folder of those files, before prometheus_client is imported: hence the imports within functions.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("tilewise.requests")
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)


def prepare() -> Callable[[], None]:
    """Give the workers that are started from now on one folder for their counts; what removes it again."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not _alive(left.name.removeprefix(_PREFIX).partition("-")[0]):  # of a service that was killed
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    os.environ[FOLDER] = folder
    return lambda: shutil.rmtree(folder, ignore_errors=True)


_PREFIX = "tilewise-metrics-"


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:  # somebody else's
        return True
    return True


class Metrics:
    """The counters of this process."""

    def __init__(self) -> None:
        import prometheus_client as prometheus

        if folder := os.environ.get(FOLDER):  # a worker may start after temporary files were cleaned up
            os.makedirs(folder, mode=0o700, exist_ok=True)
        self.registry = prometheus.CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = prometheus.Counter("tilewise_requests", "Requests answered", labels, registry=self.registry)
        self.latency = prometheus.Histogram(
            "tilewise_request_seconds", "Time to the answer", ("route",), buckets=BUCKETS_S, registry=self.registry
        )
        self.fallbacks = prometheus.Counter(
            "tilewise_fallbacks", "Shapes answered by a fallback", ("arch", "reason"), registry=self.registry
        )
        self.rows = prometheus.Counter(
            "tilewise_profile_rows", "Rows of uploaded profiles", ("outcome",), registry=self.registry
        )

    def text(self, live: Iterable[tuple[str, str, list[tuple[Mapping[str, str], float]]]]) -> tuple[bytes, str]:
        """(exposition, media type). `live` has gauges read at this moment: name, help, and labels with values."""
        import prometheus_client as prometheus
        from prometheus_client.core import GaugeMetricFamily
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = self.registry
        if os.path.isdir(os.environ.get(FOLDER, "")):  # else what this worker has counted
            registry = prometheus.CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        families = []
        for name, text, values in live:
            names = sorted({key for labels, _ in values for key in labels})
            family = GaugeMetricFamily(name, text, labels=names)
            for labels, value in values:
                family.add_metric([labels[key] for key in names], value)
            families.append(family)

        class Live:
            def collect(self) -> Iterator[Any]:
                yield from families

        now = prometheus.CollectorRegistry()
        now.register(Live())
        return prometheus.generate_latest(registry) + prometheus.generate_latest(now), prometheus.CONTENT_TYPE_LATEST


class Count:
    """Middleware that counts answers, and how long each took, by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, began = 500, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            taken_s = time.perf_counter() - began
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.latency.labels(route).observe(taken_s)
            caller = scope.get("state", {}).get("caller")
            if _log.isEnabledFor(level := logging.INFO if _changes(method, route) else logging.DEBUG):
                said = {"method": method, "route": route, "status": status, "ms": round(1e3 * taken_s, 3)}
                by = {"caller": caller.name} if caller is not None and caller.name else {}
                _log.log(level, "%s %s %s", method, route, status, extra={**said, **by})


def _changes(method: str, route: str) -> bool:
    """Whether a request changes something that lasts: those are logged as a matter of course."""
    return method not in ("GET", "HEAD") and not route.startswith(_ASKING)


_ASKING = ("/v1/select", "/v1/rank", "/v1/explain", "/v1/compare", "/v1/shapes", "none")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
