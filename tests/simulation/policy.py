"""Which request goes to which worker, as the rules say it (C17, C20, C21): slow, and easy to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .reading import Peer

if TYPE_CHECKING:
    from .ledger import Seat, Ticket

Step = tuple["Ticket", "Seat | None"]
"""A request and its worker; None if its time had passed when its turn came."""


class Line:
    """Requests that wait; their clients take turns (C20)."""

    def __init__(self, turns: Sequence[tuple[Peer, list[Ticket]]] = ()) -> None:
        self.turns = [(client, list(tickets)) for client, tickets in turns]

    def copy(self) -> Line:
        return Line(self.turns)

    def __len__(self) -> int:
        return sum(len(tickets) for _, tickets in self.turns)

    def __iter__(self) -> Iterator[Ticket]:
        return iter([ticket for _, tickets in self.turns for ticket in tickets])

    def append(self, ticket: Ticket) -> None:
        """Behind the others of its client, who keeps its place."""
        for client, tickets in self.turns:
            if client == ticket.client:
                tickets.append(ticket)
                return
        self.turns.append((ticket.client, [ticket]))

    def prepend(self, ticket: Ticket) -> None:
        """In front of all others (C17)."""
        mine = [each for client, tickets in self.turns if client == ticket.client for each in tickets]
        others = [turn for turn in self.turns if turn[0] != ticket.client]
        self.turns = [(ticket.client, [ticket, *mine]), *others]

    def take(self) -> Ticket:
        """The next one; its client then waits for the turns of all others."""
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
    """The requests that wait for one service."""

    def __init__(self) -> None:
        self.line = Line()
        self.suspects = Line()
        """Those whose worker died."""

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
        """Who waits, to be compared."""
        lines = (self.suspects, self.line)
        return [[(client, [each.body[0] for each in tickets]) for client, tickets in line.turns] for line in lines]


class _Desk:
    """A worker, while requests are given out."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.load = len(seat.held)
        self.suspects = seat.suspects
        self.changed = seat.changed


def plan(waiting: Waiting, seats: Sequence[Seat], now: float) -> list[Step]:
    """Give out what `waiting` has, as far as the credit of `seats` goes; what is left stays there.

    Suspects go first, and never to a worker that has one.  Of the workers that have free credit, the one with the
    fewest requests is chosen, then the one at which nothing has changed for longest.
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
        desk = min(choice, key=lambda desk: (desk.load, desk.changed))
        latest += 1
        desk.load, desk.suspects, desk.changed = desk.load + 1, desk.suspects + bool(ticket.deaths), latest
        steps.append((ticket, desk.seat))
