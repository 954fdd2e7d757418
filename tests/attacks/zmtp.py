"""A ZMTP 3.1 peer (RFC 37, NULL mechanism) on a plain TCP socket, for attacks that no ZeroMQ library would let through.

Connections stay open until they are closed or the process ends, so that an attack keeps what it has taken.
"""

import json
import select
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Final, Self
from urllib.parse import urlsplit

PATIENCE: Final = 30.0
"""Seconds after which an attacker gives up a connection that is stuck."""
CHUNK: Final = 1 << 18
"""Bytes that are written at once."""
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4

Message = list[bytes]

sent: Final[Counter[str]] = Counter()
"""What this process has sent: `messages`, `connections`."""
_open: Final[set["Connection"]] = set()
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
        _open.add(self)
        sent["connections"] += 1

    def write(self, data: bytes) -> None:
        """Send raw bytes, which count as one message."""
        sent["messages"] += 1
        self.socket.sendall(data)

    def close(self) -> None:
        _open.discard(self)
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
        self._at = 0
        """Where the next frame begins in what was read."""
        self.socket.sendall(GREETING + ready(identity))
        until = time.monotonic() + PATIENCE
        while len(self._read) < len(GREETING):
            if not select.select([self.socket], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the broker does not greet")
            self._receive()
        self._at = len(GREETING)

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
            readable, writable, _ = select.select([self.socket] if read else [], [self.socket], [], PATIENCE)
            if not readable and not writable:
                raise TimeoutError("the broker neither reads nor writes")
            if readable:
                self._receive()
                while (found := self._next_frame()) is not None:
                    del found
            if writable:
                left = left[self.socket.send(left[:65536]) :]

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────────────

    def recv(self, timeout: float = PATIENCE) -> Message | None:
        """Return the next message, or None if none arrives in time.  Raises `OSError` if the connection has ended."""
        until = time.monotonic() + timeout
        message: Message = []
        while (found := self._frame(until)) is not None:
            flags, data = found
            if flags & COMMAND:
                continue
            message.append(data)
            if not flags & MORE:
                return message
        return None

    def _frame(self, until: float) -> tuple[int, bytes] | None:
        while (found := self._next_frame()) is None:
            if not select.select([self.socket], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            self._receive()
        return found

    def _receive(self) -> None:
        data = self.socket.recv(CHUNK)
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        if self._at:
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


def take_over(endpoint: str, identity: bytes, tries: int = 50) -> tuple[Peer, list[Message]] | None:
    """Connect as `identity` once its owner is gone; return the peer and what it was sent, None if it is not let in.

    libzmq does not read from a second connection of an identity while it knows the first.
    """
    for _ in range(tries):
        peer = Peer(endpoint, identity)
        name = b"mmi.claim-%d" % next(_fences)
        try:
            peer.send(b"", b"MDPC02", b"\x01", name, b"")
            before: list[Message] = []
            while (message := peer.recv(0.1)) is not None:
                before.append(message)
                if name in message:
                    return peer, before
        except OSError:
            pass  # the broker refused the connection
        peer.close()
    return None
