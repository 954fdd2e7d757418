"""`Client.map` and `AsyncClient.map`, with a real broker and workers."""

import asyncio
import threading
from contextlib import aclosing, closing
from itertools import count, islice

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS

from zmdp.clients import AsyncClient, Client, ClosedError, Reply, ServiceError, SettingError
from zmdp.clients.rows.row_calls import MIN_WINDOW
from zmdp.workers import Worker


def worker(server, handler, **given):
    return Worker("up", handler, broker=server.endpoints[0], **BEATS, **given)


def up(request):
    if request[0] == b"bad":
        raise ServiceError(422, "odd")
    return [request[0].upper(), b"!"] if request[0] == b"two" else request[0].upper()


def called(server, rows, *, protocol="X1", **given):
    with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS, protocol=protocol) as client:
        return list(client.map("up", rows, **given))


def called_async(server, rows, *, protocol="X1", **given):
    async def run():
        async with AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS, protocol=protocol) as client:
            return [outcome async for outcome in client.map("up", rows, **given)]

    return asyncio.run(run())


BOTH = pytest.mark.parametrize("call", [called, called_async])


@BOTH
def test_outcomes_come_in_the_order_of_the_rows(server, call):
    with worker(server, up, concurrency=2):
        found = call(server, (b"%d" % n for n in range(3000)))
    assert found == [[b"%d" % n] for n in range(3000)]


@BOTH
def test_a_row_that_fails_is_an_error_among_replies(server, call):
    with worker(server, up):
        first, bad, two, last = call(server, [b"a", b"bad", bytearray(b"two"), memoryview(b"c")])
    assert (first, two, last) == ([b"A"], [b"TWO", b"!"], [b"C"])
    assert type(first) is type(two) is Reply
    assert (first.service, first.final) == ("up", True)
    assert type(bad) is ServiceError
    assert (bad.code, bad.text) == (422, "odd")


@BOTH
@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_older_protocols_send_one_row_per_request(server, call, protocol):
    with worker(server, up):
        assert call(server, [b"a", b"two", b"c"], protocol=protocol) == [[b"A"], [b"TWO", b"!"], [b"C"]]
    assert server.broker.stats.requests == 3


@BOTH
def test_no_rows(server, call):
    assert call(server, []) == []


@BOTH
@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        (["x"], {}, "a row is of type str"),
        ([b"x"], {"window": 0}, "window is 0"),
        (5, {}, "rows is 5: it must be a list or another iterable of bytes"),
        ([b"x"], {"timeout": 0}, "timeout is 0"),
        ([b"x"], {"headers": {"a": "b"}, "protocol": "0.2"}, "require protocol X1"),
    ],
)
def test_invalid_arguments(server, call, rows, given, message):
    with pytest.raises(SettingError, match=message):
        call(server, rows, **given)


@BOTH
def test_headers_reach_the_handler(server, call):
    with worker(server, lambda request: request.headers["who"].encode()):
        assert call(server, [b"x"] * 3, headers={"who": "ann"}) == [[b"ann"]] * 3


def test_rows_are_read_as_outcomes_are_taken(server):
    taken = count()
    with worker(server, up), Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        with closing(client.map("up", (b"%d" % n for n in taken))) as found:
            assert [outcome[0] for outcome in islice(found, 10)] == [b"%d" % n for n in range(10)]
            assert next(taken) < 4 * MIN_WINDOW


def test_closing_early_cancels_what_is_outstanding(server):
    begun = threading.Event()

    def handler(request):
        if request[0] == b"first":
            return request
        begun.set()
        eventually(lambda: request.cancelled)
        return request

    rows = [b"first"] + [b"x"] * 10
    with worker(server, handler, concurrency=2), Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        with closing(client.map("up", rows, window=2)) as found:
            assert next(found) == [b"first"]
            assert begun.wait(TIMEOUT_SECONDS)
        eventually(lambda: not server.broker.registry.numbered)


def test_rows_from_an_asynchronous_source(server):
    async def rows():
        for n in range(600):
            yield b"%d" % n

    async def run():
        async with AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            async with aclosing(client.map("up", rows())) as found:
                return [outcome[0] async for outcome in found]

    with worker(server, up):
        assert asyncio.run(run()) == [b"%d" % n for n in range(600)]


def test_an_outcome_does_not_wait_for_the_next_row(server):
    async def run():
        answered = asyncio.Event()

        async def rows():
            yield b"a"
            await asyncio.wait_for(answered.wait(), TIMEOUT_SECONDS)
            yield b"b"

        async with AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            async with aclosing(client.map("up", rows())) as found:
                first = await anext(found)
                answered.set()
                return [first, *[each async for each in found]]

    with worker(server, up):
        assert asyncio.run(run()) == [[b"A"], [b"B"]]


def test_a_source_that_fails_and_one_that_is_left(server):
    async def run():
        left = asyncio.Event()

        async def rows(error=None):
            try:
                yield b"a"
                if error is not None:
                    raise error
                await asyncio.Event().wait()
            finally:
                left.set()

        async with AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            with pytest.raises(LookupError, match="no more"):
                [each async for each in client.map("up", rows(LookupError("no more")))]
            left.clear()
            async with aclosing(client.map("up", rows())) as found:
                assert await anext(found) == [b"A"]
            assert left.is_set()

    with worker(server, up):
        asyncio.run(run())


def test_within_an_event_loop(server):
    async def run():
        with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            client.map("up", [b"x"])

    with pytest.raises(SettingError, match=r"use AsyncClient\.map"):
        asyncio.run(run())


def test_a_closed_client(server):
    client = Client(server.endpoints[0], timeout=TIMEOUT_SECONDS)
    client.close()
    with pytest.raises(ClosedError):
        client.map("up", [b"x"])

    async def run():
        client = AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS)
        await client.close()
        return [outcome async for outcome in client.map("up", [b"x"])]

    with pytest.raises(ClosedError):
        asyncio.run(run())
