"""A fleet without Spark: its executors on a busy machine."""

import time
from pathlib import Path

import pytest

from zmdp.clients import Client
from zmdp.mdp.limits import Limits
from zmdp.spark.fleet.executor import REPORT_SECONDS, LeaseTask, serve
from zmdp.spark.fleet.settings import FleetSettings
from zmdp.spark.fleet.slots import Lease
from zmdp.testing import running_broker
from zmdp.workers import Worker

HERE = Path(__file__).parents[1]


def test_a_driver_that_is_busy_may_answer_a_report_late():
    def answer(report):
        time.sleep(1.5 * REPORT_SECONDS)
        return {"drain": True}

    with running_broker() as server, Worker("reports", answer, broker=server.endpoints[0], codec="json"):
        settings = FleetSettings("zmdp.workers.examples:repeat", "s", "f", broker=server.endpoints[0])
        (result,) = serve(LeaseTask(settings, "run", "reports", Lease(0, 1, 4.0)), iter([]))
    assert result["unreachable"] is None


@pytest.mark.parametrize("handler", ["zmdp.workers.examples:repeat", "fleet_handlers:count_async"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_is_reported_as_registered_once_the_broker_has_answered(handler, answers):
    reports = []

    def answer(report):
        reports.append((report["registered"], client.available("s")))
        return {"drain": report["registered"] or (len(reports) > 2 and not answers)}

    heartbeat = 0.2 if answers else 3600.0
    with running_broker(limits=Limits(heartbeat=heartbeat, liveness=600)) as server:
        at = server.endpoints[0]
        with Client(at) as client, Worker("reports", answer, broker=at, codec="json"):
            settings = FleetSettings(handler, "s", "f", broker=at, heartbeat=heartbeat, liveness=600)
            tuple(serve(LeaseTask(settings, "run", "reports", Lease(0, 1, 1e6), (str(HERE),)), iter([])))
    assert reports[-1][0] is answers
    assert (True, False) not in reports
