"""How much of unfinished messages libzmq holds, and which connections must end because of that.

libzmq keeps the frames of a message to itself until the last one has arrived, however many they are.  But the kernel
counts the bytes that arrive over a TCP connection.  So once many have, the connection is *watched*: the broker notes
when it is next given a message from it.  What arrives until then belongs to an unfinished message.  Nothing is counted
while messages are received, and only a few connections are watched at a time.

An empty frame has two bytes on the wire and 64 in libzmq's memory.  So if the broker uses more memory than what it was
given and these bytes explain, connections end that can have caused it.

UNIX sockets have no such counter; who may connect to them is decided by the permissions of their files.
"""

import array
import fcntl
import socket as sockets
import struct
import sys
import termios
import time
from collections.abc import Callable, Collection
from typing import Final

from .allocation import allocated_bytes

FIND_SECONDS: Final = 0.1
"""Seconds between two searches for connections to watch."""
FOUND_AT_ONCE: Final = 100
"""Maximum number of connections that one search looks at; the next one continues with the others."""
WATCH_SECONDS: Final = 0.02
"""Seconds between two looks at the connections that are watched."""
WATCH_BYTES: Final = 1 << 16
"""A connection that has received so much is watched until the broker is given a message from it."""
MAX_UNEXPLAINED: Final = 1 << 26
"""How much more memory may have been allocated than is explained."""
FRAME_FACTOR: Final = 64
"""Bytes in libzmq's memory for each byte on the wire, at most: 32, doubled since both are measured one after the
other."""
MAX_SHARE: Final = 0.02
"""Share of the time that finding out how much memory is allocated may take."""

_TCP_INFO: Final = int(getattr(sockets, "TCP_INFO", 0)) if sys.platform == "linux" else 0
_INFO_BYTES: Final = 136
_RECEIVED_AT: Final = 128
"""The end of `tcpi_bytes_received` in Linux's `struct tcp_info`, and where it begins."""


class Inflow:
    """What arrives over one connection."""

    __slots__ = ("active", "arrived", "at", "descriptor", "heard", "start", "unexplained", "watched")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.heard = False
        """Whether the broker has been given any message from it."""
        self.watched = False
        """Whether the broker has not been given a message from it since `start`."""
        self.start = 0
        """Number of bytes that had arrived when it began to be watched."""
        self.arrived = 0
        """Number of bytes that libzmq had read at the last look."""
        self.at = 0.0
        """When `arrived` was found to have changed."""
        self.active = False
        """Whether more may have arrived since `at`."""
        self.unexplained: int | None = None
        """The unexplained memory of the broker when this first was large enough to add to it."""

    @property
    def unfinished(self) -> int:
        """Bytes of a message that was unfinished at the last look, at least; only while `watched`."""
        return self.arrived - self.start

    def take(self) -> None:
        """Record that the broker was given a message."""
        self.heard = True
        self.watched = False

    def end(self) -> None:
        """Record that the connection has ended: its descriptor may become another's."""
        self.descriptor = -1
        self.watched = False

    def watch(self, now: float) -> None:
        """Count what arrives from now on, unless that is counted already, and look at it often."""
        self.active = True
        self.arrived, self.at = bytes_read(self.descriptor), now
        if not self.watched:
            self.watched = True
            self.start = self.arrived if self.heard else 0
            self.unexplained = None

    def look(self, now: float, heard: float) -> None:
        """Note how much has arrived."""
        arrived = bytes_read(self.descriptor)
        if arrived != self.arrived:
            self.arrived, self.at = arrived, now
        else:
            self.active = self.at > heard  # otherwise it has been judged


class Unfinished:
    """The unfinished messages at one socket: at most `one` byte count of each connection, and `total` of all."""

    def __init__(self, one: int, total: int, allocated: Callable[[], int] = allocated_bytes) -> None:
        self._one = one
        self._total = total
        self._allocated = allocated
        self._allocated_at = 0.0
        """When to find out again how much is allocated."""
        self._watched: list[Inflow] = []
        self._others: list[Inflow] = []
        """The connections at which the present round of searches has not looked yet."""
        self._active = False
        """Whether any of those watched is active."""
        self._look_at = self._find_at = 0.0

    def deadline(self) -> float | None:
        """Return when to call `excess` and `find`, or None if the kernel does not count."""
        if not _TCP_INFO:
            return None
        return min(self._look_at, self._find_at) if self._active else self._find_at

    def excess(self, now: float, heard: float, charged: int) -> list[Inflow]:
        """Return the connections that exceed a limit, if it is time to look.

        Everything that had arrived when the broker was `heard` has been given to it, and `charged` bytes of what it was
        given are still in its memory.
        """
        if now < self._look_at or not self._active:
            return []
        self._look_at = now + WATCH_SECONDS
        self._watched = [each for each in self._watched if each.watched]
        unfinished = [each for each in self._watched if each.at <= heard]
        total = sum(each.unfinished for each in unfinished)
        costly = self._costly(unfinished, charged + total, now)
        excess = [each for each in unfinished if each.unfinished > self._one or each in costly]
        total -= sum(each.unfinished for each in excess)
        # Peers first that have never completed a message, perhaps not even the handshake; then the largest.
        others = sorted((each for each in unfinished if each not in excess), key=_heard_and_size)
        while total > self._total:
            excess.append(others.pop(0))
            total -= excess[-1].unfinished
        active = [each for each in self._watched if each.active]
        for each in active:
            each.look(now, heard)
        self._active = bool(active)
        return excess

    def _costly(self, unfinished: list[Inflow], explained: int, now: float) -> list[Inflow]:
        """Return the connections that may be the reason why far more memory is allocated than is `explained`."""
        large = [each for each in unfinished if each.unfinished > WATCH_BYTES]
        if not large or now < self._allocated_at:
            return []
        began = time.perf_counter()
        unexplained = self._allocated() - explained
        self._allocated_at = now + (time.perf_counter() - began) / MAX_SHARE
        costly = []
        for each in large:
            if each.unexplained is None:
                each.unexplained = unexplained
            if MAX_UNEXPLAINED < unexplained - each.unexplained <= FRAME_FACTOR * each.unfinished:
                costly.append(each)
        return costly

    def find(self, inflows: Collection[Inflow], now: float) -> list[Inflow]:
        """Return the connections that are watched from now on, if it is time to search."""
        if now < self._find_at:
            return []
        self._find_at = now + FIND_SECONDS
        if not self._others:
            self._others = list(inflows)
        batch, self._others = self._others[:FOUND_AT_ONCE], self._others[FOUND_AT_ONCE:]
        found = []
        for each in batch:
            if each.descriptor >= 0 and bytes_received(each.descriptor) - each.arrived > WATCH_BYTES:
                if not each.watched:
                    found.append(each)
                each.watch(now)
                self._active = True
        self._watched += found
        return found


def _heard_and_size(inflow: Inflow) -> tuple[bool, int]:
    return inflow.heard, -inflow.unfinished


def bytes_received(descriptor: int) -> int:
    """Return how many bytes the kernel has received over a TCP connection; 0 if it is unknown."""
    if not _TCP_INFO:
        return 0
    try:
        borrowed = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return 0  # it is closed; the monitor is about to say so
    try:
        info = borrowed.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0  # not TCP
    finally:
        borrowed.detach()
    if len(info) < _INFO_BYTES:
        return 0  # an old kernel
    received: int = struct.unpack_from("=Q", info, _RECEIVED_AT)[0]
    return received


def bytes_read(descriptor: int) -> int:
    """Return how many of these bytes libzmq has read, at least."""
    received = bytes_received(descriptor)
    unread = array.array("i", [0])
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
    except OSError:
        return received
    return received - unread[0]
