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


def test_c12_the_memory_of_waiting_requests_is_bounded(start: Start) -> None:
    # C12, C40: a connection may use half of it, and what is left for others is not used up by waiting requests
    bench = start(max_request_bytes=2_000_000)
    client, other, worker = bench.client(), bench.client(), bench.worker(b"served")
    for number in range(50):
        client.request(b"nobody %d" % (number % 5), b"x" * 50_000)
    client.nothing()
    assert bench.stats()["request_bytes"] < 1_060_000
    assert 15 <= bench.stats()["queued"] <= 20
    assert bench.stats()["dropped"] == {"memory-full": 50 - bench.stats()["queued"]}
    client.request(b"served", b"x" * 50_000)
    worker.nothing()
    other.request(b"served", b"x" * 50_000)
    worker.final(worker.work(b"x" * 50_000), b"done")
    other.final(b"served", b"done")


def test_c12_memory_is_freed_when_requests_are_done(start: Start) -> None:
    # C12
    bench = start(max_request_bytes=200_000)
    client, worker = bench.client(), bench.worker(b"echo")
    for _ in range(3):
        client.request(b"echo", b"first")
        address = worker.work(b"first")
        client.request(b"echo", b"x" * 80_000)
        client.sync()
        assert bench.stats()["queued"] == 1
        worker.final(address, b"done")
        worker.final(worker.work(b"x" * 80_000), b"done")
        client.final(b"echo", b"done")
        client.final(b"echo", b"done")
        assert bench.stats()["request_bytes"] == 0


def test_c12_the_number_of_services_is_bounded(start: Start) -> None:
    # C12
    bench = start(max_services=4)
    workers = [bench.worker(b"served %d" % number) for number in range(4)]
    client = bench.client()
    client.request(b"nobody", b"hello")
    client.nothing()
    assert bench.stats()["services"] == 4
    assert bench.stats()["dropped"] == {"too-many-services": 1}
    refused = bench.worker()
    refused.ready(b"one too many")
    refused.disconnected()
    another = bench.worker(b"served 0")  # another worker is not another service
    another.nothing()
    workers[1].disconnect()
    workers[1].sync()
    refused.ready(b"one too many")  # there is room now
    refused.nothing()
    assert bench.status(b"one too many") == b"200"


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


def test_c12_the_number_of_workers_is_bounded(start: Start) -> None:
    # C12
    bench = start(max_workers=3)
    workers = [bench.worker(b"echo") for _ in range(3)]
    refused = bench.worker()
    refused.ready(b"echo")
    refused.disconnected()
    assert bench.stats()["workers"] == 3
    workers[0].disconnect()
    workers[0].sync()
    refused.ready(b"echo")
    refused.nothing()
    assert bench.stats()["workers"] == 3
