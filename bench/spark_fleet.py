"""Measure a fleet of executors with real processes on this machine: `python bench/spark_fleet.py [1 2 3 4 5]`.

1. Echo calls per second through a fleet of 2 executors on `local-cluster[2,1,1024]`, 64 outstanding over one
   connection, compared with 2 `mdworker` processes at the same broker; in turns.
2. The worst latency of callers that call without a pause: undisturbed, with leases of 2 s, while the Python process of
   a slot is killed, while an executor is; failed calls, of which there must be none.
3. The time until a killed slot serves again, and until a fleet has drained.
4. The worst latency of such callers during an update: drain and start again, compared with `--replace`.
5. Calls per second of a handler that waits 0.2 s, 64 outstanding, on one slot: one thread, 16 threads, asyncio.

Compare ratios, not absolute numbers, which depend on the machine and its load.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fleets import LOCAL_CLUSTER, SPARK_TIMEOUT_SECONDS, Calls, Running, fleet, java_of, kill
from support.processes import BIN, broker, eventually, process

SECONDS = 4.0
ROUNDS = 5
KILLS = 5
CALLERS = 4


def rate(endpoint: str, service: str) -> float:
    """Return calls per second, as measured by `mdclient bench`."""
    command = [str(BIN / "mdclient"), "bench", service, "hello", "--seconds", str(SECONDS), "--json"]
    done = subprocess.run([*command, "--broker", endpoint], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["replies_per_second"])


def throughput(endpoint: str) -> None:
    mdworkers = process(
        "mdworker", "zmdp.workers.echo:echo", "--service", "here", "--processes", "2", MDP_BROKER=endpoint
    )
    with mdworkers, fleet(endpoint, "zmdp.workers.echo:echo", "echo", *LOCAL_CLUSTER, "--min", "2") as running:
        running.serving(2)
        rates: dict[str, list[float]] = {"here": [], "echo": []}
        for _ in range(ROUNDS):
            for service, found in rates.items():
                found.append(rate(endpoint, service))
        ratios = [ours / theirs for ours, theirs in zip(rates["echo"], rates["here"], strict=True)]
        for name, service in (("2 mdworker processes", "here"), ("a fleet of 2", "echo")):
            print(f"  {name:<22} {statistics.median(rates[service]):>8,.0f} calls/s")
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {ROUNDS} rounds"
        print(f"  ratio                  {statistics.median(ratios):>8.2f}  ({spread})")


def disturbed(endpoint: str, what: str, running: Running, disturb: Callable[[], float]) -> None:
    """Measure the worst latency while `disturb` runs, which returns how long each of its disturbances lasted."""
    with Calls(endpoint, "echo", callers=CALLERS) as calls:
        calls.go_on(200)
        took = disturb()
        calls.go_on(200)
    failures = f"{len(calls.failed)} of {calls.done} calls failed"
    print(
        f"  {what:<34} worst {calls.worst:6.2f} s; {failures}" + (f"; serves again after {took:.1f} s" if took else "")
    )


def killing(running: Running, which: str) -> float:
    """Kill the Python process, or the executor, of one slot after the other; return the median time until it serves
    again."""
    times = []
    for number in range(KILLS):
        slot = running.serving(2)[number % 2]
        began = time.monotonic()
        kill(slot["pid"] if which == "pid" else java_of(slot["pid"]))
        running.replaced(slot, which)
        times.append(time.monotonic() - began)
    return statistics.median(times)


def latencies(endpoint: str) -> None:
    with fleet(endpoint, "zmdp.workers.echo:echo", "echo", *LOCAL_CLUSTER, "--min", "2", "--lease", "2") as running:
        running.serving(2)
        disturbed(endpoint, "leases of 2 s, for 20 s", running, lambda: time.sleep(20) or 0.0)
    with fleet(endpoint, "zmdp.workers.echo:echo", "echo", *LOCAL_CLUSTER, "--min", "2", "--lease", "1h") as running:
        running.serving(2)
        disturbed(endpoint, "undisturbed, for 10 s", running, lambda: time.sleep(10) or 0.0)
        disturbed(endpoint, f"kill -9 of a Python, {KILLS} times", running, lambda: killing(running, "pid"))
        disturbed(endpoint, f"kill -9 of an executor, {KILLS} times", running, lambda: killing(running, "executor"))
        began = time.monotonic()
        assert running.command.end() == 0
        eventually(lambda: not running.client.available("echo"))
        print(f"  drained and ended after {time.monotonic() - began:.1f} s")


def updates(endpoint: str) -> None:
    served = ("zmdp.workers.echo:echo", "echo", "--master", "local[2]")
    with fleet(endpoint, *served) as old, Calls(endpoint, "echo", callers=CALLERS) as restarted:
        restarted.go_on(200)
        assert old.command.end() == 0
        with fleet(endpoint, *served) as again:
            restarted.go_on(200)
            restarted.stop()
            with Calls(endpoint, "echo", callers=CALLERS) as replaced:
                replaced.go_on(200)
                with fleet(endpoint, *served, "--replace") as new:
                    new.command.line("replaced the previous fleet", timeout=SPARK_TIMEOUT_SECONDS)
                    assert again.command.wait() == 0
                    replaced.go_on(200)
                    replaced.stop()
    for name, calls in (("drained and started again", restarted), ("--replace", replaced)):
        print(f"  {name:<34} worst {calls.worst:6.2f} s; {len(calls.failed)} of {calls.done} calls failed")


def waiting(endpoint: str) -> None:
    ways = (("one thread", "nap", ()), ("16 threads", "nap", ("--concurrency", "16")), ("asyncio", "nap_async", ()))
    for name, handler, options in ways:
        with fleet(endpoint, f"fleet_handlers:{handler}", "nap", "--master", "local[2]", *options) as running:
            running.serving(1)
            print(f"  {name:<12} {rate(endpoint, 'nap'):>6,.0f} calls/s")


def main() -> None:
    parts = set(sys.argv[1:] or ("1", "2", "3", "4", "5"))
    if "1" in parts:
        with broker() as (_, endpoint):
            print("1. throughput")
            throughput(endpoint)
    if parts & {"2", "3"}:
        print(f"2, 3. {CALLERS} callers without a pause, heartbeat 1 s, a fleet of 2")
        with broker() as (_, endpoint):
            latencies(endpoint)
    if "4" in parts:
        with broker() as (_, endpoint):
            print(f"4. an update, {CALLERS} callers without a pause")
            updates(endpoint)
    if "5" in parts:
        with broker() as (_, endpoint):
            print("5. a handler that waits 0.2 s, on one slot")
            waiting(endpoint)


if __name__ == "__main__":
    main()
