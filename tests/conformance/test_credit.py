"""X1 workers that hold many requests: credit, the next worker (C21), RELEASE, and leaving (docs/reference/x1.md)."""

import json
from collections.abc import Callable
from typing import Any

from support.peers import Bench, X1Client

Start = Callable[..., Bench]


def ask(client: X1Client, *bodies: int) -> None:
    """Have the broker take in a request for each body."""
    for body in bodies:
        client.request(b"echo", b"%d" % body)
    client.sync()


def held(worker: Any, *bodies: int) -> list[bytes]:
    """Expect these requests and nothing else; returns their addresses."""
    addresses = [worker.work(b"%d" % body) for body in bodies]
    worker.nothing()
    return addresses


def row(bench: Bench) -> dict[str, Any]:
    """What the broker tells of the only worker."""
    (only,) = json.loads(bench.mmi(b"mmi.workers", b""))["workers"]
    assert isinstance(only, dict)
    return only


# ── how many ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_holds_as_many_as_it_gives_credit_for(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=3)
    ask(client, *range(1, 6))
    addresses = held(worker, 1, 2, 3)
    assert (bench.stats()["running"], bench.stats()["queued"]) == (3, 2)
    worker.final(addresses[1], b"two")  # in any order
    client.final(b"echo", b"two", number=2)
    addresses += held(worker, 4)
    worker.error(addresses[0], b"500", b"no good")
    client.error(b"500", b"no good", number=1)
    addresses += held(worker, 5)
    for number, address in ((5, addresses[4]), (3, addresses[2]), (4, addresses[3])):
        worker.partial(address, b"begun")
        worker.final(address, b"done")
        client.partial(b"echo", b"begun", number=number)
        client.final(b"echo", b"done", number=number)
    client.nothing()
    worker.nothing()
    assert bench.stats()["running"] == 0


# ── which worker, and whose request ──────────────────────────────────────────────────────────────────────────────────


def test_c21_workers_of_all_dialects_are_chosen_by_load(bench: Bench) -> None:
    # C21: before X1, a worker has a credit of one
    client = bench.x1_client()
    old, other = bench.old_worker(b"echo"), bench.worker(b"echo")
    small, large = bench.x1_worker(b"echo", credit=2), bench.x1_worker(b"echo", credit=3)
    ask(client, *range(1, 9))
    old.work(b"1")
    other.work(b"2")
    held(small, 3, 5)
    held(large, 4, 6, 7)
    assert bench.stats()["queued"] == 1


def test_c20_clients_take_turns_for_a_workers_credit(bench: Bench) -> None:
    # C20: one message with a hundred requests does not go before another client's one
    greedy, modest = bench.x1_client(), bench.x1_client()
    worker = bench.x1_worker(b"echo", credit=0)
    ask(greedy, *range(100))
    modest.request(b"echo", b"modest")
    modest.sync()
    worker.credit(4)
    for body in (b"0", b"modest", b"1", b"2"):
        worker.work(body)
    worker.nothing()


# ── a worker that takes all and does nothing ─────────────────────────────────────────────────────────────────────────


# ── RELEASE ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_released_request_goes_to_another_worker_and_no_attempt_is_counted(start: Start) -> None:
    bench = start(max_attempts=1)
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=3)
    ask(client, 1, 2, 3)
    addresses = held(worker, 1, 2, 3)
    worker.credit(1)
    for address in reversed(addresses[1:]):  # the last first, so that they keep their order
        worker.release(address)
    worker.nothing()
    assert (bench.stats()["running"], bench.stats()["queued"]) == (1, 2)
    assert bench.stats()["late"] == 0
    other = bench.x1_worker(b"echo", credit=5)
    again = [other.work(b"2"), other.work(b"3")]
    other.nothing()
    assert not {*again} & {*addresses}
    for number, address in ((2, again[0]), (3, again[1])):
        other.final(address, b"done")
        client.final(b"echo", b"done", number=number)
    worker.final(addresses[0], b"done")
    client.final(b"echo", b"done", number=1)
    assert bench.stats()["dropped"] == {}


def test_a_release_of_another_workers_request_is_ignored(bench: Bench) -> None:
    # C32
    client, holder, worker = bench.x1_client(), bench.x1_worker(b"echo"), bench.x1_worker(b"echo")
    ask(client, 1)
    (address,) = held(holder, 1)
    worker.release(address)
    worker.nothing()
    holder.final(address, b"done")
    client.final(b"echo", b"done")
    assert bench.stats()["late"] == 1


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_leaves_finishes_what_it_holds(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=3)
    ask(client, 1, 2)
    addresses = held(worker, 1, 2)
    worker.disconnect()
    ask(client, 3)
    worker.nothing()
    assert bench.status(b"echo") == b"404"  # for what comes now, there is nobody
    told = row(bench)
    assert (told["leaving"], told["held"]) == (True, 2)
    worker.partial(addresses[0], b"begun")
    worker.final(addresses[0], b"done")
    client.partial(b"echo", b"begun", number=1)
    client.final(b"echo", b"done", number=1)
    worker.nothing()
    worker.error(addresses[1], b"500", b"no good")
    client.error(b"500", b"no good", number=2)
    assert worker.recv() == [*worker.head, b"\x06", b"0"]
    worker.nothing()
    assert bench.stats()["workers"] == 0
    assert bench.stats()["lost"] == {"disconnected": 1}
    other = bench.worker(b"echo")
    other.final(other.work(b"3"), b"done")
    client.final(b"echo", b"done", number=3)


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────
