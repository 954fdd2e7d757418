"""Workers to try things with: `mdworker zmdp.workers.examples:echo`, `mdworker zmdp.workers.examples:sleep`."""

import math
import time

from ..mdp.errors import ServiceError
from .mdworker import Worker
from .session.request import Request

MAX_SLEEP_MS = 3_600_000.0
CHECK_SECONDS = 0.1
"""Interval at which the handler checks whether the request was cancelled."""

echo = Worker("echo")
sleep = Worker("sleep")


@echo
def repeat(request: Request) -> list[bytes]:
    """Return the request."""
    return request


@sleep
def pause(request: Request) -> list[bytes]:
    """Sleep for the number of milliseconds in the first frame, and return the request.  Stop when it is cancelled."""
    try:
        milliseconds = float(request[0])
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds <= MAX_SLEEP_MS:
        raise ServiceError(400, f"expected milliseconds from 0 to {MAX_SLEEP_MS:.0f}, got {request[0]!r:.40}")
    until = time.monotonic() + milliseconds / 1000
    while not request.cancelled and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, CHECK_SECONDS))
    return request
