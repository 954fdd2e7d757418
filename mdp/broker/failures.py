"""The requests that failed last, with the text of their error (`mmi.failures`)."""

from collections import deque
from typing import Any, Final

MAX_FAILURES: Final = 50
"""Maximum number of failed requests that are remembered."""
MAX_AT_ONCE: Final = 10
"""Maximum number of failures of one turn that are remembered: a million requests may fail together."""
MAX_TEXT: Final = 200
"""Characters of a text that are remembered."""


class Failures:
    """The latest failures, the newest first."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MAX_FAILURES)
        self._turn_at = 0.0
        self._taken = 0
        """Number of requests that failed in the turn at `_turn_at`."""

    def take(self, now: float) -> bool:
        """Return whether to remember one more request that has failed now."""
        if now != self._turn_at:
            self._turn_at, self._taken = now, 0
        self._taken += 1
        return self._taken <= MAX_AT_ONCE

    def add(self, row: dict[str, Any], text: str, now: float) -> None:
        """Remember a request that has failed."""
        self._rows.appendleft((now, {**row, "text": text[:MAX_TEXT]}))

    def answer(self, service: str, now: float) -> dict[str, Any]:
        """Return those of a service, or all if the name is empty."""
        return {
            "failures": [
                {**row, "ago_seconds": round(now - at, 3)}
                for at, row in self._rows
                if not service or row["service"] == service
            ]
        }
