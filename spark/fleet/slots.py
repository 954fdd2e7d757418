"""A fleet's slots as a machine: which leases to start now, which slots to drain, how many there should be.

A *slot* is a core of the cluster on which the fleet serves.  A *lease* is one Spark job of one task, which serves in
the slot for a bounded time; then the slot gets the next one.  No Spark, no socket, no clock: the shell (`fleet.py`)
starts what `due` returns, tells with `report` and `ended` what became of it, and with `observe` how the service does.

States of a slot:

    starting ──▶ serving ──▶ starting …     a lease has been submitted; its task has reported
       ▲  └─────────┴──▶ waiting ──▶ …      the lease failed: the next begins after a pause
       └── and from each of them ──▶ draining: no further lease
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...mdp.errors import SettingError

BACKOFF: Final = (1.0, 32.0)
"""Seconds of the first and of the longest pause after failures; each is twice as long as the one before."""
QUICK: Final = 10.0
"""A lease that died within so many seconds was no good from the start; what lived longer was killed by something."""
JITTER: Final = 0.2
"""The part by which leases, and pauses, are longer or shorter by chance, so that slots do not change all at once."""


@dataclass(frozen=True)
class Load:
    """The service's row in the answer to `mmi.services`."""

    queued: int = 0
    """Requests that wait for a worker."""
    workers: int = 0
    idle: int = 0
    """Workers that can take another request: not the same as having none, as a worker with short handlers holds some
    requests ahead."""
    running: int = 0
    """Requests that workers hold."""
    dispatched: int = 0
    """Requests given to workers since the service came to be."""


@dataclass(frozen=True)
class Lease:
    """A lease to be started: the slot's number, its own (counted in the whole fleet), for how long in seconds."""

    slot: int
    number: int
    seconds: float


@dataclass(frozen=True)
class Served:
    """A lease ended as it should, after so many requests."""

    requests: int


@dataclass(frozen=True)
class Refused:
    """An executor cannot serve at all: says why."""

    reason: str


@dataclass(frozen=True)
class Died:
    """A lease's task was lost, with its Python process or its executor: says how."""

    reason: str


Outcome = Served | Refused | Died


@dataclass
class Slot:
    """A slot and its current lease."""

    number: int
    since: float
    """When it came into its state."""
    state: str = "starting"
    lease: int | None = None
    """Its lease's number; None if it has none now."""
    began: float = 0.0
    host: str | None = None
    pid: int | None = None
    executor: str | None = None
    served: int = 0
    """Requests served in the leases before this one."""
    serving: int = 0
    """Requests served in this lease."""
    retry_at: float = 0.0
    deaths: int = 0
    """Quick ones, one after the other."""
    refusals: int = 0
    """One after the other."""
    reported: bool = False
    """Whether the current lease has."""

    def become(self, state: str, now: float) -> None:
        """Change the state."""
        if self.state != state:
            self.state, self.since = state, now


@dataclass
class _Quiet:
    """A time in which fewer slots were needed than there are: since when, and the most that were."""

    since: float
    peak: int


@dataclass
class Slots:
    """The slots of one fleet.

    `minimum` and `maximum` bound their number.  `lease` (seconds) is how long one serves, more or less; `idle`
    (seconds) how long a slot must not have been needed before it is given back.
    """

    minimum: int
    maximum: int
    lease: float
    idle: float
    rng: random.Random = field(default_factory=random.Random)
    draining: bool = False
    failures: int = 0
    """Leases that were refused, or died."""
    last_error: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum or self.maximum < 1:
            raise SettingError(
                f"a fleet of {self.minimum} to {self.maximum} slots: it takes a minimum of 0 or more, "
                "and a maximum of at least 1 that is not below it"
            )
        self.wanted = self.minimum
        """Slots that there should be."""
        self._slots: dict[int, Slot] = {}
        self._leases = 0
        self._load: Load | None = None
        self._quiet: _Quiet | None = None

    # ── how many there should be ─────────────────────────────────────────────────────────────────────────────────────

    def observe(self, load: Load | None, now: float) -> None:
        """The broker tells how the service is doing; None: it does not answer, and all stays as it is."""
        before, self._load = self._load, load
        if load is None:
            self._quiet = None
            return
        if load.queued:
            self._quiet = None
            self._grow(load, lasting=before is not None and before.queued > 0)
            return
        needed = self._needed(load, before)
        if needed >= self.wanted:
            self._quiet = None
        elif self._quiet is None:
            self._quiet = _Quiet(now, needed)
        else:
            self._quiet.peak = max(self._quiet.peak, needed)
            if now >= self._quiet.since + self.idle:
                self.wanted = min(max(self._quiet.peak, self.minimum), self.maximum)
                self._quiet = None

    def _grow(self, load: Load, *, lasting: bool) -> None:
        """Requests wait.  More slots, if those that there are all serve: else help is on its way, or of no use."""
        serving = sum(slot.state == "serving" for slot in self._active())
        if self.wanted == 0 and load.workers == 0:
            self.wanted = min(1, self.maximum)  # somebody has to begin
        elif lasting and load.idle == 0 and serving == self.wanted:
            self.wanted = min(self.wanted + max(1, min(load.queued, self.wanted)), self.maximum)

    def _needed(self, load: Load, before: Load | None) -> int:
        """Slots that have something to do while nothing waits; workers elsewhere do their part."""
        elsewhere = max(0, load.workers - sum(slot.reported for slot in self._slots.values()))
        busy = min(load.workers, load.running) - elsewhere  # the broker gives each worker one before any gets two
        moved = before is not None and load.dispatched != before.dispatched and not elsewhere
        return max(busy, int(moved))

    def bound(self, maximum: int) -> None:
        """There are cores for `maximum` slots now."""
        self.maximum = max(1, self.minimum, maximum)
        self.wanted = min(self.wanted, self.maximum)

    # ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def due(self, now: float) -> list[Lease]:
        """The leases to start now."""
        self._adjust(now)
        return [self._begin(slot, now) for slot in self._active() if slot.lease is None and now >= slot.retry_at]

    def _adjust(self, now: float) -> None:
        """As many slots as are wanted."""
        wanted = 0 if self.draining else self.wanted
        active = self._active()
        surplus = max(0, len(active) - wanted)
        for slot in sorted(active, key=lambda slot: (slot.state == "serving", -slot.number))[:surplus]:
            if slot.lease is None:
                del self._slots[slot.number]
            else:
                slot.become("draining", now)
        number = 0
        for _ in range(wanted - len(active)):
            while number in self._slots:
                number += 1
            self._slots[number] = Slot(number, now)

    def _begin(self, slot: Slot, now: float) -> Lease:
        self._leases += 1
        slot.lease, slot.began, slot.serving, slot.reported = self._leases, now, 0, False
        slot.become("starting", now)
        return Lease(slot.number, self._leases, self.lease * self.rng.uniform(1 - JITTER, 1 + JITTER))

    def report(self, number: int, lease: int, told: Mapping[str, Any], now: float) -> bool:
        """A task says how it is doing; returns whether it is to drain."""
        slot = self._slots.get(number)
        if slot is None or slot.lease != lease:
            return True  # it was taken for lost, and another has its place
        slot.reported = True
        slot.host, slot.pid, slot.executor = told.get("host"), told.get("pid"), told.get("executor")
        served = told.get("served")
        slot.serving = served if isinstance(served, int) else slot.serving
        if slot.state == "starting":
            slot.become("serving", now)
        return self.draining or slot.state == "draining"

    def ended(self, lease: Lease, outcome: Outcome, now: float) -> bool:
        """A lease is over; returns whether its slot goes on.  What becomes of one that drains is no failure."""
        slot = self._slots[lease.slot]
        slot.lease, slot.reported = None, False
        slot.served += max(slot.serving, outcome.requests) if isinstance(outcome, Served) else slot.serving
        slot.serving, slot.pid = 0, None
        if slot.state == "draining" or self.draining:
            del self._slots[slot.number]
            return False
        pause = self._learn(slot, outcome, now)
        slot.retry_at = now + pause
        slot.become("waiting" if pause else "starting", now)
        return True

    def _learn(self, slot: Slot, outcome: Outcome, now: float) -> float:
        """Count, and return the pause before the next lease."""
        if isinstance(outcome, Served):
            slot.deaths = slot.refusals = 0
            return 0.0
        self.failures += 1
        self.last_error = outcome.reason
        if isinstance(outcome, Refused):
            slot.refusals += 1
            return self._pause(slot.refusals)
        slot.deaths = slot.deaths + 1 if now < slot.began + QUICK else 1
        return self._pause(slot.deaths - 1)  # the first time there is none

    def _pause(self, times: int) -> float:
        if not times:
            return 0.0
        first, longest = BACKOFF
        return min(first * 2.0 ** min(times - 1, 32), longest) * self.rng.uniform(1 - JITTER, 1)

    # ── looking at it ────────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """No further leases: a slot between two of them is over, the others when theirs are."""
        self.draining = True
        self._slots = {slot.number: slot for slot in self._slots.values() if slot.lease is not None}

    @property
    def finished(self) -> bool:
        """Whether all is over after `drain`."""
        return self.draining and not self._slots

    def deadline(self) -> float | None:
        """When `due` has something to return by itself; None if nothing is to come."""
        return min((slot.retry_at for slot in self._active() if slot.lease is None), default=None)

    def silent(self, now: float, seconds: float) -> list[Slot]:
        """Slots whose lease was submitted so long ago and has not reported."""
        return [s for s in self._slots.values() if s.lease is not None and not s.reported and now >= s.began + seconds]

    def unheard(self) -> list[Slot]:
        """Slots that are to drain, whose lease has not reported: perhaps it waits for a core."""
        return [s for s in self._slots.values() if s.lease is not None and not s.reported and self._drains(s)]

    def _drains(self, slot: Slot) -> bool:
        return self.draining or slot.state == "draining"

    def _active(self) -> Sequence[Slot]:
        return [slot for slot in self._slots.values() if slot.state != "draining"]

    def rows(self, now: float) -> list[dict[str, Any]]:
        """The slots for people; `for` is the time in this state, in seconds."""
        return [
            {
                "slot": slot.number,
                "state": "draining" if self._drains(slot) else slot.state,
                "host": slot.host,
                "pid": slot.pid,
                "executor": slot.executor,
                "served": slot.served + slot.serving,
                "for": now - slot.since,
            }
            for slot in sorted(self._slots.values(), key=lambda slot: slot.number)
        ]
