"""The synchronous shell of X1: any number of requests at once over one connection, from any number of threads.

Of the threads that wait for replies one drives the connection, for all, and when it has what it waits for another takes
over.  While it sleeps, on the descriptors and not in ZeroMQ, whoever has the lock may use the socket.  There is no
thread of its own unless somebody asks for futures.  That one settles them, and so calls what is to be called back,
while it does not drive: what is called back may use the client, or close it.
"""

import logging
import select
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

import zmq

from ..mdp.errors import BusyError, ClosedError, RequestTimeout, ZmdpError
from ..mdp.multipart import milliseconds
from .connection import LINGER, Connection
from .inbox import Inbox
from .reply import Reply
from .session import Call, ClientSession, Outcome

FOREVER: Final = 3600.0

log = logging.getLogger("zmdp.client")


class _Follower:
    """A thread that waits while another drives.  It is woken once: what it waits for is there, or it is to drive."""

    __slots__ = ("done", "gate", "woken")

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.gate = threading.Lock()
        self.gate.acquire()
        self.woken = False

    def wake(self) -> None:
        """Under the client's lock."""
        if not self.woken:
            self.woken = True
            self.gate.release()


class _Inbox(Inbox):
    """An inbox that wakes the thread that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.follower: _Follower | None = None

    def put(self, outcome: Outcome) -> bool:
        added = super().put(outcome)
        if self.follower is not None:
            self.follower.wake()
        return added


class _Answer:
    """The one outcome of a request that is no stream."""

    __slots__ = ("follower", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.follower: _Follower | None = None

    def put(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.follower is not None:
            self.follower.wake()

    def __bool__(self) -> bool:
        return self.outcome is not None

    def take(self) -> Reply:
        outcome = self.outcome
        if isinstance(outcome, Reply):
            return outcome
        assert outcome is not None  # noqa: S101 - it is asked for what is there
        raise outcome


class _Promise(Future[Reply]):
    """The future of a reply; to cancel it is to cancel the request."""

    call: Call
    dialog: "Numbered"

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled and not self.call.ended:
            self.dialog._cancel_future(self.call, self)
        return cancelled


class Numbered:
    """Requests over X1, for threads."""

    def __init__(
        self,
        endpoints: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        heartbeat: float,
        liveness: int,
        max_outstanding: int,
    ) -> None:
        self._session = ClientSession(heartbeat=heartbeat, liveness=liveness)
        self._connection = Connection(self._session, endpoints, context)
        self._max_outstanding = max_outstanding
        self._lock = threading.Lock()
        """Held by whoever touches the session or the socket: the driving thread lets go of it while it sleeps."""
        self._driver: int | None = None
        """The thread that drives the connection."""
        self._driven_for: Callable[[], bool] = _never
        """What the driving thread waits for."""
        self._left = threading.Condition(self._lock)
        """Notified when a thread has ceased to drive and the client is being closed."""
        self._followers: dict[_Follower, None] = {}
        """The threads that wait while another drives, in the order in which they came."""
        self._watching: dict[_Follower, None] = {}
        """Those of them that are not woken by an inbox: it is looked whether what they wait for is there."""
        self._poller = select.poll()
        self._polled: zmq.Socket[bytes] | None = None
        self._monitor_descriptor = -1
        self._sleeps_until = 0.0
        """When the driving thread steps without being woken."""
        self._woken = False
        """A wake-up is under way."""
        self._closed = False
        self._unwanted: deque[Call] = deque()
        """Calls to cancel by whoever has the lock: who does not want them any more may not be able to wait for it."""
        self._settled: deque[tuple[Future[Reply], Outcome | None]] = deque()
        """Futures to settle, which is done without the lock and not by whoever drives: they call back."""
        self._thread: threading.Thread | None = None
        """What settles futures, and drives while some are outstanding and nobody else does."""
        self._work = threading.Condition(self._lock)
        """Notified when that thread, which had nothing to do, is wanted."""
        self._idle = False
        """It waits for that."""
        self._coming = False
        """It was notified, and has not got the lock yet."""
        self._received: deque[Inbox] = deque()
        """For each outcome of what `send` sent where to take it from."""
        self._unreceived: dict[Call, None] = {}
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_descriptor = self._wake_out.fileno()

    # ── what callers want ────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, service: bytes, body: Sequence[bytes], **settings: Any) -> Reply:
        """Send a request and wait for all of its reply; raises what it fails with."""
        answer = _Answer()
        call = self._begin(answer.put, service, body, settings)
        try:
            return self._next(answer)
        finally:
            self._cancel(call)

    def stream(self, service: bytes, body: Sequence[bytes], **settings: Any) -> Generator[Reply, None, None]:
        """Send a request and yield each part of its reply as it comes; raises what it fails with."""
        inbox = _Inbox()
        call = self._begin(inbox.put, service, body, {**settings, "stream": True})
        try:
            while True:
                part = self._next(inbox)
                yield part
                if part.final:
                    return
        finally:
            self._cancel(call)

    def submit(self, service: bytes, body: Sequence[bytes], **settings: Any) -> "Future[Reply]":
        """Send a request and return the future of its reply."""
        future = _Promise()
        future.dialog = self
        with self._lock:
            future.call = self._begin_locked(partial(self._arrived, future), service, body, settings, alone=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="zmdp-client", daemon=True)
                self._thread.start()
            elif self._idle:
                self._idle, self._coming = False, True
                self._work.notify()
        if self._unwanted:
            self._cancel_unwanted()
        return future

    def _arrived(self, future: "Future[Reply]", outcome: Outcome) -> None:
        self._settled.append((future, outcome))

    def send(self, service: bytes, body: Sequence[bytes], timeout: float) -> None:
        """Send a request whose reply `recv` will take."""
        del timeout  # it is sent at once; if there is no connection, when `recv` makes one
        inbox, received = Inbox(), self._received

        def deliver(outcome: Outcome) -> None:
            if inbox.put(outcome):
                received.append(inbox)
            if inbox.full:
                self._session.cancel(call)
            if call.ended:
                self._unreceived.pop(call, None)

        with self._lock:
            call = self._begin_locked(deliver, service, body, {"stream": True})
            self._unreceived[call] = None
        if self._unwanted:
            self._cancel_unwanted()

    def recv(self, timeout: float) -> Reply:
        """The next reply, or part of one, to what `send` sent."""
        with self._lock:
            if not self._received:
                self._check_open()
                if not self._unreceived:
                    raise BusyError("nothing was sent: recv() takes the replies to send()")
                self._await(lambda: bool(self._received), time.monotonic() + timeout)
            if not self._received:
                self._check_open()
                text = f"no reply through {self._session.where}; {len(self._unreceived)} requests are outstanding"
                raise RequestTimeout(text)
            inbox = self._received.popleft()
        if self._unwanted:
            self._cancel_unwanted()
        return inbox.take()

    def reset(self) -> None:
        """Cancel what `send` sent."""
        for call in list(self._unreceived):
            self._cancel(call)
        self._unreceived.clear()
        self._received = deque()

    def close(self) -> None:
        """Cancel all that is outstanding, and close."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._session.close(lambda: ClosedError("this client was closed"))
            if self._driver not in {None, threading.get_ident()}:
                self._wake()
                while self._driver is not None:
                    self._left.wait()
            self._connection.flush(time.monotonic())
            self._connection.drop(LINGER)
            for follower in self._followers:
                follower.wake()
            self._work.notify()
        self._settle()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._wake_in.close()
        self._wake_out.close()

    # ── the connection, driven by whoever waits ──────────────────────────────────────────────────────────────────────

    def _begin(
        self, deliver: Callable[[Outcome], object], service: bytes, body: Sequence[bytes], settings: Mapping[str, Any]
    ) -> Call:
        with self._lock:
            call = self._begin_locked(deliver, service, body, settings)
        if self._unwanted:
            self._cancel_unwanted()
        return call

    def _begin_locked(
        self,
        deliver: Callable[[Outcome], object],
        service: bytes,
        body: Sequence[bytes],
        settings: Mapping[str, Any],
        *,
        alone: bool = True,
    ) -> Call:
        self._check_open()
        now = time.monotonic()
        if self._session.outstanding >= self._max_outstanding:
            now, settings = self._await_place(now, service, dict(settings))
        call = self._session.request(service, body, now, **settings)
        call.deliver = deliver
        self._push(now, alone=alone)
        return call

    def _await_place(self, now: float, service: bytes, settings: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Wait until one more request may be outstanding, for no longer than it may take in all."""
        limit = settings.get("timeout") or settings.get("silence")
        until = None if limit is None else now + limit
        while self._session.outstanding >= self._max_outstanding:
            self._await(lambda: self._session.outstanding < self._max_outstanding, until)
            self._check_open()
            now = time.monotonic()
            if until is not None and now >= until:
                text = f"{self._max_outstanding} requests were outstanding for {limit:g} s: see max_outstanding"
                raise RequestTimeout(text, service=service.decode())
        if until is not None and settings.get("timeout"):
            settings["timeout"] = until - now
        return now, settings

    def _cancel(self, call: Call) -> None:
        if not call.ended:
            self._unwanted.append(call)
            self._cancel_unwanted()

    def _cancel_unwanted(self) -> None:
        # Not to wait for the lock: the garbage collector closes streams in whatever thread, perhaps in one that has it.
        # Who has it looks again when it has let go.
        while self._unwanted:
            if not self._lock.acquire(blocking=False):
                self._wake()
                return
            try:
                if self._closed:
                    self._unwanted.clear()
                elif self._driver is None:
                    self._push(time.monotonic())
                else:
                    self._wake()
                    return
            finally:
                self._lock.release()

    def _cancel_future(self, call: Call, future: "Future[Reply]") -> None:
        """`future` was cancelled: those that wait for it learn of it, if it is not about to be settled anyway."""
        with self._lock:
            if call.ended:
                return
            self._session.cancel(call)
            self._settled.append((future, None))
            self._push(time.monotonic())
            self._tell()
        if self._unwanted:
            self._cancel_unwanted()

    def _push(self, now: float, *, alone: bool = True) -> None:
        """Send what is to be sent; if not `alone`, together with what comes until the driving thread gets to it.

        Under the lock.
        """
        if self._driver is None:
            if alone or not self._coming:
                self._drop_unwanted()
                self._connection.flush(now)
        elif self._driver == threading.get_ident() or not alone or self._session.lost is not None:
            self._wake()
        else:  # it sleeps, and to wake it would take longer
            again = self._connection.step(now)
            self._tell()
            due = self._session.deadline()
            if (
                again
                or self._connection.socket is not self._polled
                or (due is not None and due < self._sleeps_until)
                or self._driven_for()
            ):
                self._wake()

    def _tell(self) -> None:
        """Wake who waits for what is there now, if no inbox does.  Under the lock."""
        for follower in self._watching:
            if not follower.woken and follower.done():
                follower.wake()

    def _drop_unwanted(self) -> None:
        """Cancel what nobody wants any more.  Under the lock, by whoever may use the connection."""
        while self._unwanted:
            self._session.cancel(self._unwanted.popleft())

    def _next(self, inbox: _Inbox | _Answer) -> Reply:
        """The next part or reply in `inbox`."""
        if not inbox:
            with self._lock:
                self._await(inbox.__bool__, inbox=inbox)
                if not inbox:
                    self._check_open()
            if self._unwanted:
                self._cancel_unwanted()
        return inbox.take()

    def _await(
        self, done: Callable[[], bool], until: float | None = None, inbox: _Inbox | _Answer | None = None
    ) -> None:
        """Wait until `done` or the time `until`, driving the connection if no other thread does.  Under the lock.

        `inbox` says that `done` is whether something is in there.
        """
        try:
            while not done() and not (self._closed and self._driver is None):
                left = FOREVER if until is None else until - time.monotonic()
                if left <= 0:
                    return
                if self._driver is None:
                    self._drive(done, until)
                else:
                    self._follow(done, left, inbox)
        finally:
            if self._driver is None and self._followers:
                next(iter(self._followers)).wake()  # it drives from now on, or has what it waits for, and hands on

    def _follow(self, done: Callable[[], bool], left: float, inbox: _Inbox | _Answer | None) -> None:
        """Sleep until what is waited for is there, or nobody drives any more, for at most `left` seconds."""
        follower = _Follower(done)
        self._followers[follower] = None
        if inbox is None:
            self._watching[follower] = None
        else:
            inbox.follower = follower
        try:
            try:
                self._lock.release()
                follower.gate.acquire(timeout=min(left, FOREVER))
            finally:
                self._lock_again()
        finally:
            del self._followers[follower]
            self._watching.pop(follower, None)
            if inbox is not None:
                inbox.follower = None

    def _drive(self, done: Callable[[], bool], until: float | None) -> None:
        self._driver = threading.get_ident()
        self._driven_for = done
        try:
            while True:
                now = time.monotonic()
                if self._unwanted:
                    self._drop_unwanted()
                more = self._connection.step(now)
                if self._watching:
                    self._tell()
                if done() or self._closed or (until is not None and now >= until):
                    return
                if more or self._unwanted:
                    continue
                if self._polled is not self._connection.socket or self._polled is None:
                    self._watch()
                self._sleep(now, until)
        finally:
            self._driver = None
            self._driven_for = _never
            if self._closed:
                self._left.notify_all()

    def _sleep(self, now: float, until: float | None) -> None:
        """Without the lock, until something arrives or is due, or somebody wakes this thread."""
        due = self._session.deadline()
        self._sleeps_until = now + FOREVER if due is None else due
        if until is not None and until < self._sleeps_until:
            self._sleeps_until = until
        try:
            self._lock.release()  # an interrupt right after that finds what is below
            ready = self._poller.poll(milliseconds(self._sleeps_until - now))
        finally:
            self._lock_again()
        for descriptor, _ in ready:
            if descriptor == self._monitor_descriptor:
                self._connection.rung = True
            elif descriptor == self._wake_descriptor:
                self._wake_out.recv(4096)
                self._woken = False  # and not earlier: who finds it set sends nothing

    def _lock_again(self) -> None:
        """Take the lock; an interrupt meanwhile is raised when that is done."""
        interrupt = None
        while True:
            try:
                self._lock.acquire()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _watch(self) -> None:
        """Poll the connection's present sockets."""
        socket, monitor = self._connection.socket, self._connection.monitor
        self._poller, self._polled, self._monitor_descriptor = select.poll(), socket, -1
        self._poller.register(self._wake_out, select.POLLIN)
        if socket is not None and monitor is not None:
            self._monitor_descriptor = int(monitor.get(zmq.FD))
            self._poller.register(self._monitor_descriptor, select.POLLIN)
            self._poller.register(int(socket.get(zmq.FD)), select.POLLIN)

    def _settle(self) -> None:
        while self._settled:
            try:
                future, outcome = self._settled.popleft()
            except IndexError:
                return  # another thread was quicker
            try:
                _settle(future, outcome)
            except BaseException:  # a callback's, such as SystemExit: the other futures are to be settled all the same
                log.exception("a future's callback failed")

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(OSError):
                self._wake_in.send(b"!")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed")

    def _serve(self) -> None:
        while not self._closed:
            try:
                with self._lock:
                    self._await(self._is_due)
                    if not (self._closed or self._settled):
                        self._idle = True
                        self._work.wait()
                        self._idle = self._coming = False
            except Exception as error:  # its context was terminated, for example
                log.exception("the client's connection failed")
                self._fail_all(f"the client's connection failed: {error}")
                return
            self._settle()

    def _is_due(self) -> bool:
        """Whether the client's own thread is not to drive, nor to wait for who does."""
        return self._closed or bool(self._settled) or not self._session.outstanding

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._thread = None  # the next request makes another
            self._session.close(lambda: ClosedError(reason))
            self._connection.hand_out()
            self._tell()
        self._settle()


def _settle(future: "Future[Reply]", outcome: Outcome | None) -> None:
    """Give `future` its outcome; None if it was cancelled."""
    if not future.set_running_or_notify_cancel() or outcome is None:
        return
    if isinstance(outcome, ZmdpError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _never() -> bool:
    return False
