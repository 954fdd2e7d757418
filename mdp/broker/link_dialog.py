"""What passes over links: requests and answers, from and to other brokers (C44).

`Links` (`links`) knows the other brokers and what they offer; `Requests` knows what happens to requests.
"""

import logging
from collections.abc import Iterable
from typing import Any, cast

from .. import wire
from ..codes import Code
from ..timers import NEVER
from ..wire import BROKER, Message, Reason, batch, x1
from ..wire.names import displayed
from ..wire.options import MAX_HOPS
from .admission import Admission
from .drops import RETURNED, Drop
from .endings import Endings
from .links import Links
from .records import Attempt, Link, LinkState, Request, Service
from .requests import Requests
from .roles import Role
from .shared import Part, Shared


class LinkDialog(Part):
    """The dialog of one broker with those to which it is linked."""

    def __init__(
        self, shared: Shared, links: Links, requests: Requests, endings: Endings, admission: Admission
    ) -> None:
        super().__init__(shared)
        self._links = links
        self._requests = requests
        self._endings = endings
        self._admission = admission

    # ── links ─────────────────────────────────────────────────────────────────────────────────────────────────────────

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
        link, refusal = self._links.asked(self._directory.client(found.route, role), role, list(command.body))
        if link is None:
            self._stats.dropped[Drop.NOT_ALLOWED] += 1
            self._journal.note(now, logging.WARNING, "link-refused", "refused a link: %s", refusal)
            reason = Drop.NOT_ALLOWED.value.encode()
            answer.error(x1.WORKER_ERROR, number, Code.NOT_ALLOWED.value, refusal.encode(), [], reason)
        else:
            answer.reply(x1.WORKER_FINAL, number, self._links.answer())
        for each in answer.messages():
            self._outgoing.add(each)
        if link is not None:
            self._begin(link, now)
        return True

    def _begin(self, link: Link, now: float) -> None:
        """Begin to use a link for which the other broker has asked."""
        replaced = self._links.replaced_by(link)
        if replaced is not None:
            self.lose(replaced, "the other broker has opened another connection", now)
        self._links.up(link, now)

    def answered(self, link: Link, message: Message, now: float) -> None:
        """Take in the answer of another broker that was asked for a link, and what it says after that."""
        found = wire.decode_broker(message[1:])
        if not isinstance(found, wire.Batched) or found.bare or found.header != wire.WL1:
            return
        said = iter(batch.from_worker(message, found.at + 1, (), self._max_message, self._max_frames))
        self._links.answered(link, next(said, None), now)
        if link.state is LinkState.UP:
            self._receive_as_worker(link, said, now)

    def receive(self, message: Message, found: wire.Batched, role: Role, now: float) -> None:
        """Take in what another broker says, as a client of this one or as a worker."""
        link = self._links.at(message[0])
        if link is None and self._asked(message, found, role, now):
            return
        if link is None or link.role is not role:
            # For example, one that was given up because it was silent.  A DISCONNECT is not answered: two brokers would
            # answer each other without end.
            if not self._ends(message, found):
                self._outgoing.add(wire.disconnect(found.route, wire.WL1, b"this connection is not a link any longer"))
            return
        self._links.seen(link, now)
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
                self._passed_on(link, command, now)
            elif isinstance(command, wire.Cancel):
                if not self._requests.cancel(link.client, command.id, now):
                    self._requests.count_invalid(Reason.UNKNOWN_NUMBER, now)
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
                self._requests.count_invalid(command.reason if invalid else Reason.UNKNOWN_COMMAND, now)
            elif self._links.heard(link, command, now):
                self._drop_unreachable(now)
            else:
                self._end_circle(link, now)
                return

    def tick(self, now: float) -> None:
        """Do what is due for links, and lose those that are silent."""
        for link in self._links.tick(now, self._shared.heard):
            why = f"silent for {self._limits.patience:g} s"
            self.lose(link, why if link.name else f"it does not answer as a broker; {why}", now)

    def _ended_by(self, link: Link, command: wire.Disconnect, now: float) -> None:
        why = "the other broker has shut down"
        if command.text:
            self._links.ended(link, now)
            why = f"the other broker has ended it: {displayed(command.text.decode(errors='replace'))}"
        self.lose(link, why, now)

    def end(self, link: Link, why: str, now: float) -> None:
        """End a link, and tell the other broker why."""
        self._outgoing.add(wire.disconnect((link.identity,), wire.WL1, why.encode()))
        self._links.ended(link, now)
        self.lose(link, why, now)

    def _end_circle(self, link: Link, now: float) -> None:
        """End a link because the brokers are linked in a circle."""
        reached = f"broker {link.name} reaches a broker named {self._name}"
        self.end(link, f"{reached}: the brokers are linked in a circle, or two have the same name", now)

    def lose(self, link: Link, why: str, now: float) -> None:
        """Place the requests again that were passed on over a link, and drop those that came over it."""
        client = link.client
        attempts = self._links.down(link, why, now)
        self._endings.client(client, now)
        for attempt in reversed(attempts):  # each goes to the front
            if not attempt.abandoned:
                attempt.request.recorded_way().losses += 1
                self._requests.place_again(attempt, now)
        self._drop_unreachable(now)

    def _drop_unreachable(self, now: float) -> None:
        """Drop the requests that must not wait, for services that can no longer be reached over some link."""
        while self._links.announcements.withdrawn_services:
            service = self._links.announcements.withdrawn_services.pop()
            if not service.available:
                self._endings.no_wait(service, now)
            if service.name.startswith(BROKER) and not service.schedule.remotes:
                self._endings.service(service, Drop.NO_BROKER, now)

    # ── what another broker says as a client ──────────────────────────────────────────────────────────────────────────

    def _passed_on(self, link: Link, command: wire.Request, now: float) -> None:
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
        self._registry.refuse(request)

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
        self._requests.count_invalid(command.reason, now)
        if command.id is not None:
            code = Code.TOO_LARGE if command.over_limit else Code.MALFORMED
            text = f"broker {self._name}: malformed: {command.reason}".encode()
            self._outgoing.error(link.client, command.id, code.value, text, [], command.reason.value.encode(), 0)

    # ── what another broker says as a worker ──────────────────────────────────────────────────────────────────────────

    def _answered_by(
        self, link: Link, command: wire.Reply | wire.Error | wire.Release | wire.Oversized, now: float
    ) -> None:
        """Take in what another broker says about a request that was passed on to it."""
        attempt = link.attempts.get(command.id) if isinstance(command.id, int) else None
        if attempt is None:
            self._stats.late += 1  # C32
            return
        if not link.answered:
            self._links.answers(link, returned=isinstance(command, wire.Release))
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
            self._requests.count_invalid(command.reason, now)
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
