"""Who is there and who waits: services, their workers, and the fair queue in front of each.

No frames, no clock, no socket.  Every operation takes the same time however many there are, so that the cost of a
message does not grow with the number of workers, clients, services or waiting requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .lines import Line, Linked
from .timers import Timed
from .wire import EMPTY, NO_OPTIONS, WX1, Options, Route, size_of

REQUEST_OVERHEAD: Final = 512
"""Bytes charged for a waiting request beside its body: what its records take, rounded up."""
REMEMBERED: Final = 5000
"""At least so many of the requests that ended last are remembered, so that a late CANCEL is known for what it is."""
NEVER: Final = 1e300
"""Later than any clock will tell; in seconds."""


Envelope = bytes | tuple[bytes, ...]
"""What stands between a client's identity and the header, as little as will do where many wait: of an X1 request the
number alone, unless there is more than that and the empty frame."""
DELIMITED: Final[Envelope] = (EMPTY,)


def envelope_of(route: Route) -> Envelope:
    """The envelope of a client's request."""
    count = len(route)
    if count == 3 and not route[2]:
        return route[1]
    if count == 2 and not route[1]:
        return DELIMITED  # one for all
    return route[1:]


class Client:
    """The connection of a client that has requests here."""

    __slots__ = ("identity", "numbered", "requests", "running", "waiting")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.requests = 0
        """How many wait or are worked on."""
        self.numbered: dict[Envelope, Request] = {}
        """Those of X1 that have not ended; the envelope is the number."""
        self.running: Line[Request] = Line()
        """Those that workers hold."""
        self.waiting: dict[FairQueue, Turn] = {}
        """Those that wait, by their service's queue; an entry goes with the last of them."""


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
    """A client's request while it waits or is worked on."""

    __slots__ = (
        "abandoned", "attempts", "body", "client", "collected", "deadline", "envelope", "handed", "header", "late",
        "options", "service", "size", "streamed", "worker",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        envelope: Envelope,
        header: bytes,
        service: Service,
        body: Sequence[bytes],
        *,
        options: Options = NO_OPTIONS,
        deadline: float = NEVER,
    ) -> None:
        self.before = None
        self.after = None
        self.bucket = None
        self.sooner = None
        self.later = None
        self.client = client
        self.envelope = envelope
        self.header = header
        self.service = service
        self.body = body
        """While it waits a tuple, which takes less than a list."""
        self.options = options
        self.deadline = deadline
        """When its time has passed, if it has a ttl."""
        self.size = 0
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
        self.collected: Collected | None = None
        """For a 0.1 client, what came so far (C24)."""
        self.abandoned = False
        """Nobody waits for it any more, and nothing is sent for it."""

    @property
    def route(self) -> Route:
        """What stands before the header of its messages."""
        envelope = self.envelope
        if isinstance(envelope, bytes):
            return (self.client.identity, envelope, EMPTY)
        return (self.client.identity, *envelope) if envelope else (self.client.identity,)

    def charge(self) -> int:
        """Bytes charged for it while it waits; from now on they stand in `size`."""
        if not self.size:
            envelope = self.envelope
            own = len(envelope) if isinstance(envelope, bytes) else size_of(envelope)
            self.size = REQUEST_OVERHEAD + size_of(self.body) + len(self.options.raw) + own + len(self.client.identity)
        return self.size


ALONE: Final[Route] = ()
"""Among the workers of a connection the key of the one that is not told apart from others by its envelope."""


class Worker(Timed):
    """A registered worker: one service, at most one request (C6); a connection of its own, or in X1 a slot of one."""

    __slots__ = (
        "began", "header", "identity", "idle", "last_seen", "last_sent", "overdue", "reached", "request", "round",
        "route", "service", "since", "slot", "spoiled",
    )  # fmt: skip

    def __init__(self, route: Route, header: bytes, service: Service, now: float) -> None:
        super().__init__()
        self.route = route
        self.identity = route[0]
        """The identity of the worker's connection."""
        self.slot: Route = route if header == WX1 and len(route) > 1 else ALONE
        """What tells it apart from the other workers of its connection."""
        self.header = header
        self.service = service
        self.request: Request | None = None
        self.began = now
        """When it got its request."""
        self.idle = False
        """It stands among the idle of its service."""
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


class Turn(Linked):
    """The requests of one client that wait for one service, and their place among those of the others."""

    __slots__ = ("client", "requests")

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client
        self.requests: Line[Request] = Line()


class FairQueue:
    """The requests that wait for one service: its clients take turns, each with its own in order (C20)."""

    __slots__ = ("_turns", "size")

    def __init__(self) -> None:
        self.size = 0
        self._turns: Line[Turn] = Line()

    def append(self, request: Request) -> None:
        """Put `request` last of its client's."""
        turn = request.client.waiting.get(self)
        if turn is None:
            turn = self._begin(request.client)
            self._turns.append(turn)
        turn.requests.append(request)
        self.size += 1

    def prepend(self, request: Request) -> None:
        """Put `request` in front of all others (C17)."""
        turn = request.client.waiting.get(self)
        if turn is None:
            turn = self._begin(request.client)
        else:
            self._turns.remove(turn)
        self._turns.prepend(turn)
        turn.requests.prepend(request)
        self.size += 1

    def peek(self) -> Request | None:
        """The request whose turn it is."""
        turn = self._turns.first
        return None if turn is None else turn.requests.first

    def next_turn(self) -> None:
        """The first has had its turn: if more of its requests wait, they wait for all others' turns."""
        turn = self._turns.first
        if turn is not None and turn is not self._turns.last:
            self._turns.remove(turn)
            self._turns.append(turn)

    def remove(self, request: Request) -> None:
        """Take out `request`, which waits here."""
        turn = request.client.waiting[self]
        turn.requests.remove(request)
        if turn.requests.first is None:
            self._turns.remove(turn)
            del request.client.waiting[self]
        self.size -= 1

    def _begin(self, client: Client) -> Turn:
        turn = client.waiting[self] = Turn(client)
        return turn


class Service:
    """A name that has a worker or a waiting request."""

    __slots__ = ("dispatched", "idle", "name", "queue", "unwilling", "workers")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.workers: dict[Worker, None] = {}
        self.idle: Line[Worker] = Line()
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
        self.clients: dict[bytes, Client] = {}
        """Those that have a request here, by their identity."""
        self.queued = 0
        self.queued_bytes = 0
        self.running = 0
        self._ended: set[Route] = set()
        self._ended_before: set[Route] = set()

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
        if worker.idle:
            worker.idle = False
            worker.service.idle.remove(worker)
        request = worker.request
        if request is not None:
            self.end(worker, request)
        return request

    def rest(self, worker: Worker) -> None:
        """`worker`, which holds no request, now stands last among the idle."""
        worker.idle = True
        worker.service.idle.append(worker)

    def begin(self, worker: Worker, request: Request) -> None:
        """`worker` now holds `request`, which was nowhere."""
        if worker.idle:
            worker.idle = False
            worker.service.idle.remove(worker)
        worker.request = request
        request.worker = worker
        self.running += 1
        self._count(request.client)
        request.client.running.append(request)

    def end(self, worker: Worker, request: Request) -> None:
        """`worker` no longer holds `request`."""
        worker.request = None
        request.worker = None
        self.running -= 1
        request.client.running.remove(request)
        self._discount(request.client)

    def running_for(self, identity: bytes) -> list[Request]:
        """The requests of that client that workers hold."""
        client = self.clients.get(identity)
        return [] if client is None else list(client.running)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self, identity: bytes) -> Client:
        """The client of that identity.  It is known from its first request on that is enqueued or begun."""
        client = self.clients.get(identity)
        return Client(identity) if client is None else client

    def _count(self, client: Client) -> None:
        if not client.requests:
            self.clients[client.identity] = client
        client.requests += 1

    def _discount(self, client: Client) -> None:
        client.requests -= 1
        if not client.requests:
            del self.clients[client.identity]

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def numbered(self) -> dict[Route, Request]:
        """All X1 requests that have not ended, by their routes."""
        return {each.route: each for client in self.clients.values() for each in client.numbered.values()}

    def numbered_as(self, route: Route) -> Request | None:
        """The X1 request of that number that has not ended."""
        client = self.clients.get(route[0])
        return None if client is None else client.numbered.get(envelope_of(route))

    def end_number(self, request: Request) -> None:
        """The X1 request has ended: its number is free again."""
        request.client.numbered.pop(request.envelope, None)
        self.remember(request.route)

    def remember(self, route: Route) -> None:
        """An X1 request of that number has ended."""
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
        request.body = tuple(request.body)
        self._count(request.client)
        if front:
            queue.prepend(request)
        else:
            queue.append(request)
        if not request.options.wait:
            request.service.unwilling[request] = None
        self.queued += 1
        self.queued_bytes += request.charge()

    def next_request(self, service: Service) -> Request | None:
        """Take the request of `service` whose turn it is (C20)."""
        queue = service.queue
        request = queue.peek()
        if request is not None:
            queue.next_turn()
            self.dequeue(request)
        return request

    def dequeue(self, request: Request) -> None:
        """Take out a request that waits, whether its turn has come or not."""
        service = request.service
        service.queue.remove(request)
        if not request.options.wait:
            del service.unwilling[request]
        self.queued -= 1
        self.queued_bytes -= request.size
        self._discount(request.client)

    def waiting_for(self, identity: bytes) -> list[Request]:
        """The requests of that client that wait, for whatever service."""
        client = self.clients.get(identity)
        return [] if client is None else [request for turn in client.waiting.values() for request in turn.requests]
