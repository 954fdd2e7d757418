"""The values of a stream as one document: a JSON array, or CSV if they are flat objects."""

import csv
import io
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ....mdp.services import About
from ....mdp.services.json_schemas import RAW, REFERENCE, Schema, definitions
from ...gateway import Gateway
from .stream import Lines
from .translation import CSV, JSON, JSON_LINES, JSONL, MEDIA_TYPE

_SCALARS: Final = frozenset({"string", "integer", "number", "boolean", "null"})
MAX_TYPES: Final = 20
"""Maximum number of a service's own types."""
MAX_REFERENCES: Final = 8
"""Maximum length of a chain of references."""


class Array(Lines):
    """The values of one reply as a JSON array."""

    def _written(self, value: bytes) -> bytes:
        return (b",\n" if self.begun else b"[") + value

    def _closing(self) -> bytes:
        return b"]\n" if self.begun else b"[]\n"


class Rows(Lines):
    """The values of one reply, which are flat objects, as CSV with a header (RFC 4180, with \\n at the ends of lines).

    Nulls are empty, `true` and `false` as in JSON.
    """

    def __init__(self, gateway: Gateway, service: str, timeout: float, about: About, kind: bytes) -> None:
        super().__init__(gateway, service, timeout, about, kind)
        self._names = columns_of(about) or []

    def _written(self, value: bytes) -> bytes:
        found = msgspec.json.decode(value)
        if not isinstance(found, dict) or not found.keys() <= set(self._names):
            raise ValueError(f"it is not an object with the members {', '.join(self._names)}")
        row = _line(_cell(found.get(name)) for name in self._names)
        return row if self.begun else _line(self._names) + row

    def _closing(self) -> bytes:
        return b"" if self.begun else _line(self._names)


FORMATS: Final[Mapping[bytes, type[Lines]]] = {JSON_LINES: Lines, JSONL: Lines, JSON: Array, CSV: Rows}
"""The receivers of a stream of values, by the type of the reply."""


def stream_types(about: About) -> list[bytes]:
    """Return the types in which the values that a service streams can be written, the preferred one first."""
    if about.part == RAW:
        return []
    return [kind for kind in FORMATS if kind != CSV or columns_of(about) is not None]


def own_types(about: About) -> list[bytes]:
    """Return the valid ones among a service's own types, the preferred one first."""
    own = [each.encode().lower() for each in about.media_types[:MAX_TYPES]]
    return [each for each in own if MEDIA_TYPE.fullmatch(each)]


def values(gateway: Gateway, service: str, timeout: float, about: About, kind: bytes) -> Lines:
    """Return the receiver of a request whose reply is written as `kind`, one of `stream_types`."""
    return FORMATS[kind](gateway, service, timeout, about, kind)


def columns_of(about: About) -> list[str] | None:
    """Return the names of the members of the objects that a service streams; None unless all of them are scalars."""
    schema = about.part or {}
    defined = definitions(schema)
    properties = _resolved(schema, defined).get("properties")
    if not isinstance(properties, dict) or not properties:
        return None
    return list(properties) if all(_is_scalar(each, defined) for each in properties.values()) else None


def _resolved(schema: Any, defined: Mapping[str, Any]) -> Schema:
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict):
            break
        if "$ref" not in schema:
            return schema
        schema = defined.get(str(schema["$ref"]).removeprefix(REFERENCE))
    return {}


def _is_scalar(schema: Any, defined: Mapping[str, Any]) -> bool:
    found = _resolved(schema, defined)
    choices = found.get("anyOf")
    if isinstance(choices, list):
        return all(_resolved(each, defined).get("type") in _SCALARS for each in choices)
    kinds = found.get("type")
    return "enum" in found or (isinstance(kinds, str) and kinds in _SCALARS)


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise ValueError("CSV has no arrays and no objects within a row")
    return ("true" if value else "false") if isinstance(value, bool) else value


def _line(cells: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
