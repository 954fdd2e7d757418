"""The example of a declarative pipeline, with Spark's own command, which starts a Connect server."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.sparks import BEATS, SMALL_JAVA
from support.titanics import serving

from zmdp.clients import Client
from zmdp.titanic import Titanic
from zmdp.workers import Worker

EXAMPLE = Path(__file__).parents[3] / "examples" / "declarative"
COMMAND = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not COMMAND.exists(), reason="declarative pipelines need PySpark 4.1"),
]


def run(how, folder, environment):
    """Run `spark-pipelines` in its own process group, which is killed if it hangs."""
    running = subprocess.Popen(
        [COMMAND, how], cwd=folder, env={**os.environ, **environment}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        out, _ = running.communicate(timeout=2 * SPARK_TIMEOUT_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, out


def rows(folder):
    """Return the rows of a table."""
    return [tuple(row.values()) for row in pq.read_table(folder).to_pylist()]


@pytest.mark.long
def test_the_example(tmp_path, endpoint):
    folder, db = tmp_path / "pipeline", tmp_path / "titanic.db"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    spec = folder / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/reviews-checkpoints", str(tmp_path / "checkpoints")))
    environment = {
        "BROKER": endpoint,
        "TITANIC_DB": f"sqlite:///{db}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": SMALL_JAVA,
    }
    handled = []

    def shout(request):
        handled.append(request[0])
        return request[0].upper()

    with Worker("shout", shout, broker=endpoint, **BEATS), serving(endpoint, str(db), **BEATS):
        with Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS) as client:
            assert Titanic(client).submit("shout", b"stored").result() == [b"STORED"]
        run("dry-run", folder, environment)
        assert handled == [b"stored"]
        run("run", folder, environment)
    warehouse = folder / "spark-warehouse"
    assert sorted(rows(warehouse / "replies")) == [
        (1, "good and cheap", "GOOD AND CHEAP", 200, None),
        (2, None, None, None, None),
        (3, "very good", "VERY GOOD", 200, None),
    ]
    assert set(rows(warehouse / "outcomes")) == {(200, 2), (None, 1)}
    assert rows(warehouse / "history") == [("shout", "done", 1)]
