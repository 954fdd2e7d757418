"""Requests as Arrow, read and staged without Spark."""

import pickle
import re
import subprocess
import sys
from itertools import pairwise

import pyarrow as pa
import pytest

from zmdp.mdp.errors import SettingError
from zmdp.titanic import enqueue
from zmdp.titanic.contrib.arrow.columns import REQUESTS
from zmdp.titanic.contrib.arrow.reading import UNBOUNDED, Requests, select_requests, split_range
from zmdp.titanic.contrib.arrow.rows import new_uuids
from zmdp.titanic.db import schema


@pytest.fixture
def db(tmp_path):
    """The path of a new database."""
    path = str(tmp_path / "titanic.db")
    engine = schema.open_engine(schema.database_url(path), create=True)
    schema.upgrade(engine)
    engine.dispose()
    return path


@pytest.fixture
def engine(db):
    opened = schema.open_engine(schema.database_url(db))
    yield opened
    opened.dispose()


def test_spark_is_not_imported():
    program = "import sys, zmdp.titanic.contrib.arrow.reading; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        ("reqest", pa.string(), "titanic has no column 'reqest'; available columns: id, uuid,"),
        ("created", pa.timestamp("us"), "column created cannot be read as timestamp[us]; use timestamp[us, tz=UTC]"),
        ("reply", pa.int32(), "column reply cannot be read as int32; use list<item: binary> or binary or string"),
    ],
)
def test_invalid_columns(db, column, kind, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        Requests(db, pa.schema({column: kind}))


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (5, 90_000), (0, 10**12), (7, 20_007)])
def test_split_ranges_cover_all_numbers_once(low, high, most):
    found = split_range(low, high, most)
    assert 1 <= len(found) <= most
    assert (found[0][0], found[-1][1]) == (low, high)
    assert all(one[1] == other[0] for one, other in pairwise(found))


def test_other_processes_read_ranges(db, engine):
    requests = Requests(db, pa.schema({"id": pa.int64()}))
    assert requests.ranges(3) == [(0, UNBOUNDED)]
    with engine.begin() as connection:
        for _ in range(3):
            enqueue(connection, "echo", b"body")
        connection.exec_driver_sql("UPDATE titanic_requests SET id = id * 30000")
    ranges = requests.ranges(3)
    assert ranges == [(29999, 49999), (49999, 69999), (69999, UNBOUNDED)]
    other = pickle.loads(pickle.dumps(requests))
    assert other == requests
    assert [batch["id"].to_pylist() for each in ranges for batch in other.read(*each)] == [[30000], [60000], [90000]]


def test_where_a_number_of_requests_ends(db, engine):
    with engine.begin() as connection:
        for number in range(6):
            enqueue(connection, "other" if number % 2 else "echo", b"body")
    requests = Requests(db, pa.schema({"id": pa.int64()}), condition=select_requests({"service": "echo"}))
    assert requests.end_after(engine, 2, 0, 6) == 3
    assert requests.end_after(engine, 2, 3, 6) == 6
    assert requests.end_after(engine, 2, 0, 2) == 2


def test_ranges_need_the_tables(tmp_path):
    (tmp_path / "empty.db").touch()
    with pytest.raises(schema.SchemaError, match="has no tables yet"):
        Requests(str(tmp_path / "empty.db"), REQUESTS).ranges(8)


def test_uuids_ascend_and_are_distinct():
    found = [each.hex() for each in new_uuids(1000).to_pylist()]
    assert found == sorted(set(found))
    assert {each[12] for each in found} == {"7"}
    assert {each[16] for each in found} == set("89ab")
