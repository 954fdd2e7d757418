"""The client's state machine for X1: numbers, timeouts, connections that are replaced, and the errors raised."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.x1_client import (
    ASKING,
    DISCONNECT,
    HEARTBEAT,
    Highest,
    cancel,
    error,
    events,
    final,
    partial,
    read,
    request,
    sent,
    together,
    unpack,
)  # fmt: skip

from zmdp.clients.calls.ask import encode_options
from zmdp.clients.calls.retry import Retry
from zmdp.clients.x1 import session as module
from zmdp.clients.x1.broker_connection import LARGE_REQUEST_BYTES, Call
from zmdp.clients.x1.errors import error_of
from zmdp.clients.x1.session import ClientSession
from zmdp.mdp import wire
from zmdp.mdp.codes import Code
from zmdp.mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestCancelled,
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
    ZmdpError,
)
from zmdp.mdp.wire import x1

pytestmark = pytest.mark.unit

STRANGER = "the program that listens there has been silent for {} s; if it is not zmdp's broker, try protocol 0.2"


def connected(**settings: Any) -> ClientSession:
    """A session that has connected at 100 s, with a heartbeat of 1 s, that gives up a broker after 5 s of silence."""
    session = ClientSession(rng=Highest(), **settings)
    session.connected("tcp://here", 100.0)
    return session


def asking(*, many: int = 1, **settings: Any) -> tuple[ClientSession, list[Call]]:
    """A session that has sent requests 1, 2, … at 100 s."""
    session = connected()
    calls = [session.request(b"echo", [b"x"], 100.0, **settings) for _ in range(many)]
    assert len(sent(session)) == many
    return session, calls


def wait(session: ClientSession, until: float) -> None:
    """Tick whenever the session asks for it, as a process that is not held up does."""
    while session.lost is None and (due := session.deadline()) is not None and due <= until:
        session.tick(due)


def is_empty(session: ClientSession) -> bool:
    """Return whether the session keeps nothing of earlier requests."""
    kept = session.outstanding, session._due.next_due(), session._due._buckets, session.deadline()
    return not any(each for each in kept)


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"heartbeat": 0.001}, "heartbeat is 0.001: it must be 0.01 seconds or more"),
        ({"heartbeat": float("nan")}, "heartbeat is nan: it must be 0.01 seconds or more"),
        ({"heartbeat": float("inf")}, "heartbeat is inf: it must be 0.01 seconds or more"),
        ({"liveness": 1}, "liveness is 1: it must be a number of intervals, 2 or more"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        ClientSession(**settings)
    assert str(caught.value) == text


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request() -> None:
    session = connected()
    call = session.request(b"echo", [b"a", b"b"], 100.0)
    assert session.current.unsent == 1
    record = b"\0\0\0\x20\x01\0\0\0\0\0\0\0\x01\0\0\0\0\x04echo\0\0\0\x02\0\0\0\1a\0\0\0\1b"
    assert session.take_messages() == [[b"", b"MDPCX1", b"\x09", record]]
    assert session.take_messages() == []
    assert (session.outstanding, session.current.unsent, call.ended) == (1, 0, False)
    session.receive(final(1, b"c", b"d"), 101.0)
    assert events(session) == [(1, [b"c", b"d"], "echo", True)]
    assert call.ended
    assert sent(session) == []
    assert is_empty(session)


def test_a_request_has_its_options() -> None:
    session = connected()
    session.request(b"echo", [b"x"], 100.0, timeout=2.5, options=encode_options({"key": [1]}, {"a": "ä"}, False))
    session.request(b"echo", [b"x"], 100.0, options=encode_options(None, None, False))
    (message,) = session.take_messages()
    first, second = unpack(message)
    assert first.options.raw == b'{"key":[1],"headers":{"a":"\\u00e4"},"wait":false}'
    assert (first.ttl, first.options.wait) == (2.5, False)
    assert (second.options.raw, second.ttl) == (b'{"wait":false}', None)


def test_a_ttl_that_is_too_long_for_a_record_is_cut() -> None:
    session, longest = connected(), x1.MAX_TTL_MS
    for milliseconds in (longest, longest + 1, 1e18):
        session.request(b"echo", [b"x"], 100.0, timeout=milliseconds / 1000)
    assert sent(session) == [request(number, ttl=longest) for number in (1, 2, 3)]


def test_commands_of_one_turn_are_one_message() -> None:
    session = connected()
    calls = [session.request(b"echo", [b"x"], 100.0) for _ in range(100)]
    session.cancel(calls[0])
    session.tick(101.0)
    assert session.current.unsent == 102
    commands, heartbeat = session.take_messages()
    assert (commands[:3], heartbeat) == ([b"", b"MDPCX1", b"\x09"], HEARTBEAT)
    found = [read(command) for command in unpack(commands)]
    assert found == [*(request(number) for number in range(1, 101)), cancel(1)]


@pytest.mark.parametrize("session", [connected(), ClientSession()], ids=["connected", "not connected"])
def test_a_request_that_cannot_be_sent_leaves_nothing(session: ClientSession) -> None:
    with pytest.raises(SettingError, match=r"^the body "):
        session.request(b"echo", [b""] * (x1.MAX_BODY_FRAMES + 1), 100.0, silence=1.0)
    assert sent(session) == []
    assert is_empty(session)


@pytest.mark.parametrize(
    ("options", "headers", "wait"),
    [
        ({"a": b"x"}, None, True),
        ({"wait": 1}, None, True),
        ({"ttl": 1}, None, True),
        ({"wait": True}, {1: "a"}, False),
        (None, {"a": 1}, True),
        (None, 5, True),
        (5, None, True),
    ],
)
def test_options_that_cannot_be_sent(options: Any, headers: Any, wait: bool) -> None:
    with pytest.raises(SettingError, match=r"^(options|headers) "):
        encode_options(options, headers, wait)


def test_a_timeout_mentions_a_broker_that_has_stopped_answering() -> None:
    session, _ = asking(timeout=3.0)
    session.receive(HEARTBEAT, 100.5)
    for now in (101.5, 102.5, 103.5):
        session.tick(now)
    ((_, kind, text, *_),) = events(session)
    assert kind is RequestTimeout
    assert text.endswith("within 3 s; the broker has been silent for 3.0 s")


# ── max_outstanding ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_wait_until_others_end_in_order() -> None:
    session = connected(max_outstanding=2)
    calls = [session.request(b"echo", [b"x"], 100.0, timeout=5.0) for _ in range(5)]
    assert sent(session) == [request(1, ttl=5000), request(2, ttl=5000)]
    session.cancel(calls[0])
    session.tick(101.0)
    calls.append(session.request(b"echo", [b"x"], 101.0, timeout=5.0))  # it overtakes nobody
    session.cancel(calls[3])
    session.receive(together(final(2, b"y"), final(3, b"y")), 102.0)
    assert [call.ended for call in calls] == [True, True, True, True, False, False]
    assert [each for each in sent(session) if each != ASKING] == [
        cancel(1), request(3, ttl=4000), request(5, ttl=3000), request(6, ttl=4000)
    ]  # fmt: skip
    assert session.outstanding == 2


def test_a_request_that_waits_until_its_time_has_passed() -> None:
    session = connected(max_outstanding=1)
    session.request(b"echo", [b"x"], 100.0)
    session.request(b"late", [b"x"], 100.0, timeout=1.0)
    session.request(b"silent", [b"x"], 100.0, silence=2.0)
    wait(session, 103.0)
    late, silent = events(session)
    text = "the request to service 'late' was not sent: 1 others (max_outstanding) were outstanding for 1 s"
    assert late[1:3] == (RequestTimeout, text)
    assert silent[2].endswith("were outstanding for 2 s")
    assert session.outstanding == 1


IGNORED = {
    "another number": final(2, b"x"),
    "other numbers": together(final(2, b"x"), error(3, 404, b"x")),
    "a heartbeat": HEARTBEAT,
    "a heartbeat with an address": [b"hop", *HEARTBEAT],
    "DISCONNECT of the only broker": DISCONNECT,
    "no records": [*HEARTBEAT, b"\x09"],
    "another command": [*HEARTBEAT, b"\x03", b"echo", b"x"],
    "another dialect": [b"", b"MDPC02", b"\x03", b"echo", b"x"],
    "for a worker": wire.disconnect((b"",), wire.WX1),
    "a cancellation": [*HEARTBEAT, b"\x09", b"\0\0\0\x09\x05" + bytes(7) + b"\1"],
    "no body": final(1),
    "no code": error(1, 1000, b"text"),
    "records cut short": [*final(1, b"x")[:3], final(1, b"x")[3][:-1]],
    "records without sense": [*HEARTBEAT, b"\x09", b"\xff" * 40],
    "records for a worker": [b"", b"MDPWX1", b"\x09", final(1, b"x")[3]],
    "noise": [b"noise"],
    "nothing": [],
}


@pytest.mark.parametrize("message", IGNORED.values(), ids=IGNORED)
def test_anything_but_replies_is_ignored(message: list[bytes]) -> None:
    session, (call,) = asking()
    session.receive(message, 100.5)
    assert (events(session), call.ended, session.outstanding) == ([], False, 1)


def test_an_invalid_record_does_not_affect_those_before_it() -> None:
    session, _ = asking(many=2)
    message = together(final(1, b"x"), final(2, b"y"))
    session.receive([*message[:3], message[3][:-1]], 100.5)
    assert events(session) == [(1, [b"x"], "echo", True)]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_size_of_collected_parts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 210)  # frames have an overhead of 100 each
    session, (call,) = asking(timeout=5.0)
    session.receive(partial(1, b"x" * 6, b"x" * 4), 101.0)
    assert events(session) == []
    session.receive(partial(1, b"x"), 101.0)
    text = "the parts of the reply of service 'echo' exceed 210 bytes: use stream()"
    assert events(session) == [(1, RequestRejected, text, "echo", 413)]
    assert sent(session) == [cancel(1)]
    assert call.ended
    session.receive(error(1, 499, b"cancelled"), 102.0)
    assert events(session) == []
    assert is_empty(session)


def test_a_failure_in_the_final_of_a_legacy_worker() -> None:
    session, _ = asking()
    session.receive(partial(1, b"1"), 101.0)
    session.receive(final(1, b"zmdp.error", b"500", b"it broke"), 101.0)
    assert events(session) == [(1, ServiceError, "service 'echo' failed with 500: it broke", "echo", 500)]
    assert is_empty(session)


# ── ERROR ────────────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS = {
    400: RequestRejected,
    403: RequestRejected,
    404: ServiceNotFound,
    408: RequestTimeout,
    413: RequestRejected,
    429: RetryLater,
    499: RequestCancelled,
    502: WorkerLost,
    503: RetryLater,
}


@pytest.mark.parametrize(("code", "kind"), KINDS.items())
def test_each_code_of_the_broker_becomes_an_exception(code: int, kind: type[RequestError]) -> None:
    session, _ = asking(timeout=5.0)
    session.receive(error(1, code, b"because"), 101.0)
    ((_, outcome),) = session.events
    assert isinstance(outcome, RequestError)
    assert (outcome.text, outcome.detail) == ("because", None)
    assert events(session) == [(1, kind, f"service 'echo': because ({code})", "echo", code)]
    assert is_empty(session)


def test_every_code_of_the_broker_is_known() -> None:
    assert set(KINDS) == set(Code) - {Code.FAILED}


@pytest.mark.parametrize("code", [*Code, 0, 7, 422, 999])
@pytest.mark.parametrize("detail", [b"", b"\xff"], ids=["empty detail", "detail"])
def test_an_error_with_a_detail_is_the_services_own(code: int, detail: bytes) -> None:
    session, _ = asking()
    session.receive(error(1, code, b"it br\xffke", detail), 101.0)
    ((_, outcome),) = session.events
    assert type(outcome) is ServiceError
    assert (outcome.code, outcome.text, outcome.service) == (code, "it br\N{REPLACEMENT CHARACTER}ke", "echo")
    assert outcome.detail == (detail or None)


@pytest.mark.parametrize("code", [500, 501, 422, 7, 999])
def test_an_unknown_code_without_a_detail_is_the_services(code: int) -> None:
    session, _ = asking()
    session.receive(error(1, code, b"broke"), 101.0)
    ((_, outcome),) = session.events
    assert isinstance(outcome, ServiceError)
    assert (outcome.code, outcome.text, outcome.detail) == (code, "broke", None)


@pytest.mark.parametrize(("detail", "seconds"), [([b"0.25"], 0.25), ([], None), ([b"soon"], None), ([b"-1"], None)])
def test_an_error_of_a_limit_says_when_to_try_again(detail: list[bytes], seconds: float | None) -> None:
    session, (call,) = asking()
    told = wire.Error((), wire.CX1, call.number, 429, b"the service is limited", detail, b"limited", 0)
    found = error_of(call, told)
    assert isinstance(found, RetryLater)
    assert (found.retry_after, found.reason, session.outstanding) == (seconds, "limited", 1)


@pytest.mark.parametrize(("code", "kind"), [(502, StreamInterrupted), (429, RetryLater), (500, ServiceError)])
def test_a_worker_that_is_lost_in_the_middle_of_a_stream_interrupts_it(code: int, kind: type[RequestError]) -> None:
    session, _ = asking(stream=True)
    session.receive(partial(1, b"1"), 101.0)
    session.receive(error(1, code, b"lost"), 101.0)
    assert [event[1] for event in events(session)] == [[b"1"], kind]


def test_a_service_that_raises_502_within_a_stream_is_not_a_lost_worker() -> None:
    session, _ = asking(stream=True)
    session.receive(together(partial(1, b"1"), error(1, 502, b"bad gateway", b"")), 101.0)
    assert [event[1] for event in events(session)] == [[b"1"], ServiceError]


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_has_ended_is_not_cancelled() -> None:
    session, (call,) = asking()
    session.receive(final(1, b"x"), 101.0)
    session.cancel(call)
    session.cancel(call)
    assert sent(session) == []


def test_closing() -> None:
    session, calls = asking(many=2, timeout=5.0, silence=3.0)
    session.close(lambda: ClosedError("closed"))
    assert sent(session) == [cancel(1), cancel(2)]
    assert events(session) == [(1, ClosedError, "closed"), (2, ClosedError, "closed")]
    assert session.events == []
    assert all(call.ended for call in calls)
    assert is_empty(session)


def test_closing_creates_an_error_for_each_request() -> None:
    session, _ = asking(many=2)
    session.close(lambda: ClosedError("closed"))
    (_, one), (_, two) = session.events
    assert one is not two


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_is_not_finished_in_time() -> None:
    # with a grace of a twentieth, for the broker's ERROR says more
    session, (call,) = asking(timeout=2.0)
    session.receive(HEARTBEAT, 101.5)
    assert session.deadline() == pytest.approx(102.1, abs=0.011)
    session.tick(102.09)
    assert not call.ended
    session.tick(102.12)
    text = "no reply from service 'echo' through tcp://here within 2 s"
    assert events(session) == [(1, RequestTimeout, text, "echo", None)]
    assert sent(session) == [cancel(1)]
    assert is_empty(session)


def test_parts_do_not_extend_the_timeout() -> None:
    session, _ = asking(timeout=2.0, stream=True)
    session.receive(partial(1, b"1"), 101.9)
    session.tick(102.12)
    text = "the stream of service 'echo' was not finished within 2 s"
    assert events(session) == [(1, [b"1"], "echo", False), (1, StreamInterrupted, text, "echo", None)]
    assert sent(session)[-1] == cancel(1)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "collected"])
def test_a_silence_has_a_limit(stream: bool) -> None:
    session, (call,) = asking(silence=2.0, stream=stream)
    session.receive(partial(1, b"1"), 101.9)
    session.receive(HEARTBEAT, 103.0)  # of the broker, not of the service
    session.tick(103.89)
    assert not call.ended
    session.tick(103.92)
    assert call.ended
    outcome = events(session)[-1]
    stopped = (1, StreamInterrupted, "the stream of service 'echo' stopped: nothing arrived for 2 s after a part")
    timeout = (1, RequestTimeout, "no reply from service 'echo' through tcp://here within 2 s")
    assert outcome == (*(stopped if stream else timeout), "echo", None)
    assert sent(session)[-1] == cancel(1)


@pytest.mark.parametrize(
    ("timeout", "silence", "due", "told"),
    [(1.0, 5.0, 101.05, 1), (5.0, 1.0, 101.0, 1), (1.0, 1.02, 101.02, 1), (3.0, 2.0, 102.0, 2)],
)
def test_timeout_and_silence_together(timeout: float, silence: float, due: float, told: float) -> None:
    session, (call,) = asking(timeout=timeout, silence=silence)
    session.receive(HEARTBEAT, 100.9)
    session.tick(due - 0.01)
    assert not call.ended
    session.tick(due + 0.012)
    text = f"no reply from service 'echo' through tcp://here within {told} s"
    assert events(session) == [(1, RequestTimeout, text, "echo", None)]


def test_a_timeout_while_no_broker_answers() -> None:
    session = ClientSession(rng=Highest())
    session.request(b"echo", [b"x"], 100.0, timeout=1.0)
    session.tick(101.07)
    text = "no reply from service 'echo' through  within 1 s: not connected yet"
    assert events(session) == [(1, BrokerUnreachable, text, "echo", None)]
    assert sent(session) == []


def test_a_question_to_the_broker_itself_that_is_not_answered() -> None:
    session = connected()
    session.request(b"mmi.describe", [b"echo"], 100.0, timeout=2.0)
    session.receive(HEARTBEAT, 101.0)
    session.tick(102.5)
    text = "the broker at tcp://here has not answered mmi.describe within 2 s"
    assert events(session) == [(1, RequestTimeout, text, "mmi.describe", None)]


def test_a_timeout_after_the_connection_was_lost() -> None:
    session, _ = asking(timeout=1.0)
    session.lose("refused", 100.2)
    session.connected("tcp://there", 100.3)
    session.tick(101.07)
    text = "no reply from service 'echo' through tcp://there within 1 s: refused"
    assert events(session) == [(1, BrokerUnreachable, text, "echo", None)]


def test_a_refusal_ends_every_request() -> None:
    session, _ = asking(many=2, timeout=60.0)
    session.lose("the broker refuses this key", 101.0)
    assert events(session) == []
    session.refused_by_all("the broker refuses this key")
    text = "service 'echo' cannot be called through tcp://here: the broker refuses this key"
    assert events(session) == [(number, BrokerUnreachable, text, "echo", None) for number in (1, 2)]
    assert is_empty(session)


def test_trouble_is_forgotten_once_a_broker_is_heard() -> None:
    session, _ = asking(timeout=1.0)
    session.lose("refused", 100.2)
    session.connected("tcp://there", 100.3)
    session.receive(HEARTBEAT, 100.4)
    session.tick(101.07)
    assert events(session)[0][1] is RequestTimeout
    session.request(b"echo", [b"x"], 102.0, timeout=1.0)
    session.tick(103.07)
    assert events(session)[0][1] is RequestTimeout


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "sign",
    [
        HEARTBEAT,
        DISCONNECT,
        partial(1, b"x"),
        final(9, b"x"),
        error(9, 500, b"x"),
        [*HEARTBEAT, b"\x09"],
    ],
)
def test_any_command_is_a_sign_of_life(sign: list[bytes]) -> None:
    session, _ = asking()
    session.tick(101.0)
    session.tick(104.0)
    sent(session)
    session.receive(sign, 104.9)
    session.tick(105.0)
    assert (sent(session), session.lost, session.deadline()) == ([], None, 105.9)
    session.tick(109.8)
    assert session.lost is None


@pytest.mark.parametrize(
    "noise",
    [
        [b"noise"],
        [b"", b"MDPC02", b"\x03", b"echo", b"x"],
        [b"", b"MDPWX1"],
        [*HEARTBEAT, b"\x06"],
    ],
)
def test_other_messages_are_not_signs_of_life(noise: list[bytes]) -> None:
    session, _ = asking()
    session.tick(101.0)
    session.receive(noise, 104.9)
    wait(session, 105.0)
    assert session.lost == STRANGER.format(5)


def test_a_broker_that_is_silent_too_long_is_lost() -> None:
    session, (call,) = asking()
    for now in (101.0, 102.0, 103.0, 104.0):
        session.tick(now)
        assert sent(session) == [ASKING]
    session.tick(104.9)
    assert (session.lost, session.deadline()) == (None, 105.0)
    session.tick(105.0)
    assert session.lost == STRANGER.format(5)
    assert (sent(session), events(session), call.ended) == ([], [], False)
    assert session.retry_at == session.deadline() == 105.05
    session.tick(200.0)
    assert sent(session) == []


def test_a_client_that_slept_asks_before_it_gives_up_the_broker() -> None:
    # the broker's messages may all be there, unread
    session, _ = asking()
    session.tick(500.0)
    assert (session.lost, sent(session), session.deadline()) == (None, [ASKING], 501.0)
    wait(session, 503.9)
    assert session.lost is None
    wait(session, 504.0)
    assert session.lost == STRANGER.format(5)


def test_a_client_that_was_held_up_after_it_asked_asks_again() -> None:
    # ZeroMQ's thread was held up too: what the broker sent meanwhile may reach the socket a moment later.
    session, (call,) = asking(stream=True)
    session.receive(partial(1, b"x"), 100.5)
    wait(session, 102.5)
    sent(session)
    session.tick(120.0)
    assert (session.lost, sent(session), session.deadline()) == (None, [ASKING], 121.0)
    session.receive(HEARTBEAT, 120.1)
    wait(session, 125.0)
    assert (session.lost, call.ended) == (None, False)
    wait(session, 125.1)
    assert session.lost == "the broker has been silent for 5 s"


def test_a_client_that_was_held_up_waits_for_the_replies_that_are_unread() -> None:
    # libzmq reads ahead only so many messages; it reads the next a moment after these have been taken
    session, _ = asking(many=3, timeout=5.0)
    session.receive(final(1, b"x"), 120.0)
    session.tick(120.0)
    assert events(session) == [(1, [b"x"], "echo", True)]
    session.receive(final(2, b"y"), 120.9)
    session.tick(120.9)
    assert events(session) == [(2, [b"y"], "echo", True)]
    wait(session, 121.1)
    assert [(number, kind) for number, kind, *_ in events(session)] == [(3, RequestTimeout)]


# ── losing the connection ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_remaining_ttl_is_sent_again() -> None:
    session, _ = asking(timeout=5.0)
    session.lose("test", 101.0)
    session.connected("tcp://there", 101.5)
    assert sent(session) == [request(1, ttl=3500)]
    session.lose("test", 104.9999)
    session.connected("tcp://there", 104.9999)
    assert sent(session) == [request(1, ttl=1)]
    session.lose("test", 105.1)
    session.connected("tcp://there", 105.1)  # in the grace
    assert sent(session) == [request(1, ttl=1)]


def test_collected_parts_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 303)
    session, _ = asking()
    session.receive(partial(1, b"1", b"2"), 101.0)
    session.lose("test", 101.0)
    session.connected("tcp://there", 101.0)
    session.receive(partial(1, b"a", b"b"), 102.0)
    session.receive(final(1, b"c"), 102.0)
    assert events(session) == [(1, [b"a", b"b", b"c"], "echo", True)]


def test_a_stream_that_has_begun_breaks_off() -> None:
    # its parts would come twice
    session, (begun, waiting) = asking(many=2, stream=True, timeout=5.0)
    session.receive(partial(1, b"1"), 100.5)
    events(session)
    session.lose("reset by peer", 101.0)
    text = "the stream of service 'echo' broke off: the connection to tcp://here was lost (reset by peer)"
    assert events(session) == [(1, StreamInterrupted, text, "echo", None)]
    assert (begun.ended, waiting.ended) == (True, False)
    session.connected("tcp://there", 101.0)
    assert sent(session) == [request(2, ttl=4000)]


def test_unanswered_attempts_back_off() -> None:
    session, _ = asking()
    waits = []
    for now in range(1000, 1700, 100):
        session.connected("tcp://here", now)
        session.lose("refused", now)
        waits.append(round(session.retry_at - now, 3))
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    session.connected("tcp://here", 1700.0)
    session.receive(HEARTBEAT, 1700.0)
    session.lose("gone", 1701.0)
    assert session.retry_at == 1701.0
    session.connected("tcp://here", 1702.0)
    session.lose("refused", 1702.0)
    assert session.retry_at == 1702.05


def test_reconnections_are_jittered() -> None:
    waits = []
    for seed in range(200):
        session = ClientSession(rng=random.Random(seed))
        session.lose("test", 0.0)
        waits.append(session.retry_at)
    assert 0.025 <= min(waits) < 0.027
    assert 0.048 < max(waits) <= 0.05


# ── any course of events ─────────────────────────────────────────────────────────────────────────────────────────────

frames = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"", b"1", b"2", b"MDPCX1", b"\x03", b"\x09", b"echo"]),
)
answers = st.sampled_from(
    [partial(1, b"p"), partial(2, b"p"), final(1, b"f"), final(2, b"f"), error(1, 502, b"e"), error(2, 500, b"e")]
)
records = st.one_of(
    st.binary(max_size=40),
    st.lists(answers, min_size=1, max_size=3).map(lambda commands: together(*commands)[3]),
    st.tuples(answers.map(lambda command: command[3]), st.binary(max_size=9)).map(b"".join),
)
batches = st.builds(
    lambda packed, attached: [b"", b"MDPCX1", b"\x09", packed, *attached], records, st.lists(st.binary(), max_size=2)
)
happenings = st.one_of(
    st.lists(frames, max_size=6), answers, batches, st.sampled_from(["lose", "connect", "tick", "cancel", "send"])
)


@given(stream=st.booleans(), times=st.sampled_from([None, 1.0, 50.0]), course=st.lists(happenings, max_size=20))
def test_each_request_ends_exactly_once(stream: bool, times: float | None, course: list[list[bytes] | str]) -> None:
    session = ClientSession()
    calls = [session.request(b"echo", [b"x"], 0.0, stream=stream, timeout=times) for _ in range(2)]
    cancelled: set[Call] = set()
    for now, happens in enumerate(course):
        if isinstance(happens, list):
            session.receive(happens, now)
        elif happens == "lose":
            session.lose("test", now)
        elif happens == "connect":
            if session.lost is not None:  # a connection is lost before there is another
                session.connected("here", now)
        elif happens == "tick":
            session.tick(now)
        elif happens == "send":
            assert len(sent(session)) <= 6
        elif not calls[0].ended:
            session.cancel(calls[0])
            cancelled.add(calls[0])
    session.close(lambda: ClosedError("closed"))
    for call in calls:
        outcomes = [outcome for each, outcome in session.events if each is call]
        ends = [outcome for outcome in outcomes if isinstance(outcome, ZmdpError) or outcome.final]
        assert len(ends) == (call not in cancelled)
        assert ends == outcomes[-1:] or call in cancelled
        assert stream or outcomes == ends
    assert is_empty(session)


LARGE = b"x" * (LARGE_REQUEST_BYTES + 1)
ASKING_FOR_LIMITS = ("LIMITS",)


def limits(max_bytes: int = len(LARGE), max_frames: int = 1024) -> list[bytes]:
    """LIMITS, from the broker."""
    return wire.limits((b"",), max_bytes, max_frames)


def test_a_large_request_is_sent_once_the_broker_has_told_its_limits() -> None:
    session = connected()
    session.request(b"echo", [LARGE], 100.0)
    session.request(b"echo", [LARGE], 100.0)
    session.request(b"echo", [b"small"], 100.0)
    assert sent(session) == [ASKING_FOR_LIMITS, request(3, body=b"small")]
    session.receive(limits(), 100.0)
    assert sent(session) == [request(1, body=LARGE), request(2, body=LARGE)]
    session.request(b"echo", [LARGE], 100.0)
    assert sent(session) == [request(4, body=LARGE)]


@pytest.mark.parametrize("told", [limits(max_bytes=len(LARGE) - 1), limits(max_frames=1)])
def test_a_request_over_the_limits_is_not_sent(told: list[bytes]) -> None:
    session = connected()
    call = session.request(b"echo", [LARGE, b""], 100.0)
    small = session.request(b"echo", [b"small"], 100.0)
    assert len(sent(session)) == 2
    session.receive(told, 100.0)
    assert sent(session) == []
    ((failed, error),) = session.events
    assert (failed, type(error), call.ended, small.ended) == (call, RequestRejected, True, False)
    assert "a request may have up to" in str(error)
    with pytest.raises(RequestRejected):
        session.request(b"echo", [LARGE, b""], 100.0)


def test_a_large_request_that_was_not_sent_is_cancelled_without_a_word() -> None:
    session = connected()
    session.cancel(session.request(b"echo", [LARGE], 100.0))
    session.request(b"echo", [LARGE], 100.0, timeout=1.0)
    assert set(sent(session)) == {ASKING_FOR_LIMITS}
    session.tick(102.0)
    session.take_messages()
    session.receive(limits(), 102.0)
    assert sent(session) == []
    assert is_empty(session)


def test_a_large_request_survives_any_number_of_lost_connections() -> None:
    session = connected()
    large = session.request(b"echo", [LARGE], 100.0)
    for _ in range(5):
        session.receive(limits(), 100.0)
        assert sent(session) == [ASKING_FOR_LIMITS, request(1, body=LARGE)]
        session.lose("the broker was killed", 101.0)
        session.connected("tcp://there", 101.0)
    assert not large.ended


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────────────────────

RETRY = Retry(attempts=3, codes={429, 503}, backoff=1.0)


def test_a_request_that_fails_is_sent_again_after_growing_pauses_under_a_new_number() -> None:
    session, (call,) = asking(timeout=60.0, retry=RETRY)
    session.receive(error(1, 429, b"full"), 101.0)
    assert (events(session), sent(session), session.outstanding) == ([], [], 1)
    session.tick(101.9)
    assert sent(session) == []
    session.tick(102.1)
    assert sent(session) == [request(2, ttl=57900)]
    session.receive(error(2, 503, b"draining"), 102.5)
    session.tick(104.4)
    assert sent(session) == []
    session.tick(104.6)
    assert sent(session) == [request(3, ttl=55400)]
    session.receive(final(3, b"y"), 104.7)
    assert session.take_events() == [(call, [b"y"])]
    assert is_empty(session)


@pytest.mark.parametrize(
    ("code", "failures", "kind"),
    [(429, 3, RetryLater), (404, 1, ServiceNotFound), (502, 1, WorkerLost)],
)
def test_a_request_fails_after_its_last_attempt_or_with_another_code(
    code: int, failures: int, kind: type[RequestError]
) -> None:
    session, (call,) = asking(retry=RETRY)
    for number in range(1, failures + 1):
        assert events(session) == []
        session.tick(100.0 + 3 * number)
        session.receive(error(number, code, b"no"), 100.0 + 3 * number)
    ((ended, failure),) = session.take_events()
    assert ended is call
    assert type(failure) is kind
    assert is_empty(session)


@pytest.mark.parametrize("limits", [{"timeout": 0.9}, {"silence": 0.9, "stream": True}])
def test_no_attempt_is_made_after_the_time_of_a_request(limits: dict[str, Any]) -> None:
    session, (call,) = asking(retry=RETRY, **limits)
    session.receive(error(1, 429, b"full"), 100.0)
    ((ended, failure),) = session.take_events()
    assert ended is call
    assert isinstance(failure, RetryLater)


def test_a_stream_is_not_retried_after_its_first_part() -> None:
    session, _ = asking(many=2, stream=True, silence=2.0, retry=RETRY)
    session.receive(partial(1, b"part"), 100.0)
    session.receive(error(1, 503, b"draining"), 100.0)
    session.receive(error(2, 503, b"draining"), 100.0)
    _, (_, failure) = session.take_events()
    assert isinstance(failure, RetryLater)
    session.tick(101.1)
    assert len(sent(session)) == 1
    session.tick(102.1)  # the silence counts from the beginning
    ((_, failure),) = session.take_events()
    assert isinstance(failure, RequestTimeout)


def test_a_request_that_waits_for_its_next_attempt_can_be_cancelled() -> None:
    session, calls = asking(many=2, retry=RETRY)
    for number in (1, 2):
        session.receive(error(number, 429, b"full"), 100.0)
    session.cancel(calls[0])
    session.close(lambda: ClosedError("closed"))
    ((ended, failure),) = session.take_events()
    assert ended is calls[1]
    assert isinstance(failure, ClosedError)
    assert sent(session) == []
    assert is_empty(session)
