"""The slots of an asyncio worker on one connection, as a broker made by hand sees them (docs/x1.md, Slots)."""

import asyncio
import time
from contextlib import suppress
from contextvars import ContextVar

import pytest
from support.router import Router

from zmdp.workers import AsyncWorker, aio, link

X1 = b"MDPWX1"
READY, HEARTBEAT, DISCONNECT = [X1, b"\x01", b"echo"], [X1, b"\x05"], [X1, b"\x06"]
FIRST, SECOND, THIRD = [], [b"1", b""], [b"2", b""]


@pytest.fixture(autouse=True)
def _short_farewells(monkeypatch):
    """The broker here does not answer the last question, unless a test has it do so."""
    monkeypatch.setattr(link, "FAREWELL", 0.5)


async def echo(request):
    return request


class Broker:
    """A Router for the tests here, all of which run in an event loop."""

    def __init__(self, router):
        self._router = router
        self.connection = None

    async def recv(self):
        """The next message, without its connection, which is kept."""
        self.connection, *message = await asyncio.to_thread(self._router.recv)
        return message

    async def command(self):
        """The next message that is no HEARTBEAT."""
        while (message := await self.recv())[-2:] == HEARTBEAT:
            pass
        return message

    async def commands(self, count):
        return [await self.command() for _ in range(count)]

    def send(self, *frames):
        self._router.send(self.connection, *frames)

    def ask(self, slot, body=b"x", client=b"c"):
        self.send(*slot, X1, b"\x02", client, b"", b"", body)


def final(slot, body=b"x", client=b"c"):
    return [*slot, X1, b"\x04", client, b"", body]


def run(scenario, **settings):
    """Run `scenario(broker, worker)`; nothing may be left for the event loop to complain of."""
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        with Router() as router:
            worker = AsyncWorker("echo", broker=router.endpoint, **{"heartbeat": 5, **settings})
            await scenario(Broker(router), worker)

    asyncio.run(main())
    assert complaints == []


def test_all_slots_share_one_connection():
    async def scenario(broker, worker):
        worker(echo)
        async with worker:
            assert await broker.commands(3) == [READY, [*SECOND, *READY], [*THIRD, *READY]]
            connection = broker.connection
            broker.ask(SECOND)
            broker.ask(FIRST)
            broker.ask([b"1", b"other", b""])  # no slot of ours: ignored
            assert sorted(await broker.commands(2)) == sorted([final(FIRST), final(SECOND)])
        left = await broker.commands(3)
        assert sorted(left) == sorted([DISCONNECT, [*SECOND, *DISCONNECT], [*THIRD, *DISCONNECT]])
        assert broker.connection == connection

    run(scenario, concurrency=3)


def test_each_slot_beats():  # C13
    async def scenario(broker, worker):
        worker(echo)
        async with worker:
            await broker.commands(2)
            beats = [tuple(await broker.recv()) for _ in range(8)]
            assert {tuple(HEARTBEAT), (*SECOND, *HEARTBEAT)} == set(beats)
            assert abs(beats.count(tuple(HEARTBEAT)) - 4) <= 1

    run(scenario, concurrency=2, heartbeat=0.05, liveness=100)


def test_a_slot_that_the_broker_does_not_take_registers_again_under_another_number():
    async def scenario(broker, worker):
        worker(echo)
        async with worker:
            await broker.commands(2)
            connection = broker.connection
            broker.ask(FIRST)
            broker.send(*SECOND, *DISCONNECT)
            assert await broker.commands(2) == [final(FIRST), [*THIRD, *READY]]
            assert broker.connection == connection
            broker.ask(THIRD)
            broker.ask(SECOND)  # it is not there any more
            broker.ask(FIRST)
            assert await broker.commands(2) in ([final(THIRD), final(FIRST)], [final(FIRST), final(THIRD)])

    run(scenario, concurrency=2)


def test_without_any_slot_that_the_broker_takes_there_is_a_new_connection():
    async def scenario(broker, worker):
        worker(echo)
        async with worker:
            await broker.commands(2)
            connection = broker.connection
            broker.send(*DISCONNECT)
            broker.send(*SECOND, *DISCONNECT)
            assert await broker.commands(2) == [READY, [*SECOND, *READY]]
            assert broker.connection != connection

    run(scenario, concurrency=2)


def test_a_broker_that_knows_a_slot_no_more_knows_none():  # C9
    async def scenario(broker, worker):
        started, cancelled = asyncio.Event(), asyncio.Event()

        @worker
        async def wait(request):
            try:
                started.set()
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        async with worker:
            await broker.commands(2)
            connection = broker.connection
            broker.send(*SECOND, *HEARTBEAT)
            broker.ask(FIRST)
            await started.wait()
            broker.send(*SECOND, *DISCONNECT)
            await cancelled.wait()
            # The first is free again in the turn of the loop after that.
            ready = await broker.commands(2)
            assert ready == [READY, [*SECOND, *READY]]
            assert broker.connection != connection

    run(scenario, concurrency=2)


def test_a_silent_broker_is_lost_for_all_slots(logged):
    async def scenario(broker, worker):
        worker(echo)
        async with worker:
            await broker.commands(2)
            connection = broker.connection
            assert await broker.commands(2) == [READY, [*SECOND, *READY]]
            assert broker.connection != connection
            assert logged("the broker has been silent", timeout=0)

    run(scenario, concurrency=2, heartbeat=0.05, liveness=4)


def test_a_stuck_handler_is_one_slots_trouble():
    async def scenario(broker, worker):
        go_on = asyncio.Event()

        @worker
        async def wait(request):
            while not go_on.is_set() and request == [b"stuck"]:
                with suppress(asyncio.CancelledError):
                    await go_on.wait()
            return request

        async with worker:
            await broker.commands(2)
            broker.send(*SECOND, *HEARTBEAT)
            broker.ask(FIRST, b"stuck")
            assert await broker.command() == DISCONNECT
            broker.ask(SECOND)
            assert await broker.command() == final(SECOND)
            go_on.set()
            assert await broker.command() == [*THIRD, *READY]
            broker.ask(THIRD)
            assert await broker.command() == final(THIRD)

    run(scenario, concurrency=2, handler_timeout=0.1)


def test_slots_that_come_and_go_get_numbers_of_their_own(monkeypatch):
    monkeypatch.setattr(aio, "SHRINK", 0.1)

    async def scenario(broker, worker):
        done = asyncio.Event()

        @worker
        async def wait(request):
            await done.wait()
            return request

        async with worker:
            assert await broker.command() == READY
            connection = broker.connection
            broker.ask(FIRST)
            assert await broker.command() == [*SECOND, *READY]
            done.set()
            assert await broker.command() == final(FIRST)
            left = await broker.command()
            assert left in (DISCONNECT, [*SECOND, *DISCONNECT])
            slot = SECOND if left == DISCONNECT else FIRST
            done.clear()
            broker.ask(slot)
            assert await broker.command() == [*THIRD, *READY]
            assert broker.connection == connection
            done.set()

    run(scenario, max_concurrency=2)


def test_what_a_handler_sets_is_not_seen_by_the_next():
    colour = ContextVar("colour", default="none")

    async def scenario(broker, worker):
        seen = []

        @worker
        async def paint(request):
            seen.append(colour.get())
            colour.set("red")
            if request[0] == b"slow":
                await asyncio.sleep(0.01)
            return request

        @worker
        async def stream(request):
            seen.append(colour.get())
            colour.set("red")
            yield request
            await asyncio.sleep(0)
            yield request

        for handler in (paint, stream):
            again = AsyncWorker("echo", handler, broker=worker.broker, heartbeat=5)
            async with again:
                assert await broker.command() == READY
                for body in (b"1", b"slow", b"2"):
                    broker.ask(FIRST, body)
                    while (await broker.command())[1] != b"\x04":
                        pass
            assert await broker.command() == DISCONNECT
        assert seen == ["none"] * 6

    run(scenario)


@pytest.mark.parametrize("stops", [False, True])
def test_a_task_that_others_cancel_before_its_first_step(stops):
    """As `asyncio.run` does at its end."""

    async def scenario(broker, worker):
        called = []

        @worker
        async def never(request):
            called.append(request)
            return request

        before = asyncio.all_tasks()
        async with asyncio.timeout(20):
            worker.start()
            await broker.commands(2)
            broker.ask(FIRST)
            (slot, _) = worker._slots
            while not slot.busy:
                slot._link._turn()
            (task,) = asyncio.all_tasks() - before
            task.cancel()
            if stops:
                worker.stop()
            assert await broker.command() in (DISCONNECT, [*SECOND, *DISCONNECT])  # another worker may have it
            worker.stop()
            await worker.wait()
        assert called == []

    run(scenario, concurrency=2, heartbeat=0.1, liveness=100)


def test_a_burst_is_one_turn(monkeypatch):
    """Requests that came together are answered together: by one look at the socket and one at the clock."""
    turns = []
    take_in = link.Link._take_in
    monkeypatch.setattr(link.Link, "_take_in", lambda self, socket: (turns.append(1), take_in(self, socket)))

    async def scenario(broker, worker):
        worker(echo)
        async with worker:
            slots = [message[:-3] for message in await broker.commands(20)]
            for slot in slots:
                broker.ask(slot)
            time.sleep(0.3)  # the loop is held up, and all arrive
            del turns[:]
            assert sorted(await broker.commands(20)) == sorted(map(final, slots))
            assert len(turns) <= 5

    run(scenario, concurrency=20)


def test_a_connection_stays_until_the_broker_has_read_what_was_said_last(monkeypatch):
    monkeypatch.setattr(link, "FAREWELL", 60)

    async def scenario(broker, worker):
        worker(echo)
        worker.start()
        await broker.commands(2)
        broker.ask(SECOND)
        assert await broker.command() == final(SECOND)
        worker.stop()
        # The slot that was at work last leaves first: another request, if there is one, went to the one before it.
        assert await broker.commands(2) == [[*SECOND, *DISCONNECT], DISCONNECT]
        assert await broker.recv() == [b"", b"MDPCX1", b"\x06"]
        ended = asyncio.create_task(worker.wait())
        broker.ask(FIRST)  # it had not read the DISCONNECT yet
        assert not ended.done()
        broker.send(b"", b"MDPCX1", b"\x06")
        await ended

    run(scenario, concurrency=2)


def test_a_broker_that_does_not_answer_is_not_waited_for_longer():
    async def scenario(broker, worker):
        worker(echo)
        async with worker:
            await broker.commands(2)
            broker.ask(FIRST)
            await broker.command()
        assert await broker.commands(2) == [DISCONNECT, [*SECOND, *DISCONNECT]]

    run(scenario, concurrency=2)
