"""Clients of several brokers over real connections: nothing fails while brokers drain, die and come back.

`test_failover.py` proves the rules at the machine; here, that each kind of client has its sockets follow.
"""

from contextlib import ExitStack

import pytest
from doors.adapters import Asyncio, Failed, Threads
from support.processes import eventually
from support.x1_broker import X1Router
from support.x1_client import DISCONNECT, HEARTBEAT

from zmdp.mdp import wire
from zmdp.mdp.wire import batch, x1


@pytest.fixture
def routers():
    with X1Router() as first, X1Router() as second:
        yield first, second


@pytest.fixture
def quick_probes(monkeypatch):
    monkeypatch.setattr("zmdp.mdp.transport.failover.PROBE_INTERVAL", (0.05, 0.1))


def refuse(router, *asked):
    """Answer requests as a draining broker does."""
    packed = batch.Batch((asked[0].sender, b""), wire.CX1)
    for each in asked:
        packed.error(x1.CLIENT_ERROR, each.number, 503, b"the broker is draining", [])
    router.send(*packed.messages()[0])


def echo(router, *asked):
    router.reply(*((each, each.body) for each in asked))


def answer_probe(router, command=HEARTBEAT):
    """Wait for a probe and answer it."""
    sender, *message = router.recv()
    assert message == HEARTBEAT
    router.send(sender, *command)


@pytest.fixture(params=[Threads, Asyncio])
def door(request, routers, tmp_path):
    with request.param([each.endpoint for each in routers], tmp_path) as door:
        yield door


def arrived(door, router):
    """Whether the client is at this broker."""
    return eventually(lambda: door.client.endpoint == router.endpoint)


# ── brokers written by hand ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_outstanding_is_answered_by_the_draining_broker(door, routers):
    first, second = routers
    old = [door.begin(b"old %d" % n) for n in range(3)]
    asked = first.requests(3)
    first.send(asked[0].sender, *DISCONNECT)
    assert arrived(door, second)
    new = door.begin(b"new")
    echo(second, *second.requests(1))
    assert new.outcome() == [b"new"]
    echo(first, *asked[:2])
    echo(first, asked[2])
    assert [each.outcome() for each in old] == [[b"old 0"], [b"old 1"], [b"old 2"]]


def test_what_the_draining_broker_refuses_is_sent_to_the_next(door, routers):
    first, second = routers
    calls = [door.begin(b"%d" % n) for n in range(3)]
    asked = first.requests(3)
    refuse(first, asked[1], asked[2])
    again = second.requests(2)
    assert [(each.number, each.body) for each in again] == [(each.number, each.body) for each in asked[1:]]
    echo(second, *again)
    echo(first, asked[0])
    assert [each.outcome() for each in calls] == [[b"0"], [b"1"], [b"2"]]


def test_a_stream_goes_on_at_the_draining_broker(door, routers, pool):
    first, second = routers
    stream = door.stream(b"x")
    part = pool.submit(next, stream)
    (asked,) = first.requests(1)
    first.reply((asked, [b"1"]), final=False)
    assert part.result() == [b"1"]
    first.send(asked.sender, *DISCONNECT)
    assert arrived(door, second)
    first.reply((asked, [b"2"]), final=False)
    first.reply((asked, [b"3"]))
    assert [list(each) for each in stream] == [[b"2"], [b"3"]]


@pytest.mark.parametrize("kind", [Threads, Asyncio])
def test_a_client_returns_with_requests_outstanding(kind, routers, tmp_path, quick_probes):
    del quick_probes
    _, second = routers
    with ExitStack() as ends:
        first = ends.enter_context(X1Router())
        door = ends.enter_context(kind([first.endpoint, second.endpoint], tmp_path))
        asking = door.begin(b"old")
        first.requests(1)
        first.__exit__(None, None, None)
        (asked,) = second.requests(1)
        first = ends.enter_context(X1Router(first.endpoint))
        answer_probe(first, DISCONNECT)  # it drains: the client stays
        answer_probe(first)
        assert arrived(door, first)
        new = door.begin(b"new")
        echo(first, *first.requests(1))
        assert new.outcome() == [b"new"]
        echo(second, asked)
        assert asking.outcome() == [b"old"]


def test_closing_closes_old_connections_and_probes(quick_probes, door, routers):
    del quick_probes
    first, second = routers
    calls = [door.begin(b"x")]
    asked = first.requests(1)
    first.send(asked[0].sender, *DISCONNECT)
    assert arrived(door, second)
    calls.append(door.begin(b"x"))
    second.requests(1)
    while first.recv()[0] == asked[0].sender:  # a HEARTBEAT over the old connection
        pass  # until the first is probed
    door.close()
    assert [each.outcome() for each in calls] == [Failed("closed")] * 2
    for router in (first, second):
        while (message := router.recv())[1:] == HEARTBEAT:
            pass
        assert [type(command) for command in batch.from_client(message, 2, (), 0, 0)] == [wire.Cancel]
