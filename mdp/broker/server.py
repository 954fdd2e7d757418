"""The broker on its sockets: a loop that receives messages, feeds the machine, and sends what it returns.

`Server` runs in the thread that calls `run`; `stop` may be called from any thread, or from a signal handler.
"""

import logging
import math
import os
import select
import signal
import socket as sockets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from errno import EAGAIN
from types import FrameType, TracebackType
from typing import Final, Self

import zmq

from ..access import Access
from ..defaults import DEFAULT_ENDPOINT
from ..errors import AccessError, SettingError
from ..limits import Limits
from ..transport.multipart import milliseconds, receive, send
from ..transport.sockets import check_local
from ..wire import Message, service_name
from .backlog import Backlog
from .connections import default_max_connections
from .link_ports import LinkPorts, LinkTo
from .links import valid_name
from .machine import Broker
from .outbox import Outbox
from .ports import NO_MONITOR, PREFIX_BYTES, PiratePort, Port, RouterPort
from .roles import Role
from .zap import Gate

DEFAULT_DRAIN: Final = 10.0
"""Seconds."""
DEFAULT_IPC_MODE: Final = 0o600
MAX_TURN_MESSAGES: Final = 100
"""Maximum number of messages taken in before the replies are sent."""
MONITOR_INTERVAL: Final = 0.01
"""Seconds between two checks for ended connections while messages keep coming."""
PORT_INTERVAL: Final = 0.0005
"""Seconds between two checks for messages at ports while messages keep coming at the main ROUTER."""
PEER_MESSAGES: Final = 1000
"""Number of messages of one peer that may wait at a socket: libzmq's default RCVHWM."""
STALL_INTERVALS: Final = 2
"""A turn that begins this many heartbeat intervals after the last one was held up: the loop sleeps for one at most."""
OUTBOX_RETRY: Final = 0.01
"""Seconds until the next attempt to send to a slow peer."""

log = logging.getLogger("zmdp.broker")


class Server:
    """A broker that listens on one or more endpoints.

    `binds` are ZeroMQ endpoints (`tcp://HOST:PORT`, `ipc://PATH`, `inproc://NAME`).  TCP port `*` means any free port;
    `endpoints` has the actual one.  An `inproc://` endpoint can be reached only through the same `context`.
    `pirates` are further endpoints, each with the service that peers without a protocol of their own call or offer
    there (docs/pirates.md); `pirate_endpoints` has the actual ones.  `drain_timeout` is how long requests in flight may
    take after `stop`, in seconds.

    `links` are other brokers, with which it exchanges requests (docs/brokers.md); `name` is its own name among them, by
    default the host's name and the first port.  Requests that take longer than `slow` seconds are logged at their end.

    With `access`, only the keys that it lists may connect, except through `inproc://`, which has no keys.  Without it,
    an endpoint that other machines can reach is refused unless `insecure` is true.  `ipc_mode` has the permissions of
    the files of `ipc://` endpoints.

    Raises `BindError` if it cannot listen, or `SettingError` if a service name is invalid; nothing stays open then.
    """

    def __init__(
        self,
        binds: Sequence[str] = (DEFAULT_ENDPOINT,),
        *,
        pirates: Sequence[tuple[str, str | bytes]] = (),
        limits: Limits | None = None,
        drain_timeout: float = DEFAULT_DRAIN,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        access: Access | None = None,
        insecure: bool = False,
        ipc_mode: int = DEFAULT_IPC_MODE,
        name: str = "",
        links: Sequence[LinkTo] = (),
        slow: float | None = None,
    ) -> None:
        name = name or default_name(binds)
        if not valid_name(name):
            raise SettingError(f"name is {name!r}: it must be printable, without spaces, and at most 64 bytes long")
        if access is None and not insecure:
            for endpoint in (*binds, *(endpoint for endpoint, _ in pirates)):
                check_local(endpoint)
        self.limits = _with_connections(limits or Limits())
        self.broker = Broker(self.limits, now=time.monotonic(), name=name, logger=log, slow=slow)
        self._drain_timeout = drain_timeout
        self.cut_off = False
        """Whether it stopped before it was drained."""
        self._ports: dict[bytes, Port] = {}
        """The sockets beside the main ROUTER, by prefix."""
        self._watched: list[Port] = []
        """Those of them that probe peers."""
        self._check_at = 0.0
        """When to find out again which ports are ready, while messages keep coming."""
        self._outbox = Outbox(self.limits, self._ports)
        self._links: LinkPorts | None = None
        self._stops = 0
        self._reload = False
        self._tick_at = 0.0
        self._backlog = Backlog(time.monotonic())
        self._wake_in, self._wake_out = _pair()
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._closed = False
        self._gone: dict[bytes, tuple[int, int]] = {}
        """Peers that are no longer connected, the first turn whose messages they did not receive, and for how many more
        turns to wait for what they sent before."""
        self.on_reload: Callable[[Access], None] | None = None
        """Called in the loop's thread after the access file was read again."""
        self.gate: Gate | None = None
        """Decides who may connect; None without `access`."""
        self._users: dict[bytes, Role] | None = None
        """The role of each public key; None without `access`."""
        self._main = RouterPort(
            self._context,
            self.limits,
            prefix=b"",
            on_end=self._note_ended,
            on_replace=self._replaced,
            main=None,
            logger=log,
        )
        self._main.unsent = self._outbox.unsent
        self._socket = self._main.socket
        self.connections = self._main.connections
        self.broker.stats.connections = self.connections.counts
        self._poller = _Poller(self._main, self._wake_out)
        try:
            if access is not None:
                self._protect(access)
            self.endpoints = [self._main.bind(endpoint, ipc_mode) for endpoint in binds]
            self.pirate_endpoints = [
                self._open_pirate(endpoint, service_name(service), ipc_mode) for endpoint, service in pirates
            ]
            if links:
                self._add_links(links, access)
        except BaseException:
            self.close()
            raise

    def _protect(self, access: Access) -> None:
        self.gate = Gate(self._context, access, log)
        self.gate.counts = self.connections.counts
        self._poller.add_gate(self.gate.descriptor)
        self._main.protect(self.gate)
        self._grant(access, time.monotonic())

    def _add_links(self, links: Sequence[LinkTo], access: Access | None) -> None:
        self._links = LinkPorts(self.broker, links, self._context, access, self._users)

    def _open_pirate(self, endpoint: str, service: bytes, ipc_mode: int) -> str:
        """Listen for clients of `service` that have no header, and their workers; return the actual endpoint."""
        port = PiratePort(self.broker, service, self._main, self._context, log)
        self.add_port(port)
        if self.gate is not None:
            port.protect(self.gate)
        return port.bind(endpoint, ipc_mode)

    def add_port(self, port: Port) -> None:
        """Serve the peers at `port` too."""
        self._ports[port.prefix] = port
        self._watched = [each for each in self._ports.values() if each.probes]
        self._poller.add(port)
        if self.gate is not None and self._users is not None:
            port.grant(self.gate.access, self._users)

    def remove_port(self, port: Port) -> None:
        """Close a port, whose peers the machine knows to be gone."""
        del self._ports[port.prefix]
        self._poller.remove(port)
        port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve until `stop` is called and requests in flight have finished, then send DISCONNECT to all workers."""
        drain_until = None
        now = time.monotonic()
        flush_at = look_at = now
        while True:
            before, now = now, time.monotonic()
            more = self._take_turn(now)
            if now - before > STALL_INTERVALS * self.limits.heartbeat:
                # This process was held up, and heartbeats wait in its socket: read them before declaring anybody dead.
                self._tick_at = now + self.limits.heartbeat
            if self._gone and self._lose_gone(now, drained=not more):
                more = True
            deadline = self._deadline()
            if deadline is not None and deadline <= now:
                self._tick(now)
                more = True
            if self._tend(now):
                more = True
            if self._admit(now):
                more = True
            if self._outbox and now >= flush_at:
                self._flush_outbox()
                flush_at, more = now + OUTBOX_RETRY, True
            if self._stops:
                if drain_until is None:
                    drain_until = now + self._drain_timeout
                    self._start_drain(now)
                    more = True  # sending may have hidden from the descriptor that something has arrived
                drained = self.broker.drained and not self._outbox
                if self.forced or drained or now >= drain_until:
                    self.cut_off = not drained
                    break
            if not more and not self._gone:
                self._sleep(self._wait(now, drain_until))
            elif now >= look_at:
                look_at = now + MONITOR_INTERVAL
                self._look(now)
                self._clear_wake()
        self._finish(now)

    def _take_turn(self, now: float) -> bool:
        """Take in messages that have arrived, and send the replies.  Return whether there may be more."""
        socket, broker, sources, users = self._socket, self.broker, self.connections, self._users
        role = broker.roles.everyone if self.gate is None else broker.roles.nobody
        take = receive  # in compiled code, looking up a module's name takes as long as calling a function
        more = True
        slow = [peer for peer in self._outbox.peers if broker.registry.workers_at(peer)] if self._outbox else []
        for _ in range(MAX_TURN_MESSAGES):
            message = take(socket, True, sources)
            if message is None:
                more = False
                break
            try:
                if users is not None:
                    role = users.get(sources.user, broker.roles.nobody)
                broker.take(message, now, role)
            except Exception:  # noqa: BLE001 - a bug: one message must not end everybody's broker
                broker.failed(now)
        if self._ports and self._take_in_at_ports(now):
            more = True
        self._backlog.turn(now, left=more, turns=self._turns_for(1))
        try:
            messages = broker.flush(now)
        except Exception:  # noqa: BLE001 - as above; what was not sent is sent at the end of the next turn
            broker.failed(now)
            return True
        for peer in slow:
            if not broker.registry.workers_at(peer):
                self._outbox.discard(peer)  # C16: nothing is sent to a worker after its DISCONNECT
        if messages:
            self._send_all(messages, now)
            return True  # sending makes libzmq notice new messages too, which the poll then does not report
        return more

    def _turns_for(self, messages: int) -> int:
        """Return the number of turns in which so many messages of each peer are taken in: sockets give peers turns."""
        peers = self.connections.totals.open + len(self.broker.registry.workers) + 1  # workers may be inproc
        return peers * messages // MAX_TURN_MESSAGES + 1

    def _take_in_at_ports(self, now: float) -> bool:
        """Take in the messages that have arrived at ports.  Return whether there may be more."""
        if now >= self._check_at:
            self._check_at = now + PORT_INTERVAL
            self._poller.check()
        more = False
        for port in list(self._ports.values()):
            if not port.ready:
                continue
            for _ in range(MAX_TURN_MESSAGES):
                message = port.receive()
                if message is None:
                    port.ready = False
                    break
                try:
                    port.deliver(message, now)
                except Exception:  # noqa: BLE001 - as for the main ROUTER
                    self.broker.failed(now)
            else:
                more = True
        return more

    def _tick(self, now: float) -> None:
        try:
            messages = self.broker.tick(now, self._backlog.heard)
        except Exception:  # noqa: BLE001 - a bug: it must not end the broker
            self.broker.failed(now)
            self._tick_at = now + self.limits.heartbeat  # the deadline may not have moved
            return
        self._send_all(messages, now)

    def _deadline(self) -> float | None:
        deadline = self.broker.deadline()
        return None if deadline is None else max(deadline, self._tick_at)

    def _wait(self, now: float, drain_until: float | None) -> int | None:
        """Return how long to wait for messages, in milliseconds; None for no limit."""
        deadline = self._deadline()
        # At most one interval, so that a longer sleep is recognised as a stall.
        until = math.inf if deadline is None else now + self.limits.heartbeat
        retry = now + OUTBOX_RETRY if self._outbox else None
        refusals = None if self.gate is None else self.gate.deadline()
        for each in (deadline, drain_until, retry, refusals, self.connections.deadline()):
            if each is not None and each < until:
                until = each
        for port in self._watched:
            due = port.deadline()
            if due is not None and due < until:
                until = due
        return None if until == math.inf else milliseconds(until - now)

    def _flush_outbox(self) -> None:
        for identity, turn in self._outbox.flush(self._try):
            self._note_gone(identity, turn)

    def _try(self, message: Message) -> int:
        return self._port_of(message[0]).send(message)

    def _port_of(self, identity: bytes) -> Port:
        """Return the socket at which a peer is connected."""
        return self._ports.get(identity[:PREFIX_BYTES], self._main) if self._ports else self._main

    def _look(self, now: float) -> None:
        """Read what the monitors report."""
        self.connections.look(now)
        for port in list(self._ports.values()):
            port.look(now)

    def _tend(self, now: float) -> bool:
        """Look after connections: send HEARTBEATs to peers that may be gone, open and close those of links.

        Return whether messages may have arrived because of that.
        """
        more = self._probe_at(self._main, now)
        for port in self._watched:
            more |= self._probe_at(port, now) or port.ready
        if self._links is not None and self._links.is_due(now):
            more |= self._tend_links(self._links, now)
        return more

    def _tend_links(self, links: LinkPorts, now: float) -> bool:
        """Open and close connections of links as the machine asks for.  Return whether anything was done."""
        for identity, why in links.ended(self._ports):
            self._send_all(self.broker.link_failed(identity, why, now), now)
        closed, opened = self.broker.links_to_close(), self.broker.links_due(now)
        for identity in closed:
            port = self._ports.get(identity)
            if port is not None:
                self._outbox.drop(identity)
                self.remove_port(port)
        for identity in opened:
            link = links.open(identity)
            if isinstance(link, str):
                self._send_all(self.broker.link_failed(identity, link, now), now)
            else:
                self.add_port(link)
                self._send_all(self.broker.link_opened(identity, now, link.role), now)
        return bool(closed or opened)

    def _probe_at(self, port: Port, now: float) -> bool:
        identities = port.to_probe(now)
        for identity in identities:
            self._send_all(self.broker.probe(identity, now), now)
        return bool(identities)

    def _send_all(self, messages: list[Message], now: float) -> None:
        """Send the messages of the broker's last turn without blocking, and drop peers that do not read theirs."""
        socket, outbox, put, chosen = self._socket, self._outbox, send, self.connections.chosen
        unsent, ports = outbox.unsent, self._ports
        turn = self.broker.turn - 1
        dropped: list[bytes] = []
        firsts: dict[bytes, Message] = {}
        """The first message for each peer, once that is needed."""
        for message in messages:
            if dropped and message[0] in dropped:
                continue  # nothing follows a lost message, so that no stream has a gap
            if outbox and message[0] in outbox:
                errno = EAGAIN
            elif (chosen and message[0] in chosen) or (ports and message[0][:PREFIX_BYTES] in ports):
                errno = self._try(message)
            else:
                errno = put(socket, message, unsent)
            if not errno:
                continue
            if errno != EAGAIN:
                if not firsts:
                    firsts = {each[0]: each for each in reversed(messages)}
                # It may have died of an earlier message of this turn, so what it was sent counts as received (C17).
                self._note_gone(message[0], turn + (firsts[message[0]] is not message))
            elif not outbox.add(message, turn):
                outbox.drop(message[0])
                dropped.append(message[0])
        while (slowest := outbox.overfull()) is not None:
            outbox.drop(slowest)
            dropped.append(slowest)
        for identity in dropped:
            log.warning("dropped a peer that does not read its messages")
            # Only with the connection does libzmq discard what it holds.
            self._port_of(identity).end(identity)
            self._send_all(self.broker.gone(identity, now), now)

    def _note_gone(self, identity: bytes, turn: int) -> None:
        """Remember that a peer was not connected to receive a message of `turn`."""
        # What it sent before it left is taken in first, also while messages of others keep coming.
        first, turns = self._gone.get(identity, (turn, self._turns_for(PEER_MESSAGES)))
        self._gone[identity] = min(first, turn), turns

    def _lose_gone(self, now: float, *, drained: bool) -> bool:
        """Report peers that are gone to the machine, once everything that they sent before has been taken in."""
        lost = []
        for identity, (turn, turns) in self._gone.items():
            self._gone[identity] = turn, turns - 1
            if drained or turns == 0:
                lost.append((identity, turn))
        for identity, turn in lost:
            self._lose(identity, turn, now)
        return bool(lost)

    def _lose(self, identity: bytes, turn: int, now: float) -> None:
        """Report to the machine that a peer is gone, and has received nothing since `turn`."""
        self._gone.pop(identity, None)
        self._port_of(identity).forget(identity)
        self._outbox.discard(identity)
        self._send_all(self.broker.unreachable(identity, turn, now), now)

    def _note_ended(self, identity: bytes, _: float) -> None:
        """Remember that a peer is gone, though nothing may ever be sent to it."""
        self._note_gone(identity, self.broker.turn)

    def _replaced(self, identity: bytes, now: float) -> None:
        """Report to the machine that a peer is gone, before the first message of another one with its routing id."""
        turn, _ = self._gone.get(identity, (self.broker.turn, 0))
        self._lose(identity, turn, now)

    # ── who may connect ──────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, now: float) -> bool:
        """Reload the access file if that is due, and answer handshakes.  Return whether there may be more to do."""
        reloaded = self._reload
        if reloaded:
            self._reload_access(now)
        return (self.gate is not None and self.gate.answer(now)) or reloaded

    def reload(self) -> None:
        """Read the access file again.  If it is invalid, what it said before still applies.  Thread-safe."""
        self._reload = True
        self._wake()

    def _grant(self, access: Access, now: float) -> list[Message]:
        """Give the machine the roles of `access`; return what to send."""
        messages = self.broker.grant(access.roles, now)
        self._users = {key: self.broker.roles.named(role) for key, role in access.keys.items()}
        self._main.grant(access, self._users)
        for port in self._ports.values():
            port.grant(access, self._users)
        if self._links is not None:
            self._links.grant(self._users)
        return messages

    def _reload_access(self, now: float) -> None:
        self._reload = False
        if self.gate is None:
            log.info("nothing to reload: the broker was started without --access")
            return
        before = self.gate.access
        try:
            access = before.read_again()
        except AccessError as error:
            log.error("reloaded nothing, the previous state of the access file still applies: %s", error)
            return
        if access.secret_key != before.secret_key:
            log.warning("the broker's own key has changed: restart the broker to use it")
        self.gate.access = access
        lost = before.lost_in(access)
        self._main.end_users(lost)
        for port in self._ports.values():
            port.end_users(lost)
        self._send_all(self._grant(access, now), now)
        if self.on_reload is not None:
            self.on_reload(access)
        log.info("reloaded %s: %d roles, %d keys", access.path, len(access.roles), len(access.keys))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Drain and stop: accept no requests, finish those in flight.  A second call stops immediately.
        Thread-safe."""
        self._stops += 1
        self._wake()

    @property
    def forced(self) -> bool:
        """Whether `stop` was called more than once."""
        return self._stops > 1

    def _wake(self) -> None:
        with suppress(OSError):  # a wake-up is under way already, or the loop has ended
            self._wake_in.send(b"!")

    def _sleep(self, timeout: int | None) -> None:
        if self._poller.wait(timeout):
            self._look(time.monotonic())
            if self._links is not None:
                self._links.look_at_once()
        if self._poller.woken:
            self._clear_wake()

    def _clear_wake(self) -> None:
        # A signal's handler runs here at the latest: only interpreted code, such as `suppress`, checks for signals.
        with suppress(BlockingIOError):
            self._wake_out.recv(4096)

    def _start_drain(self, now: float) -> None:
        registry = self.broker.registry
        log.info(
            "draining: no new requests; %d running and %d waiting have %g s to finish; stop again to exit immediately",
            registry.running, registry.queued, self._drain_timeout,
        )  # fmt: skip
        self._send_all(self.broker.drain(now), now)

    def _finish(self, now: float) -> None:
        registry = self.broker.registry
        if registry.running or registry.queued:
            log.warning(
                "stopped with %d requests running and %d waiting: gave them up", registry.running, registry.queued
            )
        self._send_all(self.broker.close(now), now)

    def close(self) -> None:
        """Close the sockets.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        for port in self._ports.values():
            port.close()
        self._main.close()
        self._poller.close()
        if self.gate is not None:
            self.gate.close()
        self._wake_in.close()
        self._wake_out.close()
        if self._own_context:
            self._context.term()

    @contextmanager
    def stopped_by(self, *signals: signal.Signals) -> Iterator[None]:
        """Call `stop` on each of `signals` within the block, and `reload` on SIGHUP.  Main thread only."""

        def handle(number: int, frame: FrameType | None) -> None:
            del frame
            if number == signal.SIGHUP:
                self.reload()
            else:
                self.stop()

        before = {each: signal.signal(each, handle) for each in (*signals, signal.SIGHUP)}
        # A signal that arrives just before the loop sleeps would not be noticed until something else happens.
        wakeup = signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for each, handler in before.items():
                signal.signal(each, handler)


class _Poller:
    """Wait for ZeroMQ sockets that have just been drained, a plain socket, monitors, and the gate.

    A ZeroMQ socket's descriptor becomes readable on the next event; `zmq_poll` would check the socket again first.
    """

    def __init__(self, main: RouterPort, other: sockets.socket) -> None:
        self.woken = False
        """Whether the plain socket was readable after the last wait."""
        self._other = other.fileno()
        self._monitor = main.monitor
        self._ports: dict[int, Port] = {}
        """The ports by the descriptors of their sockets."""
        self._ports_poll = select.epoll()
        """The sockets and the monitors of all ports.  However many there are, they are one descriptor to wait for."""
        self._poll = select.poll()
        for descriptor in (self._other, main.descriptor, main.monitor, self._ports_poll.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    def add_gate(self, descriptor: int) -> None:
        """Wait for the gate too."""
        self._poll.register(descriptor, select.POLLIN)

    def add(self, port: Port) -> None:
        """Wait for a port too."""
        self._ports[port.descriptor] = port
        self._ports_poll.register(port.descriptor, select.EPOLLIN)
        if port.monitor != NO_MONITOR:
            self._ports_poll.register(port.monitor, select.EPOLLIN)

    def remove(self, port: Port) -> None:
        """Wait for a port no longer; call it before the port is closed."""
        del self._ports[port.descriptor]
        self._ports_poll.unregister(port.descriptor)
        if port.monitor != NO_MONITOR:
            self._ports_poll.unregister(port.monitor)

    def check(self) -> bool:
        """Find out which ports are ready, without waiting.  Return whether one of their monitors has events."""
        has_events = False
        for descriptor, _ in self._ports_poll.poll(0):
            port = self._ports.get(descriptor)
            if port is None:
                has_events = True
            else:
                port.ready = True
        return has_events

    def wait(self, timeout: int | None) -> bool:
        """Wait at most `timeout` milliseconds.  Return whether a monitor has events."""
        has_events = self.woken = False
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor == self._monitor:
                has_events = True
            elif descriptor == self._other:
                self.woken = True
            elif descriptor == self._ports_poll.fileno():
                has_events |= self.check()
        return has_events

    def close(self) -> None:
        """Free the descriptor."""
        self._ports_poll.close()


def _pair() -> tuple[sockets.socket, sockets.socket]:
    """Return two sockets that are connected to each other and do not block."""
    pair = sockets.socketpair()
    for each in pair:
        each.setblocking(False)
    return pair


def default_name(binds: Sequence[str]) -> str:
    """Return the name of a broker that was given none: the host's name, and the first port that it listens on."""
    host = sockets.gethostname()
    for endpoint in binds:
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp://") and port.isdigit():
            return f"{host}:{port}"
    return f"{host}-{os.getpid()}"


def _with_connections(limits: Limits) -> Limits:
    """Return `limits` with the defaults of the maximum numbers of connections."""
    room = default_max_connections()
    maximum = limits.max_connections or room
    if maximum > room:
        text = "max_connections is %d, but the limit of open files leaves room for %d: raise it (ulimit -n)"
        log.warning(text, maximum, room)
    share = limits.max_connections_per_address or max(1, maximum // 2)
    return replace(limits, max_connections=maximum, max_connections_per_address=share)
