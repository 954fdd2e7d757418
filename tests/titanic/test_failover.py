"""Titanic, its callers and its workers with two brokers, of which one is killed, or each is drained in turn."""

from contextlib import ExitStack

import pytest
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint
from support.processes import broker as broker_process
from support.titanics import BEATS, LIMITS, serving

from zmdp.clients import Client
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.workers import Worker

KILLABLE = ("--heartbeat", str(BEATS["heartbeat"]), "--liveness", str(BEATS["liveness"]))


@pytest.fixture
def brokers():
    """Two endpoints without brokers."""
    return [free_endpoint(), free_endpoint()]


def test_titanic_survives_the_loss_of_its_first_broker_and_its_return(brokers, tmp_path):
    first, second = brokers
    with ExitStack() as stack:
        restarted = stack.enter_context(ExitStack())
        process, _ = stack.enter_context(broker_process(*KILLABLE, bind=first))
        stack.enter_context(running_broker(second, limits=LIMITS))
        stack.enter_context(serving(brokers, str(tmp_path / "titanic.db")))
        for order in (brokers, brokers[::-1]):  # the brokers are not linked: each has a worker in the long run
            stack.enter_context(Worker("echo", lambda request: request, broker=order, **BEATS))
        titanic = Titanic(stack.enter_context(Client(brokers, timeout=TIMEOUT_SECONDS, **BEATS)))
        before = [titanic.submit("echo", b"%d" % number) for number in range(20)]
        process.kill()
        during = [titanic.submit("echo", b"%d" % number) for number in range(20, 40)]
        assert titanic.client.endpoint == second
        numbers = [ticket.result(timeout=TIMEOUT_SECONDS) for ticket in before + during]
        assert numbers == [[b"%d" % number] for number in range(40)]
        restarted.enter_context(broker_process(*KILLABLE, bind=first))
        eventually(
            lambda: titanic.submit("echo", b"x").result(timeout=TIMEOUT_SECONDS) and titanic.client.endpoint == first
        )
        assert titanic.submit("echo", b"back").result(timeout=TIMEOUT_SECONDS) == [b"back"]


def test_a_rolling_restart_of_both_brokers(brokers, tmp_path):
    with ExitStack() as stack:
        running = [stack.enter_context(ExitStack()) for _ in brokers]
        for broker, endpoint in zip(running, brokers, strict=True):
            broker.enter_context(running_broker(endpoint, limits=LIMITS, drain_timeout=600.0))
        stack.enter_context(serving(brokers, str(tmp_path / "titanic.db")))
        for order in (brokers, brokers[::-1]):  # the brokers are not linked: each has a worker in the long run
            stack.enter_context(Worker("echo", lambda request: request, broker=order, **BEATS))
        titanic = Titanic(stack.enter_context(Client(brokers, timeout=TIMEOUT_SECONDS, **BEATS)))
        tickets = []
        for at in (0, 1, 0, 1):
            tickets += [titanic.submit("echo", b"%d" % number) for number in range(10)]
            running[at].close()
            tickets += [titanic.submit("echo", b"%d" % number) for number in range(10)]
            running[at].enter_context(running_broker(brokers[at], limits=LIMITS, drain_timeout=600.0))
        assert [ticket.result(timeout=TIMEOUT_SECONDS) for ticket in tickets] == [[b"%d" % n] for n in range(10)] * 8
