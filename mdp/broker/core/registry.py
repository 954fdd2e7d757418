"""The requests of a broker, from when they are accepted until they end.

The registry owns every transition of a request, so that its counts, indexes and timers are always consistent:

    accept → [enqueue → take_next] → assign → release → drop        a worker is done with it
                 ↑______________________________|                   the worker was lost, or released it

`drop` also ends a request that is queued or that a worker holds.

No frames, no clock, no socket.  Every operation takes constant time, whatever the number of peers and requests.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from ...timers import NEVER, Timers
from ...wire import WX1, show, size_of
from .directory import Directory
from .records import FRAME_OVERHEAD, Attempt, Client, Collected, PeerKey, Remote, Request, Service, Untold, Worker
from .service_metrics import bucket_of

REMEMBERED: Final = 5000
"""Minimum number of ended X1 requests that are remembered, to recognise a CANCEL that crossed the end."""
EXPIRY_RESOLUTION: Final = 0.01
"""Maximum delay of an expiry, in seconds."""


class Registry:
    """All requests of a broker, and where they are.

    `directory` has the services for which they are, and the clients and workers from and to which they go.  `expiry` is
    how long a request may wait, in seconds.
    """

    def __init__(self, directory: Directory, expiry: float = 300.0) -> None:
        self.directory = directory
        self.why_given_up: dict[Request, str] = {}
        """Why a worker has given up a request that has not ended; those that have died could not say."""
        self.queued = 0
        self.running = 0
        self.request_bytes = 0
        """Bytes charged for all requests, whether they wait or workers hold them."""
        self.finished: list[Worker] = []
        """Workers that are leaving, and in this turn finished the last request that they held."""
        self.expiries: Timers[Request] = Timers(min(max(expiry / 1000, 0.001), EXPIRY_RESOLUTION))
        """When requests expire: those that wait, and running ones with a ttl."""
        self._expiry = expiry
        self._ended: set[tuple[PeerKey, int]] = set()
        self._ended_before: set[tuple[PeerKey, int]] = set()

    # ── from acceptance to the end ───────────────────────────────────────────────────────────────────────────────────

    def accept(self, request: Request, now: float) -> None:
        """Take in a new request: its client is known and its number is in use from now on.

        If its service has credit to spare, the request is dispatched at the end of the turn; else it is queued.
        """
        client, service = request.client, request.service
        request.since = request.accepted = now
        client.role.accepted += 1
        if not client.requests:
            self.directory.add_client(client)
            self._charge(client, client.charge)
        client.requests += 1
        self._charge(client, request.charge)
        if request.number is not None:
            client.numbered[request.number] = request
        if service.name not in self.directory.services and not service.remotes:
            self.directory.named(service, client)
        if service.waiting < service.room:
            request.arrived = True
            service.arrived.append(request)
            self.directory.touch(service)
        else:  # queued at once, so that its bytes count against the next requests
            self._queue_arrived(service, now)
            self.enqueue(request, now)

    def collect(self, attempt: Attempt, body: list[bytes]) -> Collected:
        """Keep the frames of one more PARTIAL until the attempt ends; they are charged with the request."""
        collected = attempt.collected = attempt.collected or Collected()
        collected.add(body)
        charge = FRAME_OVERHEAD * len(body) + size_of(body)
        collected.charge += charge
        attempt.request.charge += charge
        self._charge(attempt.request.client, charge)
        return collected

    def _charge(self, client: Client, charge: int) -> None:
        self.request_bytes += charge
        client.request_bytes += charge
        client.role.request_bytes += charge
        if client.proxy is not None:
            client.proxy.request_bytes += charge

    def used_by(self, client: Client) -> int:
        """Return the bytes charged for all requests over the connection of `client`, also for others behind it."""
        key, proxies = client.key, self.directory.proxies
        if isinstance(key, bytes):
            proxy = proxies.get(key)
            return client.request_bytes + (0 if proxy is None else proxy.request_bytes)
        proxy, own = proxies.get(key[0]), self.directory.clients.get(key[0])
        return (0 if proxy is None else proxy.request_bytes) + (0 if own is None else own.request_bytes)

    def remember_end(self, request: Request) -> None:
        """Remember the number of a request that has ended, or was not accepted: a CANCEL may still come."""
        if request.number is not None:
            if len(self._ended) >= REMEMBERED:
                self._ended_before, self._ended = self._ended, set()
            self._ended.add((request.client.key, request.number))

    def take_arrived(self, service: Service) -> list[Request]:
        """Return the requests that arrived in this turn: each must be assigned, queued or dropped."""
        arrived, service.arrived = service.arrived, []
        return arrived

    def put_back(self, service: Service, arrived: list[Request]) -> None:
        """Take back the last of what `take_arrived` has returned."""
        service.arrived = arrived

    def _queue_arrived(self, service: Service, now: float) -> None:
        if service.arrived:
            for request in self.take_arrived(service):
                self.enqueue(request, now)

    def redirect(self, request: Request, name: bytes) -> None:
        """Make it a request for the service of that name, which may have been forgotten and become known again."""
        request.service = self.directory.service(name)

    def enqueue(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue a request: behind the others of its client, or, if it came back (C17), in front of all."""
        service = request.service
        request.body = tuple(request.body)
        schedule = service.schedule
        if schedule.groups is None and request.options.group:
            self.directory.groups_of(service)
        if front:
            request.since = now
            schedule.prepend(request)
        else:
            schedule.append(request)
        if not request.options.wait:
            service.no_wait[request] = None
        request.arrived, request.queued = False, True
        self.queued += 1
        expires = now + self._expiry
        self.expiries.set(request, expires if expires < request.deadline else request.deadline)
        self.directory.touch(service)

    def take_next(self, service: Service, now: float) -> tuple[Request, Worker] | None:
        """Take the next request of `service` out of its queue; return it with its worker, or None if none can go.

        Local workers come first, then other brokers.  Requests that arrived in this turn are queued before (C20).
        """
        if service.arrived:
            self._queue_arrived(service, now)
        pair = service.schedule.next_pair(now)
        if pair is None and service.beyond:
            pair = service.next_remote_pair(now)
        if pair is not None:
            self._dequeued(pair[0])
        return pair

    def _dequeued(self, request: Request) -> None:
        if not request.options.wait:
            del request.service.no_wait[request]
        request.queued = False
        self.expiries.clear(request)
        self.queued -= 1

    def assign(
        self, request: Request, worker: Worker, address: Any, turn: int, now: float, *, doubtful: bool
    ) -> Attempt:
        """Give a request, which is not queued, to a worker."""
        attempt = Attempt(request, worker, address, turn, doubtful=doubtful)
        request.attempt = attempt
        request.arrived = False
        request.handed += 1
        worker.hold(attempt)
        if request.attempts:
            worker.suspects += 1
        service = worker.service
        if service.schedule.groups is not None and not isinstance(worker, Remote):
            attempt.start(service.schedule.groups, now)
        worker.update()
        service.running += 1
        service.dispatched += 1
        self.running += 1
        client = request.client
        client.running.append(request)
        client.role.running += 1
        metrics = request.service.metrics
        metrics.request_bytes += request.size
        if now > request.since:
            waited = now - request.since
            metrics.in_queue.add(bucket_of(waited), waited)
            request.since = now
        if request.deadline < NEVER:
            self.expiries.set(request, request.deadline)
        return attempt

    def release(self, attempt: Attempt, *, answered: bool = False) -> None:
        """Take a request from its worker.  Unless it is abandoned, it must be queued or dropped next.

        `answered` says that the worker has sent its FINAL.
        """
        self._detach(attempt)
        worker = attempt.worker
        service = worker.service
        worker.warm = answered and worker.header == WX1
        worker.update()
        if not service.unsettled:
            self.directory.touch(service)
        if worker.leaving and not worker.held:
            self.finished.append(worker)

    def remove_worker(self, worker: Worker, now: float, *, silent: bool = False) -> list[Attempt]:
        """Forget a worker, which may have been `silent`; return the requests that it held, which are released."""
        attempts = list(worker.held.values())
        for attempt in attempts:
            self._detach(attempt)
            if 0 <= worker.unreached_from <= attempt.turn:
                attempt.request.handed -= 1
            elif not (attempt.doubtful and silent):
                attempt.request.attempts += 1
                if worker.gives_up and not attempt.abandoned:
                    self.why_given_up[attempt.request] = show(worker.gives_up)
        self.directory.remove_worker(worker, now)
        return attempts

    def hand_back(self, attempt: Attempt, died: int = 0) -> None:
        """Release a request that its worker has not begun; at another broker, `died` workers died of it in total."""
        self.release(attempt)
        request = attempt.request
        if attempt.abandoned:
            return
        if died > request.attempts:
            request.attempts = died
        else:
            request.handed -= 1

    def blame(self, request: Request) -> None:
        """Count a request that was released, or never assigned, as if its worker had died."""
        request.attempts += 1

    def _detach(self, attempt: Attempt) -> None:
        request, worker = attempt.request, attempt.worker
        request.attempt = None
        self.expiries.clear(request)
        worker.let_go(attempt)
        if request.attempts:
            worker.suspects -= 1
        if attempt.group is not None:
            attempt.group.groups.ended(attempt.group)
        worker.service.running -= 1
        self.running -= 1
        if not attempt.abandoned:
            client = request.client
            client.running.remove(request)
            client.role.running -= 1
            if attempt.collected is not None:
                request.charge -= attempt.collected.charge
                self._charge(client, -attempt.collected.charge)

    def _take_out(self, request: Request, now: float) -> None:
        """Take a request from wherever it is.  The attempt of a worker that holds it is abandoned."""
        client, attempt = request.client, request.attempt
        if self.why_given_up:
            self.why_given_up.pop(request, None)
        if request.arrived:
            self._queue_arrived(request.service, now)
        if request.queued:
            request.service.schedule.remove(request)
            self._dequeued(request)
            if request.service.schedule.groups is not None and request.service.workers:  # which may be idle
                self.directory.touch(request.service)
            self.directory.forget_if_empty(request.service)
        elif attempt is not None and not attempt.abandoned:
            attempt.abandoned = True
            attempt.collected = None
            request.body = ()  # no longer charged, so it must not be kept
            self.expiries.clear(request)
            client.running.remove(request)
            client.role.running -= 1

    def put_off(self, request: Request, untold: Untold, now: float) -> None:
        """End a request whose client cannot be told yet; it stays registered under its number."""
        self._take_out(request, now)
        client = request.client
        if client.untold is None:
            client.untold = deque()
        client.untold.append(untold)

    def drop(self, request: Request, now: float) -> None:
        """End a request for its client, wherever it is.  The attempt of a worker that holds it is abandoned."""
        client = request.client
        self._take_out(request, now)
        number = request.number
        if number is not None:
            del client.numbered[number]
            self.remember_end(request)
        client.role.ended += 1
        client.requests -= 1
        self._charge(client, -request.charge)
        if not client.requests:
            self._charge(client, -client.charge)
            self.directory.remove_client(client)

    def lose_client(self, client: Client, now: float) -> None:
        """Record that a client is no longer connected: none of its requests waits any longer.

        Each is still to be dropped (`next_of`).
        """
        for service in self.directory.unsettled:
            if any(request.client is client for request in service.arrived):
                self._queue_arrived(service, now)
        for fair, queue in client.waiting.items():
            fair.take_out(queue)
        self.directory.lose_client(client)

    def next_of(self, client: Client) -> Request | None:
        """Return a request of a client that is gone, or None."""
        if client.running.first is not None:
            return client.running.first
        for queue in client.waiting.values():
            return queue.requests.first
        return client.untold.popleft().request if client.untold else None

    def next_waiting(self, service: Service, now: float) -> Request | None:
        """Return a request that waits for a service, or None."""
        self._queue_arrived(service, now)
        return service.schedule.first()

    def waiting_for(self, client: Client) -> list[Request]:
        """Return the waiting requests of a client, for all services."""
        waiting = [request for queue in client.waiting.values() for request in queue.requests]
        for service in self.directory.unsettled:
            waiting += [request for request in service.arrived if request.client is client]
        return waiting

    def not_to_wait(self, service: Service) -> list[Request]:
        """Return the waiting requests that must not wait once their service has no worker."""
        return [*service.no_wait, *(request for request in service.arrived if not request.options.wait)]

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def numbered(self) -> list[Request]:
        """All X1 requests that have not ended."""
        return [each for client in self.directory.clients.values() for each in client.numbered.values()]

    def ended_lately(self, client: Client, number: int) -> bool:
        """Return whether an X1 request of that number was among the last to end."""
        return (client.key, number) in self._ended or (client.key, number) in self._ended_before
