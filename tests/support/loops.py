"""Event loops in threads, and workers that run in them."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from support.processes import TIMEOUT_SECONDS


class LoopThread:
    """An event loop in a thread, which must report no errors."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._complaints: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda loop, context: self._complaints.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop")
        self._thread.start()

    def run(self, coroutine: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        assert self._complaints == []


@contextmanager
def serving(*workers: Any, abandon: bool = False) -> Iterator[None]:
    """Run workers for asyncio, or services, in an event loop of their own.

    With `abandon`, the requests that they have at the end are given up.
    """
    loop = LoopThread()
    running = [loop.run(worker.run()) for worker in workers]
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
            if abandon:
                worker.stop()
        wait(running, TIMEOUT_SECONDS)
        loop.close()
    for each in running:
        each.result(0)
