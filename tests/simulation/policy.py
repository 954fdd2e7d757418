"""The dispatch policy (C17, C20, C21), implemented a second time: slow, but easy to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .reading import Peer

if TYPE_CHECKING:
    from .ledger import Seat, Ticket

Step = tuple["Ticket", "Seat | None"]
"""A request and its worker, or None if its time had passed when its turn came."""


class Line:
    """Waiting requests, whose clients take turns (C20)."""

    def __init__(self, turns: Sequence[tuple[Peer, list[Ticket]]] = ()) -> None:
        self.turns = [(client, list(tickets)) for client, tickets in turns]

    def copy(self) -> Line:
        return Line(self.turns)

    def __len__(self) -> int:
        return sum(len(tickets) for _, tickets in self.turns)

    def __iter__(self) -> Iterator[Ticket]:
        return iter([ticket for _, tickets in self.turns for ticket in tickets])

    def append(self, ticket: Ticket) -> None:
        """Add a request behind its client's others; the client keeps its place."""
        for client, tickets in self.turns:
            if client == ticket.client:
                tickets.append(ticket)
                return
        self.turns.append((ticket.client, [ticket]))

    def prepend(self, ticket: Ticket) -> None:
        """Add a request in front of all others (C17)."""
        mine = [each for client, tickets in self.turns if client == ticket.client for each in tickets]
        others = [turn for turn in self.turns if turn[0] != ticket.client]
        self.turns = [(ticket.client, [ticket, *mine]), *others]

    def take(self) -> Ticket:
        """Remove and return the next request; its client goes behind all others."""
        client, tickets = self.turns.pop(0)
        if tickets[1:]:
            self.turns.append((client, tickets[1:]))
        return tickets[0]

    def remove(self, ticket: Ticket) -> None:
        for client, tickets in self.turns:
            if client == ticket.client:
                tickets.remove(ticket)
        self.turns = [turn for turn in self.turns if turn[1]]


class Waiting:
    """The requests waiting for one service."""

    def __init__(self) -> None:
        self.line = Line()
        self.suspects = Line()
        """Requests whose worker died."""

    def copy(self) -> Waiting:
        copy = Waiting()
        copy.line, copy.suspects = self.line.copy(), self.suspects.copy()
        return copy

    def line_of(self, ticket: Ticket) -> Line:
        return self.suspects if ticket.deaths else self.line

    def __iter__(self) -> Iterator[Ticket]:
        return iter([*self.suspects, *self.line])

    def __len__(self) -> int:
        return len(self.suspects) + len(self.line)

    @property
    def order(self) -> list[list[tuple[Peer, list[bytes]]]]:
        """Return the waiting requests in a form that can be compared."""
        lines = (self.suspects, self.line)
        return [[(client, [each.body[0] for each in tickets]) for client, tickets in line.turns] for line in lines]


class _Desk:
    """A worker during dispatch."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.load = len(seat.held)
        self.suspects = seat.suspects
        self.changed = seat.changed

    def place(self) -> tuple[int, bool, int]:
        """Return what comes first (C21)."""
        return self.load, not self.seat.warm, -self.changed if self.seat.warm else self.changed


def plan(waiting: Waiting, seats: Sequence[Seat], now: float) -> list[Step]:
    """Dispatch requests from `waiting` while `seats` have credit; the others remain.

    Suspects go first, and never to a worker that has one.  Of the workers that have free credit, the one with the
    fewest requests is chosen; then the warm one at which something has changed last, or else the one at which nothing
    has changed for longest.
    """
    desks = [_Desk(seat) for seat in seats]
    latest = max((desk.changed for desk in desks), default=0)
    steps: list[Step] = []
    while True:
        free = [desk for desk in desks if not desk.seat.leaving and desk.load < desk.seat.credit]
        clean = [desk for desk in free if not desk.suspects]
        if len(waiting.suspects) and clean:
            ticket, choice = waiting.suspects.take(), clean
        elif len(waiting.line) and free:
            ticket, choice = waiting.line.take(), free
        else:
            return steps
        if now >= ticket.deadline:
            steps.append((ticket, None))
            continue
        desk = min(choice, key=_Desk.place)
        latest += 1
        desk.load, desk.suspects, desk.changed = desk.load + 1, desk.suspects + bool(ticket.deaths), latest
        steps.append((ticket, desk.seat))
