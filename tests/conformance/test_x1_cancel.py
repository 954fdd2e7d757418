"""X1: CANCEL and what it meets on its way; clients that are gone (docs/reference/x1.md, Cancelling)."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import zmq
from support.peers import Bench, Client, OldWorker, Worker, X1Client

Start = Callable[..., Bench]


def test_cancel_drops_a_waiting_request(bench: Bench) -> None:
    client, other = bench.x1_client(), bench.x1_client()
    for number in (1, 2, 3):
        client.request(b"late", b"%d" % number)
    client.sync()
    other.request(b"late", b"other's")
    other.sync()
    client.cancel(number=2)
    client.error(b"499", b"cancelled", number=2)
    client.nothing()
    assert bench.stats()["queued"] == 3
    assert bench.stats()["dropped"] == {"cancelled": 1}
    worker = bench.x1_worker(b"late")
    for body in (b"1", b"other's", b"3"):
        worker.final(worker.work(body), b"done")
    client.final(b"late", b"done", number=1)
    client.final(b"late", b"done", number=3)
    other.final(b"late", b"done")


def test_cancel_of_the_only_waiting_request_removes_its_service(bench: Bench) -> None:
    client = bench.x1_client()
    client.request(b"late", b"hello")
    client.cancel()
    client.error(b"499")
    stats = bench.stats()
    assert stats["queued"] == stats["request_bytes"] == stats["services"] == 0
    bench.x1_worker(b"late").nothing()


@pytest.mark.parametrize("end", ["final", "error", "partials"])
def test_cancel_reaches_the_worker(bench: Bench, end: str) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    client.request(b"slow", b"hello")
    address = worker.work(b"hello")
    worker.partial(address, b"begun")
    client.partial(b"slow", b"begun")
    client.cancel()
    client.error(b"499", b"cancelled")
    worker.cancelled(address)
    client.request(b"slow", b"next")
    client.sync()
    assert bench.stats()["running"] == bench.stats()["queued"] == 1  # it is not free before it ends the request
    if end == "partials":
        for _ in range(10):
            worker.partial(address, b"more")
    worker.nothing()
    if end == "error":
        worker.error(address, b"499", b"stopped")
    else:
        worker.final(address, b"done all the same")
    worker.final(worker.work(b"next"), b"here")
    client.final(b"slow", b"here")
    client.nothing()
    assert bench.stats()["dropped"] == {"cancelled": 1}


@pytest.mark.parametrize("worker_kind", [OldWorker, Worker])
def test_a_worker_of_another_dialect_is_not_told_of_cancel(bench: Bench, worker_kind: Callable[..., Any]) -> None:
    client, worker = bench.x1_client(), bench.connect(worker_kind)
    worker.ready(b"slow")
    worker.sync()
    client.request(b"slow", b"hello")
    address = worker.work(b"hello")
    client.cancel()
    client.error(b"499")
    worker.nothing()
    client.request(b"slow", b"next")
    worker.final(address, b"done all the same")
    worker.final(worker.work(b"next"), b"here")
    client.final(b"slow", b"here")


def test_a_cancelled_request_goes_to_no_other_worker(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    client.request(b"slow", b"hello")
    address = worker.work(b"hello")
    client.cancel()
    client.error(b"499")
    worker.cancelled(address)
    worker.break_rules()
    bench.x1_worker(b"slow").nothing()
    client.nothing()
    assert bench.stats()["running"] == bench.stats()["queued"] == 0


@pytest.mark.parametrize("end", ["final", "error", "cancelled", "refused", "mmi", "too late"])
def test_cancel_after_the_end_has_no_answer(bench: Bench, end: str) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    if end == "refused":
        client.request(b"nobody", b"hello", options=b'{"wait":false}')
    elif end == "mmi":
        client.request(b"mmi.service", b"echo")
    elif end == "too late":
        client.request(b"nobody", b"hello", ttl=1)
        bench.until(lambda: bool(bench.stats()["dropped"] == {"ttl-passed": 1}))
    else:
        client.request(b"echo", b"hello")
        address = worker.work(b"hello")
    if end == "final":
        worker.final(address, b"world")
        worker.sync()
    elif end == "error":
        worker.error(address, b"500", b"no good")
        worker.sync()
    elif end == "cancelled":
        client.cancel()
    client.cancel()
    client.cancel()
    message = client.recv()
    assert message[2] == (b"\x03" if end in {"final", "mmi"} else b"\x04")
    client.nothing()
    if end == "cancelled":
        worker.cancelled(address)
    worker.nothing()
    assert bench.stats()["invalid"] == {}


def test_the_broker_remembers_thousands_of_ended_requests_but_not_all(bench: Bench) -> None:
    client = bench.x1_client()
    for _ in range(5000):
        client.request(b"mmi.service", b"echo")
    for number in range(1, 5001):
        client.final(b"mmi.service", b"404", number=number)
    client.cancel(number=1)
    client.nothing()
    for _ in range(2):
        for _ in range(5000):
            client.request(b"mmi.service", b"echo")
        for _ in range(5000):
            client.recv()
    client.cancel(number=1)
    client.error(b"400", number=1)


def test_cancel_of_an_unknown_number_is_rejected(bench: Bench) -> None:
    client, other = bench.x1_client(), bench.x1_client()
    client.request(b"late", b"hello")
    client.sync()
    for number in (0, 7, (1 << 32) + 1):
        client.cancel(number=number)
        assert client.error(b"400", number=number) == "malformed: unknown-number"
    other.cancel(number=1)  # it is not this connection's
    other.error(b"400", number=1)
    assert bench.stats()["invalid"] == {"unknown-number": 4}
    assert bench.stats()["queued"] == 1
    worker = bench.x1_worker(b"late")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"late", b"world", number=1)


def test_the_number_of_a_cancelled_request_can_be_used_again(bench: Bench) -> None:
    # although a client does better not to use it again
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    for body in (b"1", b"2"):
        client.request(b"slow", body, number=7)
        address = worker.work(body)
        client.cancel()
        client.error(b"499")
        worker.cancelled(address)
        client.request(b"slow", b"again", number=7)
        client.sync()
        worker.final(address, b"dropped")
        worker.final(worker.work(b"again"), b"done")
        client.final(b"slow", b"done")
    client.nothing()


def test_cancel_does_not_affect_another_connections_request_of_the_same_number(bench: Bench) -> None:
    amy, bob = bench.x1_client(), bench.x1_client()
    worker = bench.x1_worker(b"slow", credit=2)
    amy.request(b"slow", b"amy's")
    from_amy = worker.work(b"amy's")
    bob.request(b"slow", b"bob's")
    from_bob = worker.work(b"bob's")
    bob.cancel()
    worker.cancelled(from_bob)
    bob.error(b"499")
    worker.nothing()
    worker.final(from_amy, b"done")
    amy.final(b"slow", b"done")


@pytest.mark.parametrize("client_kind", [Client, X1Client])
def test_a_worker_is_told_that_its_client_is_gone(bench: Bench, client_kind: Callable[..., Any]) -> None:
    client, streaming, working = bench.connect(client_kind), bench.x1_worker(b"stream"), bench.x1_worker(b"slow")
    client.request(b"slow", b"hello")
    worked_on = working.work(b"hello")
    client.request(b"stream", b"hello")
    streamed = streaming.work(b"hello")
    client.request(b"slow", b"waits")
    client.sync()
    client.close()

    def gone() -> bool:
        streaming.partial(streamed, b"anybody?")
        return bool(bench.stats()["dropped"] == {"client-gone": 3})

    bench.until(gone)
    for worker, address in ((working, worked_on), (streaming, streamed)):
        worker.cancelled(address)
        worker.final(address, b"for nobody")
        worker.nothing()
    assert bench.stats()["running"] == bench.stats()["queued"] == 0


def test_a_client_that_is_gone_is_noticed_without_sending_to_it(bench: Bench) -> None:
    # nothing happens by the clock here, and nobody says anything
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    for body in (b"1", b"2", b"3"):
        client.request(b"slow", body)
    client.request(b"nobody", b"4")
    address = worker.work(b"1")
    client.sync()
    client.close()
    bench.until(lambda: bool(bench.stats()["dropped"] == {"client-gone": 4}))
    worker.cancelled(address)
    assert bench.stats()["queued"] == 0
    assert bench.stats()["running"] == 1  # until the worker ends it
    worker.error(address, b"499", b"stopped")
    worker.nothing()
    assert bench.stats()["running"] == 0


def test_a_client_that_has_missed_a_message_gets_no_more(start: Start) -> None:
    # else it would wait for ever for what was thrown away; so it finds the broker silent, and starts anew
    bench = start("inproc://broker", max_outbox=50)
    slow, worker = bench.x1_client(options={zmq.RCVHWM: 1}), bench.x1_worker(b"stream")
    slow.request(b"stream", b"hello")
    address = worker.work(b"hello")
    slow.request(b"stream", b"waits")
    for number in count():
        if worker.waiting:
            break
        worker.partial(address, b"%d" % number)
        worker.sync()  # else many of them would go into one message
    worker.cancelled(address)
    assert bench.stats()["dropped"] == {"client-gone": 2}
    slow.heartbeat()
    slow.request(b"mmi.service", b"stream")
    slow.request(b"stream", b"lost")
    slow.cancel(number=7)
    slow.request(b"stream", b"", options=b"no JSON")
    slow.sync()
    for number in range(slow.waiting):
        slow.partial(b"stream", b"%d" % number, number=1)  # a beginning of the stream, without a gap
    slow.nothing()
    worker.final(address, b"end")
    worker.nothing()
    again = bench.x1_client()
    again.request(b"stream", b"hello", number=1)
    worker.final(worker.work(b"hello"), b"world")
    again.final(b"stream", b"world")
