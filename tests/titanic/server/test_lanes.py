"""How many requests a service gets."""

from zmdp.titanic.api.submission import new_uuid
from zmdp.titanic.db.store import Claim, Claimed, Lease, Turns
from zmdp.titanic.server.attempt import Attempt
from zmdp.titanic.server.dispatch import MAX_CLAIMED, Capacity, Lane


def lane(*, credit, requests=0, per_group=None):
    made = Lane("up", Capacity(credit, per_group))
    for number in range(requests):
        made.add(attempt(number))
    return made


def attempt(number=0, group=""):
    claimed = Claimed(number, new_uuid(), "up", "me", 1, 0, 0, 0, None, None, b"", "", group)
    return Attempt(claimed, None, None, None)


def test_the_broker_gets_twice_the_credit_in_order():
    made = lane(credit=2, requests=5)
    assert [each.claimed.id for each in iter(made.next, None)] == [0, 1, 2, 3]
    assert (made.held, made.in_flight) == (5, 4)
    made.executed(attempt())
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
    made.capacity = Capacity(5000)
    assert made.room == MAX_CLAIMED


def claim(made):
    limit = made.begin_claim()
    return Claim("up", limit, Lease("me", 10), 0.0, turns=made.turns()) if limit else None


def test_groups_take_turns_as_long_as_requests_of_some_are_found():
    made = lane(credit=2)
    made.look(grouped=False)
    asked = claim(made)
    assert asked.turns is None
    made.look(grouped=True)  # one that comes during a claim is looked for in the next
    made.end_claim(asked, [])
    asked = claim(made)
    assert asked.turns == Turns("", {}, None)
    found = attempt(1, "a")
    made.end_claim(asked, [found.claimed])
    made.add(found)
    asked = claim(made)  # it has left room, but perhaps also requests of the group
    assert asked.turns == Turns("a", {"a": 1}, None)
    made.end_claim(asked, [])
    assert (claim(made), made.grouped) == (None, False)


def test_a_full_group_is_looked_at_again_once_half_of_its_requests_have_ended():
    made = lane(credit=100, requests=4, per_group=2)
    made.look(grouped=False)
    asked = claim(made)
    assert asked.turns == Turns("", {"": 4}, 4)
    made.end_claim(asked, [])
    made.executed(made.next())
    assert claim(made) is None
    made.executed(made.next())
    assert claim(made).turns == Turns("", {"": 2}, 4)
