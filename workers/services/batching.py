"""Batches across callers: a function gets the values of several requests at once."""

import asyncio
from collections.abc import Sequence
from contextvars import copy_context
from typing import Any

from ...mdp.errors import HandlerError
from .offered import AnyOffered

Waiting = tuple[Any, "asyncio.Future[Any]"]
"""A value, and the future of its reply."""


class Batcher:
    """Calls a function of batches for single values.

    The first value of a batch waits for others, for a limited time.  A plain function runs in a thread.  Within the
    function, `current_request()` is the request that completed the batch, or the first one.  A cancelled call leaves a
    batch that is still waiting, but ends only with one that runs: until then it holds its place among the concurrent
    requests, and the lifespan.

    Args:
        offered: The service.
        size: The maximum number of values.
        wait: Seconds that the first one waits.
    """

    def __init__(self, offered: AnyOffered, size: int, wait: float) -> None:
        self._size = size
        self._wait = wait
        self._function = offered.function
        self._asynchronous = offered.signature.asynchronous
        self._waiting: list[Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, value: Any) -> Any:
        """Return the reply to `value`.  Raises what the function raised, or returned for it."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((value, reply))
        if len(self._waiting) >= self._size:
            self._begin()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait, self._begin, context=copy_context())
        try:
            return await reply
        except asyncio.CancelledError:
            left = [each for each in self._waiting if each[1] is not reply]
            if len(left) < len(self._waiting):
                self._waiting = left
            elif self._running:
                await asyncio.wait(self._running)
            raise

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [each for each in self._waiting if not each[1].done()]  # not those that were cancelled
        self._waiting = []
        if batch:
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, batch: list[Waiting]) -> None:
        values = [value for value, _ in batch]
        try:
            if self._asynchronous:
                replies = _checked(await self._function(values), len(values))
            else:
                replies = await asyncio.to_thread(self._replies, values)
        except BaseException as error:  # noqa: BLE001 - whatever it is, no request may wait for ever
            replies = [error] * len(values)
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, StopIteration):
                future.set_exception(HandlerError("the handler raised StopIteration"))  # no future can have the other
            elif isinstance(reply, BaseException):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _replies(self, values: list[Any]) -> Sequence[Any]:
        """Call a plain function.  Its exception is returned, since asyncio does not pass on every one from a thread."""
        try:
            return _checked(self._function(values), len(values))
        except BaseException as error:  # noqa: BLE001 - as above
            return [error] * len(values)


def _checked(replies: Any, count: int) -> Sequence[Any]:
    if not isinstance(replies, list | tuple) or len(replies) != count:
        raise HandlerError(f"a handler of batches returned {replies!r:.100}: expected {count} replies")
    return replies
