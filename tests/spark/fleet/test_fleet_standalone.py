"""Fleets on a standalone cluster: shipped files, scaling executors, killed drivers."""

import json
import tarfile
import urllib.request

import pytest
from support import environment
from support.fleets import HERE, SPARK_TIMEOUT_SECONDS, Calls, fleet, java_of
from support.processes import alive, broker, eventually
from support.sparks import QUICK
from support.standalone import standalone

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("java"), pytest.mark.timeout(2400)]
MEMORY = ("--conf", "spark.executor.memory=512m")
HANDLERS = str(HERE / "fleet_handlers.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with standalone(tmp_path_factory.mktemp("cluster"), cores=3) as found:
        yield found


@pytest.fixture(scope="module")
def endpoint():
    with broker(*QUICK) as (_, at):
        yield at


def on(cluster, *options):
    return ("--master", cluster.url, *MEMORY, "--py-files", HANDLERS, *options)


def page(cluster):
    """Return what the Master's web page reports."""
    with urllib.request.urlopen(f"{cluster.page}/json/", timeout=SPARK_TIMEOUT_SECONDS) as answer:
        return json.load(answer)


def test_executors_scale_with_the_queue(cluster, endpoint, tmp_path):
    short = ("--idle", "2", "--conf", "spark.dynamicAllocation.executorIdleTimeout=2s")
    options = on(cluster, "--dynamic", "--min", "0", "--max", "3", *short)
    with fleet(endpoint, "fleet_handlers:nap", "nap", *options, cwd=tmp_path) as running:
        assert running.status()["slots"] == []
        with Calls(endpoint, "nap", callers=8) as calls:
            # At first, a slot whose lease has just ended may still count as serving, beside its executor's next one.
            slots = eventually(
                lambda: (slots := running.serving(3)) and len({slot["executor"] for slot in slots}) == 3 and slots,
                SPARK_TIMEOUT_SECONDS,
            )
            calls.go_on(20)
        assert calls.failed == []
        eventually(lambda: running.status()["slots"] == [], SPARK_TIMEOUT_SECONDS)
        eventually(lambda: not any(alive(slot["pid"]) for slot in slots), SPARK_TIMEOUT_SECONDS)
        eventually(lambda: page(cluster)["coresused"] == 0, SPARK_TIMEOUT_SECONDS)
        assert running.client.request("nap")  # and again
        assert running.command.end() == 0


def test_executors_with_only_packed_files(cluster, endpoint, tmp_path):
    environment.make(tmp_path / "environment.tar.gz")
    options = on(cluster, "--archive", str(tmp_path / "environment.tar.gz"))
    with fleet(endpoint, "fleet_handlers:imported", "imported", *options, cwd=tmp_path) as running:
        zmdp, zmq, handlers = running.client.request("imported", b"zmdp", b"zmq", b"fleet_handlers")
        assert zmdp.endswith(b"zmdp.zip/zmdp/__init__.py")
        assert b"/environment/lib/" in zmq
        assert handlers.endswith(b"/fleet_handlers.py")
        assert handlers.decode() != HANDLERS
        assert running.command.end() == 0


def test_a_missing_python_of_an_archive_is_reported(cluster, endpoint, tmp_path):
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.add(HANDLERS, "bin/fleet_handlers.py")
    options = on(cluster, "--archive", str(tmp_path / "other.tar.gz"))
    with fleet(endpoint, "fleet_handlers:pid", "pid", *options, cwd=tmp_path) as running:
        running.command.line("executors have no Python at ./environment/bin/python", timeout=SPARK_TIMEOUT_SECONDS)
        eventually(lambda: running.status()["failures"] >= 2, SPARK_TIMEOUT_SECONDS)
        assert running.command.end() == 0


def test_no_process_survives_a_killed_driver(cluster, endpoint, tmp_path):
    with fleet(endpoint, "fleet_handlers:pid", "pid", *on(cluster, "--min", "2"), cwd=tmp_path) as running:
        slots = running.serving(2)
        processes = {slot["pid"] for slot in slots} | {java_of(slot["pid"]) for slot in slots}
        running.command.kill()
        eventually(lambda: not any(map(alive, processes)), SPARK_TIMEOUT_SECONDS)
        eventually(lambda: not running.client.available("pid"), SPARK_TIMEOUT_SECONDS)
