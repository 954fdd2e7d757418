"""Requests that end together at a broker process: every client that reads is told (C40)."""

from contextlib import ExitStack

import pytest
import zmq
from support.peers import Client
from support.processes import broker

from zmdp.mdp.wire import CX1, batch

MANY = 8_000
CLIENTS = 2
LIMITS = ("--max-outbox-bytes", "400000", "--max-queue", "1000000", "--heartbeat", "600")
"""The ERRORs of all requests of a client together are more than waits for slow readers."""


class Asking(Client):
    """A client with many requests."""

    def ask(self, ttl=0, options=b""):
        for first in range(0, MANY, 1000):
            packed = batch.Batch((b"",), CX1)
            for number in range(first, first + 1000):
                packed.request_to_broker(number, ttl, b"nobody", options, [b"x"])
            for message in packed.messages():
                self.send(*message)
        self.sync()

    def ends(self):
        """Read until every request has ended; return how many did so with which code."""
        codes = {}
        while sum(codes.values()) < MANY:
            message = self.recv()
            for each in batch.to_client(message, 1) if batch_in(message) else ():
                if (code := getattr(each, "code", None)) is not None:
                    codes[code] = codes.get(code, 0) + 1
        return codes


def batch_in(message):
    return message[:3] == [b"", CX1, b"\x09"]


@pytest.fixture
def burst():
    """A broker process, and clients."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        process, endpoint = stack.enter_context(broker(*LIMITS, "--drain-timeout", "60"))
        clients = [Asking(context, endpoint, options={zmq.RCVHWM: 1, zmq.RCVBUF: 65536}) for _ in range(CLIENTS)]
        for client in clients:
            stack.callback(client.close)
        yield process, clients


def test_every_client_that_reads_is_told_that_its_requests_have_expired(burst):
    process, clients = burst
    for client in clients:
        client.ask(ttl=1000)
    for client in clients:
        assert client.ends() == {408: MANY}
        client.sync()
    assert process.end() == 0
    assert "does not read" not in process.stderr


def test_every_client_that_reads_is_told_when_the_broker_stops(burst):
    process, clients = burst
    for client in clients:
        client.ask()
    process.send_signal(15)
    for client in clients:
        assert client.ends() == {503: MANY}
    assert process.wait() == 0
    assert "does not read" not in process.stderr
