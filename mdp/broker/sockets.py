"""The sockets of a broker, and how its loop waits for them."""

import select
import time
from collections.abc import Callable

from ..transport.polling import Wake
from .ports import NO_MONITOR, PREFIX_BYTES, Port
from .router_ports import RouterPort


class Sockets:
    """The main ROUTER, the other ports of a broker, and whatever else its loop waits for.

    A ZeroMQ socket's descriptor becomes readable on the next event; `zmq_poll` would check the socket again first.
    """

    def __init__(self, main: RouterPort) -> None:
        self.main = main
        self.ports: dict[bytes, Port] = {}
        """All sockets, by prefix."""
        self.waker = Wake()
        """Ends the wait, from any thread or from a signal handler."""
        self._poll = select.poll()
        self._ports: dict[int, Port] = {}
        """The ports by the descriptors of their sockets."""
        self._actions: dict[int, Callable[[float], object]] = {}
        """What to do when another descriptor is readable."""
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
        return self.main if len(self.ports) == 1 else self.ports.get(identity[:PREFIX_BYTES], self.main)

    def wait(self, timeout: int | None) -> None:
        """Wait at most `timeout` milliseconds, and find out what is ready."""
        ready = self._poll.poll(timeout)
        if len(ready) == 1 and ready[0][0] == self.main.descriptor:
            self.main.ready = True
            return
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
