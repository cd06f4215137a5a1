"""The catalogue and its jobs, on real databases: SQLite, and PostgreSQL where there is one."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")
pytest.importorskip("fastapi")
pytest.importorskip("pyarrow")

import postgres_server
import sqlalchemy as sa
import synthetic

from tilewise.data.store import import_file, write_rows
from tilewise.service import jobs, tables
from tilewise.service.access import TokenError, add_token, list_tokens, revoke_token
from tilewise.service.backup import BackupError, backup, restore
from tilewise.service.catalogue import (
    Catalogue,
    CatalogueError,
    alembic_config,
    open_engine,
    rows_of,
    save_answer,
    saved_answer,
    upgrade,
)
from tilewise.service.files import clear_left, reconcile, stored_files
from tilewise.service.jobs import Lease

OP, ARCH = synthetic.OP, "h100"
LEASE_S = 30.0


def database(kind: str, folder: Path) -> str:
    return f"sqlite:///{folder / 'catalogue.db'}" if kind == "sqlite" else postgres_server.fresh_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def catalogue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalogue]:
    made = Catalogue(database(request.param, tmp_path))
    yield made
    made.dispose()


def queue(catalogue: Catalogue, arch: str = ARCH) -> str:
    with catalogue.write() as connection:
        return jobs.create(catalogue, connection, op=OP, arch=arch, parameters={"seed": 0})


def job_of(catalogue: Catalogue, job_id: str) -> dict[str, Any]:
    with catalogue.read() as connection:
        found = jobs.get(connection, job_id)
    assert found is not None
    return found


def claim(catalogue: Catalogue, owner: str, attempts: int = 3) -> dict[str, Any] | None:
    return jobs.claim(catalogue, owner, lease_s=LEASE_S, attempts=attempts)


def silence(catalogue: Catalogue, job_id: str) -> None:
    """As if its runner had said nothing for longer than its lease."""
    with catalogue.write() as connection:
        connection.execute(sa.update(tables.jobs).where(tables.jobs.c.id == job_id).values(lease_until=time.time() - 1))


# --- schema


def test_migrations_make_the_tables_of_the_code(catalogue: Catalogue) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    assert ScriptDirectory.from_config(alembic_config()).get_current_head() == tables.REVISION
    with catalogue.engine().connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
    assert upgrade(catalogue.engine()) == []


def test_a_newer_catalogue_is_refused_by_name(catalogue: Catalogue) -> None:
    with catalogue.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(CatalogueError, match="revision '9999', this tilewise knows '0001'"):
        Catalogue(catalogue.url).engine()


def test_processes_that_upgrade_at_once_make_one_schema(tmp_path: Path) -> None:
    for kind in ("sqlite", "postgresql"):
        url = database(kind, tmp_path)
        passed, failed = [], []

        def run(url: str = url, passed: list[Any] = passed, failed: list[Any] = failed) -> None:
            try:
                engine = open_engine(url)
                passed.append(upgrade(engine))
                engine.dispose()
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert sorted(map(len, passed)) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://host/name", "must name sqlite or postgresql"),
        ("nonsense", "must be such as"),
        ("postgresql://host:port/name", "must be such as"),
        ("postgresql+nope://host/name", "cannot be used: Can't load plugin"),
        ("sqlite+pysqlcipher:///catalogue.db", "cannot be used: No module named"),
        ("sqlite+aiosqlite:///catalogue.db", "must name a driver without asyncio"),
        ("sqlite:///catalogue.db?timeout=soon", "cannot be used: could not convert"),
        ("sqlite:////proc/nowhere/catalogue.db", "cannot be kept in"),
        ("postgresql://nobody@127.0.0.1:1/none", "does not answer"),
    ],
)
def test_a_database_that_cannot_be_used_is_named(url: str, why: str) -> None:
    if url.startswith("postgresql"):
        pytest.importorskip("psycopg")
    with pytest.raises(CatalogueError, match=why):
        Catalogue(url).engine()


def test_a_damaged_file_is_named_by_every_use_of_it(tmp_path: Path) -> None:
    (tmp_path / "catalogue.db").write_text("junk" * 1000)
    catalogue = Catalogue(database("sqlite", tmp_path))
    engine = open_engine(catalogue.url)
    for use in (catalogue.engine, lambda: upgrade(engine), lambda: list_tokens(catalogue)):
        with pytest.raises(CatalogueError, match="does not answer: file is not a database"):
            use()
    engine.dispose()


# --- jobs


def test_one_job_runs_and_one_waits_for_an_op_and_arch(catalogue: Catalogue) -> None:
    first = queue(catalogue)
    with pytest.raises(jobs.JobQueuedError, match=first) as refused:
        queue(catalogue)
    assert refused.value.job_id == first
    taken = claim(catalogue, "a")
    assert taken is not None
    assert (taken["id"], taken["attempt"]) == (first, 1)
    second, other = queue(catalogue), queue(catalogue, "mi355x")
    taken = claim(catalogue, "b")
    assert taken is not None
    assert taken["id"] == other  # the second one waits for the first
    assert claim(catalogue, "b") is None
    jobs.end(catalogue, Lease(first, "a"), "stopped", "a reason")
    assert job_of(catalogue, first)["state"] == "stopped"
    taken = claim(catalogue, "b")
    assert taken is not None
    assert taken["id"] == second


def test_many_runners_get_a_job_once(catalogue: Catalogue) -> None:
    queue(catalogue)
    taken: list[Any] = []

    def run(owner: str) -> None:
        own = Catalogue(catalogue.url)
        try:
            taken.append(claim(own, owner))
        except sa.exc.IntegrityError:
            taken.append(None)
        own.dispose()

    threads = [threading.Thread(target=run, args=(f"runner{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 6
    assert len([one for one in taken if one is not None]) == 1


def test_a_silent_job_is_taken_over_and_its_old_runner_may_say_no_more(catalogue: Catalogue) -> None:
    job_id = queue(catalogue)
    assert claim(catalogue, "a")
    old = Lease(job_id, "a")
    jobs.report(catalogue, old, "training", stage="train", done=3, total=9)
    assert claim(catalogue, "b") is None  # the lease holds
    silence(catalogue, job_id)
    assert not jobs.renew(catalogue, old, LEASE_S)  # late, but nobody else has it yet
    silence(catalogue, job_id)
    taken = claim(catalogue, "b")
    assert taken is not None
    assert (taken["stage"], taken["attempt"]) == ("train", 2)
    for call in (
        lambda: jobs.report(catalogue, old, "still here"),
        lambda: jobs.renew(catalogue, old, LEASE_S),
        lambda: jobs.end(catalogue, old, "promoted", "no"),
        lambda: jobs.hand_back(catalogue, old),
    ):
        with pytest.raises(jobs.LostJobError):
            call()
    assert job_of(catalogue, job_id)["state"] == "running"
    with catalogue.read() as connection:
        texts = [line["text"] for line in jobs.log_of(connection, job_id)]
    assert texts == ["training", "taken up again in the stage train: its process was gone"]


def test_a_job_whose_process_dies_again_and_again_ends_as_failed(catalogue: Catalogue) -> None:
    job_id = queue(catalogue)
    for attempt in (1, 2):
        taken = claim(catalogue, "a", attempts=2)
        assert taken is not None
        assert taken["attempt"] == attempt
        silence(catalogue, job_id)
    assert claim(catalogue, "a", attempts=2) is None
    ended = job_of(catalogue, job_id)
    assert (ended["state"], ended["reason"]) == (
        "failed",
        "its process died 2 times, the last time in the stage import",
    )


def test_a_job_that_is_handed_back_goes_on_at_once_and_the_start_does_not_count(catalogue: Catalogue) -> None:
    job_id = queue(catalogue)
    for _ in range(5):
        taken = claim(catalogue, "a", attempts=1)
        assert taken is not None
        jobs.hand_back(catalogue, Lease(job_id, "a"))


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_by_its_runner(catalogue: Catalogue) -> None:
    waiting = queue(catalogue)
    assert jobs.cancel(catalogue, waiting)["state"] == "cancelled"  # type: ignore[index]
    assert claim(catalogue, "a") is None
    running = queue(catalogue)
    assert claim(catalogue, "a")
    assert jobs.cancel(catalogue, running)["state"] == "running"  # type: ignore[index]
    assert jobs.renew(catalogue, Lease(running, "a"), LEASE_S)
    silence(catalogue, running)
    assert claim(catalogue, "b") is None  # nobody runs what is to be cancelled
    assert job_of(catalogue, running)["state"] == "cancelled"
    assert jobs.cancel(catalogue, running)["state"] == "cancelled"  # type: ignore[index]
    assert jobs.cancel(catalogue, "0" * 32) is None


def test_the_log_of_a_job_is_read_on_from_a_line(catalogue: Catalogue) -> None:
    job_id = queue(catalogue)
    with catalogue.write() as connection:
        for number in range(5):
            jobs.say(connection, job_id, f"line {number}")
        lines = jobs.log_of(connection, job_id)
        assert [line["text"] for line in jobs.log_of(connection, job_id, after=lines[2]["id"])] == ["line 3", "line 4"]


# --- tokens, answers


def test_tokens_are_made_once_and_only_their_hash_is_kept(catalogue: Catalogue) -> None:
    token = add_token(catalogue, "ci", "upload")
    assert [(one["name"], one["scope"]) for one in list_tokens(catalogue)] == [("ci", "upload")]
    with catalogue.read() as connection:
        kept = str(rows_of(connection.execute(sa.select(tables.tokens))))
    assert token not in kept
    assert token.removeprefix("tw_") not in kept
    with pytest.raises(TokenError, match="already"):
        add_token(catalogue, "ci", "read")
    for name in ("", "a b", "x" * 65, "../x"):
        with pytest.raises(TokenError, match="name must be"):
            add_token(catalogue, name, "read")
    with pytest.raises(TokenError, match="scope must be one of read, upload, admin"):
        add_token(catalogue, "other", "root")
    revoke_token(catalogue, "ci")
    assert list_tokens(catalogue) == []
    with pytest.raises(TokenError, match="no token named"):
        revoke_token(catalogue, "ci")


def test_the_first_answer_to_a_key_stays_and_old_ones_go(catalogue: Catalogue) -> None:
    with catalogue.write() as connection:
        save_answer(catalogue, "key", "a" * 64, 201, {"n": 1}, connection)
        save_answer(catalogue, "key", "b" * 64, 200, {"n": 2}, connection)
        saved = saved_answer("key", connection)
        assert saved is not None
        assert (saved["fingerprint"], saved["status"], saved["body"]) == ("a" * 64, 201, {"n": 1})
        connection.execute(sa.update(tables.answers).values(created_at=time.time() - 2 * 86400))
        save_answer(catalogue, "other", "c" * 64, 200, {}, connection)
        assert saved_answer("key", connection) is None


# --- files are the truth


def filled(home: Path) -> str:
    """A home with one profile and one model; the digest of the profile."""
    pytest.importorskip("sklearn")
    write_rows(synthetic.synthetic_rows(synthetic.SHAPES[:2], arch=ARCH), home / "rows.parquet")
    (file,) = import_file(home / "rows.parquet", home).files
    synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:4], arch=ARCH)
    return file.digest


def contents(catalogue: Catalogue, *names: str) -> dict[str, list[dict[str, Any]]]:
    with catalogue.read() as connection:
        return {
            table.name: rows_of(connection.execute(sa.select(table).order_by(*table.primary_key)))
            for table in tables.metadata.sorted_tables
            if not names or table.name in names
        }


def test_a_lost_catalogue_is_made_again_from_the_files(catalogue: Catalogue, tmp_path: Path) -> None:
    home = tmp_path / "home"
    digest = filled(home)
    reconcile(catalogue, home)
    before = contents(catalogue, "files", "models")
    assert [row["digest"] for row in before["files"]] == [digest]
    assert len(before["models"]) == 1
    with catalogue.write() as connection:
        connection.execute(sa.delete(tables.files))
        connection.execute(sa.delete(tables.models))
    reconcile(catalogue, home)
    assert contents(catalogue, "files", "models") == before
    stored_files(home)[digest].unlink()
    reconcile(catalogue, home)
    assert contents(catalogue, "files")["files"] == []


def test_what_killed_processes_left_is_removed_and_what_is_under_way_stays(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    import os

    home = tmp_path / "home"
    living = queue(catalogue)
    left = [
        "incoming/old",
        f"models/{OP}/{ARCH}/.current.x1",
        f"models/{OP}/{ARCH}/versions/.abc.x2/part",
        "jobs/dead/part",
    ]
    kept = [
        "incoming/new",
        f"models/{OP}/{ARCH}/current",
        f"models/{OP}/{ARCH}/versions/abc/part",
        f"jobs/{living}/part",
    ]
    for name in left + kept:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    for path in home.rglob("*"):
        if path != home / "incoming" / "new":
            os.utime(path, (1, 1))
    clear_left(catalogue, home)
    assert [name for name in left if (home / name).exists()] == []
    assert [name for name in kept if not (home / name).exists()] == []


@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_a_backup_goes_back_into_either_database(catalogue: Catalogue, target: str, tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    filled(home)
    reconcile(catalogue, home)
    add_token(catalogue, "ci", "read")
    under_way = queue(catalogue)
    with catalogue.write() as connection:
        jobs.say(connection, under_way, "a line")
    files = backup(catalogue, home, tmp_path / "backup.tar")
    restored = Catalogue(database(target, tmp_path / "restored"))
    assert restore(restored, other, tmp_path / "backup.tar") == files
    before, after = contents(catalogue), contents(restored)
    assert after.pop("jobs")[0] | {"state": "queued", "reason": "", "ended_at": None} == before.pop("jobs")[0]
    assert after == before
    for path in (path for folder in ("profiles", "models") for path in (home / folder).rglob("*") if path.is_file()):
        name = path.relative_to(home)
        assert name.name.startswith(".") or (other / name).read_bytes() == path.read_bytes()
    with restored.write() as connection:
        jobs.say(connection, under_way, "goes on")  # ids go on after the last one
    with pytest.raises(BackupError, match="must have no profiles"):
        restore(restored, other, tmp_path / "backup.tar")
    with pytest.raises(BackupError, match="must be empty"):
        restore(restored, tmp_path / "third", tmp_path / "backup.tar")
    restored.dispose()


def test_a_file_that_is_no_backup_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.tar").write_text("no tar")
    with pytest.raises(BackupError, match="is no backup"):
        restore(Catalogue(f"sqlite:///{tmp_path / 'a.db'}"), tmp_path / "home", tmp_path / "none.tar")


def packed(path: Path, content: Any, *names: str) -> Path:
    """A backup with these tables, and files of these names."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    with tarfile.open(path, "w") as archive:
        for name in ("catalogue.json", *names):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return path


TOKEN = {"name": "ci", "hash": "0", "scope": "read", "created_at": 1.0}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([1], "must be of revision 0001, got None"),
        (b"[" * 100_000, "is no backup"),
        ({"revision": ["0001"], "tables": {}}, "must be of revision 0001, got"),
        ({"revision": "0001"}, "must have the rows of each table"),
        ({"revision": "0001", "tables": {"tokens": 1}}, "must have the rows of each table"),
        ({"revision": "0001", "tables": {"jobs": [5]}}, "a row of jobs must have id, op, .*, got 5"),
        ({"revision": "0001", "tables": {"tokens": [{"name": "ci"}]}}, "a row of tokens must have name, hash, "),
        ({"revision": "0001", "tables": {"tokens": [{**TOKEN, "name": None}]}}, "a row does not fit into tokens"),
        ({"revision": "0001", "tables": {"tokens": [{**TOKEN, "name": ["ci"]}]}}, "a row does not fit into tokens"),
        ({"revision": "0001", "tables": {"tokens": [{**TOKEN, "created_at": "now"}]}}, "created_at is 'now'"),
        ({"revision": "0001", "tables": {"tokens": [{**TOKEN, "created_at": 10**400}]}}, "too large|out of range"),
        ({"revision": "0001", "tables": {"tokens": [TOKEN, TOKEN]}}, "a row does not fit into tokens"),
    ],
)
def test_a_backup_whose_tables_are_none_changes_nothing(
    catalogue: Catalogue, content: Any, why: str, tmp_path: Path
) -> None:
    source = packed(tmp_path / "backup.tar", content, f"profiles/{OP}/{ARCH}/one.parquet")
    with pytest.raises(BackupError, match=why):
        restore(catalogue, tmp_path / "home", source)
    assert not (tmp_path / "home").exists()
    assert not any(contents(catalogue).values())


def test_a_restore_that_was_cut_off_can_be_tried_again(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    filled(home)
    first = Catalogue(database("sqlite", tmp_path / "first"))
    add_token(first, "ci", "read")
    files = backup(first, home, tmp_path / "backup.tar")
    first.dispose()
    left = [3]  # files that the disk has room for

    def full(source: Any, target: Any) -> None:
        left[0] -= 1
        target.write(source.read(100 if left[0] < 0 else -1))
        if left[0] < 0:
            raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", full)
        with pytest.raises(OSError, match="no space left"):
            restore(catalogue, other, tmp_path / "backup.tar")
    assert files > 3
    assert [path for path in other.rglob("*") if path.is_file()] == []
    cut = tmp_path / "cut.tar"
    cut.write_bytes((tmp_path / "backup.tar").read_bytes()[:-20_000])
    with pytest.raises(BackupError, match="is no backup: unexpected end of data"):
        restore(catalogue, other, cut)
    assert restore(catalogue, other, tmp_path / "backup.tar") == files
    assert [one["name"] for one in list_tokens(catalogue)] == ["ci"]


@pytest.mark.parametrize("name", ["models/../../out", "profiles/../catalogue.db", "models", "profiles/link"])
def test_a_backup_with_anything_but_files_of_a_home_is_refused(name: str, tmp_path: Path) -> None:
    first = Catalogue(f"sqlite:///{tmp_path / 'a.db'}")
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / "one").write_text("kept")
    backup(first, home, tmp_path / "backup.tar")
    with tarfile.open(tmp_path / "backup.tar", "a") as archive:
        member = tarfile.TarInfo(name)
        if name.endswith("link"):
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(member, io.BytesIO())
    second = Catalogue(f"sqlite:///{tmp_path / 'b.db'}")
    with pytest.raises(BackupError, match="is no file of a home"):
        restore(second, tmp_path / "other", tmp_path / "backup.tar")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "other").exists(), "nothing is half-written"
    first.dispose()
    second.dispose()
