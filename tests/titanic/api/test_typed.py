"""Services with types through Titanic: values instead of frames, also when the caller has changed meanwhile."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa
from support.processes import TIMEOUT_SECONDS
from support.titanics import row

from zmdp import AsyncClient, AsyncTitanic, Client, Service, ServiceError, Services, Titanic
from zmdp.clients import CodecError, SettingError
from zmdp.testing import running_broker, running_titanic
from zmdp.titanic import enqueue

services = Services()


@dataclass
class Resize:
    path: str
    width: int


@dataclass
class Size:
    width: int


@services.service("resize")
def resize(job: Resize) -> Size:
    return Size(job.width)


@services.service("count")
def count(n: int) -> Iterator[int]:
    yield from range(n)


@services.service("now")
def now() -> str:
    return "now"


@services.service("wrong")
def wrong(n: int) -> int:
    return "text"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return str(tmp_path_factory.mktemp("titanic") / "titanic.db")


@pytest.fixture(scope="module")
def endpoint(database):
    with running_broker() as server, running_titanic(server.endpoints[0], database):
        worker = services.worker(broker=server.endpoints[0])
        thread = threading.Thread(target=lambda: asyncio.run(worker.run()), daemon=True)
        thread.start()
        yield server.endpoints[0]
        worker.stop()
        thread.join()


def test_values_come_back_as_values(endpoint):
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        titanic = Titanic(client)
        ticket = titanic.submit(resize, Resize("a", 80), priority=5)
        assert ticket.result(TIMEOUT_SECONDS) == Size(80)
        assert titanic.ticket(ticket.uuid, resize).result(TIMEOUT_SECONDS) == Size(80)
        assert titanic.ticket(ticket.uuid).result(TIMEOUT_SECONDS) == [b'{"width":80}']
        assert titanic.submit(now).result(TIMEOUT_SECONDS) == "now"
        stream = titanic.submit(count, 3)
        assert list(stream.partials(timeout=TIMEOUT_SECONDS)) == [0, 1, 2]
        assert stream.result(TIMEOUT_SECONDS) is None


def test_a_codec_gives_values_to_a_name(endpoint):
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        titanic = Titanic(client)
        ticket = titanic.submit("resize", {"path": "a", "width": 80}, codec="json")
        assert ticket.result(TIMEOUT_SECONDS) == {"width": 80}
        assert titanic.ticket(ticket.uuid, codec="json").result(TIMEOUT_SECONDS) == {"width": 80}
        assert list(titanic.submit("count", 2, codec="json").partials(timeout=TIMEOUT_SECONDS)) == [0, 1]
        with pytest.raises(SettingError, match="codec is 'jsn'"):
            titanic.submit("resize", {}, codec="jsn")
        with pytest.raises(SettingError, match="a codec sends one value, not 2"):
            titanic.submit("resize", 1, 2, codec="json")
        with pytest.raises(SettingError, match="has a codec of its own"):
            titanic.submit(resize, Resize("a", 80), codec="json")


def test_a_service_has_defaults_for_its_submissions(endpoint, database):
    declared = Services(retries=1, backoff=0.5).service("later", retries=3, ttl=3600.0)(lambda n: n)
    url = f"sqlite:///{database}"
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        titanic = Titanic(client)
        tickets = [titanic.submit(declared, 1, delay=60), titanic.submit(declared, 1, delay=60, retries=0, ttl=None)]
    told = [row(url, ticket.uuid) for ticket in tickets]
    assert [(each["retries"], each["backoff"], each["result_ttl"]) for each in told] == [(3, 0.5, 3600), (0, 0.5, 3600)]

    async def submit():
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            return await AsyncTitanic(client).submit(Service("later", int, int, priority=7), 1, delay=60)

    assert row(url, asyncio.run(submit()).uuid)["priority"] == 7
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        uuid = enqueue(connection, declared, 1, delay=60)
    engine.dispose()
    assert row(url, uuid)["retries"] == 3


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"retries": 1.5}, "retries is 1.5: it must be a whole number"),
        ({"ttl": "1d"}, "ttl is '1d': it must be a number"),
        ({"priority": -1}, "priority is -1: it must be 0 to 9"),
    ],
)
def test_wrong_defaults_are_told_where_they_are_declared(settings, problem):
    with pytest.raises(SettingError, match=problem):
        Service("later", int, int, **settings)
    with pytest.raises(SettingError, match=problem):
        services.service("later", **settings)(lambda: 1)


def test_errors(endpoint):
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        titanic = Titanic(client)
        with pytest.raises(ServiceError, match=r"\$: expected object, got str") as caught:
            titanic.submit(resize, "wrong").result(TIMEOUT_SECONDS)
        assert caught.value.code == 422
        with pytest.raises(CodecError, match="the reply of service 'wrong' does not fit"):
            titanic.submit(wrong, 1).result(TIMEOUT_SECONDS)
        with pytest.raises(SettingError, match="takes one value, not 2"):
            titanic.submit(resize, "a", 1)
        with pytest.raises(CodecError, match="cannot be sent as json"):
            titanic.submit(resize, object())


def test_asyncio(endpoint):
    async def main():
        async with AsyncClient(endpoint) as client:
            titanic = AsyncTitanic(client)
            ticket = await titanic.submit(resize, Resize("a", 80))
            assert await ticket.result(TIMEOUT_SECONDS) == Size(80)
            assert await titanic.ticket(ticket.uuid, resize).result(TIMEOUT_SECONDS) == Size(80)
            ticket = await titanic.submit("resize", {"path": "a", "width": 7}, codec="json")
            assert await titanic.ticket(ticket.uuid, codec="json").result(TIMEOUT_SECONDS) == {"width": 7}
            stream = await titanic.submit(count, 2)
            assert [each async for each in stream.partials(timeout=TIMEOUT_SECONDS)] == [0, 1]

    asyncio.run(main())


def test_enqueue(endpoint, database):
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        uuid = enqueue(connection, resize, Resize("a", 9))
        named = enqueue(connection, "resize", {"path": "a", "width": 9}, codec="json")
    engine.dispose()
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert Titanic(client).ticket(uuid, resize).result(TIMEOUT_SECONDS) == Size(9)
        assert Titanic(client).ticket(named, resize).result(TIMEOUT_SECONDS) == Size(9)
