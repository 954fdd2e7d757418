"""Everything that can grow is bounded (C12), and what is refused harms nobody."""

from collections.abc import Callable

from support.peers import Bench

Start = Callable[..., Bench]


def test_c12_the_requests_waiting_for_a_service_are_bounded(start: Start) -> None:
    # C12
    bench = start(max_queue=3)
    amy, bob = bench.client(), bench.client()
    for number in range(5):
        amy.request(b"echo", b"amy %d" % number)
    amy.nothing()
    bob.request(b"echo", b"bob")
    bob.nothing()
    assert bench.stats()["queued"] == 3
    assert bench.stats()["dropped"] == {"queue-full": 3}
    bob.request(b"other", b"bob")  # another service has its own queue
    bob.sync()
    assert bench.stats()["queued"] == 4
    worker = bench.worker(b"echo")
    for number in range(3):
        worker.final(worker.work(b"amy %d" % number), b"done")
        amy.final(b"echo", b"done")
    worker.nothing()
    bob.request(b"echo", b"again")
    worker.final(worker.work(b"again"), b"done")
    bob.final(b"echo", b"done")


def test_c41_a_worker_displaces_a_service_that_only_has_requests(start: Start) -> None:
    # C41
    bench = start(max_services=3)
    client, worker = bench.client(), bench.worker(b"served")
    for number in range(10):
        client.request(b"nobody %d" % number, b"hello")
    client.nothing()
    assert bench.stats()["services"] == 3
    another = bench.worker(b"new")
    another.sync()
    assert bench.status(b"new") == b"200"
    assert bench.stats()["services"] == 3
    assert bench.stats()["dropped"] == {"too-many-services": 9}
    client.request(b"served", b"hello")
    worker.final(worker.work(b"hello"), b"done")
    client.final(b"served", b"done")


def test_c41_one_client_cannot_use_up_all_services(start: Start) -> None:
    # C41
    bench = start(max_services=10, max_unserved=3)
    greedy, other, worker = bench.client(), bench.client(), bench.worker()
    for number in range(10):
        greedy.request(b"nobody %d" % number, b"hello")
    greedy.nothing()
    assert bench.stats()["dropped"] == {"too-many-unserved-services": 7}
    other.request(b"late", b"hello")
    other.nothing()
    worker.ready(b"late")
    worker.final(worker.work(b"hello"), b"done")
    other.final(b"late", b"done")
