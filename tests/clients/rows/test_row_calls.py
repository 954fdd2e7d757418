"""Many rows, one request for each, over real sockets."""

import threading
from contextlib import closing
from itertools import count, repeat
from typing import NamedTuple

import pytest
from support.processes import SHORT_TIMEOUTS, TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS

from zmdp import Limit
from zmdp.clients import AsyncClient
from zmdp.clients.many import RETRY
from zmdp.clients.rows import Row, RowSettings, answer_rows, availability, row_calls
from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.errors import BrokerUnreachable, RequestError, RequestTimeout, ServiceError
from zmdp.testing import running_broker
from zmdp.workers import Worker


class Answer(NamedTuple):
    """What a row has resulted in."""

    reply: object = None
    code: object = None
    error: object = None


def answer(outcome):
    if isinstance(outcome, RequestError):
        code = 408 if isinstance(outcome, RequestTimeout) else outcome.code
        return Answer(None, code, outcome.text or str(outcome))
    return Answer([frame.decode() for frame in outcome] if len(outcome) > 1 else outcome[0].decode(), 200)


def asking(server, bodies, **given):
    """Return the generator of answered rows."""
    endpoint = server if isinstance(server, str) else server.endpoints[0]
    settings = RowSettings(**{"window": 4, "timeout": TIMEOUT_SECONDS, "retry": RETRY, **given})
    rows = (Row("up", body) for body in bodies)
    return answer_rows(rows, settings, lambda: AsyncClient(endpoint, timeout=TIMEOUT_SECONDS))


def worker(server, handler, service="up", **given):
    return Worker(service, handler, broker=server.endpoints[0], **BEATS, **given)


def up(request):
    return [frame.upper() for frame in request]


def until_cancelled(request):
    eventually(lambda: request.cancelled)


def ask(server, bodies, **given):
    """Return the answer to each row."""
    return [answer(row.outcome) for row in asking(server, bodies, **given)]


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def most_outstanding(server, rows, concurrency=1, **settings):
    """Return the maximum number of requests that the broker had at a time."""
    most = 0

    def handler(request):
        nonlocal most
        most = max(most, len(server.broker.registry.numbered))
        return request

    with worker(server, handler, concurrency=concurrency):
        assert {answer.code for answer in ask(server, rows, **settings)} == {200}
    return most


@pytest.mark.parametrize("window", [1, 3])
def test_the_window_limits_outstanding_requests(server, window):
    assert 1 <= most_outstanding(server, [b"x"] * 100, concurrency=2, window=window) <= window


def test_the_window_grows_while_rows_are_answered_quickly(server, monkeypatch):
    monkeypatch.setattr(row_calls, "WINDOW_SECONDS", TIMEOUT_SECONDS)  # however busy the machine is
    most = most_outstanding(server, [b"x"] * 1500, window=None, timeout=10 * TIMEOUT_SECONDS)
    assert row_calls.MIN_WINDOW < most <= row_calls.MAX_WINDOW


def test_the_window_stays_small_while_rows_are_slow(server, monkeypatch):
    monkeypatch.setattr(row_calls, "WINDOW_SECONDS", 0.0)
    assert most_outstanding(server, [b"x"] * 2000, window=None) <= row_calls.MIN_WINDOW


def test_a_window_that_has_grown_does_not_let_rows_time_out(server, monkeypatch):
    """The service becomes so slow that the rows sent last wait for longer than their timeout: they are sent again."""
    monkeypatch.setattr(row_calls, "WINDOW_SECONDS", TIMEOUT_SECONDS)
    monkeypatch.setattr(row_calls, "MIN_WINDOW", 1)
    waiting = threading.Event()

    def handler(request):
        if request[0] == b"slow" and not waiting.is_set():
            waiting.set()
            until_cancelled(request)
        return request

    bodies = [*[b"quick"] * 100, *[b"slow"] * 2, *[b"quick"] * 100]
    with worker(server, handler):
        for timeout in SHORT_TIMEOUTS:
            waiting.clear()
            found = ask(server, bodies, window=None, timeout=timeout)
            if {each.code for each in found} == {200}:
                break
    assert {each.code for each in found} == {200}


@pytest.mark.parametrize("window", [None, 40])
def test_a_row_that_a_limit_holds_back_is_sent_again(server, window):
    """All rows together take 3 seconds, longer than any of the timeouts; none fails, and none is executed twice."""

    def handler(request):
        handled.append(request[0])
        return request

    bodies = [b"%d" % number for number in range(30)]
    handled = []
    with worker(server, handler, limit=Limit(rate="10/s")):
        for timeout in SHORT_TIMEOUTS[:4]:
            handled.clear()
            found = ask(server, bodies, window=window, timeout=timeout)
            if {each.code for each in found} == {200} and len(handled) == len(bodies):
                break
    assert [each.reply for each in found] == [body.decode() for body in bodies]
    assert sorted(handled) == sorted(bodies)
    assert server.broker.stats.dropped[Drop.LIMIT_PASSED]


def test_the_window_follows_a_limit():
    """It shrinks to half of what a row has waited with, at least 1, and grows again with each window of replies."""
    asked = row_calls.RowCalls(None, RowSettings(), None)
    asked._window = 10
    for place, window in ((10, 5), (10, 5), (9, 4), (1, 1), (1, 1)):
        row = Row("up", b"")
        row.place, asked._outstanding = place, 100
        asked._send_later(row, place // 2)
        assert asked._window == window
    for window in (2, 3):
        asked._adapt(TIMEOUT_SECONDS)
        assert asked._window == window
    asked._adapt(0.0)
    assert asked._window == 6


def test_groups_of_rows(server):
    """Each row has its own group, or that of all rows."""

    def handler(request):
        return request.options.get("group", "none").encode()

    settings = RowSettings(group="all")
    rows = [Row("up", b"", group=group) for group in ("a", "b", "", "a")]
    with worker(server, handler):
        found = answer_rows(rows, settings, lambda: AsyncClient(server.endpoints[0], timeout=TIMEOUT_SECONDS))
        assert [row.outcome for row in found] == [[b"a"], [b"b"], [b"all"], [b"a"]]


def test_rows_are_sent_as_others_are_taken(server):
    """While the first row is waited for, only so many are read and sent."""
    taken = count()
    first = threading.Event()

    def handler(request):
        if request[0] == b"0":
            eventually(lambda: handled == [b"%d" % n for n in range(1, 8)])
            first.set()
        else:
            handled.append(request[0])
        return up(request)

    handled = []
    with worker(server, handler, concurrency=2):
        with closing(asking(server, (b"%d" % n for n in taken), window=2)) as found:
            next(found)
            assert first.is_set()
            assert next(taken) == 2 * row_calls.ROWS_AHEAD


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


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
    found = ask(server, [b"x"] * 1800, timeout=2)
    assert {(answer.reply, answer.code) for answer in found} == {(None, 404)}
    assert {answer.error for answer in found} == {"no worker offered service 'up' within 2 s"}
    assert server.broker.stats.requests < 100


def test_a_service_that_returns(server, monkeypatch):
    monkeypatch.setattr(availability, "RECHECK_SECONDS", 0.0)
    with closing(asking(server, [b"x"] * 1200, timeout=3)) as found:
        assert answer(next(found).outcome).code == 404
        with worker(server, up):
            eventually(lambda: server.broker.directory.workers)
            *_, last = found
    assert last.outcome == [b"X"]


def test_a_broker_that_starts_late(monkeypatch):
    monkeypatch.setattr(availability, "RECHECK_SECONDS", 0.05)
    with running_broker(limits=LIMITS, drain_timeout=0.0) as gone:
        (at,) = gone.endpoints
    with closing(asking(at, repeat(b"x"), timeout=3)) as found:
        error = next(found).outcome
        assert type(error) is BrokerUnreachable
        assert "nothing is listening there" in str(error)
        with running_broker(at, limits=LIMITS, drain_timeout=0.0) as server, worker(server, up):
            assert any(row.outcome == [b"X"] for row in found)


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


def test_a_row_that_is_too_large_is_not_sent(server, monkeypatch):
    monkeypatch.setattr(row_calls, "MAX_BODY", 10)
    with worker(server, up):
        large, right = ask(server, [b"x" * 11, b"x" * 10])
    assert large == Answer(None, 413, "the request has 11 bytes; the limit is 10")
    assert right.code == 200


def test_outstanding_bytes_are_limited(server, monkeypatch):
    """The window alone would allow all ten rows."""
    monkeypatch.setattr(row_calls, "MAX_OUTSTANDING_BYTES", 25)
    assert most_outstanding(server, [b"1234567890"] * 100, window=10) in {2, 3}
