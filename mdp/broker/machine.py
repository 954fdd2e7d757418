"""Sans-I/O broker: given messages and the current time, it returns messages to send.  No socket, no clock.

A *turn* takes in any number of messages (`take`) and ends with `flush`, which dispatches the requests that arrived, and
puts everything for one peer into one message if the peer speaks the batched form.  `receive`, `tick`, `unreachable`,
`gone` and `close` each do one thing and end the turn.  Messages are lists of frames that begin with the peer's routing
id.  `deadline` returns when `tick` is due.  Rules are cited by their conformance numbers (C11 to C45).
"""

import logging
import math
import secrets
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final

from ...mmi import answers
from .. import wire
from ..codes import Code
from ..limits import Limits
from ..timers import Timers
from ..wire import Message, Reason, batch
from .drops import REPORTS, Drop, text_of
from .journal import WORKER_LINES, Journal, Loss, Refusal, Stats
from .registry import NEVER, Attempt, Client, Collected, PeerKey, Registry, Request, Service, Worker, key_of

GIVEN_UP: Final = 60.0
"""An X1 client that missed messages is not answered until it has been silent for this many seconds, so that it
reconnects."""
MAX_GIVEN_UP: Final = 5000
"""Maximum number of such clients that are remembered."""
MS_PER_SECOND: Final = 1000
ROUNDING_MS: Final = 0.001
"""Rounding error, in milliseconds, allowed for in the difference of two times."""
BROKER_CODES: Final = {403, 404, 413, 429, 502, 503}
"""Codes that a client attributes to the broker, unless the ERROR has a detail."""
FROM_CLIENT: Final = (wire.Request, wire.Cancel, wire.Heartbeat)

# The command bytes of batched records.
_PARTIAL, _FINAL, _ERROR, _CANCEL_TO_WORKER = 2, 3, 4, 8


class Broker:
    """One Majordomo broker.

    `first_address` is the first address of a dispatch, for tests; by default it is random, so that a worker's late
    reply to an earlier broker does not match (C32).
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        now: float,
        logger: logging.Logger | None = None,
        first_address: int | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.started = now
        self.draining = False
        self.registry = Registry(self.limits.expiry)
        self.stats = Stats()
        self.turn = 0
        """The number of the current turn."""
        self._journal = Journal(logger or logging.getLogger("zmdp.broker"))
        # Workers that die together are found dead one after the other, over a heartbeat interval or slightly more.
        self._doubtful_after = max(self.limits.patience - 1.5 * self.limits.heartbeat, self.limits.heartbeat)
        self._beats: Timers[Worker] = Timers(self.limits.heartbeat / 20)
        self._first_address = secrets.randbits(60) if first_address is None else first_address
        self._next_address = self._first_address
        self._workers_seen = 0
        self._refusals = 0
        self._given_up: dict[PeerKey, float] = {}
        """Peers that did not keep up and so missed messages, and until when they are not answered.  A proxy stands for
        all peers behind it."""
        # Copies of the limits that are checked for each request.
        self._max_message, self._max_frames = self.limits.max_message, self.limits.max_frames
        self._max_queue, self._max_queued_bytes = self.limits.max_queue, self.limits.max_queued_bytes
        self._max_services = self.limits.max_services
        self._batched = False
        """Whether the current message is in the batched form."""
        self._out: list[Any] = []
        """Messages to send, and the open batches."""
        self._open: list[Client | Worker] = []
        """The peers of the open batches."""
        self._on: Final[dict[type, Callable[[Any, float], None]]] = {
            wire.Cancel: self._cancel,
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

    def take(self, message: Message, now: float) -> None:
        """Take in `message`, which came from the peer whose routing id is its first frame."""
        command = wire.decode_peer(message, self._max_message, self._max_frames)
        if isinstance(command, wire.Batched):
            self._take_batch(message, command, now)
            return
        self._batched = False
        if self._given_up and self._is_ignored(command, now):
            return
        # The two commands of every request are checked first.
        if isinstance(command, wire.Reply):
            self._reply(command, now)
        elif isinstance(command, wire.Request):
            # Only X1 has two forms.
            x1 = command.header == wire.CX1
            self._request(command, self._client(command.route) if x1 else self.registry.client(command.route), now)
        else:
            self._on[type(command)](command, now)

    def _take_batch(self, message: Message, found: wire.Batched, now: float) -> None:
        """Take in a message in the batched form (C43)."""
        self._batched = True
        if found.header == wire.CX1 and self._given_up and self._is_given_up(found.route, now):
            return
        if found.bare:
            self._heartbeat(wire.Heartbeat(found.route, found.header), now)
        elif found.header == wire.CX1:
            client = self._client(found.route)
            for command in batch.from_client(message, found.at, found.route, self._max_message, self._max_frames):
                if isinstance(command, wire.Request):
                    self._request(command, client, now)
                else:
                    self._on[type(command)](command, now)
        else:
            refusals = self._refusals
            for command in batch.from_worker(message, found.at, found.route, self._max_message, self._max_frames):
                if isinstance(command, wire.Reply):
                    self._reply(command, now)
                else:
                    self._on[type(command)](command, now)
                if self._refusals != refusals:
                    return  # one DISCONNECT is enough
            worker = self.registry.workers.get(key_of(found.route))
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
                    self._settle(service, now)
                except Exception:  # noqa: BLE001 - a bug, which must not affect other services
                    self.failed(now)
                    service.unsettled = False
                    registry.touch(service)
        self.turn += 1
        out, self._out = self._out, []
        if not self._open:
            return out
        for peer in self._open:
            peer.batch = None
        self._open = []
        messages: list[Message] = []
        for each in out:
            if isinstance(each, list):
                messages.append(each)
            else:
                messages += each.messages()
        return messages

    def receive(self, message: Message, now: float) -> list[Message]:
        """A turn of one message: return what to send because of it."""
        self.take(message, now)
        return self.flush(now)

    def tick(self, now: float) -> list[Message]:
        """Return what to send because of the time: heartbeats, and the consequences of silent workers and expiries."""
        self._journal.flush(now)
        self._queue_all_arrived(now)
        lost: list[tuple[Worker, Loss]] = []
        for worker in self._beats.pop_due(now):
            oversized_reply_at = worker.oversized_reply_at
            if now >= worker.last_seen + self._patience(worker):
                lost.append((worker, Loss.SILENT))
            elif oversized_reply_at is not None and worker.held and now >= oversized_reply_at + self.limits.patience:
                for attempt in list(worker.held.values()):
                    self._drop(attempt.request, Drop.REPLY_TOO_LARGE, now)
                self._refuse(worker.route, worker.header, Refusal.OVERSIZED_REPLY, now)
                lost.append((worker, Loss.REFUSED))
            else:
                self._beat(worker, now)
        self._lose(lost, now)
        for request in self.registry.expiries.pop_due(now):
            # C12
            self._drop(request, Drop.TTL_PASSED if now >= request.deadline else Drop.EXPIRED, now)
        return self.flush(now)

    def deadline(self) -> float | None:
        """Return when `tick` is due, or None."""
        due = self._beats.next_due()
        for other in (self.registry.expiries.next_due(), self._journal.deadline()):
            if other is not None and (due is None or other < due):
                due = other
        return due

    def unreachable(self, identity: bytes, turn: int, now: float) -> list[Message]:
        """Return what to send because the peer with that routing id is no longer connected.

        It has received nothing of what was sent in `turn` and since.
        """
        for worker in self.registry.workers_at(identity):
            worker.unreached_from = turn
        self._given_up.pop(identity, None)
        return self._gone(identity, now)

    def probe(self, identity: bytes, now: float) -> list[Message]:
        """Return a HEARTBEAT to each peer behind that routing id that can take one, to see whether it is connected."""
        for worker in self.registry.workers_at(identity):
            worker.last_sent = now
            self._say(worker, self._heartbeat_to(worker))
        for client in self.registry.clients_at(identity):
            if client.batch_route is not None:
                self._say(client, [*client.batch_route, wire.CX1])
            elif client.numbered:
                self._out.append(wire.heartbeat((*client.path, b""), wire.CX1))
        return self.flush(now)

    def gone(self, identity: bytes, now: float) -> list[Message]:
        """Return what to send because the peer with that routing id is treated as gone, though it may be connected.

        Messages to it were lost.  So that an X1 client does not wait for them forever, it is no longer answered on this
        connection: it considers the broker dead, reconnects, and resends its outstanding requests.
        """
        self._give_up(identity, now)
        return self._gone(identity, now)

    def _gone(self, identity: bytes, now: float) -> list[Message]:
        self._queue_all_arrived(now)
        for client in self.registry.clients_at(identity):
            for request in [*client.running, *self.registry.waiting_for(client)]:
                self._drop(request, Drop.CLIENT_GONE, now)
        self._lose([(worker, Loss.UNREACHABLE) for worker in self.registry.workers_at(identity)], now)
        return self.flush(now)

    def failed(self, now: float) -> None:
        """Count and log the current exception, which is a bug in the broker, with its traceback."""
        self.stats.internal_errors += 1
        text = "internal error, please report this bug:\n%s"
        self._journal.note(now, logging.ERROR, "internal-error", text, traceback.format_exc())

    def drain(self) -> None:
        """Accept no more requests; those already accepted are finished while there are workers."""
        self.draining = True

    @property
    def drained(self) -> bool:
        """Whether no worker holds a request.  While requests wait that workers can take, the workers hold some."""
        return not self.registry.running

    def close(self, now: float) -> list[Message]:
        """Return an ERROR for every X1 request and a DISCONNECT to every worker; end the machine."""
        self._queue_all_arrived(now)
        for request in self.registry.numbered:
            self._drop(request, Drop.CLOSING, now)
        for worker in list(self.registry.workers.values()):
            self._say(worker, wire.disconnect(worker.route, worker.header))
            for attempt in self._forget(worker, Loss.CLOSING, now):
                if not attempt.abandoned:
                    self.registry.drop(attempt.request)
        self._journal.flush(math.inf)
        return self.flush(now)

    def _is_ignored(self, command: wire.FromPeer | wire.Invalid, now: float) -> bool:
        """Return whether `command` comes from an X1 client that was given up.  Invalid messages are counted anyway."""
        from_x1_client = isinstance(command, FROM_CLIENT) and command.header == wire.CX1
        return from_x1_client and self._is_given_up(command.route, now)

    def _is_given_up(self, route: wire.Route, now: float) -> bool:
        key = key_of(route)
        until = max(self._given_up.get(key, 0.0), self._given_up.get(route[0], 0.0))
        if now >= until:
            self._given_up.pop(key, None)
            self._given_up.pop(route[0], None)
            return False
        # This message stays unanswered too, which extends the time.  A peer behind a proxy reconnects to the proxy, so
        # it is given up by itself; otherwise its peers would keep the whole proxy given up.
        self._give_up(key, now)
        return True

    def _give_up(self, key: PeerKey, now: float) -> None:
        self._given_up[key] = now + GIVEN_UP
        if len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    # ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _batch_for(self, peer: Client | Worker, route: wire.Route, header: bytes) -> Any:
        """Return the open batch of a peer that speaks the batched form."""
        if peer.batch is None:
            peer.batch = batch.Batch(route, header)
            self._out.append(peer.batch)
            self._open.append(peer)
        return peer.batch

    def _say(self, peer: Client | Worker, message: Message) -> None:
        """Send a framed message, after what the peer's open batch contains so far."""
        peer.batch = None
        self._out.append(message)

    def _client(self, route: wire.Route) -> Client:
        """Return the client that sent the current message; it is answered in the form that the message has."""
        client = self.registry.client(route)
        if self._batched:
            client.batch_route = route
        elif client.batch_route is not None:
            client.batch_route = client.batch = None
        return client

    def _send_reply(self, request: Request, final: bool, body: list[bytes]) -> None:
        client, number = request.client, request.number
        route = client.batch_route
        if route is not None and isinstance(number, int) and len(body) <= batch.MAX_BODY_FRAMES:
            self._batch_for(client, route, wire.CX1).reply(_FINAL if final else _PARTIAL, number, body)
        else:
            self._say(client, wire.reply_to_client(request.route, request.header, final, request.service.name, body))

    def _send_error(
        self, client: Client, number: wire.RequestId, service: bytes, code: int, text: bytes, detail: list[bytes]
    ) -> None:
        route = client.batch_route
        if route is not None and isinstance(number, int):
            self._batch_for(client, route, wire.CX1).error(_ERROR, number, code, text, detail)
        else:
            envelope = (*client.path, *wire.envelope_of(number))
            self._say(client, wire.error_to_client(envelope, service, code, text, detail))

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _request(self, command: wire.Request, client: Client, now: float) -> None:
        self.stats.requests += 1
        name, number, options = command.service, command.id, command.options
        if number is not None and number in client.numbered:
            self._invalid(wire.Invalid(Reason.NUMBER_IN_USE, command.route, number, name), now)
            return
        own = name.startswith(wire.MMI)
        service = Service(name) if own else self.registry.service(name)
        deadline = NEVER if options.ttl is None else now + options.ttl
        delimited = len(command.route) > 1
        request = Request(
            client, command.header, service, command.body,
            number=number, delimited=delimited, options=options, deadline=deadline,
        )  # fmt: skip
        if own:
            # C25; C26: the reply is a FINAL whose service is the mmi name
            self.stats.mmi += 1
            self._send_reply(request, True, answers.answer(name, command.body, self, now))
        elif (drop := self._refusal(request, now)) is not None:
            self._report(request, drop, now)
        else:
            self.registry.accept(request, now)
            return
        self.registry.refuse(request)

    def _refusal(self, request: Request, now: float) -> Drop | None:
        """Return why a request cannot be accepted, or None."""
        service = request.service
        if self.draining:
            return Drop.DRAINING
        if now >= request.deadline:
            return Drop.TTL_PASSED
        waiting = service.waiting
        if waiting < service.schedule.capacity:
            return None
        if not (request.options.wait or service.available):
            return Drop.NO_WORKER
        if service.name not in self.registry.services and len(self.registry.services) >= self._max_services:
            return Drop.TOO_MANY_SERVICES
        if waiting - service.schedule.capacity >= self._max_queue:
            return Drop.QUEUE_FULL
        if self.registry.queued_bytes + request.charge() > self._max_queued_bytes:
            return Drop.MEMORY_FULL
        return None

    def _cancel(self, command: wire.Cancel, now: float) -> None:
        client = self._client(command.route)
        request = client.numbered.get(command.id)
        if request is not None and command.service in {None, request.service.name}:
            self.registry.queue_arrived(request.service, now)
            self._drop(request, Drop.CANCELLED, now)
        elif request is not None or not self.registry.ended_lately(client, command.id):
            invalid = wire.Invalid(Reason.UNKNOWN_NUMBER, command.route, command.id, command.service or b"")
            self._invalid(invalid, now)
        # else it crossed the end of the request, of which the client has been told

    def _invalid(self, command: wire.Invalid, now: float) -> None:
        # C15: dropped and counted by reason; the peer's other traffic is judged on its own.  X1 clients get an ERROR.
        self._count_invalid(command.reason, now)
        if command.route and not self._is_given_up(command.route, now):
            code, text = Code.MALFORMED, f"malformed: {command.reason}"
            if command.over_limit:
                code = Code.TOO_LARGE
                text = f"a message may have up to {self.limits.max_message} bytes in {self.limits.max_frames} frames"
            client = self._client(command.route)
            self._send_error(client, command.id, command.service, code.value, text.encode(), [])

    def _count_invalid(self, reason: Reason, now: float) -> None:
        self.stats.invalid[reason] += 1
        self._journal.note(now, logging.WARNING, reason, "ignored an invalid message: %s", reason)

    # ── dispatching ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self, service: Service, now: float) -> None:
        """Dispatch the requests of a service, as far as its workers have credit."""
        registry, schedule = self.registry, service.schedule
        arrived: list[Request] = []
        taken = 0
        request: Request | None = None
        try:
            if len(service.arrived) <= schedule.capacity and not schedule.waiting:
                # There is credit for all, so the order of clients does not matter.
                arrived, service.arrived = service.arrived, []
                for request in arrived:
                    taken += 1
                    worker = schedule.next_worker()
                    assert worker is not None  # noqa: S101 - there is credit for all
                    self._dispatch(worker, request, now)
            else:
                registry.queue_arrived(service, now)
                while (pair := registry.take_next(service)) is not None:
                    request, worker = pair
                    if now < request.deadline:
                        self._dispatch(worker, request, now)
                    else:
                        self._finish(request, Drop.TTL_PASSED, now)
        except Exception:
            service.arrived = arrived[taken:]
            if request is not None:
                self._recover(request, now)
            raise
        registry.settled(service)

    def _recover(self, request: Request, now: float) -> None:
        """Queue a request again that could not be dispatched because of a bug, as if its worker had died."""
        if request.attempt is not None:
            self.registry.release(request.attempt)
        request.attempts += 1
        if request.attempts < self.limits.max_attempts:
            self.registry.enqueue(request, now, front=True)
        else:
            self._finish(request, Drop.WORKERS_LOST, now)

    def _queue_all_arrived(self, now: float) -> None:
        for service in self.registry.unsettled:
            self.registry.queue_arrived(service, now)

    def _dispatch(self, worker: Worker, request: Request, now: float) -> None:
        self.stats.dispatched += 1
        address = self._next_address
        self._next_address += 1
        doubtful = now - worker.last_seen > self._doubtful_after
        self.registry.assign(request, worker, address, self.turn, doubtful=doubtful)
        worker.oversized_reply_at = None
        worker.last_sent = now
        ttl = None
        if request.deadline < NEVER:
            ttl = max(1, math.ceil((request.deadline - now) * MS_PER_SECOND - ROUNDING_MS))
        options = request.options
        if worker.dialect and request.header != wire.CX1:
            options = wire.LEGACY_OPTIONS[request.header]
        if worker.batched and len(request.body) <= batch.MAX_BODY_FRAMES:
            raw, beside = wire.options_without_ttl(options), ttl or 0
            if beside > batch.MAX_TTL_MS:
                raw, beside = wire.options_with(options, ttl, 1), 0
            if len(raw) <= wire.MAX_OPTIONS:  # options that were encoded again may have become longer
                packed = self._batch_for(worker, worker.route, wire.WX1)
                packed.request_to_worker(address, beside, request.handed, raw, request.body)
                return
        if request.handed > 1 or (ttl is not None and (request.late or options.ttl_apart)):
            raw = wire.options_with(options, ttl, request.handed)
        else:
            raw = options.raw
        self._say(worker, wire.request_to_worker(worker.route, worker.header, address, request.body, raw))

    # ── the end of a request ─────────────────────────────────────────────────────────────────────────────────────────

    def _drop(self, request: Request, reason: Drop, now: float) -> None:
        """Drop a request wherever it is.  An X1 worker that holds it is sent CANCEL, and may still finish it."""
        attempt = request.attempt
        if attempt is None:
            self._finish(request, reason, now)
        elif not attempt.abandoned:
            self._finish(request, reason, now)
            worker = attempt.worker
            if worker.header == wire.WX1:
                worker.last_sent = now
                if worker.batched:
                    self._batch_for(worker, worker.route, wire.WX1).signal(_CANCEL_TO_WORKER, attempt.address)
                else:
                    self._out.append(wire.cancel_to_worker(worker.route, attempt.address))

    def _finish(self, request: Request, reason: Drop, now: float) -> None:
        """End a request for its client, and report why."""
        self._report(request, reason, now)
        self.registry.drop(request)

    def _report(self, request: Request, reason: Drop, now: float) -> None:
        """Count and log a drop.  X1 clients get an ERROR; 0.2 and 0.1 clients, which have none, time out and retry."""
        name, report = request.service.name, REPORTS[reason]
        if request.header == wire.CX1 and report.code is not None:
            text = text_of(reason, request, self.limits).encode()
            self._send_error(request.client, request.number, name, report.code, text, [])
        self.stats.dropped[reason] += 1
        level = logging.INFO if report.quiet else logging.WARNING
        self._journal.note(now, level, f"drop-{reason}", "dropped a request for service %s: %s", name, reason)

    # ── what workers say ─────────────────────────────────────────────────────────────────────────────────────────────

    def _ready(self, command: wire.Ready, now: float) -> None:
        registry, limits = self.registry, self.limits
        if key_of(command.route) in registry.workers:
            self._unexpected(command, Refusal.SECOND_READY, now)
        elif command.service.startswith(wire.MMI):
            self._unexpected(command, Refusal.RESERVED_NAME, now)
        elif len(registry.workers) >= limits.max_workers:
            self._unexpected(command, Refusal.TOO_MANY_WORKERS, now)
        elif command.service not in registry.services and len(registry.services) >= limits.max_services:
            self._unexpected(command, Refusal.TOO_MANY_SERVICES, now)
        else:
            self._workers_seen += 1
            service = registry.service(command.service)
            credit = min(command.credit, limits.max_credit)
            worker = Worker(command.route, command.header, service, credit, self._workers_seen, now)
            worker.name, worker.host = command.name, command.host
            worker.pid, worker.version = command.pid, command.version
            worker.dialect = command.dialect
            worker.batched = self._batched
            registry.add_worker(worker)
            self._beats.set(worker, now + limits.heartbeat)
            dialect = wire.DIALECTS[worker.header]
            text = "worker %s offers %s, credit %d (%s)"
            self._journal.note(
                now, logging.INFO, "worker-ready", text, str(worker), service.name, credit, dialect, lines=WORKER_LINES
            )

    def _credit(self, command: wire.Credit, now: float) -> None:
        worker = self._seen(command, now)
        if worker is not None:
            self.registry.set_credit(worker, min(command.credit, self.limits.max_credit))

    def _release(self, command: wire.Release, now: float) -> None:
        attempt = self._attempt(command, now)
        if attempt is None:
            return
        request = attempt.request
        self.registry.release(attempt)
        if not attempt.abandoned:
            request.handed -= 1
            self._place_again(attempt, now)

    def _reply(self, command: wire.Reply, now: float) -> None:
        attempt = self._attempt(command, now)
        if attempt is None:
            return
        request = attempt.request
        if not command.final:
            self.stats.partials += 1
            if attempt.abandoned:
                pass
            elif request.header == wire.C01:
                if not self._collect(attempt, command.body):
                    self._drop(request, Drop.REPLY_TOO_LARGE, now)
            else:
                attempt.streamed = True
                self._send_reply(request, False, command.body)
            return
        self.stats.replies += 1
        self.registry.release(attempt)
        if attempt.abandoned:
            return
        body = command.body
        if attempt.collected is not None:
            if not self._collect(attempt, body):
                self._finish(request, Drop.REPLY_TOO_LARGE, now)
                return
            body = attempt.collected.frames
        self._send_reply(request, True, body)
        self.registry.drop(request)

    def _collect(self, attempt: Attempt, body: list[bytes]) -> bool:
        """Add to the one reply of a 0.1 client (C24); return False if it then exceeds the limits of a message."""
        collected = attempt.collected = attempt.collected or Collected()
        collected.add(body)
        return collected.size <= self._max_message and len(collected.frames) <= self._max_frames

    def _error(self, command: wire.Error, now: float) -> None:
        attempt = self._attempt(command, now)
        if attempt is None:
            return
        request = attempt.request
        self.stats.errors += 1
        self.registry.release(attempt)
        if attempt.abandoned:
            return
        if request.header == wire.CX1:
            detail = command.detail
            if not detail and command.code in BROKER_CODES:
                detail = [b""]  # so that the client does not attribute it to the broker
            self._send_error(
                request.client, request.number, request.service.name, command.code, command.text, detail
            )  # fmt: skip
        else:
            self._report(request, Drop.HANDLER_FAILED, now)
        self.registry.drop(request)

    def _oversized(self, command: wire.Oversized, now: float) -> None:
        """Count a reply over the limits as invalid, and drop its request, whose reply is incomplete."""
        self._count_invalid(command.reason, now)
        worker = self.registry.workers.get(key_of(command.route))
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
                self._finish(request, Drop.REPLY_TOO_LARGE, now)
            return
        if command.kind is wire.PARTIAL or request.header == wire.CX1:
            self._drop(request, Drop.REPLY_TOO_LARGE, now)
        if command.kind is not wire.PARTIAL:
            worker.oversized_reply_at = now  # it may still send one that fits (C15); if not, `tick` ends it

    def _heartbeat(self, command: wire.Heartbeat, now: float) -> None:
        self.stats.heartbeats += 1
        if command.header == wire.CX1:
            # A client asks whether the broker is there.
            self._out.append([*command.route, wire.CX1] if self._batched else wire.heartbeat(command.route, wire.CX1))
        else:
            self._seen(command, now)

    def _disconnect(self, command: wire.Disconnect, now: float) -> None:
        # C10: at any time, even before READY.
        worker = self.registry.workers.get(key_of(command.route))
        if worker is None:
            return
        if worker.header != wire.WX1:
            self._lose([(worker, Loss.DISCONNECTED)], now)  # C16: nothing else is sent to it
        elif not worker.leaving:
            worker.last_seen = now
            self.registry.leave(worker)
            if not worker.service.available:
                self._drop_no_wait(worker.service, now)
            if not worker.held:
                self._left(worker, now)

    def _left(self, worker: Worker, now: float) -> None:
        """Answer the DISCONNECT of a worker that is leaving and no longer holds any request."""
        if self.registry.workers.get(worker.key) is worker:  # else it was lost in the same turn
            self._say(worker, wire.disconnect(worker.route, worker.header))
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
            if self._first_address <= address < self._next_address:
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
        if worker.header != command.header:
            self._unexpected(command, Refusal.WRONG_DIALECT, now)
            return None
        if worker.batched != self._batched:
            worker.batched, worker.batch = self._batched, None
        worker.last_seen = now
        return worker

    def _unexpected(self, command: Any, reason: Refusal, now: float) -> None:
        """Disconnect and forget a peer that sent a valid but unexpected command (C14)."""
        worker = self.registry.workers.get(key_of(command.route))
        if worker is not None:
            worker.batch = None
        self._refuse(command.route, command.header, reason, now)
        if worker is not None:
            self._lose([(worker, Loss.REFUSED)], now)

    def _refuse(self, route: wire.Route, header: bytes, reason: Refusal, now: float) -> None:
        self.stats.disconnected[reason] += 1
        self._refusals += 1
        level, text = logging.WARNING, "disconnected a worker: %s"
        if reason is Refusal.NOT_REGISTERED:  # the worker registers again
            level, text = logging.INFO, "asked a worker to register again, as after a restart of the broker: %s"
        self._journal.note(now, level, f"disconnect-{reason}", text, reason)
        self._out.append(wire.disconnect(route, header))

    # ── the end of an attempt, or of a worker ────────────────────────────────────────────────────────────────────────

    def _patience(self, worker: Worker) -> float:
        """Return the seconds of silence after which a worker is dead.  Busy 0.2 and 0.1 workers may be silent for
        longer (C34)."""
        if worker.held and worker.header != wire.WX1:
            return max(self.limits.patience, self.limits.busy_grace)
        return self.limits.patience

    def _beat(self, worker: Worker, now: float) -> None:
        """Send a HEARTBEAT if nothing was sent for an interval, whether the worker is busy or not (C13)."""
        beats = worker.last_sent + self.limits.heartbeat
        if now >= beats:
            worker.last_sent = now
            beats = now + self.limits.heartbeat
            self._say(worker, self._heartbeat_to(worker))
        self._beats.set(worker, min(beats, worker.last_seen + self._patience(worker)))

    @staticmethod
    def _heartbeat_to(worker: Worker) -> Message:
        return [*worker.route, wire.WX1] if worker.batched else wire.heartbeat(worker.route, worker.header)

    def _lose(self, lost: Iterable[tuple[Worker, Loss]], now: float) -> None:
        """Forget workers; the requests that they held go to the front of the queue, and to other workers (C17)."""
        # All workers are forgotten first, so that no request is given to the next one of them.
        attempts = [attempt for worker, reason in lost for attempt in self._forget(worker, reason, now)]
        for attempt in reversed(attempts):  # each goes to the front
            if not attempt.abandoned:
                self._place_again(attempt, now)

    def _forget(self, worker: Worker, reason: Loss, now: float) -> list[Attempt]:
        """Forget a worker; return what it held, which must be placed again or dropped."""
        self.stats.lost[reason] += 1
        self._beats.clear(worker)
        attempts = self.registry.remove_worker(worker)
        level = logging.INFO if reason in {Loss.DISCONNECTED, Loss.CLOSING} else logging.WARNING
        text = "worker %s of service %s is gone: %s"
        self._journal.note(
            now, level, f"worker-{reason}", text, str(worker), worker.service.name, reason, lines=WORKER_LINES
        )
        for attempt in attempts:
            if 0 <= worker.unreached_from <= attempt.turn:
                attempt.request.handed -= 1
            elif not (attempt.doubtful and reason is Loss.SILENT):
                attempt.request.attempts += 1
        if not worker.service.available:
            self._drop_no_wait(worker.service, now)
        return attempts

    def _drop_no_wait(self, service: Service, now: float) -> None:
        """Drop the requests that must not wait, since the last worker of their service is gone."""
        self.registry.queue_arrived(service, now)
        for request in list(service.no_wait):
            # 404 tells the client that no worker has begun with the request.
            self._drop(request, Drop.WORKERS_LOST if request.handed else Drop.NO_WORKER, now)

    def _place_again(self, attempt: Attempt, now: float) -> None:
        """Queue a request that was released, or whose worker was lost, if it may be retried (C17)."""
        request = attempt.request
        if attempt.streamed:
            self._finish(request, Drop.LOST_AFTER_PARTIAL, now)
        elif request.attempts >= self.limits.max_attempts:
            self._finish(request, Drop.WORKERS_LOST, now)
        elif not (request.options.wait or request.service.available):
            self._finish(request, Drop.WORKERS_LOST if request.handed else Drop.NO_WORKER, now)
        elif now >= request.deadline:
            self._finish(request, Drop.TTL_PASSED, now)
        else:
            self.stats.redispatched += 1
            self.registry.enqueue(request, now, front=True)
