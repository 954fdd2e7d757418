"""The operator's SQL."""

from types import SimpleNamespace
from uuid import uuid4

import pytest

from zmdp.titanic.api.submission import pack
from zmdp.titanic.db import store
from zmdp.titanic.db.store import models as sql
from zmdp.titanic.db.store.models import STATES
from zmdp.titanic.operator import admin
from zmdp.titanic.operator.admin import Filter

NOW = 1_800_000_000.0


@pytest.fixture
def do(engine):
    def done(work, *asked):
        with engine.begin() as connection:
            return work(connection, *asked)

    return done


@pytest.fixture
def each(tables):
    """A request in each state."""
    done, failed = tables.done(b"reply", result_ttl=60), tables.done(b"detail", 503, "broken", result_ttl=60)
    running = tables.running(result_ttl=60)
    return SimpleNamespace(
        delayed=tables.add(due=NOW + 5, result_ttl=60), pending=tables.add(result_ttl=60), running=running, done=done,
        failed=failed,
    )  # fmt: skip


def names(rows):
    return [row["uuid"] for row in rows]


def hexes(requests):
    return [request.uuid.hex for request in requests]


def matching(do, which):
    return [uuid for _, uuid in do(admin.matching, which, 0, 1000)]


# ── ls, matching, count ──────────────────────────────────────────────────────────────────────────────────────────────


def test_all_are_listed_the_oldest_first(do, each):
    order = [each.done, each.failed, each.running, each.delayed, each.pending]
    assert names(do(admin.ls, Filter(), 100)) == hexes(order)


def test_a_row_of_the_list(do, tables):
    asked = tables.add("größe", priority=3, key="k", due=NOW + 1, group_name="tenant-7")
    assert do(admin.ls, Filter(), 1) == [{
        "uuid": asked.uuid.hex, "service": "größe", "owner": "", "state": "delayed", "priority": 3, "created": NOW,
        "due": NOW + 1, "started": None, "finished": None, "attempts": 0, "failures": 0, "deaths": 0, "code": None,
        "error": None, "key": "k", "group_name": "tenant-7",
    }]  # fmt: skip


def test_ls_is_limited(do, tables):
    asked = [tables.add() for _ in range(5)]
    assert names(do(admin.ls, Filter(), 3)) == hexes(asked[:3])


@pytest.mark.parametrize("state", STATES)
def test_filter_by_state(do, each, state):
    which = Filter(states=(state,))
    (row,) = do(admin.ls, which, 100)
    assert (row["uuid"], row["state"]) == (getattr(each, state).uuid.hex, state)
    assert matching(do, which) == [getattr(each, state).uuid]
    assert do(admin.count, which) == 1


def test_filter_by_several_states(do, each):
    which = Filter(states=("pending", "done"))
    assert matching(do, which) == [each.done.uuid, each.pending.uuid]
    assert do(admin.count, which) == 2


def test_filter_by_service(do, tables):
    tables.add("one")
    other = tables.add("other")
    which = Filter(service="other")
    assert names(do(admin.ls, which, 100)) == [other.uuid.hex]
    assert matching(do, which) == [other.uuid]
    assert do(admin.count, which) == 1
    assert do(admin.count, Filter(service="oth%")) == 0


def test_filter_by_age(do, tables):
    old, at = tables.add(now=NOW - 1), tables.add(now=NOW)
    tables.add(now=NOW + 1)
    assert matching(do, Filter(created_before=NOW)) == [old.uuid]
    assert matching(do, Filter(created_before=NOW + 0.5)) == [old.uuid, at.uuid]


def test_filter_by_time_of_end(do, tables):
    old = tables.done(now=NOW - 1)
    tables.done(now=NOW)
    tables.add(now=NOW - 5)
    assert matching(do, Filter(finished_before=NOW)) == [old.uuid]


def test_filters_are_combined(do, tables):
    wanted = tables.done(service="one", now=NOW - 5)
    tables.done(service="other", now=NOW - 5)
    tables.done(service="one", now=NOW + 5)
    tables.add("one", now=NOW - 5)
    which = Filter(("done",), "one", created_before=NOW + 1, finished_before=NOW)
    assert matching(do, which) == [wanted.uuid]


def test_matching_requests_are_read_in_chunks(do, tables):
    asked = [tables.add() if number % 3 else tables.done(service="done") for number in range(10)]
    found = [(0, None)]
    while some := do(admin.matching, Filter(("pending",)), found[-1][0], 4):
        assert len(some) <= 4
        found += some
    assert [uuid for _, uuid in found[1:]] == [each.uuid for number, each in enumerate(asked) if number % 3]
    assert [id_ for id_, _ in found[1:]] == [tables.row(uuid).id for _, uuid in found[1:]]


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_show_returns_everything(do, tables):
    asked = tables.add(
        priority=2, retries=3, backoff=0.5, result_ttl=60, key="k", key_expires=NOW + 9, headers='{"a": "b"}',
        body=b"\0body", owner="shop",
    )  # fmt: skip
    (claimed,) = tables.claim(now=NOW + 1)
    tables.do(store.add_partials, *(store.Partial(claimed.id, 1, number, b"%d" % number) for number in (1, 0)))
    tables.do(store.finish, store.Outcome(claimed.id, "me", 1, NOW + 2, b"\0reply"))
    assert do(admin.show, asked.uuid) == {
        "uuid": asked.uuid.hex, "service": "echo", "owner": "shop", "state": "done", "priority": 2, "created": NOW,
        "due": NOW, "started": NOW + 1, "finished": NOW + 2, "attempts": 1, "failures": 0, "deaths": 0, "code": None,
        "error": None, "key": "k", "retries": 3, "backoff": 0.5, "result_ttl": 60, "expires": NOW + 62, "holder": None,
        "group_name": "", "headers": '{"a": "b"}', "body": b"\0body", "reply": b"\0reply", "partials": [b"0", b"1"],
    }  # fmt: skip


def test_show_names_the_titanic_that_runs_a_request(do, each):
    shown = do(admin.show, each.running.uuid)
    assert (shown["holder"], shown["started"], shown["reply"]) == ("me", NOW, None)


def test_the_partials_shown_are_those_of_the_latest_attempt(do, tables):
    first = tables.running()
    tables.do(store.add_partials, store.Partial(first.id, 1, 0, b"old"))
    tables.maintain(NOW + 10, holder="other")
    tables.claim()
    tables.do(store.add_partials, store.Partial(first.id, 2, 0, b"new"))
    assert do(admin.show, first.uuid)["partials"] == [b"new"]


def test_show_of_an_unknown_request(do, each):
    assert do(admin.show, uuid4()) is None


# ── retry ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_failed_requests_are_retried(do, tables, each):
    uuids = [getattr(each, state).uuid for state in STATES]
    before = [tables.row(uuid) for uuid in uuids[:4]]
    assert do(admin.retry, [*uuids, uuid4()], NOW + 5) == [each.failed.uuid]
    assert [tables.row(uuid) for uuid in uuids[:4]] == before


def test_a_retried_request_starts_over(do, tables):
    claimed = tables.running(retries=2, result_ttl=1)
    tables.do(store.reschedule, store.Reschedule(claimed.id, "me", 1, NOW, failures=1, deaths=3))
    tables.maintain(NOW)
    tables.claim()
    tables.do(store.finish, store.Outcome(claimed.id, "me", 2, NOW, b"detail", 500, "broken"))
    do(admin.retry, [claimed.uuid], NOW + 5)
    row = tables.row(claimed.uuid)
    assert (row.state, row.due, row.failures, row.deaths, row.attempts) == ("pending", NOW + 5, 0, 0, 2)
    assert (row.finished, row.expires, row.code, row.error, row.reply) == (None, None, None, None, None)
    assert row.ended is None
    tables.maintain(NOW + 1000)  # it does not expire while it waits
    (again,) = tables.claim()
    assert (again.uuid, again.attempt, again.failures, again.retries) == (claimed.uuid, 3, 0, 2)


def test_an_outcome_from_before_the_retry_is_ignored(do, tables):
    failed = tables.done(None, 500, "broken")
    do(admin.retry, [failed.uuid], NOW)
    (again,) = tables.claim()
    tables.do(store.finish, store.Outcome(failed.id, "me", failed.attempt, NOW, b"late"))
    assert tables.row(failed.uuid).state == "running"
    tables.do(store.finish, store.Outcome(again.id, "me", again.attempt, NOW, b"in time"))
    assert tables.row(failed.uuid).reply == b"in time"


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_requests_that_have_not_ended_are_cancelled(do, tables, each):
    uuids = [getattr(each, state).uuid for state in STATES]
    before = [tables.row(uuid) for uuid in uuids[3:]]
    assert set(do(admin.cancel, [*uuids, uuid4()], NOW + 5)) == set(uuids[:3])
    assert [tables.row(uuid) for uuid in uuids[3:]] == before
    for uuid in uuids[:3]:
        row = tables.row(uuid)
        assert (row.state, row.code, row.error) == ("failed", 499, "cancelled by an operator")
        assert (row.holder, row.finished, row.expires) == (None, NOW + 5, NOW + 65)
        assert row.ended > tables.row(each.done.uuid).ended


def test_a_cancelled_request_is_not_run(do, tables, each):
    do(admin.cancel, [each.delayed.uuid, each.pending.uuid, each.running.uuid], NOW)
    found = tables.maintain(NOW + 9, count=True, offered=("echo",))
    assert (found.held, found.services, found.next_due, found.waiting) == ({}, {}, None, {})
    assert tables.claim(limit=10) == []


@pytest.mark.parametrize("late", ["outcome", "again"])
def test_a_reply_to_a_cancelled_request_is_ignored(do, tables, late):
    claimed = tables.running()
    do(admin.cancel, [claimed.uuid], NOW)
    if late == "outcome":
        tables.do(store.finish, store.Outcome(claimed.id, "me", 1, NOW, b"late"))
    else:
        tables.do(store.reschedule, store.Reschedule(claimed.id, "me", 1, NOW))
    row = tables.row(claimed.uuid)
    assert (row.state, row.code, row.reply) == ("failed", 499, None)


def test_a_cancelled_request_can_be_retried(do, tables):
    claimed = tables.running()
    do(admin.cancel, [claimed.uuid], NOW)
    assert do(admin.retry, [claimed.uuid], NOW) == [claimed.uuid]
    (again,) = tables.claim()
    assert (again.uuid, again.attempt) == (claimed.uuid, 2)


@pytest.mark.parametrize("change", [admin.retry, admin.cancel])
def test_empty_lists_change_nothing(do, each, change):
    assert do(change, [], NOW) == []


# ── purge ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def purge(do, which):
    return do(admin.purge, which, [id_ for id_, _ in do(admin.matching, which, 0, 1000)])


def test_purge_deletes_only_matching_requests(do, tables, each):
    tables.do(store.add_partials, store.Partial(each.done.id, 1, 0, b""), store.Partial(each.running.id, 1, 0, b""))
    tables.add(key="k")
    assert purge(do, Filter(("done",))) == 1
    assert tables.row(each.done.uuid) is None
    assert tables.count() == 5
    assert tables.count(sql.PARTS) == 1
    assert tables.count(sql.KEYS) == 1
    assert purge(do, Filter(("done",))) == 0


def test_purge_spares_requests_that_have_changed(do, tables, each):
    which = Filter(("failed", "done"))
    found = do(admin.matching, which, 0, 1000)
    assert do(admin.retry, [each.failed.uuid], NOW) == [each.failed.uuid]
    assert do(admin.purge, which, [id_ for id_, _ in found]) == 1
    assert tables.row(each.failed.uuid).state == "pending"


def test_purge_deletes_only_the_given_ids(do, tables):
    one, other = tables.done(), tables.done()
    assert do(admin.purge, Filter(("done",)), [other.id, 10**9]) == 1
    assert matching(do, Filter()) == [one.uuid]
    assert do(admin.purge, Filter(("done",)), []) == 0


def test_purge_spares_recent_requests(do, tables):
    old, new = tables.done(now=NOW - 10), tables.done(now=NOW)
    failed = tables.done(code=500, now=NOW - 10)
    which = Filter(("done",), finished_before=NOW - 5)
    assert do(admin.count, which) == 1
    assert do(admin.purge, which, [old.id, new.id, failed.id]) == 1
    assert matching(do, Filter()) == [new.uuid, failed.uuid]


def test_a_key_outlives_a_purge(do, tables, submission):
    claimed = tables.done(key="k")
    purge(do, Filter(("done",)))
    assert tables.do(store.accept, submission(key="k")) == [claimed.uuid]
    assert tables.count() == 0


# ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "found"),
    [("", ["c", "b", "a"]), ("RESIZE", ["b", "a"]), ("order-7", ["a"]), ("shop", ["c"]), ("50%", ["b"]), ("5_%", [])],
)
def test_search_finds_the_newest_first(do, tables, text, found):
    made = {
        "a": tables.add("images.resize", key="order-7").uuid,
        "b": tables.done(service="image.resizer", code=500, error="only 50% done").uuid,
        "c": tables.add("mail", owner="shop").uuid,
    }
    rows = do(admin.search, Filter(), text, None, 10)
    assert [row["uuid"] for row in rows] == [made[name].hex for name in found]


def test_search_narrowed(do, tables, monkeypatch):
    wanted = [tables.add("a"), tables.add("b"), tables.add("a")]
    assert len(do(admin.search, Filter(), "", None, 2)) == 2
    (row,) = do(admin.search, Filter(), "ignored", wanted[0].uuid, 10)
    assert row["uuid"] == wanted[0].uuid.hex
    assert do(admin.search, Filter(("failed",)), "", wanted[0].uuid, 10) == []
    assert len(do(admin.search, Filter(service="a"), "", None, 10)) == 2
    monkeypatch.setattr(admin, "MAX_SEARCHED", 1)
    assert [row["uuid"] for row in do(admin.search, Filter(), "", None, 10)] == [wanted[2].uuid.hex]


# ── stats ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stats_of_an_empty_database(do, engine):
    total = {**dict.fromkeys(STATES, 0), "attempts": 0, "deaths": 0, "oldest_pending_seconds": None}
    assert do(admin.stats, NOW) == {"total": total, "services": {}, "keys": 0, "partials": 0, "titanics": 0}


def test_stats_by_service_and_state(do, tables, each):
    tables.done(service="größe")
    tables.done(service="größe")
    tables.add("größe", now=NOW - 60, key="k")
    tables.do(store.add_partials, *(store.Partial(each.running.id, 1, number, b"") for number in range(3)))
    lost = tables.running(service="lost", now=NOW - 7, until=NOW + 10)
    tables.do(store.reschedule, store.Reschedule(lost.id, lost.holder, lost.attempt, NOW - 1, deaths=2))
    tables.maintain()
    found = do(admin.stats, NOW + 2)
    services = {
        "echo": {
            **dict.fromkeys(STATES, 1), "oldest_waiting_seconds": 2.0, "oldest_pending_seconds": 2.0, "attempts": 3,
            "deaths": 0,
        },
        "größe": {
            **dict.fromkeys(STATES, 0), "pending": 1, "done": 2, "oldest_waiting_seconds": 62.0,
            "oldest_pending_seconds": 62.0, "attempts": 2, "deaths": 0,
        },
        "lost": {
            **dict.fromkeys(STATES, 0), "pending": 1, "oldest_waiting_seconds": 9.0, "oldest_pending_seconds": 3.0,
            "attempts": 1, "deaths": 2,
        },
    }  # fmt: skip
    total = {
        "delayed": 1, "pending": 3, "running": 1, "done": 3, "failed": 1, "attempts": 6, "deaths": 2,
        "oldest_pending_seconds": 62.0,
    }  # fmt: skip
    assert found == {"total": total, "services": services, "keys": 1, "partials": 3, "titanics": 1}
    assert list(found["services"]) == ["echo", "größe", "lost"]


def test_ended_requests_are_not_waiting(do, tables):
    tables.done(now=NOW - 100)
    assert do(admin.stats, NOW)["services"]["echo"]["oldest_waiting_seconds"] is None


def test_the_oldest_is_the_oldest_of_any_state(do, tables):
    tables.add(now=NOW - 1)
    tables.add(now=NOW - 5, due=NOW + 5)
    tables.add(now=NOW + 3)
    assert do(admin.stats, NOW)["services"]["echo"]["oldest_waiting_seconds"] == 5.0


def test_a_clock_that_is_behind_gives_no_negative_age(do, tables):
    tables.add(now=NOW + 3)
    assert do(admin.stats, NOW)["services"]["echo"]["oldest_waiting_seconds"] == 0.0


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def failed(tables):
    """Two services that have failed for several reasons."""
    for at, (service, code, error) in enumerate(
        [("one", 500, "100% broken"), ("one", 500, "100% broken"), ("one", 502, "lost"), ("two", 500, "100 broken")]
    ):
        tables.done(None, code, error, service=service, now=NOW + at)
    tables.done(service="one")


def test_reasons_of_failures(do, failed):
    assert do(admin.failures, Filter(), 10) == [
        {"service": "one", "code": 500, "error": "100% broken", "count": 2, "first": NOW, "last": NOW + 1},
        {"service": "two", "code": 500, "error": "100 broken", "count": 1, "first": NOW + 3, "last": NOW + 3},
        {"service": "one", "code": 502, "error": "lost", "count": 1, "first": NOW + 2, "last": NOW + 2},
    ]
    assert [row["count"] for row in do(admin.failures, Filter(), 1)] == [2]
    assert [row["error"] for row in do(admin.failures, Filter(service="one", code=502), 10)] == ["lost"]


@pytest.mark.parametrize(
    ("which", "found"),
    [
        (Filter(code=500), 3), (Filter(error="broken"), 3), (Filter(error="0% b"), 2), (Filter(error="_"), 0),
        (Filter(error="lost", code=500), 0), (Filter(service="two", error="broken"), 1),
        (Filter(error="Broken"), 3),
    ],
    ids=str,
)  # fmt: skip
def test_filter_by_reason(do, failed, which, found):
    assert len(do(admin.ls, which, 100)) == len(matching(do, which)) == do(admin.count, which) == found


# ── export ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_are_exported_in_chunks(do, tables):
    asked = [tables.done(b"reply"), *(tables.add("other") for _ in range(4)), tables.done(b"reply")]
    rows, last = [], 0
    while chunk := do(admin.export, Filter(), last, 4):
        rows, last = rows + chunk, chunk[-1]["id"]
    assert [row["uuid"] for row in rows] == hexes(asked)
    assert (rows[0]["reply"], rows[0]["body"], rows[0]["state"]) == (b"reply", tables.row(asked[0].uuid).body, "done")
    assert "ended" not in rows[0]
    done = do(admin.export, Filter(states=("done",)), 0, 4)
    assert [row["uuid"] for row in done] == hexes([asked[0], asked[-1]])


def test_large_requests_are_exported_few_at_a_time(do, tables):
    half = pack([bytes(admin.MAX_EXPORTED_BYTES // 2)])
    asked = [tables.done(half), tables.add(body=half), tables.add(body=2 * half), tables.add(), tables.add(body=half)]
    chunks, last = [], 0
    while chunk := do(admin.export, Filter(), last, 3):
        chunks, last = [*chunks, [row["uuid"] for row in chunk]], chunk[-1]["id"]
    assert chunks == [hexes(asked[:2]), hexes(asked[2:3]), hexes(asked[3:])]
