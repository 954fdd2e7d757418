"""Reading Titanic's requests as a stream: each once, none skipped, even if commits are out of order."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from zmdp.mdp.errors import SettingError, ZmdpError
from zmdp.spark.datasource.stream_reader import StreamReader
from zmdp.titanic import admin, enqueue, store
from zmdp.titanic.offsets import SafeOffset

only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
ID = StructType([StructField("id", LongType())])


@pytest.fixture
def reader(db):
    """`reader(**options)`: a stream reader as on the driver."""
    made = []

    def opened(**options):
        made.append(StreamReader({"db": db.url, **options}, ID))
        return made[-1]

    yield opened
    for each in made:
        each.stop()


def ids(reader, start, end):
    """Return what an executor reads between two offsets."""
    return [
        id_ for span in reader.partitions(start, end) for batch in reader.read(span) for id_ in batch["id"].to_pylist()
    ]


# ── offsets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_as_they_are_accepted(db, reader):
    stream = reader(events="accepted")
    start = stream.initialOffset()
    assert start == stream.latestOffset(start) == {"id": 0}
    db.add()
    db.done("other")
    middle = stream.latestOffset(start)
    assert ids(stream, start, middle) == [1, 2]
    assert stream.latestOffset(middle) == stream.latestOffset() == middle
    db.add()
    assert ids(stream, middle, stream.latestOffset(middle)) == [3]


def test_requests_as_they_end(db, reader):
    stream = reader()
    start = stream.initialOffset()
    for service in ("a", "b", "c", "d"):
        db.add(service)
    db.end("c")
    db.end("a", code=500)
    rows = db.requests()
    with db.engine.begin() as connection:
        admin.cancel(connection, [rows[3].uuid], 1.0)
    first = stream.latestOffset(start)
    assert ids(stream, start, first) == [3, 1, 4]
    with db.engine.begin() as connection:
        admin.retry(connection, [rows[0].uuid], 1.0)
    assert ids(stream, start, stream.latestOffset(first)) == [3, 4]
    db.end("b")
    db.end("a")
    assert ids(stream, first, stream.latestOffset(first)) == [2, 1]


@pytest.mark.parametrize("events", ["accepted", "ended"])
def test_an_offset_does_not_go_back_when_the_newest_is_closed(db, reader, events):
    db.done()
    newest = db.done()
    before = reader(events=events).latestOffset()
    with db.engine.begin() as connection:
        store.close(connection, [store.Lookup(newest.uuid)])
    assert reader(events=events).latestOffset() == before
    last = db.done()
    stream = reader(events=events)
    assert ids(stream, before, stream.latestOffset(before)) == [last.id]


@pytest.mark.parametrize("events", ["accepted", "ended"])
def test_starting_at_the_latest_offset(db, reader, events):
    db.done()
    stream = reader(events=events, startingOffsets="latest")
    start = stream.initialOffset()
    db.done()
    assert ids(stream, start, stream.latestOffset(start)) == [2]


def test_rows_per_micro_batch_are_limited(db, reader):
    limits = pytest.importorskip("pyspark.sql.streaming.datasource", reason="PySpark before 4.2 has no limits")
    for number in range(7):
        db.done("other" if number % 2 else "50%:it's")
    stream = reader(maxRowsPerTrigger="2", service="50%:it's")
    limit = stream.getDefaultReadLimit()
    assert limit == limits.ReadMaxRows(2)
    assert reader().getDefaultReadLimit() == limits.ReadAllAvailable()
    offset, found = stream.initialOffset(), []
    for _ in range(3):
        end = stream.latestOffset(offset, limit)
        found.append(ids(stream, offset, end))
        offset = end
    assert found == [[1, 3], [5, 7], []]
    assert stream.reportLatestOffset() == offset


def test_a_stream_with_available_now_ends(db, reader):
    stream = reader(events="accepted")
    db.add()
    stream.prepareForTriggerAvailableNow()
    db.add()
    assert stream.latestOffset({"id": 0}) == {"id": 1}
    assert stream.latestOffset({"id": 5}) == {"id": 5}  # it goes on where another one ended


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"events": "all"}, "events is 'all'; expected accepted or ended"),
        ({"startingOffsets": "5"}, "startingOffsets is '5'; expected earliest or latest"),
        ({"maxRowsPerTrigger": "0"}, "maxrowspertrigger is '0'; expected an integer from 1"),
        ({"job": "x"}, "titanic has no option 'job' to read as a stream"),
        ({"db": "nowhere.db"}, "there is no database nowhere.db"),
    ],
)
def test_invalid_options_of_streams(pristine, options, message):
    with pytest.raises(ZmdpError, match=message):
        StreamReader({"db": str(pristine), **options}, ID)


def test_a_checkpoint_of_other_events_is_refused(db, reader):
    with pytest.raises(SettingError, match="the checkpoint belongs to a stream with events=accepted"):
        reader().latestOffset({"id": 5})


# ── commits out of order ─────────────────────────────────────────────────────────────────────────────────────────────


@only_postgresql
def test_a_request_that_commits_late_is_not_skipped(db, reader):
    stream = reader(events="accepted")
    start = stream.initialOffset()
    db.add()
    with db.engine.connect() as slow, db.engine.connect() as quick:
        slow.begin()
        enqueue(slow, "slow", b"")
        quick.begin()
        enqueue(quick, "quick", b"")
        quick.commit()
        assert db.run("SELECT id FROM titanic_requests ORDER BY id") == [(1,), (3,)]
        meanwhile = stream.latestOffset(start)
        assert meanwhile["id"] < 2
        db.add()
        assert stream.latestOffset(meanwhile)["id"] < 2
        slow.commit()
    after = stream.latestOffset(meanwhile)
    assert ids(stream, start, meanwhile) + ids(stream, meanwhile, after) == [1, 2, 3, 4]


@only_postgresql
def test_an_end_that_commits_late_is_not_skipped(db, reader):
    stream = reader()
    start = stream.initialOffset()
    db.add("slow")
    db.add("quick")
    lease = store.Lease("me", time.time() + 1000)
    with db.engine.begin() as connection:
        ((slow,),) = store.claim(connection, [store.Claim("slow", 1, lease, 1.0)])
    with db.engine.connect() as connection:
        connection.begin()
        store.finish(connection, [store.Outcome(slow.id, "me", 1, 2.0, b"")])
        db.end("quick")
        meanwhile = stream.latestOffset(start)
        assert ids(stream, start, meanwhile) == []
        connection.commit()
    after = stream.latestOffset(meanwhile)
    assert ids(stream, start, after) == [1, 2]


@only_postgresql
def test_a_rolled_back_transaction_does_not_delay_the_stream(db, reader):
    stream = reader(events="accepted")
    with db.engine.connect() as connection:
        connection.begin()
        enqueue(connection, "never", b"")
        db.add()
        start = stream.latestOffset(stream.initialOffset())
        assert start["id"] < 2
        connection.rollback()
    assert ids(stream, start, stream.latestOffset(start)) == [2]


@only_postgresql
def test_a_prepared_transaction_is_waited_for_under_its_new_name(db, reader):
    stream = reader(events="accepted")
    start = stream.initialOffset()
    with db.engine.connect() as connection:
        transaction = connection.begin_twophase("ours")
        enqueue(connection, "slow", b"")
        db.add()
        assert stream.latestOffset(start)["id"] == 0
        transaction.prepare()
        assert stream.latestOffset(start)["id"] == 0
        transaction.commit()
    assert ids(stream, start, stream.latestOffset(start)) == [1, 2]


@only_postgresql
def test_a_stream_without_a_start_offset_does_not_go_back(db, reader):
    """PySpark before 4.2 passes no start, so an offset below the checkpoint's would repeat requests."""
    for _ in range(3):
        db.add()
    with db.engine.connect() as slow, ThreadPoolExecutor(1) as pool:
        slow.begin()
        enqueue(slow, "slow", b"")
        asked = pool.submit(reader(events="accepted").latestOffset)
        with pytest.raises(TimeoutError):
            asked.result(2)
        slow.commit()
        assert asked.result(20)["id"] >= 3


@only_postgresql
def test_later_transactions_are_not_waited_for(db):
    """Somebody always writes, and each transaction stays open until the next has started; the stream still proceeds."""
    safe_offset = SafeOffset(db.engine, "id")
    waiting = db.engine.connect()
    waiting.begin()
    enqueue(waiting, "s", b"")
    reached = []
    for _ in range(10):
        following = db.engine.connect()
        following.begin()
        enqueue(following, "s", b"")
        reached.append(safe_offset.advance(0))
        waiting.commit()
        waiting.close()
        waiting = following
    waiting.rollback()
    waiting.close()
    assert reached[-1] >= 8
    assert reached == sorted(reached)


def test_each_request_is_read_once_under_concurrent_writes(db, reader):
    """Transactions of all lengths, some rolled back, while the reader keeps reading."""
    stream = reader(events="accepted")
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
    offset, found = stream.initialOffset(), []
    while True:
        ended = stop.is_set()
        end = stream.latestOffset(offset)
        found += ids(stream, offset, end)
        offset = end
        if ended and len(found) >= len(written):
            break
    assert failures == []
    assert found == [row.id for row in db.requests()]
    assert len(found) == len(written)


# ── with Spark ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def run(spark, db, tmp_path):
    """`run(**options)`: run the available micro-batches from the checkpoint; return the ids of each batch."""

    def running(checkpoint="checkpoint", **options):
        batches = {}

        def keep(frame, number):
            batches[number] = sorted(row.id for row in frame.collect())

        query = (
            spark.readStream.format("titanic").schema("id long, reply string").option("db", db.url).options(**options)
            .load().writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        try:
            assert query.awaitTermination(60)
        finally:
            query.stop()
        return batches

    return running


def test_a_restarted_stream_continues_and_repeats_its_last_batch(db, run, tmp_path):
    for _ in range(5):
        db.done()
    db.add()
    batches = run(maxRowsPerTrigger="2")
    assert [id_ for number in sorted(batches) for id_ in batches[number]] == [1, 2, 3, 4, 5]
    db.end()
    later = run()
    assert list(later.values()) == [[6]]
    (number,) = later
    commits = tmp_path / "checkpoint" / "commits"
    for name in (f"{number}", f".{number}.crc"):  # as if Spark had died before it had noted that
        (commits / name).unlink()
    db.done()
    again = run()
    assert again[number] == [6]
    again |= run()  # PySpark before 4.2 ends after the batch that it had begun
    assert [id_ for each in sorted(again) for id_ in again[each]] == [6, 7]


def test_errors_of_a_stream_say_what_to_do(spark, tmp_path):
    query = (
        spark.readStream.format("titanic").option("db", str(tmp_path / "nowhere.db")).load()
        .writeStream.format("memory").queryName("nothing").start()
    )  # fmt: skip
    with pytest.raises(Exception, match=r"there is no database .*nowhere.db"):
        query.awaitTermination(60)
