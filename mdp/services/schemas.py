"""JSON schemas of values, as workers tell them: untrusted, and read by several programs."""

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
