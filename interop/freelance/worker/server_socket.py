"""A Freelance server's socket: its session on a ROUTER that clients connect to, and who may connect."""

import ipaddress
import logging
import socket as sockets
import time
from errno import EADDRINUSE, EADDRNOTAVAIL, EAGAIN
from typing import Final, NamedTuple

import zmq

from ....mdp.errors import BindError, SettingError
from ....mdp.limits import Limits
from ....mdp.security.access import Access
from ....mdp.transport.endpoints import checked_endpoint
from ....mdp.transport.listening import check_free, check_local, listener
from ....mdp.transport.multipart import Unsent, receive, send
from ....mdp.transport.sockets import Context, use_family
from ....mdp.transport.zap import ZapHandler
from ....workers.connection import LINGER_MS
from .session import UNKNOWN_KEY, FreelanceServerSession

MAX_MESSAGES: Final = 100
"""Messages taken in before requests are started and replies are sent."""
MAX_UNSENT_BYTES: Final = Limits().max_outbox_bytes
"""Memory of the replies that clients have not read yet; beyond it, those to slow readers are dropped."""
MAX_ENDPOINT_BYTES: Final = 255
"""Length of the longest routing id."""

_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - these are refused

log = logging.getLogger("zmdp.worker")


def public_endpoint(endpoint: object) -> str:
    """Return `endpoint`, by which clients know a server.  Raises `SettingError` if they cannot connect to it."""
    checked = checked_endpoint(endpoint)
    host, port = _host(checked)
    if host in _WILDCARDS or port in {"*", "0"}:
        raise SettingError(
            f"clients cannot connect to {checked}: a Freelance server needs the address and port that its clients use, "
            f"and listens elsewhere if told so: --freelance tcp://server1:5555 --bind tcp://*:5555 (in Python, bind=)"
        )
    if len(checked.encode()) > MAX_ENDPOINT_BYTES:
        raise SettingError(f"{checked[:60]}… is too long to be a server's name: at most {MAX_ENDPOINT_BYTES} bytes")
    return checked


def _host(endpoint: str) -> tuple[str, str]:
    """Return the host and the port of a tcp:// endpoint; empty for others."""
    if not endpoint.startswith("tcp://"):
        return "", ""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def _numeric(endpoint: str) -> str:
    """Return `endpoint` with the address of its host instead of a name, which ZeroMQ cannot listen on."""
    host, port = _host(endpoint)
    if not host or host == "*" or host in {name for _, name in sockets.if_nameindex()}:
        return endpoint
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            return f"tcp://{sockets.getaddrinfo(host, None, sockets.AF_INET)[0][4][0]}:{port}"
        except (OSError, UnicodeError):
            raise BindError(f"cannot listen on {endpoint}: the name {host} has no address") from None
    return endpoint


class _Sources:
    """Limits the frames of a message, and has the key of its sender, for `multipart.receive`."""

    def __init__(self, *, secured: bool, max_frames: int) -> None:
        self.secured = secured
        self.user = b""
        self.max_frames = max_frames
        self.known = self

    def __contains__(self, identity: object) -> bool:
        return True  # nothing is remembered of clients

    def add(self, identity: bytes, descriptor: int) -> None:
        """Not called: every client is known."""

    def offender(self, descriptor: int) -> None:
        """Ignore the rest of a message of too many frames; the session drops what was received of it."""


class Listening(NamedTuple):
    """Where a server listens, and whom it admits."""

    endpoint: str
    """Its public name, and the routing id of its socket."""
    bind: str
    """Where it listens."""
    access: Access | None
    """The keys that it admits; None for everybody."""
    insecure: bool
    """Whether everybody includes other machines."""


class ServerSocket:
    """The socket of a server, and its session with the clients that connect to it.

    Raises `BindError` if it cannot listen.
    """

    def __init__(self, session: FreelanceServerSession, listening: Listening, context: Context) -> None:
        self._session = session
        self._access = access = listening.access
        self.unsent = Unsent()
        limits = Limits()
        self._sources = _Sources(secured=access is not None, max_frames=limits.max_frames)
        self._gate: ZapHandler | None = None
        if access is None and not listening.insecure:
            check_local(listening.bind)
        self.socket = listener(context, linger_ms=LINGER_MS, max_message=limits.max_message)
        try:
            self.socket.set(zmq.ROUTING_ID, listening.endpoint.encode())
            self.socket.set(zmq.SNDHWM, 0)  # what clients have not read is limited in bytes: see `flush`
            if access is not None:
                self._gate = ZapHandler(context, access)
                self._gate.protect(self.socket)
            self._bind(listening.bind)
        except BaseException:
            self.close(0)
            raise
        self.descriptors = [int(self.socket.get(zmq.FD))]
        """When one of them is readable, something may have arrived.  They report changes only."""
        if self._gate is not None:
            self.descriptors.append(self._gate.descriptor)
        session.connected(time.monotonic())

    def _bind(self, bind: str) -> None:
        try:
            if bind.startswith("ipc://"):
                check_free(bind)
            use_family(self.socket, bind)
            self.socket.bind(_numeric(bind))
        except zmq.ZMQError as error:
            hint = zmq.strerror(error.errno or 0)
            if error.errno == EADDRINUSE:
                hint = "another program is listening there: choose another endpoint"
            elif error.errno == EADDRNOTAVAIL:
                hint = "it is not an address of this machine; if it is the public one, add --bind (in Python, bind=)"
            raise BindError(f"cannot listen on {bind}: {hint}") from None

    def receive(self, now: float) -> bool:
        """Receive messages and answer handshakes.  Return whether there may be more."""
        session, socket, sources = self._session, self.socket, self._sources
        more = self._gate is not None and self._gate.answer(now)
        for _ in range(MAX_MESSAGES):
            message = receive(socket, False, sources)
            if message is None:
                break
            if self._access is None:
                session.receive(message, now)
            else:
                role = self._access.keys.get(sources.user)
                allowed = role is not None and self._access.roles[role].may_call(session.service)
                session.receive(message, now, role or "", allowed=allowed)
        else:
            more = True
        if self._gate is not None and self._gate.refused:
            session.dropped[UNKNOWN_KEY] = self._gate.refused
        for dropped in session.take_reports():
            counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
            log.warning("%s: dropped messages: %s", session.service.decode(), counts)
        return more

    def flush(self) -> None:
        """Send what there is to send, without waiting for slow readers."""
        session = self._session
        for message in session.take_messages():
            if self.unsent.bytes > MAX_UNSENT_BYTES:
                self.unsent.settle()
                if self.unsent.bytes > MAX_UNSENT_BYTES and self.unsent.waiting().get(message[0]):
                    session.not_read()
                    continue
            errno = send(self.socket, message, self.unsent)
            if errno == EAGAIN:
                session.not_read()
            elif errno:
                session.gone(message[0])
                self.unsent.forget(message[0])

    def close(self, linger: int) -> None:
        """Close the socket; the last replies have so many milliseconds to be sent."""
        self.socket.close(linger)
        if self._gate is not None:
            self._gate.close()
