"""When a worker that has ended unexpectedly is started again: a process of `mdworker`, or a slot of a Spark fleet."""

import random
from typing import Final

from ...mdp.backoff import doubled

BACKOFF_SECONDS: Final = (1.0, 32.0)
"""First and longest pause after failures; the pause doubles each time."""
EARLY_DEATH_SECONDS: Final = 10.0
"""A worker that dies sooner than this counts towards the backoff; a later death does not."""
JITTER: Final = 0.2
"""Fraction by which pauses vary randomly, so that workers do not all start at once."""


def restart_pause(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row; none after 0."""
    if not failures:
        return 0.0
    return doubled(*BACKOFF_SECONDS, failures - 1) * random.uniform(1 - JITTER, 1)  # noqa: S311 - not a secret
