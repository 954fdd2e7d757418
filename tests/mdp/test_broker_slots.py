"""The machine with slots: several X1 workers on one connection, told apart by their envelopes."""

import pytest

from zmdp.mdp.broker import CROSSINGS, Broker
from zmdp.mdp.journal import Loss, Refusal
from zmdp.mdp.limits import Limits

A, B, BARE = (b"w", b"1", b""), (b"w", b"2", b""), (b"w",)


def ready(route=A, service=b"echo", header=b"MDPWX1"):
    return [*route, header, b"\x01", service]


def beat(route=A):
    return [*route, b"MDPWX1", b"\x05"]


def leave(route=A):
    return [*route, b"MDPWX1", b"\x06"]


def partial(route=A, client=b"c", body=b"x"):
    return [*route, b"MDPWX1", b"\x03", client, b"", body]


def final(route=A, client=b"c", body=b"x"):
    return [*route, b"MDPWX1", b"\x04", client, b"", body]


def request(number=b"1", client=b"c", service=b"echo", options=b""):
    return [client, number, b"", b"MDPCX1", b"\x01", service, options, b"x"]


def work(route=A, client=b"c", options=b""):
    return [*route, b"MDPWX1", b"\x02", client, b"", options, b"x"]


def answer(number=b"1", client=b"c"):
    return [client, number, b"", b"MDPCX1", b"\x03", b"echo", b"x"]


def cancel(number=b"1"):
    return [b"c", number, b"", b"MDPCX1", b"\x05", b"echo"]


def lost(number=b"1"):
    return [b"c", number, b"", b"MDPCX1", b"\x04", b"echo", b"502"]


def broker_with(*routes, **limits):
    broker = Broker(Limits(**limits), now=0)
    for route in routes:
        assert broker.receive(ready(route), 0) == []
    return broker


def feed(broker, *messages, now=0):
    return [sent for message in messages for sent in broker.receive(message, now)]


def there(broker):
    """The routes of all workers, after a look at the index."""
    registry = broker.registry
    assert {worker for held in registry.connections.values() for worker in held.values()} == {
        *registry.workers.values()
    }
    assert all(registry.connections.values())
    return list(registry.workers)


def test_each_slot_has_its_own_request():  # C6, C21
    broker = broker_with(A, BARE, B)
    assert feed(broker, *map(request, (b"1", b"2", b"3", b"4"))) == [work(A), work(BARE), work(B)]
    assert broker.receive(final(B), 0) == [answer(b"3"), work(B)]
    assert feed(broker, final(BARE), final(A), final(B)) == [answer(b"2"), answer(b"1"), answer(b"4")]
    assert there(broker) == [A, BARE, B]
    assert broker.registry.running == 0


def test_slots_of_one_connection_may_offer_different_services():
    broker = broker_with(A)
    assert feed(broker, ready(B, b"other"), request(service=b"other")) == [work(B)]


def test_each_slot_has_its_own_heartbeats():  # C13
    broker = broker_with(A, B, heartbeat=1, liveness=3)
    broker.receive(request(), 0.9)
    assert broker.tick(1.1) == [beat(B)]
    for moment in (2, 3, 4):
        broker.receive(beat(A), moment)
        broker.tick(moment + 0.1)
    assert there(broker) == [A]
    assert broker.stats.lost == {Loss.SILENT: 1}
    assert broker.receive(beat(B), 5) == [leave(B)]  # C14
    assert there(broker) == [A]


def test_a_slot_leaves_and_the_others_stay():  # C16, C17
    broker = broker_with(A, B)
    assert feed(broker, request(b"1"), request(b"2")) == [work(A), work(B)]
    assert feed(broker, leave(A), final(B)) == [answer(b"2"), work(B, options=b'{"attempt":2}')]
    assert feed(broker, final(A)) == [leave(A)]  # C14: it is a stranger now
    assert there(broker) == [B]
    assert feed(broker, leave(B)) == []
    assert (there(broker), broker.registry.connections) == ([], {})


def test_what_is_unexpected_of_one_slot_is_no_matter_of_the_others():  # C14
    broker = broker_with(A, B)
    assert feed(broker, ready(A), final(B)) == [leave(A), leave(B)]
    assert broker.stats.disconnected == {Refusal.SECOND_READY: 1, Refusal.NO_REQUEST: 1}
    assert there(broker) == []
    assert feed(broker, ready(A)) == []
    assert there(broker) == [A]


def test_a_reply_is_that_of_the_slot_that_sent_it():  # C18
    broker = broker_with(A, B)
    feed(broker, request(client=b"c1"), request(client=b"c2"))
    assert feed(broker, final(B, b"c1")) == [leave(B)]
    assert feed(broker, final(A, b"c1")) == [answer(client=b"c1"), work(A, b"c2", b'{"attempt":2}')]


def test_a_cancel_goes_to_the_slot():
    broker = broker_with(A, B)
    feed(broker, request(b"1"), request(b"2"))
    assert broker.receive(cancel(b"2"), 0)[1:] == [[*B, b"MDPWX1", b"\x08", b"c", b""]]


@pytest.mark.parametrize("how", ["gone", "unreachable"])
def test_with_its_connection_all_slots_are_lost(how):
    """No request goes to another slot of the same connection, though it would be idle (C17)."""
    broker = broker_with(A, B, BARE)
    assert feed(broker, request(b"1"), request(b"2")) == [work(A), work(B)]
    assert broker.tick(0) == []  # both have got theirs
    sent = broker.gone(b"w", 0) if how == "gone" else broker.unreachable(beat(BARE), 0)
    assert sent == []
    assert (there(broker), broker.registry.queued, broker.stats.lost) == ([], 2, {Loss.UNREACHABLE: 3})
    second, first = work((b"v",), options=b'{"attempt":2}'), work((b"v", b"x", b""), options=b'{"attempt":2}')
    assert feed(broker, ready((b"v",)), ready((b"v", b"x", b""))) == [second, first]


def test_all_slots_of_a_connection_that_is_gone_count_as_not_reached_in_that_round():
    """What is sent in one round is sent in order: of one that is gone none has got what was for it."""
    old = (b"v",), (b"v", b"x", b"")
    broker = broker_with(*old, A, B, max_attempts=2)
    assert feed(broker, request(b"1"), request(b"2")) == list(map(work, old))
    second = b'{"attempt":2}'
    sent = broker.gone(b"v", 0)
    assert sent == [work(A, options=second), work(B, options=second)]
    assert broker.unreachable(sent[1], 0) == []
    assert (broker.stats.dropped, there(broker), broker.registry.queued) == ({}, [], 2)
    assert broker.receive(ready(), 0) == [work(options=second)]  # nobody else has had it


@pytest.mark.parametrize("attempts", [1, 2])
def test_only_what_was_undelivered_is_no_attempt(attempts):
    broker = broker_with(A, B, max_attempts=attempts)
    assert feed(broker, request(b"1")) == [work(A)]
    (to_b,) = broker.receive(request(b"2"), 0)
    sent = broker.unreachable(to_b, 0)
    # The first was at work before; the second has never begun.
    assert [message[:7] for message in sent] == ([lost(b"1")] if attempts == 1 else [])
    again = feed(broker, ready((b"v",)), final((b"v",)))
    assert [message[-2] for message in again if message[1] == b"MDPWX1"] == [b"", b'{"attempt":2}'][:attempts]


def test_a_slot_is_a_worker_for_max_workers():
    broker = broker_with(A, BARE, max_workers=2)
    assert broker.receive(ready(B), 0) == [leave(B)]
    assert broker.stats.disconnected == {Refusal.TOO_MANY_WORKERS: 1}
    assert there(broker) == [A, BARE]


def test_a_reply_over_the_limits_ends_the_request_of_its_slot_only():
    broker = broker_with(A, B, max_message=200)
    feed(broker, request(b"1"), request(b"2"))
    sent = broker.receive(final(B, body=b"x" * 300), 0)
    assert [message[:7] for message in sent] == [[b"c", b"2", b"", b"MDPCX1", b"\x04", b"echo", b"413"]]
    assert broker.receive(final((b"w", b"3", b""), body=b"x" * 300), 0) == []
    assert broker.receive(final(A), 0) == [answer(b"1")]
    assert feed(broker, request(b"3")) == [work(B)]


def test_the_end_of_the_broker_is_told_to_each_slot():
    broker = broker_with(A, BARE)
    assert broker.close(0) == [leave(A), leave(BARE)]


# ── beside other dialects ────────────────────────────────────────────────────────────────────────────────────────────


def test_before_x1_an_envelope_makes_no_other_worker():  # C14
    broker = Broker(now=0)
    assert feed(broker, ready(BARE, header=b"MDPW02"), ready(A, header=b"MDPW02")) == [[*A, b"MDPW02", b"\x06"]]
    assert there(broker) == []
    assert feed(broker, ready(A, header=b"MDPW02"), [b"w", b"MDPW02", b"\x05"]) == []
    assert there(broker) == [A]
    assert feed(broker, [b"w", b"MDPW02", b"\x06"]) == []
    assert there(broker) == []


def test_a_worker_of_mdp_beside_slots():
    """As behind a proxy, which is one connection."""
    broker = broker_with(A)
    assert feed(broker, ready(B, header=b"MDPW02")) == []
    assert there(broker) == [A, B]
    assert feed(broker, request(b"1"), request(b"2")) == [work(A), [*B, b"MDPW02", b"\x02", b"c", b"", b"x"]]
    assert broker.gone(b"w", 0) == []
    assert (there(broker), broker.registry.connections, broker.registry.queued) == ([], {}, 2)


@pytest.mark.parametrize("slot", [A, BARE])
def test_the_dialect_of_a_slot_is_that_of_its_ready(slot):  # C14
    broker = broker_with(slot)
    old = [*slot, b"MDPW02"]
    assert feed(broker, [*old, b"\x05"]) == [[*old, b"\x06"]]
    assert (there(broker), broker.stats.disconnected) == ([], {Refusal.WRONG_DIALECT: 1})
    broker.receive([*old, b"\x01", b"echo"], 0)
    assert feed(broker, beat(slot)) == [leave(slot)]
    assert there(broker) == []


def test_the_dialect_of_a_connection_without_envelopes():
    broker = Broker(now=0)
    feed(broker, [b"w", b"", b"MDPW01", b"\x01", b"echo"])
    assert feed(broker, beat(BARE)) == [leave(BARE)]
    assert there(broker) == []


def test_a_slot_that_leaves_at_once_had_left_before_it_got_the_request():  # C17
    broker = broker_with(BARE, A, B, max_attempts=2)
    feed(broker, request())
    assert feed(broker, leave(BARE), now=0.5) == [work(A, options=b'{"attempt":2}')]  # the first attempt
    assert feed(broker, leave(A), now=0.9) == [work(B, options=b'{"attempt":3}')]  # none
    assert feed(broker, final(B), now=1) == [answer()]


def test_a_slot_that_leaves_later_has_tried():  # C17
    broker = broker_with(A, B, heartbeat=1, liveness=60, max_attempts=1)
    feed(broker, request())
    assert broker.tick(1.1)  # HEARTBEATs, which say nothing about when it got the request
    (told,) = feed(broker, leave(A), now=1.2)
    assert told[:7] == lost()


def test_a_request_that_drives_slots_away_is_not_given_to_them_for_ever():  # C17
    broker = broker_with(A, max_attempts=1)
    sent = feed(broker, request())
    handed = 0
    while sent[-1][: len(A)] == list(A):
        handed += 1
        sent = feed(broker, leave(A), ready(A))
    assert handed == CROSSINGS
    assert sent[-1][:7] == lost()
