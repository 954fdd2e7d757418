"""Which request goes to which worker: the whole dispatch policy of a service.

- Clients take turns, each with its own requests in order (C20).
- A request goes to the worker with the fewest outstanding requests, among those to the least recently used (C21).
- A request whose worker died is a *suspect*.  Suspects go first, and a worker holds at most one: if it was the request
  that killed the worker, its next victims are not blamed with it again and again (C17).

No frames, no clock.  Every operation takes the same time however many workers, clients and requests there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..linked_lists import LinkedList, Node

if TYPE_CHECKING:
    from .registry import Client, Request, Worker


class Turn(Node):
    """The requests of one client in one queue, and their place among those of the others."""

    __slots__ = ("client", "requests")

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client
        self.requests: LinkedList[Request] = LinkedList()


class FairQueue:
    """A queue in which clients take turns (C20)."""

    __slots__ = ("_turns", "size")

    def __init__(self) -> None:
        self.size = 0
        self._turns: LinkedList[Turn] = LinkedList()

    def append(self, request: Request) -> None:
        """Put `request` behind the others of its client."""
        turn = request.client.waiting.get(self)
        if turn is None:
            turn = request.client.waiting[self] = Turn(request.client)
            self._turns.append(turn)
        turn.requests.append(request)
        self.size += 1

    def prepend(self, request: Request) -> None:
        """Put `request` in front of all others (C17)."""
        turn = request.client.waiting.get(self)
        if turn is None:
            turn = request.client.waiting[self] = Turn(request.client)
        else:
            self._turns.remove(turn)
        self._turns.prepend(turn)
        turn.requests.prepend(request)
        self.size += 1

    def take(self) -> Request:
        """Remove and return the next request; its client then waits for the turns of all others."""
        turn = self._turns.first
        assert turn is not None  # noqa: S101 - the caller has looked at `size`
        request = turn.requests.first
        assert request is not None  # noqa: S101 - a turn without requests is removed
        if turn is not self._turns.last:
            self._turns.remove(turn)
            self._turns.append(turn)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove `request`, which waits here."""
        turn = request.client.waiting[self]
        turn.requests.remove(request)
        if turn.requests.first is None:
            self._turns.remove(turn)
            del request.client.waiting[self]
        self.size -= 1


class Pool:
    """Workers with free credit, by the number of requests that they hold."""

    __slots__ = ("_lines", "_loads", "size")

    def __init__(self) -> None:
        self.size = 0
        self._lines: list[LinkedList[Worker]] = []
        self._loads = 0
        """The loads at which there are workers, as bits."""

    def add(self, worker: Worker) -> None:
        """Add a worker behind all others that hold as many requests."""
        load = worker.load
        while len(self._lines) <= load:
            self._lines.append(LinkedList())
        self._lines[load].append(worker)
        self._loads |= 1 << load
        self.size += 1

    def remove(self, worker: Worker, load: int) -> None:
        """Remove a worker that was added when it held `load` requests."""
        line = self._lines[load]
        line.remove(worker)
        if line.first is None:
            self._loads &= ~(1 << load)
        self.size -= 1

    def least(self) -> Worker | None:
        """The least recently used of those that hold the fewest requests."""
        if not self._loads:
            return None
        return self._lines[(self._loads & -self._loads).bit_length() - 1].first


class Schedule:
    """The requests that wait for one service, and the workers that can take them."""

    __slots__ = ("_clean", "_pooled", "_suspicious", "capacity", "queue", "suspects")

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.suspects = FairQueue()
        self.capacity = 0
        """Free credit of all workers together."""
        self._clean = Pool()
        self._suspicious = Pool()
        """Workers that hold a suspect."""
        self._pooled = 0
        """Counts the workers as they are put into a pool, to tell which of two was used less recently."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self.queue.size + self.suspects.size

    @property
    def free(self) -> int:
        """How many workers have free credit."""
        return self._clean.size + self._suspicious.size

    def queue_of(self, request: Request) -> FairQueue:
        """The queue in which `request` waits, or is to wait."""
        return self.suspects if request.attempts else self.queue

    def update(self, worker: Worker) -> None:
        """Take note that the credit, the load or the suspects of a worker have changed, or that it is leaving."""
        if worker.pool is not None:
            worker.pool.remove(worker, worker.pooled_load)
            worker.pool = None
        free = 0 if worker.leaving else worker.credit - worker.load
        free = max(free, 0)
        self.capacity += free - worker.free
        worker.free = free
        if free:
            pool = self._suspicious if worker.suspects else self._clean
            worker.pool = pool
            worker.pooled_load = worker.load
            self._pooled += 1
            worker.pooled = self._pooled
            pool.add(worker)

    def next_worker(self) -> Worker | None:
        """The worker for the next request that is not a suspect."""
        clean = self._clean.least()
        if not self._suspicious.size:
            return clean
        other = self._suspicious.least()
        if clean is None or other is None:
            return other if clean is None else clean
        if clean.load != other.load:
            return clean if clean.load < other.load else other
        return clean if clean.pooled < other.pooled else other

    def next_pair(self) -> tuple[Request, Worker] | None:
        """The next request, removed from its queue, and its worker; None if nothing waits that a worker can take."""
        if self.suspects.size:
            worker = self._clean.least()
            if worker is not None:
                return self.suspects.take(), worker
        if self.queue.size:
            worker = self.next_worker()
            if worker is not None:
                return self.queue.take(), worker
        return None
