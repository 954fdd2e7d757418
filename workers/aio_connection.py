"""A connection of an asyncio worker: its descriptors in an event loop, and the tasks of its handlers."""

import asyncio
import logging
import math
from time import monotonic

from ..mdp.errors import RequestCancelled
from ..mdp.program.logs import fields_of
from ..mdp.security.keys import ClientKeys
from ..mdp.transport.polling import add_reader, remove_reader
from ..mdp.transport.sockets import Context
from .aio_handling import EAGER, MAX_TURN_SECONDS, BlockingWatch, HandlerCalls, HandlerTask, begin_task
from .connection import FLUSH_SECONDS, WorkerConnection
from .handling import Outcome, RequestContexts, failed
from .session.request import Request
from .session.session import WorkerSession

log = logging.getLogger("zmdp.worker")


class AsyncConnection(WorkerConnection):
    """A connection in an event loop, and the handlers of the requests that it holds."""

    def __init__(
        self,
        session: WorkerSession,
        context: Context,
        keys: ClientKeys | None,
        level: int,
        calls: HandlerCalls,
        loop: asyncio.AbstractEventLoop,
        watch: BlockingWatch,
    ) -> None:
        super().__init__(session, context, keys, level)
        self.done = asyncio.Event()
        """Set when the connection and all handlers have ended."""
        self._calls = calls
        self._loop = loop
        self._contexts = RequestContexts()
        self._watch = watch
        self._running: dict[int, HandlerTask] = {}
        """The tasks of handlers that wait for something, by the id() of their requests."""
        self._latest: Request | None = None
        """The request of the latest handler to begin, unless that has ended or is known to wait."""
        self._latest_task: HandlerTask | None = None
        """The task of that handler."""
        self._handlers_wait = False
        """Whether the latest handler had to wait."""
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    def opened(self, descriptor: int) -> None:
        """Watch a new descriptor."""
        add_reader(self._loop, descriptor, self._turn)
        self._schedule()

    def closing(self, descriptor: int) -> None:
        """Stop watching a descriptor that is about to be closed."""
        remove_reader(self._loop, descriptor)

    def leave(self) -> None:
        """Take no more requests, and end when those in progress are finished."""
        self.disconnect(monotonic())
        self._turn()

    def abort(self) -> None:
        """End immediately: cancel the handlers, and close the socket without telling the broker."""
        now = monotonic()
        self._note_waiting()
        self.session.close("closed", now)
        self.tell(now)
        self.close()
        self._settle()

    # ── turns of the event loop ──────────────────────────────────────────────────────────────────────────────────────

    def _schedule(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._turn, context=self._contexts.base)

    def _turn(self) -> None:
        """Send, receive, and begin what has arrived, until nothing is left to do or the turn is over."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        now = monotonic()
        until = now + MAX_TURN_SECONDS
        try:
            while True:
                self._note_waiting()
                self.step(now)
                waiting = self.session.to_begin
                if not waiting:
                    break
                self._begin(waiting)
                now = monotonic()
                if not EAGER or now >= until:
                    self._schedule()  # that turn comes after the first step of the tasks
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is, no request may be held in silence
            self.reset(error, now)
        self._settle()

    def _begin(self, waiting: int) -> None:
        """Begin requests: one task handles them in turn, as long as their handlers end without waiting for anything.

        A task for each would take longer than most handlers do.  If the latest handler had to wait, each request gets
        a task at once.
        """
        self._watch.note()
        try:
            for _ in range(waiting if self._handlers_wait else 1):
                begin_task(self._calls.handle_all(self, self._contexts), self._loop, self._contexts.new())
        except Exception as error:  # noqa: BLE001 - the callers get it
            while (request := self._next(monotonic())) is not None:
                self.crashed(request, error)

    def begin_in(self, task: HandlerTask, until: float) -> Request | None:
        """Return the next request for a handler, which `task` is about to call; None from the time `until` on."""
        now = monotonic()
        request = None if now >= until else self._next(now)
        if request is not None:
            self._note_waiting()
            self._latest, self._latest_task = request, task
        return request

    def _next(self, now: float) -> Request | None:
        """Return the next request to begin."""
        try:
            if now - self.flushed_at >= FLUSH_SECONDS:
                self.flush(now)
            return self.session.begin(now)
        except Exception as error:  # noqa: BLE001 - as in a turn
            self.reset(error, now)
            return None

    def _note_waiting(self) -> None:
        """Note that the latest handler waits, if it has begun and has not ended."""
        request, task = self._latest, self._latest_task
        if request is not None and task is not None:
            if not task.done():  # else it was cancelled, although its handler has not waited
                self._running[id(request)] = task
            self._latest, self._latest_task, self._handlers_wait = None, None, True

    def cancelled(self, request: Request) -> None:
        """Cancel the task that handles `request`."""
        task = self._running.get(id(request))
        if task is not None and not task.cancelling():  # only once: it may be cleaning up
            task.cancel()

    def stuck(self, request: Request) -> None:
        """Log that a handler has exceeded its time, and cancel it."""
        log.error(
            "%s: a handler has neither returned nor yielded for %g s: cancelling it; its request goes to another "
            "worker",
            request.service, self.session.settings.handler_timeout, extra=fields_of(request),
        )  # fmt: skip
        self.cancelled(request)

    def _settle(self) -> None:
        """Set the timer, or end if there is nothing left to do."""
        if self.ended and not self._running:
            self._watch.close()
            if self._timer is not None:
                self._timer.cancel()
            self.done.set()
            return
        due = self.due()
        if due >= self._wakes_at or due == math.inf:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = due
        self._timer = self._loop.call_later(max(0.0, due - monotonic()), self._wake, context=self._contexts.base)

    def _wake(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        self._turn()

    # ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def handled(self, request: Request, outcome: Outcome | None) -> bool:
        """End a request whose handler has ended; the outcome is None if its task was cancelled.

        Return whether its task may handle another request, because the handler has not waited for anything.
        """
        now = monotonic()
        waited = self._forget(request)
        if outcome is not None:
            self.finish(request, outcome, now)
        elif request.cancelled:
            self.finish(request, failed(RequestCancelled("cancelled"), request), now)
        else:
            # The handler exceeded its time, or the program is being shut down.
            self.session.abandon(request, now, ended=True)
        if waited:
            if now - self.flushed_at >= FLUSH_SECONDS:  # else with the replies of other handlers
                self.flush(now)
            self._schedule()
        return not waited

    def crashed(self, request: Request, error: BaseException) -> None:
        """End a request after an error in our own code."""
        self._forget(request)
        super().crashed(request, error)
        self._schedule()

    def _forget(self, request: Request) -> bool:
        """Forget the task of a handler that has ended.  Return whether it has waited for something."""
        if self._latest is request:
            self._latest, self._latest_task, self._handlers_wait = None, None, False
            return False
        self._running.pop(id(request), None)
        return True

    def partial(self, request: Request, frames: list[bytes]) -> None:
        """Send what a handler has yielded, as a PARTIAL."""
        self.session.partial(request, frames, monotonic())
        self._schedule()
