"""Events in a broker: always counted, logged at a bounded rate."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from ...timers import Alarms
from ...wire.names import show

LINES: Final = 5
"""Maximum number of log lines of one kind in a period; further ones are counted."""
WORKER_LINES: Final = 200
"""Maximum number of lines about workers that register or are lost: each is worth one, unless a peer loops."""
PERIOD: Final = 10.0
"""Length of a period, in seconds."""
Fields = Callable[[], Mapping[str, Any]] | None
"""Returns the fields of a log line, by the names in docs/how-to/operations.md."""


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
    NOT_ALLOWED = "not-allowed"
    DRAINING = "draining"


class Loss(StrEnum):
    """Why a registered worker is no longer there.  The values are the keys under `lost` in `mmi.stats`."""

    SILENT = "silent"
    DISCONNECTED = "disconnected"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    CLOSING = "broker-closing"


@dataclass(slots=True)
class Stats:
    """Counts since the broker started, as `mmi.stats` reports them."""

    requests: int = 0
    dispatched: int = 0
    redispatched: int = 0
    partials: int = 0
    replies: int = 0
    errors: int = 0
    late: int = 0
    """Replies, ERRORs and RELEASEs that matched no live attempt (C32)."""
    other_role: int = 0
    """Messages about something that belongs to another role, which were ignored (C45)."""
    mmi: int = 0
    heartbeats: int = 0
    internal_errors: int = 0
    """Exceptions in the broker itself; anything but 0 is a bug."""
    invalid: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    disconnected: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    connections: Counter[str] = field(default_factory=Counter)
    """The ends of connections and handshakes, counted by the broker's io, not by the machine."""

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name, ready for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class _Period:
    """The lines of one kind within one period."""

    __slots__ = ("ends", "left_out", "level", "lines")

    def __init__(self, ends: float, level: int) -> None:
        self.ends = ends
        self.level = level
        self.lines = 0
        self.left_out = 0


class Journal:
    """Log lines at a bounded rate for each kind, so that a misbehaving peer cannot fill the disk.

    If lines were left out, a summary follows at the end of their period, by an alarm among `alarms`.
    """

    def __init__(self, logger: logging.Logger, alarms: Alarms) -> None:
        self._logger = logger
        self._periods: dict[str, _Period] = {}
        self._alarm = alarms.add(self.flush)

    def note(
        self, now: float, level: int, kind: str, text: str, *values: object, lines: int = LINES, fields: Fields = None
    ) -> None:
        """Log `text % values`, unless `lines` of this `kind` were logged in the period; bytes go through `show`.

        `fields` returns the fields of the line, by name; it is only called if the line is logged.
        The number of kinds is not bounded here: a kind must not contain anything that comes from a peer.
        """
        period = self._periods.get(kind)
        if period is None or now >= period.ends:
            if period is not None:
                self._summarise(kind, period)
            period = self._periods[kind] = _Period(now + PERIOD, level)
        if period.lines < lines:
            period.lines += 1
            self._logger.log(
                level, text, *(show(value) if isinstance(value, bytes) else value for value in values),
                extra=None if fields is None else fields(),
            )  # fmt: skip
        else:
            period.left_out += 1
            self._alarm.set(min(self._alarm.due, period.ends))

    def flush(self, now: float) -> None:
        """Log how many lines were left out in the periods that have ended."""
        due = math.inf
        for kind, period in list(self._periods.items()):
            if now >= period.ends:
                self._summarise(kind, period)
                del self._periods[kind]
            elif period.left_out:
                due = min(due, period.ends)
        self._alarm.set(due)

    def _summarise(self, kind: str, period: _Period) -> None:
        if period.left_out:
            self._logger.log(period.level, "%s: %d more in the last %g s", kind, period.left_out, PERIOD)
