"""Peers that speak ZMTP 3.0 over a plain TCP socket, and so may do what libzmq does not."""

import errno
import socket
import struct
from contextlib import suppress
from typing import Self

from support.peers import TIMEOUT_SECONDS, Message

GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


class Ended(AssertionError):
    """The connection has ended."""


class RawPeer:
    """A DEALER that claims any routing id; with an empty one, the ROUTER generates it.

    Without `handshake`, it only connects.
    """

    def __init__(self, endpoint: str, identity: bytes = b"", *, handshake: bool = True) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._socket = socket.socket()
        self._socket.settimeout(TIMEOUT_SECONDS)
        with suppress(BrokenPipeError, ConnectionResetError):  # the broker has ended it already, as `recv` will show
            self._socket.connect((host, int(port)))
        if handshake:
            self.shake_hands(identity)

    def shake_hands(self, identity: bytes = b"") -> None:
        """Do the handshake.  Raises `Ended` if the broker ends the connection first."""
        ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity)
        self._socket.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
        self._read(len(GREETING))
        flags, command = self._frame()
        assert flags == 4
        assert command.startswith(b"\x05READY")

    def send(self, *frames: bytes) -> Self:
        """Send a message of short frames."""
        last = len(frames) - 1
        self._socket.sendall(b"".join(bytes([i < last, len(frame)]) + frame for i, frame in enumerate(frames)))
        return self

    def recv(self) -> Message:
        """The next message.  Raises `Ended` if the broker ends the connection first."""
        message: Message = []
        more = 1
        while more:
            more, frame = self._frame()
            message.append(frame)
        return message

    def wait_for_end(self) -> None:
        """Wait until the broker ends the connection."""
        try:
            while self._socket.recv(4096):
                pass
        except OSError as error:
            if error.errno not in {errno.ECONNRESET, errno.ENOTCONN}:  # the second if it ended while it was made
                raise

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _frame(self) -> tuple[int, bytes]:
        flags, size = self._read(2)
        assert not flags & 2, "a long frame"
        return flags, self._read(size)

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                part = self._socket.recv(count - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                raise Ended
            data += part
        return data


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
