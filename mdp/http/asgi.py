"""The body of a request, received whole."""

from typing import Any

from starlette.requests import ClientDisconnect


async def read_body(receive: Any) -> bytes:
    """Return the body of a request.

    Raises `ClientDisconnect`: the client has disconnected, or was refused (`zmdp.mdp.http.guard`), before its request
    was complete, so nobody is left to answer.
    """
    pieces: list[bytes] = []
    more = True
    try:
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            pieces.append(message["body"])
            more = message["more_body"]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        pieces.clear()  # an exception keeps this frame until it has been answered
