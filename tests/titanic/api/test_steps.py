"""What Titanic's clients ask, and when again: without a broker, and without waiting."""

from types import coroutine
from uuid import UUID

import pytest

from zmdp.clients import (
    BrokerUnreachable,
    Reply,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
)
from zmdp.titanic import TitanicError, UnknownTicket
from zmdp.titanic.api import steps as conversation
from zmdp.titanic.api.steps import Conversation

ID = "00112233445566778899aabbccddeeff"
STORED = (b"200", ID.encode())
LATE, LOST, NOBODY = RequestTimeout("late"), WorkerLost("lost", code=502), ServiceNotFound("nobody", code=404)
RESTARTING = ("sleep", conversation.RESTART_POLL_SECONDS)


@coroutine
def step(*what):
    """Return what the test answers to this step of a conversation."""
    return (yield what)


class Caller:
    """A client each of whose calls is a step."""

    endpoint = "tcp://127.0.0.1:5555"

    def __init__(self, protocol):
        self.protocol = protocol

    async def request(self, service, *frames, **how):
        return Reply(await step(service, frames, how), service=service, final=True)

    async def stream(self, service, *frames, **how):
        while (part := await step("stream", how["options"]["from"])) is not None:
            yield Reply(part, service=service, final=part[0] in {b"200", b"300"})

    async def available(self, service):
        return await step("available", service)


def x1(protocol="X1"):
    return Conversation(Caller(protocol), lambda seconds: step("sleep", seconds))


def play(talk, *answers):
    """Return the steps of a conversation in which these are the answers, errors among them, and how it ends."""
    steps = []
    for answer in (None, *answers):
        try:
            steps.append(talk.throw(answer) if isinstance(answer, Exception) else talk.send(answer))
        except StopIteration as end:
            return steps, end.value
    return steps, None


async def listed(parts):
    return [list(part) async for part in parts]


@pytest.fixture
def no_time(monkeypatch):
    monkeypatch.setattr(conversation, "RESTART_SECONDS", 0.0)


def test_submit_sends_a_uuid_of_its_own():
    uuids = set()
    for _ in range(100):
        talk = x1().submit("echo", [b"body"], {"a": "b"}, {"priority": 5, "ttl": 2})
        [(service, frames, how)], end = play(talk, STORED)
        uuids.add(UUID(how["options"].pop("uuid")))
        assert how == {"options": {"priority": 5, "result_ttl": 2000}, "headers": {"a": "b"}, "wait": False}
        assert (service, frames, end) == ("titanic.request", (b"echo", b"body"), (ID, "echo"))
    assert len(uuids) == 100
    assert {uuid.version for uuid in uuids} == {7}


@pytest.mark.parametrize(("protocol", "options"), [("X1", {"key": "k"}), ("0.2", {})])
def test_submit_sends_no_uuid_with_a_key_or_in_another_protocol(protocol, options):
    [(_, frames, how)], _ = play(x1(protocol).submit("echo", [], None, options))
    assert (how["options"], frames) == (options or None, (b"echo", b""))


@pytest.mark.parametrize(
    ("frames", "error"), [((b"400 no such option",), SettingError), ((b"500 full",), TitanicError),
                          ((b"???",), TitanicError)],
)  # fmt: skip
def test_a_rejected_submission(frames, error):
    with pytest.raises(error):
        play(x1().submit("echo", [], None, {}), frames)


# ── a Titanic that is not there ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [NOBODY, LOST])
def test_a_call_is_repeated_while_titanic_restarts(error):
    steps, end = play(x1().submit("echo", [b"body"], None, {}), *[error, None] * 3, STORED)
    assert steps == [steps[0], *[RESTARTING, steps[0]] * 3]  # with the same UUID
    assert end == (ID, "echo")


@pytest.mark.usefixtures("no_time")
def test_a_call_fails_if_no_titanic_registers():
    with pytest.raises(ServiceNotFound, match=r"no Titanic .* at tcp://127\.0\.0\.1:5555"):
        play(x1().submit("echo", [b"body"], None, {}), NOBODY)


def test_without_x1_a_timeout_tells_whether_there_is_a_titanic():
    steps, _ = play(x1("0.2").close(ID), LATE)
    assert steps[-1] == ("available", "titanic.close")
    with pytest.raises(ServiceNotFound, match=r"no Titanic .* offers titanic\.close"):
        play(x1("0.2").close(ID), LATE, False)
    with pytest.raises(RequestTimeout, match="late"):
        play(x1("0.2").close(ID), LATE, True)
    with pytest.raises(BrokerUnreachable):
        play(x1("0.2").close(ID), BrokerUnreachable("gone"))


WAITING = {
    "result": (lambda **how: x1().result(ID, None, **how), [(b"300",), None], [b"end"]),
    "partials": (lambda **how: listed(x1().partials(ID, 3, None, **how)), [(b"300",), None, None], []),
}
"""What waits for a reply, the answers with which a Titanic that stops ends this, and what comes of `FINAL`."""
FINAL = (b"200", b"end")


@pytest.mark.parametrize(("begin", "stopping", "found"), WAITING.values(), ids=WAITING)
class TestWaiting:
    @pytest.mark.parametrize("sign", ["stopping", "lost", "submitted"])
    def test_goes_on_when_titanic_has_stopped(self, begin, stopping, found, sign):
        answers = {"stopping": stopping, "lost": [LOST, None], "submitted": []}[sign]
        steps, end = play(begin(submitted=sign == "submitted"), *answers, *[LATE] * 3, FINAL)
        assert end == found
        assert all(kind != "available" for kind, *_ in steps)  # it has waited at the broker

    @pytest.mark.usefixtures("no_time")
    def test_needs_a_titanic_at_first(self, begin, stopping, found):
        with pytest.raises(ServiceNotFound):
            play(begin(submitted=False), LATE, False)

    def test_gives_a_titanic_time_to_restart(self, begin, stopping, found):
        steps, end = play(begin(submitted=False), LATE, *[False, None] * 3, True, LATE, FINAL)
        asked = ("available", "titanic.reply")
        assert steps[1:8] == [asked, *[RESTARTING, asked] * 3]
        assert end == found

    def test_fails_without_a_broker(self, begin, stopping, found):
        with pytest.raises(BrokerUnreachable):
            play(begin(submitted=True), BrokerUnreachable("gone"))


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_result_waits_no_longer_than_its_timeout():
    with pytest.raises(RequestTimeout, match="has no reply after"):
        play(x1().result(ID, 1e-9, submitted=False), (b"300",), None)


def test_result_polls_with_growing_pauses_until_there_is_a_reply():
    steps, end = play(x1("0.2").result(ID, None, submitted=False), *[(b"300",), None] * 8, (b"200", b"one", b"two"))
    slept = [seconds for what, *_, seconds in steps if what == "sleep"]
    longest = [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert all(most / 2 <= seconds <= most for seconds, most in zip(slept, longest, strict=True))
    assert steps[0][2]["options"] is None
    assert end == [b"one", b"two"]


def test_result_without_waiting_asks_once():
    with pytest.raises(RequestTimeout, match="has no reply after 0 s"):
        play(x1().result(ID, 0, submitted=False), (b"300",))


def test_result_of_a_failed_request():
    with pytest.raises(ServiceError) as failed:
        play(x1().result(ID, None, submitted=False), (b"500 no such record", b"404", b"echo", b"detail"))
    assert (failed.value.code, failed.value.text, failed.value.detail) == (404, "no such record", b"detail")
    assert failed.value.service == "echo"


@pytest.mark.parametrize(
    ("answer", "reason"), [((b"400 anything", b"unknown-uuid"), "unknown-uuid"), ((b"400",), "")], ids=["X1", "0.2"]
)
def test_an_unknown_request(answer, reason):
    with pytest.raises(UnknownTicket, match=ID) as raised:
        play(x1().ready(ID), answer)
    assert raised.value.reason == reason


def test_the_text_decides_nothing():
    with pytest.raises(SettingError, match="unknown uuid"):
        play(x1().ready(ID), (b"400 unknown uuid", b"malformed"))


def test_partials_go_on_where_their_stream_broke_off():
    answers = [(b"a",), StreamInterrupted("cut"), None, (b"b",), (b"300",), None, None, (b"c",), (b"200", b"end")]
    steps, end = play(listed(x1().partials(ID, 3, None, submitted=False)), *answers)
    assert end == [[b"a"], [b"b"], [b"c"]]
    first, second = (seconds for what, *_, seconds in steps if what == "sleep")
    assert max(first, second) <= 0.05  # each part begins anew
    assert [at for what, at in steps if what == "stream"] == [3, 3, 4, 4, 4, 5, 5]
