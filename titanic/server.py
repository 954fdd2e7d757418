"""Titanic as a program: the database, the three services as workers of the broker, and the dispatcher."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from sqlalchemy.engine import Engine

from ..clients import AsyncClient
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import SettingError
from ..workers import AsyncHandler, AsyncWorker
from . import schema
from .batches import Batches
from .dispatcher import Dispatcher
from .service import MAX_WAITING, Service
from .store import store
from .store.clock import Clock

DEFAULT_LEASE: Final = 10.0
DEFAULT_DRAIN: Final = 10.0
CONCURRENCY: Final = 256
"""Requests that titanic.request and titanic.close each handle at a time, and so the most in one transaction."""
DEFAULT_MAX_WAITING: Final = 1_000_000
KEY_PATIENCE: Final = 1.0
"""Seconds that a request with a key waits for somebody else who has entered the same and not committed."""
SHORTEST_LEASE: Final = 2.0
WRITES: Final = (
    store.accept, store.add_parts, store.finish, store.put_back, store.close, store.look, store.claim, store.release,
    store.pending_after,
)  # fmt: skip
"""What is done in one transaction, in this order: a PARTIAL is there before its FINAL."""
READS: Final = (store.fetch, store.fetch_reply, store.fetch_parts, store.states)

log = logging.getLogger("zmdp.titanic")


class Server:
    """Keeps requests and replies in the database `db`, for callers of the broker at `broker`.

    A SQLite file is made, and brought up to date, if need be; PostgreSQL must have been (`titanic db upgrade`).
    `lease` (seconds) is how long a Titanic that has died keeps its requests from others.  `max_waiting` requests may
    wait to be done.
    `ttl` (seconds) is for how long replies are kept whose requests do not say; None for until they are closed.
    `drain_timeout` (seconds) is how long `stop` waits for requests that are under way.

    Raises `SettingError`, and `SchemaError` if the tables are not the right ones.
    """

    def __init__(
        self,
        db: str = schema.DEFAULT_DB,
        *,
        broker: str = DEFAULT_ENDPOINT,
        lease: float = DEFAULT_LEASE,
        max_waiting: int = DEFAULT_MAX_WAITING,
        ttl: float | None = None,
        drain_timeout: float = DEFAULT_DRAIN,
        heartbeat: float = 1.0,
        liveness: int = 5,
    ) -> None:
        if lease < SHORTEST_LEASE:
            raise SettingError(f"lease is {lease!r}: it takes {SHORTEST_LEASE:g} seconds or more")
        if ttl is not None and not ttl > 0:
            raise SettingError(f"ttl is {ttl!r}: it takes a number of seconds above 0, or None")
        if max_waiting < 1:
            raise SettingError(f"max_waiting is {max_waiting!r}: it takes a number of requests, 1 or more")
        self.url = schema.database_url(db)
        self._broker = broker
        self._lease = lease
        self._max_waiting = max_waiting
        self._ttl = ttl
        self._drain_timeout = drain_timeout
        self._beats: dict[str, Any] = {"heartbeat": heartbeat, "liveness": liveness}
        self._stopping = asyncio.Event()
        self._writing = self._prepared()

    def _prepared(self) -> Engine:
        engine = schema.open_engine(self.url, create=True)
        try:
            if schema.is_sqlite(self.url):
                before, now = schema.upgrade(engine)
                if before != now:
                    log.info("%s: tables of version %s, before: %s", schema.shown(self.url), now, before or "none")
            else:
                self._check(engine)
        finally:
            engine.dispose()  # it opens another connection when it is needed
        return engine

    def _check(self, engine: Engine) -> None:
        with engine.connect() as connection:
            schema.check(connection, self.url)
            if connection.exec_driver_sql("SHOW fsync").scalar() != "on":
                log.warning("the PostgreSQL server runs with fsync off: what it commits may not survive a power cut")

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """End: what is under way is finished, for `drain_timeout` seconds."""
        self._stopping.set()

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is called; `ready` is called once it does."""
        async with AsyncExitStack() as ending:  # what begins last ends first
            client = await ending.enter_async_context(AsyncClient(self._broker, timeout=None, **self._beats))
            reader = Batches("titanic-reader", schema.open_engine(self.url, write=False), READS)
            ending.push_async_callback(reader.close)
            writer = Batches("titanic-writer", self._writing, WRITES)
            ending.push_async_callback(writer.close)
            keyed = writer
            if not schema.is_sqlite(self.url):
                # A key may be held by a program that has not committed yet: nobody else shall wait for that.
                engine = schema.open_engine(self.url, lock_timeout=KEY_PATIENCE)
                keyed = Batches("titanic-keys", engine, (store.accept,))
                ending.push_async_callback(keyed.close)
            clock = Clock()
            dispatcher = Dispatcher(
                client, writer, clock, lease=self._lease, ttl=self._ttl, max_waiting=self._max_waiting,
                changed=lambda uuid: service.changed(uuid),  # noqa: PLW0108 - there is no service yet
            )  # fmt: skip
            service = Service(
                writer, keyed, reader, clock,
                room=dispatcher.room, accepted=dispatcher.accepted, gone=dispatcher.gone,
            )  # fmt: skip
            workers = [
                self._worker("titanic.request", service.request, CONCURRENCY),
                self._worker("titanic.reply", service.reply, CONCURRENCY + MAX_WAITING),
                self._worker("titanic.close", service.close, CONCURRENCY),
            ]
            rounds = [asyncio.ensure_future(each) for each in (dispatcher.run(), service.watch())]
            ending.push_async_callback(_cancelled, rounds)
            ending.push_async_callback(dispatcher.drain, self._drain_timeout)
            ending.push_async_callback(_stopped, workers)
            ending.callback(service.end)
            for worker in workers:
                worker.start()
            ready()
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                done, _ = await asyncio.wait([*rounds, stopping], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            for each in done:
                each.result()  # of a round, which never ends by itself: a defect, which is told

    def _worker(self, name: str, handler: AsyncHandler, concurrency: int) -> AsyncWorker:
        return AsyncWorker(name, handler, broker=self._broker, concurrency=concurrency, dialect=True, **self._beats)


async def _stopped(workers: Sequence[AsyncWorker]) -> None:
    for worker in workers:
        worker.stop()
    await asyncio.gather(*(worker.wait() for worker in workers))


async def _cancelled(tasks: Sequence["asyncio.Future[None]"]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
