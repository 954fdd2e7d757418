"""An X1 client's connection, stepped by hand against a ROUTER, and how seldom its shells step."""

import asyncio
import time
from itertools import count

import pytest
import zmq
from support.processes import eventually

from zmdp.clients import AsyncClient
from zmdp.clients.connection import Connection
from zmdp.clients.session import ClientSession
from zmdp.mdp.multipart import receive

ECHO = b"echo"


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def router(context):
    with context.socket(zmq.ROUTER) as router:
        router.linger = 10_000
        router.rcvtimeo = 10_000
        router.bind("tcp://127.0.0.1:*")
        yield router


@pytest.fixture
def connection(router, context):
    made = Connection(ClientSession(), [router.last_endpoint.decode()], context)
    yield made
    made.drop()


def ask(connection, outcomes):
    call = connection.session.request(ECHO, [b"body"], time.monotonic())
    call.deliver = outcomes.append


def answer(router, *body):
    sender, number, *_ = router.recv_multipart()
    router.send_multipart([sender, number, b"", b"MDPCX1", b"\x03", ECHO, *body])


def step_until(connection, condition):
    def stepped():
        connection.step(time.monotonic())
        return condition()

    eventually(stepped)


def test_what_came_before_the_end_is_taken_in(router, connection):
    connection.step(time.monotonic())  # from then on the monitor's descriptor tells
    outcomes = []
    ask(connection, outcomes)
    connection.flush(time.monotonic())
    answer(router, b"reply")
    descriptor = zmq.Poller()
    descriptor.register(int(connection.monitor.get(zmq.FD)), zmq.POLLIN)
    router.close()
    assert descriptor.poll(10_000)
    connection.rung = True
    connection.step(time.monotonic())
    assert outcomes == [[b"reply"]]
    step_until(connection, lambda: connection.session.lost)


def test_more_that_came_before_the_end_than_is_taken_in_at_a_time(router, connection, monkeypatch):
    monkeypatch.setattr("zmdp.clients.connection.BATCH", 3)
    outcomes = []
    for _ in range(10):
        ask(connection, outcomes)
    connection.step(time.monotonic())
    for number in range(8):
        answer(router, b"%d" % number)
    router.close()
    while len(outcomes) < 8:
        connection.rung = True
        connection.step(time.monotonic())
    assert outcomes == [[b"%d" % number] for number in range(8)]
    connection.rung = True
    step_until(connection, lambda: connection.session.lost)


def test_the_monitor_is_asked_when_it_is_new_and_when_it_rings(router, connection, monkeypatch):
    del router
    asked = count()
    ended = connection._ended
    monkeypatch.setattr(connection, "_ended", lambda: next(asked) * 0 or ended())
    outcomes = []
    for _ in range(10):
        ask(connection, outcomes)
        connection.step(time.monotonic())
    assert next(asked) == 1
    connection.rung = True
    connection.step(time.monotonic())
    assert next(asked) == 3


def test_after_the_last_reply_there_is_no_look_for_another(router, connection, monkeypatch):
    looks = count()
    monkeypatch.setattr(
        "zmdp.clients.connection.receive", lambda socket: (message := receive(socket)) and (next(looks), message)[1]
    )
    outcomes = []
    ask(connection, outcomes)
    connection.step(time.monotonic())
    answer(router, b"reply")
    step_until(connection, lambda: outcomes)
    assert next(looks) == 1
    assert not connection.session.outstanding


def test_what_a_turn_of_the_loop_asks_for_is_sent_together(router, monkeypatch):
    """The first at once, as nothing else is outstanding; then all others."""
    sent = []
    send = Connection._send

    def counted(self, now):
        if self.session.messages:
            sent.append(len(self.session.messages))
        return send(self, now)

    async def scenario():
        async with AsyncClient(router.last_endpoint.decode()) as client:
            asking = [asyncio.create_task(client.request("echo")) for _ in range(100)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert sent == [1, 99]
            for _ in asking:
                answer(router, b"reply")
            assert await asyncio.gather(*asking) == [[b"reply"]] * 100
            assert sent == [1, 99]

    monkeypatch.setattr(Connection, "_send", counted)
    asyncio.run(scenario())
