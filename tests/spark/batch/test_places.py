"""The same jobs on a local master, a standalone cluster and Spark Connect: all behave the same."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import place_jobs
import pytest
from support.connect import connect_server
from support.fleets import SMALL, SPARK_TIMEOUT_SECONDS
from support.processes import broker, eventually, process
from support.sparks import HERE, QUICK
from support.standalone import standalone

from zmdp.clients import Client, ServiceError
from zmdp.spark import drivers

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("java"), pytest.mark.timeout(2400)]
JOBS = [name for name, job in vars(place_jobs).items() if getattr(job, "__module__", "") == "place_jobs"]


@pytest.fixture(scope="module", params=["local", "standalone", "connect"])
def place(request, tmp_path_factory):
    """A batch at one of the places, and a client of its broker."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "numbers.csv").write_text("a\n1\n2\n3\n")
    config = folder / "catalogue.toml"
    table = f'format = "csv"\npath = "{folder / "numbers.csv"}"\nschema = "a int"\noptions = {{ header = true }}\n'
    config.write_text(f'results = "{folder / "results"}"\n[tables.numbers]\n{table}')
    jobs = [part for name in JOBS for part in ("--job", f"{name}=place_jobs:{name}")]
    with ExitStack() as stack:
        if request.param == "connect":
            where = ("--connect", f"sc://127.0.0.1:{stack.enter_context(connect_server(folder))}")
        elif request.param == "standalone":
            cluster = stack.enter_context(standalone(folder, cores=2))
            where = ("--master", cluster.url, *SMALL, "--conf", "spark.executor.memory=512m")
        else:
            where = ("--master", "local[2]", *SMALL)
        _, at = stack.enter_context(broker(*QUICK))
        command = ("mdp-spark", "batch", "--name", "batch", "--config", str(config), *where, *jobs, *QUICK)
        running = stack.enter_context(process(*command, cwd=HERE, MDP_BROKER=at, PYTHONPATH=str(HERE)))
        client = stack.enter_context(Client(at, timeout=SPARK_TIMEOUT_SECONDS, retries=0))
        eventually(lambda: client.available("spark.job") or running.poll() is not None, SPARK_TIMEOUT_SECONDS)
        assert running.poll() is None, running.stderr
        yield SimpleNamespace(client=client, folder=folder)


def run(place, name, /, **arguments):
    reply = place.client.request("spark.job", name.encode(), json.dumps(arguments).encode())
    return json.loads(reply[-1])


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("columns", {}, [{"n": 1}, {"n": 3}, {"n": 5}]),
        ("udf", {}, [{"n": 1}, {"n": 2}, {"n": 3}]),
        ("pandas_udf", {}, [{"n": 0}, {"n": -1}, {"n": -2}]),
        ("sql", {"least": 2}, [{"a": 2}, {"a": 3}]),
        ("active", {}, [2, True]),
        ("stream", {"folder": "streamed"}, [{"total": 15}]),
    ],
)
def test_a_job(place, name, arguments, expected):
    if "folder" in arguments:
        arguments = {"folder": str(place.folder / arguments["folder"])}
    assert run(place, name, **arguments) == expected


@pytest.mark.parametrize(
    ("name", "code", "text", "line"),
    [
        ("wrong_column", 422, "[UNRESOLVED_COLUMN.WITH_SUGGESTION] ", 'F.col("nothing")'),
        ("failing_function", 500, "ValueError: not 0", "raise ValueError"),
        ("failing_job", 500, "TypeError: unsupported operand type(s) for +", 'count() + Path("x")'),
    ],
)
def test_a_job_that_fails(place, name, code, text, line):
    """The caller gets the error, and the logs have the line of the job that caused it."""
    with pytest.raises(ServiceError) as raised:
        run(place, name)
    assert (raised.value.code, raised.value.text[: len(text)]) == (code, text)
    (record, *_) = drivers.ask(place.client, "batch", "history")["jobs"]
    (record,) = drivers.ask(place.client, "batch", "history", job=record["job"])["jobs"]
    assert line in record["traceback"]
