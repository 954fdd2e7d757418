"""The connections of links that this broker opens: a DEALER for each, which is replaced when its connection ends."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq

from ...errors import SettingError
from ...security.keys import ClientKeys
from ...transport.listening import LASTING
from ...transport.monitored import MonitoredDealer, Report
from ...transport.multipart import receive, send
from ...transport.reach import HANDSHAKE_FAILED
from ...transport.sockets import ONE_CONNECTION_MS
from ...wire import Message
from ..core.roles import Role
from ..machine import Broker
from .access_control import AccessControl
from .ports import LINGER_MS, Port, new_prefix

_EVENTS: Final = int(zmq.Event.DISCONNECTED | zmq.Event.CLOSED) | HANDSHAKE_FAILED

_ENDED: Final = (
    "the program that listens there ended the handshake: is it a broker? Does it need a key (--access FILE, and its "
    "public key after the endpoint: ENDPOINT=FILE.key)?"
)
_OTHER_KEY: Final = (
    "the program that listens there ended the handshake: its public key is not %s, or it was started without --access, "
    "or it is no broker"
)


class LinkPort(Port):
    """One connection to another broker, at `endpoint`.

    `identity` is the link's in the machine, and `keys` are this broker's own with the other's public key, or None.
    Raises `SettingError` or `zmq.ZMQError` if there can be no socket.
    """

    def __init__(
        self,
        broker: Broker,
        identity: bytes,
        endpoint: str,
        keys: ClientKeys | None,
        role: Role,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self.ended: str | None = None
        """Why the connection has ended or cannot be made, once that is known."""
        self.received_any = False
        """Whether anything has arrived."""
        self._broker = broker
        self._keys = keys
        self.role = role
        """The role of the other broker's key."""
        self._closed = False
        options: dict[int, int] = {
            zmq.RECONNECT_IVL: ONE_CONNECTION_MS,
            zmq.LINGER: LINGER_MS,
            zmq.MAXMSGSIZE: 2 * broker.limits.max_message + (1 << 20),
            **LASTING,
        }
        self._dealer = MonitoredDealer(context, endpoint, options, keys, _EVENTS)
        self._socket: zmq.Socket[bytes] = self._dealer.socket
        super().__init__(identity, self._dealer.descriptor, self._dealer.monitor_descriptor)
        self.look(0.0)  # libzmq signals the descriptor only after a first read has found nothing

    def receive(self) -> Message | None:
        """Return the next message that has arrived, which begins with the identity of the link, or None."""
        message = receive(self._socket)
        if message is None:
            return None
        self.received_any = True
        return [self.prefix, *message]

    def deliver(self, message: Message, now: float) -> None:
        """Let the machine take in a message that `receive` returned."""
        self._broker.receive(message, now, self.role)

    def drained(self, now: float) -> bool:
        """Tell the machine if the connection has ended: everything that came over it is taken in."""
        if self.ended is None:
            return False
        self._broker.link_failed(self.prefix, self.ended, now)
        return True

    def send(self, message: Message) -> int:
        """Send `message` to the other broker."""
        self.ready = True
        errno: int = send(self._socket, message[1:], self.unsent)
        return errno

    def waiting(self) -> dict[bytes, int]:
        """Return how many bytes libzmq holds, by the identity of the link."""
        held: dict[bytes, int] = self.unsent.waiting()
        return {self.prefix: sum(held.values())}

    def forget_unsent(self, identity: bytes) -> None:
        """Stop counting the messages that libzmq holds: the connection ends."""
        del identity
        for first in list(self.unsent.waiting()):
            self.unsent.forget(first)

    def grant(self, users: dict[bytes, Role]) -> None:
        """Use the role that `users` has for the other broker's key from now on."""
        nobody = self._broker.roles.nobody
        role = nobody if self._keys is None else users.get(self._keys.server, nobody)
        if role is not self.role:
            self._end("the role of its key has changed")

    def look(self, now: float) -> None:
        """Find out whether the connection has ended, and why."""
        del now
        while (report := self._dealer.report()) is not None:
            self._end(self.ended or self._why(report))

    def _end(self, why: str) -> None:
        self.ended = why
        self.ready = True  # what arrived before the end is taken in first

    def _why(self, report: Report) -> str:
        if self.received_any:
            return "the other broker closed the connection"
        if report.event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return self._dealer.why(report)
        if report.event & (HANDSHAKE_FAILED | zmq.Event.DISCONNECTED):
            # Which of the two sides ends the handshake first is left to chance, and with it the event.
            return _ENDED if self._keys is None else _OTHER_KEY % self._keys.server.decode()
        return "nothing is listening there"

    def end(self, identity: bytes) -> None:
        """End the connection of a peer that does not read its messages."""
        del identity
        self._end("the other broker does not read its messages")

    def close(self) -> None:
        """Close the socket.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._dealer.close(LINGER_MS if self._broker.draining else 0)


class LinkTo(NamedTuple):
    """Another broker to which a broker opens a link."""

    kind: str
    """The relation of the other broker to this one: "peer" or "parent"."""
    endpoint: str
    key: bytes | None = None
    """The other broker's public key in Z85; None without access control."""


class LinkPorts:
    """Opens the connections of a broker's links.

    Raises `SettingError` if there is access control, and a link has no key, or one without a role for links.
    """

    def __init__(
        self, broker: Broker, links: Sequence[LinkTo], access: AccessControl, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._broker = broker
        self._context = context
        self._access = access
        self._own = access.access
        """The access file when the broker started: its own key in it never changes."""
        self._links: dict[bytes, LinkTo] = {}
        for link in links:
            role = self._role_of(link)
            self._check(link, role)
            self._links[broker.add_link(link.kind, role, link.endpoint, new_prefix())] = link

    def _check(self, link: LinkTo, role: Role) -> None:
        if self._own is None:
            if link.key is not None:
                raise SettingError(
                    f"the link to {link.endpoint} has a key, but this broker uses none: use --access FILE"
                )
        elif link.key is None:
            raise SettingError(
                f"the link to {link.endpoint} needs the public key of that broker: {link.endpoint}=FILE.key"
            )
        elif not role.link:
            raise SettingError(
                f"the key of the broker at {link.endpoint} has no role with link = true in {self._own.path}: "
                f"`mdp-keys allow ROLE KEY --link` gives it one"
            )

    def _role_of(self, link: LinkTo) -> Role:
        roles, users = self._broker.roles, self._access.users
        return roles.everyone if users is None else users.get(link.key or b"", roles.nobody)

    def open(self, identity: bytes) -> "LinkPort | str":
        """Open a connection.  Return its port, or why there is none."""
        link = self._links[identity]
        keys = None
        if self._own is not None and link.key is not None:
            keys = ClientKeys(self._own.public_key, self._own.secret_key, link.key)
        try:
            return LinkPort(self._broker, identity, link.endpoint, keys, self._role_of(link), self._context)
        except (SettingError, zmq.ZMQError) as error:
            return str(error)
