"""What one Titanic counts while it runs (docs/how-to/operations.md).  What is in the database is counted there.

The event loop and the database threads count, and another thread may read at any time: each number by itself is right.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from ...mdp.histogram import Histogram

COMMIT_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds."""
BATCH_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Upper bounds in items."""
MAX_CODES: Final = 32
"""Different outcomes that are counted by name; further codes of handlers count as `OTHER_CODE`."""
OTHER_CODE: Final = "other"
OK: Final = "ok"


class CommitMetrics:
    """The transactions of one database thread."""

    __slots__ = ("failures", "items", "seconds")

    def __init__(self) -> None:
        self.seconds = Histogram([0] * (len(COMMIT_BOUNDS) + 1))
        """How long those that were committed took."""
        self.items = Histogram([0] * (len(BATCH_BOUNDS) + 1))
        """How many requests, outcomes or other items they had."""
        self.failures = 0
        """Transactions that failed."""

    def committed(self, seconds: float, items: int) -> None:
        """Count a transaction that was committed."""
        self.seconds.add(bisect_left(COMMIT_BOUNDS, seconds), seconds)
        self.items.add(bisect_left(BATCH_BOUNDS, items), items)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name, ready for JSON."""
        return {
            "seconds": _told(self.seconds, COMMIT_BOUNDS),
            "items": _told(self.items, BATCH_BOUNDS),
            "failures": self.failures,
        }


def _told(histogram: Histogram, bounds: Sequence[float]) -> dict[str, Any]:
    return {"bounds": list(bounds), "buckets": list(histogram.buckets), "sum": round(histogram.total, 6)}


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
