"""Keeps track of the callers that wait for requests to change, and wakes them.

They are woken by what this Titanic stores, and by `watch` when another Titanic or an operator has changed a request.
"""

import asyncio
import time
from collections import defaultdict
from contextlib import suppress
from typing import Final, Self
from uuid import UUID

from ..db import store
from ..db.group_commit import BatchExecutor, StoreError

MIN_WATCH_SECONDS: Final = 0.02
MAX_WATCH_SECONDS: Final = 0.5
"""The shortest and the longest pause between two looks for changes by other Titanics or an operator."""
WATCH_PAUSE_FACTOR: Final = 20
"""How many times as long as the last look the pause is: so looking takes at most a twentieth of the time."""
MAX_WATCHED: Final = 10_000
"""Requests in one query for such changes: databases limit the parameters of a statement."""
MAX_CALLERS: Final = 2000
"""Maximum number of callers of each service that wait.  Beyond it, those that have waited longest are dismissed."""
NIL: Final = UUID(int=0)
MIN_WAIT_SECONDS: Final = 1.0
"""How long a caller may wait even then: dismissed callers usually come back at once."""


class Waiter:
    """A caller that waits until its request may have changed.

    Args:
        callers: Where it waits.
        group: The callers of the same service.
        seconds: How long it may wait; None for as long as it likes.
        partials: Whether it waits for PARTIALs, too.
    """

    __slots__ = (
        "_callers", "_group", "_happened", "_seconds", "_timer", "dismissed", "outcome", "partials", "since", "uuid",
    )  # fmt: skip

    def __init__(
        self, callers: "Callers", group: "dict[Waiter, None]", seconds: float | None, *, partials: bool = False
    ) -> None:
        self._callers = callers
        self._group = group
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._happened = asyncio.Event()
        self.partials = partials
        self.uuid = NIL
        """The UUID of its request, once that is stored."""
        self.outcome: store.Outcome | None = None
        """How its request has ended, if that is known."""
        self.dismissed = False
        """Whether to answer it with the current state."""
        self.since = 0.0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self._callers.enter(self, self._group)
        if self._seconds is not None:
            self._timer = loop.call_at(self.since + self._seconds, self.dismiss)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._group.pop(self, None)
        if self.uuid is not NIL:
            self._callers.forget(self.uuid, self)

    def watch(self, uuid: UUID, *, new: bool = False) -> None:
        """Have it woken when the request with this UUID may have changed: at once unless the request is `new`."""
        self.uuid = uuid
        self._callers.watch_for(uuid, self)
        if not new:
            self._happened.set()

    def wake(self, outcome: store.Outcome | None = None) -> None:
        """Note that its request may have changed, or has ended with this outcome."""
        if outcome is not None:
            self.outcome = outcome
        self._happened.set()

    def dismiss(self) -> None:
        """Let it wait no longer."""
        self.dismissed = True
        self._happened.set()

    async def change(self) -> None:
        """Wait until the request may have changed since the last call."""
        await self._happened.wait()
        self._happened.clear()


class Callers:
    """The callers that wait, by the UUIDs of their requests.

    Args:
        reader: Executes statements that read.
    """

    def __init__(self, reader: BatchExecutor) -> None:
        self._reader = reader
        self._waiting: defaultdict[UUID, set[Waiter]] = defaultdict(set)
        self._submitting: dict[Waiter, None] = {}
        """The callers of `titanic.request` that wait for a reply, the longest-waiting first."""
        self._fetching: dict[Waiter, None] = {}
        """Those of `titanic.reply`."""
        self._anyone = asyncio.Event()
        """Set while somebody waits."""
        self._ending = False

    def submitting(self, seconds: float | None) -> Waiter:
        """Return the waiter of a caller of `titanic.request`, which may wait for so long."""
        return Waiter(self, self._submitting, seconds)

    def fetching(self, *, partials: bool) -> Waiter:
        """Return the waiter of a caller of `titanic.reply`."""
        return Waiter(self, self._fetching, None, partials=partials)

    def enter(self, waiter: Waiter, group: dict[Waiter, None]) -> None:
        """Count a waiter among others, of which one is dismissed if there are too many."""
        if self._ending:
            waiter.dismiss()
        if len(group) >= MAX_CALLERS:
            oldest = next(iter(group))
            del group[oldest]
            asyncio.get_running_loop().call_at(oldest.since + MIN_WAIT_SECONDS, oldest.dismiss)
        group[waiter] = None

    def watch_for(self, uuid: UUID, waiter: Waiter) -> None:
        """Have a waiter woken when the request with this UUID may have changed."""
        self._waiting[uuid].add(waiter)
        self._anyone.set()

    def forget(self, uuid: UUID, waiter: Waiter) -> None:
        """Undo `watch_for`."""
        waiting = self._waiting[uuid]
        waiting.discard(waiter)
        if not waiting:
            del self._waiting[uuid]
            if not self._waiting:
                self._anyone.clear()

    def ended(self, uuid: UUID, outcome: store.Outcome | None = None) -> None:
        """Wake the callers that wait for this request, which has ended or was closed; `outcome`, if it is known."""
        for each in self._waiting.get(uuid, ()):
            each.wake(outcome)

    def progressed(self, uuid: UUID) -> None:
        """Wake the callers that wait for more than the end of this request."""
        for each in self._waiting.get(uuid, ()):
            if each.partials:
                each.wake()

    async def watch(self) -> None:
        """Wake callers whose requests another program has changed.  Runs until cancelled."""
        before: dict[UUID, store.Progress] = {}
        known: set[UUID] = set()
        pause = MIN_WATCH_SECONDS
        while True:
            await self._anyone.wait()
            await asyncio.sleep(pause)
            began = time.monotonic()
            # Only those that were there the last time: most have ended before they are looked up.
            waiting = [uuid for uuid in self._waiting if uuid in known]
            known = set(self._waiting)
            now: dict[UUID, store.Progress] = {}
            with suppress(StoreError):  # the callers get the error when they query the database themselves
                for first in range(0, len(waiting), MAX_WATCHED):
                    now |= await self._reader.submit(store.progress, frozenset(waiting[first : first + MAX_WATCHED]))
                for uuid in waiting:
                    found = now.get(uuid)
                    if found is None or found.ended:
                        self.ended(uuid)
                    elif found != before.get(uuid):
                        self.progressed(uuid)
                before = now
            pause = watch_pause(time.monotonic() - began)

    def end(self) -> None:
        """Dismiss all callers, also those that come from now on."""
        self._ending = True
        for each in [*self._submitting, *self._fetching]:
            each.dismiss()


def watch_pause(seconds: float) -> float:
    """Return how long to wait after a look that took so many `seconds`."""
    return max(MIN_WATCH_SECONDS, min(WATCH_PAUSE_FACTOR * seconds, MAX_WATCH_SECONDS))
