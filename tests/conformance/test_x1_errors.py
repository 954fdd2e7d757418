"""X1: every way in which a request can fail, and the ERROR that tells so (docs/reference/x1.md, Codes)."""

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from support.peers import Bench, OldWorker, Worker, X1Client, X1Worker, body_of, record

Start = Callable[..., Bench]


NO_WAIT = b'{"wait":false}'


def registered(bench: Bench, kind: Callable[..., Any], service: bytes) -> Any:
    worker = bench.connect(kind)
    worker.ready(service)
    worker.sync()
    return worker


def settled(bench: Bench, client: X1Client, dropped: dict[str, int]) -> None:
    """The request has ended, once and for all, and nothing is left of it; the client was told why (C47)."""
    client.nothing()
    stats = bench.stats()
    assert stats["dropped"] == dropped
    assert client.reason.decode() == "".join(dropped)
    assert stats["running"] == stats["queued"] == stats["request_bytes"] == 0


# ── 404: no worker ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_404_without_a_worker_if_the_request_does_not_wait(bench: Bench) -> None:
    client = bench.x1_client()
    client.request(b"nobody", b"hello", options=NO_WAIT)
    assert client.error(b"404") == "no worker offers the service"
    settled(bench, client, {"no-worker": 1})
    assert bench.stats()["services"] == 0


# ── 408: its time has passed ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ttl", [1, 20])
def test_408_queued(bench: Bench, ttl: int) -> None:
    client = bench.x1_client()
    client.request(b"late", b"hello", ttl=ttl)
    text = client.error(b"408")
    assert text == "its time passed before a worker was free for it: none offers it"
    settled(bench, client, {"ttl-passed": 1})
    worker = bench.x1_worker(b"late")
    worker.nothing()


def test_408_running(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    client.request(b"slow", b"hello", ttl=50)
    address = worker.work(b"hello")
    assert "its time passed while a worker held it" in client.error(b"408")
    worker.cancelled(address)
    worker.partial(address, b"too")
    worker.final(address, b"late")
    worker.nothing()
    settled(bench, client, {"ttl-passed": 1})
    client.request(b"slow", b"next")  # the worker is free again
    worker.final(worker.work(b"next"), b"done")
    client.final(b"slow", b"done")


# ── 413: too large ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", ["final", "error"])
def test_413_a_final_or_an_error(start: Start, end: str) -> None:
    # the worker has ended its request, and is free
    bench = start(max_message=100_000)
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    if end == "final":
        worker.final(address, b"x" * 100_001)
    else:
        worker.error(address, b"500", b"text", b"x" * 100_001)
    assert "100000 bytes" in client.error(b"413")
    settled(bench, client, {"reply-too-large": 1})
    client.request(b"echo", b"next")
    worker.final(worker.work(b"next"), b"done")
    client.final(b"echo", b"done")
    worker.nothing()


# ── 429: the broker has too much ─────────────────────────────────────────────────────────────────────────────────────


def test_429_bytes_that_wait(start: Start) -> None:
    bench = start(max_request_bytes=200_000)
    client, other, worker = bench.x1_client(), bench.x1_client(), bench.x1_worker(b"served")
    client.request(b"late", b"x" * 90_000)
    client.request(b"late", b"x" * 20_000)
    assert "200000 bytes" in client.error(b"429")
    client.request(b"late", b"", options=b'{"k":"' + b"x" * 20_000 + b'"}')  # options count as well
    client.error(b"429")
    other.request(b"served", b"x" * 20_000)  # it is another connection, which may use as much as is left
    worker.final(worker.work(b"x" * 20_000), b"done")
    other.final(b"served", b"done")
    assert bench.stats()["dropped"] == {"memory-full": 2}


# ── 500 and whatever else a worker says ──────────────────────────────────────────────────────────────────────────────

FAILURES = [
    [b"500", b"ValueError: no good"],
    [b"500", b""],
    [b"500", b"with a detail", b""],
    [b"422", "größer ✓".encode(), b"\x00\xff" * 1000],
    [b"000", b"\xff is no text"],
    [b"999", b"MDPCX1", b"MDPWX1"],
    [b"404", b"a worker's own 404", b""],
    [b"503", b"a worker's own 503", b"detail"],
    [b"401", b"not one of the broker's"],
    [b"501", b"not one of the broker's"],
    [b"400", b"a worker's library says so itself"],
    [b"408", b"a worker's library says so itself"],
    [b"499", b"a worker's library says so itself"],
]


@pytest.mark.parametrize("failure", FAILURES)
def test_500_and_other_codes_pass_unchanged(bench: Bench, failure: list[bytes]) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"fails")
    for part in (False, True):
        client.request(b"fails", b"hello")
        address = worker.work(b"hello")
        if part:
            worker.partial(address, b"begun")
            client.partial(b"fails", b"begun")
        worker.error(address, failure[0], failure[1], *failure[2:])
        client.error(*failure)
        worker.nothing()
        client.nothing()
    settled(bench, client, {})
    assert bench.stats()["errors"] == 2


# ── 502: the worker is lost ──────────────────────────────────────────────────────────────────────────────────────────


def disconnects(bench: Bench, worker: Worker) -> None:
    worker.disconnect()
    worker.sync()


def is_closed(bench: Bench, worker: Worker) -> None:
    before = bench.stats()["workers"]
    worker.close()
    bench.until(lambda: bench.stats()["workers"] == before - 1)


def is_silent(bench: Bench, worker: Worker) -> None:
    bench.until(lambda: bench.stats()["workers"] == 0)


def says_the_unexpected(bench: Bench, worker: Worker) -> None:
    worker.ready(b"echo")
    worker.disconnected()


each_death = pytest.mark.parametrize(
    ("worker_kind", "death"),
    [(X1Worker, is_silent), (OldWorker, disconnects), (Worker, disconnects)]
    + [(kind, death) for kind in (OldWorker, Worker, X1Worker) for death in (says_the_unexpected, is_closed)],
)
Death = Callable[[Bench, Worker], None]


def settings(death: Death) -> dict[str, float]:
    """Where a worker dies of silence there is no way but to wait; all others have nothing to do with the time."""
    return {"heartbeat": 0.05, "liveness": 10} if death is is_silent else {}


@each_death
def test_502_too_many_workers_were_lost(start: Start, worker_kind: Callable[..., Any], death: Death) -> None:
    bench = start(max_attempts=2, **settings(death))
    client = bench.x1_client()
    client.request(b"echo", b"poison")
    client.sync()
    for attempt in (1, 2):
        worker = registered(bench, worker_kind, b"echo")
        worker.work(b"poison", **({"attempt": attempt} if worker_kind is X1Worker else {}))
        death(bench, worker)
    assert "its worker was lost" in client.error(b"502")
    assert client.lost == 2
    settled(bench, client, {"workers-lost": 1})


@pytest.mark.parametrize(
    ("worker_kind", "death"),
    [(Worker, disconnects)]
    + [(kind, death) for kind in (Worker, X1Worker) for death in (says_the_unexpected, is_closed)],
)
def test_502_after_a_partial(start: Start, worker_kind: Callable[..., Any], death: Death) -> None:
    bench = start()
    client, worker = bench.x1_client(), registered(bench, worker_kind, b"echo")
    client.request(b"echo", b"hello")
    worker.partial(worker.work(b"hello"), b"begun")
    client.partial(b"echo", b"begun")
    death(bench, worker)
    assert "after a PARTIAL" in client.error(b"502")
    assert client.lost == 1
    bench.x1_worker(b"echo").nothing()
    settled(bench, client, {"worker-lost-after-partial": 1})


def test_502_the_last_worker_was_lost(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello", options=NO_WAIT)
    worker.work(b"hello", options=NO_WAIT)
    worker.close()
    assert "no other worker offers the service" in client.error(b"502")
    settled(bench, client, {"last-worker-lost": 1})


def test_a_worker_gives_no_reason_of_the_brokers(bench: Bench) -> None:  # C47
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    told = struct.pack(">HHB", 502, 7, 12) + b"workers-lost" + struct.pack(">H", 4) + b"oops" + body_of()
    worker.say(record(7, int(address), told))
    client.error(b"502", b"oops", b"")
    assert (client.reason, client.lost) == (b"", 0)


# ── 503: the broker ends ─────────────────────────────────────────────────────────────────────────────────────────────


def test_503_draining(start: Start) -> None:
    bench = start(drain_timeout=60.0)
    client, old, worker = bench.x1_client(), bench.client(), bench.x1_worker(b"slow")
    idle = bench.x1_worker(b"idle")
    client.request(b"slow", b"running")
    address = worker.work(b"running")
    client.request(b"slow", b"waiting")
    client.sync()
    bench.server.stop()
    bench.until(lambda: json.loads(bench.mmi(b"mmi.broker", b""))["draining"])
    client.sent_away()
    idle.disconnected()
    client.request(b"idle", b"too late")
    assert "draining" in client.error(b"503")
    old.request(b"idle", b"too late")
    old.nothing()
    assert bench.stats()["dropped"] == {"draining": 2}
    new = bench.x1_worker()
    new.ready(b"idle")
    new.disconnected()
    worker.final(address, b"done")  # what was there before is finished, …
    client.final(b"slow", b"done", number=1)
    worker.final(worker.work(b"waiting"), b"done too")
    client.final(b"slow", b"done too", number=2)
    worker.disconnected()  # … and only then its worker is sent away
