"""The service's defaults for submissions to Titanic: how its requests are retried, ranked and kept."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypedDict

from ..errors import SettingError
from ..limits import check_number

MAX_RETRIES: Final = 1000
MAX_PRIORITY: Final = 9
MAX_SECONDS: Final = 100 * 366 * 86400.0
"""Maximum of every duration: a hundred years."""
_MAXIMA: Final[Mapping[str, float]] = {
    "retries": MAX_RETRIES, "backoff": MAX_SECONDS, "ttl": MAX_SECONDS, "priority": MAX_PRIORITY,
}  # fmt: skip


class SubmissionDefaults(TypedDict, total=False):
    """Options with which requests of a service are submitted to Titanic, unless the submission has its own.

    `retries` says how often Titanic retries a request whose handler fails, and `backoff` how many seconds after;
    `ttl` for how many seconds the result is kept.  Of requests that wait, those with the highest `priority` are first.
    """

    retries: int | None
    backoff: float | None
    ttl: float | None
    priority: int | None


def checked_defaults(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the defaults that are not None.  Raises `SettingError` unless Titanic takes such numbers."""
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        check_number(name, value, whole=name in {"retries", "priority"})
        if not 0 <= value <= _MAXIMA[name]:
            raise SettingError(f"{name} is {value!r}: it must be 0 to {_MAXIMA[name]:g}")
    return found


def show_defaults(defaults: Mapping[str, float]) -> str:
    """Return defaults as people read them: `retries=3, backoff=0.5`."""
    return ", ".join(f"{name}={value!r}" for name, value in defaults.items())


def read_defaults(said: Mapping[str, Any]) -> dict[str, float]:
    """Return the valid ones of the defaults that workers tell."""
    found: dict[str, float] = {}
    for name in SubmissionDefaults.__annotations__:
        with suppress(SettingError):
            found |= checked_defaults({name: said.get(name)})
    return found
