"""The demo's scenes on Spark: an executor is killed under its callers, and a job survives its caller.

Without PySpark or Java they print how to install them.
"""

import json
import os
import signal
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from stage import BIN, HEARTBEAT, a_text, process, say, scene, wait_for, wait_until

from zmdp.clients import Client
from zmdp.spark.session import SparkError, check_installed
from zmdp.titanic import Titanic

CONF = ("--conf", "spark.ui.enabled=false", "--log-level", "error")
START = 90.0
"""Seconds that Spark may take to start, on a slow machine."""


def show(client: Client, endpoint: str) -> bool:
    """Show both scenes.  Return whether they went as they should."""
    scene(9, "Spark: its executors are workers, and one of them is killed")
    try:
        check_installed()
    except SparkError as error:
        say(f"    left out, and so is scene 10: {error}")
        return True
    with ExitStack() as ours:
        served = serve(ours, client, endpoint)
    scene(10, "A Spark job that survives its caller: its progress, its reply")
    with ExitStack() as ours:
        kept = keep(ours, client, endpoint)
    return served and kept


def serve(stack: ExitStack, client: Client, endpoint: str) -> bool:
    """Kill an executor under its callers.  Return whether no call was lost."""
    command = ("fleet", "text_services:words", "--service", "spark.words", "--min", "2", "--max", "2", "--reserve", "0")
    master = "local-cluster[2,1,1024]"
    fleet = stack.enter_context(
        process(str(BIN / "mdp-spark"), *command, "--master", master, "--broker", endpoint,
                "--heartbeat", HEARTBEAT, *CONF)
    )  # fmt: skip
    say(f"$ mdp-spark fleet text_services:words … pid {fleet.pid}, on {master}: takes some seconds to start")
    wait_for(client, "spark.words", 2, patience=START)
    say("    two executors offer 'spark.words', each in a JVM of its own; a client asks and asks")
    chapters = a_text().split(b"\n# ")
    latencies: list[float] = []
    executors: set[bytes] = set()
    ended = threading.Event()

    def ask() -> None:
        with Client(endpoint, timeout=START) as caller:
            while not ended.is_set():
                began = time.monotonic()
                executors.add(caller.request("spark.words", chapters[len(latencies) % len(chapters)])[1])
                latencies.append(time.monotonic() - began)

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    wait_until(lambda: len(latencies) >= 500, "500 replies")
    before, calm = len(latencies), max(latencies)
    (victim, *_) = executor_jvms(fleet.pid)
    seen = set(executors)
    os.kill(victim, signal.SIGKILL)
    say(f"    kill -9 {victim}, the JVM of one of them, after {before} replies (the slowest took {calm * 1000:.0f} ms)")
    wait_until(lambda: len(latencies) >= before + 500 and bool(executors - seen), "another executor", START)
    ended.set()
    for caller in callers:
        caller.join()
    say(f"    {len(latencies)} calls, {len(latencies)} replies; the slowest took {max(latencies) * 1000:.0f} ms")
    say(f"    and a new executor serves, pid {(executors - seen).pop().decode()}")
    return True


def executor_jvms(driver: int) -> list[int]:
    """Return the JVMs of a local cluster's executors, which are known by their command lines."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
            environment = line.with_name("environ").read_bytes()
        except OSError:
            continue  # it has ended, or is somebody else's
        ours = b"ZMDP_DEMO=%d" % os.getpid() in environment
        if ours and b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in words:
            found.append(int(line.parent.name))
    if not found:
        raise SystemExit(f"demo: fleet {driver} has no executors")
    return found


def keep(stack: ExitStack, client: Client, endpoint: str) -> bool:
    """Hand a job over to Titanic.  Return whether its reply came."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    text = folder / "text.txt"
    text.write_bytes(a_text())
    quiet = ("--broker", endpoint, "--heartbeat", HEARTBEAT, "--log-level", "error")
    stack.enter_context(process(str(BIN / "titanic"), "serve", "--db", str(folder / "titanic.db"), *quiet))
    wait_for(client, "titanic.request")
    job = ("--job", "wordcount=spark_jobs:wordcount")
    say("$ titanic serve; nobody runs Spark jobs yet")
    ticket = Titanic(client).submit("spark.job", b"wordcount", json.dumps({"path": str(text), "top": 3}).encode())
    say(f">>> Titanic(client).submit('spark.job', b'wordcount', b'{{\"path\": …, \"top\": 3}}')\n    {ticket.uuid}")
    batch = stack.enter_context(
        process(str(BIN / "mdp-spark"), "batch", *job, "--master", "local[2]", "--broker", endpoint,
                "--heartbeat", HEARTBEAT, *CONF)
    )  # fmt: skip
    say(f"$ mdp-spark batch --job wordcount=spark_jobs:wordcount    pid {batch.pid}: takes some seconds to start")
    wait_for(client, "spark.job", patience=START)
    shown = 0
    with closing(Titanic(client).ticket(ticket.uuid).partials(timeout=START)) as parts:
        for part in parts:
            event = json.loads(part[0])
            if event["event"] == "progress" and event["tasks"] and event["tasks_done"] > shown:
                shown = event["tasks_done"]
                say(f"    PARTIAL  {shown:>3} of {event['tasks']} tasks, {event['stages_done']} stages done")
    described, rows = ticket.result(timeout=START)
    say(f">>> ticket.result()\n    {rows.decode()}")
    ticket.close()
    return bool(json.loads(described)["rows"] == 3)
