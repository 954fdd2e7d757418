"""Who is there and who waits: services, their workers, and the fair queue in front of each.

No frames, no clock, no socket.  Every operation takes the same time however many there are, so that the cost of a
message does not grow with the number of workers, clients, services or waiting requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from .wire import NO_OPTIONS, WX1, Options, Route, size_of

REQUEST_OVERHEAD: Final = 512
"""Bytes charged for a waiting request beside its body: what its records take, rounded up."""
REMEMBERED: Final = 5000
"""At least so many of the requests that ended last are remembered, so that a late CANCEL is known for what it is."""


class Request:
    """A client's request while it waits or is worked on."""

    __slots__ = (
        "_size", "abandoned", "after", "attempts", "before", "body", "bucket", "client", "collected", "collected_bytes",
        "deadline", "handed", "header", "late", "options", "route", "service", "streamed", "worker",
    )  # fmt: skip

    def __init__(
        self,
        route: Route,
        header: bytes,
        service: Service,
        body: list[bytes],
        *,
        options: Options = NO_OPTIONS,
        deadline: float | None = None,
    ) -> None:
        self.route = route
        self.client = route[0]
        """The identity of the client's connection."""
        self.header = header
        self.service = service
        self.body = body
        self.options = options
        self.deadline = deadline
        """When its time has passed, if it has a ttl."""
        self._size = 0
        self.worker: Worker | None = None
        """The worker that holds it."""
        self.late = False
        """It has waited, so some of its ttl is gone."""
        self.handed = 0
        """Workers that it was handed to."""
        self.attempts = 0
        """Workers that died at it (C17)."""
        self.streamed = False
        """A PARTIAL of it has been sent to the client, so it cannot be given to another worker (C17)."""
        self.collected: list[bytes] | None = None
        """For a 0.1 client, the frames of the PARTIALs so far (C24)."""
        self.collected_bytes = 0
        self.abandoned = False
        """Its client is gone: nothing is sent for it any more."""
        self.before: Request | None = None
        self.after: Request | None = None
        self.bucket = 0

    def share(self, other: Request) -> None:
        """Have what is equal in `other`, of the same client, in one copy: many may wait."""
        self.client = other.client
        self.route = other.route if other.route == self.route else (other.client, *self.route[1:])
        if self.size == other.size:
            self._size = other.size

    @property
    def size(self) -> int:
        """Bytes charged for it while it waits."""
        if not self._size:
            own = size_of(self.body) + len(self.options.raw) + REQUEST_OVERHEAD
            self._size = own + sum(map(len, self.route))
        return self._size


ALONE: Final[Route] = ()
"""Among the workers of a connection the key of the one that is not told apart from others by its envelope."""


class Worker:
    """A registered worker: one service, at most one request (C6); a connection of its own, or in X1 a slot of one."""

    __slots__ = (
        "bucket", "header", "identity", "last_seen", "last_sent", "overdue", "reached", "request", "round", "route",
        "service", "since", "slot", "spoiled",
    )  # fmt: skip

    def __init__(self, route: Route, header: bytes, service: Service, now: float) -> None:
        self.route = route
        self.identity = route[0]
        """The identity of the worker's connection."""
        self.slot: Route = route if header == WX1 and len(route) > 1 else ALONE
        """What tells it apart from the other workers of its connection."""
        self.header = header
        self.service = service
        self.request: Request | None = None
        self.round = 0
        """The broker's round in which it got its request."""
        self.reached = True
        """Its request has not turned out undeliverable."""
        self.overdue = False
        """It may well have been dead when it got its request: if it was, that is not the request's doing (C17)."""
        self.spoiled: float | None = None
        """When it sent a FINAL over the limits, and nothing better since."""
        self.since = now
        self.last_seen = now
        self.last_sent = now
        self.bucket = 0


class Line:
    """Requests in order, as a list linked through the requests, so that any of them can leave at once."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first: Request | None = None
        self.last: Request | None = None

    def append(self, request: Request) -> None:
        """Put `request` last."""
        request.before = self.last
        if self.last is None:
            self.first = request
        else:
            self.last.after = request
        self.last = request

    def prepend(self, request: Request) -> None:
        """Put `request` first."""
        request.after = self.first
        if self.first is None:
            self.last = request
        else:
            self.first.before = request
        self.first = request

    def remove(self, request: Request) -> None:
        """Take `request` out, wherever it stands."""
        if request.before is None:
            self.first = request.after
        else:
            request.before.after = request.after
        if request.after is None:
            self.last = request.before
        else:
            request.after.before = request.before
        request.before = request.after = None

    def __iter__(self) -> Iterator[Request]:
        request = self.first
        while request is not None:
            after = request.after  # read first: the caller may take `request` out
            yield request
            request = after


class FairQueue:
    """The requests that wait for one service: its clients take turns, each with its own in order (C20)."""

    __slots__ = ("_lines", "size")

    def __init__(self) -> None:
        self.size = 0
        self._lines: OrderedDict[bytes, Line] = OrderedDict()

    def append(self, request: Request) -> None:
        """Put `request` last in its client's line."""
        line = self._line(request.client)
        if line.last is not None:
            request.share(line.last)
        line.append(request)
        self.size += 1

    def prepend(self, request: Request) -> None:
        """Put `request` in front of all others (C17)."""
        self._line(request.client).prepend(request)
        self._lines.move_to_end(request.client, last=False)
        self.size += 1

    def peek(self) -> Request | None:
        """The request whose turn it is."""
        for line in self._lines.values():
            return line.first
        return None

    def turn(self, client: bytes) -> None:
        """`client` has had its turn: if more of its requests wait, they wait for all other clients' turns."""
        if client in self._lines:
            self._lines.move_to_end(client)

    def remove(self, request: Request) -> None:
        """Take out `request`, which waits here."""
        line = self._lines[request.client]
        line.remove(request)
        if line.first is None:
            del self._lines[request.client]
        self.size -= 1

    def __contains__(self, client: bytes) -> bool:
        return client in self._lines

    def line(self, client: bytes) -> Iterable[Request]:
        """The requests of `client` that wait here, oldest first."""
        return self._lines.get(client, ())

    def _line(self, client: bytes) -> Line:
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = Line()
        return line


class Service:
    """A name that has a worker or a waiting request."""

    __slots__ = ("dispatched", "idle", "name", "queue", "unwilling", "workers")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.workers: dict[Worker, None] = {}
        self.idle: OrderedDict[Worker, None] = OrderedDict()
        """Workers without a request, least recently used first (C21)."""
        self.dispatched = 0
        """How often a worker was given a request."""
        self.queue = FairQueue()
        self.unwilling: dict[Request, None] = {}
        """Those in the queue that are not to wait when there is no worker at all."""


class Registry:
    """All services, workers and requests of a broker."""

    def __init__(self) -> None:
        self.services: dict[bytes, Service] = {}
        self.workers: dict[Route, Worker] = {}
        self.connections: dict[bytes, dict[Route, Worker]] = {}
        """The workers of each connection; an entry goes with the last."""
        self.queued = 0
        self.queued_bytes = 0
        self.running = 0
        self.numbered: dict[Route, Request] = {}
        """The X1 requests that have not ended; the route is the number."""
        self._ended: set[Route] = set()
        self._ended_before: set[Route] = set()
        # client → what it has here; an entry goes with the last thing in it
        self._waiting: dict[bytes, dict[Service, None]] = {}
        self._worked_on: dict[bytes, dict[Request, None]] = {}

    # ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def service(self, name: bytes) -> Service:
        """The service of that name, made if there is none; `forget_if_empty` is to follow."""
        service = self.services.get(name)
        if service is None:
            service = self.services[name] = Service(name)
        return service

    def forget_if_empty(self, service: Service) -> None:
        """Drop a service that nothing is left of."""
        if not service.workers and not service.queue.size:
            self.services.pop(service.name, None)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_worker(self, worker: Worker) -> None:
        """Register a worker.  It is not idle yet."""
        self.workers[worker.route] = worker
        held = self.connections.get(worker.identity)
        if held is None:
            self.connections[worker.identity] = {worker.slot: worker}
        else:
            held[worker.slot] = worker
        worker.service.workers[worker] = None

    def worker(self, route: Route, header: bytes) -> Worker | None:
        """The worker that a message with this route and header is from.

        In X1 each envelope of a connection is a worker; else there is one, whatever envelope it puts in front.
        """
        worker = self.workers.get(route)
        if worker is None and (header != WX1 or len(route) == 1):
            held = self.connections.get(route[0])
            if held is not None:
                worker = held.get(ALONE)
        return worker

    def workers_of(self, identity: bytes) -> list[Worker]:
        """All workers of that connection."""
        held = self.connections.get(identity)
        return [] if held is None else list(held.values())

    def remove_worker(self, worker: Worker) -> Request | None:
        """Forget a worker and return the request it held, which is then nowhere; `forget_if_empty` is to follow."""
        del self.workers[worker.route]
        held = self.connections[worker.identity]
        if len(held) == 1:
            del self.connections[worker.identity]
        else:
            del held[worker.slot]
        del worker.service.workers[worker]
        worker.service.idle.pop(worker, None)
        request = worker.request
        if request is not None:
            self.end(worker, request)
        return request

    def begin(self, worker: Worker, request: Request) -> None:
        """`worker`, which is not among the idle, now holds `request`."""
        worker.request = request
        request.worker = worker
        self.running += 1
        held = self._worked_on.get(request.client)
        if held is None:
            self._worked_on[request.client] = {request: None}
        else:
            held[request] = None

    def end(self, worker: Worker, request: Request) -> None:
        """`worker` no longer holds `request`."""
        worker.request = None
        request.worker = None
        self.running -= 1
        held = self._worked_on[request.client]
        if len(held) == 1:
            del self._worked_on[request.client]
        else:
            del held[request]

    def running_for(self, client: bytes) -> list[Request]:
        """The requests of `client` that workers hold."""
        return list(self._worked_on.get(client, ()))

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def end_number(self, route: Route) -> None:
        """The X1 request of that number has ended: the number is free again."""
        self.numbered.pop(route, None)
        if len(self._ended) >= REMEMBERED:
            self._ended_before, self._ended = self._ended, set()
        self._ended.add(route)

    def ended_lately(self, route: Route) -> bool:
        """Whether an X1 request of that number was among the last to end."""
        return route in self._ended or route in self._ended_before

    # ── waiting requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, request: Request, *, front: bool = False) -> None:
        """Let a request wait: last of its client's, or (one that came back, C17) in front of all others."""
        queue = request.service.queue
        if front:
            queue.prepend(request)
        else:
            queue.append(request)
        if not request.options.wait:
            request.service.unwilling[request] = None
        services = self._waiting.get(request.client)
        if services is None:
            self._waiting[request.client] = {request.service: None}
        else:
            services[request.service] = None
        self.queued += 1
        self.queued_bytes += request.size

    def next_request(self, service: Service) -> Request | None:
        """Take the request of `service` whose turn it is (C20)."""
        request = service.queue.peek()
        if request is not None:
            self.dequeue(request)
            service.queue.turn(request.client)
        return request

    def dequeue(self, request: Request) -> None:
        """Take out a request that waits, whether its turn has come or not."""
        service, client = request.service, request.client
        service.queue.remove(request)
        if not request.options.wait:
            del service.unwilling[request]
        self.queued -= 1
        self.queued_bytes -= request.size
        if client not in service.queue:
            services = self._waiting[client]
            del services[service]
            if not services:
                del self._waiting[client]

    def waiting_for(self, client: bytes) -> list[Request]:
        """The requests of `client` that wait, for whatever service."""
        return [request for service in self._waiting.get(client, ()) for request in service.queue.line(client)]
