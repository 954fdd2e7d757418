"""`make demo-spark`: a query as a call, a DataFrame through a service, an executor killed under its callers.

    python examples/spark_scenes.py

Runs a broker of its own.  The story goes to stdout, and progress through the slow steps to stderr.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from stage import BIN, HEARTBEAT, a_text, process, say, scene, start_broker, wait_for, wait_until, worker

from zmdp.clients import Client
from zmdp.spark.session import SparkError, check_installed

JAVA = "extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java starts in less time if it compiles less."""
QUIET = (
    "--heartbeat", HEARTBEAT, "--log-level", "error", "--conf", "spark.ui.enabled=false",
    "--conf", f"spark.driver.{JAVA}", "--conf", f"spark.executor.{JAVA}",
)  # fmt: skip
START_SECONDS = 300.0
"""How long Spark may take to start on a slow or busy machine."""
CALLS = 500
"""Calls made before the executor is killed, and again afterwards."""


def progress(text: str) -> None:
    """Print to stderr what the demo is waiting for."""
    print(f"    … {text}", file=sys.stderr, flush=True)


def spark(stack: ExitStack, endpoint: str, *command: str) -> subprocess.Popen[str]:
    """Start a Spark driver: `mdp-spark` with a command."""
    return stack.enter_context(process(str(BIN / "mdp-spark"), *command, "--broker", endpoint, *QUIET))


# ── 1 and 2: a batch ─────────────────────────────────────────────────────────────────────────────────────────────────


def start_batch(stack: ExitStack, client: Client, endpoint: str) -> None:
    """Write the chapters of a text as Parquet, and start a batch that has them as a table."""
    import pyarrow as pa  # noqa: PLC0415 - without PySpark, the demo says what to install
    import pyarrow.parquet as pq  # noqa: PLC0415

    folder = Path(stack.enter_context(TemporaryDirectory()))
    chapters = [chapter.partition("\n") for chapter in a_text().decode().removeprefix("# ").split("\n# ")]
    (folder / "chapters").mkdir()
    for number in range(4):
        rows = [{"title": title, "text": text} for title, _, text in chapters[number::4]]
        pq.write_table(pa.Table.from_pylist(rows), folder / "chapters" / f"{number}.parquet")
    catalogue = '[tables.chapters]\nformat = "parquet"\npath = "chapters"\n[jobs]\nwordiest = "spark_jobs:wordiest"\n'
    (folder / "catalogue.toml").write_text(catalogue)
    batch = spark(
        stack, endpoint, "batch", "--config", str(folder / "catalogue.toml"), "--master", "local[2]",
        "--history", ":memory:",
    )  # fmt: skip
    say(f"$ mdp-spark batch --config catalogue.toml    pid {batch.pid}; a table of 4 Parquet files, and a job")
    progress("waiting for Spark to start, about 10 s")
    wait_for(client, "spark.job", patience=START_SECONDS)


def query(client: Client) -> bool:
    """Call a query.  Return whether it has found something."""
    sql = "SELECT title, length(text) AS characters FROM chapters ORDER BY characters DESC LIMIT 3"
    return bool(call(client, "spark.sql", sql))


def through_service(client: Client, endpoint: str) -> bool:
    """Call a job that sends each row of a DataFrame to a service.  Return whether it has found something."""
    with worker("text_services:services", endpoint) as running:
        wait_for(client, "text.words")
        say(f"$ mdworker text_services:services              pid {running.pid}; plain Python offers 'text.words'")
        say("    the job wordiest: call_service(spark.table('chapters'), WORDS, input='text', output='words')")
        return bool(call(client, "spark.job", "wordiest", json.dumps({"broker": endpoint})))


def call(client: Client, service: str, *frames: str) -> list[dict[str, object]]:
    """Call a service of the batch, as any program can, and print the rows of its reply."""
    say(f">>> client.request({service!r}, {', '.join(f'b{frame!r}' for frame in frames)})")
    began = time.monotonic()
    *_, rows = client.request(service, *(frame.encode() for frame in frames))
    found: list[dict[str, object]] = json.loads(rows)
    for row in found:
        say(f"    {json.dumps(row)}")
    say(f"    after {time.monotonic() - began:.1f} s")
    return found


# ── 3: a fleet ───────────────────────────────────────────────────────────────────────────────────────────────────────


def kill_executor(stack: ExitStack, client: Client, endpoint: str) -> None:
    """Start a cluster of two executors that serve, and kill one under its callers.  Raise the error of a lost call."""
    master = "local-cluster[2,1,1024]"
    fleet = spark(
        stack, endpoint, "fleet", "text_services:words", "--service", "spark.words", "--min", "2", "--max", "2",
        "--reserve", "0", "--master", master,
    )  # fmt: skip
    say(f"$ mdp-spark fleet text_services:words …      pid {fleet.pid}, on {master}")
    progress("waiting for Spark and two executors to start, about 15 s")
    wait_for(client, "spark.words", 2, patience=START_SECONDS)
    say("    two executors offer 'spark.words', each in its own JVM; four clients call it without a pause")
    chapters = a_text().split(b"\n# ")
    latencies: list[float] = []
    executors: set[bytes] = set()
    ended = threading.Event()

    def keep_calling() -> None:
        with Client(endpoint, timeout=START_SECONDS) as caller:
            while not ended.is_set():
                began = time.monotonic()
                executors.add(caller.request("spark.words", chapters[len(latencies) % len(chapters)])[1])
                latencies.append(time.monotonic() - began)

    with ThreadPoolExecutor(4) as pool, ExitStack() as own:
        own.callback(ended.set)
        callers = [pool.submit(keep_calling) for _ in range(4)]
        wait_until(lambda: len(latencies) >= CALLS, f"{CALLS} replies", START_SECONDS)
        before, slowest_before = len(latencies), max(latencies)
        (victim, *_) = executor_jvms(fleet.pid)
        seen = set(executors)
        os.kill(victim, signal.SIGKILL)
        say(
            f"    kill -9 {victim}, the JVM of one executor, after {before} replies "
            f"(slowest: {slowest_before * 1000:.0f} ms)"
        )
        progress("waiting for another executor to take its place, about 10 s")
        wait_until(
            lambda: len(latencies) >= before + CALLS and bool(executors - seen), "another executor", START_SECONDS
        )
    for caller in callers:
        caller.result()  # raises the error of a call that was lost
    say(f"    {len(latencies)} replies, no call lost; slowest: {max(latencies) * 1000:.0f} ms")
    say(f"    a new executor serves, pid {(executors - seen).pop().decode()}")


def executor_jvms(fleet: int) -> list[int]:
    """Return the pids of the executors' JVMs, which are descendants of this process."""
    parents, executors = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid, parent = int(entry.name), int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # the process has ended
        parents[pid] = parent
        if b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in command:
            executors.append(pid)

    def belongs_to_fleet(pid: int) -> bool:
        while pid in parents and pid != fleet:
            pid = parents[pid]
        return pid == fleet

    found = [pid for pid in executors if belongs_to_fleet(pid)]
    if not found:
        raise SystemExit(f"demo: fleet {fleet} has no executors")
    return found


def main() -> None:
    """Show all scenes."""
    try:
        check_installed()
    except SparkError as error:
        raise SystemExit(f"demo: {error}") from None
    started = time.monotonic()
    with ExitStack() as stack:
        _, endpoint = start_broker(stack)
        client = stack.enter_context(Client(endpoint, timeout=START_SECONDS))
        with ExitStack() as own:
            start_batch(own, client, endpoint)
            scene(1, "A query over a folder of Parquet files, called from a plain program")
            found = query(client)
            scene(2, "A DataFrame goes through a service: a request for each row")
            counted = through_service(client, endpoint)
            progress("waiting for the batch to stop")
        scene(3, "The executors of a cluster are workers, and one of them is killed: no call is lost")
        with ExitStack() as own:
            kill_executor(own, client, endpoint)
            progress("waiting for the fleet to stop")
    say(f"\n    the demo took {time.monotonic() - started:.1f} s")
    if not (found and counted):
        raise SystemExit("demo: something did not work as it should; see above")


if __name__ == "__main__":
    main()
