"""Convert rows to requests: which columns are allowed, and validation by the same rules as for all requests."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampType,
)

from ...mdp.errors import SettingError
from ...titanic.frames import pack
from ...titanic.store.staging import Entry, entry
from ...titanic.submission import MAX_KEY_BYTES, MalformedRequest, parse_submission
from ...titanic.uuids import new_uuid_hex
from ...workers.handling import MAX_BODY

_TEXT, _BYTES = StringType(), BinaryType()
_BODY: Final = (_TEXT, _BYTES, ArrayType(_BYTES), ArrayType(_TEXT))
_SECONDS: Final = ("key_ttl", "delay", "backoff", "ttl")
_WIRE_NAMES: Final = {"ttl": "result_ttl", "due": "at"}
"""Columns whose names differ from those of the request's options."""
COLUMNS: Final = (
    "service", "request", "key", "key_ttl", "priority", "delay", "at", "due", "retries", "backoff", "ttl", "headers",
)  # fmt: skip
"""The columns that can be written; `due` is the name that `at` has when requests are read."""
ROW_OPTIONS: Final = frozenset(
    {"service", "key_ttl", "priority", "delay", "at", "retries", "backoff", "ttl", "headers"}
)
"""Write options that set a column's value in all rows that have none."""
MAX_SHOWN: Final = 80
"""Number of characters of a value in an error message."""


class BadRow(SettingError):
    """A row is not a valid request; the message says which row, and why."""


@dataclass(frozen=True)
class RowConverter:
    """Converts rows with the columns `names`; `service` and `constants` are the options that apply to all rows."""

    names: tuple[str, ...]
    service: str | None
    constants: Mapping[str, Any]

    def entries(self, columns: Sequence[Sequence[Any]], first: int, task: int) -> Iterator[Entry]:
        """Yield a request for each row, in order; `first` is the index of the first row within task `task`.

        Raises `BadRow`.
        """
        by_name = dict(zip(self.names, columns, strict=True))
        bodies, keys = by_name.pop("request"), by_name.pop("key", None)
        others = list(zip(*by_name.values(), strict=True)) if by_name else None
        templates: dict[Any, Entry] = {}  # one valid request for each combination of values
        for at, body in enumerate(bodies):
            key = None if keys is None else keys[at]
            values = None if others is None else others[at]
            try:
                frames = _frames(body)
                values_key = (key is None, repr(values))
                template = templates.get(values_key)
                if template is not None and _is_plain(key, frames):
                    yield (new_uuid_hex(), *template[1:_KEY], key, *template[_KEY + 1 : -1], pack(frames))
                    continue
                made = self._checked(dict(zip(by_name, values or (), strict=True)), key, frames)
            except (MalformedRequest, TypeError, ValueError, OverflowError) as error:
                raise BadRow(self._error_text(columns, at, first + at, task, error)) from None
            if len(templates) == MAX_TEMPLATES:
                templates.clear()
            templates[values_key] = made
            yield made

    def _checked(self, row: dict[str, Any], key: str | None, frames: list[bytes]) -> Entry:
        options = dict(self.constants)
        if key is not None:
            options["key"] = key
        else:
            options.pop("key_ttl", None)  # as an option, key_ttl only applies to rows that have a key
        given = row.pop("service", None)
        service = self.service if given is None else given
        if service is None:
            raise MalformedRequest("the service is missing")
        for name, value in row.items():
            if value is not None:
                _override(options, _WIRE_NAMES.get(name, name), _CONVERT[name](value))
        return entry(parse_submission([service.encode(), *frames], options, 0.0), at="at" in options)

    def _error_text(self, columns: Sequence[Sequence[Any]], at: int, number: int, task: int, error: Exception) -> str:
        row = ", ".join(f"{name}={_shown(values[at])}" for name, values in zip(self.names, columns, strict=True))
        rule = str(error).replace("milliseconds", "seconds")  # the unit of columns
        return f"row {number} of partition {task} is not a valid request, so nothing was written: {rule} ({row})"


_KEY: Final = 8
"""Index of the key in an `Entry`."""
MAX_TEMPLATES: Final = 1000


def _is_plain(key: str | None, frames: list[bytes]) -> bool:
    """Whether key and body are certainly valid; otherwise the full rules decide."""
    if key is not None and not (0 < len(key) <= MAX_KEY_BYTES and key.isascii() and "\0" not in key):
        return False
    return len(frames) == 1 and len(frames[0]) <= MAX_BODY


def _override(options: dict[str, Any], name: str, value: Any) -> None:
    """Set a row's own value; `delay` replaces the option `at` and vice versa."""
    options[name] = value
    if name in _EXCLUSIVE:
        options.pop(_EXCLUSIVE[name], None)


_EXCLUSIVE: Final = {"delay": "at", "at": "delay"}


def plan_rows(schema: StructType, options: Mapping[str, str]) -> RowConverter:
    """Return the converter for rows with these columns.  Raises `SettingError` if they cannot be written."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise SettingError(f"titanic cannot write column {field.name!r}; available columns: {', '.join(COLUMNS)}")
        if not _type_fits(field.name, field.dataType):
            raise SettingError(
                f"titanic cannot write {field.name} as {field.dataType.simpleString()}; "
                f"expected {_EXPECTED[field.name]}"
            )
    names = tuple(schema.fieldNames())
    if len(set(names)) < len(names):
        raise SettingError("two columns have the same name; rename one")
    if "request" not in names:
        raise SettingError("the column request is missing; it holds the body of each request")
    if "service" not in names and "service" not in options:
        raise SettingError('name a service: add a column service or set .option("service", …)')
    for one, other in (("delay", "at"), ("delay", "due"), ("at", "due")):
        if one in names and other in names:
            raise SettingError(f"columns {one} and {other} both set when a request runs; keep one of them")
    return RowConverter(names, options.get("service"), _constants(options))


def _constants(options: Mapping[str, str]) -> dict[str, Any]:
    """Parse the options that apply to all rows, with the checks that apply to columns."""
    found: dict[str, Any] = {}
    for name in ROW_OPTIONS - {"service"}:
        if name not in options:
            continue
        try:
            found[_WIRE_NAMES.get(name, name)] = _PARSE[name](options[name])
        except ValueError:
            raise SettingError(f"{name} is {options[name]!r:.{MAX_SHOWN}}; expected {_EXPECTED[name]}") from None
    try:
        parse_submission([b"x", b""], {**found, **({"key": "x"} if "key_ttl" in found else {})}, 0.0)
        if "service" in options:
            parse_submission([options["service"].encode(), b""], {}, 0.0)
    except MalformedRequest as error:
        raise SettingError(f"invalid write option: {str(error).replace('milliseconds', 'seconds')}") from None
    return found


def _type_fits(name: str, kind: DataType) -> bool:
    match name:
        case "request":
            return _without_nulls(kind) in [_without_nulls(each) for each in _BODY]
        case "service" | "key":
            return kind == _TEXT
        case "headers":
            return isinstance(kind, MapType) and (kind.keyType, kind.valueType) == (_TEXT, _TEXT)
        case "at" | "due":
            return isinstance(kind, TimestampType | NumericType) or kind == _TEXT
        case _:
            return isinstance(kind, NumericType)


def _without_nulls(kind: DataType) -> DataType:
    return ArrayType(kind.elementType) if isinstance(kind, ArrayType) else kind


_INTEGER, _DURATION, _TIME = "an integer", "a number of seconds", "a timestamp, seconds since 1970, or ISO 8601"
_EXPECTED: Final = {
    "service": "string",
    "request": "string, binary, array<binary> or array<string>",
    "key": "string",
    "priority": _INTEGER,
    "retries": _INTEGER,
    "at": _TIME,
    "due": _TIME,
    "headers": 'map<string,string>, or JSON as an option: {"name": "value"}',
    **dict.fromkeys(_SECONDS, _DURATION),
}


def _seconds(value: Any) -> float:
    return round(float(value) * 1000, 3)


def _timestamp(value: Any) -> Any:
    if isinstance(value, datetime):  # a naive timestamp is in the local time zone
        return value.astimezone().timestamp() * 1000
    return value if isinstance(value, str) else _seconds(value)


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, Decimal) and value == int(value) else value


def _pairs(value: Any) -> dict[str, Any]:
    return dict(value)  # Arrow represents maps as lists of pairs


_CONVERT: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(_SECONDS, _seconds),
    "at": _timestamp,
    "due": _timestamp,
    "priority": _integer,
    "retries": _integer,
    "headers": _pairs,
}


def _timestamp_option(value: str) -> Any:
    try:
        return _seconds(value)
    except ValueError:
        return value


_PARSE: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(_SECONDS, _seconds),
    "priority": int,
    "retries": int,
    "at": _timestamp_option,
    "headers": json.loads,
}


def _frames(body: Any) -> list[bytes]:
    if isinstance(body, str):
        return [body.encode()]
    if isinstance(body, bytes | bytearray):
        return [bytes(body)]
    if body is None:
        raise MalformedRequest("the request is NULL")
    if None in body:
        raise MalformedRequest("a frame of the request is NULL")
    return [each.encode() if isinstance(each, str) else bytes(each) for each in body]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
