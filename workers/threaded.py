"""A worker connection served by threads in the leader–followers pattern."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Final

from ..mdp.program.logs import fields_of
from ..mdp.security.keys import ClientKeys
from ..mdp.transport.polling import READABLE, Wake, milliseconds, new_poller
from ..mdp.transport.sockets import Context
from .connection import FLUSH_SECONDS, SEND_RETRY_SECONDS, WorkerConnection
from .handling import Failed
from .session.request import Request
from .session.session import WorkerSession

TAKEOVER_SECONDS: Final = 0.001
"""Time without progress after which the I/O thread takes over."""
IDLE_TURNS: Final = 4
"""How often this time must pass, while a thread waits for messages, until the I/O thread waits to be woken by the next
request.  Waking it costs as much as several of its turns, and delays the request."""

log = logging.getLogger("zmdp.worker")


class ThreadedConnection(WorkerConnection):
    """A connection, the threads that run handlers, and an I/O thread, under one lock.

    One idle handler thread *leads*: it waits for messages, and itself handles the request that arrives, without handing
    it to another thread.  The other idle threads follow.  While handlers are fast, no follower takes the lead from a
    thread that is handling a request: the two would only compete for the interpreter.  If the leader does not return
    within `TAKEOVER_SECONDS`, the I/O thread leads: it keeps the connection alive, and wakes followers for waiting
    requests.  It takes the lock only to lead, so that handler threads need not wait for it.
    """

    def __init__(
        self,
        session: WorkerSession,
        context: Context,
        keys: ClientKeys | None = None,
        level: int = logging.WARNING,
    ) -> None:
        super().__init__(session, context, keys, level)
        self.stopping = False
        self.watched = False
        """Whether the I/O thread has begun."""
        self._lock = threading.Lock()
        self._followers = threading.Condition(self._lock)
        self._following = 0
        self._io_waits = False  # until a handler begins, which then releases the gate
        self._io_gate = threading.Lock()
        self._io_gate.acquire()
        self._io_leads = False
        self._leads = False  # whether a handler thread leads
        self._progress = 0  # counts requests begun and ended, PARTIALs, and turns of a leader
        self._wake = Wake()
        self._poller = new_poller()
        self._poller.register(self._wake.descriptor, READABLE)
        try:
            self.open()
        except BaseException:
            self._wake.close()
            raise

    def opened(self, descriptor: int) -> None:
        """Watch a new descriptor."""
        self._poller.register(descriptor, READABLE)
        self.wake()  # a thread that is already waiting does not notice it

    def closing(self, descriptor: int) -> None:
        """Stop watching a descriptor that is about to be closed."""
        self._poller.unregister(descriptor)

    # ── handler threads ──────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, until: float = math.inf) -> Request | None:
        """Wait for a request.  Return None at the time `until`, or when no more requests will arrive."""
        with self._lock:
            try:
                while True:
                    now = time.monotonic()
                    try:
                        request = None if self.stopping else self._begin(now)
                        if request is not None:
                            return request
                        if now >= until or self.stopping or self.session.state.leaving:
                            self._step(now)
                            return None
                        if self._leads or self._io_leads:
                            self._follow(until - now)
                        else:
                            self._lead(min(self.due(), until) - now)
                    except Exception as error:  # noqa: BLE001 - whatever it is, no request may be held in silence
                        self.reset(error, now)
            finally:
                self._notify_io()  # also after Ctrl-C, which is raised here if this is the main thread

    def partial(self, request: Request, body: Sequence[bytes]) -> bool:
        """Send a PARTIAL, and wait if the broker does not keep up.  Return False if the request was lost."""
        with self._lock:
            now = time.monotonic()
            accepted = self.session.partial(request, body, now)
            self._progress += 1
            if now - self.flushed_at >= FLUSH_SECONDS:  # else the next one sends it, or the I/O thread
                self._step(now)
        while accepted and self.stalled:
            time.sleep(SEND_RETRY_SECONDS)
            with self._lock:
                self._step(time.monotonic())
        return accepted

    def end(self, request: Request, outcome: list[bytes] | Failed) -> Request | None:
        """End `request`, and return the next one.  Its reply may wait a moment for others, to be sent in one batch."""
        with self._lock:
            now = time.monotonic()
            self.finish(request, outcome, now)
            self._progress += 1
            if not self.session.waiting or now - self.flushed_at >= FLUSH_SECONDS:
                self._step(now)
            return self._begin(now) if self.session.waiting and not self.stopping else None

    def fail(self, request: Request, error: BaseException) -> None:
        """End `request` after an error in our own code."""
        with self._lock:
            self.crashed(request, error)
            self._step(time.monotonic())

    def abandon(self, request: Request) -> None:
        """Disconnect without a reply to `request`, so that another worker gets it."""
        with self._lock:
            now = time.monotonic()
            self.disconnect(now)
            self.session.abandon(request, now)
            self._step(now)

    def _begin(self, now: float) -> Request | None:
        session = self.session
        request = session.begin(now)
        if request is not None:
            self._progress += 1
            if self._following and not session.controller.handlers_are_short:
                self._followers.notify()  # to begin the next request, or to lead
            self._notify_io()
        return request

    def _notify_io(self) -> None:
        """Wake the I/O thread: handler threads no longer lead."""
        if self._io_waits:
            self._io_waits = False
            self._io_gate.release()

    def _follow(self, seconds: float) -> None:
        if self._io_leads:
            self.wake()  # let a handler thread lead instead
        self._following += 1
        try:
            self._followers.wait(None if seconds == math.inf else max(0.0, seconds))
        finally:
            self._following -= 1

    def _lead(self, seconds: float) -> None:
        self._progress += 1
        self._leads = True
        try:
            if seconds > 0 and not self.session.unsent:
                self._poll(seconds)
                if self.receive_requests(time.monotonic()):
                    return
            self._step(time.monotonic())
        finally:
            self._leads = False

    # ── the I/O thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def watch(self) -> None:
        """Run the I/O thread: lead while no handler thread does, until the connection has ended."""
        with self._lock:
            self.watched = True
            progress = -1
            while not self.ended:
                try:
                    if self._progress == progress and not self._leads:
                        self._stand_in()
                    else:
                        self._io_waits = self._progress == progress
                        progress = self._await_standstill()
                except Exception as error:  # noqa: BLE001 - whatever it is, no request may be held in silence
                    self.reset(error, time.monotonic())

    def _await_standstill(self) -> int:
        """Sleep with the lock released until there is no progress.  Return its count."""
        waits = self._io_waits
        self._lock.release()
        try:
            if waits:
                self._io_gate.acquire()
            progress, turns = self._progress, 0
            while turns < (IDLE_TURNS if self._leads else 1):
                time.sleep(TAKEOVER_SECONDS)
                turns += 1
                if self._progress != progress:
                    progress, turns = self._progress, 0
            return progress
        finally:
            self._lock.acquire()

    def _stand_in(self) -> None:
        now = time.monotonic()
        self._step(now)
        if self.ended:
            return
        due = self.due()
        if self._following:
            self._followers.notify()  # to begin a waiting request, or to lead
            if not self.session.waiting:
                self._progress += 1  # gives the follower as long as a handler
                return
            due = min(due, now + TAKEOVER_SECONDS)
        self._io_leads = True
        try:
            self._poll(due - now)
        finally:
            self._io_leads = False
            self._followers.notify()

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Take no more requests, and end when those in progress are finished.  Safe in a signal handler."""
        self.stopping = True
        self.wake()

    def wake(self) -> None:
        """Interrupt the thread that is waiting for messages."""
        self._wake.wake()

    def turning(self) -> bool:
        """Ask the threads for a sign of life.  Return whether one has waited for messages since the last call."""
        return self._wake.answered()

    def abort(self) -> None:
        """Close the socket without telling the broker."""
        with self._lock:
            self.session.close("closed", time.monotonic())
            self.close()
            self._release()

    def close_descriptors(self) -> None:
        """Close the last descriptors, after all threads have ended."""
        self._wake.close()

    def _poll(self, seconds: float) -> None:
        """Wait for messages with the lock released."""
        self._lock.release()
        try:
            ready = self._poller.poll(milliseconds(seconds))
        finally:
            self._lock.acquire()
        for descriptor, _ in ready:
            if descriptor == self._wake.descriptor:
                self._wake.clear()

    def _step(self, now: float) -> None:
        if self.stopping and not self.session.state.leaving:
            self.disconnect(now)
            self._release()
        self.step(now)
        if self._socket is None and self.ended:
            self._release()

    def stuck(self, request: Request) -> None:
        """Log that a handler has exceeded its time."""
        log.error(
            "%s: a handler has neither returned nor yielded for %g s: its request goes to another worker, and its "
            "thread takes no more until it returns",
            request.service, self.session.settings.handler_timeout, extra=fields_of(request),
        )  # fmt: skip

    def _release(self) -> None:
        """Wake all threads: no more requests will come, or the connection has ended."""
        self._followers.notify_all()
        self._notify_io()
        self.wake()
