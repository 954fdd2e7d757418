"""A queue of requests in which clients take turns (C20).  Every operation takes constant time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from ....timers import LinkedList, Node, TimerNode
from ....wire import Options

MAX_CLIENTS: Final = 1000
"""Clients among which the oldest request of a service is looked for at most: an answer must not take long."""


class QueuedRequest(TimerNode):
    """A request, as far as it matters for when its turn comes."""

    __slots__ = ("attempts", "options", "since")
    attempts: int
    """Number of workers that died while they held it (C17); from the first on, it is a suspect."""
    options: Options
    since: float
    """When it was accepted, sent to a worker, or came back from one."""

    @property
    @abstractmethod
    def client_queues(self) -> ClientQueues:
        """The queues of its client."""

    @property
    @abstractmethod
    def pinned(self) -> bool:
        """Whether it is addressed to this broker, so that only workers here may do it."""


R = TypeVar("R", bound=QueuedRequest)


class Tally:
    """The number of requests that wait for a service, in all its queues."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0


class ClientQueue(Node, Generic[R]):
    """The requests of one client in a `FairQueue`, where clients take turns in the order of these."""

    __slots__ = ("requests", "taken_out")

    def __init__(self) -> None:
        super().__init__()
        self.taken_out = False
        """Whether the client has no turn any more, since it is gone."""
        self.requests: LinkedList[R] = LinkedList()


class FairQueue(Generic[R]):
    """A queue in which clients take turns.  It counts its requests in `tally`, too."""

    __slots__ = ("_queues", "_tally", "size", "total")

    def __init__(self, tally: Tally) -> None:
        self.size = 0
        self.total = 0
        """Number of requests, with those of clients that are gone, which are still to be removed."""
        self._tally = tally
        self._queues: LinkedList[ClientQueue[R]] = LinkedList()

    def append(self, request: R) -> None:
        """Add `request` after the others of its client."""
        queues = request.client_queues
        queue = queues.get(self)
        if queue is None:
            queue = queues[self] = ClientQueue()
            self._queues.append(queue)
        queue.requests.append(request)
        self.size += 1
        self.total += 1
        self._tally.waiting += 1

    def prepend(self, request: R) -> None:
        """Add `request` before all others (C17)."""
        queues = request.client_queues
        queue = queues.get(self)
        if queue is None:
            queue = queues[self] = ClientQueue()
        else:
            self._queues.remove(queue)
        self._queues.prepend(queue)
        queue.requests.prepend(request)
        self.size += 1
        self.total += 1
        self._tally.waiting += 1

    def take(self) -> R:
        """Remove and return the next request; its client takes its next turn after all others."""
        queue = self._queues.first
        assert queue is not None  # noqa: S101 - the caller has checked `size`
        return self._take_from(queue)

    def take_for(self, may_take: Callable[[R], bool]) -> R | None:
        """Remove and return the next request that another broker may take; None if there is none."""
        for queue in self._queues:  # all requests of another broker are in one, so few are passed over
            request = queue.requests.first
            if request is not None and may_take(request):
                return self._take_from(queue)
        return None

    def _take_from(self, queue: ClientQueue[R]) -> R:
        request = queue.requests.first
        assert request is not None  # noqa: S101 - a queue without requests is removed
        if queue is not self._queues.last:
            self._queues.remove(queue)
            self._queues.append(queue)
        self.remove(request)
        return request

    def first(self) -> R | None:
        """Return the next request, or None."""
        queue = self._queues.first
        return None if queue is None else queue.requests.first

    def take_out(self, queue: ClientQueue[R]) -> None:
        """Let the requests of a client that is gone wait no longer; each is still to be removed."""
        queue.taken_out = True
        self._queues.remove(queue)
        self.size -= queue.requests.size
        self._tally.waiting -= queue.requests.size

    def heads(self) -> Iterator[R]:
        """Yield the oldest request of each client."""
        for queue in self._queues:
            yield from islice(queue.requests, 1)

    def oldest_requests(self, most: int) -> Iterator[R]:
        """Yield requests in this queue: of each client as many of its oldest as make `most` if all have as many."""
        each = max(most // self._queues.size, 1) if self._queues.size else 0
        for queue in islice(self._queues, most):
            yield from islice(queue.requests, each)

    def remove(self, request: R) -> None:
        """Remove `request`, which is in this queue."""
        queues = request.client_queues
        queue = queues[self]
        queue.requests.remove(request)
        self.total -= 1
        if queue.requests.first is None:
            if not queue.taken_out:
                self._queues.remove(queue)
            del queues[self]
        if not queue.taken_out:
            self.size -= 1
            self._tally.waiting -= 1


ClientQueues = dict["FairQueue[Any]", "ClientQueue[Any]"]
"""The requests of one client that wait, by the queue in which it takes turns."""
