"""What happens to a request during which Spark is lost, again and again; the sessions here have no Spark."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from support.requests import request_by

from zmdp.mdp import wire
from zmdp.mdp.errors import ServiceError
from zmdp.spark.batch.catalogue.offer import Offer
from zmdp.spark.batch.driver import Batch, BatchSettings
from zmdp.spark.batch.job_history import History
from zmdp.spark.batch.progress import Progress
from zmdp.spark.batch.results.sending import Results
from zmdp.spark.batch.runner import MAX_LOSSES
from zmdp.workers import Request


class Conf:
    def set(self, name, value):
        pass


class Spark:
    conf = Conf()


class Session:
    """A session of a Spark that is always about to be lost."""

    def __init__(self):
        self.spark = Spark()

    def begin(self, job):
        pass

    def cancel(self, job):
        pass

    def progress(self):
        return Progress()


class Pool:
    def acquire(self, timeout, *, new):
        return Session()

    def release(self, session, *, failed=False, changed=False):
        return failed


def lose(spark):
    """Fail as py4j does when the JVM has gone."""
    raise ConnectionError("Answer from Java side is empty")


def work(spark):
    """Return a value."""
    return 3


def unreadable(spark, fail=True):
    """Tell the name of a file that is not UTF-8, as Python has it."""
    yield "\udcff"
    if fail:
        raise ValueError("cannot read \udcff")
    return "\udcff"


@pytest.fixture
def batch():
    with closing(History(Path(":memory:"), "batch")) as history:
        settings = BatchSettings("batch", "tcp://127.0.0.1:9", concurrency=1)
        offer = Offer(jobs={"lose": lose, "work": work, "unreadable": unreadable})
        yield Batch(settings, Pool(), Results(None), offer, load=lambda: offer, history=history)


def request(name, request_id=None):
    headers = {} if request_id is None else {"request-id": request_id}
    options = wire.Options(json.dumps({"headers": headers}).encode())
    return Request([name.encode()], service="spark.job", client=b"client", options=options)


def outcome(batch, asked):
    parts = batch.job(asked)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value
        except ServiceError as error:
            return error.code, error.text


def test_a_request_that_is_repeated_fails_after_some_losses(batch):
    for _ in range(MAX_LOSSES - 1):
        code, text = outcome(batch, request("lose", "r1"))
        assert (code, "probably out of memory: select less" in text, "Java side" in text) == (502, True, False), text
    for _ in range(2):  # at the last loss, and whenever it comes again
        code, text = outcome(batch, request("lose", "r1"))
        assert code == 500
        assert text.startswith(f"given up after Spark was lost {MAX_LOSSES} times during this request; the last time: ")
    assert outcome(batch, request("work", "r1"))[1] == b"3"


def test_other_requests_are_not_counted_together(batch):
    for number in range(MAX_LOSSES + 1):
        assert outcome(batch, request("lose", f"r{number}"))[0] == 502
        assert outcome(batch, request("lose"))[0] == 502


def test_requests_that_saw_a_loss_run_one_at_a_time(batch):
    for each in ("r1", "r2"):
        outcome(batch, request("lose", each))
    first, second = batch.job(request("lose", "r1")), batch.job(request("lose", "r2"))
    assert b'"started"' in next(first)
    assert b'"waiting"' in next(second)
    with pytest.raises(ServiceError):
        list(first)
    assert b'"started"' in next(second)
    second.close()
    assert batch._runner._suspect.acquire(blocking=False)


@pytest.mark.parametrize("fail", [True, False])
def test_texts_that_are_not_utf_8_end_no_job(batch, monkeypatch, fail):
    monkeypatch.setattr(Pool, "release", lambda *arguments, **settings: False)  # Spark is not lost
    frames = [b"unreadable", json.dumps({"fail": fail}).encode()]
    asked = Request(frames, service="spark.job", client=b"client", options=wire.Options(b"{}"))
    assert outcome(batch, asked)[1] == ("ValueError: cannot read \udcff" if fail else b'"?"')
    (row,) = batch._history.rows(request_by())
    assert row["state"] == ("failed" if fail else "done")
