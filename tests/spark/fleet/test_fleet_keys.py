"""Drivers and executors with keys, at a broker that requires them."""

import json
import shutil
import subprocess
from pathlib import Path

import pyspark
import pytest
from support.access import Folder
from support.fleets import HERE, SMALL, SPARK_TIMEOUT_SECONDS
from support.processes import TIMEOUT_SECONDS, eventually, process, run
from support.titanics import LIMITS

from zmdp.clients import Client
from zmdp.mdp.security.certificates import read_secret
from zmdp.spark import drivers

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("java"),
    pytest.mark.timeout(2400),
]
QUICK = ("--heartbeat", "0.2", "--liveness", "50")
ONE_EXECUTOR = ("--master", "local-cluster[1,1,1024]", "--reserve", "0")


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def endpoint(folder):
    with folder.broker(limits=LIMITS) as server:
        yield server.endpoints[0]


def command(folder, endpoint, name, *arguments, role="driver"):
    return ("mdp-spark", name, *arguments, "--broker", endpoint, *folder.options(role))


def test_executors_get_the_key_and_nobody_sees_it(folder, endpoint):
    """Neither in a command, nor in an environment, a file, a log, or what Spark records for its web page."""
    events = folder.path / "events"
    events.mkdir()
    arguments = ("fleet_handlers:pid", "--service", "pid", "--name", "fleet-keys", *QUICK, *ONE_EXECUTOR, *SMALL,
                 "--conf", "spark.eventLog.enabled=true", "--conf", f"spark.eventLog.dir={events}")  # fmt: skip
    secret = read_secret(folder.path / "driver.key_secret")[1]
    with process(*command(folder, endpoint, "fleet", *arguments), cwd=HERE) as running:
        running.line("serves pid at", timeout=SPARK_TIMEOUT_SECONDS)
        with Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, **folder.settings("shop")) as client:
            pid = int(client.request("pid")[0])
        (row,) = json.loads(run(*command(folder, endpoint, "status"), "--json").stdout)
        assert row["name"] == "fleet-keys"
        assert secret.decode() not in json.dumps(row)
        for process_id in (pid, running.pid):
            for what in ("cmdline", "environ"):
                assert secret not in Path(f"/proc/{process_id}/{what}").read_bytes()
        assert secret.decode() not in subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
        work = Path(f"/proc/{pid}/cwd").resolve()
        with Client(endpoint, timeout=TIMEOUT_SECONDS, **folder.settings("driver")) as own:
            eventually(lambda: drivers.ask(own, "fleet-keys", "status")["slots"][0]["state"] == "serving")
        assert running.end() == 0
    assert secret.decode() not in running.stderr
    recorded = [each for top in (events, work) for each in top.rglob("*") if each.is_file()]
    assert any(each.is_relative_to(events) for each in recorded)
    assert not [each for each in recorded if secret in each.read_bytes()]
    shutil.rmtree(Path(pyspark.__file__).parent / "work" / row["application"], ignore_errors=True)


def test_an_executor_whose_key_is_refused_says_so(folder, endpoint):
    arguments = ("--master", "local[2]", *SMALL, "--json")
    found = run(*command(folder, endpoint, "doctor", *arguments, role="stranger"), timeout=SPARK_TIMEOUT_SECONDS)
    checks = {row["name"]: row for row in map(json.loads, found.stdout.splitlines())}
    assert checks["broker"]["state"] == "failed"
    assert "the broker refuses this key" in checks["broker"]["found"]
    found = run(*command(folder, endpoint, "doctor", *arguments), timeout=SPARK_TIMEOUT_SECONDS)
    checks = {row["name"]: row["state"] for row in map(json.loads, found.stdout.splitlines())}
    assert (checks["broker"], checks["executors reach the broker"]) == ("ok", "ok"), found
