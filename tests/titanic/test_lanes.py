"""How many requests a service gets."""

from zmdp.titanic.attempts import Attempt
from zmdp.titanic.lanes import MAX_CLAIMED, Lane
from zmdp.titanic.store import Claimed
from zmdp.titanic.uuids import new_uuid


def lane(*, credit, requests=0):
    made = Lane("up", credit)
    for number in range(requests):
        claimed = Claimed(number, new_uuid(), "up", "me", 1, 0, 0, 0, None, None, b"", "")
        made.add(Attempt(None, claimed, None))
    return made


def test_the_broker_gets_twice_the_credit_in_order():
    made = lane(credit=2, requests=5)
    assert [each.claimed.id for each in iter(made.next, None)] == [0, 1, 2, 3]
    assert (made.held, made.in_flight) == (5, 4)
    made.executed()
    made.drop(made.buffer[0])
    assert (made.held, made.in_flight, made.next()) == (3, 3, None)


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
