"""The interface of a peer: a server, workers and a client, each written as its documentation recommends for speed.

Each peer's file has its own class; `child.py` recreates the peer, from the name of its class and its settings, in each
worker process and in the client process.
"""

import asyncio
import importlib.util
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

from processes import Server

from .load import Ask, Caller

Work = Callable[[bytes], bytes] | Callable[[bytes], Awaitable[bytes]]
"""The handlers of workers.  Only `pause` is a coroutine function, which not every peer supports."""


def echo(body: bytes) -> bytes:
    return body


def sleep(body: bytes) -> bytes:
    """Block the thread for the number of milliseconds in the body."""
    time.sleep(float(body) / 1000)
    return body


async def pause(body: bytes) -> bytes:
    """Sleep without blocking the event loop for the number of milliseconds in the body."""
    await asyncio.sleep(float(body) / 1000)
    return body


@dataclass
class Peer:
    """A peer.  `name` is its name in tables."""

    name: str
    needs: ClassVar[dict[str, str]] = {}
    """Required programs and modules, and how to install each."""
    synchronous: ClassVar[bool] = False
    """Whether its client is `caller` rather than `client`."""

    def missing(self) -> str | None:
        """Return what must be installed for it, or None."""
        for need, how in self.needs.items():
            if shutil.which(need) is None and not _importable(need):
                return f"{need} is not installed ({how})"
        return None

    @property
    def target(self) -> str:
        """The name by which a child process finds the class."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    def settings(self) -> dict[str, object]:
        return {each.name: value for each, value in zip(fields(self), asdict(self).values(), strict=True)}

    def server(self, folder: Path) -> AbstractContextManager[Server]:
        """Start the server; it keeps its files in `folder`."""
        raise NotImplementedError

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        """Serve as a worker forever; call `ready()` once requests may arrive."""
        raise NotImplementedError

    def client(self, address: str) -> AbstractAsyncContextManager[Ask]:
        """Yield an asyncio client: a coroutine function that takes a body and returns the reply."""
        raise NotImplementedError

    def caller(self, address: str, outstanding: int) -> AbstractContextManager[Caller]:
        """Yield a synchronous client that will have this many requests outstanding."""
        raise NotImplementedError


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
