"""One X1 connection for any number of threads.

Of the threads that wait for replies one drives the connection, for all of them; when it has what it waits for, another
takes over.  While the driving thread sleeps, on the descriptors and not in ZeroMQ, any thread that has the lock may use
the socket.
"""

import select
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import zmq

from ..mdp.errors import ClosedError, RequestTimeout
from ..mdp.transport.multipart import milliseconds
from .connection import Connection
from .inbox import Inbox
from .reply import Reply
from .session import Call, ClientSession, Outcome

FOREVER: Final = 3600.0
ASK_AGAIN: Final = 0.0002
"""Seconds in which threads that have just been given replies are likely to send their next requests."""


class Follower:
    """A thread that waits while another drives.

    It is woken once: because what it waits for is there, or because it is to drive.
    """

    __slots__ = ("done", "gate", "woken")

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.gate = threading.Lock()
        self.gate.acquire()
        self.woken = False

    def wake(self) -> None:
        """Wake it, under the connection's lock."""
        if not self.woken:
            self.woken = True
            self.gate.release()


class Taker(Protocol):
    """What the outcomes of a request are delivered to."""

    follower: Follower | None
    """The thread that waits for it."""

    def put(self, outcome: Outcome) -> None:
        """Deliver an outcome."""

    def __bool__(self) -> bool:
        """Whether there is something to take."""


class Answer:
    """The one outcome of a request that is not streamed."""

    __slots__ = ("follower", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.follower: Follower | None = None

    def put(self, outcome: Outcome) -> None:  # noqa: D102 - see Taker
        self.outcome = outcome

    def __bool__(self) -> bool:
        return self.outcome is not None

    def take(self) -> Reply:
        """Return the reply, or raise the error."""
        outcome = self.outcome
        if isinstance(outcome, Reply):
            return outcome
        assert outcome is not None  # noqa: S101 - it is only taken when it is there
        raise outcome


class Parts(Inbox):
    """The outcomes of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.follower: Follower | None = None

    def put(self, outcome: Outcome) -> None:  # noqa: D102 - see Taker
        self.add(outcome)


class SharedConnection:
    """A connection that any number of threads use."""

    def __init__(
        self,
        endpoints: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        heartbeat: float,
        liveness: int,
        max_outstanding: int,
    ) -> None:
        self.session = ClientSession(heartbeat=heartbeat, liveness=liveness)
        self.connection = Connection(self.session, endpoints, context, self._deliver)
        self.lock = threading.Lock()
        """Held by whoever uses the session or the socket: the driving thread releases it while it sleeps."""
        self.settling = threading.Condition()
        """The lock of all futures, held while outcomes are delivered."""
        self.closed = False
        self.driver: int | None = None
        """The thread that drives the connection."""
        self.vacated: Callable[[], None] = _nothing
        """Set by the client's own thread; called when a thread has stopped driving and none waits to take over."""
        self.delivered: Callable[[], None] = _nothing
        """Set by the client's own thread; called when outcomes have been delivered."""
        self.deliveries = 0
        self._max_outstanding = max_outstanding
        self._driven_for: Callable[[], bool] = _never
        """What the driving thread waits for."""
        self._left = threading.Condition(self.lock)
        """Notified when a thread has stopped driving and the client is being closed."""
        self._followers: dict[Follower, None] = {}
        """The threads that wait while another drives, in the order in which they came."""
        self._watching: dict[Follower, None] = {}
        """Those of them that no taker wakes: whether what they wait for is there is checked after each step."""
        self._roused = 0
        """Threads that have just been given their replies and have not asked again, until `_roused_until`."""
        self._roused_until = 0.0
        self._poller = select.poll()
        self._polled: zmq.Socket[bytes] | None = None
        self._monitor_descriptor = -1
        self._sleeps_until = 0.0
        """When the driving thread steps without being woken."""
        self._woken = False
        """A wake-up is on its way to the driving thread."""
        self._unwanted: deque[Call] = deque()
        """Calls to cancel by whoever has the lock: the thread that does not want them may be unable to wait for it."""
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_descriptor = self._wake_out.fileno()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(
        self,
        taker: Taker,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None = None,
        silence: float | None = None,
        stream: bool = False,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Call:
        """Begin a request, as `ClientSession.request` does.  It is not sent yet.  Under the lock."""
        if self.closed:
            raise ClosedError("this client was closed")
        now = time.monotonic()
        if self.session.outstanding >= self._max_outstanding:
            began = now
            now = self._await_place(now, service, timeout or silence)
            if timeout is not None:
                timeout -= now - began
        return self.session.request(
            service, body, now, timeout=timeout, silence=silence, stream=stream, wait=wait, headers=headers,
            options=options, taker=taker,
        )  # fmt: skip

    def _await_place(self, now: float, service: bytes, limit: float | None) -> float:
        """Wait until one more request may be outstanding, for no longer than it may take in all; return the time."""
        until = None if limit is None else now + limit
        while self.session.outstanding >= self._max_outstanding:
            self.wait(lambda: self.session.outstanding < self._max_outstanding, until)
            self.check_open()
            now = time.monotonic()
            if until is not None and now >= until:
                text = f"{self._max_outstanding} requests were outstanding for {limit:g} s: see max_outstanding"
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
        elif self._roused > 1 and now < self._roused_until:
            self._roused -= 1  # other threads are about to ask as well: the last of them sends for all
        else:  # the driving thread sleeps, and to wake it would take longer
            again = self.connection.step(now)
            self._roused = 0  # the driving thread does not know of those that this has roused
            self._wake_watching()
            due = self.session.deadline()
            if (
                again
                or self.connection.socket is not self._polled
                or (due is not None and due < self._sleeps_until)
                or self._driven_for()
            ):
                self.wake()

    def cancel(self, call: Call) -> None:
        """Cancel a request, unless it has ended."""
        if not call.ended:
            self._unwanted.append(call)
            self.cancel_unwanted()

    def cancel_unwanted(self) -> None:
        """Cancel what is no longer wanted, or leave that to the thread that has the lock."""
        # Never wait for the lock: the garbage collector closes streams in any thread, perhaps in one that holds it.
        # The holder looks again after it has released the lock.
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
        """Cancel what is no longer wanted.  Under the lock, by whoever may use the connection."""
        while self._unwanted:
            self.session.cancel(self._unwanted.popleft())

    def _deliver(self, events: list[tuple[Call, Outcome]]) -> None:
        self.deliveries += 1
        with self.settling:
            for call, outcome in events:
                taker = call.taker
                taker.put(outcome)
                follower = taker.follower
                if follower is not None and not follower.woken:
                    follower.wake()
                    self._roused += 1
        if self._roused > 1:
            self._roused_until = time.monotonic() + ASK_AGAIN
        self.delivered()

    def _wake_watching(self) -> None:
        for follower in self._watching:
            if not follower.woken and follower.done():
                follower.wake()

    def check_open(self) -> None:
        """Raise `ClosedError` if the client was closed."""
        if self.closed:
            raise ClosedError("this client was closed")

    def close(self, error: Callable[[], ClosedError]) -> None:
        """Cancel all outstanding requests, and close.  Under the lock."""
        self.closed = True
        self.session.close(error)
        if self.driver not in {None, threading.get_ident()}:
            self.wake()
            while self.driver is not None:
                self._left.wait()
        self.connection.close(time.monotonic())
        for follower in self._followers:
            follower.wake()

    def close_descriptors(self) -> None:
        """Close what threads are woken by; when none uses it any more."""
        self._wake_in.close()
        self._wake_out.close()

    def fail(self, error: Callable[[], ClosedError]) -> None:
        """End all outstanding requests: the connection cannot be used."""
        with self.lock:
            self.session.close(error)
            self.connection.deliver()
            self._wake_watching()

    # ── waiting and driving ──────────────────────────────────────────────────────────────────────────────────────────

    def next(self, taker: Taker) -> None:
        """Wait until there is something in `taker`.  Raises `ClosedError`."""
        with self.lock:
            self.wait(taker.__bool__, taker=taker)
            if not taker:
                self.check_open()
        if self._unwanted:
            self.cancel_unwanted()

    def wait(self, done: Callable[[], bool], until: float | None = None, taker: Taker | None = None) -> None:
        """Wait until `done` or the time `until`, driving the connection if no other thread does.  Under the lock.

        With `taker`, `done` is whether there is something in it.
        """
        try:
            while not done() and not (self.closed and self.driver is None):
                left = FOREVER if until is None else until - time.monotonic()
                if left <= 0:
                    return
                if self.driver is None:
                    self._drive(done, until)
                else:
                    self._follow(done, left, taker)
        finally:
            if self.driver is None:
                if self._followers:
                    next(iter(self._followers)).wake()  # it drives, or has what it waits for and passes this on
                else:
                    self.vacated()

    def _follow(self, done: Callable[[], bool], left: float, taker: Taker | None) -> None:
        """Sleep until what is waited for is there, or no thread drives any more, for at most `left` seconds."""
        follower = Follower(done)
        self._followers[follower] = None
        watching = taker is None or taker.follower is not None
        if watching or taker is None:
            self._watching[follower] = None
        else:
            taker.follower = follower
        try:
            try:
                self.lock.release()
                follower.gate.acquire(timeout=min(left, FOREVER))
            finally:
                self._lock_again()
        finally:
            del self._followers[follower]
            if watching or taker is None:
                del self._watching[follower]
            else:
                taker.follower = None

    def _drive(self, done: Callable[[], bool], until: float | None) -> None:
        self.driver = threading.get_ident()
        self._driven_for = done
        try:
            while True:
                now = time.monotonic()
                if self._roused > 1 and now < self._roused_until:
                    self._yield()
                    now = time.monotonic()
                self._roused = 0
                if self._unwanted:
                    self._drop_unwanted()
                more = self.connection.step(now)
                if self._watching:
                    self._wake_watching()
                if done() or self.closed or (until is not None and now >= until):
                    return
                if more or self._unwanted or self._roused > 1:
                    continue
                if self._polled is not self.connection.socket or self._polled is None:
                    self._watch()
                self._sleep(now, until)
        finally:
            self.driver = None
            self._driven_for = _never
            if self.closed:
                self._left.notify_all()

    def _yield(self) -> None:
        """Without the lock, give other threads time for their next requests, which then go out together."""
        try:
            self.lock.release()
            time.sleep(ASK_AGAIN)
        finally:
            self._lock_again()

    def _sleep(self, now: float, until: float | None) -> None:
        """Without the lock, until something arrives or is due, or another thread wakes this one."""
        due = self.session.deadline()
        self._sleeps_until = now + FOREVER if due is None else due
        if until is not None and until < self._sleeps_until:
            self._sleeps_until = until
        try:
            self.lock.release()  # an interrupt right after that finds what is below
            ready = self._poller.poll(milliseconds(self._sleeps_until - now))
        finally:
            self._lock_again()
        for descriptor, _ in ready:
            if descriptor == self._monitor_descriptor:
                self.connection.rung = True
            elif descriptor == self._wake_descriptor:
                self._wake_out.recv(4096)
                self._woken = False  # and not earlier: a thread that finds it set sends nothing

    def _lock_again(self) -> None:
        """Take the lock; an interrupt meanwhile is raised when that is done."""
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
        """Poll the connection's present sockets."""
        socket, monitor = self.connection.socket, self.connection.monitor
        self._poller, self._polled, self._monitor_descriptor = select.poll(), socket, -1
        self._poller.register(self._wake_out, select.POLLIN)
        if socket is not None and monitor is not None:
            self._monitor_descriptor = int(monitor.get(zmq.FD))
            self._poller.register(self._monitor_descriptor, select.POLLIN)
            self._poller.register(int(socket.get(zmq.FD)), select.POLLIN)

    def wake(self) -> None:
        """Wake the driving thread, if it sleeps."""
        if not self._woken:
            self._woken = True
            with suppress(OSError):
                self._wake_in.send(b"!")


def _nothing() -> None:
    pass


def _never() -> bool:
    return False
