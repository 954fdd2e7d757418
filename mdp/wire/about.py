"""The option `about` of READY, in which a worker describes its service: bounded, and without control characters."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

MAX_ABOUT: Final = 32768
"""Maximum size in bytes of an `about`, as compact JSON in ASCII."""
_ESCAPED: Final = re.compile(r"\\[ubfr]")
"""How JSON in ASCII writes what is not printable, except DEL, line feeds and tabs."""
_KEPT: Final = "\n\t"
"""Characters that are not printable, but belong into a text of several lines."""


def encode_about(about: Mapping[str, Any]) -> bytes:
    """Return `about` as JSON, with "?" in place of characters that could control a terminal.

    It may be larger than `MAX_ABOUT`.  Raises `TypeError`, `ValueError` or `RecursionError` for what is not JSON.
    """
    text = _json(dict(about))
    if not text.isprintable() or _ESCAPED.search(text):  # seldom: otherwise there is nothing to replace
        text = _json(_cleaned(dict(about)))
    return text.encode()


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_shown, value))
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each) for each in value]
    return value


def _shown(character: str) -> str:
    return character if character.isprintable() or character in _KEPT else "?"
