"""What ends or can be dispatched together does so over several turns, at the pace at which clients read."""

import pytest
from support import turns
from support.peers import body_of, ready_of, record
from support.x1_messages import (
    answer,
    cancel,
    failure,
    feed,
    final,
    leave,
    partial,
    ready,
    request,
    told,
    work,
)

from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import batch

BOUND = 10
MANY = 95
TTL = Limits().expiry / 2


def new_broker(**limits):
    return Broker(Limits(**limits), now=0, first_address=1, turn_work=BOUND)


def waiting_in(broker, count=MANY, client=b"c", **settings):
    """Have a client make so many requests for a service without a free worker."""
    for number in range(count):
        broker.receive(request(number, client=client, **settings), 0)
    while broker.take_messages() or broker.work_left:
        pass


def client_leaves(broker):
    waiting_in(broker)
    broker.disconnected(b"c", 0, 0)
    return 0


def client_with_running_requests_leaves(broker):
    feed(broker, ready(credit=MANY))
    waiting_in(broker)
    broker.disconnected(b"c", 0, 0)
    return 0


def time_passes(broker):
    waiting_in(broker, ttl=int(TTL * 1000))
    broker.tick(TTL + 1)
    return TTL + 1


def time_passes_before_a_worker_comes(broker):
    waiting_in(broker, ttl=int(TTL * 1000))
    broker.receive(ready(credit=1), TTL)
    return TTL


def last_worker_leaves(broker):
    feed(broker, ready(credit=0))
    waiting_in(broker, wait=False)
    broker.receive(leave(), 0)
    return 0


def service_makes_way(broker):
    waiting_in(broker, service=b"nobody's")
    broker.receive(ready(b"v", b"new"), 0)
    return 0


def broker_closes(broker):
    waiting_in(broker)
    broker.drain(0)
    broker.take_messages()
    broker.close(0)
    return 0


def broker_closes_that_has_running_requests(broker):
    feed(broker, ready(credit=MANY))
    waiting_in(broker)
    broker.drain(0)
    broker.take_messages()
    broker.close(0)
    return 0


ENDS = {
    "client": client_leaves,
    "client with running requests": client_with_running_requests_leaves,
    "ttl": time_passes,
    "ttl in the queue": time_passes_before_a_worker_comes,
    "no worker": last_worker_leaves,
    "no room": service_makes_way,
    "close": broker_closes,
    "close with running requests": broker_closes_that_has_running_requests,
}


@pytest.mark.parametrize("begin", ENDS.values(), ids=ENDS)
def test_a_turn_ends_no_more_than_its_bound(begin):
    broker = new_broker(max_services=1)
    now = begin(broker)
    ended, most = 0, 0
    while True:
        broker.take_messages()
        before, ended = ended, sum(broker.stats.dropped.values())
        most = max(most, ended - before)
        if not broker.work_left:
            break
        assert broker.deadline() <= now
        broker.tick(now)
    assert (ended, most) == (MANY, BOUND)
    registry = broker.registry
    assert (registry.queued, registry.numbered, registry.request_bytes) == (0, [], 0)
    assert broker.stats.internal_errors == 0


def test_a_turn_dispatches_no_more_than_its_bound_of_what_waits():
    broker = new_broker()
    waiting_in(broker)
    sent = told(turns.receive(broker, ready(credit=MANY), 0))
    assert len(sent) == BOUND
    while broker.work_left:
        assert broker.deadline() == 0
        more = told(turns.tick(broker, 0))
        assert len(more) <= BOUND
        sent += more
    assert len(sent) == MANY
    assert (broker.registry.queued, broker.registry.running) == (0, MANY)


def test_other_services_have_their_share_of_a_turn():
    broker = new_broker()
    services = (b"one", b"two", b"three")
    for service in services:
        waiting_in(broker, BOUND, client=service, service=service)
    for service in services:
        broker.receive(ready(service + b"-worker", service, credit=BOUND), 0)
    receivers = {each[0] for each in told(broker.take_messages())}
    assert receivers == {b"one-worker", b"two-worker", b"three-worker"}


def test_others_are_served_while_a_client_ends():
    broker = new_broker()
    feed(broker, ready(b"v", b"other", credit=1))
    waiting_in(broker)
    turns.give_up(broker, b"c", 0)
    assert broker.work_left
    assert feed(broker, request(1, client=b"d", service=b"other")) == [work(1, b"v")]
    assert feed(broker, final(1, b"v")) == [answer(1, client=b"d")]
    assert broker.work_left


def test_a_client_that_comes_with_the_same_id_is_another_one():  # C39
    broker = new_broker()
    feed(broker, ready(credit=MANY + 1))
    waiting_in(broker)
    turns.disconnected(broker, b"c", broker.turn, 0)
    assert broker.work_left
    assert feed(broker, request(0)) == [work(MANY + 1)]
    held = [each for each in broker.directory.workers[b"w"].held.values() if not each.abandoned]
    for attempt in held[:-1]:  # the replies to the one before
        assert answer(attempt.request.number) not in feed(broker, final(attempt.address))
    assert answer(0) in feed(broker, final(held[-1].address))
    while broker.work_left:
        assert turns.tick(broker, 0) == []
    assert (broker.directory.clients, broker.registry.request_bytes) == ({}, 0)


def test_requests_may_wait_again_once_a_worker_has_come():
    broker = new_broker()
    feed(broker, ready(credit=0))
    waiting_in(broker, wait=False)
    assert len(feed(broker, leave())) > BOUND
    feed(broker, ready(b"v", credit=0))
    turns.tick(broker, 0)
    assert not broker.work_left
    assert broker.registry.queued == MANY - BOUND


def test_a_turn_passes_no_more_than_its_bound_on_to_another_broker():  # C44
    broker = new_broker()
    broker.add_link("peer", None, "tcp://x", b"x")
    turns.link_opened(broker, b"x", 0)
    hello = b'{"name":"x","instance":"x","link":1}'
    turns.receive(broker, [b"x", b"MDPWL1", b"\x09", record(4, 1, body_of(hello))], 0)
    broker.federation.links.at(b"x").trusted = True  # else it would get few requests
    waiting_in(broker)
    offer = ready_of(b"echo", MANY, b'{"hops":1,"free":%d}' % MANY)
    broker.receive([b"x", b"MDPWL1", b"\x09", offer], 0)
    passed_on = []
    while broker.work_left:
        batches = [message for message in broker.take_messages() if message[1] == b"MDPCL1"]
        passed_on += [len(list(batch.from_client(message, 1, (b"x", b""), 1000, 1000))) for message in batches]
        broker.tick(0)
    assert (sum(passed_on), max(passed_on)) == (MANY, BOUND)


@pytest.mark.parametrize("reply", [failure, final])
def test_whatever_ends_a_request_of_a_client_that_is_gone_is_for_nobody(reply):
    broker = new_broker()
    feed(broker, ready(credit=MANY))
    waiting_in(broker)
    turns.give_up(broker, b"c", 0)
    held = [each.address for each in broker.directory.workers[b"w"].held.values() if not each.abandoned]
    assert feed(broker, partial(held[0]), reply(held[0])) == []
    assert turns.give_up(broker, b"w", 0) == []
    while broker.work_left:
        assert turns.tick(broker, 0) == []
    assert broker.stats.dropped == {Drop.CLIENT_GONE: MANY}


def closing_with(*workers, **settings):
    """A broker that closes, with requests of which the first worker holds twice as many as end in a turn."""
    broker = new_broker()
    feed(broker, ready(b"first", credit=2 * BOUND))
    waiting_in(broker, 2 * BOUND)
    for worker in workers:
        feed(broker, ready(worker), request(2 * BOUND, **settings))
    broker.drain(0)
    broker.close(0)
    return broker, told(broker.take_messages())


def until_closed(broker):
    sent = []
    while not broker.closed:
        sent += told(turns.tick(broker, 0))
    assert (broker.directory.workers, broker.registry.numbered, broker.stats.internal_errors) == ({}, [], 0)
    return sent


def test_a_worker_may_be_lost_while_it_is_sent_away():
    broker, sent = closing_with()
    sent += told(turns.give_up(broker, b"first", 0))
    sent += until_closed(broker)
    assert sorted(each[2] for each in sent if each[1] == "ERROR") == list(range(2 * BOUND))


def test_what_comes_back_while_the_broker_closes_and_must_not_wait_ends_as_well():
    broker, _ = closing_with(b"second", b"third", wait=False)
    assert broker.directory.workers[b"second"].held
    turns.give_up(broker, b"second", 0)
    assert broker.registry.queued == 1
    sent = until_closed(broker)
    assert [each[3] for each in sent if each[1:3] == ("ERROR", 2 * BOUND)] == [502]


# ── the pace of a client ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_for_which_messages_pile_up_is_told_later_what_has_ended():
    broker = new_broker()
    waiting_in(broker, 3, ttl=5000)
    waiting_in(broker, 3, client=b"d", ttl=5000)
    broker.congested(b"c")
    assert {each[0] for each in told(turns.tick(broker, 6))} == {b"d"}
    assert not broker.work_left
    assert (broker.registry.queued, len(broker.registry.numbered)) == (0, 3)
    assert broker.stats.dropped == {Drop.TTL_PASSED: 3}
    broker.relieved(b"c", 7)
    sent = told(broker.take_messages())
    assert [each[:4] for each in sent] == [(b"c", "ERROR", number, 408) for number in range(3)]
    assert (broker.registry.numbered, broker.registry.request_bytes) == ([], 0)
    assert broker.stats.dropped == {Drop.TTL_PASSED: 6}


def test_it_is_told_at_most_as_much_as_ends_in_a_turn():
    broker = new_broker()
    broker.congested(b"c")
    waiting_in(broker, ttl=5000)
    while broker.work_left or broker.registry.queued:
        assert turns.tick(broker, 6) == []
    broker.relieved(b"c", 6)
    assert len(told(broker.take_messages())) == BOUND
    broker.congested(b"c")
    assert turns.tick(broker, 6) == []
    assert not broker.work_left
    broker.relieved(b"c", 6)
    sent = told(broker.take_messages())
    while broker.work_left:
        sent += told(turns.tick(broker, 6))
    assert len(sent) == MANY - BOUND


def test_what_it_cancels_again_and_again_takes_no_more_memory():
    broker = new_broker()
    feed(broker, ready(), request(1))
    waiting_in(broker, 1)
    broker.congested(b"c")
    for _ in range(3):
        feed(broker, cancel(0), cancel(1))
    (client,) = broker.directory.clients.values()
    assert [each.request.number for each in client.untold] == [0, 1]


@pytest.mark.parametrize("lose", [turns.give_up, lambda *given: turns.disconnected(given[0], given[1], 0, given[2])])
def test_nobody_is_told_when_it_has_left(lose):
    broker = new_broker()
    waiting_in(broker, 3, ttl=5000)
    waiting_in(broker, 1)
    broker.congested(b"c")
    turns.tick(broker, 6)
    feed(broker, cancel(1), now=6)
    assert lose(broker, b"c", 6) == []
    broker.relieved(b"c", 6)
    assert broker.take_messages() == []
    assert (broker.directory.clients, broker.registry.queued, broker.registry.request_bytes) == ({}, 0, 0)


def test_what_a_worker_still_holds_is_forgotten_with_a_client_that_was_not_told():
    broker = new_broker()
    feed(broker, ready(credit=2), request(1), request(2, ttl=1000))
    broker.congested(b"c")
    feed(broker, cancel(1))
    broker.tick(2)
    turns.disconnected(broker, b"c", 0, 2)
    everyone = broker.roles.everyone
    assert (broker.registry.numbered, everyone.request_bytes, everyone.accepted - everyone.ended) == ([], 0, 0)
    feed(broker, final(1), final(2), now=2)
    assert (broker.registry.request_bytes, broker.registry.running) == (0, 0)
    assert broker.stats.internal_errors == 0
