"""One ROUTER socket (C11), whatever it is reached by."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.peers import Bench

Start = Callable[..., Bench]


@pytest.fixture
def binds(tmp_path: Path) -> list[str]:
    return ["tcp://127.0.0.1:*", f"ipc://{tmp_path}/b", "inproc://broker", "tcp://127.0.0.1:*"]


@pytest.mark.parametrize("at", [0, 1, 2], ids=["tcp", "ipc", "inproc"])
def test_c11_each_transport(start: Start, binds: list[str], at: int) -> None:
    # C11
    bench = start(binds[at])
    assert len(bench.server.endpoints) == 1
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.partial(address, b"half")
    worker.final(address, b"world")
    client.partial(b"echo", b"half")
    client.final(b"echo", b"world")
    worker.final(b"7", b"again")
    worker.disconnected()


def test_c11_several_binds_at_once_are_one_broker(start: Start, binds: list[str]) -> None:
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
def test_c13_a_worker_killed_is_noticed_on_each_transport(start: Start, binds: list[str], at: int) -> None:
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
