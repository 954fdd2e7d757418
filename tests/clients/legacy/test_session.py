"""The client's state machine for 0.2 and 0.1: C1 to C5 and the client's part of C24."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.clients.calls.reply import Reply
from zmdp.clients.legacy import session as module
from zmdp.clients.legacy.session import GiveUp, LegacySession, Resend
from zmdp.mdp.errors import BrokerUnreachable, RequestRejected, RequestTimeout, SettingError, StreamInterrupted
from zmdp.mdp.limits import Limits

pytestmark = pytest.mark.unit

REQUEST = [b"MDPC02", b"\x01", b"echo", b"hello"]


def partial(*body: bytes, service: bytes = b"echo") -> list[bytes]:
    return [b"MDPC02", b"\x02", service, *body]


def final(*body: bytes, service: bytes = b"echo") -> list[bytes]:
    return [b"MDPC02", b"\x03", service, *body]


def told(reply: Reply | None) -> tuple[list[bytes], str, bool] | None:
    """A reply as a plain value."""
    return None if reply is None else (list(reply), reply.service, reply.final)


def asking(
    *, retries: int = 2, stream: bool = False, timeout: float = 5.0, deadline: float | None = None
) -> LegacySession:
    """A session that has sent `REQUEST` at 100 s, with a timeout of 5 s."""
    session = LegacySession()
    session.request(b"echo", [b"hello"], 100.0, timeout=timeout, retries=retries, stream=stream, deadline=deadline)
    assert session.take_messages() == [REQUEST]
    return session


def received(session: LegacySession, message: list[bytes], now: float) -> Reply | None:
    """Receive a message; return the only event, or None if there is none."""
    session.receive(message, now)
    events = session.take_events()
    assert len(events) <= 1
    if not events:
        return None
    assert isinstance(events[0], Reply)
    return events[0]


def ticked(session: LegacySession, now: float, sent: list[list[bytes]] | None = None) -> list[object]:
    """Let it do what is due; return the events.  What it sends is `sent`, by default nothing."""
    session.tick(now)
    assert session.take_messages() == (sent or [])
    return list(session.take_events())


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ("0.2", [b"MDPC02", b"\x01", b"echo", b"a", b"b"]),  # C1, C2: no leading empty frame
        ("0.1", [b"", b"MDPC01", b"echo", b"a", b"b"]),  # C24
    ],
)
def test_a_request(protocol: str, message: list[bytes]) -> None:
    session = LegacySession(protocol)
    assert session.encode(b"echo", [b"a", b"b"]) == message
    assert not session.waiting
    session.request(b"echo", [b"a", b"b"], 0.0, timeout=1.0)
    assert session.take_messages() == [message]
    assert session.waiting


def test_a_request_with_an_envelope() -> None:
    # C36
    session = LegacySession("0.2", envelope=True)
    session.request(b"echo", [b"a"], 0.0, timeout=1.0, retries=1)
    assert session.take_messages() == [[b"", *REQUEST[:3], b"a"]]
    assert ticked(session, 1.0, [[b"", *REQUEST[:3], b"a"]]) == [Resend()]
    assert told(received(session, [b"", *final(b"x")], 1.5)) == ([b"x"], "echo", True)  # C22
    assert LegacySession("0.1", envelope=True).encode(b"echo", [b"a"]) == [b"", b"MDPC01", b"echo", b"a"]


@pytest.mark.parametrize(
    ("protocol", "message", "reply"),
    [
        ("0.2", [b"MDPC02", b"\x02", b"echo", b"a", b"b"], ([b"a", b"b"], "echo", False)),  # C3
        ("0.2", [b"MDPC02", b"\x03", b"echo", b""], ([b""], "echo", True)),  # C3
        ("0.2", [b"", b"MDPC02", b"\x03", b"echo", b"a"], ([b"a"], "echo", True)),  # C22
        ("0.2", [b"MDPC02", b"\x03", b"\xff", b"a"], ([b"a"], "\ufffd", True)),
        ("0.1", [b"", b"MDPC01", b"echo", b"a"], ([b"a"], "echo", True)),  # C24
        ("0.2", [b"", b"MDPC01", b"echo", b"a"], None),  # the other dialect
        ("0.1", [b"MDPC02", b"\x03", b"echo", b"a"], None),
        ("0.2", [b"MDPC02", b"\x01", b"echo", b"a"], None),  # a request
        ("0.2", [b"MDPC02", b"\x03", b"echo"], None),  # no body
        ("0.2", [b"MDPW02", b"\x05"], None),  # for a worker
        ("0.2", [], None),
    ],
)
def test_a_reply(protocol: str, message: list[bytes], reply: tuple[list[bytes], str, bool] | None) -> None:
    assert told(LegacySession(protocol).decode(message)) == reply


def test_a_protocol_that_does_not_exist() -> None:
    with pytest.raises(SettingError, match=r"protocol is .0\.3.: it must be one of 0\.2, 0\.1"):
        LegacySession("0.3")


# ── a request and its reply ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_final_ends_the_request() -> None:
    # C3
    session = asking()
    assert told(received(session, final(b"1", b"2"), 101.0)) == ([b"1", b"2"], "echo", True)
    assert not session.waiting
    assert session.deadline() is None
    assert ticked(session, 200.0) == []
    assert received(session, final(b"again"), 201.0) is None


def test_collected_frames_are_told_apart_from_those_of_the_final() -> None:
    session = asking()
    received(session, partial(b"1", b"2"), 101.0)
    reply = received(session, final(b"3"), 101.0)
    assert reply is not None
    assert (list(reply), reply.collected) == ([b"1", b"2", b"3"], 2)


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_a_failure_reported_in_a_final_is_recognized(protocol: str) -> None:
    session = LegacySession(protocol)
    session.request(b"echo", [b"x"], 0.0, timeout=1.0)
    head = [b"MDPC02", b"\x03", b"echo"] if protocol == "0.2" else [b"", b"MDPC01", b"echo"]
    reply = received(session, [*head, b"zmdp.error", b"500", b"it broke"], 0.5)
    assert reply is not None
    assert reply.failure == (500, "it broke")
    assert not session.waiting


def test_the_size_of_collected_partials_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 210)  # frames have an overhead of 100 each
    session = asking(retries=1)
    for now in (101.0, 107.0):
        assert received(session, partial(b"x" * 6, b"x" * 4), now) is None
        assert ticked(session, 106.0, [REQUEST] if now < 106 else []) == ([Resend()] if now < 106 else [])
    session.receive(partial(b"x"), 108.0)
    (error,) = session.take_events()
    assert isinstance(error, RequestRejected)
    assert str(error) == "the parts of the reply of service 'echo' exceed 210 bytes: use stream()"
    assert (error.service, error.code) == ("echo", 413)
    assert (session.waiting, session.deadline()) == (False, None)
    assert received(session, final(b"x"), 109.0) is None


def test_a_stream_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 10)
    session = asking(stream=True)
    for _ in range(3):
        assert told(received(session, partial(b"x" * 9), 101.0)) == ([b"x" * 9], "echo", False)


def test_other_messages_are_ignored() -> None:
    session = asking()
    assert received(session, final(b"hello", service=b"other"), 101.0) is None
    assert received(session, [b"MDPW02", b"\x06"], 101.0) is None
    assert received(session, [], 101.0) is None
    assert session.waiting
    assert session.deadline() == 105.0


def test_one_request_after_the_other() -> None:
    # C4: what was collected for the first is not in the second's reply
    session = asking()
    received(session, partial(b"1"), 101.0)
    received(session, final(b"2"), 102.0)
    session.request(b"count", [b"x"], 103.0, timeout=1.0)
    assert session.take_messages() == [[b"MDPC02", b"\x01", b"count", b"x"]]
    assert told(received(session, final(b"3", service=b"count"), 103.5)) == ([b"3"], "count", True)


# ── Lazy Pirate ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_silence_sends_the_request_again_and_then_gives_up() -> None:
    # C5
    session = asking(retries=2)
    assert session.deadline() == 105.0
    assert ticked(session, 104.9) == []
    assert ticked(session, 105.0, [REQUEST]) == [Resend()]
    assert session.deadline() == 110.0
    assert ticked(session, 110.0, [REQUEST]) == [Resend()]
    assert ticked(session, 115.0) == [GiveUp()]
    assert not session.waiting


def test_a_reply_to_a_later_try() -> None:
    # C5
    session = asking()
    assert ticked(session, 105.0, [REQUEST]) == [Resend()]
    assert told(received(session, final(b"late"), 107.0)) == ([b"late"], "echo", True)


def test_another_try_discards_collected_parts() -> None:
    # C5: parts of a reply that broke off are not part of the next
    session = asking()
    received(session, partial(b"1"), 101.0)
    received(session, partial(b"2"), 102.0)
    assert ticked(session, 107.0, [REQUEST]) == [Resend()]
    received(session, partial(b"1"), 108.0)
    assert told(received(session, final(b"end"), 109.0)) == ([b"1", b"end"], "echo", True)


def test_after_giving_up_the_next_request_starts_from_nothing() -> None:
    session = asking(retries=0, stream=True)
    received(session, partial(b"1"), 101.0)
    assert ticked(session, 106.0) == [GiveUp()]
    session.request(b"echo", [b"hello"], 110.0, timeout=5.0, retries=1)
    assert session.take_messages() == [REQUEST]
    assert ticked(session, 115.0, [REQUEST]) == [Resend()]
    assert told(received(session, final(b"2"), 116.0)) == ([b"2"], "echo", True)


# ── the end of its time ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deadline_ends_the_request_whatever_has_arrived() -> None:
    session = asking(retries=0, deadline=103.0)
    received(session, partial(b"1"), 102.0)
    assert session.deadline() == 103.0
    assert ticked(session, 103.0) == [GiveUp()]


def test_a_request_without_a_limit_waits() -> None:
    session = asking(timeout=inf)
    assert session.deadline() is None
    assert ticked(session, 1e9) == []
    assert told(received(session, final(b"1"), 1e9)) == ([b"1"], "echo", True)


def test_what_a_request_without_a_reply_raises() -> None:
    session = asking(retries=1)
    ticked(session, 105.0, [REQUEST])
    assert ticked(session, 110.0) == [GiveUp()]
    error = session.error("tcp://here:5555", None)
    assert type(error) is RequestTimeout
    assert str(error) == "no reply from service 'echo' through tcp://here:5555 (2 tries, 5 s each)"
    error = session.error("tcp://here:5555", "nothing is listening there")
    assert type(error) is BrokerUnreachable
    assert str(error).endswith("(2 tries, 5 s each): nothing is listening there")
    assert error.service == "echo"


def test_what_a_stream_that_has_stopped_raises() -> None:
    session = asking(stream=True)
    received(session, partial(b"1"), 101.0)
    assert ticked(session, 106.0) == [GiveUp()]
    error = session.error("tcp://here:5555", None)
    assert type(error) is StreamInterrupted
    assert str(error) == "the stream of service 'echo' stopped: nothing arrived for 5 s after a part"


@pytest.mark.parametrize(
    ("service", "size", "text"),
    [
        (b"mmi.service", 1, "the broker at tcp://here:5555 does not answer mmi.service within 1 s"),
        (b"echo", 1, "no reply from service 'echo' through tcp://here:5555 within 1 s"),
        (b"echo", Limits().max_message // 2, "bytes: does that exceed the broker's max_message?"),
    ],
)
def test_the_error_says_what_may_be_wrong(service: bytes, size: int, text: str) -> None:
    session = LegacySession()
    session.request(service, [bytes(size)], 0.0, timeout=1.0)
    assert str(session.error("tcp://here:5555", None)).endswith(text)


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

frames = st.one_of(
    st.binary(max_size=8), st.sampled_from([b"", b"MDPC01", b"MDPC02", b"\x01", b"\x02", b"\x03", b"echo"])
)


@given(protocol=st.sampled_from(["0.1", "0.2"]), stream=st.booleans(), messages=st.lists(st.lists(frames, max_size=6)))
def test_any_bytes_are_harmless(protocol: str, stream: bool, messages: list[list[bytes]]) -> None:
    session = LegacySession(protocol)
    session.request(b"echo", [b"hello"], 0.0, timeout=1.0, stream=stream)
    replies = [reply for message in messages if (reply := received(session, message, 0.0)) is not None]
    assert {reply.service for reply in replies} <= {"echo"}
    assert [reply.final for reply in replies].count(True) == (not session.waiting)
