"""Any client, any worker: the three machines of each dialect with one another, on a clock and a wire made here."""

import pytest

from zmdp.clients.pirate import PirateSession
from zmdp.clients.reply import Reply
from zmdp.clients.session import ClientSession
from zmdp.mdp.broker import Broker
from zmdp.mdp.errors import ServiceError
from zmdp.mdp.journal import Drop
from zmdp.mdp.limits import Limits
from zmdp.workers.session import WorkerSession

DIALECTS = ["X1", "0.2", "0.1"]
each_pair = pytest.mark.parametrize(
    ("client", "worker"), [(client, worker) for client in DIALECTS for worker in DIALECTS]
)
each_worker = pytest.mark.parametrize("worker", DIALECTS)


class Caller:
    """A client, and what it was handed."""

    def __init__(self, protocol, identity):
        self.identity = identity
        self.told = []
        """("PARTIAL" or "FINAL", frames) or ("ERROR", code, text)."""
        if protocol == "X1":
            self.numbered = ClientSession()
            self.numbered.connected("here", 0)
        else:
            self.numbered = None
            self.pirate = PirateSession(protocol)

    def ask(self, *body, **settings):
        if self.numbered is None:
            return [self.pirate.request(b"echo", body, 0, timeout=100, retries=0, stream=True)]
        self.call = self.numbered.request(b"echo", body, 0, stream=True, **settings)
        return self.sent()

    def sent(self):
        messages, self.numbered.messages = self.numbered.messages, []
        return messages

    def receive(self, message, now):
        if self.numbered is None:
            outcomes = [self.pirate.receive(message, now)]
        else:
            self.numbered.receive(message, now)
            outcomes, self.numbered.events = [outcome for _, outcome in self.numbered.events], []
        for outcome in outcomes:
            if isinstance(outcome, ServiceError):
                self.told.append(("ERROR", outcome.code, outcome.text))
            elif isinstance(outcome, Reply) and outcome.failure is not None:
                self.told.append(("ERROR", *outcome.failure))
            elif isinstance(outcome, Reply):
                self.told.append(("FINAL" if outcome.final else "PARTIAL", list(outcome)))
            elif outcome is not None:
                self.told.append((type(outcome).__name__, outcome.code))


class World:
    """A broker with peers; what is sent arrives at once."""

    def __init__(self):
        self.now = 0.0
        self.broker = Broker(Limits(heartbeat=10), now=0)
        self.peers = {}

    def caller(self, protocol, identity=b"client"):
        self.peers[identity] = Caller(protocol, identity)
        return self.peers[identity]

    def worker(self, protocol, identity=b"worker"):
        session = WorkerSession(b"echo", protocol=protocol)
        self.peers[identity] = session
        self.send(identity, session.connected(0))
        return session

    def send(self, identity, messages):
        for message in messages:
            self.carry(self.broker.receive([identity, *message], self.now))

    def carry(self, messages):
        for identity, *message in messages:
            self.peers[identity].receive(message, self.now)

    def pass_time(self, seconds):
        self.now += seconds
        self.carry(self.broker.tick(self.now))


def world_of(client, worker):
    world = World()
    return world, world.caller(client), world.worker(worker)


@each_pair
def test_a_body_goes_there_and_back_unchanged(client, worker):  # C24
    world, caller, server = world_of(client, worker)
    body = [b"", b"\0" * 300, b"MDPW02", b""]
    world.send(b"client", caller.ask(*body))
    assert list(server.request) == body
    assert (server.request.client, server.request.attempt, server.request.options) == (b"client", 1, {})
    world.send(b"worker", server.final(server.request, body[::-1], 0))
    assert caller.told == [("FINAL", body[::-1])]
    assert (world.broker.registry.running, world.broker.registry.numbered) == (0, {})
    assert world.broker.stats.dropped == world.broker.stats.invalid == world.broker.stats.disconnected == {}


@each_pair
def test_a_stream_arrives_in_order(client, worker):  # C24: 0.1 has one reply, which has all the frames
    world, caller, server = world_of(client, worker)
    world.send(b"client", caller.ask(b"x"))
    request = server.request
    for body in ([b"1"], [b"2", b"3"]):
        world.send(b"worker", server.partial(request, body, 0))
    world.send(b"worker", server.final(request, [b"4"], 0))
    if "0.1" in {client, worker}:
        assert caller.told == [("FINAL", [b"1", b"2", b"3", b"4"])]
    else:
        assert caller.told == [("PARTIAL", [b"1"]), ("PARTIAL", [b"2", b"3"]), ("FINAL", [b"4"])]


@each_pair
def test_a_failure_is_told_where_it_can_be(client, worker):
    world, caller, server = world_of(client, worker)
    world.send(b"client", caller.ask(b"x"))
    world.send(b"worker", server.error(server.request, 422, "größe", 0))
    if worker == "X1" and client != "X1":
        assert caller.told == []
        assert world.broker.stats.dropped == {Drop.HANDLER_FAILED: 1}
    else:
        assert caller.told == [("ERROR", 422, "größe")]
        assert world.broker.stats.dropped == {}
    assert world.broker.registry.running == 0
    world.send(b"client", caller.ask(b"y"))
    assert list(server.request) == [b"y"]


@each_pair
def test_a_lost_workers_request_goes_to_the_next(client, worker):  # C17
    world, caller, first = world_of(client, worker)
    second = world.worker(worker, b"second")
    world.send(b"client", caller.ask(b"x"))
    assert second.request is None
    world.send(b"worker", first.disconnect("closed", 0))
    assert second.request.attempt == (2 if worker == "X1" else 1)
    world.send(b"second", second.final(second.request, [b"y"], 0))
    assert caller.told == [("FINAL", [b"y"])]


@each_pair
def test_a_gone_clients_request_is_ended_for_nobody(client, worker):
    world, caller, server = world_of(client, worker)
    other = world.caller(client, b"other")
    world.send(b"client", caller.ask(b"x"))
    world.send(b"other", other.ask(b"y"))
    request = server.request
    world.carry(world.broker.gone(b"client", 0))
    assert request.cancelled == (worker == "X1")
    world.send(b"worker", server.partial(request, [b"1"], 0))
    world.send(b"worker", server.final(request, [b"2"], 0))
    assert list(server.request) == [b"y"]
    world.send(b"worker", server.final(server.request, [b"3"], 0))
    assert (caller.told, other.told) == ([], [("FINAL", [b"3"])])


@each_worker
def test_a_request_can_be_cancelled_whoever_works(worker):
    world, caller, server = world_of("X1", worker)
    world.send(b"client", caller.ask(b"x"))
    request = server.request
    caller.numbered.cancel(caller.call)
    world.send(b"client", caller.sent())
    assert request.cancelled == (worker == "X1")
    world.send(b"worker", server.final(request, [b"late"], 0))
    assert caller.told == []
    assert (world.broker.registry.running, world.broker.registry.numbered) == (0, {})


@each_worker
def test_a_request_has_its_time_whoever_works(worker):
    world, caller, server = world_of("X1", worker)
    world.send(b"client", caller.ask(b"x", timeout=2))
    request = server.request
    assert request.deadline == (2 if worker == "X1" else None)
    world.pass_time(2.02)
    assert request.cancelled == (worker == "X1")
    assert caller.told == [("RequestTimeout", 408)]
    world.send(b"worker", server.final(request, [b"late"], 0))
    assert caller.told == [("RequestTimeout", 408)]


@each_worker
def test_options_reach_workers_that_know_such(worker):
    world, caller, server = world_of("X1", worker)
    world.send(b"client", caller.ask(b"x", headers={"a": "b"}, options={"key": 1}, wait=False))
    assert server.request.headers == ({"a": "b"} if worker == "X1" else {})
    known = {"key": 1, "headers": {"a": "b"}, "wait": False}
    assert server.request.options == (known if worker == "X1" else {})


def test_clients_of_all_dialects_take_turns_at_workers_of_all_dialects():  # C20, C21
    world = World()
    callers = [world.caller(protocol, protocol.encode()) for protocol in DIALECTS]
    for caller in callers:
        world.send(caller.identity, caller.ask(caller.identity))
    workers = [world.worker(protocol, b"w" + protocol.encode()) for protocol in ("0.1", "X1", "0.2")]
    assert [list(worker.request) for worker in workers] == [[b"X1"], [b"0.2"], [b"0.1"]]
    for worker, protocol in zip(workers, ("0.1", "X1", "0.2"), strict=True):
        world.send(b"w" + protocol.encode(), worker.final(worker.request, [protocol.encode()], 0))
    assert [caller.told for caller in callers] == [[("FINAL", [b"0.1"])], [("FINAL", [b"X1"])], [("FINAL", [b"0.2"])]]
