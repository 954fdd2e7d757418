"""Fleets on the tests' session: leases, draining, the control service.

Beside tests/spark/test_end_to_end.py, which has what `make test` shows.
"""

import os
import re
from collections import defaultdict

import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS, Calls
from support.processes import eventually
from support.sparks import HERE, Shared, busy, running_fleet

from zmdp.clients import Client
from zmdp.mdp.errors import ServiceError, SettingError
from zmdp.spark import drivers
from zmdp.spark.fleet.driver import Fleet
from zmdp.spark.fleet.settings import FleetSettings

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Change to the folder with the handlers."""
    monkeypatch.chdir(HERE)


@pytest.fixture
def client(endpoint):
    with Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as client:
        yield client


# ── a fleet ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fleet_uses_whichever_of_its_brokers_answers(spark, endpoint, client):
    nowhere = "tcp://127.0.0.1:1"
    with running_fleet(spark, [nowhere, endpoint]) as fleet:
        assert int(client.request("pid")[0]) != os.getpid()
        assert fleet.status()["broker"] == f"{nowhere}, {endpoint}"


def test_leases_are_renewed_in_the_same_python_process(spark, endpoint, client):
    with running_fleet(spark, endpoint, lease=0.3) as fleet:
        leases = defaultdict(set)

        def reused():
            """Whether a process has served leases that did not follow each other."""
            leases[client.request("pid")[0]].add(fleet._slots._leases)
            return any(max(each) - min(each) >= 3 for each in leases.values())

        eventually(reused, SPARK_TIMEOUT_SECONDS)
        assert fleet.status()["failures"] == 0


def test_streams_and_codecs(spark, endpoint, client):
    with running_fleet(spark, endpoint, handler="fleet_handlers:count", service="count"):
        assert [list(part) for part in client.stream("count", b"3")] == [[b"0"], [b"1"], [b"2"], [b"done"]]
    with running_fleet(spark, endpoint, handler="fleet_handlers:double", service="double", codec="json"):
        assert client.call("double", 21) == 42


@pytest.mark.parametrize("handler", ["together", "together_async"])
def test_a_slot_handles_several_requests_at_once(spark, endpoint, client, handler):
    with running_fleet(spark, endpoint, handler=f"fleet_handlers:{handler}", service="s", concurrency=3) as fleet:
        replies = [client.submit("s") for _ in range(3)]  # each waits for the others
        assert [list(reply.result()) for reply in replies] == [[b""]] * 3
        eventually(lambda: fleet.status()["slots"][0]["served"] == 3, SPARK_TIMEOUT_SECONDS)
        assert fleet._slots.concurrency == 3


def test_streams_of_async_generators(spark, endpoint, client):
    with running_fleet(spark, endpoint, handler="fleet_handlers:count_async", service="count"):
        assert [list(part) for part in client.stream("count", b"2")] == [[b"0"], [b"1"], [b"done"]]
        reply = client.submit("count", b"100000000")
        eventually(lambda: busy(client, "count"), SPARK_TIMEOUT_SECONDS)
        reply.cancel()
        eventually(lambda: not busy(client, "count"), SPARK_TIMEOUT_SECONDS)


def test_a_fleet_retries_a_handler_that_cannot_be_imported(spark, endpoint, client, logged):
    with running_fleet(spark, endpoint, handler="no_such_module:f") as fleet:
        assert logged("cannot serve pid: cannot use no_such_module:f: No module named", SPARK_TIMEOUT_SECONDS)
        eventually(lambda: fleet.status()["failures"] >= 2, SPARK_TIMEOUT_SECONDS)
        result = drivers.ask(client, "test", "status")
        assert "no_such_module" in result["last_error"]
        assert [slot["state"] for slot in result["slots"]] in (["waiting"], ["starting"])


def test_an_empty_fleet_scales_up_for_a_request(spark, endpoint, client):
    with running_fleet(spark, endpoint, minimum=0, idle=0.5) as fleet:
        eventually(lambda: fleet._slots.load, SPARK_TIMEOUT_SECONDS)
        assert fleet.status()["slots"] == []
        assert client.request("pid")
        eventually(lambda: fleet.status()["slots"] == [], SPARK_TIMEOUT_SECONDS)
        assert client.request("pid")


def test_strange_reports_are_refused_or_told_to_drain(spark, endpoint, client):
    with running_fleet(spark, endpoint) as fleet:
        client.request("pid")
        for strange in (b"[]", b'{"slot": 0, "lease": 1}', b'{"run": "x", "slot": 0, "lease": 1}'):
            with pytest.raises(ServiceError, match="expected the report of a slot"):
                client.request(fleet._reports, strange)
        late = {"run": fleet._run_id, "slot": 0, "lease": 99}
        assert client.call(fleet._reports, late, codec="json") == {"drain": True}


def test_a_fleet_is_updated_without_a_gap(spark, endpoint, client):
    settings = {"service": "version", "lease": 3600.0}  # between two leases, a single slot has no worker
    with running_fleet(spark, endpoint, **settings) as old:
        client.request("version")
        with Calls(endpoint, "version", wait=False) as calls:  # a call made while there is no worker fails
            calls.go_on()
            with running_fleet(spark, endpoint, **settings, name="next") as new:
                eventually(
                    lambda: [row["state"] for row in new.status()["slots"]] == ["serving"], SPARK_TIMEOUT_SECONDS
                )
                drivers.ask(client, "test", "drain")
                eventually(lambda: old.status()["slots"] == [], SPARK_TIMEOUT_SECONDS)
                calls.go_on()
                assert calls.failed == []
                calls.stop()


def test_more_slots_than_cores_are_refused(spark, endpoint):
    fleet = Fleet(FleetSettings("m:f", "s", "n", broker=endpoint, minimum=2), Shared(spark))
    with pytest.raises(SettingError, match=re.escape("local[2,3] has 2 cores, of which 1 are reserved (--reserve)")):
        fleet.run()
