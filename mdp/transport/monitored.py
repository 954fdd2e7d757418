"""A DEALER socket for one connection, and the monitor that reports when that begins and ends."""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..security.keys import ClientKeys
from .multipart import receive
from .reach import REFUSED, nothing_listens, why_not_begun, why_refused
from .sockets import Context, dealer


class Report(NamedTuple):
    """What a monitor has reported."""

    event: int
    """The `zmq.Event`."""
    value: int

    @property
    def established(self) -> bool:
        """Whether the peer has accepted the connection."""
        return self.event == zmq.Event.HANDSHAKE_SUCCEEDED

    @property
    def refused(self) -> bool:
        """Whether the peer has refused this program; ZeroMQ does not connect again then."""
        return bool(self.event & REFUSED)


class MonitoredDealer:
    """A DEALER socket that is connected to `endpoint`, and its monitor.

    Args:
        context: The ZeroMQ context.
        endpoint: Where the peer listens.
        options: Of the socket.
        keys: This program's and the peer's, or None.
        events: What the monitor reports, from the beginning; 0 for no monitor.

    Raises `SettingError` or `zmq.ZMQError` if it cannot be opened.
    """

    def __init__(
        self, context: Context, endpoint: str, options: Mapping[int, int], keys: ClientKeys | None, events: int
    ) -> None:
        self.endpoint = endpoint
        self.socket = dealer(context, endpoint, options, keys=keys, monitored=events)
        self.descriptor = int(self.socket.get(zmq.FD))
        self.monitor: zmq.Socket[bytes] | None = None
        self.monitor_descriptor = -1
        self._keys = keys
        if events:
            self.watch(events)

    def limit_unread(self, messages: int) -> None:
        """Have libzmq read so many messages ahead from now on."""
        self.socket.set(zmq.RCVHWM, messages)

    def watch(self, events: int) -> None:
        """Have the monitor report these events from now on.  Its descriptor tells nothing before the first report."""
        self.monitor = self.socket.get_monitor_socket(events)
        self.monitor_descriptor = int(self.monitor.get(zmq.FD))

    def unwatch(self) -> None:
        """Close the monitor."""
        monitor, self.monitor, self.monitor_descriptor = self.monitor, None, -1
        if monitor is not None:
            with suppress(zmq.ZMQError):  # the context was terminated
                self.socket.disable_monitor()
            monitor.close(0)

    @property
    def reported(self) -> bool:
        """Whether the monitor has reported anything that was not taken."""
        return self.monitor is not None and bool(int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN)

    def report(self) -> Report | None:
        """Take what the monitor has reported next, or None."""
        message = None if self.monitor is None else receive(self.monitor)
        if message is None:
            return None
        found = parse_monitor_message(message)
        return Report(int(found["event"]), int(found["value"]))

    def why(self, report: Report) -> str:
        """Return the reason for a report that there is no connection, over which nothing was ever received."""
        refusal = why_refused(report.event, report.value, self._keys, self.endpoint)
        if refusal is not None:
            return refusal
        if report.event == zmq.Event.DISCONNECTED:
            return "the program that listens there closed the connection: is it a broker?"
        if report.event == zmq.Event.CONNECT_RETRIED:  # and nothing before, which would have been told
            return why_not_begun()
        return nothing_listens(self.endpoint)

    def close(self, linger_ms: int = 0) -> None:
        """Close both.  The last messages may take so many milliseconds to leave."""
        self.unwatch()
        self.socket.close(linger_ms)
