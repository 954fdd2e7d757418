"""Notices when handlers block the event loop of an asyncio worker, and says so in the log."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

CHECK_SECONDS: Final = 0.1
"""Interval of the checks while there are requests."""
BLOCKED_SECONDS: Final = 0.1
"""Delay of a check from which on the event loop was blocked."""
WARNING_SECONDS: Final = 60.0
"""Minimum time between two warnings."""

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")

log = logging.getLogger("zmdp.worker")


def processor_wait() -> float:
    """Return how many seconds this thread has been ready to run but waited for a processor; 0 if the system (other
    than Linux) does not tell."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class BlockingWatch:
    """Warns when the event loop is blocked while a worker handles requests.

    A check that runs late shows it.  The time for which the thread waited for a processor is subtracted: a busy machine
    delays checks as well, and that is not the handlers' fault.

    Args:
        loop: The event loop, which is the current one.
        handler: The name of the handler, for the log.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, service: str, handler: str) -> None:
        self._loop = loop
        self._service = service
        self._handler = handler
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._waited = 0.0
        self._used = False
        self._silent_until = 0.0
        self._unreported = 0

    @property
    def active(self) -> bool:
        """Whether there will be a check."""
        return self._timer is not None

    def note(self) -> None:
        """Record that requests are being handled."""
        self._used = True
        if self._timer is None:
            self._arm()

    def close(self) -> None:
        """End the checks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._waited = processor_wait()
        self._due = time.monotonic() + CHECK_SECONDS
        self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        if now - self._due >= BLOCKED_SECONDS:
            self.checked(now - self._due, processor_wait() - self._waited, now)
        if self._used:  # else the worker is idle
            self._used = False
            self._arm()

    def checked(self, late: float, waited: float, now: float) -> None:
        """Warn if a check came `late` for another reason than that the thread has `waited` for a processor."""
        blocked = late - waited
        if blocked < BLOCKED_SECONDS:
            return
        if now < self._silent_until:
            self._unreported += 1
            return
        self._silent_until = now + WARNING_SECONDS
        more, self._unreported = self._unreported, 0
        log.warning(
            "%s: the event loop was blocked for %.1f s while requests were handled%s, so other requests and heartbeats "
            "had to wait. The handler %s must not block: call what blocks with `await asyncio.to_thread(…)`, or serve "
            "a plain function with a Worker",
            self._service, blocked, f" (and {more} times since the last such line)" if more else "", self._handler,
        )  # fmt: skip
