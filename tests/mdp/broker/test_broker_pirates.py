"""The broker's machine and peers without a header: what it sends for what it receives, on a clock of the test."""

import pytest
from support import turns

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions


def new_broker(**limits):
    """A broker at time 0 whose dispatches have the addresses 1, 2, 3 …; it has no grace for busy workers by default."""
    return Broker(Limits(**{"busy_grace": 1, **limits}), now=0, first_address=1)


def feed(broker, *messages, now=0, role=None):
    """All that the broker sends for `messages` from a port of echo, each in a turn of its own."""
    sent = []
    for message in messages:
        broker.receive_pirate(list(message), b"echo", now, role)
        sent += broker.take_messages()
    return sent


CALL = [b"c", b"", b"hello"]
READY = [b"w", b"\x01"]
HEARTBEAT = [b"w", b"\x02"]


def final(address=1, worker=b"w", body=b"world"):
    return [worker, b"%d" % address, b"", body]


def work(address=1, worker=b"w"):
    return [worker, b"%d" % address, b"", b"hello"]


ANSWER = [b"c", b"", b"world"]


def test_a_request_and_its_reply():
    broker = new_broker()
    assert feed(broker, READY, CALL) == [work()]
    assert feed(broker, final()) == [ANSWER]
    assert feed(broker, [b"c", b""]) == []
    assert broker.stats.invalid == {"no-body": 1}


def test_heartbeats_and_silence():  # C13
    broker = new_broker(heartbeat=1, liveness=3)
    feed(broker, READY)
    assert turns.tick(broker, 1.1) == [HEARTBEAT]
    assert feed(broker, HEARTBEAT, now=2) == []
    assert turns.probe(broker, b"w", 2.0) == [HEARTBEAT]
    assert turns.probe(broker, b"c", 2.0) == []
    for now in (3.1, 4.2):
        assert turns.tick(broker, now) == [HEARTBEAT]
    turns.tick(broker, 5.3)
    assert broker.stats.lost == {"silent": 1}


@pytest.mark.parametrize(("message", "reason"), [(READY, "second-ready"), (final(7), "reply-to-wrong-client")])
def test_a_worker_that_breaks_the_rules_is_forgotten_without_a_word(message, reason):  # C14
    broker = new_broker()
    feed(broker, READY, CALL)
    assert feed(broker, message) == []
    assert broker.stats.disconnected == {reason: 1}
    assert feed(broker, HEARTBEAT) == []
    assert feed(broker, READY) == [work(2)]


def test_a_reply_over_the_limits_says_nothing_about_a_worker_of_another_role():  # C45
    broker = new_broker(max_message=1000)
    allowed = {name: Permissions(name, offer=("*",)) for name in ("farm", "other")}
    turns.grant(broker, {**allowed, "nobody": Permissions("nobody")}, 0)
    farm, other = broker.roles.named("farm"), broker.roles.named("other")
    assert feed(broker, READY, role=farm) == []
    assert feed(broker, final(body=b"x" * 1001), role=other) == []
    assert broker.stats.other_role == 1


def test_roles_that_may_not_offer_or_call():  # C45
    broker = new_broker()
    turns.grant(broker, {"nobody": Permissions("nobody"), "farm": Permissions("farm", offer=("echo",))}, 0)
    nobody, farm = broker.roles.named("nobody"), broker.roles.named("farm")
    assert feed(broker, READY, CALL, role=nobody) == []
    assert broker.stats.disconnected == {"not-allowed": 1}
    assert broker.stats.dropped == {"not-allowed": 1}
    feed(broker, READY, role=farm)
    assert len(broker.directory.workers) == 1
    assert turns.grant(broker, {"nobody": Permissions("nobody"), "farm": Permissions("farm")}, 0) == []
    assert not broker.directory.workers


def test_the_end_is_silent():  # C16
    broker = new_broker()
    feed(broker, READY, CALL)
    assert turns.close(broker, 0) == []


def test_a_draining_broker_forgets_idle_workers_without_a_word():
    """PPP has no DISCONNECT."""
    broker = new_broker()
    feed(broker, READY)
    assert turns.drain(broker, 0) == []
    assert broker.stats.lost == {"broker-closing": 1}
    assert broker.drained


# ── Simple Pirates ───────────────────────────────────────────────────────────────────────────────────────────────────

SIMPLE_READY = [b"s", b"", b"\x01"]


def feed_workers(broker, *messages):
    """All that the broker sends for `messages` from a port for workers of echo."""
    sent = []
    for message in messages:
        broker.receive_pirate(list(message), b"echo", 0, workers=True)
        sent += broker.take_messages()
    return sent


def test_a_simple_pirate_gets_no_heartbeats_and_may_be_silent_while_it_is_idle():
    broker = new_broker(heartbeat=1, liveness=3)
    assert feed_workers(broker, SIMPLE_READY) == []
    assert turns.probe(broker, b"s", 0.0) == []
    assert turns.tick(broker, 1000) == []
    assert feed(broker, CALL, now=1000) == [[b"s", b"", b"1", b"", b"hello"]]
    assert turns.tick(broker, 1010) == []
    assert broker.stats.lost == {"silent": 1}


@pytest.mark.parametrize("reply", [b"late", bytes(2000)], ids=["small", "too large"])
def test_a_late_reply_of_a_simple_pirate_says_that_it_waits_again(reply):
    broker = new_broker(heartbeat=1, liveness=3, max_message=1000)
    feed_workers(broker, SIMPLE_READY)
    feed(broker, CALL)
    turns.tick(broker, 10)
    assert not broker.directory.workers
    broker.receive_pirate([b"s", b"", b"1", b"", reply], b"echo", 11, workers=True)
    assert broker.take_messages() == [[b"s", b"", b"2", b"", b"hello"]]
    assert broker.stats.late == 1
