"""Attacks below the protocol: bytes, handshakes, connections and frames."""

import time
from contextlib import suppress
from random import Random
from typing import Final

import zmq

from .zmtp import GREETING, LONG, MORE, Connection, Peer, encode, frame, ready

MAX_CONNECTIONS: Final = 5000
"""Of one attack, to leave descriptors to the rest of the machine."""


def garbage_bytes(endpoint: str, amount: int, rng: Random) -> None:
    """Random bytes, some of them after a valid beginning."""
    beginnings = [b"", b"", GREETING[:10], GREETING, GREETING + ready(b""), b"GET / HTTP/1.1\r\n", b"\x16\x03\x01"]
    for _ in range(amount // 5):
        with Connection(endpoint) as connection:
            with suppress(OSError):  # the broker may close the connection
                connection.write(rng.choice(beginnings) + rng.randbytes(rng.choice([1, 9, 10, 64, 1000, 20_000])))


def impossible_frames(endpoint: str, amount: int, rng: Random) -> None:
    """Frames that claim to be longer than memory, reserved flags, and commands of all kinds after the handshake."""
    for _ in range(amount // 5):
        with Peer(endpoint) as peer:
            size = rng.choice([1 << 63, (1 << 64) - 1, 1 << 40, 1 << 31, rng.getrandbits(64)]).to_bytes(8, "big")
            data = rng.choice([
                bytes((LONG,)) + size + rng.randbytes(100),
                bytes((LONG | MORE,)) + size,
                bytes((rng.randrange(8, 256), 5)) + rng.randbytes(5),
                frame(b"\x04PING" + rng.randbytes(rng.choice([0, 2, 20, 5000])), 4),
                frame(b"\x05READY" + rng.randbytes(30), 4),
                frame(b"\x05ERROR" + rng.randbytes(30), 4),
                frame(b"", 4) * 100,
            ])  # fmt: skip
            with suppress(OSError):  # the broker may close the connection
                peer.write(data)


def half_handshakes(endpoint: str, amount: int, rng: Random) -> None:
    """Connections that stop within the handshake and stay open."""
    whole = GREETING + ready(b"half")
    for _ in range(min(amount // 10, MAX_CONNECTIONS)):
        connection = Connection(endpoint)
        if part := whole[: rng.randrange(len(whole))]:
            connection.write(part)


def many_connections(endpoint: str, amount: int, rng: Random) -> None:
    """Connections by the thousand, each of them known to the broker; at the end all of them leave at once."""
    del rng
    peers = []
    for _ in range(min(amount // 10, MAX_CONNECTIONS)):
        peers.append(Peer(endpoint))
        peers[-1].send(b"", b"MDPC02", b"\x01", b"waited-for", b"body")
    for peer in peers:
        peer.sync()


def beyond_the_descriptors(endpoint: str, amount: int, rng: Random) -> None:
    """More connections than the broker has descriptors for (C42)."""
    del rng
    for _ in range(min(amount // 2, 900)):  # more would wait for room in the listener's backlog
        Connection(endpoint).write(GREETING)


def connections_that_come_and_go(endpoint: str, amount: int, rng: Random) -> None:
    """Peers that connect, send a request, and leave without reading the answer."""
    for _ in range(amount // 5):
        with Peer(endpoint, rng.choice([b"", b"the same", b"%d" % rng.getrandbits(30)])) as peer:
            peer.send(b"", b"MDPC02", b"\x01", rng.choice([b"mmi.stats", b"waited-for"]), b"body")


def slow_loris(endpoint: str, amount: int, rng: Random) -> None:
    """A hundred peers that send one byte a second, of the handshake or of a message."""
    handshake, message = GREETING + ready(b""), encode([b"", b"MDPC02", b"\x01", b"mmi.stats", b"body"])
    halves: list[tuple[Connection, bytes]] = []
    for number in range(100):
        text, connection = (message, Peer(endpoint)) if number % 2 else (handshake, Connection(endpoint))
        start = rng.randrange(1, len(text))
        connection.write(text[:start])
        halves.append((connection, text[start:]))
    for second in range(max(2, amount // 5000)):
        time.sleep(1)  # the attack itself
        for connection, text in halves:
            with suppress(OSError):  # the broker ends a handshake that takes too long
                connection.write(text[second : second + 1])


def next_routing_ids(endpoint: str, amount: int, rng: Random) -> None:
    """Take the ids that libzmq will give to the next peers, if they are those of any other process (C39)."""
    del rng
    first = _first_automatic_id()
    claimed = min(amount // 10, MAX_CONNECTIONS // 2)
    for number in range(first, first + claimed):
        Peer(endpoint, b"\0" + (number % (1 << 32)).to_bytes(4, "big"))
    for _ in range(claimed):
        with Peer(endpoint) as peer:
            peer.sync()


def _first_automatic_id() -> int:
    """Return the number that a ROUTER of a fresh process gives to its first peer."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"")
        return int.from_bytes(router.recv_multipart()[0][1:], "big")
