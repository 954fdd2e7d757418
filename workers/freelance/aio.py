"""A Freelance server for asyncio: its socket in an event loop, and the handlers of its requests."""

import asyncio
import logging
import time
from functools import partial

import zmq

from ...mdp.transport.polling import add_reader, remove_reader
from ...mdp.transport.sockets import Context
from ..aio_handling import AsyncHandler, HandlerCalls, HandlerTask
from ..contexts import RequestContexts
from ..handling import HandlerAdapter, Outcome
from ..request import Request
from .connection import FreelanceServerConnection, Listening
from .session import FreelanceServerSession

log = logging.getLogger("zmdp.worker")


class AsyncServer(FreelanceServerConnection):
    """A server's socket in an event loop, and the handlers of its requests."""

    stalled: bool = False
    """False: slow readers are not waited for."""

    def __init__(
        self,
        session: FreelanceServerSession,
        listening: Listening,
        context: Context,
        handler: AsyncHandler,
        adapter: HandlerAdapter,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(session, listening, context)
        self.done = asyncio.Event()
        """Set when the socket is closed and all handlers have ended."""
        self._calls = HandlerCalls(handler, adapter)
        self._loop = loop
        self._contexts = RequestContexts()
        self._tasks: set[asyncio.Task[None]] = set()
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin to receive."""
        for descriptor in self.descriptors:
            add_reader(self._loop, descriptor, self._turn)
        self._schedule()

    def leave(self) -> None:
        """Take no more requests, and end when those that have begun are finished."""
        if not self.closed:
            self.session.leave()
            self._turn()

    def abort(self) -> None:
        """End immediately: cancel the handlers, and close the socket."""
        if not self.closed:
            self.session.leave()
            self._end()
        for task in list(self._tasks):
            task.cancel()

    def _schedule(self) -> None:
        if self._soon is None and not self.closed:
            self._soon = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Receive, start what has arrived, and send."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self.closed:
            return
        try:
            more = self.step(time.monotonic())
        except zmq.ContextTerminated:
            log.warning("%s: the ZeroMQ context was terminated", self.session.service.decode())
            self._end()
            return
        while (request := self.session.begin()) is not None:
            task = HandlerTask(self._calls.handle(request, self), loop=self._loop, context=self._contexts.new())
            self._tasks.add(task)
            task.add_done_callback(partial(self._task_ended, request))
        if more:
            self._schedule()
        elif self.session.ended:
            self._end()
        elif self._timer is None and (due := self.session.deadline()) is not None:
            self._timer = self._loop.call_later(due - time.monotonic(), self._timer_fired)

    def _task_ended(self, request: Request, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it began
            self.session.abandon(request)
        if self.closed and not self._tasks:
            self.done.set()
        self._schedule()

    def _timer_fired(self) -> None:
        self._timer = None
        self._turn()

    def _end(self) -> None:
        for descriptor in self.descriptors:
            remove_reader(self._loop, descriptor)
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self.close()
        if not self._tasks:
            self.done.set()

    def handled(self, request: Request, outcome: Outcome | None) -> bool:
        """End a request whose handler has ended; the outcome is None if its task was cancelled.

        Return False: each request has a task of its own.
        """
        if outcome is not None:
            self.session.finish(request, outcome)
        return False

    def partial(self, request: Request, frames: list[bytes]) -> None:
        """Keep what a handler has yielded for the reply."""
        self.session.partial(request, frames)
