"""The broker's settings with their defaults: heartbeats, retries, and a limit on everything that can grow.

Clients and workers share some of them.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final

from .errors import SettingError

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:5555"
"""Where a broker listens, and where clients and workers connect, by default."""


def limit(default: Any, unit: str, text: str, derived: str = "") -> Any:
    """Return a field with what a command line needs for an option; `derived` says what a default of None stands for."""
    return field(default=default, metadata={"unit": unit, "help": text, "derived": derived})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The broker's settings; the command line, the environment and the TOML file use the same names and defaults.

    Raises `SettingError` for a value out of range.
    """

    heartbeat: float = limit(1.0, "seconds", "Heartbeat interval: idle time after which a peer is sent a HEARTBEAT.")
    liveness: int = limit(5, "intervals", "Silent heartbeat intervals after which a worker is considered dead.")
    busy_grace: float = limit(
        60.0,
        "seconds",
        "Silence after which a busy MDP/0.1, 0.2 or Paranoid Pirate worker, which may be unable to send heartbeats, "
        "is considered dead.",
    )
    expiry: float = limit(300.0, "seconds", "How long a request may wait in its queue before it is dropped.")
    max_attempts: int = limit(
        3, "workers", "Maximum number of workers that may die while handling a request before it is dropped."
    )
    max_queue: int = limit(1_000_000, "requests", "Maximum number of requests waiting for one service.")
    max_request_bytes: int = limit(
        1 << 30,
        "bytes",
        "Maximum memory of all requests together, waiting or held by workers; of one connection, half.",
    )
    max_services: int = limit(10_000, "services", "Maximum number of services with a worker or a waiting request.")
    max_links: int = limit(64, "links", "Maximum number of links to other brokers.")
    max_unserved: int = limit(1000, "services", "Maximum number of services without a worker that one client may name.")
    max_workers: int = limit(100_000, "workers", "Maximum number of registered workers.")
    max_credit: int = limit(10_000, "requests", "Maximum number of requests held by one worker, whatever its credit.")
    max_message: int = limit(64 << 20, "bytes", "Maximum size of a message, all frames together.")
    max_frames: int = limit(1024, "frames", "Maximum number of frames in a message, including routing; 65535 at most.")
    max_connections: int | None = limit(
        None,
        "connections",
        "Maximum number of open connections; further ones are ended.",
        "as many as the limit of open files allows",
    )
    max_connections_per_address: int | None = limit(
        None,
        "connections",
        "Maximum number of open connections from one address, except loopback.",
        "half of max-connections",
    )
    max_outbox: int = limit(
        10_000, "messages", "Maximum number of messages kept for a slow reader before it is dropped."
    )
    max_outbox_bytes: int = limit(1 << 28, "bytes", "Maximum memory of the messages kept for slow readers.")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is None and setting.default is None:
                continue
            whole = setting.type not in {float, "float"}
            valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not valid or not 0 < value < LARGEST:
                kind = "a whole number" if whole else "a number"
                unit = setting.metadata["unit"]
                raise SettingError(f"{setting.name} is {value!r}: it must be {kind} of {unit} above 0")
        if self.heartbeat < SHORTEST_HEARTBEAT:
            raise SettingError(f"heartbeat is {self.heartbeat!r}: it must be {SHORTEST_HEARTBEAT} seconds or more")
        if self.max_frames > MOST_FRAMES:
            raise SettingError(f"max_frames is {self.max_frames!r}: it must be {MOST_FRAMES} frames or fewer")

    @property
    def patience(self) -> float:
        """Seconds of silence after which a worker is considered dead (C13)."""
        return self.heartbeat * self.liveness


SHORTEST_HEARTBEAT: Final = 0.01
"""Lower bound of `heartbeat`, in seconds."""
MOST_FRAMES: Final = 0xFFFF
"""Upper bound of `max_frames`: a body in X1 has no more, and every body must be able to reach an X1 peer."""
LARGEST: Final = 1 << 53
"""Upper bound of all settings, up to which floats represent every whole number."""

ROUTING_FRAMES: Final = 20
"""Frames reserved for a message's routing, with up to 1000 bytes each."""
MAX_BODY: Final = Limits().max_message - 1000 * ROUTING_FRAMES
"""Bytes of a body that a broker with the default limits accepts; one with lower limits drops larger ones."""
MAX_BODY_FRAMES: Final = Limits().max_frames - ROUTING_FRAMES
"""Frames of such a body."""


def check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Raise `SettingError` unless the setting `name` is a number.  The program that uses it checks its range."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise SettingError(f"{name} is {value!r:.100}: it must be a {'whole ' if whole else ''}number")
