"""A Freelance server for threads: they run the handlers, and an I/O thread receives."""

import logging
import math
import threading
import time
from collections.abc import Sequence

import zmq

from ...mdp.transport.multipart import milliseconds
from ...mdp.transport.polling import READABLE, new_poller
from ...mdp.transport.sockets import Context
from ...mdp.transport.wake import Wake
from ..handling import Outcome
from ..request import Request
from .connection import FreelanceServerConnection, Listening
from .session import FreelanceServerSession

log = logging.getLogger("zmdp.worker")


class ThreadedServer(FreelanceServerConnection):
    """A server's socket, the threads that run handlers, and an I/O thread that receives, under one lock."""

    def __init__(self, session: FreelanceServerSession, listening: Listening, context: Context) -> None:
        self.stopping = False
        self.watched = False
        """Whether the I/O thread has begun."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._wake = Wake()
        self._poller = new_poller()
        self._poller.register(self._wake.descriptor, READABLE)
        try:
            super().__init__(session, listening, context)
        except BaseException:
            self.close_descriptors()
            raise
        for descriptor in self.descriptors:
            self._poller.register(descriptor, READABLE)

    def receive(self, until: float = math.inf) -> Request | None:
        """Wait for a request.  Return None at the time `until`, or when no more requests will arrive."""
        with self._lock:
            while True:
                request = None if self.stopping else self.session.begin()
                if request is not None:
                    return request
                left = until - time.monotonic()
                if left <= 0 or self.stopping or self.closed:
                    return None
                self._idle.wait(None if left == math.inf else left)

    def partial(self, request: Request, body: Sequence[bytes]) -> bool:
        """Add a PARTIAL to the reply, which is sent whole.  Return False if the reply is no longer wanted."""
        with self._lock:
            return self.session.partial(request, body)

    def end(self, request: Request, outcome: Outcome) -> None:
        """Send the reply to `request`."""
        with self._lock:
            if not self.closed:
                self.session.finish(request, outcome)
                if self._step() or self.session.ended:
                    self.wake()

    def fail(self, request: Request, error: BaseException) -> None:
        """End `request` after an error in our own code."""
        with self._lock:
            if not self.closed:
                self.crashed(request, error)
        self.wake()

    def abandon(self, request: Request) -> None:
        """End `request` without a reply, so that its client tries another server."""
        with self._lock:
            self.session.abandon(request)
        self.wake()

    def watch(self) -> None:
        """Run the I/O thread, until the last request has ended after `stop`."""
        with self._lock:
            self.watched = True
            try:
                while not self.session.ended:
                    if self.stopping and not self.session.leaving:
                        self.session.leave()
                        self._idle.notify_all()
                    more = self._step()
                    if not self.session.ended:
                        due = self.session.deadline()
                        self._poll(0.0 if more else math.inf if due is None else due - time.monotonic())
            except zmq.ContextTerminated:
                log.warning("%s: the ZeroMQ context was terminated", self.session.service.decode())
            except Exception:
                log.exception("%s: unexpected error in the I/O thread: stopping", self.session.service.decode())
            finally:
                self.stopping = True
                self.close()
                self._idle.notify_all()

    def stop(self) -> None:
        """Take no more requests, and end when those that have begun are finished.  Safe in a signal handler."""
        self.stopping = True
        self.wake()

    def wake(self) -> None:
        """Interrupt the I/O thread while it waits for messages."""
        self._wake.wake()

    def turning(self) -> bool:
        """Ask the I/O thread for a sign of life.  Return whether it has waited for messages since the last call."""
        return self._wake.answered()

    def abort(self) -> None:
        """Close the socket immediately."""
        with self._lock:
            self.stopping = True
            self.close(0)
            self._idle.notify_all()

    def close_descriptors(self) -> None:
        """Close the last descriptors, after all threads have ended."""
        self._wake.close()

    def _step(self) -> bool:
        more = self.step(time.monotonic())
        self._idle.notify(self.session.waiting)
        return more

    def _poll(self, seconds: float) -> None:
        """Wait for messages with the lock released."""
        self._lock.release()
        try:
            ready = self._poller.poll(milliseconds(seconds))
        finally:
            self._lock.acquire()
        if any(descriptor == self._wake.descriptor for descriptor, _ in ready):
            self._wake.clear()
