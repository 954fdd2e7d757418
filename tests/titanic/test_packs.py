"""Rows that are submitted together go to the workers as packs, over real sockets (docs/how-to/titanic.md)."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from support.peers import Silence
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import connected, running_bench, serving, stored

from zmdp.clients import AsyncClient, Client
from zmdp.mdp.rows import read_reply
from zmdp.titanic import acceptance, lanes, retries, store
from zmdp.titanic.frames import pack
from zmdp.titanic.rows import NO_REPLY
from zmdp.workers.handling import Failed

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)


@pytest.fixture
def url(engine):
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(lanes, "TARGET_SECONDS", TIMEOUT_SECONDS)  # however slow the machine is, packs grow
    monkeypatch.setattr(lanes, "MIN_PACKS", 1)
    monkeypatch.setattr(retries, "BACKOFF_SECONDS", (0.01, 0.02))
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
                _, _, _, address, _, _, options, *rows = self.worker.command(0.05)
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


# ── rows that are stored when workers can take them ──────────────────────────────────────────────────────────────────


@pytest.fixture
def claims():
    """The claims that are made, of which rows that run at once need none."""
    seen = []

    def watch(connection, cursor, statement, *others):
        if statement.startswith(store.claims._READY.split("{0}")[0]):
            seen.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", watch)
    yield seen
    sa.event.remove(sa.Engine, "before_cursor_execute", watch)


@pytest.fixture
def titanic(bench, url):
    """A Titanic that knows the worker `up`, of which it may get two requests at a time."""
    up = Up(bench)
    with ExitStack() as stack:
        server = stack.enter_context(serving(bench.endpoint, url))
        rooms = server._rooms
        eventually(lambda: rooms.dispatcher.offered.get("up"))

        def waiting():
            """Return how many rows wait for their turn."""
            return sum(turn.rows for lane in dict(rooms.dispatcher.lanes).values() for turn in list(lane.turns))

        yield SimpleNamespace(up=up, rooms=rooms, waiting=waiting, stop=stack.close)


def submit(client, name):
    """Send 20 rows to `up` through Titanic; return their outcomes."""
    pairs = [frame for n in range(20) for frame in (f"{name}/{n}".encode(), f"{name} {n}".encode())]
    reply = client.request("titanic.request", b"up", *pairs, options={"rows": 20})
    return read_reply(list(reply), 20) or reply


def replies(name):
    return [[f"{name} {n}".upper().encode()] for n in range(20)]


@pytest.fixture
def asking_for(bench):
    """Return a function that submits rows in a thread."""
    with (
        ThreadPoolExecutor() as pool,
        Client(bench.endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client,
    ):
        yield lambda name: pool.submit(submit, client, name)


class All:
    """Several askers."""

    def __init__(self, *asked):
        self.asked = asked

    def done(self):
        return all(each.done() for each in self.asked)


def test_rows_run_at_once_in_the_order_in_which_they_came(titanic, asking_for, url, claims):
    first = asking_for("first")
    eventually(lambda: len(stored(url)["requests"]) == 20)
    second = asking_for("second")
    eventually(titanic.waiting)
    third = asking_for("third")
    eventually(lambda: titanic.waiting() == 40)
    assert len(stored(url)["requests"]) == 20  # the others are stored once the worker is free
    titanic.up.handle_all(All(first, second, third))
    assert [first.result(), second.result(), third.result()] == [replies("first"), replies("second"), replies("third")]
    rows = stored(url)["requests"]
    assert [row["key"].split("/")[0] for row in rows] == ["first"] * 20 + ["second"] * 20 + ["third"] * 20
    assert {(row["state"], row["attempts"]) for row in rows} == {("done", 1)}
    assert claims == []


@on_sqlite
def test_rows_do_not_wait_for_ever_to_be_stored(titanic, asking_for, url, monkeypatch):
    monkeypatch.setattr(acceptance, "MAX_TURN_SECONDS", 0.05)
    first = asking_for("first")
    eventually(lambda: len(stored(url)["requests"]) == 20)
    second = asking_for("second")
    eventually(lambda: [row["state"] for row in stored(url)["requests"]][20:] == ["pending"] * 20)
    titanic.up.handle_all(All(first, second))
    assert second.result() == replies("second")


@on_sqlite
def test_rows_that_were_stored_before_come_first(titanic, asking_for, url, monkeypatch):
    first = asking_for("first")
    eventually(lambda: len(stored(url)["requests"]) == 20)
    monkeypatch.setattr(acceptance, "MAX_TURN_SECONDS", 0.0)
    second = asking_for("second")
    eventually(lambda: len(stored(url)["requests"]) == 40)
    monkeypatch.setattr(acceptance, "MAX_TURN_SECONDS", TIMEOUT_SECONDS)
    third = asking_for("third")
    eventually(titanic.waiting)
    titanic.up.handle_all(All(first, second, third))
    order = [row.split()[0] for rows in titanic.up.requests for row in rows]
    assert order == [b"first"] * 20 + [b"second"] * 20 + [b"third"] * 20


@on_sqlite
def test_rows_of_a_caller_that_goes_away_before_they_are_stored(titanic, asking_for, bench, url):
    async def give_up():
        async with AsyncClient(bench.endpoint, timeout=TIMEOUT_SECONDS) as client:
            asked = asyncio.ensure_future(client.request("titanic.request", b"up", b"k", b"x", options={"rows": 1}))
            await asyncio.to_thread(eventually, titanic.waiting)
            asked.cancel()
            await asyncio.to_thread(eventually, lambda: not titanic.waiting())

    first = asking_for("first")
    eventually(lambda: len(stored(url)["requests"]) == 20)
    asyncio.run(give_up())
    titanic.up.handle_all(first)
    second = asking_for("second")
    titanic.up.handle_all(second)
    assert len(stored(url)["requests"]) == 40
    assert second.result() == replies("second")


@on_sqlite
def test_rows_of_a_caller_that_goes_away_while_they_are_stored(titanic, bench, url):
    """They are executed all the same, because they are stored."""

    async def give_up():
        async with AsyncClient(bench.endpoint, timeout=TIMEOUT_SECONDS) as client:
            asked = asyncio.ensure_future(
                client.request("titanic.request", b"up", b"k", b"x", b"l", b"y", options={"rows": 2})
            )
            await asyncio.to_thread(eventually, lambda: titanic.rooms.acceptance.accepting)
            asked.cancel()
            await client.request("mmi.service", b"up")  # the broker has heard of it

    with connected(url) as connection:
        connection.exec_driver_sql("UPDATE titanic_counters SET value = value")  # locks the database
        asyncio.run(give_up())
    titanic.up.handle_all(
        SimpleNamespace(done=lambda: [row["state"] for row in stored(url)["requests"]] == ["done"] * 2)
    )
    assert {row["attempts"] for row in stored(url)["requests"]} == {1}


@on_sqlite
def test_rows_that_wait_when_titanic_stops_are_stored(titanic, asking_for, url):
    first = asking_for("first")
    eventually(lambda: len(stored(url)["requests"]) == 20)
    second = asking_for("second")
    eventually(titanic.waiting)
    titanic.stop()
    assert second.result(TIMEOUT_SECONDS) == [NO_REPLY] * 20
    assert first.result(TIMEOUT_SECONDS) == [NO_REPLY] * 20
    assert [row["state"] for row in stored(url)["requests"]] == ["pending"] * 40
