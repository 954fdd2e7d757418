"""Requests of services with types, or with a codec: how their bodies are made, and how their replies are read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...clients.calls.reply import Reply
from ...mdp.codecs import Codec, Coder
from ...mdp.errors import SettingError
from ...mdp.services import BaseService, Streaming

ServiceOrName = BaseService[Any, Any] | str | bytes


class Reader(NamedTuple):
    """What a ticket makes of the reply's FINAL, and of each PARTIAL."""

    final: Callable[[Reply], Any]
    part: Callable[[Reply], Any]


def _frames(reply: Reply) -> Reply:
    return reply


FRAMES: Final = Reader(_frames, _frames)


def reader_of(service: ServiceOrName | None, codec: str | Codec | None) -> Reader:
    """Return how replies of `service` are read: as values if it has types or there is a codec, otherwise as they are.

    Raises `SettingError` for a codec that does not exist.
    """
    if codec is not None:
        coder = _coder(service, codec)
        return Reader(coder.decode, coder.decode)
    if isinstance(service, Streaming):
        return Reader(lambda final: None if service.ends(final) else service.decode_reply(final), service.decode_reply)
    if isinstance(service, BaseService):
        return Reader(service.decode_reply, _frames)
    return FRAMES


def name_of(service: ServiceOrName) -> str | bytes:
    """Return the name of `service`."""
    return service.name if isinstance(service, BaseService) else service


def body_of(service: ServiceOrName, given: Sequence[Any], codec: str | Codec | None = None) -> Sequence[bytes]:
    """Return the body of a request: that of one value or none, or frames if `service` is a name without a codec.

    Raises `SettingError` for several values, `CodecError` for one that cannot be sent.
    """
    if codec is not None:
        coder = _coder(service, codec)
        if len(given) > 1:
            raise SettingError(f"a codec sends one value, not {len(given)}")
        return coder.encode(given[0] if given else None)
    return service.encode_request(given) if isinstance(service, BaseService) else given


def _coder(service: ServiceOrName | None, codec: str | Codec) -> Coder:
    if isinstance(service, BaseService):
        raise SettingError(f"codec is {codec!r}, but {service!r} has a codec of its own")
    return Coder(codec)


def options_of(service: ServiceOrName, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a submission: those that are given, and for the others the service's own."""
    if not isinstance(service, BaseService) or not service.submission:
        return options
    return {**service.submission, **{name: value for name, value in options.items() if value is not None}}
