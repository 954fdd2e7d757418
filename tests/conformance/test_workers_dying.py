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
