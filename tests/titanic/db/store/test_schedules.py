"""The SQL of schedules, on SQLite and on PostgreSQL."""

import json
import threading
from collections import Counter
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.databases import waiting_for_locks
from support.processes import TIMEOUT_SECONDS
from support.titanics import StoppedClock

from zmdp.titanic.api.schedules import parse_schedule
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.store import models as sql
from zmdp.titanic.db.store import schedules
from zmdp.titanic.db.store.schedules import MAX_FIRED, Edit, Edited, Listing

NOW = 1_800_000_000.0
only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)


def schedule(name="tick", seconds=10, owner="", now=NOW, service="echo", **options):
    return parse_schedule([name.encode(), service.encode(), b"body"], {"every": seconds * 1000, **options}, now, owner)


@pytest.fixture
def add(tables):
    """`add(name, …)` adds a schedule."""

    def add(*arguments, **options):
        made = schedule(*arguments, **options)
        assert tables.do(store.edit_schedules, Edit("add", made.name, made.owner, NOW, made)) == [Edited()]
        return made

    return add


@pytest.fixture
def fire(tables):
    """`fire(now)` submits what is due."""
    return lambda now: tables.do(store.fire, store.Firing(StoppedClock(now)))[0]


@pytest.fixture
def edit(tables):
    """`edit(action, name, owner)` changes a schedule."""

    def edit(action, name="tick", owner="", now=NOW, **more):
        (edited,) = tables.do(store.edit_schedules, Edit(action, name, owner, now, **more))
        return edited

    return edit


def listed(tables, owner=None):
    return tables.do(store.list_schedules, Listing(owner))[0]


def keys(tables):
    """Return service, owner and key of all requests, in order."""
    with tables.engine.begin() as connection:
        found = connection.execute(sa.select(sql.R.service, sql.R.owner, sql.R.key).order_by(sql.R.id))
        return [tuple(row) for row in found]


# ── what is due ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_next_occurrence_of_all_schedules(tables, add, edit):
    assert tables.do(store.next_occurrence, frozenset()) == [None]
    add("a", 30)
    add("b", 20)
    add("c", 10)
    edit("pause", "c")
    assert tables.do(store.next_occurrence, frozenset()) == [NOW + 20]


def test_a_clock_that_was_ahead_and_was_set_back(tables, add, edit, fire):
    far = NOW + 1e8
    add("ahead", 10, now=far)
    add("right", 10)
    add("late", 10, now=NOW - 1000)
    edit("pause", add("paused", 10, now=far).name)
    fire(NOW + 10)
    assert tables.do(store.catch_up, StoppedClock(NOW + 15)) == [1]
    following = {row["name"]: row["next"] for row in listed(tables)}
    assert (following["right"], following["late"], following["paused"]) == (NOW + 20, NOW + 20, None)
    assert NOW + 15 < following["ahead"] <= NOW + 25
    fired = fire(far)
    assert {each.key for each in fired.submissions if each.key.startswith("ahead")}
    before = len(keys(tables))
    assert tables.do(store.catch_up, StoppedClock(NOW + 15)) == [3]
    fire(far)  # what was submitted is not submitted again
    assert len(keys(tables)) == before
    assert tables.do(store.catch_up, StoppedClock(far)) == [0]


@only_postgresql
def test_a_schedule_that_is_paused_while_others_are_brought_back_stays_paused(tables, add, cluster, pool):
    add(now=NOW + 1e8)
    with tables.engine.begin() as connection:
        store.edit_schedules(connection, [Edit("pause", "tick", "", NOW)])
        caught_up = pool.submit(tables.do, store.catch_up, StoppedClock(NOW))
        waiting_for_locks(cluster, 1)
    assert caught_up.result(TIMEOUT_SECONDS) == [0]
    assert [row["next"] for row in listed(tables)] == [None]


def test_schedules_of_services_without_room_wait(tables, add):
    add("a", 10, service="busy")
    add("b", 20, service="free")
    full = frozenset({"busy"})
    assert tables.do(store.next_occurrence, full) == [NOW + 20]
    (fired,) = tables.do(store.fire, store.Firing(StoppedClock(NOW + 20), full))
    assert [each.service for each in fired.submissions] == ["free"]
    assert tables.do(store.next_occurrence, frozenset()) == [NOW + 10]


def test_what_is_due_is_submitted_and_the_schedule_advanced(tables, add, fire):
    made = add(owner="shop", priority=3, group="tenant-7", headers={"a": "b"})
    assert fire(NOW + 9.9) == ([], [])
    submissions, (uuid,) = fire(NOW + 10.1)
    assert [each.uuid for each in submissions] == [uuid]
    row = tables.row(uuid)
    assert (row.service, row.owner, row.priority, row.body) == ("echo", "shop", 3, made.body)
    assert row.group_name == "tenant-7"
    assert (row.key, row.created, row.due) == ("tick@2027-01-15T08:00:10Z", NOW + 10.1, NOW + 10.1)
    assert json.loads(row.headers) == {"a": "b", "schedule": row.key}
    assert row.state == "pending"
    (found,) = listed(tables)
    assert (found["next"], found["last"], found["last_uuid"]) == (NOW + 20, NOW + 10, uuid)


def test_what_was_submitted_is_not_submitted_again(tables, add, fire):
    add()
    fire(NOW + 10)
    assert fire(NOW + 19.9) == ([], [])
    assert tables.count() == 1


def test_the_key_guards_an_occurrence_too(tables, add, fire):
    """Even if another program sets a schedule back."""
    made = add()
    _, first = fire(NOW + 10)
    with tables.engine.begin() as connection:
        connection.execute(sa.update(sql.SCHEDULES).values(next=made.next))
    _, second = fire(NOW + 10)
    assert second == first
    assert tables.count() == 1


def test_a_transaction_that_fails_submits_nothing_and_advances_nothing(tables, add, fire):
    add()
    with tables.engine.connect() as connection:
        with connection.begin() as transaction:
            store.fire(connection, [store.Firing(StoppedClock(NOW + 10))])
            transaction.rollback()
    assert (tables.count(), listed(tables)[0]["next"]) == (0, NOW + 10)
    assert len(fire(NOW + 10).uuids) == 1


def test_missed_occurrences_are_submitted_by_policy(tables, add, fire):
    for missed in ("skip", "once", "all"):
        add(missed, 100, missed=missed)
    fire(NOW + 390)
    assert Counter(key.split("@")[0] for _, _, key in keys(tables)) == {"once": 1, "all": 3}
    assert [row["next"] for row in listed(tables)] == [NOW + 400] * 3
    assert [row["last"] for row in listed(tables)] == [NOW + 300, NOW + 100, None]


def test_a_transaction_does_so_much_and_no_more(tables, add, fire):
    for number in range(7):
        add(f"s{number}", 1, missed="all")
    sizes = []
    while size := len(fire(NOW + 150).uuids):
        sizes.append(size)
    assert sum(sizes) == 7 * 150
    assert max(sizes) < MAX_FIRED + 100
    assert len(set(keys(tables))) == 7 * 150


def test_what_was_missed_holds_up_no_other_schedule(tables, add, fire):
    for number in range(7):
        add(f"s{number}", 1, missed="all")
    add("now", 10_000, missed="skip")
    fired = fire(NOW + 10_000).submissions
    assert len(fired) <= MAX_FIRED
    assert {each.key.partition("@")[0] for each in fired} == {"now", *(f"s{number}" for number in range(7))}


def test_a_schedule_that_cannot_be_read_is_paused_and_stops_no_other(tables, add, fire, caplog):
    add("good")
    add("bad")
    with tables.engine.begin() as connection:
        values = {"every": None, "cron": "* * * * *", "timezone": "Mars/Olympus"}
        connection.execute(sa.update(sql.SCHEDULES).where(sql.S.name == "bad").values(**values))
    fire(NOW + 10)
    assert [(row["name"], row["next"]) for row in listed(tables)] == [("bad", None), ("good", NOW + 20)]
    assert "paused the schedule bad: timezone is 'Mars/Olympus'" in caplog.text


def test_many_titanics_submit_each_occurrence_once(tables, add, url):
    for number in range(20):
        add(f"s{number}", 1, missed="all")
    now = NOW + 15
    start = threading.Barrier(3)
    fired = []

    def titanic():
        engine = schema.open_engine(schema.database_url(url))
        start.wait()
        try:
            while True:
                with engine.begin() as connection:
                    (following,) = store.next_occurrence(connection, [frozenset()])
                    if following > now:
                        return
                    (found,) = store.fire(connection, [store.Firing(StoppedClock(min(now, following + 2)))])
                    fired.append(len(found.uuids))
        finally:
            engine.dispose()

    threads = [threading.Thread(target=titanic) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found = keys(tables)
    assert len(found) == len(set(found)) == sum(fired) == 20 * 15
    assert {row["next"] for row in listed(tables)} == {NOW + 16}


@only_postgresql
def test_schedules_that_another_transaction_has_locked_are_left_to_it(tables, add, fire):
    add("a")
    add("b")
    with tables.engine.begin() as connection:
        connection.execute(sa.select(sql.S.name).where(sql.S.name == "a").with_for_update())
        fire(NOW + 10)
        assert [key for _, _, key in keys(tables)] == ["b@2027-01-15T08:00:10Z"]
    fire(NOW + 10)
    assert [key for _, _, key in keys(tables)] == ["b@2027-01-15T08:00:10Z", "a@2027-01-15T08:00:10Z"]


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_adding_the_same_schedule_again_changes_nothing(tables, add, edit):
    add()
    assert edit("add", schedule=schedule(now=NOW + 5)) == Edited()
    assert [(row["created"], row["next"]) for row in listed(tables)] == [(NOW, NOW + 10)]


def test_another_schedule_of_that_name_is_refused(tables, add, edit):
    add()
    assert edit("add", schedule=schedule(seconds=20)).problem == (
        "there is another schedule tick already: remove it first"
    )
    assert [row["every"] for row in listed(tables)] == [10]


def test_owners_do_not_share_names(tables, add, fire):
    add(owner="shop")
    add(owner="web")
    fire(NOW + 10)
    key = "tick@2027-01-15T08:00:10Z"
    assert sorted(keys(tables)) == [("echo", "shop", key), ("echo", "web", key)]
    assert [row["owner"] for row in listed(tables, "shop")] == ["shop"]
    assert [row["owner"] for row in listed(tables)] == ["shop", "web"]
    assert listed(tables, "") == []


def test_the_number_of_schedules_is_limited(add, edit, monkeypatch):
    monkeypatch.setattr(schedules, "MAX_SCHEDULES", 2)
    add("a")
    add("b")
    assert edit("add", schedule=schedule("c")).problem == "there are 2 schedules already: remove some first"
    assert edit("add", schedule=schedule("b")) == Edited()
    edit("rm", "a")
    add("c")


def test_pause_and_resume(tables, add, edit, fire):
    add()
    assert edit("pause") == edit("pause") == Edited()
    assert fire(NOW + 15) == ([], [])
    assert edit("resume", now=NOW + 25) == edit("resume", now=NOW + 35) == Edited()
    assert fire(NOW + 25) == ([], [])
    assert len(fire(NOW + 30).uuids) == 1


def test_remove(tables, add, edit, fire):
    add()
    fire(NOW + 10)
    assert edit("rm") == Edited()
    assert listed(tables) == []
    assert tables.count() == 1


def test_run(tables, add, edit):
    add(missed="skip")
    uuid = uuid4()
    for _ in range(2):  # the client repeats it after a lost connection
        assert edit("run", now=NOW + 3, uuid=uuid).submission.uuid == uuid
    assert keys(tables) == [("echo", "", None)]
    (found,) = listed(tables)
    assert (found["next"], found["last"], found["last_uuid"]) == (NOW + 10, NOW + 3, uuid)


def test_run_with_the_uuid_of_another_owner(tables, add, edit):
    add(owner="shop")
    uuid = tables.add(owner="web").uuid
    assert edit("run", owner="shop", uuid=uuid).problem == "uuid cannot be used: choose another"
    assert tables.count() == 1


@pytest.mark.parametrize("action", ["pause", "resume", "rm", "run"])
def test_a_schedule_that_does_not_exist(add, edit, action):
    add(owner="shop")
    for owner, name in (("", "tick"), ("web", "tick"), ("shop", "other"), (None, "other")):
        assert edit(action, name, owner).problem == f"there is no schedule {name}"


def test_an_admin_says_whose_schedule_if_there_are_several(tables, add, edit):
    add(owner="shop")
    assert edit("pause", owner=None) == Edited()
    add(owner="web")
    assert edit("resume", owner=None).problem == "several roles have a schedule tick: set owner"
    assert edit("resume", owner="shop") == Edited()


def test_a_time_zone_that_this_machine_does_not_know_any_more(tables, add, edit):
    add()
    edit("pause")
    with tables.engine.begin() as connection:
        values = {"every": None, "cron": "* * * * *", "timezone": "Mars/Olympus"}
        connection.execute(sa.update(sql.SCHEDULES).values(**values))
    assert "timezone is 'Mars/Olympus'" in edit("resume").problem


# ── the list ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_list_has_the_outcome_of_the_latest_request(tables, add, fire):
    add()
    outcomes = [(listed(tables)[0]["state"], listed(tables)[0]["last"])]
    _, (uuid,) = fire(NOW + 10)
    outcomes.append((listed(tables)[0]["state"], listed(tables)[0]["last"]))
    (claimed,) = tables.claim(now=NOW + 10, until=NOW + 20)
    tables.do(store.finish, store.Outcome(claimed.id, "me", claimed.attempt, NOW + 11, None, 500, "broken"))
    (row,) = listed(tables)
    outcomes.append((row["state"], row["last"]))
    assert outcomes == [(None, None), ("pending", NOW + 10), ("failed", NOW + 10)]
    assert (row["code"], row["error"], isinstance(row["last_uuid"], UUID)) == (500, "broken", True)
    tables.do(store.close, store.Lookup(uuid, None))
    assert listed(tables)[0]["state"] is None
