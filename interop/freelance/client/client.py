"""Clients that call servers directly, without a broker (FLP, C46): `FreelanceClient` and `AsyncFreelanceClient`.

`AsyncFreelanceClient` owns the session and its connections.  `FreelanceClient` runs one in a thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack
from warnings import warn

import zmq

from ....clients.calls.arguments import DEFAULT_TIMEOUT, MAX_OUTSTANDING, checked_max_outstanding, checked_timeout
from ....clients.calls.ask import check_usable, checked_body
from ....clients.calls.reply import Reply, closed_error
from ....clients.futures import ClientThreads, ReplyFuture
from ....mdp.codecs import Codec, Coder
from ....mdp.errors import SettingError, ZmdpError
from ....mdp.program import process
from ....mdp.security.keys import BrokerKey, Key, load_keys
from ....mdp.transport.endpoints import checked_endpoint
from ....mdp.transport.polling import add_reader, remove_reader
from ....mdp.transport.sockets import Context, end, own_context
from .connection import FreelanceConnection
from .session import PING_SECONDS, TTL_SECONDS, FreelanceSession, RoundTrips, ServerStatus

DEFAULT_PING_TIMEOUT: Final = 1.0
"""Seconds that `ping` waits for servers."""

Result = TypeVar("Result")

log = logging.getLogger("zmdp.client")


class FreelanceArguments(TypedDict, total=False):
    """Keyword arguments of both clients; `FreelanceClient` describes them."""

    timeout: float
    codec: str | Codec
    ping: float
    ttl: float
    max_outstanding: int
    key: Key | None
    server_key: BrokerKey | None
    context: Context | None


class AsyncFreelanceClient:
    """Calls servers directly, without a broker, from asyncio.  All servers are equal.

        async with AsyncFreelanceClient(["tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"]) as client:
            await client.request(b"hello")                          # [b'hello']
            await asyncio.gather(*(client.call([n, 1]) for n in range(500)))

    A client belongs to the event loop in which it is first used.  Cancelling a task that awaits a reply ends the
    request; a server that has it is not told.

    Args:
        servers: The endpoints of the servers, exactly as the servers name themselves.
        timeout: Seconds that a request may take, over all servers.
        codec: How `call` encodes values.
        ping: Seconds of silence after which a server is sent a PING.
        ttl: Seconds of silence after which a server is considered dead.
        max_outstanding: Maximum number of outstanding requests; others wait for their turn.
        key: The secret certificate file of this client's key, for servers that require one (docs/how-to/security.md).
        server_key: The servers' public key, which `key` needs: a certificate file, or 40 characters of Z85.
        context: The ZeroMQ context, needed only for `inproc://` endpoints.

    Raises:
        SettingError: A setting is invalid.
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
        context: Context | None = None,
    ) -> None:
        endpoints = _checked_servers(servers)
        self._timeout = checked_timeout(timeout)
        self._coder = Coder(codec)
        keys = load_keys(key, server_key)
        checked_max_outstanding(max_outstanding)
        self._session = FreelanceSession(endpoints, ping=ping, ttl=ttl, max_outstanding=max_outstanding)
        self._endpoints = endpoints
        self._closed = False
        self._process = process.pid
        self._own_context: Context | None = None
        if context is None:
            context = self._own_context = own_context()
        try:
            self._connection = FreelanceConnection(self._session, endpoints, context, keys)
        except BaseException:
            self._closed = True
            self._end_context()
            raise
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def request(self, *frames: bytes, timeout: float | None = None) -> Reply:
        """Send a request and return the frames of its reply, whose `service` is the endpoint of the server.

            reply = await client.request(b"hello", timeout=2)

        Args:
            frames: The body of the request; if there are none, one empty frame.
            timeout: Seconds until the reply must have arrived; by default the client's `timeout`.

        Returns:
            The frames of the reply.

        Raises:
            ServiceError: The handler failed.
            RequestTimeout: No reply in time.
            BrokerUnreachable: No server could be reached.
            WorkerLost: Several servers were lost while they held the request.
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        return await self._request(*self._checked(frames, timeout))

    async def call(self, value: Any = None, *, codec: str | Codec | None = None, timeout: float | None = None) -> Any:
        """Send a value and return the value that the server replies with.

            total = await client.call([1, 2, 3])

        Args:
            value: The value.
            codec: Encodes one and decodes the other, if not as by default; the server must use the same.
            timeout: Seconds until the reply must have arrived; by default the client's `timeout`.

        Returns:
            The value of the reply.

        Raises:
            CodecError: A value cannot be encoded or decoded.
            RequestError: As from `request`.
        """
        coder = self._coder if codec is None else Coder(codec)
        return coder.decode(await self.request(*coder.encode(value), timeout=timeout))

    async def ping(self, timeout: float = DEFAULT_PING_TIMEOUT) -> RoundTrips:
        """Send every server a PING, and return how many seconds each took to answer.

            seconds = (await client.ping())["tcp://10.0.0.1:5555"]

        Args:
            timeout: Seconds to wait for the servers.

        Returns:
            The seconds by endpoint, when all have answered or the time is up; None for a server that has not answered.

        Raises:
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        future: asyncio.Future[RoundTrips] = self._open().create_future()
        self._session.survey(time.monotonic(), timeout=checked_timeout(timeout), receiver=future)
        self._step_soon()
        return await future

    def servers(self) -> list[ServerStatus]:
        """Return what is known of each server.

            alive = [server.endpoint for server in client.servers() if server.alive]

        Returns:
            The servers, the one that gets the next request first.

        Raises:
            ClosedError: The client is closed, or belongs to another process.
        """
        self._check_usable()
        return self._session.servers(time.monotonic())

    async def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connections.

            await client.close()

        Does nothing if the client is closed, or in a forked process.
        """
        if process.pid != self._process:
            return
        self._end()
        if self._own_context is not None:
            await asyncio.to_thread(self._end_context)

    async def __aenter__(self) -> Self:
        self._open()  # begins to connect
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and process.pid == self._process:
            text = f"a client of {', '.join(self._endpoints)} was not closed: use `async with`, or close()"
            warn(text, ResourceWarning, stacklevel=2)
            self._end()
            self._end_context()

    def _checked(self, frames: Sequence[bytes], timeout: float | None) -> tuple[Sequence[bytes], float]:
        return checked_body(frames), self._timeout if timeout is None else checked_timeout(timeout)

    async def _request(self, body: Sequence[bytes], timeout: float) -> Reply:
        future: asyncio.Future[Reply] = self._open().create_future()
        call = self._session.request(body, time.monotonic(), timeout=timeout, receiver=future)
        self._step_soon()
        try:
            return await future
        finally:
            if not call.ended:
                self._session.forget(call)
                self._step_soon()  # another request may have its turn

    # ── the connections in the event loop ────────────────────────────────────────────────────────────────────────────

    def _check_usable(self) -> None:
        check_usable(self._closed, self._process)

    def _open(self) -> asyncio.AbstractEventLoop:
        self._check_usable()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for descriptor in self._connection.descriptors:
                add_reader(loop, descriptor, self._step)
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
            log.warning("freelance: the ZeroMQ context was terminated")
            self._end()
            return
        except Exception:
            log.exception("freelance: unexpected error: the client is closed")
            self._end()
            return
        self._deliver()
        if more:
            self._step_soon()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        due = self._connection.due()
        if self._timer is not None and self._timer_at <= due:
            return  # a timer that fires too early is harmless
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._timer_at = due
            self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._step()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._session.close(closed_error)
        self._deliver()
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        if self._loop is not None and not self._loop.is_closed():
            for descriptor in self._connection.descriptors:
                remove_reader(self._loop, descriptor)
        self._connection.close()

    def _end_context(self) -> None:
        context, self._own_context = self._own_context, None
        if context is not None:
            end(context)

    def _deliver(self) -> None:
        for future, outcome in self._session.take_events():
            if future.done() or future.get_loop().is_closed():
                continue  # its task was cancelled, or the program has left the event loop
            if isinstance(outcome, ZmdpError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class FreelanceClient:
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
        key: The secret certificate file of this client's key, for servers that require one (docs/how-to/security.md).
        server_key: The servers' public key, which `key` needs: a certificate file, or 40 characters of Z85.
        context: The ZeroMQ context, needed only for `inproc://` endpoints.

    Raises:
        SettingError: A setting is invalid.
    """

    def __init__(self, servers: str | Sequence[str], **settings: Unpack[FreelanceArguments]) -> None:
        self._client = client = AsyncFreelanceClient(servers, **settings)
        self._threads = ClientThreads(
            self, "zmdp-freelance", servers if isinstance(servers, str) else ", ".join(servers), closing=client._end,
            closed=client._end_context,
        )  # fmt: skip
        self._threads.loop.call(client._open)  # begins to connect

    def request(self, *frames: bytes, timeout: float | None = None) -> Reply:
        """Send a request and return the frames of its reply, whose `service` is the endpoint of the server.

            reply = client.request(b"hello", timeout=2)

        Args:
            frames: The body of the request; if there are none, one empty frame.
            timeout: Seconds until the reply must have arrived; by default the client's `timeout`.

        Returns:
            The frames of the reply.

        Raises:
            ServiceError: The handler failed.
            RequestTimeout: No reply in time.
            BrokerUnreachable: No server could be reached.
            WorkerLost: Several servers were lost while they held the request.
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        return self._run(self._client._request, *self._client._checked(frames, timeout))

    def call(self, value: Any = None, *, codec: str | Codec | None = None, timeout: float | None = None) -> Any:
        """Send a value and return the value that the server replies with.

            total = client.call([1, 2, 3])

        Args:
            value: The value.
            codec: Encodes one and decodes the other, if not as by default; the server must use the same.
            timeout: Seconds until the reply must have arrived; by default the client's `timeout`.

        Returns:
            The value of the reply.

        Raises:
            CodecError: A value cannot be encoded or decoded.
            RequestError: As from `request`.
        """
        coder = self._client._coder if codec is None else Coder(codec)
        return coder.decode(self.request(*coder.encode(value), timeout=timeout))

    def submit(self, *frames: bytes, timeout: float | None = None) -> "Future[Reply]":
        """Send a request and immediately return a `concurrent.futures.Future` of the reply.

            future = client.submit(b"hello")

        Cancelling it ends the request.  Callbacks run one after the other in a thread of the client's.

        Args:
            frames: The body of the request; if there are none, one empty frame.
            timeout: Seconds until the reply must have arrived; by default the client's `timeout`.

        Returns:
            The future of the reply, or of its error.

        Raises:
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        self._client._check_usable()
        future = ReplyFuture(self._threads, self._cancel)
        self._threads.loop.begin(future, self._client._request, *self._client._checked(frames, timeout))
        return future

    def _cancel(self, future: Any) -> None:
        self._threads.loop.cancel(future)

    def ping(self, timeout: float = DEFAULT_PING_TIMEOUT) -> RoundTrips:
        """Send every server a PING, and return how many seconds each took to answer.

            seconds = client.ping()["tcp://10.0.0.1:5555"]

        Args:
            timeout: Seconds to wait for the servers.

        Returns:
            The seconds by endpoint, when all have answered or the time is up; None for a server that has not answered.

        Raises:
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        return self._run(self._client.ping, timeout)

    def servers(self) -> list[ServerStatus]:
        """Return what is known of each server.

            alive = [server.endpoint for server in client.servers() if server.alive]

        Returns:
            The servers, the one that gets the next request first.

        Raises:
            ClosedError: The client is closed, or belongs to another process.
        """

        async def servers() -> list[ServerStatus]:
            return self._client.servers()

        return self._run(servers)

    def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connections.

            client.close()

        Does nothing if the client is closed, or in a forked process.
        """
        if process.pid == self._client._process:
            self._threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, operation: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
        """Perform an operation of the asyncio client in its loop, and return its result or raise its error."""
        self._client._check_usable()
        return self._threads.loop.run(operation, *arguments)


def _checked_servers(servers: str | Sequence[str]) -> list[str]:
    endpoints = [servers] if isinstance(servers, str) else servers
    if not isinstance(endpoints, list | tuple) or not endpoints:
        raise SettingError(f"servers is {servers!r}: it must be an endpoint such as tcp://127.0.0.1:5555, or several")
    return [checked_endpoint(endpoint) for endpoint in endpoints]
