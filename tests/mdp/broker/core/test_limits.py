"""Limits and groups in the broker's machine: what may start, when, and whose turn it is."""

import random

import pytest
from support import turns
from support.x1_messages import cancel, feed, final, heartbeat, ready, release, request, together, told

from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.scheduling.groups import QUEUED
from zmdp.mdp.broker.federation.link import Link, LinkKind, LinkRemote
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.service_limits import Limit, ServiceLimits


def new_broker(**limits):
    return Broker(Limits(**limits), now=0, first_address=1)


def limited(service=None, group=None, *, capacity=100, **limits):
    """Return a broker with a worker of echo that declares these limits."""
    broker = new_broker(**limits)
    declared = {name: value for name, value in (("service", service), ("group", group)) if value}
    feed(broker, ready(credit=capacity, limits=declared))
    return broker


def starts(sent):
    """Return the addresses of the requests that are sent to workers."""
    return [each[2] for each in sent if each[1] == "REQUEST"]


def bodies(sent):
    return [each[-1] for each in sent if each[1] == "REQUEST"]


def tick(broker, now):
    return told(turns.tick(broker, now))


def ask(broker, number, body=b"x", *, client=b"c", now=0.0, **options):
    return feed(broker, request(number, client=client, body=body, **options), now=now)


def test_no_more_run_at_once_than_the_limit_of_the_service():  # C48
    broker = limited({"concurrency": 2})
    sent = [each for number in range(1, 5) for each in ask(broker, number)]
    assert starts(sent) == [1, 2]
    assert starts(feed(broker, final(1), now=0.1)) == [3]
    assert starts(feed(broker, release(2), now=0.2)) == [4]  # which came back, and goes first


@pytest.mark.parametrize("end", ["cancel", "gone"])
def test_a_request_that_its_client_gave_up_runs_until_its_worker_is_done(end):
    broker = limited({"concurrency": 1})
    ask(broker, 1)
    ask(broker, 2, client=b"other")
    sent = feed(broker, cancel(1)) if end == "cancel" else told(turns.disconnected(broker, b"c", 0, 0))
    assert starts(sent) == []
    assert starts(feed(broker, final(1), now=0.1)) == [2]


def test_requests_start_at_the_rate_after_a_burst():  # C48
    broker = limited({"rate": "60/min", "burst": 2})
    sent = [each for number in range(1, 6) for each in ask(broker, number)]
    assert starts(sent) == [1, 2]
    at = []
    for hundredths in range(500):
        now = hundredths / 100
        at += [now for _ in starts(tick(broker, now))]
    assert at == pytest.approx([1, 2, 3], abs=0.02)
    assert broker.deadline() is not None


def test_a_broker_that_waits_for_a_limit_knows_when_to_look_again():
    broker = limited({"rate": "1/s"})
    tick(broker, 0.1)  # the worker is told that it is registered
    ask(broker, 1, now=0.1)
    ask(broker, 2, now=0.1)
    assert broker.deadline() == pytest.approx(1.1, abs=0.01)
    assert starts(tick(broker, broker.deadline())) == [2]


def test_a_start_is_used_even_if_the_request_comes_back():
    broker = limited({"rate": "1/s"})
    assert starts(ask(broker, 1)) == [1]
    assert starts(feed(broker, release(1))) == []
    assert starts(tick(broker, 0.9)) == []
    assert starts(tick(broker, 1.01)) == [2]


def test_groups_take_turns_and_within_each_group_clients_do():  # C20, C48
    broker = new_broker()
    numbers = iter(range(1, 100))
    for group, client in [("a", b"c"), ("a", b"c"), ("a", b"d"), ("b", b"c"), ("b", b"c"), ("", b"e")]:
        ask(broker, next(numbers), f"{group}{client.decode()}".encode(), client=client, group=group)
    sent = feed(broker, ready(credit=100))
    assert bodies(sent) == [b"ac", b"bc", b"e", b"ad", b"bc", b"ac"]


def test_a_group_with_many_requests_delays_anothers_one_call_by_one():
    broker = limited({"concurrency": 1})
    for number in range(1, 1001):
        ask(broker, number, b"many", group="many")
    ask(broker, 1, b"one", client=b"d", group="one")
    assert bodies(feed(broker, final(1), now=1)) == [b"one"]


def test_each_group_has_its_own_limit():
    broker = limited({"concurrency": 3}, {"concurrency": 1})
    for number, group in enumerate("aaabbcd", start=1):
        ask(broker, number, group.encode(), group=group)
    attempts = {
        attempt.address: attempt.request.options.group
        for w in broker.directory.workers.values()
        for attempt in w.held.values()
    }
    assert attempts == {1: "a", 2: "b", 3: "c"}
    assert bodies(feed(broker, final(1), now=1)) == [b"d"]  # a was served last


def test_requests_without_a_group_and_those_of_other_dialects_are_one_group():
    broker = limited(None, {"concurrency": 1})
    ask(broker, 1)
    assert told(turns.receive(broker, [b"old", b"MDPC02", b"\x01", b"echo", b"x"], 0)) == []
    assert starts(ask(broker, 2, group="a")) == [2]
    assert starts(feed(broker, final(1), now=1)) == [3]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [({"rate": "1/s"}, [b"1.000"]), ({"rate": "1/min"}, [b"60.000"]), ({"concurrency": 1}, [])],
)
def test_a_request_that_must_not_wait_is_refused_and_told_when_to_try_again(limit, seconds):
    broker = limited(limit)
    ask(broker, 1)
    (refused,) = ask(broker, 2, wait=False)
    assert refused[1:4] == ("ERROR", 2, 429)
    assert b"the service is limited (" in refused[4]
    assert list(refused[5:]) == seconds


@pytest.mark.parametrize("limit", [{"rate": "1/s", "burst": 2}, {"concurrency": 2}])
@pytest.mark.parametrize("kind", ["service", "group"])
def test_those_that_arrive_together_are_refused_beyond_the_limit(kind, limit):
    broker = limited(**{kind: limit})
    sent = feed(broker, together(*[request(number, wait=False, group="a") for number in range(1, 5)]))
    assert starts(sent) == [1, 2]
    assert [each[2:4] for each in sent if each[1] == "ERROR"] == [(3, 429), (4, 429)]
    assert broker.directory.services[b"echo"].metrics.throttled == 2
    assert starts(ask(broker, 5, wait=False)) == ([] if kind == "service" else [3])


def test_a_request_that_was_cancelled_at_once_holds_nobody_back():
    broker = limited({"concurrency": 1})
    feed(broker, together(request(1), cancel(1)))
    assert starts(ask(broker, 2, wait=False)) == [1]


def test_a_request_that_may_start_need_not_wait():
    broker = limited({"concurrency": 1}, max_queue=1)
    assert starts(ask(broker, 1, wait=False)) == [1]


def test_what_arrives_together_waits_for_credit_beyond_that_of_the_workers():
    broker = limited({"concurrency": 3}, capacity=1)
    assert starts(feed(broker, together(request(1), request(2)))) == [1]
    assert starts(feed(broker, final(1))) == [2]


def test_waiting_for_a_limit_counts_towards_the_ttl():
    broker = limited({"rate": "1/min"})
    ask(broker, 1)
    ask(broker, 2, ttl=500)
    (expired,) = tick(broker, 0.6)
    assert expired[1:4] == ("ERROR", 2, 408)
    assert broker.stats.dropped == {Drop.LIMIT_PASSED: 1}
    assert b"the service is limited (1/min)" in expired[4]


def test_workers_that_declare_different_limits_have_the_strictest(caplog):
    broker = limited({"concurrency": 5, "rate": "10/s"})
    feed(broker, ready(b"v", credit=9, limits={"service": {"concurrency": 3}}))
    groups = broker.directory.services[b"echo"].schedule.groups
    assert groups.limits.service == Limit(3, "10/s")
    assert "workers of service echo declare different limits" in caplog.text
    broker.give_up(b"v", 1)
    assert groups.limits.service == Limit(5, "10/s")


def test_the_limits_of_the_last_worker_stay_until_another_one_comes():
    broker = limited({"rate": "1/min"})
    ask(broker, 1)
    turns.give_up(broker, b"w", 1)
    feed(broker, ready(b"v", limits={"service": {"rate": "1/min"}}), now=2)
    assert starts(ask(broker, 2, client=b"d", now=3)) == []
    broker.receive(heartbeat(b"v"), 59)
    assert starts(tick(broker, 60.01)) == [2]


def test_a_service_is_forgotten_once_its_limits_no_longer_matter():
    broker = limited({"rate": "60/min"}, {"rate": "30/min"})
    ask(broker, 1, group="a")
    feed(broker, final(1))
    turns.give_up(broker, b"w", 0)
    assert b"echo" in broker.directory.services
    tick(broker, 1.5)
    assert b"echo" in broker.directory.services
    tick(broker, 2.01)
    tick(broker, 2.02)
    assert not broker.directory.services
    assert broker.directory.throttling.groups == 0


def test_the_operators_limits_win_and_apply_to_what_runs():
    broker = limited({"concurrency": 5})
    for number in range(1, 5):
        ask(broker, number)
    broker.limit({"echo": ServiceLimits(Limit(concurrency=2))}, 1)
    assert starts(told(broker.take_messages())) == []
    ask(broker, 9, now=1)
    assert starts(feed(broker, final(1), final(2), now=1)) == []  # two still run
    assert starts(feed(broker, final(3), now=1)) == [5]
    broker.limit({}, 2)
    ask(broker, 10, now=2)
    ask(broker, 11, now=2)
    assert len(broker.directory.workers[b"w"].held) == 4


def test_a_limit_that_is_lifted_lets_start_what_waits():
    broker = limited()
    broker.limit({"ec*": ServiceLimits(Limit(rate="1/h"))}, 0)
    assert starts(ask(broker, 1)) == [1]
    assert starts(ask(broker, 2)) == []
    broker.limit({}, 1)
    assert starts(told(broker.take_messages())) == [2]


def test_a_broker_that_drains_waits_for_what_a_limit_holds_back():
    broker = limited({"rate": "1/s"})
    ask(broker, 1)
    ask(broker, 2)
    sent = told(turns.drain(broker, 0))
    assert ("DISCONNECT",) not in [each[1:] for each in sent if each[0] == b"w"]
    feed(broker, final(1))
    assert not broker.drained
    assert starts(tick(broker, 1.01)) == [2]
    feed(broker, final(2), now=1.1)
    assert broker.drained


@pytest.mark.parametrize("group", [1, "x" * 256, "a\nb"])
def test_a_group_must_be_short_and_printable(group):
    broker = limited()
    (refused,) = ask(broker, 1, group=group)
    assert refused[1:4] == ("ERROR", 1, 400)


def test_there_may_be_so_many_groups(monkeypatch):
    monkeypatch.setattr("zmdp.mdp.broker.core.admission.MAX_GROUPS", 2)
    broker = new_broker()
    for number, group in enumerate("aab", start=1):
        assert ask(broker, number, group=group) == []
    (refused,) = ask(broker, 9, group="c")
    assert refused[1:4] == ("ERROR", 9, 429)
    assert ask(broker, 10, group="a") == []


def test_a_limit_applies_to_what_already_waits_and_runs():
    broker = new_broker()
    feed(broker, ready(credit=1))
    ask(broker, 1)
    ask(broker, 2)
    broker.limit({"x*": ServiceLimits(Limit(concurrency=9)), "ec*": ServiceLimits(Limit(concurrency=1))}, 1)
    assert starts(told(broker.take_messages())) == []
    feed(broker, ready(b"v", credit=1), now=1)
    assert len(broker.directory.workers[b"v"].held) == 0
    assert starts(feed(broker, final(1), now=1)) == [2]


def test_a_group_waits_for_its_own_rate():
    broker = limited(None, {"rate": "1/s"})
    assert starts(ask(broker, 1, group="a")) == [1]
    assert starts(ask(broker, 2, group="a")) == []
    groups = broker.directory.services[b"echo"].schedule.groups
    assert groups.held_back(0) == 1
    assert broker.directory.services[b"echo"].schedule.oldest() == 0
    assert starts(feed(broker, release(1))) == []  # it goes before the other, once the group may go on
    assert bodies(tick(broker, 1.01)) == [b"x"]
    ask(broker, 3, group="a", now=1.02)
    feed(broker, cancel(2), cancel(3), now=1.03)
    assert groups.held_back(1.03) == 0


def test_those_of_a_client_that_is_gone_do_not_hold_up_its_group():
    broker = Broker(now=0, first_address=1, turn_work=1)
    for number in range(1, 5):
        ask(broker, number, b"gone", group="a")
    ask(broker, 1, b"there", client=b"d", group="b")
    ask(broker, 1, b"gone", client=b"e", group="c")
    for client in (b"e", b"c"):  # the turn ends one request
        broker.give_up(client, 0)
    assert bodies(feed(broker, ready(credit=9))) == [b"there"]


def test_what_may_not_be_passed_on_does_not_hold_up_another_group():
    broker = new_broker()
    ask(broker, 1, group="a")
    ask(broker, 2, client=b"d", group="b")
    broker.directory.clients[b"c"].numbered[1].came_over(("there",), 0, "")
    link = Link(b"link", LinkKind.PEER, broker.roles.everyone, opens=True)
    link.name = "there"
    service = broker.directory.services[b"echo"]
    remote = LinkRemote(link, service)
    assert service.schedule.groups.take_for(remote.may_take, QUEUED).number == 2
    assert service.schedule.groups.take_for(remote.may_take, QUEUED) is None


def test_limits_by_name_are_limited_in_number(monkeypatch):
    monkeypatch.setattr("zmdp.mdp.broker.operators.orders.MAX_NAMED", 1)
    broker = new_broker()
    assert broker.orders.limit_service(b"echo", ServiceLimits(Limit(1)), 0)
    assert not broker.orders.limit_service(b"sum", ServiceLimits(Limit(1)), 0)
    assert broker.orders.limit_service(b"sum", None, 0)


def test_a_service_that_made_way_is_not_woken():
    broker = limited({"rate": "1/s"}, max_services=1)
    ask(broker, 1)
    feed(broker, final(1))
    turns.give_up(broker, b"w", 0)
    feed(broker, ready(b"v", b"other"))
    broker.receive(heartbeat(b"v"), 2)
    tick(broker, 2)
    assert list(broker.directory.services) == [b"other"]


def test_a_worker_whose_limits_are_malformed_is_not_registered():
    broker = new_broker()
    feed(broker, ready(limits={"service": {"rate": "fast"}}))
    assert not broker.directory.workers


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_limits_hold_and_nothing_stays_behind(seed):
    """Random traffic; every start is noted, and compared with the definition of the limits."""
    rng = random.Random(seed)
    interval, burst = rng.choice([0.1, 0.25]), rng.randrange(1, 5)
    service = {"concurrency": rng.randrange(1, 6), "rate": f"{1 / interval:g}/s", "burst": burst}
    group = {"concurrency": rng.randrange(1, 4)}
    broker = new_broker(expiry=1000.0)
    names = [b"w1", b"w2"]
    held: dict[int, tuple[bytes, str]] = {}
    begun: list[float] = []
    asked = ended = 0
    groups: dict[bytes, str] = {}
    alive: set[bytes] = set()
    now = 0.0

    def note(sent):
        nonlocal ended
        for each in sent:
            if each[1] == "REQUEST":
                held[each[2]] = (each[0], groups[each[-1]])
                begun.append(now)
            ended += each[1] in {"FINAL", "ERROR"}
        assert len(held) <= service["concurrency"]
        for name in {name for _, name in held.values()}:
            assert sum(name == other for _, other in held.values()) <= group["concurrency"]

    def step(what):
        nonlocal asked
        if what == "ask":
            asked += 1
            body = b"%d" % asked
            groups[body] = rng.choice(["", "a", "b"])
            note(feed(broker, request(asked, client=rng.choice([b"c", b"d"]), body=body, group=groups[body]), now=now))
        elif what == "answer" and held:
            address = rng.choice(list(held))
            worker, _ = held.pop(address)
            note(feed(broker, rng.choice([final, final, release])(address, worker), now=now))
        elif what == "join":
            for name in names:
                if name not in alive:
                    alive.add(name)
                    note(feed(broker, ready(name, credit=4, limits={"service": service, "group": group}), now=now))
        elif what == "die" and alive:
            name = rng.choice(sorted(alive))
            alive.discard(name)
            for address in [address for address, (worker, _) in held.items() if worker == name]:
                del held[address]
            note(told(turns.give_up(broker, name, now)))

    step("join")
    for _ in range(300):
        now += rng.random() * 0.08
        for name in sorted(alive):
            broker.receive(heartbeat(name), now)
        note(told(turns.tick(broker, now)))
        step(rng.choices(["ask", "answer", "die", "join"], [10, 8, 0.3, 1])[0])
    step("join")
    while held or broker.registry.queued:
        now += 0.05
        for name in sorted(alive):
            broker.receive(heartbeat(name), now)
        note(told(turns.tick(broker, now)))
        step("answer")
    assert ended == asked
    for first, last in ((i, j) for i in range(len(begun)) for j in (i + burst, i + 2 * burst) if j < len(begun)):
        assert begun[last] - begun[first] >= (last - first - burst + 1) * interval - 1e-6
    assert len(begun) > 3
    for name in sorted(alive):
        turns.give_up(broker, name, now)
    now += 100
    turns.tick(broker, now)
    turns.tick(broker, now)
    assert not broker.directory.services
    assert broker.directory.throttling.groups == 0
