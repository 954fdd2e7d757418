"""The executors' side, without Spark: rows to requests and back, over real sockets."""

import threading
from contextlib import closing
from itertools import count

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, serving

from zmdp.mdp.errors import ServiceError, SettingError
from zmdp.mdp.testing import running_broker
from zmdp.spark.pipeline import availability, calls, packs
from zmdp.spark.pipeline.calls import CallSettings, Lookahead, answer_chunks
from zmdp.spark.pipeline.packs import Answer, Chunk, PackSize, Row
from zmdp.spark.pipeline.replies import RowFailed, unpack_reply
from zmdp.workers import Worker


@pytest.fixture
def server():
    with running_broker(limits=LIMITS, drain_timeout=0.0) as running:
        yield running


def settings(server, **given):
    return CallSettings(broker=server.endpoints[0], **{"window": 4, "timeout": TIMEOUT_SECONDS, **given})


def worker(server, handler, service="up", **given):
    return Worker(service, handler, broker=server.endpoints[0], **BEATS, **given)


def up(request):
    return [frame.upper() for frame in request]


def until_cancelled(request):
    eventually(lambda: request.cancelled)


def rows(*bodies, service="up", **given):
    return [Row(service, body, **given) for body in bodies]


def ask(server, *chunks, **given):
    """Return all answers in one list."""
    asked = (Chunk(chunk, number) for number, chunk in enumerate(chunks))
    found = list(answer_chunks(asked, settings(server, **given)))
    assert [chunk.tag for chunk in found] == list(range(len(chunks)))
    return [answer for chunk in found for answer in chunk.answers]


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
        found = ask(server, rows(b"0", b"1", b"2"), [], rows(b"3", None), rows_per_request=most)
    assert found == [Answer(str(n), 200, None) for n in range(4)] + [Answer()]


def test_the_window_limits_outstanding_requests(server):
    most = [0]

    def handler(request):
        most[0] = max(most[0], len(server.broker.registry.numbered))
        return request

    with worker(server, handler, concurrency=2):
        ask(server, rows(*[b"x"] * 100), window=3)
    assert most[0] in {2, 3}


def test_chunks_are_requested_lazily(server):
    """Reading only the first chunk does not send all of them."""
    taken = []

    def chunks():
        for number in range(100):
            taken.append(number)
            yield Chunk(rows(*[b"x"] * calls.MIN_CHUNK_ROWS))

    with worker(server, up), closing(answer_chunks(chunks(), settings(server))) as found:
        next(found)
        assert len(taken) == 2


def test_small_chunks_share_the_window(server):
    """Six rows in six chunks are outstanding at once: the handlers wait for each other."""
    together = threading.Barrier(6, timeout=TIMEOUT_SECONDS)

    def handler(request):
        together.wait()
        return request

    with worker(server, handler, concurrency=6):
        found = ask(server, *(rows(b"%d" % n) for n in range(6)), window=6)
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
        chunks = (Chunk(each) for each in (rows(b"first", *[None] * 200), rows(b"second", *[None] * 200)))
        with closing(answer_chunks(chunks, settings(server))) as found:
            assert next(found).answers[0] == Answer("first", 200)
        assert cancelled.wait(TIMEOUT_SECONDS)
    eventually(lambda: not server.broker.registry.numbered)


def test_headers_reach_the_service(server):
    with worker(server, lambda request: request.headers["who"].encode()):
        assert ask(server, rows(b"x"), headers={"who": "ann"}) == [Answer("ann", 200)]


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_affects_only_its_request(server):
    def handler(request):
        if b"bad" in request:
            raise ValueError("no good")
        if b"odd" in request:
            raise ServiceError(422, "odd")
        return request

    with worker(server, handler):
        found = ask(server, rows(b"a", b"bad", b"odd", b"b"))
        assert found == [
            Answer("a", 200), Answer(None, 500, "ValueError: no good"), Answer(None, 422, "odd"), Answer("b", 200),
        ]  # fmt: skip
        for most in (2, 4, None):
            assert ask(server, rows(b"a", b"bad", b"odd", b"b"), rows_per_request=most) == found


def test_a_handler_that_takes_too_long(server):
    def handler(request):
        if request[0] == b"slow":
            until_cancelled(request)
        return request

    with worker(server, handler, concurrency=2):
        slow, fast = ask(server, rows(b"slow", b"fast"), timeout=0.5)
    assert (slow.code, slow.reply) == (408, None)
    assert fast == Answer("fast", 200)


def test_an_unknown_service(server):
    """The first window waits for a worker; following rows fail at once."""
    found = ask(server, *[rows(*[b"x"] * 600)] * 3, timeout=0.3)
    assert {(answer.reply, answer.code) for answer in found} == {(None, 404)}
    assert {answer.error for answer in found} == {"no worker offered service 'up' within 0.3 s"}
    assert server.broker.stats.requests < 100


def test_a_service_that_returns(server, monkeypatch):
    monkeypatch.setattr(availability, "RECHECK_SECONDS", 0.0)
    codes = []
    first, second = rows(*[b"x"] * 600), rows(*[b"x"] * 600)
    with closing(answer_chunks((Chunk(each) for each in (first, second)), settings(server, timeout=0.3))) as found:
        codes.append({answer.code for answer in next(found).answers})
        with worker(server, up):
            eventually(lambda: server.broker.registry.workers)
            (last,) = found
    assert codes == [{404}]
    assert last.answers[-1] == Answer("X", 200)


def test_a_broker_that_starts_late(monkeypatch):
    monkeypatch.setattr(availability, "RECHECK_SECONDS", 0.05)
    with running_broker(limits=LIMITS, drain_timeout=0.0) as gone:
        (at,) = gone.endpoints
    asked = CallSettings(broker=at, window=4, timeout=0.3)
    chunks = (Chunk(rows(*[b"x"] * 600)) for _ in count())
    with closing(answer_chunks(chunks, asked)) as found:
        answers = next(found).answers
        assert {answer.code for answer in answers} == {408}
        assert "nothing is listening there" in answers[-1].error
        with running_broker(at, limits=LIMITS, drain_timeout=0.0) as server, worker(server, up):
            assert any(chunk.answers[-1] == Answer("X", 200) for chunk in found)


def test_temporary_refusals_are_retried(server):
    refused = []

    def handler(request):
        if len(refused) < 3:
            refused.append(request)
            raise ServiceError(429, "not now")
        return request

    with worker(server, handler):
        assert ask(server, rows(b"x")) == [Answer("x", 200)]
        refused.clear()
        assert ask(server, rows(b"x"), timeout=0.05) == [Answer(None, 429, "not now")]


def test_replies_with_the_wrong_number_of_frames(server):
    def handler(request):
        yield b"part"
        return request

    with worker(server, handler):
        (found,) = ask(server, rows(b"x"))
        assert found == Answer(None, 500, "the reply has 2 frames; a request of one row needs one frame")
        assert ask(server, rows(b"x", b"y"), rows_per_request=2) == [found] * 2
        for most in (1, None):
            answers = ask(server, rows(b"x", b"y"), rows_per_request=most, result="frames")
            assert answers == [Answer([b"part", b"x"], 200), Answer([b"part", b"y"], 200)]
    with worker(server, handler, protocol="0.2"):
        eventually(lambda: server.broker.registry.workers)
        message = "the reply has 3 frames; a request of 2 rows needs 2 frames"
        assert ask(server, rows(b"x", b"y"), rows_per_request=2) == [Answer(None, 500, message)] * 2


def test_replies_that_are_not_text(server):
    with worker(server, list):
        text, other = ask(server, rows("é".encode(), b"\xff"), rows_per_request=2)
        assert text == Answer("é", 200)
        assert other.code == 500
        assert "result='binary'" in other.error
        assert ask(server, rows(b"\xff"), result="binary") == [Answer(b"\xff", 200)]


def test_invalid_services(server):
    with worker(server, up):
        found = ask(server, [Row(None, b"x"), Row("no\nname", b"x"), Row("up", b"x")])
    assert [answer.code for answer in found] == [400, 400, 200]


def test_a_row_that_is_too_large_is_not_sent(server, monkeypatch):
    monkeypatch.setattr(calls, "MAX_BODY", 10)
    with worker(server, up):
        large, right = ask(server, rows(b"x" * 11, b"x" * 10))
    assert large == Answer(None, 413, "the request has 11 bytes; the limit is 10")
    assert right.code == 200


def test_unexpected_errors_go_into_the_rows(server, monkeypatch):
    monkeypatch.setattr(calls, "unpack_reply", lambda *given: 1 / 0)
    with worker(server, up):
        assert ask(server, rows(b"x")) == [Answer(None, 500, "ZeroDivisionError: division by zero")]


# ── through Titanic ──────────────────────────────────────────────────────────────────────────────────────────────────


def keyed(*keys):
    return [Row("up", b"x", key, keyed=True) for key in keys]


def test_a_key_is_one_request(server, tmp_path):
    handled = []

    def handler(request):
        handled.append(request)
        return b"%d" % len(handled)

    with serving(server.endpoints[0], str(tmp_path / "t.db")), worker(server, handler):
        first = ask(server, keyed("a", "b", "a"))
        assert ask(server, keyed("a", "b", "a")) == first
    assert len(handled) == 2
    assert first[0] == first[2] != first[1]


def test_invalid_keys(server, tmp_path):
    with serving(server.endpoints[0], str(tmp_path / "t.db")), worker(server, up):
        null, empty, right = ask(server, keyed(None, "", "a"))
    assert null == Answer(None, 400, "the key is NULL; every row sent through Titanic needs a key")
    assert empty.code == 400
    assert "key must be text of 1 to 255 bytes" in empty.error
    assert right.code == 200


def test_without_titanic(server):
    with worker(server, up):
        found = ask(server, keyed(*map(str, range(500))), timeout=0.3)
    assert {answer.code for answer in found} == {404}
    assert "titanic serve" in found[0].error
    assert server.broker.stats.requests < 500  # not each is tried: the rest fail with the first


def test_a_timed_out_request_continues_in_titanic(server, tmp_path):
    """Asking again with the same key returns the reply."""
    handled = []

    def handler(request):
        handled.append(request)
        return b"done"

    with serving(server.endpoints[0], str(tmp_path / "t.db")):
        late = ask(server, keyed(*map(str, range(50))), timeout=0.5)
        assert {answer.code for answer in late} == {404}
        with worker(server, handler):
            eventually(lambda: {each.code for each in ask(server, keyed("0", "1"))} == {200})
            assert ask(server, keyed("0")) == [Answer("done", 200)]
            eventually(lambda: len(handled) >= 4)  # those of the first window; nobody handed over the others
    assert len(handled) == 4


def test_failures_are_stored_too(server, tmp_path):
    handled = []

    def handler(request):
        handled.append(request)
        raise ServiceError(422, "never")

    with serving(server.endpoints[0], str(tmp_path / "t.db")), worker(server, handler):
        for _ in range(2):
            assert ask(server, keyed("a")) == [Answer(None, 422, "never")]
    assert len(handled) == 1


# ── from rows to requests and back ───────────────────────────────────────────────────────────────────────────────────


# ── packs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_packed_automatically(server):
    """Each bad row fails alone, and the requests are far fewer than the rows."""

    def handler(request):
        if request[0] == b"bad":
            raise ValueError("no good")
        return up(request)

    bodies = [b"bad" if n % 100 == 7 else b"x" for n in range(5000)]
    with worker(server, handler):
        found = ask(server, rows(*bodies), rows_per_request=None)
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
        assert [each.reply for each in ask(server, rows(*bodies), rows_per_request=None)] == [
            b.decode() for b in bodies
        ]
    assert sorted(handled) == sorted([body] for body in bodies)


def test_a_worker_that_does_not_understand_packs_appears_later(server):
    def chunks():
        for _ in range(6):
            yield Chunk(rows(*[b"x"] * 300))
        with worker(server, lambda request: request[0].upper(), protocol="0.2"):
            eventually(lambda: len(server.broker.registry.workers) == 2)
            for _ in range(6):
                yield Chunk(rows(*[b"x"] * 300))

    with worker(server, up):
        found = list(answer_chunks(chunks(), settings(server, rows_per_request=None)))
    assert {answer for chunk in found for answer in chunk.answers} == {Answer("X", 200)}


def test_a_handler_of_whole_packs_that_raises(server):
    """Its packs are divided until the bad row is alone."""

    def handler(values):
        if b"bad" in values:
            raise ValueError("no good")
        return [value.upper() for value in values]

    bodies = [b"bad" if n == 333 else b"x" for n in range(1000)]
    with worker(server, handler, rows=True):
        found = ask(server, rows(*bodies), rows_per_request=None)
    assert found == [Answer(None, 500, "ValueError: no good") if b == b"bad" else Answer("X", 200) for b in bodies]


def test_a_slow_row_does_not_fail_its_pack(server):
    def handler(request):
        if request[0] == b"slow":
            until_cancelled(request)
        return request

    with worker(server, handler, concurrency=2):
        found = ask(server, rows(b"a", b"slow", b"b"), rows_per_request=3, timeout=0.5)
    assert [answer.code for answer in found] == [200, 408, 200]


def test_rows_that_are_refused_for_now_are_sent_again(server):
    refused = []

    def handler(request):
        if request[0] == b"busy" and len(refused) < 3:
            refused.append(request)
            raise ServiceError(429, "not now")
        return request

    with worker(server, handler):
        found = ask(server, rows(b"a", b"busy", b"b"), rows_per_request=3)
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
        found = ask(server, rows(*[b"1234567890"] * 100), window=10)
    assert {answer.code for answer in found} == {200}
    assert most[0] in {2, 3}


def test_packing_rows(monkeypatch):
    monkeypatch.setattr(packs, "MAX_PACKED_BYTES", 4)
    asked = [
        Row("a", b"1"), Row("a", None), Row("a", b"23"), Row("a", b"4"), Row("a", b"5"),  # the third is full by bytes
        Row("b", b"6"), Row("b", b"1234567"), Row("b", b"", "k", keyed=True), Row("b", b"", "l", keyed=True),
        Row("b", b"", None, keyed=True), Row("b", b""), Row("b", b""), Row("b", b""), Row("b", b""), Row("b", None),
    ]  # fmt: skip
    chunk = Chunk(asked)
    assert chunk.remaining == 13
    taken = []
    while chunk.unsent:
        taken.append(chunk.take(3))
    assert [indexes for indexes, _ in taken] == [[0, 2, 3], [4], [5], [6], [7, 8], [9], [10, 11, 12], [13]]
    assert [size for _, size in taken] == [4, 1, 1, 7, 0, 0, 0, 0]


def test_packs_grow_while_requests_are_quick():
    size = PackSize(60)
    for expected in (2, 4, 8):
        size.replied(size.rows, 0.01)
        assert size.rows == expected
    size.replied(3, 0.01)  # a smaller one says nothing
    size.replied(8, 0.1)
    assert size.rows == 8
    size.replied(3, 1.0)
    assert size.rows == 8
    size.replied(8, 0.3)
    assert size.rows == 4
    for _ in range(20):
        size.replied(size.rows, 0.01)
    assert size.rows == packs.MAX_AUTO_ROWS
    assert (size.now(10_000), size.now(80), size.now(3)) == (packs.MAX_AUTO_ROWS, 10, 1)
    size.failed()
    assert size.now(10_000) == 1


def test_chunks_are_large_enough_for_the_window():
    assert Lookahead(CallSettings(broker="", window=1)).rows == calls.MIN_CHUNK_ROWS
    lookahead = Lookahead(CallSettings(broker="", window=64, rows_per_request=10))
    lookahead.grow()
    assert lookahead.rows == 1280
    assert lookahead.rows_of_size(1 << 20) == 64
    assert lookahead.rows_of_size(1 << 30) == 1
    lookahead = Lookahead(CallSettings(broker="", window=1, rows_per_request=None))
    for _ in range(10):
        lookahead.grow()
    assert lookahead.rows == calls.MAX_CHUNK_ROWS


def test_a_reply_without_frames():
    with pytest.raises(RowFailed, match="the reply has 0 frames"):
        unpack_reply([], 1, "string")


def test_invalid_settings():
    with (
        pytest.raises(SettingError, match="not a valid endpoint"),
        calls.Calls(CallSettings(broker="nowhere", window=1)),
    ):
        pass
