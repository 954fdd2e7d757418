"""X1: heartbeats of clients, and what is wrong with messages: told, counted and never fatal (docs/reference/x1.md)."""

import random
import struct
from collections.abc import Callable

import pytest
import zmq
from support.peers import Bench, X1Client, X1Worker, body_of, ready_of, record, request_of

Start = Callable[..., Bench]

CLIENT = [b"", b"MDPCX1", b"\x09"]
WORKER = [b"", b"MDPWX1", b"\x09"]


def serves(client: X1Client, worker: X1Worker) -> None:
    client.request(b"echo", b"hello", number=99)
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("envelope", [[], [b""], [b"1", b""], [b"a", b"b" * 255, b""], [*[b"x"] * 15, b""]])
def test_a_clients_heartbeat_is_answered(bench: Bench, envelope: list[bytes]) -> None:
    peer = bench.peer()
    for _ in range(3):
        peer.send(*envelope, b"MDPCX1")
        assert peer.recv() == [*envelope, b"MDPCX1"]
    peer.nothing()
    stats = bench.stats()
    assert stats["heartbeats"] == 3
    assert stats["workers"] == stats["services"] == stats["requests"] - stats["mmi"] == 0
    assert stats["invalid"] == stats["disconnected"] == {}


def test_a_heartbeat_is_answered_while_a_request_runs(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    client.request(b"slow", b"hello")
    address = worker.work(b"hello")
    client.heartbeat()
    client.beaten()
    worker.final(address, b"done")
    client.final(b"slow", b"done")
    worker.nothing()


def test_a_heartbeat_of_a_worker_that_is_a_client_too_is_answered(bench: Bench) -> None:
    both, client = bench.x1_worker(b"echo"), bench.x1_client()
    both.send(b"1", b"", b"MDPCX1")
    assert both.recv() == [b"1", b"", b"MDPCX1"]
    serves(client, both)


def test_a_client_gets_no_heartbeats_unasked(start: Start) -> None:
    bench = start(heartbeat=0.02, liveness=1000)
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    client.request(b"slow", b"work")
    worker.work(b"work")
    for _ in range(5):
        worker.beaten()
    client.silent()


def test_a_heartbeat_from_an_unregistered_worker_is_unexpected(bench: Bench) -> None:
    # valid but unexpected: C14, for X1 as well
    stranger = bench.x1_worker()
    stranger.heartbeat()
    stranger.disconnected()
    stranger.ready(b"echo")
    stranger.nothing()
    assert bench.status(b"echo") == b"200"
    assert bench.stats()["disconnected"] == {"not-registered": 1}


# ── what a client sends ──────────────────────────────────────────────────────────────────────────────────────────────


def longer(packed: bytes, by: int) -> bytes:
    """A record that claims to be longer than it is, or shorter."""
    (size,) = struct.unpack_from(">I", packed)
    return struct.pack(">I", size + by) + packed[4:]


BAD_OPTIONS = {
    "no JSON": b"key=5",
    "half": b'{"key":5',
    "two": b"{}{}",
    "a list": b"[]",
    "a number": b"5",
    "a text": b'"x"',
    "null": b"null",
    "a space": b" ",
    "not UTF-8": b'{"k":"\xff"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "NaN": b'{"k":NaN}',
    "infinite": b'{"k":-Infinity}',
    "a number above all": b'{"k":1e999}',
    "5000 digits": b'{"k":' + b"9" * 5000 + b"}",
    "wait null": b'{"wait":null}',
    "wait 0": b'{"wait":0}',
    "wait text": b'{"wait":"no"}',
    "headers null": b'{"headers":null}',
    "headers list": b'{"headers":["a"]}',
    "a header that is no text": b'{"headers":{"a":1}}',
    "on behalf of a number": b'{"on_behalf":5}',
    "a broker that is no text": b'{"broker":["a"]}',
    "64 lists deep": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    "100,000 lists deep": b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
}

HEAD = b"\0\0\0\0\x04echo"

ANSWERED: dict[str, tuple[str, bytes]] = {
    # a record numbered 2 that is answered with ERROR 400
    "an unknown command": ("unknown-command", record(99, 2)),
    "a worker's command": ("unknown-command", record(10, 2, b"\0\0\0\x05")),
    **{
        f"command {command:02x}": ("unknown-command", record(command, 2, body_of(b"body")))
        for command in (0, 2, 3, 4, 7, 8, 9)
    },
    "an empty REQUEST": ("bad-record", record(1, 2)),
    "a REQUEST without a service": ("bad-record", record(1, 2, b"\0\0\0\0")),
    "a service longer than the record": ("bad-record", record(1, 2, b"\0\0\0\0\xffecho")),
    "no options": ("bad-record", record(1, 2, HEAD)),
    "options longer than the record": ("bad-record", record(1, 2, HEAD + b"\xff\xff{}")),
    "no count of frames": ("bad-record", record(1, 2, HEAD + b"\0\0")),
    "fewer frames than counted": ("bad-record", record(1, 2, HEAD + b"\0\0\0\x02\0\0\0\x01x")),
    "65,535 frames and none": ("bad-record", record(1, 2, HEAD + b"\0\0\xff\xff")),
    "a frame longer than the record": ("bad-record", record(1, 2, HEAD + b"\0\0\0\x01\0\0\0\x05x")),
    "a frame of 4 GB": ("bad-record", record(1, 2, HEAD + b"\0\0\0\x01\xff\xff\xff\xfex")),
    "more than its body": ("bad-record", record(1, 2, HEAD + b"\0\0\0\x01\0\0\0\x01xmore")),
    "a body without frames": ("no-body", record(1, 2, HEAD + b"\0\0\0\0")),
    "an attachment that is missing": ("bad-record", request_of(2, b"echo", None)),
    "an empty service": ("bad-service-name", request_of(2, b"", b"body")),
    "a service with a line break": ("bad-service-name", request_of(2, b"ec\nho", b"body")),
    **{
        f"options: {what}": ("bad-options", request_of(2, b"echo", b"body", options=options))
        for what, options in BAD_OPTIONS.items()
    },
    "options for mmi": ("bad-options", request_of(2, b"mmi.service", b"body", options=b"[]")),
    "a number in use": ("number-in-use", request_of(2, b"echo", b"body")),
    "CANCEL with more": ("bad-record", record(5, 2, b"more")),
}


@pytest.mark.parametrize(("reason", "packed"), ANSWERED.values(), ids=ANSWERED)
def test_c43_an_invalid_record_is_answered_and_all_others_are_served(bench: Bench, reason: str, packed: bytes) -> None:
    # C43: also one whose number is that of another request, which runs
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=9)
    client.request(b"echo", b"running", number=2)
    running = worker.work(b"running")
    client.say(request_of(1, b"echo", b"before"), packed, request_of(3, b"echo", b"after"))
    assert client.error(b"400", number=2) == f"malformed: {reason}"
    for number, body in ((1, b"before"), (3, b"after")):
        worker.final(worker.work(body), b"done")
        client.final(b"echo", b"done", number=number)
    client.nothing()
    worker.nothing()
    stats = bench.stats()
    assert stats["invalid"] == {reason: 1}
    assert (stats["running"], stats["queued"], stats["services"]) == (1, 0, 1)
    worker.partial(running, b"still")
    worker.final(running, b"here")
    client.partial(b"echo", b"still", number=2)
    client.final(b"echo", b"here", number=2)


CUT: dict[str, tuple[list[int], bytes]] = {
    # where the next record begins is not known any more; those before are served, and a number that was read is told
    "a size beyond the message": ([2], longer(request_of(2, b"echo", b"body"), 1)),
    "a size of 4 GB": ([2], longer(record(5, 2), 0xFFFFFFFF - 9)),
    "a size of 0": ([2], b"\0\0\0\0" + record(5, 2)[4:]),
    "a size of 8": ([2], longer(record(5, 2), -1)),
    "half a head": ([], record(5, 2)[:12]),
    "one byte": ([], b"\0"),
    "only a size": ([], b"\xff\xff\xff\xff"),
}


@pytest.mark.parametrize(("told", "packed"), CUT.values(), ids=CUT)
def test_c43_a_record_whose_size_is_wrong(bench: Bench, told: list[int], packed: bytes) -> None:
    # C43
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=9)
    client.say(request_of(1, b"echo", b"before"), packed)
    for number in told:
        assert client.error(b"400", number=number) == "malformed: bad-record"
    worker.final(worker.work(b"before"), b"done")
    client.final(b"echo", b"done", number=1)
    client.nothing()
    worker.nothing()
    assert bench.stats()["invalid"] == {"bad-record": 1}
    client.request(b"echo", b"next", number=9)  # the next message is read from its beginning
    worker.final(worker.work(b"next"), b"done")
    client.final(b"echo", b"done")


def test_c43_a_size_that_ends_within_another_record(bench: Bench) -> None:
    # C43: whatever is read there, it ends
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=9)
    for by in (-1, -5, -9, 5, 9, 20):
        client.say(
            request_of(1, b"echo", b"before"),
            longer(request_of(2, b"echo", b"body"), by),
            *[request_of(number, b"echo", b"after") for number in range(3, 9)],
        )
        worker.final(worker.work(b"before"), b"done")
        client.sync()
        assert bench.stats()["invalid"]["bad-record"] >= 1
        client = bench.x1_client()
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
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.say(request_of(1, b"echo", None), attachments=(b"first", b"left over", b"as well"))
    worker.final(worker.work(b"first"), b"done")
    client.final(b"echo", b"done", number=1)
    client.nothing()
    assert bench.stats()["invalid"] == {"too-many-frames": 1}


def test_c43_after_an_unreadable_record_attachments_are_not_assigned(bench: Bench) -> None:
    # C43: it is not known which belong to it, and a request must not get another's
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=9)
    client.say(
        request_of(1, b"echo", None),
        record(99, 2, body_of(None)),
        request_of(3, b"echo", None),
        request_of(4, b"echo", b"without"),
        attachments=(b"one", b"two", b"three"),
    )
    assert client.error(b"400", number=2) == "malformed: unknown-command"
    assert client.error(b"400", number=3) == "malformed: bad-record"
    worker.work(b"one")
    worker.work(b"without")
    worker.nothing()
    client.nothing()


def test_c43_more_records_than_a_message_may_have(bench: Bench) -> None:
    # C43
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=1000)
    client.say(*[request_of(number, b"echo", b"hello") for number in range(1, 259)])
    assert client.error(b"400", number=257) == "malformed: bad-record"
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
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=9)
    client.say(
        request_of(1, b"echo", b"before"),
        request_of(2, b"echo", *body),
        request_of(3, b"echo", None),
        attachments=(*attachments, b"after"),
    )
    assert str(next(iter(limits.values()))) in client.error(b"413", number=2)
    for number, kept in ((1, b"before"), (3, b"after")):
        worker.final(worker.work(kept), b"done")
        client.final(b"echo", b"done", number=number)
    assert bench.stats()["invalid"] == {reason: 1}


UNREADABLE: dict[str, tuple[str, list[bytes]]] = {
    # what comes before the records, or in their place
    "command 01": ("unknown-command", [b"", b"MDPCX1", b"\x01", b"echo", b"", b"body"]),
    "command 06": ("unknown-command", [b"7", b"", b"MDPCX1", b"\x06"]),
    "an empty command": ("unknown-command", [b"", b"MDPCX1", b""]),
    "a command of two bytes": ("unknown-command", [b"", b"MDPCX1", b"\x09\x09", request_of(1, b"echo", b"body")]),
    "no envelope": ("unknown-command", [b"MDPCX1", b"\x0a"]),
    "an envelope without its empty frame": ("no-header", [b"7", *CLIENT[1:], request_of(1, b"echo", b"body")]),
    "256 bytes in the envelope": ("no-header", [b"7" * 256, *CLIENT, request_of(1, b"echo", b"body")]),
    "another header": ("no-header", [b"", b"MDPCX2", b"\x09", request_of(1, b"echo", b"body")]),
    "17 frames of envelope": ("envelope-too-deep", [*[b"7"] * 16, *CLIENT, request_of(1, b"echo", b"body")]),
    "18 frames of envelope": ("envelope-too-deep", [*[b"7"] * 17, b"", b"MDPCX1"]),
}


@pytest.mark.parametrize(("reason", "frames"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_message_whose_records_cannot_be_found_is_only_counted(
    bench: Bench, reason: str, frames: list[bytes]
) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.send(*frames)
    client.nothing()
    assert bench.stats()["invalid"] == {reason: 1}
    serves(client, worker)
    worker.nothing()


@pytest.mark.parametrize("busy", [False, True], ids=["waiting", "running"])
def test_a_number_that_is_in_use_is_rejected(bench: Bench, busy: bool) -> None:
    client = bench.x1_client()
    worker = bench.x1_worker(b"echo") if busy else None
    client.request(b"echo", b"first", number=7)
    for service in (b"echo", b"other"):
        client.request(service, b"second", number=7)
        assert client.error(b"400") == "malformed: number-in-use"
    client.request(b"echo", b"third", number=7, options=b'{"wait":false}')
    client.error(b"400")
    client.nothing()
    assert bench.stats()["invalid"] == {"number-in-use": 3}
    assert bench.stats()["services"] == 1
    worker = worker or bench.x1_worker(b"echo")
    worker.final(worker.work(b"first"), b"done")
    client.final(b"echo", b"done")
    worker.nothing()
    client.nothing()


def test_an_oversized_message_does_not_end_the_request_of_its_number(start: Start) -> None:
    bench = start(max_message=10_000)
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"first", number=7)
    address = worker.work(b"first")
    client.request(b"echo", b"x" * 10_001, number=7)
    client.error(b"413")
    worker.final(address, b"done")
    client.final(b"echo", b"done")


# ── what a worker sends ──────────────────────────────────────────────────────────────────────────────────────────────


def ready_with(options: bytes) -> Callable[[int], bytes]:
    return lambda _: ready_of(b"echo", 1, options)


FROM_WORKER: dict[str, tuple[str, Callable[[int], bytes]]] = {
    # what a worker may send between others about a request that it holds, and holds afterwards too
    "an unknown command": ("unknown-command", lambda address: record(99, address)),
    "a client's command": ("unknown-command", lambda address: record(5, address)),
    "REQUEST": ("unknown-command", lambda address: record(2, address, body_of(b"body"))),
    "CANCEL": ("unknown-command", lambda address: record(8, address)),
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
    **{
        f"a READY with {options!r}": ("bad-options", ready_with(options))
        for options in (
            b"other", b"[]", b'{"name":5}', b'{"host":null}', b'{"version":[]}', b'{"pid":-1}', b'{"pid":"7"}',
            b'{"pid":true}', b'{"pid":4294967296}', b'{"dialect":1}',
        )
    },
    "a READY with more": ("bad-record", lambda _: longer(ready_of(b"echo", 1), 5) + b"x" * 5),
}  # fmt: skip


@pytest.mark.parametrize(("reason", "packed"), FROM_WORKER.values(), ids=FROM_WORKER)
def test_c43_a_worker_stays_registered_and_its_valid_records_count(
    bench: Bench, reason: str, packed: Callable[[int], bytes]
) -> None:
    # C43, C15
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=3)
    for number in (1, 2, 3):
        client.request(b"echo", b"%d" % number)
    addresses = [int(worker.work(b"%d" % number)) for number in (1, 2, 3)]
    worker.say(
        record(4, addresses[0], body_of(b"one")),
        packed(addresses[1]),
        record(4, addresses[2], body_of(b"three")),
    )
    client.final(b"echo", b"one", number=1)
    client.final(b"echo", b"three", number=3)
    worker.nothing()
    client.nothing()
    assert bench.stats()["invalid"] == {reason: 1}
    assert bench.stats()["running"] == 1
    worker.say(record(4, addresses[1], body_of(b"two")))
    client.final(b"echo", b"two", number=2)


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"MDPWX1", b"\x05"],
        [b"MDPWX1", b""],
        [b"MDPW02", b"\x07", b"amy", b"", b"500", b"text"],
        [b"MDPW02", b"\x09", b""],
        [b"MDPW02", b"\x0a", b"5"],
    ],
    ids=str,
)
def test_a_worker_keeps_its_request_after_an_unknown_command(bench: Bench, frames: list[bytes]) -> None:
    # C15; only X1 has ERROR, CREDIT and records, and no X1 message has another command than 09
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.send(*frames)
    worker.nothing()
    client.nothing()
    assert bench.stats()["invalid"] == {"unknown-command": 1}
    worker.error(address, b"500", b"here")
    client.error(b"500", b"here")
    assert bench.status(b"echo") == b"200"


UNEXPECTED: dict[str, tuple[str, list[bytes]]] = {
    "a second READY": ("second-ready", [*WORKER, ready_of(b"echo", 1)]),
    "a READY in another dialect": ("second-ready", [b"MDPW02", b"\x01", b"echo"]),
    "a READY for another service": ("second-ready", [*WORKER, ready_of(b"other", 5)]),
    "an ERROR for another client": ("reply-to-wrong-client", [*WORKER, record(7, 1, b"\x01\xf4\0\0" + body_of())]),
    "a FINAL for another client": ("reply-to-wrong-client", [*WORKER, record(4, 1, body_of(b"body"))]),
    "a RELEASE of nothing it was given": ("reply-to-wrong-client", [*WORKER, record(11, 1)]),
    "a FINAL in another dialect": ("wrong-dialect", [b"MDPW02", b"\x04", b"1", b"", b"body"]),
}


@pytest.mark.parametrize(("reason", "frames"), UNEXPECTED.values(), ids=UNEXPECTED)
def test_a_worker_is_disconnected_and_another_gets_its_request(bench: Bench, reason: str, frames: list[bytes]) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello")
    worker.work(b"hello")
    worker.send(*frames)
    assert worker.recv() == ([b"MDPW02", b"\x06"] if frames[0] else [*worker.head, b"\x06", b"0"])
    worker.nothing()
    client.nothing()
    assert bench.stats()["disconnected"] == {reason: 1}
    other = bench.x1_worker(b"echo")
    other.final(other.work(b"hello", attempt=2), b"world")
    client.final(b"echo", b"world")


def test_an_error_without_a_request_or_a_registration_is_unexpected(bench: Bench) -> None:
    client, worker, stranger = bench.x1_client(), bench.x1_worker(b"echo"), bench.x1_worker()
    worker.error(b"1", b"500", b"text")
    worker.disconnected()
    stranger.error(b"1", b"500", b"text")
    stranger.disconnected()
    assert bench.stats()["disconnected"] == {"reply-without-request": 1, "not-registered": 1}
    worker.ready(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.error(address, b"500", b"text")
    worker.error(address, b"500", b"and again")
    client.error(b"500", b"text")
    worker.nothing()
    client.nothing()
    assert bench.stats()["late"] == 1  # C32


def test_c43_a_forged_address_among_others(bench: Bench) -> None:
    # C43, C14, C18: the worker is disconnected, and what it held goes to another
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=3)
    for number in (1, 2):
        client.request(b"echo", b"%d" % number)
    addresses = [int(worker.work(b"%d" % number)) for number in (1, 2)]
    worker.say(
        record(4, addresses[0], body_of(b"one")),
        record(4, 1, body_of(b"forged")),
        record(4, addresses[1], body_of(b"two")),
    )
    client.final(b"echo", b"one", number=1)
    worker.disconnected()
    client.nothing()
    other = bench.worker(b"echo")
    other.final(other.work(b"2"), b"done")
    client.final(b"echo", b"done", number=2)


# ── anything ─────────────────────────────────────────────────────────────────────────────────────────────────────────

VOCABULARY = [
    b"", b"", b"", b"MDPCX1", b"MDPCX1", b"MDPWX1", b"MDPWX1", b"MDPC02", b"MDPW02", b"\x01", b"\x01", b"\x02", b"\x03",
    b"\x04", b"\x05", b"\x06", b"\x09", b"\x09", b"\x09", b"1", b"one", b"two", b"mmi.service", b"mmi.nope", b"peer-1",
    b"peer-2", b"y" * 256, record(5, 7), record(6, 0), record(11, 1),
]  # fmt: skip

COMMANDS: list[list[bytes]] = [
    [*CLIENT, request_of(1, b"one", b"body")],
    [*CLIENT, request_of(2, b"two", b"body", ttl=20)],
    [*CLIENT, request_of(3, b"one", b"body", options=b'{"wait":false}')],
    [*CLIENT, request_of(7, b"one", b"body", None), b"attachment"],
    [*CLIENT, request_of(8, b"two", b"body", ttl=20) + record(5, 7) + record(5, 8)],
    [*CLIENT, record(5, 1)],
    [*CLIENT, record(5, 2)],
    [b"", b"MDPCX1"],
    [*WORKER, ready_of(b"one", 1)],
    [*WORKER, ready_of(b"one", 3)],
    [*WORKER, ready_of(b"two", 1)],
    [*WORKER, record(3, 1, body_of(b"body"))],
    [*WORKER, record(4, 2, body_of(b"body"))],
    [*WORKER, record(7, 1, b"\x01\xf4\0\x04text" + body_of())],
    [*WORKER, record(6, 0)],
    [*WORKER, record(10, 0, b"\0\0\0\x03")],
    [*WORKER, record(11, 1)],
    [b"", b"MDPWX1"],
    [b"MDPC02", b"\x01", b"one", b"body"],
]


def garbage(chance: random.Random) -> list[bytes]:
    """Random words, or a command with something wrong, or now and then nothing wrong."""
    if not chance.randrange(6):
        records = b"".join(chance.choice(COMMANDS)[-1] for _ in range(3)) + chance.randbytes(chance.randint(0, 40))
        return [b"", chance.choice([b"MDPCX1", b"MDPWX1"]), b"\x09", records, *[b"x"] * chance.randrange(3)]
    if not chance.randrange(4):
        return [chance.choice(VOCABULARY) for _ in range(chance.randint(1, 24))]
    message = list(chance.choice(COMMANDS))
    for _ in range(chance.randint(0, 2)):
        at = chance.randrange(len(message) + 1)
        change = chance.randrange(3)
        if change == 0:
            message.insert(at, chance.choice(VOCABULARY))
        elif change == 1:
            message[at : at + 1] = [chance.choice(VOCABULARY)]
        elif len(message) > 1:
            del message[at : at + 1]
    return message


@pytest.mark.parametrize("seed", [2012, 2026])
def test_five_thousand_random_messages_from_several_peers(start: Start, seed: int) -> None:
    bench = start(heartbeat=0.05, liveness=1000, expiry=0.5)
    chance = random.Random(seed)
    client, worker = bench.x1_client(), bench.x1_worker(b"steady")
    peers = [bench.peer(options={zmq.IDENTITY: b"peer-%d" % number}) for number in range(6)]
    for number in range(5000):
        chance.choice(peers).send(*garbage(chance))
        if number % 100 == 0:
            client.request(b"steady", b"%d" % number)
            worker.final(worker.work(b"%d" % number), b"reply")
            client.final(b"steady", b"reply")
    for peer in peers:
        peer.sync()
    assert sum(bench.stats()["invalid"].values()) > 1000
    client.request(b"steady", b"last")
    worker.error(worker.work(b"last"), b"500", b"reply")
    client.error(b"500", b"reply")
    for peer in peers:
        peer.close()
    # … and in the end nothing is left of it.
    bench.until(lambda: bench.stats()["workers"] == bench.stats()["services"] == 1)
    stats = bench.stats()
    assert stats["queued"] == stats["request_bytes"] == stats["running"] == stats["internal_errors"] == 0
    assert not bench.server.broker.registry.numbered
