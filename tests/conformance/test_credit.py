"""X1 workers that hold many requests: credit, the next worker (C21), RELEASE, and leaving (docs/reference/x1.md)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.peers import Bench, X1Client, request_of

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


@pytest.mark.parametrize("credit", [6, 10**4, 2**32 - 1])
def test_the_broker_limits_a_workers_credit(start: Start, credit: int) -> None:
    bench = start(max_credit=5)
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=credit)
    ask(client, *range(1, 9))
    addresses = held(worker, 1, 2, 3, 4, 5)
    worker.credit(credit)
    worker.nothing()
    worker.final(addresses[0], b"done")
    held(worker, 6)
    assert row(bench)["credit"] == 5


def test_credit_is_absolute(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, *range(1, 8))
    addresses = held(worker, 1)
    worker.credit(2)
    addresses += held(worker, 2)
    worker.credit(4)
    addresses += held(worker, 3, 4)
    worker.credit(4)
    worker.nothing()
    worker.credit(2)  # it keeps what it has
    worker.nothing()
    assert row(bench)["held"] == 4
    for address in addresses[:2]:
        worker.final(address, b"done")
        worker.nothing()
    worker.final(addresses[2], b"done")
    held(worker, 5)


def test_credit_0_is_a_pause(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=2)
    ask(client, 1)
    (address,) = held(worker, 1)
    worker.credit(0)
    ask(client, 2)
    worker.nothing()
    worker.final(address, b"done")
    client.final(b"echo", b"done", number=1)
    worker.nothing()
    assert bench.status(b"echo") == b"200"  # it is there all the same
    assert bench.stats()["queued"] == 1
    client.request(b"echo", b"3", options=b'{"wait":false}')  # so this one waits
    client.nothing()
    worker.credit(1)
    worker.final(*held(worker, 2), b"done")
    client.final(b"echo", b"done", number=2)


def test_a_worker_may_register_with_credit_0(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=0)
    ask(client, 1)
    worker.nothing()
    assert bench.status(b"echo") == b"200"
    worker.credit(1)
    held(worker, 1)


def test_credit_from_an_unregistered_worker_is_unexpected(bench: Bench) -> None:
    # C14
    stranger = bench.x1_worker()
    stranger.credit(5)
    assert stranger.recv() == [*stranger.head, b"\x06", b"0"]
    stranger.nothing()
    assert bench.stats()["disconnected"] == {"not-registered": 1}


# ── which worker, and whose request ──────────────────────────────────────────────────────────────────────────────────


def test_c21_the_worker_with_the_fewest_outstanding_requests_is_next(bench: Bench) -> None:
    # C21
    client = bench.x1_client()
    large, small = bench.x1_worker(b"echo", credit=5), bench.x1_worker(b"echo", credit=2)
    ask(client, *range(1, 9))
    addresses = [large.work(b"%d" % body) for body in (1, 3, 5, 6, 7)]
    of_small = held(small, 2, 4)
    large.nothing()
    for address in addresses:
        large.final(address, b"done")
    large.work(b"8")
    ask(client, 9, 10)
    large.work(b"9")  # one against two
    for address in of_small:
        small.final(address, b"done")
    small.sync()
    ask(client, 11)
    small.work(b"11")  # none against three
    assert row_of(bench, 2)["held"] == 1


def row_of(bench: Bench, worker: int) -> dict[str, Any]:
    rows = {each["id"]: each for each in json.loads(bench.mmi(b"mmi.workers", b""))["workers"]}
    found = rows[worker]
    assert isinstance(found, dict)
    return found


def test_c21_of_equally_loaded_workers_the_least_recently_used_is_next(bench: Bench) -> None:
    # C21: with credit left everywhere, three workers take turns
    client = bench.x1_client()
    workers = [bench.x1_worker(b"echo", credit=9) for _ in range(3)]
    ask(client, *range(9))
    addresses = [held(worker, at, at + 3, at + 6) for at, worker in enumerate(workers)]
    for at in (2, 0, 1):
        for address in addresses[at]:
            workers[at].final(address, b"done")
        workers[at].sync()
    ask(client, 20, 21, 22)
    for body, at in enumerate((2, 0, 1), 20):
        held(workers[at], body)


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


def test_c20_clients_take_turns_when_a_full_worker_becomes_free(bench: Bench) -> None:
    # C20
    greedy, modest = bench.x1_client(), bench.x1_client()
    worker = bench.x1_worker(b"echo", credit=2)
    ask(greedy, *range(10))
    addresses = held(worker, 0, 1)
    modest.request(b"echo", b"modest")
    modest.sync()
    for address in addresses:
        worker.final(address, b"done")
    worker.sync()
    assert {worker.any_request()[2][0] for _ in range(2)} == {b"2", b"modest"}


# ── a worker that takes all and does nothing ─────────────────────────────────────────────────────────────────────────


def test_requests_at_a_hanging_worker_end_when_their_ttl_passes(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=50)
    many = bench.x1_client()
    many.say(*(request_of(number, b"echo", b"hello", ttl=50) for number in range(50)))  # in one message: at one time
    addresses = [worker.any_request()[0] for _ in range(50)]
    assert {many.recv()[4] for _ in range(50)} == {b"408"}
    for address in addresses:
        worker.cancelled(address)
    client.request(b"echo", b"more", ttl=50)
    client.error(b"408")  # its credit is used up until it ends them
    worker.nothing()
    other = bench.x1_worker(b"echo")
    client.request(b"echo", b"other")
    other.final(other.work(b"other"), b"served")
    client.final(b"echo", b"served")
    worker.final(addresses[7], b"at last")
    client.nothing()
    assert bench.stats()["running"] == 49


def test_a_hanging_worker_does_not_delay_other_workers_requests(bench: Bench) -> None:
    client, hanging = bench.x1_client(), bench.x1_worker(b"echo", credit=10)
    ask(client, *range(10))
    held(hanging, *range(10))
    good = bench.x1_worker(b"echo", credit=2)
    for number in range(10, 40):
        client.request(b"echo", b"%d" % number)
        good.final(good.work(b"%d" % number), b"done")
        client.final(b"echo", b"done")
    hanging.nothing()


def test_requests_of_a_worker_that_falls_silent_go_to_others(start: Start) -> None:
    bench = start(heartbeat=0.05, liveness=10)
    client = bench.x1_client()
    ask(client, *range(10))
    client.sync()
    hanging = bench.x1_worker(b"echo", credit=10)
    for number in range(10):
        hanging.work(b"%d" % number)
    bench.until(lambda: bench.stats()["lost"] == {"silent": 1})
    good = bench.worker(b"echo")
    for number in range(10):  # in their order
        good.final(good.work(b"%d" % number), b"done")
        client.final(b"echo", b"done", number=number + 1)


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


def test_a_released_request_goes_to_the_front_of_the_queue(bench: Bench) -> None:
    client, other, worker = bench.x1_client(), bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1)
    (address,) = held(worker, 1)
    ask(other, 2)
    ask(client, 3)
    worker.credit(0)
    worker.release(address)
    worker.nothing()
    worker.credit(3)
    held(worker, 1, 2, 3)


def test_a_release_does_not_undo_an_attempt(bench: Bench) -> None:
    client, dies = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1)
    held(dies, 1)
    dies.break_rules()
    worker = bench.x1_worker(b"echo", credit=2)
    for _ in range(3):
        address = worker.work(b"1", attempt=2)
        worker.release(address)
    worker.final(worker.work(b"1", attempt=2), b"done")
    client.final(b"echo", b"done")


def test_a_request_released_twice_is_released_once(bench: Bench) -> None:
    # C32
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1, 2)
    (address,) = held(worker, 1)
    worker.credit(0)
    worker.release(address)
    worker.release(address)
    worker.nothing()
    assert bench.stats()["late"] == 1
    assert bench.stats()["queued"] == 2
    worker.credit(2)
    held(worker, 1, 2)


@pytest.mark.parametrize("address", [b"1", b"18446744073709551615"])
def test_a_release_of_an_unknown_address_is_unexpected(bench: Bench, address: bytes) -> None:
    # C14, C18
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1)
    held(worker, 1)
    worker.release(address)
    worker.disconnected()
    worker.nothing()
    other = bench.worker(b"echo")
    other.final(other.work(b"1"), b"done")
    client.final(b"echo", b"done")


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


def test_a_stream_that_has_begun_cannot_be_released(bench: Bench) -> None:
    # C17: never again once a PARTIAL has reached the client
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=2)
    ask(client, 1)
    (address,) = held(worker, 1)
    worker.partial(address, b"begun")
    client.partial(b"echo", b"begun")
    worker.release(address)
    client.error(b"502")
    worker.nothing()
    client.nothing()
    assert bench.stats()["running"] == bench.stats()["queued"] == 0


def test_a_released_request_that_was_cancelled_is_dropped(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1)
    (address,) = held(worker, 1)
    client.cancel()
    client.error(b"499")
    worker.cancelled(address)
    worker.release(address)  # frees its credit, and that is all
    worker.nothing()
    assert bench.stats()["running"] == bench.stats()["queued"] == 0
    ask(client, 2)
    held(worker, 2)


def test_a_released_request_with_wait_false_waits_only_while_there_is_a_worker(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello", options=b'{"wait":false}')
    address, *_ = worker.any_request()
    worker.credit(0)
    worker.release(address)
    worker.nothing()
    client.nothing()  # there is a worker, so it does wait
    worker.disconnect()
    worker.disconnected()
    client.error(b"404")  # nobody has begun with it


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_worker_may_leave_at_once(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=5)
    worker.disconnect()
    assert worker.recv() == [*worker.head, b"\x06", b"0"]
    worker.nothing()
    assert bench.status(b"echo") == b"404"
    assert bench.stats()["lost"] == {"disconnected": 1}
    ask(client, 1)
    worker.nothing()
    worker.ready(b"echo", credit=1)  # and come again
    held(worker, 1)


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


def test_credit_from_a_leaving_worker_is_ignored(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1, 2)
    (address,) = held(worker, 1)
    worker.disconnect()
    worker.disconnect()
    worker.credit(10)
    worker.heartbeat()
    worker.nothing()
    worker.final(address, b"done")
    worker.disconnected()
    worker.nothing()
    assert bench.stats()["queued"] == 1
    assert bench.stats()["disconnected"] == {}


def test_requests_released_by_a_leaving_worker_go_to_others(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=2)
    ask(client, 1, 2)
    addresses = held(worker, 1, 2)
    other = bench.x1_worker(b"echo")
    worker.disconnect()
    worker.release(addresses[1])
    other.final(other.work(b"2"), b"done")
    client.final(b"echo", b"done", number=2)
    worker.nothing()
    worker.final(addresses[0], b"done")
    client.final(b"echo", b"done", number=1)
    worker.disconnected()
    worker.nothing()


def test_a_leaving_worker_must_end_its_cancelled_requests(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1)
    (address,) = held(worker, 1)
    worker.disconnect()
    client.cancel()
    client.error(b"499")
    worker.cancelled(address)
    worker.nothing()
    worker.error(address, b"499", b"stopped")
    worker.disconnected()


def test_requests_of_a_worker_that_dies_while_leaving_go_to_others(bench: Bench) -> None:
    # C17
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=2)
    ask(client, 1, 2)
    held(worker, 1, 2)
    worker.disconnect()
    worker.sync()
    worker.close()
    other = bench.x1_worker(b"echo", credit=2)
    for number in (1, 2):
        other.final(other.work(b"%d" % number, attempt=2), b"done")
        client.final(b"echo", b"done", number=number)


def test_a_request_with_wait_false_does_not_wait_for_a_leaving_worker(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1)
    (address,) = held(worker, 1)
    client.request(b"echo", b"queued", options=b'{"wait":false}')
    client.nothing()
    worker.disconnect()
    client.error(b"404")
    client.request(b"echo", b"after", options=b'{"wait":false}')
    client.error(b"404")
    worker.final(address, b"done")
    client.final(b"echo", b"done", number=1)
    worker.disconnected()


def test_a_request_goes_on_waiting_when_another_is_dropped(bench: Bench) -> None:
    # the service is known for as long as anything waits, whatever else ends in the same turn
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    ask(client, 1)
    held(worker, 1)
    client.request(b"echo", b"2", options=b'{"wait":false}')
    client.sync()
    worker.break_rules()
    client.error(b"404", number=2)
    other = bench.x1_worker(b"echo")
    other.final(other.work(b"1", attempt=2), b"done")
    client.final(b"echo", b"done", number=1)


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_mmi_reports_what_a_worker_says_in_ready(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker()
    worker.ready(b"echo", credit=7, name="resize", host="größer", pid=4294967295, version="1.2\n3", more=[None])
    worker.sync()
    ask(client, 1, 2)
    held(worker, 1, 2)
    told = row(bench)
    assert told.pop("up_seconds") >= told.pop("silent_seconds") >= 0
    assert told == {
        "id": 1, "service": "echo", "protocol": "X1", "name": "resize", "host": "größer", "pid": 4294967295,
        "version": "1.2?3", "credit": 7, "held": 2, "done": 0, "busy_seconds": 0.0, "suspects": 0, "busy": True,
        "leaving": False,
    }  # fmt: skip
    (service,) = json.loads(bench.mmi(b"mmi.services", b"echo"))["services"]
    assert service == {
        "name": "echo", "workers": 1, "idle": 1, "credit": 5, "running": 2, "queued": 0, "dispatched": 2,
        "remote_credit": 0, "remote_free": 0, "remote_running": 0, "hops": 0,
    }  # fmt: skip


def test_mmi_reports_workers_whose_ready_has_no_options(bench: Bench) -> None:
    for worker in (bench.old_worker(b"echo"), bench.worker(b"echo"), bench.x1_worker(b"echo")):
        worker.nothing()
    rows = json.loads(bench.mmi(b"mmi.workers", b"echo"))["workers"]
    assert [each["protocol"] for each in rows] == ["0.1", "0.2", "X1"]
    assert [each["id"] for each in rows] == [1, 2, 3]
    for each in rows:
        assert (each["name"], each["host"], each["pid"], each["version"]) == ("", "", 0, "")
        assert (each["credit"], each["held"], each["busy"], each["leaving"]) == (1, 0, False, False)
