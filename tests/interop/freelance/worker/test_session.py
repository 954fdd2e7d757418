"""The server's state machine for FLP (C46): PINGs, control frames, limits, PARTIALs, failures."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from zmdp.interop.freelance.worker import session as module
from zmdp.interop.freelance.worker.session import FreelanceServerSession
from zmdp.mdp.wire import error_body, parse_error
from zmdp.workers.handling import MAX_BODY, MAX_BODY_FRAMES, Failed
from zmdp.workers.session.states import CLOSED

NOW = 100.0
SMALL = {"max_message": 1000, "max_frames": 10}


def session(**settings):
    made = FreelanceServerSession(b"echo", **settings)
    made.connected(NOW)
    return made


def finish(server, request, outcome):
    if isinstance(outcome, Failed):
        return server.error(request, outcome.code, outcome.text, NOW)
    return server.final(request, outcome, NOW)


def test_what_a_handler_sees_of_a_request():
    server = session()
    server.receive([b"amy", b"1", b"x"], NOW, "shop")
    request = server.begin(NOW)
    assert (request.service, request.client, request.user, request.attempt) == ("echo", b"1", "shop", 1)
    assert (request.headers, request.deadline, request.cancelled) == ({}, None, False)
    finish(server, request, [b""])
    server.receive([b"amy", b"1", b"x"], NOW)
    request = server.begin(NOW)
    assert (request.client, request.user, request.options) == (b"2", "", {})


def test_requests_begin_in_order_and_no_more_than_handlers():
    server = session(concurrency=2)
    for number in (b"1", b"2", b"3"):
        server.receive([b"amy", number, number], NOW)
    first, second = server.begin(NOW), server.begin(NOW)
    assert (first, second, server.begin(NOW), server.waiting) == ([b"1"], [b"2"], None, 1)
    finish(server, second, [b"two"])
    assert server.begin(NOW) == [b"3"]
    assert server.take_messages() == [[b"amy", b"2", b"two"]]


def test_parts_arrive_with_the_last_one():
    server = session()
    server.receive([b"amy", b"1", b"x"], NOW)
    request = server.begin(NOW)
    assert server.partial(request, [b"a"], NOW)
    assert server.partial(request, [b"b", b"c"], NOW)
    assert server.take_messages() == []
    finish(server, request, [b"d"])
    assert server.take_messages() == [[b"amy", b"1", b"a", b"b", b"c", b"d"]]


def test_parts_that_are_too_large_together():
    server = session()
    part = [bytes(MAX_BODY // 2)]
    for parts in ([part] * 4, [[b""]] * (MAX_BODY_FRAMES + 7), [part, part]):
        server.receive([b"amy", b"1", b"x"], NOW)
        request = server.begin(NOW)
        for each in parts:
            server.partial(request, each, NOW)
        finish(server, request, [b"x"])
        ((_, _, *body),) = server.take_messages()
        code, text = parse_error(body)
        assert code == 413
        assert "the parts of the reply together have more than" in text


def test_a_failure_after_parts_is_a_failure():
    server = session()
    server.receive([b"amy", b"1", b"x"], NOW)
    request = server.begin(NOW)
    server.partial(request, [b"a"], NOW)
    finish(server, request, Failed(500, "ValueError: no good"))
    assert server.take_messages() == [[b"amy", b"1", *error_body(500, "ValueError: no good")]]


def test_what_is_no_command_is_dropped_and_counted():
    server = session(**SMALL)
    for message in ([b"amy"], [b"amy", b""], [b"amy", b"1"], [b"amy", b"PONG"]):
        server.receive(message, NOW)
    assert server.dropped == {module.MALFORMED: 4}
    server.receive([b"amy", b"1", bytes(1001)], NOW)
    server.receive([b"amy", b"1", *[b""] * 9], NOW)
    assert server.dropped == {module.MALFORMED: 4, module.TOO_LARGE: 2}
    assert (server.waiting, server.take_messages()) == (0, [])
    server.receive([b"amy", b"1", *[b""] * 8], NOW)
    assert server.waiting == 1


def test_the_number_of_waiting_requests_is_limited():
    server = session(max_waiting=2)
    for _ in range(5):
        server.receive([b"amy", b"1", b"x"], NOW)
    assert (server.waiting, server.dropped) == (2, {module.QUEUE_FULL: 3})
    server.receive([b"amy", b"PING"], NOW)
    assert server.take_messages() == [[b"amy", b"PONG"]]
    finish(server, server.begin(NOW), [b"y"])
    server.receive([b"amy", b"1", b"x"], NOW)
    assert server.waiting == 2


def test_the_memory_of_waiting_requests_is_limited():
    server = session(max_waiting_bytes=10_000)
    for _ in range(100):
        server.receive([b"amy", b"1", bytes(2000)], NOW)
    assert server.waiting == 4
    for _ in range(100):  # each takes memory, even if it is empty
        server.receive([b"amy", b"", b""], NOW)
    assert server.waiting < 10
    while (request := server.begin(NOW)) is not None:
        finish(server, request, [b""])
    for _ in range(100):
        server.receive([b"amy", b"1", bytes(2000)], NOW)
    assert server.waiting == 4


def test_a_role_that_may_not_call_is_told_so():
    server = session()
    server.receive([b"amy", b"1", b"x"], NOW, "intern", allowed=False)
    server.receive([b"amy", b"PING"], NOW, "intern", allowed=False)
    assert server.take_messages() == [
        [b"amy", b"1", *error_body(403, "the role intern may not call 'echo'")],
        [b"amy", b"PONG"],
    ]
    assert server.begin(NOW) is None


def test_leaving_finishes_what_has_begun():
    server = session()
    for number in (b"1", b"2", b"3"):
        server.receive([b"amy", number, b"x"], NOW)
    request = server.begin(NOW)
    server.leave(NOW)
    server.receive([b"amy", b"4", b"x"], NOW)
    server.receive([b"amy", b"PING"], NOW)
    assert (server.begin(NOW), server.state is CLOSED, server.take_messages()) == (None, False, [])
    assert server.dropped == {module.STOPPING: 4}
    finish(server, request, [b"y"])
    assert server.state is CLOSED
    assert server.take_messages() == [[b"amy", b"1", b"y"]]


def test_a_request_that_is_abandoned_gets_no_reply():
    server = session()
    server.receive([b"amy", b"1", b"x"], NOW)
    request = server.begin(NOW)
    server.abandon(request, NOW)
    finish(server, request, [b"y"])
    assert not server.partial(request, [b"y"], NOW)
    assert server.take_messages() == []
    server.leave(NOW)
    assert server.state is CLOSED


def test_the_requests_of_a_client_that_is_gone_are_cancelled():
    server = session(concurrency=3)
    for client in (b"amy", b"ben"):
        server.receive([client, b"1", b"x"], NOW)
    amy, ben = server.begin(NOW), server.begin(NOW)
    server.gone(b"amy")
    assert (amy.cancelled, ben.cancelled) == (True, False)
    server.not_read()
    assert server.dropped == {module.CLIENT_GONE: 1, module.SLOW_READER: 1}


def test_what_is_dropped_is_reported_at_a_bounded_rate():
    server = session()
    assert server.deadline() is None
    server.receive([b"amy"], NOW)
    assert server.deadline() <= NOW
    server.tick(NOW)
    assert (server.take_reports(), server.take_reports(), server.deadline()) == ([{module.MALFORMED: 1}], [], None)
    for _ in range(2):
        server.receive([b"amy"], NOW + 1)
    server.not_read()
    server.tick(NOW + 1)
    assert (server.take_reports(), server.deadline()) == ([], NOW + module.REPORT_SECONDS)
    server.tick(NOW + module.REPORT_SECONDS)
    assert server.take_reports() == [{module.MALFORMED: 2, module.SLOW_READER: 1}]
    server.tick(NOW + 10 * module.REPORT_SECONDS)
    assert server.take_reports() == []


FRAMES = st.lists(st.binary(max_size=5) | st.sampled_from([b"PING", b"PONG"]), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from([b"amy", b"ben"]), FRAMES), max_size=30), st.integers(1, 3))
def test_each_request_gets_one_reply_and_each_ping_one_pong(messages, concurrency):
    server = session(concurrency=concurrency)
    expected = Counter()
    for client, frames in messages:
        server.receive([client, *frames], NOW)
        if len(frames) > 1:
            expected[(client, *frames)] += 1
        elif frames == [b"PING"]:
            expected[client, b"PONG"] += 1
    while (request := server.begin(NOW)) is not None:
        finish(server, request, list(request))
    assert Counter(map(tuple, server.take_messages())) == expected
    server.leave(NOW)
    assert server.state is CLOSED
