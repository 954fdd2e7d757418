"""Requests are read as Arrow on both databases: their columns, conditions, ranges and chunks."""

import re
from collections import Counter
from datetime import UTC, datetime

import pyarrow as pa
import pytest
import sqlalchemy as sa
from support.databases import OneOfEachState

from zmdp.mdp.errors import ZmdpError
from zmdp.titanic.contrib.arrow import reading, transfer
from zmdp.titanic.contrib.arrow.columns import REQUESTS
from zmdp.titanic.contrib.arrow.reading import Requests, select_requests

FRAMES = pa.list_(pa.binary())


def requests_of(db, *names, number="id", condition="TRUE", **kinds):
    """Return requests with these columns, of their usual types or of these."""
    columns = {name: REQUESTS.field(name).type for name in names} | kinds
    return Requests(db.url, pa.schema(columns), number, condition)


def rows_of(requests):
    """Return all rows of requests."""
    return [row for batch in requests.read() for row in batch.to_pylist()]


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_request_is_a_row(db):
    requests = OneOfEachState(db)
    requests.check(rows_of(Requests(db.url, REQUESTS)))


def test_an_empty_table(db):
    assert list(Requests(db.url, REQUESTS).read()) == []


@pytest.mark.parametrize(
    ("kind", "requests", "replies"),
    [
        (FRAMES, [[b"one", b"two"], [b"\xff"], [b""]], [[b"reply"], [], None]),
        (pa.binary(), [b"one", b"\xff", b""], [b"reply", None, None]),
        (pa.string(), ["one", "\ufffd", ""], ["reply", None, None]),
    ],
    ids=str,
)
def test_bodies_in_the_types_of_the_schema(db, kind, requests, replies):
    for frames in ([b"one", b"two"], [b"\xff"], [b""]):
        db.add("echo", *frames)
    db.end()
    db.end(reply=())
    (batch,) = requests_of(db, reply=kind, id=pa.int64(), request=kind).read()
    assert batch["id"].to_pylist() == [1, 2, 3]
    assert batch["request"].to_pylist() == requests
    assert batch["reply"].to_pylist() == replies


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_one_query_reads_only_the_columns_of_the_schema(db):
    db.done()
    statements = []
    sa.event.listen(sa.engine.Engine, "before_cursor_execute", listener := lambda *a: statements.append(a[2]))
    try:
        (batch,) = requests_of(db, "service", reply=pa.binary()).read(0, 10)
    finally:
        sa.event.remove(sa.engine.Engine, "before_cursor_execute", listener)
    assert batch.schema.names == ["service", "reply"]
    (statement,) = [each for each in statements if "titanic_requests" in each]
    assert not any(column in statement for column in ("body", "uuid", "headers"))


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_only_the_columns_of_the_schema_need_the_right_to_be_read(db):
    db.done()
    db.run("CREATE ROLE analyst LOGIN")
    db.run("GRANT SELECT (id, service, uuid) ON titanic_requests TO analyst")
    url = db.url.replace("postgres@", "analyst@")
    try:
        (batch,) = Requests(url, pa.schema({"service": pa.string(), "uuid": pa.string()})).read(0, 10)
        with pytest.raises(Exception, match="permission denied"):
            list(Requests(url, pa.schema({"request": pa.binary()})).read(0, 10))
    finally:
        db.run("DROP OWNED BY analyst")
        db.run("DROP ROLE analyst")
    assert batch.to_pylist() == [{"service": "echo", "uuid": db.requests()[0].uuid.hex}]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/x", "'mysql' is not supported"),
        ("nowhere.db", "there is no database nowhere.db: `titanic serve` creates it"),
        ("postgresql://nobody@127.0.0.1:1/x", "cannot read postgresql://nobody@127.0.0.1:1/x: connection"),
    ],
)
def test_databases_that_cannot_be_read(url, message):
    with pytest.raises(ZmdpError, match=re.escape(message)):
        Requests(url, REQUESTS).ranges(8)


# ── conditions ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "finished"}, "unknown state 'finished'; expected delayed, pending, running, done, failed"),
        ({"service": "a,b\0"}, "'b\\x00' is not the name of a service"),
        ({"since": "yesterday"}, "since is 'yesterday'; expected seconds since 1970, or a time such as 2030-"),
        ({"until": "2030-01-31T12:00"}, "until is '2030-01-31T12:00'; expected seconds since 1970, or a time such as"),
        ({"until": "nan"}, "until is 'nan'; expected seconds since 1970"),
    ],
)
def test_invalid_conditions(options, message):
    with pytest.raises(ZmdpError, match=re.escape(message)):
        select_requests(options)


def selected(db, name, **options):
    """Return the values of a column in the requests that the options select, sorted."""
    return sorted(row[name] for row in rows_of(requests_of(db, name, condition=select_requests(options))))


def test_options_select_rows(db):
    for service in ("one", "two", "three"):
        db.add(service)
        db.done(service, code=500 if service == "three" else None)
    assert selected(db, "service", service="one, two") == ["one", "one", "two", "two"]
    assert selected(db, "service", state="failed") == ["three"]
    assert selected(db, "service", state="done,failed", service="three,two") == ["three", "two"]


def test_services_may_contain_any_printable_character(db):
    names = ["it's", "a\\b", "50%", "a:b", "größe"]
    for name in names:
        db.done(name)
    for name in names:
        assert selected(db, "service", service=name) == [name]


def test_since_and_until(db):
    for day in range(1, 5):
        db.add()
        created = datetime(2030, 1, day, tzinfo=UTC).timestamp()
        db.run(f"UPDATE titanic_requests SET created = {created} WHERE id = {day}")
    assert selected(db, "id", since="2030-01-02T00:00:00+00:00") == [2, 3, 4]
    assert selected(db, "id", since="2030-01-02T02:00+02:00", until="2030-01-03T00:00Z") == [2]
    assert selected(db, "id", until=str(datetime(2030, 1, 3, tzinfo=UTC).timestamp())) == [1, 2]
    assert selected(db, "id", since="2030-01-05T00:00Z") == []


COUNTED = {
    "1 = 1": {},
    "state IN ('done', 'failed')": {"state": "done,failed"},
    "service = 's1'": {"service": "s1"},
    "created >= 1030": {"since": "1030"},
    "created < 1070 AND state = 'pending'": {"until": "1070", "state": "pending"},
}
"""Conditions in SQL, and the options that mean the same."""


def test_counts_equal_those_of_sql(db, monkeypatch):
    """However the rows are divided into ranges, chunks and batches."""
    for number in range(90):
        db.add(f"s{number % 3}", *([b"x"] * (number % 4 + 1)), key=f"k{number}" if number % 5 else None)
        if number % 2:
            db.end(f"s{number % 3}", code=500 if number % 3 else None)
    db.run("UPDATE titanic_requests SET created = 1000 + id")
    db.run("DELETE FROM titanic_requests WHERE id IN (1, 22, 50, 51, 52, 90)")
    monkeypatch.setattr(reading, "CHUNK_ROWS", 13)
    monkeypatch.setattr(reading, "MIN_RANGE_ROWS", 20)
    monkeypatch.setattr(transfer, "MAX_ROWS", 5)
    for where, options in COUNTED.items():
        requests = Requests(db.url, REQUESTS, condition=select_requests(options))
        ranges = requests.ranges(8)
        assert len(ranges) == 4
        found = [row for each in ranges for batch in requests.read(*each) for row in batch.to_pylist()]
        ours = Counter((row["service"], row["state"]) for row in found)
        query = "SELECT service, state, count(*), count(key), sum(length(body)) FROM titanic_requests"
        for service, state, rows, keys, size in db.run(f"{query} WHERE {where} GROUP BY 1, 2"):
            group = [row for row in found if (row["service"], row["state"]) == (service, state)]
            assert ours.pop((service, state)) == rows, where
            assert sum(row["key"] is not None for row in group) == keys, where
            assert sum(4 + len(frame) for row in group for frame in row["request"]) == size, where
        assert not ours, where


# ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["id", "service", "reply"])
def test_chunks_follow_each_other(db, monkeypatch, name):
    for _ in range(7):
        db.add()
    monkeypatch.setattr(reading, "CHUNK_ROWS", 3)
    batches = list(requests_of(db, name).read(0, 6))
    assert [batch.num_rows for batch in batches] == [3, 3]
    if name == "id":
        assert [batch["id"].to_pylist() for batch in batches] == [[1, 2, 3], [4, 5, 6]]
    assert [batch.num_rows for batch in requests_of(db, name).read(2)] == [3, 2]


def test_batches_are_bounded(db, monkeypatch):
    for size in (10, 10, 5000, 10, 10, 10, 10):
        db.add("echo", bytes(size))
    monkeypatch.setattr(transfer, "MAX_BYTES", 1000)
    batches = list(requests_of(db, "id", request=pa.binary()).read(0, 7))
    assert [id_ for batch in batches for id_ in batch["id"].to_pylist()] == [1, 2, 3, 4, 5, 6, 7]
    assert 2 <= len(batches) <= 3  # depends on whether a batch may end before the large body


def test_requests_with_equal_numbers_are_read_once(db, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_ROWS", 2)
    for _ in range(5):
        db.done()
    db.run("UPDATE titanic_requests SET ended = 3")
    requests = requests_of(db, "id", number="ended")
    assert [each for batch in requests.read(2, 3) for each in batch.column("id").to_pylist()] == [1, 2, 3, 4, 5]
    assert list(requests.read(3, 9)) == []


def test_each_chunk_is_a_transaction_that_begins_after_the_one_before(db, monkeypatch):
    """So a slow reader does not hold up the database, and rows that are committed meanwhile are read."""
    for _ in range(2):
        db.add()
    monkeypatch.setattr(reading, "CHUNK_ROWS", 2)
    batches = requests_of(db, "id").read()
    found = [next(batches)["id"].to_pylist()]
    db.add()
    found += [batch["id"].to_pylist() for batch in batches]
    assert found == [[1, 2], [3]]


def test_a_range_without_an_end_has_requests_that_are_added_later(db):
    db.add("echo")
    requests = requests_of(db, "service")
    ranges = requests.ranges(8)
    db.add("other")
    read = [row["service"] for each in ranges for batch in requests.read(*each) for row in batch.to_pylist()]
    assert read == ["echo", "other"]
