"""Lanes of a session that is lost, by a stand-in for Spark: what happens when it cannot be made again for a while."""

from types import SimpleNamespace

import pytest

from zmdp.spark.batch import lanes
from zmdp.spark.batch.lanes import Lanes
from zmdp.spark.session import SparkError


class Session:
    """As much of one as lanes look at."""

    def __init__(self):
        self.stopped = False
        self.sparkContext = SimpleNamespace(
            defaultParallelism=2, _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: self.stopped))
        )

    def newSession(self):  # noqa: N802 - Spark's name
        return self

    def stop(self):
        self.stopped = True


@pytest.fixture
def made(monkeypatch):
    """The sessions that were made; while it is None, there is none to be had."""
    found = []
    monkeypatch.setattr(lanes, "is_connect", lambda session: False)
    return found


def opened(made, refuse):
    def open_session():
        if refuse:
            raise SparkError("no cluster")
        made.append(Session())
        return made[-1]

    return open_session


def test_a_lost_session_is_made_again_however_often_that_failed(made):
    refuse = []
    pool = Lanes(opened(made, refuse), 2)
    pool.give(pool.take(0))
    made[0].stopped = True
    refuse.append("now")
    for _ in range(10):
        with pytest.raises(SparkError, match="no cluster"):
            pool.take(0)
    refuse.clear()
    first, second = pool.take(0), pool.take(0)
    assert first.session is second.session is made[1]
    assert pool.take(0) is None
    assert not pool.give(first)
    assert pool.take(0) is first


def test_who_fails_for_a_lost_session_is_told_and_the_next_has_another(made):
    pool = Lanes(opened(made, []), 2)
    one, other = pool.take(0), pool.take(0)
    assert not pool.give(one, failed=True)
    one = pool.take(0)
    made[0].stopped = True
    assert pool.give(one, failed=True)
    again = pool.take(0)
    assert again.session is made[1]
    assert pool.give(other, failed=True)  # of the first session, whose lanes are not used any more
    assert pool.take(0).session is made[1]
    assert pool.take(0) is None
    assert len(made) == 2


def test_no_more_pools_than_cores(made):
    pool = Lanes(opened(made, []), 5)
    assert sorted(pool.take(0)._pool for _ in range(5)) == ["lane-0", "lane-0", "lane-0", "lane-1", "lane-1"]


def test_closed(made):
    pool = Lanes(opened(made, []), 2)
    pool.take(0)
    pool.close()
    assert made[0].stopped
