"""A ZMTP 3.1 peer (RFC 37, NULL mechanism) on a plain TCP socket, for attacks that no ZeroMQ library would let through.

Connections stay open until they are closed or the process ends, so that an attack keeps what it has taken.
"""

import json
import select
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, Self
from urllib.parse import urlsplit

PATIENCE: Final = 30.0
"""Seconds after which an attacker gives up a connection that is stuck."""
CHUNK: Final = 1 << 18
"""Bytes that are written at once."""
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4

CLAIM: Final = b"mmi.claim"
"""What is asked to see which peer has got an identity."""

Message = list[bytes]

sent: Final[Counter[str]] = Counter()
"""What this process has sent: `messages`."""
still_open: Final[set["Connection"]] = set()
_fences = count(1)


def frame(data: bytes, flags: int = 0) -> bytes:
    """Return a frame as it is on the wire."""
    if len(data) < 256:
        return bytes((flags, len(data))) + data
    return bytes((flags | LONG,)) + len(data).to_bytes(8, "big") + data


def encode(message: Sequence[bytes]) -> bytes:
    """Return a message as it is on the wire."""
    return b"".join([*(frame(each, MORE) for each in message[:-1]), frame(message[-1])])


def ready(identity: bytes, kind: bytes = b"DEALER") -> bytes:
    """Return the READY command of the handshake."""
    properties = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    properties += b"\x08Identity" + len(identity).to_bytes(4, "big") + identity
    return frame(b"\x05READY" + properties, COMMAND)


class Connection:
    """A TCP connection to the broker, before any handshake."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self.socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        still_open.add(self)

    def write(self, data: bytes) -> None:
        """Send raw bytes, which count as one message."""
        sent["messages"] += 1
        self.socket.sendall(data)

    def close(self) -> None:
        still_open.discard(self)
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Peer(Connection):
    """A connection that has completed its handshake, with an `identity` of its own choice, or none."""

    def __init__(self, endpoint: str, identity: bytes = b"") -> None:
        super().__init__(endpoint)
        self._read = bytearray()
        self._at = len(GREETING)
        """Where the next frame begins in what was read."""
        self._message: Message = []
        """The frames so far of the message that is arriving."""
        self.socket.sendall(GREETING + ready(identity))
        # libzmq closes connections that send messages before it has sent its own READY.
        if self._frame(time.monotonic() + PATIENCE) is None:
            raise TimeoutError("the broker does not greet")

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, *frames: bytes) -> None:
        """Send one message."""
        self.write(encode(frames))

    def flood(self, messages: Iterable[Sequence[bytes]], *, read: bool = True) -> None:
        """Send messages as fast as the broker takes them, and throw away what it answers, or do not `read` that."""
        parts: list[bytes] = []
        size = 0
        for message in messages:
            parts.append(encode(message))
            size += len(parts[-1])
            sent["messages"] += 1
            if size >= CHUNK:
                self._push(b"".join(parts), read=read)
                parts, size = [], 0
        self._push(b"".join(parts), read=read)

    def _push(self, data: bytes, *, read: bool) -> None:
        left = memoryview(data)
        while left:
            events = self._wait(PATIENCE, select.POLLOUT | (select.POLLIN if read else 0))
            if not events:
                raise TimeoutError("the broker neither reads nor writes")
            if events & select.POLLIN:
                self._receive()
                while self._next_frame() is not None:
                    pass
            if events & ~select.POLLIN:
                left = left[self.socket.send(left[:65536]) :]

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────────────

    def recv(self, timeout: float = PATIENCE) -> Message | None:
        """Return the next message, or None if none arrives in time.  Raises `OSError` if the connection has ended."""
        until = time.monotonic() + timeout
        while (found := self._frame(until)) is not None:
            flags, data = found
            if flags & COMMAND:
                continue
            self._message.append(data)
            if not flags & MORE:
                message, self._message = self._message, []
                return message
        return None

    def _frame(self, until: float) -> tuple[int, bytes] | None:
        while (found := self._next_frame()) is None:
            if not self._wait(until - time.monotonic()):
                return None
            self._receive()
        return found

    def _wait(self, seconds: float, events: int = select.POLLIN) -> int:
        """Wait until one of these events has happened; return those that have, 0 if none has in time."""
        poll = select.poll()
        poll.register(self.socket, events)
        return sum(found for _, found in poll.poll(1000 * max(0.0, seconds)))

    def _receive(self) -> None:
        data = self.socket.recv(CHUNK)
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        if self._at <= len(self._read):
            del self._read[: self._at]
            self._at = 0
        self._read += data

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Return the flags and the data of the next frame that has been received, or None."""
        read, at = self._read, self._at
        if len(read) < at + 2:
            return None
        flags = read[at]
        head = 9 if flags & LONG else 2
        if len(read) < at + head:
            return None
        start = at + head
        end = start + int.from_bytes(read[at + 1 : start], "big")
        if len(read) < end:
            return None
        self._at = end
        return flags, bytes(read[start:end])

    def expect(self, *parts: bytes) -> Message:
        """Return the next message that contains these frames in a row; others are thrown away."""
        while (message := self.recv()) is not None:
            if any(tuple(message[at : at + len(parts)]) == parts for at in range(len(message))):
                return message
        raise AssertionError(f"{parts} did not arrive")

    def ask(self, service: bytes, body: bytes = b"") -> Any:
        """Return what the broker itself answers to a request, with what arrived before as `(answer, before)`."""
        self.send(b"", b"MDPC02", b"\x01", service, body)
        before: list[Message] = []
        while (message := self.recv()) is not None:
            if message[:4] == [b"", b"MDPC02", b"\x03", service]:
                return message[4], before
            before.append(message)
        raise AssertionError(f"the broker did not answer {service!r}")

    def sync(self) -> list[Message]:
        """Wait until the broker has taken in everything that was sent here; return what arrived until then."""
        # Twice: the broker dispatches at the end of a turn, after the answers to what it read in that turn.
        return [message for _ in range(2) for message in self.ask(b"mmi.fence-%d" % next(_fences))[1]]

    def limits(self) -> dict[str, Any]:
        """Return the broker's limits."""
        limits: dict[str, Any] = json.loads(self.ask(b"mmi.broker")[0])["limits"]
        return limits


def settle(endpoint: str) -> None:
    """Wait until the broker has taken in what peers have sent that do not read: its counts change no more."""
    with Peer(endpoint) as peer:
        counts, same = None, 0
        for polls in count():
            stats = json.loads(peer.ask(b"mmi.stats")[0])
            now = stats["mmi"] - polls, stats["heartbeats"], stats["partials"], stats["replies"]
            counts, same = now, same + 1 if now == counts else 0
            if same == 20:
                return


def crowd(endpoint: str, identity: bytes) -> list[Peer]:
    """Connect many peers that all want this identity, and make each ask for `CLAIM`; the broker may refuse them.

    libzmq ignores a peer whose identity is in use; once the one that has it is forgotten, it takes the next one for it.
    """
    peers = []
    for _ in range(20):
        with suppress(OSError):
            peers.append(Peer(endpoint, identity))
    for peer in peers:
        with suppress(OSError):
            peer.send(b"", b"MDPC02", b"\x01", CLAIM, b"")
    return peers


def take_over(endpoint: str, victim: Peer, identity: bytes) -> list[Peer]:
    """Disconnect `victim` while the broker is busy, and return a crowd that wants its identity."""
    with Peer(endpoint) as noise:
        noise.flood([b"", b"MDPC02", b"\x01", b"mmi.noise", b""] for _ in range(1000))
        victim.close()
        return crowd(endpoint, identity)
