"""Which of its brokers a client connects to."""

from collections.abc import Sequence


class Endpoints:
    """A client's brokers in order of preference, and the one in use.

    Failover: a client stays with its broker as long as that broker answers.  When it loses a broker that has answered,
    it tries the first endpoint in the list, or the second if it has just lost the first.  When an endpoint does not
    answer, it tries the next in the list, and after the last the first again.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.all = endpoints
        self._at = 0

    @property
    def current(self) -> str:
        """The endpoint in use."""
        return self.all[self._at]

    def fail_over(self, *, answered: bool) -> str:
        """Leave the current endpoint and return the next; `answered` tells whether its broker had answered."""
        following = 0 if answered and self._at else self._at + 1
        self._at = following % len(self.all)
        return self.current
