"""The broker on its sockets: a loop that feeds the machine with what arrives, and does what it says.

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

from ..access import Access
from ..defaults import DEFAULT_ENDPOINT
from ..errors import SettingError
from ..limits import Limits
from ..transport.descriptors import check_descriptors
from ..transport.multipart import receive
from ..transport.sockets import check_local
from ..wire import service_name
from .backlog import Backlog
from .connections import SPARE_FILES, default_max_connections
from .delivery import Delivery
from .door import Door
from .events import CloseLink, Event, OpenLink, WorkerForgotten
from .link_ports import LinkPorts, LinkTo
from .links import MAX_BROKER_NAME, valid_name
from .machine import Broker
from .ports import PiratePort, Port, RouterPort
from .sockets import Sockets

DEFAULT_DRAIN: Final = 10.0
"""Seconds."""
DEFAULT_IPC_MODE: Final = 0o600
MAX_TURN_MESSAGES: Final = 100
"""Maximum number of messages taken in at one socket before the replies are sent."""
DUE_INTERVAL: Final = 0.001
"""Seconds between two checks for what is due while messages keep coming."""
MAX_WAIT: Final = 3600.0
"""The longest that the loop sleeps, in seconds."""
MONITOR_INTERVAL: Final = 0.01
"""Seconds between two checks for ended connections while messages keep coming."""
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
        self._close_at = math.inf
        """When the broker gives up the requests that have not ended."""
        self._closing = False
        self._turn_at = self._due_at = self._tick_at = self._look_at = self.broker.started
        """When the last turn began, and when the next check for what is due, the machine's next tick, and the next look
        at the monitors, may be."""
        self._backlog = Backlog(self.broker.started)
        check_descriptors(SPARE_FILES)
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        main = RouterPort(self._context, self.limits, prefix=b"", main=None, logger=log)
        self._sockets = Sockets(main)
        self._delivery = Delivery(self._sockets, self.limits)
        self.door = Door(self.broker, self._sockets)
        self.connections = main.connections
        self.broker.stats.connections = self.connections.counts
        try:
            self.door.open(access, self._context)
            self.endpoints = [main.bind(endpoint, settings.ipc_mode) for endpoint in binds]
            self.pirate_endpoints = [self._open_pirate(*each) for each in settings.pirates]
            self.pirate_worker_endpoints = [self._open_pirate(*each, workers=True) for each in settings.pirate_workers]
            self._links = LinkPorts(self.broker, settings.links, self.door, self._context)
        except BaseException:
            self.close()
            raise

    def _open_pirate(self, endpoint: str, service: str | bytes, *, workers: bool = False) -> str:
        """Listen for clients of `service` that have no header, and their workers, or only for these.

        Return the actual endpoint.
        """
        name = service_name(service)
        port = PiratePort(self.broker, name, self._sockets.main, self._context, log, workers=workers)
        self.add_port(port)
        if self.door.gate is not None:
            port.protect(self.door.gate)
        return port.bind(endpoint, self._settings.ipc_mode)

    def add_port(self, port: Port) -> None:
        """Serve the peers at `port` too."""
        self._sockets.add(port)
        self.door.admit_to(port)

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
                self._sleep(now)
            elif now >= self._look_at:
                self._look_at = now + MONITOR_INTERVAL
                self._sockets.look(now)
                self._sockets.waker.clear()
            now = time.monotonic()

    def _turn(self, now: float) -> bool:
        """Tell the machine what has happened, and do what it says.  Return whether there may be more to do."""
        more = self._receive(now)
        if now - self._turn_at > self._stall_seconds:
            # This process was held up, and heartbeats wait in its socket: read them before declaring anybody dead.
            self._tick_at = now + self.limits.heartbeat
        self._turn_at = now
        if self._delivery.gone:
            more |= self._report_lost(now, drained=not more)
        if now >= self._due_at:
            more |= self._do_due(now)
        more |= self._end_turn(now)
        if self._stops:
            more |= self._stop(now)
        return more

    def _do_due(self, now: float) -> bool:
        """Do what is due.  Return whether there may be more to do."""
        self._due_at = now + DUE_INTERVAL
        more = False
        deadline = self._deadline()
        if deadline is not None and deadline <= now:
            self.broker.tick(now, self._backlog.heard)
            more = True
        more |= self._tend(now)
        more |= self.door.tend(now)
        return self._retry(now) or more

    def _receive(self, now: float) -> bool:
        """Have the machine take in messages that have arrived.  Return whether there may be more."""
        main, broker, take = self._sockets.main, self.broker, receive
        socket, connections, users = main.socket, main.connections, self.door.users
        role = broker.roles.everyone
        more = True
        for _ in range(MAX_TURN_MESSAGES):
            message = take(socket, True, connections)
            if message is None:
                more = False
                break
            if connections.replaced:
                self._report_replaced(main, now)
            if users is not None:
                role = users.get(connections.user, broker.roles.nobody)
            broker.receive(message, now, role)
        for port in self._sockets.ready_ports(now):
            more |= self._receive_at(port, now)
        self._backlog.turn(now, left=more, turns=self._turns_for(1))
        return more

    def _receive_at(self, port: Port, now: float) -> bool:
        """Have the machine take in messages that have arrived at a port.  Return whether there may be more."""
        for _ in range(MAX_TURN_MESSAGES):
            message = port.receive()
            if message is None:
                port.ready = False
                return False
            self._report_replaced(port, now)
            port.deliver(message, now)
        return True

    def _turns_for(self, messages: int) -> int:
        """Return the number of turns in which so many messages of each peer are taken in: sockets give peers turns."""
        peers = self.connections.totals.open + len(self.broker.directory.workers) + 1  # workers may be inproc
        return peers * messages // MAX_TURN_MESSAGES + 1

    def _report_replaced(self, port: Port, now: float) -> None:
        """Report peers as gone, before the first message of others with their routing ids is taken in."""
        for identity in port.take_replaced():
            self.broker.replaced(identity, self._delivery.forget(identity, self.broker.turn), now)

    def _report_lost(self, now: float, *, drained: bool) -> bool:
        """Report peers that are gone, once what they sent before has been taken in.  Return whether there were any."""
        # What they sent before they left is taken in first, also while messages of others keep coming.
        lost = self._delivery.take_lost(drained=drained, rounds=self._turns_for(PEER_MESSAGES))
        for identity, turn in lost:
            self.broker.unreachable(identity, turn, now)
        return bool(lost)

    def _tend(self, now: float) -> bool:
        """Look after connections: probe peers that may be gone, and report links whose connections have ended.

        Return whether there may be more to do.
        """
        more = False
        for identity in self._sockets.to_probe(now):
            self.broker.probe(identity, now)
            more = True
        for identity, why in self._links.ended(self._sockets.ports, now):
            self.broker.link_failed(identity, why, now)
            more = True
        return more

    def _end_turn(self, now: float) -> bool:
        """End the machine's turn, and do what it says.  Return whether there may be more to do because of that."""
        for identity in self._sockets.take_ended():
            self._delivery.note_gone(identity, self.broker.turn)
        messages = self.broker.take_messages()
        if messages:
            for identity in self._delivery.send(messages, self.broker.turn - 1):
                self.broker.gone(identity, now)
        events = self.broker.take_events()
        for event in events:
            self._act(event, now)
        # Sending makes libzmq notice new messages too, which the poll then does not report.
        return bool(messages or events)

    def _retry(self, now: float) -> bool:
        """Send what slow peers accept, and tell the machine which are slow.  Return whether there may be more to do."""
        if not self._delivery.retry(now):
            return False
        for identity in self._delivery.newly_congested:
            self.broker.congested(identity)
        for identity in self._delivery.relieved:
            self.broker.relieved(identity, now)
        return True

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

    def _deadline(self) -> float | None:
        deadline = self.broker.deadline()
        return None if deadline is None else max(deadline, self._tick_at)

    def _wait(self, now: float) -> int | None:
        """Return how long to wait for messages, in milliseconds; None for no limit."""
        due = self._deadline()
        # At most one interval, so that a longer sleep is recognised as a stall.
        until = math.inf if due is None else now + self.limits.heartbeat
        stop = self._drain_until if self._closing else self._close_at
        for each in (due, stop, self._delivery.deadline(), self.door.deadline(), self._sockets.deadline()):
            if each is not None and each < until:
                until = each
        if until == math.inf:
            return None
        wait = max(until, self._due_at) - now
        return math.ceil(1000 * min(max(wait, 0.0), MAX_WAIT))  # not negative, and not too long for a C int

    def _sleep(self, now: float) -> None:
        if self._sockets.wait(self._wait(now)):
            self._sockets.look(time.monotonic())
            self._links.look_at_once()
        if not self._sockets.only_messages:
            self._due_at = now

    # ── what other threads ask for ───────────────────────────────────────────────────────────────────────────────────

    def reload(self) -> None:
        """Read the access file again.  If it is invalid, what it said before still applies.  Thread-safe."""
        self.door.ask_to_reload()
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
            self._drain_until, self._close_at = now + limit, now + limit - min(CLOSING_SHARE * limit, MAX_CLOSING)
            log.info(
                "draining: no new requests; %d running and %d waiting have %g s to finish; stop again to exit "
                "immediately",
                registry.running, registry.queued, limit,
            )  # fmt: skip
            self.broker.drain(now)
            self._end_turn(now)
            return True
        if self._closing or not (self.forced or drained or now >= self._close_at):
            return False
        self._closing = True
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
        self.door.close()
        if self._own_context:
            self._context.term()


def _check(binds: Sequence[str], settings: ServerSettings, access: Access | None) -> None:
    """Raise if a setting is invalid, or other machines could reach a broker that admits everybody."""
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
