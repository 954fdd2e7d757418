"""Results that are too large to send: how Spark collects them, and how they are fetched."""

import json
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import eventually
from support.sparks import running_batch

from zmdp.clients import Client, ServiceError
from zmdp.spark.batch import fetching
from zmdp.spark.batch.job_history import History
from zmdp.spark.batch.results.sending import Results

pytestmark = pytest.mark.long
INLINE_BYTES = 10_000
JOB = "0123456789abcdef"
LARGE = "SELECT id, concat('text ', id) AS t FROM range(0, 40000, 1, 4)"


@pytest.fixture
def results(tmp_path):
    return Results(str(tmp_path / "results"), INLINE_BYTES)


def collected(results, table, format="json"):  # noqa: A002
    described, data = results.frames(table, JOB, format)
    return json.loads(described), data


# ── collecting ───────────────────────────────────────────────────────────────────────────────────────────────────────


def touching(folder, fail=False):
    """Return a function for `mapInArrow` that leaves a file for each time that a partition is computed."""

    def run(batches):
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        (Path(folder) / f"{context.partitionId()}-{context.attemptNumber()}-{time.time_ns()}").touch()
        yield from batches
        if fail and context.attemptNumber() == 0:
            raise ValueError("the first attempt fails at its end")

    return run


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("rows", [400, 40_000])
def test_a_result_is_computed_once_and_only_accepted_tasks_count(spark, results, tmp_path, rows, fail):
    (tmp_path / "ran").mkdir()
    table = spark.range(0, rows, 1, 4).mapInArrow(touching(tmp_path / "ran", fail), "id bigint")
    described, data = collected(results, table)
    assert described["rows"] == rows
    assert len(list((tmp_path / "ran").iterdir())) == (8 if fail else 4)
    assert not spark.sparkContext._jsc.getPersistentRDDs()
    if described["path"] is None:
        assert sorted(row["id"] for row in json.loads(data)) == list(range(rows))
        assert not any((tmp_path / "results").glob("*"))
    else:
        assert spark.read.parquet(described["path"]).selectExpr("sum(id)").first()[0] == rows * (rows - 1) // 2


def test_files_keep_the_order_of_rows(spark, results):
    table = spark.sql("SELECT id FROM range(0, 100000, 1, 3) UNION ALL SELECT id FROM range(0, 3, 1, 2)")
    described, _ = collected(results, table)
    files = sorted(Path(described["path"]).glob("part-*"))
    assert pa.concat_tables(map(pq.read_table, files))["id"].to_pylist() == [*range(100_000), *range(3)]


@pytest.mark.parametrize(
    ("inline", "first", "rows"),
    [(1 << 20, 16, 60_000), (16 << 20, 0, 600_000)],  # a large partition after small ones, and a very large one
)
def test_what_can_be_sent_needs_no_folder(spark, inline, first, rows):
    table = spark.range(0, first, 1, max(1, first)).union(spark.range(first, rows, 1, 1))
    described, data = collected(Results(None, inline), table)
    assert (described["rows"], described["path"]) == (rows, None)
    assert [row["id"] for row in json.loads(data)] == list(range(rows))


@pytest.mark.parametrize("rows", [10_000, 100_000])
def test_the_size_of_what_is_refused_is_too_large(spark, rows):
    with pytest.raises(ServiceError, match="at most 100000 bytes can be sent") as failed:
        collected(Results(None, 100_000), spark.range(rows))  # as Arrow, the smaller one could be sent
    assert int(re.search(r"the result has (\d+) bytes or more", failed.value.text)[1]) > 100_000


@pytest.mark.parametrize("format_", ["json", "arrow"])
def test_values_are_the_same_however_they_are_collected(spark, results, format_):
    sql = """SELECT timestamp'2026-01-01T00:00:00Z' AS t, timestamp_ntz'2026-01-01 00:00:00' AS n,
        date'2026-01-02' AS d, 1.50BD AS c, x'00ff' AS b, map(1, 'x') AS m,
        double('nan') AS f, named_struct('a', array(1, NULL)) AS s,
        CAST(NULL AS string) AS z, true AS y"""
    _, small = collected(results, spark.sql(sql), format_)
    _, large = collected(results, spark.sql(sql + " FROM explode(array(1))"), format_)  # Spark does not know its size
    if format_ == "json":
        assert json.loads(small) == json.loads(large)
        assert json.loads(small) == [{
            "t": "2026-01-01T00:00:00Z", "n": "2026-01-01T00:00:00", "d": "2026-01-02", "c": "1.50", "b": "AP8=",
            "m": {"1": "x"}, "f": "nan", "s": {"a": [1, None]}, "z": None, "y": True,
        }]  # fmt: skip
    else:
        first, second = (pa.ipc.open_stream(each).read_all() for each in (small, large))
        assert first.schema.types == second.schema.types
        assert str(first.to_pylist()) == str(second.to_pylist())


def test_a_query_that_fails_leaves_no_files(spark, results, tmp_path):
    table = spark.sql("SELECT id, if(id = 39999, raise_error('no'), 0) AS x FROM range(0, 40000, 1, 2)")
    with pytest.raises(Exception, match="USER_RAISED_EXCEPTION"):
        collected(results, table)
    assert not list(tmp_path.glob("results/*"))


def test_a_url_that_only_spark_can_write(spark, tmp_path):
    hadoop = spark._jsc.hadoopConfiguration()
    (tmp_path / "results").mkdir()
    hadoop.set("fs.viewfs.mounttable.here.link./results", f"file://{tmp_path}/results")
    described, _ = collected(Results("viewfs://here/results", INLINE_BYTES), spark.range(0, 400_000, 1, 4))
    assert (described["rows"], described["path"]) == (400_000, f"viewfs://here/results/{JOB}")
    assert spark.read.parquet(described["path"]).count() == 400_000


# ── fetching ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def running(spark, endpoint, folder, keys=None):
    history = History(folder / "history.db", "batch")
    with (
        running_batch(spark, endpoint, folder, concurrency=1, inline=INLINE_BYTES, keys=keys, history=history),
        Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, key=keys) as client,
    ):
        services = ("spark.fetch.batch", "spark.sql")
        eventually(lambda: all(map(client.available, services)), SPARK_TIMEOUT_SECONDS)
        yield


@pytest.fixture
def at(spark, endpoint, tmp_path):
    """The endpoint of a broker with a batch."""
    with running(spark, endpoint, tmp_path):
        yield endpoint


@pytest.fixture
def client(at):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as made:
        yield made


@pytest.fixture
def command(in_this_process, at):
    return partial(in_this_process, "mdp-spark")


def submitted(client, service, *frames):
    reply = client.request(service, *(each.encode() for each in frames))
    return json.loads(reply[-2])


def test_fetching_in_every_format(client, command, at, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(fetching, "MESSAGE_BYTES", 30_000)
    job = submitted(client, "spark.sql", LARGE + " ORDER BY id DESC")["job"]
    rows = [{"id": number, "t": f"text {number}"} for number in reversed(range(40_000))]
    read = {
        "json": lambda file: [json.loads(line) for line in file.read_text().splitlines()],
        "csv": lambda file: pa.csv.read_csv(file).to_pylist(),
        "arrow": lambda file: pa.ipc.open_stream(file.read_bytes()).read_all().to_pylist(),
    }
    for format_, reader in read.items():
        file = tmp_path / f"out.{format_}"
        done = command("fetch", job, "--format", format_, "--output", str(file), "--broker", at)
        assert (done.returncode, f"wrote 40000 rows to {file}" in done.stderr.decode()) == (0, True), done.stderr
        assert reader(file) == rows
        assert not list(tmp_path.glob("*.part"))
    assert len(command("fetch", job, "--broker", at).stdout.splitlines()) == 40_000


def test_errors_of_fetch(client, command, at, tmp_path):
    described = submitted(client, "spark.sql", "SELECT id, array(id) AS a FROM range(0, 40000, 1, 2)")
    output = tmp_path / "out"
    for options, code, message in (
        (("nope",), 4, "no batch at the broker knows job 'nope'"),
        ((described["job"], "--format", "csv", "--output", str(output)), 6, "cannot be sent as csv"),
    ):
        done = command("fetch", *options, "--broker", at)
        assert (done.returncode, message in done.stderr.decode()) == (code, True), done.stderr
    assert not list(tmp_path.glob("out*"))


# ── tracebacks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_traceback_of_code_on_executors_reaches_the_log_and_the_author(client, command, at, tmp_path, caplog):
    (tmp_path / "go").touch()
    (tmp_path / "fail").touch()
    with pytest.raises(ServiceError, match="ValueError: the last task fails"):
        client.request("spark.job", b"gated", json.dumps({"folder": str(tmp_path)}).encode())
    (row,) = json.loads(command("status", "--history", "--json", "--broker", at).stdout)
    assert (row["state"], row["code"], row["service"]) == ("failed", 500, "job")
    shown = command("logs", row["job"], "--broker", at).stdout.decode()
    for text in ('raise ValueError("the last task fails")', "batch_jobs.py", "gated(folder="):
        assert text in shown
    assert 'raise ValueError("the last task fails")' in caplog.text
    assert json.loads(command("logs", row["job"], "--json", "--broker", at).stdout)["traceback"] in shown
    assert command("logs", "nope", "--broker", at).returncode == 4
    lines = command("status", "--history", "--broker", at).stdout.decode()
    assert "failed" in lines
    assert "ValueError: the last task fails" in lines
