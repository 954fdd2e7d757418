"""Services for the benchmarks."""

import os
import time
from pathlib import Path

from zmdp.workers import Worker

hold = Worker("hold")


@hold
def _hold(request):
    """The first to get it leaves its process id in the folder that is named, and waits; the next says when it began."""
    began = time.monotonic()
    if request.attempt == 1:
        (Path(request[0].decode()) / str(os.getpid())).touch()
        while not request.cancelled:
            time.sleep(0.1)
    return b"%f" % began
