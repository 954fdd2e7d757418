"""Who is there and what is asked of them: services, workers, clients and requests.

The registry owns every transition of a request, so that its counts and indexes are right whatever the broker decides:

    accept → [enqueue → dequeue] → assign → release → finish        a worker is done with it, or it is dropped
                 ↑_____________________________|                    the worker was lost, or released it

No frames, no clock, no socket.  Every operation takes the same time however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..linked_lists import Line
from ..timers import Timed
from ..wire import CX1, EMPTY, NO_OPTIONS, Options, RequestId, Route, envelope_of, size_of
from .scheduling import FairQueue, Pool, Schedule, Turn

REQUEST_OVERHEAD: Final = 512
"""Bytes charged for a waiting request beside its body: what its records take, rounded up."""
REMEMBERED: Final = 5000
"""At least this many of the X1 requests that ended last are remembered, to recognise a CANCEL that crossed the end."""
NEVER: Final = 1e300
"""Seconds; later than any clock reading."""

PeerKey = bytes | Route
"""A peer that is connected itself by its routing id, one behind proxies by the proxy's and the envelope's addresses."""


def key_of(route: Route) -> PeerKey:
    """The key of the peer whose messages have this route, an X1 request's number left out."""
    return route[0] if len(route) < 3 else route[:-1]


class Client:
    """A client that has requests here."""

    __slots__ = ("batch", "batch_route", "key", "numbered", "requests", "running", "waiting")

    def __init__(self, key: PeerKey) -> None:
        self.key = key
        self.requests = 0
        """How many have been accepted and not finished."""
        self.numbered: dict[RequestId, Request] = {}
        """The X1 requests among them."""
        self.running: Line[Request] = Line()
        """Those that workers hold."""
        self.waiting: dict[FairQueue, Turn] = {}
        """Those that wait, by queue."""
        self.batch_route: Route | None = None
        """What stands before the header of batches to it; None if its last message was framed, so that it gets none."""
        self.batch: Any = None
        """What it is to be sent at the end of this turn of the broker (`batch.Batch`)."""

    @property
    def path(self) -> Route:
        """What stands in front of the envelopes of its requests."""
        return (self.key,) if isinstance(self.key, bytes) else self.key


class Collected:
    """The frames of the PARTIALs of one request."""

    __slots__ = ("frames", "size")

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.size = 0
        """Bytes of all of them."""

    def add(self, body: list[bytes]) -> None:
        """Add the frames of one more."""
        self.frames += body
        self.size += size_of(body)


class Request(Timed):
    """A client's request while it waits or a worker holds it."""

    __slots__ = (
        "abandoned", "attempt", "attempts", "body", "client", "collected", "deadline", "delimited", "handed", "header",
        "late", "number", "options", "service", "streamed",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        header: bytes,
        service: Service,
        body: Sequence[bytes],
        *,
        number: RequestId = None,
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
        """While it waits a tuple, which takes less than a list."""
        self.number = number
        self.delimited = delimited
        """There was an empty frame before the header (C22)."""
        self.options = options
        self.deadline = deadline
        """When its ttl has passed."""
        self.attempt: Attempt | None = None
        """The present attempt; None while it waits."""
        self.late = False
        """It has waited, so some of its ttl is gone."""
        self.handed = 0
        """Workers that received it and did not release it."""
        self.attempts = 0
        """Workers that died while they held it (C17); with one it is a suspect."""
        self.streamed = False
        """A PARTIAL of it has been sent to the client, so it cannot be given to another worker (C17)."""
        self.collected: Collected | None = None
        """For a 0.1 client, the PARTIALs so far (C24)."""
        self.abandoned = False
        """It has been finished while a worker held it: nothing more is sent for it."""

    @property
    def route(self) -> Route:
        """What stands before the header of its messages."""
        path = self.client.path
        if self.header == CX1:
            return (*path, *envelope_of(self.number))
        return (*path, EMPTY) if self.delimited else path

    def charge(self) -> int:
        """Bytes that it takes while it waits."""
        number = self.number
        own = len(number) if isinstance(number, bytes) else 0
        return REQUEST_OVERHEAD + size_of(self.body) + len(self.options.raw) + own


class Attempt:
    """A request at a worker, from REQUEST to FINAL, ERROR, RELEASE or the worker's end."""

    __slots__ = ("address", "doubtful", "request", "turn", "worker")

    def __init__(self, request: Request, worker: Worker, address: int, turn: int, *, doubtful: bool) -> None:
        self.request = request
        self.worker = worker
        self.address = address
        """The client address that the worker was given, and nobody else ever (C32)."""
        self.turn = turn
        """The broker's turn in which it was sent."""
        self.doubtful = doubtful
        """The worker had been silent for so long that it may have been dead before: not the request's doing."""


class Worker(Timed):
    """A registered worker: one service (C6), and as many requests as it gives credit for; before X1 one."""

    __slots__ = (
        "batch", "batched", "credit", "dialect", "free", "header", "held", "host", "id", "key", "last_seen",
        "last_sent", "leaving", "name", "oversized_reply_at", "pid", "pool", "pooled", "pooled_load", "route",
        "service", "since", "suspects", "unreached_from", "version",
    )  # fmt: skip

    def __init__(self, route: Route, header: bytes, service: Service, credit: int, id: int, now: float) -> None:  # noqa: A002
        super().__init__()
        self.route = route
        self.key = key_of(route)
        self.header = header
        self.service = service
        self.credit = credit
        """How many requests it holds at most."""
        self.id = id
        """Its number, for people; its routing id is nobody's business."""
        self.name = ""
        self.host = ""
        self.pid = 0
        self.version = ""
        self.dialect = False
        """It is told the dialect of clients that do not speak X1."""
        self.held: dict[int, Attempt] = {}
        """By address."""
        self.suspects = 0
        """How many of them are suspects."""
        self.leaving = False
        """It said DISCONNECT, and finishes what it holds (X1)."""
        self.batched = False
        """Its last message was in the batched form, so what it is sent is as well."""
        self.batch: Any = None
        """As with clients."""
        self.pool: Pool | None = None
        """For the schedule: where it is, the load with which it was put there, and when."""
        self.pooled_load = 0
        self.pooled = 0
        self.free = 0
        """Its part of the schedule's capacity."""
        self.unreached_from = -1
        """The first turn of which it has not received what it was sent; -1 if it has received everything."""
        self.oversized_reply_at: float | None = None
        """When it sent a FINAL over the limits, if it has not sent a better one since (0.2, 0.1)."""
        self.since = now
        self.last_seen = now
        self.last_sent = now

    @property
    def load(self) -> int:
        """How many requests it holds."""
        return len(self.held)

    def __str__(self) -> str:
        """As log lines name it."""
        pid = f"pid {self.pid}" if self.pid else ""
        host = f"on {self.host}" if self.host else ""
        told = ", ".join(each for each in (self.name, host, pid) if each)
        return f"{self.id} ({told})" if told else f"{self.id}"


class Service:
    """A name that has a worker or a request."""

    __slots__ = ("arrived", "available", "dispatched", "name", "no_wait", "running", "schedule", "unsettled", "workers")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.workers: dict[Worker, None] = {}
        self.available = 0
        """How many of them are not leaving."""
        self.schedule = Schedule()
        self.arrived: list[Request] = []
        """Accepted in this turn of the broker, and not queued yet."""
        self.unsettled = False
        """At the end of this turn it has to be looked at."""
        self.running = 0
        """Requests that workers hold."""
        self.dispatched = 0
        """How many requests workers have been sent."""
        self.no_wait: dict[Request, None] = {}
        """Queued requests that are not to wait if there is no worker at all."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self.schedule.waiting + len(self.arrived)


class Registry:
    """All services, workers and requests of a broker."""

    def __init__(self) -> None:
        self.services: dict[bytes, Service] = {}
        self.workers: dict[PeerKey, Worker] = {}
        self.clients: dict[PeerKey, Client] = {}
        """Those that have a request here."""
        self.behind: dict[bytes, dict[PeerKey, None]] = {}
        """Clients and workers behind proxies, by the proxy's routing id."""
        self.queued = 0
        self.queued_bytes = 0
        self.running = 0
        self._ended: set[tuple[PeerKey, RequestId]] = set()
        self._ended_before: set[tuple[PeerKey, RequestId]] = set()

    def service(self, name: bytes) -> Service:
        """The service of that name, created if necessary; call `forget_if_empty` if nothing came of it."""
        service = self.services.get(name)
        if service is None:
            service = self.services[name] = Service(name)
        return service

    def forget_if_empty(self, service: Service) -> None:
        """Forget a service without workers and requests, once nothing is left to do for it in this turn."""
        if not (service.workers or service.waiting or service.unsettled):
            self.services.pop(service.name, None)

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self, route: Route) -> Client:
        """The client of that route.  It is known from the first request that is accepted to the last that is
        finished; until then this is a new one."""
        key = key_of(route)
        client = self.clients.get(key)
        return Client(key) if client is None else client

    def add_worker(self, worker: Worker) -> None:
        """Register a worker."""
        self.workers[worker.key] = worker
        self._add_behind(worker.key)
        worker.service.workers[worker] = None
        worker.service.available += 1
        worker.service.schedule.update(worker)

    def leave(self, worker: Worker) -> None:
        """A worker takes no more requests."""
        worker.leaving = True
        worker.service.available -= 1
        worker.service.schedule.update(worker)

    def remove_worker(self, worker: Worker) -> list[Attempt]:
        """Forget a worker; returns what it held, which is released."""
        if not worker.leaving:
            self.leave(worker)
        attempts = list(worker.held.values())
        for attempt in attempts:
            self.release(attempt)
        del self.workers[worker.key]
        self._remove_behind(worker.key)
        del worker.service.workers[worker]
        return attempts

    def workers_at(self, identity: bytes) -> list[Worker]:
        """The workers whose messages come from the connection with that routing id."""
        return [self.workers[key] for key in self._keys_at(identity) if key in self.workers]

    def clients_at(self, identity: bytes) -> list[Client]:
        """The clients whose messages come from the connection with that routing id."""
        return [self.clients[key] for key in self._keys_at(identity) if key in self.clients]

    def _keys_at(self, identity: bytes) -> list[PeerKey]:
        return [identity, *self.behind.get(identity, ())]

    def _add_behind(self, key: PeerKey) -> None:
        if not isinstance(key, bytes):
            self.behind.setdefault(key[0], {})[key] = None

    def _remove_behind(self, key: PeerKey) -> None:
        """A peer behind a proxy is forgotten when it is neither a client nor a worker any more."""
        if not isinstance(key, bytes) and key not in self.workers and key not in self.clients:
            others = self.behind[key[0]]
            del others[key]
            if not others:
                del self.behind[key[0]]

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(self, request: Request) -> None:
        """A new request: from now on its client is known, and its number is in use."""
        client = request.client
        if not client.requests:
            self.clients[client.key] = client
            self._add_behind(client.key)
        client.requests += 1
        if request.header == CX1:
            client.numbered[request.number] = request

    def enqueue(self, request: Request, *, front: bool = False) -> None:
        """Let a request wait: behind the others of its client, or (one that came back, C17) in front of all."""
        service = request.service
        request.body = tuple(request.body)
        queue = service.schedule.queue_of(request)
        if front:
            queue.prepend(request)
        else:
            queue.append(request)
        if not request.options.wait:
            service.no_wait[request] = None
        request.late = True
        self.queued += 1
        self.queued_bytes += request.charge()

    def dequeue(self, request: Request) -> None:
        """Take a request out of its queue."""
        request.service.schedule.queue_of(request).remove(request)
        self.dequeued(request)

    def dequeued(self, request: Request) -> None:
        """The schedule has taken a request out of its queue."""
        if not request.options.wait:
            del request.service.no_wait[request]
        self.queued -= 1
        self.queued_bytes -= request.charge()  # not kept: that would take 40 bytes

    def assign(self, request: Request, worker: Worker, address: int, turn: int, *, doubtful: bool) -> Attempt:
        """A worker holds the request from now on."""
        attempt = Attempt(request, worker, address, turn, doubtful=doubtful)
        request.attempt = attempt
        request.handed += 1
        worker.held[address] = attempt
        if request.attempts:
            worker.suspects += 1
        worker.service.schedule.update(worker)
        worker.service.running += 1
        worker.service.dispatched += 1
        self.running += 1
        request.client.running.append(request)
        return attempt

    def release(self, attempt: Attempt) -> None:
        """The worker does not hold the request any more: it is to be queued or finished now."""
        request, worker = attempt.request, attempt.worker
        request.attempt = None
        del worker.held[attempt.address]
        if request.attempts:
            worker.suspects -= 1
        worker.service.schedule.update(worker)
        worker.service.running -= 1
        self.running -= 1
        if not request.abandoned:
            request.client.running.remove(request)

    def finish(self, request: Request) -> None:
        """The request has ended for its client, though perhaps not for its worker."""
        client = request.client
        if request.attempt is not None:
            request.abandoned = True
            client.running.remove(request)
        if request.header == CX1:
            del client.numbered[request.number]
            self.remember(client, request.number)
        client.requests -= 1
        if not client.requests:
            del self.clients[client.key]
            self._remove_behind(client.key)

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def numbered(self) -> list[Request]:
        """All X1 requests that have not ended."""
        return [each for client in self.clients.values() for each in client.numbered.values()]

    def remember(self, client: Client, number: RequestId) -> None:
        """An X1 request of that number has ended."""
        if len(self._ended) >= REMEMBERED:
            self._ended_before, self._ended = self._ended, set()
        self._ended.add((client.key, number))

    def ended_lately(self, client: Client, number: RequestId) -> bool:
        """Whether an X1 request of that number was among the last to end."""
        return (client.key, number) in self._ended or (client.key, number) in self._ended_before

    def waiting_for(self, client: Client) -> list[Request]:
        """The requests of that client that are queued, for whatever service."""
        return [request for turn in client.waiting.values() for request in turn.requests]
