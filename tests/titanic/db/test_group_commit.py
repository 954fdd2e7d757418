"""Group commit: shared transactions, results only after the commit, and failures."""

import asyncio
import os
import shutil
import sqlite3
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from support.databases import waiting_for_locks
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.titanic.api.schedules import parse_schedule
from zmdp.titanic.db import group_commit as batches_module
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.engine import READS, WRITES
from zmdp.titanic.db.group_commit import MAX_REASON_CHARS, BatchExecutor, StoreError
from zmdp.titanic.db.store import models as sql

NOW = 1_800_000_000.0
only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)


def running(scenario, *arguments):
    """Run a coroutine function, and assert that the event loop has nothing to complain about."""
    complaints = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        await scenario(*arguments)

    asyncio.run(run())
    assert complaints == []


@asynccontextmanager
async def batches(engine, *order):
    """Yield a BatchExecutor for these kinds of work and all that Titanic writes."""
    made = BatchExecutor("test", engine, (*order, *WRITES))
    try:
        yield made
    finally:
        await made.close()


@contextmanager
def listening(target, event, function):
    sa.event.listen(target, event, function)
    try:
        yield
    finally:
        sa.event.remove(target, event, function)


class Gate:
    """Work whose transaction waits until it is opened; `batches` has the items of each transaction."""

    def __init__(self):
        self.batches = []
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, connection, batch):
        self.batches.append(list(batch))
        self.entered.set()
        assert self.open.wait(TIMEOUT_SECONDS)
        return batch

    async def holding(self, made, item=None):
        """Return the future of an item whose transaction is running."""
        future = made.submit(self, item)
        assert await asyncio.to_thread(self.entered.wait, 20)
        return future


class Recorded:
    """Return work that records its name and its items."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def __call__(self, connection, batch):
        self.seen.append((self.name, *batch))
        return [f"{self.name} {item}" for item in batch]


def errors(outcomes):
    """Return the error messages, after asserting that each error is an object of its own."""
    assert all(isinstance(each, StoreError) for each in outcomes), outcomes
    assert len({id(each) for each in outcomes}) == len(outcomes)
    return [str(each) for each in outcomes]


async def gathered(*futures):
    return await asyncio.gather(*futures, return_exceptions=True)


# ── one transaction for many ─────────────────────────────────────────────────────────────────────────────────────────


def test_work_that_arrives_during_a_transaction_shares_the_next(tables, submission):
    async def scenario():
        gate, commits = Gate(), []
        async with batches(tables.engine, gate) as made:
            with listening(tables.engine, "commit", commits.append):
                first = await gate.holding(made, 0)
                others = [made.submit(gate, number) for number in range(1, 10)]
                stored = [made.submit(store.accept, each) for each in asked]
                gate.open.set()
                assert await asyncio.gather(first, *others) == list(range(10))
                assert await asyncio.gather(*stored) == [each.uuid for each in asked]
        assert gate.batches == [[0], list(range(1, 10))]
        assert len(commits) == 2

    asked = [submission() for _ in range(20)]
    running(scenario)
    assert tables.count() == 20


def test_work_of_one_turn_shares_a_transaction(tables, submission):
    async def scenario():
        commits = []
        async with batches(tables.engine) as made:
            with listening(tables.engine, "commit", commits.append):
                for _ in range(5):
                    futures = [made.submit(store.accept, submission()) for _ in range(10)]
                    futures.append(made.submit(store.pending_after, ("", 1)))
                    await asyncio.gather(*futures)
        assert len(commits) == 5

    running(scenario)
    assert tables.count() == 50


def test_a_transaction_does_not_begin_in_the_middle_of_a_turn(tables, monkeypatch):
    """Though the thread, which has just ended one, finds work as soon as it looks."""
    looked = threading.Event()

    class Watched(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            def watched():
                looked.set()
                return predicate()

            return super().wait_for(watched, timeout)

    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate) as made:
            first = await gate.holding(made, 0)
            second = made.submit(gate, 1)
            looked.clear()
            gate.open.set()
            assert looked.wait(TIMEOUT_SECONDS)
            assert await asyncio.gather(first, second, made.submit(gate, 2)) == [0, 1, 2]
        assert gate.batches == [[0], [1, 2]]

    monkeypatch.setattr(threading, "Condition", Watched)
    running(scenario)


def test_kinds_of_work_are_performed_in_order(tables):
    async def scenario():
        gate, seen = Gate(), []
        first, second, third = (Recorded(name, seen) for name in ("first", "second", "third"))
        async with batches(tables.engine, gate, first, second, third) as made:
            held = await gate.holding(made)
            futures = [made.submit(work, number) for number, work in enumerate((third, first, second, third, first))]
            gate.open.set()
            await held
            assert await asyncio.gather(*futures) == ["third 0", "first 1", "second 2", "third 3", "first 4"]
        assert seen == [("first", 1, 4), ("second", 2), ("third", 0, 3)]

    running(scenario)


def test_partials_are_stored_before_outcomes_and_accepted_requests_can_be_claimed(tables, submission):
    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate) as made:
            held = await gate.holding(made)
            claiming = made.submit(store.claim, store.Claim("new", 1, store.Lease("me", 10), NOW))
            finishing = made.submit(store.finish, store.Outcome(claimed.id, "me", 1, NOW, b"reply"))
            closing = made.submit(store.close, store.Lookup(claimed.uuid))
            storing = made.submit(store.add_partials, store.Partial(claimed.id, 1, 0, b"part"))
            accepting = made.submit(store.accept, new)
            gate.open.set()
            await gathered(held, finishing, storing)
            assert await accepting == new.uuid
            assert [each.uuid for each in await claiming] == [new.uuid]
            assert await closing == claimed.id

    claimed, new = tables.running(), submission("new")
    running(scenario)
    assert tables.count(sql.PARTS) == 0


def test_results_are_delivered_after_the_commit(tables, submission):
    async def scenario():
        committing, go_on = threading.Event(), threading.Event()

        def commit(connection):
            committing.set()
            assert go_on.wait(TIMEOUT_SECONDS)

        async with batches(tables.engine) as made:
            with listening(tables.engine, "commit", commit):
                futures = [made.submit(store.accept, each) for each in asked]
                assert await asyncio.to_thread(committing.wait, 20)
                for _ in range(10):
                    await asyncio.sleep(0)  # what was answered before would be here by now
                assert not any(future.done() for future in futures)
                go_on.set()
                assert await asyncio.gather(*futures) == [each.uuid for each in asked]

    asked = [submission() for _ in range(3)]
    running(scenario)


def test_a_cancelled_future_does_not_affect_others(tables, submission):
    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate) as made:
            held = await gate.holding(made)
            gone, stays = made.submit(store.accept, asked[0]), made.submit(store.accept, asked[1])
            gone.cancel()
            held.cancel()
            gate.open.set()
            assert await stays == asked[1].uuid

    asked = [submission(), submission()]
    running(scenario)
    assert tables.count() == 2  # it was asked for


# ── close ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_close_performs_submitted_work(tables, submission):
    async def scenario():
        gate = Gate()
        made = BatchExecutor("to be closed", tables.engine, (gate, *WRITES))
        held = await gate.holding(made)
        futures = [made.submit(store.accept, submission()) for _ in range(5)]
        closing = asyncio.ensure_future(made.close())
        await asyncio.sleep(0)
        refused = made.submit(store.accept, submission())
        gate.open.set()
        await closing
        assert all(future.done() for future in (held, *futures))
        assert (await gathered(*futures)) == [future.result() for future in futures]
        assert errors(await gathered(refused)) == ["Titanic is shutting down"]
        assert "to be closed" not in {thread.name for thread in threading.enumerate()}

    running(scenario)
    assert tables.count() == 5


def test_close_when_there_is_nothing_to_do(tables):
    async def scenario():
        made = BatchExecutor("idle", tables.engine, WRITES)
        await made.close()
        await made.close()

    running(scenario)


# ── what is wrong with one ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_item_that_the_database_rejects_fails_alone(tables, submission):
    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate) as made:
            held = await gate.holding(made)
            futures = [made.submit(store.accept, each) for each in asked]
            closing = made.submit(store.close, store.Lookup(closed.uuid))
            gate.open.set()
            outcomes = await gathered(*futures)
            assert await closing is not None
            await held
        (said,) = errors([outcomes.pop(2)])
        assert "null" in said.lower()
        assert "\n" not in said
        assert outcomes == [each.uuid for each in asked if each.body is not None]

    asked = [submission(body=b"x", key=f"{number}") for number in range(5)]
    asked[2] = asked[2]._replace(body=None)
    closed = tables.add()
    running(scenario)
    assert tables.count() == 4
    assert tables.count(sql.KEYS) == 4


def test_broken_work_fails_alone(tables, submission, caplog):
    def broken(connection, batch):
        raise ValueError("broken:\n" + "x" * 1000)

    def forgetful(connection, batch):
        connection.execute(sa.delete(sql.REQUESTS))
        return []

    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate, broken, forgetful) as made:
            await gate.holding(made)
            futures = [made.submit(work, 0) for work in (broken, forgetful, broken)]
            good = made.submit(store.accept, submission())
            gate.open.set()
            said = errors(await gathered(*futures))
            assert await good
        assert said[0] == said[2] == ("broken: " + "x" * 1000)[:MAX_REASON_CHARS]

    running(scenario)
    assert tables.count() == 1  # what the forgetful one did was not committed
    assert "Traceback" in caplog.text


@contextmanager
def locker(cluster, tables):
    """A transaction of somebody else's; gives what executes in it."""
    with psycopg.connect(f"{cluster.url(tables.engine.url.database)}&application_name=titanic") as connection:
        yield connection.execute


@only_postgresql
def test_an_item_with_a_locked_row_fails_alone(tables, submission, cluster):
    def finish(connection, batch):
        connection.exec_driver_sql("SET LOCAL lock_timeout = 50")
        return store.finish(connection, batch)

    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate, finish) as made:
            held = await gate.holding(made)
            futures = [made.submit(finish, store.Outcome(each.id, "me", 1, NOW, b"reply")) for each in (locked, free)]
            accepting = made.submit(store.accept, submission())
            gate.open.set()
            outcomes = await gathered(*futures)
            await accepting
            await held
        assert "lock timeout" in errors(outcomes[:1])[0]
        assert "another transaction holds a lock" in outcomes[0].text
        assert outcomes[1] is True

    locked, free = tables.running(), tables.running()
    with locker(cluster, tables) as lock:
        lock(f"SELECT 1 FROM titanic_requests WHERE id = {locked.id} FOR UPDATE")
        running(scenario)
    assert [tables.row(each.uuid).state for each in (locked, free)] == ["running", "done"]


@only_postgresql
def test_items_wait_for_locks_together_and_not_one_after_the_other(tables, cluster):
    """Or else many locked rows would hold Titanic up until its lease has ended."""
    seen = []

    def finish(connection, batch):
        seen.append((len(batch), connection.exec_driver_sql("SHOW lock_timeout").scalar()))
        return store.finish(connection, batch)

    async def scenario():
        gate = Gate()
        async with batches(engine, gate, finish) as made:
            held = await gate.holding(made)
            futures = [made.submit(finish, store.Outcome(each.id, "me", 1, NOW, b"reply")) for each in locked]
            gate.open.set()
            assert len(errors(await gathered(*futures))) == 3
            await held

    locked = [tables.running() for _ in range(3)]
    engine = schema.open_engine(tables.engine.url, lock_timeout=0.1)
    with locker(cluster, tables) as lock:
        lock("SELECT 1 FROM titanic_requests FOR UPDATE")
        running(scenario)
    assert seen == [(3, "100ms"), *[(1, f"{batches_module.SHORT_LOCK_MS}ms")] * 3]


@only_postgresql
def test_the_loser_of_a_deadlock_is_repeated(tables, cluster):
    def finish(connection, batch):
        for each in batch:
            store.finish(connection, [each])
            if not blocked.is_set():
                blocked.set()
                waiting_for_locks(cluster, 1)  # the other one, for what we have
        return [None] * len(batch)

    def other():
        with locker(cluster, tables) as lock:
            lock("SET LOCAL deadlock_timeout = '60s'")  # it is not this one that finds out
            lock(f"SELECT 1 FROM titanic_requests WHERE id = {two.id} FOR UPDATE")
            locked.set()
            assert blocked.wait(TIMEOUT_SECONDS)
            lock(f"SELECT 1 FROM titanic_requests WHERE id = {one.id} FOR UPDATE")

    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate, finish) as made:
            held = await gate.holding(made)
            futures = [made.submit(finish, store.Outcome(each.id, "me", 1, NOW, b"")) for each in (one, two)]
            gate.open.set()
            assert await gathered(*futures) == [None, None]
            await held

    one, two = tables.running(), tables.running()
    locked, blocked = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    assert locked.wait(TIMEOUT_SECONDS)
    running(scenario)
    thread.join(TIMEOUT_SECONDS)
    assert [tables.row(each.uuid).state for each in (one, two)] == ["done", "done"]


# ── what is wrong with the database ──────────────────────────────────────────────────────────────────────────────────


@only_postgresql
def test_an_unreachable_server_fails_each_item_until_it_is_back(tables, submission, cluster):
    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate) as made:
            held = await gate.holding(made)
            futures = [made.submit(store.accept, submission()) for _ in range(3)]
            cluster.stop()
            gate.open.set()
            outcomes = await gathered(*futures)
            said = errors(outcomes)
            await gathered(held)
            later = await gathered(made.submit(store.accept, submission()))
            assert len(errors(later)) == 1
            cluster.start()
            assert await made.submit(store.accept, asked) == asked.uuid
        assert {each.text for each in (*outcomes, *later)} == {"the database cannot be reached"}
        assert {each.code for each in outcomes} == {500}
        assert all(each and "\n" not in each for each in said)

    asked = submission()
    try:
        running(scenario)
    finally:
        if not cluster.running:
            cluster.start()
    assert tables.count() == 1
    assert tables.row(asked.uuid) is not None


@only_postgresql
@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_restart_of_the_server_goes_unnoticed(tables, submission, cluster, how):
    async def scenario():
        async with batches(tables.engine) as made:
            await made.submit(store.accept, submission())
            cluster.restart(how)
            await made.submit(store.accept, submission())

    running(scenario)
    assert tables.count() == 2


@only_postgresql
def test_a_connection_to_a_server_that_only_reads_is_given_up(own_url, submission, cluster):
    """As after a failover: another server accepts writes now."""
    engine = schema.open_engine(schema.database_url(own_url))
    of_database = f"ALTER DATABASE {engine.url.database}"

    async def scenario():
        async with batches(engine) as made:
            cluster.execute(f"{of_database} SET default_transaction_read_only = on")  # of new connections
            (refused,) = await gathered(made.submit(store.accept, submission()))
            assert errors([refused]) == [refused.text]
            assert "in a read-only transaction" in refused.text
            cluster.execute(f"{of_database} RESET default_transaction_read_only")
            await made.submit(store.accept, submission())

    running(scenario)


@only_sqlite
def test_a_locked_file_fails_each_item_until_it_is_unlocked(own_url, submission):
    engine = schema.open_engine(schema.database_url(own_url), busy_timeout=0.05)
    other = sqlite3.connect(engine.url.database, isolation_level=None)

    async def scenario():
        gate = Gate()
        async with batches(engine, gate) as made:
            held = await gate.holding(made)
            futures = [made.submit(store.accept, submission()) for _ in range(3)]
            gate.open.set()
            await held
            await asyncio.wait(futures)
            other.execute("BEGIN IMMEDIATE")
            late = [made.submit(store.accept, submission()) for _ in range(3)]
            assert set(errors(await gathered(*late))) == {"database is locked"}
            other.execute("ROLLBACK")
            await made.submit(store.accept, submission())

    running(scenario)
    assert other.execute("SELECT count(*) FROM titanic_requests").fetchone() == (4,)
    other.close()


@only_sqlite
def test_a_full_disk_fails_only_what_does_not_fit(own_url, submission, caplog):
    engine = schema.open_engine(schema.database_url(own_url))

    def limited(connection, batch):
        connection.exec_driver_sql(f"PRAGMA max_page_count = {batch[0]}")
        return batch

    async def scenario():
        gate = Gate()
        async with batches(engine, limited, gate) as made:
            await made.submit(limited, 30)
            held = await gate.holding(made)
            large = [made.submit(store.accept, submission(body=bytes(1_000_000))) for _ in range(20)]
            small = [made.submit(store.accept, submission()) for _ in range(3)]
            before = made._transactions
            gate.open.set()
            assert set(errors(await gathered(*large))) == {"database or disk is full"}
            await asyncio.gather(held, *small)
            assert made._transactions - before <= 10  # most are not tried
            await made.submit(limited, 1_000_000)
            await made.submit(store.accept, submission(body=bytes(1_000_000)))

    running(scenario)
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    path = engine.url.database
    assert line.startswith(
        f"sqlite:///{path}: transaction failed: database or disk is full; it has no room for an item"
    )
    other = sqlite3.connect(path)
    assert other.execute("SELECT count(*) FROM titanic_requests").fetchone() == (4,)
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    other.close()


def test_a_failing_database_is_logged_once_and_so_is_its_recovery(tables, submission, monkeypatch, caplog):
    def broken(connection, batch):
        connection.exec_driver_sql("SELECT nothing FROM nowhere")

    async def scenario():
        async with batches(tables.engine, broken) as made:
            for _ in range(3):
                await gathered(made.submit(broken, 0))
            await made.submit(store.accept, submission())
            assert "works again" not in caplog.text
            monkeypatch.setattr(batches_module, "LOG_SECONDS", 0.0)
            await made.submit(store.accept, submission())

    running(scenario)
    assert caplog.text.count("transaction failed: ") == 1
    assert caplog.text.count("the database works again") == 1
    assert "Traceback" not in caplog.text


# ── connections that are cut (PostgreSQL) ────────────────────────────────────────────────────────────────────────────


def cut(cluster, connection):
    """Terminate a connection at the server; the client has not noticed yet."""
    pid = connection.info.backend_pid
    cluster.execute(f"SELECT pg_terminate_backend({pid})")
    eventually(lambda: cluster.execute(f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}") == [(0,)])


def cutting(cluster, times):
    """Return work whose connection is terminated during its transaction, so many times."""
    left = [None] * times

    def work(connection, batch):
        if left:
            left.pop()
            cut(cluster, connection.connection.driver_connection)
        return batch

    return work


@only_postgresql
def test_a_transaction_is_repeated_once_if_its_connection_is_lost(tables, submission, cluster):
    async def scenario():
        gate, work = Gate(), cutting(cluster, 1)
        async with batches(tables.engine, gate) as made:
            made._order[work] = len(made._order)  # the last
            held = await gate.holding(made)
            futures = [made.submit(store.accept, each) for each in asked]
            last = made.submit(work, "cut")
            gate.open.set()
            assert await asyncio.gather(*futures) == [each.uuid for each in asked]
            assert await last == "cut"
            await held

    asked = [submission(key=f"key {number % 2}" if number > 2 else None) for number in range(4)]
    asked[0] = asked[0]._replace(due=NOW + 1)
    running(scenario)
    assert tables.count() == 4
    assert tables.count(sql.KEYS) == 1


@only_postgresql
def test_a_second_lost_connection_is_an_error(tables, submission, cluster):
    async def scenario():
        gate, work = Gate(), cutting(cluster, 2)
        async with batches(tables.engine, gate) as made:
            made._order[work] = len(made._order)
            held = await gate.holding(made)
            futures = [made.submit(store.accept, submission()), made.submit(work, "cut")]
            gate.open.set()
            await held
            outcomes = await gathered(*futures)
            assert len(errors(outcomes)) == 2
            assert {each.text for each in outcomes} == {"the database cannot be reached"}
            assert tables.count() == 0
            await made.submit(store.accept, submission())

    running(scenario)
    assert tables.count() == 1


def accepting(tables, submission):
    asked = [submission(), submission(key="k"), submission(key="k"), submission(key="l", key_expires=NOW + 1)]
    return [(store.accept, each) for each in asked], [asked[0].uuid, asked[1].uuid, asked[1].uuid, asked[3].uuid]


def ending(tables, submission):
    one, other = tables.running(result_ttl=9), tables.running()
    return [
        (store.add_partials, store.Partial(one.id, 1, 0, b"part")),
        (store.add_partials, store.Partial(one.id, 1, 1, b"part")),
        (store.finish, store.Outcome(one.id, "me", 1, NOW, b"reply")),
        (store.finish, store.Outcome(other.id, "me", 1, NOW, None, 500, "broken")),
    ], [None, None, False, False]


def putting_back(tables, submission):
    one = tables.running()
    return [(store.reschedule, store.Reschedule(one.id, "me", 1, NOW + 5, failures=1, error="broken"))], [None]


def closing(tables, submission):
    return [(store.close, store.Lookup(tables.add().uuid))], [None]


def running_a_schedule(tables, submission):
    made = parse_schedule([b"tick", b"echo", b"body"], {"every": 10_000}, NOW)
    tables.do(store.edit_schedules, store.Edit("add", "tick", "", NOW, made))
    edit = store.Edit("run", "tick", "", NOW)
    expected = made.submission(NOW, NOW)._replace(uuid=edit.uuid, key=None, key_expires=None)
    return [(store.edit_schedules, edit)], [store.Edited(submission=expected)]


@only_postgresql
@pytest.mark.parametrize("what", [accepting, ending, putting_back, closing, running_a_schedule])
def test_a_lost_answer_to_a_commit_does_not_repeat_the_work(tables, submission, cluster, monkeypatch, what):
    jobs, expected = what(tables, submission)
    commits = []
    commit = tables.engine.dialect.do_commit

    def lost(connection):
        commit(connection)
        commits.append(contents())
        if len(commits) == 2:  # the first is the gate's
            cut(cluster, connection.driver_connection)
            connection.driver_connection.execute("SELECT 1")

    def contents():
        with psycopg.connect(cluster.url(tables.engine.url.database)) as reading:
            return [
                reading.execute(f"SELECT * FROM titanic_{name} ORDER BY 1, 2").fetchall()
                for name in ("requests", "parts", "keys")
            ]

    async def scenario():
        gate = Gate()
        async with batches(tables.engine, gate) as made:
            held = await gate.holding(made)
            futures = [made.submit(*job) for job in jobs]
            gate.open.set()
            assert await gathered(*futures) == expected
            await held

    monkeypatch.setattr(tables.engine.dialect, "do_commit", lost)
    running(scenario)
    assert len(commits) == 3
    assert commits[1] != commits[0]
    assert commits[2] == commits[1]


# ── a file that is taken away (SQLite) ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def file(own_url):
    return Path(schema.database_url(own_url).database)


def remove(file):
    for each in file.parent.glob(f"{file.name}*"):
        each.unlink()


def remove_only_the_database(file):
    file.unlink()


def move_away(file):
    file.rename(file.with_name("elsewhere.db"))


def replace_by_nothing(file):
    file.rename(file.with_name("elsewhere.db"))
    file.touch()


def replace_by_a_copy(file):
    copied = shutil.copy(file, file.with_name("copy.db"))
    os.replace(copied, file)


def replace_by_a_new_one(file):
    remove(file)
    engine = schema.open_engine(schema.database_url(str(file)), create=True)
    schema.upgrade(engine)
    engine.dispose()


TAKEN_AWAY = [remove, remove_only_the_database, move_away, replace_by_nothing, replace_by_a_copy, replace_by_a_new_one]


@only_sqlite
@pytest.mark.parametrize("taken_away", TAKEN_AWAY)
def test_a_removed_file_is_never_a_success(own_url, submission, file, taken_away):
    engine = schema.open_engine(schema.database_url(own_url))

    async def scenario():
        gate = Gate()
        async with batches(engine, gate) as made:
            await made.submit(store.accept, submission())
            held = await gate.holding(made)
            taken_away(file)
            gate.open.set()
            (said,) = errors(await gathered(held))
            assert "the database file was removed or replaced" in said
            for _ in range(3):
                errors(await gathered(*(made.submit(store.accept, each) for each in (submission(), submission()))))
                errors(await gathered(made.submit(store.close, store.Lookup(submission().uuid))))
            assert file.exists() == (taken_away not in {remove, remove_only_the_database, move_away})

    running(scenario)


@only_sqlite
@pytest.mark.parametrize("taken_away", TAKEN_AWAY)
def test_reading_a_removed_file_is_an_error(own_url, submission, file, taken_away):
    writing = schema.open_engine(schema.database_url(own_url))
    asked = submission()
    with writing.begin() as connection:
        store.accept(connection, [asked])
    engine = schema.open_engine(schema.database_url(own_url), write=False)

    async def scenario():
        made = BatchExecutor("reader", engine, READS)
        found = await made.submit(store.fetch, store.Lookup(asked.uuid))
        assert found is not None
        taken_away(file)
        for _ in range(3):
            errors(
                await gathered(
                    made.submit(store.fetch, store.Lookup(asked.uuid)),
                    made.submit(store.progress, frozenset([asked.uuid])),
                )
            )
        await made.close()

    running(scenario)
    writing.dispose()


@only_sqlite
def test_a_restored_file_is_used_again(own_url, submission, file):
    engine = schema.open_engine(schema.database_url(own_url))

    async def scenario():
        async with batches(engine) as made:
            await made.submit(store.accept, asked[0])
            file.rename(file.with_name("elsewhere.db"))
            errors(await gathered(made.submit(store.accept, asked[1])))
            file.with_name("elsewhere.db").rename(file)
            assert await made.submit(store.accept, asked[2]) == asked[2].uuid

    asked = [submission() for _ in range(3)]
    running(scenario)
    other = sqlite3.connect(file)
    stored = {uuid for (uuid,) in other.execute("SELECT uuid FROM titanic_requests")}
    other.close()
    assert asked[2].uuid.hex in stored
    assert asked[1].uuid.hex not in stored
