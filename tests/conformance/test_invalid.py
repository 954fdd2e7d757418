"""Invalid messages (C15, C19): dropped and counted by reason, never answered; the peer's other traffic goes on."""

import random
from collections.abc import Callable

import pytest
import zmq
from support.peers import Bench, Peer, body_of, ready_of, record, request_of
from support.processes import TIMEOUT_MS

Start = Callable[..., Bench]

INVALID: dict[str, tuple[str, list[bytes]]] = {
    # one for each reason, and dialect; tests/mdp/wire has every way to be wrong
    "one empty frame": ("too-few-frames", [b""]),
    "an unknown header": ("no-header", [b"MDPC03", b"\x01", b"echo", b"body"]),
    "something else": ("no-header", [b"GET / HTTP/1.1\r\n\r\n"]),
    "an envelope without its empty frame": ("no-header", [b"id", b"MDPC02", b"\x01", b"echo", b"body"]),
    "client: no body": ("no-body", [b"MDPC02", b"\x01", b"echo"]),
    "client: command 00": ("unknown-command", [b"MDPC02", b"\x00", b"echo", b"body"]),
    "client 0.1: header only": ("too-few-frames", [b"", b"MDPC01"]),
    "worker: REQUEST": ("unknown-command", [b"MDPW02", b"\x02", b"amy", b"", b"body"]),
    "worker: HEARTBEAT with a body": ("too-many-frames", [b"MDPW02", b"\x05", b"body"]),
    "worker: FINAL and address": ("too-few-frames", [b"MDPW02", b"\x04", b"amy"]),
    "worker: FINAL without a body": ("no-body", [b"MDPW02", b"\x04", b"amy", b""]),
    "worker: FINAL without its delimiter": ("no-delimiter", [b"MDPW02", b"\x04", b"amy", b"body"]),
    "worker: FINAL to nobody": ("bad-address", [b"MDPW02", b"\x04", b"", b"", b"body"]),
    "worker 0.1: REPLY without a body": ("no-body", [b"", b"MDPW01", b"\x03", b"amy", b""]),
    "client: service name": ("bad-service-name", [b"MDPC02", b"\x01", b"ec\nho", b"body"]),
    "client 0.1: service name": ("bad-service-name", [b"", b"MDPC01", b"", b"body"]),
    "worker: service name": ("bad-service-name", [b"MDPW02", b"\x01", b"x" * 256]),
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


CLIENT = [b"", b"MDPCX1", b"\x09"]
WORKER = [b"", b"MDPWX1", b"\x09"]
VOCABULARY = [
    b"", b"", b"", b"MDPC02", b"MDPC02", b"MDPW02", b"MDPW02", b"MDPC01", b"MDPW01", b"MDPC03", b"\x00", b"\x01",
    b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x07", b"\x01\x01", b"one", b"two", b"three", b"mmi.",
    b"mmi.service", b"mmi.stats", b"mmi.services", b"mmi.workers", b"mmi.broker", b"mmi.nope", b"peer-1", b"peer-2",
    b"x" * 255, b"y" * 256, b"\xff\xfe", b"\n", "größer".encode(), b"MDPCX1", b"MDPCX1", b"MDPWX1", b"MDPWX1", b"\x09",
    b"\x09", record(5, 7), record(6, 0), record(11, 1),
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
]


def garbage(chance: random.Random) -> list[bytes]:
    """Random bytes, random words, or a command with something wrong, or now and then nothing wrong."""
    kind = chance.randrange(3)
    if kind == 0 and chance.randrange(2):
        records = b"".join(chance.choice(COMMANDS)[-1] for _ in range(3)) + chance.randbytes(chance.randint(0, 40))
        return [*chance.choice([CLIENT, WORKER]), records, *[b"x"] * chance.randrange(3)]
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
    # C15, C43
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
    assert not bench.server.broker.registry.numbered
