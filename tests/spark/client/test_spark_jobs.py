"""Queries and jobs as function calls, on a real batch, and in a real notebook."""

import json
import re
from contextlib import ExitStack
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.pages import blocks
from support.processes import eventually, run
from support.sparks import LIMITS, free, running_batch, task_pids

from zmdp.clients import Client, ServiceError, ServiceNotFound
from zmdp.mdp.errors import SettingError
from zmdp.spark.client import JobFailed, SparkJobs
from zmdp.spark.client.spark_jobs import JobResult
from zmdp.testing import running_broker

PAGE = (Path(__file__).parents[3] / "docs" / "spark" / "index.md").read_text()
SECTION = PAGE.partition("\n## From notebooks and programs\n")[2]
TABLES = """
[tables.people]
format = "csv"
path = "people.csv"
schema = "name string, age int"
options = { header = true }
[tables.mixed]
format = "parquet"
path = "mixed"
schema = "id bigint"
"""


def test_an_error_of_spark_has_its_parts():
    text = (
        "[FAILED_READ_FILE.X] Encountered error while reading file file:///lake/b.parquet. Expected bigint. SQLSTATE: "
        "KD001; caused by SchemaException: column: [id]"
    )
    error = JobFailed.of(ServiceError(500, text, b'{"condition": "FAILED_READ_FILE.X", "sqlstate": "KD001"}'), job="1f")
    assert (error.condition, error.sqlstate) == ("FAILED_READ_FILE.X", "KD001")
    assert str(error).splitlines() == [
        "[FAILED_READ_FILE.X] Encountered error while reading file file:///lake/b.parquet.",
        "  Expected bigint.",
        "  cause: SchemaException: column: [id]",
        "  more: mdp-spark logs 1f",
    ]


@pytest.mark.parametrize(
    ("text", "query", "shown"),
    [
        ("no such column x. SQLSTATE: 42703; line 2 pos 3", "SELECT\n   x", ["  line 2:    x", "             ^"]),
        ("Syntax error. SQLSTATE: 42601 (line 1, pos 7)", "SELECT ?", ["  line 1: SELECT ?", "                 ^"]),
        ("it is in line 9 pos 1", "SELECT 1", []),
        ("it is in line 1 pos 1", "", []),
    ],
)
def test_an_error_shows_the_place_in_the_query(text, query, shown):
    error = JobFailed.of(ServiceError(422, text, b"[]"), query=query)
    assert error.lines()[1:] == shown
    assert error._render_traceback_()[1:] == shown


def test_without_a_batch_there_is_no_waiting(endpoint):
    with Client(endpoint) as client, pytest.raises(ServiceNotFound):
        SparkJobs(client).sql("SELECT 1")


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_numbers_that_json_does_not_have(endpoint, number):
    with Client(endpoint) as client, pytest.raises(SettingError, match=r"argument x\.1\[0\] is .* NaN and infinity"):
        SparkJobs(client).run("value", x={1: [number]})


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Own(), "parameter x is of type Own"), ([{"a": {1, Own()}}], r"parameter x\S+ .*Own"),
        ([1, "a"], "parameter x\\[\\] has values of the types bigint and string; make them of one type"),
        (Decimal("NaN"), "parameter x is NaN"), (Decimal("1e38"), "needs a decimal of 39 digits"), (1 << 130, "digits"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "parameter x"),
    ],
)  # fmt: skip
def test_values_that_spark_does_not_have(endpoint, value, message):
    with Client(endpoint) as client, pytest.raises(SettingError, match=message):
        SparkJobs(client).sql("SELECT :x", x=value)


# ── on a batch ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def at(spark, folder):
    """The endpoint of a broker with a batch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "people.csv").write_text("name,age\nann,3\nbob,4\nann,5\n")
    (folder / "mixed").mkdir()
    pq.write_table(pa.table({"id": ["x"]}), folder / "mixed" / "b.parquet")
    with ExitStack() as stack:
        server = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0))
        stack.enter_context(running_batch(spark, server.endpoints[0], folder, tables=TABLES))
        yield server.endpoints[0]


@pytest.fixture
def jobs(at):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as client:
        yield SparkJobs(client)


@pytest.mark.long
def test_rows_and_values(jobs, capsys):
    query = "SELECT name, age FROM people WHERE age > {} ORDER BY age"
    assert jobs.sql(query.format(":than"), than=3).to_pandas()["age"].tolist() == [4, 5]
    assert jobs.sql(query.format("?"), 4).to_arrow().to_pylist() == [{"name": "ann", "age": 5}]
    older = jobs.run("older", than=3)
    assert (older.yielded, older.to_arrow()["name"].to_pylist()) == ([{"people": 3}], ["ann", "bob"])
    assert '{"people": 3}' in capsys.readouterr().err
    value = jobs.run("value", day=date(2026, 11, 21))
    assert value.value["given"] == {"day": "2026-11-21"}
    with pytest.raises(SettingError, match=r"use \.value"):
        value.to_arrow()
    with pytest.raises(SettingError, match=r"use to_arrow\(\)"):
        older.value  # noqa: B018 - a property
    assert "<td>bob</td>" in older._repr_html_()


@pytest.mark.long
def test_large_results_are_fetched_when_they_are_wanted(jobs):
    large = jobs.sql("SELECT id FROM range(20000)")
    assert (large.data, large.described["rows"]) == (b"", 20_000)
    assert isinstance(large, JobResult)
    assert "20,000 rows, to be fetched from batch" in large._repr_html_()
    assert sum(large.to_arrow()["id"].to_pylist()) == sum(range(20_000))


@pytest.mark.long
def test_errors_on_a_batch(jobs, folder):
    with pytest.raises(JobFailed) as raised:
        jobs.sql("SELECT name,\n  agee\nFROM people")
    error = raised.value
    assert (error.code, error.condition, error.line, error.column) == (422, "UNRESOLVED_COLUMN.WITH_SUGGESTION", 2, 2)
    assert error.remedy.startswith("Did you mean one of the following? [`age`, `name`]")
    assert "  line 2:   agee\n            ^" in str(error)
    with pytest.raises(JobFailed) as raised:
        jobs.sql("SELECT * FROM mixed")
    assert f"file://{folder}/mixed/b.parquet" in raised.value.problem
    assert len(raised.value.job) == 16


@pytest.mark.long
def test_an_interrupt_cancels_the_job(jobs, spark, tmp_path, monkeypatch):
    def interrupted(parts):
        for part in parts:
            yield part
            if json.loads(part[0]).get("tasks_running"):
                task_pids(tmp_path)
                raise KeyboardInterrupt

    monkeypatch.setattr("zmdp.spark.client.spark_jobs.watching", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jobs.run("gated", folder=str(tmp_path))
    eventually(lambda: free(spark), SPARK_TIMEOUT_SECONDS)


@pytest.mark.long
def test_the_page_in_a_real_notebook(at, tmp_path):
    if not (find_spec("nbclient") and find_spec("ipykernel")):
        pytest.skip("Jupyter is missing: pip install nbclient ipykernel")
    cells = blocks(SECTION, "python")
    sources = [cell.strip().replace("tcp://127.0.0.1:5555", at) for cell in cells]
    notebook = tmp_path / "page.ipynb"
    code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [{**code, "id": f"cell-{number}", "source": source} for number, source in enumerate(sources)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook.write_text(json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    done = run("jupyter-execute", "--inplace", "--allow-errors", "--timeout", "600", str(notebook))
    assert done.returncode == 0, done.stderr.decode()
    first, frames, older, wrong = (cell["outputs"] for cell in json.loads(notebook.read_text())["cells"])
    bar, table = ("".join(output["data"]["text/html"]) for output in first)
    assert 'value="1"' in bar
    assert re.search(r"job \w{16} done", bar)
    assert "<th>name</th><th>age</th>" in table
    assert frames == []
    printed = "".join("".join(output["text"]) for output in older if output["output_type"] == "stream")
    assert printed == "{'people': 3}\n[{'people': 3}] 2\n"
    (error,) = (output for output in wrong if output["output_type"] == "error")
    *shown, more = re.findall(r"^    (  .*)$", SECTION.split("\n    JobFailed")[1], re.MULTILINE)
    assert error["ename"] == "JobFailed"
    assert error["traceback"][1:-1] == shown
    assert error["traceback"][-1].startswith(more[:-16])
