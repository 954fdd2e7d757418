"""Payloads of Flux messages by convention: strings and JSON objects, each with one NUL at the end (RFC 3).

In a body of a request or reply, a JSON object has no NUL at its end.  Other payloads are passed on as they are.  No
payload is one empty frame.

So `{}` without a NUL gets one, and an empty payload becomes none, unless the options say that the payload is the body,
as gateways do (`is_raw`).  Replies have no options.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Final, NoReturn

MAX_DEPTH: Final = 200
"""How deeply JSON may be nested: less than Python can decode and encode, wherever it is called."""
RAW: Final = "raw"
"""In the options of requests: the payload is the body as it is."""


def json_payload(value: dict[str, Any]) -> bytes:
    """Return `value` as a payload.

    Raises `ValueError` or `TypeError` if JSON cannot represent it, which never happens to a result of `parse_json`.
    """
    return _encode(value).encode("ascii") + b"\0"


def parse_json(payload: bytes | None) -> dict[str, Any] | None:
    """Return the object in `payload`, or None if there is none that conforms to RFC 7159."""
    if not payload or payload[-1] != 0:
        return None
    try:
        text = payload[:-1].decode()
        value = _decode(text)
        if "\\u" in text:
            _encode_as_is(value).encode()  # a lone surrogate such as `\ud800` cannot be encoded
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    if text.count("{") + text.count("[") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        return None
    return value


def text_in(payload: bytes | None, key: str) -> str | None:
    """Return the text that the JSON object in `payload` has under `key`, or None."""
    value = (parse_json(payload) or {}).get(key)
    return value if isinstance(value, str) else None


def string_payload(text: str) -> bytes:
    """Return `text` as a payload; lone surrogates become question marks."""
    return text.encode(errors="replace") + b"\0"


def parse_string(payload: bytes | None) -> str | None:
    """Return the text in `payload`, or None if it is not a string: UTF-8 with one NUL, at its end."""
    if not payload or payload.find(0) != len(payload) - 1:
        return None
    try:
        return payload[:-1].decode()
    except UnicodeDecodeError:
        return None


def body_of(payload: bytes | None) -> bytes:
    """Return the body for a payload: one frame."""
    if payload is None:
        return b""
    return payload[:-1] if payload[-2:] == b"}\0" and payload[:1] == b"{" else payload


def is_raw(payload: bytes | None) -> bool:
    """Return whether a payload would come out of a body as another one."""
    if not payload:
        return payload is not None
    return payload[-1:] == b"}" and payload[:1] == b"{"


def payload_of(body: Sequence[bytes]) -> bytes | None:
    """Return the payload for a body, whose frames follow each other."""
    payload = body[0] if len(body) == 1 else b"".join(body)
    if not payload:
        return None
    return payload + b"\0" if payload[-1:] == b"}" and payload[:1] == b"{" else payload


def _depth(value: object) -> int:
    """Return how deeply `value` is nested, without recursion."""
    depth = 0
    level = [value]
    while level:
        depth += 1
        inner = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]  # type: ignore[attr-defined]
        level = [each for each in inner if isinstance(each, dict | list)]
    return depth


def _finite(digits: str) -> float:
    """Return a number that JSON can represent again.  Raises `ValueError` if it is too large."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError("number too large")
    return number


def _not_json(name: str) -> NoReturn:
    """Raise `ValueError`: NaN and infinity are Python's, not JSON's."""
    raise ValueError(f"{name} is not JSON")


# `json.dumps` and `json.loads` with arguments would create these for every call.
_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_encode_as_is: Final = json.JSONEncoder(ensure_ascii=False).encode
_decode: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_not_json).decode
