"""X1: numbered requests, options, every dialect's clients with every dialect's workers (docs/reference/x1.md)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.peers import Bench, Client, OldClient, OldWorker, Worker, X1Client, X1Worker, body_of, record, request_of

Start = Callable[..., Bench]

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


ENVELOPES: dict[bytes, list[list[bytes]]] = {
    b"MDPC01": [[b""], [b"id", b""]],
    b"MDPC02": [[], [b""], [b"id", b"via", b""]],
    b"MDPCX1": [
        [],
        [b""],
        [b"\x00", b""],
        [b"x" * 255, b""],
        [b"7", b"MDPCX1", b""],
        [*[b"%d" % at for at in range(15)], b""],
    ],
}


FRAMES: dict[bytes, tuple[list[bytes], list[bytes], list[bytes]]] = {
    # what follows the header in a REQUEST, a PARTIAL and a FINAL
    b"MDPC01": ([b"echo", b"hello"], [], [b"echo", b"2"]),
    b"MDPC02": ([b"\x01", b"echo", b"hello"], [b"\x02", b"echo", b"1"], [b"\x03", b"echo", b"2"]),
    b"MDPCX1": (
        [b"\x09", request_of(7, b"echo", b"hello")],
        [b"\x09", record(2, 7, body_of(b"1"))],
        [b"\x09", record(3, 7, body_of(b"2"))],
    ),
}


@pytest.mark.parametrize(
    ("header", "envelope"), [(header, each) for header, some in ENVELOPES.items() for each in some], ids=str
)
@each_worker
def test_every_envelope_comes_back(
    bench: Bench, header: bytes, worker_kind: Callable[..., Any], envelope: list[bytes]
) -> None:
    peer, worker = bench.peer(), bench.connect(worker_kind)
    worker.ready(b"echo")
    worker.sync()
    request, partial, final = FRAMES[header]
    peer.send(*envelope, header, *request)
    address = worker.work(b"hello")
    if worker_kind is not OldWorker and partial:
        worker.partial(address, b"1")
        assert peer.recv() == [*envelope, header, *partial]
    worker.final(address, b"2")
    assert peer.recv() == [*envelope, header, *final]
    peer.nothing()


def test_workers_of_all_dialects_serve_one_service(bench: Bench) -> None:
    workers = [bench.old_worker(b"echo"), bench.worker(b"echo"), bench.x1_worker(b"echo")]
    for client in (bench.old_client(), bench.client(), bench.x1_client()):
        for worker in workers:
            client.request(b"echo", b"hello")
            worker.final(worker.work(b"hello"), b"world")
            client.final(b"echo", b"world")


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_many_requests_over_one_connection_each_with_its_reply(bench: Bench) -> None:
    client = bench.x1_client()
    workers = {name: bench.x1_worker(name) for name in (b"one", b"two", b"three")}
    for number, name in enumerate(workers):
        client.request(name, b"hello", number=number)
    held = [(worker, worker.work(b"hello")) for worker in workers.values()]
    for number in (2, 0, 1):
        worker, address = held[number]
        worker.partial(address, b"part %d" % number)
        client.partial(b"", b"part %d" % number, number=number)
    for number in (1, 2, 0):
        worker, address = held[number]
        worker.final(address, b"end %d" % number)
        client.final(b"", b"end %d" % number, number=number)
    client.nothing()


def test_a_hundred_requests_to_one_service(bench: Bench) -> None:
    client, workers = bench.x1_client(), [bench.x1_worker(b"echo") for _ in range(4)]
    for _ in range(100):
        client.request(b"echo", b"hello")
    client.sync()
    assert bench.stats()["queued"] == 96
    busy = [(worker, worker.work(b"hello")) for worker in workers]
    for number in range(1, 101):
        worker, address = busy.pop(0)
        worker.final(address, b"reply")
        client.final(b"echo", b"reply", number=number)
        if number <= 96:
            busy.append((worker, worker.work(b"hello")))
    client.nothing()


def test_numbers_are_separate_for_each_connection(bench: Bench) -> None:
    amy, bob, worker = bench.x1_client(), bench.x1_client(), bench.x1_worker(b"echo")
    amy.request(b"echo", b"from amy", number=1)
    address = worker.work(b"from amy")
    bob.request(b"echo", b"from bob", number=1)
    bob.sync()
    worker.final(address, b"to amy")
    amy.final(b"echo", b"to amy")
    worker.final(worker.work(b"from bob"), b"to bob")
    bob.final(b"echo", b"to bob")


def test_numbers_are_separate_for_each_envelope(bench: Bench) -> None:
    peer, worker = bench.peer(), bench.x1_worker(b"echo")
    envelopes: list[list[bytes]] = [[b"1", b"amy"], [b"1", b"bob"], [b"1amy"], [b"1"], []]
    heads = [[*envelope, b"", b"MDPCX1", b"\x09"] for envelope in envelopes]
    for head in heads:
        peer.send(*head, request_of(1, b"echo", b"hello"))
    for head in heads:  # clients that take turns
        worker.final(worker.work(b"hello"), b"world")
        assert peer.recv() == [*head, record(3, 1, body_of(b"world"))]


@pytest.mark.parametrize("number", [0, 1, 2**63, 2**64 - 1])
def test_a_number_has_64_bits(bench: Bench, number: int) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello", number=number)
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    client.cancel()
    client.nothing()


def test_a_number_may_be_used_again_after_the_requests_end(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    for _ in range(3):
        client.request(b"echo", b"hello", number=1)
        address = worker.work(b"hello")
        worker.final(address, b"world")
        client.final(b"echo", b"world")
        client.request(b"nobody", b"", number=1, options=b'{"wait":false}')
        client.error(b"404")
        client.request(b"mmi.service", b"echo", number=1)
        client.final(b"mmi.service", b"200")
        client.request(b"echo", b"hello", number=1)
        worker.error(worker.work(b"hello"), b"500", b"no good")
        client.error(b"500", b"no good")


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


@pytest.mark.parametrize("worker_kind", [OldWorker, Worker])
def test_workers_of_other_dialects_get_no_options(bench: Bench, worker_kind: Callable[..., Any]) -> None:
    client, worker = bench.x1_client(), bench.connect(worker_kind)
    worker.ready(b"echo")
    worker.sync()
    client.request(b"echo", b"hello", ttl=60_000, options=b'{"headers":{"a":"b"}}')
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")


def test_a_worker_gets_the_rest_of_the_ttl(bench: Bench) -> None:
    client = bench.x1_client()
    client.request(b"echo", b"hello", ttl=60_000)
    client.sync()
    worker = bench.x1_worker(b"echo", credit=2)
    client.request(b"echo", b"hello")
    assert 50_000 < worker.told()[1] <= 60_000
    assert worker.told()[1] == 0  # without one, there is none


def test_a_record_counts_attempts_up_to_255(start: Start) -> None:
    bench = start(max_attempts=1000)
    client = bench.x1_client()
    client.request(b"echo", b"hello")
    client.sync()
    worker = bench.x1_worker()
    for attempt in range(1, 259):
        worker.ready(b"echo")
        worker.work(b"hello", attempt=min(attempt, 255))
        worker.break_rules()


@each_client
@each_worker
def test_the_attempt_is_counted_across_dialects(
    bench: Bench, client_kind: Callable[..., Any], worker_kind: Callable[..., Any]
) -> None:
    client, first = bench.connect(client_kind), bench.connect(worker_kind)
    first.ready(b"echo")
    first.sync()
    client.request(b"echo", b"hello")
    first.work(b"hello")
    first.break_rules()
    second = bench.x1_worker(b"echo")
    second.final(second.work(b"hello", attempt=2), b"world")
    client.final(b"echo", b"world")


def test_a_request_with_wait_false_waits_for_a_busy_worker(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"1")
    address = worker.work(b"1")
    client.request(b"echo", b"2", options=b'{"wait":false}')
    client.nothing()
    worker.final(address, b"done")
    worker.final(worker.work(b"2", options=b'{"wait":false}'), b"done")
    client.final(b"echo", b"done", number=1)
    client.final(b"echo", b"done", number=2)


# ── queues and the broker's own answers ──────────────────────────────────────────────────────────────────────────────


def test_ten_thousand_numbered_requests_of_one_do_not_delay_another(bench: Bench) -> None:
    greedy, modest = bench.x1_client(), bench.x1_client()
    for number in range(10_000):
        greedy.request(b"echo", b"greedy %d" % number)
    greedy.sync()
    modest.request(b"echo", b"modest")
    modest.sync()
    assert bench.stats()["queued"] == 10_001
    worker, served = bench.x1_worker(b"echo"), 0
    while (message := worker.command())[-1] != b"modest":
        served += 1
        worker.final(message[3], b"done")
    assert served <= 2
    worker.final(message[3], b"at once")
    modest.final(b"echo", b"at once")


def test_numbered_requests_of_a_client_keep_their_order(bench: Bench) -> None:
    client = bench.x1_client()
    for number in range(1, 21):
        client.request(b"late", b"%d" % number)
    client.sync()
    worker = bench.x1_worker(b"late")
    for number in range(1, 21):
        worker.final(worker.work(b"%d" % number), b"done")
        client.final(b"late", b"done", number=number)


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
