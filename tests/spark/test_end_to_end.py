"""What zmdp does with Spark, from end to end, on the one session of this process.

Each test shows what only Spark can show; the rules are tested without it.  Tests marked `long` have the rest, and
those of processes and clusters are in the folders beside this file.
"""

import json
import os
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark import TaskContext
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from support.access import Folder
from support.databases import Database, new_file
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import alive, eventually
from support.sparks import (
    BEATS,
    HERE,
    LIMITS,
    finish,
    forget_last_batch,
    frames,
    free,
    result,
    rows,
    running_batch,
    running_fleet,
    task_pids,
)
from support.titanics import serving

from zmdp.clients import Client, ServiceError
from zmdp.spark import drivers
from zmdp.spark.pipeline import call_service, register_function
from zmdp.testing import running_broker
from zmdp.titanic.api.frames import unpack
from zmdp.workers import Worker

# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def at(spark, folder):
    """The endpoint of a broker with a batch."""
    (folder / "people.csv").write_text("name,age\nann,3\nbob,4\n")
    tables = "[tables.people]\nformat = 'csv'\npath = 'people.csv'\noptions = { header = true }"
    with ExitStack() as stack:
        server = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0))
        stack.enter_context(running_batch(spark, server.endpoints[0], folder, tables=tables))
        yield server.endpoints[0]


@pytest.fixture
def client(at):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as made:
        yield made


def test_a_query(client):
    described, data = result(client, "spark.sql", "SELECT name, int(age) + :n AS age FROM people", {"args": {"n": 1}})
    assert json.loads(data) == [{"name": "ann", "age": 4}, {"name": "bob", "age": 5}]
    assert len(described.pop("job")) == 16
    assert described == {
        "format": "json", "rows": 2, "path": None,
        "columns": [{"name": "name", "type": "string"}, {"name": "age", "type": "int"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "condition"),
    [
        ("SELECT * FROM nowhere", "TABLE_OR_VIEW_NOT_FOUND"),
        ("SELECT 1 a b", "PARSE_SYNTAX_ERROR"),
        ("SELECT TRANSFORM(name) USING 'touch made' AS (x) FROM people", None),
    ],
)
def test_a_query_that_is_refused(client, sql, condition):
    with pytest.raises(ServiceError) as raised:
        rows(client, sql)
    assert raised.value.code == 422
    assert condition is None or json.loads(raised.value.detail)["condition"] == condition
    assert condition is not None or "use spark.job" in raised.value.text


def test_a_job_reports_progress_and_what_it_yields(client, tmp_path):
    seen = []
    for part in client.stream("spark.job", *frames("gated", {"folder": str(tmp_path), "tasks": 4})):
        seen.append(json.loads(part[0]))
        if seen[-1].get("tasks_running") == 2:
            (tmp_path / "go").touch()
    waited = next(part for part in seen if part.get("tasks_running") == 2)
    assert (waited["tasks"], waited["tasks_done"], waited["stages"], waited["stages_done"]) == (4, 0, 1, 0)
    assert seen[-1]["format"] == "value"
    *parts, last = client.stream("spark.job", *frames("streaming", {"n": 2}))
    told = [json.loads(part[0]) for part in parts]
    assert [each["value"] for each in told if each["event"] == "yielded"] == [{"step": 0}, {"step": 1}]
    assert json.loads(last[1]) == [{"id": 0}, {"id": 1}]


def test_the_error_of_a_task_reaches_the_caller(client, tmp_path):
    (tmp_path / "go").touch()
    (tmp_path / "fail").touch()
    with pytest.raises(ServiceError, match="ValueError: the last task fails") as raised:
        result(client, "spark.job", "gated", {"folder": str(tmp_path)})
    assert raised.value.code == 500


def test_cancelling_a_request_cancels_its_spark_job(client, spark, tmp_path):
    future = client.submit("spark.job", *frames("gated", {"folder": str(tmp_path)}))
    pids = task_pids(tmp_path)
    assert future.cancel()
    eventually(lambda: free(spark), SPARK_TIMEOUT_SECONDS)
    eventually(lambda: not any(map(alive, pids)), SPARK_TIMEOUT_SECONDS)
    eventually(lambda: not drivers.ask(client, "batch", "status")["running"], SPARK_TIMEOUT_SECONDS)


def test_a_large_result_is_written_and_fetched(client, at, folder, in_this_process):
    described, data = result(client, "spark.sql", "SELECT id, 'x' AS x FROM range(0, 20000, 1, 2)")
    assert (described["format"], described["rows"], data) == ("parquet", 20_000, b"")
    assert Path(described["path"]).parent == folder / "results"
    done = in_this_process("mdp-spark", "fetch", described["job"], "--broker", at)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == list(range(20_000))


# ── pipeline ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def counts(endpoint):
    """Run the service `up`, which refuses the text `bad`; yields how often it got each text."""

    def up(request):
        found.update(frame.decode() for frame in request)
        if request[0] == b"bad":
            raise ServiceError(422, "odd")
        return [frame.upper() for frame in request]

    found = Counter()
    with Worker("up", up, broker=endpoint, concurrency=2, **BEATS):
        yield found


def test_rows_of_a_dataframe_get_replies_or_errors(spark, endpoint, counts):
    df = spark.sql("SELECT id, CASE id WHEN 3 THEN 'bad' WHEN 5 THEN NULL ELSE concat('row ', id) END AS text "
                   "FROM range(0, 1000, 1, 2)")  # fmt: skip
    replies = call_service(df, "up", input="text", broker=endpoint)
    assert replies.columns == ["id", "text", "reply", "reply_code", "reply_error"]
    others = {3: ("bad", None, 422, "odd"), 5: (None, None, None, None)}
    assert [tuple(row) for row in replies.collect()] == [
        (n, *others.get(n, (f"row {n}", f"ROW {n}", 200, None))) for n in range(1000)
    ]
    assert set(counts.values()) == {1}


def test_the_sql_function(spark, endpoint, counts):
    register_function(spark, broker=endpoint)
    query = "SELECT id, r.reply, r.code FROM (SELECT id, call_service('up', concat('t', id)) AS r FROM range(20))"
    assert sorted(tuple(row) for row in spark.sql(query).where("code = 200").collect()) == [
        (n, f"T{n}", 200) for n in range(20)
    ]
    assert set(counts.values()) == {1}  # neither once for each field, nor again for the filter


def test_a_stream_calls_once_for_each_key(spark, endpoint, counts, tmp_path):
    """Also if Spark repeats a micro-batch, as it does when it died before it had noted the end."""

    def run():
        lines = spark.readStream.format("text").load(str(tmp_path / "in"))
        keyed = lines.select("value", F.concat(F.lit("run/"), "value").alias("key"))
        replies = call_service(keyed, "up", input="value", key="key", broker=endpoint)
        finish(
            replies.writeStream.foreachBatch(lambda frame, number: found.append(frame.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        )  # fmt: skip

    found = []
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\ntwo\n")
    with serving(endpoint, str(tmp_path / "titanic.db"), **BEATS):
        run()
        forget_last_batch(tmp_path / "checkpoint")
        run()
    assert [sorted(row.reply for row in each) for each in found] == [["ONE", "TWO"]] * 2
    assert counts == {"one": 1, "two": 1}


# ── data source ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def db(tmp_path):
    new_file(tmp_path / "titanic.db")
    made = Database(f"sqlite:///{tmp_path}/titanic.db")
    yield made
    made.engine.dispose()


def bodies(db):
    return sorted(unpack(row.body)[0].decode() for row in db.requests())


def test_rows_are_written_once_and_requests_read(spark, db, tmp_path):
    """Although each task fails first, and the whole job is repeated."""

    def fail_once(batches):
        mark = tmp_path / f"failed-{TaskContext.get().partitionId()}"
        yield from batches
        if not mark.exists():
            mark.touch()
            raise RuntimeError("after all of its rows")

    frame = spark.range(1000, numPartitions=2).selectExpr(
        "string(id) AS request", "int(id % 10) AS priority", "map('n', string(id)) AS headers"
    )
    for _ in range(2):
        failing = frame.mapInArrow(fail_once, frame.schema)
        failing.write.format("titanic").options(db=db.url, service="s", job="nightly").mode("append").save()
    assert len(list(tmp_path.glob("failed-*"))) == 2
    assert bodies(db) == sorted(map(str, range(1000)))
    assert db.left_over == (0, 0)
    db.end("s", (b"reply",))
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW requests USING titanic OPTIONS (db '{db.url}')")
    try:
        rows = spark.sql("SELECT * FROM requests ORDER BY state, priority").collect()
    finally:
        spark.catalog.dropTempView("requests")
    done = rows[0]
    assert (done.service, done.state, done.priority, done.reply) == ("s", "done", 9, [b"reply"])
    assert (done.request, done.headers, done.started) == ([b"9"], {"n": "9"}, done.finished)
    assert done.created <= done.finished
    assert Counter(row.priority for row in rows) == dict.fromkeys(range(10), 100)


def test_a_bad_row_fails_the_write_and_nothing_is_written(spark, db):
    frame = spark.range(30, numPartitions=2).selectExpr("string(id) AS request", "int(if(id = 25, 11, 1)) AS priority")
    with pytest.raises(Exception, match="BadRow") as refused:
        frame.write.format("titanic").options(db=db.url, service="s").mode("append").save()
    assert "row 10 of partition 1 is not a valid request, so nothing was written" in str(refused.value)
    assert (db.count(), db.left_over) == (0, (0, 0))


def test_a_stream_writes_once_and_reads_again_what_spark_repeats(spark, db, tmp_path):
    """Spark repeats the micro-batch of either stream, as if it had died before it had noted its end."""

    def run(stream, name):
        finish(stream.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True))

    def write():
        lines = spark.readStream.format("text").load(str(tmp_path / "in")).selectExpr("value AS request")
        run(lines.writeStream.format("titanic").options(db=db.url, service="s"), "writing")

    def read():
        ends = spark.readStream.format("titanic").schema("id long, reply string").option("db", db.url).load()
        run(ends.writeStream.foreachBatch(lambda frame, number: batches.append(frame.collect())), "reading")

    batches = []
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("1\n2\n")
    write()
    forget_last_batch(tmp_path / "writing")
    write()
    assert bodies(db) == ["1", "2"]
    assert db.left_over == (0, 0)
    db.end("s")
    read()
    forget_last_batch(tmp_path / "reading")
    read()
    assert [[tuple(row) for row in each] for each in batches] == [[(1, "reply")]] * 2


# ── fleets ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def fleet(spark, endpoint, monkeypatch):
    """`fleet(name)` has executors serve the handler of this name; returns the fleet and a client."""
    monkeypatch.chdir(HERE)
    with ExitStack() as stack:
        client = stack.enter_context(Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, retries=0))

        def started(name):
            given = {"handler": f"fleet_handlers:{name}", "service": name}
            return stack.enter_context(running_fleet(spark, endpoint, **given)), client

        yield started


def test_executors_serve_until_the_fleet_is_drained(fleet):
    running, client = fleet("pid")
    pid = int(client.request("pid")[0])
    eventually(lambda: running.status()["slots"][0]["served"] == 1, SPARK_TIMEOUT_SECONDS)
    (slot,) = drivers.ask(client, "test", "status")["slots"]
    assert (slot["slot"], slot["state"], slot["pid"], slot["executor"]) == (0, "serving", pid, "driver")
    assert 1.6e9 < slot["since"] < 1e11
    assert drivers.ask(client, "test", "drain")["draining"] is True
    eventually(lambda: not client.available("pid"), SPARK_TIMEOUT_SECONDS)
    eventually(lambda: running.status()["slots"] == [], SPARK_TIMEOUT_SECONDS)


def test_a_request_survives_the_python_process_that_handles_it(fleet, tmp_path):
    _, client = fleet("wait")
    reply = client.submit("wait", str(tmp_path).encode())
    (began,) = eventually(lambda: list(tmp_path.glob("began-*")), SPARK_TIMEOUT_SECONDS)
    pid = int(began.name.removeprefix("began-"))
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert int(reply.result()[0]) != pid


def test_executors_use_the_key_of_the_fleet(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    folder = Folder(tmp_path)
    with folder.broker(limits=LIMITS) as server:
        (endpoint,) = server.endpoints
        shop = Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, retries=0, **folder.settings("shop"))
        with running_fleet(spark, endpoint, keys=folder.keys("driver")), shop:
            assert int(shop.request("pid")[0]) != os.getpid()
