"""Packs of rows at both kinds of workers, over real sockets."""

import asyncio
import re
import threading
from contextlib import contextmanager

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS

from zmdp.clients import AsyncClient, Client
from zmdp.mdp.errors import ServiceError
from zmdp.mdp.rows import read_reply, worked_seconds
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, Last, Request, Worker, current_request, rows
from zmdp.workers.handling import MAX_BODY, Failed
from zmdp.workers.rows import Pack, is_pack


@pytest.fixture
def server():
    with running_broker(limits=LIMITS, drain_timeout=0.0) as running:
        yield running


@contextmanager
def offering(server, handler, kind, **given):
    """Run a worker of this kind for the service `up`."""
    made = {"broker": server.endpoints[0], **BEATS, **given}
    if kind == "threads":
        with Worker("up", handler, **made):
            yield
        return
    worker = AsyncWorker("up", handler, **made)
    thread = threading.Thread(target=asyncio.run, args=(worker.run(),))
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


def pack(server, *frames, **options):
    """Return the outcomes of a pack."""
    with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        reply = client.request("up", *frames, options={"rows": len(frames), **options})
    return read_reply(list(reply), len(frames))


def up(request):
    (frame,) = request
    assert current_request() is request
    if frame == b"odd":
        raise ServiceError(422, "odd")
    if frame == b"bad":
        raise ValueError("no good")
    if frame == b"wrong":
        return 5
    return frame.upper()


async def async_up(request):
    return up(request)


async def waiting_up(request):
    await asyncio.sleep(0)
    return up(request)


KINDS = [("threads", up), ("asyncio", async_up), ("asyncio", waiting_up)]


@pytest.mark.parametrize(("kind", "handler"), KINDS)
def test_each_row_has_its_own_outcome(server, kind, handler):
    with offering(server, handler, kind):
        assert pack(server, b"a", b"bad", b"b", b"odd", b"", b"wrong") == [
            [b"A"], Failed(500, "ValueError: no good"), [b"B"], Failed(422, "odd", (b"",)), [b""],
            Failed(500, "zmdp.mdp.errors.HandlerError: a handler returned 5: expected bytes, a list of bytes, or None"),
        ]  # fmt: skip
        assert pack(server, b"bad") == [Failed(500, "ValueError: no good")]
        assert pack(server, *[b"x"] * 1000) == [[b"X"]] * 1000


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_stream_is_the_reply_to_its_row(server, kind):
    def stream(request):
        yield request[0]
        if request[0] == b"bad":
            raise ValueError("no good")
        if request[0] == b"final":
            yield Last(b"early")
        return [b"1", b"2"]

    async def async_stream(request):
        yield request[0]
        if request[0] == b"bad":
            raise ValueError("no good")
        yield Last(b"early" if request[0] == b"final" else [b"1", b"2"])

    with offering(server, stream if kind == "threads" else async_stream, kind):
        assert pack(server, b"a", b"bad", b"final") == [
            [b"a", b"1", b"2"], Failed(500, "ValueError: no good"), [b"final", b"early"],
        ]  # fmt: skip


def test_an_async_stream_without_a_final(server):
    async def stream(request):
        yield request[0]

    with offering(server, stream, "asyncio"):
        assert pack(server, b"a") == [[b"a", b""]]


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_with_a_codec(server, kind):
    def double(value):
        return 2 * value

    async def async_double(value):
        return 2 * value

    with offering(server, double if kind == "threads" else async_double, kind, codec="json"):
        first, unreadable, last = pack(server, b"1", b"{", b"[3]")
    assert (first, last) == ([b"2"], [b"[3,3]"])
    assert unreadable.code == 400


@pytest.mark.parametrize(("kind", "handler"), KINDS)
def test_other_requests_are_not_packs(server, kind, handler):
    """Without the option, or with another number, the handler gets all frames, and its error is the request's."""
    with offering(server, handler, kind), Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        assert client.request("up", b"a") == [b"A"]
        for options in (None, {"rows": 3}, {"rows": "2"}, {"columns": "rows"}):
            with pytest.raises(ServiceError, match="too many values"):
                client.request("up", b"a", b"b", options=options)


def test_rows_run_concurrently_up_to_the_limit(server):
    """Six rows at a time: the first twelve wait for each other in two groups; no more than six ever run."""
    running, most = 0, 0

    async def handler(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 6:
            full.set()
        await full.wait()
        running -= 1
        return request[0]

    full = asyncio.Event()
    with offering(server, handler, "asyncio", concurrency=6):
        assert pack(server, *[b"%d" % n for n in range(12)]) == [[b"%d" % n] for n in range(12)]
    assert most == 6


def test_rows_have_tasks_of_their_own(server):
    """`asyncio.timeout` cancels the row that it belongs to."""

    async def handler(request):
        tasks.add(id(asyncio.current_task()))
        if request[0] == b"slow":
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()
            finally:
                timed_out.set()
        await timed_out.wait()
        return request[0]

    tasks, timed_out = set(), asyncio.Event()
    with offering(server, handler, "asyncio"):
        first, slow, last = pack(server, b"a", b"slow", b"b")
    assert (first, last) == ([b"a"], [b"b"])
    assert slow.text.startswith("TimeoutError")
    assert len(tasks) == 3


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_cancelled_pack_stops_between_rows(server, kind):
    begun, handled = threading.Event(), []

    def handler(request):
        handled.append(request[0])
        begun.set()
        eventually(lambda: request.cancelled)

    async def async_handler(request):
        handled.append(request[0])
        begun.set()
        await asyncio.Event().wait()

    async def cancel():
        async with AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            task = asyncio.create_task(client.request("up", b"1", b"2", b"3", options={"rows": 3}))
            await asyncio.to_thread(begun.wait, TIMEOUT_SECONDS)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with offering(server, handler if kind == "threads" else async_handler, kind, concurrency=1):
        asyncio.run(cancel())
        eventually(lambda: not server.broker.registry.numbered)
    assert handled == [b"1"]


@pytest.mark.parametrize(("kind", "handler"), [KINDS[0], KINDS[2]])
def test_large_replies_come_in_groups(server, kind, handler, monkeypatch):
    monkeypatch.setattr(rows, "MAX_GROUP_BYTES", 10)
    bodies = [b"12345", b"12345", b"bad", b"1", b"1" * 50, b"", b"x"]
    with offering(server, handler, kind), Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        parts = list(client.stream("up", *bodies, options={"rows": len(bodies)}))
    assert [re.sub(rb',"ms":[0-9.]+', b"", part[0]) for part in parts] == [
        b'{"rows":2}', b'{"rows":1,"frames":[0],"failed":{"0":[500,"ValueError: no good",false]}}', b'{"rows":1}',
        b'{"rows":1}', b'{"rows":2}',
    ]  # fmt: skip
    reply = read_reply([frame for part in parts for frame in part], len(bodies))
    assert [each for each in reply if isinstance(each, list)] == [[b.upper()] for b in bodies if b != b"bad"]


# ── handlers of whole packs ──────────────────────────────────────────────────────────────────────────────────────────


def whole(values):
    calls.append(list(values))
    return [ServiceError(422, "odd") if value == b"odd" else 5 if value == b"wrong" else value * 2 for value in values]


async def async_whole(values):
    return whole(values)


async def async_whole_stream(values):
    for value in whole(values):
        yield value


calls = []
WHOLE = [("threads", whole), ("threads", lambda values: iter(whole(values))), ("asyncio", async_whole),
         ("asyncio", async_whole_stream)]  # fmt: skip


@pytest.mark.parametrize(("kind", "handler"), WHOLE)
def test_a_handler_of_whole_packs(server, kind, handler):
    calls.clear()
    with offering(server, handler, kind, rows=True), Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        found = pack(server, b"a", b"odd", b"wrong", b"b")
        assert found[0] == [b"aa"]
        assert found[1] == Failed(422, "odd", (b"",))
        assert "a handler returned 5" in found[2].text
        assert found[3] == [b"bb"]
        assert calls == [[b"a", b"odd", b"wrong", b"b"]]
        assert client.request("up", b"a", b"b") == [b"aa", b"bb"]  # a client that does not know packs
        with pytest.raises(ServiceError, match="odd"):
            client.request("up", b"a", b"odd")


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_handler_of_whole_packs_with_a_codec(server, kind):
    def add(values):
        return [value + 1 for value in values]

    async def async_add(values):
        return add(values)

    handler = add if kind == "threads" else async_add
    given = {"codec": "json", "rows": True}
    with offering(server, handler, kind, **given), Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        first, unreadable, last = pack(server, b"1", b"{", b"3")
        assert (first, unreadable.code, last) == ([b"2"], 400, [b"4"])
        assert pack(server, b"{")[0].code == 400
        assert client.request("up", b"5") == [b"6"]


@pytest.mark.parametrize("result", [[], None, b"x", [b"1", b"2", b"3"]])
def test_a_handler_of_whole_packs_returns_a_value_for_each_row(server, result):
    with offering(server, lambda values: result, "threads", rows=True):
        with pytest.raises(ServiceError, match="expected a list of 2, one for each row"):
            pack(server, b"a", b"b")


def test_a_copy_has_the_setting():
    assert Worker("up", up, rows=True).copy().settings.rows


# ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_reply_that_no_broker_takes(monkeypatch):
    request = Request([b"a", b"b"], service="up", client=b"c")
    monkeypatch.setattr(rows, "is_pack", lambda request: True)
    made = Pack(request)
    made.record(1, [b"x" * MAX_BODY, b"x"])
    made.record(0, [b"y"])
    assert not made.groups
    first, second = read_reply(made.last(), 2)
    assert first == [b"y"]
    assert (second.code, "too many for a reply" in second.text) == (413, True)


def test_how_long_a_worker_has_worked():
    assert worked_seconds([b'{"rows":1,"ms":2.5}', b"x"]) == 0.0025
    assert worked_seconds([b'{"rows":1,"ms":3,"frames":[1]}', b"x"]) == 0.003
    assert worked_seconds(made_by_a_worker()) >= 0
    for reply in ([], [b'{"rows":1}', b"x"], [b'{"rows":1,"ms":-1}', b"x"], [b'{"rows":1,"ms":1e9}', b"x"], [b"x"]):
        assert worked_seconds(reply) is None


def made_by_a_worker():
    request = Request([b"a"], service="up", client=b"c")
    made = Pack(request)
    made._start(1)
    made.record(0, [b"A"])
    return made.last()


@pytest.mark.parametrize(
    "reply",
    [
        [], [b"x"], [b"x", b"y"], [b'{"rows":2}', b"x"], [b'{"rows":2}', b"x", b"y", b"z"],
        [b'{"rows":2'], [b'{"rows":"2"}'], [b'{"rows":2,"frames":[1]}', b"x"],
        [b'{"rows":2,"frames":[-1,3]}', b"x", b"y"], [b'{"rows":3}', b"x", b"y", b"z"],
        [b'{"rows":2,"frames":[1,0],"failed":{"1":[1]}}', b"x"], [b'{"rows":2,"failed":5}', b"x", b"y"],
    ],
)  # fmt: skip
def test_replies_of_workers_that_do_not_know_packs(reply):
    assert read_reply(reply, 2) is None


def test_requests_without_options_are_not_packs():
    assert not is_pack(Request([b"a"], service="up", client=b"c"))
