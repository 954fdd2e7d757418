"""Callers that wait for replies: what wakes them."""

import json
from contextlib import ExitStack

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import answer, follow, given, operate, running_bench, serving

from zmdp.clients import Client
from zmdp.titanic import Titanic
from zmdp.titanic.operator import admin
from zmdp.titanic.server import fetch as callers_module

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
"""For tests that do not depend on the database."""


def wait(client, ticket):
    """Let a handwritten X1 client wait for a reply."""
    client.request(b"titanic.reply", ticket.uuid.encode(), options=b'{"wait":true}')


@on_sqlite
def test_many_callers_can_wait_for_one_reply(bench, titanic):
    worker, clients = bench.x1_worker(b"echo"), [bench.x1_client() for _ in range(40)]
    ticket = titanic.submit("echo")
    for client in clients:
        wait(client, ticket)
    address, _ = given(worker)
    for client in clients:
        client.sync()
        assert client.waiting == 0
    worker.final(address, b"done")
    for client in clients:
        client.final(b"titanic.reply", b"200", b"done")


@on_sqlite
def test_too_many_waiting_callers_the_longest_waiting_get_300(bench, titanic, monkeypatch):
    monkeypatch.setattr(callers_module, "MAX_CALLERS", 2)
    worker, clients = bench.x1_worker(b"count"), [bench.x1_client() for _ in range(5)]
    ticket = titanic.submit("count")
    address, _ = given(worker)
    worker.partial(address, b"half")

    def wait_too(client):
        follow(client, ticket)
        client.partial(b"titanic.reply", b"half")  # it waits for what comes next

    wait_too(clients[0])
    wait_too(clients[1])
    wait_too(clients[2])
    clients[0].final(b"titanic.reply", b"300")
    wait_too(clients[3])
    clients[1].final(b"titanic.reply", b"300")
    clients[2].cancel()
    clients[2].error(b"499")
    eventually(lambda: waiting(bench) == 1)
    wait_too(clients[4])  # there is room, so no caller is dismissed
    worker.final(address, b"end")
    for client in clients[3:]:
        client.final(b"titanic.reply", b"200", b"end")


def waiting(bench):
    """Return how many callers wait for replies."""
    workers = json.loads(bench.mmi(b"mmi.workers", b"titanic.reply"))["workers"]
    return sum(each["held"] for each in workers)


@on_sqlite
def test_waiting_callers_learn_that_the_request_was_closed(bench, titanic):
    clients = [bench.x1_client() for _ in range(3)]
    ticket = titanic.submit("later")
    for client in clients[:2]:
        wait(client, ticket)
    follow(clients[2], ticket)
    eventually(lambda: waiting(bench) == 3)
    ticket.close()
    for client in clients:
        client.final(b"titanic.reply", b"400 unknown uuid", b"unknown-uuid")


@on_sqlite
def test_waiting_callers_get_300_when_titanic_shuts_down(bench, url, client, monkeypatch):
    monkeypatch.setattr(callers_module, "MIN_WATCH_SECONDS", 3600)
    caller, worker = bench.x1_client(), bench.x1_worker(b"count")
    with serving(bench.endpoint, url):
        ticket = Titanic(client).submit("count")
        follow(caller, ticket)
        worker.partial(given(worker)[0], b"half")
        caller.partial(b"titanic.reply", b"half")
        assert not any(ticket.ready() for _ in range(3))  # enough time for them to query and wait
    assert bench.status(b"count") == b"200"  # nothing else has happened
    caller.final(b"titanic.reply", b"300")


def test_waiting_callers_learn_what_another_titanic_did(bench, url):
    with running_bench() as elsewhere, ExitStack() as stack:
        stack.enter_context(serving(bench.endpoint, url))
        stack.enter_context(serving(elsewhere.endpoint, url))
        titanic = Titanic(stack.enter_context(Client(bench.endpoint, timeout=TIMEOUT_SECONDS)))
        done, closed, cancelled = (titanic.submit(name) for name in ("echo", "later", "later"))
        callers = [elsewhere.x1_client() for _ in range(3)]
        for caller, ticket in zip(callers, (done, closed, cancelled), strict=True):
            wait(caller, ticket)
        eventually(lambda: waiting(elsewhere) == 3)
        answer(bench.x1_worker(b"echo"))
        closed.close()
        operate(url, admin.cancel, cancelled.uuid)
        callers[0].final(b"titanic.reply", b"200", b"done")
        callers[1].final(b"titanic.reply", b"400 unknown uuid", b"unknown-uuid")
        callers[2].final(b"titanic.reply", b"500 cancelled by an operator", b"499", b"later")


def test_the_pause_between_two_looks_follows_what_a_look_costs():
    assert callers_module.watch_pause(0.0) == callers_module.watch_pause(0.0005) == 0.02
    assert callers_module.watch_pause(0.01) == pytest.approx(0.2)
    assert callers_module.watch_pause(0.1) == callers_module.watch_pause(60.0) == 0.5
