"""The body of a request, received whole and within the limits."""

from typing import Any

from ....mdp.http.problems import Problem
from .gateway import Gateway


class Disconnected(Exception):
    """The client has disconnected before its request was complete: nobody is left to answer."""


async def read_body(gateway: Gateway, receive: Any, length: int | None = None) -> bytes:
    """Return the body of a request; `length` is its Content-Length.

    Raises `Problem` if it is too large, or if there is no memory for it, and `Disconnected`.
    """
    limit = gateway.settings.max_body
    if length is not None and length > limit:
        raise _too_large(limit)  # before `receive` asks the client to send it (100-continue)
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Disconnected
            piece = message["body"]
            if not message["more_body"] and not pieces and len(piece) <= limit:
                return bytes(piece)
            gateway.charge(len(piece))
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            if not message["more_body"]:
                return b"".join(pieces)
    finally:
        gateway.memory -= size


def _too_large(limit: int) -> Problem:
    return Problem("too-large", f"the body of a request may have up to {limit} bytes (--max-body)")
