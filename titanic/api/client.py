"""Titanic for Python programs: submit a request, and fetch its reply at any later time.

    with Client() as client:
        ticket = Titanic(client).submit("resize", image, key="image-17")
        print(ticket.uuid)          # with it, any program can fetch the reply later
        ...
        reply = Titanic(client).ticket(uuid).result()
        ticket.close()

Times are seconds.  All errors are in `zmdp.mdp.errors`.  `Titanic` is for threads, `AsyncTitanic` for asyncio; both
hold the conversation of `titanic/api/steps.py`, which runs to its end without an event loop if its client blocks.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping
from contextlib import aclosing, closing
from typing import Any, Generic, Self, TypeVar, Unpack, overload
from uuid import UUID

from ...clients import AsyncClient, Client, Reply
from ...mdp.codecs import Codec
from ...mdp.errors import SettingError
from ...mdp.services import Service, Streaming
from .steps import FRAMES, Conversation, Reader, ServiceOrName, body_of, name_of, options_of, reader_of, uuid_text
from .submission import SubmissionOptions

I = TypeVar("I")  # noqa: E741 - in and out
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
"""The type that a reply's FINAL is read as."""
P = TypeVar("P")
"""The type that its PARTIALs are read as."""
T = TypeVar("T")


class TicketOptions(SubmissionOptions, total=False):
    """The options of `submit`."""

    headers: Mapping[str, str] | None


# ── for threads ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Titanic:
    """Submits requests to Titanic through a `zmdp.clients.Client`.

        with Client() as client:
            ticket = Titanic(client).submit("resize", b"a.png")
            reply = ticket.result()

    A client whose protocol is `"0.2"` cannot send options, and polls for replies.

    Args:
        client: Its connection, and its key, are used.

    Raises:
        SettingError: `client` is something else.
    """

    def __init__(self, client: Client) -> None:
        _check_client(client, Client)
        self.client = client
        self._conversation = Conversation(_Blocking(client), _sleep)

    @overload
    def submit(self, service: Service[None, O], **options: Unpack[TicketOptions]) -> "Ticket[O, Reply]": ...
    @overload
    def submit(self, service: Service[I, O], value: I, /, **options: Unpack[TicketOptions]) -> "Ticket[O, Reply]": ...
    @overload
    def submit(
        self, service: Streaming[I, O], value: I, /, **options: Unpack[TicketOptions]
    ) -> "Ticket[O | None, O]": ...
    @overload
    def submit(
        self, service: str | bytes, value: Any = ..., /, *, codec: str | Codec, **options: Unpack[TicketOptions]
    ) -> "Ticket[Any, Any]": ...
    @overload
    def submit(
        self, service: str | bytes, *frames: bytes, codec: None = ..., **options: Unpack[TicketOptions]
    ) -> "Ticket[Reply, Reply]": ...
    def submit(
        self, service: Any, *frames: Any, codec: str | Codec | None = None, **options: Unpack[TicketOptions]
    ) -> "Ticket[Any, Any]":
        """Submit a request for `service`; when this returns, the request is on disk.

            ticket = titanic.submit(resize, Resize("a.png", 80), key="a.png", retries=3, ttl=86400)
            print(ticket.uuid)

        Args:
            service: The service to call: its name, or a `Service` or `Streaming`.
            frames: The body; without frames, one empty frame.  For a service with types, or with `codec`, its value.
            codec: With a name: the codec of the value that is sent, and of those that the ticket returns.
            headers: Headers for the service's handler.
            key: An idempotency key, to make your own retries safe: the same key and service return the first request's
                ticket.  (If the client itself resends a request after a lost connection, it is stored only once in any
                case.)
            on_duplicate: With "replace", the request takes the place of the key's request, whose ticket is returned,
                unless that has begun: then it is stored beside it, and the key stands for it (default: "keep").
            key_ttl: How long to remember the key, in seconds (default: forever).
            delay: Delay in seconds before the request may run.
            at: Earliest time at which it may run: a datetime with its time zone, or seconds since 1970.
            priority: 0 to 9; 9 runs first (default: the service's, or 0).
            group: Whose turns and limits apply to it, for example a tenant's (docs/how-to/limits.md).
            retries: How often Titanic retries it if the handler fails (default: the service's, or 0).
            backoff: Pause in seconds before the first retry, doubled for each further one (default: the
                service's, or 1).
            ttl: How long to keep the result, in seconds (default: the service's, or until it is closed).

        Returns:
            The ticket, with which the reply can be fetched.

        Raises:
            SettingError: An argument is invalid.
            TitanicError: The request was not stored.
            ServiceNotFound: No Titanic is registered at the broker, nor has one registered within 15 seconds.
            RequestError: As from `Client.request`.
        """
        headers = options.pop("headers", None)
        given, body = options_of(service, options), body_of(service, frames, codec)
        name, reader = name_of(service), reader_of(service, codec)
        return Ticket(self, *_completed(self._conversation.submit(name, body, headers, given)), reader=reader)

    @overload
    def ticket(self, uuid: str | bytes | UUID, service: Service[Any, O]) -> "Ticket[O, Reply]": ...
    @overload
    def ticket(self, uuid: str | bytes | UUID, service: Streaming[Any, O]) -> "Ticket[O | None, O]": ...
    @overload
    def ticket(self, uuid: str | bytes | UUID, *, codec: str | Codec) -> "Ticket[Any, Any]": ...
    @overload
    def ticket(self, uuid: str | bytes | UUID, service: None = ...) -> "Ticket[Reply, Reply]": ...
    def ticket(
        self, uuid: str | bytes | UUID, service: ServiceOrName | None = None, codec: str | Codec | None = None
    ) -> "Ticket[Any, Any]":
        """Return the ticket of a request that was submitted before.

        With a `service` that has types, or with a `codec`, its replies are read as values.

            ticket = titanic.ticket("3f0c1d5a5a3b4b7e9b0a6f1f2d4c8e11", resize)

        Args:
            uuid: The request's UUID.
            service: The service that it was for, if it has types.
            codec: The codec of the values in its replies.

        Returns:
            The ticket; whether there is such a request shows when it is used.

        Raises:
            InvalidUUID: `uuid` is not a UUID.
            SettingError: There is no such codec.
        """
        return Ticket(self, uuid_text(uuid), reader=reader_of(service, codec))


class Ticket(Generic[R, P]):
    """A request that Titanic has stored.

        with Titanic(client).ticket(uuid) as ticket:            # closes it at the end of the block
            print(ticket.result())

    At a broker without access control, anyone who knows its `uuid` can fetch or close it, so keep it secret; otherwise
    the role that submitted it, and admins.

    Args:
        titanic: Through which it is fetched.
        uuid: The request's UUID.
        service: The service's name, if it is known.
        reader: How the reply is read.
    """

    def __init__(self, titanic: Titanic, uuid: str, service: str = "", *, reader: Reader = FRAMES) -> None:
        self.uuid = uuid
        self.service = service
        """The service's name, if the request was submitted here."""
        self._conversation = titanic._conversation
        self._reader = reader

    def __repr__(self) -> str:
        return f"Ticket({self.uuid!r})"

    def ready(self) -> bool:
        """Return whether the request has ended.

            if ticket.ready():
                print(ticket.result())

        Returns:
            Whether it is done or has failed.

        Raises:
            UnknownTicket: It was closed, or its result has expired.
            RequestError: As from `Client.request`.
        """
        return _completed(self._conversation.ready(self.uuid))

    def request(self) -> list[bytes]:
        """Return the body of the request: with a known key, that of the first one.

            frames = ticket.request()

        It needs a client that speaks X1.

        Returns:
            The frames.

        Raises:
            UnknownTicket: It was closed, or its result has expired.
            RequestError: As from `Client.request`.
        """
        return _completed(self._conversation.request(self.uuid))

    def result(self, timeout: float | None = None) -> R:
        """Return the reply's FINAL once it is there.

            size = ticket.result(timeout=60)

        It can be fetched any number of times.

        Args:
            timeout: Seconds to wait; 0 does not wait, None waits without limit.  Titanic may be restarted meanwhile.

        Returns:
            Its frames, or the value of a service with types; None for a stream without a last value.

        Raises:
            ServiceError: The request failed.
            RequestTimeout: The request has not ended in time.
            UnknownTicket: It was closed, or its result has expired.
            BrokerUnreachable: No broker answers.
            ServiceNotFound: No Titanic is registered at the broker, and none was while this method waited.
        """
        found = _completed(self._conversation.result(self.uuid, timeout, submitted=bool(self.service)))
        read: R = self._reader.final(found)
        return read

    def partials(self, start: int = 0, *, timeout: float | None = None) -> Generator[P, None, None]:
        """Yield the reply's PARTIALs from number `start` on, as they arrive, until the request has ended.

            for part in ticket.partials():
                print(part)

        Titanic keeps them, so they can be read again.  If an attempt is interrupted, the generator continues with the
        PARTIALs of the next attempt, at the number that it has reached.

        Args:
            start: The number of the first PARTIAL, counted from 0.
            timeout: Maximum silence in seconds; None for no limit.

        Yields:
            Each PARTIAL: its frames, or the value of a service with types.

        Raises:
            RequestError: As from `result`.
        """
        parts = self._conversation.partials(self.uuid, start, timeout, submitted=bool(self.service))
        try:
            while True:
                yield self._reader.part(_completed(anext(parts)))
        except StopAsyncIteration:
            pass
        finally:
            _completed(parts.aclose())

    def close(self) -> None:
        """Delete the request and its reply; if the request is running, cancel it.  Can be repeated.

            ticket.close()

        Raises:
            TitanicError: Titanic could not delete it.
            RequestError: As from `Client.request`.
        """
        _completed(self._conversation.close(self.uuid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ── for asyncio ──────────────────────────────────────────────────────────────────────────────────────────────────────


class AsyncTitanic:
    """Submits requests to Titanic through a `zmdp.clients.AsyncClient`, for asyncio.

        async with AsyncClient() as client:
            ticket = await AsyncTitanic(client).submit("resize", b"a.png")
            reply = await ticket.result()

    A client whose protocol is `"0.2"` cannot send options, and polls for replies.

    Args:
        client: Its connection, and its key, are used.

    Raises:
        SettingError: `client` is something else.
    """

    def __init__(self, client: AsyncClient) -> None:
        _check_client(client, AsyncClient)
        self.client = client
        self._conversation = Conversation(client, asyncio.sleep)

    @overload
    async def submit(self, service: Service[None, O], **options: Unpack[TicketOptions]) -> "AsyncTicket[O, Reply]": ...
    @overload
    async def submit(
        self, service: Service[I, O], value: I, /, **options: Unpack[TicketOptions]
    ) -> "AsyncTicket[O, Reply]": ...
    @overload
    async def submit(
        self, service: Streaming[I, O], value: I, /, **options: Unpack[TicketOptions]
    ) -> "AsyncTicket[O | None, O]": ...
    @overload
    async def submit(
        self, service: str | bytes, value: Any = ..., /, *, codec: str | Codec, **options: Unpack[TicketOptions]
    ) -> "AsyncTicket[Any, Any]": ...
    @overload
    async def submit(
        self, service: str | bytes, *frames: bytes, codec: None = ..., **options: Unpack[TicketOptions]
    ) -> "AsyncTicket[Reply, Reply]": ...
    async def submit(
        self, service: Any, *frames: Any, codec: str | Codec | None = None, **options: Unpack[TicketOptions]
    ) -> "AsyncTicket[Any, Any]":
        """Submit a request for `service`; when this returns, the request is on disk.

            ticket = await titanic.submit(resize, Resize("a.png", 80), key="a.png", retries=3, ttl=86400)
            print(ticket.uuid)

        Args:
            service: The service to call: its name, or a `Service` or `Streaming`.
            frames: The body; without frames, one empty frame.  For a service with types, or with `codec`, its value.
            codec: With a name: the codec of the value that is sent, and of those that the ticket returns.
            headers: Headers for the service's handler.
            key: An idempotency key, to make your own retries safe: the same key and service return the first request's
                ticket.  (If the client itself resends a request after a lost connection, it is stored only once in any
                case.)
            on_duplicate: With "replace", the request takes the place of the key's request, whose ticket is returned,
                unless that has begun: then it is stored beside it, and the key stands for it (default: "keep").
            key_ttl: How long to remember the key, in seconds (default: forever).
            delay: Delay in seconds before the request may run.
            at: Earliest time at which it may run: a datetime with its time zone, or seconds since 1970.
            priority: 0 to 9; 9 runs first (default: the service's, or 0).
            group: Whose turns and limits apply to it, for example a tenant's (docs/how-to/limits.md).
            retries: How often Titanic retries it if the handler fails (default: the service's, or 0).
            backoff: Pause in seconds before the first retry, doubled for each further one (default: the
                service's, or 1).
            ttl: How long to keep the result, in seconds (default: the service's, or until it is closed).

        Returns:
            The ticket, with which the reply can be fetched.

        Raises:
            SettingError: An argument is invalid.
            TitanicError: The request was not stored.
            ServiceNotFound: No Titanic is registered at the broker, nor has one registered within 15 seconds.
            RequestError: As from `AsyncClient.request`.
        """
        headers = options.pop("headers", None)
        given, body = options_of(service, options), body_of(service, frames, codec)
        name, reader = name_of(service), reader_of(service, codec)
        return AsyncTicket(self, *await self._conversation.submit(name, body, headers, given), reader=reader)

    @overload
    def ticket(self, uuid: str | bytes | UUID, service: Service[Any, O]) -> "AsyncTicket[O, Reply]": ...
    @overload
    def ticket(self, uuid: str | bytes | UUID, service: Streaming[Any, O]) -> "AsyncTicket[O | None, O]": ...
    @overload
    def ticket(self, uuid: str | bytes | UUID, *, codec: str | Codec) -> "AsyncTicket[Any, Any]": ...
    @overload
    def ticket(self, uuid: str | bytes | UUID, service: None = ...) -> "AsyncTicket[Reply, Reply]": ...
    def ticket(
        self, uuid: str | bytes | UUID, service: ServiceOrName | None = None, codec: str | Codec | None = None
    ) -> "AsyncTicket[Any, Any]":
        """Return the ticket of a request that was submitted before.

        With a `service` that has types, or with a `codec`, its replies are read as values.

            ticket = titanic.ticket("3f0c1d5a5a3b4b7e9b0a6f1f2d4c8e11", resize)

        Args:
            uuid: The request's UUID.
            service: The service that it was for, if it has types.
            codec: The codec of the values in its replies.

        Returns:
            The ticket; whether there is such a request shows when it is used.

        Raises:
            InvalidUUID: `uuid` is not a UUID.
            SettingError: There is no such codec.
        """
        return AsyncTicket(self, uuid_text(uuid), reader=reader_of(service, codec))


class AsyncTicket(Generic[R, P]):
    """A request that Titanic has stored.

        async with AsyncTitanic(client).ticket(uuid) as ticket:            # closes it at the end of the block
            print(await ticket.result())

    At a broker without access control, anyone who knows its `uuid` can fetch or close it, so keep it secret; otherwise
    the role that submitted it, and admins.

    Args:
        titanic: Through which it is fetched.
        uuid: The request's UUID.
        service: The service's name, if it is known.
        reader: How the reply is read.
    """

    def __init__(self, titanic: AsyncTitanic, uuid: str, service: str = "", *, reader: Reader = FRAMES) -> None:
        self.uuid = uuid
        self.service = service
        """The service's name, if the request was submitted here."""
        self._conversation = titanic._conversation
        self._reader = reader

    def __repr__(self) -> str:
        return f"AsyncTicket({self.uuid!r})"

    async def ready(self) -> bool:
        """Return whether the request has ended.

            if await ticket.ready():
                print(await ticket.result())

        Returns:
            Whether it is done or has failed.

        Raises:
            UnknownTicket: It was closed, or its result has expired.
            RequestError: As from `AsyncClient.request`.
        """
        return await self._conversation.ready(self.uuid)

    async def request(self) -> list[bytes]:
        """Return the body of the request: with a known key, that of the first one.

            frames = await ticket.request()

        It needs a client that speaks X1.

        Returns:
            The frames.

        Raises:
            UnknownTicket: It was closed, or its result has expired.
            RequestError: As from `AsyncClient.request`.
        """
        return await self._conversation.request(self.uuid)

    async def result(self, timeout: float | None = None) -> R:
        """Return the reply's FINAL once it is there.

            size = await ticket.result(timeout=60)

        It can be fetched any number of times.

        Args:
            timeout: Seconds to wait; 0 does not wait, None waits without limit.  Titanic may be restarted meanwhile.

        Returns:
            Its frames, or the value of a service with types; None for a stream without a last value.

        Raises:
            ServiceError: The request failed.
            RequestTimeout: The request has not ended in time.
            UnknownTicket: It was closed, or its result has expired.
            BrokerUnreachable: No broker answers.
            ServiceNotFound: No Titanic is registered at the broker, and none was while this method waited.
        """
        found = await self._conversation.result(self.uuid, timeout, submitted=bool(self.service))
        read: R = self._reader.final(found)
        return read

    async def partials(self, start: int = 0, *, timeout: float | None = None) -> AsyncGenerator[P, None]:
        """Yield the reply's PARTIALs from number `start` on, as they arrive, until the request has ended.

            async for part in ticket.partials():
                print(part)

        Titanic keeps them, so they can be read again.  If an attempt is interrupted, the generator continues with the
        PARTIALs of the next attempt, at the number that it has reached.

        Args:
            start: The number of the first PARTIAL, counted from 0.
            timeout: Maximum silence in seconds; None for no limit.

        Yields:
            Each PARTIAL: its frames, or the value of a service with types.

        Raises:
            RequestError: As from `result`.
        """
        parts = self._conversation.partials(self.uuid, start, timeout, submitted=bool(self.service))
        async with aclosing(parts):
            async for part in parts:
                yield self._reader.part(part)

    async def close(self) -> None:
        """Delete the request and its reply; if the request is running, cancel it.  Can be repeated.

            await ticket.close()

        Raises:
            TitanicError: Titanic could not delete it.
            RequestError: As from `AsyncClient.request`.
        """
        await self._conversation.close(self.uuid)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Blocking:
    """A `Client` as `Conversation` needs it: its coroutines block, so they never suspend."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def protocol(self) -> str:
        return self._client.protocol

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    async def request(self, service: str, *frames: bytes, **how: Any) -> Reply:
        if "timeout" in how:
            how["retries"] = 0  # whoever limits a call, repeats it
        return self._client.request(service, *frames, **how)

    async def stream(self, service: str, *frames: bytes, **how: Any) -> AsyncGenerator[Reply, None]:
        with closing(self._client.stream(service, *frames, retries=0, **how)) as parts:
            for part in parts:
                yield part

    async def available(self, service: str) -> bool:
        return self._client.available(service)


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _completed(conversation: Awaitable[T]) -> T:
    """Return the result of a conversation through a client that blocks."""
    try:
        next(conversation.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a client for threads has suspended")


def _check_client(client: object, kind: type) -> None:
    """Raise `SettingError` for an endpoint, for example, where a client is needed."""
    if not hasattr(client, "request"):
        raise SettingError(f"client is {client!r}: it must be of type {kind.__name__}")
