"""Which of its brokers a worker connects to, and when; and when it returns to the first."""

import math
import random
from collections.abc import Sequence
from typing import Final

from ..mdp.backoff import Backoff
from ..mdp.endpoints import Endpoints

BACKOFF_SECONDS: Final = (1.0, 32.0)
"""Delay before a reconnection, at first and at most; it doubles each time."""
PROBE_SECONDS: Final = (1.0, 15.0)
"""Delay before the first broker is probed, at first and at most; it doubles each time."""
SPARE_SECONDS: Final = 0.05
"""How long a worker must have had credit to spare before it returns: the broker may take so long to send the next
request."""


class Failover:
    """A worker's brokers, in order of preference, and its moves between them."""

    def __init__(self, endpoints: Sequence[str], rng: random.Random) -> None:
        self.endpoints = Endpoints(endpoints)
        """Where the brokers are, and which of them to connect to."""
        self.several = len(endpoints) > 1
        """Whether there is more than one."""
        self.retry_at = 0.0
        """When to connect next."""
        self.dismissed = False
        """Whether the broker ended the last connection with DISCONNECT, as it does when it shuts down."""
        self.moved = ""
        """Why the endpoint was changed when the last connection was lost; empty if it was not."""
        self.returning = False
        """Whether the first broker is back: the connection is to wind down, or does so already."""
        self.spare_since = math.inf
        """While `returning`, since when the worker has had credit to spare; inf if it has none."""
        self.probe_at = math.inf
        """When to find out whether it is."""
        self._backoff = Backoff(BACKOFF_SECONDS, rng)  # before the next reconnection
        self._probe_pauses = Backoff(PROBE_SECONDS, rng)  # before the next probe
        self._moves = 0  # how often the endpoint was changed since a broker was last heard

    def connected(self, now: float, *, probing: bool) -> None:
        """Record that there is a connection to the current endpoint; with `probing`, plan when to return."""
        self.returning = False
        self.probe_at = self.spare_since = math.inf
        if probing and not self.endpoints.at_first:
            self.probe_at = now + self._probe_pauses.take()

    def take_probe(self, now: float) -> bool:
        """Return whether to find out now if the first broker is back; `probed` is to follow."""
        if now < self.probe_at:
            return False
        self.probe_at = math.inf
        return True

    def probed(self, answered: bool, now: float) -> None:
        """Record the outcome of a probe.  If the first broker has answered, the worker is to return to it."""
        self.returning = answered
        if not answered:
            self.probe_at = now + self._probe_pauses.take()

    def use(self, *, full: bool, now: float) -> None:
        """While `returning`, note whether the worker holds as many requests as it asked for."""
        if full:
            self.spare_since = math.inf
        elif self.spare_since == math.inf:
            self.spare_since = now

    def leave_at(self) -> float:
        """Return when to wind down: once the worker has had credit to spare for a while.

        As long as it has none, requests may wait for it at the broker that it is to leave.
        """
        return self.spare_since + SPARE_SECONDS if self.returning else math.inf

    def heard(self) -> None:
        """Record that the broker has answered: the connection is of use."""
        self._backoff.reset()
        self._moves = 0
        if self.endpoints.at_first:  # not earlier: it may answer a probe, and still refuse this worker
            self._probe_pauses.reset()

    def lost(
        self, reason: str, now: float, *, heard: bool, dismissed: bool, wait: bool = True, draining: bool = False
    ) -> None:
        """Choose the endpoint of the next connection, and when to open it.

        With one endpoint, that is after a backoff, or with `wait=False` at once.  With several, it is another one at
        once, and there is a backoff only if all have failed.

        Args:
            reason: Why the connection was lost.
            now: The current time.
            heard: The broker had answered.
            dismissed: The broker sent the worker away.
            wait: Whether there is a backoff.
            draining: The worker was about to end the connection itself.
        """
        away = self.dismissed and not heard  # a broker that went away has not been heard since
        self.dismissed = dismissed or not wait
        if self.several:
            if draining or self.returning:
                self._stay_or_return()
                wait = False
            else:
                wait = self._move(reason, heard=heard)
        self.retry_at = now
        if wait:
            before = self._backoff.following
            self.retry_at += self._backoff.take()
            if away and self.dismissed:  # it drains, for not too long
                self._backoff.following = before

    def ended(self, now: float) -> None:
        """Record that the worker has ended the connection itself.  It connects again at once."""
        self._stay_or_return()
        self.dismissed = self.returning
        self.retry_at = now

    def _stay_or_return(self) -> None:
        self.moved = f"the broker at {self.endpoints.restart()} is back" if self.returning else ""

    def _move(self, reason: str, *, heard: bool) -> bool:
        """Choose another endpoint.  Return whether to wait first, because all have failed."""
        endpoints = self.endpoints
        before = endpoints.current
        self._moves += 1
        if self.dismissed:
            endpoints.advance()
            self.moved = f"the broker at {before} is draining"
        else:
            endpoints.fail_over(answered=heard)
            self.moved = f"{'lost' if heard else 'cannot use'} the broker at {before}: {reason}"
        return self._moves % len(endpoints.all) == 0
