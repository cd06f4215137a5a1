"""A real PostgreSQL for tests: what TILEWISE_TEST_DATABASE_URL names, or a server started here from its binaries."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest


@functools.cache
def server_url() -> str:
    """URL of a server where databases may be made; the test is skipped where there is none."""
    if url := os.environ.get("TILEWISE_TEST_DATABASE_URL"):
        return url
    server = own_server()
    atexit.register(server.stop)
    return server.url


def own_server() -> Server:
    """A server started here, for the caller to stop; the test is skipped where PostgreSQL is not installed."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs psycopg: pip install -e '.[postgresql]'")
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(shutil.which("initdb") or "")]
    if not binaries[-1].is_file():
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    return Server(binaries[-1].parent)


def fresh_database() -> str:
    """URL of a new, empty database."""
    import sqlalchemy as sa

    url = sa.make_url(server_url()).set(drivername="postgresql+psycopg")
    name = f"tilewise_{uuid.uuid4().hex[:12]}"
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return url.set(database=name).render_as_string(hide_password=False)


class Server:
    """A server of our own, on a socket in a temporary folder."""

    def __init__(self, binaries: Path) -> None:
        self.binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="tilewise-pg-"))
        self.user = "postgres" if os.getuid() == 0 else None  # it refuses to run as root
        if self.user:
            os.chown(self.folder, pwd.getpwnam(self.user).pw_uid, -1)
        self._call("initdb", "-D", str(self.folder / "data"), "-U", "postgres", "--auth=trust", "--no-sync")
        self.url = f"postgresql://postgres@/postgres?host={self.folder}"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, and wait until it answers."""
        command = [
            self.binaries / "postgres", "-D", self.folder / "data", "-k", self.folder, "-c", "listen_addresses=",
            "-c", "fsync=off", "-c", "max_connections=50",
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, user=self.user)
        self._call("pg_isready", "-h", str(self.folder), "-t", "30", again=100)
        return self.process

    def kill(self) -> None:
        """As the OOM killer would: every process of it, at once."""
        for pid in subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split():
            subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        self.process.kill()
        self.process.wait()
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """The end of it."""
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, name: str, *arguments: str, again: int = 0) -> None:
        while True:
            done = subprocess.run(
                [self.binaries / name, *arguments], capture_output=True, text=True, check=False, user=self.user,
                cwd=self.folder,
            )  # fmt: skip
            if done.returncode == 0:
                return
            if again == 0:
                raise RuntimeError(f"{name} failed: {done.stdout}{done.stderr}")
            again -= 1
            time.sleep(0.1)
