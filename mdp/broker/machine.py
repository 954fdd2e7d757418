"""Sans-I/O broker: given messages and the current time, it returns the messages to send.  No socket, no clock.

Its shell reports what happens: `receive` takes in a message, with the role of its connection's key if there is access
control (`roles`); `tick` does what is due, and `deadline` returns when that is; `disconnected` and `replaced` report
peers that are lost, `give_up` one that missed messages.  None of these sends anything.  `take_messages` ends the
*turn*: it dispatches the requests that have arrived, and returns the messages to send, with everything for one peer in
one message if the peer speaks X1.  `take_events` returns the other tasks of the shell.  Messages are lists of frames
that begin with the peer's routing id.  Rules are cited by their conformance numbers (C11 to C45).

Brokers may be linked (`LinkDialog`).  A link that this broker opens has an identity of its own (`add_link`); events ask
the shell to open and close its connections.
"""

import logging
import math
import random
import secrets
import traceback
from collections.abc import Iterator, Mapping
from typing import Final

from ...mmi import answers
from .. import wire
from ..limits import Limits
from ..security.access import Permissions
from ..service_limits import ServiceLimits
from ..wire import Message
from .core.admission import Admission
from .core.clients import ClientDialog
from .core.drops import Drop
from .core.endings import Endings
from .core.outgoing import Event
from .core.records import Request, Service
from .core.requests import Requests
from .core.roles import Role
from .core.state import Federation, State
from .core.workers import WorkerDialog
from .federation.link_dialog import LinkDialog
from .operators.orders import Orders
from .operators.watch import Watch

TURN_WORK: Final = 512
"""Requests that end in one turn: together they take a few milliseconds."""


class Broker:
    """One Majordomo broker.

    `name` distinguishes it from the brokers to which it is linked.  `first_address` is the first address of a dispatch,
    for tests; by default it is random, so that a worker's late reply to an earlier broker does not match (C32).
    `turn_work` is how many requests may end in one turn, and how many of those that wait may be dispatched.
    Requests that take longer than `slow` seconds are logged.  Without `federation` there are no links to other brokers.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        now: float,
        name: str = "broker",
        logger: logging.Logger | None = None,
        first_address: int | None = None,
        turn_work: int = TURN_WORK,
        slow: float | None = None,
        federation: bool = True,
    ) -> None:
        self.limits = limits or Limits()
        self.name = name
        self.started = now
        first = secrets.randbits(60) if first_address is None else first_address
        instance = secrets.token_hex(8) if first_address is None else f"{first_address:x}"
        secret = secrets.token_bytes(16) if first_address is None else instance.encode()
        state = self._state = State(self.limits, name, first, logger or logging.getLogger("zmdp.broker"), turn_work)
        self.roles, self.stats = state.roles, state.stats
        self.directory, self.registry = state.directory, state.registry
        rng = random.Random(instance)  # noqa: S311 - jitter, not cryptography
        links = LinkDialog(state, instance, rng) if federation else None
        self.federation: Federation = Federation(state) if links is None else links
        self.watch = Watch(state, self.federation, secret, slow)
        self._requests = Requests(state, self.federation, self.watch)
        self.orders = Orders(state, self.watch, self._requests)
        self.directory.limits = self.orders.limits_of
        admission = Admission(state, self._requests, self._answer)
        self._endings = Endings(state, self._requests)
        self._clients = ClientDialog(state, self.federation, self._requests, self._endings, admission)
        self._workers = WorkerDialog(state, self._requests, self._endings)
        # Tasks, in the order in which they are done when due.
        self._workers.beats.alarm = state.alarms.add(self._workers.tick)
        if links is not None:
            links.join(self._requests, self._endings, admission)
        self.directory.throttling.wakes.alarm = state.alarms.add(self.directory.wake)
        self.registry.expiries.alarm = self._expiring = state.alarms.add(self._endings.expire)
        self._resuming = state.alarms.add(self._resume)
        """Set if a turn has left something for the next one."""
        self._now = now
        """When the shell last told something."""
        self._rests_until = -math.inf
        """When the next `tick` may be due, after one that failed."""
        # Looked at for each message.
        self._opening, self._linked = self.federation.opening, self.federation.linked
        self._announcing = self.federation.announcing
        self._max_message, self._max_frames = self.limits.max_message, self.limits.max_frames

    def _answer(self, request: Request, user: Role, now: float) -> list[bytes]:
        return answers.answer(request.service.name, list(request.body), self, now, user.sees)

    # ── reports of the shell ─────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float, role: Role | None = None) -> None:
        """Take in `message`, which came from the peer whose routing id is its first frame, under that role.

        Without access control there is no role: every peer may do everything.
        """
        self._now = now
        if role is None:
            role = self.roles.everyone
        try:
            if self._opening and message[0] in self._opening:
                self.federation.receive_opening(message, now)
                return
            command = wire.decode_peer(message, self._max_message, self._max_frames)
            if not isinstance(command, wire.Batched):
                self._receive_command(command, role, now)
            elif command.header == wire.CX1:
                self._clients.receive_batch(message, command, role, now)
            elif command.header == wire.WX1:
                self._workers.receive_batch(message, command, role, now)
            else:
                self.federation.receive(message, command, role, now)
        except Exception:  # noqa: BLE001 - a bug: one message must not end the broker
            self._failed(now)

    def receive_pirate(
        self, message: Message, service: bytes, now: float, role: Role | None = None, *, workers: bool = False
    ) -> None:
        """Take in a message without a header, from a port where clients call `service` and workers offer it.

        A port for `workers` only has no clients.
        """
        self._now = now
        try:
            command = wire.decode_pirate(message, service, self._max_message, self._max_frames, workers=workers)
            self._receive_command(command, self.roles.everyone if role is None else role, now)
        except Exception:  # noqa: BLE001 - as above
            self._failed(now)

    def _receive_command(self, command: wire.FromPeer | wire.Invalid, role: Role, now: float) -> None:
        """Take in a message that is one command, as in every dialect but X1."""
        if isinstance(command, wire.Request):
            self._clients.receive(command, role, now)
        else:
            self._workers.receive(command, role, now)

    def tick(self, now: float, read_until: float | None = None) -> None:
        """Do what is due: send heartbeats, lose silent peers, end expired requests, open links.

        All input that had arrived at the time `read_until` has been taken in; by default, all that has arrived yet.  A
        worker is silent only if it was silent until then.
        """
        self._now = now
        self._state.read_until = now if read_until is None else read_until
        try:
            self._tick(now)
        except Exception:  # noqa: BLE001 - a bug, which must not end the broker
            self._failed(now)
            self._rests_until = now + self.limits.heartbeat  # the deadline may not have moved

    def _tick(self, now: float) -> None:
        if self.watch.active:
            self.watch.tidy(now)
        self._state.alarms.run(now)

    def _resume(self, now: float) -> None:
        self._resuming.set(math.inf)
        self._endings.go_on(now)

    def deadline(self) -> float | None:
        """Return when `tick` is due, or None."""
        due = self._state.alarms.due
        return None if due == math.inf else max(due, self._rests_until)

    def disconnected(self, identity: bytes, turn: int, now: float) -> None:
        """Record that the peer with that routing id is no longer connected.

        The peer has received no message that was sent in `turn` or later.
        """
        self._now = now
        self._workers.disconnected(identity, turn)
        self._clients.disconnected(identity)
        self._lose(identity, now)

    def replaced(self, identity: bytes, turn: int, now: float) -> None:
        """Record, before its first message is taken in, that another peer has that routing id from now on (C39).

        The one before has received no message that was sent in `turn` or later.
        """
        self._state.outgoing.discard(identity)
        self.disconnected(identity, turn, now)

    def give_up(self, identity: bytes, now: float) -> None:
        """Treat the peer with that routing id as gone, though it may be connected: messages to it were lost.

        An X1 client would wait for them forever.  So it is no longer answered on this connection: it considers the
        broker dead, reconnects, and resends its outstanding requests.
        """
        self._now = now
        self._clients.give_up(identity, now)
        self._lose(identity, now)

    def _lose(self, identity: bytes, now: float) -> None:
        self.federation.lose(identity, now)
        self._state.congested.pop(identity, None)
        self._clients.lose(identity, now)
        self._workers.lose(identity, now)

    def congested(self, identity: bytes) -> None:
        """Record that messages for that routing id pile up: its clients are told later which requests have ended."""
        self._endings.congested(identity)

    def relieved(self, identity: bytes, now: float) -> None:
        """Record that messages for that routing id do not pile up any longer."""
        self._now = now
        self._endings.relieved(identity, now)

    def probe(self, identity: bytes, now: float) -> None:
        """Send a HEARTBEAT to each peer behind that routing id that can take one, to see whether it is connected."""
        self._now = now
        self.federation.probe(identity)
        self._workers.probe(identity, now)
        self._clients.probe(identity)

    # ── tasks of the shell ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def turn(self) -> int:
        """The number of the current turn."""
        return self._state.turn

    @property
    def work_left(self) -> bool:
        """Whether the last turn has left something for the next one, because it would have taken too long."""
        return self._expiring.due <= self._now or bool(self._endings or self.directory.unsettled)

    def take_messages(self) -> list[Message]:
        """End the turn: dispatch the requests that can be, and return the messages to send."""
        try:
            self._settle(self._now)
        except Exception:  # noqa: BLE001 - a bug, which must not end the broker
            self._failed(self._now)
        if self.directory.unsettled or self._endings:
            self._resuming.set(self._now)
        self._state.end_turn()
        return self._state.outgoing.take()

    def take_events(self) -> list[Event]:
        """Return the other tasks of the shell, to do after it has sent the messages."""
        return self._state.outgoing.take_events()

    def _settle(self, now: float) -> None:
        directory = self.directory
        unsettled: list[Service] = []
        if self.registry.finished:
            self._workers.dismiss_finished(now)
        if directory.unsettled:
            unsettled = directory.take_unsettled()
            for service in unsettled:
                try:
                    if self._state.closing:
                        directory.settled(service)
                        continue
                    if not self._requests.settle(service, now):
                        directory.keep_unsettled(service)
                        continue
                    if self._state.draining and not self._held_back(service):
                        self._workers.dismiss_idle(service, now)
                    directory.settled(service)
                except Exception:  # noqa: BLE001 - a bug, which must not affect other services
                    self._failed(now)
                    directory.keep_unsettled(service)
                    self._rests_until = now + self.limits.heartbeat
        if (unsettled and self._linked) or now >= self._announcing.due:
            self.federation.end_turn(unsettled, now)

    def _failed(self, now: float) -> None:
        """Count and log the current exception, which is a bug in the broker, with its traceback."""
        self.stats.internal_errors += 1
        text = "internal error, please report this bug:\n%s"
        self._state.journal.note(now, logging.ERROR, "internal-error", text, traceback.format_exc())

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────────────

    def grant(self, permissions: Mapping[str, Permissions], now: float) -> None:
        """Replace the permissions of all roles, and disconnect workers that may no longer offer their service.

        Requests that were accepted before go on.
        """
        self._now = now
        self.roles.grant(permissions)
        self._workers.revoke(now)
        self.federation.revoke(now)

    def limit(self, patterns: Mapping[str, ServiceLimits], now: float) -> None:
        """Replace the operator's limits: those of the first pattern that a service's name matches."""
        self._now = now
        self.orders.limit(patterns, now)

    def drain(self, now: float) -> None:
        """Accept no more requests or workers, and tell the peers, which move to another broker.

        Requests already accepted are finished while there are workers.  A worker is told to go once it holds nothing
        and no request waits for its service; if it has no credit, when a HEARTBEAT would be due.
        """
        self._now = now
        self._state.draining = True
        self.federation.drain()
        self._clients.drain()
        for service in list(self.directory.services.values()):
            self.directory.touch(service)

    @property
    def draining(self) -> bool:
        """Whether no more requests are accepted."""
        return self._state.draining

    @property
    def drained(self) -> bool:
        """Whether no worker holds a request.

        While requests wait that workers can take, the workers hold some, unless a limit holds them back.
        """
        if self.registry.running or self.work_left:
            return False
        return not any(self._held_back(service) for service in self.directory.services.values())

    def _held_back(self, service: Service) -> bool:
        """Return whether requests wait that workers could take, if there was no limit."""
        return bool(service.schedule.groups is not None and service.waiting and service.schedule.free)

    def close(self, now: float) -> None:
        """Begin to end all requests, X1 clients' with an ERROR, and send every worker away; `closed` tells when it is
        done."""
        self._now = now
        self._state.closing = True
        self._endings.add(self._closing(), now)

    def _closing(self) -> Iterator[None]:
        yield from self._end_waiting()
        for worker in list(self.directory.workers.values()):
            yield from self._workers.drop_and_dismiss(worker, self._now)
        for held in list(self.federation.held()):
            yield from self._endings.drop_held(held.values())
        yield from self._end_waiting()  # requests that have come back meanwhile
        self.federation.farewell()
        self._state.journal.flush(math.inf)

    def _end_waiting(self) -> Iterator[None]:
        for service in list(self.directory.services.values()):
            yield from self._endings.drop_waiting(service, Drop.CLOSING)

    @property
    def closed(self) -> bool:
        """Whether all clients have been told that their requests have ended."""
        return self._state.closing and not (self._endings or any(self._state.congested.values()))

    # ── links to other brokers (C44) ─────────────────────────────────────────────────────────────────────────────────

    def add_link(self, kind: str, role: Role | None = None, where: str = "", identity: bytes = b"") -> bytes:
        """Add a link that this broker opens, to a `peer` or to its `parent`; return the identity of its messages.

        `role` is the role of the other broker's key, and `where` its endpoint, for people.  An `identity` must be one
        that no peer can have or guess.
        """
        return self.federation.add(kind, self.roles.everyone if role is None else role, where, identity)

    def link_opened(self, identity: bytes, now: float, role: Role | None = None) -> None:
        """Record that a link has a new connection, over which the other broker is asked for the link.

        `role` is the role that the other broker's key has now, if that may have changed.
        """
        self._now = now
        self.federation.opened(identity, role, now)

    def link_failed(self, identity: bytes, why: str, now: float) -> None:
        """Record that the connection for a link has ended, and why, or that there could be none.

        If the link is down already, the reason that is known for it stays: its connection ends because of that.
        """
        self._now = now
        self.federation.failed(identity, why, now)
