"""A Spark Connect server on loopback."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from support.processes import eventually
from support.results import package

from zmdp.spark.session import SparkError, connect_session

CONNECT_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
"""Its script, `sbin/start-connect-server.sh`, is missing in PySpark 4.2.1."""


@contextmanager
def connect_server(folder):
    """Run a Spark Connect server; yield its port, on which it will listen."""
    pyspark = Path(package("pyspark").__file__).parent
    with zmq.Context() as context, context.socket(zmq.REP) as free:
        port = free.bind_to_random_port("tcp://127.0.0.1")
    settings = {
        "spark.connect.grpc.binding.port": port, "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.sql.shuffle.partitions": 2,
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = subprocess.Popen(
        [pyspark / "bin" / "spark-submit", "--class", CONNECT_SERVER, "--master", "local[2]", *options],
        env={
            **os.environ, "SPARK_HOME": str(pyspark), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
        },
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def connected(folder):
    """Yield a session of a Spark Connect server that is started for it; afterwards, this process is Classic again."""
    package("grpc")
    with connect_server(folder) as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        session = eventually(lambda: attempt(port))
        yield session
        session.stop()


def attempt(port):
    with suppress(SparkError):
        return connect_session(f"sc://127.0.0.1:{port}")
