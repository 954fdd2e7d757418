"""For endpoints of Starlette and FastAPI; see docs/how-to/fastapi.md."""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

T = TypeVar("T")

DISCONNECTED: Final = 499
"""The status of a response that nobody gets."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, such as `client.call(…)`, and cancel it if the client of `request` disconnects.

    The body of `request` must have been read, as FastAPI does for its parameters.

    Raises what `work` raises, and `HTTPException` if the client has disconnected.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
    raise HTTPException(DISCONNECTED, "the client has disconnected")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
