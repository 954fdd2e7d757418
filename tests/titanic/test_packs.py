"""Rows that are submitted together go to the workers as packs, over real sockets (docs/titanic.md)."""

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
from zmdp.titanic import dispatcher, lanes, retries, store
from zmdp.titanic.dispatcher import Dispatcher
from zmdp.titanic.frames import pack
from zmdp.titanic.lanes import Lane, pack_size
from zmdp.titanic.metrics import Metrics
from zmdp.titanic.rows import NO_REPLY
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
        eventually(lambda: server._dispatcher._offered.get("up"))
        yield SimpleNamespace(up=up, server=server, stop=stack.close, waiting=lambda: waiting_rows(server))


def waiting_rows(server):
    """Return how many rows wait for their turn."""
    lanes = server._dispatcher._lanes.copy().values()
    return sum(each.rows for lane in lanes for each in list(lane.turns))


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
    monkeypatch.setattr(dispatcher, "MAX_TURN_SECONDS", 0.05)
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
    monkeypatch.setattr(dispatcher, "MAX_TURN_SECONDS", 0.0)
    second = asking_for("second")
    eventually(lambda: len(stored(url)["requests"]) == 40)
    monkeypatch.setattr(dispatcher, "MAX_TURN_SECONDS", TIMEOUT_SECONDS)
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
            await asyncio.to_thread(eventually, lambda: titanic.server._dispatcher._accepting)
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


def test_rows_that_get_their_turn_as_their_caller_goes_away_leave_their_place():
    async def scenario():
        made = new_dispatcher()
        made._offered = {"up": 1}
        lane = made._lane("up")
        lane.held = lane.room
        first = asyncio.ensure_future(made._turn("up", 5, TIMEOUT_SECONDS))
        second = asyncio.ensure_future(made._turn("up", 7, TIMEOUT_SECONDS))
        await asyncio.sleep(0)  # both wait
        lane.held = 0
        made._fill(lane)
        first.cancel()
        assert await second is lane
        assert lane.held == 7

    asyncio.run(scenario())


def new_dispatcher(writer=None):
    return Dispatcher(
        None, writer, None, store.Clock(), lease=10, ttl=None, max_waiting=9, max_deaths=1, callers=None,
        metrics=Metrics(),
    )  # fmt: skip


def test_requests_that_this_titanic_does_not_know_are_put_back():
    """But not while the answer to a transaction may make them known."""
    put_back = []

    class Writer:
        def submit(self, work, item):
            assert work is store.reschedule
            put_back.append(item.id)
            return SimpleNamespace(add_done_callback=lambda callback: None)

    loop = asyncio.new_event_loop()
    first, second = loop.create_future(), loop.create_future()
    made = new_dispatcher(Writer())
    made._accepting = {first}
    for _ in range(3):
        made._put_back_strays({7: 1, 8: 1})
    assert put_back == []
    made._accepting = {second}  # it began after they were seen
    made._running[8] = None  # the answer to the first has made it known
    made._put_back_strays({7: 1, 8: 1})
    assert put_back == [7]
    loop.close()


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


def taken(made, *, at_once=False):
    """Return the ids of the requests in each pack; each pack is answered before the next one, or all are `at_once`."""
    packs = []
    while made.buffer:
        packs.append([each.claimed.id for each in made.take().members])
        made.packs *= at_once
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
    assert [len(ids) for ids in taken(lane(*map(claimed, range(30))), at_once=True)] == [8, 8, 7, 7]


def test_a_pack_that_is_not_full_waits_while_enough_are_being_executed():
    made = lane(*map(claimed, range(lanes.MIN_PACKS)), rows=3)
    made.credit = 100
    sent = [made.take() for _ in range(lanes.MIN_PACKS)]
    for number in (10, 11, 12):
        made.add(claimed(number), row=True)
        assert made.is_free() == (number == 12)  # it is full
    made.executed(sent.pop())
    made.take()
    made.add(claimed(13), row=True)
    assert not made.is_free()
    assert made.is_free(patient=False)
    made.executed(sent.pop())
    assert made.is_free()


@pytest.mark.parametrize(("under_way", "following"), [("rows", "single"), ("singles", "row")])
def test_only_rows_wait_and_only_for_rows(under_way, following):
    made = lane(*map(claimed, range(lanes.MIN_PACKS)), rows=3, row=under_way == "rows")
    made.credit = 100
    for _ in range(lanes.MIN_PACKS):
        made.take()
    made.add(claimed(10), row=following == "row")
    assert made.is_free()


def test_rows_wait_for_others_only_for_a_moment():
    made = lane(*map(claimed, range(8)), rows=2)
    made.credit = 100
    for _ in range(lanes.MIN_PACKS):
        made.take()
    made.add(claimed(10), row=True)
    assert [each.claimed.id for each in made.take().members] == [10]


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
