"""Titanic as a program: the database, the workers that offer its services, and the parts that execute requests."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

from ...clients import AsyncClient
from ...mdp.errors import RequestError, SettingError
from ...mdp.program.logs import counted
from ...mdp.security.keys import BrokerKey, Key
from ...mdp.transport.endpoints import checked_brokers
from ...workers import AsyncWorker
from ..db import schema, store
from ..db.engine import Database, prepare
from .accept import Submissions
from .counters import DEFAULT_MAX_WAITING, Metrics, Quota
from .cron import Scheduler
from .discovery import Discovery
from .dispatch import Dispatcher
from .fetch import MAX_CALLERS, Callers, Replies
from .outcome import Outcomes, Retention, RetryPolicy
from .service_schedules import ServiceSchedules
from .upkeep import Maintenance

DEFAULT_LEASE_SECONDS: Final = 10.0
DEFAULT_DRAIN_SECONDS: Final = 10.0
MIN_STOP_SECONDS: Final = 2.0
"""How long Titanic's own services may take to end, even if its drain limit is shorter."""
ABORT_SECONDS: Final = 0.2
"""How long they may take to end once they are given up."""
CONCURRENCY: Final = 256
"""Maximum number of requests that each of Titanic's services handles at a time, in addition to callers that wait."""
DEFAULT_MAX_DEATHS: Final = 5
MIN_LEASE_SECONDS: Final = 2.0
WORKER_NAME: Final = "titanic, database "
"""The name of Titanic's workers, before the identity of its database."""
COMPARE_SECONDS: Final = 60.0
"""Interval at which Titanic looks for others at the broker that use another database."""
NOTHING: Final[dict[str, Any]] = {"broker": False, "claimed": 0, "in_flight": 0, "unstored": 0, "services": 0}
"""The counts that `snapshot` returns before `run`."""

log = logging.getLogger("zmdp.titanic")


class _Parts(NamedTuple):
    """The parts of a running Titanic, each of which knows only some of those above it."""

    callers: Callers
    dispatcher: Dispatcher
    discovery: Discovery
    maintenance: Maintenance
    scheduler: Scheduler
    service_schedules: ServiceSchedules
    submissions: Submissions
    replies: Replies


class Server:
    """Stores requests and replies in a database, and executes the requests.

    Args:
        db: URL or SQLite file.  A SQLite file is created and migrated; PostgreSQL needs `titanic db upgrade` first.
        broker: Endpoint of the broker.  With several, Titanic registers at each, and sends requests through the first
            that answers.
        lease: Seconds after a crash until another Titanic may take over its running requests.
        max_waiting: Maximum number of requests that have not ended.
        max_waiting_per_service: Maximum number of these to one service; half of `max_waiting` by default.
        max_deaths: Number of workers lost while they handled a request after which the request fails.
        ttl: Seconds to keep results of requests without a ttl of their own, or a `Retention`, which may differ by
            service and for failed requests; None keeps them until they are closed.
        service_schedules: Whether to take up the schedules that services declare; by default if Titanic has no key:
            where everybody may submit requests, workers may do it so, too.
        drain_timeout: Seconds that `stop` waits for running requests, of callers and of services.
        heartbeat: Seconds between heartbeats.
        liveness: Silent heartbeat intervals after which the broker is considered dead.
        key: The secret certificate file of Titanic's key, for brokers that require one (docs/how-to/security.md).
        broker_key: The broker's public key, which `key` needs: a certificate file, or 40 characters of Z85.  Brokers
            that Titanic uses together need the same key.

    Raises:
        SettingError: An argument is invalid.
        SchemaError: The tables have another version.
    """

    def __init__(
        self,
        db: str = schema.DEFAULT_DB,
        *,
        broker: str | Sequence[str] | None = None,
        lease: float = DEFAULT_LEASE_SECONDS,
        max_waiting: int = DEFAULT_MAX_WAITING,
        max_waiting_per_service: int | None = None,
        max_deaths: int = DEFAULT_MAX_DEATHS,
        ttl: float | Retention | None = None,
        service_schedules: bool | None = None,
        drain_timeout: float = DEFAULT_DRAIN_SECONDS,
        heartbeat: float = 1.0,
        liveness: int = 5,
        key: Key | None = None,
        broker_key: BrokerKey | None = None,
    ) -> None:
        if lease < MIN_LEASE_SECONDS:
            raise SettingError(f"lease is {lease!r}: it must be {MIN_LEASE_SECONDS:g} seconds or more")
        retention = ttl if isinstance(ttl, Retention) else Retention(ttl)
        if retention.default is not None and not retention.default > 0:
            raise SettingError(f"ttl is {retention.default!r}: it must be a number of seconds above 0, or None")
        counts = {
            "max_waiting": max_waiting, "max_waiting_per_service": max_waiting_per_service, "max_deaths": max_deaths
        }  # fmt: skip
        for name, count in counts.items():
            if count is not None and count < 1:
                raise SettingError(f"{name} is {count!r}: it must be 1 or more")
        self.url = schema.database_url(db)
        self.metrics = Metrics()
        """Its metrics since it was created."""
        self._parts: _Parts | None = None
        self._brokers, keys = checked_brokers(broker, key, broker_key)
        self._lease = lease
        self._max_waiting = max_waiting
        self._max_per_service = max_waiting_per_service or -(-max_waiting // 2)
        self._max_deaths = max_deaths
        self._retention = retention
        self._follows_services = keys is None if service_schedules is None else service_schedules
        self._drain_timeout = drain_timeout
        self._drain_until: float | None = None
        """When the drain must end, on the event loop's clock."""
        self._workers: list[AsyncWorker] = []
        self.cut_off = False
        """Whether `run` ended before all running requests had."""
        self._connection: dict[str, Any] = {"heartbeat": heartbeat, "liveness": liveness, "key": keys or ""}
        self._stopping = asyncio.Event()
        self._clock = store.Clock()
        self._engine, identity = prepare(self.url, self._clock, lease)
        self._worker_name = WORKER_NAME + identity

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Shut down, once running requests have finished or `drain_timeout` has passed."""
        self._stopping.set()

    def snapshot(self) -> dict[str, Any]:
        """Return its metrics and its current numbers of requests, ready for JSON.  Any thread may call it."""
        return {**self.metrics.as_dict(), **self._counts(), "stopping": self.stopping}

    def _counts(self) -> dict[str, Any]:
        if self._parts is None:
            return NOTHING
        return {"broker": self._parts.discovery.answered, **self._parts.dispatcher.counts()}

    def unfinished(self) -> str:
        """Describe the requests that are running.  Any thread may call it."""
        callers = sum(len(worker.requests) for worker in self._workers)
        in_flight = self._counts()["in_flight"]
        found = []
        if callers:
            found.append(f"{counted(callers, 'request')} to Titanic itself")
        if in_flight:
            found.append(f"{counted(in_flight, 'request')} to other services, which are executed again")
        return " and ".join(found) or "waiting for the broker or the database"

    def abort(self) -> None:
        """Shut down without waiting for running requests, even if `stop` was called before."""
        self._drain_timeout = 0.0
        self.stop()

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is called.  Calls `ready` once the workers have started."""
        async with AsyncExitStack() as ending:  # which ends in reverse order
            client = await ending.enter_async_context(AsyncClient(self._brokers, timeout=None, **self._connection))
            database = Database(self._engine, self._clock, self.metrics.commits)
            ending.push_async_callback(database.close)
            parts = self._parts = self._connect(client, database)
            workers = self._workers = [
                AsyncWorker(
                    name,
                    handler,
                    broker=broker,
                    concurrency=concurrency,
                    name=self._worker_name,
                    dialect=True,
                    **self._connection,
                )
                for broker in self._brokers
                for name, handler, concurrency in (
                    ("titanic.request", parts.submissions.request, CONCURRENCY + MAX_CALLERS),
                    ("titanic.reply", parts.replies.reply, CONCURRENCY + MAX_CALLERS),
                    ("titanic.close", parts.submissions.close, CONCURRENCY),
                    ("titanic.schedule", parts.scheduler.schedule, CONCURRENCY),
                )
            ]
            running = (
                parts.maintenance.run(), parts.discovery.run(), parts.callers.watch(), parts.scheduler.run(),
                self._compare_databases(client), parts.service_schedules.run(),
            )  # fmt: skip
            tasks = [asyncio.ensure_future(each) for each in running]
            ending.push_async_callback(_cancelled, tasks)
            ending.push_async_callback(self._drain, parts)
            ending.push_async_callback(self._stop_workers, workers)
            ending.callback(parts.callers.end)
            for worker in workers:
                worker.start()
            ready()
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            for each in done:
                each.result()  # these tasks never end by themselves: raises the bug that ended one

    def _connect(self, client: AsyncClient, database: Database) -> _Parts:
        lease = store.Lease(secrets.token_hex(8), self._lease)
        retries = RetryPolicy(
            lease.holder, self._clock, retention=self._retention, max_deaths=self._max_deaths, metrics=self.metrics
        )
        callers = Callers(database.reader)
        replies = Replies(database.reader, callers)
        quota = Quota(self._max_waiting, self._max_per_service)
        outcomes = Outcomes(database.writer, retries, callers, quota, self.metrics)
        dispatcher = Dispatcher(database, client, outcomes, quota, self.metrics, lease)
        discovery = Discovery(client, database.writer, dispatcher)
        return _Parts(
            callers,
            dispatcher,
            discovery,
            Maintenance(database, dispatcher, quota, retries, lease),
            Scheduler(database, dispatcher, quota),
            ServiceSchedules(client, database, dispatcher, discovery, follows=self._follows_services),
            Submissions(database, quota, dispatcher, replies, callers, self.metrics),
            replies,
        )

    async def _compare_databases(self, client: AsyncClient) -> None:
        """Log an error while another Titanic at the broker uses another database.  Runs until cancelled."""
        while True:
            try:
                (answer,) = await client.request("mmi.workers", b"titanic.request")
                others = titanics_with_other_database(json.loads(answer)["workers"], self._worker_name)
            except (RequestError, ValueError, TypeError, KeyError) as error:
                log.debug("cannot compare the databases of the broker's Titanics: %s", error)
            else:
                for host, pid in others:
                    log.error(
                        "another Titanic at this broker uses another database (process %s on %s). The broker sends "
                        "callers to either, so they do not find their requests: stop one, or give both the same --db",
                        pid,
                        host,
                    )
            await asyncio.sleep(COMPARE_SECONDS)

    async def _stop_workers(self, workers: Sequence[AsyncWorker]) -> None:
        self._drain_until = asyncio.get_running_loop().time() + self._drain_timeout
        for worker in workers:
            worker.stop()
        waiting = [asyncio.ensure_future(worker.wait()) for worker in workers]
        try:
            _, running = await asyncio.wait(waiting, timeout=max(self._drain_timeout, MIN_STOP_SECONDS))
            if running:
                self.cut_off = True
                log.error("gave up %s", self.unfinished())
                for worker in workers:
                    worker.abort()
                await asyncio.wait(running, timeout=ABORT_SECONDS)
        finally:
            await _cancelled([each for each in waiting if not each.done()])

    async def _drain(self, parts: _Parts) -> None:
        left = 0.0
        if self._drain_until is not None and self._drain_timeout:
            left = max(0.0, self._drain_until - asyncio.get_running_loop().time())
        parts.dispatcher.stop()
        if await parts.dispatcher.drain(left):
            self.cut_off = True


def titanics_with_other_database(workers: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, int]]:
    """Return host and process of each Titanic whose workers do not have this name.

    Args:
        workers: The workers of `titanic.request`, as `mmi.workers` lists them.
        name: The name of our own workers.
    """
    return sorted(
        {
            (str(each["host"]), int(each["pid"]))
            for each in workers
            if str(each["name"]).startswith(WORKER_NAME) and each["name"] != name
        }
    )


async def _cancelled(tasks: Sequence["asyncio.Future[None]"]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
