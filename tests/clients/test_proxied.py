"""Clients behind a ROUTER–DEALER proxy (C36)."""

import asyncio
import threading
from contextlib import contextmanager

import pytest
import zmq
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import AsyncClient, Client, ServiceError, ServiceNotFound
from zmdp.testing import running_broker
from zmdp.workers import Worker


def count(request):
    for number in range(3):
        yield b"%d" % number
    return b"end"


def refuse(request):
    raise ServiceError(404, "no such user")


@contextmanager
def proxied(broker):
    """The endpoint of a ROUTER–DEALER proxy in front of `broker`."""
    context = zmq.Context()
    front, back, control, stop = (context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER, zmq.PAIR, zmq.PAIR))
    front.bind("tcp://127.0.0.1:*")
    control.bind("inproc://control")
    stop.connect("inproc://control")
    back.connect(broker)
    thread = threading.Thread(target=zmq.proxy_steerable, args=(front, back, None, control))
    thread.start()
    try:
        yield front.last_endpoint.decode()
    finally:
        stop.send(b"TERMINATE")
        thread.join()
        context.destroy(linger=0)


@pytest.fixture(scope="module")
def proxy():
    with (
        running_broker() as server,
        Worker("echo", list, broker=server.endpoints[0]),
        Worker("count", count, broker=server.endpoints[0]),
        Worker("refuse", refuse, broker=server.endpoints[0]),
        proxied(server.endpoints[0]) as at,
    ):
        yield at


SPEAKING = [{"protocol": "X1"}, {"protocol": "0.1"}, {"protocol": "0.2", "envelope": True}]


@pytest.mark.parametrize("settings", SPEAKING, ids=str)
def test_a_client(proxy, settings):
    # C36
    with Client(proxy, timeout=TIMEOUT_SECONDS, **settings) as client:
        assert client.request("echo", b"x", b"") == [b"x", b""]
        assert [frame for part in client.stream("count") for frame in part] == [b"0", b"1", b"2", b"end"]
        assert client.available("echo")


@pytest.mark.parametrize("settings", SPEAKING, ids=str)
def test_an_asyncio_client(proxy, settings):
    # C36
    async def scenario():
        async with AsyncClient(proxy, timeout=TIMEOUT_SECONDS, **settings) as client:
            asked = [b"%d" % number for number in range(100)]
            assert await asyncio.gather(*(client.request("echo", body) for body in asked)) == [[body] for body in asked]
            assert [frame async for part in client.stream("count") for frame in part] == [b"0", b"1", b"2", b"end"]

    asyncio.run(scenario())


def test_what_only_x1_has(proxy):
    # C36
    with Client(proxy, timeout=TIMEOUT_SECONDS) as client:
        futures = [client.submit("echo", b"%d" % number) for number in range(300)]
        assert [future.result(TIMEOUT_SECONDS) for future in futures] == [[b"%d" % number] for number in range(300)]
        with pytest.raises(ServiceNotFound):
            client.request("nobody", wait=False)
        with pytest.raises(ServiceError, match="no such user"):
            client.request("refuse")
        held = client.submit("nobody")
        assert held.cancel()
