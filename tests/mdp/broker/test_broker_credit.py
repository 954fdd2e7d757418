"""The broker's machine with workers that hold many requests: credit, RELEASE, leaving, suspects, and proxies."""

import pytest
from support import turns
from support import x1_messages as x1
from support.x1_messages import (
    answer,
    beaten,
    cancel,
    credit,
    disconnected,
    failure,
    feed,
    final,
    heartbeat,
    leave,
    partial,
    ready,
    release,
    told,
    turn,
    withdraw,
)

from zmdp.mdp.broker.drops import Drop
from zmdp.mdp.broker.journal import Loss, Refusal
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits


def request(number=1, client=b"c", **settings):
    """A REQUEST whose body is its number."""
    return x1.request(number, client=client, body=b"%d" % number, **settings)


def work(address, number=None, worker=b"w", attempt=1):
    """REQUEST number `number`, which is the address if it is not given."""
    return x1.work(address, worker, body=b"%d" % (number or address), attempt=attempt)


def workers(sent):
    """The workers that are given requests, in the order of the dispatches."""
    return [worker for _, worker in sorted((address, worker) for worker, _, address, *_ in sent)]


def errors(sent):
    """What clients are told in ERRORs, without the texts."""
    return [(each[0], *each[2:4]) for each in sent if each[1] == "ERROR"]


def broker_with(*workers, **limits):
    """A broker at time 0 whose dispatches have the addresses 1, 2, 3 …; `workers` are (name, credit)."""
    broker = Broker(Limits(**limits), now=0, first_address=1)
    assert feed(broker, *[ready(name, credit=credit) for name, credit in workers]) == []
    return broker


def held(broker):
    """The numbers of the requests that each worker holds."""
    return {
        worker.key: [attempt.request.number for attempt in worker.held.values()]
        for worker in broker.directory.workers.values()
    }


def waiting(broker):
    """The numbers of the requests that wait for echo: the suspects, then the others, in the order of their turns."""
    schedule = broker.directory.services[b"echo"].schedule
    return [
        [request.number for each in queue._queues for request in each.requests]
        for queue in (schedule.suspects, schedule.queue)
    ]


# ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_holds_as_many_requests_as_its_credit():
    broker = broker_with((b"w", 3))
    assert feed(broker, *map(request, range(1, 6))) == [work(1), work(2), work(3)]
    assert feed(broker, final(2)) == [answer(2), work(4)]
    assert feed(broker, partial(2)) == []  # it has ended (C32)
    assert feed(broker, final(4), final(3), final(1), final(5)) == [
        answer(4), work(5), answer(3), answer(1), answer(5),
    ]  # fmt: skip
    assert broker.registry.running == 0


def test_a_worker_of_mdp_holds_one_request():  # C6
    broker = Broker(now=0, first_address=1)
    feed(broker, [b"w", b"MDPW02", b"\x01", b"echo"])
    assert len(turn(broker, request(1), request(2))) == 1


def test_a_worker_without_credit_gets_nothing_until_it_gives_some():
    broker = broker_with((b"w", 0))
    assert feed(broker, request(1), request(2)) == []
    assert feed(broker, credit(1)) == [work(1)]
    assert feed(broker, credit(5)) == [work(2)]


def test_less_credit_than_a_worker_holds_takes_nothing_back():
    broker = broker_with((b"w", 3))
    feed(broker, *map(request, range(1, 6)))
    assert feed(broker, credit(1)) == []
    assert held(broker) == {b"w": [1, 2, 3]}
    assert feed(broker, final(1), final(2)) == [answer(1), answer(2)]
    assert feed(broker, final(3)) == [answer(3), work(4)]


@pytest.mark.parametrize("how", [lambda n: ready(credit=n), credit], ids=["READY", "CREDIT"])
def test_credit_is_bounded(how):
    broker = broker_with(*[(b"w", 1)] * (how(1) == credit(1)), max_credit=2)
    feed(broker, how((1 << 32) - 1))
    assert len(feed(broker, *map(request, range(1, 5)))) == 2
    assert broker.directory.workers[b"w"].credit == 2


@pytest.mark.parametrize("message", [credit(2), release(1), failure(1)], ids=["CREDIT", "RELEASE", "ERROR"])
def test_other_commands_of_x1_are_signs_of_life(message):  # C13
    broker = broker_with((b"w", 1), heartbeat=1, liveness=3)
    feed(broker, request(1))
    feed(broker, message, now=2)
    turns.tick(broker, 4.9)
    assert list(broker.directory.workers) == [b"w"]


# ── RELEASE ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_released_request_goes_to_another_worker_and_is_no_attempt():
    broker = broker_with((b"w", 2), (b"v", 1), max_attempts=1)
    assert feed(broker, *map(request, range(1, 4))) == [work(1), work(2, worker=b"v"), work(3)]
    assert feed(broker, final(2, b"v"), release(3)) == [answer(2), work(4, 3, b"v")]
    assert feed(broker, final(4, b"v")) == [answer(3)]
    assert broker.stats.redispatched == 1
    assert broker.stats.dropped == {}


def test_a_request_that_was_released_cannot_be_answered():  # C32
    broker = broker_with((b"w", 1), (b"v", 1))
    feed(broker, request(1), release(1))
    assert held(broker) == {b"w": [], b"v": [1]}
    assert feed(broker, final(1)) == []
    assert broker.stats.late == 1
    assert feed(broker, final(2, b"v")) == [answer(1)]


def test_release_of_what_never_was_held():  # C14
    broker = broker_with((b"w", 1), (b"v", 1))
    assert feed(broker, request(1), release(99)) == [work(1), disconnected(), work(2, 1, b"v", attempt=2)]
    assert broker.stats.disconnected == {Refusal.WRONG_CLIENT: 1}


def test_a_request_that_has_begun_is_not_repeated_when_it_is_released():  # C17
    broker = broker_with((b"w", 1), (b"v", 1))
    feed(broker, request(1), partial(1))
    assert errors(feed(broker, release(1))) == [(b"c", 1, 502)]
    assert broker.stats.dropped == {Drop.LOST_AFTER_PARTIAL: 1}


def test_release_of_what_was_cancelled_frees_the_credit():
    broker = broker_with((b"w", 1))
    feed(broker, request(1), cancel(1), request(2))
    assert feed(broker, release(1)) == [work(2)]


def test_a_released_request_expires_as_one_that_waits():  # C12
    broker = broker_with((b"w", 1), expiry=10, heartbeat=100)
    feed(broker, request(1))
    feed(broker, credit(0), release(1), now=5)
    assert turns.tick(broker, 14.9) == []
    assert errors(told(turns.tick(broker, 15.02))) == [(b"c", 1, 408)]


def test_a_request_that_does_not_wait_is_released_by_the_last_worker_that_leaves():
    broker = broker_with((b"w", 1))
    feed(broker, request(1, wait=False))
    assert feed(broker, leave()) == []
    sent = feed(broker, release(1))
    assert errors(sent) == [(b"c", 1, 404)]
    assert sent[1:] == [disconnected()]


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_worker_that_leaves_is_answered_at_once():
    broker = broker_with((b"w", 4))
    assert feed(broker, leave()) == [disconnected()]
    assert (broker.directory.workers, broker.directory.services) == ({}, {})
    assert broker.stats.lost == {Loss.DISCONNECTED: 1}


def test_a_worker_that_leaves_finishes_what_it_holds():
    broker = broker_with((b"w", 2), (b"v", 1))
    feed(broker, *map(request, range(1, 4)))
    assert feed(broker, leave()) == []
    assert feed(broker, request(4), final(1)) == [answer(1)]
    assert feed(broker, final(3)) == [answer(3), disconnected()]
    assert held(broker) == {b"v": [2]}
    assert waiting(broker) == [[], [4]]
    assert broker.stats.redispatched == 0


def test_a_second_disconnect_changes_nothing():
    broker = broker_with((b"w", 1))
    assert feed(broker, request(1), leave(), leave()) == [work(1)]
    assert feed(broker, final(1), leave()) == [answer(1), disconnected()]


def test_a_worker_that_leaves_is_heartbeated_and_held_to_its_liveness():  # C13, C34
    broker = broker_with((b"w", 1), (b"v", 1), heartbeat=1, liveness=3)
    feed(broker, request(1), leave())
    assert told(turns.tick(broker, 1.06)) == [beaten(), beaten(b"v")]
    feed(broker, heartbeat(b"v"), now=2)
    assert work(2, 1, b"v", attempt=2) in told(turns.tick(broker, 3.1))
    assert broker.stats.lost == {Loss.SILENT: 1}


def test_a_service_whose_workers_all_leave_is_not_there_any_more():  # C26
    broker = broker_with((b"w", 1))
    feed(broker, request(1), leave())
    asked = [b"c", b"MDPC02", b"\x01", b"mmi.service", b"echo"]
    assert feed(broker, asked)[0][-1] == b"404"


# ── CANCEL ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_request_takes_up_credit_until_its_worker_ends_it():
    broker = broker_with((b"w", 2))
    feed(broker, *map(request, range(1, 4)))
    assert feed(broker, cancel(1)) == [x1.error(499, "cancelled"), withdraw(1)]
    assert held(broker) == {b"w": [1, 2]}
    assert feed(broker, failure(1, code=499)) == [work(3)]


# ── suspects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_requests_of_a_worker_that_died_are_placed_again_in_their_order():  # C17
    broker = broker_with((b"w", 3))
    feed(broker, *map(request, range(1, 6)))
    assert turns.gone(broker, b"w", now=0) == []
    assert waiting(broker) == [[1, 2, 3], [4, 5]]
    assert feed(broker, ready(b"v", credit=1)) == [work(4, 1, b"v", attempt=2)]


def test_a_worker_holds_at_most_one_suspect():  # C17
    broker = broker_with((b"w", 3))
    feed(broker, *map(request, range(1, 6)))
    turns.gone(broker, b"w", now=0)
    sent = feed(broker, ready(b"v", credit=4))
    assert sent == [work(4, 1, b"v", attempt=2), work(5, 4, b"v"), work(6, 5, b"v")]
    assert waiting(broker) == [[2, 3], []]
    assert feed(broker, ready(b"u", credit=4)) == [work(7, 2, b"u", attempt=2)]
    assert feed(broker, final(4, b"v")) == [answer(1), work(8, 3, b"v", attempt=2)]


@pytest.mark.parametrize("attempts", [2, 3])
def test_a_poisonous_request_is_dropped_and_its_neighbours_are_not(attempts):  # C17
    """Whichever worker has number 7 dies of it; the first one holds all 64 then."""
    broker = broker_with((b"w0", 64), max_attempts=attempts)
    sent, deaths, done, failed = turn(broker, *map(request, range(1, 65))), 0, set(), set()
    while sent:
        given = {address: body for _, command, address, *_, body in sent if command == "REQUEST"}
        done |= {number for _, command, number, *_ in sent if command == "FINAL"}
        failed |= {number for _, command, number, *_ in sent if command == "ERROR"}
        worker = b"w%d" % deaths
        if b"7" in given.values():
            deaths += 1
            sent = told(turns.gone(broker, worker, now=0)) + feed(broker, ready(b"w%d" % deaths, credit=64))
        else:
            sent = turn(broker, *[final(address, worker) for address in given])
    assert (deaths, failed) == (attempts, {7})
    assert done == set(range(1, 65)) - {7}
    assert broker.stats.dropped == {Drop.WORKERS_LOST: 1}


def test_only_what_was_sent_since_did_not_reach_it():  # C17
    broker = broker_with((b"w", 3))
    feed(broker, request(1))
    missed = broker.turn
    feed(broker, request(2), request(3))
    assert turns.unreachable(broker, b"w", missed, now=0) == []
    assert waiting(broker) == [[1], [2, 3]]


# ── peers behind a proxy ─────────────────────────────────────────────────────────────────────────────────────────────

A, B = (b"p", b"1"), (b"p", b"2")


def test_workers_behind_one_proxy_are_different_workers():  # C36
    broker = broker_with((A, 1), (B, 2), (b"p", 1))
    assert feed(broker, *map(request, range(1, 5))) == [
        work(1, worker=A), work(2, worker=B), work(3, worker=b"p"), work(4, worker=B),
    ]  # fmt: skip
    assert feed(broker, final(2, B), final(1, A)) == [answer(2), answer(1)]
    assert feed(broker, final(3, A)) == []  # C18, C32: it is the other's
    assert broker.stats.late == 1


def test_an_envelope_of_an_empty_frame_is_no_other_worker():  # C36
    broker = broker_with((b"w", 1))
    without = [b"w", *ready()[2:]]
    assert [each[:2] for each in turns.receive(broker, without, 0)] == [[b"w", b"MDPWX1"]]
    assert broker.stats.disconnected == {Refusal.SECOND_READY: 1}
    assert broker.directory.workers == {}


def test_each_worker_behind_a_proxy_has_its_own_heartbeats():  # C13
    broker = broker_with((A, 1), (B, 1), heartbeat=1, liveness=3)
    feed(broker, request(), now=0.9)
    assert told(turns.tick(broker, 1.1)) == [beaten(B)]
    for moment in (2, 3):
        feed(broker, heartbeat(A), now=moment)
        turns.tick(broker, moment + 0.1)
    assert list(broker.directory.workers) == [A]


@pytest.mark.parametrize("how", ["gone", "unreachable"])
def test_with_a_proxy_all_that_is_behind_it_is_lost(how):  # C17
    """No request goes to another worker behind the same proxy, though it would be idle."""
    broker = broker_with((A, 1), (B, 1), (b"p", 1))
    feed(broker, request(1), request(2), request(3, b"d"), request(4, (b"p", b"3")), request(5, (b"p", b"4")))
    if how == "gone":
        assert turns.gone(broker, b"p", now=0) == []
    else:
        assert turns.unreachable(broker, b"p", broker.turn, now=0) == []
    assert (broker.directory.workers, broker.directory.proxies) == ({}, {})
    assert sorted(waiting(broker)[0]) == [1, 2, 3]
    assert broker.stats.lost == {Loss.UNREACHABLE: 3}
    assert broker.stats.dropped == {Drop.CLIENT_GONE: 2}


def test_two_clients_behind_a_proxy_may_use_the_same_number():  # C36
    broker = broker_with((b"w", 2))
    assert feed(broker, request(1, A), request(1, B)) == [work(1), work(2, 1)]
    assert errors(feed(broker, request(1, B))) == [(B, 1, 400)]
    assert feed(broker, final(2), final(1)) == [answer(1, client=B), answer(1, client=A)]
    assert broker.directory.proxies == {}


def test_a_connection_may_be_client_and_worker_and_proxy():
    broker = broker_with((b"p", 1), (A, 1))
    feed(broker, request(1, b"p"), request(2, A), request(3, (b"p", b"9")))
    assert set(broker.directory.proxies[b"p"].peers) == {A, (b"p", b"9")}
    assert feed(broker, final(1, b"p"), final(2, A), final(3, b"p")) == [
        answer(1, client=b"p"), work(3, worker=b"p"), answer(2, client=A), answer(3, client=(b"p", b"9")),
    ]  # fmt: skip
    assert set(broker.directory.proxies[b"p"].peers) == {A}  # the worker is still there
    feed(broker, leave(A))
    assert broker.directory.proxies == {}


# ── the dialect of the client ────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_asks_is_told_the_dialect_of_legacy_clients():  # C37
    broker = broker_with()
    feed(broker, ready(credit=3, dialect=True))
    asked = [b"c", b"MDPC02", b"\x01", b"echo", b"x"], [b"c", b"", b"MDPC01", b"echo", b"x"], request()
    assert [options for _, _, _, _, _, options, _ in feed(broker, *asked)] == [
        b'{"dialect":"0.2"}', b'{"dialect":"0.1"}', b"",
    ]  # fmt: skip
