"""`Limit`: how many requests of a service, or of a group of them, may run at once, and how many may start in a time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from .errors import SettingError
from .limits import LARGEST

MAX_GROUP: Final = 255
"""Maximum length of the name of a group, in bytes."""
PERIODS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""The units of time of a rate, in seconds."""
SECONDS_AT_ONCE: Final = 0.1
"""The default of `burst` is what the rate allows in this time: a broker cannot start requests one at a time as fast as
thousands in a second."""

_RATE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)/(s|min|h|d)")


@dataclass(frozen=True)
class Limit:
    """How many requests may run at once, and how many may start in a time.

        @services.service("openai.embed", limit=Limit(concurrency=8, rate="500/min", burst=20))

    The broker holds the limit for all workers of the service and all callers together.  A request starts when the
    broker sends it to a worker, and runs until the worker has replied.

    Args:
        concurrency: Maximum number of requests that run at once.
        rate: Maximum number of requests that start in a time: a number, and `s`, `min`, `h` or `d`, such as "500/min".
        burst: How many may start at once after a pause, of those that the rate allows; by default as many as it allows
            in 0.1 s, and at least 1.

    Raises:
        SettingError: A setting is invalid.
    """

    concurrency: int | None = None
    rate: str | None = None
    burst: int | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "burst"):
            value: Any = getattr(self, name)
            if value is not None and not (type(value) is int and 1 <= value < LARGEST):
                raise SettingError(f"{name} is {value!r:.100}: it must be a whole number of at least 1")
        if self.burst is not None and self.rate is None:
            raise SettingError(f"burst is {self.burst}, but there is no rate that it could be a part of")
        rate: Any = self.rate
        if rate is not None and not (isinstance(rate, str) and (found := _RATE.fullmatch(rate)) and float(found[1])):
            units = ", ".join(PERIODS)
            raise SettingError(f'rate is {rate!r:.100}: it must be a number per unit of time ({units}), like "500/min"')

    @property
    def interval(self) -> float:
        """Seconds between two starts at the rate; 0 if there is none."""
        found = _RATE.fullmatch(self.rate) if self.rate else None
        return PERIODS[found[2]] / float(found[1]) if found else 0.0

    @property
    def at_once(self) -> int:
        """How many requests may start at once after a pause."""
        if self.burst is not None or not self.interval:
            return self.burst or 1
        return max(int(SECONDS_AT_ONCE / self.interval), 1)

    def _stricter(self, other: Self) -> Self:
        """Return a limit that keeps both."""
        slower = self if self.interval >= other.interval else other
        burst = slower.burst
        if self.interval and other.interval:
            burst = min(self.at_once, other.at_once)
        concurrency = min((each.concurrency for each in (self, other) if each.concurrency is not None), default=None)
        return type(self)(concurrency, slower.rate, burst)

    def as_dict(self) -> dict[str, Any]:
        """Return what is limited, as JSON values.

            Limit(concurrency=8, rate="500/min").as_dict()          # {"concurrency": 8, "rate": "500/min"}

        Returns:
            `concurrency`, `rate` and `burst`, as far as they are set.
        """
        return {name: value for name in ("concurrency", "rate", "burst") if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        """Return it for people."""
        parts = [f"{self.concurrency} at once"] if self.concurrency is not None else []
        if self.rate is not None:
            parts.append(self.rate if self.burst is None else f"{self.rate} (burst {self.burst})")
        return ", ".join(parts) or "none"


NO_LIMIT: Final = Limit()


@dataclass(frozen=True)
class ServiceLimits:
    """The limits of a service: of all its requests, and of those of each group."""

    service: Limit = NO_LIMIT
    group: Limit = NO_LIMIT

    @classmethod
    def read(cls, given: Any) -> Self:
        """Return the limits in `given`, an object with `service` and `group`.  Raises `SettingError`."""
        if not isinstance(given, Mapping) or not given.keys() <= {"service", "group"}:
            raise SettingError(f"limits are {given!r:.100}: they may have the members service and group")
        return cls(**{name: _limit(name, value) for name, value in given.items()})

    def stricter(self, other: Self) -> Self:
        """Return limits that keep both."""
        return type(self)(self.service._stricter(other.service), self.group._stricter(other.group))

    def as_dict(self) -> dict[str, Any]:
        """Return what is limited, as JSON values: the option `limits` of READY."""
        return {name: each.as_dict() for name in ("service", "group") if (each := getattr(self, name)) != NO_LIMIT}

    def __bool__(self) -> bool:
        """Return whether anything is limited."""
        return self != NO_LIMITS

    def __str__(self) -> str:
        """Return them for people."""
        per_group = f"; per group {self.group}" if self.group != NO_LIMIT else ""
        return f"{self.service}{per_group}"


def _limit(name: str, given: Any) -> Limit:
    if not isinstance(given, Mapping) or not given.keys() <= {"concurrency", "rate", "burst"}:
        raise SettingError(f"limits: {name} is {given!r:.100}: it may have concurrency, rate and burst")
    return Limit(**given)


NO_LIMITS: Final = ServiceLimits()
