"""The options of a job: parameters of the query, and the header Idempotency-Key; pure functions."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from ....mdp.http.problems import Problem
from ....titanic.api.options import MAX_KEY_BYTES, OPTIONS, DurationOption, IntegerOption, Option, TimeOption

KEY_OPTION: Final = "key"
"""The option that the header Idempotency-Key sets."""
QUERY: Final = {name: option for name, option in OPTIONS.items() if name != KEY_OPTION}
"""The options that are parameters of the query."""
UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_DURATION: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)?")
_INTEGER: Final = re.compile(r"[0-9]{1,9}")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')


def options_of(query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the options of a submission that a query sets.  Raises `Problem`."""
    found: dict[str, Any] = {}
    for name, text in query:
        option = QUERY.get(name)
        if option is None:
            hint = ": it is the header Idempotency-Key" if name == KEY_OPTION else f": known are {', '.join(QUERY)}"
            raise Problem("invalid", f"there is no parameter {name[:50]!r}{hint}")
        if name in found:
            raise Problem("invalid", f"the parameter {name} is there twice")
        found[name] = _value(name, option, text)
    return found


def idempotency_key(headers: Sequence[str]) -> str | None:
    """Return the key in the headers Idempotency-Key, with or without quotes.  Raises `Problem`."""
    if not headers:
        return None
    match = _QUOTED.fullmatch(headers[0])
    key = headers[0] if match is None else re.sub(r"\\(.)", r"\1", match[1])
    if len(headers) > 1 or not key or len(key.encode()) > MAX_KEY_BYTES:
        raise Problem("invalid", f"the header Idempotency-Key must be there once, with 1 to {MAX_KEY_BYTES} bytes")
    return key


def _value(name: str, option: Option, text: str) -> Any:
    match option:
        case DurationOption():
            return _duration(name, option, text)
        case IntegerOption():
            if not _INTEGER.fullmatch(text):
                raise Problem(
                    "invalid", f"{name} is {text[:50]!r}: it must be a whole number, at most {option.maximum}"
                )
            return int(text)
        case TimeOption():
            return _time(name, text)
        case _:
            return text


def _duration(name: str, option: DurationOption, text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None or (option.expiry and found[2] is None):
        # As on the command line: if 7 days are meant, `ttl=7` would delete the reply far too early.
        examples = "30s, 15m, 12h or 7d" if option.expiry else "2.5 (seconds), 500ms, 15m, 12h or 7d"
        raise Problem("invalid", f"{name} is {text[:50]!r}: it must be a duration such as {examples}")
    return float(found[1]) * UNITS[found[2] or "s"]


def _time(name: str, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+"))  # a + in a query is a space
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise Problem("invalid", f"{name} is {text[:50]!r}: it must be a time such as 2030-01-31T12:00:00Z")
    return moment
