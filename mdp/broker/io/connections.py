"""The connections at all ROUTERs of a broker: their limits, and the peers whose connections have ended."""

import logging
import resource
import socket as sockets
import struct
from collections import Counter
from contextlib import suppress
from typing import Any, Final

from ...limits import Limits
from ...security.access import Access
from ...timers import Alarms
from ...transport.listening import is_loopback
from ..core.journal import Journal
from ..core.roles import Role

SPARE_FILES: Final = 16
"""Descriptors that connections leave free: a new one that would take one of these is ended (C42).

Without a free descriptor, libzmq would try again and again to accept the connections that wait."""
OWN_FILES: Final = 256
"""Descriptors left for the broker's own files, and for connections that libzmq accepts before they can be ended."""
UNLIMITED_FILES: Final = 1 << 20
"""The number that stands for an unlimited number of descriptors."""

LOCAL: Final = ""
"""The address of all peers on this host."""


def max_files() -> int:
    """Return how many descriptors this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_FILES if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED_FILES)


def default_max_connections() -> int:
    """Return how many connections this process has descriptors for."""
    files = max_files()
    return max(files - OWN_FILES, files // 2, 1)


class AcceptedConnection:
    """An accepted connection."""

    def __init__(self, descriptor: int, address: str) -> None:
        self.descriptor = descriptor
        self.address = address
        self.user = b""
        """The public key of its peer, in Z85; empty without access control, and until a message came over it."""
        self.role = ""
        """The role of that key."""
        self.identities: list[bytes] = []
        """The routing ids of the peers that sent messages over it.  One, unless messages were still waiting from an
        earlier connection with the same descriptor."""
        self.ended = False


class Connections:
    """The connections of all sockets of a broker.

    At most `limits.max_connections` are open at a time, and `max_connections_per_address` from one address, not
    counting this host's.

    The lists have peers that the machine must be told of, by their identities in the broker; `take_…` empties them.
    """

    def __init__(self, limits: Limits, logger: logging.Logger, alarms: Alarms) -> None:
        self.maximum, self.per_address = limits.max_connections or 1, limits.max_connections_per_address or 1
        self.alarms = alarms
        self.journal = Journal(logger, alarms)
        self.open = 0
        """Number of open connections."""
        self.addresses: Counter[str] = Counter()
        """Number of open connections by address."""
        self.counts: Counter[str] = Counter()
        """Events since the start, by name."""
        self.access: Access | None = None
        """Which role has which key, and how many connections each may have; None without access control."""
        self.users: dict[bytes, Role] | None = None
        """The role of each public key, for the machine."""
        self.to_probe: list[bytes] = []
        """Peers whose connections have ended, but that may have sent something before."""
        self.ended: list[bytes] = []
        """Peers whose connections have ended: at once if the peer chose its routing id, otherwise after the last probe,
        in case that nothing could be sent to the peer."""
        self.replaced: list[bytes] = []
        """Peers that chose their routing ids and were not forgotten, if the message that was received last came from
        another connection under the same id: to be acted on before that is taken in."""
        self._roles: dict[str, set[AcceptedConnection]] = {}
        """The open connections of each role."""

    def opened(self, connection: AcceptedConnection) -> None:
        """Count a connection."""
        self.open += 1
        self.addresses[connection.address] += 1
        self.counts["accepted"] += 1

    def closed(self, connection: AcceptedConnection) -> None:
        """Count a connection that has ended."""
        self._leave_role(connection)
        self.open -= 1
        self.counts["ended"] += 1
        self.addresses[connection.address] -= 1
        if not self.addresses[connection.address]:
            del self.addresses[connection.address]

    def over_role_limit(self, connection: AcceptedConnection, user: bytes) -> int | None:
        """Record the key of the peer; return how many connections its role may have if this is one too many."""
        connection.user = user
        role = "" if self.access is None else self.access.keys.get(user, "")
        if connection.role != role:
            self._leave_role(connection)
            connection.role = role
        if self.access is None or not role:
            return None
        members = self._roles.setdefault(role, set())
        members.add(connection)
        limit = self.access.roles[role].connections if role in self.access.roles else None
        return limit if limit is not None and len(members) > limit else None

    def _leave_role(self, connection: AcceptedConnection) -> None:
        members = self._roles.get(connection.role)
        if members is not None:
            members.discard(connection)
            if not members:
                del self._roles[connection.role]

    def take_to_probe(self) -> list[bytes]:
        """Return the peers to probe now."""
        found, self.to_probe = self.to_probe, []
        return found

    def take_ended(self) -> list[bytes]:
        """Return the peers whose connections have ended; messages that they sent before may still have to be read."""
        found, self.ended = self.ended, []
        return found

    def take_replaced(self) -> list[bytes]:
        """Return the peers that are gone, before the message that was received last, since another has their id."""
        found, self.replaced = self.replaced, []
        return found


def shut_down(descriptor: int) -> None:
    """End the connection that `descriptor` stands for, without closing it."""
    try:
        borrowed = sockets.socket(fileno=descriptor)
    except OSError:
        return
    with suppress(OSError):
        # Once libzmq has closed it, the peer gets a reset, and cannot wait for this side to read on.
        borrowed.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        borrowed.shutdown(sockets.SHUT_RDWR)
    borrowed.detach()


def address_of(descriptor: int) -> str:
    """Return the address of the peer at a connection, or `LOCAL`."""
    try:
        borrowed = sockets.socket(fileno=descriptor)
    except OSError:
        return LOCAL  # it is closed; the monitor is about to say so
    try:
        peer: Any = borrowed.getpeername()
    except OSError:
        return LOCAL
    finally:
        borrowed.detach()
    if not isinstance(peer, tuple):
        return LOCAL  # a UNIX socket
    address = str(peer[0])
    return LOCAL if is_loopback(address) else address
