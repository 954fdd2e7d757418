"""How many requests may wait: about how many there are in the database that have not ended, and how many may be."""

from collections.abc import Mapping
from typing import Final

DEFAULT_MAX_WAITING: Final = 2_000_000
DEFAULT_MAX_PER_SERVICE: Final = DEFAULT_MAX_WAITING // 2


class Quota:
    """Counts requests of each service as they are stored and ended.

    A service counts with at most `max_per_service` requests, even if it has more, because other programs write into the
    database too: so one service cannot take all the room.

    Args:
        max_waiting: Maximum number of requests that have not ended.
        max_per_service: Maximum number of these to one service.
    """

    def __init__(self, max_waiting: int, max_per_service: int) -> None:
        self._max_waiting = max_waiting
        self.max_per_service = max_per_service
        self._waiting: dict[str, int] = {}
        """Requests that have not ended: the last count, and this Titanic's changes since."""
        self._total = 0
        """Their number, as it counts towards `max_waiting`."""
        self._refused = False

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

    def add(self, service: str, number: int) -> None:
        """Record that so many more requests to `service` have not ended, or fewer."""
        before = self._waiting.pop(service, 0)
        after = max(0, before + number)
        if after:
            self._waiting[service] = after
        self._total += min(after, self.max_per_service) - min(before, self.max_per_service)
