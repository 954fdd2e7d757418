"""Values of services as JSON, by the codec that their workers tell: for people, and for programs without the types."""

from collections.abc import Sequence

import msgspec

from ..mdp.errors import CodecError, flaw
from ..mdp.services import About
from ..mdp.services.json_schemas import RAW
from .calls.reply import Reply


def is_text(data: bytes) -> bool:
    """Return whether `data` is UTF-8."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_json(data: bytes) -> bool:
    """Return whether `data` is JSON."""
    return not problem_of_json(data)


def problem_of_json(data: bytes) -> str:
    """Return why `data` is not JSON; nothing if it is."""
    if not is_text(data):
        return "it is not UTF-8"
    try:
        msgspec.json.decode(data, type=msgspec.Raw)  # it makes no objects, and does not look into strings
    except RecursionError:
        return "it is nested too deeply"
    except msgspec.DecodeError as error:
        return str(error)
    return ""


def encoded(about: About, text: bytes) -> list[bytes]:
    """Return the body of a request with a value that is given as JSON; as it is, if the service does not use msgpack.

    Raises `CodecError` if it is not JSON, or has a number that msgpack has not.
    """
    if about.codec != "msgpack" or about.request == RAW or not text:
        return [text]
    try:
        return [msgspec.msgpack.encode(msgspec.json.decode(text))]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"the body cannot be read as json: {flaw(error)}") from None
    except OverflowError as error:
        raise CodecError(f"the body cannot be sent as msgpack: {error}") from None


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


def body_for(about: About, frames: Sequence[bytes]) -> Sequence[bytes]:
    """Return the body of a request with a value that somebody has typed: JSON, or a text for a service that takes one.

    What is not text, such as a file of MessagePack, is returned as it is.  Raises `CodecError` if a text cannot be put
    into the service's codec.
    """
    if not about.codec or about.request == RAW or len(frames) != 1 or not is_text(text := bytes(frames[0])):
        return frames
    if text and (about.request or {}).get("type") == "string" and not (text.lstrip()[:1] == b'"' and is_json(text)):
        text = msgspec.json.encode(text.decode())
    return encoded(about, text)


def readable(about: About, reply: Reply) -> Reply:
    """Return a reply with each value as JSON, if each is a frame of the service's codec."""
    if about.codec != "msgpack":
        return reply
    frames = [frame if (value := json_of(about, [frame])) is None else value for frame in reply]
    return Reply(frames, service=reply.service, final=reply.final)
