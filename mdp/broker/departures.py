"""Detect immediately which peers' connections have ended, through libzmq's monitor and the descriptors of messages.

The monitor reports DISCONNECTED with the descriptor of the connection, and each message has the descriptor that it came
from.  Descriptors are reused, and the monitor may be ahead of the socket, so this only decides whom to probe; the proof
is a message that cannot be sent (EHOSTUNREACH, with ROUTER_MANDATORY).
"""

import os
import socket
import struct
import sys
from contextlib import suppress
from typing import Final

import zmq

from ..transport.multipart import receive

PROBES: tuple[float, ...] = (0.0, 0.002, 0.01, 0.03, 0.1, 0.3)
"""When to probe the peers of a connection, in seconds after its end; the socket notices within about a millisecond."""
DISCONNECTED: Final = int(zmq.Event.DISCONNECTED)


class Departures:
    """The ended connections of `socket`, a ROUTER."""

    def __init__(self, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.known: dict[bytes, int] = {}
        """The descriptor of each peer's connection; `receive` reports unknown ones through `add`."""
        self.secured = False
        """Whether `receive` sets `user`."""
        self.user = b""
        """The user id of the message that was received last."""
        self.max_frames = sys.maxsize
        """The number of frames from which on a message is an attack."""
        self._peers: dict[int, list[bytes]] = {}
        self._ended: set[int] = set()
        """Descriptors of connections that ended before a message came from them."""
        self._due: list[tuple[float, int, bytes]] = []
        """Due time, number of earlier probes, and peer; unordered, since there are few."""
        self._socket = socket
        endpoint = f"inproc://zmdp-departures-{id(socket)}"
        socket.monitor(endpoint, DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)  # a full monitor would block libzmq's thread
        self._monitor.connect(endpoint)
        self.descriptor = int(self._monitor.get(zmq.FD))
        """Readable when a connection may have ended."""
        self.look(0.0)  # libzmq signals the descriptor only after a first read has found nothing

    def add(self, identity: bytes, descriptor: int) -> None:
        """Record the `descriptor` of an unknown peer that sent a message; negative if it has none (inproc)."""
        if descriptor >= 0:
            self.known[identity] = descriptor
            self._peers.setdefault(descriptor, []).append(identity)
            if descriptor in self._ended:  # the monitor was ahead of the first message, or it is another connection
                self._ended.discard(descriptor)
                self._due.append((0.0, 0, identity))

    def offender(self, descriptor: int) -> None:
        """End a connection whose peer does harm; one within the process (negative) cannot be ended."""
        if descriptor >= 0:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def look(self, now: float) -> None:
        """Read the monitor's events."""
        while (event := receive(self._monitor)) is not None:
            _, descriptor = struct.unpack("=HI", event[0])
            identities = self._peers.pop(descriptor, None)
            if identities is None:
                self._ended.add(descriptor)
                continue
            for identity in identities:
                del self.known[identity]
                self._due.append((now, 0, identity))

    def deadline(self) -> float | None:
        """Return when a probe is due, or None."""
        return min(self._due)[0] if self._due else None

    def to_probe(self, now: float) -> list[bytes]:
        """Return the routing ids of the peers to probe now."""
        if not self._due:
            return []
        due = [each for each in self._due if each[0] <= now]
        self._due = [each for each in self._due if each[0] > now]
        for _, tried, identity in due:
            if tried + 1 < len(PROBES):
                self._due.append((now + PROBES[tried + 1] - PROBES[tried], tried + 1, identity))
        return [identity for _, _, identity in due]

    def forget(self, identity: bytes) -> None:
        """Stop probing a peer, which is known to be gone."""
        if self._due:
            self._due = [each for each in self._due if each[2] != identity]

    def close(self) -> None:
        """Stop watching."""
        self._socket.disable_monitor()
        self._monitor.close(0)
