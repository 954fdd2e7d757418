"""What is counted for each service, compared as whole values."""

import json
from bisect import bisect_right
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.x1_messages import cancel, failure, feed, final, leave, ready, request

from zmdp.mdp.broker.core.service_metrics import (
    BOUNDS,
    MAX_CODES,
    MAX_FORGOTTEN,
    OTHER_CODE,
    Metrics,
    ServiceMetrics,
    bucket_of,
)
from zmdp.mdp.broker.machine import Broker
from zmdp.mmi import answers


class World:
    """A broker with a clock."""

    def __init__(self):
        self.now = 100.0
        self.broker = Broker(now=self.now, first_address=1)

    def after(self, seconds, *messages):
        """Pass messages to the broker after that time; return what it sends."""
        self.now += seconds
        return feed(self.broker, *messages, now=self.now)

    def metrics(self, after=b""):
        (body,) = answers.answer(b"mmi.metrics", [after], self.broker, self.now)
        return json.loads(body)

    def echo(self):
        (row,) = [row for row in self.metrics()["services"] if row["name"] == "echo"]
        return row


def times(*seconds):
    """Return the histogram of these times as the broker reports it."""
    buckets = [0] * (1 + max(map(bucket_of, seconds), default=-1))
    for each in seconds:
        buckets[bucket_of(each)] += 1
    return {"buckets": buckets, "seconds": sum(seconds)}


def address_in(sent):
    """Return the address in the last REQUEST that was sent."""
    return next(address for _, command, address, *_ in reversed(sent) if command == "REQUEST")


@pytest.fixture
def world():
    return World()


def test_a_request_is_counted_with_its_times_and_bytes(world):
    world.after(0, ready())
    first = world.after(1, request(1, body=b"12345"))
    world.after(0.5, request(2, body=b"123"))
    assert world.echo() == {
        "name": "echo", "workers": 1, "idle": 0, "credit": 0, "running": 1, "queued": 1, "oldest_seconds": 0.0,
        "outcomes": {}, "queue_seconds": times(), "worker_seconds": times(), "redispatched": 0,
        "limits": {}, "held_back": 0, "throttled": 0,
        "request_bytes": 5, "reply_bytes": 0, "served": True,
    }  # fmt: skip
    second = world.after(0.25, final(address_in(first), body=b"1234567"))
    world.after(2, final(address_in(second), body=b"1"))
    assert world.echo() == {
        "name": "echo", "workers": 1, "idle": 1, "credit": 1, "running": 0, "queued": 0, "oldest_seconds": 0.0,
        "outcomes": {"ok": 2}, "queue_seconds": times(0.25), "worker_seconds": times(0.75, 2),
        "limits": {}, "held_back": 0, "throttled": 0,
        "redispatched": 0, "request_bytes": 8, "reply_bytes": 8, "served": True,
    }  # fmt: skip
    (worker,) = world.broker.directory.workers.values()
    assert (worker.done, worker.busy_seconds) == (2, 2.75)


def test_what_happens_at_a_service_that_never_had_a_worker_is_not_counted_by_its_name(world):
    world.after(0, request(), request(2))
    world.after(1, cancel())
    assert (world.echo()["queued"], world.echo()["outcomes"], world.echo()["served"]) == (1, {}, False)
    assert world.metrics()["others"]["outcomes"] == {"499": 1}
    world.after(1, final(address_in(world.after(1, ready()))))
    assert (world.echo()["outcomes"], world.echo()["served"]) == ({"ok": 1}, True)
    assert world.metrics()["others"]["outcomes"] == {"499": 1}  # a sum never decreases
    world.after(1, leave(), request(3), cancel(3))  # it has had one
    assert world.echo()["outcomes"] == {"ok": 1, "499": 1}


def test_names_that_clients_make_up_are_not_kept(world):
    for number in range(100):
        world.after(0, request(number, service=b"made-up-%d" % number), cancel(number))
    assert world.metrics()["services"] == []
    assert world.metrics()["others"]["outcomes"] == {"499": 100}


def test_other_ends_are_counted_by_code(world):
    world.after(0, ready())
    world.after(1, failure(address_in(world.after(0, request()))))
    world.after(1, failure(address_in(world.after(0, request(2))), code=471))
    world.after(0, request(3), cancel(3))
    assert world.echo()["outcomes"] == {"500": 1, "471": 1, "499": 1}
    (role,) = world.metrics()["roles"]
    assert role == {"name": "", "accepted": 3, "failed": 3, "outstanding": 0, "running": 0, "request_bytes": 0}


def test_the_counts_of_a_service_outlive_it(world):
    world.after(0, ready())
    world.after(1, final(address_in(world.after(0, request()))), leave())
    assert world.broker.directory.services == {}
    assert (world.echo()["workers"], world.echo()["outcomes"]) == (0, {"ok": 1})
    world.after(0, ready())
    world.after(1, final(address_in(world.after(0, request()))))
    assert world.echo()["outcomes"] == {"ok": 2}


def counted(name, ok=1):
    metrics = ServiceMetrics(name)
    for _ in range(ok):
        metrics.at_worker.add(bucket_of(0.1), 0.1)
        metrics.request_bytes += 1
    return metrics


def test_the_counts_of_services_long_gone_are_added_up():
    metrics = Metrics()
    for number in range(MAX_FORGOTTEN + 2):
        metrics.of(b"%d" % number).add_all(counted(b""))
        metrics.forget(b"%d" % number)
    assert len(metrics.by_name) == MAX_FORGOTTEN
    assert metrics.others.as_dict() == counted(b"", 2).as_dict()
    assert metrics.of(b"0").request_bytes == 0
    assert metrics.of(b"2").request_bytes == 1
    metrics.forget(b"never")
    metrics.forget(b"0")  # nothing was counted
    assert b"0" not in metrics.by_name


def test_a_page_has_a_hundred_services(world):
    for number in range(150):
        world.after(0, ready(b"w%d" % number, b"s%03d" % number))
    first = world.metrics()
    assert [row["name"] for row in first["services"]] == [f"s{number:03}" for number in range(100)]
    second = world.metrics(bytes.fromhex(first["next"]))
    assert [row["name"] for row in second["services"]] == [f"s{number:03}" for number in range(100, 150)]
    assert second["next"] is None


def test_different_codes_of_a_service_are_limited():
    metrics = ServiceMetrics(b"echo")
    for code in range(100, 200):
        metrics.ended(f"{code}")
    assert len(metrics.other) == MAX_CODES + 1
    assert metrics.other[OTHER_CODE] == 100 - MAX_CODES
    sums = ServiceMetrics(b"")
    sums.ended("900")
    sums.add_all(metrics)
    assert (len(sums.other), sum(sums.other.values())) == (MAX_CODES + 1, 101)


def test_a_time_belongs_to_the_first_bucket_that_is_longer():
    assert [bucket_of(seconds) for seconds in (0.0, BOUNDS[0], BOUNDS[1], 1e6)] == [0, 1, 2, len(BOUNDS)]


@given(st.floats(0, 1000))
def test_a_look_up_finds_the_bucket_that_a_search_finds(seconds):
    at_bound = any(isclose(seconds, bound) for bound in BOUNDS)  # the product may have been rounded
    assert abs(bucket_of(seconds) - bisect_right(BOUNDS, seconds)) <= at_bound
