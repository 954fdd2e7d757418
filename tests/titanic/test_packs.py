"""Rows that are submitted together go to the workers as packs, over real sockets (docs/titanic.md)."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from support.peers import Silence
from support.processes import TIMEOUT_SECONDS
from support.titanics import running_bench, serving, stored

from zmdp.clients import Client
from zmdp.mdp.rows import read_reply
from zmdp.titanic import dispatcher, lanes
from zmdp.titanic.frames import pack
from zmdp.titanic.lanes import Lane, pack_size
from zmdp.titanic.store import Claimed
from zmdp.titanic.uuids import new_uuid
from zmdp.workers.handling import Failed

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)


@pytest.fixture
def url(engine):
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(lanes, "TARGET_SECONDS", TIMEOUT_SECONDS)  # however slow the machine is, packs grow
    monkeypatch.setattr(lanes, "MIN_PACKS", 1)
    monkeypatch.setattr(dispatcher, "BACKOFF_SECONDS", (0.01, 0.02))
    with running_bench() as bench:
        yield bench


@contextmanager
def asking(bench, url, *bodies, keys="k", **settings):
    """Send rows to the service `up` through Titanic; yield a function that returns their outcomes."""
    pairs = [frame for number, body in enumerate(bodies) for frame in (f"{keys}/{number}".encode(), body)]
    with (
        serving(bench.endpoint, url, **settings),
        Client(bench.endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(client.request, "titanic.request", b"up", *pairs, options={"rows": len(bodies)})
        yield asked
        reply = list(asked.result(TIMEOUT_SECONDS))
    asked.outcomes = read_reply(reply, len(bodies)) or reply


class Up:
    """A worker for `up`, driven by hand, with a credit of one request."""

    def __init__(self, bench, *, understands=1000, poison=None):
        self.bench = bench
        self.understands = understands
        """The largest pack that it understands."""
        self.poison = poison
        self.requests = []
        """The rows of each request."""
        self.deaths = 0
        self.worker = bench.x1_worker(b"up")

    def answer(self, address, options, rows):
        """Handle a request; it has options if it may be a pack."""
        self.requests.append(rows)
        if self.poison in rows:
            self.deaths += 1
            self.worker.close()
            self.worker = self.bench.x1_worker(b"up")
            return
        if len(rows) > self.understands or "rows" not in json.loads(options or b"{}"):
            self.worker.final(address, *(row.upper() for row in rows))
            return
        assert json.loads(options)["rows"] == len(rows)
        failed = {str(at): [422, "bad", True] for at, row in enumerate(rows) if row == b"bad"}
        frames = [int(row != b"bad") for row in rows]
        marker = json.dumps({"rows": len(rows), "frames": frames, "failed": failed}, separators=(",", ":"))
        self.worker.final(address, marker.encode(), *(row.upper() for row in rows if row != b"bad"))

    def handle_all(self, asked):
        """Handle requests until the caller has its reply."""
        while not asked.done():
            with suppress(Silence):
                _, _, address, _, options, *rows = self.worker.command(0.05)
                self.answer(address, options, rows)


def sizes(up):
    return [len(rows) for rows in up.requests]


def test_rows_are_sent_as_packs_and_each_has_its_outcome(bench, url):
    bodies = [b"bad" if number == 17 else b"row %d" % number for number in range(40)]
    up = Up(bench)
    with asking(bench, url, *bodies) as asked:
        up.handle_all(asked)
    assert max(sizes(up)) > 1
    assert [row for rows in up.requests for row in rows] == bodies
    expected = [[body.upper()] for body in bodies]
    expected[17] = Failed(422, "bad", (b"",))
    assert asked.outcomes == expected
    rows = stored(url)["requests"]
    assert [row["state"] for row in rows] == ["failed" if body == b"bad" else "done" for body in bodies]
    assert {row["attempts"] for row in rows} == {1}
    assert bytes(rows[0]["reply"]) == pack([b"ROW 0"])
    with asking(bench, url, *bodies) as asked:
        pass
    assert asked.outcomes == expected


@on_sqlite
def test_a_worker_that_does_not_understand_packs_gets_single_requests(bench, url):
    bodies = [b"row %d" % number for number in range(20)]
    up = Up(bench, understands=0)
    with asking(bench, url, *bodies) as asked:
        up.handle_all(asked)
    assert up.requests == [[body] for body in bodies]
    assert asked.outcomes == [[body.upper()] for body in bodies]


@on_sqlite
def test_a_pack_for_a_worker_that_does_not_understand_it_is_sent_again_row_by_row(bench, url):
    bodies = [b"row %d" % number for number in range(20)]
    up = Up(bench, understands=1)  # as if another worker had joined
    with asking(bench, url, *bodies) as asked:
        up.handle_all(asked)
    assert asked.outcomes == [[body.upper()] for body in bodies]
    unknown = [row for rows in up.requests if len(rows) > 1 for row in rows]
    assert unknown
    assert all([row] in up.requests for row in unknown)
    assert {(row["failures"], row["deaths"]) for row in stored(url)["requests"]} == {(0, 0)}


def test_a_row_that_kills_workers_fails_alone(bench, url):
    bodies = [b"poison" if number == 30 else b"row %d" % number for number in range(40)]
    up = Up(bench, poison=b"poison")
    with asking(bench, url, *bodies, max_deaths=2) as asked:
        up.handle_all(asked)
    killing = [rows for rows in up.requests if b"poison" in rows]
    assert len(killing[0]) > 1
    assert killing[-1] == [b"poison"]
    outcomes = asked.outcomes
    assert outcomes[30].code == 502
    assert outcomes[30].text.startswith("given up after ")
    del outcomes[30]
    assert outcomes == [[body.upper()] for body in bodies if body != b"poison"]
    for row, body in zip(stored(url)["requests"], bodies, strict=True):
        assert row["attempts"] <= 2
        assert (row["deaths"] > 0) == (body == b"poison")
    neighbours = set(killing[0]) - {b"poison"}
    assert all([row] in up.requests for row in neighbours)


@on_sqlite
def test_a_row_that_is_closed_does_not_interrupt_its_pack(bench, url):
    """Its pack has other rows to finish, whose replies are stored."""
    bodies = [b"row %d" % number for number in range(20)]
    up = Up(bench)
    with asking(bench, url, *bodies) as asked:
        while len((request := up.worker.any_request())[2]) < 2:
            up.answer(*request)
        address, _, rows = request
        closed = next(row["uuid"] for row in stored(url)["requests"] if bytes(row["body"]) == pack([rows[0]]))
        with Client(bench.endpoint, timeout=TIMEOUT_SECONDS) as client:
            assert list(client.request("titanic.close", str(closed).replace("-", "").encode())) == [b"200"]
        marker = b'{"rows":%d}' % len(rows)
        up.requests.append(rows)
        up.worker.final(address, marker, *(row.upper() for row in rows))
        up.handle_all(asked)
    lost = bodies.index(rows[0])
    assert asked.outcomes[lost].text.startswith("the request was closed")
    del asked.outcomes[lost]
    assert asked.outcomes == [[body.upper()] for body in bodies if body != rows[0]]


# ── what goes into a pack ────────────────────────────────────────────────────────────────────────────────────────────


def claimed(number, body=b"body", **fields):
    made = Claimed(number, new_uuid(), "up", "me", 1, 0, 0, 0, None, None, pack([body]), "ann")
    return made._replace(**fields)


def lane(*requests, rows=100, row=True):
    size = pack_size()
    size.rows, size.understood = rows, True
    made = Lane("up", size)
    for each in requests:
        made.add(each, row=row)
    return made


def taken(made):
    packs = []
    while made.buffer:
        packs.append([each.claimed.id for each in made.take().members])
    return packs


def test_only_rows_of_the_same_owner_with_the_same_headers_share_a_pack(monkeypatch):
    monkeypatch.setattr(lanes, "MIN_PACKS", 1)
    others = [claimed(3, owner="bob"), claimed(4, headers='{"a":"b"}'), claimed(5), claimed(6), claimed(7, attempt=2)]
    two_frames = claimed(8, body=b"")._replace(body=pack([b"a", b"b"]))
    assert taken(lane(claimed(1), claimed(2), *others, two_frames)) == [[1, 2], [3], [4], [5, 6], [7], [8]]
    assert taken(lane(claimed(1), claimed(2), row=False)) == [[1], [2]]


def test_the_size_of_packs_is_limited(monkeypatch):
    monkeypatch.setattr(lanes, "MAX_PACKED_BYTES", 3 * len(claimed(1).body))
    monkeypatch.setattr(lanes, "MIN_PACKS", 1)
    assert taken(lane(*map(claimed, range(5)))) == [[0, 1, 2], [3, 4]]
    assert taken(lane(*map(claimed, range(5)), rows=2)) == [[0, 1], [2, 3], [4]]


def test_several_workers_get_some():
    assert taken(lane(*map(claimed, range(8))))[0] == [0, 1]


def test_room_for_rows_follows_the_size_of_packs():
    made = lane(*map(claimed, range(50)), claimed(51, attempt=2), rows=10)
    made.credit = 3
    assert made.room == 6
    made.take()
    assert (made.room, made.held, made.in_flight) == (60, 51, 1)
    while len(made.buffer) > 1:
        made.take()
    last = made.take()
    assert made.room == 6
    made.executed(last)
    assert made.held == 50
    assert not made.drop(last.members[0])
