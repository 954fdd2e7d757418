"""The asyncio client."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, Self, TypeVar, Unpack, overload
from warnings import warn

from ..mdp import tracing, wire
from ..mdp.codecs import Codec, Coder
from ..mdp.errors import RequestError, SettingError, ZmdpError
from ..mdp.program import process
from ..mdp.program.arguments import surrounded
from ..mdp.services import BaseService, Description, Service, Streaming
from ..mdp.services.value_types import converted
from . import typed
from .calls.arguments import DEFAULT_TOTAL_TIMEOUT, RequestArguments, SendArguments, StreamArguments, checked_timeout
from .calls.ask import Ask, Dialog, Receiver, check_usable, new_ask
from .calls.reply import AsyncInbox, Reply, is_available
from .calls.retry import Retry, checked_retry
from .calls.settings import ConnectionArguments, ConnectionSettings
from .describing import DESCRIBE, Inquiry
from .legacy.dialog import LegacyDialog
from .many import MapSettings, checked_settings, rows_of_async
from .middleware import AsyncClientMiddleware, OutgoingRequest, changed, checked_middleware, outgoing
from .rows import RowSettings, answer_rows_async
from .x1.broker_connection import Call
from .x1.dialog import X1Dialog

I = TypeVar("I")  # noqa: E741 - in and out
O = TypeVar("O")  # noqa: E741
T = TypeVar("T")

_DEFAULT: Final[Any] = object()
"""Stands for the client's own timeout, because None means no limit."""


class AsyncClient:
    """Calls services through a broker, from asyncio.

        async with AsyncClient("tcp://127.0.0.1:5555") as client:
            await client.request("echo", b"hello")                  # [b'hello']
            await asyncio.gather(*(client.call("sum", [n, 1]) for n in range(500)))

    A client belongs to the event loop in which it is first used.  Cancelling a task that awaits a reply cancels the
    request, at the broker and at the worker.  When the connection is lost, every outstanding request is sent again, so
    a service may see a request more than once.

    Protocols 0.2 and 0.1 are limited: each outstanding request has a connection of its own and is sent only once,
    there are no headers and no options, nothing can be cancelled, and silence may be the only sign of a failure.

    All exceptions are in `zmdp.mdp.errors`.

    Args:
        broker: An endpoint, or several in order of preference; by default those in `$MDP_BROKER`, or else
            tcp://127.0.0.1:5555.  Brokers with keys of their own are written as `ENDPOINT=KEY`.  When the client loses
            its broker, it tries the endpoints in turn until one answers: from the first, or from the second if it has
            just lost the first.  With X1 it also moves to the next when its broker drains, and returns to the first
            once that is back.
        timeout: Seconds that `request` and `call` may take by default, or None for no limit.  The limit travels with
            the request.
        protocol: `"X1"` (docs/reference/x1.md), or `"0.2"` or `"0.1"` for brokers that do not speak it.
        envelope: With protocol 0.2, begin each message with an empty frame, as a ROUTER–DEALER proxy between client
            and broker requires.  X1 and 0.1 always do.
        codec: How `call` encodes values.
        retry: After which errors, and how often, to send a request again, within its `timeout`; by default never.
        middleware: Called around each request, the first outermost: see `zmdp.clients.middleware`.
        heartbeat: Seconds of silence after which the client sends the broker a HEARTBEAT, while a request is
            outstanding.
        liveness: Silent heartbeat intervals after which the broker is considered dead.
        max_outstanding: Maximum number of outstanding requests; others wait for their turn.
        key: The secret certificate file of this client's key, for brokers that require one (docs/how-to/security.md);
            by default `$MDP_KEY`.
        broker_key: The broker's public key, which `key` needs: a certificate file, or 40 characters of Z85; by default
            `$MDP_BROKER_KEY`.
        context: The ZeroMQ context, needed only for `inproc://` endpoints.

    Raises:
        SettingError: A setting is invalid.
    """

    def __init__(
        self,
        broker: str | Sequence[str] | None = None,
        *,
        timeout: float | None = DEFAULT_TOTAL_TIMEOUT,
        codec: str | Codec = "json",
        retry: Retry | None = None,
        middleware: Sequence[AsyncClientMiddleware] = (),
        **connection: Unpack[ConnectionArguments],
    ) -> None:
        self._timeout = None if timeout is None else checked_timeout(timeout)
        self._coder = Coder(codec)
        self._retry = checked_retry(retry, connection.get("protocol", "X1"))
        self._middleware = checked_middleware(middleware, asynchronous=True)
        self._settings = settings = ConnectionSettings.checked(broker, **connection)
        self.protocol = settings.protocol
        self._process = process.pid
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._dialog: Dialog
        try:
            self._dialog = X1Dialog(settings) if self.protocol == "X1" else LegacyDialog(settings)
        except BaseException:
            settings.end_context()
            raise
        self._finalizer = weakref.finalize(self, _abandon, self._dialog, settings, self._process)
        self._finalizer.atexit = False

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._dialog.endpoint

    async def request(self, service: str | bytes, *frames: bytes, **how: Unpack[RequestArguments]) -> Reply:
        """Call `service` and return the frames of its reply.

            reply = await client.request("echo", b"hello", timeout=2)      # [b'hello']

        Args:
            service: The service's name.
            frames: The body of the request; if there are none, one empty frame.
            timeout: Seconds until the reply must have arrived, or None for no limit; by default the client's
                `timeout`.  It travels with the request as its ttl.
            wait: If false, fail immediately when no worker offers the service, or a limit does not let it start.
            headers: Passed to the handler.
            group: Whose turns and limits apply to it, for example a tenant's (docs/how-to/limits.md).
            options: Defined by the service (docs/reference/x1.md).
            retry: After which errors to send it again; by default the client's `retry`.

        Returns:
            The frames of every PARTIAL, if the service streams, followed by those of the FINAL.

        Raises:
            ServiceError: The handler failed.
            ServiceNotFound: No worker offers the service, and `wait` is false.
            RequestTimeout: No reply in time; `BrokerUnreachable`, because no broker answers.
            RetryLater: A limit is reached, or the broker shuts down.
            WorkerLost: The workers that held the request died.
            RequestRejected: The request is not allowed, or too large.
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        ask = self._ask(service, frames, **how)
        self._check_usable()
        reply: Reply = await (self._surrounded(self._request, ask) if self._middleware else self._request(ask))
        return reply

    async def _request(self, ask: Ask) -> Reply:
        headers, finish = ask.headers, None
        if tracing.concerns_calls():
            headers, finish = tracing.calling(ask.service.decode(), headers, ask.timeout)
        reply: asyncio.Future[Reply] = asyncio.Future(loop=self._loop)
        call = None
        try:
            call = self._dialog.begin(reply, ask, ask.encoded(headers))
            found = await reply
        except BaseException as error:
            if call is not None:
                self._dialog.cancel(call)
            if finish is not None:
                finish(error)
            raise
        finally:
            del reply  # an error's traceback refers to this frame, and the future to the error
        if finish is not None:
            finish(None)
        return found

    async def _surrounded(self, send: Callable[[Ask], Any], ask: Ask) -> Any:
        """Send a request through the middleware, and return the reply, or the iterator of a stream."""

        async def call_next(request: OutgoingRequest) -> Any:
            sent = send(changed(ask, request))
            return sent if ask.stream else await sent

        return await surrounded(call_next, self._middleware)(outgoing(ask))

    def _ask(
        self,
        service: str | bytes,
        frames: Sequence[bytes],
        *,
        timeout: float | None = _DEFAULT,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        group: str = "",
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> Ask:
        """Return the request that these arguments describe.  Raises `SettingError` if one is invalid."""
        limit = self._timeout if timeout is _DEFAULT else None if timeout is None else checked_timeout(timeout)
        again = self._retry if retry is None else checked_retry(retry, self.protocol)
        return new_ask(service, frames, limit, wait, headers, group, options, again)

    @overload
    def stream(self, service: Streaming[None, O], **how: Unpack[StreamArguments]) -> AsyncGenerator[O, None]: ...
    @overload
    def stream(
        self, service: Streaming[I, O], value: I, /, **how: Unpack[StreamArguments]
    ) -> AsyncGenerator[O, None]: ...
    @overload
    def stream(
        self, service: str | bytes, *frames: bytes, **how: Unpack[StreamArguments]
    ) -> AsyncGenerator[Reply, None]: ...
    def stream(self, service: Any, *frames: Any, **how: Unpack[StreamArguments]) -> AsyncGenerator[Any, None]:
        """Call `service` and yield the frames of each PARTIAL as it arrives, then those of the FINAL.

            async for part in client.stream("words", b"hello big world"):
                print(part, part.final)
            async for name in client.stream(find, "cat"):                 # a `Streaming` with types: values
                print(name)

        The request is sent when the first part is requested.  Closing the generator early cancels it.  After a lost
        connection it is sent again only if no part has arrived.

        Args:
            service: The service's name, or a `Streaming`.
            frames: The body of the request; if there are none, one empty frame.  For a `Streaming`, its value.
            timeout: Seconds of silence after which the stream fails, or None for no limit.
            deadline: Seconds until the FINAL must have arrived, or None for no limit.  It travels with the request as
                its ttl.
            wait: If false, fail immediately when no worker offers the service, or a limit does not let it start.
            headers: Passed to the handler.
            group: Whose turns and limits apply to it, for example a tenant's (docs/how-to/limits.md).
            options: Defined by the service (docs/reference/x1.md).
            retry: After which errors to send it again; by default the client's `retry`.

        Yields:
            Each part, as it arrives.

        Raises:
            StreamInterrupted: The stream failed after its first part.
            RequestError: As from `request`.
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        if isinstance(service, BaseService):
            body = typed.body(service, frames, streaming=True)
            return typed.values_of_async(service, self._stream(service.name, body, **how))
        return self._stream(service, frames, **how)

    async def _stream(
        self,
        service: str | bytes,
        frames: Sequence[bytes],
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        **how: Unpack[SendArguments],
    ) -> AsyncGenerator[Reply, None]:
        end = None if deadline is None else checked_timeout(deadline, "deadline")
        silence = None if timeout is None else checked_timeout(timeout)
        ask = self._ask(service, frames, timeout=end, **how)
        ask.silence, ask.stream = silence, True
        self._check_usable()
        parts = await self._surrounded(self._parts, ask) if self._middleware else self._parts(ask)
        try:
            async for part in parts:
                yield part
        finally:
            if hasattr(parts, "aclose"):  # middleware may return another iterator
                await parts.aclose()

    async def _parts(self, ask: Ask) -> AsyncGenerator[Reply, None]:
        headers, finish = tracing.calling(ask.service.decode(), ask.headers, ask.timeout)
        inbox = AsyncInbox()
        failed: ZmdpError | None = None
        try:
            inbox.call = self._dialog.begin(inbox, ask, ask.encoded(headers))
            while True:
                part = await inbox.get()
                yield part
                if part.final:
                    break
        except ZmdpError as error:
            failed = error
            raise
        finally:
            if inbox.call is not None:
                self._dialog.cancel(inbox.call)
                inbox.call = None
            finish(failed)
            failed = None  # its traceback refers to this frame

    @overload
    async def call(self, service: Service[None, O], **how: Unpack[RequestArguments]) -> O: ...
    @overload
    async def call(self, service: Service[I, O], value: I, /, **how: Unpack[RequestArguments]) -> O: ...
    @overload
    async def call(
        self,
        service: str | bytes,
        value: Any = ...,
        *,
        codec: str | Codec | None = ...,
        returns: type[T],
        **how: Unpack[RequestArguments],
    ) -> T: ...
    @overload
    async def call(
        self,
        service: str | bytes,
        value: Any = ...,
        *,
        codec: str | Codec | None = ...,
        **how: Unpack[RequestArguments],
    ) -> Any: ...
    async def call(
        self,
        service: Service[Any, Any] | str | bytes,
        value: Any = None,
        *,
        codec: str | Codec | None = None,
        returns: Any = None,
        **how: Unpack[RequestArguments],
    ) -> Any:
        """Call `service` with a value and return the value it replies with.

            await client.call(resize, Resize("a.png", 80))                 # a Service, with types: a Size
            await client.call("images.resize", {"path": "a.png", "width": 80})    # a name: plain values
            await client.call("images.resize", {"path": "a.png", "width": 80}, returns=Size)

        With a name, `codec` encodes one and decodes the other; the worker must use the same.  If the service streams,
        only the FINAL counts: see `stream` and `call_stream`.

        Args:
            service: The service, or its name.
            value: What it is called with.
            codec: With a name: how values are encoded, if not as by default.
            returns: With a name: the type of the reply.
            how: Arguments of `request`.

        Returns:
            The value of the reply.

        Raises:
            CodecError: A value cannot be encoded or decoded, or is not of the declared type.
            RequestError: As from `request`.
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        if isinstance(service, BaseService):
            return typed.value_of(service, await self.request(service.name, *typed.body(service, (value,)), **how))
        coder = self._coder if codec is None else Coder(codec)
        reply = await self.request(service, *coder.encode(value), **how)
        found = coder.decode(reply[reply.collected :])
        return found if returns is None else converted(found, returns)

    async def call_stream(
        self,
        service: str | bytes,
        value: Any = None,
        *,
        codec: str | Codec | None = None,
        **how: Unpack[StreamArguments],
    ) -> AsyncGenerator[Any, None]:
        """Call `service` with a value and yield each value as it arrives; that of the FINAL unless it is None.

            async for value in client.call_stream("numbers.count", 3):
                print(value)

        Args:
            service: The service's name.
            value: What it is called with.
            codec: How values are encoded, if not as by default.
            how: Arguments of `stream`.

        Yields:
            The value of each part.

        Raises:
            CodecError: A value cannot be encoded or decoded.
            RequestError: As from `stream`.
        """
        coder = self._coder if codec is None else Coder(codec)
        parts = self.stream(service, *coder.encode(value), **how)
        async with aclosing(parts):
            async for part in parts:
                decoded = coder.decode(part)
                if decoded is not None or not part.final:
                    yield decoded

    @overload
    def map(
        self, service: Service[I, O], rows: Iterable[I] | AsyncIterable[I], **settings: Unpack[MapSettings]
    ) -> AsyncGenerator[O | ZmdpError, None]: ...
    @overload
    def map(
        self, service: str | bytes, rows: Iterable[bytes] | AsyncIterable[bytes], **settings: Unpack[MapSettings]
    ) -> AsyncGenerator[Reply | RequestError, None]: ...
    def map(
        self, service: Any, rows: Iterable[Any] | AsyncIterable[Any], **settings: Unpack[MapSettings]
    ) -> AsyncGenerator[Any, None]:
        """Call `service` for each row, and yield the outcomes in the order of the rows (docs/how-to/python.md).

            async for outcome in client.map("shout", rows):
                print(outcome)                                      # [b'HELLO'], or an exception

        An outcome is the reply, or the error of a row that failed, which is not raised.  Each row is a request of this
        one frame.  Rows are read as their outcomes are taken, four windows ahead at most.  Closing the generator early
        cancels what is outstanding.

        Args:
            service: The service's name, or a `Service`: then rows and replies are values.
            rows: The rows.
            window: Maximum number of outstanding requests; by default as many as are answered quickly, 64 to 1,024.
                Beside it, the size of the rows and of replies that have not been taken is limited to 64 MB.
            timeout: Seconds for each request.
            headers: Passed to the handler, with each row.
            group: Whose turns and limits apply to the rows (docs/how-to/limits.md).  A row that a limit holds back for
                longer than `timeout` is sent again.

        Yields:
            The outcome of each row.

        Raises:
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        checked = checked_settings(self.protocol, **settings)
        if isinstance(service, BaseService):
            return typed.outcome_values_async(
                service, self._mapped(service.name, typed.encoded_async(service, rows), checked)
            )
        return self._mapped(wire.service_name(service).decode(), rows, checked)

    async def _mapped(
        self, service: str, rows: Iterable[bytes] | AsyncIterable[bytes], settings: RowSettings
    ) -> AsyncGenerator[Reply | RequestError, None]:
        self._check_usable()
        async with aclosing(answer_rows_async(rows_of_async(service, rows), settings, self)) as answered:
            async for row in answered:
                yield row.outcome  # type: ignore[misc]  # a `Reply`, because this is an `AsyncClient`

    def _direct_dialog(self) -> X1Dialog | None:
        """Return the dialog, for the running event loop, if requests need nothing else."""
        self._check_usable()
        if self._middleware or tracing.concerns_calls() or not isinstance(self._dialog, X1Dialog):
            return None
        self._dialog.open()
        return self._dialog

    def begin(self, receiver: Receiver, service: str | bytes, *frames: bytes, **how: Unpack[RequestArguments]) -> Call:
        """Call `service` without a task: `receiver.put` is called with each part, and with the reply or the error.

            call = client.begin(receiver, "echo", b"hello")
            client.cancel(call)

        For programs that translate between protocols.  It returns immediately.

        Args:
            receiver: Gets each part, and the reply or the error.
            service: The service's name.
            frames: The body of the request; if there are none, one empty frame.
            timeout: Seconds until the reply must have arrived, or None for no limit; by default the client's
                `timeout`.
            wait: If false, fail immediately when no worker offers the service, or a limit does not let it start.
            headers: Passed to the handler.
            group: Whose turns and limits apply to it, for example a tenant's (docs/how-to/limits.md).
            options: Defined by the service (docs/reference/x1.md).
            retry: After which errors to send it again; by default the client's `retry`.

        Returns:
            The request, which `cancel` ends early.

        Raises:
            SettingError: An argument is invalid, or the protocol is not X1.
            ClosedError: The client is closed, or belongs to another process.
        """
        ask = self._ask(service, frames, **how)
        ask.stream = True
        self._check_usable()
        return self._x1().begin(receiver, ask, ask.encoded(ask.headers))

    def cancel(self, call: Call) -> None:
        """Cancel a request made with `begin`, at the broker and at the worker.  Its receiver gets nothing more.

            client.cancel(client.begin(receiver, "echo", b"hello"))

        Args:
            call: What `begin` returned.

        Raises:
            SettingError: The protocol is not X1.
        """
        self._x1().cancel(call)

    def _x1(self) -> X1Dialog:
        if self._middleware:
            raise SettingError("begin() needs a client without middleware, because it has no task to call it in")
        if not isinstance(self._dialog, X1Dialog):
            raise SettingError(f"begin() needs protocol X1, not {self.protocol}")
        return self._dialog

    async def available(self, service: str | bytes, *, timeout: float | None = _DEFAULT) -> bool:
        """Return whether at least one worker offers `service` now (`mmi.service`).

            if not await client.available("echo"):
                print("there is no worker")

        Args:
            service: The service's name.
            timeout: Seconds until the reply must have arrived, or None for no limit; by default the client's
                `timeout`.

        Returns:
            Whether it is offered.

        Raises:
            RequestRejected: This client's role may not know about the service.
            RequestError: As from `request`.
        """
        return is_available(await self.request("mmi.service", wire.service_name(service), timeout=timeout), service)

    async def describe(self, service: str | bytes, *, timeout: float | None = _DEFAULT) -> Description:
        """Return what the workers of `service` say of it: its version, its types, and so on (`mmi.describe`).

            found = await client.describe("images.resize")
            found.about.version, found.workers                      # '2', 3

        These are the workers' own statements, which nobody has checked.  If other brokers have workers of it too, they
        are asked as well, as far as they can be reached; with protocols 0.2 and 0.1, only one broker answers.

        Args:
            service: The service's name.
            timeout: Seconds that each broker may take to answer, or None for no limit; by default the client's
                `timeout`.

        Returns:
            What they say.

        Raises:
            ServiceNotFound: No worker offers it, or this client's role may not know of it.
            RequestError: As from `request`.
        """
        name = wire.service_name(service)
        inquiry = Inquiry(name.decode())
        inquiry.take(await self.request(DESCRIBE, name, timeout=timeout))
        while self.protocol == "X1" and (broker := inquiry.next_broker()) is not None:
            with suppress(RequestError):  # the broker is gone by now, or does not tell this role
                inquiry.take(await self.request(DESCRIBE, name, timeout=timeout, options={"broker": broker}))
        return inquiry.description()

    def _check_usable(self) -> None:
        check_usable(self._closed, self._process)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise SettingError("this client belongs to another event loop: create one in each asyncio.run()")
            self._loop = loop

    async def close(self) -> None:
        """Cancel every outstanding request and close the connection.

            await client.close()                                          # as the end of a `async with` block does

        Does nothing if the client is closed, or in a forked process.
        """
        if self._closed or process.pid != self._process:
            return
        self._closed = True
        self._finalizer.detach()
        self._dialog.close()
        if self._settings.owns_context:
            try:
                await asyncio.to_thread(self._settings.end_context)  # waits until the last messages have been sent
            except RuntimeError:  # the interpreter exits, and starts no more threads
                self._settings.end_context()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _abandon(dialog: Dialog, settings: ConnectionSettings, pid: int) -> None:
    """Close a client that was collected without having been closed."""
    if pid != process.pid:
        return

    def end() -> None:
        dialog.close()
        settings.end_context()

    warn(f"a client of {dialog.endpoint} was not closed: use `async with`, or close()", ResourceWarning, stacklevel=2)
    if dialog.loop is not None and dialog.loop.is_running():
        dialog.loop.call_soon_threadsafe(end)
    else:
        end()
