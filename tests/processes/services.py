"""Handlers for the worker processes of the tests."""

import asyncio
import os
import signal
import time
from pathlib import Path

from zmdp.workers import ServiceError, Worker

slow = Worker("slow")


@slow
def hold(request):
    """Write this process's pid to the file that the request names, and reply with it once the file is gone."""
    path = Path(request[0].decode())
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    while path.exists():
        time.sleep(0.01)
    return b"%d" % os.getpid()


def pid(request):
    """Reply with this process's pid."""
    return b"%d" % os.getpid()


def large(request):
    """Send SIGTERM to this process, and reply with 20 MB."""
    os.kill(os.getpid(), signal.SIGTERM)
    return b"x" * 20_000_000


not_callable = 3


async def double(number):
    """Return twice the number; a coroutine, for `--codec json`."""
    return 2 * number


async def gated(request):
    """Write this process's pid to the second file that the request names, and reply with it once the first is gone.

    A request that ends with "poison" kills this process instead.
    """
    gate, begun = (Path(frame.decode()) for frame in request[:2])
    begun.write_text(str(os.getpid()))
    while gate.exists():
        await asyncio.sleep(0.01)
    if request[-1] == b"poison":
        os.kill(os.getpid(), signal.SIGKILL)
    return b"%d" % os.getpid()


def endless(request):
    """Stream forever."""
    number = 0
    while True:
        yield b"%d" % number
        number += 1
        time.sleep(0.01)


def records(request):
    """Fail with a 404 of the service's own."""
    raise ServiceError(404, "no such record")


def recorded(request):
    """Add a line to the second file that the request names, and reply once the first is gone."""
    gate, begun = (Path(frame.decode()) for frame in request)
    with begun.open("a") as file:
        file.write("begun\n")
    while gate.exists():
        time.sleep(0.01)
    return b"done"
