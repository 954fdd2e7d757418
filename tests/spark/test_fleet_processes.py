"""A fleet on executors in processes of their own, which are really killed."""

import pytest
from support.fleets import LOCAL_CLUSTER, PATIENCE, Calls, alive, fleet, java_of, kill
from support.processes import broker, eventually

from zmdp.spark import control, session

pytestmark = pytest.mark.skipif(session.java_version() is None, reason=f"there is no Java: {session.NEEDS_JAVA}")
QUICK = ("--heartbeat", "0.2", "--liveness", "50")


@pytest.mark.timeout(300)
def test_killed_pythons_and_executors_cost_no_call():
    with broker(*QUICK) as (_, endpoint):
        with fleet(endpoint, "fleet_handlers:pid", "pid", *LOCAL_CLUSTER, "--min", "2") as running:
            first, second = running.serving(2)
            assert first["executor"] != second["executor"]
            with Calls(endpoint, "pid") as calls:
                calls.go_on()
                kill(first["pid"])
                running.replaced(first, "pid")
                calls.go_on()
                kill(java_of(second["pid"]))
                running.replaced(second, "executor")
                calls.go_on()
            assert calls.failed == []
            told = running.status()
            assert told["failures"] == 2
            assert "Command exited with code 137" in told["last_error"]
            processes = {row["pid"] for row in told["slots"]} | {java_of(row["pid"]) for row in told["slots"]}
            assert control.ask(running.client, running.name, "drain") == {"draining": True}
            assert running.command.wait() == 0
            eventually(lambda: not any(map(alive, processes)), PATIENCE)
