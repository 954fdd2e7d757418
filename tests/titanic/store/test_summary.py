"""Counts of what is in the database."""

from zmdp.titanic import store

NOW = 1_800_000_000.0


def test_an_empty_database(tables):
    with tables.engine.begin() as connection:
        found = store.summarize(connection, NOW)
    assert found == store.Summary(dict.fromkeys(("delayed", "pending", "running", "done", "failed"), 0), 0.0, 0)


def test_requests_in_every_state(tables):
    tables.add("a", now=NOW - 100, due=NOW + 1)
    tables.add("b", now=NOW - 7)
    tables.add("b", now=NOW - 50, due=NOW - 5, priority=9)
    tables.running(service="c")
    tables.running(service="c", holder="another", until=NOW + 1)
    for _ in range(3):
        tables.done(service="d")
    for _ in range(2):
        tables.done(service="d", code=500, error="bad")
    with tables.engine.begin() as connection:
        found = store.summarize(connection, NOW)
        later = store.summarize(connection, NOW + 5)
        earlier = store.summarize(connection, NOW - 1000)
    requests = {"delayed": 2, "pending": 1, "running": 2, "done": 3, "failed": 2}
    assert found == store.Summary(requests, 7.0, 2)
    assert (later.oldest_pending_seconds, later.titanics) == (12.0, 1)
    assert earlier.oldest_pending_seconds == 0.0
