"""To which broker an X1 client connects next, and when; and when it looks whether its first broker is back."""

import math
import random
from typing import Final

from ..mdp.backoff import Backoff
from ..mdp.endpoints import Endpoints

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (0.05, 1.0)
"""The shortest and the longest pause, in seconds, between attempts to connect to brokers that do not answer."""
PROBE_INTERVAL: tuple[float, float] = (1.0, 15.0)
"""The shortest and the longest interval, in seconds, between probes of the first broker; each is twice the last."""
PROBE_SECONDS: Final = 2.0
"""How long the first broker may take to answer a probe."""
SHORT_CONNECTION_SECONDS: Final = 1.0
"""A broker that drains after a shorter connection may have been draining from the beginning."""
MAX_OLD_CONNECTIONS: Final = 3
"""Connections still in use from which on the client does not return to the first broker: streams may last for days."""
_LOST: Final = 0
_DRAINED: Final = 1
_RETURNS: Final = 2


class Failover:
    """A client's choice among its brokers.

    A client stays with a broker until the connection is lost, the broker drains, or the first broker answers a probe.
    """

    def __init__(self, endpoints: Endpoints, rng: random.Random) -> None:
        self.endpoints = endpoints
        """The brokers, and the one in use."""
        self.several = len(endpoints.all) > 1
        """Whether there is a broker to move to."""
        self.backoff = Backoff(BACKOFF, rng)
        """The pauses before the next attempt to connect, if the broker does not answer."""
        self.probe_at = math.inf
        """When to probe the first broker; while that is done, when it has taken too long."""
        self._going = _LOST
        """Why the next connection is opened."""
        self._drained = 0
        """Brokers left in a row because they drained, each after a short time."""
        self._pauses = Backoff(BACKOFF, rng)
        """The pauses before the next connection, when all brokers drain."""
        self._connected_at = -math.inf
        self._probe_pauses = Backoff(PROBE_INTERVAL, rng)
        self._probing = False

    def next_endpoint(self, *, answered: bool) -> str:
        """Return the endpoint to connect to.  `answered` tells whether the broker of the current one had answered."""
        going, self._going = self._going, _LOST
        if going == _RETURNS:
            return self.endpoints.restart()
        if going == _DRAINED:
            return self.endpoints.advance()
        return self.endpoints.fail_over(answered=answered)

    def connected(self, now: float) -> None:
        """Plan to probe the first broker, if the new connection is to another."""
        if not self.several:
            return
        if now - self._connected_at >= PROBE_INTERVAL[1]:  # else the first broker comes and goes
            self._probe_pauses.reset()
        self._connected_at = now
        if self.endpoints.at_first:
            self.probe_at = math.inf
        elif not self._probing:
            self._probe_later(now)

    def answered(self) -> None:
        """Record that the broker has sent something over the new connection."""
        self.backoff.reset()

    def lost(self, now: float, *, answered: bool) -> float:
        """Return when to connect again, after the connection was lost or could not be made."""
        self._going = _LOST
        if answered:  # the broker may have been restarted: there is no reason to wait
            return now
        return now + self.backoff.take()

    def drained(self, now: float) -> float:
        """Return when to connect to the next broker: immediately, unless all of them seem to drain."""
        self._going = _DRAINED
        if now - self._connected_at >= SHORT_CONNECTION_SECONDS:
            self._drained = 0
            self._pauses.reset()
        self._drained += 1
        return now + self._pauses.take() if self.all_drain else now

    @property
    def all_drain(self) -> bool:
        """Whether the client waits because all brokers seem to drain."""
        return self._going == _DRAINED and self._drained >= len(self.endpoints.all)

    # ── returning to the first broker ────────────────────────────────────────────────────────────────────────────────

    def probe_due(self, now: float, old_connections: int) -> bool:
        """Return whether to probe the first broker now; then `probed` must follow."""
        if self._probing or now < self.probe_at:
            return False
        if old_connections >= MAX_OLD_CONNECTIONS:
            self._probe_later(now)
            return False
        self._probing = True
        self.probe_at = now + PROBE_SECONDS
        return True

    def probed(self, answered: bool, now: float) -> bool:
        """Return whether to return to the first broker, after it has answered or not."""
        self._probing = False
        if self.endpoints.at_first:
            self.probe_at = math.inf
        elif answered:
            self._going = _RETURNS
            return True
        else:
            self._probe_later(now)
        return False

    def _probe_later(self, now: float) -> None:
        self.probe_at = now + self._probe_pauses.take()
