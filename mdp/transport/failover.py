"""Chooses among the brokers of a client or worker, and decides when to connect and when to probe the first one."""

import math
import random
from collections.abc import Sequence
from typing import Any, Final

from ..backoff import Backoff

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
PAUSES: tuple[float, float] = (0.05, 1.0)
"""The shortest and the longest pause, in seconds, between attempts to connect to brokers that do not answer."""
PROBE_INTERVAL: tuple[float, float] = (1.0, 15.0)
"""The shortest and the longest interval, in seconds, between probes of the first broker; each is twice the last."""
LONGEST_DRAIN_PAUSE: Final = 1.0
"""The longest pause, in seconds, between attempts while brokers drain: that does not take long."""
PROBE_TIMEOUT_SECONDS: Final = 2.0
"""How long the first broker may take to answer a probe."""


class Failover:
    """A peer's brokers in order of preference, the one in use, and the peer's moves between them.

    A broker is of use if it answers and does not refuse the peer.  A peer stays with such a broker.  When it loses it,
    it connects at once: to the first broker, or to the second if it has just lost the first.  When a broker is of no
    use, or drains, the peer tries the next in the list, and after the last the first again.  It pauses only after it
    has tried all of them in a row, longer each time.

    While a peer is at another broker, the first one is probed (`Probe`).  Once that answers, the peer returns to it.
    """

    def __init__(self, endpoints: Sequence[str], rng: Any = random, pauses: tuple[float, float] = PAUSES) -> None:
        self.endpoints = endpoints
        """Where the brokers are."""
        self.several = len(endpoints) > 1
        """Whether there is a broker to move to."""
        self.retry_at = 0.0
        """When to connect next, while there is no connection."""
        self.dismissed = False
        """Whether the last connection ended because its broker drains."""
        self.moved = ""
        """Why the endpoint was changed when the last connection ended; empty if it was not."""
        self.returning = False
        """Whether the first broker is back, and the connection, which is to another, is to be ended."""
        self.probe_at = math.inf
        """When to probe the first broker; during a probe, when it has taken too long."""
        self.connected_at = -math.inf
        """When the connection was made."""
        self._at = 0
        self._tried = 0
        """Number of brokers left in a row, of which only the first may have been of use."""
        self._pauses = Backoff(pauses, rng)
        self._drain_pauses = Backoff((pauses[0], LONGEST_DRAIN_PAUSE), rng)
        self._probe_pauses = Backoff(PROBE_INTERVAL, rng)

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or while there is no connection, of the next one."""
        return self.endpoints[self._at]

    @property
    def all_drain(self) -> bool:
        """Whether all brokers seem to drain."""
        return self.dismissed and self._tried >= len(self.endpoints)

    def connected(self, now: float, *, probing: bool = True) -> None:
        """Record that there is a connection to `endpoint`; with `probing`, plan when to probe the first broker."""
        self.connected_at = now
        self.returning = False
        self.probe_at = now + self._probe_pauses.take() if probing and self._at else math.inf

    def lost(self, reason: str, now: float, *, of_use: bool, dismissed: bool = False) -> None:
        """Choose the endpoint of the next connection, and when to open it: one was lost, or could not be made.

        Args:
            reason: Why.
            now: The current time.
            of_use: The broker had answered, and has not refused the peer.
            dismissed: The broker has told the peer to leave, because it drains.
        """
        left, lasted = self.endpoint, now - self.connected_at
        # A single broker is known to drain only if it was of use: others may refuse the peer without a reason.
        self.dismissed = dismissed and (of_use or self.several or self.dismissed)
        if of_use:
            self._begin_again()
            if not self._at and lasted >= PROBE_INTERVAL[1]:  # else the first broker comes and goes
                self._probe_pauses.reset()
        self._tried += 1
        self.retry_at = now
        if not of_use and self._tried % len(self.endpoints) == 0:
            self.retry_at += (self._drain_pauses if self.dismissed else self._pauses).take()
        # If the broker drains, not back to the first, which may have drained just before: a third would not be tried.
        following = 0 if self._at and of_use and not dismissed else self._at + 1
        self._at = following % len(self.endpoints)
        self.moved = ""
        if self.several:
            lost = "lost" if of_use else "cannot use"
            self.moved = f"the broker at {left} is draining" if dismissed else f"{lost} the broker at {left}: {reason}"

    def ended(self, now: float) -> None:
        """Record that the peer has ended the connection itself.  It connects again at once."""
        self._begin_again()
        self.dismissed = self.returning
        self.moved = ""
        if self.returning:
            self._at = 0
            self.moved = f"the broker at {self.endpoint} is back"
        self.retry_at = now

    def _begin_again(self) -> None:
        self._tried = 0
        self._pauses.reset()
        self._drain_pauses.reset()

    # ── returning to the first broker ────────────────────────────────────────────────────────────────────────────────

    def take_probe(self, now: float) -> str | None:
        """Return the endpoint of the first broker if it should be probed now; then report the outcome with `probed`."""
        if now < self.probe_at:
            return None
        self.probe_at = now + PROBE_TIMEOUT_SECONDS
        return self.endpoints[0]

    def probed(self, answered: bool, now: float) -> None:
        """Record whether the first broker has answered: then the peer is to return to it."""
        if self._at:  # else it has returned by itself
            self.returning = answered
            self.probe_at = math.inf if answered else now + self._probe_pauses.take()
