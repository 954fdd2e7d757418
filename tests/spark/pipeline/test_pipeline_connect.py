"""`call_service` on Spark Connect: a server of its own."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from support.processes import eventually
from support.titanics import BEATS

from zmdp.mdp.errors import SettingError
from zmdp.spark.pipeline import call_service, register_function
from zmdp.spark.session import SparkError, connect_session, java_version
from zmdp.workers import Worker

TIMEOUT_SECONDS = 90.0


@contextmanager
def connected(folder):
    """A session of a Spark Connect server that is started for it."""
    pyspark = Path(pytest.importorskip("pyspark").__file__).parent
    pytest.importorskip("grpc")
    with zmq.Context() as context, context.socket(zmq.REP) as free:
        port = free.bind_to_random_port("tcp://127.0.0.1")
    settings = {
        "spark.connect.grpc.binding.port": port, "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = subprocess.Popen(
        ["bash", pyspark / "sbin" / "start-connect-server.sh", "--master", "local[2]", *options],
        env={
            **os.environ, "SPARK_HOME": str(pyspark), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_NO_DAEMONIZE": "1", "SPARK_LOG_DIR": str(folder),
        },
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        session = eventually(lambda: attempt(port), TIMEOUT_SECONDS)
        yield session
        session.stop()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def attempt(port):
    with suppress(SparkError):
        return connect_session(f"sc://127.0.0.1:{port}")


@pytest.mark.spark_long
@pytest.mark.timeout(300)
@pytest.mark.skipif(java_version() is None, reason="there is no Java")
def test_a_connect_session(tmp_path, endpoint):
    with (
        connected(tmp_path) as session,
        Worker("up", lambda request: [frame.upper() for frame in request], broker=endpoint, **BEATS),
    ):
        df = session.range(100).selectExpr("id", "concat('row ', id) AS text", "id AS id")
        replies = call_service(df, "up", input="text", broker=endpoint, rows_per_request=7)
        assert [tuple(row) for row in replies.collect()] == [
            (n, f"row {n}", n, f"ROW {n}", 200, None) for n in range(100)
        ]
        (row,) = call_service(df.limit(1), "up", input=["text"], broker=endpoint).collect()
        assert row.reply == '{"TEXT":"ROW 0"}'
        (row,) = call_service(df.limit(1), "up", input=df.text.substr(1, 3), broker=endpoint).collect()
        assert row.reply == "ROW"
        for given in ({"input": "nope"}, {"input": df.nope}, {"input": "id"}):
            with pytest.raises(SettingError):
                call_service(df, "up", broker=endpoint, **given)
        register_function(session, broker=endpoint)
        (row,) = session.sql("SELECT call_service('up', 'x') AS r").collect()
        assert tuple(row.r) == ("X", 200, None)
