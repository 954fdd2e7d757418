"""Print the files of the product that a live call crosses, between an asyncio client and worker.

    ZMDP_PURE=1 python tests/crossed.py
    ZMDP_PURE=1 python tests/crossed.py durable

A file counts if one of its functions runs between the request and its reply, in the client, the broker or the worker.
With `durable`, the files of `titanic/` are printed: those in which a function runs between the submission of each of
several requests and the arrival of its reply.  So what Titanic does periodically does not count.
"""

import asyncio
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import click

from zmdp import AsyncClient, AsyncWorker
from zmdp.testing import running_broker
from zmdp.titanic import AsyncTitanic
from zmdp.titanic.server.program import Server
from zmdp.version import build

PACKAGE = "/zmdp/"
DURABLE = 20
"""How many requests are submitted to Titanic."""


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


async def call(crossed: Crossed, endpoint: str) -> set[str]:
    """Make calls, and return the files that the last one crosses: the first open connections."""
    worker = AsyncWorker("echo", echo, broker=endpoint)
    worker.start()
    async with AsyncClient(endpoint) as client:
        for noting in (False, False, True):
            crossed.noting = noting
            await client.request("echo", b"hello")
        crossed.noting = False
    worker.stop()
    await worker.wait()
    return crossed.files


async def submit(crossed: Crossed, endpoint: str) -> set[str]:
    """Submit requests to a Titanic with SQLite, fetch their replies, and return the files that each of them crosses."""
    found: list[set[str]] = []
    worker = AsyncWorker("echo", echo, broker=endpoint)
    worker.start()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(str(Path(folder, "titanic.db")), broker=endpoint, drain_timeout=0.0)
        running = asyncio.ensure_future(server.run())
        async with AsyncClient(endpoint) as client:
            titanic = AsyncTitanic(client)
            await (await titanic.submit("echo", b"hello")).result()  # opens connections, and finds the service
            for _ in range(DURABLE):
                crossed.files = set()
                crossed.noting = True
                await (await titanic.submit("echo", b"hello")).result()
                crossed.noting = False
                found.append({file for file in crossed.files if file.startswith("titanic/")})
        server.stop()
        await running
    worker.stop()
    await worker.wait()
    return set.intersection(*found)


def main() -> None:
    """Print the files, and their number."""
    if "pure" not in build():
        sys.exit("compiled functions cannot be seen: set ZMDP_PURE=1")
    travel = {"": call, "durable": submit}[sys.argv[1] if len(sys.argv) > 1 else ""]
    crossed = Crossed()
    threading.setprofile(crossed)
    sys.setprofile(crossed)
    with running_broker(drain_timeout=0.0) as broker:
        files = asyncio.run(travel(crossed, broker.endpoints[0]))
    click.echo("\n".join(sorted(files)))
    click.echo(f"{len(files)} files", err=True)


if __name__ == "__main__":
    main()
