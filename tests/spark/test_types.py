"""Values of all types, on all ways into Spark and out of it: none may change."""

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from support.connect import connected
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.sparks import BEATS, LIMITS, running_batch
from support.titanics import serving

from zmdp import Services
from zmdp.clients import Client
from zmdp.mdp.errors import SettingError
from zmdp.spark.client import SparkJobs
from zmdp.spark.client.frames import job_frames, parse_result, sql_frames
from zmdp.spark.pipeline import call_service
from zmdp.spark.session import connect_session
from zmdp.testing import running_broker
from zmdp.titanic import Titanic


class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    day: date
    prices: list[Decimal | None]


class Kind(NamedTuple):
    """A value, its type in Python and Spark, and what it is in an Arrow table, if that differs."""

    value: Any
    hint: Any
    sql: str
    arrow: Any = None


ZONE = timezone(timedelta(hours=2))
PRICES = [Decimal("1.50"), None, Decimal("12345678901234567890.13")]
KINDS = {
    "boolean": Kind(True, bool, "boolean"),
    "integer": Kind(-(1 << 63), int, "bigint"),
    "large integer": Kind(12345678901234567890123, int, "decimal(23,0)", Decimal("12345678901234567890123")),
    "float": Kind(5e-324, float, "double"),
    "infinity": Kind(float("-inf"), float, "double"),
    "string": Kind("it's \\ \"\n :x ? ${y} €😀", str, "string"),
    "decimal": Kind(Decimal("12345678901234567890.13"), Decimal, "decimal(22,2)"),
    "small decimal": Kind(Decimal("-0.00100"), Decimal, "decimal(5,5)"),
    "date": Kind(date(1, 1, 1), date, "date"),
    "datetime": Kind(datetime(2026, 3, 29, 2, 30, 0, 123456), datetime, "timestamp_ntz"),
    "datetime with a zone": Kind(
        datetime(2026, 10, 25, 2, 30, 0, 1, ZONE), datetime, "timestamp", datetime(2026, 10, 25, 0, 30, 0, 1, UTC)
    ),
    "timedelta": Kind(-timedelta(1, 2, 3), timedelta, "interval day to second"),
    "bytes": Kind(b"\x00'\\\xff", bytes, "binary"),
    "UUID": Kind(UUID(int=1 << 100), UUID, "string", str(UUID(int=1 << 100))),
    "None": Kind(None, None, "void"),
    "enum": Kind(Colour.RED, Colour, "string", "red"),
    "list": Kind(PRICES, list[Decimal | None], "array<decimal(22,2)>"),
    "dataclass": Kind(
        Order(date(2026, 1, 2), [Decimal("0.5"), None]), Order, "struct<day:date,prices:array<decimal(1,1)>>",
        {"day": date(2026, 1, 2), "prices": [Decimal("0.5"), None]},
    ),
}  # fmt: skip
NOT_IN_SERVICES = {"timedelta": "interval", "infinity": "expected float", "large integer": "decimal(23,0)"}
"""What no service can be sent from a column, and what the error names."""


def argument_job(kind):
    def job(spark, x):
        return repr(x)

    job.__annotations__["x"] = kind.hint
    return job


def value_job(spark, name: str):
    """The value, and also as a part of others."""
    yield {"x": [KINDS[name].value]}
    return KINDS[name].value


def echo(kind):
    def handle(value):
        return value

    handle.__annotations__ |= {"value": kind.hint, "return": kind.hint}
    return handle


@pytest.fixture(scope="module", params=["classic", pytest.param("connect", marks=pytest.mark.long)])
def at(request, tmp_path_factory):
    """A batch, a Titanic and services, beside a session."""
    folder = tmp_path_factory.mktemp("types")
    jobs = {f"argument {name}": argument_job(kind) for name, kind in KINDS.items()} | {"value": value_job}
    services = Services()
    names = {name: name.replace(" ", "-") for name in KINDS.keys() - {"None"}}
    typed = {name: services.service(service)(echo(KINDS[name])) for name, service in names.items()}
    with ExitStack() as stack:
        endpoint = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0)).endpoints[0]
        if request.param == "connect":
            spark = stack.enter_context(connected(folder))
            port = spark.client._builder.endpoint.rpartition(":")[2]
            open_session = lambda: connect_session(f"sc://127.0.0.1:{port}")  # noqa: E731
        else:
            spark, open_session = request.getfixturevalue("spark"), None
        stack.enter_context(running_batch(spark, endpoint, folder, jobs=jobs, open_session=open_session))
        stack.enter_context(serving(endpoint, f"sqlite:///{folder / 'titanic.db'}"))
        worker = services.worker(broker=endpoint, **BEATS)
        thread = threading.Thread(target=lambda: asyncio.run(worker.run()))
        thread.start()
        stack.callback(thread.join)
        stack.callback(worker.stop)
        client = stack.enter_context(Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, retries=0))
        jobs = SparkJobs(client, progress=False)
        yield SimpleNamespace(endpoint=endpoint, spark=spark, client=client, jobs=jobs, services=typed)


def in_arrow(kind):
    return kind.value if kind.arrow is None else kind.arrow


def in_json(kind):
    """How a result has the value."""
    return "-inf" if kind.value == float("-inf") else msgspec.to_builtins(kind.value)


@pytest.mark.parametrize("name", KINDS)
def test_a_parameter_of_a_query(at, name):
    kind = KINDS[name]
    sql = f"SELECT :x AS x, typeof(:x) AS t, :x <=> CAST(:x AS {kind.sql.replace('void', 'date')}) AS same"
    (row,) = at.jobs.sql(sql, x=kind.value).to_arrow().to_pylist()
    assert row == {"x": in_arrow(kind), "t": kind.sql, "same": True}
    if name != "None":  # whose lists have no type
        (row,) = at.jobs.sql("SELECT ? AS a, ? AS x", 1, [kind.value, None]).to_arrow().to_pylist()
        assert row == {"a": 1, "x": [in_arrow(kind), None]}


@pytest.mark.parametrize("name", KINDS)
def test_an_argument_of_a_job(at, name):
    kind = KINDS[name]
    if kind.value == float("-inf"):
        with pytest.raises(SettingError, match="argument x"):
            at.jobs.run(f"argument {name}", x=kind.value)
        return
    assert at.jobs.run(f"argument {name}", x=kind.value).value == repr(kind.value)


@pytest.mark.parametrize("name", KINDS)
def test_a_value_of_a_job(at, name):
    result = at.jobs.run("value", name=name)
    assert result.value == in_json(KINDS[name])
    assert result.yielded == [{"x": [in_json(KINDS[name])]}]


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"None"}))
def test_a_column_through_a_service(at, name):
    kind = KINDS[name]
    column = at.spark.createDataFrame([(in_arrow(kind),)], f"x {kind.sql}")
    if name in NOT_IN_SERVICES:
        try:
            (row,) = call_service(column, at.services[name], input="x", broker=at.endpoint).collect()
            problem = row.reply_error
        except SettingError as error:
            problem = str(error)
        assert NOT_IN_SERVICES[name] in problem
        return
    replies = call_service(column, at.services[name], input="x", broker=at.endpoint)
    same = replies.selectExpr(f"CAST(reply AS {kind.sql}) <=> x AS same", "reply_error")
    assert [tuple(row) for row in same.collect()] == [(True, None)]


@pytest.mark.parametrize("name", KINDS)
def test_through_titanic(at, name):
    kind, titanic = KINDS[name], Titanic(at.client)
    query = titanic.submit("spark.sql", *sql_frames("SELECT :x AS x", {"x": kind.value}, "arrow"))
    if kind.value != float("-inf"):
        job = titanic.submit("spark.job", *job_frames(f"argument {name}", {"x": kind.value}, "json"))
        assert msgspec.json.decode(parse_result(job.result())[1]) == repr(kind.value)
    import pyarrow.ipc

    assert pyarrow.ipc.open_stream(parse_result(query.result())[1]).read_all().to_pylist() == [{"x": in_arrow(kind)}]
