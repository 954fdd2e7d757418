"""The client's state machine for FLP: which server gets a request, failover, PINGs, deadlines."""

from errno import EAGAIN, EHOSTUNREACH
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmdp.clients.calls.reply import Reply
from zmdp.interop.freelance.client.session import MAX_LOSSES, FreelanceSession
from zmdp.mdp import wire
from zmdp.mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestTimeout,
    ServiceError,
    SettingError,
    WorkerLost,
    ZmdpError,
)

A, B, C = "tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555", "tcp://10.0.0.3:5555"


class Network:
    """A session, the time, and what ZeroMQ does with its messages."""

    def __init__(self, *endpoints, up=(), **settings):
        self.session = FreelanceSession(endpoints, **settings)
        self.now = 100.0
        self.up = set(up)
        self.full = set()
        """Servers that do not keep up."""
        self.sent = []
        """Messages that have left, as endpoint and frames."""
        self.events = []
        """Receivers and their outcomes, which the test has not looked at."""
        self.ended_at = {}
        """When each receiver's outcome was there."""

    def flush(self):
        """Send; return what has left since the last call, without PINGs."""
        before = len(self.sent)
        while messages := self.session.take_messages():
            for message in messages:
                endpoint = message[0].decode()
                errno = 0 if endpoint in self.up else EHOSTUNREACH
                if not errno and endpoint in self.full:
                    errno = EAGAIN
                if not errno:
                    self.sent.append((endpoint, *message[1:]))
                self.session.sent(message, errno, self.now)
        for event in self.session.take_events():
            self.events.append(event)
            self.ended_at.setdefault(event[0], self.now)
        return [each for each in self.sent[before:] if each[1:] != (b"PING",)]

    def begin(self):
        """Reach the servers that are up: the PINGs of the first tick."""
        self.session.tick(self.now)
        assert self.flush() == []
        return self

    def pass_time(self, seconds):
        """Let time pass, step by step as the session asks for; return what has left."""
        before, until = len(self.sent), self.now + seconds
        while (due := self.session.deadline()) <= until:
            self.now = max(self.now, due)
            self.session.tick(self.now)
            self.flush()
        self.now = until
        return [each for each in self.sent[before:] if each[1:] != (b"PING",)]

    def pings(self):
        return [endpoint for endpoint, *frames in self.sent if frames == [b"PING"]]

    def request(self, *body, timeout=6.0):
        """Make a request; return it and what has left."""
        call = self.session.request(list(body) or [b"x"], self.now, timeout=timeout, receiver=f"r{len(self.sent)}")
        return call, self.flush()

    def hear(self, endpoint, *frames):
        self.session.receive([endpoint.encode(), *(frames or (b"PONG",))], self.now)
        return self.flush()

    def lose(self, endpoint):
        """The connection to a server ends, and a monitor reports it."""
        self.up.discard(endpoint)
        self.session.disconnected(endpoint.encode(), self.now)
        return self.flush()

    def rise(self, endpoint):
        """A connection to a server is made, and a monitor reports it."""
        self.up.add(endpoint)
        self.session.probe(self.now)
        return self.flush()

    def outcomes(self):
        self.flush()
        events, self.events = self.events, []
        return [outcome for _, outcome in events]

    def outcome(self):
        (outcome,) = self.outcomes()
        return outcome


def alive(network):
    return [status.endpoint for status in network.session.servers(network.now) if status.alive]


# ── the life of a request ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_a_number_and_a_body():
    network = Network(A, up=[A]).begin()
    assert network.request(b"a", b"b")[1] == [(A, b"1", b"a", b"b")]
    assert network.request(b"c")[1] == [(A, b"2", b"c")]
    network.hear(A, b"2", b"C")
    assert network.outcome() == [b"C"]
    network.hear(A, b"1", b"A", b"B")
    reply = network.outcome()
    assert isinstance(reply, Reply)
    assert (reply, reply.service, reply.final) == ([b"A", b"B"], A, True)
    assert network.session.outstanding == 0


def test_only_the_first_reply_counts():
    network = Network(A, B, up=[A, B]).begin()
    network.hear(B)
    network.request(b"x", timeout=4.0)
    assert network.pass_time(2.1) == [(A, b"1", b"x")]
    network.hear(A, b"1", b"from A")
    network.hear(B, b"1", b"from B")
    assert network.outcome() == [b"from A"]
    assert network.session.dropped == {"unknown-number": 1}


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"7", b"x"], "unknown-number"),
        ([b"01", b"x"], "unknown-number"),
        ([b"1"], "too-few-frames"),
        ([], "too-few-frames"),
        ([b"PING"], "too-few-frames"),
    ],
)
def test_what_makes_no_sense_is_counted_and_still_a_sign_of_life(frames, reason):
    network = Network(A, up=[A]).begin()
    network.request()
    assert alive(network) == []
    network.session.receive([A.encode(), *frames], network.now)
    assert network.outcomes() == []
    assert network.session.dropped == {reason: 1}
    assert alive(network) == [A]


def test_messages_of_strangers_are_dropped():
    network = Network(A, up=[A]).begin()
    network.request()
    network.session.receive([b"tcp://stranger:1", b"1", b"x"], network.now)
    assert network.outcomes() == []
    assert network.session.dropped == {"unknown-server": 1}


def test_a_marked_failure_is_raised():
    network = Network(A, up=[A]).begin()
    network.request()
    network.hear(A, b"1", *wire.error_body(499, "no such user"))
    error = network.outcome()
    assert isinstance(error, ServiceError)
    assert (error.code, error.text, error.service) == (499, "no such user", A)


def test_closing_ends_every_request():
    network = Network(A, up=[A]).begin()
    network.request()
    network.session.survey(network.now, timeout=1.0, receiver="survey")
    network.session.close(lambda: ClosedError("closed"))
    assert [type(each) for each in network.outcomes()] == [ClosedError, ClosedError]
    assert network.flush() == []


def test_the_timers_of_requests_that_have_ended_take_no_memory():
    network = Network(A, up=[A]).begin()
    network.request(timeout=1000.0)
    for number in range(2, 2000):
        network.request(timeout=600.0)
        network.hear(A, b"%d" % number, b"y")
    assert len(network.session._timers) < 100
    network.pass_time(999.0)
    assert network.session.outstanding == 1
    network.pass_time(2.0)
    assert network.session.outstanding == 0


# ── which server ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_server_that_was_heard_last_comes_first():
    network = Network(A, B, C, up=[A, B, C]).begin()
    for endpoint in (C, A, B):
        network.now += 0.1
        network.hear(endpoint)
    assert network.request(b"x")[1] == [(B, b"1", b"x")]
    network.now += 0.1
    network.hear(C)
    assert network.request(b"y")[1] == [(C, b"2", b"y")]
    assert [status.endpoint for status in network.session.servers(network.now)] == [C, B, A]


def test_a_request_goes_to_the_next_server_at_once_when_its_own_is_lost():
    network = Network(A, B, up=[A, B]).begin()
    network.hear(A)
    assert network.request(b"x")[1] == [(A, b"1", b"x")]
    assert network.lose(A) == [(B, b"1", b"x")]
    network.hear(B, b"1", b"y")
    assert network.outcome() == [b"y"]


def test_a_request_waits_for_its_server_to_come_back_if_there_is_no_other():
    network = Network(A, up=[A]).begin()
    network.request(b"x")
    assert network.lose(A) == []
    assert network.pass_time(0.5) == []
    assert network.rise(A) == [(A, b"1", b"x")]


def test_a_connection_that_nobody_reports_is_found():
    """Without a monitor, as for inproc:// endpoints."""
    network = Network(A).begin()
    network.request(b"x")
    network.pass_time(1.0)
    network.up.add(A)
    assert network.pass_time(2.0) == [(A, b"1", b"x")]


def test_a_silent_server_has_its_share_of_the_time():
    network = Network(A, B, C, up=[A, B, C]).begin()
    for endpoint in (C, B, A):
        network.now += 0.01
        network.hear(endpoint)
    assert network.request(b"x", timeout=6.0)[1] == [(A, b"1", b"x")]
    assert network.pass_time(1.9) == []
    assert network.pass_time(0.2) == [(B, b"1", b"x")]
    assert network.pass_time(1.8) == []
    assert network.pass_time(0.2) == [(C, b"1", b"x")]
    assert network.pass_time(1.8) == []
    assert network.outcomes() == []
    network.hear(A, b"1", b"at last")
    assert network.outcome() == [b"at last"]


def test_a_silent_server_is_avoided_until_it_replies():
    network = Network(A, B, up=[A, B]).begin()
    network.hear(A)
    network.request(b"x", timeout=2.0)
    assert network.pass_time(1.1) == [(B, b"1", b"x")]
    network.hear(B, b"1", b"y")
    network.now += 0.1
    network.hear(A)  # it answers PINGs, but not requests
    assert network.request(b"z")[1] == [(B, b"2", b"z")]
    network.hear(A, b"1", b"late")
    assert network.request(b"z")[1] == [(A, b"3", b"z")]


def test_servers_that_do_not_keep_up_are_tried_again():
    network = Network(A, B, up=[A, B]).begin()
    network.hear(A)
    network.full = {A}
    assert network.request(b"x")[1] == [(B, b"1", b"x")]
    network.full = {A, B}
    assert network.request(b"y")[1] == []
    assert network.pass_time(0.1) == []
    network.full = {B}
    assert network.pass_time(0.1) == [(A, b"2", b"y")]


def test_a_request_that_outlives_several_servers_ends():
    network = Network(A, up=[A]).begin()
    network.request(b"poison", timeout=60.0)
    for loss in range(MAX_LOSSES):
        assert network.outcomes() == []
        assert network.lose(A) == []
        if loss < MAX_LOSSES - 1:
            assert network.rise(A) == [(A, b"1", b"poison")]
    error = network.outcome()
    assert isinstance(error, WorkerLost)
    assert str(error) == f"3 servers were lost while they held the request, the last one at {A}"


def test_an_endpoint_given_twice_is_one_server():
    network = Network(A, A, up=[A]).begin()
    assert network.pings() == [A]
    assert network.request(b"x")[1] == [(A, b"1", b"x")]


# ── the end of its time ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_without_a_reply_ends_at_its_deadline():
    network = Network(A, B, up=[A, B]).begin()
    network.request(timeout=3.0)
    network.pass_time(2.99)
    assert network.outcomes() == []
    network.pass_time(0.02)
    error = network.outcome()
    assert type(error) is RequestTimeout
    assert str(error) in {f"no reply from {A}, {B} within 3 s", f"no reply from {B}, {A} within 3 s"}


def test_a_request_that_no_server_could_get_says_so():
    network = Network(A, B).begin()
    network.request(timeout=3.0)
    network.pass_time(3.1)
    error = network.outcome()
    assert isinstance(error, BrokerUnreachable)
    assert str(error).startswith(f"no server could be reached at {A}, {B} within 3 s: is one running")
    network.session.trouble = "this broker admits only known keys"
    network.request(timeout=3.0)
    network.pass_time(3.1)
    assert str(network.outcome()).endswith("within 3 s: this broker admits only known keys")


def test_no_more_than_so_many_requests_are_outstanding():
    network = Network(A, up=[A], max_outstanding=2).begin()
    assert network.request(b"1")[1] == [(A, b"1", b"1")]
    second, _ = network.request(b"2")
    third, sent = network.request(b"3")
    network.request(b"4", timeout=3.0)
    assert sent == []
    network.hear(A, b"1", b"y")
    assert network.outcome() == [b"y"]
    assert network.pass_time(0.0) == [(A, b"3", b"3")]
    network.session.forget(second)
    network.session.forget(third)
    assert network.pass_time(0.0) == [(A, b"4", b"4")]
    network.request(b"5")
    network.request(b"6", timeout=2.0)
    network.pass_time(2.1)
    assert str(network.outcome()) == "the request was not sent: 2 others (max_outstanding) were outstanding for 2 s"
    network.session.close(lambda: ClosedError("closed"))
    assert len(network.outcomes()) == 2
    assert network.session.outstanding == 0


# ── signs of life ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_replies_is_sent_no_ping():
    network = Network(A, up=[A], ping=2.0).begin()
    network.sent.clear()
    for number in range(1, 6):
        network.request()
        network.pass_time(1.5)
        network.hear(A, b"%d" % number, b"x")
    assert network.pings() == []


def test_a_client_that_was_held_up_pings_its_servers_once_more():
    # ZeroMQ's thread was held up too: what the servers sent meanwhile may reach the socket a moment later.
    network = Network(A, B, up=[A, B], ping=2.0, ttl=6.0).begin()
    network.hear(B)
    network.now += 0.01
    network.hear(A)
    call, [(endpoint, *_)] = network.request(b"x", timeout=60.0)
    network.now += 20.0
    network.session.tick(network.now)
    assert (endpoint, network.flush()) == (A, [])
    network.hear(A)
    assert network.pass_time(1.9) == []
    assert next(iter(call.attempts)).endpoint == A
    assert B in [each.endpoint for each in network.session._servers if each.usable]
    network.pass_time(0.2)
    assert [each.endpoint for each in network.session._servers if each.usable] == [A]


def test_a_server_that_has_been_silent_for_the_ttl_is_dead_until_it_is_heard():
    network = Network(A, B, up=[A, B], ping=2.0, ttl=6.0).begin()
    network.now += 0.1
    network.hear(A)
    network.request(b"x", timeout=60.0)
    for _ in range(6):
        network.pass_time(0.99)
        network.hear(B)
    assert alive(network) == [A, B] or alive(network) == [B, A]
    assert network.pass_time(0.2) == [(B, b"1", b"x")]  # A is connected, but has not answered three PINGs
    assert alive(network) == [B]
    network.pass_time(2.0)
    assert A in network.pings()[-2:]  # it may be there again
    network.hear(A)
    assert alive(network)[0] == A


def test_a_dead_server_to_which_a_ping_can_be_sent_stays_dead():
    network = Network(A, up=[A], ping=2.0, ttl=6.0).begin()
    network.pass_time(7.0)
    assert network.request(b"x", timeout=60.0)[1] == []
    assert network.pass_time(10.0) == []
    assert network.hear(A) == [(A, b"1", b"x")]


def test_attempts_to_reach_a_server_become_rarer():
    network = Network(A, ping=2.0).begin()
    attempts = []
    for _ in range(20):
        network.pass_time(network.session.deadline() - network.now)
        attempts.append(network.now)
    pauses = [round(b - a, 3) for a, b in pairwise(attempts)]
    assert pauses[:4] == [0.002, 0.004, 0.008, 0.016]
    assert pauses[-1] == 2.0


def test_a_survey_ends_when_all_have_answered():
    network = Network(A, B, up=[A, B]).begin()
    network.session.survey(network.now, timeout=1.0, receiver="s")
    network.flush()
    network.now += 0.25
    network.hear(A)
    assert network.outcomes() == []
    network.now += 0.25
    network.hear(B)
    assert network.outcome() == {A: 0.25, B: 0.5}


def test_a_late_pong_is_not_taken_for_a_fast_one():
    network = Network(A, up=[A], ttl=60.0).begin()
    network.now += 3.0
    network.session.survey(network.now, timeout=1.0, receiver="s")
    network.flush()
    network.now += 0.25
    network.hear(A)  # it may be the answer to the first PING
    assert network.outcome() == {A: 3.25}
    network.hear(A)
    network.session.survey(network.now, timeout=1.0, receiver="s")
    network.flush()
    network.now += 0.25
    network.hear(A)
    assert network.outcome() == {A: 0.25}


def test_a_survey_ends_in_time():
    network = Network(A, B, up=[A]).begin()
    network.session.survey(network.now, timeout=1.0, receiver="s")
    network.flush()
    network.hear(A)
    network.pass_time(0.99)
    assert network.outcomes() == []
    network.pass_time(0.02)
    assert network.outcome() == {A: 0.0, B: None}


def test_what_is_known_of_servers():
    network = Network(A, B, up=[A]).begin()
    network.hear(A)
    network.request()
    network.pass_time(1.0)
    assert [tuple(status) for status in network.session.servers(network.now)] == [
        (A, True, 1.0, 1),
        (B, False, None, 0),
    ]
    assert network.session.unusable() == [B]


@pytest.mark.parametrize("settings", [{"ping": 0.0}, {"ping": -1}, {"ttl": 2.0}, {"ttl": float("inf")}])
def test_invalid_settings(settings):
    with pytest.raises(SettingError):
        FreelanceSession([A], **settings)


# ── whatever happens ─────────────────────────────────────────────────────────────────────────────────────────────────

ENDPOINTS = st.sampled_from([A, B, C])
EVENTS = st.one_of(
    st.tuples(st.just("request"), st.floats(0.1, 10.0)),
    st.tuples(st.just("time"), st.floats(0.0, 4.0)),
    st.tuples(st.just("lose"), ENDPOINTS),
    st.tuples(st.just("vanish"), ENDPOINTS),
    st.tuples(st.just("rise"), ENDPOINTS),
    st.tuples(st.just("pong"), ENDPOINTS),
    st.tuples(st.just("full"), ENDPOINTS),
    st.tuples(st.just("reply"), ENDPOINTS),
    st.tuples(st.just("forget"), st.integers(0, 20)),
    st.tuples(st.just("junk"), st.lists(st.binary(max_size=3), max_size=3)),
)


@settings(max_examples=200)
@given(st.lists(EVENTS, max_size=40))
def test_every_request_ends_exactly_once_and_in_time(events):
    network = Network(A, B, C, max_outstanding=5).begin()
    calls, ended, forgotten = {}, set(), set()

    def take():
        network.flush()
        for receiver, outcome in network.events:
            assert receiver not in ended
            assert receiver not in forgotten
            assert isinstance(outcome, Reply | ZmdpError)
            ended.add(receiver)
        network.events.clear()

    def request(timeout):
        name = len(calls) + 1
        calls[name] = network.session.request([b"x"], network.now, timeout=timeout, receiver=name)

    def reply(server):
        for endpoint, *frames in list(network.sent):
            if endpoint == server and len(frames) > 1:
                network.hear(endpoint, frames[0], b"done")

    def forget(name):
        if name in calls and name not in ended:
            network.session.forget(calls[name])
            forgotten.add(name)

    happens = {
        "request": request,
        "reply": reply,
        "forget": forget,
        "time": network.pass_time,
        "lose": network.lose,
        "vanish": network.up.discard,
        "rise": network.rise,
        "pong": network.hear,
        "full": lambda server: network.full.symmetric_difference_update({server}),
        "junk": lambda frames: network.session.receive([A.encode(), *frames], network.now),
    }
    for kind, value in events:
        happens[kind](value)
        take()
    network.full.clear()
    network.pass_time(11.0)
    take()
    assert ended | forgotten == calls.keys()
    assert all(network.ended_at[name] <= calls[name].deadline + 0.01 for name in ended)
    assert network.session.outstanding == 0
    assert [status.outstanding for status in network.session.servers(network.now)] == [0, 0, 0]
    # Afterwards it still works.
    for endpoint in (A, B, C):
        network.rise(endpoint)
        network.hear(endpoint)
    network.session.request([b"last"], network.now, timeout=3.0, receiver="last")
    ((endpoint, number, _),) = network.flush()
    network.hear(endpoint, number, b"y")
    take()
    assert "last" in ended
