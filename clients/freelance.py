"""Clients that call servers directly, without a broker (FLP, C46): `FreelanceClient` and `AsyncFreelanceClient`."""

import asyncio
import logging
import os
import select
import socket as sockets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import zmq

from ..mdp.codecs import Codec, Coder
from ..mdp.errors import ClosedError, SettingError, ZmdpError
from ..mdp.keys import BrokerKey, Key, load_keys
from ..mdp.transport.multipart import milliseconds
from ..mdp.transport.sockets import checked_endpoint, end, own_context
from .arguments import checked_body, checked_max_outstanding, checked_timeout
from .defaults import DEFAULT_TIMEOUT, MAX_OUTSTANDING
from .freelance_connection import FreelanceConnection
from .freelance_session import PING_SECONDS, TTL_SECONDS, Call, FreelanceSession, RoundTrips, ServerStatus
from .reply import Reply

DEFAULT_PING_TIMEOUT: Final = 1.0
"""Seconds that `ping` waits for servers."""

log = logging.getLogger("zmdp.client")


class _Base:
    """The settings of both clients, their session and its connections."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        codec: str | Codec = "json",
        ping: float = PING_SECONDS,
        ttl: float = TTL_SECONDS,
        max_outstanding: int = MAX_OUTSTANDING,
        key: Key | None = None,
        server_key: BrokerKey | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        endpoints = _checked_servers(servers)
        self._timeout = checked_timeout(timeout)
        self._coder = Coder(codec)
        keys = load_keys(key, server_key)
        checked_max_outstanding(max_outstanding)
        self._session = FreelanceSession(endpoints, ping=ping, ttl=ttl, max_outstanding=max_outstanding)
        self._closed = False
        self._process = os.getpid()
        self._own_context = context is None
        self._context = own_context() if context is None else context
        try:
            self._connection = FreelanceConnection(self._session, endpoints, self._context, keys)
        except BaseException:
            if self._own_context:
                end(self._context)
            raise

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else checked_timeout(timeout)

    def _check_usable(self) -> None:
        if self._closed:
            raise _closed_error()
        if os.getpid() != self._process:
            raise ClosedError("this client belongs to the process that created it: create one after fork()")


class FreelanceClient(_Base):
    """Calls servers directly, without a broker.  All servers are equal: any of them can handle any request.

        with FreelanceClient(["tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"]) as client:
            client.request(b"hello")                                # [b'hello']
            client.call([1, 2, 3])                                  # 6
            futures = [client.submit(b"%d" % n) for n in range(100)]

    A request goes to the server that was heard last.  When that server is lost, the request goes to the next one
    immediately; when it is silent, after its share of the timeout.  The first reply counts, so servers may handle a
    request more than once.  Any number of threads may share a client, which has a thread of its own.

    All exceptions are in `zmdp.mdp.errors`.

    Args:
        servers: The endpoints of the servers, exactly as the servers name themselves.
        timeout: Seconds that a request may take, over all servers.
        codec: How `call` encodes values.
        ping: Seconds of silence after which a server is sent a PING.
        ttl: Seconds of silence after which a server is considered dead.
        max_outstanding: Maximum number of outstanding requests; others wait for their turn.
        key: The secret certificate file of this client's key, for servers that require one (docs/security.md).
        server_key: The servers' public key, which `key` needs: a certificate file, or 40 characters of Z85.
        context: The ZeroMQ context, needed only for `inproc://` endpoints.

    Raises `SettingError` if a setting is invalid.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        codec: str | Codec = "json",
        ping: float = PING_SECONDS,
        ttl: float = TTL_SECONDS,
        max_outstanding: int = MAX_OUTSTANDING,
        key: Key | None = None,
        server_key: BrokerKey | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        super().__init__(
            servers, timeout=timeout, codec=codec, ping=ping, ttl=ttl, max_outstanding=max_outstanding, key=key,
            server_key=server_key, context=context,
        )  # fmt: skip
        self._lock = threading.Lock()
        """Held by the thread that uses the session or the socket."""
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._woken = False
        """A wake-up is on its way to the client's thread."""
        self._thread = threading.Thread(target=self._run, name="zmdp-freelance", daemon=True)
        self._thread.start()

    def request(self, *frames: bytes, timeout: float | None = None) -> Reply:
        """Send a request and return the frames of its reply, whose `service` is the endpoint of the server.

        Args:
            frames: The body of the request; if there are none, one empty frame.
            timeout: Seconds until the reply must have arrived; by default the client's `timeout`.

        Raises `RequestTimeout` (a `TimeoutError`), `BrokerUnreachable` if no server could be reached, `ServiceError` if
        the handler failed, `WorkerLost` if several servers were lost while they held the request, or `SettingError` for
        an invalid argument.
        """
        future = self.submit(*frames, timeout=timeout)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C, while it waits
            raise

    def call(self, value: Any = None, *, codec: str | Codec | None = None, timeout: float | None = None) -> Any:
        """Send a value and return the value that the server replies with.

        `codec` (default: the client's) encodes one and decodes the other; the server must use the same.  Raises
        `CodecError` for a value that cannot be encoded or decoded; otherwise raises as `request`.
        """
        coder = self._coder if codec is None else Coder(codec)
        return coder.decode(self.request(*coder.encode(value), timeout=timeout))

    def submit(self, *frames: bytes, timeout: float | None = None) -> "Future[Reply]":
        """Send a request and immediately return a `concurrent.futures.Future` of the reply.

        Callbacks run in the client's own thread: while one blocks, other requests wait.  Arguments and errors are those
        of `request`.
        """
        body, limit = checked_body(frames), self._limit(timeout)
        future: _ReplyFuture = _ReplyFuture(self)
        with self._lock:
            self._check_usable()
            future.call = self._session.request(body, time.monotonic(), timeout=limit, receiver=future)
        self._wake()
        return future

    def ping(self, timeout: float = DEFAULT_PING_TIMEOUT) -> RoundTrips:
        """Send every server a PING, and return how many seconds each took to answer, by endpoint.

        Returns when all have answered, or after `timeout` seconds; the value of a server that has not answered is None.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._check_usable()
            self._session.survey(time.monotonic(), timeout=checked_timeout(timeout), receiver=future)
        self._wake()
        found: RoundTrips = future.result()
        return found

    def servers(self) -> list[ServerStatus]:
        """Return what is known of each server, the one that gets the next request first."""
        with self._lock:
            self._check_usable()
            return self._session.servers(time.monotonic())

    def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connections.

        Does nothing if the client is closed, or in a forked process.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:  # as in a future's callback
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _cancel(self, call: Call) -> None:
        with self._lock:
            self._session.forget(call)
        self._wake()  # another request may have its turn

    # ── the client's thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(OSError):  # the client was closed
                self._wake_in.send(b"!")

    def _run(self) -> None:
        try:
            self._drive()
        except zmq.ContextTerminated:
            log.warning("freelance: the ZeroMQ context was terminated")
        except Exception:
            log.exception("freelance: unexpected error in the client's thread: the client is closed")
        with self._lock:
            self._closed = True
            self._session.close(_closed_error)
            events, self._session.events = self._session.events, []
            self._connection.close()
            self._wake_in.close()
            self._wake_out.close()
        self._deliver(events)
        if self._own_context:
            end(self._context)

    def _drive(self) -> None:
        poller = select.poll()
        poller.register(self._wake_out, select.POLLIN)
        for descriptor in self._connection.descriptors:
            poller.register(descriptor, select.POLLIN)
        session = self._session
        while True:
            with self._lock:
                if self._closed:
                    return
                more = self._connection.step(time.monotonic())
                events, session.events = session.events, []
                due = self._connection.due()
            self._deliver(events)
            ready = poller.poll(0 if more else milliseconds(due - time.monotonic()))
            if any(descriptor == self._wake_out.fileno() for descriptor, _ in ready):
                self._wake_out.recv(4096)
                self._woken = False  # before the next step, which does what this wake-up was for

    def _deliver(self, events: list[tuple[Any, Any]]) -> None:
        for future, outcome in events:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, ZmdpError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class _ReplyFuture(Future[Reply]):
    """The future of a reply.  Cancelling it ends the request."""

    def __init__(self, client: FreelanceClient) -> None:
        super().__init__()
        self.call: Call | None = None
        self._client = client

    def cancel(self) -> bool:
        """End the request.  Return False if its outcome has arrived."""
        cancelled = super().cancel()
        if cancelled and self.call is not None:
            self._client._cancel(self.call)
        return cancelled


class AsyncFreelanceClient(_Base):
    """Calls servers directly, without a broker, from asyncio.  All servers are equal.

        async with AsyncFreelanceClient(["tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"]) as client:
            await client.request(b"hello")                          # [b'hello']
            await asyncio.gather(*(client.call([n, 1]) for n in range(500)))

    A client belongs to the event loop in which it is first used.  Cancelling a task that awaits a reply ends the
    request; a server that has it is not told.  Settings and errors are those of `FreelanceClient`.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        codec: str | Codec = "json",
        ping: float = PING_SECONDS,
        ttl: float = TTL_SECONDS,
        max_outstanding: int = MAX_OUTSTANDING,
        key: Key | None = None,
        server_key: BrokerKey | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        super().__init__(
            servers, timeout=timeout, codec=codec, ping=ping, ttl=ttl, max_outstanding=max_outstanding, key=key,
            server_key=server_key, context=context,
        )  # fmt: skip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def request(self, *frames: bytes, timeout: float | None = None) -> Reply:
        """Send a request and return the frames of its reply: see `FreelanceClient.request`."""
        body, limit = checked_body(frames), self._limit(timeout)
        future: asyncio.Future[Reply] = self._open().create_future()
        call = self._session.request(body, time.monotonic(), timeout=limit, receiver=future)
        self._step_soon()
        try:
            return await future
        finally:
            if not call.ended:
                self._session.forget(call)
                self._step_soon()  # another request may have its turn

    async def call(self, value: Any = None, *, codec: str | Codec | None = None, timeout: float | None = None) -> Any:
        """Send a value and return the value that the server replies with: see `FreelanceClient.call`."""
        coder = self._coder if codec is None else Coder(codec)
        return coder.decode(await self.request(*coder.encode(value), timeout=timeout))

    async def ping(self, timeout: float = DEFAULT_PING_TIMEOUT) -> RoundTrips:
        """Send every server a PING, and return how long each took to answer: see `FreelanceClient.ping`."""
        future: asyncio.Future[RoundTrips] = self._open().create_future()
        self._session.survey(time.monotonic(), timeout=checked_timeout(timeout), receiver=future)
        self._step_soon()
        return await future

    def servers(self) -> list[ServerStatus]:
        """Return what is known of each server, the one that gets the next request first."""
        self._check_usable()
        return self._session.servers(time.monotonic())

    async def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connections.

        Does nothing if the client is closed, or in a forked process.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._end()
        if self._own_context:
            await asyncio.to_thread(end, self._context)

    async def __aenter__(self) -> Self:
        self._open()  # begins to connect
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ── the connections in the event loop ────────────────────────────────────────────────────────────────────────────

    def _open(self) -> asyncio.AbstractEventLoop:
        self._check_usable()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for descriptor in self._connection.descriptors:
                loop.add_reader(descriptor, self._step)
            self._step_soon()
        elif self._loop is not loop:
            raise SettingError("this client belongs to another event loop: create one in each asyncio.run()")
        return loop

    def _step_soon(self) -> None:
        """Step at the end of this turn of the event loop, when all requests of the turn have been made."""
        if self._soon is None and self._loop is not None and not self._closed:
            self._soon = self._loop.call_soon(self._step)

    def _step(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        try:
            more = self._connection.step(time.monotonic())
        except zmq.ContextTerminated:
            self._end()
            return
        self._deliver()
        if more:
            self._step_soon()
            return
        due = self._connection.due()
        # A timer that fires too early is harmless, so it is rarely replaced.
        if self._timer is None or due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            if self._loop is not None:
                self._timer_at = due
                self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._step()

    def _end(self) -> None:
        self._closed = True
        self._session.close(_closed_error)
        self._deliver()
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        if self._loop is not None and not self._loop.is_closed():
            for descriptor in self._connection.descriptors:
                self._loop.remove_reader(descriptor)
        self._connection.close()

    def _deliver(self) -> None:
        events, self._session.events = self._session.events, []
        for future, outcome in events:
            if future.done() or future.get_loop().is_closed():
                continue  # its task was cancelled, or the program has left the event loop
            if isinstance(outcome, ZmdpError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


def _checked_servers(servers: str | Sequence[str]) -> list[str]:
    endpoints = [servers] if isinstance(servers, str) else servers
    if not isinstance(endpoints, list | tuple) or not endpoints:
        raise SettingError(f"servers is {servers!r}: it must be an endpoint such as tcp://127.0.0.1:5555, or several")
    return [checked_endpoint(endpoint) for endpoint in endpoints]


def _closed_error() -> ZmdpError:
    return ClosedError("this client was closed")
