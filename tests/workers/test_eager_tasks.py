"""Coroutines that begin at once, in a task's name from the beginning."""

import asyncio
import contextvars

import pytest

from zmdp.workers.eager_tasks import EagerTaskStarter

variable = contextvars.ContextVar("variable", default="outer")


def running(scenario):
    """Run `scenario(start)` from the event loop, not from a task; `start(coroutine)` begins one and returns its task.

    The event loop may have nothing to complain of.
    """
    complaints, steps = [], []

    async def run():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        starter, base = EagerTaskStarter(loop, steps.append), contextvars.copy_context()
        done = loop.create_future()

        def begin():
            try:
                done.set_result(scenario(lambda work: starter.start(work, base.copy())))
            except BaseException as error:  # noqa: BLE001 - for the test to see
                done.set_exception(error)

        loop.call_soon(begin)
        tasks = await done
        if tasks:
            await asyncio.wait(tasks)
        starter.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return tasks

    tasks = asyncio.run(run())
    assert complaints == []
    return tasks, steps


def test_one_that_never_waits_ends_at_once():
    seen = []

    async def work():
        seen.append(asyncio.current_task())

    def scenario(start):
        for _ in range(3):
            assert start(work()) is None
        assert len(seen) == 3
        assert None not in seen

    _, steps = running(scenario)
    assert steps == []


def test_one_that_waits_goes_on_in_the_task_that_it_saw_first():
    seen = []

    async def work(number):
        seen.append((number, asyncio.current_task()))
        await asyncio.sleep(0)
        seen.append((number, asyncio.current_task()))
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, 7)
        assert await future == 7
        seen.append((number, asyncio.current_task()))

    def scenario(start):
        tasks = [start(work(0)), start(work(1))]
        assert asyncio.tasks._current_tasks == {}
        return tasks

    tasks, steps = running(scenario)
    assert sorted(seen, key=lambda each: each[0]) == [(0, tasks[0])] * 3 + [(1, tasks[1])] * 3
    assert len(steps) == 4
    assert all(0 <= each < 10 for each in steps)


def test_context_variables_stay_with_their_coroutine():
    seen = []

    async def at_once(value):
        seen.append(variable.get())
        variable.set(value)

    async def later(value):
        seen.append(variable.get())
        variable.set(value)
        await asyncio.sleep(0)
        seen.append(variable.get())
        variable.set(value * 2)
        await asyncio.sleep(0)
        seen.append(variable.get())
        seen.append(await asyncio.to_thread(variable.get))

    def scenario(start):
        start(at_once("a"))
        start(at_once("b"))
        tasks = [start(later("c"))]
        start(at_once("d"))
        assert variable.get() == "outer"
        return tasks

    running(scenario)
    assert seen == ["outer", "outer", "outer", "outer", "c", "cc", "cc"]


def test_timeouts_and_task_groups():
    ended = []

    async def times_out():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(3600)
        assert not asyncio.current_task().cancelling()
        ended.append("timeout")

    async def waits_for():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(3600), 0.001)
        ended.append("wait_for")

    async def group():
        async def fail():
            raise ValueError

        async def run_group():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                await asyncio.sleep(3600)

        with pytest.raises(ExceptionGroup):
            await run_group()
        assert not asyncio.current_task().cancelling()
        ended.append("group")

    running(lambda start: [start(times_out()), start(waits_for()), start(group())])
    assert sorted(ended) == ["group", "timeout", "wait_for"]


@pytest.mark.parametrize("when", ["at once", "after a turn"])
@pytest.mark.parametrize("waits", ["sleep", "future", "yield", "task"])
def test_cancelling_one_that_waits(when, waits):
    cleaned, inner = [], []

    async def child():
        try:
            await asyncio.sleep(3600)
        finally:
            inner.append(True)

    async def work():
        try:
            if waits == "sleep":
                await asyncio.sleep(3600)
            elif waits == "future":
                await asyncio.get_running_loop().create_future()
            elif waits == "task":
                await asyncio.create_task(child())
            else:
                while True:
                    await asyncio.sleep(0)
        finally:
            cleaned.append(asyncio.current_task().cancelling())
            await asyncio.sleep(0)
            cleaned.append(True)

    def scenario(start):
        task = start(work())
        if when == "at once":
            task.cancel()
        else:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, task.cancel)
        return [task]

    (task,), _ = running(scenario)
    assert task.cancelled()
    assert cleaned == [1, True]
    assert bool(inner) == (waits == "task" and when != "at once")  # else the child has not begun either


def test_one_that_cancels_itself():
    seen = []

    async def never_waits():
        asyncio.current_task().cancel()
        seen.append("cancelled itself")

    async def raises():
        asyncio.current_task().cancel()
        raise asyncio.CancelledError

    async def waits():
        asyncio.current_task().cancel()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("was cancelled")
            asyncio.current_task().uncancel()

    async def innocent():
        await asyncio.sleep(0)
        seen.append("not cancelled")

    def scenario(start):
        assert start(never_waits()) is None
        assert start(raises()) is None
        return [start(innocent()), start(waits()), start(innocent())]

    running(scenario)
    assert sorted(seen) == ["cancelled itself", "not cancelled", "not cancelled", "was cancelled"]


def test_what_it_raises_after_it_has_waited_is_its_tasks():
    async def work():
        await asyncio.sleep(0)
        raise ValueError("late")

    (task,), _ = running(lambda start: [start(work())])
    with pytest.raises(ValueError, match="late"):
        task.result()
