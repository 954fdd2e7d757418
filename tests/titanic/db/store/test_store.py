"""Titanic's SQL, on SQLite and on PostgreSQL."""

import gc
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.databases import check_counts, waiting_for_locks
from support.garbage import no_collector

from zmdp.titanic.api.schedules import parse_schedule
from zmdp.titanic.api.submission import MAX_FROM, Submission
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.store import counts, replies, upkeep
from zmdp.titanic.db.store import models as sql
from zmdp.titanic.operator import admin

NOW = 1_800_000_000.0
only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)


def outcome(claimed, reply=b"reply", now=NOW, **fields):
    return store.Outcome(claimed.id, claimed.holder, claimed.attempt, now, reply, **fields)


def again(claimed, due=NOW + 1, **fields):
    return store.Reschedule(claimed.id, claimed.holder, claimed.attempt, due, **fields)


def part(claimed, number, body=b"part"):
    return store.Partial(claimed.id, claimed.attempt, number, body)


def wanted(claimed, start=0):
    return store.PartialsQuery(claimed.id, claimed.attempt, start)


def uuids(claimed):
    return [each.uuid for each in claimed]


@contextmanager
def without_indexes(engine):
    """Open a transaction in which PostgreSQL uses no index, as with a small table."""
    with engine.begin() as connection:
        for way in ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"):
            connection.exec_driver_sql(f"SET LOCAL {way} = off")
        yield connection


# ── accept ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_accepted_request_is_stored_unchanged(tables, submission):
    asked = submission(
        "größe", body=bytes(range(256)) * 300, due=NOW, priority=9, retries=3, backoff=0.25, result_ttl=3600.5,
        key="order 17", key_expires=NOW + 60, headers='{"a": "ü"}', owner="shop",
        group_name="tenant-7",
    )  # fmt: skip
    assert tables.do(store.accept, asked) == [asked.uuid]
    row = tables.row(asked.uuid)
    assert vars(row) == {
        "id": row.id, "uuid": asked.uuid, "service": "größe", "state": "pending", "priority": 9, "created": NOW,
        "due": NOW, "started": None, "finished": None, "expires": None, "holder": None, "attempts": 0,
        "failures": 0, "retries": 3, "backoff": 0.25, "result_ttl": 3600.5, "key": "order 17", "headers": '{"a": "ü"}',
        "code": None, "error": None, "body": asked.body, "reply": None, "ended": None, "deaths": 0,
        "owner": "shop", "group_name": "tenant-7",
    }  # fmt: skip


def test_times_keep_their_microseconds(tables):
    asked = tables.add(now=NOW + 0.123456, due=NOW + 1.654321)
    assert (tables.row(asked.uuid).created, tables.row(asked.uuid).due) == (NOW + 0.123456, NOW + 1.654321)


def test_a_request_that_is_due_later_is_delayed(tables):
    assert tables.row(tables.add(due=NOW + 0.001).uuid).state == "delayed"
    assert tables.row(tables.add(due=NOW).uuid).state == "pending"


def test_a_batch_gives_a_uuid_to_each_in_its_order(tables, submission):
    batch = [submission(key=None if number % 3 else f"key {number}") for number in range(500)]
    assert tables.do(store.accept, *batch) == [each.uuid for each in batch]
    assert tables.count() == 500
    assert uuids(tables.claim(limit=500)) == [each.uuid for each in batch]


def test_a_batch_is_stored_as_a_whole_or_not_at_all(tables, submission):
    with pytest.raises(sa.exc.IntegrityError):
        tables.do(store.accept, submission(key="k"), submission(body=None))
    assert (tables.count(), tables.count(sql.KEYS)) == (0, 0)


def test_the_same_key_in_one_batch_is_one_request(tables, submission):
    first, second, other = submission(key="k", body=b"1"), submission(key="k", body=b"2"), submission()
    assert tables.do(store.accept, first, second, other) == [first.uuid, first.uuid, other.uuid]
    assert tables.count() == 2
    assert tables.row(first.uuid).body == b"1"


def test_the_same_key_in_a_later_batch_is_the_first_request(tables, submission):
    first = tables.add(key="k")
    second = submission(key="k", now=NOW + 1_000_000)
    assert tables.do(store.accept, second) == [first.uuid]
    assert tables.row(second.uuid) is None


def test_a_key_belongs_to_its_service(tables):
    one, other = tables.add("one", key="k"), tables.add("other", key="k")
    assert tables.count() == 2
    assert tables.row(one.uuid).service == "one"
    assert tables.row(other.uuid).service == "other"


@pytest.mark.parametrize(
    ("later", "accepted"), [(59.999, False), (60, True), (61, True)], ids=["before it expires", "then", "after"]
)
def test_an_expired_key_stands_for_a_new_request(tables, submission, later, accepted):
    first = tables.add(key="k", key_expires=NOW + 60)
    second = submission(key="k", now=NOW + later, key_expires=NOW + later + 60)
    assert tables.do(store.accept, second) == [second.uuid if accepted else first.uuid]
    assert (tables.row(second.uuid) is not None) == accepted
    third = submission(key="k", now=NOW + 119)
    assert tables.do(store.accept, third) == [second.uuid if accepted else third.uuid]


def test_a_key_outlives_its_request(tables, submission):
    first = tables.add(key="k")
    tables.do(store.close, store.Lookup(first.uuid))
    second = submission(key="k")
    assert tables.do(store.accept, second) == [first.uuid]
    assert tables.count() == 0


@pytest.mark.parametrize("key", ["'", '"; DROP TABLE titanic_keys; --', "%s %(x)s :y ?", "ключ", "k" * 255, " ", "\\"])
def test_a_key_may_be_any_text(tables, submission, key):
    first = tables.add(key=key)
    assert tables.do(store.accept, submission(key=key)) == [first.uuid]
    assert tables.row(first.uuid).key == key


def test_accept_is_idempotent(tables, submission):
    batch = [
        submission(), submission(key="k"), submission(key="k"), submission(key="short", key_expires=NOW + 1),
        submission(due=NOW + 5),
    ]  # fmt: skip
    first = tables.do(store.accept, *batch)
    before = [tables.row(uuid) for uuid in first]
    assert tables.do(store.accept, *batch) == first
    assert [tables.row(uuid) for uuid in first] == before
    assert tables.count() == 4


def test_accepting_a_running_request_again_changes_nothing(tables, submission):
    asked = submission(key="k")
    tables.do(store.accept, asked)
    tables.claim()
    tables.do(store.accept, asked)
    assert tables.row(asked.uuid).state == "running"


def test_accepted_in_a_session_of_the_callers_and_committed_with_it(tables, submission):
    asked, withdrawn = submission(key="k"), submission(key="l")
    with Session(tables.engine) as session:
        assert store.accept(session.connection(), [asked]) == [asked.uuid]
        session.commit()
        assert store.accept(session.connection(), [withdrawn]) == [withdrawn.uuid]
        session.rollback()
    assert tables.row(asked.uuid) is not None
    assert tables.row(withdrawn.uuid) is None
    assert tables.count(sql.KEYS) == 1


def test_of_concurrent_requests_with_a_key_one_is_first(tables, submission, pool):
    batches = [[submission(key=f"key {number}") for number in range(10)] for _ in range(6)]
    given = [pool.submit(tables.do, store.accept, *batch) for batch in batches]
    answers = {tuple(each.result(20)) for each in given}
    assert len(answers) == 1
    assert set(uuids(tables.claim(limit=100))) == set(answers.pop())


@only_postgresql
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_uncommitted_key_is_waited_for(tables, submission, cluster, ending, pool):
    first, second = submission(key="k"), submission(key="k")
    with tables.engine.connect() as connection:
        store.accept(connection, [first])
        waiting = pool.submit(tables.do, store.accept, second)
        waiting_for_locks(cluster, 1)
        getattr(connection, ending)()
    assert waiting.result(20) == [first.uuid if ending == "commit" else second.uuid]
    assert tables.count() == 1


@only_postgresql
def test_two_titanics_with_the_same_keys_in_opposite_order_do_not_block_each_other(tables, submission, cluster, pool):
    with tables.engine.connect() as connection:
        store.accept(connection, [submission(key="m")])
        one = pool.submit(tables.do, store.accept, *(submission(key=key) for key in "amz"))
        waiting_for_locks(cluster, 1)
        other = pool.submit(tables.do, store.accept, *(submission(key=key) for key in "zma"))
        waiting_for_locks(cluster, 2)
        connection.rollback()
    assert sorted(one.result(20), key=str) == sorted(other.result(20), key=str)
    assert tables.count() == 3


@only_postgresql
def test_a_key_in_use_is_not_deleted(tables, submission, a_round):
    tables.add(key="k", key_expires=NOW + 60)
    with tables.engine.connect() as connection, tables.engine.connect() as sweeper:
        store.accept(connection, [submission(key="k", now=NOW + 59)])
        sweeper.exec_driver_sql("SET lock_timeout = 1")
        store.maintain(sweeper, [a_round(store.Lease("other", 10), NOW + 60)])  # nor does it wait for him
        sweeper.commit()
        assert sweeper.execute(sa.select(sql.KEYS.c.key)).all() == [("k",)]


def test_a_transaction_that_is_repeated_does_not_revive_closed_requests(tables, submission):
    tables.add(key="expired", key_expires=NOW - 1)
    asked = [submission(key="k"), submission(key="l"), submission(key="expired"), submission(key="m")]
    tables.do(store.accept, *asked[:3])
    tables.do(store.close, *(store.Lookup(each.uuid) for each in asked[1:3]))
    tables.do(store.accept, *asked)
    assert [tables.row(each.uuid) is not None for each in asked] == [True, False, False, True]


def replacing(submission, **fields):
    return submission(key="k", replaces=True, **fields)


def test_what_waits_is_replaced_in_its_place(tables, submission):
    first = tables.add(key="k", body=b"old", due=NOW + 5, headers="{}", retries=3, group_name="a")
    tables.add()
    asked = replacing(submission, now=NOW + 1, body=b"new", due=NOW + 6, key_expires=NOW + 9, priority=0)
    for _ in range(2):  # it can be repeated
        assert tables.do(store.accept, asked) == [first.uuid]
    row = tables.row(first.uuid)
    assert (row.body, row.state, row.due, row.created) == (b"new", "delayed", NOW + 6, NOW)
    assert (row.headers, row.retries, row.group_name, row.key) == (None, 0, "", "k")
    assert tables.do(store.accept, replacing(submission, now=NOW + 2, body=b"newest", due=NOW + 2)) == [first.uuid]
    assert next(each.body for each in tables.claim(limit=9)) == b"newest"
    assert tables.count() == 2
    tables.maintain(NOW + 10)
    assert tables.count(sql.KEYS) == 1  # it is remembered as long as the newest says


@pytest.mark.parametrize("begun", ["running", "retried", "done", "closed"])
def test_what_has_begun_is_not_replaced(tables, submission, begun):
    claimed = tables.running(key="k")
    if begun == "retried":
        tables.do(store.reschedule, again(claimed))
    elif begun != "running":
        tables.do(store.finish, outcome(claimed))
    before = tables.row(claimed.uuid)
    if begun == "closed":
        tables.do(store.close, store.Lookup(claimed.uuid))
        before = None
    asked = replacing(submission, body=b"new")
    for _ in range(2):
        assert tables.do(store.accept, asked) == [asked.uuid]
    assert tables.row(claimed.uuid) == before
    assert tables.row(asked.uuid).body == b"new"
    assert tables.do(store.accept, submission(key="k"), replacing(submission, body=b"newest")) == [asked.uuid] * 2
    assert [each.body for each in tables.claim(limit=9)] == [b"newest"]


def test_of_several_in_a_batch_the_last_is_kept(tables, submission):
    old, new = (replacing(submission, body=body) for body in (b"old", b"new"))
    other = submission(key="other")
    assert tables.do(store.accept, old, other, new) == [new.uuid, other.uuid, new.uuid]
    assert [each.body for each in tables.claim(limit=9)] == [other.body, b"new"]
    others = replacing(submission, owner="shop")
    assert tables.do(store.accept, others) == [others.uuid]


@only_postgresql
@pytest.mark.parametrize("begun", [False, True])
def test_of_two_titanics_that_replace_a_request_the_second_replaces_the_firsts(
    tables, submission, cluster, pool, begun
):
    first = tables.running(key="k") if begun else tables.add(key="k")
    one, other = (replacing(submission, body=body) for body in (b"one", b"other"))
    with tables.engine.connect() as connection:
        store.accept(connection, [one])
        waiting = pool.submit(tables.do, store.accept, other)
        waiting_for_locks(cluster, 1)
        connection.commit()
    kept = one.uuid if begun else first.uuid
    assert waiting.result(20) == [kept]
    assert tables.row(kept).body == b"other"
    assert tables.count() == 1 + begun


# ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_claimed_request_is_running_and_has_a_holder(tables):
    asked = tables.add(owner="shop", retries=2, backoff=0.5, headers="{}", body=b"\0\xff")
    (claimed,) = tables.claim(holder="me", until=NOW + 7, now=NOW + 1)
    assert claimed == store.Claimed(
        id=claimed.id, uuid=asked.uuid, service="echo", holder="me", attempt=1, failures=0, deaths=0, retries=2,
        backoff=0.5,
        headers="{}", body=b"\0\xff", owner="shop",
    )  # fmt: skip
    row = tables.row(asked.uuid)
    assert (row.state, row.holder, row.started, row.attempts) == ("running", "me", NOW + 1, 1)
    assert tables.leases() == {"me": NOW + 7}


def test_first_come_first_served(tables, submission):
    asked = [tables.add() for _ in range(3)]
    batch = [submission() for _ in range(5)]
    tables.do(store.accept, *batch)
    assert uuids(tables.claim(limit=4)) == uuids([*asked, batch[0]])
    assert uuids(tables.claim(limit=9)) == uuids(batch[1:])


def test_claims_follow_the_priority(tables):
    asked = [tables.add(priority=priority) for priority in (0, 9, 5, 0, 9, 5)]
    order = [asked[at] for at in (1, 4, 2, 5, 0, 3)]
    assert uuids(tables.claim(limit=3)) == uuids(order[:3])
    assert uuids(tables.claim(limit=9)) == uuids(order[3:])


def test_claims_are_limited_by_number(tables, submission):
    tables.do(store.accept, *(submission() for _ in range(10)))
    assert len(tables.claim(limit=3)) == 3
    assert len(tables.claim(limit=100)) == 7
    assert tables.claim(limit=1) == []


def test_claims_are_limited_by_size(tables):
    asked = [tables.add(body=bytes(size)) for size in (60, 40, 1, 101, 200, 0, 0)]
    sizes = []
    while claimed := tables.claim(limit=10, max_bytes=100):
        sizes.append([len(each.body) for each in claimed])
    assert sizes == [[60, 40], [1], [101], [200], [0, 0]]
    assert tables.row(asked[-1].uuid).state == "running"


def of_groups(tables, limit, last="", held=(), room=None):
    """Claim requests of groups in turn, and return the bodies."""
    found = tables.claim(limit=limit, turns=store.Turns(last, Counter(held), room))
    return " ".join(each.body.decode() for each in found)


@pytest.fixture
def some_groups(tables, submission):
    """Add requests to the groups a, b and c, and to none."""
    wanted = [(f"{group}{number}", group) for group in ("a", "", "c", "b") for number in range({"a": 5}.get(group, 2))]
    tables.do(store.accept, *(submission(body=body.encode(), group_name=group) for body, group in wanted))
    tables.add(body=b"a9", group_name="a", priority=9)
    tables.add("other", body=b"other", group_name="aa")


@pytest.mark.usefixtures("some_groups")
def test_groups_take_turns(tables):
    assert of_groups(tables, 3) == "a9 b0 c0"
    assert of_groups(tables, 3, last="c") == "0 a0 b1"
    assert of_groups(tables, 8, last="b") == "c1 1 a1 a2 a3"  # the rest is for the next claim
    assert of_groups(tables, 8, last="a") == "a4"
    assert of_groups(tables, 8, last="a") == ""


@pytest.mark.usefixtures("some_groups")
def test_no_more_of_a_group_is_claimed_than_there_is_room_for(tables):
    assert of_groups(tables, 9, held="aab", room=2) == "b0 c0 0 c1 1"
    assert of_groups(tables, 1, held="a", room=1) == "b1"
    assert of_groups(tables, 9, held="a", room=1) == ""
    assert of_groups(tables, 9, held="a", room=3) == "a9 a0"


@pytest.mark.usefixtures("some_groups")
def test_without_turns_those_without_a_group_are_claimed(tables):
    assert [each.body for each in tables.claim(limit=9)] == [b"0", b"1"]


def test_very_many_groups_take_turns(tables, submission):
    names = [f"tenant {number:03}" for number in range(250)]
    tables.do(store.accept, *(submission(group_name=name) for name in names for _ in range(2)))
    found = []
    while some := tables.claim(limit=120, turns=store.Turns(found[-1] if found else "", {}, None)):
        found += [each.group_name for each in some]
    assert len(found) == 500
    assert set(found[:250]) == set(names)


def test_a_claim_of_nothing_takes_no_lease(tables):
    assert tables.claim() == []
    assert tables.leases() == {}


def test_only_requests_of_the_service_are_claimed(tables):
    mine = tables.add("echo")
    tables.add("echo2")
    tables.add("ech")
    tables.add("ECHO")
    assert uuids(tables.claim("echo", limit=10)) == [mine.uuid]


def test_only_pending_requests_are_claimed(tables):
    tables.running()
    tables.done()
    tables.done(code=500)
    tables.add(due=NOW + 1)
    assert tables.claim(limit=10) == []


def test_several_services_are_claimed_at_a_time(tables):
    one, other, another = tables.add("one"), tables.add("other"), tables.add("one")
    claims = [store.Claim(name, 1, store.Lease("me", 10), NOW) for name in ("other", "one", "nobody", "one")]
    assert [uuids(each) for each in tables.do(store.claim, *claims)] == [
        [other.uuid], [one.uuid], [], [another.uuid],
    ]  # fmt: skip


def test_a_rescheduled_request_keeps_its_place(tables):
    first, second = tables.add(), tables.add()
    (claimed,) = tables.claim()
    tables.do(store.reschedule, again(claimed, due=NOW + 1))
    assert uuids(tables.claim(limit=1)) == [second.uuid]
    tables.add()
    tables.maintain(NOW + 1)
    assert uuids(tables.claim(limit=1)) == [first.uuid]


@only_postgresql
def test_the_order_is_kept_also_without_the_index(tables):
    first, second, third = tables.add(), tables.add(), tables.add()
    (claimed,) = tables.claim()
    tables.do(store.reschedule, again(claimed, due=NOW))
    tables.maintain(NOW)  # now it is the last row in the table
    with without_indexes(tables.engine) as connection:
        ((one, other),) = store.claim(connection, [store.Claim("echo", 2, store.Lease("me", 10), NOW)])
    assert (one.uuid, other.uuid) == (first.uuid, second.uuid)
    assert uuids(tables.claim()) == [third.uuid]


def test_concurrent_claims_are_disjoint(tables, submission, pool):
    asked = [submission() for _ in range(120)]
    tables.do(store.accept, *asked)
    barrier = threading.Barrier(4)

    def take(holder):
        taken = []
        barrier.wait(20)
        while claimed := tables.claim(limit=4, holder=holder):
            taken += uuids(claimed)
        return [(uuid, holder) for uuid in taken]

    taken = [each for some in pool.map(take, ("one", "two", "three", "four")) for each in some]
    assert sorted(uuid for uuid, _ in taken) == sorted(uuids(asked))
    assert all(tables.row(uuid).holder == holder for uuid, holder in taken)


@only_postgresql
def test_a_claim_skips_locked_rows(tables):
    first, second, third = tables.add(), tables.add(), tables.add()
    mine, others = (store.Claim("echo", 2, store.Lease(holder, 10), NOW) for holder in ("me", "other"))
    with tables.engine.connect() as connection:
        assert uuids(store.claim(connection, [mine])[0]) == [first.uuid, second.uuid]
        with tables.engine.connect() as other:
            assert uuids(store.claim(other, [others])[0]) == [third.uuid]
            assert store.claim(other, [others]) == [[]]
            other.rollback()
        assert uuids(tables.claim(holder="third")) == [third.uuid]


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_expired_lease_releases_its_requests(tables):
    claimed, more = tables.running(), tables.running(until=NOW + 9)
    tables.maintain(NOW + 9.999, holder="other")
    assert tables.row(claimed.uuid).state == tables.row(more.uuid).state == "running"
    tables.maintain(NOW + 10, holder="other")
    for each in (claimed, more):
        row = tables.row(each.uuid)
        assert (row.state, row.holder, row.attempts) == ("pending", None, 1)
    assert tables.leases() == {}
    (taken,) = tables.claim(holder="other")
    assert (taken.id, taken.attempt, taken.holder) == (claimed.id, 2, "other")
    assert tables.leases() == {"other": NOW + 10}


def test_a_lease_is_never_shortened(tables):
    tables.running(until=NOW + 10)
    tables.running(until=NOW + 5)
    assert tables.leases() == {"me": NOW + 10}
    tables.maintain(NOW, until=NOW + 3, renew=True)
    assert tables.leases() == {"me": NOW + 10}
    tables.running(until=NOW + 15)
    assert tables.leases() == {"me": NOW + 15}


def test_a_lease_renewed_in_time_keeps_its_requests(tables):
    claimed = tables.running()
    found = tables.maintain(NOW + 9, until=NOW + 19, renew=True)
    assert found.held == {claimed.id: 1}
    tables.maintain(NOW + 18, holder="other")
    assert tables.row(claimed.uuid).holder == "me"
    assert tables.leases() == {"me": NOW + 19}


def test_a_lease_renewed_late_keeps_unclaimed_requests(tables):
    claimed = tables.running()
    assert tables.maintain(NOW + 60, until=NOW + 70, renew=True).held == {claimed.id: 1}
    assert tables.leases() == {"me": NOW + 70}


def test_a_lease_renewed_too_late_has_lost_its_requests(tables):
    claimed = tables.running()
    tables.maintain(NOW + 60, holder="other")
    assert tables.maintain(NOW + 60, until=NOW + 70, renew=True).held == {}
    assert tables.row(claimed.uuid).state == "pending"


def test_a_clock_that_is_set_ahead_costs_the_titanic_that_finds_out_nothing(tables):
    claimed, theirs = tables.running(), tables.running(holder="other")
    assert tables.maintain(NOW + DAY).held == {claimed.id: 1}
    assert [tables.row(each.uuid).state for each in (claimed, theirs)] == ["running", "pending"]


def test_each_owner_has_its_own_lease(tables):
    mine = tables.running()
    theirs = tables.running(holder="other", until=NOW + 5)
    tables.maintain(NOW + 4, until=NOW + 14, renew=True)
    assert tables.leases() == {"me": NOW + 14, "other": NOW + 5}
    tables.maintain(NOW + 5, holder="third")
    assert tables.row(mine.uuid).holder == "me"
    assert tables.row(theirs.uuid).state == "pending"
    assert tables.leases() == {"me": NOW + 14}


DAY = 86400


def test_a_lease_taken_by_a_clock_that_was_ahead_is_shortened(tables):
    ahead = tables.running(until=NOW + DAY + 10, now=NOW + DAY)
    tables.maintain(NOW, holder="other")
    assert tables.leases() == {"me": NOW + 10}
    assert tables.row(ahead.uuid).state == "running"  # its Titanic may be alive
    tables.maintain(NOW + 10, holder="other")
    assert tables.row(ahead.uuid).state == "pending"


def test_a_clock_that_is_set_back_costs_a_living_titanic_nothing(tables):
    claimed = tables.running(until=NOW + DAY + 10, now=NOW + DAY)
    assert tables.maintain(NOW, renew=True).held == {claimed.id: 1}
    assert tables.leases() == {"me": NOW + 10}
    tables.maintain(NOW + 5, renew=True)
    tables.maintain(NOW + 12, holder="other")
    assert tables.row(claimed.uuid).state == "running"


def test_the_clocks_of_titanics_may_differ_by_the_length_of_a_lease(tables):
    tables.running(until=NOW + 20)
    tables.running(holder="other", until=NOW + 10)
    tables.maintain(NOW, holder="third")
    tables.maintain(NOW - 9, holder="third")
    assert tables.leases() == {"me": NOW + 20, "other": NOW + 10}


def test_a_retry_dated_by_a_clock_that_was_ahead_runs_now(tables):
    claimed = tables.running()
    tables.do(store.reschedule, again(claimed, due=NOW + DAY))
    wanted, latest = tables.add(due=NOW + DAY), tables.running()
    tables.do(store.reschedule, again(latest, due=NOW + 1.2 * upkeep.MAX_BACKOFF_SECONDS))
    tables.maintain()
    assert [tables.row(each.uuid).state for each in (claimed, wanted, latest)] == ["pending", "delayed", "delayed"]


@only_postgresql
def test_renewing_while_considered_dead_loses_the_requests_not_the_lease(tables, a_round, cluster, pool):
    claimed = tables.running()
    with tables.engine.connect() as connection:
        store.maintain(connection, [a_round(store.Lease("other", 10), NOW + 10)])
        renewing = pool.submit(tables.maintain, NOW + 10, until=NOW + 20, renew=True)
        waiting_for_locks(cluster, 1)
        connection.commit()
    assert renewing.result(20).held == {}
    assert tables.leases() == {"me": NOW + 20}
    assert [(each.id, each.attempt) for each in tables.claim(holder="other")] == [(claimed.id, 2)]


@only_postgresql
def test_a_request_that_is_being_finished_is_not_reassigned(tables, submission):
    claimed, other = tables.running(), tables.running()
    with tables.engine.connect() as connection:
        store.finish(connection, [outcome(claimed, b"in time")])
        tables.maintain(NOW + 10, holder="other")  # does not wait for it
        connection.commit()
    assert tables.row(claimed.uuid).reply == b"in time"
    assert tables.row(other.uuid).state == "pending"


def later_attempt(tables, claimed):
    """Let another Titanic take over the request."""
    tables.maintain(NOW + 10, holder="other")
    (taken,) = tables.claim(holder="other", until=NOW + 20)
    return taken


def own_later_attempt(tables, claimed):
    tables.maintain(NOW + 10, holder="other")
    (taken,) = tables.claim(until=NOW + 20)
    return taken


def back_in_line(tables, claimed):
    tables.maintain(NOW + 10, holder="other")


def ended(tables, claimed):
    tables.do(store.finish, outcome(claimed, b"the first"))


def failed(tables, claimed):
    tables.do(store.finish, outcome(claimed, None, code=500, error="the first"))


def put_back(tables, claimed):
    tables.do(store.reschedule, again(claimed, due=NOW + 5))


LATER = [later_attempt, own_later_attempt, back_in_line, ended, failed, put_back]


@pytest.mark.parametrize("meanwhile", LATER)
@pytest.mark.parametrize(
    ("late", "what"),
    [
        (store.finish, lambda claimed: outcome(claimed, b"late")),
        (store.finish, lambda claimed: outcome(claimed, None, code=500, error="late")),
        (store.reschedule, lambda claimed: again(claimed, due=NOW, failures=7, error="late")),
    ],
    ids=["done", "failed", "put back"],
)
def test_a_late_outcome_changes_nothing(tables, meanwhile, late, what):
    claimed = tables.running(result_ttl=5)
    meanwhile(tables, claimed)
    before = tables.row(claimed.uuid)
    tables.do(late, what(claimed))
    assert tables.row(claimed.uuid) == before


@pytest.mark.parametrize("wrong", [{"holder": "other"}, {"attempt": 2}, {"attempt": 0}, {"id": 99}], ids=str)
def test_an_outcome_counts_only_for_the_attempt_that_it_is_of(tables, wrong):
    claimed = tables.running()
    before = tables.row(claimed.uuid)
    tables.do(store.finish, outcome(claimed)._replace(**wrong))
    tables.do(store.reschedule, again(claimed)._replace(**wrong))
    assert tables.row(claimed.uuid) == before


def test_the_outcome_of_a_closed_request_changes_no_other(tables):
    claimed = tables.running()
    tables.do(store.close, store.Lookup(claimed.uuid))
    another = tables.running()
    assert another.id != claimed.id
    tables.do(store.add_partials, part(claimed, 0))
    tables.do(store.finish, outcome(claimed))
    tables.do(store.reschedule, again(claimed))
    assert tables.row(another.uuid).state == "running"
    assert tables.count() == 1
    assert tables.count(sql.PARTS) == 0


def test_one_late_outcome_among_others(tables):
    late, good = tables.running(), tables.running()
    tables.maintain(NOW + 11, holder="other")
    (taken, mine) = tables.claim(limit=2, holder="me")
    tables.do(store.finish, outcome(late, b"late"), outcome(mine, b"in time"))
    assert tables.row(late.uuid).state == "running"
    assert tables.row(good.uuid).reply == b"in time"
    assert taken.id == late.id


# ── PARTIALs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_partials_are_fetched_in_order(tables):
    claimed, other = tables.running(), tables.running()
    tables.do(store.add_partials, part(claimed, 2, b"2"), part(other, 0, b"x"), part(claimed, 0, b"0"))
    tables.do(store.add_partials, part(claimed, 1, b"1"), part(claimed, 3, b""))
    assert tables.do(store.fetch_partials, wanted(claimed), wanted(other), wanted(claimed, 2)) == [
        [b"0", b"1", b"2", b""], [b"x"], [b"2", b""],
    ]  # fmt: skip


def test_partials_are_fetched_up_to_the_first_gap(tables):
    claimed = tables.running()
    tables.do(store.add_partials, *(part(claimed, number, b"%d" % number) for number in (0, 1, 3, 4, 6)))
    starts = [tables.do(store.fetch_partials, wanted(claimed, start))[0] for start in range(8)]
    assert starts == [[b"0", b"1"], [b"1"], [], [b"3", b"4"], [b"4"], [], [b"6"], []]


@only_postgresql
def test_partials_are_in_order_without_the_index(tables):
    claimed = tables.running()
    for number in (2, 0, 1):
        tables.do(store.add_partials, part(claimed, number, b"%d" % number))
    with without_indexes(tables.engine) as connection:
        assert store.fetch_partials(connection, [wanted(claimed)]) == [[b"0", b"1", b"2"]]


def test_partials_are_limited_by_number(tables):
    claimed = tables.running()
    everything = [b"%d" % number for number in range(2 * replies.MAX_PARTIALS + 1)]
    tables.do(store.add_partials, *(part(claimed, number, body) for number, body in enumerate(everything)))
    fetched = []
    while some := tables.do(store.fetch_partials, wanted(claimed, len(fetched)))[0]:
        assert len(some) <= replies.MAX_PARTIALS
        fetched += some
    assert fetched == everything


def test_partials_are_limited_by_size(tables):
    claimed = tables.running()
    half = replies.MAX_PARTIALS_BYTES // 2
    sizes = [half, half, 1, replies.MAX_PARTIALS_BYTES + 1, replies.MAX_PARTIALS_BYTES + 2, 0, 5]
    tables.do(store.add_partials, *(part(claimed, number, bytes(size)) for number, size in enumerate(sizes)))
    fetched = []
    while some := tables.do(store.fetch_partials, wanted(claimed, sum(map(len, fetched))))[0]:
        fetched.append([len(each) for each in some])
    assert fetched == [[half, half], [1], [replies.MAX_PARTIALS_BYTES + 1], [replies.MAX_PARTIALS_BYTES + 2], [0, 5]]


@pytest.mark.parametrize("start", [1, 1000, MAX_FROM])
def test_there_are_no_partials_beyond_the_last(tables, start):
    claimed = tables.running()
    tables.do(store.add_partials, part(claimed, 0))
    assert tables.do(store.fetch_partials, wanted(claimed, start)) == [[]]


def test_each_attempt_has_its_own_partials(tables):
    first = tables.running()
    tables.do(store.add_partials, part(first, 0, b"old 0"), part(first, 1, b"old 1"))
    second = later_attempt(tables, first)
    tables.do(store.add_partials, part(second, 0, b"new 0"))
    tables.do(store.add_partials, part(first, 1, b"late"), part(first, 2, b"late"))
    assert tables.do(store.fetch_partials, wanted(second)) == [[b"new 0"]]


def test_partials_of_an_interrupted_attempt_are_deleted_by_the_next(tables):
    first, other = tables.running(), tables.running(service="other")
    tables.do(store.add_partials, part(first, 0), part(first, 1), part(other, 0, b"other's"))
    tables.maintain(NOW + 10, holder="other")
    assert tables.do(store.fetch_partials, wanted(first)) == [[b"part", b"part"]]
    (second,) = tables.claim()
    assert tables.count(sql.PARTS) == 1
    tables.do(store.add_partials, part(second, 0, b"kept"))
    tables.do(store.finish, outcome(second))
    assert tables.do(store.fetch_partials, wanted(first), wanted(second), wanted(other)) == [
        [],
        [b"kept"],
        [b"other's"],
    ]


def test_late_partials_of_an_earlier_attempt_are_ignored(tables):
    first = tables.running()
    later_attempt(tables, first)
    tables.do(store.add_partials, part(first, 0))
    assert tables.count(sql.PARTS) == 0


def test_a_late_outcome_keeps_the_partials_of_the_new_attempt(tables):
    first = tables.running()
    second = later_attempt(tables, first)
    tables.maintain(NOW + 20)
    (third,) = tables.claim()
    tables.do(store.add_partials, part(third, 0, b"new"))
    tables.do(store.finish, outcome(first), outcome(second))
    assert tables.do(store.fetch_partials, wanted(third)) == [[b"new"]]


def test_storing_partials_is_idempotent(tables):
    claimed = tables.running()
    batch = [part(claimed, 0, b"0"), part(claimed, 1, b"1")]
    assert tables.do(store.add_partials, *batch) == [None, None]
    assert tables.do(store.add_partials, *batch, part(claimed, 2, b"2")) == [None] * 3
    assert tables.do(store.fetch_partials, wanted(claimed)) == [[b"0", b"1", b"2"]]


def test_partials_of_a_closed_request_are_ignored(tables):
    gone, there = tables.running(), tables.running()
    tables.do(store.close, store.Lookup(gone.uuid))
    tables.do(store.add_partials, part(gone, 0), part(there, 0, b"kept"), part(gone, 1))
    assert tables.do(store.fetch_partials, wanted(gone), wanted(there)) == [[], [b"kept"]]
    assert tables.count(sql.PARTS) == 1


@only_postgresql
def test_partials_of_a_request_that_is_being_closed_are_ignored(tables, cluster, pool):
    gone = tables.running()
    with tables.engine.connect() as connection:
        store.close(connection, [store.Lookup(gone.uuid)])
        storing = pool.submit(tables.do, store.add_partials, part(gone, 0))
        waiting_for_locks(cluster, 1)
        connection.commit()
    assert storing.result(20) == [None]
    assert tables.count(sql.PARTS) == 0


# ── finish, put_back ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reply(tables):
    claimed = tables.running(result_ttl=60.5)
    assert tables.do(store.finish, outcome(claimed, b"\0\xffreply", NOW + 3)) == [True]
    row = tables.row(claimed.uuid)
    assert (row.state, row.reply, row.finished, row.expires) == ("done", b"\0\xffreply", NOW + 3, NOW + 63.5)
    assert (row.holder, row.code, row.error, row.attempts) == (None, None, None, 1)


def test_a_failure(tables):
    claimed = tables.running(result_ttl=60)
    tables.do(store.finish, outcome(claimed, b"detail", NOW + 3, code=503, error="broken: ü"))
    row = tables.row(claimed.uuid)
    assert (row.state, row.reply, row.code, row.error) == ("failed", b"detail", 503, "broken: ü")
    assert (row.holder, row.finished, row.expires) == (None, NOW + 3, NOW + 63)


def test_ends_are_numbered_in_order(tables):
    claimed = [tables.running() for _ in range(4)]
    tables.do(store.finish, outcome(claimed[2]))
    tables.do(store.finish, outcome(claimed[0], None, code=500))
    tables.do(store.finish, outcome(claimed[3]), outcome(claimed[2]))  # the second one too late
    numbers = [tables.row(each.uuid).ended for each in claimed]
    assert numbers[1] is None
    assert numbers[2] < numbers[0] < numbers[3]


def test_ends_in_one_transaction_have_different_numbers(tables):
    claimed = [tables.running() for _ in range(100)]
    before = tables.row(tables.done().uuid).ended
    tables.do(store.finish, *map(outcome, claimed))
    numbers = {tables.row(each.uuid).ended for each in claimed}
    assert len(numbers) == 100
    assert min(numbers) > before


def test_the_number_of_an_end_is_not_reused(tables):
    first = tables.done()
    number = tables.row(first.uuid).ended
    tables.do(store.close, store.Lookup(first.uuid))
    assert tables.row(tables.done().uuid).ended > number


def test_without_a_ttl_a_reply_is_kept_for_ever(tables):
    assert tables.row(tables.done().uuid).expires is None


def test_the_default_ttl(tables):
    says, says_not = tables.running(result_ttl=60), tables.running()
    tables.do(store.finish, outcome(says, ttl=5), outcome(says_not, ttl=5))
    assert [tables.row(each.uuid).expires for each in (says, says_not)] == [NOW + 60, NOW + 5]


def test_a_reply_after_a_failed_attempt_has_no_error(tables):
    claimed = tables.running()
    tables.do(store.reschedule, again(claimed, due=NOW + 1, failures=1, error="once"))
    tables.maintain(NOW + 1)
    (second,) = tables.claim()
    tables.do(store.finish, outcome(second))
    row = tables.row(claimed.uuid)
    assert (row.state, row.error, row.code, row.failures, row.attempts) == ("done", None, None, 1, 2)


def test_outcomes_of_many_kinds_at_a_time(tables):
    claimed = [tables.running() for _ in range(3)]
    tables.do(
        store.finish, outcome(claimed[0], b""), outcome(claimed[1], None, code=400), outcome(claimed[2], b"r", code=500)
    )
    assert [(tables.row(each.uuid).state, tables.row(each.uuid).reply) for each in claimed] == [
        ("done", b""), ("failed", None), ("failed", b"r"),
    ]  # fmt: skip


def test_a_rescheduled_request_waits_until_it_is_due(tables):
    claimed = tables.running()
    assert tables.do(store.reschedule, again(claimed, due=NOW + 2.5, failures=1, error="not now")) == [None]
    row = tables.row(claimed.uuid)
    assert (row.state, row.due, row.failures, row.error) == ("delayed", NOW + 2.5, 1, "not now")
    assert (row.holder, row.attempts) == (None, 1)
    assert tables.claim() == []
    assert tables.maintain(NOW + 2).next_due == NOW + 2.5
    tables.maintain(NOW + 2.5)
    (second,) = tables.claim()
    assert (second.attempt, second.failures) == (2, 1)


def test_rescheduling_without_failures_keeps_their_number(tables):
    claimed = tables.running()
    tables.do(store.reschedule, again(claimed, due=NOW, failures=2))
    tables.maintain(NOW)
    (second,) = tables.claim()
    tables.do(store.reschedule, again(second, due=NOW))
    assert tables.row(claimed.uuid).failures == 2


@pytest.mark.parametrize("work", [store.finish, store.reschedule])
def test_lost_workers_are_recorded(tables, work):
    claimed, other = tables.running(), tables.running()
    make = outcome if work is store.finish else again
    tables.do(work, make(claimed, deaths=3), make(other))
    assert [tables.row(each.uuid).deaths for each in (claimed, other)] == [3, 0]


def test_an_attempt_without_lost_workers_keeps_their_number(tables):
    tables.do(store.reschedule, again(tables.running(), due=NOW, deaths=3))
    tables.maintain(NOW)
    (claimed,) = tables.claim()
    assert claimed.deaths == 3
    tables.do(store.reschedule, again(claimed, due=NOW, failures=1))
    assert tables.row(claimed.uuid).deaths == 3
    tables.maintain(NOW)
    (claimed,) = tables.claim()
    tables.do(store.finish, outcome(claimed))
    assert tables.row(claimed.uuid).deaths == 3


def test_requests_with_and_without_failures_are_rescheduled_together(tables):
    one, other = tables.running(), tables.running()
    tables.do(store.reschedule, again(one, failures=1, error="x"), again(other), again(other, failures=5))
    assert [tables.row(each.uuid).failures for each in (one, other)] == [1, 0]


@pytest.mark.parametrize("work", [store.finish, store.reschedule])
def test_finish_is_idempotent(tables, work):
    claimed = tables.running(result_ttl=1)
    what = outcome(claimed, now=NOW + 1) if work is store.finish else again(claimed, failures=1)
    tables.do(work, what)
    before = tables.row(claimed.uuid)
    tables.do(work, what)
    assert tables.row(claimed.uuid) == before


# ── release ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_release_returns_all_requests_of_an_owner(tables):
    mine, more = tables.running(), tables.running()
    (others,) = tables.claim(holder="other") if tables.add() else ()
    ended = tables.done()
    waits = tables.add(due=NOW + 9)
    before = [tables.row(each.uuid) for each in (others, ended, waits)]
    assert tables.do(store.release, "me") == [None]
    assert [tables.row(each.uuid) for each in (others, ended, waits)] == before
    for each in (mine, more):
        row = tables.row(each.uuid)
        assert (row.state, row.holder, row.attempts) == ("pending", None, 1)
    tables.do(store.finish, outcome(mine, b"late"))
    assert [(each.uuid, each.attempt) for each in tables.claim(limit=9, holder="another")] == [
        (mine.uuid, 2), (more.uuid, 2),
    ]  # fmt: skip


# ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_maintenance_of_an_empty_database(tables):
    found = tables.maintain(count=True)
    assert found == store.Findings(held={}, services={}, next_due=None, waiting={})


def test_due_requests_become_pending(tables):
    first, second, third = (tables.add(due=NOW + seconds) for seconds in (1, 2, 3))
    found = tables.maintain(NOW + 2, offered=("echo",))
    assert [tables.row(each.uuid).state for each in (first, second, third)] == ["pending", "pending", "delayed"]
    assert (found.services, found.next_due) == ({"echo": False}, NOW + 3)


def test_maintenance_returns_the_owned_requests(tables):
    mine = [tables.running() for _ in range(3)]
    tables.add()
    tables.claim(holder="other")
    tables.do(store.finish, outcome(mine[0]))
    assert tables.maintain(NOW + 1).held == {mine[1].id: 1, mine[2].id: 1}
    tables.do(store.reschedule, again(mine[1], due=NOW + 1))
    tables.maintain(NOW + 1)
    tables.claim()
    assert tables.maintain(NOW + 1).held == {mine[1].id: 2, mine[2].id: 1}


@pytest.mark.parametrize("code", [None, 500])
def test_expired_results_are_deleted(tables, code):
    claimed = tables.running(result_ttl=60)
    tables.do(store.add_partials, part(claimed, 0))
    tables.do(store.finish, outcome(claimed, now=NOW, code=code))
    kept = tables.done()
    tables.maintain(NOW + 59.999)
    assert tables.row(claimed.uuid) is not None
    tables.maintain(NOW + 60)
    assert tables.row(claimed.uuid) is None
    assert tables.count(sql.PARTS) == 0
    assert tables.row(kept.uuid) is not None


def test_a_reply_expires_from_its_end_and_not_before(tables):
    asked = tables.add(result_ttl=1)
    tables.maintain(NOW + 100)
    assert tables.row(asked.uuid).state == "pending"


def test_expired_keys_are_deleted(tables):
    tables.add(key="short", key_expires=NOW + 60)
    tables.add(key="long", key_expires=NOW + 61)
    tables.add(key="for ever")
    tables.maintain(NOW + 60)
    assert tables.count(sql.KEYS) == 2
    tables.maintain(NOW + 1e9)
    assert tables.count(sql.KEYS) == 1
    assert tables.count() == 3


@pytest.fixture
def four_at_once(monkeypatch):
    """Let maintenance take four rows of each kind, and no time for more."""
    monkeypatch.setattr(upkeep, "SWEEP_ROWS", 4)
    monkeypatch.setattr(upkeep, "SWEEP_SECONDS", 0.0)


def expired(tables, submission, number):
    """Add requests that expire, and their keys, at `NOW + 1`."""
    tables.do(store.accept, *(submission(key=f"{at}", key_expires=NOW, result_ttl=1) for at in range(number)))
    tables.do(store.finish, *(outcome(each) for each in tables.claim(limit=number)))


def test_one_call_deletes_only_some_rows_so_that_accepts_do_not_wait(tables, submission, four_at_once):
    expired(tables, submission, 10)
    left = [(tables.count(), tables.count(sql.KEYS), tables.maintain(NOW + 1).more) for _ in range(4)]
    assert left == [(10, 10, True), (6, 6, True), (2, 2, False), (0, 0, False)]


def test_one_call_goes_on_while_it_has_time(tables, submission, four_at_once, monkeypatch):
    monkeypatch.setattr(upkeep, "SWEEP_SECONDS", 1000.0)
    expired(tables, submission, 10)
    assert tables.maintain(NOW + 1).more is False
    assert (tables.count(), tables.count(sql.KEYS)) == (0, 0)


def test_one_call_makes_only_some_requests_pending(tables, submission, four_at_once):
    tables.do(store.accept, *(submission("delayed", due=NOW + 1) for _ in range(6)), *(submission() for _ in range(9)))
    tables.claim(limit=9)
    found = []
    for _ in range(4):
        more = tables.maintain(NOW + 11, holder="other").more
        claimed = [len(tables.claim(service, 99, "other", NOW + 50)) for service in ("delayed", "echo")]
        found.append((*claimed, more))
    assert found == [(4, 4, True), (2, 4, True), (0, 1, False), (0, 0, False)]


@pytest.fixture
def some_pending(tables):
    """Add services with pending requests, and services without."""
    for name in ("b", "a", "c", "a", "e"):
        tables.add(name)
    tables.running(service="running")
    tables.done(service="done")
    tables.add("delayed", due=NOW + 1)


def test_offered_services_with_pending_requests(tables, some_pending):
    offered = ("c", "nobody", "b", "running", "done", "delayed", "a", "A")
    assert tables.maintain(offered=offered).services == dict.fromkeys("abc", False)
    tables.add("b", group_name="tenant-7")
    assert tables.maintain(offered=offered).services == {"a": False, "b": True, "c": False}
    assert tables.maintain(offered=("nobody",)).services == {}
    assert tables.maintain(offered=()).services == {}


def test_services_with_pending_requests_by_name(tables, some_pending):
    asked = (("", 10), ("a", 2), ("b", 1), ("bb", 9), ("e", 9), ("zz", 9), ("", 0))
    assert tables.do(store.pending_after, *asked) == [
        ["a", "b", "c", "e"], ["b", "c"], ["c"], ["c", "e"], [], [], [],
    ]  # fmt: skip


def test_very_many_services(tables, submission, executed):
    names = {f"service {number}" for number in range(300)} | {"Ä", "a", "A", "🚢", "z" * 255, "b c", "%", "\\"}
    tables.do(store.accept, *(submission(name) for name in sorted(names) for _ in range(3)))
    with tables.engine.begin() as connection, executed(tables.engine) as statements:
        offered = store.pending_services(connection, [*names, "nobody"])
        ((after,),) = (store.pending_after(connection, [("", 1000)]),)
    assert sorted(offered) == sorted(after) == sorted(names)
    assert len([sql for sql, _ in statements if "titanic_requests" in sql]) == 2


def test_requests_that_have_not_ended_are_counted(tables, submission):
    tables.do(store.accept, *(submission() for _ in range(5)), *(submission(due=NOW + 9) for _ in range(3)))
    tables.claim(limit=2)
    tables.done(service="other")
    assert tables.maintain(count=False).waiting is None
    assert tables.maintain(count=True).waiting == {"echo": 8}
    tables.do(store.accept, *(submission("other") for _ in range(2)))
    assert tables.maintain(count=True).waiting == {"echo": 8, "other": 2}


@only_postgresql
def test_changes_are_added_to_the_counts_a_limited_number_at_a_time(tables, monkeypatch):
    for name in ("a", "a", "b", "b"):
        tables.add(name)
    monkeypatch.setattr(counts, "_FOLD", counts._FOLD.replace(f"LIMIT {counts.FOLDED}", "LIMIT 3"))
    monkeypatch.setattr(counts, "FOLDED", 3)
    left = []
    for _ in range(3):
        more = tables.maintain().more
        left.append((tables.count(sql.COUNT_CHANGES), more))
    assert left == [(1, True), (0, False), (0, False)]
    check_counts(tables.engine)


def test_counts_of_nothing_are_deleted(tables):
    tables.do(store.close, store.Lookup(tables.add("a").uuid), store.Lookup(tables.add("b").uuid))
    tables.maintain()
    assert tables.count(sql.COUNTS) == 0


@only_postgresql
def test_counts_follow_when_an_operator_empties_a_table(tables):
    tables.add("a", key="k")
    tables.done(service="b")
    with tables.engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE titanic_requests CASCADE")
    check_counts(tables.engine)
    assert tables.maintain(count=True).waiting == {}


@only_sqlite
def test_a_file_has_no_clock_of_its_own(tables):
    clock = store.Clock()
    clock.set(1000)
    with tables.engine.begin() as connection:
        store.set_clock(connection, clock)
    assert abs(clock.now() - 1000) < 100


@only_postgresql
@pytest.mark.parametrize("behind", [0, 1000])
def test_the_clock_is_set_by_the_servers(tables, monkeypatch, behind):
    ours, clock = time.time, store.Clock()
    monkeypatch.setattr(time, "time", lambda: ours() - behind)
    tables.do(store.maintain, store.MaintenanceRound(store.Lease("me", 10), clock, renew_at=0.0, count=False))
    assert abs(clock.now() - ours()) < 100
    assert abs(tables.leases()["me"] - ours() - 10) < 100
    monkeypatch.setattr(time, "time", lambda: ours() + 3600)  # a step, before the clocks are compared again
    assert abs(clock.now() - ours()) < 100


def test_several_maintenances_in_one_batch(tables, a_round):
    tables.running()
    lease = store.Lease("me", 10)
    rounds = [a_round(lease, renew=True), a_round(lease, count=True)]
    assert [each.waiting for each in tables.do(store.maintain, *rounds)] == [None, {"echo": 1}]


# ── fetch, states, close ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_as_it_is_fetched_in_each_state(tables):
    claimed = tables.running()
    done, failed = tables.done(b"reply"), tables.done(None, 500, "broken")
    waiting, delayed = tables.add(), tables.add(due=NOW + 1)
    found = tables.do(store.fetch, *(store.Lookup(each.uuid) for each in (waiting, delayed, claimed, done, failed)))
    assert [(each.state, each.attempt, each.reply, each.size, each.code, each.error, each.ended) for each in found] == [
        ("pending", 0, None, None, None, None, False),
        ("delayed", 0, None, None, None, None, False),
        ("running", 1, None, None, None, None, False),
        ("done", 1, b"reply", 5, None, None, True),
        ("failed", 1, None, None, 500, "broken", True),
    ]


def test_a_large_reply_is_fetched_by_itself(tables):
    small, large = bytes(replies.LARGE_REPLY_BYTES - 1), bytes(replies.LARGE_REPLY_BYTES - 2) + b"\xff\0"
    one, other = tables.done(small), tables.done(large)
    found = tables.do(store.fetch, store.Lookup(one.uuid), store.Lookup(other.uuid))
    assert [(each.size, each.reply) for each in found] == [
        (replies.LARGE_REPLY_BYTES - 1, small),
        (replies.LARGE_REPLY_BYTES, None),
    ]
    assert tables.do(store.fetch_reply, other.id, 10**9, one.id) == [large, None, small]


def test_results_are_in_the_order_of_the_batch(tables):
    one, other = tables.add(), tables.add()
    found = tables.do(
        store.fetch, store.Lookup(other.uuid), store.Lookup(uuid4()), store.Lookup(one.uuid), store.Lookup(other.uuid)
    )
    assert found[1] is None
    assert found[0] == found[3]
    assert [tables.row(one.uuid).id, tables.row(other.uuid).id] == [found[2].id, found[0].id]


def test_progress_of_many_requests(tables):
    waits, done = tables.add(), tables.done(service="done")
    first = tables.running(service="again")
    tables.do(store.add_partials, *(part(first, number) for number in range(3)))
    assert tables.do(store.progress, frozenset([waits.uuid, uuid4(), done.uuid, first.uuid]), frozenset()) == [
        {waits.uuid: ("pending", 0, None), done.uuid: ("done", 1, None), first.uuid: ("running", 1, 2)}, {},
    ]  # fmt: skip
    tables.maintain(NOW + 10, holder="other")
    (second,) = tables.claim("again")
    tables.do(store.add_partials, part(second, 0))
    (seen,) = tables.do(store.progress, frozenset([first.uuid]))
    assert seen == {first.uuid: ("running", 2, 0)}
    assert not seen[first.uuid].ended


@pytest.mark.parametrize(("code", "state"), [(None, "done"), (500, "failed")])
def test_which_states_are_ended(tables, code, state):
    claimed = tables.done(code=code)
    (seen,) = tables.do(store.progress, frozenset([claimed.uuid]))
    assert seen[claimed.uuid].state == state
    assert seen[claimed.uuid].ended


def test_close_deletes_the_request_and_its_partials(tables):
    claimed, kept = tables.running(), tables.running()
    tables.do(store.add_partials, part(claimed, 0), part(claimed, 1), part(kept, 0))
    assert tables.do(store.close, store.Lookup(claimed.uuid), store.Lookup(uuid4()), store.Lookup(claimed.uuid)) == [
        claimed.id,
        None,
        claimed.id,
    ]
    assert tables.do(store.fetch, store.Lookup(claimed.uuid), store.Lookup(kept.uuid))[0] is None
    assert tables.count() == 1
    assert tables.count(sql.PARTS) == 1


@pytest.mark.parametrize("work", [store.fetch, store.close])
def test_thousands_at_a_time(tables, submission, work):
    batch = [submission() for _ in range(1500)]
    tables.do(store.accept, *batch)
    assert all(each is not None for each in tables.do(work, *(store.Lookup(each.uuid) for each in batch)))


# ── how the database goes about it ───────────────────────────────────────────────────────────────────────────────────


def fill(engine):
    """Fill the tables as they are after a while: almost all requests are done."""
    schema.upgrade(engine)
    requests = []
    for id_ in range(1, 4000):
        few = id_ % 60
        state = "pending" if few in {0, 1, 2} else "delayed" if few in {3, 4, 5} else "running" if few == 6 else "done"
        requests.append({
            "id": id_, "uuid": uuid4(), "service": f"service {id_ // 60 % 20}", "state": state, "priority": id_ % 10,
            "created": NOW, "due": NOW + id_, "finished": NOW if state == "done" else None,
            "expires": NOW + 1e6 + id_ if state == "done" and id_ % 2 else None,
            "holder": f"holder {id_ % 7}" if state == "running" else None,
            "attempts": 2, "failures": 0, "retries": 0, "body": b"",
        })  # fmt: skip
    keys = [{"service": "s", "key": f"{at}", "uuid": uuid4(), "expires": NOW + at if at % 9 else None}
            for at in range(3000)]  # fmt: skip
    parts = [{"request": row["id"], "attempt": 1, "number": number, "body": b""}
             for row in requests[::4] for number in range(3)]  # fmt: skip
    made = [parse_schedule([b"s%d" % at, b"service 3", b""], {"every": 1000 * (30 + at)}, NOW) for at in range(2000)]
    schedules = [each._asdict() for each in made]
    with engine.begin() as connection:
        holders = [{"holder": f"holder {at}", "lease": NOW + 60 * at, "seconds": 600} for at in range(7)]
        for table, rows in (
            (sql.REQUESTS, requests),
            (sql.KEYS, keys),
            (sql.PARTS, parts),
            (sql.HOLDERS, holders),
            (sql.SCHEDULES, schedules),
        ):
            connection.execute(sa.insert(table), rows)
        if engine.dialect.name == "postgresql":  # on SQLite it is rarely run
            connection.exec_driver_sql("ANALYZE")


@pytest.fixture
def filled(prepared, backend):
    """A database whose contents stay the same."""
    engine = prepared(backend, fill)
    yield engine
    engine.dispose()


@pytest.fixture
def explained(filled, executed):
    """`explained(work, item)` returns each statement and its plan."""

    def explain(work, *batch):
        how = "EXPLAIN QUERY PLAN " if filled.dialect.name == "sqlite" else "EXPLAIN "
        with filled.begin() as connection:
            with executed(filled) as statements:
                work(connection, *batch)
            if filled.dialect.name == "postgresql":  # what else it could do is dearer only in tables that are large
                for dear in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
                    connection.exec_driver_sql(f"SET LOCAL {dear} = off")
            plans = [
                (sql, "\n".join(str(row[-1]) for row in connection.exec_driver_sql(how + sql, parameters)))
                for sql, parameters in statements if "titanic_" in sql
            ]  # fmt: skip
            connection.rollback()
        assert plans
        return plans

    return explain


READY, PENDING, DUE, RETRY = "requests_ready", "requests_oldest_pending", "requests_due", "requests_retry"
HOLDER, EXPIRES = "requests_holder", "requests_expires"
KEYS = "keys_expires"
UUID = {"sqlite": "autoindex_titanic_requests_1", "postgresql": "requests_uuid_key"}
PARTS = {"sqlite": "autoindex_titanic_parts_1", "postgresql": "parts_pkey"}
KEY = {"sqlite": "autoindex_titanic_keys_1", "postgresql": "keys_pkey"}
SCHEDULES = "schedules_next"
SCHEDULE = {"sqlite": "autoindex_titanic_schedules_1", "postgresql": "schedules_pkey"}


LEASED = store.Lease("holder 3", 10)


class Later(store.Clock):
    """A minute later."""

    def now(self):
        return NOW + 60


WORK = {
    store.accept: (lambda there: Submission(uuid4(), "s", b"", NOW, NOW, key="17"), [KEY]),
    store.claim: (lambda there: store.Claim("service 3", 20, LEASED, NOW), [READY, PARTS]),
    store.maintain: (
        lambda there: store.MaintenanceRound(LEASED, Later(), renew_at=0.0, count=True, offered=("service 3", "x")),
        [READY, DUE, RETRY, HOLDER, EXPIRES, KEYS],
    ),
    store.fetch: (lambda there: store.Lookup(there.uuid), [UUID]),
    store.progress: (lambda there: frozenset([there.uuid, uuid4()]), [UUID]),
    store.fetch_reply: (lambda there: there.id, []),
    store.fetch_partials: (lambda there: store.PartialsQuery(there.id, 1, 0), [PARTS]),
    store.add_partials: (lambda there: store.Partial(there.id, 1, 9, b""), []),
    store.finish: (lambda there: store.Outcome(there.id, there.holder, 2, NOW, b""), []),
    store.reschedule: (lambda there: store.Reschedule(there.id, there.holder, 2, NOW), []),
    store.close: (lambda there: store.Lookup(there.uuid), [UUID]),
    store.pending_after: (lambda there: ("service 1", 10), [PENDING]),
    store.release: (lambda there: there.holder, [HOLDER]),
    store.fire: (lambda there: store.Firing(Later()), [SCHEDULES, SCHEDULE]),
    store.next_occurrence: (lambda there: frozenset(), [SCHEDULES]),
    store.edit_schedules: (lambda there: store.Edit("pause", "s17", "", NOW), [SCHEDULE]),
}


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_no_table_is_read_from_end_to_end(filled, explained, backend, work):
    item, indexes = WORK[work]
    with filled.begin() as connection:
        there = connection.execute(sa.select(sql.REQUESTS).where(sql.is_in("running"))).first()
    plans = explained(work, [item(there)])
    for statement, plan in plans:
        assert not re.search(r"(Seq Scan on|SCAN) titanic_(requests|parts|keys|schedules)(?! USING)", plan), (
            statement,
            plan,
        )
        # A partial index serves only a state that is written out: a plan that is kept for others has none otherwise.
        assert not re.search(r"titanic_requests\.state (=|IN|!=) *[(]?[%?]", statement), statement
    everything = "\n".join(plan for _, plan in plans)
    for index in indexes:
        assert (index if isinstance(index, str) else index[backend]) in everything, everything


FREQUENT = [each for each in WORK if each not in {store.release, store.edit_schedules}]


@pytest.mark.parametrize("work", FREQUENT, ids=lambda work: work.__name__)
def test_statements_leave_no_cycles(filled, work):
    """`titanic serve` collects garbage rarely: what every request leaves would take megabytes before that."""
    item, _ = WORK[work]
    with filled.begin() as connection:
        there = connection.execute(sa.select(sql.REQUESTS).where(sql.is_in("running"))).first()
        items = [item(there) for _ in range(4)]
        work(connection, items[:2])  # compiled now, and kept
        work(connection, items[:1])
        with no_collector():
            work(connection, items[2:])
            work(connection, items[3:])
            assert gc.collect() == 0
        connection.rollback()


@only_postgresql
def test_maintenance_uses_indexes_before_the_tables_were_analyzed(engine, executed, a_round):
    """PostgreSQL then expects that a third of all rows have expired, so that reading the table soon finds some."""
    with engine.begin() as connection:
        connection.exec_driver_sql(f"""
            INSERT INTO titanic_requests (uuid, service, state, priority, created, due, finished, expires, attempts,
                                          failures, retries, body)
            SELECT gen_random_uuid(), 's', 'done', 0, 0, 0, 0, {NOW + 60}, 1, 0, 0, '' FROM generate_series(1, 60000)
        """)
        connection.exec_driver_sql(f"""
            INSERT INTO titanic_keys (service, key, uuid, expires)
            SELECT 's', at::text, gen_random_uuid(), {NOW + 60} FROM generate_series(1, 60000) AS at
        """)
        with executed(engine) as statements:
            store.maintain(connection, [a_round(LEASED, NOW)])
        found = [(text, parameters) for text, parameters in statements if text.startswith("SELECT titanic_")]
        for text, parameters in found:
            plan = "\n".join(connection.exec_driver_sql("EXPLAIN " + text, parameters).scalars())
            assert not re.search(r"Seq Scan on titanic_(requests|keys)", plan), (text, plan)
        connection.rollback()
    assert len(found) > 5


def test_the_requests_of_an_owner_are_listed_by_an_index(explained):
    ((_, plan),) = explained(admin.ls, admin.Filter(owner="shop"), 50)
    assert "titanic_requests_owner" in plan
    assert not re.search(r"Sort|TEMP B-TREE", plan), plan


def test_counting_reads_one_entry_of_an_index_for_each_service(explained):
    (plan,) = (plan for statement, plan in explained(admin.stats, NOW) if "titanic_requests" in statement)
    for index in ("titanic_requests_oldest", "titanic_requests_oldest_pending"):
        assert re.search(rf"(?i)using (covering )?(index )?{index}\b", plan), plan
    assert not re.search(r"(?i)scan (on )?titanic_requests\b", plan), plan


def test_a_claim_does_not_sort(explained):
    (_, plan), *_ = explained(store.claim, [store.Claim("service 1", 20, store.Lease("me", 10), NOW)])
    assert re.search(r"(?i)using (covering )?index titanic_requests_ready|Scan using titanic_requests_ready", plan)
    assert not re.search(r"Sort|TEMP B-TREE FOR ORDER BY", plan), plan


def test_groups_are_found_by_index_lookups(explained):
    asked = store.Claim("service 1", 20, store.Lease("me", 10), NOW, turns=store.Turns("", {}, None))
    (_, plan), *_ = explained(store.claim, [asked])
    steps = [line for line in plan.splitlines() if "titanic_" in line]
    assert all(re.search("(SEARCH|Index Only Scan).*titanic_requests_ready", line) for line in steps), plan


def test_pending_services_are_found_by_index_lookups(explained):
    for work, asked in ((store.pending_after, [("", 10)]), (store.pending_services, ("service 3", "x"))):
        ((_, plan),) = explained(work, asked)
        steps = [line for line in plan.splitlines() if "titanic_" in line]
        assert steps
        assert all(
            re.search("(SEARCH|Index Only Scan).*titanic_requests_(oldest_pending|ready)", line) for line in steps
        ), plan


@only_postgresql
def test_pending_services_are_found_without_reading_all_requests(filled, submission, executed):
    names = [f"service {number}" for number in range(20)]
    explain = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
    with filled.connect() as connection:
        store.accept(connection, [submission("service 3") for _ in range(1000)])
        with executed(filled) as statements:
            assert set(store.pending_services(connection, names)) == set(names)
            assert set(store.pending_after(connection, [("", 100)])[0]) == set(names)
        assert len(statements) == 2
        for sql, parameters in statements:
            (plan,) = connection.exec_driver_sql(explain + sql, parameters).scalar_one()
            assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] < 300, plan
        connection.rollback()


def test_the_next_due_request_is_one_index_lookup(explained, a_round):
    plans = explained(store.maintain, [a_round(store.Lease("me", 10))])
    ((_, plan),) = [each for each in plans if "min(titanic_requests.due)" in each[0]]
    assert "titanic_requests_due" in plan
    assert "Bitmap" not in plan


def test_new_known_and_expired_keys_in_one_batch(tables, submission):
    known, old = submission(key="known"), submission(key="old", key_expires=NOW + 1)
    tables.do(store.accept, known, old)
    later = [submission(key=key, now=NOW + 2) for key in ("new", "known", "old", "new")]
    uuids = tables.do(store.accept, *later)
    assert uuids == [later[0].uuid, known.uuid, later[2].uuid, later[0].uuid]
    assert tables.count() == 4
    assert tables.do(store.accept, *later) == uuids


def test_finish_tells_late_outcomes_from_those_that_were_stored(tables):
    first = tables.running()
    tables.do(store.release, first.holder)
    (second,) = tables.claim()
    assert tables.do(store.finish, outcome(first, b"late"), outcome(second), outcome(second)) == [False, True, True]
    assert tables.row(first.uuid).reply == b"reply"
