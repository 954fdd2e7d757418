"""The services of a batch: `spark.sql` runs queries over a catalogue, `spark.job` named Python jobs.

`runner.py` describes the replies.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from ...clients import Client
from ...mdp.codes import Code
from ...mdp.errors import RequestRejected, RequestTimeout, ServiceError, SettingError
from ...mdp.limits import DEFAULT_ENDPOINT
from ...mdp.program.control_services import SPARK
from ...mdp.security.keys import ClientKeys
from ...version import __version__
from ...workers import Request, Worker
from ..client.frames import FETCH_PREFIX
from ..drivers import Operation, ask_all, control_service
from .catalogue.named_jobs import describe_job
from .catalogue.offer import Offer
from .failures import unprocessable
from .fetching import handle
from .job_history import History
from .parsing import parse_call, parse_query
from .progress import spark_ui
from .results.media import ABOUT
from .results.sending import Results
from .runner import JobRunner
from .running_jobs import POLL_SECONDS
from .sessions import SessionPool

ASK_SECONDS: Final = 2.0
"""How long another driver may take to report its status."""
KNOWN_SECONDS: Final = 5.0
"""How long the broker may take to know this batch: it never does if the batch's role may not offer that."""

_UNKNOWN: Final = "whether other batches serve another catalogue under the same names is unknown: %s"

DEFAULT_QUERY_BYTES: Final = 1 << 20

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True)
class BatchSettings:
    """How a batch reaches its broker, and the names under which it serves.

    Args:
        name: the driver's name, for `mdp-spark status` and `drain`.
        broker: endpoint of the broker, or several in order of preference.
        prefix: first part of the services' names.
        concurrency: maximum number of concurrent requests of each service.
        max_query: maximum number of bytes of a query and its settings: Spark plans a query without interruption.
        master: the Spark master, which `mdp-spark status` shows.
        heartbeat: interval in seconds.
        liveness: silent heartbeat intervals after which the broker is considered dead.
        keys: the driver's keys, for brokers that require them.
    """

    name: str
    broker: str | Sequence[str] = DEFAULT_ENDPOINT
    prefix: str = "spark"
    concurrency: int = 4
    max_query: int = DEFAULT_QUERY_BYTES
    master: str = ""
    heartbeat: float = 1.0
    liveness: int = 5
    keys: ClientKeys | None = field(default=None, repr=False)


class Batch:
    """A Spark driver that offers its services while the `with` block lasts.

    Args:
        settings: its name, its broker, and how much it does at once.
        pool: the sessions; at most one request runs on each.
        results: where large results go.
        offer: the tables and the named jobs.
        load: loads the offer again, for `reload`, and raises `SettingError` if it is invalid.
        history: where jobs are recorded; closed at the end of the block.
    """

    def __init__(
        self, settings: BatchSettings, pool: SessionPool, results: Results, offer: Offer, *, load: Callable[[], Offer],
        history: History,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.draining = threading.Event()
        """Set when the driver should drain."""
        self._pool = pool
        self._offer = offer
        self._load = load
        self._history = history
        self._serving = False
        self._runner = JobRunner(settings.name, pool, results, history)
        self.running = self._runner.running
        """The running jobs."""
        handlers = {
            f"{settings.prefix}.sql": (self.sql, ABOUT),
            f"{settings.prefix}.job": (self.job, ABOUT),
            FETCH_PREFIX + settings.name: (self.fetch, None),
        }
        self._workers = [
            Worker(
                service, handler, broker=settings.broker, concurrency=settings.concurrency,
                heartbeat=settings.heartbeat, liveness=settings.liveness, key=settings.keys, about=about,
            )
            for service, (handler, about) in handlers.items()
        ]  # fmt: skip
        operations: dict[str, Operation] = {
            "status": lambda arguments, request: self._status(request),
            "catalogue": lambda arguments, request: self._show_catalogue(request),
            "cancel": lambda arguments, request: {"cancelled": self.running.cancel(str(arguments.get("job")), request)},
            "reload": lambda arguments, request: self._reload(),
            "drain": lambda arguments, request: self._drain(),
            "history": self._show_history,
        }
        self._control = control_service(settings.name, operations, broker=settings.broker, keys=settings.keys)

    @property
    def services(self) -> list[str]:
        """Return the names of the services."""
        return [worker.service.decode() for worker in self._workers]

    def __enter__(self) -> Self:
        self._control.__enter__()
        try:
            self.serve()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        for worker in self._workers:
            worker.wait()
        self._control.__exit__(None, None, None)
        self._history.close()

    def serve(self) -> None:
        """Begin to serve, if that has not happened: call it again as long as no broker answers.

        Raises `SettingError` if another batch serves something else under the same names.
        """
        if self._serving:
            return
        try:
            others = self._rivals()
        except RequestTimeout:
            return
        if others:
            raise SettingError(
                f"{others[0]} already serves {self.services[0]} and {self.services[1]} with another catalogue, and "
                "callers would reach either: choose another --prefix, give both the same tables, catalogs, jobs and "
                f"roles, or drain the other one first (mdp-spark drain {others[0]})"
            )
        self._serving = True
        for worker in self._workers:
            worker.start()

    def _rivals(self) -> list[str]:
        """Return the names of the batches that serve something else under the same names.

        Raises `RequestTimeout` if the broker does not answer.
        """
        try:
            with Client(self.settings.broker, timeout=ASK_SECONDS, retries=0, key=self.settings.keys) as client:
                # Once the broker knows this batch, at least one of two that start at the same time sees the other.
                until = time.monotonic() + KNOWN_SECONDS
                while not client.available(SPARK + self.settings.name):
                    if time.monotonic() >= until:
                        log.warning(_UNKNOWN, f"the broker does not know {SPARK}{self.settings.name}: see its log")
                        return []
                    time.sleep(POLL_SECONDS)
                answers = dict(ask_all(client, "status"))
        except RequestRejected as error:
            log.warning(_UNKNOWN, error)
            return []
        return [
            name
            for name, status in answers.items()
            if name != self.settings.name
            and self.services[0] in status.get("services", ())  # fleets have one service only
            and not status["draining"]
            and status.get("catalogue") != self._offer.digest
        ]

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the running requests after `stop`.  Return whether all have ended."""
        until = time.monotonic() + timeout
        return all(worker.wait(max(0.0, until - time.monotonic())) for worker in self._workers)

    def stop(self) -> None:
        """Take no more requests; running ones continue."""
        self.draining.set()
        for worker in self._workers:
            worker.stop()

    def reload(self) -> None:
        """Load the tables and the jobs again; running requests keep those that they began with.

        Raises `SettingError` if the file is invalid, and logs it; then nothing changes.
        """
        try:
            offer = self._load()
        except SettingError as error:
            log.error("not reloaded: %s", error)
            raise
        self._pool.configure(offer.catalogue.settings)
        self._offer = offer
        log.info("reloaded; %s", ", ".join(f"{what}: {count}" for what, count in offer.counts.items()))
        with suppress(RequestTimeout):
            for name in self._rivals():
                log.warning("%s serves the same names with another catalogue until it is reloaded too", name)

    # ── the services ─────────────────────────────────────────────────────────────────────────────────────────────────

    def sql(self, request: Request) -> Iterator[bytes | list[bytes]]:
        """Handle a request to `spark.sql`."""
        size, most = sum(map(len, request)), self.settings.max_query
        if size > most:
            raise ServiceError(
                Code.TOO_LARGE,
                f"the query and its parameters have {size} bytes; the batch allows {most} (--max-query). Join a table "
                "instead of listing values",
            )
        return self._runner.run(request, parse_query(request), self._offer)

    def job(self, request: Request) -> Iterator[bytes | list[bytes]]:
        """Handle a request to `spark.job`."""
        offer = self._offer
        return self._runner.run(request, parse_call(request, offer.jobs_for(request)), offer)

    def fetch(self, request: Request) -> Iterator[bytes]:
        """Handle a request for a large result."""
        return handle(request, self._history)

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _status(self, request: Request) -> Mapping[str, Any]:
        offer = self._offer
        return {
            "kind": "batch", "name": self.settings.name, "version": __version__, "master": self.settings.master,
            "services": self.services, "draining": self.draining.is_set(), "ui": spark_ui(),
            "catalogue": offer.digest, "catalogs": sorted(offer.catalogue.catalogs),
            "tables": offer.catalogue.role_of(request).readable(offer.catalogue.tables),
            "jobs": sorted(offer.jobs_for(request)), **self.running.status(request),
        }  # fmt: skip

    def _show_catalogue(self, request: Request) -> Mapping[str, Any]:
        offer = self._offer
        tables = offer.catalogue.tables
        return {
            "tables": [
                {"name": name, "format": tables[name].format}
                for name in offer.catalogue.role_of(request).readable(tables)
            ],
            "catalogs": sorted(offer.catalogue.catalogs),
            "jobs": [describe_job(name, function) for name, function in sorted(offer.jobs_for(request).items())],
        }

    def _reload(self) -> Mapping[str, Any]:
        try:
            self.reload()
        except SettingError as error:
            raise unprocessable(str(error)) from None
        return self._offer.counts

    def _show_history(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        job = arguments.get("job")
        return {"jobs": self._history.rows(request, None if job is None else str(job))}

    def _drain(self) -> Mapping[str, Any]:
        log.info("draining, as asked by mdp-spark drain; running jobs are finished first")
        self.draining.set()
        return {"running": len(self.running)}
