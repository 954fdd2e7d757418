"""What holds for any bytes, and for any course of events: the broker beside a model of it that is slow and plain."""

import json
import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import turns
from support import x1_messages as x1

from zmdp.mdp import compiled, wire
from zmdp.mdp.broker.given_up import GIVEN_UP
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.broker.records import NEVER
from zmdp.mdp.broker.scheduling import GROUP_BITS
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import C01, C02, CX1, W01, W02, WX1, batch

QUIET = logging.Logger("quiet", logging.CRITICAL + 1)

# ── what the broker holds ────────────────────────────────────────────────────────────────────────────────────────────


def queued(queue):
    """The requests in a fair queue, client by client as turns come."""
    return [request for each in queue._queues for request in each.requests]


def waiting_in(service):
    return queued(service.schedule.suspects) + queued(service.schedule.queue)


def picture(broker):
    """All that the broker holds, as one value to compare."""
    directory, registry = broker.directory, broker.registry
    return (
        {
            name: ([w.id for w in service.workers], list(map(id, waiting_in(service))), service.schedule.capacity)
            for name, service in directory.services.items()
        },
        {key: (list(w.held), w.credit, w.leaving, w.last_seen, w.last_sent) for key, w in directory.workers.items()},
        {key: list(client.numbered) for key, client in directory.clients.items()},
        (registry.queued, registry.request_bytes, registry.running),
        (broker.stats.dropped.copy(), broker.stats.disconnected.copy(), broker.stats.lost.copy()),
        (broker._workers.beats.next_due(), registry.expiries.next_due()),
    )


def check_books(broker):
    """Between two turns the registry agrees with itself, and keeps nothing that it need not keep."""
    directory, registry = broker.directory, broker.registry
    assert not broker.stats.internal_errors
    services, workers = directory.services.values(), directory.workers.values()
    waiting = [request for service in services for request in waiting_in(service)]
    attempts = [attempt for worker in workers for attempt in worker.held.values()]
    running = [attempt.request for attempt in attempts]
    outstanding = [*waiting, *(attempt.request for attempt in attempts if not attempt.abandoned)]

    # The turn is over.
    assert [
        *broker._shared.outgoing._messages,
        *broker._shared.outgoing._open,
        *registry.finished,
        *directory.unsettled,
    ] == []
    assert not any(service.arrived or service.unsettled for service in services)
    assert not any(peer.batch for peer in [*workers, *directory.clients.values()])

    # Requests: each has one place, and is counted there.
    assert registry.queued == len(waiting)
    requests = sum(request.charge for request in outstanding)
    assert registry.request_bytes == requests + sum(client.charge for client in directory.clients.values())
    assert registry.running == len(running) == sum(service.running for service in services)
    assert len({*waiting, *running}) == len(waiting) + len(running)
    assert all(request.attempt is None and request.queued for request in waiting)
    assert not any(request.queued for request in running)
    for worker in workers:
        for address, attempt in worker.held.items():
            assert (attempt.worker, attempt.address, attempt.request.attempt) == (worker, address, attempt)
            assert attempt.request.service is worker.service
    assert len({attempt.address for attempt in attempts}) == len(attempts)

    # Clients: known while they have a request.
    clients = {request.client for request in outstanding}
    assert directory.clients == {client.key: client for client in clients}
    for client in clients:
        mine = [request for request in outstanding if request.client is client]
        assert client.requests == len(mine)
        assert client.numbered == {request.number: request for request in mine if request.header == CX1}
        held = [request for request in mine if request.attempt is not None]
        assert sorted(client.running, key=id) == sorted(held, key=id)
        assert sorted(registry.waiting_for(client), key=id) == sorted((r for r in mine if r not in held), key=id)
        assert set(client.waiting) == {r.service.schedule.queue_of(r) for r in mine if r not in held}
    assert registry.numbered == [r for client in directory.clients.values() for r in client.numbered.values()]
    behind = {key for key in [*directory.clients, *directory.workers] if not isinstance(key, bytes)}
    assert {key for proxy in directory.proxies.values() for key in proxy.peers} == behind
    assert all(proxy.peers for proxy in directory.proxies.values())
    assert all(key[0] == identity for identity, proxy in directory.proxies.items() for key in proxy.peers)

    # Workers: within their credit when they were given the last, and no more than one suspect each.
    assert {worker for service in services for worker in service.workers} == set(workers)
    assert list(directory.workers) == [worker.key for worker in workers]
    for worker in workers:
        suspects = [attempt for attempt in worker.held.values() if attempt.request.attempts]
        assert worker.suspects == len(suspects) <= 1
        assert worker.held or not worker.leaving, "a worker that left was not answered"
        assert worker.load <= broker.limits.max_credit
    for service in services:
        check_schedule(service)
        assert service.workers or service.waiting, "a service with nothing left is kept"
        assert service.available == sum(not worker.leaving for worker in service.workers)
        assert set(service.no_wait) == {request for request in waiting_in(service) if not request.options.wait}
        assert service.available or not service.no_wait, "a request waits for nobody that was not to wait"

    # Timers: all that is due, and nothing else.
    assert all(worker.bucket for worker in workers)
    assert all(request.bucket for request in waiting)
    timed = {request for request in running if request.bucket}
    assert timed == {each.request for each in attempts if each.request.deadline < NEVER and not each.abandoned}
    assert (len(broker._workers.beats) > 0) == bool(workers)
    assert (len(broker.registry.expiries) > 0) == bool(waiting or timed)


def check_schedule(service):
    """Every worker with free credit is where it is looked for, and no request waits that one of them could take."""

    def place(worker):  # C21
        return not worker.warm, -worker.pooled if worker.warm else worker.pooled

    schedule = service.schedule
    assert all(request.attempts for request in queued(schedule.suspects))
    assert not any(request.attempts for request in queued(schedule.queue))
    for queue in (schedule.suspects, schedule.queue):
        parts = list(queue._queues)
        assert queue.size == sum(len(each.requests) for each in parts)
        assert all(each.requests.first is not None for each in parts)
        assert all(each.client.waiting[queue] is each for each in parts)
        assert len({each.client for each in parts}) == len(parts)
    pools = {schedule._without_suspect: [], schedule._with_suspect: []}
    capacity = 0
    for worker in service.workers:
        free = 0 if worker.leaving else max(0, worker.credit - worker.load)
        capacity += free
        assert worker.free == free
        pool = (schedule._with_suspect if worker.suspects else schedule._without_suspect) if free else None
        assert worker.pool is pool
        if pool is not None:
            assert worker.pooled_load == worker.load
            pools[pool].append(worker)
    assert schedule.capacity == capacity
    for pool, members in pools.items():
        assert pool.size == len(members)
        lines = {load: list(line) for load, line in enumerate(pool._lists) if line.first is not None}
        found = sum(mask << (group << GROUP_BITS) for group, mask in enumerate(pool._loads))
        assert found == sum(1 << load for load in lines)
        assert pool._groups == sum(1 << group for group, mask in enumerate(pool._loads) if mask)
        assert {worker: load for load, line in lines.items() for worker in line} == {w: w.load for w in members}
        assert all(line == sorted(line, key=place) for line in lines.values())
    assert not (schedule.queue.size and capacity), "a worker has credit while a request waits"
    clean = pools[schedule._without_suspect]
    assert not (schedule.suspects.size and clean), "a worker has credit while a suspect waits"


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = [
    b"", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x07", b"\x08", b"\x09", b"\x0a", b"\x0b",
    C01, C02, CX1, W01, W02, WX1, b"echo", b"sum", b"mmi.service", b"mmi.stats", b"mmi.workers", b"mmi.services",
    b"mmi.broker", b"c1", b"c2", b"c3", b"w1", b"w2", b"w3", b"\xff", b"x" * 256, b"1", b"2", b"3", b"017", b"500",
    b'{"wait":false}', b"{",
]  # fmt: skip
frame = st.sampled_from(TOKENS) | st.binary(max_size=8)
frames_of_any_kind = st.lists(frame, max_size=8) | st.lists(frame, max_size=24)
# From a ROUTER: its peers' identities are never empty.
peer = st.sampled_from([b"c1", b"c2", b"c3", b"w1", b"w2", b"w3"]) | st.binary(min_size=1, max_size=5)
message = st.builds(lambda identity, frames: [identity, *frames], peer, frames_of_any_kind)
envelope = st.sampled_from([[], [b""], [b"1", b""], [b"hop", b"1", b""]])
almost = st.builds(
    # a header where one belongs: what follows is right more often
    lambda identity, envelope, header, frames: [identity, *envelope, header, *frames],
    peer, envelope, st.sampled_from([C01, C02, CX1, W01, W02, WX1]), frames_of_any_kind,
)  # fmt: skip
short = st.sampled_from([b"", b"x", b"echo", b"mmi.stats", b"\n", b'{"wait":false}', b"["])
number = st.integers(0, 5) | st.just((1 << 64) - 1)
some_records = {
    CX1: st.tuples(
        st.just("request_to_broker"), number, st.sampled_from([0, 1, 5000]), short, short, st.lists(short, max_size=2)
    )
    | st.tuples(st.just("signal"), st.sampled_from([5, 6]), number),
    WX1: st.tuples(st.just("reply"), st.sampled_from([3, 4, 9]), number, st.lists(short, max_size=2))
    | st.tuples(
        st.just("error"), st.just(7), number, st.sampled_from([0, 500, 1000]), short, st.lists(short, max_size=2)
    )
    | st.tuples(st.just("signal"), st.sampled_from([6, 11, 12]), number)
    | st.tuples(st.just("ready"), st.sampled_from([0, 1, 3, 1 << 31]), short, short)
    | st.tuples(st.just("credit"), st.sampled_from([0, 1, 3, 1 << 31])),
}


@st.composite
def records(draw):
    """An X1 message, some of whose bytes may be wrong."""
    header = draw(st.sampled_from([CX1, WX1]))
    route = (draw(peer), *draw(st.sampled_from([(), (b"",), (b"1", b""), (b"hop", b"")])))
    packed = batch.Batch(route, header)
    for name, *arguments in draw(st.lists(some_records[header], max_size=5)):
        getattr(packed, name)(*arguments)
    (frames,) = packed.messages() or [[*route, header, wire.BATCH, b""]]
    frames += draw(st.lists(short, max_size=2))
    if frames[-1] and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(frames[-1]) - 1))
        frames[-1] = frames[-1][:at] + draw(st.binary(max_size=2)) + frames[-1][at + 1 :]
    return frames


LIMITS = Limits(max_message=1000, max_frames=20, max_queue=3, max_services=4, max_workers=4, max_credit=5)


def busy_broker():
    """A broker with workers of each dialect that hold requests, and requests that wait."""
    broker = Broker(LIMITS, now=0, logger=QUIET, first_address=1)
    for each in (
        x1.ready(b"w3", credit=2),
        x1.request(1, client=b"c3", ttl=5000),
        x1.request(2, client=b"c3", service=b"nobody"),
        [b"w1", W02, b"\x01", b"echo"],
        [b"w2", b"", W01, b"\x01", b"sum"],
        [b"c1", C02, b"\x01", b"echo", b"x"],
        [b"c2", b"", C01, b"echo", b"y"],
    ):
        turns.receive(broker, each, now=0)
    return broker


def commands_of(message):
    """What the broker sent in `message`."""
    read = wire.decode_broker(message[1:])
    if not isinstance(read, wire.Batched) or read.bare:
        return [read]
    return (batch.to_client if read.header == CX1 else batch.to_worker)(message, read.at + 1)


@settings(deadline=None, max_examples=200)
@given(st.lists(message | almost | records(), max_size=8))
def test_any_bytes_are_survived_and_the_invalid_ones_change_nothing(messages):  # C15, C43
    broker = busy_broker()
    for frames in messages:
        before, invalid = picture(broker), broker.stats.invalid.total()
        command = wire.decode_peer(list(frames), max_message=1000, max_frames=20)
        sent = turns.receive(broker, frames, now=0)
        if isinstance(command, wire.Invalid):
            assert sent == []
            assert picture(broker) == before
            assert broker.stats.invalid.total() == invalid + 1
        for each in sent:
            assert not any(isinstance(told, wire.Invalid) for told in commands_of(each))
        check_books(broker)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(message | almost | records(), max_size=8), max_size=4))
def test_any_bytes_are_survived_in_turns_of_many_messages(rounds):  # C15, C43
    broker = busy_broker()
    for now, messages in enumerate(rounds):
        for frames in messages:
            broker.receive(frames, now)
        for each in [*broker.take_messages(), *turns.tick(broker, now)]:
            assert not any(isinstance(told, wire.Invalid) for told in commands_of(each))
        check_books(broker)
    for identity in (b"w1", b"w2", b"w3", b"c1", b"c2", b"c3"):
        turns.gone(broker, identity, now=9)
        check_books(broker)
    turns.close(broker, now=9)
    check_books(broker)
    assert broker.directory.workers == {}


# ── all workers of a machine at once ─────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=200)
@given(
    workers=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([True, False, False])), min_size=1, max_size=5),
    waiting=st.sampled_from([0, 0, 0, 1, 3]),
    later=st.floats(3.06, 100),
)
def test_when_workers_die_together_no_request_is_lost_or_given_to_the_dead(workers, waiting, later):  # C13, C17
    broker = Broker(Limits(heartbeat=1, liveness=3, expiry=1000), now=0, logger=QUIET, first_address=1)
    for number in range(len(workers)):
        turns.receive(broker, x1.ready(b"w%d" % number, credit=3), now=0)
    for number in range(3 * len(workers) + waiting):
        turns.receive(broker, [b"c%d" % number, C02, b"\x01", b"echo", b"x"], now=0)
    for number, (kept, _) in enumerate(workers):
        held = list(broker.directory.workers[b"w%d" % number].held)
        for address in held[kept:]:
            turns.receive(broker, x1.final(address, b"w%d" % number), now=0)
    alive = {b"w%d" % number for number, (_, lives) in enumerate(workers) if lives}
    for worker in sorted(alive):
        turns.receive(broker, x1.heartbeat(worker), now=later - 1)
    unfinished = broker.registry.queued + broker.registry.running
    sent = turns.tick(broker, later)
    assert {message[0] for message in sent} <= alive
    assert set(broker.directory.workers) == alive
    assert broker.registry.queued + broker.registry.running == unfinished
    assert broker.stats.dropped == {}
    check_books(broker)


# ── any course of events ─────────────────────────────────────────────────────────────────────────────────────────────

HEARTBEAT, LIVENESS, EXPIRY, ATTEMPTS, QUEUE, CREDIT = 2.5, 3, 15.625, 2, 5, 6
PATIENCE = HEARTBEAT * LIVENESS
OVERDUE = PATIENCE - 1.5 * HEARTBEAT
"""A worker silent for so long when it gets a request may be dead already: if it is, that is not the request's doing."""
GRAIN = HEARTBEAT / 20
GRACE = 110 * GRAIN
"""Of busy old workers."""
EXPIRY_GRAIN = 0.01
STEP = 4 * GRAIN
"""Turns are this far apart, and one worker speaks in each.  So no two die in the same grain, and the model knows which
is first: those whose PATIENCE ran out are found in the first two grains of a step, those of GRACE in the other two.
"""
OWN = 422
"""The code of the ERRORs that workers send."""


@dataclass(frozen=True)
class Peer:
    identity: bytes
    header: bytes
    envelope: tuple[bytes, ...] = ()

    @property
    def key(self):
        return (self.identity, *self.envelope[:-1]) if len(self.envelope) > 1 else self.identity

    def frames(self, *frames):
        """A message from or to this peer."""
        return [self.identity, *self.envelope, self.header, *frames]

    def batch(self):
        return batch.Batch((self.identity, *self.envelope), self.header)

    def beat(self):
        """A HEARTBEAT from or to this worker."""
        return self.frames() if self.header == WX1 else self.frames(self.command("HEARTBEAT"))

    def command(self, name):
        """The command byte of a worker that does not speak X1."""
        code = {"READY": 1, "REQUEST": 2, "PARTIAL": 3, "FINAL": 4, "HEARTBEAT": 5, "DISCONNECT": 6}[name]
        return bytes([code - (self.header == W01 and code > 2)])


@dataclass(eq=False)
class Asked:
    """A request, by the model's account."""

    client: Peer
    service: bytes
    body: bytes
    number: int | None = None
    values: dict[str, object] = field(default_factory=dict)
    deadline: float | None = None
    deaths: int = 0
    handed: int = 0
    since: float = 0.0
    place: int = 0
    """Its place in the order in which requests began to wait."""
    worker: Peer | None = None
    address: int = 0
    turn: int = 0
    overdue: bool = False
    streamed: bool = False
    abandoned: bool = False
    parts: list[bytes] = field(default_factory=list)

    @property
    def wait(self):
        return self.values.get("wait", True)

    def passed(self, now):
        return self.deadline is not None and now >= self.deadline

    def left(self, now):
        """Milliseconds."""
        return None if self.deadline is None else max(1, math.ceil((self.deadline - now) * 1000))


@dataclass(eq=False)
class Hired:
    """A registered worker, by the model's account."""

    service: bytes
    credit: int
    seen: float
    sent: float
    used: int = 0
    warm: bool = False
    leaving: bool = False
    held: dict[int, Asked] = field(default_factory=dict)

    @property
    def free(self):
        return 0 if self.leaving else max(0, self.credit - len(self.held))

    @property
    def suspicious(self):
        return any(asked.deaths for asked in self.held.values())


CLIENTS = [
    Peer(b"c1", C02),
    Peer(b"c2", C02, (b"hop", b"")),
    Peer(b"c3", C01, (b"",)),
    Peer(b"c4", C01),
    Peer(b"c5", CX1, (b"",)),
    Peer(b"c6", CX1, (b"hop", b"")),
    Peer(b"c7", CX1),
]
NUMBERED = [client for client in CLIENTS if client.header == CX1]
WORKERS = [  # the first are there most often
    Peer(b"w1", WX1, (b"",)),
    Peer(b"w2", W02),
    Peer(b"w3", WX1, (b"hop", b"")),
    Peer(b"w4", WX1),
    Peer(b"w5", W01, (b"",)),
    Peer(b"w6", WX1, (b"",)),
    Peer(b"w7", W02, (b"hop", b"")),
    Peer(b"w8", W01),
]
SERVICES = [b"a", b"b"]
a_ttl = st.sampled_from([None, None, None, 250, 500, 1000, 2500, 6000, 60_000])
"""Milliseconds; STEP is one of them, so that time may pass in the very moment in which something happens."""
a_client, a_worker, a_service = (
    st.sampled_from(CLIENTS + 3 * NUMBERED),
    st.sampled_from(WORKERS + WORKERS[:4]),
    st.sampled_from(SERVICES),
)
a_credit = st.sampled_from([1, 1, 2, 3, 3, 8, 0])
GARBAGE = [
    [],
    [b""],
    [b"MDPC03"],
    [C02, b"\x01", b"a"],
    [W02, b"\x01"],
    [W02, b"\x09"],
    [W02, b"\x04", b"c1", b"x", b"y"],
    [CX1, b"\x01", b"a", b"", b"x"],
    [WX1, b"\x07", b"c1", b"", b"50", b"text"],
]
UNKNOWN_RECORD = [WX1, b"\x09", b"\x00\x00\x00\x09\x63\x00\x00\x00\x00\x00\x00\x00\x01"]
an_answer = st.tuples(
    st.just("work"),
    st.sampled_from(["FINAL"] * 4 + ["PARTIAL", "PARTIAL", "ERROR", "RELEASE", "RELEASE", "CREDIT", "late"]),
    st.integers(0, 7),
)
an_act = (
    st.tuples(st.just("ask"), a_client, a_service, a_ttl, st.booleans())
    | st.tuples(st.just("ask"), a_client, a_service, st.none(), st.just(True))
    | an_answer
    | st.tuples(
        st.just("client"), st.sampled_from(["CANCEL", "CANCEL", "twice", "its number again"]), st.integers(0, 20)
    )
)  # fmt: skip
"""What may happen in a turn, some of it said by the worker that speaks in that turn."""


class BrokerMachine(RuleBasedStateMachine):
    """Every rule sends the broker something, works out by the model what must come of it, and compares.

    What must be sent is kept by whom it is for: a worker, or a client's number.  There the order counts.
    """

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.places = 0
        self.address = 1
        limits = Limits(
            heartbeat=HEARTBEAT, liveness=LIVENESS, busy_grace=GRACE, expiry=EXPIRY, max_attempts=ATTEMPTS,
            max_queue=QUEUE, max_credit=CREDIT,
        )  # fmt: skip
        self.broker = Broker(limits, now=0, logger=QUIET, first_address=1)
        self.hired = {}  # Peer → Hired
        self.lines = {(service, suspect): [] for service in SERVICES for suspect in (False, True)}
        # the requests that wait: lists of one client's, as turns come
        self.arrived = {service: [] for service in SERVICES}
        self.touched = []  # services in which something happened in this turn
        self.finished = []  # workers that have left
        self.ignored = {}  # connections, and X1 clients behind them, that did not keep up, and until when
        self.due = defaultdict(list)
        self.pack = None  # the peer whose batch is open, and the batch
        self.late = 0
        # what can be seen from outside, without the model
        self.addresses = set()
        self.ended = set()  # client and number
        self.told_to_go = set()  # old workers that sent DISCONNECT and nothing after it

    # ── what must be sent ────────────────────────────────────────────────────────────────────────────────────────────

    def tell_worker(self, worker, frames, record):
        entry = ("record", tuple(worker.frames()), record) if worker.header == WX1 else ("frames", *frames)
        self.due[worker.identity,].append(entry)

    def tell_client(self, asked, frames, record):
        client = asked.client
        if client.header == CX1:
            self.due[client.identity, asked.number].append(("record", tuple(client.frames()), record))
        else:
            self.due[client.identity, None].append(("frames", *client.frames(*frames)))

    def tell_error(self, asked, code, *detail):
        """It failed; the text is not looked at."""
        if asked.client.header == CX1:
            self.tell_client(asked, None, ("ERROR", asked.number, code, *detail))

    def tell_go(self, worker, header):
        """C14: DISCONNECT, in the dialect in which it spoke."""
        to = Peer(worker.identity, header, worker.envelope)
        frames = None if header == WX1 else to.frames(to.command("DISCONNECT"))
        self.tell_worker(to, frames, ("DISCONNECT",))

    def told(self, sent):
        """What was sent, by whom it is for."""
        by_peer = defaultdict(list)
        for message in sent:
            at = next(at for at in range(1, len(message)) if message[at] in wire.DIALECTS)
            from_outside = commands_of(message)
            self.watch(message[0], from_outside)
            if message[at + 1 : at + 2] == [wire.BATCH] and message[at] in {CX1, WX1}:
                for command in from_outside:
                    key = (message[0], command.id) if message[at] == CX1 else (message[0],)
                    by_peer[key].append(("record", tuple(message[: at + 1]), self.record(command)))
            else:
                key = (message[0], None) if message[at] in {CX1, C01, C02} else (message[0],)
                by_peer[key].append(("frames", *message))
        return by_peer

    @staticmethod
    def record(command):
        match command:
            case wire.Request():
                ttl = None if command.ttl is None else round(command.ttl * 1000)
                options = json.loads(command.options.raw or b"{}")
                return "REQUEST", command.id, ttl, command.attempt, options, command.body[0]
            case wire.Cancel():
                return "CANCEL", command.id
            case wire.Reply():
                return "FINAL" if command.final else "PARTIAL", command.id, *command.body
            case wire.Error():
                assert len(command.text) >= 3
                return "ERROR", command.id, command.code, *command.detail
            case wire.Disconnect():
                return ("DISCONNECT",)

    def watch(self, identity, commands):
        """Rules that need no model."""
        assert identity not in {worker.identity for worker in self.told_to_go}  # C16
        for command in commands:
            if isinstance(command, wire.Request):
                assert command.id not in self.addresses  # C32
                self.addresses.add(command.id)
            elif isinstance(command, wire.Reply | wire.Error) and command.id is not None:
                key = identity, command.id
                if isinstance(command, wire.Error) and command.code == 400:
                    continue
                assert key not in self.ended  # C18, X1: nothing comes after the one FINAL or ERROR
                if isinstance(command, wire.Error) or command.final:
                    self.ended.add(key)

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────

    def touch(self, service):
        if service not in self.touched:
            self.touched.append(service)

    def use(self, worker):
        """C21: it was used just now."""
        self.places += 1
        self.hired[worker].used = self.places

    def staff(self, service):
        return [worker for worker, hired in self.hired.items() if hired.service == service]

    def available(self, service):
        return any(not self.hired[worker].leaving for worker in self.staff(service))

    def capacity(self, service):
        return sum(self.hired[worker].free for worker in self.staff(service))

    def waiting(self, service=None):
        """Suspects first, as turns come."""
        services = SERVICES if service is None else [service]
        return [
            asked
            for service in services
            for suspect in (True, False)
            for line in self.lines[service, suspect]
            for asked in line
        ]

    def running(self):
        held = [asked for hired in self.hired.values() for asked in hired.held.values() if not asked.abandoned]
        return sorted(held, key=lambda asked: asked.address)

    def outstanding(self):
        """The numbered requests that have not ended, oldest first."""
        arrived = [asked for service in SERVICES for asked in self.arrived[service]]
        numbered = [asked for asked in [*self.waiting(), *self.running(), *arrived] if asked.client.header == CX1]
        return sorted(numbered, key=lambda asked: int(asked.body))

    def queue(self, asked, *, front=False):
        """C17: in front of all if it came back; C20: last of its client's."""
        lines = self.lines[asked.service, asked.deaths > 0]
        mine = next((line for line in lines if line[0].client == asked.client), None)
        if front:
            if mine is not None:
                lines.remove(mine)
            lines.insert(0, [asked, *(mine or [])])
        elif mine is not None:
            mine.append(asked)
        else:
            lines.append([asked])
        self.places += 1
        asked.since, asked.place = self.now, self.places
        self.touch(asked.service)

    def queue_arrived(self, service):
        arrived, self.arrived[service] = self.arrived[service], []
        for asked in arrived:
            self.queue(asked)

    def next_of(self, service, suspect):
        """C20: the request of the client whose turn it is; if more of it waits, that waits for all others' turns."""
        lines = self.lines[service, suspect]
        asked, *more = lines.pop(0)
        if more:
            lines.append(more)
        return asked

    def choose(self, service, *, suspect):
        """C21: fewest outstanding, then warm and most recently used, or else least; C17: one suspect each."""

        def place(worker):
            hired = self.hired[worker]
            return len(hired.held), not hired.warm, -hired.used if hired.warm else hired.used

        free = [worker for worker in self.staff(service) if self.hired[worker].free]
        if suspect:
            free = [worker for worker in free if not self.hired[worker].suspicious]
        return min(free, key=place, default=None)

    def settle(self, service):
        """Dispatch what can be dispatched."""
        if len(self.arrived[service]) <= self.capacity(service) and not self.waiting(service):
            arrived, self.arrived[service] = self.arrived[service], []
            for asked in arrived:
                self.dispatch(self.choose(service, suspect=False), asked)
            return
        self.queue_arrived(service)
        for suspect in (True, False):
            while self.lines[service, suspect]:
                worker = self.choose(service, suspect=suspect)
                if worker is None:
                    break
                asked = self.next_of(service, suspect)
                if asked.passed(self.now):
                    self.tell_error(asked, 408)
                else:
                    self.dispatch(worker, asked)

    def dispatch(self, worker, asked):
        hired = self.hired[worker]
        assert hired.free
        asked.worker, asked.address, asked.turn = worker, self.address, self.broker.turn
        self.address += 1
        asked.handed += 1
        asked.overdue = self.now - hired.seen > OVERDUE
        hired.held[asked.address] = asked
        hired.sent = self.now
        self.use(worker)
        frames = worker.frames(worker.command("REQUEST"), b"%d" % asked.address, b"", asked.body)
        record = "REQUEST", asked.address, asked.left(self.now), asked.handed, asked.values, asked.body
        self.tell_worker(worker, frames, record)

    def lose(self, worker, *, silent=False, missed=math.inf):
        """C17: to another worker, at most so many times, and never once a PARTIAL has reached the client."""
        hired = self.hired.pop(worker)
        for asked in hired.held.values():
            if asked.turn >= missed:
                asked.handed -= 1
            elif not (silent and asked.overdue):
                asked.deaths += 1
        self.touch(hired.service)
        self.forget_those_that_do_not_wait(hired.service)
        for asked in reversed(hired.held.values()):
            if not asked.abandoned:
                self.place_again(asked)

    def place_again(self, asked):
        if asked.streamed or asked.deaths >= ATTEMPTS:
            self.tell_error(asked, 502)
        elif not asked.wait and not self.available(asked.service):
            self.tell_error(asked, 502 if asked.handed else 404)
        elif asked.passed(self.now):
            self.tell_error(asked, 408)
        else:
            asked.parts = []
            self.queue(asked, front=True)

    def forget_those_that_do_not_wait(self, service):
        """X1: nobody is there any more."""
        if self.available(service):
            return
        if not all(asked.wait for asked in self.arrived[service]):
            self.queue_arrived(service)
        for asked in sorted(self.waiting(service), key=lambda asked: asked.place):
            if not asked.wait:
                self.give_up(asked, 502 if asked.handed else 404)

    def leave(self, worker):
        """It holds nothing any more: DISCONNECT is answered."""
        self.tell_go(worker, WX1)
        self.lose(worker)

    def refuse(self, worker, header=None):
        """C14: DISCONNECT, and forget it."""
        self.tell_go(worker, header or worker.header)
        if worker in self.hired:
            self.lose(worker)

    def give_up(self, asked, code):
        """X1: ERROR to the client, and CANCEL to the worker that has it, if it speaks X1."""
        self.tell_error(asked, code)
        hired = self.hired.get(asked.worker)
        if hired is not None and hired.held.get(asked.address) is asked:
            self.abandon(asked)
        else:
            self.take_out(asked)

    def abandon(self, asked):
        asked.abandoned = True
        worker = asked.worker
        if worker.header == WX1:
            self.hired[worker].sent = self.now
            self.tell_worker(worker, None, ("CANCEL", asked.address))

    def take_out(self, asked):
        lines = self.lines[asked.service, asked.deaths > 0]
        for line in lines:
            if asked in line:
                line.remove(asked)
        lines[:] = [line for line in lines if line]

    def release(self, worker, asked):
        """It does not hold that request any more."""
        hired = self.hired[worker]
        del hired.held[asked.address]
        self.use(worker)
        self.freed(worker)

    def freed(self, worker):
        hired = self.hired[worker]
        self.touch(hired.service)
        if hired.leaving and not hired.held:
            self.finished.append(worker)

    # ── a turn ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def say(self, peer, frames, record=None):
        """A message from that peer; as a record, which goes with others in one message, if one is given."""
        self.told_to_go.discard(peer)
        if record is None or (self.pack is not None and self.pack[0] is not peer):
            self.take_pack()
        if record is None:
            self.broker.receive(frames, self.now)
            return
        if self.pack is None:
            self.pack = peer, peer.batch()
        name, *arguments = record
        getattr(self.pack[1], name)(*arguments)

    def take_pack(self):
        if self.pack is not None:
            for message in self.pack[1].messages():
                self.broker.receive(message, self.now)
            self.pack = None

    def end_turn(self, sent=None, *, in_order=True):
        """Work out what the end of the turn brings, and compare.  `sent` is None if the turn is still to be ended."""
        self.take_pack()
        finished, self.finished = self.finished, []
        for worker in dict.fromkeys(finished):
            if worker in self.hired:
                self.leave(worker)
        for service in self.touched:
            self.settle(service)
        self.touched = []
        due, self.due = self.due, defaultdict(list)
        got = self.told(self.broker.take_messages() if sent is None else sent)
        if in_order:
            assert got == due
        else:
            assert {key: sorted(map(repr, value)) for key, value in got.items()} == {
                key: sorted(map(repr, value)) for key, value in due.items()
            }
        assert self.broker.stats.late == self.late

    def moment(self):
        """Every turn but those of time itself begins with this."""
        self.pass_time(STEP)

    def pass_time(self, seconds):
        until = self.now + seconds
        while (deadline := self.broker.deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.tick()
        self.now = until

    def tick(self):
        turn = self.broker.turn
        sent = turns.tick(self.broker, self.now)
        self.broker._requests.turn, after = turn, self.broker.turn  # the model dispatches in the turn that is over
        # C13: HEARTBEAT to whom nothing else was sent for an interval, and to nobody else
        for worker, hired in self.hired.items():
            beat = worker.beat()
            if beat in sent:
                assert self.now >= hired.sent + HEARTBEAT
                hired.sent = self.now
                self.due[worker.identity,].append(("frames", *beat))
        # C13: silent for `liveness` intervals is dead
        dead = [worker for worker in self.hired if worker.key not in self.broker.directory.workers]
        assert len(dead) <= 1
        for worker in dead:
            assert self.now >= self.hired[worker].seen + self.patience(worker)
            self.lose(worker, silent=True)
        # C12: what waited too long is dropped; X1: so is what is worth nothing any more
        for asked in self.waiting():
            self.expire(asked, asked.since + EXPIRY)
        for asked in self.running():
            self.expire(asked, math.inf)
        self.end_turn(sent, in_order=False)
        self.broker._requests.turn = after
        for worker, hired in self.hired.items():
            assert self.now < hired.seen + self.patience(worker) + GRAIN
            assert self.now < hired.sent + HEARTBEAT + GRAIN

    def patience(self, worker):
        """C34."""
        return GRACE if worker.header != WX1 and self.hired[worker].held else PATIENCE

    def expire(self, asked, expires):
        due = expires if asked.deadline is None else min(expires, asked.deadline)
        if due < math.inf and (int(due / EXPIRY_GRAIN) + 1) * EXPIRY_GRAIN <= self.now:
            self.give_up(asked, 408)

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    @initialize(services=st.lists(st.tuples(a_service, a_credit), min_size=4, max_size=len(WORKERS)))
    def some_workers(self, services):
        for worker, (service, credit) in zip(WORKERS, services, strict=False):
            self.moment()
            self.ready(worker, service, credit)
            self.end_turn()

    @precondition(lambda self: len(self.hired) < len(WORKERS))
    @rule(choice=st.integers(0, len(WORKERS) - 1), service=a_service, credit=a_credit)
    def a_worker_comes(self, choice, service, credit):
        self.moment()
        away = [worker for worker in WORKERS if worker not in self.hired]
        self.ready(away[choice % len(away)], service, credit)
        self.end_turn()

    @rule(choice=st.integers(0, 7), acts=st.lists(an_act, min_size=1, max_size=12))
    def a_turn(self, choice, acts):
        self.take_part(choice, acts)

    @rule(choice=st.integers(0, 7), acts=st.lists(an_act, min_size=4, max_size=20))
    def a_long_turn(self, choice, acts):
        self.take_part(choice, acts)

    @precondition(lambda self: self.busy())
    @rule(choice=st.integers(0, 7), acts=st.lists(an_answer, min_size=1, max_size=8))
    def a_worker_answers(self, choice, acts):
        self.take_part(choice, acts)

    def busy(self):
        return [worker for worker, hired in self.hired.items() if hired.held]

    def take_part(self, choice, acts):
        """One worker speaks in this turn, a busy one if there is any, and any client."""
        self.moment()
        workers = self.busy() or list(self.hired) or WORKERS
        worker = workers[choice % len(workers)]
        for what, *how in acts:
            if what == "ask":
                self.ask(*how)
            elif what == "work":
                self.work(worker, *how)
            else:
                self.cancel(*how)
        self.end_turn()

    @rule(worker=a_worker, client=a_client, service=a_service, busy=st.integers(0, 3), after=st.booleans())
    def a_worker_leaves(self, worker, client, service, busy, after):
        self.moment()
        for _ in range(busy):
            self.ask(client, service, None, True)
        self.disconnect(worker)
        if after and worker.header == WX1:
            for _ in range(4):
                self.work(worker, "FINAL", 0)
        self.end_turn()

    @rule(asleep=st.sets(a_worker, max_size=2), times=st.integers(1, 4))
    def time_passes(self, asleep, times):
        for _ in range(times):
            for worker in WORKERS:
                if worker in self.hired and worker not in asleep:
                    self.moment()
                    self.heartbeat(worker)
                    self.end_turn()
            self.pass_time(2.0)

    @precondition(lambda self: len(self.waiting()) > QUEUE + 2)
    @rule()
    def much_time_passes(self):
        self.pass_time(64 * STEP)  # the workers die, and then nobody comes
        assert self.waiting() == []
        assert self.hired == {}

    @rule(
        peer=a_client | a_worker,
        how=st.sampled_from(["garbage", "second", "wrong", "dialect", "stray", "mmi", "hello"]),
    )
    def trouble(self, peer, how):
        self.moment()
        if how == "garbage":
            self.garbage(peer)
        elif how == "mmi" or (peer in CLIENTS and peer not in NUMBERED):
            self.ask_mmi(SERVICES[self.count % len(SERVICES)])
        elif peer in NUMBERED:
            self.a_numbered_client_says(peer, how)
        elif how == "second":
            self.ready(peer, SERVICES[0], 1)
        elif how == "wrong":
            self.wrong_reply(peer)
        elif how == "dialect":
            self.speak_another_dialect(peer)
        else:
            self.heartbeat(peer)
        self.end_turn()

    @precondition(lambda self: self.count % 3 == 0)  # or nobody would ever finish anything
    @rule(peer=a_worker | a_client, missed=st.sampled_from([None, 0, 1, 2, 3, 5]), gone=st.booleans())
    def a_peer_goes(self, peer, missed, gone):
        """`missed`: so many turns did not reach it."""
        self.moment()
        self.lose_connection(peer, missed, gone)

    @precondition(lambda self: self.busy())
    @rule(choice=st.integers(0, 7), client=a_client, missed=st.sampled_from([None, 1, 1, 2]))
    def a_busy_worker_goes(self, choice, client, missed):
        """It goes just after it may have been given one more request."""
        worker = self.busy()[choice % len(self.busy())]
        service = self.hired[worker].service
        self.moment()
        self.ask(client, service, None, True)
        self.end_turn()
        self.lose_connection(worker, missed, gone=False)

    def lose_connection(self, peer, missed, gone):
        turn = self.broker.turn
        if gone:
            sent = turns.gone(self.broker, peer.identity, self.now)
            if peer in NUMBERED:
                self.ignored[peer.identity] = self.now + GIVEN_UP
        else:
            missed_from = turn - (missed or 0)
            sent = turns.unreachable(self.broker, peer.identity, missed_from, self.now)
            self.ignored.pop(peer.identity, None)
        self.broker._requests.turn, after = turn, self.broker.turn
        for asked in [each for each in self.waiting() if each.client == peer]:
            self.take_out(asked)
        for asked in self.running():
            if asked.client == peer:
                self.abandon(asked)
        if peer in self.hired:
            self.lose(peer, missed=math.inf if gone else missed_from)
        self.end_turn(sent, in_order=False)
        self.broker._requests.turn = after

    # ── what clients say ─────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, client, service, ttl, wait):
        self.count += 1
        body = b"%d" % self.count
        if client.header != CX1:
            self.say(client, client.frames(*([] if client.header == C01 else [b"\x01"]), service, body))
            self.accept(Asked(client, service, body))
            return
        values = {} if wait else {"wait": False}
        options = json.dumps(values).encode() if values else b""
        self.say(client, None, ("request_to_broker", self.count, ttl or 0, service, options, [body]))
        if not self.is_ignored(client):
            self.accept(
                Asked(client, service, body, self.count, values, None if ttl is None else self.now + ttl / 1000)
            )

    def accept(self, asked):
        service = asked.service
        waiting, capacity = len(self.waiting(service)) + len(self.arrived[service]), self.capacity(service)
        if waiting >= capacity and not asked.wait and not self.available(service):
            self.tell_error(asked, 404)
        elif waiting - capacity >= QUEUE:
            self.tell_error(asked, 429)
        elif waiting < capacity:
            self.arrived[service].append(asked)
            self.touch(service)
        else:
            self.queue_arrived(service)
            self.queue(asked)

    def cancel(self, how, choice):
        if not self.outstanding():
            return
        asked = self.outstanding()[choice % len(self.outstanding())]
        if how == "its number again":
            self.say(asked.client, None, ("request_to_broker", asked.number, 0, asked.service, b"", [b"again"]))
            self.tell_error(asked, 400)
            return
        for _ in range(2 if how == "twice" else 1):
            self.say(asked.client, None, ("signal", 5, asked.number))
        if asked in self.arrived[asked.service]:
            self.queue_arrived(asked.service)
        self.give_up(asked, 499)

    def a_numbered_client_says(self, client, how):
        if how in {"hello", "stray", "dialect"}:
            self.say(client, client.frames())
            if not self.is_ignored(client):
                self.due[client.identity, None].append(("frames", *client.frames()))
        else:
            self.say(client, None, ("signal", 5, 0))
            if not self.is_ignored(client):
                self.tell_error(Asked(client, b"a", b"", 0), 400)

    def is_ignored(self, client):
        keys = client.key, client.identity
        if self.now >= max(self.ignored.get(key, 0.0) for key in keys):
            return False
        self.ignored[client.key] = self.now + GIVEN_UP  # what it has just said is not answered either
        return True

    def ask_mmi(self, service):
        self.say(None, [b"asker", C02, b"\x01", b"mmi.service", service])
        there = b"200" if self.available(service) else b"404"
        self.due[b"asker", None].append(("frames", b"asker", C02, b"\x03", b"mmi.service", there))  # C26

    def garbage(self, peer):
        before = picture(self.broker)
        for frames in GARBAGE:
            self.say(None, [peer.identity, *frames])  # C15
        assert picture(self.broker) == before
        self.say(None, [peer.identity, *UNKNOWN_RECORD])
        if peer in self.hired and peer.key == peer.identity:
            self.hired[peer].seen = self.now  # records are a sign of life, whatever they are

    # ── what workers say ─────────────────────────────────────────────────────────────────────────────────────────────

    def ready(self, worker, service, credit):
        if worker.header == WX1:
            self.say(worker, None, ("ready", credit, service, b""))
        else:
            credit = 1
            self.say(worker, worker.frames(b"\x01", service))
        if worker in self.hired:
            self.refuse(worker)
            return
        self.hired[worker] = Hired(service, min(credit, CREDIT), self.now, self.now)
        self.use(worker)
        self.touch(service)

    def work(self, worker, what, choice):
        """It says something of a request that it holds, or of one that it does not hold any more."""
        hired = self.hired.get(worker)
        if hired is None or (worker.header != WX1 and what in {"ERROR", "RELEASE", "CREDIT"}):
            return
        if what == "PARTIAL" and worker.header == W01:
            what = "FINAL"
        if what == "CREDIT":
            self.say(worker, None, ("credit", choice))
            hired.seen = self.now
            hired.credit = min(choice, CREDIT)
            self.use(worker)
            self.freed(worker)
            return
        mine = list(hired.held)
        if what == "late":
            address = max({*range(1, self.address)} - {*mine}, default=None)
        else:
            address = mine[choice % len(mine)] if mine else None
        if address is None:
            return
        said = b"%d/%d" % (address, choice)
        self.reply(worker, "FINAL" if what == "late" else what, address, said)
        hired.seen = self.now
        asked = hired.held.get(address)
        if asked is None:
            self.late += 1  # C32
        elif what == "PARTIAL":
            self.on_partial(asked, said)
        else:
            hired.warm = what == "FINAL" and worker.header == WX1
            self.release(worker, asked)
            if not asked.abandoned:
                self.on_end(what, asked, said)

    def reply(self, worker, what, address, said):
        if worker.header != WX1:
            self.say(worker, worker.frames(worker.command(what), b"%d" % address, b"", said))
        elif what == "ERROR":
            self.say(worker, None, ("error", 7, address, OWN, b"why", [said]))
        elif what == "RELEASE":
            self.say(worker, None, ("signal", 11, address))
        else:
            self.say(worker, None, ("reply", 3 if what == "PARTIAL" else 4, address, [said]))

    def on_partial(self, asked, said):
        asked.parts.append(said)
        if not asked.abandoned and asked.client.header != C01:  # C3
            asked.streamed = True
            self.tell_client(asked, [b"\x02", asked.service, said], ("PARTIAL", asked.number, said))

    def on_end(self, what, asked, said):
        if what == "RELEASE":
            asked.handed -= 1
            self.place_again(asked)
        elif what == "ERROR":
            self.tell_error(asked, OWN, said)
        elif asked.client.header == C01:  # C24
            self.tell_client(asked, [asked.service, *asked.parts, said], None)
        else:
            self.tell_client(asked, [b"\x03", asked.service, said], ("FINAL", asked.number, said))

    def heartbeat(self, worker):
        self.say(worker, worker.beat())
        if worker in self.hired:
            self.hired[worker].seen = self.now
        else:
            self.refuse(worker)

    def wrong_reply(self, worker):
        what = "FINAL" if self.count % 2 or worker.header == W01 else "PARTIAL"
        if worker.header == WX1 or self.count % 2:
            self.reply(worker, what, self.address, b"wrong")
        else:
            self.say(worker, worker.frames(worker.command(what), b"nobody", b"", b"wrong"))
            if worker in self.hired:
                self.hired[worker].seen = self.now
                return  # C18: it is invalid
        self.refuse(worker)  # C14, C18

    def disconnect(self, worker):
        if worker.header == WX1:
            self.say(worker, None, ("signal", 6, 0))
        else:
            self.say(worker, worker.frames(worker.command("DISCONNECT")))
        hired = self.hired.get(worker)
        if worker.header != WX1:
            self.take_pack()
            self.told_to_go.add(worker)
            if hired is not None:
                self.lose(worker)
        elif hired is not None:
            hired.seen = self.now
            if hired.leaving:
                return
            hired.leaving = True
            self.use(worker)
            self.forget_those_that_do_not_wait(hired.service)
            if not hired.held:
                self.leave(worker)

    def speak_another_dialect(self, worker):
        other = Peer(worker.identity, {W01: W02, W02: WX1, WX1: W01}[worker.header], worker.envelope)
        self.say(worker, other.beat())
        self.refuse(worker, other.header)

    # ── what always holds ────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def the_books_are_right(self):
        check_books(self.broker)

    @invariant()
    def the_model_agrees(self):
        directory = self.broker.directory
        assert {
            worker.key: (list(hired.held), hired.credit, hired.leaving) for worker, hired in self.hired.items()
        } == {key: (list(worker.held), worker.credit, worker.leaving) for key, worker in directory.workers.items()}
        for worker, hired in self.hired.items():
            for address, attempt in directory.workers[worker.key].held.items():
                assert attempt.abandoned or attempt.request.body[0] == hired.held[address].body
        for name in SERVICES:
            service = directory.services.get(name)
            assert [asked.body for asked in self.waiting(name)] == [
                request.body[0] for request in (waiting_in(service) if service else [])
            ]
            chosen = service.schedule.next_worker() if service else None
            expected = self.choose(name, suspect=False)
            assert (chosen and chosen.key) == (expected and expected.key)

    def teardown(self):
        for asked in self.outstanding():
            self.give_up(asked, 503)
        for worker in self.hired:
            self.tell_go(worker, worker.header)
        self.hired, self.lines = {}, defaultdict(list)
        sent = turns.close(self.broker, self.now)
        self.end_turn(sent, in_order=False)
        assert self.broker.directory.workers == {}
        assert self.broker.registry.numbered == []  # X1: each has ended in exactly one FINAL or ERROR
        check_books(self.broker)


# In pure Python coverage is measured, which makes it slow.
EXAMPLES = 200 if compiled.parts()["machines"] else 50
BrokerMachine.TestCase.settings = settings(deadline=None, max_examples=EXAMPLES, stateful_step_count=40)
TestBroker = BrokerMachine.TestCase
