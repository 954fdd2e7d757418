"""Databases with Titanic's tables on SQLite and PostgreSQL, for Spark to read and write."""

import shutil
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from support.postgres import cluster as new_cluster

from zmdp.titanic import enqueue, schema, store
from zmdp.titanic.frames import pack
from zmdp.titanic.store import tables

TEMPLATE = "with_tables"
WITH_SPARK = {"read", "write", "stream", "run", "failing"}
"""Fixtures of tests that have Spark do it; the others do the same in this process, on both databases."""


def pytest_collection_modifyitems(items):
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and callspec.params.get("backend") == "postgresql" and WITH_SPARK & set(item.fixturenames):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def cluster():
    """The PostgreSQL server of this test run."""
    with new_cluster(max_prepared_transactions="2", shared_buffers="16MB") as made:
        made.execute(f"CREATE DATABASE {TEMPLATE}")
        upgraded(made.url(TEMPLATE))
        yield made


def upgraded(url):
    engine = schema.open_engine(schema.database_url(url), create=True)
    schema.upgrade(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A file with tables and nothing in them."""
    path = tmp_path_factory.mktemp("pristine") / "titanic.db"
    upgraded(str(path))
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request):
    return request.param


@pytest.fixture
def db(backend, request, tmp_path):
    """A new database for the test."""
    with made(backend, request, tmp_path) as url:
        database = Database(url)
        yield database
        database.engine.dispose()


@contextmanager
def made(backend, request, tmp_path):
    if backend == "sqlite":
        yield f"sqlite:///{shutil.copy(request.getfixturevalue('pristine'), tmp_path)}"
    else:
        cluster = request.getfixturevalue("cluster")
        with cluster.database(TEMPLATE) as name:
            yield cluster.url(name)


class Database:
    """A database with shortcuts for filling it."""

    def __init__(self, url):
        self.url = url
        self.engine = schema.open_engine(schema.database_url(url))

    def add(self, service="echo", *frames, **options):
        """Accept a request and return its UUID."""
        with self.engine.begin() as connection:
            return enqueue(connection, service, *(frames or (b"body",)), **options)

    def end(self, service="echo", reply=(b"reply",), code=None, error=None, now=None):
        """Give the service's oldest request this reply."""
        now = time.time() if now is None else now
        lease = store.Lease("me", now + 1000)
        with self.engine.begin() as connection:
            ((claimed,),) = store.claim(connection, [store.Claim(service, 1, lease, now)])
            packed = None if reply is None else pack(reply)
            store.finish(connection, [store.Outcome(claimed.id, "me", claimed.attempt, now, packed, code, error)])
        return claimed

    def done(self, service="echo", *frames, **ends):
        """Add a request and end it."""
        self.add(service, *frames)
        return self.end(service, **ends)

    def run(self, sql):
        with self.engine.begin() as connection:
            found = connection.exec_driver_sql(sql)
            return [tuple(row) for row in found] if found.returns_rows else []

    def requests(self):
        """Return all stored requests, in order."""
        with self.engine.begin() as connection:
            return [SimpleNamespace(**row) for row in connection.execute(
                sa.select(tables.REQUESTS).order_by(tables.R.id)).mappings()]  # fmt: skip

    def count(self, table="titanic_requests"):
        return self.run(f"SELECT count(*) FROM {table}")[0][0]

    @property
    def left_over(self):
        """How much of writes has not been cleared away."""
        return self.count("titanic_staged"), self.count("titanic_staging")


@pytest.fixture(autouse=True)
def _session(spark):
    """PySpark needs one even to read a schema."""


@pytest.fixture
def read(spark, db):
    """`read(schema, **options)`: a DataFrame of what is in the database."""

    def reading(schema=None, **options):
        reader = spark.read.format("titanic").option("db", db.url).options(**options)
        return (reader if schema is None else reader.schema(schema)).load()

    return reading


@pytest.fixture
def write(db):
    """`write(frame, **options)`: as requests, in a batch."""

    def writing(frame, **options):
        frame.write.format("titanic").option("db", db.url).options(**options).mode("append").save()

    return writing
