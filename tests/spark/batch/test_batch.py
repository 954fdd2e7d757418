"""Spark jobs as services: real Spark in this process, with real clients and commands.

Beside tests/spark/test_end_to_end.py, which has what `make test` shows.
"""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from support.access import Folder
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import alive, eventually, run
from support.sparks import BEATS, LIMITS, frames, free, result, rows, running_batch, task_pids
from support.titanics import serving

from zmdp.clients import Client, RequestCancelled, ServiceError
from zmdp.spark import drivers
from zmdp.spark.batch import runner
from zmdp.testing import running_broker

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def at(spark, folder):
    """The endpoint of a broker with a batch and Titanic."""
    tables = f"""
        [tables.history]
        format = "titanic"
        options = {{ db = "{folder / "titanic.db"}" }}
    """
    with ExitStack() as stack:
        server = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0))
        endpoint = server.endpoints[0]
        stack.enter_context(running_batch(spark, endpoint, folder, tables=tables))
        stack.enter_context(serving(endpoint, str(folder / "titanic.db"), **BEATS))
        with Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS) as client:
            eventually(
                lambda: client.available("spark.sql") and client.available("titanic.request"), SPARK_TIMEOUT_SECONDS
            )
        yield endpoint


@pytest.fixture
def client(at):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as made:
        yield made


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


# ── named jobs ───────────────────────────────────────────────────────────────────────────────────────────────────────


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sql", "condition", "message"),
    [
        ("SELECT 1 a b", "PARSE_SYNTAX_ERROR", "not a valid query: [PARSE_SYNTAX_ERROR] Syntax error at or near 'b'"),
        ("\nSELECT 1 a b", "PARSE_SYNTAX_ERROR", "(line 2, pos 11)"),
        (
            "SELECT 1;\nSELECT 2",
            "PARSE_SYNTAX_ERROR",
            "one statement a request: nothing may follow the ';' in line 1",
        ),
        ("SELECT * FROM nowhere", "TABLE_OR_VIEW_NOT_FOUND", "line 1 pos 14"),
        ("SELECT * FROM text.`/etc/passwd`", "TABLE_OR_VIEW_NOT_FOUND", "`/etc/passwd`"),
        ("SELECT nothing FROM range(1)", "UNRESOLVED_COLUMN.WITH_SUGGESTION", "`nothing`"),
        ("WITH a AS (SELECT 1 AS a) INSERT INTO t SELECT a FROM a", "PARSE_SYNTAX_ERROR", "use spark.job"),
        ("SELECT 1) UNION (SELECT 2", "PARSE_SYNTAX_ERROR", "Syntax error"),
    ],
)
def test_an_invalid_query(client, spark, sql, condition, message):
    with pytest.raises(ServiceError) as raised:
        rows(client, sql)
    assert raised.value.code == 422
    assert message in raised.value.text
    assert "\n" not in raised.value.text
    assert json.loads(raised.value.detail)["condition"] == condition
    assert not spark.catalog.tableExists("t")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT TRANSFORM(a) USING 'touch FILE' AS (x) FROM VALUES (1) AS t(a)",
        "SELECT TRANSFORM(a) USING /* /* */ ( */ 'touch FILE' AS (x) FROM VALUES (1) AS t(a)",
        "SELECT TRANSFORM(a) USING --\r'touch FILE' AS\n(x) FROM VALUES (1) AS t(a)",
        "FROM VALUES (1) AS t(a) MAP a USING 'touch FILE' AS (x)",
        "SELECT * FROM range(1) WHERE id IN (SELECT TRANSFORM(a) USING 'touch FILE' AS (x) FROM VALUES (1) AS t(a))",
        "SELECT reflect('java.lang.System', 'gc')",
        "SELECT `java_method`('java.lang.System', 'gc')",
        "SELECT IDENTIFIER('refl' || 'ect')('java.lang.System', 'gc')",
        "SELECT system.builtin.try_reflect('java.lang.System', 'gc')",
    ],
)
def test_a_query_cannot_run_programs_or_java(client, tmp_path, sql):
    refused = r"ROUTINE|NAMESPACE" if "system.builtin" in sql else r"use spark\.job"  # Spark 4.0 has no such name
    with pytest.raises(ServiceError, match=rf"use spark\.job|{refused}") as raised:
        rows(client, sql.replace("FILE", str(tmp_path / "made")))
    assert raised.value.code == 422
    assert not (tmp_path / "made").exists()


def test_a_query_that_is_too_large(client):
    with pytest.raises(ServiceError, match=r"1048589 bytes; the batch allows 1048576 \(--max-query\)") as raised:
        rows(client, "SELECT 1 --" + "x" * (1 << 20))
    assert raised.value.code == 413


def test_strings_that_look_unsafe_are_accepted(client):
    assert rows(client, "SELECT 'we are using it, reflect()' AS t, 1 AS identifier") == [
        {"t": "we are using it, reflect()", "identifier": 1}
    ]


# ── progress, cancelling, sharing ────────────────────────────────────────────────────────────────────────────────────


def test_only_its_owner_and_admins_manage_a_job(spark, tmp_path):
    access = Folder(tmp_path)
    with ExitStack() as stack:
        at = stack.enter_context(access.broker(limits=LIMITS)).endpoints[0]
        stack.enter_context(running_batch(spark, at, tmp_path, results=False, keys=access.keys("driver")))
        shop = stack.enter_context(Client(at, timeout=SPARK_TIMEOUT_SECONDS, **access.settings("shop")))
        future = shop.submit("spark.job", *frames("gated", {"folder": str(tmp_path)}))
        task_pids(tmp_path)
        status = run("mdp-spark", "status", "--broker", at, *access.options("driver"))
        assert "a job of shop" in status.stdout.decode()
        (job,) = drivers.ask(shop, "batch", "status")["running"]
        assert "gated(" in job["what"]
        for role, code in (("driver", 6), ("operator", 0)):
            done = run("mdp-spark", "cancel", job["job"], "--broker", at, *access.options(role))
            assert (done.returncode, b"only shop or an admin can cancel it" in done.stderr) == (code, bool(code))
        with pytest.raises(RequestCancelled):
            future.result()
        for op in ("drain", "reload"):
            with pytest.raises(ServiceError, match=f"role shop may not ask batch for '{op}': only an admin may"):
                drivers.ask(shop, "batch", op)
    eventually(lambda: free(spark), SPARK_TIMEOUT_SECONDS)


def test_a_client_that_ends_cancels_its_job(at, spark, tmp_path):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client:
        client.submit("spark.job", *frames("gated", {"folder": str(tmp_path)}))
        running_now = task_pids(tmp_path)
    eventually(lambda: free(spark) and not any(map(alive, running_now)), SPARK_TIMEOUT_SECONDS)


def test_a_command_tells_errors_once_and_names_the_deadline(at, spark, tmp_path):
    submit, where = ("mdp-spark", "submit"), ("--broker", at)
    failed = run(*submit, "sql", "SELECT * FROM nowhere", *where)
    assert (failed.returncode, failed.stderr.count(b"TABLE_OR_VIEW_NOT_FOUND")) == (6, 1), failed.stderr
    failed = run(*submit, "sql", "SELECT * FROM nowhere", "--json", *where)
    assert b'"condition": "TABLE_OR_VIEW_NOT_FOUND", "sqlstate": "42P01"' in failed.stderr
    failed = run(*submit, "job", "choosing", *where)
    assert b"a teapot; detail: detail" in failed.stderr  # not Spark's
    given = ("gated", "--arg", f"folder={tmp_path}", "--deadline", "1s")
    failed = run(*submit, "job", *given, *where)
    assert failed.stderr.splitlines()[-1] == b"mdp-spark: cancelled: --deadline 1s passed"
    assert failed.returncode == 3
    eventually(lambda: free(spark), SPARK_TIMEOUT_SECONDS)


def test_a_short_query_does_not_wait_for_more_long_jobs_than_there_are_cores(spark, endpoint, tmp_path):
    connected = Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS)
    with running_batch(spark, endpoint, tmp_path, concurrency=4), connected as client:
        jobs = []
        for number in range(2 * spark.sparkContext.defaultParallelism):
            folder = tmp_path / str(number)
            folder.mkdir()
            jobs.append(client.submit("spark.job", *frames("many", {"folder": str(folder)})))
            eventually((folder / "task-0").exists, SPARK_TIMEOUT_SECONDS)
        assert rows(client, "SELECT count(*) AS n FROM range(0, 100, 1, 4)") == [{"n": 100}]
        assert not any(job.done() for job in jobs)
        assert all(job.cancel() for job in jobs)


def test_a_job_that_yields_faster_than_it_is_read_waits_and_can_be_cancelled(at, spark):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client:
        for part, _ in zip(client.stream("spark.job", b"endless"), range(50), strict=False):
            assert not part.final
        eventually(lambda: not drivers.ask(client, "batch", "status")["running"], SPARK_TIMEOUT_SECONDS)


def test_a_job_that_ignores_cancelling_blocks_only_its_own_session(spark, endpoint, tmp_path, logged, monkeypatch):
    monkeypatch.setattr(runner, "CANCEL_GRACE_SECONDS", 0.3)
    connected = Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS)
    with running_batch(spark, endpoint, tmp_path, concurrency=1), connected as client:
        stuck = client.submit("spark.job", *frames("stuck", {"folder": str(tmp_path)}))
        eventually((tmp_path / "began").exists, SPARK_TIMEOUT_SECONDS)
        stuck.cancel()
        assert logged("was cancelled, but still runs, and keeps its session", SPARK_TIMEOUT_SECONDS)
        for _ in range(3):
            assert rows(client, "SELECT 1 AS a") == [{"a": 1}]
            assert json.loads(result(client, "spark.job", "rows", {"n": 1})[1]) == [{"id": 0}]
        (given_up,) = drivers.ask(client, "batch", "status")["running"]
        assert (given_up["what"].partition("(")[0], given_up["state"]) == ("stuck", "cancelling")
        assert b"cancelled, but still runs: stuck(" in run("mdp-spark", "status", "--broker", endpoint).stdout
        (tmp_path / "go").touch()
        eventually(lambda: not drivers.ask(client, "batch", "status")["running"], SPARK_TIMEOUT_SECONDS)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def command(in_this_process):
    """`command(*arguments)` is `mdp-spark` in this process."""
    return partial(in_this_process, "mdp-spark")


@pytest.fixture
def submit(command):
    """`submit(at, *arguments)` is `mdp-spark submit`; returns the lines of its output, and what it says beside it."""

    def submitted(at, *arguments, code=0):
        done = command("submit", *arguments, "--broker", at)
        assert done.returncode == code, done.stderr
        return done.stdout.decode().splitlines(), done.stderr.decode()

    return submitted


def test_submit_sql(submit, at, folder):
    assert submit(at, "sql", "SELECT :n AS n, 'ä' AS t", "--arg", "n=3")[0] == ['{"n": 3, "t": "ä"}']
    (line,), _ = submit(at, "sql", "SELECT 1 AS n", "--json")
    assert json.loads(line)["data"] == [{"n": 1}]
    lines, progress = submit(at, "sql", "SELECT * FROM range(3000)")
    assert Path(lines[0]).parent == folder / "results"
    assert "the result (3000 rows) is too large to send" in progress


def test_submit_job(submit, at):
    assert submit(at, "job", "rows", "--arg", "n=2")[0] == ['{"id": 0}', '{"id": 1}']
    lines, progress = submit(at, "job", "value", "--arg", "a=1", "--arg", "b=x")
    assert json.loads(lines[0])["given"] == {"a": 1, "b": "x"}
    assert "on batch" in progress
    assert "n is 'x'; expected int (" in submit(at, "job", "rows", "--arg", "n=x", code=6)[1]
    assert "no job named 'nope'" in submit(at, "job", "nope", code=6)[1]
    assert "unexpected extra argument" in submit(at, "job", "rows", "3", code=2)[1]
    assert "NAME=VALUE" in submit(at, "job", "rows", "--arg", "n", code=2)[1]


def test_errors_of_submit(submit, command, at):
    assert "require --durable" in submit(at, "sql", "SELECT 1", "--detach", code=2)[1]
    assert "no batch offers 'other.sql'" in submit(at, "sql", "SELECT 1", "--prefix", "other", code=4)[1]
    assert "not a query" in submit(at, "sql", "SELEC 1", code=6)[1]
    nobody = "tcp://127.0.0.1:9"
    done = command("submit", "sql", "SELECT 1", "--broker", nobody)
    assert (done.returncode, nobody in done.stderr.decode()) == (5, True)


def test_titanic_can_be_queried_as_a_table(submit, at, client):
    submit(at, "sql", "SELECT 1 AS n", "--durable")
    found = rows(client, "SELECT service, state, count(*) AS n FROM history WHERE service = 'spark.sql' GROUP BY ALL")
    assert [(row["service"], row["state"]) for row in found] == [("spark.sql", "done")]


def test_waiting_for_and_cancelling_a_durable_job(submit, command, at, spark, tmp_path):
    (uuid,), _ = submit(at, "job", "gated", "--arg", f"folder={tmp_path}", "--durable", "--detach")
    running_now = task_pids(tmp_path)
    done = command("status", uuid, "--broker", at)
    assert (done.returncode, "has no result yet" in done.stderr.decode()) == (3, True)
    assert command("cancel", uuid, "--broker", at).returncode == 0
    eventually(lambda: free(spark), SPARK_TIMEOUT_SECONDS)
    eventually(lambda: not any(map(alive, running_now)), SPARK_TIMEOUT_SECONDS)
    assert command("cancel", uuid, "--broker", at).returncode == 4
    assert command("status", uuid, "--broker", at).returncode == 4


def test_status(submit, command, at, client, tmp_path):
    future = client.submit("spark.job", *frames("gated", {"folder": str(tmp_path), "tasks": 2}))
    task_pids(tmp_path)
    shown = command("status", "--broker", at).stdout.decode()
    assert "batch batch on" in shown
    assert "0/2 tasks" in shown
    assert "gated(folder=" in shown
    (driver,) = json.loads(command("status", "--json", "--broker", at).stdout)
    (job,) = driver["running"]
    assert (driver["kind"], driver["tables"], job["tasks"], job["state"]) == (
        "batch", ["history"], 2, "running",
    )  # fmt: skip
    (tmp_path / "go").touch()
    assert json.loads(future.result()[-1]) == 2


def test_control_commands_for_unknown_drivers_and_jobs(command, at, client):
    assert command("drain", "nobody", "--broker", at).returncode == 4
    assert command("drain", "a b", "--broker", at).returncode == 2
    assert command("cancel", "0" * 16, "--broker", at).returncode == 4
    for asked in (b"", b"3", b"{}", b'{"op": "fly"}', b"\xff"):
        with pytest.raises(ServiceError, match="one of: status, catalogue, cancel, reload, drain") as raised:
            client.request("spark.control.batch", asked)
        assert raised.value.code == 422
