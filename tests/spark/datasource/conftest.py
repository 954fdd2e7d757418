"""Databases with Titanic's tables on SQLite and PostgreSQL, for Spark to read and write."""

import shutil
from contextlib import contextmanager

import pytest
from support.databases import Database, new_file
from support.postgres import cluster as new_cluster

from zmdp.titanic.db import schema

TEMPLATE = "with_tables"


@pytest.fixture(scope="session")
def cluster():
    """The PostgreSQL server of this test run."""
    with new_cluster(shared_buffers="16MB") as made:
        made.execute(f"CREATE DATABASE {TEMPLATE}")
        engine = schema.open_engine(schema.database_url(made.url(TEMPLATE)))
        schema.upgrade(engine)
        engine.dispose()
        yield made


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A file with tables and nothing in them."""
    path = tmp_path_factory.mktemp("pristine") / "titanic.db"
    new_file(path)
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
