"""Batches to rows and back, and rows with keys through Titanic."""

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, serving

from zmdp.clients import AsyncClient, Client
from zmdp.clients.rows import Lookahead, RowSettings
from zmdp.clients.rows import arrow as rows_module
from zmdp.clients.rows.arrow import Rows, answer, answer_rows, frames_of, reply_columns, split_by_size
from zmdp.mdp.errors import ServiceError
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.titanic.keyed import KeyedRows
from zmdp.workers import Worker


@pytest.fixture
def server():
    with running_broker(limits=LIMITS, drain_timeout=0.0) as running:
        yield running


def worker(server, handler):
    return Worker("up", handler, broker=server.endpoints[0], **BEATS)


def up(request):
    return [frame.upper() for frame in request]


def ask(server, rows, *, keyed=True, **given):
    """Return reply, code and error of each row."""
    settings = RowSettings(**{"window": 4, "rows_per_request": 1, "timeout": TIMEOUT_SECONDS, **given})
    route = (lambda client: KeyedRows(client, None, 86400.0)) if keyed else None
    (found,) = answer_rows(
        [rows], settings, lambda: AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS), Lookahead(settings), route
    )
    return [answer(outcome, "string") for outcome in found.outcomes]


def keyed(*keys):
    return Rows("up", [b"x"] * len(keys), keys)


def test_rows_that_are_not_sent(server):
    with worker(server, up):
        rows = Rows(["up", None, "up", None, "nobody\n", "up"], [b"a", b"b", None, None, b"c", b"d"])
        found = ask(server, rows, keyed=False)
        assert ask(server, Rows("up", [None, None]), keyed=False) == [(None, None, None)] * 2
        assert ask(server, Rows("up", []), keyed=False) == []
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
    assert columns(["é".encode(), b"b"], "string") == [["é", "b"], [200, 200], [None, None]]
    assert columns([b"\xff", b"b"], "binary") == [[b"\xff", b"b"], [200, 200], [None, None]]
    assert columns([b"a", [b"b", b"c"]], "frames") == [[[b"a"], [b"b", b"c"]], [200, 200], [None, None]]
    assert columns([], "string") == [[], [], []]


def test_a_reply_that_is_not_text_fails_alone():
    replies, codes, (none, error, _) = columns([b"a", b"\xff", None], "string")
    assert (replies, codes, none) == (["a", None, None], [200, 500, None], None)
    assert "not valid UTF-8" in error
    assert "result='binary'" in error


@pytest.mark.parametrize("result", ["string", "binary"])
def test_a_reply_of_several_frames_needs_all_of_them(result):
    replies, codes, errors = columns([[b"a", b"b"]], result)
    assert (replies, codes) == ([None], [500])
    assert errors == ["the reply has 2 frames; a request of one row needs one frame"]


def test_large_replies_are_split_into_batches(monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_BATCH_BYTES", 10)
    outcomes = [b"123456", b"1234", None, b"1", b"12345678901", ServiceError(500, "no"), b"1"]
    assert list(split_by_size(outcomes)) == [(0, 3), (3, 4), (4, 5), (5, 7)]
    assert list(split_by_size([[b"12345", b"67890"], b"1"])) == [(0, 1), (1, 2)]
