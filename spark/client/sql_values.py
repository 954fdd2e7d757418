"""Python values as JSON, with their types in Spark: parameters of queries, arguments and results of jobs."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import chain
from typing import Any, Final
from uuid import UUID

import msgspec

from ...mdp.builtin_values import as_builtin
from ...mdp.errors import SettingError

MAX_DIGITS: Final = 38
"""Of a decimal in Spark."""
_SCALARS: Final[Mapping[str, tuple[type, ...]]] = {
    "boolean": (bool,),
    "bigint": (int,),
    "double": (float,),
    "string": (str, UUID),
    "decimal": (Decimal,),
    "timestamp": (datetime,),
    "date": (date,),
    "time(6)": (time,),
    "interval day to second": (timedelta,),
    "binary": (bytes, bytearray, memoryview),
    "array": (list,),
    "struct": (dict,),
}


# ── as JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def json_scalar(value: Any) -> Any:
    """Return a value without parts as JSON has it: NaN and infinities as text, all others as msgspec writes them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return msgspec.to_builtins(value, enc_hook=as_builtin)


def finite_scalar(value: Any) -> Any:
    """Return a value as `json_scalar` does, but refuse NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("NaN and infinity are not in JSON; send them as a string, or None")
    return json_scalar(value)


def sql_scalar(value: Any) -> Any:
    """Return a value as Spark's `from_json` reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).isoformat()  # Spark reads no offsets with seconds
    if isinstance(value, timedelta):
        length = abs(value)
        seconds = f"{length.seconds % 60:02}.{length.microseconds:06}"
        sign = "-" if value < timedelta() else ""
        return f"{sign}{length.days} {length.seconds // 3600:02}:{length.seconds // 60 % 60:02}:{seconds}"
    return json_scalar(value)


def plain(value: Any, scalar: Callable[[Any], Any] = json_scalar, where: str = "$") -> Any:
    """Return a value as JSON's types: Spark's rows and dataclasses as objects, enums as their values.

    Args:
        value: The value.
        scalar: Converts values without parts.
        where: How errors name the value.

    Raises:
        SettingError: A part of the value has no representation; the error says which, and of what type it is.
    """
    try:
        return _plain(value, scalar, where)
    except RecursionError:
        raise SettingError(f"{where} is nested too deeply") from None


def _plain(value: Any, scalar: Callable[[Any], Any], where: str) -> Any:
    value = _builtin(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, dict):
        return {_key(name, where): _plain(each, scalar, f"{where}.{name}") for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, scalar, f"{where}[{at}]") for at, each in enumerate(value)]
    try:
        found = scalar(value)
    except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
        text = str(error) if isinstance(error, ValueError) else "convert it to builtin types, a dataclass or a table"
        raise SettingError(f"{where} is of type {type(value).__name__}, which cannot be sent: {text}") from None
    return _plain(found, scalar, where) if isinstance(found, dict | list) else found


def _key(name: Any, where: str) -> str:
    found = name if isinstance(name, str) else _plain(name, json_scalar, f"the key {name!r:.50} of {where}")
    if isinstance(found, dict | list) or found is None:
        raise SettingError(f"{where} has the key {name!r:.50}; expected a string")
    return str(found).lower() if isinstance(found, bool) else str(found)


def _builtin(value: Any) -> Any:
    """Return a value with parts as a list or dict, and enums and NumPy's values as Python's own."""
    if isinstance(value, Enum):
        return _builtin(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "asDict"):  # a row
        return dict(zip(value.__fields__, value, strict=True)) if hasattr(value, "__fields__") else list(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        # Its nanoseconds would become integers.
        return (value.astype(f"{value.dtype.kind}8[us]") if value.dtype.kind in "mM" else value).tolist()
    return value


# ── types in Spark ───────────────────────────────────────────────────────────────────────────────────────────────────


def is_plain(value: Any) -> bool:
    """Whether JSON has the value, and Spark takes it from there as it is."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def sql_type(value: Any, where: str) -> str:
    """Return the type of a value in Spark's SQL, for example `array<decimal(20,2)>`.

    Raises `SettingError`, which begins with `where`, if Spark has none.
    """
    try:
        return _common_type([value], where)
    except RecursionError:
        raise SettingError(f"{where} is nested too deeply") from None


def _common_type(values: Iterable[Any], where: str) -> str:
    """Return the type of all values; those that are None have any."""
    found = [each for each in map(_builtin, values) if each is not None]
    kinds = {_kind(each, where) for each in found}
    if kinds == {"bigint", "decimal"}:
        kinds = {"decimal"}
    if len(kinds) > 1:
        raise SettingError(f"{where} has values of the types {' and '.join(sorted(kinds))}; make them of one type")
    match "".join(kinds):
        case "":
            return "void"
        case "decimal":
            return _decimal(found, where)
        case "array":
            return f"array<{_common_type(chain.from_iterable(found), f'{where}[]')}>"
        case "struct":
            names = dict.fromkeys(_key(name, where) for each in found for name in each)
            types = [_common_type((each.get(name) for each in found), f"{where}.{name}") for name in names]
            columns = (f"`{name.replace('`', '``')}`: {kind}" for name, kind in zip(names, types, strict=True))
            return f"struct<{', '.join(columns)}>"
        case kind:
            return kind


def _kind(value: Any, where: str) -> str:
    kind = next((kind for kind, classes in _SCALARS.items() if isinstance(value, classes)), None)
    if kind is None:
        raise SettingError(
            f"{where} is of type {type(value).__name__}, which Spark has not; pass a string, number, bool, Decimal, "
            "date, datetime, time, timedelta, bytes, UUID, None, or a list, dict or dataclass of these"
        )
    if kind == "bigint" and not is_plain(value):
        return "decimal"
    return "timestamp_ntz" if kind == "timestamp" and value.tzinfo is None else kind


def _decimal(values: list[Any], where: str) -> str:
    whole = scale = 0
    for value in values:
        _, digits, exponent = Decimal(value).as_tuple()
        if not isinstance(exponent, int):
            raise SettingError(f"{where} is {value}, which no decimal of Spark can be; pass a float")
        whole, scale = max(whole, len(digits) + exponent), max(scale, -exponent)
    if whole + scale > MAX_DIGITS:
        raise SettingError(f"{where} needs a decimal of {whole + scale} digits; Spark has {MAX_DIGITS}: round it")
    return f"decimal({max(1, whole + scale)},{scale})"
