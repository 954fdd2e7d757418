"""The worker that offers services: in one process, over one ZeroMQ context."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Unpack

import zmq

from ...mdp.errors import ClosedError, SettingError
from ...mdp.program.arguments import spelling_hint
from ...mdp.transport.sockets import end, own_context
from ...mdp.wire.options import MAX_ABOUT, encode_about
from ..aio import AsyncWorker
from ..mdworker import Worker
from ..session.request import Request
from ..settings import WorkerArguments
from .handlers import handler_of
from .lifespan import Lifespans
from .offered import AnyOffered, ServiceGroup

log = logging.getLogger("zmdp.worker")

_OF_WORKERS: Final = ("concurrency", "handler_timeout", "limit", "per_group")
"""The settings of a service that are those of its worker."""
BATCHES = 2
"""How many batches of requests a service of batches holds: one that is worked on, and one that fills."""


class ServicesWorker:
    """Offers services: plain functions in threads, coroutine functions in the event loop, each over its own connection.

        worker = services.worker()
        await worker.run()                              # or, beside other tasks:
        await worker.start()
        worker.stop()
        await worker.wait()

    Args:
        services: The services.
        broker: Endpoint of the broker, or several, as for `Worker`.
        only: The names of the services to offer; by default all.
        arguments: Those of `Worker`; `concurrency` and `handler_timeout` are for services that do not set their own.

    Raises:
        SettingError: There are no services, `only` names another, or a setting is invalid.
    """

    def __init__(
        self,
        services: ServiceGroup,
        *,
        broker: str | Sequence[str] | None = None,
        only: Sequence[str] = (),
        **arguments: Unpack[WorkerArguments],
    ) -> None:
        self.offered = _chosen(list(services), only)
        self._lifespans = Lifespans(services)
        self._context: zmq.Context[zmq.Socket[bytes]] = own_context()
        self.workers = [self._worker(each, broker, arguments) for each in self.offered]
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = False

    def _worker(
        self, offered: AnyOffered, broker: str | Sequence[str] | None, arguments: WorkerArguments
    ) -> Worker | AsyncWorker:
        handler = handler_of(offered, self._lifespans.state(offered.group))
        own: dict[str, Any] = {"context": self._context, "about": _about(offered)}
        if offered.batch is not None:
            own["concurrency"] = BATCHES * offered.batch[0]
        own |= {name: value for name, value in offered.settings.items() if name in _OF_WORKERS and value is not None}
        kind = AsyncWorker if offered.runs_async else Worker
        worker: Worker | AsyncWorker = kind(offered.name, handler, broker=broker, **{**arguments, **own})
        return worker

    async def run(self) -> None:
        """Serve until `stop` is called or this task is cancelled, then finish the requests in progress."""
        await self.start()
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.stop()
            await self.wait()
            raise

    async def start(self) -> None:
        """Enter the lifespan, and begin to serve.  Call `stop` and `wait` afterwards.

        Raises:
            ClosedError: The worker was started before.
            Exception: What the lifespan raises.
        """
        if self._started:
            raise ClosedError("a worker of services can be started only once")
        self._started = True
        self._loop = asyncio.get_running_loop()
        try:
            await self._lifespans.enter()
        except BaseException:
            end(self._context)
            raise
        try:
            for worker in self.workers:
                worker.start()
        except BaseException:
            self.stop()
            await self.wait()
            raise

    def stop(self) -> None:
        """Take no more requests; `run` and `wait` return when those in progress are finished.  Thread-safe."""
        for worker in self.workers:
            worker.stop()
        if self._loop is None:  # it has not been started, and ends as soon as it is
            self._stopping.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def wait(self) -> None:
        """Wait until everything has ended after `stop`, and leave the lifespan."""
        await self._stopping.wait()
        for worker in self.workers:
            if not worker.started:
                continue
            if isinstance(worker, AsyncWorker):
                await worker.wait()
            else:
                await asyncio.to_thread(worker.wait)
        try:
            await self._lifespans.leave()
        finally:
            await asyncio.to_thread(end, self._context)  # it waits until the last messages are out

    @property
    def registered(self) -> bool:
        """Whether the broker knows all the workers."""
        return all(worker.registered for worker in self.workers)

    @property
    def served(self) -> int:
        """How many requests have ended."""
        return sum(worker.served for worker in self.workers)

    @property
    def requests(self) -> list[Request]:
        """The requests that it holds: those in progress, and those that have not started."""
        return [request for worker in self.workers for request in worker.requests]


def _about(offered: AnyOffered) -> dict[str, Any]:
    """Return what callers are told about a service: its types only if there is room for their schemas."""
    about = offered.about()
    option = about.as_option()
    if (size := len(encode_about(option))) <= MAX_ABOUT:
        return option
    text = "%s: callers are not told its types: as JSON schemas they have %d bytes, and the limit is %d"
    log.warning(text, offered.name, size, MAX_ABOUT)
    return about.as_option(schemas=False)


def _chosen(offered: list[AnyOffered], only: Sequence[str]) -> list[AnyOffered]:
    if not offered:
        raise SettingError("there are no services: declare one with @services.service(NAME)")
    names = [each.name for each in offered]
    for name in only:
        if name not in names:
            raise SettingError(f"there is no service {name!r}: {spelling_hint(name, names)}")
    return [each for each in offered if not only or each.name in only]
