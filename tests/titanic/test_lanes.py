"""How many requests a service gets, and when requests get their turn that are not stored yet."""

from functools import partial

from zmdp.titanic.callers import Turn
from zmdp.titanic.lanes import MAX_CLAIMED, Lane
from zmdp.titanic.store import Claimed
from zmdp.titanic.uuids import new_uuid


def lane(*, credit, requests=0):
    made = Lane("up", credit)
    for number in range(requests):
        made.add(Claimed(number, new_uuid(), "up", "me", 1, 0, 0, 0, None, None, b"", ""))
    return made


def test_the_broker_gets_twice_the_credit_in_order():
    made = lane(credit=2, requests=5)
    sent = []
    while made.is_free:
        sent.append(made.take())
    assert [each.claimed.id for each in sent] == [0, 1, 2, 3]
    assert (made.held, made.in_flight) == (5, 4)
    made.executed()
    assert made.is_free
    made.drop(made.buffer[0])
    assert (made.held, made.in_flight) == (3, 3)


def test_more_is_claimed_the_faster_the_service_is():
    made = lane(credit=2)
    assert made.room == 4
    made.ended = 1000
    made.observe(0.5)
    assert made.room == 104
    made.observe(0.5)
    assert made.room == 54
    made.credit = 5000
    assert made.room == MAX_CLAIMED


def test_turns_are_given_while_there_is_room_and_nothing_stored_waits_for_it():
    made, run, stored = lane(credit=1), [], []
    turns = [Turn(made.turns, at, partial(run.append, at), partial(stored.append, at)) for at in range(5)]
    made.pending = True
    made.give_turns()
    assert run == []
    made.pending = False
    turns[1].withdraw()  # its caller has gone away
    made.give_turns()
    assert (run, made.held, made.idle) == ([0, 2], 2, False)
    made.end_turns(3)
    assert stored == [3]
    made.release()
    made.give_turns()
    turns[4].end()
    assert (run, stored) == ([0, 2, 4], [3])
