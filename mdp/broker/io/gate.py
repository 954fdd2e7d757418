"""The broker's ZAP handler, which logs whom it refuses, at a bounded rate."""

import logging

from ...security.access import Access
from ...transport.sockets import Context
from ...transport.zap import ZapHandler
from .connections import Connections


class Gate(ZapHandler):
    """Admits peers of the broker."""

    def __init__(self, context: Context, access: Access, connections: Connections) -> None:
        self._journal = connections.journal
        super().__init__(context, access)
        self.counts = connections.counts

    def _refuse(self, now: float, reason: str, text: str, *values: bytes) -> None:
        super()._refuse(now, reason, text, *values)
        self._journal.note(now, logging.WARNING, reason, text, *values)
