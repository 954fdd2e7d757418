"""Until when everything that peers have sent has been taken in, also while messages arrive faster than that."""


class Backlog:
    """What waits at the broker's sockets.

    While something is left after each turn, a peer's messages may wait for seconds.  But the sockets give the peers
    turns: after one message from each of them, everybody who had something waiting has been heard.
    """

    __slots__ = ("_began", "_turns_left", "heard")

    def __init__(self, now: float) -> None:
        self.heard = now
        """Whoever had sent anything by then has been heard."""
        self._began = now
        """When the present round began, in which each peer is heard."""
        self._turns_left = 0
        """Turns until it is over; 0 if none has begun."""

    def turn(self, now: float, *, turns: int) -> None:
        """Record a turn that began at `now`.

        In so many `turns`, a message of each peer that waits is taken in: none if nothing is left.
        """
        if not turns:
            self.heard = now
            self._turns_left = 0
        elif not self._turns_left:
            self._began, self._turns_left = now, turns
        else:
            self._turns_left -= 1
            if not self._turns_left:
                self.heard = self._began
