"""Sans-I/O state of a fleet's workers: how many there should be, which to start, which to stop.

A *slot* is the place of one worker: a core of a Spark cluster.  A *lease* is a worker's time in its slot; when it has
ended, the slot gets the next one.  The driver starts the leases that `due` returns, passes on what happens with
`report` and `ended`, and passes the service's load to `observe`.

States of a slot:

    starting ──▶ serving ──▶ starting …     a lease was started; its worker serves; the lease has ended
       ▲  └─────────┴──▶ waiting ──▶ …      the lease failed: the next one starts after a pause
       └── and from each of them ──▶ draining: no further lease
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...mdp.backoff import EARLY_DEATH_SECONDS, RESTART_JITTER, restart_pause


@dataclass(frozen=True)
class Load:
    """The service's row in the answer to `mmi.services`."""

    queued: int = 0
    """Requests waiting for a worker."""
    workers: int = 0
    idle: int = 0
    """Workers that can take another request.  Such a worker may hold requests, as prefetching workers do."""
    running: int = 0
    """Requests held by workers, except those of other brokers."""
    dispatched: int = 0
    """Requests dispatched since the service was created."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Load":
        """Return the load that the broker reports.  Raises `ValueError` or `TypeError` if it is malformed."""
        queued, workers, idle, running, dispatched, remote = (
            int(row.get(name, 0)) for name in ("queued", "workers", "idle", "running", "dispatched", "remote_running")
        )
        return cls(queued, workers, idle, max(0, running - remote), dispatched)


@dataclass(frozen=True)
class Lease:
    """A lease to start: its slot, its number (counted over all slots) and its length in seconds."""

    slot: int
    number: int
    seconds: float


@dataclass(frozen=True)
class Served:
    """A lease ended as planned after serving `requests`."""

    requests: int
    unreachable: str | None = None
    """Why the worker never reached the driver, or None."""


@dataclass(frozen=True)
class Refused:
    """The worker cannot serve at all; `reason` says why."""

    reason: str


@dataclass(frozen=True)
class Died:
    """The worker's process, or its executor, was lost; `reason` says how."""

    reason: str


LeaseEnd = Served | Refused | Died


@dataclass
class Slot:
    """A slot and its current lease."""

    number: int
    since: float
    """When the slot entered its state."""
    state: str = "starting"
    lease: int | None = None
    """The number of its lease, or None between leases."""
    began: float = 0.0
    host: str | None = None
    pid: int | None = None
    executor: str | None = None
    served: int = 0
    """Requests served in earlier leases."""
    serving: int = 0
    """Requests served in this lease."""
    retry_at: float = 0.0
    deaths: int = 0
    """Consecutive early deaths."""
    refusals: int = 0
    """Consecutive refusals."""
    reported: bool = False
    """Whether the current lease has reported."""

    def become(self, state: str, now: float) -> None:
        """Change the state."""
        if self.state != state:
            self.state, self.since = state, now


@dataclass
class _Slack:
    """A period in which fewer slots are needed than there are: when it began, and the most that were needed since."""

    since: float
    peak: int


@dataclass
class Slots:
    """The slots of one service.

    Args:
        minimum, maximum: bounds on the number of slots; the maximum is at least 1.
        lease: length of a lease in seconds, varied by `RESTART_JITTER`, so that slots do not all change at once.
        idle: seconds for which a slot must not have been needed before it is released.
    """

    minimum: int
    maximum: int
    lease: float
    idle: float
    rng: random.Random = field(default_factory=random.Random)
    draining: bool = False
    concurrency: int = 1
    """Requests that a slot handles at once, as its worker reports."""
    failures: int = 0
    """Leases that were refused or died."""
    last_error: str | None = None

    def __post_init__(self) -> None:
        self.wanted = self.minimum
        """The number of slots that there should be."""
        self._slots: dict[int, Slot] = {}
        self._leases = 0
        self.load: Load | None = None
        """The load that the broker reported last, or None if it did not answer."""
        self._slack: _Slack | None = None

    # ── scaling ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def observe(self, load: Load | None, now: float) -> None:
        """Adjust `wanted` to the load that the broker reports, or leave it if the broker did not answer (None)."""
        before, self.load = self.load, load
        if load is None:
            self._slack = None
            return
        if load.queued:
            self._slack = None
            self._grow(load, lasting=before is not None and before.queued > 0)
            return
        needed = self._needed(load, before)
        if needed >= self.wanted:
            self._slack = None
        elif self._slack is None:
            self._slack = _Slack(now, needed)
        else:
            self._slack.peak = max(self._slack.peak, needed)
            if now >= self._slack.since + self.idle:
                self.wanted = min(max(self._slack.peak, self.minimum), self.maximum)
                self._slack = None

    def _grow(self, load: Load, *, lasting: bool) -> None:
        """Add slots, but only if all existing ones serve: otherwise more are on their way, or cannot start."""
        if self.wanted == 0 and load.workers == 0:
            self.wanted = min(1, self.maximum)  # scale up from zero
        elif lasting and load.idle == 0 and self.serving == self.wanted:
            self.wanted = min(self.wanted + max(1, min(load.queued, self.wanted)), self.maximum)

    def _needed(self, load: Load, before: Load | None) -> int:
        """Return how many slots have work when no request is queued, ignoring other workers of the service."""
        elsewhere = max(0, load.workers - sum(slot.reported for slot in self._slots.values()))
        # The broker gives each worker one request before any gets two.
        busy = min(load.workers - elsewhere, math.ceil((load.running - elsewhere) / self.concurrency))
        moved = before is not None and load.dispatched != before.dispatched and not elsewhere
        return max(busy, int(moved))

    def bound(self, maximum: int) -> None:
        """Set the maximum to the number of slots for which there are cores now."""
        self.maximum = max(1, self.minimum, maximum)
        self.wanted = min(self.wanted, self.maximum)

    # ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def due(self, now: float) -> list[Lease]:
        """Return the leases to start now."""
        self._adjust(now)
        return [self._begin(slot, now) for slot in self._active() if slot.lease is None and now >= slot.retry_at]

    def _adjust(self, now: float) -> None:
        """Add slots or drain surplus ones until there are as many as wanted."""
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
        return Lease(slot.number, self._leases, self.lease * self.rng.uniform(1 - RESTART_JITTER, 1 + RESTART_JITTER))

    def report(self, number: int, lease: int, report: Mapping[str, Any], now: float) -> bool:
        """Record a worker's report.  Return whether the worker should drain.

        The slot serves once a report says `registered`: the first report may overtake the worker's READY.
        """
        slot = self._slots.get(number)
        if slot is None or slot.lease != lease:
            return True  # this lease counts as lost: the slot has another
        slot.reported = True
        slot.host, slot.pid, slot.executor = report.get("host"), report.get("pid"), report.get("executor")
        served, concurrency = report.get("served"), report.get("concurrency")
        slot.serving = served if isinstance(served, int) else slot.serving
        self.concurrency = concurrency if isinstance(concurrency, int) and concurrency > 0 else self.concurrency
        if slot.state == "starting" and report.get("registered"):
            slot.become("serving", now)
        return self.draining or slot.state == "draining"

    def ended(self, lease: Lease, outcome: LeaseEnd, now: float) -> bool:
        """Record the end of a lease.  Return whether its slot continues.

        The end of a draining slot's lease never counts as a failure.
        """
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

    def _learn(self, slot: Slot, outcome: LeaseEnd, now: float) -> float:
        """Count the outcome and return the pause before the next lease."""
        if isinstance(outcome, Served):
            slot.deaths = slot.refusals = 0
            return 0.0
        self.failures += 1
        self.last_error = outcome.reason
        if isinstance(outcome, Refused):
            slot.refusals += 1
            return restart_pause(slot.refusals)
        slot.deaths = slot.deaths + 1 if now < slot.began + EARLY_DEATH_SECONDS else 1
        return restart_pause(slot.deaths - 1)  # no pause after the first death

    # ── inspection ───────────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Start no further leases.  Slots between leases end now, the others with their leases."""
        self.draining = True
        self._slots = {slot.number: slot for slot in self._slots.values() if slot.lease is not None}

    @property
    def serving(self) -> int:
        """The number of slots that serve, without those that drain."""
        return sum(slot.state == "serving" for slot in self._active())

    @property
    def finished(self) -> bool:
        """Whether all slots have ended after `drain`."""
        return self.draining and not self._slots

    def deadline(self) -> float | None:
        """Return when the next lease will be due without further events, or None."""
        return min((slot.retry_at for slot in self._active() if slot.lease is None), default=None)

    def silent(self, now: float, seconds: float) -> list[tuple[int, int]]:
        """Return (slot, lease) for each lease that was submitted at least `seconds` ago and has not reported."""
        return [(slot.number, lease) for slot, lease in self._unheard() if now >= slot.began + seconds]

    def unwanted(self) -> list[int]:
        """Return the leases of draining slots that have not reported: they may still wait for a core."""
        return [lease for slot, lease in self._unheard() if self._drains(slot)]

    def _unheard(self) -> list[tuple[Slot, int]]:
        return [(slot, slot.lease) for slot in self._slots.values() if slot.lease is not None and not slot.reported]

    def _drains(self, slot: Slot) -> bool:
        return self.draining or slot.state == "draining"

    def _active(self) -> Sequence[Slot]:
        return [slot for slot in self._slots.values() if slot.state != "draining"]

    def rows(self, epoch: float = 0.0) -> list[dict[str, Any]]:
        """Return the slots for a status; `epoch` is the time in seconds since 1970 at which `now` was 0."""
        return [
            {
                "slot": slot.number,
                "state": "draining" if self._drains(slot) else slot.state,
                "host": slot.host,
                "pid": slot.pid,
                "executor": slot.executor,
                "served": slot.served + slot.serving,
                "since": round(slot.since + epoch, 3),
            }
            for slot in sorted(self._slots.values(), key=lambda slot: slot.number)
        ]
