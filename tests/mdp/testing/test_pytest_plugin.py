"""The fixtures that zmdp brings to its users' tests."""

import pytest

from zmdp.clients import ServiceNotFound
from zmdp.mdp.limits import Limits
from zmdp.workers import AsyncWorker, Final, Worker


@pytest.fixture
def mdp_limits():
    return Limits(heartbeat=0.1, liveness=20)


def test_a_broker_a_client_and_workers(worker, mdp_client, mdp_broker):
    made = worker("double", lambda number: 2 * number, codec="json", concurrency=2)
    assert isinstance(made, Worker)
    assert mdp_client.call("double", 21) == 42
    assert mdp_broker.broker.limits.heartbeat == 0.1


def test_asyncio_handlers(worker, mdp_client):
    async def shout(request):
        return request[0].upper()

    async def count(request):
        for number in range(int(request[0])):
            yield b"%d" % number
        yield Final(b"end")

    assert isinstance(worker("shout", shout), AsyncWorker)
    worker("count", count)
    assert mdp_client.request("shout", b"x", wait=False) == [b"X"]
    assert list(mdp_client.stream("count", b"2")) == [[b"0"], [b"1"], [b"end"]]


def test_each_test_has_a_broker_of_its_own(mdp_client):
    with pytest.raises(ServiceNotFound):
        mdp_client.request("double", wait=False)
