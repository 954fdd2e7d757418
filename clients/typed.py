"""Calls of services with types: values instead of frames."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from ..mdp.errors import CodecError, RequestError, SettingError
from ..mdp.services import BaseService, Streaming
from .calls.reply import Reply


def body(service: BaseService[Any, Any], values: Sequence[Any], *, streaming: bool = False) -> list[bytes]:
    """Return the body of a request with one value, or none; `streaming` says whether the caller expects a stream.

    Raises `SettingError` for more values or another kind of service, and `CodecError` for a value that cannot be sent.
    """
    if isinstance(service, Streaming) is not streaming:
        use = "has one reply: use call(), submit() or map()" if streaming else "streams its reply: use stream()"
        raise SettingError(f"service {service.name!r} {use}")
    return service.encode_request(values)


def value_of(service: BaseService[Any, Any], reply: Reply) -> Any:
    """Return the value of a reply: that of its FINAL, without PARTIALs.  Raises `CodecError`."""
    return service.decode_reply(reply[reply.collected :] if reply.collected else reply)


def values_of(service: BaseService[Any, Any], parts: Generator[Reply, None, None]) -> Generator[Any, None, None]:
    """Yield the values of a stream.  Raises `CodecError` for one of another type."""
    with closing(parts):
        for part in parts:
            if not (part.final and service.ends(part)):
                yield service.decode_reply(part)


async def values_of_async(
    service: BaseService[Any, Any], parts: AsyncGenerator[Reply, None]
) -> AsyncGenerator[Any, None]:
    """Yield the values of a stream.  Raises `CodecError` for one of another type."""
    async with aclosing(parts):
        async for part in parts:
            if not (part.final and service.ends(part)):
                yield service.decode_reply(part)


def encoded(service: BaseService[Any, Any], values: Iterable[Any]) -> Iterator[bytes]:
    """Yield the row of each value.  Raises `CodecError`, and `SettingError` if the service streams."""
    for value in values:
        yield body(service, (value,))[0]


async def encoded_async(
    service: BaseService[Any, Any], values: Iterable[Any] | AsyncIterable[Any]
) -> AsyncIterator[bytes]:
    """Yield the row of each value.  Raises `CodecError`, and `SettingError` if the service streams."""
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield body(service, (value,))[0]
    else:
        for row in encoded(service, values):
            yield row


def outcome_values(
    service: BaseService[Any, Any], outcomes: Generator[Reply | RequestError, None, None]
) -> Generator[Any, None, None]:
    """Yield the value of each row's reply, or the error of the row."""
    with closing(outcomes):
        for outcome in outcomes:
            yield _outcome_value(service, outcome)


async def outcome_values_async(
    service: BaseService[Any, Any], outcomes: AsyncGenerator[Reply | RequestError, None]
) -> AsyncGenerator[Any, None]:
    """Yield the value of each row's reply, or the error of the row."""
    async with aclosing(outcomes):
        async for outcome in outcomes:
            yield _outcome_value(service, outcome)


def _outcome_value(service: BaseService[Any, Any], outcome: Reply | RequestError) -> Any:
    """Return the value of a row's reply, or the error of the row."""
    if isinstance(outcome, RequestError):
        return outcome
    try:
        return value_of(service, outcome)
    except CodecError as error:
        return error
