"""X1: heartbeats of clients, and what is wrong with a message and is told, counted and never fatal (docs/x1.md)."""

import random
from collections.abc import Callable

import pytest
import zmq
from support.peers import Bench, X1Client, X1Worker, ready_of, record, request_of

Start = Callable[..., Bench]


def serves(client: X1Client, worker: X1Worker) -> None:
    client.request(b"echo", b"hello", number=b"serves")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("envelope", [[], [b""], [b"1", b""], [b"a", b"b" * 255, b""], [*[b"x"] * 15, b""]])
def test_a_clients_heartbeat_is_answered(bench: Bench, envelope: list[bytes]) -> None:
    peer = bench.peer()
    for _ in range(3):
        peer.send(*envelope, b"MDPCX1", b"\x06")
        assert peer.recv() == [*envelope, b"MDPCX1", b"\x06"]
    peer.nothing()
    stats = bench.stats()
    assert stats["heartbeats"] == 3
    assert stats["workers"] == stats["services"] == stats["requests"] - stats["mmi"] == 0
    assert stats["invalid"] == stats["disconnected"] == {}


@pytest.mark.parametrize("envelope", [[], [b""], [b"1", b""], [*[b"x"] * 15, b""]])
def test_a_bare_header_is_a_heartbeat(bench: Bench, envelope: list[bytes]) -> None:
    # of the batched form, which is what it is answered in
    peer = bench.peer()
    for _ in range(3):
        peer.send(*envelope, b"MDPCX1")
        assert peer.recv() == [*envelope, b"MDPCX1"]
    peer.nothing()
    stats = bench.stats()
    assert stats["heartbeats"] == 3
    assert stats["invalid"] == stats["disconnected"] == {}


def test_a_heartbeat_is_answered_while_a_request_runs(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"slow")
    client.request(b"slow", b"hello")
    address = worker.work(b"hello")
    client.send(b"", b"MDPCX1", b"\x06")
    assert client.recv() == [b"", b"MDPCX1", b"\x06"]
    client.send(*client.envelope(), b"MDPCX1", b"\x06")  # even under the request's own number
    assert client.recv() == [*client.envelope(), b"MDPCX1", b"\x06"]
    worker.final(address, b"done")
    client.final(b"slow", b"done")
    worker.nothing()


def test_a_heartbeat_of_a_worker_that_is_a_client_too_is_answered(bench: Bench) -> None:
    both, client = bench.x1_worker(b"echo"), bench.x1_client()
    both.send(b"1", b"", b"MDPCX1", b"\x06")
    assert both.recv() == [b"1", b"", b"MDPCX1", b"\x06"]
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

N = [b"7", b""]
REQUEST = [*N, b"MDPCX1", b"\x01", b"echo"]

BAD_OPTIONS = {
    "no JSON": b"ttl=5",
    "half": b'{"ttl":5',
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
    "ttl text": b'{"ttl":"5"}',
    "ttl true": b'{"ttl":true}',
    "ttl list": b'{"ttl":[5]}',
    "ttl below 0": b'{"ttl":-1}',
    "ttl 10^15": b'{"ttl":1e15}',
    "ttl NaN": b'{"ttl":NaN}',
    "ttl of 5000 digits": b'{"ttl":' + b"9" * 5000 + b"}",
    "wait null": b'{"wait":null}',
    "wait 0": b'{"wait":0}',
    "wait text": b'{"wait":"no"}',
    "headers null": b'{"headers":null}',
    "headers list": b'{"headers":["a"]}',
    "a header that is no text": b'{"headers":{"a":1}}',
    "64 lists deep": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    "100,000 lists deep": b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "65,536 bytes": b'{"k":"' + b"x" * (65536 - 8) + b'"}',
}

TOLD: dict[str, tuple[str, list[bytes]]] = {
    "no service": ("too-few-frames", [*N, b"MDPCX1", b"\x01"]),
    "no options": ("too-few-frames", REQUEST),
    "no body": ("no-body", [*REQUEST, b""]),
    "CANCEL of nothing": ("too-few-frames", [*N, b"MDPCX1", b"\x05"]),
    "CANCEL with more": ("too-many-frames", [*N, b"MDPCX1", b"\x05", b"echo", b""]),
    "CANCEL for something unknown": ("unknown-number", [*N, b"MDPCX1", b"\x05", b"echo"]),
    "HEARTBEAT with more": ("too-many-frames", [*N, b"MDPCX1", b"\x06", b""]),
    "PARTIAL": ("unknown-command", [*N, b"MDPCX1", b"\x02", b"echo", b"body"]),
    "FINAL": ("unknown-command", [*N, b"MDPCX1", b"\x03", b"echo", b"body"]),
    "ERROR": ("unknown-command", [*N, b"MDPCX1", b"\x04", b"echo", b"500", b"text"]),
    "command 00": ("unknown-command", [*N, b"MDPCX1", b"\x00", b"echo", b"", b"body"]),
    "command 07": ("unknown-command", [*N, b"MDPCX1", b"\x07", b"echo", b"", b"body"]),
    "empty command": ("unknown-command", [*N, b"MDPCX1", b"", b"echo", b"", b"body"]),
    "command of two bytes": ("unknown-command", [*N, b"MDPCX1", b"\x01\x01", b"echo", b"", b"body"]),
    "empty service": ("bad-service-name", [*N, b"MDPCX1", b"\x01", b"", b"", b"body"]),
    "service of 256 bytes": ("bad-service-name", [*N, b"MDPCX1", b"\x01", b"x" * 256, b"", b"body"]),
    "CANCEL, line break in the service": ("bad-service-name", [*N, b"MDPCX1", b"\x05", b"ec\nho"]),
    "REQUEST without a number": ("no-number", [b"", b"MDPCX1", b"\x01", b"echo", b"", b"body"]),
    "CANCEL without a number": ("no-number", [b"", b"MDPCX1", b"\x05", b"echo"]),
    **{f"options: {what}": ("bad-options", [*REQUEST, options, b"body"]) for what, options in BAD_OPTIONS.items()},
    "options for mmi": ("bad-options", [*N, b"MDPCX1", b"\x01", b"mmi.service", b"x", b"echo"]),
}
"""What is answered with ERROR 400."""

NOT_TOLD: dict[str, tuple[str, list[bytes]]] = {
    "no envelope: REQUEST": ("no-number", [b"MDPCX1", b"\x01", b"echo", b"", b"body"]),
    "no envelope: CANCEL": ("no-number", [b"MDPCX1", b"\x05", b"echo"]),
    "no envelope: unknown command": ("unknown-command", [b"MDPCX1", b"\x0a"]),
    "no envelope: HEARTBEAT with more": ("too-many-frames", [b"MDPCX1", b"\x06", b""]),
    "no envelope: bad name": ("bad-service-name", [b"MDPCX1", b"\x01", b"", b"", b"body"]),
    "an envelope without its empty frame": ("no-header", [b"7", b"MDPCX1", b"\x01", b"echo", b"", b"body"]),
    "a number of 256 bytes": ("no-header", [b"7" * 256, b"", b"MDPCX1", b"\x01", b"echo", b"", b"body"]),
    "another header": ("no-header", [b"7", b"", b"MDPCX2", b"\x01", b"echo", b"", b"body"]),
    "17 frames of envelope": ("envelope-too-deep", [*[b"7"] * 16, b"", b"MDPCX1", b"\x01", b"echo", b"", b"body"]),
    "18 frames of envelope": ("envelope-too-deep", [*[b"7"] * 17, b"", b"MDPCX1", b"\x06"]),
    "a number that is a header": ("unknown-command", [b"MDPC02", b"", b"MDPCX1", b"\x01", b"echo", b"", b"body"]),
}
"""What is only counted."""


@pytest.mark.parametrize(("reason", "frames"), TOLD.values(), ids=TOLD)
def test_an_invalid_request_is_counted_and_answered(bench: Bench, reason: str, frames: list[bytes]) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    envelope = frames[: frames.index(b"MDPCX1")]
    client.send(*frames)
    message = client.recv()
    assert message[: len(envelope) + 2] == [*envelope, b"MDPCX1", b"\x04"]
    service, code, text = message[len(envelope) + 2 :]
    assert (code, text) == (b"400", b"malformed: %s" % reason.encode())
    assert service in {b"echo", b"mmi.service", b""}
    client.nothing()
    stats = bench.stats()
    assert stats["invalid"] == {reason: 1}
    assert stats["queued"] == stats["running"] == 0
    assert stats["services"] == 1
    serves(client, worker)
    worker.nothing()


@pytest.mark.parametrize(("reason", "frames"), NOT_TOLD.values(), ids=NOT_TOLD)
def test_an_invalid_message_without_a_number_is_only_counted(bench: Bench, reason: str, frames: list[bytes]) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.send(*frames)
    client.nothing()
    assert bench.stats()["invalid"] == {reason: 1}
    serves(client, worker)
    worker.nothing()


@pytest.mark.parametrize(
    ("reason", "frames"),
    [each for each in TOLD.values() if each[1][:2] == N],
    ids=[n for n in TOLD if TOLD[n][1][:2] == N],
)
def test_an_invalid_message_does_not_end_the_request_of_its_number(
    bench: Bench, reason: str, frames: list[bytes]
) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"busy")
    client.request(b"busy", b"hello", number=b"7")
    address = worker.work(b"hello")
    client.send(*frames)
    assert client.recv()[3:4] == [b"\x04"]
    client.nothing()
    worker.partial(address, b"still")
    worker.final(address, b"here")
    client.partial(b"busy", b"still")
    client.final(b"busy", b"here")
    assert sum(bench.stats()["invalid"].values()) == 1


@pytest.mark.parametrize("busy", [False, True], ids=["waiting", "running"])
def test_a_number_that_is_in_use_is_rejected(bench: Bench, busy: bool) -> None:
    client = bench.x1_client()
    worker = bench.x1_worker(b"echo") if busy else None
    client.request(b"echo", b"first", number=b"7")
    for service in (b"echo", b"other"):
        client.request(service, b"second", number=b"7")
        assert client.error(service, b"400") == "malformed: number-in-use"
    client.request(b"echo", b"third", number=b"7", options=b'{"wait":false,"ttl":0}')
    client.error(b"echo", b"400")
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
    client.request(b"echo", b"first", number=b"7")
    address = worker.work(b"first")
    client.request(b"echo", b"x" * 10_000, number=b"7")
    client.error(b"echo", b"413")
    client.cancel(b"x" * 10_000, number=b"7")
    client.error(b"", b"413")
    worker.final(address, b"done")
    client.final(b"echo", b"done")


# ── what a worker sends ──────────────────────────────────────────────────────────────────────────────────────────────

FROM_WORKER: dict[str, tuple[str, list[bytes]]] = {
    "READY with options and more": ("too-many-frames", [b"MDPWX1", b"\x01", b"echo", b"{}", b"other"]),
    **{
        f"READY with {options[:30]!r}": (reason, [b"MDPWX1", b"\x01", b"echo", options])
        for reason, options in (
            ("bad-options", b"other"),
            ("bad-options", b"[]"),
            ("bad-options", b'{"name":5}'),
            ("bad-options", b'{"host":null}'),
            ("bad-options", b'{"version":[]}'),
            ("bad-options", b'{"pid":-1}'),
            ("bad-options", b'{"pid":"7"}'),
            ("bad-options", b'{"pid":true}'),
            ("bad-options", b'{"pid":4294967296}'),
            ("bad-options", b'{"k":"' + b"x" * (65536 - 8) + b'"}'),
            ("bad-credit", b'{"credit":-1}'),
            ("bad-credit", b'{"credit":1.5}'),
            ("bad-credit", b'{"credit":"5"}'),
            ("bad-credit", b'{"credit":true}'),
            ("bad-credit", b'{"credit":null}'),
        )
    },
    "CREDIT only": ("too-few-frames", [b"MDPWX1", b"\x0a"]),
    "CREDIT with more": ("too-many-frames", [b"MDPWX1", b"\x0a", b"5", b""]),
    **{
        f"CREDIT {credit[:30]!r}": ("bad-credit", [b"MDPWX1", b"\x0a", credit])
        for credit in (b"", b"-1", b"1.5", b"0x5", b" 5", b"five", b"9" * 21, b"\xb2", "٥".encode())
    },
    "RELEASE only": ("too-few-frames", [b"MDPWX1", b"\x0b"]),
    "RELEASE without its empty frame": ("too-few-frames", [b"MDPWX1", b"\x0b", b"amy"]),
    "RELEASE with another frame for it": ("no-delimiter", [b"MDPWX1", b"\x0b", b"amy", b"body"]),
    "RELEASE with more": ("too-many-frames", [b"MDPWX1", b"\x0b", b"amy", b"", b"body"]),
    "RELEASE of nothing": ("bad-address", [b"MDPWX1", b"\x0b", b"", b""]),
    "REQUEST": ("unknown-command", [b"MDPWX1", b"\x02", b"amy", b"", b"", b"body"]),
    "PARTIAL without a body": ("no-body", [b"MDPWX1", b"\x03", b"amy", b""]),
    "FINAL without a body": ("no-body", [b"MDPWX1", b"\x04", b"amy", b""]),
    "FINAL without its delimiter": ("no-delimiter", [b"MDPWX1", b"\x04", b"amy", b"body"]),
    "HEARTBEAT with more": ("too-many-frames", [b"MDPWX1", b"\x05", b""]),
    "ERROR only": ("too-few-frames", [b"MDPWX1", b"\x07"]),
    "ERROR and address": ("too-few-frames", [b"MDPWX1", b"\x07", b"amy"]),
    "ERROR without a code": ("no-body", [b"MDPWX1", b"\x07", b"amy", b""]),
    "ERROR without a text": ("too-few-frames", [b"MDPWX1", b"\x07", b"amy", b"", b"500"]),
    "ERROR with two details": ("too-many-frames", [b"MDPWX1", b"\x07", b"amy", b"", b"500", b"text", b"1", b"2"]),
    "ERROR without its delimiter": ("no-delimiter", [b"MDPWX1", b"\x07", b"amy", b"500", b"text"]),
    "ERROR to nobody": ("bad-address", [b"MDPWX1", b"\x07", b"", b"", b"500", b"text"]),
    "ERROR to 256 bytes": ("bad-address", [b"MDPWX1", b"\x07", b"x" * 256, b"", b"500", b"text"]),
    **{
        f"code {code!r}": ("bad-code", [b"MDPWX1", b"\x07", b"amy", b"", code, b"text"])
        for code in (b"", b"50", b"5000", b"5 0", b"-50", b"abc", b"\xb2\xb2\xb2", "٥٠٠".encode())
    },
    "CANCEL": ("unknown-command", [b"MDPWX1", b"\x08", b"amy", b""]),
    "command 0C": ("unknown-command", [b"MDPWX1", b"\x0c"]),
    "0.2 has no CREDIT": ("unknown-command", [b"MDPW02", b"\x0a", b"5"]),
    "0.2 has no batched form": ("unknown-command", [b"MDPW02", b"\x09", b""]),
    "0.2 has no ERROR": ("unknown-command", [b"MDPW02", b"\x07", b"amy", b"", b"500", b"text"]),
}


@pytest.mark.parametrize(("reason", "frames"), FROM_WORKER.values(), ids=FROM_WORKER)
def test_a_worker_keeps_its_request_after_an_invalid_message(bench: Bench, reason: str, frames: list[bytes]) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.send(*frames)
    worker.nothing()
    client.nothing()
    assert bench.stats()["invalid"] == {reason: 1}
    worker.partial(address, b"still")
    worker.error(address, b"500", b"here")
    client.partial(b"echo", b"still")
    client.error(b"echo", b"500", b"here")
    worker.nothing()
    assert bench.status(b"echo") == b"200"


UNEXPECTED: dict[str, tuple[str, list[bytes]]] = {
    "a second READY": ("second-ready", [b"MDPWX1", b"\x01", b"echo"]),
    "a READY in another dialect": ("second-ready", [b"MDPW02", b"\x01", b"echo"]),
    "an ERROR for another client": ("reply-to-wrong-client", [b"MDPWX1", b"\x07", b"bob", b"", b"500", b"text"]),
    "a FINAL for another client": ("reply-to-wrong-client", [b"MDPWX1", b"\x04", b"bob", b"", b"body"]),
    "a RELEASE of nothing it was given": ("reply-to-wrong-client", [b"MDPWX1", b"\x0b", b"1", b""]),
    "a CREDIT in another service's place": ("second-ready", [b"MDPWX1", b"\x01", b"other", b'{"credit":5}']),
    "a FINAL in another dialect": ("wrong-dialect", [b"MDPW02", b"\x04", b"amy", b"", b"body"]),
}


@pytest.mark.parametrize(("reason", "frames"), UNEXPECTED.values(), ids=UNEXPECTED)
def test_a_worker_is_disconnected_and_another_gets_its_request(bench: Bench, reason: str, frames: list[bytes]) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo")
    client.request(b"echo", b"hello")
    worker.work(b"hello")
    worker.send(*frames)
    assert worker.recv() == [frames[0], b"\x06"]
    worker.nothing()
    client.nothing()
    assert bench.stats()["disconnected"] == {reason: 1}
    other = bench.x1_worker(b"echo")
    other.final(other.work(b"hello", options=b'{"attempt":2}'), b"world")
    client.final(b"echo", b"world")


def test_an_error_without_a_request_or_a_registration_is_unexpected(bench: Bench) -> None:
    client, worker, stranger = bench.x1_client(), bench.x1_worker(b"echo"), bench.x1_worker()
    worker.error(b"amy", b"500", b"text")
    worker.disconnected()
    stranger.error(b"amy", b"500", b"text")
    stranger.disconnected()
    assert bench.stats()["disconnected"] == {"reply-without-request": 1, "not-registered": 1}
    worker.ready(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.error(address, b"500", b"text")
    worker.error(address, b"500", b"and again")
    client.error(b"echo", b"500", b"text")
    worker.nothing()
    client.nothing()
    assert bench.stats()["late"] == 1  # C32


# ── anything ─────────────────────────────────────────────────────────────────────────────────────────────────────────

VOCABULARY = [
    b"", b"", b"", b"MDPCX1", b"MDPCX1", b"MDPWX1", b"MDPWX1", b"MDPC02", b"MDPW02", b"\x01", b"\x01", b"\x02", b"\x03",
    b"\x04", b"\x05", b"\x06", b"\x07", b"\x08", b"\x09", b"1", b"2", b"3", b"one", b"two", b"mmi.service", b"mmi.nope",
    b"\x0a", b"\x0b", b"9", b"{}", b'{"credit":3}', b'{"ttl":0}', b'{"ttl":20}', b'{"wait":false}', b'{"ttl":', b"500",
    b"404", b"peer-1", b"peer-2", b"y" * 256,
]  # fmt: skip

COMMANDS: list[list[bytes]] = [
    [b"1", b"", b"MDPCX1", b"\x01", b"one", b"", b"body"],
    [b"2", b"", b"MDPCX1", b"\x01", b"two", b'{"ttl":20}', b"body"],
    [b"3", b"", b"MDPCX1", b"\x01", b"one", b'{"wait":false}', b"body"],
    [b"1", b"", b"MDPCX1", b"\x05", b"one"],
    [b"2", b"", b"MDPCX1", b"\x05", b"two"],
    [b"", b"MDPCX1", b"\x06"],
    [b"MDPWX1", b"\x01", b"one"],
    [b"MDPWX1", b"\x01", b"two"],
    [b"MDPWX1", b"\x03", b"peer-1", b"", b"body"],
    [b"MDPWX1", b"\x04", b"peer-2", b"", b"body"],
    [b"MDPWX1", b"\x07", b"peer-1", b"", b"500", b"text"],
    [b"MDPWX1", b"\x05"],
    [b"MDPWX1", b"\x06"],
    [b"MDPWX1", b"\x0a", b"3"],
    [b"MDPWX1", b"\x0b", b"1", b""],
    [b"", b"MDPWX1"],
    [b"", b"MDPCX1"],
    [b"", b"MDPWX1", b"\x09", ready_of(b"one", 3)],
    [b"", b"MDPCX1", b"\x09", request_of(7, b"one", b"body", None), b"attachment"],
    [b"", b"MDPCX1", b"\x09", request_of(8, b"two", b"body", ttl=20) + record(5, 7) + record(5, 8)],
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
    client.error(b"steady", b"500", b"reply")
    for peer in peers:
        peer.close()
    # … and in the end nothing is left of it.
    bench.until(lambda: bench.stats()["workers"] == bench.stats()["services"] == 1)
    stats = bench.stats()
    assert stats["queued"] == stats["request_bytes"] == stats["running"] == stats["internal_errors"] == 0
    assert not bench.server.broker.registry.numbered
