"""What holds for any bytes, and for any course of events: the broker beside a model of it that is slow and plain."""

import json
import logging
import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zmdp.mdp import wire
from zmdp.mdp.broker import GIVEN_UP, Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.registry import NEVER
from zmdp.mdp.wire import C01, C02, CX1, W01, W02, WX1

QUIET = logging.Logger("quiet", logging.CRITICAL + 1)

# ── what the broker holds ────────────────────────────────────────────────────────────────────────────────────────────


def queued(service):
    """The requests that wait for `service`, client by client as turns come."""
    return [request for turn in service.queue._turns for request in turn.requests]


def names(workers):
    return [worker.identity for worker in workers]


def picture(broker):
    """All that the broker holds, as one value to compare."""
    registry = broker.registry
    return (
        {
            name: (
                [w.identity for w in service.workers],
                [w.identity for w in service.idle],
                list(map(id, queued(service))),
            )
            for name, service in registry.services.items()
        },
        {route: (id(w.request), w.last_seen, w.last_sent) for route, w in registry.workers.items()},
        (registry.queued, registry.queued_bytes, registry.running),
        (broker.stats.dropped.copy(), broker.stats.disconnected.copy(), broker.stats.lost.copy()),
        broker.deadline(),
    )


def check_books(broker):
    """The registry agrees with itself, and keeps nothing that it need not keep."""
    registry = broker.registry
    services, workers = registry.services.values(), registry.workers.values()
    waiting = [request for service in services for request in queued(service)]
    running = [worker.request for worker in workers if worker.request is not None]

    assert registry.queued == len(waiting) == sum(service.queue.size for service in services)
    assert registry.queued_bytes == sum(request.size for request in waiting)
    assert registry.running == len(running)
    assert len({*waiting, *running}) == len(waiting) + len(running)
    clients = {request.client for request in [*waiting, *running]}
    assert registry.clients == {client.identity: client for client in clients}
    for client in clients:
        mine = {request for request in waiting if request.client is client}
        assert set(registry.waiting_for(client.identity)) == mine
        assert set(client.waiting) == {request.service.queue for request in mine}
        assert set(registry.running_for(client.identity)) == {each for each in running if each.client is client}
        assert client.requests == len(mine) + len(client.running)

    assert {worker for service in services for worker in service.workers} == set(workers)
    assert list(registry.workers) == [worker.route for worker in workers]
    assert all(registry.connections.values()), "a connection with no worker left is kept"
    held = [worker for each in registry.connections.values() for worker in each.values()]
    assert sorted(held, key=id) == sorted(workers, key=id)
    for service in services:
        assert service.workers or service.queue.size, "a service with nothing left is kept"
        assert not (service.idle and service.queue.size), "a worker is idle while a request waits"
        assert set(service.idle) == {worker for worker in service.workers if worker.idle}
        assert all(worker.idle == (worker.request is None) for worker in service.workers)
        assert set(service.unwilling) == {request for request in queued(service) if not request.options.wait}
        assert service.workers or not service.unwilling, "a request waits for nobody that was not to wait"
    assert all(worker.bucket for worker in workers)
    assert all(request.bucket for request in waiting)
    timed = {request for request in running if request.bucket}
    assert timed == {request for request in running if request.deadline < NEVER and not request.abandoned}

    outstanding = [request for request in [*waiting, *running] if request.header == CX1 and not request.abandoned]
    assert registry.numbered == {request.route: request for request in outstanding}


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = [
    b"", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x07", b"\x08", C01, C02, CX1, W01, W02, WX1,
    b"echo", b"sum", b"mmi.service", b"mmi.stats", b"mmi.workers", b"mmi.services", b"mmi.broker", b"c1", b"c2", b"c3",
    b"w1", b"w2", b"w3", b"\xff", b"x" * 256, b"1", b"500", b'{"ttl":0}', b'{"ttl":5000}', b'{"wait":false}', b"{",
]  # fmt: skip
frame = st.sampled_from(TOKENS) | st.binary(max_size=8)
frames_of_any_kind = st.lists(frame, max_size=8) | st.lists(frame, max_size=24)
# From a ROUTER: its peers' identities are never empty.
peer = st.sampled_from([b"c1", b"c2", b"c3", b"w1", b"w2", b"w3"]) | st.binary(min_size=1, max_size=5)
message = st.builds(lambda identity, frames: [identity, *frames], peer, frames_of_any_kind)
almost = st.builds(
    # a header where one belongs: what follows is right more often
    lambda identity, envelope, header, frames: [identity, *envelope, header, *frames],
    peer, st.sampled_from([[], [b""], [b"1", b""], [b"hop", b"1", b""]]),
    st.sampled_from([C01, C02, CX1, W01, W02, WX1]), frames_of_any_kind,
)  # fmt: skip
LIMITS = Limits(max_message=1000, max_frames=20, max_queue=3, max_services=4, max_workers=4)


def busy_broker():
    """A broker with an idle worker, a busy one of each dialect, and requests that wait."""
    broker = Broker(LIMITS, now=0, logger=QUIET)
    for each in (
        [b"w3", WX1, b"\x01", b"echo"],
        [b"c3", b"1", b"", CX1, b"\x01", b"echo", b'{"ttl":5000}', b"x"],
        [b"c3", b"2", b"", CX1, b"\x01", b"nobody", b"", b"x"],
        [b"w1", W02, b"\x01", b"echo"],
        [b"w2", b"", W01, b"\x01", b"sum"],
        [b"c1", C02, b"\x01", b"echo", b"x"],
        [b"c2", b"", C01, b"echo", b"y"],
    ):
        broker.receive(each, now=0)
    return broker


@settings(deadline=None)
@given(frames_of_any_kind | almost)
def test_any_bytes_are_decoded(frames):  # C15
    assert isinstance(
        wire.decode_peer(frames, max_message=1000, max_frames=20),
        wire.FromPeer | wire.Invalid,
    )
    assert isinstance(wire.decode_broker(frames), wire.FromBroker | wire.Invalid)


@settings(deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789.-+eE tru\\', max_size=40).map(str.encode))
def test_any_bytes_are_options_or_not(raw):  # X1
    options = wire.parse_options(raw)
    assert options is None or (options.raw == raw and isinstance(options.values(), dict))
    if options is not None:
        again = wire.parse_options(wire.renewed(options, 1.5, 2))
        assert again[:3] == (again.raw, 1.5, options.wait)
        assert again.values() == {**options.values(), "ttl": 1500, "attempt": 2}


@settings(deadline=None, max_examples=200)
@given(st.lists(message | almost, max_size=8))
def test_any_bytes_are_survived_and_the_invalid_ones_change_nothing(messages):  # C15
    broker = busy_broker()
    for frames in messages:
        before, invalid = picture(broker), broker.stats.invalid.total()
        sent = broker.receive(frames, now=0)
        command = wire.decode_peer(frames, max_message=1000, max_frames=20)
        if isinstance(command, wire.Invalid):
            told = [wire.decode_broker(each[1:]) for each in sent]
            code = 413 if command.over_limit else 400
            assert [(each.route, each.code) for each in told] == [(command.route[1:], code)] * bool(command.route)
            assert picture(broker) == before
            assert broker.stats.invalid.total() == invalid + 1
        for each in sent:
            assert not isinstance(wire.decode_broker(each[1:]), wire.Invalid)
        check_books(broker)


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────────

address = st.binary(min_size=1, max_size=255)
hop = address.filter(lambda frame: frame not in wire.DIALECTS)
envelope = st.just(()) | st.lists(hop, max_size=15).map(lambda hops: (*hops, b""))
name = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=60).map(str.encode)
body = st.lists(st.binary(max_size=20), min_size=1, max_size=4)
route = st.builds(lambda identity, hops: (identity, *hops), address, envelope)
client_header, worker_header = st.sampled_from([C01, C02]), st.sampled_from([W01, W02, WX1])
PARTIAL, FINAL = wire.Kind.PARTIAL, wire.Kind.FINAL


def to_broker(frames):
    return wire.decode_peer(frames, max_message=1 << 20, max_frames=100)


@settings(deadline=None)
@given(route, client_header, name, body, st.booleans())
def test_what_clients_say_and_are_told_reads_as_it_was_meant(route, header, service, body, final):  # C2, C3, C22, C24
    said = wire.Request(route, header, service, body)
    assert to_broker(wire.request(*said[:4])) == said
    told = wire.Answer(route[1:], header, final or header == C01, service, body)
    assert wire.decode_broker(wire.answer(*told)) == told


@settings(deadline=None)
@given(route, worker_header, name, address, body)
def test_what_workers_say_and_are_told_reads_as_it_was_meant(route, header, service, client, body):  # C7, C22, C24
    ready = wire.Ready(route, header, service)
    assert to_broker(wire.ready(*ready)) == ready
    for kind in [FINAL] if header == W01 else [PARTIAL, FINAL]:
        reply = wire.Reply(route, header, kind is FINAL, client, body)
        assert to_broker(wire.reply(route, header, kind, client, body)) == reply
    work = wire.Work(route[1:], header, client, body)
    assert wire.decode_broker(wire.work(*work[:4])) == work


number = st.lists(hop, min_size=1, max_size=15).map(lambda hops: (*hops, b""))
text, detail = st.text(max_size=20), st.lists(st.binary(max_size=20), max_size=1)
code = st.integers(0, 999)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(text, values, max_size=3),
    max_leaves=8,
)
options = st.builds(
    lambda more, known: wire.options({**more, **known}),
    st.dictionaries(text, json_values, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "ttl": st.none() | st.integers(0, 10**14) | st.floats(0, 1e14),
            "wait": st.booleans(),
            "headers": st.dictionaries(text, text, max_size=3),
        },
    ),
)


@settings(deadline=None)
@given(identity=address, number=number, service=name, body=body, options=options, final=st.booleans())
def test_what_x1_clients_say_reads_as_it_was_meant(*, identity, number, service, body, options, final):
    route = (identity, *number)
    parsed = wire.parse_options(options)
    assert parsed.raw == options
    assert parsed.values() == (json.loads(options) if options else {})
    said = wire.Request(route, CX1, service, body, parsed)
    assert to_broker(wire.request(route, CX1, service, body, options)) == said
    assert to_broker(wire.cancel(route, service)) == wire.Cancel(route, CX1, service)
    for each in (route, (identity, b""), (identity,)):
        assert to_broker(wire.heartbeat(each, CX1)) == wire.Heartbeat(each, CX1)
        assert wire.decode_broker(wire.heartbeat(each[1:], CX1)) == wire.Heartbeat(each[1:], CX1)
    told = wire.Answer(number, CX1, final, service, body)
    assert wire.decode_broker(wire.answer(*told)) == told


@settings(deadline=None)
@given(identity=address, number=number, service=name, code=code, text=text, detail=detail)
def test_an_error_reads_as_it_was_meant(*, identity, number, service, code, text, detail):
    digits, told = b"%03d" % code, text.encode()
    assert wire.decode_broker(wire.error(number, service, digits, told, detail)) == wire.Error(
        number, CX1, service, code, text, detail
    )
    said = wire.Failure((identity,), WX1, b"client", digits, told, detail)
    assert to_broker(wire.failure((identity,), b"client", code, text, detail)) == said


@settings(deadline=None)
@given(route, address, body, options)
def test_what_x1_workers_are_told_reads_as_it_was_meant(route, client, body, options):
    told = wire.Work(route[1:], WX1, client, body, wire.parse_options(options))
    message = wire.work(route[1:], WX1, client, body, options)
    assert wire.decode_broker(message) == told
    assert wire.is_work(message, route[1:], WX1)
    assert wire.decode_broker(wire.withdraw(route[1:], client)) == wire.Withdraw(route[1:], WX1, client)


@settings(deadline=None)
@given(route, worker_header)
def test_heartbeat_and_disconnect_read_as_they_were_meant(route, header):  # C7, C22, C24
    for encode, command in ((wire.heartbeat, wire.Heartbeat), (wire.disconnect, wire.Disconnect)):
        assert to_broker(encode(route, header)) == command(route, header)
        assert wire.decode_broker(encode(route[1:], header)) == command(route[1:], header)


# ── all workers of a machine at once ─────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=200)
@given(
    workers=st.lists(st.tuples(st.booleans(), st.sampled_from([True, False, False])), min_size=1, max_size=5),
    waiting=st.sampled_from([0, 0, 0, 1, 3]),
    later=st.floats(3.06, 100),
)
def test_when_workers_die_together_no_request_is_lost_or_given_to_the_dead(workers, waiting, later):  # C13, C17
    broker = Broker(Limits(heartbeat=1, liveness=3, expiry=1000), now=0, logger=QUIET)
    for number in range(len(workers)):
        broker.receive([b"w%d" % number, W02, b"\x01", b"echo"], now=0)
    for number in range(len(workers) + waiting):
        broker.receive([b"c%d" % number, C02, b"\x01", b"echo", b"x"], now=0)
    for number, (busy, _) in enumerate(workers):
        if not busy:
            broker.receive([b"w%d" % number, W02, b"\x04", b"c%d" % number, b"", b"x"], now=0)
    alive = {b"w%d" % number for number, (_, lives) in enumerate(workers) if lives}
    for worker in sorted(alive):
        broker.receive([worker, W02, b"\x05"], now=later - 1)
    unfinished = broker.registry.queued + broker.registry.running
    sent = broker.tick(later)
    assert {message[0] for message in sent} <= alive
    assert set(broker.registry.connections) == alive
    assert broker.registry.queued + broker.registry.running == unfinished
    assert broker.stats.dropped == {}
    check_books(broker)


# ── any course of events ─────────────────────────────────────────────────────────────────────────────────────────────

HEARTBEAT, LIVENESS, EXPIRY, ATTEMPTS, QUEUE = 2.5, 3, 15.625, 2, 5
PATIENCE = HEARTBEAT * LIVENESS
OVERDUE = PATIENCE - 1.5 * HEARTBEAT
"""A worker silent for so long when it gets a request may be dead already: if it is, that is not the request's doing."""
GRAIN = HEARTBEAT / 20
STEP = 2 * GRAIN
"""Events are this far apart, so that never two workers die in the same grain, and the model knows who is first."""


@dataclass(frozen=True)
class Peer:
    identity: bytes
    header: bytes
    envelope: tuple[bytes, ...] = ()

    @property
    def route(self):
        return (self.identity, *self.envelope)

    def frames(self, *frames):
        """A message from or to this peer."""
        return [*self.route, self.header, *frames]

    def command(self, name):
        """A worker's command byte, or a client's frames from the command on."""
        code = {"READY": 1, "REQUEST": 2, "PARTIAL": 3, "FINAL": 4, "HEARTBEAT": 5, "DISCONNECT": 6}[name]
        return bytes([code - (self.header == W01 and code > 2)])


@dataclass(eq=False)
class Asked:
    """A request, by the model's account."""

    client: Peer
    service: bytes
    body: bytes
    number: bytes = b""
    values: dict[str, object] = field(default_factory=dict)
    deadline: float | None = None
    died_at: int = 0
    handed: int = 0
    late: bool = False
    since: float = 0.0
    place: int = 0
    """Its place in the order in which requests began to wait, or were handed to workers."""
    told: bool = False
    abandoned: bool = False
    parts: list[bytes] = field(default_factory=list)

    @property
    def wait(self):
        return self.values.get("wait", True)

    @property
    def route(self):
        return self.frames()[:-1]

    def frames(self, *frames):
        """A message from or to its client; an X1 client's envelope ends in the number."""
        number = [self.number, b""] if self.client.header == CX1 else []
        return [self.client.identity, *self.client.envelope, *number, self.client.header, *frames]

    def options(self, now):
        """The options frame that a worker of X1 gets."""
        values = dict(self.values)
        if self.deadline is not None and (self.late or self.handed > 1):
            values["ttl"] = math.ceil((self.deadline - now) * 1000)
        if self.handed > 1:
            values["attempt"] = self.handed
        return json.dumps(values, separators=(",", ":")).encode() if values else b""

    def passed(self, now):
        return self.deadline is not None and now >= self.deadline

    def error(self, code, *more):
        """What is sent because it fails; the text, unless it is a worker's, is not looked at."""
        return [self.frames(b"\x04", self.service, b"%d" % code, *(more or [b""]))] if self.client.header == CX1 else []


@dataclass(eq=False)
class Hired:
    """A registered worker, by the model's account."""

    service: bytes
    seen: float
    sent: float
    began: float = 0.0
    overdue: bool = False
    reached: bool = True
    round: int = 0
    holds: Asked | None = None


CLIENTS = [
    Peer(b"c1", C02),
    Peer(b"c2", C02, (b"hop", b"")),
    Peer(b"c3", C01, (b"",)),
    Peer(b"c4", C01),
    Peer(b"c5", CX1),
    Peer(b"c6", CX1, (b"hop",)),
]
NUMBERED = [client for client in CLIENTS if client.header == CX1]
WORKERS = [  # the first are there most often
    Peer(b"w1", WX1),
    Peer(b"w2", W02),
    Peer(b"w3", WX1, (b"hop", b"")),
    Peer(b"w4", W01, (b"",)),
    Peer(b"w5", W02, (b"hop", b"")),
    Peer(b"w6", W01),
    Peer(b"w7", W02),
]
SERVICES = [b"a", b"b"]
a_ttl = st.sampled_from([None, None, 0, 250, 500, 1000, 2500.5, 6000, 60_000])
"""Milliseconds; STEP is one of them, so that time may pass in the very moment in which something happens."""
a_client, a_worker, a_service = (
    st.sampled_from(CLIENTS + 2 * NUMBERED),
    st.sampled_from(WORKERS),
    st.sampled_from(SERVICES),
)
GARBAGE = [
    [],
    [b""],
    [b"MDPC03"],
    [C02, b"\x01", b"a"],
    [W02, b"\x01"],
    [W02, b"\x09"],
    [W02, b"\x04", b"c1", b"x", b"y"],
    [CX1, b"\x01", b"a", b"", b"x"],  # no number
    [CX1, b"\x05", b"a"],
    [WX1, b"\x07", b"c1", b"", b"50", b"text"],
]
OWN = 422
"""The code of the ERRORs that workers send."""


class BrokerMachine(RuleBasedStateMachine):
    """Every rule sends the broker something, works out by the model what must come of it, and compares."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.round = 0
        self.count = 0
        self.places = 0
        limits = Limits(heartbeat=HEARTBEAT, liveness=LIVENESS, expiry=EXPIRY, max_attempts=ATTEMPTS, max_queue=QUEUE)
        self.broker = Broker(limits, now=0, logger=QUIET)
        self.hired = {}  # Peer → Hired
        self.idle = {service: [] for service in SERVICES}  # peers, least recently used first
        self.lines = {service: [] for service in SERVICES}  # lists of one client's requests, as turns come
        # what can be seen from outside, without the model
        self.at_work = {}  # worker → body
        self.open = {}  # body → client
        self.numbers = {}  # client and number → body, while the request has not ended
        self.ignored = {}  # X1 clients that did not keep up, and until when
        self.refused = []  # client and number of a message that is to be answered with ERROR 400
        self.told_to_go = set()  # workers that sent DISCONNECT and nothing after it

    # ── the model: each returns what must be sent ────────────────────────────────────────────────────────────────────

    def dispatch(self, worker, asked):
        hired = self.hired[worker]
        assert hired.holds is None
        hired.holds, hired.sent, hired.began = asked, self.now, self.now
        hired.round = self.round
        hired.reached, hired.overdue = True, self.now - hired.seen > OVERDUE
        asked.handed += 1
        asked.place = self.next_place()
        options = [asked.options(self.now)] if worker.header == WX1 else []
        return [worker.frames(worker.command("REQUEST"), asked.client.identity, b"", *options, asked.body)]

    def next_place(self):
        self.places += 1
        return self.places

    def place(self, asked, *, front=False):
        """C21: to the worker idle longest; else it waits: C17: in front if it came back, C20: last of its client's."""
        idle, lines = self.idle[asked.service], self.lines[asked.service]
        if idle:
            return self.dispatch(idle.pop(0), asked)
        mine = next((line for line in lines if line[0].client == asked.client), None)
        if front:
            if mine is not None:
                lines.remove(mine)
            lines.insert(0, [asked, *(mine or [])])
        elif mine is not None:
            mine.append(asked)
        else:
            lines.append([asked])
        asked.since, asked.late, asked.place = self.now, True, self.next_place()
        return []

    def free(self, worker):
        """C20: the client whose turn it is; if more of it waits, that waits for all others' turns."""
        service = self.hired[worker].service
        lines = self.lines[service]
        sent = []
        while lines:
            asked, *more = lines.pop(0)
            if more:
                lines.append(more)
            if not asked.passed(self.now):
                return sent + self.dispatch(worker, asked)
            sent += asked.error(408)
        self.idle[service].append(worker)
        return sent

    def lose(self, worker, *, silent=False, left=False):
        """C17: to another worker, at most so many times, and never once a PARTIAL has reached the client."""
        hired = self.hired.pop(worker)
        if worker in self.idle[hired.service]:
            self.idle[hired.service].remove(worker)
        sent = []
        alone = not any(each.service == hired.service for each in self.hired.values())
        if alone:  # X1: those that are not to wait when nobody is there
            waiting = [asked for line in self.lines[hired.service] for asked in line if not asked.wait]
            for asked in sorted(waiting, key=lambda asked: asked.place):
                self.drop(asked)
                sent += asked.error(502 if asked.handed else 404)
        asked = hired.holds
        if asked is None or asked.abandoned:
            return sent
        asked.handed -= not hired.reached
        # A slot's DISCONNECT, so early, had most likely been sent before it got the request.
        crossed = left and worker.header == WX1 and bool(worker.envelope) and self.now - hired.began < HEARTBEAT
        asked.died_at += hired.reached and not (silent and hired.overdue) and not crossed
        if asked.told or asked.died_at >= ATTEMPTS or (alone and not asked.wait):
            return sent + asked.error(502)
        if asked.passed(self.now):
            return sent + asked.error(408)
        asked.parts = []
        return sent + self.place(asked, front=True)

    def refuse(self, worker):
        """C14: DISCONNECT, and forget it."""
        sent = [worker.frames(worker.command("DISCONNECT"))]
        return sent + self.lose(worker) if worker in self.hired else sent

    def give_up(self, asked, code):
        """X1: ERROR to the client; and CANCEL to the worker that has it, if it speaks X1."""
        sent = asked.error(code)
        for worker, hired in self.hired.items():
            if hired.holds is asked:
                return sent + self.abandon(worker)
        self.drop(asked)
        return sent

    def abandon(self, worker):
        hired = self.hired[worker]
        hired.holds.abandoned = True
        if worker.header != WX1:
            return []
        hired.sent = self.now
        return [worker.frames(b"\x08", hired.holds.client.identity, b"")]

    def running(self):
        held = [hired.holds for hired in self.hired.values() if hired.holds and not hired.holds.abandoned]
        return sorted(held, key=lambda asked: asked.place)

    def outstanding(self):
        """The numbered requests that have not ended, oldest first."""
        numbered = [asked for asked in [*self.waiting(), *self.running()] if asked.client.header == CX1]
        return sorted(numbered, key=lambda asked: int(asked.body))

    def waiting(self):
        return [asked for lines in self.lines.values() for line in lines for asked in line]

    def drop(self, asked):
        lines = self.lines[asked.service]
        for line in lines:
            if asked in line:
                line.remove(asked)
        lines[:] = [line for line in lines if line]

    # ── to the broker and back ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, message):
        """What the broker sends for `message`."""
        self.told_to_go -= {worker for worker in WORKERS if [worker.identity] == message[:1]}
        self.round += 1
        return self.seen(self.broker.receive(message, self.now))

    def seen(self, sent):
        """Watch what is sent from outside: rules that need no model."""
        told = []
        for message in sent:
            identity, command = message[0], wire.decode_broker(message[1:])
            told.append(message)
            assert identity not in {worker.identity for worker in self.told_to_go}  # C16
            if isinstance(command, wire.Work):
                assert identity not in self.at_work  # C6: never two requests
                self.at_work[identity] = command.body[0]
            elif isinstance(command, wire.Disconnect):
                self.at_work.pop(identity, None)
            elif isinstance(command, wire.Answer):
                asked = command.body[0].partition(b"/")[0]
                assert self.open[asked] == identity  # nobody gets what somebody else asked for
                if command.header == CX1 and asked not in {b"200", b"404"}:
                    assert self.numbers[identity, command.route] == asked
                if command.final:
                    del self.open[asked]  # C18: one FINAL
                    self.numbers.pop((identity, command.route), None)
            elif isinstance(command, wire.Error) and command.code == 400:
                self.refused.remove((identity, command.route))
                told[-1] = [*message[:-1], b""]
            elif isinstance(command, wire.Error):
                del self.open[self.numbers.pop((identity, command.route))]  # X1: one FINAL or ERROR
                if command.code != OWN:
                    assert len(command.text) > 8
                    told[-1] = [*message[:-1], b""]
        assert self.refused == []
        return told

    def moment(self):
        """Every event but time itself begins with this."""
        self.pass_time(STEP)

    def pass_time(self, seconds):
        until = self.now + seconds
        while (deadline := self.broker.deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.tick()
        self.now = until

    def tick(self):
        self.round += 1
        sent = self.seen(self.broker.tick(self.now))
        # C13: HEARTBEAT to whom nothing else was sent for an interval, and to nobody else
        beats = {worker: worker.frames(worker.command("HEARTBEAT")) for worker in self.hired}
        beaten = [worker for worker in self.hired if beats[worker] in sent]
        for worker in beaten:
            assert self.now >= self.hired[worker].sent + HEARTBEAT
            self.hired[worker].sent = self.now
        # C13: silent for `liveness` intervals is dead
        dead = [worker for worker in self.hired if worker.route not in self.broker.registry.workers]
        assert len(dead) <= 1
        due = []
        for worker in dead:
            assert self.now >= self.hired[worker].seen + PATIENCE
            self.at_work.pop(worker.identity, None)
            due += self.lose(worker, silent=True)
        # C12: what waited too long is dropped; X1: so is what is worth nothing any more
        kept = {request.body[0] for service in self.broker.registry.services.values() for request in queued(service)}
        for asked in self.waiting():
            expires = asked.since + EXPIRY if asked.deadline is None else min(asked.since + EXPIRY, asked.deadline)
            if asked.body in kept:
                assert self.now < expires + GRAIN
            else:
                assert self.now >= expires
                due += self.give_up(asked, 408)
        for asked in self.running():
            ended = self.broker.registry.workers[self.worker_of(asked).route].request.abandoned
            if ended:
                assert asked.passed(self.now)
                due += self.give_up(asked, 408)
            else:
                assert asked.deadline is None or self.now < asked.deadline + GRAIN
        assert sorted(sent) == sorted([*due, *(beats[worker] for worker in beaten)])
        for hired in self.hired.values():
            assert self.now < hired.seen + PATIENCE + GRAIN
            assert self.now < hired.sent + HEARTBEAT + GRAIN

    def worker_of(self, asked):
        return next(worker for worker, hired in self.hired.items() if hired.holds is asked)

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    @initialize(services=st.lists(a_service, min_size=3, max_size=len(WORKERS)))
    def some_workers(self, services):
        for worker, service in zip(WORKERS, services, strict=False):
            self.ready(worker, service)

    @precondition(lambda self: len(self.hired) < len(WORKERS))
    @rule(choice=st.integers(0, len(WORKERS) - 1), service=a_service)
    def a_worker_comes(self, choice, service):
        away = [worker for worker in WORKERS if worker not in self.hired]
        self.ready(away[choice % len(away)], service)

    @rule(client=a_client, service=a_service, times=st.sampled_from([1, 1, 2, 3]), ttl=a_ttl, wait=st.booleans())
    def request(self, client, service, times, ttl, wait):
        for _ in range(times):
            self.moment()
            self.count += 1
            if client.header != CX1:
                self.ask(Asked(client, service, b"%d" % self.count))
                continue
            values = {"ttl": ttl} if ttl is not None else {}
            if not wait:
                values["wait"] = False
            deadline = None if ttl is None else self.now + ttl / 1000
            self.ask(Asked(client, service, b"%d" % self.count, b"%d" % self.count, values, deadline))

    def ask(self, asked):
        service = asked.service
        options = json.dumps(asked.values, separators=(",", ":")).encode() if asked.values else b""
        frames = {
            C01: [service, asked.body],
            C02: [b"\x01", service, asked.body],
            CX1: [b"\x01", service, options, asked.body],
        }[asked.client.header]
        if self.is_ignored(asked.client):
            assert self.send(asked.frames(*frames)) == []
            return
        self.open[asked.body] = asked.client.identity
        if asked.client.header == CX1:
            self.numbers[asked.client.identity, tuple(asked.route[1:])] = asked.body
        sent = self.send(asked.frames(*frames))
        if asked.passed(self.now):
            assert sent == asked.error(408)
        elif self.idle[service]:
            assert sent == self.place(asked)
        elif not asked.wait and not any(hired.service == service for hired in self.hired.values()):
            assert sent == asked.error(404)
        elif sum(map(len, self.lines[service])) >= QUEUE:
            assert sent == asked.error(429)
        else:
            assert sent == self.place(asked)

    @precondition(outstanding)
    @rule(choice=st.integers(0, 20), how=st.sampled_from(["", "", "", "twice", "another service", "its number again"]))
    def cancel(self, choice, how):
        self.moment()
        if not self.outstanding():
            return  # the one that was has just ended
        asked = self.outstanding()[choice % len(self.outstanding())]
        message = asked.frames(b"\x05", asked.service)
        if how == "another service":
            self.refuse_number(asked, b"sum", asked.frames(b"\x05", b"sum"))
        elif how == "its number again":
            self.refuse_number(asked, asked.service, asked.frames(b"\x01", asked.service, b"", b"again"))
        else:
            sent = self.send(message)
            assert sent == self.give_up(asked, 499)
            if how == "twice":
                assert self.send(message) == []

    def refuse_number(self, asked, service, message):
        self.refused.append((asked.client.identity, tuple(asked.route[1:])))
        assert self.send(message) == [asked.frames(b"\x04", service, b"400", b"")]

    @rule(client=st.sampled_from(NUMBERED), what=st.sampled_from(["HEARTBEAT", "CANCEL"]))
    def a_numbered_client_says(self, client, what):
        self.moment()
        nobody = Asked(client, b"a", b"", b"0")
        if self.is_ignored(client):
            assert self.send(nobody.frames(b"\x06")) == self.send(nobody.frames(b"\x05", b"a")) == []
        elif what == "HEARTBEAT":
            assert self.send(nobody.frames(b"\x06")) == [nobody.frames(b"\x06")]
        else:
            self.refuse_number(nobody, b"a", nobody.frames(b"\x05", b"a"))

    def busy(self):
        return [worker for worker, hired in self.hired.items() if hired.holds]

    @precondition(busy)
    @rule(choice=st.integers(0, len(WORKERS) - 1), last=st.sampled_from([True, True, False]), fails=st.booleans())
    def reply(self, choice, last, fails):
        self.moment()
        if not self.busy():
            return  # the one that was has just died
        worker = self.busy()[choice % len(self.busy())]
        last = last or worker.header == W01
        asked = self.hired[worker].holds
        if last and fails and worker.header == WX1:
            self.fail(worker, asked)
            return
        said = asked.body + (b"/last" if last else b"/part")
        code = worker.command("FINAL" if last else "PARTIAL")
        if last:
            self.at_work.pop(worker.identity)
        sent = self.send(worker.frames(code, asked.client.identity, b"", said))
        self.hired[worker].seen = self.now
        asked.parts.append(said)
        told = []
        if asked.abandoned:
            pass
        elif asked.client.header != C01:  # C3
            asked.told |= not last
            told = [asked.frames(b"\x03" if last else b"\x02", asked.service, said)]
        elif last:  # C24
            told = [asked.frames(asked.service, *asked.parts)]
        if last:
            self.hired[worker].holds = None
            told += self.free(worker)
        assert sent == told

    def fail(self, worker, asked):
        del self.at_work[worker.identity]
        why = [b"why", b"detail"][: 1 + self.count % 2]
        sent = self.send(worker.frames(b"\x07", asked.client.identity, b"", b"%d" % OWN, *why))
        self.hired[worker].seen = self.now
        told = [] if asked.abandoned else asked.error(OWN, *why)
        self.hired[worker].holds = None
        assert sent == told + self.free(worker)

    @rule(asleep=st.sets(a_worker, max_size=2), times=st.integers(1, 4))
    def time_passes(self, asleep, times):
        for _ in range(times):
            for worker in WORKERS:
                if worker in self.hired and worker not in asleep:
                    self.heartbeat(worker)
            self.pass_time(2.0)

    @precondition(lambda self: len(self.waiting()) > QUEUE)
    @rule()
    def much_time_passes(self):
        self.pass_time(PATIENCE + EXPIRY + 1)  # the workers die, and then nobody comes
        assert self.waiting() == []
        assert self.hired == {}

    @rule(peer=a_client | a_worker, how=st.sampled_from(["garbage", "second", "wrong", "dialect", "stray", "mmi"]))
    def trouble(self, peer, how):
        if how == "garbage":
            self.garbage(peer)
        elif how == "mmi" or peer in CLIENTS:
            self.ask_mmi(SERVICES[self.count % len(SERVICES)])
        elif how == "second":
            self.ready(peer, SERVICES[0])
        elif how == "wrong":
            self.wrong_reply(peer)
        elif how == "dialect":
            self.speak_another_dialect(peer)
        else:
            self.heartbeat(peer)

    @rule(peer=a_worker | a_client, how=st.sampled_from(["DISCONNECT", "gone", "no REQUEST", "no HEARTBEAT"]))
    def a_peer_goes(self, peer, how):
        if peer in CLIENTS:
            self.client_is_gone(peer, how)
        elif how == "DISCONNECT":
            self.disconnect(peer)
        else:
            self.worker_is_gone(peer, how)

    # ── one event each ───────────────────────────────────────────────────────────────────────────────────────────────

    def ready(self, worker, service):
        self.moment()
        sent = self.send(worker.frames(b"\x01", service))
        if worker in self.hired:
            assert sent == self.refuse(worker)
        else:
            self.hired[worker] = Hired(service, self.now, self.now)
            assert sent == self.free(worker)

    def heartbeat(self, worker):
        self.moment()
        sent = self.send(worker.frames(worker.command("HEARTBEAT")))
        if worker in self.hired:
            self.hired[worker].seen = self.now
            assert sent == []
        else:
            assert sent == self.refuse(worker)

    def wrong_reply(self, worker):
        self.moment()
        code = worker.command("FINAL" if self.count % 2 or worker.header == W01 else "PARTIAL")
        hired = self.hired.get(worker)
        client = b"nobody" if hired and hired.holds else b"c1"
        assert self.send(worker.frames(code, client, b"", b"0/wrong")) == self.refuse(worker)  # C14, C18

    def disconnect(self, worker):
        self.moment()
        sent = self.send(worker.frames(worker.command("DISCONNECT")))
        self.at_work.pop(worker.identity, None)
        self.told_to_go.add(worker)
        assert sent == (self.lose(worker, left=True) if worker in self.hired else [])

    def speak_another_dialect(self, worker):
        self.moment()
        other = Peer(worker.identity, {W01: W02, W02: WX1, WX1: W01}[worker.header], worker.envelope)
        sent = self.send(other.frames(other.command("HEARTBEAT")))
        lost = self.lose(worker) if worker in self.hired else []
        assert sent == [other.frames(other.command("DISCONNECT")), *lost]

    def garbage(self, peer):
        self.moment()
        before = picture(self.broker)
        for frames in GARBAGE:
            self.round += 1
            assert self.broker.receive([peer.identity, *frames], self.now) == []  # C15
        assert picture(self.broker) == before

    def ask_mmi(self, service):
        self.moment()
        self.open[b"200"] = self.open[b"404"] = b"asker"
        there = any(hired.service == service for hired in self.hired.values())
        sent = self.send([b"asker", C02, b"\x01", b"mmi.service", service])
        assert sent == [[b"asker", C02, b"\x03", b"mmi.service", b"200" if there else b"404"]]  # C26

    def is_ignored(self, client):
        if self.now >= self.ignored.get(client, 0.0):
            return False
        self.ignored[client] = self.now + GIVEN_UP  # what it has just said is not answered either
        return True

    def client_is_gone(self, client, how):
        self.moment()
        if how == "gone":
            told = self.seen(self.broker.gone(client.identity, self.now))
            if client.header == CX1:
                self.ignored[client] = self.now + GIVEN_UP
        else:
            told = self.seen(self.broker.unreachable(client.frames(b"undelivered"), self.now))
            self.ignored.pop(client, None)
        for asked in [each for each in self.waiting() if each.client == client]:
            self.drop(asked)
        assert told == [
            message
            for asked in self.running()
            if asked.client == client
            for message in self.abandon(self.worker_of(asked))
        ]
        self.numbers = {key: body for key, body in self.numbers.items() if key[0] != client.identity}
        self.open = {asked: identity for asked, identity in self.open.items() if identity != client.identity}

    def worker_is_gone(self, worker, undelivered):
        self.moment()
        self.at_work.pop(worker.identity, None)
        asked = self.hired[worker].holds if worker in self.hired else None
        if undelivered == "gone":
            sent = self.broker.gone(worker.identity, self.now)
        elif undelivered == "no HEARTBEAT" or asked is None:
            if worker in self.hired and self.hired[worker].round == self.round:  # sent in order: not yet, or just now
                self.hired[worker].reached = False
            sent = self.broker.unreachable(worker.frames(worker.command("HEARTBEAT")), self.now)
        else:
            self.hired[worker].reached = False
            message = worker.frames(worker.command("REQUEST"), asked.client.identity, b"", asked.body)
            sent = self.broker.unreachable(message, self.now)
        assert self.seen(sent) == (self.lose(worker) if worker in self.hired else [])

    # ── what always holds ────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def the_books_are_right(self):
        check_books(self.broker)

    @invariant()
    def the_model_agrees(self):
        registry = self.broker.registry
        assert {worker.route: hired.holds and hired.holds.body for worker, hired in self.hired.items()} == {
            route: worker.request and worker.request.body[0] for route, worker in registry.workers.items()
        }
        assert {name: [worker.identity for worker in idle] for name, idle in self.idle.items() if idle} == {
            name: [worker.identity for worker in service.idle]
            for name, service in registry.services.items()
            if service.idle
        }
        assert {
            name: [each.body for line in lines for each in line] for name, lines in self.lines.items() if lines
        } == {
            name: [request.body[0] for request in queued(service)]
            for name, service in registry.services.items()
            if service.queue.size
        }

    def teardown(self):
        told = [message for asked in self.outstanding() for message in self.give_up(asked, 503)]
        parted = [worker.frames(worker.command("DISCONNECT")) for worker in self.hired]
        got = self.seen(self.broker.close(self.now))
        assert sorted(got[: len(told)]) == sorted(told)
        assert got[len(told) :] == parted
        assert self.broker.registry.workers == {}
        assert self.numbers == {}  # X1: each has ended in exactly one FINAL or ERROR
        check_books(self.broker)


BrokerMachine.TestCase.settings = settings(deadline=None, max_examples=50, stateful_step_count=50)
TestBroker = BrokerMachine.TestCase
