"""What happens in a broker: counted always, logged at a bounded rate."""

import logging
from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from ..wire.names import show

LINES: Final = 5
"""Log lines of one kind that are written within `PERIOD`; the rest are only counted."""
PERIOD: Final = 10.0
"""Seconds."""


class Drop(StrEnum):
    """Why a valid request was dropped.  The values are the keys under `dropped` in `mmi.stats`."""

    EXPIRED = "expired"
    QUEUE_FULL = "queue-full"
    MEMORY_FULL = "memory-full"
    TOO_MANY_SERVICES = "too-many-services"
    DRAINING = "draining"
    CLIENT_GONE = "client-gone"
    WORKERS_LOST = "workers-lost"
    LOST_AFTER_PARTIAL = "worker-lost-after-partial"
    REPLY_TOO_LARGE = "reply-too-large"
    NO_WORKER = "no-worker"
    TTL_PASSED = "ttl-passed"
    CANCELLED = "cancelled"
    HANDLER_FAILED = "handler-failed"
    CLOSING = "broker-closing"


class Refusal(StrEnum):
    """Why a worker was sent DISCONNECT.  The values are the keys under `disconnected` in `mmi.stats`."""

    SECOND_READY = "second-ready"
    NOT_REGISTERED = "not-registered"
    NO_REQUEST = "reply-without-request"
    WRONG_CLIENT = "reply-to-wrong-client"
    WRONG_DIALECT = "wrong-dialect"
    OVERSIZED_REPLY = "oversized-reply"
    RESERVED_NAME = "reserved-name"
    TOO_MANY_WORKERS = "too-many-workers"
    TOO_MANY_SERVICES = "too-many-services"


class Loss(StrEnum):
    """Why a registered worker is no longer there.  The values are the keys under `lost` in `mmi.stats`."""

    SILENT = "silent"
    DISCONNECTED = "disconnected"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    CLOSING = "broker-closing"


@dataclass(slots=True)
class Stats:
    """Counts since the broker started; `mmi.stats` shows them."""

    requests: int = 0
    dispatched: int = 0
    redispatched: int = 0
    partials: int = 0
    replies: int = 0
    errors: int = 0
    late: int = 0
    """Replies that matched no live request (C32)."""
    mmi: int = 0
    heartbeats: int = 0
    failures: int = 0
    """Messages at which the broker itself failed; anything but 0 is a bug."""
    invalid: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    disconnected: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """The counts by name, ready for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Journal:
    """Log lines, bounded for each kind: a peer that misbehaves ten thousand times a second does not fill a disk."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._periods: dict[str, tuple[float, int]] = {}

    def note(self, now: float, level: int, kind: str, text: str, *values: object) -> None:
        """Log `text % values`, unless `LINES` of this `kind` were logged within `PERIOD`; bytes go through `show`.

        There are as many kinds as the code names; none may come from a peer.
        """
        started, lines = self._periods.get(kind, (now, 0))
        if now - started >= PERIOD:
            if lines > LINES:
                self._logger.log(level, "%s: %d more like that in the last period", kind, lines - LINES)
            started, lines = now, 0
        self._periods[kind] = started, lines + 1
        if lines < LINES:
            self._logger.log(level, text, *(show(value) if isinstance(value, bytes) else value for value in values))
