"""The broker's ZAP handler, which logs whom it refuses, at a bounded rate."""

import logging

from ..access import Access
from ..transport.sockets import Context
from ..transport.zap import ZapHandler
from .journal import Journal


class Gate(ZapHandler):
    """Admits peers of the broker."""

    def __init__(self, context: Context, access: Access, logger: logging.Logger) -> None:
        self._journal = Journal(logger)
        super().__init__(context, access)

    def answer(self, now: float) -> bool:
        """Answer the requests that have arrived.  Return whether there may be more."""
        self._journal.flush(now)
        return super().answer(now)

    def deadline(self) -> float | None:
        """Return when `answer` has something to log, or None."""
        return self._journal.deadline()

    def _refuse(self, now: float, reason: str, text: str, *values: bytes) -> None:
        super()._refuse(now, reason, text, *values)
        self._journal.note(now, logging.WARNING, reason, text, *values)
