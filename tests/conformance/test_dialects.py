"""Every dialect over real sockets: bytes as the specifications write them, and any client with any worker."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from support.peers import Bench, Client, OldClient, OldWorker, Worker, X1Client, X1Worker
from support.processes import TIMEOUT_SECONDS
from support.router import Router

from zmdp.clients import Client as ZmdpClient
from zmdp.workers import Request
from zmdp.workers import Worker as ZmdpWorker


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


# ── our own client and worker, and a broker by hand ──────────────────────────────────────────────────────────────────


def test_our_client_sends_and_takes_the_frames_of_mdp_02(router: Router, pool: ThreadPoolExecutor) -> None:
    # C1, C2, C3, C4: and ignores whatever else arrives
    with ZmdpClient(router.endpoint, timeout=TIMEOUT_SECONDS, protocol="0.2") as client:
        parts = client.stream("count", b"one", b"two")
        first = pool.submit(next, parts)
        sender, *frames = router.recv()
        assert frames == [b"MDPC02", b"\x01", b"count", b"one", b"two"]
        for noise in ([b"MDPC02"], [b"MDPC02", b"\x03", b"other", b"x"], [b"MDPC01", b"count", b"x"], [b"", b""]):
            router.send(sender, *noise)
        router.send(sender, b"MDPC02", b"\x02", b"count", b"1")
        assert (list(first.result()), first.result().final) == ([b"1"], False)
        router.send(sender, b"MDPC02", b"\x03", b"count", b"end", b"")
        assert [(list(part), part.final) for part in parts] == [([b"end", b""], True)]


def test_our_client_sends_and_takes_the_frames_of_mdp_01(router: Router, pool: ThreadPoolExecutor) -> None:
    # C24
    with ZmdpClient(router.endpoint, timeout=TIMEOUT_SECONDS, protocol="0.1") as client:
        reply = pool.submit(client.request, "echo", b"x")
        sender, *frames = router.recv()
        assert frames == [b"", b"MDPC01", b"echo", b"x"]
        router.send(sender, b"", b"MDPC01", b"echo", b"done")
        assert reply.result() == [b"done"]


def test_our_worker_sends_and_takes_the_frames_of_mdp_02(router: Router) -> None:
    # C6, C7, C8, C9, C10, C13
    def counting(request: Request) -> Iterator[bytes]:
        yield b"1"
        yield b"2"
        return list(request)  # type: ignore[return-value]

    with ZmdpWorker("count", counting, broker=router.endpoint, protocol="0.2", heartbeat=0.05, liveness=1000):
        sender, *frames = router.recv()
        assert frames == [b"MDPW02", b"\x01", b"count"]
        assert [router.recv() for _ in range(3)] == [[sender, b"MDPW02", b"\x05"]] * 3
        router.send(sender, b"MDPW02", b"\x02", b"\x00client", b"", b"a", b"b")
        head = [sender, b"MDPW02"]
        assert router.command() == [*head, b"\x03", b"\x00client", b"", b"1"]
        assert router.command() == [*head, b"\x03", b"\x00client", b"", b"2"]
        assert router.command() == [*head, b"\x04", b"\x00client", b"", b"a", b"b"]
        router.send(sender, b"MDPW02", b"\x06")
        again, *frames = router.command()
        assert (again != sender, frames) == (True, [b"MDPW02", b"\x01", b"count"])
    assert router.command() == [again, b"MDPW02", b"\x06"]
