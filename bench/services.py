"""Services for the benchmarks, as `mdworker services:NAME` offers them."""

import asyncio
import os
import time
from pathlib import Path

from zmdp.workers import Worker

# ── what a worker of a full stack does (stacks/peer.py has the same for its peers) ───────────────────────────────────


def echo(request):
    return request


async def echo_async(request):
    return request


def sleep(request):
    """Block the thread for the number of milliseconds in the body."""
    time.sleep(float(request[0]) / 1000)
    return request


async def pause(request):
    """Sleep without blocking the event loop for the number of milliseconds in the body."""
    await asyncio.sleep(float(request[0]) / 1000)
    return request


# ── workers that are killed ──────────────────────────────────────────────────────────────────────────────────────────

hold = Worker("hold")


@hold
def _hold(request):
    """Report when this handler began; the first worker to get the request leaves its pid in a folder, and waits."""
    began = time.monotonic()
    if request.attempt == 1:
        (Path(request[0].decode()) / str(os.getpid())).touch()
        while not request.cancelled:
            time.sleep(0.1)
    return b"%f" % began
