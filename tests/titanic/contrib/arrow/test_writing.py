"""Rows are written exactly once: attempts are staged, and those that count are committed together."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pyarrow as pa
import pytest
import sqlalchemy as sa
from support.databases import check_columns

from zmdp.mdp.errors import TitanicError
from zmdp.titanic.api.submission import unpack
from zmdp.titanic.contrib.arrow import rows as row_rules
from zmdp.titanic.contrib.arrow import writing as arrow_writing
from zmdp.titanic.contrib.arrow.rows import BadRow, plan_rows
from zmdp.titanic.contrib.arrow.writing import ArrowWrite
from zmdp.titanic.db.store import staging
from zmdp.titanic.db.store.staging import Write

KEYED = pa.schema({"request": pa.string(), "key": pa.string()})
JOB = Write("job", "j")
only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)


def writing(db, schema=KEYED, url=None, **options):
    """Return a new write."""
    return ArrowWrite(url or db.url, plan_rows(schema, {"service": "s", **options}), uuid4().hex)


def batches(*texts, key=None):
    """Return rows as a task has them."""
    keys = [key] * len(texts) if not isinstance(key, list) else key
    return iter([pa.RecordBatch.from_pydict({"request": list(texts), "key": pa.array(keys, pa.string())})])


def written(db, *texts, named=None, key=None, **options):
    """Write these rows; return whether they were new."""
    write = writing(db, **options)
    if write.check(named):
        return False
    write.commit(named, [write.stage(batches(*texts, key=key), 0)])
    return True


def bodies(db):
    return [unpack(row.body)[0].decode() for row in db.requests()]


def run_together(functions):
    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(function) for function in functions]:
            each.result()


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_columns_become_requests(db):
    at = datetime(2035, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    schema = pa.schema({
        "service": pa.string(), "request": pa.list_(pa.binary()), "key": pa.string(), "key_ttl": pa.float64(),
        "priority": pa.int32(), "at": pa.timestamp("us", "UTC"), "retries": pa.int32(), "backoff": pa.float64(),
        "ttl": pa.float64(), "headers": pa.map_(pa.string(), pa.string()),
    })  # fmt: skip
    rows = [
        ["one", [b"a", b"\0\xff"], "k", 60.5, 9, at, 3, 0.25, 3600.0, {"user": "ü"}],
        ["two", [b""], None, None, None, None, None, None, None, None],
    ]
    columns = [pa.array(list(values), kind) for values, kind in zip(zip(*rows, strict=True), schema.types, strict=True)]
    write = writing(db, schema, delay="3600")
    before = time.time()
    write.commit(None, [write.stage([pa.RecordBatch.from_arrays(columns, schema=schema)], 0)])
    check_columns(db, at, before)


def test_a_bad_row_discards_what_its_task_has_staged(db, monkeypatch):
    monkeypatch.setattr(row_rules, "MAX_CHUNK_BYTES", 1)  # so that each row is staged when the next one arrives
    write = writing(db)
    with pytest.raises(BadRow, match="row 2 of partition 7 is not a valid request, so nothing was written"):
        write.stage([*batches("a", "b"), *batches("c", key="")], 7)
    write.abort([])
    assert (db.count(), db.left_over) == (0, (0, 0))


# ── exactly once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_with_a_name_is_written_once(db):
    assert written(db, "a", "b", named=JOB)
    assert not written(db, "c", named=JOB)
    late = writing(db)
    late.commit(JOB, [late.stage(batches("d"), 0)])  # which did not know it yet when it began
    assert written(db, "e", named=Write("job", "another"))
    assert written(db, "e")
    assert bodies(db) == ["a", "b", "e", "e"]
    assert db.left_over == (0, 0)
    assert db.run("SELECT kind, name, requests FROM titanic_written ORDER BY name") == [
        ("job", "another", 1), ("job", "j", 2),
    ]  # fmt: skip


def test_a_micro_batch_is_written_once_and_only_by_its_stream(db):
    for number, text in enumerate("abb"):
        written(db, text, named=Write("sink", "lines", min(number, 1), "query"))
    assert bodies(db) == ["a", "b"]
    with pytest.raises(staging.OtherQuery, match="another stream has written to the sink 'lines'"):
        written(db, "c", named=Write("sink", "lines", 0, "another"))
    assert bodies(db) == ["a", "b"]
    assert db.run("SELECT kind, name, batch FROM titanic_written") == [("sink", "lines", 1)]


def test_only_the_attempts_that_are_accepted_count(db):
    write = writing(db)
    first, second, other = (write.stage(batches(*texts), 0) for texts in ("ab", "ab", "c"))
    write.commit(None, [second, other])
    assert sorted(bodies(db)) == ["a", "b", "c"]
    assert db.left_over == (0, 0)
    assert first.staging != second.staging


def test_a_task_without_rows_stages_nothing(db):
    assert writing(db).stage(iter([]), 0) is None
    assert db.left_over == (0, 0)


def test_a_late_attempt_is_refused(db, monkeypatch):
    monkeypatch.setattr(row_rules, "MAX_CHUNK_BYTES", 1)
    write = writing(db)

    def slowly():
        yield from batches("a", "b")
        write.commit(None, [])
        yield from batches("c")

    with pytest.raises(staging.StagingLost, match="which was too late"):
        write.stage(slowly(), 0)
    assert db.count() == 0
    write.abort([])
    assert db.left_over == (0, 0)


def test_aborted_writes_are_discarded(db):
    write = writing(db)
    staged = write.stage(batches("a", "b"), 0)
    write.stage(batches("c"), 1)  # the driver never learns of this task
    assert db.left_over == (3, 2)
    write.abort([staged])
    assert db.left_over == (0, 0)
    assert db.count() == 0


@pytest.mark.parametrize("lost", ["DELETE FROM titanic_staged", "DELETE FROM titanic_staged WHERE number = 0"])
def test_lost_staged_rows_fail_the_whole_write(db, lost):
    write = writing(db)
    staged = write.stage(batches("a", "b"), 0)
    db.run(lost)
    with pytest.raises(
        staging.StagingLost, match=r"only . of 2 staged rows are left: .* nothing was written, so write them again"
    ):
        write.commit(JOB, [staged])
    assert db.count() == 0
    assert written(db, "a", "b", named=JOB)
    assert db.count() == 2


def test_old_rows_of_dead_drivers_are_swept(db):
    dead, waits = writing(db), writing(db)
    dead.stage(batches("a", "b"), 0)
    staged = waits.stage(batches("c"), 0)
    db.run("UPDATE titanic_staging SET touched = touched - 90000 WHERE id = 1")
    written(db, "d")
    assert db.left_over == (1, 1)
    waits.commit(None, [staged])
    assert bodies(db) == ["d", "c"]
    assert db.left_over == (0, 0)


def test_a_sweep_is_bounded(db, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK", 2)
    monkeypatch.setattr(staging, "OF_OTHERS", 3)
    writing(db).stage(batches(*"abcdefgh"), 0)
    db.run("UPDATE titanic_staging SET touched = 1")
    living = writing(db)
    living.commit(None, [])
    assert db.left_over == (4, 1)
    living.commit(None, [])
    assert db.left_over == (0, 1)


@only_postgresql
def test_the_table_of_staged_rows_is_emptied_only_when_no_write_uses_it(db):
    size = "SELECT pg_relation_size('titanic_staged')"
    other = writing(db)
    waiting = other.stage(batches("c"), 0)
    written(db, "a", "b")
    assert db.left_over == (1, 1)
    assert db.run(size)[0][0] > 0
    other.commit(None, [waiting])
    assert bodies(db) == ["a", "b", "c"]
    assert db.left_over == (0, 0)
    assert db.run(size) == [(0,)]


@only_postgresql
def test_a_user_without_the_right_to_truncate_can_write(db):
    db.run("CREATE ROLE loader LOGIN")
    db.run("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO loader")
    db.run("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO loader")
    try:
        write = writing(db, url=db.url.replace("postgres@", "loader@"))
        write.commit(None, [write.stage(batches("a"), 0)])
    finally:
        db.run("DROP OWNED BY loader")
        db.run("DROP ROLE loader")
    assert (db.count(), db.left_over) == (1, (0, 0))


def test_concurrent_commits_of_one_job(db):
    writes = [writing(db) for _ in range(3)]
    staged = [each.stage(batches("a", "b", key=["k", None]), 0) for each in writes]
    run_together([lambda at=at: writes[at].commit(JOB, [staged[at]]) for at in range(3)])
    assert db.count() == 2
    assert db.left_over == (0, 0)


def test_concurrent_writes_of_the_same_keys(db):
    names = [f"k{at}" for at in range(200)]
    run_together([lambda order=order: written(db, *names, key=names[::order]) for order in (1, -1, 1, -1)])
    assert sorted(row.key for row in db.requests()) == sorted(names)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_without_ttl_never_expires(db):
    first = db.add("s", b"first", key="known")
    db.add("other", b"other", key="new")
    write = writing(db)
    write.commit(None, [
        write.stage(batches("0", "1", "2", "3", "4", key=["new", "known", None, "new", None]), 0),
        write.stage(batches("5", "6", key=["new", "newer"]), 1),
    ])  # fmt: skip
    assert [unpack(row.body)[0] for row in db.requests() if row.service == "s"] == [b"first", b"0", b"2", b"4", b"6"]
    assert db.add("s", b"x", key="known") == first
    stored = {row.key: row.uuid.hex for row in db.requests() if row.service == "s" and row.key}
    assert db.add("s", b"x", key="newer") == stored["newer"]
    db.run("DELETE FROM titanic_requests")
    written(db, "a", "b", "c", key=["known", "new", "newer"])
    assert db.count() == 0


def test_an_expired_key_is_new(db):
    written(db, "a", key="k", key_ttl="60")
    written(db, "b", key="k")
    assert bodies(db) == ["a"]
    db.run("UPDATE titanic_keys SET expires = 1000")
    written(db, "c", "d", key="k")
    assert bodies(db) == ["a", "c"]
    assert db.run("SELECT expires FROM titanic_keys") == [(None,)]


@pytest.mark.parametrize(("repeated", "statements"), [(False, 2), (True, 4)])
def test_a_commit_scans_no_table(db, repeated, statements):
    names = [f"k{at}" for at in range(99)]
    names.append(names[0] if repeated else "k99")
    writing(db).stage(batches(*names, key=names), 0)
    plans = []

    def explain(*, conn, statement, parameters, **other):
        if "SELECT" in statement and not statement.startswith("EXPLAIN"):
            how = "EXPLAIN QUERY PLAN " if conn.dialect.name == "sqlite" else "EXPLAIN "
            plans.append("\n".join(str(row[-1]) for row in conn.exec_driver_sql(how + statement, parameters)))

    with db.engine.begin() as connection:
        if db.engine.dialect.name == "postgresql":  # tables as small as these are read as a whole
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        sa.event.listen(db.engine, "before_cursor_execute", explain, named=True)
        try:
            staging.commit(connection, None, [staging.Accepted(1, 100)], 1.0)
        finally:
            sa.event.remove(db.engine, "before_cursor_execute", explain)
    assert len(plans) == statements
    assert not any(word in plan for plan in plans for word in ("SCAN titanic_", "Seq Scan"))
    assert db.count() == (99 if repeated else 100)


# ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def limited(db, most, wait):
    return replace(writing(db), max_waiting=most, wait=wait)


def test_a_write_that_never_has_room_fails_at_once_and_says_what_to_set(db):
    write = limited(db, 2, wait=1e9)
    with pytest.raises(TitanicError, match=r"no room for the 3 rows .* 0 requests .* set the options") as told:
        write.commit(JOB, [write.stage(batches("a", "b", "c"), 0)])
    assert told.value.code == 429
    assert bodies(db) == []


def test_a_write_waits_for_room_and_says_so(db, monkeypatch, caplog):
    written(db, "x")

    def make_room(seconds):
        assert "the write of 2 rows waits for room: max_waiting is 2, 1 requests to s have not ended" in caplog.text
        with db.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE titanic_requests SET state = 'done'")

    monkeypatch.setattr(arrow_writing.time, "sleep", make_room)
    write = limited(db, 2, wait=1e9)
    write.commit(JOB, [write.stage(batches("a", "b"), 0)])
    assert bodies(db) == ["x", "a", "b"]
    again = limited(db, 1, wait=0)  # it was committed, so it needs no room
    again.commit(JOB, [again.stage(batches("a", "b"), 0)])
    assert bodies(db) == ["x", "a", "b"]


def test_a_write_waits_only_so_long_and_only_for_its_own_service(db):
    written(db, "x")
    write = limited(db, 2, wait=0)
    with pytest.raises(TitanicError, match="no room for the 2 rows"):
        write.commit(None, [write.stage(batches("a", "b"), 0)])
    other = replace(writing(db, service="other"), max_waiting=2)
    other.commit(None, [other.stage(batches("a", "b"), 0)])
    assert bodies(db) == ["x", "a", "b"]
