"""What Spark asks the readers for, without Spark: options, partitions and offsets."""

import re

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from zmdp.mdp.errors import SettingError, ZmdpError
from zmdp.spark.datasource.reader import SCHEMA, Reader, StreamReader
from zmdp.titanic import enqueue
from zmdp.titanic.contrib.arrow.reading import UNBOUNDED

only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
ID = from_arrow_schema(pa.schema({"id": pa.int64()}))


def ids(reader, partitions):
    """Return what executors read."""
    return [id_ for span in partitions for batch in reader.read(span) for id_ in batch["id"].to_pylist()]


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sevice": "x"},
            "titanic has no option 'sevice' to read; available options: db, partitions, service, since, state, until",
        ),
        ({"partitions": "0"}, "partitions is '0'; expected an integer from 1"),
        ({"partitions": "x"}, "partitions is 'x'; expected an integer from 1"),
        ({"state": "finished"}, "unknown state 'finished'"),
        ({"db": ""}, "name the database: .option("),
    ],
)
def test_invalid_options(options, message, pristine):
    with pytest.raises(ZmdpError, match=re.escape(message)):
        Reader({"db": str(pristine), **options}, SCHEMA)


def test_invalid_schemas(pristine):
    with pytest.raises(SettingError, match="titanic's column id cannot be read as string; use int64"):
        Reader({"db": str(pristine)}, from_arrow_schema(pa.schema({"id": pa.string()})))


def test_the_database_from_the_environment(pristine, monkeypatch):
    monkeypatch.setenv("TITANIC_DB", str(pristine))
    (span,) = Reader({}, SCHEMA).partitions()
    assert (span.low, span.high) == (0, UNBOUNDED)


def test_options_select_what_is_read(db):
    for service in ("one", "two", "one"):
        db.add(service)
    reader = Reader({"db": db.url, "Service": "one"}, ID)
    assert ids(reader, reader.partitions()) == [1, 3]


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stream(db):
    """`stream(**options)`: a stream reader as on the driver."""
    made = []

    def opened(**options):
        made.append(StreamReader({"db": db.url, **options}, ID))
        return made[-1]

    yield opened
    for each in made:
        each.stop()


def between(reader, start, end):
    """Return what executors read between two offsets."""
    return ids(reader, reader.partitions(start, end))


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


def test_a_checkpoint_of_other_events_is_refused(stream):
    with pytest.raises(SettingError, match="the checkpoint belongs to a stream with events=accepted"):
        stream().latestOffset({"id": 5})


@pytest.mark.parametrize(("events", "number", "first"), [("accepted", "id", [1, 2]), ("ended", "ended", [2])])
def test_offsets_are_numbers_of_events(db, stream, events, number, first):
    reader = stream(events=events)
    start = reader.initialOffset()
    assert start == reader.latestOffset(start) == {number: 0}
    db.add()
    db.done("other")
    middle = reader.latestOffset(start)
    assert between(reader, start, middle) == first
    assert reader.latestOffset(middle) == reader.latestOffset() == middle
    last = db.done("third")
    assert between(reader, middle, reader.latestOffset(middle)) == [last.id]


@pytest.mark.parametrize("events", ["accepted", "ended"])
def test_starting_at_the_latest_offset(db, stream, events):
    db.done()
    reader = stream(events=events, startingOffsets="latest")
    start = reader.initialOffset()
    db.done()
    assert between(reader, start, reader.latestOffset(start)) == [2]


def test_rows_per_micro_batch_are_limited(db, stream):
    limits = pytest.importorskip("pyspark.sql.streaming.datasource", reason="PySpark before 4.2 has no limits")
    for number in range(7):
        db.done("other" if number % 2 else "50%:it's")
    reader = stream(maxRowsPerTrigger="2", service="50%:it's")
    limit = reader.getDefaultReadLimit()
    assert limit == limits.ReadMaxRows(2)
    assert stream().getDefaultReadLimit() == limits.ReadAllAvailable()
    offset, found = reader.initialOffset(), []
    for _ in range(3):
        end = reader.latestOffset(offset, limit)
        found.append(between(reader, offset, end))
        offset = end
    assert found == [[1, 3], [5, 7], []]
    assert reader.reportLatestOffset() == offset


def test_a_stream_with_available_now_ends(db, stream):
    reader = stream(events="accepted")
    db.add()
    reader.prepareForTriggerAvailableNow()
    db.add()
    assert reader.latestOffset({"id": 0}) == {"id": 1}
    assert reader.latestOffset({"id": 5}) == {"id": 5}  # it goes on where another one ended


@only_postgresql
def test_a_request_that_commits_late_is_not_skipped(db, stream):
    reader = stream(events="accepted")
    start = reader.initialOffset()
    with db.engine.connect() as slow:
        slow.begin()
        enqueue(slow, "slow", b"")
        db.add()
        meanwhile = reader.latestOffset(start)
        assert meanwhile == start
        slow.commit()
    assert between(reader, meanwhile, reader.latestOffset(meanwhile)) == [1, 2]


@only_postgresql
def test_a_stream_without_a_start_offset_does_not_go_back(db, stream, pool):
    """PySpark before 4.2 passes no start, so an offset below the checkpoint's would repeat requests."""
    for _ in range(3):
        db.add()
    with db.engine.connect() as slow:
        slow.begin()
        enqueue(slow, "slow", b"")
        asked = pool.submit(stream(events="accepted").latestOffset)
        assert not asked.done()  # it waits
        slow.commit()
        assert asked.result()["id"] >= 3
