"""The broker's state: services, workers, clients and requests.

The registry owns every transition of a request, so that its counts, indexes and timers are always consistent:

    accept → [enqueue → take_next] → assign → release → drop        a worker is done with it
                 ↑______________________________|                   the worker was lost, or released it

`drop` also ends a request that is queued or that a worker holds; `refuse` ends one that was not accepted.

No frames, no clock, no socket.  Every operation takes constant time, whatever the number of peers and requests.
"""

from __future__ import annotations

from typing import Final

from ..timers import Timers
from ..wire import Route, show, size_of
from .metrics import Metrics
from .records import (
    FRAME_OVERHEAD,
    NEVER,
    Attempt,
    Client,
    Collected,
    Link,
    PeerKey,
    Proxy,
    Remote,
    Request,
    Service,
    Worker,
    key_of,
)
from .roles import Role

REMEMBERED: Final = 5000
"""Minimum number of ended X1 requests that are remembered, to recognise a CANCEL that crossed the end."""
EXPIRY_RESOLUTION: Final = 0.01
"""Maximum delay of an expiry, in seconds."""


class Registry:
    """All services, workers, clients and requests of a broker.

    `expiry` is how long a request may wait, in seconds.  A service in which something arrived or became free is listed
    in `unsettled`, so that the broker looks at it at the end of its turn.
    """

    def __init__(self, expiry: float = 300.0) -> None:
        self.services: dict[bytes, Service] = {}
        self.reachable: dict[bytes, Service] = {}
        """The services that other brokers offer."""
        self.linked: dict[PeerKey, Client] = {}
        """The clients that are other brokers."""
        self.metrics = Metrics()
        self.given_up: dict[Request, str] = {}
        """Why a worker has given up a request that has not ended; those that have died could not say."""
        self.unserved: dict[Service, None] = {}
        """Those without a worker, which are known only because requests wait for them (C41); the newest last."""
        self.workers: dict[PeerKey, Worker] = {}
        self.clients: dict[PeerKey, Client] = {}
        """Those that have a request here."""
        self.proxies: dict[bytes, Proxy] = {}
        """By routing id."""
        self.queued = 0
        self.running = 0
        self.request_bytes = 0
        """Bytes charged for all requests, whether they wait or workers hold them."""
        self.unsettled: list[Service] = []
        """Services that changed in this turn: requests may be dispatchable, or nothing may be left of them."""
        self.finished: list[Worker] = []
        """Workers that are leaving, and in this turn finished the last request that they held."""
        self.expiries: Timers[Request] = Timers(min(max(expiry / 1000, 0.001), EXPIRY_RESOLUTION))
        """When requests expire: those that wait, and running ones with a ttl."""
        self._expiry = expiry
        self._ended: set[tuple[PeerKey, int]] = set()
        self._ended_before: set[tuple[PeerKey, int]] = set()

    # ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def service(self, name: bytes) -> Service:
        """Return the service of that name; a new one is known once it has a worker or a request."""
        service = self.services.get(name)
        if service is None and self.reachable:
            service = self.reachable.get(name)
        return Service(name, self.metrics.others) if service is None else service

    def touch(self, service: Service) -> None:
        """Make the broker look at `service` at the end of its turn."""
        if not service.unsettled:
            service.unsettled = True
            if service.name not in self.services and self.reachable.get(service.name, service) is service:
                self.services[service.name] = service
                if self.metrics.of(service.name).served or service.schedule.remotes:
                    self._count_by_name(service)
                if not service.schedule.remotes:
                    self.unserved[service] = None
            self.unsettled.append(service)

    def _count_by_name(self, service: Service) -> None:
        """Count what happens at `service` under its name.  Before it has had a worker, clients have made it up."""
        service.metrics = self.metrics.of(service.name)
        service.metrics.served = True

    def take_unsettled(self) -> list[Service]:
        """Return the services to look at, which are to be reported with `settled` or `unfinished`."""
        unsettled, self.unsettled = self.unsettled, []
        return unsettled

    def unfinished(self, service: Service) -> None:
        """Make the broker look at `service` again, at which it has failed."""
        service.unsettled = False
        self.touch(service)

    def settled(self, service: Service) -> None:
        """Record that nothing more of `service` can be dispatched now; forget it if nothing is left of it."""
        service.unsettled = False
        self._forget_if_empty(service)

    def _forget_if_empty(self, service: Service) -> None:
        if not (service.workers or service.waiting or service.unsettled or service.running):
            self.forget(service)

    def forget(self, service: Service) -> None:
        """Forget a service of which nothing is left; if it is touched again, it is a new one."""
        if self.services.get(service.name) is service:
            del self.services[service.name]
            self.metrics.forget(service.name)
        self._served(service)

    def _served(self, service: Service) -> None:
        """Record that `service` has a worker, or is forgotten."""
        self.unserved.pop(service, None)
        if service.named_by is not None:
            service.named_by.named -= 1
            service.named_by = None

    def newest_unserved(self) -> Service | None:
        """Return the newest service without a worker."""
        return next(reversed(self.unserved), None)

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self, route: Route, role: Role) -> Client:
        """Return the client with that route; a new one, of `role`, is known once a request of it is accepted."""
        key = key_of(route)
        client = self.clients.get(key)
        if client is None and self.linked:
            client = self.linked.get(key)
        return Client(key, role) if client is None else client

    def add_worker(self, worker: Worker) -> None:
        """Register a worker."""
        self.workers[worker.key] = worker
        self._add_behind(worker.key)
        worker.service.workers[worker] = None
        worker.service.available += 1
        self._update(worker)
        self._served(worker.service)
        self._count_by_name(worker.service)
        self._availability_changed(worker.service)

    def set_credit(self, worker: Worker, credit: int) -> None:
        """Change how many requests a worker may hold."""
        worker.credit = credit
        self._update(worker)

    def leave(self, worker: Worker) -> None:
        """Stop giving requests to a worker."""
        worker.leaving = True
        worker.service.available -= 1
        self._update(worker)
        self._availability_changed(worker.service)

    def remove_worker(self, worker: Worker, *, silent: bool = False) -> list[Attempt]:
        """Forget a worker, which may have been `silent`; return what it held, which is released."""
        if not worker.leaving:
            worker.leaving = True
            worker.service.available -= 1
        attempts = list(worker.held.values())
        for attempt in attempts:
            self._detach(attempt)
            if 0 <= worker.unreached_from <= attempt.turn:
                attempt.request.handed -= 1
            elif not (attempt.doubtful and silent):
                attempt.request.attempts += 1
                if worker.gives_up and not attempt.abandoned:
                    self.given_up[attempt.request] = show(worker.gives_up)
        self._update(worker)
        del self.workers[worker.key]
        self._remove_behind(worker.key)
        service = worker.service
        del service.workers[worker]
        if not service.workers and not service.schedule.remotes:
            self.unserved[service] = None  # until its requests have ended
        self._availability_changed(service)
        return attempts

    def _update(self, worker: Worker) -> None:
        if isinstance(worker, Remote):
            worker.service.schedule.update_remote(worker)
        else:
            worker.service.schedule.update(worker)
        self.touch(worker.service)

    def _availability_changed(self, service: Service) -> None:
        for remote in service.schedule.remotes:
            remote.decide()
            self._update(remote)

    # ── what other brokers offer ─────────────────────────────────────────────────────────────────────────────────────

    def add_remote(self, link: Link, name: bytes) -> Remote:
        """Record that a service can be reached over a link; its credit is set with `update_remote`."""
        service = self.service(name)
        self.reachable[name] = service
        remote = Remote(link, service)
        service.schedule.remotes.append(remote)
        self._served(service)
        if name in self.services:
            self._count_by_name(service)
        return remote

    def update_remote(self, remote: Remote, credit: int, free: int, hops: int) -> None:
        """Record what the other broker has announced."""
        remote.announced(credit, free, hops)
        self._update(remote)

    def remove_remote(self, remote: Remote) -> None:
        """Record that a service cannot be reached over a link any longer.  Requests that are there go on."""
        service = remote.service
        remote.leaving = True
        self._update(remote)  # which also keeps the service, to which these requests may return
        service.schedule.remotes.remove(remote)
        if not service.schedule.remotes:
            self.reachable.pop(service.name, None)
            if not service.workers and service.name in self.services:
                self.unserved[service] = None  # until its requests have ended

    def workers_at(self, identity: bytes) -> list[Worker]:
        """Return the workers whose messages come from the connection with that routing id."""
        return [self.workers[key] for key in self._keys_at(identity) if key in self.workers]

    def clients_at(self, identity: bytes) -> list[Client]:
        """Return the clients whose messages come from the connection with that routing id."""
        return [self.clients[key] for key in self._keys_at(identity) if key in self.clients]

    def _keys_at(self, identity: bytes) -> list[PeerKey]:
        proxy = self.proxies.get(identity)
        return [identity] if proxy is None else [identity, *proxy.peers]

    def _add_behind(self, key: PeerKey) -> None:
        if not isinstance(key, bytes):
            self.proxies.setdefault(key[0], Proxy()).peers[key] = None

    def _remove_behind(self, key: PeerKey) -> None:
        """Forget a peer behind a proxy unless it is still a client or a worker."""
        if not isinstance(key, bytes) and key not in self.workers and key not in self.clients:
            proxy = self.proxies[key[0]]
            del proxy.peers[key]
            if not proxy.peers:
                del self.proxies[key[0]]

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(self, request: Request, now: float) -> None:
        """Take in a new request: its client is known and its number is in use from now on.

        If its service has credit to spare, the request is dispatched at the end of the turn; else it is queued.
        """
        client, service = request.client, request.service
        request.since = request.accepted = now
        client.role.accepted += 1
        if not client.requests:
            self.clients[client.key] = client
            self._add_behind(client.key)
            self._charge(client, client.charge)
        client.requests += 1
        self._charge(client, request.charge)
        if request.number is not None:
            client.numbered[request.number] = request
        if service.name not in self.services and not service.schedule.remotes:
            service.named_by = client
            client.named += 1
        if service.waiting < service.schedule.room:
            request.arrived = True
            service.arrived.append(request)
            self.touch(service)
        else:  # queued at once, so that its bytes count against what comes next
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
        if not isinstance(client.key, bytes):
            self.proxies[client.key[0]].request_bytes += charge

    def used_by(self, client: Client) -> int:
        """Return the bytes charged for all requests over the connection of `client`, also for others behind it."""
        key = client.key
        if isinstance(key, bytes):
            proxy = self.proxies.get(key)
            return client.request_bytes + (0 if proxy is None else proxy.request_bytes)
        proxy, own = self.proxies.get(key[0]), self.clients.get(key[0])
        return (0 if proxy is None else proxy.request_bytes) + (0 if own is None else own.request_bytes)

    def refuse(self, request: Request) -> None:
        """End a request that is not accepted, or that the broker answered itself."""
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
        request.service = self.service(name)

    def enqueue(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue a request: behind the others of its client, or, if it came back (C17), in front of all."""
        service = request.service
        request.body = tuple(request.body)
        queue = service.schedule.queue_of(request)
        if front:
            request.since = now
            queue.prepend(request)
        else:
            queue.append(request)
        if not request.options.wait:
            service.no_wait[request] = None
        request.arrived, request.queued = False, True
        self.queued += 1
        expires = now + self._expiry
        self.expiries.set(request, expires if expires < request.deadline else request.deadline)
        self.touch(service)

    def take_next(self, service: Service, now: float) -> tuple[Request, Worker] | None:
        """Take the next request of `service` out of its queue; return it with its worker, or None if none can go.

        What arrived in this turn is queued before (C20).
        """
        if service.arrived:
            self._queue_arrived(service, now)
        pair = service.schedule.next_pair()
        if pair is not None:
            self._dequeued(pair[0])
        return pair

    def take_next_remote(self, service: Service) -> tuple[Request, Remote] | None:
        """Take the next request that can be passed on to another broker; return it with its place there, or None."""
        pair = service.schedule.next_remote_pair()
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
        self, request: Request, worker: Worker, address: int, turn: int, now: float, *, doubtful: bool
    ) -> Attempt:
        """Give a request, which is not queued, to a worker."""
        attempt = Attempt(request, worker, address, turn, doubtful=doubtful)
        request.attempt = attempt
        request.arrived = False
        request.handed += 1
        worker.held[address] = attempt
        if request.attempts:
            worker.suspects += 1
        service = worker.service
        if isinstance(worker, Remote):
            worker.link.attempts[address] = attempt
            service.schedule.update_remote(worker)
        else:
            service.schedule.update(worker)
        service.running += 1
        service.dispatched += 1
        self.running += 1
        client = request.client
        client.running.append(request)
        client.role.running += 1
        metrics = request.service.metrics
        metrics.request_bytes += request.size
        if now > request.since:
            metrics.in_queue.add(now - request.since)
            request.since = now
        if request.deadline < NEVER:
            self.expiries.set(request, request.deadline)
        return attempt

    def release(self, attempt: Attempt) -> None:
        """Take a request from its worker.  Unless it is abandoned, it must be queued or dropped next."""
        self._detach(attempt)
        worker = attempt.worker
        service = worker.service
        if isinstance(worker, Remote):
            service.schedule.update_remote(worker)
        else:
            service.schedule.update(worker)
        if not service.unsettled:
            self.touch(service)
        if worker.leaving and not worker.held:
            self.finished.append(worker)

    def hand_back(self, attempt: Attempt, died: int = 0) -> None:
        """Release a request that its worker has not begun; over a link, `died` workers have died of it in total."""
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
        del worker.held[attempt.address]
        if isinstance(worker, Remote):
            del worker.link.attempts[attempt.address]
        if request.attempts:
            worker.suspects -= 1
        worker.service.running -= 1
        self.running -= 1
        if not attempt.abandoned:
            client = request.client
            client.running.remove(request)
            client.role.running -= 1
            if attempt.collected is not None:
                request.charge -= attempt.collected.charge
                self._charge(client, -attempt.collected.charge)

    def drop(self, request: Request, now: float) -> None:
        """End a request for its client, wherever it is.  The attempt of a worker that holds it is abandoned."""
        client, attempt = request.client, request.attempt
        if self.given_up:
            self.given_up.pop(request, None)
        if request.arrived:
            self._queue_arrived(request.service, now)
        if request.queued:
            request.service.schedule.queue_of(request).remove(request)
            self._dequeued(request)
            self._forget_if_empty(request.service)
        elif attempt is not None:
            attempt.abandoned = True
            attempt.collected = None
            request.body = ()  # no longer charged, so it must not be kept
            self.expiries.clear(request)
            client.running.remove(request)
            client.role.running -= 1
        number = request.number
        if number is not None:
            del client.numbered[number]
            if len(self._ended) >= REMEMBERED:
                self._ended_before, self._ended = self._ended, set()
            self._ended.add((client.key, number))  # as `refuse`, without another call
        client.role.ended += 1
        client.requests -= 1
        self._charge(client, -request.charge)
        if not client.requests:
            self._charge(client, -client.charge)
            del self.clients[client.key]
            self._remove_behind(client.key)

    def waiting_for(self, client: Client) -> list[Request]:
        """Return the requests of that client that wait, for whatever service."""
        waiting = [request for turn in client.waiting.values() for request in turn.requests]
        for service in self.unsettled:
            waiting += [request for request in service.arrived if request.client is client]
        return waiting

    def waiting_at(self, service: Service) -> list[Request]:
        """Return the requests that wait for a service."""
        return [*service.schedule.requests, *service.arrived]

    def not_to_wait(self, service: Service) -> list[Request]:
        """Return the requests that wait for a service, and are not to wait if it has no worker."""
        return [*service.no_wait, *(request for request in service.arrived if not request.options.wait)]

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def numbered(self) -> list[Request]:
        """All X1 requests that have not ended."""
        return [each for client in self.clients.values() for each in client.numbered.values()]

    def ended_lately(self, client: Client, number: int) -> bool:
        """Return whether an X1 request of that number was among the last to end."""
        return (client.key, number) in self._ended or (client.key, number) in self._ended_before
