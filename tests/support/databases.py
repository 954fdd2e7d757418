"""Databases with Titanic's tables, which tests fill and read directly."""

import time
from types import SimpleNamespace

import sqlalchemy as sa

from zmdp.titanic import enqueue, schema, store
from zmdp.titanic.frames import pack
from zmdp.titanic.store import tables


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
            return [SimpleNamespace(**row) for row in connection.execute(
                sa.select(tables.REQUESTS).order_by(tables.R.id)).mappings()]  # fmt: skip

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
