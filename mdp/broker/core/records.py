"""The records of the broker: services, workers, clients and requests.

`Registry` owns the transitions of requests, `Directory` knows the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ...service_limits import NO_LIMITS, ServiceLimits
from ...timers import NEVER, LinkedList
from ...wire import DIALECTS, EMPTY, NO_OPTIONS, Options, RequestId, Route, signed, size_of
from ...wire.names import show
from .drops import Drop
from .roles import Role
from .scheduling.fair_queue import ClientQueues, QueuedRequest
from .scheduling.groups import Group, Groups
from .scheduling.schedule import Schedule, ScheduledWorker
from .service_metrics import UNCOUNTED, ServiceMetrics

REQUEST_OVERHEAD: Final = 512
"""Bytes charged for a request beside its body: the size of its objects, rounded up (C40)."""
FRAME_OVERHEAD: Final = 64
"""Bytes charged for each frame beside its content."""
GROUP_OVERHEAD: Final = 1536
"""Bytes charged for a request's group."""
CLIENT_OVERHEAD: Final = 1536
"""Bytes charged for a client that has requests."""
PeerKey = bytes | Route
"""The routing id of a directly connected peer; for a peer behind proxies, the routing id of the proxy and the addresses
in the envelope."""


def key_of(route: Route) -> PeerKey:
    """Return the key of the peer whose messages have this route, which does not contain an X1 request's number."""
    return route[0] if len(route) < 3 else route[:-1]


class Client:
    """A client that has requests here."""

    __slots__ = (
        "batch", "charge", "gone", "is_broker", "key", "named", "numbered", "proxy", "request_bytes", "requests",
        "role", "route", "running", "untold", "waiting",
    )  # fmt: skip

    def __init__(self, key: PeerKey, role: Role) -> None:
        self.key = key
        self.role = role
        self.is_broker = False
        """Whether it is another broker, which passes on requests of its clients."""
        self.proxy: Proxy | None = None
        """The connection over which it has requests, if others use it too."""
        self.charge = CLIENT_OVERHEAD
        """Bytes charged for it while it has requests."""
        self.request_bytes = 0
        """Bytes charged for it and its requests."""
        if not isinstance(key, bytes):
            self.charge += FRAME_OVERHEAD * len(key) + size_of(key)
        self.gone = False
        """Whether it is no longer connected: nothing is sent to it, and another client may have its key."""
        self.requests = 0
        """Number of its requests that have been accepted and have not ended."""
        self.named = 0
        """Number of services that are known only because it was the first to call them (C41)."""
        self.numbered: dict[int, Request] = {}
        """Its X1 requests that have not ended, by number."""
        self.running: LinkedList[Request] = LinkedList()
        """Its requests that workers hold."""
        self.waiting: ClientQueues = {}
        """Its requests that wait, by the service's queue."""
        self.untold: deque[Untold] | None = None
        """Its requests that have ended, of which it is told once it reads its messages; None if there are none."""
        self.route: Route = self.path
        """The route of its X1 messages, and of those to it."""
        self.batch: Any = None
        """The open batch (`batch.Batch`), which is sent at the end of the broker's turn."""

    @property
    def broker(self) -> str:
        """The name of the broker that it is; empty if it is none."""
        return ""

    @property
    def identity(self) -> bytes:
        """The routing id of its connection."""
        return self.key if isinstance(self.key, bytes) else self.key[0]

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
        """The total size of the frames, in bytes."""
        self.charge = 0
        """Bytes charged for the frames, with their request."""

    def add(self, body: list[bytes]) -> None:
        """Add the frames of one more PARTIAL."""
        self.frames += body
        self.size += size_of(body)


class Way:
    """The way of a request over several brokers (C44)."""

    __slots__ = ("addressed", "dialect", "losses", "pinned", "via", "waits")

    def __init__(self, via: tuple[str, ...] = (), dialect: str = "", waits: bool = False) -> None:
        self.via = via
        """The names of the brokers that it has passed before this one."""
        self.dialect = dialect
        """The dialect of its client at the first of them, if that does not speak X1."""
        self.waits = waits
        """Whether it may wait here for a limit (C48)."""
        self.addressed = EMPTY
        """The name of its service, if it is addressed to another broker: then `service` stands for that broker."""
        self.pinned = False
        """Whether the request is addressed to this broker, so that it is not passed on."""
        self.losses = 0
        """Number of links that broke while it was at the other broker."""


class Request(QueuedRequest):
    """A client's request that waits or is held by a worker."""

    __slots__ = (
        "accepted", "arrived", "attempt", "body", "charge", "client", "deadline", "delimited", "handed", "header",
        "number", "queued", "service", "size", "tag", "way",
    )  # fmt: skip
    accepted: float
    """When it was accepted."""
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
        super().__init__()
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
        self.arrived = False
        """Whether it was accepted in this turn of the broker, and is not queued yet."""
        self.queued = False
        """Whether it is in its service's queue."""
        self.handed = 0
        """Number of workers that received it and did not release it."""
        self.attempts = 0
        self.way: Way | None = None
        """Its way over several brokers; None if nothing is known of it yet."""
        size = size_of(body)
        self.size = size
        """Bytes of its body."""
        self.charge = REQUEST_OVERHEAD + FRAME_OVERHEAD * len(body) + size + len(options.raw)
        if options.group:
            self.charge += GROUP_OVERHEAD
        """Bytes charged for it while it is outstanding: its memory, rounded up (C40)."""

    def sign(self, signature: bytes) -> None:
        """Write into its options on whose behalf it is made."""
        self.options = signed(self.options, signature)

    def came_over(self, via: tuple[str, ...], attempts: int, dialect: str, *, waits: bool = True) -> None:
        """Record which brokers it has passed, how many workers have died while they held it there, the dialect of its
        client if that does not speak X1, and whether it may wait for a limit."""
        self.way = Way(via, dialect, waits)
        self.attempts = attempts

    def recorded_way(self) -> Way:
        """Return its way, which is recorded from now on."""
        if self.way is None:
            self.way = Way()
        return self.way

    @property
    def client_queues(self) -> ClientQueues:
        """The queues of its client."""
        return self.client.waiting

    @property
    def pinned(self) -> bool:
        """Whether it is addressed to this broker, so that only workers here may do it."""
        return self.way is not None and self.way.pinned

    @property
    def dialect(self) -> str:
        """The dialect of its client, here or at another broker; empty if that speaks X1."""
        if self.number is None:
            return DIALECTS[self.header]
        return "" if self.way is None else self.way.dialect

    @property
    def waits(self) -> bool:
        """Whether it waits for a worker."""
        return self.queued or self.arrived

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, though its client may not have been told."""
        attempt = self.attempt
        return not self.waits if attempt is None else attempt.abandoned

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

    __slots__ = ("abandoned", "address", "collected", "doubtful", "group", "request", "streamed", "turn", "worker")

    def __init__(self, request: Request, worker: Worker, address: Any, turn: int, *, doubtful: bool) -> None:
        self.request = request
        self.worker = worker
        # Not declared as an integer for mypyc, which would make it an object each time that it is looked up.
        self.address = address
        """The client address that the worker was given, an integer; it is never used again (C32)."""
        self.turn = turn
        """The broker's turn in which it was sent."""
        self.doubtful = doubtful
        """Whether the worker had been silent for so long that it may have been dead already: then the request is not
        blamed for its death."""
        self.group: Group[Request] | None = None
        """The group that counts it while it runs here, or None."""
        self.streamed = False
        """Whether a PARTIAL has been sent to the client, so that no other worker can be given the request (C17)."""
        self.collected: Collected | None = None
        """The PARTIALs so far, for a 0.1 or PPP client, which gets them with the FINAL (C24)."""
        self.abandoned = False
        """Whether the request has ended for its client while the worker holds it: nothing more is sent for it."""

    def start(self, groups: Groups[Request], now: float) -> None:
        """Let the groups of its service count it until it ends."""
        self.group = groups.started(self.request.options.group, now)


class Untold:
    """A request that has ended, and why, until its client is told."""

    __slots__ = ("attempt", "reason", "request", "text")

    def __init__(self, request: Request, reason: Drop, attempt: Attempt | None, text: str) -> None:
        self.request = request
        self.reason = reason
        self.attempt = attempt
        """The last attempt, if there was any."""
        self.text = text


class About:
    """A description of a service by some of its workers: the same text is kept once."""

    __slots__ = ("text", "workers")

    def __init__(self, text: bytes) -> None:
        self.text = text
        """A JSON object."""
        self.workers = 0
        """Number of workers that say it."""


class Worker(ScheduledWorker):
    """A registered worker: it offers one service (C6) and holds up to `credit` requests; with 0.2 and 0.1, one."""

    __slots__ = (
        "about", "batch", "busy_seconds", "dialect", "done", "gives_up", "header", "held", "host", "id", "key",
        "last_seen", "last_sent", "limits", "misaddressed", "name", "oversized_reply_at", "pid", "role", "route",
        "service", "since", "unreached_from", "version",
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
        super().__init__(credit)
        self.role = role
        self.route = route
        self.key = key_of(route)
        self.header = header
        self.service = service
        self.id = id
        """A number that identifies it in logs and `mmi.workers`; routing ids are not shown to anyone (C39)."""
        self.name = ""
        self.host = ""
        self.pid = 0
        self.version = ""
        self.about: About | None = None
        """Its description of its service; None if it gives none, or the broker has no room for it."""
        self.limits = NO_LIMITS
        """The limits that it declares for its service."""
        self.dialect = False
        """Whether it wants to know the dialect of clients that do not speak X1."""
        self.held: dict[RequestId, Attempt] = {}
        """The requests that it holds, by address."""
        self.done = 0
        """Number of requests that it has answered."""
        self.busy_seconds = 0.0
        """How long it held the requests that it has answered, all together."""
        self.gives_up = EMPTY
        """Why it will not finish the requests that it holds, if its DISCONNECT says so."""
        self.batch: Any = None
        """The open batch of commands to it, which is sent at the end of the broker's turn."""
        self.unreached_from = -1
        """The first turn whose messages it did not receive; -1 if it received everything."""
        self.oversized_reply_at: float | None = None
        """When it sent a FINAL over the limits, if it has not sent a valid one since (0.2, 0.1)."""
        self.misaddressed = 0
        """Replies to addresses that this broker cannot have given, since it was given a request last."""
        self.since = now
        self.last_seen = now
        self.last_sent = now

    def told(self, now: float) -> None:
        """Record that it is sent something."""
        self.last_sent = now

    def given(self, now: float) -> None:
        """Record that it is sent a request."""
        self.last_sent = now
        self.oversized_reply_at = None
        self.misaddressed = 0

    def hold(self, attempt: Attempt) -> None:
        """Record that it holds a request."""
        self.held[attempt.address] = attempt

    def let_go(self, attempt: Attempt) -> None:
        """Record that it no longer holds a request."""
        del self.held[attempt.address]

    def update(self) -> None:
        """Tell the schedule that its credit, load or suspects have changed, or that it is leaving."""
        self.service.schedule.update(self)

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
        """Return how log lines name it."""
        pid = f"pid {self.pid}" if self.pid else ""
        host = f"on {self.host}" if self.host else ""
        details = ", ".join(each for each in (self.name, host, pid) if each)
        return f"{self.id} ({details})" if details else f"{self.id}"


class Remote(Worker):
    """The workers of a service that are reached through another broker: to this one, a worker that is used when no
    local worker has credit.

    The other broker announces their `credit` and how much of it is free.  All that the core knows of other brokers is
    said here and in `Federation`.
    """

    __slots__ = ("broker", "hops", "may_hold", "wanted")

    def __init__(self, route: Route, header: bytes, service: Service, role: Role, broker: str) -> None:
        super().__init__(route, header, service, role, credit=0, id=0, now=0.0)
        self.broker = broker
        """The name of the other broker."""
        self.hops = 1
        """How many brokers away the nearest of these workers is."""
        self.may_hold = 0
        """How many requests it can hold, itself and from us, while none of them has to wait there."""
        self.wanted = 0
        """How many requests may be there: `may_hold` if there are local workers, else `credit`, so that requests wait
        where the workers are, in turn with those of other brokers."""

    @property
    @abstractmethod
    def takes_more(self) -> bool:
        """Whether another request may be passed on to the other broker."""

    @abstractmethod
    def may_take(self, request: Request) -> bool:
        """Return whether `request` may be passed on to the other broker (C44)."""

    def update(self) -> None:
        """Tell the service that the load or the credit of these workers has changed, or that they are leaving."""
        free = 0 if self.leaving else max(self.wanted - self.load, 0)
        self.service.beyond += free - self.free
        self.free = free

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
        "arrived", "available", "beyond", "declared", "dispatched", "metrics", "name", "named_by", "no_wait",
        "remotes", "running", "schedule", "unsettled", "workers",
    )  # fmt: skip

    def __init__(self, name: bytes, metrics: ServiceMetrics = UNCOUNTED) -> None:
        self.name = name
        self.metrics = metrics
        """Its counts; `Metrics.others` until it has had a worker."""
        self.workers: dict[Worker, None] = {}
        self.named_by: Client | None = None
        """The client whose request made it known, if it has had no worker since (C41)."""
        self.available = 0
        """Number of workers that are not leaving."""
        self.schedule: Schedule[Request, Worker] = Schedule()
        self.remotes: list[Remote] = []
        """The workers that are reached through other brokers, one entry for each of these."""
        self.beyond = 0
        """How many requests may be passed on now."""
        self.arrived: list[Request] = []
        """Requests accepted in this turn of the broker, and not queued yet."""
        self.unsettled = False
        """Whether it is in `Directory.unsettled`."""
        self.running = 0
        """Number of requests that workers hold."""
        self.dispatched = 0
        """Number of requests sent to workers so far."""
        self.declared: dict[ServiceLimits, int] = {}
        """How many workers declare each of these limits; those without are not counted."""
        self.no_wait: dict[Request, None] = {}
        """Queued requests that must not wait if there is no worker at all."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self.schedule.waiting + len(self.arrived)

    @property
    def room(self) -> int:
        """How many requests can be dispatched without waiting for their turn, here or at other brokers."""
        return self.schedule.capacity + self.beyond if self.schedule.groups is None else 0

    def can_pass_on(self, request: Request) -> bool:
        """Return whether another broker may do `request`, whether it has credit now or not."""
        return not request.pinned and any(remote.may_take(request) for remote in self.remotes)

    def next_remote(self, request: Request) -> Remote | None:
        """Return where to pass `request` on to, or None."""
        return None if request.pinned else self._nearest(request, ())

    def next_remote_pair(self, now: float) -> tuple[Request, Remote] | None:
        """Remove the next request that can be passed on from its queue; return it with where it goes, or None."""
        tried: list[Remote] = []
        while (remote := self._nearest(None, tried)) is not None:
            request = self.schedule.take_for(remote.may_take, now)
            if request is not None:
                return request, remote
            tried.append(remote)
        return None

    def _nearest(self, request: Request | None, tried: Sequence[Remote]) -> Remote | None:
        """Return the remote workers that may be given a request, or this one: over the fewest links, and among those,
        where most credit is free (C44)."""
        best: Remote | None = None
        for remote in self.remotes:
            if (
                remote.free
                and remote.takes_more
                and remote not in tried
                and (request is None or remote.may_take(request))
                and (best is None or remote.precedes(best))
            ):
                best = remote
        return best
