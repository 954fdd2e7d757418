"""Measure what rows cost: CPU per row of each process, `python bench/rows.py [map] [keyed]`.

- `map`: rows of 40 bytes to an echo service in two worker processes, beside the same requests made by `window` tasks
  that call `AsyncClient.request`.
- `keyed`: rows with keys through Titanic on SQLite.

The ways take turns.  CPU is that of all threads.  Compare ratios: a busy machine makes everything dearer.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import repeat

from bodies import cpu_seconds
from x1 import BIN, running, start_broker, start_worker

from zmdp.clients import AsyncClient, Client
from zmdp.clients.rows import Row, RowSettings, answer_rows
from zmdp.titanic.keyed import KeyedRows

ROUNDS = 3
ROWS = 20_000
KEYED = 4_000
ROW = b"the text of row number 12345, forty bytes"

Ways = dict[str, Callable[[], None]]


def mapped(endpoint: str, **settings: int) -> None:
    with Client(endpoint) as client:
        if any(isinstance(each, Exception) for each in client.map("echo", repeat(ROW, ROWS), **settings)):  # type: ignore[arg-type]
            raise SystemExit("a row has failed")


def requested(endpoint: str, window: int) -> None:
    """Make a request for each row, from `window` tasks."""
    left = iter(range(ROWS))

    async def call(client: AsyncClient) -> None:
        for _ in left:
            await client.request("echo", ROW)

    async def main() -> None:
        async with AsyncClient(endpoint, timeout=60) as client:
            await asyncio.gather(*(call(client) for _ in range(window)))

    asyncio.run(main())


def keyed(endpoint: str, window: int | None) -> None:
    """Send rows whose keys are new."""
    run = time.monotonic_ns()
    rows = (Row("echo", ROW, f"{run}/{number}") for number in range(KEYED))
    answered = answer_rows(
        rows, RowSettings(window=window), lambda: AsyncClient(endpoint), lambda client: KeyedRows(client, None, 3600)
    )
    if any(isinstance(row.outcome, Exception) for row in answered):
        raise SystemExit("a row has failed")


def compared(title: str, rows: int, ways: Ways, pids: dict[str, list[int | str]]) -> None:
    """Print the rows per second of each way, and the CPU per row of each process."""
    found: dict[str, list[list[float]]] = {}

    def now() -> list[float]:
        return [time.perf_counter(), *(sum(map(cpu_seconds, each)) for each in pids.values())]

    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            before = now()
            way()
            if number:  # the first is to warm up
                spent = [(after - since) / rows * 1e6 for since, after in zip(before, now(), strict=True)]
                found.setdefault(name, []).append([1e6 / spent[0], sum(spent[1:]), *spent[1:]])
    print(f"\n{title}: rows per second, and µs of CPU per row: in all, {', '.join(pids)}")
    for name, rounds in found.items():
        rate, *spent = [statistics.median(each) for each in zip(*rounds, strict=True)]
        print(f"   {name:34}{rate:>9,.0f}   {'  '.join(f'{each:6.1f}' for each in spent)}", flush=True)


def main() -> None:
    chosen = sys.argv[1:] or ["map", "keyed"]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        broker, endpoint = start_broker(stack)
        workers = [start_worker(stack, endpoint, "zmdp.workers.echo:worker").pid for _ in range(2)]
        pids: dict[str, list[int | str]] = {"client": ["self"], "broker": [broker.pid], "workers": [*workers]}
        if "map" in chosen:
            ways: Ways = {
                "map": lambda: mapped(endpoint),
                "map, window 64": lambda: mapped(endpoint, window=64),
                "map, window 512": lambda: mapped(endpoint, window=512),
                "64 tasks": lambda: requested(endpoint, 64),
                "512 tasks": lambda: requested(endpoint, 512),
            }
            compared("Rows to an echo service", ROWS, ways, pids)
        if "keyed" in chosen:
            serve = (str(BIN / "titanic"), "serve", "--db", f"{folder}/titanic.db", "--broker", endpoint)
            pids["Titanic"] = [stack.enter_context(running(*serve)).pid]
            with Client(endpoint) as client:
                while not client.available("titanic.request"):
                    time.sleep(0.05)
            ways = {
                "adaptive window": lambda: keyed(endpoint, None),
                "window 1024": lambda: keyed(endpoint, 1024),
            }
            compared("Rows with keys, through Titanic", KEYED, ways, pids)


if __name__ == "__main__":
    main()
