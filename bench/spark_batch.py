"""Spark jobs as services: the latency of a query through `mdp-spark batch`, and the time until a cancelled job ends.

`python bench/spark_batch.py [ROUNDS]`: one batch on `local[2]`.  A round alternates a query as a service with the same
query in the session itself, and then cancels a job of two sleeping Python tasks from another client.  Prints median,
minimum and maximum in milliseconds.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from zmdp.clients import Client, RequestCancelled
from zmdp.spark import control
from zmdp.spark.batch.offer import Offer
from zmdp.spark.batch.results import Results
from zmdp.spark.batch.service import Batch
from zmdp.spark.batch.sessions import SessionPool
from zmdp.spark.batch.settings import BatchSettings
from zmdp.spark.session import open_session
from zmdp.testing import running_broker

QUERY = "SELECT sum(id) AS s FROM range(1000)"


def sleeping(spark: Any, folder: str) -> int:
    """Run two tasks that report their process and sleep."""

    def task(index: int, rows: Any) -> Any:
        (Path(folder) / str(index)).write_text(str(os.getpid()))
        time.sleep(3600)
        return rows

    return int(spark.sparkContext.parallelize([0, 1], 2).mapPartitionsWithIndex(task).count())


def until(condition: Callable[[], bool]) -> float:
    """Return the milliseconds until the condition is true."""
    began = time.perf_counter()
    while not condition():
        time.sleep(0.002)
    return (time.perf_counter() - began) * 1000


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cancel(client: Client, other: Client, spark: Any) -> dict[str, float]:
    """Cancel a job from another client while its tasks sleep; return the times."""
    with tempfile.TemporaryDirectory() as folder:
        future = client.submit("spark.job", b"sleeping", json.dumps({"folder": folder}).encode())
        files = [Path(folder) / "0", Path(folder) / "1"]
        until(lambda: all(each.exists() and each.read_text() for each in files))
        pids = [int(each.read_text()) for each in files]
        (job,) = control.ask(other, "bench", "status")["running"]
        began = time.perf_counter()
        control.ask(other, "bench", "cancel", job=job["job"])
        try:
            future.result()
        except RequestCancelled:
            told = (time.perf_counter() - began) * 1000
        tracker = spark.sparkContext.statusTracker()
        until(lambda: not tracker.getActiveJobsIds())
        ended = (time.perf_counter() - began) * 1000
        until(lambda: not any(map(alive, pids)))
        return {"told": told, "no Spark job": ended, "no Python": (time.perf_counter() - began) * 1000}


def shown(name: str, values: list[float]) -> None:
    print(f"{name:44} {median(values):8.0f} ({min(values):.0f} to {max(values):.0f})")


def main(rounds: int) -> None:
    spark = open_session("bench", master="local[2]", conf={"spark.ui.enabled": "false"})
    pool = SessionPool(lambda: spark, 4)
    figures: dict[str, list[float]] = {}
    with running_broker() as server, Client(server.endpoints[0], timeout=60) as client:
        at = server.endpoints[0]
        settings = BatchSettings("bench", at, concurrency=2)
        driver = Batch(settings, pool, Results(None), Offer(jobs={"sleeping": sleeping}))
        with driver, Client(at, timeout=60) as other:
            for number in range(rounds + 1):  # the first is to warm up
                began = time.perf_counter()
                client.request("spark.sql", QUERY.encode())
                through = (time.perf_counter() - began) * 1000
                began = time.perf_counter()
                spark.sql(QUERY).toArrow()
                itself = (time.perf_counter() - began) * 1000
                found = {
                    "a query, as a service": through, "the same, in the session": itself,
                    **{f"cancelled: {name}": each for name, each in cancel(client, other, spark).items()},
                }  # fmt: skip
                for name, value in found.items() if number else ():
                    figures.setdefault(name, []).append(value)
    pool.close()
    print(f"milliseconds, median of {rounds} (minimum to maximum)")
    for name, values in figures.items():
        shown(name, values)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
