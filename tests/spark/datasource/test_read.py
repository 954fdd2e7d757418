"""Reading Titanic's requests as a table."""

import re
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from pyspark.sql.types import StructType

from zmdp.mdp.errors import SettingError, ZmdpError
from zmdp.spark.datasource.columns import SCHEMA, arrow_schema
from zmdp.spark.datasource.reader import Reader
from zmdp.titanic.arrow import connection, reading
from zmdp.titanic.arrow.reading import UNBOUNDED, Requests


def seconds(moment):
    return moment.timestamp()


def requests_of(url, schema, number="id"):
    """Return requests with the columns of a Spark schema."""
    return Requests(url, arrow_schema(StructType.fromDDL(schema)), number)


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
    assert SCHEMA.names == done.__fields__
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
    (batch,) = requests_of(db.url, f"reply {kind}, id long, request {kind}").read()
    assert batch["id"].to_pylist() == [1, 2, 3]
    assert batch["request"].to_pylist() == requests
    assert batch["reply"].to_pylist() == replies


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_one_query_reads_only_the_columns_of_the_schema(db):
    db.done()
    statements = []
    sa.event.listen(sa.engine.Engine, "before_cursor_execute", listener := lambda *a: statements.append(a[2]))
    try:
        (batch,) = requests_of(db.url, "service string, reply binary").read(0, 10)
    finally:
        sa.event.remove(sa.engine.Engine, "before_cursor_execute", listener)
    assert batch.schema.names == ["service", "reply"]
    (statement,) = [each for each in statements if "titanic_requests" in each]
    assert not any(column in statement for column in ("body", "uuid", "headers"))


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_only_the_columns_of_the_schema_need_the_right_to_be_read(db):
    db.done()
    db.run("CREATE ROLE analyst LOGIN")
    db.run("GRANT SELECT (id, service, uuid) ON titanic_requests TO analyst")
    url = db.url.replace("postgres@", "analyst@")
    try:
        (batch,) = requests_of(url, "service string, uuid string").read(0, 10)
        with pytest.raises(Exception, match="permission denied"):
            list(requests_of(url, "request binary").read(0, 10))
    finally:
        db.run("DROP OWNED BY analyst")
        db.run("DROP ROLE analyst")
    assert batch.to_pylist() == [{"service": "echo", "uuid": db.requests()[0].uuid.hex}]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("id long, reqest string", "titanic has no column 'reqest'; available columns: id, uuid,"),
        ("id string", "titanic's column id cannot be read as string; use int64"),
        ("request int", "titanic's column request cannot be read as int32; use list<item: binary> or binary or string"),
        ("headers string", "titanic's column headers cannot be read as string; use map<string, string>"),
    ],
)
def test_invalid_schemas(pristine, schema, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        Reader({"db": str(pristine)}, StructType.fromDDL(schema))


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sevice": "x"},
            "titanic has no option 'sevice' to read; available options: db, partitions, service, since, state, until",
        ),
        ({"state": "finished"}, "unknown state 'finished'; expected delayed, pending, running, done, failed"),
        ({"partitions": "0"}, "partitions is '0'; expected an integer from 1"),
        ({"partitions": "x"}, "partitions is 'x'; expected an integer from 1"),
        ({"service": "a,b\0"}, "'b\\x00' is not the name of a service"),
        ({"since": "yesterday"}, "since is 'yesterday'; expected seconds since 1970, or a time such as 2030-"),
        ({"until": "2030-01-31T12:00"}, "until is '2030-01-31T12:00'; expected seconds since 1970, or a time such as"),
        ({"until": "nan"}, "until is 'nan'; expected seconds since 1970"),
        ({"db": ""}, "name the database: .option("),
        ({"db": "mysql://host/x"}, "'mysql' is not supported"),
        ({"db": "nowhere.db"}, "there is no database nowhere.db: `titanic serve` creates it"),
        ({"db": "postgresql://nobody@127.0.0.1:1/x"}, "cannot read postgresql://nobody@127.0.0.1:1/x: connection"),
    ],
)
def test_invalid_options(options, message, pristine):
    with pytest.raises(ZmdpError, match=re.escape(message)):
        Reader({"db": str(pristine), **options}, SCHEMA).partitions()


def test_missing_tables_are_reported_with_the_command_that_creates_them(spark, tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(Exception, match="SchemaError") as refused:
        spark.read.format("titanic").option("db", str(path)).load().collect()
    assert f"has no tables yet: run `titanic db upgrade --db sqlite:///{path}`" in str(refused.value)


def test_the_database_from_the_environment(pristine, monkeypatch):
    monkeypatch.setenv("TITANIC_DB", str(pristine))
    (span,) = Reader({}, SCHEMA).partitions()
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


def test_services_may_contain_any_printable_character(db):
    names = ["it's", "a\\b", "50%", "a:b", "größe"]
    for name in names:
        db.done(name)
    for name in names:
        reader = Reader({"db": db.url, "service": name}, StructType.fromDDL("service string"))
        (span,) = reader.partitions()
        assert [row["service"] for batch in reader.read(span) for row in batch.to_pylist()] == [name]


def test_since_and_until(db, read):
    for day in range(1, 5):
        db.add()
        db.run(
            f"UPDATE titanic_requests SET created = {datetime(2030, 1, day, tzinfo=UTC).timestamp()} WHERE id = {day}"
        )

    def ids(**options):
        return sorted(row.id for row in read("id long", **options).collect())

    assert ids(since="2030-01-02T00:00:00+00:00") == [2, 3, 4]
    assert ids(since="2030-01-02T02:00+02:00", until="2030-01-03T00:00Z") == [2]
    assert ids(until=str(datetime(2030, 1, 3, tzinfo=UTC).timestamp())) == [1, 2]
    assert ids(since="2030-01-05T00:00Z") == []


@pytest.mark.parametrize(
    "condition",
    [{}, {"state": "done,failed"}, {"service": "s1"}, {"since": "1030"}, {"until": "1070", "state": "pending"}],
    ids=str,
)
def test_counts_equal_those_of_sql(db, monkeypatch, condition):
    """However the rows are divided into partitions, chunks and batches."""
    for number in range(90):
        db.add(f"s{number % 3}", *([b"x"] * (number % 4 + 1)), key=f"k{number}" if number % 5 else None)
        if number % 2:
            db.end(f"s{number % 3}", code=500 if number % 3 else None)
    db.run("UPDATE titanic_requests SET created = 1000 + id")
    db.run("DELETE FROM titanic_requests WHERE id IN (1, 22, 50, 51, 52, 90)")
    monkeypatch.setattr(reading, "CHUNK_ROWS", 13)
    monkeypatch.setattr(reading, "MIN_RANGE_ROWS", 20)
    monkeypatch.setattr(connection, "MAX_ROWS", 5)
    table = Reader({"db": db.url, **condition}, SCHEMA)
    spans = table.partitions()
    assert len(spans) == 4
    found = [row for span in spans for batch in table.read(span) for row in batch.to_pylist()]
    wanted = {
        "state": "state IN ('done', 'failed')" if "," in condition.get("state", "") else "state = 'pending'",
        "service": "service = 's1'", "since": "created >= 1030", "until": "created < 1070",
    }  # fmt: skip
    where = " AND ".join(wanted[name] for name in condition) or "1 = 1"
    query = "SELECT service, state, count(*), count(key), sum(length(body)) FROM titanic_requests"
    ours = Counter((row["service"], row["state"]) for row in found)
    for service, state, rows, keys, size in db.run(f"{query} WHERE {where} GROUP BY 1, 2"):
        group = [row for row in found if (row["service"], row["state"]) == (service, state)]
        assert ours.pop((service, state)) == rows
        assert sum(row["key"] is not None for row in group) == keys
        assert sum(4 + len(frame) for row in group for frame in row["request"]) == size
    assert not ours


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


def test_a_large_table_is_read_in_partitions(db, read):
    uuids = [db.add() for _ in range(3)]
    db.run("UPDATE titanic_requests SET id = 50000 WHERE id = 2")
    db.run("UPDATE titanic_requests SET id = 100000 WHERE id = 3")
    frame = read("uuid string, id long", partitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert {row.uuid for row in frame.collect()} == set(uuids)


@pytest.mark.parametrize("schema", ["id long", "service string", "reply string"])
def test_chunks_follow_each_other(db, monkeypatch, schema):
    for _ in range(7):
        db.add()
    monkeypatch.setattr(reading, "CHUNK_ROWS", 3)
    batches = list(requests_of(db.url, schema).read(0, 6))
    assert [batch.num_rows for batch in batches] == [3, 3]
    if schema == "id long":
        assert [batch["id"].to_pylist() for batch in batches] == [[1, 2, 3], [4, 5, 6]]
    assert [batch.num_rows for batch in requests_of(db.url, schema).read(2)] == [3, 2]


def test_batches_are_bounded(db, monkeypatch):
    for size in (10, 10, 5000, 10, 10, 10, 10):
        db.add("echo", bytes(size))
    monkeypatch.setattr(connection, "MAX_BYTES", 1000)
    batches = list(requests_of(db.url, "id long, request binary").read(0, 7))
    assert [id_ for batch in batches for id_ in batch["id"].to_pylist()] == [1, 2, 3, 4, 5, 6, 7]
    assert 2 <= len(batches) <= 3  # depends on whether a batch may end before the large body


def test_requests_with_equal_numbers_are_read_once(db, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_ROWS", 2)
    for _ in range(5):
        db.done()
    db.run("UPDATE titanic_requests SET ended = 3")
    table = requests_of(db.url, "id long", "ended")
    batches = list(table.read(2, 3))
    assert [each for batch in batches for each in batch.column("id").to_pylist()] == [1, 2, 3, 4, 5]
    assert list(table.read(3, 9)) == []


def test_each_chunk_is_a_transaction_that_begins_after_the_one_before(db, monkeypatch):
    """So a slow reader does not hold up the database, and rows that are committed meanwhile are read."""
    for _ in range(2):
        db.add()
    monkeypatch.setattr(reading, "CHUNK_ROWS", 2)
    batches = requests_of(db.url, "id long").read()
    found = [next(batches)["id"].to_pylist()]
    db.add()
    found += [batch["id"].to_pylist() for batch in batches]
    assert found == [[1, 2], [3]]


def test_a_second_query_reads_new_rows(spark, db, read):
    db.add("echo")
    frame = read("service string")
    assert frame.where("service = 'other'").count() == 0
    db.add("other")
    assert frame.count() == 2
    assert frame.where("service = 'other'").count() == 1
    assert frame.count() == 2
