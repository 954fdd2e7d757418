"""Contexts that end whatever happened, and endpoints that are checked without connecting to them."""

import pytest
import zmq

from zmdp.mdp.errors import SettingError
from zmdp.mdp.transport.endpoints import checked_endpoints
from zmdp.mdp.transport.sockets import dealer, end, new_socket, own_context

VALID = [
    "tcp://127.0.0.1:5555",
    "tcp://localhost:0",
    "tcp://a_b-c.example:65535",
    "tcp://[::1]:5555",
    "tcp://[fe80::1%lo]:5555",
    "tcp://127.0.0.2:0;127.0.0.1:5555",
    "ipc:///tmp/broker",
    "ipc://@abstract",
    "inproc://here",
]
INVALID = [
    "nonsense",
    "",
    "://a",
    "tcp://",
    "tcp:/a:1",
    "tcp://a",
    "tcp://a:",
    "tcp://a:x",
    "tcp://a:*",
    "tcp://*:1",
    "tcp://a:99999",
    "tcp://a:1/path",
    "tcp://a b:1",
    "tcp://user@a:1",
    "tcp://-a:1",
    "tcp://größe:1",
    "tcp://::1:5555",
    "TCP://a:1",
    " tcp://a:1",
    "http://a:1",
    "udp://a:1",
    "ipc://",
    "ipc://@",
    "ipc:///" + "x" * 200,
    "inproc://",
    b"tcp://127.0.0.1:5555",
    None,
]


@pytest.fixture
def context():
    made = own_context()
    yield made
    end(made)


@pytest.mark.parametrize("endpoint", VALID)
def test_an_endpoint_that_is_valid_can_be_connected_to(context, endpoint):
    assert checked_endpoints(endpoint) == [endpoint]
    dealer(context, endpoint, {zmq.LINGER: 0}).close()


@pytest.mark.parametrize("endpoint", INVALID)
def test_an_endpoint_that_is_not_valid(endpoint):
    with pytest.raises(SettingError, match=r"is not a valid endpoint: |it must be one endpoint such as"):
        checked_endpoints([endpoint])


def test_a_context_ends_although_a_socket_was_left_open():
    made = own_context()
    left = new_socket(made, zmq.DEALER)
    left.connect("tcp://127.0.0.1:1")
    left.send(b"which nobody will get")
    end(made)
    assert made.closed
    assert left.closed


@pytest.mark.parametrize(("room", "monitored"), [(2, 0), (3, int(zmq.Event.CONNECTED))])
def test_a_context_that_has_no_room_for_another_socket(room, monitored):
    made = zmq.Context()
    made.set(zmq.MAX_SOCKETS, room)
    with made:
        opened = [dealer(made, "tcp://127.0.0.1:1", {zmq.LINGER: 0}) for _ in range(2)]
        with pytest.raises(SettingError, match=r"as many sockets as it may: set zmq\.MAX_SOCKETS"):
            dealer(made, "tcp://127.0.0.1:1", {zmq.LINGER: 0}, monitored=monitored)
        for each in opened:
            each.close()
