"""The sockets of a broker, as its loop sees them, and how it waits for them.

The first bytes of a peer's identity, the first frame of its messages in the broker, tell its port.  Those of the main
ROUTER have no such prefix.
"""

import secrets
import select
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from ...transport.multipart import Unsent
from ...transport.polling import Wake
from ...wire import Message
from ..core.roles import Role

PREFIX_BYTES: Final = 9
"""How many bytes of an identity tell its port."""
MAIN: Final = b""
"""The prefix of the main ROUTER, where identities are routing ids."""
LINGER_MS: Final = 1000
"""Time that the last messages (DISCONNECT) have to be sent, in milliseconds."""
NO_MONITOR: Final = -1


def new_prefix() -> bytes:
    """Return the prefix of the identities at a new port.

    Identities at the main ROUTER never begin so: those that libzmq generates are shorter, and a peer that chooses its
    own cannot guess the prefix (C39).
    """
    return b"\0" + secrets.token_bytes(PREFIX_BYTES - 1)


class Port:
    """A socket of the broker, as its loop sees it.

    libzmq signals the descriptor of a socket only on changes (it is edge-triggered), and any use of the socket may
    consume the signal.  So a port is `ready` from a signal, or a message sent, until `receive` returns None.
    """

    def __init__(self, prefix: bytes, descriptor: int, monitor: int = NO_MONITOR) -> None:
        self.prefix = prefix
        """The first `PREFIX_BYTES` of the identities of its peers, or none of them: for one peer only, its whole
        identity."""
        self.descriptor = descriptor
        """Readable when messages may have arrived."""
        self.monitor = monitor
        """Readable when `look` is due; -1 if it never is."""
        self.ready = True
        """Whether messages may have arrived."""
        self.unsent: Any = Unsent()
        """The messages sent that libzmq still holds."""

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

    def drained(self, now: float) -> bool:
        """Take note that everything that had arrived is taken in.  Return whether the machine was told something."""
        del now
        return False

    def waiting(self) -> dict[bytes, int]:
        """Return how many bytes libzmq holds for each peer, by identity."""
        held: dict[bytes, int] = self.unsent.waiting()
        return {self.prefix + raw: size for raw, size in held.items()}

    def forget_unsent(self, identity: bytes) -> None:
        """Stop counting the messages that libzmq holds for a peer: its connection ends."""
        self.unsent.forget(self._raw(identity))

    def _raw(self, identity: bytes) -> bytes:
        """Return the peer's routing id at the socket."""
        return identity[len(self.prefix) :]

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────

    def grant(self, users: dict[bytes, Role]) -> None:
        """Use these roles of public keys from now on."""

    def end_users(self, users: Collection[bytes]) -> None:
        """End the connections of peers with these public keys."""

    def look(self, now: float) -> None:
        """Read the reports of the monitor."""

    def end(self, identity: bytes) -> None:
        """End the connection of a peer that does not read its messages."""

    def forget(self, identity: bytes) -> None:
        """Forget a peer, which is known to be gone."""

    def close(self) -> None:
        """Close the socket.  Idempotent."""
        raise NotImplementedError


class Sockets:
    """The main ROUTER, the other ports of a broker, and the other descriptors that its loop waits for.

    A ZeroMQ socket's descriptor becomes readable on the next event; `zmq_poll` would check the socket again first.
    """

    def __init__(self, main: Port) -> None:
        self.main = main
        self.ports: dict[bytes, Port] = {}
        """All sockets, by prefix."""
        self.waker = Wake()
        """Ends the wait, from any thread or from a signal handler."""
        self._poll = select.poll()
        self._ports: dict[int, Port] = {}
        """The ports by the descriptors of their sockets."""
        self._actions: dict[int, Callable[[float], object]] = {}
        """The actions for other descriptors that become readable."""
        self._closed = False
        self.add(main)

    def watch(self, descriptor: int, action: Callable[[float], object]) -> None:
        """Call `action` with the time when a descriptor is readable."""
        self._actions[descriptor] = action
        self._poll.register(descriptor, select.POLLIN)

    def add(self, port: Port) -> None:
        """Serve the peers at `port` too."""
        self.ports[port.prefix] = port
        self._ports[port.descriptor] = port
        self._poll.register(port.descriptor, select.POLLIN)
        if port.monitor != NO_MONITOR:
            self.watch(port.monitor, port.look)

    def remove(self, port: Port) -> None:
        """Close a port, whose peers the machine knows to be gone."""
        del self.ports[port.prefix]
        del self._ports[port.descriptor]
        self._poll.unregister(port.descriptor)
        if port.monitor != NO_MONITOR:
            del self._actions[port.monitor]
            self._poll.unregister(port.monitor)
        port.close()

    def at(self, identity: bytes) -> Port:
        """Return the socket at which a peer is connected."""
        return self.ports.get(identity[:PREFIX_BYTES], self.main)

    def wait(self, timeout: int | None) -> None:
        """Wait at most `timeout` milliseconds for descriptors, and act on those that are readable."""
        ready = self._poll.poll(timeout)
        now = time.monotonic()
        for descriptor, _ in ready:
            port = self._ports.get(descriptor)
            if port is None:
                self._actions[descriptor](now)
            else:
                port.ready = True

    def close(self) -> None:
        """Close everything.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        for port in self.ports.values():
            port.close()
        self.waker.close()
