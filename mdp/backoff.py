"""Pauses between attempts: they double, and vary so that peers that failed together do not return together."""

from __future__ import annotations

import random
from typing import Any, Final

_SHORTEST: Final = 0.5
"""Least fraction of a pause that is waited."""
_MAX_DOUBLINGS: Final = 32


def jittered(seconds: float, rng: Any = random) -> float:
    """Return a pause of at most so many seconds, and at least half of them.  `rng` is a `random.Random`."""
    return seconds * float(rng.uniform(_SHORTEST, 1.0))


def doubled(first: float, longest: float, times: int) -> float:
    """Return the pause after so many others, without jitter."""
    return min(first * 2.0 ** min(times, _MAX_DOUBLINGS), longest)


class Backoff:
    """The pauses after failures in a row: of a first and of a longest duration, in seconds."""

    def __init__(self, bounds: tuple[float, float], rng: Any = random) -> None:
        self.following = bounds[0]
        """The next pause, without jitter."""
        self._bounds = bounds
        self._rng = rng

    def take(self) -> float:
        """Return the next pause; the one after it is twice as long."""
        pause = self.following
        self.following = min(2 * pause, self._bounds[1])
        return jittered(pause, self._rng)

    def reset(self) -> None:
        """Begin again with the first: an attempt has succeeded."""
        self.following = self._bounds[0]
