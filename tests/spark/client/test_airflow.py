"""A real Airflow runs the DAGs of docs/spark/airflow.md, and others, against a real batch and Titanic."""

import re
import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.pages import blocks
from support.processes import alive, eventually, process
from support.sparks import BEATS, HERE, LIMITS, free, running_batch, task_pids
from support.titanics import serving

import zmdp
from zmdp.clients import Client
from zmdp.spark import drivers
from zmdp.testing import running_broker
from zmdp.titanic import Titanic, UnknownTicket

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-airflow" / "bin" / "python"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
REQUEST = re.compile(r"request (\w{32});")
MORE = """
at = {"broker": "tcp://127.0.0.1:5555"}
with DAG("gated", schedule=None, default_args=at) as gated:
    SparkJobOperator(task_id="gated", job="gated", arguments={"folder": FOLDER})
with DAG("typo", schedule=None, default_args=at) as typo:
    SparkJobOperator(task_id="typo", sql="SELECT name,\\n  agee\\nFROM people", retries=1)
with DAG("failing", schedule=None, default_args=at) as failing:
    SparkJobOperator(task_id="failing", job="failing", retries=1, retry_delay=0)
"""


@pytest.fixture
def airflow(spark, tmp_path):
    """`airflow.run(*names)`: a process that runs DAGs."""
    if not PYTHON.exists():
        pytest.skip("Airflow is missing: `make airflow` installs it into .venv-airflow")
    (tmp_path / "people.csv").write_text("name,age\nann,3\nbob,4\nann,5\n")
    table = "format = 'csv'\npath = 'people.csv'\nschema = 'name string, age int'\noptions = { header = true }"
    with ExitStack() as stack:
        (at,) = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0)).endpoints
        stack.enter_context(running_batch(spark, at, tmp_path, tables=f"[tables.people]\n{table}"))
        stack.enter_context(serving(at, str(tmp_path / "titanic.db"), **BEATS))
        client = stack.enter_context(Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0))
        titanic = Titanic(client)
        page = (ROOT / "docs" / "spark" / "airflow.md").read_text()
        dags = "\n".join([f"FOLDER = {str(tmp_path)!r}", *blocks(page, "python"), MORE])
        (tmp_path / "dags").mkdir()
        (tmp_path / "dags" / "reports.py").write_text(dags.replace("tcp://127.0.0.1:5555", at))
        env = {
            "AIRFLOW_HOME": str(tmp_path / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "PYTHONPATH": str(Path(zmdp.__file__).parents[1]),
            "MDP_BROKER": at,
        }

        def run(*command):
            return stack.enter_context(process(*command, **env))

        def jobs(what):
            rows = drivers.ask(client, "batch", "history")["jobs"]
            return [row["state"] for row in reversed(rows) if row["what"].startswith(what)]

        def runs(*names):  # tasks write to both streams
            return run("/bin/sh", "-c", f"exec {PYTHON} {HERE / 'airflow_runs.py'} {' '.join(names)} 2>&1")

        def python(*arguments):
            done = run(str(PYTHON), *arguments)
            assert done.poll(SPARK_TIMEOUT_SECONDS) == 0, done.stderr

        python("-m", "airflow", "db", "migrate")
        yield SimpleNamespace(run=runs, python=python, titanic=titanic, folder=tmp_path, jobs=jobs)


def test_whoever_ends_a_deferred_task_cancels_its_job(airflow):
    """Airflow's triggerer calls `on_kill` of the trigger."""
    ticket = airflow.titanic.submit("nobody", b"")
    settings = {"uuid": ticket.uuid, "broker": None, "key": None, "broker_key": None}
    code = "from zmdp.spark.client.airflow import SparkJobTrigger; import asyncio; "
    airflow.python("-c", f"{code}asyncio.run(SparkJobTrigger(**{settings}).on_kill())")
    with pytest.raises(UnknownTicket):
        ticket.ready()


def test_tasks_run_jobs(airflow):
    """What fails is reported with its remedy; what is invalid is not tried again, and what failed is."""
    runs = airflow.run("dag", "typo", "failing")
    runs.line("RUN dag: older success, tell success, total success", "stdout", timeout=900)
    runs.line("years: 12", "stdout")
    runs.line('{"people": 3}', "stdout")
    runs.line("RUN typo: typo failed", "stdout", timeout=900)
    runs.line("Did you mean one of the following? [`age`, `name`]", "stdout")
    runs.line("line 2:   agee", "stdout")
    runs.line("RUN failing: failing failed", "stdout", timeout=900)
    assert runs.wait() == 0
    assert airflow.jobs("SELECT name,") == ["failed"]
    assert airflow.jobs("failing(") == ["failed", "failed"]


def test_a_task_attaches_to_its_job_until_its_end_is_known(airflow, spark):
    """Also after kill -9; whoever runs it once more gets a new job, and whoever ends it cancels that."""
    first = airflow.run("gated")
    task_pids(airflow.folder)
    first.end(signal.SIGKILL)
    again = airflow.run("gated", "gated")
    attached = again.line("request ", "stdout", timeout=900)
    assert REQUEST.search(attached)[1] == REQUEST.search(first.line("request ", "stdout"))[1]
    (airflow.folder / "go").touch()
    again.line("RUN gated: gated success", "stdout", timeout=900)
    for path in (*airflow.folder.glob("task-*"), airflow.folder / "go"):
        path.unlink()
    pids = task_pids(airflow.folder)
    again.send_signal(signal.SIGTERM)
    again.line("RUN gated: gated failed", "stdout", timeout=900)
    assert again.wait() == 0
    eventually(lambda: free(spark) and not any(map(alive, pids)), SPARK_TIMEOUT_SECONDS)
    assert airflow.jobs("gated(") == ["done", "cancelled"]
