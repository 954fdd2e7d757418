"""One worker connection: the session on a DEALER, kept alive while its request is worked on."""

import logging
import select
import socket as sockets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import zmq

from ..mdp.errors import SettingError
from ..mdp.multipart import milliseconds, receive, send
from ..mdp.sockets import dealer
from ..mdp.wire import Message
from .request import Request
from .session import WorkerSession

LINGER: Final = 3_000
"""Milliseconds that the last messages (a FINAL, DISCONNECT) have to get out, which may be large."""
LOOK: Final = 0.02
"""Seconds after which a stream is interrupted for a look at what the broker says."""

log = logging.getLogger("zmdp.worker")


class Connection:
    """The connection of a worker that takes one request at a time.

    Two threads use it, under a lock: the one that serves (`receive`, `partial`, `final`), and while that one is busy
    with a request the one that calls `beat`.
    """

    def __init__(
        self,
        session: WorkerSession,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        handler_timeout: float | None,
    ) -> None:
        self.stopping = False
        self._session = session
        self._endpoint = endpoint
        self._context = context
        self._handler_timeout = handler_timeout
        self._socket: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()
        self._busy_since: float | None = None
        self._look_at = 0.0
        self._pending: Request | None = None
        """A request that came while nobody waited for one."""
        self._closed = False
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._sent = False
        """Something was sent since the last look for what has arrived."""
        self._descriptor = -1
        self._poller = select.poll()
        self._poller.register(self._wake_out, select.POLLIN)
        try:
            self._open()
        except BaseException:
            self._wake_in.close()
            self._wake_out.close()
            raise

    # ── the thread that serves ───────────────────────────────────────────────────────────────────────────────────────

    def receive(self, until: float | None = None) -> Request | None:
        """Wait for a request, reconnecting when that is needed.  None at the time `until`, or once `stop` was
        called."""
        with self._lock:
            self._busy_since = None
            while not self.stopping:
                now = time.monotonic()
                request, self._pending = self._pending or self._step(now), None
                if request is not None and request is self._session.request:
                    self._busy_since = now
                    return request
                if until is not None and now >= until:
                    return None
                self._wait(now, until)
            return None

    def partial(self, request: Request, body: Sequence[bytes]) -> bool:
        """Send a PARTIAL.  False if the request is no longer this worker's."""
        with self._lock:
            if self._session.request is not request:
                return False
            now = self._busy_since = time.monotonic()  # it is not stuck
            self._send(self._session.partial(request, body, now))
            if now >= self._look_at:  # a handler that yields without a pause leaves none for `beat`
                self._look_at = now + LOOK
                self._step(now)
            return self._session.request is request

    def final(self, request: Request, body: Sequence[bytes]) -> bool:
        """Send the FINAL.  False if the request is no longer this worker's."""
        with self._lock:
            self._busy_since = None
            if self._session.request is not request:
                return False
            self._send(self._session.final(request, body, time.monotonic()))
            return self._session.lost is None

    def error(self, request: Request, code: int, text: str, detail: Sequence[bytes] = ()) -> bool:
        """Send ERROR, or what stands for it.  False if the request is no longer this worker's."""
        with self._lock:
            self._busy_since = None
            if self._session.request is not request:
                return False
            self._send(self._session.error(request, code, text, time.monotonic(), detail))
            return self._session.lost is None

    def close(self) -> None:
        """DISCONNECT, and close.  For the thread that serves, or after it has ended."""
        with self._lock:
            self._closed = True
            heard = self._session.heard
            try:
                self._send(self._session.disconnect("closed", time.monotonic()))
            finally:
                # A broker that was never there will not take anything now.
                self._drop(LINGER if heard else 0)
                self._wake_in.close()
                self._wake_out.close()

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Have `receive` return None, now or after the request that is worked on."""
        self.stopping = True
        with suppress(OSError):
            self._wake_in.send(b"!")

    def beat(self, now: float) -> float:
        """Heartbeat, listen to the broker, and watch the handler, while the serving thread is elsewhere.

        Returns the seconds after which to call again.
        """
        if self._lock.acquire(blocking=False):  # else the serving thread is at it
            try:
                if not self._closed:
                    self._pending = self._step(now) or self._pending
                    self._watch_handler(now)
            finally:
                self._lock.release()
        return self._session.beat_interval / 4

    # ── under the lock ───────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, now: float) -> Request | None:
        """Do what is due and what has arrived; returns a request if one has."""
        self._sent = False
        if self._session.lost is not None:
            if now >= self._session.retry_at and self._busy_since is None:
                self._reopen(now)
            return None
        request = None
        while request is None and self._socket is not None and (message := receive(self._socket)) is not None:
            request = self._session.receive(message, now)
        if now >= self._session.deadline():
            self._send(self._session.tick(now))
        return None if self._is_lost(now) else request

    def _is_lost(self, now: float) -> bool:
        session = self._session
        if session.lost is None:
            return False
        log.warning(
            "%s: %s; connecting to %s again in %.1f s",
            session.service.decode(), session.lost, self._endpoint, max(0.0, session.retry_at - now),
        )  # fmt: skip
        self._drop(0)
        return True

    def _watch_handler(self, now: float) -> None:
        if self._handler_timeout is None or self._busy_since is None or self._session.lost is not None:
            return
        if now - self._busy_since > self._handler_timeout:
            log.error(
                "%s: the handler has not come back after %g s: its request goes to another worker, and this connection "
                "takes no more until the handler returns",
                self._session.service.decode(), self._handler_timeout,
            )  # fmt: skip
            self._send(self._session.disconnect("the handler is stuck", now))
            self._drop(LINGER)

    def _wait(self, now: float, until: float | None) -> None:
        """Sleep until something arrives or is due.

        The descriptor tells of changes only, and sending may take in a sign: then there is another look first.
        """
        if self._sent:
            return
        due = self._session.deadline()
        self._poller.poll(milliseconds(min(due, until if until is not None else due) - now))

    def _reopen(self, now: float) -> None:
        try:
            self._open()
        except (zmq.ZMQError, SettingError) as error:  # no file descriptor left, for example
            if isinstance(error, zmq.ContextTerminated):
                raise
            self._session.lose(str(error), now)
            self._is_lost(now)

    def _open(self) -> None:
        self._socket = socket = dealer(self._context, self._endpoint, {zmq.LINGER: LINGER})
        self._descriptor = int(socket.get(zmq.FD))
        self._poller.register(self._descriptor, select.POLLIN)
        self._send(self._session.connected(time.monotonic()))

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            self._sent = True
            if self._socket is None or not send(self._socket, message):
                continue
            # The broker does not keep up, or is not there.  Wait for it as long as for a silent one.
            if not self._socket.poll(milliseconds(self._session.patience), zmq.POLLOUT) or send(self._socket, message):
                self._session.lose("the broker takes nothing", time.monotonic())
                self._drop(0)

    def _drop(self, linger: int) -> None:
        if self._socket is not None:
            self._poller.unregister(self._descriptor)
            self._socket.close(linger)
            self._socket = None
