"""The requests of a service between claim and outcome: which the broker gets next, and how many."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..db import store
from .attempt import Attempt

PREFETCH_FACTOR: Final = 2
"""Requests sent to the broker per unit of a service's credit, so that the next is available when one ends."""
CLAIM_AHEAD_SECONDS: Final = 0.05
"""Seconds of further requests to claim ahead, at the rate at which the service completes them."""
MAX_CLAIMED: Final = 2000
"""Maximum number of requests claimed for one service."""


class Capacity(NamedTuple):
    """What a service can take at a time."""

    credit: int = 0
    """How many requests its workers take, or its limits let start soon."""
    per_group: int | None = None
    """The same for each group; None without limits of groups."""


NO_CAPACITY: Final = Capacity()


class Lane:
    """The requests of one service that are claimed or being executed.  It decides; the dispatcher asks."""

    __slots__ = (
        "ahead", "arrived", "buffer", "capacity", "claiming", "ended", "grouped", "groups", "held", "in_flight",
        "last_group", "pending", "service",
    )  # fmt: skip

    def __init__(self, service: str, capacity: Capacity) -> None:
        self.service = service
        self.capacity = capacity
        self.pending = False
        """Whether there may be requests to claim."""
        self.grouped = False
        """Whether some of them may have a group."""
        self.last_group = ""
        """The group that had the last turn."""
        self.groups: dict[str, int] = {}
        """How many requests of each group are held."""
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

    def look(self, *, grouped: bool) -> None:
        """Note that the database has requests for the service; `grouped`, if some have a group."""
        self.pending = self.arrived = True
        self.grouped |= grouped

    def begin_claim(self) -> int:
        """Return how many requests to claim now; if there are any, `end_claim` must follow."""
        if not self.pending or not self.capacity.credit or self.claiming:
            return 0
        if self.held * 4 > self.room * 3:  # claiming several costs little more than claiming one
            return 0
        self.claiming = True
        self.arrived = False
        return self.room - self.held

    def turns(self) -> store.Turns | None:
        """Return what a claim needs if groups take turns."""
        room = self.group_room
        if not self.grouped and room is None:
            return None
        return store.Turns(self.last_group, self.groups.copy(), room)

    def end_claim(self, claim: store.Claim, found: Sequence[store.Claimed]) -> None:
        """End a claim that has found these requests."""
        self.claiming = False
        if found:
            self.last_group = found[-1].group_name
        # With turns, a claim that leaves room may have left requests of a group that had its share.
        exhausted = len(found) < claim.limit if claim.turns is None else not found
        if exhausted and not self.arrived:
            self.pending = self.grouped = False

    # ── requests that are claimed ────────────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        """How many requests may be claimed in all."""
        return min(self.capacity.credit * PREFETCH_FACTOR + self.ahead, MAX_CLAIMED)

    @property
    def group_room(self) -> int | None:
        """How many requests of a group may be claimed; None for any number."""
        per_group = self.capacity.per_group
        return None if per_group is None else per_group * PREFETCH_FACTOR

    def add(self, attempt: Attempt) -> None:
        """Add a request that was claimed."""
        self.buffer.append(attempt)
        self.held += 1
        group = attempt.claimed.group_name
        self.groups[group] = self.groups.get(group, 0) + 1

    def next(self) -> Attempt | None:
        """Return the next request to send to the broker; None if there is none, or its workers have enough."""
        if not self.buffer or self.in_flight >= self.capacity.credit * PREFETCH_FACTOR:
            return None
        self.in_flight += 1
        return self.buffer.popleft()

    def drop(self, attempt: Attempt) -> None:
        """Remove a request that was not sent."""
        self.buffer.remove(attempt)
        self._leave(attempt)

    def executed(self, attempt: Attempt) -> None:
        """Record that the service has finished a request."""
        self.in_flight -= 1
        self.ended += 1
        self._leave(attempt)

    def _leave(self, attempt: Attempt) -> None:
        self.held -= 1
        group, room = attempt.claimed.group_name, self.group_room
        left = self.groups.pop(group) - 1
        if left:
            self.groups[group] = left
        if room is not None and left == room // 2:  # the group was full, perhaps, and may have requests that wait
            self.pending = True

    def observe(self, seconds: float) -> None:
        """Adapt to the rate at which the service completed requests in the last `seconds`."""
        self.ahead = max(int(self.ended / seconds * CLAIM_AHEAD_SECONDS), self.ahead // 2)
        self.ended = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for the service."""
        return not ((self.pending and self.capacity.credit) or self.claiming or self.held)
