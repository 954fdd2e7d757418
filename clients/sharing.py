"""One X1 connection shared by any number of threads.

One of the threads that wait for replies, the driver, sends and receives for all of them; the others are its followers.
When the driver has its own reply, a follower takes over.  The driver sleeps by polling the descriptors, not inside
ZeroMQ, so in the meantime any thread that holds the lock may use the socket.
"""

import select
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from ..mdp.errors import ClosedError, RequestTimeout
from ..mdp.transport.multipart import milliseconds
from .call import Call, Outcome
from .connection import ClientConnection
from .dialog import Ask
from .inbox import Inbox
from .reply import Reply
from .session import ClientSession
from .settings import ConnectionSettings

MAX_SLEEP_SECONDS: Final = 3600.0
NEXT_REQUEST_SECONDS: Final = 0.0002
"""How soon threads that have just received replies are likely to make their next requests."""


class Follower:
    """A thread that waits while another drives.

    It is woken once, either because what it waits for has arrived or because it should drive.
    """

    __slots__ = ("done", "gate", "woken")

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.gate = threading.Lock()
        self.gate.acquire()
        self.woken = False

    def wake(self) -> None:
        """Wake the thread.  Under the connection's lock."""
        if not self.woken:
            self.woken = True
            self.gate.release()


class Receiver(Protocol):
    """Receives the outcomes of a request."""

    follower: Follower | None
    """The thread that waits for it, if it follows."""

    def put(self, outcome: Outcome) -> None:
        """Deliver an outcome."""

    def __bool__(self) -> bool:
        """Whether an outcome can be taken."""


class SingleOutcome:
    """The outcome of a request that is not streamed."""

    __slots__ = ("follower", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.follower: Follower | None = None

    def put(self, outcome: Outcome) -> None:  # noqa: D102 - see Receiver
        self.outcome = outcome

    def __bool__(self) -> bool:
        return self.outcome is not None

    def take(self) -> Reply:
        """Return the reply, or raise the error."""
        outcome = self.outcome
        if isinstance(outcome, Reply):
            return outcome
        assert outcome is not None  # noqa: S101 - callers wait until there is an outcome
        raise outcome


class StreamInbox(Inbox):
    """The outcomes of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.follower: Follower | None = None

    def put(self, outcome: Outcome) -> None:  # noqa: D102 - see Receiver
        self.add(outcome)


class SharedConnection:
    """A connection that any number of threads share."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.session = ClientSession(settings.endpoints, heartbeat=settings.heartbeat, liveness=settings.liveness)
        self.connection = ClientConnection(self.session, settings.context, self._deliver, settings.keys)
        self.lock = threading.Lock()
        """Held by the thread that uses the session or the socket.  The driver releases it while it sleeps."""
        self.settling = threading.Condition()
        """The lock of all futures.  Held while outcomes are delivered."""
        self.closed = False
        self.driver: int | None = None
        """The identifier of the thread that drives the connection."""
        self.on_idle: Callable[[], None] = _do_nothing
        """Set by the client's own thread; called when a thread has stopped driving and none waits to take over."""
        self.on_delivery: Callable[[], None] = _do_nothing
        """Set by the client's own thread; called when outcomes have been delivered."""
        self.deliveries = 0
        self._max_outstanding = settings.max_outstanding
        self._driver_done: Callable[[], bool] = _never
        """Whether the driver has what it waits for."""
        self._driver_left = threading.Condition(self.lock)
        """Notified when the driver stops and the client is being closed."""
        self._followers: dict[Follower, None] = {}
        """The threads that wait while another drives, in the order in which they began to wait."""
        self._checked: dict[Follower, None] = {}
        """The followers that no receiver wakes: their condition is checked after each step."""
        self._just_woken = 0
        """Threads that have just received replies and, until `_just_woken_until`, are likely to make new requests."""
        self._just_woken_until = 0.0
        self._poller = select.poll()
        self._polled = -1
        """The connection's `changes` when its descriptors were last read."""
        self._monitor_descriptor = -1
        self._sleeps_until = 0.0
        """When the driver steps without being woken."""
        self._woken = False
        """A wake-up is on its way to the driver."""
        self._unwanted: deque[Call] = deque()
        """Calls given up by threads that could not wait for the lock: the next thread to hold it cancels them."""
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_descriptor = self._wake_out.fileno()

    @property
    def free_to_drive(self) -> bool:
        """No thread drives, and none waits to take over: a follower does so when the driver leaves."""
        return self.driver is None and not self._followers

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
    ) -> Call:
        """Begin a request, as `ClientSession.request` does, without sending it.  Under the lock.

        `headers` and the limits replace those of `ask`.
        """
        if self.closed:
            raise ClosedError("this client was closed")
        now = time.monotonic()
        if self.session.outstanding >= self._max_outstanding:
            began = now
            now = self._await_slot(now, ask.service, timeout or silence)
            if timeout is not None:
                timeout -= now - began
        return self.session.request(
            ask.service, ask.body, now, timeout=timeout, silence=silence, stream=stream, wait=ask.wait,
            headers=headers, options=ask.options, receiver=receiver,
        )  # fmt: skip

    def _await_slot(self, now: float, service: bytes, limit: float | None) -> float:
        """Wait at most `limit` seconds until another request may be outstanding.  Return the time."""
        until = None if limit is None else now + limit
        while self.session.outstanding >= self._max_outstanding:
            self.wait(lambda: self.session.outstanding < self._max_outstanding, until)
            self.check_open()
            now = time.monotonic()
            if until is not None and now >= until:
                text = (
                    f"the request to service {service.decode()!r} was not sent: {self._max_outstanding} others "
                    f"(max_outstanding) were outstanding for {limit:g} s"
                )
                raise RequestTimeout(text, service=service.decode())
        return now

    def send(self) -> None:
        """Send what is unsent, or leave it to a thread that is about to send.  Under the lock."""
        now = time.monotonic()
        if self.driver is None:
            self._drop_unwanted()
            self.connection.flush(now)
        elif self.driver == threading.get_ident() or self.session.lost is not None:
            self.wake()
        elif self._just_woken > 1 and now < self._just_woken_until:
            self._just_woken -= 1  # other threads are about to make requests too: the last of them sends for all
        else:  # the driver sleeps, and waking it would take longer than sending
            again = self.connection.step(now)
            self._just_woken = 0  # the driver does not know of the threads that this step has woken
            self._wake_checked()
            due = self.session.deadline()
            if (
                again
                or self.connection.changes != self._polled
                or (due is not None and due < self._sleeps_until)
                or self._driver_done()
            ):
                self.wake()

    def cancel(self, call: Call) -> None:
        """Cancel a request, unless it has ended."""
        if not call.ended:
            self._unwanted.append(call)
            self.cancel_unwanted()

    def cancel_unwanted(self) -> None:
        """Cancel the calls that were given up, or leave that to the thread that holds the lock."""
        # Never wait for the lock: the garbage collector may close a stream in the very thread that holds it.  The
        # holder checks again after it has released the lock.
        while self._unwanted:
            if not self.lock.acquire(blocking=False):
                self.wake()
                return
            try:
                if self.closed:
                    self._unwanted.clear()
                elif self.driver is None:
                    self.send()
                else:
                    self.wake()
                    return
            finally:
                self.lock.release()

    def _drop_unwanted(self) -> None:
        """Cancel the calls that were given up.  Under the lock, by a thread that may use the connection."""
        while self._unwanted:
            self.session.cancel(self._unwanted.popleft())

    def _deliver(self, events: list[tuple[Call, Outcome]]) -> None:
        self.deliveries += 1
        with self.settling:
            for call, outcome in events:
                receiver = call.receiver
                receiver.put(outcome)
                follower = receiver.follower
                if follower is not None and not follower.woken:
                    follower.wake()
                    self._just_woken += 1
        if self._just_woken > 1:
            self._just_woken_until = time.monotonic() + NEXT_REQUEST_SECONDS
        self.on_delivery()

    def _wake_checked(self) -> None:
        for follower in self._checked:
            if not follower.woken and follower.done():
                follower.wake()

    def check_open(self) -> None:
        """Raise `ClosedError` if the client was closed."""
        if self.closed:
            raise ClosedError("this client was closed")

    def close(self, error: Callable[[], ClosedError]) -> None:
        """Cancel every outstanding request and close the connection.  Under the lock."""
        self.closed = True
        self.session.close(error)
        if self.driver not in {None, threading.get_ident()}:
            self.wake()
            while self.driver is not None:
                self._driver_left.wait()
        self.connection.close(time.monotonic())
        for follower in self._followers:
            follower.wake()

    def close_descriptors(self) -> None:
        """Close the descriptors that wake the driver.  Called when threads no longer use them."""
        self._wake_in.close()
        self._wake_out.close()

    def fail(self, error: Callable[[], ClosedError]) -> None:
        """End every outstanding request with an `error`: the connection cannot be used."""
        with self.lock:
            self.session.close(error)
            self.connection.deliver()
            self._wake_checked()

    # ── waiting and driving ──────────────────────────────────────────────────────────────────────────────────────────

    def next(self, receiver: Receiver) -> None:
        """Wait until an outcome can be taken from `receiver`.  Raises `ClosedError`."""
        with self.lock:
            self.wait(receiver.__bool__, receiver=receiver)
            if not receiver:
                self.check_open()
        if self._unwanted:
            self.cancel_unwanted()

    def wait(self, done: Callable[[], bool], until: float | None = None, receiver: Receiver | None = None) -> None:
        """Wait until `done()` or the time `until`, driving the connection if no other thread does.  Under the lock.

        With a `receiver`, `done` tells whether an outcome can be taken from it.
        """
        try:
            while not done() and not (self.closed and self.driver is None):
                left = MAX_SLEEP_SECONDS if until is None else until - time.monotonic()
                if left <= 0:
                    return
                if self.driver is None:
                    self._drive(done, until)
                else:
                    self._follow(done, left, receiver)
        finally:
            if self.driver is None:
                if self._followers:
                    next(iter(self._followers)).wake()  # it drives, or it has its outcome and wakes the next
                else:
                    self.on_idle()

    def _follow(self, done: Callable[[], bool], left: float, receiver: Receiver | None) -> None:
        """Sleep for at most `left` seconds, until `done()` or until this thread should drive."""
        follower = Follower(done)
        self._followers[follower] = None
        checked = receiver is None or receiver.follower is not None
        if checked or receiver is None:
            self._checked[follower] = None
        else:
            receiver.follower = follower
        try:
            try:
                self.lock.release()
                follower.gate.acquire(timeout=min(left, MAX_SLEEP_SECONDS))
            finally:
                self._lock_again()
        finally:
            del self._followers[follower]
            if checked or receiver is None:
                del self._checked[follower]
            else:
                receiver.follower = None

    def _drive(self, done: Callable[[], bool], until: float | None) -> None:
        self.driver = threading.get_ident()
        self._driver_done = done
        try:
            while True:
                now = time.monotonic()
                if self._just_woken > 1 and now < self._just_woken_until:
                    self._yield()
                    now = time.monotonic()
                self._just_woken = 0
                if self._unwanted:
                    self._drop_unwanted()
                more = self.connection.step(now)
                if self._checked:
                    self._wake_checked()
                if done() or self.closed or (until is not None and now >= until):
                    return
                if more or self._unwanted or self._just_woken > 1:
                    continue
                if self._polled != self.connection.changes:
                    self._watch()
                self._sleep(now, until)
        finally:
            self.driver = None
            self._driver_done = _never
            if self.closed:
                self._driver_left.notify_all()

    def _yield(self) -> None:
        """Release the lock while other threads make their next requests, which then go out together."""
        try:
            self.lock.release()
            time.sleep(NEXT_REQUEST_SECONDS)
        finally:
            self._lock_again()

    def _sleep(self, now: float, until: float | None) -> None:
        """Release the lock until something arrives or is due, or another thread wakes this one."""
        due = self.session.deadline()
        self._sleeps_until = now + MAX_SLEEP_SECONDS if due is None else due
        if until is not None and until < self._sleeps_until:
            self._sleeps_until = until
        try:
            self.lock.release()  # inside the `try`, because Ctrl-C may interrupt right after it
            ready = self._poller.poll(milliseconds(self._sleeps_until - now))
        finally:
            self._lock_again()
        for descriptor, _ in ready:
            if descriptor == self._monitor_descriptor:
                self.connection.monitor_reported = True
            elif descriptor == self._wake_descriptor:
                self._wake_out.recv(4096)
                self._woken = False  # not earlier: a thread that finds it set sends no wake-up

    def _lock_again(self) -> None:
        """Acquire the lock.  A Ctrl-C in the meantime is raised once it is acquired."""
        interrupt = None
        while True:
            try:
                self.lock.acquire()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _watch(self) -> None:
        """Poll the connection's current sockets."""
        connection = self.connection
        self._poller, self._polled = select.poll(), connection.changes
        descriptor, self._monitor_descriptor, others = connection.descriptors()
        self._poller.register(self._wake_out, select.POLLIN)
        for each in (descriptor, self._monitor_descriptor, *others):
            if each >= 0:
                self._poller.register(each, select.POLLIN)

    def wake(self) -> None:
        """Wake the driver, if it sleeps."""
        if not self._woken:
            self._woken = True
            with suppress(OSError):
                self._wake_in.send(b"!")


def _do_nothing() -> None:
    pass


def _never() -> bool:
    return False
