"""Each request runs in a context of its own, whatever kind of worker handles it."""

import asyncio
import decimal
from contextvars import ContextVar, copy_context

import pytest
from support.processes import TIMEOUT_SECONDS, free_endpoint

from zmdp.clients import AsyncClient, Client
from zmdp.interop.freelance.client import AsyncFreelanceClient, FreelanceClient
from zmdp.interop.freelance.worker import AsyncFreelanceWorker, FreelanceWorker
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, Worker
from zmdp.workers.handling import RequestContexts

USER = ContextVar("user", default=b"nobody")


def become(request):
    before = USER.get()
    USER.set(request[0])
    return before


def stay(request):
    """Yield the user that each step of a generator sees."""
    before = USER.get()
    USER.set(request[0])
    yield before
    yield USER.get()
    return USER.get()


@pytest.fixture
def endpoint():
    with running_broker() as server:
        yield server.endpoints[0]


@pytest.mark.parametrize("protocol", ["X1", "0.2", "0.1"])
def test_what_a_request_sets_is_gone_with_it(endpoint, protocol):
    worker = Worker("whoami", become, broker=endpoint, protocol=protocol)
    with worker, Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert [client.request("whoami", b"alice") for _ in range(3)] == [[b"nobody"]] * 3


def test_the_steps_of_a_generator_share_the_context_of_their_request(endpoint):
    with Worker("whoami", stay, broker=endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        for user in (b"alice", b"bob"):
            assert list(client.stream("whoami", user)) == [[b"nobody"], [user], [user]]


def test_what_a_request_of_a_freelance_server_sets_is_gone_with_it():
    endpoint = free_endpoint()
    with FreelanceWorker(endpoint, become), FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert [client.request(b"alice") for _ in range(3)] == [[b"nobody"]] * 3


def test_what_a_request_of_an_asyncio_freelance_server_sets_is_gone_with_it():
    async def scenario():
        decimal.getcontext()  # the program uses it: a context that each request would otherwise change
        async with AsyncFreelanceWorker(free_endpoint(), reply) as worker:
            async with AsyncFreelanceClient(worker.endpoint, timeout=TIMEOUT_SECONDS) as client:
                return [await client.request(b"alice") for _ in range(3)]

    async def reply(request):
        precision = decimal.getcontext().prec
        decimal.getcontext().prec = 3
        return [become(request), b"%d" % precision]

    precision = b"%d" % decimal.getcontext().prec
    assert asyncio.run(scenario()) == [[b"nobody", precision]] * 3


def test_a_worker_is_started_in_the_context_of_a_program_that_uses_decimal():
    context = copy_context()
    context.run(decimal.getcontext)
    contexts = RequestContexts(context)
    first, second = contexts.new(), contexts.new()
    first.run(setattr, first.run(decimal.getcontext), "prec", 3)
    assert second.run(decimal.getcontext).prec == context.run(decimal.getcontext).prec != 3


def test_requests_that_share_a_task_share_no_precision(endpoint):
    precisions = []

    async def work(request):
        precisions.append(decimal.getcontext().prec)
        decimal.getcontext().prec = 3
        return request

    async def scenario():
        decimal.getcontext()
        async with AsyncWorker("work", work, broker=endpoint):
            async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
                await asyncio.gather(*(client.request("work", b"") for _ in range(20)))

    asyncio.run(scenario())
    assert precisions == [decimal.getcontext().prec] * 20
