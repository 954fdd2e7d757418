"""Which of its brokers a client or worker connects to."""

from collections.abc import Sequence


class Endpoints:
    """A peer's brokers in order of preference, and the one in use.

    Failover: a peer stays with its broker as long as that broker answers.  When it loses a broker that has answered,
    it tries the first endpoint in the list, or the second if it has just lost the first.  When an endpoint does not
    answer, it tries the next in the list, and after the last the first again.  When a broker tells it to leave, it goes
    to the next as well.  Once the first answers again, the peer returns to it (`Probe` finds out).
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.all = endpoints
        self._at = 0

    @property
    def current(self) -> str:
        """The endpoint in use."""
        return self.all[self._at]

    @property
    def first(self) -> str:
        """The preferred endpoint."""
        return self.all[0]

    @property
    def at_first(self) -> bool:
        """Whether the preferred endpoint is in use."""
        return not self._at

    def fail_over(self, *, answered: bool) -> str:
        """Leave the current endpoint and return the next; `answered` tells whether its broker had answered."""
        following = 0 if answered and self._at else self._at + 1
        self._at = following % len(self.all)
        return self.current

    def advance(self) -> str:
        """Leave the current endpoint, whose broker drains, and return the next in the list."""
        # Not the first, as in `fail_over`: that may have drained just before, and a third would never be tried.
        return self.fail_over(answered=False)

    def restart(self) -> str:
        """Go to the preferred endpoint and return it."""
        self._at = 0
        return self.current
