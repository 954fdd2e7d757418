"""The broker as a machine: fed with messages and the time, it says what to send.  No socket, no clock.

`receive`, `tick`, `unreachable`, `gone` and `close` each return the messages to send, in order, as lists of frames that
begin with the identity of the ROUTER's peer.  `deadline` says when `tick` next has something to do.  Rules are named as
in the specification's words and by their conformance number (C11 to C26).
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any, Final

from ..mmi import answers
from . import wire
from .journal import Drop, Journal, Loss, Refusal, Stats
from .limits import Limits
from .registry import Registry, Request, Worker
from .timers import Timers
from .wire import Message

OVERSIZED: Final = {wire.Reason.TOO_LARGE, wire.Reason.TOO_MANY_FRAMES}


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
        self._expiries: Timers[Request] = Timers(max(self.limits.expiry / 1000, 0.001))
        self._out: list[Message] = []
        self._on: Final[dict[type, Callable[[Any, float], None]]] = {
            wire.Request: self._request,
            wire.Reply: self._reply,
            wire.Heartbeat: self._heartbeat,
            wire.Ready: self._ready,
            wire.Disconnect: self._disconnect,
            wire.Invalid: self._invalid,
        }

    # ── what drives the machine ──────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> list[Message]:
        """What to send because `message` came; its first frame is the identity of the peer."""
        command = wire.decode_peer(message, max_message=self.limits.max_message, max_frames=self.limits.max_frames)
        self._on[type(command)](command, now)
        if type(command) is wire.Invalid and command.reason in OVERSIZED:
            self._oversized(message, now)
        return self._sends()

    def tick(self, now: float) -> list[Message]:
        """What to send because of the time: heartbeats, and what follows from a worker's death."""
        lost = []
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
        for _, request in lost:  # only now, lest it be given to the next of them
            self._repeat(request, now)
        for service, _ in lost:
            self.registry.forget_if_empty(service)
        for request in self._expiries.pop_due(now):
            # C12
            self.registry.dequeue(request)
            self.registry.forget_if_empty(request.service)
            self._drop(request, Drop.EXPIRED, now)
        return self._sends()

    def deadline(self) -> float | None:
        """When `tick` next has something to do, or None."""
        beat, expiry = self._beats.next_due(), self._expiries.next_due()
        if beat is None or expiry is None:
            return expiry if beat is None else beat
        return min(beat, expiry)

    def unreachable(self, message: Message, now: float) -> list[Message]:
        """What to send because the peer that `message` was for is no longer connected, and did not get it."""
        worker = self.registry.workers.get(message[0])
        if worker is not None and wire.is_work(message, worker.route, worker.header):
            worker.reached = False
        return self.gone(message[0], now)

    def gone(self, identity: bytes, now: float) -> list[Message]:
        """What to send because the peer of that identity is gone, or is to be treated so."""
        for request in self.registry.running_for(identity):
            self._abandon(request, Drop.CLIENT_GONE, now)
        worker = self.registry.workers.get(identity)
        if worker is not None:
            self._lose(worker, Loss.UNREACHABLE, now)
        for request in self.registry.waiting_for(identity):
            self._expiries.clear(request)
            self.registry.dequeue(request)
            self.registry.forget_if_empty(request.service)
            self._drop(request, Drop.CLIENT_GONE, now)
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
        """DISCONNECT to every worker; the machine is at its end."""
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
        if name.startswith(wire.MMI):
            # C25; C26: the reply is a FINAL whose service is the mmi name
            self.stats.mmi += 1
            body = answers.answer(name, command.body, self, now)
            self._out.append(wire.answer(command.route, command.header, True, name, body))
            return
        service = self.registry.service(name)
        request = Request(command.route, command.header, service, command.body)
        drop = self._refusal(request)
        if drop is None:
            self._place(request, now)
        else:
            self.registry.forget_if_empty(service)
            self._drop(request, drop, now)

    def _refusal(self, request: Request) -> Drop | None:
        """Why a request cannot be taken, or None."""
        service, limits = request.service, self.limits
        if self.draining:
            return Drop.DRAINING
        if service.idle:
            return None
        if len(self.registry.services) > limits.max_services:  # this one is among them
            return Drop.TOO_MANY_SERVICES
        if service.queue.size >= limits.max_queue:
            return Drop.QUEUE_FULL
        if self.registry.queued_bytes + request.size > limits.max_queued_bytes:
            return Drop.MEMORY_FULL
        return None

    def _place(self, request: Request, now: float, *, front: bool = False) -> None:
        """Give `request` to the worker that was idle longest (C21), or let it wait (C12)."""
        idle = request.service.idle
        if idle:
            self._dispatch(idle.popitem(last=False)[0], request, now)
        else:
            self.registry.enqueue(request, front=front)
            self._expiries.set(request, now + self.limits.expiry)

    def _answer(self, request: Request, body: list[bytes], final: bool, now: float) -> None:
        """Pass a PARTIAL or FINAL on to the client, in its dialect and behind its envelope (C22)."""
        if request.abandoned:
            return
        if request.header == wire.C01:
            # C24: a 0.1 client gets one reply, the frames of the PARTIALs before those of the FINAL
            if request.collected is None:
                request.collected = []
            request.collected += body
            request.collected_bytes += sum(map(len, body))
            if request.collected_bytes > self.limits.max_message or len(request.collected) > self.limits.max_frames:
                self._abandon(request, Drop.REPLY_TOO_LARGE, now)
                return
            if not final:
                return
            body = request.collected
        elif not final:
            request.streamed = True
        self._out.append(wire.answer(request.route, request.header, final, request.service.name, body))

    def _abandon(self, request: Request, reason: Drop, now: float) -> None:
        """Send nothing more for a request that a worker holds; the worker may finish it."""
        if not request.abandoned:
            request.abandoned = True
            request.collected = None
            self._drop(request, reason, now)

    def _drop(self, request: Request, reason: Drop, now: float) -> None:
        """Give up on a request; 0.2 and 0.1 have no way to tell the client, so its own retry covers it."""
        self.stats.dropped[reason] += 1
        level = logging.INFO if reason in {Drop.CLIENT_GONE, Drop.EXPIRED} else logging.WARNING
        text = "dropped a request for service %s from client %s: %s"
        self._journal.note(now, level, f"drop-{reason}", text, request.service.name, request.client, reason)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ready(self, command: wire.Ready, now: float) -> None:
        registry, limits = self.registry, self.limits
        worker = registry.workers.get(command.route[0])
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
        worker = self._seen(command, now)
        if worker is None:
            return
        request = worker.request
        if request is None:
            self._unexpected(command, Refusal.NO_REQUEST, now)  # C14
        elif command.client != request.client:
            self._unexpected(command, Refusal.WRONG_CLIENT, now)  # C18
        elif not command.final:
            self.stats.partials += 1
            self._answer(request, command.body, False, now)
        else:
            self.stats.replies += 1
            self.registry.end(worker, request)
            self._answer(request, command.body, True, now)
            self._next(worker, now)

    def _heartbeat(self, command: wire.Heartbeat, now: float) -> None:
        self.stats.heartbeats += 1
        self._seen(command, now)

    def _disconnect(self, command: wire.Disconnect, now: float) -> None:
        # C10: at any time, even before READY.  C16: nothing is sent to it any more.
        worker = self.registry.workers.get(command.route[0])
        if worker is not None:
            self._lose(worker, Loss.DISCONNECTED, now)

    def _invalid(self, command: wire.Invalid, now: float) -> None:
        # C15: dropped and counted by reason; whatever else the peer sends is judged on its own.
        self.stats.invalid[command.reason] += 1
        self._journal.note(now, logging.WARNING, command.reason, "ignored an invalid message: %s", command.reason)

    def _oversized(self, message: Message, now: float) -> None:
        """A reply over the limits is dropped as invalid, but it leaves a gap in a stream, or a worker that is done."""
        worker = self.registry.workers.get(message[0])
        if worker is None or worker.request is None:
            return
        kind = wire.reply_kind(message, worker.route, worker.header)
        if kind is wire.Kind.PARTIAL:
            self._abandon(worker.request, Drop.REPLY_TOO_LARGE, now)
        elif kind is wire.Kind.FINAL:
            worker.spoiled = now  # it may yet send one that fits (C15); if not, `tick` ends it

    def _seen(self, command: wire.Reply | wire.Heartbeat, now: float) -> Worker | None:
        """The registered worker that sent `command`, alive by it (C13); anybody else is disconnected (C14)."""
        worker = self.registry.workers.get(command.route[0])
        if worker is None:
            self._unexpected(command, Refusal.NOT_REGISTERED, now)
            return None
        if worker.header != command.header:
            self._unexpected(command, Refusal.WRONG_DIALECT, now)
            return None
        worker.last_seen = now
        return worker

    def _unexpected(self, command: wire.Reply | wire.Heartbeat | wire.Ready, reason: Refusal, now: float) -> None:
        """Valid but unexpected: DISCONNECT to that peer, and forget it (C14)."""
        self._refuse(command.route, command.header, reason, now)
        worker = self.registry.workers.get(command.route[0])
        if worker is not None:
            self._lose(worker, Loss.REFUSED, now)

    def _refuse(self, route: wire.Route, header: bytes, reason: Refusal, now: float) -> None:
        self.stats.disconnected[reason] += 1
        text = "disconnected worker %s: %s"
        self._journal.note(now, logging.WARNING, f"disconnect-{reason}", text, route[0], reason)
        self._out.append(wire.disconnect(route, header))

    def _next(self, worker: Worker, now: float) -> None:
        """`worker` is free: it gets the request whose turn it is, or stands last among the idle (C20, C21)."""
        request = self.registry.next_request(worker.service)
        if request is None:
            worker.service.idle[worker] = None
        else:
            self._expiries.clear(request)
            self._dispatch(worker, request, now)

    def _dispatch(self, worker: Worker, request: Request, now: float) -> None:
        self.stats.dispatched += 1
        worker.overdue = now - worker.last_seen > self._overdue
        worker.reached = True
        worker.spoiled = None
        worker.last_sent = now
        self.registry.begin(worker, request)
        self._out.append(wire.work(worker.route, worker.header, request.client, request.body))

    def _beat(self, worker: Worker, now: float) -> None:
        """HEARTBEAT if nothing else was sent for an interval, whether the worker is busy or not (C13)."""
        beats = worker.last_sent + self.limits.heartbeat
        if now >= beats:
            worker.last_sent = now
            beats = now + self.limits.heartbeat
            self._out.append(wire.heartbeat(worker.route, worker.header))
        self._beats.set(worker, min(beats, worker.last_seen + self.limits.patience))

    def _lose(self, worker: Worker, reason: Loss, now: float) -> None:
        """Forget a worker; the request it held goes to the front of the queue and to another (C17)."""
        self._repeat(self._forget(worker, reason, now), now)
        self.registry.forget_if_empty(worker.service)

    def _forget(self, worker: Worker, reason: Loss, now: float) -> Request | None:
        """Forget a worker; returns the request it held.  `_repeat` and `forget_if_empty` are to follow."""
        self.stats.lost[reason] += 1
        self._beats.clear(worker)
        request = self.registry.remove_worker(worker)
        level = logging.INFO if reason in {Loss.DISCONNECTED, Loss.CLOSING} else logging.WARNING
        text = "worker %s of service %s is gone: %s"
        self._journal.note(now, level, f"worker-{reason}", text, worker.identity, worker.service.name, reason)
        if request is not None and worker.reached and not (worker.overdue and reason is Loss.SILENT):
            request.attempts += 1
        return request

    def _repeat(self, request: Request | None, now: float) -> None:
        """Find another place for the request of a worker that was lost, if it may be repeated (C17)."""
        if request is None or request.abandoned:
            return
        if request.streamed:
            self._drop(request, Drop.LOST_AFTER_PARTIAL, now)
        elif request.attempts >= self.limits.max_attempts:
            self._drop(request, Drop.WORKERS_LOST, now)
        else:
            self.stats.redispatched += 1
            request.collected, request.collected_bytes = None, 0
            self._place(request, now, front=True)
