"""One ROUTER socket (C11), whatever it is reached by; connections that end, and those that the socket itself ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.peers import Bench, Client, OldClient, X1Client
from support.processes import TIMEOUT_MS

Start = Callable[..., Bench]


@pytest.fixture
def binds(tmp_path: Path) -> list[str]:
    return ["tcp://127.0.0.1:*", f"ipc://{tmp_path}/b", "inproc://broker", "tcp://127.0.0.1:*"]


def test_several_binds_at_once_are_one_broker(start: Start, binds: list[str]) -> None:
    # C11
    bench = start(*binds)
    endpoints = bench.server.endpoints
    assert len(set(endpoints)) == 4
    for served in endpoints:
        worker = bench.worker(b"echo", endpoint=served)
        for asked in endpoints:
            client = bench.client(endpoint=asked)
            client.request(b"echo", b"hello")
            worker.final(worker.work(b"hello"), b"world")
            client.final(b"echo", b"world")
        worker.disconnect()
        worker.nothing()


@pytest.mark.parametrize("at", [0, 1, 2], ids=["tcp", "ipc", "inproc"])
def test_a_worker_killed_is_noticed_on_each_transport(start: Start, binds: list[str], at: int) -> None:
    # C13, C17: at once, but between threads, where nothing is noticed until something is sent
    bench = start(binds[at], **({"heartbeat": 0.05, "liveness": 1000} if at == 2 else {}))
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    worker.work(b"hello")
    worker.close()
    bench.until(lambda: bench.status(b"echo") == b"404")
    other = bench.worker(b"echo")
    other.final(other.work(b"hello"), b"world")
    client.final(b"echo", b"world")


@pytest.mark.parametrize("kind", [OldClient, Client, X1Client])
def test_a_client_that_is_gone_takes_back_what_it_asked_for(bench: Bench, kind: Callable[..., Any]) -> None:
    # C12: nothing happens by the clock here, and 0.1 and 0.2 have no HEARTBEAT that could prove that a client is gone
    client, worker = bench.connect(kind), bench.x1_worker(b"slow")
    for body in (b"1", b"2"):
        client.request(b"slow", body)
    client.request(b"nobody", b"3")
    address = worker.work(b"1")
    client.sync()
    client.close()
    bench.until(lambda: bool(bench.stats()["dropped"] == {"client-gone": 3}))
    worker.cancelled(address)
    assert (bench.stats()["queued"], bench.stats()["running"]) == (0, 1)  # until the worker ends it
    worker.error(address, b"499", b"stopped")
    worker.nothing()
    assert bench.stats()["running"] == 0


def test_a_message_of_far_too_many_frames_ends_its_connection(start: Start) -> None:
    # C15: it is counted like any other, and nobody else is affected
    bench = start(max_frames=20)
    client, worker, other = bench.client(), bench.worker(b"echo"), bench.client()
    client.send(*[b"x"] * (16 * 20))
    client.nothing()
    assert bench.stats()["invalid"] == {"too-many-frames": 1}
    with client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        client.send(*[b"x"] * 50_000)
        ended = monitor.poll(TIMEOUT_MS)
        client.socket.disable_monitor()
    assert ended
    bench.until(lambda: bench.stats()["invalid"] == {"too-many-frames": 2})
    other.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    other.final(b"echo", b"world")


def test_a_far_too_large_frame_disconnects_only_its_sender(start: Start) -> None:
    # C15: libzmq cuts its sender off before it is all in memory
    bench = start(max_message=100_000, heartbeat=0.05, liveness=1000)
    glutton, client, worker = bench.client(), bench.client(), bench.worker(b"echo")
    glutton.request(b"echo", b"x" * 20_000_000)
    client.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    worker.nothing()


def test_a_draining_broker_finishes_what_it_took(start: Start) -> None:
    # C9, C47
    bench = start(drain_timeout=60.0)
    client, worker, idle = bench.x1_client(), bench.x1_worker(b"slow"), bench.x1_worker(b"idle")
    client.request(b"slow", b"running")
    address = worker.work(b"running")
    client.sync()
    bench.server.stop()
    bench.until(lambda: json.loads(bench.mmi(b"mmi.broker", b""))["draining"])
    assert client.recv() == [*client.head, b"\x07", b"0"]  # DISCONNECT
    idle.disconnected()
    client.request(b"idle", b"too late")
    client.error(b"503")
    assert client.reason == b"draining"
    worker.final(address, b"done")
    client.final(b"slow", b"done", number=1)
    worker.disconnected()
