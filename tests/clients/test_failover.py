"""The client's state machine with several brokers: it leaves one that drains, and returns to the first."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.x1_client import (
    ASKING,
    DISCONNECT,
    HEARTBEAT,
    Command,
    Highest,
    cancel,
    error,
    events,
    final,
    partial,
    request,
    sent,
    together,
)  # fmt: skip

from zmdp.clients.calls.reply import Reply
from zmdp.clients.calls.retry import Retry
from zmdp.clients.x1.broker_connection import LARGE_REQUEST_BYTES, BrokerConnection, Call
from zmdp.clients.x1.session import MAX_OLD_CONNECTIONS, ClientSession
from zmdp.mdp import wire
from zmdp.mdp.errors import BrokerUnreachable, ClosedError, RequestTimeout, RetryLater, StreamInterrupted

pytestmark = pytest.mark.unit

BROKERS = ("A", "B", "C")


def draining(number: int) -> list[bytes]:
    return error(number, 503, b"the broker is draining")


def connected(count: int = 2, now: float = 100.0) -> ClientSession:
    """A session that has connected to the first of `count` brokers."""
    session = ClientSession(BROKERS[:count], rng=Highest())
    session.connected("A", now)
    return session


def asking(count: int = 2, *, many: int = 1, **settings: Any) -> tuple[ClientSession, list[Call]]:
    """A session that has sent requests 1, 2, … at 100 s."""
    session = connected(count)
    calls = [ask(session, 100.0, **settings) for _ in range(many)]
    assert len(sent(session)) == many
    return session, calls


def ask(session: ClientSession, now: float, **settings: Any) -> Call:
    return session.request(b"echo", [b"x"], now, **settings)


def connect(session: ClientSession, now: float) -> str:
    """Connect to the next broker, as is due; return its endpoint."""
    assert session.lost is not None
    assert now >= session.retry_at
    endpoint = session.endpoint
    session.connected(endpoint, now)
    return endpoint


def leave(session: ClientSession, now: float = 101.0) -> BrokerConnection:
    """Have the broker drain and the session connect to the next; return the connection that it has left."""
    left = session.current
    session.receive(DISCONNECT, now)
    assert left.lost is None
    connect(session, now)
    return left


def at_second(now: float = 100.0, *, many: int = 1) -> ClientSession:
    """A session that has lost the first of two brokers, and has `many` requests outstanding at the second."""
    session = connected(now=now)
    for _ in range(many):
        ask(session, now)
    session.receive(HEARTBEAT, now)
    session.lose("the broker closed the connection", now)
    assert connect(session, now) == "B"
    assert len(sent(session)) == many
    return session


def test_a_large_request_that_a_draining_broker_was_not_sent_goes_to_the_next() -> None:
    session = connected()
    large = ask_large(session)
    assert sent(session) == [("LIMITS",)]
    session.receive(DISCONNECT, 101.0)
    connect(session, 101.0)
    assert sent(session) == [("LIMITS",)]
    session.receive(wire.limits((b"",), 2 << 20, 9), 102.0)
    assert [command[0] for command in sent(session)] == ["REQUEST"]
    assert large.place is session.current


def ask_large(session: ClientSession) -> Call:
    return session.request(b"echo", [b"x" * (LARGE_REQUEST_BYTES + 1)], 100.0)


# ── a broker that drains ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_refusal_that_is_followed_by_an_answer_counts_as_answered() -> None:
    session, _ = asking()
    left = session.current
    session.receive(together(draining(1), final(1, b"x")), 101.0)
    assert events(session) == [(1, [b"x"], "echo", True)]
    assert (session.outstanding, left.lost, session.lost) == (0, "the broker drains", "the broker drains")
    assert session.deadline() is None
    connect(session, 101.0)
    assert sent(session) == []


def test_a_request_that_is_refused_and_fails_is_retried_once() -> None:
    session, _ = asking(retry=Retry(codes={500}, backoff=1.0))
    session.receive(together(draining(1), error(1, 500, b"it broke")), 101.0)
    connect(session, 101.0)
    assert sent(session) == []
    session.tick(103.0)
    assert (sent(session), events(session)) == ([request(2)], [])


def test_with_one_broker_nothing_changes() -> None:
    session, _ = asking(1)
    session.receive(DISCONNECT, 101.0)
    assert (session.lost, events(session)) == (None, [])
    session.receive(draining(1), 101.0)
    text = "service 'echo': the broker is draining (503)"
    assert events(session) == [(1, RetryLater, text, "echo", 503)]
    assert session.lost is None
    assert session.take_probe(1000.0) is None


def test_a_stream_that_has_begun_cannot_be_sent_to_the_next() -> None:
    session, _ = asking(stream=True)
    session.receive(partial(1, b"x"), 101.0)
    session.receive(draining(1), 101.0)
    assert [each[1] for each in events(session)] == [[b"x"], RetryLater]
    assert session.lost is None


def test_collected_parts_of_a_refused_request_are_discarded() -> None:
    session, _ = asking()
    session.receive(together(partial(1, b"x"), draining(1)), 101.0)
    connect(session, 101.0)
    session.receive(together(partial(1, b"a"), final(1, b"b")), 101.0)
    assert events(session) == [(1, [b"a", b"b"], "echo", True)]


def test_what_was_to_be_sent_goes_to_the_draining_broker() -> None:
    """Its answer decides whether the request was accepted."""
    session, (call, _) = asking(many=2)
    ask(session, 101.0)
    session.cancel(call)
    left = leave(session)
    assert (sent(left), sent(session)) == ([request(3), cancel(1)], [])
    session.receive(draining(3), 101.0, left)
    assert sent(session) == [request(3)]


def test_an_idle_client_leaves_with_its_next_request() -> None:
    session = connected()
    left = session.current
    session.receive(DISCONNECT, 101.0)
    assert (left.lost, session.deadline()) == ("the broker drains", None)
    ask(session, 102.0)
    assert session.deadline() == 101.0
    connect(session, 102.0)
    assert sent(session) == [request(1)]


def test_a_connection_that_is_lost_is_not_an_old_one() -> None:
    session, _ = asking()
    session.receive(HEARTBEAT, 101.0)
    lost = session.current
    session.lose("the broker closed the connection", 101.0)
    assert lost.lost == "the broker closed the connection"
    assert (session.retry_at, connect(session, 101.0)) == (101.0, "B")  # no pause: it had answered
    assert sent(session) == [request(1)]


# ── old connections ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_over_another_connection_is_ignored() -> None:
    session, _ = asking()
    left = leave(session)
    ask(session, 101.0)
    session.receive(final(1, b"forged"), 101.0)
    session.receive(final(2, b"forged"), 101.0, left)
    assert events(session) == []
    session.lose("the broker closed the connection", 102.0, left)
    session.receive(final(1, b"late"), 102.0, left)
    assert events(session) == []
    session.receive(final(1, b"x"), 102.0)
    assert events(session) == [(1, [b"x"], "echo", True)]


@pytest.mark.parametrize("message", [[b"noise"], [b"", b"MDPWX1"], [b"", b"MDPC02", b"\x03", b"echo", b"x"]])
def test_other_messages_over_an_old_connection_are_ignored(message: list[bytes]) -> None:
    session, _ = asking()
    left = leave(session, 100.5)
    session.receive(message, 101.4, left)
    session.receive(DISCONNECT, 100.4, left)  # for the second time
    session.receive(error(7, 500, b"of another"), 100.4, left)
    assert (events(session), left.lost, session.outstanding) == ([], None, 1)


def test_requests_of_an_old_connection_that_is_lost_are_sent_over_the_current() -> None:
    session = connected()
    for stream in (False, True, True):
        ask(session, 100.0, stream=stream, timeout=10.0)
    sent(session)
    session.receive(together(partial(1, b"x"), partial(2, b"x")), 100.5)
    assert len(events(session)) == 1
    left = leave(session)
    session.lose("the broker closed the connection", 102.0, left)
    text = (
        "the stream of service 'echo' broke off: the connection to A was lost (the broker closed the connection)",
        "echo",
        None,
    )
    assert events(session) == [(2, StreamInterrupted, *text)]
    assert left.lost == "the broker closed the connection"
    assert sent(session) == [request(1, ttl=8000), request(3, ttl=8000)]
    session.receive(final(1, b"y"), 103.0)
    assert events(session) == [(1, [b"y"], "echo", True)]
    session.lose("again", 103.0, left)
    assert left.lost == "the broker closed the connection"


def test_a_timeout_names_the_broker_that_has_the_request() -> None:
    session, _ = asking(timeout=5.0)
    left = leave(session)
    for now in (102.0, 103.0, 104.0, 105.0):
        session.receive(HEARTBEAT, now, left)
    session.tick(105.5)
    ((_, kind, text, *_),) = events(session)
    assert (kind, text) == (RequestTimeout, "no reply from service 'echo' through A within 5 s")
    assert sent(left) == [cancel(1)]
    assert left.lost is not None


def test_a_silent_old_connection_is_asked_and_given_up() -> None:
    session, _ = asking()
    left = leave(session, 100.0)
    session.receive(HEARTBEAT, 100.5, left)
    for now in (101.5, 102.5, 103.5, 104.5):
        session.receive(HEARTBEAT, now - 0.1)
        session.take_probe(now - 0.1)
        assert left.beat_at == now
        session.tick(now)
        assert sent(left) == [ASKING]
    session.tick(105.5)
    assert left.lost == "the broker has been silent for 5 s"
    assert sent(session) == [request(1)]


def test_a_client_that_was_held_up_asks_an_old_connection_again() -> None:
    session, _ = asking()
    left = leave(session, 100.0)
    session.receive(HEARTBEAT, 100.5, left)
    session.tick(101.5)
    sent(left)
    session.tick(120.0)
    assert (left.lost, left.beat_at, sent(left)) == (None, 121.0, [ASKING])
    session.tick(121.0)
    assert left.lost == "the broker has been silent for 5 s"


def test_the_deadline_of_an_old_connection() -> None:
    session, _ = asking()
    leave(session, 100.5)
    session.take_probe(101.5)
    session.receive(HEARTBEAT, 101.5)
    assert session.deadline() == 101.5


# ── when every broker drains ─────────────────────────────────────────────────────────────────────────────────────────


def refused(session: ClientSession, now: float) -> float:
    """Have the broker refuse request 1; return how long the session then waits."""
    session.receive(draining(1), now)
    return round(session.retry_at - now, 6)


@pytest.mark.parametrize("count", [2, 3])
def test_if_all_brokers_drain_the_pauses_grow(count: int) -> None:
    session, _ = asking(count)
    now, pauses, used = 100.0, [], "A"
    for _ in range(10):
        pauses.append(refused(session, now))
        now = session.retry_at
        assert session.deadline() == now
        used += connect(session, now)
    assert used[: count + 1] == "ABCA"[:count] + "A"
    assert [pause for pause in pauses if pause] == [0.05, 0.1, 0.2, 0.4, 0.8][: 10 // count]  # after all were tried


def test_a_broker_that_served_for_a_while_is_left_at_once() -> None:
    session, _ = asking()
    now = 100.0
    for _ in range(5):
        refused(session, now)
        now = session.retry_at
        connect(session, now)
    now += 1.0
    assert refused(session, now) == 0.0
    connect(session, now)
    assert refused(session, now) == 0.05


def test_a_timeout_when_all_brokers_drain() -> None:
    session, _ = asking(timeout=0.12)
    for now in (100.0, 100.0, 100.05):
        refused(session, now)
        if now < 100.05:
            connect(session, session.retry_at)
    session.tick(100.14)
    text = "no reply from service 'echo' through A within 0.12 s: all brokers drain, retry later"
    assert events(session) == [(1, RetryLater, text, "echo", 503)]


def test_after_a_loss_the_drained_brokers_are_not_blamed() -> None:
    session, _ = asking(timeout=5.0)
    for _ in range(2):
        refused(session, 100.0)
        connect(session, session.retry_at)
    session.lose("nothing is listening there", 101.0)
    session.tick(105.5)
    assert [each[1] for each in events(session)] == [BrokerUnreachable]


def test_the_next_broker_is_not_the_one_that_drained_before() -> None:
    """If A and B drain, C gets the requests."""
    session, _ = asking(3)
    refused(session, 100.0)
    assert connect(session, 100.0) == "B"
    refused(session, 110.0)
    assert connect(session, 110.0) == "C"


# ── returning to the first broker ────────────────────────────────────────────────────────────────────────────────────


def test_a_client_returns_and_drops_nothing() -> None:
    session = at_second(many=2)
    assert session.take_probe(100.9) is None
    assert session.deadline() == 101.0
    assert session.take_probe(101.0) == "A"
    left = session.current
    session.probed(True, 101.1)
    assert (left.endpoint, left.lost, list(left.calls)) == ("B", None, [1, 2])
    assert session.lost == "the first broker is back"
    assert connect(session, 101.1) == "A"
    ask(session, 101.1)
    session.receive(together(final(1, b"x"), final(2, b"y")), 101.2, left)
    assert (sent(session), left.lost is None) == ([request(3)], False)
    assert [each[0] for each in events(session)] == [1, 2]
    assert session.take_probe(1000.0) is None  # it is at the first


def test_the_intervals_between_probes_grow() -> None:
    session, now, intervals = at_second(), 100.0, []
    for _ in range(6):
        due = session.failover.probe_at
        intervals.append(due - now)
        assert session.take_probe(due) == "A"
        assert session.take_probe(due + 1.9) is None  # one at a time
        now = due + 2.0
        session.probed(False, now)
    assert intervals == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert session.lost is None


def test_the_time_limit_of_a_probe_is_a_deadline() -> None:
    session = at_second()
    session.take_probe(101.0)
    for now in (102.0, 102.9):
        session.tick(now)
        session.receive(HEARTBEAT, now)
    assert session.deadline() == 103.0


def test_nothing_is_probed_while_nothing_is_outstanding() -> None:
    session = at_second()
    session.receive(final(1, b"x"), 100.5)
    assert (session.take_probe(110.0), session.deadline()) == (None, None)
    ask(session, 110.0)
    assert session.deadline() == 101.0
    assert session.take_probe(110.0) == "A"


def test_the_client_has_returned_by_itself_while_the_first_is_probed() -> None:
    session = at_second()
    session.receive(HEARTBEAT, 100.5)
    session.take_probe(101.0)
    session.lose("the broker closed the connection", 101.5)
    assert connect(session, 101.5) == "A"
    session.probed(True, 101.6)
    assert (session.lost, session.take_probe(1000.0)) == (None, None)


def test_the_connection_is_lost_while_the_first_is_probed() -> None:
    session = at_second()
    session.take_probe(101.0)
    session.lose("the broker closed the connection", 101.5)
    session.probed(True, 101.6)
    assert session.lost == "the broker closed the connection"
    assert connect(session, session.retry_at) == "A"


def test_a_first_broker_that_comes_and_goes_is_probed_less_often() -> None:
    session, now, intervals = at_second(), 100.0, []
    for lasted in (14.0, 14.0, 15.0):
        intervals.append(session.failover.probe_at - now)
        session.take_probe(session.failover.probe_at)
        now += 10.0
        session.probed(True, now)
        assert connect(session, now) == "A"
        now += lasted
        session.receive(HEARTBEAT, now)
        session.lose("the broker closed the connection", now)
        assert connect(session, now) == "B"
        ask(session, now)
    intervals.append(session.failover.probe_at - now)
    assert intervals == [1.0, 2.0, 4.0, 1.0]


def test_a_client_with_many_old_connections_does_not_return() -> None:
    session = at_second()
    now = 100.0
    for _ in range(MAX_OLD_CONNECTIONS):
        ask(session, now)
        now += 1.0
        session.receive(DISCONNECT, now)
        connect(session, session.retry_at)
    if session.endpoint == "A":
        ask(session, now)
        session.lose("the broker closed the connection", now)
        now = session.retry_at
        assert connect(session, now) == "B"
    due = session.failover.probe_at
    assert session.take_probe(due) is None
    assert session.failover.probe_at > due


# ── any course of events ─────────────────────────────────────────────────────────────────────────────────────────────


class World:
    """A session with three brokers that do what a drawn course says, and everything checked."""

    def __init__(self) -> None:
        self.session = ClientSession(BROKERS, rng=Highest())
        self.now = 100.0
        self.places: list[BrokerConnection] = []
        """The current connection, and old ones."""
        self.at: dict[int, BrokerConnection] = {}
        """The connection at which each request is outstanding."""
        self.over: dict[int, Any] = {}
        self.open: dict[int, Call] = {}
        self.settle()

    def settle(self) -> None:
        session = self.session
        for call, outcome in session.take_events():
            assert call.number not in self.over
            if isinstance(outcome, Reply) and not outcome.final:
                continue
            self.over[call.number] = outcome
            del self.open[call.number]
            self.at.pop(call.number, None)
        assert session.lost is None or not session.current.unsent
        if session.current not in self.places:
            self.places.append(session.current)
        for place in self.places:
            for command in sent(place):
                self.check(place, command)
        assert len(self.open) == session.outstanding
        assert {number for place in self.places for number in place.calls} == self.open.keys()
        self.places = [place for place in self.places if place.lost is None or place is session.current]
        self.at = {number: place for number, place in self.at.items() if place.lost is None}

    def check(self, place: BrokerConnection, command: Command) -> None:
        if command[0] == "REQUEST":
            other = self.at.get(command[1])
            assert other is None or (other is not place and other.lost), "sent twice"
            self.at[command[1]] = place
        elif command[0] == "CANCEL":
            self.at.pop(command[1], None)

    def do(self, what: str, which: int) -> None:
        session = self.session
        self.now += 0.3
        place = self.places[which % len(self.places)]
        numbers = sorted(number for number, at in self.at.items() if at is place)
        number = numbers[which % len(numbers)] if numbers else 99
        if what == "ask":
            call = ask(session, self.now, stream=which % 2 == 0, timeout=(None, 2.0)[which % 3 == 0])
            self.open[call.number] = call
        elif what == "cancel" and self.open:
            call = self.open.pop(sorted(self.open)[which % len(self.open)])
            self.over[call.number] = "cancelled"
            self.at.pop(call.number, None)
            session.cancel(call)
        elif what == "connect" and session.lost is not None and self.now >= session.retry_at:
            connect(session, self.now)
        elif what == "probe" and session.take_probe(self.now):
            session.probed(which % 2 == 0, self.now)
        elif what == "lose" and place.lost is None:
            session.lose("lost", self.now, place)
        elif what == "tick":
            session.tick(self.now)
        elif what in MESSAGES:
            self.deliver(place, what, number)
        self.settle()

    def deliver(self, place: BrokerConnection, what: str, number: int) -> None:
        self.session.receive(MESSAGES[what](number), self.now, place)
        if what.startswith("refuse"):  # then it is no longer outstanding there
            for each in (number, number + 1)[: 1 + (what == "refuse twice")]:
                if self.at.get(each) is place and not self.open[each].streamed:
                    del self.at[each]


MESSAGES = {
    "final": lambda number: final(number, b"x"),
    "partial": lambda number: partial(number, b"x"),
    "refuse": draining,
    "refuse twice": lambda number: together(draining(number), draining(number + 1)),
    "refuse and answer": lambda number: together(draining(number), final(number, b"x")),
    "fail": lambda number: error(number, 500, b"x"),
    "drain": lambda number: DISCONNECT,
    "beat": lambda number: HEARTBEAT,
}
ACTIONS = ["ask", "ask", "cancel", "connect", "connect", "probe", "lose", "tick", *MESSAGES]


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=60))
def test_a_request_is_outstanding_at_one_connection_and_ends_once(course: list[tuple[str, int]]) -> None:
    world = World()
    for what, which in course:
        world.do(what, which)
    world.session.close(lambda: ClosedError("closed"))
    world.settle()
    assert (world.open, world.session.outstanding, world.session.deadline()) == ({}, 0, None)
