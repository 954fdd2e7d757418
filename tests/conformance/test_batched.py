"""The batched form of X1, packed by hand: its bytes, in all four directions, and what is wrong with them (C43)."""

import json
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from support.peers import (
    ATTACHED,
    BatchClient,
    BatchWorker,
    Bench,
    Client,
    Message,
    X1Worker,
    body_of,
    ready_of,
    record,
    records_of,
    request_of,
    take_body,
)

Start = Callable[..., Bench]

CLIENT = [b"", b"MDPCX1", b"\x09"]
WORKER = [b"", b"MDPWX1", b"\x09"]


def address_in(message: Message) -> int:
    """The address of the first REQUEST in a batched message to a worker."""
    (address,) = struct.unpack_from(">Q", message[3], 5)
    assert isinstance(address, int)
    return address


# ── the bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_layouts_of_the_batched_form(bench: Bench) -> None:
    client, worker = bench.peer(), bench.peer()
    # READY: size 9+4+1+4+2+2, command 1, id 0, credit 2, service, options
    worker.send(*WORKER, b"\0\0\0\x16\x01\0\0\0\0\0\0\0\0\0\0\0\x02\x04echo\0\x02{}")
    worker.sync()
    # REQUEST: size 9+4+1+4+2+7+2+4+5+4, command 1, number, ttl 0, service, options, two frames
    client.send(
        *CLIENT,
        b"\0\0\0\x2a" b"\x01" b"\0\0\0\0\0\0\0\x07" b"\0\0\0\0" b"\x04echo" b'\0\x07{"a":1}'
        b"\0\x02" b"\0\0\0\x05hello" b"\0\0\0\0",
    )  # fmt: skip
    message = worker.recv()
    address = message[3][5:13]
    # REQUEST to a worker: size 9+4+1+2+7+2+4+5+4, command 2, address, ttl 0, attempt 1, options, two frames
    assert message == [
        *WORKER,
        b"\0\0\0\x26" b"\x02" + address + b"\0\0\0\0" b"\x01" b'\0\x07{"a":1}'
        b"\0\x02" b"\0\0\0\x05hello" b"\0\0\0\0",
    ]  # fmt: skip
    # PARTIAL and FINAL, from the worker with commands 3 and 4, to the client with 2 and 3
    worker.send(*WORKER, b"\0\0\0\x13\x03" + address + b"\0\x01\0\0\0\x04half")
    assert client.recv() == [*CLIENT, b"\0\0\0\x13\x02\0\0\0\0\0\0\0\x07\0\x01\0\0\0\x04half"]
    worker.send(*WORKER, b"\0\0\0\x14\x04" + address + b"\0\x01\0\0\0\x05world")
    assert client.recv() == [*CLIENT, b"\0\0\0\x14\x03\0\0\0\0\0\0\0\x07\0\x01\0\0\0\x05world"]
    # ERROR: a code, a text, and a body that is the detail, if there is one; here 422, from a worker with command 7
    again = b"\0\0\0\x1b\x01\0\0\0\0\0\0\0\x08\0\0\0\0\x04echo\0\0\0\x01\0\0\0\0"
    client.send(*CLIENT, again[:3] + bytes([len(again) - 4]) + again[4:])
    address = struct.pack(">Q", address_in(worker.recv()))
    worker.send(*WORKER, b"\0\0\0\x16\x07" + address + b"\x01\xa6\0\x07no good\0\0")
    assert client.recv() == [*CLIENT, b"\0\0\0\x16\x04\0\0\0\0\0\0\0\x08\x01\xa6\0\x07no good\0\0"]
    # CANCEL: nothing but the id, from a client with command 5, to a worker with 8
    client.send(*CLIENT, request_of(9, b"echo", b"once more"))
    address = struct.pack(">Q", address_in(worker.recv()))
    client.send(*CLIENT, b"\0\0\0\x09\x05\0\0\0\0\0\0\0\x09")
    assert client.recv() == [
        *CLIENT, b"\0\0\0\x18" b"\x04" b"\0\0\0\0\0\0\0\x09" b"\x01\xf3" b"\0\x09cancelled" b"\0\0"
    ]  # fmt: skip
    assert worker.recv() == [*WORKER, b"\0\0\0\x09\x08" + address]
    # CREDIT and RELEASE, with commands 0A and 0B
    worker.send(*WORKER, b"\0\0\0\x0d\x0a\0\0\0\0\0\0\0\0\0\0\0\0")
    worker.send(*WORKER, b"\0\0\0\x09\x0b" + address)
    worker.nothing()
    # HEARTBEAT is a bare header; DISCONNECT is framed
    client.send(b"", b"MDPCX1")
    assert client.recv() == [b"", b"MDPCX1"]
    worker.send(b"", b"MDPWX1")
    worker.send(b"", b"MDPWX1", b"\x06")
    assert worker.recv() == [b"", b"MDPWX1", b"\x06"]
    worker.nothing()
    assert bench.stats()["invalid"] == {}


def test_the_batched_form_works_without_the_empty_frame(bench: Bench) -> None:
    # which only proxies need
    client, worker = bench.peer(), bench.peer()
    worker.send(b"MDPWX1", b"\x09", ready_of(b"echo", 1))
    worker.sync()
    client.send(b"MDPCX1", b"\x09", request_of(1, b"echo", b"hello"))
    message = worker.recv()
    assert message[:2] == [b"MDPWX1", b"\x09"]
    ((_, address, _),) = records_of(message, 0)
    worker.send(b"MDPWX1", b"\x09", record(4, address, body_of(b"world")))
    assert client.recv() == [b"MDPCX1", b"\x09", record(3, 1, body_of(b"world"))]


def test_many_records_in_one_message(bench: Bench) -> None:
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=100)
    client.say(*[request_of(number, b"echo", b"%d" % number) for number in range(1, 101)])
    addresses = [worker.work(b"%d" % number) for number in range(1, 101)]
    worker.say(*[record(4, int(address), body_of(b"done", b"")) for address in addresses])
    for number in range(1, 101):
        client.final(b"echo", b"done", b"", number=b"%d" % number)
    client.nothing()


def test_each_record_is_a_command_of_its_own(bench: Bench) -> None:
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=3)
    client.say(
        request_of(1, b"echo", b"one"),
        request_of(2, b"nobody", b"two", options=b'{"wait":false}'),
        request_of(3, b"echo", b"three"),
        record(5, 3),
        request_of(4, b"mmi.service", b"echo"),
        request_of(5, b"echo", b"five", ttl=60_000),
    )
    client.error(b"nobody", b"404", number=b"2")
    client.error(b"echo", b"499", number=b"3")  # it never went to the worker
    client.final(b"mmi.service", b"200", number=b"4")
    first = worker.work(b"one")
    last, ttl, attempt, options, body = worker.told()
    assert (0 < ttl <= 60_000, attempt, options, body) == (True, 1, b"", [b"five"])
    worker.say(
        record(3, int(first), body_of(b"begun")),
        record(10, 0, struct.pack(">I", 1)),
        record(11, int(last)),
        record(4, int(first), body_of(b"done")),
    )
    client.partial(b"echo", b"begun", number=b"1")
    client.final(b"echo", b"done", number=b"1")
    assert worker.told()[4] == [b"five"]
    worker.nothing()
    client.nothing()


def test_a_number_can_be_requested_and_cancelled_repeatedly_in_one_message(bench: Bench) -> None:
    # a service is forgotten with its last request, and known again with the next, however fast that is
    client = bench.batch_client()
    client.say(*[each for number in range(1, 10) for each in (request_of(number, b"late", b""), record(5, number))])
    client.say(request_of(10, b"late", b"hello"))
    for number in range(1, 10):
        client.error(b"late", b"499", b"cancelled", number=b"%d" % number)
    client.say(request_of(11, b"late", b""), record(5, 11), request_of(12, b"late", b"world"))
    client.error(b"late", b"499", b"cancelled", number=b"11")
    client.nothing()
    worker = bench.batch_worker(b"late", credit=9)
    worker.work(b"hello")
    worker.work(b"world")
    worker.nothing()


@pytest.mark.parametrize("number", [0, 1, 2**63, 2**64 - 1])
def test_a_number_has_64_bits(bench: Bench, number: int) -> None:
    client, worker = bench.batch_client(), bench.batch_worker(b"echo")
    client.request(b"echo", b"hello", number=b"%d" % number)
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    client.cancel(b"echo")
    client.nothing()


# ── options and ttl ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "ttl", "told"),
    [
        (b"", 60_000, b""),
        (b'{"ttl":60000}', 0, b""),
        (b'{"ttl":60000,"a":1}', 0, b'{"a":1}'),
        (b'{"ttl":1}', 60_000, b""),  # the one beside the options goes before
        (b' {"a" : 1}', 60_000, b' {"a" : 1}'),
        (b'{"wait":false}', 60_000, b'{"wait":false}'),
    ],
)
def test_the_ttl_of_a_record_is_passed_on(bench: Bench, options: bytes, ttl: int, told: bytes) -> None:
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=2)
    client.request(b"echo", b"hello", options=options, ttl=ttl)
    _, left, attempt, came, _ = worker.told()
    assert 50_000 < left <= 60_000
    assert (attempt, came) == (1, told)


def test_a_ttl_from_the_batched_form_reaches_a_framed_worker(bench: Bench) -> None:
    client, worker = bench.batch_client(), bench.x1_worker(b"echo", credit=2)
    client.request(b"echo", b"hello", ttl=4_000_000_000)
    client.request(b"echo", b"hello", ttl=4_000_000_000, options=b'{"a":1}')
    for more in ({}, {"a": 1}):
        told = json.loads(worker.request(b"hello")[1])
        assert 3.9e9 < told.pop("ttl") <= 4e9
        assert told == more


def test_a_ttl_too_large_for_a_record_stays_in_the_options(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.batch_worker(b"echo")
    client.request(b"echo", b"hello", options=b'{"ttl":1e14}')
    _, ttl, _, options, _ = worker.told()
    assert ttl == 0
    assert 9e13 < json.loads(options)["ttl"] <= 1e14


def test_a_request_whose_ttl_passes_is_dropped(bench: Bench) -> None:
    client, worker = bench.batch_client(), bench.batch_worker(b"echo")
    client.request(b"echo", b"hello", ttl=50)
    address = worker.work(b"hello")
    assert "held it" in client.error(b"echo", b"408")
    worker.cancelled(address)
    client.request(b"echo", b"waits", ttl=1)
    assert "all busy" in client.error(b"echo", b"408")
    worker.error(address, b"499", b"")
    worker.nothing()


def test_a_record_counts_attempts_up_to_255(start: Start) -> None:
    bench = start(max_attempts=1000)
    client = bench.batch_client()
    client.request(b"echo", b"hello")
    client.sync()
    worker = bench.batch_worker()
    for attempt in range(1, 259):
        worker.ready(b"echo")
        assert worker.told()[2] == min(attempt, 255)
        worker.break_rules()


# ── large frames ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [8191, 8192, 8193, 65_535, 65_536, 1_000_000])
def test_large_frames_are_attachments(bench: Bench, size: int) -> None:
    client, worker = bench.peer(), bench.peer()
    worker.send(*WORKER, ready_of(b"echo", 1))
    worker.sync()
    large, other = b"x" * size, b"y" * (size + 1)
    client.send(*CLIENT, request_of(1, b"echo", b"small", None, b"", None), large, other)
    message = worker.recv()
    attached = [large] if size >= 8192 else []
    attached += [other] if size + 1 >= 8192 else []
    assert message[4:] == attached
    ((command, address, rest),) = records_of(message, 1)
    assert command == 2
    assert take_body(rest[7:], deque(attached)) == [b"small", large, b"", other]
    # a small frame may be attached as well, and a large one be in the record
    worker.send(*WORKER, record(4, address, body_of(None, large, None)), b"small", b"")
    message = client.recv()
    assert message[:3] == CLIENT
    assert message[4:] == ([large] if size >= 8192 else [])
    assert message[3] == record(3, 1, body_of(b"small", None if size >= 8192 else large, b""))


def test_attachments_of_several_records_come_in_order(bench: Bench) -> None:
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=9)
    frames = [bytes([65 + at]) * 9000 for at in range(6)]
    client.say(
        request_of(1, b"echo", None, b"small", None),
        request_of(2, b"echo", b"none"),
        request_of(3, b"nobody", None, options=b'{"wait":false}'),
        request_of(4, b"echo", None),
        request_of(5, b"echo", None, None),
        attachments=tuple(frames),
    )
    client.error(b"nobody", b"404", number=b"3")
    bodies = [[frames[0], b"small", frames[1]], [b"none"], [frames[3]], [frames[4], frames[5]]]
    for number, body in zip((b"1", b"2", b"4", b"5"), bodies, strict=True):
        worker.final(worker.work(*body), *body)
        client.final(b"echo", *body, number=number)


@pytest.mark.parametrize("kind", ["x1_worker", "worker", "old_worker"])
def test_large_frames_between_batched_and_framed_peers(bench: Bench, kind: str) -> None:
    client, worker = bench.batch_client(), getattr(bench, kind)(b"echo")
    large = b"x" * 20_000
    client.say(request_of(1, b"echo", None, b"small"), attachments=(large,))
    worker.final(worker.work(large, b"small"), b"", large)
    client.final(b"echo", b"", large, number=b"1")


def test_a_body_with_too_many_frames_for_a_record_is_sent_framed(start: Start) -> None:
    bench = start(max_frames=100_000)
    client, worker = bench.client(), bench.batch_worker(b"echo")
    frames = [b"x"] * 70_000
    client.request(b"echo", *frames)
    message = worker.socket.recv_multipart()
    assert message[:3] == [b"", b"MDPWX1", b"\x02"]
    assert message[4:] == [b"", b"", *frames]
    worker.send(b"", b"MDPWX1", b"\x04", message[3], b"", b"done")
    client.final(b"echo", b"done")


# ── how much the broker says in one message ──────────────────────────────────────────────────────────────────────────


def waiting_for_credit(bench: Bench, count: int, body: bytes) -> tuple[BatchClient, Any]:
    """A worker without credit, as a raw peer, and that many requests that wait for it."""
    client, worker = bench.batch_client(), bench.peer()
    worker.send(*WORKER, ready_of(b"echo", 0))
    worker.sync()
    for number in range(1, count + 1):
        client.request(b"echo", body, number=b"%d" % number)
    client.sync()
    assert bench.stats()["queued"] == count
    return client, worker


def test_a_message_to_a_worker_has_at_most_256_records(bench: Bench) -> None:
    client, worker = waiting_for_credit(bench, 600, b"hello")
    worker.send(*WORKER, record(10, 0, struct.pack(">I", 1000)))
    addresses = []
    for count in (256, 256, 88):
        message = worker.recv()
        records = records_of(message, 1)
        assert [command for command, _, _ in records] == [2] * count
        addresses += [address for _, address, _ in records]
    assert len(set(addresses)) == 600
    for begin in range(0, 600, 100):
        some = addresses[begin : begin + 100]
        worker.send(*WORKER, b"".join(record(4, address, body_of(b"done")) for address in some))
    for number in range(1, 601):
        client.final(b"echo", b"done", number=b"%d" % number)


def test_a_message_to_a_client_has_at_most_256_records(bench: Bench) -> None:
    client, worker = bench.peer(), bench.batch_worker(b"echo", credit=600)
    for begin in range(0, 600, 200):
        client.send(*CLIENT, b"".join(request_of(n, b"echo", b"hello") for n in range(begin, begin + 200)))
    addresses = [worker.work(b"hello") for _ in range(600)]
    worker.say(*[record(3, int(address), body_of(b"%d" % at)) for at, address in enumerate(addresses[:256])])
    numbers = []
    while len(numbers) < 256:
        records = records_of(client.recv(), 1)
        assert len(records) <= 256
        numbers += [number for _, number, _ in records]
    assert numbers == list(range(256))


def test_a_message_has_at_most_64_kilobytes_of_records(bench: Bench) -> None:
    _, worker = waiting_for_credit(bench, 100, b"x" * 5000)
    worker.send(*WORKER, record(10, 0, struct.pack(">I", 100)))
    came = 0
    while came < 100:
        message = worker.recv()
        assert len(message[3]) <= 65536
        came += len(records_of(message, 1))
    assert came == 100


def test_attachments_are_split_as_well(bench: Bench) -> None:
    _, worker = waiting_for_credit(bench, 100, b"x" * 100_000)
    worker.send(*WORKER, record(10, 0, struct.pack(">I", 100)))
    came = 0
    while came < 100:
        message = worker.recv()
        records = records_of(message, 1)
        assert message[4:] == [b"x" * 100_000] * len(records)
        assert len(records) == 1 or sum(map(len, message[4:])) <= 1 << 20
        came += len(records)


# ── both forms ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_is_answered_in_the_form_in_which_it_spoke_last(bench: Bench) -> None:
    client, worker = bench.peer(), bench.x1_worker(b"echo", credit=9)
    client.send(b"1", b"", b"MDPCX1", b"\x01", b"echo", b"", b"framed")
    first = worker.work(b"framed")
    client.send(*CLIENT, request_of(2, b"echo", b"batched"))
    second = worker.work(b"batched")
    worker.partial(first, b"a")
    assert client.recv() == [*CLIENT, record(2, 1, body_of(b"a"))]
    client.send(b"3", b"", b"MDPCX1", b"\x01", b"echo", b"", b"framed again")
    third = worker.work(b"framed again")
    worker.final(second, b"b")
    assert client.recv() == [b"2", b"", b"MDPCX1", b"\x03", b"echo", b"b"]
    worker.partial(third, b"c")
    assert client.recv() == [b"3", b"", b"MDPCX1", b"\x02", b"echo", b"c"]
    client.send(*CLIENT, record(5, 3))  # CANCEL is batched, so is the ERROR
    assert client.recv()[:3] == CLIENT
    worker.cancelled(third)
    client.send(b"1", b"", b"MDPCX1", b"\x05", b"echo")
    assert client.recv() == [b"1", b"", b"MDPCX1", b"\x04", b"echo", b"499", b"cancelled"]


def test_a_number_that_is_not_an_integer_is_answered_framed(bench: Bench) -> None:
    client, worker = bench.peer(), bench.x1_worker(b"echo", credit=9)
    numbers = [b"\x00", b"one", b"01", b"-1", b"+1", b" 1", b"18446744073709551616"]
    for number in numbers:
        client.send(number, b"", b"MDPCX1", b"\x01", b"echo", b"", b"hello")
    addresses = [worker.work(b"hello") for _ in numbers]
    client.send(*CLIENT, request_of(1, b"echo", b"hello"))
    worker.final(worker.work(b"hello"), b"world")
    assert client.recv() == [*CLIENT, record(3, 1, body_of(b"world"))]
    for number, address in zip(numbers, addresses, strict=True):
        worker.final(address, b"world")
        assert client.recv() == [number, b"", b"MDPCX1", b"\x03", b"echo", b"world"]


def test_a_worker_is_sent_the_form_in_which_it_spoke_last(bench: Bench) -> None:
    client, worker = bench.client(), bench.peer()
    worker.send(b"", b"MDPWX1", b"\x01", b"echo", b'{"credit":9}')
    worker.sync()
    client.request(b"echo", b"1")
    message = worker.recv()
    first = int(message[3])
    assert message == [b"", b"MDPWX1", b"\x02", b"%d" % first, b"", b"", b"1"]
    worker.send(b"", b"MDPWX1")  # a bare header is of the batched form
    worker.sync()
    client.request(b"echo", b"2")
    message = worker.recv()
    second = address_in(message)
    assert message == [*WORKER, record(2, second, b"\0\0\0\0\x01\0\0" + body_of(b"2"))]
    worker.send(b"", b"MDPWX1", b"\x04", b"%d" % second, b"", b"framed")
    client.final(b"echo", b"framed")
    client.request(b"echo", b"3")
    assert worker.recv()[:3] == [b"", b"MDPWX1", b"\x02"]
    worker.send(*WORKER, record(4, first, body_of(b"batched")))
    client.final(b"echo", b"batched")
    client.request(b"echo", b"4")
    assert worker.recv()[:3] == WORKER


@pytest.mark.parametrize("kind", [X1Worker, BatchWorker])
def test_a_workers_heartbeats_have_its_form(start: Start, kind: Callable[..., Any]) -> None:
    bench = start(heartbeat=0.05, liveness=1000)
    worker = bench.connect(kind)
    worker.ready(b"echo")
    for _ in range(3):
        worker.beaten()


def test_commands_of_one_turn_keep_their_order(bench: Bench) -> None:
    # a framed message to a peer goes after what was said to it before in the batched form
    both = bench.peer()
    both.send(*WORKER, ready_of(b"echo", 5))
    both.sync()
    client = bench.batch_client()
    client.say(*[request_of(number, b"echo", b"%d" % number) for number in range(1, 4)])
    message = both.recv()
    addresses = [address for _, address, _ in records_of(message, 1)]
    both.send(*WORKER, b"".join(record(4, address, body_of(b"done")) for address in addresses))
    both.send(b"", b"MDPWX1", b"\x06")
    for number in range(1, 4):
        client.final(b"echo", b"done", number=b"%d" % number)
    assert both.recv() == [b"", b"MDPWX1", b"\x06"]
    both.nothing()


# ── what is wrong with them (C43) ────────────────────────────────────────────────────────────────────────────────────

LENGTH = struct.Struct(">I")


def longer(packed: bytes, by: int) -> bytes:
    """A record that claims to be longer than it is, or shorter."""
    (size,) = LENGTH.unpack_from(packed)
    return LENGTH.pack(size + by) + packed[4:]


def request_with(rest: bytes) -> bytes:
    return record(1, 2, rest)


HEAD = b"\0\0\0\0\x04echo"

ANSWERED: dict[str, tuple[str, bytes]] = {
    # a record numbered 2 that is answered with ERROR 400; what is before and after it is served
    "an unknown command": ("unknown-command", record(99, 2)),
    "a worker's command": ("unknown-command", record(10, 2, b"\0\0\0\x05")),
    "command 00": ("unknown-command", record(0, 2)),
    "an empty REQUEST": ("bad-record", record(1, 2)),
    "a REQUEST without a service": ("bad-record", request_with(b"\0\0\0\0")),
    "a service longer than the record": ("bad-record", request_with(b"\0\0\0\0\xffecho")),
    "no options": ("bad-record", request_with(HEAD)),
    "options longer than the record": ("bad-record", request_with(HEAD + b"\xff\xff{}")),
    "no count of frames": ("bad-record", request_with(HEAD + b"\0\0")),
    "fewer frames than counted": ("bad-record", request_with(HEAD + b"\0\0\0\x02\0\0\0\x01x")),
    "65,535 frames and none": ("bad-record", request_with(HEAD + b"\0\0\xff\xff")),
    "a frame longer than the record": ("bad-record", request_with(HEAD + b"\0\0\0\x01\0\0\0\x05x")),
    "a frame of 4 GB": ("bad-record", request_with(HEAD + b"\0\0\0\x01\xff\xff\xff\xfex")),
    "more than its body": ("bad-record", request_with(HEAD + b"\0\0\0\x01\0\0\0\x01xmore")),
    "a body without frames": ("no-body", request_with(HEAD + b"\0\0\0\0")),
    "an attachment that is missing": ("bad-record", request_of(2, b"echo", None)),
    "an empty service": ("bad-service-name", request_of(2, b"", b"body")),
    "a service with a line break": ("bad-service-name", request_of(2, b"ec\nho", b"body")),
    "options that are no JSON": ("bad-options", request_of(2, b"echo", b"body", options=b"ttl=5")),
    "options for mmi": ("bad-options", request_of(2, b"mmi.service", b"body", options=b"[]")),
    "a number in use": ("number-in-use", request_of(1, b"echo", b"body")),
    "CANCEL with more": ("bad-record", record(5, 2, b"more")),
    "CANCEL for something unknown": ("unknown-number", record(5, 2)),
}


@pytest.mark.parametrize(("reason", "packed"), ANSWERED.values(), ids=ANSWERED)
def test_c43_an_invalid_record_is_answered_and_the_others_are_served(bench: Bench, reason: str, packed: bytes) -> None:
    # C43
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=9)
    client.say(request_of(1, b"echo", b"before"), packed, request_of(3, b"echo", b"after"))
    number = b"1" if reason == "number-in-use" else b"2"
    assert client.error(b"", b"400", number=number) == f"malformed: {reason}"
    for number, body in ((b"1", b"before"), (b"3", b"after")):
        worker.final(worker.work(body), b"done")
        client.final(b"echo", b"done", number=number)
    client.nothing()
    worker.nothing()
    assert bench.stats()["invalid"] == {reason: 1}


CUT: dict[str, tuple[list[bytes], bytes]] = {
    # where the next record begins is not known any more; those before are served, and a number that was read is told
    "a size beyond the message": ([b"2"], longer(request_of(2, b"echo", b"body"), 1)),
    "a size of 4 GB": ([b"2"], longer(record(5, 2), 0xFFFFFFFF - 9)),
    "a size of 0": ([b"2"], b"\0\0\0\0" + record(5, 2)[4:]),
    "a size of 8": ([b"2"], longer(record(5, 2), -1)),
    "half a head": ([], record(5, 2)[:12]),
    "one byte": ([], b"\0"),
    "only a size": ([], b"\xff\xff\xff\xff"),
}


@pytest.mark.parametrize(("told", "packed"), CUT.values(), ids=CUT)
def test_c43_a_record_whose_size_is_wrong(bench: Bench, told: list[bytes], packed: bytes) -> None:
    # C43
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=9)
    client.say(request_of(1, b"echo", b"before"), packed)
    for number in told:
        assert client.error(b"", b"400", number=number) == "malformed: bad-record"
    worker.final(worker.work(b"before"), b"done")
    client.final(b"echo", b"done", number=b"1")
    client.nothing()
    worker.nothing()
    assert bench.stats()["invalid"] == {"bad-record": 1}
    client.request(b"echo", b"next", number=b"9")  # the next message is read from its beginning
    worker.final(worker.work(b"next"), b"done")
    client.final(b"echo", b"done")


def test_c43_a_size_that_ends_within_another_record(bench: Bench) -> None:
    # C43: whatever is read there, it ends
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=9)
    for by in (-1, -5, -9, 5, 9, 20):
        client.say(
            request_of(1, b"echo", b"before"),
            longer(request_of(2, b"echo", b"body"), by),
            *[request_of(number, b"echo", b"after") for number in range(3, 9)],
        )
        worker.final(worker.work(b"before"), b"done")
        client.sync()
        assert bench.stats()["invalid"]["bad-record"] >= 1
        client = bench.batch_client()
        worker.break_rules()
        worker.ready(b"echo", credit=9)
        worker.sync()
        while worker.waiting:
            worker.recv()
    assert bench.stats()["internal_errors"] == 0


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"attachment"], [b"\0" * 13], [b"\xff" * 1000]], ids=str)
@pytest.mark.parametrize("header", [b"MDPCX1", b"MDPWX1"])
def test_c43_almost_empty_messages(bench: Bench, header: bytes, frames: list[bytes]) -> None:
    # C43
    peer = bench.peer()
    peer.send(b"", header, b"\x09", *frames)
    peer.sync()
    stats = bench.stats()
    assert stats["workers"] == stats["services"] == 0
    assert sum(stats["invalid"].values()) == (0 if frames in ([], [b""]) else 1)


def test_c43_unused_attachments_are_counted_as_invalid(bench: Bench) -> None:
    # C43
    client, worker = bench.batch_client(), bench.batch_worker(b"echo")
    client.say(request_of(1, b"echo", None), attachments=(b"first", b"left over", b"as well"))
    worker.final(worker.work(b"first"), b"done")
    client.final(b"echo", b"done", number=b"1")
    client.nothing()
    assert bench.stats()["invalid"] == {"too-many-frames": 1}


def test_c43_after_an_unreadable_record_attachments_are_not_assigned(bench: Bench) -> None:
    # C43: it is not known which belong to it, and a request must not get another's
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=9)
    client.say(
        request_of(1, b"echo", None),
        record(99, 2, body_of(None)),
        request_of(3, b"echo", None),
        request_of(4, b"echo", b"without"),
        attachments=(b"one", b"two", b"three"),
    )
    assert client.error(b"", b"400", number=b"2") == "malformed: unknown-command"
    assert client.error(b"", b"400", number=b"3") == "malformed: bad-record"
    worker.work(b"one")
    worker.work(b"without")
    worker.nothing()
    client.nothing()


def test_c43_more_records_than_a_message_may_have(bench: Bench) -> None:
    # C43
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=1000)
    client.say(*[request_of(number, b"echo", b"hello") for number in range(1, 259)])
    assert client.error(b"", b"400", number=b"257") == "malformed: bad-record"
    for _ in range(256):
        worker.work(b"hello")
    worker.nothing()
    client.nothing()


@pytest.mark.parametrize(
    ("limits", "body", "attachments", "reason"),
    [
        ({"max_message": 100_000}, [b"x" * 100_001], (), "too-large"),
        ({"max_message": 100_000}, [None], (b"x" * 100_001,), "too-large"),
        ({"max_message": 100_000}, [None, b"x" * 60_000], (b"x" * 60_000,), "too-large"),
        ({"max_frames": 20}, [b"x"] * 21, (), "too-many-frames"),
    ],
)
def test_c43_limits_apply_to_each_record(
    start: Start, limits: dict[str, int], body: list[bytes | None], attachments: tuple[bytes, ...], reason: str
) -> None:
    # C43
    bench = start(**limits)
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=9)
    client.say(
        request_of(1, b"echo", b"before"),
        request_of(2, b"echo", *body),
        request_of(3, b"echo", None),
        attachments=(*attachments, b"after"),
    )
    assert str(next(iter(limits.values()))) in client.error(b"echo", b"413", number=b"2")
    for number, kept in ((b"1", b"before"), (b"3", b"after")):
        worker.final(worker.work(kept), b"done")
        client.final(b"echo", b"done", number=number)
    assert bench.stats()["invalid"] == {reason: 1}


FROM_WORKER: dict[str, tuple[str, Callable[[int], bytes]]] = {
    # what a worker may send between others about a request that it holds, and holds afterwards too
    "an unknown command": ("unknown-command", lambda address: record(99, address)),
    "a client's command": ("unknown-command", lambda address: record(5, address)),
    "HEARTBEAT, which is a bare header": ("unknown-command", lambda address: record(6, address)),
    "an empty FINAL": ("bad-record", lambda address: record(4, address)),
    "a FINAL without frames": ("no-body", lambda address: record(4, address, body_of())),
    "a PARTIAL without frames": ("no-body", lambda address: record(3, address, body_of())),
    "a FINAL with fewer frames": ("bad-record", lambda address: record(4, address, b"\0\x02" b"\0\0\0\0")),
    "a FINAL with more": ("bad-record", lambda address: record(4, address, body_of(b"") + b"x")),
    "a FINAL that lacks its attachment": ("bad-record", lambda address: record(4, address, body_of(None))),
    "an empty ERROR": ("bad-record", lambda address: record(7, address)),
    "an ERROR with a longer text": ("bad-record", lambda address: record(7, address, b"\x01\xf4\xff\xfftext")),
    "an ERROR without a body": ("bad-record", lambda address: record(7, address, b"\x01\xf4\0\x04text")),
    "an ERROR with two details": (
        "too-many-frames", lambda address: record(7, address, b"\x01\xf4\0\x04text" + body_of(b"", b""))
    ),
    "an ERROR with a code of four digits": (
        "bad-code", lambda address: record(7, address, b"\x03\xe8\0\x04text" + body_of())
    ),
    "a RELEASE with more": ("bad-record", lambda address: record(11, address, b"x")),
    "an empty CREDIT": ("bad-record", lambda _: record(10, 0)),
    "a CREDIT of 8 bytes": ("bad-record", lambda _: record(10, 0, b"\0" * 8)),
    "an empty READY": ("bad-record", lambda _: record(1, 0)),
    "a READY with a longer name": ("bad-record", lambda _: record(1, 0, b"\0\0\0\x01\xffecho\0\0")),
    "a READY with a bad name": ("bad-service-name", lambda _: ready_of(b"ec\nho", 1)),
    "a READY with bad options": ("bad-options", lambda _: ready_of(b"echo", 1, b"[]")),
    "a READY with more": ("bad-record", lambda _: longer(ready_of(b"echo", 1), 5) + b"x" * 5),
}  # fmt: skip


@pytest.mark.parametrize(("reason", "packed"), FROM_WORKER.values(), ids=FROM_WORKER)
def test_c43_a_worker_stays_registered_and_its_valid_records_count(
    bench: Bench, reason: str, packed: Callable[[int], bytes]
) -> None:
    # C43, C15
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=3)
    for number in (1, 2, 3):
        client.request(b"echo", b"%d" % number)
    addresses = [int(worker.work(b"%d" % number)) for number in (1, 2, 3)]
    worker.say(
        record(4, addresses[0], body_of(b"one")),
        packed(addresses[1]),
        record(4, addresses[2], body_of(b"three")),
    )
    client.final(b"echo", b"one", number=b"1")
    client.final(b"echo", b"three", number=b"3")
    worker.nothing()
    client.nothing()
    assert bench.stats()["invalid"] == {reason: 1}
    assert bench.stats()["running"] == 1
    worker.say(record(4, addresses[1], body_of(b"two")))
    client.final(b"echo", b"two", number=b"2")


def test_c43_a_workers_record_over_the_limits(start: Start) -> None:
    # C43: as in the framed form, the request ends with 413 and the worker is free
    bench = start(max_message=100_000)
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=3)
    for number in (1, 2, 3):
        client.request(b"echo", b"%d" % number)
    addresses = [int(worker.work(b"%d" % number)) for number in (1, 2, 3)]
    worker.say(
        record(4, addresses[0], body_of(b"x" * 100_001)),
        record(7, addresses[1], b"\x01\xf4\0\x04text" + body_of(b"x" * 100_001)),
        record(3, addresses[2], body_of(b"x" * 100_001)),
        record(3, addresses[2], body_of(b"more")),
    )
    for number in (b"1", b"2", b"3"):
        client.error(b"echo", b"413", number=number)
    worker.cancelled(b"%d" % addresses[2])
    assert bench.stats()["running"] == 1
    worker.final(b"%d" % addresses[2], b"end")
    worker.nothing()
    client.nothing()
    assert bench.stats()["running"] == 0
    assert bench.stats()["invalid"] == {"too-large": 3}


def test_c43_a_forged_address_among_others(bench: Bench) -> None:
    # C14, C18: the worker is disconnected, and what it held goes to another
    client, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=3)
    for number in (1, 2):
        client.request(b"echo", b"%d" % number)
    addresses = [int(worker.work(b"%d" % number)) for number in (1, 2)]
    worker.say(
        record(4, addresses[0], body_of(b"one")),
        record(4, 1, body_of(b"forged")),
        record(4, addresses[1], body_of(b"two")),
    )
    client.final(b"echo", b"one", number=b"1")
    worker.disconnected()
    client.nothing()
    other = bench.worker(b"echo")
    other.final(other.work(b"2"), b"done")
    client.final(b"echo", b"done", number=b"2")


def test_an_attached_frame_is_not_taken_for_a_length(bench: Bench) -> None:
    assert ATTACHED == 0xFFFFFFFF  # no frame in a record is that long
    client, worker = bench.batch_client(), bench.batch_worker(b"echo")
    body = [b"\xff\xff\xff\xff", b"\xff" * 100]
    client.request(b"echo", *body)
    worker.final(worker.work(*body), *body)
    client.final(b"echo", *body)


def test_a_batched_client_beside_one_of_another_dialect_on_one_connection(bench: Bench) -> None:
    both, worker = bench.batch_client(), bench.batch_worker(b"echo", credit=2)
    both.request(b"echo", b"batched")
    first = worker.work(b"batched")
    worker.final(first, b"one")
    both.final(b"echo", b"one")
    both.send(b"MDPC02", b"\x01", b"echo", b"0.2")
    worker.final(worker.work(b"0.2"), b"two")
    assert both.recv() == [b"MDPC02", b"\x03", b"echo", b"two"]
    old = bench.connect(Client)
    old.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    old.final(b"echo", b"world")
