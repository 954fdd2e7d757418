"""The ends of connections, noticed through the monitor of a real ROUTER."""

import logging
import select

import pytest
import zmq

from zmdp.mdp.broker.connections import PROBES, Connections
from zmdp.mdp.transport.multipart import receive


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


class Port:
    """A ROUTER whose connections are watched."""

    def __init__(self, context, maximum=100, per_address=50):
        self.context = context
        self.dealers = []
        self.router = context.socket(zmq.ROUTER)
        self.ended = []
        self.replaced = []
        self.connections = Connections(
            self.router,
            context,
            maximum=maximum,
            per_address=per_address,
            logger=logging.getLogger("zmdp.broker"),
            on_end=lambda identity, _: self.ended.append(identity),
            on_replace=lambda identity, _: self.replaced.append(identity),
        )
        self.endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def connect(self, endpoint=None, identity=None):
        """A DEALER, and the routing id under which its first message arrived."""
        dealer = self.context.socket(zmq.DEALER)
        self.dealers.append(dealer)
        dealer.set(zmq.LINGER, 0)
        if identity is not None:
            dealer.set(zmq.ROUTING_ID, identity)
        dealer.connect(endpoint or self.endpoint)
        return dealer, self.hear(dealer)

    def connect_again(self, identity):
        """A DEALER of that name; None if the ROUTER, which is behind its monitor, has not forgotten the one before."""
        dealer = self.context.socket(zmq.DEALER)
        self.dealers.append(dealer)
        dealer.set(zmq.ROUTING_ID, identity)
        dealer.connect(self.endpoint)
        dealer.send(b"hello")
        if self.router.poll(200):
            assert receive(self.router, True, self.connections) == [identity, b"hello"]
            return dealer
        dealer.close(0)
        self.connections.look(0)
        self.connections.forget(identity)
        return None

    def hear(self, dealer):
        dealer.send(b"hello")
        assert self.router.poll(10_000)
        message = receive(self.router, True, self.connections)
        assert message[1:] == [b"hello"]
        return message[0]

    def close(self):
        self.connections.close()
        for each in (self.router, *self.dealers):
            each.close(0)

    def look_until_something_is_due(self, now):
        poll = select.poll()
        poll.register(self.connections.descriptor, select.POLLIN)
        self.connections.look(now)  # what came before this poll is told by nothing else
        while self.connections.deadline() is None:
            assert poll.poll(10_000)
            self.connections.look(now)


@pytest.fixture
def port(context):
    port = Port(context)
    yield port
    port.close()


def test_a_peer_that_has_spoken_is_known(port):
    _, one = port.connect()
    _, two = port.connect()
    assert set(port.connections.known) == {one, two}
    assert len(set(port.connections.known.values())) == 2
    port.connections.look(0)
    assert port.connections.deadline() is None
    assert port.connections.to_probe(1e9) == []


def test_a_peer_whose_connection_has_ended_is_probed_a_few_times(port):
    dealer, identity = port.connect()
    _, other = port.connect()
    dealer.close()
    port.look_until_something_is_due(now=5.0)
    assert set(port.connections.known) == {other}
    for after in PROBES:
        due = 5.0 + after
        assert port.connections.deadline() == pytest.approx(due)
        assert port.connections.to_probe(due - 1e-6) == []
        assert port.connections.to_probe(due + 1e-9) == [identity]
    assert port.connections.deadline() is None


def test_a_peer_that_is_known_to_be_gone_is_probed_no_more(port):
    dealers = [port.connect() for _ in range(2)]
    ended = set()
    for dealer, _ in dealers:
        dealer.close()
    while len(ended) < 2:
        port.look_until_something_is_due(now=0.0)
        ended |= set(port.connections.to_probe(0.0))
        if len(ended) < 2:
            for identity in ended:
                port.connections.forget(identity)
    port.connections.forget(dealers[0][1])
    assert set(port.connections.to_probe(10.0)) <= {dealers[1][1]}
    port.connections.forget(dealers[1][1])
    port.connections.forget(b"stranger")
    assert port.connections.deadline() is None


def test_a_peer_that_comes_back_under_its_name_is_known_again(port):
    dealer, _ = port.connect(identity=b"me")
    dealer.close()
    port.look_until_something_is_due(now=0.0)
    assert port.connections.known == {}
    again = None
    while again is None:
        again = port.connect_again(b"me")
    assert set(port.connections.known) == {b"me"}
    again.close()
    port.connections.forget(b"me")
    port.look_until_something_is_due(now=1.0)
    assert port.connections.to_probe(1.0) == [b"me"]


def test_a_connection_that_says_nothing_is_nobodys(port):
    silent = port.context.socket(zmq.DEALER)
    silent.connect(port.endpoint)
    dealer, identity = port.connect()
    silent.close(0)
    dealer.close()
    port.look_until_something_is_due(now=0.0)
    assert port.connections.to_probe(0.0) == [identity]


def test_a_peer_within_the_process_has_no_descriptor(port):
    port.router.bind("inproc://connections")
    _, identity = port.connect("inproc://connections")
    assert port.connections.known == {}
    assert identity


def test_a_connection_that_ended_before_its_first_message_was_read_is_probed_then(port):
    dealer = port.context.socket(zmq.DEALER)
    port.dealers.append(dealer)
    dealer.connect(port.endpoint)
    dealer.send(b"hello")
    assert port.router.poll(10_000)  # it has arrived, and is not read yet
    dealer.close(0)
    ended = select.poll()
    ended.register(port.connections.descriptor, select.POLLIN)
    while not port.connections._ended:
        assert ended.poll(10_000)
        port.connections.look(1.0)
    assert port.connections.deadline() is None
    identity, _ = receive(port.router, True, port.connections)
    assert port.connections.to_probe(1.0) == [identity]
    assert port.connections._ended == set()
