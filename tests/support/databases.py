"""Databases with Titanic's tables, which tests fill and read directly."""

import json
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from support.processes import eventually

from zmdp.titanic import enqueue
from zmdp.titanic.api.submission import pack, unpack
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.store import models as tables

COUNT_ROWS = """
    SELECT service, state, count(*), sum(attempts), sum(deaths) FROM titanic_requests GROUP BY service, state
    UNION ALL SELECT service, 'key', count(*), 0, 0 FROM titanic_keys GROUP BY service
    UNION ALL SELECT '', 'partial', count(*), 0, 0 FROM titanic_parts HAVING count(*) > 0
"""
KEPT = """
    SELECT service, state, sum(requests), sum(attempts), sum(deaths) FROM (
        SELECT service, state, requests, attempts, deaths FROM titanic_counts
        UNION ALL SELECT service, state, requests, attempts, deaths FROM titanic_count_changes
    ) AS both_tables GROUP BY service, state HAVING sum(requests) <> 0 OR sum(attempts) <> 0 OR sum(deaths) <> 0
"""


def waiting_for_locks(cluster, number):
    """Wait until so many of Titanic's transactions wait for a lock of PostgreSQL's."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'titanic' AND wait_event_type = 'Lock'"
    eventually(lambda: cluster.execute(waiting) == [(number,)])


def wrong_counts(engine):
    """Return the counts of rows that differ from those that are kept, and what is kept instead."""
    # In one statement, so that both see the same.
    both = f"SELECT 'rows', a.* FROM ({COUNT_ROWS}) AS a UNION ALL SELECT 'kept', b.* FROM ({KEPT}) AS b"
    found = {"rows": set(), "kept": set()}
    with engine.begin() as connection:
        for which, *counts in connection.exec_driver_sql(both):
            found[which].add(tuple(counts))
    return sorted(found["rows"] - found["kept"]), sorted(found["kept"] - found["rows"])


def check_counts(engine):
    """Check that the counts that are kept are those of the rows."""
    assert wrong_counts(engine) == ([], [])


class Database:
    """A database with shortcuts for filling it."""

    def __init__(self, url):
        self.url = url
        self.engine = schema.open_engine(schema.database_url(url))

    def add(self, service="echo", *frames, **options):
        """Accept a request and return its UUID."""
        with self.engine.begin() as connection:
            return enqueue(connection, service, *(frames or (b"body",)), **options)

    def end(self, service="echo", reply=(b"reply",), code=None, error=None, now=None):
        """Give the service's oldest request this reply."""
        now = time.time() if now is None else now
        lease = store.Lease("me", now + 1000)
        with self.engine.begin() as connection:
            ((claimed,),) = store.claim(connection, [store.Claim(service, 1, lease, now)])
            packed = None if reply is None else pack(reply)
            store.finish(connection, [store.Outcome(claimed.id, "me", claimed.attempt, now, packed, code, error)])
        return claimed

    def done(self, service="echo", *frames, **ends):
        """Add a request and end it."""
        self.add(service, *frames)
        return self.end(service, **ends)

    def run(self, sql):
        with self.engine.begin() as connection:
            found = connection.exec_driver_sql(sql)
            return [tuple(row) for row in found] if found.returns_rows else []

    def requests(self):
        """Return all stored requests, in order."""
        with self.engine.begin() as connection:
            rows = connection.execute(sa.select(tables.REQUESTS).order_by(tables.R.id)).mappings().all()
        return [SimpleNamespace(**row) for row in rows]

    def count(self, table="titanic_requests"):
        return self.run(f"SELECT count(*) FROM {table}")[0][0]

    @property
    def left_over(self):
        """How much of writes has not been cleared away."""
        return self.count("titanic_staged"), self.count("titanic_staging")


def new_file(path):
    """Create the SQLite file `path` with tables."""
    engine = schema.open_engine(schema.database_url(str(path)), create=True)
    schema.upgrade(engine)
    engine.dispose()


class OneOfEachState:
    """A request that is done, one that failed and one that is delayed, and how they read as rows."""

    def __init__(self, db):
        self._db = db
        self._now = now = 1_800_000_000.123456
        options = {"key": "k", "priority": 7, "retries": 2, "headers": {"user": "ü", "b": ""}, "ttl": 60}
        self._done = db.add("größe", b"a", b"\0\xff", **options)
        db.end("größe", (b"x", b""), now=now)
        self._failed = db.add("fails")
        db.end("fails", None, code=503, error="broken", now=now + 1)
        self._delayed = db.add("waits", b"", delay=3600)

    def check(self, rows):
        """Check the three rows, which are in the order of their requests."""
        done, failed, delayed = rows
        stored = self._db.requests()
        assert dict(done["headers"]) == {"user": "ü", "b": ""}
        self._check(done, {
            "id": stored[0].id, "uuid": self._done, "service": "größe", "state": "done", "priority": 7, "attempts": 1,
            "failures": 0, "retries": 2, "key": "k", "code": None, "error": None, "request": [b"a", b"\0\xff"],
            "reply": [b"x", b""], "started": done["finished"],
        })  # fmt: skip
        assert done["created"].timestamp() == pytest.approx(stored[0].created, abs=1e-6)
        assert done["finished"].timestamp() == pytest.approx(self._now, abs=1e-6)
        assert done["expires"].timestamp() == pytest.approx(self._now + 60, abs=1e-6)
        told = {"uuid": self._failed, "state": "failed", "code": 503, "error": "broken", "headers": None, "reply": None}
        self._check(failed, told)
        nothing = dict.fromkeys(("reply", "started", "finished", "expires"))
        self._check(delayed, {"uuid": self._delayed, "state": "delayed", "request": [b""], **nothing})
        assert (delayed["due"] - delayed["created"]).total_seconds() == pytest.approx(3600, abs=1e-5)

    @staticmethod
    def _check(row, wanted):
        assert {name: row[name] for name in wanted} == wanted


def check_columns(db, at, before):
    """Check the two requests that were written from rows: "one" with every column set, "two" with none but a delay."""
    one, two = db.requests()
    assert (one.service, one.state, one.priority, one.due, one.key) == ("one", "delayed", 9, at.timestamp(), "k")
    assert (one.retries, one.backoff, one.result_ttl, one.attempts) == (3, 0.25, 3600.0, 0)
    assert (json.loads(one.headers), unpack(one.body)) == ({"user": "ü"}, [b"a", b"\0\xff"])
    assert before <= one.created <= time.time()
    ((expires,),) = db.run("SELECT expires FROM titanic_keys WHERE service = 'one' AND key = 'k'")
    assert expires == one.created + 60.5
    assert (two.service, two.state, two.priority, two.key, unpack(two.body)) == ("two", "delayed", 0, None, [b""])
    assert two.due == pytest.approx(two.created + 3600, abs=1e-6)
    assert (two.retries, two.backoff, two.result_ttl, two.headers) == (0, None, None, None)
    assert db.left_over == (0, 0)
