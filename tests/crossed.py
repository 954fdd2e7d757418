"""Print the files of the product that a live call crosses, between an asyncio client and worker.

    ZMDP_PURE=1 python tests/crossed.py

A file counts if one of its functions runs between the request and its reply, in the client, the broker or the worker.
"""

import asyncio
import sys
import threading
from types import FrameType
from typing import Any

import click

from zmdp import AsyncClient, AsyncWorker
from zmdp.testing import running_broker
from zmdp.version import build

PACKAGE = "/zmdp/"


class Crossed:
    """A profile function, which notes where functions run while it is `noting`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.noting = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if self.noting and event == "call" and PACKAGE in frame.f_code.co_filename:
            self.files.add(frame.f_code.co_filename.rpartition(PACKAGE)[2])


async def echo(request: Any) -> list[bytes]:
    """Reply with the request."""
    return list(request)


async def call(crossed: Crossed, endpoint: str) -> None:
    """Make calls, and note the last one: the first open connections."""
    worker = AsyncWorker("echo", echo, broker=endpoint)
    worker.start()
    async with AsyncClient(endpoint) as client:
        for noting in (False, False, True):
            crossed.noting = noting
            await client.request("echo", b"hello")
        crossed.noting = False
    worker.stop()
    await worker.wait()


def main() -> None:
    """Print the files, and their number."""
    if "pure" not in build():
        sys.exit("compiled functions cannot be seen: set ZMDP_PURE=1")
    crossed = Crossed()
    threading.setprofile(crossed)
    sys.setprofile(crossed)
    with running_broker(drain_timeout=0.0) as broker:
        asyncio.run(call(crossed, broker.endpoints[0]))
    click.echo("\n".join(sorted(crossed.files)))
    click.echo(f"{len(crossed.files)} files", err=True)


if __name__ == "__main__":
    main()
