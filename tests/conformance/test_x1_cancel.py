"""X1: CANCEL and what it meets on its way; clients that are gone (docs/reference/x1.md, Cancelling)."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import zmq
from support.peers import Bench, Client, X1Client

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
