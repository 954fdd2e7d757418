"""Sans-I/O broker: given messages and the current time, it returns messages to send.  No socket, no clock.

Each message is taken in with the role of its connection's key, if the broker has access control (`roles`).

A *turn* takes in any number of messages (`take`) and ends with `flush`, which dispatches the requests that arrived, and
puts everything for one peer into one message if the peer speaks X1.  `receive`, `tick`, `unreachable`,
`gone` and `close` each do one thing and end the turn.  Messages are lists of frames that begin with the peer's routing
id.  `deadline` returns when `tick` is due.  Rules are cited by their conformance numbers (C11 to C45).

Brokers may be linked (`links`).  A link that this broker opens has an identity of its own (`add_link`); its shell opens
a connection when `links_due` asks for it, and closes the connections that `links_to_close` returns.
"""

import logging
import math
import random
import secrets
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ...mmi import answers
from .. import wire
from ..access import Permissions
from ..codes import Code
from ..limits import Limits
from ..timers import Timers
from ..wire import Message, Reason, batch
from .admission import Admission
from .drops import Drop
from .exchange import Exchange
from .given_up import GivenUp
from .journal import WORKER_LINES, Journal, Loss, Refusal, Stats
from .link import Kind, State
from .links import Links
from .outgoing import Outgoing
from .registry import NEVER, Attempt, Client, Registry, Request, Service, Way, Worker, key_of
from .requests import Requests
from .roles import Role, Roles
from .watch import Watch

BROKER_CODES: Final = {403, 404, 413, 429, 502, 503}
"""Codes that a client attributes to the broker, unless the ERROR has a detail."""
LINK_HEADERS: Final = (wire.CL1, wire.WL1)


class Broker:
    """One Majordomo broker.

    `name` distinguishes it from the brokers to which it is linked.  `first_address` is the first address of a dispatch,
    for tests; by default it is random, so that a worker's late reply to an earlier broker does not match (C32).
    Requests that take longer than `slow` seconds are logged.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        now: float,
        name: str = "broker",
        logger: logging.Logger | None = None,
        first_address: int | None = None,
        slow: float | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.name = name
        self.started = now
        self.roles = Roles()
        self.registry = Registry(self.limits.expiry)
        self.stats = Stats()
        self._journal = Journal(logger or logging.getLogger("zmdp.broker"))
        self._beats: Timers[Worker] = Timers(self.limits.heartbeat / 20)
        self._first_address = secrets.randbits(60) if first_address is None else first_address
        self._workers_seen = 0
        self._refusals = 0
        self._given_up = GivenUp()
        self._outgoing = Outgoing()
        self._admission = Admission(self.limits, self.registry)
        instance = secrets.token_hex(8) if first_address is None else f"{first_address:x}"
        rng = random.Random(instance)  # noqa: S311 - jitter, not cryptography
        self.links = Links(name, instance, self.limits, self.registry, self._outgoing, self._journal, rng)
        secret = secrets.token_bytes(16) if first_address is None else instance.encode()
        self.watch = Watch(self.registry, self._journal, self._first_address, secret, slow)
        self._requests = Requests(
            name, self._first_address, self.limits, self.registry, self.stats, self.links.announcements, self._outgoing,
            self._journal, self.watch,
        )  # fmt: skip
        self._exchange = Exchange(
            name, self.limits, self.registry, self.roles, self.stats, self.links, self._requests, self._outgoing,
            self._journal, self.admit,
        )  # fmt: skip
        # What is looked at for each message.
        self._linked, self._opening = self.links.by_identity, self.links.opening
        self._max_message, self._max_frames = self.limits.max_message, self.limits.max_frames
        self._role = self.roles.everyone
        """The role that sent the current message."""
        self._on: Final[dict[type, Callable[[Any, float], None]]] = {
            wire.Error: self._error,
            wire.Oversized: self._oversized,
            wire.Heartbeat: self._heartbeat,
            wire.Ready: self._ready,
            wire.Credit: self._credit,
            wire.Release: self._release,
            wire.Disconnect: self._disconnect,
            wire.Invalid: self._invalid,
        }

    # ── what drives the machine ──────────────────────────────────────────────────────────────────────────────────────

    def take(self, message: Message, now: float, role: Role | None = None) -> None:
        """Take in `message`, which came from the peer whose routing id is its first frame, under that role.

        Without access control there is no role: everybody may do everything.
        """
        self._role = self.roles.everyone if role is None else role
        if self._opening:
            link = self._opening.get(message[0])
            if link is not None:
                self.links.answered(link, message, now)
                return
        command = wire.decode_peer(message, self._max_message, self._max_frames)
        if isinstance(command, wire.Batched):
            self._take_batch(message, command, now)
        else:
            self._take_command(command, now)

    def take_pirate(self, message: Message, service: bytes, now: float, role: Role | None = None) -> None:
        """Take in a message without a header, from a port where clients call `service` and workers offer it."""
        self._role = self.roles.everyone if role is None else role
        self._take_command(wire.decode_pirate(message, service, self._max_message, self._max_frames), now)

    def _take_command(self, command: wire.FromPeer | wire.Invalid, now: float) -> None:
        """Take in a message that is one command, as in every dialect but X1."""
        # The two commands of every request are checked first.
        if isinstance(command, wire.Reply):
            self._reply(command, now)
        elif isinstance(command, wire.Request):
            self._request(command, self._client(command.route), now)
        else:
            self._on[type(command)](command, now)

    def _take_batch(self, message: Message, found: wire.Batched, now: float) -> None:
        """Take in an X1 message (C43)."""
        if found.header in LINK_HEADERS:
            self._exchange.take(message, found, self._role, now)
        elif found.header == wire.WX1:
            if found.bare:
                self._heartbeat(wire.Heartbeat(found.route, found.header), now)
            else:
                self._take_worker_batch(message, found, now)
        elif not (len(self._given_up) and self._given_up.includes(key_of(found.route), now)):
            self._take_client_batch(message, found, now)

    def _take_client_batch(self, message: Message, found: wire.Batched, now: float) -> None:
        client = self._client(found.route)
        if client is None:
            return
        if client.link is None:
            client.route = found.route
        if found.bare:
            self._asked_whether_alive(client, now)
            return
        for command in batch.from_client(message, found.at, found.route, self._max_message, self._max_frames):
            if isinstance(command, wire.Request):
                self._request(command, client, now)
            elif isinstance(command, wire.Cancel):
                self._cancel(command, client, now)
            else:
                self._invalid(command, now, client)

    def _take_worker_batch(self, message: Message, found: wire.Batched, now: float) -> None:
        refusals = self._refusals
        for command in batch.from_worker(message, found.at, found.route, self._max_message, self._max_frames):
            if isinstance(command, wire.Reply):
                self._reply(command, now)
            else:
                self._on[type(command)](command, now)
            if self._refusals != refusals:
                return  # one DISCONNECT is enough
        worker = self._worker(found.route)
        if worker is not None:
            worker.last_seen = now  # even if nothing in it was valid

    def flush(self, now: float) -> list[Message]:
        """End the turn: dispatch the requests that can be, and return the messages to send."""
        registry = self.registry
        while registry.finished:
            self._left(registry.finished.pop(0), now)
        if registry.unsettled:
            unsettled, registry.unsettled = registry.unsettled, []
            for service in unsettled:
                try:
                    self._requests.settle(service, now)
                    if self._admission.draining:
                        self._dismiss_idle(service, now)
                    registry.settled(service)
                except Exception:  # noqa: BLE001 - a bug, which must not affect other services
                    self.failed(now)
                    service.unsettled = False
                    registry.touch(service)
            if self._linked:
                announcements = self.links.announcements
                for service in unsettled:
                    announcements.changed(service)
        if self._linked:
            self.links.announcements.announce(now)
        self._requests.turn += 1
        return self._outgoing.take()

    @property
    def turn(self) -> int:
        """The number of the current turn."""
        return self._requests.turn

    def receive(self, message: Message, now: float, role: Role | None = None) -> list[Message]:
        """A turn of one message: return what to send because of it."""
        self.take(message, now, role)
        return self.flush(now)

    def tick(self, now: float, heard: float | None = None) -> list[Message]:
        """Return what to send because of the time: heartbeats, and the consequences of silent workers and expiries.

        Everything that had arrived at the time `heard` has been taken in; by default, everything that has arrived yet.
        A worker is silent only if it was silent until then.
        """
        if heard is None:
            heard = now
        self._journal.flush(now)
        if self.watch.active:
            self.watch.tidy(now)
        self._requests.queue_all_arrived(now)
        lost: list[tuple[Worker, Loss]] = []
        for worker in self._beats.pop_due(now):
            oversized_reply_at = worker.oversized_reply_at
            if heard >= worker.last_seen + self._patience(worker):
                lost.append((worker, Loss.SILENT))
            elif oversized_reply_at is not None and worker.held and heard >= oversized_reply_at + self.limits.patience:
                for attempt in list(worker.held.values()):
                    self._requests.drop(attempt.request, Drop.REPLY_TOO_LARGE, now)
                self._refuse(worker.route, worker.header, Refusal.OVERSIZED_REPLY, now, worker.role)
                lost.append((worker, Loss.REFUSED))
            else:
                self._beat(worker, now)
        self._lose(lost, now)
        if self._linked:
            for link in self.links.tick(now, heard):
                why = f"silent for {self.limits.patience:g} s"
                self._exchange.lose(link, why if link.name else f"it does not answer as a broker; {why}", now)
        for request in self.registry.expiries.pop_due(now):
            # C12
            self._requests.drop(request, Drop.TTL_PASSED if now >= request.deadline else Drop.EXPIRED, now)
        return self.flush(now)

    def deadline(self) -> float | None:
        """Return when `tick` is due, or None."""
        due = self._beats.next_due()
        for other in (self.registry.expiries.next_due(), self._journal.deadline(), self.links.deadline()):
            if other is not None and (due is None or other < due):
                due = other
        return due

    def unreachable(self, identity: bytes, turn: int, now: float) -> list[Message]:
        """Record that the peer with that routing id is no longer connected, and return what to send because of that.

        The peer has received nothing of what was sent in `turn` and since.
        """
        for worker in self.registry.workers_at(identity):
            worker.unreached_from = turn
        self._given_up.forget(identity)
        return self._gone(identity, now)

    def probe(self, identity: bytes, now: float) -> list[Message]:
        """Return a HEARTBEAT to each peer behind that routing id that can take one, to see whether it is connected."""
        if self.links.at(identity) is not None:
            self._outgoing.add([identity, wire.WL1])
        for worker in self.registry.workers_at(identity):
            worker.last_sent = now
            self._outgoing.say(worker, wire.heartbeat(worker.route, worker.header))
        for client in self.registry.clients_at(identity):
            if client.numbered and client.link is None:
                self._outgoing.say(client, wire.heartbeat(client.route, wire.CX1))
        return self.flush(now)

    def gone(self, identity: bytes, now: float) -> list[Message]:
        """Return what to send because the peer with that routing id is treated as gone, though it may be connected.

        Messages to it were lost.  So that an X1 client does not wait for them forever, it is no longer answered on this
        connection: it considers the broker dead, reconnects, and resends its outstanding requests.
        """
        self._given_up.add(identity, now)
        return self._gone(identity, now)

    def _gone(self, identity: bytes, now: float) -> list[Message]:
        self._requests.queue_all_arrived(now)
        link = self.links.by_identity.get(identity)
        if link is not None and link.state is not State.DOWN:
            self._exchange.lose(link, "the connection has ended", now)
        for client in self.registry.clients_at(identity):
            self._requests.client_gone(client, now)
        self._lose([(worker, Loss.UNREACHABLE) for worker in self.registry.workers_at(identity)], now)
        return self.flush(now)

    def failed(self, now: float) -> None:
        """Count and log the current exception, which is a bug in the broker, with its traceback."""
        self.stats.internal_errors += 1
        text = "internal error, please report this bug:\n%s"
        self._journal.note(now, logging.ERROR, "internal-error", text, traceback.format_exc())

    def grant(self, permissions: Mapping[str, Permissions], now: float) -> list[Message]:
        """Replace the permissions of all roles; return what to send to workers that may no longer offer their service.

        Requests that were accepted before go on.
        """
        self.roles.grant(permissions)
        for worker in list(self.registry.workers.values()):
            if not worker.role.may_offer(worker.service.name):
                self._expel(worker.route, worker.header, Refusal.NOT_ALLOWED, now, worker.role, worker.service.name)
        for link in list(self.links.by_identity.values()):
            if link.state is State.UP and link.role.restricted and not link.role.link:
                self._exchange.end(link, f"role {link.role.name} may not link brokers any longer", now)
        return self.flush(now)

    def drain(self, now: float) -> list[Message]:
        """Accept no more requests or workers; return what to send to the peers, which move to another broker.

        Requests already accepted are finished while there are workers.  A worker is told to go once it holds nothing
        and no request waits for its service; if it has no credit, when a HEARTBEAT would be due.
        """
        self._admission.draining = True
        self.links.withdraw_all()
        for client in self.registry.clients.values():
            if client.numbered and client.link is None:
                self._outgoing.say(client, wire.disconnect(client.route, wire.CX1))
        for service in list(self.registry.services.values()):
            self.registry.touch(service)
        return self.flush(now)

    @property
    def draining(self) -> bool:
        """Whether no more requests are accepted."""
        return self._admission.draining

    @property
    def drained(self) -> bool:
        """Whether no worker holds a request.  While requests wait that workers can take, the workers hold some."""
        return not self.registry.running

    def close(self, now: float) -> list[Message]:
        """Return an ERROR for every X1 request and a DISCONNECT to every worker; end the machine."""
        self._requests.queue_all_arrived(now)
        for request in self.registry.numbered:
            self._requests.drop(request, Drop.CLOSING, now)
        for worker in list(self.registry.workers.values()):
            if farewell := wire.disconnect(worker.route, worker.header):
                self._outgoing.say(worker, farewell)
            for attempt in self._forget(worker, Loss.CLOSING, now):
                if not attempt.abandoned:
                    self.registry.drop(attempt.request)
        for link in self.links.by_identity.values():
            if link.state is State.UP:
                self._outgoing.add(wire.disconnect((link.identity,), wire.WL1))
        self._journal.flush(math.inf)
        return self.flush(now)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _client(self, route: wire.Route) -> Client | None:
        """Return the client that sent the current message; None if it belongs to another role (C45)."""
        client = self.registry.client(route, self._role)
        if client.role is self._role:
            return client
        self.stats.other_role += 1
        return None

    def _request(self, command: wire.Request, client: Client | None, now: float) -> None:
        if client is None:
            return
        self.stats.requests += 1
        name, options = command.service, command.options
        number = command.id if isinstance(command.id, int) else None
        if number is not None and number in client.numbered:
            self._invalid(wire.Invalid(Reason.NUMBER_IN_USE, command.route, number), now, client)
            return
        own = name.startswith(wire.MMI)
        service = Service(name) if own else self.registry.service(name)
        deadline = NEVER if command.ttl is None else now + command.ttl
        delimited = len(command.route) > 1
        request = Request(
            client, command.header, service, command.body,
            number=number, delimited=delimited, options=options, deadline=deadline,
        )  # fmt: skip
        if own and name == wire.HELLO:
            self._exchange.asked(request, now)
            self.registry.refuse(request)
            return
        if (client.role.restricted or options.claims) and (denial := self._authorise(request)) is not None:
            self._requests.report(request, denial, now)
            self.registry.refuse(request)
            return
        self.admit(request, own, client.role, now)

    def admit(self, request: Request, own: bool, user: Role, now: float) -> None:
        """Answer, accept or refuse a request that `user` may make.  `own` tells that the broker itself answers it."""
        if request.options.broker is not None and self._address(request):
            own = False
        if own:
            # C25; C26: the reply is a FINAL whose service is the mmi name
            self.stats.mmi += 1
            body = answers.answer(request.service.name, list(request.body), self, now, user.sees)
            self._outgoing.reply(request, True, body)
        elif (drop := self._admission.refusal(request)) is not None:
            self._requests.report(request, drop, now)
        else:
            self.registry.accept(request, now)
            return
        self.registry.refuse(request)

    def _address(self, request: Request) -> bool:
        """Address a request to the broker that its options name.  Return whether that is another one than this."""
        broker, name = request.options.broker, request.service.name
        way = request.way = request.way or Way()
        way.pinned = broker == self.name
        if broker is None or way.pinned:
            return False
        way.addressed = name
        request.service = self.registry.service(wire.BROKER + broker.encode())
        return True

    def _authorise(self, request: Request) -> Drop | None:
        """Write into the options of `request` on whose behalf it is made.  Return why it is not allowed, or None."""
        role, name, options = request.client.role, request.service.name, request.options
        user = role
        if role.restricted and options.on_behalf is not None:
            if not role.on_behalf:
                return Drop.NOT_ON_BEHALF
            user = self.roles.named(options.on_behalf)
        request.options = wire.signed(options, user.signature)
        if not role.may_call(name):
            return Drop.NOT_ALLOWED
        return None if user.may_call(name) else Drop.USER_NOT_ALLOWED

    def _cancel(self, command: wire.Cancel, client: Client, now: float) -> None:
        request = client.numbered.get(command.id)
        if request is not None:
            self.registry.queue_arrived(request.service, now)
            self._requests.drop(request, Drop.CANCELLED, now)
        elif not self.registry.ended_lately(client, command.id):
            self._invalid(wire.Invalid(Reason.UNKNOWN_NUMBER, command.route, command.id), now, client)
        # else it crossed the end of the request, of which the client has been told

    def cancel(self, id_: str, now: float) -> bool:
        """Cancel a request that was listed under that id (`Watch.find`).  Return whether it was in flight."""
        request = self.watch.find(id_)
        if request is None:
            return False
        self.registry.queue_arrived(request.service, now)
        self._requests.drop(request, Drop.CANCELLED, now)
        return True

    def _invalid(self, command: wire.Invalid, now: float, client: Client | None = None) -> None:
        # C15: dropped and counted by reason; the peer's other traffic is judged on its own.  X1 clients get an ERROR.
        self._requests.count_invalid(command.reason, now)
        if client is None or command.id is None:
            return
        code, text = Code.MALFORMED, f"malformed: {command.reason}"
        if command.over_limit:
            code = Code.TOO_LARGE
            text = f"a request may have up to {self.limits.max_message} bytes in {self.limits.max_frames} frames"
        self._outgoing.error(client, command.id, code.value, text.encode(), [])

    def _asked_whether_alive(self, client: Client, now: float) -> None:
        """Answer a client's HEARTBEAT."""
        self.stats.heartbeats += 1
        # A broker that has just started waits until what other brokers offer can be reached.
        away = self.draining or self.links.untried
        answer = wire.disconnect if away else wire.heartbeat
        self._outgoing.say(client, answer(client.route, wire.CX1))

    # ── dispatching ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _dismiss_idle(self, service: Service, now: float) -> None:
        """Send the workers of `service` that hold nothing away, to another broker: for them, no request waits."""
        while (worker := service.schedule.idle_worker()) is not None:
            self._dismiss(worker, now)

    def _dismiss(self, worker: Worker, now: float) -> None:
        """Send a worker that holds nothing away, to another broker."""
        if farewell := wire.disconnect(worker.route, worker.header):
            self._outgoing.say(worker, farewell)
        self._forget(worker, Loss.CLOSING, now)

    # ── what workers say ─────────────────────────────────────────────────────────────────────────────────────────────

    def _worker(self, route: wire.Route) -> Worker | None:
        """Return the registered worker that sent the current message, unless it belongs to another role (C45)."""
        worker = self.registry.workers.get(key_of(route))
        return worker if worker is not None and worker.role is self._role else None

    def _is_foreign(self, command: Any) -> bool:
        """Return whether `command` is about a worker of another role; it is ignored and counted then (C45)."""
        worker = self.registry.workers.get(key_of(command.route))
        if worker is None or worker.role is self._role:
            return False
        self.stats.other_role += 1
        return True

    def _ready(self, command: wire.Ready, now: float) -> None:
        registry, limits = self.registry, self.limits
        if self._is_foreign(command):
            return
        if self._worker(command.route) is not None:
            self._unexpected(command, Refusal.SECOND_READY, now)
        elif command.service.startswith(wire.MMI):
            self._unexpected(command, Refusal.RESERVED_NAME, now)
        elif len(registry.workers) >= limits.max_workers:
            self._unexpected(command, Refusal.TOO_MANY_WORKERS, now)
        elif not self._role.may_offer(command.service):
            self._unexpected(command, Refusal.NOT_ALLOWED, now, command.service)
        elif command.service not in registry.services and not self._make_room(now):
            self._unexpected(command, Refusal.TOO_MANY_SERVICES, now)
        elif self.draining and command.header == wire.WX1:
            self._refuse(command.route, command.header, Refusal.DRAINING, now, self._role)
        else:
            self._workers_seen += 1
            service = registry.service(command.service)
            # Third-party workers reconnect as soon as they get DISCONNECT, so `_beat` sends it only after an interval.
            credit = 0 if self.draining else min(command.credit, limits.max_credit)
            worker = Worker(
                command.route, command.header, service, self._role, credit=credit, id=self._workers_seen, now=now
            )  # fmt: skip
            worker.name, worker.host = command.name, command.host
            worker.pid, worker.version = command.pid, command.version
            worker.dialect = command.dialect
            registry.add_worker(worker)
            self._beats.set(worker, now + limits.heartbeat)
            dialect = wire.DIALECTS[worker.header]
            text = "worker %s offers %s, credit %d (%s)"
            self._journal.note(
                now, logging.INFO, "worker-ready", text, str(worker), service.name, credit, dialect,
                lines=WORKER_LINES, fields=worker.fields,
            )  # fmt: skip

    def _make_room(self, now: float) -> bool:
        """Return whether there is room for one more service.  One that only has waiting requests makes way (C41)."""
        registry = self.registry
        if len(registry.services) < self.limits.max_services:
            return True
        service = registry.newest_unserved()
        if service is None:
            return False
        for request in service.schedule.requests:
            self._requests.drop(request, Drop.TOO_MANY_SERVICES, now)
        registry.forget(service)
        return True

    def _credit(self, command: wire.Credit, now: float) -> None:
        worker = self._seen(command, now)
        if worker is not None:
            self.registry.set_credit(worker, min(command.credit, self.limits.max_credit))

    def _release(self, command: wire.Release, now: float) -> None:
        attempt = self._attempt(command, now)
        if attempt is None:
            return
        self.registry.release(attempt)
        if not attempt.abandoned:
            attempt.request.handed -= 1
            self._requests.place_again(attempt, now)

    def _reply(self, command: wire.Reply, now: float) -> None:
        attempt = self._attempt(command, now)
        if attempt is not None:
            self._requests.replied(attempt, command, now)

    def _error(self, command: wire.Error, now: float) -> None:
        attempt = self._attempt(command, now)
        if attempt is None:
            return
        detail = command.detail
        if not detail and command.code in BROKER_CODES:
            detail = [b""]  # so that the client does not attribute it to the broker
        self.registry.release(attempt)
        self._requests.ended_by(attempt, command.code, command.text, detail, now)

    def _oversized(self, command: wire.Oversized, now: float) -> None:
        """Count a reply over the limits as invalid, and drop its request, whose reply is incomplete."""
        self._requests.count_invalid(command.reason, now)
        worker = None if self._is_foreign(command) else self._worker(command.route)
        if worker is None or worker.header != command.header:
            return
        attempt = worker.held.get(command.id) if isinstance(command.id, int) else None
        if attempt is None:
            return
        request = attempt.request
        if command.kind is not wire.PARTIAL and worker.header == wire.WX1:
            worker.last_seen = now
            self.registry.release(attempt)
            if not attempt.abandoned:
                self._requests.finish(request, Drop.REPLY_TOO_LARGE, now, attempt)
            return
        if command.kind is wire.PARTIAL or request.header == wire.CX1:
            self._requests.drop(request, Drop.REPLY_TOO_LARGE, now)
        if command.kind is not wire.PARTIAL:
            worker.oversized_reply_at = now  # it may still send one that fits (C15); if not, `tick` ends it

    def _heartbeat(self, command: wire.Heartbeat, now: float) -> None:
        self.stats.heartbeats += 1
        self._seen(command, now)

    def _disconnect(self, command: wire.Disconnect, now: float) -> None:
        # C10: at any time, even before READY.
        worker = None if self._is_foreign(command) else self._worker(command.route)
        if worker is None:
            return
        if worker.header != wire.WX1:
            self._lose([(worker, Loss.DISCONNECTED)], now)  # C16: nothing else is sent to it
        elif not worker.leaving:
            worker.last_seen = now
            self.registry.leave(worker)
            if not worker.service.available:
                self._requests.drop_no_wait(worker.service, now)
            if not worker.held:
                self._left(worker, now)

    def _left(self, worker: Worker, now: float) -> None:
        """Answer the DISCONNECT of a worker that is leaving and no longer holds any request."""
        if self.registry.workers.get(worker.key) is worker:  # else it was lost in the same turn
            self._outgoing.say(worker, wire.disconnect(worker.route, worker.header))
            self._lose([(worker, Loss.DISCONNECTED)], now)

    def _attempt(self, command: wire.Reply | wire.Error | wire.Release, now: float) -> Attempt | None:
        """Return the attempt that `command` is about; None if there is none (C14, C18, C32)."""
        worker = self._seen(command, now)
        if worker is None:
            return None
        address = command.id
        if isinstance(address, int):
            attempt = worker.held.get(address)
            if attempt is not None:
                return attempt
            if self._first_address <= address < self._requests.next_address:
                self.stats.late += 1  # C32: late or duplicated; it matches no live request
                return None
        self._unexpected(command, Refusal.WRONG_CLIENT if worker.held else Refusal.NO_REQUEST, now)
        return None

    def _seen(self, command: Any, now: float) -> Worker | None:
        """Return the registered worker that sent `command`, a sign of life (C13); disconnect any other peer (C14)."""
        worker = self.registry.workers.get(key_of(command.route))
        if worker is None:
            self._unexpected(command, Refusal.NOT_REGISTERED, now)
            return None
        if worker.role is not self._role:
            self.stats.other_role += 1  # C45
            return None
        if worker.header != command.header:
            self._unexpected(command, Refusal.WRONG_DIALECT, now)
            return None
        worker.last_seen = now
        return worker

    def _unexpected(self, command: Any, reason: Refusal, now: float, service: bytes = b"") -> None:
        """Disconnect and forget a peer that sent a valid but unexpected command (C14)."""
        self._expel(command.route, command.header, reason, now, self._role, service)

    def _expel(
        self, route: wire.Route, header: bytes, reason: Refusal, now: float, role: Role, service: bytes = b""
    ) -> None:
        """Disconnect a peer, and forget it if it is a registered worker."""
        worker = self.registry.workers.get(key_of(route))
        if worker is not None:
            worker.batch = None
        self._refuse(route, header, reason, now, role, service)
        if worker is not None:
            self._lose([(worker, Loss.REFUSED)], now)

    def _refuse(
        self, route: wire.Route, header: bytes, reason: Refusal, now: float, role: Role, service: bytes = b""
    ) -> None:
        self.stats.disconnected[reason] += 1
        self._refusals += 1
        level, text, details, why = logging.WARNING, "disconnected a worker: %s", reason.value, ""
        if reason is Refusal.NOT_REGISTERED:  # the worker registers again
            level, text = logging.INFO, "asked a worker to register again, as after a restart of the broker: %s"
        elif reason is Refusal.DRAINING:
            level, text = logging.INFO, "sent a new worker away: %s"
        elif reason is Refusal.NOT_ALLOWED:
            details = f"role {role.name} may not offer {wire.show(service)!r}: the broker's access file decides"
            if header == wire.WX1:  # the other dialects have no text
                why = details
        self._journal.note(now, level, f"disconnect-{reason}", text, details)
        if farewell := wire.disconnect(route, header, why.encode()):
            self._outgoing.add(farewell)

    # ── the end of an attempt, or of a worker ────────────────────────────────────────────────────────────────────────

    def _patience(self, worker: Worker) -> float:
        """Return the seconds of silence after which a worker is dead.  Busy workers that do not speak X1 may be silent
        for longer (C34)."""
        if worker.held and worker.header != wire.WX1:
            return max(self.limits.patience, self.limits.busy_grace)
        return self.limits.patience

    def _beat(self, worker: Worker, now: float) -> None:
        """Send a HEARTBEAT if nothing was sent for an interval, whether the worker is busy or not (C13)."""
        beats = worker.last_sent + self.limits.heartbeat
        if now >= beats and self.draining and not (worker.credit or worker.held):
            self._dismiss(worker, now)
            return
        if now >= beats:
            worker.last_sent = now
            beats = now + self.limits.heartbeat
            self._outgoing.say(worker, wire.heartbeat(worker.route, worker.header))
        due = min(beats, worker.last_seen + self._patience(worker))
        self._beats.set(worker, max(due, now))  # it is past if the worker may have been heard, but was not taken in

    def _lose(self, lost: Iterable[tuple[Worker, Loss]], now: float) -> None:
        """Forget workers; the requests that they held go to the front of the queue, and to other workers (C17)."""
        # All workers are forgotten first, so that no request is given to the next one of them.
        attempts = [attempt for worker, reason in lost for attempt in self._forget(worker, reason, now)]
        for attempt in reversed(attempts):  # each goes to the front
            if not attempt.abandoned:
                self._requests.place_again(attempt, now)

    def _forget(self, worker: Worker, reason: Loss, now: float) -> list[Attempt]:
        """Forget a worker; return what it held, which must be placed again or dropped."""
        self.stats.lost[reason] += 1
        self._beats.clear(worker)
        attempts = self.registry.remove_worker(worker)
        level = logging.INFO if reason in {Loss.DISCONNECTED, Loss.CLOSING} else logging.WARNING
        text = "worker %s of service %s is gone: %s"
        self._journal.note(
            now, level, f"worker-{reason}", text, str(worker), worker.service.name, reason,
            lines=WORKER_LINES, fields=worker.fields,
        )  # fmt: skip
        for attempt in attempts:
            if 0 <= worker.unreached_from <= attempt.turn:
                attempt.request.handed -= 1
            elif not (attempt.doubtful and reason is Loss.SILENT):
                attempt.request.attempts += 1
        if not worker.service.available:
            self._requests.drop_no_wait(worker.service, now)
        return attempts

    # ── links to other brokers (C44) ─────────────────────────────────────────────────────────────────────────────────

    def add_link(self, kind: str, role: Role | None = None, where: str = "", identity: bytes = b"") -> bytes:
        """Add a link that this broker opens, to a `peer` or to its `parent`; return the identity of its messages.

        `role` is the role of the other broker's key, and `where` its endpoint, for people.  An `identity` must be one
        that no peer can have or guess.
        """
        return self.links.add(Kind(kind), self.roles.everyone if role is None else role, where, identity).identity

    def links_due(self, now: float) -> list[bytes]:
        """Return the identities of the links for which a new connection is to be opened now."""
        return self.links.due(now)

    def link_opened(self, identity: bytes, now: float, role: Role | None = None) -> list[Message]:
        """Record that there is a new connection for a link; return what to send over it.

        `role` is the role that the other broker's key has now, if that may have changed.
        """
        self.links.opened(identity, now, role)
        return self.flush(now)

    def link_failed(self, identity: bytes, why: str, now: float) -> list[Message]:
        """Record that the connection for a link has ended, and why, or that there could be none."""
        self._requests.queue_all_arrived(now)
        self._exchange.lose(self.links.by_identity[identity], why, now)
        return self.flush(now)

    def links_to_close(self) -> list[bytes]:
        """Return the identities of links that this broker has opened, and whose connections are to be closed now."""
        return self.links.to_close()
