"""Helpers for ASGI applications: a whole body, a client that disconnects, a response in one piece."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect

from .problems import RawHeaders


async def read_body(receive: Any) -> bytes:
    """Return the body of a request.

    Raises `ClientDisconnect` if the client disconnected, or was refused (`guard.py`), before its request was complete:
    nobody is left to answer.
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
        pieces.clear()  # the traceback of an exception keeps this frame


@contextmanager
def on_disconnect(receive: Any, then: Callable[[], None]) -> Generator[None]:
    """Within this context, call `then` if the client disconnects.  The body must have been read."""
    watching = asyncio.ensure_future(_watch(receive, then))
    try:
        yield
    finally:
        watching.cancel()


async def _watch(receive: Any, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


async def respond(send: Any, status: int, headers: RawHeaders, body: bytes = b"") -> None:
    """Send a response."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})
