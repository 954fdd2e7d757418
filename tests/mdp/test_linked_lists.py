"""Lines that anyone in them can leave at once."""

import pytest

from zmdp.mdp.timers import LinkedList, Node

NAMES = {}
"""What is compiled takes no attributes and no subclasses."""


def named(name):
    thing = Node()
    NAMES[thing] = name
    return thing


def names(line):
    return b"".join(NAMES[each] for each in line)


def test_a_list_keeps_its_order():
    line = LinkedList()
    for name in (b"b", b"c"):
        line.append(named(name))
    line.prepend(named(b"a"))
    assert names(line) == b"abc"


def test_items_can_be_prepended():
    line = LinkedList()
    line.prepend(named(b"b"))
    line.prepend(named(b"a"))
    line.append(named(b"c"))
    assert names(line) == b"abc"


@pytest.mark.parametrize(
    ("leaving", "left"), [("a", b"bc"), ("b", b"ac"), ("c", b"ab"), ("ab", b"c"), ("ca", b"b"), ("bca", b"")]
)
def test_any_item_can_be_removed(leaving, left):
    line = LinkedList()
    waiting = {name: named(name.encode()) for name in "abc"}
    for each in waiting.values():
        line.append(each)
    for name in leaving:
        line.remove(waiting[name])
    assert names(line) == left
    line.append(named(b"z"))
    assert names(line) == left + b"z"


@pytest.mark.parametrize("back", ["append", "prepend"])
def test_a_removed_item_can_be_added_again(back):
    line = LinkedList()
    waiting = {name: named(name.encode()) for name in "abc"}
    for each in waiting.values():
        line.append(each)
    line.remove(waiting["b"])
    getattr(line, back)(waiting["b"])
    assert names(line) == (b"acb" if back == "append" else b"bac")
    line.remove(waiting["b"])
    assert names(line) == b"ac"


def test_a_list_can_be_emptied_during_iteration():
    line = LinkedList()
    for name in (b"a", b"b", b"c"):
        line.append(named(name))
    for each in line:
        line.remove(each)
    assert line.first is None
    assert line.last is None


def test_a_list_knows_its_size():
    line = LinkedList()
    assert len(line) == 0
    one, two = named(b"1"), named(b"2")
    line.append(two)
    line.prepend(one)
    assert len(line) == line.size == 2
    line.remove(one)
    assert len(line) == 1
