"""The steps of Titanic's clients, driven without a broker and without waiting."""

from types import SimpleNamespace
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
from zmdp.titanic import TitanicError, UnknownTicket, conversation
from zmdp.titanic.conversation import CallTitanic, CheckAvailable, PartialsCursor, Sleep

X1 = SimpleNamespace(protocol="X1", endpoint="tcp://127.0.0.1:5555")
OLD = SimpleNamespace(protocol="0.2", endpoint="tcp://127.0.0.1:5555")
UUID_TEXT = "00112233445566778899aabbccddeeff"


def reply(*frames, final=True):
    return Reply(frames, service="titanic", final=final)


def result_of(steps, answer):
    """Return what the generator returns after this answer."""
    with pytest.raises(StopIteration) as end:
        steps.send(answer)
    return end.value.value


def test_submit_sends_a_uuid_of_its_own():
    steps = conversation.submit(X1, "echo", [b"body"], {"a": "b"}, {"priority": 5, "ttl": 2})
    call = next(steps)
    sent = dict(call.options)
    assert UUID(sent.pop("uuid")).version == 7
    assert sent == {"priority": 5, "result_ttl": 2000}
    assert (call.service, call.frames, call.headers) == ("titanic.request", (b"echo", b"body"), {"a": "b"})
    assert result_of(steps, reply(b"200", UUID_TEXT.encode())) == (UUID_TEXT, "echo")


def test_each_submission_has_another_uuid():
    calls = [next(conversation.submit(X1, "echo", [], None, {})) for _ in range(100)]
    assert len({call.options["uuid"] for call in calls}) == 100


@pytest.mark.parametrize(("caller", "options"), [(X1, {"key": "k"}), (OLD, {})])
def test_submit_sends_no_uuid_with_a_key_or_in_another_protocol(caller, options):
    call = next(conversation.submit(caller, "echo", [], None, options))
    assert call.options == (options or None)
    assert call.frames == (b"echo", b"")


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ((b"400 no such option",), SettingError),
        ((b"500 full",), TitanicError),
        ((b"???",), TitanicError),
    ],
)
def test_a_rejected_submission(frames, error):
    steps = conversation.submit(X1, "echo", [], None, {})
    next(steps)
    with pytest.raises(error):
        steps.send(reply(*frames))


def test_a_timeout_without_a_titanic_is_service_not_found():
    steps = conversation.close(OLD, UUID_TEXT)
    next(steps)
    assert steps.throw(RequestTimeout("late")) == CheckAvailable("titanic.close")
    with pytest.raises(ServiceNotFound, match=r"no Titanic .* at tcp://127\.0\.0\.1:5555, .* offers titanic\.close"):
        steps.send(False)


@pytest.mark.parametrize("error", [ServiceNotFound("nobody", code=404), WorkerLost("lost", code=502)])
def test_a_call_is_repeated_while_titanic_restarts(error):
    steps = conversation.submit(X1, "echo", [b"body"], None, {})
    call = next(steps)
    assert not call.wait
    for _ in range(3):
        assert steps.throw(error) == Sleep(conversation.RESTART_POLL_SECONDS)
        assert steps.send(None) == call  # with the same UUID
    assert result_of(steps, reply(b"200", UUID_TEXT.encode())) == (UUID_TEXT, "echo")


def test_a_call_fails_if_no_titanic_registers(monkeypatch):
    monkeypatch.setattr(conversation, "RESTART_SECONDS", 0.0)
    steps = conversation.submit(X1, "echo", [b"body"], None, {})
    next(steps)
    with pytest.raises(ServiceNotFound, match=r"no Titanic .* at tcp://127\.0\.0\.1:5555"):
        steps.throw(ServiceNotFound("nobody", code=404))


@pytest.mark.parametrize(
    "sign",
    [
        reply(b"300"),  # Titanic answers when it stops
        WorkerLost("lost", code=502),
        None,
    ],
)
def test_result_waits_on_when_titanic_has_stopped(sign):
    steps = conversation.result(X1, UUID_TEXT, None, submitted=sign is None)
    next(steps)
    if sign is not None:
        pause = steps.throw(sign) if isinstance(sign, WorkerLost) else steps.send(sign)
        assert isinstance(pause, Sleep)
        assert isinstance(steps.send(None), CallTitanic)
    for _ in range(3):
        assert isinstance(steps.throw(RequestTimeout("late")), CallTitanic)  # it has waited at the broker
    assert result_of(steps, reply(b"200", b"end")) == [b"end"]


def test_result_waits_no_longer_than_its_timeout():
    steps = conversation.result(X1, UUID_TEXT, 1e-9, submitted=False)
    next(steps)
    steps.send(reply(b"300"))
    with pytest.raises(RequestTimeout, match="has no reply after"):
        steps.send(None)


def test_result_needs_a_titanic_at_first(monkeypatch):
    monkeypatch.setattr(conversation, "RESTART_SECONDS", 0.0)
    steps = conversation.result(X1, UUID_TEXT, None, submitted=False)
    next(steps)
    assert steps.throw(RequestTimeout("late")) == CheckAvailable("titanic.reply")
    with pytest.raises(ServiceNotFound):
        steps.send(False)


def test_result_gives_a_titanic_time_to_restart():
    steps = conversation.result(X1, UUID_TEXT, None, submitted=False)
    next(steps)
    assert steps.throw(RequestTimeout("late")) == CheckAvailable("titanic.reply")
    for _ in range(3):
        assert steps.send(False) == Sleep(conversation.RESTART_POLL_SECONDS)
        assert steps.send(None) == CheckAvailable("titanic.reply")
    assert isinstance(steps.send(True), CallTitanic)
    assert isinstance(steps.throw(RequestTimeout("late")), CallTitanic)  # from now on it may come back


def test_a_timeout_with_a_titanic_is_a_timeout():
    steps = conversation.close(OLD, UUID_TEXT)
    next(steps)
    steps.throw(RequestTimeout("late"))
    with pytest.raises(RequestTimeout, match="late"):
        steps.send(True)


def test_without_a_broker_nobody_is_asked_for_a_titanic():
    steps = conversation.close(OLD, UUID_TEXT)
    next(steps)
    with pytest.raises(BrokerUnreachable):
        steps.throw(BrokerUnreachable("gone"))


def test_result_polls_with_growing_pauses_until_there_is_a_reply():
    steps = conversation.result(OLD, UUID_TEXT, None, submitted=False)
    assert next(steps).options is None
    pauses = []
    for _ in range(8):
        pause = steps.send(reply(b"300"))
        assert isinstance(pause, Sleep)
        pauses.append(pause.seconds)
        assert isinstance(steps.send(None), CallTitanic)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert result_of(steps, reply(b"200", b"one", b"two")) == [b"one", b"two"]


def test_result_without_waiting_asks_once():
    steps = conversation.result(X1, UUID_TEXT, 0, submitted=False)
    assert next(steps).options is None
    with pytest.raises(RequestTimeout, match="has no reply after 0 s"):
        steps.send(reply(b"300"))


def test_result_of_a_failed_request():
    steps = conversation.result(X1, UUID_TEXT, None, submitted=False)
    assert next(steps).options == {"wait": True}
    with pytest.raises(ServiceError) as failed:
        steps.send(reply(b"500 no such record", b"404", b"echo", b"detail"))
    assert (failed.value.code, failed.value.text, failed.value.detail) == (404, "no such record", b"detail")
    assert failed.value.service == "echo"


@pytest.mark.parametrize(
    ("answer", "reason"), [((b"400 anything", b"unknown-uuid"), "unknown-uuid"), ((b"400",), "")], ids=["X1", "0.2"]
)
def test_an_unknown_request(answer, reason):
    steps = conversation.ready(X1, UUID_TEXT)
    next(steps)
    with pytest.raises(UnknownTicket, match=UUID_TEXT) as raised:
        steps.send(reply(*answer))
    assert raised.value.reason == reason


def test_the_text_decides_nothing():
    steps = conversation.ready(X1, UUID_TEXT)
    next(steps)
    with pytest.raises(SettingError, match="unknown uuid"):
        steps.send(reply(b"400 unknown uuid", b"malformed"))


def test_a_cursor_continues_where_its_stream_broke_off():
    cursor = PartialsCursor(X1, UUID_TEXT, 3, None, submitted=False)
    assert cursor.options == {"partials": True, "from": 3, "wait": True}
    assert cursor.take(reply(b"part", final=False))
    assert cursor.options["from"] == 4
    assert not cursor.take(reply(b"300"))
    assert not cursor.ended
    assert cursor.pause() == 0.05
    assert not cursor.take(reply(b"200", b"end"))
    assert cursor.ended


def test_a_cursor_goes_on_after_a_timeout_while_there_is_a_titanic():
    cursor = PartialsCursor(X1, UUID_TEXT, 0, None, submitted=False)
    steps = cursor.failed(RequestTimeout("late"))
    assert next(steps) == CheckAvailable("titanic.reply")
    assert result_of(steps, True) is None
    with pytest.raises(StopIteration):  # from now on it may come back
        next(cursor.failed(RequestTimeout("late")))


def test_a_cursor_needs_a_titanic_at_first(monkeypatch):
    monkeypatch.setattr(conversation, "RESTART_SECONDS", 0.0)
    steps = PartialsCursor(X1, UUID_TEXT, 0, None, submitted=False).failed(RequestTimeout("late"))
    next(steps)
    with pytest.raises(ServiceNotFound):
        steps.send(False)


@pytest.mark.parametrize("submitted", [True, False])
def test_a_cursor_waits_on_when_titanic_has_stopped(submitted):
    cursor = PartialsCursor(X1, UUID_TEXT, 0, None, submitted=submitted)
    if not submitted:
        assert cursor.take(reply(b"part", final=False))
    with pytest.raises(StopIteration):
        next(cursor.failed(RequestTimeout("late")))


@pytest.mark.parametrize("error", [StreamInterrupted("cut"), WorkerLost("lost", code=502)])
def test_a_cursor_pauses_when_its_titanic_was_lost(error):
    steps = PartialsCursor(X1, UUID_TEXT, 0, None, submitted=False).failed(error)
    assert isinstance(next(steps), Sleep)
    assert result_of(steps, None) is None
