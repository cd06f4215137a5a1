"""The catalogue: what there is, in SQL. SQLite in the home, or PostgreSQL where several hosts share a home.

Files are the truth: profiles and models are found by reading the home, and `reconcile` brings the tables in line with
it. What only the catalogue knows (jobs, tokens, shape counts) is what a backup of it is for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tilewise.errors import TilewiseError
from tilewise.service.tables import REVISION, answers

BUSY_S = 10  # how long a writer of SQLite waits for another
_LOCK = 0x74696C65  # of PostgreSQL, while the schema is changed
_log = logging.getLogger("tilewise.service")


class CatalogueError(TilewiseError, RuntimeError):
    """The catalogue cannot be reached, is damaged, or has another schema."""


class Catalogue:
    """One database. It is opened at the first use, and brought up to date then."""

    def __init__(self, url: str | sa.URL) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._engine: sa.Engine | None = None

    @property
    def dialect(self) -> str:
        """sqlite or postgresql."""
        return sa.make_url(self.url).get_backend_name()

    def read(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """A transaction that only reads. Raises CatalogueError where there is no database."""
        return self._transaction(write=False)

    def write(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """A transaction that writes; kept whole, or not at all. Raises CatalogueError where there is no database."""
        return self._transaction(write=True)

    @contextlib.contextmanager
    def _transaction(self, *, write: bool) -> Iterator[sa.Connection]:
        with _asking(), self.engine().connect() as connection:
            connection = connection.execution_options(tilewise_write=write)
            with connection.begin():
                yield connection

    def engine(self) -> sa.Engine:
        """The engine, with the newest schema behind it."""
        if self._engine is not None:
            return self._engine
        with self._lock:
            if self._engine is None:
                engine = open_engine(self.url)
                try:
                    upgrade(engine)
                except BaseException:
                    engine.dispose()
                    raise
                self._engine = engine
        return self._engine

    def dispose(self) -> None:
        """Close every connection; the next use opens new ones."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
                self._engine = None

    def insert(self, table: sa.Table) -> Any:
        """An insert that knows `on_conflict_do_update`, which both databases have and SQLAlchemy keeps apart."""
        return postgresql.insert(table) if self.dialect == "postgresql" else sqlite.insert(table)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Makes a CatalogueError of a database that is away, locked or damaged. What it says of values is let through."""
    try:
        yield
    except (sa.exc.IntegrityError, sa.exc.DataError):
        raise
    except (sa.exc.DatabaseError, sa.exc.InterfaceError, sa.exc.TimeoutError) as error:
        raise CatalogueError(f"the catalogue does not answer: {_first_line(error)}") from error


def open_engine(url: str | sa.URL) -> sa.Engine:
    """An engine for one of the two databases. Raises CatalogueError for any other."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise CatalogueError("TILEWISE_DATABASE_URL must be such as postgresql://user@host/name") from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql", "postgres"):
        raise CatalogueError(f"TILEWISE_DATABASE_URL must name sqlite or postgresql, got {parsed.get_backend_name()!r}")
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    try:
        if parsed.get_dialect().is_async:
            raise CatalogueError(f"TILEWISE_DATABASE_URL must name a driver without asyncio, got {parsed.drivername!r}")
        if parsed.get_backend_name() == "postgresql":
            return sa.create_engine(parsed, pool_pre_ping=True, pool_size=4, max_overflow=4, pool_timeout=10,
                                    connect_args={"connect_timeout": 5, "application_name": "tilewise"})  # fmt: skip
        engine = sa.create_engine(parsed, connect_args={"timeout": BUSY_S, "check_same_thread": False})
    except (sa.exc.ArgumentError, ValueError, ImportError) as error:
        hint = ": pip install -e '.[postgresql]'" if getattr(error, "name", None) == "psycopg" else ""
        raise CatalogueError(f"TILEWISE_DATABASE_URL cannot be used: {_first_line(error)}{hint}") from error
    if parsed.database:
        try:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CatalogueError(f"the catalogue cannot be kept in {parsed.database}: {error}") from error

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the driver would begin transactions by rules of its own
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        # A writer takes its lock at once: one that read before it wrote could not wait for another, only fail.
        write = connection.get_execution_options().get("tilewise_write", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


@_asking()
def upgrade(engine: sa.Engine) -> list[str]:
    """Bring the schema up to date and return the revisions passed. Raises CatalogueError for a newer one than ours."""
    with engine.connect() as connection:
        present = _present(connection)
    if present == REVISION:
        return []
    # Here, because most processes find the schema as it should be, and need not wait for this import.
    from alembic import command
    from alembic.script import ScriptDirectory

    config = alembic_config()
    script = ScriptDirectory.from_config(config)
    known = [revision.revision for revision in reversed(list(script.walk_revisions()))]
    if present is not None and present not in known:
        raise CatalogueError(
            f"the catalogue has revision {present!r}, this tilewise knows {known[-1]!r}: take a newer one"
        )
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        # Whoever waited here finds the work done.
        present = _present(connection)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return known[known.index(present) + 1 :] if present else known


def alembic_config() -> Any:
    """Where Alembic finds the migrations."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(resources.files("tilewise.service") / "migrations"))
    return config


def _present(connection: sa.Connection) -> str | None:
    """The revision of the schema that is there, None where there is none."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def rows_of(result: sa.CursorResult[Any]) -> list[dict[str, Any]]:
    """The rows as dicts."""
    return [dict(row) for row in result.mappings()]


def save_answer(
    catalogue: Catalogue, key: str, fingerprint: str, status: int, body: Mapping[str, Any], connection: sa.Connection
) -> None:
    """Keep an answer for whoever sends the request again; the first one stays. Old ones are forgotten."""
    now = time.time()
    connection.execute(sa.delete(answers).where(answers.c.created_at < now - ANSWER_KEPT_S))
    values = {"key": key, "fingerprint": fingerprint, "status": status, "body": dict(body), "created_at": now}
    connection.execute(catalogue.insert(answers).values(values).on_conflict_do_nothing())


def saved_answer(key: str, connection: sa.Connection) -> dict[str, Any] | None:
    """The answer kept under a key."""
    found = connection.execute(sa.select(answers).where(answers.c.key == key)).mappings().first()
    return None if found is None else dict(found)


ANSWER_KEPT_S = 24 * 3600.0


def _first_line(error: BaseException) -> str:
    origin = getattr(error, "orig", None) or error
    return str(origin).strip().partition("\n")[0]
