"""The worker's machine: C6 to C10, its part of C13 and C24 and of X1, and its life with brokers of other habits."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.mdp.broker import Broker
from zmdp.mdp.errors import SettingError
from zmdp.mdp.limits import Limits
from zmdp.workers.request import Request
from zmdp.workers.session import WorkerSession

HEADS = {"X1": [b"MDPWX1"], "0.2": [b"MDPW02"], "0.1": [b"", b"MDPW01"]}
PROTOCOLS = list(HEADS)
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def ready(protocol: str) -> list[bytes]:
    return [*HEADS[protocol], b"\x01", b"echo"]


def heartbeat(protocol: str) -> list[bytes]:
    return [*HEADS[protocol], b"\x04" if protocol == "0.1" else b"\x05"]


def disconnect(protocol: str) -> list[bytes]:
    return [*HEADS[protocol], b"\x05" if protocol == "0.1" else b"\x06"]


def work(protocol: str, *body: bytes, options: bytes = b"") -> list[bytes]:
    return [*HEADS[protocol], b"\x02", b"amy", b"", *[options] * (protocol == "X1"), *body]


def partial(protocol: str, *body: bytes) -> list[bytes]:
    return [*HEADS[protocol], b"\x03", b"amy", b"", *body]


def final(protocol: str, *body: bytes) -> list[bytes]:
    return [*HEADS[protocol], b"\x03" if protocol == "0.1" else b"\x04", b"amy", b"", *body]


class Highest(random.Random):
    """Jitter at its upper end."""

    def uniform(self, a: float, b: float) -> float:
        return b


def connected(**settings: Any) -> WorkerSession:
    """A session that has connected at 100 s, with a heartbeat of 1 s and a patience of 5 s."""
    session = WorkerSession(b"echo", rng=Highest(), **settings)
    session.connected(100.0)
    return session


def busy(protocol: str = "X1", *, options: bytes = b"", **settings: Any) -> tuple[WorkerSession, Request]:
    """A session that was given a request at 100.5 s."""
    session = connected(protocol=protocol, **settings)
    request = session.receive(work(protocol, b"1", options=options), 100.5)
    assert request is not None
    return session, request


# ── connecting ───────────────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
def test_ready_comes_first(protocol: str) -> None:
    # C7, C24
    session = WorkerSession(b"echo", protocol=protocol)
    assert (session.lost, session.retry_at, session.deadline()) == ("not connected yet", 0.0, 0.0)
    assert session.connected(100.0) == [ready(protocol)]
    assert session.lost is None
    assert session.tick(100.0) == []  # sent once


def test_a_worker_speaks_x1_unless_told_otherwise() -> None:
    assert WorkerSession(b"echo").connected(0.0) == [ready("X1")]


@pytest.mark.parametrize(
    ("service", "settings", "text"),
    [
        (b"echo", {"protocol": "0.3"}, "protocol is '0.3': it is one of X1, 0.2, 0.1"),
        (b"", {}, "b'' is no service name: it takes 1 to 255 bytes of printable text"),
        (b"echo", {"heartbeat": 0.001}, "heartbeat is 0.001: it takes 0.01 seconds or more"),
        (b"echo", {"heartbeat": float("nan")}, "heartbeat is nan: it takes 0.01 seconds or more"),
        (b"echo", {"liveness": 0}, "liveness is 0: it takes a number of intervals, 1 or more"),
    ],
)
def test_settings_out_of_range(service: bytes, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        WorkerSession(service, **settings)
    assert str(caught.value) == text


# ── requests and replies ─────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
def test_a_request(protocol: str) -> None:
    # C7
    session = connected(protocol=protocol)
    request = session.receive(work(protocol, b"1", b"2"), 100.5)
    assert request is session.request
    assert request is not None
    assert (list(request), request.service, request.client) == ([b"1", b"2"], "echo", b"amy")
    assert request.body is request
    assert (request.headers, request.options, request.attempt) == ({}, {}, 1)
    assert (request.deadline, request.cancelled) == (None, False)


@pytest.mark.parametrize("protocol", ["X1", "0.2"])
def test_partials_and_one_final(protocol: str) -> None:
    # C8: exactly one address frame, then one empty frame
    session, request = busy(protocol)
    assert session.partial(request, [b"a"], 101.0) == [partial(protocol, b"a")]
    assert session.partial(request, [b"b", b"c"], 102.0) == [partial(protocol, b"b", b"c")]
    assert session.final(request, [b"d"], 103.0) == [final(protocol, b"d")]
    assert session.request is None
    assert session.final(request, [b"d"], 103.0) == []
    assert session.partial(request, [b"e"], 103.0) == []


def test_a_01_worker_puts_all_parts_into_its_reply() -> None:
    # C24
    session, request = busy("0.1")
    assert session.partial(request, [b"a"], 101.0) == []
    assert session.partial(request, [b"b", b"c"], 102.0) == []
    assert session.final(request, [b"d"], 103.0) == [final("0.1", b"a", b"b", b"c", b"d")]


def test_a_01_worker_forgets_the_parts_of_a_request_it_lost() -> None:
    # C24
    session, request = busy("0.1")
    session.partial(request, [b"a"], 101.0)
    session.lose("test", 102.0)
    session.connected(103.0)
    again = session.receive(work("0.1", b"1"), 104.0)
    assert again is not None
    assert session.final(again, [b"z"], 105.0) == [final("0.1", b"z")]


@each_protocol
def test_a_lost_request_is_not_answered(protocol: str) -> None:
    # C9: nothing more is sent, not even on the next connection
    session, request = busy(protocol)
    session.receive(disconnect(protocol), 101.0)
    assert session.partial(request, [b"a"], 101.0) == []
    assert session.final(request, [b"b"], 101.0) == []
    assert session.error(request, 500, "b", 101.0) == []
    session.connected(102.0)
    assert session.final(request, [b"b"], 102.0) == []
    assert session.error(request, 500, "b", 102.0) == []
    assert session.request is None


@each_protocol
def test_a_second_request_during_the_first_ends_the_connection(protocol: str) -> None:
    # C6: that broker cannot be relied on
    session, request = busy(protocol)
    assert session.receive(work(protocol, b"2"), 101.0) is None
    assert session.lost == "the broker sent a second request during the first"
    assert session.retry_at == 102.0
    assert session.final(request, [b"a"], 101.5) == []


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        *[(mine, disconnect(other)) for mine in PROTOCOLS for other in PROTOCOLS if mine != other],
        *[(mine, heartbeat(other)) for mine in PROTOCOLS for other in PROTOCOLS if mine != other],
        *[(mine, work(other, b"x", b"y")) for mine in PROTOCOLS for other in PROTOCOLS if mine != other],
        *[(mine, ready(mine)) for mine in PROTOCOLS],
        *[(mine, [b"MDPC02", b"\x03", b"echo", b"for a client"]) for mine in PROTOCOLS],
        *[(mine, [b"1", b"", b"MDPCX1", b"\x04", b"echo", b"404", b"for a client"]) for mine in PROTOCOLS],
        *[(mine, [b"noise"]) for mine in PROTOCOLS],
        *[(mine, []) for mine in PROTOCOLS],
        ("0.2", [b"MDPW02", b"\x02", b"amy", b""]),  # no body
        ("0.2", [b"MDPW02", b"\x08", b"amy", b""]),  # no CANCEL before X1
        ("X1", [b"MDPWX1", b"\x02", b"amy", b"", b"x"]),  # no options
        ("X1", [b"MDPWX1", b"\x02", b"amy", b"", b"[]", b"x"]),  # not such
        ("X1", [b"MDPWX1", b"\x08", b"amy"]),  # no delimiter
    ],
)
def test_what_a_worker_does_not_expect_is_ignored(protocol: str, message: list[bytes]) -> None:
    # and is no sign of life either
    session = connected(protocol=protocol)
    assert session.receive(message, 104.9) is None
    assert session.lost is None
    session.tick(105.0)
    assert session.lost == "the broker has been silent for 5 s"


# ── X1 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_has_its_options() -> None:
    _, request = busy(options=b'{"ttl":1500,"headers":{"a":"b"},"key":[1],"attempt":2}')
    assert request.deadline == 102.0
    assert request.headers == {"a": "b"}
    assert request.options == {"ttl": 1500, "headers": {"a": "b"}, "key": [1], "attempt": 2}
    assert request.attempt == 2


def test_options_are_read_only() -> None:
    _, request = busy(options=b'{"headers":{"a":"b"}}')
    with pytest.raises(TypeError):
        request.options["key"] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        request.headers["a"] = "c"  # type: ignore[index]


@pytest.mark.parametrize("detail", [[], [b"\xff"]], ids=["plain", "with detail"])
def test_an_error(detail: list[bytes]) -> None:
    session, request = busy()
    session.partial(request, [b"a"], 101.0)
    assert session.error(request, 422, "größe", 101.0, detail) == [
        [b"MDPWX1", b"\x07", b"amy", b"", b"422", "größe".encode(), *detail]
    ]
    assert session.request is None
    assert session.error(request, 422, "again", 101.0) == []
    assert session.final(request, [b"b"], 101.0) == []


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_an_error_before_x1_is_told_in_the_final(protocol: str) -> None:
    session, request = busy(protocol)
    assert session.error(request, 422, "it broke", 101.0, [b"detail"]) == [
        final(protocol, b"zmdp.error", b"422", b"it broke")
    ]
    assert session.request is None


@each_protocol
@pytest.mark.parametrize("code", [1000, -1, "bad", None, 10**30])
def test_a_code_that_has_not_three_digits_is_told_as_a_failure(code: Any, protocol: str) -> None:
    # the broker would drop it as invalid, and this worker would be busy for ever
    session, request = busy(protocol)
    (message,) = session.error(request, code, "it broke", 101.0)
    assert message[-2:] == [b"500", f"it broke (code {code!r})".encode()]


@pytest.mark.parametrize(("code", "digits"), [(0, b"000"), (7, b"007"), (999, b"999")])
def test_a_code_has_three_digits(code: int, digits: bytes) -> None:
    session, request = busy()
    assert session.error(request, code, "", 101.0) == [[b"MDPWX1", b"\x07", b"amy", b"", digits, b""]]


CANCEL = [b"MDPWX1", b"\x08", b"amy", b""]


def test_a_request_is_cancelled() -> None:
    session, request = busy()
    assert session.receive(CANCEL, 101.0) is None
    assert request.cancelled
    assert (session.request, session.lost) == (request, None)
    # it is ended all the same, or this worker would not be free
    assert session.final(request, [b"a"], 102.0) == [final("X1", b"a")]
    again = session.receive(work("X1", b"2"), 103.0)
    assert again is not None
    assert not again.cancelled


@pytest.mark.parametrize(
    "message", [[b"MDPWX1", b"\x08", b"bob", b""], [*CANCEL, b"x"], [b"MDPW02", b"\x08", b"amy", b""]]
)
def test_a_cancel_for_another_client_is_passed_over(message: list[bytes]) -> None:
    session, request = busy()
    session.receive(message, 101.0)
    assert not request.cancelled


def test_a_cancel_that_comes_too_late_is_passed_over() -> None:
    session, request = busy()
    session.final(request, [b"a"], 101.0)
    assert session.receive(CANCEL, 101.0) is None
    assert (session.lost, request.cancelled) == (None, False)


@each_protocol
@pytest.mark.parametrize("how", ["DISCONNECT", "silence", "a second request", "closed"])
def test_a_request_whose_connection_is_lost_is_cancelled(protocol: str, how: str) -> None:
    # nobody waits for its reply any more
    session, request = busy(protocol)
    if how == "DISCONNECT":
        session.receive(disconnect(protocol), 101.0)
    elif how == "silence":
        session.tick(200.0)
    elif how == "a second request":
        session.receive(work(protocol, b"2"), 101.0)
    else:
        session.disconnect("closed", 101.0)
    assert request.cancelled


# ── losing the connection ────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
@pytest.mark.parametrize("heard", [heartbeat, lambda protocol: work(protocol, b"1")])
def test_disconnect_from_a_broker_that_knew_this_worker(protocol: str, heard: Callable[[str], list[bytes]]) -> None:
    # C9: connect again at once
    session = connected(protocol=protocol)
    session.receive(heard(protocol), 100.5)
    assert session.receive(disconnect(protocol), 101.0) is None
    assert (session.lost, session.request) == ("the broker sent DISCONNECT", None)
    assert session.retry_at == session.deadline() == 101.0
    assert session.connected(101.0) == [ready(protocol)]


@each_protocol
def test_disconnect_from_a_broker_that_was_never_heard(protocol: str) -> None:
    # C9: it may refuse READY for ever, so connect again later and later
    session = connected(protocol=protocol)
    waits = []
    for now in range(1000, 1700, 100):
        session.connected(now)
        session.receive(disconnect(protocol), now + 1.0)
        waits.append(session.retry_at - now - 1.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0]


@each_protocol
def test_the_backoff_begins_again_once_the_broker_is_heard(protocol: str) -> None:
    session = connected(protocol=protocol)
    session.receive(disconnect(protocol), 101.0)
    session.connected(102.0)
    session.receive(heartbeat(protocol), 103.0)
    session.lose("test", 104.0)
    assert session.retry_at == 105.0


def test_many_workers_do_not_come_back_at_the_same_time() -> None:
    waits = []
    for seed in range(200):
        session = WorkerSession(b"echo", rng=random.Random(seed))
        session.lose("test", 0.0)
        waits.append(session.retry_at)
    assert 0.5 <= min(waits) < 0.55
    assert 0.95 < max(waits) <= 1.0


@each_protocol
def test_silence_of_the_broker(protocol: str) -> None:
    # C9, C13
    session = connected(protocol=protocol)
    session.receive(heartbeat(protocol), 102.0)
    session.tick(106.9)
    assert session.lost is None
    assert session.tick(107.0) == []
    assert session.lost == "the broker has been silent for 5 s"
    assert session.retry_at == session.deadline() == 108.0


@pytest.mark.parametrize(
    ("protocol", "message"),
    [*[(protocol, work(protocol, b"1")) for protocol in PROTOCOLS], ("X1", [b"MDPWX1", b"\x08", b"amy", b""])],
)
def test_any_command_shows_that_the_broker_lives(protocol: str, message: list[bytes]) -> None:
    # C13
    session = connected(protocol=protocol)
    session.receive(message, 104.0)
    session.tick(108.9)
    assert session.lost is None


@each_protocol
def test_a_busy_worker_notices_silence_too(protocol: str) -> None:
    # C13
    session, _ = busy(protocol)
    session.tick(105.5)
    assert (session.lost, session.request) == ("the broker has been silent for 5 s", None)


def test_the_patience_with_a_silent_broker_grows() -> None:
    # its heartbeat may be slower than this worker's
    session = connected()
    patience = []
    for now in range(1000, 1600, 100):
        session.connected(now)
        session.tick(now + session.patience)
        patience.append(session.patience)
    assert patience == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_a_long_patience_stays() -> None:
    session = connected(heartbeat=30.0)
    session.tick(250.0)
    assert session.patience == 150.0


def test_nothing_is_done_without_a_connection() -> None:
    # C9
    session = connected()
    session.lose("test", 101.0)
    assert session.receive(work("X1", b"1"), 101.0) is None
    assert session.tick(101.5) == []
    assert session.disconnect("closed", 101.5) == []
    assert (session.lost, session.request) == ("test", None)


@each_protocol
def test_disconnect(protocol: str) -> None:
    # C10: at any time, with a request or without
    session, request = busy(protocol)
    assert session.disconnect("closed", 101.0) == [disconnect(protocol)]
    assert (session.lost, session.request) == ("closed", None)
    assert session.final(request, [b"a"], 101.0) == []


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


@each_protocol
def test_a_heartbeat_an_interval(protocol: str) -> None:
    # C13
    session = connected(protocol=protocol)
    assert session.deadline() == 101.0
    assert session.tick(100.9) == []
    assert session.tick(101.0) == [heartbeat(protocol)]
    assert session.deadline() == 102.0
    assert session.tick(101.5) == []
    assert session.tick(102.0) == [heartbeat(protocol)]


@pytest.mark.parametrize("end", ["FINAL", "ERROR"])
@pytest.mark.parametrize("protocol", ["X1", "0.2"])
def test_no_heartbeat_within_an_interval_of_another_command(protocol: str, end: str) -> None:
    # C13
    session, request = busy(protocol)
    session.partial(request, [b"a"], 100.9)
    assert session.tick(101.0) == []
    if end == "FINAL":
        session.final(request, [b"b"], 101.8)
    else:
        session.error(request, 500, "b", 101.8)
    assert session.tick(101.9) == []
    assert session.tick(102.8) == [heartbeat(protocol)]


def test_the_deadline_is_the_heartbeat_or_the_end_of_the_patience() -> None:
    session = connected(heartbeat=4.0, liveness=1)
    session.tick(103.9)
    assert session.deadline() == 104.0
    session.receive(work("X1", b"1"), 103.0)
    session.tick(104.0)
    assert session.deadline() == 107.0


@each_protocol
def test_a_worker_beats_as_often_as_the_broker(protocol: str) -> None:
    # C13: the broker's patience is as short as its interval
    session = connected(protocol=protocol, heartbeat=5.0)
    for now in (100.5, 101.0, 101.5):
        session.receive(heartbeat(protocol), now)
        session.tick(now)
    assert session.beat_interval == 0.5
    assert session.deadline() <= 102.0
    assert session.tick(102.0) == [heartbeat(protocol)]


@each_protocol
def test_a_worker_does_not_beat_less_often_than_it_was_told(protocol: str) -> None:
    session = connected(protocol=protocol, heartbeat=1.0)
    for now in (102.0, 104.0, 106.0):
        session.receive(heartbeat(protocol), now)
    assert session.beat_interval == 1.0


@each_protocol
def test_a_worker_waits_for_as_many_of_the_brokers_intervals(protocol: str) -> None:
    # C13
    session = connected(protocol=protocol, heartbeat=1.0, liveness=3)
    session.receive(heartbeat(protocol), 102.5)
    session.receive(heartbeat(protocol), 105.0)
    assert session.patience == 7.5
    session.tick(112.4)
    assert session.lost is None
    session.tick(112.5)
    assert session.lost == "the broker has been silent for 7.5 s"


# ── heartbeat settings that differ → endless reconnects ──────────────────────────────────────────────────────────────


class Dialog:
    """A broker and a worker on one clock, and a wire that takes no time."""

    def __init__(self, limits: Limits, session: WorkerSession) -> None:
        self.now = 1000.0
        self.broker = Broker(limits, now=self.now)
        self.session = session
        self.connections = 0

    def run(self, seconds: float) -> None:
        """Let the time pass, and let both do what is due."""
        end = self.now + seconds
        while (due := min(self.session.deadline(), self.broker.deadline() or end)) < end:
            self.now = max(self.now, due)
            if self.session.lost is None:
                self._to_broker(self.session.tick(self.now))
            elif self.now >= self.session.retry_at:
                self.connections += 1
                self._to_broker(self.session.connected(self.now))
            self._to_worker(self.broker.tick(self.now))
        self.now = end

    def ask(self) -> list[list[bytes]]:
        """Send a request; returns what the client gets."""
        (message,) = self.broker.receive([b"amy", b"MDPC02", b"\x01", b"echo", b"hello"], self.now)
        request = self.session.receive(message[1:], self.now)
        assert request is not None
        (reply,) = self.session.final(request, request, self.now)
        return self.broker.receive([self._identity, *reply], self.now)

    @property
    def _identity(self) -> bytes:
        return b"worker-%d" % self.connections

    def _to_broker(self, messages: list[list[bytes]]) -> None:
        for message in messages:
            self._to_worker(self.broker.receive([self._identity, *message], self.now))

    def _to_worker(self, messages: list[list[bytes]]) -> None:
        for identity, *message in messages:
            if identity == self._identity and self.session.lost is None:
                self.session.receive(message, self.now)


@pytest.mark.parametrize(("protocol", "liveness"), [("X1", 2), ("0.2", 3), ("0.1", 5), ("X1", 5)])
@pytest.mark.parametrize(
    ("brokers", "workers"),
    [(0.1, 5.0), (5.0, 0.1), (1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (10.0, 0.1), (0.1, 60.0)],
)
def test_heartbeats_may_differ(brokers: float, workers: float, liveness: int, protocol: str) -> None:
    # C13
    session = WorkerSession(b"echo", protocol=protocol, heartbeat=workers, liveness=liveness, rng=random.Random(1))
    dialog = Dialog(Limits(heartbeat=brokers, liveness=liveness), session)
    dialog.run(200.0)
    needed = dialog.connections
    assert needed <= 10
    dialog.run(200.0)
    assert dialog.connections == needed
    assert dialog.ask() == [[b"amy", b"MDPC02", b"\x03", b"echo", b"hello"]]


def test_what_was_learned_when_the_network_was_held_up_is_forgotten() -> None:
    # C13: else this worker beats every 3 s, for this broker always too late, and so never learns better
    session = WorkerSession(b"echo", heartbeat=3.0, rng=random.Random(1))
    session.connected(990.0)
    session.receive(heartbeat("X1"), 991.0)
    session.receive(heartbeat("X1"), 995.0)
    session.receive(disconnect("X1"), 995.0)
    dialog = Dialog(Limits(heartbeat=1.0, liveness=2), session)
    dialog.run(100.0)
    assert dialog.connections <= 2


def test_a_broker_that_forgot_the_worker_gets_ready_again() -> None:
    # C9, C14: a worker that stays silent for ever after a DISCONNECT is one of the published faults
    dialog = Dialog(Limits(heartbeat=1.0), WorkerSession(b"echo", rng=random.Random(1)))
    dialog.run(10.0)
    dialog.broker = Broker(Limits(heartbeat=1.0), now=dialog.now)
    dialog.run(10.0)
    assert dialog.connections == 2
    assert dialog.ask() == [[b"amy", b"MDPC02", b"\x03", b"echo", b"hello"]]


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

frames = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"", b"MDPW01", b"MDPW02", b"MDPWX1", b"\x02", b"\x04", b"\x05", b"\x06", b"\x08", b"amy", b"{}"]),
)


@given(protocol=st.sampled_from(PROTOCOLS), messages=st.lists(st.lists(frames, max_size=6)))
def test_no_bytes_do_harm(protocol: str, messages: list[list[bytes]]) -> None:
    session = WorkerSession(b"echo", protocol=protocol)
    session.connected(0.0)
    for message in messages:
        request = session.receive(message, 0.0)
        assert request is None or request is session.request
        assert session.request is None or session.lost is None


# ── what a worker may not be, and what it does not learn from ────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["mmi.mine", b"mmi.service"])
def test_a_reserved_name_is_refused_at_once(name: str | bytes) -> None:
    # C25
    with pytest.raises(SettingError, match="is reserved"):
        WorkerSession(name)


@each_protocol
def test_heartbeats_read_together_teach_nothing(protocol: str) -> None:
    # C13: they waited while this process was held up; the broker did not send them within a moment
    session = WorkerSession(b"echo", protocol=protocol, heartbeat=1.0, liveness=5)
    session.connected(0.0)
    for now in (1.0, 2.0, 4.0, 4.0, 4.0):
        session.receive(heartbeat(protocol), now)
    assert session.beat_interval == 1.0
    assert session.patience == 10.0


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slot_has_its_number_in_front_of_all() -> None:
    first = connected()
    session = first.sibling()
    assert session.connected(100.0, b"7") == [[b"7", b"", *ready("X1")]]
    assert session.route == (b"7", b"")
    request = session.receive([b"7", b"", *work("X1", b"x")], 100.5)
    assert request == [b"x"]
    assert session.partial(request, [b"1"], 100.5) == [[b"7", b"", *partial("X1", b"1")]]
    assert session.final(request, [b"2"], 100.5) == [[b"7", b"", *final("X1", b"2")]]
    assert session.tick(101.5) == [[b"7", b"", *heartbeat("X1")]]
    assert session.disconnect("closed", 101.5) == [[b"7", b"", *disconnect("X1")]]
    assert (first.alive, session.alive) == (True, False)
    assert session.connected(102.0) == [ready("X1")]  # on another connection


def test_what_one_slot_learns_of_the_broker_all_know() -> None:
    first = connected()
    second = first.sibling()
    second.connected(100.0, b"1")
    for moment in (103.0, 106.0):  # the broker's interval is 3 s
        first.receive(heartbeat("X1"), moment)
    assert first.patience == second.patience == 15.0
    assert second.tick(200.0) == []
    assert second.lost is not None
    assert "silent for 15 s" in second.lost
    assert first.patience == second.patience == 30.0


def test_slots_that_are_lost_together_wait_together() -> None:
    first = connected()
    second, third = first.sibling(), first.sibling()
    second.connected(100.0, b"1")
    third.connected(100.0, b"2")
    request = third.receive([b"2", b"", *work("X1", b"x")], 100.0)
    assert request is not None
    first.lose("the network is down", 100.0)
    second.lose("the network is down", 100.0)
    third.lose_with(first)
    assert first.retry_at == second.retry_at == third.retry_at == 101.0
    assert (third.lost, third.request, request.cancelled) == ("the network is down", None, True)
    for session in (first, second, third):
        session.connected(101.0)
    second.lose("the network is down", 101.0)
    assert second.retry_at == 103.0  # twice as long: that was one loss, not three
