"""The driver of a fleet: the executors of a Spark cluster serve as workers of a broker.

Each lease of each slot is a Spark job of one task: `slots.py` decides which leases to start, and `executor.py` runs in
the tasks.  A single job for all slots would not work, because Spark ends the whole job when one task dies.
"""

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
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
from ...mdp.keys import ClientKeys
from ...mdp.transport.reach import why_unreachable
from ...mdp.transport.sockets import checked_endpoints
from ...workers import Request
from ..control import PREFIX, Control, validate_driver_name
from ..session import SparkError, check_installed, is_alive, is_remote, resolve_master, stop_quietly
from .executor import LeaseTask, serve
from .packaging import Cluster, on_this_machine, python
from .slots import BACKOFF_SECONDS, Died, Lease, Load, Outcome, Refused, Served, Slots

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

WATCH_SECONDS: Final = 0.5
"""Interval at which the driver checks the broker's queue and the Spark jobs."""
DEFAULT_LEASE_SECONDS: Final = 30.0
DEFAULT_IDLE_SECONDS: Final = 60.0
SILENCE_SECONDS: Final = 30.0
"""How long a slot may go without reporting before the driver logs a likely reason."""
REPEAT_WARNING_SECONDS: Final = 60.0
"""How long before the same warning is logged again."""
_LOST: Final = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor (\S+)\): (.*)")
_CLASS: Final = re.compile(r"(?:[a-z]\w*\.)+[A-Z]\w*: ")

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True)
class FleetSettings:
    """What a fleet serves, and how.  Times are in seconds.

    Args:
        handler: MODULE:FUNCTION that handles requests.
        service: name of the service.
        name: name of the fleet, for `mdp-spark status` and `drain`.
        broker: endpoint of the broker, or several in order of preference.
        executors_broker: those that executors use, if they differ.
        minimum, maximum: bounds on the number of slots; a maximum of None means all cores.
        reserve: cores that slots never use.
        lease: how long a slot serves in one Spark job.
        idle: how long a slot must not have been needed before it is released.
        codec: encoding of requests and replies; None means frames of bytes.
        handler_timeout: as for `Worker`.
        keys: keys of the driver and of its executors, for brokers that require them.
    """

    handler: str
    service: str
    name: str
    broker: str | Sequence[str] = DEFAULT_ENDPOINT
    executors_broker: str | Sequence[str] = ()
    minimum: int = 1
    maximum: int | None = None
    reserve: int = 1
    lease: float = DEFAULT_LEASE_SECONDS
    idle: float = DEFAULT_IDLE_SECONDS
    codec: str | None = None
    heartbeat: float = 1.0
    liveness: int = 5
    handler_timeout: float | None = None
    log_level: str = "INFO"
    log_format: str = "text"
    keys: ClientKeys | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        module, _, name = self.handler.partition(":")
        if not (module and name):
            raise SettingError(f"{self.handler!r}: expected MODULE:FUNCTION, for example zmdp.workers.echo:echo")
        if wire.service_name(self.service).startswith((wire.MMI, PREFIX.encode())):
            raise SettingError(f"{self.service!r} is a reserved name; choose another name for the service")
        validate_driver_name(self.name)
        if self.maximum is not None and self.maximum < max(1, self.minimum):
            raise SettingError(
                f"--min {self.minimum} --max {self.maximum}: --max must be at least 1 and no less than --min"
            )

    @property
    def brokers(self) -> tuple[str, ...]:
        """Return the brokers' endpoints for the driver."""
        return tuple(checked_endpoints(self.broker))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the brokers' endpoints for executors."""
        return tuple(checked_endpoints(self.executors_broker or self.broker))


class Fleet:
    """Serves requests on the executors of `cluster` until `drain` is called."""

    def __init__(self, settings: FleetSettings, cluster: Cluster) -> None:
        self.settings = settings
        self._cluster = cluster
        self._run_id = uuid.uuid4().hex
        self._session: SparkSession | None = None
        self._master = self._application = ""
        self._draining = False
        self._ended = threading.Event()
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self._slots: Slots
        self._load: Load | None = None
        self._warned: dict[str, float] = {}
        """Warnings logged recently, and when."""

    # ── from any thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Stop renewing leases and finish running requests.  Takes no lock, so signal handlers may call it."""
        self._draining = True

    @property
    def ending(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    def status(self) -> dict[str, Any]:
        """Return the fleet's status; `since` of a slot is in seconds since 1970."""
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
                "broker": ", ".join(self.settings.brokers),
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
        """Serve until `drain` is called and all slots have ended; call `ready` once there is a session.

        Reopens a lost session, and waits for a remote cluster that is unavailable.

        Raises `SettingError`, and `SparkError` if PySpark or Java is missing or a local session cannot be opened.
        """
        master = resolve_master(self._cluster.master, self._cluster.conf)
        check_installed()
        if not is_remote(master):
            self._open()
        elif not self._open_patiently():
            return
        try:
            self._slots = self._new_slots()
            self._warn_early()
            operations = {"status": self._status, "drain": self._drain, "slot": self._slot}
            watcher = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
            with Control(self.settings.name, operations, broker=self.settings.broker, keys=self.settings.keys):
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
                if self._draining:
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
                    (slot.number, slot.lease)
                    for slot in self._slots.silent(now, SILENCE_SECONDS)
                    if slot.lease is not None
                ]
            for lease in leases:
                self._start(lease)
            try:
                self._check_jobs(unheard, silent)
            except Exception as error:  # noqa: BLE001 - py4j raises many types when a session ends
                log.debug("cannot check the jobs: %s", error)
            with self._changed:
                self._changed.wait(self._pause())

    def _check_jobs(self, unheard: Sequence[int], silent: Sequence[tuple[int, int]]) -> None:
        """Cancel jobs of unwanted leases that still wait for a core, and warn about silent slots."""
        for lease in unheard:
            if not self._is_running(lease):
                self._context.cancelJobsWithTag(self._tag(lease))
        for number, lease in silent:
            self._warn_once(self._explain_silence(number, runs=self._is_running(lease)))

    def _pause(self) -> float:
        due = self._slots.deadline()
        return WATCH_SECONDS if due is None else min(WATCH_SECONDS, max(0.0, due - time.monotonic()))

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _context(self) -> "SparkContext":
        assert self._session is not None, "run() opens the session"  # noqa: S101 - our own invariant
        return self._session.sparkContext

    def _open(self) -> None:
        most = None if self.settings.maximum is None else self.settings.maximum + self.settings.reserve
        self._session = self._cluster.open(self.settings.name, most=most)
        # Kept here because a session that has ended cannot be asked.
        self._master, self._application = str(self._context.master), str(self._context.applicationId)

    def _close(self) -> None:
        if self._session is not None:
            stop_quietly(self._session)

    def _reopen(self) -> None:
        """Open a new session after the cluster went away or the application or its driver was killed."""
        log.warning("the Spark session on %s has ended; opening another", self._master)
        self._close()
        if self._open_patiently():
            log.info("opened a new session on %s", self._master)

    def _open_patiently(self) -> bool:
        """Open a session, retrying while its cluster is unavailable.

        Return False if `drain` was called in the meantime.
        """
        pause = BACKOFF_SECONDS[0]
        while not self._draining:
            try:
                self._open()
            except SparkError as error:
                self._warn_once(f"{error}; retrying until it works")
                until = time.monotonic() + pause
                while time.monotonic() < until and not self._draining:
                    time.sleep(0.1)
                pause = min(2 * pause, BACKOFF_SECONDS[1])
            else:
                return True
        return False

    # ── a lease ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, lease: Lease) -> None:
        # Not an InheritableThread, which calls the JVM first and, if that is gone, never runs its target.
        threading.Thread(target=self._lease_thread, args=(lease,), name=f"slot-{lease.slot}", daemon=True).start()

    def _lease_thread(self, lease: Lease) -> None:
        answer = ""
        try:
            outcome, answer = self._outcome(lease, self._run_lease(lease))
        except Exception as error:  # noqa: BLE001 - whatever ended the job, the slot gets another lease
            outcome = classify_failure(failure_message(error))
        with self._changed:
            goes_on = self._slots.ended(lease, outcome, time.monotonic())
            self._changed.notify_all()
        if not goes_on:
            return
        if isinstance(outcome, Refused):
            self._warn_once(f"{outcome.reason}; retrying until it works")
        elif isinstance(outcome, Died):
            log.warning("slot %d: %s; restarting it", lease.slot, outcome.reason)
        elif answer:
            self._warn_once(answer)

    def _run_lease(self, lease: Lease) -> Mapping[str, Any]:
        """Run a lease's job to its end and return what the task returned."""
        settings = self.settings
        context = self._context
        paths = (os.getcwd(),) if on_this_machine(self._master) else ()
        task = LeaseTask(
            fleet=self._run_id, control=PREFIX + settings.name, slot=lease.slot, lease=lease.number,
            seconds=lease.seconds, service=settings.service, handler=settings.handler, broker=settings.addresses,
            codec=settings.codec, heartbeat=settings.heartbeat, liveness=settings.liveness,
            handler_timeout=settings.handler_timeout, paths=paths, log_level=settings.log_level,
            log_format=settings.log_format,
            keys=None if settings.keys is None else astuple(settings.keys),
        )  # fmt: skip
        tag = self._tag(lease.number)
        context.setJobGroup(tag, f"{settings.service}: slot {lease.slot}, lease {lease.number}")
        context.addJobTag(tag)
        found = context.parallelize([0], 1).mapPartitions(partial(serve, task)).collect()
        return found[0]

    def _outcome(self, lease: Lease, answer: Mapping[str, Any]) -> tuple[Outcome, str]:
        """Interpret a task's result: return the lease's outcome, and a warning to log or an empty string."""
        host = answer["host"]
        if "refused" in answer:
            return Refused(f"{host} cannot serve {self.settings.service}: {answer['refused']}"), ""
        unreachable = answer["unreachable"]
        if unreachable is None or self._load is None:  # if the driver cannot reach it either, that is logged elsewhere
            return Served(answer["served"]), ""
        where = f"slot {lease.slot} on {host} has not reached {self._where}: {unreachable}"
        return Served(
            answer["served"]
        ), f"{where}; pass an address that executors can reach with --broker-from-executors"

    def _tag(self, lease: int) -> str:
        return f"{self._run_id}-{lease}"

    def _is_running(self, lease: int) -> bool:
        """Whether the lease's task is running on an executor."""
        tracker = self._context.statusTracker()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._tag(lease)))
        stages = (tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds)
        return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

    @property
    def _where(self) -> str:
        return f"the broker at {' or '.join(self.settings.addresses)}"

    def _explain_silence(self, slot: int, *, runs: bool) -> str:
        if runs:
            return (
                f"slot {slot} is running but has not reported for {SILENCE_SECONDS:g} s: executors may not reach "
                f"{self._where}; pass another address with --broker-from-executors"
            )
        return f"slot {slot} is waiting for a core of {self._master}: it has too few, or its executors do not start"

    # ── the broker's load ────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Pass the broker's load and the number of cores on to the slots, until the fleet ends."""
        settings = self.settings
        with Client(settings.broker, timeout=1.0, retries=0, heartbeat=settings.heartbeat, key=settings.keys) as client:
            while not self._ended.wait(WATCH_SECONDS):
                load = self._fetch_load(client)
                most = self._max_slots_now()
                with self._changed:
                    before = self._slots.wanted
                    self._load = load
                    if most is not None:
                        self._slots.bound(most)
                    self._slots.observe(load, time.monotonic())
                    now = self._slots.wanted
                    self._changed.notify_all()
                if load is not None and now != before:
                    log.info("scaling from %d to %d slots; %d requests queued", before, now, load.queued)

    def _fetch_load(self, client: Client) -> Load | None:
        try:
            answer = loads(client.request("mmi.services", wire.service_name(self.settings.service))[0])
            row: Mapping[str, Any] = next(iter(answer["services"]), {})
            return Load.from_row(row)
        except ZmdpError:
            return None
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._warn_once(
                f"the broker at {' or '.join(self.settings.brokers)} does not report its queues, so the fleet does not "
                f"scale ({error!r})"
            )
            return None

    # ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_slots(self) -> Slots:
        settings = self.settings
        cores = self._cores()
        most = self._max_slots(cores or 0)
        fixed = on_this_machine(self._master) and cores is not None
        needed = max(1, settings.minimum)
        if fixed and most < needed:
            raise SettingError(
                f"{self._master} has {cores} cores, of which {settings.reserve} are reserved (--reserve): that leaves "
                f"{max(most, 0)} for slots, but {needed} are needed; use more cores or --reserve 0"
            )
        if fixed and settings.maximum is not None and most < settings.maximum:
            log.warning("--max %d exceeds the %d slots for which there are cores", settings.maximum, most)
        return Slots(settings.minimum, max(most, needed), settings.lease, settings.idle)

    def _max_slots(self, cores: int) -> int:
        """Return the number of slots for which there are cores."""
        each = int(self._conf("spark.task.cpus", "1"))
        most = (cores - self.settings.reserve) // each
        return most if self.settings.maximum is None else min(most, self.settings.maximum)

    def _conf(self, name: str, default: str) -> str:
        return str(self._context.getConf().get(name, default))

    def _max_slots_now(self) -> int | None:
        """Return the number of slots for which there are cores now, or None if that is unknown."""
        try:
            cores = self._cores()
            return None if cores is None else self._max_slots(cores)
        except Exception as error:  # noqa: BLE001 - py4j raises many types when a session ends
            log.debug("cannot tell how many slots fit: %s", error)
            return None

    def _cores(self) -> int | None:
        """Return the number of cores of the cluster, or None if that is unknown."""
        try:
            return cores(self._context, self.settings.maximum)
        except SettingError:
            raise
        except Exception as error:  # noqa: BLE001 - py4j raises many types when a session ends
            log.debug("cannot tell how many cores there are: %s", error)
            return None

    # ── the control service ──────────────────────────────────────────────────────────────────────────────────────────

    def _status(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        del arguments, request
        return self.status()

    def _drain(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        del arguments, request
        if not self._draining:
            log.info("draining, as asked by mdp-spark drain; running requests are finished first")
        self.drain()
        with self._changed:
            return {"draining": True, "running": len(self._slots.rows(time.monotonic()))}

    def _slot(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        del request
        number, lease = arguments.get("slot"), arguments.get("lease")
        if arguments.get("fleet") != self._run_id or not isinstance(number, int) or not isinstance(lease, int):
            return {"drain": False}  # another fleet has the same name, and its driver tells its tasks when to drain
        with self._changed:
            return {"drain": self._slots.report(number, lease, arguments, time.monotonic()) or self._draining}

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _warn_early(self) -> None:
        """Warn about settings that will probably not work."""
        settings = self.settings
        for broker in settings.brokers:
            reason = why_unreachable(broker, settings.keys)
            if reason is not None:
                log.warning("no broker at %s yet: %s; retrying until there is one", broker, reason)
        if not on_this_machine(self._master) and any(map(is_loopback, settings.addresses)):
            log.warning(
                "executors of %s on other machines cannot reach %s; pass another address with --broker-from-executors",
                self._master,
                " or ".join(settings.addresses),
            )

    def _warn_once(self, text: str) -> None:
        """Log a warning, but the same one at most once a minute."""
        now = time.monotonic()
        with self._changed:
            self._warned = {each: at for each, at in self._warned.items() if now < at + REPEAT_WARNING_SECONDS}
            known = text in self._warned
            self._warned.setdefault(text, now)
        if not known:
            log.warning("%s", printable(text))


def cores(context: "SparkContext", slots: int | None = None) -> int:
    """Return the maximum number of cores of an application, according to its settings or its executors.

    `slots` is the intended number of slots, used if dynamic allocation has no limit of its own.

    Raises `SettingError` if there is no limit at all.
    """
    conf, master = context.getConf(), str(context.master)
    if match := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(match[1]) * int(match[2])
    if match := re.fullmatch(r"local(?:\[(\d+|\*)(?:,.*)?\])?", master):
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        most = conf.get("spark.dynamicAllocation.maxExecutors")
        if most is None and slots is not None:
            return slots * int(conf.get("spark.task.cpus", "1") or 1)
        if most is None:
            raise SettingError(
                "dynamic allocation has no limit: set one with --max, or with "
                "--conf spark.dynamicAllocation.maxExecutors=N"
            )
        return int(most) * int(conf.get("spark.executor.cores", "1") or 1)
    if (most := conf.get("spark.cores.max")) is not None:
        return int(most)
    executors, each = conf.get("spark.executor.instances"), conf.get("spark.executor.cores")
    if executors is not None and each is not None:
        return int(executors) * int(each)
    return context.defaultParallelism  # the cores of the executors that have registered


def is_loopback(endpoint: str) -> bool:
    """Whether only programs on this machine can reach the endpoint."""
    host = urlsplit(endpoint).hostname or ""
    return not endpoint.startswith("tcp://") or host == "localhost" or host.startswith("127.") or host == "::1"


# ── failed jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def failure_message(error: BaseException) -> str:
    """Return Spark's complete message about a failed job."""
    java = getattr(error, "java_exception", None)
    return str(error) if java is None else str(java.getMessage() or java.toString())


def classify_failure(text: str) -> Refused | Died:
    """Return what a failed job's message means: the executor cannot serve at all, or it was lost."""
    if "No module named 'zmdp'" in text:
        return Refused("executors cannot import zmdp: ship it with --py-files zmdp.zip, made by `mdp-spark pack`")
    if "PYTHON_VERSION_MISMATCH" in text:
        return Refused(
            f"executors do not run the driver's Python version, {python()}: set PYSPARK_PYTHON to such a Python, or "
            "ship one with --archive"
        )
    if match := re.search(r'Cannot run program "([^"]+)"', text):
        return Refused(
            f"executors have no Python at {match[1]}: name another with --conf spark.pyspark.python=PATH; an "
            "environment shipped with --archive needs the Python that created it at the same path on every machine"
        )
    where = "the job"
    if match := _LOST.search(text):
        where, text = f"executor {match[2]} on {match[1]}", match[3]
    line = _CLASS.sub("", text.split("\n", 1)[0].partition(" Consider setting")[0])
    return Died(f"{where}: {' '.join(line.split())[:300]}")
