"""The broker's machine with X1 peers: numbers, options, ERROR, CANCEL, client heartbeats.

What all dialects share is in `test_broker`; what a worker with credit does, in `test_broker_credit`; the batched form,
in `test_broker_batched`.
"""

import json
import logging

import pytest

from zmdp.mdp import wire
from zmdp.mdp.access import Permissions
from zmdp.mdp.broker.drops import REPORTS, Drop
from zmdp.mdp.broker.given_up import GIVEN_UP, MAX_GIVEN_UP
from zmdp.mdp.broker.journal import Loss, Refusal
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.broker.registry import CLIENT_OVERHEAD, FRAME_OVERHEAD, REMEMBERED, REQUEST_OVERHEAD
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import batch

# ── what peers send ──────────────────────────────────────────────────────────────────────────────────────────────────


def request(number=b"1", *, client=b"c", service=b"echo", body=b"x", **options):
    return [client, number, b"", b"MDPCX1", b"\x01", service, json.dumps(options).encode() if options else b"", body]


def cancel(number=b"1", *, client=b"c", service=b"echo"):
    return [client, number, b"", b"MDPCX1", b"\x05", service]


def ready(worker=b"w", service=b"echo"):
    return [worker, b"MDPWX1", b"\x01", service]


def partial(worker=b"w", address=1, body=b"x"):
    return [worker, b"MDPWX1", b"\x03", b"%d" % address, b"", body]


def final(worker=b"w", address=1, body=b"x"):
    return [worker, b"MDPWX1", b"\x04", b"%d" % address, b"", body]


def failure(worker=b"w", address=1, code=b"500", text=b"it broke", *detail):
    return [worker, b"MDPWX1", b"\x07", b"%d" % address, b"", code, text, *detail]


OLD_READY = {"0.2": [b"w", b"MDPW02", b"\x01", b"echo"], "0.1": [b"w", b"", b"MDPW01", b"\x01", b"echo"]}
OLD_FINAL = {
    "0.2": [b"w", b"MDPW02", b"\x04", b"1", b"", b"x"],
    "0.1": [b"w", b"", b"MDPW01", b"\x03", b"1", b"", b"x"],
}

# ── what the broker sends ────────────────────────────────────────────────────────────────────────────────────────────


def work(worker=b"w", address=1, body=b"x", options=b""):
    return [worker, b"MDPWX1", b"\x02", b"%d" % address, b"", options, body]


def withdraw(worker=b"w", address=1):
    return [worker, b"MDPWX1", b"\x08", b"%d" % address, b""]


def disconnect(worker=b"w"):
    return [worker, b"MDPWX1", b"\x06"]


def heartbeat(worker=b"w"):
    return [worker, b"MDPWX1", b"\x05"]


def part(number=b"1", body=b"x", *, client=b"c", service=b"echo"):
    return [client, number, b"", b"MDPCX1", b"\x02", service, body]


def answer(number=b"1", body=b"x", *, client=b"c", service=b"echo"):
    return [client, number, b"", b"MDPCX1", b"\x03", service, body]


def error(code, text, number=b"1", *, client=b"c", service=b"echo", detail=()):
    return [client, number, b"", b"MDPCX1", b"\x04", service, b"%d" % code, text.encode(), *detail]


FREE = "its time passed before a worker was free for it: 1 offer it"
BUSY = "its time passed before a worker was free for it: 1 offer it, all busy"
NOBODY = "its time passed before a worker was free for it: none offers it"
RUNNING = "its time passed while a worker held it"
NO_WORKER = "no worker offers the service"
LAST_WORKER_LOST = "its worker was lost, no other worker offers the service, and wait is false"
DRAINING = "the broker is draining and takes no new requests: retry later, or at another broker"
CLOSING = "the broker shut down before the request was done: retry later, or at another broker"


def new_broker(**limits):
    """A broker at time 0 whose dispatches have the addresses 1, 2, 3 …"""
    return Broker(Limits(**limits), now=0, first_address=1)


def broker_with(*workers, **limits):
    """A broker, and X1 workers of echo that have said READY to it in this order; each holds one request at most."""
    broker = new_broker(**limits)
    assert feed(broker, *map(ready, workers)) == []
    return broker


def feed(broker, *messages, now=0):
    """All that the broker sends for `messages`, each in a turn of its own."""
    return [sent for message in messages for sent in broker.receive(message, now)]


def turn(broker, *messages, now=0):
    """All that the broker sends for `messages` that arrive in one turn."""
    for message in messages:
        broker.take(message, now)
    return broker.flush(now)


def books(broker):
    """What the broker holds: (services, workers, requests that wait, requests that workers hold, X1 requests)."""
    registry = broker.registry
    numbers = sorted(str(request.number) for request in registry.numbered)
    return list(registry.services), list(registry.workers), registry.queued, registry.running, numbers


def holds_nothing(broker):
    """Whether nothing at all is kept of the requests there were."""
    registry = broker.registry
    kept = registry.numbered, registry.queued, registry.request_bytes, registry.running, registry.clients
    return not any([*kept, len(broker.registry.expiries), broker.registry.expiries.next_due()])


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reply_goes_to_its_number():
    broker = broker_with(b"w")
    assert broker.receive(request(b"7"), now=0) == [work()]
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, ["7"])
    assert broker.receive(partial(body=b"1"), now=0) == [part(b"7", b"1")]
    assert broker.receive(final(body=b"2"), now=0) == [answer(b"7", b"2")]
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])
    assert holds_nothing(broker)


def test_an_envelope_stands_before_the_number():  # C22
    broker = broker_with(b"w")
    envelope = [b"proxy", b"\xff" * 255, b"7", b""]
    assert broker.receive([b"c", *envelope, *request()[3:]], now=0) == [work()]
    assert broker.receive(final(), now=0) == [[b"c", *envelope, *answer()[3:]]]


def test_a_number_is_any_frame():
    broker = broker_with(b"w1", b"w2", b"w3", b"w4")
    numbers = [b"17", b"017", b"x", b"%d" % (1 << 64)]
    assert len(feed(broker, *map(request, numbers))) == 4
    assert feed(broker, *[final(b"w%d" % n, n) for n in range(1, 5)]) == list(map(answer, numbers))
    assert holds_nothing(broker)


def test_requests_of_one_client_run_at_the_same_time():
    broker = broker_with(b"w1", b"w2", b"w3")
    asked = [request(b"1", body=b"a"), request(b"2", body=b"b"), request(b"3", body=b"c"), request(b"4", body=b"d")]
    assert feed(broker, *asked) == [work(b"w1", 1, b"a"), work(b"w2", 2, b"b"), work(b"w3", 3, b"c")]
    assert broker.receive(partial(b"w3", 3, b"3.1"), now=0) == [part(b"3", b"3.1")]
    assert broker.receive(partial(b"w1", 1, b"1.1"), now=0) == [part(b"1", b"1.1")]
    assert broker.receive(final(b"w2", 2, b"2.1"), now=0) == [answer(b"2", b"2.1"), work(b"w2", 4, b"d")]
    assert broker.receive(failure(b"w3", 3), now=0) == [error(500, "it broke", b"3")]
    assert broker.receive(final(b"w2", 4, b"4.1"), now=0) == [answer(b"4", b"4.1")]
    assert broker.receive(final(b"w1", 1, b"1.2"), now=0) == [answer(b"1", b"1.2")]
    assert holds_nothing(broker)


def test_two_clients_may_use_the_same_number():
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(client=b"c"), request(client=b"d"))
    assert broker.receive(cancel(client=b"c"), now=0) == [error(499, "cancelled"), withdraw(b"w1")]
    assert broker.receive(final(b"w2", 2), now=0) == [answer(client=b"d")]


@pytest.mark.parametrize("workers", [[b"w"], []], ids=["running", "waiting"])
def test_a_number_that_is_outstanding_is_refused_and_the_first_request_goes_on(workers):
    broker = broker_with(*workers)
    feed(broker, request())
    before = books(broker)
    assert broker.receive(request(body=b"second"), now=0) == [error(400, "malformed: number-in-use")]
    assert broker.receive(request(service=b"mmi.service"), now=0) == [
        error(400, "malformed: number-in-use", service=b"mmi.service")
    ]
    assert books(broker) == before
    assert broker.stats.invalid == {"number-in-use": 2}
    feed(broker, *[ready(b"w")] * (not workers))
    assert broker.receive(final(body=b"first"), now=0) == [answer(body=b"first")]


ENDS = {
    "FINAL": lambda broker: broker.receive(final(), now=0),
    "ERROR": lambda broker: broker.receive(failure(), now=0),
    "CANCEL": lambda broker: broker.receive(cancel(), now=0) + broker.receive(final(), now=0),
    "ttl": lambda broker: broker.tick(1.1) + broker.receive(final(), now=1.1),
    "worker lost": lambda broker: feed(broker, partial(), ready(), ready()),
    "reply too large": lambda broker: feed(broker, partial(body=b"x" * 1000), final()),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_number_is_free_again_after_its_end(end):
    broker = broker_with(b"w", max_message=500, heartbeat=10)
    feed(broker, request(ttl=1000))
    end(broker)
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])
    assert holds_nothing(broker)
    assert feed(broker, request(body=b"again"), final(b"w", 2, b"2"), now=2) == [
        work(b"w", 2, b"again"), answer(body=b"2"),
    ]  # fmt: skip
    assert broker.stats.invalid.get("number-in-use", 0) == 0


def test_a_number_that_was_refused_is_free():
    broker = broker_with(max_queue=1)
    feed(broker, request(b"1"), request(b"2"))
    assert books(broker) == ([b"echo"], [], 1, 0, ["1"])
    assert feed(broker, cancel(b"1"), request(b"2")) == [error(499, "cancelled")]
    assert books(broker) == ([b"echo"], [], 1, 0, ["2"])


@pytest.mark.parametrize("others", [0, REMEMBERED - 1, REMEMBERED])
def test_numbers_that_ended_are_remembered_for_a_while(others):
    broker = broker_with(b"w")
    feed(broker, request(b"first"), final())
    for number in range(others):
        feed(broker, request(b"%d" % number), final(address=number + 2))
    assert broker.receive(cancel(b"first"), now=0) == []
    assert broker.stats.invalid == {}


def test_numbers_that_ended_are_not_remembered_for_ever():
    broker = broker_with(b"w")
    feed(broker, request(b"first"), final())
    for number in range(3 * REMEMBERED):
        feed(broker, request(b"%d" % number), final(address=number + 2))
        registry = broker.registry
        assert len(registry._ended) + len(registry._ended_before) <= 2 * REMEMBERED
    assert broker.receive(cancel(b"first"), now=0) == [error(400, "malformed: unknown-number", b"first")]


# ── malformed ────────────────────────────────────────────────────────────────────────────────────────────────────────

MALFORMED = {
    "no options": ([b"1", b"", b"MDPCX1", b"\x01", b"echo"], "too-few-frames", b"echo"),
    "no body": ([b"1", b"", b"MDPCX1", b"\x01", b"echo", b""], "no-body", b"echo"),  # C19
    "bad options": ([b"1", b"", b"MDPCX1", b"\x01", b"echo", b"[]", b"x"], "bad-options", b"echo"),
    "bad service": ([b"1", b"", b"MDPCX1", b"\x01", b"\n", b"", b"x"], "bad-service-name", b""),
    "bad command": ([b"1", b"", b"MDPCX1", b"\x03", b"echo", b"x"], "unknown-command", b""),
    "CANCEL with more": ([b"1", b"", b"MDPCX1", b"\x05", b"echo", b"x"], "too-many-frames", b"echo"),
}


@pytest.mark.parametrize(("frames", "reason", "service"), MALFORMED.values(), ids=MALFORMED)
def test_a_client_is_told_what_is_malformed(frames, reason, service):  # C15
    broker = broker_with(b"w")
    before = books(broker)
    assert broker.receive([b"c", *frames], now=0) == [error(400, f"malformed: {reason}", service=service)]
    assert books(broker) == before
    assert broker.stats.invalid == {reason: 1}


@pytest.mark.parametrize("command", [[b"\x01", b"echo", b"", b"x"], [b"\x05", b"echo"], [b"\x0c"]])
def test_without_an_envelope_nobody_can_be_told(command):  # C15
    broker = broker_with(b"w")
    assert broker.receive([b"c", b"MDPCX1", *command], now=0) == []
    assert broker.stats.invalid.total() == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [([*request(), b"x" * 1000], "too-large"), ([*request(), *[b""] * 10], "too-many-frames")],
    ids=["bytes", "frames"],
)
def test_a_client_is_told_that_its_request_is_over_the_limits(message, reason):  # C15
    broker = broker_with(b"w", max_message=1000, max_frames=12)
    assert broker.receive(message, now=0) == [error(413, "a message may have up to 1000 bytes in 12 frames")]
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])
    assert broker.stats.invalid == {reason: 1}


# ── ttl ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_whose_time_passes_while_it_waits_is_never_handed_to_a_worker():
    broker = broker_with()
    assert broker.receive(request(ttl=1000), now=0) == []
    assert broker.deadline() == pytest.approx(1, abs=0.011)
    assert broker.tick(0.99) == []
    assert broker.tick(1.011) == [error(408, NOBODY)]
    assert broker.stats.dropped == {Drop.TTL_PASSED: 1}
    assert books(broker) == ([], [], 0, 0, [])
    assert holds_nothing(broker)
    assert broker.receive(ready(), now=2) == []


def test_a_request_whose_time_passes_while_all_workers_are_busy():
    broker = broker_with(b"w")
    feed(broker, request(b"1"), request(b"2", ttl=500))
    assert broker.tick(0.52) == [error(408, BUSY, b"2")]
    assert broker.receive(final(), now=0.6) == [answer(b"1")]
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


def test_a_request_whose_time_passes_while_a_worker_is_at_it():
    broker = broker_with(b"w", heartbeat=10)
    assert broker.receive(request(ttl=1000), now=0) == [work(options=b'{"ttl": 1000}')]
    assert broker.tick(0.99) == []
    assert broker.tick(1.011) == [error(408, RUNNING), withdraw()]
    assert broker.stats.dropped == {Drop.TTL_PASSED: 1}
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, [])
    # the worker has not noticed yet, and answers all the same: that is dropped, and it is free
    assert feed(broker, partial(), final(), now=1.1) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])
    assert holds_nothing(broker)
    assert broker.stats.dropped == {Drop.TTL_PASSED: 1}


@pytest.mark.parametrize("protocol", OLD_READY)
def test_an_old_worker_is_not_told_that_the_time_passed(protocol):
    broker = broker_with(heartbeat=10)
    feed(broker, OLD_READY[protocol], request(ttl=1000))
    assert broker.tick(1.011) == [error(408, RUNNING)]
    assert broker.receive(OLD_FINAL[protocol], now=1.1) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


def test_a_reply_in_time_clears_the_clock():
    broker = broker_with(b"w", heartbeat=10)
    feed(broker, request(ttl=1000))
    assert broker.receive(final(), now=0.9) == [answer()]
    assert holds_nothing(broker)
    assert broker.tick(5) == []


def test_partials_do_not_lengthen_the_time():
    broker = broker_with(b"w", heartbeat=10)
    feed(broker, request(ttl=1000))
    assert broker.receive(partial(), now=0.9) == [part()]
    assert broker.tick(1.011) == [error(408, RUNNING), withdraw()]


@pytest.mark.parametrize(
    ("workers", "text"),
    [([], NOBODY), ([b"w"], FREE)],
    ids=["no worker", "an idle worker"],
)
def test_a_request_without_time_is_refused(workers, text):
    broker = broker_with(*workers)
    assert broker.receive(request(ttl=0), now=5) == [error(408, text)]
    assert books(broker)[2:] == (0, 0, [])
    assert holds_nothing(broker)


def test_a_worker_that_is_free_in_the_instant_in_which_the_time_passes_does_not_get_it():
    broker = broker_with(b"w")
    feed(broker, request(b"1"), request(b"2", ttl=1000), request(b"3", ttl=900), request(b"4", body=b"last"))
    assert broker.receive(final(), now=1) == [
        answer(b"1"), error(408, FREE, b"2"), error(408, FREE, b"3"), work(b"w", 2, b"last"),
    ]  # fmt: skip
    assert broker.stats.dropped == {Drop.TTL_PASSED: 2}
    assert feed(broker, final(address=2), now=1) == [answer(b"4")]
    assert holds_nothing(broker)


def test_a_worker_that_comes_in_the_instant_in_which_the_time_passes_is_idle():
    broker = broker_with()
    feed(broker, request(ttl=1000))
    assert broker.receive(ready(), now=1) == [error(408, FREE)]
    assert broker.registry.services[b"echo"].schedule.capacity == 1
    assert holds_nothing(broker)


def test_a_ttl_that_is_longer_than_the_expiry_does_not_lengthen_it():  # C12
    broker = broker_with(expiry=10)
    feed(broker, request(ttl=60_000))
    assert broker.tick(9.9) == []
    text = "the broker's expiry of 10 s passed before a worker was free for it: none offers it"
    assert broker.tick(10.02) == [error(408, text)]
    assert broker.stats.dropped == {Drop.EXPIRED: 1}
    assert holds_nothing(broker)


def test_a_ttl_that_is_longer_than_the_expiry_counts_once_a_worker_has_the_request():  # C12
    broker = broker_with(b"w", expiry=10, heartbeat=100)
    feed(broker, request(ttl=60_000))
    assert broker.tick(59) == []
    assert broker.tick(60.02) == [error(408, RUNNING), withdraw()]


def test_a_request_that_comes_back_after_its_time_is_not_repeated():  # C17
    broker = broker_with(b"w1", b"w2", heartbeat=1)
    feed(broker, request(ttl=1000))
    assert broker.gone(b"w1", now=1) == [error(408, FREE)]
    assert broker.stats.dropped == {Drop.TTL_PASSED: 1}
    assert holds_nothing(broker)


def test_times_that_are_far_off_leave_nothing_behind():
    broker = broker_with(b"w")
    for number in range(2000):
        feed(broker, request(ttl=10_000_000 + 1000 * number), final(address=number + 1))
    assert holds_nothing(broker)
    assert len(broker.registry.expiries._order) < 200


# ── what the worker is told ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_options_reach_a_free_worker_unchanged():
    broker = broker_with(b"w")
    options = b' {"ttl": 5000, "key":"\xc3\xa4", "key":"b", "wait":false}'
    assert broker.receive([*request()[:6], options, b"x"], now=0) == [work(options=options)]


def test_the_options_reach_a_worker_unchanged_if_there_is_no_ttl():
    broker = broker_with()
    feed(broker, request(key=1, headers={"a": "b"}))
    assert broker.receive(ready(), now=9) == [work(options=b'{"key": 1, "headers": {"a": "b"}}')]


def test_a_worker_is_told_what_is_left_of_the_ttl():
    broker = broker_with(heartbeat=10)
    feed(broker, request(ttl=5000, key=1))
    assert broker.receive(ready(), now=1.5) == [work(options=b'{"ttl":3500,"key":1}')]
    assert broker.tick(4.99) == []
    assert broker.tick(5.02) == [error(408, RUNNING), withdraw()]


def test_the_next_worker_is_told_that_it_is_the_second():  # C17
    broker = broker_with(b"w1", b"w2", b"w3", heartbeat=10)
    feed(broker, request(b"1", ttl=5000, key=1))
    assert broker.gone(b"w1", now=1) == [work(b"w2", 2, options=b'{"ttl":4000,"key":1,"attempt":2}')]
    assert broker.gone(b"w2", now=2) == [work(b"w3", 3, options=b'{"ttl":3000,"key":1,"attempt":3}')]
    assert broker.tick(5.02) == [error(408, RUNNING), withdraw(b"w3", 3)]


@pytest.mark.parametrize(
    "asked", [request(), [b"c", b"MDPC02", b"\x01", b"echo", b"x"], [b"c", b"", b"MDPC01", b"echo", b"x"]]
)
def test_the_next_worker_is_told_so_whoever_the_client_is(asked):  # C17
    broker = broker_with(b"w1", b"w2")
    assert broker.receive(asked, now=0) == [work(b"w1")]
    assert broker.gone(b"w1", now=0) == [work(b"w2", 2, options=b'{"attempt":2}')]


def test_a_worker_that_the_request_did_not_reach_is_not_counted():  # C17
    broker = broker_with(b"w1", b"w2", b"w3")
    feed(broker, request())
    assert broker.unreachable(b"w1", broker.turn - 1, now=0) == [work(b"w2", 2)]
    assert broker.gone(b"w2", now=0) == [work(b"w3", 3, options=b'{"attempt":2}')]


def test_an_old_worker_is_told_nothing_of_options():
    broker = broker_with()
    feed(broker, request(ttl=5000, key=1))
    assert broker.receive(OLD_READY["0.2"], now=1) == [[b"w", b"MDPW02", b"\x02", b"1", b"", b"x"]]


def test_options_that_are_as_deep_as_can_be_reach_a_worker_late():
    broker = broker_with()
    deep = b'{"ttl":5000,"a":' + b"[" * 63 + b"]" * 63 + b"}"
    assert broker.receive([*request()[:6], deep, b"x"], now=0) == []
    assert broker.receive(ready(), now=1) == [work(options=deep.replace(b"5000", b"4000"))]


# ── wait: false ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("others", [[], [request(b"other", client=b"d")]], ids=["unknown", "only asked for"])
def test_who_does_not_wait_is_told_at_once_that_nobody_is_there(others):
    broker = broker_with(b"w")
    feed(broker, disconnect(), *others)
    before = books(broker)
    assert broker.receive(request(wait=False), now=0) == [error(404, NO_WORKER)]
    assert books(broker) == before
    assert broker.stats.dropped == {Drop.NO_WORKER: 1}


def test_who_does_not_wait_gets_a_free_worker():
    broker = broker_with(b"w")
    assert broker.receive(request(wait=False), now=0) == [work(options=b'{"wait": false}')]


def test_who_does_not_wait_waits_while_workers_are_busy():
    broker = broker_with(b"w")
    assert feed(broker, request(b"1"), request(b"2", wait=False)) == [work()]
    assert broker.receive(final(), now=0) == [answer(b"1"), work(address=2, options=b'{"wait": false}')]
    assert broker.receive(final(address=2), now=0) == [answer(b"2")]
    assert broker.registry.services[b"echo"].no_wait == {}


def falls_silent(broker):
    return [message for message in broker.tick(5.1) if message != heartbeat()]


LOSES = {
    "silent": falls_silent,
    "gone": lambda broker: broker.gone(b"w", now=5),
    "refused": lambda broker: broker.receive(ready(), now=5)[1:],
}
LEAVES = {"DISCONNECT": lambda broker: broker.receive(disconnect(), now=5), **LOSES}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_who_does_not_wait_is_told_when_the_last_worker_leaves(leave):
    broker = broker_with(b"w")
    feed(broker, request(b"1"), request(b"2", wait=False), request(b"3"), request(b"4", wait=False, client=b"d"))
    assert leave(broker) == [error(404, NO_WORKER, b"2"), error(404, NO_WORKER, b"4", client=b"d")]
    assert [each.number for each in broker.registry.numbered] == [1, 3]
    assert broker.stats.dropped == {Drop.NO_WORKER: 2}
    assert broker.registry.services[b"echo"].no_wait == {}


def test_who_does_not_wait_waits_as_long_as_any_worker_is_there():
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"1", client=b"d"), request(b"2", client=b"d"), request(b"3", wait=False))
    assert broker.gone(b"w1", now=0) == []
    assert broker.receive(final(b"w2", 2), now=0) == [
        answer(b"2", client=b"d"), work(b"w2", 3, options=b'{"attempt":2}'),
    ]  # fmt: skip
    assert broker.gone(b"w2", now=0) == [error(404, NO_WORKER, b"3")]


@pytest.mark.parametrize("leave", LOSES.values(), ids=LOSES)
def test_who_does_not_wait_is_told_when_its_own_worker_was_the_last(leave):
    broker = broker_with(b"w")
    feed(broker, request(wait=False))
    assert leave(broker) == [error(502, LAST_WORKER_LOST)]
    assert books(broker) == ([], [], 0, 0, [])
    assert broker.stats.dropped == {Drop.WORKERS_LOST: 1}
    assert holds_nothing(broker)


def test_who_does_not_wait_goes_to_another_worker_or_waits_for_it():  # C17
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"1", wait=False, body=b"1"), request(b"2", client=b"d"))
    assert broker.gone(b"w1", now=0) == []
    assert books(broker) == ([b"echo"], [b"w2"], 1, 1, ["1", "2"])
    told = work(b"w2", 3, b"1", options=b'{"wait":false,"attempt":2}')
    assert broker.receive(final(b"w2", 2), now=0) == [answer(b"2", client=b"d"), told]


def test_who_does_not_wait_is_not_told_that_nobody_is_there_if_somebody_had_begun():
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"1", wait=False), request(b"2", client=b"d"), request(b"3", wait=False))
    broker.gone(b"w1", now=0)
    assert books(broker) == ([b"echo"], [b"w2"], 2, 1, ["1", "2", "3"])
    assert broker.gone(b"w2", now=0) == [
        error(404, NO_WORKER, b"3"),
        error(502, LAST_WORKER_LOST, b"1"),
    ]
    assert broker.stats.dropped == {Drop.NO_WORKER: 1, Drop.WORKERS_LOST: 1}


def test_all_workers_die_together():
    broker = broker_with(b"w1", b"w2", heartbeat=1, liveness=3)
    feed(broker, request(b"1", wait=False), request(b"2"), request(b"3", wait=False))
    assert broker.tick(100) == [
        error(404, NO_WORKER, b"3"),
        error(502, LAST_WORKER_LOST, b"1"),
    ]
    assert books(broker) == ([b"echo"], [], 1, 0, ["2"])


# ── CANCEL ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_waits_can_be_cancelled():
    broker = broker_with()
    feed(broker, request(b"1"), request(b"2", ttl=5000), request(b"3"))
    assert broker.receive(cancel(b"2"), now=0) == [error(499, "cancelled", b"2")]
    assert books(broker) == ([b"echo"], [], 2, 0, ["1", "3"])
    assert broker.stats.dropped == {Drop.CANCELLED: 1}
    assert feed(broker, cancel(b"1"), cancel(b"3")) == [error(499, "cancelled", b"1"), error(499, "cancelled", b"3")]
    assert books(broker) == ([], [], 0, 0, [])
    assert holds_nothing(broker)
    assert broker.deadline() is None


def test_a_request_that_runs_can_be_cancelled():
    broker = broker_with(b"w")
    feed(broker, request(b"1", ttl=5000), request(b"2", body=b"next"), partial())
    assert broker.receive(cancel(b"1"), now=0) == [error(499, "cancelled"), withdraw()]
    assert books(broker) == ([b"echo"], [b"w"], 0 + 1, 1, ["2"])
    assert broker.receive(partial(), now=0) == []
    assert broker.receive(final(), now=0) == [work(b"w", 2, b"next")]
    assert broker.receive(final(address=2), now=0) == [answer(b"2")]
    assert broker.stats.dropped == {Drop.CANCELLED: 1}
    assert holds_nothing(broker)


def test_a_cancelled_request_may_end_in_a_workers_error():
    broker = broker_with(b"w")
    feed(broker, request(), cancel())
    assert broker.receive(failure(code=b"499"), now=0) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])
    assert broker.stats.errors == 1


def test_a_cancelled_request_is_not_repeated():  # C17
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(), cancel())
    assert broker.gone(b"w1", now=0) == []
    assert holds_nothing(broker)


@pytest.mark.parametrize("protocol", OLD_READY)
def test_an_old_worker_is_not_told_of_a_cancel_and_its_reply_is_dropped(protocol):
    broker = broker_with()
    feed(broker, OLD_READY[protocol], request())
    assert broker.receive(cancel(), now=0) == [error(499, "cancelled")]
    assert broker.receive(OLD_FINAL[protocol], now=0) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


def test_a_cancel_to_a_worker_stands_for_a_heartbeat():  # C13
    broker = broker_with(b"w", heartbeat=1)
    broker.receive(request(), now=0)
    broker.receive(cancel(), now=0.9)
    assert broker.tick(1.8) == []
    assert broker.tick(1.96) == [heartbeat()]


def test_the_number_of_a_cancelled_request_is_free_while_its_worker_still_works():
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(), cancel())
    assert broker.receive(request(body=b"again"), now=0) == [work(b"w2", 2, b"again")]
    assert broker.receive(final(b"w1", 1, b"old"), now=0) == []
    assert broker.receive(cancel(), now=0) == [error(499, "cancelled"), withdraw(b"w2", 2)]
    assert broker.receive(final(b"w2", 2, b"new"), now=0) == []


def test_a_cancel_of_what_never_was():
    broker = broker_with(b"w")
    assert broker.receive(cancel(), now=0) == [error(400, "malformed: unknown-number")]
    assert broker.stats.invalid == {"unknown-number": 1}


@pytest.mark.parametrize("workers", [[b"w"], []], ids=["running", "waiting"])
def test_a_cancel_that_names_another_service(workers):
    broker = broker_with(*workers)
    feed(broker, request())
    before = books(broker)
    assert broker.receive(cancel(service=b"sum"), now=0) == [error(400, "malformed: unknown-number", service=b"sum")]
    assert books(broker) == before


@pytest.mark.parametrize("another", [cancel(b"2"), cancel(client=b"d"), [b"c", b"hop", *cancel()[1:]]])
def test_a_cancel_of_another_number_or_by_another_client(another):
    broker = broker_with(b"w")
    feed(broker, request())
    ((*route, code, _),) = broker.receive(another, now=0)
    assert (route, code) == ([*another[:-2], b"\x04", b"echo"], b"400")
    assert broker.receive(final(), now=0) == [answer()]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_cancel_that_comes_too_late_is_passed_over(end):
    broker = broker_with(b"w", max_message=500, heartbeat=10)
    feed(broker, request(ttl=1000))
    end(broker)
    assert broker.receive(cancel(), now=2) == []
    assert broker.stats.invalid.get("unknown-number", 0) == 0


def test_a_cancel_of_what_the_broker_has_answered_itself():
    broker = broker_with(b"w")
    assert broker.receive(request(service=b"mmi.service", body=b"echo"), now=0) == [
        answer(body=b"200", service=b"mmi.service")
    ]
    assert broker.receive(cancel(service=b"mmi.service"), now=0) == []


def test_a_cancel_does_not_touch_the_requests_beside_it():  # C20
    broker = broker_with()
    feed(broker, *[request(b"%d" % n, body=b"%d" % n) for n in range(5)], request(b"9", client=b"d", body=b"9"))
    feed(broker, cancel(b"0"), cancel(b"2"), cancel(b"4"))
    sent = feed(broker, ready(), final(address=1), final(address=2), final(address=3))
    assert sent == [
        work(b"w", 1, b"1"), answer(b"1"), work(b"w", 2, b"9"), answer(b"9", client=b"d"), work(b"w", 3, b"3"),
        answer(b"3"),
    ]  # fmt: skip
    assert holds_nothing(broker)


# ── why a request is dropped ─────────────────────────────────────────────────────────────────────────────────────────


def two_limits(**limits):
    """A broker without workers that has taken a request for `other`."""
    broker = broker_with(**limits)
    broker.receive(request(b"other", client=b"d", service=b"other"), now=0)
    return broker


CHARGED = CLIENT_OVERHEAD + REQUEST_OVERHEAD + FRAME_OVERHEAD + 1
"""The bytes charged for a client with a request."""


def expired():
    broker = broker_with(expiry=10)
    feed(broker, request())
    return broker, broker.tick(11)


def ttl_passed():
    broker = broker_with(b"w", heartbeat=10)
    feed(broker, request(ttl=100))
    return broker, broker.tick(1)[:1]


def queue_full():
    broker = broker_with(max_queue=1)
    return broker, feed(broker, request(b"0"), request())


def memory_full():
    broker = broker_with(max_request_bytes=CHARGED - 1)
    return broker, feed(broker, request())


def too_many_services():
    broker = two_limits(max_services=1)
    return broker, feed(broker, request())


def draining():
    broker = broker_with(b"w")
    broker.drain(0)
    return broker, feed(broker, request())


def closing():
    broker = broker_with()
    feed(broker, request())
    return broker, broker.close(0)


def workers_lost():
    broker = broker_with(b"w1", b"w2", max_attempts=2)
    feed(broker, request())
    return broker, broker.gone(b"w1", now=0)[1:] + broker.gone(b"w2", now=0)


def lost_after_partial():
    broker = broker_with(b"w")
    feed(broker, request(), partial())
    return broker, broker.gone(b"w", now=0)


def reply_too_large():
    broker = broker_with(b"w", max_message=500)
    return broker, feed(broker, request(), partial(body=b"x" * 500))[1:2]


def too_many_unserved():
    broker = broker_with(max_unserved=1)
    return broker, feed(broker, request(b"0", service=b"other"), request())


def not_allowed():
    return limited(request(), call=("other",))


def not_on_behalf():
    return limited(request(on_behalf="shop"), call=("*",))


def user_not_allowed():
    return limited(request(on_behalf="nobody"), call=("*",), on_behalf=True)


def role_outstanding():
    return limited(request(b"0"), request(), call=("*",), outstanding=1)


def role_queued():
    return limited(request(b"0"), request(), call=("*",), queued_requests=1)


def role_memory_full():
    return limited(request(), call=("*",), request_bytes=1000)


def limited(*messages, **permissions):
    """A broker that has been sent `messages` by a role with these permissions, and what it answered."""
    broker = broker_with()
    broker.grant({"shop": Permissions(name="shop", **permissions)}, now=0)
    role = broker.roles.named("shop")
    return broker, [sent for message in messages for sent in broker.receive(message, 0, role)]


def no_worker():
    broker = broker_with()
    return broker, feed(broker, request(wait=False))


def cancelled():
    broker = broker_with()
    return broker, feed(broker, request(), cancel())


CODES = {report.code for report in REPORTS.values() if report.code is not None}
DROPS = {
    Drop.EXPIRED: (
        expired, 408, "the broker's expiry of 10 s passed before a worker was free for it: none offers it",
    ),
    Drop.TTL_PASSED: (ttl_passed, 408, RUNNING),
    Drop.QUEUE_FULL: (queue_full, 429, "1 requests are already waiting for the service: retry later"),
    Drop.MEMORY_FULL: (
        memory_full, 429, f"the broker has {CHARGED - 1} bytes for requests, and this connection's share of them is "
        "used up: retry later",
    ),
    Drop.TOO_MANY_SERVICES: (
        too_many_services, 429, "no worker offers the service, and 1 services are in use: retry later",
    ),
    Drop.TOO_MANY_UNSERVED: (
        too_many_unserved, 429, "no worker offers the service, and this client has already named 1 such services: "
        "retry later",
    ),
    Drop.NOT_ALLOWED: (
        not_allowed, 403, "role shop may not call it: the broker's access file decides",
    ),
    Drop.NOT_ON_BEHALF: (
        not_on_behalf, 403, "role shop may not ask on behalf of others: it needs on_behalf in the broker's access file",
    ),
    Drop.USER_NOT_ALLOWED: (
        user_not_allowed, 403,
        "the role on whose behalf role shop asks may not call it: the broker's access file decides",
    ),
    Drop.ROLE_OUTSTANDING: (
        role_outstanding, 429, "role shop may have 1 outstanding requests, and has: retry later",
    ),
    Drop.ROLE_QUEUED: (role_queued, 429, "role shop may have 1 waiting requests, and has: retry later"),
    Drop.ROLE_MEMORY_FULL: (
        role_memory_full, 429, "requests of role shop may take 1000 bytes, and that is used up: retry later",
    ),
    Drop.DRAINING: (draining, 503, DRAINING),
    Drop.CLOSING: (closing, 503, CLOSING),
    Drop.WORKERS_LOST: (workers_lost, 502, "its worker was lost, and this was attempt 2 of 2 (max_attempts)"),
    Drop.LOST_AFTER_PARTIAL: (lost_after_partial, 502, "its worker was lost after a PARTIAL, so it cannot be retried"),
    Drop.REPLY_TOO_LARGE: (reply_too_large, 413, "the reply exceeds the limits of 500 bytes and 1024 frames"),
    Drop.NO_WORKER: (no_worker, 404, NO_WORKER),
    Drop.CANCELLED: (cancelled, 499, "cancelled"),
}  # fmt: skip


@pytest.mark.parametrize(("reason", "case"), DROPS.items(), ids=[reason.name for reason in DROPS])
def test_a_client_is_told_why_its_request_was_dropped(reason, case):
    happens, code, text = case
    broker, sent = happens()
    assert sent == [error(code, text)]
    assert REPORTS[reason].code == code
    assert broker.stats.dropped == {reason: 1}
    assert 1 not in {each.number for each in broker.registry.numbered if each.client.key == b"c"}


def test_every_reason_has_its_code():
    assert set(REPORTS) == set(Drop)
    with_code = {reason for reason, report in REPORTS.items() if report.code is not None}
    of_links = {Drop.NO_BROKER, Drop.LINKS_LOST, Drop.TOO_LARGE_FOR_LINK}  # test_links
    assert with_code == {*DROPS, *of_links} == set(Drop) - {Drop.CLIENT_GONE, Drop.HANDLER_FAILED}


# ── the worker's ERROR ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("detail", [[], [b"\0detail"]], ids=["plain", "with detail"])
def test_a_workers_error_is_passed_on(detail):
    broker = broker_with(b"w")
    feed(broker, request(b"1"), request(b"2", body=b"next"), partial())
    told = [b"c", b"1", b"", b"MDPCX1", b"\x04", b"echo", b"422", b"\xff no text", *detail]
    said = failure(b"w", 1, b"422", b"\xff no text", *detail)
    assert broker.receive(said, now=0) == [told, work(b"w", 2, b"next")]
    assert broker.stats.errors == 1
    assert broker.stats.dropped == {}
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, ["2"])


OLD_REQUEST = {"0.2": [b"c", b"MDPC02", b"\x01", b"echo", b"x"], "0.1": [b"c", b"", b"MDPC01", b"echo", b"x"]}


@pytest.mark.parametrize("protocol", OLD_REQUEST)
def test_an_old_client_is_not_told_of_an_error(protocol):  # C24
    broker = broker_with(b"w")
    feed(broker, OLD_REQUEST[protocol], request(client=b"d"))
    assert broker.receive(failure(), now=0) == [work(address=2)]
    assert broker.stats.dropped == {Drop.HANDLER_FAILED: 1}
    assert broker.stats.errors == 1


def test_an_error_is_a_sign_of_life():  # C13
    broker = broker_with(b"w", heartbeat=1, liveness=3)
    feed(broker, request())
    broker.receive(failure(), now=2)
    broker.tick(4.9)
    assert list(broker.registry.workers) == [b"w"]


def test_an_error_of_a_stranger():  # C14
    broker = broker_with()
    assert broker.receive(failure(), now=0) == [disconnect()]
    assert broker.stats.disconnected == {Refusal.NOT_REGISTERED: 1}


def test_an_error_of_an_idle_worker():  # C14
    broker = broker_with(b"w")
    assert broker.receive(failure(address=2), now=0) == [disconnect()]
    assert books(broker) == ([], [], 0, 0, [])
    assert broker.stats.disconnected == {Refusal.NO_REQUEST: 1}


def test_an_error_for_an_address_that_never_was():  # C18
    broker = broker_with(b"w")
    feed(broker, request())
    assert broker.receive(failure(address=999), now=0) == [disconnect()]
    assert books(broker) == ([b"echo"], [], 1, 0, ["1"])
    assert broker.stats.disconnected == {Refusal.WRONG_CLIENT: 1}
    assert broker.stats.errors == 0


def test_a_duplicated_error_is_dropped():  # C32
    broker = broker_with(b"w")
    assert feed(broker, request(b"1"), failure(), request(b"2"), failure()) == [
        work(), error(500, "it broke"), work(address=2),
    ]  # fmt: skip
    assert (broker.stats.errors, broker.stats.late) == (1, 1)


@pytest.mark.parametrize("code", sorted({*CODES, 400, 403, 422, 500}))
def test_a_workers_error_is_never_taken_for_the_brokers(code):
    broker = broker_with(b"w")
    feed(broker, request())
    detail = [b""] if code in {403, 404, 413, 429, 502, 503} else []
    assert broker.receive(failure(code=b"%d" % code), now=0) == [error(code, "it broke", detail=detail)]


def test_an_error_from_a_worker_of_another_dialect():  # C14
    broker = broker_with()
    feed(broker, OLD_READY["0.2"], request())
    assert broker.receive(failure(), now=0) == [disconnect()]
    assert broker.stats.disconnected == {Refusal.WRONG_DIALECT: 1}


def test_a_late_error_of_a_dead_worker_is_dropped():  # C18
    broker = broker_with(b"w1", heartbeat=1, liveness=3)
    feed(broker, request())
    broker.tick(4)
    assert broker.receive(ready(b"w2"), now=4) == [work(b"w2", 2, options=b'{"attempt":2}')]
    assert broker.receive(failure(b"w1"), now=4) == [disconnect(b"w1")]
    assert broker.receive(final(b"w2", 2), now=4) == [answer()]


OVER_LIMIT = error(413, "the reply exceeds the limits of 500 bytes and 20 frames")
LARGE_END = {
    "FINAL": final(body=b"x" * 500),
    "FINAL of many frames": [*final(), *[b""] * 15],
    "ERROR": failure(b"w", 1, b"500", b"text", b"x" * 500),
    "ERROR of many frames": failure(b"w", 1, b"500", *[b""] * 16),
}


def test_a_partial_over_the_limits_ends_the_request():  # C15
    broker = broker_with(b"w", max_message=500, max_frames=20)
    feed(broker, request(ttl=5000))
    assert broker.receive(partial(body=b"x" * 500), now=0) == [OVER_LIMIT, withdraw()]
    assert feed(broker, partial(), partial(body=b"x" * 500)) == []
    assert broker.receive(final(), now=0) == []
    assert broker.stats.dropped == {Drop.REPLY_TOO_LARGE: 1}
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])
    assert holds_nothing(broker)


@pytest.mark.parametrize("message", LARGE_END.values(), ids=LARGE_END)
def test_an_end_over_the_limits_is_an_end(message):  # C15
    broker = broker_with(b"w", max_message=500, max_frames=20, heartbeat=1, liveness=3)
    feed(broker, request(b"1", ttl=5000), request(b"2", body=b"next"))
    assert broker.receive(message, now=2) == [OVER_LIMIT, work(b"w", 2, b"next")]
    assert broker.stats.dropped == {Drop.REPLY_TOO_LARGE: 1}
    broker.tick(4.9)
    assert list(broker.registry.workers) == [b"w"]  # C13: it was a sign of life
    assert broker.receive(final(address=2), now=4.9) == [answer(b"2")]
    assert holds_nothing(broker)


@pytest.mark.parametrize("message", LARGE_END.values(), ids=LARGE_END)
def test_an_end_over_the_limits_of_what_was_cancelled_frees_the_worker(message):  # C15
    broker = broker_with(b"w", max_message=500, max_frames=20)
    feed(broker, request(), cancel())
    assert broker.receive(message, now=0) == []
    assert broker.stats.dropped == {Drop.CANCELLED: 1}
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


@pytest.mark.parametrize("protocol", OLD_READY)
def test_a_numbered_client_does_not_wait_for_an_old_worker_whose_end_was_over_the_limits(protocol):  # C15
    broker = broker_with(max_message=500, max_frames=20, heartbeat=1)
    feed(broker, OLD_READY[protocol], request())
    assert broker.receive([*OLD_FINAL[protocol], b"x" * 500], now=0) == [OVER_LIMIT]
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, [])
    assert broker.receive(OLD_FINAL[protocol], now=0) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


@pytest.mark.parametrize("protocol", OLD_READY)
def test_such_a_worker_does_not_stay_busy_for_ever(protocol):  # C15
    broker = broker_with(max_message=500, max_frames=20, heartbeat=1)
    feed(broker, OLD_READY[protocol], request(), [*OLD_FINAL[protocol], b"x" * 500])
    *head, _ready, _service = OLD_READY[protocol]
    alive, leave = (b"\x05", b"\x06") if protocol == "0.2" else (b"\x04", b"\x05")
    broker.receive([*head, alive], now=4)
    assert broker.tick(6) == [[*head, leave]]
    assert broker.stats.dropped == {Drop.REPLY_TOO_LARGE: 1}
    assert books(broker) == ([], [], 0, 0, [])


def test_a_worker_that_sends_an_error_of_too_many_frames_still_holds_its_request():  # C15
    broker = broker_with(b"w")
    feed(broker, request())
    assert broker.receive(failure(b"w", 1, b"500", b"text", b"1", b"2"), now=0) == []
    assert broker.receive(final(), now=0) == [answer()]


# ── client heartbeats ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("envelope", [[], [b""], [b"1", b""], [b"hop", b"1", b""]], ids=len)
def test_a_clients_heartbeat_is_echoed(envelope):  # C22
    broker = new_broker()
    message = [b"c", *envelope, b"MDPCX1", b"\x06"]
    assert broker.receive(message, now=0) == [message]
    assert broker.stats.heartbeats == 1
    assert books(broker) == ([], [], 0, 0, [])


def test_a_draining_broker_answers_a_clients_heartbeat_with_disconnect():
    broker = new_broker()
    assert broker.drain(0) == []
    gone = [b"c", b"", b"MDPCX1", b"\x07"]
    assert broker.receive([b"c", b"", b"MDPCX1", b"\x06"], now=0) == [gone]
    assert broker.receive([b"c", b"", b"MDPCX1"], now=0) == [gone]  # in the batched form it is the same


def test_a_clients_heartbeat_does_not_end_its_request():
    broker = broker_with(b"w")
    message = [b"c", b"1", b"", b"MDPCX1", b"\x06"]
    assert feed(broker, request(), message, final()) == [work(), message, answer()]


def test_a_client_heartbeat_is_no_sign_of_life_of_a_worker():  # C13
    broker = broker_with(b"w", heartbeat=1, liveness=3)
    broker.receive([b"w", b"", b"MDPCX1", b"\x06"], now=2)
    broker.tick(3.06)
    assert list(broker.registry.workers) == []


# ── clients that are gone ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_client_that_cannot_be_reached_asked_for_is_cancelled():
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"1", ttl=5000), request(b"2", client=b"d"), request(b"3"), request(b"4", wait=False))
    assert broker.unreachable(b"c", broker.turn - 1, now=0) == [withdraw(b"w1")]
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 3}
    assert books(broker) == ([b"echo"], [b"w1", b"w2"], 0, 2, ["2"])
    assert feed(broker, final(b"w1", 1), final(b"w2", 2)) == [answer(b"2", client=b"d")]
    assert holds_nothing(broker)


def test_a_client_that_did_not_keep_up_hears_nothing_more():
    # it has missed messages; so it finds this broker silent, connects anew and sends again what is outstanding
    broker = broker_with(b"w")
    feed(broker, request(b"1"), request(b"2"))
    assert broker.gone(b"c", now=0) == [withdraw()]
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, [])
    assert feed(broker, [b"c", b"", b"MDPCX1", b"\x06"], request(b"3"), cancel(b"1"), cancel(b"9")) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, [])
    assert feed(broker, request(client=b"d"), final()) == [work(address=2)]
    # an old client would not notice by that
    asked = [b"c", b"MDPC02", b"\x01", b"echo", b"x"]
    assert feed(broker, final(address=2), asked) == [answer(client=b"d"), work(address=3)]


def test_a_worker_that_did_not_keep_up_may_come_back():
    broker = broker_with(b"w")
    broker.gone(b"w", now=0)
    assert feed(broker, ready(), request(), final()) == [work(), answer()]


def test_not_all_that_did_not_keep_up_are_remembered():
    broker = broker_with()
    for number in range(MAX_GIVEN_UP + 1):
        broker.gone(b"c%d" % number, now=0)
    assert len(broker._given_up) == MAX_GIVEN_UP
    hello = [b"c0", b"", b"MDPCX1", b"\x06"]
    assert broker.receive(hello, now=0) == [hello]
    assert broker.receive([b"c1", *hello[1:]], now=0) == []


def test_a_worker_that_cannot_be_reached_with_a_cancel_is_gone():
    broker = broker_with(b"w")
    feed(broker, request(), cancel())
    assert broker.unreachable(b"w", broker.turn - 1, now=0) == []
    assert broker.stats.lost == {Loss.UNREACHABLE: 1}
    assert books(broker) == ([], [], 0, 0, [])


def test_a_gone_worker_that_was_its_own_client_leaves_nothing():
    broker = broker_with(b"w", b"v")
    feed(broker, request(client=b"w"))
    broker.gone(b"w", now=0)
    assert books(broker) == ([b"echo"], [b"v"], 0, 0, [])
    assert holds_nothing(broker)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def go(client=b"c"):
    """The broker's DISCONNECT to an X1 client."""
    return [client, b"", b"MDPCX1", b"\x07"]


def test_a_draining_broker_takes_no_more_and_finishes_what_it_took():
    broker = broker_with(b"w")
    feed(broker, request(b"1"), request(b"2"))
    assert broker.drain(0) == [go()]
    assert broker.receive(request(b"3"), now=0) == [error(503, DRAINING, b"3")]
    assert broker.receive(final(), now=0) == [answer(b"1"), work(address=2)]
    assert broker.receive(final(address=2), now=0) == [answer(b"2"), disconnect()]
    assert broker.drained
    assert books(broker) == ([], [], 0, 0, [])


def test_each_client_that_waits_for_something_is_told_once_that_the_broker_drains():
    broker = broker_with(b"w")
    feed(broker, request(b"1"), request(b"2"), request(b"1", client=b"done", service=b"mmi.broker"))
    feed(broker, [b"proxy", b"hop", b"1", b"", b"MDPCX1", b"\x01", b"sum", b"", b"x"])
    feed(broker, [b"old", b"MDPC02", b"\x01", b"sum", b"x"])  # its dialect has no DISCONNECT
    assert broker.drain(0) == [go(), [b"proxy", b"hop", b"", b"MDPCX1", b"\x07"]]


def test_a_worker_is_sent_away_once_it_holds_nothing_and_nothing_waits_for_its_service():  # C9
    broker = broker_with(b"busy", b"idle")
    feed(broker, ready(b"of sum", b"sum"), ready(b"nil", b"none"), request(b"1"))
    assert broker.drain(0) == [go(), disconnect(b"idle"), disconnect(b"of sum"), disconnect(b"nil")]
    assert books(broker) == ([b"echo"], [b"busy"], 0, 1, ["1"])
    assert broker.receive(final(b"busy"), now=0) == [answer(b"1"), disconnect(b"busy")]
    assert broker.stats.lost == {Loss.CLOSING: 4}
    assert books(broker) == ([], [], 0, 0, [])
    assert broker.tick(100) == []


def test_a_worker_with_a_queue_is_not_sent_away():
    broker = broker_with(b"w1", b"w2")
    feed(broker, *[request(b"%d" % number) for number in range(1, 5)])
    assert broker.drain(0) == [go()]
    assert feed(broker, final(b"w1", 1)) == [answer(b"1"), work(b"w1", 3)]
    assert feed(broker, final(b"w2", 2)) == [answer(b"2"), work(b"w2", 4)]
    assert feed(broker, final(b"w1", 3)) == [answer(b"3"), disconnect(b"w1")]
    assert broker.gone(b"w2", now=0) == []  # what it held waits for a worker; none is told to come back
    assert broker.drained


def test_a_request_that_comes_back_is_done_by_a_worker_that_is_still_there():
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"1"), request(b"2"))
    assert broker.drain(0) == [go()]
    assert broker.gone(b"w1", now=0) == []
    assert feed(broker, final(b"w2", 2)) == [answer(b"2"), work(b"w2", 3, options=b'{"attempt":2}')]
    assert feed(broker, final(b"w2", 3)) == [answer(b"1"), disconnect(b"w2")]


def test_a_worker_without_credit_is_sent_away_when_it_has_some_or_is_due_a_heartbeat():
    broker = broker_with(b"w", b"v")
    feed(broker, [b"w", b"MDPWX1", b"\x0a", b"0"], [b"v", b"MDPWX1", b"\x0a", b"0"])
    assert broker.drain(0) == []
    assert feed(broker, [b"w", b"MDPWX1", b"\x0a", b"1"]) == [disconnect(b"w")]
    assert broker.tick(0.9) == []
    assert broker.tick(1.1) == [disconnect(b"v")]
    assert books(broker) == ([], [], 0, 0, [])


def test_a_worker_without_credit_finishes_what_it_holds():
    broker = broker_with(b"w")
    feed(broker, request(b"1"), [b"w", b"MDPWX1", b"\x0a", b"0"])
    assert broker.drain(0) == [go()]
    assert broker.tick(1.1) == [heartbeat()]
    assert broker.receive(final(), now=1.2) == [answer(b"1")]
    assert broker.tick(2.3) == [disconnect()]


def test_a_worker_that_was_leaving_is_told_once():
    broker = broker_with(b"w")
    feed(broker, request(b"1"), disconnect(b"w"))
    assert broker.drain(0) == [go()]
    assert broker.receive(final(), now=0) == [answer(b"1"), disconnect()]
    assert broker.stats.lost == {Loss.DISCONNECTED: 1}


def test_a_draining_broker_sends_new_workers_away(caplog):
    broker = new_broker()
    broker.drain(0)
    with caplog.at_level(logging.WARNING):
        assert broker.receive(ready(), now=0) == [disconnect()]
        packed = [b"w", b"MDPWX1", b"\x09", _batched_ready_and_credit()]
        assert broker.receive(packed, now=0) == [disconnect()]  # once, whatever else is in the message
    assert caplog.messages == []
    assert broker.stats.disconnected == {Refusal.DRAINING: 2}
    assert books(broker) == ([], [], 0, 0, [])


def _batched_ready_and_credit():
    made = batch.Batch((), wire.WX1)
    made.ready(1, b"echo", b"")
    made.credit(2)
    ((_, _, records),) = made.messages()
    return records


def test_at_the_end_every_client_is_told_and_every_worker():  # C9
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(b"1"), request(b"2"), cancel(b"2"), request(b"3", ttl=5000), request(b"4", wait=False))
    feed(broker, request(b"5", service=b"sum"), [b"old", b"MDPC02", b"\x01", b"echo", b"x"])
    sent = broker.close(now=1)
    assert sent[-2:] == [disconnect(b"w1"), disconnect(b"w2")]
    assert sorted(sent[:-2]) == sorted(
        [
            *[error(503, CLOSING, number) for number in (b"1", b"3", b"4")],
            error(503, CLOSING, b"5", service=b"sum"),
            withdraw(b"w1"),
        ]
    )
    assert books(broker) == ([b"echo"], [], 1, 0, [])
    assert broker.stats.dropped == {Drop.CANCELLED: 1, Drop.CLOSING: 4}


# ── what is told of it ───────────────────────────────────────────────────────────────────────────────────────────────


def test_what_nobody_is_to_blame_for_is_no_warning(caplog):
    caplog.set_level(logging.INFO)
    broker = broker_with(b"w", max_queue=1)
    feed(broker, request(b"1"), cancel(b"1"), [b"d", b"MDPC02", b"\x01", b"echo", b"x"], final())
    feed(broker, failure(address=2), request(b"2"), request(b"3"), request(b"4"))
    levels = [(record.levelname, record.message) for record in caplog.records if "dropped" in record.message]
    assert levels == [
        ("INFO", "dropped a request for service echo: cancelled"),
        ("INFO", "dropped a request for service echo: handler-failed"),
        ("WARNING", "dropped a request for service echo: queue-full"),
    ]


def test_a_broker_forgets_all_that_ended():
    broker = broker_with(b"w1", b"w2", max_queue=3, max_attempts=1)
    for turn in range(20):
        now = 10.0 * turn
        for number in range(10):
            broker.receive(request(b"%d" % number, ttl=1000 + 100 * number, wait=number % 2 == 0), now)
        broker.receive(cancel(b"3"), now)
        held = {worker.key: address for worker in broker.registry.workers.values() for address in worker.held}
        broker.receive(partial(b"w1", held[b"w1"]), now)
        broker.receive(failure(b"w2", held[b"w2"]), now)
        broker.gone(b"w1", now + 0.5)
        broker.receive(ready(b"w1"), now + 0.5)
        for worker in (b"w1", b"w2"):
            broker.receive(heartbeat(worker), now + 4)
        broker.tick(now + 4)
        for worker in list(broker.registry.workers.values()):
            for address in list(worker.held):
                broker.receive(final(worker.key, address), now + 5)
        assert holds_nothing(broker)
        assert books(broker) == ([b"echo"], [b"w2", b"w1"], 0, 0, [])
        for worker in (b"w1", b"w2"):
            broker.receive(heartbeat(worker), now + 8)
    feed(broker, disconnect(b"w1"), disconnect(b"w2"), now=300)
    assert broker.registry.services == {}
    assert broker._beats.next_due() is None
    assert broker.deadline() is None


def test_a_client_that_missed_messages_hears_nothing_until_it_has_surely_noticed():
    broker = broker_with()
    broker.receive(request(), 0.0)
    broker.gone(b"c", 1.0)
    heartbeat = [b"c", b"", b"MDPCX1", b"\x06"]
    assert broker.receive(heartbeat, GIVEN_UP) == []
    assert broker.receive(heartbeat, 2 * GIVEN_UP - 1.0) == []  # it has still not noticed
    assert broker.receive(heartbeat, 3 * GIVEN_UP) == [heartbeat]  # nothing it said lately was ignored
    assert len(broker._given_up) == 0


def test_each_client_behind_a_proxy_that_did_not_keep_up_notices_by_itself():
    broker = broker_with()
    one, two = ([b"p", name, b"", b"MDPCX1", b"\x06"] for name in (b"1", b"2"))
    broker.gone(b"p", 0.0)
    assert broker.receive(one, GIVEN_UP - 1.0) == []
    assert broker.receive(two, GIVEN_UP) == [two]  # it said nothing before, so it misses nothing
    assert broker.receive(one, GIVEN_UP) == []
    assert broker.receive(one, 2 * GIVEN_UP) == [one]


def test_an_identity_that_is_gone_may_be_used_again():
    broker = broker_with()
    heartbeat = [b"c", b"", b"MDPCX1", b"\x06"]
    broker.gone(b"c", 1.0)
    broker.unreachable(b"c", broker.turn - 1, 1.0)
    assert broker.receive(heartbeat, 1.0) == [heartbeat]


def test_a_request_that_was_not_even_sent_yet_is_no_attempt():
    """All connections of one process end together, and the broker is about to send HEARTBEAT to each."""
    broker = broker_with(b"w", b"w2", b"w3", max_attempts=1, heartbeat=1.0)
    feed(broker, request())
    assert len(broker.tick(2.0)) == 3
    placed = broker.unreachable(b"w", broker.turn - 1, 2.0)  # this one had it: that is the one attempt
    assert placed[0][6] == b"502"
    broker = broker_with(b"w", b"w2", b"w3", max_attempts=2, heartbeat=1.0)
    feed(broker, request())
    broker.tick(2.0)
    missed = broker.turn - 1
    assert broker.unreachable(b"w", missed, 2.0)[0][:3] == [b"w2", b"MDPWX1", b"\x02"]
    assert broker.unreachable(b"w2", missed, 2.0)[0][:3] == [b"w3", b"MDPWX1", b"\x02"]
    assert broker.unreachable(b"w3", missed, 2.0) == []  # it waits for the next worker
    assert broker.registry.queued == 1


# ── turns of many messages ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_arrived_in_the_turn_can_be_cancelled():
    broker = broker_with(b"w")
    assert turn(broker, request(b"1"), cancel(b"1"), request(b"2", body=b"next")) == [
        error(499, "cancelled"), work(body=b"next"),
    ]  # fmt: skip
    assert broker.stats.dropped == {Drop.CANCELLED: 1}
    assert broker.stats.dispatched == 1


def test_a_number_may_be_used_again_in_the_turn_in_which_it_is_cancelled():
    broker = new_broker()
    assert turn(broker, request(b"1", body=b"1"), cancel(b"1"), request(b"1", body=b"2")) == [error(499, "cancelled")]
    assert books(broker) == ([b"echo"], [], 1, 0, ["1"])
    assert broker.receive(ready(), now=0) == [work(body=b"2")]


def test_a_number_may_be_used_again_in_the_turn_of_its_final():
    broker = broker_with(b"w")
    feed(broker, request(b"1"))
    assert turn(broker, final(), request(b"1", body=b"2")) == [answer(b"1"), work(address=2, body=b"2")]


def test_a_request_that_does_not_wait_and_its_last_worker_leave_in_one_turn():
    broker = broker_with(b"w")
    assert turn(broker, request(b"1", wait=False), request(b"2"), disconnect()) == [error(404, NO_WORKER), disconnect()]
    assert books(broker) == ([b"echo"], [], 1, 0, ["2"])


def test_an_error_and_the_end_of_its_worker_in_one_turn():
    broker = broker_with(b"w", b"v")
    feed(broker, request(b"1"))
    assert turn(broker, failure(), disconnect(), request(b"2")) == [
        error(500, "it broke"), disconnect(), work(b"v", 2),
    ]  # fmt: skip


def test_the_end_of_the_broker_in_the_middle_of_a_turn():
    broker = broker_with(b"w")
    broker.take(request(b"1"), 0)
    assert broker.close(0) == [error(503, CLOSING), disconnect()]
    assert broker.registry.services == {}


def test_a_time_that_passes_in_the_middle_of_a_turn():
    broker = new_broker()
    broker.take(request(b"1", ttl=100), 0)
    broker.take(ready(), 1)
    broker.take(request(b"2"), 1)
    broker.take(request(b"3"), 1)
    assert broker.flush(1) == [error(408, FREE), work()]


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_probe_is_a_heartbeat_to_a_numbered_client():
    broker = new_broker()
    feed(broker, request(b"1"))
    assert broker.probe(b"c", now=0) == [[b"c", b"", b"MDPCX1", b"\x06"]]


def test_a_probe_goes_to_all_peers_of_a_connection():
    broker = broker_with(b"w")
    feed(broker, [b"p", b"hop", b"1", b"", *request()[3:]], [b"p", b"w", b"", *ready()[1:]], request(client=b"p"))
    assert broker.probe(b"p", now=0) == [
        [b"p", b"w", b"", b"MDPWX1", b"\x05"], [b"p", b"", b"MDPCX1", b"\x06"],
        [b"p", b"hop", b"", b"MDPCX1", b"\x06"],
    ]  # fmt: skip
