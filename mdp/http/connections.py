"""The open connections of a server, and which of them must go when there are too many."""

import asyncio
import gc
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar

from ..transport.tcp import is_loopback
from .limits import ConnectionLimits

MAX_REFUSED: Final = 100
"""Connections that were refused and may still read why."""

GRACE_SECONDS: Final = 1.0
"""How long the beginning of a request may take before it has to make room for others."""

COLLECT_SECONDS: Final = 0.01
"""How long uvicorn may take to forget a connection that has ended."""


class Phase(IntEnum):
    """What a connection is doing.  When there are too many, those in the first of these phases go first.

    But as long as others can go that do not read, or send too slowly, those stay whose request is about to arrive.
    """

    REFUSED = 0
    """It has been refused, and may read why."""
    WAITING = 1
    """It has sent nothing of a request, or a fragment of its headers."""
    IDLE = 2
    """Its requests have been answered."""
    UPLOADING = 3
    """The body of its request, or a message of its WebSocket, has not arrived completely."""
    UNREAD = 4
    """It does not read what it is sent."""
    OPEN = 5
    """It is a WebSocket without outstanding requests."""
    WORKING = 6
    """Its request is being handled: it may stay."""


_MAY_GO: Final = (Phase.WAITING, Phase.IDLE, Phase.UPLOADING, Phase.UNREAD, Phase.OPEN)
_ARRIVING: Final = (Phase.WAITING, Phase.IDLE, Phase.UPLOADING)
"""Phases in which a request may be about to arrive."""


class Member(Protocol):
    """A connection, as `Connections` needs it."""

    address: str
    """Where its client is, without the port."""
    phase: Phase
    """Set by `Connections` only."""
    unfinished: int
    """Bytes of its request or message that has not arrived completely."""

    def is_arriving(self) -> bool:
        """Return whether its request may be about to arrive: it began just now, or does not arrive too slowly."""

    def abort(self) -> None:
        """Close it immediately."""

    def overflow(self) -> None:
        """Close it, because it has the largest share of the memory for unfinished requests, and that is used up."""


class Owner(Protocol):
    """What the connections of a server belong to, such as a gateway."""

    memory: int
    """Bytes that clients have not read or not finished, and what else the owner counts."""


C = TypeVar("C", bound=Member)


class Connections(Generic[C]):
    """The open connections of a server.

    There are at most `max_connections`, and at most `max_per_address` from one address that is not loopback.  A new
    one takes the place of one that may go: of the same address if that has too many, otherwise of the address that has
    most.
    """

    def __init__(self, limits: ConnectionLimits, owner: Owner) -> None:
        self.limits = limits
        self.owner = owner
        self.draining = False
        """Each connection ends with its next response."""
        self._unfinished = 0
        """Bytes of all requests and messages that have not arrived completely."""
        self._relieving = False
        self._dropped = 0
        """Bytes that have been dropped since the garbage collector was called."""
        self._refused: dict[C, None] = {}
        self._by_address: dict[str, list[dict[C, None]]] = {}
        """The others, by address and phase, the longest in a phase first."""
        self._counts: dict[str, int] = {}
        """How many those are."""
        self._count = 0

    def __iter__(self) -> Iterator[C]:
        phases = chain.from_iterable(self._by_address.values())
        return chain(chain.from_iterable(phases), self._refused)

    def __len__(self) -> int:
        return self._count + len(self._refused)

    def enter(self, connection: C) -> bool:
        """Take in a new connection, which is waiting, or refuse it.  Return whether it may stay."""
        address, limits = connection.address, self.limits
        crowded: list[str] = []
        if not is_loopback(address) and self._counts.get(address, 0) >= limits.max_per_address:
            crowded = [address]
        elif self._count >= limits.max_connections:
            crowded = sorted(self._counts, key=self._counts.__getitem__, reverse=True)
        stays = not crowded or self._make_room(crowded)
        connection.phase = Phase.WAITING if stays else Phase.REFUSED
        self._put(connection)
        return stays

    def _make_room(self, addresses: list[str]) -> bool:
        """End a connection of these addresses, if one may go."""
        found = next(self._slow(addresses), None) or next(self._in_phases(addresses, _MAY_GO), None)
        if found is None:
            return False
        self.leave(found)
        found.abort()
        return True

    def _slow(self, addresses: list[str]) -> Iterator[C]:
        return (each for each in self._in_phases(addresses, _ARRIVING) if not each.is_arriving())

    def _in_phases(self, addresses: list[str], phases: Iterable[Phase]) -> Iterator[C]:
        return (each for phase in phases for address in addresses for each in self._by_address[address][phase])

    def move(self, connection: C, phase: Phase) -> None:
        """Take in that a connection does something else from now on."""
        if self._take(connection):
            connection.phase = phase
            self._put(connection)

    def leave(self, connection: C) -> None:
        """Forget a connection.  Idempotent."""
        self._drop(connection)
        self._take(connection)

    def hold(self, connection: C, size: int) -> None:
        """Take in how much of an unfinished request or message a connection has sent."""
        change = size - connection.unfinished
        connection.unfinished = size
        self._unfinished += change
        self.owner.memory += change
        if self._unfinished > self.limits.max_unfinished and not self._relieving:
            # Not now: the application may be about to get what has just arrived.
            self._relieving = True
            asyncio.get_running_loop().call_soon(self._relieve)

    def _relieve(self) -> None:
        """End those that have sent most of what is unfinished, until it is within its limit."""
        self._relieving = False
        while self._unfinished > self.limits.max_unfinished:
            largest = max(self, key=lambda each: each.unfinished)
            largest.overflow()
            self._drop(largest)

    def _drop(self, connection: C) -> None:
        """Count the unfinished request of a connection no longer, since it will not be finished."""
        self._dropped += connection.unfinished
        self.hold(connection, 0)
        if self._dropped > self.limits.max_unfinished // 8:
            # The parsers of WebSockets are in reference cycles, and the collector counts objects, not bytes.
            self._dropped = 0
            asyncio.get_running_loop().call_later(COLLECT_SECONDS, gc.collect)

    def _put(self, connection: C) -> None:
        if connection.phase is Phase.REFUSED:
            self._refused[connection] = None
            if len(self._refused) > MAX_REFUSED:
                oldest = next(iter(self._refused))
                self.leave(oldest)
                oldest.abort()
            return
        address = connection.address
        if address not in self._by_address:
            self._by_address[address] = [{} for _ in Phase]
        self._by_address[address][connection.phase][connection] = None
        self._counts[address] = self._counts.get(address, 0) + 1
        self._count += 1

    def _take(self, connection: C) -> bool:
        """Remove a connection.  Return whether it was there."""
        if connection.phase is Phase.REFUSED:
            return self._refused.pop(connection, 0) is None
        address = connection.address
        phases = self._by_address.get(address)
        if phases is None or phases[connection.phase].pop(connection, 0) is not None:
            return False
        self._count -= 1
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address], self._by_address[address]
        return True
