"""`mdp-spark batch` as a process that is killed, or whose Spark is."""

import json
import os
import re
import shlex
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.connect import connect_server
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.pages import DOCS, blocks, need_curl, sessions
from support.processes import broker, eventually, process, run
from support.sparks import QUICK, task_pids

from zmdp.clients import Client, RequestCancelled, ServiceError

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("java"), pytest.mark.timeout(2400)]
HERE = Path(__file__).parents[1]
LOCAL = ("--master", "local[2]", "--conf", "spark.ui.enabled=false")
JOBS = [part for name in ("gated", "rows", "value") for part in ("--job", f"{name}=batch_jobs:{name}")]


@contextmanager
def batch(at, *options, master=LOCAL, jobs=JOBS, cwd=HERE):
    """Run a batch and wait until it is ready."""
    command = ("mdp-spark", "batch", *master, *jobs, *QUICK, "--history", ":memory:", *options)
    with process(*command, cwd=cwd, new_group=True, MDP_BROKER=at) as running:
        try:
            with Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client:
                eventually(lambda: client.available("spark.job") or running.poll() is not None, SPARK_TIMEOUT_SECONDS)
            assert running.poll() is None, running.stderr
            yield running
        finally:
            for pid in family(running.pid):
                kill(pid)


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def parents():
    """Return each process's parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(stat.parent.name)] = int(fields[1])
    return found


def family(pid):
    """Return the descendants of a process."""
    children = parents()
    found, new = set(), {pid}
    while new:
        found |= new
        new = {child for child, parent in children.items() if parent in found} - found
    return found - {pid}


def is_java(pid):
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "java"
    except OSError:
        return False


def javas(pid):
    return [each for each in family(pid) if is_java(each)]


def ask(client, name, **arguments):
    reply = client.request("spark.job", name.encode(), json.dumps(arguments).encode())
    return json.loads(reply[-1])


def gone(pids):
    """Whether none of these processes runs."""
    return not set(pids) & set(parents())


def test_a_batch_survives_its_jvm_and_stops_cleanly(tmp_path):
    with broker(*QUICK) as (_, at), Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client:
        with batch(at, "--name", "one", "--conf", "spark.driver.maxResultSize=100k", "--results", str(tmp_path)) as one:
            # more than Spark passes to the driver: it is written where it is made
            reply = client.request("spark.sql", b"SELECT id, uuid() AS u FROM range(0, 20000, 1, 4)")
            described = json.loads(reply[-2])
            assert (described["rows"], described["format"]) == (20_000, "parquet")

            future = client.submit("spark.job", b"gated", json.dumps({"folder": str(tmp_path)}).encode())
            workers = task_pids(tmp_path)
            (java,) = javas(one.pid)
            kill(java)
            with pytest.raises(ServiceError, match="Spark was lost during job") as raised:
                future.result()
            assert raised.value.code == 502
            assert ask(client, "value", a=1)["given"] == {"a": 1}
            one.line("the Spark session is lost; opening another")
            assert "Traceback" not in one.stderr
            eventually(lambda: gone([*workers, java]), SPARK_TIMEOUT_SECONDS)

            # running jobs are finished when the batch is told to stop
            (tmp_path / "again").mkdir()
            future = client.submit("spark.job", b"gated", json.dumps({"folder": str(tmp_path / "again")}).encode())
            task_pids(tmp_path / "again")
            left = family(one.pid)
            one.send_signal(signal.SIGTERM)
            one.line("finishing running jobs")
            (tmp_path / "again" / "go").touch()
            assert json.loads(future.result()[-1]) == 2
            assert one.wait() == 0
            eventually(lambda: gone(left), SPARK_TIMEOUT_SECONDS)


def test_a_large_result_costs_the_driver_little_memory(tmp_path):
    """420 MB of rows in a driver with 512 MB, while another caller's job runs."""
    small = ("--conf", "spark.driver.memory=512m", "--results", str(tmp_path / "results"))
    with broker(*QUICK) as (_, at), Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client:
        with batch(at, *small) as running:
            neighbour = client.submit("spark.job", b"gated", json.dumps({"folder": str(tmp_path), "tasks": 1}).encode())
            task_pids(tmp_path, tasks=1)
            (java,) = javas(running.pid)
            large = b"SELECT id, repeat('x', 200) AS x FROM range(0, 2000000, 1, 2)"
            described = json.loads(client.request("spark.sql", large)[-2])
            assert (described["rows"], len(list(Path(described["path"]).glob("part-*")))) == (2_000_000, 2)
            (tmp_path / "go").touch()
            assert json.loads(neighbour.result()[-1]) == 1
            assert javas(running.pid) == [java]


def test_a_second_signal_cancels_jobs_and_a_killed_driver_leaves_no_processes(tmp_path):
    with ExitStack() as stack:
        _, at = stack.enter_context(broker(*QUICK))
        client = stack.enter_context(Client(at, timeout=SPARK_TIMEOUT_SECONDS))
        two = stack.enter_context(batch(at, "--name", "two"))
        future = client.submit("spark.job", b"gated", json.dumps({"folder": str(tmp_path)}).encode())
        workers = task_pids(tmp_path)
        two.send_signal(signal.SIGINT)
        two.line("finishing running jobs")
        two.send_signal(signal.SIGINT)
        with pytest.raises(RequestCancelled):
            future.result()
        assert two.wait() == 0
        eventually(lambda: gone(workers), SPARK_TIMEOUT_SECONDS)

        (tmp_path / "again").mkdir()
        three = stack.enter_context(batch(at, "--name", "three"))
        client.submit("spark.job", b"gated", json.dumps({"folder": str(tmp_path / "again")}).encode())
        left = [*task_pids(tmp_path / "again"), *javas(three.pid)]
        three.end(signal.SIGKILL)
        eventually(lambda: gone(left), SPARK_TIMEOUT_SECONDS)


@pytest.mark.long
def test_a_batch_ends_although_a_job_does_not(tmp_path):
    jobs = ("--job", "stuck=batch_jobs:stuck")
    with (
        broker("--heartbeat", "0.2", "--liveness", "600") as (_, at),
        Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client,
    ):
        with batch(at, "--drain-timeout", "0.5", jobs=jobs) as running:
            client.submit("spark.job", b"stuck", json.dumps({"folder": str(tmp_path)}).encode())
            eventually((tmp_path / "began").exists, SPARK_TIMEOUT_SECONDS)
            left = family(running.pid)
            running.send_signal(signal.SIGTERM)
            assert running.poll(SPARK_TIMEOUT_SECONDS) == 1
            running.line("finishing running jobs, within 0.5 s; interrupt again to cancel them")
            running.line("not finished within 0.5 s: cancelling job ")
            running.line("not finished within 0.5 s: gave up job ")
            eventually(lambda: gone(left))


def test_a_batch_waits_for_broker_and_master():
    nowhere = "tcp://127.0.0.1:9"
    with process("mdp-spark", "batch", "--master", "spark://127.0.0.1:9", MDP_BROKER=nowhere) as waiting:
        line = waiting.line("no Spark master answers at 127.0.0.1:9 (Connection refused); retrying in", count=2)
        assert "retrying in 2 s" in line
        assert waiting.end(signal.SIGTERM) == 0
    with process("mdp-spark", "batch", *LOCAL, "--history", ":memory:", MDP_BROKER=nowhere) as waiting:
        waiting.line("no broker at tcp://127.0.0.1:9 yet: nothing is listening there", timeout=SPARK_TIMEOUT_SECONDS)
        assert waiting.end(signal.SIGTERM) == 0


def test_a_batch_on_separate_executors(tmp_path):
    master = ("--master", "local-cluster[2,1,1024]", "--conf", "spark.ui.enabled=false")
    with broker(*QUICK) as (_, at), Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client:
        files = ("--py-files", str(HERE / "batch_jobs.py"))
        with batch(at, "--results", str(tmp_path / "results"), *files, master=master) as running:
            assert ask(client, "rows", n=2) == [{"id": 0}, {"id": 1}]
            future = client.submit("spark.job", b"gated", json.dumps({"folder": str(tmp_path)}).encode())
            workers = task_pids(tmp_path)
            future.cancel()
            eventually(lambda: gone(workers), SPARK_TIMEOUT_SECONDS)
            # an executor that is lost costs no job
            (tmp_path / "again").mkdir()
            future = client.submit("spark.job", b"gated", json.dumps({"folder": str(tmp_path / "again")}).encode())
            task_pids(tmp_path / "again")
            kill(next(pid for pid in javas(running.pid) if b"CoarseGrainedExecutorBackend" in
                      Path(f"/proc/{pid}/cmdline").read_bytes()))  # fmt: skip
            (tmp_path / "again" / "go").touch()
            assert json.loads(future.result()[-1]) == 2


def test_a_batch_on_a_connect_server(tmp_path):
    with (
        connect_server(tmp_path) as port,
        broker(*QUICK) as (_, at),
        Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client,
    ):
        connect = ("--connect", f"sc://127.0.0.1:{port}/;user_id=sesame")
        with batch(at, "--results", str(tmp_path / "results"), "--inline", "1000", master=connect):
            assert ask(client, "rows", n=2) == [{"id": 0}, {"id": 1}]
            reply = client.request("spark.sql", b"SELECT * FROM range(1000)")
            assert json.loads(reply[-2])["format"] == "parquet"
            with pytest.raises(ServiceError, match="TABLE_OR_VIEW_NOT_FOUND"):
                client.request("spark.sql", b"SELECT * FROM nowhere")
            slow = b"SELECT count(*) AS n FROM range(1000000000) a JOIN range(1000) b ON a.id % 7 = b.id % 7"
            parts = client.stream("spark.sql", slow)
            seen = next(part for part in parts if json.loads(part[0]).get("tasks_running"))
            job = json.loads(seen[0])["job"]
            parts.close()
            status = json.loads(run("mdp-spark", "status", "--json", "--broker", at).stdout)
            assert status[0]["master"] == f"sc://127.0.0.1:{port}"
            assert [each["job"] for each in status[0]["running"]] in ([], [job])
            eventually(
                lambda: not json.loads(run("mdp-spark", "status", "--json", "--broker", at).stdout)[0]["running"]
            )
            assert ask(client, "rows", n=1) == [{"id": 0}]


def test_the_page_about_batches(tmp_path, capsys):
    """The catalogue, job, commands and Python of docs/spark/index.md work; only the UUID differs."""
    page, *_ = (DOCS / "spark" / "index.md").read_text().partition("\n## From notebooks and programs\n")
    config, *_ = blocks(page, "toml")
    job, program = blocks(page, "python")
    (tmp_path / "catalogue.toml").write_text(config)
    (tmp_path / "people_jobs.py").write_text(job)
    (tmp_path / "people.csv").write_text("name,age\nann,3\nbob,4\nann,5\n")
    with ExitStack() as stack:
        _, at = stack.enter_context(broker(*QUICK))
        titanic = stack.enter_context(process("titanic", "serve", *QUICK, cwd=tmp_path, MDP_BROKER=at))
        options = ("--config", str(tmp_path / "catalogue.toml"))
        stack.enter_context(batch(at, *options, cwd=tmp_path, jobs=()))
        titanic.line("serving")
        uuid, printed_url = "", "http://127.0.0.1:8080"
        for command, printed in [each for block in blocks(page, "console") for each in sessions(block)]:
            if command == "mdp-gateway http":
                gateway = stack.enter_context(process(*command.split(), "--bind", "127.0.0.1:0", MDP_BROKER=at))
                url = gateway.line("http://", "stdout").strip()
            elif command.startswith("curl "):
                need_curl()
                words = shlex.split(command.replace(printed_url, url))
                done = subprocess.run(words, capture_output=True, timeout=SPARK_TIMEOUT_SECONDS, check=True)
                assert done.stdout.decode().splitlines() == printed
            elif printed and command.startswith(("mdp-spark submit", "mdp-spark status")):  # others lack tables
                done = run(*shlex.split(re.sub("[0-9a-f]{32}", uuid, command)), MDP_BROKER=at)
                lines = done.stdout.decode().splitlines()
                if re.fullmatch("[0-9a-f]{32}", printed[0]):
                    (uuid,) = lines
                else:
                    assert lines == printed, done.stderr
        exec(compile(program.replace("tcp://127.0.0.1:5555", at), "docs/spark/index.md", "exec"), {})
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[{'n': 3}]"
    assert "yielded" in out
    assert out[-1] == "[{'name': 'ann', 'age': 5}, {'name': 'bob', 'age': 4}]"
