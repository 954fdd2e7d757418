"""gearmand, with raw sockets that speak its binary protocol, because the `gear` package stalls for 44 ms per job.

Client and worker have one connection each, without Nagle's delay.  A worker sends WORK_COMPLETE and the next GRAB_JOB
in one write, and sleeps (PRE_SLEEP, NOOP) when there is no job, as the protocol specifies.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from . import processes
from .load import Caller, WrongReplyError, body
from .peer import Peer, Server, Work

CAN_DO, PRE_SLEEP, NOOP, SUBMIT_JOB, JOB_CREATED, GRAB_JOB = 1, 4, 6, 7, 8, 9
NO_JOB, JOB_ASSIGN, WORK_COMPLETE, ECHO_REQ, ECHO_RES = 10, 11, 13, 16, 17
HEADER = struct.Struct(">4sII")
FUNCTION = b"bench"


# ── packets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def packet(kind: int, *arguments: bytes) -> bytes:
    """Return a packet to the server."""
    data = b"\0".join(arguments)
    return HEADER.pack(b"\0REQ", kind, len(data)) + data


class Packets:
    """Parses the server's packets from bytes as they arrive."""

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the packets that `data` completes: kind and arguments.  Raises `ValueError` if the server is not
        gearmand."""
        self._left += data
        at = 0
        while len(self._left) - at >= HEADER.size:
            magic, kind, size = HEADER.unpack_from(self._left, at)
            if magic != b"\0RES":
                raise ValueError(f"a packet of gearmand begins with 00 RES, not with {magic!r}")
            end = at + HEADER.size + size
            if len(self._left) < end:
                break
            yield kind, bytes(self._left[at + HEADER.size : end])
            at = end
        del self._left[:at]


class Connection:
    """A connection to gearmand."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._packets = Packets()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> list[tuple[int, bytes]]:
        """Wait for packets and return those that have arrived."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("gearmand has closed the connection")
        return list(self._packets.feed(data))

    def close(self) -> None:
        self.socket.close()


# ── the peer ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Gearman(Peer):
    """Gearman's job server in C."""

    name: str = "gearmand"
    synchronous: ClassVar[bool] = True
    needs: ClassVar[dict[str, str]] = {"gearmand": "Debian: apt-get install gearman-job-server"}

    @contextmanager
    def server(self, folder: Path) -> Iterator[Server]:
        port = processes.free_port()
        command = ["gearmand", "--listen", "127.0.0.1", "--port", str(port), "--log-file", "stderr"]
        with processes.running(*command, cwd=folder) as process:
            process.eventually(processes.listening(port))
            yield Server(f"127.0.0.1:{port}", [process.pid])

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        connection = Connection(address)
        connection.send(packet(CAN_DO, FUNCTION) + packet(ECHO_REQ, b"there"))
        while True:
            for kind, data in connection.receive():
                if kind == ECHO_RES:
                    ready()
                    connection.send(packet(GRAB_JOB))
                elif kind == JOB_ASSIGN:
                    handle, _, request = data.split(b"\0", 2)
                    connection.send(packet(WORK_COMPLETE, handle, work(request)) + packet(GRAB_JOB))
                elif kind == NO_JOB:
                    connection.send(packet(PRE_SLEEP))
                elif kind == NOOP:
                    connection.send(packet(GRAB_JOB))

    @contextmanager
    def caller(self, address: str, outstanding: int) -> Iterator[Caller]:
        del outstanding
        with closing(Connection(address)) as connection:
            yield _Submitting(connection)


class _Submitting:
    """Jobs by handle: JOB_CREATED arrives in the order of submission.  Collected packets are sent together."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._gathered: list[bytes] = []
        self._submitted: list[int] = []
        self._keys: dict[bytes, int] = {}

    def send(self, key: int) -> None:
        self._gathered.append(packet(SUBMIT_JOB, FUNCTION, b"", body(key)))
        self._submitted.append(key)

    def receive(self) -> Iterator[tuple[int, float]]:
        if self._gathered:
            self._connection.send(b"".join(self._gathered))
            self._gathered.clear()
        created = 0
        done = []
        for kind, data in self._connection.receive():
            if kind == JOB_CREATED:
                self._keys[data] = self._submitted[created]
                created += 1
            elif kind == WORK_COMPLETE:
                handle, _, reply = data.partition(b"\0")
                key = self._keys.pop(handle)
                if reply != body(key):
                    raise WrongReplyError(reply)
                done.append((key, time.perf_counter()))
        del self._submitted[:created]
        return iter(done)
