"""The connections of a real ROUTER, as its monitor reports them."""

import logging
import math
import resource
import select
import socket
from errno import EHOSTUNREACH
from pathlib import Path

import pytest
import zmq
from support.processes import TIMEOUT_MS
from support.zmtp import RawPeer

from zmdp.mdp.broker.io.connections import Connections, default_max_connections
from zmdp.mdp.broker.io.listener import PROBES, RouterPort
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Access, Permissions
from zmdp.mdp.timers import Alarms
from zmdp.mdp.transport.multipart import receive, send
from zmdp.mdp.transport.sockets import use_family


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


class Port:
    """A ROUTER whose connections are watched."""

    def __init__(self, context, maximum=100, per_address=50, host="127.0.0.1"):
        self.context = context
        self.dealers = []
        limits = Limits(max_connections=maximum, max_connections_per_address=per_address)
        self.alarms = Alarms()
        self.found = Connections(limits, logging.getLogger("zmdp.broker"), self.alarms)
        self.connections = RouterPort(Broker(limits, now=0.0), self.found, context)
        self.router = self.connections.socket
        use_family(self.router, f"tcp://{host}")
        number = self.router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host.replace('[::]', '127.0.0.1')}:{number}"

    @property
    def ended(self):
        return self.found.ended

    @property
    def replaced(self):
        return self.found.replaced

    def to_probe(self, now):
        self.connections.probe(now)
        return self.found.take_to_probe()

    def connect(self, endpoint=None, identity=None):
        """A DEALER, and the routing id under which its first message arrived."""
        dealer = self.context.socket(zmq.DEALER)
        self.dealers.append(dealer)
        dealer.set(zmq.LINGER, 0)
        if identity is not None:
            dealer.set(zmq.ROUTING_ID, identity)
        dealer.connect(endpoint or self.endpoint)
        return dealer, self.hear(dealer)

    def hear(self, dealer):
        dealer.send(b"hello")
        return self.receive()

    def receive(self, attribute=True):
        """Receive a greeting; returns the routing id."""
        assert self.router.poll(TIMEOUT_MS)
        message = receive(self.router, True, self.connections if attribute else None)
        assert message[1:] == [b"hello"]
        return message[0]

    def close(self):
        self.connections.close()
        for each in self.dealers:
            each.close()

    def look_until_something_is_due(self, now):
        poll = select.poll()
        poll.register(self.connections.monitor, select.POLLIN)
        self.connections.look(now)  # what came before this poll is told by nothing else
        while self.alarms.due == math.inf:
            assert poll.poll(TIMEOUT_MS)
            self.connections.look(now)

    def look_until(self, condition):
        poll = select.poll()
        poll.register(self.connections.monitor, select.POLLIN)
        self.connections.look(0.0)
        while not condition():
            assert poll.poll(TIMEOUT_MS)
            self.connections.look(0.0)

    def speak(self, identity, messages=1):
        """A connection that has sent greetings."""
        peer = RawPeer(self.endpoint, identity)
        self.dealers.append(peer)
        for _ in range(messages):
            peer.send(b"hello")
        return peer

    def fence(self):
        """A connection that has sent a greeting, which has been received."""
        peer = self.speak(b"")
        self.receive(attribute=False)
        return peer

    def connect_only(self):
        """A connection without a handshake."""
        peer = RawPeer(self.endpoint, handshake=False)
        self.dealers.append(peer)
        return peer

    def wait_until_free(self, identity, fence, look=True):
        """Wait until the ROUTER has forgotten a peer; `fence` is another one."""
        if look:
            self.look_until(lambda: not self.connections.reaches(identity))
        while send(self.router, [identity, b"are you there?"]) != EHOSTUNREACH:
            self.router.poll(1)
        # The connection has ended, but its id is taken until both of libzmq's threads have said so.
        for _ in range(3):
            fence.send(b"hello")
            self.receive(attribute=False)


@pytest.fixture
def start(context):
    """Start a ROUTER: `start(**limits)`."""
    ports = []

    def run(**settings):
        ports.append(Port(context, **settings))
        return ports[-1]

    yield run
    for port in ports:
        port.close()


@pytest.fixture
def port(start):
    return start()


def own_address():
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return probe.getsockname()[0]


def test_a_peer_that_has_spoken_is_known(port):
    _, one = port.connect()
    _, two = port.connect()
    assert set(port.connections.known) == {one, two}
    assert len(set(port.connections.known.values())) == 2
    port.connections.look(0)
    assert port.alarms.due == math.inf
    assert port.to_probe(1e9) == []


def test_a_peer_whose_connection_has_ended_is_probed_a_few_times(port):
    dealer, identity = port.connect()
    _, other = port.connect()
    dealer.close()
    port.look_until_something_is_due(now=5.0)
    assert set(port.connections.known) == {other}
    for after in PROBES:
        due = 5.0 + after
        assert port.alarms.due == pytest.approx(due)
        assert port.to_probe(due - 1e-6) == []
        assert port.to_probe(due + 1e-9) == [identity]
    assert port.alarms.due == math.inf


def test_a_peer_that_is_known_to_be_gone_is_probed_no_more(port):
    dealers = [port.connect() for _ in range(2)]
    ended = set()
    for dealer, _ in dealers:
        dealer.close()
    while len(ended) < 2:
        port.look_until_something_is_due(now=0.0)
        ended |= set(port.to_probe(0.0))
        if len(ended) < 2:
            for identity in ended:
                port.connections.forget(identity)
    port.connections.forget(dealers[0][1])
    assert set(port.to_probe(10.0)) <= {dealers[1][1]}
    port.connections.forget(dealers[1][1])
    port.connections.forget(b"stranger")
    assert port.to_probe(11.0) == []
    assert port.alarms.due == math.inf


def test_a_connection_that_says_nothing_is_nobodys(port):
    silent = port.context.socket(zmq.DEALER)
    silent.connect(port.endpoint)
    dealer, identity = port.connect()
    silent.close(0)
    dealer.close()
    port.look_until_something_is_due(now=0.0)
    assert port.to_probe(0.0) == [identity]


def test_a_peer_within_the_process_has_no_descriptor(port):
    port.router.bind("inproc://connections")
    _, identity = port.connect("inproc://connections")
    assert port.connections.known == {}
    assert identity


def test_a_connection_that_ended_before_its_first_message_was_read_is_probed_then(port):
    peer = port.speak(b"")
    assert port.router.poll(TIMEOUT_MS)  # it has arrived, and is not read yet
    peer.close()
    port.look_until(lambda: port.found.open == 0)
    assert port.alarms.due == math.inf
    identity = port.receive()
    assert port.to_probe(1.0) == [identity]
    assert port.connections.known == {}


# ── chosen routing ids ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_end_of_a_peer_with_a_chosen_id_is_told(port):
    peer = port.speak(b"me")
    assert port.receive() == b"me"
    assert port.connections.reaches(b"me")
    assert port.connections.known == {}
    peer.close()
    port.look_until(lambda: port.ended)
    assert port.ended == [b"me"]
    assert not port.connections.reaches(b"me")
    port.connections.forget(b"me")
    assert port.connections.reaches(b"me")
    assert port.connections.chosen == {}
    assert port.alarms.due == math.inf


def test_nobody_who_takes_an_id_is_reached_under_it(port):
    fence = port.fence()
    peer = port.speak(b"me")
    port.receive()
    peer.close()
    port.wait_until_free(b"me", fence, look=False)
    assert port.ended == []
    assert not port.connections.reaches(b"me")
    assert port.ended == [b"me"]


def test_a_peer_that_is_still_there_is_not_forgotten(port):
    peer = port.speak(b"me")
    port.receive()
    port.connections.forget(b"me")
    assert set(port.connections.chosen) == {b"me"}
    peer.close()


@pytest.mark.parametrize("reuse", [True, False], ids=["the same descriptor", "another descriptor"])
def test_a_chosen_id_that_comes_from_another_connection_is_told_first(port, reuse):
    fence = port.fence()
    peer = port.speak(b"me")
    port.receive()
    descriptor = port.connections.chosen[b"me"].descriptor
    peer.close()
    port.wait_until_free(b"me", fence)
    other = None if reuse else port.speak(b"other")
    again = port.speak(b"me")
    identities = [port.receive() for _ in range(1 if reuse else 2)]
    assert b"me" in identities
    assert (port.connections.chosen[b"me"].descriptor == descriptor) == reuse
    assert (port.ended, port.replaced) == ([], [b"me"])  # nobody takes the end of the first for that of the second
    assert port.connections.reaches(b"me")
    again.send(b"hello")
    port.receive()
    assert port.replaced == [b"me"]
    again.close()
    if other is not None:
        other.close()


def test_what_a_peer_sent_before_its_connection_ended_comes_from_itself(port):
    peer = port.speak(b"me", messages=3)
    port.receive()
    peer.close()
    port.look_until(lambda: port.ended)
    for _ in range(2):
        assert port.receive() == b"me"
    assert (port.ended, port.replaced) == ([b"me"], [])
    assert not port.connections.reaches(b"me")


def test_a_peer_that_left_before_its_first_message_was_read_is_told_as_ended(port):
    peer = port.speak(b"me")
    assert port.router.poll(TIMEOUT_MS)
    peer.close()
    port.look_until(lambda: port.found.open == 0)
    assert port.ended == []
    assert port.receive() == b"me"
    assert (port.ended, port.replaced) == ([b"me"], [])
    assert not port.connections.reaches(b"me")


def test_a_claimed_id_that_only_begins_like_a_generated_one_is_a_chosen_one(port):
    peer = port.speak(b"\0me")
    port.receive()
    assert set(port.connections.chosen) == {b"\0me"}
    peer.close()


def test_a_peer_within_the_process_may_take_the_id_of_one_that_left(port):
    port.router.bind("inproc://connections")
    fence = port.fence()
    peer = port.speak(b"me")
    port.receive()
    peer.close()
    port.wait_until_free(b"me", fence)
    port.connect("inproc://connections", b"me")
    assert port.replaced == [b"me"]
    assert port.connections.reaches(b"me")


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_connections_over_the_limit_are_ended(start, caplog):
    port = start(maximum=2)
    kept = [port.speak(b"") for _ in range(2)]
    refused = [port.connect_only() for _ in range(8)]
    port.look_until(lambda: port.found.counts["over-limit"] == 8 and port.found.open == 2)
    for each in refused:
        each.wait_for_end()
    for _ in kept:
        port.receive()
    assert caplog.messages.count("ended a new connection from this host: there are 2 already (max-connections)") == 5
    kept.pop().close()
    port.look_until(lambda: port.found.open == 1)
    kept.append(port.speak(b"me"))
    assert port.receive() == b"me"
    assert port.found.counts["accepted"] == 11
    for each in kept:
        each.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]"])
def test_loopback_has_no_share(start, host):
    port = start(maximum=9, per_address=1, host=host)
    kept = [port.speak(b"") for _ in range(3)]
    for _ in kept:
        port.receive()
    assert port.found.counts["over-address-limit"] == 0


def test_an_address_has_a_share(start, caplog):
    port = start(maximum=9, per_address=2, host=own_address())
    kept = [port.speak(b"") for _ in range(2)]
    refused = port.connect_only()
    port.look_until(lambda: port.found.counts["over-address-limit"] == 1)
    refused.wait_for_end()
    for _ in kept:
        port.receive()
    assert "which has 2 already (max-connections-per-address)" in caplog.text
    for each in kept:
        each.close()
    port.look_until(lambda: port.found.open == 0)
    port.speak(b"")
    port.receive()


def test_a_role_has_a_maximum(port, caplog):
    port.found.access = Access(
        Path("access.toml"), b"", b"",
        roles={"shop": Permissions("shop", connections=2), "web": Permissions("web")},
        keys={b"one": "shop", b"two": "shop", b"web": "web"}, named={},
    )  # fmt: skip
    peers = []
    for user in (b"one", b"two", b"web", b"web", b"web"):
        port.connections.user = user
        peers.append(port.speak(b""))
        port.receive()
    assert port.found.counts["over-role-limit"] == 0
    port.connections.user = b"one"
    port.speak(b"")
    port.receive()
    port.look_until(lambda: port.found.open == 5)
    assert port.found.counts["over-role-limit"] == 1
    assert "ended a connection of role shop, which may have 2" in caplog.messages
    peers.pop(0).close()
    port.look_until(lambda: port.found.open == 4)
    port.speak(b"")
    port.receive()
    assert port.found.counts["over-role-limit"] == 1


def test_the_connections_of_a_key_are_ended(port):
    ended, kept = [port.connect_only()], []
    port.look_until(lambda: port.found.open == 1)  # it has sent nothing, so its key is not known
    for user, peers in ((b"shop", ended), (b"web", kept), (b"shop", ended)):
        port.connections.user = user
        peers.append(port.speak(b""))
        port.receive()
    port.connections.end_users({b"shop", b"nobody"})
    for peer in ended:
        peer.wait_for_end()
    port.look_until(lambda: port.found.open == 1)
    kept[0].send(b"hello")
    port.receive()


def test_a_connection_that_reuses_a_descriptor_is_not_ended_for_another(port):
    fence = port.fence()
    port.connections.user = b"shop"
    peer = port.speak(b"me")
    port.receive()
    before = port.connections.chosen[b"me"]
    peer.close()
    port.wait_until_free(b"me", fence, look=False)
    other = port.speak(b"")
    assert port.router.poll(TIMEOUT_MS)
    assert port.connections._open[before.descriptor] is before  # as far as is known
    port.connections.end(b"me")
    assert before.ended
    assert port.connections._open[before.descriptor] is not before
    port.receive()
    other.send(b"hello")
    port.receive()


def test_failed_handshakes_are_counted(port, caplog):
    caplog.set_level(logging.INFO)
    port.connect_only().close()
    port.look_until(lambda: port.found.counts["handshake-ended"] == 1)
    assert "a connection failed in its handshake: the peer ended it, or took too long" in caplog.messages
    assert port.found.open == 0


def test_the_default_number_of_connections_leaves_room_for_files(monkeypatch):
    for files, expected in ((20_000, 19_744), (300, 150), (1, 1), (resource.RLIM_INFINITY, (1 << 20) - 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert default_max_connections() == expected
