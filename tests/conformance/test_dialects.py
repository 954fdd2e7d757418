"""Every dialect over one real socket: bytes as the specifications write them, and any client with any worker."""

from collections.abc import Callable
from typing import Any

import pytest
import zmq
from support.peers import Bench, Client, OldClient, OldWorker, Worker, X1Client, X1Worker


def test_the_layouts_of_mdp_02(bench: Bench) -> None:
    # C1, C2, C3, C7, C8, C10, C11
    client, worker = bench.peer(), bench.peer()
    worker.send(b"MDPW02", b"\x01", b"echo")
    worker.sync()
    client.send(b"MDPC02", b"\x01", b"echo", b"hello", b"", b"3")
    message = worker.recv()
    address = message[2]
    assert message == [b"MDPW02", b"\x02", address, b"", b"hello", b"", b"3"]
    worker.send(b"MDPW02", b"\x05")
    worker.send(b"MDPW02", b"\x03", address, b"", b"half")
    worker.send(b"MDPW02", b"\x04", address, b"", b"world", b"")
    assert client.recv() == [b"MDPC02", b"\x02", b"echo", b"half"]
    assert client.recv() == [b"MDPC02", b"\x03", b"echo", b"world", b""]
    worker.send(b"MDPW02", b"\x06")
    worker.nothing()
    assert bench.status(b"echo") == b"404"


def test_the_layouts_of_mdp_01(bench: Bench) -> None:
    # C24
    client, worker = bench.peer(), bench.peer()
    worker.send(b"", b"MDPW01", b"\x01", b"echo")
    worker.sync()
    client.send(b"", b"MDPC01", b"echo", b"hello", b"", b"3")
    message = worker.recv()
    address = message[3]
    assert message == [b"", b"MDPW01", b"\x02", address, b"", b"hello", b"", b"3"]
    worker.send(b"", b"MDPW01", b"\x04")
    worker.send(b"", b"MDPW01", b"\x03", address, b"", b"world", b"")
    assert client.recv() == [b"", b"MDPC01", b"echo", b"world", b""]
    worker.send(b"", b"MDPW01", b"\x05")
    worker.nothing()
    assert bench.status(b"echo") == b"404"


def test_a_req_socket(bench: Bench) -> None:
    # C22: it puts an empty frame in front, and takes a reply only with it
    peer, worker = bench.peer(kind=zmq.REQ), bench.worker(b"echo")
    for number in (b"1", b"2"):
        peer.send(b"MDPC02", b"\x01", b"echo", number)
        worker.final(worker.work(number), b"reply " + number)
        assert peer.recv() == [b"MDPC02", b"\x03", b"echo", b"reply " + number]
    peer.send(b"MDPC01", b"mmi.service", b"echo")
    assert peer.recv() == [b"MDPC01", b"mmi.service", b"200"]


@pytest.mark.parametrize("client_kind", [OldClient, Client, X1Client])
@pytest.mark.parametrize("worker_kind", [OldWorker, Worker, X1Worker])
def test_any_client_reaches_any_worker(
    bench: Bench, client_kind: Callable[..., Any], worker_kind: Callable[..., Any]
) -> None:
    # C24, C26
    client, worker = bench.connect(client_kind), bench.connect(worker_kind)
    client.request(b"mmi.service", b"echo")
    client.final(b"mmi.service", b"404")
    worker.ready(b"echo")
    worker.sync()
    for number in range(3):
        client.request(b"echo", b"hello", b"%d" % number)
        address = worker.work(b"hello", b"%d" % number)
        parts = [] if worker_kind is OldWorker else [(b"1",), (b"2", b"", b"two")]
        for part in parts:
            worker.partial(address, *part)
            if client_kind is not OldClient:
                client.partial(b"echo", *part)
        worker.final(address, b"world", b"%d" % number)
        collected = [frame for part in parts for frame in part] if client_kind is OldClient else []
        client.final(b"echo", *collected, b"world", b"%d" % number)
    client.nothing()
    worker.nothing()


@pytest.mark.parametrize("worker_kind", [OldWorker, Worker, X1Worker])
def test_a_worker_that_repeats_every_message_misleads_none_of_twenty_callers(
    bench: Bench, worker_kind: Callable[..., Any]
) -> None:
    # C32, seen: 7 of 20 callers received somebody else's reply
    clients = [bench.client() for _ in range(20)]
    worker = bench.connect(worker_kind)
    worker.ready(b"echo")
    for number, client in enumerate(clients):
        client.request(b"echo", b"%d" % number)
        client.sync()
    for number in range(20):
        address = worker.work(b"%d" % number)
        for _ in range(2):
            worker.final(address, b"reply to %d" % number)
    worker.nothing()
    for number, client in enumerate(clients):
        client.final(b"echo", b"reply to %d" % number)
        client.nothing()
    assert bench.stats()["late"] == 20
