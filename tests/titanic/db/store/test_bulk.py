"""One statement for many rows, on both databases."""

import pytest
import sqlalchemy as sa

from zmdp.titanic.api.submission import pack
from zmdp.titanic.db import store
from zmdp.titanic.db.store import bulk
from zmdp.titanic.db.store.bulk import Bulk

only_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)

GIVEN = Bulk(
    "WITH given SELECT number, name, size, body FROM given WHERE number IS NOT NULL ORDER BY number",
    number="bigint",
    name="text",
    size="double precision",
    body="bytea",
)


def rows(count):
    return [
        (number, None if number % 3 else f"größe {number}", number / 8 if number % 2 else None, b"\0%d\xff" % number)
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 127, 128, 129, 1000])
def test_each_row_is_processed_once_unchanged(engine, count):
    with engine.begin() as connection:
        assert [tuple(row) for row in GIVEN(connection, rows(count))] == rows(count)


def test_no_rows(engine):
    with engine.begin() as connection:
        assert GIVEN(connection, []) == []


def test_a_column_that_is_null_in_all_rows(engine):
    with engine.begin() as connection:
        given = [(1, None, None, None), (2, None, None, None)]
        assert [tuple(row) for row in GIVEN(connection, given)] == given


def test_a_statement_that_returns_nothing(engine, tables):
    claimed = tables.running()
    forget = Bulk("WITH given DELETE FROM titanic_requests WHERE id IN (SELECT id FROM given)", id="bigint")
    with engine.begin() as connection:
        assert forget(connection, [(claimed.id,), (claimed.id + 1,)]) == []
    assert tables.count() == 0


@only_sqlite
def test_only_a_few_sizes_of_statements_exist(engine, executed):
    with engine.begin() as connection, executed(engine) as statements:
        for count in range(1, 200):
            GIVEN(connection, rows(count))
    assert len({sql for sql, _ in statements}) <= 7  # the driver keeps them prepared


@only_postgresql
def test_large_rows_go_in_several_statements(engine, executed, monkeypatch):
    monkeypatch.setattr(bulk, "BYTES_AT_ONCE", 100)
    given = [(number, None, None, bytes(size)) for number, size in enumerate([60, 40, 1, 500, 0, 100, 99, 1, 1])]
    with engine.begin() as connection, executed(engine) as statements:
        assert [tuple(row) for row in GIVEN(connection, given)] == given
    bodies = [parameters[-1] for sql, parameters in statements if "given" in sql]
    sizes = [[len(body) for body in ([each] if isinstance(each, bytes) else each)] for each in bodies]
    assert sizes == [[60, 40], [1], [500], [0, 100], [99, 1], [1]]


@only_postgresql
def test_large_bodies_travel_as_they_are(engine, tables, submission):
    batch = [submission(body=pack([bytes([number]) * 3_000_000])) for number in range(4)]
    tables.do(store.accept, *batch)
    assert [tables.row(each.uuid).body == each.body for each in batch] == [True] * 4


@only_postgresql
def test_other_drivers_execute_row_by_row(engine, tables, submission, executed, monkeypatch):
    batch = [submission("größe", key=None if number % 2 else f"{number}", due=2e9, headers="{}") for number in range(5)]
    monkeypatch.setattr(engine.dialect, "driver", "another")
    with executed(engine) as statements:
        assert tables.do(store.accept, *batch) == [each.uuid for each in batch]
    assert sum("INSERT INTO titanic_requests" in sql for sql, _ in statements) == 5
    monkeypatch.undo()
    for each in batch:
        row = tables.row(each.uuid)
        assert (row.service, row.key, row.due, row.state, row.body) == ("größe", each.key, 2e9, "delayed", each.body)


def test_a_rejected_statement_is_an_error_of_sqlalchemy(engine):
    broken = Bulk("WITH given SELECT nothing FROM given", id="bigint")
    with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError):
        broken(connection, [(1,)])
