"""A broker's settings with their defaults: intervals, patience, and a bound on all that can grow."""

from dataclasses import dataclass, field, fields
from typing import Any, Final

from .errors import SettingError


def _setting(default: Any, unit: str, text: str) -> Any:
    return field(default=default, metadata={"unit": unit, "help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A broker's settings.  The command line, the environment and the TOML file all use these names and defaults.

    Raises `SettingError` for a value out of range.
    """

    heartbeat: float = _setting(1.0, "seconds", "Send a worker HEARTBEAT after this long without another command.")
    liveness: int = _setting(5, "intervals", "A worker silent for this many heartbeat intervals is dead.")
    busy_grace: float = _setting(
        60.0,
        "seconds",
        "A busy MDP/0.1 or 0.2 worker, which cannot send heartbeats while it works, is dead when silent this long.",
    )
    expiry: float = _setting(300.0, "seconds", "A request that has waited in its queue this long is dropped.")
    max_attempts: int = _setting(3, "workers", "A request whose workers died this many times is dropped.")
    max_queue: int = _setting(1_000_000, "requests", "Requests that may wait for one service.")
    max_queued_bytes: int = _setting(1 << 30, "bytes", "Memory that all waiting requests may take together.")
    max_services: int = _setting(10_000, "services", "Services that may have a worker or a waiting request.")
    max_workers: int = _setting(100_000, "workers", "Workers that may be registered.")
    max_credit: int = _setting(10_000, "requests", "Requests that one worker may hold, whatever credit it gives.")
    max_message: int = _setting(64 << 20, "bytes", "Size of one message, all frames together.")
    max_frames: int = _setting(1024, "frames", "Frames of one message, routing included.")
    max_outbox: int = _setting(10_000, "messages", "Messages kept for one slow reader before it is dropped.")
    max_outbox_bytes: int = _setting(1 << 28, "bytes", "Memory that the messages kept for slow readers may take.")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            whole = setting.type in {int, "int"}
            right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not right or not 0 < value < LARGEST:
                kind = "a whole number" if whole else "a number"
                unit = setting.metadata["unit"]
                raise SettingError(f"{setting.name} is {value!r}: it takes {kind} of {unit} above 0")
        if self.heartbeat < SHORTEST_HEARTBEAT:
            raise SettingError(f"heartbeat is {self.heartbeat!r}: it takes {SHORTEST_HEARTBEAT} seconds or more")

    @property
    def patience(self) -> float:
        """Seconds of silence after which a worker is dead (C13)."""
        return self.heartbeat * self.liveness


SHORTEST_HEARTBEAT: Final = 0.01
"""Seconds."""
LARGEST: Final = 1 << 53
"""Above all limits; up to here a float is exact."""
