"""Check rows that become requests, a column at a time, by the rules for all requests (titanic/api/submission.py)."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ....mdp.errors import SettingError
from ....mdp.limits import MAX_BODY, MAX_BODY_FRAMES
from ....mdp.services.submission import MAX_SECONDS
from ...api.submission import (
    LENGTH_BYTES,
    OPTIONS,
    DurationOption,
    IntegerOption,
    MalformedRequest,
    Option,
    Submission,
    TextOption,
    encode_options,
    parse_submission,
)
from .packing import UUID_BYTES, binary, pack_bodies

MAX_CHUNK_BYTES: Final = 8 << 20
"""About the maximum size of the rows staged in one transaction, unless one row has more."""
MAX_SHOWN: Final = 80
"""Number of characters of a value in an error message."""
STAGED: Final = pa.schema({
    "staging": pa.int64(), "number": pa.int32(), "uuid": pa.binary(), "service": pa.string(), "priority": pa.int16(),
    "due": pa.float64(), "delay": pa.float64(), "retries": pa.int32(), "backoff": pa.float64(),
    "result_ttl": pa.float64(), "key": pa.string(), "key_ttl": pa.float64(), "headers": pa.string(),
    "body": pa.binary(), "group_name": pa.string(),
})  # fmt: skip
"""The columns of `titanic_staged`."""

Checked = tuple[pa.Array, pa.Array]
"""Values as they are stored, and which of them are valid; NULLs are."""


class BadRow(SettingError):
    """A row is not a valid request; the message says which row, and why."""


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def time_option(name: str, text: str) -> float:
    """Return an option as seconds since 1970.  Raises `SettingError` if it is not a time."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = datetime.min
        seconds = math.nan if moment.tzinfo is None else moment.timestamp()
    if not math.isfinite(seconds):
        raise SettingError(
            f"{name} is {text!r:.100}; expected seconds since 1970, or a time such as 2030-01-31T12:00:00+00:00"
        )
    return seconds


def _texts(values: pa.Array, max_bytes: int) -> Checked:
    matching = pc.match_substring_regex(values, r"\A[^\x00]+\z")  # nothing matches what is not UTF-8
    return values, pc.and_(matching, pc.less_equal(pc.binary_length(values), max_bytes))


def _integers(values: pa.Array, maximum: int) -> Checked:
    numbers, valid = _numbers(values, 0, maximum)
    return numbers, pc.and_(valid, pc.equal(numbers, pc.floor(numbers)))


def _numbers(values: pa.Array, least: float, most: float, *, above: bool = False) -> Checked:
    numbers = pc.round(values.cast(pa.float64(), safe=False), 6)  # to microseconds, if these are seconds
    from_least = (pc.greater if above else pc.greater_equal)(numbers, least)
    return numbers, pc.and_(from_least, pc.less_equal(numbers, most))


def _times(values: pa.Array) -> Checked:
    if pa.types.is_string(values.type):
        try:
            values = values.cast(pa.timestamp("us", "UTC"))
        except pa.ArrowInvalid:  # not all have the usual format
            values = pa.array([_seconds(_value(values, at)) for at in range(len(values))], pa.float64())
    if pa.types.is_timestamp(values.type):
        values = pc.divide(
            values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6
        )
    return _numbers(values, -MAX_SECONDS, 2 * MAX_SECONDS)


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else time_option("at", text)
    except SettingError:
        return np.nan


def _services(values: pa.Array) -> Checked:
    known = values.dictionary_encode()
    valid = [_reason("service", _value(known.dictionary, at)) is None for at in range(len(known.dictionary))]
    return values, pa.array(valid, pa.bool_()).take(known.indices)


def _headers(values: pa.Array) -> Checked:
    texts = [None if pairs is None else _json(tuple(pairs)) for pairs in values.to_pylist()]
    return pa.array([text or None for text in texts], pa.string()), pa.array([text != "" for text in texts])


@lru_cache(maxsize=1000)
def _json(headers: tuple[tuple[str, str | None], ...]) -> str | None:
    """Return headers as JSON, None if there are none, or "" if they are invalid."""
    try:
        return _submission("x", [b""], {"headers": dict(headers)}).headers
    except MalformedRequest:
        return ""


def _bodies(values: pa.Array) -> Checked:
    valid, counts = values.is_valid(), 1
    if pa.types.is_list(values.type):
        counts = pc.list_value_length(values)
        valid = pc.and_(
            valid, pc.fill_null(pc.and_(pc.greater(counts, 0), pc.less_equal(counts, MAX_BODY_FRAMES)), False)
        )
        if values.flatten().null_count:
            with_null = pc.list_parent_indices(values).filter(values.flatten().is_null())
            valid = pc.and_(valid, pc.invert(pc.is_in(pa.array(range(len(values))), with_null)))
    if not pc.all(valid).as_py():
        return values, valid
    packed = pack_bodies(values)
    sizes = pc.subtract(pc.binary_length(packed), pc.multiply(counts, LENGTH_BYTES))
    return packed, pc.less_equal(sizes, MAX_BODY)


def _submission(service: str, frames: list[bytes], options: Mapping[str, Any]) -> Submission:
    """Check a request by the rules for all requests.  Its times are relative to the commit, except `at`."""
    encoded = encode_options({name: value for name, value in options.items() if name != "headers"})
    return parse_submission([service.encode(), *frames], {**encoded, "headers": options.get("headers")}, 0.0)


def _reason(name: str, value: Any) -> str | None:
    """Return why a request with this value would be rejected, or None."""
    service, frames, options = "x", [b""], {}
    try:
        if name == "service":
            service = value
        elif name == "request":
            frames = value if isinstance(value, list) else [value]
            if None in frames:
                return "the request is NULL" if value is None else "a frame of the request is NULL"
            frames = [each if isinstance(each, bytes) else each.encode() for each in frames]
        else:
            options = {"at" if name == "due" else name: COLUMNS[name].parse(value)}
        _submission(service, frames, options | ({"key": "x"} if name == "key_ttl" else {}))
    except (MalformedRequest, SettingError, TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None


def _value(values: pa.Array, at: int) -> Any:
    try:
        return values[at].as_py()
    except UnicodeDecodeError:
        return values[at].cast(pa.binary()).as_py().decode(errors="surrogateescape")


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Column:
    """A column that can be written."""

    expected: str
    """The values it can hold, for error messages."""
    fits: Callable[[pa.DataType], bool]
    """Whether it can have this type."""
    check: Callable[[pa.Array], Checked]
    """Convert and check values."""
    parse: Callable[[Any], Any]
    """Return a value, or the text of a write option, as the Python API of Titanic expects it."""


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_time(kind: pa.DataType) -> bool:
    moment = pa.types.is_timestamp(kind) and kind.tz is not None
    return moment or pa.types.is_string(kind) or _is_number(kind)


def _is_body(kind: pa.DataType) -> bool:
    frame = kind.value_type if pa.types.is_list(kind) else kind
    return bool(pa.types.is_string(frame) or pa.types.is_binary(frame))


def _is_headers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind) and pa.types.is_string(kind.key_type) and pa.types.is_string(kind.item_type))


def _column(option: Option) -> Column:
    match option:
        case TextOption():
            return Column("string", pa.types.is_string, partial(_texts, max_bytes=option.max_bytes), str)
        case DurationOption():
            check = partial(_numbers, least=0, most=MAX_SECONDS, above=not option.zero)
            return Column("a number of seconds", _is_number, check, float)
        case IntegerOption():
            return Column("an integer", _is_number, partial(_integers, maximum=option.maximum), int)
    return Column("a timestamp, seconds since 1970, or ISO 8601 with an offset",
                  _is_time, _times,
                  lambda value: time_option("at", value) if isinstance(value, str) else value)  # fmt: skip


COLUMNS: Final[Mapping[str, Column]] = {
    "service": Column("string", pa.types.is_string, _services, str),
    "request": Column(
        "string, binary, array<binary> or array<string>",
        _is_body, _bodies, str,
    ),
    **{name: _column(option) for name, option in OPTIONS.items() if name != "on_duplicate"},
    "due": _column(OPTIONS["at"]),
    "headers": Column(
        'map<string,string>, or JSON as an option: {"name": "value"}',
        _is_headers, _headers,
        lambda value: json.loads(value) if isinstance(value, str) else dict(value),
    ),
}  # fmt: skip
"""The columns that can be written; `due` is the name that `at` has when requests are read."""
ROW_OPTIONS: Final = frozenset(COLUMNS) - {"request", "key", "due"}
"""Write options that set a column's value in all rows that have none."""
_STAGED_NAMES: Final = {"at": "due", "ttl": "result_ttl", "group": "group_name", "request": "body"}


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RowConverter:
    """Converts rows with the columns `names`; `constants` are the values for rows without one, by staged column."""

    names: tuple[str, ...]
    constants: Mapping[str, Any]

    def convert(self, batch: pa.RecordBatch, staging: int, first: int, task: int) -> pa.RecordBatch:
        """Return the rows of `titanic_staged` for a batch, which begins with row `first` of task `task`.

        Raises `BadRow`.
        """
        found: dict[str, pa.Array] = {}
        for name, values in zip(self.names, batch.columns, strict=True):
            converted, valid = COLUMNS[name].check(values)
            if (at := pc.index(valid, False).as_py()) >= 0:
                raise self._bad_row(batch, at, first, task, _reason(name, _value(values, at)) or f"{name} is invalid")
            found[_STAGED_NAMES.get(name, name)] = converted
        constants = dict(self.constants)
        for one, other in (("due", "delay"), ("delay", "due")):
            if one in found and other in constants:  # the row's own value replaces an option for all rows
                found[other] = pc.if_else(found[one].is_null(), constants.pop(other), pa.scalar(None, pa.float64()))
        count = batch.num_rows
        keyed = found["key"].is_valid() if "key" in found else pa.repeat(False, count)
        if (
            "key_ttl" in found
            and (at := pc.index(pc.and_(found["key_ttl"].is_valid(), pc.invert(keyed)), True).as_py()) >= 0
        ):
            raise self._bad_row(batch, at, first, task, "key_ttl needs a key")
        for name, value in constants.items():
            found[name] = pc.fill_null(found[name], value) if name in found else pa.repeat(value, count)
        if "key_ttl" in constants:  # as an option, it only applies to rows that have a key
            found["key_ttl"] = pc.if_else(keyed, found["key_ttl"], pa.scalar(None, pa.float64()))
        if (at := pc.index(found["service"].is_null(), True).as_py()) >= 0:
            raise self._bad_row(batch, at, first, task, "the service is missing")
        found["staging"], found["uuid"] = pa.repeat(staging, count), new_uuids(count)
        found["number"] = pa.array(np.arange(first, first + count))
        arrays = [found[name].cast(kind) if name in found else pa.nulls(count, kind)
                  for name, kind in zip(STAGED.names, STAGED.types, strict=True)]  # fmt: skip
        return pa.RecordBatch.from_arrays(arrays, schema=STAGED)

    def _bad_row(self, batch: pa.RecordBatch, at: int, first: int, task: int, reason: str) -> BadRow:
        row = ", ".join(
            f"{name}={_shown(_value(values, at))}" for name, values in zip(self.names, batch.columns, strict=True)
        )
        return BadRow(
            f"row {first + at} of partition {task} is not a valid request, so nothing was written: {reason} ({row})"
        )


def bounded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Combine and split batches so that each has about `MAX_CHUNK_BYTES`, but the last."""
    found: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        rows = max(1, min(batch.num_rows, MAX_CHUNK_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            if found and size + part.nbytes > MAX_CHUNK_BYTES:
                yield pa.concat_batches(found)
                found, size = [], 0
            found.append(part)
            size += part.nbytes
    if found:
        yield pa.concat_batches(found)


def new_uuids(count: int) -> pa.Array:
    """Return new UUIDs like those of `new_uuid`, as bytes, in ascending order, which halves the time that PostgreSQL
    needs to index them."""
    made = np.frombuffer(os.urandom(UUID_BYTES * count), np.uint8).reshape(count, UUID_BYTES).copy()
    made[:, :6] = np.frombuffer((time.time_ns() // 1_000_000).to_bytes(6, "big"), np.uint8)
    made[:, 6] = made[:, 6] & 0x0F | 0x70
    made[:, 8] = made[:, 8] & 0x3F | 0x80
    ascending = np.argsort(made[:, 6:14].copy().view(">u8")[:, 0])
    return binary(made[ascending].tobytes(), UUID_BYTES)


def plan_rows(schema: pa.Schema, options: Mapping[str, str]) -> RowConverter:
    """Return the converter for rows with these columns.  Raises `SettingError` if they cannot be written."""
    for field in schema:
        if field.name not in COLUMNS:
            raise SettingError(f"titanic cannot write column {field.name!r}; available columns: {', '.join(COLUMNS)}")
        column = COLUMNS[field.name]
        if not column.fits(field.type):
            raise SettingError(f"titanic cannot write {field.name} as {field.type}; expected {column.expected}")
    names = tuple(schema.names)
    if len(set(names)) < len(names):
        raise SettingError("two columns have the same name; rename one")
    if "request" not in names:
        raise SettingError("the column request is missing; it holds the body of each request")
    if "service" not in names and "service" not in options:
        raise SettingError('name a service: add a column service or set .option("service", …)')
    for one, other in (("delay", "at"), ("delay", "due"), ("at", "due")):
        if one in names and other in names:
            raise SettingError(f"columns {one} and {other} both set when a request runs; keep one of them")
    return RowConverter(names, _constants(options))


def _constants(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that apply to all rows, by staged column, with the checks that apply to columns."""
    found: dict[str, Any] = {}
    for name in ROW_OPTIONS & options.keys():
        try:
            found[name] = COLUMNS[name].parse(options[name])
        except ValueError:
            raise SettingError(f"{name} is {options[name]!r:.{MAX_SHOWN}}; expected {COLUMNS[name].expected}") from None
    service = found.pop("service", None)
    try:
        checked = _submission(service or "x", [b""], found | ({"key": "x"} if "key_ttl" in found else {}))
    except (MalformedRequest, SettingError) as error:
        raise SettingError(f"invalid write option: {error}") from None
    values = {**checked._asdict(), "service": service, "key_ttl": checked.key_expires, "key": None, "body": None}
    values |= {"due": found.get("at"), "delay": found.get("delay")}
    return {
        name: value for name, value in values.items() if name in STAGED.names and name != "uuid" and value is not None
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
