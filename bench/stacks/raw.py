"""Plain sockets that speak MDP/0.2 through two other brokers: one by the Guide's method, and one that only forwards.

The Guide's method in Python (guide_method.py): broker, client and workers use `recv_multipart` and `send_multipart`,
and a worker has one connection.  The forwarding loop (native/forward.c) has no services, queues or detection of dead
workers, and its client and workers only handle frames: no Python stack over ZeroMQ can do less, so it is the limit.
"In turn" is the limit if workers get requests whether or not they are busy, as with NATS: then many travel together.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import zmq

from zmdp.mdp.transport.multipart import receive, send

from . import processes
from .load import Caller, WrongReplyError, body
from .peer import Peer, Server, Work

SERVICE = b"bench"
CLIENT, WORKER = b"MDPC02", b"MDPW02"
READY, REQUEST, FINAL = b"\x01", b"\x02", b"\x04"
ASKING = b"\x01"
GUIDE_METHOD = processes.BENCH / "guide_method.py"
HEARTBEAT = "60"
"""Seconds: so long that no heartbeat is due during a measurement, and workers need not send any."""


def receive_simply(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message, or None."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


@dataclass
class Raw(Peer):
    """`connections` is the number of connections of a worker process; each gets one request at a time."""

    synchronous: ClassVar[bool] = True
    connections: int = 1
    simply: bool = True
    """Whether to use pyzmq's `recv_multipart` and `send_multipart`."""

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        context, poller = zmq.Context(), zmq.Poller()
        for _ in range(self.connections):
            socket = _connected(context, address)
            poller.register(socket, zmq.POLLIN)
            send(socket, [WORKER, READY, SERVICE])
        ready()
        take = receive_simply if self.simply else receive
        put = zmq.Socket.send_multipart if self.simply else send
        while True:
            for socket, _ in poller.poll():
                while (frames := take(socket)) is not None:
                    if frames[1] == REQUEST:
                        put(socket, [WORKER, FINAL, *frames[2:-1], work(frames[-1])])

    @contextmanager
    def caller(self, address: str, outstanding: int) -> Iterator[Caller]:
        del outstanding
        with zmq.Context() as context, _connected(context, address) as socket:
            time.sleep(0.2)  # until the workers' READY has surely arrived
            yield _Asking(socket, self.simply)


def _connected(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.connect(address)
    return socket


class _Asking:
    def __init__(self, socket: zmq.Socket[bytes], simply: bool) -> None:
        self._socket = socket
        self._receive = receive_simply if simply else receive
        self._send = zmq.Socket.send_multipart if simply else send

    def send(self, key: int) -> None:
        self._send(self._socket, [CLIENT, ASKING, SERVICE, body(key)])

    def receive(self) -> Iterator[tuple[int, float]]:
        self._socket.poll()
        while (frames := self._receive(self._socket)) is not None:
            key = int(frames[-1][:8])
            if frames[-1] != body(key):
                raise WrongReplyError(frames[-1])
            yield key, time.perf_counter()


@dataclass
class GuideMethod(Raw):
    """A straightforward first broker."""

    name: str = "Guide's method in Python"

    def missing(self) -> str | None:
        return None if GUIDE_METHOD.exists() else "bench/guide_method.py is not there"

    @contextmanager
    def server(self, folder: Path) -> Iterator[Server]:
        command = [sys.executable, GUIDE_METHOD, "--dialect", "0.2", "--heartbeat", HEARTBEAT]
        with processes.running(*command, cwd=folder) as process:
            yield Server(process.read_line(), [process.pid])


@dataclass
class ForwardingLoop(Raw):
    """The limit."""

    name: str = "forwarding loop in C"
    connections: int = 16
    simply: bool = False
    in_turn: bool = False
    """Whether workers get requests in turn (round robin), busy or not, so that many travel together."""

    def missing(self) -> str | None:
        return None if processes.BENCH.joinpath("native.py").exists() else "bench/native.py is not there"

    @contextmanager
    def server(self, folder: Path) -> Iterator[Server]:
        del folder
        import native

        with ExitStack() as opened:
            try:
                tools = opened.enter_context(native.built())
                pid, endpoint = opened.enter_context(native.forwarding(tools, in_turn=self.in_turn))
            except native.Missing as error:
                raise processes.FailedError(str(error)) from None
            yield Server(endpoint, [pid])
