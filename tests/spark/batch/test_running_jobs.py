"""Who may see and cancel the jobs of a batch, without Spark."""

import threading

import pytest
from support.requests import request_by

from zmdp.mdp.errors import RequestCancelled, ServiceError
from zmdp.spark.batch.parsing import Query
from zmdp.spark.batch.progress import Progress
from zmdp.spark.batch.running_jobs import Job, RunningJobs

NOBODY = request_by()


class Session:
    """A session whose Spark jobs run until they are cancelled."""

    def __init__(self):
        self.cancelled = threading.Event()

    def begin(self, job):
        pass

    def cancel(self, job):
        self.cancelled.set()

    def progress(self):
        return Progress(tasks=2, tasks_done=1)


def until_cancelled(job):
    job.session.cancelled.wait()
    raise RequestCancelled("cancelled")


def started(running, owner, work=until_cancelled):
    job = Job(Query("SELECT secret FROM orders"), owner, Session(), work)
    running.add(job)
    job.start()
    return job


@pytest.fixture
def running():
    jobs = RunningJobs()
    yield jobs
    jobs.cancel_all()


@pytest.mark.parametrize(
    ("owner", "caller"),
    [
        ("shop", request_by("shop")),
        ("shop", request_by("ops", admin=True)),
        ("", NOBODY),
        ("", request_by("web")),
    ],
)
def test_those_who_may_manage_a_job_see_and_cancel_it(running, owner, caller):
    job = started(running, owner)
    (row,) = running.status(caller)["running"]
    assert (row["job"], row["user"], row["what"], row["state"]) == (
        job.id, owner, "SELECT secret FROM orders", "running",
    )  # fmt: skip
    assert running.cancel(job.id, caller)
    job.ended.wait()
    running.remove(job)
    assert not running.cancel(job.id, caller)
    assert running.status(caller) == {"running": [], "done": 0, "failed": 0, "cancelled": 1}


@pytest.mark.parametrize("caller", [request_by("web"), NOBODY])
def test_others_see_only_that_a_job_runs(running, caller):
    job = started(running, "shop")
    (row,) = running.status(caller)["running"]
    assert (row["job"], row["user"], row["what"], row["tasks"]) == (job.id, "shop", None, 2)
    with pytest.raises(ServiceError, match=f"job {job.id} belongs to shop; only shop or an admin can cancel it") as no:
        running.cancel(job.id, caller)
    assert no.value.code == 403
    assert not job.cancelled.is_set()
    assert not job.session.cancelled.is_set()


def test_a_cancelled_job_that_still_runs_is_told_from_the_others(running):
    go = threading.Event()
    job = started(running, "", lambda job: go.wait() and job.raise_if_cancelled())
    assert running.cancel(job.id, NOBODY)
    assert [row["state"] for row in running.status(NOBODY)["running"]] == ["cancelling"]
    go.set()
    job.ended.wait()
    assert isinstance(job.outcome, RequestCancelled)


def test_jobs_that_end_are_counted(running):
    def fail(job):
        raise ValueError("no")

    for work in (fail, lambda job: [b"x"], lambda job: [b"y"]):
        job = started(running, "", work)
        job.ended.wait()
        running.remove(job)
    assert running.status(NOBODY) == {"running": [], "done": 2, "failed": 1, "cancelled": 0}
    assert len(running) == 0
