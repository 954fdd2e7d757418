"""Whose requests and keys are, on SQLite and on PostgreSQL."""

import threading
from uuid import uuid4

import pytest
import sqlalchemy as sa
from support.processes import eventually

from zmdp.titanic.db import store
from zmdp.titanic.db.store import models as sql
from zmdp.titanic.db.store import staging
from zmdp.titanic.operator import admin

NOW = 1_800_000_000.0
only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)


def owners(tables):
    """Return the owners of all requests, oldest first."""
    with tables.engine.begin() as connection:
        return list(connection.scalars(sa.select(sql.R.owner).order_by(sql.R.id)))


def keys(tables):
    """Return owner and UUID of all keys."""
    with tables.engine.begin() as connection:
        return {row.owner: row.uuid for row in connection.execute(sa.select(sql.KEYS))}


# ── accept ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_of_the_same_owner_is_stored_once(tables):
    asked = tables.add(owner="shop", body=b"first")
    assert tables.do(store.accept, asked._replace(body=b"again")) == [asked.uuid]
    assert (tables.count(), tables.row(asked.uuid).body) == (1, b"first")


@pytest.mark.parametrize(("first", "second"), [("shop", "web"), ("shop", ""), ("", "shop")])
def test_the_uuid_of_another_owner_is_refused(tables, submission, first, second):
    theirs = tables.add(owner=first)
    before = tables.row(theirs.uuid)
    others = [submission(owner=second) for _ in range(3)]
    mine = theirs._replace(owner=second, body=b"other", service="other")
    assert tables.do(store.accept, others[0], mine, *others[1:]) == [
        others[0].uuid, None, others[1].uuid, others[2].uuid,
    ]  # fmt: skip
    assert tables.row(theirs.uuid) == before
    assert tables.count() == 4


def test_the_first_of_two_owners_in_one_batch_gets_the_uuid(tables, submission):
    first = submission(owner="shop")
    assert tables.do(store.accept, first, first._replace(owner="web"), first) == [first.uuid, None, first.uuid]
    assert owners(tables) == ["shop"]


def test_a_uuid_is_free_again_once_its_request_is_closed(tables):
    asked = tables.add(owner="shop")
    tables.do(store.close, store.Lookup(asked.uuid, "shop"))
    assert tables.do(store.accept, asked._replace(owner="web")) == [asked.uuid]


def test_owners_do_not_share_keys(tables, submission):
    batch = [submission(key="k", owner=owner) for owner in ("shop", "web", "", "shop")]
    first = [each.uuid for each in batch[:3]]
    assert tables.do(store.accept, *batch) == [*first, first[0]]
    assert owners(tables) == ["shop", "web", ""]
    again = [submission(key="k", owner=owner) for owner in ("", "web", "shop")]
    assert tables.do(store.accept, *again) == first[::-1]
    assert tables.count() == 3


def test_an_expired_key_of_one_owner_leaves_that_of_another(tables, submission):
    tables.do(store.accept, submission(key="k", owner="shop", key_expires=NOW + 1), submission(key="k", owner="web"))
    tables.maintain(NOW + 1)
    assert set(keys(tables)) == {"web"}
    tables.do(store.accept, submission(key="k", owner="shop", key_expires=NOW + 2))
    later = submission(key="k", owner="shop", now=NOW + 2)
    assert tables.do(store.accept, later) == [later.uuid]
    assert keys(tables)["shop"] == later.uuid


def test_two_owners_submit_the_same_keys_at_once(tables, submission, pool):
    barrier = threading.Barrier(2)

    def submit(owner):
        batch = [submission(key=f"k{number}", owner=owner) for number in range(100)]
        barrier.wait(20)
        assert tables.do(store.accept, *batch) == [each.uuid for each in batch]

    list(pool.map(submit, ["shop", "web"]))
    assert (tables.count(), tables.count(sql.KEYS)) == (200, 200)


def test_two_owners_submit_the_same_uuids_at_once(tables, submission, pool):
    uuids = [uuid4() for _ in range(100)]
    barrier = threading.Barrier(2)

    def submit(owner):
        barrier.wait(20)
        # One transaction for each, so that neither waits for the other while it holds what the other wants.
        return [uuid for each in uuids for uuid in tables.do(store.accept, submission(uuid=each, owner=owner))]

    shops, webs = pool.map(submit, ["shop", "web"])
    assert sorted(each for each in (*shops, *webs) if each is not None) == sorted(uuids)
    with tables.engine.begin() as connection:
        found = {row.uuid: row.owner for row in connection.execute(sa.select(sql.REQUESTS))}
    assert [found[uuid] == "shop" for uuid in uuids] == [uuid is not None for uuid in shops]


@only_postgresql
def test_a_uuid_that_another_owner_is_submitting_is_refused_once_that_is_committed(tables, submission, pool, cluster):
    first = submission(owner="shop")
    with tables.engine.begin() as connection:
        store.accept(connection, [first])
        second = pool.submit(tables.do, store.accept, first._replace(owner="web"))
        eventually(lambda: cluster.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'titanic' AND wait_event_type = 'Lock'"
        ) == [(1,)])  # fmt: skip
    assert second.result(20) == [None]
    assert owners(tables) == ["shop"]


# ── fetch and close ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("owner", "asker", "found"),
    [
        ("shop", "shop", True), ("shop", "web", False), ("shop", "", False), ("shop", None, True),
        ("", "", True), ("", "shop", False), ("", None, True),
    ],
)  # fmt: skip
def test_who_finds_a_request(tables, owner, asker, found):
    asked = tables.add(owner=owner)
    wanted = store.Lookup(asked.uuid, asker)
    assert [each is not None for each in tables.do(store.fetch, wanted)] == [found]
    assert [each is not None for each in tables.do(store.close, wanted)] == [found]
    assert (tables.row(asked.uuid) is None) is found


@pytest.mark.parametrize("count", [1, 2, 130])
def test_everybody_in_a_batch_finds_their_own(tables, submission, count):
    shops = [submission(owner="shop") for _ in range(count)]
    webs = [submission(owner="web") for _ in range(count)]
    tables.do(store.accept, *shops, *webs)
    batch = [store.Lookup(each.uuid, "shop") for each in (*shops, *webs)]
    for work in (store.fetch, store.close):
        assert [each is not None for each in tables.do(work, *batch)] == [True] * count + [False] * count
    assert owners(tables) == ["web"] * count


# ── what operators and programs see ──────────────────────────────────────────────────────────────────────────────────


def test_the_list_of_an_owner(tables):
    for owner in ("shop", "web", ""):
        tables.add(owner=owner)
    with tables.engine.begin() as connection:
        for owner in ("shop", "web", ""):
            assert [row["owner"] for row in admin.ls(connection, admin.Filter(owner=owner), 9)] == [owner]


def test_staged_requests_have_no_owner_and_keys_of_their_own(tables, submission):
    theirs = tables.add(key="k", owner="shop")
    own = submission(key="k")
    with tables.engine.begin() as connection:
        number = staging.begin(connection, "w", NOW)
        row = {name: getattr(own, name) for name in ("uuid", "service", "priority", "retries", "key", "body")}
        connection.execute(sa.insert(staging.STAGED).values(staging=number, number=0, **row))
        assert staging.commit(connection, None, [staging.Accepted(number, 1)], NOW)
    assert owners(tables) == ["shop", ""]
    assert keys(tables) == {"shop": theirs.uuid, "": own.uuid}
