"""Rows in packs, over real sockets."""

import threading
from contextlib import closing
from itertools import count
from typing import NamedTuple

import pytest
from support.processes import SHORT_TIMEOUTS, TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS

from zmdp.clients import AsyncClient
from zmdp.clients.rows import Chunk, Lookahead, PackSize, RowSettings, answer_chunks, availability, calls, packs
from zmdp.clients.rows import lookahead as lookaheads
from zmdp.mdp.errors import BrokerUnreachable, RequestError, RequestTimeout, ServiceError
from zmdp.testing import running_broker
from zmdp.workers import Worker


@pytest.fixture
def server():
    with running_broker(limits=LIMITS, drain_timeout=0.0) as running:
        yield running


class Answer(NamedTuple):
    """What a row has resulted in."""

    reply: object = None
    code: object = None
    error: object = None


def answer(outcome):
    if isinstance(outcome, RequestError):
        code = 408 if isinstance(outcome, RequestTimeout) else outcome.code
        return Answer(None, code, outcome.text or str(outcome))
    return Answer(outcome.decode(errors="replace") if isinstance(outcome, bytes) else outcome, 200)


def asking(server, chunks, **given):
    """Return the generator of answered chunks."""
    endpoint = server if isinstance(server, str) else server.endpoints[0]
    settings = RowSettings(**{"window": 4, "rows_per_request": 1, "timeout": TIMEOUT_SECONDS, **given})
    return answer_chunks(chunks, settings, lambda: AsyncClient(endpoint, timeout=TIMEOUT_SECONDS))


def worker(server, handler, service="up", **given):
    return Worker(service, handler, broker=server.endpoints[0], **BEATS, **given)


def up(request):
    return [frame.upper() for frame in request]


def until_cancelled(request):
    eventually(lambda: request.cancelled)


def ask(server, *chunks, **given):
    """Return all answers in one list."""
    asked = (Chunk("up", chunk, number) for number, chunk in enumerate(chunks))
    found = list(asking(server, asked, **given))
    assert [chunk.tag for chunk in found] == list(range(len(chunks)))
    return [answer(outcome) for chunk in found for outcome in chunk.outcomes]


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("most", [1, 2, 1004])
def test_answers_keep_the_order_of_rows(server, most):
    """The first of every four requests waits until another one has arrived."""

    def slow_first(request):
        if request[0] == b"0":
            second.wait(TIMEOUT_SECONDS)
        elif request[-1] >= b"2":
            second.set()
        return up(request)

    second = threading.Event()
    if most == 1004:
        second.set()
    with worker(server, slow_first, concurrency=3):
        found = ask(server, [b"0", b"1", b"2"], [], [b"3"], rows_per_request=most)
    assert found == [Answer(str(n), 200, None) for n in range(4)]


def test_the_window_limits_outstanding_requests(server):
    most = [0]

    def handler(request):
        most[0] = max(most[0], len(server.broker.registry.numbered))
        return request

    with worker(server, handler, concurrency=2):
        ask(server, [b"x"] * 100, window=3)
    assert most[0] in {2, 3}


def test_chunks_are_requested_lazily(server):
    """Reading only the first chunk does not send all of them."""
    taken = []

    def chunks():
        for number in range(100):
            taken.append(number)
            yield Chunk("up", [b"x"] * lookaheads.MIN_CHUNK_ROWS)

    with worker(server, up), closing(asking(server, chunks())) as found:
        next(found)
        assert len(taken) == 2


def test_small_chunks_share_the_window(server):
    """Six rows in six chunks are outstanding at once: the handlers wait for each other."""
    together = threading.Barrier(6, timeout=TIMEOUT_SECONDS)

    def handler(request):
        together.wait()
        return request

    with worker(server, handler, concurrency=6):
        found = ask(server, *([b"%d" % n] for n in range(6)), window=6)
    assert [answer.code for answer in found] == [200] * 6


def test_closing_early_cancels_outstanding_requests(server):
    begun, cancelled = threading.Event(), threading.Event()

    def handler(request):
        if request[0] == b"first":
            begun.wait(TIMEOUT_SECONDS)
            return request
        begun.set()
        while not request.cancelled:
            pass
        cancelled.set()
        return request

    with worker(server, handler, concurrency=2):
        chunks = (Chunk("up", each) for each in ([b"first"], [b"second"], *[[b"third"] * 200] * 2))
        with closing(asking(server, chunks)) as found:
            assert next(found).outcomes == [b"first"]
        assert cancelled.wait(TIMEOUT_SECONDS)
    eventually(lambda: not server.broker.registry.numbered)


def test_headers_reach_the_service(server):
    with worker(server, lambda request: request.headers["who"].encode()):
        assert ask(server, [b"x"], headers={"who": "ann"}) == [Answer("ann", 200)]


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_affects_only_its_request(server):
    def handler(request):
        if b"bad" in request:
            raise ValueError("no good")
        if b"odd" in request:
            raise ServiceError(422, "odd")
        return request

    with worker(server, handler):
        found = ask(server, [b"a", b"bad", b"odd", b"b"])
        assert found == [
            Answer("a", 200), Answer(None, 500, "ValueError: no good"), Answer(None, 422, "odd"), Answer("b", 200),
        ]  # fmt: skip
        for most in (2, 4, None):
            assert ask(server, [b"a", b"bad", b"odd", b"b"], rows_per_request=most) == found


def test_a_handler_that_takes_too_long(server):
    def handler(request):
        if request[0] == b"slow":
            until_cancelled(request)
        return request

    with worker(server, handler, concurrency=2 * len(SHORT_TIMEOUTS)):
        for timeout in SHORT_TIMEOUTS:
            slow, fast = ask(server, [b"slow", b"fast"], timeout=timeout)
            if fast.code == 200:
                break
    assert (slow.code, slow.reply) == (408, None)
    assert fast == Answer("fast", 200)


def test_an_unknown_service(server):
    """The first window waits for a worker; following rows fail at once."""
    found = ask(server, *[[b"x"] * 600] * 3, timeout=2)
    assert {(answer.reply, answer.code) for answer in found} == {(None, 404)}
    assert {answer.error for answer in found} == {"no worker offered service 'up' within 2 s"}
    assert server.broker.stats.requests < 100


def test_a_service_that_returns(server, monkeypatch):
    monkeypatch.setattr(availability, "RECHECK_SECONDS", 0.0)
    codes = []
    first, second = [b"x"] * 600, [b"x"] * 600
    with closing(asking(server, (Chunk("up", each) for each in (first, second)), timeout=3)) as found:
        codes.append({answer(each).code for each in next(found).outcomes})
        with worker(server, up):
            eventually(lambda: server.broker.directory.workers)
            (last,) = found
    assert codes == [{404}]
    assert last.outcomes[-1] == b"X"


def test_a_broker_that_starts_late(monkeypatch):
    monkeypatch.setattr(availability, "RECHECK_SECONDS", 0.05)
    with running_broker(limits=LIMITS, drain_timeout=0.0) as gone:
        (at,) = gone.endpoints
    chunks = (Chunk("up", [b"x"] * 600) for _ in count())
    with closing(asking(at, chunks, timeout=3)) as found:
        outcomes = next(found).outcomes
        assert {type(each) for each in outcomes} == {BrokerUnreachable}
        assert "nothing is listening there" in str(outcomes[-1])
        with running_broker(at, limits=LIMITS, drain_timeout=0.0) as server, worker(server, up):
            assert any(chunk.outcomes[-1] == b"X" for chunk in found)


def test_temporary_refusals_are_retried(server):
    refused = []

    def handler(request):
        if request[0] == b"never" or len(refused) < 3:
            refused.append(request)
            raise ServiceError(429, "not now")
        return request

    with worker(server, handler):
        assert ask(server, [b"x"]) == [Answer("x", 200)]
        for timeout in SHORT_TIMEOUTS:
            found = ask(server, [b"never"], timeout=timeout)
            if found[0].code == 429:
                break
        assert found == [Answer(None, 429, "not now")]


def test_replies_with_the_wrong_number_of_frames(server):
    def handler(request):
        yield b"part"
        return request

    with worker(server, handler):
        for most in (1, 2, None):
            answers = ask(server, [b"x", b"y"], rows_per_request=most)
            assert answers == [Answer([b"part", b"x"], 200), Answer([b"part", b"y"], 200)]
    with worker(server, handler, protocol="0.2"):
        eventually(lambda: server.broker.directory.workers)
        message = "the reply has 3 frames; a request of 2 rows needs 2 frames"
        assert ask(server, [b"x", b"y"], rows_per_request=2) == [Answer(None, 500, message)] * 2


def test_invalid_services(server):
    with worker(server, up):
        chunks = [Chunk("no\nname", [b"x"]), Chunk("up", [b"x"])]
        found = [answer(outcome) for chunk in asking(server, chunks) for outcome in chunk.outcomes]
    assert [each.code for each in found] == [400, 200]


def test_a_row_that_is_too_large_is_not_sent(server, monkeypatch):
    monkeypatch.setattr(calls, "MAX_BODY", 10)
    with worker(server, up):
        large, right = ask(server, [b"x" * 11, b"x" * 10])
    assert large == Answer(None, 413, "the request has 11 bytes; the limit is 10")
    assert right.code == 200


def test_unexpected_errors_go_into_the_rows(server, monkeypatch):
    monkeypatch.setattr(calls, "read_outcomes", lambda *given: 1 / 0)
    with worker(server, up):
        assert ask(server, [b"x"], rows_per_request=None) == [Answer(None, 500, "ZeroDivisionError: division by zero")]


# ── packs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_packed_automatically(server):
    """Each bad row fails alone, and the requests are far fewer than the rows."""

    def handler(request):
        if request[0] == b"bad":
            raise ValueError("no good")
        return up(request)

    bodies = [b"bad" if n % 100 == 7 else b"x" for n in range(5000)]
    with worker(server, handler):
        found = ask(server, [*bodies], rows_per_request=None)
    bad = Answer(None, 500, "ValueError: no good")
    assert found == [bad if body == b"bad" else Answer("X", 200) for body in bodies]
    assert server.broker.stats.requests < 500


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_workers_that_do_not_understand_packs(server, protocol):
    """They get one row per request, and no row twice."""
    handled = []

    def handler(request):
        handled.append(list(request))
        return request[0]

    bodies = [b"%d" % n for n in range(500)]
    with worker(server, handler, protocol=protocol):
        assert [each.reply for each in ask(server, [*bodies], rows_per_request=None)] == [b.decode() for b in bodies]
    assert sorted(handled) == sorted([body] for body in bodies)


def test_a_worker_that_does_not_understand_packs_appears_later(server):
    def chunks():
        for _ in range(6):
            yield Chunk("up", [b"x"] * 300)
        with worker(server, lambda request: request[0].upper(), protocol="0.2"):
            eventually(lambda: len(server.broker.directory.workers) == 2)
            for _ in range(6):
                yield Chunk("up", [b"x"] * 300)

    with worker(server, up):
        found = list(asking(server, chunks(), rows_per_request=None))
    assert {outcome for chunk in found for outcome in chunk.outcomes} == {b"X"}


def test_a_handler_of_whole_packs_that_raises(server):
    """Its packs are divided until the bad row is alone."""

    def handler(values):
        if b"bad" in values:
            raise ValueError("no good")
        return [value.upper() for value in values]

    bodies = [b"bad" if n == 333 else b"x" for n in range(1000)]
    with worker(server, handler, rows=True):
        found = ask(server, [*bodies], rows_per_request=None)
    assert found == [Answer(None, 500, "ValueError: no good") if b == b"bad" else Answer("X", 200) for b in bodies]


def test_a_slow_row_does_not_fail_its_pack(server):
    def handler(request):
        if request[0] == b"slow":
            until_cancelled(request)
        return request

    with worker(server, handler, concurrency=2 * len(SHORT_TIMEOUTS)):
        for timeout in SHORT_TIMEOUTS:
            found = ask(server, [b"a", b"slow", b"b"], rows_per_request=3, timeout=timeout)
            if found[-1].code == 200:
                break
    assert [answer.code for answer in found] == [200, 408, 200]


def test_rows_that_are_refused_for_now_are_sent_again(server):
    refused = []

    def handler(request):
        if request[0] == b"busy" and len(refused) < 3:
            refused.append(request)
            raise ServiceError(429, "not now")
        return request

    with worker(server, handler):
        found = ask(server, [b"a", b"busy", b"b"], rows_per_request=3)
    assert found == [Answer("a", 200), Answer("busy", 200), Answer("b", 200)]
    assert len(refused) == 3


def test_outstanding_bytes_are_limited(server, monkeypatch):
    """The window alone would allow all ten rows."""
    monkeypatch.setattr(calls, "MAX_OUTSTANDING_BYTES", 25)
    most = [0]

    def handler(request):
        most[0] = max(most[0], len(server.broker.registry.numbered))
        return request

    with worker(server, handler):
        found = ask(server, [b"1234567890"] * 100, window=10)
    assert {answer.code for answer in found} == {200}
    assert most[0] in {2, 3}


def test_packing_rows(monkeypatch):
    monkeypatch.setattr(packs, "MAX_PACKED_BYTES", 4)
    chunk = Chunk("up", [b"1", b"23", b"4", b"5", b"6", b"1234567", b"", b"", b"", b""])
    taken = []
    while chunk.unsent:
        taken.append(chunk.take(3))
    assert [(pack.start, pack.rows) for pack in taken] == [
        (0, [b"1", b"23", b"4"]), (3, [b"5", b"6"]), (5, [b"1234567"]), (6, [b"", b"", b""]), (9, [b""]),
    ]  # fmt: skip
    assert [pack.size for pack in taken] == [4, 2, 7, 0, 0]


def test_packs_grow_while_requests_are_quick():
    size = PackSize()
    for seconds, expected in ((0.045, 2), (0.02, 10), (0.001, 80)):
        size.replied(size.rows, seconds)
        assert size.rows == expected
    size.replied(30, 0.01)  # a smaller one says nothing
    size.replied(80, 0.1)
    assert size.rows == 80
    size.replied(30, 1.0)
    assert size.rows == 80
    size.replied(80, 0.3)
    assert size.rows == 40
    for _ in range(20):
        size.replied(size.rows, 0.01)
    assert size.rows == packs.MAX_AUTO_ROWS
    size.replied(1, 0.01, understood=False)
    assert (size.rows, size.understood) == (1, False)
    size.replied(1, 0.04)
    assert (size.rows, size.understood) == (2, True)
    size.failed()
    assert size.rows == 1


def test_packs_grow_by_the_work_that_they_are_however_long_they_wait():
    size = PackSize()
    for worked, expected in ((0.0001, 8), (0.0008, 64), (0.0064, 64), (0.0024, 256), (0.03, 128)):
        size.replied(size.rows, 0.1, worked)
        assert size.rows == expected
    size.replied(size.rows, 2.1, 0.001)  # but they wait too long
    assert size.rows == 64


def test_a_pack_waits_for_rows_while_enough_others_are_outstanding():
    size = PackSize(rows=10, min_packs=4)
    assert [size.now(waiting, 0) for waiting in (1, 5, 40, 100)] == [1, 2, 10, 10]
    assert [size.now(12, outstanding) for outstanding in range(5)] == [3, 4, 6, 10, 10]
    assert [size.now(9, outstanding) for outstanding in range(5)] == [3, 3, 5, 9, 0]


def test_chunks_are_large_enough_for_the_window():
    assert Lookahead(RowSettings(window=1, rows_per_request=1)).rows == lookaheads.MIN_CHUNK_ROWS
    lookahead = Lookahead(RowSettings(window=64, rows_per_request=10))
    chunk = Chunk("up", [b"x"] * 10)
    lookahead.taken(chunk)
    assert lookahead.rows == 1280
    assert lookahead.rows_of_size(1 << 20) == 64
    assert lookahead.rows_of_size(1 << 30) == 1
    lookahead = Lookahead(RowSettings(window=1))
    for _ in range(10):
        lookahead.taken(chunk)
    assert lookahead.rows == lookaheads.MAX_CHUNK_ROWS


def test_large_rows_and_replies_limit_what_is_sent_ahead():
    lookahead = Lookahead(RowSettings(window=1))
    chunk = Chunk("up", [b"x" * (1 << 20)] * 2)
    while lookahead.next() is None:
        lookahead.add(chunk)
    assert lookahead._bytes_ahead == lookaheads.MAX_OUTSTANDING_BYTES
    chunk.outcomes[:] = [b"x" * (1 << 20), ServiceError(500, "no")]
    lookahead.taken(chunk)
    assert lookahead.rows == 128
    chunk.outcomes[:] = [[b"x" * (1 << 20)] * 2] * 2
    lookahead.taken(chunk)
    assert lookahead.rows == 32
