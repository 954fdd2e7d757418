"""The sockets of a broker, and how its loop waits for them: the main ROUTER and the ports beside it."""

import select
import selectors
from typing import Final

from ..transport.wake import Wake
from .ports import NO_MONITOR, PREFIX_BYTES, Port, RouterPort

PORT_INTERVAL: Final = 0.0005
"""Seconds between two checks for messages at ports while messages keep coming at the main ROUTER."""


class Sockets:
    """The main ROUTER and the ports of a broker."""

    def __init__(self, main: RouterPort) -> None:
        self.main = main
        self.ports: dict[bytes, Port] = {}
        """The sockets beside the main ROUTER, by prefix."""
        self._probing: list[Port] = [main]
        """The ports that probe peers."""
        self._check_at = 0.0
        """When to find out again which ports are ready, while messages keep coming."""
        self.waker = Wake()
        """Ends the wait, from any thread or from a signal handler."""
        self._poller = _Poller(main, self.waker.descriptor)
        self._closed = False

    def add(self, port: Port) -> None:
        """Serve the peers at `port` too."""
        self.ports[port.prefix] = port
        self._poller.add(port)
        self._plan_probes()

    def remove(self, port: Port) -> None:
        """Close a port, whose peers the machine knows to be gone."""
        del self.ports[port.prefix]
        self._poller.remove(port)
        self._plan_probes()
        port.close()

    def _plan_probes(self) -> None:
        self._probing = [self.main, *(each for each in self.ports.values() if each.probes)]

    def at(self, identity: bytes) -> Port:
        """Return the socket at which a peer is connected."""
        return self.ports.get(identity[:PREFIX_BYTES], self.main) if self.ports else self.main

    # ── what has arrived ─────────────────────────────────────────────────────────────────────────────────────────────

    def ready_ports(self, now: float) -> list[Port]:
        """Return the ports at which messages may have arrived."""
        if not self.ports:
            return []
        if now >= self._check_at:
            self._check_at = now + PORT_INTERVAL
            self._poller.check()
        return [port for port in self.ports.values() if port.ready]

    def take_ended(self) -> list[bytes]:
        """Return the peers whose connections have ended; what they sent before may still have to be received."""
        ended = self.main.take_ended()
        for port in self._probing[1:]:
            ended += port.take_ended()
        return ended

    def look(self, now: float) -> None:
        """Read what the monitors report."""
        self.main.look(now)
        for port in list(self.ports.values()):
            port.look(now)

    def to_probe(self, now: float) -> list[bytes]:
        """Return the identities of the peers to probe now."""
        identities = self.main.to_probe(now)
        for port in self._probing[1:]:
            identities = identities + port.to_probe(now)
        return identities

    def deadline(self) -> float | None:
        """Return when `to_probe` is due, or None."""
        due = None
        for port in self._probing:
            other = port.deadline()
            if other is not None and (due is None or other < due):
                due = other
        return due

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_for(self, descriptor: int) -> None:
        """Wait for another descriptor too."""
        self._poller.register(descriptor)

    def wait(self, timeout: int | None) -> bool:
        """Wait at most `timeout` milliseconds.  Return whether a monitor has events."""
        has_events = self._poller.wait(timeout)
        if self._poller.woken:
            self.waker.clear()
        return has_events

    @property
    def only_messages(self) -> bool:
        """Whether the last wait ended because of messages at the main ROUTER, and nothing else."""
        return self._poller.only_messages

    def close(self) -> None:
        """Close everything.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        for port in self.ports.values():
            port.close()
        self.main.close()
        self._poller.close()
        self.waker.close()


class _Poller:
    """Wait for ZeroMQ sockets that have just been drained, to be woken, for monitors, and other descriptors.

    A ZeroMQ socket's descriptor becomes readable on the next event; `zmq_poll` would check the socket again first.
    """

    def __init__(self, main: RouterPort, waker: int) -> None:
        self.woken = False
        """Whether the descriptor `waker` was readable after the last wait."""
        self.only_messages = False
        """Whether the main ROUTER was the only one that was ready then."""
        self._main = main.descriptor
        self._waker = waker
        self._monitor = main.monitor
        self._ports: dict[int, Port] = {}
        """The ports by the descriptors of their sockets."""
        self._ports_poll = selectors.DefaultSelector()
        """The sockets and the monitors of all ports.  However many there are, they are one descriptor to wait for."""
        self._poll = select.poll()
        for descriptor in (self._waker, main.descriptor, main.monitor, self._ports_poll.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    def register(self, descriptor: int) -> None:
        """Wait for a descriptor too."""
        self._poll.register(descriptor, select.POLLIN)

    def add(self, port: Port) -> None:
        """Wait for a port too."""
        self._ports[port.descriptor] = port
        self._ports_poll.register(port.descriptor, selectors.EVENT_READ)
        if port.monitor != NO_MONITOR:
            self._ports_poll.register(port.monitor, selectors.EVENT_READ)

    def remove(self, port: Port) -> None:
        """Stop waiting for a port; call it before the port is closed."""
        del self._ports[port.descriptor]
        self._ports_poll.unregister(port.descriptor)
        if port.monitor != NO_MONITOR:
            self._ports_poll.unregister(port.monitor)

    def check(self) -> bool:
        """Find out which ports are ready, without waiting.  Return whether one of their monitors has events."""
        has_events = False
        for key, _ in self._ports_poll.select(0):
            port = self._ports.get(key.fd)
            if port is None:
                has_events = True
            else:
                port.ready = True
        return has_events

    def wait(self, timeout: int | None) -> bool:
        """Wait at most `timeout` milliseconds.  Return whether a monitor has events."""
        has_events = self.woken = False
        ready = self._poll.poll(timeout)
        self.only_messages = len(ready) == 1 and ready[0][0] == self._main
        if self.only_messages:
            return False
        for descriptor, _ in ready:
            if descriptor == self._monitor:
                has_events = True
            elif descriptor == self._waker:
                self.woken = True
            elif descriptor == self._ports_poll.fileno():
                has_events |= self.check()
        return has_events

    def close(self) -> None:
        """Free the descriptor."""
        self._ports_poll.close()
