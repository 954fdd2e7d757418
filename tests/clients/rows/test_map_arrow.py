"""`Client.map_arrow`, with a real broker and workers."""

import asyncio
import re
import sys
from contextlib import closing

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS

from zmdp.clients import Client, ServiceError, SettingError
from zmdp.clients.rows import arrow
from zmdp.mdp.program.extras import install_command
from zmdp.workers import Worker

TEXTS = pa.table({"id": [1, 2, 3], "text": ["a", None, "bad"]})


@pytest.fixture
def client(server):
    with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        yield client


def worker(server, handler, **given):
    return Worker("up", handler, broker=server.endpoints[0], **BEATS, **given)


def up(request):
    if request[0] == b"bad":
        raise ServiceError(422, "odd")
    return request[0].upper()


def table(batches):
    return pa.Table.from_batches(batches)


def rows(batches):
    """Return the three added columns as rows."""
    return [tuple(row.values())[-3:] for row in table(batches).to_pylist()]


def test_replies_and_errors_are_columns(server, client):
    with worker(server, up):
        found = table(client.map_arrow("up", TEXTS, input="text"))
        (named, *_) = client.map_arrow("up", TEXTS, input="text", output="answer")
    assert found.to_pydict() == {
        "id": [1, 2, 3], "text": ["a", None, "bad"], "reply": ["A", None, None], "reply_code": [200, None, 422],
        "reply_error": [None, None, "odd"],
    }  # fmt: skip
    assert found.schema.types[-3:] == [pa.string(), pa.int32(), pa.string()]
    assert named.schema.names[-3:] == ["answer", "answer_code", "answer_error"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_types_of_input(server, client, kind):
    data = pa.table({"text": pa.array(["a", None, "c"]).cast(kind)})
    with worker(server, up):
        found = table(client.map_arrow("up", data, input="text"))
    assert found["reply"].to_pylist() == ["A", None, "C"]
    assert found.schema.field("text").type == kind


def test_other_results(server, client):
    def handler(request):
        return [b"\xff", request[0]] if request[0] == b"bad" else b"\xff"

    with worker(server, handler):
        frames = rows(client.map_arrow("up", TEXTS, input="text", result="frames"))
        binary = rows(client.map_arrow("up", TEXTS, input="text", result="binary"))
        string = rows(client.map_arrow("up", TEXTS, input="text"))
    assert [reply for reply, _, _ in frames] == [[b"\xff"], None, [b"\xff", b"bad"]]
    assert [(reply, code) for reply, code, _ in binary] == [(b"\xff", 200), (None, None), (None, 500)]
    assert [code for _, code, _ in string] == [500, None, 500]
    assert "not valid UTF-8" in string[0][2]


def test_the_schema_of_the_data_is_kept(server, client):
    fields = [pa.field("text", pa.string(), nullable=False, metadata={"unit": "words"})]
    data = pa.table({"text": ["a"]}, pa.schema(fields, metadata={"made": "today"}))
    with worker(server, up):
        (found,) = client.map_arrow("up", data.to_reader(), input="text")
    assert found.schema.field("text").equals(data.schema.field("text"), check_metadata=True)
    assert found.schema.metadata == data.schema.metadata
    (none,) = client.map_arrow("up", data.slice(0, 0), input="text")
    assert none.schema.equals(found.schema, check_metadata=True)
    assert none.num_rows == 0


def test_any_source_of_arrow_data(server, client):
    class Source:
        def __arrow_c_stream__(self, requested_schema=None):
            return TEXTS.__arrow_c_stream__(requested_schema)

    with worker(server, up):
        assert rows(client.map_arrow("up", Source(), input="text"))[0] == ("A", 200, None)
        assert rows(client.map_arrow("up", TEXTS.to_batches()[0], input="text"))[0] == ("A", 200, None)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def add(received):
    errors = pc.if_else(pc.equal(received["id"], 7), "unlucky", pa.scalar(None, pa.string()))
    return pa.table({"sum": pc.add(received["id"], received["n"]), "error": errors})


@pytest.mark.parametrize("rows_per_request", [None, 10])
def test_columns_as_tables(server, client, monkeypatch, rows_per_request):
    monkeypatch.setattr(arrow, "MAX_SLICE_ROWS", 40)
    data = pa.table({"id": range(100), "other": ["x"] * 100, "n": range(100)})
    with worker(server, add, codec="arrow"):
        found = table(
            client.map_arrow(
                "up", data, input=["id", "n"], codec="arrow", result=pa.int16(), rows_per_request=rows_per_request
            )
        )
    assert found.schema.field("reply").type == pa.int16()
    assert found.select(["id", "other", "n"]) == data
    assert rows(found.to_batches()) == [(None, 500, "unlucky") if n == 7 else (2 * n, 200, None) for n in range(100)]


def test_one_column_as_a_table(server, client):
    with worker(server, lambda received: {"length": pc.utf8_length(received["text"])}, codec="arrow"):
        found = rows(client.map_arrow("up", TEXTS, input="text", codec="arrow", result="int32"))
        wrong = rows(client.map_arrow("up", TEXTS, input="text", codec="arrow", result=pa.list_(pa.int8())))
        text = table(client.map_arrow("up", TEXTS, input="text", codec="arrow"))
    assert found == [(1, 200, None), (None, 200, None), (3, 200, None)]
    assert {(reply, code) for reply, code, _ in wrong} == {(None, 500)}
    assert text["reply"].to_pylist() == ["1", None, "3"]


def test_a_table_that_fails(server, client):
    def handler(_):
        raise ValueError("no good")

    with worker(server, handler, codec="arrow"):
        found = rows(client.map_arrow("up", TEXTS, input=["id"], codec="arrow"))
    assert found == [(None, 500, "ValueError: no good")] * 3


def test_replies_that_are_no_tables_for_these_rows(server, client):
    with worker(server, lambda received: received.slice(1), codec="arrow"):
        found = rows(client.map_arrow("up", TEXTS, input=["text"], codec="arrow"))
    assert found == [(None, 500, "the reply cannot be used: it has 2 rows of 1 columns, for 3 rows")] * 3
    with worker(server, lambda request: b"not Arrow"):
        found = rows(client.map_arrow("up", TEXTS, input=["text"], codec="arrow"))
    assert {(reply, code) for reply, code, _ in found} == {(None, 500)}


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_early_cancels_what_is_outstanding(server, client):
    read = []

    def batches():
        for n in range(1000):
            read.append(n)
            yield pa.record_batch({"text": [f"{n}-{at}" for at in range(100)]})

    data = pa.RecordBatchReader.from_batches(pa.schema([("text", pa.string())]), batches())
    with worker(server, lambda request: request, concurrency=2):
        with closing(client.map_arrow("up", data, input="text", window=4)) as found:
            assert next(found)["reply"][0].as_py() == "0-0"
        eventually(lambda: not server.broker.registry.numbered)
    assert len(read) < 100


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        ({"text": ["a"]}, {}, "data is of type dict; expected Arrow data"),
        (TEXTS, {"input": "nope"}, "the data has no column 'nope', only "),
        (TEXTS, {"input": ["text", "nope"], "codec": "arrow"}, "the data has no column 'nope', only "),
        (TEXTS.rename_columns(["text", "text"]), {}, "the data has 2 columns 'text'"),
        (TEXTS, {"input": "id"}, "input is 'id', of type int64; expected strings or bytes"),
        (TEXTS, {"input": ["text"]}, "expected the name of a column"),
        (TEXTS, {"input": [], "codec": "arrow"}, "expected the name of a column"),
        (TEXTS, {"input": [5], "codec": "arrow"}, "expected the name of a column"),
        (TEXTS, {"input": 5}, "expected the name of a column"),
        (TEXTS, {"output": "id"}, "column 'id' already exists"),
        (TEXTS, {"output": ""}, "expected the name of a column"),
        (TEXTS, {"codec": "json"}, "codec is 'json'"),
        (TEXTS, {"result": "int32"}, "result is 'int32'; expected one of string, binary, frames"),
        (TEXTS, {"result": pa.int32()}, "expected one of string, binary, frames"),
        (TEXTS, {"rows_per_request": 2}, "without codec='arrow' each row is a request"),
        (TEXTS, {"codec": "arrow", "result": "nope"}, r"expected a pyarrow\.DataType"),
        (TEXTS, {"codec": "arrow", "result": 5}, r"expected a pyarrow\.DataType"),
        (TEXTS, {"window": 0}, "window is 0"),
        (TEXTS, {"codec": "arrow", "rows_per_request": 0}, "rows_per_request is 0"),
        (TEXTS, {"codec": "arrow", "rows_per_request": "10"}, "rows_per_request is '10'"),
        (TEXTS, {"timeout": 0}, "timeout is 0"),
        (TEXTS, {"service": "no\nname"}, "is not a valid service name"),
    ],
)
def test_invalid_arguments(client, data, given, message):
    with pytest.raises(SettingError, match=message):
        client.map_arrow(**{"service": "up", "data": data, "input": "text", **given})


def test_within_an_event_loop(client):
    async def run():
        client.map_arrow("up", TEXTS, input="text")

    with pytest.raises(SettingError, match="within an event loop"):
        asyncio.run(run())


def test_without_pyarrow(client, monkeypatch):
    monkeypatch.delitem(sys.modules, "zmdp.clients.rows.arrow", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingError, match=re.escape(install_command("arrow"))):
        client.map_arrow("up", TEXTS, input="text")
