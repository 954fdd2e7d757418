"""Rows are checked, a column at a time, by the rules for single requests, and converted for staging."""

import math
import re
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pytest

from zmdp.mdp.errors import SettingError
from zmdp.titanic import enqueue
from zmdp.titanic.api.submission import MAX_SECONDS, OPTIONS, unpack
from zmdp.titanic.contrib.arrow import rows as row_rules
from zmdp.titanic.contrib.arrow.packing import binary
from zmdp.titanic.contrib.arrow.rows import COLUMNS, STAGED, plan_rows
from zmdp.titanic.db.store import staging
from zmdp.workers.handling import MAX_BODY_FRAMES

AT = datetime(2035, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
TEXT, TIME = pa.string(), pa.timestamp("us", "UTC")
HEADERS = pa.map_(TEXT, TEXT)
TEXTS, FRAMES = pa.list_(TEXT), pa.list_(pa.binary())


def entries(kinds, columns, **options):
    """Return what would be staged for columns of these types."""
    schema = pa.schema(kinds)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(*each) for each in zip(columns, schema.types, strict=True)], schema=schema
    )
    found = plan_rows(schema, options).convert(batch, 1, 0, 0)
    return [SimpleNamespace(**row) for row in found.to_pylist()]


def test_rows_can_set_every_option_of_a_submission_and_every_staged_column():
    assert set(OPTIONS) - {"on_duplicate"} <= set(COLUMNS)  # a write that is repeated must store nothing anew
    assert set(STAGED.names) == set(staging.STAGED.columns.keys())


@pytest.mark.parametrize(
    ("kind", "value", "frames"),
    [
        (TEXT, "größe", ["größe".encode()]),
        (pa.binary(), b"\0\xff", [b"\0\xff"]),
        (TEXTS, ["a", "ü"], [b"a", "ü".encode()]),
        (FRAMES, [b"a", b""], [b"a", b""]),
    ],
    ids=str,
)
def test_types_of_bodies(kind, value, frames):
    (asked,) = entries({"request": kind}, [[value]], service="s")
    assert unpack(asked.body) == frames


def test_options_apply_to_rows_without_a_value():
    options = {
        "service": "usual", "priority": "3", "retries": "2", "delay": "1.5", "backoff": "0.5", "ttl": "60",
        "key_ttl": "9", "headers": '{"a": "b"}',
    }  # fmt: skip
    kinds = {"request": TEXT, "service": TEXT, "key": TEXT, "priority": pa.int16(), "at": TIME, "headers": HEADERS}
    columns = [["x", "y"], [None, "other"], ["k", "l"], [None, 7], [None, AT], [None, [("c", "d")]]]
    usual, other = entries(kinds, columns, **options)
    assert (usual.service, usual.priority, usual.delay, usual.due) == ("usual", 3, 1.5, None)
    assert usual.headers == '{"a": "b"}'
    assert (usual.retries, usual.backoff, usual.result_ttl, usual.key_ttl) == (2, 0.5, 60, 9)
    assert (other.service, other.priority, other.delay, other.due) == ("other", 7, None, AT.timestamp())
    assert other.headers == '{"c": "d"}'


@pytest.mark.parametrize(
    ("kind", "at"),
    [(TIME, AT), (pa.float64(), AT.timestamp()), (TEXT, AT.isoformat())],
    ids=["time", "seconds", "text"],
)
def test_formats_of_times(kind, at):
    (asked,) = entries({"request": TEXT, "due": kind}, [["x"], [at]], service="s")
    assert asked.due == pytest.approx(AT.timestamp(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "value", "message"),
    [
        ("request", TEXT, None, "the request is NULL"),
        ("request", TEXTS, ["a", None], "a frame of the request is NULL"),
        ("request", TEXTS, [], "a body of at least one frame"),
        ("service", TEXT, "a\0b", "the first frame must be the service's name"),
        ("service", TEXT, "mmi.services", "mmi.services cannot be called through Titanic"),
        ("priority", pa.int32(), 10, "priority must be a whole number from 0 to 9"),
        ("retries", pa.int64(), -1, "retries must be a whole number from 0 to 1000"),
        ("delay", pa.float64(), -1.0, "delay is -1.0: it must be a number of seconds, 0 or more"),
        ("delay", pa.float64(), math.nan, "delay is nan: it must be a number of seconds"),
        ("ttl", pa.int32(), 0, "ttl is 0.0: it must be a number of seconds, above 0"),
        ("key", TEXT, "", "key must be text of 1 to 255 bytes"),
        ("key", TEXT, "a\0", "key must be text of 1 to 255 bytes"),
        ("key_ttl", pa.int32(), 5, "key_ttl needs a key"),
        ("at", TEXT, "2035-01-02T03:04:05",
         "at is '2035-01-02T03:04:05'; expected seconds since 1970, or a time such as 2030-"),
        ("at", TEXT, "soon", "at is 'soon'; expected seconds since 1970"),
        ("at", pa.float64(), 1e300, "at must"),
        ("headers", HEADERS, [("a", None)], "headers must map text to text"),
    ],
)  # fmt: skip
def test_invalid_rows(name, kind, value, message):
    columns = {"request": ["x"], name: [value]}
    options = {} if name == "service" else {"service": "s"}
    with pytest.raises(SettingError) as refused:
        entries({"request": TEXT, name: kind}, list(columns.values()), **options)
    assert str(refused.value).startswith("row 0 of partition 0 is not a valid request, so nothing was written: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    [
        ("service", TEXT, ["", "s", "ü" * 127, "ü" * 128, "s" * 256, "a b", "a\n", "a\0", "titanic.x", "mmi.x"]),
        ("key", TEXT, ["", "k", "ü" * 127, "ü" * 128, "k" * 255, "k" * 256, "a\0b", "a\nb", " ", "\n"]),
        ("priority", pa.int32(), [-1, 0, 9, 10]),
        ("priority", pa.decimal128(20, 0), [Decimal(-1), Decimal(0), Decimal(9), Decimal(10), Decimal(10**19)]),
        ("retries", pa.int64(), [-1, 0, 1000, 1001, 2**62]),
        *(
            (name, pa.float64(),
             [-1.0, -0.0, 5e-324, 1.5, MAX_SECONDS, MAX_SECONDS * 1.001, math.inf, -math.inf, math.nan])
            for name in ("delay", "ttl", "key_ttl", "backoff")
        ),
        ("at", pa.float64(), [-2 * MAX_SECONDS, -1.0, 0.0, 2 * MAX_SECONDS, 2.001 * MAX_SECONDS, math.inf, math.nan]),
        ("at", TIME, [AT, AT.replace(year=9999), AT.replace(year=1)]),
        ("at", TEXT, ["", "x", AT.isoformat(), "2035-01-02T03:04:05Z", "2035-01-02 03:04+01", "2035-13-02T00:00Z"]),
        ("request", FRAMES, [[], [b""], [b"x"] * MAX_BODY_FRAMES, [b"x"] * (MAX_BODY_FRAMES + 1)]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_the_rules_for_columns_are_those_for_single_requests(engine, name, kind, values):
    """`enqueue` checks single requests."""
    for value in values:
        options = {"service": "s", "request": "x"} | ({"key": "k"} if name == "key_ttl" else {}) | {name: value}
        kinds = dict.fromkeys(options, TEXT) | {name: kind}
        row = dict(options)
        service, frames = options.pop("service"), options.pop("request")
        if name == "at" and isinstance(value, str):
            with suppress(ValueError):
                options["at"] = datetime.fromisoformat(value)
        if name == "priority":
            options["priority"] = int(value)
        try:
            with engine.begin() as connection:
                enqueue(connection, service, *(frames if isinstance(frames, list) else [b"x"]), **options)
                connection.rollback()
            wanted = not (name == "request" and not value)  # `enqueue` adds an empty frame
        except SettingError:
            wanted = False
        try:
            entries(kinds, [[each] for each in row.values()])
            found = True
        except SettingError:
            found = False
        assert found == wanted, value


@pytest.mark.parametrize("name", ["key", "service", "at"])
def test_text_that_is_not_utf8_is_refused(name):
    """Spark does not check its strings."""
    invalid = pa.Array.from_buffers(TEXT, 1, binary(b"k\xff", 2).buffers())
    batch = pa.RecordBatch.from_arrays([pa.array(["x"]), invalid], ["request", name])
    with pytest.raises(SettingError, match="row 0 of partition 0 is not a valid request"):
        plan_rows(batch.schema, {"service": "s"}).convert(batch, 1, 0, 0)


def test_the_bad_row_of_a_slice_is_named():
    batch = pa.RecordBatch.from_pydict({"request": list("abcdef"), "priority": [0, 0, 11, 0, None, 12]})
    converter = plan_rows(batch.schema, {"service": "s"})
    with pytest.raises(SettingError, match=re.escape("row 102 of partition 7 is not") + r".*request='f', priority=12"):
        converter.convert(batch.slice(3), 1, 100, 7)
    assert converter.convert(batch.slice(3, 2), 1, 0, 0)["priority"].to_pylist() == [0, 0]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"request": TEXT}, {"service": None}, "name a service"),
        ({"service": TEXT}, {}, "the column request is missing"),
        ({"request": TEXT, "delay": pa.float64(), "at": TIME}, {}, "columns delay and at both set when a request runs"),
        ({"request": TEXT, "at": TEXT, "due": TEXT}, {}, "columns at and due both set when a request runs"),
        ({"request": TEXT, "sevice": TEXT}, {}, "titanic cannot write column 'sevice'; available columns:"),
        ({"request": TEXT, "REQUEST": TEXT}, {}, "titanic cannot write column 'REQUEST'"),
        ({"request": pa.int32()}, {},
         "titanic cannot write request as int32; expected string, binary, array<binary>"),
        ({"request": TEXT, "priority": TEXT}, {}, "titanic cannot write priority as string"),
        ({"request": TEXT, "headers": pa.map_(TEXT, pa.int32())}, {},
         "titanic cannot write headers as map<string, int32>"),
        ({"request": TEXT}, {"priority": "high"}, "priority is 'high'; expected an integer"),
        ({"request": TEXT}, {"priority": "10"}, "invalid write option: priority must be a whole"),
        ({"request": TEXT}, {"delay": "-1"}, "invalid write option: delay is -1.0: it must be"),
        ({"request": TEXT}, {"at": "2035-01-02"}, "at is '2035-01-02'; expected a timestamp, seconds"),
        ({"request": TEXT}, {"headers": "{"}, "headers is '{'; expected"),
        ({"request": TEXT}, {"headers": "[1]"}, "headers must map text to text"),
        ({"request": TEXT}, {"service": "mmi.x"}, "mmi.x cannot be called through Titanic"),
    ],
)  # fmt: skip
def test_columns_and_options_that_cannot_be_written(columns, options, message):
    given = {name: value for name, value in {"service": "s", **options}.items() if value is not None}
    with pytest.raises(SettingError, match=re.escape(message)):
        plan_rows(pa.schema(columns), given)


def test_batches_are_staged_in_chunks_of_a_bounded_size(monkeypatch):
    monkeypatch.setattr(row_rules, "MAX_CHUNK_BYTES", 8 * 100)
    numbers = list(range(1000))
    some = [
        pa.RecordBatch.from_pydict({"n": numbers[at:end]}) for at, end in ((0, 30), (30, 60), (60, 700), (700, 1000))
    ]
    chunks = list(row_rules.bounded(some))
    assert [n for chunk in chunks for n in chunk["n"].to_pylist()] == numbers
    assert [chunk.num_rows for chunk in chunks] == [60, *[100] * 6, 40, *[100] * 3]
