"""Measure Titanic with real processes on this machine: `python bench/titanic.py [1 2 3 4]`.

1. Durable accepts per second, pipelined callers, on SQLite (FULL sync) and PostgreSQL (fsync on), compared with a loop
   of SQLAlchemy Core's executemany that inserts the same rows in batches as large as Titanic's, and with one commit per
   row.
2. Durable round trips per second: accepted, executed by an echo worker, fetched.
3. The time to accept and to fetch, one after the other, with 1,000,000 completed requests and with an empty store.
4. A service that takes 10 s with a long queue, and a fast one: the fast one's round trips with and without the slow
one.

Compare ratios, not absolute numbers, which depend on the machine and its load.
"""

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.postgres import cluster
from x1 import start_broker, start_worker

from zmdp.clients import AsyncClient
from zmdp.titanic import AsyncTitanic, schema
from zmdp.titanic.store import tables
from zmdp.titanic.uuids import new_uuid

BIN = Path(sys.executable).parent
BODY = b"x" * 32
OUTSTANDING = 256
SECONDS = 5.0
ROUNDS = 3
FINISHED = 1_000_000


class Database:
    """An empty database of one kind, on which Titanics run."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.engine = schema.open_engine(schema.database_url(url), create=True)
        schema.upgrade(self.engine)

    @contextmanager
    def titanic(self, endpoint: str, found: dict[str, float] | None = None) -> Iterator[None]:
        """Run `titanic serve`; afterwards `found["batch"]` is its average number of operations per transaction."""
        command = [str(BIN / "titanic"), "serve", "--db", self.url, "--broker", endpoint]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if "serving titanic.request" in line:
                break
        try:
            yield
        finally:
            process.terminate()
            told = process.stderr.read()
            process.wait()
            counts = re.search(r"titanic-writer: (\d+) jobs in (\d+) transactions", told)
            if found is not None and counts:
                found["batch"] = int(counts[1]) / max(1, int(counts[2]))


@contextmanager
def databases() -> Iterator[list[Database]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        postgres = stack.enter_context(cluster(fsync=True))
        name = stack.enter_context(postgres.database())
        found = [Database("SQLite", f"sqlite:///{folder}/titanic.db"), Database("PostgreSQL", postgres.url(name))]
        yield found
        for each in found:
            each.engine.dispose()


def median(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


async def many(ask: Callable[[], Any], outstanding: int, seconds: float) -> float:
    """Return how often per second `ask` succeeds with this many at a time."""
    until, done = time.perf_counter() + seconds, 0

    async def one_after_the_other() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await ask()
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(outstanding)))
    return done / (time.perf_counter() - started)


# ── 1 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bare_loop(database: Database, batch: int, seconds: float) -> float:
    """Return the rows per second that executemany inserts, with one commit per `batch` rows."""
    table, inserted = tables.REQUESTS, 0
    started = time.perf_counter()
    with database.engine.connect() as connection:
        while time.perf_counter() - started < seconds:
            now = time.time()
            connection.execute(
                sa.insert(table),
                [
                    {
                        "uuid": new_uuid(), "service": "nobody", "state": "pending", "priority": 0, "created": now,
                        "due": now, "attempts": 0, "failures": 0, "retries": 0, "body": BODY,
                    }
                    for _ in range(batch)
                ],
            )  # fmt: skip
            connection.commit()
            inserted += batch
    return inserted / (time.perf_counter() - started)


async def accepts(endpoint: str, outstanding: int) -> float:
    async with AsyncClient(endpoint) as client:
        return await many(lambda: client.request("titanic.request", b"nobody", BODY), outstanding, SECONDS)


def accepting(database: Database) -> None:
    with ExitStack() as stack:
        _, endpoint = start_broker(stack)
        found: dict[str, float] = {}
        rates: dict[str, list[float]] = {}
        batch = 0
        for _ in range(ROUNDS):
            with database.titanic(endpoint, found):
                rates.setdefault("titanic", []).append(asyncio.run(accepts(endpoint, OUTSTANDING)))
            batch = batch or max(1, round(found["batch"]))
            rates.setdefault(f"executemany, {batch} per commit", []).append(bare_loop(database, batch, SECONDS))
            rates.setdefault("one commit per request", []).append(bare_loop(database, 1, SECONDS))
            with database.engine.begin() as connection:
                connection.execute(sa.delete(tables.REQUESTS))
        ours = statistics.median(rates["titanic"])
        print(f"\n1. {database.name}: durable accepts per second, {OUTSTANDING} outstanding:")
        for name, values in rates.items():
            ratio = "" if name == "titanic" else f"   titanic ÷ this: {ours / statistics.median(values):.2f}"
            print(f"   {name:32} {median(values):>24}{ratio}", flush=True)


# ── 2 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def round_trips(endpoint: str, outstanding: int) -> float:
    async with AsyncClient(endpoint, timeout=60) as client:
        titanic = AsyncTitanic(client)

        async def one() -> None:
            ticket = await titanic.submit("echo", BODY)
            assert await ticket.result() == [BODY]

        return await many(one, outstanding, SECONDS)


def there_and_back(database: Database) -> None:
    with ExitStack() as stack:
        _, endpoint = start_broker(stack)
        for _ in range(4):
            start_worker(stack, endpoint, "zmdp.workers.echo:worker")
        with database.titanic(endpoint):
            for outstanding in (1, 64):
                rates = [asyncio.run(round_trips(endpoint, outstanding)) for _ in range(ROUNDS)]
                print(f"2. {database.name}: durable round trips per second, {outstanding} outstanding: {median(rates)}")


# ── 3 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def times(endpoint: str) -> dict[str, list[float]]:
    """Return the milliseconds to accept and to fetch, one after the other."""
    found: dict[str, list[float]] = {"accept": [], "fetch": []}
    async with AsyncClient(endpoint) as client:
        for _ in range(1000):
            begun = time.perf_counter()
            _, number = await client.request("titanic.request", b"nobody", BODY)
            accepted = time.perf_counter()
            await client.request("titanic.reply", number)
            found["accept"].append(1000 * (accepted - begun))
            found["fetch"].append(1000 * (time.perf_counter() - accepted))
    return found


def fill(database: Database) -> None:
    """Insert a million completed requests with their replies."""
    now = time.time()
    with database.engine.connect() as connection:
        for start in range(0, FINISHED, 10_000):
            connection.execute(
                sa.insert(tables.REQUESTS),
                [
                    {
                        "uuid": new_uuid(), "service": f"service-{number % 100}", "state": "done", "priority": 0,
                        "created": now, "due": now, "started": now, "finished": now, "attempts": 1, "failures": 0,
                        "retries": 0, "body": BODY, "reply": BODY,
                    }
                    for number in range(start, start + 10_000)
                ],
            )  # fmt: skip
            connection.commit()
    with database.engine.begin() as connection:
        connection.exec_driver_sql("ANALYZE")


def with_history(database: Database) -> None:
    found = {}
    for state in ("empty", f"{FINISHED:,} done"):
        if state != "empty":
            fill(database)
        with ExitStack() as stack:
            _, endpoint = start_broker(stack)
            with database.titanic(endpoint):
                asyncio.run(times(endpoint))  # warm
                found[state] = asyncio.run(times(endpoint))
    for what in ("accept", "fetch"):
        shown = []
        for state, values in found.items():
            of = sorted(values[what])
            shown.append(f"{state}: p50 {of[len(of) // 2]:.2f}, p99 {of[len(of) * 99 // 100]:.2f} ms")
        print(f"3. {database.name}: {what}: {'; '.join(shown)}", flush=True)


# ── 4 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def fast_ones(endpoint: str, slow: int) -> list[float]:
    """Return the milliseconds from submission to reply, at 20 requests per second, while `slow` requests of 10 s
    wait."""
    async with AsyncClient(endpoint, timeout=60) as client:
        titanic = AsyncTitanic(client)
        for _ in range(slow):
            await titanic.submit("slow", b"10000")
        took: list[float] = []

        async def one() -> None:
            begun = time.perf_counter()
            ticket = await titanic.submit("fast", BODY)
            await ticket.result()
            took.append(1000 * (time.perf_counter() - begun))
            await ticket.close()

        tasks = []
        for _ in range(400):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks)
        return sorted(took)


def side_by_side(database: Database) -> None:
    shown = []
    for slow in (0, 200):
        with ExitStack() as stack:
            _, endpoint = start_broker(stack)
            start_worker(stack, endpoint, "zmdp.workers.echo:worker", "--service", "fast")
            start_worker(stack, endpoint, "zmdp.workers.sleep:worker", "--service", "slow")
            with database.titanic(endpoint):
                of = asyncio.run(fast_ones(endpoint, slow))
        shown.append(
            f"{'beside a queue of 200 × 10 s' if slow else 'alone'}: p50 {of[len(of) // 2]:.1f}, "
            f"p99 {of[len(of) * 99 // 100]:.1f} ms"
        )
    print(f"4. {database.name}: a fast service, accepted to fetched, 20 per second: {'; '.join(shown)}", flush=True)


def main() -> None:
    chosen = sys.argv[1:] or ["1", "2", "3", "4"]
    for number, part in (("1", accepting), ("2", there_and_back), ("3", with_history), ("4", side_by_side)):
        if number in chosen:
            with databases() as found:
                for database in found:
                    part(database)


if __name__ == "__main__":
    main()
