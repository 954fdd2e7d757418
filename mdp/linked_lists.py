"""Doubly linked lists whose nodes are the listed objects themselves, so that each can be removed in constant time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar, cast


class Node:
    """An object that can be in one `LinkedList` at a time."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: Node | None = None
        self.after: Node | None = None


T = TypeVar("T", bound=Node)


class LinkedList(Generic[T]):
    """Nodes in order.  Every operation takes constant time."""

    __slots__ = ("first", "last", "size")

    def __init__(self) -> None:
        self.first: T | None = None
        self.last: T | None = None
        self.size = 0

    def append(self, node: T) -> None:
        """Add `node`, which is in no list, at the end."""
        last = self.last
        if last is None:
            self.first = node
        else:
            last.after = node
            node.before = last
        self.last = node
        self.size += 1

    def prepend(self, node: T) -> None:
        """Add `node`, which is in no list, at the front."""
        first = self.first
        if first is None:
            self.last = node
        else:
            first.before = node
            node.after = first
        self.first = node
        self.size += 1

    def remove(self, node: T) -> None:
        """Remove `node`, which is in this list."""
        before, after = node.before, node.after
        if before is None:
            self.first = cast("T | None", after)
        else:
            before.after = after
            node.before = None
        if after is None:
            self.last = cast("T | None", before)
        else:
            after.before = before
            node.after = None
        self.size -= 1

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[T]:
        node = self.first
        while node is not None:
            after = node.after  # read first, since the caller may remove `node`
            yield node
            node = cast("T | None", after)
