"""Convert rows to requests: which columns are allowed, and validation by the same rules as for all requests."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from ...titanic.submission import (
    MAX_KEY_BYTES,
    OPTIONS,
    DurationOption,
    IntegerOption,
    MalformedRequest,
    Option,
    Submission,
    TextOption,
    TimeOption,
    encode_options,
    parse_submission,
)
from ...titanic.uuids import new_uuid_hex
from ...workers.handling import MAX_BODY

MAX_SHOWN: Final = 80
"""Number of characters of a value in an error message."""
MAX_TEMPLATES: Final = 1000
"""Number of checked requests that a task keeps to copy; see `RowConverter.entries`."""


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Column:
    """A column that can be written."""

    expected: str
    """What it can hold, for error messages."""
    fits: Callable[[DataType], bool]
    """Whether it can have this type."""
    convert: Callable[[Any], Any]
    """Return a value of the column as the Python API of Titanic expects it."""
    parse: Callable[[str], Any]
    """Return the text of a write option as the Python API of Titanic expects it."""


def _is_body(kind: DataType) -> bool:
    return _without_nulls(kind) in [_TEXT, _BYTES, ArrayType(_BYTES), ArrayType(_TEXT)]


def _without_nulls(kind: DataType) -> DataType:
    return ArrayType(kind.elementType) if isinstance(kind, ArrayType) else kind


def _is_text(kind: DataType) -> bool:
    return kind == _TEXT


def _is_number(kind: DataType) -> bool:
    return isinstance(kind, NumericType)


def _is_time(kind: DataType) -> bool:
    return isinstance(kind, TimestampType | NumericType) or kind == _TEXT


def _is_text_map(kind: DataType) -> bool:
    return isinstance(kind, MapType) and (kind.keyType, kind.valueType) == (_TEXT, _TEXT)


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, Decimal) and value == int(value) else value


def _time(value: Any) -> datetime | float:
    if isinstance(value, datetime):  # a naive timestamp is in the local time zone
        return value.astimezone()
    if not isinstance(value, str):
        return float(value)
    with suppress(ValueError):
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is not None:
            return moment
    raise ValueError(f"{value[:MAX_SHOWN]!r} is not a time with its offset from UTC, such as 2030-01-31T12:00:00+00:00")


def _time_option(text: str) -> datetime | float:
    try:
        return float(text)
    except ValueError:
        return _time(text)


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


_TEXT, _BYTES = StringType(), BinaryType()
_STRING: Final = Column("string", _is_text, str, str)
_TIME: Final = Column("a timestamp, seconds since 1970, or ISO 8601 with an offset", _is_time, _time, _time_option)
_BY_KIND: Final[Mapping[type[Option], Column]] = {
    TextOption: _STRING,
    DurationOption: Column("a number of seconds", _is_number, float, float),
    IntegerOption: Column("an integer", _is_number, _integer, int),
    TimeOption: _TIME,
}
COLUMNS: Final[Mapping[str, Column]] = {
    "service": _STRING,
    "request": Column("string, binary, array<binary> or array<string>", _is_body, _frames, str),
    **{name: _BY_KIND[type(option)] for name, option in OPTIONS.items()},
    "due": _TIME,
    # Arrow represents maps as lists of pairs.
    "headers": Column('map<string,string>, or JSON as an option: {"name": "value"}', _is_text_map, dict, json.loads),
}
"""The columns that can be written; `due` is the name that `at` has when requests are read."""
ROW_OPTIONS: Final = frozenset(COLUMNS) - {"request", "key", "due"}
"""Write options that set a column's value in all rows that have none."""
_EXCLUSIVE: Final = {"delay": "at", "at": "delay"}


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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

        Rows that differ only in `request` and `key` are checked once: the others are copies of that request.

        Raises `BadRow`.
        """
        by_name = dict(zip(self.names, columns, strict=True))
        bodies, keys = by_name.pop("request"), by_name.pop("key", None)
        others = list(zip(*by_name.values(), strict=True)) if by_name else None
        templates: dict[Any, Entry] = {}
        for at, body in enumerate(bodies):
            key = None if keys is None else keys[at]
            values = None if others is None else others[at]
            try:
                frames = _frames(body)
                values_key = (key is None, repr(values))
                template = templates.get(values_key)
                if template is not None and _is_plain(key, frames):
                    yield template._replace(uuid=new_uuid_hex(), key=key, body=pack(frames))
                    continue
                made = self._checked(dict(zip(by_name, values or (), strict=True)), key, frames)
            except (MalformedRequest, SettingError, TypeError, ValueError, OverflowError) as error:
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
                option = "at" if name == "due" else name
                options.pop(_EXCLUSIVE.get(option, ""), None)  # the row's own value replaces an option for all rows
                options[option] = COLUMNS[name].convert(value)
        return entry(_submission(service, frames, options), at="at" in options)

    def _error_text(self, columns: Sequence[Sequence[Any]], at: int, number: int, task: int, error: Exception) -> str:
        row = ", ".join(f"{name}={_shown(values[at])}" for name, values in zip(self.names, columns, strict=True))
        return f"row {number} of partition {task} is not a valid request, so nothing was written: {error} ({row})"


def _is_plain(key: str | None, frames: list[bytes]) -> bool:
    """Whether key and body are certainly valid; otherwise the full rules decide."""
    if key is not None and not (0 < len(key) <= MAX_KEY_BYTES and key.isascii() and "\0" not in key):
        return False
    return len(frames) == 1 and len(frames[0]) <= MAX_BODY


def _submission(service: str, frames: list[bytes], options: Mapping[str, Any]) -> Submission:
    """Check a request by the same rules as all requests.  Its times are relative to the commit, except `at`."""
    encoded = encode_options({name: value for name, value in options.items() if name != "headers"})
    return parse_submission([service.encode(), *frames], {**encoded, "headers": options.get("headers")}, 0.0)


def plan_rows(schema: StructType, options: Mapping[str, str]) -> RowConverter:
    """Return the converter for rows with these columns.  Raises `SettingError` if they cannot be written."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise SettingError(f"titanic cannot write column {field.name!r}; available columns: {', '.join(COLUMNS)}")
        column = COLUMNS[field.name]
        if not column.fits(field.dataType):
            raise SettingError(
                f"titanic cannot write {field.name} as {field.dataType.simpleString()}; expected {column.expected}"
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
            found[name] = COLUMNS[name].parse(options[name])
        except ValueError:
            raise SettingError(f"{name} is {options[name]!r:.{MAX_SHOWN}}; expected {COLUMNS[name].expected}") from None
    try:
        key = {"key": "x"} if "key_ttl" in found else {}
        _submission(options.get("service", "x"), [b""], {**found, **key})
    except (MalformedRequest, SettingError) as error:
        raise SettingError(f"invalid write option: {error}") from None
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
