"""Signs of life (C13)."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from support.pace import BEAT, Pace, steadily
from support.peers import Bench, OldWorker, Worker, X1Worker

Start = Callable[..., Bench]


def test_c13_an_idle_worker_gets_heartbeats(start: Start) -> None:
    # C13
    bench = start(heartbeat=0.05, liveness=1000)
    worker = bench.worker(b"echo")
    for _ in range(5):
        assert worker.recv() == [b"MDPW02", b"\x05"]


def test_c13_a_client_gets_no_heartbeats(start: Start) -> None:
    # C13: heartbeats are of the worker's protocol only
    bench = start(heartbeat=0.02, liveness=1000)
    client, worker = bench.client(), bench.worker(b"slow")
    client.request(b"slow", b"work")
    worker.work(b"work")
    for _ in range(5):
        worker.beaten()
    client.silent()


def test_c13_no_heartbeat_within_an_interval_of_another_command(start: Start) -> None:
    # C13
    interval = 0.3
    bench = start(heartbeat=interval, liveness=1000)
    client, worker = bench.client(), bench.worker(b"echo")
    began = asked = time.monotonic()
    rounds = 0
    while time.monotonic() - began < 5 * interval or rounds <= 5:
        asked_before, asked = asked, time.monotonic()
        client.request(b"echo", b"")
        while (message := worker.recv()) == [b"MDPW02", b"\x05"]:
            # Only if this process was held up so long that a HEARTBEAT was due: it had been sent nothing since then.
            assert time.monotonic() - asked_before > interval / 2
        worker.final(message[2], b"")
        client.final(b"echo", b"")
        rounds += 1


def dies(bench: Bench, service: bytes) -> None:
    bench.until(lambda: bench.status(service) == b"404")


def test_c13_a_silent_idle_worker_is_gone(start: Start) -> None:
    # C13
    bench = start(heartbeat=0.05, liveness=4)
    worker = bench.worker()
    began = time.monotonic()
    worker.ready(b"echo")
    worker.sync()
    dies(bench, b"echo")
    assert time.monotonic() - began > 0.9 * 4 * 0.05
    assert bench.stats()["lost"] == {"silent": 1}
    client = bench.client()
    client.request(b"echo", b"anybody?")
    client.nothing()
    worker.nothing()


@pytest.mark.parametrize("kind", [OldWorker, Worker, X1Worker])
def test_c13_a_silent_busy_worker_is_gone(start: Start, kind: Callable[..., Any]) -> None:
    # C13, C34: busy is no excuse for ever
    bench = start(heartbeat=0.05, liveness=4, busy_grace=0.3)
    client, worker = bench.client(), bench.connect(kind)
    client.request(b"slow", b"work")
    client.sync()
    began = time.monotonic()
    worker.ready(b"slow")
    worker.work(b"work")
    dies(bench, b"slow")
    assert time.monotonic() - began > (0.25 if kind in {OldWorker, Worker} else 0.15)
    assert bench.stats()["lost"] == {"silent": 1}
    assert bench.stats()["queued"] == 1


@pytest.mark.parametrize("kind", [OldWorker, Worker])
def test_c34_a_busy_worker_without_heartbeats_has_its_grace(start: Start, kind: Callable[..., Any]) -> None:
    # C34: most third-party workers have one thread, which does not heartbeat while it works
    bench = start(heartbeat=0.05, liveness=4)
    client, worker = bench.client(), bench.connect(kind)
    client.request(b"slow", b"work")
    client.sync()
    worker.ready(b"slow")
    address = worker.work(b"work")
    for _ in range(3):  # more than three times the liveness passes
        bench.worker(b"silent")
        dies(bench, b"silent")
    assert bench.status(b"slow") == b"200"
    worker.final(address, b"done")
    client.final(b"slow", b"done")
    dies(bench, b"slow")  # idle, it has no grace
    assert bench.stats()["lost"] == {"silent": 4}


def test_c34_x1_workers_are_held_to_the_liveness(start: Start) -> None:
    # C34
    bench = start(heartbeat=0.05, liveness=20)
    client, worker, other = bench.client(), bench.x1_worker(), bench.worker()
    client.request(b"busy", b"work")
    client.request(b"slow", b"work")
    client.sync()
    other.ready(b"busy")
    other.work(b"work")  # has its grace
    worker.ready(b"slow")
    worker.work(b"work")
    dies(bench, b"slow")
    assert bench.status(b"busy") == b"200"
    assert bench.stats()["lost"] == {"silent": 1}


def lives_by(bench: Bench, worker: Worker, sign: Callable[[], None], pace: Pace) -> int:
    """Give `sign` for each HEARTBEAT until a worker that registered later and says nothing is dead; how often it was.

    `worker` has registered before, so it is dead as well unless the signs count.
    """
    bench.worker(b"silent")
    signs = 0
    while bench.status(b"silent") == b"200":
        worker.beaten()
        pace()
        sign()
        signs += 1
    worker.nothing()
    assert bench.stats()["lost"] == {"silent": 1}
    return signs


def test_c13_final_is_a_sign_of_life(start: Start) -> None:
    # C13

    def play(liveness: int, pace: Pace) -> None:
        bench = start(heartbeat=BEAT, liveness=liveness)
        client, worker = bench.client(), bench.worker(b"echo")

        def serve() -> None:
            client.request(b"echo", b"")
            worker.final(worker.work(b""), b"")
            client.final(b"echo", b"")

        lives_by(bench, worker, serve, pace)
        assert bench.status(b"echo") == b"200"

    steadily(play, 24)


def test_c13_a_worker_declared_dead_gets_disconnect_and_may_register_again(start: Start) -> None:
    # C13, C14
    bench = start(heartbeat=0.05, liveness=4)
    worker = bench.worker(b"echo")
    dies(bench, b"echo")
    worker.heartbeat()
    worker.disconnected()
    worker.ready(b"echo")
    worker.nothing()
    assert bench.stats()["lost"]["silent"] >= 1
    assert bench.stats()["disconnected"] == {"not-registered": 1}


def test_c13_an_old_worker_lives_by_its_own_heartbeats(start: Start) -> None:
    # C13, C24

    def play(liveness: int, pace: Pace) -> None:
        bench = start(heartbeat=BEAT, liveness=liveness)
        worker = bench.old_worker(b"echo")
        lives_by(bench, worker, lambda: worker.send(b"", b"MDPW01", b"\x04"), pace)
        assert bench.status(b"echo") == b"200"

    steadily(play, 24)
