"""Linked brokers: their machines, connected by lists of messages (C44)."""

import gc
import json
import struct

import pytest
from support import turns
from support.garbage import no_collector
from support.peers import body_of, record, request_of
from support.x1_messages import (
    answer,
    beaten,
    cancel,
    client_heartbeat,
    disconnected,
    error,
    feed,
    final,
    leave,
    packed,
    partial,
    ready,
    request,
    told,
    withdraw,
)

from zmdp.mdp import wire
from zmdp.mdp.broker.core.outgoing import WorkerForgotten
from zmdp.mdp.broker.federation.link import MAX_UNANSWERED, LinkState
from zmdp.mdp.broker.federation.links import CloseLink, OpenLink
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.wire import batch

NOW = 100.0


class Mesh:
    """Machines of linked brokers.  What they send to peers other than brokers is in `sent`, by broker."""

    def __init__(self, *names, limits=None, permissions=None):
        self.now = NOW
        self.brokers = {}
        self.sent = {}
        self._ends = {}
        """The other end of each link's connection, by broker and identity."""
        self._connections = 0
        for name in names:
            self.start(name, limits, permissions)

    def start(self, name, limits=None, permissions=None):
        self.brokers[name] = Broker(limits, now=self.now, name=name, first_address=len(self.brokers) * 1000 + 1)
        self.sent[name] = []
        if permissions:
            turns.grant(self.brokers[name], permissions, self.now)

    def __getitem__(self, name):
        return self.brokers[name]

    def link(self, name, other, kind="peer", role=None):
        """Have `name` open a link to `other`; return its identity."""
        broker = self.brokers[name]
        identity = broker.add_link(kind, broker.roles.named(role) if role else None, f"tcp://{other}")
        self.open(name, identity, other)
        return identity

    def open(self, name, identity, other):
        self._connections += 1
        there = b"link-%d" % self._connections
        self._ends[name, identity], self._ends[other, there] = (other, there), (name, identity)
        self.route(name, turns.link_opened(self.brokers[name], identity, self.now))

    def route(self, name, messages, role=None):
        """Deliver what `name` sends, and everything that is sent because of that."""
        waiting = [(name, message) for message in messages]
        while waiting:
            name, message = waiting.pop(0)
            end = self._ends.get((name, message[0]))
            if end is None:
                self.sent[name] += told([message])
                continue
            other, there = end
            broker = self.brokers[other]
            role = broker.roles.named("brokers") if broker.roles.named("brokers") is not broker.roles.nobody else None
            waiting += [(other, each) for each in turns.receive(broker, [there, *message[1:]], self.now, role)]

    def receive(self, name, *messages, role=None):
        """Have `name` take in `messages` in a turn, then return what it and the others have sent to their peers."""
        self.sent = dict.fromkeys(self.brokers, ())
        self.sent = {each: [] for each in self.brokers}
        broker = self.brokers[name]
        for message in messages:
            broker.receive(message, self.now, broker.roles.named(role) if role else None)
        self.route(name, broker.take_messages())
        return self.sent

    def cut(self, name, identity):
        """End the connection of a link at both ends."""
        other, there = self._ends.pop((name, identity))
        self._ends.pop((other, there), None)
        self.sent = {each: [] for each in self.brokers}
        for end, at in ((name, identity), (other, there)):
            if end in self.brokers:
                self.route(end, turns.disconnected(self.brokers[end], at, self.brokers[end].turn, self.now))
        return self.sent

    def wait(self, seconds=0.1):
        """Let time pass, and do what is due."""
        self.sent = {each: [] for each in self.brokers}
        self.now += seconds
        for name, broker in self.brokers.items():
            self.route(name, turns.tick(broker, self.now))
        return self.sent

    def ask(self, name, question, body=b"", role=None):
        """Return the JSON that `name` answers to `mmi.*`."""
        sent = self.receive(name, request(77, service=question, body=body), role=role)[name]
        return json.loads(sent[0][-1])


def link_events(broker):
    """What `broker` asks its shell to do about links."""
    return [event for event in broker.take_events() if not isinstance(event, WorkerForgotten)]


def pair(**settings):
    """Brokers a and b, where a has opened a link to its peer b, which has a worker of echo."""
    mesh = Mesh("a", "b", **settings)
    mesh.identity = mesh.link("a", "b")
    mesh.receive("b", ready())
    mesh.wait()
    return mesh


def work(sent, worker=b"w"):
    """Return the addresses of the requests that a worker was sent."""
    return [each[2] for each in sent if each[:2] == (worker, "REQUEST")]


# ── passing requests on ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kinds", [("peer",), ("parent", "parent")])
@pytest.mark.parametrize(
    ("asked", "dialect"), [([b"", b"MDPC01"], "0.1"), ([b"MDPC02", b"\x01"], "0.2")], ids=["0.1", "0.2"]
)
def test_a_worker_at_another_broker_can_ask_for_the_dialect_as_well(kinds, asked, dialect):  # C37
    mesh = Mesh(*"abc"[: len(kinds) + 1])
    for name, other, kind in zip("abc", "bc", kinds, strict=False):
        mesh.link(name, other, kind)
    last = "abc"[len(kinds)]
    mesh.receive(last, ready(b"w", dialect=True), ready(b"v", service=b"other"))
    mesh.wait()
    mesh.wait()
    ((_, _, _, _, _, options, *_),) = mesh.receive("a", [b"c", *asked, b"echo", b"x"])[last]
    assert json.loads(options) == {"dialect": dialect}
    ((_, _, _, _, _, options, *_),) = mesh.receive("a", [b"c", *asked, b"other", b"x"])[last]
    assert options == b""  # it has not asked


@pytest.mark.parametrize("kind", ["peer", "parent"])
def test_the_nearest_then_the_freest_broker_is_chosen(kind):
    mesh = Mesh("a", "b", "c", "d")
    for other in "bcd":
        mesh.link("a" if kind == "peer" else other, other if kind == "peer" else "a", kind)
    mesh.receive("b", ready(credit=1))
    mesh.receive("c", ready(credit=3))
    mesh.receive("d", ready(credit=2))
    mesh.wait()
    sent = mesh.receive("a", *(request(number) for number in range(1, 7)))
    assert [len(work(sent[name])) for name in "bcd"] == [1, 3, 2]


def test_what_is_passed_on_waits_for_the_limits_of_the_broker_with_the_workers():  # C48
    mesh = pair()
    limits = {"service": {"concurrency": 2}, "group": {"concurrency": 1}}
    mesh.receive("b", leave(), ready(b"v", credit=9, limits=limits))
    mesh.wait()
    held = []
    for number, group in enumerate(["x", "x", "y", "x"], start=1):
        held += work(mesh.receive("a", request(number, group=group))["b"], b"v")
    assert held == [1001, 1002]  # of x and y
    assert mesh.ask("b", b"mmi.limit", b"echo")["groups"] == [
        {"group": "x", "waiting": 2, "running": 1}, {"group": "y", "waiting": 0, "running": 1},
    ]  # fmt: skip
    (refused,) = mesh.receive("a", request(5, group="z", wait=False))["a"]
    assert refused[1:4] == ("ERROR", 5, 429)
    assert work(mesh.receive("b", final(1001, b"v"))["b"], b"v") == [1003]
    mesh.receive("b", leave(b"v"))
    assert mesh["b"].registry.queued == 0
    assert mesh["a"].registry.queued  # what waited there waits here again


# ── the end of links and workers ─────────────────────────────────────────────────────────────────────────────────────


def test_each_link_has_pauses_of_its_own():
    mesh = Mesh("a")
    one, other = (mesh["a"].add_link("peer", None, f"tcp://{name}") for name in "xy")
    turns.tick(mesh["a"], mesh.now)
    assert link_events(mesh["a"]) == [OpenLink(one), OpenLink(other)]
    turns.link_failed(mesh["a"], one, "nothing answers", mesh.now)
    turns.link_failed(mesh["a"], other, "nothing answers", mesh.now + 10)
    assert link_events(mesh["a"]) == [CloseLink(one), CloseLink(other)]
    turns.tick(mesh["a"], mesh["a"].federation.links.by_identity[one].redial.at)
    assert link_events(mesh["a"]) == [OpenLink(one)]


def test_links_that_end_leave_no_cycles():
    """`mdp-broker` runs without the collector that would find them."""
    mesh = pair()
    with no_collector():
        for _ in range(3):
            mesh.receive("a", request())
            mesh.cut("a", mesh.identity)
            mesh.now += 1
            mesh.open("a", mesh.identity, "b")
            mesh.wait()
        assert gc.collect() == 0


def test_at_most_max_attempts_workers_die_of_a_request_at_all_brokers_together():
    mesh = Mesh("a", "b", "c", limits=Limits(max_attempts=3))
    mesh.link("a", "b")
    mesh.link("a", "c")
    for name in "bc":
        for worker in (b"w1", b"w2"):
            mesh.receive(name, ready(worker))
    mesh.wait()
    sent = mesh.receive("a", request())
    died = 0
    while not any(message[0] == b"c" for message in sent["a"]):
        ((name, worker),) = [(name, worker) for name in "bc" for worker in (b"w1", b"w2") if work(sent[name], worker)]
        mesh.sent = sent = {each: [] for each in mesh.brokers}
        turn = mesh[name].turn
        mesh.route(name, turns.disconnected(mesh[name], worker, turn, mesh.now))
        died += 1
    assert died == 3
    assert sent["a"] == [error(502, "its worker was lost, and this was attempt 3 of 3 (max_attempts)")]


# ── trees ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tree():
    """A root r with children a and b, which have the children a1, a2 and b1."""
    mesh = Mesh("r", "a", "b", "a1", "a2", "b1")
    for child, parent in (("a", "r"), ("b", "r"), ("a1", "a"), ("a2", "a"), ("b1", "b")):
        mesh.link(child, parent, "parent")
    return mesh


def test_every_service_of_a_tree_can_be_reached_from_everywhere():
    mesh = tree()
    mesh.receive("a1", ready())
    for _ in range(5):
        mesh.wait()
    for name, hops in {"r": 2, "a": 1, "b": 3, "a1": 0, "a2": 2, "b1": 4}.items():
        (service,) = mesh.ask(name, b"mmi.services")["services"]
        assert service["hops"] == hops
        (address,) = work(mesh.receive(name, request())["a1"])
        assert mesh.receive("a1", final(address))[name] == [answer()]
    mesh.receive("a1", leave())
    for _ in range(5):
        mesh.wait()
    for name in mesh.brokers:
        assert mesh.receive(name, request(wait=False))[name] == [error(404, "no worker offers the service")]


# ── brokers by name ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_broker_is_502():
    mesh = pair()
    assert mesh.receive("a", request(broker="x"))["a"] == [error(502, "broker x cannot be reached from here")]
    mesh.receive("a", request(broker="b"))
    mesh.receive("a", request(2, broker="b"))
    sent = mesh.cut("a", mesh.identity)
    assert sorted(sent["a"]) == [error(502, "broker b cannot be reached from here", number) for number in (1, 2)]


def test_what_is_addressed_to_a_broker_is_not_passed_on():
    mesh = pair()
    mesh.receive("a", request(broker="a"))
    mesh.wait()
    assert mesh["a"].registry.queued == 1
    assert mesh.receive("b", request(broker="a", wait=False))["b"] == [error(404, "no worker offers the service")]


# ── who may link ─────────────────────────────────────────────────────────────────────────────────────────────────────


def trouble(mesh, name):
    return [link["trouble"] for link in mesh.ask(name, b"mmi.brokers")["links"]]


def test_a_broker_is_not_linked_to_itself():
    mesh = Mesh("a")
    mesh.link("a", "a")
    assert trouble(mesh, "a") == ["broker a cannot be linked to itself"]


def test_two_brokers_of_the_same_name_are_not_linked_to_a_third():
    mesh = Mesh("a", "b", "c")
    mesh["c"].federation.links.name = "b"
    mesh.link("b", "a")
    mesh.link("c", "a")
    assert trouble(mesh, "c") == ["another broker named b is linked to a: start one with another --name"]


def test_brokers_in_a_circle_end_their_links():
    mesh = Mesh("a", "b", "c")
    for child, parent in ("ab", "bc", "ca"):
        mesh.link(child, parent, "parent")
    for _ in range(10):
        mesh.wait()
    assert any("in a circle" in text for name in "abc" for text in trouble(mesh, name))


def test_of_two_links_between_two_brokers_one_is_used():
    mesh = Mesh("a", "b")
    first = mesh.link("a", "b")
    mesh.link("b", "a")
    mesh.receive("b", ready(credit=2))
    mesh.wait()
    states = [sorted(link["state"] for link in mesh.ask(name, b"mmi.brokers")["links"]) for name in "ab"]
    assert states == [["standby", "up"], ["standby", "up"]]
    assert mesh.ask("a", b"mmi.services")["services"][0]["remote_credit"] == 2
    mesh.receive("a", request())
    mesh.cut("a", first)
    sent = mesh.wait()
    mesh.wait()
    assert len(work(sent["b"])) == 1  # over the other link


def test_a_link_cannot_become_another():
    mesh = pair()
    (answered,) = turns.receive(mesh["b"], asks_link(hello("c"), b"link-1"), mesh.now)
    assert answered[-1][4] == 7  # ERROR
    assert len(work(mesh.receive("a", request())["b"])) == 1


def test_why_another_broker_ends_or_refuses_a_link_is_safe_to_log(caplog):
    other = Other(opens=True)
    other.receive(ends(b"x" * 10_000))
    assert other.link.trouble == "the other broker has ended it: " + "x" * 255
    for said, kept in (("x" * 10_000, "x" * 255), ("no\n12:00 ERROR \x1b[31m", "no?12:00 ERROR ?[31m")):
        turns.link_opened(other.broker, b"x", other.now)
        other.take(denied(said))
        assert other.link.trouble == kept
    other.open()
    other.receive(ends("schließt\n12:00 ERROR".encode()))
    assert other.link.trouble == "the other broker has ended it: schließt?12:00 ERROR"
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_new_connection_of_a_link_replaces_the_old_one():
    mesh = pair()
    mesh.receive("b", request(service=b"other"))
    (there,) = mesh["b"].federation.links.by_identity
    mesh.route("a", turns.disconnected(mesh["a"], mesh.identity, mesh["a"].turn, mesh.now))  # b has not noticed yet
    mesh.now += 1
    mesh.open("a", mesh.identity, "b")
    mesh.wait()
    assert there not in mesh["b"].federation.links.by_identity
    assert [link["state"] for link in mesh.ask("b", b"mmi.brokers")["links"]] == ["up"]
    assert len(work(mesh.receive("a", request())["b"])) == 1


def test_links_are_limited():
    mesh = Mesh("a", "b", "c", limits=Limits(max_links=1))
    mesh.link("b", "a")
    mesh.link("c", "a")
    assert trouble(mesh, "c") == ["broker a has 1 links already (max-links)"]


def test_what_other_brokers_announce_is_limited():
    mesh = Mesh("a", "b", "c", limits=Limits(max_services=4))
    mesh.link("a", "b")
    mesh.link("a", "c")
    for name in "bc":
        for service in (b"one", b"two", b"three"):
            mesh.receive(name, ready(b"w-" + service, service))
    for _ in range(3):
        mesh.wait()
    assert len(mesh["a"].directory.reachable) == 4


def test_something_that_does_not_know_links_is_no_broker():
    mesh = Mesh("a")
    identity = mesh["a"].add_link("peer", None, "tcp://old")
    turns.link_opened(mesh["a"], identity, mesh.now)
    turns.receive(mesh["a"], granted(b"501", identity), mesh.now)
    assert trouble(mesh, "a") == ["that broker does not know links, or its answer is malformed"]
    turns.link_opened(mesh["a"], identity, mesh.now)
    mesh.wait(5.0)
    assert trouble(mesh, "a") == ["it does not answer as a broker; silent for 5 s"]


def test_a_silent_link_ends():
    mesh = pair()
    mesh.receive("a", request())
    del mesh._ends["a", mesh.identity]  # what a sends is lost
    for _ in range(6):
        mesh.wait(1.0)
    assert trouble(mesh, "b") == []
    for _ in range(6):
        mesh.wait(1.0)
    assert trouble(mesh, "a") == ["silent for 5 s"]
    assert mesh["a"].registry.queued == 1


def test_a_connection_that_is_no_link_any_longer_is_told_so():
    mesh = Mesh("a")
    packed = batch.Batch((b"x",), b"MDPCL1")
    packed.request_to_broker(1, 0, b"echo", b'{"via":["b"]}', [b"x"])
    (message,) = packed.messages()
    assert turns.receive(mesh["a"], message, mesh.now) == [ends(NO_LINK)]


# ── roles ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ACCESS = {
    "brokers": Permissions("brokers", offer=("echo", "other"), link=True),
    "shop": Permissions("shop", call=("echo",)),
    "staff": Permissions("staff", call=("*",), admin=True),
    "workers": Permissions("workers", offer=("*",)),
}


def secured(**others):
    mesh = Mesh("a", "b", permissions=ACCESS)
    if others:
        turns.grant(mesh["b"], {**ACCESS, **others}, mesh.now)
    mesh.identity = mesh.link("a", "b", role="brokers")
    mesh.receive("b", ready(), ready(b"w2", b"secret"), ready(b"w3", b"other"), role="workers")
    mesh.wait()
    return mesh


def test_only_a_role_with_link_may_link():
    mesh = Mesh("a", "b", permissions=ACCESS)
    turns.grant(mesh["b"], {**ACCESS, "brokers": Permissions("brokers", call=("*",))}, mesh.now)
    mesh.link("a", "b", role="brokers")
    assert trouble_of(mesh) == ["role brokers may not link brokers: it needs link = true in the broker's access file"]


def trouble_of(mesh):
    return [link.trouble for link in mesh["a"].federation.links.by_identity.values()]


def test_a_broker_announces_only_what_its_role_may_offer():
    mesh = secured()
    names = [row["name"] for row in mesh.ask("a", b"mmi.services", role="staff")["services"]]
    assert sorted(names) == ["echo", "other"]


def test_a_link_ends_with_its_role():
    mesh = secured()
    mesh.sent = {each: [] for each in mesh.brokers}
    others = {name: role for name, role in ACCESS.items() if name != "brokers"}
    mesh.route("b", turns.grant(mesh["b"], others, mesh.now))
    assert "may not link" in trouble_of(mesh)[0]


WITHOUT_LINK = {**ACCESS, "brokers": Permissions("brokers", offer=("*",))}


def test_a_link_whose_role_lost_the_right_is_not_opened_again_until_it_has_it_back():
    other = Other(permissions=ACCESS, opens=True)
    turns.grant(other.broker, WITHOUT_LINK, other.now)
    assert other.link.trouble == "role brokers may not link brokers any longer"
    for _ in range(2):
        other.now = other.link.redial.at
        assert turns.link_opened(other.broker, b"x", other.now, other.role) == []  # it does not even ask
        assert other.link.state is LinkState.DOWN
        text = "role brokers may not link brokers: it needs link = true in this broker's access file"
        assert other.link.trouble == text
    turns.grant(other.broker, ACCESS, other.now)
    other.now = other.link.redial.at
    other.open()
    assert other.link.state is LinkState.UP


def test_why_this_broker_has_ended_a_link_is_not_forgotten_when_its_connection_ends():
    mesh = pair()
    link = mesh["a"].federation.links.by_identity[mesh.identity]
    turns.link_failed(mesh["a"], mesh.identity, "the role of its key has changed", mesh.now)
    before = link.redial.backoff, link.redial.at
    turns.link_failed(mesh["a"], mesh.identity, "the other broker closed the connection", mesh.now)
    assert link.trouble == "the role of its key has changed"
    assert (link.redial.backoff, link.redial.at) == before
    assert link_events(mesh["a"]) == [CloseLink(mesh.identity)]


def test_a_link_whose_role_loses_the_right_before_the_answer_is_not_established():
    broker = Broker(now=NOW, name="a")
    turns.grant(broker, ACCESS, NOW)
    role = broker.roles.named("brokers")
    broker.add_link("peer", role, "tcp://x", b"x")
    turns.link_opened(broker, b"x", NOW)
    turns.grant(broker, WITHOUT_LINK, NOW)
    turns.receive(broker, granted(hello("x")), NOW, role)
    assert broker.federation.links.at(b"x") is None


def test_a_client_cannot_write_what_only_brokers_can():
    mesh = pair()
    sent = mesh.receive("a", request(via=["b"], attempts=7, user="admin"))
    assert sent["b"][0][5] == b""


# ── what another broker may say ──────────────────────────────────────────────────────────────────────────────────────

AS_CLIENT, AS_WORKER = b"MDPCL1", b"MDPWL1"
X = (b"x",)
NO_LINK = b"this connection is not a link any longer"


def ends(text=b"", identity=b"x"):
    """The message that ends a link."""
    return [identity, AS_WORKER, b"\x09", record(6, 0, text)]


def asks_link(body, *route):
    """A request for a link."""
    return [*(route or X), AS_CLIENT, b"\x09", request_of(1, b"mmi.link", body)]


def granted(body, identity=b"x"):
    """The answer to a request for a link."""
    return [identity, AS_WORKER, b"\x09", record(4, 1, body_of(body))]


def denied(text, *route):
    """The refusal of a link."""
    told = struct.pack(">HHB", 403, 0, 11) + b"not-allowed" + struct.pack(">H", len(text)) + text.encode() + body_of()
    return [*(route or X), AS_WORKER, b"\x09", record(7, 1, told)]


class Other:
    """A broker `a`, and the other end of a link to it, where a test says what no broker of ours would.

    What `a` answers over the link is returned, decoded; what it sends to others is in `sent`.
    """

    def __init__(self, *, limits=None, permissions=None, opens=False, kind="peer"):
        self.now = NOW
        self.sent = []
        self.broker = Broker(limits, now=NOW, name="a", first_address=1)
        if permissions:
            turns.grant(self.broker, permissions, NOW)
        self.role = self.broker.roles.named("brokers") if permissions else None
        self.identity = b"x"
        if opens:
            self.identity = self.broker.add_link(kind, self.role, "tcp://x", b"x")
            self.open()
        else:
            self.take(asks_link(hello("x", kind=kind)))
        assert self.link.state is LinkState.UP

    @property
    def link(self):
        return self.broker.federation.links.by_identity.get(b"x")

    def open(self):
        """Establish the link, if it is one that `a` opens."""
        turns.link_opened(self.broker, b"x", self.now)
        self.take(granted(hello("x")))

    def take(self, message):
        """Have `a` take in a message over the link."""
        return self._split(turns.receive(self.broker, message, self.now, self.role))

    def say(self, header, *records):
        """The same for a message of those records."""
        packed = batch.Batch(X, header)
        for name, *values in records:
            getattr(packed, name)(*values)
        (message,) = packed.messages()
        return self.take(message)

    def receive(self, *messages):
        """Have `a` take in messages of others, in a turn."""
        for message in messages:
            self.broker.receive(message, self.now, self.broker.roles.named("workers") if self.role else None)
        return self._split(self.broker.take_messages())

    def lose(self):
        """End the connection of the link."""
        return self._split(turns.disconnected(self.broker, b"x", self.broker.turn, self.now))

    def wait(self, seconds=0.1):
        self.now += seconds
        return self._split(turns.tick(self.broker, self.now))

    def _split(self, messages):
        answers = []
        self.sent = []
        for message in messages:
            if message[0] != b"x":
                self.sent += told([message])
            elif message[2:3] == [b"\x09"]:
                decode = batch.from_client if message[1] == AS_CLIENT else batch.from_worker
                answers += decode(message, 1, X, 1 << 20, 1000)
            else:
                answers.append(message)
        return answers


def hello(name, **more):
    return json.dumps({"name": name, "instance": name, "link": 1, **more}).encode()


def asks(number=1, service=b"echo", body=b"x", **options):
    """The record of a request that another broker passes on."""
    return "request_to_broker", number, 0, service, json.dumps({"via": ["x"], **options}).encode(), [body]


def cancels(number=1):
    return "signal", 5, number


def offers(service=b"echo", credit=1, free=None, hops=1):
    """The record of an announcement."""
    return "ready", credit, service, b'{"hops":%d,"free":%d}' % (hops, credit if free is None else free)


def replies(address, body=b"x", final=True):
    return "reply", 4 if final else 3, address, [body]


def fails(address, code, text):
    return "error", 7, address, code, text, ()


def returns(address):
    return "signal", 11, address


def passed_on(address, body=b"x", service=b"echo", **options):
    raw = json.dumps({"via": ["a"], **options}, separators=(",", ":")).encode()
    return wire.Request(X, b"MDPCX1", service, [body], wire.parse_options(raw), address)


def cancelled(address):
    return wire.Cancel(X, b"MDPCX1", address)


def returned(number=1):
    return wire.Release(X, b"MDPWX1", number)


def refused(code, reason, text, number=1):
    return wire.Error(X, b"MDPWX1", number, code, text.encode(), [], reason.encode())


def done(number=1, body=b"x"):
    return wire.Reply(X, b"MDPWX1", True, number, [body])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (("request_to_broker", 1, 0, b"echo", b"", [b"x"]), "bad-options"),
        (asks(via=[]), "bad-options"),
        (asks(via="x"), "bad-options"),
        (asks(via=[1]), "bad-options"),
        (asks(attempts=-1), "bad-options"),
        (asks(attempts=True), "bad-options"),
        (asks(user=1), "bad-options"),
        (asks(broker=1), "bad-options"),
        (asks(service=b""), "bad-service-name"),
        (("signal", 99, 1), "unknown-command"),
    ],
)
def test_a_malformed_request_over_a_link_is_answered(record, reason):
    other = Other()
    other.receive(ready())
    assert other.say(AS_CLIENT, record) == [refused(400, reason, f"broker a: malformed: {reason}")]
    assert other.sent == []
    assert other.broker.stats.invalid == {reason: 1}
    assert not other.broker.directory.clients


def test_a_request_over_a_link_has_the_limits_of_every_broker():
    other = Other(limits=Limits(max_message=1000))
    other.receive(ready())
    assert other.say(AS_CLIENT, asks(body=b"x" * 1001)) == [refused(413, "too-large", "broker a: malformed: too-large")]
    other.say(AS_CLIENT, asks(body=b"x" * 1000))
    assert len(work(other.sent)) == 1


def test_records_that_cannot_be_attributed_are_counted():
    other = Other()
    assert other.receive([b"x", AS_CLIENT, b"\x09", b"\0\0\0"]) == []
    assert other.broker.stats.invalid == {"bad-record": 1}
    assert other.say(AS_WORKER, ("credit", 5)) == []
    assert other.broker.stats.invalid == {"bad-record": 1, "unknown-command": 1}
    assert other.link.state is LinkState.UP


def test_a_cancel_over_a_link_may_cross_the_end_of_its_request():
    other = Other()
    other.receive(ready())
    other.say(AS_CLIENT, asks())
    other.receive(final(work(other.sent)[0]))
    assert other.say(AS_CLIENT, cancels()) == []
    assert other.broker.stats.invalid == {}
    assert other.say(AS_CLIENT, cancels(2)) == []
    assert other.broker.stats.invalid == {"unknown-number": 1}


@pytest.mark.parametrize("via", [[f"b{number}" for number in range(16)], ["b", "a", "x"]], ids=["16 hops", "a circle"])
def test_a_request_that_has_come_too_far_is_returned(via):
    other = Other()
    other.receive(ready())
    assert other.say(AS_CLIENT, asks(via=via)) == [returned()]
    assert other.sent == []
    other.say(AS_CLIENT, asks(via=via[:1] * 15))
    assert len(work(other.sent)) == 1


@pytest.mark.parametrize("via", ["x", "y"])  # whatever it says
def test_a_request_does_not_go_back_to_where_it_came_from(via):
    other = Other()
    other.say(AS_WORKER, offers())
    assert other.say(AS_CLIENT, asks(via=[via])) == [returned()]
    assert other.broker.registry.queued == 0
    assert other.wait() == []  # the service was not announced, so it is not withdrawn


# ── replies over a link ──────────────────────────────────────────────────────────────────────────────────────────────


def passing(**settings):
    """Return another broker that has been passed the request with the address 1."""
    other = Other(**settings)
    other.say(AS_WORKER, offers())
    assert other.receive(request()) == [passed_on(1)]
    return other


def outstanding(other):
    registry = other.broker.registry
    return registry.queued, registry.running


def test_a_reply_over_a_link_is_limited():
    other = passing(limits=Limits(max_message=1000))
    text = "the reply exceeds the limits of 1000 bytes and 1024 frames"
    assert other.say(AS_WORKER, replies(1, b"x" * 1001)) == []
    assert other.sent == [error(413, text)]
    assert outstanding(other) == (0, 0)
    other.receive(request(2))
    assert other.say(AS_WORKER, replies(2, b"x" * 1001, final=False)) == [cancelled(2)]
    assert other.sent == [error(413, text, 2)]
    assert other.say(AS_WORKER, replies(2)) == []
    assert outstanding(other) == (0, 0)
    assert other.broker.stats.invalid == {"too-large": 2}


@pytest.mark.parametrize(
    "end",
    [replies(1), replies(1, b"x" * 1001), fails(1, 500, b"it broke"), fails(1, 503, b"draining"), returns(1)],
    ids=["reply", "reply over the limits", "error", "draining", "returned"],
)
def test_the_end_of_a_cancelled_request_is_for_nobody(end):
    other = passing(limits=Limits(max_message=1000))
    other.say(AS_WORKER, replies(1, b"part", final=False))
    assert other.receive(cancel()) == [cancelled(1)]
    assert other.sent == [error(499, "cancelled")]
    assert other.say(AS_WORKER, end) == []
    assert other.sent == []
    assert outstanding(other) == (0, 0)


def test_a_request_may_be_returned_after_its_service_was_withdrawn():
    other = passing()
    assert other.say(AS_WORKER, offers(hops=0)) == []
    assert other.say(AS_WORKER, returns(1)) == []
    assert outstanding(other) == (1, 0)
    assert other.say(AS_WORKER, offers()) == [passed_on(2)]


def test_a_second_reply_over_a_link_is_late():
    other = passing()
    assert other.say(AS_WORKER, replies(1), replies(1), replies(7)) == []
    assert other.sent == [answer()]
    assert other.broker.stats.late == 2


def test_a_stream_ends_when_the_broker_that_has_it_shuts_down():
    other = passing()
    other.say(AS_WORKER, replies(1, b"part", final=False))
    other.say(AS_WORKER, fails(1, 503, b"the broker shut down before the request was done"))
    assert other.sent == [error(502, "its worker was lost after a PARTIAL, so it cannot be retried")]


def test_a_stream_is_not_returned_however_late_the_other_broker_is_told():
    other = Other()
    other.receive(ready())
    other.say(AS_CLIENT, asks())
    other.receive(partial(work(other.sent)[0]))
    other.broker.congested(b"x")
    assert other._split(turns.close(other.broker, other.now)) == [wire.Disconnect(X, b"MDPWX1", b"")]
    other.broker.relieved(b"x", other.now)
    (told,) = other._split(other.broker.take_messages())
    assert (type(told), told.id, told.code) == (wire.Error, 1, 503)


def test_a_cancelled_request_is_not_placed_again_when_its_link_breaks():
    other = passing()
    other.receive(cancel())
    other.lose()
    assert outstanding(other) == (0, 0)
    assert not other.broker.directory.clients


def test_a_reply_in_pieces_is_put_together_for_a_client_that_takes_one():
    mesh = pair()
    (address,) = work(mesh.receive("a", [b"c", b"", b"MDPC01", b"echo", b"x"])["b"])
    assert mesh.receive("b", partial(address, body=b"part"))["a"] == []
    assert mesh.receive("b", final(address, body=b"done"))["a"] == [[b"c", b"", b"MDPC01", b"echo", b"part", b"done"]]


# ── requests that cannot be passed on ────────────────────────────────────────────────────────────────────────────────


def test_the_options_of_a_request_may_be_too_long_for_a_link():
    other = Other()
    other.say(AS_WORKER, offers())
    assert other.receive(request(key="x" * 65_515)) == []
    text = "its options are too long, with what the broker has to add for a worker or another broker"
    assert other.sent == [error(413, text)]
    assert len(other.receive(request(2, key="x" * 65_500))) == 1


def test_what_must_not_wait_is_passed_on_when_the_last_local_worker_leaves():
    other = Other()
    other.receive(ready())
    other.say(AS_WORKER, offers(free=0))
    assert other.receive(request(1), request(2, wait=False)) == []
    assert outstanding(other) == (1, 1)
    assert [each.body for each in other.receive(leave())] == [[b"x"]]
    assert other.sent == []
    assert outstanding(other) == (0, 2)


def test_what_must_not_wait_waits_for_a_local_worker_when_a_link_breaks():
    other = Other()
    other.receive(ready())
    other.say(AS_WORKER, offers(free=0))
    other.receive(request(1), request(2, wait=False))
    other.lose()
    assert other.sent == []
    assert outstanding(other) == (1, 1)
    assert b"echo" not in other.broker.directory.reachable
    other.receive(final(1))
    assert len(work(other.sent)) == 1


def test_a_service_is_reached_over_the_links_that_are_left():
    mesh = Mesh("a", "b", "c")
    first = mesh.link("a", "b")
    mesh.link("a", "c")
    mesh.receive("b", ready())
    mesh.receive("c", ready())
    mesh.wait()
    mesh.cut("a", first)
    sent = mesh.receive("a", request(wait=False))
    assert len(work(sent["c"])) == 1
    assert mesh.ask("a", b"mmi.services")["services"][0]["remote_credit"] == 1


def test_a_near_broker_comes_before_a_freer_one():
    mesh = Mesh("a", "b", "c", "d")
    mesh.link("a", "c")
    mesh.link("d", "c", "parent")
    mesh.link("a", "b")
    mesh.receive("b", ready(credit=2))
    mesh.receive("d", ready(credit=9))
    for _ in range(3):
        mesh.wait()
    sent = mesh.receive("a", *(request(number) for number in range(1, 6)))
    assert (len(work(sent["b"])), len(work(sent["d"]))) == (2, 3)


# ── what another broker may announce ─────────────────────────────────────────────────────────────────────────────────


def test_what_was_not_announced_may_be_withdrawn():
    other = Other()
    assert other.say(AS_WORKER, offers(hops=0)) == []
    assert other.broker.directory.reachable == {}
    assert other.link.state is LinkState.UP


def test_a_service_that_is_too_far_away_is_ignored():
    other = Other()
    other.say(AS_WORKER, offers(b"near", hops=16), offers(b"far", hops=17))
    assert list(other.broker.directory.reachable) == [b"near"]


def test_other_brokers_do_not_offer_what_this_one_answers():
    other = Other()
    other.say(AS_WORKER, offers(b"mmi.stats"), offers(b"mmi.link"), offers(b"mmi.broker.y"))
    assert list(other.broker.directory.reachable) == [b"mmi.broker.y"]


def test_a_broker_announces_a_limited_number_of_services():
    mesh = Mesh("a")
    mesh.start("b", Limits(max_services=2))
    mesh.link("a", "b")
    mesh.receive("b", ready(b"w1", b"one"), ready(b"w2", b"two"))
    for _ in range(3):
        mesh.wait()
    assert len(mesh["a"].directory.reachable) == 2


COMES_BACK, STAYS_AWAY = beaten(b"c"), disconnected(b"c")


def probed(mesh):
    """Return how a broker answers the probe of a client that may come back to it."""
    (answer,) = mesh.receive("a", client_heartbeat())["a"]
    return answer


def test_many_services_are_announced_in_parts():
    mesh = Mesh("a", "b")
    mesh.receive("b", *(ready(b"w%d" % number, b"s%d" % number) for number in range(1500)))
    mesh.link("a", "b")
    assert len(mesh["a"].directory.reachable) == 1000
    assert probed(mesh) == STAYS_AWAY
    mesh.wait()
    assert len(mesh["a"].directory.reachable) == 1501
    assert probed(mesh) == COMES_BACK


def test_the_deadline_is_when_something_can_be_announced():
    mesh = pair()
    mesh.receive("b", [b"w2", b"MDPW02", b"\x01", b"other"])
    due = mesh["b"].deadline()
    assert mesh.now < due <= mesh.now + 0.05
    assert b"other" not in mesh["a"].directory.reachable
    mesh.now = due
    mesh.route("b", turns.tick(mesh["b"], due))
    assert b"other" in mesh["a"].directory.reachable
    assert mesh["b"].deadline() > due + 0.5


# ── establishing and ending a link ───────────────────────────────────────────────────────────────────────────────────

MALFORMED = {
    "no JSON": b"{",
    "a list": b"[]",
    "too deep": b"[" * 100_000,
    "no UTF-8": b'{"name":"\xff"}',
    "no name": b'{"instance":"i"}',
    "name a number": b'{"name":1,"instance":"i"}',
    "empty name": hello("", instance="i"),
    "name with a space": hello("b c"),
    "name too long": hello("b" * 65, instance="i"),
    "name a lone surrogate": hello("\ud800", instance="i"),
    "no instance": b'{"name":"b"}',
    "instance a list": hello("b", instance=["i"]),
    "instance too long": hello("b", instance="i" * 65),
    "link in text": hello("b", link="1"),
    "link true": hello("b", link=True),
    "unknown kind": hello("b", kind="friend"),
    "kind a list": hello("b", kind=["peer"]),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_for_a_link_is_refused(body):
    broker = Broker(now=NOW, name="a")
    text = "malformed request for a link, or one through a proxy"
    assert turns.receive(broker, asks_link(body), NOW) == [denied(text)]
    assert broker.federation.links.by_identity == {}
    assert broker.stats.dropped == {"not-allowed": 1}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_establishes_no_link(body):
    mesh = Mesh("a")
    identity = mesh["a"].add_link("peer", None, "tcp://x")
    turns.link_opened(mesh["a"], identity, mesh.now)
    assert turns.receive(mesh["a"], granted(body, identity), mesh.now) == []
    assert trouble(mesh, "a") == ["that broker does not know links, or its answer is malformed"]
    assert link_events(mesh["a"]) == [CloseLink(identity)]


def test_a_link_is_not_asked_for_through_a_proxy():
    broker = Broker(now=NOW, name="a")
    proxied = b"proxy", b"x", b""
    text = "malformed request for a link, or one through a proxy"
    assert turns.receive(broker, asks_link(hello("b"), *proxied), NOW) == [denied(text, *proxied)]
    assert broker.federation.links.by_identity == {}


def test_a_connection_with_outstanding_requests_cannot_become_a_link():
    broker = Broker(now=NOW, name="a")
    assert feed(broker, request(client=b"x"), now=NOW) == []
    text = "a connection that is a link already, or has outstanding requests, cannot become a link"
    assert turns.receive(broker, asks_link(hello("b")), NOW) == [denied(text)]
    assert broker.registry.queued == 1


def test_a_clients_request_for_a_link_is_one_for_an_unknown_service():
    """Who calls services over a connection that others share cannot make it a link."""
    broker = Broker(now=NOW, name="a")
    asked = request(client=b"x", service=b"mmi.link", body=hello("b"))
    assert feed(broker, asked, now=NOW) == [answer(body=b"501", client=b"x")]
    assert turns.receive(broker, [b"y", b"MDPC02", b"\x01", b"mmi.link", hello("b")], NOW) == [
        [b"y", b"MDPC02", b"\x03", b"mmi.link", b"501"]
    ]
    assert broker.federation.links.by_identity == {}


def test_an_answer_with_this_brokers_name_establishes_no_link():
    mesh = Mesh("a")
    identity = mesh["a"].add_link("peer", None, "tcp://x")
    turns.link_opened(mesh["a"], identity, mesh.now)
    turns.receive(mesh["a"], granted(hello("a"), identity), mesh.now)
    assert trouble(mesh, "a") == ["both brokers are named a: start one with another --name"]


def test_only_the_answer_establishes_a_link():
    mesh = Mesh("a")
    identity = mesh["a"].add_link("peer", None, "tcp://x")
    turns.link_opened(mesh["a"], identity, mesh.now)
    for frames in (
        [AS_WORKER],
        [AS_WORKER, b"\x09", b""],
        [AS_WORKER, b"\x09", record(3, 1, body_of(hello("x")))],
        [b"", b"MDPCX1", b"\x09", record(3, 1, body_of(hello("x")))],
        [b"nonsense"],
    ):
        assert turns.receive(mesh["a"], [identity, *frames], mesh.now) == []
        assert mesh["a"].federation.links.at(identity) is None
    assert trouble(mesh, "a") == [""]
    turns.receive(mesh["a"], granted(hello("x"), identity), mesh.now)
    assert mesh["a"].federation.links.at(identity).name == "x"


def test_a_link_is_told_only_once_that_it_has_ended():
    other = Other(opens=True)
    other.say(AS_WORKER, offers())
    for _ in range(2):
        assert other.receive(ends()) == []
        assert other.link.trouble == "the other broker has shut down"
    assert link_events(other.broker) == [CloseLink(b"x")]
    assert turns.receive(other.broker, ends(b"why", b"nobody"), NOW) == []


def test_a_link_that_is_ended_again_and_again_pauses_for_longer_and_longer():
    other = Other(opens=True)

    def pause():
        other.receive(ends(b"enough"))
        assert other.link.trouble == "the other broker has ended it: enough"
        seconds = other.link.redial.at - other.now
        other.now = other.link.redial.at
        other.open()
        return seconds

    assert 0.5 <= pause() <= 1.0
    assert 2.0 <= pause() <= 4.0
    assert 8.0 <= pause() <= 16.0
    other.now += 60.0
    assert 0.5 <= pause() <= 1.0


def test_a_link_is_probed():
    other = Other()
    assert turns.probe(other.broker, b"x", other.now) == [[b"x", AS_WORKER]]
    other.lose()
    assert turns.probe(other.broker, b"x", other.now) == []


def test_a_broker_that_drains_opens_no_links():
    mesh = Mesh("a")
    identity = mesh["a"].add_link("peer", None, "tcp://x")
    turns.drain(mesh["a"], mesh.now)
    turns.tick(mesh["a"], mesh.now + 100)
    assert link_events(mesh["a"]) == []
    assert mesh["a"].federation.links.by_identity[identity].state is LinkState.DOWN
    assert mesh["a"].deadline() is None


def test_a_broker_that_closes_says_so_only_over_links_that_are_up():
    other = Other()
    other.broker.add_link("peer", None, "tcp://y")
    assert turns.close(other.broker, other.now) == [ends()]


def test_a_link_has_the_role_that_the_other_brokers_key_has_now():
    broker = Broker(now=NOW, name="a")
    turns.grant(broker, ACCESS, NOW)
    role = broker.roles.named("brokers")
    identity = broker.add_link("peer", broker.roles.named("shop"), "tcp://x", b"x")
    turns.link_opened(broker, identity, NOW, role)
    turns.receive(broker, granted(hello("x")), NOW, role)
    packed = batch.Batch(X, AS_WORKER)
    packed.ready(1, b"echo", b'{"hops":1,"free":1}')
    assert turns.receive(broker, packed.messages()[0], NOW, role) == []
    assert list(broker.directory.reachable) == [b"echo"]  # which a shop may not offer


@pytest.mark.parametrize(
    ("user", "text"),
    [
        (None, "role brokers may not call it: the broker's access file decides"),
        *(
            (user, "the role on whose behalf role brokers asks may not call it: the broker's access file decides")
            for user in ("workers", "unknown", "")
        ),
    ],
)
def test_a_request_over_a_link_is_allowed_to_its_user(user, text):
    other = Other(permissions=ACCESS)
    other.receive(ready())
    asked = asks() if user is None else asks(user=user)
    reason = "not-allowed" if user is None else "user-not-allowed"
    assert other.say(AS_CLIENT, asked) == [refused(403, reason, text)]
    assert other.sent == []
    other.say(AS_CLIENT, asks(user="shop"))
    assert json.loads(other.sent[0][5]) == {"user": "shop"}


def test_a_broker_without_access_control_asks_as_what_its_key_may_do():
    other = Other(permissions={**ACCESS, "brokers": Permissions("brokers", call=("echo",), link=True)})
    other.receive(ready(), ready(b"w2", b"other"))
    assert other.say(AS_CLIENT, asks()) == []
    assert len(work(other.sent)) == 1
    assert json.loads(other.sent[-1][5]) == {"user": "brokers"}
    (refusal,) = other.say(AS_CLIENT, asks(2, b"other"))
    assert refusal.code == 403


# ── what operators see ───────────────────────────────────────────────────────────────────────────────────────────────


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def done_at_b():
    """Return brokers as of `pair`, where the worker at b does a request of a client of a."""
    mesh = pair()
    mesh.receive("a", ready(service=b"other"))
    mesh.receive("a", request(headers={"request-id": "mine"}))
    return mesh


def test_a_request_that_was_passed_on_is_listed_at_both_brokers():
    mesh = done_at_b()
    (here,), (there,) = (mesh.ask(name, b"mmi.requests")["requests"] for name in ("a", "b"))
    assert without(here, "client") == {
        "id": "1", "request_id": "mine", "service": "echo", "group": "", "role": "", "protocol": "X1", "attempts": 1,
        "bytes": 1,
        "state": "running", "age_seconds": 0.0, "state_seconds": 0.0, "worker": None, "broker": "b",
        "ttl_seconds": None,
    }  # fmt: skip
    assert there == {**here, "id": "1001", "client": "broker a", "worker": 1, "broker": None}


def test_what_a_draining_broker_still_does_is_listed():
    mesh = done_at_b()
    before = mesh.ask("a", b"mmi.requests")
    mesh.route("b", turns.drain(mesh["b"], mesh.now))
    mesh.wait(0.0)
    mesh.wait(0.1)
    assert mesh["a"].directory.reachable == {}
    (row,) = mesh.ask("a", b"mmi.requests", b"echo")["requests"]
    assert without(row, "age_seconds", "state_seconds") == without(
        before["requests"][0], "age_seconds", "state_seconds"
    )
    assert mesh.ask("a", b"mmi.requests", b"other")["requests"] == []


@pytest.mark.parametrize(("where", "id_"), [("a", b"1"), ("b", b"1001")])
@pytest.mark.parametrize("listed", [True, False])
def test_a_request_that_was_passed_on_is_cancelled_at_either_broker(where, id_, listed):
    mesh = done_at_b()
    if listed:
        mesh.ask(where, b"mmi.requests")
    sent = mesh.receive(where, request(78, client=b"admin", service=b"mmi.cancel", body=id_))
    assert [message for message in sent["a"] if message[0] == b"c"] == [error(499, "cancelled")]
    assert [message for message in sent["b"] if message[0] == b"w"] == [withdraw(1001)]


def test_a_tail_and_the_log_tell_of_requests_that_were_passed_on(caplog):
    mesh = pair()
    mesh.brokers["a"].watch._slow = 1.0
    tail = mesh.ask("a", b"mmi.tail")["tail"]
    (address,) = work(mesh.receive("a", request(headers={"request-id": "mine"}))["b"])
    mesh.now += 2
    mesh.receive("b", final(address))
    (row,) = mesh.ask("a", b"mmi.tail", json.dumps({"tail": tail}).encode())["requests"]
    assert without(row, "client") == {
        "id": "1", "request_id": "mine", "service": "echo", "group": "", "role": "", "protocol": "X1", "attempts": 1,
        "bytes": 1,
        "outcome": "ok", "queue_seconds": 0.0, "worker_seconds": 2.0, "worker": None, "ago_seconds": 0.0,
    }  # fmt: skip
    (line,) = [record for record in caplog.records if record.message.startswith("slow")]
    assert line.message == "slow request for service echo: 0.000 s in the queue, 2.000 s at broker b: ok"
    assert (line.request_id, hasattr(line, "worker")) == ("mine", False)


# ── a broker that claims more than it does ───────────────────────────────────────────────────────────────────────────


def given_ids(said):
    """The ids of the requests in what was sent over a link."""
    return [each.id for each in said if isinstance(each, wire.Request)]


def asked(count):
    """That many requests in one message."""
    return packed(b"c", b"MDPCX1", *(request_of(number, b"echo", b"x") for number in range(1, count + 1)))


MORE = MAX_UNANSWERED + 5


def test_a_broker_that_never_answers_gets_few_requests():
    other = Other()
    other.say(AS_WORKER, offers(credit=1_000_000, free=1_000_000), offers(b"other", credit=9, free=9))
    given = given_ids(other.take(asked(MORE)))
    assert len(given) == MAX_UNANSWERED
    assert given_ids(other.take(request(MORE + 1, service=b"other"))) == []
    assert other.broker.registry.queued == 6
    feed(other.broker, ready(credit=9), now=other.now)
    assert other.broker.registry.queued == 1  # local workers do the rest


def test_a_broker_that_has_answered_gets_what_it_can_take():
    other = Other()
    other.say(AS_WORKER, offers(credit=MORE, free=MORE), offers(b"other", credit=9, free=9))
    first, *_ = given_ids(other.take(asked(MORE)))
    assert given_ids(other.take(request(MORE + 1, service=b"other"))) == []
    given = given_ids(other.say(AS_WORKER, ("reply", 3, first, [b"part"])))
    assert len(given) == MORE + 1 - MAX_UNANSWERED


def test_a_link_that_speaks_as_a_client_remains_a_link():
    mesh = Mesh("a", "b")
    identity = mesh.link("a", "b")
    link = mesh["a"].federation.links.at(identity)
    turns.receive(mesh["a"], [identity, b"", wire.CX1], mesh.now)
    assert mesh["a"].federation.links.at(identity) is link


# ── mmi.describe ─────────────────────────────────────────────────────────────────────────────────────────────────────


def described(mesh, name, **options):
    """Return the answer of a broker to `mmi.describe`, asked about echo."""
    sent = mesh.receive(name, request(service=b"mmi.describe", body=b"echo", **options))[name]
    return json.loads(sent[0][-1])


def described_tree(**abouts):
    """Return a tree of brokers in which these have a worker of echo that says this about it."""
    mesh = tree()
    for name, about in abouts.items():
        mesh.receive(name, ready(about=about))
    for _ in range(5):
        mesh.wait()
    return mesh


def test_a_service_of_another_broker_is_described_by_that_broker():
    mesh = described_tree(b1={"description": "says it again"})
    expected = {
        "service": "echo", "broker": "b1", "workers": 1, "brokers": [],
        "abouts": [{"workers": 1, "about": {"description": "says it again"}}],
    }  # fmt: skip
    for name in mesh.brokers:
        assert described(mesh, name) == expected
    ((*_, frame),) = mesh.receive("a1", [b"c", b"MDPC02", b"\x01", b"mmi.describe", b"echo"])["a1"]
    assert json.loads(frame) == expected, "to a 0.2 client as well"


def test_a_broker_that_is_addressed_tells_which_brokers_know_more():
    mesh = described_tree(b1={"version": "1"})
    nothing = {"service": "echo", "workers": 0, "abouts": []}
    assert described(mesh, "a1", broker="r") == {**nothing, "broker": "r", "brokers": ["b"]}
    assert described(mesh, "a1", broker="a1") == {**nothing, "broker": "a1", "brokers": ["a"]}


def test_a_question_that_comes_back_does_not_cut_off_the_broker_that_returned_it():
    mesh = described_tree(b1={"version": "1"})
    (there,) = (identity for identity, link in mesh["r"].federation.links.by_identity.items() if link.name == "b")
    del mesh._ends["r", there]  # so that the question is on its way when the link breaks
    mesh.receive("a", request(service=b"mmi.describe", body=b"echo"))
    mesh.route("r", turns.disconnected(mesh["r"], there, mesh["r"].turn, mesh.now))
    assert mesh["a"].registry.queued == 1  # r has returned it
    sent = [*mesh.wait()["a"], *mesh.wait()["a"]]
    assert sent == [answer(body=b"404")]
    assert mesh.receive("a", request(2, service=b"mmi.service", body=b"echo", broker="r"))["a"] == [
        answer(2, body=b"404")
    ]


def test_a_draining_broker_describes_without_others():
    mesh = pair()
    turns.drain(mesh["a"], mesh.now)
    assert described(mesh, "a") == {"service": "echo", "broker": "a", "workers": 0, "brokers": ["b"], "abouts": []}


def test_no_other_broker_is_asked_for_what_the_role_may_not_see():
    shop = Permissions("shop", call=("resize",), mmi="service")
    mesh = secured(shop=shop)
    sent = mesh.receive("a", request(service=b"mmi.describe", body=b"echo"), role="shop")
    assert sent["a"] == [answer(body=b"404")]
