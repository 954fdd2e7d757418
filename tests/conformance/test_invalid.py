"""Invalid messages (C15, C19): dropped and counted by reason, never answered; the peer's other traffic goes on."""

import random
from collections.abc import Callable

import pytest
import zmq
from support.peers import Bench, Peer
from support.processes import TIMEOUT_MS

Start = Callable[..., Bench]

BAD_NAMES = {
    "empty": b"",
    "zero byte": b"ec\x00ho",
    "line break": b"ec\nho",
    "tab": b"ec\tho",
    "escape": b"\x1b[2Jecho",
    "delete": b"echo\x7f",
    "not UTF-8": b"ech\xff",
    "cut UTF-8": "größer".encode()[:3],
    "overlong UTF-8": b"\xc0\xaf",
    "C1 control": "echo\x85".encode(),
    "right-to-left override": "echo\u202e".encode(),
    "256 bytes": b"x" * 256,
}

INVALID: dict[str, tuple[str, list[bytes]]] = {
    # what has no header that is known
    "one empty frame": ("too-few-frames", [b""]),
    "an unknown header": ("no-header", [b"MDPC03", b"\x01", b"echo", b"body"]),
    "lower case": ("no-header", [b"mdpc02", b"\x01", b"echo", b"body"]),
    "a longer header": ("no-header", [b"MDPC02\x00", b"\x01", b"echo", b"body"]),
    "something else": ("no-header", [b"GET / HTTP/1.1\r\n\r\n"]),
    "an empty frame and no header": ("no-header", [b"", b"echo", b"body"]),
    "two empty frames": ("no-header", [b"", b"", b"MDPC02", b"\x01", b"echo", b"body"]),
    "an envelope and no header": ("no-header", [b"id", b"", b"\x01", b"echo", b"body"]),
    "an envelope and nothing": ("too-few-frames", [b"id", b""]),
    "an envelope without its empty frame": ("no-header", [b"id", b"MDPC02", b"\x01", b"echo", b"body"]),
    # client
    "client: header only": ("too-few-frames", [b"MDPC02"]),
    "client: no service": ("too-few-frames", [b"MDPC02", b"\x01"]),
    "client: no body": ("no-body", [b"MDPC02", b"\x01", b"echo"]),
    "client: PARTIAL": ("unknown-command", [b"MDPC02", b"\x02", b"echo", b"body"]),
    "client: FINAL": ("unknown-command", [b"MDPC02", b"\x03", b"echo", b"body"]),
    "client: command 00": ("unknown-command", [b"MDPC02", b"\x00", b"echo", b"body"]),
    "client: empty command": ("unknown-command", [b"MDPC02", b"", b"echo", b"body"]),
    "client: command of two bytes": ("unknown-command", [b"MDPC02", b"\x01\x01", b"echo", b"body"]),
    "client: command in ASCII": ("unknown-command", [b"MDPC02", b"1", b"echo", b"body"]),
    "client 0.1: header only": ("too-few-frames", [b"", b"MDPC01"]),
    "client 0.1: no body": ("no-body", [b"", b"MDPC01", b"echo"]),
    # worker
    "worker: header only": ("too-few-frames", [b"MDPW02"]),
    "worker: command 00": ("unknown-command", [b"MDPW02", b"\x00"]),
    "worker: REQUEST": ("unknown-command", [b"MDPW02", b"\x02", b"amy", b"", b"body"]),
    "worker: command 07": ("unknown-command", [b"MDPW02", b"\x07"]),
    "worker: command of two bytes": ("unknown-command", [b"MDPW02", b"\x05\x05"]),
    "worker: empty command": ("unknown-command", [b"MDPW02", b""]),
    "worker: READY without a service": ("too-few-frames", [b"MDPW02", b"\x01"]),
    "worker: READY for two": ("too-many-frames", [b"MDPW02", b"\x01", b"echo", b"other"]),
    "worker: HEARTBEAT with a body": ("too-many-frames", [b"MDPW02", b"\x05", b"body"]),
    "worker: DISCONNECT with a body": ("too-many-frames", [b"MDPW02", b"\x06", b"body"]),
    "worker: PARTIAL only": ("too-few-frames", [b"MDPW02", b"\x03"]),
    "worker: FINAL only": ("too-few-frames", [b"MDPW02", b"\x04"]),
    "worker: FINAL and address": ("too-few-frames", [b"MDPW02", b"\x04", b"amy"]),
    "worker: FINAL without a body": ("no-body", [b"MDPW02", b"\x04", b"amy", b""]),
    "worker: PARTIAL without a body": ("no-body", [b"MDPW02", b"\x03", b"amy", b""]),
    "worker: FINAL without its delimiter": ("no-delimiter", [b"MDPW02", b"\x04", b"amy", b"body"]),
    "worker: PARTIAL without its delimiter": ("no-delimiter", [b"MDPW02", b"\x03", b"amy", b"body", b"more"]),
    "worker: FINAL to nobody": ("bad-address", [b"MDPW02", b"\x04", b"", b"", b"body"]),
    "worker: FINAL to an address of 256 bytes": ("bad-address", [b"MDPW02", b"\x04", b"x" * 256, b"", b"body"]),
    "worker 0.1: header only": ("too-few-frames", [b"", b"MDPW01"]),
    "worker 0.1: command 06": ("unknown-command", [b"", b"MDPW01", b"\x06"]),
    "worker 0.1: REPLY without its delimiter and address": ("bad-address", [b"", b"MDPW01", b"\x03", b"", b"body"]),
    "worker 0.1: REPLY without a body": ("no-body", [b"", b"MDPW01", b"\x03", b"amy", b""]),
    **{
        f"client: service name: {what}": ("bad-service-name", [b"MDPC02", b"\x01", name, b"body"])
        for what, name in BAD_NAMES.items()
    },
    **{f"worker: service name: {what}": ("bad-service-name", [b"MDPW02", b"\x01", n]) for what, n in BAD_NAMES.items()},
    "client 0.1: service name: empty": ("bad-service-name", [b"", b"MDPC01", b"", b"body"]),
}

each_invalid = pytest.mark.parametrize(("reason", "frames"), INVALID.values(), ids=INVALID)


@each_invalid
def test_c15_an_invalid_message_is_dropped_and_counted(bench: Bench, reason: str, frames: list[bytes]) -> None:
    # C15, C19, C23
    peer = bench.client()
    peer.send(*frames)
    peer.nothing()
    stats = bench.stats()
    assert stats["invalid"] == {reason: 1}
    assert stats["services"] == stats["workers"] == stats["queued"] == stats["running"] == 0
    assert stats["disconnected"] == {}
    worker = bench.worker(b"echo")
    peer.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    peer.final(b"echo", b"world")


@each_invalid
def test_c15_a_worker_keeps_its_request_after_an_invalid_message(
    bench: Bench, reason: str, frames: list[bytes]
) -> None:
    # C15: the peer's other traffic is judged on its own
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.send(*frames)
    worker.nothing()
    client.nothing()
    assert bench.stats()["invalid"] == {reason: 1}
    worker.partial(address, b"still")
    worker.final(address, b"here")
    client.partial(b"echo", b"still")
    client.final(b"echo", b"here")
    worker.nothing()
    assert bench.status(b"echo") == b"200"


def test_c15_each_of_a_thousand_invalid_messages_is_counted(bench: Bench) -> None:
    # C15
    peer = bench.peer()
    for _ in range(1000):
        peer.send(b"rubbish")
        peer.send(b"MDPC02", b"\x07")
    peer.nothing()
    assert bench.stats()["invalid"] == {"no-header": 1000, "unknown-command": 1000}


def test_c19_a_request_of_three_frames_is_invalid_even_if_a_worker_is_idle(bench: Bench) -> None:
    # C19
    client, worker = bench.client(), bench.worker(b"echo")
    client.send(b"MDPC02", b"\x01", b"echo")
    client.nothing()
    worker.nothing()
    client.send(b"MDPC02", b"\x01", b"mmi.service")
    client.nothing()
    assert bench.stats()["invalid"] == {"no-body": 2}


def test_c15_a_message_with_too_many_frames(start: Start) -> None:
    # C15: the limit counts the ROUTER's identity frame
    bench = start(max_frames=20)
    client, worker = bench.client(), bench.worker(b"echo")
    fits = [b"x"] * (20 - 4)
    client.request(b"echo", *fits, b"one too many")
    client.nothing()
    worker.nothing()
    assert bench.stats()["invalid"] == {"too-many-frames": 1}
    client.request(b"echo", *fits)
    address = worker.work(*fits)
    worker.final(address, b"done")
    client.final(b"echo", b"done")


def test_c15_a_message_of_far_too_many_frames_ends_its_connection(start: Start) -> None:
    # C15: it is counted like any other, and nobody else is affected
    bench = start(max_frames=20)
    client, worker, other = bench.client(), bench.worker(b"echo"), bench.client()
    client.send(*[b"x"] * (16 * 20))
    client.nothing()
    assert bench.stats()["invalid"] == {"too-many-frames": 1}
    with client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        client.send(*[b"x"] * 50_000)
        ended = monitor.poll(TIMEOUT_MS)
        client.socket.disable_monitor()
    assert ended
    bench.until(lambda: bench.stats()["invalid"] == {"too-many-frames": 2})
    other.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    other.final(b"echo", b"world")


def test_c15_a_message_that_is_too_large(start: Start) -> None:
    # C15
    bench = start(max_message=100_000)
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"x" * 100_000)
    client.request(b"echo", b"x" * 60_000, b"x" * 60_000)
    client.nothing()
    worker.nothing()
    assert bench.stats()["invalid"] == {"too-large": 2}
    client.request(b"echo", b"x" * 90_000)
    address = worker.work(b"x" * 90_000)
    worker.final(address, b"y" * 100_000)
    worker.nothing()
    client.nothing()
    assert bench.stats()["invalid"] == {"too-large": 3}
    worker.final(address, b"y" * 90_000)
    client.final(b"echo", b"y" * 90_000)


def test_c15_a_far_too_large_frame_disconnects_only_its_sender(start: Start) -> None:
    # C15: libzmq cuts its sender off before it is all in memory
    bench = start(max_message=100_000, heartbeat=0.05, liveness=1000)
    glutton, client, worker = bench.client(), bench.client(), bench.worker(b"echo")
    glutton.request(b"echo", b"x" * 20_000_000)
    client.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    worker.nothing()


VOCABULARY = [
    b"", b"", b"", b"MDPC02", b"MDPC02", b"MDPW02", b"MDPW02", b"MDPC01", b"MDPW01", b"MDPC03", b"\x00", b"\x01",
    b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x07", b"\x01\x01", b"one", b"two", b"three", b"mmi.",
    b"mmi.service", b"mmi.stats", b"mmi.services", b"mmi.workers", b"mmi.broker", b"mmi.nope", b"peer-1", b"peer-2",
    b"x" * 255, b"y" * 256, b"\xff\xfe", b"\n", "größer".encode(),
]  # fmt: skip

COMMANDS: list[list[bytes]] = [
    [b"MDPC02", b"\x01", b"one", b"body"],
    [b"", b"MDPC01", b"two", b"body"],
    [b"MDPC02", b"\x01", b"mmi.service", b"one"],
    [b"MDPW02", b"\x01", b"one"],
    [b"", b"MDPW01", b"\x01", b"two"],
    [b"MDPW02", b"\x03", b"peer-1", b"", b"body"],
    [b"MDPW02", b"\x04", b"peer-2", b"", b"body"],
    [b"MDPW02", b"\x05"],
    [b"MDPW02", b"\x06"],
]


def garbage(chance: random.Random) -> list[bytes]:
    """Random bytes, random words, or a command with something wrong, or now and then nothing wrong."""
    kind = chance.randrange(3)
    if kind == 0:
        return [chance.randbytes(chance.choice((0, 1, 6, 40, 300))) for _ in range(chance.randint(1, 8))]
    if kind == 1:
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


@pytest.mark.parametrize("seed", [18, 2012])
def test_c15_five_thousand_random_messages_from_several_peers(start: Start, seed: int) -> None:
    # C15
    bench = start(heartbeat=0.05, liveness=1000, expiry=0.5)
    chance = random.Random(seed)
    client, worker = bench.client(), bench.worker(b"steady")
    peers: list[Peer] = [bench.peer(options={zmq.IDENTITY: b"peer-%d" % number}) for number in range(6)]
    for number in range(5000):
        chance.choice(peers).send(*garbage(chance))
        if number % 100 == 0:
            client.request(b"steady", b"%d" % number)
            worker.final(worker.work(b"%d" % number), b"reply")
            client.final(b"steady", b"reply")
    for peer in peers:
        peer.sync()
    assert sum(bench.stats()["invalid"].values()) > 2000
    client.request(b"steady", b"last")
    worker.final(worker.work(b"last"), b"reply")
    client.final(b"steady", b"reply")
    for peer in peers:
        peer.close()
    # … and in the end nothing is left of it.
    bench.until(lambda: bench.stats()["workers"] == bench.stats()["services"] == 1)
    stats = bench.stats()
    assert stats["queued"] == stats["request_bytes"] == stats["running"] == stats["internal_errors"] == 0
