"""The futures of `Client.submit`, and the two threads that serve them."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from ..mdp.errors import ClosedError, ZmdpError
from .call import Call, Outcome
from .dialog import Ask
from .reply import Reply
from .sharing import SharedConnection, Waiter

Callback = Callable[[Future[Any]], Any]
Convert = Callable[[Reply], Any]

PENDING: Final = object()

log = logging.getLogger("zmdp.client")


class ReplyFuture(Future[Any]):
    """The future of a reply, or of the value that `convert` makes of it.  Cancelling it cancels the request.

    The state of a `Future`, a condition among it, costs more than all else that `Client.submit` does.  So it is created
    when it is needed: not for a future that is done before anyone waits for it.
    """

    def __init__(self, futures: "Futures", convert: Convert | None) -> None:  # without super(): see `__getattr__`
        self.call: Call | None = None
        self._futures = futures
        self._convert = convert
        self._outcome: Any = PENDING
        """The value or the error, if it came before there was a state."""
        self._has_state = False
        self._notified = False
        """Whether those that wait for several futures know that it was cancelled."""

    def __getattr__(self, name: str) -> Any:
        """Create the state, of which an attribute was not found."""
        with self._futures.state_lock:
            while not self._has_state:
                outcome = self._outcome
                future: Future[Any] = Future()
                if outcome is not PENDING:
                    _settle(future, outcome)
                own, state = vars(self), {**vars(future), "_has_state": True}
                # A signal's handler may have used this future meanwhile, or what the garbage collector has freed.
                if not self._has_state and self._outcome is outcome:
                    own.update(state)  # at once: Ctrl-C leaves all of it or nothing
        return super().__getattribute__(name)

    def put(self, outcome: Outcome) -> bool:
        """Settle the future, unless it was cancelled.  Return False: see `Receiver`."""
        self._futures.pending.discard(self)
        found: Any = outcome
        if self._convert is not None and isinstance(outcome, Reply):
            try:
                found = self._convert(outcome)
            except ZmdpError as error:
                found = error
        with self._futures.state_lock:
            if not self._has_state:
                self._outcome = found
                return False
        try:
            _settle(self, found)
        except InvalidStateError:  # it was cancelled, or Ctrl-C interrupted the delivery, which is repeated
            if self.cancelled():
                self.notify_cancelled()
        return False

    def notify_cancelled(self) -> None:
        """Tell `wait` and `as_completed` that the future was cancelled, once."""
        if not self._notified:
            self._notified = True
            self.set_running_or_notify_cancel()

    def done(self) -> bool:
        """Return whether the reply or an error has arrived, or the request was cancelled."""
        return self._outcome is not PENDING or (self._has_state and super().done())

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the reply and return it, or raise the request's error."""
        outcome = self._outcome
        try:
            return super().result(timeout) if outcome is PENDING or isinstance(outcome, ZmdpError) else outcome
        finally:
            del self, outcome  # an error's traceback refers to this frame, and both to the error

    def cancel(self) -> bool:
        """Cancel the request.  Return False if its outcome has arrived."""
        cancelled = super().cancel()
        if cancelled:
            self._futures.cancelled(self)
        return cancelled

    def add_done_callback(self, fn: Callback) -> None:
        """Call `fn` with the future in a thread of the client's, or immediately if the future is done."""
        if self.done():
            super().add_done_callback(fn)
        else:
            super().add_done_callback(partial(self._futures.call_back, fn))


def _settle(future: Future[Any], found: Any) -> None:
    if isinstance(found, ZmdpError):
        future.set_exception(found)
    else:
        future.set_result(found)


class Futures(Waiter):
    """The futures that are pending, and two threads, which are started with the first.

    One drives the connection while futures are pending, or waits until it can.  The other one runs their callbacks, so
    that a callback may block, and wait for other replies.
    """

    def __init__(self, shared: SharedConnection) -> None:
        super().__init__()
        self.pending: set[ReplyFuture] = set()
        """Futures that are neither settled nor cancelled."""
        self.state_lock = threading.RLock()
        """Held while a future gets a state.  One that a thread may hold twice, because what the garbage collector frees
        may use futures."""
        self._callbacks: SimpleQueue[tuple[Callback, Future[Any]] | None] = SimpleQueue()
        """What is to be called; None ends the thread."""
        self._shared = shared
        self._threads: list[threading.Thread] = []

    def __bool__(self) -> bool:
        """Return whether no future needs that the connection is driven."""
        return not self.pending

    def submit(
        self, ask: Ask, headers: Mapping[str, str] | None, timeout: float, convert: Convert | None = None
    ) -> ReplyFuture:
        """Begin a request and return its future."""
        if len(self._threads) < 2:
            self._start()  # before anything is asked, because there may be too many threads
        future = ReplyFuture(self, convert)
        self.pending.add(future)
        try:
            self._shared.begin(future, ask, headers, timeout=timeout)
        except BaseException:
            self.pending.discard(future)
            raise
        self.wake()
        return future

    def _start(self) -> None:
        threads = [("zmdp-client-io", self._drive), ("zmdp-client", self._run_callbacks)]
        with self._shared.lock:
            if not self._shared.closed:
                for name, target in threads[len(self._threads) :]:
                    thread = threading.Thread(target=target, name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def cancelled(self, future: ReplyFuture) -> None:
        """Cancel the request of a future, unless another thread has done so."""
        shared, call = self._shared, future.call
        with shared.lock:
            if call is not None and not call.ended:
                shared.session.cancel(call)
                self.pending.discard(future)
                future.notify_cancelled()
        shared.send()

    def call_back(self, callback: Callback, future: Future[Any]) -> None:
        """Run a callback of a future that is done."""
        if future.cancelled():
            callback(future)  # in the thread that has cancelled it
        else:
            self._callbacks.put((callback, future))

    def close(self) -> None:
        """End the threads, the second after it has run all callbacks.  The connection has been closed."""
        self.wake()
        self._callbacks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # ── the threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _drive(self) -> None:
        shared = self._shared
        while not shared.closed:
            if not self.pending:
                self.sleep()
                continue
            try:
                shared.wait(self)
            except Exception as error:
                log.exception("the client's connection failed")
                shared.fail(partial(ClosedError, f"the client's connection failed: {error}"))

    def _run_callbacks(self) -> None:
        while (found := self._callbacks.get()) is not None:
            callback, future = found
            try:
                callback(future)
            except BaseException:  # even SystemExit: the other callbacks must run all the same
                log.exception("a future's callback failed")
            del found, callback, future  # while it waits for the next, it must not keep the last reply
