"""Values of types that encoders do not know, as values of the builtin types that they stand for.

Encoders look at the exact type: a subclass of `str`, such as Django's `SafeString`, or `numpy.float64`, which is one of
`float`, are strange to them.  They call `as_builtin` for such values, and for nothing else.
"""

import ipaddress
import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final

_BASES: Final[Mapping[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes,
    Decimal: Decimal,
    datetime: lambda at: datetime(
        at.year, at.month, at.day, at.hour, at.minute, at.second, at.microsecond, at.tzinfo, fold=at.fold
    ),
    date: lambda day: date(day.year, day.month, day.day),
    time: lambda at: time(at.hour, at.minute, at.second, at.microsecond, at.tzinfo, fold=at.fold),
    timedelta: lambda length: timedelta(length.days, length.seconds, length.microseconds),
}
"""How a value of a subclass becomes one of the type itself, whatever its own methods do."""
TEXTS: Final[Mapping[type, str]] = {
    PurePath: "path",
    ipaddress.IPv4Address: "ipv4",
    ipaddress.IPv6Address: "ipv6",
    ipaddress.IPv4Network: "ipv4network",
    ipaddress.IPv6Network: "ipv6network",
}
"""Types that are written as text and can be made from it again, and their formats in JSON schemas."""


def as_builtin(value: Any) -> Any:
    """Return a value that stands for `value` and is of another type, which an encoder may know.

    Raises `NotImplementedError` if there is none.
    """
    kind = type(value)
    if value is None or isinstance(value, bool | tuple | frozenset):  # encoders know them, but not as keys
        raise NotImplementedError(f"a dict has a key of type {kind.__qualname__}: only texts and numbers can be keys")
    if kind not in _BASES:
        for base, convert in _BASES.items():
            if isinstance(value, base):
                return convert(value)
    if isinstance(value, tuple(TEXTS)):
        return str(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and type(found := value.item()) is not kind:
        return found
    raise NotImplementedError(f"type {kind.__qualname__} is not supported")
