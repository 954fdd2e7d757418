"""Payloads of Flux messages ↔ bodies of requests and replies.

A JSON object has a NUL at its end in Flux, and none in a body.  Other payloads are passed on as they are.  No payload
is one empty frame.

So `{}` without a NUL gets one, and an empty payload becomes none, unless the options say that the payload is the body:
gateways do (`is_raw`).  Replies have no options.
"""

from collections.abc import Sequence
from typing import Final

RAW: Final = "raw"
"""In the options of requests: the payload is the body as it is."""


def body_of(payload: bytes | None) -> bytes:
    """Return the body for a payload: one frame."""
    if payload is None:
        return b""
    return payload[:-1] if payload[-2:] == b"}\0" and payload[:1] == b"{" else payload


def is_raw(payload: bytes | None) -> bool:
    """Return whether a payload that is sent as a body would become another one."""
    if not payload:
        return payload is not None
    return payload[-1:] == b"}" and payload[:1] == b"{"


def payload_of(body: Sequence[bytes]) -> bytes | None:
    """Return the payload for a body, whose frames follow each other."""
    payload = body[0] if len(body) == 1 else b"".join(body)
    if not payload:
        return None
    return payload + b"\0" if payload[-1:] == b"}" and payload[:1] == b"{" else payload
