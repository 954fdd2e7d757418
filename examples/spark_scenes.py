"""`make demo-spark`: an executor is killed under its callers, and a job survives its caller.

    python examples/spark_scenes.py

Runs a broker of its own.  The story goes to stdout, and progress through the slow steps to stderr.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from stage import BIN, HEARTBEAT, a_text, process, say, scene, start_broker, wait_for, wait_until

from zmdp.clients import Client
from zmdp.spark.session import SparkError, check_installed
from zmdp.titanic import Titanic

CONF = ("--conf", "spark.ui.enabled=false", "--log-level", "error")
START_SECONDS = 90.0
"""How long Spark may take to start on a slow machine."""
CALLS = 500
"""Calls made before the executor is killed, and again afterwards."""


def progress(text: str) -> None:
    """Print to stderr what the demo is waiting for."""
    print(f"    … {text}", file=sys.stderr, flush=True)


def kill_executor(stack: ExitStack, client: Client, endpoint: str) -> bool:
    """Kill an executor under its callers.  Return whether every call was answered."""
    command = ("fleet", "text_services:words", "--service", "spark.words", "--min", "2", "--max", "2", "--reserve", "0")
    master = "local-cluster[2,1,1024]"
    fleet = stack.enter_context(
        process(str(BIN / "mdp-spark"), *command, "--master", master, "--broker", endpoint,
                "--heartbeat", HEARTBEAT, *CONF)
    )  # fmt: skip
    say(f"$ mdp-spark fleet text_services:words …    pid {fleet.pid}, on {master}")
    progress("waiting for Spark and two executors to start, about 15 s")
    wait_for(client, "spark.words", 2, patience=START_SECONDS)
    say("    two executors offer 'spark.words', each in its own JVM; four clients call it without a pause")
    chapters = a_text().split(b"\n# ")
    latencies: list[float] = []
    executors: set[bytes] = set()
    ended = threading.Event()

    def call() -> None:
        with Client(endpoint, timeout=START_SECONDS) as caller:
            while not ended.is_set():
                began = time.monotonic()
                executors.add(caller.request("spark.words", chapters[len(latencies) % len(chapters)])[1])
                latencies.append(time.monotonic() - began)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
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
    finally:
        ended.set()
        for caller in callers:
            caller.join()
    say(f"    {len(latencies)} replies, no call lost; slowest: {max(latencies) * 1000:.0f} ms")
    say(f"    a new executor serves, pid {(executors - seen).pop().decode()}")
    return True


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


def survive_caller(stack: ExitStack, client: Client, endpoint: str) -> bool:
    """Submit a job to Titanic before any driver can run it.  Return whether its reply arrived."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    text = folder / "text.txt"
    text.write_bytes(a_text())
    quiet = ("--broker", endpoint, "--heartbeat", HEARTBEAT, "--log-level", "error")
    stack.enter_context(process(str(BIN / "titanic"), "serve", "--db", str(folder / "titanic.db"), *quiet))
    wait_for(client, "titanic.request")
    say("$ titanic serve                            nobody runs Spark jobs yet")
    ticket = Titanic(client).submit("spark.job", b"wordcount", json.dumps({"path": str(text), "top": 3}).encode())
    say(f">>> Titanic(client).submit('spark.job', b'wordcount', b'{{\"path\": …, \"top\": 3}}')\n    {ticket.uuid}")
    job = ("--job", "wordcount=spark_jobs:wordcount")
    batch = stack.enter_context(
        process(str(BIN / "mdp-spark"), "batch", *job, "--master", "local[2]", "--broker", endpoint,
                "--heartbeat", HEARTBEAT, "--history", ":memory:", *CONF)
    )  # fmt: skip
    say(f"$ mdp-spark batch --job wordcount=spark_jobs:wordcount    pid {batch.pid}")
    progress("waiting for Spark to start, about 10 s")
    wait_for(client, "spark.job", patience=START_SECONDS)
    shown = 0
    with closing(Titanic(client).ticket(ticket.uuid).partials(timeout=START_SECONDS)) as parts:
        for part in parts:
            event = json.loads(part[0])
            if event["event"] == "progress" and event["tasks"] and event["tasks_done"] > shown:
                shown = event["tasks_done"]
                say(f"    PARTIAL  {shown:>3} of {event['tasks']} tasks, {event['stages_done']} stages done")
    description, rows = ticket.result(timeout=START_SECONDS)
    say(f">>> ticket.result()\n    {rows.decode()}")
    ticket.close()
    return bool(json.loads(description)["rows"] == 3)


def main() -> None:
    """Show both scenes."""
    try:
        check_installed()
    except SparkError as error:
        raise SystemExit(f"demo: {error}") from None
    started = time.monotonic()
    with ExitStack() as stack:
        _, endpoint = start_broker(stack)
        client = stack.enter_context(Client(endpoint))
        scene(1, "The executors of a Spark cluster are workers, and one of them is killed")
        with ExitStack() as own:
            all_answered = kill_executor(own, client, endpoint)
            progress("waiting for the fleet to stop")
        scene(2, "A Spark job survives its caller: its progress and its reply")
        with ExitStack() as own:
            arrived = survive_caller(own, client, endpoint)
            progress("waiting for Spark to stop")
    say(f"\n    the demo took {time.monotonic() - started:.1f} s")
    if not (all_answered and arrived):
        raise SystemExit("demo: something did not work as it should; see above")


if __name__ == "__main__":
    main()
