"""What holds for any bytes, and for any course of events: the broker beside a model of it that is slow and plain."""

import logging
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zmdp.mdp import wire
from zmdp.mdp.broker import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import C01, C02, W01, W02

QUIET = logging.Logger("quiet", logging.CRITICAL + 1)

# ── what the broker holds ────────────────────────────────────────────────────────────────────────────────────────────


def queued(service):
    """The requests that wait for `service`, client by client as turns come."""
    clients = list(service.queue._lines)
    return [request for client in clients for request in service.queue.line(client)]


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
        {identity: (id(w.request), w.last_seen, w.last_sent) for identity, w in registry.workers.items()},
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
    for client in {request.client for request in [*waiting, *running]}:
        assert set(registry.waiting_for(client)) == {request for request in waiting if request.client == client}
        assert set(registry.running_for(client)) == {request for request in running if request.client == client}
    assert set(registry._waiting) == {request.client for request in waiting}
    assert set(registry._worked_on) == {request.client for request in running}

    assert {worker for service in services for worker in service.workers} == set(workers)
    for service in services:
        assert service.workers or service.queue.size, "a service with nothing left is kept"
        assert not (service.idle and service.queue.size), "a worker is idle while a request waits"
        assert set(service.idle) == {worker for worker in service.workers if worker.request is None}
    assert all(worker.bucket for worker in workers)
    assert all(request.bucket for request in waiting)
    assert not any(request.bucket for request in running)


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = [
    b"", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", C01, C02, W01, W02, b"echo", b"sum", b"mmi.service",
    b"mmi.stats", b"mmi.workers", b"mmi.services", b"mmi.broker", b"c1", b"c2", b"w1", b"w2", b"w3", b"\xff",
    b"x" * 256,
]  # fmt: skip
frame = st.sampled_from(TOKENS) | st.binary(max_size=8)
frames_of_any_kind = st.lists(frame, max_size=8) | st.lists(frame, max_size=24)
# From a ROUTER: its peers' identities are never empty.
peer = st.sampled_from([b"c1", b"c2", b"w1", b"w2", b"w3"]) | st.binary(min_size=1, max_size=5)
message = st.builds(lambda identity, frames: [identity, *frames], peer, frames_of_any_kind)
almost = st.builds(
    # a header where one belongs: what follows is right more often
    lambda identity, envelope, header, frames: [identity, *envelope, header, *frames],
    peer, st.sampled_from([[], [b""], [b"hop", b""]]), st.sampled_from([C01, C02, W01, W02]), frames_of_any_kind,
)  # fmt: skip
LIMITS = Limits(max_message=1000, max_frames=20, max_queue=3, max_services=4, max_workers=4)


def busy_broker():
    """A broker with an idle worker, a busy one, and a request that waits."""
    broker = Broker(LIMITS, now=0, logger=QUIET)
    for each in (
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
        wire.Request | wire.Ready | wire.Reply | wire.Heartbeat | wire.Disconnect | wire.Invalid,
    )
    assert isinstance(
        wire.decode_broker(frames),
        wire.Answer | wire.Work | wire.Heartbeat | wire.Disconnect | wire.Invalid,
    )


@settings(deadline=None, max_examples=200)
@given(st.lists(message | almost, max_size=8))
def test_any_bytes_are_survived_and_the_invalid_ones_change_nothing(messages):  # C15
    broker = busy_broker()
    for frames in messages:
        before, invalid = picture(broker), broker.stats.invalid.total()
        sent = broker.receive(frames, now=0)
        command = wire.decode_peer(frames, max_message=1000, max_frames=20)
        if isinstance(command, wire.Invalid):
            assert sent == []
            assert picture(broker) == before
            assert broker.stats.invalid.total() == invalid + 1
        for each in sent:
            assert not isinstance(wire.decode_broker(each[1:]), wire.Invalid)
        check_books(broker)


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────────

address = st.binary(min_size=1, max_size=255)
hop = address.filter(lambda frame: frame not in {C01, C02, W01, W02})
envelope = st.just(()) | st.lists(hop, max_size=15).map(lambda hops: (*hops, b""))
name = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=60).map(str.encode)
body = st.lists(st.binary(max_size=20), min_size=1, max_size=4)
route = st.builds(lambda identity, hops: (identity, *hops), address, envelope)
client_header, worker_header = st.sampled_from([C01, C02]), st.sampled_from([W01, W02])
PARTIAL, FINAL = wire.Kind.PARTIAL, wire.Kind.FINAL


def to_broker(frames):
    return wire.decode_peer(frames, max_message=1 << 20, max_frames=100)


@settings(deadline=None)
@given(route, client_header, name, body, st.booleans())
def test_what_clients_say_and_are_told_reads_as_it_was_meant(route, header, service, body, final):  # C2, C3, C22, C24
    said = wire.Request(route, header, service, body)
    assert to_broker(wire.request(*said)) == said
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
    assert wire.decode_broker(wire.work(*work)) == work


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
    assert set(broker.registry.workers) == alive
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

    def frames(self, *frames):
        """A message from or to this peer."""
        return [self.identity, *self.envelope, self.header, *frames]

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
    died_at: int = 0
    since: float = 0.0
    told: bool = False
    abandoned: bool = False
    parts: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Hired:
    """A registered worker, by the model's account."""

    service: bytes
    seen: float
    sent: float
    overdue: bool = False
    reached: bool = True
    holds: Asked | None = None


CLIENTS = [Peer(b"c1", C02), Peer(b"c2", C02, (b"hop", b"")), Peer(b"c3", C01, (b"",)), Peer(b"c4", C01)]
WORKERS = [
    Peer(b"w1", W02),
    Peer(b"w2", W02),
    Peer(b"w3", W02, (b"hop", b"")),
    Peer(b"w4", W01, (b"",)),
    Peer(b"w5", W01),
]
SERVICES = [b"a", b"b"]
a_client, a_worker, a_service = st.sampled_from(CLIENTS), st.sampled_from(WORKERS), st.sampled_from(SERVICES)
GARBAGE = [
    [],
    [b""],
    [b"MDPC03"],
    [C02, b"\x01", b"a"],
    [W02, b"\x01"],
    [W02, b"\x09"],
    [W02, b"\x04", b"c1", b"x", b"y"],
]


class BrokerMachine(RuleBasedStateMachine):
    """Every rule sends the broker something, works out by the model what must come of it, and compares."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.count = 0
        limits = Limits(heartbeat=HEARTBEAT, liveness=LIVENESS, expiry=EXPIRY, max_attempts=ATTEMPTS, max_queue=QUEUE)
        self.broker = Broker(limits, now=0, logger=QUIET)
        self.hired = {}  # Peer → Hired
        self.idle = {service: [] for service in SERVICES}  # peers, least recently used first
        self.lines = {service: [] for service in SERVICES}  # lists of one client's requests, as turns come
        # what can be seen from outside, without the model
        self.at_work = {}  # worker → body
        self.open = {}  # body → client
        self.told_to_go = set()  # workers that sent DISCONNECT and nothing after it

    # ── the model: each returns what must be sent ────────────────────────────────────────────────────────────────────

    def dispatch(self, worker, asked):
        hired = self.hired[worker]
        assert hired.holds is None
        hired.holds, hired.sent = asked, self.now
        hired.reached, hired.overdue = True, self.now - hired.seen > OVERDUE
        return [worker.frames(worker.command("REQUEST"), asked.client.identity, b"", asked.body)]

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
        asked.since = self.now
        return []

    def free(self, worker):
        """C20: the client whose turn it is; if more of it waits, that waits for all others' turns."""
        service = self.hired[worker].service
        lines = self.lines[service]
        if not lines:
            self.idle[service].append(worker)
            return []
        asked, *more = lines.pop(0)
        if more:
            lines.append(more)
        return self.dispatch(worker, asked)

    def lose(self, worker, *, silent=False):
        """C17: to another worker, at most so many times, and never once a PARTIAL has reached the client."""
        hired = self.hired.pop(worker)
        if worker in self.idle[hired.service]:
            self.idle[hired.service].remove(worker)
        asked = hired.holds
        if asked is None or asked.abandoned or asked.told:
            return []
        asked.died_at += hired.reached and not (silent and hired.overdue)
        if asked.died_at >= ATTEMPTS:
            return []
        asked.parts = []
        return self.place(asked, front=True)

    def refuse(self, worker):
        """C14: DISCONNECT, and forget it."""
        sent = [worker.frames(worker.command("DISCONNECT"))]
        return sent + self.lose(worker) if worker in self.hired else sent

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
        return self.seen(self.broker.receive(message, self.now))

    def seen(self, sent):
        """Watch what is sent from outside: rules that need no model."""
        for message in sent:
            identity, command = message[0], wire.decode_broker(message[1:])
            assert identity not in {worker.identity for worker in self.told_to_go}  # C16
            if isinstance(command, wire.Work):
                assert identity not in self.at_work  # C6: never two requests
                self.at_work[identity] = command.body[0]
            elif isinstance(command, wire.Disconnect):
                self.at_work.pop(identity, None)
            elif isinstance(command, wire.Answer):
                asked = command.body[0].partition(b"/")[0]
                assert self.open[asked] == identity  # nobody gets what somebody else asked for
                if command.final:
                    del self.open[asked]  # C18: one FINAL
        return sent

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
        sent = self.seen(self.broker.tick(self.now))
        # C13: HEARTBEAT to whom nothing else was sent for an interval, and to nobody else
        beats = {worker: worker.frames(worker.command("HEARTBEAT")) for worker in self.hired}
        beaten = [worker for worker in self.hired if beats[worker] in sent]
        for worker in beaten:
            assert self.now >= self.hired[worker].sent + HEARTBEAT
            self.hired[worker].sent = self.now
        # C13: silent for `liveness` intervals is dead
        dead = [worker for worker in self.hired if worker.identity not in self.broker.registry.workers]
        assert len(dead) <= 1
        work = []
        for worker in dead:
            assert self.now >= self.hired[worker].seen + PATIENCE
            self.at_work.pop(worker.identity, None)
            work += self.lose(worker, silent=True)
        assert sorted(sent) == sorted([*work, *(beats[worker] for worker in beaten)])
        for hired in self.hired.values():
            assert self.now < hired.seen + PATIENCE + GRAIN
            assert self.now < hired.sent + HEARTBEAT + GRAIN
        # C12: what waited too long is dropped
        kept = {request.body[0] for service in self.broker.registry.services.values() for request in queued(service)}
        for asked in self.waiting():
            if asked.body in kept:
                assert self.now < asked.since + EXPIRY + GRAIN
            else:
                assert self.now >= asked.since + EXPIRY
                self.drop(asked)

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

    @rule(client=a_client, service=a_service, times=st.sampled_from([1, 1, 2, 3]))
    def request(self, client, service, times):
        for _ in range(times):
            self.moment()
            self.count += 1
            asked = Asked(client, service, b"%d" % self.count)
            self.open[asked.body] = client.identity
            frames = [service, asked.body] if client.header == C01 else [b"\x01", service, asked.body]
            sent = self.send(client.frames(*frames))
            full = not self.idle[service] and sum(map(len, self.lines[service])) >= QUEUE
            assert sent == ([] if full else self.place(asked))

    def busy(self):
        return [worker for worker, hired in self.hired.items() if hired.holds]

    @precondition(busy)
    @rule(choice=st.integers(0, len(WORKERS) - 1), last=st.sampled_from([True, True, False]))
    def reply(self, choice, last):
        self.moment()
        if not self.busy():
            return  # the one that was has just died
        worker = self.busy()[choice % len(self.busy())]
        last = last or worker.header == W01
        asked = self.hired[worker].holds
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
        elif asked.client.header == C02:  # C3
            asked.told |= not last
            told = [asked.client.frames(b"\x03" if last else b"\x02", asked.service, said)]
        elif last:  # C24
            told = [asked.client.frames(asked.service, *asked.parts)]
        if last:
            self.hired[worker].holds = None
            told += self.free(worker)
        assert sent == told

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
            self.client_is_gone(peer)
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
        assert sent == (self.lose(worker) if worker in self.hired else [])

    def speak_another_dialect(self, worker):
        self.moment()
        other = Peer(worker.identity, W02 if worker.header == W01 else W01, worker.envelope)
        sent = self.send(other.frames(other.command("HEARTBEAT")))
        lost = self.lose(worker) if worker in self.hired else []
        assert sent == [other.frames(other.command("DISCONNECT")), *lost]

    def garbage(self, peer):
        self.moment()
        before = picture(self.broker)
        for frames in GARBAGE:
            assert self.broker.receive([peer.identity, *frames], self.now) == []  # C15
        assert picture(self.broker) == before

    def ask_mmi(self, service):
        self.moment()
        self.open[b"200"] = self.open[b"404"] = b"asker"
        there = any(hired.service == service for hired in self.hired.values())
        sent = self.send([b"asker", C02, b"\x01", b"mmi.service", service])
        assert sent == [[b"asker", C02, b"\x03", b"mmi.service", b"200" if there else b"404"]]  # C26

    def client_is_gone(self, client):
        self.moment()
        assert self.seen(self.broker.gone(client.identity, self.now)) == []
        for asked in [each for each in self.waiting() if each.client == client]:
            self.drop(asked)
        for hired in self.hired.values():
            if hired.holds and hired.holds.client == client:
                hired.holds.abandoned = True
        self.open = {asked: identity for asked, identity in self.open.items() if identity != client.identity}

    def worker_is_gone(self, worker, undelivered):
        self.moment()
        self.at_work.pop(worker.identity, None)
        asked = self.hired[worker].holds if worker in self.hired else None
        if undelivered == "gone":
            sent = self.broker.gone(worker.identity, self.now)
        elif undelivered == "no HEARTBEAT" or asked is None:
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
        assert {worker.identity: hired.holds and hired.holds.body for worker, hired in self.hired.items()} == {
            identity: worker.request and worker.request.body[0] for identity, worker in registry.workers.items()
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
        told = [worker.frames(worker.command("DISCONNECT")) for worker in self.hired]
        assert self.broker.close(self.now) == told
        assert self.broker.registry.workers == {}


BrokerMachine.TestCase.settings = settings(deadline=None, max_examples=50, stateful_step_count=50)
TestBroker = BrokerMachine.TestCase
