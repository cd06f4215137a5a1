"""Who may ask what: tokens and their scopes, limits on rate and size, and pages of other hosts kept out.

Tokens are random, so that a plain hash of one tells nothing about it; only the hash is kept. All of this runs before a
request's body is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import sqlalchemy as sa
from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewise.data.records import shorten
from tilewise.errors import TilewiseError
from tilewise.service.catalogue import Catalogue, CatalogueError, rows_of
from tilewise.service.problems import problem_response
from tilewise.service.settings import MIB, Settings
from tilewise.service.tables import tokens

SCOPES = ("read", "upload", "admin")  # each may do what those before it may
MAX_BODY_BYTES = 1 << 16
MAX_BATCH_BYTES = 4 * MIB
MAX_CLIENTS = 10_000  # whose rates are remembered
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PREFIX = "tw_"


class TokenError(TilewiseError, ValueError):
    """A token cannot be made or revoked as asked."""


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    name: str | None  # of the token; None where none is needed
    scope: str

    def may(self, wanted: str) -> bool:
        """Whether this scope includes the one wanted."""
        return SCOPES.index(self.scope) >= SCOPES.index(wanted)


def scope_needed(method: str, path: str) -> str | None:
    """The scope that a request needs; None where everybody may send it."""
    if not path.startswith("/v1/"):
        return "read" if path == "/metrics" else None
    if method in ("GET", "HEAD") or path in _QUESTIONS:
        return "read"
    return "upload" if method == "POST" and path in ("/v1/profiles", "/v1/shapes") else "admin"


_QUESTIONS = ("/v1/select", "/v1/select/batch", "/v1/rank", "/v1/explain", "/v1/compare")


def body_limit(path: str, settings: Settings) -> int:
    """The most bytes that a request's body may have."""
    if path == "/v1/profiles":
        return settings.max_upload_bytes
    return MAX_BATCH_BYTES if path in ("/v1/select/batch", "/v1/shapes", "/v1/compare") else MAX_BODY_BYTES


def add_token(catalogue: Catalogue, name: str, scope: str) -> str:
    """Make a token; it is returned once and kept nowhere. Raises TokenError for a bad or taken name."""
    if not _NAME.fullmatch(name):
        raise TokenError(f"name must be 1 to 64 letters, digits, '_', '.' or '-', got {shorten(name)}")
    if scope not in SCOPES:
        raise TokenError(f"scope must be one of {', '.join(SCOPES)}, got {shorten(scope)}")
    token = _PREFIX + secrets.token_urlsafe(32)
    values = {"name": name, "hash": _hash(token), "scope": scope, "created_at": time.time()}
    with catalogue.write() as connection:
        insert = catalogue.insert(tokens).values(values).on_conflict_do_nothing()
        made = connection.execute(insert.returning(tokens.c.name)).first()
    if made is None:
        raise TokenError(f"there is a token named {name} already: revoke it first")
    return token


def list_tokens(catalogue: Catalogue) -> list[dict[str, Any]]:
    """Names, scopes and ages."""
    query = sa.select(tokens.c.name, tokens.c.scope, tokens.c.created_at).order_by(tokens.c.created_at)
    with catalogue.read() as connection:
        return rows_of(connection.execute(query))


def revoke_token(catalogue: Catalogue, name: str) -> None:
    """Every worker refuses it within a second or so. Raises TokenError where there is none of this name."""
    with catalogue.write() as connection:
        if not connection.execute(sa.delete(tokens).where(tokens.c.name == name)).rowcount:
            raise TokenError(f"there is no token named {shorten(name)}")


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Access:
    """The rules of one app. `needed` says whether tokens are; `hosts` are the names it may be called by, None any."""

    def __init__(self, settings: Settings, catalogue: Catalogue, *, needed: bool, hosts: frozenset[str] | None) -> None:
        self.settings, self.needed, self.hosts = settings, needed, hosts
        self._catalogue = catalogue
        self._known: dict[str, Caller] | None = None
        self._first: asyncio.Future[None] | None = None  # reading of the tokens, while there are none known
        self._lock = threading.Lock()
        self._rates: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client: (allowance, when)

    def refresh(self) -> None:
        """Read the tokens; CatalogueError where that cannot be, and those known stay."""
        with self._catalogue.read() as connection:
            found = rows_of(connection.execute(sa.select(tokens)))
        known = {row["hash"]: Caller(row["name"], row["scope"]) for row in found}
        with self._lock:
            self._known = known

    async def caller(self, authorization: str) -> Caller | None:
        """Who this is; None for a token that is none, or where there must be one. CatalogueError before any is read."""
        if not self.needed:
            return Caller(None, "admin")
        kind, _, token = authorization.partition(" ")
        if self._known is None:
            # In a thread, and one for all who ask: a catalogue may take long to say nothing.
            if self._first is None or self._first.done():
                self._first = asyncio.ensure_future(asyncio.to_thread(self.refresh))
            await asyncio.shield(self._first)
        return (self._known or {}).get(_hash(token.strip())) if kind.lower() == "bearer" else None

    def too_fast(self, client: str) -> float:
        """Seconds until this client may ask again; 0 where it may now."""
        rate = self.settings.rate_limit
        if not rate:
            return 0.0
        now = time.monotonic()
        allowance, before = self._rates.pop(client, (rate, now))
        allowance = min(rate, allowance + (now - before) * rate)  # at most a second's worth at once
        wait = 0.0 if allowance >= 1.0 else (1.0 - allowance) / rate
        self._rates[client] = (allowance if wait else allowance - 1.0, now)
        if len(self._rates) > MAX_CLIENTS:
            self._rates.popitem(last=False)
        return wait

    def foreign(self, headers: Mapping[str, str]) -> str | None:
        """Why a request comes from a page of another host, or None.

        A browser sends such pages' requests to this machine too. They show by the host that was asked for (a foreign
        name that resolves to this machine) or by the origin.
        """
        host = headers.get("host", "")
        if self.hosts is not None and _hostname(host) not in self.hosts:
            return f"Host must be one of {', '.join(sorted(self.hosts))}, got {shorten(host)}"
        origin = headers.get("origin")
        if origin and origin.partition("://")[2] != host:
            return f"Origin must be this service, got {shorten(origin)}"
        return None


def _hostname(host: str) -> str:
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.rpartition(":")[0] or host


class Guard:
    """Middleware that refuses what Access does not allow, and bounds bodies in size and in time."""

    def __init__(self, app: ASGIApp, access: Access, common: Callable[[], Mapping[str, str]]) -> None:
        self._app, self._access, self._common = app, access, common

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]

        async def refuse(status: int, detail: str, **more: str) -> None:
            extra = {name.replace("_", "-"): value for name, value in more.items()}
            await problem_response(status, detail, headers={**self._common(), **extra})(scope, receive, send)

        if why := self._access.foreign(headers):
            return await refuse(403, why)
        wanted = scope_needed(scope["method"], path)
        if wanted is not None:
            try:
                caller = await self._access.caller(headers.get("authorization", ""))
            except CatalogueError as error:  # before any token was read
                return await refuse(503, str(error), Retry_After="5")
            if caller is None:
                return await refuse(401, "Authorization must be 'Bearer' and a token", WWW_Authenticate="Bearer")
            if not caller.may(wanted):
                return await refuse(403, f"this needs a token of scope {wanted}, {caller.name} has {caller.scope}")
            client = caller.name or (scope.get("client") or ("",))[0]
            if wait := self._access.too_fast(client):
                most = f"{self._access.settings.rate_limit:.0f} requests a second are allowed"
                return await refuse(429, most, Retry_After=str(int(wait) + 1))
            scope.setdefault("state", {})["caller"] = caller
        limit = body_limit(path, self._access.settings)
        announced = headers.get("content-length", "0")
        too_large = f"The body must have at most {limit} bytes"
        if not (announced.isascii() and announced.isdigit()) or len(announced) > 18 or int(announced) > limit:
            return await refuse(413, too_large, Connection="close")
        left, complete = limit, False

        async def bounded() -> Message:
            nonlocal left, complete
            if complete:  # what now comes is the end of the connection, however late
                return await receive()
            # FastAPI lets its own exceptions through where it reads the body.
            try:
                with anyio.fail_after(self._access.settings.body_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "The body did not come in time", {"Connection": "close"}) from None
            left -= len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if left < 0:
                raise HTTPException(413, too_large, {"Connection": "close"})
            return message

        await self._app(scope, bounded, send)
