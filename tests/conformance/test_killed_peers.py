"""Processes that are killed (C17): noticed at once, all that they held goes to others, and only what kills is blamed.

Nothing happens by the clock here: no heartbeat is sent, and nobody dies of silence.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.peers import Bench

Start = Callable[..., Bench]


CLIENT = """
import sys, zmq
from support.peers import X1Client

client = X1Client(zmq.Context(), sys.argv[1])
for _ in range(5):
    client.request(b"echo", b"of the dead")
client.recv(timeout=3600)
"""

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process with a program, which is killed at the end of the test."""
    running: list[subprocess.Popen[bytes]] = []

    def run(program: str, *arguments: object) -> "subprocess.Popen[bytes]":
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        running.append(subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=path))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.wait()


def test_a_client_that_is_killed(bench: Bench, spawn: Spawn) -> None:
    # C12: its requests are dropped, queued or held
    process = spawn(CLIENT, bench.endpoint)
    bench.until(lambda: bool(bench.stats()["queued"] == 5))
    worker = bench.x1_worker(b"echo", credit=2)
    addresses = [worker.work(b"of the dead") for _ in range(2)]
    worker.credit(0)
    worker.sync()
    os.kill(process.pid, signal.SIGKILL)
    bench.until(lambda: bool(bench.stats()["dropped"] == {"client-gone": 5}))
    assert bench.stats()["queued"] == 0
    for address in addresses:
        worker.cancelled(address)
        worker.final(address, b"for nobody")
    worker.credit(9)
    worker.nothing()
    assert bench.stats()["running"] == 0


@pytest.mark.parametrize("dialect", ["0.1", "0.2"])
def test_a_client_that_can_be_sent_nothing(start: Start, dialect: str) -> None:
    # 0.1 and 0.2 have no HEARTBEAT for clients, so nothing proves that one is gone but the end of its connection.
    bench = start(expiry=1000)
    client = bench.client() if dialect == "0.2" else bench.old_client()
    client.request(b"nobody", b"of the dead")
    bench.until(lambda: bool(bench.stats()["queued"] == 1))
    client.close()
    bench.until(lambda: bool(bench.stats()["queued"] == 0))
    assert bench.stats()["dropped"] == {"client-gone": 1}
