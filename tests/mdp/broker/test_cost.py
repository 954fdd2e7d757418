"""The cost of a message, counted in lines and calls, does not grow with what the broker holds."""

import gc
import sys
from contextlib import contextmanager

import pytest

from zmdp.mdp import wire
from zmdp.mdp.broker.journal import WORKER_LINES
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.wire import batch


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


def ready_x1(worker, credit=1):
    return [*route(worker), b"MDPWX1", b"\x01", b"echo", b'{"credit":%d}' % credit]


def route(peer):
    """Return the route of a directly connected peer, or of one behind the proxy `p`."""
    return [peer] if isinstance(peer, bytes) else [b"p", *peer, b""]


def numbered(number, client=b"c", service=b"echo", options=b""):
    return [
        *([client] if isinstance(client, bytes) else [b"p", *client]),
        number,
        b"",
        b"MDPCX1",
        b"\x01",
        service,
        options,
        b"x",
    ]


def cancel(number, client=b"c", service=b"echo"):
    return [client, number, b"", b"MDPCX1", b"\x05", service]


def batched(peer, header, *records):
    packed = batch.Batch((peer, b""), header)
    for name, *arguments in records:
        getattr(packed, name)(*arguments)
    return packed.messages()[0]


def broker_with(messages):
    """Return a broker that has received `messages`, and whose log no longer writes a line for each worker."""
    broker = Broker(now=0)
    # The log writes the first WORKER_LINES registrations of a period and counts the others.  Without these workers,
    # a small crowd would be below that bound and a large one above, and the steps would differ in this alone.
    for _ in range(WORKER_LINES):
        broker.receive(ready(b"early"), 0)
        broker.receive([b"early", b"MDPW02", b"\x06"], 0)
    for message in messages:
        broker.receive(message, 0)
    return broker


CROWDS = {
    "idle workers": lambda many: [ready(b"w%d" % n) for n in range(many)],
    "services": lambda many: [ready(b"w%d" % n, b"s%d" % n) for n in range(many)] + [ready(b"w")],
    "busy workers": lambda many: (
        [m for n in range(many) for m in (ready(b"w%d" % n), request(b"c%d" % n))] + [ready(b"w")]
    ),
    "workers behind one proxy": lambda many: [ready(b"w"), *[ready_x1((b"%d" % n,)) for n in range(many)]],
    "busy workers behind one proxy": lambda many: (
        [m for n in range(many) for m in (ready_x1((b"%d" % n,)), request(b"c%d" % n))] + [ready(b"w")]
    ),
    "clients behind one proxy": lambda many: [numbered(b"1", (b"%d" % n,)) for n in range(many)] + [ready(b"w")],
    "requests that one worker holds": lambda many: [
        ready_x1(b"w", 10_000), *[numbered(b"%d" % n) for n in range(many)],
    ],
    "requests that one worker of many holds": lambda many: [
        ready_x1(b"w", 10_000), *[numbered(b"%d" % n) for n in range(many)], *[ready(b"v%d" % n) for n in range(many)],
    ],
    "suspects": lambda many: [
        ready_x1(b"v", 10_000), *[numbered(b"%d" % n) for n in range(many)], ready_x1(b"v"), ready_x1(b"w", 10_000),
    ],
    "requests of one client": lambda many: [request(b"hog") for _ in range(many)] + [ready(b"w")],
    "requests of many clients": lambda many: [request(b"c%d" % n) for n in range(many)] + [ready(b"w")],
    "services asked for": lambda many: [request(b"hog", b"s%d" % n) for n in range(many)] + [ready(b"w")],
    "numbered requests": lambda many: [numbered(b"%d" % n) for n in range(many)] + [ready_x1(b"w")],
    "numbered requests that do not wait": lambda many: (
        [ready_x1(b"w"), *[numbered(b"%d" % n, options=b'{"wait":false}') for n in range(many)]]
    ),
    "numbered requests with a ttl": lambda many: (
        [numbered(b"%d" % n, options=b'{"ttl":60000}') for n in range(many)] + [ready(b"w")]
    ),
    "numbered requests of one client that run": lambda many: (
        [m for n in range(many) for m in (ready_x1(b"w%d" % n), numbered(b"%d" % n))] + [ready(b"w")]
    ),
}  # fmt: skip


def reply_to(broker, sent):
    """Return the FINAL of the worker that has just got a request, or of `w`."""
    registry = broker.registry
    key = sent[0][0] if sent else b"w"
    workers = [worker for worker in registry.workers_at(key) if worker.held]
    worker = max(workers, key=lambda worker: max(worker.held))
    return [*worker.route, worker.header, b"\x04", b"%d" % max(worker.held), b"", b"x"]


def a_request_and_its_reply(broker):
    sent = broker.receive(request(b"new"), 0)
    return sent + broker.receive(the_reply(broker, sent), 0)


def the_reply(broker, sent):
    with uncounted():
        return reply_to(broker, sent)


def a_batch_of_requests_and_replies(broker):
    requests = [("request_to_broker", n, 0, b"other", b"", [b"x"]) for n in range(5)]
    sent = broker.receive(batched(b"new", b"MDPCX1", *requests), 0)
    broker.receive(batched(b"newer", b"MDPWX1", ("ready", 5, b"other", b"")), 0)
    with uncounted():
        held = list(broker.registry.workers[b"newer"].held)
    sent += broker.receive(batched(b"newer", b"MDPWX1", *[("reply", 4, address, [b"x"]) for address in held]), 0)
    return sent + broker.receive([b"newer", b"", b"MDPWX1", b"\x06"], 0)


def a_worker_comes_and_goes(broker):
    sent = broker.receive(ready(b"new"), 0)
    return sent + broker.receive([b"new", b"MDPW02", b"\x06"], 0)


def a_worker_behind_the_proxy_comes_and_goes(broker):
    sent = broker.receive(ready_x1((b"new",)), 0)
    return sent + broker.receive([*ready_x1((b"new",))[:4], b"\x05"], 0)


def a_worker_lives(broker):
    worker = next(iter(broker.registry.workers.values()))
    return broker.receive([*worker.route, worker.header, b"\x05" if worker.header != b"MDPW01" else b"\x04"], 0)


def a_worker_changes_its_credit(broker):
    sent = broker.receive(ready_x1(b"new", 0), 0)
    for credit in (1, 0):
        sent += broker.receive([b"new", b"MDPWX1", b"\x0a", b"%d" % credit], 0)
    return sent


def a_request_is_released(broker):
    sent = broker.receive(ready_x1(b"new"), 0)
    if sent:
        sent += broker.receive([b"new", b"MDPWX1", b"\x0a", b"0"], 0)
        sent += broker.receive([b"new", b"MDPWX1", b"\x0b", sent[0][3], b""], 0)
    return sent


def a_client_goes(broker):
    broker.receive(request(b"new", b"nobody"), 0)
    return broker.gone(b"new", 0)


def nothing_is_due(broker):
    return [broker.deadline(), *broker.tick(0.5)]


def a_numbered_request_fails(broker):
    sent = broker.receive(numbered(b"new", b"new", options=b'{"ttl":60000,"key":1}'), 0)
    if sent and b"MDPWX1" in sent[0][:4]:
        at = sent[0].index(b"MDPWX1")
        sent += broker.receive([*sent[0][:at], b"MDPWX1", b"\x07", sent[0][at + 2], b"", b"500", b"text"], 0)
    return sent


def a_numbered_request_is_cancelled(broker):
    sent = broker.receive(numbered(b"new", b"new"), 0)
    return sent + broker.receive(cancel(b"new", b"new"), 0)


def a_cancel_of_nothing(broker):
    return broker.receive(cancel(b"never"), 0)


def a_client_asks_for_a_sign_of_life(broker):
    return broker.receive([b"c", b"", b"MDPCX1", b"\x06"], 0)


def garbage(broker):
    return broker.receive([b"c1", b"?"], 0)


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
    "of one client": lambda many: [numbered(b"%d" % n) for n in range(many)],
    "of many clients": lambda many: [numbered(b"%d" % n, b"c%d" % n) for n in range(many)],
    "of many services": lambda many: [numbered(b"%d" % n, b"c%d" % n, b"s%d" % n) for n in range(many)],
    "with a ttl each": lambda many: (
        [numbered(b"%d" % n, options=b'{"ttl":%d}' % (60_000 + 20 * n)) for n in range(many)]
    ),
    "that do not wait": lambda many: (
        [ready_x1(b"w"), request(b"d"), *[numbered(b"%d" % n, options=b'{"wait":false}') for n in range(many)]]
    ),
    "that one worker holds": lambda many: [ready_x1(b"w", 10_000), *[numbered(b"%d" % n) for n in range(many)]],
    "that run": lambda many: [m for n in range(many) for m in (ready_x1(b"w%d" % n), numbered(b"%d" % n))],
}


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_the_cost_of_a_cancel_does_not_depend_on_the_queue(queue):
    def costs(many):
        messages = queue(many)
        broker = broker_with(messages)
        waiting = [message for message in messages if message[3:4] == [b"MDPCX1"]]
        client, number, _, _, _, service, *_ = waiting[len(waiting) // 2]
        wire.valid_service(service)  # so that the name is cached in every case
        steps, sent = steps_of(lambda broker: broker.receive(cancel(number, client, service), 0), broker)
        return steps, len(sent)

    costs(FEW)  # warm-up: fills caches
    assert costs(5 * MANY) == costs(FEW)
