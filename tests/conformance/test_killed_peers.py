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

WORKER = """
import os, signal, sys, zmq
from support.peers import OldWorker, Worker, X1Worker

endpoint, dialect, credit, dies_when_it_holds = sys.argv[1:]
worker = {"0.1": OldWorker, "0.2": Worker, "X1": X1Worker}[dialect](zmq.Context(), endpoint)
worker.ready(b"echo", **({"credit": int(credit)} if dialect == "X1" else {}))
at, held = len(worker.head), 0
while True:
    message = worker.command(timeout=3600)
    if message[at] != worker.REQUEST:
        continue
    held += 1
    if message[-1] == b"poison" or held == int(dies_when_it_holds):
        os.kill(os.getpid(), signal.SIGKILL)
    if int(dies_when_it_holds) == 0:
        worker.final(message[at + 1], b"done")
"""
"""A worker of a single thread.  It answers everything at once, or nothing, if it is to die when it holds so many."""

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


def registered(bench: Bench, count: int) -> None:
    bench.until(lambda: bool(bench.stats()["workers"] == count))


@pytest.mark.parametrize("dialect", ["0.1", "0.2", "X1"])
def test_an_idle_worker_that_is_killed_is_noticed(bench: Bench, spawn: Spawn, dialect: str) -> None:
    # C13, C26
    process = spawn(WORKER, bench.endpoint, dialect, 5, 0)
    registered(bench, 1)
    assert bench.status(b"echo") == b"200"
    process.send_signal(signal.SIGKILL)
    bench.until(lambda: bench.status(b"echo") == b"404")
    assert bench.stats()["lost"] == {"unreachable": 1}


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
