"""The cost of a message does not grow with what the broker holds: counted in lines and calls, not in time."""

import gc
import sys

import pytest

from zmdp.mdp import wire
from zmdp.mdp.broker import Broker


def steps_of(function, broker):
    """How many lines run and builtin functions are called in `function(broker)`, and what it returns."""
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        steps += event == "line"
        return trace

    def profile(frame, event, argument):
        nonlocal steps
        steps += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    gc.disable()  # others, Hypothesis for one, have functions that it calls
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        result = function(broker)
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        gc.enable()
    return steps, result


def ready(worker, service=b"echo"):
    return [worker, b"MDPW02", b"\x01", service]


def request(client, service=b"echo"):
    return [client, b"MDPC02", b"\x01", service, b"x"]


def ready_x1(worker):
    return [worker, b"MDPWX1", b"\x01", b"echo"]


def slot(number, connection=b"w"):
    return [connection, number, b"", b"MDPWX1", b"\x01", b"echo"]


def numbered(number, client=b"c", service=b"echo", options=b""):
    return [client, number, b"", b"MDPCX1", b"\x01", service, options, b"x"]


def cancel(number, client=b"c", service=b"echo"):
    return [client, number, b"", b"MDPCX1", b"\x05", service]


def broker_with(messages):
    broker = Broker(now=0)
    for message in messages:
        broker.receive(message, 0)
    return broker


CROWDS = {
    "idle workers": lambda many: [ready(b"w%d" % n) for n in range(many)],
    "services": lambda many: [ready(b"w%d" % n, b"s%d" % n) for n in range(many)] + [ready(b"w")],
    "busy workers": lambda many: (
        [m for n in range(many) for m in (ready(b"w%d" % n), request(b"c%d" % n))] + [ready(b"w")]
    ),
    "slots of one connection": lambda many: [ready(b"w"), *[slot(b"%d" % n) for n in range(many)]],
    "busy slots of one connection": lambda many: (
        [m for n in range(many) for m in (slot(b"%d" % n), request(b"c%d" % n))] + [ready(b"w")]
    ),
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
}


def a_request_and_its_reply(broker):
    sent = broker.receive(request(b"new"), 0)
    route = (b"w",)
    if sent:
        route = next(route for route in (tuple(sent[0][:1]), tuple(sent[0][:3])) if route in broker.registry.workers)
    known = broker.registry.workers[route]
    return sent + broker.receive([*route, known.header, b"\x04", known.request.client.identity, b"", b"x"], 0)


def a_worker_comes_and_goes(broker):
    sent = broker.receive(ready(b"new"), 0)
    return sent + broker.receive([b"new", b"MDPW02", b"\x06"], 0)


def a_worker_lives(broker):
    worker = next(iter(broker.registry.workers.values()))
    return broker.receive([*worker.route, worker.header, b"\x05"], 0)


def a_slot_comes_and_goes(broker):
    sent = broker.receive(slot(b"new"), 0)
    return sent + broker.receive([b"w", b"new", b"", b"MDPWX1", b"\x06"], 0)


def a_client_goes(broker):
    broker.receive(request(b"new", b"nobody"), 0)
    return broker.gone(b"new", 0)


def nothing_is_due(broker):
    return [broker.deadline(), *broker.tick(0.5)]


def a_numbered_request_fails(broker):
    sent = broker.receive(numbered(b"new", b"new", options=b'{"ttl":60000,"key":1}'), 0)
    if sent and b"MDPWX1" in sent[0][:4]:
        route = sent[0][: sent[0].index(b"MDPWX1")]
        sent += broker.receive([*route, b"MDPWX1", b"\x07", b"new", b"", b"500", b"text"], 0)
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
        a_request_and_its_reply, a_worker_comes_and_goes, a_slot_comes_and_goes, a_worker_lives, a_client_goes,
        nothing_is_due, garbage,
        a_numbered_request_fails, a_numbered_request_is_cancelled, a_cancel_of_nothing,
        a_client_asks_for_a_sign_of_life,
    ],
)  # fmt: skip
@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_what_happens_costs_the_same_however_much_there_is(crowd, happens):
    steps_of(happens, broker_with(crowd(10)))  # what is done only once is done
    steps, sent = steps_of(happens, broker_with(crowd(10)))
    assert steps > 0
    assert steps_of(happens, broker_with(crowd(2000))) == (steps, sent)


QUEUES = {
    "of one client": lambda many: [numbered(b"%d" % n) for n in range(many)],
    "of many clients": lambda many: [numbered(b"%d" % n, b"c%d" % n) for n in range(many)],
    "of many services": lambda many: [numbered(b"%d" % n, service=b"s%d" % n) for n in range(many)],
    "with a ttl each": lambda many: (
        [numbered(b"%d" % n, options=b'{"ttl":%d}' % (60_000 + 20 * n)) for n in range(many)]
    ),
    "that do not wait": lambda many: (
        [ready_x1(b"w"), request(b"d"), *[numbered(b"%d" % n, options=b'{"wait":false}') for n in range(many)]]
    ),
    "that run": lambda many: [m for n in range(many) for m in (ready_x1(b"w%d" % n), numbered(b"%d" % n))],
}


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_a_cancel_in_the_middle_costs_the_same_however_many_there_are(queue):
    def costs(many):
        messages = queue(many)
        broker = broker_with(messages)
        waiting = [message for message in messages if message[3:4] == [b"MDPCX1"]]
        client, number, _, _, _, service, *_ = waiting[len(waiting) // 2]
        wire.valid_service(service)  # it may be remembered or not
        steps, sent = steps_of(lambda broker: broker.receive(cancel(number, client, service), 0), broker)
        return steps, [message[-2] for message in sent]

    costs(10)  # what is done only once is done
    assert costs(10_000) == costs(10)
