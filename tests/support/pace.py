"""For tests in which a hand-written peer lives by the signs of life that the test gives."""

import time
from collections.abc import Callable
from typing import Any

BEAT = 0.05
"""The heartbeat interval in these tests, in seconds."""


class Pace:
    """How regularly a test gives signs of life: a busy machine may hold it up between two of them."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.longest = 0.0
        """The longest time between two signs, in seconds."""

    def __call__(self) -> None:
        """Note that a sign of life is given now."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self._last)
        self._last = now


def steadily(play: Callable[[int, Pace], Any], liveness: int) -> Any:
    """Call `play(liveness, pace)`, which calls `pace` with each sign of life, at least every 8 × `BEAT` seconds.

    If it fails although this process was held up for so long that the peer may rightly be taken for dead, that proves
    nothing: it is called again, with five times the liveness.
    """
    for factor in (1, 5, 25):
        pace = Pace()
        try:
            return play(factor * liveness, pace)
        except AssertionError:
            pace()
            if factor == 25 or pace.longest < factor * liveness * BEAT / 2:
                raise
    raise AssertionError
