"""JSON schemas of services as parts of an OpenAPI document: their definitions become components."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from ....mdp.services.json_schemas import REFERENCE, Schema, definitions

MAX_BYTES: Final = 4 << 20
"""Maximum size of all schemas in a document; beyond, types are left out."""
_COMPONENT: Final = "#/components/schemas/"
_WITH_SCHEMAS: Final = frozenset({"properties", "patternProperties"})
"""Keywords whose keys are not keywords."""
_LEFT_OUT: Final = frozenset({"$id", "$schema", "$anchor", "$dynamicRef", "$dynamicAnchor", "$defs"})
"""Keywords that would change what references mean."""


class Components:
    """The components of a document.  Workers wrote the schemas, so references to anything else are dropped."""

    def __init__(self, **schemas: Any) -> None:
        self.schemas: dict[str, Any] = dict(schemas)
        self._definitions: dict[str, str] = {}
        """The JSON of the definitions from which the components were made."""
        self._size = 0

    def add(self, service: str, schema: Schema) -> dict[str, Any]:
        """Return a schema of `service` as part of the document; it is empty if the document is full."""
        size = len(json.dumps(schema))
        if self._size + size > MAX_BYTES:
            return {}
        self._size += size
        defined = definitions(schema)
        names = {REFERENCE + name: self._name(service, name, json.dumps(value)) for name, value in defined.items()}
        for name, value in defined.items():
            self.schemas[names[REFERENCE + name]] = _moved(value, names)
        moved: dict[str, Any] = _moved(dict(schema), names)
        return moved

    def _name(self, service: str, name: str, definition: str) -> str:
        """Return a name for the component: the same for the same definition of the same service."""
        key = re.sub(r"[^A-Za-z0-9._-]", "_", f"{service}.{name}")
        while key in self.schemas and self._definitions.get(key) != f"{service} {definition}":
            key += "_"
        self._definitions[key] = f"{service} {definition}"
        self.schemas.setdefault(key, {})
        return key


def _moved(value: Any, names: Mapping[str, str], *, keywords: bool = True) -> Any:
    """Return a schema whose references are to components.  Keys are `keywords`, or names of properties."""
    if isinstance(value, list):
        return [_moved(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {}
    for key, each in value.items():
        if not keywords:
            moved[key] = _moved(each, names)
        elif key == "$ref":
            if str(each) in names:
                moved[key] = _COMPONENT + names[str(each)]
        elif key == "discriminator" and isinstance(each, dict) and isinstance(each.get("mapping"), dict):
            mapping = {tag: _COMPONENT + names[str(to)] for tag, to in each["mapping"].items() if str(to) in names}
            moved[key] = {**each, "mapping": mapping}
        elif key not in _LEFT_OUT:
            moved[key] = _moved(each, names, keywords=key not in _WITH_SCHEMAS)
    return moved
