"""Figures for planning: what requests, links, connections, waiting requests and Titanic's rows cost.

    python bench/capacity.py [PART …] [--scale 1.0]

The parts are `bodies`, `links`, `connections`, `waiting` and `titanic`, by default all; `--scale` changes how many of
each there are, and how long calls last.  CPU is that of all threads of a process; memory is resident memory.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import processes
import sqlalchemy as sa
import zmq
from processes import cpu_seconds, memory
from turns import Case, compare

from zmdp.clients import AsyncClient
from zmdp.titanic import AsyncTitanic
from zmdp.titanic.db import schema

sys.path.insert(0, str(processes.BENCH.parent / "tests"))

BODY_BYTES = (32, 1024, 7000, 65536, 1_000_000)
PEERS = (2, 4, 8)
CONNECTIONS = 600
WAITING = 50_000
WAITING_BODY_BYTES = 100
ROWS = 20_000
ROW_BODY_BYTES = 100
OUTSTANDING = 256
SETTLE_SECONDS = 2.0


class Brokers:
    """Starts brokers and workers, which are ended with the stack."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started = 0

    def start(self, *options: str) -> tuple[str, int]:
        """Start a broker with a name of its own; return its endpoint and process."""
        self._started += 1
        server = self._stack.enter_context(processes.broker("--name", f"b{self._started}", *options))
        return server.address, server.pids[0]

    def work(self, endpoint: str) -> None:
        """Start a process that offers `echo` with coroutines."""
        options = ("--broker", endpoint, "--concurrency", "256", "--log-level", "error")
        command = (processes.BIN / "mdworker", "services:echo_async", "--service", "echo", *options)
        self._stack.enter_context(processes.running(*command))


def bodies(scale: float) -> None:
    """Measure the broker's CPU per request by the size of the body, which is echoed."""
    with ExitStack() as stack:
        brokers = Brokers(stack)
        endpoint, pid = brokers.start()
        brokers.work(endpoint)
        for size in BODY_BYTES:
            case = Case(f"body of {size:,} bytes", AsyncClient(endpoint, timeout=60), {"broker": pid})
            asyncio.run(compare([case], seconds=scale, body=size))
            print(case)


def links(scale: float) -> None:
    """Measure requests beside linked brokers, through a peer, and from leaf to leaf of a tree, beside one alone."""
    with ExitStack() as stack:
        brokers, cases = Brokers(stack), []

        def case(name: str, *way: tuple[str, int]) -> None:
            brokers.work(way[-1][0])
            pids = {f"broker {at}": pid for at, (_, pid) in enumerate(way, 1)}
            cases.append(Case(name, AsyncClient(way[0][0], timeout=60), pids))

        others = [brokers.start()[0] for _ in range(max(PEERS))]
        for count in (0, *PEERS):
            case(f"{count} peers", brokers.start(*(f"--peer={other}" for other in others[:count])))
        far = brokers.start()
        case("through a peer", brokers.start("--peer", far[0]), far)
        root = brokers.start()
        leaves = [brokers.start("--parent", root[0]) for _ in range(2)]
        case("from leaf to leaf", leaves[0], root, leaves[1])
        asyncio.run(compare(cases, seconds=scale))
        for each in cases:
            print(each)


def connections(scale: float) -> None:
    """Measure the memory of idle workers, and of idle clients with keys; and the CPU of the workers' heartbeats."""
    from support.access import Folder

    count = round(CONNECTIONS * scale)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for keyed in (False, True):
        with ExitStack() as stack:
            folder = Folder(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            endpoint, pid = Brokers(stack).start(*(("--access", str(folder.access)) if keyed else ()))
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
            if not keyed:
                for each in sockets:
                    each.send_multipart([b"MDPW02", b"\x01", b"idle"])
                used, busy = (memory(pid) - before) / count, _beating(sockets, pid)
                print(f"{count:,} idle workers: {used:,.0f} bytes each; heartbeats {1e6 * busy / count:.1f} µs each")


def _beating(sockets: list[zmq.Socket[bytes]], pid: int) -> float:
    """Send heartbeats each second; return the seconds of the broker's CPU for those of one second."""
    began, rounds = cpu_seconds(pid), 5
    for _ in range(rounds):
        for each in sockets:
            each.send_multipart([b"MDPW02", b"\x05"])
        time.sleep(1.0)
    return (cpu_seconds(pid) - began) / rounds


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
        asyncio.run(fill(*Brokers(stack).start("--max-queue", "10000000")))


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
        brokers = Brokers(stack)
        endpoint, _ = brokers.start()
        options = ("--db", url, "--broker", endpoint, "--log-level", "error")
        stack.enter_context(processes.running(processes.BIN / "titanic", "serve", *options))
        empty = size()
        accepted = asyncio.run(_accept(endpoint, count))
        each = (size() - empty) / count
        brokers.work(endpoint)
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
    "bodies": bodies, "links": links, "connections": connections, "waiting": waiting, "titanic": titanic,
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
