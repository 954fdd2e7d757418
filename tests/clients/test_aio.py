"""The asyncio client, against a real broker and real workers in this process."""

import asyncio
import gc
import logging
import time
from contextlib import aclosing, suppress

import pytest
from support.garbage import no_collector
from support.processes import TIMEOUT_SECONDS
from support.router import Router

from zmdp.clients import (
    AsyncClient,
    ClosedError,
    CodecError,
    RequestError,
    RequestRejected,
    RequestTimeout,
    ServiceNotFound,
    SettingError,
)
from zmdp.clients.x1.broker_connection import Call
from zmdp.mdp.transport.multipart import receive
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker

ALL = ["X1", "0.2", "0.1"]


@pytest.fixture(params=ALL)
def protocol(request):
    return request.param


def with_client(endpoint, scenario, **settings):
    """Run `scenario(client)`, and check that the event loop reports no error."""
    complaints = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with AsyncClient(endpoint, **{"timeout": TIMEOUT_SECONDS, **settings}) as client:
            return await scenario(client)

    result = asyncio.run(run())
    assert complaints == []
    return result


async def collect(parts):
    return [part async for part in parts]


# ── whatever the protocol ────────────────────────────────────────────────────────────────────────────────────────────


def test_cancelled_at_any_moment(endpoint, protocol):
    async def scenario(client):
        for turns in range(40):
            task = asyncio.create_task(client.request("echo", b"%d" % turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            other = await client.request("echo", b"other")
            assert other == [b"other"]
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(result, asyncio.CancelledError) or result == [b"%d" % turns]

    with_client(endpoint, scenario, protocol=protocol)


def test_invalid_arguments(endpoint, protocol):
    async def scenario(client):
        for ask, message in (
            (lambda: client.request("echo", "text"), "frame 0 is of type str"),
            (lambda: client.request("echo", timeout=0), "timeout is 0"),
            (lambda: collect(client.stream("echo", timeout=0)), "timeout is 0"),
            (lambda: collect(client.stream("echo", deadline=-1)), "deadline is -1"),
            (lambda: client.call("echo", codec="pickle"), "codec is 'pickle'"),
        ):
            with pytest.raises(SettingError, match=message):
                await ask()
        with pytest.raises(CodecError, match="cannot be read as msgpack"):
            await client.call("count", codec="msgpack")

    with_client(endpoint, scenario, protocol=protocol)


@pytest.mark.parametrize("settings", [{"timeout": 0}, {"codec": None}, {"protocol": "3"}, {"heartbeat": 0.001}])
def test_invalid_settings(settings):
    with pytest.raises(SettingError, match=f"{next(iter(settings))} is "):
        AsyncClient("tcp://127.0.0.1:1", **settings)


def test_a_closed_client_says_so(endpoint, protocol):
    async def scenario():
        client = AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, protocol=protocol)
        await client.close()
        await client.close()
        for ask in (
            client.request("echo"),
            client.available("echo"),
            client.call("sum"),
            collect(client.stream("echo")),
        ):
            with pytest.raises(ClosedError, match="was closed"):
                await ask

    asyncio.run(scenario())


def test_several_requests_that_nobody_answers_learn_why():
    async def scenario(client):
        asking = [asyncio.create_task(client.request("echo", timeout=0.1)) for _ in range(3)]
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(outcome, RequestTimeout)

    with_client("tcp://127.0.0.1:1", scenario, protocol="0.2")


def test_a_client_belongs_to_one_event_loop(endpoint, protocol):
    client = AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, protocol=protocol)

    async def ask():
        return await client.request("echo", b"x")

    async def stream():
        return await collect(client.stream("echo", b"x"))

    assert asyncio.run(ask()) == [b"x"]
    for use in (ask, stream):
        with pytest.raises(SettingError, match="belongs to another event loop"):
            asyncio.run(use())
    asyncio.run(client.close())


# ── 0.2 and 0.1: each request has a connection of its own ────────────────────────────────────────────────────────────


def test_connections_are_reused_unless_a_late_reply_may_arrive():
    async def scenario(client):
        async def ask(body):
            return await client.request("echo", body)

        async def taken():
            return await asyncio.to_thread(router.recv)

        first, second = asyncio.create_task(ask(b"1")), asyncio.create_task(ask(b"2"))
        one, two = await taken(), await taken()
        assert one[0] != two[0]
        for message in (two, one):
            router.send(message[0], b"MDPC02", b"\x03", b"echo", message[-1])
        assert await asyncio.gather(first, second) == [[b"1"], [b"2"]]

        third = asyncio.create_task(ask(b"3"))
        three = await taken()
        assert three[0] in {one[0], two[0]}
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        router.send(three[0], b"MDPC02", b"\x03", b"echo", b"too late")

        fourth, fifth = asyncio.create_task(ask(b"4")), asyncio.create_task(ask(b"5"))
        four, five = await taken(), await taken()
        assert three[0] not in {four[0], five[0]}
        for message in (four, five):
            router.send(message[0], b"MDPC02", b"\x03", b"other", b"of a service that was not asked")
            router.send(message[0], b"nonsense")
            router.send(message[0], b"MDPC02", b"\x03", b"echo", message[-1])
        assert await asyncio.gather(fourth, fifth) == [[b"4"], [b"5"]]

    with Router() as router:
        with_client(router.endpoint, scenario, protocol="0.2")


def test_connections_to_a_dead_broker_are_not_reused_after_failover(endpoint):
    async def scenario(client):
        tasks = [asyncio.create_task(client.request("echo", b"%d" % number)) for number in range(3)]
        for _ in tasks:
            message = await asyncio.to_thread(router.recv)
            router.send(message[0], b"MDPC02", b"\x03", b"echo", message[-1])
        assert await asyncio.gather(*tasks) == [[b"0"], [b"1"], [b"2"]]
        with pytest.raises(RequestTimeout, match=f"through {router.endpoint} within"):
            await client.request("echo", b"x", timeout=0.1)
        for _ in range(3):
            assert await client.request("echo", b"x") == [b"x"]

    with Router() as router:
        with_client([router.endpoint, endpoint], scenario, protocol="0.2")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_that_arrived_while_the_event_loop_was_blocked_is_in_time(streamed):
    timeout = 0.1

    async def ask(client):
        if not streamed:
            return await client.request("echo", b"x", timeout=timeout)
        return [frame for part in await collect(client.stream("echo", b"x", timeout=timeout)) for frame in part]

    async def scenario(client):
        asked = asyncio.create_task(ask(client))
        while not client._dialog._busy:
            await asyncio.sleep(0)  # until it waits for its reply
        router.send(router.recv()[0], b"MDPC02", b"\x03", b"echo", b"in time")
        (socket,) = client._dialog._busy
        assert socket.poll(1000 * TIMEOUT_SECONDS)
        time.sleep(2 * timeout)  # blocks the event loop beyond the timeout
        assert await asked == [b"in time"]

    with Router() as router:
        with_client(router.endpoint, scenario, protocol="0.2")


def test_a_client_is_closed_after_its_event_loop(endpoint, protocol):
    async def begin():
        client = AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, protocol=protocol)
        task = asyncio.create_task(client.request("nobody"))
        await asyncio.sleep(0)
        return client, task

    loop = asyncio.new_event_loop()
    client, task = loop.run_until_complete(begin())
    loop.close()
    asyncio.run(client.close())
    assert client._settings.context.closed
    with suppress(RuntimeError):  # it can never finish
        task.get_coro().close()
    del task
    gc.collect()


def test_requests_beyond_max_outstanding_wait_for_a_connection(endpoint):
    async def scenario(client):
        asked = [b"%d" % number for number in range(100)]
        tasks = [asyncio.create_task(client.request("echo", body)) for body in asked]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for n, r in enumerate(results) if n % 3] == [[b] for n, b in enumerate(asked) if n % 3]
        assert len(client._dialog._idle) <= 3

    with_client(endpoint, scenario, protocol="0.2", max_outstanding=3)


def test_a_stream_waits_for_a_connection_no_longer_than_its_timeout(endpoint, begun):
    async def scenario(client):
        async with aclosing(client.stream(begun)) as first:
            assert await anext(first) == [b"first"]
            with pytest.raises(RequestTimeout, match="'echo' was not sent"):
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await collect(client.stream("echo", timeout=0.05))
        assert await collect(client.stream("echo", b"x")) == [[b"x"]]

    with_client(endpoint, scenario, protocol="0.2", max_outstanding=1)


# ── X1 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_values_in_a_stream(endpoint):
    async def scenario(client):
        assert await collect(client.call_stream("numbers", 3)) == [0, 1, 2]
        values = client.call_stream("numbers", 1000)
        assert await anext(values) == 0
        await values.aclose()
        with pytest.raises(RequestRejected, match="cannot be read as json"):
            await client.request("sum", b"{")

    with_client(endpoint, scenario)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, body: client.request("fail", body),
        lambda client, body: collect(client.stream("fail.late", body)),
    ],
    ids=["request", "stream"],
)
def test_nothing_is_left_of_a_request_that_fails(endpoint, ask):
    """Its body may be large: it is freed with the last reference, without the garbage collector."""
    body = b"nothing is left of this"

    async def scenario(client):
        with suppress(RequestError):
            await ask(client, body)
        await asyncio.sleep(0)  # the event loop itself refers to what it does in this turn
        assert not any(type(each) is Call and body in each.body for each in gc.get_objects())

    with no_collector():
        with_client(endpoint, scenario)


def test_asyncio_logs_no_errors(endpoint, holding, caplog):
    """In debug mode, with a client that was never closed and tasks that were never awaited."""

    async def scenario():
        client = AsyncClient(endpoint, timeout=TIMEOUT_SECONDS)
        tasks = [asyncio.create_task(client.request("hold")) for _ in range(3)]
        await asyncio.to_thread(holding.wait_taken, 3)
        await client.request("echo")
        del tasks
        return client

    with caplog.at_level(logging.ERROR, "asyncio"):
        client = asyncio.run(scenario(), debug=True)
        asyncio.run(client.close())
    assert caplog.text == ""
    holding.let_go()


# ── the event loop ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_immediate_replies_do_not_starve_other_tasks(endpoint, monkeypatch):
    def wait_and_receive(socket):
        """Receive the reply, which is there by then; or nothing, after the last."""
        socket.poll(100)
        return receive(socket)

    async def scenario(client):
        turns = 0

        async def turn():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        assert await client.request("echo", b"first") == [b"first"]
        monkeypatch.setattr("zmdp.clients.x1.client_connection.receive", wait_and_receive)
        before = turns
        for _ in range(20):
            assert await client.request("echo", b"x") == [b"x"]
        assert turns - before >= 20
        turning.cancel()

    with_client(endpoint, scenario)


# ── without a task ───────────────────────────────────────────────────────────────────────────────────────────────────


class Outcomes:
    """A receiver."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def put(self, outcome):
        self.queue.put_nowait(outcome)


def test_nothing_is_left_of_a_request_whose_receiver_knows_it(endpoint):
    """As in the gateways, which cancel it if their own client has left."""
    body = b"nothing is left of this either"

    async def scenario(client):
        for service in ("echo", "fail", "nobody"):
            outcomes = Outcomes()
            outcomes.call = client.begin(outcomes, service, body, wait=service != "nobody")
            await outcomes.queue.get()
            del outcomes
            await asyncio.sleep(0)
            assert not any(type(each) is Call and body in each.body for each in gc.get_objects())

    with no_collector():
        with_client(endpoint, scenario)


def test_a_request_is_begun_without_a_task():
    async def story(endpoint):
        async with (
            AsyncWorker("echo", streaming, broker=endpoint),
            AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client,
        ):
            outcomes = Outcomes()
            client.begin(outcomes, "echo", b"a", b"b")
            replies = [await outcomes.queue.get() for _ in range(3)]
            assert [(list(reply), reply.final) for reply in replies] == [
                ([b"a"], False),
                ([b"b"], False),
                ([b""], True),
            ]
            client.begin(outcomes, "nobody", wait=False)
            assert isinstance(await outcomes.queue.get(), ServiceNotFound)

    async def streaming(request):
        for part in request:
            yield part

    with running_broker() as server:
        asyncio.run(story(server.endpoints[0]))


def test_a_receiver_may_cancel_others_and_may_fail():
    async def story(endpoint):
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context["exception"])))
        async with AsyncWorker("echo", echo, broker=endpoint), AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            calls, got, ended = [], [], asyncio.Event()

            class Cancels:
                def put(self, outcome):
                    got.append(self)
                    for call in calls:
                        client.cancel(call)
                    ended.set()

            class Fails:
                def put(self, outcome):
                    raise RuntimeError("a bug")

            calls += [client.begin(Cancels(), "echo") for _ in range(50)]
            await ended.wait()
            outcomes = Outcomes()
            for _ in range(10):
                client.begin(Fails(), "echo")
                client.begin(outcomes, "echo")
            for _ in range(10):
                assert await outcomes.queue.get() == [b""]
            assert len(got) == 1
            assert problems == ["a bug"] * 10

    async def echo(request):
        return list(request)

    with running_broker() as server:
        asyncio.run(story(server.endpoints[0]))


def test_only_x1_can_begin_requests():
    async def story():
        async with AsyncClient("tcp://127.0.0.1:9", protocol="0.2") as client:
            with pytest.raises(SettingError, match="needs protocol X1"):
                client.begin(Outcomes(), "echo")
        with pytest.raises(ClosedError):
            client.begin(Outcomes(), "echo")

    asyncio.run(story())
