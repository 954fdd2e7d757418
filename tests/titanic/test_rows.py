"""Several requests with keys in one request to `titanic.request`, over real sockets."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, serving

from zmdp.clients import Client
from zmdp.mdp.errors import RequestTimeout, ServiceError
from zmdp.mdp.rows import read_reply
from zmdp.testing import running_broker
from zmdp.titanic import Titanic, callers
from zmdp.titanic import rows as titanic_rows
from zmdp.titanic.rows import NO_REPLY, asks_for_rows, parse_rows
from zmdp.titanic.submission import MalformedRequest, Submission
from zmdp.workers import Request, Worker, rows
from zmdp.workers.handling import Failed


@pytest.fixture
def client(tmp_path):
    with (
        running_broker(limits=LIMITS, drain_timeout=0.0) as server,
        serving(server.endpoints[0], str(tmp_path / "titanic.db")),
        Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as made,
    ):
        yield made


def ask(client, *pairs, timeout=TIMEOUT_SECONDS, headers=None, **options):
    """Return the outcomes of pairs of key and body for the service `up`."""
    frames = [frame for pair in pairs for frame in pair]
    asked = {"rows": len(pairs), "key_ttl": 60_000, "result_ttl": 60_000, **options}
    reply = client.request(
        "titanic.request", b"up", *frames, timeout=timeout, retries=0, headers=headers, options=asked
    )
    return read_reply(list(reply), len(pairs), partly=True) or list(reply)


class Handler:
    def __init__(self):
        self.handled = []

    def __call__(self, request):
        self.handled.append(request[0])
        if request[0] == b"bad":
            raise ValueError("no good")
        if request[0] == b"odd":
            raise ServiceError(422, "odd")
        return [request[0].upper(), request.headers.get("who", "").encode()]


@pytest.fixture
def handler(client):
    made = Handler()
    with Worker("up", made, broker=client.endpoint, **BEATS):
        yield made


def test_each_row_is_a_request(client, handler):
    pairs = [(b"k/%d" % n, body) for n, body in enumerate([b"a", b"bad", b"odd", b"b"])]
    expected = [[b"A", b""], Failed(500, "ValueError: no good", (b"",)), Failed(422, "odd", (b"",)), [b"B", b""]]
    assert ask(client, *pairs) == expected
    assert ask(client, *reversed(pairs)) == expected[::-1]
    assert sorted(handler.handled) == [b"a", b"b", b"bad", b"odd"]
    ticket = Titanic(client).submit("up", b"another", key="k/0")
    assert ticket.result(TIMEOUT_SECONDS) == [b"A", b""]


def test_the_same_key_twice(client, handler):
    assert ask(client, (b"k", b"a"), (b"l", b"b"), (b"k", b"c")) == [[b"A", b""], [b"B", b""], [b"A", b""]]
    assert len(handler.handled) == 2


def test_headers_apply_to_all_rows(client, handler):
    found = ask(client, (b"k", b"a"), (b"l", b"b"), headers={"who": "ann"})
    assert found == [[b"A", b"ann"], [b"B", b"ann"]]


def test_a_row_that_breaks_a_rule(client, handler):
    first, empty, bytes_, last = ask(client, (b"k", b"a"), (b"", b"b"), (b"\xff", b"c"), (b"l", b"d"))
    assert (first, last) == ([b"A", b""], [b"D", b""])
    assert (empty.code, bytes_.code) == (400, 400)
    assert "key must be text of 1 to 255 bytes" in empty.text


def test_rows_without_a_reply_in_time(client):
    """They are answered before the caller gives up; the others have their replies."""
    release = threading.Event()

    def slow(request):
        if request[0] == b"slow":
            release.wait(TIMEOUT_SECONDS)
        return request[0]

    with Worker("up", slow, broker=client.endpoint, concurrency=2, **BEATS):
        for timeout in (1, 5, 25):
            with suppress(RequestTimeout):
                found = ask(client, (b"k", b"slow"), (b"l", b"quick"), timeout=timeout)
                if found[1] != NO_REPLY:
                    break
        assert found == [NO_REPLY, [b"quick"]]
        release.set()
        assert ask(client, (b"k", b"slow")) == [[b"slow"]]


def test_a_reply_holds_as_many_rows_as_fit(client, handler, monkeypatch):
    monkeypatch.setattr(rows, "MAX_GROUP_BYTES", 10)
    pairs = [(b"k/%d" % n, b"1234") for n in range(5)]
    assert ask(client, *pairs) == [[b"1234", b""]] * 2
    assert ask(client, *pairs[2:]) == [[b"1234", b""]] * 2


def test_a_large_reply(client):
    with Worker("up", lambda request: b"x" * 2_000_000, broker=client.endpoint, **BEATS):
        assert ask(client, (b"k", b"a")) == [[b"x" * 2_000_000]]


def test_a_closed_request(client, handler):
    ask(client, (b"k", b"a"))
    Titanic(client).submit("up", b"a", key="k").close()
    (found,) = ask(client, (b"k", b"a"))
    assert (found.code, "was closed" in found.text) == (500, True)


@pytest.mark.parametrize(
    ("frames", "options"),
    [
        ([b"up", b"k", b"a"], {"rows": 2}),
        ([b"up", b"k", b"a"], {"rows": "1"}),
        ([b"up"], {"rows": 0}),
        ([b"up", b"k", b"a"], {"rows": True}),
        ([b"up", b"k", b"a"], {"rows": 1, "key": "k"}),
    ],
)
def test_malformed_requests(frames, options):
    with pytest.raises(MalformedRequest):
        parse_rows(frames, options, 0.0, "")


def test_parsing():
    first, second = parse_rows([b"up", b"k", b"a", b"", b"b"], {"rows": 2, "key_ttl": 1000}, 7.0, "ann")
    assert isinstance(first, Submission)
    assert (first.service, first.key, first.key_expires, first.owner) == ("up", "k", 8.0, "ann")
    assert second.code == 400
    assert not asks_for_rows(Request([b"up", b"a"], service="titanic.request", client=b"c"))


def test_a_malformed_request_is_answered(client):
    assert ask(client, (b"k", b"a"), key="k")[0].startswith(b"400 with rows, each row has its own key")


def test_an_answer_before_the_deadline():
    request = Request([b"x"], service="titanic.request", client=b"c")
    assert titanic_rows.remaining_seconds(request) is None
    request.deadline = 0.0
    assert titanic_rows.remaining_seconds(request) == 0.0


def test_callers_learn_what_another_program_did_to_their_rows(client, tmp_path, monkeypatch):
    monkeypatch.setattr(callers, "MAX_WATCHED", 2)
    pairs = [(b"k/%d" % number, b"") for number in range(5)]
    path = tmp_path / "titanic.db"
    with ThreadPoolExecutor() as pool, closing(sqlite3.connect(path, timeout=TIMEOUT_SECONDS)) as db:
        asked = pool.submit(ask, client, *pairs)  # no worker offers the service
        eventually(lambda: db.execute("SELECT count(*) FROM titanic_requests").fetchone() == (5,))
        db.execute("DELETE FROM titanic_requests")
        db.commit()
        outcomes = asked.result(TIMEOUT_SECONDS)
    assert [outcome.code for outcome in outcomes] == [500] * 5
    assert outcomes[0].text.startswith("the request was closed")
