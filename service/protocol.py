"""uvicorn's HTTP protocol, with a time limit on headers and a bound on connections.

A connection that has not sent a whole request's headers costs a file descriptor. Nothing in uvicorn ends it, so that as
many of them as there may be files would keep everybody else out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Protocol(HttpToolsProtocol):
    """One connection. `header_timeout_s` and `max_connections` are set once, before the first."""

    header_timeout_s = 10.0
    max_connections = 1000
    # Those between requests, or within a request's headers, the longest waiting first.
    waiting: ClassVar[OrderedDict[Protocol, None]] = OrderedDict()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._wait()
        while len(self.connections) > self.max_connections and self.waiting:
            oldest, _ = self.waiting.popitem(last=False)
            oldest.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._served()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._served()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self.waiting[self] = None  # uvicorn's keep-alive timeout runs

    def drop(self) -> None:
        """Close the connection, whatever is under way."""
        self._served()
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self.waiting[self] = None
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout_s, self.drop)

    def _served(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
