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
        converters = SimpleNamespace(asJava=list)
        self._jvm = SimpleNamespace(
            scala=SimpleNamespace(jdk=SimpleNamespace(javaapi=SimpleNamespace(CollectionConverters=converters)))
        )
        self._jsparkSession = SimpleNamespace(
            sessionState=lambda: SimpleNamespace(functionRegistry=lambda: SimpleNamespace(listFunction=list))
        )
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


def test_the_scheduler_pools_of_later_requests_come_first(made):
    pool = SessionPool(opened(made, []), 3)
    first, second = pool.acquire(0), pool.acquire(0)
    seen = {each.scheduler_pool for each in (first, second)}
    assert second.scheduler_pool < first.scheduler_pool
    for _ in range(100):
        third = pool.acquire(0)
        assert third.scheduler_pool < second.scheduler_pool
        seen.add(third.scheduler_pool)
        pool.release(third)
    assert len(seen) == 3


def test_the_number_of_scheduler_pools_is_limited(made):
    pool = SessionPool(opened(made, []), 2)
    before, seen = pool.acquire(0), set()
    for _ in range(100):  # never is none in use
        after = pool.acquire(0)
        assert after.scheduler_pool != before.scheduler_pool
        seen.add(after.scheduler_pool)
        pool.release(before)
        before = after
    assert len(seen) == 2 * sessions.NUMBERS_PER_SESSION


def test_jobs_get_a_new_session(made):
    pool = SessionPool(opened(made, []), 2)
    used = pool.acquire(0)
    pool.release(used)
    job = pool.acquire(0, new=True)
    assert job is not used
    pool.release(job, changed=True)
    assert pool.acquire(0) is used


def test_close_stops_the_session(made):
    pool = SessionPool(opened(made, []), 2)
    pool.acquire(0)
    pool.close()
    assert made[0].stopped
