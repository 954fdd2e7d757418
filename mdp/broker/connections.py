"""The connections of the broker's ROUTER: who came over which, when they end, and how many there may be.

libzmq's monitor reports ACCEPTED and DISCONNECTED with the descriptor of a connection, and each message has the
descriptor that it came from.  DISCONNECTED is reported before the descriptor is closed, so before its number can be
used again: whoever first reads everything that the monitor has to say knows which connection a descriptor stands for.

Messages that a peer sent before its connection ended may still wait in the socket.  So for a routing id that libzmq
generated, which no other peer ever gets, the end only decides whom to probe; the proof is a message that cannot be sent
(EHOSTUNREACH, with ROUTER_MANDATORY).  An id that the peer chose itself may come back on another connection, perhaps
from somebody else, who must not receive or continue anything (C39).
"""

import logging
import os
import resource
import socket as sockets
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

import zmq

from ..transport.multipart import receive
from ..transport.tcp import is_loopback
from .journal import Journal

PROBES: tuple[float, ...] = (0.0, 0.002, 0.01, 0.03, 0.1, 0.3)
"""When to probe the peers of a connection, in seconds after its end; the socket notices within about a millisecond."""
GENERATED_BYTES: Final = 5
"""Length of the routing ids that libzmq generates, which begin with a 0 byte."""
SPARE_FILES: Final = 16
"""Descriptors that connections leave free: a new one that would take one of these is ended (C42).

Without a free descriptor, libzmq would try again and again to accept the connections that wait."""
MONITOR_EVENTS: Final = 10_000
"""Maximum number of events that wait in the monitor; then libzmq's thread blocks."""
LIBZMQ_EVENTS: Final = 1000
"""Events of `MONITOR_EVENTS` that libzmq's end of the monitor has room for: its default SNDHWM."""
OWN_FILES: Final = 256
"""Descriptors left for the broker's own files, and for connections that libzmq accepts before they can be ended."""
UNLIMITED_FILES: Final = 1 << 20
"""What an unlimited number of descriptors is taken for."""

_ACCEPTED: Final = int(zmq.Event.ACCEPTED)
_DISCONNECTED: Final = int(zmq.Event.DISCONNECTED)
_EVENTS: Final = (
    zmq.Event.ACCEPTED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)
_FAILED_HANDSHAKES: Final = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): ("handshake-refused", "its key was refused"),
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): ("handshake-ended", "the peer ended it, or took too long"),
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): ("handshake-invalid", ""),
}
"""The kind of each event, and what happened."""
_INVALID: Final = {
    True: "the peer uses no key, or the public key of another broker, or does not speak ZeroMQ",
    False: "the peer uses a key, which this broker without access control does not, or does not speak ZeroMQ",
}
"""Why a handshake may be invalid, with and without access control."""
_LOCAL: Final = ""
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


class Totals:
    """What the connections of all sockets of a broker have in common."""

    def __init__(self) -> None:
        self.open = 0
        """Number of open connections."""
        self.addresses: Counter[str] = Counter()
        """Number of open connections by address."""
        self.roles: dict[str, set[AcceptedConnection]] = {}
        """The open connections of each role."""
        self.counts: Counter[str] = Counter()
        """Events since the start, by name."""


class Connections:
    """The connections of `socket`, a ROUTER.

    At most `maximum` are open at a time, and `per_address` from one address, not counting this host's; the newest are
    ended.  If `totals` is given, those of other sockets with the same `totals` count too.

    `ended` and `replaced` tell what was found out about peers; whoever acts on it empties them.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        maximum: int,
        per_address: int,
        logger: logging.Logger,
        totals: Totals | None = None,
    ) -> None:
        self.totals = Totals() if totals is None else totals
        self.known: dict[bytes, AcceptedConnection] = {}
        """The connections of peers with generated routing ids; `receive` reports all other peers through `add`."""
        self.chosen: dict[bytes, AcceptedConnection] = {}
        """The last connections of peers that chose their routing ids, until they are forgotten."""
        self.secured = False
        """Whether there is access control, so that `receive` sets `user`.  Without it, peers could set it."""
        self.user = b""
        """The public key of the peer that sent the message which was received last."""
        self.role_of: Callable[[bytes], str] = _no_role
        """Return the role of a public key."""
        self.limit_of: Callable[[str], int | None] = _no_limit
        """Return how many connections a role may have, or None."""
        self.ended: list[bytes] = []
        """Peers whose connections have ended: at once if the peer chose its routing id, otherwise after the last probe,
        in case that nothing could be sent to the peer."""
        self.replaced: list[bytes] = []
        """Routing ids that were chosen by a peer, which was not forgotten, and that come from another connection in the
        message that was received last: to be acted on before that is taken in."""
        self.max_frames = sys.maxsize
        """The number of frames from which on a message is an attack."""
        self.counts = self.totals.counts
        """Events since the start, by name."""
        self._open: dict[int, AcceptedConnection] = {}
        self._to_end: list[AcceptedConnection] = []
        self._due: dict[bytes, tuple[float, int]] = {}
        """Peers to probe: due time, and number of earlier probes."""
        self._maximum = maximum
        self._per_address = per_address
        self._journal = Journal(logger)
        self._now = 0.0
        self._devnull = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._devnull)
        """Where descriptors of connections are copied to, since there may be no other one."""
        self._socket = socket
        endpoint = f"inproc://zmdp-connections-{id(socket)}"
        socket.monitor(endpoint, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, MONITOR_EVENTS - LIBZMQ_EVENTS)
        self._monitor.connect(endpoint)
        self._more = False
        """Whether events were left in the monitor."""
        self.descriptor = int(self._monitor.get(zmq.FD))
        """Readable when the monitor may have events."""
        self.look(0.0)  # libzmq signals the descriptor only after a first read has found nothing

    def __len__(self) -> int:
        return len(self._open)

    # ── whose a message is ───────────────────────────────────────────────────────────────────────────────────────────

    def add(self, identity: bytes, descriptor: int) -> None:
        """Record which connection a message of a peer that is not `known` came from.

        `descriptor` is negative if there is none (inproc).
        """
        generated = _is_generated(identity)
        if descriptor < 0 and generated:
            return
        self.look(self._now)
        if generated:
            self._add_generated(identity, descriptor)
        else:
            self._add_chosen(identity, descriptor)
        self._end_excess()

    def _add_generated(self, identity: bytes, descriptor: int) -> None:
        if identity in self._due:
            return  # sent before its connection ended; the descriptor may have become another's
        connection = self._open.get(descriptor)
        if connection is None:
            self._due[identity] = 0.0, 0  # it ended before this message was read
        else:
            self.known[identity] = connection
            self._attribute(connection, identity)

    def _add_chosen(self, identity: bytes, descriptor: int) -> None:
        before = self.chosen.get(identity)
        connection = self._open.get(descriptor)
        if before is not None:
            if before is connection:
                return
            if before.ended and connection is None and before.descriptor == descriptor:
                return  # sent before the connection ended
            self._replace(identity)
        if descriptor < 0:
            return
        if connection is None:  # it ended before this message was read
            connection = AcceptedConnection(descriptor, _LOCAL)
            connection.ended = True
        self.chosen[identity] = connection
        if connection.ended:
            self.ended.append(identity)
            return
        self._attribute(connection, identity)
        if before is not None and before.descriptor == descriptor:
            # Either a new connection, or the last messages of the old one: nobody can be reached under the id then.
            self._due[identity] = 0.0, 0

    def _replace(self, identity: bytes) -> None:
        """Forget a peer: another one has its routing id."""
        del self.chosen[identity]
        self._due.pop(identity, None)
        self.ended = [each for each in self.ended if each != identity]
        self.replaced.append(identity)

    def _attribute(self, connection: AcceptedConnection, identity: bytes) -> None:
        connection.identities.append(identity)
        connection.user = self.user
        role = self.role_of(self.user) if self.user else ""
        if connection.role != role:
            self._leave_role(connection)
            connection.role = role
        if not role:
            return
        members = self.totals.roles.setdefault(role, set())
        members.add(connection)
        limit = self.limit_of(role)
        if limit is not None and len(members) > limit:
            self._refuse(connection, "over-role-limit", "ended a connection of role %s, which may have %d", role, limit)

    def _leave_role(self, connection: AcceptedConnection) -> None:
        members = self.totals.roles.get(connection.role)
        if members is not None:
            members.discard(connection)
            if not members:
                del self.totals.roles[connection.role]

    def reaches(self, identity: bytes) -> bool:
        """Return whether a message to a peer with a `chosen` routing id reaches the connection that it spoke on."""
        self.look(self._now)
        connection = self.chosen.get(identity)
        return connection is None or not connection.ended

    def forget(self, identity: bytes) -> None:
        """Stop probing a peer, which is known to be gone, and forget its chosen routing id."""
        self._due.pop(identity, None)
        connection = self.chosen.get(identity)
        if connection is not None and connection.ended:
            del self.chosen[identity]

    # ── what the monitor says ────────────────────────────────────────────────────────────────────────────────────────

    def look(self, now: float) -> None:
        """Read the monitor's events."""
        self._now = now
        self._read()
        self._end_excess()

    def _read(self) -> None:
        """Read everything that the monitor has to say now, even if more keeps coming."""
        self._more = True
        for _ in range(MONITOR_EVENTS):
            message = receive(self._monitor)
            if message is None:
                self._more = False
                return
            event, value = struct.unpack("=HI", message[0])
            if event == _ACCEPTED:
                self._accepted(value)
            elif event == _DISCONNECTED:
                self._disconnected(value)
            else:
                kind, reason = _FAILED_HANDSHAKES[event]
                self.counts[kind] += 1
                reason = reason or _INVALID[self.secured]
                self._journal.note(self._now, logging.INFO, kind, "a connection failed in its handshake: %s", reason)

    def _accepted(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._disconnected(descriptor)
        address = _address_of(descriptor)
        connection = self._open[descriptor] = AcceptedConnection(descriptor, address)
        self.totals.open += 1
        self.totals.addresses[address] += 1
        self.counts["accepted"] += 1
        if descriptor >= (files := max_files()) - SPARE_FILES:  # accept returns the lowest that is free (POSIX)
            text = "ended a new connection, for lack of descriptors: this process may have %d open files (ulimit -n)"
            self._refuse(connection, "out-of-descriptors", text, files)
        elif self.totals.open > self._maximum:
            text = "ended a new connection from %s: there are %d already (max-connections)"
            self._refuse(connection, "over-limit", text, address or "this host", self._maximum)
        elif address != _LOCAL and self.totals.addresses[address] > self._per_address:
            text = "ended a new connection from %s, which has %d already (max-connections-per-address)"
            self._refuse(connection, "over-address-limit", text, address, self._per_address)

    def _disconnected(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is None:
            return
        connection.ended = True
        self._leave_role(connection)
        self.totals.open -= 1
        self.counts["ended"] += 1
        self.totals.addresses[connection.address] -= 1
        if not self.totals.addresses[connection.address]:
            del self.totals.addresses[connection.address]
        for identity in connection.identities:
            if self.known.pop(identity, None) is not None:
                self._due[identity] = self._now, 0
            elif self.chosen.get(identity) is connection:
                self._due.pop(identity, None)
                self.ended.append(identity)

    # ── ending connections ───────────────────────────────────────────────────────────────────────────────────────────

    def end_users(self, users: Collection[bytes]) -> None:
        """End the connections of peers with these public keys, and those whose peers are not known yet.

        Without keys, no connection ends.
        """
        if not users:
            return
        self._read()
        self._to_end += [each for each in self._open.values() if not each.user or each.user in users]
        self._end_excess()

    def end(self, identity: bytes) -> None:
        """End the connection of a peer that does not read its messages."""
        connection = self.known.get(identity) or self.chosen.get(identity)
        if connection is not None:
            self.counts["slow-reader"] += 1
            self._to_end.append(connection)
            self._end_excess()

    def offender(self, descriptor: int) -> None:
        """End a connection over which a message of far too many frames came."""
        connection = self._open.get(descriptor)
        if connection is not None:
            text = "ended a connection that sent a message of more than %d frames"
            self._refuse(connection, "too-many-frames", text, self.max_frames)
            self._end_excess()

    def _refuse(self, connection: AcceptedConnection, kind: str, text: str, *values: object) -> None:
        self.counts[kind] += 1
        self._note(kind, text, *values)
        self._to_end.append(connection)

    def _end_excess(self) -> None:
        due, self._to_end = self._to_end, []  # not those that come meanwhile: `deadline` is then now
        for connection in due:
            if connection.ended:
                continue
            try:
                os.dup2(connection.descriptor, self._copy, inheritable=False)
            except OSError:
                self._read()  # it is closed
                continue
            self._read()
            if not connection.ended:  # so it had not ended either when the descriptor was copied
                _shut_down(self._copy)
            os.dup2(self._devnull, self._copy, inheritable=False)

    def _note(self, kind: str, text: str, *values: object) -> None:
        self._journal.note(self._now, logging.WARNING, kind, text, *values)

    # ── what is due ──────────────────────────────────────────────────────────────────────────────────────────────────

    def deadline(self) -> float | None:
        """Return when to call `to_probe`, or None."""
        if self._more or self._to_end:
            return self._now
        due = min(self._due.values())[0] if self._due else None
        other = self._journal.deadline()
        return other if due is None or (other is not None and other < due) else due

    def to_probe(self, now: float) -> list[bytes]:
        """Do what is due, and return the routing ids of the peers to probe now."""
        self._now = now
        self._journal.flush(now)
        if self._more or self._to_end:
            self.look(now)
        if not self._due:
            return []
        due = [(identity, tried) for identity, (at, tried) in self._due.items() if at <= now]
        for identity, tried in due:
            if tried + 1 < len(PROBES):
                self._due[identity] = now + PROBES[tried + 1] - PROBES[tried], tried + 1
            else:
                del self._due[identity]
                if _is_generated(identity):
                    # Its connection ended long ago.  There are peers that nothing can be sent to, to prove it.
                    self.ended.append(identity)
        return [identity for identity, _ in due]

    def close(self) -> None:
        """Stop watching."""
        self._read()  # libzmq's thread must not be blocked
        self._socket.disable_monitor()
        self._monitor.close(0)
        os.close(self._devnull)
        os.close(self._copy)


def _is_generated(identity: bytes) -> bool:
    """Return whether libzmq generated a routing id."""
    return len(identity) == GENERATED_BYTES and identity[0] == 0


def _no_limit(_: str) -> int | None:
    return None


def _no_role(_: bytes) -> str:
    return ""


def _shut_down(descriptor: int) -> None:
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


def _address_of(descriptor: int) -> str:
    """Return the address of the peer at a connection, or `_LOCAL`."""
    try:
        borrowed = sockets.socket(fileno=descriptor)
    except OSError:
        return _LOCAL  # it is closed; the monitor is about to say so
    try:
        peer: Any = borrowed.getpeername()
    except OSError:
        return _LOCAL
    finally:
        borrowed.detach()
    if not isinstance(peer, tuple):
        return _LOCAL  # a UNIX socket
    address = str(peer[0])
    return _LOCAL if is_loopback(address) else address
