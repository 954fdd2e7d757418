"""The cost of a message does not grow with what the broker holds: counted in lines and calls, not in time."""

import gc
import sys

import pytest

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


def final(worker, client):
    return [worker, b"MDPW02", b"\x04", client, b"", b"x"]


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
    "requests of one client": lambda many: [request(b"hog") for _ in range(many)] + [ready(b"w")],
    "requests of many clients": lambda many: [request(b"c%d" % n) for n in range(many)] + [ready(b"w")],
    "services asked for": lambda many: [request(b"hog", b"s%d" % n) for n in range(many)] + [ready(b"w")],
}


def a_request_and_its_reply(broker):
    sent = broker.receive(request(b"new"), 0)
    worker = sent[0][0] if sent else b"w"
    client = broker.registry.workers[worker].request.client
    return sent + broker.receive(final(worker, client), 0)


def a_worker_comes_and_goes(broker):
    sent = broker.receive(ready(b"new"), 0)
    return sent + broker.receive([b"new", b"MDPW02", b"\x06"], 0)


def a_worker_lives(broker):
    return broker.receive([next(iter(broker.registry.workers)), b"MDPW02", b"\x05"], 0)


def a_client_goes(broker):
    broker.receive(request(b"new", b"nobody"), 0)
    return broker.gone(b"new", 0)


def nothing_is_due(broker):
    return [broker.deadline(), *broker.tick(0.5)]


def garbage(broker):
    return broker.receive([b"c1", b"?"], 0)


@pytest.mark.parametrize(
    "happens",
    [a_request_and_its_reply, a_worker_comes_and_goes, a_worker_lives, a_client_goes, nothing_is_due, garbage],
)
@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_what_happens_costs_the_same_however_much_there_is(crowd, happens):
    steps_of(happens, broker_with(crowd(10)))  # what is done only once is done
    steps, sent = steps_of(happens, broker_with(crowd(10)))
    assert steps > 0
    assert steps_of(happens, broker_with(crowd(2000))) == (steps, sent)
