"""The broker's machine with workers that hold many requests: credit, RELEASE, leaving, suspects, and proxies."""

import pytest
from support import turns
from support import x1_messages as x1
from support.x1_messages import (
    answer,
    cancel,
    disconnected,
    feed,
    final,
    leave,
    ready,
    release,
    told,
    turn,
)

from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits


def request(number=1, client=b"c", **settings):
    """A REQUEST whose body is its number."""
    return x1.request(number, client=client, body=b"%d" % number, **settings)


def work(address, number=None, worker=b"w", attempt=1):
    """REQUEST number `number`, which is the address if it is not given."""
    return x1.work(address, worker, body=b"%d" % (number or address), attempt=attempt)


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


# ── RELEASE ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_was_released_cannot_be_answered():  # C32
    broker = broker_with((b"w", 1), (b"v", 1))
    feed(broker, request(1), release(1))
    assert held(broker) == {b"w": [], b"v": [1]}
    assert feed(broker, final(1)) == []
    assert broker.stats.late == 1
    assert feed(broker, final(2, b"v")) == [answer(1)]


def test_release_of_what_was_cancelled_frees_the_credit():
    broker = broker_with((b"w", 1))
    feed(broker, request(1), cancel(1), request(2))
    assert feed(broker, release(1)) == [work(2)]


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_disconnect_changes_nothing():
    broker = broker_with((b"w", 1))
    assert feed(broker, request(1), leave(), leave()) == [work(1)]
    assert feed(broker, final(1), leave()) == [answer(1), disconnected()]


# ── suspects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
            sent = told(turns.give_up(broker, worker, now=0)) + feed(broker, ready(b"w%d" % deaths, credit=64))
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
    assert turns.disconnected(broker, b"w", missed, now=0) == []
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


def test_two_clients_behind_a_proxy_may_use_the_same_number():  # C36
    broker = broker_with((b"w", 2))
    assert feed(broker, request(1, A), request(1, B)) == [work(1), work(2, 1)]
    assert errors(feed(broker, request(1, B))) == [(B, 1, 400)]
    assert feed(broker, final(2), final(1)) == [answer(1, client=B), answer(1, client=A)]
    assert broker.directory.proxies == {}


def test_a_worker_that_asks_is_told_the_dialect_of_legacy_clients():  # C37
    broker = broker_with()
    feed(broker, ready(credit=3, dialect=True))
    asked = [b"c", b"MDPC02", b"\x01", b"echo", b"x"], [b"c", b"", b"MDPC01", b"echo", b"x"], request()
    assert [options for _, _, _, _, _, options, _ in feed(broker, *asked)] == [
        b'{"dialect":"0.2"}', b'{"dialect":"0.1"}', b"",
    ]  # fmt: skip
