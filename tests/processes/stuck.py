"""Handlers that never return.  Each first writes its process's pid to the file that the request names."""

import asyncio
import ctypes
import itertools
import json
import os
import time
from pathlib import Path

FOREVER = 1e6
_MUTEX_BYTES = 64


def begin(request):
    """Tell that the handler runs."""
    path = Path(request[0].decode())
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)


def sleeps(request):
    """Wait."""
    begin(request)
    time.sleep(FOREVER)


def spins(request):
    """Use the processor."""
    begin(request)
    while True:
        pass


def holds_interpreter(request):
    """Run C code that never lets other threads use the interpreter."""
    begin(request)
    sum(itertools.repeat(0))


async def awaits(request):
    """Wait, and let the event loop go on."""
    begin(request)
    await asyncio.Event().wait()


async def refuses_to_end(request):
    """The same, whatever is done to its task."""
    begin(request)
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def blocks(request):
    """Block the event loop."""
    begin(request)
    time.sleep(FOREVER)


async def spins_in_loop(request):
    """Block the event loop, and use the processor."""
    begin(request)
    while True:
        pass


async def blocks_in_c(request):
    """Block the event loop in C code, which signals do not interrupt."""
    begin(request)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


async def waits_for_thread(request):
    """Wait for a thread, for which Python waits when it exits."""
    begin(request)
    await asyncio.to_thread(time.sleep, FOREVER)


def writes_flux(request):
    """Wait, for a Flux program: its request is JSON."""
    begin([json.loads(request[0])["path"].encode()])
    time.sleep(FOREVER)
