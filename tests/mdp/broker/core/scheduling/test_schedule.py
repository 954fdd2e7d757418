"""Which request goes to which worker: fair queues, pools of workers, and the schedule of a service made of both."""

import pytest

from zmdp.mdp.broker.core.records import Attempt, Client, Request, Service, Way, Worker
from zmdp.mdp.broker.core.roles import Role
from zmdp.mdp.broker.core.scheduling.fair_queue import FairQueue, Tally
from zmdp.mdp.broker.core.scheduling.schedule import Pool, Schedule
from zmdp.mdp.wire import C02, WX1

SERVICE = Service(b"echo")
EVERYONE = Role()


class Crowd:
    """Requests of clients that are known by their names, and workers."""

    def __init__(self):
        self.clients = {}
        self.count = 0

    def request(self, client, body=b"x", *, attempts=0):
        known = self.clients.setdefault(client, Client(client, EVERYONE))
        made = Request(known, C02, SERVICE, [body])
        made.attempts = attempts
        return made

    def pinned(self, client, body=b"x"):
        """A request that is addressed to this broker."""
        made = self.request(client, body)
        made.way = Way()
        made.way.pinned = True
        return made

    def worker(self, credit, *, load=0, suspects=0):
        self.count += 1
        made = Worker((b"w%d" % self.count,), WX1, SERVICE, EVERYONE, credit=credit, id=self.count, now=0)
        for address in range(load):
            made.held[address] = Attempt(self.request(b"c"), made, address, 0, doubtful=False)
        made.suspects = suspects
        return made


@pytest.fixture
def crowd():
    return Crowd()


# ── FairQueue ────────────────────────────────────────────────────────────────────────────────────────────────────────


def queue_of(crowd, waiting):
    """A queue to which each (client, body) was added in that order."""
    queue = FairQueue(Tally())
    for client, body in waiting:
        queue.append(crowd.request(client, body))
    return queue


def taken(queue):
    """The bodies of all that wait, in the order in which turns come."""
    return b"".join(queue.take().body[0] for _ in range(queue.size))


def test_clients_take_turns(crowd):  # C20
    queue = queue_of(crowd, [(b"c", b"1"), (b"c", b"2"), (b"c", b"3"), (b"d", b"x"), (b"e", b"y"), (b"d", b"z")])
    assert queue.size == 6
    assert taken(queue) == b"1xy2z3"
    assert queue.size == 0


# ── Pool ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loads", [(255, 256, 257), (0, 65_536), (511, 512, 768, 20_000)])
def test_loads_of_several_groups(crowd, loads):  # C21
    pool = Pool()
    workers = [crowd.worker(1) for _ in loads]
    for worker, load in reversed([*zip(workers, loads, strict=True)]):
        pool.add(worker, load)
    for worker, load in zip(workers, loads, strict=True):
        assert pool.least() is worker
        pool.remove(worker, load)
    assert pool.least() is None
    pool.add(workers[0], loads[-1])
    assert pool.least() is workers[0]


# ── Schedule ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_schedule_counts_free_credit(crowd):
    schedule = Schedule()
    one, two = crowd.worker(3), crowd.worker(5, load=5)
    for worker in (one, two):
        schedule.update(worker)
    assert (schedule.capacity, schedule.free) == (3, 1)
    two.credit = 7
    schedule.update(two)
    assert (schedule.capacity, schedule.free) == (5, 2)
    two.credit = 1  # less than it holds
    schedule.update(two)
    assert (schedule.capacity, schedule.free) == (3, 1)
    one.leaving = True
    schedule.update(one)
    assert (schedule.capacity, schedule.free, schedule.next_worker()) == (0, 0, None)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("warm", [False, True])
def test_with_equal_loads_the_least_recently_used_or_if_they_are_warm_the_most(crowd, first, warm):  # C21
    schedule = Schedule()
    workers = [crowd.worker(9, load=1), crowd.worker(9, load=1, suspects=1)]
    for worker in (workers[first], workers[1 - first]):
        worker.warm = warm
        schedule.update(worker)
    assert schedule.next_worker() is workers[1 - first if warm else first]


@pytest.mark.parametrize("suspects", [0, 1])
def test_a_warm_worker_goes_before_one_that_has_failed(crowd, suspects):  # C21
    schedule = Schedule()
    warm, failed = crowd.worker(9, load=1), crowd.worker(9, load=1, suspects=suspects)
    warm.warm = True
    for worker in (failed, warm, failed):
        schedule.update(worker)
        assert schedule.next_worker() is (warm if warm.pool else failed)


def put(schedule, request):
    schedule.append(request)
    return request


def test_suspects_go_first_and_to_workers_that_hold_none(crowd):  # C17
    schedule = Schedule()
    suspicious, clean = crowd.worker(9, load=1, suspects=1), crowd.worker(9, load=5)
    schedule.update(suspicious)
    schedule.update(clean)
    plain, suspect = put(schedule, crowd.request(b"c")), put(schedule, crowd.request(b"c", attempts=1))
    assert schedule.next_pair(0) == (suspect, clean)
    assert schedule.next_pair(0) == (plain, suspicious)
    assert schedule.waiting == 0


def test_requests_that_are_addressed_to_this_broker_take_turns_with_others(crowd):  # C44
    schedule = Schedule()
    schedule.update(crowd.worker(9))
    for body in (b"1", b"2", b"3"):
        put(schedule, crowd.request(b"c", body))
    for body in (b"a", b"b", b"c", b"d", b"e"):
        put(schedule, crowd.pinned(b"d", body))
    assert schedule.waiting == 8
    assert b"".join(schedule.next_pair(0)[0].body[0] for _ in range(8)) == b"a1b2c3de"
    assert schedule.next_pair(0) is None
