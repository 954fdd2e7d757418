"""The synchronous client."""

import asyncio
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from ..mdp import wire
from ..mdp.codecs import Codec, Coder
from ..mdp.errors import RequestError, SettingError, ZmdpError
from ..mdp.program import process
from ..mdp.program.extras import install_command
from ..mdp.services import BaseService, Description, Service, Streaming
from ..mdp.services.value_types import converted
from . import typed
from .aio import AsyncClient
from .blocking import BlockingDialog
from .calls.arguments import (
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT,
    RetriedArguments,
    RetriedStreamArguments,
    check_legacy,
    checked_retries,
    checked_timeout,
)
from .calls.ask import Ask, check_usable, checked_body, new_ask
from .calls.reply import Reply, is_available
from .calls.retry import Retry, checked_retry
from .calls.settings import ConnectionArguments, ConnectionSettings
from .describing import DESCRIBE, Inquiry
from .many import MapSettings, checked_settings, rows_of
from .middleware import ClientMiddleware, MiddlewareDialog, checked_middleware
from .rows import RowSettings, answer_rows

if TYPE_CHECKING:
    import pyarrow as pa

I = TypeVar("I")  # noqa: E741 - in and out
O = TypeVar("O")  # noqa: E741
T = TypeVar("T")


class Client:
    """Calls services through a broker.

        with Client("tcp://127.0.0.1:5555") as client:
            client.request("echo", b"hello")                        # [b'hello']
            client.call("sum", [1, 2, 3])                           # 6
            futures = [client.submit("echo", b"%d" % n) for n in range(100)]

    Any number of threads may share a client, whose requests are made by a thread of its own.  When the connection is
    lost, every outstanding request is sent again, so a service may see a request more than once.

    Protocols 0.2 and 0.1 are limited: each outstanding request has a connection of its own.  After `timeout` seconds of
    silence it is sent again over a new one, `retries` times (C4, C5).  There are no headers and no options, nothing can
    be cancelled, and silence may be the only sign of a failure.

    All exceptions are in `zmdp.mdp.errors`.

    Args:
        broker: An endpoint, or several in order of preference; by default those in `$MDP_BROKER`, or else
            tcp://127.0.0.1:5555.  Brokers with keys of their own are written as `ENDPOINT=KEY`.  When the client loses
            its broker, it tries the endpoints in turn until one answers: from the first, or from the second if it has
            just lost the first.  With X1 it also moves to the next when its broker drains, and returns to the first
            once that is back.
        timeout: Seconds that each attempt may take.
        retries: Attempts after the first, when nothing answers.  A request may take `timeout × (1 + retries)` seconds
            in all, and this limit travels with it.  After which errors it is sent again, `retry` says; how often
            Titanic tries again what failed, the `retries` of a service or a submission.
        protocol: `"X1"` (docs/reference/x1.md), or `"0.2"` or `"0.1"` for brokers that do not speak it.
        envelope: With protocol 0.2, begin each message with an empty frame, as a ROUTER–DEALER proxy between client
            and broker requires.  X1 and 0.1 always do.
        codec: How `call` encodes values.
        retry: After which errors, and how often, to send a request again, within that time; by default never.
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
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        codec: str | Codec = "json",
        retry: Retry | None = None,
        middleware: Sequence[ClientMiddleware] = (),
        **connection: Unpack[ConnectionArguments],
    ) -> None:
        self._timeout = checked_timeout(timeout)
        self._retries = checked_retries(retries)
        self._coder = Coder(codec)
        self._retry = checked_retry(retry, connection.get("protocol", "X1"))
        surrounding = checked_middleware(middleware, asynchronous=False)
        settings = ConnectionSettings.checked(broker, **connection)
        self.protocol = settings.protocol
        self._closed = False
        self._process = process.pid
        loaded: ConnectionArguments = {**connection, "key": settings.keys or "", "broker_key": None}
        self._connect = partial(AsyncClient, settings.endpoints, **loaded)
        """Makes the client that `map` uses."""
        self._dialog: BlockingDialog
        try:
            if surrounding:
                self._dialog = dialog = MiddlewareDialog(settings, surrounding)
                self._connect = partial(self._connect, middleware=[dialog.for_map()])
            else:
                self._dialog = BlockingDialog(settings)
        except BaseException:
            settings.end_context()
            raise

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._dialog.endpoint

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, service: str | bytes, *frames: bytes, **how: Unpack[RetriedArguments]) -> Reply:
        """Call `service` and return the frames of its reply.

            reply = client.request("echo", b"hello", timeout=2)      # [b'hello']

        Args:
            service: The service's name.
            frames: The body of the request; if there are none, one empty frame.
            timeout: Seconds that each attempt may take; by default the client's `timeout`.
            retries: Attempts after the first; by default the client's `retries`.  The reply must have arrived within
                `timeout × (1 + retries)` seconds, which travel with the request as its ttl.
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
        dialog = self._usable()
        return dialog.request(self._ask(service, frames, **how))

    @overload
    def stream(
        self, service: Streaming[None, O], **how: Unpack[RetriedStreamArguments]
    ) -> Generator[O, None, None]: ...
    @overload
    def stream(
        self, service: Streaming[I, O], value: I, /, **how: Unpack[RetriedStreamArguments]
    ) -> Generator[O, None, None]: ...
    @overload
    def stream(
        self, service: str | bytes, *frames: bytes, **how: Unpack[RetriedStreamArguments]
    ) -> Generator[Reply, None, None]: ...
    def stream(self, service: Any, *frames: Any, **how: Unpack[RetriedStreamArguments]) -> Generator[Any, None, None]:
        """Call `service` and yield the frames of each PARTIAL as it arrives, then those of the FINAL.

            for part in client.stream("words", b"hello big world"):
                print(part, part.final)
            for name in client.stream(find, "cat"):                 # a `Streaming` with types: values
                print(name)

        The request is sent when the first part is requested.  Leaving the loop early cancels it.  After a lost
        connection it is sent again only if no part has arrived.

        Args:
            service: The service's name, or a `Streaming`.
            frames: The body of the request; if there are none, one empty frame.  For a `Streaming`, its value.
            timeout: As in `request`, but limits the silence between parts, not the whole stream.
            retries: The stream fails after `timeout × (1 + retries)` seconds of silence.
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
        dialog = self._usable()
        if isinstance(service, BaseService):
            body = typed.body(service, frames, streaming=True)
            return typed.values_of(service, dialog.stream(self._stream_ask(service.name, body, **how)))
        return dialog.stream(self._stream_ask(service, frames, **how))

    @overload
    def call(self, service: Service[None, O], **how: Unpack[RetriedArguments]) -> O: ...
    @overload
    def call(self, service: Service[I, O], value: I, /, **how: Unpack[RetriedArguments]) -> O: ...
    @overload
    def call(
        self,
        service: str | bytes,
        value: Any = ...,
        *,
        codec: str | Codec | None = ...,
        returns: type[T],
        **how: Unpack[RetriedArguments],
    ) -> T: ...
    @overload
    def call(
        self,
        service: str | bytes,
        value: Any = ...,
        *,
        codec: str | Codec | None = ...,
        **how: Unpack[RetriedArguments],
    ) -> Any: ...
    def call(
        self,
        service: Service[Any, Any] | str | bytes,
        value: Any = None,
        *,
        codec: str | Codec | None = None,
        returns: Any = None,
        **how: Unpack[RetriedArguments],
    ) -> Any:
        """Call `service` with a value and return the value it replies with.

            client.call(resize, Resize("a.png", 80))                 # a Service, with types: a Size
            client.call("images.resize", {"path": "a.png", "width": 80})    # a name: plain values
            client.call("images.resize", {"path": "a.png", "width": 80}, returns=Size)

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
            return typed.value_of(service, self.request(service.name, *typed.body(service, (value,)), **how))
        coder = self._coder if codec is None else Coder(codec)
        reply = self.request(service, *coder.encode(value), **how)
        found = coder.decode(reply[reply.collected :])
        return found if returns is None else converted(found, returns)

    def call_stream(
        self,
        service: str | bytes,
        value: Any = None,
        *,
        codec: str | Codec | None = None,
        **how: Unpack[RetriedStreamArguments],
    ) -> Generator[Any, None, None]:
        """Call `service` with a value and yield each value as it arrives; that of the FINAL unless it is None.

            for value in client.call_stream("numbers.count", 3):
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
        return _decoded(coder, self.stream(service, *coder.encode(value), **how))

    @overload
    def submit(self, service: Service[None, O], **how: Unpack[RetriedArguments]) -> "Future[O]": ...
    @overload
    def submit(self, service: Service[I, O], value: I, /, **how: Unpack[RetriedArguments]) -> "Future[O]": ...
    @overload
    def submit(self, service: str | bytes, *frames: bytes, **how: Unpack[RetriedArguments]) -> "Future[Reply]": ...
    def submit(self, service: Any, *frames: Any, **how: Unpack[RetriedArguments]) -> "Future[Any]":
        """Call `service` and immediately return a `concurrent.futures.Future` of the reply.

            futures = [client.submit("echo", b"%d" % number) for number in range(100)]
            replies = [future.result() for future in futures]

        Of a `Service` with types, given a value, it is the future of a value.  Any number of futures may be
        outstanding.  `future.cancel()` cancels the request.  Callbacks run one after the other in a thread of the
        client's: they may use the client and wait for other replies, but while one blocks, the other callbacks wait.

        Args:
            service: The service's name, or a `Service`.
            frames: The body of the request; if there are none, one empty frame.  For a `Service`, its value.
            how: Arguments of `request`.

        Returns:
            The future of the reply, or of its error.

        Raises:
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        dialog = self._usable()
        if isinstance(service, BaseService):
            ask = self._ask(service.name, typed.body(service, frames), **how)
            return dialog.submit(ask, partial(typed.value_of, service))
        return dialog.submit(self._ask(service, frames, **how))

    @overload
    def map(
        self, service: Service[I, O], rows: Iterable[I], **settings: Unpack[MapSettings]
    ) -> Generator[O | ZmdpError, None, None]: ...
    @overload
    def map(
        self, service: str | bytes, rows: Iterable[bytes], **settings: Unpack[MapSettings]
    ) -> Generator[Reply | RequestError, None, None]: ...
    def map(self, service: Any, rows: Iterable[Any], **settings: Unpack[MapSettings]) -> Generator[Any, None, None]:
        """Call `service` for each row, and yield the outcomes in the order of the rows (docs/how-to/python.md).

            for outcome in client.map("shout", rows):
                print(outcome)                                      # [b'HELLO'], or an exception

        An outcome is the reply, or the error of a row that failed, which is not raised.  Each row is a request of this
        one frame.  Rows are read as their outcomes are taken, four windows ahead at most.  Closing the generator early
        cancels what is outstanding.  The requests have a connection of their own, over which they are sent and received
        while an outcome is waited for.

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
            SettingError: An argument is invalid; or an event loop is running: use `AsyncClient.map` there.
            ClosedError: The client is closed, or belongs to another process.
        """
        checked = checked_settings(self.protocol, **settings)
        self._check_map("Client.map cannot run within an event loop: use AsyncClient.map")
        if isinstance(service, BaseService):
            return typed.outcome_values(service, self._mapped(service.name, typed.encoded(service, rows), checked))
        return self._mapped(wire.service_name(service).decode(), rows, checked)

    def _mapped(
        self, service: str, rows: Iterable[bytes], settings: RowSettings
    ) -> Generator[Reply | RequestError, None, None]:
        with closing(answer_rows(rows_of(service, rows), settings, self._connect)) as answered:
            for row in answered:
                yield row.outcome  # type: ignore[misc]  # a `Reply`, because the client is an `AsyncClient`

    def map_arrow(
        self,
        service: str | bytes,
        data: Any,
        *,
        input: str | Sequence[str],  # noqa: A002 - the natural name
        output: str = "reply",
        codec: str | None = None,
        result: "str | pa.DataType" = "string",
        rows_per_request: int | None = None,
        **settings: Unpack[MapSettings],
    ) -> "Generator[pa.RecordBatch, None, None]":
        """Call `service` for each row of Arrow data, and yield the data with the replies (docs/how-to/python.md).

            batches = client.map_arrow("echo", pa.table({"text": ["a", "b"]}), input="text")
            replies = pa.Table.from_batches(batches)                # text, reply, reply_code, reply_error

        There are three more columns: `output`, the reply; `output`_code, which is 200 for a row that has its reply, and
        NULL for a row that was not sent; `output`_error, which otherwise says what went wrong.  Batches may be smaller
        than those of the data; there is at least one, perhaps without rows.  Rows are read and sent as with `map`.

        Args:
            service: The service's name.
            data: A `pyarrow.Table` or `RecordBatchReader`, or anything else with `__arrow_c_stream__`, such as a
                DataFrame of Polars or a relation of DuckDB.
            input: The column of strings or bytes to send; rows in which it is NULL are not sent.
            output: Name of the reply column.
            codec: `"arrow"` for a service whose handler takes and returns Arrow tables (docs/spark/pipeline.md): then
                `input` is a column of any type, or a list of columns, and its NULLs are sent too.
            result: `"string"`, `"binary"`, or `"frames"` for a list of all frames of the reply.  With
                `codec="arrow"`, the type of the first column of the reply: a `pyarrow.DataType`, or its name.
            rows_per_request: With `codec="arrow"`, the rows of a request; by default up to 5,000, of 1 MB in all.
            settings: `window`, `timeout`, `headers` and `group`, as for `map`.

        Yields:
            Record batches: those of the data, with the three columns.

        Raises:
            SettingError: An argument is invalid, PyArrow is missing, or an event loop is running.
            ClosedError: The client is closed, or belongs to another process.
        """
        name = wire.service_name(service).decode()
        checked = checked_settings(self.protocol, **settings)
        self._check_map("Client.map_arrow cannot run within an event loop: call it in a thread")
        try:
            from .rows.arrow import map_arrow  # noqa: PLC0415 - needs an optional dependency
        except ImportError as error:
            raise SettingError(f"Client.map_arrow needs PyArrow: {install_command('arrow')} ({error})") from None
        return map_arrow(name, data, input, output, codec, result, rows_per_request, checked, self._connect)

    def _check_map(self, within_loop: str) -> None:
        """Raise `ClosedError`, or `SettingError` with this text if an event loop runs: rows are sent by another one."""
        self._usable()
        with suppress(RuntimeError):  # none is running
            asyncio.get_running_loop()
            raise SettingError(within_loop)

    def available(self, service: str | bytes, *, timeout: float | None = None, retries: int | None = None) -> bool:
        """Return whether at least one worker offers `service` now (`mmi.service`).

            if not client.available("echo"):
                print("there is no worker")

        Args:
            service: The service's name.
            timeout: Seconds that each attempt may take; by default the client's `timeout`.
            retries: Attempts after the first; by default the client's `retries`.

        Returns:
            Whether it is offered.

        Raises:
            RequestRejected: This client's role may not know about the service.
            RequestError: As from `request`.
        """
        reply = self.request("mmi.service", wire.service_name(service), timeout=timeout, retries=retries)
        return is_available(reply, service)

    def describe(
        self, service: str | bytes, *, timeout: float | None = None, retries: int | None = None
    ) -> Description:
        """Return what the workers of `service` say of it: its version, its types, and so on (`mmi.describe`).

            found = client.describe("images.resize")
            found.about.version, found.workers                      # '2', 3

        These are the workers' own statements, which nobody has checked.  If other brokers have workers of it too, they
        are asked as well, as far as they can be reached; with protocols 0.2 and 0.1, only one broker answers.

        Args:
            service: The service's name.
            timeout: Seconds that each attempt may take; by default the client's `timeout`.
            retries: Attempts after the first, at each broker; by default the client's `retries`.

        Returns:
            What they say.

        Raises:
            ServiceNotFound: No worker offers it, or this client's role may not know of it.
            RequestError: As from `request`.
        """
        name = wire.service_name(service)
        inquiry = Inquiry(name.decode())
        inquiry.take(self.request(DESCRIBE, name, timeout=timeout, retries=retries))
        while self.protocol == "X1" and (broker := inquiry.next_broker()) is not None:
            with suppress(RequestError):  # the broker is gone by now, or does not tell this role
                options = {"broker": broker}
                inquiry.take(self.request(DESCRIBE, name, timeout=timeout, retries=retries, options=options))
        return inquiry.description()

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: str | bytes, *frames: bytes) -> None:
        """Send a request without waiting: any number may be sent before `recv` returns the replies.

            client.send("echo", b"hello")
            reply = client.recv()                                   # [b'hello']

        Replies arrive in the order of completion.  With protocols 0.2 and 0.1, which do not number requests, nothing is
        sent again.

        Args:
            service: The service's name.
            frames: The body of the request; if there are none, one empty frame.

        Raises:
            SettingError: An argument is invalid.
            ClosedError: The client is closed, or belongs to another process.
        """
        self._usable().send(wire.service_name(service), checked_body(frames))

    def recv(self, timeout: float | None = None) -> Reply:
        """Return the next reply, or part of one (see `Reply.final`), to a request made with `send`.

            client.send("echo", b"hello")
            reply = client.recv()                                   # [b'hello']

        Args:
            timeout: Seconds to wait; by default the client's.

        Returns:
            The frames of the reply or part.

        Raises:
            RequestTimeout: None has arrived in time; `recv` can be called again.
            BusyError: Nothing was sent.
            RequestError: What a request failed with, such as `ServiceError`.
        """
        return self._usable().recv(timeout=self._timeout if timeout is None else checked_timeout(timeout))

    def reset(self) -> None:
        """Abandon every request made with `send`.

            client.reset()

        `recv` will not return their replies.
        """
        self._dialog.reset()

    def _ask(
        self,
        service: str | bytes,
        frames: Sequence[bytes],
        *,
        timeout: float | None = None,
        retries: int | None = None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        group: str = "",
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> Ask:
        """Return the request that these arguments describe.  Raises `SettingError` if one is invalid.

        X1 allows `timeout × (1 + retries)` seconds; a legacy protocol sends the request again after each `timeout`.
        """
        each = self._timeout if timeout is None else checked_timeout(timeout)
        tries = self._retries if retries is None else checked_retries(retries)
        again = self._retry if retry is None else checked_retry(retry, self.protocol)
        if self.protocol != "X1":
            check_legacy(not wait, headers, group, options, retry)
            return Ask(wire.service_name(service), checked_body(frames), None, each, tries)
        return new_ask(service, frames, each * (1 + tries), wait, headers, group, options, again)

    def _stream_ask(
        self,
        service: str | bytes,
        frames: Sequence[bytes],
        *,
        deadline: float | None = None,
        **how: Unpack[RetriedArguments],
    ) -> Ask:
        """Return the stream that these arguments describe: its `timeout` limits the silence between its parts."""
        ask = self._ask(service, frames, **how)
        ask.stream = True
        if self.protocol != "X1":
            check_legacy(deadline)
        else:
            ask.silence, ask.timeout = ask.timeout, None if deadline is None else checked_timeout(deadline, "deadline")
        return ask

    def _usable(self) -> BlockingDialog:
        check_usable(self._closed, self._process)
        return self._dialog

    def close(self) -> None:
        """Cancel every outstanding request and close the connection.

            client.close()                                          # as the end of a `with` block does

        Does nothing if the client is closed, or in a forked process.
        """
        if self._closed or process.pid != self._process:
            return
        self._closed = True
        self._dialog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decoded(coder: Coder, parts: Generator[Reply, None, None]) -> Generator[Any, None, None]:
    try:
        for part in parts:
            value = coder.decode(part)
            if value is not None or not part.final:
                yield value
    finally:
        parts.close()
