"""The limits of services (C48), implemented a second time: from a list of all starts, slow but easy to read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from zmdp.mdp.service_limits import Limit, ServiceLimits

if TYPE_CHECKING:
    from .ledger import Seat


class Throttle:
    """What the limits of one service let start."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.limits = limits
        self._starts: list[tuple[float, str]] = []

    def start(self, group: str, now: float) -> None:
        self._starts.append((now, group))

    def opens(self, group: str, seats: Iterable[Seat], now: float = 0.0, ahead: int = 0, own_ahead: int = 0) -> float:
        """Return when a request of `group` may start; inf if one of those that `seats` hold must end first.

        So many others start before it now, of all groups and of its own.
        """
        running = [held.ticket.options.group for seat in seats for held in seat.held.values()]
        starts = [at for at, _ in self._starts] + [now] * ahead
        own = [at for at, other in self._starts if other == group] + [now] * own_ahead
        return max(
            _opens(self.limits.service, len(running) + ahead, starts),
            _opens(self.limits.group, running.count(group) + own_ahead, own),
        )


def _opens(limit: Limit, running: int, starts: list[float]) -> float:
    if limit.concurrency is not None and running >= limit.concurrency:
        return math.inf
    if limit.rate is None:
        return -math.inf
    due = -math.inf
    for at in starts:
        due = max(due, at) + limit.interval
    return due - (limit.at_once - 1) * limit.interval
