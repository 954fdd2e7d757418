"""The requests in flight, those that have ended, and slow ones, compared as whole values."""

import json
import logging

import pytest
from support import turns
from support import x1_messages as x1
from support.x1_messages import cancel, leave, ready, request, told, withdraw

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.broker.operators import watch
from zmdp.mdp.broker.operators.recent import (
    DEFAULT_LIMIT,
    KEPT,
    MAX_AT_ONCE,
    MAX_FAILURES,
    MAX_TAIL_ROWS,
    MAX_TAILS,
    MAX_TEXT,
)
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mmi import answers

FIRST = 1000
"""The address of the first dispatch."""
NAMED = b'{"headers":{"request-id":"order 7\\n"}}'


def final(address=FIRST, worker=b"w"):
    return x1.final(address, worker)


def failure(address=FIRST, worker=b"w"):
    return x1.failure(address, worker)


def old(client=b"old", service=b"echo", body=b"old"):
    return [client, b"MDPC02", b"\x01", service, body]


class World:
    """A broker with a clock, and an administrator who asks it."""

    def __init__(self, **settings):
        self.now = 100.0
        self.broker = Broker(**settings, now=self.now, first_address=FIRST)
        self.asked = 0

    def after(self, seconds, *messages):
        """Pass messages to the broker after that time; return what it sends."""
        self.now += seconds
        return [sent for message in messages for sent in turns.receive(self.broker, message, self.now)]

    def ask(self, name, body=b"", *, role=None, asker=b"admin"):
        """Return what the administrator is answered, and what else is sent because of it."""
        self.asked += 1
        question = request(self.asked, client=asker, service=name, body=body)
        sent = told(turns.receive(self.broker, question, self.now, role))
        (answer,) = [each for each in sent if each[0] == asker]
        others = [each for each in sent if each[0] != asker]
        return answer, others

    def json(self, name, body=b""):
        (_, command, _, frame), _ = self.ask(name, body)
        assert command == "FINAL"
        return json.loads(frame)

    def requests(self, service=b""):
        return self.json(b"mmi.requests", service)["requests"]

    def tail(self, **options):
        return self.json(b"mmi.tail", json.dumps(options).encode())


@pytest.fixture
def world():
    return World()


# ── in flight ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_that_run_and_that_wait_are_listed(world):
    world.after(0, ready(), request(1, body=b"body", options=NAMED))
    world.after(1, request(2, client=b"d", body=b"12345", ttl=5000, group="g"))
    world.after(2, old(service=b"none"))
    running, waiting, unserved = world.requests()
    assert running == {
        "id": f"{FIRST}", "request_id": "order?7?", "service": "echo", "group": "", "state": "running",
        "age_seconds": 3.0, "state_seconds": 3.0, "role": "", "client": running["client"], "protocol": "X1",
        "worker": 1, "broker": None, "attempts": 1, "ttl_seconds": None, "bytes": 4,
    }  # fmt: skip
    assert waiting == {
        "id": f"{FIRST}-1", "request_id": None, "service": "echo", "group": "g", "state": "waiting", "age_seconds": 2.0,
        "state_seconds": 2.0, "role": "", "client": waiting["client"], "protocol": "X1", "worker": None,
        "broker": None, "attempts": 0, "ttl_seconds": 3.0, "bytes": 5,
    }  # fmt: skip
    assert (unserved["service"], unserved["protocol"], unserved["bytes"]) == ("none", "0.2", 3)
    assert world.requests(b"echo") == [running, waiting]
    assert world.requests(b"no such service") == []


def test_requests_of_the_current_turn_wait(world):
    for message in (ready(), request(), old()):
        world.broker.receive(message, world.now)
    rows, more = world.broker.watch.in_flight(b"", lambda name: True, 10, world.now)
    assert ([row["state"] for row in rows], more) == (["waiting", "waiting"], 0)
    assert [world.broker.watch.find(row["id"]).size for row in rows] == [1, 3]


def test_clients_are_told_apart_without_their_routing_ids(world):
    proxied = [b"proxy", b"c", b"", b"MDPC02", b"\x01", b"none", b"body"]
    world.after(0, request(client=b"c", service=b"none"), request(2, client=b"c", service=b"none"))
    world.after(1, request(client=b"d", service=b"none"), proxied)
    clients = [row["client"] for row in world.requests()]
    assert [clients.index(each) for each in clients] == [0, 0, 2, 3]
    assert not {"c", "d", b"c".hex(), b"d".hex()} & {*clients}
    assert World().broker.watch._secret == world.broker.watch._secret
    assert Broker(now=0).watch._secret != Broker(now=0).watch._secret


def test_too_many_requests_are_cut(world):
    world.after(0, ready(credit=4), *(request(number) for number in range(10)))
    world.after(0, request(client=b"d"))

    def shown(most):
        rows, more = world.broker.watch.in_flight(b"", lambda name: True, most, world.now)
        return [row["state"] for row in rows].count("running"), len(rows), more

    assert shown(11) == (4, 10, 1)  # about as many of each client that has waiting ones
    assert shown(100) == (4, 11, 0)
    assert shown(4) == (2, 4, 7)
    assert shown(6) == (3, 6, 5)


def test_pages_have_every_request_once(world):
    world.after(0, ready(credit=4), *(request(number) for number in range(10)))
    world.after(0, *(request(number, client=b"d", service=b"none") for number in range(3)))
    world.after(0, cancel(0))  # which its worker holds until it answers

    def page(skip, most, name=b""):
        rows, more = world.broker.watch.page(name, lambda name: True, skip, most, world.now)
        return [row["id"] for row in rows], more

    all_ids, more = page(0, 100)
    assert (len(all_ids), len(set(all_ids)), more) == (12, 12, 0)
    assert {*all_ids} == {row["id"] for row in world.requests()}
    found = []
    while more or not found:
        ids, more = page(len(found), 5)
        found += ids
    assert found == all_ids
    assert page(12, 5) == page(1000, 5) == ([], 0)
    assert page(0, 2, b"none") == (all_ids[9:11], 1)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [(b"0", [1, 2]), (b"1", [2]), (b"2", []), (b"", None), (b"-1", None), (b"x", None), (b"9" * 30, None)],
)
def test_a_second_frame_says_where_a_page_begins(world, frame, expected):
    world.after(0, request(), request(2))
    body = answers.answer(b"mmi.requests", [b"echo", frame], world.broker, world.now)
    if expected is None:
        assert body == [b"400"]
    else:
        assert len(json.loads(body[0])["requests"]) == len(expected)
    assert answers.answer(b"mmi.requests", [b"", b"%d" % (answers.MAX_SKIPPED + 1)], world.broker, 0) == [b"400"]


def test_each_role_sees_its_services_only(world):
    turns.grant(world.broker, {"shop": Permissions("shop", call=("echo",), mmi="service")}, world.now)
    world.after(0, request(), request(2, service=b"secret"))
    role = world.broker.roles.named("shop")
    rows, _ = world.broker.watch.in_flight(b"", role.sees, 10, world.now)
    assert [row["service"] for row in rows] == ["echo"]


def test_ids_in_large_options_are_not_looked_for():
    large = b'{"x":"%s","headers":{"request-id":"a"}}' % (b"x" * watch.MAX_SEARCHED)
    world = World()
    world.after(0, request(options=large))
    assert world.requests()[0]["request_id"] is None


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def cancelled(world, id_):
    """Return what is sent because an administrator cancels the request with that id."""
    answer, sent = world.ask(b"mmi.cancel", id_.encode())
    assert json.loads(answer[-1]) == {"cancelled": bool(sent) or not world.requests()}
    return sent


def test_a_running_request_is_cancelled_at_its_client_and_its_worker(world):
    world.after(0, ready(), request())
    (row,) = world.requests()
    assert cancelled(world, row["id"]) == [x1.error(499, "cancelled"), withdraw(FIRST)]
    assert world.json(b"mmi.cancel", row["id"].encode()) == {"cancelled": False}
    assert world.broker.directory.workers[b"w"].held  # until the worker says that it has stopped


@pytest.mark.parametrize("running", [True, False])
def test_a_request_without_a_number_is_cancelled(world, running):
    world.after(0, *([ready(credit=2)] if running else []), old(body=b"1"), old(body=b"22"))
    _, second = world.requests()
    assert world.json(b"mmi.cancel", second["id"].encode()) == {"cancelled": True}
    assert [row["bytes"] for row in world.requests()] == [1]


def test_another_request_of_the_same_number_is_not_cancelled(world):
    world.after(0, ready(), request())
    (row,) = world.requests()
    world.after(1, final(), request())
    assert world.json(b"mmi.cancel", row["id"].encode()) == {"cancelled": False}
    world.after(1, final(FIRST + 1), request(2))
    assert world.json(b"mmi.cancel", row["id"].encode()) == {"cancelled": False}
    assert len(world.requests()) == 1


@pytest.mark.parametrize("id_", [b"", b"x", b"12", b"\xff", b"1" * 30, "²".encode(), b"-1", b"1000-1"])
def test_there_is_nothing_to_cancel(world, id_):
    world.after(0, ready(), request())
    assert world.json(b"mmi.cancel", id_) == {"cancelled": False}


def test_the_ids_of_the_last_lists_are_remembered(world):
    world.after(0, request(1, service=b"a"), request(2, service=b"b"), request(3, service=b"c"))
    (first,), (second,) = world.requests(b"a"), world.requests(b"b")
    world.broker.watch._listed.update({f"{number}": (b"c", None) for number in range(watch.MAX_LISTED - 2)})
    (third,) = world.requests(b"c")
    cancelled = [world.json(b"mmi.cancel", row["id"].encode())["cancelled"] for row in (first, second, third)]
    assert cancelled == [False, True, True]


@pytest.mark.parametrize("name", [b"mmi.cancel", b"mmi.tail"])
def test_only_administrators_may_cancel_and_follow(world, name):
    permissions = {"boss": Permissions("boss", admin=True), "watcher": Permissions("watcher", mmi="all")}
    turns.grant(world.broker, permissions, world.now)
    boss, watcher = (world.broker.roles.named(each) for each in permissions)
    assert world.ask(name, role=boss)[0][1] == "FINAL"
    answer, _ = world.ask(name, role=watcher, asker=b"another")
    assert answer[:4] == (b"another", "ERROR", world.asked, 403)
    assert world.ask(b"mmi.requests", role=watcher, asker=b"another")[0][1] == "FINAL"


# ── what has ended ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tail_tells_what_has_ended_since_it_was_asked_last(world):
    world.after(0, ready(), request(0))
    world.after(1, final())
    begun = world.tail()
    assert begun == {"tail": begun["tail"], "requests": [], "left_out": 0}
    world.after(1, request(1, body=b"body", options=NAMED))
    world.after(0.5, old())
    world.after(0.25, final(FIRST + 1))
    world.after(2, failure(FIRST + 2))
    world.after(0.125, request(3, service=b"none", body=b"body", options=b'{"wait":false}'))
    told = world.tail(tail=begun["tail"])
    assert (told["tail"], told["left_out"]) == (begun["tail"], 0)
    answered, failed, refused = told["requests"]
    assert answered == {
        "id": f"{FIRST + 1}", "request_id": "order?7?", "service": "echo", "group": "", "role": "",
        "client": answered["client"], "protocol": "X1", "attempts": 1, "bytes": 4, "outcome": "ok",
        "queue_seconds": 0.0, "worker_seconds": 0.75, "worker": 1, "ago_seconds": 2.125,
    }  # fmt: skip
    assert failed == {
        "id": f"{FIRST + 2}", "request_id": None, "service": "echo", "group": "", "role": "",
        "client": failed["client"], "protocol": "0.2", "attempts": 1, "bytes": 3, "outcome": "500",
        "queue_seconds": 0.25, "worker_seconds": 2.0, "worker": 1, "ago_seconds": 0.125,
    }  # fmt: skip
    assert refused == {
        "id": f"{FIRST}-1", "request_id": None, "service": "none", "group": "", "role": "",
        "client": answered["client"], "protocol": "X1", "attempts": 0, "bytes": 4, "outcome": "404",
        "queue_seconds": 0.0, "worker_seconds": None, "worker": None, "ago_seconds": 0.0,
    }  # fmt: skip
    assert world.tail(tail=begun["tail"])["requests"] == []


def test_a_tail_tells_of_workers_that_were_lost(world):
    tail = world.tail()["tail"]
    world.after(0, ready(), request(options=b'{"wait":false}'))
    world.now += 1
    turns.disconnected(world.broker, b"w", 100, world.now)
    world.after(1, request(2, client=b"gone"))
    turns.disconnected(world.broker, b"gone", 100, world.now)
    lost, gone = world.tail(tail=tail)["requests"]
    assert (lost["outcome"], lost["worker"], lost["worker_seconds"]) == ("502", 1, 1.0)
    assert (gone["outcome"], gone["worker"], gone["worker_seconds"]) == ("client-gone", None, None)


def test_what_is_over_the_limit_is_counted(world):
    world.after(0, ready())
    tail, small = world.tail()["tail"], world.tail(limit=2)["tail"]
    for number in range(DEFAULT_LIMIT + 5):
        world.after(0, request(number), final(FIRST + number))
    world.after(1, request(0), final(FIRST + DEFAULT_LIMIT + 5))
    told = world.tail(tail=tail)
    assert (len(told["requests"]), told["left_out"]) == (DEFAULT_LIMIT + 1, 5)
    told = world.tail(tail=small)
    assert (len(told["requests"]), told["left_out"]) == (3, DEFAULT_LIMIT + 3)


def test_a_tail_that_is_not_fetched_is_bounded(world):
    tail = world.tail(limit=MAX_TAIL_ROWS)["tail"]
    for number in range(MAX_TAIL_ROWS + 7):
        world.after(0.005, request(number, service=b"none", options=b'{"wait":false}'))
    told = world.tail(tail=tail)
    assert (len(told["requests"]), told["left_out"]) == (MAX_TAIL_ROWS, 7)


def test_a_tail_may_be_about_one_service_or_failures_only(world):
    world.after(0, ready(), ready(b"v", b"sum"))
    every, ours, failed = world.tail()["tail"], world.tail(service="sum")["tail"], world.tail(failed=True)["tail"]
    world.after(0, request(), request(2, service=b"sum"), final(), failure(FIRST + 1, b"v"))
    told = [[row["service"] for row in world.tail(tail=each)["requests"]] for each in (every, ours, failed)]
    assert told == [["echo", "sum"], ["sum"], ["sum"]]


def test_a_tail_ends_that_nobody_asks_for(world):
    tail = world.tail()["tail"]
    world.after(KEPT)
    again = world.tail(tail=tail)["tail"]
    turns.tick(world.broker, world.now + KEPT)
    assert (again, world.broker.watch.active) == (tail, True)
    turns.tick(world.broker, world.now + KEPT + 0.01)
    assert not world.broker.watch.active
    assert world.tail(tail=tail)["tail"] != tail


def test_the_number_of_tails_is_bounded(world):
    tails = [world.tail()["tail"] for _ in range(MAX_TAILS)]
    assert world.tail(tail=tails[0])["tail"] == tails[0]
    world.tail()
    assert world.tail(tail=tails[0])["tail"] == tails[0]
    assert world.tail(tail=tails[1])["tail"] != tails[1]


@pytest.mark.parametrize(
    "question",
    [b"{", b"[]", b"\xff", b'{"limit":0}', b'{"limit":1001}', b'{"limit":true}', b'{"limit":1.0}', b'{"tail":1}',
     b'{"service":null}', b'{"failed":1}', b"[" * 100_000],
)  # fmt: skip
def test_a_malformed_question(world, question):
    assert world.ask(b"mmi.tail", question)[0][-1] == b"400"
    assert not world.broker.watch.active


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fields(record):
    return {
        name: getattr(record, name) for name in ("request_id", "service", "worker", "role") if hasattr(record, name)
    }


def test_slow_requests_are_logged(caplog):
    world = World(slow=2.0)
    world.after(0, ready(), request())
    world.after(2, final(), request(2))
    assert "slow" not in caplog.text
    world.after(1, request(3, options=NAMED))
    world.after(1.5, final(FIRST + 1))
    world.after(1, failure(FIRST + 2))
    world.after(0, request(4, service=b"none"))
    world.after(3, cancel(4))
    slow = [record for record in caplog.records if record.message.startswith("slow")]
    assert [(record.levelno, record.message, fields(record)) for record in slow] == [
        (
            logging.WARNING,
            "slow request for service echo: 0.000 s in the queue, 2.500 s at worker 1: ok",
            {"request_id": f"{FIRST + 1}", "service": "echo", "worker": 1},
        ),
        (
            logging.WARNING,
            "slow request for service echo: 1.500 s in the queue, 1.000 s at worker 1: 500",
            {"request_id": "order?7?", "service": "echo", "worker": 1},
        ),
        (
            logging.WARNING,
            "slow request for service none: 3.000 s in the queue, 0.000 s at a worker: 499",
            {"request_id": f"{FIRST}-1", "service": "none"},
        ),
    ]


def test_lines_about_requests_and_workers_have_fields(caplog):
    caplog.set_level(logging.INFO)
    world = World(limits=Limits(max_queue=1))
    turns.grant(world.broker, {"shop": Permissions("shop", call=("*",), offer=("*",))}, world.now)
    shop = world.broker.roles.named("shop")
    for message in (ready(), request(), request(2), request(3, options=NAMED)):
        turns.receive(world.broker, message, world.now, shop)
    turns.receive(world.broker, cancel(), world.now, shop)
    turns.receive(world.broker, leave(), world.now, shop)
    worker = {"service": "echo", "worker": 1, "role": "shop"}
    assert [(record.message, fields(record)) for record in caplog.records] == [
        ("worker 1 offers echo, credit 1 (X1)", worker),
        (
            "dropped a request for service echo (role shop): queue-full",
            {"request_id": "order?7?", "service": "echo", "role": "shop"},
        ),
        ("dropped a request for service echo (role shop): cancelled", {"request_id": f"{FIRST}", **worker}),
    ]


# ── requests that have failed ────────────────────────────────────────────────────────────────────────────────────────


def test_failures_tell_the_last_errors(world):
    world.after(0, ready(), request(0, options=NAMED), old(), request(2))
    world.after(1, x1.failure(FIRST, b"w", text=b"no such colour" + 300 * b"!"))
    world.after(1, failure(FIRST + 1))
    world.after(1, final(FIRST + 2))
    world.after(1, request(3, service=b"none", options=b'{"wait":false}'))
    world.after(0.5)
    found = world.json(b"mmi.failures")["failures"]
    assert [(row["service"], row["outcome"], row["ago_seconds"]) for row in found] == [
        ("none", "404", 0.5), ("echo", "500", 2.5), ("echo", "500", 3.5),
    ]  # fmt: skip
    assert [row["text"][:14] for row in found] == ["no worker offe", "it broke", "no such colour"]
    assert [row["request_id"] for row in found] == [None, None, "order?7?"]
    assert len(found[2]["text"]) == MAX_TEXT
    assert world.json(b"mmi.failures", b"none")["failures"] == found[:1]


def test_requests_that_their_clients_gave_up_have_not_failed(world):
    world.after(0, ready(), request(0), request(1))
    world.after(1, cancel(0))
    turns.give_up(world.broker, b"c", world.now)
    assert world.json(b"mmi.failures")["failures"] == []


def test_failures_are_bounded_as_well_those_of_one_moment(world):
    def fail(number):
        return request(number, service=b"none", options=b'{"wait":false}')

    world.after(0, *(fail(number) for number in range(MAX_AT_ONCE + 5)))
    assert len(world.json(b"mmi.failures")["failures"]) == MAX_AT_ONCE
    for number in range(100, 100 + 2 * MAX_FAILURES):
        world.after(1, fail(number))
    found = world.json(b"mmi.failures")["failures"]
    assert [row["ago_seconds"] for row in found] == list(range(MAX_FAILURES))
