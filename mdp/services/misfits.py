"""Values that do not fit their types, and types whose values would not come back as they were."""

import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec

from ..builtin_values import TEXTS
from ..errors import CodecError
from .type_parts import bare, is_union, parts, show

_PATH: Final = re.compile(r"(.*) - at `([^`]*)`", re.DOTALL)
_INNER_PATH: Final = re.compile(r"([.\[][^ ]*): (.*)", re.DOTALL)


class Misfit(CodecError):
    """A value is readable but is not of the declared type; the text says where: `$.width: expected int, got str`."""


def problem_in(error: msgspec.ValidationError) -> str:
    """Return what msgspec says about a value, the path first."""
    text = str(error)
    found = _PATH.fullmatch(text)
    path, text = (found[2], found[1]) if found else ("$", text)
    if inner := _INNER_PATH.fullmatch(text):  # a model's own path, inside of msgspec's
        path, text = path + inner[1], inner[2]
    return f"{path}: {text[:1].lower()}{text[1:]}".replace("`", "")


_NO_KEYS: Final = (bool, tuple, frozenset, type(None))
"""Types of the keys that JSON objects cannot have."""


def check_fields(kind: Any) -> None:
    """Raise `TypeError` if msgspec would leave out fields."""
    for part in parts(kind, inside_models=False):
        for field in getattr(part, "__attrs_attrs__", ()):
            if field.name.startswith("_"):
                raise TypeError(f"{field.name} of {show(part)} would be lost, as its name begins with _: rename it")


def check_keys(kind: Any, codec: str, *, made_from_texts: bool) -> None:
    """Raise `TypeError` if keys of a dict would be others.

    `made_from_texts` says whether paths, for example, are made from texts again, as Pydantic does.
    """
    for part in parts(kind, inside_models=made_from_texts):
        origin, arguments = get_origin(part), get_args(part)
        if not (isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2):
            continue
        key = get_origin(bare(arguments[0])) or bare(arguments[0])
        is_class = isinstance(key, type) and key is not UnionType
        if codec == "json" and (key in (Union, UnionType) or (is_class and issubclass(key, _NO_KEYS))):
            instead = "dict[str, …]" if made_from_texts else "dict[str, …] or codec='msgpack'"
            raise TypeError(f"keys of {show(part)} would be texts in JSON: use {instead}")
        if is_class and issubclass(key, tuple(TEXTS)) and not made_from_texts:
            raise TypeError(f"keys of {show(part)} are not made from texts again: use dict[str, …]")


def refused_union(kind: Any) -> str:
    """Return what to write instead of a union that msgspec does not take; nothing if there is none."""
    for part in reversed(list(parts(kind, inside_models=False))):
        if not is_union(part):
            continue
        try:
            msgspec.json.Decoder(part)
        except TypeError:
            text = f"its values in {show(part)} cannot be told apart"
            if sum(isinstance(each, type) and issubclass(each, msgspec.Struct) for each in get_args(part)) > 1:
                return f"{text}: give each Struct a tag, as in class Card(msgspec.Struct, tag=True)"
            return (
                f"{text}: a union may have several dataclasses, but otherwise only one type whose values are objects, "
                "one of arrays, and one of texts, such as str, dates, bytes or enums"
            )
    return ""
