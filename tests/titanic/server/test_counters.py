"""What a Titanic counts, in itself and with real requests, and how much room there is for requests."""

import json

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, running_bench, serving

from zmdp.clients import Client
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.titanic.db.group_commit import BATCH_BOUNDS, CommitMetrics
from zmdp.titanic.server.counters import MAX_CODES, Metrics, Quota
from zmdp.workers import ServiceError, Worker


def test_commits():
    made = CommitMetrics()
    made.committed(0.002, 10)
    found = made.as_dict()
    assert found["items"]["buckets"][BATCH_BOUNDS.index(10)] == 1  # a bucket contains its bound
    assert (made.seconds.count, found["seconds"]["sum"], found["items"]["sum"], found["failures"]) == (1, 0.002, 10, 0)


def test_outcomes_are_bounded():
    made = Metrics()
    for code in (None, 7, *range(400, 500), 7):
        made.ended(code)
    assert len(made.finished) == MAX_CODES + 1
    assert (made.finished["ok"], made.finished["007"]) == (1, 2)
    assert sum(made.finished.values()) == 103


def test_what_happens_to_requests_is_counted(tmp_path):
    failures = iter([True, True, False])

    def fail_twice(request):
        if next(failures):
            raise ServiceError(503, "later")
        return request

    def refuse(request):
        raise ServiceError(404, "no such thing")

    with running_broker(limits=LIMITS) as broker, Client(broker.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        at = broker.endpoints[0]
        with (
            Worker("echo", list, broker=at, **BEATS), Worker("twice", fail_twice, broker=at, **BEATS),
            Worker("no", refuse, broker=at, **BEATS),
            serving(at, str(tmp_path / "titanic.db")) as server,
        ):  # fmt: skip
            titanic = Titanic(client)
            tickets = [titanic.submit("echo", b"hello", key=key) for key in ("a", "b", "a")]
            assert tickets[0].result(timeout=TIMEOUT_SECONDS) == [b"hello"]
            with pytest.raises(ServiceError):
                titanic.submit("no", b"").result(timeout=TIMEOUT_SECONDS)
            titanic.submit("twice", b"").result(timeout=TIMEOUT_SECONDS)
            assert client.request("titanic.request")[0][:3] == b"400"
            found = eventually(lambda: (
                (now := server.snapshot())["finished"].get("ok") == 3 and not now["in_flight"] and now
            ))  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    assert {name: found[name] for name in ("accepted", "repeated", "rejected", "attempts", "retries", "finished")} == {
        "accepted": 4, "repeated": 1, "rejected": {"malformed": 1}, "attempts": 6, "retries": 2,
        "finished": {"ok": 3, "404": 1},
    }  # fmt: skip
    writer = found["commits"]["writer"]
    assert sum(writer["seconds"]["buckets"]) == sum(writer["items"]["buckets"]) > 4
    assert writer["items"]["sum"] >= 4 + 6 + 2
    assert (writer["failures"], found["deaths"]) == (0, 0)
    assert {name: found[name] for name in ("claimed", "in_flight", "unstored")} == {
        "claimed": 0, "in_flight": 0, "unstored": 0
    }  # fmt: skip


def test_lost_workers_are_counted(tmp_path):
    with running_bench() as bench, Client(bench.endpoint, timeout=TIMEOUT_SECONDS) as client:
        with serving(bench.endpoint, str(tmp_path / "titanic.db"), max_deaths=2) as server:
            ticket = Titanic(client).submit("deadly", b"")
            for _ in range(3):
                with Worker("deadly", broker=bench.endpoint, **BEATS) as worker:
                    worker.recv(timeout=TIMEOUT_SECONDS)
            with pytest.raises(ServiceError, match="workers were lost"):
                ticket.result(timeout=TIMEOUT_SECONDS)
            eventually(lambda: server.metrics.finished == {"502": 1})
            assert server.metrics.deaths >= 2


def test_failed_transactions_are_counted(tmp_path):
    path = tmp_path / "titanic.db"
    with running_bench() as bench, Client(bench.endpoint, timeout=TIMEOUT_SECONDS) as client:
        with serving(bench.endpoint, str(path)) as server:
            path.rename(tmp_path / "away.db")
            assert client.request("titanic.request", b"echo", b"hello")[0][:3] == b"500"
            assert server.metrics.rejected == {"database": 1}
            assert server.metrics.commits["writer"].failures > 0
            (tmp_path / "away.db").rename(path)


def test_what_a_service_has_beyond_its_share_takes_no_room_from_others():
    quota = Quota(4, 2)
    quota.counted({"bulk": 3_000_000, "": 1})
    assert quota.why_full("bulk") == (
        "full: 2 requests to bulk have not ended (--max-waiting-per-service); try again later"
    )
    assert quota.why_full("other") is None
    quota.add("other", 1)
    assert quota.why_full("other") == "full: 4 requests have not ended (--max-waiting); try again later"
    assert quota.take_refused()
    quota.add("other", -1)
    assert quota.why_full("other") is None
    quota.counted({"bulk": 1})
    assert quota.why_full("bulk") is None
    for _ in range(2):  # more than were counted: they began before
        quota.add("bulk", -1)
    quota.add("bulk", 1)
    assert quota.why_full("bulk") is None
