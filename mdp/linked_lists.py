"""Lines that anyone in them can leave at once: lists linked through the things that stand in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar, cast


class Node:
    """A thing that can stand in one `LinkedList` at a time."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: Node | None = None
        self.after: Node | None = None


T = TypeVar("T", bound=Node)


class LinkedList(Generic[T]):
    """Things in order.  Whatever is done takes the same time however many there are."""

    __slots__ = ("first", "last", "size")

    def __init__(self) -> None:
        self.first: T | None = None
        self.last: T | None = None
        self.size = 0

    def append(self, thing: T) -> None:
        """Put `thing`, which is in no line, last."""
        last = self.last
        if last is None:
            self.first = thing
        else:
            last.after = thing
            thing.before = last
        self.last = thing
        self.size += 1

    def prepend(self, thing: T) -> None:
        """Put `thing`, which is in no line, first."""
        first = self.first
        if first is None:
            self.last = thing
        else:
            first.before = thing
            thing.after = first
        self.first = thing
        self.size += 1

    def remove(self, thing: T) -> None:
        """Take `thing` out, which is in this line."""
        before, after = thing.before, thing.after
        if before is None:
            self.first = cast("T | None", after)
        else:
            before.after = after
            thing.before = None
        if after is None:
            self.last = cast("T | None", before)
        else:
            after.before = before
            thing.after = None
        self.size -= 1

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[T]:
        thing = self.first
        while thing is not None:
            after = thing.after  # read first: the caller may take `thing` out
            yield thing
            thing = cast("T | None", after)
