"""The arguments of clients and requests: their defaults, and their checks, each of which raises `SettingError`."""

import math
from collections.abc import Mapping
from typing import Any, Final, TypedDict

from ...mdp.errors import SettingError
from ...mdp.limits import LARGEST
from .retry import Retry

DEFAULT_TIMEOUT: Final = 5.0
"""Seconds that `Client` allows for each attempt."""
DEFAULT_RETRIES: Final = 2
"""Attempts that `Client` makes after the first."""
DEFAULT_TOTAL_TIMEOUT: Final = DEFAULT_TIMEOUT * (1 + DEFAULT_RETRIES)
"""Seconds that `AsyncClient` allows for a request."""
DEFAULT_HEARTBEAT: Final = 1.0
"""Seconds."""
DEFAULT_LIVENESS: Final = 5
"""Silent heartbeat intervals after which the broker is considered dead."""
MAX_OUTSTANDING: Final = 10_000
"""Maximum number of outstanding requests per connection; others wait for their turn."""
PROTOCOLS: Final = ("X1", "0.2", "0.1")
"""The protocols that clients speak."""


class SendArguments(TypedDict, total=False):
    """Keyword arguments of a request beside its limits."""

    wait: bool
    headers: Mapping[str, str] | None
    group: str
    options: Mapping[str, Any] | None
    retry: Retry | None


class RequestArguments(SendArguments, total=False):
    """Keyword arguments of a request, which `AsyncClient.request` describes."""

    timeout: float | None


class RetriedArguments(RequestArguments, total=False):
    """Keyword arguments of a request that may take several attempts, which `Client.request` describes."""

    retries: int | None


class StreamArguments(RequestArguments, total=False):
    """Keyword arguments of a stream, which `AsyncClient.stream` describes."""

    deadline: float | None


class RetriedStreamArguments(RetriedArguments, total=False):
    """Keyword arguments of a stream that may take several attempts, which `Client.stream` describes."""

    deadline: float | None


def checked_timeout(timeout: float, name: str = "timeout") -> float:
    """Return `timeout`, or the longest time that clients can handle if it is longer.

    Raises `SettingError`, which calls it `name`, unless it is a number of seconds above 0.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise SettingError(f"{name} is {timeout!r}: it must be a number of seconds above 0")
    return min(timeout, LARGEST)


def checked_retries(retries: int) -> int:
    """Return `retries` if it is a whole number, 0 or more."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise SettingError(f"retries is {retries!r}: it must be a whole number, 0 or more")
    return retries


def checked_max_outstanding(most: int) -> int:
    """Return `most` if it is a whole number, 1 or more."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise SettingError(f"max_outstanding is {most!r}: it must be a whole number, 1 or more")
    return most


def check_legacy(*extensions: object) -> None:
    """Reject arguments that MDP/0.2 and 0.1 cannot carry: headers, a group, options, a deadline, `wait=False` …"""
    if any(extensions):
        names = "headers, group, options, deadline, retry and wait=False"
        raise SettingError(f"{names} require protocol X1: MDP/0.2 cannot carry them")


def checked_protocol(protocol: str) -> str:
    """Return `protocol` if clients speak it."""
    if protocol not in PROTOCOLS:
        raise SettingError(f"protocol is {protocol!r}: it must be one of {', '.join(PROTOCOLS)}")
    return protocol
