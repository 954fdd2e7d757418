"""X1: heartbeats of clients, and what is wrong with messages: told, counted and never fatal (docs/reference/x1.md)."""

import struct
from collections.abc import Callable

import pytest
from support.peers import Bench, X1Client, X1Worker, body_of, ready_of, record, request_of

CLIENT = [b"", b"MDPCX1", b"\x09"]


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


# ── what a client sends ──────────────────────────────────────────────────────────────────────────────────────────────


def longer(packed: bytes, by: int) -> bytes:
    """A record that claims to be longer than it is, or shorter."""
    (size,) = struct.unpack_from(">I", packed)
    return struct.pack(">I", size + by) + packed[4:]


HEAD = b"\0\0\0\0\x04echo"

ANSWERED: dict[str, tuple[str, bytes]] = {
    # a record numbered 2 that is answered with ERROR 400; tests/mdp/wire has every way to be wrong
    "an unknown command": ("unknown-command", record(99, 2)),
    "a frame longer than the record": ("bad-record", record(1, 2, HEAD + b"\0\0\0\x01\0\0\0\x05x")),
    "an attachment that is missing": ("bad-record", request_of(2, b"echo", None)),
    "a body without frames": ("no-body", record(1, 2, HEAD + b"\0\0\0\0")),
    "a service with a line break": ("bad-service-name", request_of(2, b"ec\nho", b"body")),
    "options that are not JSON": ("bad-options", request_of(2, b"echo", b"body", options=b"key=5")),
    "a number in use": ("number-in-use", request_of(2, b"echo", b"body")),
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


# ── what a worker sends ──────────────────────────────────────────────────────────────────────────────────────────────


FROM_WORKER: dict[str, tuple[str, Callable[[int], bytes]]] = {
    # what a worker may send between others about a request that it holds, and holds afterwards too
    "an unknown command": ("unknown-command", lambda address: record(99, address)),
    "an empty FINAL": ("bad-record", lambda address: record(4, address)),
    "an ERROR with a code of four digits": (
        "bad-code",
        lambda address: record(7, address, b"\x03\xe8\0\0\0\0\x04text" + body_of()),
    ),
    "a READY with a bad name": ("bad-service-name", lambda _: ready_of(b"ec\nho", 1)),
    "a READY with bad options": ("bad-options", lambda _: ready_of(b"echo", 1, b"[]")),
}


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
