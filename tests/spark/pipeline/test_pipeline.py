"""`call_service` and its SQL function on Spark, with a real broker, workers and Titanic.

The rules for rows are tested in tests/clients/rows, those of both functions in test_arguments.py and test_function.py.
"""

from collections import Counter
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import TaskContext
from pyspark.errors import PythonException
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import IntegerType, StringType, StructField, StructType
from support.access import Folder
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import eventually
from support.sparks import BEATS, LIMITS
from support.titanics import serving

from zmdp.mdp.errors import SettingError
from zmdp.spark.pipeline import call_service, register_function
from zmdp.testing import running_broker
from zmdp.workers import Worker

pytestmark = pytest.mark.long


def texts(spark, count, partitions=2):
    return spark.range(0, count, 1, partitions).selectExpr("id", "concat('row ', id) AS text")


class Handled:
    """A handler that records requests and replies in capitals."""

    def __init__(self):
        self.counts = Counter()

    def __call__(self, request):
        self.counts.update(frame.decode() for frame in request)
        return [frame.upper() for frame in request]


@contextmanager
def working(endpoint, handler=None, service="up"):
    handled = handler or Handled()
    with Worker(service, handled, broker=endpoint, concurrency=2, **BEATS):
        yield handled


@pytest.fixture
def up(endpoint):
    """Run the service `up`; yields what it has handled."""
    with working(endpoint) as handled:
        yield handled


@pytest.fixture
def titanic(endpoint, tmp_path):
    with serving(endpoint, str(tmp_path / "titanic.db"), **BEATS):
        yield


# ── rows and columns ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_types_pass_through(spark, endpoint, up):
    df = spark.sql(
        """
        SELECT 'x' AS text, true AS a, 1Y AS b, 2S AS c, 3L AS d, 1.5F AS e, 2.5D AS f, 12.34BD AS g, X'00ff' AS h,
            date'2020-01-02' AS i, timestamp'2020-01-02 03:04:05' AS j, timestamp_ntz'2020-01-02 03:04:05' AS k,
            interval '1 02' day to hour AS l, array(1, NULL) AS m, map('a', array(1)) AS n, named_struct('a', 1) AS o,
            cast(NULL AS int) AS p, cast('q' AS varchar(5)) AS q, array(named_struct('z', map(1, 2))) AS r, NULL AS s,
            to_json(parse_json('[1]')) AS t
        UNION ALL
        SELECT 'y', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            NULL, NULL, NULL, NULL
        """
    )
    replies = call_service(df, "up", input="text", broker=endpoint)
    assert replies.schema.fields[:-3] == df.schema.fields
    assert sorted(replies.drop("reply", "reply_code", "reply_error").collect(), key=str) == sorted(
        df.collect(), key=str
    )
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        assert sorted(row.reply for row in replies.collect()) == ["X", "Y"]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


def test_unusual_and_duplicate_column_names(spark, endpoint, up):
    df = spark.sql("SELECT 1 AS a, 2 AS a, 'x' AS `b.c`, 'y' AS `d``e`, named_struct('f', 'z') AS s")
    for column, reply in (("b.c", "X"), ("d`e", "Y"), ("s.f", "Z"), ("S.F", "Z"), ("`b.c`", "X"), ("`d``e`", "Y")):
        (row,) = call_service(df, "up", input=column, broker=endpoint, output="o.p").collect()
        assert tuple(row)[:2] == (1, 2)
        assert (row["o.p"], row["o.p_code"], row["o.p_error"]) == (reply, 200, None)


def test_column_names_in_backticks(spark, endpoint, up):
    df = spark.sql("SELECT 'x' AS `n.x`, named_struct('f.g', 'z', 'h', 'y') AS `s.t`")
    for column, reply in (("`s.t`.`f.g`", "Z"), ("`s.t`.h", "Y"), (["`n.x`", "`s.t`.`f.g`"], '{"N.X":"X","F.G":"Z"}')):
        (row,) = call_service(df, "up", input=column, broker=endpoint).collect()
        assert row.reply == reply
    with Worker("names", lambda table: {"names": table.column_names}, broker=endpoint, codec="arrow", **BEATS):
        (row,) = call_service(df, "names", input="`n.x`", codec="arrow", broker=endpoint).collect()
        assert row.reply == "n.x"
    for wrong in ("`n.x", "n.x`", "`n.x`y", "`n`.", "``", ""):
        with pytest.raises(SettingError, match="is not the name of a column"):
            call_service(df, "up", input=wrong, broker=endpoint)


def test_column_metadata_is_kept(spark, endpoint, up):
    fields = [StructField("text", StringType(), False, {"unit": "words"}), StructField("n", IntegerType(), False)]
    replies = call_service(
        spark.createDataFrame([("x", 1)], StructType(fields)), "up", input="text", broker=endpoint
    )  # fmt: skip
    assert replies.schema.fields[:2] == fields
    assert [row.reply for row in replies.collect()] == ["X"]


def test_groups_of_rows(spark, endpoint):
    rows = [(1, "x", "a"), (2, "x", "b"), (3, "x", None), (4, None, "a")]
    df = spark.createDataFrame(rows, "id int, text string, t string")
    with working(endpoint, lambda request: request.options.get("group", "none").encode()):
        for group, replies in (("t", ["a", "b", "none", None]), (F.lit("c"), ["c", "c", "c", None])):
            called = call_service(df, "up", input="text", group=group, broker=endpoint)
            assert called.columns == ["id", "text", "t", "reply", "reply_code", "reply_error"]
            assert [row.reply for row in called.orderBy("id").collect()] == replies


@pytest.mark.usefixtures("titanic")
def test_groups_of_rows_with_keys(spark, endpoint):
    df = spark.createDataFrame([("1", "a"), ("2", "b"), ("3", None)], "id string, t string")
    with working(endpoint, lambda request: request.options.get("group", "none").encode()):
        called = call_service(df, "up", input="id", key="id", group="t", broker=endpoint)
        assert called.columns == ["id", "t", "reply", "reply_code", "reply_error"]
        assert [row.reply for row in called.orderBy("id").collect()] == ["a", "b", "none"]


@pytest.mark.parametrize(
    ("column", "sent"),
    [
        ("data", b"\x00\xff"),
        ("s", b'{"a":1,"b":null}'),
        ("m", b'{"k":[1,2]}'),
        (["n", "s"], b'{"n":5,"s":{"a":1,"b":null}}'),
        (["s.a"], b'{"a":1}'),
    ],
)
def test_types_of_input(spark, endpoint, column, sent):
    df = spark.sql(
        """
        SELECT 5 AS n, 'x' AS text, X'00FF' AS data, named_struct('a', 1, 'b', cast(NULL AS string)) AS s,
            map('k', array(1, 2)) AS m
        """
    )
    with working(endpoint, list, "echo"):
        (row,) = call_service(df, "echo", input=column, broker=endpoint, result="binary").collect()
    assert row.reply == sent


def test_expressions_can_be_sent(spark, endpoint, up):
    (row,) = call_service(texts(spark, 1), "up", input=F.concat("text", F.lit("y")), broker=endpoint).collect()
    assert tuple(row) == (0, "row 0", "ROW 0Y", 200, None)
    with pytest.raises(SettingError, match="UNRESOLVED_COLUMN"):
        call_service(texts(spark, 1), "up", input=F.col("nope"), broker=endpoint)


# ── Arrow ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def adding(endpoint):
    """Run a service that adds two columns of integers."""

    def add(table):
        sizes.append(table.num_rows)
        if 500 in table["id"].to_pylist():
            raise ValueError("no good")
        sums = pc.add(table["id"], table["n"])
        errors = pc.if_else(pc.equal(table["id"], 7), "unlucky", pa.scalar(None, pa.string()))
        return pa.table({"sum": sums, "error": errors})

    sizes = []
    with Worker("add", add, broker=endpoint, codec="arrow", **BEATS):
        yield sizes


def test_arrow_in_and_out(spark, endpoint):
    df = spark.sql("SELECT id, 2 * id AS n FROM range(0, 1000, 1, 2)")
    with adding(endpoint) as sizes:
        replies = call_service(
            df, "add", input=["id", "n"], codec="arrow", result="bigint", rows_per_request=100, broker=endpoint
        )
        assert replies.schema["reply"].dataType.simpleString() == "bigint"
        rows = [tuple(row) for row in replies.collect()]
    failed = (None, 500, "ValueError: no good")
    assert rows == [
        (n, 2 * n, *((None, 500, "unlucky") if n == 7 else failed if 500 <= n < 600 else (3 * n, 200, None)))
        for n in range(1000)
    ]
    assert max(sizes) == 100


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"input": "nope"}, "input is 'nope': .*UNRESOLVED_COLUMN"),
        ({"input": ["text", "nope"]}, "UNRESOLVED_COLUMN"),
        ({"input": "id"}, "of type bigint; expected a string, binary"),
        ({"input": []}, "expected the name of a column, a list of names"),
        ({"input": 5}, "expected the name of a column, a list of names"),
        ({"input": ["text", 5]}, "expected the name of a column, a list of names"),
        ({"input": ""}, "'' is not the name of a column"),
        ({"output": "text"}, "column 'text' already exists"),
        ({"output": "ID"}, "column 'ID' already exists"),
        ({"output": ""}, "expected the name of a column"),
        ({"codec": "arrow", "result": "no type"}, "expected one of Spark's types"),
        ({"codec": "arrow", "result": 5}, "result is 5; expected one of Spark's types"),
        ({"codec": "arrow", "result": "interval month"}, "expected one of Spark's types that Arrow has as well"),
        ({"key": "nope"}, "key is 'nope': .*UNRESOLVED_COLUMN"),
        ({"key": "id"}, "key is 'id', a column of type bigint"),
        ({"key": 5}, "5 is not the name of a column"),
        ({"group": "id"}, "group is 'id', a column of type bigint"),
    ],
)
def test_invalid_arguments(spark, asked, message):
    with pytest.raises(SettingError, match=message):
        call_service(texts(spark, 1), **{"service": "up", "input": "text", "broker": "tcp://127.0.0.1:5555", **asked})


def test_unsupported_column_types(spark):
    df = spark.sql("SELECT 'x' AS text, interval '1-2' year to month AS i")
    with pytest.raises(SettingError, match="cast it"):
        call_service(df, "up", input="text")


# ── Spark runs a plan as it likes ────────────────────────────────────────────────────────────────────────────────────


def test_limit_stops_calling_early(spark):
    with running_broker(limits=LIMITS, drain_timeout=0.0) as server, working(server.endpoints[0]) as handled:
        df = texts(spark, 20_000, 1)
        replies = call_service(df, "up", input="text", broker=server.endpoints[0], window=4)
        assert [row.reply for row in replies.limit(3).collect()] == ["ROW 0", "ROW 1", "ROW 2"]
        eventually(lambda: not server.broker.registry.numbered)  # what was outstanding is cancelled
        assert sum(handled.counts.values()) < 20_000


def with_keys(df, endpoint, **given):
    keys = df.withColumn("key", F.concat(F.lit("run-1/"), "id"))
    return call_service(keys, "up", input="text", key="key", broker=endpoint, **given)


@pytest.mark.usefixtures("titanic")
def test_with_a_key_a_retried_task_repeats_no_call(spark, endpoint, up, tmp_path):
    def fail_once(batches):
        for number, batch in enumerate(batches):
            context = TaskContext.get()
            if number == 1 and context.attemptNumber() == 0:
                (tmp_path / f"failed-{context.partitionId()}").touch()
                raise RuntimeError("a task that fails in the middle")
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        replies = with_keys(texts(spark, 1000), endpoint, window=16)
        rows = replies.mapInArrow(fail_once, replies.schema).collect()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert len(list(tmp_path.glob("failed-*"))) == 2
    assert [row.reply for row in rows] == [f"ROW {n}" for n in range(1000)]
    assert up.counts == Counter(f"row {n}" for n in range(1000))


# ── the SQL function ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sql(spark, endpoint):
    """`sql(query)`, with the function registered and a view `texts` of 100 rows."""
    register_function(spark, broker=endpoint, timeout=SPARK_TIMEOUT_SECONDS)
    texts(spark, 100).createOrReplaceTempView("texts")
    yield spark.sql
    spark.catalog.dropTempView("texts")


def test_invalid_types_in_the_query(sql):
    """A wrong type is an error in the query, so the query fails."""
    with pytest.raises(PythonException, match="the input is a int; cast it to string or binary"):
        sql("SELECT call_service('up', 5) AS r").collect()


@pytest.mark.usefixtures("titanic")
def test_the_group_of_a_function(spark, sql, endpoint):
    register_function(spark, "in_group", broker=endpoint, timeout=SPARK_TIMEOUT_SECONDS, group="tenant-7")
    with working(endpoint, lambda request: request.options.get("group", "none").encode()):
        calls = ("in_group('up', 'x')", "in_group('up', 'x', 'key')", "call_service('up', 'x')")
        (row,) = sql(f"SELECT {', '.join(f'{call}.reply AS r{at}' for at, call in enumerate(calls))}").collect()
        assert tuple(row) == ("tenant-7", "tenant-7", "none")


def test_a_broker_that_requires_keys(spark, tmp_path):
    folder = Folder(tmp_path)
    keys = folder.settings("shop")
    with folder.broker(limits=LIMITS) as server:
        endpoint = server.endpoints[0]
        settings = {**BEATS, **folder.settings("resizer")}
        with Worker("shout", lambda request: request[0].upper(), broker=endpoint, **settings):
            replies = call_service(
                spark.createDataFrame([("a",), ("b",)], ["text"]), "shout", input="text", broker=endpoint,
                client_key=keys["key"], broker_key=keys["broker_key"],
            )  # fmt: skip
            assert sorted(row.reply for row in replies.collect()) == ["A", "B"]
            assert folder.keys("shop").secret.decode() not in replies._jdf.queryExecution().toString()
