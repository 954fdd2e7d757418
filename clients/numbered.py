"""The synchronous shell of X1: any number of requests at once over one connection, from any number of threads.

Of the threads that wait for replies one drives the connection, for all, and when it has what it waits for another takes
over.  There is no thread of its own unless somebody asks for futures.  That one settles them, and so calls what is to
be called back, while it does not drive: what is called back may use the client, or close it.
"""

import logging
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
from .session import Call, ClientSession, Outcome, Reply

FOREVER: Final = 3600.0

log = logging.getLogger("zmdp.client")


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
        self._changed = threading.Condition(self._lock)
        self._driver: int | None = None
        """The thread that drives the connection."""
        self._poller = zmq.Poller()
        self._polled: zmq.Socket[bytes] | None = None
        self._closed = False
        self._unwanted: deque[Call] = deque()
        """Calls to cancel by whoever has the lock: who does not want them any more may not be able to wait for it."""
        self._settled: deque[Callable[[], None]] = deque()
        """Futures to settle, which is done without the lock and not by whoever drives: they call back."""
        self._thread: threading.Thread | None = None
        self._received: deque[Inbox] = deque()
        """For each outcome of what `send` sent where to take it from."""
        self._unreceived: dict[Call, None] = {}
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    # ── what callers want ────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, service: bytes, body: Sequence[bytes], **settings: Any) -> Reply:
        """Send a request and wait for all of its reply; raises what it fails with."""
        inbox = Inbox()
        call = self._begin(inbox.put, service, body, settings)
        try:
            return self._next(inbox)
        finally:
            self._cancel(call)

    def stream(self, service: bytes, body: Sequence[bytes], **settings: Any) -> Generator[Reply, None, None]:
        """Send a request and yield each part of its reply as it comes; raises what it fails with."""
        inbox = Inbox()
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
        future: Future[Reply] = Future()

        def deliver(outcome: Outcome) -> None:
            self._settled.append(partial(_settle, future, outcome))

        call = self._begin(deliver, service, body, settings)
        self._start_thread()
        future.add_done_callback(lambda done: self._cancel_future(call, future) if done.cancelled() else None)
        return future

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
            return self._received.popleft().take()

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
                    self._changed.wait()
            self._connection.flush(time.monotonic())
            self._connection.drop(LINGER)
            self._changed.notify_all()
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
        self._cancel_unwanted()
        return call

    def _begin_locked(
        self, deliver: Callable[[Outcome], object], service: bytes, body: Sequence[bytes], settings: Mapping[str, Any]
    ) -> Call:
        self._check_open()
        now = time.monotonic()
        if self._session.outstanding >= self._max_outstanding:
            now, settings = self._await_place(now, service, dict(settings))
        call = self._session.request(service, body, now, **settings)
        call.deliver = deliver
        self._push(now)
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
            self._settled.append(partial(_settle, future, None))
            self._push(time.monotonic())
            self._changed.notify_all()

    def _push(self, now: float) -> None:
        """Send what is to be sent.  Under the lock."""
        if self._driver is not None:
            self._wake()  # the socket is that thread's
        else:
            self._drop_unwanted()
            self._connection.flush(now)

    def _drop_unwanted(self) -> None:
        """Cancel what nobody wants any more.  Under the lock, by whoever may use the connection."""
        while self._unwanted:
            self._session.cancel(self._unwanted.popleft())

    def _next(self, inbox: Inbox) -> Reply:
        """The next part or reply in `inbox`."""
        if not inbox:
            with self._lock:
                self._await(lambda: bool(inbox))
                if not inbox:
                    self._check_open()
            if self._unwanted:
                self._cancel_unwanted()
        return inbox.take()

    def _await(self, done: Callable[[], bool], until: float | None = None) -> None:
        """Wait until `done` or the time `until`, driving the connection if no other thread does.  Under the lock."""
        while not done() and not (self._closed and self._driver is None):
            left = FOREVER if until is None else until - time.monotonic()
            if left <= 0:
                return
            if self._driver is not None:
                self._changed.wait(left)
            else:
                self._drive(done, until)

    def _drive(self, done: Callable[[], bool], until: float | None) -> None:
        self._driver = threading.get_ident()
        try:
            while True:
                now = time.monotonic()
                self._drop_unwanted()
                more = self._connection.step(now)
                self._changed.notify_all()
                if done() or self._closed or (until is not None and now >= until):
                    return
                if more or self._unwanted:
                    continue
                if self._polled is not self._connection.socket or self._polled is None:
                    self._watch()
                due = self._session.deadline()
                left = min(FOREVER if due is None else due - now, FOREVER if until is None else until - now)
                self._lock.release()
                try:
                    self._poller.poll(milliseconds(left))
                    with suppress(BlockingIOError):
                        self._wake_out.recv(4096)
                finally:
                    self._lock_again()
        finally:
            self._driver = None
            self._changed.notify_all()

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
        self._poller, self._polled = zmq.Poller(), self._connection.socket
        self._poller.register(self._wake_out, zmq.POLLIN)
        for socket in (self._connection.socket, self._connection.monitor):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)

    def _settle(self) -> None:
        while self._settled:
            try:
                settle = self._settled.popleft()
            except IndexError:
                return  # another thread was quicker
            try:
                settle()
            except BaseException:  # a callback's, such as SystemExit: the other futures are to be settled all the same
                log.exception("a future's callback failed")

    def _wake(self) -> None:
        with suppress(OSError):  # a wake-up is under way already
            self._wake_in.send(b"!")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed")

    def _start_thread(self) -> None:
        """Futures need somebody who drives when nobody waits."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name="zmdp-client", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                with self._lock:
                    self._await(lambda: self._closed or bool(self._settled))
            except Exception as error:  # its context was terminated, for example
                log.exception("the client's connection failed")
                self._fail_all(f"the client's connection failed: {error}")
                return
            self._settle()

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._session.close(lambda: ClosedError(reason))
            self._connection.hand_out()
        self._settle()


def _settle(future: "Future[Reply]", outcome: Outcome | None) -> None:
    """Give `future` its outcome; None if it was cancelled."""
    if not future.set_running_or_notify_cancel() or outcome is None:
        return
    if isinstance(outcome, ZmdpError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
