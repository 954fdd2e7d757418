"""One X1 connection shared by any number of threads.

One thread at a time drives the connection: it sends and receives for all, until it has what it waits for itself.  Then
another thread that waits takes over.  So a thread that calls alone never switches to another one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final, Protocol

from ..mdp.errors import ClosedError, RequestTimeout, StreamInterrupted
from ..mdp.transport.multipart import milliseconds
from ..mdp.transport.polling import READABLE, new_poller
from ..mdp.transport.wake import Wake
from .call import Call, Outcome
from .connection import ClientConnection
from .dialog import Ask
from .inbox import Inbox
from .reply import Reply
from .session import ClientSession
from .settings import ConnectionSettings

MAX_SLEEP_SECONDS: Final = 3600.0
GATHER_SECONDS: Final = 0.00005
"""How long the driver waits for the next requests of threads that have just received their replies."""
MAX_GATHER_DELAY_SECONDS: Final = 0.0003
"""How soon after their replies these requests are expected."""


class Waiter:
    """What one thread waits for.  It is true when the thread can go on."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def __bool__(self) -> bool:
        """Return whether the thread has what it waits for."""
        return False

    def sleep(self, seconds: float = -1) -> None:
        """Sleep until `wake` is called, or has been called since the last time; -1: without a limit."""
        self._gate.acquire(timeout=seconds)

    def wake(self) -> bool:
        """Wake the thread: it has what it waits for, or should drive.  Return whether it had not been woken yet."""
        if not self._gate.locked():
            return False
        try:
            self._gate.release()
        except RuntimeError:  # another thread has woken it in this moment
            return False
        return True


class Receiver(Protocol):
    """Receives the outcomes of a request."""

    call: Call | None
    """The request, once it has begun."""

    def put(self, outcome: Outcome) -> bool:
        """Deliver an outcome, under the connection's lock.  Return whether this has woken a thread."""


class SingleOutcome(Waiter):
    """The outcome of a request that is not streamed."""

    def __init__(self) -> None:
        Waiter.__init__(self)  # faster than super()
        self.call: Call | None = None
        self._outcome: Outcome | None = None

    def put(self, outcome: Outcome) -> bool:  # noqa: D102 - see Receiver
        self._outcome = outcome
        return self.wake()

    def __bool__(self) -> bool:
        return self._outcome is not None

    def take(self) -> Reply:
        """Return the reply, or raise the error."""
        outcome = self._outcome
        if isinstance(outcome, Reply):
            return outcome
        assert outcome is not None  # noqa: S101 - callers wait until there is an outcome
        self._outcome = None
        try:
            raise outcome
        finally:
            del outcome  # the error's traceback refers to this frame: see `test_nothing_is_left_of_a_request`


class StreamInbox(Inbox, Waiter):
    """The outcomes of a stream."""

    def __init__(self) -> None:
        Inbox.__init__(self)
        Waiter.__init__(self)
        self.call: Call | None = None

    def put(self, outcome: Outcome) -> bool:  # noqa: D102 - see Receiver
        self.add(outcome)
        return self.wake()


class SharedConnection:
    """A connection that any number of threads share."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.session = ClientSession(settings.endpoints, heartbeat=settings.heartbeat, liveness=settings.liveness)
        self.connection = ClientConnection(self.session, settings.context, self._deliver, settings.keys)
        self.lock = threading.Lock()
        """Held by the thread that uses the session or the socket, never while it sleeps."""
        self.closed = False
        self.driver: int | None = None
        """The identifier of the thread that drives the connection."""
        self._waiting: deque[Waiter] = deque()
        """What threads wait for, in the order in which they began to wait."""
        self._unwanted: deque[Call] = deque()
        """Calls that were given up and are still to be cancelled."""
        self._slots: deque[_Slot] = deque()
        """Requests that wait for their turn, or have been woken and not begun yet, in order."""
        self._max_outstanding = settings.max_outstanding
        self._gather_until = 0.0
        """Until then, the next requests of several threads are expected."""
        self._asleep = False
        """The driver sleeps, or is about to."""
        self._poller = new_poller()
        self._polled = -1
        """The connection's `changes` when its descriptors were last read."""
        self._monitor_descriptor = -1
        self._wake = Wake()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(
        self,
        receiver: Receiver,
        ask: Ask,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        silence: float | None = None,
        stream: bool = False,
    ) -> None:
        """Begin a request, as `ClientSession.request` does.

        The thread that drives sends it.  If there is none, `wait` or `send` must follow.  `headers` and the limits
        replace those of `ask`.
        """
        slot: _Slot | None = None
        try:
            while True:
                with self.lock:
                    if self.closed:
                        self.check_open()
                    # Nobody overtakes those that wait, not even those that have been woken and are about to begin.
                    if slot is not None or self.session.outstanding + len(self._slots) < self._max_outstanding:
                        if slot is not None and timeout is not None:
                            timeout -= slot.waited()
                        receiver.call = self.session.request(
                            ask.service, ask.body, time.monotonic(), timeout=timeout, silence=silence, stream=stream,
                            wait=ask.wait, headers=headers, options=ask.options, retry=ask.retry, receiver=receiver,
                        )  # fmt: skip
                        asleep = self._asleep
                        break
                    slot = _Slot(timeout or silence)
                    self._slots.append(slot)
                self._await_slot(slot, ask.service.decode())
        finally:
            if slot is not None:
                with self.lock:
                    self._slots.remove(slot)
                    self._grant_slots()
        if asleep:
            self.wake()  # without the lock, for which the driver would have to wait

    def _await_slot(self, slot: "_Slot", service: str) -> None:
        """Wait until another request may be outstanding."""
        self.wait(slot, slot.until)
        if not slot and not self.closed:
            text = (
                f"the request to service {service!r} was not sent: {self._max_outstanding} others (max_outstanding) "
                f"were outstanding for {slot.limit:g} s"
            )
            raise RequestTimeout(text, service=service)

    def _grant_slots(self) -> None:
        """Wake the requests whose turn it is.  Under the lock."""
        for slot in islice(self._slots, max(0, self._max_outstanding - self.session.outstanding)):
            slot.granted = True
            slot.wake()

    def send(self) -> None:
        """Send what is unsent: the driver does, or this thread if there is no driver."""
        with self.lock:
            if self.driver is None:
                self._flush()
            else:
                self.wake()
        self.cancel_unwanted()

    def _flush(self) -> None:
        if not self.closed:
            self._drop_unwanted()
            self.connection.flush(time.monotonic())

    def cancel(self, receiver: Receiver) -> None:
        """Cancel the request of `receiver`, unless it has not begun or has ended."""
        call = receiver.call
        if call is not None and not call.ended:
            self._unwanted.append(call)
            self.cancel_unwanted()

    def cancel_unwanted(self) -> None:
        """Cancel the calls that were given up, or leave that to the thread that drives or holds the lock."""
        # Never wait for the lock: the garbage collector may close a stream in the very thread that holds it.  The
        # holder calls this once it has released the lock.
        while self._unwanted and not self.closed:
            if self.driver is not None or not self.lock.acquire(blocking=False):
                self.wake()
                return
            try:
                if self.driver is None:
                    self._flush()
            finally:
                self.lock.release()

    def _drop_unwanted(self) -> None:
        while self._unwanted:
            self.session.cancel(self._unwanted.popleft())

    def _deliver(self, events: list[tuple[Call, Outcome]]) -> None:
        woken = delivered = 0
        try:
            for call, outcome in events:
                delivered += 1
                woken += call.receiver.put(outcome)
                if call.ended and (not isinstance(outcome, Reply) or outcome.final):
                    call.receiver = None  # which refers to the call: its bodies must not wait for the garbage collector
        except Exception:
            del events[:delivered]
            raise
        except BaseException:
            # Ctrl-C: the other threads must get their outcomes all the same.  Whether this one was taken is not known;
            # a reply may be given again, a part may not.
            delivered -= 1
            if call.receiver is None:
                delivered += 1
            elif isinstance(outcome, Reply) and not outcome.final:
                events[delivered] = call, _interrupted(outcome.service)
            del events[:delivered]
            raise
        del events[:]
        if woken > 2:  # of two threads, one drives, so there is nothing to gather
            self._gather_until = time.monotonic() + MAX_GATHER_DELAY_SECONDS

    def check_open(self) -> None:
        """Raise `ClosedError` if the client was closed."""
        if self.closed:
            raise ClosedError("this client was closed")

    def fail(self, error: Callable[[], ClosedError]) -> None:
        """End every outstanding request with an `error`: the connection cannot be used."""
        with self.lock:
            self.session.close(error)
            self.connection.deliver()

    def close(self, error: Callable[[], ClosedError]) -> bool:
        """Cancel every outstanding request and close the connection.  Return False if it was closed before."""
        with self.lock:
            if self.closed:
                return False
            self.closed = True
            self.session.close(error)
            self.connection.deliver()
            self.wake()
        closing = Waiter()
        self._waiting.appendleft(closing)  # the driver wakes it when it has left the sockets
        while self.driver not in {None, threading.get_ident()}:
            closing.sleep()
        self._waiting.remove(closing)
        self.connection.close(time.monotonic())
        self._wake.close()
        for waiter in list(self._waiting):
            waiter.wake()
        return True

    # ── waiting and driving ──────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, waiter: Waiter, until: float | None = None) -> None:  # noqa: PLR0912 - Ctrl-C may come in any call
        """Wait until `waiter` is true, the time is `until`, or the client is closed.

        If no other thread drives the connection, this one does.
        """
        thread = threading.get_ident()
        try:
            self._waiting.append(waiter)  # inside the `try`, because Ctrl-C may interrupt right after it
            while not waiter and not self.closed:
                with self.lock:
                    if self.driver is None and not self.closed:
                        self.driver = thread
                if self.driver == thread:
                    self._drive(waiter, until)
                    return
                if until is None:
                    waiter.sleep()
                elif (seconds := until - time.monotonic()) > 0:
                    waiter.sleep(min(seconds, MAX_SLEEP_SECONDS))
                else:
                    return
        finally:
            if self.driver == thread:
                self.driver = None  # first of all: Ctrl-C may interrupt each of the following calls
            try:
                self._waiting.remove(waiter)
            except ValueError:  # Ctrl-C came before it was added
                pass
            finally:
                if self.driver is None and self._waiting:
                    try:
                        self._wake_next()
                    except BaseException:  # Ctrl-C: nobody else would wake it
                        self._wake_next()
                        raise
            if self._unwanted:
                self.cancel_unwanted()

    def _wake_next(self) -> None:
        """Wake the thread that has waited longest: it drives, or it has what it waits for and wakes the next."""
        with suppress(IndexError):
            self._waiting[0].wake()

    def _drive(self, waiter: Waiter, until: float | None) -> None:
        """Send and receive for all threads until `waiter` is true, the time is `until`, or the client is closed."""
        while True:
            if self._gather_until:
                if time.monotonic() < self._gather_until:
                    time.sleep(GATHER_SECONDS)
                self._gather_until = 0.0
            with self.lock:
                if self.closed:
                    return
                now = time.monotonic()
                try:
                    more = self._step(now)
                except Exception:
                    raise
                except BaseException:  # Ctrl-C: what had just been received may be lost, so it is asked for again
                    self.session.lose("the thread that received was interrupted", now)
                    raise
                if waiter or (until is not None and now >= until):
                    return
                self._asleep = not (more or self._gather_until)
                due = self.session.deadline()
            # `cancel_unwanted` may have run under the lock, and found this thread awake.
            if not self._asleep or self._unwanted:
                continue
            if due is None or (until is not None and until < due):
                due = until
            self._sleep(MAX_SLEEP_SECONDS if due is None else due - now)

    def _step(self, now: float) -> bool:
        """Send, receive and do what is due.  Return whether to do so again immediately.  Under the lock."""
        if self._unwanted:
            self._drop_unwanted()
        more = self.connection.step(now)
        if self._polled != self.connection.changes:
            self._watch()
        if self._slots:
            self._grant_slots()
        return more

    def _sleep(self, seconds: float) -> None:
        """Sleep until something arrives or is due, or another thread calls `wake`."""
        ready = self._poller.poll(milliseconds(seconds))
        self._asleep = False
        for descriptor, _ in ready:
            if descriptor == self._monitor_descriptor:
                self.connection.monitor_reported = True
            elif descriptor == self._wake.descriptor:
                self._wake.clear()

    def _watch(self) -> None:
        """Poll the connection's current sockets."""
        connection = self.connection
        self._poller, self._polled = new_poller(), connection.changes
        descriptor, self._monitor_descriptor, others = connection.descriptors()
        for each in (self._wake.descriptor, descriptor, self._monitor_descriptor, *others):
            if each >= 0:
                self._poller.register(each, READABLE)

    def wake(self) -> None:
        """Wake the driver, if it sleeps."""
        if self._asleep:
            self._asleep = False
            self._wake.wake()


def _interrupted(service: str) -> StreamInterrupted:
    text = f"the stream of service {service!r} broke off: the thread that received it was interrupted"
    return StreamInterrupted(text, service=service)


class _Slot(Waiter):
    """The wait of a request for its turn, because `max_outstanding` others are outstanding."""

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.limit = limit
        self.granted = False
        """It is its turn."""
        self._began = time.monotonic()
        self.until = None if limit is None else self._began + limit

    def __bool__(self) -> bool:
        return self.granted

    def waited(self) -> float:
        """Return for how many seconds it has waited."""
        return time.monotonic() - self._began
