"""The records of jobs, without Spark."""

import os
import subprocess
import sys

import pytest
from support.requests import request_by

from zmdp.mdp.errors import SettingError
from zmdp.spark.batch import job_history
from zmdp.spark.batch.job_history import History

SHOP, OTHER, ADMIN, NOBODY = request_by("shop"), request_by("web"), request_by("ops", admin=True), request_by()


@pytest.fixture
def opened(tmp_path):
    """`opened(driver)` opens the same file."""
    made = []

    def open_(driver="batch"):
        made.append(History(tmp_path / "folder" / "history.db", driver))
        return made[-1]

    yield open_
    for each in made:
        each.close()


def test_records_survive_the_driver(opened):
    first = opened()
    first.begin("a", user="shop", service="sql", what="SELECT 1")
    first.end("a", "done", format="parquet", rows=3, path="/results/a", ui="http://spark")
    first.begin("b", user="shop", service="job", what="gated()")
    first.end("b", "failed", code=500, error="ValueError: no", traceback="Traceback …")
    first.close()
    newest, oldest = opened("other").rows(SHOP)
    assert (newest["job"], newest["state"], newest["error"], newest["what"]) == (
        "b",
        "failed",
        "ValueError: no",
        "gated()",
    )
    assert (oldest["rows"], oldest["path"], oldest["driver"], oldest["ui"]) == (
        3,
        "/results/a",
        "batch",
        "http://spark",
    )
    assert oldest["started"] <= oldest["ended"]


@pytest.mark.parametrize(("caller", "allowed"), [(SHOP, True), (ADMIN, True), (OTHER, False), (NOBODY, False)])
def test_only_its_owner_and_admins_see_what_a_job_ran(opened, caller, allowed):
    records = opened()
    records.begin("a", user="shop", service="sql", what="SELECT secret")
    records.end("a", "failed", code=500, error="secret", traceback="secret", path="secret")
    for found in (*records.rows(caller, "a"), *records.rows(caller)):
        assert (found["job"], found["user"], found["state"]) == ("a", "shop", "failed")
        assert ("secret" in str(found)) == allowed
    assert "traceback" in records.rows(caller, "a")[0]
    assert records.rows(caller, "b") == []


def test_jobs_of_drivers_that_are_gone_are_lost(opened):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    records = opened()
    for job, driver, pid in (("a", "batch", 1), ("b", "dead", ended.pid), ("c", "alive", os.getppid())):
        records.begin(job, user="", service="sql", what="SELECT 1")
        records._write(
            "UPDATE jobs SET driver = :driver, pid = :pid WHERE job = :job", {"job": job, "driver": driver, "pid": pid}
        )
    found = {row["job"]: (row["state"], row["code"], row["ended"]) for row in opened("batch").rows(NOBODY)}
    assert found == {"a": ("lost", 502, None), "b": ("lost", 502, None), "c": ("running", None, None)}


def test_records_are_bounded(opened, monkeypatch):
    monkeypatch.setattr(job_history, "MAX_RECORDS", 5)
    monkeypatch.setattr(job_history, "_PRUNE_EVERY", 10)
    records = opened()
    for number in range(20):
        records.begin(str(number), user="", service="sql", what="x" * 20_000)
        records.end(str(number), "done", traceback="y" * 200_000 + "z")
    found = records.rows(NOBODY)
    assert [row["job"] for row in found] == ["19", "18", "17", "16", "15"][: len(found)]
    assert len(found) <= 6
    (last,) = records.rows(NOBODY, "19")
    assert (len(last["what"]), len(last["traceback"]), last["traceback"][-1]) == (10_000, 100_000, "z")
    records.prune(older_than=3600)
    assert len(records.rows(NOBODY)) == 5
    records.prune(older_than=-1)
    assert records.rows(NOBODY) == []


def test_the_latest_jobs_are_listed(opened, monkeypatch):
    monkeypatch.setattr(job_history, "MAX_LISTED", 2)
    records = opened()
    for number in range(5):
        records.begin(str(number), user="", service="sql", what="")
    assert [row["job"] for row in records.rows(NOBODY)] == ["4", "3"]
    assert [row["job"] for row in records.rows(NOBODY, "0")] == ["0"]


def test_losses_are_counted_by_request(opened):
    records = opened()
    for job, request_id, state in (("a", "r", "lost"), ("b", "r", "lost"), ("c", "r", "failed"), ("d", "", "lost")):
        records.begin(job, user="shop", service="sql", what="SELECT 1", request_id=request_id)
        records.end(job, state, error=f"error of {job}")
    assert records.losses("r", "shop", "SELECT 1") == (2, "error of b")
    for other in (("r", "web", "SELECT 1"), ("r", "shop", "SELECT 2"), ("", "shop", "SELECT 1")):
        assert records.losses(*other) == (0, "")


def test_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("not a database, whatever it is; and longer than a header of one " * 10)
    for path in (tmp_path / "file", tmp_path / "file" / "history.db"):
        with pytest.raises(SettingError, match="--history"):
            History(path, "batch")
