"""Handlers for fleets; tests ship this file or run in its folder."""

import asyncio
import os
import threading
import time
from pathlib import Path

from zmdp.workers import Last


def pid(request):
    """The pid of the process that serves."""
    return b"%d" % os.getpid()


def imported(request):
    """Where the frames' modules are imported from."""
    return [__import__(name.decode()).__file__.encode() for name in request]


def slow(request):
    """Take as many seconds as the request says."""
    time.sleep(float(request[0]))
    return b"%d" % os.getpid()


def wait(request):
    """Leave a file with the pid in the folder that the request names, and wait there for the file `go`."""
    folder = Path(request[0].decode())
    (folder / f"began-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return b"%d" % os.getpid()


def count(request):
    """A stream."""
    for number in range(int(request[0])):
        yield b"%d" % number
    return b"done"


async def count_async(request):
    """A stream, of an asyncio handler."""
    for number in range(int(request[0])):
        yield b"%d" % number
    yield Last(b"done")


THREADS = threading.Barrier(3)
tasks = 0


def together(request):
    """Wait until three of these run."""
    THREADS.wait()


async def together_async(request):
    """The same, with asyncio.

    In short steps: on a busy machine, a long first one lowers the worker's credit, and short ones raise it again.
    """
    global tasks  # noqa: PLW0603 - the handlers run in one event loop
    tasks += 1
    while tasks < 3:
        await asyncio.sleep(0.01)


def version(request):
    """What a newer fleet says."""
    return b"new"


def double(number):
    """For a codec."""
    return 2 * number


not_callable = 3


def nap(request):
    """Take a moment."""
    time.sleep(0.2)
    return b"done"
