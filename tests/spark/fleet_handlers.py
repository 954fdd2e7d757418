"""Handlers for fleets; tests ship this file or run in its folder."""

import os
import time


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


def count(request):
    """A stream."""
    for number in range(int(request[0])):
        yield b"%d" % number
    return b"done"


async def coroutine(request):
    """What a fleet does not take."""


def double(number):
    """For a codec."""
    return 2 * number


not_callable = 3


def nap(request):
    """Take a moment."""
    time.sleep(0.2)
    return b"done"
