"""Simple Pirate workers, whose REQ sockets have a port of their own, as in the Guide (`wire.pirate`)."""

import json
from collections.abc import Callable

import pytest
from support.peers import Bench
from support.pirates import lazy, simple

Start = Callable[..., Bench]
PORT = "tcp://127.0.0.1:*"
PORTS = {"pirates": [(PORT, b"echo")], "pirate_workers": [(PORT, b"echo")]}


@pytest.fixture
def queue(start: Start) -> Bench:
    """A broker in place of the Guide's `spqueue`: a port for clients, and one for workers."""
    return start(**PORTS)


@pytest.mark.parametrize("ready", [b"\x01", b"READY"])
def test_the_worker_of_the_guide_returns_what_it_gets(queue: Bench, ready: bytes) -> None:
    client, worker = lazy(queue), simple(queue, ready)
    for sequence in (b"1", b"2", b"3"):
        client.call(sequence)
        worker.send(*worker.recv())
        client.answered(sequence)


def test_the_frames_of_a_worker(queue: Bench) -> None:
    """On a DEALER, so that every frame is seen."""
    client, worker = queue.x1_client(), queue.peer(endpoint=queue.server.pirate_worker_endpoints[0])
    worker.send(b"", b"\x01")
    client.request(b"echo", b"hello", b"", b"frames")
    empty, address, *rest = worker.recv()
    assert (empty, rest) == (b"", [b"", b"hello", b"", b"frames"])
    worker.send(b"", address, b"", b"world", b"back")
    client.final(b"echo", b"world", b"back")
    (row,) = json.loads(queue.mmi(b"mmi.workers", b"echo"))["workers"]
    assert (row["protocol"], row["done"]) == ("Simple Pirate", 1)
