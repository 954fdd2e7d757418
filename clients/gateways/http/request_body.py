"""The body of a request, received whole."""

from typing import Any

from ....mdp.http.problems import Problem


class Disconnected(Exception):
    """The client has disconnected, or was refused, before its request was complete: nobody is left to answer."""


async def read_body(receive: Any, limit: int, length: int | None = None) -> bytes:
    """Return the body of a request; `length` is its Content-Length.

    Raises `Problem` if it has more than `limit` bytes, and `Disconnected`.
    """
    pieces: list[bytes] = []
    size, more = length or 0, True
    if size <= limit:  # else it is refused before `receive` asks the client to send it (100-continue)
        size = 0
    try:
        while more and size <= limit:
            message = await receive()
            if message["type"] != "http.request":
                raise Disconnected
            pieces.append(message["body"])
            size += len(message["body"])
            more = message["more_body"]
        if size > limit:
            raise Problem("too-large", f"the body of a request may have up to {limit} bytes (--max-body)")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        pieces.clear()  # an exception keeps this frame until it has been answered
