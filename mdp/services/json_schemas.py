"""JSON schemas of values, as workers tell them, and an example of a value, made from its schema.

Schemas are untrusted, and read by several programs.
"""

from collections.abc import Mapping
from typing import Any, Final

Schema = Mapping[str, Any]
RAW: Final[Schema] = {"type": "string", "contentMediaType": "application/octet-stream"}
"""The schema of a value that is the frame itself, whatever the codec."""
REFERENCE: Final = "#/$defs/"
"""What references to a schema's own definitions begin with; their name follows."""


def definitions(schema: Schema) -> Mapping[str, Any]:
    """Return the definitions that a schema has, by name."""
    found = schema.get("$defs")
    return found if isinstance(found, dict) else {}


MAX_VALUES: Final = 500
"""Maximum number of values in an example, since schemas may nest them deeply."""
_NULL: Final = {"type": "null"}
_FORMATS: Final = {
    "date-time": "2026-01-31T12:00:00Z", "date": "2026-01-31", "time": "12:00:00", "duration": "PT1H",
    "uuid": "00000000-0000-0000-0000-000000000000", "decimal": "1.5",
}  # fmt: skip


def example(schema: Schema | None) -> Any:
    """Return a value that probably fits: the schema's own example or defaults, or else the simplest value."""
    return _Example(dict(schema or {})).value


class _Example:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._defined = definitions(schema)
        self._within: list[str] = []
        """The definitions whose values contain the current one."""
        self._left = MAX_VALUES
        self.value = self._of(schema)

    def _of(self, schema: Any) -> Any:
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0:
            return None
        if isinstance(reference := schema.get("$ref"), str):
            return self._of_definition(reference.removeprefix(REFERENCE))
        for name in ("examples", "enum"):
            if isinstance(values := schema.get(name), list) and values:
                return values[0]
        for name in ("const", "default"):
            if name in schema:
                return schema[name]
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := schema.get(name), list) and options:
                return None if _NULL in options else self._of(options[0])
        return self._simplest(schema)

    def _of_definition(self, name: str) -> Any:
        if name in self._within:
            return None
        self._within.append(name)
        value = self._of(self._defined.get(name))
        self._within.pop()
        return value

    def _simplest(self, schema: dict[str, Any]) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kind = kind[0]
        if kind == "object":
            fields = schema.get("properties")
            return {name: self._of(value) for name, value in fields.items()} if isinstance(fields, dict) else {}
        if kind == "array":
            items = schema.get("prefixItems", [schema["items"]] if "items" in schema else [])
            return [self._of(each) for each in items] if isinstance(items, list) else []
        if kind == "string":
            return _FORMATS.get(str(schema.get("format")), "")
        if kind in ("integer", "number"):
            least = schema.get("minimum", 0)
            return least if isinstance(least, int | float) else 0
        return False if kind == "boolean" else None
