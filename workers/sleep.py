"""The sleep service: takes as many milliseconds as the request says.  `mdworker zmdp.workers.sleep:worker`."""

import math
import time

from ..mdp.errors import ServiceError
from .mdworker import Worker
from .request import Request

LONGEST = 3600_000.0
STEP = 0.1

worker = Worker("sleep")


@worker
def sleep(request: Request) -> list[bytes]:
    """Sleep for the first frame's number of milliseconds, and return the request.  Ends early when it is cancelled."""
    try:
        milliseconds = float(request[0])
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds <= LONGEST:
        raise ServiceError(400, f"it takes a number of milliseconds from 0 to {LONGEST:g}, not {request[0]!r:.40}")
    until = time.monotonic() + milliseconds / 1000
    while not request.cancelled and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, STEP))
    return request
