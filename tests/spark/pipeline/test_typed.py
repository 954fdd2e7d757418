"""`call_service` with a service that has types, on Spark."""

import asyncio
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from support.sparks import BEATS, LIMITS

from zmdp import Services
from zmdp.mdp.errors import SettingError
from zmdp.spark.pipeline import call_service
from zmdp.testing import running_broker
from zmdp.workers import Worker

pytestmark = pytest.mark.long

services = Services()


@dataclass
class Resize:
    path: str
    width: int = 80


@dataclass
class Size:
    width: int
    at: datetime
    price: Decimal
    names: list[str]


@services.service("resize")
def resize(job: Resize) -> Size:
    if job.width < 0:
        raise ValueError("too narrow")
    at = datetime(2030, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
    return Size(job.width, at, Decimal("1.50"), [job.path])


@services.service("shout")
def shout(text: str) -> str:
    return text.upper()


@services.service("later")
def later(at: datetime) -> datetime:
    return at.replace(year=at.year + 1)


@services.service("reverse")
def reverse(data: bytes) -> bytes:
    return data[::-1]


@services.service("plain")
def plain(value):
    return {"got": value}


@pytest.fixture(scope="module")
def served(spark):
    with running_broker(limits=LIMITS) as server:
        endpoint = server.endpoints[0]
        worker = services.worker(broker=endpoint, **BEATS)
        thread = threading.Thread(target=lambda: asyncio.run(worker.run()), daemon=True)
        thread.start()
        yield endpoint
        worker.stop()
        thread.join()


def test_structs_are_sent_and_returned(spark, served):
    df = spark.sql("SELECT id, struct(concat('p', id) AS path, int(id) - 1 AS width, 1 AS more) AS job FROM range(3)")
    replies = call_service(df, resize, input="job", broker=served)
    assert replies.schema["reply"].dataType.simpleString() == (
        "struct<width:bigint,at:timestamp,price:decimal(38,18),names:array<string>>"
    )
    first, *rows = replies.orderBy("id").collect()
    assert (first.reply, first.reply_code) == (None, 500)
    assert "too narrow" in first.reply_error
    assert [(row.reply.width, row.reply.names, row.reply_code) for row in rows] == [(0, ["p1"], 200), (1, ["p2"], 200)]
    assert rows[0].reply.at.astimezone(UTC) == datetime(2030, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
    assert rows[0].reply.price == Decimal("1.5")


def test_columns_are_fields(spark, served):
    df = spark.sql("SELECT 'a' AS path, 3 AS width")
    assert call_service(df, resize, input=["path", "width"], broker=served).first().reply.width == 3
    assert call_service(df, resize, input=["path"], broker=served).first().reply.width == 80
    assert call_service(df, resize, input=F.struct("path"), broker=served).first().reply.names == ["a"]


def test_only_the_brackets_around_a_value_are_removed(spark, served):
    df = spark.sql("SELECT '[]]' AS text, 1 AS id")
    variant = F.expr("parse_json('[[1,2],[3]]')")  # which is an expression: mapInArrow takes no such column
    assert call_service(df, plain, input="text", broker=served).first().reply == '{"got":"[]]"}'
    assert call_service(df, plain, input=variant, broker=served).first().reply == '{"got":[[1,2],[3]]}'


def test_values_without_fields(spark, served):
    df = spark.sql("SELECT * FROM VALUES ('a\"b', X'0102', TIMESTAMP '2030-01-31 12:00:00.123456'), (NULL, NULL, NULL)")
    df = df.toDF("text", "data", "at").coalesce(1)

    def replies(service, column):
        return [(row.reply, row.reply_code) for row in call_service(df, service, input=column, broker=served).collect()]

    assert replies(shout, "text") == [('A"B', 200), (None, None)]
    assert replies(reverse, "data") == [(bytearray([2, 1]), 200), (None, None)]
    assert replies(later, "at") == [(datetime(2031, 1, 31, 12, 0, 0, 123456), 200), (None, None)]
    assert replies(plain, "text") == [('{"got":"a\\"b"}', 200), (None, None)]


def test_what_does_not_fit_is_an_error_at_once(spark, served):
    df = spark.sql("SELECT 'a' AS path, 'wide' AS width, struct('a' AS path, 'wide' AS width) AS job")
    with pytest.raises(SettingError, match=r"job\.width is of type string; expected int, as service 'resize' takes R"):
        call_service(df, resize, input="job", broker=served)
    with pytest.raises(SettingError, match="needs neither result nor codec"):
        call_service(df, shout, input="path", result="binary", broker=served)


def test_a_reply_of_tables_can_have_times(spark, endpoint):
    def at(table):
        return pa.table({"at": pa.array([datetime(2030, 1, 31, tzinfo=UTC)] * len(table))})

    df = spark.sql("SELECT 1 AS n")
    with Worker("at", at, broker=endpoint, codec="arrow", **BEATS):
        row = call_service(df, "at", input="n", codec="arrow", result="timestamp", broker=endpoint).first()
    assert row.reply.astimezone(UTC) == datetime(2030, 1, 31, tzinfo=UTC)
