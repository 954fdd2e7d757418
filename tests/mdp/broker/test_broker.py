"""The broker's machine, rule by rule: what it sends for what it receives.  Nothing here waits: the time is an argument.

What only X1 has is in `test_broker_x1` and `test_broker_credit`.
"""

import logging
import struct
from types import MethodType

import pytest
from support import turns
from support.peers import body_of, ready_of, record, request_of

from zmdp.mdp.broker.drops import Drop
from zmdp.mdp.broker.events import WorkerForgotten
from zmdp.mdp.broker.journal import LINES, PERIOD, WORKER_LINES, Loss, Refusal
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.broker.records import CLIENT_OVERHEAD, FRAME_OVERHEAD, REQUEST_OVERHEAD
from zmdp.mdp.broker.requests import Requests
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


def part(client=b"c", body=b"x", service=b"echo"):
    return [client, b"MDPC02", b"\x02", service, body]


def answer(client=b"c", body=b"x", service=b"echo"):
    return [client, b"MDPC02", b"\x03", service, body]


def heartbeat(worker=b"w"):
    return [worker, b"MDPW02", b"\x05"]


def disconnect(worker=b"w"):
    return [worker, b"MDPW02", b"\x06"]


CLIENT = CLIENT_OVERHEAD
"""Bytes charged for a client, and for a request of four bytes."""
SIZE = REQUEST_OVERHEAD + FRAME_OVERHEAD + len(b"1234")


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


# ── requests and replies ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_goes_to_a_worker_and_its_reply_to_the_client():  # C3, C7
    broker = broker_with(b"w")
    assert turns.receive(broker, request(), now=0) == [work()]
    assert turns.receive(broker, final(body=b"reply"), now=0) == [answer(body=b"reply")]
    assert books(broker) == ([b"echo"], [b"w"], 0, 0)


def test_ready_is_not_answered():  # C7
    broker = new_broker()
    assert turns.receive(broker, ready(), now=0) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0)


def test_a_reply_is_labelled_with_the_service_of_its_request():
    broker = broker_with(b"w")
    turns.receive(broker, ready(b"v", b"sum"), now=0)
    assert feed(broker, request(b"c"), request(b"c", service=b"sum")) == [work(b"w"), work(b"v", 2)]
    assert turns.receive(broker, partial(b"v", 2), now=0) == [part(service=b"sum")]
    assert turns.receive(broker, final(b"w"), now=0) == [answer(service=b"echo")]
    assert turns.receive(broker, request(b"d"), now=0) == [work(b"w", 3)]


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_dispatch_has_its_own_address():  # C32
    broker = broker_with(b"w1", b"w2")
    sent = feed(broker, request(), request(), final(b"w1", 1), request(), final(b"w2", 2), request(), disconnect(b"w1"))
    sent += feed(broker, final(b"w2", 4))
    assert [int(message[3]) for message in sent if message[1:3] == [b"MDPW02", b"\x02"]] == [1, 2, 3, 4, 5]


def test_addresses_start_at_random():  # C32
    addresses = set()
    for _ in range(3):
        broker = Broker(now=0)
        ((*_, address, _, _),) = feed(broker, ready(), request())
        assert address.isdigit()
        addresses.add(address)
    assert len(addresses) == 3


@pytest.mark.parametrize("reply", [final, partial])
def test_a_duplicated_reply_is_dropped(reply):  # C32: seen: the next request got the wrong reply
    broker = broker_with(b"w")
    feed(broker, request(b"c"), final(), request(b"d"))
    assert turns.receive(broker, reply(body=b"again"), now=0) == []
    assert turns.receive(broker, final(address=2, body=b"right"), now=0) == [answer(b"d", b"right")]
    assert broker.stats.late == 1


def test_a_reply_to_a_dispatch_of_another_worker_is_dropped():  # C32
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"c"), request(b"d"))
    assert turns.receive(broker, final(b"w1", 2), now=0) == []
    assert broker.stats.late == 1
    assert feed(broker, final(b"w1", 1), final(b"w2", 2)) == [answer(b"c"), answer(b"d")]


@pytest.mark.parametrize("address", [b"0", b"3", b"%d" % (1 << 60)])
@pytest.mark.parametrize(("requests", "reason"), [(0, Refusal.NO_REQUEST), (1, Refusal.WRONG_CLIENT)])
def test_a_reply_to_an_address_that_never_was_is_refused(address, requests, reason):  # C14, C18
    broker = broker_with(b"w", b"v")
    feed(broker, *[request()] * 2, final(b"v", 2), *[final(b"w", 1)] * (1 - requests))
    sent = turns.receive(broker, [b"w", b"MDPW02", b"\x04", address, b"", b"x"], now=0)
    assert sent == [disconnect(), *[work(b"v", 3)] * requests]
    assert broker.stats.disconnected == {reason: 1}


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
    """READY, REQUEST, FINAL, HEARTBEAT and DISCONNECT of 0.2 or 0.1 after the header."""
    return [
        [b"\x01", b"echo"], [b"\x02", b"1", b"", b"x", b"y"], [bytes([final]), b"1", b"", b"z"], [bytes([final + 1])],
        [bytes([final + 2])],
    ]  # fmt: skip


def x1():
    """The same of X1."""
    work = struct.pack(">IBH", 0, 1, 0) + body_of(b"x", b"y")
    records = ready_of(b"echo", 1), record(2, 1, work), record(4, 1, body_of(b"z")), b"", record(6, 0)
    return [[b"\x09", each] if each else [] for each in records]


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
    ready, work, final, _, _ = ([*head, *command] for command in commands)
    assert turns.receive(broker, ready, now=0) == []
    assert turns.receive(broker, [*route, *asked], now=0) == [work]
    assert turns.receive(broker, final, now=0) == [[*route, *answered]]


@pytest.mark.parametrize(("head", "commands"), WORKERS.values(), ids=WORKERS)
def test_a_worker_is_spoken_to_in_its_dialect_behind_its_envelope(head, commands):  # C22, C24
    broker = new_broker(heartbeat=1)
    ready, _, _, beat, leave = ([*head, *command] for command in commands)
    turns.receive(broker, ready, now=0)
    assert turns.tick(broker, 1.1) == [beat]
    assert turns.receive(broker, beat, now=1.2) == []
    assert turns.receive(broker, ready, now=1.2) == [leave]
    assert turns.receive(broker, ready, now=1.3) == []
    # X1: the broker answers once the worker holds nothing
    assert turns.receive(broker, leave, now=1.4) == [leave] * (head[-1] == b"MDPWX1")
    assert books(broker) == ([], [], 0, 0)


OLD_REQUEST = [b"c", b"", b"MDPC01", b"echo", b"x"]


def test_a_01_client_gets_one_reply():  # C24
    broker = broker_with(b"w")
    assert turns.receive(broker, OLD_REQUEST, now=0) == [work()]
    assert feed(broker, [*partial(body=b"1"), b"2"], partial(body=b"3")) == []
    assert turns.receive(broker, final(body=b"4"), now=0) == [[b"c", b"", b"MDPC01", b"echo", b"1", b"2", b"3", b"4"]]


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


def test_a_01_request_goes_to_another_worker_as_long_as_nothing_reached_its_client():  # C17, C24
    broker = broker_with(b"w1", b"w2")
    turns.receive(broker, OLD_REQUEST, now=0)
    turns.receive(broker, partial(b"w1", body=b"lost"), now=0)
    assert turns.receive(broker, disconnect(b"w1"), now=0) == [work(b"w2", 2)]
    assert turns.receive(broker, final(b"w2", 2, b"whole"), now=0) == [[b"c", b"", b"MDPC01", b"echo", b"whole"]]


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_waited_too_long_is_dropped():  # C12
    broker = new_broker(expiry=10)
    feed(broker, request(b"c"), now=1)
    feed(broker, request(b"d"), now=2)
    assert turns.tick(broker, 10.9) == []
    assert broker.stats.dropped == {}
    assert turns.tick(broker, 11.1) == []
    assert broker.stats.dropped == {Drop.EXPIRED: 1}
    assert turns.receive(broker, ready(), now=11.2) == [work()]


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_workers_and_requests_there_is_no_deadline():
    assert new_broker().deadline() is None


@pytest.mark.parametrize(
    ("messages", "deadline"),
    [([ready()], 2.625), ([request()], 8.008), ([ready(), request(service=b"sum")], 2.625)],
    ids=["worker", "request", "both"],
)
def test_the_deadline_is_the_next_heartbeat_or_expiry(messages, deadline):
    broker = new_broker(heartbeat=2.5, expiry=8)
    feed(broker, *messages)
    assert broker.deadline() == pytest.approx(deadline)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_worker_gets_heartbeats_busy_or_not(busy):  # C13
    broker = broker_with(b"w", heartbeat=1)
    feed(broker, *[request()] * busy)
    assert turns.tick(broker, 0.99) == []
    assert turns.tick(broker, 1.06) == [heartbeat()]
    assert turns.tick(broker, 2.05) == []
    assert turns.tick(broker, 2.12) == [heartbeat()]


def test_no_heartbeat_to_a_worker_that_was_sent_a_request():  # C13
    broker = broker_with(b"w", heartbeat=1)
    turns.receive(broker, request(), now=0.9)
    assert turns.tick(broker, 1.8) == []
    assert turns.tick(broker, 1.96) == [heartbeat()]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_silent_worker_is_dead_busy_or_not(busy):  # C13
    broker = broker_with(b"w", heartbeat=1, liveness=3)
    feed(broker, *[request()] * busy)
    turns.tick(broker, 1.1)
    turns.tick(broker, 2.2)
    assert books(broker) == ([b"echo"], [b"w"], 0, busy)
    assert turns.tick(broker, 3.06) == []
    assert books(broker) == ([b"echo"] * busy, [], busy, 0)
    assert broker.stats.lost == {Loss.SILENT: 1}


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


def test_a_grace_shorter_than_the_liveness_shortens_nothing():  # C34
    broker = broker_with(b"w", heartbeat=1, liveness=5, busy_grace=1)
    feed(broker, request())
    turns.tick(broker, 4.9)
    assert list(broker.directory.workers) == [b"w"]


@pytest.mark.parametrize("sign", [heartbeat(), partial(), final()], ids=["HEARTBEAT", "PARTIAL", "FINAL"])
def test_any_command_is_a_sign_of_life(sign):  # C13
    broker = broker_with(b"w", heartbeat=1, liveness=3)
    turns.receive(broker, request(), now=0)
    turns.receive(broker, sign, now=2)
    turns.tick(broker, 2)
    turns.tick(broker, 4.9)
    assert list(broker.directory.workers) == [b"w"]
    turns.tick(broker, 5.06)
    assert list(broker.directory.workers) == []


@pytest.mark.parametrize(
    "message", [[b"w", b"MDPW02", b"\x09"], request(b"w"), heartbeat(b"v")], ids=["garbage", "request", "another's"]
)
def test_other_messages_are_no_sign_of_life(message):  # C13, C15
    broker = broker_with(b"w", heartbeat=1, liveness=3)
    turns.receive(broker, message, now=2)
    turns.tick(broker, 3.06)
    assert list(broker.directory.workers) == []


def test_all_dead_workers_go_at_once_and_the_living_stay():
    # the purge of the published brokers stops at the first live worker
    broker = broker_with(b"w1", b"w2", b"w3", b"w4", heartbeat=1, liveness=3)
    feed(broker, heartbeat(b"w1"), heartbeat(b"w3"), now=2)
    assert turns.tick(broker, 3.1) == [heartbeat(b"w1"), heartbeat(b"w3")]
    assert list(broker.directory.workers) == [b"w1", b"w3"]


def test_a_request_is_not_handed_from_one_dead_worker_to_the_next():  # C13, C17
    # a machine with several workers goes down: all are silent at once, none of the others may cost the request a try
    broker = broker_with(b"w1", b"w2", b"w3", b"w4", heartbeat=1, liveness=3)
    assert turns.receive(broker, request(), now=0) == [work(b"w1")]
    assert turns.tick(broker, 100) == []
    assert books(broker) == ([b"echo"], [], 1, 0)
    assert turns.receive(broker, ready(b"w5"), now=100) == [work(b"w5", 2)]


def test_the_silence_of_a_worker_overdue_when_it_got_the_request_does_not_count():  # C17
    broker = broker_with(b"w1", b"w2", heartbeat=1, liveness=5, max_attempts=1)
    turns.receive(broker, heartbeat(b"w1"), now=3.6)
    assert turns.receive(broker, request(), now=3.6) == [work(b"w1")]
    assert turns.receive(broker, final(b"w1"), now=3.6) == [answer()]
    assert turns.receive(broker, request(), now=3.6) == [work(b"w2", 2)]
    assert turns.tick(broker, 5.1) == [heartbeat(b"w1"), work(b"w1", 3)]
    assert broker.stats.dropped == {}
    assert turns.receive(broker, disconnect(b"w1"), now=5.1) == []  # it was alive: this counts
    assert broker.stats.dropped == {Drop.WORKERS_LOST: 1}


def test_a_worker_not_yet_overdue_when_it_got_the_request_counts():  # C17
    broker = broker_with(b"w1", b"w2", heartbeat=1, liveness=5, max_attempts=1)
    assert turns.receive(broker, request(), now=3.5) == [work(b"w1")]
    turns.receive(broker, heartbeat(b"w2"), now=5)
    assert turns.tick(broker, 5.1) == [heartbeat(b"w2")]
    assert broker.stats.dropped == {Drop.WORKERS_LOST: 1}


# ── valid but unexpected ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("message", [heartbeat(), partial(), final()], ids=["HEARTBEAT", "PARTIAL", "FINAL"])
def test_a_stranger_is_disconnected(message):  # C14
    broker = new_broker()
    assert turns.receive(broker, message, now=0) == [disconnect()]
    assert books(broker) == ([], [], 0, 0)
    assert broker.stats.disconnected == {Refusal.NOT_REGISTERED: 1}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (ready(), Refusal.SECOND_READY),
        (ready(service=b"sum"), Refusal.SECOND_READY),
        (partial(address=7), Refusal.NO_REQUEST),
        (final(address=7), Refusal.NO_REQUEST),
        ([b"w", b"MDPW01", b"\x04"], Refusal.WRONG_DIALECT),
    ],
    ids=["READY", "READY for another service", "PARTIAL", "FINAL", "another dialect"],
)
def test_a_worker_that_says_what_it_may_not_is_disconnected_and_forgotten(message, reason):  # C14
    broker = broker_with(b"w")
    *_, (identity, header, code) = turns.receive(broker, message, now=0)
    assert (identity, header) == (b"w", message[1])
    assert code == (b"\x06" if header == b"MDPW02" else b"\x05")
    assert books(broker) == ([], [], 0, 0)
    assert broker.stats.disconnected == {reason: 1}
    assert turns.receive(broker, request(), now=0) == []


def test_a_late_final_of_a_dead_worker_is_dropped():  # C18
    broker = broker_with(b"w1", heartbeat=1, liveness=3)
    turns.receive(broker, request(), now=0)
    turns.tick(broker, 4)
    assert turns.receive(broker, ready(b"w2"), now=4) == [work(b"w2", 2)]
    assert turns.receive(broker, final(b"w1", 1, b"late"), now=4) == [disconnect(b"w1")]
    assert turns.receive(broker, final(b"w2", 2, b"right"), now=4) == [answer(body=b"right")]


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


# ── DISCONNECT from a worker ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_may_disconnect_before_ready():  # C10
    broker = new_broker()
    assert turns.receive(broker, disconnect(), now=0) == []
    assert broker.stats.disconnected == {}
    assert turns.receive(broker, ready(), now=0) == []
    assert list(broker.directory.workers) == [b"w"]


def test_nothing_is_sent_to_a_worker_after_its_disconnect():  # C16
    broker = broker_with(b"w", heartbeat=1)
    assert turns.receive(broker, disconnect(), now=0) == []
    assert books(broker) == ([], [], 0, 0)
    assert broker.deadline() is None
    assert turns.receive(broker, request(), now=0) == []
    assert turns.tick(broker, 10) == []
    assert turns.receive(broker, disconnect(), now=10) == []


# ── requests of workers that are lost ────────────────────────────────────────────────────────────────────────────────


def fall_silent(broker):
    turns.receive(broker, heartbeat(b"w2"), now=4.9)
    assert turns.tick(broker, 4.9) == [heartbeat(b"w1"), heartbeat(b"w2")]
    return turns.tick(broker, 5.1)


LOSSES = {  # w1 is lost; what the broker sends because of it, and what it says to w1
    "silent": (fall_silent, []),
    "DISCONNECT": (lambda broker: turns.receive(broker, disconnect(b"w1"), now=0), []),
    "second READY": (lambda broker: turns.receive(broker, ready(b"w1"), now=0), [disconnect(b"w1")]),
    "wrong reply": (lambda broker: turns.receive(broker, final(b"w1", 999), now=0), [disconnect(b"w1")]),
    "unreachable": (lambda broker: turns.unreachable(broker, b"w1", broker.turn, now=0), []),
    "gone": (lambda broker: turns.gone(broker, b"w1", now=0), []),
}
each_loss = pytest.mark.parametrize(("lose", "told"), LOSSES.values(), ids=LOSSES)


@each_loss
def test_a_lost_workers_request_goes_to_an_idle_worker_at_once(lose, told):  # C17
    broker = broker_with(b"w1", b"w2")
    turns.receive(broker, request(), now=0)
    assert lose(broker) == [*told, work(b"w2", 2)]
    assert books(broker) == ([b"echo"], [b"w2"], 0, 1)
    assert broker.stats.redispatched == 1


@each_loss
def test_a_lost_workers_request_goes_before_all_that_wait(lose, told):  # C17
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"c", b"1"), request(b"d", b"2"), request(b"e", b"3"), request(b"c", b"4"))
    assert lose(broker) == told
    assert turns.receive(broker, final(b"w2", 2), now=5.1) == [answer(b"d"), work(b"w2", 3, b"1")]


@each_loss
def test_a_request_whose_partial_reached_the_client_is_not_repeated(lose, told):  # C17
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(), partial(b"w1"))
    assert lose(broker) == told
    assert books(broker) == ([b"echo"], [b"w2"], 0, 0)
    assert broker.stats.dropped == {Drop.LOST_AFTER_PARTIAL: 1}


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_request_is_given_to_so_many_workers(attempts):  # C17
    broker = broker_with(max_attempts=attempts)
    turns.receive(broker, request(), now=0)
    for number in range(attempts):
        worker = b"w%d" % number
        assert turns.receive(broker, ready(worker), now=0) == [work(worker, number + 1)]
        assert turns.receive(broker, disconnect(worker), now=0) == []
    assert broker.stats.dropped == {Drop.WORKERS_LOST: 1}
    assert books(broker) == ([], [], 0, 0)


@pytest.mark.parametrize("envelope", [[], [b"hop", b""], [b"1", b"2", b"3", b"4", b"5", b"6", b""]], ids=len)
@pytest.mark.parametrize(("later", "lost"), [(0, {}), (1, {Drop.WORKERS_LOST: 1})])
def test_what_did_not_reach_a_connection_is_told_by_its_turn(envelope, later, lost):  # C17
    broker = new_broker(max_attempts=1)
    turns.receive(broker, [b"w", *envelope, *ready()[1:]], now=0)
    assert turns.receive(broker, request(), now=0) == [[b"w", *envelope, *work()[1:]]]
    assert turns.unreachable(broker, b"w", broker.turn - 1 + later, now=0) == []
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


# ── clients that are gone ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("notice", ["unreachable", "gone"])
def test_what_a_gone_client_waits_for_is_dropped(notice):
    broker = new_broker()
    feed(broker, request(b"c"), request(b"d"), request(b"c"), request(b"c", service=b"sum"))
    if notice == "gone":
        assert turns.gone(broker, b"c", now=0) == []
    else:
        assert turns.unreachable(broker, b"c", broker.turn - 1, now=0) == []
    assert books(broker) == ([b"echo"], [], 1, 0)
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 3}
    assert feed(broker, ready(b"w"), ready(b"v", b"sum")) == [work()]


def test_a_worker_may_finish_for_a_gone_client():
    broker = broker_with(b"w")
    feed(broker, request(b"c"), request(b"d"))
    assert turns.gone(broker, b"c", now=0) == []
    assert turns.receive(broker, partial(), now=0) == []
    assert turns.receive(broker, final(), now=0) == [work(address=2)]
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 1}


def test_a_gone_clients_request_is_not_repeated():  # C17
    broker = broker_with(b"w1", b"w2")
    turns.receive(broker, request(), now=0)
    turns.gone(broker, b"c", now=0)
    assert turns.receive(broker, disconnect(b"w1"), now=0) == []
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 1}


def test_a_peer_nobody_knows_may_be_gone():
    broker = broker_with(b"w")
    assert turns.gone(broker, b"?", now=0) == []
    assert turns.unreachable(broker, b"?", broker.turn - 1, now=0) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0)


@pytest.mark.parametrize("others", [[], [b"v"]], ids=["alone", "with another worker"])
def test_a_gone_worker_that_was_its_own_client_leaves_nothing(others):
    broker = broker_with(b"w", *others)
    turns.receive(broker, request(b"w"), now=0)
    turns.gone(broker, b"w", now=0)
    assert (broker.registry.queued, list(broker.directory.workers)) == (0, others)
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 1}


# ── MMI ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_broker_answers_mmi_itself():  # C25, C26
    broker = broker_with(b"w")
    assert turns.receive(broker, request(body=b"echo", service=b"mmi.service"), now=0) == [
        answer(body=b"200", service=b"mmi.service")
    ]
    assert turns.receive(broker, request(body=b"sum", service=b"mmi.service"), now=0) == [
        answer(body=b"404", service=b"mmi.service")
    ]
    unknown = b"mmi.what"
    assert turns.receive(broker, request(service=unknown), now=0) == [answer(body=b"501", service=unknown)]
    assert books(broker) == ([b"echo"], [b"w"], 0, 0)
    assert broker.stats.mmi == 3


def test_mmi_is_answered_in_the_clients_dialect_behind_its_envelope():  # C22, C24, C26
    broker = broker_with(b"w")
    assert turns.receive(broker, [b"c", b"", b"MDPC01", b"mmi.service", b"echo"], now=0) == [
        [b"c", b"", b"MDPC01", b"mmi.service", b"200"]
    ]
    assert turns.receive(broker, [b"c", b"hop", b"", b"MDPC02", b"\x01", b"mmi.service", b"echo"], now=0) == [
        [b"c", b"hop", b"", b"MDPC02", b"\x03", b"mmi.service", b"200"]
    ]


@pytest.mark.parametrize("service", [b"mmi.service", b"mmi.", b"mmi.mine"])
def test_no_worker_may_register_mmi(service):  # C25
    broker = new_broker()
    assert turns.receive(broker, ready(service=service), now=0) == [disconnect()]
    assert books(broker) == ([], [], 0, 0)
    assert broker.stats.disconnected == {Refusal.RESERVED_NAME: 1}


@pytest.mark.parametrize("service", [b"mmi", b"xmmi.service", b"my.mmi.service", b"MMI.service", b"mmix"])
def test_only_names_that_begin_with_mmi_are_the_brokers(service):  # C25
    broker = new_broker()
    assert turns.receive(broker, ready(service=service), now=0) == []
    assert turns.receive(broker, request(service=service), now=0) == [work()]


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_that_wait_are_bounded():
    broker = broker_with(b"w", max_request_bytes=2 * (CLIENT + 3 * SIZE) - 1)
    feed(broker, *[request(body=b"1234")] * 3)
    assert broker.registry.request_bytes == CLIENT + 3 * SIZE
    feed(broker, request(), request(service=b"sum"))
    assert broker.stats.dropped == {Drop.MEMORY_FULL: 2}
    assert books(broker) == ([b"echo"], [b"w"], 2, 1)


def test_a_request_that_a_worker_holds_takes_memory_too():  # C40
    broker = broker_with(b"w1", b"w2", max_request_bytes=2 * (CLIENT + SIZE))
    assert turns.receive(broker, request(body=b"1234"), now=0) == [work(b"w1", body=b"1234")]
    assert turns.receive(broker, request(body=b"1234"), now=0) == []
    assert broker.stats.dropped == {Drop.MEMORY_FULL: 1}
    turns.receive(broker, final(b"w1"), now=0)
    assert broker.registry.request_bytes == 0
    assert turns.receive(broker, request(body=b"1234"), now=0) == [work(b"w2", 2, body=b"1234")]


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


def test_a_request_that_came_back_is_kept_whatever_waits():  # C17
    broker = broker_with(b"w1", max_queue=1)
    feed(broker, request(body=b"1"), request(body=b"2"), disconnect(b"w1"))
    assert broker.registry.queued == 2
    assert turns.receive(broker, ready(b"w2"), now=0) == [work(b"w2", 2, b"1")]


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


def test_a_worker_that_becomes_free_in_a_turn_takes_the_next_request_of_that_turn():
    broker = broker_with(b"w")
    feed(broker, request(b"c"))
    assert turn(broker, request(b"d"), final(), request(b"e")) == [answer(b"c"), work(address=2)]


@pytest.mark.parametrize(
    "last", [disconnect(b"w1"), ready(b"w1"), final(b"w1", 999)], ids=["DISCONNECT", "READY", "FINAL"]
)
def test_what_came_back_goes_before_what_arrived_in_the_turn(last):  # C17
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"c", b"old"))
    sent = turn(broker, request(b"d", b"1"), request(b"e", b"2"), last)
    assert [message for message in sent if message[0] != b"w1"] == [work(b"w2", 2, b"old")]
    assert feed(broker, final(b"w2", 2)) == [answer(b"c"), work(b"w2", 3, b"1")]


def test_a_worker_that_leaves_in_the_turn_gets_nothing_of_it():  # C16
    broker = broker_with(b"w1", b"w2")
    assert turn(broker, request(b"c"), request(b"d"), disconnect(b"w1")) == [work(b"w2")]
    assert broker.registry.queued == 1


def test_what_arrived_in_the_turn_is_bounded_by_the_queue_and_the_credit():
    broker = broker_with(b"w1", b"w2", max_queue=2)
    sent = turn(broker, *[request(body=b"%d" % n) for n in range(6)])
    assert sent == [work(b"w1", 1, b"0"), work(b"w2", 2, b"1")]
    assert broker.registry.queued == 2
    assert broker.stats.dropped == {Drop.QUEUE_FULL: 2}


def test_a_client_that_is_gone_takes_along_what_it_sent_in_the_turn():
    broker = broker_with(b"w")
    broker.receive(request(b"c"), 0)
    assert turns.gone(broker, b"c", 0) == []
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 1}
    assert books(broker) == ([b"echo"], [b"w"], 0, 0)


def test_what_arrived_before_the_end_of_the_turn_is_told_by_mmi():  # C26
    broker = broker_with(b"w")
    sent = turn(broker, request(), request(service=b"mmi.service", body=b"echo"))
    assert sent == [answer(service=b"mmi.service", body=b"200"), work()]


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


def test_turns_are_counted():
    broker = new_broker()
    for number in range(3):
        broker.receive(ready(), 0)
        broker.tick(0)
        broker.gone(b"?", 0)
        assert broker.turn == number
        broker.take_messages()


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_probe_is_a_heartbeat_to_a_worker():
    broker = broker_with(b"w", heartbeat=1)
    assert turns.probe(broker, b"w", now=0.5) == [heartbeat()]
    assert turns.tick(broker, 1.06) == []  # it was sent one in this interval
    assert turns.tick(broker, 1.56) == [heartbeat()]


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


def test_a_draining_broker_sends_idle_workers_and_new_ones_away():  # C9
    broker = broker_with(b"w1", b"w2")
    old = [b"old", b"", b"MDPW01", b"\x01", b"sum"]
    feed(broker, old, request(b"c"))
    told = [b"old", b"", b"MDPW01", b"\x05"]
    assert turns.drain(broker, 0) == [disconnect(b"w2"), told]
    assert feed(broker, ready(b"w3"), old) == []  # they would reconnect at once, again and again
    assert turns.receive(broker, final(b"w1"), now=1) == [answer(b"c"), disconnect(b"w1")]
    assert turns.tick(broker, 0.9) == []
    assert turns.tick(broker, 1.1) == [disconnect(b"w3"), told]
    assert books(broker) == ([], [], 0, 0)


def test_a_draining_broker_answers_mmi():  # C25
    broker = broker_with(b"w")
    turns.receive(broker, request(), now=0)
    turns.drain(broker, 0)
    assert turns.receive(broker, request(body=b"echo", service=b"mmi.service"), now=0) == [
        answer(body=b"200", service=b"mmi.service")
    ]


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
    turns.gone(broker, b"c", now=0)
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
