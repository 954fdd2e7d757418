"""What jobs and queries return: tables of all kinds, rows with their names, and what is refused, whatever its size."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import run
from support.sparks import LIMITS, result, rows, running_batch

from zmdp.clients import Client, ServiceError
from zmdp.spark.client import SparkJobs
from zmdp.testing import running_broker


@dataclass
class Total:
    day: date
    amount: Decimal


class Own:
    pass


ARROW = pa.table({"n": [1, 2], "d": pa.array([Decimal("1.50"), None])})
VALUES = {
    "row": Row(name="ann", age=np.int64(3)),
    "rows": [Row(a=1, b=Row(c=date(2026, 1, 2))), (1, 2)],
    "dataclass": {"totals": [Total(date(2026, 1, 2), Decimal("1.50"))], 1: {b"\x00"}},
    "numpy": [np.float32(0.5), np.bool_(True), np.array([[1, 2]]), np.datetime64("2026-01-02T03:04:05.000000006")],
    "times": [datetime(2026, 1, 2, 3, 4, 5, 6, UTC), timedelta(1, 2), float("nan"), pd.Timestamp(2026, 1, 2)],
    "own": {"a": [1, Own()]},
    "key": {(1, 2): 3},
    "frame inside": [pd.DataFrame({"a": [1]})],
}
TABLES = {
    "arrow": ARROW,
    "batch": ARROW.to_batches()[0],
    "pandas": pd.DataFrame({"n": [1, 2], "d": [Decimal("1.50"), None]}, index=["x", "y"]),
    "large": pa.table({"n": range(10_000)}),
    "twice": pd.DataFrame([[1, 2]], columns=["a", "A"]),
    "empty": pa.table({}),
}


def value(spark, name: str):
    return VALUES[name]


def table(spark, name: str):
    return TABLES[name]


def stream(spark, name: str):
    """Yields a table, a DataFrame of it, and something else."""
    yield TABLES[name]
    yield spark.createDataFrame(ARROW)
    yield [Row(a=1)]


def temporary(spark):
    """Leaves a view to all sessions."""
    spark.sql("SELECT 'mine' AS a").createOrReplaceGlobalTempView("everybodys")


@pytest.fixture(scope="module")
def at(spark, tmp_path_factory):
    jobs = {each.__name__: each for each in (value, table, stream, temporary)}
    with ExitStack() as stack:
        endpoint = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0)).endpoints[0]
        stack.enter_context(running_batch(spark, endpoint, tmp_path_factory.mktemp("results"), jobs=jobs))
        yield endpoint


@pytest.fixture
def client(at):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as made:
        yield made


@pytest.fixture
def jobs(client):
    return SparkJobs(client, progress=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("row", {"name": "ann", "age": 3}), ("rows", [{"a": 1, "b": {"c": "2026-01-02"}}, [1, 2]]),
        ("dataclass", {"totals": [{"day": "2026-01-02", "amount": "1.50"}], "1": ["AA=="]}),
        ("numpy", [0.5, True, [[1, 2]], "2026-01-02T03:04:05"]),
        ("times", ["2026-01-02T03:04:05.000006Z", "P1DT2S", "nan", "2026-01-02T00:00:00"]),
    ],
)  # fmt: skip
def test_values(jobs, name, expected):
    assert jobs.run("value", name=name).value == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own", r"result.a\[1\] is of type Own"), ("key", r"result has the key \(1, 2\); expected a string"),
        ("frame inside", r"result\[0\] is of type DataFrame, .* a table"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_sent(jobs, name, message):
    with pytest.raises(ServiceError, match=message):
        jobs.run("value", name=name)


@pytest.mark.parametrize("name", ["arrow", "batch", "pandas"])
def test_tables_of_pandas_and_arrow(jobs, name):
    result = jobs.run("table", name=name)
    assert [(each["name"], each["type"]) for each in result.described["columns"]] == [
        ("n", "bigint"), ("d", "decimal(3,2)")
    ]  # fmt: skip
    assert result.to_arrow().to_pylist() == ARROW.to_pylist()


@pytest.mark.parametrize("name", ["arrow", "batch", "pandas"])
def test_tables_in_streams(at, jobs, name):
    *tables, last = jobs.run("stream", name=name).yielded
    assert [each.to_pylist() for each in tables] == [ARROW.to_pylist()] * 2
    assert last == [{"a": 1}]
    done = run("mdp-spark", "submit", "job", "stream", "--arg", f"name={name}", "--broker", at)
    shown = [json.loads(line) for line in done.stderr.decode().splitlines() if line.startswith("[{")]
    assert shown == [[{"n": 1, "d": "1.50"}, {"n": 2, "d": None}]] * 2 + [[{"a": 1}]]
    done = run("mdp-spark", "submit", "job", "stream", "--arg", f"name={name}", "--format", "arrow", "--broker", at)
    assert done.stderr.decode().count("a table of 2 rows") == 2


def test_a_yielded_table_that_is_too_large(jobs):
    with pytest.raises(ServiceError, match="a yielded table has 80000 bytes; at most 10000 can be sent") as raised:
        jobs.run("stream", name="large")
    assert raised.value.code == 413


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize("format_", ["json", "arrow"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("id AS a, id AS A", "two columns have the name 'A'"), ("id AS a, id AS a", "two columns have the name 'a'"),
        ("parse_json(IF(id = 1, NULL, '1')) AS v", "column v is of type variant, .* write to_json"),
        ("array(named_struct('v', parse_json('1'))) AS v", r"column v\[\].v is of type variant"),
        ("make_ym_interval(1, 2) AS i", "column i is of type interval year to month, .* CAST it to string"),
        ("make_interval(1) AS i", "column i is of type interval, .* CAST it to string"),
        ("array() AS a, id", r"column a\[\] is of type void, .* CAST it to the type"),
    ],
)  # fmt: skip
def test_columns_that_no_result_has_whatever_its_size(client, columns, message, format_, size):
    with pytest.raises(ServiceError, match=message) as raised:
        rows(client, f"SELECT {columns} FROM range({size})", format=format_)
    assert raised.value.code == 422


def test_results_without_columns(client, jobs):
    for name, message in (("empty", "the result has no columns"), ("twice", "two columns have the name 'A'")):
        for job in ("table", "stream"):
            with pytest.raises(ServiceError, match=message):
                jobs.run(job, name=name)
    with pytest.raises(ServiceError, match="the result has no columns"):
        rows(client, "SELECT * EXCEPT (id) FROM range(3)")


def test_nulls_beside_values_whose_parts_are_not_null(client):
    sql = "SELECT array(named_struct('a', 1), NULL) AS x, map('a', named_struct('b', 2), 'c', NULL) AS m"
    assert rows(client, sql) == [{"x": [{"a": 1}, None], "m": {"a": {"b": 2}, "c": None}}]


def test_intervals(client):
    assert rows(client, "SELECT INTERVAL '-1 02:03:04.5' DAY TO SECOND AS i") == [{"i": "-P1DT7384.5S"}]


def test_maps_with_other_keys(client):
    assert rows(client, "SELECT map(DATE'2026-01-02', 1) AS a, map(1.5BD, 2) AS b, map(true, 3) AS c") == [
        {"a": {"2026-01-02": 1}, "b": {"1.5": 2}, "c": {"true": 3}}
    ]


def test_global_views_of_jobs_are_not_for_queries(client, jobs):
    jobs.run("temporary")
    for sql in (
        "SELECT * FROM global_temp.everybodys",
        "TABLE global_temp.everybodys",
        "DESCRIBE global_temp.everybodys",
    ):
        with pytest.raises(ServiceError, match="queries may not read the catalog global_temp"):
            rows(client, sql)


def test_types_on_the_command_line(at):
    sql = "SELECT :a AS a, :b AS b, typeof(:a) AS t, typeof(:c) AS u"
    arguments = ("--arg", "a:decimal(38,2)=12345678901234567890.13", "--arg", "b=12345678901234567890.13")
    done = run("mdp-spark", "submit", "sql", sql, *arguments, "--arg", "c:date=2026-01-02", "--broker", at)
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row == {"a": "12345678901234567890.13", "b": "12345678901234567890.13", "t": row["t"], "u": "date"}
    done = run("mdp-spark", "submit", "sql", "SELECT :c", "--arg", "c:date=2.1.", "--broker", at)
    assert b'parameter c is "2.1.", which is not of type date' in done.stderr


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("no type", 1, "parameter x is 1, which is not of type no type: "), ("int", 1 << 40, "is not of type int"),
        ("date", "today", 'parameter x is "today", which is not of type date: '), ("int", [1], "is not of type int"),
        ("decimal(5,2)", 1234.5, "is not of type decimal"), ("binary", "%", "is not of type binary"),
        ("timestamp_ntz", "2026-01-02T03:04:05+02:00", "is not of type timestamp_ntz"),
    ],
)  # fmt: skip
def test_parameters_that_are_not_of_their_type(client, kind, value, message):
    with pytest.raises(ServiceError, match=message) as raised:
        rows(client, "SELECT :x", args={"x": value}, types={"x": kind})
    assert raised.value.code == 422


def test_parameters_do_not_outlive_their_query(client):
    described, data = result(
        client, "spark.sql", "SELECT :x AS x", {"args": {"x": "2026-01-02"}, "types": {"x": "date"}}
    )
    assert json.loads(data) == [{"x": "2026-01-02"}]
    for _ in range(4):  # whichever session it gets
        with pytest.raises(ServiceError, match="UNRESOLVED_COLUMN"):
            rows(client, f"SELECT zmdp_{described['job']}_0 AS x")
