"""The service's defaults for submissions to Titanic: how its requests are retried, ranked and kept."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypedDict

from ..errors import SettingError
from ..limits import check_number


class SubmissionDefaults(TypedDict, total=False):
    """Options with which requests of a service are submitted to Titanic, unless the submission has its own.

    `retries` says how often a request whose handler fails is executed again, and `backoff` how many seconds after;
    `ttl` for how many seconds the result is kept.  Of requests that wait, those with the highest `priority` are first.
    """

    retries: int | None
    backoff: float | None
    ttl: float | None
    priority: int | None


def checked_defaults(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the defaults that are not None.  Raises `SettingError` unless they are numbers of 0 or more."""
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        check_number(name, value, whole=name in {"retries", "priority"})
        if not 0 <= value < math.inf:
            raise SettingError(f"{name} is {value!r}: it must be 0 or more")
    return found


def read_defaults(said: Mapping[str, Any]) -> dict[str, float]:
    """Return the valid ones of the defaults that workers tell."""
    found: dict[str, float] = {}
    for name in SubmissionDefaults.__annotations__:
        with suppress(SettingError):
            found |= checked_defaults({name: said.get(name)})
    return found
