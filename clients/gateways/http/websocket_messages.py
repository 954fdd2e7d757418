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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from ....mdp.services.misfit import problem_in
from ...values import is_json

Id = str | int

MAX_ID_CHARACTERS: Final = 100
MAX_INTEGER: Final = (1 << 53) - 1
"""The largest integer that JavaScript represents exactly."""
MAX_HEADER_BYTES: Final = 1 << 20
"""Maximum size of the first line of a binary message."""
MAX_DEPTH: Final = 20
"""Maximum nesting of options, which are encoded once more for the broker."""
_NOT_JSON: Final = (ValueError, RecursionError)
_CheckedId = Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)] | Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]


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


class _Head(msgspec.Struct):
    """What tells for whom an error is, and what kind of message it is."""

    id: _CheckedId
    cancel: UnsetType | Any = UNSET


class _Cancel(msgspec.Struct, forbid_unknown_fields=True):
    id: _CheckedId
    cancel: bool


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    id: _CheckedId
    service: str
    body: Raw | UnsetType = UNSET
    more: list[Raw] | UnsetType = UNSET
    json: bool | UnsetType = UNSET
    stream: bool = False
    timeout: Annotated[float, Meta(gt=0)] | None = None
    wait: bool = False
    headers: dict[str, str] | None = None
    options: dict[str, Any] | None = None


_HEAD: Final = msgspec.json.Decoder(_Head)
_CANCEL: Final = msgspec.json.Decoder(_Cancel)
_REQUEST: Final = msgspec.json.Decoder(_Request)


def decode(message: str | bytes) -> Ask | CancelAsk:
    """Return what a text message, or a binary one, says.  Raises `MessageError`."""
    attached = None
    if isinstance(message, bytes):
        message, newline, attached = message.partition(b"\n")
        if not newline or len(message) > MAX_HEADER_BYTES:
            raise MessageError("a binary message must begin with a JSON object on one line")
    id_: Id | None = None
    try:
        head = _HEAD.decode(message)
        id_ = head.id
        if head.cancel is UNSET:
            return _ask(_REQUEST.decode(message), attached)
        if not _CANCEL.decode(message).cancel:
            raise MessageError("$.cancel: must be true", id_)
        return CancelAsk(id_)
    except msgspec.ValidationError as error:
        raise MessageError(problem_in(error), id_) from None
    except _Invalid as error:
        raise MessageError(str(error), id_) from None
    except _NOT_JSON:
        raise MessageError(
            "a message must be a JSON object, in valid Unicode, and not be nested deeply", _id_in(message)
        ) from None


def _id_in(message: str | bytes) -> Id | None:
    """Return the id in a message that only a more lenient decoder understands."""
    with suppress(*_NOT_JSON):
        return msgspec.convert(json.loads(message), _Head).id
    return None


class _Invalid(Exception):
    pass


def _ask(said: _Request, attached: bytes | None) -> Ask:
    form, body = _text_body(said) if attached is None else (Form.BINARY, _binary_body(said, attached))
    if _depth(said.options) > MAX_DEPTH:
        raise _Invalid(f"$.options: at most {MAX_DEPTH} levels")
    return Ask(
        said.id, said.service, body, form, said.stream, said.timeout, said.wait, said.headers or None,
        said.options or None,
    )  # fmt: skip


def _text_body(said: _Request) -> tuple[Form, Sequence[bytes]]:
    raw = [] if said.body is UNSET else [bytes(said.body)]
    raw += [] if said.more is UNSET else map(bytes, said.more)
    try:
        values = [msgspec.json.decode(each) for each in raw]
    except _NOT_JSON:
        raise _Invalid(
            "$.body: it must consist of finite numbers and valid Unicode, and not be nested deeply"
        ) from None
    texts = [each for each in values if isinstance(each, str)]
    if said.json is True or (said.json is UNSET and said.body is not UNSET and len(texts) < len(values)):
        return Form.JSON, raw if said.body is not UNSET else [b"null", *raw]
    if len(texts) < len(values):
        raise _Invalid('$.body: expected str if "json" is false')
    return Form.TEXT, [*([b""] if said.body is UNSET else []), *(each.encode() for each in texts)]


def _binary_body(said: _Request, attached: bytes) -> Sequence[bytes]:
    for name in ("more", "json"):
        if getattr(said, name) is not UNSET:
            raise _Invalid(f"{name} is for text messages: in a binary message, body lists the sizes of the frames")
    try:
        sizes = (
            [len(attached)]
            if said.body is UNSET
            else msgspec.json.decode(said.body, type=list[Annotated[int, Meta(ge=0)]])
        )
    except _NOT_JSON:
        sizes = []
    if not sizes or sum(sizes) != len(attached):
        raise _Invalid(f"$.body: it must list the sizes of the frames, which are {len(attached)} bytes together")
    ends = [*accumulate(sizes)]
    return [attached[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _depth(value: object) -> int:
    """Return how deeply lists and objects are nested, up to `MAX_DEPTH`, and more if they are nested more deeply."""
    level, depth = [value], 0
    while depth <= MAX_DEPTH and (level := [each for each in level if isinstance(each, dict | list)]):
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


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
    return text if form is Form.JSON and is_json(frame) else json.dumps(text, ensure_ascii=False)
