"""Spark reads Titanic's requests as a table; tests/titanic/arrow has the rules for columns, conditions and ranges."""

from datetime import timedelta

import pytest

from zmdp.spark.datasource.columns import SCHEMA

pytestmark = pytest.mark.long


def seconds(moment):
    return moment.timestamp()


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


def test_missing_tables_are_reported_with_the_command_that_creates_them(spark, tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(Exception, match="SchemaError") as refused:
        spark.read.format("titanic").option("db", str(path)).load().collect()
    assert f"has no tables yet: run `titanic db upgrade --db sqlite:///{path}`" in str(refused.value)


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


def test_a_large_table_is_read_in_partitions(db, read):
    uuids = [db.add() for _ in range(3)]
    db.run("UPDATE titanic_requests SET id = 50000 WHERE id = 2")
    db.run("UPDATE titanic_requests SET id = 100000 WHERE id = 3")
    frame = read("uuid string, id long", partitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert {row.uuid for row in frame.collect()} == set(uuids)


def test_a_second_query_reads_new_rows(spark, db, read):
    db.add("echo")
    frame = read("service string")
    assert frame.where("service = 'other'").count() == 0
    db.add("other")
    assert frame.count() == 2
    assert frame.where("service = 'other'").count() == 1
    assert frame.count() == 2
