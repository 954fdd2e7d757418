"""Reading Titanic's requests as a table."""

import re
from datetime import timedelta
from itertools import pairwise

import pytest
import sqlalchemy as sa
from pyspark.sql.types import StructType

from zmdp.mdp.errors import SettingError, ZmdpError
from zmdp.spark.datasource import reader
from zmdp.spark.datasource.columns import SCHEMA, TYPES
from zmdp.spark.datasource.reader import UNBOUNDED, Span, Table, open_reader, spans


def seconds(moment):
    return moment.timestamp()


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_request_is_a_row(db, read):
    now = 1_800_000_000.123456
    asked = db.add("größe", b"a", b"\0\xff", key="k", priority=7, retries=2, headers={"user": "ü", "b": ""}, ttl=60)
    db.end("größe", (b"x", b""), now=now)
    failing = db.add("fails")
    db.end("fails", None, code=503, error="broken", now=now + 1)
    waiting = db.add("waits", b"", delay=3600)
    done, failed, delayed = read().orderBy("id").collect()
    stored = db.requests()
    assert list(TYPES) == done.__fields__
    assert (done.id, done.uuid, done.service, done.state, done.priority) == (stored[0].id, asked, "größe", "done", 7)
    assert (done.attempts, done.failures, done.retries, done.key) == (1, 0, 2, "k")
    assert (done.headers, done.code, done.error) == ({"user": "ü", "b": ""}, None, None)
    assert (done.request, done.reply) == ([b"a", b"\0\xff"], [b"x", b""])
    assert seconds(done.created) == pytest.approx(stored[0].created, abs=1e-6)
    assert seconds(done.finished) == pytest.approx(now, abs=1e-6)
    assert seconds(done.expires) == pytest.approx(now + 60, abs=1e-6)
    assert done.started == done.finished
    assert (failed.uuid, failed.state, failed.code, failed.error) == (failing, "failed", 503, "broken")
    assert (failed.headers, failed.reply) == (None, None)
    assert (delayed.uuid, delayed.state, delayed.request, delayed.reply) == (waiting, "delayed", [b""], None)
    assert (delayed.started, delayed.finished, delayed.expires) == (None, None, None)
    assert (delayed.due - delayed.created).total_seconds() == pytest.approx(3600, abs=1e-5)


def test_an_empty_table(read):
    assert read().collect() == []
    assert read().schema == SCHEMA


@pytest.mark.parametrize(
    ("kind", "requests", "replies"),
    [
        ("array<binary>", [[b"one", b"two"], [b"\xff"], [b""]], [[b"reply"], [], None]),
        ("binary", [b"one", b"\xff", b""], [b"reply", None, None]),
        ("string", ["one", "\ufffd", ""], ["reply", None, None]),
    ],
)
def test_bodies_in_the_types_of_the_schema(db, kind, requests, replies):
    for frames in ([b"one", b"two"], [b"\xff"], [b""]):
        db.add("echo", *frames)
    db.end()
    db.end(reply=())
    (batch,) = Table(db.url, StructType.fromDDL(f"reply {kind}, id long, request {kind}")).read(Span(0, UNBOUNDED))
    assert batch["id"].to_pylist() == [1, 2, 3]
    assert batch["request"].to_pylist() == requests
    assert batch["reply"].to_pylist() == replies


def test_only_the_columns_of_the_schema_are_read(db):
    db.done()
    statements = []
    sa.event.listen(sa.engine.Engine, "before_cursor_execute", listener := lambda *a: statements.append(a[2]))
    try:
        (batch,) = Table(db.url, StructType.fromDDL("service string, uuid string")).read(Span(0, 10))
    finally:
        sa.event.remove(sa.engine.Engine, "before_cursor_execute", listener)
    assert batch.schema.names == ["service", "uuid"]
    assert not any(word in sql for sql in statements for word in ("body", "reply", "headers"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("id long, reqest string", "titanic has no column 'reqest'; available columns: id, uuid,"),
        ("id string", "titanic's column id cannot be read as string; use bigint"),
        ("request int", "titanic's column request cannot be read as int; use array<binary> or binary or string"),
        ("headers string", "titanic's column headers cannot be read as string; use map<string,string>"),
    ],
)
def test_invalid_schemas(pristine, schema, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        open_reader({"db": str(pristine)}, StructType.fromDDL(schema))


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sevice": "x"},
            "titanic has no option 'sevice' to read; available options: db, partitions, pushdown, service, state",
        ),
        ({"state": "finished"}, "unknown state 'finished'; expected delayed, pending, running, done, failed"),
        ({"partitions": "0"}, "partitions is '0'; expected an integer from 1"),
        ({"partitions": "x"}, "partitions is 'x'; expected an integer from 1"),
        ({"pushdown": "yes"}, "pushdown is 'yes'; expected true or false"),
        ({"db": ""}, "name the database: .option("),
        ({"db": "mysql://host/x"}, "'mysql' is not supported"),
        ({"db": "nowhere.db"}, "there is no database nowhere.db: `titanic serve` creates it"),
        ({"db": "postgresql://nobody@127.0.0.1:1/x"}, "cannot read postgresql://nobody@127.0.0.1:1/x: connection"),
    ],
)
def test_invalid_options(options, message, pristine):
    with pytest.raises(ZmdpError, match=re.escape(message)):
        open_reader({"db": str(pristine), **options}, SCHEMA).partitions()


def test_missing_tables_are_reported_with_the_command_that_creates_them(spark, tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(Exception, match="SchemaError") as refused:
        spark.read.format("titanic").option("db", str(path)).load().collect()
    assert f"has no tables yet: run `titanic db upgrade --db sqlite:///{path}`" in str(refused.value)


def test_the_database_from_the_environment(pristine, monkeypatch):
    monkeypatch.setenv("TITANIC_DB", str(pristine))
    (span,) = open_reader({}, SCHEMA).partitions()
    assert (span.low, span.high) == (0, UNBOUNDED)


def test_options_select_rows(db, read):
    for service in ("one", "two", "three"):
        db.add(service)
        db.done(service, code=500 if service == "three" else None)
    assert (
        sorted(row.service for row in read("service string", service="one, two").collect()) == ["one"] * 2 + ["two"] * 2
    )
    assert [row.service for row in read("service string", state="failed").collect()] == ["three"]
    both = read("service string", state="done,failed", service="three,two").collect()
    assert sorted(row.service for row in both) == ["three", "two"]


def test_an_sql_view(spark, db):
    db.done("echo")
    db.add("other")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW history USING titanic OPTIONS (db '{db.url}')")
    try:
        (row,) = spark.sql("SELECT service, count(*) AS n, any_value(finished - created) AS took FROM history "
                           "WHERE state = 'done' GROUP BY service").collect()  # fmt: skip
    finally:
        spark.catalog.dropTempView("history")
    assert (row.service, row.n) == ("echo", 1)
    assert isinstance(row.took, timedelta)


# ── partitions and chunks ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (5, 90_000), (0, 10**12), (7, 20_007)])
def test_spans_cover_all_numbers_once(low, high, most):
    found = spans(low, high, most)
    assert 1 <= len(found) <= most
    assert (found[0].low, found[-1].high) == (low, high)
    assert all(one.high == other.low for one, other in pairwise(found))


def test_a_large_table_is_read_in_partitions(db, read):
    uuids = [db.add() for _ in range(3)]
    db.run("UPDATE titanic_requests SET id = 50000 WHERE id = 2")
    db.run("UPDATE titanic_requests SET id = 100000 WHERE id = 3")
    frame = read("uuid string, id long", partitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert {row.uuid for row in frame.collect()} == set(uuids)


def test_chunks_are_bounded(db, monkeypatch):
    for size in (10, 10, 5000, 10, 10, 10, 10):
        db.add("echo", bytes(size))
    monkeypatch.setattr(reader, "MAX_ROWS", 3)
    monkeypatch.setattr(reader, "MAX_BYTES", 1000)
    table = Table(db.url, StructType.fromDDL("id long, request binary"))
    batches = list(table.read(Span(0, 7)))
    assert [batch.column("id").to_pylist() for batch in batches] == [[1, 2], [3], [4, 5, 6], [7]]
    assert [batch.num_rows for batch in Table(db.url, StructType.fromDDL("id long")).read(Span(2, 6))] == [3, 1]


def test_requests_with_equal_numbers_are_read_once(db, monkeypatch):
    monkeypatch.setattr(reader, "MAX_ROWS", 2)
    for _ in range(5):
        db.done()
    db.run("UPDATE titanic_requests SET ended = 3")
    table = Table(db.url, StructType.fromDDL("id long"), "ended")
    batches = list(table.read(Span(2, 3)))
    assert [each for batch in batches for each in batch.column("id").to_pylist()] == [1, 2, 3, 4, 5]
    assert list(table.read(Span(3, 9))) == []


def test_rows_committed_during_the_read_are_not_skipped(db, monkeypatch):
    """More rows exist up to the limit than are fetched at a time, because the limit query saw fewer."""
    for _ in range(5):
        db.add()
    monkeypatch.setattr(reader, "MAX_ROWS", 2)
    places = [(5, 5)] * 3
    monkeypatch.setattr(Table, "_limit", lambda *given: places.pop() if places else None)
    table = Table(db.url, StructType().add("id", "long"), "id", [])
    assert [row for batch in table.read(Span(0, 5)) for row in batch["id"].to_pylist()] == [1, 2, 3, 4, 5]


def test_a_second_query_reads_new_rows(spark, db, read):
    db.add("echo")
    frame = read("service string")
    assert frame.where("service = 'other'").count() == 0
    db.add("other")
    assert frame.count() == 2
    assert frame.where("service = 'other'").count() == 1
    assert frame.count() == 2
