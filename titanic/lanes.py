"""The requests of a service between claim and outcome: which the broker gets next, and how many of them together.

Requests that callers submitted as rows are sent as packs (docs/reference/rows.md), as long as these are answered
quickly.  Only the first attempt is made in a pack: if the pack fails as a whole, each of its requests is sent by itself
from then on, so that one request does not use up the attempts of the others.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, Final, NamedTuple

from ..clients.rows import PackSize
from ..clients.rows.packs import MAX_PACKED_BYTES
from . import store
from .frames import LENGTH

PREFETCH_FACTOR: Final = 2
"""Requests sent to the broker per unit of a service's credit, so that the next is available when one ends."""
CLAIM_AHEAD_SECONDS: Final = 0.05
"""Seconds of further requests to claim ahead, at the rate at which the service completes them."""
MAX_CLAIMED: Final = 2000
"""Maximum number of requests claimed for one service."""
MIN_PACKS: Final = 4
"""Rows are divided among this many packs at least, so that several workers get some."""
TARGET_SECONDS: Final = 0.1
"""How long a pack should take if its worker does not say how long it has worked."""


class Running:
    """A request that this Titanic has claimed, until its outcome is stored."""

    __slots__ = ("claimed", "lane", "row", "sent")

    def __init__(self, claimed: store.Claimed, lane: "Lane", *, row: bool) -> None:
        self.claimed = claimed
        self.lane = lane
        self.row = row and claimed.attempt == 1 and _is_single_frame(claimed.body)
        """Whether it may be sent as a row of a pack."""
        self.sent: Sent | None = None
        """What it was sent to the broker in."""

    def join(self, sent: "Sent") -> None:
        """Record what it is sent in."""
        self.sent = sent


class Sent:
    """A request to the broker, in which one or more requests are executed."""

    __slots__ = ("abandoned", "answered", "lane", "members", "task")

    def __init__(self, members: list[Running]) -> None:
        self.members = members
        self.lane = members[0].lane
        self.task: asyncio.Task[None] | None = None
        self.answered = False
        """Whether the outcomes are known; they are then being stored."""
        self.abandoned: set[int] = set()
        """The ids of requests that were given up: they belong to another Titanic now, or were closed."""

    def start(self, work: Coroutine[Any, Any, None], context: Context) -> asyncio.Task[None]:
        """Begin to execute the requests, in a task of its own."""
        self.task = asyncio.get_running_loop().create_task(work, context=context)
        return self.task

    def executed(self) -> None:
        """Record that the service has finished."""
        self.answered = True
        self.lane.executed(self)

    def abandon(self, running: Running) -> None:
        """Give up a request.  Cancels the task once it works for none."""
        self.abandoned.add(running.claimed.id)
        if len(self.abandoned) == len(self.members) and self.task is not None:
            self.task.cancel()


class Turn(NamedTuple):
    """The turn of one caller's rows, which wait for it, not stored yet."""

    rows: int
    given: "asyncio.Future[None]"
    """Done once the rows may be stored and run."""


class Lane:
    """The requests of one service that are claimed or being executed."""

    __slots__ = (
        "ahead", "arrived", "buffer", "claiming", "credit", "ended", "held", "in_flight", "packed", "packs", "pending",
        "service", "size", "turns",
    )  # fmt: skip

    def __init__(self, service: str, credit: int, size: PackSize) -> None:
        self.service = service
        self.credit = credit
        """How many requests all workers of the service take at a time."""
        self.size = size
        self.pending = False
        """Whether there may be requests to claim."""
        self.claiming = False
        self.arrived = False
        """Whether a request was stored since the last claim began."""
        self.turns: deque[Turn] = deque()
        """Of rows that are to be stored once there is room for them."""
        self.buffer: deque[Running] = deque()
        """Requests that are claimed but not yet sent to the broker."""
        self.held = 0
        """Requests that are claimed, or being accepted to run at once, and have no outcome yet."""
        self.in_flight = 0
        """Requests at the broker; a pack is one."""
        self.packs = 0
        """Those of them that carry rows."""
        self.packed = 1
        """How many requests the latest of them had as rows."""
        self.ended = 0
        """Requests that have ended since the last maintenance."""
        self.ahead = 0
        """How many requests to claim beyond those that are sent to the broker."""

    def offer(self, credit: int) -> None:
        """Set how many requests all workers of the service take at a time."""
        self.credit = credit

    # ── what there is to claim ───────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Note that the database has requests for the service."""
        self.pending = True

    def arrive(self) -> None:
        """Note that a request for the service was stored."""
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

    # ── turns of rows that are not stored yet ────────────────────────────────────────────────────────────────────────

    def give_turns(self) -> None:
        """Let rows run that are not stored yet, if there is room, and no stored request is waiting for it."""
        while self.turns and self.credit and not self.pending and not self.claiming and self.held < self.room:
            turn = self.turns.popleft()
            turn.given.set_result(None)
            self.held += turn.rows

    def release(self, rows: int) -> None:
        """Free the room of rows that had their turn: they are claimed now, or their caller has gone away."""
        self.held -= rows

    # ── requests that are claimed ────────────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        """How many requests may be claimed in all."""
        return min(self.credit * PREFETCH_FACTOR * self.packed + self.ahead, MAX_CLAIMED)

    def is_free(self, *, patient: bool = True) -> bool:
        """Return whether the broker may get the next request.

        If `patient`, a pack that is not full waits for further rows while enough packs are being executed.
        """
        if self.in_flight >= self.credit * PREFETCH_FACTOR:
            return False
        return not patient or not self.buffer[0].row or self.size.now(len(self.buffer), self.packs) > 0

    def add(self, claimed: store.Claimed, *, row: bool) -> Running:
        """Add a request that was claimed; `row`, if it was submitted as a row."""
        running = Running(claimed, self, row=row)
        self.buffer.append(running)
        self.held += 1
        return running

    def take(self) -> Sent:
        """Return the next request to the broker: the first one in the buffer, or a pack that begins with it."""
        waiting = len(self.buffer)
        first = self.buffer.popleft()
        members = [first]
        if first.row:
            most, size = self.size.now(waiting, self.packs) or waiting, len(first.claimed.body)
            while self.buffer and len(members) < most and _goes_with(first, following := self.buffer[0]):
                size += len(following.claimed.body)
                if size > MAX_PACKED_BYTES:
                    break
                members.append(self.buffer.popleft())
        self.packed = self.size.rows if first.row else 1
        self.in_flight += 1
        self.packs += first.row
        sent = Sent(members)
        for each in members:
            each.join(sent)
        return sent

    def drop(self, running: Running) -> bool:
        """Remove a request that was not sent.  Return whether it was there."""
        try:
            self.buffer.remove(running)
        except ValueError:
            return False
        self.held -= 1
        return True

    def executed(self, sent: Sent) -> None:
        """Record that the service has finished a request."""
        self.in_flight -= 1
        self.packs -= sent.members[0].row
        self.held -= len(sent.members)
        self.ended += len(sent.members)

    def observe(self, seconds: float) -> None:
        """Adapt to the rate at which the service completed requests in the last `seconds`."""
        self.ahead = max(int(self.ended / seconds * CLAIM_AHEAD_SECONDS), self.ahead // 2)
        self.ended = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for the service."""
        return not ((self.pending and self.credit) or self.claiming or self.held or self.turns)


def pack_size() -> PackSize:
    """Return the size of packs for a service that was not called yet."""
    return PackSize(target=TARGET_SECONDS, min_packs=MIN_PACKS)


def _goes_with(first: Running, other: Running) -> bool:
    """Return whether two requests can be rows of the same pack, which has one owner and one set of headers."""
    return other.row and other.claimed.owner == first.claimed.owner and other.claimed.headers == first.claimed.headers


def _is_single_frame(body: bytes) -> bool:
    return int.from_bytes(body[:LENGTH], "big") + LENGTH == len(body)
