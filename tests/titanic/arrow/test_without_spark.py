"""Requests as Arrow, read and staged without Spark."""

import subprocess
import sys
import time

import pyarrow as pa
import pytest

from zmdp.mdp.errors import SettingError
from zmdp.titanic import enqueue, schema
from zmdp.titanic.arrow.connection import connect_arrow
from zmdp.titanic.arrow.reading import read_range, select_requests
from zmdp.titanic.arrow.rows import BadRow, new_uuids, plan_rows
from zmdp.titanic.store import staging


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
    program = "import sys, zmdp.titanic.arrow.reading; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_requests_are_read_as_arrow(db, engine):
    with engine.begin() as connection:
        for service in ("echo", "other", "echo"):
            enqueue(connection, service, service.encode(), b"more")
    wanted = pa.schema({"id": pa.int64(), "request": pa.list_(pa.binary()), "created": pa.timestamp("us", "UTC")})
    batches = read_range(db, wanted, 0, condition=select_requests({"service": "echo"}))
    table = pa.Table.from_batches(batches, wanted)
    assert table["id"].to_pylist() == [1, 3]
    assert table["request"].to_pylist() == [[b"echo", b"more"]] * 2
    assert all(abs(each.timestamp() - time.time()) < 60 for each in table["created"].to_pylist())


def test_batches_are_staged_and_accepted_together(db, engine):
    rows = pa.RecordBatch.from_pydict({"request": ["a", "b"], "priority": pa.array([None, 7], pa.int8())})
    converter = plan_rows(rows.schema, {"service": "echo", "priority": "3"})
    with engine.begin() as connection:
        number = staging.begin(connection, "mine", time.time())
    with connect_arrow(db, write=True) as arrow:
        assert arrow.stage(staging.touch(number, time.time()), converter.convert(rows, number, 0, 0))
    wanted = pa.schema({"request": pa.string(), "priority": pa.int32()})
    assert list(read_range(db, wanted, 0)) == []
    with engine.begin() as connection:
        assert staging.commit(connection, None, [staging.Accepted(number, 2)], time.time())
    assert pa.Table.from_batches(read_range(db, wanted, 0)).to_pylist() == [
        {"request": "a", "priority": 3}, {"request": "b", "priority": 7},
    ]  # fmt: skip


def test_types_and_values_are_checked():
    with pytest.raises(SettingError, match="cannot write priority as string"):
        plan_rows(pa.schema({"request": pa.string(), "priority": pa.string()}), {"service": "echo"})
    with pytest.raises(SettingError, match="cannot write at as timestamp"):
        plan_rows(pa.schema({"request": pa.string(), "at": pa.timestamp("us")}), {"service": "echo"})
    rows = pa.RecordBatch.from_pydict({"request": ["a"], "priority": [10]})
    with pytest.raises(BadRow, match="priority must be a whole number from 0 to 9"):
        plan_rows(rows.schema, {"service": "echo"}).convert(rows, 1, 0, 0)


def test_uuids_ascend_and_are_distinct():
    found = [each.hex() for each in new_uuids(1000).to_pylist()]
    assert found == sorted(set(found))
    assert {each[12] for each in found} == {"7"}
    assert {each[16] for each in found} == set("89ab")
