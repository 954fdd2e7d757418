"""What becomes of a request when its worker dies (C17) and of what the dead still say (C18)."""

from collections.abc import Callable

import pytest
from support.peers import Bench, Worker

Start = Callable[..., Bench]


def silence(bench: Bench, worker: Worker) -> None:
    """It stops talking, and is still connected."""
    bench.until(lambda: bench.stats()["lost"].get("silent", 0) == 1)


def disconnect(bench: Bench, worker: Worker) -> None:
    worker.disconnect()
    worker.sync()


def second_ready(bench: Bench, worker: Worker) -> None:
    worker.ready(b"echo")
    worker.disconnected()


def ready_for_another_service(bench: Bench, worker: Worker) -> None:
    worker.ready(b"other")
    worker.disconnected()


def kill(bench: Bench, worker: Worker) -> None:
    """Its connection ends without a word; the broker notices at once."""
    before = bench.stats()["workers"]
    worker.close()
    bench.until(lambda: bench.stats()["workers"] == before - 1)


DEATHS = [silence, disconnect, second_ready, ready_for_another_service, kill]
Death = Callable[[Bench, Worker], None]


def settings(death: Death) -> dict[str, float]:
    """Where a worker dies of silence there is no way but to wait; all others have nothing to do with the time."""
    return {"heartbeat": 0.1, "liveness": 40, "busy_grace": 4.0} if death is silence else {}


@pytest.mark.parametrize("death", DEATHS)
def test_c17_the_request_goes_to_another_worker(start: Start, death: Death) -> None:
    # C17
    bench = start(**settings(death))
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello", b"", b"frames")
    worker.work(b"hello", b"", b"frames")
    death(bench, worker)
    other = bench.worker(b"echo")
    other.final(other.work(b"hello", b"", b"frames"), b"world")
    client.final(b"echo", b"world")
    client.nothing()


@pytest.mark.parametrize("death", DEATHS)
def test_c17_the_request_goes_to_an_idle_worker_immediately(start: Start, death: Death) -> None:
    # C17, C21
    bench = start(**settings(death))
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    worker.work(b"hello")
    if death is silence:
        # The other one has to live: it answers each HEARTBEAT, as workers do.
        other = bench.worker(b"echo")
        while (message := other.recv()) == [b"MDPW02", b"\x05"]:
            other.heartbeat()
        assert message[4:] == [b"hello"]
        other.final(message[2], b"world")
    else:
        other = bench.worker(b"echo")
        death(bench, worker)
        other.final(other.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    client.nothing()


@pytest.mark.parametrize("death", DEATHS)
def test_c17_the_request_goes_to_the_front_of_the_queue(start: Start, death: Death) -> None:
    # C17: before the other requests of its client, and before those of others, whoever's turn it is
    bench = start(**settings(death))
    amy, bob = bench.client(), bench.client()
    worker = bench.worker(b"echo")
    amy.request(b"echo", b"amy 1")
    worker.work(b"amy 1")
    bob.request(b"echo", b"bob 1")
    bob.request(b"echo", b"bob 2")
    bob.sync()
    amy.request(b"echo", b"amy 2")
    amy.sync()
    death(bench, worker)
    other = bench.worker(b"echo")
    for turn in (b"amy 1", b"bob 1", b"amy 2", b"bob 2"):
        other.final(other.work(turn), b"reply to " + turn)
    for client, name in ((amy, b"amy"), (bob, b"bob")):
        for number in (b"1", b"2"):
            client.final(b"echo", b"reply to " + name + b" " + number)
        client.nothing()


def test_c17_the_request_keeps_its_envelope(start: Start) -> None:
    # C17, C22
    bench = start()
    peer, worker = bench.peer(), bench.worker(b"echo")
    peer.send(b"a", b"b", b"", b"MDPC02", b"\x01", b"echo", b"hello")
    worker.work(b"hello")
    worker.disconnect()
    other = bench.worker(b"echo")
    other.final(other.work(b"hello"), b"world")
    assert peer.recv() == [b"a", b"b", b"", b"MDPC02", b"\x03", b"echo", b"world"]


def test_c17_a_request_is_tried_by_three_workers_and_not_by_a_fourth(bench: Bench) -> None:
    # C17
    client = bench.client()
    client.request(b"echo", b"poison")
    client.request(b"echo", b"harmless")
    client.sync()
    for _ in range(3):
        worker = bench.worker(b"echo")
        worker.work(b"poison")
        worker.disconnect()
        worker.sync()
    fourth = bench.worker(b"echo")
    fourth.final(fourth.work(b"harmless"), b"done")
    client.final(b"echo", b"done")
    fourth.nothing()
    client.nothing()
    assert bench.stats()["dropped"] == {"workers-lost": 1}


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_c17_max_attempts_is_a_setting(start: Start, attempts: int) -> None:
    # C17
    bench = start(max_attempts=attempts)
    client = bench.client()
    client.request(b"echo", b"poison")
    client.sync()
    for _ in range(attempts):
        worker = bench.worker(b"echo")
        worker.work(b"poison")
        worker.disconnect()
        worker.sync()
    bench.worker(b"echo").nothing()
    assert bench.stats()["dropped"] == {"workers-lost": 1}
    client.nothing()


@pytest.mark.parametrize("death", [disconnect, second_ready, kill])
def test_c17_max_attempts_counts_workers_with_rare_heartbeats(start: Start, death: Death) -> None:
    # C17, C13: they are alive for all the broker may know, and one request must not take them all down
    bench = start(heartbeat=0.02, liveness=1000)
    client, workers = bench.client(), [bench.worker(b"echo") for _ in range(5)]
    for worker in workers:
        for _ in range(5):
            worker.beaten()
    client.request(b"echo", b"poison")
    for worker in workers[:3]:
        worker.work(b"poison")
        death(bench, worker)
    for worker in workers[3:]:
        worker.nothing()
    client.nothing()
    assert bench.stats()["dropped"] == {"workers-lost": 1}


@pytest.mark.parametrize("death", DEATHS)
def test_c17_a_request_is_not_repeated_once_a_partial_has_reached_the_client(start: Start, death: Death) -> None:
    # C17
    bench = start(**settings(death))
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    worker.partial(worker.work(b"hello"), b"begun")
    client.partial(b"echo", b"begun")
    death(bench, worker)
    other = bench.worker(b"echo")
    other.nothing()
    client.nothing()
    assert bench.stats()["dropped"] == {"worker-lost-after-partial": 1}


def test_c17_a_0_1_clients_request_is_repeated_despite_its_collected_partials(bench: Bench) -> None:
    # C17, C24: nothing was sent to it yet, so another worker begins anew
    client, worker = bench.old_client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    worker.partial(worker.work(b"hello"), b"lost with its worker")
    worker.disconnect()
    other = bench.worker(b"echo")
    address = other.work(b"hello")
    other.partial(address, b"begun")
    other.final(address, b"done")
    client.final(b"echo", b"begun", b"done")
    client.nothing()


@pytest.mark.parametrize("late", ["partial", "final"])
def test_c18_messages_from_a_worker_declared_dead_are_dropped(start: Start, late: str) -> None:
    # C18, C13, C14: one FINAL, from the one who has the request now; the late one is told to go
    bench = start(**settings(silence))
    client, slow = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    address = slow.work(b"hello")
    silence(bench, slow)
    other = bench.worker(b"echo")
    anew = other.work(b"hello")
    assert anew != address
    getattr(slow, late)(address, b"too late")
    slow.disconnected()
    slow.nothing()
    client.nothing()
    other.final(anew, b"in time")
    client.final(b"echo", b"in time")
    client.nothing()


def test_c18_a_late_final_does_not_answer_a_queued_request(start: Start) -> None:
    # C18: not even then, for the request waits and will be done again
    bench = start(heartbeat=0.05, liveness=4, busy_grace=0.2)
    client, slow = bench.client(), bench.worker()
    client.request(b"echo", b"hello")
    client.sync()
    slow.ready(b"echo")
    address = slow.work(b"hello")
    silence(bench, slow)
    slow.final(address, b"too late")
    slow.disconnected()
    client.nothing()
    assert bench.stats()["queued"] == 1


def test_c18_a_late_final_does_not_end_the_clients_next_request(start: Start) -> None:
    # C18, C4, C32: 0.2 has no request number, so this is all that keeps them apart
    bench = start(max_attempts=1, **settings(silence))
    client, slow = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"first")
    address = slow.work(b"first")
    silence(bench, slow)
    client.request(b"echo", b"second")
    other = bench.worker(b"echo")
    second = other.work(b"second")
    assert second != address
    slow.final(address, b"of the first")
    slow.disconnected()
    client.nothing()
    other.final(address, b"of the first")  # not even from the worker that has the second
    client.nothing()
    other.final(second, b"of the second")
    client.final(b"echo", b"of the second")
    client.nothing()


def test_c18_a_dead_worker_that_registers_again_has_no_claim_on_its_old_request(start: Start) -> None:
    # C18, C32: what it says is late, and dropped
    bench = start(**settings(silence))
    client, slow = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    address = slow.work(b"hello")
    silence(bench, slow)
    other = bench.worker(b"echo")
    anew = other.work(b"hello")
    slow.ready(b"echo")
    slow.final(address, b"too late")
    slow.final(anew, b"another's")
    slow.nothing()
    client.nothing()
    assert bench.stats()["late"] == 2
    other.final(anew, b"in time")
    client.final(b"echo", b"in time")
    client.nothing()


def test_c17_replies_to_a_client_that_is_gone_are_discarded(start: Start) -> None:
    # C17, C12: its waiting requests go once the broker notices, and its worker is free again
    bench = start(heartbeat=0.05, liveness=1000)
    client, worker, alive = bench.client(), bench.worker(b"echo"), bench.client()
    for number in range(5):
        client.request(b"echo", b"%d" % number)
    client.sync()
    address = worker.work(b"0")
    client.close()
    alive.request(b"echo", b"alive")
    alive.sync()

    def gone() -> bool:
        worker.partial(address, b"anybody?")
        return bool(bench.stats()["dropped"].get("client-gone", 0) == 5)

    bench.until(gone)
    worker.final(address, b"nobody")
    worker.final(worker.work(b"alive"), b"here")
    alive.final(b"echo", b"here")
    worker.nothing()
