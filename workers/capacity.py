"""How many requests a worker asks for: its credit, learned from how long its handlers take."""

from typing import Final

AHEAD: Final = 0.001
"""Seconds of measured work that a worker with blocking handlers holds ahead, at most."""
SHORT: Final = 0.0001
"""Seconds that handlers take, on average, which one thread at a time runs as fast as several."""
MOST_AHEAD: Final = 256
"""Requests that it holds ahead, at most."""
LONG_STEP: Final = 0.005
"""Seconds in which a coroutine should give the event loop back."""
QUICK_STEPS: Final = 32
"""Quick steps in a row after which the credit of a worker whose event loop was blocked doubles."""


class Capacity:
    """The credit of a worker that runs up to `parallel` handlers at a time.

    Work that is held ahead (`prefetch`) keeps threads busy while replies travel, but it waits when a handler turns out
    to be slow.  So it begins at nothing, doubles as long as handlers prove short, and ends with the first slow one.
    Coroutines that block their event loop halve the credit; it grows back as their steps are quick.
    """

    def __init__(self, parallel: int, *, prefetch: bool = False) -> None:
        self.parallel = parallel
        """Handlers that may run at the same time."""
        self.credit = parallel
        """Requests to hold."""
        self._prefetch = prefetch
        self._mean = 2 * AHEAD
        """Seconds that handlers took lately."""
        self._streak = 0
        """Handlers, or quick steps, since the credit last changed."""

    @property
    def short(self) -> bool:
        """Whether handlers have proved so short that one thread at a time is best."""
        return self.credit > self.parallel and self._mean < SHORT

    def finished(self, seconds: float) -> bool:
        """Record how long a handler took.  Returns whether the credit changed."""
        if not self._prefetch:
            return False
        self._mean += (min(seconds, 2 * AHEAD) - self._mean) / 8
        ahead = self.credit - self.parallel
        allowed = min(int(AHEAD / max(self._mean, 1e-9)), MOST_AHEAD)
        self._streak += 1
        if 2 * allowed < ahead or not allowed:
            wanted = allowed
        elif self._streak >= self.credit:
            wanted = max(ahead, min(max(1, 2 * ahead), allowed))
        else:
            return False
        self._streak = 0
        self.credit = self.parallel + wanted
        return wanted != ahead

    def ahead(self, waiting: int, busy: int) -> bool:
        """Return whether requests wait, or will, for a handler that might be slow."""
        return self._prefetch and (self.credit > self.parallel or waiting > max(0, self.parallel - busy))

    def slow(self) -> None:
        """Record that a handler keeps a thread for longer than `AHEAD`: hold nothing ahead until others prove short."""
        self.credit = self.parallel
        self._mean = 2 * AHEAD
        self._streak = 0

    def stepped(self, seconds: float) -> bool:
        """Record how long a coroutine kept the event loop.  Returns whether the credit changed."""
        before = self.credit
        if seconds >= LONG_STEP:
            self.credit = max(1, before // 2)
            self._streak = 0
        elif before < self.parallel:
            self._streak += 1
            if self._streak >= QUICK_STEPS:
                self.credit = min(self.parallel, 2 * before)
                self._streak = 0
        return self.credit != before
