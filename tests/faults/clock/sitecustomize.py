"""Lets a soak step the clock of a process: Python imports this at its start if the folder is in `PYTHONPATH`.

`FAULTS_CLOCK` names a file with the seconds by which `time.time` is ahead, which is read once a second.  libfaketime,
which could step what C reads as well, breaks `time.sleep` of Python 3.11 (EINVAL).
"""

import os
import time

_real = time.time
_state = [0.0, 0.0]
"""How many seconds the clock is ahead, and when to read the file again."""


def _stepped() -> float:
    now = time.monotonic()
    if now >= _state[1]:
        with open(os.environ["FAULTS_CLOCK"]) as file:
            _state[:] = [float(file.read() or 0), now + 1]
    return _real() + _state[0]


if "FAULTS_CLOCK" in os.environ:
    time.time = _stepped
