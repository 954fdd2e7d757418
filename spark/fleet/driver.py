"""`mdp-spark fleet`: executors of a Spark cluster as workers of a broker.

One Spark job of one task for each lease of each slot (`slots.py` says which and when; `worker.py` is what
runs there).  Not one job for all: there one death would end everything.
"""

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from json import loads
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ... import __version__
from ...clients import Client
from ...mdp import wire
from ...mdp.cli.console import printable
from ...mdp.defaults import DEFAULT_ENDPOINT
from ...mdp.errors import SettingError, ZmdpError
from ...mdp.transport.reach import why_unreachable
from ..control import PREFIX, Control, checked_name
from ..session import SparkError, check_installed, forget, is_alive, is_elsewhere, settled_master
from .ship import Cluster, on_this_machine, python
from .slots import BACKOFF, Died, Lease, Load, Outcome, Refused, Served, Slots
from .worker import Task, serve

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

LOOK: Final = 0.5
"""Seconds between two looks at the broker's queue, and at Spark."""
DEFAULT_LEASE: Final = 30.0
DEFAULT_IDLE: Final = 60.0
SILENT: Final = 30.0
"""Seconds after which a slot that says nothing is asked about."""
AGAIN: Final = 60.0
"""Seconds before the same complaint is logged once more."""
_LOST: Final = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor (\S+)\): (.*)")
_CLASS: Final = re.compile(r"(?:[a-z]\w*\.)+[A-Z]\w*: ")

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True)
class Settings:
    """What a fleet is to do: `handler` (MODULE:FUNCTION) behind `service` at the `broker`.

    `executors_broker` is the broker's address for executors, if they reach it at another.  Between `minimum` and
    `maximum` slots (None: all cores) serve, and never in the last `reserve` cores.  Times are seconds.
    """

    handler: str
    service: str
    name: str
    broker: str = DEFAULT_ENDPOINT
    executors_broker: str | None = None
    minimum: int = 1
    maximum: int | None = None
    reserve: int = 1
    lease: float = DEFAULT_LEASE
    idle: float = DEFAULT_IDLE
    codec: str | None = None
    heartbeat: float = 1.0
    liveness: int = 5
    handler_timeout: float | None = None
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        module, _, name = self.handler.partition(":")
        if not (module and name):
            raise SettingError(f"{self.handler!r}: it takes MODULE:FUNCTION, for example zmdp.workers.echo:echo")
        if wire.service_name(self.service).startswith((wire.MMI, PREFIX.encode())):
            raise SettingError(f"{self.service!r} is reserved: take another name for the service")
        checked_name(self.name)
        if self.maximum is not None and self.maximum < max(1, self.minimum):
            raise SettingError(f"--min {self.minimum} --max {self.maximum}: the maximum is at least 1, and the minimum")

    @property
    def address(self) -> str:
        """Where executors find the broker."""
        return self.executors_broker or self.broker


class Fleet:
    """Serves with the executors of `cluster`, until `drain`."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self.settings = settings
        self._cluster = cluster
        self._run = uuid.uuid4().hex
        self._session: SparkSession | None = None
        self._master = self._application = ""
        self._asked_to_end = False
        self._ended = threading.Event()
        self._changed = threading.Condition()
        """Guards what follows."""
        self._slots: Slots
        self._load: Load | None = None
        self._told: dict[str, float] = {}
        """Complaints, and when they were logged last."""

    # ── from any thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """End: no lease is renewed, what is being worked on is finished.  For signal handlers too: it takes no lock."""
        self._asked_to_end = True

    @property
    def ending(self) -> bool:
        """Whether `drain` was called."""
        return self._asked_to_end

    def status(self) -> dict[str, Any]:
        """What the fleet does; `since` of a slot is seconds since 1970."""
        with self._changed:
            rows = self._slots.rows(time.monotonic())
            for row in rows:
                row["since"] = round(time.time() - row.pop("for"), 3)
            load = self._load
            return {
                "kind": "fleet",
                "name": self.settings.name,
                "service": self.settings.service,
                "handler": self.settings.handler,
                "broker": self.settings.broker,
                "master": self._master,
                "application": self._application,
                "version": __version__,
                "pid": os.getpid(),
                "draining": self._slots.draining,
                "slots": rows,
                "wanted": self._slots.wanted,
                "min": self._slots.minimum,
                "max": self._slots.maximum,
                "queued": load.queued if load else None,
                "failures": self._slots.failures,
                "last_error": self._slots.last_error,
            }

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `drain` is called and all is finished; `ready` is called once there is a session.

        A session that is lost is opened anew, and a cluster that is away is waited for.  Raises `SettingError`, and
        `SparkError` if PySpark or Java is missing or the first session cannot be opened on this very machine.
        """
        master = settled_master(self._cluster.master, self._cluster.conf)
        check_installed()
        if not is_elsewhere(master):
            self._open()
        elif not self._open_until_there():
            return
        try:
            self._slots = self._new_slots()
            self._warn()
            operations = {"status": self._status, "drain": self._drain, "slot": self._slot}
            watcher = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
            with Control(self.settings.name, operations, broker=self.settings.broker):
                watcher.start()
                try:
                    ready()
                    self._serve()
                finally:
                    self._ended.set()
                    watcher.join()
        finally:
            self._close()

    def _serve(self) -> None:
        while True:
            with self._changed:
                if self._asked_to_end:
                    self._slots.drain()
                if self._slots.finished:
                    return
            if self._session is None or not is_alive(self._session):
                self._reopen()
                continue
            with self._changed:
                now = time.monotonic()
                leases = self._slots.due(now)
                unheard = [slot.lease for slot in self._slots.unheard() if slot.lease is not None]
                silent = [
                    (slot.number, slot.lease) for slot in self._slots.silent(now, SILENT) if slot.lease is not None
                ]
            for lease in leases:
                self._start(lease)
            try:
                self._look_after(unheard, silent)
            except Exception as error:  # noqa: BLE001 - py4j's, of many kinds: the session ends just now
                log.debug("cannot look after the jobs: %s", error)
            with self._changed:
                self._changed.wait(self._pause())

    def _look_after(self, unheard: Sequence[int], silent: Sequence[tuple[int, int]]) -> None:
        """Cancel the jobs of leases that are not wanted any more and wait for a core; say why slots are silent."""
        for lease in unheard:
            if not self._runs(lease):
                self._context.cancelJobsWithTag(self._tag(lease))
        for number, lease in silent:
            self._complain(self._silence(number, runs=self._runs(lease)))

    def _pause(self) -> float:
        due = self._slots.deadline()
        return LOOK if due is None else min(LOOK, max(0.0, due - time.monotonic()))

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _context(self) -> "SparkContext":
        assert self._session is not None, "run() opens it"  # noqa: S101 - a defect of ours, not a peer's
        return self._session.sparkContext

    def _open(self) -> None:
        most = None if self.settings.maximum is None else self.settings.maximum + self.settings.reserve
        self._session = self._cluster.open(self.settings.name, most=most)
        # Kept, as a session that has ended tells nothing any more.
        self._master, self._application = str(self._context.master), str(self._context.applicationId)

    def _close(self) -> None:
        if self._session is not None:
            forget(self._session)

    def _reopen(self) -> None:
        """Spark has ended the session: the cluster is gone, or somebody has killed the application or its driver."""
        log.warning("Spark has ended the session on %s; opening another", self._master)
        self._close()
        if self._open_until_there():
            log.info("there is a session on %s again", self._master)

    def _open_until_there(self) -> bool:
        """Open a session, however long its cluster is away.  False if the fleet was told to end meanwhile."""
        pause = BACKOFF[0]
        while not self._asked_to_end:
            try:
                self._open()
            except SparkError as error:
                self._complain(f"{error}; trying again until it works")
                until = time.monotonic() + pause
                while time.monotonic() < until and not self._asked_to_end:
                    time.sleep(0.1)
                pause = min(2 * pause, BACKOFF[1])
            else:
                return True
        return False

    # ── a lease ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, lease: Lease) -> None:
        # Not an InheritableThread: that asks the JVM before it runs anything, and where there is none runs nothing.
        threading.Thread(target=self._lease, args=(lease,), name=f"slot-{lease.slot}", daemon=True).start()

    def _lease(self, lease: Lease) -> None:
        told = ""
        try:
            outcome, told = self._outcome(lease, self._job(lease))
        except Exception as error:  # noqa: BLE001 - whatever ends a job: the slot's next lease is another
            outcome = explained(message(error))
        with self._changed:
            goes_on = self._slots.ended(lease, outcome, time.monotonic())
            self._changed.notify_all()
        if not goes_on:
            return
        if isinstance(outcome, Refused):
            self._complain(f"{outcome.reason}; trying again until it works")
        elif isinstance(outcome, Died):
            log.warning("slot %d: %s; starting it again", lease.slot, outcome.reason)
        elif told:
            self._complain(told)

    def _job(self, lease: Lease) -> Mapping[str, Any]:
        """Run a lease's job to its end; returns what the task returned."""
        wanted = self.settings
        context = self._context
        paths = (os.getcwd(),) if on_this_machine(self._master) else ()
        task = Task(
            fleet=self._run, control=PREFIX + wanted.name, slot=lease.slot, lease=lease.number, seconds=lease.seconds,
            service=wanted.service, handler=wanted.handler, broker=wanted.address, codec=wanted.codec,
            heartbeat=wanted.heartbeat, liveness=wanted.liveness, handler_timeout=wanted.handler_timeout, paths=paths,
            log_level=wanted.log_level,
        )  # fmt: skip
        tag = self._tag(lease.number)
        context.setJobGroup(tag, f"{wanted.service}: slot {lease.slot}, lease {lease.number}")
        context.addJobTag(tag)
        found = context.parallelize([0], 1).mapPartitions(partial(serve, task)).collect()
        return found[0]

    def _outcome(self, lease: Lease, told: Mapping[str, Any]) -> tuple[Outcome, str]:
        """What a task's result means, and what there is to say of it."""
        host = told["host"]
        if "refused" in told:
            return Refused(f"{host} cannot serve {self.settings.service}: {told['refused']}"), ""
        unreachable = told["unreachable"]
        if unreachable is None or self._load is None:  # if nobody reaches the broker, that is said elsewhere
            return Served(told["served"]), ""
        where = f"slot {lease.slot} on {host} has not reached the broker at {self.settings.address}: {unreachable}"
        return Served(told["served"]), f"{where}; --broker-from-executors says where executors find it"

    def _tag(self, lease: int) -> str:
        return f"{self._run}-{lease}"

    def _runs(self, lease: int) -> bool:
        """Whether the lease's task is on an executor."""
        tracker = self._context.statusTracker()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._tag(lease)))
        stages = (tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds)
        return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

    def _silence(self, slot: int, *, runs: bool) -> str:
        if runs:
            return (
                f"slot {slot} runs, but has not reported for {SILENT:g} s: executors do not reach the broker at "
                f"{self.settings.address}? --broker-from-executors says where they find it"
            )
        return f"slot {slot} waits for a core of {self._master}: it has too few, or its executors do not come"

    # ── what the broker tells ────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Look at the queue and at the cores, and have there be as many slots as are needed."""
        with Client(self.settings.broker, timeout=1.0, retries=0, heartbeat=self.settings.heartbeat) as client:
            while not self._ended.wait(LOOK):
                load = self._ask(client)
                most = self._most_now()
                with self._changed:
                    before = self._slots.wanted
                    self._load = load
                    if most is not None:
                        self._slots.bound(most)
                    self._slots.observe(load, time.monotonic())
                    now = self._slots.wanted
                    self._changed.notify_all()
                if load is not None and now != before:
                    log.info("%d slots, before: %d; %d requests wait", now, before, load.queued)

    def _ask(self, client: Client) -> Load | None:
        try:
            told = loads(client.request("mmi.services", wire.service_name(self.settings.service))[0])
            row: Mapping[str, Any] = next(iter(told["services"]), {})
            return Load(*(int(row.get(each, 0)) for each in ("queued", "workers", "idle", "running", "dispatched")))
        except ZmdpError:
            return None
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._complain(f"the broker at {self.settings.broker} does not tell how long its queues are ({error!r})")
            return None

    # ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_slots(self) -> Slots:
        wanted = self.settings
        cores = self._cores()
        most = self._most(cores or 0)
        fixed = on_this_machine(self._master) and cores is not None
        needed = max(1, wanted.minimum)
        if fixed and most < needed:
            raise SettingError(
                f"{self._master} has {cores} cores, of which {wanted.reserve} stay free (--reserve): that "
                f"leaves {max(most, 0)} for slots, and {needed} are needed; give it more cores, or --reserve 0"
            )
        if fixed and wanted.maximum is not None and most < wanted.maximum:
            log.warning("--max %d is more than the %d slots there are cores for", wanted.maximum, most)
        return Slots(wanted.minimum, max(most, needed), wanted.lease, wanted.idle)

    def _most(self, cores: int) -> int:
        """Slots for which there are cores."""
        each = int(self._conf("spark.task.cpus", "1"))
        most = (cores - self.settings.reserve) // each
        return most if self.settings.maximum is None else min(most, self.settings.maximum)

    def _conf(self, name: str, default: str) -> str:
        return str(self._context.getConf().get(name, default))

    def _most_now(self) -> int | None:
        """The same for the cores that there are now; None while that cannot be told."""
        try:
            cores = self._cores()
            return None if cores is None else self._most(cores)
        except Exception as error:  # noqa: BLE001 - py4j's, of many kinds: the session has just ended
            log.debug("cannot tell how many slots there may be: %s", error)
            return None

    def _cores(self) -> int | None:
        """The cores of the cluster; None while that cannot be told."""
        try:
            return cores(self._context, self.settings.maximum)
        except SettingError:
            raise
        except Exception as error:  # noqa: BLE001 - py4j's, of many kinds: the session has just ended
            log.debug("cannot tell how many cores there are: %s", error)
            return None

    # ── what the control service answers ─────────────────────────────────────────────────────────────────────────────

    def _status(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        del asked
        return self.status()

    def _drain(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        del asked
        if not self._asked_to_end:
            log.info("asked to drain: what is being worked on is finished first")
        self.drain()
        with self._changed:
            return {"draining": True, "running": len(self._slots.rows(time.monotonic()))}

    def _slot(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        number, lease = asked.get("slot"), asked.get("lease")
        if asked.get("fleet") != self._run or not isinstance(number, int) or not isinstance(lease, int):
            return {"drain": False}  # of another fleet of this name, which will tell it
        with self._changed:
            return {"drain": self._slots.report(number, lease, asked, time.monotonic()) or self._asked_to_end}

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _warn(self) -> None:
        """Say what will probably not work."""
        wanted = self.settings
        reason = why_unreachable(wanted.broker)
        if reason is not None:
            log.warning("no broker at %s yet: %s; connecting goes on until there is one", wanted.broker, reason)
        if not on_this_machine(self._master) and is_loopback(wanted.address):
            log.warning(
                "executors of %s on other machines cannot reach %s: --broker-from-executors says where they find it",
                self._master,
                wanted.address,
            )

    def _complain(self, text: str) -> None:
        """Log a warning, but the same at most once a minute."""
        now = time.monotonic()
        with self._changed:
            self._told = {each: at for each, at in self._told.items() if now < at + AGAIN}
            known = text in self._told
            self._told.setdefault(text, now)
        if not known:
            log.warning("%s", printable(text))


def cores(context: "SparkContext", wanted: int | None = None) -> int:
    """The cores that an application has, at the most, as far as its settings or its executors tell.

    `wanted` is how many slots are, where dynamic allocation has no bound of its own.

    Raises `SettingError` if they may be any number.
    """
    conf, master = context.getConf(), str(context.master)
    if match := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(match[1]) * int(match[2])
    if match := re.fullmatch(r"local(?:\[(\d+|\*)(?:,.*)?\])?", master):
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        most = conf.get("spark.dynamicAllocation.maxExecutors")
        if most is None and wanted is not None:
            return wanted * int(conf.get("spark.task.cpus", "1") or 1)
        if most is None:
            raise SettingError(
                "with dynamic allocation there is no end of executors: say how many with --max, or with "
                "--conf spark.dynamicAllocation.maxExecutors=N"
            )
        return int(most) * int(conf.get("spark.executor.cores", "1") or 1)
    if (most := conf.get("spark.cores.max")) is not None:
        return int(most)
    executors, each = conf.get("spark.executor.instances"), conf.get("spark.executor.cores")
    if executors is not None and each is not None:
        return int(executors) * int(each)
    return context.defaultParallelism  # those that have come


def is_loopback(endpoint: str) -> bool:
    """Whether only programs on this machine reach that endpoint."""
    host = urlsplit(endpoint).hostname or ""
    return not endpoint.startswith("tcp://") or host == "localhost" or host.startswith("127.") or host == "::1"


# ── what ended a job ─────────────────────────────────────────────────────────────────────────────────────────────────


def message(error: BaseException) -> str:
    """All that Spark says of a job that failed."""
    java = getattr(error, "java_exception", None)
    return str(error) if java is None else str(java.getMessage() or java.toString())


def explained(text: str) -> Refused | Died:
    """What a failed job's message means: an executor that cannot serve at all, or one that was lost."""
    if "No module named 'zmdp'" in text:
        return Refused("executors cannot import zmdp: ship it with --py-files zmdp.zip, which `mdp-spark pack` makes")
    if "PYTHON_VERSION_MISMATCH" in text:
        return Refused(
            f"executors run another Python than the driver's {python()}: set PYSPARK_PYTHON to one of that version, or "
            "ship one with --archive"
        )
    if match := re.search(r'Cannot run program "([^"]+)"', text):
        return Refused(
            f"executors have no Python at {match[1]}: --conf spark.pyspark.python=PATH names another; an environment "
            "of --archive needs the Python that it was made with at the same path on every machine"
        )
    where = "the job"
    if match := _LOST.search(text):
        where, text = f"executor {match[2]} on {match[1]}", match[3]
    line = _CLASS.sub("", text.split("\n", 1)[0].partition(" Consider setting")[0])
    return Died(f"{where}: {' '.join(line.split())[:300]}")
