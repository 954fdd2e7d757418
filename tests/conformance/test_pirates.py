"""Pirate endpoints: Lazy Pirate clients and Paranoid Pirate workers, which send no header (`wire.pirate`)."""

from collections.abc import Callable
from typing import Any

import pytest
from support.peers import Bench, Client, OldClient, OldWorker, Worker, X1Client, X1Worker
from support.pirates import lazy, paranoid
from support.zmtp import RawPeer

Start = Callable[..., Bench]
PORT = "tcp://127.0.0.1:*"
ECHO = [(PORT, b"echo")]
CLIENTS = [Client, OldClient, X1Client]
WORKERS = [Worker, OldWorker, X1Worker]


@pytest.fixture
def pirates(start: Start) -> Bench:
    """A broker with a pirate endpoint for echo."""
    return start(pirates=ECHO)


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_frames_of_a_client_and_a_worker(pirates: Bench) -> None:
    """Both on DEALERs, so that every frame is seen."""
    endpoint = pirates.server.pirate_endpoints[0]
    client, worker = pirates.peer(endpoint=endpoint), pirates.peer(endpoint=endpoint)
    worker.send(b"\x01")
    client.send(b"", b"hello", b"", b"frames")
    address, *rest = worker.recv()
    assert rest == [b"", b"hello", b"", b"frames"]
    assert address.decode().isprintable()
    worker.send(b"\x02")
    worker.send(address, b"", b"world", b"", b"back")
    assert client.recv() == [b"", b"world", b"", b"back"]


def test_the_worker_of_the_guide_returns_what_it_gets(pirates: Bench) -> None:
    """It takes requests of one frame, and sends the three frames back."""
    client, worker = lazy(pirates), paranoid(pirates)
    for sequence in (b"1", b"2", b"3"):
        client.call(sequence)
        message = worker.recv()
        assert len(message) == 3
        worker.send(*message)
        client.answered(sequence)


# ── any client reaches any worker ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", WORKERS)
def test_a_pirate_client_reaches_workers_of_every_dialect(pirates: Bench, kind: Callable[..., Any]) -> None:
    # C24
    client, worker = lazy(pirates), pirates.connect(kind)
    worker.ready(b"echo")
    worker.sync()
    for number in range(3):
        client.call(b"hello", b"%d" % number)
        worker.final(worker.work(b"hello", b"%d" % number), b"world", b"%d" % number)
        client.answered(b"world", b"%d" % number)


@pytest.mark.parametrize("kind", CLIENTS)
def test_clients_of_every_dialect_reach_a_pirate_worker(pirates: Bench, kind: Callable[..., Any]) -> None:
    # C24
    client, worker = pirates.connect(kind), paranoid(pirates)
    for number in range(3):
        client.request(b"echo", b"hello", b"%d" % number)
        worker.final(worker.work(b"hello", b"%d" % number), b"world", b"%d" % number)
        client.final(b"echo", b"world", b"%d" % number)
    client.nothing()


def test_each_endpoint_has_its_own_service(start: Start) -> None:
    bench = start(pirates=[(PORT, b"one"), ("ipc://*", b"two"), (PORT, b"one")])
    one, two = paranoid(bench, 0), paranoid(bench, 1)
    for number, worker in [(0, one), (1, two), (2, one)]:
        client = lazy(bench, number)
        client.call(b"%d" % number)
        worker.final(worker.work(b"%d" % number), b"done")
        client.answered(b"done")


# ── bad input and limits ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_routing_id_at_several_sockets_is_several_peers(start: Start) -> None:  # C39
    bench = start(pirates=[*ECHO, *ECHO])
    endpoints = [bench.endpoint, *bench.server.pirate_endpoints]
    with (
        RawPeer(endpoints[0], b"me") as old,
        RawPeer(endpoints[1], b"me") as one,
        RawPeer(endpoints[2], b"me") as two,
    ):
        worker = bench.worker(b"echo")
        old.send(b"MDPC02", b"\x01", b"echo", b"old")
        worker.final(worker.work(b"old"), b"for old")
        assert old.recv() == [b"MDPC02", b"\x03", b"echo", b"for old"]
        one.send(b"", b"one")
        address = worker.work(b"one")
        two.send(b"", b"two")
        old.send(b"MDPC02", b"\x01", b"echo", b"old")
        bench.until(lambda: bench.stats()["queued"] == 2)
        worker.final(address, b"for one")
        for _ in range(2):
            message = worker.command()
            worker.final(message[2], b"for " + message[4])
        assert one.recv() == [b"", b"for one"]
        assert two.recv() == [b"", b"for two"]
        assert old.recv() == [b"MDPC02", b"\x03", b"echo", b"for old"]
