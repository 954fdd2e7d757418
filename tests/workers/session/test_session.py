"""The worker's machine: C6 to C10, its part of C13, C16, C24 and of X1, and its life with brokers of other habits."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.x1_client import Highest

from zmdp.mdp import wire
from zmdp.mdp.errors import SettingError
from zmdp.mdp.limits import DEFAULT_ENDPOINT, MAX_BODY, MAX_BODY_FRAMES
from zmdp.mdp.transport.failover import PROBE_INTERVAL, PROBE_TIMEOUT_SECONDS
from zmdp.mdp.wire import batch, x1
from zmdp.mdp.wire.commands import KINDS
from zmdp.workers.session.held import PREFETCH_SECONDS, CreditController
from zmdp.workers.session.request import Request
from zmdp.workers.session.session import SPARE_SECONDS, UNHEARD_PATIENCE_SECONDS, WorkerSession
from zmdp.workers.session.states import (
    CLOSED,
    SERVING,
    WAITING,
    Cancelled,
    ConnectionEnded,
    HandlerStuck,
    SessionSettings,
)

pytestmark = pytest.mark.unit

HEADS = {"X1": [b"", b"MDPWX1"], "0.2": [b"MDPW02"], "0.1": [b"", b"MDPW01"]}
PROTOCOLS = list(HEADS)
OLDER = ["0.2", "0.1"]
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
each_older = pytest.mark.parametrize("protocol", OLDER)

ROUTE = (b"w", b"")
Command = tuple[Any, ...]


# ── messages, as a broker sees them ──────────────────────────────────────────────────────────────────────────────────


def commands(protocol: str, messages: list[list[bytes]]) -> list[Command]:
    """What was sent, one tuple for each command."""
    found: list[Command] = []
    for message in messages:
        head = len(HEADS[protocol])
        assert message[:head] == HEADS[protocol]
        if protocol != "X1":
            found.append(_older(protocol, *message[head:]))
        elif len(message) == head:
            found.append(("HEARTBEAT",))
        else:
            assert message[head] == wire.BATCH
            found += map(_record, batch.from_worker([b"w", *message], 2, ROUTE, 1 << 30, 1000))
    return found


def _record(each: Any) -> Command:
    match each:
        case wire.Ready():
            return ("READY", each.credit, each.service)
        case wire.Reply():
            return ("FINAL" if each.final else "PARTIAL", each.id, *each.body)
        case wire.Error():
            return ("ERROR", each.id, each.code, each.text, *each.detail)
        case wire.Credit():
            return ("CREDIT", each.credit)
        case wire.Release():
            return ("RELEASE", each.id)
        case wire.Disconnect(text=b""):
            return ("DISCONNECT",)
        case wire.Disconnect():
            return ("DISCONNECT", each.text)
    raise AssertionError(each)


def _older(protocol: str, code: bytes, *rest: bytes) -> Command:
    kind = KINDS[HEADS[protocol][-1]][code].value
    if len(rest) > 1:
        address, empty, *body = rest
        assert empty == b""
        return (kind, wire.id_of(address), *body)
    return (kind, *rest)


def sent(session: WorkerSession, protocol: str = "X1") -> list[Command]:
    return commands(protocol, session.take_messages())


def wait(session: WorkerSession, until: float) -> None:
    """Tick whenever the session asks for it, as a process that is not held up does."""
    while session.state.connected and (due := session.deadline()) is not None and due <= until:
        session.tick(due)


def reason(session: WorkerSession) -> str | None:
    """Why the connection has ended since the last call, or None."""
    ended = [each for each in session.take_events() if isinstance(each, ConnectionEnded)]
    return ended[-1].reason if ended else None


def ready(protocol: str, credit: int = 1) -> Command:
    return ("READY", credit, b"echo") if protocol == "X1" else ("READY", b"echo")


def heartbeat(protocol: str) -> list[bytes]:
    return HEADS[protocol] if protocol == "X1" else [*HEADS[protocol], b"\x04" if protocol == "0.1" else b"\x05"]


def disconnect(protocol: str, text: bytes = b"") -> list[bytes]:
    if protocol == "X1":
        return wire.disconnect((b"",), wire.WX1, text)
    return [*HEADS[protocol], b"\x05" if protocol == "0.1" else b"\x06"]


def works(
    *addresses: int, body: tuple[bytes, ...] = (b"x",), ttl: int = 0, attempt: int = 1, options: bytes = b""
) -> list[bytes]:
    """A message of REQUESTs (X1)."""
    packed = batch.Batch((b"",), wire.WX1)
    for address in addresses:
        packed.request_to_worker(address, ttl, attempt, options, body)
    (message,) = packed.messages()
    return list(message)


def work(protocol: str, address: int = 7, *body: bytes, options: bytes = b"") -> list[bytes]:
    if protocol == "X1":
        return works(address, body=body or (b"x",), options=options)
    return [*HEADS[protocol], b"\x02", b"%d" % address, b"", *(body or (b"x",))]


def cancels(*addresses: int) -> list[bytes]:
    packed = batch.Batch((b"",), wire.WX1)
    for address in addresses:
        packed.signal(x1.WORKER_CANCEL, address)
    (message,) = packed.messages()
    return list(message)


def connected(controller: int | CreditController = 1, **given: Any) -> WorkerSession:
    """A session that has connected at 100 s, with a heartbeat of 1 s and a patience of 5 s; READY was taken."""
    made = CreditController(controller) if isinstance(controller, int) else controller
    session = WorkerSession(b"echo", SessionSettings(**given), controller=made, rng=Highest())
    session.connected(100.0)
    session.take_messages()
    return session


def holding(
    *addresses: int, controller: int | CreditController = 64, **given: Any
) -> tuple[WorkerSession, list[Request]]:
    """A session that was given these requests at 100.5 s, and has begun them."""
    session = connected(controller, **given)
    session.receive(works(*addresses), 100.5)
    begun = [session.begin(100.5) for _ in addresses]
    assert all(begun)
    return session, [each for each in begun if each is not None]


def busy(protocol: str = "X1", *, options: bytes = b"", **given: Any) -> tuple[WorkerSession, Request]:
    """A session that was given one request, and has begun it."""
    session = connected(protocol=protocol, **given)
    session.receive(work(protocol, 7, b"1", options=options), 100.5)
    request = session.begin(100.5)
    assert request is not None
    return session, request


# ── connecting ───────────────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
def test_ready_comes_first(protocol: str) -> None:
    # C7, C24
    session = WorkerSession(b"echo", SessionSettings(protocol))
    assert (session.state, session.deadline()) == (WAITING, 0.0)
    session.connected(100.0)
    assert sent(session, protocol) == [ready(protocol)]
    assert session.state.connected
    session.tick(100.0)
    assert session.take_messages() == []  # sent once


def test_ready_says_what_operators_see() -> None:
    options = b'{"name":"me","host":"here","pid":7,"version":"1"}'
    session = WorkerSession(b"echo", options=options, controller=CreditController(3))
    session.connected(0.0)
    (message,) = session.take_messages()
    (command,) = batch.from_worker([b"w", *message], 2, ROUTE, 1000, 10)
    assert command == wire.Ready(ROUTE, wire.WX1, b"echo", 3, "me", "here", 7, "1")


@pytest.mark.parametrize(
    ("service", "given", "text"),
    [
        (b"echo", {"protocol": "0.3"}, "protocol is '0.3': it must be one of X1, 0.2, 0.1"),
        (b"", {}, "b'' is not a valid service name: it must have 1 to 255 bytes of printable text"),
        (b"echo", {"heartbeat": 0.001}, "heartbeat is 0.001: it must be 0.01 seconds or more"),
        (b"echo", {"heartbeat": float("nan")}, "heartbeat is nan: it must be 0.01 seconds or more"),
        (b"echo", {"liveness": 0}, "liveness is 0: it must be 1 interval or more"),
    ],
)
def test_settings_out_of_range(service: bytes, given: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        WorkerSession(service, SessionSettings(**given))
    assert str(caught.value) == text


@pytest.mark.parametrize("name", ["mmi.mine", b"mmi.service"])
def test_a_reserved_name_is_refused_at_once(name: str | bytes) -> None:
    # C25
    with pytest.raises(SettingError) as caught:
        WorkerSession(name)
    text = name.decode() if isinstance(name, bytes) else name
    assert str(caught.value) == f"service {text!r} is reserved: the broker itself offers services named mmi.*"


# ── requests and replies ─────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
def test_a_request(protocol: str) -> None:
    # C7
    session = connected(protocol=protocol)
    session.receive(work(protocol, 7, b"1", b"2"), 100.5)
    assert session.waiting == 1
    request = session.begin(100.5)
    assert request is not None
    assert session.begin(100.5) is None
    assert session.held == {7: request}
    assert (list(request), request.service, request.client) == ([b"1", b"2"], "echo", b"7")
    assert request.body is request
    assert (request.headers, request.options, request.attempt) == ({}, {}, 1)
    assert (request.deadline, request.cancelled) == (None, False)


@pytest.mark.parametrize("protocol", ["X1", "0.2"])
def test_partials_and_one_final(protocol: str) -> None:
    # C8
    session, request = busy(protocol)
    assert session.partial(request, [b"a"], 101.0)
    assert session.partial(request, [b"b", b"c"], 102.0)
    assert session.final(request, [b"d"], 103.0)
    assert sent(session, protocol) == [("PARTIAL", 7, b"a"), ("PARTIAL", 7, b"b", b"c"), ("FINAL", 7, b"d")]
    assert session.held == {}
    assert not session.final(request, [b"d"], 103.0)
    assert not session.partial(request, [b"e"], 103.0)
    assert session.take_messages() == []


def test_a_01_worker_puts_all_parts_into_its_reply() -> None:
    # C24
    session, request = busy("0.1")
    session.partial(request, [b"a"], 101.0)
    session.partial(request, [b"b", b"c"], 102.0)
    assert session.take_messages() == []
    session.final(request, [b"d"], 103.0)
    assert sent(session, "0.1") == [("FINAL", 7, b"a", b"b", b"c", b"d")]


def test_a_01_worker_answers_with_a_failure_if_its_parts_together_exceed_the_limits() -> None:
    # C24
    session, request = busy("0.1")
    for _ in range(3):
        session.partial(request, [b""] * (MAX_BODY_FRAMES // 2), 101.0)
    session.final(request, [b"d"], 103.0)
    text = f"the parts of the reply together have more than {MAX_BODY} bytes or {MAX_BODY_FRAMES} frames"
    assert sent(session, "0.1") == [("FINAL", 7, b"zmdp.error", b"413", text.encode())]


def test_a_01_worker_forgets_the_parts_of_a_request_it_lost() -> None:
    # C24
    session, request = busy("0.1")
    session.partial(request, [b"a"], 101.0)
    session.lose("test", 102.0)
    session.final(request, [b"late"], 102.5)
    session.connected(103.0)
    session.receive(work("0.1"), 104.0)
    again = session.begin(104.0)
    assert again is not None
    session.final(again, [b"z"], 105.0)
    assert sent(session, "0.1") == [("READY", b"echo"), ("FINAL", 7, b"z")]


@each_protocol
def test_a_lost_request_is_not_answered(protocol: str) -> None:
    # C9: nothing more is sent, not even on the next connection
    session, request = busy(protocol)
    session.partial(request, [b"not sent yet"], 100.9)
    session.receive(disconnect(protocol), 101.0)
    assert not session.partial(request, [b"a"], 101.0)
    assert not session.final(request, [b"b"], 101.0)
    session.connected(102.0)
    assert not session.final(request, [b"b"], 102.0)
    assert not session.error(request, 500, "b", 102.0)
    assert sent(session, protocol) == [ready(protocol)]
    assert session.held == {}


@each_older
def test_a_second_request_with_the_same_address_ends_the_connection(protocol: str) -> None:
    # C6: that broker cannot be relied on, and its requests cannot be told apart
    session, request = busy(protocol)
    session.receive(work(protocol, 7), 101.0)
    assert reason(session) == "the broker sent a second request with the address of the first"
    assert session.failover.retry_at == 102.0
    assert not session.final(request, [b"a"], 101.5)


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        *[(mine, disconnect(other)) for mine in PROTOCOLS for other in PROTOCOLS if mine != other],
        *[(mine, heartbeat(other)) for mine in PROTOCOLS for other in PROTOCOLS if mine != other],
        *[(mine, work(other, 1, b"x", b"y")) for mine in PROTOCOLS for other in PROTOCOLS if mine != other],
        *[(mine, [*HEADS[mine], b"\x01", b"echo"]) for mine in PROTOCOLS],
        *[(mine, [b"MDPC02", b"\x03", b"echo", b"for a client"]) for mine in PROTOCOLS],
        *[(mine, [b"", b"MDPCX1"]) for mine in PROTOCOLS],
        *[(mine, wire.disconnect((b"",), wire.CX1)) for mine in PROTOCOLS],
        *[(mine, [b"noise"]) for mine in PROTOCOLS],
        *[(mine, []) for mine in PROTOCOLS],
        ("0.2", [b"MDPW02", b"\x02", b"amy", b""]),  # no body
        ("0.2", [b"MDPW02", b"\x08", b"amy", b""]),  # no CANCEL before X1
        ("X1", [*HEADS["X1"], b"\x06"]),  # no records
    ],
)
def test_what_a_worker_does_not_expect_is_ignored(protocol: str, message: list[bytes]) -> None:
    # and is no sign of life either
    session = connected(protocol=protocol)
    session.receive(message, 104.9)
    assert (session.state, session.held) == (SERVING, {})
    wait(session, 105.0)
    assert reason(session) == "the broker has been silent for 5 s"


# ── X1: options, ERROR, CANCEL ───────────────────────────────────────────────────────────────────────────────────────


def test_a_request_has_its_ttl_its_attempt_and_its_options() -> None:
    session = connected()
    session.receive(works(7, ttl=1500, attempt=2, options=b'{"ttl":9,"headers":{"a":"b"},"key":[1]}'), 100.5)
    request = session.begin(100.5)
    assert request is not None
    assert (request.deadline, request.attempt, request.headers) == (102.0, 2, {"a": "b"})
    assert request.options == {"ttl": 9, "headers": {"a": "b"}, "key": [1]}


def test_options_are_read_only() -> None:
    _, request = busy(options=b'{"headers":{"a":"b"}}')
    with pytest.raises(TypeError):
        request.options["key"] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        request.headers["a"] = "c"  # type: ignore[index]


@pytest.mark.parametrize("detail", [[], [b""], [b"\xff"]], ids=["the broker's", "its own", "with detail"])
def test_an_error(detail: list[bytes]) -> None:
    session, request = busy()
    session.partial(request, [b"a"], 101.0)
    assert session.error(request, 422, "größe", 101.0, detail)
    assert sent(session) == [("PARTIAL", 7, b"a"), ("ERROR", 7, 422, "größe".encode(), *detail)]
    assert session.held == {}
    assert not session.error(request, 422, "again", 101.0)
    assert not session.final(request, [b"b"], 101.0)


@each_older
def test_an_error_before_x1_is_told_in_the_final(protocol: str) -> None:
    session, request = busy(protocol)
    session.partial(request, [b"part"], 100.9)
    session.take_messages()
    session.error(request, 422, "it broke", 101.0, [b"detail"])
    assert sent(session, protocol) == [("FINAL", 7, b"zmdp.error", b"422", b"it broke")]
    assert session.held == {}


@each_protocol
@pytest.mark.parametrize("code", [1000, -1, "bad", None, 10**30])
def test_a_code_that_has_not_three_digits_is_told_as_a_failure(code: Any, protocol: str) -> None:
    # the broker would drop it as invalid, and the request would never end
    session, request = busy(protocol)
    session.error(request, code, "it broke", 101.0)
    (command,) = sent(session, protocol)
    text = f"it broke (code {code!r})".encode()
    assert command == (("ERROR", 7, 500, text) if protocol == "X1" else ("FINAL", 7, b"zmdp.error", b"500", text))


def test_a_request_is_cancelled() -> None:
    session, (first, second) = holding(1, 2)
    session.receive(cancels(2), 101.0)
    assert (first.cancelled, second.cancelled, session.take_events()) == (False, True, [Cancelled(second)])
    session.receive(cancels(2), 101.0)
    assert session.take_events() == []
    assert session.take_messages() == []
    # it is ended all the same, which frees its credit
    session.error(second, 499, "cancelled", 102.0)
    assert sent(session) == [("ERROR", 2, 499, b"cancelled")]
    assert session.held == {1: first}


def test_a_request_that_is_cancelled_before_it_begins_never_does() -> None:
    session = connected(64)
    session.receive(works(1, 2, 3), 101.0)
    session.receive(cancels(2), 101.0)
    assert session.take_events() == []  # no handler has it
    assert sent(session) == [("ERROR", 2, 499, b"cancelled")]
    begun = [session.begin(101.0), session.begin(101.0), session.begin(101.0)]
    assert [each and each.client for each in begun] == [b"1", b"3", None]


@each_protocol
@pytest.mark.parametrize("how", ["DISCONNECT", "silence", "trouble"])
def test_a_request_whose_connection_is_lost_is_cancelled(protocol: str, how: str) -> None:
    # nobody waits for its reply any more
    session, request = busy(protocol)
    if how == "DISCONNECT":
        session.receive(disconnect(protocol), 101.0)
    elif how == "silence":
        wait(session, 200.0)
    else:
        session.lose("trouble", 101.0)
    assert request.cancelled
    assert Cancelled(request) in session.take_events()


# ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_more_begin_than_run_at_a_time() -> None:
    session = connected(2)
    session.receive(works(1, 2, 3), 101.0)
    first = session.begin(101.0)
    assert first is not None
    assert session.begin(101.0) is not None
    assert session.begin(101.0) is None
    assert session.waiting == 1  # the broker had more credit than there is, but nothing is lost
    assert session.to_begin == 0
    session.final(first, [b""], 102.0)
    assert session.to_begin == 1
    assert session.begin(102.0) is not None


def test_a_duplicate_is_the_same_dispatch() -> None:
    session, (request,) = holding(1)
    session.receive(works(1, 2), 101.0)
    assert session.waiting == 1
    assert session.held[1] is request


def test_short_handlers_raise_the_credit_and_a_slow_one_returns_what_waits() -> None:
    session = connected(CreditController(1, prefetch=True))
    now = 101.0
    seen = []
    for address in range(100):
        session.receive(works(address), now)
        request = session.begin(now)
        assert request is not None
        session.final(request, [b""], now + 0.00001)
        seen += [command[1] for command in sent(session) if command[0] == "CREDIT"]
    assert seen == sorted(seen)
    assert seen[-1] == session.credit > 10
    session.receive(works(200, 201, 202), now)
    assert session.begin(now) is not None
    assert session.deadline() == now + PREFETCH_SECONDS
    session.tick(now + PREFETCH_SECONDS / 2)
    assert session.take_messages() == []
    session.tick(now + PREFETCH_SECONDS)
    assert session.take_messages() == []  # perhaps this process was held up: it looks again
    assert session.deadline() == pytest.approx(now + 1.5 * PREFETCH_SECONDS)
    session.tick(now + 1.9 * PREFETCH_SECONDS)
    assert sent(session) == [("RELEASE", 202), ("RELEASE", 201), ("CREDIT", 1)]
    assert list(session.held) == [200]
    assert session.deadline() > now + 2 * PREFETCH_SECONDS  # once
    session.receive(works(203), now + 2 * PREFETCH_SECONDS)  # it was on its way
    session.tick(now + 2 * PREFETCH_SECONDS)
    assert sent(session) == [("RELEASE", 203)]


def test_a_slow_handler_keeps_what_other_threads_can_begin() -> None:
    session = connected(CreditController(3, prefetch=True))
    session.receive(works(1, 2, 3, 4, 5), 101.0)
    assert session.begin(101.0) is not None
    session.tick(101.0 + PREFETCH_SECONDS)
    session.take_messages()
    session.tick(101.0 + 2 * PREFETCH_SECONDS)
    assert sent(session) == [("RELEASE", 5), ("RELEASE", 4)]
    assert session.begin(101.1) is not None
    assert session.begin(101.1) is not None


def test_handlers_of_lost_requests_take_credit_until_they_end() -> None:
    session, (first, second) = holding(1, 2, controller=3)
    session.lose("test", 101.0)
    assert session.credit == 1
    session.connected(102.0)
    session.receive(works(5, 6), 102.0)
    assert session.begin(102.0) is not None
    assert session.begin(102.0) is None
    assert not session.final(first, [b""], 103.0)
    assert session.begin(103.0) is not None
    assert not session.error(second, 500, "", 103.0)
    assert not session.final(second, [b""], 103.0)
    assert sent(session) == [("READY", 1, b"echo"), ("CREDIT", 2), ("CREDIT", 3)]


# ── handlers that do not end ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_stuck_handler_ends_the_connection_when_the_others_have_ended() -> None:
    # The broker blames what a lost connection holds: it is to hold the stuck request and nothing else.
    session, (stuck, other) = holding(1, 2, controller=3, handler_timeout=2.0)
    session.receive(heartbeat("X1"), 101.0)
    session.receive(works(3, 4), 101.0)
    assert session.begin(101.0) is not None  # the third
    session.partial(other, [b"part"], 102.0)  # a sign of life
    session.take_messages()
    assert session.deadline() <= 102.5
    session.tick(102.5)
    assert session.take_events() == [HandlerStuck(stuck)]
    hung = b"its handler has neither returned nor yielded for 2 s (handler_timeout)"
    assert [each for each in sent(session) if each[0] != "HEARTBEAT"] == [("RELEASE", 4), ("DISCONNECT", hung)]
    session.receive(works(5), 102.6)  # the broker had not read that
    assert sent(session) == [("RELEASE", 5)]
    session.final(other, [b"done"], 102.7)
    assert session.state.connected
    session.final(session.held[3], [b"done"], 102.8)
    ended = ConnectionEnded("a handler does not end", keep_messages=True)
    assert session.take_events() == [ended, Cancelled(stuck)]
    assert (stuck.cancelled, other.cancelled) == (True, False)
    assert sent(session) == [("FINAL", 2, b"done"), ("FINAL", 3, b"done")]
    assert (session.deadline(), session.credit) == (102.8, 2)
    session.connected(103.0)
    session.final(stuck, [b"late"], 104.0)
    assert sent(session) == [("READY", 2, b"echo"), ("CREDIT", 3)]


def test_a_stuck_handler_that_ends_after_all() -> None:
    session, (stuck, other) = holding(1, 2, handler_timeout=2.0)
    session.partial(other, [b"alive"], 102.0)
    session.tick(102.5)
    session.final(stuck, [b"late"], 103.0)
    session.final(other, [b"done"], 103.1)
    assert session.state.connected
    session.receive(disconnect("X1"), 103.2)  # the answer to DISCONNECT
    assert (reason(session), session.credit, session.deadline()) == ("the broker sent DISCONNECT", 64, 103.2)


@each_older
def test_a_stuck_handler_before_x1(protocol: str) -> None:
    session, request = busy(protocol, handler_timeout=2.0)
    session.receive(heartbeat(protocol), 101.0)
    session.tick(101.1)
    session.take_messages()
    session.tick(102.5)
    assert reason(session) == "a handler does not end"
    assert [each for each in sent(session, protocol) if each[0] != "HEARTBEAT"] == [("DISCONNECT",)]
    assert session.deadline() is None
    session.final(request, [b"late"], 110.0)
    assert session.deadline() == 102.5


def test_a_handler_that_ended_without_a_reply() -> None:
    # its task was cancelled by somebody else
    session, (first, second) = holding(1, 2)
    session.abandon(first, 101.0, ended=True)
    assert sent(session) == [("DISCONNECT",)]
    session.final(second, [b"x"], 102.0)
    assert (reason(session), session.credit) == ("a handler does not end", 64)
    session.abandon(first, 103.0, ended=True)
    assert session.credit == 64


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_broker_that_does_not_answer_disconnect() -> None:
    session, (request,) = holding(1)
    session.leave(101.0)
    for now in (104.0, 108.0, 112.0):
        session.receive(heartbeat("X1"), now)
        session.tick(now)
    assert session.state is not CLOSED
    session.final(request, [b""], 112.0)
    patience = session.heartbeats.patience
    session.receive(heartbeat("X1"), 115.0)
    session.tick(112.0 + patience - 0.1)
    assert session.state is not CLOSED
    assert session.deadline() == 112.0 + patience
    session.tick(112.0 + patience)
    assert session.state is CLOSED


def test_a_broker_that_was_never_heard_is_not_waited_for() -> None:
    session = connected()
    session.leave(101.0)
    session.tick(101.0 + UNHEARD_PATIENCE_SECONDS)
    assert session.state is CLOSED
    assert session.take_events() == [ConnectionEnded("closed", keep_messages=False)]
    assert sent(session)[-1] == ("DISCONNECT",)  # READY has no answer: it may be there all the same


@each_older
def test_before_x1_it_leaves_when_nothing_is_held(protocol: str) -> None:
    # C10, C16: the broker forgets it at once
    session, request = busy(protocol)
    session.leave(101.0)
    assert session.take_messages() == []
    session.final(request, [b"done"], 102.0)
    assert session.state is CLOSED
    assert sent(session, protocol) == [("FINAL", 7, b"done"), ("DISCONNECT",)]
    idle = connected(protocol=protocol)
    idle.receive(heartbeat(protocol), 101.0)
    idle.leave(101.0)
    assert (idle.state, sent(idle, protocol)) == (CLOSED, [("DISCONNECT",)])
    assert idle.take_events() == [ConnectionEnded("closed", keep_messages=True)]


@each_older
def test_before_x1_a_request_that_was_on_its_way_is_left_to_the_broker(protocol: str) -> None:
    session, request = busy(protocol)
    session.leave(101.0)
    session.receive(work(protocol, 8), 101.1)
    assert session.begin(101.1) is None
    session.error(request, 500, "it broke", 102.0)
    assert session.state is CLOSED
    assert [each[0] for each in sent(session, protocol)] == ["FINAL", "DISCONNECT"]


@each_protocol
def test_closing_does_not_wait_for_anything(protocol: str) -> None:
    session, request = busy(protocol)
    session.partial(request, [b"a"], 101.0)
    session.close("closed", 101.0)
    assert (session.state, session.unsent) == (CLOSED, False)
    assert session.take_events() == [ConnectionEnded("closed"), Cancelled(request)]
    session.close("again", 101.0)
    assert session.take_events() == []


@each_protocol
def test_leaving_without_a_connection(protocol: str) -> None:
    session = WorkerSession(b"echo", SessionSettings(protocol))
    session.leave(1.0)
    assert session.state is CLOSED
    assert session.take_messages() == []
    lost, request = busy(protocol)
    lost.lose("test", 101.0)
    lost.leave(102.0)
    assert lost.state is CLOSED
    assert lost.deadline() is None
    assert request.cancelled


# ── losing the connection ────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
@pytest.mark.parametrize("heard", [heartbeat, work])
def test_disconnect_from_a_broker_that_knew_this_worker(protocol: str, heard: Callable[[str], list[bytes]]) -> None:
    # C9: connect again at once
    session = connected(protocol=protocol)
    session.receive(heard(protocol), 100.5)
    session.receive(disconnect(protocol), 101.0)
    assert (reason(session), session.held) == ("the broker sent DISCONNECT, as it does when it restarts", {})
    assert session.failover.retry_at == session.deadline() == 101.0
    session.connected(101.0)
    assert sent(session, protocol) == [ready(protocol)]


@each_protocol
def test_disconnect_from_a_broker_that_was_never_heard(protocol: str) -> None:
    # C9: it may refuse READY for ever, so connect again later and later
    session = WorkerSession(b"echo", SessionSettings(protocol), rng=Highest())
    waits = []
    for now in range(1000, 1700, 100):
        session.connected(now)
        session.receive(disconnect(protocol), now + 1.0)
        waits.append(session.failover.retry_at - now - 1.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0]


def test_a_broker_that_refuses_the_worker_says_why() -> None:
    # It will refuse READY again, so the worker waits even if the broker was heard
    session = connected()
    session.receive(heartbeat("X1"), 101.0)
    session.receive(disconnect("X1", "no\n\u00e9".encode()), 102.0)
    assert session.take_events() == [ConnectionEnded("the broker refused this worker: no?\u00e9", refused=True)]
    assert (session.failover.dismissed, session.failover.retry_at) == (False, 103.0)
    session.connected(103.0)
    session.receive(disconnect("X1"), 104.0)
    assert session.take_events() == [ConnectionEnded("the broker sent DISCONNECT")]


@each_protocol
def test_only_a_broker_that_was_heard_dismisses_the_worker(protocol: str) -> None:
    session = connected(protocol=protocol)
    session.receive(disconnect(protocol), 101.0)
    assert not session.failover.dismissed  # READY was refused
    session.connected(102.0)
    session.receive(heartbeat(protocol), 103.0)
    session.receive(disconnect(protocol), 104.0)
    assert session.failover.dismissed
    assert session.failover.retry_at == 104.0
    session.connected(104.0)
    wait(session, 109.0)
    assert reason(session) == "the broker has been silent for 5 s"
    assert not session.failover.dismissed


def test_silence_is_told_in_rounded_seconds() -> None:
    session = connected(heartbeat=1.0)
    session.receive(heartbeat("X1"), 101.0)
    session.receive(heartbeat("X1"), 102.04685)
    wait(session, 200.0)
    assert reason(session) == "the broker has been silent for 5.23 s"


def test_many_workers_do_not_come_back_at_the_same_time() -> None:
    waits = []
    for seed in range(200):
        session = WorkerSession(b"echo", rng=random.Random(seed))
        session.lose("test", 0.0)
        waits.append(session.failover.retry_at)
    assert 0.5 <= min(waits) < 0.55
    assert 0.95 < max(waits) <= 1.0


@each_protocol
def test_silence_of_the_broker(protocol: str) -> None:
    # C9, C13
    session = connected(protocol=protocol)
    session.receive(heartbeat(protocol), 102.0)
    session.tick(106.9)
    assert session.state.connected
    session.tick(107.0)
    assert reason(session) == "the broker has been silent for 5 s"
    assert session.take_messages() == []
    assert session.failover.retry_at == session.deadline() == 107.0
    session.connected(107.0)
    session.tick(116.9)
    assert session.state.connected  # it is more patient now


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        *[(protocol, work(protocol)) for protocol in PROTOCOLS],
        ("X1", cancels(99)),
        ("X1", works(7, options=b"[]")),
        ("X1", [*HEADS["X1"], b"\x09", b"\xff"]),
    ],
)
def test_any_command_shows_that_the_broker_lives(protocol: str, message: list[bytes]) -> None:
    # C13
    session = connected(protocol=protocol)
    session.receive(message, 104.0)
    session.tick(108.9)
    assert session.state.connected


@each_protocol
def test_a_worker_that_was_held_up_looks_again_before_it_gives_up_its_broker(protocol: str) -> None:
    # ZeroMQ's thread was held up too: what the broker sent meanwhile may reach the socket a moment later.
    session = connected(protocol=protocol)
    session.receive(heartbeat(protocol), 102.0)
    wait(session, 102.0)
    session.tick(107.5)
    assert session.state.connected
    session.receive(heartbeat(protocol), 107.51)
    wait(session, 112.4)
    assert session.state.connected
    wait(session, 112.6)
    assert reason(session) == "the broker has been silent for 5 s"


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
def test_a_heartbeat_an_interval(protocol: str) -> None:
    # C13
    session = connected(protocol=protocol)
    assert session.deadline() == 101.0
    session.tick(100.9)
    assert session.take_messages() == []
    session.tick(101.0)
    assert session.take_messages() == [heartbeat(protocol)]
    assert session.deadline() == 102.0
    session.tick(101.5)
    assert session.take_messages() == []
    session.tick(102.0)
    assert session.take_messages() == [heartbeat(protocol)]


def test_the_answer_to_ready_teaches_no_interval() -> None:  # C13
    session = connected()
    session.receive(heartbeat("X1"), 100.1)
    assert session.heartbeats.heard
    session.tick(100.9)
    assert session.take_messages() == []
    assert session.deadline() == 101.0


@pytest.mark.parametrize("end", ["FINAL", "ERROR"])
@pytest.mark.parametrize("protocol", ["X1", "0.2"])
def test_no_heartbeat_within_an_interval_of_another_command(protocol: str, end: str) -> None:
    # C13
    session, request = busy(protocol)
    session.partial(request, [b"a"], 100.9)
    session.take_messages()
    session.tick(101.0)
    assert session.take_messages() == []
    if end == "FINAL":
        session.final(request, [b"b"], 101.8)
    else:
        session.error(request, 500, "b", 101.8)
    session.take_messages()
    session.tick(101.9)
    assert session.take_messages() == []
    session.tick(102.8)
    assert session.take_messages() == [heartbeat(protocol)]


def test_a_01_worker_sends_heartbeats_while_it_keeps_its_parts() -> None:
    # C13, C24
    session, request = busy("0.1")
    session.partial(request, [b"a"], 100.9)
    session.tick(101.0)
    assert session.take_messages() == [heartbeat("0.1")]


def test_the_deadline_is_the_heartbeat_or_the_end_of_the_patience() -> None:
    session = connected(heartbeat=4.0, liveness=1)
    session.tick(103.9)
    assert session.deadline() == 104.0
    session.receive(work("X1"), 103.0)
    session.tick(104.0)
    assert session.deadline() == 107.0


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

frames = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"", b"MDPW01", b"MDPW02", b"MDPWX1", b"\x02", b"\x04", b"\x05", b"\x06", b"\x09", b"amy"]),
    st.sampled_from([works(1)[-1], works(1, 2, 3)[-1], cancels(1, 2)[-1], works(2)[-1][:-1], disconnect("X1")[-1]]),
)


@settings(deadline=None)
@given(protocol=st.sampled_from(PROTOCOLS), messages=st.lists(st.lists(frames, max_size=6)))
def test_no_bytes_do_harm(protocol: str, messages: list[list[bytes]]) -> None:
    session = WorkerSession(b"echo", SessionSettings(protocol), controller=CreditController(2))
    session.connected(0.0)
    for message in messages:
        session.receive(message, 0.0)
        request = session.begin(0.0)
        assert request is None or session.held[request.address] is request
        assert not session.held or session.state.connected


# ── any order of events ──────────────────────────────────────────────────────────────────────────────────────────────

events = st.one_of(
    st.tuples(st.just("work"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["begin", "final", "error", "partial", "cancel"]), st.integers(0, 9)),
    st.tuples(st.just("pass"), st.sampled_from([0.0, 0.0002, 0.002, 0.5, 3.0])),
    st.tuples(st.sampled_from(["leave", "disconnect", "abandon", "beat", "connect"]), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(
    protocol=st.sampled_from(PROTOCOLS),
    parallel=st.integers(1, 4),
    handler_timeout=st.sampled_from([None, 2.0]),
    script=st.lists(events, max_size=60),
)
def test_a_connection_ends_each_request_that_it_took_once(  # noqa: PLR0912 - one branch for each event
    protocol: str, parallel: int, handler_timeout: float | None, script: list[tuple[str, Any]]
) -> None:
    """Whatever happens: on one connection, each request is held, or ended once, or released before it began."""
    controller = CreditController(parallel, prefetch=True) if protocol == "X1" else CreditController(1)
    given = SessionSettings(protocol, handler_timeout=handler_timeout)
    session = WorkerSession(b"echo", given, controller=controller, rng=random.Random(1))
    now, address = 0.0, 0
    given_out: set[int] = set()
    ended: set[int] = set()
    begun: set[int] = set()
    running: list[Request] = []
    for event, value in [("connect", 0), *script]:
        pick = running[value % len(running)] if running and isinstance(value, int) else None
        due = session.deadline()
        if event == "connect":
            if not session.state.connected and due is not None and now >= due:
                session.connected(now)
                given_out, ended = set(), set()
        elif event == "work":
            packed = [work(protocol, address + n) for n in range(value)]
            if session.state.connected and not (protocol != "X1" and session.state.leaving):
                given_out.update(range(address, address + value))
                for message in packed:
                    session.receive(message, now)
            address += value
        elif event == "begin":
            request = session.begin(now)
            if request is not None:
                begun.add(request.address)  # type: ignore[arg-type]
                running.append(request)
        elif event in {"final", "error"} and pick is not None:
            running = [each for each in running if each is not pick]  # they are lists: equal ones are not the same
            if event == "final":
                session.final(pick, [b"x"], now)
            else:
                session.error(pick, 500, "x", now)
        elif event == "partial" and pick is not None:
            session.partial(pick, [b"p"], now)
        elif event == "cancel" and address and protocol == "X1":
            session.receive(cancels(max(0, address - 1 - value)), now)
        elif event == "abandon" and pick is not None:
            session.abandon(pick, now)
        elif event == "beat":
            session.receive(heartbeat(protocol), now)
        elif event == "disconnect":
            session.receive(disconnect(protocol), now)
        elif event == "leave":
            session.leave(now)
        elif event == "pass":
            now += value
            for _ in range(3):  # what is due is done, and then it is not due any more
                due = session.deadline()
                if due is not None and now >= due:
                    session.tick(now)
            due = session.deadline()
            assert not session.state.connected or (due is not None and due > now)
        was_lost = not session.state.connected
        for command in sent(session, protocol):
            if command[0] in {"FINAL", "ERROR", "RELEASE"}:
                assert command[1] in given_out - ended
                assert command[0] != "RELEASE" or command[1] not in begun
                ended.add(command[1])
            elif command[0] == "CREDIT":
                assert command[1] >= 0
        if not was_lost:
            assert set(session.held) == given_out - ended
        else:
            assert not session.held
        assert session.credit >= 0


def test_a_request_that_was_cancelled_before_it_began_is_not_released() -> None:
    session = connected(controller=CreditController(3))
    session.receive(works(1, 2, 3), 101.0)
    session.receive(cancels(3), 101.0)
    session.take_messages()
    session.leave(101.0)
    assert [each for each in sent(session) if each[0] == "RELEASE"] == [("RELEASE", 2), ("RELEASE", 1)]


def test_a_request_of_a_lost_connection_is_not_abandoned_again() -> None:
    session = connected()
    session.receive(work("X1"), 101.0)
    request = session.begin(101.0)
    assert request is not None
    session.lose("lost", 102.0)
    session.abandon(request, 103.0)
    assert session.credit == 0  # its handler has not ended
    session.abandon(request, 104.0, ended=True)
    assert session.credit == 1


# ── several brokers ──────────────────────────────────────────────────────────────────────────────────────────────────

A, B, C = ("tcp://a:1", "tcp://b:1", "tcp://c:1")


def moved(session: WorkerSession) -> tuple[str, float]:
    """Where the session is to connect next, and when."""
    return session.failover.endpoint, session.deadline()


def hear(session: WorkerSession, now: float, protocol: str = "X1") -> None:
    """Let the session connect, and its broker answer."""
    session.connected(now)
    session.receive(heartbeat(protocol), now)
    session.take_messages()


@each_protocol
def test_a_lost_broker_is_followed_by_the_next_at_once_and_all_by_a_backoff(protocol: str) -> None:
    session = connected(protocol=protocol, endpoints=[A, B, C])
    session.receive(heartbeat(protocol), 101.0)
    session.lose("it broke", 102.0)
    assert (moved(session), session.failover.moved) == ((B, 102.0), f"lost the broker at {A}: it broke")
    session.connected(102.0)
    session.lose("nobody", 102.1)
    assert (moved(session), session.failover.moved) == ((C, 102.1), f"cannot use the broker at {B}: nobody")
    session.connected(102.1)
    session.lose("nobody", 102.2)
    assert moved(session) == (A, 103.2)  # all were tried
    for now, following in ((103.2, B), (103.3, C)):
        session.connected(now)
        session.lose("nobody", now)
        assert moved(session) == (following, now)
    session.connected(103.4)
    session.lose("nobody", 104.0)
    assert moved(session) == (A, 106.0)  # the backoff has doubled


def test_a_broker_that_refuses_the_worker_is_followed_by_the_next() -> None:
    session = connected(endpoints=[A, B])
    session.receive(disconnect("X1", b"no"), 101.0)
    assert moved(session) == (B, 101.0)
    assert session.take_events() == [ConnectionEnded("the broker refused this worker: no", refused=True)]


def test_one_broker_is_tried_about_every_second_while_it_drains() -> None:
    session = connected()
    session.receive(heartbeat("X1"), 101.0)
    session.receive(disconnect("X1"), 102.0)
    assert (moved(session), session.failover.moved) == ((DEFAULT_ENDPOINT, 102.0), "")
    for now in (102.0, 103.0, 104.0, 105.0):
        session.connected(now)
        session.receive(disconnect("X1"), now)
        assert session.deadline() == now + 1.0
        assert session.failover.dismissed
    session.connected(106.0)
    session.lose("nobody", 107.0)
    assert session.deadline() == 108.0


def asks(session: WorkerSession, now: float) -> bool:
    """Whether the session asks if the first broker is back."""
    session.tick(now)
    return session.take_probe(now) == A


def probed_at(session: WorkerSession, now: float) -> float:
    """When the session wants a probe, after `now`."""
    while not asks(session, now):
        assert now < 1000
        session.receive(heartbeat("X1"), now)
        now += 0.125
    return now


def at_second(*, credit: int = 2, **given: Any) -> WorkerSession:
    """A session that lost its first broker at 100 s."""
    session = connected(credit, endpoints=[A, B], **given)
    session.lose("nobody", 100.0)
    hear(session, 100.0)
    return session


def test_the_first_broker_is_probed_at_growing_intervals() -> None:
    session = at_second()
    assert session.deadline() == 101.0
    now, times = 100.0, []
    for _ in range(7):
        assert not asks(session, now)
        now = probed_at(session, now)
        times.append(now)
        assert session.failover.probe_at == now + PROBE_TIMEOUT_SECONDS  # one is under way
        session.probed(False, now)
    assert [after - before for before, after in zip([100.0, *times], times, strict=False)] == [1, 2, 4, 8, 15, 15, 15]
    assert set(sent(session)) == {("HEARTBEAT",)}


@each_older
def test_workers_of_mdp_do_not_probe(protocol: str) -> None:
    session = connected(protocol=protocol, endpoints=[A, B])
    session.lose("nobody", 100.0)
    hear(session, 100.0, protocol)
    assert session.failover.probe_at == math.inf


def reported(session: WorkerSession, now: float) -> float:
    """Report that the first broker is back; return when an idle session acts on that."""
    session.probed(True, now)
    return now + SPARE_SECONDS


def back(session: WorkerSession, now: float = 101.0) -> float:
    """The same, after the session has asked for a probe."""
    assert asks(session, now)
    assert sent(session) == [("HEARTBEAT",)]
    reported(session, now)
    assert sent(session) == []
    return now + SPARE_SECONDS


def test_an_idle_worker_returns_as_soon_as_the_broker_could_have_sent_it_more() -> None:
    session = at_second()
    then = back(session)
    session.tick(then - 0.01)
    session.take_messages()  # a HEARTBEAT
    assert session.deadline() == then
    session.tick(then)
    assert sent(session) == [("DISCONNECT",)]
    session.receive(disconnect("X1"), 101.6)
    assert (moved(session), session.failover.moved) == ((A, 101.6), f"the broker at {A} is back")


def test_a_worker_without_credit_to_spare_does_not_return() -> None:
    # Requests may wait at the broker that it would leave
    session = at_second(credit=2)
    session.receive(works(1, 2), 100.5)
    one, two = session.begin(100.5), session.begin(100.5)
    assert one is not None
    assert two is not None
    back(session)
    session.tick(103.0)
    assert sent(session) == [("HEARTBEAT",)]
    session.final(one, [b"y"], 103.0)
    session.receive(works(3), 103.02)  # the broker had more
    session.tick(103.9)
    assert session.begin(103.9) is not None
    session.final(two, [b"y"], 103.9)
    session.take_messages()
    assert session.deadline() == 103.9 + SPARE_SECONDS
    session.tick(103.9 + SPARE_SECONDS)
    assert sent(session) == [("DISCONNECT",)]


def test_a_worker_finishes_what_it_has_begun_before_it_returns() -> None:
    session = at_second(credit=5)
    session.controller.concurrency = 2
    session.receive(works(1, 2, 3, 4), 100.5)
    begun = [session.begin(100.5), session.begin(100.5)]
    session.tick(back(session))
    assert sent(session) == [("RELEASE", 4), ("RELEASE", 3), ("DISCONNECT",)]
    session.receive(works(5), 101.1)  # the broker had not read that
    assert sent(session) == [("RELEASE", 5)]
    for request in begun:
        assert request is not None
        assert session.final(request, [b"y"], 110.0)
    assert sent(session) == [("FINAL", 1, b"y"), ("FINAL", 2, b"y")]
    assert session.state.connected
    session.receive(disconnect("X1"), 110.1)
    assert moved(session) == (A, 110.1)
    assert session.take_events()[-1] == ConnectionEnded("the broker sent DISCONNECT", dismissed=True)


@pytest.mark.parametrize("how", ["silence", "no answer", "end"])
def test_a_worker_returns_even_if_its_broker_does_not_let_it_go(how: str) -> None:
    session = at_second()
    session.tick(back(session))
    if how == "end":
        session.lose("it closed the connection", 101.5)
    elif how == "silence":
        session.tick(106.5)
    else:
        session.receive(heartbeat("X1"), 105.9)
        session.tick(106.5)
    assert session.failover.endpoint == A
    assert session.deadline() == (101.5 if how == "end" else 106.5)
    assert session.failover.moved == f"the broker at {A} is back"


def test_a_broker_that_answers_probes_but_not_workers_is_probed_less_and_less() -> None:
    session = at_second()
    now, times = 100.0, []
    for _ in range(4):
        before, now = now, probed_at(session, now)
        times.append(now - before)
        session.tick(reported(session, now))
        session.receive(disconnect("X1"), now)
        assert session.failover.endpoint == A
        session.connected(now)
        session.receive(disconnect("X1"), now)  # READY was refused
        assert session.failover.endpoint == B
        hear(session, now)
    assert times == [1, 2, 4, 8]
    session.tick(reported(session, probed_at(session, now)))
    session.receive(disconnect("X1"), now)
    hear(session, now)  # now the first is of use
    now += PROBE_INTERVAL[1]
    session.lose("it broke", now)
    hear(session, now)
    assert probed_at(session, now) - now == 1


def test_a_probe_that_ends_too_late_changes_nothing() -> None:
    session = at_second()
    assert asks(session, 101.0)
    session.lose("it broke", 101.0)
    session.probed(True, 101.1)
    assert moved(session) == (A, 101.0)
    leaving = at_second()
    assert asks(leaving, 101.0)
    leaving.take_messages()
    leaving.leave(101.0)
    leaving.probed(True, 101.1)
    assert sent(leaving) == [("DISCONNECT",)]
    leaving.receive(disconnect("X1"), 101.2)
    assert (leaving.state, leaving.deadline()) == (CLOSED, None)
