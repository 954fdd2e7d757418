"""Pauses between attempts: they double, and vary so that peers that failed together do not return together."""

from __future__ import annotations

import random
from typing import Any, Final

_SHORTEST: Final = 0.5
"""Least fraction of a pause that is waited."""
_MAX_DOUBLINGS: Final = 32


def jittered(seconds: float, rng: Any = random) -> float:
    """Return a random pause between half of `seconds` and all of them.  `rng` is a `random.Random`."""
    return seconds * float(rng.uniform(_SHORTEST, 1.0))


def doubled(first: float, longest: float, times: int) -> float:
    """Return the pause after `times` earlier ones, without jitter."""
    return min(first * 2.0 ** min(times, _MAX_DOUBLINGS), longest)


class Backoff:
    """The pauses after failures in a row.  `bounds` are the shortest and the longest, in seconds."""

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


# Not Final: mypyc (2.4) takes a Final of several floats for unset.
RESTART_SECONDS: tuple[float, float] = (1.0, 32.0)
"""The shortest and the longest pause before a worker that has ended unexpectedly is started again."""
EARLY_DEATH_SECONDS: Final = 10.0
"""A worker that dies sooner than this counts towards the backoff; a later death does not."""
RESTART_JITTER: Final = 0.2
"""Fraction by which pauses vary randomly, so that workers do not all start at once."""


def restart_pause(failures: int) -> float:
    """Return the seconds before a worker is started again, a process of `mdworker` or a slot of a Spark fleet.

    `failures` is the number of failures in a row; there is no pause after 0.
    """
    if not failures:
        return 0.0
    return doubled(*RESTART_SECONDS, failures - 1) * random.uniform(1 - RESTART_JITTER, 1)  # noqa: S311 - not a secret
