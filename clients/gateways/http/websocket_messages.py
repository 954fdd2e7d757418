"""The messages of a WebSocket ↔ typed values (docs/how-to/gateways.md).

    → {"id": 1, "service": "echo", "body": …}     a request; `Ask`
    → {"id": 1, "cancel": true}                   `CancelAsk`
    ← {"id": 1, "partial": …}                     only if the request has "stream": true
    ← {"id": 1, "final": …}
    ← {"id": 1, "error": problem}                 the id is null if it is not known to which request it belongs

A text message is such an object.  A binary message is such an object on one line, a newline, and the bytes of the
body's frames; `body`, `partial` and `final` are then lists with the size of each frame.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NoReturn, TypeGuard

Id = str | int

MAX_ID_CHARACTERS: Final = 100
MAX_INTEGER: Final = (1 << 53) - 1
"""The largest integer that JavaScript represents exactly."""
MAX_HEADER_BYTES: Final = 1 << 20
"""Maximum size of the first line of a binary message."""
MAX_DEPTH: Final = 20
"""Maximum nesting of options, which are encoded once more for the broker."""
_NOT_JSON: Final = (ValueError, RecursionError)
_ASK: Final = frozenset({"id", "service", "body", "more", "json", "stream", "timeout", "wait", "headers", "options"})
_CANCEL: Final = frozenset({"id", "cancel"})


class Form(Enum):
    """How bodies are written in messages."""

    TEXT = "text"
    """As a string, which is the body."""
    JSON = "json"
    """As a value, whose JSON text is the body."""
    BINARY = "binary"
    """As bytes, in a binary message."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    id: Id
    service: str
    body: Sequence[bytes]
    form: Form = Form.TEXT
    """That of the request, and so of its replies."""
    stream: bool = False
    """Whether PARTIALs are wanted."""
    timeout: float | None = None
    wait: bool = False
    headers: Mapping[str, str] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CancelAsk:
    """Cancels a request."""

    id: Id


class MessageError(Exception):
    """A message is invalid.  `id` is that of its request, or None if it has no valid one."""

    def __init__(self, text: str, id_: Id | None = None) -> None:
        super().__init__(text)
        self.id = id_


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(message: str | bytes) -> Ask | CancelAsk:
    """Return what a text message, or a binary one, says.  Raises `MessageError`."""
    attached = None
    if isinstance(message, bytes):
        message, newline, attached = message.partition(b"\n")
        if not newline or len(message) > MAX_HEADER_BYTES:
            raise MessageError("a binary message must begin with a JSON object on one line")
    try:
        content = parse_json(message)
    except _NOT_JSON:
        content = None
    if not isinstance(content, dict):
        raise MessageError("a message must be a JSON object")
    id_ = content.get("id")
    if not _is_id(id_):
        raise MessageError(f"id must be a string of at most {MAX_ID_CHARACTERS} characters, or an integer")
    try:
        if "cancel" in content:
            _check_names(content, _CANCEL)
            _check("cancel", content["cancel"] is True, "true")
            return CancelAsk(id_)
        return _ask(id_, content, attached)
    except _Invalid as error:
        raise MessageError(str(error), id_) from None


class _Invalid(Exception):
    pass


def _ask(id_: Id, content: Mapping[str, Any], attached: bytes | None) -> Ask:
    _check_names(content, _ASK)
    service = content.get("service")
    if not isinstance(service, str):
        raise _Invalid("service must be a string")
    timeout = content.get("timeout")
    _check("timeout", timeout is None or _is_duration(timeout), "a number of seconds above 0")
    stream, wait = content.get("stream", False), content.get("wait", False)
    _check("stream", isinstance(stream, bool), "true or false")
    _check("wait", isinstance(wait, bool), "true or false")
    headers, options = content.get("headers"), content.get("options")
    _check("headers", headers is None or _is_text_map(headers), "an object whose values are strings")
    _check("options", options is None or _is_object(options), f"an object of at most {MAX_DEPTH} levels")
    form, body = _text_body(content) if attached is None else (Form.BINARY, _binary_body(content, attached))
    return Ask(id_, service, body, form, stream, timeout, wait, headers or None, options or None)


def _text_body(content: Mapping[str, Any]) -> tuple[Form, Sequence[bytes]]:
    values = [content.get("body"), *_list(content, "more")]
    as_json = content.get("json", not all(isinstance(each, str) for each in values) and "body" in content)
    _check("json", isinstance(as_json, bool), "true or false")
    if as_json:
        try:
            return Form.JSON, [_dumps(each).encode() for each in values]
        except ValueError:  # a number that is too large, or half of a surrogate pair
            raise _Invalid("body must consist of finite numbers and valid Unicode") from None
        except RecursionError:  # the encoder nests less deeply than the decoder
            raise _Invalid("body is nested too deeply") from None
    if "body" not in content:
        values[0] = ""
    if not all(isinstance(each, str) for each in values):
        raise _Invalid('body must be a string if "json" is false')
    try:
        return Form.TEXT, [each.encode() for each in values]
    except UnicodeEncodeError:
        raise _Invalid("body must be valid Unicode") from None


def _binary_body(content: Mapping[str, Any], attached: bytes) -> Sequence[bytes]:
    for name in ("more", "json"):
        if name in content:
            raise _Invalid(f"{name} is for text messages: in a binary message, body lists the sizes of the frames")
    sizes = content.get("body", [len(attached)])
    valid = isinstance(sizes, list) and len(sizes) > 0
    if not valid or not all(type(each) is int and each >= 0 for each in sizes) or sum(sizes) != len(attached):
        raise _Invalid(f"body must list the sizes of the frames, which are {len(attached)} bytes together")
    frames, at = [], 0
    for size in sizes:
        frames.append(attached[at : at + size])
        at += size
    return frames


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    value = content.get(name, [])
    if not isinstance(value, list):
        raise _Invalid(f"{name} must be a list")
    return value


def _check(name: str, valid: bool, rule: str) -> None:
    if not valid:
        raise _Invalid(f"{name} must be {rule}")


def _check_names(content: Mapping[str, Any], known: frozenset[str]) -> None:
    if not known.issuperset(content):
        unknown = next(each for each in content if each not in known)
        raise _Invalid(f"a message has no {unknown[:50]!r}: it may have {', '.join(sorted(known))}")


def _is_id(value: object) -> TypeGuard[Id]:
    if isinstance(value, str):
        return len(value) <= MAX_ID_CHARACTERS
    return type(value) is int and -MAX_INTEGER <= value <= MAX_INTEGER


def _is_duration(value: object) -> bool:
    return type(value) in {int, float} and 0 < value < math.inf  # type: ignore[operator]


def _is_object(value: object) -> bool:
    """Return whether this is an object that is not nested too deeply."""
    if not isinstance(value, dict):
        return False
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return True
    return False


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(id_: Id, kind: str, frames: Sequence[bytes], form: Form) -> str | bytes:
    """Return a message with the body of a PARTIAL or a FINAL.

    A body that is not text becomes a binary message, whatever the form.
    """
    head = f'{{"id":{json.dumps(id_)},"{kind}":'
    if form is not Form.BINARY:
        try:
            first, *more = [_value(frame, form) for frame in frames]
        except UnicodeDecodeError:
            pass
        else:
            rest = f',"more":[{",".join(more)}]' if more else ""
            return f"{head}{first}{rest}}}"
    sizes = ",".join([str(len(frame)) for frame in frames])
    return b"".join([f"{head}[{sizes}]}}\n".encode(), *frames])


def encode_error(id_: Id | None, problem: Mapping[str, Any]) -> str:
    """Return a text message with a problem document."""
    return json.dumps({"id": id_, "error": problem}, separators=(",", ":"))


def _value(frame: bytes, form: Form) -> str:
    """Return a frame as JSON.  Raises `UnicodeDecodeError` if it is not text."""
    text = str(frame, "utf-8")
    if form is Form.JSON:
        try:
            parse_json(text)
        except _NOT_JSON:
            pass
        else:
            return text
    return json.dumps(text, ensure_ascii=False)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.  Raises `ValueError`, also for NaN and infinity, or `RecursionError`."""
    return json.loads(str(text, "utf-8") if isinstance(text, bytes) else text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
