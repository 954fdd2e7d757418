"""Runs Titanics in threads of this process, and reads their databases."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import sqlalchemy as sa
import zmq
from support.peers import Bench, X1Client, X1Worker
from support.processes import TIMEOUT_SECONDS, eventually, process

from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.titanic import Ticket
from zmdp.titanic.db import schema, store
from zmdp.titanic.operator import admin
from zmdp.titanic.server.counters import Metrics, Quota
from zmdp.titanic.server.dispatch import Dispatcher
from zmdp.titanic.server.outcome import Outcomes, Retention, RetryPolicy
from zmdp.titanic.server.program import Server
from zmdp.titanic.server.upkeep import Maintenance

BEATS: dict[str, Any] = {"heartbeat": 0.2, "liveness": 600}
"""For all peers of a test: long enough that a slow machine makes none seem dead."""
LIMITS = Limits(**BEATS)
QUICK = ("--heartbeat", "0.2", "--liveness", "600")
"""The same for commands."""


@contextmanager
def running_bench() -> Iterator[Bench]:
    """Run a broker in a thread, for hand-written peers."""
    context: zmq.Context[Any] = zmq.Context()
    with ExitStack() as stack:
        stack.callback(context.term)
        server = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0, context=context))
        bench = Bench(server, context)
        stack.callback(bench.close)
        yield bench
        assert server.broker.stats.internal_errors == 0


@contextmanager
def serving(endpoint: str, db: str, **settings: Any) -> Iterator[Server]:
    """Run a Titanic in a thread; its event loop must report no errors."""
    server = Server(db, broker=endpoint, **{**BEATS, "drain_timeout": 0.0, **settings})
    started = Event()
    loops: list[asyncio.AbstractEventLoop] = []
    complaints: list[dict[str, Any]] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        loops[0].set_exception_handler(lambda loop, context: complaints.append(context))
        await server.run(started.set)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: asyncio.run(serve()))
        running.add_done_callback(lambda done: started.set())
        try:
            assert started.wait(TIMEOUT_SECONDS)
            yield server
        finally:
            if not running.done():
                loops[0].call_soon_threadsafe(server.stop)
            running.result()
    assert complaints == []


@contextmanager
def titanic_at(endpoint: str, db: Path | str, *options: str, **env: str) -> Iterator[SimpleNamespace]:
    """Run `titanic serve --http`; yield its `process`, its `url`, and a client for it, `http`."""
    at = ("--broker", endpoint, "--db", str(db), "--http", "127.0.0.1:0")
    with process("titanic", "serve", *at, *QUICK, *options, **env) as running:
        url = running.line("http://", "stdout")
        with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http:
            eventually(lambda: http.get("/readyz").status_code == 200)
            yield SimpleNamespace(process=running, url=url, http=http)


@contextmanager
def connected(db: str) -> Iterator[sa.Connection]:
    """Yield a connection in a transaction."""
    engine = sa.create_engine(schema.database_url(db), poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def stored(db: str) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of the tables, oldest first."""
    with connected(db) as connection:
        return {
            name: [dict(row) for row in connection.execute(sa.text(f"SELECT * FROM titanic_{name} {order}")).mappings()]
            for name, order in (
                ("requests", "ORDER BY id"),
                ("parts", "ORDER BY request, attempt, number"),
                ("keys", "ORDER BY service, key"),
            )
        }


def row(db: str, uuid: str) -> dict[str, Any]:
    """Return everything about one request."""
    with connected(db) as connection:
        found = admin.show(connection, UUID(uuid))
    assert found is not None
    return found


def state(db: str, uuid: str) -> str:
    """Return the state of one request."""
    return str(row(db, uuid)["state"])


def lease(db: str) -> float:
    """Return when the last of the leases expires."""
    with connected(db) as connection:
        return float(connection.scalar(sa.text("SELECT max(lease) FROM titanic_holders")) or 0)


def operate(db: str, what: Callable[..., Any], *uuids: str) -> list[str]:
    """Apply `admin.retry` or `admin.cancel` to requests; return the UUIDs of those that changed."""
    with connected(db) as connection:
        return [uuid.hex for uuid in what(connection, [UUID(uuid) for uuid in uuids], time.time())]


def given(worker: X1Worker) -> tuple[bytes, bytes]:
    """Return the X1 worker's next request: the address, and the first frame of the body."""
    while (message := worker.command())[2] == worker.CANCEL:
        pass  # it has met the FINAL
    _, header, command, address, _, _, _, body, *_ = message
    assert (header, command) == (b"MDPWX1", worker.REQUEST)
    return address, body


def answer(worker: X1Worker, reply: bytes = b"done") -> bytes:
    """Let the worker execute its next request, and return the first frame of its body."""
    address, body = given(worker)
    worker.final(address, reply)
    return body


def follow(client: X1Client, ticket: Ticket, start: int = 0) -> None:
    """Let a handwritten X1 client follow a request live."""
    options = {"partials": True, "wait": True, "from": start}
    client.request(b"titanic.reply", ticket.uuid.encode(), options=json.dumps(options).encode())


class StoppedClock(store.Clock):
    """A clock that stands still, whatever the database's clock says."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self._now = now

    def now(self) -> float:
        return self._now


def parts_of(writer: Any = None) -> SimpleNamespace:
    """Return what executes requests, without a broker, and with `writer` for a database."""
    database: Any = SimpleNamespace(writer=writer, keyed=writer, clock=store.Clock())
    nothing: Any = None
    lease = store.Lease("me", 10)
    metrics = Metrics()
    quota = Quota(9, 9)
    retries = RetryPolicy("me", database.clock, retention=Retention(), max_deaths=1, metrics=metrics)
    outcomes = Outcomes(writer, retries, nothing, quota, metrics)
    dispatcher = Dispatcher(database, nothing, outcomes, quota, metrics, lease)
    maintenance = Maintenance(database, dispatcher, quota, retries, lease)
    return SimpleNamespace(dispatcher=dispatcher, maintenance=maintenance)
