"""X1: numbered requests, options, every dialect's clients with every dialect's workers (docs/x1.md)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.peers import (
    BatchClient,
    BatchWorker,
    Bench,
    Client,
    EnvelopedX1Worker,
    OldClient,
    OldWorker,
    Worker,
    X1Client,
    X1Worker,
)

Start = Callable[..., Bench]

each_client = pytest.mark.parametrize("client_kind", [OldClient, Client, X1Client, BatchClient])
each_worker = pytest.mark.parametrize("worker_kind", [OldWorker, Worker, X1Worker, EnvelopedX1Worker, BatchWorker])


def test_the_layouts_of_x1(bench: Bench) -> None:
    client, worker = bench.peer(), bench.peer()
    worker.send(b"MDPWX1", b"\x01", b"echo", b'{"credit":2,"name":"echo","host":"here","pid":7,"version":"1"}')
    worker.sync()

    def given() -> tuple[bytes, list[bytes]]:
        message = worker.recv()
        assert [*message[:2], message[3]] == [b"MDPWX1", b"\x02", b""]
        return message[2], message[4:]

    client.send(b"1", b"", b"MDPCX1", b"\x01", b"echo", b'{"mine":1}', b"hello", b"", b"3")
    address, told = given()
    assert told == [b'{"mine":1}', b"hello", b"", b"3"]
    worker.send(b"MDPWX1", b"\x05")
    worker.send(b"MDPWX1", b"\x03", address, b"", b"half", b"")
    assert client.recv() == [b"1", b"", b"MDPCX1", b"\x02", b"echo", b"half", b""]
    worker.send(b"MDPWX1", b"\x04", address, b"", b"world", b"")
    assert client.recv() == [b"1", b"", b"MDPCX1", b"\x03", b"echo", b"world", b""]
    client.send(b"2", b"", b"MDPCX1", b"\x01", b"echo", b"", b"again")
    address, told = given()
    assert told == [b"", b"again"]
    worker.send(b"MDPWX1", b"\x07", address, b"", b"422", b"no good", b"\x00detail")
    assert client.recv() == [b"2", b"", b"MDPCX1", b"\x04", b"echo", b"422", b"no good", b"\x00detail"]
    client.send(b"3", b"", b"MDPCX1", b"\x01", b"echo", b"", b"once more")
    address, told = given()
    assert told == [b"", b"once more"]
    worker.send(b"MDPWX1", b"\x0a", b"0")
    worker.send(b"MDPWX1", b"\x0b", address, b"")
    worker.nothing()
    worker.send(b"MDPWX1", b"\x0a", b"1")
    again, told = given()
    assert again != address
    assert told == [b"", b"once more"]
    client.send(b"3", b"", b"MDPCX1", b"\x05", b"echo")
    assert client.recv() == [b"3", b"", b"MDPCX1", b"\x04", b"echo", b"499", b"cancelled"]
    assert worker.recv() == [b"MDPWX1", b"\x08", again, b""]
    worker.send(b"MDPWX1", b"\x07", again, b"", b"499", b"")
    client.send(b"", b"MDPCX1", b"\x06")
    assert client.recv() == [b"", b"MDPCX1", b"\x06"]
    worker.send(b"MDPWX1", b"\x06")
    assert worker.recv() == [b"MDPWX1", b"\x06"]
    worker.nothing()
    client.nothing()
    assert bench.status(b"echo") == b"404"


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


ENVELOPES: dict[type[Client], list[list[bytes]]] = {
    OldClient: [[b""], [b"id", b""]],
    Client: [[], [b""], [b"id", b"via", b""]],
    X1Client: [
        [b"1", b""],
        [b"\x00", b""],
        [b"x" * 255, b""],
        [b"7", b"amy", b"via", b"MDPCX1", b""],
        [*[b"%d" % at for at in range(15)], b""],
    ],
}
HEADS: dict[type[Client], tuple[bytes, list[bytes], list[bytes], list[bytes]]] = {
    # what a request has before its service and after it, and what PARTIAL and FINAL begin with
    OldClient: (b"MDPC01", [], [b"MDPC01"], [b"MDPC01"]),
    Client: (b"MDPC02", [b"\x01"], [b"MDPC02", b"\x02"], [b"MDPC02", b"\x03"]),
    X1Client: (b"MDPCX1", [b"\x01"], [b"MDPCX1", b"\x02"], [b"MDPCX1", b"\x03"]),
}


@pytest.mark.parametrize(
    ("client_kind", "envelope"), [(kind, each) for kind, some in ENVELOPES.items() for each in some], ids=str
)
@each_worker
def test_every_envelope_comes_back(
    bench: Bench, client_kind: type[Client], worker_kind: Callable[..., Any], envelope: list[bytes]
) -> None:
    peer, worker = bench.peer(), bench.connect(worker_kind)
    worker.ready(b"echo")
    worker.sync()
    header, command, partial, final = HEADS[client_kind]
    peer.send(*envelope, header, *command, b"echo", *([b""] if client_kind is X1Client else []), b"hello")
    address = worker.work(b"hello")
    streams = worker_kind is not OldWorker and client_kind is not OldClient
    if streams:
        worker.partial(address, b"1")
        assert peer.recv() == [*envelope, *partial, b"echo", b"1"]
    worker.final(address, b"2")
    assert peer.recv() == [*envelope, *final, b"echo", b"2"]
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
    for name in workers:
        client.request(name, b"hello", number=b"for " + name)
    addresses = {name: worker.work(b"hello") for name, worker in workers.items()}
    for name in (b"three", b"one", b"two"):
        workers[name].partial(addresses[name], b"part of " + name)
        client.partial(name, b"part of " + name, number=b"for " + name)
    for name in (b"two", b"three", b"one"):
        workers[name].final(addresses[name], b"from " + name)
        client.final(name, b"from " + name, number=b"for " + name)
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
        client.final(b"echo", b"reply", number=b"%d" % number)
        if number <= 96:
            busy.append((worker, worker.work(b"hello")))
    client.nothing()


def test_numbers_are_separate_for_each_connection(bench: Bench) -> None:
    amy, bob, worker = bench.x1_client(), bench.x1_client(), bench.x1_worker(b"echo")
    amy.request(b"echo", b"from amy", number=b"1")
    address = worker.work(b"from amy")
    bob.request(b"echo", b"from bob", number=b"1")
    bob.sync()
    bob.cancel(b"other", number=b"1")  # not even what is wrong with it concerns amy
    assert bob.error(b"other", b"400", number=b"1") == "malformed: unknown-number"
    worker.final(address, b"to amy")
    amy.final(b"echo", b"to amy")
    worker.final(worker.work(b"from bob"), b"to bob")
    bob.final(b"echo", b"to bob")


def test_all_frames_of_the_number_are_compared(bench: Bench) -> None:
    client = bench.x1_client()
    numbers: list[Any] = [(b"1", b"amy"), (b"1", b"bob"), b"1", (b"amy", b"1"), (b"1amy",)]
    for number in numbers:
        client.request(b"echo", b"hello", number=number)
    client.nothing()
    worker = bench.x1_worker(b"echo")
    # What stands before the last frame of a number is a route through proxies, so these are three clients in turns.
    for at in (0, 2, 3, 1, 4):
        worker.final(worker.work(b"hello"), b"world")
        client.final(b"echo", b"world", number=numbers[at])


def test_a_number_may_be_used_again_after_the_requests_end(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    for _ in range(3):
        client.request(b"echo", b"hello", number=b"1")
        address = worker.work(b"hello")
        worker.final(address, b"world")
        client.final(b"echo", b"world")
        client.request(b"nobody", b"", number=b"1", options=b'{"wait":false}')
        client.error(b"nobody", b"404")
        client.request(b"mmi.service", b"echo", number=b"1")
        client.final(b"mmi.service", b"200")
        client.request(b"echo", b"hello", number=b"1")
        worker.error(worker.work(b"hello"), b"500", b"no good")
        client.error(b"echo", b"500", b"no good")


def test_one_connection_may_speak_all_dialects(bench: Bench) -> None:
    peer, worker = bench.peer(), bench.x1_worker(b"echo")
    asked: list[tuple[list[bytes], list[bytes]]] = [
        ([b"1", b"", b"MDPCX1", b"\x01", b"echo", b""], [b"1", b"", b"MDPCX1", b"\x03", b"echo"]),
        ([b"MDPC02", b"\x01", b"echo"], [b"MDPC02", b"\x03", b"echo"]),
        ([b"1", b"", b"MDPC02", b"\x01", b"echo"], [b"1", b"", b"MDPC02", b"\x03", b"echo"]),
        ([b"", b"MDPC01", b"echo"], [b"", b"MDPC01", b"echo"]),
    ]
    for at, (request, _) in enumerate(asked):
        peer.send(*request, b"%d" % at)
    answered = set()
    for _ in asked:  # in whatever order: the one with an envelope is another client, which takes its turn
        address, _, (at,) = worker.any_request()
        worker.final(address, b"world")
        assert peer.recv() == [*asked[int(at)][1], b"world"]
        answered.add(at)
    assert len(answered) == len(asked)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────

OPTIONS = [
    b"",
    b"{}",
    b' {\n"a" : 1 } ',
    b'{"ttl":60000}',
    b'{"ttl":60000.5}',
    b'{"ttl":null}',
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
    client.request(b"echo", b"hello", options=b'{"ttl":60000,"headers":{"a":"b"}}')
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")


def test_a_worker_gets_the_rest_of_the_ttl(bench: Bench) -> None:
    client = bench.x1_client()
    client.request(b"echo", b"hello", options=b'{"ttl":60000,"headers":{"a":"\xc3\xa9"},"key":[1]}')
    client.request(b"echo", b"hello", options=b' {"key":1}')  # one without is left as it is
    client.sync()
    worker = bench.x1_worker(b"echo")
    address, options = worker.request(b"hello")
    told = json.loads(options)
    assert 0 < told.pop("ttl") <= 60000
    assert told == {"headers": {"a": "é"}, "key": [1]}
    worker.final(address, b"world")
    worker.work(b"hello", options=b' {"key":1}')


@pytest.mark.parametrize("filler", ["é", "\x7f", '\\"', "\\u00e9"])
def test_options_may_grow_when_they_are_rewritten(bench: Bench, filler: str) -> None:
    head, tail = '{"ttl":60000,"k":"', '"}'
    text = filler * ((65535 - len(head) - len(tail)) // len(filler.encode()))
    client = bench.x1_client()
    client.request(b"echo", b"hello", options=f"{head}{text}{tail}".encode())
    client.sync()
    worker = bench.x1_worker(b"echo")
    address, options = worker.request(b"hello")
    assert json.loads(options)["k"] == json.loads(f'"{text}"', strict=False)
    worker.final(address, b"world")
    client.final(b"echo", b"world")


def test_the_second_worker_is_told_the_attempt(bench: Bench) -> None:
    client = bench.x1_client()
    client.request(b"echo", b"hello", options=b'{"key":"x"}')
    client.sync()
    for attempt in (1, 2, 3):
        worker = bench.x1_worker(b"echo")
        address, options = worker.request(b"hello")
        assert json.loads(options) == ({"key": "x"} if attempt == 1 else {"key": "x", "attempt": attempt})
        if attempt < 3:
            worker.break_rules()
    worker.final(address, b"world")
    client.final(b"echo", b"world")


@each_client
@pytest.mark.parametrize("first_kind", [OldWorker, Worker, X1Worker, EnvelopedX1Worker, BatchWorker])
def test_the_attempt_is_counted_across_dialects(
    bench: Bench, client_kind: Callable[..., Any], first_kind: Callable[..., Any]
) -> None:
    client, first = bench.connect(client_kind), bench.connect(first_kind)
    first.ready(b"echo")
    first.sync()
    client.request(b"echo", b"hello")
    first.work(b"hello")
    first.break_rules()
    second = bench.x1_worker(b"echo")
    second.final(second.work(b"hello", options=b'{"attempt":2}'), b"world")
    client.final(b"echo", b"world")


def test_a_request_with_wait_false_waits_for_a_busy_worker(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"1")
    address = worker.work(b"1")
    client.request(b"echo", b"2", options=b'{"wait":false}')
    client.nothing()
    worker.final(address, b"done")
    worker.final(worker.work(b"2", options=b'{"wait":false}'), b"done")
    client.final(b"echo", b"done", number=b"1")
    client.final(b"echo", b"done", number=b"2")


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
        worker.final(message[2], b"done")
    assert served <= 2
    worker.final(message[2], b"at once")
    modest.final(b"echo", b"at once")


def test_numbered_requests_of_a_client_keep_their_order(bench: Bench) -> None:
    client = bench.x1_client()
    for number in range(1, 21):
        client.request(b"late", b"%d" % number)
    client.sync()
    worker = bench.x1_worker(b"late")
    for number in range(1, 21):
        worker.final(worker.work(b"%d" % number), b"done")
        client.final(b"late", b"done", number=b"%d" % number)


def test_mmi_in_x1(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    for service, status in ((b"echo", b"200"), (b"nobody", b"404")):
        client.request(b"mmi.service", service)
        client.final(b"mmi.service", status)
    client.request(b"mmi.nope", b"")
    client.final(b"mmi.nope", b"501")
    for name in (b"mmi.services", b"mmi.workers", b"mmi.stats", b"mmi.broker"):
        client.request(name, b"", options=b'{"ttl":0,"wait":false,"key":1}')
        *head, answer = client.recv()
        assert head == [*client.envelope(), b"MDPCX1", b"\x03", name]
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
    assert client.error(b"mmi.service", b"400") == "malformed: number-in-use"
    client.nothing()
    assert bench.stats()["queued"] == 1
