"""The asyncio worker, whose handlers are coroutines or async generators."""

import asyncio
import logging
from typing import Final, Self

from ..mdp.errors import SettingError
from ..mdp.program.arguments import name_of
from ..mdp.program.loading import check_not_importing
from .aio_connection import AsyncConnection
from .aio_handling import AsyncHandler, BlockingWatch, HandlerCalls
from .base import BaseWorker

DEFAULT_CONCURRENCY: Final = 64
"""Maximum number of concurrent requests: handlers that await should not queue behind each other."""


class AsyncWorker(BaseWorker[AsyncHandler]):
    """Offers `service` through a broker, with an asyncio handler.

    A coroutine's return value is sent as the FINAL.  An async generator's yields are sent as PARTIALs, followed by an
    empty FINAL, unless its last one is `yield Last(...)`.  Each is one frame (`bytes`), several (a list of `bytes`),
    or None for one empty frame; with a `codec`, any value.

        worker = AsyncWorker("fetch", concurrency=100)

        @worker
        async def fetch(request):
            return await download(request[0].decode())

        asyncio.run(worker.run())

    `concurrency` is the maximum number of concurrent requests (default 64), over one connection; with 0.2 and 0.1, over
    one connection each.  When a request is cancelled or its connection is lost, the handler's task is cancelled: a
    handler that waits for something has a task of its own, while those that do not share one.
    Handlers must not block the event loop, which also sends the heartbeats: a worker whose handlers block it for more
    than 0.1 s says so in its log.

    Args:
        service: The name of the service.
        handler: A coroutine function or async generator function; it can be set later, as above.
        broker: Endpoint of the broker, or several, as for `Worker`.
        arguments: All other settings are those of `Worker`.

    Raises:
        SettingError: A setting is invalid.
        TypeError: There is no such setting.
    """

    default_concurrency = DEFAULT_CONCURRENCY
    _asyncio = True
    _wrong_handler = "not a coroutine function or async generator function: a plain function needs a Worker"

    def _reset(self) -> None:
        super()._reset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: list[AsyncConnection] = []

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve until `stop` is called or this task is cancelled, then finish the requests in progress.

        On Ctrl-C, `asyncio.run` cancels its task and, once that has ended, raises `KeyboardInterrupt`:

            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(worker.run())
        """
        self.start()
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.stop()
            await self.wait()
            raise

    def start(self) -> None:
        """Serve in the running event loop, and return immediately.  Call `stop` and `wait` afterwards.

            worker.start()
            ...
            worker.stop()
            await worker.wait()

        Raises:
            SettingError: There is no handler or no event loop.
            ClosedError: The worker was started before.
        """
        check_not_importing()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            text = "an AsyncWorker serves in a running event loop: asyncio.run(worker.run()) makes one"
            raise SettingError(text) from None
        handler = self._begin_start()
        self._loop = loop
        try:
            for number in range(self._connection_count):
                connection = self._connect(number, handler, self._loop)
                self._connections.append(connection)
                connection.open()
        except BaseException:
            for connection in self._connections:
                connection.abort()
            self._end_context()
            raise
        if self._stopping:
            self._leave()

    def _connect(self, number: int, handler: AsyncHandler, loop: asyncio.AbstractEventLoop) -> AsyncConnection:
        """Return a connection that is about to be opened."""
        level = logging.DEBUG if number else logging.WARNING  # connections are mostly lost together: warn once
        calls = HandlerCalls(handler, self._adapter)
        watch = BlockingWatch(loop, self.service.decode(), name_of(handler))
        return AsyncConnection(self._session(), self._open_context(), self.settings.keys, level, calls, loop, watch)

    def stop(self) -> None:
        """Take no more requests.

            worker.stop()

        `run` and `wait` return when those in progress are finished.  Thread-safe.
        """
        self._stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave)

    def abort(self) -> None:
        """End without finishing the requests in progress: cancel their handlers.

            worker.abort()
            await worker.wait()

        Call it in the event loop.  Other workers get the requests.
        """
        self._stopping = True
        for connection in self._connections:
            connection.abort()

    def _leave(self) -> None:
        for connection in self._connections:
            connection.leave()

    async def wait(self) -> None:
        """Wait until everything has ended.

            worker.stop()
            await worker.wait()

        Without `stop`, it waits for ever.
        """
        for connection in self._connections:
            await connection.done.wait()
        if self._own_context is not None:
            await asyncio.to_thread(self._end_context)  # it waits until the last messages are out

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await self.wait()
