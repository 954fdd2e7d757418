"""The checks of `mdp-spark doctor`, each of whose failures says what to do."""

import json
import re
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import eventually, run
from support.results import package
from support.sparks import Shared

from zmdp.mdp.errors import SettingError
from zmdp.mdp.program.extras import install_command
from zmdp.spark import session
from zmdp.spark.fleet import doctor
from zmdp.spark.fleet.cluster import Cluster
from zmdp.spark.fleet.doctor import SUPPORTED_VERSIONS, CheckFailed, Doctor
from zmdp.spark.session import SparkError

NOWHERE = "tcp://127.0.0.1:1"
ALL = [
    "Python", "pyzmq", "msgspec", "pyspark", "pandas", "pyarrow", "Java", "broker", "session", "executors",
    "executors reach the broker", "cores",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Wait longer for answers than a user would."""
    for name in ("BROKER_TIMEOUT_SECONDS", "EXECUTOR_TIMEOUT_SECONDS"):
        monkeypatch.setattr(doctor, name, SPARK_TIMEOUT_SECONDS)


def states(checks):
    return {check.name: check.state for check in checks}


def failed(checks):
    """Return the one check that failed."""
    (found,) = [check for check in checks if check.state == "failed"]
    return found


@pytest.mark.long
def test_all_checks_pass(spark, endpoint):
    checks = list(Doctor(Shared(spark), endpoint).checks())
    assert [check.name for check in checks] == ALL
    assert set(states(checks).values()) == {"ok"}
    assert checks[-1].found == "2: 1 for slots, 1 reserved for other jobs (--reserve)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "name", "found", "advice"),
    [
        ({"broker": NOWHERE}, "broker", "nothing is listening there", "start mdp-broker"),
        ({"executors_broker": NOWHERE}, "executors reach the broker", "nothing is listening there",
         "--broker-from-executors"),
        ({"reserve": 2}, "cores", "2, of which 2 are reserved for other jobs: too few for 1 slots", "--reserve 0"),
    ],
)  # fmt: skip
def test_one_check_fails(spark, endpoint, given, name, found, advice):
    checks = list(Doctor(Shared(spark), **{"broker": endpoint, **given}).checks())
    bad = failed(checks)
    assert (bad.name, found in bad.found, advice in bad.advice) == (name, True, True), bad
    assert (states(checks)["executors reach the broker"] == "skipped") == (name == "broker")


@pytest.mark.parametrize(("minimum", "wrong"), [(1, False), (2, True)])
def test_slots_of_several_cores(minimum, wrong):
    context = SimpleNamespace(master="local-cluster[2,2,1024]", getConf=lambda: {"spark.task.cpus": "2"})
    with (
        pytest.raises(CheckFailed, match=r"too few for 2 slots of 2 cores \(spark.task.cpus\)")
        if wrong
        else nullcontext()
    ):
        Doctor(Cluster(), "tcp://127.0.0.1:5555", minimum=minimum).cores(context)


@pytest.mark.long
def test_executors_that_cannot_run_python(spark, endpoint, monkeypatch):
    def collect(data):
        raise RuntimeError("… ModuleNotFoundError: No module named 'zmq'")

    monkeypatch.setattr("pyspark.core.rdd.RDD.collect", collect)
    checks = list(Doctor(Shared(spark), endpoint).checks())
    bad = failed(checks)
    assert (bad.name, bad.found[:24]) == ("executors", "executors have no pyzmq:")
    assert "--archive" in bad.advice
    assert [name for name, state in states(checks).items() if state == "skipped"] == ["executors reach the broker"]


@pytest.mark.long
def test_executors_that_do_not_answer(spark, endpoint, monkeypatch):
    def sleep(broker, keys, rows):
        import time

        time.sleep(60)
        yield {}

    monkeypatch.setattr(doctor, "probe", sleep)
    monkeypatch.setattr(doctor, "EXECUTOR_TIMEOUT_SECONDS", 0.5)
    bad = failed(Doctor(Shared(spark), endpoint).checks())
    assert (bad.name, bad.found) == ("executors", "no executor answered within 0.5 s")
    tracker = spark.sparkContext.statusTracker()
    eventually(lambda: not tracker.getActiveJobsIds(), SPARK_TIMEOUT_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("error", [SparkError("no cluster"), SettingError("no master")])
def test_no_session(spark, endpoint, monkeypatch, error):
    def refuse(name, **room):
        raise error

    checks = list(Doctor(SimpleNamespace(master=None, open=refuse), endpoint).checks())
    assert failed(checks).found == str(error)
    assert "--master" in failed(checks).advice
    assert [name for name, state in states(checks).items() if state == "skipped"] == ALL[9:]


@pytest.mark.parametrize(("version", "found"), [(None, "there is no Java"), (11, "is Java 11")])
def test_without_java_spark_is_not_started(endpoint, monkeypatch, version, found):
    package("pyspark")
    monkeypatch.setattr(session, "java_version", lambda: version)
    checks = list(Doctor(SimpleNamespace(), endpoint).checks())
    assert found in failed(checks).found
    assert failed(checks).advice == session.NEEDS_JAVA
    assert [name for name, state in states(checks).items() if state == "skipped"] == ALL[8:]


@pytest.mark.parametrize(("version", "wrong"), [("3.9.9", True), ("4.0.0", False), ("4.3.7", False), ("4.4.0", True)])
def test_unsupported_versions(monkeypatch, version, wrong):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    with pytest.raises(CheckFailed, match=re.escape(version)) if wrong else nullcontext():
        assert doctor.library("pyspark") == version


def test_a_missing_library(monkeypatch):
    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    with pytest.raises(CheckFailed) as raised:
        doctor.library("pandas")
    assert raised.value.args[1] == f"install 2.2 or newer, below 3: {install_command('spark')}"


def test_supported_versions_match_the_project():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["spark"]}
    for name, (first, after) in SUPPORTED_VERSIONS.items():
        dotted = [".".join(map(str, version)) for version in (first, after) if version]
        assert f"{name}>=" + ",<".join(dotted) in wanted


@pytest.mark.usefixtures("java")
def test_the_command_with_an_unreachable_master():
    package("pyspark")
    done = run("mdp-spark", "doctor", "--master", "spark://127.0.0.1:1", "--broker", NOWHERE, "--json")
    assert done.returncode == 1
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ALL
    assert {row["name"] for row in rows if row["state"] == "failed"} == {"broker", "session"}
    text = run("mdp-spark", "doctor", "--master", "spark://127.0.0.1:1", "--broker", NOWHERE).stdout.decode()
    assert "failed   session: no Spark master answers at 127.0.0.1:1" in text
    assert "         → start mdp-broker" in text


@pytest.mark.parametrize("command", ["doctor", "batch"])
def test_commands_with_invalid_settings(command):
    done = run("mdp-spark", command, "--conf", "x=1")
    assert done.returncode == 2
    told = "\n\nError: Invalid value for '--conf': 'x=1': expected a Spark setting, spark.NAME=VALUE\n"
    assert done.stderr.decode().endswith(told)
