"""Requests of services with types: how their bodies are made, and how their replies are read."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ..clients.reply import Reply
from ..mdp.services import BaseService, Streaming

AnyService = BaseService[Any, Any] | str | bytes


class Reader(NamedTuple):
    """What a ticket makes of the reply's FINAL, and of each PARTIAL."""

    final: Callable[[Reply], Any]
    part: Callable[[Reply], Any]


def _frames(reply: Reply) -> Reply:
    return reply


FRAMES: Final = Reader(_frames, _frames)


def reader_of(service: AnyService | None) -> Reader:
    """Return how replies of `service` are read: as values, or as they are if it is only a name."""
    if isinstance(service, Streaming):
        return Reader(lambda final: None if service.ends(final) else service.decode_reply(final), service.decode_reply)
    if isinstance(service, BaseService):
        return Reader(service.decode_reply, _frames)
    return FRAMES


def name_of(service: AnyService) -> str | bytes:
    """Return the name of `service`."""
    return service.name if isinstance(service, BaseService) else service


def body_of(service: AnyService, given: Sequence[Any]) -> Sequence[bytes]:
    """Return the body of a request: that of one value or none, or frames if `service` is only a name.

    Raises as `BaseService.encode_request`.
    """
    return service.encode_request(given) if isinstance(service, BaseService) else given
