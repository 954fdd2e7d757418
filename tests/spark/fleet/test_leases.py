"""Leases as executors serve them, and what their ends mean, without Spark."""

import os
from functools import partial
from threading import Thread

import pytest
from support.access import Folder
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import eventually
from support.sparks import BEATS, HERE, LIMITS

from zmdp.clients import Client
from zmdp.spark.fleet.executor import LeaseTask, serve
from zmdp.spark.fleet.leases import classify_failure
from zmdp.spark.fleet.settings import FleetSettings
from zmdp.spark.fleet.slots import Died, Lease, Refused
from zmdp.workers import Worker


def lease(endpoint, handler="fleet_handlers:pid", *, seconds=0.1, **settings):
    """Serve for one lease; return its result."""
    given = {"handler": handler, "service": "s", "name": "f", "broker": endpoint, **BEATS, **settings}
    task = LeaseTask(FleetSettings(**given), "run", "spark.control.f/0", Lease(0, 1, seconds), (str(HERE),))
    (result,) = serve(task, iter([0]))
    return result


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ("no_such_module:f", "cannot use no_such_module:f: No module named 'no_such_module'"),
        ("no_such_module:f", "Ship your own modules with --py-files, installed packages with --archive"),
        ("fleet_handlers:nothing", "module fleet_handlers has no 'nothing'"),
        ("fleet_handlers:not_callable", "fleet_handlers:not_callable is of type int: a fleet needs a function"),
        ("zmdp.workers.examples:echo", "zmdp.workers.examples:echo is of type Worker: a fleet needs a function"),
    ],
)
def test_an_unusable_handler_is_returned_as_a_result(handler, why):
    result = lease("tcp://127.0.0.1:1", handler)
    assert set(result) == {"host", "refused"}
    assert why in result["refused"]


def test_a_missing_codec_is_returned_as_a_result():
    assert "no such codec" in lease("tcp://127.0.0.1:1", "fleet_handlers:double", codec="no such codec")["refused"]


def test_a_lease_reports_an_unreachable_broker():
    result = lease("tcp://127.0.0.1:1")
    assert result["served"] == 0
    assert "nothing is listening there" in result["unreachable"]


def test_a_lease_reports_a_broker_that_refuses_its_key(tmp_path):
    folder = Folder(tmp_path)
    with folder.broker(limits=LIMITS) as server:
        keys = folder.keys("stranger")
        # Again, where it is unclear: the broker may take longer to refuse a key than an executor waits to be told.
        eventually(lambda: "the broker refuses this key" in lease(server.endpoints[0], keys=keys)["unreachable"])


def test_a_lease_ends_when_the_driver_asks_it_to_drain(endpoint):
    def report(request):
        reports.append(request[0])
        return b'{"drain": true}' if len(reports) > 1 else b"{}"

    reports, results = [], []
    with Worker("spark.control.f/0", report, broker=endpoint, **BEATS), Client(endpoint) as client:
        eventually(lambda: client.available("spark.control.f/0"))
        run = partial(lease, endpoint, seconds=3600)
        thread = Thread(target=lambda: results.append(run()))
        thread.start()
        thread.join(SPARK_TIMEOUT_SECONDS)
    assert [(result["served"], result["unreachable"]) for result in results] == [(0, None)]
    assert all(b'"pid": %d' % os.getpid() in each for each in reports)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("… ModuleNotFoundError: No module named 'zmdp'", (Refused, "executors cannot import zmdp")),
        ("… ModuleNotFoundError: No module named 'zmq'", (Refused, "executors have no pyzmq")),
        ("… ModuleNotFoundError: No module named 'msgspec'", (Refused, "executors have no msgspec")),
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
