"""The answers to `mmi.*` requests, compared as whole values."""

import json
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version

import pytest
from support import turns
from support.x1_messages import cancel, failure, feed, final, leave, ready, request, told

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mmi import answers
from zmdp.version import compiled_parts

READY = {"0.1": [b"MDPW01", b"\x01"], "0.2": [b"MDPW02", b"\x01"]}


def ask(broker, name, *body, now=0):
    """Return the one frame of the answer, decoded if it is JSON."""
    (frame,) = answers.answer(name, list(body), broker, now)
    return json.loads(frame) if frame.startswith(b"{") else frame


@pytest.fixture
def broker():
    """A broker with two workers of echo, one of them busy, one worker of sum, and a request that waits for lost."""
    broker = Broker(Limits(heartbeat=2), now=0, first_address=1)
    turns.receive(broker, [b"\x01", *READY["0.2"], b"echo"], now=1)
    turns.receive(broker, [b"\x02", *READY["0.1"], b"echo"], now=2)
    turns.receive(broker, [b"\x03", *READY["0.2"], b"sum"], now=3)
    turns.receive(broker, [b"c", b"MDPC02", b"\x01", b"echo", b"x"], now=4)
    turns.receive(broker, [b"c", b"MDPC02", b"\x01", b"lost", b"x"], now=4)
    turns.receive(broker, [b"\x01", b"MDPW02", b"\x05"], now=5)
    return broker


@pytest.mark.parametrize(
    ("name", "status"),
    [
        (b"echo", b"200"),
        (b"sum", b"200"),
        (b"lost", b"404"),  # requested, but never offered
        (b"ech", b"404"),
        (b"", b"404"),
        (b"\xff", b"404"),
        (b"mmi.service", b"404"),
    ],
)
def test_mmi_service_reports_whether_a_service_has_workers(broker, name, status):  # C26
    assert ask(broker, b"mmi.service", name) == status


@pytest.mark.parametrize("name", [b"mmi.", b"mmi.unknown", b"mmi.service2", b"mmi.SERVICE", "mmi.größe".encode()])
def test_any_other_mmi_is_not_implemented(broker, name):  # C26
    assert ask(broker, name, b"echo") == b"501"


def service(name, **values):
    """Return a row of `mmi.services`."""
    return {
        "name": name, "workers": 0, "idle": 0, "credit": 0, "running": 0, "queued": 0, "limits": {}, "held_back": 0,
        "dispatched": 0,
        "remote_credit": 0, "remote_free": 0, "remote_running": 0,
        "hops": 0 if values.get("workers") else None, **values,
    }  # fmt: skip


ECHO = service("echo", workers=2, idle=1, credit=1, running=1, dispatched=1)
SUM = service("sum", workers=1, idle=1, credit=1)
LOST = service("lost", queued=1)


@pytest.mark.parametrize(
    ("wanted", "rows"), [(b"", [ECHO, SUM, LOST]), (b"echo", [ECHO]), (b"lost", [LOST]), (b"?", [])]
)
def test_services_are_listed(broker, wanted, rows):
    assert ask(broker, b"mmi.services", wanted) == {"services": rows, "more": 0}


def worker(number, service, protocol, **values):
    """Return a row of `mmi.workers`."""
    return {
        "id": number, "service": service, "protocol": protocol, "name": "", "host": "", "pid": 0, "version": "",
        "credit": 1, "held": 0, "done": 0, "busy_seconds": 0.0, "suspects": 0, "busy": False, "leaving": False,
        **values,
    }  # fmt: skip


FIRST = worker(1, "echo", "0.2", held=1, busy=True, up_seconds=9.5, silent_seconds=5.5)
SECOND = worker(2, "echo", "0.1", up_seconds=8.5, silent_seconds=8.5)
THIRD = worker(3, "sum", "0.2", up_seconds=7.5, silent_seconds=7.5)


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [(b"", [FIRST, SECOND, THIRD]), (b"echo", [FIRST, SECOND]), (b"sum", [THIRD]), (b"lost", []), (b"?", [])],
)
def test_workers_are_listed(broker, wanted, rows):
    assert ask(broker, b"mmi.workers", wanted, now=10.5) == {"workers": rows, "more": 0}


def test_long_lists_are_truncated():
    broker = Broker(now=0)
    for number in range(answers.MAX_ROWS + 2):
        turns.receive(broker, [b"w%d" % number, *READY["0.2"], b"s%d" % number], now=0)
    services, workers = ask(broker, b"mmi.services", b""), ask(broker, b"mmi.workers", b"")
    assert (len(services["services"]), services["more"]) == (answers.MAX_ROWS, 2)
    assert (len(workers["workers"]), workers["more"]) == (answers.MAX_ROWS, 2)


def test_workers_are_listed_in_pages():
    broker = Broker(now=0)
    count = 2 * answers.MAX_ROWS + 2
    for number in range(count):
        turns.receive(broker, [b"w%d" % number, *READY["0.2"], b"s%d" % (number % 2)], now=0)
    turns.receive(broker, [b"w0", b"MDPW02", b"\x06"], now=0)
    turns.receive(broker, [b"w0", *READY["0.2"], b"s0"], now=0)  # as a new worker
    for name, expected in ((b"", range(2, count + 2)), (b"s1", range(2, count + 1, 2))):
        found, more = [], 1
        while more:
            answer = ask(broker, b"mmi.workers", name, b"%d" % (found[-1] if found else 0))
            found += [row["id"] for row in answer["workers"]]
            more = answer["more"]
        assert found == list(expected)
    for malformed in (b"", b"-1", b"x", b"9" * 30):
        assert ask(broker, b"mmi.workers", b"", malformed) == b"400"


STATS = {
    "up_seconds": 10.5,
    "services": 3,
    "workers": 3,
    "queued": 1,
    "request_bytes": 1536 + 2 * (512 + 64 + 1),
    "running": 1,
    "requests": 2,
    "dispatched": 1,
    "redispatched": 0,
    "partials": 0,
    "replies": 0,
    "errors": 0,
    "late": 0,
    "other_role": 0,
    "mmi": 0,
    "heartbeats": 1,
    "internal_errors": 0,
    "invalid": {},
    "dropped": {},
    "disconnected": {},
    "lost": {},
    "connections": {},
}


def test_mmi_stats_reports_counts(broker):
    assert ask(broker, b"mmi.stats", b"", now=10.5) == STATS


def test_mmi_broker_reports_version_and_limits(broker):
    assert ask(broker, b"mmi.broker", b"", now=10.5) == {
        "name": "zmdp",
        "broker": "broker",
        "version": version("zmdp"),
        "compiled": compiled_parts(),
        "up_seconds": 10.5,
        "draining": False,
        "dialects": {"client": ["MDP/0.1", "MDP/0.2", "X1"], "worker": ["MDP/0.1", "MDP/0.2", "X1"]},
        "limits": asdict(Limits(heartbeat=2)),
    }


def test_x1_peers_are_listed_like_others(broker):
    feed(broker, ready(b"\x04", b"sum"), now=4)
    feed(broker, request(1, service=b"sum"), request(2, service=b"sum"), now=5)
    feed(broker, cancel(1), now=6)
    feed(broker, failure(3, b"\x04"), now=7)
    feed(broker, cancel(3), now=8)
    fourth = worker(4, "sum", "X1", done=1, busy_seconds=2.0, up_seconds=6.5, silent_seconds=3.5)
    assert ask(broker, b"mmi.workers", b"sum", now=10.5)["workers"][1] == fourth
    counts = ask(broker, b"mmi.stats", b"", now=10.5)
    assert {name: counts[name] for name in ("requests", "dispatched", "errors", "dropped", "invalid")} == {
        "requests": 4,
        "dispatched": 3,
        "errors": 1,
        "dropped": {"cancelled": 1},
        "invalid": {"unknown-number": 1},
    }


def test_mmi_workers_reports_identity_and_load():
    broker = Broker(Limits(max_attempts=2), now=0, first_address=1)
    about = {"name": "resize", "host": "box", "pid": 17, "version": "1.0"}
    feed(broker, [b"v", *READY["0.2"], b"echo"], request(1), ready(credit=3, **about))
    feed(broker, [b"v", b"MDPW02", b"\x06"], request(2), leave())  # so the first request is a suspect
    held = {"held": 2, "suspects": 1, "busy": True, "leaving": True}
    row = worker(2, "echo", "X1") | about | {"credit": 3} | held | {"up_seconds": 4, "silent_seconds": 4}
    assert ask(broker, b"mmi.workers", b"echo", now=4) == {"workers": [row], "more": 0}
    assert ask(broker, b"mmi.services", b"echo") == {"services": [service("echo", running=2, dispatched=3)], "more": 0}


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Pair:
    """The brokers a and b; a has opened a link to b, as a peer."""

    def __init__(self):
        self.a, self.b = (Broker(now=0, name=name, first_address=number) for name, number in (("a", 1), ("b", 100)))
        self.link = self.a.add_link("peer", None, "tcp://b")
        self.deliver("a", turns.link_opened(self.a, self.link, 0), 0)

    def deliver(self, sender, messages, now):
        """Deliver what `sender` sends to the other, and so on."""
        for message in messages:
            if sender == "a" and message[0] == self.link:
                self.deliver("b", turns.receive(self.b, [b"link", *message[1:]], now), now)
            elif sender == "b" and message[0] == b"link":
                self.deliver("a", turns.receive(self.a, [self.link, *message[1:]], now), now)

    def receive(self, name, message, now):
        """Let a broker take in a message, and both their heartbeats and announcements a second later."""
        self.deliver(name, turns.receive(getattr(self, name), message, now), now)
        for each in "ab":
            self.deliver(each, turns.tick(getattr(self, each), now + 1), now + 1)


def test_what_other_brokers_offer_is_listed():
    pair = Pair()
    pair.receive("b", ready(credit=3), now=1)
    assert ask(pair.a, b"mmi.service", b"echo") == b"200"
    elsewhere = service("echo", remote_credit=3, remote_free=3, hops=1)
    assert ask(pair.a, b"mmi.services", b"") == {"services": [elsewhere], "more": 0}
    pair.receive("a", request(), now=2)
    elsewhere |= {"running": 1, "remote_running": 1, "remote_free": 2, "dispatched": 1}
    assert ask(pair.a, b"mmi.services", b"echo") == {"services": [elsewhere], "more": 0}
    pair.receive("a", ready(b"v", credit=7), now=3)
    assert ask(pair.a, b"mmi.services", b"") == {
        "services": [elsewhere | {"workers": 1, "idle": 1, "credit": 7, "hops": 0}],
        "more": 0,
    }


def link(**values):
    """Return a row of `mmi.brokers`."""
    return {
        "broker": "", "kind": "peer", "endpoint": "", "state": "up", "trouble": "", "up_seconds": 10.5, "services": 0,
        "outstanding_there": 0, "outstanding_here": 0, "sent": 0, "received": 0, **values,
    }  # fmt: skip


def test_links_are_listed():
    pair = Pair()
    pair.receive("b", ready(), now=1)
    pair.receive("a", request(), now=2)
    assert ask(pair.a, b"mmi.brokers", b"", now=10.5) == {
        "name": "a",
        "links": [link(broker="b", endpoint="tcp://b", services=1, outstanding_there=1, sent=1)],
        "brokers": [{"name": "b", "hops": 1, "over": "b"}],
        "more": 0,
    }
    assert ask(pair.b, b"mmi.brokers", b"", now=10.5) == {
        "name": "b",
        "links": [link(broker="a", outstanding_here=1, received=1)],
        "brokers": [{"name": "a", "hops": 1, "over": "a"}],
        "more": 0,
    }


def test_a_link_that_is_down_says_why():
    pair = Pair()
    turns.link_failed(pair.a, pair.link, "nothing is listening there", 4)
    row = link(broker="b", endpoint="tcp://b", state="down", trouble="nothing is listening there", up_seconds=0)
    assert ask(pair.a, b"mmi.brokers", b"") == {"name": "a", "links": [row], "brokers": [], "more": 0}


# ── mmi.describe ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_version_of_a_service_is_described_until_its_last_worker_leaves():
    broker = Broker(now=0)
    feed(broker, ready(b"w1", about={"version": "1"}), ready(b"w2", about={"version": "2"}))
    feed(broker, ready(b"w3", about={"version": "2"}), ready(b"w4"))
    head = {"service": "echo", "broker": "broker", "brokers": []}
    old, new = {"workers": 1, "about": {"version": "1"}}, {"workers": 2, "about": {"version": "2"}}
    assert ask(broker, b"mmi.describe", b"echo") == {**head, "workers": 4, "abouts": [new, old]}
    feed(broker, leave(b"w1"), leave(b"w4"))
    assert ask(broker, b"mmi.describe", b"echo") == {**head, "workers": 2, "abouts": [new]}
    feed(broker, leave(b"w2"), leave(b"w3"))
    assert ask(broker, b"mmi.describe", b"echo") == b"404"


def test_a_worker_that_is_leaving_no_longer_describes_its_service():
    broker = Broker(now=0)
    feed(broker, ready(b"w1", about={"version": "1"}), request(), leave(b"w1"))
    assert ask(broker, b"mmi.describe", b"echo") == b"404"
    feed(broker, ready(b"w2", about={"version": "2"}), final(1, b"w1"))
    assert ask(broker, b"mmi.describe", b"echo")["abouts"] == [{"workers": 1, "about": {"version": "2"}}]


@pytest.mark.parametrize("name", [b"lost", b"?", b"", b"\xff", b"mmi.describe", b"mmi.broker.west"])
def test_what_no_worker_offers_is_not_described(broker, name):
    assert ask(broker, b"mmi.describe", name) == b"404"


def test_workers_of_other_dialects_say_nothing(broker):
    assert ask(broker, b"mmi.describe", b"echo") == {
        "service": "echo", "broker": "broker", "workers": 2, "brokers": [], "abouts": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("role", "code"),
    [
        (Permissions("shop", call=("echo",), mmi="none"), 403),
        (Permissions("shop", call=("other",), mmi="service"), 404),
        (Permissions("shop", call=("echo",), mmi="service"), 200),
        (Permissions("shop", offer=("echo",), mmi="service"), 200),
        (Permissions("shop", mmi="all"), 200),
    ],
)
def test_a_service_is_described_to_roles_that_may_know_of_it(role, code):
    broker = Broker(now=0)
    feed(broker, ready(about={"version": "1"}))
    turns.grant(broker, {"shop": role}, 0)
    asked = request(service=b"mmi.describe", body=b"echo")
    (answered,) = told(turns.receive(broker, asked, 0, broker.roles.named("shop")))
    if code == 403:
        assert answered[1:4] == ("ERROR", 1, 403)
    else:
        assert (answered[-1] == b"404") is (code == 404)


def test_mmi_does_not_import_the_broker_when_it_runs():
    code = "import sys, zmdp.mmi.answers; print(*[name for name in sys.modules if name.startswith('zmdp.mdp.broker')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_mmi_limit_shows_and_sets_the_limits_of_a_service(broker):
    feed(broker, ready(b"v", b"slow", limits={"service": {"concurrency": 3}}))
    shown = {"service": "slow", "limits": {"service": {"concurrency": 3}}, "by_operator": False, "groups": []}
    assert ask(broker, b"mmi.limit", b"slow") == shown
    wanted = {"service": {"rate": "5/s"}, "group": {"concurrency": 1}}
    set_to = {"service": "slow", "limits": wanted, "by_operator": True, "groups": []}
    assert ask(broker, b"mmi.limit", b"slow", json.dumps(wanted).encode()) == set_to
    assert ask(broker, b"mmi.describe", b"slow")["limits"] == wanted
    assert ask(broker, b"mmi.limit", b"slow", b"{}") == shown


def test_mmi_limit_may_be_set_before_there_is_a_worker(broker):
    ask(broker, b"mmi.limit", b"later", b'{"service": {"concurrency": 1}}')
    feed(broker, ready(b"v", b"later", credit=5))
    assert len(feed(broker, request(1, service=b"later"), request(2, service=b"later"))) == 1


@pytest.mark.parametrize("said", [b"", b"[]", b"{", b'{"service": {"rate": "fast"}}', b"[" * 5000])
def test_malformed_limits_are_refused(broker, said):
    assert ask(broker, b"mmi.limit", b"echo", said) == b"400"
    assert ask(broker, b"mmi.limit", b"mmi.stats", b"{}") == b"400"


def test_what_a_limit_holds_back_is_counted(broker):
    feed(broker, ready(b"v", b"slow", credit=9, limits={"service": {"concurrency": 1}}))
    feed(broker, *[request(number, service=b"slow") for number in (1, 2, 3)])
    (row,) = [row for row in ask(broker, b"mmi.metrics", b"")["services"] if row["name"] == "slow"]
    assert (row["queued"], row["held_back"], row["throttled"]) == (2, 2, 2)
    assert row["limits"] == {"service": {"concurrency": 1}}


def test_the_groups_with_the_most_waiting_requests_are_told(broker, monkeypatch):
    monkeypatch.setattr("zmdp.mmi.answers.GROUP_ROWS", 2)
    feed(broker, ready(b"v", b"slow", credit=9, limits={"service": {"concurrency": 1}}))
    for number, group in enumerate("abbccc", start=1):
        feed(broker, request(number, service=b"slow", group=group))
    assert ask(broker, b"mmi.limit", b"slow")["groups"] == [
        {"group": "c", "waiting": 3, "running": 0}, {"group": "b", "waiting": 2, "running": 0},
    ]  # fmt: skip


def test_groups_and_limits_with_another_broker():
    pair = Pair()
    pair.receive("b", ready(credit=1), now=1)
    for number in (1, 2):
        pair.receive("a", request(number, group="x"), now=2)
    assert ask(pair.a, b"mmi.services", b"echo")["services"][0]["queued"] == 1
    pair.receive("b", final(100), now=3)
    assert ask(pair.a, b"mmi.services", b"echo")["services"][0]["queued"] == 0
    pair.receive("b", final(101), now=4)
    pair.receive("a", ready(b"v", credit=5, limits={"service": {"concurrency": 1}}), now=5)
    for number in (3, 4):
        pair.receive("a", request(number, group="x"), now=6)
    row = ask(pair.a, b"mmi.services", b"echo")["services"][0]
    assert (row["running"], row["held_back"]) == (1, 1)  # what a limit holds back waits for the workers here
