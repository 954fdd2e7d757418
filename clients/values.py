"""Values of services as JSON, by the codec that their workers tell: for people, and for programs without the types."""

from collections.abc import Sequence

import msgspec

from ..mdp.errors import CodecError
from ..mdp.services import About
from ..mdp.services.about import RAW


def encoded(about: About, text: bytes) -> list[bytes]:
    """Return the body of a request with a value that is given as JSON; as it is, if the service does not use msgpack.

    Raises `CodecError` if it is not JSON.
    """
    if about.codec != "msgpack" or about.request == RAW or not text:
        return [text]
    try:
        return [msgspec.msgpack.encode(msgspec.json.decode(text))]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"the body cannot be read as json: {error}") from None


def json_of(about: About, frames: Sequence[bytes]) -> bytes | None:
    """Return the value of a reply, or of a part of one, as JSON; None if it is not one of the service's codec."""
    schema = about.reply if about.part is None else about.part
    if not about.codec or schema == RAW or len(frames) != 1:
        return None
    if about.codec == "json" or not frames[0]:
        return frames[0] or b"null"
    try:
        return msgspec.json.encode(msgspec.msgpack.decode(frames[0]))
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError):
        return None
