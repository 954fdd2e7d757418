"""Contexts that end whatever happened, and sockets for which there is no room."""

import pytest
import zmq

from zmdp.mdp.errors import SettingError
from zmdp.mdp.transport.sockets import dealer, end, new_socket, own_context

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
