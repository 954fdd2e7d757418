"""What callers may ask of Titanic beyond RFC 9, in the options of an X1 request.  Times on the wire are milliseconds.

    titanic.request   key          text: the same key and service give the first uuid again
                      key_ttl      for how long; without, for ever
                      delay        not before so long from now
                      at           or not before this: milliseconds since 1970 (UTC), or ISO 8601 with an offset
                      priority     0 to 9, 9 goes first; FIFO within one  [0]
                      retries      how often a failed request is tried again  [0]
                      backoff      the pause before the first of these, doubled each time  [1000]
                      result_ttl   for how long the reply is kept; without, until it is closed
    titanic.reply     partials     true: the PARTIALs are sent before the FINAL
                      from         the first of them that is wanted, counted from 0  [0]
                      wait         true: answer when the reply is there, not with 300
    titanic.close     none

X1's own options (`ttl`, `headers`, and elsewhere `wait`) mean what they mean everywhere: `ttl` is the caller's patience
with Titanic's answer, which is why the reply's is named `result_ttl`.  Headers travel on to the service.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from ..mdp import wire
from ..mdp.errors import SettingError
from ..mdp.wire import MMI, valid_service
from ..workers.handling import MAX_BODY, MAX_BODY_FRAMES
from .frames import pack
from .uuids import new_uuid

PREFIX: Final = b"titanic."
MAX_KEY: Final = 255
"""Bytes."""
ROOM: Final = 1000
"""Bytes that Titanic may add to the headers: a trace context."""
MAX_RETRIES: Final = 1000
MAX_PRIORITY: Final = 9
MAX_FROM: Final = 1_000_000_000
MAX_TIME: Final = 100 * 366 * 86400.0
"""Seconds that a delay or a ttl may have: a hundred years."""
_UUID: Final = re.compile(rb"[0-9a-fA-F]{32}")
_X1: Final = frozenset({"ttl", "wait", "headers", "attempt", "dialect"})
NAMES: Final = {
    "request": ("key", "key_ttl", "delay", "at", "priority", "retries", "backoff", "result_ttl"),
    "reply": ("partials", "from"),
    "close": (),
}


class Malformed(Exception):
    """A request to Titanic that is answered with 400; says what is wrong."""


class Submission(NamedTuple):
    """A request as it is to be stored."""

    uuid: UUID
    service: str
    body: bytes
    created: float
    due: float
    key: str | None = None
    key_expires: float | None = None
    priority: int = 0
    retries: int = 0
    backoff: float | None = None
    result_ttl: float | None = None
    headers: str | None = None


class Wanted(NamedTuple):
    """What a caller wants of a reply."""

    uuid: UUID
    partials: bool = False
    start: int = 0
    wait: bool = False


def submission(frames: Sequence[bytes], options: Mapping[str, Any], now: float) -> Submission:
    """What `titanic.request` asks for: `service body+`.  Raises `Malformed`."""
    if len(frames) < 2:
        raise Malformed("titanic.request takes the name of a service and a body of at least one frame")
    service, *body = frames
    if not valid_service(service):
        raise Malformed("the first frame names the service: 1 to 255 bytes of printable UTF-8")
    if service.startswith((MMI, PREFIX)):
        raise Malformed(f"{service.decode()} is not asked through Titanic: ask it directly")
    if sum(map(len, body)) > MAX_BODY or len(body) > MAX_BODY_FRAMES:
        raise Malformed(f"the body is too large: it may have {MAX_BODY} bytes in {MAX_BODY_FRAMES} frames")
    if not options:  # most have none
        return Submission(new_uuid(), service.decode(), pack(body), now, now)
    _check_names("request", options)
    key = _key(options.get("key"))
    key_ttl = _seconds(options, "key_ttl")
    if key is None and key_ttl is not None:
        raise Malformed("key_ttl goes with a key")
    delay = _seconds(options, "delay", zero=True)
    at = _moment(options.get("at"))
    if delay is not None and at is not None:
        raise Malformed("delay and at are two ways to say one thing: give one of them")
    headers = _headers(options.get("headers"))
    return Submission(
        uuid=new_uuid(),
        service=service.decode(),
        body=pack(body),
        created=now,
        due=now if delay is None and at is None else max(now, at if at is not None else now + (delay or 0)),
        key=key,
        key_expires=None if key_ttl is None else now + key_ttl,
        priority=_whole(options, "priority", MAX_PRIORITY),
        retries=_whole(options, "retries", MAX_RETRIES),
        backoff=_seconds(options, "backoff"),
        result_ttl=_seconds(options, "result_ttl"),
        headers=headers,
    )


def wanted(frames: Sequence[bytes], options: Mapping[str, Any]) -> Wanted:
    """What `titanic.reply` asks for: `uuid`.  Raises `Malformed`."""
    uuid = _only_uuid("titanic.reply", frames)
    _check_names("reply", options)
    partials = options.get("partials", False)
    if not isinstance(partials, bool):
        raise Malformed("partials is true or false")
    if "from" in options and not partials:
        raise Malformed("from goes with partials")
    # Only where it is said in so many words: X1's clients leave `wait` out, and then it is for the broker.
    return Wanted(uuid, partials, _whole(options, "from", MAX_FROM), options.get("wait") is True)


def closed(frames: Sequence[bytes], options: Mapping[str, Any]) -> UUID:
    """What `titanic.close` asks for: `uuid`.  Raises `Malformed`."""
    uuid = _only_uuid("titanic.close", frames)
    _check_names("close", options)
    return uuid


def parse_uuid(text: bytes) -> UUID | None:
    """The uuid in `text`: 32 hex digits in either case (C30).  None for anything else, a path for example."""
    return UUID(text.decode()) if _UUID.fullmatch(text) else None


def _only_uuid(name: str, frames: Sequence[bytes]) -> UUID:
    uuid = parse_uuid(frames[0]) if len(frames) == 1 else None
    if uuid is None:
        raise Malformed(f"{name} takes one frame, a uuid: 32 hex digits")
    return uuid


def _check_names(service: str, options: Mapping[str, Any]) -> None:
    names = NAMES[service]
    for name in options:
        if name not in names and name not in _X1:
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            raise Malformed(f"titanic.{service} has no option {name[:50]!r}: {takes}")


def _key(value: Any) -> str | None:
    if value is None:
        return None
    # PostgreSQL keeps no NUL in text, and lone surrogates are no UTF-8.
    if isinstance(value, str) and value and "\0" not in value:
        size = len(value.encode(errors="replace"))
        if size <= MAX_KEY and _encodable(value):
            return value
    raise Malformed(f"key is a text of 1 to {MAX_KEY} bytes")


def _headers(value: Any) -> str | None:
    """The headers as JSON, if they can be sent on to the service."""
    if not value:
        return None
    try:
        size = len(wire.encode_options({"headers": value}))
    except SettingError:
        size = wire.MAX_OPTIONS
    if size > wire.MAX_OPTIONS - ROOM:
        raise Malformed(f"headers map text to text, and have at most {wire.MAX_OPTIONS - ROOM} bytes as JSON")
    return json.dumps(value)


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _seconds(options: Mapping[str, Any], name: str, *, zero: bool = False) -> float | None:
    """A number of milliseconds, as seconds."""
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME * 1000:
        raise Malformed(f"{name} is a number of milliseconds, up to a hundred years")
    if not value and not zero:
        raise Malformed(f"{name} is a number of milliseconds above 0")
    return value / 1000


def _whole(options: Mapping[str, Any], name: str, most: int) -> int:
    value = options.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise Malformed(f"{name} is a whole number from 0 to {most}")
    return value


def _moment(value: Any) -> float | None:
    """Milliseconds since 1970, or ISO 8601 with an offset; as seconds since 1970."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is not None:
            return _checked_moment(moment.timestamp)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return _checked_moment(lambda: value / 1000)
    raise Malformed("at is milliseconds since 1970 (UTC), or a time such as 2030-01-31T12:00:00+00:00")


def _checked_moment(read: Callable[[], float]) -> float:
    try:
        seconds = read()
    except OverflowError:
        seconds = math.inf
    if not -MAX_TIME <= seconds <= 2 * MAX_TIME:
        raise Malformed("at is further away than a hundred years")
    return seconds
