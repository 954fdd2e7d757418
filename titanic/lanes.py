"""The requests of a service between claim and outcome: which the broker gets next, and how many."""

from collections import deque
from typing import Final

from .attempts import Attempt

PREFETCH_FACTOR: Final = 2
"""Requests sent to the broker per unit of a service's credit, so that the next is available when one ends."""
CLAIM_AHEAD_SECONDS: Final = 0.05
"""Seconds of further requests to claim ahead, at the rate at which the service completes them."""
MAX_CLAIMED: Final = 2000
"""Maximum number of requests claimed for one service."""


class Lane:
    """The requests of one service that are claimed or being executed.  It decides; the dispatcher asks."""

    __slots__ = ("ahead", "arrived", "buffer", "claiming", "credit", "ended", "held", "in_flight", "pending", "service")

    def __init__(self, service: str, credit: int) -> None:
        self.service = service
        self.credit = credit
        """How many requests all workers of the service take at a time."""
        self.pending = False
        """Whether there may be requests to claim."""
        self.claiming = False
        self.arrived = False
        """Whether the database was said to have requests since the last claim began."""
        self.buffer: deque[Attempt] = deque()
        """Requests that are claimed but not yet sent to the broker."""
        self.held = 0
        """Requests that are claimed and have no outcome yet."""
        self.in_flight = 0
        """Requests at the broker."""
        self.ended = 0
        """Requests that have ended since the last maintenance."""
        self.ahead = 0
        """How many requests to claim beyond those that are sent to the broker."""

    # ── what there is to claim ───────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Note that the database has requests for the service."""
        self.pending = self.arrived = True

    def begin_claim(self) -> int:
        """Return how many requests to claim now; if there are any, `end_claim` must follow."""
        if not self.pending or not self.credit or self.claiming:
            return 0
        if self.held * 4 > self.room * 3:  # claiming several costs little more than claiming one
            return 0
        self.claiming = True
        self.arrived = False
        return self.room - self.held

    def end_claim(self, *, exhausted: bool) -> None:
        """End a claim; `exhausted`, if it has found fewer requests than were wanted."""
        self.claiming = False
        if exhausted and not self.arrived:
            self.pending = False

    # ── requests that are claimed ────────────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        """How many requests may be claimed in all."""
        return min(self.credit * PREFETCH_FACTOR + self.ahead, MAX_CLAIMED)

    def add(self, attempt: Attempt) -> None:
        """Add a request that was claimed."""
        self.buffer.append(attempt)
        self.held += 1

    def next(self) -> Attempt | None:
        """Return the next request to send to the broker; None if there is none, or its workers have enough."""
        if not self.buffer or self.in_flight >= self.credit * PREFETCH_FACTOR:
            return None
        self.in_flight += 1
        return self.buffer.popleft()

    def drop(self, attempt: Attempt) -> None:
        """Remove a request that was not sent."""
        self.buffer.remove(attempt)
        self.held -= 1

    def executed(self) -> None:
        """Record that the service has finished a request."""
        self.in_flight -= 1
        self.held -= 1
        self.ended += 1

    def observe(self, seconds: float) -> None:
        """Adapt to the rate at which the service completed requests in the last `seconds`."""
        self.ahead = max(int(self.ended / seconds * CLAIM_AHEAD_SECONDS), self.ahead // 2)
        self.ended = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for the service."""
        return not ((self.pending and self.credit) or self.claiming or self.held)
