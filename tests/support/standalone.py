"""A standalone Spark cluster on loopback, with a Master and a Worker process."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import process

HOME = Path(pyspark.__file__).parent
OPTIONS = "-Dspark.master.rest.enabled=false -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CLASS = "org.apache.spark.deploy"


@dataclass(frozen=True)
class Standalone:
    """The URLs of the Master and of its web page."""

    url: str
    page: str


@contextmanager
def standalone(folder: Path, *, cores: int) -> Iterator[Standalone]:
    """Run a cluster with one worker of `cores` cores, which keeps its files in `folder`."""
    env = {
        "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": OPTIONS, "SPARK_LOG_DIR": str(folder),
    }  # fmt: skip
    start = str(HOME / "bin" / "spark-class")
    here = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with process(start, f"{CLASS}.master.Master", *here, cwd=folder, **env) as master:
        line = master.line("Starting Spark master at spark://", timeout=SPARK_TIMEOUT_SECONDS)
        url = re.search(r"spark://127.0.0.1:\d+", line)[0]  # type: ignore[index]
        page = re.search(r"http://\S+:\d+", master.line("Bound MasterWebUI", timeout=SPARK_TIMEOUT_SECONDS))[0]  # type: ignore[index]
        room = ("--cores", str(cores), "--memory", f"{cores}g", "--work-dir", str(folder / "work"))
        with process(start, f"{CLASS}.worker.Worker", url, *here, *room, cwd=folder, **env) as worker:
            worker.line("Successfully registered with master", timeout=SPARK_TIMEOUT_SECONDS)
            yield Standalone(url, page)
