"""The client's state machine for 0.2 and 0.1: C1 to C5 and the client's part of C24."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.clients.legacy_session import GiveUp, LegacySession, Reply, Resend
from zmdp.mdp.errors import SettingError

REQUEST = [b"MDPC02", b"\x01", b"echo", b"hello"]


def partial(*body: bytes, service: bytes = b"echo") -> list[bytes]:
    return [b"MDPC02", b"\x02", service, *body]


def final(*body: bytes, service: bytes = b"echo") -> list[bytes]:
    return [b"MDPC02", b"\x03", service, *body]


def told(reply: Reply | None) -> tuple[list[bytes], str, bool] | None:
    """A reply as a plain value."""
    return None if reply is None else (list(reply), reply.service, reply.final)


def asking(*, retries: int = 2, stream: bool = False) -> LegacySession:
    """A session that has sent `REQUEST` at 100 s, with a timeout of 5 s."""
    session = LegacySession()
    message = session.request(b"echo", [b"hello"], 100.0, timeout=5.0, retries=retries, stream=stream)
    assert message == REQUEST
    return session


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
    assert session.request(b"echo", [b"a", b"b"], 0.0, timeout=1.0, retries=0) == message
    assert session.waiting


def test_a_request_with_an_envelope() -> None:
    # C36
    session = LegacySession("0.2", envelope=True)
    assert session.request(b"echo", [b"a"], 0.0, timeout=1.0, retries=1) == [b"", *REQUEST[:3], b"a"]
    assert session.tick(1.0) == Resend([b"", *REQUEST[:3], b"a"])
    assert told(session.receive([b"", *final(b"x")], 1.5)) == ([b"x"], "echo", True)  # C22
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
    assert told(session.receive(final(b"1", b"2"), 101.0)) == ([b"1", b"2"], "echo", True)
    assert not session.waiting
    assert session.deadline() is None
    assert session.tick(200.0) is None
    assert session.receive(final(b"again"), 201.0) is None


def test_partials_are_collected_before_the_final() -> None:
    session = asking()
    assert session.receive(partial(b"1"), 101.0) is None
    assert session.receive(partial(b"2", b"3"), 102.0) is None
    assert told(session.receive(final(b"4"), 103.0)) == ([b"1", b"2", b"3", b"4"], "echo", True)


def test_collected_frames_are_told_apart_from_those_of_the_final() -> None:
    session = asking()
    session.receive(partial(b"1", b"2"), 101.0)
    reply = session.receive(final(b"3"), 101.0)
    assert reply is not None
    assert (list(reply), reply.collected) == ([b"1", b"2", b"3"], 2)


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_a_failure_reported_in_a_final_is_recognized(protocol: str) -> None:
    session = LegacySession(protocol)
    session.request(b"echo", [b"x"], 0.0, timeout=1.0, retries=0)
    head = [b"MDPC02", b"\x03", b"echo"] if protocol == "0.2" else [b"", b"MDPC01", b"echo"]
    reply = session.receive([*head, b"zmdp.error", b"500", b"it broke"], 0.5)
    assert reply is not None
    assert reply.failure == (500, "it broke")
    assert not session.waiting


def test_partials_are_returned_as_they_arrive() -> None:
    session = asking(stream=True)
    assert told(session.receive(partial(b"1"), 101.0)) == ([b"1"], "echo", False)
    assert told(session.receive(partial(b"2"), 102.0)) == ([b"2"], "echo", False)
    assert told(session.receive(final(b"3"), 103.0)) == ([b"3"], "echo", True)


def test_other_messages_are_ignored() -> None:
    session = asking()
    assert session.receive(final(b"hello", service=b"other"), 101.0) is None
    assert session.receive([b"MDPW02", b"\x06"], 101.0) is None
    assert session.receive([], 101.0) is None
    assert session.waiting
    assert session.deadline() == 105.0


def test_a_reply_before_any_request_is_ignored() -> None:
    assert LegacySession().receive(final(b"hello"), 100.0) is None


def test_one_request_after_the_other() -> None:
    # C4: what was collected for the first is not in the second's reply
    session = asking()
    session.receive(partial(b"1"), 101.0)
    session.receive(final(b"2"), 102.0)
    assert session.request(b"count", [b"x"], 103.0, timeout=1.0, retries=0) == [b"MDPC02", b"\x01", b"count", b"x"]
    assert told(session.receive(final(b"3", service=b"count"), 103.5)) == ([b"3"], "count", True)


# ── Lazy Pirate ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_silence_sends_the_request_again_and_then_gives_up() -> None:
    # C5
    session = asking(retries=2)
    assert session.deadline() == 105.0
    assert session.tick(104.9) is None
    assert session.tick(105.0) == Resend(REQUEST)
    assert session.deadline() == 110.0
    assert session.tick(110.0) == Resend(REQUEST)
    assert session.tick(115.0) == GiveUp(tries=3, streamed=False)
    assert not session.waiting


def test_without_retries_there_is_one_try() -> None:
    # C5
    session = asking(retries=0)
    assert session.tick(105.0) == GiveUp(tries=1, streamed=False)


def test_a_reply_to_a_later_try() -> None:
    # C5
    session = asking()
    session.tick(105.0)
    assert told(session.receive(final(b"late"), 107.0)) == ([b"late"], "echo", True)


def test_a_partial_ends_the_silence() -> None:
    session = asking()
    session.receive(partial(b"1"), 104.0)
    assert session.deadline() == 109.0
    assert session.tick(105.0) is None


def test_another_try_discards_collected_parts() -> None:
    # C5: parts of a reply that broke off are not part of the next
    session = asking()
    session.receive(partial(b"1"), 101.0)
    session.receive(partial(b"2"), 102.0)
    assert session.tick(107.0) == Resend(REQUEST)
    session.receive(partial(b"1"), 108.0)
    assert told(session.receive(final(b"end"), 109.0)) == ([b"1", b"end"], "echo", True)


def test_a_stream_that_has_begun_is_not_sent_again() -> None:
    session = asking(stream=True)
    session.receive(partial(b"1"), 101.0)
    assert session.tick(106.0) == GiveUp(tries=1, streamed=True)


def test_a_stream_that_has_not_begun_is_sent_again() -> None:
    session = asking(stream=True)
    assert session.tick(105.0) == Resend(REQUEST)


def test_after_giving_up_the_next_request_starts_from_nothing() -> None:
    session = asking(retries=0, stream=True)
    session.receive(partial(b"1"), 101.0)
    session.tick(106.0)
    session.request(b"echo", [b"hello"], 110.0, timeout=5.0, retries=1)
    assert session.tick(115.0) == Resend(REQUEST)
    assert told(session.receive(final(b"2"), 116.0)) == ([b"2"], "echo", True)


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

frames = st.one_of(
    st.binary(max_size=8), st.sampled_from([b"", b"MDPC01", b"MDPC02", b"\x01", b"\x02", b"\x03", b"echo"])
)


@given(protocol=st.sampled_from(["0.1", "0.2"]), stream=st.booleans(), messages=st.lists(st.lists(frames, max_size=6)))
def test_any_bytes_are_harmless(protocol: str, stream: bool, messages: list[list[bytes]]) -> None:
    session = LegacySession(protocol)
    session.request(b"echo", [b"hello"], 0.0, timeout=1.0, retries=0, stream=stream)
    replies = [reply for message in messages if (reply := session.receive(message, 0.0)) is not None]
    assert {reply.service for reply in replies} <= {"echo"}
    assert [reply.final for reply in replies].count(True) == (not session.waiting)
