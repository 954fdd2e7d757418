"""Spark writes rows as requests; tests/titanic/contrib/arrow has the rules for rows and for writing them once."""

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest
from support.databases import check_columns
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import eventually
from support.sparks import finish, forget_last_batch
from support.titanics import BEATS, serving

from zmdp.titanic.api.submission import unpack
from zmdp.workers import Worker

pytestmark = pytest.mark.long
only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
AT = datetime(2035, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


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
    check_columns(db, AT, before)


def rows(spark, count, partitions=2):
    return spark.range(count, numPartitions=partitions).selectExpr("string(id) AS request")


def bodies(db):
    return sorted(int(unpack(row.body)[0]) for row in db.requests())


@pytest.fixture
def stream(spark, db, tmp_path):
    """`stream(folder, checkpoint, **options)`: write all lines of the folder's files."""

    def run(folder, checkpoint="checkpoint", **options):
        lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder))
        finish(
            lines.selectExpr("value AS request").writeStream.format("titanic")
            .option("db", db.url).option("service", "s").option("checkpointLocation", str(tmp_path / checkpoint))
            .options(**options).trigger(availableNow=True)
        )  # fmt: skip

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
    forget_last_batch(tmp_path / "checkpoint")
    stream(folder("lines", 4), **options)
    assert bodies(db) == [1, 2, 3, 4]
    assert db.left_over == (0, 0)
    ((kind, batch),) = db.run("SELECT kind, batch FROM titanic_written")
    assert (kind, batch) == ("sink", 3)


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


@pytest.mark.timeout(2400)
def test_a_killed_driver_writes_nothing_and_its_job_can_be_repeated(spark, db, write, tmp_path):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, db.url], cwd=tmp_path, start_new_session=True)
    try:
        eventually(lambda: db.count("titanic_staged"), timeout=SPARK_TIMEOUT_SECONDS)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert db.count() == 0
    write(rows(spark, 60_000), service="s", job="j")
    write(rows(spark, 60_000), service="s", job="j")
    assert bodies(db) == list(range(60_000))
    assert db.left_over != (0, 0)
    db.run("UPDATE titanic_staging SET touched = touched - 90000")
    write(rows(spark, 1), service="s", job="k")
    assert db.left_over == (0, 0)


def test_from_rows_to_replies(spark, db, write, endpoint, tmp_path):
    with serving(endpoint, db.url), Worker("upper", lambda request: request[0].upper(), broker=endpoint, **BEATS):
        write(spark.createDataFrame([("a",), ("b",), ("c",)], "request string"), service="upper")
        eventually(lambda: all(each.ended for each in db.requests()), SPARK_TIMEOUT_SECONDS)
    found = []
    finish(
        spark.readStream.format("titanic").option("db", db.url).schema("request string, reply string, state string")
        .load().writeStream.foreachBatch(lambda frame, number: found.extend(frame.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    )  # fmt: skip
    assert sorted(map(tuple, found)) == [("a", "A", "done"), ("b", "B", "done"), ("c", "C", "done")]
