"""The ends of connections, noticed through the monitor of a real ROUTER."""

import select

import pytest
import zmq

from zmdp.mdp.broker.departures import PROBES, Departures
from zmdp.mdp.transport.multipart import receive


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


class Port:
    """A ROUTER whose connections are watched."""

    def __init__(self, context):
        self.context = context
        self.dealers = []
        self.router = context.socket(zmq.ROUTER)
        self.departures = Departures(self.router, context)
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
            assert receive(self.router, True, self.departures) == [identity, b"hello"]
            return dealer
        dealer.close(0)
        self.departures.look(0)
        self.departures.forget(identity)
        return None

    def hear(self, dealer):
        dealer.send(b"hello")
        assert self.router.poll(10_000)
        message = receive(self.router, True, self.departures)
        assert message[1:] == [b"hello"]
        return message[0]

    def close(self):
        self.departures.close()
        for each in (self.router, *self.dealers):
            each.close(0)

    def look_until_something_is_due(self, now):
        poll = select.poll()
        poll.register(self.departures.descriptor, select.POLLIN)
        self.departures.look(now)  # what came before this poll is told by nothing else
        while self.departures.deadline() is None:
            assert poll.poll(10_000)
            self.departures.look(now)


@pytest.fixture
def port(context):
    port = Port(context)
    yield port
    port.close()


def test_a_peer_that_has_spoken_is_known(port):
    _, one = port.connect()
    _, two = port.connect()
    assert set(port.departures.known) == {one, two}
    assert len(set(port.departures.known.values())) == 2
    port.departures.look(0)
    assert port.departures.deadline() is None
    assert port.departures.to_probe(1e9) == []


def test_a_peer_whose_connection_has_ended_is_probed_a_few_times(port):
    dealer, identity = port.connect()
    _, other = port.connect()
    dealer.close()
    port.look_until_something_is_due(now=5.0)
    assert set(port.departures.known) == {other}
    for after in PROBES:
        due = 5.0 + after
        assert port.departures.deadline() == pytest.approx(due)
        assert port.departures.to_probe(due - 1e-6) == []
        assert port.departures.to_probe(due + 1e-9) == [identity]
    assert port.departures.deadline() is None


def test_a_peer_that_is_known_to_be_gone_is_probed_no_more(port):
    dealers = [port.connect() for _ in range(2)]
    ended = set()
    for dealer, _ in dealers:
        dealer.close()
    while len(ended) < 2:
        port.look_until_something_is_due(now=0.0)
        ended |= set(port.departures.to_probe(0.0))
        if len(ended) < 2:
            for identity in ended:
                port.departures.forget(identity)
    port.departures.forget(dealers[0][1])
    assert set(port.departures.to_probe(10.0)) <= {dealers[1][1]}
    port.departures.forget(dealers[1][1])
    port.departures.forget(b"stranger")
    assert port.departures.deadline() is None


def test_a_peer_that_comes_back_under_its_name_is_known_again(port):
    dealer, _ = port.connect(identity=b"me")
    dealer.close()
    port.look_until_something_is_due(now=0.0)
    assert port.departures.known == {}
    again = None
    while again is None:
        again = port.connect_again(b"me")
    assert set(port.departures.known) == {b"me"}
    again.close()
    port.departures.forget(b"me")
    port.look_until_something_is_due(now=1.0)
    assert port.departures.to_probe(1.0) == [b"me"]


def test_a_connection_that_says_nothing_is_nobodys(port):
    silent = port.context.socket(zmq.DEALER)
    silent.connect(port.endpoint)
    dealer, identity = port.connect()
    silent.close(0)
    dealer.close()
    port.look_until_something_is_due(now=0.0)
    assert port.departures.to_probe(0.0) == [identity]


def test_a_peer_within_the_process_has_no_descriptor(port):
    port.router.bind("inproc://departures")
    _, identity = port.connect("inproc://departures")
    assert port.departures.known == {}
    assert identity


def test_a_connection_that_ended_before_its_first_message_was_read_is_probed_then(port):
    dealer = port.context.socket(zmq.DEALER)
    port.dealers.append(dealer)
    dealer.connect(port.endpoint)
    dealer.send(b"hello")
    assert port.router.poll(10_000)  # it has arrived, and is not read yet
    dealer.close(0)
    ended = select.poll()
    ended.register(port.departures.descriptor, select.POLLIN)
    while not port.departures._ended:
        assert ended.poll(10_000)
        port.departures.look(1.0)
    assert port.departures.deadline() is None
    identity, _ = receive(port.router, True, port.departures)
    assert port.departures.to_probe(1.0) == [identity]
    assert port.departures._ended == set()
