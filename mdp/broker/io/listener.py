"""The ROUTERs on which peers connect: who came over which connection, when it ends, and how many there may be.

libzmq's monitor reports ACCEPTED and DISCONNECTED with the descriptor of a connection, and each message has the
descriptor that it came from.  DISCONNECTED is reported before the descriptor is closed, so before its number can be
used again: after reading all events of the monitor, it is known which connection a descriptor stands for.

Messages that a peer sent before its connection ended may still wait in the socket.  So for a routing id that libzmq
generated, which no other peer ever gets, the end only decides whom to probe; the proof is a message that cannot be sent
(EHOSTUNREACH, with ROUTER_MANDATORY).  An id that the peer chose itself may come back on another connection, perhaps
of another peer, which must not receive or continue anything (C39).
"""

import logging
import math
import os
import struct
from collections.abc import Collection
from errno import EADDRINUSE, EADDRNOTAVAIL, EHOSTUNREACH, ENODEV
from typing import Final

import zmq

from ...errors import BindError
from ...transport.listening import check_free, listener
from ...transport.multipart import receive, send
from ...transport.sockets import use_family
from ...wire import Message
from ..core.roles import Role
from ..machine import Broker
from .connections import LOCAL, SPARE_FILES, AcceptedConnection, Connections, address_of, max_files, shut_down
from .gate import Gate
from .ports import LINGER_MS, Port, new_prefix

ATTACK_FRAMES: Final = 16
"""A message of more than this many times `max_frames` ends its connection.  A batch may exceed `max_frames`, which
limits each of its records."""
PROBES: tuple[float, ...] = (0.0, 0.002, 0.01, 0.03, 0.1, 0.3)
"""When to probe the peers of a connection, in seconds after its end; the socket notices within about a millisecond."""
GENERATED_BYTES: Final = 5
"""Length of the routing ids that libzmq generates, which begin with a 0 byte."""
MONITOR_EVENTS: Final = 10_000
"""Maximum number of events that wait in the monitor; then libzmq's thread blocks."""
LIBZMQ_EVENTS: Final = 1000
"""Events of `MONITOR_EVENTS` that libzmq's end of the monitor has room for: its default SNDHWM."""
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
"""The kind of each event, and its meaning."""
_INVALID: Final = {
    True: "the peer uses no key, or the public key of another broker, or does not speak ZeroMQ",
    False: "the peer uses a key, which this broker without access control does not, or does not speak ZeroMQ",
}
"""Why a handshake may be invalid, with and without access control."""


class RouterPort(Port):
    """A ROUTER on which any number of peers connect.

    `connections` are those of all sockets of the broker, for which the limits hold together; the newest are ended.
    """

    def __init__(
        self, broker: Broker, connections: Connections, context: zmq.Context[zmq.Socket[bytes]], prefix: bytes = b""
    ) -> None:
        self._broker = broker
        self._connections = connections
        # Read and set by `receive`.
        self.known: dict[bytes, AcceptedConnection] = {}
        """The connections of peers with generated routing ids; `receive` reports all other peers through `add`."""
        self.secured = False
        """Whether there is access control, so that `receive` sets `user`.  Without it, peers could set it."""
        self.user = b""
        """The public key of the peer that sent the message which was received last."""
        self.max_frames = ATTACK_FRAMES * broker.limits.max_frames
        """The number of frames from which on a message is an attack."""
        self.chosen: dict[bytes, AcceptedConnection] = {}
        """The last connections of peers that chose their routing ids, until they are forgotten."""
        self._open: dict[int, AcceptedConnection] = {}
        self._to_end: list[AcceptedConnection] = []
        self._due: dict[bytes, tuple[float, int]] = {}
        """Peers to probe: due time, and number of earlier probes."""
        self.alarm = connections.alarms.add(self.probe)
        self._now = 0.0
        self._closed = False
        # Frames slightly over the limit are let in, so that they are counted and reported.
        largest = 2 * broker.limits.max_message + (1 << 20)
        self.socket: zmq.Socket[bytes] = listener(context, linger_ms=LINGER_MS, max_message=largest)
        self._devnull = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._devnull)
        """Where descriptors of connections are copied to, since there may be no other one."""
        endpoint = f"inproc://zmdp-connections-{id(self.socket)}"
        self.socket.monitor(endpoint, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, MONITOR_EVENTS - LIBZMQ_EVENTS)
        self._monitor.connect(endpoint)
        self._more = False
        """Whether events were left in the monitor."""
        super().__init__(prefix, int(self.socket.get(zmq.FD)), int(self._monitor.get(zmq.FD)))
        self.look(0.0)  # libzmq signals the descriptor only after a first read has found nothing

    def protect(self, gate: Gate) -> None:
        """Accept only connections that `gate` admits; call it before `bind`."""
        gate.protect(self.socket)
        self.secured = True

    def bind(self, endpoint: str, ipc_mode: int) -> str:
        """Listen on `endpoint`, and return it with the actual port.  Raises `BindError` if that is not possible."""
        try:
            if endpoint.startswith("ipc://"):
                self._bind_ipc(endpoint, ipc_mode)
            else:
                use_family(self.socket, endpoint)
                self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            hint = zmq.strerror(error.errno or 0)
            if error.errno == EADDRINUSE:
                hint = "another program is listening there, perhaps another broker: choose another endpoint"
            elif error.errno in {ENODEV, EADDRNOTAVAIL}:
                hint = "that is not an address of this machine, nor the name of a network interface"
            raise BindError(f"cannot listen on {endpoint}: {hint}") from None
        bound = self.socket.get(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else endpoint

    def _bind_ipc(self, endpoint: str, mode: int) -> None:
        check_free(endpoint)
        # The file never has more permissions than asked for: `bind` creates it in this thread.  For `*`, libzmq creates
        # a folder as well, which only its owner can enter.
        umask = os.umask(0o077 if endpoint == "ipc://*" else 0o777 & ~mode)
        try:
            self.socket.bind(endpoint)
        finally:
            os.umask(umask)
        bound = self.socket.get(zmq.LAST_ENDPOINT)
        path = bound.rstrip(b"\0").decode().removeprefix("ipc://") if isinstance(bound, bytes) else ""
        if path and not path.startswith("@"):
            os.chmod(path, mode)  # a default ACL of the folder replaces the umask

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self) -> Message | None:
        """Return the next message that has arrived, which begins with the identity of its peer, or None."""
        message = receive(self.socket, True, self)
        if message is not None and self.prefix:
            message[0] = self.prefix + message[0]
        return message

    def deliver(self, message: Message, now: float) -> None:
        """Let the machine take in a message that `receive` returned."""
        self._broker.receive(message, now, self._role())

    def _role(self) -> Role | None:
        """Return the role of the peer that sent the message which was received last; None without access control."""
        users = self._connections.users
        return None if users is None else users.get(self.user, self._broker.roles.nobody)

    def send(self, message: Message) -> int:
        """Send `message` to the peer whose identity is its first frame."""
        self.ready = True
        if self.chosen or self.prefix:
            raw = self._raw(message[0])
            if raw in self.chosen and not self.reaches(raw):
                return EHOSTUNREACH  # C39: perhaps somebody else has taken the routing id meanwhile
            message = [raw, *message[1:]] if self.prefix else message
        errno: int = send(self.socket, message, self.unsent)
        return errno

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
            self._probe_at(identity, 0.0)  # it ended before this message was read
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
            connection = AcceptedConnection(descriptor, LOCAL)
            connection.ended = True
        self.chosen[identity] = connection
        if connection.ended:
            self._connections.ended.append(self.prefix + identity)
            return
        self._attribute(connection, identity)
        if before is not None and before.descriptor == descriptor:
            # Either a new connection, or the last messages of the old one: no peer can be reached under the id then.
            self._probe_at(identity, 0.0)

    def _replace(self, identity: bytes) -> None:
        """Forget a peer: another one has its routing id."""
        del self.chosen[identity]
        self._due.pop(identity, None)
        shown = self.prefix + identity
        self._connections.ended = [each for each in self._connections.ended if each != shown]
        self._connections.replaced.append(shown)

    def _attribute(self, connection: AcceptedConnection, identity: bytes) -> None:
        connection.identities.append(identity)
        limit = self._connections.over_role_limit(connection, self.user)
        if limit is not None:
            text = "ended a connection of role %s, which may have %d"
            self._refuse(connection, "over-role-limit", text, connection.role, limit)

    def reaches(self, raw: bytes) -> bool:
        """Return whether a message to a peer with a `chosen` routing id reaches the connection that it spoke on."""
        self.look(self._now)
        connection = self.chosen.get(raw)
        return connection is None or not connection.ended

    def forget(self, identity: bytes) -> None:
        """Stop probing a peer, which is known to be gone, and forget its chosen routing id."""
        raw = self._raw(identity)
        self._due.pop(raw, None)
        connection = self.chosen.get(raw)
        if connection is not None and connection.ended:
            del self.chosen[raw]

    # ── events of the monitor ────────────────────────────────────────────────────────────────────────────────────────

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
                self._connections.counts[kind] += 1
                text = "a connection failed in its handshake: %s"
                self._connections.journal.note(self._now, logging.INFO, kind, text, reason or _INVALID[self.secured])

    def _accepted(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._disconnected(descriptor)
        address, connections = address_of(descriptor), self._connections
        connection = self._open[descriptor] = AcceptedConnection(descriptor, address)
        connections.opened(connection)
        if descriptor >= (files := max_files()) - SPARE_FILES:  # accept returns the lowest that is free (POSIX)
            text = "ended a new connection, for lack of descriptors: this process may have %d open files (ulimit -n)"
            self._refuse(connection, "out-of-descriptors", text, files)
        elif connections.open > connections.maximum:
            text = "ended a new connection from %s: there are %d already (max-connections)"
            self._refuse(connection, "over-limit", text, address or "this host", connections.maximum)
        elif address != LOCAL and connections.addresses[address] > connections.per_address:
            text = "ended a new connection from %s, which has %d already (max-connections-per-address)"
            self._refuse(connection, "over-address-limit", text, address, connections.per_address)

    def _disconnected(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is None:
            return
        connection.ended = True
        self._connections.closed(connection)
        for identity in connection.identities:
            if self.known.pop(identity, None) is not None:
                self._probe_at(identity, self._now)
            elif self.chosen.get(identity) is connection:
                self._due.pop(identity, None)
                self._connections.ended.append(self.prefix + identity)

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
        raw = self._raw(identity)
        connection = self.known.get(raw) or self.chosen.get(raw)
        if connection is not None:
            self._connections.counts["slow-reader"] += 1
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
        self._connections.counts[kind] += 1
        self._connections.journal.note(self._now, logging.WARNING, kind, text, *values)
        self._to_end.append(connection)

    def _end_excess(self) -> None:
        due, self._to_end = self._to_end, []  # not those that come meanwhile
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
                shut_down(self._copy)
            os.dup2(self._devnull, self._copy, inheritable=False)
        if self._more or self._to_end:
            self.alarm.set(self._now)

    # ── what is due ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _probe_at(self, identity: bytes, at: float, tried: int = 0) -> None:
        """Probe a peer, for the first time or once more."""
        self._due[identity] = at, tried
        self.alarm.set(min(self.alarm.due, at))

    def _plan(self) -> None:
        """Set the alarm, after what was due is done."""
        due = self._now if self._more or self._to_end else math.inf
        self.alarm.set(min(due, min(self._due.values())[0]) if self._due else due)

    def probe(self, now: float) -> None:
        """Do what is due: read the monitor, and find the peers to probe now."""
        self.look(now)
        due = [(identity, tried) for identity, (at, tried) in self._due.items() if at <= now]
        for identity, tried in due:
            if tried + 1 < len(PROBES):
                self._due[identity] = now + PROBES[tried + 1] - PROBES[tried], tried + 1
            else:
                del self._due[identity]
                if _is_generated(identity):
                    # Its connection ended long ago.  There are peers that nothing can be sent to, to prove it.
                    self._connections.ended.append(self.prefix + identity)
            self._connections.to_probe.append(self.prefix + identity)
        self._plan()

    def close(self) -> None:
        """Close the socket.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._read()  # libzmq's thread must not be blocked
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        os.close(self._devnull)
        os.close(self._copy)


class PiratePort(RouterPort):
    """A ROUTER for Lazy Pirate clients, which call `service`, and Paranoid Pirate workers, which offer it.

    One for `workers` only has Simple Pirate workers, too, and no clients.
    """

    def __init__(
        self,
        broker: Broker,
        connections: Connections,
        context: zmq.Context[zmq.Socket[bytes]],
        service: bytes,
        *,
        workers: bool,
    ) -> None:
        super().__init__(broker, connections, context, new_prefix())
        self.service = service
        self._workers = workers

    def deliver(self, message: Message, now: float) -> None:
        """Let the machine take in a message that `receive` returned."""
        self._broker.receive_pirate(message, self.service, now, self._role(), workers=self._workers)


def _is_generated(identity: bytes) -> bool:
    """Return whether libzmq generated a routing id."""
    return len(identity) == GENERATED_BYTES and identity[0] == 0
