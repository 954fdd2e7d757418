"""The offset up to which a stream can read: no request is skipped, even if commits are out of order."""

import threading
import time

import pyarrow as pa
import pytest
import sqlalchemy as sa

from zmdp.titanic import enqueue
from zmdp.titanic.contrib.arrow.reading import Requests
from zmdp.titanic.db import store
from zmdp.titanic.db.offsets import NUMBERS, SafeOffset
from zmdp.titanic.operator import admin

only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)


class Stream:
    """Reads the requests between one safe offset and the next."""

    def __init__(self, db, events="accepted"):
        self.offset = 0
        self._safe = SafeOffset(db.engine, NUMBERS[events])
        self._requests = Requests(db.url, pa.schema({"id": pa.int64()}), NUMBERS[events])

    def advance(self):
        """Return the ids of the requests up to what is safe now."""
        low, self.offset = self.offset, self._safe.advance(0.0)
        return [id_ for batch in self._requests.read(low, self.offset) for id_ in batch["id"].to_pylist()]


# ── the order of events ──────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_as_they_are_accepted(db):
    stream = Stream(db)
    assert stream.advance() == []
    db.add()
    db.done("other")
    assert stream.advance() == [1, 2]
    assert stream.advance() == []
    db.add()
    assert stream.advance() == [3]


def test_requests_as_they_end(db):
    stream = Stream(db, "ended")
    for service in ("a", "b", "c", "d"):
        db.add(service)
    db.end("c")
    db.end("a", code=500)
    rows = db.requests()
    with db.engine.begin() as connection:
        admin.cancel(connection, [rows[3].uuid], 1.0)
    first = Stream(db, "ended")
    assert first.advance() == [3, 1, 4]
    with db.engine.begin() as connection:
        admin.retry(connection, [rows[0].uuid], 1.0)
    assert stream.advance() == [3, 4]
    db.end("b")
    db.end("a")
    assert first.advance() == [2, 1]


@pytest.mark.parametrize("events", ["accepted", "ended"])
def test_an_offset_does_not_go_back_when_the_newest_is_closed(db, events):
    db.done()
    newest = db.done()
    stream = Stream(db, events)
    assert stream.advance() == [1, 2]
    before = stream.offset
    with db.engine.begin() as connection:
        store.close(connection, [store.Lookup(newest.uuid)])
    again = Stream(db, events)
    assert again.advance() == [1]
    assert again.offset == before
    last = db.done()
    assert stream.advance() == [last.id]


# ── commits out of order ─────────────────────────────────────────────────────────────────────────────────────────────


@only_postgresql
def test_a_request_that_commits_late_is_not_skipped(db):
    stream = Stream(db)
    db.add()
    with db.engine.connect() as slow, db.engine.connect() as quick:
        slow.begin()
        enqueue(slow, "slow", b"")
        quick.begin()
        enqueue(quick, "quick", b"")
        quick.commit()
        assert db.run("SELECT id FROM titanic_requests ORDER BY id") == [(1,), (3,)]
        found = stream.advance()
        assert stream.offset < 2
        db.add()
        found += stream.advance()
        assert stream.offset < 2
        slow.commit()
    while stream.offset < 4:  # the transactions that were open are looked at, then those since
        found += stream.advance()
    assert found == [1, 2, 3, 4]


@only_postgresql
def test_an_end_that_commits_late_is_not_skipped(db):
    stream = Stream(db, "ended")
    db.add("slow")
    db.add("quick")
    lease = store.Lease("me", time.time() + 1000)
    with db.engine.begin() as connection:
        ((slow,),) = store.claim(connection, [store.Claim("slow", 1, lease, 1.0)])
    with db.engine.connect() as connection:
        connection.begin()
        store.finish(connection, [store.Outcome(slow.id, "me", 1, 2.0, b"")])
        db.end("quick")
        assert stream.advance() == []
        connection.commit()
    assert stream.advance() == [1, 2]


@only_postgresql
def test_a_rolled_back_transaction_does_not_delay_the_stream(db):
    stream = Stream(db)
    with db.engine.connect() as connection:
        connection.begin()
        enqueue(connection, "never", b"")
        db.add()
        assert stream.advance() == []
        assert stream.offset < 2
        connection.rollback()
    assert stream.advance() == [2]


@only_postgresql
def test_a_prepared_transaction_is_waited_for_under_its_new_name(db):
    stream = Stream(db)
    theirs = sa.create_engine(db.engine.url, poolclass=sa.NullPool)
    with theirs.connect() as connection:
        transaction = connection.begin_twophase("ours")
        enqueue(connection, "slow", b"")
        db.add()
        assert (stream.advance(), stream.offset) == ([], 0)
        transaction.prepare()
        assert (stream.advance(), stream.offset) == ([], 0)
        transaction.commit()
    assert stream.advance() == [1, 2]


@only_postgresql
def test_settling_waits_for_the_transactions_that_were_open(db, pool):
    for _ in range(3):
        db.add()
    safe = SafeOffset(db.engine, "id")
    with db.engine.connect() as slow:
        slow.begin()
        enqueue(slow, "slow", b"")
        assert (safe.advance(0.0), safe.known) == (0, False)
        settled = pool.submit(safe.settle)
        assert not settled.done()
        slow.commit()
        assert settled.result() >= 3


@only_postgresql
def test_later_transactions_are_not_waited_for(db):
    """Somebody always writes, and each transaction stays open until the next has started; the stream still proceeds."""
    safe = SafeOffset(db.engine, "id")
    waiting = db.engine.connect()
    waiting.begin()
    enqueue(waiting, "s", b"")
    reached = []
    for _ in range(10):
        following = db.engine.connect()
        following.begin()
        enqueue(following, "s", b"")
        reached.append(safe.advance(0))
        waiting.commit()
        waiting.close()
        waiting = following
    waiting.rollback()
    waiting.close()
    assert reached[-1] >= 8
    assert reached == sorted(reached)


def test_each_request_is_read_once_under_concurrent_writes(db):
    """Transactions of all lengths, some rolled back, while the reader keeps reading."""
    stream = Stream(db)
    stop = threading.Event()
    written, lock = [], threading.Lock()
    failures = []

    def write(seed):
        try:
            for number in range(60):
                with db.engine.connect() as connection:
                    transaction = connection.begin()
                    uuids = [enqueue(connection, "s", b"") for _ in range(1 + (seed * number) % 4)]
                    if (seed + number) % 5:
                        transaction.commit()
                        with lock:
                            written.extend(uuids)
                    else:
                        transaction.rollback()
        except Exception as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(1, 4)]
    for each in writers:
        each.start()
    threading.Thread(target=lambda: [each.join() for each in writers] and stop.set()).start()
    found = []
    while True:
        ended = stop.is_set()
        found += stream.advance()
        if ended and len(found) >= len(written):
            break
    assert failures == []
    assert found == [row.id for row in db.requests()]
    assert len(found) == len(written)
