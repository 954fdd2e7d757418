"""The futures of `Client.submit`.

A `concurrent.futures.Future` has a lock, which whoever waits takes and whoever settles it takes too.  KeyboardInterrupt
may leave it locked, so the client's loop never settles one: it puts the outcome into a `ReplyFuture`, whose own methods
need no lock.
"""

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final
from warnings import warn

from ..mdp.errors import ZmdpError
from ..mdp.program import process
from .calls.reply import Reply
from .loop_thread import LoopThread

Callback = Callable[[Future[Any]], Any]
Convert = Callable[[Reply], Any]

EXIT_SECONDS: Final = 1.0
"""How long the interpreter waits, when it exits, until a client that was not closed has sent what it has to send."""
CANCELLED: Final = object()

log = logging.getLogger("zmdp.client")


class ReplyFuture(Future[Any]):
    """The future of a reply, or of the value that `convert` makes of it.  Cancelling it cancels the request.

    `wait` and `as_completed` need the state of a `Future`, which `__getattr__` makes for them: it costs more than all
    else that `Client.submit` does, and few need it.

    Args:
        threads: Those of the client.
        cancel: Cancels the request.  A method of what must not be collected before the future is done.
        convert: Makes the value of the reply.
    """

    def __init__(self, threads: "ClientThreads", cancel: Callback, convert: Convert | None = None) -> None:
        # Without super().__init__(): see above.
        self.call: Any = None
        """The request, once it has begun."""
        self._threads = threads
        self._cancel = cancel
        self._convert = convert
        self._outcomes: list[Any] = []
        """The first one counts: the reply, the error or `CANCELLED`."""
        self._gates: list[threading.Lock] = []
        """A lock for each thread that waits, which is released when the outcome is there."""
        self._called_when_done: list[Callback] = []

    def put(self, outcome: Any) -> None:
        """Take the reply or the error, unless the future was cancelled."""
        self._settle(outcome)

    def _settle(self, outcome: Any) -> bool:
        """Settle the future, unless it is settled.  Return whether this is its outcome."""
        outcomes = self._outcomes
        outcomes.append(outcome)
        if outcomes[0] is not outcome:  # another thread was first
            return False
        while self._gates:
            with suppress(IndexError):
                self._gates.pop().release()
        if self._called_when_done:
            self._run_callbacks()
        return True

    def _wait(self, timeout: float | None) -> Any:
        """Wait for the outcome, and return the value, the error or `CANCELLED`.  Raises `TimeoutError`."""
        if not self._outcomes:
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
            if not self._outcomes:  # else it came before the gate was there
                seconds = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
                if not gate.acquire(timeout=seconds):
                    with suppress(ValueError):
                        self._gates.remove(gate)
                    if not self._outcomes:
                        raise TimeoutError
        return self._found()

    def _found(self) -> Any:
        """Return the value, the error or `CANCELLED`.  The value is made here, not in the client's loop."""
        found = self._outcomes[0]
        if self._convert is None or not isinstance(found, Reply):
            return found
        if "_value" not in vars(self):
            try:
                value = self._convert(found)
            except ZmdpError as error:
                value = error.with_traceback(None)
            vars(self).setdefault("_value", value)
        return vars(self)["_value"]

    def __repr__(self) -> str:
        if not self.done():
            state = "pending"
        elif self.cancelled():
            state = "cancelled"
        else:
            found = self._found()
            state = f"finished {'raised' if isinstance(found, ZmdpError) else 'returned'} {type(found).__name__}"
        return f"<{type(self).__name__} at {id(self):#x} state={state}>"

    # ── a Future ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def done(self) -> bool:
        """Return whether the reply or an error has arrived, or the request was cancelled."""
        return bool(self._outcomes)

    def running(self) -> bool:
        """Return False: until its outcome is there, a request can be cancelled."""
        return False

    def cancelled(self) -> bool:
        """Return whether the request was cancelled."""
        return bool(self._outcomes) and self._outcomes[0] is CANCELLED

    def cancel(self) -> bool:
        """Cancel the request.  Return False if its outcome has arrived."""
        if self._settle(CANCELLED):
            self._cancel(self)
        return self.cancelled()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the reply and return it, or raise the request's error."""
        found = self._wait(timeout)
        if found is CANCELLED:
            raise CancelledError
        if isinstance(found, ZmdpError):
            try:
                raise found
            finally:
                del self, found  # the error's traceback refers to this frame, and both to the error
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the reply and return the request's error, or None."""
        found = self._wait(timeout)
        if found is CANCELLED:
            raise CancelledError
        return found if isinstance(found, ZmdpError) else None

    def add_done_callback(self, fn: Callback) -> None:
        """Call `fn` with the future in a thread of the client's, or immediately if the future is done."""
        if self.done():
            _call(fn, self)
            return
        self._called_when_done.append(fn)
        if self.cancelled():
            self._run_callbacks()
        elif self.done():
            self._threads.loop.call(self._run_callbacks)

    def _run_callbacks(self) -> None:
        """Run the callbacks: here, where the request was cancelled, or in the threads for them."""
        threads, callbacks = self._threads, self._called_when_done
        while callbacks:
            with suppress(IndexError):
                fn = callbacks.pop(0)
                if self.cancelled():
                    _call(fn, self)
                else:
                    (threads.mirrors if fn is _mirror else threads.callbacks).call(fn, self)

    def __getattr__(self, name: str) -> Any:
        """Make the state of a `Future`, of which an attribute was not found, and settle it as this future is."""
        own = vars(self)
        for each, value in own.setdefault("_state_made", vars(Future())).items():
            own.setdefault(each, value)  # the same whichever threads come here at once
        self.add_done_callback(_mirror)
        return super().__getattribute__(name)


def _mirror(future: Future[Any]) -> None:
    """Settle the state of a future as the future itself is."""
    assert isinstance(future, ReplyFuture)  # noqa: S101 - nobody else refers to this function
    found = future._found()
    with suppress(InvalidStateError):  # it is settled
        if found is CANCELLED:
            Future.cancel(future)
            Future.set_running_or_notify_cancel(future)
        elif isinstance(found, ZmdpError):
            Future.set_exception(future, found)
        else:
            Future.set_result(future, found)


def _call(fn: Callback, future: Future[Any]) -> None:
    try:
        fn(future)
    except BaseException:  # even SystemExit: the other callbacks must run all the same
        log.exception("a future's callback failed")


class CallingThread:
    """A thread that calls functions with futures, one after the other.  It is started with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Callback, Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, fn: Callback, future: Future[Any]) -> None:
        """Have the thread call `fn`.  Only the client's loop may do that."""
        self._queue.put((fn, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (found := self._queue.get()) is not None:
            _call(*found)
            del found  # while it waits for the next, it must not keep the last reply

    def stop(self) -> None:
        """End the thread, once it has called everything."""
        self._queue.put(None)

    def close(self) -> None:
        """End the thread, and wait for that unless this is the thread."""
        self.stop()
        if self._thread not in {None, threading.current_thread()}:
            self._thread.join()


class ClientThreads:
    """The threads of a client: its event loop, and two more, started when they are needed, for what may block.

    When `owner`, which must not be referred to by what runs in the loop, is collected, they end.

    Args:
        owner: What has to `close` them.
        name: The first part of the threads' names.
        endpoint: With whom the client speaks, for the warning that it was not closed.
        closing: See `LoopThread`.
        closed: Called when the loop has ended; both are also called if the thread cannot be started.
    """

    def __init__(
        self,
        owner: object,
        name: str,
        endpoint: str,
        *,
        closing: Callable[[], None],
        closed: Callable[[], None],
    ) -> None:
        try:
            self.loop = LoopThread(name, closing=closing, closed=closed)
        except BaseException:
            closing()
            closed()
            raise
        self.callbacks = CallingThread(f"{name}-callbacks")
        """Runs the users' callbacks."""
        self.mirrors = CallingThread(f"{name}-futures")
        """Settles what `concurrent.futures.wait` and its like wait for."""
        threads = (self.loop, self.callbacks, self.mirrors)
        self._finalizer = weakref.finalize(owner, _abandon, process.pid, endpoint, *threads)

    def close(self) -> None:
        """End the threads, and wait for that, except where this is one of them."""
        self._finalizer.detach()
        self.loop.stop()
        self.callbacks.close()
        self.mirrors.close()


def _abandon(pid: int, endpoint: str, loop: LoopThread, *others: CallingThread) -> None:
    """Close a client that nobody has closed, because it was collected or the interpreter exits."""
    if pid != process.pid:
        return  # its threads are those of the parent
    exiting = not threading.main_thread().is_alive()
    loop.stop(wait=exiting, timeout=EXIT_SECONDS)
    for each in others:
        each.stop()
    if not exiting:
        warn(f"a client of {endpoint} was not closed: use `with`, or close()", ResourceWarning, stacklevel=2)
