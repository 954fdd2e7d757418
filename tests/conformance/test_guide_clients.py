"""Clients of the ZeroMQ Guide that know neither MDP nor FLP: that of Binary Star, and Freelance's models one and two.

Each sends what the Guide's program in C sends, and expects what it expects.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from support.peers import Bench
from support.pirates import lazy
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint, process

from zmdp.clients import Client
from zmdp.mdp.broker.io.dialer import LinkTo
from zmdp.testing import running_broker
from zmdp.workers import Worker

RETRY_MS = 200
"""How long a client waits before it tries again; not more than a pause, since it tries until the test times out."""
PIRATES = [("tcp://127.0.0.1:*", b"echo")]


class BinaryStarClient:
    """`bstarcli`: a REQ socket to one of two servers, which is replaced by one to the other if no reply comes."""

    def __init__(self, context: zmq.Context[Any], *servers: str) -> None:
        self._context = context
        self._servers = servers
        self.at = 0
        self._sequence = 0
        self._connect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.connect(self._servers[self.at])

    def call(self) -> None:
        """Send the next number until it comes back."""
        self._sequence += 1

        def answered() -> bool:
            self._socket.send(b"%d" % self._sequence)
            if self._socket.poll(RETRY_MS):
                return True
            self.close()
            self.at = 1 - self.at
            self._connect()
            return False

        eventually(answered)
        assert self._socket.recv_multipart() == [b"%d" % self._sequence]

    def close(self) -> None:
        self._socket.close()


def test_the_binary_star_client_fails_over_between_a_linked_pair(context: zmq.Context[Any]) -> None:
    with ExitStack() as rest, ExitStack() as first:
        right = rest.enter_context(running_broker(name="right", pirates=PIRATES, drain_timeout=0.0))
        links = [LinkTo("peer", right.endpoints[0])]
        left = first.enter_context(running_broker(name="left", pirates=PIRATES, drain_timeout=0.0, links=links))
        rest.enter_context(Worker("echo", list, broker=right.endpoints[0]))  # left reaches it over the link
        with Client(left.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            client.request("echo", b"")  # it waits for the worker
        client = BinaryStarClient(context, left.pirate_endpoints[0], right.pirate_endpoints[0])
        rest.callback(client.close)
        client.call()
        assert client.at == 0
        first.close()
        client.call()
        assert client.at == 1


@pytest.fixture(params=["freelance", "pirate"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server in place of the Guide's: a worker without a broker, or a pirate endpoint."""
    with ExitStack() as stack:
        if request.param == "freelance":
            endpoint = free_endpoint()
            stack.enter_context(process("mdworker", "zmdp.workers.examples:echo", "--freelance", endpoint)).line(
                "offering echo at"
            )
            yield endpoint
        else:
            broker = stack.enter_context(running_broker(pirates=PIRATES))
            stack.enter_context(Worker("echo", list, broker=broker.endpoints[0]))
            yield broker.pirate_endpoints[0]


def test_freelance_one_asks_servers_one_after_the_other(context: zmq.Context[Any], server: str) -> None:
    dead = free_endpoint()

    def asked(endpoint: str, wait_ms: float) -> list[bytes] | None:
        with context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect(endpoint)
            socket.send(b"Hello world")
            return socket.recv_multipart() if socket.poll(wait_ms) else None

    assert asked(dead, RETRY_MS) is None
    assert asked(server, TIMEOUT_SECONDS * 1000) == [b"Hello world"]


def test_freelance_two_asks_all_servers_at_once(context: zmq.Context[Any], server: str) -> None:
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server)
        for sequence in (b"1", b"2", b"3"):
            socket.send_multipart([b"", sequence, b"random name"])
            assert socket.poll(TIMEOUT_SECONDS * 1000)
            assert socket.recv_multipart() == [b"", sequence, b"random name"]


def test_freelance_two_takes_the_first_of_several_replies(context: zmq.Context[Any], start: Any) -> None:
    """To the broker, the others are replies for a client that may have left."""
    brokers: list[Bench] = [start(pirates=PIRATES) for _ in range(2)]
    workers = [bench.worker(b"echo") for bench in brokers]
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        for bench in brokers:
            socket.connect(bench.server.pirate_endpoints[0])
        for _ in brokers:  # they take turns
            socket.send_multipart([b"", b"1", b"random name"])
        for worker in workers:
            worker.final(worker.work(b"1", b"random name"), b"1", b"OK")
        replies = [socket.recv_multipart() for _ in brokers]
    assert replies == [[b"", b"1", b"OK"]] * 2
    for bench in brokers:
        client, worker = lazy(bench), workers[brokers.index(bench)]
        client.call(b"still here")
        worker.final(worker.work(b"still here"), b"yes")
        client.answered(b"yes")
