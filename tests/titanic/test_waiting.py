"""Callers of `titanic.request` that wait for the reply (the option `reply`), over real sockets."""

import json
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import answer, connected, given, running_bench, serving, stored

from zmdp.mdp.errors import RequestTimeout
from zmdp.titanic import Titanic, acceptance, callers, store
from zmdp.titanic import server as server_module

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
"""For tests that do not depend on the database."""
REQUEST = b"titanic.request"


def ask(client, key, body, /, service=b"up", **options):
    """Let a handwritten X1 client submit a request and wait for its reply."""
    options = {"key": key, "reply": True, **options}
    client.request(REQUEST, service, body, options=json.dumps(options).encode())


def finals(client, count):
    """Return so many replies by the numbers of their requests."""
    messages = [client.recv() for _ in range(count)]
    assert {message[2] for message in messages} == {b"\x03"}
    return {int(message[3]): message[4:] for message in messages}


def column(url, name):
    return [row[name] for row in stored(url)["requests"]]


def test_the_reply_is_that_of_titanic_reply(bench, server, url):
    worker, client = bench.x1_worker(b"up"), bench.x1_client()
    expected = {
        "done": [b"200", b"A"],
        "failed": [b"500 no", b"422", b"up", b"detail"],
        "large": [b"200", b"x" * 2**21],
    }
    for key, (_, *frames) in expected.items():
        ask(client, key, key.encode())
        address, body = given(worker)
        assert body == key.encode()
        if key == "failed":
            worker.error(address, b"422", b"no", b"detail")
        else:
            worker.final(address, *frames)
        client.final(REQUEST, *expected[key])
    for key, frames in expected.items():
        ask(client, key, b"again")
        client.final(REQUEST, *frames)
    worker.nothing()
    assert column(url, "attempts") == [1, 1, 1]


@on_sqlite
def test_the_same_key_again_while_the_request_runs(bench, server, url):
    worker, clients = bench.x1_worker(b"up"), [bench.x1_client() for _ in range(3)]
    ask(clients[0], "k", b"a")
    address, _ = given(worker)
    for client in clients[1:]:
        ask(client, "k", b"a")
    eventually(lambda: held(bench) == 3)
    worker.final(address, b"done")
    for client in clients:
        client.final(REQUEST, b"200", b"done")
    assert column(url, "attempts") == [1]


def held(bench):
    """Return how many callers of `titanic.request` wait."""
    workers = json.loads(bench.mmi(b"mmi.workers", REQUEST))["workers"]
    return sum(each["held"] for each in workers)


@on_sqlite
def test_without_a_reply_in_time_the_answer_is_300(bench, server, client):
    worker = bench.x1_worker(b"up")
    options = {"key": "k", "reply": True}
    for timeout in (1, 5, 25):
        with suppress(RequestTimeout):
            assert client.request("titanic.request", b"up", b"a", timeout=timeout, options=options) == [b"300"]
            break
    else:
        raise AssertionError("there was no answer before any deadline")
    answer(worker)
    assert client.request("titanic.request", b"up", b"a", options=options) == [b"200", b"done"]


@on_sqlite
def test_the_key_of_a_request_that_was_closed(bench, server, titanic):
    worker, client = bench.x1_worker(b"up"), bench.x1_client()
    ask(client, "k", b"a")
    answer(worker)
    client.final(REQUEST, b"200", b"done")
    titanic.submit("up", b"a", key="k").close()
    ask(client, "k", b"a")
    text = b"500 the request was closed, or its result has expired, while its key is remembered"
    client.final(REQUEST, text, b"500", b"up")


@on_sqlite
@pytest.mark.parametrize("options", [{"key": None}, {"reply": 1}, {"reply": "true"}])
def test_malformed_requests(bench, server, url, options):
    client = bench.x1_client()
    ask(client, "k", b"a", **options)
    status, reason = client.recv()[4:]
    assert status.startswith(b"400 reply ")
    assert reason == b"malformed"
    assert stored(url)["requests"] == []


def test_callers_learn_of_a_reply_that_another_titanic_has_stored(bench, url):
    with running_bench() as elsewhere, ExitStack() as stack:
        stack.enter_context(serving(bench.endpoint, url))
        stack.enter_context(serving(elsewhere.endpoint, url))
        here, there = bench.x1_client(), elsewhere.x1_client()
        ask(here, "k", b"a")
        eventually(lambda: stored(url)["requests"])
        ask(there, "k", b"a")
        eventually(lambda: held(elsewhere) == 1)
        answer(bench.x1_worker(b"up"))
        for client in (here, there):
            client.final(REQUEST, b"200", b"done")


@on_sqlite
def test_many_waiting_callers_do_not_keep_others_from_submitting(bench, url, client, monkeypatch):
    monkeypatch.setattr(callers, "MIN_WAIT_SECONDS", 0.0)
    for module in (callers, server_module):
        monkeypatch.setattr(module, "MAX_CALLERS", 4)
    monkeypatch.setattr(server_module, "CONCURRENCY", 2)
    many = bench.x1_client()
    with serving(bench.endpoint, url):
        for number in range(20):
            ask(many, f"k/{number}", b"%d" % number, service=b"later")
        assert finals(many, 16) == {number: [b"300"] for number in range(1, 17)}
        ticket = Titanic(client).submit("later", b"other")
        assert not ticket.ready()
        worker = bench.x1_worker(b"later")
        assert [answer(worker) for _ in range(21)] == [*(b"%d" % number for number in range(20)), b"other"]
        assert finals(many, 4) == {number: [b"200", b"done"] for number in range(17, 21)}


# ── requests that are stored when workers can take them ──────────────────────────────────────────────────────────────


@pytest.fixture
def claims():
    """The claims that are made, which requests that run at once do not need."""
    seen = []

    def watch(connection, cursor, statement, *others):
        if statement.startswith(store.claims._READY.split("{0}")[0]):
            seen.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", watch)
    yield seen
    sa.event.remove(sa.Engine, "before_cursor_execute", watch)


@pytest.fixture
def up(bench, url, monkeypatch):
    """A Titanic that knows a worker for `up`, to which it may send two requests at a time."""
    monkeypatch.setattr(acceptance, "MAX_TURN_SECONDS", TIMEOUT_SECONDS)
    worker = bench.x1_worker(b"up")
    with ExitStack() as stack:
        rooms = stack.enter_context(serving(bench.endpoint, url))._rooms
        eventually(lambda: rooms.dispatcher.offered.get("up"))

        def waiting():
            """Return how many requests wait for their turn."""
            return sum(len(lane.turns) for lane in dict(rooms.dispatcher.lanes).values())

        yield SimpleNamespace(worker=worker, rooms=rooms, waiting=waiting, stop=stack.close)


def ask_many(client, up, url, count):
    """Submit requests, of which two have room, and wait until the others wait for theirs, not yet stored."""
    for number in range(count):
        ask(client, f"k/{number}", b"%d" % number)
    eventually(lambda: up.waiting() == count - 2)
    eventually(lambda: column(url, "state") == ["running"] * 2)


def test_requests_run_at_once_in_the_order_in_which_they_came(bench, up, url, claims):
    client = bench.x1_client()
    ask_many(client, up, url, 5)
    assert [answer(up.worker) for _ in range(5)] == [b"%d" % number for number in range(5)]
    assert finals(client, 5) == {number: [b"200", b"done"] for number in range(1, 6)}
    assert (column(url, "state"), column(url, "attempts")) == (["done"] * 5, [1] * 5)
    assert claims == []


@on_sqlite
def test_requests_do_not_wait_for_ever_to_be_stored(bench, up, url, monkeypatch):
    monkeypatch.setattr(acceptance, "MAX_TURN_SECONDS", 0.05)
    client = bench.x1_client()
    for number in range(3):
        ask(client, f"k/{number}", b"%d" % number)
    eventually(lambda: sorted(column(url, "state")) == ["pending", "running", "running"])
    assert [answer(up.worker) for _ in range(3)] == [b"0", b"1", b"2"]
    assert finals(client, 3) == {number: [b"200", b"done"] for number in range(1, 4)}


@on_sqlite
def test_requests_that_are_stored_run_first(bench, up, titanic_client, url):
    client = bench.x1_client()
    ask_many(client, up, url, 4)
    titanic_client.submit("up", b"stored")
    ask(client, "urgent", b"urgent", priority=1)
    eventually(lambda: column(url, "state") == ["running", "running", "pending", "pending"])
    assert [answer(up.worker) for _ in range(6)] == [b"0", b"1", b"urgent", b"stored", b"2", b"3"]


@pytest.fixture
def titanic_client(client):
    return Titanic(client)


@on_sqlite
def test_a_caller_that_goes_away_before_its_request_is_stored(bench, up, url):
    client = bench.x1_client()
    ask_many(client, up, url, 3)
    client.cancel()
    client.error(b"499")
    eventually(lambda: not up.waiting())
    assert [answer(up.worker) for _ in range(2)] == [b"0", b"1"]
    assert finals(client, 2) == {number: [b"200", b"done"] for number in (1, 2)}
    assert len(stored(url)["requests"]) == 2


@on_sqlite
def test_a_caller_that_goes_away_while_its_request_is_stored(bench, up, url):
    """It is executed all the same, because it is stored."""
    client = bench.x1_client()
    with connected(url) as connection:
        connection.exec_driver_sql("UPDATE titanic_counters SET value = value")  # locks the database
        ask(client, "k", b"a")
        eventually(lambda: up.rooms.acceptance.accepting)
        client.cancel()
        client.error(b"499")
        bench.mmi(b"mmi.service", b"up")  # the broker has heard of it
    answer(up.worker)
    eventually(lambda: column(url, "state") == ["done"])
    assert column(url, "attempts") == [1]


@on_sqlite
def test_requests_that_wait_when_titanic_stops_are_stored(bench, up, url):
    client = bench.x1_client()
    ask_many(client, up, url, 3)
    up.stop()
    assert finals(client, 3) == {number: [b"300"] for number in (1, 2, 3)}
    assert column(url, "state") == ["pending"] * 3
