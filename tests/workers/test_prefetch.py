"""Prefetching in processes that rarely get the processor: it may cost time, but no request and no attempt."""

import random
from collections import defaultdict

import pytest
from support import turns

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.workers.session.held import CreditController
from zmdp.workers.session.session import WorkerSession
from zmdp.workers.session.states import SessionSettings

PATIENT = 1e6
"""A heartbeat interval: silence is not the subject here."""


class Preempted:
    """Workers with prefetching threads at a broker, each of which goes on only now and then."""

    def __init__(self, seed, threads):
        self.rng = random.Random(seed)
        self.now = 100.0
        self.broker = Broker(Limits(heartbeat=PATIENT, expiry=PATIENT), now=self.now)
        self.workers = {b"w%d" % number: self.worker(threads) for number in range(3)}
        self.inbox = defaultdict(list)
        self.running = defaultdict(list)
        self.attempts = []
        self.answered = []

    def worker(self, threads):
        controller = CreditController(threads, prefetch=True)
        session = WorkerSession("s", SessionSettings(heartbeat=PATIENT), controller=controller, rng=self.rng)
        session.connected(self.now)
        return session

    def route(self, messages):
        for identity, *message in messages:
            if identity in self.workers:
                self.inbox[identity].append(message)
            elif message[1] == b"\x03":
                self.answered.append(identity)

    def ask(self, number):
        self.route(turns.receive(self.broker, [b"c%d" % number, b"MDPC02", b"\x01", b"s", b"x"], self.now))

    def end(self, who, request):
        """End a request, unless its handler is preempted."""
        if self.rng.random() < 0.05:
            self.running[who].append(request)
        else:
            assert self.workers[who].final(request, [b"y"], self.now)

    def step(self):
        """One of the processes has a turn, in which it does a part of what it has to do."""
        self.now += self.rng.choice((1e-5, 1e-4, 1e-3, 0.05, 0.5))
        who = self.rng.choice([*self.workers, b"broker"])
        if who == b"broker":
            self.route(turns.tick(self.broker, self.now))
            return
        session = self.workers[who]
        for message in self.inbox.pop(who, ()):
            session.receive(message, self.now)
        session.tick(self.now)
        if self.rng.random() < 0.3:
            for request in self.running.pop(who, ()):
                self.end(who, request)
        for _ in range(self.rng.randrange(12)):
            request = session.begin(self.now)
            if request is not None:
                self.attempts.append(request.attempt)
                self.end(who, request)
        for message in session.take_messages():
            self.route(turns.receive(self.broker, [who, *message], self.now))


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetched_requests_are_answered_once_at_the_first_attempt(threads):
    redispatched = 0
    for seed in range(5):
        world = Preempted(seed, threads)
        for number in range(2000):
            world.ask(number)
            if number > 300:
                world.step()
        for _ in range(20_000):
            if len(world.answered) == 2000:
                break
            world.step()
        assert sorted(world.answered) == sorted(b"c%d" % number for number in range(2000))
        assert set(world.attempts) == {1}
        assert not world.broker.stats.dropped
        assert not world.broker.stats.lost
        redispatched += world.broker.stats.redispatched
    assert redispatched > 100, redispatched
