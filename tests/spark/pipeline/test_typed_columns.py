"""Types of services as types of columns, without Spark."""

import enum
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, NotRequired, TypedDict
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from zmdp import Service, Streaming
from zmdp.clients import RequestTimeout
from zmdp.mdp.errors import SettingError
from zmdp.spark.pipeline.typed_columns import ValueColumns, check_input, check_service, reply_type
from zmdp.spark.python import arrow_type


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 1


@dataclass
class Resize:
    path: str
    width: int = 80


class Renamed(msgspec.Struct, rename="camel"):
    max_width: int | None


class Options(TypedDict):
    sizes: list[int | None]
    fit: NotRequired[Literal["cover", "contain"]]


@dataclass
class Everything:
    flag: bool
    number: int | None
    ratio: int | float
    text: str
    data: bytes
    at: datetime
    day: date
    price: Decimal
    id: UUID
    colour: Colour
    level: Level
    tags: set[str]
    some: Sequence[float]
    counts: dict[str, int | None]
    inner: Renamed
    options: Options


@dataclass
class Node:
    child: "Node | None" = None


class Row(msgspec.Struct, array_like=True):
    a: int


def test_the_type_of_a_reply():
    assert reply_type(Service("s", None, Everything))[0] == (
        StructType()
        .add("flag", BooleanType())
        .add("number", LongType())
        .add("ratio", DoubleType())
        .add("text", StringType())
        .add("data", BinaryType())
        .add("at", TimestampType())
        .add("day", DateType())
        .add("price", DecimalType(38, 18))
        .add("id", StringType())
        .add("colour", StringType())
        .add("level", LongType())
        .add("tags", ArrayType(StringType(), False))
        .add("some", ArrayType(DoubleType(), False))
        .add("counts", MapType(StringType(), LongType(), True))
        .add("inner", StructType().add("maxWidth", LongType()))
        .add("options", StructType().add("fit", StringType()).add("sizes", ArrayType(LongType(), True)))
    )
    for kind, expected in ((int, LongType()), (str | None, StringType()), (bytes, BinaryType()), (None, NullType())):
        assert reply_type(Service("s", None, kind))[0] == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int | str, "the reply of service 's' is of type int | str, which has no equivalent in Spark"),
        (dict[int, int], "is of type dict, which"),
        (list[Any], r"the reply of service 's'\[\] is of type any, which"),
        (Node, "the reply of service 's'.child is of type Node, which"),
        (Row, "is of type Row, which"),
        (timedelta, "is of type timedelta, which"),
    ],
)
def test_replies_without_an_equivalent(kind, text):
    with pytest.raises(SettingError, match=text):
        reply_type(Service("s", None, kind))


JOB = StructType().add("path", StringType()).add("width", IntegerType())


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (Resize, JOB),
        (Resize, StructType().add("path", StringType()).add("other", DateType())),
        (Resize, StructType().add("path", NullType())),
        (Resize | None, JOB),
        (int, ByteType()),
        (float, IntegerType()),
        (float | str, StringType()),
        (Any, DateType()),
        (bytes, BinaryType()),
        (datetime, TimestampNTZType()),
        (Colour, StringType()),
        (Level, LongType()),
        (list[Resize], ArrayType(JOB)),
        (dict[str, int], MapType(StringType(), LongType())),
        (dict[str, str], StructType().add("a", StringType())),
        (Renamed, StructType().add("maxWidth", LongType())),
    ],
)
def test_columns_that_fit(kind, column):
    check_input(Service("s", kind), "job", column)


@pytest.mark.parametrize(
    ("kind", "column", "text"),
    [
        (Resize, StringType(), "job is of type string; expected Resize, as service 's' takes Resize"),
        (Resize, JOB.add("a", LongType()).fields[1:], "job.path is missing; expected str, as service 's' takes Resize"),
        (Resize, [("path", StringType()), ("width", StringType())], "job.width is of type string; expected int"),
        (list[Resize], ArrayType(StringType()), r"job\[\] is of type string; expected Resize"),
        (tuple[int, str], ArrayType(LongType()), r"job is of type array<bigint>; expected tuple"),
        (dict[str, int], MapType(StringType(), StringType()), r"job\[\] is of type string; expected int"),
        (dict[str, int], [("a", StringType())], "job.a is of type string; expected int"),
        (int | str, DateType(), r"job is of type date; expected int \| str"),
        (int | None, DoubleType(), "job is of type double; expected int"),
        (str, DateType(), "job is of type date; expected str"),
        (Colour, LongType(), "job is of type bigint; expected Colour"),
        (timedelta, StringType(), "job is of type string; expected timedelta"),
    ],
)
def test_columns_that_do_not_fit(kind, column, text):
    if isinstance(column, list):
        fields = [each if isinstance(each, tuple) else (each.name, each.dataType) for each in column]
        column = StructType()
        for field in fields:
            column.add(*field)
    with pytest.raises(SettingError, match=text):
        check_input(Service("s", kind), "job", column)


@pytest.mark.parametrize(
    ("service", "text"),
    [
        (Streaming("s", str, str), "streams its reply, but a row has one reply"),
        (Service("s", str, str, codec="msgpack"), "has the codec msgpack; expected json"),
        (Service("s", None, str), "takes no value, so there is no input to send"),
    ],
)
def test_services_that_rows_cannot_call(service, text):
    with pytest.raises(SettingError, match=text):
        check_service(service)


def value_columns(kind, column):
    """Return what makes columns of replies, as executors get it."""
    made = ValueColumns("s", reply_type(Service("s", None, kind))[1], column)
    return pickle.loads(pickle.dumps(made))


def test_replies_become_columns():
    kind = pa.struct([("path", pa.string()), ("width", pa.int64())])
    columns = value_columns(Resize, kind)
    timeout = RequestTimeout("late", service="s")
    outcomes = [[b'{"path":"a"}'], None, [b'{"path":1}'], timeout, [b'{"path":"b","width":99999999999999999999}']]
    replies, codes, errors = (each.to_pylist() for each in columns(outcomes))
    assert replies == [{"path": "a", "width": 80}, None, None, None, None]
    assert codes == [200, None, 500, 408, 500]
    assert errors[:4] == [
        None, None, "the reply of service 's' does not fit: $.path: expected str, got int", "late",
    ]  # fmt: skip
    assert errors[4].startswith("the reply of service 's' does not fit: ")
    assert [len(each) for each in columns([])] == [0, 0, 0]


class Outer(msgspec.Struct, kw_only=True, rename={"kind": "the kind"}):
    inner: Renamed = msgspec.field(default_factory=lambda: Renamed(7))
    jobs: dict[str, list[Resize]]
    note: str | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    ids: list[UUID | None] = msgspec.field(default_factory=lambda: [None, UUID(int=7)])
    kind: Colour = Colour.RED
    options: list[Options] = msgspec.field(default_factory=lambda: [{"sizes": [1]}])


def test_fields_that_a_reply_lacks_have_their_defaults():
    kind = arrow_type(reply_type(Service("s", None, Outer))[0])
    replies, _, errors = value_columns(Outer, kind)(
        [[b'{"jobs":{"a":[{"path":"x"}]}}'], [b'{"jobs":{},"the kind":"blue"}']]
    )
    assert replies.to_pylist() == [
        {
            "jobs": [("a", [{"path": "x", "width": 80}])],
            "note": None,
            "tags": None,
            "ids": [None, str(UUID(int=7))],
            "the kind": "red",
            "options": [{"sizes": [1], "fit": None}],
            "inner": {"maxWidth": 7},
        },
        None,
    ]
    assert "$.the kind: invalid enum value 'blue'" in errors[1].as_py()


def test_values_of_every_type():
    service = Service("s", None, Everything)
    sent = Everything(
        True, None, 1.5, "text", b"\0", datetime(2030, 1, 31, tzinfo=UTC), date(2030, 1, 31), Decimal("1.5"),
        UUID(int=7), Colour.RED, Level.HIGH, {"tag"}, [0.5], {"a": None}, Renamed(5), {"sizes": [None]},
    )  # fmt: skip
    made = value_columns(Everything, arrow_type(reply_type(service)[0]))
    replies, codes, _ = made([service.reply.encode(sent)])
    assert codes.to_pylist() == [200]
    (reply,) = replies.to_pylist()
    assert list(reply.values()) == [
        True, None, 1.5, "text", b"\0", datetime(2030, 1, 31, tzinfo=UTC), date(2030, 1, 31), Decimal("1.5"),
        str(UUID(int=7)), "red", 1, ["tag"], [0.5], [("a", None)], {"maxWidth": 5}, {"sizes": [None], "fit": None},
    ]  # fmt: skip


@dataclass
class Parts:
    counts: dict[str, int] | None
    jobs: list[Resize] | None = None
    ids: dict[str, list[UUID | None]] | None = None


def test_parts_of_values_may_be_null_beside_rows_without_a_reply():
    service = Service("s", None, Parts)
    made = value_columns(Parts, arrow_type(reply_type(service)[0]))
    whole = Parts({}, [Resize("a", 1)], {"x": [None, UUID(int=3)]})
    outcomes = [service.reply.encode(whole), None, [b'{"counts":null}'], [b"no"], [b'{"counts":{"a":1}}']]
    replies, codes, _ = made(outcomes)
    replies.validate(full=True)
    assert codes.to_pylist() == [200, None, 200, 500, 200]
    assert replies.to_pylist() == [
        {"counts": [], "jobs": [{"path": "a", "width": 1}], "ids": [("x", [None, str(UUID(int=3))])]}, None,
        {"counts": None, "jobs": None, "ids": None}, None, {"counts": [("a", 1)], "jobs": None, "ids": None},
    ]  # fmt: skip
