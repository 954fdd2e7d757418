"""The broker's machine with X1 peers: records, numbers, options, ERROR, CANCEL, client heartbeats.

What all dialects share is in `test_broker`; what a worker with credit does, in `test_broker_credit`.
"""

import logging

import pytest
from support import turns
from support.peers import body_of, record, request_of
from support.x1_messages import (
    answer,
    beaten,
    cancel,
    client_heartbeat,
    credit,
    disconnected,
    error,
    failure,
    feed,
    final,
    heartbeat,
    packed,
    partial,
    ready,
    request,
    together,
    told,
    withdraw,
    work,
)

from zmdp.mdp import wire
from zmdp.mdp.broker.core.clients import GIVEN_UP, MAX_GIVEN_UP
from zmdp.mdp.broker.core.drops import REPORTS, Drop
from zmdp.mdp.broker.core.journal import Refusal
from zmdp.mdp.broker.core.records import CLIENT_OVERHEAD, FRAME_OVERHEAD, REQUEST_OVERHEAD
from zmdp.mdp.broker.core.registry import REMEMBERED
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.wire import CX1, WX1

OLD_READY = {"0.2": [b"w", b"MDPW02", b"\x01", b"echo"], "0.1": [b"w", b"", b"MDPW01", b"\x01", b"echo"]}
OLD_FINAL = {
    "0.2": [b"w", b"MDPW02", b"\x04", b"1", b"", b"x"],
    "0.1": [b"w", b"", b"MDPW01", b"\x03", b"1", b"", b"x"],
}

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


def books(broker):
    """What the broker holds: (services, workers, requests that wait, requests that workers hold, X1 requests)."""
    directory, registry = broker.directory, broker.registry
    numbers = sorted(request.number for request in registry.numbered)
    return list(directory.services), list(directory.workers), registry.queued, registry.running, numbers


def holds_nothing(broker):
    """Whether nothing at all is kept of the requests there were."""
    directory, registry = broker.directory, broker.registry
    kept = registry.numbered, registry.queued, registry.request_bytes, registry.running, directory.clients
    return not any([*kept, len(broker.registry.expiries), broker.registry.expiries.next_due()])


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("service", [b"echo", b"mmi.service"], ids=["of a worker", "of the broker"])
def test_numbers_that_ended_are_not_remembered_for_ever(service):
    broker = broker_with(b"w")
    feed(broker, request(1 << 60), final())
    for number in range(3 * REMEMBERED):
        feed(broker, request(number, service=service))
        feed(broker, *[final(max(worker.held), b"w") for worker in broker.directory.workers.values() if worker.held])
    assert feed(broker, cancel(1 << 60)) == [error(400, "malformed: unknown-number", 1 << 60)]


# ── malformed ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "reason"), [([b"x" * 1001], "too-large"), ([b""] * 13, "too-many-frames")], ids=["bytes", "frames"]
)
def test_a_client_is_told_that_its_request_is_over_the_limits(body, reason):  # C15
    broker = broker_with(b"w", max_message=1000, max_frames=12)
    text = "a request may have up to 1000 bytes in 12 frames"
    asked = packed(b"c", CX1, request_of(1, b"echo", *body), request_of(2, b"echo", b"x"))
    assert feed(broker, asked) == [error(413, text), work()]
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, [2])
    assert broker.stats.invalid == {reason: 1}


UNREADABLE = [
    [b"\xff" * 40],
    [record(99, 1)],
    [record(4, 1)],
    [record(4, 1, body_of())],
    [record(10, 0, b"\0\0\0\x05x")],
    [],
    [b""],
]


@pytest.mark.parametrize("frames", UNREADABLE)
def test_records_of_a_worker_that_cannot_be_read_change_nothing(frames):  # C15, C43
    broker = broker_with(b"w")
    feed(broker, request(1), request(2))
    assert feed(broker, [*heartbeat(), b"\x09", *frames]) == []
    assert feed(broker, final()) == [answer(1), work(2)]


# ── ttl ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_whose_time_passes_while_all_workers_are_busy():
    broker = broker_with(b"w")
    feed(broker, request(1), request(2, ttl=500))
    assert told(turns.tick(broker, 0.52)) == [error(408, BUSY, 2)]
    assert feed(broker, final(), now=0.6) == [answer(1)]
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


# ── workers that give a request up ───────────────────────────────────────────────────────────────────────────────────

HUNG = "its handler has neither returned nor yielded for 30 s (handler_timeout)"


def give_up(broker, worker=b"w"):
    """A worker leaves because a handler hangs, and closes its socket while it holds the request."""
    assert feed(broker, wire.disconnect((worker,), wire.WX1, HUNG.encode())) == []
    return told(turns.give_up(broker, worker, 0))


def test_a_client_is_told_that_a_handler_hung():
    broker = broker_with(b"w")
    feed(broker, request(wait=False))
    text = f"its worker gave it up: {HUNG}, no other worker offers the service, and wait is false"
    assert give_up(broker) == [error(502, text)]
    assert holds_nothing(broker)


def test_a_client_is_told_that_a_handler_hung_before_its_time_passed():
    broker = broker_with(b"w")
    feed(broker, request(ttl=1000))
    assert give_up(broker) == []
    assert told(turns.tick(broker, 1.011)) == [error(408, f"{NOBODY}; a worker gave it up before: {HUNG}")]
    assert holds_nothing(broker)
    assert not broker.registry.why_given_up


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_is_told_at_once_that_it_is_registered():  # C13
    broker = broker_with(b"w", heartbeat=1)
    assert told(turns.tick(broker, 0.06)) == [beaten()]
    assert turns.tick(broker, 1) == []
    assert told(turns.tick(broker, 1.12)) == [beaten()]


def test_a_request_tells_it_too():  # C13
    broker = broker_with(b"w", heartbeat=1)
    assert len(feed(broker, request())) == 1
    assert turns.tick(broker, 0.9) == []


# ── why a request is dropped ─────────────────────────────────────────────────────────────────────────────────────────


CHARGED = CLIENT_OVERHEAD + REQUEST_OVERHEAD + FRAME_OVERHEAD + 1
"""The bytes charged for a client with a request."""


def expired():
    broker = broker_with(expiry=10)
    feed(broker, request())
    return broker, told(turns.tick(broker, 11))


def ttl_passed():
    broker = broker_with(b"w", heartbeat=10)
    feed(broker, request(ttl=100))
    return broker, told(turns.tick(broker, 1))[:1]


def queue_full():
    broker = broker_with(max_queue=1)
    return broker, feed(broker, request(0), request())


def memory_full():
    broker = broker_with(max_request_bytes=CHARGED - 1)
    return broker, feed(broker, request())


def too_many_services():
    broker = broker_with(max_services=1)
    feed(broker, request(client=b"d", service=b"other"))
    return broker, feed(broker, request())


def draining():
    broker = broker_with(b"w")
    turns.drain(broker, 0)
    return broker, feed(broker, request())


def closing():
    broker = broker_with()
    feed(broker, request())
    return broker, told(turns.close(broker, 0))


def workers_lost():
    broker = broker_with(b"w1", b"w2", max_attempts=2)
    feed(broker, request())
    return broker, told(turns.give_up(broker, b"w1", now=0))[1:] + told(turns.give_up(broker, b"w2", now=0))


def last_worker_lost():
    broker = broker_with(b"w")
    feed(broker, request(wait=False))
    return broker, told(turns.give_up(broker, b"w", now=0))


def lost_after_partial():
    broker = broker_with(b"w")
    feed(broker, request(), partial())
    return broker, told(turns.give_up(broker, b"w", now=0))


def reply_too_large():
    broker = broker_with(b"w", max_message=500)
    return broker, feed(broker, request(), partial(body=b"x" * 501))[1:2]


def too_many_unserved():
    broker = broker_with(max_unserved=1)
    return broker, feed(broker, request(0, service=b"other"), request())


def not_allowed():
    return limited(request(), call=("other",))


def not_on_behalf():
    return limited(request(on_behalf="shop"), call=("*",))


def user_not_allowed():
    return limited(request(on_behalf="nobody"), call=("*",), on_behalf=True)


def role_outstanding():
    return limited(request(0), request(), call=("*",), outstanding=1)


def role_queued():
    return limited(request(0), request(), call=("*",), queued_requests=1)


def role_memory_full():
    return limited(request(), call=("*",), request_bytes=1000)


def limited(*messages, **permissions):
    """A broker that has been sent `messages` by a role with these permissions, and what it answered."""
    broker = broker_with()
    turns.grant(broker, {"shop": Permissions(name="shop", **permissions)}, now=0)
    role = broker.roles.named("shop")
    return broker, [sent for each in messages for sent in told(turns.receive(broker, each, 0, role))]


def options_too_long():
    """The broker adds `"user":"shop"` to them."""
    return limited(ready(), request(key="x" * 65_515), call=("*",), offer=("*",))


def no_worker():
    broker = broker_with()
    return broker, feed(broker, request(wait=False))


def cancelled():
    broker = broker_with()
    return broker, feed(broker, request(), cancel())


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
    Drop.LAST_WORKER_LOST: (last_worker_lost, 502, LAST_WORKER_LOST),
    Drop.LOST_AFTER_PARTIAL: (lost_after_partial, 502, "its worker was lost after a PARTIAL, so it cannot be retried"),
    Drop.REPLY_TOO_LARGE: (reply_too_large, 413, "the reply exceeds the limits of 500 bytes and 1024 frames"),
    Drop.OPTIONS_TOO_LONG: (
        options_too_long, 413, "its options are too long, with what the broker has to add for a worker or another "
        "broker",
    ),
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
    elsewhere = {
        Drop.NO_BROKER,
        Drop.LINKS_LOST,
        Drop.LIMITED,
        Drop.LIMIT_PASSED,
        Drop.TOO_MANY_GROUPS,
    }  # test_links, test_limits
    assert with_code == {*DROPS, *elsewhere} == set(Drop) - {Drop.CLIENT_GONE, Drop.HANDLER_FAILED}


# ── the worker's ERROR ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("code", "added"), [(502, (b"",)), (500, ())])
def test_a_workers_error_is_never_taken_for_the_brokers(code, added):  # C47
    broker = broker_with(b"w")
    feed(broker, request())
    assert feed(broker, failure(code=code)) == [error(code, "it broke", detail=added)]


OVER_LIMIT = error(413, "the reply exceeds the limits of 500 bytes and 20 frames")
LARGE_END = {
    "FINAL": final(body=b"x" * 501),
    "FINAL of many frames": packed(b"w", WX1, record(4, 1, body_of(*[b""] * 21))),
    "ERROR": failure(1, b"w", 500, b"text", b"x" * 501),
    "ERROR of many frames": failure(1, b"w", 500, b"text", *[b""] * 21),
}


@pytest.mark.parametrize("end", LARGE_END.values(), ids=LARGE_END)
def test_an_end_over_the_limits_is_an_end(end):  # C15
    broker = broker_with(b"w", max_message=500, max_frames=20, heartbeat=1, liveness=3)
    feed(broker, request(1, ttl=5000), request(2, body=b"next"))
    assert feed(broker, end, now=2) == [OVER_LIMIT, work(2, body=b"next")]
    assert broker.stats.dropped == {Drop.REPLY_TOO_LARGE: 1}
    turns.tick(broker, 4.9)
    assert list(broker.directory.workers) == [b"w"]  # C13: it was a sign of life
    assert feed(broker, final(2), now=4.9) == [answer(2)]
    assert holds_nothing(broker)


@pytest.mark.parametrize("end", LARGE_END.values(), ids=LARGE_END)
def test_an_end_over_the_limits_of_what_was_cancelled_frees_the_worker(end):  # C15
    broker = broker_with(b"w", max_message=500, max_frames=20)
    feed(broker, request(), cancel())
    assert feed(broker, end) == []
    assert broker.stats.dropped == {Drop.CANCELLED: 1}
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


@pytest.mark.parametrize("protocol", OLD_READY)
def test_a_numbered_client_does_not_wait_for_an_old_worker_whose_end_was_over_the_limits(protocol):  # C15
    broker = broker_with(max_message=500, max_frames=20, heartbeat=1)
    feed(broker, OLD_READY[protocol], request())
    assert feed(broker, [*OLD_FINAL[protocol], b"x" * 500]) == [OVER_LIMIT]
    assert books(broker) == ([b"echo"], [b"w"], 0, 1, [])
    assert feed(broker, OLD_FINAL[protocol]) == []
    assert books(broker) == ([b"echo"], [b"w"], 0, 0, [])


# ── clients that are gone ────────────────────────────────────────────────────────────────────────────────────────────


def test_not_all_that_did_not_keep_up_are_remembered():
    broker = broker_with()
    for number in range(MAX_GIVEN_UP + 1):
        turns.give_up(broker, b"c%d" % number, now=0)
    assert len(broker._clients._given_up) == MAX_GIVEN_UP
    assert feed(broker, client_heartbeat(b"c0"), client_heartbeat(b"c1")) == [beaten(b"c0")]


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_client_that_waits_for_something_is_told_once_that_the_broker_drains():
    broker = broker_with(b"w")
    feed(broker, request(1), request(2), request(1, client=b"done", service=b"mmi.broker"))
    feed(broker, request(client=(b"proxy", b"hop"), service=b"sum"))
    feed(broker, [b"old", b"MDPC02", b"\x01", b"sum", b"x"])  # its dialect has no DISCONNECT
    assert told(turns.drain(broker, 0)) == [disconnected(b"c"), disconnected((b"proxy", b"hop"))]


def test_a_worker_without_credit_is_sent_away_when_it_has_some_or_is_due_a_heartbeat():
    broker = broker_with(b"w", b"v")
    assert told(turns.tick(broker, 0.1)) == [beaten(b"w"), beaten(b"v")]
    feed(broker, credit(0), credit(0, b"v"))
    assert turns.drain(broker, 0.1) == []
    assert feed(broker, credit(1), now=0.1) == [disconnected()]
    assert turns.tick(broker, 1) == []
    assert told(turns.tick(broker, 1.2)) == [disconnected(b"v")]
    assert books(broker) == ([], [], 0, 0, [])


def test_a_draining_broker_sends_new_workers_away(caplog):
    broker = new_broker()
    turns.drain(broker, 0)
    with caplog.at_level(logging.WARNING):
        assert feed(broker, ready()) == [disconnected()]
        assert feed(broker, together(ready(), credit(2))) == [disconnected()]  # once, whatever else is in the message
    assert caplog.messages == []
    assert broker.stats.disconnected == {Refusal.DRAINING: 2}
    assert books(broker) == ([], [], 0, 0, [])


def test_at_the_end_every_client_is_told_and_every_worker():  # C9
    broker = broker_with(b"w1", b"w2")
    feed(broker, request(1), request(2), cancel(2), request(3, ttl=5000), request(4, wait=False))
    feed(broker, request(5, service=b"sum"), [b"old", b"MDPC02", b"\x01", b"echo", b"x"])
    sent = told(turns.close(broker, now=1))
    assert sent[-2:] == [disconnected(b"w1"), disconnected(b"w2")]
    assert sorted(sent[:-2]) == [*[error(503, CLOSING, number) for number in (1, 3, 4, 5)], withdraw(worker=b"w1")]
    assert books(broker) == ([], [], 0, 0, [])
    assert broker.stats.dropped == {Drop.CANCELLED: 1, Drop.CLOSING: 5}


# ── what is told of it ───────────────────────────────────────────────────────────────────────────────────────────────


def test_what_nobody_is_to_blame_for_is_no_warning(caplog):
    caplog.set_level(logging.INFO)
    broker = broker_with(b"w", max_queue=1)
    feed(broker, request(1), cancel(1), [b"d", b"MDPC02", b"\x01", b"echo", b"x"], final())
    feed(broker, failure(2), request(2), request(3), request(4))
    levels = [(record.levelname, record.message) for record in caplog.records if "dropped" in record.message]
    assert levels == [
        ("INFO", "dropped a request for service echo: cancelled"),
        ("INFO", "dropped a request for service echo: handler-failed"),
        ("WARNING", "dropped a request for service echo: queue-full"),
    ]


def test_a_client_that_missed_messages_hears_nothing_until_it_has_surely_noticed():
    broker = broker_with()
    feed(broker, request())
    turns.give_up(broker, b"c", 1.0)
    assert feed(broker, client_heartbeat(), now=GIVEN_UP) == []
    assert feed(broker, client_heartbeat(), now=2 * GIVEN_UP - 1.0) == []  # it has still not noticed
    assert feed(broker, client_heartbeat(), now=3 * GIVEN_UP) == [beaten(b"c")]  # nothing said lately was ignored
    assert len(broker._clients._given_up) == 0


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_probe_is_a_heartbeat_to_all_peers_of_a_connection():
    broker = broker_with(b"w", (b"p", b"w"))
    feed(broker, request(1), request(client=(b"p", b"hop")), request(client=b"p"))
    assert told(turns.probe(broker, b"w", now=0)) == [beaten(b"w")]
    assert told(turns.probe(broker, b"c", now=0)) == [beaten(b"c")]
    assert told(turns.probe(broker, b"p", now=0)) == [beaten((b"p", b"w")), beaten(b"p"), beaten((b"p", b"hop"))]
