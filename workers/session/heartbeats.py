"""A worker's heartbeats, adapted to its broker's: how often to send them, how long to wait for them (C13, C35)."""

import math
from collections import deque
from typing import Final

from ...mdp.errors import SettingError
from ...mdp.limits import LARGEST, SHORTEST_HEARTBEAT

MAX_PATIENCE_SECONDS: Final = 60.0
"""Limit up to which the patience with a silent broker grows, unless the settings exceed it."""
STALL_INTERVALS: Final = 2
"""A worker that has sent nothing for so many of its intervals was held up: it sends HEARTBEAT in each."""


class Heartbeats:
    """Tracks when to send heartbeats, and when the broker has been silent for too long.

    `heartbeat` is the worker's interval in seconds, `liveness` the number of silent intervals that it tolerates.  The
    broker's interval may differ: the worker observes it, sends heartbeats at least as often, and waits for `liveness`
    of the broker's intervals.  If it receives none, it waits longer after each reconnection.
    """

    def __init__(self, heartbeat: float, liveness: int) -> None:
        if not SHORTEST_HEARTBEAT <= heartbeat < LARGEST:
            raise SettingError(f"heartbeat is {heartbeat!r}: it must be {SHORTEST_HEARTBEAT} seconds or more")
        if liveness < 1:
            raise SettingError(f"liveness is {liveness!r}: it must be 1 interval or more")
        self.patience = heartbeat * liveness
        """Seconds of silence after which the broker is considered dead."""
        self.interval = heartbeat
        """Seconds between this worker's heartbeats: its own interval, or the broker's if that is shorter."""
        self.heard = False
        """Whether the broker has sent anything on this connection."""
        self.seen_at = 0.0
        """When the broker last sent anything."""
        self.sent_at = 0.0
        """When this worker last sent anything."""
        self._excused_until = -math.inf  # before this time, silence proves nothing: this process was held up
        self._heartbeat = heartbeat
        self._liveness = liveness
        self._gaps: deque[float] = deque(maxlen=3)  # between the broker's last command and a HEARTBEAT
        self._own_gaps: deque[float] = deque(maxlen=3)  # the gaps that did not end with an answer to our HEARTBEAT
        self._unanswered = False  # the broker may still answer a HEARTBEAT of ours
        self._spoke_at = -math.inf  # when the broker last sent anything unprompted; -inf if that is unknown

    def connected(self, now: float) -> None:
        """Forget what was observed on the last connection: this may be another broker."""
        self.heard = False
        self._gaps.clear()
        self._own_gaps.clear()
        self._unanswered = False
        self._excused_until = -math.inf
        self.seen_at = self.sent_at = self._spoke_at = now

    def command_received(self, now: float) -> None:
        """Record a command other than HEARTBEAT."""
        self.heard = True
        self.seen_at = self._spoke_at = now

    def heartbeat_received(self, now: float) -> None:
        """Record a HEARTBEAT.

        The time since the broker's last command shows how patient to be.  How often to send heartbeats only follows
        from commands that the broker sent unprompted: a HEARTBEAT after one of ours may be an answer to it (C35).
        """
        gap, own_gap = now - self.seen_at, now - self._spoke_at
        self._spoke_at = -math.inf if self._unanswered else now
        if SHORTEST_HEARTBEAT <= gap <= self.patience:  # else several arrived at once, or this process was suspended
            if self.heard:  # the first gap includes the time to connect
                self._gaps.append(gap)
                learned = min(self._liveness * max(self._gaps), MAX_PATIENCE_SECONDS)
                self.patience = max(self._liveness * self._heartbeat, learned)
            if not self._unanswered and own_gap <= self.patience:
                self._own_gaps.append(own_gap)
                self.interval = max(min(self._heartbeat, max(self._own_gaps)), SHORTEST_HEARTBEAT)
        self._unanswered = False
        self.heard = True
        self.seen_at = now

    def beat(self, now: float) -> bool:
        """Return whether this worker should send HEARTBEAT now."""
        if now < self.sent_at + self.interval:
            return False
        self.sent_at = now
        self._unanswered = True
        return True

    def is_silent(self, now: float) -> bool:
        """Return whether the broker has been silent for too long.

        If this process was held up, so was ZeroMQ's thread: messages of the broker may not have reached the socket yet.
        Then the answer is no for one more interval.
        """
        if now < self._silent_at():
            return False
        if now > self.sent_at + STALL_INTERVALS * self.interval:
            self._excused_until = now + self.interval
            return False
        return True

    def _silent_at(self) -> float:
        return max(self.seen_at + self.patience, self._excused_until)

    def broker_was_silent(self) -> None:
        """Wait longer on the next connection, after the broker has been silent for too long."""
        self.patience = max(self.patience, min(2 * self.patience, MAX_PATIENCE_SECONDS))

    def deadline(self) -> float:
        """Return when a HEARTBEAT is due, or the broker is considered dead."""
        return min(self._silent_at(), self.sent_at + self.interval)
