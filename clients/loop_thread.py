"""An event loop in a thread of its own, in which a client for threads makes its requests.

KeyboardInterrupt is raised in the main thread only, between any two bytecodes of what runs there.  So the other threads
share no lock with it: work is handed over in a deque, and its outcome comes back in a queue of its own.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ..mdp.transport.polling import Wake, add_reader, remove_reader
from .calls.reply import closed_error

T = TypeVar("T")

log = logging.getLogger("zmdp.client")


class LoopThread:
    """A daemon thread with an event loop, which ends with `stop`.

    Args:
        name: The thread's name.
        closing: Called in the loop before it ends; work that is handed over later is done too, and must fail.
        closed: Called in the thread when the loop has ended.
    """

    def __init__(
        self,
        name: str,
        *,
        closing: Callable[[], None],
        closed: Callable[[], None],
    ) -> None:
        self._closing = closing
        self._closed = closed
        self._work: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._turn = 0
        """How often the loop has done all work; it counts before it looks once more.  Only its thread does that."""
        self._woken_in = -1
        """The turn in which the loop was last woken: once in each is enough.  If it is woken for all work, a request of
        `Client.submit` takes 12 % longer.  A value that is too low only costs time."""
        self._ended = False
        """The loop has ended: threads that hand over work do it themselves."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        try:
            self._wake = Wake()
        except BaseException:
            self._loop.close()
            raise
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ── in any thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the loop call a function, after all that was handed over before.  Never waits."""
        self._work.append((function, arguments))
        turn = self._turn
        if self._ended:
            self._do_work()
        elif self._woken_in != turn:
            self._wake.wake()
            self._woken_in = turn  # not earlier: Ctrl-C may come in between

    def begin(self, receiver: "TaskReceiver", operation: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Run a coroutine in the loop, and put its result or its error into `receiver`."""
        self.call(self._begin, receiver, operation, args)

    def cancel(self, receiver: "TaskReceiver") -> None:
        """Cancel the coroutine that was begun for `receiver`."""
        self.call(self._cancel, receiver)

    def run(self, operation: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a coroutine in the loop, and return its result or raise its error.  Ctrl-C cancels it."""
        outcome = PendingOutcome()
        try:
            self.begin(outcome, operation, *args)
            result: T = outcome.wait()
        except BaseException:
            self.cancel(outcome)
            raise
        return result

    def stop(self, *, wait: bool = True, timeout: float | None = None) -> None:
        """End the loop, and unless `wait` is false or this is its thread, wait until it has ended."""
        self.call(self._stopping.set)
        if wait and not self.is_current():
            self._thread.join(timeout)

    def is_current(self) -> bool:
        """Return whether this is the loop's thread."""
        return threading.current_thread() is self._thread

    # ── in the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._ended = True
            self._do_work()
            self._wake.close()
            self._closed()

    async def _serve(self) -> None:
        add_reader(self._loop, self._wake.descriptor, self._woken)
        try:
            await self._stopping.wait()
        finally:
            remove_reader(self._loop, self._wake.descriptor)
            self._closing()
            self._do_work()

    def _woken(self) -> None:
        self._wake.clear()
        self._take_turn()

    def _take_turn(self) -> None:
        """Do what was handed over.  Work that comes meanwhile is done in the loop's next turn."""
        self._do_work()
        if not self._work:
            self._turn += 1  # work that is added from now on wakes the loop
        if self._work:
            self._loop.call_soon(self._take_turn)

    def _do_work(self) -> None:
        for _ in range(len(self._work)):
            try:
                function, arguments = self._work.popleft()
            except IndexError:  # another thread has taken it, because the loop has ended
                return
            try:
                function(*arguments)
            except Exception:
                log.exception("%s failed in the client's thread", function)

    def _begin(self, receiver: "TaskReceiver", operation: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._ended:
            receiver.put(closed_error())
            return
        receiver.call = task = self._loop.create_task(operation(*args))
        task.add_done_callback(partial(_settle, receiver))

    def _cancel(self, receiver: "TaskReceiver") -> None:
        if receiver.call is not None:
            receiver.call.cancel()


class TaskReceiver(Protocol):
    """Gets the result of a coroutine in the loop."""

    call: Any
    """Its task, once it has begun."""

    def put(self, outcome: Any, /) -> None:
        """Take the result or the exception."""


def _settle(receiver: TaskReceiver, task: "asyncio.Task[Any]") -> None:
    receiver.put(closed_error() if task.cancelled() else task.exception() or task.result())


class PendingOutcome:
    """The outcome of one request or coroutine in the loop, for which a thread waits."""

    __slots__ = ("_get", "call", "put")

    def __init__(self) -> None:
        queue: SimpleQueue[Any] = SimpleQueue()
        self._get = queue.get
        self.put = queue.put
        """Takes the result, or the exception to be raised."""
        self.call: Any = None
        """The request or task, once it has begun."""

    def wait(self) -> Any:
        """Wait for the outcome, and return or raise it."""
        outcome = self._get()
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # the error's traceback refers to this frame
        return outcome
