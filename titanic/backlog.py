"""The requests in the database that have not ended: about how many there are, and when to look for them."""

import asyncio
from collections.abc import Mapping
from typing import Final

from .metrics import Metrics

DEFAULT_MAX_WAITING: Final = 2_000_000
DEFAULT_MAX_PER_SERVICE: Final = DEFAULT_MAX_WAITING // 2


class Backlog:
    """Counts requests of each service as they are stored, retried and ended.

    A service counts with at most `max_per_service` requests, even if it has more, because other programs write into the
    database too: so one service cannot take all the room.

    Args:
        metrics: Counts them too.
        max_waiting: Maximum number of requests that have not ended.
        max_per_service: Maximum number of these to one service.
    """

    def __init__(self, metrics: Metrics, max_waiting: int, max_per_service: int) -> None:
        self._metrics = metrics
        self._max_waiting = max_waiting
        self.max_per_service = max_per_service
        self._waiting: dict[str, int] = {}
        """Requests that have not ended: the last count, and this Titanic's changes since."""
        self._total = 0
        """Their number, as it counts towards `max_waiting`."""
        self._refused = False
        self.look = asyncio.Event()
        """Set when maintenance should look for requests to execute before its interval ends."""

    def full(self) -> frozenset[str]:
        """Return the services that have taken all the room that one may take."""
        return frozenset(name for name, waiting in self._waiting.items() if waiting >= self.max_per_service)

    def why_full(self, service: str = "") -> str | None:
        """Return why no further request to `service`, or to any, may be accepted; None if one may."""
        if self._waiting.get(service, 0) >= self.max_per_service:
            return self.service_full(service)
        if self._total >= self._max_waiting:
            return self._full(f"{self._max_waiting} requests have not ended (--max-waiting)")
        return None

    def service_full(self, service: str) -> str:
        """Return that a service has taken all the room that one may take, as `full` has said."""
        return self._full(f"{self.max_per_service} requests to {service} have not ended (--max-waiting-per-service)")

    def _full(self, limit: str) -> str:
        self._refused = True
        return f"full: {limit}; try again later"

    def take_refused(self) -> bool:
        """Return whether requests were refused since the last call: perhaps there is room again."""
        refused, self._refused = self._refused, False
        return refused

    def counted(self, waiting: Mapping[str, int]) -> None:
        """Record how many requests of each service in the database have not ended."""
        self._waiting = dict(waiting)
        self._total = sum(min(count, self.max_per_service) for count in waiting.values())

    def _add(self, service: str, number: int) -> None:
        before = self._waiting.pop(service, 0)
        after = max(0, before + number)
        if after:
            self._waiting[service] = after
        self._total += min(after, self.max_per_service) - min(before, self.max_per_service)

    def accepted(self, service: str, new: int, repeated: int) -> None:
        """Record that requests to `service` were stored, and that others had a key that was known."""
        self._add(service, new)
        self._metrics.stored(new, repeated)

    def retried(self) -> None:
        """Record that a request waits for another attempt."""
        self._metrics.retried()
        self.look.set()

    def ended(self, service: str, code: int | None) -> None:
        """Record that a request to `service` ended: with a reply, or with a failure of this code."""
        self._add(service, -1)
        self._metrics.ended(code)
