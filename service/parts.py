"""What the routes of one app share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from fastapi import Request

from tilewise.data.records import shorten
from tilewise.service.access import Access, Caller
from tilewise.service.asking import MODEL_HEADER
from tilewise.service.catalogue import Catalogue
from tilewise.service.metrics import Metrics
from tilewise.service.problems import FieldProblem
from tilewise.service.selectors import Selectors, Watcher
from tilewise.service.settings import Settings

IDEMPOTENCY_HEADER = "Idempotency-Key"


class Service:
    """What the routes share."""

    def __init__(
        self, settings: Settings, arch_names: Iterable[str] | None, needed: bool, hosts: frozenset[str] | None
    ) -> None:
        self.settings = settings
        self.catalogue = Catalogue(settings.url)
        self.selectors = Selectors(settings.home, arch_names)
        self.access = Access(settings, self.catalogue, needed=needed, hosts=hosts)
        self.metrics = Metrics()
        self.watcher = Watcher(self.selectors, self.catalogue, settings.home)
        self.watcher.also.append(self._count_fallbacks)
        if needed:
            self.watcher.also.append(self.access.refresh)
        self._counted: dict[tuple[str, str], int] = {}

    def _count_fallbacks(self) -> None:
        for arch, selector in self.selectors.by_arch.items():
            for reason, number in selector.counters.items():
                new = number - self._counted.get((arch, reason), 0)
                if new:
                    self.metrics.fallbacks.labels(arch, reason).inc(new)
                    self._counted[arch, reason] = number

    def common_headers(self) -> Mapping[str, str]:
        """Headers of answers that concern no GPU in particular."""
        return {MODEL_HEADER: self.selectors.model_id()}


def caller_of(request: Request) -> Caller:
    """Who sent this request, as the guard found."""
    found: Caller = getattr(request.state, "caller", None) or Caller(None, "admin")
    return found


def answer_key(request: Request) -> str | None:
    """Under what the answer to this request is kept for those who send it again; None where they do not ask for that.

    Raises FieldProblem for a key that is none.
    """
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is None:
        return None
    if not (0 < len(key) <= 128 and key.isascii() and key.isprintable()):
        raise FieldProblem([(IDEMPOTENCY_HEADER, f"must be 1 to 128 printable characters, got {shorten(key)}")])
    parts = (caller_of(request).name or "", request.method, request.url.path, key)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
