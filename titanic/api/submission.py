"""Requests to Titanic: which options a caller can set, how each is checked, and the form in which requests are stored.

`SubmissionOptions` declares every option of a submission once: its Python name and type, its name on the wire, its
limits and its help.  `Titanic.submit`, `AsyncTitanic.submit`, `enqueue`, the command `titanic request`, the service
`titanic.request` and the table in docs/how-to/titanic.md all follow this declaration.

Python programs give times in seconds; on the wire they are milliseconds, as everywhere in X1.
"""

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple, TypedDict, get_type_hints
from uuid import UUID

from ...mdp import wire
from ...mdp.codes import Code
from ...mdp.errors import SettingError, TitanicError
from ...mdp.limits import MAX_BODY, MAX_BODY_FRAMES
from ...mdp.services.submission import MAX_PRIORITY, MAX_RETRIES, MAX_SECONDS
from ...mdp.tracing import TTL
from ...mdp.wire import MMI, valid_service

SERVICE_PREFIX: Final = b"titanic."
MAX_KEY_BYTES: Final = 255
MAX_GROUP_BYTES: Final = 255
HEADERS_RESERVE_BYTES: Final = 1000
"""Room for what Titanic adds to a request's options when it sends the request on: a trace context and the owner."""
MAX_FROM: Final = 1_000_000_000
UNKNOWN_UUID: Final = "unknown-uuid"
"""The reason that Titanic gives if it has no such request, or another owner has it."""
LENGTH_BYTES: Final = 4
"""Size of the length before each frame of a stored body."""
_UUID_VERSION: Final = 7 << 76 | 0b10 << 62
_UUID_RANDOM: Final = 0xFFF << 64 | (1 << 62) - 1
"""Mask of the random bits."""
_UUID: Final = re.compile(rb"[0-9a-fA-F]{32}")
_X1_OPTIONS: Final = frozenset({"wait", "headers", "dialect", "user", "admin", "broker"})
"""Options that X1 itself defines, and that every service accepts."""


class MalformedRequest(TitanicError):
    """A request breaks a rule of Titanic's services, which answer it with 400.  The message explains the problem."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code=int(Code.MALFORMED), text=text, reason="malformed")


# ── kinds of options ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a submission: its help, its default, and how values are checked and converted."""

    help: str
    default: str = ""
    """The default, as the help shows it."""
    wire_name: str = ""
    """The name on the wire, if it differs from the Python name."""

    def to_wire(self, name: str, value: Any) -> Any:
        """Return the wire form of a Python value, by default the same.  Raises `SettingError` if it is invalid."""
        try:
            return self.from_wire(name, value)
        except MalformedRequest as error:
            raise SettingError(str(error)) from None

    def from_wire(self, name: str, value: Any) -> Any:
        """Return the Python form of a value from the wire.  Raises `MalformedRequest` if it is invalid."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOption(Option):
    """Text of at least one byte."""

    max_bytes: int

    def from_wire(self, name: str, value: Any) -> str:
        """Return the text."""
        # PostgreSQL cannot store NUL in text, and lone surrogates are not UTF-8.
        if isinstance(value, str) and value and "\0" not in value and len(value) <= self.max_bytes:
            try:
                if len(value.encode()) <= self.max_bytes:
                    return value
            except UnicodeEncodeError:
                pass
        raise MalformedRequest(f"{name} must be text of 1 to {self.max_bytes} bytes, without NUL")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOption(Option):
    """One of several words."""

    choices: tuple[str, ...]

    def from_wire(self, name: str, value: Any) -> str:
        """Return the word."""
        if isinstance(value, str) and value in self.choices:
            return value
        raise MalformedRequest(f"{name} must be {', '.join(self.choices[:-1])} or {self.choices[-1]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationOption(Option):
    """A duration: seconds in Python, milliseconds on the wire."""

    zero: bool = False
    """Whether it may be 0."""
    expiry: bool = False
    """Whether something is deleted when it has passed.  The command line then requires a unit."""

    def to_wire(self, name: str, value: Any) -> float:
        """Return milliseconds."""
        if not self._is_valid(value, MAX_SECONDS):
            raise SettingError(f"{name} is {value!r:.100}: it must be {self._rule('seconds')}")
        milliseconds: float = round(value * 1000, 3)
        return milliseconds

    def from_wire(self, name: str, value: Any) -> float:
        """Return seconds."""
        if not self._is_valid(value, MAX_SECONDS * 1000):
            raise MalformedRequest(f"{name} must be {self._rule('milliseconds')}")
        seconds: float = value / 1000
        return seconds

    def _is_valid(self, value: Any, maximum: float) -> bool:
        return _is_number(value) and 0 <= value <= maximum and (self.zero or value > 0)

    def _rule(self, unit: str) -> str:
        return f"a number of {unit}, {'0 or more' if self.zero else 'above 0'}, at most a hundred years"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerOption(Option):
    """A whole number from 0 to `maximum`."""

    maximum: int

    def from_wire(self, name: str, value: Any) -> int:
        """Return the number."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= self.maximum:
            return value
        raise MalformedRequest(f"{name} must be a whole number from 0 to {self.maximum}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOption(Option):
    """A point in time: a datetime with its time zone, or a number of seconds (milliseconds on the wire) since 1970."""

    def to_wire(self, name: str, value: Any) -> str | float:
        """Return ISO 8601, or milliseconds since 1970."""
        if isinstance(value, datetime):
            if value.tzinfo is None:
                raise SettingError(f"{name} is {value!r}: it must have a tzinfo, because time zones differ")
            return value.isoformat()
        if not _is_number(value):
            raise SettingError(f"{name} is {value!r:.100}: it must be a datetime, or a number of seconds since 1970")
        if not abs(value) <= 2 * MAX_SECONDS:
            raise SettingError(f"{name} must not be further away than a hundred years")
        milliseconds: float = round(value * 1000, 3)
        return milliseconds

    def from_wire(self, name: str, value: Any) -> float:
        """Return seconds since 1970."""
        seconds: float | None = None
        try:
            if isinstance(value, str):
                moment = datetime.fromisoformat(value)
                seconds = None if moment.tzinfo is None else moment.timestamp()
            elif _is_number(value):
                seconds = value / 1000
        except OverflowError:
            seconds = math.inf
        except ValueError:
            pass
        if seconds is None:
            raise MalformedRequest(
                f"{name} must be milliseconds since 1970 (UTC), or a time such as 2030-01-31T12:00:00+00:00"
            )
        if not -MAX_SECONDS <= seconds <= 2 * MAX_SECONDS:
            raise MalformedRequest(f"{name} must not be further away than a hundred years")
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UuidOption(Option):
    """A UUID of 32 hex digits.  `Titanic` sets it; its callers cannot."""

    def to_wire(self, name: str, value: Any) -> str:
        """Return the digits."""
        return str(value)

    def from_wire(self, name: str, value: Any) -> UUID:
        """Return the UUID."""
        found = parse_uuid(value.encode(errors="replace")) if isinstance(value, str) else None
        if found is None:
            raise MalformedRequest(f"{name} must be 32 hex digits")
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ── the declaration ──────────────────────────────────────────────────────────────────────────────────────────────────


class SubmissionOptions(TypedDict, total=False):
    """The options of a submission, as Python programs pass them.  None stands for the default."""

    key: Annotated[
        str | None,
        TextOption(
            max_bytes=MAX_KEY_BYTES,
            help="Idempotency key: submitting again with the same key and service returns the first request's UUID, "
            "even after that was closed.",
        ),
    ]
    on_duplicate: Annotated[
        str | None,
        ChoiceOption(
            choices=("keep", "replace"),
            help="What to do if the key is known: keep the first request, or replace it if it has not begun; if it "
            "has, the request is stored beside it.",
            default="keep",
        ),
    ]
    key_ttl: Annotated[
        float | None, DurationOption(expiry=True, help="How long to remember the key.", default="forever")
    ]
    delay: Annotated[
        float | None,
        DurationOption(zero=True, help="Delay before the request may run, e.g. 30s, 5m.", default="none"),
    ]
    at: Annotated[
        datetime | float | None,
        TimeOption(help="Earliest time at which the request may run, e.g. 2030-01-31T12:00+00:00.", default="now"),
    ]
    priority: Annotated[
        int | None,
        IntegerOption(
            maximum=MAX_PRIORITY,
            help=f"Priority; {MAX_PRIORITY} runs first. Requests of equal priority run in order of submission.",
            default="0",
        ),
    ]
    group: Annotated[
        str | None,
        TextOption(
            max_bytes=MAX_GROUP_BYTES,
            help="Whose turns and limits apply to the request at the broker, for example a tenant's.",
            default="none",
        ),
    ]
    retries: Annotated[
        int | None,
        IntegerOption(
            maximum=MAX_RETRIES,
            help="How often Titanic retries the request if the service's handler fails.",
            default="0",
        ),
    ]
    backoff: Annotated[
        float | None,
        DurationOption(
            help="Pause before the first retry. Each further pause is twice as long, up to an hour.", default="1s"
        ),
    ]
    ttl: Annotated[
        float | None,
        DurationOption(
            expiry=True,
            wire_name="result_ttl",
            help="How long to keep the result once the request has ended.",
            default="until it is closed",
        ),
    ]


OPTIONS: Final[Mapping[str, Option]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(SubmissionOptions, include_extras=True).items()
}
"""The options of a submission by their Python names."""
UUID_OPTION: Final = UuidOption(
    help="UUID of the request, chosen by the client so that a repeated request is stored once.",
    default="chosen by Titanic",
)
OWNER_OPTION: Final = TextOption(max_bytes=64, help="Role that the request belongs to.")
_BY_WIRE_NAME: Final[Mapping[str, tuple[str, Option]]] = {
    "uuid": ("uuid", UUID_OPTION),
    **{option.wire_name or name: (name, option) for name, option in OPTIONS.items()},
}
REPLY_OPTION: Final = "reply"
"""Of `titanic.request`, beside those of a submission: answer with the reply."""
_REPLY_OPTIONS: Final = ("partials", "from", "request")


def encode_options(
    options: Mapping[str, Any], declared: Mapping[str, Option] = OPTIONS, of: str = "a submission"
) -> dict[str, Any]:
    """Return the wire form of `SubmissionOptions`, or of other options that are declared in the same way.

    Raises:
        SettingError: A value is invalid, or two options cannot be combined.
        TypeError: There is no option of this name.
    """
    encoded = {}
    for name, value in options.items():
        option = declared.get(name)
        if option is None:
            raise TypeError(f"{of} has no option {name!r}: its options are {', '.join(declared)}")
        if value is not None:
            encoded[option.wire_name or name] = option.to_wire(name, value)
    try:
        _check_combination(encoded)
    except MalformedRequest as error:
        raise SettingError(str(error)) from None
    return encoded


def _check_combination(options: Mapping[str, Any]) -> None:
    for name in ("key_ttl", "on_duplicate"):
        if options.get("key") is None and options.get(name) is not None:
            raise MalformedRequest(f"{name} needs a key")
    if options.get("key") is not None and options.get("uuid") is not None:
        # A key protects even after its request was closed; a UUID does not, so it must not override the key.
        raise MalformedRequest("key and uuid cannot be combined: set only one of them")
    if options.get("delay") is not None and options.get("at") is not None:
        raise MalformedRequest("delay and at cannot be combined: set only one of them")


# ── requests to the services ─────────────────────────────────────────────────────────────────────────────────────────


class Submission(NamedTuple):
    """A request to be stored.  The fields other than `key_expires` and `replaces` are columns of `titanic_requests`."""

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
    owner: str = ""
    group_name: str = ""
    replaces: bool = False
    """Whether it takes the place of a request with its key that has not begun."""


class ReplyRequest(NamedTuple):
    """A request to `titanic.reply`."""

    uuid: UUID
    partials: bool = False
    start: int = 0
    wait: bool = False
    request: bool = False
    """Whether the body of the request is asked for, rather than the reply."""


def parse_submission(frames: Sequence[bytes], options: Mapping[str, Any], now: float, owner: str = "") -> Submission:
    """Check a request to `titanic.request`, whose frames are `service body+`.

    Raises:
        MalformedRequest: It breaks a rule.
    """
    if len(frames) < 2:
        raise MalformedRequest("titanic.request needs the name of a service and a body of at least one frame")
    service, *body = frames
    if not valid_service(service):
        raise MalformedRequest("the first frame must be the service's name: 1 to 255 bytes of printable UTF-8")
    if service.startswith((MMI, SERVICE_PREFIX)):
        raise MalformedRequest(f"{service.decode()} cannot be called through Titanic: call it directly")
    if sum(map(len, body)) > MAX_BODY or len(body) > MAX_BODY_FRAMES:
        raise MalformedRequest(f"the body is too large: at most {MAX_BODY} bytes in {MAX_BODY_FRAMES} frames")
    values = _parse_options(options)
    delay, at, key_ttl = values.pop("delay", 0.0), values.pop("at", now), values.pop("key_ttl", None)
    return Submission(
        uuid=values.pop("uuid", None) or new_uuid(),
        service=service.decode(),
        body=pack(body),
        created=now,
        due=max(now + delay, at),
        key_expires=None if key_ttl is None else now + key_ttl,
        result_ttl=values.pop("ttl", None),
        headers=_parse_headers(options.get("headers")),
        owner=owner,
        group_name=values.pop("group", ""),
        replaces=values.pop("on_duplicate", "") == "replace",
        **values,
    )


def asks_for_reply(options: Mapping[str, Any]) -> bool:
    """Return whether a request to `titanic.request` is to be answered with its reply, when it has ended.

    Raises:
        MalformedRequest: The option is invalid, or there is no key.
    """
    reply = options.get(REPLY_OPTION, False)
    if not isinstance(reply, bool):
        raise MalformedRequest("reply must be true or false")
    if reply and options.get("key") is None:
        raise MalformedRequest("reply needs a key, under which the caller can ask again")
    return reply


def _parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a submission's options by their Python names."""
    values = {}
    for wire_name, value in options.items():
        if wire_name in _X1_OPTIONS or wire_name == REPLY_OPTION:
            continue
        found = _BY_WIRE_NAME.get(wire_name)
        if found is None:
            raise _unknown_option("request", wire_name, (*_BY_WIRE_NAME, REPLY_OPTION))
        if value is not None:
            name, option = found
            values[name] = option.from_wire(wire_name, value)
    _check_combination(values)
    return values


def parse_reply_request(frames: Sequence[bytes], options: Mapping[str, Any]) -> ReplyRequest:
    """Check a request to `titanic.reply`, whose only frame is a UUID.

    Raises:
        MalformedRequest: It breaks a rule.
    """
    uuid = _parse_only_uuid("titanic.reply", frames)
    check_names("reply", options, _REPLY_OPTIONS)
    partials, start, request = options.get("partials", False), options.get("from", 0), options.get("request", False)
    if not isinstance(partials, bool):
        raise MalformedRequest("partials must be true or false")
    if not isinstance(request, bool) or (request and partials):
        raise MalformedRequest("request must be true or false, and without partials")
    if "from" in options and not partials:
        raise MalformedRequest("from needs partials")
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= MAX_FROM:
        raise MalformedRequest(f"from must be a whole number from 0 to {MAX_FROM}")
    # X1's clients omit `wait` by default, and then it concerns the broker.  Titanic waits only if told to.
    return ReplyRequest(uuid, partials, start, options.get("wait") is True, request)


def parse_close(frames: Sequence[bytes], options: Mapping[str, Any]) -> UUID:
    """Check a request to `titanic.close`, whose only frame is a UUID, and return that.

    Raises:
        MalformedRequest: It breaks a rule.
    """
    uuid = _parse_only_uuid("titanic.close", frames)
    check_names("close", options, ())
    return uuid


def parse_uuid(text: bytes) -> UUID | None:
    """Return `text` as a UUID: 32 hex digits in either case (C30).  None for anything else, such as a path."""
    return UUID(text.decode()) if _UUID.fullmatch(text) else None


def read_uuid(text: str) -> UUID | None:
    """Return `text` as a UUID: 32 hex digits, with or without dashes.  None for anything else."""
    return parse_uuid(str(text).replace("-", "").encode(errors="replace"))


def _parse_only_uuid(name: str, frames: Sequence[bytes]) -> UUID:
    uuid = parse_uuid(frames[0]) if len(frames) == 1 else None
    if uuid is None:
        raise MalformedRequest(f"{name} needs one frame, a UUID: 32 hex digits")
    return uuid


def check_names(service: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `MalformedRequest` if there are options other than `known` and those of X1."""
    for name in options:
        if name not in known and name not in _X1_OPTIONS:
            raise _unknown_option(service, name, known)


def _unknown_option(service: str, name: str, known: Sequence[str]) -> MalformedRequest:
    options = f"its options are {', '.join(known)}" if known else "it has none"
    return MalformedRequest(f"titanic.{service} has no option {name[:50]!r}: {options}")


def _parse_headers(value: Any) -> str | None:
    """Return the headers as JSON."""
    if not value:
        return None
    try:
        size = len(wire.encode_options({"headers": value}))
        "".join((*value, *value.values())).encode()  # lone surrogates are not UTF-8, as which readers want it
    except (SettingError, UnicodeEncodeError):
        size = wire.MAX_OPTIONS
    maximum = wire.MAX_OPTIONS - HEADERS_RESERVE_BYTES
    if size > maximum:
        raise MalformedRequest(f"headers must map text to text, in at most {maximum} bytes of JSON")
    headers = {name: text for name, text in value.items() if name != TTL}  # how long the submission might take
    return json.dumps(headers) if headers else None


# ── stored values ────────────────────────────────────────────────────────────────────────────────────────────────────


def pack(frames: Sequence[bytes]) -> bytes:
    """Return the frames of a body as one value: for each its length, four bytes big-endian, then the frame."""
    return b"".join([part for frame in frames for part in (len(frame).to_bytes(LENGTH_BYTES, "big"), frame)])


def unpack(packed: bytes) -> list[bytes]:
    """Return the frames in `packed`.  Raises `ValueError` if it is truncated."""
    frames = []
    at = 0
    while at < len(packed):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(packed[at:start], "big")
        frames.append(packed[start:at])
    if at != len(packed):
        raise ValueError("the stored frames are truncated")
    return frames


def new_uuid() -> UUID:
    """Return a new UUID: version 7, which starts with the time.

    A UUID is a secret, because at a broker without access control anyone who knows it can fetch or close the request:
    74 of its bits are random.  UUIDs that grow with time are neighbors in the database's index, so a transaction writes
    a few index pages instead of one for each request.
    """
    random = int.from_bytes(os.urandom(10), "big") & _UUID_RANDOM
    return UUID(int=time.time_ns() // 1_000_000 << 80 | _UUID_VERSION | random)
