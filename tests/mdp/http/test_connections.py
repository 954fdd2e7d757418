"""Which connection must go when there are too many."""

from types import SimpleNamespace

import pytest

from zmdp.mdp.http.connections import MAX_REFUSED, Connections, Phase
from zmdp.mdp.http.limits import ConnectionLimits


class Member:
    def __init__(self, address):
        self.address = address
        self.phase = Phase.WAITING
        self.unfinished = 0
        self.aborted = False
        self.arriving = False

    def is_arriving(self):
        return self.arriving

    def abort(self):
        self.aborted = True


@pytest.fixture
def connections():
    return Connections(ConnectionLimits(max_connections=6), SimpleNamespace(memory=0))


def enter(connections, address, phase=Phase.WAITING, count=1):
    members = [Member(address) for _ in range(count)]
    for member in members:
        assert connections.enter(member)
        connections.move(member, phase)
    return members


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.IDLE, Phase.UPLOADING, Phase.UNREAD, Phase.OPEN])
def test_those_with_a_request_stay(connections, phase):
    working = enter(connections, "127.0.0.1", Phase.WORKING, 5)
    (old,) = enter(connections, "127.0.0.1", phase)
    enter(connections, "127.0.0.1")
    assert old.aborted
    assert not any(each.aborted for each in working)
    assert len(connections) == 6


def test_the_first_phase_goes_first_and_the_longest_in_it(connections):
    idle, first, second = (enter(connections, "127.0.0.1", phase)[0] for phase in (2, 1, 1))
    enter(connections, "127.0.0.1", Phase.WORKING, 3)
    for expected in (first, second, idle):
        enter(connections, "127.0.0.1", Phase.WORKING)
        assert [each for each in (first, second, idle) if each.aborted][-1:] == [expected] or expected.aborted
    assert not connections.enter(Member("127.0.0.1"))


def test_an_address_that_has_half_makes_room_itself(connections):
    others = enter(connections, "10.0.0.2", Phase.WAITING, 2)
    own = enter(connections, "10.0.0.1", Phase.WORKING, 2) + enter(connections, "10.0.0.1")
    enter(connections, "10.0.0.1", Phase.WORKING)
    assert own[-1].aborted
    refused = Member("10.0.0.1")
    assert not connections.enter(refused)
    assert refused.phase is Phase.REFUSED
    assert not any(each.aborted for each in others)


def test_the_address_with_most_connections_makes_room(connections):
    few = enter(connections, "10.0.0.1", Phase.WAITING, 2)
    many = enter(connections, "127.0.0.1", Phase.WAITING, 4)
    enter(connections, "10.0.0.3")
    assert [each.aborted for each in many] == [True, False, False, False]
    assert not any(each.aborted for each in few)


def test_a_request_that_is_about_to_arrive_stays_while_slower_ones_can_go(connections):
    (new,) = enter(connections, "10.0.0.1", Phase.WAITING)
    slow, fast = enter(connections, "127.0.0.1", Phase.UPLOADING, 2)
    new.arriving = fast.arriving = True
    enter(connections, "127.0.0.1", Phase.OPEN, 3)
    enter(connections, "127.0.0.1", Phase.WORKING)
    assert [each.aborted for each in (new, slow, fast)] == [False, True, False]
    enter(connections, "127.0.0.1", Phase.WORKING)
    assert new.aborted


def test_refused_connections_are_few_and_take_no_place(connections):
    enter(connections, "127.0.0.1", Phase.WORKING, 6)
    refused = [Member("127.0.0.1") for _ in range(MAX_REFUSED + 1)]
    assert not any(connections.enter(each) for each in refused)
    assert [each.aborted for each in refused] == [True] + [False] * MAX_REFUSED
    for each in list(connections):
        connections.leave(each)
    assert len(connections) == 0
