"""Measure `call_service` with real processes: `python bench/spark_pipeline.py [1 2 3 4 5]`.

The suite runs one line of it, as its part `rows`, with the default window.

Two partitions on `local[2]`, an echo service of two worker processes, rows of about 40 bytes.

1. Rows per second by window.
2. Rows per second with a key, through Titanic on SQLite, compared with a second run of the same keys, which gets stored
   replies.
3. Rows per second of the SQL function, compared with `call_service`.
4. The same calls without Spark: one process, one client; and the rows through Spark without calls.
5. The same rows over HTTP: `requests` on the executors, one connection for each partition, and Starlette under uvicorn,
   which echoes; and the same handler on the executors, in `mapInArrow`, with and without work to do.  There are as many
   worker processes as partitions, so the handlers have as many processes either way.

Compare ratios, not absolute numbers, which depend on the machine and its load.
"""

import argparse
import importlib.util
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import repeat
from typing import Any

from x1 import BIN, running, start_broker, start_worker

from zmdp.clients import Client

PART = "rows"
TITLE = "Rows through a service"
FIGURE = "rows per second of call_service"
WAY = "one row per request"
ROUNDS = 3
ROWS = 40_000
KEYED = 10_000
"""Rows with a key: Titanic stores each of them."""


class Bench:
    """Run a session, a broker and an echo service."""

    def __init__(self, stack: ExitStack) -> None:
        from zmdp.spark.session import open_session

        conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
        self.spark = open_session("bench", master="local[2]", conf=conf)
        stack.callback(self.spark.stop)
        self.stack = stack
        _, self.endpoint = start_broker(stack)
        for _ in range(2):
            start_worker(stack, self.endpoint, "zmdp.workers.echo:worker")

    def rows(self, count: int, prefix: str = "") -> Any:
        """Return this many rows in two partitions, in memory."""
        made = self.spark.range(0, count, 1, 2).selectExpr(
            "id", "concat('the text of row number ', id, ', forty bytes') AS text", f"concat('{prefix}/', id) AS key"
        )
        made = made.cache()
        made.count()
        return made

    def call(self, df: Any, **given: Any) -> None:
        from zmdp.spark.pipeline import call_service

        replies = call_service(df, "echo", input="text", broker=self.endpoint, **given)
        check(replies.where("reply = text").count(), df)


def check(right: int, df: Any) -> None:
    if right != df.count():
        raise SystemExit(f"{right} rows have their reply")


def compared(title: str, count: int, ways: dict[str, Callable[[], object]], counts: dict[str, int]) -> None:
    """Print the rows per second of each variant, measured in turns, and its ratio to the first."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:  # the first is to warm up
                rates[name].append(counts.get(name, count) / (time.perf_counter() - began))
    print(f"\n{title}: median of {ROUNDS} rounds (minimum–maximum), load {os.getloadavg()[0]:.1f}")
    first = statistics.median(next(iter(rates.values())))
    for name, found in rates.items():
        median = statistics.median(found)
        spread = f"({min(found):,.0f}–{max(found):,.0f})"
        print(f"   {name:34}{median:>10,.0f} rows/s {spread:>20}   × {median / first:.2f}", flush=True)


def by_window(bench: Bench) -> None:
    df = bench.rows(ROWS)
    ways: dict[str, Callable[[], object]] = {
        f"window {window or 'by default'}": lambda window=window: bench.call(df, window=window)
        for window in (1, 8, 64, 256, 1024, None)
    }
    compared("1. By window", ROWS, ways, {})


def by_key(bench: Bench) -> None:
    count, runs = KEYED, 0
    with tempfile.TemporaryDirectory() as folder:
        db, started = f"{folder}/titanic.db", [str(BIN / "titanic"), "serve"]
        with running(*started, "--db", db, "--broker", bench.endpoint), Client(bench.endpoint) as client:
            while not client.available("titanic.request"):
                time.sleep(0.05)
            df: Any = None

            def first_time() -> None:
                nonlocal df, runs
                runs += 1
                df = bench.rows(count, f"run-{runs}")
                bench.call(df, key="key")

            ways: dict[str, Callable[[], object]] = {
                "without a key": lambda: bench.call(bench.rows(count)),
                "with a key": first_time,
                "the same keys again": lambda: bench.call(df, key="key"),
            }
            compared("2. Through Titanic on SQLite", count, ways, {})


def by_function(bench: Bench) -> None:
    df = bench.rows(ROWS)
    from zmdp.spark.pipeline import register_function

    df.createOrReplaceTempView("texts")
    register_function(bench.spark, "call_one", broker=bench.endpoint)

    def sql() -> None:
        query = "SELECT count(*) FROM (SELECT text, call_one('echo', text) AS r FROM texts) WHERE r.reply = text"
        check(bench.spark.sql(query).collect()[0][0], df)

    compared("3. The SQL function", ROWS, {"call_service": lambda: bench.call(df), "SQL": sql}, {})


def without(bench: Bench) -> None:
    df = bench.rows(ROWS)

    def calls_only() -> None:
        with Client(bench.endpoint) as client:
            for _ in client.map("echo", repeat(b"x" * 40, ROWS)):
                pass

    ways: dict[str, Callable[[], object]] = {
        "call_service": lambda: bench.call(df),
        "calls without Spark, one process": calls_only,
        "Spark without calls": lambda: df.mapInArrow(lambda batches: batches, df.schema).where("text <> ''").count(),
    }
    compared("4. What is whose", ROWS, ways, {})


# ── other ways ───────────────────────────────────────────────────────────────────────────────────────────────────────


def http_echo() -> Any:
    """Return the application that uvicorn runs."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    return Starlette(routes=[Route("/", echo, methods=["POST"])])


def count_letters(request: Any) -> bytes:
    """Work for some microseconds."""
    text = request[0]
    return b"%d" % sum(text.count(letter) for letter in (b"%c" % n for n in range(65, 123)))


def upper_case(table: Any) -> Any:
    """Return the first column in capitals."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.table({"reply": pc.utf8_upper(table.column(0))})


def start_http(stack: ExitStack) -> str:
    """Start the HTTP server.  Return its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, "-m", "uvicorn", "--factory", "spark_pipeline:http_echo", "--port", str(port))
    stack.enter_context(running(*command, "--log-level", "error"))
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return f"http://127.0.0.1:{port}/"
        time.sleep(0.05)


def over_http(url: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for `mapInArrow` that sends each row."""

    def call(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        import requests

        with requests.Session() as session:
            for batch in batches:
                texts = [session.post(url, text).text for text in batch.column("text").to_pylist()]
                yield pa.RecordBatch.from_arrays([*batch.columns, pa.array(texts)], [*batch.schema.names, "reply"])

    return call


def locally(handler: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for `mapInArrow` that calls the handler."""

    def call(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            sent = batch.column("text").cast(pa.binary()).to_pylist()
            replies = [handler([text]) for text in sent]
            texts = [(reply[0] if isinstance(reply, list) else reply).decode() for reply in replies]
            yield pa.RecordBatch.from_arrays([*batch.columns, pa.array(texts)], [*batch.schema.names, "reply"])

    return call


def locally_as_arrow(batches: Iterator[Any]) -> Iterator[Any]:
    """Call the Arrow handler, for `mapInArrow`."""
    import pyarrow as pa

    for batch in batches:
        replies = upper_case(batch.select(["text"])).column(0).combine_chunks()
        yield pa.RecordBatch.from_arrays([*batch.columns, replies], [*batch.schema.names, "reply"])


def by_transport(bench: Bench) -> None:
    url = start_http(bench.stack)
    few, many = bench.rows(ROWS // 10), bench.rows(5 * ROWS)
    for _ in range(2):
        start_worker(bench.stack, bench.endpoint, "spark_workers:letters")
        start_worker(bench.stack, bench.endpoint, "spark_workers:upper")

    def mapped(df: Any, function: Any) -> None:
        check(df.mapInArrow(function, f"{df._jdf.schema().toDDL()}, reply string").where("reply <> ''").count(), df)

    def called(service: str, **given: Any) -> None:
        from zmdp.spark.pipeline import call_service

        replies = call_service(many, service, input="text", broker=bench.endpoint, **given)
        check(replies.where("reply_code = 200").count(), many)

    ways: dict[str, Callable[[], object]] = {
        "HTTP": lambda: mapped(few, over_http(url)),
        "echo": lambda: bench.call(many),
        "the echo in mapInArrow": lambda: mapped(many, locally(lambda request: request)),
        "letters": lambda: called("letters"),
        "letters in mapInArrow": lambda: mapped(many, locally(count_letters)),
        "capitals, as Arrow": lambda: called("upper", codec="arrow"),
        "capitals in mapInArrow": lambda: mapped(many, locally_as_arrow),
    }
    compared("5. Other ways", 5 * ROWS, ways, {"HTTP": ROWS // 10})


def missing() -> str | None:
    """Return what must be installed, or None."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed (pip install -e .[spark])"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "there is no Java (Debian: apt-get install openjdk-17-jre-headless)"
    return None


def run(options: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the records of the suite's part."""
    note = "an echo service in two worker processes, two partitions on local[2], rows of about 40 bytes"
    yield {"part": PART, "figure": FIGURE, "unit": "1/s", "note": note}
    if why := missing():
        yield {"part": PART, "skipped": "call_service", "why": why}
        return
    with ExitStack() as stack:
        tell(f"{PART}: starting Spark")
        bench = Bench(stack)
        df = bench.rows(ROWS)
        for number in range(getattr(options, "rounds", ROUNDS) + 1):
            tell(f"{PART}: {ROWS:,} rows, " + (f"round {number}" if number else "to warm up"))
            began = time.perf_counter()
            bench.call(df)
            rate = ROWS / (time.perf_counter() - began)
            if number:
                yield {"part": PART, "figure": FIGURE, "peer": WAY, "params": {}, "rounds": [round(rate, 1)]}


def main() -> None:
    chosen = sys.argv[1:] or list("12345")
    with ExitStack() as stack:
        bench = Bench(stack)
        parts = (by_window, by_key, by_function, without, by_transport)
        for number, part in zip("12345", parts, strict=True):
            if number in chosen:
                part(bench)
                bench.spark.catalog.clearCache()


if __name__ == "__main__":
    main()
