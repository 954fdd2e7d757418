"""What a peer is: a server, workers and a client, each written as its documentation recommends for speed.

A peer's file has a class of its own; `child.py` makes it anew, from the name of its class and its settings, in each
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

from .load import Ask, Caller

Work = Callable[[bytes], bytes] | Callable[[bytes], Awaitable[bytes]]
"""What a worker does with a body.  Only `pause` is a coroutine function, and not every peer can do that."""


def echo(body: bytes) -> bytes:
    return body


def sleep(body: bytes) -> bytes:
    """Block the thread for as many milliseconds as the body says."""
    time.sleep(float(body) / 1000)
    return body


async def pause(body: bytes) -> bytes:
    """Await for as many milliseconds as the body says."""
    await asyncio.sleep(float(body) / 1000)
    return body


@dataclass
class Server:
    """A running server: where it is, and its processes."""

    address: str
    pids: list[int]


@dataclass
class Peer:
    """A peer.  `name` is what the table calls it."""

    name: str
    needs: ClassVar[dict[str, str]] = {}
    """Programs and modules, and how each is installed."""
    synchronous: ClassVar[bool] = False
    """Whether its client is `caller` rather than `client`."""

    def missing(self) -> str | None:
        """What has to be installed for it, or None."""
        for need, how in self.needs.items():
            if shutil.which(need) is None and not _importable(need):
                return f"{need} is not installed ({how})"
        return None

    @property
    def target(self) -> str:
        """How a child process finds the class."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    def settings(self) -> dict[str, object]:
        return {each.name: value for each, value in zip(fields(self), asdict(self).values(), strict=True)}

    def server(self, folder: Path) -> AbstractContextManager[Server]:
        """Start the server; it keeps its files in `folder`."""
        raise NotImplementedError

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        """Be a worker, for ever; `ready()` says that requests may come."""
        raise NotImplementedError

    def client(self, address: str) -> AbstractAsyncContextManager[Ask]:
        """An asyncio client: a coroutine function from a body to the reply."""
        raise NotImplementedError

    def caller(self, address: str, outstanding: int) -> AbstractContextManager[Caller]:
        """A synchronous client that will have so many requests outstanding."""
        raise NotImplementedError


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
