"""Fleets on the tests' session: leases, draining, the control service."""

import json
import os
import re
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fleets import Calls
from support.processes import eventually

from zmdp.clients import Client
from zmdp.mdp.errors import ServiceError, SettingError
from zmdp.spark import control
from zmdp.spark.fleet.cluster import cores
from zmdp.spark.fleet.driver import Fleet
from zmdp.spark.fleet.executor import LeaseTask, serve
from zmdp.spark.fleet.leases import classify_failure
from zmdp.spark.fleet.settings import FleetSettings, is_loopback
from zmdp.workers import Worker
from zmdp.workers.scaling import Died, Lease, Refused

HERE = Path(__file__).parents[1]
BEATS = {"heartbeat": 0.2, "liveness": 50}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Change to the folder with the handlers."""
    monkeypatch.chdir(HERE)


class Shared:
    """A cluster whose session outlives the fleet."""

    master, conf = "local[2,3]", {}

    def __init__(self, spark):
        self._spark = spark

    def open(self, name, *, slots=None, reserve=0):
        return SimpleNamespace(sparkContext=self._spark.sparkContext, stop=lambda: None)


def announced(client, *names):
    """Wait until there are exactly these drivers."""
    eventually(lambda: control.drivers(client) == list(names))


@contextmanager
def running(spark, endpoint, **settings):
    """Run a fleet in a thread."""
    given = {"handler": "fleet_handlers:pid", "service": "pid", "name": "test", "broker": endpoint, **BEATS, **settings}
    fleet = Fleet(FleetSettings(**given), Shared(spark))
    ready = threading.Event()
    thread = threading.Thread(target=fleet.run, args=(ready.set,))
    thread.start()
    try:
        assert ready.wait(20)
        yield fleet
    finally:
        fleet.drain()
        thread.join()


@pytest.fixture
def client(endpoint):
    with Client(endpoint, timeout=60, retries=0) as client:
        yield client


def busy(client, service):
    """Whether a worker of the service has a request."""
    (row,) = json.loads(client.request("mmi.services", service.encode())[0])["services"]
    return row["running"] > 0


# ── one lease ────────────────────────────────────────────────────────────────────────────────────────────────────────


def lease(spark, endpoint, handler, *, seconds=0.1, **settings):
    """Run one lease's job and return its result."""
    given = {"handler": handler, "service": "s", "name": "f", "broker": endpoint, **BEATS, **settings}
    task = LeaseTask(FleetSettings(**given), "run", "spark.control.f/0", Lease(0, 1, seconds), (str(HERE),))
    (result,) = spark.sparkContext.parallelize([0], 1).mapPartitions(partial(serve, task)).collect()
    return result


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ("no_such_module:f", "cannot use no_such_module:f: No module named 'no_such_module'"),
        ("fleet_handlers:nothing", "AttributeError: module 'fleet_handlers' has no attribute 'nothing'"),
        ("fleet_handlers:not_callable", "fleet_handlers:not_callable is of type int: a fleet needs a function"),
        ("zmdp.workers.echo:worker", "zmdp.workers.echo:worker is of type Worker: a fleet needs a function"),
    ],
)
def test_an_unusable_handler_is_returned_as_a_result(spark, endpoint, handler, why):
    result = lease(spark, endpoint, handler)
    assert set(result) == {"host", "refused"}
    assert why in result["refused"]


def test_a_missing_module_is_reported_with_advice(spark, endpoint):
    refused = lease(spark, endpoint, "no_such_module:f")["refused"]
    assert "--py-files" in refused
    assert "--archive" in refused


def test_an_executor_reports_a_missing_codec(spark, endpoint):
    result = lease(spark, endpoint, "fleet_handlers:double", codec="no such codec")
    assert "no such codec" in result["refused"]


def test_a_lease_reports_an_unreachable_broker(spark):
    result = lease(spark, "tcp://127.0.0.1:1", "fleet_handlers:pid")
    assert result["served"] == 0
    assert "nothing is listening there" in result["unreachable"]


# ── a fleet ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fleet_uses_whichever_of_its_brokers_answers(spark, endpoint, client):
    nowhere = "tcp://127.0.0.1:1"
    with running(spark, [nowhere, endpoint]) as fleet:
        assert int(client.request("pid")[0]) != os.getpid()
        assert fleet.status()["broker"] == f"{nowhere}, {endpoint}"


def test_a_fleet_serves_reports_its_status_and_drains(spark, endpoint, client):
    with running(spark, endpoint) as fleet:
        pid = int(client.request("pid")[0])
        assert pid != os.getpid()
        (slot,) = eventually(lambda: [row for row in fleet.status()["slots"] if row["served"]])
        assert (slot["slot"], slot["state"], slot["pid"], slot["executor"]) == (0, "serving", pid, "driver")
        (row,) = json.loads(client.request("mmi.workers", b"pid")[0])["workers"]
        assert (row["name"], row["pid"], row["held"]) == ("spark.control.test slot 0", pid, 0)
        assert control.drivers(client) == ["test"]
        result = control.ask(client, "test", "status")
        assert {name: result[name] for name in ("kind", "name", "service", "handler", "master", "min", "max")} == {
            "kind": "fleet", "name": "test", "service": "pid", "handler": "fleet_handlers:pid",
            "master": "local[2,3]", "min": 1, "max": 1,
        }  # fmt: skip
        assert (result["failures"], result["last_error"]) == (0, None)
        eventually(lambda: control.ask(client, "test", "status")["queued"] == 0)
        assert control.ask(client, "test", "drain")["draining"] is True
        eventually(lambda: not client.available("pid"))
    assert fleet.status()["slots"] == []


def test_leases_are_renewed_in_the_same_python_process(spark, endpoint, client):
    with running(spark, endpoint, lease=0.3) as fleet:
        pids = set()
        while fleet._slots._leases < 5:
            pids |= {client.request("pid")[0] for _ in range(20)}
        assert len(pids) < 5  # one, unless Spark had not got it back yet when the next lease began
        assert fleet.status()["failures"] == 0


def test_streams_and_codecs(spark, endpoint, client):
    with running(spark, endpoint, handler="fleet_handlers:count", service="count"):
        assert [list(part) for part in client.stream("count", b"3")] == [[b"0"], [b"1"], [b"2"], [b"done"]]
    with running(spark, endpoint, handler="fleet_handlers:double", service="double", codec="json"):
        assert client.call("double", 21) == 42


@pytest.mark.parametrize("handler", ["together", "together_async"])
def test_a_slot_handles_several_requests_at_once(spark, endpoint, client, handler):
    with running(spark, endpoint, handler=f"fleet_handlers:{handler}", service="s", concurrency=3) as fleet:
        replies = [client.submit("s") for _ in range(3)]  # each waits for the others
        assert [list(reply.result()) for reply in replies] == [[b""]] * 3
        eventually(lambda: fleet.status()["slots"][0]["served"] == 3)
        assert fleet._slots.concurrency == 3


def test_streams_of_async_generators(spark, endpoint, client):
    with running(spark, endpoint, handler="fleet_handlers:count_async", service="count"):
        assert [list(part) for part in client.stream("count", b"2")] == [[b"0"], [b"1"], [b"done"]]
        reply = client.submit("count", b"100000000")
        eventually(lambda: busy(client, "count"))
        reply.cancel()
        eventually(lambda: not busy(client, "count"))


def test_a_fleet_retries_a_handler_that_cannot_be_imported(spark, endpoint, client, logged):
    with running(spark, endpoint, handler="no_such_module:f") as fleet:
        assert logged("cannot serve pid: cannot use no_such_module:f: No module named")
        eventually(lambda: fleet.status()["failures"] >= 2)
        result = control.ask(client, "test", "status")
        assert "no_such_module" in result["last_error"]
        assert [slot["state"] for slot in result["slots"]] in (["waiting"], ["starting"])


def test_a_killed_python_process_is_replaced_and_its_request_repeated(spark, endpoint, client):
    with running(spark, endpoint, handler="fleet_handlers:slow", service="slow"):
        before = int(client.request("slow", b"0")[0])
        reply = client.submit("slow", b"1")
        eventually(lambda: busy(client, "slow"))
        os.kill(before, 9)
        assert int(reply.result()[0]) != before


def test_draining_finishes_running_requests(spark, endpoint, client):
    with running(spark, endpoint, handler="fleet_handlers:slow", service="slow", lease=0.2):
        reply = client.submit("slow", b"1")
        eventually(lambda: busy(client, "slow"))
    assert int(reply.result(timeout=0)[0])


def test_an_empty_fleet_scales_up_for_a_request(spark, endpoint, client):
    with running(spark, endpoint, minimum=0, idle=0.5) as fleet:
        eventually(lambda: fleet._slots.load)
        assert fleet.status()["slots"] == []
        assert client.request("pid")
        eventually(lambda: fleet.status()["slots"] == [])
        assert client.request("pid")


def test_strange_reports_are_refused_or_told_to_drain(spark, endpoint, client):
    with running(spark, endpoint) as fleet:
        client.request("pid")
        for strange in (b"[]", b'{"slot": 0, "lease": 1}', b'{"run": "x", "slot": 0, "lease": 1}'):
            with pytest.raises(ServiceError, match="expected the report of a slot"):
                client.request(fleet._reports, strange)
        late = {"run": fleet._run_id, "slot": 0, "lease": 99}
        assert client.call(fleet._reports, late, codec="json") == {"drain": True}


# ── replacing a fleet ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fleet_is_replaced_without_a_gap(spark, endpoint, client):
    with running(spark, endpoint, service="version") as old:
        client.request("version")
        announced(client, "test")
        with Calls(endpoint, "version", wait=False) as calls:  # a call made while there is no worker fails
            calls.go_on()
            with running(spark, endpoint, service="version", handler="fleet_handlers:version", replace=True) as new:
                announced(client, "test", "test.next")
                assert control.ask(client, "test.next", "status")["name"] == "test.next"
                announced(client, "test")
                eventually(lambda: new.status()["name"] == "test")
                assert old.ending
                assert old.status()["slots"] == []
                calls.go_on()
                assert client.request("version") == [b"new"]
                assert control.ask(client, "test", "status")["handler"] == "fleet_handlers:version"
                assert calls.failed == []
                calls.stop()


def test_a_fleet_that_cannot_serve_replaces_nothing(spark, endpoint, client, logged):
    with running(spark, endpoint) as old:
        client.request("pid")
        announced(client, "test")
        with running(spark, endpoint, handler="no_such_module:f", replace=True) as new:
            assert logged("cannot serve pid: cannot use no_such_module:f")
            eventually(lambda: new.status()["failures"] >= 2)
            assert control.ask(client, "test.next", "drain")["draining"] is True
        assert not old.ending
        assert client.request("pid")


def test_a_fleet_that_died_is_replaced(spark, endpoint, client, monkeypatch):
    """The predecessor has answered once, and is gone when it should drain."""
    monkeypatch.setattr("zmdp.spark.fleet.predecessor.LOST_SECONDS", 0.0)
    with Worker(f"{control.SPARK}test", lambda request: b'{"kind": "fleet", "service": "pid", "wanted": 1}',
                broker=endpoint, **BEATS) as predecessor:  # fmt: skip
        announced(client, "test")
        given = {"heartbeat": 0.2, "liveness": 2}
        with running(spark, endpoint, replace=True, **given) as new:
            predecessor.stop()
            predecessor.wait()
            eventually(lambda: new.status()["name"] == "test")


def test_without_a_predecessor_a_fleet_starts_as_always(spark, endpoint, client):
    with running(spark, endpoint, replace=True) as fleet:
        assert client.request("pid")
        assert fleet.status()["name"] == "test"


def test_a_fleet_that_cannot_be_replaced(spark, endpoint, client):
    with running(spark, endpoint, service="other"):
        announced(client, "test")
        again = Fleet(FleetSettings("m:f", "s", "test", broker=endpoint, replace=True), Shared(spark))
        with pytest.raises(SettingError, match="--replace: test is not a fleet that serves s"):
            again.run()
    with running(spark, endpoint, service="s", name="test"), running(spark, endpoint, service="s", name="test.next"):
        announced(client, "test", "test.next")
        with pytest.raises(SettingError, match=re.escape("test is already being replaced, by test.next")):
            again.run()


def test_more_slots_than_cores_are_refused(spark, endpoint):
    fleet = Fleet(FleetSettings("m:f", "s", "n", broker=endpoint, minimum=2), Shared(spark))
    with pytest.raises(SettingError, match=re.escape("local[2,3] has 2 cores, of which 1 are reserved (--reserve)")):
        fleet.run()


# ── what is wrong with it ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"handler": "module"}, "'module': expected MODULE:FUNCTION"),
        ({"handler": "module:"}, "expected MODULE:FUNCTION"),
        ({"service": "mmi.x"}, "'mmi.x' is a reserved name"),
        ({"service": "spark.control.x"}, "'spark.control.x' is a reserved name"),
        ({"service": ""}, "service"),
        ({"name": "a name"}, "'a name' is not a valid name"),
        ({"minimum": 3, "maximum": 2}, "--min 3 --max 2"),
    ],
)
def test_invalid_settings_are_refused(settings, why):
    with pytest.raises(SettingError, match=re.escape(why)):
        FleetSettings(**{"handler": "m:f", "service": "s", "name": "n", **settings})


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("… ModuleNotFoundError: No module named 'zmdp'", (Refused, "executors cannot import zmdp")),
        ("… ModuleNotFoundError: No module named 'zmq'", (Refused, "executors have no pyzmq")),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has",
            (Refused, "executors do not run the driver's Python version"),
        ),
        (
            'Lost task … java.io.IOException: Cannot run program "./environment/bin/python": error=2',
            (Refused, "executors have no Python at ./environment/bin/python"),
        ),
        (
            "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost task 0.0 "
            "in stage 1.0 (TID 1) (10.0.0.7 executor 3): ExecutorLostFailure (executor 3 exited caused by one of the "
            "running tasks) Reason: Command exited with code 137\nDriver stacktrace:",
            (Died, "executor 3 on 10.0.0.7: ExecutorLostFailure"),
        ),
        (
            "Lost task 0.0 in stage 1.0 (TID 1) (h executor 0): org.apache.spark.SparkException: Python worker exited "
            "unexpectedly (crashed). Consider setting 'spark.x' …",
            (Died, "executor 0 on h: Python worker exited unexpectedly (crashed)."),
        ),
        (
            "Lost task 0.0 in stage 1.0 (TID 1) (h executor 0): org.apache.spark.api.python.PythonException: Traceback "
            '(most recent call last):\n  File "x.py", line 1, in <module>\nImportError: libzmq.so.5: cannot open\n\n'
            "\tat org.apache.spark.X(X.scala:1)",
            (Died, "executor 0 on h: ImportError: libzmq.so.5: cannot open"),
        ),
        ("Job 3 cancelled because SparkContext was shut down", (Died, "the job: Job 3 cancelled")),
    ],
)
def test_failures_of_jobs_are_explained_in_one_line(text, outcome):
    kind, reason = outcome
    found = classify_failure(RuntimeError(text))
    assert isinstance(found, kind)
    assert found.reason.startswith(reason)
    assert "\n" not in found.reason


class Conf(dict):
    """The part of a SparkContext that tells its cores."""

    defaultParallelism = 5  # noqa: N815 - Spark's name

    def __init__(self, master, **conf):
        super().__init__({f"spark.{name.replace('_', '.')}": value for name, value in conf.items()})
        self.master = master

    def getConf(self):  # noqa: N802
        return self


@pytest.mark.parametrize(
    ("context", "number"),
    [
        (Conf("local"), 1),
        (Conf("local[3]"), 3),
        (Conf("local[3,2]"), 3),
        (Conf("local[*]"), os.cpu_count()),
        (Conf("local-cluster[3,2,1024]"), 6),
        (Conf("spark://h:7077"), 5),
        (Conf("spark://h:7077", cores_max="8"), 5),  # what it has, not what it may have
        (Conf("yarn", **{"dynamicAllocation_enabled": "true", "dynamicAllocation_maxExecutors": "3"}), 3),
    ],
)
def test_the_cores_of_a_cluster(context, number):
    assert cores(context) == number


def test_an_unlimited_cluster_needs_a_maximum():
    with pytest.raises(SettingError, match="set one with --max"):
        cores(Conf("yarn", dynamicAllocation_enabled="true"))


def test_loopback_addresses():
    assert all(map(is_loopback, ["tcp://127.0.0.1:5555", "tcp://localhost:1", "ipc:///run/b", "tcp://[::1]:5"]))
    assert not any(map(is_loopback, ["tcp://10.0.0.1:5555", "tcp://broker:5555"]))


def test_reports_are_json_that_the_driver_understands(spark, endpoint, client):
    with running(spark, endpoint):
        client.request("pid")
        row = eventually(lambda: [s for s in control.ask(client, "test", "status")["slots"] if s["pid"]])[0]
        assert json.loads(json.dumps(row)) == row
        assert 1.6e9 < row["since"] < 1e11
