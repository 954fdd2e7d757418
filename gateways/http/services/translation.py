"""HTTP requests as requests to services, and replies as bodies: pure functions, without sockets.

POST /services/NAME          the service's name, percent-encoded
Request-Timeout: 2.5         seconds (or 500ms) until the reply must have arrived: the request's ttl
Prefer: wait=10              wait for a worker if there is none: for so many seconds, if no timeout is given
Zmdp-Header-NAME: value      a header for the handler; traceparent and tracestate are passed on as well
X-Request-ID: id             the request's id in the logs: the header request-id for the handler
Content-Type: multipart/*    each part is a frame; any other body is one frame
Content-Type: …/json         the body must be JSON: a value, which a service may want in MessagePack; so is its reply
Accept: TYPE                 the reply's type, if it is one frame; several frames are multipart/mixed
Accept: text/event-stream    PARTIALs as they arrive (stream.py); otherwise only the FINAL counts

The values of a stream are lines of JSON, or in the format of `rows.py` that Accept prefers, unless the client asks for
events.  A service that offers types of its own (`media_types`) gets the one that Accept prefers as the
header `accept`, and its reply is of that type.
"""

import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ....clients.values import is_json, json_of, problem_of_json
from ....mdp.errors import SettingError
from ....mdp.http.problems import Problem
from ....mdp.services import About
from ....mdp.tracing import REQUEST_ID, TRACE_HEADERS
from ....mdp.wire import service_name

PREFIX: Final = b"/services/"
BINARY: Final = b"application/octet-stream"
JSON: Final = b"application/json"
EVENT_STREAM: Final = b"text/event-stream"
JSON_LINES: Final = b"application/x-ndjson"
JSONL: Final = b"application/jsonl"
CSV: Final = b"text/csv"
LINES: Final = frozenset({JSON_LINES, JSONL})
_OF_VALUES: Final = LINES | {None, JSON}
AS_DATA: Final = [
    (b"x-content-type-options", b"nosniff"), (b"content-security-policy", b"default-src 'none'; sandbox"),
]  # fmt: skip
"""Headers of replies: a browser must not run what a service returns, whatever its type."""

_HEADER_PREFIX: Final = b"zmdp-header-"
_SINGLE: Final = frozenset(
    {b"authorization", b"content-length", b"content-type", b"host", b"origin", b"request-timeout"}
)
"""Headers that a request may have only once."""
_LISTS: Final = frozenset({b"accept", b"content-encoding", b"prefer", b"tracestate"})
_PASSED: Final = {**{name.encode(): name for name in TRACE_HEADERS}, b"x-request-id": REQUEST_ID}
"""Headers that are passed to handlers, and their names there."""
_KNOWN: Final = _SINGLE | _LISTS | frozenset(_PASSED)
_SECONDS: Final = re.compile(rb"(\d{1,15}(?:\.\d{1,9})?)(ms|s)?")
_JSON_TYPE: Final = re.compile(rb"[\w.+!#$&^-]+/(?:[\w.+!#$&^-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_CHARSET: Final = re.compile(rb';\s*charset\s*=\s*"?([^\s";]*)', re.IGNORECASE)
MEDIA_TYPE: Final = re.compile(rb"[\w.+!#$&^-]+/[\w.+!#$&^-]+", re.ASCII)
_QUALITY: Final = re.compile(rb"q\s*=\s*([01](?:\.\d{0,3})?)", re.IGNORECASE)
_WAIT: Final = re.compile(rb'wait\s*=\s*("?)(\d{1,15}(?:\.\d{1,9})?)\1', re.IGNORECASE)


class Asked:
    """The headers of a request."""

    __slots__ = ("accept", "found", "headers", "json", "label", "stream", "timeout", "wait")

    def __init__(self, raw: Iterable[tuple[bytes, bytes]], default: float, longest: float) -> None:
        """Read headers; `default` and `longest` are the timeouts.  Raises `Problem`."""
        found: dict[bytes, bytes] = {}
        named: dict[str, str] | None = None
        for name, value in raw:
            if name in _KNOWN:
                if name in found:
                    value = _repeated(name, found[name], value)  # noqa: PLW2901
                found[name] = value
            elif name.startswith(_HEADER_PREFIX):
                named = named or {}
                named[name[len(_HEADER_PREFIX) :].decode("latin-1")] = _text(name, value)
        self.found: Mapping[bytes, bytes] = found
        """The known headers, by their names in lower case."""
        if b"content-encoding" in found:
            _check_coding(found[b"content-encoding"])
        self.timeout = default
        """Seconds."""
        self.wait = False
        """Wait for a worker, if none offers the service."""
        if b"request-timeout" in found:
            self.timeout = _seconds("Request-Timeout", found[b"request-timeout"], longest)
        if b"prefer" in found:
            self._read_prefer(found, longest)
        for name, passed in _PASSED.items():
            if name in found:
                named = named or {}
                named.setdefault(passed, _text(name, found[name]))
        self.headers = named
        """The headers for the handler, or None."""
        content_type = found.get(b"content-type")
        self.json = content_type is not None and _JSON_TYPE.fullmatch(content_type) is not None
        """The body is JSON."""
        if self.json and content_type is not None and (charset := _CHARSET.search(content_type)):
            _check_charset(charset[1])
        self.accept = found.get(b"accept") or b"*/*"
        """The header Accept: the types that the reply may have."""
        self.stream = False
        """Pass on PARTIALs as they arrive."""
        self.label: bytes | None = None
        """The type of a reply of one frame, if the client names one."""
        if self.accept != b"*/*":
            self._read_accept(self.accept)

    def _read_prefer(self, found: Mapping[bytes, bytes], longest: float) -> None:
        """Read the preference `wait`.  Invalid and unknown preferences are ignored (RFC 7240, 2)."""
        quotes = 0
        for each in found[b"prefer"].split(b","):
            match = _WAIT.fullmatch(each.partition(b";")[0].strip()) if quotes % 2 == 0 else None
            if match is not None:
                seconds = min(float(match[2]), longest)
                self.wait = seconds > 0
                if self.wait and b"request-timeout" not in found:
                    self.timeout = seconds
                return  # only the first one counts
            quotes += each.count(b'"')

    def _read_accept(self, accept: bytes) -> None:
        types = [each.partition(b";")[0].strip().lower() for each in accept.split(b",")]
        if EVENT_STREAM in types:
            self.stream = True
        elif len(types) == 1 and MEDIA_TYPE.fullmatch(types[0]) and not types[0].startswith(b"multipart/"):
            self.label = types[0]


def _check_charset(name: bytes) -> None:
    """Raise `Problem` unless JSON in this encoding is UTF-8."""
    if name.lower() not in {b"utf-8", b"utf8", b"us-ascii", b"ascii"}:
        shown = name.decode("latin-1")
        raise Problem("unsupported-media-type", f"the Content-Type says charset={shown}: send JSON as UTF-8 (RFC 8259)")


def _repeated(name: bytes, first: bytes, value: bytes) -> bytes:
    if name in _LISTS:
        return first + b", " + value
    raise Problem("invalid", f"the header {name.decode()} is there twice")


def _check_coding(value: bytes) -> None:
    """Raise `Problem` if a body is compressed: services would get it as it is."""
    if any(each.strip().lower() not in {b"", b"identity"} for each in value.split(b",")):
        shown = value.decode("latin-1")
        text = f"the Content-Encoding of the body is {shown!r}: send it as it is, or unpack it in a proxy"
        raise Problem("unsupported-media-type", text, headers=[(b"accept-encoding", b"identity")])


def _text(name: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Problem("invalid", f"the value of the header {name.decode()} is not UTF-8") from None


def _seconds(what: str, value: bytes, longest: float) -> float:
    match = _SECONDS.fullmatch(value.strip())
    seconds = 0.0 if match is None else float(match[1]) / (1000 if match[2] == b"ms" else 1)
    if not 0 < seconds <= longest:
        shown = value.decode("latin-1")
        raise Problem(
            "invalid",
            f"{what} is {shown!r}: it must be a number of seconds, such as 2.5, or 500ms; at most {longest:g}",
        )
    return seconds


def service_of(raw_path: bytes) -> bytes:
    """Return the name in a path that begins with `PREFIX`.  Raises `Problem` if it is not a valid service name."""
    name = raw_path[len(PREFIX) :]
    if b"%" in name:
        name = unquote_to_bytes(name)
    try:
        return service_name(name)
    except SettingError as error:
        raise Problem("invalid", str(error)) from None


def frames_of(asked: Asked, body: bytes, max_parts: int) -> Sequence[bytes]:
    """Return the frames in the body of a request.  Raises `Problem` if it contradicts its type."""
    content_type = asked.found.get(b"content-type")
    if asked.json:
        body = body.removeprefix(BOM_UTF8)  # which parsers may ignore (RFC 8259, 8.1), and programs on Windows write
        if body and (problem := problem_of_json(body)):
            raise Problem("invalid", f"the Content-Type is JSON, but the body is not: {problem}")
    if content_type is None or content_type[:10].lower() != b"multipart/":
        return (body,)
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise Problem("invalid", "the Content-Type is multipart, but it has no boundary")
    return _parts(boundary, body, max_parts)


def _parts(boundary: bytes, body: bytes, max_parts: int) -> list[bytes]:
    frames: list[bytes] = []
    pieces: list[bytes] = []
    ended = False

    def begin() -> None:
        if len(frames) >= max_parts:
            raise Problem("too-large", f"a body may have up to {max_parts} parts")
        pieces.clear()

    def data(chunk: bytes, start: int, end: int) -> None:
        pieces.append(chunk[start:end])

    def finish() -> None:
        frames.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def end() -> None:
        nonlocal ended
        ended = True

    try:
        parser = MultipartParser(
            boundary,
            {"on_part_begin": begin, "on_part_data": data, "on_part_end": finish, "on_end": end},
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Problem("invalid", f"the multipart body is malformed: {error}") from None
    if not ended:
        raise Problem("invalid", "the multipart body is incomplete: its last boundary is missing")
    return frames


def body_of(frames: Sequence[bytes], asked: Asked, about: About | None = None) -> tuple[bytes, bytes]:
    """Return type and content of the body with the frames of a reply.

    `about` is the description of the service, if the caller sent JSON: its values become JSON.
    """
    if about is not None and asked.label in _OF_VALUES and (value := json_of(about, frames)) is not None:
        return asked.label or JSON, value
    if len(frames) == 1:
        return asked.label or (JSON if asked.json and is_json(frames[0]) else BINARY), frames[0]
    boundary = secrets.token_hex(16).encode()  # nobody can guess it, so no frame contains it
    pieces: list[Any] = []
    for frame in frames:
        pieces += (b"--", boundary, b"\r\ncontent-type: application/octet-stream\r\n\r\n", frame, b"\r\n")
    pieces += (b"--", boundary, b"--\r\n")
    return b"multipart/mixed; boundary=" + boundary, b"".join(pieces)


def preferred(accept: bytes, offered: Sequence[bytes], *more: bytes) -> bytes:
    """Return the type that a client prefers; among equals, the first of `offered` (RFC 9110, 12.5.1).

    Raises `Problem` 406 if it accepts none of them; the text also names `more`, types that are offered elsewhere.
    """
    wanted: dict[bytes, float] = {}
    for each in accept.lower().split(b","):
        kind, *parameters = map(bytes.strip, each.split(b";"))
        quality = next((float(found[1]) for one in parameters if (found := _QUALITY.fullmatch(one))), 1.0)
        wanted[kind] = max(min(quality, 1.0), wanted.get(kind, 0.0))
    best = max(offered, key=lambda kind: _quality(kind, wanted), default=b"")
    if not best or not _quality(best, wanted):
        had = ", ".join(each.decode() for each in (*offered, *more))
        text = f"the Accept of the request is {accept[:200].decode('latin-1')!r}, but the service replies with: {had}"
        raise Problem("not-acceptable", text)
    return best


def _quality(kind: bytes, wanted: dict[bytes, float]) -> float:
    """Return the quality of a type: that of the most specific matching range."""
    for each in (kind, kind.partition(b"/")[0] + b"/*", b"*/*"):
        if each in wanted:
            return wanted[each]
    return 0.0
