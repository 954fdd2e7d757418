"""Databases for the tests of Titanic: each test that asks for one runs on a SQLite file and on PostgreSQL."""

import math
import shutil
from contextlib import contextmanager
from types import SimpleNamespace
from uuid import uuid4

import pytest
import sqlalchemy as sa
from support.databases import Database, check_counts
from support.postgres import cluster as new_cluster
from support.processes import TIMEOUT_SECONDS
from support.titanics import StoppedClock, running_bench, serving

from zmdp.clients import Client
from zmdp.titanic import Titanic
from zmdp.titanic.api.submission import Submission, pack
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.store import models as sql

NOW = 1_800_000_000.0


@pytest.fixture(scope="session")
def cluster():
    """The PostgreSQL of this test run.  A test that stops it must start it again."""
    with new_cluster(
        deadlock_timeout="100ms", full_page_writes="off", max_prepared_transactions="2", shared_buffers="16MB"
    ) as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request):
    """Both databases.  For one only: `@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)`."""
    return request.param


@pytest.fixture(scope="session")
def prepared(request, tmp_path_factory):
    """`prepared(backend, fill)` returns an engine for a database that `fill(engine)` has filled once."""
    made = {}

    def prepare(backend, fill):
        if (backend, fill) not in made:
            name = f"prepared_{fill.__name__}"
            if backend == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp(name)}/titanic.db"
            else:
                cluster = request.getfixturevalue("cluster")
                cluster.execute(f"CREATE DATABASE {name}")
                url = cluster.url(name)
            made[backend, fill] = schema.open_engine(schema.database_url(url), create=True)
            fill(made[backend, fill])
        return made[backend, fill]

    yield prepare
    for engine in made.values():
        engine.dispose()


@pytest.fixture
def engine(backend, prepared):
    """A database with empty tables, the same for all tests, because creating one takes long."""
    made = prepared(backend, schema.upgrade)
    with made.begin() as connection:
        for table in (sql.REQUESTS, sql.KEYS, sql.HOLDERS, sql.SCHEDULES, sql.COUNTS, sql.COUNT_CHANGES):
            connection.execute(sa.delete(table))
    yield made
    check_counts(made)
    made.dispose()  # nothing of this test's is left in the next


@pytest.fixture
def empty_url(backend, request, tmp_path):
    """A database without tables; with SQLite, there is not even a file."""
    if backend == "sqlite":
        yield f"sqlite:///{tmp_path}/titanic.db"
    else:
        cluster = request.getfixturevalue("cluster")
        with cluster.database() as name:
            yield cluster.url(name)


def pristine(engine):
    """Tables that nobody uses: they are copied."""
    schema.upgrade(engine)
    engine.dispose()


@pytest.fixture
def own_url(backend, prepared, request, tmp_path):
    """A database with tables, for this test only."""
    made = prepared(backend, pristine).url.database
    if backend == "sqlite":
        yield f"sqlite:///{shutil.copy(made, tmp_path)}"
    else:
        cluster = request.getfixturevalue("cluster")
        with cluster.database(made) as name:
            yield cluster.url(name)


@pytest.fixture
def db(own_url):
    """The same, with shortcuts for filling and reading it."""
    database = Database(own_url)
    yield database
    database.engine.dispose()


class Tables:
    """Helpers that fill a database and read it."""

    def __init__(self, engine):
        self.engine = engine

    def do(self, work, *batch):
        """Perform `work` for `batch` in one transaction."""
        with self.engine.begin() as connection:
            return work(connection, batch)

    def add(self, service="echo", **fields):
        """Accept a request, and return its submission."""
        made = submission(service, **fields)
        self.do(store.accept, made)
        return made

    def claim(self, service="echo", limit=1, holder="me", until=NOW + 10, now=NOW, **asked):
        (claimed,) = self.do(store.claim, store.Claim(service, limit, store.Lease(holder, until - now), now, **asked))
        return claimed

    def running(self, holder="me", until=NOW + 10, now=NOW, **fields):
        """Accept and claim a request."""
        asked = self.add(now=now, **fields)
        (claimed,) = self.claim(asked.service, holder=holder, until=until, now=now)
        assert claimed.uuid == asked.uuid
        return claimed

    def done(self, reply=b"reply", code=None, error=None, now=NOW, **fields):
        """Accept, claim and finish a request."""
        claimed = self.running(**fields)
        self.do(store.finish, store.Outcome(claimed.id, claimed.holder, claimed.attempt, now, reply, code, error))
        return claimed

    def maintain(self, now=NOW, holder="me", until=None, **asked):
        lease = store.Lease(holder, 10 if until is None else until - now)
        (found,) = self.do(store.maintain, a_round(lease, now, **asked))
        return found

    def row(self, uuid):
        """Return the row of a request, or None."""
        with self.engine.begin() as connection:
            found = connection.execute(sa.select(sql.REQUESTS).where(sql.R.uuid == uuid)).one_or_none()
        return None if found is None else SimpleNamespace(**found._mapping)

    def leases(self):
        """Return when the lease of each Titanic expires."""
        with self.engine.begin() as connection:
            return dict(connection.execute(sa.select(sql.W.holder, sql.W.lease)).all())

    def count(self, table=sql.REQUESTS):
        with self.engine.begin() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(table))


def a_round(lease, now=NOW, renew=False, count=False, offered=()):
    return store.MaintenanceRound(
        lease=lease,
        clock=StoppedClock(now),
        renew_at=0.0 if renew else math.inf,
        count=count,
        offered=offered,
    )


def submission(service="echo", *, now=NOW, **fields):
    made = Submission(uuid=uuid4(), service=service, body=pack([b"body"]), created=now, due=now)
    return made._replace(**fields)


@pytest.fixture
def tables(engine):
    return Tables(engine)


@pytest.fixture(name="submission")
def _submission():
    """`submission(service, **fields)` returns a submission."""
    return submission


@pytest.fixture(name="a_round")
def _a_round():
    """`a_round(lease, now, …)` returns a request for maintenance."""
    return a_round


@pytest.fixture
def executed():
    """`with executed(engine) as statements:` collects (SQL, parameters), for executemany those of the first row."""

    @contextmanager
    def listening(engine):
        statements = []

        def executing(*, statement, parameters, executemany, **other):
            statements.append((statement, parameters[0] if executemany else parameters))

        sa.event.listen(engine, "before_cursor_execute", executing, named=True)
        try:
            yield statements
        finally:
            sa.event.remove(engine, "before_cursor_execute", executing)

    return listening


@pytest.fixture
def url(engine):
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def bench():
    with running_bench() as bench:
        yield bench


@pytest.fixture
def server(bench, url):
    """A Titanic with the database `url`."""
    with serving(bench.endpoint, url) as server:
        yield server


@pytest.fixture
def client(bench):
    with Client(bench.endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client:
        yield client


@pytest.fixture
def titanic(client, server):
    """A client of that Titanic."""
    return Titanic(client)


ABOVE_THE_STORE = {"test_fetch.py", "test_discovery.py", "test_dispatch.py", "test_tsp.py", "test_waiting.py"}
"""What they show does not depend on the database: on PostgreSQL, only `make test-all` runs them."""


def pytest_collection_modifyitems(items):
    """Mark tests as long that differ from others in the database only, though what they show does not."""
    for item in items:
        if item.path.name in ABOVE_THE_STORE and getattr(item, "callspec", None):
            chosen = any(mark.args[0] == "backend" for mark in item.iter_markers("parametrize"))
            if item.callspec.params.get("backend") == "postgresql" and not chosen:
                item.add_marker(pytest.mark.long)
