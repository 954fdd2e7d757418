"""Who waits and who is next: queues and expiry (C12), fair turns (C20), workers least recently used first (C21)."""

import time
from collections.abc import Callable

from support.peers import Bench

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


def test_c12_requests_of_a_client_keep_their_order(bench: Bench) -> None:
    # C12
    client = bench.client()
    for number in range(20):
        client.request(b"late", b"%d" % number)
    client.sync()
    worker = bench.worker(b"late")
    for number in range(20):
        worker.final(worker.work(b"%d" % number), b"reply %d" % number)
        client.final(b"late", b"reply %d" % number)


def test_c12_a_worker_of_another_service_does_not_get_it(bench: Bench) -> None:
    # C12
    client, other = bench.client(), bench.worker(b"other")
    client.request(b"late", b"hello")
    client.nothing()
    other.nothing()


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


def test_c12_only_waiting_requests_expire(start: Start) -> None:
    # C12: a slow worker may take longer than a request may wait
    bench = start(expiry=0.1)
    client, worker = bench.client(), bench.worker(b"slow")
    client.request(b"slow", b"1")
    address = worker.work(b"1")
    client.request(b"slow", b"2")
    client.sync()
    bench.until(lambda: bench.stats()["dropped"] == {"expired": 1})
    worker.partial(address, b"half")
    worker.final(address, b"done")
    client.partial(b"slow", b"half")
    client.final(b"slow", b"done")
    worker.nothing()
    client.nothing()


def test_c12_a_requeued_request_expires_too(start: Start) -> None:
    # C12, C17
    bench = start(expiry=0.1)
    client, worker = bench.client(), bench.worker(b"slow")
    client.request(b"slow", b"1")
    worker.work(b"1")
    worker.disconnect()
    bench.until(lambda: bench.stats()["dropped"] == {"expired": 1})
    bench.worker(b"slow").nothing()
    client.nothing()


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


def test_c20_ten_thousand_requests_of_one_do_not_delay_another(bench: Bench) -> None:
    # C20
    greedy, modest = bench.client(), bench.client()
    for number in range(10_000):
        greedy.request(b"echo", b"greedy %d" % number)
    greedy.sync()
    modest.request(b"echo", b"modest")
    modest.sync()
    assert bench.stats()["queued"] == 10_001
    worker = bench.worker(b"echo")
    worker.final(worker.work(b"greedy 0"), b"")
    worker.final(worker.work(b"modest"), b"at once")
    modest.final(b"echo", b"at once")
    for number in range(1, 4):
        worker.final(worker.work(b"greedy %d" % number), b"")


def test_c20_a_greedy_client_does_not_delay_a_synchronous_one(bench: Bench) -> None:
    # C20: each request waits for the one being worked on and for one turn of every other client, no more
    greedy, modest, worker = bench.client(), bench.client(), bench.worker(b"echo")
    for number in range(50):
        greedy.request(b"echo", b"greedy %d" % number)
    greedy.sync()
    for number in range(10):
        modest.request(b"echo", b"modest %d" % number)
        modest.sync()
        others = 0
        while not (message := worker.command())[-1].startswith(b"modest"):
            others += 1
            worker.final(message[2], b"done")
        assert others <= 2
        worker.final(message[2], b"done")
        modest.final(b"echo", b"done")


def test_c20_clients_take_turns_in_each_service_separately(bench: Bench) -> None:
    # C20
    amy, bob = bench.client(), bench.client()
    for service in (b"tea", b"coffee"):
        for number in (b"1", b"2"):
            amy.request(service, b"amy " + number)
        amy.sync()
        bob.request(service, b"bob")
        bob.sync()
    for service in (b"tea", b"coffee"):
        worker = bench.worker(service)
        for turn in (b"amy 1", b"bob", b"amy 2"):
            worker.final(worker.work(turn), b"")


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


def test_c21_a_heartbeat_does_not_change_the_order(bench: Bench) -> None:
    # C21
    client = bench.client()
    first, second = bench.worker(b"echo"), bench.worker(b"echo")
    first.heartbeat()
    first.sync()
    client.request(b"echo", b"")
    first.work(b"")
    second.nothing()


def test_c21_all_workers_share_the_work(bench: Bench) -> None:
    # C21
    client = bench.client()
    workers = [bench.worker(b"echo") for _ in range(5)]
    for _ in range(4):
        for worker in workers:
            client.request(b"echo", b"")
            worker.final(worker.work(b""), b"")
            client.final(b"echo", b"")
