"""The parts of a type: what is asked of it before values are sent."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec


def parts(kind: Any, *, inside_models: bool = True) -> Iterator[Any]:
    """Yield a type and all those of which it consists, each once, with the metadata of `Annotated` among them.

    Raises `NameError` for annotations that cannot be resolved.
    """
    left: list[Any] = [kind]
    found: list[Any] = []
    while left:
        each = left.pop()
        if any(each is other or (type(each) is type(other) and each == other) for other in found):
            continue
        found.append(each)
        yield each
        left += reversed(arguments_of(each))
        if inside_models or not is_model(each):
            left += [part for field in fields_of(each).values() for part in field]


def arguments_of(kind: Any) -> list[Any]:
    """Return the types and the metadata with which a type is written, as `int` in `list[int]`."""
    if get_origin(kind) is Annotated:
        return [kind.__origin__, *kind.__metadata__]
    found: list[Any] = []
    for each in get_args(kind):
        found += each if isinstance(each, list) else [each]
    if not isinstance(kind, type):
        for attribute in ("__supertype__", "__value__"):  # of a NewType, and of `type X = …`
            if hasattr(kind, attribute):
                found.append(getattr(kind, attribute))
    return found


def fields_of(kind: Any) -> Mapping[str, list[Any]]:
    """Return the fields of a class of values, with the type of each, and what else is said of it."""
    kind = get_origin(kind) or kind
    if is_model(kind):
        return {name: [field.annotation, *field.metadata] for name, field in kind.model_fields.items()}
    if not isinstance(kind, type):
        return {}
    if (
        dataclasses.is_dataclass(kind)
        or typing.is_typeddict(kind)
        or issubclass(kind, msgspec.Struct)
        or hasattr(kind, "__attrs_attrs__")
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    ):
        return {name: [hint] for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
    return {}


def is_model(kind: Any) -> bool:
    """Return whether a type is a model of Pydantic."""
    return isinstance(kind, type) and hasattr(kind, "model_validate") and hasattr(kind, "model_json_schema")


def is_union(kind: Any) -> bool:
    """Return whether a type is a union."""
    return get_origin(kind) in (Union, UnionType)


def bare(kind: Any) -> Any:
    """Return a type without the metadata of `Annotated`; for a NewType, the type that its values have."""
    if get_origin(kind) is Annotated:
        return bare(kind.__origin__)
    supertype = getattr(kind, "__supertype__", None)
    return kind if supertype is None else bare(supertype)


def show(kind: Any) -> str:
    """Return the name of a type as people write it."""
    name = kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return name.replace("typing.", "")
