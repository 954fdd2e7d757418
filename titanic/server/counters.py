"""The counters of one Titanic: its quota of requests that have not ended, and its metrics since it started.

The event loop and the database's threads count, and another thread may read the metrics at any time: each number by
itself is right.  docs/how-to/operations.md explains them, and the metrics that are counted in the database.
"""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ..db.group_commit import CommitMetrics

DEFAULT_MAX_WAITING: Final = 2_000_000
DEFAULT_MAX_PER_SERVICE: Final = DEFAULT_MAX_WAITING // 2
MAX_CODES: Final = 32
"""Different outcomes that are counted by name; further codes of handlers count as `OTHER_CODE`."""
OTHER_CODE: Final = "other"
OK: Final = "ok"


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


class Metrics:
    """The counts of one Titanic since it started."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.accepted = 0
        """Requests that were stored, or were stored already under the UUID that their caller chose."""
        self.repeated = 0
        """Requests whose key was known."""
        self.rejected: Counter[str] = Counter()
        """Requests that were not stored, by reason."""
        self.attempts = 0
        """Attempts that were begun: requests sent to their services, each time."""
        self.retries = 0
        """Attempts after which the request waits for another."""
        self.deaths = 0
        """Workers that were lost while they handled a request."""
        self.finished: Counter[str] = Counter()
        """Requests that ended: `OK`, or the code of the failure."""
        self.commits = {"writer": CommitMetrics(), "keys": CommitMetrics()}
        """By thread; that of the keys is used with PostgreSQL only."""

    def ended(self, code: int | None) -> None:
        """Count a request that ended: with a reply, or with a failure of this code."""
        outcome = OK if code is None else f"{code:03}"
        if outcome not in self.finished and len(self.finished) >= MAX_CODES:
            outcome = OTHER_CODE
        self.finished[outcome] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name, ready for JSON."""
        return {
            "up_seconds": round(time.monotonic() - self.started, 3),
            "accepted": self.accepted,
            "repeated": self.repeated,
            "rejected": dict(self.rejected),
            "attempts": self.attempts,
            "retries": self.retries,
            "deaths": self.deaths,
            "finished": dict(self.finished),
            "commits": {name: each.as_dict() for name, each in self.commits.items()},
        }
