"""The pytest fixtures that zmdp provides for its users' tests."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import ServiceNotFound
from zmdp.mdp.errors import SettingError
from zmdp.mdp.limits import Limits
from zmdp.testing import handling, request, running_titanic
from zmdp.workers import AsyncWorker, Last, Request, Worker, current_request
from zmdp.workers.examples import echo
from zmdp.workers.services import Services


@pytest.fixture
def mdp_limits():
    return Limits(heartbeat=0.1, liveness=200)


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
        yield Last(b"end")

    assert isinstance(worker("shout", shout), AsyncWorker)
    worker("count", count)
    assert mdp_client.request("shout", b"x", wait=False) == [b"X"]
    assert list(mdp_client.stream("count", b"2")) == [[b"0"], [b"1"], [b"end"]]


def test_services(worker, mdp_client):
    services = Services(prefix="numbers.")

    @services.service("half")
    def half(number: int) -> float:
        return number / 2

    @services.service("count")
    async def count(number: int) -> AsyncIterator[int]:
        for each in range(number):
            yield each

    worker(services)
    assert mdp_client.call(half, 3, wait=False) == 1.5
    assert list(mdp_client.stream(count, 3, wait=False)) == [0, 1, 2]
    with pytest.raises(TypeError, match="takes no handler and no settings"):
        worker(services, concurrency=2)


triple = Worker("triple", lambda number: 3 * number, broker="tcp://127.0.0.1:1", codec="json", concurrency=3)
later = AsyncWorker("later", broker="tcp://127.0.0.1:1", concurrency=5)


@later
async def reply_later(request):
    await asyncio.sleep(0)
    return request


@pytest.mark.parametrize("_", ["once", "again"])
def test_existing_workers_serve_in_any_number_of_tests(worker, mdp_client, mdp_broker, _):
    for mine, credit in ((triple, 3), (later, 5), (echo, 1)):
        made = worker(mine)
        assert type(made) is type(mine)
        assert (made.settings.endpoints, made.settings.concurrency) == (mdp_broker.endpoints[:1], credit)
        assert not mine.started
    assert triple.settings.endpoints == ["tcp://127.0.0.1:1"]
    assert mdp_client.call("triple", 7) == 21
    assert mdp_client.request("later", b"a", b"b") == [b"a", b"b"]
    assert mdp_client.request("echo", b"x") == [b"x"]


def test_how_worker_is_called(worker):
    with pytest.raises(TypeError, match=r"worker\('alone'\) needs a handler"):
        worker("alone")
    with pytest.raises(TypeError, match="takes no handler and no settings"):
        worker(triple, codec="json")


def test_each_test_has_a_broker_of_its_own(mdp_client):
    with pytest.raises(ServiceNotFound):
        mdp_client.request("double", wait=False)


def test_asyncio_clients(worker, mdp_async_client):
    worker(triple)

    async def scenario():
        async with mdp_async_client() as one, mdp_async_client(timeout=TIMEOUT_SECONDS, codec="msgpack") as other:
            assert await one.call("triple", 2) == 6
            assert await other.request("triple", b"5") == [b"15"]

    asyncio.run(scenario())


@pytest.mark.parametrize("_", ["once", "again"])
def test_a_titanic_of_its_own(worker, mdp_titanic, tmp_path, _):
    worker(triple)
    ticket = mdp_titanic.submit("triple", b"4", key="only once")
    assert ticket.result(TIMEOUT_SECONDS) == [b"12"]
    assert mdp_titanic.submit("triple", b"4", key="only once").uuid == ticket.uuid
    assert (tmp_path / "titanic.db").stat().st_size


def test_a_titanic_that_cannot_be_started_says_why():
    with pytest.raises(SettingError, match="oracle"), running_titanic("tcp://127.0.0.1:1", "oracle://x"):
        pass


# ── requests for handlers ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_for_a_handler():
    made = request(b"a", b"b", service="s", headers={"user": "ann"}, options={"size": 3}, deadline=5.0, attempt=2)
    assert isinstance(made, Request)
    assert (made, made.service, made.headers, made.deadline) == ([b"a", b"b"], "s", {"user": "ann"}, 5.0)
    assert made.options == {"size": 3, "headers": {"user": "ann"}}
    assert (made.attempt, made.cancelled) == (2, False)
    assert request(cancelled=True).cancelled


def test_a_request_without_anything_is_what_a_client_sends(worker, mdp_client):
    seen = []
    worker("look", seen.append)
    mdp_client.request("look")
    (real,) = seen
    made = request(service="look")
    assert (made, made.headers, made.attempt, made.cancelled) == (real, real.headers, real.attempt, real.cancelled)


def test_what_no_client_can_send():
    with pytest.raises(SettingError, match="headers must map strings to strings"):
        request(headers={"user": 1})


def test_the_current_request_of_a_handler_that_gets_a_value():
    def greet(word):
        return f"{word}, {current_request().headers['user']}"

    with handling(request(headers={"user": "ann"})):
        assert greet("hello") == "hello, ann"
    with pytest.raises(LookupError):
        greet("hello")
