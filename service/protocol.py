"""uvicorn's HTTP protocol, with a time limit on headers, a bound on connections, and no upgrades.

A connection that has not sent a whole request's headers costs a file descriptor. Nothing in uvicorn ends it, so that as
many of them as there may be files would keep everybody else out.

A server that does not honour an `Upgrade` answers as if there were none (RFC 9110, 7.8): Java's client sends one with
every first request. httptools takes the body of such a request for the other protocol's bytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import ClassVar

import httptools
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

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if not self._cut_off():  # CONNECT, which the app refuses
                        return
                    self.parser.feed_data(self._head_without_upgrade())
                    rest = rest[upgrade.args[0] :]
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _head_without_upgrade(self) -> bytes:
        """The request that was cut off at the end of its headers, to be begun again."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([line, *kept, b"", b""])

    def _cut_off(self) -> bool:
        """Whether httptools takes what follows these headers for another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        if not self._cut_off():
            self._served()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._cut_off():
            super().on_message_complete()

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
