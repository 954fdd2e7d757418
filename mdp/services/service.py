"""`Service` and `Streaming`: a service's name, and the types of its request and its reply."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from ..errors import CodecError, SettingError
from ..wire.names import service_name
from .submission import checked_defaults
from .value_types import ValueType

In = TypeVar("In", contravariant=True)  # noqa: PLC0105 - shown in type checkers' messages
Out = TypeVar("Out", covariant=True)  # noqa: PLC0105 - as above


class BaseService(Generic[In, Out]):
    """A name with types, which can be given to a client, to Titanic, or to Spark in place of the name alone.

        resize = Service("images.resize", Resize, Size)     # or Streaming
        frames = resize.encode_request([Resize("a.png", 80)])
        resize.decode_reply([b'{"width": 80, "height": 60}'])               # Size(80, 60)

    Args:
        name: The service's name.
        request: Type of the value that it takes; None if it takes none.
        reply: Type of the value that it replies with, or of each part of a stream.
        codec: `"json"` or `"msgpack"`.
        retries: Of a request that is submitted to Titanic: how often Titanic retries it if the handler fails.  A call
            by a client is not affected: see `Client(retries=)` and `Retry`.
        backoff: Seconds before the first of these retries.
        ttl: Seconds for which Titanic keeps the result.
        priority: Of the requests that wait at Titanic, those with the highest priority run first.

    Raises:
        SettingError: The name or a number is invalid, or values of a type cannot be sent.
    """

    def __init__(
        self,
        name: str | bytes,
        request: type[In] | None = Any,  # type: ignore[assignment]  # without types, plain values
        reply: type[Out] | None = Any,  # type: ignore[assignment]
        *,
        codec: str = "json",
        retries: int | None = None,
        backoff: float | None = None,
        ttl: float | None = None,
        priority: int | None = None,
    ) -> None:
        self.name = service_name(name).decode()
        self.request = ValueType(request, codec)
        self.reply = ValueType(reply, codec)
        given = {"retries": retries, "backoff": backoff, "ttl": ttl, "priority": priority}
        self.submission = checked_defaults(given)
        """How its requests are submitted to Titanic, if the submission does not say."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def encode_request(self, values: Sequence[Any]) -> list[bytes]:
        """Return the body of a request with one value, or none.

            frames = resize.encode_request([Resize("a.png", 80)])

        Args:
            values: No value, or one.

        Returns:
            The frames.

        Raises:
            SettingError: There are several values.
            CodecError: The value cannot be sent.
        """
        if len(values) > 1:
            raise SettingError(f"service {self.name!r} takes one value, not {len(values)}: use a dataclass for several")
        return self.request.encode(values[0] if values else None)

    def ends(self, final: list[bytes]) -> bool:
        """Return whether the FINAL of a stream has no value.

            find.ends([b""])                                        # True

        Args:
            final: Its frames.

        Returns:
            Whether it only ends the stream.
        """
        return final in ([b""], self.reply.nothing)

    def decode_reply(self, frames: list[bytes]) -> Any:
        """Return the value of a reply.

            size = resize.decode_reply([b'{"width": 80, "height": 60}'])

        Args:
            frames: The frames of the reply.

        Returns:
            The value.

        Raises:
            CodecError: The reply does not fit the type.  It names the service.
        """
        try:
            return self.reply.decode(frames)
        except CodecError as error:
            raise type(error)(f"the reply of service {self.name!r} does not fit: {error}") from None
        except Exception as error:  # whatever a value's own methods raise
            text = f"the reply of service {self.name!r} does not fit: {type(error).__name__}: {error}"
            raise CodecError(text) from error


class Service(BaseService[In, Out]):
    """A service that replies with one value.

        resize = Service("images.resize", Resize, Size)
        size = client.call(resize, Resize("a.png", 80))

    It takes the place of the name in `call`, `submit` and `map`.

    Args:
        name: The service's name.
        request: Type of the value that it takes; None if it takes none.
        reply: Type of the value that it replies with.
        codec: `"json"` or `"msgpack"`.
        retries: Of a request that is submitted to Titanic: how often Titanic retries it if the handler fails.  A call
            by a client is not affected: see `Client(retries=)` and `Retry`.
        backoff: Seconds before the first of these retries.
        ttl: Seconds for which Titanic keeps the result.
        priority: Of the requests that wait at Titanic, those with the highest priority run first.

    Raises:
        SettingError: The name is invalid, or values of a type cannot be sent.
    """


class Streaming(BaseService[In, Out]):
    """A service that replies with a stream of values.

        find = Streaming("images.find", str, Match)
        for match in client.stream(find, "cats"): ...

    It takes the place of the name in `stream`.

    Args:
        name: The service's name.
        request: Type of the value that it takes; None if it takes none.
        reply: Type of each value of the stream.
        codec: `"json"` or `"msgpack"`.
        retries: Of a request that is submitted to Titanic: how often Titanic retries it if the handler fails.  A call
            by a client is not affected: see `Client(retries=)` and `Retry`.
        backoff: Seconds before the first of these retries.
        ttl: Seconds for which Titanic keeps the result.
        priority: Of the requests that wait at Titanic, those with the highest priority run first.

    Raises:
        SettingError: The name is invalid, or values of a type cannot be sent.
    """
