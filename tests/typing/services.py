"""Calls of services as type checkers see them; tests/workers/services/test_types.py runs the checkers on this file."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, assert_type

from zmdp import AsyncClient, AsyncTitanic, Client, Service, Services, Streaming, Titanic
from zmdp.clients import Reply, RequestError, ZmdpError

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


@services.service("fetch")
async def fetch(url: str) -> bytes:
    return url.encode()


@services.service("find")
async def find(query: str) -> AsyncIterator[Size]:
    yield Size(len(query))


@services.service("words")
def words(text: str) -> Iterator[str]:
    yield from text.split()


@services.service("now", concurrency=2)
def now() -> str:
    return ""


@services.service("double", batch=8)
def double(values: list[int]) -> list[str]:
    return [str(2 * value) for value in values]


@services.service("double.async", batch=8)
async def double_async(values: list[int]) -> list[str]:
    return [str(2 * value) for value in values]


elsewhere = Service("resize", Resize, Size)
elsewhere_streaming = Streaming("find", str, Size)


def threads(client: Client) -> None:
    assert_type(client.call(resize, Resize("a", 1), timeout=2), Size)
    assert_type(client.call(elsewhere, Resize("a", 1)), Size)
    assert_type(client.call(fetch, "x"), bytes)
    assert_type(client.call(now), str)
    assert_type(client.call(double, 3), str)
    assert_type(client.call(double_async, 3), str)
    assert_type(client.call("resize", 1), Any)
    assert_type(client.call("resize", 1, returns=Size), Size)
    assert_type(client.stream(find, "x"), Generator[Size, None, None])
    assert_type(client.stream(elsewhere_streaming, "x"), Generator[Size, None, None])
    assert_type(client.stream(words, "x"), Generator[str, None, None])
    assert_type(client.stream("words", b"x"), Generator[Reply, None, None])
    assert_type(client.submit(resize, Resize("a", 1)), Future[Size])
    assert_type(client.submit("resize", b"x"), Future[Reply])
    assert_type(client.map(resize, [Resize("a", 1)]), Generator[Size | ZmdpError, None, None])
    assert_type(client.map("resize", [b"x"]), Generator[Reply | RequestError, None, None])
    assert_type(resize(Resize("a", 1)), Size)
    with services.test_client() as inside:
        assert_type(inside.call(resize, Resize("a", 1)), Size)
        assert_type(inside.stream(find, "x"), Iterator[Size])


async def loop(client: AsyncClient) -> None:
    assert_type(await client.call(resize, Resize("a", 1), timeout=2), Size)
    assert_type(await client.call(now), str)
    assert_type(await client.call("resize", 1, returns=Size), Size)
    assert_type(client.stream(find, "x"), AsyncGenerator[Size, None])
    assert_type(client.map(resize, [Resize("a", 1)]), AsyncGenerator[Size | ZmdpError, None])
    assert_type(await fetch("x"), bytes)


def titanic(titanic: Titanic) -> None:
    assert_type(titanic.submit(resize, Resize("a", 1), priority=5).result(), Size)
    assert_type(titanic.submit(now).result(1), str)
    assert_type(titanic.submit(find, "x").partials(), Generator[Size, None, None])
    assert_type(titanic.submit("resize", b"x").result(), Reply)
    assert_type(titanic.submit("resize", 1, codec="json").result(), Any)
    assert_type(titanic.ticket("uuid", codec="json").result(), Any)
    assert_type(titanic.ticket("uuid", resize).result(), Size)
    assert_type(titanic.ticket("uuid").result(), Reply)


async def titanic_async(titanic: AsyncTitanic) -> None:
    assert_type(await (await titanic.submit(resize, Resize("a", 1))).result(), Size)
    assert_type((await titanic.submit(find, "x")).partials(), AsyncGenerator[Size, None])
    assert_type(await titanic.ticket("uuid", resize).result(), Size)


def mistakes(client: Client) -> None:
    client.call(resize, "wrong")  # an error
    client.call(find, "x")  # an error
    client.call(now, 1)  # an error
    client.call(resize)  # an error
    client.stream(resize, Resize("a", 1))  # an error
    client.submit(resize, 5)  # an error
    resize("wrong")  # an error
