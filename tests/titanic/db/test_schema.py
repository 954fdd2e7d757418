"""The database: its URL, how it is opened, its tables and their versions."""

import gc
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from shlex import quote
from uuid import uuid4

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import make_url
from support.processes import TIMEOUT_SECONDS

from zmdp.mdp.errors import SettingError
from zmdp.mdp.program.extras import install_command
from zmdp.titanic import enqueue
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.engine import prepare
from zmdp.titanic.db.schema import SchemaError, database_url, file_identity, open_engine, shown
from zmdp.titanic.db.store import models as tables
from zmdp.titanic.db.store.models import VERSION_TABLE, Base
from zmdp.titanic.operator import admin

only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
TABLES = {VERSION_TABLE, *Base.metadata.tables}
SECRET = "hunter2"


@pytest.fixture
def opened():
    """`opened(url, **how)` returns an engine that is disposed of after the test."""
    engines = []

    def open_(url, **how):
        engines.append(open_engine(database_url(url), **how))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.dispose()


@pytest.fixture
def empty(opened, empty_url):
    return opened(empty_url, create=True)


@pytest.fixture
def own(opened, own_url):
    """A database with tables, for this test only."""
    return opened(own_url)


def tables_of(engine):
    return set(sa.inspect(engine).get_table_names())


def run(engine, sql):
    with engine.begin() as connection:
        found = connection.exec_driver_sql(sql)
        return [tuple(row) for row in found] if found.returns_rows else []


# ── where it is ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("sqlite:///titanic.db", "sqlite+pysqlite:///titanic.db"),
        ("sqlite:////var/lib/titanic.db", "sqlite+pysqlite:////var/lib/titanic.db"),
        ("sqlite+pysqlite:///x.db", "sqlite+pysqlite:///x.db"),
        ("sqlite+aiosqlite:///x.db", "sqlite+pysqlite:///x.db"),
        ("titanic.db", "sqlite+pysqlite:///titanic.db"),
        ("/var/lib/titanic.db", "sqlite+pysqlite:////var/lib/titanic.db"),
        ("postgresql://me@host/name", "postgresql+psycopg://me@host/name"),
        ("postgres://me@host:5433/name", "postgresql+psycopg://me@host:5433/name"),
        ("postgresql+psycopg://host/name", "postgresql+psycopg://host/name"),
        ("postgresql+asyncpg://host/name", "postgresql+psycopg://host/name"),
        ("postgresql+psycopg2://host/name", "postgresql+psycopg://host/name"),
        ("postgresql:///name?host=/run/postgresql", "postgresql+psycopg:///name?host=/run/postgresql"),
        (make_url("postgresql://me:x@host/name"), "postgresql+psycopg://me:x@host/name"),
        (make_url("sqlite:///x.db"), "sqlite+pysqlite:///x.db"),
    ],
    ids=str,
)
def test_accepted_database_urls(given, taken):
    assert database_url(given) == make_url(taken)


@pytest.mark.parametrize("path", ["what?x=y.db", "50%.db", "a b.db", "größe.db", "a#b.db", "a@b:c.db", "-", "~x"])
def test_a_path_may_contain_any_characters(path, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(opened(path, create=True), "CREATE TABLE made (a INTEGER)")
    assert Path(path).exists()
    assert file_identity(database_url(path)) is not None


@pytest.mark.parametrize(
    "given",
    [
        "", "://", "x://", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+aiosqlite://", ":memory:",
        "sqlite:///file::memory:?uri=true", "sqlite:///file:x?mode=memory&uri=true", "mysql://host/name",
        "oracle://host/name", "http://host/name", "postgresql//host/name://", "postgresql://host:port/name",
    ],
)  # fmt: skip
def test_an_invalid_database_is_rejected(given):
    with pytest.raises(SettingError):
        database_url(given)


@pytest.mark.parametrize(
    "given",
    [
        f"postgresql://me:{SECRET}@host:port/name", f"mysql://me:{SECRET}@host/name", f"nothing://me:{SECRET}@host/x",
        f"postgresql://me:{SECRET}@host:1:2/x", f"://me:{SECRET}@host/x", f"postgresql://me:{SECRET}@[::1/x",
    ],
)  # fmt: skip
def test_a_password_in_an_invalid_url_is_not_shown(given):
    with pytest.raises(SettingError) as refused:
        database_url(given)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("host=127.0.0.1 dbname=queue", "looks like NAME=VALUE settings, as libpq takes them"),
        (f" user = me password={SECRET}", "looks like NAME=VALUE settings"),
        ("postgresql:queue", "looks like a URL, but has no :// after postgresql"),
        ("sqlite:titanic.db", "looks like a URL, but has no :// after sqlite"),
        ("sqlite:/titanic.db", "looks like a URL, but has no :// after sqlite"),
        ("file:titanic.db?mode=rw", "looks like a URL, but has no :// after file"),
        (f"postgresql+psycopg:me:{SECRET}@host/queue", r"has no :// after postgresql\+psycopg"),
        ("$DATABASE_URL", r"looks like the value of \$DATABASE_URL, which nothing has put in its place"),
        (f"${{DATABASE_URL:-{SECRET}}}", r"looks like the value of \$\{DATABASE_URL, which nothing"),
        ("/var/lib/$NAME/titanic.db", r"looks like the value of \$NAME"),
    ],
)  # fmt: skip
def test_what_is_rather_meant_to_be_something_else_is_no_file(given, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=told) as refused:
        database_url(given)
    assert "Titanic needs sqlite:///FILE or postgresql://USER@HOST/NAME" in str(refused.value)
    assert SECRET not in str(refused.value)
    name = given.partition("?")[0]
    assert database_url(f"sqlite:///{name}").database == name  # it can still be a file's name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (f"postgresql://me:{SECRET}@host1:5432,host2:5433/name", "postgresql://USER@/NAME?host=HOST1:PORT&host=HOST2"),
        (f"postgresql://me:my@{SECRET}@host/name", "%40 for @"),
        (f"postgresql://me:12/{SECRET}@host/name", "%2F for /"),
        ("sqlite://host/titanic.db", "sqlite:///FILE, or sqlite:////FOLDER/FILE"),
        (f"sqlite://me:{SECRET}@/titanic.db", "sqlite:///FILE"),
        ("sqlite://titanic.db", "sqlite:///FILE"),
    ],
)
def test_a_url_that_says_something_else_gets_a_hint(given, told):
    with pytest.raises(SettingError, match=re.escape(told)) as refused:
        database_url(given)
    assert SECRET not in str(refused.value)


@only_postgresql
def test_several_hosts_as_the_hint_writes_them(own_url, opened, tmp_path):
    folder = own_url.partition("?host=")[2].partition("&")[0]
    url = f"{own_url.partition('?')[0]}?host={tmp_path}:5432&host={folder}:5432"
    assert run(opened(url), "SELECT 1") == [(1,)]


@pytest.mark.parametrize(
    ("query", "problem"),
    [("port=x", "Received non-integer port"), ("host=a,b&port=1&host=c", "Can't mix 'multihost' formats")],
)
def test_servers_that_cannot_be_meant_are_rejected(query, problem):
    with pytest.raises(SettingError, match=problem) as refused:
        open_engine(database_url(f"postgresql://me:{SECRET}@/name?{query}"))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "as_shown"),
    [
        ("titanic.db", "sqlite:///titanic.db"),
        ("sqlite:////x/titanic.db", "sqlite:////x/titanic.db"),
        ("postgres://me@host/name", "postgresql://me@host/name"),
        (
            f"postgresql://me:{SECRET}@host:5433/name?sslmode=require",
            "postgresql://me:***@host:5433/name?sslmode=require",
        ),
    ],
)
def test_urls_are_shown_without_driver_and_password(given, as_shown):
    assert shown(database_url(given)) == as_shown


@pytest.mark.parametrize(
    "query", [f"password={SECRET}", f"sslpassword={SECRET}", f"user=me&password={SECRET}&password={SECRET}"]
)
def test_a_password_in_the_query_is_not_shown(query):
    url = database_url(f"postgresql://host/name?{query}")
    assert SECRET not in shown(url)
    assert url.query["password" if "password=" in query.split("&")[-1] and "ssl" not in query else "sslpassword"]


def test_a_password_is_in_no_message(empty, empty_url, backend):
    url = database_url(empty_url)
    if backend == "postgresql":
        url = url.set(password=SECRET)
    with empty.connect() as connection, pytest.raises(SchemaError) as refused:
        schema.check(connection, url)
    assert SECRET not in str(refused.value)


@only_sqlite
def test_the_write_ahead_log_shrinks_after_a_large_transaction(monkeypatch, opened, own_url):
    monkeypatch.setattr(schema, "WAL_BYTES", 100_000)
    engine = opened(own_url)
    log = Path(f"{engine.url.database}-wal")
    run(engine, "CREATE TABLE large (body BLOB)")
    run(engine, "INSERT INTO large VALUES (zeroblob(10000000))")
    before = log.stat().st_size
    for _ in range(2):
        run(engine, "INSERT INTO large VALUES (zeroblob(10))")
    assert (before > 10_000_000, log.stat().st_size <= 100_000) == (True, True)


# ── how it is opened ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_created_only_on_request(tmp_path, opened):
    path = tmp_path / "titanic.db"
    with pytest.raises(SettingError, match=f"there is no database {path}: `titanic serve` creates it"):
        opened(str(path))
    assert not path.exists()
    run(opened(str(path), create=True), "SELECT 1")
    assert path.exists()
    assert run(opened(str(path)), "SELECT 1") == [(1,)]


def test_a_folder_is_not_created(tmp_path, opened):
    with pytest.raises(SettingError, match=f"there is no folder {tmp_path}/nowhere"):
        opened(f"{tmp_path}/nowhere/titanic.db", create=True)


def test_a_folder_is_rejected(tmp_path, opened):
    with pytest.raises(SettingError, match=f"{tmp_path} is a folder"):
        opened(str(tmp_path), create=True)


def test_what_is_no_file_is_rejected(tmp_path, opened):
    os.mkfifo(tmp_path / "pipe.db")
    (tmp_path / "link.db").symlink_to(tmp_path / "nowhere" / "titanic.db")
    for name, told in (("pipe.db", "is a device, a pipe or"), ("link.db", f"there is no folder {tmp_path}/nowhere")):
        with pytest.raises(SettingError, match=told):
            opened(str(tmp_path / name), create=True)


def test_a_file_system_that_cannot_have_a_write_ahead_log(tmp_path):
    """SQLite then says so only by its answer; this VFS is for file systems whose locks do not work."""
    with closing(sqlite3.connect(f"file:{tmp_path}/titanic.db?vfs=unix-dotfile", uri=True)) as connection:
        with pytest.raises(SettingError, match="put the file on a local disk, or use PostgreSQL"):
            schema.use_wal(connection)


def test_a_network_file_system_is_recognized(tmp_path, monkeypatch):
    assert schema.network_file_system(Path("/proc/self")) is None
    monkeypatch.setattr(schema, "NETWORK_FILE_SYSTEMS", {"proc"})
    assert schema.network_file_system(Path("/proc/self")) == "proc"
    assert schema.network_file_system(tmp_path) is None


@only_postgresql
def test_lock_timeouts(own_url, opened):
    assert run(opened(own_url, lock_timeout=0.25), "SHOW lock_timeout") == [("250ms",)]


@only_postgresql
@pytest.mark.parametrize(("lease", "timeout"), [(2, "500ms"), (10, "2500ms"), (60, "5s")])
def test_titanic_waits_for_locks_no_longer_than_its_lease_allows(own_url, lease, timeout):
    engine, _ = prepare(schema.database_url(own_url), store.Clock(), lease)
    assert run(engine, "SHOW lock_timeout") == [(timeout,)]
    engine.dispose()


@only_postgresql
def test_statements_are_not_prepared(own):
    for _ in range(10):
        assert run(own, "SELECT count(*) FROM pg_prepared_statements") == [(0,)]


@only_sqlite
def test_sqlite_commits_are_synchronous(own):
    assert run(own, "PRAGMA journal_mode") == [("wal",)]
    assert run(own, "PRAGMA synchronous") == [(2,)]
    assert run(own, "PRAGMA foreign_keys") == [(1,)]


@only_postgresql
def test_postgresql_commits_are_synchronous(own, own_url, cluster):
    cluster.execute(f"ALTER DATABASE {own.url.database} SET synchronous_commit = off")
    assert cluster.execute("SHOW synchronous_commit", db=own.url.database) == [("off",)]
    assert run(own, "SHOW synchronous_commit") == [("on",)]
    assert run(own, "SHOW lock_timeout") == [("5s",)]
    assert run(own, "SHOW application_name") == [("titanic",)]


@only_postgresql
def test_transactions_do_not_conflict_whatever_is_the_default(own, cluster):
    cluster.execute(f"ALTER DATABASE {own.url.database} SET default_transaction_isolation = 'serializable'")
    assert cluster.execute("SHOW transaction_isolation", db=own.url.database) == [("serializable",)]
    assert run(own, "SHOW transaction_isolation") == [("read committed",)]


def test_a_database_without_an_encoding(cluster, opened):
    """As servers create them that were set up without a locale."""
    name = f"test_{uuid4().hex}"
    cluster.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    engine = opened(cluster.url(name))
    try:
        assert schema.upgrade(engine) == (None, schema.head())
        with engine.begin() as connection:
            enqueue(connection, "größe", b"body")
            assert [row["service"] for row in admin.ls(connection, admin.Filter(), 2)] == ["größe"]
    finally:
        engine.dispose()
        cluster.execute(f"DROP DATABASE {name} WITH (FORCE)")


@only_postgresql
def test_settings_in_the_url_are_kept(opened, own_url):
    url = f"{own_url}&options=-csearch_path%3Dother%20-cwork_mem%3D5MB&application_name=ours&connect_timeout=9"
    engine = opened(url)
    assert run(engine, "SHOW search_path") == [("other",)]
    assert run(engine, "SHOW work_mem") == [("5MB",)]
    assert run(engine, "SHOW application_name") == [("ours",)]
    assert run(engine, "SHOW synchronous_commit") == [("on",)]


@only_postgresql
def test_a_schema_in_the_url_is_where_the_tables_are(opened, empty_url):
    first = opened(empty_url)
    run(first, "CREATE SCHEMA mine")
    mine = opened(f"{empty_url}&options=-csearch_path%3Dmine")
    assert schema.upgrade(mine) == (None, schema.head())
    made = run(first, "SELECT tablename FROM pg_tables WHERE schemaname = 'mine'")
    assert {name for (name,) in made} == TABLES
    with first.connect() as connection, pytest.raises(SchemaError, match="has no tables yet"):
        schema.check(connection, first.url)
    assert schema.upgrade(first) == (None, schema.head())
    with mine.connect() as connection:
        schema.check(connection, mine.url)


@only_sqlite
def test_a_reading_connection_cannot_write(own, own_url, opened):
    reading = opened(own_url, write=False)
    assert run(reading, "SELECT count(*) FROM titanic_requests") == [(0,)]
    with pytest.raises(sa.exc.OperationalError, match="readonly"):
        run(reading, "DELETE FROM titanic_requests")


@only_sqlite
def test_readers_do_not_wait_for_writers(own, own_url, opened):
    reading = opened(own_url, write=False)
    with own.begin() as writing:
        writing.exec_driver_sql("INSERT INTO titanic_keys (service, key, uuid) VALUES ('s', 'k', 'u')")
        assert run(reading, "SELECT count(*) FROM titanic_keys") == [(0,)]
    assert run(reading, "SELECT count(*) FROM titanic_keys") == [(1,)]


@only_sqlite
def test_writers_that_read_first_wait_for_each_other(own, own_url, opened, pool):
    run(own, "INSERT INTO titanic_keys (service, key, uuid, expires) VALUES ('s', 'k', 'u', 0)")

    def count_up(engine):
        for _ in range(20):
            with engine.begin() as connection:
                (found,) = connection.exec_driver_sql("SELECT expires FROM titanic_keys").one()
                connection.exec_driver_sql("UPDATE titanic_keys SET expires = ?", (found + 1,))

    list(pool.map(count_up, [opened(own_url) for _ in range(3)]))
    assert run(own, "SELECT expires FROM titanic_keys") == [(60,)]


@only_sqlite
def test_switching_to_wal_waits_for_a_writer(empty_url, opened, pool):
    writing = sqlite3.connect(database_url(empty_url).database, isolation_level=None)
    writing.execute("BEGIN IMMEDIATE")
    upgrading = pool.submit(schema.upgrade, opened(empty_url))
    wait([upgrading], timeout=0.2)  # time to fail; whether it has begun to wait does not matter
    writing.execute("ROLLBACK")
    writing.close()
    assert upgrading.result(TIMEOUT_SECONDS) == (None, schema.head())


@pytest.mark.parametrize("psycopg", ["is not there", "has no libpq"])
def test_a_missing_psycopg_is_reported_with_the_command_to_run(psycopg, monkeypatch, tmp_path):
    if psycopg == "is not there":
        monkeypatch.setitem(sys.modules, "psycopg", None)
    else:
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("psycopg")]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / "psycopg.py").write_text("raise ImportError('no pq wrapper available')")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingError, match=re.escape(install_command("postgres"))):
        open_engine(database_url("postgresql://host/name"))


def test_a_file_is_distinguished_from_another_of_the_same_name(tmp_path):
    url = database_url(str(tmp_path / "x.db"))
    assert file_identity(url) is None
    (tmp_path / "x.db").touch()
    (tmp_path / "y.db").touch()
    before = file_identity(url)
    assert before is not None
    (tmp_path / "x.db").write_text("more")
    assert file_identity(url) == before
    (tmp_path / "y.db").rename(tmp_path / "x.db")
    assert file_identity(url) not in {before, None}
    assert file_identity(database_url("postgresql://host/name")) is None


# ── the tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_upgrade_creates_the_tables(empty):
    assert schema.upgrade(empty) == (None, schema.head())
    assert tables_of(empty) == TABLES
    with empty.connect() as connection:
        assert schema.current(connection) == schema.head()
        schema.check(connection, empty.url)


def test_upgrade_is_idempotent(own):
    with own.begin() as connection:
        fill(connection)
    before = contents(own)
    assert schema.upgrade(own) == (schema.head(), schema.head())
    assert contents(own) == before


def fill(connection):
    """Add a request, a PARTIAL and a key."""
    connection.execute(sa.insert(tables.REQUESTS), {
        "uuid": uuid4(), "service": "s", "state": "done", "priority": 0, "created": 1.0, "due": 1.0, "attempts": 1,
        "failures": 0, "retries": 0, "body": b"\0\xff",
    })  # fmt: skip
    id_ = connection.scalar(sa.select(tables.R.id))
    connection.execute(sa.insert(tables.PARTS), {"request": id_, "attempt": 1, "number": 0, "body": b"part"})
    connection.execute(sa.insert(tables.KEYS), {"service": "s", "key": "k", "uuid": uuid4()})


def contents(engine):
    with engine.begin() as connection:
        return [connection.execute(sa.select(table)).all() for table in (tables.REQUESTS, tables.PARTS, tables.KEYS)]


def test_down_and_up_again_with_data_in_the_tables(own):
    with own.begin() as connection:
        fill(connection)
    with own.begin() as connection:
        command.downgrade(schema.config(connection), "base")
    assert tables_of(own) == {VERSION_TABLE}
    with own.connect() as connection, pytest.raises(SchemaError, match="has no tables yet"):
        schema.check(connection, own.url)
    assert schema.upgrade(own) == (None, schema.head())
    assert [len(rows) for rows in contents(own)] == [0, 0, 0]
    with own.begin() as connection:
        fill(connection)


def test_migrations_match_the_models(own):
    with own.connect() as connection:
        ours = {"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=ours), Base.metadata) == []


def test_migrations_create_what_the_models_create(own, opened, request, tmp_path, backend):
    if backend == "sqlite":
        made = opened(str(tmp_path / "made.db"), create=True)
        describe = sqlite_described
    else:
        cluster = request.getfixturevalue("cluster")
        made = opened(cluster.url(request.getfixturevalue("second_database")))
        describe = postgresql_described
    Base.metadata.create_all(made)
    migrated, modelled = describe(own), describe(made)
    assert len(migrated) > 30
    assert migrated == modelled
    (ready,) = [each for each in migrated if "titanic_requests_ready" in each[:2] and "WHERE" in str(each)]
    assert "pending" in str(ready)


@pytest.fixture
def second_database(cluster):
    with cluster.database() as name:
        yield name


def sqlite_described(engine):
    """Return the schema as SQLite stores it, without whitespace and the order of a table's constraints."""

    def plain(kind, sql):
        plain = re.sub(r"\s+", "", sql or "")
        if kind != "table":
            return plain
        name, inside, end = re.fullmatch(r"(.*?)\((.*)\)(.*)", plain).groups()
        return name, sorted(re.split(r",(?![^(]*\))", inside)), end

    found = run(
        engine,
        "SELECT type, name, tbl_name, sql FROM sqlite_master "
        "WHERE type <> 'trigger' AND name NOT LIKE '%titanic_version%' ORDER BY name",
    )
    masters = [(kind, name, table, plain(kind, sql)) for kind, name, table, sql in found]
    return masters + [
        (name, *row)
        for kind, name, *_ in masters
        for row in run(engine, f"PRAGMA {'table' if kind == 'table' else 'index'}_xinfo({name})")
    ]


def postgresql_described(engine):
    """Return columns, indexes and constraints as PostgreSQL describes them."""
    mine = f"LIKE 'titanic\\_%%' AND {{0}} <> '{VERSION_TABLE}'"
    return [
        row
        for table, columns, source in (
            ("table_name", "column_name, ordinal_position, data_type, is_nullable, column_default",
             "information_schema.columns"),
            ("tablename", "indexname, indexdef", "pg_indexes"),
            ("conrelid::regclass::text", "conname, pg_get_constraintdef(oid)", "pg_constraint"),
        )
        for row in run(engine, f"SELECT {columns} FROM {source} WHERE {table} {mine.format(table)} ORDER BY {table}, 1")
    ]  # fmt: skip


def test_a_state_that_does_not_exist_is_refused(own):
    with own.begin() as connection:
        fill(connection)
    with pytest.raises(sa.exc.IntegrityError):
        run(own, "UPDATE titanic_requests SET state = 'lost'")


def test_an_id_is_not_reused(own):
    with own.begin() as connection:
        fill(connection)
        first = connection.scalar(sa.select(tables.R.id))
        connection.execute(sa.delete(tables.REQUESTS))
        connection.execute(sa.delete(tables.KEYS))
        fill(connection)
        assert connection.scalar(sa.select(tables.R.id)) > first


def test_beside_the_tables_and_the_versions_of_a_program(empty):
    run(empty, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    run(empty, "INSERT INTO alembic_version VALUES ('theirs')")
    run(empty, "CREATE TABLE orders (id INTEGER PRIMARY KEY, service TEXT)")
    run(empty, "INSERT INTO orders VALUES (1, 'mine')")
    with empty.connect() as connection, pytest.raises(SchemaError, match="has no tables yet"):
        schema.check(connection, empty.url)
    schema.upgrade(empty)
    assert tables_of(empty) == TABLES | {"alembic_version", "orders"}
    with empty.begin() as connection:
        command.check(schema.config(connection))  # does not want to drop what is not its own
    with empty.begin() as connection:
        command.downgrade(schema.config(connection), "base")
    assert tables_of(empty) == {VERSION_TABLE, "alembic_version", "orders"}
    assert run(empty, "SELECT * FROM orders") == [(1, "mine")]
    assert run(empty, "SELECT * FROM alembic_version") == [("theirs",)]


def test_alembic_by_itself_takes_the_database_that_titanic_db_names(empty_url, opened, monkeypatch):
    monkeypatch.setenv("TITANIC_DB", empty_url)
    command.upgrade(schema.config(), "head")
    assert tables_of(opened(empty_url)) == TABLES
    gc.collect()  # a connection that was left open complains


def test_concurrent_upgrades(empty_url, opened, pool):
    barrier = threading.Barrier(3)

    def upgrade(engine):
        barrier.wait(TIMEOUT_SECONDS)
        return schema.upgrade(engine)

    outcomes = list(pool.map(upgrade, [opened(empty_url, create=True) for _ in range(3)]))
    assert sorted(outcomes, key=str) == [(schema.head(), schema.head())] * 2 + [(None, schema.head())]


# ── other versions ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def next_release(monkeypatch, tmp_path):
    """`next_release(python)` adds a migration that runs this Python code."""

    def release(does):
        ours = Path(schema.config().get_main_option("script_location"))
        theirs = tmp_path / "migrations"
        (theirs / "versions").mkdir(parents=True)
        shutil.copy(ours / "env.py", theirs)
        for each in (ours / "versions").glob("[0-9]*.py"):
            shutil.copy(each, theirs / "versions")
        (theirs / "versions" / "next.py").write_text(
            "from alembic import op\n"
            f"revision = '9999'\ndown_revision = {schema.head()!r}\n\n"
            f"def upgrade():\n    {does}\n\ndef downgrade():\n    pass\n"
        )
        usual = schema.config

        def config(connection=None):
            found = usual(connection)
            found.set_main_option("script_location", str(theirs))
            return found

        monkeypatch.setattr(schema, "config", config)

    return release


def test_no_tables_yet(empty):
    with empty.connect() as connection, pytest.raises(SchemaError) as refused:
        schema.check(connection, empty.url)
    url = shown(empty.url)
    said, shown_command = str(refused.value).removesuffix("`").split("`")
    assert said == f"{url} has no tables yet: run "
    in_a_shell = subprocess.run(["sh", "-c", f"echo {shown_command}"], capture_output=True, text=True, check=True)
    assert in_a_shell.stdout == f"titanic db upgrade --db {url}\n"


def test_tables_of_an_older_version(own, next_release):
    before = schema.head()
    with own.begin() as connection:
        fill(connection)
    next_release("op.execute(\"UPDATE titanic_requests SET service = 'new'\")")
    url = shown(own.url)
    with own.connect() as connection, pytest.raises(SchemaError) as refused:
        schema.check(connection, own.url)
    assert str(refused.value) == (
        f"{url} has tables of version {before}; this zmdp needs 9999: run `titanic db upgrade --db {quote(url)}`"
    )
    assert schema.upgrade(own) == (before, "9999")
    with own.connect() as connection:
        schema.check(connection, own.url)
    assert run(own, "SELECT service FROM titanic_requests") == [("new",)]


def test_a_migration_that_fails_leaves_nothing_behind(own, next_release):
    before, version = contents(own), schema.head()
    next_release("op.execute('CREATE TABLE titanic_half (a INTEGER)'); op.execute('not SQL')")
    with pytest.raises(sa.exc.DBAPIError):
        schema.upgrade(own)
    assert tables_of(own) == TABLES
    assert contents(own) == before
    with own.connect() as connection:
        assert schema.current(connection) == version


def test_tables_of_a_newer_version_are_left_alone(own):
    run(own, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    said = re.escape(
        f"{shown(own.url)} has tables of version 9999, from a newer zmdp (this one knows up to {schema.head()}): "
        "upgrade zmdp"
    )
    with own.connect() as connection, pytest.raises(SchemaError, match=said):
        schema.check(connection, own.url)
    with pytest.raises(SchemaError, match=said):
        schema.upgrade(own)
    assert run(own, f"SELECT version_num FROM {VERSION_TABLE}") == [("9999",)]


def test_an_upgraded_database_is_refused_by_the_older_zmdp(own, next_release, monkeypatch):
    next_release("pass")
    schema.upgrade(own)
    monkeypatch.undo()
    with own.connect() as connection, pytest.raises(SchemaError, match="from a newer zmdp"):
        schema.check(connection, own.url)
