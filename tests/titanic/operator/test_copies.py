"""Backups of a SQLite file while it is used, and the move to PostgreSQL."""

import json
import os
import shutil
import sqlite3
import subprocess
import threading
from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa
from support.databases import Database, check_counts, new_file
from support.processes import BIN, TIMEOUT_SECONDS, run
from support.titanics import answer, serving, stored

from zmdp.clients import Client
from zmdp.mdp.errors import SettingError, TitanicError
from zmdp.titanic import Titanic
from zmdp.titanic.api.schedules import parse_schedule
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.store import staging
from zmdp.titanic.operator import copies

NOW = 1_800_000_000.0


@pytest.fixture
def file(tmp_path):
    """A SQLite file whose requests are still in its write-ahead log, because a connection is open."""
    path = tmp_path / "titanic.db"
    new_file(path)
    database = Database(str(path))
    yield database
    database.engine.dispose()


@contextmanager
def opened(path):
    """Open a file to read it."""
    engine = schema.open_engine(schema.database_url(str(path)), write=False)
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.fixture
def reading(file):
    with opened(file.url) as engine:
        yield engine


def value(path, sql):
    with opened(path) as engine, engine.begin() as connection:
        return connection.exec_driver_sql(sql).scalar()


def meanwhile(monkeypatch, do):
    """Do something once a backup has begun to read."""
    current = schema.current
    monkeypatch.setattr(schema, "current", lambda connection: (current(connection), do())[0])


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("titanic.db"))


def contents(path):
    return stored(str(path))


# ── backups ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_backup_has_what_a_copy_of_the_file_lacks(file, reading, tmp_path):
    for number in range(20):
        file.add("echo", b"%d" % number, key=f"{number}")
    shutil.copy(tmp_path / "titanic.db", tmp_path / "cp")
    assert value(tmp_path / "cp", "SELECT count(*) FROM titanic_requests") == 0  # which is why there is a command
    target = tmp_path / "backup.db"
    assert copies.back_up(reading, target) == target.stat().st_size
    assert [name for name in names(tmp_path) if not name.startswith("cp")] == ["backup.db"]
    assert contents(target) == contents(tmp_path / "titanic.db")
    assert value(target, "PRAGMA integrity_check") == "ok"
    assert target.stat().st_mode == (tmp_path / "titanic.db").stat().st_mode


def test_a_backup_is_of_one_moment_while_others_write(file, reading, tmp_path, monkeypatch):
    for _ in range(10):
        file.add("echo", bytes(20_000))
    before = file.count()
    meanwhile(monkeypatch, lambda: file.add("late", b"", key="late"))
    copies.back_up(reading, tmp_path / "backup.db")
    assert file.count() == before + 1
    with opened(tmp_path / "backup.db") as copy:
        check_counts(copy)
    assert value(tmp_path / "backup.db", "SELECT count(*) FROM titanic_requests") == before


@pytest.mark.parametrize("there", ["backup.db", "backup.db-wal", "backup.db-journal", "titanic.db"])
def test_nothing_is_overwritten(file, reading, tmp_path, there):
    """SQLite would read a log that lies beside the file as a part of it."""
    file.add()
    target = tmp_path / ("titanic.db" if there == "titanic.db" else "backup.db")
    if there != "titanic.db":
        (tmp_path / there).write_bytes(b"theirs")
    with pytest.raises(SettingError, match=f"{there} exists: choose the name of a new file"):
        copies.back_up(reading, target)
    assert there == "titanic.db" or (tmp_path / there).read_bytes() == b"theirs"
    assert file.count() == 1


def test_a_file_that_appears_meanwhile_is_not_overwritten(file, reading, tmp_path, monkeypatch):
    meanwhile(monkeypatch, lambda: (tmp_path / "backup.db").write_bytes(b"theirs"))
    with pytest.raises(SettingError, match="exists by now"):
        copies.back_up(reading, tmp_path / "backup.db")
    assert (tmp_path / "backup.db").read_bytes() == b"theirs"
    assert names(tmp_path) == ["backup.db"]


def test_an_interrupted_backup_leaves_nothing(file, reading, tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    meanwhile(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        copies.back_up(reading, tmp_path / "backup.db")
    assert names(tmp_path) == []


def test_a_full_disk_leaves_nothing(file, tmp_path):
    file.add("echo", bytes(2_000_000))
    command = f"ulimit -f 1000; exec {BIN}/titanic backup {tmp_path}/backup.db --db {file.url}"
    limited = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert limited.returncode == 6
    assert limited.stderr.decode().startswith(f"titanic: cannot write the backup {tmp_path}/backup.db: ")
    assert names(tmp_path) == []


def test_no_backup_of_what_is_no_database_of_titanic(tmp_path):
    with closing(sqlite3.connect(tmp_path / "titanic.db")) as theirs:
        theirs.execute("CREATE TABLE other (a)")
    with opened(tmp_path / "titanic.db") as engine, pytest.raises(TitanicError, match="has no tables of Titanic"):
        copies.back_up(engine, tmp_path / "backup.db")
    with opened(tmp_path / "titanic.db") as engine, pytest.raises(SettingError, match="there is no folder"):
        copies.back_up(engine, tmp_path / "nowhere" / "backup.db")
    assert names(tmp_path) == []


def test_a_backup_while_titanic_accepts(file, bench, tmp_path):
    """Every request that was accepted before the backup is in it."""
    accepted, ending = [], threading.Event()
    with serving(bench.endpoint, file.url), Client(bench.endpoint, timeout=TIMEOUT_SECONDS) as client:

        def submit():
            titanic = Titanic(client)
            while not ending.is_set():
                accepted.append(titanic.submit("nobody", bytes(5000)).uuid)

        thread = threading.Thread(target=submit)
        thread.start()
        try:
            for number in range(3):
                before = list(accepted)
                done = run("titanic", "backup", str(tmp_path / f"{number}.db"), "--json", TITANIC_DB=file.url)
                told = json.loads(done.stdout)
                assert told["bytes"] == os.path.getsize(tmp_path / f"{number}.db")
                assert set(before) <= {row["uuid"] for row in contents(tmp_path / f"{number}.db")["requests"]}
        finally:
            ending.set()
            thread.join()


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_postgresql_has_its_own_backups(own_url, tmp_path, in_this_process):
    done = in_this_process("titanic", "backup", str(tmp_path / "x"), TITANIC_DB=own_url)
    assert (done.returncode, b"pg_dump --format custom" in done.stderr) == (2, True)


# ── the move to PostgreSQL ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def full(file):
    """A file with requests in all states, PARTIALs, keys, a schedule and a write of Spark's; it is not open."""
    file.done("echo", b"\0\xff", reply=(b"one", b"\xfe"))
    file.done("resize", code=500, error="größe", reply=None)
    file.add("echo", b"later", delay=3600, headers={"user": "ü"}, owner="shop")
    lease = store.Lease("gone", 10)
    file.add("running")
    with file.engine.begin() as connection:
        ((claimed,),) = store.claim(connection, [store.Claim("running", 1, lease, NOW)])
        store.add_partials(connection, [store.Partial(claimed.id, 1, number, b"part") for number in range(3)])
        made = parse_schedule([b"nightly", b"report", b"all"], {"cron": "@daily", "timezone": "Europe/Berlin"}, NOW)
        store.edit_schedules(connection, [store.Edit("add", made.name, "", NOW, made)])
        staging.commit(connection, staging.Write("job", "j"), [], NOW)
    uuid = file.add("echo", b"waits", key="k", priority=7)
    file.add("echo", b"closed")
    file.run("DELETE FROM titanic_requests WHERE id = (SELECT max(id) FROM titanic_requests)")
    file.engine.dispose()
    return uuid


def move(file, engine):
    return copies.move(schema.database_url(file.url), engine)


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_everything_is_moved(file, full, db, bench):
    before = contents(file.url)
    done = run("titanic", "move", file.url, "--json", TITANIC_DB=db.url)
    assert json.loads(done.stdout) == {
        "titanic_requests": 5, "titanic_parts": 3, "titanic_keys": 1, "titanic_schedules": 1, "titanic_written": 1,
    }, done.stderr  # fmt: skip
    found, after = contents(db.url), contents(file.url)
    assert after == before
    for rows in (*before.values(), *found.values()):
        for row in rows:
            if "uuid" in row:
                row["uuid"] = str(row["uuid"]).replace("-", "")
    assert found == before
    check_counts(db.engine)
    assert db.run("SELECT kind, name FROM titanic_written") == [("job", "j")]
    assert db.run("SELECT name, cron, timezone FROM titanic_schedules") == [("nightly", "@daily", "Europe/Berlin")]
    with serving(bench.endpoint, db.url), Client(bench.endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client:
        titanic = Titanic(client)
        assert titanic.submit("echo", b"again", key="k").uuid == full  # which is executed once
        new = titanic.submit("new", b"")
        assert answer(bench.x1_worker(b"echo")) == b"waits"
        assert titanic.ticket(full).result(timeout=TIMEOUT_SECONDS) == [b"done"]
        answer(bench.x1_worker(b"running"))  # that Titanic has ended
        new_worker = bench.x1_worker(b"new")
        answer(new_worker)
        new.result(timeout=TIMEOUT_SECONDS)
    rows = {row["uuid"].hex: row for row in contents(db.url)["requests"]}
    assert rows[new.uuid]["id"] == 7  # the number of one that was closed is not used again
    assert rows[full]["ended"] == 3


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_no_move_while_another_program_has_the_file_open(file, full, db):
    with file.engine.connect() as open_file:
        open_file.exec_driver_sql("SELECT 1 FROM titanic_requests").all()
        open_file.rollback()
        with pytest.raises(TitanicError, match="another program has it open: stop Titanic first"):
            move(file, db.engine)
    assert db.count() == 0


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_nothing_is_moved_to_a_database_that_is_not_empty(file, full, db):
    db.add("theirs")
    with pytest.raises(TitanicError, match=r"is not empty \(titanic_requests has rows\), so nothing was moved"):
        move(file, db.engine)
    assert (db.count(), db.count("titanic_keys")) == (1, 0)


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_all_is_moved_or_nothing(file, full, db):
    db.run("ALTER TABLE titanic_written ADD CHECK (kind <> 'job')")  # the last table
    with pytest.raises(sa.exc.IntegrityError):
        move(file, db.engine)
    assert (db.count(), db.count("titanic_keys"), db.count("titanic_counts")) == (0, 0, 0)
    db.run("ALTER TABLE titanic_written DROP CONSTRAINT titanic_written_kind_check")
    assert move(file, db.engine)["titanic_requests"] == 5


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_large_bodies_are_moved_in_parts(file, db, monkeypatch):
    monkeypatch.setattr(copies, "BYTES_AT_ONCE", 100_000)
    monkeypatch.setattr(copies, "ROWS_AT_ONCE", 3)
    for size in (10, 90_000, 90_000, 10, 10, 10, 10):
        file.add("echo", bytes(size))
    file.engine.dispose()
    assert copies.move(schema.database_url(file.url), db.engine)["titanic_requests"] == db.count() == 7


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_what_is_wrong_with_a_move(file, full, db, empty_url, tmp_path, in_this_process):
    for arguments, told in (
        (("move", str(tmp_path / "none.db"), "--db", db.url), "there is no database"),
        (("move", file.url, "--db", str(tmp_path / "other.db")), "it must be the PostgreSQL database to which"),
        (("move", file.url, "--db", empty_url), "has no tables yet: run `titanic db upgrade"),
        (("move", file.url, "--db", "postgresql://me:secret@/x?host=/none"), "postgresql://me:***@/x?host=%2Fnone: "),
    ):
        done = in_this_process("titanic", *arguments)
        assert done.returncode, arguments
        assert told in done.stderr.decode()
        assert b"secret" not in done.stderr
    with closing(sqlite3.connect(file.url)) as connection:
        connection.execute("UPDATE titanic_version SET version_num = '0000'")
        connection.commit()
    with pytest.raises(schema.SchemaError, match="has tables of version 0000, from a newer zmdp"):
        move(file, db.engine)
