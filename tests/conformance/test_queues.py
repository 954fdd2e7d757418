"""Queues: expiry (C12), turns among clients (C20), and the choice of a worker (C21)."""

import time
from collections.abc import Callable

from support.peers import Bench, X1Worker

Start = Callable[..., Bench]


def test_c12_a_request_waits_for_a_worker(bench: Bench) -> None:
    # C12
    client = bench.client()
    client.request(b"late", b"hello")
    client.nothing()
    assert bench.stats()["queued"] == 1
    worker = bench.worker(b"late")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"late", b"world")


def test_c12_a_request_expires(start: Start) -> None:
    # C12
    bench = start(expiry=0.3)
    client = bench.client()
    began = time.monotonic()
    client.request(b"late", b"hello")
    client.sync()
    bench.until(lambda: bench.stats()["dropped"] == {"expired": 1})
    assert time.monotonic() - began > 0.25  # not before its time
    assert bench.stats()["queued"] == bench.stats()["services"] == 0
    worker = bench.worker(b"late")
    worker.nothing()
    client.nothing()
    client.request(b"late", b"again")
    worker.final(worker.work(b"again"), b"world")
    client.final(b"late", b"world")


def test_c20_clients_take_turns(bench: Bench) -> None:
    # C20
    amy, bob, cat = bench.client(), bench.client(), bench.client()
    for client, name, requests in ((amy, b"amy", 4), (bob, b"bob", 3), (cat, b"cat", 1)):
        for number in range(1, requests + 1):
            client.request(b"echo", b"%s %d" % (name, number))
        client.sync()
    worker = bench.worker(b"echo")
    turns = [b"amy 1", b"bob 1", b"cat 1", b"amy 2", b"bob 2", b"amy 3", b"bob 3", b"amy 4"]
    for turn in turns:
        worker.final(worker.work(turn), b"reply to " + turn)
    for client, name in ((amy, b"amy"), (bob, b"bob"), (cat, b"cat")):
        for turn in turns:
            if turn.startswith(name):
                client.final(b"echo", b"reply to " + turn)


def test_c21_the_worker_that_was_idle_longest_is_next(bench: Bench) -> None:
    # C21
    client = bench.client()
    first, second, third = (bench.worker(b"echo") for _ in range(3))

    def ask() -> None:
        client.request(b"echo", b"")
        client.sync()

    for _ in range(3):
        ask()
    addresses = {worker: worker.work(b"") for worker in (first, second, third)}
    for worker in (third, first, second):  # the order in which they become idle
        worker.final(addresses[worker], b"")
        worker.sync()
    for worker in (third, first, second):
        ask()
        worker.final(worker.work(b""), b"")
        worker.sync()
    ask()
    third.work(b"")
    first.nothing()
    second.nothing()


def test_c21_a_warm_worker_is_next_and_one_that_has_failed_is_not(bench: Bench) -> None:
    # C21
    client = bench.x1_client()
    first, second = bench.x1_worker(b"echo"), bench.x1_worker(b"echo")

    def ask(worker: X1Worker) -> bytes:
        client.request(b"echo", b"")
        return worker.work(b"")

    for _ in range(3):
        first.final(ask(first), b"")
        client.final(b"echo", b"")
    first.error(ask(first), b"500", b"no")
    client.error(b"500")
    for _ in range(3):
        second.final(ask(second), b"")
        client.final(b"echo", b"")
