"""Runs real fleets on clusters on this machine, under load."""

import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from support.processes import eventually, process
from support.results import package

from zmdp.clients import Client
from zmdp.mdp.errors import ZmdpError
from zmdp.mdp.program.control_services import SPARK
from zmdp.spark import drivers

HERE = Path(__file__).parents[1] / "spark"
SPARK_TIMEOUT_SECONDS = 600.0
"""How long tests wait for something that starts Spark, on a busy machine."""
BEATS = ("--heartbeat", "0.2", "--liveness", "600")
SMALL = (
    "--conf", "spark.ui.enabled=false",
    "--conf", "spark.driver.memory=512m",
    "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "--conf", "spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
)  # fmt: skip
LOCAL_CLUSTER = ("--master", "local-cluster[2,1,1024]", "--reserve", "0")


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def java_of(pid):
    """Return the pid of the executor's Java process, the grandparent of the Python process that serves."""
    return parent(parent(pid))


class Running:
    """A running `mdp-spark fleet` whose session is open."""

    def __init__(self, command, client, name):
        self.command = command
        self.client = client
        self.name = name

    def status(self):
        return drivers.ask(self.client, self.name, "status")

    def serving(self, number):
        """Wait until exactly `number` slots serve, and return them."""
        return eventually(
            lambda: (
                (rows := [row for row in self.status()["slots"] if row["state"] == "serving"])
                and len(rows) == number
                and rows
            ),
            SPARK_TIMEOUT_SECONDS,
        )

    def replaced(self, slot, what):
        """Wait until the slot serves with a new value of `what` (its pid or executor), and return it."""

        def found():
            rows = [row for row in self.status()["slots"] if row["slot"] == slot["slot"]]
            return [row for row in rows if row["state"] == "serving" and row[what] != slot[what]]

        return eventually(found, SPARK_TIMEOUT_SECONDS)[0]


@contextmanager
def fleet(endpoint, handler, service, *options, cwd=HERE, **env):
    """Run a fleet as a process; afterwards remove the files that it leaves."""
    command = ("mdp-spark", "fleet", handler, "--service", service, "--name", f"fleet-{service}",
               "--broker", endpoint, *BEATS, *SMALL, *options)  # fmt: skip
    with (
        process(*command, cwd=cwd, **env) as running,
        Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as client,
    ):
        running.line(f"serves {service} at", timeout=SPARK_TIMEOUT_SECONDS)
        found = Running(running, client, f"fleet-{service}")
        eventually(lambda: client.available(SPARK + found.name))
        application = found.status()["application"]
        yield found
    shutil.rmtree(Path(package("pyspark").__file__).parent / "work" / application, ignore_errors=True)


class Calls:
    """Callers that call again and again.  Counts replies and failures, and records the longest call."""

    def __init__(self, endpoint, service, callers=4, pause=0.0, **options):
        self.done = 0
        self.failed = []
        self.worst = 0.0
        self._endpoint = endpoint
        self._service = service
        self._pause = pause
        self._options = options
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def _call(self):
        with Client(self._endpoint, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    client.request(self._service, b"", **self._options)
                except ZmdpError as error:
                    self.failed.append(error)
                took = time.monotonic() - began
                with self._lock:
                    self.done += 1
                    self.worst = max(self.worst, took)
                self._stop.wait(self._pause)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def stop(self):
        """Make no further calls, and wait for those that are running."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def go_on(self, number=50):
        """Wait for `number` more replies."""
        until = self.done + number
        eventually(lambda: self.done >= until, SPARK_TIMEOUT_SECONDS)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
