"""Figures for planning: what requests, connections, waiting requests and Titanic's rows cost.

    python bench/capacity.py [PART …] [--scale 1.0]

The parts are `bodies`, `connections`, `clients`, `waiting` and `titanic`, by default all; `--scale` changes how many of
each there are.  bench/brokers.py measures links.  CPU is that of all threads of a process; memory is resident memory.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import sqlalchemy as sa
import zmq
from native import cpu_seconds, memory
from turns import BIN, WORKER, Case, compare, running, start_broker

from zmdp.clients import AsyncClient
from zmdp.titanic import AsyncTitanic, schema

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BODY_BYTES = (32, 1024, 7000, 65536, 1_000_000)
CONNECTIONS = 5000
CLIENTS = 600
WAITING = 50_000
WAITING_BODY_BYTES = 100
ROWS = 20_000
ROW_BODY_BYTES = 100
OUTSTANDING = 256
SETTLE_SECONDS = 2.0
OPTIONS = ("--max-queue", "10000000")


def bodies(scale: float) -> None:
    """Measure the broker's CPU per request by the size of the body, which is echoed."""
    with ExitStack() as stack:
        endpoint, pid = start_broker(stack)
        worker = stack.enter_context(running(sys.executable, "-c", WORKER, endpoint))
        assert worker.stdout is not None
        worker.stdout.readline()
        for size in BODY_BYTES:
            case = Case(str(size), AsyncClient(endpoint, timeout=60), {"broker": pid})
            options = argparse.Namespace(outstanding=64, rounds=5, seconds=scale, body=size)
            asyncio.run(compare([case], options))
            cpu = statistics.median(case.cpu["broker"])
            print(f"body of {size:>9,} bytes: {cpu:7.1f} µs of the broker, {1e6 / cpu:10,.0f} requests/s per core")


def connections(scale: float) -> None:
    """Measure the memory and the CPU of idle workers."""
    count = round(CONNECTIONS * scale)
    with ExitStack() as stack:
        endpoint, pid = start_broker(stack)
        before = memory(pid)
        program = Path(__file__).with_name("idle_peers.py")
        peers = subprocess.Popen(
            [sys.executable, program, endpoint, "0.2", "one", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        stack.callback(peers.kill)
        assert peers.stdin is not None
        assert peers.stdout is not None
        print(count, file=peers.stdin, flush=True)
        peers.stdout.readline()
        time.sleep(SETTLE_SECONDS)
        used, began, at = (memory(pid) - before) / count, cpu_seconds(pid), time.monotonic()
        time.sleep(5 * SETTLE_SECONDS)
        busy = (cpu_seconds(pid) - began) / (time.monotonic() - at)
        print(f"{count:,} idle workers, a heartbeat each second: {used:,.0f} bytes each, {100 * busy:.1f} % of a core")


def clients(scale: float) -> None:
    """Measure the memory of idle clients, with keys and without."""
    from support.access import Folder

    count = round(CLIENTS * scale)
    for keyed in (False, True):
        with ExitStack() as stack:
            folder = Folder(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            endpoint, pid = start_broker(stack, *(("--access", str(folder.access)) if keyed else ()))
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.destroy, linger=0)
            context.set(zmq.MAX_SOCKETS, 2 * count)
            before = memory(pid)
            sockets = [context.socket(zmq.DEALER) for _ in range(count)]
            for each in sockets:
                if keyed:
                    folder.keys("shop").apply(each)
                each.connect(endpoint)
                each.send_multipart([b"MDPC02", b"\x01", b"mmi.service", b"echo"])
            for each in sockets:
                each.recv_multipart()
            used = (memory(pid) - before) / count
            print(f"{count:,} idle clients {'with' if keyed else 'without'} keys: {used:,.0f} bytes each")


async def _all_wait(client: AsyncClient, count: int) -> bool:
    services = json.loads((await client.request("mmi.services"))[0])["services"]
    return any(each["name"] == "nobody" and each["queued"] == count for each in services)


def waiting(scale: float) -> None:
    """Measure the memory of requests that wait for a worker."""
    count = round(WAITING * scale)

    async def fill(endpoint: str, pid: int) -> None:
        async with AsyncClient(endpoint, timeout=600, max_outstanding=count + 1) as client:
            await client.available("nobody")
            before = memory(pid)
            body = bytes(WAITING_BODY_BYTES)
            tasks = [
                asyncio.ensure_future(client.request("nobody", body, options={"wait": True})) for _ in range(count)
            ]
            while not await _all_wait(client, count):
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE_SECONDS)
            used = (memory(pid) - before) / count
            print(f"{count:,} waiting requests of {WAITING_BODY_BYTES} bytes: {used:,.0f} bytes each")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with ExitStack() as stack:
        endpoint, pid = start_broker(stack, *OPTIONS)
        asyncio.run(fill(endpoint, pid))


def titanic(scale: float) -> None:
    """Measure Titanic's rows: accepted without a worker, then executed and fetched, and what they take on disk."""
    from support.postgres import cluster

    with tempfile.TemporaryDirectory() as folder, cluster(fsync=True) as postgres:

        def sqlite_bytes() -> float:
            with sa.create_engine(f"sqlite:///{folder}/titanic.db").connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            return (Path(folder) / "titanic.db").stat().st_size

        def postgres_bytes() -> float:
            return float(postgres.execute("SELECT pg_database_size(current_database())")[0][0])

        _rows("SQLite", f"sqlite:///{folder}/titanic.db", sqlite_bytes, round(ROWS * scale))
        _rows("PostgreSQL", postgres.url(), postgres_bytes, round(ROWS * scale))


def _rows(name: str, url: str, size: Callable[[], float], count: int) -> None:
    engine = schema.open_engine(schema.database_url(url), create=True)
    schema.upgrade(engine)
    with ExitStack() as stack:
        endpoint, _ = start_broker(stack)
        command = (str(BIN / "titanic"), "serve", "--db", url, "--broker", endpoint, "--log-level", "error")
        stack.enter_context(running(*command))
        empty = size()
        accepted = asyncio.run(_accept(endpoint, count))
        each = (size() - empty) / count
        stack.enter_context(running(sys.executable, "-c", WORKER, endpoint))
        began = time.monotonic()
        with engine.connect() as connection:
            while connection.exec_driver_sql(
                "SELECT count(*) FROM titanic_requests WHERE state IN ('pending', 'running')"
            ).scalar():
                connection.rollback()
                time.sleep(0.1)
        executed = time.monotonic() - began
        done = (size() - empty) / count
        print(f"{name}: {count / accepted:,.0f} rows accepted per second, {count / executed:,.0f} executed; "
              f"{each:,.0f} bytes per waiting row of {ROW_BODY_BYTES}, {done:,.0f} with its reply")  # fmt: skip


async def _accept(endpoint: str, count: int) -> float:
    """Submit so many rows; return the seconds."""
    async with AsyncClient(endpoint, timeout=120) as client:
        service = AsyncTitanic(client)
        body = bytes(ROW_BODY_BYTES)
        left = iter(range(count))

        async def submit() -> None:
            for _ in left:
                await service.submit("echo", body)

        await service.submit("echo", b"")  # when Titanic accepts
        began = time.monotonic()
        await asyncio.gather(*(submit() for _ in range(OUTSTANDING)))
        return time.monotonic() - began


PARTS: dict[str, Callable[[float], None]] = {
    "bodies": bodies, "connections": connections, "clients": clients, "waiting": waiting, "titanic": titanic,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures for planning")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    for name in options.parts or PARTS:
        PARTS[name](options.scale)


if __name__ == "__main__":
    main()
