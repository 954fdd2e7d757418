"""A queue of requests in which clients take turns (C20).  Every operation takes constant time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from ..timers import LinkedList, Node

if TYPE_CHECKING:
    from .records import Client, Link, Request

MAX_CLIENTS: Final = 1000
"""Clients among which the oldest request of a service is looked for at most: an answer must not take long."""


def is_pinned(request: Request) -> bool:
    """Return whether `request` is addressed to this broker, so that only its own workers may do it."""
    return request.way is not None and request.way.pinned


def may_pass(request: Request, link: Link) -> bool:
    """Return whether `request` may be passed on over `link` (C44).

    It must not go to where it has been.
    """
    source = request.client.link
    if source is not None and not source.joins(link):
        return False
    return request.way is None or link.name not in request.way.via


class Tally:
    """The number of requests that wait for a service, in all its queues."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0


class ClientQueue(Node):
    """The requests of one client in a `FairQueue`, where clients take turns in the order of these."""

    __slots__ = ("client", "requests", "taken_out")

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client
        self.taken_out = False
        """Whether the client has no turn any more, since it is gone."""
        self.requests: LinkedList[Request] = LinkedList()


class FairQueue:
    """A queue in which clients take turns.  It counts its requests in `tally`, too."""

    __slots__ = ("_queues", "_tally", "size", "total")

    def __init__(self, tally: Tally) -> None:
        self.size = 0
        self.total = 0
        """Number of requests, with those of clients that are gone, which are still to be removed."""
        self._tally = tally
        self._queues: LinkedList[ClientQueue] = LinkedList()

    def append(self, request: Request) -> None:
        """Add `request` after the others of its client."""
        queue = request.client.waiting.get(self)
        if queue is None:
            queue = request.client.waiting[self] = ClientQueue(request.client)
            self._queues.append(queue)
        queue.requests.append(request)
        self.size += 1
        self.total += 1
        self._tally.waiting += 1

    def prepend(self, request: Request) -> None:
        """Add `request` before all others (C17)."""
        queue = request.client.waiting.get(self)
        if queue is None:
            queue = request.client.waiting[self] = ClientQueue(request.client)
        else:
            self._queues.remove(queue)
        self._queues.prepend(queue)
        queue.requests.prepend(request)
        self.size += 1
        self.total += 1
        self._tally.waiting += 1

    def take(self) -> Request:
        """Remove and return the next request; its client takes its next turn after all others."""
        queue = self._queues.first
        assert queue is not None  # noqa: S101 - the caller has checked `size`
        return self._take_from(queue)

    def take_for(self, link: Link) -> Request | None:
        """Remove and return the next request that may be passed on over `link`; None if there is none."""
        for queue in self._queues:  # all requests that came over a link are in one, so few are passed over
            request = queue.requests.first
            if request is not None and may_pass(request, link):
                return self._take_from(queue)
        return None

    def _take_from(self, queue: ClientQueue) -> Request:
        request = queue.requests.first
        assert request is not None  # noqa: S101 - a queue without requests is removed
        if queue is not self._queues.last:
            self._queues.remove(queue)
            self._queues.append(queue)
        self.remove(request)
        return request

    def first(self) -> Request | None:
        """Return the next request, or None."""
        queue = self._queues.first
        return None if queue is None else queue.requests.first

    def take_out(self, queue: ClientQueue) -> None:
        """Let the requests of a client that is gone wait no longer; each is still to be removed."""
        queue.taken_out = True
        self._queues.remove(queue)
        self.size -= queue.requests.size
        self._tally.waiting -= queue.requests.size

    def heads(self) -> Iterator[Request]:
        """Yield the oldest request of each client."""
        for queue in self._queues:
            yield from islice(queue.requests, 1)

    def oldest_requests(self, most: int) -> Iterator[Request]:
        """Yield requests in this queue: of each client as many of its oldest as make `most` if all have as many."""
        each = max(most // self._queues.size, 1) if self._queues.size else 0
        for queue in islice(self._queues, most):
            yield from islice(queue.requests, each)

    def remove(self, request: Request) -> None:
        """Remove `request`, which is in this queue."""
        queue = request.client.waiting[self]
        queue.requests.remove(request)
        self.total -= 1
        if queue.requests.first is None:
            if not queue.taken_out:
                self._queues.remove(queue)
            del request.client.waiting[self]
        if not queue.taken_out:
            self.size -= 1
            self._tally.waiting -= 1
