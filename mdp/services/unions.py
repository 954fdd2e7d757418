"""Unions of dataclasses: each value travels with a tag that says which one it is.

`BankTransfer | Card` is sent as `{"type": "Card", …}`: the tag is the name of the class.  If all of them have a field
such as `kind: Literal["card"]`, each with another value, that field is the tag.  msgspec knows this of its Structs, not
of dataclasses, so each dataclass that is in a union, or contains one, gets a Struct with the same fields, which travels
in its place.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from .type_parts import bare, fields_of, is_union, parts, show

TAG: Final = "type"
"""The field of the tag, unless the dataclasses have one of their own."""
_TOLD: Final = (type(None), bool, int, float, str)
"""Types of the defaults that schemas tell."""

Tag = tuple[str, str | int]
"""A field, and the value that it has in values of one class."""


def unions_in(kind: Any) -> list[tuple[type, ...]]:
    """Return the dataclasses of each union within a type that has several."""
    found = [_dataclasses_in(each) for each in parts(kind, inside_models=False) if is_union(each)]
    return [each for each in found if len(each) > 1]


def _dataclasses_in(union: Any) -> tuple[type, ...]:
    members = map(bare, get_args(union))
    return tuple(each for each in members if isinstance(each, type) and dataclasses.is_dataclass(each))


@dataclasses.dataclass(frozen=True)
class _Tagged:
    """A dataclass, and the Struct that travels in its place."""

    kind: type
    struct: Any
    names: tuple[str, ...]
    """The fields that both have."""
    set_later: frozenset[str]
    """Those that are not arguments of the dataclass."""
    own_tag: Mapping[str, str | int]
    """The field of the dataclass that is the tag, and its value."""


class Tagging:
    """The Structs in place of the dataclasses of a type, and the conversion of values.

    Raises `TypeError` if the dataclasses of a union cannot be told apart, or are within a type that cannot be replaced.
    """

    def __init__(self, kind: Any, unions: Sequence[tuple[type, ...]]) -> None:
        self._tags = _tags(unions)
        self._tagged: dict[type, _Tagged | None] = {}
        """By dataclass; None for types that travel as they are."""
        self._kinds: dict[type, _Tagged] = {}
        """By Struct."""
        self.kind = self._replaced(kind)
        """The type that travels."""

    # ── types ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _replaced(self, kind: Any) -> Any:
        """Return the type that travels in place of another."""
        if isinstance(kind, type) and kind in self._tagged:
            found = self._tagged[kind]
            return kind if found is None else found.struct
        if not any(isinstance(each, type) and each in self._tags for each in parts(kind, inside_models=False)):
            return kind
        origin = get_origin(kind)
        if isinstance(kind, type) and origin is None and dataclasses.is_dataclass(kind):
            return self._add(kind)
        if origin is Annotated:
            return Annotated[self._replaced(kind.__origin__), *kind.__metadata__]
        if is_union(kind):
            return Union[tuple(map(self._replaced, get_args(kind)))]  # noqa: UP007 - their number is not known here
        if origin is None or dataclasses.is_dataclass(origin) or fields_of(origin):
            raise TypeError(f"{show(kind)} contains a union of dataclasses: use a dataclass in its place")
        return origin[tuple(each if each is ... else self._replaced(each) for each in get_args(kind))]

    def _add(self, kind: type) -> Any:
        """Return a Struct with the fields of a dataclass."""
        own = {each.name: each for each in dataclasses.fields(kind)}
        hints = get_type_hints(kind, include_extras=True)
        if any(isinstance(each, dataclasses.InitVar) for each in hints.values()):
            raise TypeError(f"dataclass {show(kind)} has an InitVar, of which nothing is left to send")
        field, tag = self._tags.get(kind, (None, None))
        names = tuple(name for name in own if name != field)
        text = kind.__doc__ or ""
        struct = msgspec.defstruct(
            kind.__name__,
            [(name, Any, _default(own[name])) for name in names],
            tag_field=field, tag=tag, kw_only=True, frozen=True, module=kind.__module__,
            namespace={} if text.startswith(f"{kind.__name__}(") else {"__doc__": text},
        )  # fmt: skip
        later = frozenset(name for name in names if not own[name].init)
        own_tag = {field: tag} if field is not None and tag is not None and field in own and own[field].init else {}
        tagged = _Tagged(kind, struct, names, later, own_tag)
        self._tagged[kind], self._kinds[struct] = tagged, tagged
        kinds = {name: self._replaced(hints[name]) for name in names}  # only now, since it may contain itself
        struct.__annotations__ = {
            name: each if not _is_unset(own[name]) else Union[each, msgspec.UnsetType]  # noqa: UP007 - not all have |
            for name, each in kinds.items()
        }
        return struct

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def to_wire(self, value: Any) -> Any:
        """Return a value with Structs in place of dataclasses."""
        tagged = self._of(type(value))
        if tagged is not None:
            for name, tag in tagged.own_tag.items():
                if (told := getattr(value, name)) != tag:
                    raise ValueError(f"{name} of a {show(tagged.kind)} is {told!r:.100}: it must be {tag!r}")
            return tagged.struct(**{name: self.to_wire(getattr(value, name)) for name in tagged.names})
        if isinstance(value, dict):
            return {key: self.to_wire(each) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.to_wire(each) for each in value]
        return value

    def from_wire(self, value: Any) -> Any:
        """Return a value with dataclasses in place of Structs.  Raises what the dataclasses raise."""
        kind = type(value)
        if (tagged := self._kinds.get(kind)) is not None:
            given = {name: each for name in tagged.names if (each := getattr(value, name)) is not msgspec.UNSET}
            found = {name: self.from_wire(each) for name, each in given.items()}
            later = {name: found.pop(name) for name in tagged.set_later & found.keys()}
            made = tagged.kind(**found, **tagged.own_tag)
            for name, each in later.items():
                object.__setattr__(made, name, each)
            return made
        if kind is dict:
            return {key: self.from_wire(each) for key, each in value.items()}
        if kind in (list, tuple, set, frozenset):
            return kind(map(self.from_wire, value))
        return value

    def _of(self, kind: type) -> _Tagged | None:
        """Return what travels in place of values of a class, or of the nearest class above it."""
        if kind not in self._tagged:
            above = (self._tagged.get(base) for base in kind.__mro__[1:])
            self._tagged[kind] = next((found for found in above if found is not None), None)
        return self._tagged[kind]


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return msgspec.NODEFAULT
    return msgspec.UNSET if _is_unset(field) else field.default


def _is_unset(field: "dataclasses.Field[Any]") -> bool:
    """Return whether the dataclass itself sets the field to its default, if it is left out."""
    if field.default is dataclasses.MISSING:
        return field.default_factory is not dataclasses.MISSING
    return type(field.default) not in _TOLD


def _tags(unions: Sequence[tuple[type, ...]]) -> dict[type, Tag]:
    """Return the tag of each dataclass.  Raises `TypeError` if there is none by which they can be told apart."""
    found: dict[type, Tag] = {}
    for union in unions:
        for kind, tag in zip(union, _own_tags(union) or _named_tags(union), strict=True):
            if found.setdefault(kind, tag) != tag:
                raise TypeError(f"{show(kind)} is in several unions, whose dataclasses {_REMEDY}")
    return found


_REMEDY: Final = 'cannot be told apart: give each a field such as kind: Literal["card"] = "card"'


def _own_tags(union: tuple[type, ...]) -> list[Tag] | None:
    """Return a field of all dataclasses that has a value of its own in each."""
    hints = [get_type_hints(each) for each in union]
    for name in hints[0]:
        kinds = [each.get(name) for each in hints]
        values = [get_args(each) for each in kinds if get_origin(each) is Literal]
        if len(values) == len(union) and all(len(each) == 1 for each in values):
            tags = [each[0] for each in values]
            if len(set(tags)) == len(tags) and ({type(tag) for tag in tags} in ({str}, {int})):
                return [(name, tag) for tag in tags]
    return None


def _named_tags(union: tuple[type, ...]) -> list[Tag]:
    names = [each.__name__ for each in union]
    if len(set(names)) < len(names) or any(TAG in fields_of(each) for each in union):
        raise TypeError(f"the dataclasses {', '.join(map(show, union))} of a union {_REMEDY}")
    return [(TAG, name) for name in names]
