"""Filters that the database applies for Spark with `pushdown`."""

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import datasource
from pyspark.sql.types import StructType

from zmdp.spark.datasource.reader import Condition, open_reader, pushed_conditions

if not hasattr(datasource, "EqualTo"):
    pytest.skip("PySpark 4.0 pushes no filters down", allow_module_level=True)

from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    Not,
    StringContains,
)

AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (EqualTo(("service",), "echo"), [Condition("service", "in", ["echo"])]),
        (EqualTo(("service",), "a\0"), [Condition("service", "in", [])]),
        (In(("state",), ("done", "lost")), [Condition("state", "in", ["done", "lost"])]),
        (EqualTo(("id",), 5), [Condition("id", "=", 5)]),
        (In(("id",), (5, 6)), [Condition("id", "in", (5, 6))]),
        (GreaterThan(("id",), 5), [Condition("id", ">", 5)]),
        (GreaterThan(("created",), AT), [Condition("created", ">", AT.timestamp() - 1e-6)]),
        (LessThan(("finished",), AT), [Condition("finished", "<", AT.timestamp() + 1e-6)]),
        (
            EqualTo(("due",), AT),
            [Condition("due", ">", AT.timestamp() - 1e-6), Condition("due", "<", AT.timestamp() + 1e-6)],
        ),
        (IsNull(("finished",)), [Condition("finished", "null")]),
        (IsNotNull(("started",)), [Condition("started", "not")]),
        (GreaterThan(("service",), "echo"), None),
        (EqualTo(("priority",), 5), None),
        (EqualTo(("key",), "k"), None),
        (StringContains(("service",), "e"), None),
        (Not(EqualTo(("service",), "echo")), None),
        (EqualTo(("headers", "a"), "k"), None),
    ],
    ids=str,
)  # fmt: skip
def test_filters_pushed_to_the_database(wanted, taken):
    assert pushed_conditions(wanted) == taken


def test_the_database_filters_as_spark_would(db):
    """Filters on times may match a microsecond more."""
    for service in ("echo", "other", "echo", "ECHO", "größe"):
        db.add(service)
    db.end("echo", now=AT.timestamp() + 1)
    db.end("other", code=500, now=AT.timestamp() + 2)
    for wanted, ids in [
        ([EqualTo(("service",), "echo")], [1, 3]),
        ([EqualTo(("service",), "a\0")], []),
        ([In(("service",), ("größe", "ECHO", "x"))], [4, 5]),
        ([EqualTo(("state",), "pending")], [3, 4, 5]),
        ([In(("state",), ("done", "failed", "lost"))], [1, 2]),
        ([EqualTo(("state",), "lost")], []),
        ([EqualTo(("id",), 3)], [3]),
        ([GreaterThan(("id",), 2), LessThan(("id",), 5)], [3, 4]),
        ([GreaterThanOrEqual(("id",), 4), In(("id",), (1, 5))], [5]),
        ([IsNull(("finished",)), EqualTo(("service",), "echo")], [3]),
        ([IsNotNull(("finished",))], [1, 2]),
        ([EqualTo(("finished",), AT + timedelta(seconds=1))], [1]),
        ([GreaterThan(("finished",), AT + timedelta(seconds=1.5))], [2]),
        ([LessThan(("finished",), AT + timedelta(seconds=1.5))], [1]),
        ([EqualTo(("priority",), 5)], [1, 2, 3, 4, 5]),
    ]:
        reader = open_reader({"db": db.url, "pushdown": "true"}, StructType.fromDDL("id long"))
        left = reader.pushFilters(wanted)
        assert left == [each for each in wanted if each.attribute[0] in {"finished", "priority"}]
        found = [batch.column("id").to_pylist() for span in reader.partitions() for batch in reader.read(span)]
        assert [id_ for batch in found for id_ in batch] == ids, wanted


def test_filters_reach_the_database_with_pushdown(db, read, capfd):
    db.add("echo")
    db.add("other")
    for pushdown in ("true", "false"):
        frame = read(pushdown=pushdown).where("service = 'echo' AND id > 0 AND created > timestamp'2026-01-01'")
        assert [row.service for row in frame.collect()] == ["echo"]
        frame.explain()
        (left,) = [line for line in capfd.readouterr().out.splitlines() if " Filter " in line]
        assert "created" in left  # the database rounds it less
        assert ("= echo" in left, "L > 0" in left) == (pushdown == "false",) * 2
