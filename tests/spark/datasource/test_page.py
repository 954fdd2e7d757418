"""The examples in docs/spark/datasource.md run, and its tables list everything."""

import re
import time
from pathlib import Path

import pytest
from pyspark.sql import functions
from support.pages import blocks

from zmdp.spark.datasource.reader import SCHEMA
from zmdp.spark.datasource.table_options import READ_OPTIONS, STREAM_OPTIONS, WRITE_OPTIONS
from zmdp.titanic.contrib.arrow.rows import COLUMNS, ROW_OPTIONS

PAGE = (Path(__file__).parents[3] / "docs" / "spark" / "datasource.md").read_text()
only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL).group(1)


def first_cells(text):
    return [cell for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for cell in re.findall(r"`([^`]+)`", row)]


@pytest.mark.long
@only_sqlite
def test_the_examples_of_the_page_run(spark, db, capsys):
    """The examples run in order on a database whose requests took known times."""
    for service, unit in (("slow", 1.0), ("quick", 0.01)):
        for number in range(1, 101):
            db.done(service, now=time.time())
            db.run(f"UPDATE titanic_requests SET created = finished - {number * unit} WHERE id = "
                   "(SELECT max(id) FROM titanic_requests)")  # fmt: skip
    db.done("slow", code=500)
    names = {"spark": spark, "f": functions}
    for block in blocks(PAGE, "python"):
        exec(block.replace("sqlite:///titanic.db", db.url), names)
    (ends,) = spark.sql("SELECT count(*) AS n FROM ends").collect()
    latencies = {row.service: row for row in names["latencies"].collect()}
    assert (latencies["slow"].requests, latencies["quick"].requests) == (101, 100)
    assert latencies["quick"].p50 == pytest.approx(0.505, abs=0.01)
    assert latencies["quick"].p99 == pytest.approx(0.9901, abs=0.01)
    assert latencies["slow"].failed == pytest.approx(1 / 101)
    assert ends.n == 201
    assert sorted((row.service, row.key, row.priority) for row in db.requests()[-2:]) == [
        ("shout", "order-17", 9), ("shout", "order-18", 9),
    ]  # fmt: skip
    assert "slow" in capsys.readouterr().out


def test_the_page_lists_all_columns_and_options():
    columns, options, *_ = re.split(r"(?=^\| option)", section("Reading"), flags=re.MULTILINE)
    assert [cell for cell in first_cells(columns) if cell in SCHEMA.names][: len(SCHEMA)] == SCHEMA.names
    for field in SCHEMA:
        assert f"| `{field.name}` | {field.dataType.simpleString()} |" in columns
    assert set(first_cells(options)) == READ_OPTIONS
    assert {cell.lower() for cell in first_cells(section("Streaming"))} == STREAM_OPTIONS
    columns, options = re.split(r"(?=^\| option \|)", section("Writing"), flags=re.MULTILINE)
    assert set(first_cells(columns)) == set(COLUMNS)
    for name in ROW_OPTIONS:
        assert re.search(rf"^\| `{name}`.*\| (yes|as JSON) \|", columns, re.MULTILINE), name
    assert set(first_cells(options)) == {*WRITE_OPTIONS, "job", "sink"} - ROW_OPTIONS
