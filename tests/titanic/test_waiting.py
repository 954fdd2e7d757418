"""Callers of `titanic.request` that wait for the reply (the option `reply`), over real sockets."""

import json
from contextlib import ExitStack, suppress

import pytest
from support.processes import eventually
from support.titanics import answer, given, running_bench, serving, stored

from zmdp.mdp.errors import RequestTimeout
from zmdp.titanic import Titanic
from zmdp.titanic.server import fetch
from zmdp.titanic.server import program as server_module

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
    monkeypatch.setattr(fetch, "MIN_WAIT_SECONDS", 0.0)
    for module in (fetch, server_module):
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


@on_sqlite
def test_a_caller_that_goes_away_leaves_its_request(bench, server, url):
    """It is executed all the same, because it is stored."""
    client, worker = bench.x1_client(), bench.x1_worker(b"up")
    ask(client, "k", b"a")
    address, _ = given(worker)
    client.cancel()
    client.error(b"499")
    worker.final(address, b"done")
    eventually(lambda: column(url, "state") == ["done"])
    assert column(url, "attempts") == [1]
