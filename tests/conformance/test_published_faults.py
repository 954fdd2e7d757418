"""What the published Majordomo brokers get wrong, each as a test: the last paragraph of CONFORMANCE.md."""

import random
from collections.abc import Callable

import pytest
from support.pace import BEAT, Pace, steadily
from support.peers import Bench, Worker

Start = Callable[..., Bench]


def serves(bench: Bench, worker: Worker | None = None) -> None:
    """The broker is there and does its work."""
    client = bench.client()
    worker = worker or bench.worker(b"check")
    client.request(b"check", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"check", b"world")


MALFORMED: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"MDPC02"],
    [b"MDPC01"],
    [b"MDPW02"],
    [b"MDPW01"],
    [b"", b"MDPC01", b"\x01"],
    [b"", b"MDPW01", b"\x03", b"", b"", b""],
    [b"MDPW02", b"\x04", b"amy", b"no delimiter"],
    [b"MDPW02", b"\x7f"],
    [b"HELLO", b"WORLD"],
]


@pytest.mark.parametrize("frames", MALFORMED)
def test_aborted_by_one_malformed_message(bench: Bench, frames: list[bytes]) -> None:
    # C15
    peer = bench.peer()
    peer.send(*frames)
    peer.nothing()
    serves(bench)


@pytest.mark.parametrize("old", [False, True], ids=["0.2", "0.1"])
def test_aborted_by_a_final_from_a_stranger(bench: Bench, old: bool) -> None:
    # C14
    stranger = bench.old_worker() if old else bench.worker()
    stranger.final(b"nobody", b"body")
    stranger.disconnected()
    serves(bench)


@pytest.mark.parametrize("old", [False, True], ids=["0.2", "0.1"])
def test_aborted_by_a_second_ready(bench: Bench, old: bool) -> None:
    # C14
    worker = bench.old_worker(b"echo") if old else bench.worker(b"echo")
    worker.ready(b"echo")
    worker.disconnected()
    serves(bench)


def test_dead_workers_kept_for_ever_and_still_handed_work(start: Start) -> None:
    # C13, C17: three die in silence, and what is asked afterwards goes to the one that comes then
    bench = start(heartbeat=0.05, liveness=10)
    client, dead = bench.client(), [bench.worker(b"echo") for _ in range(3)]
    bench.until(lambda: bench.stats()["workers"] == 0)
    client.request(b"echo", b"hello")
    client.sync()
    assert bench.status(b"echo") == b"404"
    worker = bench.worker(b"echo")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    for each in dead:
        each.nothing()


@pytest.mark.parametrize("live_at", [0, 1])
def test_the_purge_that_stops_at_the_first_live_worker(start: Start, live_at: int) -> None:
    # C13: wherever the live one stands among the idle
    bench = start(heartbeat=0.1, liveness=40)
    workers = [bench.worker(b"check") for _ in range(3)]
    live = workers.pop(live_at)

    def purged() -> bool:
        live.heartbeat()
        return bool(bench.stats()["workers"] == 1)

    bench.until(purged)
    assert bench.status(b"check") == b"200"
    assert bench.stats()["lost"] == {"silent": 2}
    serves(bench, live)
    for dead in workers:
        dead.nothing()


def test_mmi_service_200_for_a_service_nobody_serves(bench: Bench) -> None:
    # C26
    client, worker = bench.client(), bench.worker()
    worker.ready(b"left")
    worker.disconnect()
    worker.sync()
    client.request(b"asked for", b"hello")
    client.sync()
    bench.status(b"looked up")
    for service in (b"left", b"asked for", b"looked up", b"never heard of"):
        assert bench.status(service) == b"404"


def test_workers_that_may_register_mmi(bench: Bench) -> None:
    # C25
    client, intruder = bench.client(), bench.worker()
    intruder.ready(b"mmi.service")
    intruder.disconnected()
    client.request(b"mmi.service", b"mmi.service")
    client.final(b"mmi.service", b"404")
    intruder.nothing()


def test_substring_match_on_mmi(bench: Bench) -> None:
    # C25
    client, worker = bench.client(), bench.worker(b"amy.mmi.service")
    client.request(b"amy.mmi.service", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"amy.mmi.service", b"world")


def test_partial_labelled_with_another_requests_service(bench: Bench) -> None:
    # C3: two services answer one client in turns
    client, tea, coffee = bench.client(), bench.worker(b"tea"), bench.worker(b"coffee")
    client.request(b"tea", b"a pot")
    client.request(b"coffee", b"a cup")
    to_tea, to_coffee = tea.work(b"a pot"), coffee.work(b"a cup")
    for number in (b"1", b"2"):
        tea.partial(to_tea, b"tea " + number)
        client.partial(b"tea", b"tea " + number)
        coffee.partial(to_coffee, b"coffee " + number)
        client.partial(b"coffee", b"coffee " + number)
    tea.final(to_tea, b"tea")
    client.final(b"tea", b"tea")
    coffee.final(to_coffee, b"coffee")
    client.final(b"coffee", b"coffee")


def test_worker_put_back_under_the_wrong_service(bench: Bench) -> None:
    # C6, C21: a worker stays with its service, whatever its client asks for meanwhile
    client, tea, coffee = bench.client(), bench.worker(b"tea"), bench.worker(b"coffee")
    for _ in range(3):
        client.request(b"tea", b"a pot")
        client.request(b"coffee", b"a cup")
        to_tea, to_coffee = tea.work(b"a pot"), coffee.work(b"a cup")
        client.request(b"nobody", b"hello")
        client.sync()
        tea.final(to_tea, b"tea")
        client.final(b"tea", b"tea")
        coffee.final(to_coffee, b"coffee")
        client.final(b"coffee", b"coffee")
        tea.nothing()
        coffee.nothing()


def test_services_and_queues_that_grow_with_random_names(start: Start) -> None:
    # C12, C26
    bench = start(expiry=0.2, heartbeat=0.05, liveness=1000)
    chance = random.Random(26)
    peer = bench.client()
    for _ in range(500):
        name = b"%x" % chance.getrandbits(64)
        peer.request(b"mmi.service", name)
        peer.final(b"mmi.service", b"404")
    assert bench.stats()["services"] == 0
    for _ in range(500):
        peer.request(b"%x" % chance.getrandbits(64), b"anybody?")
        peer.request(b"mmi.%x" % chance.getrandbits(64), b"anybody?")
    bench.until(lambda: bench.stats()["dropped"] == {"expired": 500})
    worker = bench.worker()
    for _ in range(500):
        worker.ready(b"%x" % chance.getrandbits(64))
        worker.disconnect()
        worker.ready(b"%x" % chance.getrandbits(64))
        worker.ready(b"%x" % chance.getrandbits(64))
    worker.sync()
    stats = bench.stats()
    assert stats["services"] == stats["workers"] == stats["queued"] == stats["request_bytes"] == 0
    assert stats["disconnected"] == {"second-ready": 500}


def test_busy_workers_never_heartbeated(start: Start) -> None:
    # C13
    bench = start(heartbeat=0.05, liveness=1000)
    client, worker = bench.client(), bench.worker(b"slow")
    client.request(b"slow", b"work")
    address = worker.work(b"work")
    for _ in range(10):
        worker.beaten()
    worker.final(address, b"done")
    client.final(b"slow", b"done")


def test_a_worker_that_stays_silent_for_ever_after_a_disconnect(bench: Bench) -> None:
    # C9, the broker's part: a worker that comes again on a new socket is taken, and its old one harms nobody
    worker = bench.worker(b"check")
    worker.ready(b"check")
    worker.disconnected()
    again = bench.worker(b"check")
    serves(bench, again)
    worker.nothing()
    worker.close()
    serves(bench, again)


def test_heartbeat_settings_that_differ(start: Start) -> None:
    # C13: a worker that beats eight times more seldom than the broker is not sent away

    def play(liveness: int, pace: Pace) -> None:
        bench = start(heartbeat=BEAT, liveness=liveness)
        worker = bench.worker(b"check")
        bench.worker(b"silent")
        while bench.status(b"silent") == b"200":
            for _ in range(8):
                worker.beaten()
            pace()
            worker.heartbeat()
        worker.nothing()
        assert bench.stats()["lost"] == {"silent": 1}
        assert bench.stats()["disconnected"] == {}
        serves(bench, worker)

    steadily(play, 40)
