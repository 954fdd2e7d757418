"""The broker on its sockets: a loop that feeds messages to the machine, and sends those that it returns.

`Server` runs in the thread that calls `run`; `stop` may be called from any thread, or from a signal handler.
"""

import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import zmq

from ...errors import SettingError
from ...limits import DEFAULT_ENDPOINT, Limits
from ...security.access import Access
from ...timers import Alarms
from ...transport.listening import check_local
from ...transport.sockets import check_descriptors
from ...wire import service_name
from ..core.outgoing import Event, WorkerForgotten
from ..federation.links import MAX_BROKER_NAME, CloseLink, OpenLink, valid_name
from ..machine import Broker
from .access_control import AccessControl
from .connections import SPARE_FILES, Connections, default_max_connections
from .delivery import Delivery
from .dialer import LinkPorts, LinkTo
from .listener import PiratePort, RouterPort
from .ports import Port, Sockets

DEFAULT_DRAIN: Final = 10.0
"""Seconds."""
DEFAULT_IPC_MODE: Final = 0o600
MAX_TURN_MESSAGES: Final = 100
"""Maximum number of messages taken in at one socket before the replies are sent."""
MAX_WAIT: Final = 3600.0
"""The longest that the loop sleeps, in seconds."""
POLL_INTERVAL: Final = 0.0005
"""Seconds between two looks at everything that the loop waits for while messages keep coming."""
PEER_MESSAGES: Final = 1000
"""Number of messages of one peer that may wait at a socket: libzmq's default RCVHWM."""
CLOSING_SHARE: Final = 0.1
"""The last part of the drain limit, in which clients are told which requests are not done."""
MAX_CLOSING: Final = 1.0
"""The longest that this is, in seconds."""
STALL_INTERVALS: Final = 2
"""A turn that begins this many heartbeat intervals after the last one was held up: the loop sleeps for one at most."""

log = logging.getLogger("zmdp.broker")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a broker."""

    limits: Limits = field(default_factory=Limits)
    pirates: Sequence[tuple[str, str | bytes]] = ()
    """Further endpoints, each with the service that peers without a protocol of their own call or offer there
    (docs/interoperability/pirates.md)."""
    pirate_workers: Sequence[tuple[str, str | bytes]] = ()
    """Further endpoints, each with the service that such peers can only offer there."""
    name: str = ""
    """Its name among the brokers to which it is linked; by default the host's name and the first port."""
    links: Sequence[LinkTo] = ()
    """Other brokers, with which it exchanges requests (docs/how-to/brokers.md)."""
    slow: float | None = None
    """Requests that take longer than this, in seconds, are logged at their end."""
    drain_timeout: float = DEFAULT_DRAIN
    """How long requests in flight may take after `stop`, in seconds."""
    insecure: bool = False
    """Whether it may listen where other machines can reach it, without access control."""
    ipc_mode: int = DEFAULT_IPC_MODE
    """The permissions of the files of `ipc://` endpoints."""


class Backlog:
    """The messages that wait at the broker's sockets.

    While something is left after each turn, a peer's messages may wait for seconds.  But the sockets give the peers
    turns: after one message of each of them has been read, so has everything that had arrived before.
    """

    __slots__ = ("_began", "_turns_left", "read_until")

    def __init__(self, now: float) -> None:
        self.read_until = now
        """The time up to which all input has been read, even under load."""
        self._began = now
        """When the current round began, in which one message of each peer is read."""
        self._turns_left = 0
        """Turns until this round is over; 0 if none has begun."""

    def turn(self, now: float, *, turns: int) -> None:
        """Record a turn that began at `now`.

        `turns` is the number of turns in which one message of each peer is read; 0 if none is left to read.
        """
        if not turns:
            self.read_until = now
            self._turns_left = 0
        elif not self._turns_left:
            self._began, self._turns_left = now, turns
        else:
            self._turns_left -= 1
            if not self._turns_left:
                self.read_until = self._began


class Server:
    """A broker that listens on one or more endpoints.

    `binds` are ZeroMQ endpoints (`tcp://HOST:PORT`, `ipc://PATH`, `inproc://NAME`).  TCP port `*` means any free port;
    `endpoints` has the actual one, `pirate_endpoints` and `pirate_worker_endpoints` those of pirates.  An `inproc://`
    endpoint can be reached only through the same `context`.

    With `access`, only the keys that it lists may connect, except through `inproc://`, which has no keys.  Without it,
    an endpoint that other machines can reach is refused unless the settings are `insecure`.

    Raises `BindError` if it cannot listen, or `SettingError` if a setting is invalid or too few file descriptors are
    free; nothing stays open then.
    """

    def __init__(
        self,
        binds: Sequence[str] = (DEFAULT_ENDPOINT,),
        settings: ServerSettings | None = None,
        *,
        access: Access | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        settings = settings or ServerSettings()
        _check(binds, settings, access)
        self._settings = settings
        self.limits = _with_connections(settings.limits)
        self._stall_seconds = STALL_INTERVALS * self.limits.heartbeat
        name = settings.name or default_name(binds)
        self.broker = Broker(self.limits, now=time.monotonic(), name=name, logger=log, slow=settings.slow)
        self.cut_off = False
        """Whether it stopped before it was drained."""
        self._stops = 0
        self._drain_until: float | None = None
        """When the broker stops, even if it has not drained; None before `stop`."""
        self._closing = False
        self._alarms = Alarms()
        """The tasks of this loop; the machine has alarms of its own."""
        self._ending = self._alarms.add()
        """Set to when the broker gives up the requests that have not ended, and then to when it stops."""
        self._turn_at = self._tick_at = self._poll_at = self.broker.started
        """When the last turn began, and the earliest times of the machine's next tick, and of the next poll while
        messages keep coming."""
        self._told = False
        """Whether the machine was told something since its last turn, so that it may have something to say."""
        self._backlog = Backlog(self.broker.started)
        check_descriptors(SPARE_FILES)
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self.connections = Connections(self.limits, log, self._alarms)
        self.broker.stats.connections = self.connections.counts
        main = RouterPort(self.broker, self.connections, self._context)
        self._sockets = Sockets(main)
        self._sockets.watch(self._sockets.waker.descriptor, self._woken)
        self._delivery = Delivery(self.broker, self._sockets, self._alarms)
        self.access_control = AccessControl(self.broker, self._sockets, self.connections, self._alarms)
        try:
            self.access_control.open(access, main, self._context)
            self.endpoints = [main.bind(endpoint, settings.ipc_mode) for endpoint in binds]
            self.pirate_endpoints = [self._open_pirate(*each) for each in settings.pirates]
            self.pirate_worker_endpoints = [self._open_pirate(*each, workers=True) for each in settings.pirate_workers]
            self._links = LinkPorts(self.broker, settings.links, self.access_control, self._context)
        except BaseException:
            self.close()
            raise

    def _open_pirate(self, endpoint: str, service: str | bytes, *, workers: bool = False) -> str:
        """Listen for clients of `service` that have no header, and their workers, or only for these.

        Return the actual endpoint.
        """
        name = service_name(service)
        port = PiratePort(self.broker, self.connections, self._context, name, workers=workers)
        self.add_port(port)
        if self.access_control.gate is not None:
            port.protect(self.access_control.gate)
        return port.bind(endpoint, self._settings.ipc_mode)

    def add_port(self, port: Port) -> None:
        """Serve the peers at `port` too."""
        self._sockets.add(port)
        self.access_control.admit_to(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve until `stop` is called and requests in flight have finished, then send DISCONNECT to all workers."""
        now = time.monotonic()
        while not self._is_over(now):
            if not (self._turn(now) or self._delivery.gone):
                self._sockets.wait(self._wait(now))
            elif now >= self._poll_at:
                self._poll_at = now + POLL_INTERVAL
                self._sockets.wait(0)
                self._sockets.waker.run_handlers()
            now = time.monotonic()

    def _turn(self, now: float) -> bool:
        """Report to the machine, and carry out its turn.  Return whether there may be more to do."""
        more = self._receive(now)
        if now - self._turn_at > self._stall_seconds:
            # This process was held up, and heartbeats wait in its socket: read them before declaring any peer dead.
            self._tick_at = now + self.limits.heartbeat
        self._turn_at = now
        if self._delivery.gone:
            # Their last messages are taken in first, also while messages of others keep coming.
            more |= self._delivery.report_gone(now, drained=not more, rounds=self._turns_for(PEER_MESSAGES))
        if now >= self._due():
            self.broker.tick(now, self._backlog.read_until)
            more = True
        if now >= self._alarms.due:
            self._alarms.run(now)
            for identity in self.connections.take_to_probe():
                self.broker.probe(identity, now)
            more = True
        if more or self._told or self.connections.ended:
            more |= self._end_turn(now)
        if self._stops:
            more |= self._stop(now)
        return more

    def _receive(self, now: float) -> bool:
        """Have the machine take in messages that have arrived.  Return whether there may be more."""
        more = False
        for port in self._sockets.ports.values():
            if port.ready:
                more |= self._receive_at(port, now)
        self._backlog.turn(now, turns=self._turns_for(1) if more else 0)
        return more

    def _receive_at(self, port: Port, now: float) -> bool:
        """Have the machine take in messages that have arrived at a port.  Return whether there may be more."""
        connections = self.connections
        for _ in range(MAX_TURN_MESSAGES):
            message = port.receive()
            if message is None:
                port.ready = False
                self._told |= port.drained(now)
                return False
            if connections.replaced:  # before the first message of others with their routing ids is taken in
                for identity in connections.take_replaced():
                    self._delivery.replaced(identity, now)
            port.deliver(message, now)
            self._told = True
        return True

    def _turns_for(self, messages: int) -> int:
        """Return the number of turns in which so many messages of each peer are taken in: sockets give peers turns."""
        peers = self.connections.open + len(self.broker.directory.workers) + 1  # workers may be inproc
        return peers * messages // MAX_TURN_MESSAGES + 1

    def _end_turn(self, now: float) -> bool:
        """End the machine's turn, and carry it out.  Return whether there may be more to do because of that."""
        if self.connections.ended:
            for identity in self.connections.take_ended():
                self._delivery.note_gone(identity, self.broker.turn)
        messages = self.broker.take_messages()
        self._told = bool(messages) and self._delivery.send(messages, self.broker.turn - 1, now)
        events = self.broker.take_events()
        for event in events:
            self._act(event, now)
            self._told = True
        # Sending makes libzmq notice new messages too, which the poll then does not report.
        return bool(messages or events)

    def _act(self, event: Event, now: float) -> None:
        if isinstance(event, WorkerForgotten):
            self._delivery.discard(event.route, event.turn)
        elif isinstance(event, CloseLink):
            if event.identity in self._sockets.ports:
                self._delivery.outbox.forget(event.identity)
                self._sockets.remove(self._sockets.ports[event.identity])
        elif isinstance(event, OpenLink):
            port = self._links.open(event.identity)
            if isinstance(port, str):
                self.broker.link_failed(event.identity, port, now)
            else:
                self.add_port(port)
                self.broker.link_opened(event.identity, now, port.role)

    def _due(self) -> float:
        """Return when the machine has something to do; inf if never."""
        due = self.broker.deadline()
        return math.inf if due is None else max(due, self._tick_at)

    def _wait(self, now: float) -> int | None:
        """Return how long to wait for messages, in milliseconds; None for no limit."""
        due = self._due()
        # At most one interval, so that a longer sleep is recognised as a stall.
        until = min(self._alarms.due, due if due == math.inf else min(due, now + self.limits.heartbeat))
        if until == math.inf:
            return None
        return math.ceil(1000 * min(max(until - now, 0.0), MAX_WAIT))  # not negative, and not too long for a C int

    def _woken(self, now: float) -> None:
        self._sockets.waker.clear()
        self.access_control.woken(now)

    # ── requests of other threads ────────────────────────────────────────────────────────────────────────────────────

    def reload(self) -> None:
        """Read the access file again.  If it is invalid, its previous content still applies.  Thread-safe."""
        self.access_control.ask_to_reload()
        self._sockets.waker.wake()

    def turning(self) -> bool:
        """Ask the loop for a sign of life.  Return whether it has turned since the last call.  Thread-safe."""
        return self._sockets.waker.answered()

    def stop(self) -> None:
        """Drain and stop: accept no requests, finish those in flight.  A second call stops immediately.
        Thread-safe."""
        self._stops += 1
        self._sockets.waker.wake()

    @property
    def forced(self) -> bool:
        """Whether `stop` was called more than once."""
        return self._stops > 1

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stop(self, now: float) -> bool:
        """Drain, and close once that is done or its time is up.  Return whether there may be more to do."""
        registry, drained = self.broker.registry, self.broker.drained and not self._delivery.outbox
        if self._drain_until is None:
            limit = self._settings.drain_timeout
            self._drain_until = now + limit
            self._ending.set(self._drain_until - min(CLOSING_SHARE * limit, MAX_CLOSING))
            log.info(
                "draining: no new requests; %d running and %d waiting have %g s to finish; stop again to exit "
                "immediately",
                registry.running, registry.queued, limit,
            )  # fmt: skip
            self.broker.drain(now)
            self._end_turn(now)
            return True
        if self._closing or not (self.forced or drained or now >= self._ending.due):
            return False
        self._closing = True
        self._ending.set(self._drain_until)
        self.cut_off = not drained
        if registry.running or registry.queued:
            log.warning(
                "stopped with %d requests running and %d waiting: gave them up", registry.running, registry.queued
            )
        self.broker.close(now)
        self._end_turn(now)
        return True

    def _is_over(self, now: float) -> bool:
        """Return whether everything is sent, or there is no more time."""
        if not self._closing or self._drain_until is None:
            return False
        if self.broker.closed and not self._delivery.outbox:
            return True
        if not (self.forced or now >= self._drain_until):
            return False
        self.cut_off = True
        return True

    def close(self) -> None:
        """Close the sockets.  Idempotent."""
        self._sockets.close()
        self.access_control.close()
        if self._own_context:
            self._context.term()


def _check(binds: Sequence[str], settings: ServerSettings, access: Access | None) -> None:
    """Raise if a setting is invalid, or other machines could reach a broker without access control."""
    name = settings.name or default_name(binds)
    if not valid_name(name):
        raise SettingError(f"name is {name!r}: it must be printable, without spaces, and at most 64 bytes long")
    if access is None and not settings.insecure:
        for endpoint in (*binds, *(endpoint for endpoint, _ in (*settings.pirates, *settings.pirate_workers))):
            check_local(endpoint)


def default_name(binds: Sequence[str]) -> str:
    """Return the name of a broker that was given none: the host's name, and the first port that it listens on.

    Of a long host name, it has the end, by which those that a program has made up differ.
    """
    end = f"-{os.getpid()}"
    for endpoint in binds:
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp://") and port.isdigit():
            end = f":{port}"
            break
    return f"{socket.gethostname()[len(end) - MAX_BROKER_NAME :]}{end}"


def _with_connections(limits: Limits) -> Limits:
    """Return `limits` with the defaults of the maximum numbers of connections."""
    room = default_max_connections()
    maximum = limits.max_connections or room
    if maximum > room:
        text = "max_connections is %d, but the limit of open files leaves room for %d: raise it (ulimit -n)"
        log.warning(text, maximum, room)
    share = limits.max_connections_per_address or max(1, maximum // 2)
    return replace(limits, max_connections=maximum, max_connections_per_address=share)
