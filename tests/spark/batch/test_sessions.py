"""The session pool with a stand-in for Spark: losing the session, and failing to open a new one for a while."""

from types import SimpleNamespace

import pytest

from zmdp.spark.batch import sessions
from zmdp.spark.batch.sessions import SessionPool
from zmdp.spark.session import SparkError


class Session:
    """The part of a Spark session that the pool uses."""

    def __init__(self):
        self.stopped = False
        self.settings = {}
        self.conf = SimpleNamespace(set=self.settings.__setitem__)
        self.sparkContext = SimpleNamespace(
            defaultParallelism=2, _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: self.stopped))
        )

    def newSession(self):  # noqa: N802 - Spark's name
        return self

    def stop(self):
        self.stopped = True


@pytest.fixture
def made(monkeypatch):
    """The sessions opened so far."""
    found = []
    monkeypatch.setattr(sessions, "is_connect", lambda session: False)
    return found


def opened(made, refuse):
    def open_session():
        if refuse:
            raise SparkError("no cluster")
        made.append(Session())
        return made[-1]

    return open_session


def test_a_lost_session_is_reopened_however_often_that_failed(made):
    refuse = []
    pool = SessionPool(opened(made, refuse), 2)
    pool.release(pool.acquire(0))
    made[0].stopped = True
    refuse.append("now")
    for _ in range(10):
        with pytest.raises(SparkError, match="no cluster"):
            pool.acquire(0)
    refuse.clear()
    first, second = pool.acquire(0), pool.acquire(0)
    assert first.spark is second.spark is made[1]
    assert pool.acquire(0) is None
    assert not pool.release(first)
    assert pool.acquire(0) is first


def test_release_reports_a_lost_session_and_the_next_acquire_opens_another(made):
    pool = SessionPool(opened(made, []), 2)
    one, other = pool.acquire(0), pool.acquire(0)
    assert not pool.release(one, failed=True)
    one = pool.acquire(0)
    made[0].stopped = True
    assert pool.release(one, failed=True)
    again = pool.acquire(0)
    assert again.spark is made[1]
    assert pool.release(other, failed=True)  # of the first session, which is no longer in use
    assert pool.acquire(0).spark is made[1]
    assert pool.acquire(0) is None
    assert len(made) == 2


def test_a_session_is_not_used_again_once_a_request_may_have_changed_it(made):
    pool = SessionPool(opened(made, []), 2)
    session = pool.acquire(0)
    pool.release(session, changed=True)
    assert pool.acquire(0) is not session


def test_sessions_with_other_settings_are_not_used_again(made):
    pool = SessionPool(opened(made, []), 2, {"a": "1"})
    free, used = pool.acquire(0), pool.acquire(0)
    pool.release(free)
    pool.configure({"a": "2"})
    pool.release(used)
    again = pool.acquire(0)
    assert again not in (free, used)
    assert again.spark.settings["a"] == "2"


def test_no_more_pools_than_cores(made):
    pool = SessionPool(opened(made, []), 5)
    sessions = [pool.acquire(0) for _ in range(5)]
    assert [each.scheduler_pool for each in sessions] == ["pool-0", "pool-1", "pool-0", "pool-1", "pool-0"]
    pool.release(sessions[3])
    assert pool.acquire(0).scheduler_pool == "pool-1"


def test_close_stops_the_session(made):
    pool = SessionPool(opened(made, []), 2)
    pool.acquire(0)
    pool.close()
    assert made[0].stopped
