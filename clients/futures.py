"""The futures of `Client.submit`, and the client's own thread, which drives the connection while no caller waits."""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, Final, cast

import zmq

from ..mdp.errors import ClosedError
from .call import Call, Outcome
from .reply import Reply
from .sharing import Follower, SharedConnection

# The states of `concurrent.futures.Future`.
PENDING: Final = "PENDING"
CANCELLED: Final = "CANCELLED_AND_NOTIFIED"
FINISHED: Final = "FINISHED"

NAP_SECONDS: Final = 0.002
"""How long requests may remain unsent, and replies unread, while callers are expected to wait for replies."""
MAX_NAP_SECONDS: Final = 0.1

log = logging.getLogger("zmdp.client")


class ReplyFuture(Future[Reply]):
    """The future of a reply.  Cancelling it cancels the request.

    A thread that waits for its result drives the connection.  All futures of a client share one lock, and are settled
    without `Future`'s own methods, which take several times as long.
    """

    def __init__(self, thread: "FutureThread") -> None:
        # As `Future.__init__`, except for the lock.
        self._condition = thread.settling
        self._state = PENDING
        self._result: Reply | None = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self.follower: Follower | None = None
        self.call: Call | None = None
        self._thread = thread

    def __bool__(self) -> bool:
        return self._state != PENDING

    def put(self, outcome: Outcome) -> None:
        """Settle the future, under the lock of all futures.  The client's own thread runs its callbacks."""
        self._thread.promised -= 1
        if self._state != PENDING:
            return  # it was cancelled
        self._state = FINISHED
        if isinstance(outcome, Reply):
            self._result = outcome
            for waiter in self._waiters:
                waiter.add_result(self)
        else:
            self._exception = outcome
            for waiter in self._waiters:
                waiter.add_exception(self)
        if self._done_callbacks:
            self._thread.callbacks.append(self)

    def result(self, timeout: float | None = None) -> Reply:
        """Return the reply, waiting for it for at most `timeout` seconds."""
        if self._state == PENDING:
            self._thread.wait(self, timeout)
        if self._state == FINISHED and self._exception is None:
            return cast("Reply", self._result)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the request's error, or None, waiting for at most `timeout` seconds."""
        if self._state == PENDING:
            self._thread.wait(self, timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Cancel the request.  Return False if its outcome has arrived."""
        with self._condition:
            if self._state != PENDING:
                return self._state == CANCELLED
            self._state = CANCELLED
            for waiter in self._waiters:
                waiter.add_cancelled(self)
        self._thread.cancelled(self)
        self.run_callbacks()
        return True

    def run_callbacks(self) -> None:
        """Run the callbacks that were added before the future was done."""
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:  # even SystemExit: the other callbacks must run all the same
                log.exception("a future's callback failed")


class FutureThread:
    """The client's own thread: it runs the futures' callbacks, and drives the connection while no caller does.

    It starts to drive immediately, unless callers have recently waited for their futures.  Those callers are likely to
    wait again soon, and a caller that drives gets its replies without a thread switch.  So this thread first naps, and
    drives only if nothing has happened in the meantime.
    """

    def __init__(self, shared: SharedConnection) -> None:
        self.promised = 0
        """Futures that are neither settled nor cancelled."""
        self.callbacks: deque[ReplyFuture] = deque()
        """Futures whose callbacks are to be run."""
        self.settling = shared.settling
        self.asleep = False
        """The thread sleeps until it is notified."""
        self._shared = shared
        self._thread: threading.Thread | None = None
        self._gate: Any = None
        """A lock that the thread waits for while it naps."""
        self._ident: int | None = None
        self._must_leave = False
        """The thread must stop driving, because a caller wants to drive."""
        self._awaited = False
        """Callers have recently waited for their futures."""
        self._submitted = 0
        self._unsent_since = 0.0
        shared.on_idle = self._on_idle
        shared.on_delivery = self._on_delivery

    # ── what callers do ──────────────────────────────────────────────────────────────────────────────────────────────

    def submitted(self, future: ReplyFuture, call: Call) -> None:
        """Take charge of a future.  Under the lock.

        Its request is sent immediately if no other is outstanding, otherwise a moment later.
        """
        future.call = call
        self.promised += 1
        self._submitted += 1
        shared, session = self._shared, self._shared.session
        now = time.monotonic()
        if session.unsent == 1:
            self._unsent_since = now
        if shared.driver is not None:
            if shared.driver == threading.get_ident() or now - self._unsent_since < NAP_SECONDS:
                shared.wake()  # the driver sends everything that is unsent by then
            else:
                shared.send()
        elif session.outstanding == 1 or now - self._unsent_since >= NAP_SECONDS:
            shared.send()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zmdp-client", daemon=True)
            self._thread.start()
        elif self.asleep and shared.driver is None:
            self._notify()

    def wait(self, future: ReplyFuture, timeout: float | None) -> None:
        """Wait at most `timeout` seconds until `future` is settled."""
        shared = self._shared
        until = None if timeout is None else time.monotonic() + timeout
        try:
            with shared.lock:
                if self._ident != threading.get_ident():
                    self._awaited = True
                    if shared.driver is not None and shared.driver == self._ident:
                        self._must_leave = True
                        shared.wake()
                shared.wait(future.__bool__, until, future)
        except zmq.ZMQError as error:  # its context was terminated, for example
            self._fail(error)
        shared.cancel_unwanted()

    def cancelled(self, future: ReplyFuture) -> None:
        """Cancel the request of a future."""
        shared = self._shared
        with shared.lock:
            if future.follower is not None:
                future.follower.wake()
            call = future.call
            if call is not None and not call.ended and not shared.closed:
                self.promised -= 1
                shared.session.cancel(call)
                shared.send()
        shared.cancel_unwanted()

    def close(self) -> None:
        """End the thread after it has run the callbacks.  The client has been closed."""
        with self._shared.lock:
            self._notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _on_idle(self) -> None:
        if self.asleep and (self.promised or self._shared.session.unsent):
            self._notify()

    def _on_delivery(self) -> None:
        if self.callbacks and self._thread is not None:
            self._notify()

    def _notify(self) -> None:
        self.asleep = False
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.release()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        shared = self._shared
        self._ident = threading.get_ident()
        while True:
            try:
                with shared.lock:
                    self._serve()
            except Exception as error:
                log.exception("the client's connection failed")
                with shared.lock:
                    self._thread = None  # the next future starts another
                self._fail(error)
                self._run_callbacks()
                return
            shared.cancel_unwanted()
            self._run_callbacks()
            if shared.closed and not self.callbacks:
                return

    def _fail(self, error: Exception) -> None:
        self._shared.fail(lambda: ClosedError(f"the client's connection failed: {error}"))

    def _run_callbacks(self) -> None:
        while self.callbacks:
            self.callbacks.popleft().run_callbacks()

    def _serve(self) -> None:
        """Drive or wait until there are callbacks to run.  Under the lock."""
        shared, session = self._shared, self._shared.session
        nap, seen = NAP_SECONDS, -1
        while not self.callbacks and not shared.closed:
            idle = self._progress() == seen
            if shared.free_to_drive and self.promised and (idle or not self._awaited):
                self._awaited = self._must_leave = False
                shared.wait(self._stops_driving)
                nap, seen = NAP_SECONDS, -1
                continue
            if shared.driver is None and session.unsent and time.monotonic() - self._unsent_since >= NAP_SECONDS:
                shared.send()
            nap = 2 * nap if idle else NAP_SECONDS
            seen = self._progress()
            self.asleep = nap > NAP_SECONDS
            self._nap(nap if nap <= MAX_NAP_SECONDS else -1)
            if not self.asleep:
                nap = NAP_SECONDS
            self.asleep = False

    def _nap(self, seconds: float) -> None:
        """Release the lock until notified, for at most `seconds` (-1: no limit)."""
        gate = self._gate = threading.Lock()
        gate.acquire()
        self._shared.lock.release()
        try:
            self._shared.cancel_unwanted()  # a thread that could not get the lock has left its call to this one
            gate.acquire(timeout=seconds)
        finally:
            self._shared.lock.acquire()
            self._gate = None

    def _progress(self) -> int:
        """Return a number that changes whenever something is submitted or delivered."""
        return self._submitted + self._shared.deliveries

    def _stops_driving(self) -> bool:
        return self._must_leave or bool(self.callbacks) or not self.promised
