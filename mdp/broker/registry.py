"""The broker's state: services, workers, clients and requests.

The registry owns every transition of a request, so that its counts, indexes and timers are always consistent:

    accept → [enqueue → take_next] → assign → release → drop        a worker is done with it
                 ↑______________________________|                   the worker was lost, or released it

`drop` also ends a request that is queued or that a worker holds; `refuse` ends one that was not accepted.

No frames, no clock, no socket.  Every operation takes constant time, whatever the number of peers and requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..linked_lists import LinkedList
from ..timers import TimerNode, Timers
from ..wire import CX1, EMPTY, NO_OPTIONS, Options, Route, size_of
from ..wire.names import show
from .metrics import UNCOUNTED, Metrics, ServiceMetrics
from .roles import Role
from .scheduling import FairQueue, Pool, Schedule, Turn

if TYPE_CHECKING:
    from .link import Link

REQUEST_OVERHEAD: Final = 512
"""Bytes charged for a request beside its body: the size of its objects, rounded up (C40)."""
FRAME_OVERHEAD: Final = 64
"""Bytes charged for each frame beside its content."""
CLIENT_OVERHEAD: Final = 1536
"""Bytes charged for a client that has requests."""
REMEMBERED: Final = 5000
"""Minimum number of ended X1 requests that are remembered, to recognise a CANCEL that crossed the end."""
NEVER: Final = 1e300
"""Seconds; later than any clock reading."""
EXPIRY_RESOLUTION: Final = 0.01
"""Maximum delay of an expiry, in seconds."""

PeerKey = bytes | Route
"""The routing id of a directly connected peer; for a peer behind proxies, the routing id of the proxy and the addresses
in the envelope."""


def key_of(route: Route) -> PeerKey:
    """Return the key of the peer whose messages have this route, which does not contain an X1 request's number."""
    return route[0] if len(route) < 3 else route[:-1]


class Client:
    """A client that has requests here."""

    __slots__ = (
        "batch", "charge", "key", "link", "named", "numbered", "request_bytes", "requests", "role", "route", "running",
        "waiting",
    )  # fmt: skip

    def __init__(self, key: PeerKey, role: Role, link: Link | None = None) -> None:
        self.key = key
        self.role = role
        self.link = link
        """The link, if this client is another broker."""
        self.charge = CLIENT_OVERHEAD
        """Bytes charged for it while it has requests."""
        self.request_bytes = 0
        """Bytes charged for it and its requests."""
        if not isinstance(key, bytes):
            self.charge += FRAME_OVERHEAD * len(key) + size_of(key)
        self.requests = 0
        """How many have been accepted and not finished."""
        self.named = 0
        """Number of services that are known only because it was the first to call them (C41)."""
        self.numbered: dict[int, Request] = {}
        """The X1 requests among them."""
        self.running: LinkedList[Request] = LinkedList()
        """Those that workers hold."""
        self.waiting: dict[FairQueue, Turn] = {}
        """Those that wait, by queue."""
        self.route: Route = self.path
        """The route of its X1 messages, and of those to it."""
        self.batch: Any = None
        """The open batch (`batch.Batch`), which is sent at the end of the broker's turn."""

    @property
    def path(self) -> Route:
        """The frames before its header, without the empty one."""
        return (self.key,) if isinstance(self.key, bytes) else self.key


class Proxy:
    """A connection behind which there are several clients and workers."""

    __slots__ = ("peers", "request_bytes")

    def __init__(self) -> None:
        self.peers: dict[PeerKey, None] = {}
        self.request_bytes = 0
        """Bytes charged for all its clients and their requests."""


class Collected:
    """The frames of the PARTIALs of one attempt."""

    __slots__ = ("charge", "frames", "size")

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.size = 0
        """Their total size in bytes."""
        self.charge = 0
        """Bytes charged for them, with their request."""

    def add(self, body: list[bytes]) -> None:
        """Add the frames of one more PARTIAL."""
        self.frames += body
        self.size += size_of(body)


class Way:
    """The way of a request over several brokers (C44)."""

    __slots__ = ("addressed", "losses", "pinned", "via")

    def __init__(self, via: tuple[str, ...] = ()) -> None:
        self.via = via
        """The names of the brokers that it has passed before this one."""
        self.addressed = EMPTY
        """The name of its service, if it is addressed to another broker: then `service` stands for that broker."""
        self.pinned = False
        """It is addressed to this broker, so it is not passed on."""
        self.losses = 0
        """Number of links that broke while it was at the other broker."""


class Request(TimerNode):
    """A client's request that waits or is held by a worker."""

    __slots__ = (
        "accepted", "attempt", "attempts", "body", "charge", "client", "deadline", "delimited", "handed", "header",
        "number", "options", "queued", "service", "since", "size", "tag", "way",
    )  # fmt: skip
    # Declared here, since in `__init__` even a declaration takes instructions.
    accepted: float
    """When it was accepted."""
    since: float
    """When it was accepted, sent to a worker, or came back from one."""
    tag: str
    """Its id, which `Watch.id_of` sets once somebody asks for it."""

    def __init__(
        self,
        client: Client,
        header: bytes,
        service: Service,
        body: Sequence[bytes],
        *,
        number: int | None = None,
        delimited: bool = False,
        options: Options = NO_OPTIONS,
        deadline: float = NEVER,
    ) -> None:
        self.before = None
        self.after = None
        self.bucket = None
        self.sooner = None
        self.later = None
        self.client = client
        self.header = header
        self.service = service
        self.body = body
        """A tuple while the request waits, which takes less memory than a list."""
        self.number = number
        self.delimited = delimited
        """Whether there was an empty frame before the header (C22)."""
        self.options = options
        self.deadline = deadline
        """When its ttl expires."""
        self.attempt: Attempt | None = None
        """The current attempt; None while it waits."""
        self.queued = False
        """Whether it is in its service's queue."""
        self.handed = 0
        """Number of workers that received it and did not release it."""
        self.attempts = 0
        """Number of workers that died while they held it (C17); from the first on, it is a suspect."""
        self.way: Way | None = None
        """What there is to know about its way over several brokers; None if nothing yet."""
        size = size_of(body)
        self.size = size
        """Bytes of its body."""
        self.charge = REQUEST_OVERHEAD + FRAME_OVERHEAD * len(body) + size + len(options.raw)
        """Bytes charged for it while it is outstanding: what it takes in memory, rounded up (C40)."""

    @property
    def name(self) -> bytes:
        """The name of the service that its client called."""
        return self.service.name if self.way is None else self.way.addressed or self.service.name

    @property
    def route(self) -> Route:
        """The route of messages to its client about it, in dialects without numbers."""
        path = self.client.path
        return (*path, EMPTY) if self.delimited else path


class Attempt:
    """A request at a worker, from REQUEST until FINAL, ERROR, RELEASE or the worker's end."""

    __slots__ = ("abandoned", "address", "collected", "doubtful", "request", "streamed", "turn", "worker")

    def __init__(self, request: Request, worker: Worker, address: int, turn: int, *, doubtful: bool) -> None:
        self.request = request
        self.worker = worker
        self.address = address
        """The client address that the worker was given; it is never used again (C32)."""
        self.turn = turn
        """The broker's turn in which it was sent."""
        self.doubtful = doubtful
        """The worker had been silent for so long that it may already have been dead, so the request is not blamed."""
        self.streamed = False
        """A PARTIAL has been sent to the client, so the request cannot be given to another worker (C17)."""
        self.collected: Collected | None = None
        """For a 0.1 or PPP client, the PARTIALs so far (C24)."""
        self.abandoned = False
        """The request has ended for its client while the worker holds it: nothing more is sent for it."""


class Worker(TimerNode):
    """A registered worker: it offers one service (C6) and holds up to `credit` requests; with 0.2 and 0.1, one."""

    __slots__ = (
        "batch", "busy_seconds", "credit", "dialect", "done", "free", "header", "held", "host", "id", "key",
        "last_seen", "last_sent", "leaving", "name", "oversized_reply_at", "pid", "pool", "pooled", "pooled_load",
        "role", "route", "service", "since", "suspects", "unreached_from", "version",
    )  # fmt: skip

    def __init__(
        self,
        route: Route,
        header: bytes,
        service: Service,
        role: Role,
        *,
        credit: int,
        id: int,  # noqa: A002 - the name that operators see
        now: float,
    ) -> None:
        super().__init__()
        self.role = role
        self.route = route
        self.key = key_of(route)
        self.header = header
        self.service = service
        self.credit = credit
        """Maximum number of requests that it holds."""
        self.id = id
        """A number that identifies it in logs and `mmi.workers`; routing ids are not shown to anyone (C39)."""
        self.name = ""
        self.host = ""
        self.pid = 0
        self.version = ""
        self.dialect = False
        """It wants to know the dialect of clients that do not speak X1."""
        self.held: dict[int, Attempt] = {}
        """By address."""
        self.done = 0
        """Number of requests that it has answered."""
        self.busy_seconds = 0.0
        """How long it held them, all together."""
        self.suspects = 0
        """Number of suspects among them."""
        self.leaving = False
        """It sent DISCONNECT, and finishes what it holds (X1)."""
        self.batch: Any = None
        """The open batch of commands to it, which is sent at the end of the broker's turn."""
        self.pool: Pool | None = None
        """Kept by the schedule: the pool that it is in, its load when it was added, and a counter to tell the order."""
        self.pooled_load = 0
        self.pooled = 0
        self.free = 0
        """Its share of the schedule's capacity."""
        self.unreached_from = -1
        """The first turn whose messages it did not receive; -1 if it received everything."""
        self.oversized_reply_at: float | None = None
        """When it sent a FINAL over the limits, if it has not sent a valid one since (0.2, 0.1)."""
        self.since = now
        self.last_seen = now
        self.last_sent = now

    @property
    def load(self) -> int:
        """Number of requests that it holds."""
        return len(self.held)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a log line about it."""
        fields: dict[str, Any] = {"service": show(self.service.name), "worker": self.id}
        if self.role.name:
            fields["role"] = self.role.name
        return fields

    def __str__(self) -> str:
        """As log lines name it."""
        pid = f"pid {self.pid}" if self.pid else ""
        host = f"on {self.host}" if self.host else ""
        details = ", ".join(each for each in (self.name, host, pid) if each)
        return f"{self.id} ({details})" if details else f"{self.id}"


class Remote(Worker):
    """The workers of a service that are reached over a link: to the schedule, one worker, which is used when no local
    worker has credit.

    The other broker announces their `credit` and how much of it is free.
    """

    __slots__ = ("hops", "link", "may_hold", "wanted")

    def __init__(self, link: Link, service: Service) -> None:
        super().__init__((link.identity,), CX1, service, link.role, credit=0, id=0, now=0.0)
        self.link = link
        self.hops = 1
        """How many brokers away the nearest of these workers is."""
        self.may_hold = 0
        """How many requests it can hold, itself and from us, while none of them has to wait there."""
        self.wanted = 0
        """How many requests may be there: `may_hold` if there are local workers, else `credit`, so that requests wait
        where the workers are, in turn with those of other brokers."""

    def announced(self, credit: int, free: int, hops: int) -> None:
        """Take in an announcement."""
        self.credit, self.hops = credit, hops
        self.may_hold = free + self.load
        self.decide()

    def decide(self) -> None:
        """Decide again how many requests may be there."""
        self.wanted = self.may_hold if self.service.available else self.credit

    def precedes(self, other: Remote) -> bool:
        """Return whether a request should rather go here: over fewer links, or to where more credit is free."""
        if self.hops != other.hops:
            return self.hops < other.hops
        return self.may_hold - self.load > other.may_hold - other.load


class Service:
    """A service that has a worker or a request."""

    __slots__ = (
        "arrived", "available", "dispatched", "metrics", "name", "named_by", "no_wait", "running", "schedule",
        "unsettled", "workers",
    )  # fmt: skip

    def __init__(self, name: bytes, metrics: ServiceMetrics = UNCOUNTED) -> None:
        self.name = name
        self.metrics = metrics
        """Its counts; while it does not exist, those of `Metrics.others`."""
        self.workers: dict[Worker, None] = {}
        self.named_by: Client | None = None
        """The client whose request made it known, if it has had no worker since (C41)."""
        self.available = 0
        """Number of workers that are not leaving."""
        self.schedule = Schedule()
        self.arrived: list[Request] = []
        """Requests accepted in this turn of the broker, and not queued yet."""
        self.unsettled = False
        """Whether it is in `Registry.unsettled`."""
        self.running = 0
        """Number of requests that workers hold."""
        self.dispatched = 0
        """Number of requests sent to workers so far."""
        self.no_wait: dict[Request, None] = {}
        """Queued requests that must not wait if there is no worker at all."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self.schedule.waiting + len(self.arrived)


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
                service.metrics = self.metrics.of(service.name)
                if not service.schedule.remotes:
                    self.unserved[service] = None
            self.unsettled.append(service)

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

    def remove_worker(self, worker: Worker) -> list[Attempt]:
        """Forget a worker; return what it held, which is released."""
        if not worker.leaving:
            worker.leaving = True
            worker.service.available -= 1
        attempts = list(worker.held.values())
        for attempt in attempts:
            self._detach(attempt)
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
            service.arrived.append(request)
            self.touch(service)
        else:  # queued at once, so that its bytes count against what comes next
            self.queue_arrived(service, now)
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

    def queue_arrived(self, service: Service, now: float) -> None:
        """Queue the requests that arrived in this turn."""
        if service.arrived:
            arrived, service.arrived = service.arrived, []
            for request in arrived:
                self.enqueue(request, now)

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
        request.queued = True
        self.queued += 1
        expires = now + self._expiry
        self.expiries.set(request, expires if expires < request.deadline else request.deadline)
        self.touch(service)

    def take_next(self, service: Service) -> tuple[Request, Worker] | None:
        """Take the next request of `service` out of its queue; return it with its worker, or None if none can go."""
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

    def drop(self, request: Request) -> None:
        """End a request for its client, wherever it is.  The attempt of a worker that holds it is abandoned."""
        client, attempt = request.client, request.attempt
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
        """Return the requests of that client that are queued, for whatever service."""
        return [request for turn in client.waiting.values() for request in turn.requests]

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def numbered(self) -> list[Request]:
        """All X1 requests that have not ended."""
        return [each for client in self.clients.values() for each in client.numbered.values()]

    def ended_lately(self, client: Client, number: int) -> bool:
        """Return whether an X1 request of that number was among the last to end."""
        return (client.key, number) in self._ended or (client.key, number) in self._ended_before
