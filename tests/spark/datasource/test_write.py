"""Writing rows as requests: their options, and that each is written exactly once."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.types import StructType
from support.processes import eventually
from support.titanics import serving

from zmdp.mdp.errors import SettingError, ZmdpError
from zmdp.spark.datasource import writer as writers
from zmdp.spark.datasource.columns import arrow_schema
from zmdp.spark.datasource.writer import JobWriter, StreamWriter
from zmdp.titanic import enqueue
from zmdp.titanic import schema as schemas
from zmdp.titanic.arrow import rows as row_rules
from zmdp.titanic.arrow.bodies import binary
from zmdp.titanic.arrow.rows import COLUMNS, STAGED
from zmdp.titanic.frames import unpack
from zmdp.titanic.store import staging
from zmdp.titanic.submission import MAX_SECONDS, OPTIONS
from zmdp.workers import Worker
from zmdp.workers.handling import MAX_BODY_FRAMES

only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
AT = datetime(2035, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_columns_become_requests(spark, db, write):
    rows = [
        ("one", [b"a", b"\0\xff"], "k", 60.5, 9, None, AT, 3, 0.25, 3600.0, {"user": "ü"}),
        ("two", [b""], None, None, None, 3600.0, None, None, None, None, None),
    ]
    columns = (
        "service string, request array<binary>, key string, key_ttl double, priority int, delay double, at timestamp, "
        "retries int, backoff double, ttl double, headers map<string,string>"
    )
    with pytest.raises(Exception, match="columns delay and at both set when a request runs"):
        write(spark.createDataFrame(rows, columns))
    frame = spark.createDataFrame(rows, columns)
    before = time.time()
    write(frame.drop("delay").where("service = 'one'").coalesce(1))
    write(frame.drop("at").where("service = 'two'").coalesce(1))
    one, two = db.requests()
    assert (one.service, one.state, one.priority, one.due, one.key) == ("one", "delayed", 9, AT.timestamp(), "k")
    assert (one.retries, one.backoff, one.result_ttl, one.attempts) == (3, 0.25, 3600.0, 0)
    assert (json.loads(one.headers), unpack(one.body)) == ({"user": "ü"}, [b"a", b"\0\xff"])
    assert before <= one.created <= time.time()
    ((expires,),) = db.run("SELECT expires FROM titanic_keys WHERE service = 'one' AND key = 'k'")
    assert expires == one.created + 60.5
    assert (two.service, two.state, two.priority, two.key, unpack(two.body)) == ("two", "delayed", 0, None, [b""])
    assert two.due == pytest.approx(two.created + 3600, abs=1e-6)
    assert (two.retries, two.backoff, two.result_ttl, two.headers) == (0, None, None, None)
    assert db.left_over == (0, 0)


@pytest.mark.parametrize(
    ("kind", "value", "frames"),
    [
        ("string", "größe", ["größe".encode()]),
        ("binary", bytearray(b"\0\xff"), [b"\0\xff"]),
        ("array<string>", ["a", "ü"], [b"a", "ü".encode()]),
        ("array<binary>", [bytearray(b"a"), bytearray(b"")], [b"a", b""]),
    ],
)
def test_types_of_bodies(pristine, kind, value, frames):
    (asked,) = entries(pristine, f"request {kind}", [[value]], service="s")
    assert unpack(asked.body) == frames


def entries(db, schema, columns, **options):
    """Return what would be staged for these columns."""
    kind = StructType.fromDDL(schema)
    writer = JobWriter({"db": str(db), **options}, kind, overwrite=False)
    arrow = arrow_schema(kind)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(*each) for each in zip(columns, arrow.types, strict=True)], schema=arrow
    )
    return [SimpleNamespace(**row) for row in writer.target.rows.convert(batch, 1, 0, 0).to_pylist()]


def test_rows_can_set_every_option_of_a_submission_and_every_staged_column():
    assert set(OPTIONS) <= set(COLUMNS)
    assert set(STAGED.names) == set(staging.STAGED.columns.keys())


def test_options_apply_to_rows_without_a_value(pristine):
    options = {
        "service": "usual", "priority": "3", "retries": "2", "delay": "1.5", "backoff": "0.5", "ttl": "60",
        "key_ttl": "9", "headers": '{"a": "b"}',
    }  # fmt: skip
    schema = "request string, service string, key string, priority short, at timestamp, headers map<string,string>"
    columns = [["x", "y"], [None, "other"], ["k", "l"], [None, 7], [None, AT], [None, [("c", "d")]]]
    usual, other = entries(pristine, schema, columns, **options)
    assert (usual.service, usual.priority, usual.delay, usual.due, usual.headers) == (
        "usual",
        3,
        1.5,
        None,
        '{"a": "b"}',
    )
    assert (usual.retries, usual.backoff, usual.result_ttl, usual.key_ttl) == (2, 0.5, 60, 9)
    assert (other.service, other.priority, other.delay, other.due) == ("other", 7, None, AT.timestamp())
    assert other.headers == '{"c": "d"}'


@pytest.mark.parametrize("at", [AT, AT.timestamp(), AT.isoformat()], ids=["timestamp", "seconds", "text"])
def test_formats_of_times(pristine, at):
    kind = {datetime: "timestamp", float: "double", str: "string"}[type(at)]
    (asked,) = entries(pristine, f"request string, due {kind}", [["x"], [at]], service="s")
    assert asked.due == pytest.approx(AT.timestamp(), abs=1e-6)


@pytest.mark.parametrize(
    ("schema", "row", "message"),
    [
        ("request string", [None], "the request is NULL"),
        ("request array<string>", [["a", None]], "a frame of the request is NULL"),
        ("request array<string>", [[]], "a body of at least one frame"),
        ("request string, service string", ["x", "a\0b"], "the first frame must be the service's name"),
        ("request string, service string", ["x", "mmi.services"], "mmi.services cannot be called through Titanic"),
        ("request string, priority int", ["x", 10], "priority must be a whole number from 0 to 9"),
        ("request string, retries long", ["x", -1], "retries must be a whole number from 0 to 1000"),
        ("request string, delay double", ["x", -1.0], "delay is -1.0: it must be a number of seconds, 0 or more"),
        ("request string, delay double", ["x", float("nan")], "delay is nan: it must be a number of seconds"),
        ("request string, ttl int", ["x", 0], "ttl is 0.0: it must be a number of seconds, above 0"),
        ("request string, key string", ["x", ""], "key must be text of 1 to 255 bytes"),
        ("request string, key string", ["x", "a\0"], "key must be text of 1 to 255 bytes"),
        ("request string, key_ttl int", ["x", 5], "key_ttl needs a key"),
        (
            "request string, at string",
            ["x", "2035-01-02T03:04:05"],
            "at is '2035-01-02T03:04:05'; expected seconds since 1970, or a time such as 2030-",
        ),
        ("request string, at string", ["x", "soon"], "at is 'soon'; expected seconds since 1970"),
        ("request string, at double", ["x", 1e300], "at must"),
        ("request string, headers map<string,string>", ["x", [("a", None)]], "headers must map text to text"),
    ],
)
def test_invalid_rows(pristine, schema, row, message):
    options = {} if "service" in schema else {"service": "s"}
    with pytest.raises(SettingError) as refused:
        entries(pristine, schema, [[value] for value in row], **options)
    assert str(refused.value).startswith("row 0 of partition 0 is not a valid request, so nothing was written: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    [
        ("service", "string", ["", "s", "ü" * 127, "ü" * 128, "s" * 256, "a b", "a\n", "a\0", "titanic.x", "mmi.x"]),
        ("key", "string", ["", "k", "ü" * 127, "ü" * 128, "k" * 255, "k" * 256, "a\0b", "a\nb", " ", "\n"]),
        ("priority", "int", [-1, 0, 9, 10]),
        ("priority", "decimal(20,0)", [Decimal(-1), Decimal(0), Decimal(9), Decimal(10), Decimal(10**19)]),
        ("retries", "long", [-1, 0, 1000, 1001, 2**62]),
        *(
            (name, "double", [-1.0, -0.0, 5e-324, 1.5, MAX_SECONDS, MAX_SECONDS * 1.001, math.inf, -math.inf, math.nan])
            for name in ("delay", "ttl", "key_ttl", "backoff")
        ),
        ("at", "double", [-2 * MAX_SECONDS, -1.0, 0.0, 2 * MAX_SECONDS, 2.001 * MAX_SECONDS, math.inf, math.nan]),
        ("at", "timestamp", [AT, AT.replace(year=9999), AT.replace(year=1)]),
        ("at", "string", ["", "x", AT.isoformat(), "2035-01-02T03:04:05Z", "2035-01-02 03:04+01", "2035-13-02T00:00Z"]),
        ("request", "array<binary>", [[], [b""], [b"x"] * MAX_BODY_FRAMES, [b"x"] * (MAX_BODY_FRAMES + 1)]),
    ],
    ids=str,
)  # fmt: skip
def test_the_rules_for_columns_are_those_for_single_requests(pristine, name, kind, values):
    """`enqueue` checks single requests."""
    engine = schemas.open_engine(schemas.database_url(str(pristine)))
    for value in values:
        options = {"service": "s", "request": "x"} | ({"key": "k"} if name == "key_ttl" else {}) | {name: value}
        columns = {"service": "string", "request": "string", "key": "string", name: kind}
        schema = ", ".join(f"{each} {columns[each]}" for each in options)
        service, frames = options.pop("service"), options.pop("request")
        if name == "at" and isinstance(value, str):
            with suppress(ValueError):
                options["at"] = datetime.fromisoformat(value)
        if name == "priority":
            options["priority"] = int(value)
        try:
            with engine.begin() as connection:
                enqueue(connection, service, *(frames if isinstance(frames, list) else [b"x"]), **options)
                connection.rollback()
            wanted = not (name == "request" and not value)  # `enqueue` adds an empty frame
        except SettingError:
            wanted = False
        row = {"service": "s", "request": "x", "key": "k", name: value}
        try:
            entries(pristine, schema, [[row[each.split()[0]]] for each in schema.split(", ")])
            found = True
        except SettingError:
            found = False
        assert found == wanted, value
    engine.dispose()


def test_text_that_is_not_utf8_is_refused(pristine):
    """Spark does not check its strings."""
    invalid = pa.Array.from_buffers(pa.string(), 1, binary(b"k\xff", 2).buffers())
    for name in ("key", "service", "at"):
        writer = JobWriter(
            {"db": str(pristine), "service": "s"}, StructType.fromDDL(f"request string, {name} string"), overwrite=False
        )
        batch = pa.RecordBatch.from_arrays([pa.array(["x"]), invalid], ["request", name])
        with pytest.raises(SettingError, match="row 0 of partition 0 is not a valid request"):
            writer.target.rows.convert(batch, 1, 0, 0)


def test_the_bad_row_of_a_slice_is_named(pristine):
    writer = JobWriter(
        {"db": str(pristine), "service": "s"}, StructType.fromDDL("request string, priority int"), overwrite=False
    )
    batch = pa.RecordBatch.from_pydict({"request": list("abcdef"), "priority": [0, 0, 11, 0, None, 12]})
    with pytest.raises(SettingError, match=re.escape("row 102 of partition 7 is not") + r".*request='f', priority=12"):
        writer.target.rows.convert(batch.slice(3), 1, 100, 7)
    assert writer.target.rows.convert(batch.slice(3, 2), 1, 0, 0)["priority"].to_pylist() == [0, 0]


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("request string", {}, "name a service"),
        ("service string", {}, "the column request is missing"),
        (
            "request string, sevice string",
            {"service": "s"},
            "titanic cannot write column 'sevice'; available columns:",
        ),
        (
            "request int",
            {"service": "s"},
            "titanic cannot write request as int32; expected string, binary, array<binary>",
        ),
        ("request string, priority string", {"service": "s"}, "titanic cannot write priority as string"),
        (
            "request string, headers map<string,int>",
            {"service": "s"},
            "titanic cannot write headers as map<string, int32>",
        ),
        ("request string, at string, due string", {"service": "s"}, "columns at and due both set when a request runs"),
        ("request string, REQUEST string", {"service": "s"}, "titanic cannot write column 'REQUEST'"),
        ("request string", {"service": "s", "priority": "high"}, "priority is 'high'; expected an integer"),
        ("request string", {"service": "s", "priority": "10"}, "invalid write option: priority must be a whole"),
        ("request string", {"service": "s", "delay": "-1"}, "invalid write option: delay is -1.0: it must be"),
        ("request string", {"service": "s", "at": "2035-01-02"}, "at is '2035-01-02'; expected a timestamp, seconds"),
        ("request string", {"service": "s", "headers": "{"}, "headers is '{'; expected"),
        ("request string", {"service": "s", "headers": "[1]"}, "headers must map text to text"),
        ("request string", {"service": "mmi.x"}, "mmi.x cannot be called through Titanic"),
        ("request string", {"service": "s", "key": "k"}, "titanic has no option 'key' to write"),
        ("request string", {"service": "s", "sink": "k"}, "titanic has no option 'sink' to write"),
        ("request string", {"service": "s", "job": ""}, "the name of a job or sink must have 1 to 500 characters"),
        ("request string", {"service": "s", "db": "nowhere.db"}, "there is no database nowhere.db"),
    ],
)
def test_invalid_writes(pristine, schema, options, message):
    with pytest.raises(ZmdpError, match=re.escape(message)):
        JobWriter({"db": str(pristine), **options}, StructType.fromDDL(schema), overwrite=False)


def test_overwriting_is_refused(spark, db, write):
    db.add()
    with pytest.raises(Exception, match="titanic only adds requests"):
        rows(spark, 1).write.format("titanic").option("db", db.url).option("service", "s").mode("overwrite").save()
    assert db.count() == 1


def test_a_bad_row_fails_the_write_and_nothing_is_written(spark, db, write):
    frame = spark.range(30, numPartitions=2).selectExpr("string(id) AS request", "int(if(id = 25, 11, 1)) AS priority")
    with pytest.raises(Exception, match="BadRow") as refused:
        write(frame, service="s")
    assert (
        "row 10 of partition 1 is not a valid request, so nothing was written: priority must be a whole number"
        in str(refused.value)
    )
    assert "(request='25', priority=11)" in str(refused.value)
    assert db.count() == 0
    assert db.left_over == (0, 0)


# ── exactly once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def rows(spark, count, partitions=2):
    return spark.range(count, numPartitions=partitions).selectExpr("string(id) AS request")


def bodies(db):
    return sorted(int(unpack(row.body)[0]) for row in db.requests())


@pytest.fixture
def failing(spark, tmp_path):
    """`failing(count)`: rows whose tasks first fail after much has been staged."""

    def made(count):
        marks = tmp_path / "marks"
        marks.mkdir()

        def fail_once(batches):
            task = TaskContext.get().partitionId()
            for number, batch in enumerate(batches):
                yield batch
                if number == 3 and not (marks / str(task)).exists():
                    (marks / str(task)).touch()
                    raise RuntimeError("in the middle of it")

        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
        return rows(spark, count).mapInArrow(fail_once, "request string")

    yield made
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def test_failing_tasks_write_nothing_twice(failing, db, write):
    write(failing(30_000), service="s")
    assert bodies(db) == list(range(30_000))
    assert db.left_over == (0, 0)


def test_a_repeated_job_is_skipped(spark, db, write):
    write(rows(spark, 10), service="s", job="nightly")
    write(rows(spark, 20), service="s", job="nightly")
    assert bodies(db) == list(range(10))
    write(rows(spark, 1), service="s", job="another")
    write(rows(spark, 1), service="s")
    write(rows(spark, 1), service="s")
    assert bodies(db) == [0, 0, 0, *range(10)]
    assert db.left_over == (0, 0)
    assert db.run("SELECT kind, name, requests FROM titanic_written ORDER BY name") == [
        ("job", "another", 1), ("job", "nightly", 10),
    ]  # fmt: skip


def writer(db, kind=JobWriter, **options):
    return kind(
        {"db": db.url, "service": "s", **options}, StructType.fromDDL("request string, key string"), overwrite=False
    )


def batches(*texts, key=None):
    """Return rows as an executor receives them."""
    keys = [key] * len(texts) if not isinstance(key, list) else key
    return iter([pa.RecordBatch.from_pydict({"request": list(texts), "key": pa.array(keys, pa.string())})])


def test_only_the_attempt_that_spark_accepts_counts(db):
    one = writer(db)
    first, second, other = (one.write(batches(*texts)) for texts in ("ab", "ab", "c"))
    one.commit([second, other, None])
    assert sorted(unpack(row.body)[0] for row in db.requests()) == [b"a", b"b", b"c"]
    assert db.left_over == (0, 0)
    assert first.staged.staging != second.staged.staging


def test_a_late_attempt_is_refused(db, monkeypatch):
    monkeypatch.setattr(row_rules, "MAX_CHUNK_BYTES", 1)  # so that each row is staged when the next one arrives
    one = writer(db)

    def slowly():
        yield from batches("a", "b")
        one.commit([])
        yield from batches("c")

    with pytest.raises(staging.StagingLost, match="which was too late"):
        one.write(slowly())
    assert db.count() == 0
    one.abort([])
    assert db.left_over == (0, 0)


def test_aborted_writes_are_discarded(db):
    one = writer(db)
    message = one.write(batches("a", "b"))
    one.write(batches("c"))  # a task whose driver never hears of it
    assert db.left_over == (3, 2)
    one.abort([message, None])
    assert db.left_over == (0, 0)
    assert db.count() == 0


@pytest.mark.parametrize("lost", ["DELETE FROM titanic_staged", "DELETE FROM titanic_staged WHERE number = 0"])
def test_lost_staged_rows_fail_the_whole_write(db, lost):
    one = writer(db, job="j")
    message = one.write(batches("a", "b"))
    db.run(lost)
    with pytest.raises(
        staging.StagingLost, match=r"only . of 2 staged rows are left: .* nothing was written, so write them again"
    ):
        one.commit([message])
    assert db.count() == 0
    again = writer(db, job="j")
    again.commit([again.write(batches("a", "b"))])
    assert db.count() == 2


def test_old_rows_of_dead_drivers_are_swept(db):
    dead, waits = writer(db), writer(db)
    dead.write(batches("a", "b"))
    message = waits.write(batches("c"))
    db.run("UPDATE titanic_staging SET touched = touched - 90000 WHERE id = 1")
    living = writer(db)
    living.commit([living.write(batches("d"))])
    assert db.left_over == (1, 1)
    waits.commit([message])
    assert [unpack(row.body)[0] for row in db.requests()] == [b"d", b"c"]
    assert db.left_over == (0, 0)


def test_a_sweep_is_bounded(db, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK", 2)
    monkeypatch.setattr(staging, "OF_OTHERS", 3)
    dead = writer(db)
    dead.write(batches(*"abcdefgh"))
    db.run("UPDATE titanic_staging SET touched = 1")
    living = writer(db)
    living.commit([])
    assert db.left_over == (4, 1)
    living.commit([])
    assert db.left_over == (0, 1)


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_the_table_of_staged_rows_is_emptied_only_when_no_write_uses_it(db):
    size = "SELECT pg_relation_size('titanic_staged')"
    one, other = writer(db), writer(db)
    waiting = other.write(batches("c"))
    one.commit([one.write(batches("a", "b"))])
    assert db.left_over == (1, 1)
    assert db.run(size)[0][0] > 0
    other.commit([waiting])
    assert [unpack(row.body)[0] for row in db.requests()] == [b"a", b"b", b"c"]
    assert db.left_over == (0, 0)
    assert db.run(size) == [(0,)]


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_user_without_the_right_to_truncate_can_write(db):
    db.run("CREATE ROLE loader LOGIN")
    db.run("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO loader")
    db.run("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO loader")
    try:
        one = JobWriter(
            {"db": db.url.replace("postgres@", "loader@"), "service": "s"},
            StructType.fromDDL("request string, key string"),
            overwrite=False,
        )
        one.commit([one.write(batches("a"))])
    finally:
        db.run("DROP OWNED BY loader")
        db.run("DROP ROLE loader")
    assert (db.count(), db.left_over) == (1, (0, 0))


def test_batches_are_staged_in_chunks_of_a_bounded_size(monkeypatch):
    monkeypatch.setattr(row_rules, "MAX_CHUNK_BYTES", 8 * 100)
    numbers = list(range(1000))
    some = [
        pa.RecordBatch.from_pydict({"n": numbers[at:end]}) for at, end in ((0, 30), (30, 60), (60, 700), (700, 1000))
    ]
    chunks = list(row_rules.bounded(some))
    assert [n for chunk in chunks for n in chunk["n"].to_pylist()] == numbers
    assert [chunk.num_rows for chunk in chunks] == [60, *[100] * 6, 40, *[100] * 3]


def test_concurrent_commits_of_one_job(db, run_together):
    writers = [writer(db, job="j") for _ in range(3)]
    messages = [each.write(batches("a", "b", key=["k", None])) for each in writers]
    run_together([lambda at=at: writers[at].commit([messages[at]]) for at in range(3)])
    assert db.count() == 2
    assert db.left_over == (0, 0)


@pytest.fixture
def run_together():
    def run(functions):
        with ThreadPoolExecutor() as pool:
            for each in [pool.submit(function) for function in functions]:
                each.result(60)

    return run


def test_concurrent_writes_of_the_same_keys(db, run_together):
    names = [f"k{at}" for at in range(200)]

    def one(order):
        each = writer(db)
        each.commit([each.write(batches(*names, key=names[::order]))])

    run_together([lambda order=order: one(order) for order in (1, -1, 1, -1)])
    assert sorted(row.key for row in db.requests()) == sorted(names)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_without_ttl_never_expires(db):
    first = db.add("s", b"first", key="known")
    db.add("other", b"other", key="new")
    one = writer(db)
    one.commit([
        one.write(batches("0", "1", "2", "3", "4", key=["new", "known", None, "new", None])),
        one.write(batches("5", "6", key=["new", "newer"])),
    ])  # fmt: skip
    assert [unpack(row.body)[0] for row in db.requests() if row.service == "s"] == [b"first", b"0", b"2", b"4", b"6"]
    assert db.add("s", b"x", key="known") == first
    stored = {row.key: row.uuid.hex for row in db.requests() if row.service == "s" and row.key}
    assert db.add("s", b"x", key="newer") == stored["newer"]
    db.run("DELETE FROM titanic_requests")
    again = writer(db)
    again.commit([again.write(batches("a", "b", "c", key=["known", "new", "newer"]))])
    assert db.count() == 0


def test_an_expired_key_is_new(db):
    one = writer(db, key_ttl="60")
    one.commit([one.write(batches("a", key="k"))])
    one = writer(db)
    one.commit([one.write(batches("b", key="k"))])
    assert db.count() == 1
    db.run("UPDATE titanic_keys SET expires = 1000")
    one = writer(db)
    one.commit([one.write(batches("c", "d", key="k"))])
    assert [unpack(row.body)[0] for row in db.requests()] == [b"a", b"c"]
    assert db.run("SELECT expires FROM titanic_keys") == [(None,)]


@pytest.mark.parametrize(("repeated", "statements"), [(False, 2), (True, 4)])
def test_a_commit_scans_no_table(db, repeated, statements):
    names = [f"k{at}" for at in range(99)]
    names.append(names[0] if repeated else "k99")
    writer(db).write(batches(*names, key=names))
    plans = []

    def explain(*, conn, statement, parameters, **other):
        if "SELECT" in statement and not statement.startswith("EXPLAIN"):
            how = "EXPLAIN QUERY PLAN " if conn.dialect.name == "sqlite" else "EXPLAIN "
            plans.append("\n".join(str(row[-1]) for row in conn.exec_driver_sql(how + statement, parameters)))

    with db.engine.begin() as connection:
        if db.engine.dialect.name == "postgresql":  # tables as small as these are read as a whole
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        sa.event.listen(db.engine, "before_cursor_execute", explain, named=True)
        try:
            staging.commit(connection, None, [staging.Accepted(1, 100)], 1.0)
        finally:
            sa.event.remove(db.engine, "before_cursor_execute", explain)
    assert len(plans) == statements
    assert not any(word in plan for plan in plans for word in ("SCAN titanic_", "Seq Scan"))
    assert db.count() == (99 if repeated else 100)


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stream(spark, db, tmp_path):
    """`stream(folder, checkpoint, **options)`: write all lines of the folder's files."""

    def run(folder, checkpoint="checkpoint", **options):
        lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder))
        query = (
            lines.selectExpr("value AS request").writeStream.format("titanic")
            .option("db", db.url).option("service", "s").option("checkpointLocation", str(tmp_path / checkpoint))
            .options(**options).trigger(availableNow=True).start()
        )  # fmt: skip
        try:
            assert query.awaitTermination(60)
        finally:
            query.stop()
        return query

    return run


@pytest.fixture
def folder(tmp_path):
    """`folder(name, *lines)`: create a file for each line, which becomes a micro-batch."""

    def fill(name, *lines):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        for line in lines:
            (path / f"{line}.txt").write_text(f"{line}\n")
        return path

    return fill


@pytest.mark.parametrize("options", [{}, {"sink": "lines"}], ids=["unnamed", "named"])
def test_a_repeated_micro_batch_is_skipped(db, stream, folder, tmp_path, options):
    stream(folder("lines", 1, 2, 3), **options)
    assert bodies(db) == [1, 2, 3]
    commits = tmp_path / "checkpoint" / "commits"
    latest = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for name in (f"{latest}", f".{latest}.crc"):
        (commits / name).unlink()
    stream(folder("lines", 4), **options)
    assert bodies(db) == [1, 2, 3, 4]
    assert db.left_over == (0, 0)
    ((kind, batch),) = db.run("SELECT kind, batch FROM titanic_written")
    assert (kind, batch) == ("sink", 3)


def test_two_streams_are_independent(db, stream, folder):
    stream(folder("one", 1, 2), "first")
    stream(folder("two", 3), "second")
    stream(folder("one", 5), "first")
    stream(folder("two", 4), "second")
    assert bodies(db) == [1, 2, 3, 4, 5]
    assert db.count("titanic_written") == 2


@only_sqlite
def test_a_sink_with_a_new_checkpoint_is_refused(db, stream, folder):
    stream(folder("lines", 1), "first", sink="lines")
    with pytest.raises(Exception, match="another stream has written to the sink 'lines'"):
        stream(folder("others", 2), "second", sink="lines")
    assert bodies(db) == [1]
    assert db.left_over == (0, 0)


@only_sqlite
def test_rows_of_a_stream_without_arrow(db, monkeypatch):
    monkeypatch.setattr(writers, "STREAM_ARROW", False)
    one = writer(db, StreamWriter, sink="s")
    one.commit([one.write(iter([Row(request="a", key=None), Row(request="b", key="k")]))], 0)
    assert [(unpack(row.body)[0], row.key) for row in db.requests()] == [(b"a", None), (b"b", "k")]
    one.abort([], 1)


@only_sqlite
def test_a_micro_batch_without_rows(db):
    unnamed = writer(db, StreamWriter)
    unnamed.commit([], 0)
    assert db.count("titanic_written") == 0
    if writers.STREAM_ARROW:  # else it takes rows
        with pytest.raises(SettingError, match="Spark does not identify this stream; name it"):
            unnamed.commit([unnamed.write(batches("a"))], 1)


# ── the driver dies ──────────────────────────────────────────────────────────────────────────────────────────────────

DRIVER = """
import sys, time
from zmdp.spark.session import open_session

spark = open_session("dies", master="local[2]", conf={"spark.ui.enabled": "false"})

def slowly(batches):
    for batch in batches:
        yield batch
    time.sleep(600)

rows = spark.range(60_000, numPartitions=2).selectExpr("rpad(id, 1000, 'x') AS request")  # several transactions
rows = rows.mapInArrow(slowly, "request string")
rows.write.format("titanic").option("db", sys.argv[1]).option("service", "s").option("job", "j").mode("append").save()
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_driver_writes_nothing_and_its_job_can_be_repeated(spark, db, write, tmp_path):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, db.url], cwd=tmp_path, start_new_session=True)
    try:
        eventually(lambda: db.count("titanic_staged"), timeout=100)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(20)
    assert db.count() == 0
    write(rows(spark, 60_000), service="s", job="j")
    write(rows(spark, 60_000), service="s", job="j")
    assert bodies(db) == list(range(60_000))
    assert db.left_over != (0, 0)
    db.run("UPDATE titanic_staging SET touched = touched - 90000")
    write(rows(spark, 1), service="s", job="k")
    assert db.left_over == (0, 0)


# ── in all ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_from_rows_to_replies(spark, db, write, read, endpoint):
    with serving(endpoint, db.url), Worker("upper", lambda request: request[0].upper(), broker=endpoint):
        write(spark.createDataFrame([("a",), ("b",), ("c",)], "request string"), service="upper")
        query = (
            spark.readStream.format("titanic").option("db", db.url).schema("request string, reply string, state string")
            .load().writeStream.format("memory").queryName("ends").start()
        )  # fmt: skip
        try:
            until = time.monotonic() + 60
            while spark.table("ends").count() < 3:
                assert time.monotonic() < until
                query.processAllAvailable()
        finally:
            query.stop()
    assert sorted(tuple(row) for row in spark.table("ends").collect()) == [
        ("a", "A", "done"), ("b", "B", "done"), ("c", "C", "done"),
    ]  # fmt: skip
