"""Keeps track of the callers that wait for requests to change, and wakes them.

They are woken by what this Titanic stores, and by `watch` when another Titanic or an operator has changed a request.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from uuid import UUID

from . import store
from .batches import BatchExecutor, StoreError

MIN_WATCH_SECONDS: Final = 0.02
MAX_WATCH_SECONDS: Final = 0.5
"""The shortest and the longest pause between two looks for changes by other Titanics or an operator."""
WATCH_PAUSE_FACTOR: Final = 20
"""How many times as long as the last look the pause is: so looking takes at most a twentieth of the time."""
MAX_WATCHED: Final = 10_000
"""Requests in one query for such changes: databases limit the parameters of a statement."""
MAX_CALLERS: Final = 1000
"""Maximum number of callers that wait for replies.  Beyond it, those that have waited longest are dismissed."""


class Waiter:
    """A caller that waits until its request may have changed."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()
        self.dismissed = False
        """Whether to answer it with the current state."""

    def wake(self, uuid: UUID, outcome: store.Outcome | None = None) -> None:
        """Note that the request may have changed, or has ended with this outcome."""
        del uuid, outcome  # it looks itself
        self._happened.set()

    def dismiss(self) -> None:
        """Let it wait no longer."""
        self.dismissed = True
        self._happened.set()

    async def change(self) -> None:
        """Wait until the request may have changed since the last call."""
        await self._happened.wait()
        self._happened.clear()


class RowsWaiter(Waiter):
    """A caller that waits until the requests of its rows have ended."""

    def __init__(self) -> None:
        super().__init__()
        self._changed: dict[UUID, store.Outcome | None] = {}

    def wake(self, uuid: UUID, outcome: store.Outcome | None = None) -> None:
        """Note that the request with this UUID may have changed, or has ended with this outcome."""
        if outcome is not None or uuid not in self._changed:
            self._changed[uuid] = outcome
        super().wake(uuid, outcome)

    async def changes(self) -> dict[UUID, store.Outcome | None]:
        """Wait until requests may have changed, and return them with the outcomes that are known."""
        await self.change()
        changed, self._changed = self._changed, {}
        return changed


class Callers:
    """The callers that wait, by the UUIDs of their requests.

    Args:
        reader: Executes statements that read.
    """

    def __init__(self, reader: BatchExecutor) -> None:
        self._reader = reader
        self._waiting: defaultdict[UUID, set[Waiter]] = defaultdict(set)
        self._replies: dict[Waiter, None] = {}
        """The callers that wait for a reply, the longest-waiting first."""
        self._anyone = asyncio.Event()
        """Set while somebody waits."""
        self.ending = False
        """Whether `end` was called: nobody may wait any longer."""

    @contextmanager
    def waiting_for_reply(self, uuid: UUID) -> Iterator[Waiter]:
        """Wake the waiter that is yielded whenever the request may have changed."""
        if len(self._replies) >= MAX_CALLERS:
            oldest = next(iter(self._replies))
            del self._replies[oldest]
            oldest.dismiss()
        waiter = Waiter()
        self._replies[waiter] = None
        self._watch(uuid, waiter)
        try:
            yield waiter
        finally:
            self._replies.pop(waiter, None)
            self._forget(uuid, waiter)

    @contextmanager
    def waiting_for_rows(self) -> Iterator[tuple[RowsWaiter, Callable[[UUID], None]]]:
        """Yield a waiter, and a function that has it woken when a request may have ended."""
        waiter, watched = RowsWaiter(), set[UUID]()

        def watch(uuid: UUID) -> None:
            watched.add(uuid)
            self._watch(uuid, waiter)

        try:
            yield waiter, watch
        finally:
            for uuid in watched:
                self._forget(uuid, waiter)

    def _watch(self, uuid: UUID, waiter: Waiter) -> None:
        self._waiting[uuid].add(waiter)
        self._anyone.set()

    def _forget(self, uuid: UUID, waiter: Waiter) -> None:
        waiting = self._waiting[uuid]
        waiting.discard(waiter)
        if not waiting:
            del self._waiting[uuid]
            if not self._waiting:
                self._anyone.clear()

    def changed(self, uuid: UUID, outcome: store.Outcome | None = None) -> None:
        """Wake the callers that wait for this request.  `outcome` is how it has ended, if that is known."""
        for each in self._waiting.get(uuid, ()):
            each.wake(uuid, outcome)

    def _moved(self, uuid: UUID) -> None:
        """Wake the callers that wait for more than the end of this request."""
        for each in self._waiting.get(uuid, ()):
            if not isinstance(each, RowsWaiter):
                each.wake(uuid)

    def is_row(self, uuid: UUID) -> bool:
        """Return whether a caller waits for the request that has submitted it as a row."""
        return any(isinstance(each, RowsWaiter) for each in self._waiting.get(uuid, ()))

    async def watch(self) -> None:
        """Wake callers whose requests another program has changed.  Runs until cancelled."""
        before: dict[UUID, store.Progress] = {}
        known: set[UUID] = set()
        pause = MIN_WATCH_SECONDS
        while True:
            await self._anyone.wait()
            await asyncio.sleep(pause)
            began = time.monotonic()
            # Only those that were there the last time: this Titanic has executed most rows before they are looked up.
            waiting = [uuid for uuid in self._waiting if uuid in known]
            known = set(self._waiting)
            now: dict[UUID, store.Progress] = {}
            with suppress(StoreError):  # the callers get the error when they query the database themselves
                for first in range(0, len(waiting), MAX_WATCHED):
                    now |= await self._reader.submit(store.progress, frozenset(waiting[first : first + MAX_WATCHED]))
                for uuid in waiting:
                    found = now.get(uuid)
                    if found is None or found.ended:
                        self.changed(uuid)
                    elif found != before.get(uuid):
                        self._moved(uuid)
                before = now
            pause = watch_pause(time.monotonic() - began)

    def end(self) -> None:
        """Wake all callers, to be answered with what there is now."""
        self.ending = True
        for uuid in list(self._waiting):
            self.changed(uuid)


def watch_pause(seconds: float) -> float:
    """Return how long to wait after a look that took so many `seconds`."""
    return max(MIN_WATCH_SECONDS, min(WATCH_PAUSE_FACTOR * seconds, MAX_WATCH_SECONDS))
