"""What was done to the programs, and when it may explain what happens to calls."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GRACE_SECONDS: Final = 30.0
"""How long after a fault is over it may explain something: silence is noticed after 5 s, a lease ends after 10."""


@dataclass
class Fault:
    """What was done, when, and until when the program or connection was affected."""

    at: float
    what: str
    until: float = float("inf")
    hard: bool = True
    """Whether calls may be executed again for it, and streams break; a graceful end must be noticed by nobody."""


class HardPeriods:
    """When there were hard faults, or their consequences."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._periods: list[list[float]] = []
        for each in sorted((fault for fault in faults if fault.hard), key=lambda fault: fault.at):
            until = each.until + GRACE_SECONDS
            if self._periods and each.at <= self._periods[-1][1]:
                self._periods[-1][1] = max(until, self._periods[-1][1])
            else:
                self._periods.append([each.at, until])
        self._ends = [until for _, until in self._periods]

    def overlaps(self, began: float, ended: float) -> bool:
        """Return whether one of these periods shares a moment with that one."""
        at = bisect_left(self._ends, began)
        return at < len(self._periods) and self._periods[at][0] <= ended
