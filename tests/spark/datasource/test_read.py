"""Spark reads Titanic's requests as a table; tests/titanic/contrib/arrow has the rules for columns and ranges."""

import pytest
from support.databases import OneOfEachState

from zmdp.spark.datasource.reader import SCHEMA

pytestmark = pytest.mark.long


def test_each_request_is_a_row(db, read):
    requests = OneOfEachState(db)
    rows = read().orderBy("id").collect()
    assert SCHEMA.names == rows[0].__fields__
    requests.check(rows)


def test_missing_tables_are_reported_with_the_command_that_creates_them(spark, tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(Exception, match="SchemaError") as refused:
        spark.read.format("titanic").option("db", str(path)).load().collect()
    assert f"has no tables yet: run `titanic db upgrade --db sqlite:///{path}`" in str(refused.value)


def test_a_second_query_reads_new_rows(spark, db, read):
    db.add("echo")
    frame = read("service string")
    assert frame.where("service = 'other'").count() == 0
    db.add("other")
    assert frame.count() == 2
    assert frame.where("service = 'other'").count() == 1
    assert frame.count() == 2
