"""The broker's machine, rule by rule: what it sends for what it receives.  Nothing here waits: the time is an argument.

What only X1 has is in `test_broker_x1` and `test_broker_credit`.
"""

import logging
import struct
from types import MethodType

import pytest
from support import turns
from support.peers import body_of, ready_of, record, request_of

from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.journal import LINES, PERIOD, WORKER_LINES, Loss, Refusal
from zmdp.mdp.broker.core.outgoing import WorkerForgotten
from zmdp.mdp.broker.core.requests import Requests
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits

# ── what peers send ──────────────────────────────────────────────────────────────────────────────────────────────────


def request(client=b"c", body=b"x", service=b"echo"):
    return [client, b"MDPC02", b"\x01", service, body]


def ready(worker=b"w", service=b"echo"):
    return [worker, b"MDPW02", b"\x01", service]


def partial(worker=b"w", address=1, body=b"x"):
    return [worker, b"MDPW02", b"\x03", b"%d" % address, b"", body]


def final(worker=b"w", address=1, body=b"x"):
    return [worker, b"MDPW02", b"\x04", b"%d" % address, b"", body]


# ── what the broker sends; HEARTBEAT and DISCONNECT look the same both ways ──────────────────────────────────────────


def work(worker=b"w", address=1, body=b"x"):
    return [worker, b"MDPW02", b"\x02", b"%d" % address, b"", body]


def answer(client=b"c", body=b"x", service=b"echo"):
    return [client, b"MDPC02", b"\x03", service, body]


def heartbeat(worker=b"w"):
    return [worker, b"MDPW02", b"\x05"]


def disconnect(worker=b"w"):
    return [worker, b"MDPW02", b"\x06"]


def new_broker(**limits):
    """A broker at time 0 whose dispatches have the addresses 1, 2, 3 …; busy workers have no grace by default."""
    return Broker(Limits(**{"busy_grace": 1, **limits}), now=0, first_address=1)


def broker_with(*workers, **limits):
    """A broker, and workers of echo that have said READY to it in this order."""
    broker = new_broker(**limits)
    assert feed(broker, *map(ready, workers)) == []
    return broker


def feed(broker, *messages, now=0):
    """All that the broker sends for `messages`, each in a turn of its own."""
    return [sent for message in messages for sent in turns.receive(broker, message, now)]


def turn(broker, *messages):
    """All that the broker sends for `messages` that arrive in one turn."""
    for message in messages:
        broker.receive(message, 0)
    return broker.take_messages()


def books(broker):
    """What the broker holds: (services, workers, requests that wait, requests that workers hold)."""
    directory, registry = broker.directory, broker.registry
    return list(directory.services), list(directory.workers), registry.queued, registry.running


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_addresses_start_at_random():  # C32
    addresses = set()
    for _ in range(3):
        broker = Broker(now=0)
        ((*_, address, _, _),) = feed(broker, ready(), request())
        assert address.isdigit()
        addresses.add(address)
    assert len(addresses) == 3


@pytest.mark.parametrize("address", [b"01", b"-1", b"undefined", b"\xff"])
def test_a_reply_to_what_cannot_be_an_address_is_invalid(address):  # C18
    broker = broker_with(b"w")
    misaddressed = [b"w", b"MDPW02", b"\x04", address, b"", b"x"]
    assert feed(broker, *[misaddressed] * 100) == []
    assert feed(broker, request(), *[misaddressed] * 100, final(b"w", 1)) == [work(b"w", 1), answer()]
    assert broker.stats.invalid == {"bad-address": 200}
    assert feed(broker, misaddressed) == [disconnect()]
    assert broker.stats.disconnected == {Refusal.NO_REQUEST: 1}


# ── dialects and envelopes ───────────────────────────────────────────────────────────────────────────────────────────

NUMBERED = [b"MDPCX1", b"\x09", request_of(7, b"echo", b"x", b"y")], [b"MDPCX1", b"\x09", record(3, 7, body_of(b"z"))]
CLIENTS = {  # route, REQUEST and FINAL
    "0.2": ([b"c"], [b"MDPC02", b"\x01", b"echo", b"x", b"y"], [b"MDPC02", b"\x03", b"echo", b"z"]),
    "0.2, REQ": ([b"c", b""], [b"MDPC02", b"\x01", b"echo", b"x", b"y"], [b"MDPC02", b"\x03", b"echo", b"z"]),
    "0.2, proxy": (
        [b"c", b"hop", b""], [b"MDPC02", b"\x01", b"echo", b"x", b"y"], [b"MDPC02", b"\x03", b"echo", b"z"],
    ),
    "0.1": ([b"c", b""], [b"MDPC01", b"echo", b"x", b"y"], [b"MDPC01", b"echo", b"z"]),
    "0.1, bare": ([b"c"], [b"MDPC01", b"echo", b"x", b"y"], [b"MDPC01", b"echo", b"z"]),
    "X1": ([b"c", b""], *NUMBERED),
    "X1, bare": ([b"c"], *NUMBERED),
    "X1, proxy": ([b"c", b"hop", b"\xff" * 255, b""], *NUMBERED),
}  # fmt: skip


def legacy(final):
    """READY, REQUEST and FINAL of 0.2 or 0.1 after the header."""
    return [[b"\x01", b"echo"], [b"\x02", b"1", b"", b"x", b"y"], [bytes([final]), b"1", b"", b"z"]]


def x1():
    """The same of X1."""
    work = struct.pack(">IBH", 0, 1, 0) + body_of(b"x", b"y")
    return [[b"\x09", each] for each in (ready_of(b"echo", 1), record(2, 1, work), record(4, 1, body_of(b"z")))]


WORKERS = {  # route and header, and those
    "0.2": ([b"w", b"MDPW02"], legacy(4)),
    "0.2, old peer": ([b"w", b"", b"MDPW02"], legacy(4)),
    "0.2, proxy": ([b"w", b"hop", b"", b"MDPW02"], legacy(4)),
    "0.1": ([b"w", b"", b"MDPW01"], legacy(3)),
    "X1": ([b"w", b"", b"MDPWX1"], x1()),
    "X1, bare": ([b"w", b"MDPWX1"], x1()),
    "X1, proxy": ([b"w", b"hop", b"", b"MDPWX1"], x1()),
}


@pytest.mark.parametrize(("route", "asked", "answered"), CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize(("head", "commands"), WORKERS.values(), ids=WORKERS)
def test_any_client_reaches_any_worker(route, asked, answered, head, commands):  # C22, C24
    broker = new_broker()
    ready, work, final = ([*head, *command] for command in commands)
    assert turns.receive(broker, ready, now=0) == []
    assert turns.receive(broker, [*route, *asked], now=0) == [work]
    assert turns.receive(broker, final, now=0) == [[*route, *answered]]


OLD_REQUEST = [b"c", b"", b"MDPC01", b"echo", b"x"]


@pytest.mark.parametrize(
    ("limits", "body"), [({"max_message": 50}, [b"x" * 30]), ({"max_frames": 11}, [b""] * 6)], ids=["bytes", "frames"]
)
@pytest.mark.parametrize("last", [partial, final])
def test_a_reply_too_large_for_a_01_client_is_dropped(limits, body, last):  # C24
    broker = broker_with(b"w", **limits)
    feed(broker, OLD_REQUEST, request(b"d"))
    assert turns.receive(broker, [*partial()[:-1], *body], now=0) == []
    assert broker.stats.dropped == {}
    sent = turns.receive(broker, [*last()[:-1], *body], now=0)
    if last is partial:
        sent += feed(broker, partial(), final())
    assert sent == [work(address=2)]
    assert broker.stats.dropped == {Drop.REPLY_TOO_LARGE: 1}


def collected(broker, body=b"x" * 1000):
    """Have the worker `w` send PARTIALs until a request is dropped; return how much was charged before."""
    charged = 0
    while not broker.stats.dropped:
        charged = broker.registry.request_bytes
        feed(broker, partial(body=body))
    return charged


def test_what_is_collected_for_a_client_leaves_memory_for_others():  # C24, C40
    broker = broker_with(b"w", max_request_bytes=100_000)
    feed(broker, OLD_REQUEST)
    assert 45_000 < collected(broker) <= 50_000
    assert broker.stats.dropped == {Drop.MEMORY_FULL: 1}
    assert broker.registry.request_bytes == 0


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_worker_is_silent_only_until_when_the_broker_has_heard_everybody(busy):  # C13
    broker = broker_with(b"w", heartbeat=1, liveness=3)
    feed(broker, *[request()] * busy)
    assert turns.tick(broker, 5, 2.9) == [heartbeat()]
    assert turns.tick(broker, 5.9, 2.9) == []
    assert turns.tick(broker, 6.1, 2.9) == [heartbeat()]
    assert list(broker.directory.workers) == [b"w"]
    turns.receive(broker, heartbeat(), now=6.1)
    assert turns.tick(broker, 9, 9) == [heartbeat()]
    turns.tick(broker, 10, 9.2)
    assert broker.stats.lost == {Loss.SILENT: 1}


def test_a_tick_ends_at_every_time():
    # 2.15 is one of the times that are the end of their own bucket: 43 * 0.05 == 2.15, but 2.15 / 0.05 < 43
    broker = broker_with(b"w", heartbeat=1, liveness=2)
    assert turns.tick(broker, 2.15, 1.9) == [heartbeat()]
    assert broker.deadline() > 2.15


READY = {name: [*WORKERS[name][0], *WORKERS[name][1][0]] for name in ("0.2", "0.1", "X1")}


@pytest.mark.parametrize(("protocol", "dead_at"), [("0.2", 10), ("0.1", 10), ("X1", 3)])
def test_a_busy_worker_that_cannot_heartbeat_at_work_has_a_grace(protocol, dead_at):  # C34
    broker = new_broker(heartbeat=1, liveness=3, busy_grace=10)
    feed(broker, READY[protocol], request())
    for second in range(1, dead_at):
        turns.tick(broker, second + 0.06)
        assert broker.registry.running == 1
    turns.tick(broker, dead_at + 0.06)
    assert books(broker) == ([b"echo"], [], 1, 0)
    assert broker.stats.lost == {Loss.SILENT: 1}


@pytest.mark.parametrize("protocol", READY)
def test_an_idle_worker_has_no_grace(protocol):  # C34
    broker = new_broker(heartbeat=1, liveness=3, busy_grace=10)
    feed(broker, READY[protocol])
    turns.tick(broker, 3.06)
    assert broker.stats.lost == {Loss.SILENT: 1}


@pytest.mark.parametrize(
    "message", [[b"w", b"MDPW02", b"\x09"], request(b"w"), heartbeat(b"v")], ids=["garbage", "request", "another's"]
)
def test_other_messages_are_no_sign_of_life(message):  # C13, C15
    broker = broker_with(b"w", heartbeat=1, liveness=3)
    turns.receive(broker, message, now=2)
    turns.tick(broker, 3.06)
    assert list(broker.directory.workers) == []


def test_a_request_is_not_handed_from_one_dead_worker_to_the_next():  # C13, C17
    # a machine with several workers goes down: all are silent at once, none of the others may cost the request a try
    broker = broker_with(b"w1", b"w2", b"w3", b"w4", heartbeat=1, liveness=3)
    assert turns.receive(broker, request(), now=0) == [work(b"w1")]
    assert turns.tick(broker, 100) == []
    assert books(broker) == ([b"echo"], [], 1, 0)
    assert turns.receive(broker, ready(b"w5"), now=100) == [work(b"w5", 2)]


# ── valid but unexpected ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_late_final_of_a_worker_that_came_back_is_dropped():  # C18, C32
    broker = broker_with(b"w1", b"w2", heartbeat=1, liveness=3)
    feed(broker, request())
    feed(broker, heartbeat(b"w2"), now=2)
    assert work(b"w2", 2) in turns.tick(broker, 3.1)
    assert feed(broker, ready(b"w1"), final(b"w1", 1, b"late"), final(b"w2", 2, b"right"), now=4) == [
        answer(body=b"right")
    ]
    assert broker.stats.late == 1


# ── invalid ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([], "too-few-frames"),
        ([b"w"], "too-few-frames"),
        ([b"w", b"GET / HTTP/1.1"], "no-header"),
        ([b"w", b"MDPW02", b"\x07"], "unknown-command"),
        ([b"w", b"MDPW02", b"\x04", b"c", b"d", b"", b"x"], "no-delimiter"),
        ([b"w", b"MDPW02", b"\x01", b"\n"], "bad-service-name"),
        ([b"c", b"MDPC02", b"\x01", b"echo"], "no-body"),  # C19
        ([*request(), *[b""] * 100], "too-many-frames"),
        ([*request(), b"x" * 1000], "too-large"),
    ],
)
def test_an_invalid_message_is_counted_and_nothing_else(message, reason):  # C15
    broker = broker_with(b"w", max_frames=100, max_message=1000)
    turns.receive(broker, request(b"d"), now=0)
    before = books(broker)
    assert turns.receive(broker, message, now=0) == []
    assert books(broker) == before
    assert broker.stats.invalid == {reason: 1}
    assert turns.receive(broker, final(), now=0) == [answer(b"d")]


# ── requests of workers that are lost ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("envelope", [[], [b"hop", b""], [b"1", b"2", b"3", b"4", b"5", b"6", b""]], ids=len)
@pytest.mark.parametrize(("later", "lost"), [(0, {}), (1, {Drop.WORKERS_LOST: 1})])
def test_what_did_not_reach_a_connection_is_told_by_its_turn(envelope, later, lost):  # C17
    broker = new_broker(max_attempts=1)
    turns.receive(broker, [b"w", *envelope, *ready()[1:]], now=0)
    assert turns.receive(broker, request(), now=0) == [[b"w", *envelope, *work()[1:]]]
    assert turns.disconnected(broker, b"w", broker.turn - 1 + later, now=0) == []
    assert broker.stats.dropped == lost
    assert broker.directory.workers == {}


# ── replies over the limits ──────────────────────────────────────────────────────────────────────────────────────────

OVERSIZED = {b"MDPW02": b"\x04", b"MDPW01": b"\x03"}


@pytest.mark.parametrize(("header", "code"), OVERSIZED.items())
def test_after_a_final_over_the_limits_one_that_fits_counts(header, code):  # C15
    broker = new_broker(max_frames=10)
    turns.receive(broker, [b"w", header, b"\x01", b"echo"], now=0)
    feed(broker, request())
    assert turns.receive(broker, [b"w", header, code, b"1", b"", *[b"x"] * 10], now=0) == []
    assert broker.stats.invalid == {"too-many-frames": 1}
    assert turns.receive(broker, [b"w", header, code, b"1", b"", b"x"], now=1) == [answer()]
    feed(broker, request())
    turns.receive(broker, [b"w", header, b"\x05" if header == b"MDPW02" else b"\x04"], now=5)
    turns.tick(broker, 6)
    assert books(broker) == ([b"echo"], [b"w"], 0, 1)


@pytest.mark.parametrize(("header", "code"), OVERSIZED.items())
def test_a_worker_whose_final_was_over_the_limits_does_not_stay_busy_for_ever(header, code):  # C15
    broker = new_broker(max_frames=10, heartbeat=1, liveness=5)
    turns.receive(broker, [b"w", header, b"\x01", b"echo"], now=0)
    feed(broker, request(b"c"), request(b"d"))
    assert turns.receive(broker, [b"w", header, code, b"1", b"", *[b"x"] * 10], now=0) == []
    turns.receive(broker, [b"w", header, b"\x05" if header == b"MDPW02" else b"\x04"], now=4)
    goodbye = [b"w", header, b"\x06" if header == b"MDPW02" else b"\x05"]
    assert turns.tick(broker, 6) == [goodbye]
    assert broker.stats.dropped == {Drop.REPLY_TOO_LARGE: 1}
    assert broker.stats.disconnected == {Refusal.OVERSIZED_REPLY: 1}
    assert books(broker) == ([b"echo"], [], 1, 0)


@pytest.mark.parametrize(
    "message",
    [
        [b"stranger", b"MDPW02", b"\x04", b"1", b"", *[b"x"] * 10],
        [b"idle", b"MDPW02", b"\x04", b"1", b"", *[b"x"] * 10],
        [b"w", b"MDPW02", b"\x04", b"2", b"", *[b"x"] * 10],
        [b"w", b"MDPW02", b"\x04", b"c", b"", *[b"x"] * 10],
        [b"w", b"MDPWX1", b"\x09", record(4, 1, body_of(*[b"x"] * 11))],
        [b"w", b"MDPC02", b"\x04", *[b"x"] * 10],
        [b"w", b"MDPW02", b"\x05", *[b"x"] * 10],
        [b"w", b"", *[b"x"] * 10],
    ],
)
def test_what_else_is_over_the_limits_changes_nothing(message):  # C15
    broker = new_broker(max_frames=10)
    feed(broker, ready(b"w"), ready(b"idle"), request())
    before = books(broker)
    assert turns.receive(broker, message, now=0) == []
    assert (books(broker), broker.stats.dropped) == (before, {})


@pytest.mark.parametrize("service", [b"mmi.service", b"mmi.", b"mmi.mine"])
def test_no_worker_may_register_mmi(service):  # C25
    broker = new_broker()
    assert turns.receive(broker, ready(service=service), now=0) == [disconnect()]
    assert books(broker) == ([], [], 0, 0)
    assert broker.stats.disconnected == {Refusal.RESERVED_NAME: 1}


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_leaves_memory_for_others():  # C40
    broker = new_broker(max_request_bytes=100_000)
    feed(broker, *[request(b"greedy", body=b"x" * 1000)] * 100)
    half = broker.registry.request_bytes
    assert 45_000 < half <= 51_000
    feed(broker, *[request(b"other", body=b"x" * 1000)] * 100)
    assert 20_000 < broker.registry.request_bytes - half <= 26_000


def test_a_client_shares_it_with_those_behind_its_connection():  # C36, C40
    direct, behind = request(b"p", body=b"x" * 1000), [b"p", b"1", b"", *request(body=b"x" * 1000)[1:]]
    for first, second in ((direct, behind), (behind, direct)):
        broker = new_broker(max_request_bytes=100_000)
        feed(broker, *[first] * 20, *[second] * 80)
        assert 45_000 < broker.registry.request_bytes <= 51_000
        assert len(broker.directory.clients) == 2


def test_many_small_frames_are_charged_for_what_they_take():  # C40
    broker = broker_with(max_request_bytes=1_000_000)
    frames = [b"xx"] * 1000
    feed(broker, *[[b"c", b"MDPC02", b"\x01", b"echo", *frames]] * 20)
    assert broker.registry.queued < 20
    assert broker.stats.dropped == {Drop.MEMORY_FULL: 20 - broker.registry.queued}


def test_services_are_bounded():
    broker = broker_with(b"w", max_services=2)
    feed(broker, request(service=b"s1"), *[request(service=b"random%d" % n) for n in range(3)])
    assert broker.stats.dropped == {Drop.TOO_MANY_SERVICES: 3}
    assert turns.receive(broker, ready(b"v", b"s1"), now=0) == [work(b"v")]
    assert turns.receive(broker, ready(b"u", b"s2"), now=0) == [disconnect(b"u")]
    assert broker.stats.disconnected == {Refusal.TOO_MANY_SERVICES: 1}
    assert books(broker) == ([b"echo", b"s1"], [b"w", b"v"], 0, 1)


def test_a_worker_displaces_a_service_that_only_has_requests():  # C41
    broker = broker_with(b"w", max_services=3)
    feed(broker, request(service=b"s1"), request(service=b"s2"))
    assert turns.receive(broker, ready(b"v", b"new"), now=0) == []
    assert broker.stats.dropped == {Drop.TOO_MANY_SERVICES: 1}
    assert books(broker) == ([b"echo", b"s1", b"new"], [b"w", b"v"], 1, 0)


def test_services_without_a_worker_are_bounded_for_each_client():  # C41
    broker = broker_with(max_unserved=2)
    feed(broker, *[request(service=b"random%d" % n) for n in range(3)], request(service=b"random0"))
    assert broker.stats.dropped == {Drop.TOO_MANY_UNSERVED: 1}
    feed(broker, request(b"other", service=b"random3"))
    assert len(broker.directory.services) == 3


def test_workers_are_bounded():
    broker = broker_with(b"w1", b"w2", max_workers=2)
    assert turns.receive(broker, ready(b"w3"), now=0) == [disconnect(b"w3")]
    assert broker.stats.disconnected == {Refusal.TOO_MANY_WORKERS: 1}
    assert feed(broker, disconnect(b"w1"), ready(b"w3")) == []
    assert list(broker.directory.workers) == [b"w2", b"w3"]


# ── turns of many messages ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_leaves_in_the_turn_gets_nothing_of_it():  # C16
    broker = broker_with(b"w1", b"w2")
    assert turn(broker, request(b"c"), request(b"d"), disconnect(b"w1")) == [work(b"w2")]
    assert broker.registry.queued == 1


def test_a_client_that_is_gone_takes_along_what_it_sent_in_the_turn():
    broker = broker_with(b"w")
    broker.receive(request(b"c"), 0)
    assert turns.give_up(broker, b"c", 0) == []
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 1}
    assert books(broker) == ([b"echo"], [b"w"], 0, 0)


def test_nothing_of_a_turn_goes_to_a_peer_that_takes_a_routing_id_in_it():  # C39
    broker = broker_with(b"w")
    turns.receive(broker, request(), now=0)
    broker.receive(final(), now=0)
    broker.receive(request(b"d"), now=0)
    broker.replaced(b"c", broker.turn, now=0)
    broker.receive(request(service=b"mmi.service", body=b"echo"), now=0)
    assert broker.take_messages() == [answer(service=b"mmi.service", body=b"200"), work(address=2)]


@pytest.mark.parametrize("end", [disconnect(), final(), ready()], ids=["leaves", "is refused", "is refused too"])
def test_what_waits_for_a_worker_is_to_be_discarded_when_it_is_forgotten(end):  # C16
    broker = broker_with(b"w")
    broker.take_events()
    number = broker.turn
    turns.receive(broker, end, now=0)
    assert broker.take_events() == [WorkerForgotten((b"w",), number)]
    assert broker.take_events() == []


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_can_be_sent_to_a_client_of_mdp_that_waits_or_to_nobody():
    broker = new_broker()
    feed(broker, request(b"c"))
    assert turns.probe(broker, b"c", now=0) == turns.probe(broker, b"?", now=0) == []


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_draining_broker_finishes_what_it_took():
    broker = broker_with(b"w")
    feed(broker, request(b"c"), request(b"d"))
    assert not broker.drained
    assert turns.drain(broker, 0) == []
    assert turns.receive(broker, request(b"e"), now=0) == []
    assert broker.stats.dropped == {Drop.DRAINING: 1}
    assert turns.receive(broker, final(), now=0) == [answer(b"c"), work(address=2)]
    assert not broker.drained
    assert turns.receive(broker, final(address=2), now=0) == [answer(b"d"), disconnect()]
    assert broker.drained


# ── what is told of it ───────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_is_counted():
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(), partial(b"w1"), heartbeat(b"w1"), final(b"w1"), final(b"w1"), request(), disconnect(b"w2"))
    feed(broker, request(service=b"mmi.service"), [b"?"])
    stats = broker.stats.as_dict()
    assert {name: count for name, count in stats.items() if count} == {
        "requests": 3,
        "dispatched": 3,
        "redispatched": 1,
        "partials": 1,
        "replies": 1,
        "late": 1,
        "mmi": 1,
        "heartbeats": 1,
        "invalid": {"too-few-frames": 1},
        "lost": {"disconnected": 1},
    }


def test_what_happens_is_logged(caplog):
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("zmdp.test")
    broker = Broker(now=0, logger=logger)
    feed(broker, ready(b"\xff"), request(), final(b"v"), disconnect(b"\xff"), [b"?"])
    turns.give_up(broker, b"c", now=0)
    assert caplog.record_tuples == [
        ("zmdp.test", logging.INFO, "worker 1 offers echo, credit 1 (0.2)"),
        (
            "zmdp.test", logging.INFO,
            "asked a worker to register again, as after a restart of the broker: not-registered",
        ),
        ("zmdp.test", logging.INFO, "worker 1 of service echo is gone: disconnected"),
        ("zmdp.test", logging.WARNING, "ignored an invalid message: too-few-frames"),
        ("zmdp.test", logging.INFO, "dropped a request for service echo: client-gone"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "receive", [Broker.receive, lambda broker, message, now: broker.receive_pirate(message, b"echo", now)]
)
def test_a_bug_is_counted_and_logged_with_its_traceback(receive, caplog):
    broker = broker_with(b"w")
    receive(broker, [None, None], 0)
    assert broker.stats.internal_errors == 1
    assert "please report this bug:\nTraceback" in caplog.text
    assert turns.receive(broker, request(), now=0) == [work()]


unpatchable = pytest.mark.pure_only


@unpatchable
def test_a_bug_in_what_is_due_is_not_repeated_at_once(monkeypatch):
    broker = broker_with(b"w", heartbeat=1)
    assert broker.deadline() == pytest.approx(1.05)

    def failing(self, now, heard):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(broker, "_tick", MethodType(failing, broker))
        assert turns.tick(broker, 2) == []
        assert (broker.deadline(), broker.stats.internal_errors) == (3, 1)
    assert turns.tick(broker, 3) == [heartbeat()]
    assert broker.deadline() == pytest.approx(4.05)


@unpatchable
def test_a_bug_at_the_end_of_a_turn_does_not_keep_back_what_it_has_to_send(monkeypatch):
    broker = broker_with(b"w")

    def failing(self, now):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(broker, "_settle", MethodType(failing, broker))
        broker.probe(b"w", 0)
        assert turns.receive(broker, request(), now=0) == [heartbeat()]
    assert broker.stats.internal_errors == 1
    assert broker.take_messages() == [work()]


@unpatchable
def test_a_bug_in_dispatching_loses_no_request_and_affects_no_other_service(monkeypatch):
    broker = broker_with()
    for name, service in ((b"w", b"echo"), (b"v", b"sum")):
        turns.receive(broker, [name, b"MDPW02", b"\x01", service], now=0)
    dispatch, failures = Requests._dispatch, [b"1"]

    def failing(self, worker, request, now):
        dispatch(self, worker, request, now)
        if request.body[0] in failures:
            self._outgoing._messages.pop()
            raise RuntimeError("a bug")

    monkeypatch.setattr(broker._requests, "_dispatch", MethodType(failing, broker._requests))
    for client, service, body in ((b"c", b"echo", b"1"), (b"d", b"sum", b"2")):
        broker.receive([client, b"MDPC02", b"\x01", service, body], 0)
    assert [message[-1] for message in broker.take_messages()] == [b"2"]
    assert broker.stats.internal_errors == 1
    assert broker.registry.queued == 1
    failures.clear()
    assert [message[-1] for message in broker.take_messages()] == [b"1"]
    assert (broker.registry.queued, broker.registry.running) == (0, 2)


@unpatchable
def test_a_request_that_always_fails_to_be_dispatched_is_dropped(monkeypatch):
    broker = broker_with(b"w", max_attempts=3)

    def failing(self, worker, request, now):
        raise RuntimeError("a bug")

    monkeypatch.setattr(broker._requests, "_dispatch", MethodType(failing, broker._requests))
    broker.receive(request(), 0)
    for _ in range(4):
        assert broker.take_messages() == []
    assert (broker.registry.queued, broker.registry.running, broker.directory.unsettled) == (0, 0, [])
    assert broker.stats.dropped == {Drop.WORKERS_LOST: 1}
    assert broker.stats.internal_errors == 3


@unpatchable
def test_a_bug_in_the_queue_loses_no_request(monkeypatch):
    broker = broker_with(b"w")

    def failing(self, service):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(broker.registry, "take_next", MethodType(failing, broker.registry))
        broker.receive(request(), 0)
        broker.receive([b"d", *request()[1:]], 0)
        assert broker.take_messages() == []
    assert (broker.registry.queued, broker.stats.internal_errors) == (2, 1)
    assert broker.take_messages() == [work()]
    assert (broker.registry.queued, broker.registry.running) == (1, 1)


def test_registrations_are_logged_one_by_one_up_to_a_bound(caplog):
    caplog.set_level(logging.INFO)
    broker = broker_with()
    for number in range(WORKER_LINES + 44):
        turns.receive(broker, [b"w%d" % number, b"MDPW02", b"\x01", b"echo"], now=0)
    assert len(caplog.messages) == WORKER_LINES
    for number in range(WORKER_LINES + 44):
        turns.receive(broker, [b"w%d" % number, b"MDPW02", b"\x06"], now=1)
    caplog.clear()
    assert broker.deadline() <= PERIOD  # though no worker is left
    turns.tick(broker, PERIOD)
    assert caplog.messages == [f"worker-ready: 44 more in the last {PERIOD:g} s"]
    assert broker.deadline() == PERIOD + 1


def test_the_end_of_a_broker_reports_what_was_not_logged(caplog):
    caplog.set_level(logging.INFO)
    broker = broker_with()
    for _ in range(LINES + 2):
        turns.receive(broker, [b"c", b"garbage"], now=0)
    turns.close(broker, now=1)
    assert caplog.messages[-1] == f"no-header: 2 more in the last {PERIOD:g} s"
