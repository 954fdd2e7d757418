"""Linked brokers: their machines, connected by lists of messages (C44)."""

import json

import pytest

from zmdp.mdp.access import Permissions
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
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
            self.brokers[name].grant(permissions, self.now)

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
        self.route(name, self.brokers[name].link_opened(identity, self.now))

    def route(self, name, messages, role=None):
        """Deliver what `name` sends, and everything that is sent because of that."""
        waiting = [(name, message) for message in messages]
        while waiting:
            name, message = waiting.pop(0)
            end = self._ends.get((name, message[0]))
            if end is None:
                self.sent[name].append(message)
                continue
            other, there = end
            broker = self.brokers[other]
            role = broker.roles.named("brokers") if broker.roles.named("brokers") is not broker.roles.nobody else None
            waiting += [(other, each) for each in broker.receive([there, *message[1:]], self.now, role)]

    def receive(self, name, *messages, role=None):
        """Have `name` take in `messages` in a turn, then return what it and the others have sent to their peers."""
        self.sent = dict.fromkeys(self.brokers, ())
        self.sent = {each: [] for each in self.brokers}
        broker = self.brokers[name]
        for message in messages:
            broker.take(message, self.now, broker.roles.named(role) if role else None)
        self.route(name, broker.flush(self.now))
        return self.sent

    def cut(self, name, identity):
        """End the connection of a link at both ends."""
        other, there = self._ends.pop((name, identity))
        self._ends.pop((other, there), None)
        self.sent = {each: [] for each in self.brokers}
        for end, at in ((name, identity), (other, there)):
            if end in self.brokers:
                self.route(end, self.brokers[end].unreachable(at, self.brokers[end].turn, self.now))
        return self.sent

    def wait(self, seconds=0.1):
        """Let time pass, and do what is due."""
        self.sent = {each: [] for each in self.brokers}
        self.now += seconds
        for name, broker in self.brokers.items():
            self.route(name, broker.tick(self.now))
        return self.sent

    def ask(self, name, question, body=b"", role=None):
        """Return the JSON that `name` answers to `mmi.*`."""
        sent = self.receive(name, request(b"77", service=question, body=body), role=role)[name]
        return json.loads(sent[0][-1])


def request(number=b"1", *, client=b"c", service=b"echo", body=b"x", **options):
    return [client, number, b"", b"MDPCX1", b"\x01", service, json.dumps(options).encode() if options else b"", body]


def cancel(number=b"1", *, client=b"c", service=b"echo"):
    return [client, number, b"", b"MDPCX1", b"\x05", service]


def ready(worker=b"w", service=b"echo", credit=1):
    return [worker, b"MDPWX1", b"\x01", service, b'{"credit":%d}' % credit]


def partial(address, worker=b"w", body=b"part"):
    return [worker, b"MDPWX1", b"\x03", address, b"", body]


def final(address, worker=b"w", body=b"done"):
    return [worker, b"MDPWX1", b"\x04", address, b"", body]


def failure(address, worker=b"w", code=b"500", text=b"it broke", *detail):
    return [worker, b"MDPWX1", b"\x07", address, b"", code, text, *detail]


def answer(body=b"done", number=b"1", *, client=b"c", service=b"echo"):
    return [client, number, b"", b"MDPCX1", b"\x03", service, body]


def error(code, text, number=b"1", *, client=b"c", service=b"echo", detail=()):
    return [client, number, b"", b"MDPCX1", b"\x04", service, b"%d" % code, text.encode(), *detail]


def pair(**settings):
    """Brokers a and b, where a has opened a link to its peer b, which has a worker of echo."""
    mesh = Mesh("a", "b", **settings)
    mesh.identity = mesh.link("a", "b")
    mesh.receive("b", ready())
    mesh.wait()
    return mesh


def work(sent, worker=b"w"):
    """Return the addresses of the requests that a worker was sent."""
    return [message[3] for message in sent if message[0] == worker and message[2] == b"\x02"]


# ── passing requests on ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_passed_on_to_the_broker_with_the_worker():
    mesh = pair()
    sent = mesh.receive("a", request(headers={"h": "v"}))
    (address,) = work(sent["b"])
    assert json.loads(sent["b"][0][5]) == {"headers": {"h": "v"}}
    assert mesh.receive("b", partial(address))["a"] == [[b"c", b"1", b"", b"MDPCX1", b"\x02", b"echo", b"part"]]
    assert mesh.receive("b", final(address))["a"] == [answer()]
    assert not mesh["a"].registry.clients
    assert not mesh["b"].registry.clients
    assert mesh["a"].registry.running == mesh["b"].registry.running == 0


def test_requests_go_both_ways_over_one_connection():
    mesh = pair()
    mesh.receive("a", ready(service=b"other"))
    mesh.wait()
    (address,) = work(mesh.receive("b", request(service=b"other"))["a"])
    assert mesh.receive("a", final(address))["b"] == [answer(service=b"other")]


def test_local_workers_come_first_then_others_with_free_credit():
    mesh = pair()
    mesh.receive("a", ready())
    mesh.wait()
    sent = mesh.receive("a", request(b"1"), request(b"2"), request(b"3"))
    assert len(work(sent["a"])) == len(work(sent["b"])) == 1
    assert mesh["a"].registry.queued == 1  # both workers are busy, and there is a local one


def test_a_service_without_local_workers_waits_where_its_workers_are():
    mesh = pair()
    mesh.receive("b", ready(b"w2"))
    mesh.wait()
    sent = mesh.receive("a", *(request(b"%d" % number) for number in range(1, 6)))
    assert len(work(sent["b"])) == len(work(sent["b"], b"w2")) == 1
    assert mesh["a"].registry.queued == 3  # as many as their credit are passed on
    sent = mesh.receive("b", final(work(sent["b"])[0]))
    assert len(work(sent["b"])) == 1


@pytest.mark.parametrize("kind", ["peer", "parent"])
def test_the_nearest_then_the_freest_broker_is_chosen(kind):
    mesh = Mesh("a", "b", "c", "d")
    for other in "bcd":
        mesh.link("a" if kind == "peer" else other, other if kind == "peer" else "a", kind)
    mesh.receive("b", ready(credit=1))
    mesh.receive("c", ready(credit=3))
    mesh.receive("d", ready(credit=2))
    mesh.wait()
    sent = mesh.receive("a", *(request(b"%d" % number) for number in range(1, 7)))
    assert [len(work(sent[name])) for name in "bcd"] == [1, 3, 2]


def test_a_cancelled_request_is_cancelled_where_it_is():
    mesh = pair()
    (address,) = work(mesh.receive("a", request())["b"])
    sent = mesh.receive("a", cancel())
    assert sent["a"] == [error(499, "cancelled")]
    assert sent["b"] == [[b"w", b"MDPWX1", b"\x08", address, b""]]
    mesh.receive("b", final(address))
    assert mesh["a"].registry.running == mesh["b"].registry.running == 0


def test_the_errors_of_handlers_and_brokers_pass():
    mesh = pair()
    (address,) = work(mesh.receive("a", request())["b"])
    assert mesh.receive("b", failure(address, b"w", b"404", b"no such user"))["a"] == [
        error(404, "no such user", detail=[b""])
    ]
    (address,) = work(mesh.receive("a", request(b"2", ttl=500))["b"])
    sent = mesh.wait(1.0)
    assert sent["a"] == [error(408, "its time passed while a worker held it", b"2")]
    assert not mesh["b"].registry.clients


def test_the_ttl_is_what_is_left():
    mesh = pair()
    mesh.receive("a", request(b"0"))
    mesh.receive("a", request(ttl=5000))
    assert mesh["a"].registry.queued == 1
    mesh.now += 2.0
    address = next(iter(mesh["b"].registry.workers.values())).held
    sent = mesh.receive("b", final(b"%d" % next(iter(address))))
    (message,) = [message for message in sent["b"] if message[0] == b"w"]
    assert json.loads(message[5])["ttl"] == 3000


# ── the end of links and workers ─────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_placed_again_when_its_link_breaks():
    mesh = pair()
    mesh.receive("a", request())
    sent = mesh.cut("a", mesh.identity)
    assert not mesh["b"].registry.clients
    assert sent["b"] == [[b"w", b"MDPWX1", b"\x08", b"1001", b""]]
    assert mesh["a"].registry.queued == 1
    (address,) = work(mesh.receive("a", ready())["a"])
    assert mesh.receive("a", final(address))["a"] == [answer()]


def test_a_stream_ends_with_its_link():
    mesh = pair()
    (address,) = work(mesh.receive("a", request())["b"])
    mesh.receive("b", partial(address))
    assert mesh.cut("a", mesh.identity)["a"] == [
        error(502, "its worker was lost after a PARTIAL, so it cannot be retried")
    ]


def test_a_link_is_opened_again_after_a_pause_and_for_ever():
    mesh = pair()
    mesh.cut("a", mesh.identity)
    for _ in range(20):
        assert mesh["a"].links_to_close() == [mesh.identity]
        assert mesh["a"].links_due(mesh.now) == []
        mesh.now = mesh["a"].links.by_identity[mesh.identity].retry_at
        assert mesh["a"].links_due(mesh.now) == [mesh.identity]
        mesh["a"].link_failed(mesh.identity, "nothing answers", mesh.now)
    mesh.now += 10
    mesh.open("a", mesh.identity, "b")
    mesh.receive("b", ready(b"w2"))
    mesh.wait()
    assert len(work(mesh.receive("a", request())["b"], b"w2")) == 1


def test_a_late_reply_over_a_new_link_is_dropped():
    mesh = pair()
    (address,) = work(mesh.receive("a", request())["b"])
    mesh.cut("a", mesh.identity)
    mesh.now += 1
    mesh.open("a", mesh.identity, "b")
    mesh.wait()
    assert mesh.receive("b", final(address))["a"] == []


def test_a_request_goes_to_another_broker_when_a_worker_dies():
    mesh = Mesh("a", "b", "c")
    mesh.link("a", "b")
    mesh.link("a", "c")
    mesh.receive("b", ready())
    mesh.receive("c", ready())
    mesh.wait()
    sent = mesh.receive("a", request())
    at, other = ("b", "c") if work(sent["b"]) else ("c", "b")
    mesh.sent = {each: [] for each in mesh.brokers}
    mesh.route(at, mesh[at].unreachable(b"w", 0, mesh.now))
    mesh.route(at, mesh[at].unreachable(b"w", mesh[at].turn, mesh.now))
    assert len(work(mesh.sent[other])) == 1


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
        mesh.route(name, mesh[name].unreachable(worker, turn, mesh.now))
        died += 1
    assert died == 3
    assert sent["a"] == [error(502, "its worker was lost, and this was attempt 3 of 3 (max_attempts)")]


def test_a_request_waits_at_its_first_broker_when_no_worker_is_left():
    mesh = pair()
    mesh.receive("a", request())
    sent = mesh.receive("b", [b"w", b"MDPWX1", b"\x06"])  # it leaves, and then dies
    mesh.sent = {each: [] for each in mesh.brokers}
    mesh.route("b", mesh["b"].unreachable(b"w", mesh["b"].turn, mesh.now))
    assert sent["a"] == mesh.sent["a"] == []
    assert (mesh["a"].registry.queued, mesh["b"].registry.queued) == (1, 0)
    sent = mesh.receive("a", ready())
    assert json.loads(sent["a"][0][5]) == {"attempt": 2}


def test_without_wait_it_is_told_that_no_worker_is_left():
    mesh = pair()
    mesh.receive("b", [b"w", b"MDPWX1", b"\x06"])
    mesh.wait()
    assert mesh.receive("a", request(wait=False))["a"] == [error(404, "no worker offers the service")]


def test_a_draining_broker_withdraws_its_services_and_returns_requests():
    mesh = pair()
    mesh.receive("a", request(b"1"))
    mesh.route("b", mesh["b"].drain(mesh.now))
    sent = mesh.receive("a", request(b"2"))  # before the announcement arrives
    assert sent["a"] == []
    mesh.wait()
    assert mesh.ask("a", b"mmi.services")["services"][0]["remote_credit"] == 0
    assert mesh.receive("b", final(b"1001"))["a"] == [answer()]
    assert mesh["b"].drained


def test_a_closing_broker_returns_what_it_has():
    mesh = pair()
    mesh.receive("a", request(b"1"))
    mesh.sent = {each: [] for each in mesh.brokers}
    mesh.route("b", mesh["b"].close(mesh.now))
    assert mesh.sent["a"] == []
    assert mesh["a"].registry.queued == 1
    assert mesh.ask("a", b"mmi.brokers")["links"][0]["trouble"] == "the other broker has shut down"


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
    mesh.receive("a1", [b"w", b"MDPWX1", b"\x06"])
    for _ in range(5):
        mesh.wait()
    for name in mesh.brokers:
        assert mesh.receive(name, request(wait=False))[name] == [error(404, "no worker offers the service")]


def test_a_request_tells_the_brokers_that_it_has_passed():
    mesh = tree()
    mesh.receive("b1", ready())
    for _ in range(5):
        mesh.wait()
    mesh.receive("a1", request())
    (held,) = mesh["b1"].registry.workers.values()
    (attempt,) = held.held.values()
    assert attempt.request.way.via == ("a1", "a", "r", "b")


# ── brokers by name ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_addressed_to_a_broker_by_name():
    mesh = tree()
    for name in mesh.brokers:
        mesh.receive(name, ready())
    for _ in range(5):
        mesh.wait()
    for name in mesh.brokers:
        (address,) = work(mesh.receive("a1", request(broker=name))[name])
        assert mesh.receive(name, final(address))["a1"] == [answer()]
    assert mesh.ask("b1", b"mmi.brokers")["brokers"] == [
        {"name": name, "hops": hops, "over": "b"} for name, hops in (("b", 1), ("r", 2), ("a", 3), ("a1", 4), ("a2", 4))
    ]
    sent = mesh.receive("b1", request(service=b"mmi.broker", broker="a2"))
    assert json.loads(sent["b1"][0][-1])["broker"] == "a2"


def test_an_unknown_broker_is_502():
    mesh = pair()
    assert mesh.receive("a", request(broker="x"))["a"] == [error(502, "broker x cannot be reached from here")]
    mesh.receive("a", request(broker="b"))
    mesh.receive("a", request(b"2", broker="b"))
    sent = mesh.cut("a", mesh.identity)
    assert sorted(sent["a"]) == [error(502, "broker b cannot be reached from here", number) for number in (b"1", b"2")]


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


def test_two_brokers_of_the_same_name_are_not_linked():
    mesh = Mesh("a", "b")
    mesh["b"].links.name = "a"
    mesh.link("a", "b")
    assert trouble(mesh, "a") == ["both brokers are named a: start one with another --name"]


def test_two_brokers_of_the_same_name_are_not_linked_to_a_third():
    mesh = Mesh("a", "b", "c")
    mesh["c"].links.name = "b"
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


def test_something_that_does_not_know_links_is_no_broker():
    mesh = Mesh("a")
    identity = mesh["a"].add_link("peer", None, "tcp://old")
    mesh["a"].link_opened(identity, mesh.now)
    mesh["a"].receive([identity, b"1", b"", b"MDPCX1", b"\x03", b"mmi.link", b"501"], mesh.now)
    assert trouble(mesh, "a") == ["that broker does not know links, or its answer is malformed"]
    mesh["a"].link_opened(identity, mesh.now)
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


def test_heartbeats_keep_a_link():
    mesh = pair()
    for _ in range(20):
        mesh.receive("b", [b"w", b"MDPWX1", b"\x05"])
        mesh.wait(1.0)
    assert trouble(mesh, "a") == trouble(mesh, "b") == [""]
    assert len(work(mesh.receive("a", request())["b"])) == 1
    assert mesh["a"].stats.disconnected == mesh["b"].stats.disconnected == {}


def test_a_connection_that_is_no_link_any_longer_is_told_so():
    mesh = Mesh("a")
    packed = batch.Batch((b"x",), b"MDPCL1")
    packed.request_to_broker(1, 0, b"echo", b'{"via":["b"]}', [b"x"])
    for message in packed.messages():
        assert mesh["a"].receive(message, mesh.now) == [
            [b"x", b"MDPWL1", b"\x06", b"this connection is not a link any longer"]
        ]


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
        mesh["b"].grant({**ACCESS, **others}, mesh.now)
    mesh.identity = mesh.link("a", "b", role="brokers")
    mesh.receive("b", ready(), ready(b"w2", b"secret"), ready(b"w3", b"other"), role="workers")
    mesh.wait()
    return mesh


def test_the_role_of_the_client_holds_at_every_broker():
    mesh = secured()
    sent = mesh.receive("a", request(user="staff", admin=True), role="shop")
    assert json.loads(sent["b"][0][5]) == {"user": "shop"}
    assert json.loads(mesh.receive("a", request(client=b"d", service=b"other"), role="staff")["b"][0][5]) == {
        "user": "staff", "admin": True,
    }  # fmt: skip


def test_a_broker_refuses_what_its_own_file_does_not_allow():
    mesh = secured(shop=Permissions("shop", call=("else",)))
    (message,) = mesh.receive("a", request(), role="shop")["a"]
    assert message[6] == b"403"


def test_only_a_role_with_link_may_link():
    mesh = Mesh("a", "b", permissions={**ACCESS, "brokers": Permissions("brokers", call=("*",))})
    mesh.link("a", "b", role="brokers")
    assert trouble_of(mesh) == ["role brokers may not link brokers: it needs link = true in the broker's access file"]


def trouble_of(mesh):
    return [link.trouble for link in mesh["a"].links.by_identity.values()]


def test_a_broker_announces_only_what_its_role_may_offer():
    mesh = secured()
    names = [row["name"] for row in mesh.ask("a", b"mmi.services", role="staff")["services"]]
    assert sorted(names) == ["echo", "other"]


def test_a_link_ends_with_its_role():
    mesh = secured()
    mesh.sent = {each: [] for each in mesh.brokers}
    mesh.route("b", mesh["b"].grant({name: role for name, role in ACCESS.items() if name != "brokers"}, mesh.now))
    assert "may not link" in trouble_of(mesh)[0]


def test_a_client_cannot_write_what_only_brokers_can():
    mesh = pair()
    sent = mesh.receive("a", request(via=["b"], attempts=7, user="admin"))
    assert sent["b"][0][5] == b""


# ── a broker that has just started ───────────────────────────────────────────────────────────────────────────────────

PROBE = [b"c", b"", b"MDPCX1", b"\x06"]
COMES_BACK, STAYS_AWAY = [b"c", b"", b"MDPCX1", b"\x06"], [b"c", b"", b"MDPCX1", b"\x07"]


def held_back(other="b", kind="peer"):
    """Return a mesh in which a asks for a link to another broker, and the messages that it has sent for that."""
    mesh = Mesh("a", other)
    mesh.receive(other, ready())
    broker = mesh["a"]
    identity = broker.add_link(kind, None, "tcp://other")
    mesh._ends["a", identity], mesh._ends[other, b"link"] = (other, b"link"), ("a", identity)
    return mesh, identity


def probed(mesh):
    """Return how a broker answers the probe of a client that may come back to it."""
    (answer,) = mesh.receive("a", PROBE)["a"]
    return answer


def test_a_broker_answers_probes_only_when_its_links_have_announced_everything():
    mesh, identity = held_back()
    asked = mesh["a"].link_opened(identity, mesh.now)
    assert probed(mesh) == STAYS_AWAY
    hello, announced = mesh["b"].receive([b"link", *asked[0][1:]], mesh.now)
    mesh.route("b", [hello])
    assert mesh["a"].links.at(identity)
    assert probed(mesh) == STAYS_AWAY  # it is linked, but a request with `wait: false` would fail here
    mesh.route("b", [announced])
    assert probed(mesh) == COMES_BACK
    assert mesh.receive("a", request(wait=False))["b"]


def test_a_broker_whose_link_fails_answers_probes():
    mesh, identity = held_back()
    mesh["a"].link_opened(identity, mesh.now)
    assert probed(mesh) == STAYS_AWAY
    mesh["a"].link_failed(identity, "nothing is listening there", mesh.now)
    assert probed(mesh) == COMES_BACK


def test_a_second_link_between_two_brokers_does_not_delay_answers_to_probes():
    mesh = pair()
    mesh.link("a", "b")
    mesh.wait()
    assert probed(mesh) == COMES_BACK


def test_a_link_to_a_broker_that_drains_does_not_delay_answers_to_probes_for_long():
    mesh, identity = held_back()
    mesh.route("b", mesh["b"].drain(mesh.now))
    mesh.route("a", mesh["a"].link_opened(identity, mesh.now))
    assert mesh["a"].links.at(identity)
    mesh.wait()
    assert probed(mesh) == STAYS_AWAY
    mesh.wait(mesh["a"].limits.heartbeat)
    assert probed(mesh) == COMES_BACK
