"""Rows of Spark as requests to stage: which columns there may be; each row checked by the rules for all requests."""

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
_WIRE: Final = {"ttl": "result_ttl", "due": "at"}
"""What is called differently in the options of a request."""
NAMES: Final = (
    "service", "request", "key", "key_ttl", "priority", "delay", "at", "due", "retries", "backoff", "ttl", "headers",
)  # fmt: skip
"""The columns that there may be; `due` is what `at` is called where requests are read."""
CONSTANTS: Final = frozenset({"service", "key_ttl", "priority", "delay", "at", "retries", "backoff", "ttl", "headers"})
"""Options that hold for all rows, but for those that say something else."""
SHOWN: Final = 80
"""Characters of a value that an error shows."""


class BadRow(SettingError):
    """A row is no request; says which, and what it breaks."""


@dataclass(frozen=True)
class Rows:
    """How rows become requests: the options that hold for all, as they go on the wire, and the service."""

    names: tuple[str, ...]
    service: str | None
    constants: Mapping[str, Any]

    def entries(self, columns: Sequence[Sequence[Any]], first: int, task: int) -> Iterator[Entry]:
        """For each row a request, in order.  `first` is the number of the first row of task `task`.

        Raises `BadRow`.
        """
        by_name = dict(zip(self.names, columns, strict=True))
        bodies, keys = by_name.pop("request"), by_name.pop("key", None)
        others = list(zip(*by_name.values(), strict=True)) if by_name else None
        alike: dict[Any, Entry] = {}  # a request for each combination of values that was found to be right
        for at, body in enumerate(bodies):
            key = None if keys is None else keys[at]
            values = None if others is None else others[at]
            try:
                frames = _frames(body)
                same = (key is None, repr(values))
                known = alike.get(same)
                if known is not None and _is_plain(key, frames):
                    yield (new_uuid_hex(), *known[1:_KEY], key, *known[_KEY + 1 : -1], pack(frames))
                    continue
                made = self._checked(dict(zip(by_name, values or (), strict=True)), key, frames)
            except (MalformedRequest, TypeError, ValueError, OverflowError) as error:
                raise BadRow(self._told(columns, at, first + at, task, error)) from None
            if len(alike) == MOST_ALIKE:
                alike.clear()
            alike[same] = made
            yield made

    def _checked(self, row: dict[str, Any], key: str | None, frames: list[bytes]) -> Entry:
        options = dict(self.constants)
        if key is not None:
            options["key"] = key
        else:
            options.pop("key_ttl", None)  # an option says how long keys live, not that there are any
        given = row.pop("service", None)
        service = self.service if given is None else given
        if service is None:
            raise MalformedRequest("it names no service")
        for name, value in row.items():
            if value is not None:
                _put(options, _WIRE.get(name, name), _CONVERT[name](value))
        return entry(parse_submission([service.encode(), *frames], options, 0.0), at="at" in options)

    def _told(self, columns: Sequence[Sequence[Any]], at: int, number: int, task: int, error: Exception) -> str:
        row = ", ".join(f"{name}={_shown(values[at])}" for name, values in zip(self.names, columns, strict=True))
        rule = str(error).replace("milliseconds", "seconds")  # which is what rows have
        return f"row {number} of partition {task} is no request, and nothing was written: {rule} ({row})"


_KEY: Final = 8
"""Where the key is in an `Entry`."""
MOST_ALIKE: Final = 1000


def _is_plain(key: str | None, frames: list[bytes]) -> bool:
    """Whether key and body are certainly right; if not, the rules say whether they are."""
    if key is not None and not (0 < len(key) <= MAX_KEY_BYTES and key.isascii() and "\0" not in key):
        return False
    return len(frames) == 1 and len(frames[0]) <= MAX_BODY


def _put(options: dict[str, Any], name: str, value: Any) -> None:
    """A row's own value; one that says when takes the place of the option that says so otherwise."""
    options[name] = value
    if name in _EITHER:
        options.pop(_EITHER[name], None)


_EITHER: Final = {"delay": "at", "at": "delay"}


def plan(schema: StructType, options: Mapping[str, str]) -> Rows:
    """How rows with these columns become requests.  Raises `SettingError` if they cannot."""
    for field in schema.fields:
        if field.name not in NAMES:
            raise SettingError(f"titanic cannot write a column {field.name!r}: it takes {', '.join(NAMES)}")
        if not _fits(field.name, field.dataType):
            raise SettingError(
                f"titanic cannot write {field.name} as {field.dataType.simpleString()}: it takes {_TAKES[field.name]}"
            )
    names = tuple(schema.fieldNames())
    if len(set(names)) < len(names):
        raise SettingError("titanic cannot write two columns of the same name")
    if "request" not in names:
        raise SettingError("titanic writes the column request: the body of each request")
    if "service" not in names and "service" not in options:
        raise SettingError('titanic needs the name of a service: a column service, or .option("service", …)')
    for one, other in (("delay", "at"), ("delay", "due"), ("at", "due")):
        if one in names and other in names:
            raise SettingError(f"the columns {one} and {other} are two ways to say one thing: write one of them")
    return Rows(names, options.get("service"), _constants(options))


def _constants(options: Mapping[str, str]) -> dict[str, Any]:
    """Checked as they would be in a row."""
    found: dict[str, Any] = {}
    for name in CONSTANTS - {"service"}:
        if name not in options:
            continue
        try:
            found[_WIRE.get(name, name)] = _PARSE[name](options[name])
        except ValueError:
            raise SettingError(f"{name} is {options[name]!r:.{SHOWN}}: it takes {_TAKES[name]}") from None
    try:
        parse_submission([b"x", b""], {**found, **({"key": "x"} if "key_ttl" in found else {})}, 0.0)
        if "service" in options:
            parse_submission([options["service"].encode(), b""], {}, 0.0)
    except MalformedRequest as error:
        raise SettingError(
            f"an option of the write is wrong: {str(error).replace('milliseconds', 'seconds')}"
        ) from None
    return found


def _fits(name: str, kind: DataType) -> bool:
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


_WHOLE, _DURATION, _TIME = "a whole number", "a number of seconds", "a timestamp, seconds since 1970, or ISO 8601"
_TAKES: Final = {
    "service": "string",
    "request": "string, binary, array<binary> or array<string>",
    "key": "string",
    "priority": _WHOLE,
    "retries": _WHOLE,
    "at": _TIME,
    "due": _TIME,
    "headers": 'map<string,string>, or as an option JSON: {"name": "value"}',
    **dict.fromkeys(_SECONDS, _DURATION),
}


def _seconds(value: Any) -> float:
    return round(float(value) * 1000, 3)


def _moment(value: Any) -> Any:
    if isinstance(value, datetime):  # a row's without a time zone is in this one
        return value.astimezone().timestamp() * 1000
    return value if isinstance(value, str) else _seconds(value)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, Decimal) and value == int(value) else value


def _pairs(value: Any) -> dict[str, Any]:
    return dict(value)  # Arrow's maps are lists of pairs


def _as_it_is(value: Any) -> Any:
    return value


_CONVERT: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(_SECONDS, _seconds),
    "at": _moment,
    "due": _moment,
    "priority": _whole,
    "retries": _whole,
    "headers": _pairs,
}


def _moment_option(value: str) -> Any:
    try:
        return _seconds(value)
    except ValueError:
        return value


_PARSE: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(_SECONDS, _seconds),
    "priority": int,
    "retries": int,
    "at": _moment_option,
    "headers": json.loads,
}


def _frames(body: Any) -> list[bytes]:
    if isinstance(body, str):
        return [body.encode()]
    if isinstance(body, bytes | bytearray):
        return [bytes(body)]
    if body is None:
        raise MalformedRequest("its request is NULL")
    if None in body:
        raise MalformedRequest("a frame of its request is NULL")
    return [each.encode() if isinstance(each, str) else bytes(each) for each in body]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
