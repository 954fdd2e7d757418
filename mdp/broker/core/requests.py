"""The life of accepted requests: they are dispatched, answered, placed again, and dropped.

The dialogs call it for each command of a peer; the registry keeps the books.
"""

import logging
import math
from functools import partial
from typing import Any, Final

from ... import wire
from ...limits import Limits
from ...timers import NEVER
from ...wire import BROKER, size_of, x1
from ...wire.names import show
from .drops import REPORTS, Drop
from .records import Attempt, Client, Collected, Remote, Request, Service, Untold, Worker
from .scheduling.groups import MAX_GROUPS
from .service_metrics import OK, bucket_of
from .state import Federation, Observer, Part, State

MS_PER_SECOND: Final = 1000
ROUNDING_MS: Final = 0.001
"""Rounding error, in milliseconds, allowed for in the difference of two times."""


class Requests(Part):
    """The requests of one broker."""

    def __init__(self, state: State, federation: Federation, observer: Observer) -> None:
        super().__init__(state)
        limits = state.limits
        self.next_address = state.first_address
        """The address of the next dispatch."""
        self._federation = federation
        self._observer = observer
        self._congested = state.congested
        self._dispatching = state.dispatching
        # Workers that die together are found dead one after the other, over a heartbeat interval or slightly more.  So
        # when the first of them is found, one that has been silent for this long may be dead as well, and what it is
        # given now is not to blame for it.
        self._doubtful_after = max(limits.patience - 1.5 * limits.heartbeat, limits.heartbeat)

    # ── dispatching ──────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, service: Service, now: float) -> bool:
        """Dispatch the requests of a service, as far as workers have credit, here or at other brokers.

        Return False if some are left for the next turn.
        """
        schedule = service.schedule
        if len(service.arrived) <= service.room and not schedule.waiting:
            self._dispatch_arrived(service, now)
            return True
        return self._dispatch_waiting(service, now)

    def _dispatch_arrived(self, service: Service, now: float) -> None:
        """Dispatch the requests of this turn.  There is credit for all, so the order of clients does not matter."""
        registry, schedule = self._registry, service.schedule
        arrived = registry.take_arrived(service)
        taken = 0
        try:
            for request in arrived:
                taken += 1  # counted before, so that after an exception it is known which request failed
                worker = schedule.next_worker()
                if worker is not None:
                    self._dispatch(worker, request, now)
                elif (remote := service.next_remote(request)) is not None:
                    self._federation.pass_on(remote, request, now)
                else:  # the credit of other brokers is not for their own requests
                    registry.enqueue(request, now)
        except Exception:
            registry.put_back(service, arrived[taken:])
            self._recover(arrived[taken - 1], now)
            raise

    def _dispatch_waiting(self, service: Service, now: float) -> bool:
        """Dispatch waiting requests, to local workers first, as many as a turn may.  Return whether all is done."""
        registry, work = self._registry, self._dispatching
        request: Request | None = None
        try:
            while (pair := registry.take_next(service, now)) is not None:
                request, worker = pair
                if now >= request.deadline:
                    self.finish(request, _too_late(request, Drop.TTL_PASSED, now), now)
                elif isinstance(worker, Remote):
                    self._federation.pass_on(worker, request, now)
                else:
                    self._dispatch(worker, request, now)
                work.left -= 1
                if work.left <= 0:
                    return False
        except Exception:
            if request is not None:
                self._recover(request, now)
            raise
        return True

    def _recover(self, request: Request, now: float) -> None:
        """Queue a request again that could not be dispatched because of a bug, as if its worker had died."""
        if request.attempt is not None:
            self._registry.release(request.attempt)
        self._registry.blame(request)
        if request.attempts < self._limits.max_attempts:
            self._registry.enqueue(request, now, front=True)
        else:
            self.finish(request, Drop.WORKERS_LOST, now)

    def _dispatch(self, worker: Worker, request: Request, now: float) -> None:
        options = request.options
        if worker.dialect and (dialect := request.dialect):
            options = wire.with_dialect(options, dialect)
        if len(options.raw) > wire.MAX_OPTIONS:  # with what the broker has written into them
            self.finish(request, Drop.OPTIONS_TOO_LONG, now)
            return
        self._stats.dispatched += 1
        address: Any = self.next_address
        self.next_address += 1
        # Simple Pirates send no heartbeats: their silence says nothing.
        doubtful = now - worker.last_seen > self._doubtful_after and worker.header != wire.WSP
        self._registry.assign(request, worker, address, self._state.turn, now, doubtful=doubtful)
        worker.given(now)
        if worker.header == wire.WX1:
            records = self._outgoing.batch_for(worker, worker.route, wire.WX1)
            records.request_to_worker(address, ttl_of(request, now), request.handed, options.raw, request.body)
        else:
            message = wire.request_to_worker(worker.route, worker.header, address, request.body)
            self._outgoing.say(worker, message)

    # ── answers of workers and other brokers ─────────────────────────────────────────────────────────────────────────

    def replied(self, attempt: Attempt, command: wire.Reply, now: float) -> None:
        """Pass a PARTIAL or FINAL on to the client."""
        request = attempt.request
        if not command.final:
            self._stats.partials += 1
            if attempt.abandoned or request.client.gone:
                pass
            elif request.header in wire.ONE_REPLY:
                drop = self._collect(attempt, command.body)
                if drop is not None:
                    self.drop(request, drop, now)
            else:
                attempt.streamed = True
                self._outgoing.reply(request, False, command.body)
            return
        self._stats.replies += 1
        self._registry.release(attempt, answered=True)
        worker = attempt.worker
        seconds = now - request.since
        worker.done += 1
        worker.busy_seconds += seconds
        if attempt.abandoned:
            return
        if request.client.gone:
            self.finish(request, Drop.CLIENT_GONE, now, attempt)
            return
        body = command.body
        if attempt.collected is not None:
            attempt.collected.add(body)
            if not self._fits(attempt.collected):
                self.finish(request, Drop.REPLY_TOO_LARGE, now, attempt)
                return
            body = attempt.collected.frames
        self._outgoing.reply(request, True, body)
        metrics = request.service.metrics
        metrics.reply_bytes += size_of(body)
        metrics.at_worker.add(bucket_of(seconds), seconds)
        if self._observer.active:
            self._observer.ended(request, attempt, OK, now)
        self._registry.drop(request, now)

    def _collect(self, attempt: Attempt, body: list[bytes]) -> Drop | None:
        """Add to the one reply of a 0.1 or PPP client (C24); return why its request must be dropped, or None."""
        registry, client = self._registry, attempt.request.client
        if not self._fits(registry.collect(attempt, body)):
            return Drop.REPLY_TOO_LARGE
        # As `Admission` limits the memory of a client's requests.
        if registry.request_bytes + registry.used_by(client) > self._limits.max_request_bytes:
            return Drop.MEMORY_FULL
        return Drop.ROLE_MEMORY_FULL if client.role.request_bytes > client.role.max_request_bytes else None

    def _fits(self, collected: Collected) -> bool:
        """Return whether a reply is within the limits of a message."""
        return collected.size <= self._max_message and len(collected.frames) <= self._max_frames

    def ended_by(
        self,
        attempt: Attempt,
        code: int,
        text: bytes,
        detail: list[bytes],
        now: float,
        reason: bytes = b"",
        lost: int = 0,
    ) -> None:
        """End a request, which is released, with an ERROR: a worker's, or with a reason another broker's."""
        request = attempt.request
        self._stats.errors += 1
        attempt.worker.done += 1
        attempt.worker.busy_seconds += now - request.since
        if attempt.abandoned:
            return
        if request.client.gone:
            self.finish(request, Drop.CLIENT_GONE, now, attempt)
            return
        self._ended(request, attempt, f"{code}", show(text), now)
        if request.number is not None:
            lost = max(lost, request.attempts)
            self._outgoing.error(request.client, request.number, code, text, detail, reason, lost)
        else:
            self.report(request, Drop.HANDLER_FAILED, now, attempt)
        self._registry.drop(request, now)

    def place_again(self, attempt: Attempt, now: float) -> None:
        """Queue a request that was released, or whose worker was lost, if it may be retried (C17)."""
        request = attempt.request
        self._registry.redirect(request, request.service.name)  # it may have been at another broker meanwhile
        if attempt.streamed or request.client.gone:
            self.finish(request, Drop.LOST_AFTER_PARTIAL, now, attempt)
        elif request.attempts >= self._limits.max_attempts:
            self.finish(request, Drop.WORKERS_LOST, now, attempt)
        elif request.way is not None and request.way.losses >= self._limits.max_attempts:
            self.finish(request, Drop.LINKS_LOST, now, attempt)
        elif request.way is not None and request.way.addressed and not request.service.can_pass_on(request):
            self.finish(request, Drop.NO_BROKER, now, attempt)
        elif not (request.options.wait or request.service.available or request.service.can_pass_on(request)):
            self.finish(request, Drop.LAST_WORKER_LOST if request.handed else Drop.NO_WORKER, now, attempt)
        elif now >= request.deadline:
            self.finish(request, Drop.TTL_PASSED, now, attempt)
        else:
            self._stats.redispatched += 1
            request.service.metrics.redispatched += 1
            self._registry.enqueue(request, now, front=True)

    # ── the end of a request ─────────────────────────────────────────────────────────────────────────────────────────

    def drop(self, request: Request, reason: Drop, now: float) -> None:
        """Drop a request wherever it is, unless it has ended.

        An X1 worker that holds it is sent CANCEL, and may still finish it.
        """
        if request.has_ended:
            return
        attempt = request.attempt
        self.finish(request, reason, now)
        if attempt is not None:
            worker = attempt.worker
            if isinstance(worker, Remote):
                self._federation.cancel(attempt)
            elif worker.header == wire.WX1:
                worker.told(now)
                self._outgoing.batch_for(worker, worker.route, wire.WX1).signal(x1.WORKER_CANCEL, attempt.address)

    def cancel(self, client: Client, number: int, now: float) -> bool:
        """Drop a request that its client cancels.  Return whether it has made it: it may have ended on the way."""
        request = client.numbered.get(number)
        if request is None:
            return self._registry.ended_lately(client, number)
        self.drop(request, Drop.CANCELLED, now)
        return True

    def expire(self, request: Request, now: float) -> None:
        """Drop a request whose time has passed (C12)."""
        reason = Drop.TTL_PASSED if now >= request.deadline else Drop.EXPIRED
        self.drop(request, _too_late(request, reason, now), now)

    def finish(self, request: Request, reason: Drop, now: float, attempt: Attempt | None = None) -> None:
        """End a request for its client, and report why; `attempt` is its last one, if that is over.

        While messages for the client pile up, it is told later (`Endings`).
        """
        client = request.client
        if client.gone:
            reason = Drop.CLIENT_GONE
        elif self._congested and request.number is not None and client.identity in self._congested:
            self._congested[client.identity][client] = None
            untold = Untold(request, reason, attempt or request.attempt, self._text_of(request, reason))
            self._registry.put_off(request, untold, now)
            return
        self.report(request, reason, now, attempt)
        self._registry.drop(request, now)

    def tell(self, untold: Untold, now: float) -> None:
        """Tell a client of a request that has ended before."""
        self.report(untold.request, untold.reason, now, untold.attempt, untold.text)
        self._registry.drop(untold.request, now)

    def report(
        self, request: Request, reason: Drop, now: float, attempt: Attempt | None = None, text: str = ""
    ) -> None:
        """Count and log a drop.  X1 clients get an ERROR; 0.2 and 0.1 clients, which have none, time out and retry.

        `text` is that of the ERROR, if the request has ended before.
        """
        name, report = request.name, REPORTS[reason]
        attempt = attempt or request.attempt
        if self._federation.hand_back(request, attempt, reason):
            return
        if request.number is not None and report.code is not None:
            text = text or self._text_of(request, reason)
            told, detail = reason.value.encode(), _detail(request, reason, now)
            self._outgoing.error(
                request.client, request.number, report.code, text.encode(), detail, told, request.attempts
            )
        self._stats.dropped[reason] += 1
        if reason is not Drop.HANDLER_FAILED:  # which `ended_by` has counted
            self._ended(request, attempt, f"{report.code or reason}", text or reason.value, now)
        level = logging.INFO if report.quiet else logging.WARNING
        role = request.client.role
        by = f" (role {role.name})" if role.restricted else ""
        line = "dropped a request for service %s%s: %s"
        fields = partial(self._observer.fields, request, attempt)
        self._journal.note(now, level, f"drop-{reason}", line, name, by, reason, fields=fields)

    def _text_of(self, request: Request, reason: Drop) -> str:
        """Return the text of the ERROR for a request that is dropped."""
        return text_of(reason, request, self._limits, self._registry.why_given_up.get(request))

    def _ended(self, request: Request, attempt: Attempt | None, outcome: str, text: str, now: float) -> None:
        """Count a request that was not answered with a FINAL; `text` says why."""
        request.service.metrics.ended(outcome)
        request.client.role.failed += 1
        self._observer.failed(request, attempt, outcome, text, now)
        if self._observer.active:
            self._observer.ended(request, attempt, outcome, now)


def text_of(drop: Drop, request: Request, limits: Limits, given_up: str | None = None) -> str:
    """Return the text of the ERROR that tells the client why `request` was dropped.

    `given_up` tells why a worker has given it up before.
    """
    text = REPORTS[drop].text
    if "{" not in text:
        return text
    if drop is Drop.NO_BROKER:
        return text.format(broker=request.service.name.removeprefix(BROKER).decode())
    if drop not in {Drop.EXPIRED, Drop.TTL_PASSED, Drop.LIMIT_PASSED}:
        worker = "its worker was lost" if given_up is None else f"its worker gave it up: {given_up}"
        return text.format(request=request, limits=limits, worker=worker, max_groups=MAX_GROUPS)
    if request.attempt is not None:
        return "its time passed while a worker held it"
    service = request.service
    workers = f"{service.available} offer it" if service.available else "none offers it"
    if service.available and not service.schedule.capacity:
        workers += ", all busy"
    if limits_of_service := service.schedule.limits:
        workers += f"; the service is limited ({limits_of_service})"
    endless = drop is Drop.EXPIRED or request.deadline >= NEVER
    what = f"the broker's expiry of {limits.expiry:g} s" if endless else "its time"
    if given_up is not None:
        workers += f"; a worker gave it up before: {given_up}"
    return text.format(what=what, workers=workers)


def _detail(request: Request, reason: Drop, now: float) -> list[bytes]:
    """Return the detail of the ERROR for a request that is dropped: after how many seconds to try again, if known."""
    groups = request.service.schedule.groups
    if reason is not Drop.LIMITED or groups is None:
        return []
    seconds = groups.starts_after(request.options.group, now)
    return [f"{seconds:.3f}".encode()] if seconds else []


def _too_late(request: Request, reason: Drop, now: float) -> Drop:
    """Return why a request is too late: because of a limit, if that holds it back or a worker is free."""
    groups = request.service.schedule.groups
    if request.attempt is not None or groups is None or not groups.limits:
        return reason
    held_back = request.service.schedule.free or groups.holds_back(request.options.group, now)
    return Drop.LIMIT_PASSED if held_back else reason


def ttl_of(request: Request, now: float) -> int:
    """Return the ttl of a request that is sent now, in whole milliseconds; 0 if it has none."""
    if request.deadline >= NEVER:
        return 0
    return min(max(1, math.ceil((request.deadline - now) * MS_PER_SECOND - ROUNDING_MS)), x1.MAX_TTL_MS)
