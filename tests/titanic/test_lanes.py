"""What goes into a pack, and how many requests a service gets."""

import pytest

from zmdp.titanic import lanes
from zmdp.titanic.frames import pack
from zmdp.titanic.lanes import Lane, pack_size
from zmdp.titanic.store import Claimed
from zmdp.titanic.uuids import new_uuid


def claimed(number, body=b"body", **fields):
    made = Claimed(number, new_uuid(), "up", "me", 1, 0, 0, 0, None, None, pack([body]), "ann")
    return made._replace(**fields)


def lane(*requests, rows=100, row=True):
    size = pack_size()
    size.rows, size.understood = rows, True
    made = Lane("up", 0, size)
    for each in requests:
        made.add(each, row=row)
    return made


def taken(made, *, at_once=False):
    """Return the ids of the requests in each pack; each pack is answered before the next one, or all are `at_once`."""
    packs = []
    while made.buffer:
        packs.append([each.claimed.id for each in made.take().members])
        made.packs *= at_once
    return packs


def test_only_rows_of_the_same_owner_with_the_same_headers_share_a_pack(monkeypatch):
    monkeypatch.setattr(lanes, "MIN_PACKS", 1)
    others = [claimed(3, owner="bob"), claimed(4, headers='{"a":"b"}'), claimed(5), claimed(6), claimed(7, attempt=2)]
    two_frames = claimed(8, body=b"")._replace(body=pack([b"a", b"b"]))
    assert taken(lane(claimed(1), claimed(2), *others, two_frames)) == [[1, 2], [3], [4], [5, 6], [7], [8]]
    assert taken(lane(claimed(1), claimed(2), row=False)) == [[1], [2]]


def test_the_size_of_packs_is_limited(monkeypatch):
    monkeypatch.setattr(lanes, "MAX_PACKED_BYTES", 3 * len(claimed(1).body))
    monkeypatch.setattr(lanes, "MIN_PACKS", 1)
    assert taken(lane(*map(claimed, range(5)))) == [[0, 1, 2], [3, 4]]
    assert taken(lane(*map(claimed, range(5)), rows=2)) == [[0, 1], [2, 3], [4]]


def test_several_workers_get_some():
    assert [len(ids) for ids in taken(lane(*map(claimed, range(30))), at_once=True)] == [8, 8, 7, 7]


def test_a_pack_that_is_not_full_waits_while_enough_are_being_executed():
    made = lane(*map(claimed, range(lanes.MIN_PACKS)), rows=3)
    made.credit = 100
    sent = [made.take() for _ in range(lanes.MIN_PACKS)]
    for number in (10, 11, 12):
        made.add(claimed(number), row=True)
        assert made.is_free() == (number == 12)  # it is full
    made.executed(sent.pop())
    made.take()
    made.add(claimed(13), row=True)
    assert not made.is_free()
    assert made.is_free(patient=False)
    made.executed(sent.pop())
    assert made.is_free()


@pytest.mark.parametrize(("under_way", "following"), [("rows", "single"), ("singles", "row")])
def test_only_rows_wait_and_only_for_rows(under_way, following):
    made = lane(*map(claimed, range(lanes.MIN_PACKS)), rows=3, row=under_way == "rows")
    made.credit = 100
    for _ in range(lanes.MIN_PACKS):
        made.take()
    made.add(claimed(10), row=following == "row")
    assert made.is_free()


def test_rows_wait_for_others_only_for_a_moment():
    made = lane(*map(claimed, range(8)), rows=2)
    made.credit = 100
    for _ in range(lanes.MIN_PACKS):
        made.take()
    made.add(claimed(10), row=True)
    assert [each.claimed.id for each in made.take().members] == [10]


def test_room_for_rows_follows_the_size_of_packs():
    made = lane(*map(claimed, range(50)), claimed(51, attempt=2), rows=10)
    made.credit = 3
    assert made.room == 6
    made.take()
    assert (made.room, made.held, made.in_flight) == (60, 51, 1)
    while len(made.buffer) > 1:
        made.take()
    last = made.take()
    assert made.room == 6
    made.executed(last)
    assert made.held == 50
    assert not made.drop(last.members[0])
