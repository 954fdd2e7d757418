"""The asyncio worker, against a real broker and real clients in this process."""

import asyncio
import contextlib
import contextvars
import functools
import json
import sys
import threading
import time
from dataclasses import replace

import pytest
import zmq
from support.peers import body_of, record
from support.processes import eventually, free_endpoint
from support.router import Router
from support.x1_broker import Peer

from zmdp.clients import AsyncClient, ServiceError
from zmdp.mdp import wire
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, ClosedError, Last, SettingError, connection, current_request

ALL = ["X1", "0.2", "0.1"]
QUICK = {"heartbeat": 0.05, "liveness": 20}


@pytest.fixture
def server():
    with running_broker(limits=Limits(**QUICK), drain_timeout=0.1) as server:
        yield server


@pytest.fixture
def endpoint(server):
    return server.endpoints[0]


@pytest.fixture(params=ALL)
def protocol(request):
    """What the worker speaks."""
    return request.param


def serving(endpoint, scenario, *workers):
    """Run `scenario(client)` while the workers serve; nothing may be left for the event loop to complain of."""
    complaints = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with AsyncClient(endpoint, timeout=20) as client:
            for worker in workers:
                worker.settings = replace(worker.settings, endpoints=[endpoint])
                worker.start()
            try:
                await scenario(client)
            finally:
                for worker in workers:
                    worker.stop()
                for worker in workers:
                    await worker.wait()

    asyncio.run(run())
    assert complaints == []


async def collect(parts):
    return [part async for part in parts]


async def echo(request):
    return request


async def until(condition):
    await asyncio.to_thread(eventually, condition)


# ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_concurrency_may_be_larger_than_any_credit(endpoint):
    async def scenario(client):
        assert await client.request("echo", b"x") == [b"x"]

    serving(endpoint, scenario, AsyncWorker("echo", echo, concurrency=sys.maxsize, **QUICK))


def test_an_async_generator(endpoint, protocol):
    async def count(request):
        for number in range(int(request[0])):
            await asyncio.sleep(0)
            yield [b"%d" % number, b"."]

    async def ending(request):
        try:
            yield b"part"
            yield Last([b"the", b"end"])
            yield b"never"
        finally:
            closed.set()

    closed = threading.Event()

    async def scenario(client):
        parts = await collect(client.stream("count", b"3"))
        assert [frame for part in parts for frame in part] == [b"0", b".", b"1", b".", b"2", b".", b""]
        assert [part.final for part in parts] in ([False, False, False, True], [True])  # 0.1 has no parts
        assert await client.request("count", b"0") == [b""]
        assert await client.request("ending") == [b"part", b"the", b"end"]
        assert closed.is_set()

    serving(
        endpoint,
        scenario,
        AsyncWorker("count", count, protocol=protocol, **QUICK),
        AsyncWorker("ending", ending, protocol=protocol, **QUICK),
    )


def test_a_worker_whose_event_loop_was_held_up_takes_as_many_requests_as_before(endpoint):
    """Handlers that wait for each other arrive in two halves; in between, one keeps the event loop for 20 ms."""
    met, half, together = 0, asyncio.Event(), asyncio.Event()

    async def wait(request):
        nonlocal met
        met += 1
        if met == 32:
            time.sleep(0.02)
            half.set()
        if met == 64:
            together.set()
        await together.wait()
        return b"done"

    async def scenario(client):
        first = [asyncio.ensure_future(client.request("wait")) for _ in range(32)]
        await half.wait()
        second = [asyncio.ensure_future(client.request("wait")) for _ in range(32)]
        assert await asyncio.gather(*first, *second) == [[b"done"]] * 64

    serving(endpoint, scenario, AsyncWorker("wait", wait))


def test_what_a_handler_knows_of_its_request(endpoint, protocol):
    seen = []

    async def function(value):
        before = current_request()
        await asyncio.sleep(0)
        seen.append(await asyncio.to_thread(current_request))
        return [value, current_request() is before, seen[-1] is before]

    async def generator(value):
        for _ in range(2):
            await asyncio.sleep(0)
            yield json.loads(current_request()[0])

    async def scenario(client):
        both = await asyncio.gather(
            client.request("function", b"1", headers={"a": "1"}, options={"key": 1}, timeout=100),
            client.request("function", b"2", headers={"a": "2"}, timeout=None),
        )
        assert [json.loads(frame) for (frame,) in both] == [[1, True, True], [2, True, True]]
        assert await client.request("generator", b"3") == [b"3", b"3", b"null"]
        with pytest.raises(LookupError):
            current_request()
        if protocol == "X1":
            first, second = sorted(seen)
            assert (dict(first.headers), first.options["key"], first.attempt) == ({"a": "1"}, 1, 1)
            assert (dict(second.headers), second.deadline) == ({"a": "2"}, None)
            assert time.monotonic() < first.deadline <= time.monotonic() + 100

    serving(
        endpoint,
        scenario,
        AsyncWorker("function", function, codec="json", concurrency=2, protocol=protocol),
        AsyncWorker("generator", generator, codec="json", protocol=protocol),
    )


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_coroutine_that_will_not_be_cancelled(endpoint):
    taken = asyncio.Event()

    async def work(request):
        taken.set()
        try:
            await asyncio.sleep(0 if request[0] else 3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return b"done"

    async def scenario(client):
        task = asyncio.create_task(client.request("work"))
        await taken.wait()
        task.cancel()
        assert await client.request("work", b"x") == [b"done"]

    serving(endpoint, scenario, AsyncWorker("work", work, **QUICK))


def test_cancel_that_comes_before_the_handler_begins_and_during_its_first_step():
    called, cleaned = [], []

    async def scenario():
        with Router() as router:
            peer = Peer(router)

            async def work(request):
                called.append(request.client)
                try:
                    if request == [b"slow"]:
                        peer.send(cancel=[int(request.client)])
                        assert connection._socket.poll(10_000)  # so that it is read before the task runs
                        # The poll has taken the descriptor's signal.
                        asyncio.get_running_loop().call_soon(connection._turn)
                        await asyncio.sleep(3600)
                finally:
                    cleaned.append(request.client)
                return request

            async with AsyncWorker("work", work, broker=router.endpoint, heartbeat=10) as worker:
                await asyncio.to_thread(peer.ready)
                (connection,) = worker._connections
                peer.send(work=[1], body=b"slow")
                peer.send(cancel=[1])
                peer.send(work=[2], body=b"slow")
                while list(connection.session.held) != [2]:  # all is read before any begins
                    connection.step(time.monotonic())
                asyncio.get_running_loop().call_soon(connection._turn)
                assert await asyncio.to_thread(peer.ends, 2) == {1: (499, b"cancelled"), 2: (499, b"cancelled")}
                peer.send(work=[3])
                assert await asyncio.to_thread(peer.ends, 1) == {3: b"x"}
                peer.send(cancel=[3, 4])  # too late, and for nobody: ignored
                peer.send(work=[5])
                assert await asyncio.to_thread(peer.ends, 1) == {5: b"x"}
                await asyncio.to_thread(peer.let_go, worker.stop)

    asyncio.run(scenario())
    assert called == cleaned == [b"2", b"3", b"5"]


def test_a_stuck_handler_is_cancelled_and_its_request_goes_to_another(endpoint, logged):
    cancelled = asyncio.Event()

    async def hang(request):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def good(request):
        return b"from the other"

    async def scenario(client):
        task = asyncio.create_task(client.request("job"))
        await until(lambda: logged("has neither returned", timeout=0) or False)
        await cancelled.wait()
        other = AsyncWorker("job", good, broker=endpoint, **QUICK)
        async with other:
            assert await task == [b"from the other"]

    serving(endpoint, scenario, AsyncWorker("job", hang, handler_timeout=0.1, **QUICK))


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ended_by", ["stop", "another thread", "cancelling run"])
def test_what_is_worked_on_is_finished(endpoint, ended_by):
    async def scenario():
        taken, go_on = asyncio.Event(), asyncio.Event()

        async def slow(request):
            taken.set()
            await go_on.wait()
            return b"done"

        worker = AsyncWorker("slow", slow, broker=endpoint, concurrency=2, **QUICK)
        running = asyncio.create_task(worker.run())
        async with AsyncClient(endpoint, timeout=20) as client:
            reply = asyncio.create_task(client.request("slow"))
            await taken.wait()
            if ended_by == "stop":
                worker.stop()
            elif ended_by == "another thread":
                await asyncio.to_thread(worker.stop)
            else:
                running.cancel()
            await asyncio.sleep(0)
            assert not running.done()
            go_on.set()
            assert await reply == [b"done"]
            (result,) = await asyncio.gather(running, return_exceptions=True)
            assert isinstance(result, asyncio.CancelledError) == (ended_by == "cancelling run")
            await until_gone(client)

    async def until_gone(client):
        while await client.available("slow"):
            pass

    asyncio.run(scenario())


def test_stopped_before_it_is_started(endpoint):
    async def scenario():
        worker = AsyncWorker("echo", echo, broker=endpoint)
        worker.stop()
        await asyncio.wait_for(worker.run(), 10)

    asyncio.run(scenario())


def test_a_worker_without_a_broker_warns_once(caplog):
    def since_it_waits():
        said = [(each.levelname, each.message) for each in caplog.records]
        return said[next((at for at, (_, text) in enumerate(said) if "waiting for a broker" in text), len(said)) :]

    async def scenario():
        async with AsyncWorker("echo", echo, broker=free_endpoint(), heartbeat=0.05, liveness=2):
            while len(since_it_waits()) < 3:
                await asyncio.sleep(0.01)

    caplog.set_level("DEBUG", "zmdp.worker")
    asyncio.run(scenario())
    (level, _), *others = since_it_waits()
    assert level == "WARNING"
    assert {level for level, _ in others} == {"DEBUG"}
    assert any("has been silent" in text for _, text in others)


def test_a_host_that_does_not_exist_is_told(caplog):
    async def scenario():
        at = "tcp://nosuch.invalid:5555"
        async with AsyncWorker("echo", echo, broker=at), AsyncClient(at, timeout=60) as client:
            asking = asyncio.ensure_future(client.request("echo"))
            while sum("is the name of the host right?" in text for text in caplog.messages) < 2:
                await asyncio.sleep(0.01)
            asking.cancel()

    caplog.set_level("INFO", "zmdp")
    asyncio.run(scenario())
    waiting = [text for text in caplog.messages if text.startswith("echo: waiting for a broker")]
    assert waiting == [
        "echo: waiting for a broker at tcp://nosuch.invalid:5555: cannot connect: is the name of the host right?"
    ]


def test_a_restart_of_the_broker_is_one_line_for_all_connections(caplog):
    async def scenario():
        limits = Limits(heartbeat=0.05, liveness=40)
        with running_broker(drain_timeout=0.0, limits=limits) as first:
            at = first.endpoints[0]
            worker = AsyncWorker("echo", echo, broker=at, concurrency=8, heartbeat=0.05, liveness=40, protocol="0.2")
            worker.start()
            while not all(each.registered for each in worker._connections) or not worker._connections:
                await asyncio.sleep(0)
            await asyncio.to_thread(first.stop)
        with running_broker(at, limits=limits) as second:
            while len(second.broker.directory.workers) < 8:
                await asyncio.sleep(0)
            worker.stop()
            await worker.wait()

    caplog.set_level("DEBUG", "zmdp.worker")
    asyncio.run(scenario())
    levels = [each.levelname for each in caplog.records if "connecting to" in each.message]
    assert (levels.count("INFO"), levels.count("WARNING")) == (1, 0)


@pytest.mark.parametrize("patient", [True, False])
def test_a_broker_that_takes_nothing(logged, patient):
    """A stream waits for it, and is given up if it does not come back to life."""

    async def scenario():
        sent, ended = 0, asyncio.Event()

        async def many(request):
            nonlocal sent
            try:
                for number in range(5000):
                    yield b"%d" % number + b"x" * 10_000
                    sent = number
            finally:
                ended.set()

        with Router() as blocked:
            worker = AsyncWorker("many", many, broker=blocked.endpoint, heartbeat=0.05, liveness=200 if patient else 6)
            async with worker:
                peer = Peer(blocked)
                await asyncio.to_thread(peer.ready)
                peer.send(work=[1])
                if not patient:
                    await ended.wait()
                    assert sent < 4999
                    assert await asyncio.to_thread(logged, "connecting to")
                    return
                while not worker._connections[0].stalled:
                    await asyncio.sleep(0)
                worker.stop()  # all of it gets out all the same, the FINAL too
                await asyncio.sleep(0)

                def read():
                    numbers = []
                    while True:
                        command = peer.next()
                        if not isinstance(command, wire.Reply):
                            continue
                        if command.final:
                            peer.disconnect()
                            return numbers
                        numbers.append(int(command.body[0].rstrip(b"x")))

                assert await asyncio.to_thread(read) == list(range(5000))

    asyncio.run(scenario())


X1 = [b"", b"MDPWX1", b"\x09"]


@pytest.mark.parametrize(
    ("protocol", "work", "final", "farewell"),
    [
        (
            "X1",
            [*X1, record(2, 7, b"\0\0\0\0\1\0\0" + body_of(b"x"))],
            [*X1, record(4, 7, body_of(b"x"))],
            [*X1, record(6, 0)],
        ),
        ("0.2", [b"MDPW02", b"\x02", b"7", b"", b"x"], [b"MDPW02", b"\x04", b"7", b"", b"x"], [b"MDPW02", b"\x06"]),
    ],
    ids=["X1", "0.2"],
)
def test_a_final_that_the_broker_does_not_take_yet_is_not_lost_when_the_worker_ends(
    monkeypatch, protocol, work, final, farewell
):
    full = [zmq.EAGAIN]
    sending = connection.send
    monkeypatch.setattr(connection, "send", lambda *a: full[0] or sending(*a))

    async def scenario():
        with Router() as router:
            full[0] = 0
            settings = {"broker": router.endpoint, "heartbeat": 10, "protocol": protocol, "concurrency": 1}
            async with AsyncWorker("echo", echo, **settings) as worker:
                identity = (await asyncio.to_thread(router.recv))[0]
                full[0] = zmq.EAGAIN
                router.send(identity, *work)
                while not worker._connections[0].stalled:
                    await asyncio.sleep(0)
                worker.stop()
                for _ in range(10):
                    await asyncio.sleep(0)
                full[0] = 0
                assert (await asyncio.to_thread(router.recv))[1:] == final
                assert (await asyncio.to_thread(router.recv))[1:] == farewell
                router.send(identity, *farewell)

    asyncio.run(scenario())


# ── wrong use ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_event_loop_is_needed():
    async def echo(request):
        return request

    with pytest.raises(SettingError, match=r"in a running event loop: asyncio\.run\(worker\.run\(\)\) makes one"):
        AsyncWorker("echo", echo).start()


def test_plain_functions_are_refused():
    def function(request):
        return request

    def generator(request):
        yield request

    for handler in (function, generator, list, functools.partial(function), functools.partial(function)):
        with pytest.raises(SettingError, match="not a coroutine function or async generator function"):
            AsyncWorker("x", handler)
        with pytest.raises(SettingError, match="needs a Worker"):
            AsyncWorker("x")(handler)


def test_wrong_use_is_told(endpoint):
    async def scenario():
        with pytest.raises(SettingError, match="'nonsense' is not a valid endpoint"):
            AsyncWorker("echo", echo, broker="nonsense").start()
        with pytest.raises(SettingError, match="has no handler"):
            AsyncWorker("echo", broker=endpoint).start()
        async with AsyncWorker("echo", echo, broker=endpoint) as worker:
            with pytest.raises(ClosedError, match="started only once"):
                worker.start()

    asyncio.run(scenario())


def test_a_worker_that_cannot_open_all_its_sockets_holds_nothing_open(endpoint, monkeypatch):
    few = zmq.Context()
    few.set(zmq.MAX_SOCKETS, 3)
    monkeypatch.setattr("zmdp.mdp.transport.sockets.zmq.Context", lambda: few)

    async def scenario():
        with pytest.raises(SettingError, match="as many sockets as it may"):
            AsyncWorker("echo", echo, broker=endpoint, concurrency=10, protocol="0.2").start()

    asyncio.run(scenario())
    assert few.closed


def test_abort_leaves_the_requests_to_others(endpoint):
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(request):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def scenario(client):
        first = AsyncWorker("work", hang, broker=endpoint, **QUICK)
        first.start()
        asked = asyncio.ensure_future(client.request("work", b"x"))
        await begun.wait()
        assert [list(each) for each in first.requests] == [[b"x"]]
        async with AsyncWorker("work", echo, broker=endpoint, **QUICK):
            first.abort()
            await first.wait()
            assert cancelled.is_set()
            assert first.requests == []
            assert await asked == [b"x"]

    serving(endpoint, scenario)


def test_context_variables_of_one_handler_do_not_leak_into_the_next(endpoint):
    variable = contextvars.ContextVar("variable", default=b"clean")

    async def work(request):
        before = variable.get()
        variable.set(request[0])
        if request[0] == b"waits":
            await asyncio.sleep(0)
        return [before, variable.get()]

    async def scenario(client):
        bodies = [b"a", b"waits", b"b", b"c", b"waits", b"waits", b"d"]
        replies = await asyncio.gather(*(client.request("work", body) for body in bodies))
        assert replies == [[b"clean", body] for body in bodies]

    serving(endpoint, scenario, AsyncWorker("work", work, **QUICK))


def test_handlers_that_wait_have_tasks_of_their_own_and_others_share_one(endpoint):
    tasks = {b"waits": [], b"ends": []}

    async def work(request):
        tasks[request[0]].append(asyncio.current_task())
        if request[0] == b"waits":
            await asyncio.sleep(0)
        return request

    async def scenario(client):
        await asyncio.gather(*(client.request("work", body) for body in [b"ends", b"waits", b"ends"] * 20))
        assert len(set(tasks[b"waits"])) == 20
        assert len(set(tasks[b"ends"])) < 40

    serving(endpoint, scenario, AsyncWorker("work", work, **QUICK))


def test_a_task_that_a_handler_has_cancelled_handles_no_other_request(endpoint):
    async def work(request):
        if request[0] == b"cancels":
            asyncio.current_task().cancel()
        else:
            await asyncio.sleep(0)
        return [b"%d" % asyncio.current_task().cancelling()]

    async def scenario(client):
        bodies = [b"", b"cancels", b"", b"cancels", b"cancels", b""]
        replies = await asyncio.gather(*(client.request("work", body) for body in bodies))
        assert replies == [[b"1" if body else b"0"] for body in bodies]

    serving(endpoint, scenario, AsyncWorker("work", work, **QUICK))


def test_a_handler_that_cancels_itself_fails_once(endpoint):
    attempts = []

    async def work(request):
        attempts.append(request[0])
        if request[0] == b"is too late":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    asyncio.current_task().cancel()
                    await asyncio.sleep(3600)
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    async def scenario(client):
        for body in (b"", b"", b"is too late"):
            with pytest.raises(ServiceError, match="CancelledError"):
                await client.request("work", body)
        assert attempts == [b"", b"", b"is too late"]

    serving(endpoint, scenario, AsyncWorker("work", work, **QUICK))


def test_abort_in_a_handler_that_goes_on(endpoint):
    ended = []

    async def work(request):
        worker.abort()
        assert not worker._connections[0].done.is_set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        ended.append(request[0])

    worker = AsyncWorker("work", work, **QUICK)

    async def scenario(client):
        request = asyncio.ensure_future(client.request("work", b"x"))
        await worker.wait()
        assert ended == [b"x"]
        request.cancel()

    serving(endpoint, scenario, worker)


@pytest.mark.pure_only  # a method of a compiled object cannot be replaced
def test_a_worker_that_has_more_than_it_can_handle_is_idle_while_its_handlers_wait():
    async def scenario():
        with Router() as router:
            peer = Peer(router)
            turns, go_on = [], asyncio.Event()

            async def work(request):
                await go_on.wait()
                return request

            async with AsyncWorker("work", work, broker=router.endpoint, concurrency=1, heartbeat=10) as worker:
                await asyncio.to_thread(peer.ready)
                (connection,) = worker._connections
                step = connection.step
                connection.step = lambda now: (turns.append(now), step(now))
                peer.send(work=[1, 2, 3])  # the broker had more credit than there is
                await until(lambda: len(connection.session.held) == 3 and connection._running)
                for _ in range(100):
                    await asyncio.sleep(0)
                assert len(turns) < 50
                go_on.set()
                assert sorted(await asyncio.to_thread(peer.ends, 3)) == [1, 2, 3]
                await asyncio.to_thread(peer.let_go, worker.stop)

    asyncio.run(scenario())
