"""The asyncio client, against a real broker and real workers in this process."""

import asyncio
import gc
import logging
import sys
import threading
import time
from contextlib import ExitStack, aclosing, suppress

import pytest
from support.garbage import no_collector
from support.processes import SHORT_TIMEOUTS, TIMEOUT_SECONDS
from support.router import Router

from zmdp.clients import (
    AsyncClient,
    BrokerUnreachable,
    ClosedError,
    CodecError,
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    legacy_session,
)
from zmdp.clients.call import Call
from zmdp.mdp.transport.multipart import receive
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, Worker

ALL = ["X1", "0.2", "0.1"]
NOBODY = "tcp://127.0.0.1:1"


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


async def unreachable(text, ask):
    """Return the error of `ask(timeout)`, with the first timeout after which the client knows what `text` says."""
    for timeout in SHORT_TIMEOUTS:
        with pytest.raises(RequestTimeout) as caught:  # BrokerUnreachable, once it is known
            await ask(timeout)
        if text.format(f"{timeout:g} s") in str(caught.value):
            return caught.value
    raise AssertionError(str(caught.value))


# ── whatever the protocol ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reply_is_a_list_of_frames(endpoint, protocol):
    async def scenario(client):
        reply = await client.request("echo", b"a", bytearray(b"b"), memoryview(b"c"))
        assert (reply, reply.service, reply.final) == ([b"a", b"b", b"c"], "echo", True)
        assert await client.request("echo") == [b""]
        frames = [b"", bytes(range(256)), b"x" * 5_000_000]
        assert await client.request("echo", *frames) == frames

    with_client(endpoint, scenario, protocol=protocol)


def test_streams(endpoint, protocol):
    async def scenario(client):
        parts = await collect(client.stream("count"))
        assert [frame for part in parts for frame in part] == [b"0", b"1", b"2", b"end"]
        assert [part.final for part in parts] in ([False, False, False, True], [True])  # 0.1 has no parts
        assert await client.request("count") == [b"0", b"1", b"2", b"end"]

    with_client(endpoint, scenario, protocol=protocol)


def test_values(endpoint, protocol):
    async def scenario(client):
        assert await client.call("sum", [1, 2, 3]) == 6
        with pytest.raises(CodecError, match="cannot be sent as json"):
            await client.call("sum", object())
        with pytest.raises(CodecError, match="cannot be read as msgpack"):
            await client.call("echo", codec="json") or await client.call("count", codec="msgpack")

    with_client(endpoint, scenario, protocol=protocol)


def test_many_at_once_do_not_get_each_others_replies(endpoint, protocol):
    async def scenario(client):
        asked = [b"%d" % number for number in range(500)]
        for _ in range(2):
            replies = await asyncio.gather(*(client.request("echo", body) for body in asked))
            assert replies == [[body] for body in asked]

    with_client(endpoint, scenario, protocol=protocol, timeout=TIMEOUT_SECONDS)


def test_a_handler_that_raises(endpoint, protocol):
    async def scenario(client):
        for service in ("fail.0.2", "fail.0.1"):
            with pytest.raises(ServiceError) as caught:
                await client.request(service, b"x")
            assert (caught.value.code, caught.value.text) == (500, "ValueError: no good")
            with pytest.raises(ServiceError, match="no good"):
                await collect(client.stream(service))
        assert await client.request("echo", b"x") == [b"x"]

    with_client(endpoint, scenario, protocol=protocol)


def test_whether_a_service_is_available(endpoint, protocol):
    async def scenario(client):
        assert await client.available("echo")
        assert not await client.available("nobody", timeout=TIMEOUT_SECONDS)

    with_client(endpoint, scenario, protocol=protocol)


def test_after_a_timeout_the_client_can_be_used(endpoint, protocol):
    async def scenario(client):
        with pytest.raises(RequestTimeout, match="nobody"):
            await client.request("nobody", timeout=0.05)
        with pytest.raises(RequestTimeout, match="nobody"):
            await collect(client.stream("nobody", timeout=0.05))
        assert await client.request("echo", b"x", timeout=None) == [b"x"]

    with_client(endpoint, scenario, protocol=protocol)


def test_a_task_that_is_cancelled(endpoint, holding, protocol):
    """Replies that arrive later are not mistaken for those to other requests."""

    async def scenario(client):
        tasks = [asyncio.create_task(client.request("hold", b"%d" % number)) for number in range(4)]
        streams = [asyncio.create_task(collect(client.stream("hold", b"%d" % number))) for number in range(4)]
        await asyncio.to_thread(holding.wait_taken, 8)
        for task in tasks + streams:
            task.cancel()
        results = await asyncio.gather(*tasks, *streams, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 8
        if protocol == "X1":
            await asyncio.to_thread(holding.wait_cancelled, 8)
        holding.let_go()
        asked = [b"%d" % number for number in range(100, 150)]
        assert await asyncio.gather(*(client.request("hold", body) for body in asked)) == [[body] for body in asked]

    with_client(endpoint, scenario, protocol=protocol)


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


def test_a_stream_that_is_left_early(endpoint, protocol):
    async def scenario(client):
        async with aclosing(client.stream("count")) as parts:
            async for part in parts:
                assert part[0] == b"0"
                break
        async for _ in client.stream("count"):
            break  # closed by whoever collects it
        values = client.call_stream("count", codec=Raw())
        assert await anext(values) is not None
        await values.aclose()
        asked = [b"%d" % number for number in range(20)]
        assert await asyncio.gather(*(client.request("echo", body) for body in asked)) == [[body] for body in asked]

    with_client(endpoint, scenario, protocol=protocol)


class Raw:
    """A codec for any frames."""

    def encode(self, value):
        return [b""]

    def decode(self, frames):
        return list(frames)


def test_close_while_requests_are_outstanding(endpoint, begun, holding, protocol):
    async def scenario():
        client = AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, protocol=protocol)
        tasks = [asyncio.create_task(client.request("hold")) for _ in range(3)]
        tasks += [asyncio.create_task(collect(client.stream("hold")))]
        parts = client.stream(begun)
        if protocol != "0.1":
            await anext(parts)
        await asyncio.to_thread(holding.wait_taken, 4)
        await client.close()
        await client.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ClosedError] * 4
        with pytest.raises(ClosedError):
            await collect(parts)
        for use in (
            lambda: client.request("echo"),
            lambda: client.available("echo"),
            lambda: client.call("echo"),
            lambda: anext(client.stream("echo")),
        ):
            with pytest.raises(ClosedError, match="was closed"):
                await use()
        if protocol == "X1":
            await asyncio.to_thread(holding.wait_cancelled, 4)

    asyncio.run(scenario())


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


def test_broker_unreachable_says_that_nobody_listens(protocol):
    async def scenario(client):
        for ask in (
            lambda timeout: client.request("echo", timeout=timeout),
            lambda timeout: collect(client.stream("echo", timeout=timeout)),
        ):
            raised = await unreachable("within {}: nothing is listening there", ask)
            assert isinstance(raised, TimeoutError)

    with_client(NOBODY, scenario, protocol=protocol)


def test_the_first_of_two_brokers_is_dead(endpoint, protocol):
    async def scenario(client):
        if protocol != "X1":  # where nothing is sent again, those that time out tell the rest
            results = await asyncio.gather(*(client.request("echo") for _ in range(4)), return_exceptions=True)
            assert [type(result) for result in results] == [BrokerUnreachable] * 4
        asked = [b"%d" % number for number in range(20)]
        replies = await asyncio.gather(*(client.request("echo", body, timeout=TIMEOUT_SECONDS) for body in asked))
        assert replies == [[body] for body in asked]

    with_client([NOBODY, endpoint], scenario, protocol=protocol, timeout=0.1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda c: c.request("echo", "text"), "frame 0 is of type str: a frame is bytes"),
        (lambda c: c.request(""), "'' is not a valid service name"),
        (lambda c: c.request("echo", timeout=0), "timeout is 0: it must be a number of seconds above 0"),
        (lambda c: anext(c.stream("echo", timeout=-1)), "timeout is -1"),
        (lambda c: anext(c.stream("echo", deadline=0)), "deadline is 0"),
        (lambda c: c.call("echo", codec="pickle"), "codec is 'pickle': it must be one of json, msgpack, arrow"),
    ],
)
def test_invalid_arguments(endpoint, ask, message, protocol):
    async def scenario(client):
        with pytest.raises(SettingError, match=message):
            await ask(client)
        assert await client.request("echo", b"x") == [b"x"]

    with_client(endpoint, scenario, protocol=protocol)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"broker": []}, "broker is empty"),
        ({"broker": "nonsense"}, "'nonsense' is not a valid endpoint"),
        ({"broker": "nonsense", "protocol": "0.2"}, "'nonsense' is not a valid endpoint"),
        ({"protocol": "3"}, "protocol is '3': it must be one of X1, 0.2, 0.1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"codec": "pickle"}, "codec is 'pickle'"),
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"liveness": 1}, "liveness is 1"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        AsyncClient(**settings)


# ── 0.2 and 0.1: each request has a connection of its own ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_legacy_protocols_refuse_what_only_x1_can_carry(endpoint, protocol):
    async def scenario(client):
        for settings in ({"wait": False}, {"headers": {"a": "b"}}, {"options": {"key": 1}}):
            with pytest.raises(SettingError, match="require protocol X1"):
                await client.request("echo", **settings)
            with pytest.raises(SettingError, match="require protocol X1"):
                await anext(client.stream("echo", **settings))
        with pytest.raises(SettingError, match="require protocol X1"):
            await anext(client.stream("echo", deadline=1))

    with_client(endpoint, scenario, protocol=protocol)


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


def test_the_largest_float_is_a_timeout(endpoint, protocol):
    async def scenario(client):
        for timeout in (sys.float_info.max, 10**400):
            assert await client.request("echo", b"x", timeout=timeout) == [b"x"]
            assert await collect(client.stream("echo", b"x", timeout=timeout)) == [[b"x"]]
        if client.protocol == "X1":
            assert await collect(client.stream("echo", b"x", deadline=sys.float_info.max)) == [[b"x"]]

    with_client(endpoint, scenario, protocol=protocol)


def test_parts_that_are_collected_without_end_end_the_request(endpoint, monkeypatch):
    monkeypatch.setattr(legacy_session, "MAX_REPLY_BYTES", 1)

    async def scenario(client):
        for _ in range(2):
            with pytest.raises(RequestRejected, match="the parts of the reply of service 'count' exceed 1 bytes"):
                await client.request("count")
        assert await client.request("echo", b"x") == [b"x"]

    with_client(endpoint, scenario, protocol="0.2")


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


def test_requests_within_a_stream_and_streams_side_by_side(endpoint):
    async def scenario(client):
        seen = []
        async for part in client.stream("count"):
            seen += part + await client.request("echo", b"within")
        assert seen == [b"0", b"within", b"1", b"within", b"2", b"within", b"end", b"within"]
        both = await asyncio.gather(*(collect(client.stream("count")) for _ in range(50)))
        assert both == [[[b"0"], [b"1"], [b"2"], [b"end"]]] * 50

    with_client(endpoint, scenario)


def test_a_stream_that_is_left_early_is_cancelled(endpoint):
    closed = threading.Event()

    def endless(request):
        try:
            while True:
                yield b"more"
        finally:
            closed.set()

    async def scenario(client):
        async with aclosing(client.stream("endless")) as parts:
            await anext(parts)
        assert await asyncio.to_thread(closed.wait, TIMEOUT_SECONDS)
        assert await client.request("echo", b"x") == [b"x"]

    with Worker("endless", endless, broker=endpoint):
        with_client(endpoint, scenario)


def test_a_stream_that_is_read_too_slowly_ends_within_bounds(endpoint, monkeypatch):
    monkeypatch.setattr("zmdp.clients.inbox.MAX_UNREAD_BYTES", 10_000)

    async def scenario(client):
        parts = client.stream("flood", b"200")
        await anext(parts)
        await client.request("flood", b"0")  # the same worker: all parts of the first have come
        assert [await anext(parts) for _ in range(20)] == [[b"x" * 100]] * 20
        with pytest.raises(StreamInterrupted, match="arrives faster than it is read"):
            await collect(parts)
        assert len(await collect(client.stream("flood", b"2"))) == 3

    with_client(endpoint, scenario)


def test_max_outstanding_is_respected(endpoint):
    guard, active, most = threading.Lock(), [0], [0]

    def work(request):
        with guard:
            active[0] += 1
            most[0] = max(most[0], active[0])
        threading.Event().wait(0.005)
        with guard:
            active[0] -= 1
        return request

    async def scenario(client):
        tasks = [asyncio.create_task(client.request("work", b"%d" % number)) for number in range(40)]
        await asyncio.sleep(0)
        for task in tasks[::4]:  # of those that are outstanding, and of those that wait for a place
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for n, r in enumerate(results) if n % 4] == [[b"%d" % n] for n in range(40) if n % 4]
        assert len(await asyncio.gather(*(collect(client.stream("work")) for _ in range(10)))) == 10

    with Worker("work", work, broker=endpoint, concurrency=6):
        with_client(endpoint, scenario, max_outstanding=2)
    # Those that were cancelled may still be worked on when the next have come.
    assert most[0] <= 4


def test_requests_that_wait_for_a_slot_are_not_overtaken(endpoint, holding):
    holding.let_go()

    async def scenario(client):
        async def ask(name, many):
            for _ in range(many):
                await client.request("hold", name)

        await asyncio.gather(ask(b"first", 10), ask(b"second", 10))
        assert [request[0] for request in holding.taken] == [b"first", b"second"] * 10
        # A turn passes to the next if the request no longer wants it, and when another is cancelled.
        holding.taken.clear()
        tasks = [asyncio.create_task(ask(b"%d" % number, 1)) for number in range(5)]
        await asyncio.sleep(0)
        for cancelled in (tasks[0], tasks[2]):
            cancelled.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [request[0] for request in holding.taken if request[0] != b"0"] == [b"1", b"3", b"4"]

    with_client(endpoint, scenario, max_outstanding=1)


def test_requests_that_wait_for_a_slot_when_the_client_is_closed(endpoint, holding):
    async def scenario():
        client = AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, max_outstanding=1)
        tasks = [asyncio.create_task(client.request("hold")) for _ in range(3)]
        await asyncio.to_thread(holding.wait_taken)
        await client.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ClosedError] * 3

    asyncio.run(scenario())


def test_the_broker_is_stopped_and_started_again():
    async def scenario():
        with ExitStack() as ends:
            with running_broker(drain_timeout=0.05) as first:
                at = first.endpoints[0]
                client = AsyncClient(at, timeout=TIMEOUT_SECONDS)
                ends.enter_context(Worker("echo", list, broker=at))
                assert await client.request("echo", b"before") == [b"before"]
                outstanding = asyncio.create_task(client.request("nobody"))
                await asyncio.sleep(0)
                await client.available("nobody")  # by now the broker has both
            with pytest.raises(RetryLater, match="503"):  # it ended in order, and so told everybody
                await outstanding
            meanwhile = [asyncio.create_task(client.request("echo", b"%d" % number)) for number in range(100)]
            await asyncio.sleep(0)
            with running_broker(at):
                assert await asyncio.gather(*meanwhile) == [[b"%d" % number] for number in range(100)]
                assert await client.request("echo", b"after") == [b"after"]
                await client.close()

    asyncio.run(scenario())


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
        socket.poll(5_000)
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
        monkeypatch.setattr("zmdp.clients.connection.receive", wait_and_receive)
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
