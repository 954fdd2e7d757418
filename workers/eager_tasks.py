"""Eager tasks: coroutines that start immediately, and become tasks only if they wait for something.

Most handlers never wait.  Python 3.12 has eager tasks; this module provides them for 3.11.
"""

import asyncio
import operator
import time
from asyncio import tasks
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any, Final

Work = Coroutine[Any, Any, None]

EAGER_TASKS: Final = hasattr(asyncio, "eager_task_factory")
"""Whether asyncio has eager tasks (Python 3.12)."""


class EagerTaskStarter:
    """Runs coroutines up to their first wait; those that wait continue in a task.

    `stepped` is called after each of their later steps with its duration in seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stepped: Callable[[float], None]) -> None:
        self._loop = loop
        self._stepped = stepped
        self._standby: _Standby | None = None

    def start(self, work: Work, context: Context) -> "asyncio.Task[None] | None":
        """Begin `work` in `context`.  Return its task, or None if it has ended.

        Call this from a callback of the event loop, not from a task.
        """
        if EAGER_TASKS:
            make: Any = asyncio.Task  # type checkers for 3.11 do not know `eager_start`
            task: asyncio.Task[None] = make(
                _all_steps(work, self._stepped), loop=self._loop, context=context, eager_start=True
            )
            return None if task.done() else task
        standby = self._standby
        if standby is None:
            standby = self._standby = _Standby(self._loop, self._stepped)
        tasks._enter_task(self._loop, standby.task)
        try:
            waits_for = context.run(work.send, None)
        except (StopIteration, asyncio.CancelledError):
            if standby.task.cancelling():  # it cancelled itself, which must not affect the next one
                self._standby = None
            return None
        finally:
            tasks._leave_task(self._loop, standby.task)
        self._standby = None
        standby.adopt(work, context, waits_for)
        return standby.task

    def start_inside(self, work: Work, context: Context) -> "asyncio.Task[None] | None":
        """`start`, from within a task."""
        outer = asyncio.current_task(self._loop)
        if EAGER_TASKS or outer is None:
            return self.start(work, context)
        tasks._leave_task(self._loop, outer)
        try:
            return self.start(work, context)
        finally:
            tasks._enter_task(self._loop, outer)

    def close(self) -> None:
        """Cancel the standby task."""
        if self._standby is not None:
            self._standby.task.cancel()
            self._standby = None


class _Standby:
    """A task that is the current task during a coroutine's first step, and adopts the coroutine if it then waits.

    So the coroutine sees the same task from the beginning, which `asyncio.timeout` and `TaskGroup` require.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stepped: Callable[[float], None]) -> None:
        self._stepped = stepped
        self._work: Work | None = None
        self._run_in: Callable[..., Any] = operator.call
        self._waits_for: Any = None
        self._adopted: asyncio.Future[None] = loop.create_future()
        run = self._run()
        run.send(None)  # a task that is cancelled before its first step never runs its coroutine
        self.task: asyncio.Task[None] = loop.create_task(run)

    def adopt(self, work: Work, context: Context, waits_for: Any) -> None:
        """Continue `work`, which has begun in `context` and waits for `waits_for`."""
        self._work, self._run_in, self._waits_for = work, context.run, waits_for
        if not self._adopted.done():
            self._adopted.set_result(None)

    async def _run(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        try:
            await _pause()
            await self._adopted
        except asyncio.CancelledError as error:
            if self._work is None:
                raise
            # Cancel what the coroutine waits for, as a task does.
            if not (asyncio.isfuture(self._waits_for) and self._waits_for.cancel()):
                cancelled = error
        if self._work is not None:
            await _steps(self._work, self._run_in, self._waits_for, cancelled, self._stepped)


@coroutine
def _pause() -> Generator[None, Any, None]:
    yield


@coroutine
def _all_steps(work: Work, stepped: Callable[[float], None]) -> Generator[Any, Any, None]:
    """Run `work` from the beginning."""
    try:
        waits_for = work.send(None)
    except StopIteration:
        return
    yield from _steps(work, operator.call, waits_for, None, stepped)


@coroutine
def _steps(
    work: Work,
    run: Callable[..., Any],
    waits_for: Any,
    error: BaseException | None,
    stepped: Callable[[float], None],
) -> Generator[Any, Any, None]:
    """Run the rest of `work`, which waits for `waits_for`, or raise `error` in it."""
    step: Callable[..., Any]
    while True:
        step, argument = work.throw, error
        if error is None:
            try:
                step, argument = work.send, (yield waits_for)
            except BaseException as raised:  # noqa: BLE001 - raised into the coroutine
                step, argument = work.throw, raised
        error = None
        began = time.monotonic()
        try:
            waits_for = run(step, argument)
        except StopIteration:
            return
        finally:
            argument = None  # break the cycle with the exception's traceback
            stepped(time.monotonic() - began)
