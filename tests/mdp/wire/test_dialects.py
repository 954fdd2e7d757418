"""Any client, any worker: the machines of each dialect with one another, on a clock and a wire made here."""

import pytest
from support import turns

from zmdp.clients.legacy_session import LegacySession
from zmdp.clients.reply import Reply
from zmdp.clients.session import ClientSession
from zmdp.mdp import wire
from zmdp.mdp.broker.drops import Drop
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.errors import ServiceError
from zmdp.mdp.limits import Limits
from zmdp.workers.credit import CreditController
from zmdp.workers.session import WorkerSession
from zmdp.workers.settings import SessionSettings
from zmdp.workers.states import CLOSED

DIALECTS = ["X1", "0.2", "0.1"]
each_pair = pytest.mark.parametrize(
    ("client", "worker"), [(client, worker) for client in DIALECTS for worker in DIALECTS]
)
each_worker = pytest.mark.parametrize("worker", DIALECTS)


# ── peers: each has `receive(message, now)` and `take_messages()` ────────────────────────────────────────────────────


class Caller:
    """A client, and what it was handed."""

    def __init__(self):
        self.told = []
        """("PARTIAL" or "FINAL", frames) or ("ERROR", code, text)."""

    def tell(self, outcome):
        if isinstance(outcome, ServiceError):
            self.told.append(("ERROR", outcome.code, outcome.text))
        elif isinstance(outcome, Reply) and outcome.failure is not None:
            self.told.append(("ERROR", *outcome.failure))
        elif isinstance(outcome, Reply):
            self.told.append(("FINAL" if outcome.final else "PARTIAL", list(outcome)))
        else:
            self.told.append(("ERROR", outcome.code))


class NumberedCaller(Caller):
    """An X1 client."""

    def __init__(self):
        super().__init__()
        self.session = ClientSession()
        self.session.connected("here", 0)
        self.take_messages = self.session.take_messages

    def ask(self, *body, **settings):
        self.call = self.session.request(b"echo", body, 0, stream=True, **settings)

    def cancel(self):
        self.session.cancel(self.call)

    def receive(self, message, now):
        self.session.receive(message, now)
        for _, outcome in self.session.take_events():
            self.tell(outcome)


class PirateCaller(Caller):
    """A client of 0.2 or 0.1."""

    def __init__(self, protocol):
        super().__init__()
        self.session = LegacySession(protocol)
        self.take_messages = self.session.take_messages

    def ask(self, *body):
        self.session.request(b"echo", body, 0, timeout=100, stream=True)

    def receive(self, message, now):
        self.session.receive(message, now)
        for event in self.session.take_events():
            self.tell(event)


class Server:
    """A worker of ours, and the last request that it began."""

    def __init__(self, protocol, credit):
        self.session = WorkerSession(b"echo", SessionSettings(protocol), controller=CreditController(credit))
        self.session.connected(0)
        self.take_messages = self.session.take_messages
        self.requests = []

    @property
    def request(self):
        return self.requests[-1] if self.requests else None

    def receive(self, message, now):
        self.session.receive(message, now)
        self.requests += iter(lambda: self.session.begin(now), None)

    def partial(self, request, body):
        self.session.partial(request, body, 0)

    def final(self, request, body):
        self.session.final(request, body, 0)

    def error(self, request, code, text):
        self.session.error(request, code, text, 0, [b""])

    def leave(self):
        self.session.leave(0)

    @property
    def ended(self):
        return self.session.state is CLOSED


class World:
    """A broker with peers; what is sent arrives at once."""

    def __init__(self):
        self.now = 0.0
        self.broker = Broker(Limits(heartbeat=10), now=0)
        self.peers = {}

    def caller(self, protocol, identity=b"client"):
        self.peers[identity] = NumberedCaller() if protocol == "X1" else PirateCaller(protocol)
        return self.peers[identity]

    def worker(self, protocol, identity=b"worker", credit=1):
        self.peers[identity] = Server(protocol, credit)
        self.settle()
        return self.peers[identity]

    def settle(self):
        """Carry messages until there are none."""
        while sent := [[identity, *each] for identity, peer in self.peers.items() for each in peer.take_messages()]:
            for message in sent:
                self.carry(turns.receive(self.broker, message, self.now))

    def carry(self, messages):
        for identity, *message in messages:
            self.peers[identity].receive(message, self.now)

    def gone(self, identity):
        """That peer is not connected any more."""
        del self.peers[identity]
        self.carry(turns.gone(self.broker, identity, self.now))
        self.settle()

    def pass_time(self, seconds):
        self.now += seconds
        self.carry(turns.tick(self.broker, self.now))
        self.settle()

    @property
    def idle(self):
        """Whether the broker has nothing left to do."""
        registry = self.broker.registry
        return (registry.running, registry.queued, [*registry.numbered]) == (0, 0, [])


def world_of(client, worker):
    world = World()
    return world, world.caller(client), world.worker(worker)


@each_pair
def test_a_body_goes_there_and_back_unchanged(client, worker):  # C24, C32
    world, caller, server = world_of(client, worker)
    body = [b"", b"\0" * 300, b"MDPW02", b"L" * 2 * wire.SHARED, b""]
    caller.ask(*body)
    world.settle()
    assert list(server.request) == body
    assert (server.request.attempt, server.request.options) == (1, {})
    assert server.request.client.isdigit()
    server.final(server.request, body[::-1])
    world.settle()
    assert caller.told == [("FINAL", body[::-1])]
    assert world.idle
    assert world.broker.stats.dropped == world.broker.stats.invalid == world.broker.stats.disconnected == {}


@each_pair
def test_a_stream_arrives_in_order(client, worker):  # C24: 0.1 has one reply, which has all the frames
    world, caller, server = world_of(client, worker)
    caller.ask(b"x")
    world.settle()
    for body in ([b"1"], [b"2", b"3"]):
        server.partial(server.request, body)
        world.settle()
    server.final(server.request, [b"4"])
    world.settle()
    if "0.1" in {client, worker}:
        assert caller.told == [("FINAL", [b"1", b"2", b"3", b"4"])]
    else:
        assert caller.told == [("PARTIAL", [b"1"]), ("PARTIAL", [b"2", b"3"]), ("FINAL", [b"4"])]


@each_pair
def test_a_failure_is_told_where_it_can_be(client, worker):
    world, caller, server = world_of(client, worker)
    caller.ask(b"x")
    world.settle()
    server.error(server.request, 422, "größe")
    world.settle()
    if worker == "X1" and client != "X1":
        assert caller.told == []
        assert world.broker.stats.dropped == {Drop.HANDLER_FAILED: 1}
    else:
        assert caller.told == [("ERROR", 422, "größe")]
        assert world.broker.stats.dropped == {}
    assert world.idle
    caller.ask(b"y")
    world.settle()
    assert list(server.request) == [b"y"]


@each_pair
def test_a_lost_workers_request_goes_to_the_next(client, worker):  # C17
    world, caller, _ = world_of(client, worker)
    second = world.worker(worker, b"second")
    caller.ask(b"x")
    world.settle()
    assert second.request is None
    world.gone(b"worker")
    assert second.request.attempt == (2 if worker == "X1" else 1)
    second.final(second.request, [b"y"])
    world.settle()
    assert caller.told == [("FINAL", [b"y"])]


@each_pair
def test_a_worker_that_leaves_ends_what_it_has_begun(client, worker):
    world, caller, first = world_of(client, worker)
    caller.ask(b"x")
    world.settle()
    first.leave()
    world.settle()
    assert not first.ended
    first.final(first.request, [b"y"])
    world.settle()
    assert caller.told == [("FINAL", [b"y"])]
    assert first.ended
    second = world.worker(worker, b"second")
    caller.ask(b"z")
    world.settle()
    assert (len(first.requests), list(second.request)) == (1, [b"z"])


@each_pair
def test_a_gone_clients_request_is_ended_for_nobody(client, worker):
    world, caller, server = world_of(client, worker)
    other = world.caller(client, b"other")
    caller.ask(b"x")
    world.settle()
    other.ask(b"y")
    world.settle()
    request = server.request
    world.gone(b"client")
    assert request.cancelled == (worker == "X1")
    server.partial(request, [b"1"])
    server.final(request, [b"2"])
    world.settle()
    assert list(server.request) == [b"y"]
    server.final(server.request, [b"3"])
    world.settle()
    assert (caller.told, other.told) == ([], [("FINAL", [b"3"])])


@each_pair
def test_a_reply_that_is_sent_twice_reaches_nobody_else(client, worker):  # C32
    world, caller, server = world_of(client, worker)
    other = world.caller(client, b"other")
    caller.ask(b"x")
    world.settle()
    other.ask(b"y")
    world.settle()
    first = server.request
    server.final(first, [b"1"])
    repeated = server.take_messages()
    for message in repeated:
        world.carry(turns.receive(world.broker, [b"worker", *message], 0))
    assert (caller.told, list(server.request)) == ([("FINAL", [b"1"])], [b"y"])
    for message in repeated:
        world.carry(turns.receive(world.broker, [b"worker", *message], 0))
    assert other.told == []
    assert len(caller.told) == 1


@each_worker
def test_a_request_can_be_cancelled_whoever_works(worker):
    world, caller, server = world_of("X1", worker)
    caller.ask(b"x")
    world.settle()
    caller.cancel()
    world.settle()
    assert server.request.cancelled == (worker == "X1")
    server.final(server.request, [b"late"])
    world.settle()
    assert caller.told == []
    assert world.idle


@each_worker
def test_a_request_has_its_time_whoever_works(worker):
    world, caller, server = world_of("X1", worker)
    caller.ask(b"x", timeout=2)
    world.settle()
    assert server.request.deadline == (2 if worker == "X1" else None)
    world.pass_time(2.02)
    assert server.request.cancelled == (worker == "X1")
    assert caller.told == [("ERROR", 408)]
    server.final(server.request, [b"late"])
    world.settle()
    assert caller.told == [("ERROR", 408)]
    assert world.idle


@each_worker
def test_options_reach_workers_that_know_such(worker):
    world, caller, server = world_of("X1", worker)
    caller.ask(b"x", headers={"a": "b"}, options={"key": 1}, wait=False)
    world.settle()
    assert server.request.headers == ({"a": "b"} if worker == "X1" else {})
    known = {"key": 1, "headers": {"a": "b"}, "wait": False}
    assert server.request.options == (known if worker == "X1" else {})


def test_an_x1_worker_holds_as_many_requests_as_its_credit():
    world = World()
    callers = [world.caller(protocol, b"%d" % number) for number, protocol in enumerate(2 * DIALECTS)]
    server = world.worker("X1", credit=3)
    for caller in callers:
        caller.ask(b"x")
    world.settle()
    assert len(server.requests) == 3
    assert len({request.client for request in server.requests}) == 3
    while held := [request for request in server.requests if not request.cancelled]:
        for request in held:
            server.final(request, [request.client])
            request.cancelled = True
        world.settle()
    assert len(server.requests) == len(callers)
    assert {kind for caller in callers for kind, _ in caller.told} == {"FINAL"}
    assert len({tuple(body) for caller in callers for _, body in caller.told}) == len(callers)


def test_clients_of_all_dialects_take_turns_at_workers_of_all_dialects():  # C20, C21
    world = World()
    callers = [world.caller(protocol, protocol.encode()) for protocol in DIALECTS]
    for protocol, caller in zip(DIALECTS, callers, strict=True):
        caller.ask(protocol.encode())
    world.settle()
    workers = [world.worker(protocol, b"w" + protocol.encode()) for protocol in reversed(DIALECTS)]
    assert [list(worker.request) for worker in workers] == [[protocol.encode()] for protocol in DIALECTS]
    for protocol, worker in zip(DIALECTS, workers, strict=True):
        worker.final(worker.request, [protocol.encode()])
    world.settle()
    assert [caller.told for caller in callers] == [[("FINAL", [protocol.encode()])] for protocol in DIALECTS]
