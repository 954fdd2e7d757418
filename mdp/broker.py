"""The broker as a machine: fed with messages and the time, it says what to send.  No socket, no clock.

`receive`, `tick`, `unreachable`, `gone` and `close` each return the messages to send, in order, as lists of frames that
begin with the identity of the ROUTER's peer.  `deadline` says when `tick` next has something to do.  Rules are named as
in the specification's words and by their conformance number (C11 to C26).
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ..mmi import answers
from . import wire
from .codes import Code
from .journal import Drop, Journal, Loss, Refusal, Stats
from .limits import Limits
from .registry import NEVER, REMEMBERED, Collected, Registry, Request, Service, Worker, envelope_of
from .timers import Timers
from .wire import Message

FROM_CLIENT: Final = (wire.Request, wire.Cancel, wire.Heartbeat)
GIVEN_UP: Final = 60.0
"""An X1 client that has missed messages hears nothing, so that it connects anew, until it was silent for so long."""
CROSSINGS: Final = 100
"""Workers that a request may be handed to while they leave, and that does not count as an attempt."""
GRAIN: Final = 0.01
"""Seconds by which a request may be late to expire."""
CODES: Final[Mapping[Drop, Code]] = {
    Drop.EXPIRED: Code.TIME_PASSED,
    Drop.TTL_PASSED: Code.TIME_PASSED,
    Drop.QUEUE_FULL: Code.QUEUE_FULL,
    Drop.MEMORY_FULL: Code.QUEUE_FULL,
    Drop.TOO_MANY_SERVICES: Code.QUEUE_FULL,
    Drop.DRAINING: Code.DRAINING,
    Drop.CLOSING: Code.DRAINING,
    Drop.WORKERS_LOST: Code.WORKER_LOST,
    Drop.LOST_AFTER_PARTIAL: Code.WORKER_LOST,
    Drop.REPLY_TOO_LARGE: Code.TOO_LARGE,
    Drop.NO_WORKER: Code.NO_WORKER,
    Drop.CANCELLED: Code.CANCELLED,
}
"""The code of the ERROR by which an X1 client is told.  CLIENT_GONE has none; HANDLER_FAILED has the worker's own."""
QUIET: Final = {Drop.CLIENT_GONE, Drop.EXPIRED, Drop.TTL_PASSED, Drop.NO_WORKER, Drop.CANCELLED, Drop.HANDLER_FAILED}
"""What a broker is not to blame for."""


class Broker:
    """One Majordomo broker."""

    def __init__(self, limits: Limits | None = None, *, now: float, logger: logging.Logger | None = None) -> None:
        self.limits = limits or Limits()
        self.started = now
        self.draining = False
        self.registry = Registry()
        self.stats = Stats()
        self._journal = Journal(logger or logging.getLogger("zmdp.broker"))
        # Workers that die together are found dead one after the other, within a heartbeat interval or somewhat more.
        self._overdue = max(self.limits.patience - 1.5 * self.limits.heartbeat, self.limits.heartbeat)
        self._beats: Timers[Worker] = Timers(self.limits.heartbeat / 20)
        self._expiries: Timers[Request] = Timers(min(max(self.limits.expiry / 1000, 0.001), GRAIN))
        self._given_up: dict[bytes, float] = {}
        """The last of the peers that did not keep up, and so have missed messages, and until when they hear nothing."""
        # Those that each request is held against.
        self._max_message, self._max_frames = self.limits.max_message, self.limits.max_frames
        self._max_queue, self._max_queued_bytes = self.limits.max_queue, self.limits.max_queued_bytes
        self._max_services = self.limits.max_services
        self._expiry = self.limits.expiry
        self._round = 0
        """Counts what came from outside; all that is sent because of it belongs to one round."""
        self._out: list[Message] = []
        self._on: Final[dict[type, Callable[[Any, float], None]]] = {
            wire.Cancel: self._cancel,
            wire.Failure: self._failure,
            wire.Heartbeat: self._heartbeat,
            wire.Ready: self._ready,
            wire.Disconnect: self._disconnect,
            wire.Invalid: self._invalid,
        }

    # ── what drives the machine ──────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> list[Message]:
        """What to send because `message` came; its first frame is the identity of the peer."""
        self._round += 1
        command = wire.decode_peer(message, self._max_message, self._max_frames)
        if self._given_up and self._is_ignored(command, now):
            return []
        # The two that come with every request are looked for first.
        if isinstance(command, wire.Reply):
            self._reply(command, now)
        elif isinstance(command, wire.Request):
            self._request(command, now)
        else:
            self._on[type(command)](command, now)
            if isinstance(command, wire.Invalid) and command.over_limit:
                self._oversized(wire.without_shared(message), now)
        return self._sends()

    def tick(self, now: float) -> list[Message]:
        """What to send because of the time: heartbeats, and what follows from a worker's death."""
        self._round += 1
        lost: list[tuple[Service, Request | None]] = []
        for worker in self._beats.pop_due(now):
            if now >= worker.last_seen + self.limits.patience:
                lost.append((worker.service, self._forget(worker, Loss.SILENT, now)))
            elif (
                worker.request is not None
                and worker.spoiled is not None
                and now >= worker.spoiled + self.limits.patience
            ):
                self._abandon(worker.request, Drop.REPLY_TOO_LARGE, now)
                self._refuse(worker.route, worker.header, Refusal.OVERSIZED_REPLY, now)
                lost.append((worker.service, self._forget(worker, Loss.REFUSED, now)))
            else:
                self._beat(worker, now)
        self._replace(lost, now)
        for request in self._expiries.pop_due(now):
            # C12
            self._give_up(request, Drop.TTL_PASSED if now >= request.deadline else Drop.EXPIRED, now)
        return self._sends()

    def deadline(self) -> float | None:
        """When `tick` next has something to do, or None."""
        beat, expiry = self._beats.next_due(), self._expiries.next_due()
        if beat is None or expiry is None:
            return expiry if beat is None else beat
        return min(beat, expiry)

    def unreachable(self, message: Message, now: float) -> list[Message]:
        """What to send because the peer that `message` was for is no longer connected, and did not get it."""
        for worker in self.registry.workers_of(message[0]):
            # What is sent in one round is sent in order: a REQUEST of the same round comes after `message`, or just
            # before.
            if worker.round == self._round or wire.is_work(message, worker.route, worker.header):
                worker.reached = False
        self._given_up.pop(message[0], None)
        return self._gone(message[0], now)

    def gone(self, identity: bytes, now: float) -> list[Message]:
        """What to send because the peer of that identity, though it may be there, is to be treated as gone.

        What was for it is lost.  An X1 client must not go on waiting for that, so from now on it hears nothing on this
        connection: it finds the broker silent, connects anew, and sends again what is outstanding.
        """
        self._given_up[identity] = now + GIVEN_UP
        if len(self._given_up) > REMEMBERED:
            del self._given_up[next(iter(self._given_up))]
        return self._gone(identity, now)

    def _is_ignored(self, command: wire.FromPeer | wire.Invalid, now: float) -> bool:
        """Whether `command` is an X1 client's that has been given up.  What is invalid is counted all the same."""
        from_x1_client = isinstance(command, FROM_CLIENT) and command.header == wire.CX1
        return from_x1_client and self._is_given_up(command.route[0], now)

    def _is_given_up(self, identity: bytes, now: float) -> bool:
        until = self._given_up.get(identity)
        if until is None:
            return False
        if now >= until:
            del self._given_up[identity]
            return False
        self._given_up[identity] = now + GIVEN_UP  # what it has just said is unanswered too, and it must notice
        return True

    def _gone(self, identity: bytes, now: float) -> list[Message]:
        for request in self.registry.running_for(identity):
            self._abandon(request, Drop.CLIENT_GONE, now)
        for request in self.registry.waiting_for(identity):
            self._give_up(request, Drop.CLIENT_GONE, now)
        self._lose(self.registry.workers_of(identity), Loss.UNREACHABLE, now)
        return self._sends()

    def failed(self, now: float) -> None:
        """Take note of an exception that came out of `receive`: a bug, told in the log with its traceback."""
        self.stats.failures += 1
        self._out = []
        text = "a message was dropped, because of a bug in the broker; please report this:\n%s"
        self._journal.note(now, logging.ERROR, "failure", text, traceback.format_exc())

    def drain(self) -> None:
        """Take no new requests from now on; those accepted before are finished while there are workers."""
        self.draining = True

    @property
    def drained(self) -> bool:
        """Whether nothing is left to finish.  A waiting request whose service has workers keeps them all at work."""
        return not self.registry.running

    def close(self, now: float) -> list[Message]:
        """ERROR for every X1 request, DISCONNECT to every worker; the machine is at its end."""
        for request in list(self.registry.numbered.values()):
            self._give_up(request, Drop.CLOSING, now)
        for worker in list(self.registry.workers.values()):
            self._forget(worker, Loss.CLOSING, now)
            self.registry.forget_if_empty(worker.service)
            self._out.append(wire.disconnect(worker.route, worker.header))
        return self._sends()

    def _sends(self) -> list[Message]:
        out, self._out = self._out, []
        return out

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _request(self, command: wire.Request, now: float) -> None:
        self.stats.requests += 1
        name = command.service
        numbered = command.header == wire.CX1
        client, envelope = self.registry.client(command.route[0]), envelope_of(command.route)
        if numbered and envelope in client.numbered:
            self._invalid(wire.Invalid(wire.Reason.NUMBER_IN_USE, command.route, name), now)
            return
        if name.startswith(wire.MMI):
            # C25; C26: the reply is a FINAL whose service is the mmi name
            self.stats.mmi += 1
            if numbered:
                self.registry.remember(command.route)
            body = answers.answer(name, command.body, self, now)
            self._out.append(wire.answer(command.route, command.header, True, name, body))
            return
        service = self.registry.service(name)
        options = command.options
        deadline = NEVER if options.ttl is None else now + options.ttl
        body = command.body
        request = Request(client, envelope, command.header, service, body, options=options, deadline=deadline)
        drop = self._refusal(request, now)
        if drop is None:
            self._place(request, now)
            if numbered:
                client.numbered[envelope] = request
        else:
            self.registry.forget_if_empty(service)
            self._drop(request, drop, now)

    def _cancel(self, command: wire.Cancel, now: float) -> None:
        request = self.registry.numbered_as(command.route)
        if request is not None and request.service.name == command.service:
            self._give_up(request, Drop.CANCELLED, now)
        elif request is not None or not self.registry.ended_lately(command.route):
            self._invalid(wire.Invalid(wire.Reason.UNKNOWN_NUMBER, command.route, command.service), now)
        # else it met the request's end on the way: the client knows by that

    def _refusal(self, request: Request, now: float) -> Drop | None:
        """Why a request cannot be taken, or None."""
        service = request.service
        if self.draining:
            return Drop.DRAINING
        if now >= request.deadline:
            return Drop.TTL_PASSED
        if service.idle.first is not None:
            return None
        if not (request.options.wait or service.workers):
            return Drop.NO_WORKER
        if len(self.registry.services) > self._max_services:  # this one is among them
            return Drop.TOO_MANY_SERVICES
        if service.queue.size >= self._max_queue:
            return Drop.QUEUE_FULL
        if self.registry.queued_bytes + request.charge() > self._max_queued_bytes:
            return Drop.MEMORY_FULL
        return None

    def _place(self, request: Request, now: float, *, front: bool = False) -> None:
        """Give `request` to the worker that was idle longest (C21), or let it wait (C12)."""
        worker = request.service.idle.first
        if worker is not None:
            self._dispatch(worker, request, now)
            return
        request.late = True
        self.registry.enqueue(request, front=front)
        expires = now + self._expiry
        self._expiries.set(request, expires if expires < request.deadline else request.deadline)

    def _answer(self, request: Request, body: list[bytes], final: bool, now: float) -> None:
        """Pass a PARTIAL or FINAL on to the client, in its dialect and behind its envelope (C22)."""
        if request.abandoned:
            return
        if request.header == wire.C01 and not (final and request.collected is None):
            # C24: a 0.1 client gets one reply, the frames of the PARTIALs before those of the FINAL
            collected = request.collected = request.collected or Collected()
            collected.add(body)
            if collected.size > self._max_message or len(collected.frames) > self._max_frames:
                self._abandon(request, Drop.REPLY_TOO_LARGE, now)
                return
            if not final:
                return
            body = collected.frames
        elif not final:
            request.streamed = True
        elif request.header == wire.CX1:
            self.registry.end_number(request)
        self._out.append(wire.answer(request.route, request.header, final, request.service.name, body))

    def _give_up(self, request: Request, reason: Drop, now: float) -> None:
        """Drop a request that waits or that a worker holds."""
        if request.worker is None:
            self._drop_waiting(request, reason, now)
            self.registry.forget_if_empty(request.service)
        else:
            self._abandon(request, reason, now)

    def _drop_waiting(self, request: Request, reason: Drop, now: float) -> None:
        """Drop a request that waits; `forget_if_empty` is to follow."""
        self._expiries.clear(request)
        self.registry.dequeue(request)
        self._drop(request, reason, now)

    def _abandon(self, request: Request, reason: Drop, now: float) -> None:
        """Send nothing more for a request that a worker holds; an X1 worker is told, any may finish it."""
        if request.abandoned:
            return
        request.abandoned = True
        request.collected = None
        self._expiries.clear(request)
        worker = request.worker
        self._drop(request, reason, now)
        if worker is not None and worker.header == wire.WX1:
            worker.last_sent = now
            self._out.append(wire.withdraw(worker.route, request.client.identity))

    def _drop(self, request: Request, reason: Drop, now: float) -> None:
        """Give up on a request: an X1 client is told; of 0.2 and 0.1 clients, which cannot be, the retry covers it."""
        if request.header == wire.CX1:
            self.registry.end_number(request)
            if reason is not Drop.CLIENT_GONE:
                told = self._explain(request, reason).encode()
                self._out.append(wire.error(request.route, request.service.name, CODES[reason].frame, told))
        self.stats.dropped[reason] += 1
        level = logging.INFO if reason in QUIET else logging.WARNING
        text = "dropped a request for service %s from client %s: %s"
        self._journal.note(now, level, f"drop-{reason}", text, request.service.name, request.client.identity, reason)

    def _explain(self, request: Request, reason: Drop) -> str:
        """The text of the ERROR that tells an X1 client of `reason`."""
        service, limits = request.service, self.limits
        match reason:
            case Drop.EXPIRED | Drop.TTL_PASSED if request.worker is not None:
                return "its time passed while a worker was at it"
            case Drop.EXPIRED | Drop.TTL_PASSED:
                there = f"{len(service.workers)} offer it" if service.workers else "none offers it"
                there += ", all busy" if service.workers and service.idle.first is None else ""
                what = "its time" if reason is Drop.TTL_PASSED else f"the broker's expiry of {limits.expiry:g} s"
                return f"{what} passed before a worker was free for it: {there}"
            case Drop.QUEUE_FULL:
                return f"{limits.max_queue} requests wait for the service already: retry later"
            case Drop.MEMORY_FULL:
                return f"what waits at the broker takes {limits.max_queued_bytes} bytes already: retry later"
            case Drop.TOO_MANY_SERVICES:
                return f"no worker offers the service, and {limits.max_services} services are in use: retry later"
            case Drop.DRAINING:
                return "the broker is draining and takes no new requests: retry later, or at another broker"
            case Drop.CLOSING:
                return "the broker ended before the request was done: retry later, or at another broker"
            case Drop.WORKERS_LOST:
                return f"its worker was lost, and it is not tried again: {request.handed} had it"
            case Drop.LOST_AFTER_PARTIAL:
                return "its worker was lost after a PARTIAL, so it cannot be repeated"
            case Drop.REPLY_TOO_LARGE:
                return f"the reply is over the limits of {limits.max_message} bytes in {limits.max_frames} frames"
            case Drop.NO_WORKER:
                return "no worker offers the service"
            case _:
                return str(reason)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ready(self, command: wire.Ready, now: float) -> None:
        registry, limits = self.registry, self.limits
        worker = registry.worker(command.route, command.header)
        if worker is not None:
            self._unexpected(command, Refusal.SECOND_READY, now)
        elif command.service.startswith(wire.MMI):
            self._unexpected(command, Refusal.RESERVED_NAME, now)
        elif len(registry.workers) >= limits.max_workers:
            self._unexpected(command, Refusal.TOO_MANY_WORKERS, now)
        elif command.service not in registry.services and len(registry.services) >= limits.max_services:
            self._unexpected(command, Refusal.TOO_MANY_SERVICES, now)
        else:
            worker = Worker(command.route, command.header, registry.service(command.service), now)
            registry.add_worker(worker)
            self._beats.set(worker, now + limits.heartbeat)
            text = "worker %s offers service %s (MDP/%s)"
            dialect = wire.DIALECTS[worker.header]
            self._journal.note(now, logging.INFO, "worker-ready", text, worker.identity, command.service, dialect)
            self._next(worker, now)

    def _reply(self, command: wire.Reply, now: float) -> None:
        worker = self._holder(command, now)
        if worker is None or worker.request is None:
            return
        request = worker.request
        if not command.final:
            self.stats.partials += 1
            self._answer(request, command.body, False, now)
        else:
            self.stats.replies += 1
            self._end(worker, request)
            self._answer(request, command.body, True, now)
            self._next(worker, now)

    def _failure(self, command: wire.Failure, now: float) -> None:
        worker = self._holder(command, now)
        if worker is None or worker.request is None:
            return
        request = worker.request
        self.stats.errors += 1
        self._end(worker, request)
        if request.abandoned:
            pass
        elif request.header == wire.CX1:
            self.registry.end_number(request)
            name = request.service.name
            self._out.append(wire.error(request.route, name, command.code, command.text, command.detail))
        else:
            self._drop(request, Drop.HANDLER_FAILED, now)
        self._next(worker, now)

    def _holder(self, command: wire.Reply | wire.Failure, now: float) -> Worker | None:
        """The worker that sent `command` for the request it holds; anything else is unexpected."""
        worker = self._seen(command, now)
        if worker is None:
            return None
        if worker.request is None:
            self._unexpected(command, Refusal.NO_REQUEST, now)  # C14
            return None
        if command.client != worker.request.client.identity:
            self._unexpected(command, Refusal.WRONG_CLIENT, now)  # C18
            return None
        return worker

    def _end(self, worker: Worker, request: Request) -> None:
        """The worker is done with the request."""
        self.registry.end(worker, request)
        self._expiries.clear(request)

    def _heartbeat(self, command: wire.Heartbeat, now: float) -> None:
        self.stats.heartbeats += 1
        if command.header == wire.CX1:
            self._out.append(wire.heartbeat(command.route, wire.CX1))  # a client asks whether the broker is there
        else:
            self._seen(command, now)

    def _disconnect(self, command: wire.Disconnect, now: float) -> None:
        # C10: at any time, even before READY.  C16: nothing is sent to it any more.
        worker = self.registry.worker(command.route, command.header)
        if worker is not None:
            self._lose([worker], Loss.DISCONNECTED, now)

    def _invalid(self, command: wire.Invalid, now: float) -> None:
        # C15: dropped and counted by reason; whatever else the peer sends is judged on its own.  An X1 client is told.
        self.stats.invalid[command.reason] += 1
        self._journal.note(now, logging.WARNING, command.reason, "ignored an invalid message: %s", command.reason)
        if command.route and not self._is_given_up(command.route[0], now):
            code = Code.TOO_LARGE if command.over_limit else Code.MALFORMED
            told = f"malformed: {command.reason}"
            if code is Code.TOO_LARGE:
                told = f"a message may have {self.limits.max_message} bytes in {self.limits.max_frames} frames"
            self._out.append(wire.error(command.route, command.service, code.frame, told.encode()))

    def _oversized(self, message: Message, now: float) -> None:
        """A reply over the limits is dropped as invalid, but it leaves a gap in a stream, or a worker that is done."""
        found = wire.reply_in(message)
        if found is None:
            return
        route, header, kind = found
        worker = self.registry.workers.get(route)
        if worker is None or worker.header != header or worker.request is None:
            return
        request = worker.request
        if kind is not wire.Kind.PARTIAL and worker.header == wire.WX1:
            worker.last_seen = now
            self._end(worker, request)
            if not request.abandoned:
                self._drop(request, Drop.REPLY_TOO_LARGE, now)
            self._next(worker, now)
            return
        if kind is wire.Kind.PARTIAL or request.header == wire.CX1:
            self._abandon(request, Drop.REPLY_TOO_LARGE, now)
        if kind is not wire.Kind.PARTIAL:
            worker.spoiled = now  # it may yet send one that fits (C15); if not, `tick` ends it

    def _seen(self, command: wire.Reply | wire.Failure | wire.Heartbeat, now: float) -> Worker | None:
        """The registered worker that sent `command`, alive by it (C13); anybody else is disconnected (C14)."""
        worker = self.registry.worker(command.route, command.header)
        if worker is None:
            self._unexpected(command, Refusal.NOT_REGISTERED, now)
            return None
        if worker.header != command.header:
            self._unexpected(command, Refusal.WRONG_DIALECT, now)
            return None
        worker.last_seen = now
        return worker

    def _unexpected(
        self, command: wire.Reply | wire.Failure | wire.Heartbeat | wire.Ready, reason: Refusal, now: float
    ) -> None:
        """Valid but unexpected: DISCONNECT to that peer, and forget it (C14)."""
        self._refuse(command.route, command.header, reason, now)
        worker = self.registry.worker(command.route, command.header)
        if worker is not None:
            self._lose([worker], Loss.REFUSED, now)

    def _refuse(self, route: wire.Route, header: bytes, reason: Refusal, now: float) -> None:
        self.stats.disconnected[reason] += 1
        text = "disconnected worker %s: %s"
        self._journal.note(now, logging.WARNING, f"disconnect-{reason}", text, route[0], reason)
        self._out.append(wire.disconnect(route, header))

    def _next(self, worker: Worker, now: float) -> None:
        """`worker` is free: it gets the request whose turn it is, or stands last among the idle (C20, C21)."""
        while (request := self.registry.next_request(worker.service)) is not None:
            self._expiries.clear(request)
            if now < request.deadline:
                self._dispatch(worker, request, now)
                return
            self._drop(request, Drop.TTL_PASSED, now)
        self.registry.rest(worker)

    def _dispatch(self, worker: Worker, request: Request, now: float) -> None:
        self.stats.dispatched += 1
        worker.service.dispatched += 1
        worker.overdue = now - worker.last_seen > self._overdue
        worker.reached = True
        worker.round = self._round
        worker.spoiled = None
        worker.began = worker.last_sent = now
        self.registry.begin(worker, request)
        request.handed += 1
        options = request.options.raw
        if request.handed > 1 or (request.late and request.deadline < NEVER):
            left = request.deadline - now if request.deadline < NEVER else None
            options = wire.renewed(request.options, left, request.handed)
        self._out.append(wire.work(worker.route, worker.header, request.client.identity, request.body, options))
        if request.deadline < NEVER:
            self._expiries.set(request, request.deadline)

    def _beat(self, worker: Worker, now: float) -> None:
        """HEARTBEAT if nothing else was sent for an interval, whether the worker is busy or not (C13)."""
        beats = worker.last_sent + self.limits.heartbeat
        if now >= beats:
            worker.last_sent = now
            beats = now + self.limits.heartbeat
            self._out.append(wire.heartbeat(worker.route, worker.header))
        self._beats.set(worker, min(beats, worker.last_seen + self.limits.patience))

    def _lose(self, workers: Iterable[Worker], reason: Loss, now: float) -> None:
        """Forget workers; the requests they held go to the front of the queue and to others (C17)."""
        self._replace([(worker.service, self._forget(worker, reason, now)) for worker in workers], now)

    def _replace(self, lost: list[tuple[Service, Request | None]], now: float) -> None:
        """Deal with what workers have left, the services they offered and the requests they held: all of these workers
        have been forgotten before, lest a request be given to the next of them."""
        for _, request in lost:
            self._repeat(request, now)
        for service, _ in lost:
            self.registry.forget_if_empty(service)

    def _forget(self, worker: Worker, reason: Loss, now: float) -> Request | None:
        """Forget a worker; returns the request it held.  `_replace` is to follow."""
        self.stats.lost[reason] += 1
        self._beats.clear(worker)
        request = self.registry.remove_worker(worker)
        level = logging.INFO if reason in {Loss.DISCONNECTED, Loss.CLOSING} else logging.WARNING
        text = "worker %s of service %s is gone: %s"
        self._journal.note(now, level, f"worker-{reason}", text, worker.identity, worker.service.name, reason)
        if request is not None:
            self._expiries.clear(request)
            request.handed -= not worker.reached
            excused = (worker.overdue and reason is Loss.SILENT) or self._crossed(worker, request, reason, now)
            if worker.reached and not excused:
                request.attempts += 1
        if not worker.service.workers:
            for unwilling in list(worker.service.unwilling):
                # A client may take 404 for the word that nobody has begun with it.
                self._drop_waiting(unwilling, Drop.WORKERS_LOST if unwilling.handed else Drop.NO_WORKER, now)
        return request

    def _crossed(self, worker: Worker, request: Request, reason: Loss, now: float) -> bool:
        """Whether a slot's DISCONNECT had most likely been sent before it got `request`.

        A connection that ends says DISCONNECT for one slot after the other, and the next of them would get the request.
        """
        early = reason is Loss.DISCONNECTED and now - worker.began < self.limits.heartbeat
        return early and bool(worker.slot) and request.handed < CROSSINGS

    def _repeat(self, request: Request | None, now: float) -> None:
        """Find another place for the request of a worker that was lost, if it may be repeated (C17)."""
        if request is None or request.abandoned:
            return
        if request.streamed:
            self._drop(request, Drop.LOST_AFTER_PARTIAL, now)
        elif request.attempts >= self.limits.max_attempts or not (request.options.wait or request.service.workers):
            self._drop(request, Drop.WORKERS_LOST, now)
        elif now >= request.deadline:
            self._drop(request, Drop.TTL_PASSED, now)
        else:
            self.stats.redispatched += 1
            request.collected = None
            self._place(request, now, front=True)
