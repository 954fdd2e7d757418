"""The driver of a fleet: the executors of a Spark cluster serve as workers of a broker.

Each lease of each slot is a Spark job of one task: `slots.py` decides which leases to start, and
`executor.py` runs in the tasks.  A single job for all slots would not work, because Spark ends the whole job when one
task dies.
"""

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...clients import Client
from ...mdp import wire
from ...mdp.cli.console import printable
from ...mdp.errors import ServiceError, ZmdpError
from ...mdp.program.control_services import SPARK, UNKNOWN_OPERATION
from ...mdp.transport.reach import warn_if_unreachable
from ...version import __version__
from ...workers import Worker
from ..drivers import Operation, control_service
from .application import Application
from .cluster import Cluster
from .leases import LeaseJobs
from .settings import FleetSettings
from .slots import Died, Lease, Load, Refused, Slots

WATCH_SECONDS: Final = 0.5
"""Interval at which the driver checks the broker's queue and the Spark jobs."""
SILENCE_SECONDS: Final = 30.0
"""How long a slot may go without reporting before the driver logs a likely reason."""
ANSWER_TIMEOUT_SECONDS: Final = 5.0
"""How long the broker may take to answer the driver."""
REPEAT_WARNING_SECONDS: Final = 60.0
"""How long before the same warning is logged again."""

log = logging.getLogger("zmdp.spark")


class Fleet:
    """Serves requests on the executors of `cluster` until `drain` is called."""

    def __init__(self, settings: FleetSettings, cluster: Cluster) -> None:
        self.settings = settings
        self._run_id = uuid.uuid4().hex
        # No name of a driver has a slash, so neither `mdp-spark status` nor another fleet uses this service.
        self._reports = f"{SPARK}{settings.name}/{self._run_id[:8]}"
        self._application = Application(settings, cluster, warn=self._warn_once, stopped=lambda: self.ending)
        self._jobs = LeaseJobs(settings, self._run_id, self._reports, self._application)
        self.ending = False
        """Whether `drain` was called."""
        self.on_drain: Callable[[], object] = lambda: None
        """Called when `mdp-spark drain` asks it to drain."""
        self._ended = threading.Event()
        self._changed = threading.Condition()
        """Guards `_slots` and `_warned`, and is notified when leases or the load change."""
        self._slots: Slots
        self._has_slots = False
        """Whether Spark has started, so that there are any."""
        self._warned: dict[str, float] = {}
        """When each warning was logged that was logged recently."""

    # ── from any thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Stop renewing leases and finish running requests.  Takes no lock, so signal handlers may call it."""
        self.ending = True

    def unfinished(self) -> str:
        """Name the slots that have not ended."""
        if not self._has_slots:
            return "the start of Spark"
        rows = self.status()["slots"]
        slots = ", ".join(f"slot {row['slot']}" + (f" on {row['host']}" if row.get("host") else "") for row in rows)
        return f"the requests of {slots}; other workers get them" if rows else "waiting for Spark to end"

    def status(self) -> dict[str, Any]:
        """Return the fleet's status; `since` of a slot is in seconds since 1970."""
        with self._changed:
            settings, slots = self.settings, self._slots
            return {
                "kind": "fleet", "name": settings.name, "version": __version__, "pid": os.getpid(),
                "service": settings.service, "handler": settings.handler, "broker": ", ".join(settings.brokers),
                "master": self._application.master, "application": self._application.id,
                "draining": slots.draining, "slots": slots.rows(time.time() - time.monotonic()),
                "min": slots.minimum, "max": slots.maximum, "wanted": slots.wanted,
                "queued": slots.load.queued if slots.load else None,
                "failures": slots.failures, "last_error": slots.last_error,
            }  # fmt: skip

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `drain` is called and all slots have ended; call `ready` once there is a session.

        Reopens a lost session, and waits for a remote cluster that is unavailable.

        Raises `SettingError`, and `SparkError` if PySpark or Java is missing or a local session cannot be opened.
        """
        settings = self.settings
        if not self._application.open():
            return
        try:
            self._slots = self._application.new_slots()
            self._has_slots = True
            warn_if_unreachable(log, settings.brokers, settings.keys)
            watcher = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
            operations: dict[str, Operation] = {
                "status": lambda arguments, request: self.status(),
                "drain": lambda arguments, request: self._drain(),
            }
            with (
                Worker(self._reports, self._reported, broker=settings.broker, key=settings.keys, codec="json"),
                control_service(settings.name, operations, broker=settings.broker, keys=settings.keys),
            ):
                watcher.start()
                try:
                    ready()
                    self._serve()
                finally:
                    self._ended.set()
                    watcher.join()
        finally:
            self._application.close()

    def _serve(self) -> None:
        """Serve until all slots have ended after `drain`."""
        while True:
            with self._changed:
                if self.ending:
                    self._slots.drain()
                if self._slots.finished:
                    return
            if not self._application.is_alive:
                self._application.reopen()
                continue
            with self._changed:
                now = time.monotonic()
                leases = self._slots.due(now)
                unwanted, silent = self._slots.unwanted(), self._slots.silent(now, SILENCE_SECONDS)
            for lease in leases:
                # Not an InheritableThread, which calls the JVM first and, if that is gone, never runs its target.
                threading.Thread(target=self._run_lease, args=(lease,), name=f"slot-{lease.slot}", daemon=True).start()
            try:
                self._check_jobs(unwanted, silent)
            except Exception as error:  # noqa: BLE001 - py4j raises many types when a session ends
                log.debug("cannot check the jobs: %s", error)
            with self._changed:
                self._changed.wait(self._pause())

    def _check_jobs(self, unwanted: Sequence[int], silent: Sequence[tuple[int, int]]) -> None:
        """Cancel jobs of unwanted leases that still wait for a core, and warn about silent slots."""
        for lease in unwanted:
            if not self._jobs.is_running(lease):
                self._jobs.cancel(lease)
        for slot, lease in silent:
            text = f"is waiting for a core of {self._application.master}: it has too few, or its executors do not start"
            if self._jobs.is_running(lease):
                text = (
                    f"is running but has not reported for {SILENCE_SECONDS:g} s: executors may not reach "
                    f"{self._jobs.broker}; pass another address with --broker-from-executors"
                )
            self._warn_once(f"slot {slot} {text}")

    def _pause(self) -> float:
        due = self._slots.deadline()
        return WATCH_SECONDS if due is None else min(WATCH_SECONDS, max(0.0, due - time.monotonic()))

    # ── a lease ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run_lease(self, lease: Lease) -> None:
        outcome = self._jobs.run(lease)
        with self._changed:
            if isinstance(outcome, Died):
                outcome = Died(f"{outcome.reason}; lost at {_clock(time.time())}: {self._held(lease)}")
            goes_on = self._slots.ended(lease, outcome, time.monotonic())
            self._changed.notify_all()
        if not goes_on:
            return
        if isinstance(outcome, Refused):
            self._warn_once(f"{outcome.reason}; retrying until it works")
        elif isinstance(outcome, Died):
            log.warning("%s; restarting it", outcome.reason)
        elif outcome.unreachable and self._slots.load is not None:  # otherwise the driver cannot reach it either
            advice = "pass an address that executors can reach with --broker-from-executors"
            self._warn_once(f"slot {lease.slot} {outcome.unreachable}; {advice}")

    def _held(self, lease: Lease) -> str:
        """Describe the slot that is lost with a lease, as it has reported itself."""
        row = next(each for each in self._slots.rows(time.time() - time.monotonic()) if each["slot"] == lease.slot)
        if row["pid"] is None:
            return f"slot {lease.slot}, which had not started"
        return (
            f"slot {lease.slot} on executor {row['executor']} of {row['host']}, pid {row['pid']}, {row['state']} since "
            f"{_clock(row['since'])}, {row['served']} requests"
        )

    # ── the broker's load ────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Pass the broker's load and the number of cores on to the slots, until the fleet ends."""
        settings = self.settings
        with Client(
            settings.broker, timeout=ANSWER_TIMEOUT_SECONDS, retries=0, heartbeat=settings.heartbeat, key=settings.keys
        ) as client:
            while not self._ended.wait(WATCH_SECONDS):
                load = self._fetch_load(client)
                most = self._application.max_slots()
                with self._changed:
                    before = self._slots.wanted
                    if most is not None:
                        self._slots.bound(most)
                    self._slots.observe(load, time.monotonic())
                    now = self._slots.wanted
                    self._changed.notify_all()
                if load is not None and now != before:
                    log.info("scaling from %d to %d slots; %d requests queued", before, now, load.queued)

    def _fetch_load(self, client: Client) -> Load | None:
        try:
            (answer,) = client.request("mmi.services", wire.service_name(self.settings.service))
            return Load.from_row(next(iter(json.loads(answer)["services"]), {}))
        except ZmdpError:
            return None
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            where = " or ".join(self.settings.brokers)
            self._warn_once(
                f"the broker at {where} does not report its queues, so the fleet does not scale ({error!r})"
            )
            return None

    # ── the control service ──────────────────────────────────────────────────────────────────────────────────────────

    def _drain(self) -> Mapping[str, Any]:
        if not self.ending:
            log.info("draining, as asked by mdp-spark drain; running requests are finished first")
        self.on_drain()
        self.drain()
        with self._changed:
            return {"draining": True, "running": len(self._slots.rows())}

    def _reported(self, report: Any) -> Mapping[str, Any]:
        """Answer a report of a slot's task."""
        if not isinstance(report, dict) or report.get("run") != self._run_id:
            raise ServiceError(UNKNOWN_OPERATION, "expected the report of a slot of this fleet")
        with self._changed:
            drain = self._slots.report(report["slot"], report["lease"], report, time.monotonic())
            return {"drain": drain or self.ending}

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _warn_once(self, text: str) -> None:
        """Log a warning, but the same one at most once a minute."""
        now = time.monotonic()
        with self._changed:
            self._warned = {each: at for each, at in self._warned.items() if now < at + REPEAT_WARNING_SECONDS}
            known = text in self._warned
            self._warned.setdefault(text, now)
        if not known:
            log.warning("%s", printable(text))


def _clock(seconds: float) -> str:
    """Return a time in seconds since 1970 as people read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
