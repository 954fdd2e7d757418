"""How much of unfinished messages arrives over real TCP connections."""

import socket
import sys

import pytest
from support.processes import eventually

from zmdp.mdp.broker.unfinished import (
    FIND_SECONDS,
    FOUND_AT_ONCE,
    MAX_UNEXPLAINED,
    WATCH_BYTES,
    WATCH_SECONDS,
    Inflow,
    Unfinished,
    bytes_read,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a connection has received")


class Connection:
    """A TCP connection; what has arrived is read at once, as libzmq does."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.peer = socket.create_connection(server.getsockname())
            self.socket, _ = server.accept()
        self.inflow = Inflow(self.socket.fileno())
        self._sent = 0

    def send(self, size):
        while size:
            part = min(size, 1 << 16)
            self.peer.sendall(bytes(part))
            self.socket.recv(part, socket.MSG_WAITALL)
            self._sent += part
            size -= part
        eventually(lambda: bytes_read(self.inflow.descriptor) == self._sent)

    def close(self):
        self.socket.close()
        self.peer.close()


@pytest.fixture
def connect():
    opened = []

    def run():
        opened.append(Connection())
        return opened[-1]

    yield run
    for each in opened:
        each.close()


class Clock:
    """Checks the connections as the broker does, one step after the other."""

    def __init__(self, *connections, one=1 << 20, total=1 << 30):
        self.allocated = 0
        self.unfinished = Unfinished(one, total, lambda: self.allocated)
        self.inflows = [each.inflow for each in connections]
        self.now = 0.0

    def step(self, heard=None, charged=0):
        """Look at those that are watched, then for others; return those in excess.

        Everything that arrived before `now`, or when the broker was `heard`, has been given to it.
        """
        self.now += FIND_SECONDS
        excess = self.unfinished.excess(self.now, self.now if heard is None else heard, charged)
        self.unfinished.find(self.inflows, self.now)
        return excess


def test_a_message_without_end_is_noticed(connect):
    one = connect()
    clock = Clock(one)
    one.send(WATCH_BYTES + 1)
    assert clock.step() == []
    assert one.inflow.watched
    one.send(1 << 20)
    assert clock.step() == []  # what has arrived now may be complete messages, which are about to be given
    assert clock.step() == [one.inflow]


def test_complete_messages_are_not_counted(connect):
    one = connect()
    clock = Clock(one)
    for _ in range(10):
        one.send(1 << 20)
        assert clock.step() == []
        one.inflow.take()


def test_little_is_not_watched(connect):
    one = connect()
    clock = Clock(one)
    one.send(WATCH_BYTES)
    assert clock.step() == []
    assert not one.inflow.watched


def test_little_again_and_again_is_watched(connect):
    one = connect()
    clock = Clock(one, one=8 * WATCH_BYTES)
    excess = []
    for _ in range(12):
        one.send(WATCH_BYTES)
        excess += clock.step()
    assert one.inflow in excess


def test_nobody_is_judged_by_what_the_broker_has_not_been_given_yet(connect):
    one = connect()
    clock = Clock(one)
    one.inflow.take()
    one.send(1 << 20)
    clock.step()
    watched_at = clock.now
    one.send(1 << 21)
    for _ in range(3):
        assert clock.step(heard=watched_at) == []
    assert clock.step() == [one.inflow]


def test_what_the_kernel_still_has_is_not_counted(connect):
    one = connect()
    one.send(1000)
    one.peer.sendall(bytes(500))
    eventually(lambda: one.socket.recv(1000, socket.MSG_PEEK) == bytes(500))
    assert bytes_read(one.inflow.descriptor) == 1000


def test_of_too_many_unfinished_messages_those_of_unknown_peers_end_first(connect):
    known, small, large = connect(), connect(), connect()
    clock = Clock(known, small, large, total=3 << 19)
    known.inflow.take()
    for each, size in [(known, 1 << 20), (small, 1 << 18), (large, 1 << 19)]:
        each.send(size)
    clock.step()
    known.send(1 << 20)
    assert clock.step() == []
    assert clock.step() == [large.inflow]


def test_a_connection_that_exceeds_both_limits_is_reported_once(connect):
    one, other = connect(), connect()
    clock = Clock(one, other, total=1 << 20)
    one.send(1 << 21)
    other.send(1 << 18)
    clock.step()
    assert clock.step() == [one.inflow]


def test_tiny_frames_are_noticed_by_the_memory_that_they_take(connect):
    one, idle = connect(), connect()
    clock = Clock(one, idle, one=1 << 24)
    one.send(3 * WATCH_BYTES)
    idle.send(1)
    clock.step()
    assert clock.step() == []
    one.send(MAX_UNEXPLAINED // 50)
    clock.allocated = MAX_UNEXPLAINED + (4 << 20)
    clock.step(charged=4 << 20)
    assert clock.step(charged=4 << 20) == []  # accounted for
    assert clock.step(charged=0) == [one.inflow]


def test_memory_that_others_take_is_no_reason_to_end_a_small_message(connect):
    one = connect()
    clock = Clock(one)
    one.send(3 * WATCH_BYTES)
    clock.step()
    clock.step()
    clock.allocated = 100 * MAX_UNEXPLAINED
    assert [clock.step() for _ in range(3)] == [[], [], []]


def test_a_closed_connection_is_forgotten(connect):
    one = connect()
    clock = Clock(one)
    one.send(1 << 21)
    clock.step()
    one.inflow.end()
    assert [clock.step() for _ in range(3)] == [[], [], []]
    assert not one.inflow.watched


def test_a_unix_socket_is_never_watched():
    left, right = socket.socketpair()
    with left, right:
        inflow = Inflow(left.fileno())
        right.sendall(bytes(1000))
        unfinished = Unfinished(0, 0)
        assert unfinished.find([inflow], 1.0) == []


def test_many_connections_are_searched_in_turns(connect):
    one = connect()
    one.send(WATCH_BYTES + 1)
    clock = Clock()
    clock.inflows = [*(Inflow(-1) for _ in range(2 * FOUND_AT_ONCE)), one.inflow]
    for watched in (False, False, True):
        clock.step()
        assert one.inflow.watched == watched


def test_the_next_look_is_sooner_while_much_arrives(connect):
    one = connect()
    clock = Clock(one)
    one.send(WATCH_BYTES + 1)
    clock.step()
    one.send(1)
    clock.step()
    assert clock.unfinished.deadline() == clock.now + WATCH_SECONDS
    clock.step()  # nothing more has arrived
    clock.step()
    assert clock.unfinished.deadline() == clock.now + FIND_SECONDS
    assert one.inflow.watched


def test_a_message_that_pauses_is_still_unfinished(connect):
    one = connect()
    clock = Clock(one)
    excess = []
    for _ in range(5):
        one.send(1 << 18)
        for _ in range(3):
            excess += clock.step()
    assert one.inflow in excess
