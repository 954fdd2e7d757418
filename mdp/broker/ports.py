"""The sockets of the broker: what its loop needs of each, and the ROUTERs on which peers connect.

Most brokers have one socket, the main ROUTER, whose messages the loop receives and sends itself.  Further sockets are
called *ports*.  The first bytes of a peer's identity, the first frame of its messages in the broker, tell its port.
"""

import logging
import os
import secrets
from collections.abc import Collection
from errno import EADDRINUSE, EADDRNOTAVAIL, EHOSTUNREACH, ENODEV
from typing import Any, Final

import zmq

from ..access import Access
from ..errors import BindError
from ..limits import Limits
from ..transport.listening import check_free, keep_alive, randomise_routing_ids
from ..transport.multipart import Unsent, receive, send
from ..transport.sockets import new_socket, use_family
from ..wire import Message
from .connections import Connections
from .machine import Broker
from .roles import Role
from .zap import Gate

PREFIX_BYTES: Final = 9
"""How many bytes of an identity tell its port."""
ATTACK_FRAMES: Final = 16
"""A message of more than this many times `max_frames` ends its connection.  A batch may exceed `max_frames`, which
limits each of its records."""
HANDSHAKE_MS: Final = 5000
"""How long a new connection may take for its handshake before libzmq ends it, in milliseconds."""
LINGER_MS: Final = 1000
"""Time that the last messages (DISCONNECT) have to be sent, in milliseconds."""
NO_MONITOR: Final = -1


def new_prefix() -> bytes:
    """Return what the identities at a new port begin with.

    Identities at the main ROUTER never begin so: those that libzmq generates are shorter, and a peer that chooses its
    own cannot guess the prefix (C39).
    """
    return b"\0" + secrets.token_bytes(PREFIX_BYTES - 1)


class Port:
    """A socket of the broker, as its loop sees it.

    libzmq signals the descriptor of a socket only on changes (it is edge-triggered), and any use of the socket may
    consume the signal.  So a port is `ready` from a signal, or a message sent, until `receive` returns None.
    """

    probes = False
    """Whether it probes peers, so that `deadline` and `to_probe` have something to say."""

    def __init__(self, prefix: bytes, descriptor: int, monitor: int = NO_MONITOR) -> None:
        self.prefix = prefix
        """The first `PREFIX_BYTES` of the identities of its peers: for one peer only, its whole identity."""
        self.descriptor = descriptor
        """Readable when messages may have arrived."""
        self.monitor = monitor
        """Readable when `look` is due; -1 if it never is."""
        self.ready = True
        """Whether messages may have arrived."""
        self.unsent: Any = Unsent()
        """What libzmq holds of the messages sent."""

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self) -> Message | None:
        """Return the next message that has arrived, which begins with the identity of its peer, or None."""
        raise NotImplementedError

    def deliver(self, message: Message, now: float) -> None:
        """Let the machine take in a message that `receive` returned."""
        raise NotImplementedError

    def send(self, message: Message) -> int:
        """Send `message` to the peer whose identity is its first frame.

        Return 0, EAGAIN (the peer does not keep up) or EHOSTUNREACH (it is gone).  Sets `ready`.
        """
        raise NotImplementedError

    def waiting(self) -> dict[bytes, int]:
        """Return how many bytes libzmq holds for each peer, by identity."""
        raise NotImplementedError

    def forget_unsent(self, identity: bytes) -> None:
        """Stop counting what libzmq holds for a peer: its connection ends."""
        raise NotImplementedError

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take_replaced(self) -> list[bytes]:
        """Return the peers that are gone, before the message that was received last, since another has their id."""
        return []

    def take_ended(self) -> list[bytes]:
        """Return the peers whose connections have ended; what they sent before may still have to be received."""
        return []

    def grant(self, access: Access, users: dict[bytes, Role]) -> None:
        """Use the roles of `access` from now on.  `users` has the role of each public key."""

    def end_users(self, users: Collection[bytes]) -> None:
        """End the connections of peers with these public keys."""

    def look(self, now: float) -> None:
        """Read what the monitor reports."""

    def deadline(self) -> float | None:
        """Return when `to_probe` is due, or None."""
        return None

    def to_probe(self, now: float) -> list[bytes]:
        """Do what is due, and return the identities of the peers to probe now."""
        del now
        return []

    def end(self, identity: bytes) -> None:
        """End the connection of a peer that does not read its messages."""

    def forget(self, identity: bytes) -> None:
        """Forget a peer, which is known to be gone."""

    def close(self) -> None:
        """Close the socket.  Idempotent."""
        raise NotImplementedError


class RouterPort(Port):
    """A ROUTER on which any number of peers connect.

    `main` is None for the main ROUTER, whose messages the loop delivers itself; the limits of connections hold for it
    and the others together.
    """

    probes = True

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        limits: Limits,
        *,
        prefix: bytes,
        main: "RouterPort | None",
        logger: logging.Logger,
    ) -> None:
        randomise_routing_ids()
        self.socket: zmq.Socket[bytes] = new_socket(context, zmq.ROUTER)
        self.connections: Connections = Connections(
            self.socket,
            context,
            maximum=limits.max_connections or 1,
            per_address=limits.max_connections_per_address or 1,
            logger=logger,
            totals=None if main is None else main.connections.totals,
        )
        super().__init__(prefix, int(self.socket.get(zmq.FD)), self.connections.descriptor)
        self._closed = False
        self.users: dict[bytes, Role] | None = None
        """The role of each public key; None without access control."""
        self.connections.max_frames = ATTACK_FRAMES * limits.max_frames
        # Frames slightly over the limit are let in, so that they are counted and reported.
        max_frame = 2 * limits.max_message + (1 << 20)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.LINGER, LINGER_MS)
        self.socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.set(zmq.MAXMSGSIZE, max_frame)  # libzmq disconnects a peer that sends a larger one
        keep_alive(self.socket)
        self.socket.set(zmq.BACKLOG, 1024)

    def protect(self, gate: Gate) -> None:
        """Accept only connections that `gate` admits; call it before `bind`."""
        gate.protect(self.socket)
        self.connections.secured = True

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

    def receive(self) -> Message | None:
        """Return the next message that has arrived, which begins with the identity of its peer, or None."""
        message = receive(self.socket, True, self.connections)
        if message is None:
            return None
        message[0] = self.prefix + message[0]
        return message

    def send(self, message: Message) -> int:
        """Send `message` to the peer whose identity is its first frame."""
        self.ready = True
        raw = self._raw(message[0])
        if raw in self.connections.chosen and not self.connections.reaches(raw):
            return EHOSTUNREACH  # C39: perhaps somebody else has taken the routing id meanwhile
        errno: int = send(self.socket, [raw, *message[1:]] if self.prefix else message, self.unsent)
        return errno

    def waiting(self) -> dict[bytes, int]:
        """Return how many bytes libzmq holds for each peer, by identity."""
        held: dict[bytes, int] = self.unsent.waiting()
        return {self.prefix + raw: size for raw, size in held.items()}

    def forget_unsent(self, identity: bytes) -> None:
        """Stop counting what libzmq holds for a peer: its connection ends."""
        self.unsent.forget(self._raw(identity))

    def take_replaced(self) -> list[bytes]:
        """Return the peers that are gone, before the message that was received last, since another has their id."""
        found, self.connections.replaced = self.connections.replaced, []
        return [self.prefix + raw for raw in found] if found else found

    def take_ended(self) -> list[bytes]:
        """Return the peers whose connections have ended; what they sent before may still have to be received."""
        found, self.connections.ended = self.connections.ended, []
        return [self.prefix + raw for raw in found] if found else found

    def grant(self, access: Access, users: dict[bytes, Role]) -> None:
        """Use the roles of `access` from now on.  `users` has the role of each public key."""
        self.users = users
        self.connections.role_of = lambda user: access.keys.get(user, "")
        self.connections.limit_of = lambda role: access.roles[role].connections if role in access.roles else None

    def end_users(self, users: Collection[bytes]) -> None:
        """End the connections of peers with these public keys."""
        self.connections.end_users(users)

    def look(self, now: float) -> None:
        """Read what the monitor reports."""
        self.connections.look(now)

    def deadline(self) -> float | None:
        """Return when `to_probe` is due, or None."""
        return self.connections.deadline()

    def to_probe(self, now: float) -> list[bytes]:
        """Do what is due, and return the identities of the peers to probe now."""
        due = self.connections.to_probe(now)
        return [self.prefix + raw for raw in due] if due else due

    def end(self, identity: bytes) -> None:
        """End the connection of a peer that does not read its messages."""
        self.connections.end(self._raw(identity))

    def forget(self, identity: bytes) -> None:
        """Forget a peer, which is known to be gone."""
        self.connections.forget(self._raw(identity))

    def close(self) -> None:
        """Close the socket.  Idempotent."""
        if not self._closed:
            self._closed = True
            self.connections.close()
            self.socket.close()

    def _raw(self, identity: bytes) -> bytes:
        """Return the peer's routing id at the socket."""
        return identity[len(self.prefix) :]


class PiratePort(RouterPort):
    """A ROUTER for Lazy Pirate clients, which call `service`, and Paranoid Pirate workers, which offer it.

    One for `workers` only has Simple Pirate workers, too, and no clients.
    """

    def __init__(
        self,
        broker: Broker,
        service: bytes,
        main: RouterPort,
        context: zmq.Context[zmq.Socket[bytes]],
        logger: logging.Logger,
        *,
        workers: bool,
    ) -> None:
        super().__init__(
            context,
            broker.limits,
            prefix=new_prefix(),
            main=main,
            logger=logger,
        )
        self.service = service
        self._broker = broker
        self._workers = workers

    def deliver(self, message: Message, now: float) -> None:
        """Let the machine take in a message that `receive` returned."""
        role = None
        if self.users is not None:
            role = self.users.get(self.connections.user, self._broker.roles.nobody)
        self._broker.receive_pirate(message, self.service, now, role, workers=self._workers)
