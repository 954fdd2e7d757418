"""The records of the broker: services, workers, clients, requests, and links to other brokers.

`Registry` owns the transitions of requests, `Links` those of links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from ..service_limits import NO_LIMITS, ServiceLimits
from ..timers import NEVER, LinkedList, TimerNode
from ..wire import CX1, DIALECTS, EMPTY, NO_OPTIONS, Options, RequestId, Route, signed, size_of
from ..wire.names import show
from .metrics import UNCOUNTED, ServiceMetrics
from .roles import Role
from .scheduling import Schedule

if TYPE_CHECKING:
    from .abouts import About
    from .drops import Drop
    from .fair_queue import ClientQueue, FairQueue
    from .groups import Group
    from .scheduling import Pool

REQUEST_OVERHEAD: Final = 512
"""Bytes charged for a request beside its body: the size of its objects, rounded up (C40)."""
FRAME_OVERHEAD: Final = 64
"""Bytes charged for each frame beside its content."""
GROUP_OVERHEAD: Final = 1536
"""Bytes charged for a request's group."""
CLIENT_OVERHEAD: Final = 1536
"""Bytes charged for a client that has requests."""
MAX_UNANSWERED: Final = 64
"""Requests that may be at another broker that has not answered any yet: it may claim more than it can do.  Handlers may
wait for each other, so they are as many as an asyncio worker takes by default."""
PeerKey = bytes | Route
"""The routing id of a directly connected peer; for a peer behind proxies, the routing id of the proxy and the addresses
in the envelope."""


def key_of(route: Route) -> PeerKey:
    """Return the key of the peer whose messages have this route, which does not contain an X1 request's number."""
    return route[0] if len(route) < 3 else route[:-1]


class Client:
    """A client that has requests here."""

    __slots__ = (
        "batch", "charge", "gone", "key", "link", "named", "numbered", "proxy", "request_bytes", "requests", "role",
        "route", "running", "untold", "waiting",
    )  # fmt: skip

    def __init__(self, key: PeerKey, role: Role, link: Link | None = None) -> None:
        self.key = key
        self.role = role
        self.link = link
        """The link, if this client is another broker."""
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
        self.waiting: dict[FairQueue, ClientQueue] = {}
        """Its requests that wait, by the service's queue."""
        self.untold: deque[Untold] | None = None
        """Its requests that have ended, of which it is told once it reads its messages; None if there are none."""
        self.route: Route = self.path
        """The route of its X1 messages, and of those to it."""
        self.batch: Any = None
        """The open batch (`batch.Batch`), which is sent at the end of the broker's turn."""

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


class Request(TimerNode):
    """A client's request that waits or is held by a worker."""

    __slots__ = (
        "accepted", "arrived", "attempt", "attempts", "body", "charge", "client", "deadline", "delimited", "handed",
        "header", "number", "options", "queued", "service", "since", "size", "tag", "way",
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
        self.arrived = False
        """Whether it was accepted in this turn of the broker, and is not queued yet."""
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
        if options.group:
            self.charge += GROUP_OVERHEAD
        """Bytes charged for it while it is outstanding: what it takes in memory, rounded up (C40)."""

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
        self.address = address
        """The client address that the worker was given, an integer; it is never used again (C32).  Declared as one,
        compiled code would make it an object each time that it is looked up."""
        self.turn = turn
        """The broker's turn in which it was sent."""
        self.doubtful = doubtful
        """Whether the worker had been silent for so long that it may have been dead already: then the request is not
        blamed for its death."""
        self.group: Group | None = None
        """The group that counts it while it runs here; None if nobody does."""
        self.streamed = False
        """Whether a PARTIAL has been sent to the client, so that no other worker can be given the request (C17)."""
        self.collected: Collected | None = None
        """The PARTIALs so far, for a 0.1 or PPP client, which gets them with the FINAL (C24)."""
        self.abandoned = False
        """Whether the request has ended for its client while the worker holds it: nothing more is sent for it."""


class Untold:
    """A request that has ended, and what its client is to be told."""

    __slots__ = ("attempt", "reason", "request", "text")

    def __init__(self, request: Request, reason: Drop, attempt: Attempt | None, text: str) -> None:
        self.request = request
        self.reason = reason
        self.attempt = attempt
        """The last attempt, if there was any."""
        self.text = text


class Worker(TimerNode):
    """A registered worker: it offers one service (C6) and holds up to `credit` requests; with 0.2 and 0.1, one."""

    __slots__ = (
        "about", "batch", "busy_seconds", "credit", "dialect", "done", "free", "gives_up", "header", "held", "host",
        "id", "key", "last_seen", "last_sent", "leaving", "limits", "misaddressed", "name", "oversized_reply_at",
        "pid", "pool", "pooled", "pooled_load", "role", "route", "service", "since", "suspects", "unreached_from",
        "version", "warm",
    )  # fmt: skip

    def __init__(  # noqa: PLR0915 - a record with many fields
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
        self.about: About | None = None
        """What it says of its service; None if it says nothing, or the broker has no room for it."""
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
        self.suspects = 0
        """Number of suspects that it holds."""
        self.leaving = False
        """Whether it has sent DISCONNECT, and finishes what it holds (X1)."""
        self.gives_up = EMPTY
        """Why it will not finish what it holds, if its DISCONNECT says so."""
        self.batch: Any = None
        """The open batch of commands to it, which is sent at the end of the broker's turn."""
        self.warm = False
        """Whether it speaks X1 and the last request that it ended was answered with a FINAL: then it goes before others
        that hold as many (C21)."""
        self.pool: Pool | None = None
        """The pool that it is in.  The schedule keeps this and the next three."""
        self.pooled_load = 0
        """Its load when it was added to the pool."""
        self.pooled = 0
        """Grows with each worker that is added, so it tells the order."""
        self.free = 0
        """Its share of the schedule's capacity."""
        self.unreached_from = -1
        """The first turn whose messages it did not receive; -1 if it received everything."""
        self.oversized_reply_at: float | None = None
        """When it sent a FINAL over the limits, if it has not sent a valid one since (0.2, 0.1)."""
        self.misaddressed = 0
        """Replies to what cannot be an address of this broker, since it was given a request last."""
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

    def update(self) -> None:
        """Tell the schedule that the load or the credit of these workers has changed, or that it is leaving."""
        self.service.schedule.update_remote(self)

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
        "arrived", "available", "declared", "dispatched", "metrics", "name", "named_by", "no_wait", "running",
        "schedule", "unsettled", "workers",
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
        self.schedule = Schedule()
        self.arrived: list[Request] = []
        """Requests accepted in this turn of the broker, and not queued yet."""
        self.unsettled = False
        """Whether it is in `Registry.unsettled`."""
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


class LinkKind(StrEnum):
    """What the broker at the other end is to this one."""

    PEER = "peer"
    PARENT = "parent"
    CHILD = "child"


class LinkState(StrEnum):
    """How far a link is."""

    DOWN = "down"
    OPENING = "opening"
    UP = "up"


class Link:
    """One link, from this broker's point of view."""

    __slots__ = (
        "announced", "answered", "attempts", "backoff", "batch", "client", "dirty", "heartbeat_at", "identity",
        "instance", "key", "kind", "last_seen", "name", "opens", "penalty", "received", "remotes", "retry_at", "role",
        "sent", "standby", "state", "trouble", "untried", "up_since", "where",
    )  # fmt: skip

    def __init__(self, identity: bytes, kind: LinkKind, role: Role, *, opens: bool, where: str = "") -> None:
        self.identity = identity
        """The first frame of its messages."""
        self.kind = kind
        self.role = role
        """The role of the other broker's key."""
        self.opens = opens
        """Whether this broker opens the connection."""
        self.where = where
        """The endpoint that it opens, for people."""
        self.state = LinkState.DOWN
        self.name = ""
        """The other broker's name; empty until it is known."""
        self.instance = ""
        """Distinguishes brokers of the same name, and a broker from itself before a restart."""
        self.key: tuple[str, int] = ("", 0)
        """Decides which of several links between two brokers is used.  Both ends of a link have the same key."""
        self.standby = False
        """Whether there is another link to the same broker, which is used instead."""
        self.client = Client(identity, role, self)
        """The other broker as a client of this one."""
        self.batch: Any = None
        """The open batch of requests to the other broker, which is sent at the end of the broker's turn."""
        self.remotes: dict[bytes, Remote] = {}
        """What can be reached there, by service."""
        self.attempts: dict[RequestId, Attempt] = {}
        """The requests that are there, by address."""
        self.announced: dict[bytes, tuple[int, int, int]] = {}
        """The credit, free credit and hops announced for each service."""
        self.dirty: dict[bytes, None] = {}
        """Services whose announcement may have to change."""
        self.answered = False
        """Whether the other broker has answered a request since the link is up."""
        self.last_seen = 0.0
        self.heartbeat_at = 0.0
        self.up_since = 0.0
        self.retry_at = 0.0
        """When to open the connection again, if it is down."""
        self.backoff = 0.0
        self.penalty = 0.0
        """The pause after the link was ended last, in seconds, until it has lasted for `LASTING`."""
        self.trouble = ""
        """Why it is not up."""
        self.untried = False
        """Whether it is still being tried: it has not failed, nor has the other broker announced all that it offers."""
        self.sent = 0
        """Number of requests passed on over it so far."""
        self.received = 0
        """Number of requests that came over it so far."""

    @property
    def takes_more(self) -> bool:
        """Whether another request may be passed on over this link."""
        return self.answered or len(self.attempts) < MAX_UNANSWERED

    def joins(self, other: Link) -> bool:
        """Return whether what comes over this link may go over `other`, and the reverse.

        To the parent and to peers goes only what comes from children, so that nothing goes in circles (C44).
        """
        return other is not self and (self.kind is LinkKind.CHILD or other.kind is LinkKind.CHILD)
