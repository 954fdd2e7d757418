"""What a worker learns of its broker's heartbeats: how often to beat, and how long to be patient (C13, C35)."""

import math
from collections import deque
from typing import Final

from ..mdp.errors import SettingError
from ..mdp.limits import LARGEST, SHORTEST_HEARTBEAT

LONGEST_PATIENCE: Final = 60.0
"""Seconds to which the patience with a silent broker grows, if the settings do not ask for more."""


class Heartbeats:
    """`heartbeat` is the worker's interval in seconds, `liveness` the number of silent ones that it tolerates.

    The broker's interval may differ: the worker observes it, beats at least as often, and waits for as many of the
    broker's intervals; while it has not heard any it becomes more patient with each reconnection.
    """

    def __init__(self, heartbeat: float, liveness: int) -> None:
        if not SHORTEST_HEARTBEAT <= heartbeat < LARGEST:
            raise SettingError(f"heartbeat is {heartbeat!r}: it must be {SHORTEST_HEARTBEAT} seconds or more")
        if liveness < 1:
            raise SettingError(f"liveness is {liveness!r}: it must be 1 interval or more")
        self.patience = heartbeat * liveness
        """Seconds for which the broker may be silent."""
        self.interval = heartbeat
        """Seconds between this worker's heartbeats: its own interval, or the broker's if that is shorter."""
        self.seen_at = 0.0
        """When the broker last said anything."""
        self.sent_at = 0.0
        """When this worker last did."""
        self._heartbeat = heartbeat
        self._liveness = liveness
        self._gaps: deque[float] = deque(maxlen=3)  # silences of the broker that ended with a HEARTBEAT
        self._own_gaps: deque[float] = deque(maxlen=3)  # those that no answer to ours can have ended
        self._unanswered = False  # a HEARTBEAT of ours may still be answered by one
        self._spoke_at = -math.inf  # when the broker last spoke of its own accord, unless an answer may have come since

    def connected(self, now: float) -> None:
        """Begin anew: what was learned may be of another broker, or of the trouble that ended the last connection."""
        self._gaps.clear()
        self._own_gaps.clear()
        self._unanswered = False
        self.seen_at = self.sent_at = self._spoke_at = now

    def seen(self, now: float) -> None:
        """The broker has sent a command that is no HEARTBEAT."""
        self.seen_at = self._spoke_at = now

    def beaten(self, now: float, *, first: bool) -> None:
        """The broker has sent HEARTBEAT; `first` tells whether it is the first command on this connection.

        The time since it last said anything tells how patient to be.  Only the time between two things that it said of
        its own accord tells how often to beat: a HEARTBEAT after one of ours may be the answer to that (C35).
        """
        gap, own_gap = now - self.seen_at, now - self._spoke_at
        self._spoke_at = -math.inf if self._unanswered else now
        if SHORTEST_HEARTBEAT <= gap <= self.patience:  # else several were read at once, or this process was held up
            if not first:  # the first gap includes the time to connect: enough to beat by, not to be patient by
                self._gaps.append(gap)
                learned = min(self._liveness * max(self._gaps), LONGEST_PATIENCE)
                self.patience = max(self._liveness * self._heartbeat, learned)
            if not self._unanswered and own_gap <= self.patience:
                self._own_gaps.append(own_gap)
                self.interval = max(min(self._heartbeat, max(self._own_gaps)), SHORTEST_HEARTBEAT)
        self._unanswered = False
        self.seen_at = now

    def beat(self, now: float) -> bool:
        """Return whether this worker should send HEARTBEAT now."""
        if now < self.sent_at + self.interval:
            return False
        self.sent_at = now
        self._unanswered = True
        return True

    def silent(self) -> None:
        """The broker has been silent for too long: be more patient with the next connection."""
        self.patience = max(self.patience, min(2 * self.patience, LONGEST_PATIENCE))

    def deadline(self) -> float:
        """Return when a HEARTBEAT is due, or the patience ends."""
        return min(self.seen_at + self.patience, self.sent_at + self.interval)
