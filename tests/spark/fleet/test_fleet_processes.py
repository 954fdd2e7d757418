"""A fleet on separate executor processes, which are really killed."""

import signal

import pytest
from support.fleets import LOCAL_CLUSTER, SPARK_TIMEOUT_SECONDS, Calls, fleet, java_of, kill
from support.processes import alive, broker, eventually
from support.sparks import QUICK, busy

from zmdp.spark import drivers

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(2400)]


@pytest.mark.long
def test_killed_python_processes_and_executors_lose_no_call():
    with broker(*QUICK) as (_, endpoint):
        with fleet(endpoint, "fleet_handlers:pid", "pid", *LOCAL_CLUSTER, "--min", "2") as running:
            first, second = running.serving(2)
            assert first["executor"] != second["executor"]
            with Calls(endpoint, "pid", pause=0.01) as calls:  # else they would take the time of those that start
                calls.go_on()
                kill(first["pid"])
                running.replaced(first, "pid")
                calls.go_on()
                kill(java_of(second["pid"]))
                running.replaced(second, "executor")
                calls.go_on()
            assert calls.failed == []
            status = running.status()
            assert status["failures"] == 2
            assert "Command exited with code 137" in status["last_error"]
            lost = f"slot {second['slot']} on executor {second['executor']} of {second['host']}, pid {second['pid']}, "
            assert lost in status["last_error"]
            processes = {row["pid"] for row in status["slots"]} | {java_of(row["pid"]) for row in status["slots"]}
            assert drivers.ask(running.client, running.name, "drain")["draining"] is True
            assert running.command.wait() == 0
            eventually(lambda: not any(map(alive, processes)), SPARK_TIMEOUT_SECONDS)


@pytest.mark.long
def test_renewed_leases_and_draining_lose_no_call():
    with broker(*QUICK) as (_, endpoint):
        options = (*LOCAL_CLUSTER, "--min", "2", "--lease", "1")
        with fleet(endpoint, "fleet_handlers:pid", "pid", *options) as running:
            running.serving(2)
            with Calls(endpoint, "pid", callers=8) as calls:
                for _ in range(10):
                    before = [row["since"] for row in running.serving(2)]
                    eventually(
                        lambda before=before: [row["since"] for row in running.serving(2)] != before,
                        SPARK_TIMEOUT_SECONDS,
                    )
            assert calls.failed == []
            assert running.status()["failures"] == 0
            replies = [running.client.submit("pid") for _ in range(100)]
            assert running.command.end() == 0
            done = [reply for reply in replies if reply.done()]
            assert all(len(reply.result()) == 1 for reply in done)


@pytest.mark.long
@pytest.mark.parametrize("told", ["by a signal", "by a command"])
def test_a_fleet_ends_although_a_handler_does_not(told):
    with broker(*QUICK) as (_, endpoint):
        with fleet(endpoint, "fleet_handlers:slow", "slow", *LOCAL_CLUSTER, "--drain-timeout", "0.5") as running:
            (slot,) = running.serving(1)
            running.client.submit("slow", b"3600")
            eventually(lambda: busy(running.client, "slow"), SPARK_TIMEOUT_SECONDS)
            if told == "by a signal":
                running.command.send_signal(signal.SIGTERM)
                running.command.line("finishing running requests, within 0.5 s; interrupt again to exit immediately")
            else:
                drivers.ask(running.client, running.name, "drain")
            assert running.command.poll(SPARK_TIMEOUT_SECONDS) == 1
            running.command.line("not finished within 0.5 s: gave up the requests of slot 0 on ")
            eventually(lambda: not alive(slot["pid"]), SPARK_TIMEOUT_SECONDS)


@pytest.mark.long
def test_a_stuck_handler_is_replaced_with_its_process():
    with broker(*QUICK) as (_, endpoint):
        options = (*LOCAL_CLUSTER, "--lease", "1", "--handler-timeout", "5")
        with fleet(endpoint, "fleet_handlers:slow", "slow", *options) as running:
            (slot,) = running.serving(1)
            stuck = running.client.submit("slow", b"3600")
            running.replaced(slot, "pid")
            assert running.client.request("slow", b"0")
            stuck.cancel()


@pytest.mark.long
def test_a_driver_restarts_its_killed_java_process():
    with broker(*QUICK) as (_, endpoint):
        with fleet(endpoint, "fleet_handlers:pid", "pid", "--master", "local[2]") as running:
            (slot,) = running.serving(1)
            kill(java_of(slot["pid"]))
            running.command.line("opened a new session on local[2]", timeout=SPARK_TIMEOUT_SECONDS)
            eventually(lambda: not alive(slot["pid"]), SPARK_TIMEOUT_SECONDS)
            eventually(lambda: running.serving(1)[0]["pid"] != slot["pid"], SPARK_TIMEOUT_SECONDS)
            assert "Traceback" not in running.command.stderr
