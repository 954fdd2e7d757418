"""X1: numbered requests, options, every dialect's clients with every dialect's workers (docs/reference/x1.md)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.peers import Bench, Client, OldClient, OldWorker, Worker, X1Client, X1Worker, body_of, record, request_of

each_client = pytest.mark.parametrize("client_kind", [OldClient, Client, X1Client])
each_worker = pytest.mark.parametrize("worker_kind", [OldWorker, Worker, X1Worker])


# ── any client, any worker ───────────────────────────────────────────────────────────────────────────────────────────


@each_client
@each_worker
def test_any_client_reaches_any_worker(
    bench: Bench, client_kind: Callable[..., Any], worker_kind: Callable[..., Any]
) -> None:
    client, worker = bench.connect(client_kind), bench.connect(worker_kind)
    worker.ready(b"echo")
    worker.sync()
    for number in range(3):
        client.request(b"echo", b"hello", b"%d" % number)
        address = worker.work(b"hello", b"%d" % number)
        parts = [(), (b"1",), (b"2", b"", b"two")] if worker_kind is not OldWorker else [()]
        for part in parts[1:]:
            worker.partial(address, *part)
            if client_kind is not OldClient:
                client.partial(b"echo", *part)
        worker.final(address, b"world", b"%d" % number)
        collected = [frame for part in parts for frame in part] if client_kind is OldClient else []
        client.final(b"echo", *collected, b"world", b"%d" % number)
    client.nothing()
    worker.nothing()
    assert bench.stats()["running"] == bench.stats()["queued"] == 0


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_connection_may_speak_all_dialects(bench: Bench) -> None:
    peer, worker = bench.peer(), bench.x1_worker(b"echo")
    x1 = [b"", b"MDPCX1", b"\x09"]
    asked: list[tuple[list[bytes], list[bytes]]] = [
        ([*x1, request_of(1, b"echo", b"0")], [*x1, record(3, 1, body_of(b"world"))]),
        ([b"MDPC02", b"\x01", b"echo", b"1"], [b"MDPC02", b"\x03", b"echo", b"world"]),
        ([b"1", b"", b"MDPC02", b"\x01", b"echo", b"2"], [b"1", b"", b"MDPC02", b"\x03", b"echo", b"world"]),
        ([b"", b"MDPC01", b"echo", b"3"], [b"", b"MDPC01", b"echo", b"world"]),
    ]
    for request, _ in asked:
        peer.send(*request)
    answered = set()
    for _ in asked:  # in whatever order: the one with an envelope is another client, which takes its turn
        address, _, (at,) = worker.any_request()
        worker.final(address, b"world")
        assert peer.recv() == asked[int(at)][1]
        answered.add(at)
    assert len(answered) == len(asked)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────

OPTIONS = [
    b"",
    b"{}",
    b' {\n"a" : 1 } ',
    b'{"ttl":"not an option any longer"}',
    b'{"wait":true}',
    b'{"wait":false}',
    b'{"headers":{}}',
    b'{"headers":{"traceparent":"00-0af7","":"x"}}',
    '{"headers":{"größer":"✓"}}'.encode(),
    b'{"key":"a","priority":9,"delay":1e3,"nested":[[{"a":null}]]}',
    b'{"k":"\\ud800"}',
    b'{"a":' * 63 + b"{}" + b"}" * 63,
    b'{"k":"' + b"x" * (65535 - 8) + b'"}',
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options[:40])
def test_a_worker_gets_the_options_byte_by_byte(bench: Bench, options: bytes) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello", options=options)
    worker.final(worker.work(b"hello", options=options), b"world")
    client.final(b"echo", b"world")


# ── queues and the broker's own answers ──────────────────────────────────────────────────────────────────────────────


def test_mmi_in_x1(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    for service, status in ((b"echo", b"200"), (b"nobody", b"404")):
        client.request(b"mmi.service", service)
        client.final(b"mmi.service", status)
    client.request(b"mmi.nope", b"")
    client.final(b"mmi.nope", b"501")
    for name in (b"mmi.services", b"mmi.workers", b"mmi.stats", b"mmi.broker"):
        client.request(name, b"", ttl=1, options=b'{"wait":false,"key":1}')
        *head, answer = client.recv()
        assert head == [*client.head, b"\x03", b"%d" % client.number]
        assert isinstance(json.loads(answer), dict)
    assert "X1" in json.loads(bench.mmi(b"mmi.broker", b""))["dialects"]["client"]
    (row,) = json.loads(bench.mmi(b"mmi.workers", b"echo"))["workers"]
    assert row["protocol"] == "X1"
    intruder = bench.x1_worker()
    intruder.ready(b"mmi.service")
    intruder.disconnected()
    worker.nothing()


def test_a_number_that_is_in_use_cannot_be_used_for_mmi(bench: Bench) -> None:
    client = bench.x1_client()
    client.request(b"nobody", b"")
    client.request(b"mmi.service", b"nobody", number=client.number)
    assert client.error(b"400") == "malformed: number-in-use"
    client.nothing()
    assert bench.stats()["queued"] == 1
