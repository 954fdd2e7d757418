"""Batches to rows and back, and rows with keys through Titanic."""

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import pyarrow as pa
import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, serving

from zmdp.clients import AsyncClient, Client
from zmdp.clients.many import RETRY
from zmdp.clients.rows import RowSettings, answer_rows
from zmdp.clients.rows import arrow as rows_module
from zmdp.clients.rows.arrow import answer, checked_row, frames_of, map_rows, reply_columns
from zmdp.mdp.errors import ServiceError
from zmdp.titanic import Titanic
from zmdp.titanic.api.keyed import KeyedRows
from zmdp.workers import Worker


def worker(server, handler):
    return Worker("up", handler, broker=server.endpoints[0], **BEATS)


def up(request):
    return [frame.upper() for frame in request]


def ask(server, rows, *, keyed=True, **given):
    """Return reply, code and error of each row: of service, body and key."""
    settings = RowSettings(**{"window": 4, "timeout": TIMEOUT_SECONDS, "retry": RETRY, **given})
    route = (lambda client: KeyedRows(client, None, 86400.0)) if keyed else None
    found = answer_rows(
        [checked_row(*row) for row in rows],
        settings,
        lambda: AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS),
        route,
    )
    return [answer(row.outcome, "string") for row in found]


def keyed(*keys):
    return [("up", b"x", key) for key in keys]


def test_rows_that_are_not_sent(server):
    with worker(server, up):
        services, bodies = ["up", None, "up", None, "nobody\n", "up"], [b"a", b"b", None, None, b"c", b"d"]
        found = ask(server, zip(services, bodies, repeat("")), keyed=False)
        assert ask(server, [("up", None, "")] * 2, keyed=False) == [(None, None, None)] * 2
        assert ask(server, [], keyed=False) == []
    assert found[:4] == [
        ("A", 200, None), (None, 400, "the service is NULL; every row must name a service"), (None, None, None),
        (None, None, None),
    ]  # fmt: skip
    assert [each[1] for each in found[4:]] == [400, 200]


def test_a_key_is_one_request(server, tmp_path):
    handled = []

    def handler(request):
        handled.append(request)
        return b"%d" % len(handled)

    with serving(server.endpoints[0], str(tmp_path / "t.db")), worker(server, handler):
        first = ask(server, keyed("a", "b", "a"))
        assert ask(server, keyed("a", "b", "a")) == first
    assert len(handled) == 2
    assert first[0] == first[2] != first[1]


def test_invalid_keys(server, tmp_path):
    with serving(server.endpoints[0], str(tmp_path / "t.db")), worker(server, up):
        null, empty, right = ask(server, keyed(None, "", "a"))
    assert null == (None, 400, "the key is NULL; every row sent through Titanic needs a key")
    assert empty[1] == 400
    assert "key must be text of 1 to 255 bytes" in empty[2]
    assert right[1] == 200


def test_rows_wait_until_titanic_has_room(server, tmp_path):
    with serving(server.endpoints[0], str(tmp_path / "t.db"), max_waiting=9, max_waiting_per_service=1) as titanic:
        with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client, ThreadPoolExecutor(1) as pool:
            Titanic(client).submit("up", b"earlier")
            asked = pool.submit(ask, server, keyed("a", "b", "c"))
            eventually(lambda: titanic.metrics.rejected["full"])
            with worker(server, up):
                assert [code for _, code, _ in asked.result()] == [200, 200, 200]


def test_without_titanic(server):
    with worker(server, up):
        found = ask(server, keyed(*map(str, range(500))), timeout=2)
    assert {code for _, code, _ in found} == {404}
    assert "titanic serve" in found[0][2]
    assert server.broker.stats.requests < 500  # not each is tried: the rest fail with the first


def test_a_timed_out_request_continues_in_titanic(server, tmp_path):
    """Asking again with the same key returns the reply."""
    handled = []

    def handler(request):
        handled.append(request)
        return b"done"

    with serving(server.endpoints[0], str(tmp_path / "t.db")):
        late = ask(server, keyed(*map(str, range(50))), timeout=2)
        assert {code for _, code, _ in late} == {404}
        with worker(server, handler):
            eventually(lambda: {code for _, code, _ in ask(server, keyed("0", "1"))} == {200})
            assert ask(server, keyed("0")) == [("done", 200, None)]
            eventually(lambda: len(handled) >= 4)  # those of the first window; nobody handed over the others
    assert len(handled) == 4


def test_failures_are_stored_too(server, tmp_path):
    handled = []

    def handler(request):
        handled.append(request)
        raise ServiceError(422, "never")

    with serving(server.endpoints[0], str(tmp_path / "t.db")), worker(server, handler):
        for _ in range(2):
            assert ask(server, keyed("a")) == [(None, 422, "never")]
    assert len(handled) == 1


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()])
def test_the_values_of_a_column(kind):
    values = [b"a", b"", b"bcd", b"e"]
    column = pa.array(values, pa.binary()).cast(kind)
    assert frames_of(column) == values
    assert frames_of(column.slice(1, 2)) == [b"", b"bcd"]
    assert frames_of(column.slice(1, 0)) == []
    assert frames_of(pa.array([b"", b""], pa.binary()).cast(kind)) == [b"", b""]
    assert frames_of(pa.array([b"a", None, b"b"], pa.binary()).cast(kind).slice(1)) == [None, b"b"]
    assert frames_of(pa.array([], kind)) == []


def columns(outcomes, result):
    return [column.to_pylist() for column in reply_columns(outcomes, result)]


def test_the_columns_of_replies():
    assert columns([["é".encode()], [b"b"]], "string") == [["é", "b"], [200, 200], [None, None]]
    assert columns([[b"\xff"], [b"b"]], "binary") == [[b"\xff", b"b"], [200, 200], [None, None]]
    assert columns([[b"a"], [b"b", b"c"]], "frames") == [[[b"a"], [b"b", b"c"]], [200, 200], [None, None]]
    assert columns([], "string") == [[], [], []]


def test_a_reply_that_is_not_text_fails_alone():
    replies, codes, (none, error, _) = columns([[b"a"], [b"\xff"], None], "string")
    assert (replies, codes, none) == (["a", None, None], [200, 500, None], None)
    assert "not valid UTF-8" in error
    assert "result='binary'" in error


@pytest.mark.parametrize("result", ["string", "binary"])
def test_a_reply_of_several_frames_needs_all_of_them(result):
    replies, codes, errors = columns([[b"a", b"b"]], result)
    assert (replies, codes) == ([None], [500])
    assert errors == [f"the reply has 2 frames; result={result!r} needs one: use result='frames'"]


def test_batches_with_large_replies_are_divided(server, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_BATCH_BYTES", 20)
    batch = pa.record_batch({"id": range(7), "text": ["1234567890", "1234567890", "", None, "1" * 30, "bad", "1"]})
    endpoint, settings = server.endpoints[0], RowSettings(timeout=TIMEOUT_SECONDS)
    with worker(server, up):
        found = list(
            map_rows([batch, batch], "up", ["reply", "code", "error"], settings, lambda: AsyncClient(endpoint))
        )
    assert pa.Table.from_batches(found)["id"].to_pylist() == 2 * list(range(7))
    assert pa.Table.from_batches(found)["reply"].to_pylist() == 2 * [
        text and text.upper() for text in batch["text"].to_pylist()
    ]
    assert max(sum(len(text or "") for text in part["reply"].to_pylist()) for part in found) <= 30
