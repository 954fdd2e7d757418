"""The cost of a message, counted in lines and calls, does not grow with what the broker holds."""

import gc
import sys
from contextlib import contextmanager

import pytest
from support import turns
from support import x1_messages as x1
from support.x1_messages import cancel, client_heartbeat, credit, failure, final, heartbeat, leave, release, together

from zmdp.mdp.broker.core.journal import WORKER_LINES
from zmdp.mdp.broker.machine import Broker


class _Counter:
    """Counts the lines that run and the builtin functions that are called."""

    def __init__(self):
        self.steps = 0

    def trace(self, frame, event, argument):
        self.steps += event == "line"
        return self.trace

    def profile(self, frame, event, argument):
        self.steps += event == "c_call"


FEW, MANY = 10, 400
"""The sizes of two crowds.  Steps are compared exactly, so any growth shows, and larger ones would only take longer."""


def steps_of(function, broker):
    """Return the number of steps of `function(broker)`, and its result."""
    counter = _Counter()
    before = sys.gettrace(), sys.getprofile()
    gc.disable()  # its callbacks, such as those of Hypothesis, would be counted
    sys.settrace(counter.trace)
    sys.setprofile(counter.profile)
    try:
        result = function(broker)
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        gc.enable()
    return counter.steps, result


@contextmanager
def uncounted():
    """Do not count what a test does to find out what to send."""
    trace, profile = sys.gettrace(), sys.getprofile()
    sys.settrace(None)
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.settrace(trace)
        sys.setprofile(profile)


def ready(worker, service=b"echo"):
    return [worker, b"MDPW02", b"\x01", service]


def request(client, service=b"echo"):
    return [client, b"MDPC02", b"\x01", service, b"x"]


def ready_x1(worker, credit=1, **options):
    return x1.ready(worker, credit=credit, **options)


def numbered(number, client=b"c", service=b"echo", **settings):
    return x1.request(number, client=client, service=service, **settings)


def broker_with(messages):
    """Return a broker that has received `messages`, and whose log no longer writes a line for each worker."""
    broker = Broker(now=-0.2)
    # The log writes the first WORKER_LINES registrations of a period and counts the others.  Without these workers,
    # a small crowd would be below that bound and a large one above, and the steps would differ in this alone.
    for _ in range(WORKER_LINES):
        turns.receive(broker, ready(b"early"), -0.2)
        turns.receive(broker, [b"early", b"MDPW02", b"\x06"], -0.2)
    for message in messages:
        turns.receive(broker, message, -0.2)
    turns.tick(broker, -0.1)  # the workers are told that they are registered
    return broker


CROWDS = {
    "idle workers": lambda many: [ready(b"w%d" % n) for n in range(many)],
    "services": lambda many: [ready(b"w%d" % n, b"s%d" % n) for n in range(many)] + [ready(b"w")],
    "busy workers": lambda many: (
        [m for n in range(many) for m in (ready(b"w%d" % n), request(b"c%d" % n))] + [ready(b"w")]
    ),
    "workers behind one proxy": lambda many: [ready(b"w"), *[ready_x1((b"p", b"%d" % n)) for n in range(many)]],
    "busy workers behind one proxy": lambda many: (
        [m for n in range(many) for m in (ready_x1((b"p", b"%d" % n)), request(b"c%d" % n))] + [ready(b"w")]
    ),
    "clients behind one proxy": lambda many: [numbered(1, (b"p", b"%d" % n)) for n in range(many)] + [ready(b"w")],
    "requests that one worker holds": lambda many: [
        ready_x1(b"w", 10_000), *[numbered(n) for n in range(many)],
    ],
    "requests that one worker of many holds": lambda many: [
        ready_x1(b"w", 10_000), *[numbered(n) for n in range(many)], *[ready(b"v%d" % n) for n in range(many)],
    ],
    "suspects": lambda many: [
        ready_x1(b"v", 10_000), *[numbered(n) for n in range(many)], ready_x1(b"v"), ready_x1(b"w", 10_000),
    ],
    "requests of one client": lambda many: [request(b"hog") for _ in range(many)] + [ready(b"w")],
    "requests of many clients": lambda many: [request(b"c%d" % n) for n in range(many)] + [ready(b"w")],
    "services asked for": lambda many: [request(b"hog", b"s%d" % n) for n in range(many)] + [ready(b"w")],
    "numbered requests": lambda many: [numbered(n) for n in range(many)] + [ready_x1(b"w")],
    "numbered requests that do not wait": lambda many: (
        [ready_x1(b"w"), *[numbered(n, wait=False) for n in range(many)]]
    ),
    "numbered requests with a ttl": lambda many: (
        [numbered(n, ttl=60_000) for n in range(many)] + [ready(b"w")]
    ),
    "numbered requests of one client that run": lambda many: (
        [m for n in range(many) for m in (ready_x1(b"w%d" % n), numbered(n))] + [ready(b"w")]
    ),
    "requests that the limit of their service holds back": lambda many: (
        [ready_x1(b"w", 10_000, limits={"service": {"concurrency": 1}})]
        + [numbered(n, group=f"g{n % 5}") for n in range(many)]
    ),
    "groups that the limit of their service holds back": lambda many: (
        [ready_x1(b"w", 10_000, limits={"service": {"rate": "1/h"}})]
        + [numbered(n, group=f"g{n}") for n in range(many)]
    ),
    "groups that their own limits hold back": lambda many: (
        [ready_x1(b"w", 10_000, limits={"group": {"concurrency": 1}})]
        + [numbered(2 * n + again, group=f"g{n}") for n in range(many) for again in (0, 1)]
    ),
    "groups that take turns": lambda many: [numbered(n, group=f"g{n}") for n in range(many)] + [ready(b"w")],
}  # fmt: skip


def reply_to(broker, sent):
    """Return the FINAL of the worker that has just got a request, or of `w`."""
    directory = broker.directory
    key = sent[0][0] if sent else b"w"
    workers = [worker for worker in directory.workers_at(key) if worker.held]
    worker = max(workers, key=lambda worker: max(worker.held))
    if worker.header == b"MDPWX1":
        return final(max(worker.held), worker.key)
    return [*worker.route, worker.header, b"\x04", b"%d" % max(worker.held), b"", b"x"]


def a_request_and_its_reply(broker):
    sent = turns.receive(broker, request(b"new"), 0)
    return sent + turns.receive(broker, the_reply(broker, sent), 0)


def the_reply(broker, sent):
    with uncounted():
        return reply_to(broker, sent)


def a_batch_of_requests_and_replies(broker):
    sent = turns.receive(broker, together(*[numbered(n, b"new", b"other") for n in range(5)]), 0)
    turns.receive(broker, x1.ready(b"newer", b"other", credit=5), 0)
    with uncounted():
        held = list(broker.directory.workers[b"newer"].held)
    sent += turns.receive(broker, together(*[final(address, b"newer") for address in held]), 0)
    return sent + turns.receive(broker, leave(b"newer"), 0)


def a_worker_comes_and_goes(broker):
    sent = turns.receive(broker, ready(b"new"), 0)
    return sent + turns.receive(broker, [b"new", b"MDPW02", b"\x06"], 0)


def a_worker_behind_the_proxy_comes_and_goes(broker):
    sent = turns.receive(broker, ready_x1((b"p", b"new")), 0)
    return sent + turns.receive(broker, leave((b"p", b"new")), 0)


def a_worker_lives(broker):
    worker = next(iter(broker.directory.workers.values()))
    if worker.header == b"MDPWX1":
        return turns.receive(broker, heartbeat(worker.key), 0)
    return turns.receive(broker, [*worker.route, worker.header, b"\x05"], 0)


def a_worker_changes_its_credit(broker):
    sent = turns.receive(broker, ready_x1(b"new", 0), 0)
    for value in (1, 0):
        sent += turns.receive(broker, credit(value, b"new"), 0)
    return sent


def a_request_is_released(broker):
    sent = turns.receive(broker, ready_x1(b"new"), 0)
    if sent:
        sent += turns.receive(broker, credit(0, b"new"), 0)
        sent += turns.receive(broker, release(address_in(sent), b"new"), 0)
    return sent


def address_in(sent):
    """Return the address in the first REQUEST."""
    with uncounted():
        return x1.told(sent)[0][2]


def a_client_goes(broker):
    turns.receive(broker, request(b"new", b"nobody"), 0)
    return turns.give_up(broker, b"new", 0)


def nothing_is_due(broker):
    return [broker.deadline(), *turns.tick(broker, 0.5)]


NEW = 1 << 40
"""A number that no request of a crowd has."""


def a_numbered_request_fails(broker):
    sent = turns.receive(broker, numbered(NEW, b"new", ttl=60_000, key=1), 0)
    if sent and b"MDPWX1" in sent[0][:4]:
        with uncounted():
            worker, _, address, *_ = x1.told(sent)[0]
        sent += turns.receive(broker, failure(address, worker), 0)
    return sent


def a_numbered_request_is_cancelled(broker):
    sent = turns.receive(broker, numbered(NEW, b"new"), 0)
    return sent + turns.receive(broker, cancel(NEW, client=b"new"), 0)


def a_cancel_of_nothing(broker):
    return turns.receive(broker, cancel(NEW), 0)


def a_client_asks_for_a_sign_of_life(broker):
    return turns.receive(broker, client_heartbeat(), 0)


def garbage(broker):
    return turns.receive(broker, [b"c1", b"?"], 0)


@pytest.mark.parametrize(
    "happens",
    [
        a_request_and_its_reply, a_batch_of_requests_and_replies, a_worker_comes_and_goes,
        a_worker_behind_the_proxy_comes_and_goes, a_worker_lives, a_worker_changes_its_credit, a_request_is_released,
        a_client_goes, nothing_is_due, garbage,
        a_numbered_request_fails, a_numbered_request_is_cancelled, a_cancel_of_nothing,
        a_client_asks_for_a_sign_of_life,
    ],
)  # fmt: skip
@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_the_cost_of_an_event_does_not_depend_on_the_crowd(crowd, happens):
    def costs(many):
        steps, sent = steps_of(happens, broker_with(crowd(many)))
        return steps, len(sent)

    costs(FEW)  # warm-up: fills caches
    steps, sent = costs(FEW)
    assert steps > 0
    assert costs(MANY) == (steps, sent)


QUEUES = {
    "of one client": lambda many: [numbered(n) for n in range(many)],
    "of many clients": lambda many: [numbered(n, b"c%d" % n) for n in range(many)],
    "of many services": lambda many: [numbered(n, b"c%d" % n, b"s%d" % n) for n in range(many)],
    "with a ttl each": lambda many: ([numbered(n, ttl=60_000 + 20 * n) for n in range(many)]),
    "that do not wait": lambda many: ([ready_x1(b"w"), request(b"d"), *[numbered(n, wait=False) for n in range(many)]]),
    "that one worker holds": lambda many: [ready_x1(b"w", 10_000), *[numbered(n) for n in range(many)]],
    "that run": lambda many: [m for n in range(many) for m in (ready_x1(b"w%d" % n), numbered(n))],
}


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_the_cost_of_a_cancel_does_not_depend_on_the_queue(queue):
    def costs(many):
        broker = broker_with(queue(many))
        numbered = broker.registry.numbered
        request = numbered[len(numbered) // 2]
        message = cancel(request.number, client=request.client.key)
        steps, sent = steps_of(lambda broker: turns.receive(broker, message, 0), broker)
        return steps, len(sent)

    costs(FEW)  # warm-up: fills caches
    assert costs(5 * MANY) == costs(FEW)
