"""The dialog with other brokers: links, requests and answers, in both directions (C44).

`Links` opens and ends links, `Announcements` keeps the services that they lead to, `Requests` decides about requests.
"""

import logging
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from ... import wire
from ...codes import Code
from ...timers import NEVER
from ...wire import BROKER, Message, Reason, RequestId, batch, x1
from ...wire.names import displayed
from ...wire.options import MAX_HOPS
from ..core.admission import Admission
from ..core.drops import Drop
from ..core.endings import Endings
from ..core.records import Attempt, Remote, Request, Service
from ..core.requests import Requests, ttl_of
from ..core.roles import Role
from ..core.state import Federation, State
from .link import Link, LinkClient, LinkKind, LinkRemote, LinkState
from .links import Links

NOT_PLACED: Final = {
    Drop.NO_WORKER, Drop.NO_BROKER, Drop.LAST_WORKER_LOST, Drop.QUEUE_FULL, Drop.MEMORY_FULL, Drop.TOO_MANY_SERVICES,
    Drop.TOO_MANY_UNSERVED, Drop.TOO_MANY_GROUPS, Drop.ROLE_OUTSTANDING, Drop.ROLE_QUEUED, Drop.ROLE_MEMORY_FULL,
    Drop.DRAINING, Drop.CLOSING, Drop.LINKS_LOST,
}  # fmt: skip
"""Drops after which a broker returns a request to the one that passed it on, since others may still do it."""

RETURNED: Final = b"returned"
"""The reason of an ERROR that is not the end of a request: another broker returns it, and workers have died of it."""


class LinkDialog(Federation):
    """The dialog of one broker with those to which it is linked.  `instance` is a random text that no other has."""

    # `join` sets these: requests know the federation, and the other way round.
    _requests: Requests
    _endings: Endings
    _admission: Admission

    def __init__(self, state: State, instance: str, rng: random.Random) -> None:
        super().__init__(state)
        self.links = Links(state, instance, rng, self.announcing)
        self.opening, self.linked = self.links.opening, self.links.by_identity

    def join(self, requests: Requests, endings: Endings, admission: Admission) -> None:
        """Take part in the machine of these; call it once, before anything else."""
        self._requests, self._endings, self._admission = requests, endings, admission
        self.links.alarm = self._state.alarms.add(self.tick)

    @property
    def incomplete(self) -> bool:
        """Whether other brokers may be about to announce their services, so that clients should wait."""
        return self.links.untried > 0

    # ── the shell and the machine ────────────────────────────────────────────────────────────────────────────────────

    def add(self, kind: str, role: Role, where: str, identity: bytes) -> bytes:
        """Add a link that this broker opens; return the first frame of its messages."""
        return self.links.add(LinkKind(kind), role, where, identity).identity

    def opened(self, identity: bytes, role: Role | None, now: float) -> None:
        """Record that a link has a new connection, over which the other broker is asked for the link."""
        self.links.opened(identity, now, role)

    def failed(self, identity: bytes, why: str, now: float) -> None:
        """Record that the connection for a link has ended, and why, or that there could be none."""
        self._lose_unless_down(self.links.by_identity[identity], why, now)

    def lose(self, identity: bytes, now: float) -> None:
        """Record that the connection with that routing id has ended."""
        link = self.links.by_identity.get(identity)
        if link is not None:
            self._lose_unless_down(link, "the connection has ended", now)

    def _lose_unless_down(self, link: Link, why: str, now: float) -> None:
        if link.state is not LinkState.DOWN:
            self._lose(link, why, now)

    def probe(self, identity: bytes) -> None:
        """Send a HEARTBEAT to the broker behind that routing id, to see whether it is connected."""
        if self.links.at(identity) is not None:
            self._outgoing.add(wire.heartbeat((identity,), wire.WL1))

    def revoke(self, now: float) -> None:
        """End the links whose roles may no longer be links."""
        for link in list(self.links.by_identity.values()):
            if link.state is not LinkState.DOWN and not link.role.link:
                self._end(link, f"role {link.role.name} may not link brokers any longer", now)

    def end_turn(self, changed: Iterable[Service], now: float) -> None:
        """Announce which services have changed, if it is time to."""
        announcements = self.links.announcements
        if self.links.by_identity:
            for service in changed:
                announcements.changed(service)
        if now >= announcements.alarm.due:
            announcements.announce(now)

    def drain(self) -> None:
        """Withdraw every service, announce none from now on, and open no links."""
        self.links.withdraw_all()

    def held(self) -> Iterator[dict[RequestId, Attempt]]:
        """Yield the requests that are at each of the other brokers, by address."""
        for link in self.links.by_identity.values():
            yield link.attempts

    def farewell(self) -> None:
        """Tell other brokers that this one is gone."""
        for link in self.links.by_identity.values():
            if link.state is LinkState.UP:
                self._outgoing.add(wire.disconnect((link.identity,), wire.WL1))

    def describe(self, now: float) -> list[dict[str, Any]]:
        """Return the links, as `mmi.brokers` shows them."""
        return self.links.describe(now)

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self, message: Message, found: wire.Batched, role: Role, now: float) -> bool:
        """Answer another broker that asks for a link over this connection.  Return False if it says something else.

        A client cannot ask for a link in the name of others: no client, gateway or Titanic sends this header.
        """
        if found.bare or found.header != wire.CL1:
            return False
        said = batch.from_client(message, found.at, found.route, self._max_message, self._max_frames)
        command = next(iter(said), None)
        if not isinstance(command, wire.Request) or command.service != wire.HELLO:
            return False
        number = command.id if isinstance(command.id, int) else 0
        answer = batch.Batch(found.route, wire.WL1)
        link, refusal = self.links.check_hello(self._directory.client(found.route, role), role, list(command.body))
        if link is None:
            self._stats.dropped[Drop.NOT_ALLOWED] += 1
            self._journal.note(now, logging.WARNING, "link-refused", "refused a link: %s", refusal)
            reason = Drop.NOT_ALLOWED.value.encode()
            answer.error(x1.WORKER_ERROR, number, Code.NOT_ALLOWED.value, refusal.encode(), [], reason)
        else:
            answer.reply(x1.WORKER_FINAL, number, self.links.accepting_hello())
        for each in answer.messages():
            self._outgoing.add(each)
        if link is not None:
            self._begin(link, now)
        return True

    def _begin(self, link: Link, now: float) -> None:
        """Begin to use a link for which the other broker has asked."""
        replaced = self.links.replaced_by(link)
        if replaced is not None:
            self._lose(replaced, "the other broker has opened another connection", now)
        self.links.begin(link, now)

    def receive_opening(self, message: Message, now: float) -> None:
        """Take in the answer of another broker that was asked for a link, and the commands after it."""
        link = self.opening[message[0]]
        found = wire.decode_broker(message[1:])
        if not isinstance(found, wire.Batched) or found.bare or found.header != wire.WL1:
            return
        said = iter(batch.from_worker(message, found.at + 1, (), self._max_message, self._max_frames))
        self.links.settle_hello(link, next(said, None), now)
        if link.state is LinkState.UP:
            self._receive_as_worker(link, said, now)

    def receive(self, message: Message, found: wire.Batched, role: Role, now: float) -> None:
        """Take in a message of another broker, as a client of this one or as a worker."""
        link = self.links.at(message[0])
        if link is None and self._asked(message, found, role, now):
            return
        if link is None or link.role is not role:
            # For example, one that was given up because it was silent.  A DISCONNECT is not answered: two brokers would
            # answer each other without end.
            if not self._ends(message, found):
                self._outgoing.add(wire.disconnect(found.route, wire.WL1, b"this connection is not a link any longer"))
            return
        self.links.seen(link, now)
        if found.bare:
            return
        if found.header == wire.CL1:
            self._receive_as_client(link, message, found, now)
        else:
            said = batch.from_worker(message, found.at, found.route, self._max_message, self._max_frames)
            self._receive_as_worker(link, said, now)

    def _ends(self, message: Message, found: wire.Batched) -> bool:
        """Return whether a message says that the link has ended."""
        if found.bare or found.header != wire.WL1:
            return False
        commands = batch.from_worker(message, found.at, found.route, self._max_message, self._max_frames)
        return any(isinstance(command, wire.Disconnect) for command in commands)

    def _receive_as_client(self, link: Link, message: Message, found: wire.Batched, now: float) -> None:
        for command in batch.from_client(message, found.at, found.route, self._max_message, self._max_frames):
            if isinstance(command, wire.Request):
                self._take_over(link, command, now)
            elif isinstance(command, wire.Cancel):
                if not self._requests.cancel(link.client, command.id, now):
                    self._state.count_invalid(Reason.UNKNOWN_NUMBER, now)
            else:
                self._invalid_on_link(link, command, now)

    def _receive_as_worker(self, link: Link, said: Iterable[Any], now: float) -> None:
        for command in said:
            if isinstance(command, wire.Reply | wire.Error | wire.Release | wire.Oversized):
                self._answered_by(link, command, now)
            elif isinstance(command, wire.Disconnect):
                self._ended_by(link, command, now)
                return
            elif not isinstance(command, wire.Ready):
                invalid = isinstance(command, wire.Invalid)
                self._state.count_invalid(command.reason if invalid else Reason.UNKNOWN_COMMAND, now)
            elif self.links.announcements.shows_circle(command):
                self._end_circle(link, now)
                return
            else:
                self._drop_unreachable(self.links.announced(link, command, now), now)

    def tick(self, now: float) -> None:
        """Do what is due for links, and lose those that are silent."""
        for link in self.links.tick(now, self._state.read_until):
            why = f"silent for {self._limits.patience:g} s"
            self._lose(link, why if link.name else f"it does not answer as a broker; {why}", now)

    def _ended_by(self, link: Link, command: wire.Disconnect, now: float) -> None:
        why = "the other broker has shut down"
        if command.text:
            link.redial.ended(now - link.up_since)
            why = f"the other broker has ended it: {displayed(command.text.decode(errors='replace'))}"
        self._lose(link, why, now)

    def _end(self, link: Link, why: str, now: float) -> None:
        """End a link, and tell the other broker why."""
        self._outgoing.add(wire.disconnect((link.identity,), wire.WL1, why.encode()))
        link.redial.ended(now - link.up_since)
        self._lose(link, why, now)

    def _end_circle(self, link: Link, now: float) -> None:
        """End a link because the brokers are linked in a circle."""
        reached = f"broker {link.name} reaches a broker named {self._name}"
        self._end(link, f"{reached}: the brokers are linked in a circle, or two have the same name", now)

    def _lose(self, link: Link, why: str, now: float) -> None:
        """Place the requests again that were passed on over a link, and drop those that came over it."""
        client = link.client
        attempts, services = self.links.take_down(link, why, now)
        self._endings.client(client, now)
        for attempt in reversed(attempts):  # each goes to the front
            if not attempt.abandoned:
                attempt.request.recorded_way().losses += 1
                self._requests.place_again(attempt, now)
        self._drop_unreachable(services, now)

    def _drop_unreachable(self, services: list[Service], now: float) -> None:
        """Drop the requests that must not wait, for services that can no longer be reached over some link."""
        for service in reversed(services):
            if not service.available:
                self._endings.no_wait(service, now)
            if service.name.startswith(BROKER) and not service.remotes:
                self._endings.service(service, Drop.NO_BROKER, now)

    # ── requests that are passed on ──────────────────────────────────────────────────────────────────────────────────

    def pass_on(self, remote: Remote, request: Request, now: float) -> None:
        """Pass a request on to another broker, as its client (C44)."""
        link = cast("LinkRemote", remote).link
        via = () if request.way is None else request.way.via
        raw = wire.options_for_link(request.options, via, self._name, request.attempts, request.dialect)
        if len(raw) > wire.MAX_OPTIONS:
            self._requests.finish(request, Drop.OPTIONS_TOO_LONG, now)
            return
        self._stats.dispatched += 1
        link.sent += 1
        address = self._requests.next_address
        self._requests.next_address = address + 1
        self._registry.assign(request, remote, address, self._state.turn, now, doubtful=False)
        records = self._outgoing.batch_for(link, (link.identity,), wire.CL1)
        records.request_to_broker(address, ttl_of(request, now), request.name, raw, request.body)

    def cancel(self, attempt: Attempt) -> None:
        """Tell another broker that a request which was passed on has ended."""
        link = cast("LinkRemote", attempt.worker).link
        records = self._outgoing.batch_for(link, (link.identity,), wire.CL1)
        records.signal(x1.CLIENT_CANCEL, attempt.address)

    def hand_back(self, request: Request, attempt: Attempt | None, reason: Drop) -> bool:
        """Return a request that cannot be done here to the broker that passed it on, since others may still do it.

        Return False if none may, or if no broker has passed it on.
        """
        number, client = request.number, request.client
        streamed = attempt is not None and attempt.streamed
        if reason not in NOT_PLACED or streamed or request.pinned or number is None:
            return False
        if not isinstance(client, LinkClient):
            return False
        if request.attempts:
            # The other broker may give it to another worker, but counts those that have died.
            code = Code.WORKER_LOST.value
            self._outgoing.error(client, number, code, b"", [], RETURNED, request.attempts)
        else:
            self._outgoing.release(client, number)
        self._stats.dropped[reason] += 1
        self.links.announcements.repeat(client.link, self._passed_on_as(request))
        return True

    def _passed_on_as(self, request: Request) -> bytes:
        """Return the name under which another broker has found the service announced here: its own, or a broker's."""
        broker = request.options.broker
        if broker is None and request.name == wire.DESCRIBE:
            broker = self._name
        return request.name if broker is None else wire.BROKER + broker.encode()

    # ── another broker as a client ───────────────────────────────────────────────────────────────────────────────────

    def _take_over(self, link: Link, command: wire.Request, now: float) -> None:
        """Take in a request that another broker passes on."""
        client, given, number = link.client, command.options, cast("int", command.id)
        self._stats.requests += 1
        link.received += 1
        way = wire.passed(given.raw)
        if way is None or number in client.numbered:
            reason = Reason.BAD_OPTIONS if way is None else Reason.NUMBER_IN_USE
            self._invalid_on_link(link, wire.Invalid(reason, command.route, number), now)
            return
        name = command.service
        own = name.startswith(wire.MMI)
        service = Service(name) if own else self._directory.service(name)
        deadline = NEVER if command.ttl is None else now + command.ttl
        # A request waits at the first broker, unless it is addressed to this one or there are workers here.
        wait = given.wait and given.broker == self._name
        options = wire.Options(way.raw, wait, broker=given.broker, group=given.group)
        request = Request(client, wire.CX1, service, command.body, number=number, options=options, deadline=deadline)
        request.came_over(way.via, way.attempts, way.dialect, waits=given.wait)
        denial, user = self._authorise_passed(request, way.user)
        if denial is not None:
            self._requests.report(request, denial, now)
        elif self._name in way.via or len(way.via) >= MAX_HOPS:
            self._requests.report(request, Drop.NO_WORKER, now)
        else:
            self._admission.admit(request, own, user, now)
            return
        self._registry.remember_end(request)

    def _authorise_passed(self, request: Request, name: str | None) -> tuple[Drop | None, Role]:
        """Write into the options of a request from another broker on whose behalf it is made, as this broker sees it.

        `name` is the role that the first broker has found.  Return why the request is not allowed, or None, and the
        role.
        """
        role = request.client.role
        if not role.restricted:
            return None, role
        user = role if name is None else self._roles.named(name)
        request.sign(user.signature)
        if user.may_call(request.service.name):
            return None, user
        return (Drop.NOT_ALLOWED if name is None else Drop.USER_NOT_ALLOWED), user

    def _invalid_on_link(self, link: Link, command: wire.Invalid, now: float) -> None:
        self._state.count_invalid(command.reason, now)
        if command.id is not None:
            code = Code.TOO_LARGE if command.over_limit else Code.MALFORMED
            text = f"broker {self._name}: malformed: {command.reason}".encode()
            self._outgoing.error(link.client, command.id, code.value, text, [], command.reason.value.encode(), 0)

    # ── another broker as a worker ───────────────────────────────────────────────────────────────────────────────────

    def _answered_by(
        self, link: Link, command: wire.Reply | wire.Error | wire.Release | wire.Oversized, now: float
    ) -> None:
        """Take in a command of another broker about a request that was passed on to it."""
        attempt = link.attempts.get(command.id) if isinstance(command.id, int) else None
        if attempt is None:
            self._stats.late += 1  # C32
            return
        if not link.trusted:
            self.links.trust(link, returned=isinstance(command, wire.Release))
        self._answered(link, attempt, command, now)

    def _answered(
        self,
        link: Link,
        attempt: Attempt,
        command: wire.Reply | wire.Error | wire.Release | wire.Oversized,
        now: float,
    ) -> None:
        if isinstance(command, wire.Reply):
            self._requests.replied(attempt, command, now)
        elif isinstance(command, wire.Release):
            self._returned(link, attempt, 0, now)
        elif isinstance(command, wire.Oversized):
            self._state.count_invalid(command.reason, now)
            if command.kind is wire.PARTIAL:
                self._requests.drop(attempt.request, Drop.REPLY_TOO_LARGE, now)
                return
            self._registry.release(attempt)
            if not attempt.abandoned:
                self._requests.finish(attempt.request, Drop.REPLY_TOO_LARGE, now, attempt)
        elif command.reason == RETURNED:
            self._returned(link, attempt, command.lost, now)
        else:
            self._registry.release(attempt)
            if attempt.streamed and command.code == Code.DRAINING and not command.detail:
                if not attempt.abandoned:
                    self._requests.finish(attempt.request, Drop.LOST_AFTER_PARTIAL, now, attempt)
            else:
                self._requests.ended_by(
                    attempt, command.code, command.text, command.detail, now, command.reason, command.lost
                )

    def _returned(self, link: Link, attempt: Attempt, died: int, now: float) -> None:
        """Place a request again that another broker has returned, where `died` workers died of it in total.

        That broker gets no more requests for the service until it announces credit again.
        """
        self._registry.hand_back(attempt, died)
        remote = link.remotes.get(attempt.request.service.name)
        if remote is not None:  # else it has withdrawn the service meanwhile
            self._directory.update_remote(remote, 0, 0, remote.hops)
        if not attempt.abandoned:
            self._requests.place_again(attempt, now)
